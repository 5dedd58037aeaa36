// The plain C interface: pools, jobs, plans and passes. Python's side of it is native/loading.py.
#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <system_error>
#include <utility>
#include <vector>

#include "export.h"
#include "kernels.h"
#include "pool.h"

using wherry::FloatEnvironment;
using wherry::Job;
using wherry::Pool;

// Measured: docs/decisions.md, "The distance of prefetches is the processor's".
const int64_t prefetch_ahead = [] {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_is("amd")) return 384;
#endif
  return 1024;
}();

namespace {

// Python holds jobs through this; the pool holds them too while they run.
struct Handle {
  std::shared_ptr<Job> job;
};

struct Plan {
  const Kernels* kernels;
  std::vector<Segment> segments;
  std::vector<int64_t> first;  // the first chunk of each segment, and the count of all
};

int64_t chunks_of(int64_t n) { return (n + CHUNK - 1) / CHUNK; }
int64_t end_of(int64_t chunk, int64_t n) { return (chunk + 1) * CHUNK < n ? (chunk + 1) * CHUNK : n; }

const Kernels* table(int isa) {
  switch (isa) {
    case 1: return &kernels_portable;
#if defined(__x86_64__)
    case 2: return &kernels_avx2;
    case 3: return &kernels_avx512;
#elif defined(__aarch64__)
    case 4: return &kernels_neon;
#endif
    default: return nullptr;
  }
}

// One submission: the plan's segments with this step's rules and, if given, gradients.
struct Update {
  const Plan* plan;
  std::vector<Rule> rules;
  std::vector<const void*> grads;
  std::vector<int32_t> kinds;
  float multiplier;

  void segment(size_t s, int64_t begin, int64_t end) const {
    const Segment& segment = plan->segments[s];
    const Rule& rule = rules.size() == 1 ? rules[0] : rules[s];
    plan->kernels->update(segment, rule, multiplier, grads.empty() ? segment.grad : grads[s],
                          kinds.empty() ? segment.grad_kind : kinds[s], begin, end);
  }
  void operator()(int64_t chunk) const {
    size_t low = 0, high = plan->segments.size();
    while (high - low > 1) {
      const size_t middle = (low + high) / 2;
      (plan->first[middle] <= chunk ? low : high) = middle;
    }
    const int64_t at = chunk - plan->first[low];
    segment(low, at * CHUNK, end_of(at, plan->segments[low].numel));
  }
};

Update make_update(const Plan* plan, const Rule* rules, int64_t rule_count, float multiplier, const void* const* grads,
                   const int32_t* kinds) {
  Update update;
  const size_t count = plan->segments.size();
  update.plan = plan;
  update.rules.assign(rules, rules + rule_count);
  if (grads) update.grads.assign(grads, grads + count);
  if (grads) update.kinds.assign(kinds, kinds + count);
  update.multiplier = multiplier;
  return update;
}

Handle* submit(Pool* pool, int64_t chunks, Job::Chunk run) {
  auto job = std::make_shared<Job>(chunks, pool ? pool->threads() : 1, std::move(run));
  if (pool)
    pool->submit(job);
  else
    job->run_inline();
  return new Handle{std::move(job)};
}

// Runs a pass over [0, n): here when there is no pool, else on the pool's threads, waiting for them.
void pass(Pool* pool, int64_t n, const std::function<void(int64_t, int64_t)>& run) {
  if (!pool) {
    FloatEnvironment environment;
    run(0, n);
    return;
  }
  auto job = std::make_shared<Job>(chunks_of(n), pool->threads(),
                                   [&](int64_t chunk) { run(chunk * CHUNK, end_of(chunk, n)); });
  pool->submit(job);
  job->wait();
}

}  // namespace

WHERRY_API int wherry_abi_version() { return 1; }

// For the check that both sides lay these out alike.
WHERRY_API int wherry_sizeof_segment() { return sizeof(Segment); }
WHERRY_API int wherry_sizeof_rule() { return sizeof(Rule); }

WHERRY_API int wherry_has_isa(int isa) {
  if (!table(isa)) return 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (isa == 2) return avx2;
  if (isa == 3)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return 1;
}

// Null when the system gives no more threads; `reason` then says so.
WHERRY_API void* wherry_pool_create(int threads, const int* cores, int core_count, char* reason, int64_t room) {
  try {
    return new Pool(threads, std::vector<int>(cores, cores + core_count));
  } catch (const std::system_error& error) {
    std::snprintf(reason, static_cast<size_t>(room), "%s", error.what());
    return nullptr;
  }
}
WHERRY_API void wherry_pool_destroy(void* pool) { delete static_cast<Pool*>(pool); }

WHERRY_API void wherry_job_wait(void* job) { static_cast<Handle*>(job)->job->wait(); }
WHERRY_API int wherry_job_done(void* job) { return static_cast<Handle*>(job)->job->done(); }
WHERRY_API void wherry_job_free(void* job) { delete static_cast<Handle*>(job); }

