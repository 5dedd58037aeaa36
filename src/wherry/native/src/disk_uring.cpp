// The io_uring engine: one thread owns the ring, submits, sleeps in the kernel until something completes, and goes on.
#include "disk.h"

#if defined(__linux__)

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <system_error>
#include <thread>

#include "disk_uring_abi.h"

namespace wherry::disk {
namespace {

constexpr uint64_t kWake = ~0ull;          // user_data of the poll on the event file
constexpr int64_t kPiece = 1ll << 30;      // the most that one registered buffer may span
constexpr uint32_t kBufferSlots = 4096;

uint32_t load(const uint32_t* at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
void store(uint32_t* at, uint32_t value) { __atomic_store_n(at, value, __ATOMIC_RELEASE); }

// The shared rings of one io_uring. Used by one thread only. Methods return 0 or more, or -errno.
class Ring {
 public:
  Ring() = default;
  Ring(const Ring&) = delete;
  Ring& operator=(const Ring&) = delete;
  ~Ring() {
    if (entries_ != MAP_FAILED) munmap(entries_, entries_length_);
    if (rings_ != MAP_FAILED) munmap(rings_, rings_length_);
    if (file_ >= 0) close(file_);
  }

  int setup(uint32_t depth) {
    abi::Parameters p;
    // Deferred completion work saves interrupting the thread; kernels before 6.1 refuse the flags.
    for (uint32_t flags : {abi::kSetupSingleIssuer | abi::kSetupDeferTaskrun, 0u}) {
      p = abi::Parameters{};
      p.flags = flags | abi::kSetupClamp;
      file_ = static_cast<int>(syscall(abi::kSetup, depth, &p));
      if (file_ >= 0 || errno != EINVAL) break;
    }
    if (file_ < 0) return -errno;
    const uint32_t needed = abi::kFeatureSingleMmap | abi::kFeatureNoDrop;
    if ((p.features & needed) != needed || p.submission_entries < depth) return -ENOSYS;
    rings_length_ = std::max<size_t>(p.submissions.array + p.submission_entries * sizeof(uint32_t),
                                     p.completions.completions + p.completion_entries * sizeof(abi::Completion));
    entries_length_ = p.submission_entries * sizeof(abi::Submission);
    if ((rings_ = map(rings_length_, abi::kOffsetRings)) == MAP_FAILED) return -errno;
    if ((entries_ = map(entries_length_, abi::kOffsetEntries)) == MAP_FAILED) return -errno;
    submission_head_ = field(p.submissions.head);
    submission_tail_ = field(p.submissions.tail);
    submission_mask_ = *field(p.submissions.ring_mask);
    completion_head_ = field(p.completions.head);
    completion_tail_ = field(p.completions.tail);
    completion_mask_ = *field(p.completions.ring_mask);
    completions_ = reinterpret_cast<abi::Completion*>(static_cast<char*>(rings_) + p.completions.completions);
    uint32_t* array = field(p.submissions.array);
    for (uint32_t i = 0; i < p.submission_entries; ++i) array[i] = i;
    return supports({abi::kRead, abi::kWrite, abi::kPollAdd, abi::kReadFixed, abi::kWriteFixed});
  }

  int enroll(uint32_t what, void* argument, uint32_t count) {
    const long result = syscall(abi::kRegister, file_, what, argument, count);
    return result < 0 ? -errno : static_cast<int>(result);
  }

  abi::Submission& next() {
    auto& entry = static_cast<abi::Submission*>(entries_)[*submission_tail_ & submission_mask_];
    std::memset(&entry, 0, sizeof entry);
    return entry;
  }

  void push() { store(submission_tail_, *submission_tail_ + 1); }

  // Submits all that was pushed and waits for one completion.
  int enter() {
    const uint32_t waiting = *submission_tail_ - load(submission_head_);
    const long result = syscall(abi::kEnter, file_, waiting, 1u, abi::kEnterGetEvents, nullptr, 0);
    return result < 0 ? -errno : 0;
  }

  template <class Use>
  void reap(Use use) {
    uint32_t head = *completion_head_;
    while (head != load(completion_tail_)) {
      const abi::Completion one = completions_[head & completion_mask_];
      store(completion_head_, ++head);
      use(one);
    }
  }

 private:
  void* map(size_t length, int64_t offset) {
    void* at = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file_, offset);
    if (at != MAP_FAILED) madvise(at, length, MADV_DONTFORK);
    return at;
  }

  uint32_t* field(uint32_t offset) { return reinterpret_cast<uint32_t*>(static_cast<char*>(rings_) + offset); }

  int supports(std::initializer_list<abi::Operation> operations) {
    abi::Probe probe{};
    if (const int error = enroll(abi::kRegisterProbe, &probe, 64); error < 0) return error == -EINVAL ? -ENOSYS : error;
    for (auto operation : operations)
      if (operation > probe.last_operation || !(probe.operations[operation].flags & abi::kOperationSupported))
        return -ENOSYS;
    return 0;
  }

  int file_ = -1;
  void *rings_ = MAP_FAILED, *entries_ = MAP_FAILED;
  size_t rings_length_ = 0, entries_length_ = 0;
  uint32_t *submission_head_ = nullptr, *submission_tail_ = nullptr, submission_mask_ = 0;
  uint32_t *completion_head_ = nullptr, *completion_tail_ = nullptr, completion_mask_ = 0;
  abi::Completion* completions_ = nullptr;
};

// Memory known to the kernel: it need not look up and pin its pages for every transfer.
class Registered {
 public:
  int setup(Ring& ring) {
    abi::ResourceRegister all{kBufferSlots, abi::kRegisterSparse, 0, 0, 0};
    supported_ = ring.enroll(abi::kRegisterBuffers2, &all, sizeof all);
    for (uint32_t slot = kBufferSlots; supported_ >= 0 && slot-- > 0;) free_.push_back(slot);
    return supported_;
  }

