// The kernels, written once on sixteen lanes. Included by one source file per instruction set,
// which has defined SIMD as the namespace of its lanes.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "floats.h"
#include "kernels.h"
#include "sample.h"

namespace slipstream::SIMD {
namespace {

// ---------------------------------------------------------------- linear

// Reads packed codes, unpacking them on the fly.
template <class L>
struct PackedReader {
  static constexpr bool has_min = L::has_min, is_halved = L::is_halved, is_wide = L::bits == 8;
  static constexpr int offset_index = L::offset_index;
  const uint8_t* p;
  int group = 0;  // within the span
  F d, dmin;

  explicit PackedReader(const uint8_t* tile) : p(tile) {}

  // To the next group; call before reading each.
  void next() {
    if constexpr (L::is_k) {
      if (group == 0) {
        d = load_f16((const uint16_t*)p);
        if constexpr (has_min) dmin = sub(zero(), load_f16((const uint16_t*)(p + 32)));
        p += L::header_bytes;
      }
      group = (group + 1) % L::groups;
    }
    codes = p;
    p += L::group_bytes;
    // Far enough ahead for memory, near enough to stay in the first cache.
    for (int i = 0; i < L::group_bytes; i += 64) __builtin_prefetch(p + 16 * L::group_bytes + i);
  }
  // Codes of quads 2 c and 2 c + 1.
  void pair(int c, Bytes& first, Bytes& second) const {
    if constexpr (L::bits == 8) {
      first = load_bytes(codes + 128 * c);
      second = load_bytes(codes + 128 * c + 64);
      return;
    }
    Bytes x = load_bytes(codes + 64 * c);
    if constexpr (L::bits == 6) {
      Bytes high = load_bytes(codes + 256 + 64 * (c / 2));
      first = c % 2 ? six_bits<0, 4>(x, high) : six_bits<0, 0>(x, high);
      second = c % 2 ? six_bits<4, 6>(x, high) : six_bits<4, 2>(x, high);
      return;
    }
    first = low_nibbles(x);
    second = high_nibbles(x);
    if constexpr (L::bits == 5) {
      first = with_fifth_bit(first, codes + 256 + 16 * c);
      second = with_fifth_bit(second, codes + 256 + 16 * c + 8);
    }
  }
  F scale(int half) const {
    const uint8_t* tail = codes + L::code_bytes;
    if constexpr (L::is_halved) return mul(load_i8((const int8_t*)tail + 16 * half), d);
    if constexpr (L::is_k) return mul(load_u8(tail), d);
    return load_f16((const uint16_t*)tail);
  }
  F min() const {
    const uint8_t* tail = codes + L::code_bytes;
    if constexpr (L::is_k) return mul(load_u8(tail + 16), dmin);
    return load_f16((const uint16_t*)(tail + 32));
  }

 private:
  const uint8_t* codes = nullptr;
};

// Reads a tile unpacked to bytes: per group 8 quads, then scales (of both halves) and minima.
template <class L>
struct UnpackedReader {
  static constexpr bool has_min = L::has_min, is_halved = L::is_halved, is_wide = L::bits == 8;
  static constexpr int offset_index = L::offset_index;
  static constexpr int group_bytes = 512 + 64 * (1 + (has_min || is_halved));
  const uint8_t* p;

  explicit UnpackedReader(const uint8_t* unpacked) : p(unpacked - group_bytes) {}
  void next() { p += group_bytes; }
  void pair(int c, Bytes& first, Bytes& second) const {
    first = load_bytes(p + 128 * c);
    second = load_bytes(p + 128 * c + 64);
  }
  F scale(int half) const { return load((const float*)(p + 512 + 64 * half)); }
  F min() const { return load((const float*)(p + 576)); }
};

// Reads packed codes and leaves them unpacked, for the rows that come after.
template <class L>
struct UnpackingReader : PackedReader<L> {
  using Packed = PackedReader<L>;
  uint8_t* out;

