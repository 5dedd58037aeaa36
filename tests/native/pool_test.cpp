// The pool by itself. What its threads do is seen at a gate where the work stops, so nothing here depends on time.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "pool.h"

using wherry::Job;
using wherry::Pool;

namespace {

// Where chunks wait until it opens, and are counted.
class Gate {
 public:
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++standing_;
    most_ = std::max(most_, standing_);
    threads_.insert(std::this_thread::get_id());
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_; });
    --standing_;
  }
  void await(int standing) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return standing_ >= standing; });
  }
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  int most() {
    std::lock_guard<std::mutex> lock(mutex_);
    return most_;
  }
  std::set<std::thread::id> threads() {
    std::lock_guard<std::mutex> lock(mutex_);
    return threads_;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int standing_ = 0, most_ = 0;
  bool open_ = false;
  std::set<std::thread::id> threads_;
};

std::shared_ptr<Job> job(Pool& pool, Gate& gate, int chunks) {
  auto made = std::make_shared<Job>(chunks, pool.threads(), [&gate](int64_t) { gate.pass(); });
  pool.submit(made);
  return made;
}

void submitting_does_not_wait() {
  Pool pool(2, {});
  Gate gate;
  const auto work = job(pool, gate, 6);  // returns, though no chunk can be over
  CHECK(!work->done());
  gate.await(2);
  CHECK(!work->done());
  gate.open();
  work->wait();
  CHECK(work->done());
  CHECK(gate.most() == 2);
  CHECK(gate.threads().size() == 2);
  CHECK(gate.threads().count(std::this_thread::get_id()) == 0);
}

void several_are_under_way() {
  Pool pool(3, {});
  Gate gates[3];
  std::shared_ptr<Job> jobs[3];
  for (int i = 0; i < 3; ++i) jobs[i] = job(pool, gates[i], 1);
  for (Gate& gate : gates) gate.await(1);
  // All have begun, none is over; the last may end first.
  for (const auto& each : jobs) CHECK(!each->done());
  for (int i = 2; i >= 0; --i) {
    gates[i].open();
    jobs[i]->wait();
    for (int k = 0; k < i; ++k) CHECK(!jobs[k]->done());
  }
}

}  // namespace

int main() {
  submitting_does_not_wait();
  several_are_under_way();
  std::printf("ok\n");
  return 0;
}
