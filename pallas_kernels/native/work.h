// Items of work shared by the calling thread and whoever of the pool is free.
//
// Items are taken in order from one counter, one ahead of the item that runs, so that its memory can be fetched. An item may
// wait for items before it only. The first unfinished item always runs: its thread has nothing before it left. So nothing waits
// for a thread that has not come, and the caller alone can finish everything.
// A helper that comes late finds no item and leaves; the job lives as long as its last helper.
#pragma once

#include <immintrin.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <memory>

namespace moe_ladder {

// Spins for some microseconds, then gives the core away between looks.
template <class Condition>
inline void wait_until(Condition is_met) {
  for (int i = 0; !is_met(); ++i) {
    if (i < 2000) _mm_pause();
    else sched_yield();
  }
}

inline int64_t num_cores() {
  static const int64_t count = [] {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof(set), &set) == 0 ? static_cast<int64_t>(CPU_COUNT(&set)) : int64_t{1 << 20};
  }();
  return count;
}

// Base of a job: a subclass says what an item is.
class Job {
 public:
  virtual ~Job() = default;

  void work() {
    for (int64_t item = take(); item < num_items_;) {
      const int64_t next = take();
      run(item, next);
      num_finished_.fetch_add(1, std::memory_order_release);
      item = next;
    }
  }
  void wait() const {
    wait_until([this] { return num_finished_.load(std::memory_order_acquire) == num_items_; });
  }
  int64_t num_items() const { return num_items_; }

 protected:
  // `next` is what this thread runs afterwards, num_items() or more for nothing: its weights may be fetched ahead.
  virtual void run(int64_t item, int64_t next) = 0;
  int64_t num_items_ = 0;

 private:
  int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<int64_t> num_finished_{0};
};

// Returns when every item is done. max_threads: 0 for as many as the pool and the process's cores allow.
template <class Pool>
inline void run_job(Pool& pool, const std::shared_ptr<Job>& job, int64_t max_threads) {
  int64_t num_threads = pool.num_threads() < num_cores() ? pool.num_threads() : num_cores();
  if (max_threads > 0 && max_threads < num_threads) num_threads = max_threads;
  for (int64_t i = 1; i < num_threads && i < job->num_items(); ++i) pool.Schedule([job] { job->work(); });
  job->work();
  job->wait();
}

}  // namespace moe_ladder