  UnpackingReader(const uint8_t* tile, uint8_t* unpacked)
      : Packed(tile), out(unpacked - UnpackedReader<L>::group_bytes) {}
  void next() {
    Packed::next();
    out += UnpackedReader<L>::group_bytes;
  }
  void pair(int c, Bytes& first, Bytes& second) const {
    Packed::pair(c, first, second);
    store_bytes(out + 128 * c, first);
    store_bytes(out + 128 * c + 64, second);
  }
  F scale(int half) const {
    F scale = Packed::scale(half);
    store((float*)(out + 512 + 64 * half), scale);
    return scale;
  }
  F min() const {
    F min = Packed::min();
    store((float*)(out + 576), min);
    return min;
  }
};

// A block of N rows of activations, from `row` on, times one tile. Integers within a group are
// exact; floats are added group by group.
template <int N, class Reader>
inline void tile_rows(Reader w, const Activations& x, int64_t row, float* out) {
  constexpr int halves = Reader::is_halved ? 2 : 1;
  constexpr bool has_offset = Reader::offset_index >= 0;
  const int64_t groups = x.columns / kGroup, begin = row * groups;
  const int8_t* codes = x.codes + begin * kGroup;
  const float *scales = x.scales + begin, *totals = x.totals + begin;
  const int32_t* starts = has_offset ? x.starts[Reader::offset_index] + begin * halves : nullptr;
  F acc[N];
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) acc[n] = zero();
  for (int64_t g = 0; g < groups; ++g) {
    w.next();
#pragma GCC unroll 2
    for (int half = 0; half < halves; ++half) {
      I products[N];
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) products[n] = all(has_offset ? starts[half * N + n] : kIntegerZero);
#pragma GCC unroll 4
      for (int c = 4 / halves * half; c < 4 / halves * (half + 1); ++c) {
        Bytes first, second;
        w.pair(c, first, second);
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) {
          products[n] = dot<Reader::is_wide>(products[n], first, codes + n * kGroup + 8 * c);
          products[n] = dot<Reader::is_wide>(products[n], second, codes + n * kGroup + 8 * c + 4);
        }
      }
      const F scale = w.scale(half), nothing = scaled_zero(scale);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) acc[n] = fma(scaled(products[n], scale, nothing), all(scales[n]), acc[n]);
    }
    if constexpr (Reader::has_min) {
      F min = w.min();
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) acc[n] = fma(min, all(totals[n]), acc[n]);
    }
    codes += N * kGroup;
    scales += N;
    totals += N;
    if (has_offset) starts += N * halves;
  }
#pragma GCC unroll 16
  for (int n = 0; n < N; ++n) store(out + n * kTileRows, acc[n]);
}

// Calls f(integral_constant<N>) for a number of rows known at run time, 1 .. Most.
template <int Most, class Function>
void with_count(int64_t count, Function&& f) {
  if (count == Most) f(std::integral_constant<int, Most>{});
  else if constexpr (Most > 1) with_count<Most - 1>(count, f);
}

// Blocks are as even as can be.
int64_t block_rows(int64_t rows) {
  if (rows <= kRowsAlone) return rows;
  const int64_t blocks = (rows + kMaxRows - 1) / kMaxRows;
  return (rows + blocks - 1) / blocks;
}

// The first of many blocks unpacks the tile, beside its arithmetic; of two, storing and loading
// would cost what it saves.
template <class L>
void packed_tile(const uint8_t* tile, const Activations& x, float* out, uint8_t* scratch) {
  for (int64_t row = 0; row < x.rows; row += x.block) {
    with_count<kRowsAlone>(std::min(x.block, x.rows - row), [&](auto n) {
      constexpr int N = decltype(n)::value;
      float* to = out + row * kTileRows;
      if (x.rows <= 2 * x.block) tile_rows<N>(PackedReader<L>(tile), x, row, to);
      else if (row == 0) tile_rows<N>(UnpackingReader<L>(tile, scratch), x, row, to);
      else tile_rows<N>(UnpackedReader<L>(scratch), x, row, to);
    });
  }
}

