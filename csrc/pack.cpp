#include "pack.h"

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstring>

#include "floats.h"

namespace slipstream {
namespace {

uint16_t word(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }

// One span of one row, taken out of its GGUF block.
struct RowSpan {
  uint8_t codes[256];
  uint16_t d, dmin;     // scale and minimum as f16; of the K types those of the whole span
  uint8_t scales[16];   // K types: of groups (q6_k: of half groups, as int8)
  uint8_t mins[8];
};

template <class L>
constexpr int kBlockBytes = L::kind == Format::q4_0   ? 18
                            : L::kind == Format::q4_1 ? 20
                            : L::kind == Format::q5_0 ? 22
                            : L::kind == Format::q5_1 ? 24
                            : L::kind == Format::q8_0 ? 34
                            : L::kind == Format::q4_k ? 144
                            : L::kind == Format::q5_k ? 176
                                                      : 210;

// Scale and minimum j of the eight that the K types squeeze into 12 bytes of 6-bit numbers.
void k_scale(const uint8_t* s, int j, uint8_t& scale, uint8_t& min) {
  if (j < 4) {
    scale = s[j] & 63;
    min = s[j + 4] & 63;
  } else {
    scale = (uint8_t)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
    min = (uint8_t)(s[j + 4] >> 4 | (s[j] >> 6) << 4);
  }
}

template <class L>
void read_block(const uint8_t* b, RowSpan& out) {
  if constexpr (L::kind == Format::q8_0) {
    out.d = word(b);
    for (int i = 0; i < 32; ++i) out.codes[i] = (uint8_t)(b[2 + i] + 128);
  } else if constexpr (L::kind == Format::q6_k) {
    const uint8_t *low = b, *high = b + 128;
    for (int half = 0; half < 2; ++half, low += 64, high += 32)
      for (int i = 0; i < 32; ++i) {
        uint8_t* codes = out.codes + 128 * half + i;
        codes[0] = (uint8_t)((low[i] & 15) | (high[i] & 3) << 4);
        codes[32] = (uint8_t)((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4);
        codes[64] = (uint8_t)(low[i] >> 4 | (high[i] >> 4 & 3) << 4);
        codes[96] = (uint8_t)(low[i + 32] >> 4 | (high[i] >> 6) << 4);
      }
    std::memcpy(out.scales, b + 192, 16);
    out.d = word(b + 208);
  } else if constexpr (L::is_k) {
    out.d = word(b);
    out.dmin = word(b + 2);
    for (int j = 0; j < 8; ++j) k_scale(b + 4, j, out.scales[j], out.mins[j]);
    const uint8_t *high = b + 16, *low = L::bits == 5 ? b + 48 : b + 16;
    for (int j = 0; j < 8; ++j)
      for (int i = 0; i < 32; ++i) {
        uint8_t pair = low[32 * (j / 2) + i];
        uint8_t code = j % 2 ? pair >> 4 : pair & 15;
        if (L::bits == 5) code |= (uint8_t)((high[i] >> j & 1) << 4);
        out.codes[32 * j + i] = code;
      }
  } else {
    out.d = word(b);
    b += 2;
    if (L::has_min) {
      out.dmin = word(b);
      b += 2;
    }
    uint32_t high = 0;
    if (L::bits == 5) {
      std::memcpy(&high, b, 4);
      b += 4;
    }
    for (int i = 0; i < 16; ++i) {
      out.codes[i] = (uint8_t)((b[i] & 15) | (high >> i & 1) << 4);
      out.codes[i + 16] = (uint8_t)(b[i] >> 4 | (high >> (i + 16) & 1) << 4);
    }
  }
}

// Where code (row, column) of a group lies; `column` counts within the group.
template <class L>
void put_code(uint8_t* group, int row, int column, uint8_t code) {
  int quad = column / 4, byte = row * 4 + column % 4;
  if (L::bits == 8) {
    group[64 * quad + byte] = code;
    return;
  }
  group[64 * (quad / 2) + byte] |= (uint8_t)((code & 15) << (quad % 2 ? 4 : 0));
  if (L::bits == 5) group[256 + 8 * quad + byte / 8] |= (uint8_t)((code >> 4) << byte % 8);
  if (L::bits == 6) group[256 + 64 * (quad / 4) + byte] |= (uint8_t)((code >> 4) << 2 * (quad % 4));
}

template <class L>
uint8_t get_code(const uint8_t* group, int row, int column) {
  int quad = column / 4, byte = row * 4 + column % 4;
  if (L::bits == 8) return group[64 * quad + byte];
  uint8_t code = group[64 * (quad / 2) + byte] >> (quad % 2 ? 4 : 0) & 15;
  if (L::bits == 5) code |= (uint8_t)((group[256 + 8 * quad + byte / 8] >> byte % 8 & 1) << 4);
  if (L::bits == 6) code |= (uint8_t)((group[256 + 64 * (quad / 4) + byte] >> 2 * (quad % 4) & 3) << 4);
  return code;
}

template <class L>
void put_row(uint8_t* span, int row, const RowSpan& in) {
  auto put_word = [row](uint8_t* lanes, uint16_t x) { std::memcpy(lanes + 2 * row, &x, 2); };
  if (L::is_k) {
    put_word(span, in.d);
    if (L::has_min) put_word(span + 32, in.dmin);
  }
  for (int g = 0; g < L::groups; ++g) {
    uint8_t* group = span + L::header_bytes + g * L::group_bytes;
    for (int i = 0; i < kGroup; ++i) put_code<L>(group, row, i, in.codes[32 * g + i]);
    uint8_t* tail = group + L::code_bytes;
    if (L::is_halved) {
      tail[row] = in.scales[2 * g];
      tail[16 + row] = in.scales[2 * g + 1];
    } else if (L::is_k) {
      tail[row] = in.scales[g];
      tail[16 + row] = in.mins[g];
    } else {
      put_word(tail, in.d);
      if (L::has_min) put_word(tail + 32, in.dmin);
    }
  }
}

template <class L>
void get_row(const uint8_t* span, int row, float* out) {
  auto lane = [row](const uint8_t* lanes) { return from_f16(word(lanes + 2 * row)); };
  for (int g = 0; g < L::groups; ++g) {
    const uint8_t* group = span + L::header_bytes + g * L::group_bytes;
    const uint8_t* tail = group + L::code_bytes;
    float min = 0.0f, scale[2];
    if (L::is_halved) {
      scale[0] = lane(span) * (float)(int8_t)tail[row];
      scale[1] = lane(span) * (float)(int8_t)tail[16 + row];
    } else if (L::is_k) {
      scale[0] = scale[1] = lane(span) * (float)tail[row];
      min = -(lane(span + 32) * (float)tail[16 + row]);
    } else {
      scale[0] = scale[1] = lane(tail);
      if (L::has_min) min = lane(tail + 32);
    }
    for (int i = 0; i < kGroup; ++i) {
      float value = scale[i / 16] * (float)((int)get_code<L>(group, row, i) - L::offset);
      out[32 * g + i] = L::has_min ? value + min : value;
    }
  }
}

template <class L>
constexpr int kFloatBytes = L::kind == Format::f32 ? 4 : 2;

}  // namespace

int64_t packed_bytes(Format format, int64_t rows, int64_t columns) {
  int64_t tiles = (rows + kTileRows - 1) / kTileRows;
  return with_layout(format, [&](auto layout) { return tiles * tile_bytes<decltype(layout)>(columns); });
}

int64_t stored_row_bytes(Format format, int64_t columns) {
  return with_layout(format, [&](auto layout) -> int64_t {
    using L = decltype(layout);
    if constexpr (L::is_float) return columns * kFloatBytes<L>;
    else return columns / L::columns * kBlockBytes<L>;
  });
}

void use_large_pages([[maybe_unused]] uint8_t* data, [[maybe_unused]] int64_t bytes) {
#ifdef __linux__
  constexpr uintptr_t page = 4096;
  uintptr_t begin = ((uintptr_t)data + page - 1) / page * page, end = ((uintptr_t)data + (uintptr_t)bytes) / page * page;
  if (begin < end) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

void pack(Format format, const uint8_t* stored, const int64_t* order, int64_t rows, int64_t columns, uint8_t* packed) {
  std::memset(packed, 0, (size_t)packed_bytes(format, rows, columns));
  int64_t row_bytes = stored_row_bytes(format, columns);
  with_layout(format, [&](auto layout) {
    using L = decltype(layout);
    for (int64_t row = 0; row < rows; ++row) {
      const uint8_t* from = stored + order[row] * row_bytes;
      uint8_t* tile = packed + row / kTileRows * tile_bytes<L>(columns);
      int lane = (int)(row % kTileRows);
      if constexpr (L::is_float) {
        constexpr int size = kFloatBytes<L>;
        for (int64_t i = 0; i < columns; ++i) std::memcpy(tile + (i * kTileRows + lane) * size, from + i * size, size);
      } else {
        RowSpan span;
        for (int64_t i = 0; i < columns / L::columns; ++i) {
          read_block<L>(from + i * kBlockBytes<L>, span);
          put_row<L>(tile + i * L::span_bytes, lane, span);
        }
      }
    }
  });
}

void unpack_row(Format format, const uint8_t* packed, int64_t row, int64_t columns, float* out) {
  with_layout(format, [&](auto layout) {
    using L = decltype(layout);
    const uint8_t* tile = packed + row / kTileRows * tile_bytes<L>(columns);
    int lane = (int)(row % kTileRows);
    if constexpr (L::is_float) {
      constexpr int size = kFloatBytes<L>;
      for (int64_t i = 0; i < columns; ++i) {
        const uint8_t* p = tile + (i * kTileRows + lane) * size;
        if constexpr (L::kind == Format::f32) std::memcpy(out + i, p, 4);
        else out[i] = L::kind == Format::f16 ? from_f16(word(p)) : from_bf16(word(p));
      }
    } else {
      for (int64_t i = 0; i < columns / L::columns; ++i) get_row<L>(tile + i * L::span_bytes, lane, out + i * L::columns);
    }
  });
}

}  // namespace slipstream
