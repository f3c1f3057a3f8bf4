#include "threads.h"

#ifdef __linux__
#include <sched.h>
#endif

#include <chrono>

#if defined(__x86_64__) || defined(_M_X64)
#include <immintrin.h>
#define SLIPSTREAM_PAUSE() _mm_pause()
#else
#define SLIPSTREAM_PAUSE() std::this_thread::yield()
#endif

namespace slipstream {
namespace {

// Of a barrier, before it yields: about a millisecond. To yield sooner gives the core away for
// several whenever anybody else wants it, however low its priority. Where there are more threads
// than cores the one that is waited for needs the core.
constexpr int kSpins = 20000, kCrowdedSpins = 50;
constexpr auto kAwake = std::chrono::microseconds(300);  // how long an idle thread looks for work

}  // namespace

// A team that takes the whole machine gives each thread a core: left to itself a woken thread joins
// its waker's core while the others look busy, and the two take turns. The caller keeps to its core
// for the length of a job only.
class Team::Cores {
 public:
  explicit Cores([[maybe_unused]] int size) {
#ifdef __linux__
    if (sched_getaffinity(0, sizeof all_, &all_) || CPU_COUNT(&all_) != size) return;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu)
      if (CPU_ISSET(cpu, &all_)) cpus_.push_back(cpu);
#endif
  }
  // The calling thread keeps to the core of that index.
  void keep([[maybe_unused]] int index) const {
#ifdef __linux__
    if (cpus_.empty()) return;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpus_[(size_t)index], &one);
    sched_setaffinity(0, sizeof one, &one);
#endif
  }
  void free() const {
#ifdef __linux__
    if (!cpus_.empty()) sched_setaffinity(0, sizeof all_, &all_);
#endif
  }

 private:
#ifdef __linux__
  cpu_set_t all_;
  std::vector<int> cpus_;
#endif
};

Team::Team(int size)
    : size_(size),
      spins_(size <= (int)std::thread::hardware_concurrency() ? kSpins : kCrowdedSpins),
      cores_(std::make_unique<Cores>(size)) {
  for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { work(i); });
}

Team::~Team() {
  {
    std::lock_guard lock(sleepers_);
    stop_ = true;
    round_.fetch_add(1);
  }
  wake_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(const std::function<void(int)>& job) {
  std::lock_guard one_at_a_time(callers_);
  if (size_ > 1) {
    cores_->keep(0);
    {
      std::lock_guard lock(sleepers_);
      job_ = &job;
      round_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
  }
  job(0);
  barrier();
  if (size_ > 1) cores_->free();
}

void Team::work(int index) {
  cores_->keep(index);
  for (unsigned seen = 0;;) {
    auto until = std::chrono::steady_clock::now() + kAwake;
    while (round_.load(std::memory_order_acquire) == seen) {
      for (int i = 0; i < 64; ++i) SLIPSTREAM_PAUSE();
      if (std::chrono::steady_clock::now() < until) continue;
      std::unique_lock lock(sleepers_);
      wake_.wait(lock, [&] { return round_.load() != seen; });
    }
    seen = round_.load(std::memory_order_acquire);
    if (stop_) return;
    (*job_)(index);
    barrier();
  }
}

void Team::barrier() {
  if (size_ == 1) return;
  unsigned phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1, std::memory_order_release);
    return;
  }
  for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins) {
    if (spins < spins_) SLIPSTREAM_PAUSE();
    else std::this_thread::yield();
  }
}

void Stretches::reset(int64_t count, int threads) {
  while ((int)stretches_.size() < threads) stretches_.push_back(std::make_unique<Stretch>());
  stretches_.resize((size_t)threads);
  // Small bites, so that no thread waits long for another at the end.
  bite_ = std::max<int64_t>(1, count / (16 * threads));
  for (int i = 0; i < threads; ++i) {
    stretches_[(size_t)i]->next.store(count * i / threads, std::memory_order_relaxed);
    stretches_[(size_t)i]->end = count * (i + 1) / threads;
  }
}

}  // namespace slipstream