void linear_tile(Format format, const uint8_t* tile, const Activations& x, float* out, uint8_t* scratch) {
  with_layout(format, [&](auto layout) {
    using L = decltype(layout);
    if constexpr (!L::is_float) packed_tile<L>(tile, x, out, scratch);
  });
}

template <Format format>
F load_lanes(const uint8_t* p) {
  if constexpr (format == Format::f32) return load((const float*)p);
  else if constexpr (format == Format::f16) return load_f16((const uint16_t*)p);
  else return load_bf16((const uint16_t*)p);
}

// Four accumulators, so that additions need not wait for each other: column k goes to k % 4.
template <int N, Format format>
void float_tile_rows(const uint8_t* w, Rows x, int64_t row, int64_t columns, float* out) {
  constexpr int size = kTileRows * (format == Format::f32 ? 4 : 2);
  F acc[N][4];
  for (auto& a : acc) a[0] = a[1] = a[2] = a[3] = zero();
  for (int64_t k = 0; k < columns; k += 4, w += 4 * size) {
    __builtin_prefetch(w + 2048);
    if constexpr (size * 4 > 64) __builtin_prefetch(w + 2112);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      F lanes = load_lanes<format>(w + j * size);
#pragma GCC unroll 4
      for (int n = 0; n < N; ++n) acc[n][j] = fma(lanes, all(x.row(row + n)[k + j]), acc[n][j]);
    }
  }
  for (int n = 0; n < N; ++n)
    store(out + n * kTileRows, add(add(acc[n][0], acc[n][1]), add(acc[n][2], acc[n][3])));
}

void float_tile(Format format, const uint8_t* tile, Rows x, int64_t rows, int64_t columns, float* out) {
  constexpr int most = kMaxRows >= 4 ? 4 : kMaxRows;
  with_layout(format, [&](auto layout) {
    using L = decltype(layout);
    if constexpr (L::is_float) {
      for (int64_t row = 0; row < rows;) {
        int64_t count = std::min<int64_t>(rows - row, most);
        with_count<most>(count, [&](auto n) {
          float_tile_rows<decltype(n)::value, L::kind>(tile, x, row, columns, out + row * kTileRows);
        });
        row += count;
      }
    }
  });
}

void write_tile(const float* sums, int64_t rows, int64_t width, const float* bias, Rows residual, Rows out) {
  if (width < kTileRows) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < width; ++i) {
        const float sum = sums[r * kTileRows + i] + (bias ? bias[i] : 0.0f);
        out.row(r)[i] = residual.data ? residual.row(r)[i] + sum : sum;
      }
    return;
  }
  const F shift = bias ? load(bias) : zero();
  for (int64_t r = 0; r < rows; ++r) {
    F sum = load(sums + r * kTileRows);
    if (bias) sum = add(sum, shift);
    if (residual.data) sum = add(load(residual.row(r)), sum);
    store(out.row(r), sum);
  }
}

