// Sixteen lanes in plain C++: correct everywhere, and what other machines' compilers vectorise.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#include "../floats.h"

namespace slipstream::scalar {

constexpr const char* kName = "scalar";
constexpr int kMaxRows = 4, kRowsAlone = 4;
constexpr int kValueSums = 1;

struct F { float v[16]; };
struct I { int32_t v[16]; };
struct Bytes { uint8_t v[64]; };

#define SLIPSTREAM_LANES for (int i = 0; i < 16; ++i)

inline F all(float x) { F r; SLIPSTREAM_LANES r.v[i] = x; return r; }
inline F zero() { return all(0.0f); }
inline F load(const float* p) { F r; std::memcpy(r.v, p, 64); return r; }
inline void store(float* p, F x) { std::memcpy(p, x.v, 64); }
// Addresses need not be aligned, so lanes are copied.
inline F load_f16(const uint16_t* p) {
  uint16_t h[16];
  std::memcpy(h, p, 32);
  F r;
  SLIPSTREAM_LANES r.v[i] = from_f16(h[i]);
  return r;
}
inline F load_bf16(const uint16_t* p) {
  uint16_t h[16];
  std::memcpy(h, p, 32);
  F r;
  SLIPSTREAM_LANES r.v[i] = from_bf16(h[i]);
  return r;
}
inline void store_f16(uint16_t* p, F x) {
  uint16_t h[16];
  SLIPSTREAM_LANES h[i] = to_f16(x.v[i]);
  std::memcpy(p, h, 32);
}
inline F load_u8(const uint8_t* p) { F r; SLIPSTREAM_LANES r.v[i] = p[i]; return r; }
inline F load_i8(const int8_t* p) { F r; SLIPSTREAM_LANES r.v[i] = p[i]; return r; }
inline void store_i8(int8_t* p, I x) { SLIPSTREAM_LANES p[i] = (int8_t)x.v[i]; }

inline F add(F a, F b) { SLIPSTREAM_LANES a.v[i] += b.v[i]; return a; }
inline F sub(F a, F b) { SLIPSTREAM_LANES a.v[i] -= b.v[i]; return a; }
inline F mul(F a, F b) { SLIPSTREAM_LANES a.v[i] *= b.v[i]; return a; }
inline F div(F a, F b) { SLIPSTREAM_LANES a.v[i] /= b.v[i]; return a; }
// As the vector instructions: the second operand where either is NaN.
inline F max(F a, F b) { SLIPSTREAM_LANES a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F min(F a, F b) { SLIPSTREAM_LANES a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
inline F abs(F a) { SLIPSTREAM_LANES a.v[i] = std::fabs(a.v[i]); return a; }
inline F fma(F a, F b, F c) { SLIPSTREAM_LANES c.v[i] += a.v[i] * b.v[i]; return c; }
inline F round(F a) { SLIPSTREAM_LANES a.v[i] = std::nearbyint(a.v[i]); return a; }
inline F exp2i(F n) {
  SLIPSTREAM_LANES {
    int32_t bits = (int32_t)((uint32_t)((int32_t)n.v[i] + 127) << 23);
    std::memcpy(&n.v[i], &bits, 4);
  }
  return n;
}
inline F select(uint32_t lanes, F a, F b) { SLIPSTREAM_LANES a.v[i] = lanes >> i & 1 ? a.v[i] : b.v[i]; return a; }
inline float sum(F x) {
  for (int step = 8; step; step /= 2)
    for (int i = 0; i < step; ++i) x.v[i] += x.v[i + step];
  return x.v[0];
}
inline float largest(F x) {
  float best = x.v[0];
  for (int i = 1; i < 16; ++i) best = best > x.v[i] ? best : x.v[i];
  return best;
}

inline I all(int32_t x) { I r; SLIPSTREAM_LANES r.v[i] = x; return r; }
inline I to_int(F x) { I r; SLIPSTREAM_LANES r.v[i] = round_to_int(x.v[i]); return r; }
inline int32_t sum(I x) { int32_t s = 0; SLIPSTREAM_LANES s += x.v[i]; return s; }

inline Bytes load_bytes(const uint8_t* p) { Bytes r; std::memcpy(r.v, p, 64); return r; }
inline void store_bytes(uint8_t* p, Bytes x) { std::memcpy(p, x.v, 64); }
inline Bytes low_nibbles(Bytes x) { for (auto& b : x.v) b &= 15; return x; }
inline Bytes high_nibbles(Bytes x) { for (auto& b : x.v) b >>= 4; return x; }
inline Bytes with_fifth_bit(Bytes x, const uint8_t* p) {
  for (int i = 0; i < 64; ++i) x.v[i] |= (p[i / 8] >> (i % 8) & 1) << 4;
  return x;
}
template <int At, int Above>
inline Bytes six_bits(Bytes low, Bytes high) {
  for (int i = 0; i < 64; ++i) low.v[i] = (low.v[i] >> At & 15) | (high.v[i] >> Above & 3) << 4;
  return low;
}
template <bool Wide>
inline I dot(I acc, Bytes w, const int8_t* quad) {
  SLIPSTREAM_LANES for (int j = 0; j < 4; ++j) acc.v[i] += (int32_t)w.v[4 * i + j] * quad[j];
  return acc;
}
// Where multiply-adds round twice, integers are converted.
constexpr int32_t kIntegerZero = 0;
inline F scaled_zero(F) { return zero(); }
inline F scaled(I products, F scale, F) { SLIPSTREAM_LANES scale.v[i] *= (float)products.v[i]; return scale; }
inline F sums(const F* x) { F r; SLIPSTREAM_LANES r.v[i] = sum(x[i]); return r; }

#undef SLIPSTREAM_LANES

}  // namespace slipstream::scalar
