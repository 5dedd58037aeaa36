// The disk engines without Python, so that sanitizers see them whole. Prints "ok" and ends with 0, or says what failed.
#include "disk.h"
#include "../native/check.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>

using namespace wherry::disk;

struct Free {
  void operator()(char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<char, Free>;

Memory memory(int64_t length) {
  const int64_t whole = (length + kSector - 1) / kSector * kSector;
  auto* made = static_cast<char*>(std::aligned_alloc(kSector, static_cast<size_t>(whole)));
  CHECK(made != nullptr);
  std::memset(made, 0x5A, static_cast<size_t>(whole));
  return Memory(made);
}

void fill(char* at, int64_t length, unsigned seed) {
  std::mt19937_64 random(seed);
  for (int64_t i = 0; i < length; i += 8) {
    const uint64_t word = random();
    std::memcpy(at + i, &word, static_cast<size_t>(std::min<int64_t>(8, length - i)));
  }
}

struct Files {
  std::string names[2];
  int open_files[2];
  explicit Files(const char* folder, bool direct) {
    for (int i = 0; i < 2; ++i) {
      names[i] = std::string(folder) + "/wherry-disk-test-XXXXXX";
      const int file = mkstemp(names[i].data());
      CHECK(file >= 0 && ftruncate(file, 64 << 20) == 0);
      close(file);
      open_files[i] = open(names[i].c_str(), O_RDWR | (direct ? O_DIRECT : 0));
      CHECK(open_files[i] >= 0);
    }
  }
  ~Files() {
    for (int i = 0; i < 2; ++i) {
      close(open_files[i]);
      unlink(names[i].c_str());
    }
  }
};

Failure finish(Request* request) {
  while (!request->wait(1000)) {
  }
  const Failure failure = request->failure();
  request->drop();
  return failure;
}

void round_trips(Engine& engine, int64_t block) {
  const int64_t base[2] = {4096, 8192};
  std::vector<uint32_t> sums(16 << 20 >> 12, 0);
  for (int64_t length : {int64_t{1}, kSector - 1, kSector, block - 1, block + 1, 5 * block + 777, int64_t{3 << 20}}) {
    Memory out = memory(length), in = memory(length + 1);
    fill(out.get(), length, static_cast<unsigned>(length));
    CHECK(finish(engine.submit(true, out.get(), 0, length, base, 1, sums.data())).cause == Cause::none);
    CHECK(finish(engine.submit(false, in.get(), 0, length, base, 1, sums.data())).cause == Cause::none);
    CHECK(std::memcmp(in.get(), out.get(), static_cast<size_t>(length)) == 0);
    CHECK(in.get()[length] == 0x5A);
  }
}

// Several threads, each with its own records; some requests are dropped without a wait.
void many_at_once(Engine& engine) {
  std::vector<std::thread> threads;
  for (int who = 0; who < 4; ++who) {
    threads.emplace_back([&engine, who] {
      const int64_t length = (1 << 20) + 4096;
      const int64_t base[2] = {(who + 1) * (8ll << 20), (who + 1) * (8ll << 20)};
      Memory out = memory(length), in = memory(length);
      CHECK(engine.add_memory(out.get(), length) != 0);
      for (unsigned round = 0; round < 3; ++round) {
        fill(out.get(), length, round + 100u * static_cast<unsigned>(who));
        Request* write = engine.submit(true, out.get(), 0, length, base, 0, nullptr);
        CHECK(finish(write).cause == Cause::none);
        Request* first = engine.submit(false, in.get(), 0, length, base, 0, nullptr);
        while (!first->done()) std::this_thread::yield();
        first->drop();
        CHECK(std::memcmp(in.get(), out.get(), static_cast<size_t>(length)) == 0);
      }
      engine.remove_memory(out.get());
    });
  }
  for (auto& thread : threads) thread.join();
}

void faults(Engine& engine) {
  const int64_t base[2] = {0, 0}, length = 4 << 20;
  Memory one = memory(length), two = memory(length);
  engine.inject({true, 1, 1, EIO, -1, 0});
  Request* bad = engine.submit(true, one.get(), 0, length, base, 0, nullptr);
  const Failure failure = finish(bad);
  CHECK(failure.cause == Cause::system && failure.code == EIO);
  CHECK(finish(engine.submit(true, one.get(), 0, length, base, 0, nullptr)).cause == Cause::none);
  engine.inject({false, 0, 3, 0, 8192, 20});
  fill(one.get(), length, 5);
  CHECK(finish(engine.submit(true, one.get(), 0, length, base, 0, nullptr)).cause == Cause::none);
  CHECK(finish(engine.submit(false, two.get(), 0, length, base, 0, nullptr)).cause == Cause::none);
  CHECK(std::memcmp(one.get(), two.get(), static_cast<size_t>(length)) == 0);
  CHECK(engine.counters().resumed >= 1);
  engine.inject({false, 0, 1, 0, 0, 0});
  CHECK(finish(engine.submit(false, two.get(), 0, length, base, 0, nullptr)).cause == Cause::short_transfer);
  std::vector<uint32_t> sums(length / kSector, 12345);
  CHECK(finish(engine.submit(false, two.get(), 0, length, base, 0, sums.data())).cause == Cause::checksum);
}

void closes_in_flight(Engine* engine) {
  const int64_t base[2] = {0, 0}, length = 8 << 20;
  Memory out = memory(length), in = memory(4096);
  Request* kept = engine->submit(true, out.get(), 0, length, base, 0, nullptr);
  engine->submit(false, in.get(), 0, 4096, base, 0, nullptr)->drop();
  engine->drain();
  engine->stop();
  delete engine;
  CHECK(kept->done());
  CHECK(finish(kept).cause == Cause::none);
}

void checksums() {
  CHECK(crc32c("123456789", 9) == 0xE3069283u);
  CHECK(crc32c_portable("123456789", 9) == 0xE3069283u);
  Memory data = memory(7 * kSector);
  fill(data.get(), 7 * kSector, 1);
  uint32_t sums[7];
  checksum_sectors(data.get(), 7, sums);
  for (int i = 0; i < 7; ++i) CHECK(sums[i] == crc32c_portable(data.get() + i * kSector, kSector));
}

int main(int count, char** arguments) {
  const char* folder = count > 1 ? arguments[1] : "/tmp";
  checksums();
  const bool uring = uring_probe() == 0;
  for (int kind = uring ? 0 : 1; kind < 2; ++kind) {
    for (bool direct : {false, true}) {
      for (int lanes : {1, 2}) {
        const int64_t block = 64 << 10;
        Files files(folder, direct);
        Engine* engine = kind == 0 ? uring_engine(files.open_files, lanes, block, 8)
                                   : threads_engine(files.open_files, lanes, block, 8);
        CHECK(engine != nullptr);
        round_trips(*engine, block);
        many_at_once(*engine);
        faults(*engine);
        const Counters counters = engine->counters();
        CHECK(counters.deepest <= 8 && counters.failures == 3);
        closes_in_flight(engine);
      }
    }
  }
  std::puts(uring ? "ok: io_uring, threads" : "ok: threads (no io_uring here)");
  return 0;
}