void quantize(Rows x, const Activations& out, int64_t begin, int64_t end, int64_t first_group, int64_t last_group) {
  const int64_t groups = out.columns / kGroup;
  for (int64_t row = begin; row < end; ++row) {
    const int64_t block = row / out.block * out.block, in_block = row - block;
    const int64_t width = std::min(out.block, out.rows - block);
    const float* in = x.row(row);
    for (int64_t g = first_group; g < last_group; ++g, in += kGroup) {
      const int64_t at = block * groups + g * width + in_block;
      F a = load(in), b = load(in + 16);
      // Zero, or NaN where anything is not finite, which the scale then carries on.
      float taint = sum(mul(add(mul(a, zero()), mul(b, zero())), zero()));
      float scale = largest(max(abs(a), abs(b))) / 127.0f + taint;
      // A subnormal scale may have no inverse: too small to count, such a group is all zeros.
      F inverse = all(scale >= FLT_MIN ? 1.0f / scale : 0.0f);
      I first = to_int(max(min(mul(a, inverse), all(127.0f)), all(-127.0f)));
      I second = to_int(max(min(mul(b, inverse), all(127.0f)), all(-127.0f)));
      store_i8(out.codes + at * kGroup, first);
      store_i8(out.codes + at * kGroup + 16, second);
      const int32_t sums[2] = {sum(first), sum(second)};
      out.scales[at] = scale;
      out.totals[at] = scale * (float)(sums[0] + sums[1]);
      for (size_t i = 0; i < std::size(kOffsets); ++i) {
        if (!out.starts[i]) continue;
        if (i != (size_t)Layout<Format::q6_k>::offset_index) {
          out.starts[i][at] = kIntegerZero - kOffsets[i] * (sums[0] + sums[1]);
        } else {
          int32_t* starts = out.starts[i] + 2 * (at - in_block) + in_block;
          starts[0] = kIntegerZero - kOffsets[i] * sums[0];
          starts[width] = kIntegerZero - kOffsets[i] * sums[1];
        }
      }
    }
  }
}

// ---------------------------------------------------------------- element by element

// Calls f on whole vectors, then on a partial one through copies that are padded with zeros.
template <int Inputs, class Function>
void each_vector(const float* const (&in)[Inputs], int64_t width, float* out, Function f) {
  int64_t i = 0;
  F v[Inputs];
  for (; i + 16 <= width; i += 16) {
    for (int j = 0; j < Inputs; ++j) v[j] = load(in[j] + i);
    store(out + i, f(v));
  }
  if (i < width) {
    float padded[16] = {};
    for (int j = 0; j < Inputs; ++j) {
      std::memcpy(padded, in[j] + i, (size_t)(width - i) * 4);
      v[j] = load(padded);
    }
    store(padded, f(v));
    std::memcpy(out + i, padded, (size_t)(width - i) * 4);
  }
}

// e^x by 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]; relative error below 2^-22.
inline F exp(F x) {
  x = max(min(x, all(88.0f)), all(-87.0f));
  F n = round(mul(x, all(1.44269504088896341f)));
  F r = fma(n, all(-0.693145751953125f), x);
  r = fma(n, all(-1.42860682030941723e-6f), r);
  F p = all(1.0f / 5040);
  p = fma(p, r, all(1.0f / 720));
  p = fma(p, r, all(1.0f / 120));
  p = fma(p, r, all(1.0f / 24));
  p = fma(p, r, all(1.0f / 6));
  p = fma(p, r, all(0.5f));
  p = fma(p, r, all(1.0f));
  p = fma(p, r, all(1.0f));
  return mul(p, exp2i(n));
}

void rms_norm(const float* x, const float* weight, float eps, int64_t width, float* out) {
  F squares = zero();
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; ++i) total += x[i] * x[i];
  F inverse = all(1.0f / std::sqrt(total / (float)width + eps));
  each_vector<2>({x, weight}, width, out, [&](F* v) { return mul(mul(v[0], inverse), v[1]); });
}

void rotate(const float* x, const float* cos, const float* sin, int64_t half, float* out) {
  const float *first = x, *second = x + half;
  each_vector<4>({first, second, cos, sin}, half, out, [](F* v) { return sub(mul(v[0], v[2]), mul(v[1], v[3])); });
  each_vector<4>({first, second, cos, sin}, half, out + half,
                 [](F* v) { return add(mul(v[1], v[2]), mul(v[0], v[3])); });
}

