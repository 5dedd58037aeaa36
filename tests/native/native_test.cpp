// The native core without Python, for the sanitizers: every kernel on exact allocations of awkward sizes, and the pool
// under contention. A digest of all results is equal on every instruction set, which test_cpp.py compares.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "kernels.h"
#include "check.h"

extern "C" {
int wherry_has_isa(int isa);
void* wherry_pool_create(int threads, const int* cores, int core_count, char* reason, int64_t room);
void wherry_pool_destroy(void* pool);
void wherry_job_wait(void* job);
int wherry_job_done(void* job);
void wherry_job_free(void* job);
void* wherry_plan_create(int isa, const Segment* segments, int64_t count);
void wherry_plan_free(void* plan);
void* wherry_plan_submit(void* plan, void* pool, const Rule* rules, int64_t rule_count, float multiplier,
                         const void* const* grads, const int32_t* kinds);
void wherry_plan_run(void* plan, const Rule* rules, int64_t rule_count, float multiplier, const void* const* grads,
                     const int32_t* kinds);
void wherry_cast(int isa, void* pool, void* dst, int32_t to, const void* src, int32_t from, int64_t n);
void wherry_accumulate(int isa, void* pool, void* dst, int32_t to, const void* src, int32_t from, float scale, int64_t n);
void wherry_split(int isa, void* pool, const float* master, uint16_t* hi, uint16_t* low, int64_t n);
void wherry_join(int isa, void* pool, const uint16_t* hi, const uint16_t* low, float* master, int64_t n);
void wherry_quantize(int isa, void* pool, const float* src, uint8_t* codes, float* scales, int32_t kind, int64_t n);
void wherry_dequantize(int isa, void* pool, const uint8_t* codes, const float* scales, float* dst, int32_t kind, int64_t n);
double wherry_sum_squares(int isa, void* pool, const void* src, int32_t from, int64_t n);
void wherry_limit(int isa, void* pool, int32_t kind, void* const* streams, int64_t n);
}

namespace {

using Bytes = std::vector<unsigned char>;

uint32_t next(uint32_t& state) { return state = state * 1664525u + 1013904223u; }

Bytes random_bytes(size_t count, uint32_t seed) {
  Bytes made(count);
  for (unsigned char& byte : made) byte = static_cast<unsigned char>(next(seed) >> 24);
  return made;
}

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::vector<float> made(static_cast<size_t>(count));
  for (float& value : made) value = static_cast<float>(static_cast<int32_t>(next(seed))) / 2147483648.0f;
  return made;
}

// All results of an instruction set in one number, compared between instruction sets and machines.
uint64_t digest;
template <class T> void add_to_digest(const std::vector<T>& values) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
  for (size_t i = 0; i < values.size() * sizeof(T); ++i) digest = (digest ^ bytes[i]) * 1099511628211u;
}

int64_t size_of(int32_t kind) { return kind == KIND_F32 ? 4 : kind == KIND_BF16 || kind == KIND_F16 ? 2 : 1; }

// The memory of one segment, each stream an allocation of exactly its size.
struct Memory {
  std::vector<float> weight, scale[2];
  std::vector<uint16_t> working, low;
  Bytes grad, state[2];
};

Segment segment_of(Memory& m, int64_t n, int32_t grad_kind, int32_t mode, const int32_t* state_kind, uint32_t seed) {
  Segment s = {};
  s.numel = n;
  s.start = 12345;
  s.grad_kind = grad_kind;
  s.weight_mode = mode;
  const std::vector<float> weights = random_floats(n, seed);
  m.grad.resize(static_cast<size_t>(n * size_of(grad_kind)));
  wherry_cast(1, nullptr, m.grad.data(), grad_kind, random_floats(n, seed + 1).data(), KIND_F32, n);
  if (mode != WEIGHT_F32) m.working.resize(static_cast<size_t>(n));
  if (mode == WEIGHT_SPLIT) {
    m.low.resize(static_cast<size_t>(n));
    wherry_split(1, nullptr, weights.data(), m.working.data(), m.low.data(), n);
  } else {
    m.weight = weights;
  }
  for (int k = 0; k < 2; ++k) {
    s.state_kind[k] = state_kind[k] == KIND_S8 && k == 1 ? static_cast<int32_t>(KIND_U8) : state_kind[k];
    m.state[k].assign(static_cast<size_t>(n * size_of(s.state_kind[k])), 0);
    m.scale[k].assign(static_cast<size_t>((n + BLOCK - 1) / BLOCK), 0.0f);
    s.state[k] = m.state[k].data();
    s.scale[k] = m.scale[k].data();
  }
  s.grad = m.grad.data();
  s.weight = m.weight.data();
  s.working = m.working.data();
  s.low = m.low.data();
  return s;
}

