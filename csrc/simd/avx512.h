// Sixteen lanes on AVX-512 with VNNI: one register each.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace slipstream::avx512 {

constexpr const char* kName = "avx512";
// Most activation rows a linear kernel keeps in registers, in a block and where there is no other
// block: some of the sums then lie in the first cache, which costs less than a second walk.
constexpr int kMaxRows = 12, kRowsAlone = 16;
// Sums over values that are kept in registers, 16 lanes each.
constexpr int kValueSums = 16;

using F = __m512;      // 16 floats
using I = __m512i;     // 16 int32
using Bytes = __m512i; // 64 bytes: 4 of each of 16 lanes

inline F zero() { return _mm512_setzero_ps(); }
inline F all(float x) { return _mm512_set1_ps(x); }
inline F load(const float* p) { return _mm512_loadu_ps(p); }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x); }
inline F load_f16(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
inline F load_bf16(const uint16_t* p) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
inline void store_f16(uint16_t* p, F x) {
  _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F load_u8(const uint8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline F load_i8(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
inline void store_i8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }

inline F add(F a, F b) { return _mm512_add_ps(a, b); }
inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
inline F div(F a, F b) { return _mm512_div_ps(a, b); }
inline F max(F a, F b) { return _mm512_max_ps(a, b); }
inline F min(F a, F b) { return _mm512_min_ps(a, b); }
inline F abs(F a) { return _mm512_abs_ps(a); }
inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
inline F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
// 2^n for whole n in the range of normal floats.
inline F exp2i(F n) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
}
// a where the lane's bit of `lanes` is set, else b.
inline F select(uint32_t lanes, F a, F b) { return _mm512_mask_blend_ps((__mmask16)lanes, b, a); }
inline float sum(F x) { return _mm512_reduce_add_ps(x); }
inline float largest(F x) { return _mm512_reduce_max_ps(x); }

inline I all(int32_t x) { return _mm512_set1_epi32(x); }
inline I to_int(F x) { return _mm512_cvtps_epi32(x); }  // to nearest, ties to even
inline int32_t sum(I x) { return _mm512_reduce_add_epi32(x); }

inline Bytes load_bytes(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void store_bytes(uint8_t* p, Bytes x) { _mm512_storeu_si512(p, x); }
inline Bytes low_nibbles(Bytes x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
inline Bytes high_nibbles(Bytes x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(15)); }
// Bit 4 of byte i from bit i of the 8 bytes at p.
inline Bytes with_fifth_bit(Bytes x, const uint8_t* p) {
  __mmask64 bits;
  std::memcpy(&bits, p, 8);
  return _mm512_mask_add_epi8(x, bits, x, _mm512_set1_epi8(16));
}
// Four bits of every byte of `low`, from bit `At` on, and above them two of `high`'s from bit `Above` on.
template <int At, int Above>
inline Bytes six_bits(Bytes low, Bytes high) {
  if constexpr (At) low = _mm512_srli_epi16(low, At);
  if constexpr (Above < 4) high = _mm512_slli_epi16(high, 4 - Above);
  if constexpr (Above > 4) high = _mm512_srli_epi16(high, Above - 4);
  // What a shift brought in from the neighbouring byte is masked: low's upper half, high's upper two bits.
  return _mm512_and_si512(_mm512_ternarylogic_epi32(low, high, _mm512_set1_epi8(15), 0xE4), _mm512_set1_epi8(63));
}
// acc + the dot product of each lane's 4 unsigned bytes with the 4 signed bytes at `quad`.
template <bool Wide>
inline I dot(I acc, Bytes w, const int8_t* quad) {
  int32_t four;
  std::memcpy(&four, quad, 4);
  return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(four));
}

// Integer sums begin at the bits of 1.5 x 2^23, whose last bit counts 1: as long as they stay within
// 2^22 they are floats already, and one multiply-add scales them and takes the beginning off. It
// rounds once, as scales have 22 bits or fewer, so that the scaled beginning is exact.
constexpr int32_t kIntegerZero = 0x4B400000;
inline F scaled_zero(F scale) { return mul(scale, all(-0x1.8p23f)); }
inline F scaled(I products, F scale, F zero) { return fma(_mm512_castsi512_ps(products), scale, zero); }

// Lane j of the result is the sum over x[j], added up in one fixed order.
inline F sums(const F* x) {
  __m512 a[8], b[8];
  for (int i = 0; i < 8; ++i) {
    // Halves of 8 lanes of two vectors side by side, added: 8 vectors of 2 x 8 partial sums.
    __m512 lo = _mm512_shuffle_f32x4(x[i], x[i + 8], 0x44), hi = _mm512_shuffle_f32x4(x[i], x[i + 8], 0xEE);
    a[i] = _mm512_add_ps(lo, hi);
  }
  for (int i = 0; i < 4; ++i) {
    __m512 lo = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88), hi = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xDD);
    b[i] = _mm512_add_ps(lo, hi);  // 128-bit lanes: x[i], x[i+8], x[i+4], x[i+12]
  }
  __m512 c0 = _mm512_add_ps(_mm512_shuffle_ps(b[0], b[2], 0x44), _mm512_shuffle_ps(b[0], b[2], 0xEE));
  __m512 c1 = _mm512_add_ps(_mm512_shuffle_ps(b[1], b[3], 0x44), _mm512_shuffle_ps(b[1], b[3], 0xEE));
  // Each 128-bit lane of c0 is (0, 0, 2, 2), of c1 (1, 1, 3, 3).
  __m512 d = _mm512_add_ps(_mm512_shuffle_ps(c0, c1, 0x88), _mm512_shuffle_ps(c0, c1, 0xDD));
  // (0, 2, 1, 3) in every 128-bit lane, lanes in order 0, 8, 4, 12.
  d = _mm512_shuffle_ps(d, d, 0xD8);
  return _mm512_shuffle_f32x4(d, d, 0xD8);
}

}  // namespace slipstream::avx512