void gated(const float* gate, const float* up, int64_t width, bool gelu, float* out) {
  F one = all(1.0f);
  if (gelu) {
    // x (1 + tanh(y)) / 2 is x / (1 + e^-2y).
    each_vector<2>({gate, up}, width, out, [&](F* v) {
      F x = v[0], cube = mul(mul(x, x), x);
      F y = mul(all(-2.0f * 0.7978845608028654f), fma(cube, all(0.044715f), x));
      return mul(div(x, add(one, exp(y))), v[1]);
    });
  } else {
    each_vector<2>({gate, up}, width, out, [&](F* v) {
      return mul(div(v[0], add(one, exp(sub(zero(), v[0])))), v[1]);
    });
  }
}

void add_rows(const float* a, const float* b, int64_t width, float* out) {
  each_vector<2>({a, b}, width, out, [](F* v) { return add(v[0], v[1]); });
}

void scale_rows(const float* a, float factor, int64_t width, float* out) {
  each_vector<1>({a}, width, out, [&](F* v) { return mul(v[0], all(factor)); });
}

// ---------------------------------------------------------------- attention

void narrow(const float* x, int64_t width, Narrow kind, void* out) {
  if (kind == Narrow::f32) {
    std::memcpy(out, x, (size_t)width * 4);
  } else if (kind == Narrow::bf16) {
    for (int64_t i = 0; i < width; ++i) ((uint16_t*)out)[i] = to_bf16(x[i]);
  } else {
    int64_t i = 0;
    for (; i + 16 <= width; i += 16) store_f16((uint16_t*)out + i, load(x + i));
    for (; i < width; ++i) ((uint16_t*)out)[i] = to_f16(x[i]);
  }
}

// A tile is 16 keys in order of position; which of them a row sees are the bits of a mask.
constexpr int64_t kTile = 16;

struct TileFloats {
  float* keys;    // [16, head_dim]
  float* values;  // [16, head_dim]
};

template <Narrow kind>
inline void widen_head(const void* page, int64_t offset, int64_t width, float* out) {
  int64_t i = 0;
  for (; i + 16 <= width; i += 16) {
    if constexpr (kind == Narrow::f32) store(out + i, load((const float*)page + offset + i));
    else if constexpr (kind == Narrow::f16) store(out + i, load_f16((const uint16_t*)page + offset + i));
    else store(out + i, load_bf16((const uint16_t*)page + offset + i));
  }
  for (; i < width; ++i) {
    if constexpr (kind == Narrow::f32) out[i] = ((const float*)page)[offset + i];
    else if constexpr (kind == Narrow::f16) out[i] = from_f16(((const uint16_t*)page)[offset + i]);
    else out[i] = from_bf16(((const uint16_t*)page)[offset + i]);
  }
}

template <Narrow kind>
void load_tile_as(const Pages& pages, const int64_t* slots, uint32_t present, int64_t kv_head, TileFloats out) {
  const int64_t d = pages.head_dim;
  for (int j = 0; j < kTile; ++j) {
    if (present >> j & 1) {
      int64_t offset = (slots[j] * pages.num_kv_heads + kv_head) * d;
      widen_head<kind>(pages.keys, offset, d, out.keys + j * d);
      widen_head<kind>(pages.values, offset, d, out.values + j * d);
    } else {
      // Nobody looks at absent values, but a product with whatever the keys were would be garbage.
      std::memset(out.keys + j * d, 0, (size_t)d * 4);
    }
  }
}

void load_tile(const Pages& pages, const int64_t* slots, uint32_t present, int64_t kv_head, TileFloats out) {
  if (pages.kind == Narrow::f32) load_tile_as<Narrow::f32>(pages, slots, present, kv_head, out);
  else if (pages.kind == Narrow::f16) load_tile_as<Narrow::f16>(pages, slots, present, kv_head, out);
  else load_tile_as<Narrow::bf16>(pages, slots, present, kv_head, out);
}