  int add(Ring& ring, char* memory, int64_t length) {
    if (supported_ < 0) return supported_;
    int pieces = 0;
    for (int64_t at = 0; at < length; at += kPiece, ++pieces) {
      const int64_t size = std::min(kPiece, length - at);
      const int result = free_.empty() ? -ENOSPC : set(ring, free_.back(), memory + at, size);
      if (result < 0) {
        remove(ring, memory);
        return result;
      }
      pieces_[memory + at] = Piece{memory, size, free_.back()};
      free_.pop_back();
    }
    return pieces;
  }

  int remove(Ring& ring, char* memory) {
    int pieces = 0;
    for (auto it = pieces_.lower_bound(memory); it != pieces_.end() && it->second.owner == memory; ++pieces) {
      if (const int result = set(ring, it->second.slot, nullptr, 0); result < 0) return result;
      free_.push_back(it->second.slot);
      it = pieces_.erase(it);
    }
    return pieces;
  }

  void close(Ring& ring) const {
    if (supported_ >= 0) ring.enroll(abi::kUnregisterBuffers, nullptr, 0);
  }

  int find(char* memory, int64_t length) const {
    auto it = pieces_.upper_bound(memory);
    if (it == pieces_.begin()) return -1;
    --it;
    return memory + length <= it->first + it->second.length ? static_cast<int>(it->second.slot) : -1;
  }

 private:
  struct Piece {
    char* owner;
    int64_t length;
    uint32_t slot;
  };

  static int set(Ring& ring, uint32_t slot, char* memory, int64_t length) {
    iovec range{memory, static_cast<size_t>(length)};
    abi::ResourceUpdate update{slot, 0, reinterpret_cast<uint64_t>(&range), 0, 1, 0};
    return ring.enroll(abi::kRegisterBuffersUpdate, &update, sizeof update);
  }

  int supported_ = -ENOSYS;
  std::vector<uint32_t> free_;
  std::map<char*, Piece> pieces_;
};

class UringEngine final : public Engine {
 public:
  using Engine::Engine;

  ~UringEngine() override {
    stop();
    if (event_ >= 0) close(event_);
  }

