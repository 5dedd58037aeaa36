// Streams, events, memory, and what torch asks of a device.
#include "device.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pybind11/functional.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <torch/csrc/Generator.h>

#include <chrono>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <unordered_map>

namespace py = pybind11;

namespace emulated {

void bind_process_group(py::module& module);

namespace {

constexpr size_t ARENA = size_t(32) << 30;  // Of addresses, for each device.
constexpr size_t GRAIN = 512;
constexpr size_t LONGEST_QUEUE = 2000;
constexpr auto HELD_AT_MOST = std::chrono::seconds(30);

struct Row {
  int device, stream;
  std::string kind, name;
  size_t bytes;
  double queued, begun, ended;
};

struct Block {
  size_t place = 0, size = 0, used = 0;
  int device = 0;
  Stream* stream = nullptr;
  std::set<Stream*> others;                         // Named by record_stream.
  std::vector<std::pair<Stream*, uint64_t>> until;  // How far they must come before the block is free.
};

struct Memory {
  std::map<size_t, size_t> holes;                          // Addresses that nothing has.
  std::map<Stream*, std::multimap<size_t, Block*>> cache;  // Free to be used again on that stream.
  std::vector<Block*> deferred;
  std::unordered_map<size_t, Block*> live;
  size_t limit = 0;
  c10::CachingDeviceAllocator::DeviceStats stats;
};

struct State {
  std::mutex mutex;
  std::condition_variable changed;
  std::mt19937_64 random{0};
  double late = 0.6;
  bool poison_targets = true;
  int devices = 1;
  std::string failure;
  std::string held;        // The kind of copies that do not begin, on streams other than the default ones.
  std::thread::id holder;  // The thread that lets them go.
  Stream streams[MOST_DEVICES][STREAMS];
  int next_stream[MOST_DEVICES] = {};
  // Trace.
  bool tracing = false;
  std::vector<Row> rows;
  // Memory.
  char* arena = nullptr;
  char* bytes = nullptr;
  Memory memory[MOST_DEVICES];
  int64_t until_failure = 0;
  int64_t allocations = 0;
  std::map<const char*, size_t> pinned;      // By torch's allocator, in use or waiting for its copies.
  std::map<const char*, size_t> registered;  // Foreign memory.
  std::multimap<size_t, char*> spare_pinned;
  struct Leaving {
    char* pointer;
    size_t size;
    std::vector<std::pair<Stream*, uint64_t>> until;
  };
  std::vector<Leaving> leaving;
};

// Never destroyed, as torch's threads outlive main.
State& g = *[] {
  auto* state = new State;
  for (int device = 0; device < MOST_DEVICES; device++) {
    for (int id = 0; id < STREAMS; id++) {
      state->streams[device][id].device = device;
      state->streams[device][id].id = id;
    }
    state->memory[device].holes[device * ARENA] = ARENA;
  }
  auto reserve = [](int protection) {
    void* at = mmap(nullptr, MOST_DEVICES * ARENA, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(at != MAP_FAILED, "No addresses for the emulated device: ", std::strerror(errno));
    return static_cast<char*>(at);
  };
  state->arena = reserve(PROT_NONE);
  state->bytes = reserve(PROT_READ | PROT_WRITE);
  return state;
}();

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

const char* name_of(Kind kind) {
  static const char* const names[] = {"kernel", "up", "down", "event", "wait", "external", "poison"};
  return names[int(kind)];
}

// ---- Queues

bool within(const std::map<const char*, size_t>& ranges, const char* pointer) {
  auto next = ranges.upper_bound(pointer);
  return next != ranges.begin() && pointer < std::prev(next)->first + std::prev(next)->second;
}

// As on a GPU, the error of a kernel is met by whoever waits for it later. Called with the lock held.
void fail(const std::string& what) {
  if (g.failure.empty()) g.failure = what;
}

// Foreign memory may be gone by the time its copy runs; a crash would hide which copy it was.
bool gone(const Item& item) { return item.host && !within(g.pinned, item.host) && !within(g.registered, item.host); }

std::string run(Item& item, bool gone) {
  if (gone) return item.name + ", which ran late: its host memory is no longer pinned";
  try {
    if (item.run) item.run();
    return "";
  } catch (const c10::Error& error) {
    return item.name + ", which ran late: " + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return item.name + ", which ran late: " + error.what();
  }
}

void trace(const Item& item, double begun) {
  if (!g.tracing || item.row < 0 || item.row >= int64_t(g.rows.size())) return;
  g.rows[item.row].begun = item.external ? item.external->begun : begun;
  g.rows[item.row].ended = now();
}

void pass(Stream& stream) {
  Item& item = stream.queue.front();
  if (item.kind == Kind::Event) {
    item.mark->passed = true;
    item.mark->time = now();
  }
  Item finished = std::move(item);
  stream.queue.pop_front();
  stream.done++;
  if (finished.kind == Kind::External) g.changed.notify_all();
}

// Runs the first item of a queue. One that waits is waited for if the caller is patient, and false is returned if not.
bool step(Stream& stream, Lock& lock, bool patient);

void drain(Stream& stream, uint64_t until, Lock& lock) {
  // Each round looks at the queue anew: a wait may have let other threads run it.
  while (stream.done < until) {
    step(stream, lock, true);
  }
}

bool step(Stream& stream, Lock& lock, bool patient) {
  Item& item = stream.queue.front();
  if (stream.id != 0 && g.held == name_of(item.kind)) {
    if (!patient) return false;
    TORCH_CHECK(std::this_thread::get_id() != g.holder, "The host waits for a ", item.name, " that it holds back");
    bool changed = g.changed.wait_for(lock, HELD_AT_MOST) == std::cv_status::no_timeout;
    TORCH_CHECK(changed, "The host waits for a thread that waits for a ", item.name, " that is held back");
    return true;
  }
  if (item.kind == Kind::Wait && !item.mark->passed) {
    if (!patient) return false;
    auto mark = item.mark;
    drain(*mark->stream, mark->place, lock);
    return true;
  }
  if (item.kind == Kind::External && !item.external->done) {
    if (!patient) return false;
    g.changed.wait(lock);
    return true;
  }
  double begun = g.tracing ? now() : 0;
  fail(run(item, gone(item)));
  trace(item, begun);
  pass(stream);
  return true;
}

uint64_t advance(Stream& stream, uint64_t most, Lock& lock) {
  uint64_t count = 0;
  while (count < most && !stream.queue.empty() && step(stream, lock, false)) count++;
  return count;
}

uint64_t draw(uint64_t below) { return std::uniform_int_distribution<uint64_t>(0, below - 1)(g.random); }

bool chance(double probability) { return std::uniform_real_distribution<double>()(g.random) < probability; }

// What a GPU does meanwhile: any stream gets on, by any number of items.
void let_run(Lock& lock) {
  if (g.late <= 0) {
    for (bool again = true; again;) {
      again = false;
      for (int device = 0; device < g.devices; device++) {
        for (auto& stream : g.streams[device]) again |= advance(stream, UINT64_MAX, lock) > 0;
      }
    }
    return;
  }
  while (chance(1 - g.late)) {
    Stream* busy[MOST_DEVICES * STREAMS];
    int count = 0;
    for (int device = 0; device < g.devices; device++) {
      for (auto& stream : g.streams[device]) {
        if (!stream.queue.empty()) busy[count++] = &stream;
      }
    }
    if (!count) return;
    advance(*busy[draw(count)], 1 + draw(8), lock);
  }
}

// Whoever polls must see an event pass at last, however late all else is: a little of the stream, or of the one that
// it waits for, may run.
void nudge(Stream& stream, Lock& lock) {
  Stream* at = &stream;
  for (int hops = 0; hops < STREAMS * MOST_DEVICES && !at->queue.empty(); hops++) {
    Item& item = at->queue.front();
    if (item.kind != Kind::Wait || item.mark->passed) {
      advance(*at, 1 + draw(8), lock);
      return;
    }
    at = item.mark->stream;
  }
}

uint64_t put(Stream& stream, Item item) {
  if (g.tracing && item.kind != Kind::Poison) {
    item.row = int64_t(g.rows.size());
    g.rows.push_back({stream.device, stream.id, name_of(item.kind), item.name, item.bytes, now(), 0, 0});
  }
  stream.queue.push_back(std::move(item));
  stream.queued++;
  return stream.queued;
}

void raise_failure(Lock& lock) {
  if (g.failure.empty()) return;
  std::string failure;
  std::swap(failure, g.failure);
  lock.unlock();
  TORCH_CHECK(false, "emulated device: ", failure);
}

std::vector<std::pair<Stream*, uint64_t>> users_of(const char* host, size_t bytes) {
  std::vector<std::pair<Stream*, uint64_t>> users;
  for (int device = 0; device < g.devices; device++) {
    for (auto& stream : g.streams[device]) {
      uint64_t place = stream.done, last = 0;
      for (auto& item : stream.queue) {
        place++;
        if (item.host && item.host < host + bytes && host < item.host + item.bytes) last = place;
      }
      if (last) users.emplace_back(&stream, last);
    }
  }
  return users;
}

bool passed(const std::vector<std::pair<Stream*, uint64_t>>& until) {
  for (auto& [stream, place] : until) {
    if (stream->done < place) return false;
  }
  return true;
}

void finish_device(int device, Lock& lock) {
  for (auto& stream : g.streams[device]) drain(stream, stream.queued, lock);
}

thread_local int this_device = 0;
thread_local int this_stream[MOST_DEVICES] = {};

// ---- Device memory

size_t rounded(size_t bytes) { return (bytes + GRAIN - 1) / GRAIN * GRAIN; }

// The block is taken back in the stream's order: its queued kernels may still use it, and then it is poisoned.
void give_back(Block* block) {
  char* at = g.bytes + block->place;
  size_t size = block->size;
  Item item;
  item.kind = Kind::Poison;
  item.name = "poison";
  item.run = [at, size] { std::memset(at, 0xFF, size); };
  if (block->stream->queue.empty()) {
    item.run();
  } else {
    put(*block->stream, std::move(item));
  }
  g.memory[block->device].cache[block->stream].emplace(block->size, block);
}

void settle(Memory& memory) {
  auto& deferred = memory.deferred;
  for (size_t i = 0; i < deferred.size();) {
    if (!passed(deferred[i]->until)) {
      i++;
      continue;
    }
    deferred[i]->until.clear();
    give_back(deferred[i]);
    deferred[i] = deferred.back();
    deferred.pop_back();
  }
}

void release(Memory& memory, int device, Lock& lock) {
  finish_device(device, lock);
  settle(memory);
  finish_device(device, lock);  // What has settled is poisoned.
  for (auto& [stream, blocks] : memory.cache) {
    for (auto& [size, block] : blocks) {
      size_t block_begin = block->place, block_end = block_begin + block->size;
      size_t begin = block_begin, end = block_end;
      memory.stats.reserved_bytes[0].decrease(block->size);
      memory.stats.segment[0].decrease(1);
      delete block;
      auto next = memory.holes.lower_bound(begin);
      if (next != memory.holes.end() && next->first == end) {
        end += next->second;
        next = memory.holes.erase(next);
      }
      if (next != memory.holes.begin() && std::prev(next)->first + std::prev(next)->second == begin) {
        begin = std::prev(next)->first;
      }
      memory.holes[begin] = end - begin;
      size_t first = (block_begin + 4095) / 4096 * 4096, last = block_end / 4096 * 4096;
      if (last > first) madvise(g.bytes + first, last - first, MADV_DONTNEED);
    }
  }
  memory.cache.clear();
}

[[noreturn]] void refuse(Memory& memory, size_t bytes, int device, Lock& lock) {
  memory.stats.num_ooms++;
  auto reserved = memory.stats.reserved_bytes[0].current;
  auto limit = memory.limit;
  lock.unlock();
  TORCH_CHECK_WITH(OutOfMemoryError, false, "emulated out of memory. Tried to allocate ", bytes, " bytes on device ",
                   device, " with ", reserved, " reserved and a limit of ", limit, ".");
  std::abort();
}

Block* take(size_t bytes, int device) {
  NoGil no_gil;
  Lock lock(g.mutex);
  auto& memory = g.memory[device];
  Stream* stream = &g.streams[device][this_stream[device]];
  size_t size = rounded(bytes);
  g.allocations++;
  if (g.until_failure && !--g.until_failure) refuse(memory, bytes, device, lock);
  settle(memory);
  Block* block = nullptr;
  auto& spare = memory.cache[stream];
  auto found = spare.lower_bound(size);
  if (found != spare.end() && found->first <= size + size / 8) {
    block = found->second;
    spare.erase(found);
  } else {
    auto over = [&] { return memory.limit && memory.stats.reserved_bytes[0].current + size > memory.limit; };
    if (over()) {
      memory.stats.num_alloc_retries++;
      release(memory, device, lock);
      if (over()) refuse(memory, bytes, device, lock);
    }
    auto hole = memory.holes.begin();
    while (hole != memory.holes.end() && hole->second < size) ++hole;
    if (hole == memory.holes.end()) refuse(memory, bytes, device, lock);
    block = new Block;
    block->place = hole->first;
    block->size = size;
    block->device = device;
    block->stream = stream;
    size_t rest = hole->second - size;
    memory.holes.erase(hole);
    if (rest) memory.holes[block->place + size] = rest;
    std::memset(g.bytes + block->place, 0xFF, size);
    memory.stats.reserved_bytes[0].increase(size);
    memory.stats.segment[0].increase(1);
    memory.stats.num_device_alloc++;
  }
  block->used = size;
  memory.live[block->place] = block;
  memory.stats.allocation[0].increase(1);
  memory.stats.active[0].increase(1);
  memory.stats.allocated_bytes[0].increase(size);
  memory.stats.active_bytes[0].increase(size);
  memory.stats.requested_bytes[0].increase(bytes);
  return block;
}

void free_block(void* pointer) {
  if (!pointer) return;
  Lock lock(g.mutex);
  size_t place = static_cast<char*>(pointer) - g.arena;
  auto& memory = g.memory[place / ARENA];
  auto found = memory.live.find(place);
  Block* block = found->second;
  memory.live.erase(found);
  memory.stats.allocation[0].decrease(1);
  memory.stats.active[0].decrease(1);
  memory.stats.allocated_bytes[0].decrease(block->used);
  memory.stats.active_bytes[0].decrease(block->used);
  for (Stream* other : block->others) {
    if (other != block->stream) block->until.emplace_back(other, other->queued);
  }
  block->others.clear();
  if (passed(block->until)) {
    block->until.clear();
    give_back(block);
  } else {
    memory.deferred.push_back(block);
  }
}

struct DeviceMemory final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override {
    int device = this_device;
    c10::Device where(TYPE, c10::DeviceIndex(device));
    if (!bytes) return {nullptr, nullptr, &free_block, where};
    void* pointer = g.arena + take(bytes, device)->place;
    return {pointer, pointer, &free_block, where};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    Item item;
    item.name = "copy_data";
    char* target = shadow(to);
    const char* source = shadow(from);
    item.run = [=] { std::memmove(target, source, bytes); };
    item.bytes = bytes;
    enqueue(current_stream(int((static_cast<char*>(to) - g.arena) / ARENA)), std::move(item));
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {
    NoGil no_gil;
    Lock lock(g.mutex);
    for (int device = 0; device < g.devices; device++) release(g.memory[device], device, lock);
  }
  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (!pointer.get()) return;
    Lock lock(g.mutex);
    size_t place = static_cast<char*>(pointer.get()) - g.arena;
    g.memory[place / ARENA].live.at(place)->others.insert(&stream_of(stream));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock(g.mutex);
    return g.memory[device].stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock(g.mutex);
    auto& stats = g.memory[device].stats;
    for (auto* stat : {&stats.allocation, &stats.allocated_bytes, &stats.reserved_bytes}) {
      (*stat)[0].reset_accumulated();
    }
  }
  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock(g.mutex);
    auto& stats = g.memory[device].stats;
    for (auto* stat : {&stats.allocation, &stats.segment, &stats.active, &stats.allocated_bytes, &stats.reserved_bytes,
                       &stats.active_bytes, &stats.requested_bytes}) {
      (*stat)[0].reset_peak();
    }
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock(g.mutex);
    auto& memory = g.memory[device];
    size_t total = memory.limit ? memory.limit : size_t(1) << 30;
    size_t used = memory.stats.reserved_bytes[0].current;
    return {total > used ? total - used : 0, total};
  }
};

// ---- Pinned host memory

void free_pinned(void* pointer) {
  if (!pointer) return;
  Lock lock(g.mutex);
  auto* at = static_cast<char*>(pointer);
  size_t size = g.pinned.at(at);
  g.leaving.push_back({at, size, users_of(at, size)});
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::Device cpu(c10::DeviceType::CPU);
    if (!bytes) return {nullptr, nullptr, &free_pinned, cpu};
    size_t size = 4096;
    while (size < bytes) size *= 2;
    Lock lock(g.mutex);
    for (size_t i = 0; i < g.leaving.size();) {
      if (!passed(g.leaving[i].until)) {
        i++;
        continue;
      }
      g.spare_pinned.emplace(g.leaving[i].size, g.leaving[i].pointer);
      g.leaving[i] = g.leaving.back();
      g.leaving.pop_back();
    }
    char* pointer = nullptr;
    auto spare = g.spare_pinned.find(size);
    if (spare != g.spare_pinned.end()) {
      pointer = spare->second;
      g.spare_pinned.erase(spare);
    } else {
      pointer = static_cast<char*>(std::aligned_alloc(4096, size));
      TORCH_CHECK(pointer, "No host memory for ", size, " pinned bytes");
      g.pinned[pointer] = size;
    }
    std::memset(pointer, 0xFF, size);
    return {pointer, pointer, &free_pinned, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

// ---- The device as torch sees it

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    set_device(device.index());
    return before;
  }
  c10::Device getDevice() const override { return {TYPE, c10::DeviceIndex(this_device)}; }
  void setDevice(c10::Device device) const override { set_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) this_device = device.index();
  }
  int index(c10::Device device) const { return device.index() < 0 ? this_device : device.index(); }
  c10::Stream getStream(c10::Device device) const override { return torch_stream(current_stream(index(device))); }
  c10::Stream getDefaultStream(c10::Device device) const override { return torch_stream(g.streams[index(device)][0]); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override { return torch_stream(new_stream(index(device))); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream before = torch_stream(current_stream(stream.device_index()));
    this_stream[stream.device_index()] = int(stream.id());
    return before;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &stream_of(stream); }
  using Event = std::shared_ptr<Mark>;
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto mark = emulated::record(stream_of(stream));
    Lock lock(g.mutex);
    if (!*event) *event = new Event;
    *static_cast<Event*>(*event) = std::move(mark);
  }
  static Event mark_of(void* event) {
    Lock lock(g.mutex);
    return event ? *static_cast<Event*>(event) : nullptr;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (auto mark = mark_of(event)) wait_for(stream_of(stream), mark);
  }
  bool queryEvent(void* event) const override {
    auto mark = mark_of(event);
    return !mark || query(*mark);
  }
  void synchronizeEvent(void* event) const override {
    auto mark = mark_of(event);
    if (!mark) return;
    NoGil no_gil;
    Lock lock(g.mutex);
    drain(*mark->stream, mark->place, lock);
    raise_failure(lock);
  }
  c10::DeviceIndex deviceCount() const noexcept override { return c10::DeviceIndex(g.devices); }
  bool queryStream(const c10::Stream& stream) const override {
    NoGil no_gil;
    Lock lock(g.mutex);
    let_run(lock);
    Stream& at = stream_of(stream);
    if (chance(0.5)) nudge(at, lock);
    return at.queue.empty();
  }
  void synchronizeStream(const c10::Stream& stream) const override { finish(stream_of(stream)); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    NoGil no_gil;
    Lock lock(g.mutex);
    finish_device(device < 0 ? this_device : device, lock);
    raise_failure(lock);
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator()->recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    auto begin = mark_of(first), end = mark_of(second);
    Lock lock(g.mutex);
    TORCH_CHECK(begin && end && begin->passed && end->passed, "Both events must have been recorded and have passed");
    return (end->time - begin->time) * 1000;
  }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// Random numbers are the CPU's, of a state that is the device's own.
struct DeviceGenerator final : c10::GeneratorImpl {
  at::Generator cpu;
  explicit DeviceGenerator(int device, at::Generator inner)
      : GeneratorImpl({TYPE, c10::DeviceIndex(device)}, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "This generator has no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "This generator has no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override { cpu.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu.unsafeGetGeneratorImpl()->get_state(); }
  GeneratorImpl* clone_impl() const override { return new DeviceGenerator(device_.index(), cpu.clone()); }
};

at::Generator new_generator(int device) {
  return at::make_generator<DeviceGenerator>(device, at::detail::createCPUGenerator());
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return c10::DeviceIndex(g.devices); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return c10::DeviceIndex(this_device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto before = c10::DeviceIndex(this_device);
    set_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? c10::DeviceIndex(this_device) : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override {
    static auto* memory = new PinnedMemory;
    return memory;
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    return {TYPE, c10::DeviceIndex((static_cast<char*>(pointer) - g.arena) / ARENA)};
  }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    static auto* generators = [] {
      auto* made = new std::vector<at::Generator>;
      for (int device = 0; device < MOST_DEVICES; device++) made->push_back(new_generator(device));
      return made;
    }();
    return (*generators)[device < 0 ? this_device : device];
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? this_device : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};

}  // namespace

at::Generator cpu_generator(const at::Generator& generator) {
  return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->cpu;
}

int current_device() { return this_device; }

void set_device(int device) {
  if (device < 0) return;
  TORCH_CHECK(device < g.devices, "There is no emulated device ", device);
  this_device = device;
}

Stream& current_stream(int device) { return g.streams[device][this_stream[device]]; }

c10::Stream torch_stream(const Stream& stream) {
  return c10::Stream(c10::Stream::UNSAFE, {TYPE, c10::DeviceIndex(stream.device)}, stream.id);
}

Stream& stream_of(const c10::Stream& stream) { return g.streams[stream.device_index()][stream.id()]; }

uint64_t enqueue(Stream& stream, Item item) {
  NoGil no_gil;
  Lock lock(g.mutex);
  uint64_t place = put(stream, std::move(item));
  let_run(lock);
  if (stream.queue.size() > LONGEST_QUEUE) drain(stream, stream.done + LONGEST_QUEUE / 2, lock);
  return place;
}

std::shared_ptr<Mark> record(Stream& stream) {
  auto mark = std::make_shared<Mark>();
  mark->stream = &stream;
  Item item;
  item.kind = Kind::Event;
  item.mark = mark;
  {
    // The place is set before anybody can wait for it.
    Lock lock(g.mutex);
    mark->place = stream.queued + 1;
    put(stream, std::move(item));
  }
  return mark;
}

void wait_for(Stream& stream, std::shared_ptr<Mark> mark) {
  Item item;
  item.kind = Kind::Wait;
  item.mark = std::move(mark);
  Lock lock(g.mutex);
  put(stream, std::move(item));
}

bool query(const Mark& mark) {
  NoGil no_gil;
  Lock lock(g.mutex);
  let_run(lock);
  if (!mark.passed && chance(0.5)) nudge(*mark.stream, lock);
  return mark.passed;
}

Stream& new_stream(int device) {
  Lock lock(g.mutex);
  int& next = g.next_stream[device];
  next = next % (STREAMS - 1) + 1;
  return g.streams[device][next];
}

std::shared_ptr<External> external(Stream& stream, std::string name, size_t bytes) {
  auto external = std::make_shared<External>();
  Item item;
  item.kind = Kind::External;
  item.name = std::move(name);
  item.bytes = bytes;
  item.external = external;
  Lock lock(g.mutex);
  external->stream = &stream;
  external->place = stream.queued + 1;
  put(stream, std::move(item));
  return external;
}

void reach(External& external) {
  NoGil no_gil;
  Lock lock(g.mutex);
  drain(*external.stream, external.place - 1, lock);
  external.begun = now();
}

void complete(External& external, const std::string& failure) {
  Lock lock(g.mutex);
  external.done = true;
  fail(failure);
  g.changed.notify_all();
}

void finish(Stream& stream) {
  NoGil no_gil;
  Lock lock(g.mutex);
  drain(stream, stream.queued, lock);
  raise_failure(lock);
}

c10::DeviceAllocator* allocator() {
  static auto* memory = new DeviceMemory;
  return memory;
}

char* shadow(const void* pointer) {
  return pointer ? const_cast<char*>(static_cast<const char*>(pointer)) - g.arena + g.bytes : nullptr;
}

bool is_pinned(const void* pointer) {
  Lock lock(g.mutex);
  auto* at = static_cast<const char*>(pointer);
  return within(g.pinned, at) || within(g.registered, at);
}

void poison_target(char* host, size_t bytes) {
  Lock lock(g.mutex);
  if (g.poison_targets && users_of(host, bytes).empty()) std::memset(host, 0xFF, bytes);
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  int before = this_device;
  this_device = storage->device().index();
  auto fresh = allocator()->allocate(bytes);
  if (size_t kept = std::min(bytes, storage->nbytes())) {
    allocator()->copy_data(fresh.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
  this_device = before;
}

}  // namespace emulated

namespace {

using namespace emulated;

void finish_all(Lock& lock) {
  for (int device = 0; device < g.devices; device++) finish_device(device, lock);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  c10::SetAllocator(TYPE, allocator());
  register_kernels();

  module.def("set_devices", [](int count) { g.devices = std::min(count, MOST_DEVICES); });
  module.def("device_count", [] { return g.devices; });
  module.def("current_device", &current_device);
  module.def("set_device", &set_device);
  module.def("seed", [](uint64_t seed) {
    Lock lock(g.mutex);
    g.random.seed(seed);
  });
  module.def("lateness", [](double late) {
    Lock lock(g.mutex);
    return std::exchange(g.late, late);
  });
  module.def("poison_targets", [](bool on) { return std::exchange(g.poison_targets, on); });
  module.def("limit", [](int device, size_t bytes) { g.memory[device].limit = bytes; });
  module.def("fail_after", [](int64_t count) { g.until_failure = count; });
  module.def("allocations", [] { return g.allocations; });
  module.def("hold", [](const std::string& kind) {
    Lock lock(g.mutex);
    g.held = kind;
    g.holder = std::this_thread::get_id();
    g.changed.notify_all();
  });
  module.def("queued", [](int device) {
    Lock lock(g.mutex);
    size_t count = 0;
    for (auto& stream : g.streams[device]) count += stream.queue.size();
    return count;
  });
  module.def("default_generator", [](int device) {
    auto& generator = at::detail::getPrivateUse1Hooks().getDefaultGenerator(c10::DeviceIndex(device));
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(generator));
  });
  module.def("shape_mismatches", &shape_mismatches);
  module.def("shadow", [](uintptr_t pointer) {
    return reinterpret_cast<uintptr_t>(shadow(reinterpret_cast<const void*>(pointer)));
  });
  module.def("take_failure", [] {
    Lock lock(g.mutex);
    return std::exchange(g.failure, "");
  });
  module.def("register_pinned", [](uintptr_t pointer, size_t bytes) {
    Lock lock(g.mutex);
    g.registered[reinterpret_cast<const char*>(pointer)] = bytes;
  });
  module.def("unregister_pinned", [](uintptr_t pointer) {
    Lock lock(g.mutex);
    auto found = g.registered.find(reinterpret_cast<const char*>(pointer));
    TORCH_CHECK(found != g.registered.end(), "This memory is not registered as pinned");
    bool used = !users_of(found->first, found->second).empty();
    g.registered.erase(found);
    if (used) fail("pinned memory was unregistered while a queued copy uses it");
  });
  module.def("start_trace", [] {
    Lock lock(g.mutex);
    g.rows.clear();
    g.tracing = true;
  });
  module.def("mark", [](const std::string& name) {
    Lock lock(g.mutex);
    double time = now();
    if (g.tracing) g.rows.push_back({-1, -1, "mark", name, 0, time, time, time});
  });
  module.def("stop_trace", [] {
    Lock lock(g.mutex);
    g.tracing = false;
    std::vector<std::tuple<int, int, std::string, std::string, size_t, double, double, double>> rows;
    for (auto& row : g.rows) {
      rows.emplace_back(row.device, row.stream, row.kind, row.name, row.bytes, row.queued, row.begun, row.ended);
    }
    return rows;
  });
  bind_process_group(module);
}
