// Narrow floats to float and back, one at a time.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace slipstream {

inline float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

inline uint32_t to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float from_bf16(uint16_t h) { return from_bits((uint32_t)h << 16); }

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
  uint32_t bits = to_bits(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return (uint16_t)(bits >> 16 | 64);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

inline float from_f16(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + ((127 - 15) << 23)));
  float tiny = (float)rest * 0x1p-24f;  // subnormal, exact
  return sign ? -tiny : tiny;
}

inline uint16_t to_f16(float x) {
  uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00 | (rest >> 13 & 0x3ff));
  if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // rounds to infinity
  if (rest < 0x38800000) return (uint16_t)(sign | (uint32_t)std::nearbyint(from_bits(rest) * 0x1p24f));
  return (uint16_t)(sign | ((rest - ((127 - 15) << 23) + 0xfff + (rest >> 13 & 1)) >> 13));
}

// To the nearest integer, ties to even, and what vector units give for what has none.
inline int32_t round_to_int(float x) {
  return std::fabs(x) < 2147483648.0f ? (int32_t)std::nearbyint(x) : INT32_MIN;
}

}  // namespace slipstream