  int start() override {
    event_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event_ < 0) return errno;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = 0;
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error& failure) {
      error = failure.code().value();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (error) return error;
    std::unique_lock lock(mutex_);
    answered_.wait(lock, [this] { return ready_; });
    return error_;
  }

  void stop() override {
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    if (!thread_.joinable()) return;
    ring_the_bell();
    thread_.join();
  }

  int add_memory(char* memory, int64_t length) override { return ask(Command{memory, length}); }
  int remove_memory(char* memory) override { return ask(Command{memory, -1}); }

 private:
  // A change of the ring that its own thread has to make.
  struct Command {
    char* memory;
    int64_t length;  // -1: remove
    int result = 0;
    bool done = false;
  };

  int ask(Command command) {
    std::unique_lock lock(mutex_);
    if (stopping_) return -ESHUTDOWN;
    commands_.push_back(&command);
    ring_the_bell();
    answered_.wait(lock, [&] { return command.done; });
    return command.result;
  }

  // A thread that is not idle looks for more by itself: when a chunk is over, and before it sleeps with room to spare.
  void wake() override {
    {
      std::lock_guard lock(mutex_);
      if (!idle_thread_) return;
      idle_thread_ = false;
    }
    ring_the_bell();
  }

  void ring_the_bell() {
    const uint64_t one = 1;
    // It can fail only when the counter is full, and then the thread is awake anyhow.
    [[maybe_unused]] const ssize_t written = ::write(event_, &one, sizeof one);
  }

  void run() {
    Ring ring;
    const int capacity = depth() * lanes();
    int error = ring.setup(static_cast<uint32_t>(capacity) + 1);
    if (error >= 0) {
      registered_.setup(ring);
      std::vector<int> files;
      for (int i = 0; i < lanes(); ++i) files.push_back(file(i));
      fixed_files_ = ring.enroll(abi::kRegisterFiles, files.data(), static_cast<uint32_t>(files.size())) >= 0;
      slots_.resize(capacity);
      timers_.resize(capacity);
      for (int i = capacity; i-- > 0;) idle_.push_back(i);
    }
    {
      std::lock_guard lock(mutex_);
      error_ = error < 0 ? -error : 0;
      ready_ = true;
      answered_.notify_all();
    }
    if (error < 0) return;
    serve(ring);
    // The kernel takes a closed ring apart some time later. What it holds of ours should be free now: a file's space, and
    // the file system for unmounting.
    registered_.close(ring);
    if (fixed_files_) ring.enroll(abi::kUnregisterFiles, nullptr, 0);
  }

  void serve(Ring& ring) {
    poll_event(ring);
    while (true) {
      obey(ring);
      fill(ring);
      if (idle_.size() == slots_.size()) {
        std::lock_guard lock(mutex_);
        if (stopping_ && commands_.empty()) return;
      }
      // A busy kernel (EAGAIN, EBUSY: too little memory, or completions to be read first) is asked again after reading.
      const int result = ring.enter();
      ring.reap([&](const abi::Completion& one) { complete(ring, one); });
      if (result < 0 && result != -EINTR) std::this_thread::yield();
    }
  }

  void obey(Ring& ring) {
    std::vector<Command*> commands;
    {
      std::lock_guard lock(mutex_);
      commands.swap(commands_);
    }
    for (Command* command : commands) {
      const int result = command->length < 0 ? registered_.remove(ring, command->memory)
                                             : registered_.add(ring, command->memory, command->length);
      std::lock_guard lock(mutex_);
      command->result = result;
      command->done = true;
      answered_.notify_all();
    }
  }

  void fill(Ring& ring) {
    while (!idle_.empty()) {
      const int slot = idle_.back();
      Chunk& chunk = slots_[slot];
      {
        std::lock_guard lock(mutex_);
        idle_thread_ = !pick(chunk);
        if (idle_thread_) return;
      }
      idle_.pop_back();
      begin(chunk);
      if (chunk.delay_ms > 0) {
        delay(ring, slot);
      } else {
        transfer(ring, slot);
      }
    }
  }

