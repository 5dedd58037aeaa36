// An accelerator that is emulated: its memory is out of the host's reach, and its streams are queues that run late.
#pragma once

#include <Python.h>
#include <ATen/core/Generator.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Stream.h>

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace emulated {

constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int MOST_DEVICES = 4;
constexpr int STREAMS = 33;  // The default one, and a pool that is handed out in turn as CUDA's is.

struct Stream;

// One recording of an event: passed when its stream has run all that was queued before it.
struct Mark {
  Stream* stream = nullptr;
  uint64_t place = 0;
  bool passed = false;
  double time = 0;
};

// Work that another thread does, such as a collective. The stream stands still until it is done.
struct External {
  Stream* stream = nullptr;
  uint64_t place = 0;
  bool done = false;
  double begun = 0;
};

enum class Kind { Kernel, Up, Down, Event, Wait, External, Poison };

struct Item {
  Kind kind = Kind::Kernel;
  std::string name;
  std::function<void()> run;
  size_t bytes = 0;
  const char* host = nullptr;  // The pinned memory that a copy reads or writes.
  std::shared_ptr<Mark> mark;
  std::shared_ptr<External> external;
  int64_t row = -1;
};

struct Stream {
  int device = 0;
  int id = 0;
  std::deque<Item> queue;
  uint64_t queued = 0;
  uint64_t done = 0;
};

// Lets go of the GIL, if this thread has it. What may run queued work must, as what it waits for may need the GIL.
struct NoGil {
  PyThreadState* state = nullptr;
  NoGil() {
    if (Py_IsInitialized() && PyGILState_Check()) state = PyEval_SaveThread();
  }
  ~NoGil() {
    if (state) PyEval_RestoreThread(state);
  }
  NoGil(const NoGil&) = delete;
};

// Waits without the GIL: who holds the mutex may need the GIL to let go of a tensor that Python knows.
struct Lock : std::unique_lock<std::mutex> {
  explicit Lock(std::mutex& mutex) : std::unique_lock<std::mutex>(mutex, std::try_to_lock) {
    if (owns_lock()) return;
    NoGil no_gil;
    lock();
  }
};

int current_device();
void set_device(int device);
Stream& current_stream(int device);
c10::Stream torch_stream(const Stream& stream);
Stream& stream_of(const c10::Stream& stream);

uint64_t enqueue(Stream& stream, Item item);
std::shared_ptr<Mark> record(Stream& stream);
void wait_for(Stream& stream, std::shared_ptr<Mark> mark);
bool query(const Mark& mark);
Stream& new_stream(int device);
std::shared_ptr<External> external(Stream& stream, std::string name, size_t bytes);
void reach(External& external);  // Runs all that is queued before it.
void complete(External& external, const std::string& failure);
void finish(Stream& stream);  // Runs all that is queued, and raises what a late kernel raised.

c10::DeviceAllocator* allocator();
char* shadow(const void* pointer);  // Where the bytes of a device pointer are.
bool is_pinned(const void* pointer);
void poison_target(char* host, size_t bytes);  // Unless queued work has yet to use it.
void resize_storage(c10::StorageImpl* storage, size_t bytes);

at::Tensor host_alias(const at::Tensor& tensor);  // Of the same memory. Keeps nothing alive.
void divide(const at::Tensor& host, int64_t by);
void register_kernels();
std::vector<std::string> shape_mismatches();  // Operations whose results were not as foretold.
at::Generator cpu_generator(const at::Generator& generator);

}  // namespace emulated
