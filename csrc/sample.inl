// The parts of sampling that look at every token, on sixteen lanes. Included by kernels.inl.

float maximum(const float* row, int64_t begin, int64_t end) {
  F best = all(-INFINITY), taint = zero();
  auto look = [&](const float* scores) {
    F x = load(scores);
    best = max(best, x);
    taint = fma(max(all(-FLT_MAX), x), zero(), taint);  // -inf is no harm
  };
  for (; begin + 16 <= end; begin += 16) look(row + begin);
  if (begin < end) {
    float padded[16];
    std::fill(padded, padded + 16, -INFINITY);
    std::memcpy(padded, row + begin, (size_t)(end - begin) * 4);
    look(padded);
  }
  return sum(taint) == 0.0f ? largest(best) : INFINITY;
}

// E is never less than the uniform u it is made of, so a token finishes before the bar only if
// u < bar e^-d. That is looked at first, a bite of tokens at a time; logarithms are taken of the
// dozen that pass. Where the limit is below any u there is, not even noise is looked up.
void race(const float* row, int64_t begin, int64_t end, float best, float temperature, const NoiseRow& noise,
          Finishers& finishers) {
  constexpr int kBite = 64;
  constexpr float kSmallest = 0x1p-54f;
  const F largest_score = all(best), rate = all(1.0f / temperature);
  alignas(64) float scores[kBite], limits[kBite], below[kBite];
  alignas(64) uint64_t words[kBite];
  alignas(64) uint32_t bits[kBite];
  std::fill(scores, scores + kBite, -INFINITY);
  for (int64_t first = begin; first < end; first += kBite) {
    const int64_t size = std::min<int64_t>(kBite, end - first);
    const float* x = row + first;
    if (size < kBite) x = (const float*)std::memcpy(scores, x, (size_t)size * 4);

    const F bar = all(finishers.bar);
    F highest = zero(), closest = zero();
    for (int i = 0; i < kBite; i += 16) {
      F limit = exp(fma(sub(load(x + i), largest_score), rate, bar));
      store(limits + i, limit);
      highest = max(highest, limit);
    }
    if (largest(highest) < kSmallest) continue;
    for (int i = 0; i < kBite; i += 4) philox(noise, (uint64_t)(first + i) / 4, words + i);
    // The upper bits as a float in [1, 2), less 1: u rounded down.
    for (int i = 0; i < kBite; ++i) bits[i] = (uint32_t)(words[i] >> 41) | 0x3f800000;
    for (int i = 0; i < kBite; i += 16) {
      F u = sub(load((const float*)bits + i), all(1.0f));
      store(below + i, u);
      closest = max(closest, sub(load(limits + i), u));
    }
    if (largest(closest) == 0.0f) continue;
    for (int64_t i = 0; i < size; ++i)
      if (below[i] < limits[i]) finishers.offer(first + i, (best - x[i]) / temperature, words[i]);
  }
}
