// The C ABI of the disk engine. Errors that a caller must see are errno values; nothing throws across.
#include "disk.h"

#include <cerrno>
#include <memory>

#include "export.h"

using wherry::disk::Counters;
using wherry::disk::Engine;
using wherry::disk::Failure;
using wherry::disk::Request;

namespace disk = wherry::disk;

static_assert(sizeof(Failure) == 40);
static_assert(sizeof(Counters) == 11 * sizeof(int64_t));

WHERRY_API int wherry_disk_probe_uring() { return disk::uring_probe(); }

// `uring`: 1 for io_uring, 0 for threads. The files stay the caller's, and must outlive the engine.
WHERRY_API Engine* wherry_disk_open(int uring, const int32_t* files, int32_t lanes, int64_t block, int32_t depth,
                                    int32_t* error) {
  if (lanes < 1 || lanes > disk::kMaxLanes || depth < 1 || block < disk::kSector || block % disk::kSector) {
    *error = EINVAL;
    return nullptr;
  }
  Engine* engine = uring ? disk::uring_engine(files, lanes, block, depth)
                         : disk::threads_engine(files, lanes, block, depth);
  *error = engine ? 0 : errno;
  return engine;
}

// Waits for every request. Their handles stay valid.
WHERRY_API void wherry_disk_close(Engine* engine) {
  std::unique_ptr<Engine> last(engine);
  last->drain();
  last->stop();
}

WHERRY_API Request* wherry_disk_submit(Engine* engine, int32_t write, void* memory, int64_t begin, int64_t length,
                                       const int64_t* base, int32_t rotate, uint32_t* checksums) {
  return engine->submit(write != 0, static_cast<char*>(memory), begin, length, base, rotate, checksums);
}

// 1: complete, 0: not within the time.
WHERRY_API int32_t wherry_disk_wait(Request* request, int64_t timeout_ms) { return request->wait(timeout_ms); }

// For a complete request: 1 and the failure, or 0.
WHERRY_API int32_t wherry_disk_failure(Request* request, Failure* out) {
  *out = request->failure();
  return out->cause != disk::Cause::none;
}

WHERRY_API void wherry_disk_drop(Request* request) { request->drop(); }

WHERRY_API int32_t wherry_disk_add_memory(Engine* engine, void* memory, int64_t length) {
  return engine->add_memory(static_cast<char*>(memory), length);
}

WHERRY_API int32_t wherry_disk_remove_memory(Engine* engine, void* memory) {
  return engine->remove_memory(static_cast<char*>(memory));
}

WHERRY_API void wherry_disk_counters(Engine* engine, Counters* out) { *out = engine->counters(); }

WHERRY_API void wherry_disk_inject(Engine* engine, int32_t write, int64_t skip, int64_t count, int32_t code,
                                   int64_t limit, int64_t delay_ms) {
  engine->inject({write != 0, skip, count, code, limit, delay_ms});
}

WHERRY_API uint32_t wherry_crc32c(const void* memory, int64_t length) {
  return disk::crc32c(static_cast<const char*>(memory), length);
}
