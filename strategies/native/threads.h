// Work shared out over XLA's threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace plora {

// Numbers read and multiplied that are worth waking another thread, which takes about 50 us.
constexpr int64_t kWorthAThread = 1 << 16;

// Tasks are claimed one by one. The caller claims too and waits only for tasks that another thread has begun, so it
// cannot deadlock when the pool is busy; helpers that start too late find nothing to do.
class Job {
 public:
  Job(int tasks, std::function<void(int)> run) : tasks_(tasks), run_(std::move(run)) {}
  void Work() {
    for (int task; (task = next_.fetch_add(1)) < tasks_;) {
      run_(task);
      if (done_.fetch_add(1) + 1 == tasks_) {
        std::lock_guard<std::mutex> lock(mutex_);
        finished_.notify_all();
      }
    }
  }
  void Wait() {
    for (int spin = 0; spin < 4096; ++spin) {
      if (done_.load() == tasks_) return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    finished_.wait(lock, [this] { return done_.load() == tasks_; });
  }

 private:
  const int tasks_;
  std::function<void(int)> run_;
  std::atomic<int> next_{0}, done_{0};
  std::mutex mutex_;
  std::condition_variable finished_;
};

// Runs tasks with the given costs, the largest first; on this thread alone when there is little to do.
inline void Parallel(xla::ffi::ThreadPool& pool, const std::vector<int64_t>& costs, const std::function<void(int)>& run) {
  int tasks = costs.size();
  std::vector<int> order(tasks);
  int64_t total = 0;
  for (int i = 0; i < tasks; ++i) order[i] = i, total += costs[i];
  int helpers = std::min<int64_t>(tasks, pool.num_threads()) - 1;
  if (total < kWorthAThread || helpers <= 0) {
    for (int i = 0; i < tasks; ++i) run(i);
    return;
  }
  std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return costs[a] > costs[b]; });
  // Helpers that start late still look whether there is a task, so what they look at must outlive this call.
  auto job = std::make_shared<Job>(tasks, [order, run](int i) { run(order[i]); });
  for (int i = 0; i < helpers; ++i) pool.Schedule([job] { job->Work(); });
  job->Work();
  job->Wait();
}

}  // namespace plora