// Asks for a tile of neighbouring slots, whose way from memory passes while another is computed.
void prefetch_tile(const Pages& pages, int64_t slot, int64_t kv_head) {
  const int64_t size = pages.kind == Narrow::f32 ? 4 : 2, stride = pages.num_kv_heads * pages.head_dim * size;
  const int64_t begin = (slot * pages.num_kv_heads + kv_head) * pages.head_dim * size;
  for (int64_t offset = begin; offset < begin + kTile * stride; offset += stride)
    for (int64_t i = 0; i < pages.head_dim * size; i += 64) {
      __builtin_prefetch((const uint8_t*)pages.keys + offset + i, 0, 1);
      __builtin_prefetch((const uint8_t*)pages.values + offset + i, 0, 1);
    }
}

// One query head at a tile: what it asks, which keys it sees, and how far its softmax has come
// (state: maximum, sum, head_dim weighted values).
struct Query {
  const float* q;
  float* state;
  uint32_t visible;
};
constexpr int kQueries = 16;  // that go through a tile together

// Products with the 16 keys. Chunks: head_dim / 16 where that is known, else 0.
template <int Chunks>
inline F tile_logits(const float* q, const float* keys, int64_t d) {
  F products[kTile];
  if constexpr (Chunks > 0) {
    F query[Chunks];
    for (int c = 0; c < Chunks; ++c) query[c] = load(q + 16 * c);
    for (int j = 0; j < kTile; ++j, keys += 16 * Chunks) {
      F a = mul(query[0], load(keys)), b = mul(query[1], load(keys + 16));
      for (int c = 2; c < Chunks; c += 2) {
        a = fma(query[c], load(keys + 16 * c), a);
        b = fma(query[c + 1], load(keys + 16 * c + 16), b);
      }
      products[j] = add(a, b);
    }
    return sums(products);
  }
  const int64_t whole = d / 16 * 16;
  for (int j = 0; j < kTile; ++j) {
    F a = zero();
    for (int64_t i = 0; i < whole; i += 16) a = fma(load(q + i), load(keys + j * d + i), a);
    products[j] = a;
  }
  F logits = sums(products);
  if (whole == d) return logits;
  alignas(64) float rest[kTile];
  store(rest, logits);
  for (int j = 0; j < kTile; ++j)
    for (int64_t i = whole; i < d; ++i) rest[j] += q[i] * keys[j * d + i];
  return load(rest);
}

// out = out * fade + the visible values by their weights, in order: 16 * Chunks elements from `offset`
// on, of neighbouring queries that see the same. Together they load a value once.
template <int Chunks, int Together>
inline void add_values(const Query* queries, const float (*weights)[kTile], const float* fades, const float* values,
                       int64_t d, int64_t offset) {
  F acc[Together][Chunks];
  for (int n = 0; n < Together; ++n)
    for (int c = 0; c < Chunks; ++c) acc[n][c] = mul(load(queries[n].state + 2 + offset + 16 * c), all(fades[n]));
  auto one = [&](int j) {
    F value[Chunks];
    for (int c = 0; c < Chunks; ++c) value[c] = load(values + j * d + offset + 16 * c);
    for (int n = 0; n < Together; ++n) {
      F w = all(weights[n][j]);
      for (int c = 0; c < Chunks; ++c) acc[n][c] = fma(w, value[c], acc[n][c]);
    }
  };
  if (queries->visible == 0xffff) {
    for (int j = 0; j < kTile; ++j) one(j);
  } else {
    for (uint32_t left = queries->visible; left; left &= left - 1) one(__builtin_ctz(left));
  }
  for (int n = 0; n < Together; ++n)
    for (int c = 0; c < Chunks; ++c) store(queries[n].state + 2 + offset + 16 * c, acc[n][c]);
}

// What a sum is multiplied by when its maximum becomes another. Mostly it stays; at first there is none.
inline float fade(float old, float now) {
  if (old == now) return 1.0f;
  return old == -INFINITY ? 0.0f : std::exp(old - now);
}

