// Which tokens of a row of scores are drawn: the exponential race of
// `slipstream.maths.distributions`, without a row of noise or probabilities in memory.
//
// Token v finishes at E(v) e^d(v), where d = (largest - score) / temperature and E is exponential
// noise. Times are kept as logarithms, in double precision: they order the hopeless too.
#pragma once
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "philox.h"
#include "threads.h"

namespace slipstream {

// The first `count` tokens to finish, in order; of equal times the lower id comes first.
class Finishers {
 public:
  explicit Finishers(int64_t count);

  // A token at a distance d with its noise. Tokens come in increasing order.
  void offer(int64_t token, float distance, uint64_t word);

  // Take over what finished among later tokens.
  void merge(const Finishers& later);

  int64_t token(int64_t place) const { return places_[place].token; }

  // Who finishes after this no longer counts. The logarithm of a time, a little later than exact.
  float bar = INFINITY;

 private:
  struct Place {
    double log_time;
    int64_t token;
  };
  void insert(Place place);

  size_t count_;
  std::vector<Place> places_;
};

// Scores to race over. Temperature 0 asks for the first of the largest, and a count of 1.
struct RaceRows {
  const float* scores;       // [rows, vocab_size]
  const float* temperature;  // [rows]
  const NoiseRow* noise;     // [rows]
  int64_t rows, vocab_size, count;
};

// tokens [rows, count] = the first finishers of each row; they depend on nothing but their row.
// False if a row has NaN, +inf or nothing possible: its tokens are 0 .. count - 1.
bool race(Team& team, const Kernels& kernels, const RaceRows& in, int64_t* tokens);

// Uniform(0, 1) noise of whole rows: out is [rows, vocab_size].
void uniforms(Team& team, const NoiseRow* noise, int64_t rows, int64_t vocab_size, float* out);

}  // namespace slipstream