Rule rule_of(int32_t kind, uint32_t step) {
  Rule r = {};
  r.kind = kind;
  r.seed = step;
  const float numbers[9] = {0.1f, 0.9f, 0.1f, 0.5f, 1e-8f, -0.01f, 0.99f, 0.1f, 0.0f};
  std::memcpy(r.c, numbers, sizeof numbers);
  return r;
}

void test_updates(int isa) {
  const int64_t sizes[] = {0, 1, 31, 33, 255, 257, 1000, CHUNK + 77};
  const int32_t kinds[] = {KIND_F32, KIND_BF16, KIND_F16};
  for (int64_t n : sizes)
    for (int32_t rule = RULE_ADAM; rule <= RULE_MOMENTUM; ++rule)
      for (int32_t mode = WEIGHT_F32; mode <= WEIGHT_SPLIT; ++mode)
        for (int32_t state : {KIND_F32, KIND_BF16, KIND_S8}) {
          const int32_t grad_kind = kinds[(n + rule + mode) % 3];
          int32_t state_kind[2] = {state, state};
          if (rule == RULE_ADAGRAD && state == KIND_S8) state_kind[0] = KIND_U8;
          Memory memory;
          const Segment s = segment_of(memory, n, grad_kind, mode, state_kind, 7);
          void* plan = wherry_plan_create(isa, &s, 1);
          for (uint32_t step = 1; step <= 2; ++step) {
            const Rule r = rule_of(rule, step);
            wherry_plan_run(plan, &r, 1, 0.5f, nullptr, nullptr);
          }
          wherry_plan_free(plan);
          add_to_digest(memory.weight);
          add_to_digest(memory.working);
          add_to_digest(memory.low);
          for (int k = 0; k < 2; ++k) add_to_digest(memory.state[k]);
          for (int k = 0; k < 2; ++k) add_to_digest(memory.scale[k]);
        }
}

void test_passes(int isa) {
  for (int64_t n : {int64_t{0}, int64_t{1}, int64_t{33}, int64_t{511}, CHUNK + 5}) {
    const std::vector<float> values = random_floats(n, 3);
    for (int32_t to : {KIND_F32, KIND_BF16, KIND_F16})
      for (int32_t from : {KIND_F32, KIND_BF16, KIND_F16}) {
        const Bytes src = random_bytes(static_cast<size_t>(n * size_of(from)), 11);
        Bytes dst(static_cast<size_t>(n * size_of(to)));
        wherry_cast(isa, nullptr, dst.data(), to, src.data(), from, n);
        wherry_accumulate(isa, nullptr, dst.data(), to, src.data(), from, 0.5f, n);
      }
    std::vector<uint16_t> hi(values.size()), low(values.size());
    std::vector<float> back(values.size());
    wherry_split(isa, nullptr, values.data(), hi.data(), low.data(), n);
    wherry_join(isa, nullptr, hi.data(), low.data(), back.data(), n);
    CHECK(back == values);
    add_to_digest(hi);
    const std::vector<double> sum = {wherry_sum_squares(isa, nullptr, values.data(), KIND_F32, n)};
    add_to_digest(sum);
    for (int32_t kind : {KIND_BF16, KIND_F16}) {
      wherry_cast(isa, nullptr, hi.data(), kind, values.data(), KIND_F32, n);
      add_to_digest(hi);
    }
    for (int32_t kind : {KIND_S8, KIND_U8}) {
      Bytes codes(values.size());
      std::vector<float> scales(static_cast<size_t>((n + BLOCK - 1) / BLOCK));
      wherry_quantize(isa, nullptr, values.data(), codes.data(), scales.data(), kind, n);
      wherry_dequantize(isa, nullptr, codes.data(), scales.data(), back.data(), kind, n);
      add_to_digest(codes);
      add_to_digest(back);
    }
    std::vector<Bytes> room(5, Bytes(values.size() * 4));
    void* streams[5];
    for (int k = 0; k < 5; ++k) streams[k] = room[static_cast<size_t>(k)].data();
    for (int32_t kind = LIMIT_READ; kind <= LIMIT_8BIT_STATE; ++kind) wherry_limit(isa, nullptr, kind, streams, n);
  }
}

