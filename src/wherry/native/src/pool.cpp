#include "pool.h"

#include <csignal>
#include <utility>

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace wherry {

#if defined(__x86_64__)
FloatEnvironment::FloatEnvironment() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80); }
FloatEnvironment::~FloatEnvironment() { _mm_setcsr(static_cast<unsigned>(saved_)); }
#elif defined(__aarch64__)
FloatEnvironment::FloatEnvironment() {
  uint64_t now;
  __asm__ volatile("mrs %0, fpcr" : "=r"(now));
  saved_ = now;
  __asm__ volatile("msr fpcr, %0" : : "r"(static_cast<uint64_t>(0)));
}
FloatEnvironment::~FloatEnvironment() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }
#else
FloatEnvironment::FloatEnvironment() : saved_(0) {}
FloatEnvironment::~FloatEnvironment() {}
#endif

Job::Job(int64_t chunks, int parts, Chunk run) : run_(std::move(run)), chunks_(chunks), parts_(parts), left_(chunks) {
  for (int p = 0; p < parts; ++p) {
    parts_[p].next.store(chunks * p / parts, std::memory_order_relaxed);
    parts_[p].end = chunks * (p + 1) / parts;
  }
}

int64_t Job::claim(int index) {
  const int count = static_cast<int>(parts_.size());
  for (int k = 0; k < count; ++k) {
    Part& part = parts_[(index + k) % count];
    // Looked at before it is taken, so that idle threads do not count a finished part up for ever.
    if (part.next.load(std::memory_order_relaxed) >= part.end) continue;
    const int64_t chunk = part.next.fetch_add(1, std::memory_order_relaxed);
    if (chunk < part.end) return chunk;
  }
  return -1;
}

bool Job::step(int index) {
  const int64_t chunk = claim(index);
  if (chunk < 0) return false;
  run_(chunk);
  if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    // Under the lock, so that no waiter is between its look and its sleep.
    std::lock_guard<std::mutex> lock(mutex_);
    finished_.notify_all();
  }
  return true;
}

void Job::run_inline() {
  FloatEnvironment environment;
  for (int64_t chunk = 0; chunk < chunks_; ++chunk) run_(chunk);
  left_.store(0, std::memory_order_release);
}

void Job::wait() {
  if (done()) return;
  std::unique_lock<std::mutex> lock(mutex_);
  finished_.wait(lock, [this] { return done(); });
}

Pool::Pool(int threads, std::vector<int> cores) : cores_(std::move(cores)) {
  // Signals are the interpreter's business: threads inherit a mask that blocks them all.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    threads_.reserve(threads);
    for (int i = 0; i < threads; ++i) threads_.emplace_back(&Pool::work, this, i);
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    finish();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() { finish(); }

void Pool::finish() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  awake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Pool::submit(std::shared_ptr<Job> job) {
  if (job->done()) return;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(job));
  }
  awake_.notify_all();
}

void Pool::work(int index) {
#if defined(__linux__)
  if (!cores_.empty()) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cores_[index % cores_.size()], &set);
    // A refusal (a CPU taken from the container meanwhile) leaves the thread where the scheduler puts it.
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
  }
#endif
  FloatEnvironment environment;
  for (;;) {
    std::shared_ptr<Job> job;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      awake_.wait(lock, [&] { return !queue_.empty() || stopping_; });
      if (queue_.empty()) return;
      job = queue_.front();
    }
    while (job->step(index)) {
    }
    std::lock_guard<std::mutex> lock(mutex_);
    if (!queue_.empty() && queue_.front() == job) queue_.pop_front();
  }
}

}  // namespace wherry
