// How packed weights lie in memory.
//
// A tile is 16 output rows. Along its columns it is a run of spans, each complete in itself, so
// that one linear walk reads a tile once. A span covers 32 columns, or 256 of the K types:
//
//   q4_0 q5_0 q8_0   | codes                     | scale 16 x f16 |
//   q4_1 q5_1        | codes                     | scale 16 x f16 | minimum 16 x f16 |
//   q4_k q5_k        | d 16 x f16 | dmin 16 x f16 | 8 groups of: codes | scale 16 x u8 | minimum 16 x u8 |
//   q6_k             | d 16 x f16 |                 8 groups of: codes | scales 2 x 16 x i8, a half group each |
//   f32 f16 bf16     | 32 columns of 16 floats |
//
// Codes of a group of 32 columns: `quad` j holds columns 4j .. 4j+3 of all 16 rows, row by row: the
// 64 bytes that one dot-product instruction multiplies with four broadcast activations.
//
//   8 bits   quad 0 | quad 1 | .. | quad 7                          512 bytes, code = value + 128
//   4 bits   64 bytes each for quads (0, 1), (2, 3), (4, 5), (6, 7): first in low nibbles, second
//            in high ones                                           256 bytes
//   5 bits   as 4 bits, then bit 4 of each: 8 bytes a quad          +64 bytes
//   6 bits   as 4 bits, then bits 4 and 5: two bits of quads 0 .. 3 in 64 bytes, of 4 .. 7 in
//            64 more                                                +128 bytes
#pragma once
#include <cstdint>

namespace slipstream {

constexpr int kTileRows = 16;
constexpr int kGroup = 32;   // columns that share an activation scale
constexpr int kQuads = 8;    // per group
constexpr int kOffsets[] = {8, 16, 32, 128};

enum class Format : int { q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, f32, f16, bf16 };

template <Format format>
struct Layout {
  static constexpr Format kind = format;
  static constexpr bool is_float = format == Format::f32 || format == Format::f16 || format == Format::bf16;
  static constexpr bool is_k = format == Format::q4_k || format == Format::q5_k || format == Format::q6_k;
  static constexpr bool is_halved = format == Format::q6_k;  // scales change within a group
  static constexpr bool has_min =
      format == Format::q4_1 || format == Format::q5_1 || format == Format::q4_k || format == Format::q5_k;
  static constexpr int bits = format == Format::q8_0                                ? 8
                              : format == Format::q6_k                              ? 6
                              : format == Format::q5_0 || format == Format::q5_1 || format == Format::q5_k ? 5
                                                                                    : 4;
  // Which of kOffsets is taken off a code, or -1.
  static constexpr int offset_index = format == Format::q4_0   ? 0
                                      : format == Format::q5_0 ? 1
                                      : format == Format::q6_k ? 2
                                      : format == Format::q8_0 ? 3
                                                               : -1;
  static constexpr int offset = offset_index < 0 ? 0 : kOffsets[offset_index];
  static constexpr int code_bytes = kTileRows * kGroup * bits / 8;
  static constexpr int groups = is_k ? 8 : 1;  // per span
  static constexpr int columns = groups * kGroup;
  static constexpr int header_bytes = !is_k ? 0 : is_halved ? 32 : 64;
  static constexpr int group_bytes = code_bytes + (is_k || !has_min ? 32 : 64);
  static constexpr int span_bytes = is_float ? kTileRows * kGroup * (format == Format::f32 ? 4 : 2)
                                             : header_bytes + groups * group_bytes;
};

// Bytes of a tile of so many columns.
template <class L>
constexpr int64_t tile_bytes(int64_t columns) {
  return columns / (L::is_float ? kGroup : L::columns) * L::span_bytes;
}

// Calls f(Layout<format>{}) for a format known at run time.
template <class Function>
decltype(auto) with_layout(Format format, Function&& f) {
  switch (format) {
    case Format::q4_0: return f(Layout<Format::q4_0>{});
    case Format::q4_1: return f(Layout<Format::q4_1>{});
    case Format::q5_0: return f(Layout<Format::q5_0>{});
    case Format::q5_1: return f(Layout<Format::q5_1>{});
    case Format::q8_0: return f(Layout<Format::q8_0>{});
    case Format::q4_k: return f(Layout<Format::q4_k>{});
    case Format::q5_k: return f(Layout<Format::q5_k>{});
    case Format::q6_k: return f(Layout<Format::q6_k>{});
    case Format::f32: return f(Layout<Format::f32>{});
    case Format::f16: return f(Layout<Format::f16>{});
    default: return f(Layout<Format::bf16>{});
  }
}

}  // namespace slipstream