WHERRY_API void* wherry_plan_create(int isa, const Segment* segments, int64_t count) {
  auto plan = std::make_unique<Plan>();
  plan->kernels = table(isa);
  plan->segments.assign(segments, segments + count);
  int64_t chunks = 0;
  for (const Segment& segment : plan->segments) {
    plan->first.push_back(chunks);
    chunks += chunks_of(segment.numel);
  }
  plan->first.push_back(chunks);
  return plan.release();
}
WHERRY_API void wherry_plan_free(void* plan) { delete static_cast<Plan*>(plan); }

WHERRY_API void* wherry_plan_submit(void* plan_, void* pool, const Rule* rules, int64_t rule_count, float multiplier,
                                    const void* const* grads, const int32_t* kinds) {
  auto* plan = static_cast<const Plan*>(plan_);
  return submit(static_cast<Pool*>(pool), plan->first.back(),
                make_update(plan, rules, rule_count, multiplier, grads, kinds));
}
// In the calling thread.
WHERRY_API void wherry_plan_run(void* plan_, const Rule* rules, int64_t rule_count, float multiplier,
                                const void* const* grads, const int32_t* kinds) {
  auto* plan = static_cast<const Plan*>(plan_);
  FloatEnvironment environment;
  const Update update = make_update(plan, rules, rule_count, multiplier, grads, kinds);
  for (size_t s = 0; s < plan->segments.size(); ++s) update.segment(s, 0, plan->segments[s].numel);
}

WHERRY_API void wherry_cast(int isa, void* pool, void* dst, int32_t to, const void* src, int32_t from, int64_t n) {
  pass(static_cast<Pool*>(pool), n,
       [=](int64_t begin, int64_t end) { table(isa)->cast(dst, to, src, from, begin, end); });
}
WHERRY_API void wherry_accumulate(int isa, void* pool, void* dst, int32_t to, const void* src, int32_t from,
                                  float scale, int64_t n) {
  pass(static_cast<Pool*>(pool), n,
       [=](int64_t begin, int64_t end) { table(isa)->accumulate(dst, to, src, from, scale, begin, end); });
}
WHERRY_API void wherry_split(int isa, void* pool, const float* master, uint16_t* hi, uint16_t* low, int64_t n) {
  pass(static_cast<Pool*>(pool), n,
       [=](int64_t begin, int64_t end) { table(isa)->split(master, hi, low, begin, end); });
}
WHERRY_API void wherry_join(int isa, void* pool, const uint16_t* hi, const uint16_t* low, float* master, int64_t n) {
  pass(static_cast<Pool*>(pool), n, [=](int64_t begin, int64_t end) { table(isa)->join(hi, low, master, begin, end); });
}
WHERRY_API void wherry_quantize(int isa, void* pool, const float* src, uint8_t* codes, float* scales, int32_t kind,
                                int64_t n) {
  pass(static_cast<Pool*>(pool), n,
       [=](int64_t begin, int64_t end) { table(isa)->quantize(src, codes, scales, kind, begin, end); });
}
WHERRY_API void wherry_dequantize(int isa, void* pool, const uint8_t* codes, const float* scales, float* dst,
                                  int32_t kind, int64_t n) {
  pass(static_cast<Pool*>(pool), n,
       [=](int64_t begin, int64_t end) { table(isa)->dequantize(codes, scales, dst, kind, begin, end); });
}

// Summed chunk by chunk, then the chunks in order: the same however many threads there are.
WHERRY_API double wherry_sum_squares(int isa, void* pool_, const void* src, int32_t from, int64_t n) {
  auto* pool = static_cast<Pool*>(pool_);
  std::vector<double> sums(static_cast<size_t>(chunks_of(n)));
  const auto run = [&](int64_t chunk) {
    sums[static_cast<size_t>(chunk)] = table(isa)->sum_squares(src, from, chunk * CHUNK, end_of(chunk, n));
  };
  if (pool) {
    auto job = std::make_shared<Job>(chunks_of(n), pool->threads(), run);
    pool->submit(job);
    job->wait();
  } else {
    FloatEnvironment environment;
    for (int64_t chunk = 0; chunk < chunks_of(n); ++chunk) run(chunk);
  }
  double total = 0;
  for (double sum : sums) total += sum;
  return total;
}

WHERRY_API void wherry_limit(int isa, void* pool, int32_t kind, void* const* streams, int64_t n) {
  // Not a constant to the compiler, so that the exclusive or is done.
  volatile uint32_t zero = 0;
  const uint32_t seen = zero;
  pass(static_cast<Pool*>(pool), n,
       [=](int64_t begin, int64_t end) { table(isa)->limit(kind, streams, seen, begin, end); });
}
