// Runs native kernels over a fixed number of elements, a function for each, so that callgrind counts them apart.
//
//     kernels LIBRARY ISA
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <dlfcn.h>

#include "kernels.h"

namespace {

constexpr int64_t N = 4 * CHUNK;

void* library;
int isa;
template <class F> F find(const char* name) {
  void* found = dlsym(library, name);
  if (!found) {
    std::fprintf(stderr, "%s: not in the library\n", name);
    std::exit(1);
  }
  return reinterpret_cast<F>(found);
}

template <class T> struct Buffer {
  std::vector<T> data = std::vector<T>(N + 64);
  T* get() {
    // Aligned as the library's own buffers are.
    auto at = reinterpret_cast<uintptr_t>(data.data());
    return reinterpret_cast<T*>((at + 63) / 64 * 64);
  }
};

Buffer<float> a, b, c, d;
Buffer<uint16_t> hi, low, half;

Rule adam() {
  Rule rule{};
  rule.kind = RULE_ADAM;
  const float values[] = {0.1f, 0.999f, 0.001f, 3.2f, 1e-8f, -1e-4f, 0.9999f, 0.1f, 0.0f};
  for (int i = 0; i < 9; ++i) rule.c[i] = values[i];
  return rule;
}

void update(const Segment& segment, const Rule& rule) {
  auto create = find<void* (*)(int, const Segment*, int64_t)>("wherry_plan_create");
  auto run = find<void (*)(void*, const Rule*, int64_t, float, const void* const*, const int32_t*)>("wherry_plan_run");
  void* plan = create(isa, &segment, 1);
  run(plan, &rule, 1, 0.5f, nullptr, nullptr);
  find<void (*)(void*)>("wherry_plan_free")(plan);
}

Segment base(const void* grad, int32_t grad_kind, int32_t mode) {
  Segment s{};
  s.numel = N;
  s.grad = grad;
  s.grad_kind = grad_kind;
  s.weight_mode = mode;
  s.state[0] = b.get();
  s.state[1] = c.get();
  return s;
}

}  // namespace

#define MEASURED extern "C" __attribute__((noinline)) void

MEASURED measured_adam_fp32() {
  Segment s = base(d.get(), KIND_F32, WEIGHT_F32);
  s.weight = a.get();
  update(s, adam());
}
MEASURED measured_adam_split() {
  Segment s = base(half.get(), KIND_BF16, WEIGHT_SPLIT);
  s.working = hi.get();
  s.low = low.get();
  update(s, adam());
}
MEASURED measured_adam_whole() {
  Segment s = base(half.get(), KIND_BF16, WEIGHT_BF16);
  s.weight = a.get();
  s.working = hi.get();
  update(s, adam());
}
MEASURED measured_limit_fp32() {
  void* streams[8] = {a.get(), b.get(), c.get(), d.get()};
  find<void (*)(int, void*, int32_t, void* const*, int64_t)>("wherry_limit")(isa, nullptr, LIMIT_FP32, streams, N);
}
MEASURED measured_limit_split() {
  void* streams[8] = {b.get(), c.get(), hi.get(), low.get(), half.get()};
  find<void (*)(int, void*, int32_t, void* const*, int64_t)>("wherry_limit")(isa, nullptr, LIMIT_SPLIT, streams, N);
}
MEASURED measured_accumulate_bf16_to_fp32() {
  using Run = void (*)(int, void*, void*, int32_t, const void*, int32_t, float, int64_t);
  find<Run>("wherry_accumulate")(isa, nullptr, a.get(), KIND_F32, half.get(), KIND_BF16, 1.0f, N);
}
MEASURED measured_cast_fp32_to_bf16() {
  using Run = void (*)(int, void*, void*, int32_t, const void*, int32_t, int64_t);
  find<Run>("wherry_cast")(isa, nullptr, hi.get(), KIND_BF16, a.get(), KIND_F32, N);
}
MEASURED measured_sum_squares_bf16() {
  find<double (*)(int, void*, const void*, int32_t, int64_t)>("wherry_sum_squares")(isa, nullptr, half.get(), KIND_BF16, N);
}
MEASURED measured_split() {
  using Run = void (*)(int, void*, const float*, uint16_t*, uint16_t*, int64_t);
  find<Run>("wherry_split")(isa, nullptr, a.get(), hi.get(), low.get(), N);
}

int main(int count, char** arguments) {
  if (count != 3 || !(library = dlopen(arguments[1], RTLD_NOW))) {
    std::fprintf(stderr, "kernels LIBRARY ISA: %s\n", count == 3 ? dlerror() : "expected two arguments");
    return 1;
  }
  isa = std::atoi(arguments[2]);
  for (int64_t i = 0; i < N; ++i) {
    a.get()[i] = b.get()[i] = d.get()[i] = 1e-3f * static_cast<float>(i % 97);
    c.get()[i] = 1e-6f * static_cast<float>(i % 89);
    hi.get()[i] = half.get()[i] = static_cast<uint16_t>(0x3c00 + i % 64);
  }
  measured_adam_fp32();
  measured_adam_split();
  measured_adam_whole();
  measured_limit_fp32();
  measured_limit_split();
  measured_accumulate_bf16_to_fp32();
  measured_cast_fp32_to_bf16();
  measured_sum_squares_bf16();
  measured_split();
  return 0;
}
