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

// Where chunks wait until they are let through, and are counted.
class Gate {
 public:
  void pass() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++standing_;
    most_ = std::max(most_, standing_);
    threads_.insert(std::this_thread::get_id());
    changed_.notify_all();
    changed_.wait(lock, [this] { return open_ || allowed_ > 0; });
    if (!open_) --allowed_;
    --standing_;
    ++passed_;
    changed_.notify_all();
  }
  void await(int standing) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return standing_ >= standing; });
  }
  void let_one() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int before = passed_;
    ++allowed_;
    changed_.notify_all();
    changed_.wait(lock, [&] { return passed_ > before; });
  }
  void open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  // From here on: the most that stood at once, and who they were.
  void forget() {
    std::lock_guard<std::mutex> lock(mutex_);
    most_ = standing_;
    threads_.clear();
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
  int standing_ = 0, most_ = 0, allowed_ = 0, passed_ = 0;
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

void fewer_threads_work_when_throttled() {
  Pool pool(4, {});
  {
    pool.throttle(1);
    Gate gate;
    const auto work = job(pool, gate, 24);
    for (int i = 0; i < 24; ++i) {
      gate.await(1);
      gate.let_one();
    }
    work->wait();
    CHECK(gate.most() == 1);
    CHECK(gate.threads().size() == 1);
  }
  Gate gate;
  const auto work = job(pool, gate, 400);
  gate.await(1);
  for (int active = 2; active <= 4; ++active) {
    pool.throttle(active);  // also while there is work
    gate.await(active);
    CHECK(gate.most() == active);
    CHECK(static_cast<int>(gate.threads().size()) == active);
  }
  // Down again: those that stand at the gate end their chunk, and one goes on.
  pool.throttle(1);
  gate.forget();
  gate.open();
  work->wait();
  CHECK(gate.threads().size() == 1);
}

void nobody_works_while_held() {
  Pool pool(2, {});
  pool.throttle(0);
  Gate gate;
  gate.open();
  std::vector<std::shared_ptr<Job>> jobs;
  for (int i = 0; i < 5; ++i) jobs.push_back(job(pool, gate, 3));
  for (const auto& each : jobs) CHECK(!each->done());
  CHECK(gate.most() == 0);
  pool.throttle(2);
  for (const auto& each : jobs) each->wait();
}

void ending_finishes_what_is_held() {
  Gate gate;
  gate.open();
  std::shared_ptr<Job> work;
  {
    Pool pool(2, {});
    pool.throttle(0);
    work = job(pool, gate, 8);
  }
  CHECK(work->done());
}

}  // namespace

int main() {
  submitting_does_not_wait();
  several_are_under_way();
  fewer_threads_work_when_throttled();
  nobody_works_while_held();
  ending_finishes_what_is_held();
  std::printf("ok\n");
  return 0;
}
