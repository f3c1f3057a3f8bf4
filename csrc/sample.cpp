#include "sample.h"

#include <algorithm>

namespace slipstream {
namespace {

// As in maths/noise.py: (k + 1/2) / 2^53 of the upper 53 bits as a float below 1.
float uniform(uint64_t word) {
  return std::min((float)(((double)(word >> 11) + 0.5) * 0x1p-53), 1.0f - 0x1p-24f);
}

}  // namespace

Finishers::Finishers(int64_t count) : count_((size_t)count) { places_.reserve(count_ + 1); }

void Finishers::offer(int64_t token, float distance, uint64_t word) {
  insert({distance + std::log(-std::log1p(-(double)uniform(word))), token});
}

void Finishers::merge(const Finishers& later) {
  for (const Place& place : later.places_) insert(place);
}

void Finishers::insert(Place place) {
  auto is_before = [](const Place& a, const Place& b) { return a.log_time < b.log_time; };
  places_.insert(std::upper_bound(places_.begin(), places_.end(), place, is_before), place);
  if (places_.size() > count_) places_.pop_back();
  if (places_.size() == count_) {
    const float last = (float)places_.back().log_time;
    bar = last + 1e-4f + 1e-6f * std::fabs(last);
  }
}

bool race(Team& team, const Kernels& kernels, const RaceRows& in, int64_t* tokens) {
  // Threads take whole rows, or parts of them where there are fewer rows than threads.
  const int64_t parts = in.rows < team.size() ? team.size() : 1, tasks = in.rows * parts;
  const int64_t part_size = (in.vocab_size + 16 * parts - 1) / (16 * parts) * 16;
  std::vector<float> largest((size_t)tasks);
  std::vector<Finishers> finishers((size_t)tasks, Finishers(in.count));

  auto begin = [&](int64_t task) { return std::min(task % parts * part_size, in.vocab_size); };
  auto end = [&](int64_t task) { return std::min(begin(task) + part_size, in.vocab_size); };
  auto scores = [&](int64_t task) { return in.scores + task / parts * in.vocab_size; };
  auto row_largest = [&](int64_t row) {
    return *std::max_element(largest.begin() + row * parts, largest.begin() + (row + 1) * parts);
  };
  auto look = [&](int64_t task) { largest[task] = kernels.maximum(scores(task), begin(task), end(task)); };
  auto run = [&](int64_t task) {
    const int64_t row = task / parts;
    const float best = row_largest(row);
    if (std::isfinite(best) && in.temperature[row] > 0.0f)
      kernels.race(scores(task), begin(task), end(task), best, in.temperature[row], in.noise[row], finishers[task]);
  };
  Counter first, second;
  auto each = [&](Counter& counter, auto f) {
    for (int64_t task; (task = counter.take(1)) < tasks;) f(task);
  };
  team.run([&](int) {
    if (parts == 1) return each(first, [&](int64_t task) { look(task), run(task); });
    each(first, look);
    team.barrier();
    each(second, run);
  });

  bool is_usable = true;
  for (int64_t row = 0; row < in.rows; ++row, tokens += in.count) {
    const float best = row_largest(row), *x = scores(row * parts);
    Finishers& merged = finishers[row * parts];
    for (int64_t part = 1; part < parts; ++part) merged.merge(finishers[row * parts + part]);
    if (!std::isfinite(best)) {
      is_usable = false;
      for (int64_t i = 0; i < in.count; ++i) tokens[i] = i;
    } else if (in.temperature[row] > 0.0f) {
      for (int64_t i = 0; i < in.count; ++i) tokens[i] = merged.token(i);
    } else {
      tokens[0] = std::find(x, x + in.vocab_size, best) - x;
    }
  }
  return is_usable;
}

void uniforms(Team& team, const NoiseRow* noise, int64_t rows, int64_t vocab_size, float* out) {
  constexpr int64_t kBlocks = 4096;  // one bite
  const int64_t bites = (vocab_size + 4 * kBlocks - 1) / (4 * kBlocks);
  Counter counter;
  team.run([&](int) {
    for (int64_t task; (task = counter.take(1)) < rows * bites;) {
      const int64_t row = task / bites;
      for (int64_t token = task % bites * 4 * kBlocks, end = std::min(token + 4 * kBlocks, vocab_size); token < end;) {
        uint64_t words[4];
        philox(noise[row], (uint64_t)token / 4, words);
        for (int i = 0; i < 4 && token < end; ++i, ++token) out[row * vocab_size + token] = uniform(words[i]);
      }
    }
  });
}

}  // namespace slipstream
