// Work shared out over threads that stay awake between the calls of a step.

#pragma once

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>
#include <vector>

namespace plora {

// Numbers read and multiplied that are worth a second thread: a few microseconds of work.
constexpr int64_t kWorthAThread = 1 << 15;

// How long a thread without work keeps looking for some before it sleeps. A step calls every few hundred microseconds,
// and waking a thread takes about 100 of them, more than most calls do.
constexpr std::chrono::microseconds kPatience(2000);

// In a loop that looks for something: lets the other thread of the core run.
inline void Pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Tasks are claimed one by one. The caller claims too and waits only for tasks that another thread has begun; helpers
// that start too late find nothing to do.
class Job {
 public:
  Job(int tasks, std::function<void(int)> run) : tasks_(tasks), run_(std::move(run)) {}
  void Work() {
    for (int task; (task = next_.fetch_add(1)) < tasks_;) {
      run_(task);
      done_.fetch_add(1);
    }
  }
  void Wait() const {
    while (done_.load() < tasks_) sched_yield();
  }

 private:
  const int tasks_;
  std::function<void(int)> run_;
  std::atomic<int> next_{0}, done_{0};
};

// A thread that works for whoever calls. Where it runs is told to the kernel: some virtual machines pack threads on one
// core for milliseconds before they use another, and a helper on the core of its caller is worse than none.
class Helper {
 public:
  Helper() : thread_([this] { Live(); }) {
    CPU_ZERO(&allowed_);
    sched_getaffinity(0, sizeof(allowed_), &allowed_);
    handle_ = thread_.native_handle();
    thread_.detach();
  }

  // Gives it a job; called by one thread at a time.
  void Offer(const std::shared_ptr<Job>& job) {
    KeepOff(sched_getcpu());
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = job;
    offers_.fetch_add(1);
    if (asleep_) wake_.notify_one();
  }

 private:
  void KeepOff(int core) {
    bool collides = asleep_ ? kept_off_ != core : core_.load(std::memory_order_relaxed) == core;
    if (core < 0 || !collides) return;
    cpu_set_t others = allowed_;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others)) pthread_setaffinity_np(handle_, sizeof(others), &others);
    kept_off_ = core;
  }

  void Live() {
    for (uint64_t seen = 0;;) {
      auto tired = std::chrono::steady_clock::now() + kPatience;
      while (offers_.load() == seen && std::chrono::steady_clock::now() < tired) {
        core_.store(sched_getcpu(), std::memory_order_relaxed);
        sched_yield();
      }
      std::shared_ptr<Job> job;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_ = true;
        wake_.wait(lock, [&] { return offers_.load() != seen; });
        asleep_ = false;
        seen = offers_.load();
        job = std::move(job_);
      }
      if (job) job->Work();
    }
  }

  std::atomic<int> core_{-1};
  std::atomic<uint64_t> offers_{0};
  std::atomic<bool> asleep_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::shared_ptr<Job> job_;
  int kept_off_ = -1;
  cpu_set_t allowed_;
  std::thread thread_;
  pthread_t handle_;
};

// The helpers of this process.
class Helpers {
 public:
  static Helpers& Get(int count) {
    static Helpers* const helpers = new Helpers(count);  // Never destroyed: threads may be looking at exit.
    return *helpers;
  }

  // Runs a job; without help when another call has the helpers.
  void Run(const std::shared_ptr<Job>& job) {
    bool mine = !busy_.exchange(true);
    for (size_t i = 0; mine && i < helpers_.size(); ++i) helpers_[i]->Offer(job);
    job->Work();
    job->Wait();
    if (mine) busy_.store(false);
  }

 private:
  explicit Helpers(int count) {
    for (int i = 0; i < count; ++i) helpers_.emplace_back(new Helper);
  }

  std::atomic<bool> busy_{false};
  std::vector<std::unique_ptr<Helper>> helpers_;
};

// About as many runs as a thread gets at most.
constexpr int kMostRuns = 4;

// Runs tasks of the given costs over at most `threads` threads, several neighbours [begin, end) at a time; on this one
// alone when there is little to do.
inline void Parallel(int threads, const std::vector<int64_t>& costs, const std::function<void(int, int)>& run) {
  int tasks = costs.size();
  int64_t left = std::accumulate(costs.begin(), costs.end(), int64_t{0});
  if (left < kWorthAThread || threads < 2 || tasks < 2) {
    if (tasks) run(0, tasks);
    return;
  }
  // Long runs first, since a run's start finds nothing in the cache; short ones last, so that no thread waits for long.
  std::vector<int> ends;
  int64_t least = left / (kMostRuns * threads);
  for (int i = 0; i < tasks;) {
    int64_t wanted = std::max(left / (2 * threads), least), sum = 0;
    while (i < tasks && sum < wanted) sum += costs[i++];
    left -= sum;
    ends.push_back(i);
  }
  int runs = ends.size();
  // Helpers that start late still look whether there is a run, so what they look at must outlive this call.
  Helpers::Get(threads - 1).Run(std::make_shared<Job>(
      runs, [ends = std::move(ends), run](int i) { run(i ? ends[i - 1] : 0, ends[i]); }));
}

}  // namespace plora
