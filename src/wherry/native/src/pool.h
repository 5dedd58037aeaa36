// The library's own threads, and the jobs they share.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace wherry {

// While it lives, this thread's arithmetic is IEEE's: to nearest, denormals kept, whatever the caller had set.
class FloatEnvironment {
 public:
  FloatEnvironment();
  ~FloatEnvironment();
  FloatEnvironment(const FloatEnvironment&) = delete;
  FloatEnvironment& operator=(const FloatEnvironment&) = delete;

 private:
  uint64_t saved_;
};

// Work cut into chunks. Each thread takes the chunks of its own contiguous part in order, then helps with the others'.
class Job {
 public:
  using Chunk = std::function<void(int64_t)>;

  Job(int64_t chunks, int parts, Chunk run);

  // One chunk for the thread of this index; false when none is left to claim.
  bool step(int index);
  void run_inline();
  void wait();
  bool done() const { return left_.load(std::memory_order_acquire) == 0; }

 private:
  struct alignas(64) Part {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
  };
  int64_t claim(int index);

  Chunk run_;
  int64_t chunks_;
  std::vector<Part> parts_;
  std::atomic<int64_t> left_;
  std::mutex mutex_;
  std::condition_variable finished_;
};

// First in, first out; a job behind starts as soon as no chunk of those before it is left to claim.
class Pool {
 public:
  // `cores[i]` is the CPU of thread i; empty leaves the choice to the scheduler.
  Pool(int threads, std::vector<int> cores);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  void submit(std::shared_ptr<Job> job);
  int threads() const { return static_cast<int>(threads_.size()); }

 private:
  void work(int index);
  void finish();

  std::vector<int> cores_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable awake_;
  std::deque<std::shared_ptr<Job>> queue_;
  bool stopping_ = false;
};

}  // namespace wherry