  // Only tests delay. `delay_ms` turns negative while the timer runs.
  void delay(Ring& ring, int slot) {
    Chunk& chunk = slots_[slot];
    timers_[slot] = {chunk.delay_ms / 1000, chunk.delay_ms % 1000 * 1000000};
    chunk.delay_ms = -1;
    auto& entry = ring.next();
    entry.operation = abi::kTimeout;
    entry.file = -1;
    entry.address = reinterpret_cast<uint64_t>(&timers_[slot]);
    entry.length = 1;
    entry.user_data = static_cast<uint64_t>(slot);
    ring.push();
  }

  void transfer(Ring& ring, int slot) {
    Chunk& chunk = slots_[slot];
    const Transfer part = next(chunk);
    if (part.immediate) {
      settle(ring, slot, part.result);
      return;
    }
    auto& entry = ring.next();
    const int buffer = registered_.find(part.memory, part.length);
    if (buffer >= 0) {
      entry.operation = chunk.write() ? abi::kWriteFixed : abi::kReadFixed;
      entry.buffer_index = static_cast<uint16_t>(buffer);
      if (chunk.moved == 0) fixed_.fetch_add(1, std::memory_order_relaxed);
    } else {
      entry.operation = chunk.write() ? abi::kWrite : abi::kRead;
    }
    entry.flags = fixed_files_ ? abi::kFixedFile : 0;
    entry.file = fixed_files_ ? chunk.lane : file(chunk.lane);
    entry.offset = static_cast<uint64_t>(part.offset);
    entry.address = reinterpret_cast<uint64_t>(part.memory);
    entry.length = static_cast<uint32_t>(part.length);
    entry.user_data = static_cast<uint64_t>(slot);
    ring.push();
  }

  void settle(Ring& ring, int slot, int64_t result) {
    if (slots_[slot].delay_ms < 0) {
      slots_[slot].delay_ms = 0;
      transfer(ring, slot);
    } else if (advance(slots_[slot], result)) {
      idle_.push_back(slot);
    } else {
      transfer(ring, slot);
    }
  }

  void complete(Ring& ring, const abi::Completion& one) {
    if (one.user_data != kWake) return settle(ring, static_cast<int>(one.user_data), one.result);
    uint64_t count;
    [[maybe_unused]] const ssize_t cleared = ::read(event_, &count, sizeof count);
    poll_event(ring);
  }

  void poll_event(Ring& ring) {
    auto& entry = ring.next();
    entry.operation = abi::kPollAdd;
    entry.file = event_;
    entry.operation_flags = POLLIN;
    entry.user_data = kWake;
    ring.push();
  }

  int event_ = -1;
  std::thread thread_;
  std::condition_variable answered_;
  bool ready_ = false, stopping_ = false;
  bool idle_thread_ = false;  // it found nothing to begin, and has room for more; guarded by mutex_
  int error_ = 0;
  std::vector<Command*> commands_;
  // The rest belongs to the ring's thread.
  Registered registered_;
  bool fixed_files_ = false;
  std::vector<abi::Timespec> timers_;
  std::vector<Chunk> slots_;
  std::vector<int> idle_;
};

}  // namespace

Engine* uring_engine(const int* files, int lanes, int64_t block, int depth) {
  auto engine = std::make_unique<UringEngine>(files, lanes, block, depth);
  if (const int error = engine->start()) {
    errno = error;
    return nullptr;
  }
  return engine.release();
}

// A sandbox may allow making a ring and forbid using it: the probe makes one trip through it.
int uring_probe() {
  Ring ring;
  if (const int error = ring.setup(2); error < 0) return -error;
  auto& entry = ring.next();
  entry.operation = abi::kNop;
  ring.push();
  if (const int error = ring.enter(); error < 0) return -error;
  int completed = 0;
  ring.reap([&](const abi::Completion& one) { completed += one.result == 0; });
  return completed == 1 ? 0 : ENOSYS;
}

}  // namespace wherry::disk

#else

#include <cerrno>

namespace wherry::disk {

Engine* uring_engine(const int*, int, int64_t, int) {
  errno = ENOSYS;
  return nullptr;
}

int uring_probe() { return ENOSYS; }

}  // namespace wherry::disk

#endif
