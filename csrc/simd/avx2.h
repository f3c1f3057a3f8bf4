// Sixteen lanes on AVX2: two registers each. With AVX-VNNI where the compiler is told to use it.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

#ifdef __AVXVNNI__
#define SLIPSTREAM_AVX2 avx2_vnni
#else
#define SLIPSTREAM_AVX2 avx2
#endif

namespace slipstream::SLIPSTREAM_AVX2 {

#ifdef __AVXVNNI__
constexpr const char* kName = "avx2_vnni";
#else
constexpr const char* kName = "avx2";
#endif
constexpr int kMaxRows = 3, kRowsAlone = 3;
constexpr int kValueSums = 1;

struct F { __m256 a, b; };
struct I { __m256i a, b; };
struct Bytes { __m256i a, b; };

inline F all(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F zero() { return all(0.0f); }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline F load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))};
}
inline F load_bf16(const uint16_t* p) {
  auto half = [](const uint16_t* q) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)q)), 16));
  };
  return {half(p), half(p + 8)};
}
inline void store_f16(uint16_t* p, F x) {
  _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128((__m128i*)(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline F load_u8(const uint8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(x, 8)))};
}
inline F load_i8(const int8_t* p) {
  __m128i x = _mm_loadu_si128((const __m128i*)p);
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x)), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)))};
}
inline void store_i8(int8_t* p, I x) {
  __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(x.a, x.b), 0xD8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F abs(F x) {
  __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F round(F x) {
  constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, kNearest), _mm256_round_ps(x.b, kNearest)};
}
inline F exp2i(F n) {
  auto half = [](__m256 x) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(x), _mm256_set1_epi32(127)), 23));
  };
  return {half(n.a), half(n.b)};
}
inline F select(uint32_t lanes, F x, F y) {
  auto mask = [](uint32_t bits) {
    __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    return _mm256_castsi256_ps(_mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32((int)bits), bit), bit));
  };
  return {_mm256_blendv_ps(y.a, x.a, mask(lanes)), _mm256_blendv_ps(y.b, x.b, mask(lanes >> 8))};
}
inline float sum(F x) {
  __m256 s = _mm256_add_ps(x.a, x.b);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
inline float largest(F x) {
  __m256 s = _mm256_max_ps(x.a, x.b);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

inline I all(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline int32_t sum(I x) {
  alignas(32) int32_t v[8];
  _mm256_store_si256((__m256i*)v, _mm256_add_epi32(x.a, x.b));
  return v[0] + v[1] + v[2] + v[3] + v[4] + v[5] + v[6] + v[7];
}

inline Bytes load_bytes(const uint8_t* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)(p + 32))};
}
inline void store_bytes(uint8_t* p, Bytes x) {
  _mm256_storeu_si256((__m256i*)p, x.a);
  _mm256_storeu_si256((__m256i*)(p + 32), x.b);
}
inline Bytes low_nibbles(Bytes x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(x.a, m), _mm256_and_si256(x.b, m)};
}
inline Bytes high_nibbles(Bytes x) {
  __m256i m = _mm256_set1_epi8(15);
  return {_mm256_and_si256(_mm256_srli_epi16(x.a, 4), m), _mm256_and_si256(_mm256_srli_epi16(x.b, 4), m)};
}
inline Bytes with_fifth_bit(Bytes x, const uint8_t* p) {
  auto half = [](__m256i bytes, const uint8_t* q) {
    uint32_t bits;
    std::memcpy(&bits, q, 4);
    __m256i spread = _mm256_shuffle_epi8(
        _mm256_set1_epi32((int)bits),
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303));
    __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    __m256i is_set = _mm256_cmpeq_epi8(_mm256_and_si256(spread, bit), bit);
    return _mm256_or_si256(bytes, _mm256_and_si256(is_set, _mm256_set1_epi8(16)));
  };
  return {half(x.a, p), half(x.b, p + 4)};
}
template <int At, int Above>
inline Bytes six_bits(Bytes low, Bytes high) {
  auto half = [](__m256i l, __m256i h) {
    l = _mm256_and_si256(_mm256_srli_epi16(l, At), _mm256_set1_epi8(15));
    if constexpr (Above < 4) h = _mm256_slli_epi16(h, 4 - Above);
    else h = _mm256_srli_epi16(h, Above - 4);
    return _mm256_or_si256(l, _mm256_and_si256(h, _mm256_set1_epi8(48)));
  };
  return {half(low.a, high.a), half(low.b, high.b)};
}
// Wide: bytes of w may exceed 127, so that pairs of products overflow 16 bits.
template <bool Wide>
inline I dot(I acc, Bytes w, const int8_t* quad) {
  int32_t four;
  std::memcpy(&four, quad, 4);
  __m256i x = _mm256_set1_epi32(four);
#ifdef __AVXVNNI__
  return {_mm256_dpbusd_avx_epi32(acc.a, w.a, x), _mm256_dpbusd_avx_epi32(acc.b, w.b, x)};
#else
  auto half = [x](__m256i sum, __m256i bytes) {
    __m256i ones = _mm256_set1_epi16(1);
    if constexpr (Wide) {
      // Even and odd bytes apart, each as 16-bit numbers.
      __m256i even_w = _mm256_and_si256(bytes, _mm256_set1_epi16(255)), odd_w = _mm256_srli_epi16(bytes, 8);
      __m256i even_x = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8), odd_x = _mm256_srai_epi16(x, 8);
      sum = _mm256_add_epi32(sum, _mm256_madd_epi16(even_w, even_x));
      return _mm256_add_epi32(sum, _mm256_madd_epi16(odd_w, odd_x));
    }
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, x), ones));
  };
  return {half(acc.a, w.a), half(acc.b, w.b)};
#endif
}

constexpr int32_t kIntegerZero = 0x4B400000;
inline F scaled_zero(F scale) { return mul(scale, all(-0x1.8p23f)); }
inline F scaled(I products, F scale, F zero) {
  return fma({_mm256_castsi256_ps(products.a), _mm256_castsi256_ps(products.b)}, scale, zero);
}

inline F sums(const F* x) {
  alignas(32) float s[16];
  for (int i = 0; i < 16; ++i) s[i] = sum(x[i]);
  return load(s);
}

}  // namespace slipstream::SLIPSTREAM_AVX2