// The softmaxes of some queries go on over a tile. One step for all queries before the next, so
// that they do not wait for their own results.
template <int Chunks>
void attend_tile(const Query* queries, int count, TileFloats tile, int64_t d, float scale) {
  alignas(64) float weights[kQueries][kTile];
  float fades[kQueries];
  for (int n = 0; n < count; ++n)
    store(weights[n], mul(tile_logits<Chunks>(queries[n].q, tile.keys, d), all(scale)));
  for (int n = 0; n < count; ++n) {
    float* state = queries[n].state;
    F s = load(weights[n]);
    float best = std::max(state[0], largest(select(queries[n].visible, s, all(-INFINITY))));
    // Exponents are at most 0; a NaN among them must come through, and exp() would clamp it.
    F shifted = sub(s, all(best));
    F w = select(queries[n].visible, add(exp(shifted), mul(shifted, zero())), zero());
    store(weights[n], w);
    fades[n] = fade(state[0], best);
    state[0] = best;
    state[1] = state[1] * fades[n] + sum(w);
  }
  if constexpr (Chunks > 0) {
    constexpr int together = std::max(1, kValueSums / Chunks);
    for (int n = 0; n < count;) {
      auto sees_the_same = [&](const Query& query) { return query.visible == queries[n].visible; };
      if (n + together <= count && std::all_of(queries + n, queries + n + together, sees_the_same)) {
        add_values<Chunks, together>(queries + n, weights + n, fades + n, tile.values, d, 0);
        n += together;
      } else {
        add_values<Chunks, 1>(queries + n, weights + n, fades + n, tile.values, d, 0);
        ++n;
      }
    }
    return;
  }
  for (int n = 0; n < count; ++n) {
    float* out = queries[n].state + 2;
    int64_t i = 0;
    for (; i + 16 <= d; i += 16) add_values<1, 1>(queries + n, weights + n, fades + n, tile.values, d, i);
    for (; i < d; ++i) {
      float acc = out[i] * fades[n];
      for (uint32_t left = queries[n].visible; left; left &= left - 1) {
        int j = __builtin_ctz(left);
        acc += weights[n][j] * tile.values[j * d + i];
      }
      out[i] = acc;
    }
  }
}

void attend_tile(const Query* queries, int count, TileFloats tile, int64_t d, float scale) {
  if (d == 64) attend_tile<4>(queries, count, tile, d, scale);
  else if (d == 128) attend_tile<8>(queries, count, tile, d, scale);
  else attend_tile<0>(queries, count, tile, d, scale);
}

void clear(float* state, int64_t d) {
  state[0] = -INFINITY;
  std::fill(state + 1, state + 2 + d, 0.0f);
}

void merge(float* into, const float* from, int64_t d) {
  if (from[1] == 0.0f) return;  // nothing seen there; a NaN is not nothing
  float best = std::max(into[0], from[0]);
  float a = fade(into[0], best), b = fade(from[0], best);
  into[0] = best;
  into[1] = into[1] * a + from[1] * b;
  each_vector<2>({into + 2, from + 2}, d, into + 2, [&](F* v) { return add(mul(v[0], all(a)), mul(v[1], all(b))); });
}

void finish(const float* partial, int64_t d, float* out) {
  float inverse = 1.0f / partial[1];
  for (int64_t i = 0; i < d; ++i) out[i] = partial[2 + i] * inverse;
}

