// Philox 4x64-10, the generator of `slipstream.maths.noise`: noise that is looked up, not drawn.
//
// Everything here is private to the file that includes it, as files are compiled for different
// instruction sets.
#pragma once
#include <cstdint>

namespace slipstream {

// Where a row's noise lies: key (seed, branch), counter (1 + token / 4, position, stream, origin).
struct NoiseRow {
  uint64_t seed, branch, position, stream, origin;
};

namespace {

struct Wide {
  uint64_t high, low;
};

inline Wide multiply(uint64_t x, uint64_t y) {
  unsigned __int128 product = (unsigned __int128)x * y;
  return {(uint64_t)(product >> 64), (uint64_t)product};
}

// The words of tokens 4 block .. 4 block + 3.
inline void philox(const NoiseRow& at, uint64_t block, uint64_t* words) {
  uint64_t k0 = at.seed, k1 = at.branch;
  uint64_t c0 = 1 + block, c1 = at.position, c2 = at.stream, c3 = at.origin;
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    Wide a = multiply(c0, 0xD2E7470EE14C6C93), b = multiply(c2, 0xCA5A826395121157);
    c0 = b.high ^ c1 ^ k0;
    c1 = b.low;
    c2 = a.high ^ c3 ^ k1;
    c3 = a.low;
    k0 += 0x9E3779B97F4A7C15;
    k1 += 0xBB67AE8584CAA73B;
  }
  words[0] = c0;
  words[1] = c1;
  words[2] = c2;
  words[3] = c3;
}

}  // namespace
}  // namespace slipstream
