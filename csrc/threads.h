// A team of threads that run the same job, with a barrier inside.
//
// Jobs are short and follow each other closely, so threads spin before they sleep, and a barrier
// spins before it yields: on an idle machine both cost well under a microsecond.
#pragma once
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace slipstream {

class Team {
 public:
  explicit Team(int size);
  ~Team();
  Team(const Team&) = delete;

  int size() const { return size_; }

  // Run job(0) .. job(size - 1) at the same time, the first on the calling thread. Callers wait
  // for each other.
  void run(const std::function<void(int)>& job);

  // Every thread of the running job waits here for the others.
  void barrier();

 private:
  class Cores;

  void work(int index);

  const int size_, spins_;
  std::unique_ptr<Cores> cores_;
  std::vector<std::thread> threads_;
  std::mutex callers_, sleepers_;
  std::condition_variable wake_;
  const std::function<void(int)>* job_ = nullptr;
  std::atomic<unsigned> round_{0};  // counts jobs; a change is the signal to start
  std::atomic<bool> stop_{false};
  std::atomic<int> arrived_{0};
  std::atomic<unsigned> phase_{0};
};

// Work shared out in order, first come first served.
class Counter {
 public:
  void reset() { next_.store(0, std::memory_order_relaxed); }
  int64_t take(int64_t count) { return next_.fetch_add(count, std::memory_order_relaxed); }

 private:
  alignas(64) std::atomic<int64_t> next_{0};
};

// Work of even pieces. Each thread has a stretch of its own, the same in every run, so that it reads
// the same memory in one direction; whoever has done that helps the others with theirs.
class Stretches {
 public:
  void reset(int64_t count, int threads);

  // Calls f(first, last) for one bite after another until nothing is left.
  template <class Function>
  void each(int thread, Function f) {
    const int threads = (int)stretches_.size();
    for (int i = 0; i < threads; ++i) {
      Stretch& stretch = *stretches_[(thread + i) % threads];
      for (int64_t first; (first = stretch.next.fetch_add(bite_, std::memory_order_relaxed)) < stretch.end;)
        f(first, std::min(first + bite_, stretch.end));
    }
  }

 private:
  struct alignas(64) Stretch {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  std::vector<std::unique_ptr<Stretch>> stretches_;
  int64_t bite_ = 1;
};

}  // namespace slipstream