void attend(const AttentionSpan& span, const Pages& pages, const AttentionShape& shape, Rows q, int64_t begin,
            int64_t end, int64_t kv_head, int64_t first, int64_t last, float* partial, float* scratch) {
  const int64_t d = pages.head_dim, heads = shape.num_heads / pages.num_kv_heads, size = d + 2;
  const int64_t common = span.num_computed + span.num_rows - span.num_masked;  // keys all masked rows see
  TileFloats tile{scratch, scratch + kTile * d};
  float* others = scratch + 2 * kTile * d;  // states of partitions after the first
  int64_t slots[kTile];

  // How many keys a row sees, itself included; its own position among them is the last.
  auto num_keys = [&](int64_t row) {
    if (!span.num_masked) return span.num_computed + row + 1;
    int64_t count = common;
    for (int64_t i = 0; i < span.num_masked; ++i) count += span.ancestors[row * span.num_masked + i];
    return count;
  };
  const bool is_aligned = pages.block_size % kTile == 0;
  auto slot_of_key = [&](int64_t key) {
    return span.table[key / pages.block_size] * pages.block_size + key % pages.block_size;
  };
  // Slot of the key at a position on the path of `row`.
  auto slot = [&](int64_t row, int64_t position) {
    int64_t key = position;
    if (span.num_masked && position >= common) {
      const uint8_t* seen = span.ancestors + row * span.num_masked;
      int64_t i = 0;
      for (int64_t left = position - common;; ++i)
        if (seen[i] && left-- == 0) break;
      key = common + i;
    }
    return slot_of_key(key);
  };
  auto visible = [&](int64_t start, int64_t count) {  // bits of the tile at `start` for `count` keys
    uint32_t bits = 0xffff;
    if (count < start + kTile) bits &= count <= start ? 0 : (1u << (count - start)) - 1;
    int64_t oldest = shape.window ? count - shape.window : 0;
    if (oldest > start) bits &= oldest >= start + kTile ? 0 : 0xffffu << (oldest - start);
    return bits;
  };

  int64_t counts[kAttendRows];
  int64_t longest = 0;
  for (int64_t row = begin; row < end; ++row) longest = std::max(longest, counts[row - begin] = num_keys(row));

  for (int64_t part = first; part < last; ++part) {
    const int64_t stop = std::min(partition_begin(part + 1), longest);
    float* state = part == first ? partial : others;
    for (int64_t i = 0; i < (end - begin) * heads; ++i) clear(state + i * size, d);
    for (int64_t start = partition_begin(part); start < stop; start += kTile) {
      const bool shared = !span.num_masked || start + kTile <= common;
      bool loaded = false;
      Query queries[kQueries];
      int count = 0;
      auto flush = [&] {
        attend_tile(queries, count, tile, d, shape.scale);
        count = 0;
      };
      for (int64_t row = begin; row < end; ++row) {
        uint32_t bits = visible(start, counts[row - begin]);
        if (!bits) continue;
        if (!shared || !loaded) {
          flush();
          uint32_t present = bits;
          for (int64_t r = 0; shared && r < end - begin; ++r) present |= visible(start, counts[r]);
          if (shared && is_aligned) {
            slots[0] = slot_of_key(start);
            for (int j = 1; j < kTile; ++j) slots[j] = slots[0] + j;
          } else {
            for (int j = 0; j < kTile; ++j)
              if (present >> j & 1) slots[j] = slot(row, start + j);
          }
          load_tile(pages, slots, present, kv_head, tile);
          loaded = true;
          if (is_aligned && start + kTile < stop) prefetch_tile(pages, slot_of_key(start + kTile), kv_head);
        }
        for (int64_t h = 0; h < heads; ++h) {
          queries[count++] = {q.row(span.first_row + row) + (kv_head * heads + h) * d,
                              state + ((row - begin) * heads + h) * size, bits};
          if (count == kQueries) flush();
        }
      }
      flush();
    }
    if (part == first) continue;
    for (int64_t i = 0; i < (end - begin) * heads; ++i) merge(partial + i * size, state + i * size, d);
  }
}

// ---------------------------------------------------------------- sampling

#include "sample.inl"

}  // namespace

const Kernels kernels = {kName,    block_rows, quantize,   linear_tile, float_tile, write_tile, rms_norm, rotate, gated,
                         add_rows, scale_rows, narrow,     attend,      merge,      finish,     maximum,  race};

}  // namespace slipstream::SIMD