void test_pool() {
  char reason[64];
  const int core = 0;
  constexpr int SUBMITTERS = 3, ROUNDS = 40;
  constexpr int64_t N = 3 * CHUNK + 11;
  void* pool = wherry_pool_create(4, &core, 0, reason, sizeof reason);
  CHECK(pool);
  std::vector<std::thread> submitters;
  for (int t = 0; t < SUBMITTERS; ++t)
    submitters.emplace_back([pool] {
      std::vector<float> weight(N, 0.0f), grad(N, 1.0f), other(N, 0.0f);
      Segment s[2] = {};
      for (int k = 0; k < 2; ++k) {
        s[k].numel = N;
        s[k].grad = grad.data();
        s[k].weight = k ? other.data() : weight.data();
      }
      void* plan = wherry_plan_create(1, s, 1);
      void* second = wherry_plan_create(1, s + 1, 1);
      Rule rule = {};
      rule.kind = RULE_SGD;
      rule.c[2] = -1.0f;
      for (int i = 0; i < ROUNDS; ++i) {
        void* a = wherry_plan_submit(plan, pool, &rule, 1, 1.0f, nullptr, nullptr);
        void* b = wherry_plan_submit(second, pool, &rule, 1, 1.0f, nullptr, nullptr);
        std::thread waiter([a] { wherry_job_wait(a); });
        wherry_job_wait(a);
        waiter.join();
        wherry_job_wait(b);
        CHECK(wherry_job_done(a) && wherry_job_done(b));
        wherry_job_free(a);
        wherry_job_free(b);
        CHECK(wherry_sum_squares(1, pool, grad.data(), KIND_F32, N) == static_cast<double>(N));
      }
      for (float w : weight) CHECK(w == -static_cast<float>(ROUNDS));
      for (float w : other) CHECK(w == -static_cast<float>(ROUNDS));
      wherry_plan_free(plan);
      wherry_plan_free(second);
    });
  for (std::thread& submitter : submitters) submitter.join();
  wherry_pool_destroy(pool);

  // Destroying a pool finishes what is under way, though its handle is let go.
  std::vector<float> weight(N, 0.0f), grad(N, 1.0f);
  Segment s = {};
  s.numel = N;
  s.grad = grad.data();
  s.weight = weight.data();
  void* plan = wherry_plan_create(1, &s, 1);
  Rule rule = {};
  rule.kind = RULE_SGD;
  rule.c[2] = -1.0f;
  pool = wherry_pool_create(2, &core, 1, reason, sizeof reason);
  CHECK(pool);
  wherry_job_free(wherry_plan_submit(plan, pool, &rule, 1, 1.0f, nullptr, nullptr));
  wherry_pool_destroy(pool);
  for (float w : weight) CHECK(w == -1.0f);
  wherry_plan_free(plan);
}

}  // namespace

int main() {
  for (int isa = 1; isa <= 4; ++isa) {
    if (!wherry_has_isa(isa)) continue;
    digest = 14695981039346656037u;
    test_updates(isa);
    test_passes(isa);
    std::printf("instruction set %d: kernels in order, digest %016llx\n", isa, static_cast<unsigned long long>(digest));
  }
  test_pool();
  std::printf("pool in order\n");
  return 0;
}
