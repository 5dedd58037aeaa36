// What every instruction set offers: one table of passes over contiguous memory.
//
// The kernel files are compiled with flags of their own, so this header and what it includes define no function:
// an inline function shared between them could be linked in its AVX-512 form and run on a CPU without it.
#pragma once

#include <cstdint>

enum Kind : int32_t { KIND_F32 = 0, KIND_BF16 = 1, KIND_F16 = 2, KIND_S8 = 3, KIND_U8 = 4 };

// How a segment holds its weights.
enum WeightMode : int32_t {
  WEIGHT_F32 = 0,    // fp32 in place (or a master whose working copy lives elsewhere)
  WEIGHT_BF16 = 1,   // fp32 master, bf16 working copy
  WEIGHT_F16 = 2,    // fp32 master, fp16 working copy
  WEIGHT_SPLIT = 3,  // bf16 working weight as the upper half of the master, 16 low bits beside it
};

enum RuleKind : int32_t { RULE_ADAM = 0, RULE_ADAGRAD = 1, RULE_LION = 2, RULE_SGD = 3, RULE_MOMENTUM = 4 };

enum RuleFlag : uint32_t {
  FLAG_L2 = 1,         // weight decay is added to the gradient
  FLAG_MAXIMIZE = 2,   // ascend
  FLAG_LERP_HIGH = 4,  // the lerp weight is at least one half: torch uses the other formula
  FLAG_FIRST = 8,      // the momentum buffer starts as the gradient
  FLAG_NESTEROV = 16,
};

// Elements are handed out in chunks of this many; it is a multiple of BLOCK and STEP.
constexpr int64_t CHUNK = 32768;
// Elements that share a scale in 8-bit state.
constexpr int64_t BLOCK = 256;
// Elements of one turn of a kernel's loop, a multiple of every vector width: sums have this many lanes.
constexpr int64_t STEP = 32;

// How far ahead of its loop a kernel asks for memory: bytes of a 4-byte stream, half of it of a 2-byte one.
extern const int64_t prefetch_ahead;

// These two are filled in by Python: their layout is part of the interface.
struct Segment {
  int64_t numel;
  int64_t start;  // the first element's number, for stochastic rounding
  const void* grad;
  float* weight;
  uint16_t* working;
  uint16_t* low;
  void* state[2];
  float* scale[2];
  int32_t grad_kind;
  int32_t weight_mode;
  int32_t state_kind[2];
  uint32_t seed;
  int32_t reserved;
};

struct Rule {
  int32_t kind;
  uint32_t flags;
  uint32_t seed;
  float c[9];
};

enum LimitKind : int32_t {
  LIMIT_READ = 0,
  LIMIT_COPY = 1,
  LIMIT_TRIAD = 2,
  LIMIT_FP32 = 3,
  LIMIT_SPLIT = 4,
  LIMIT_WHOLE = 5,
  LIMIT_BF16_STATE = 6,
  LIMIT_8BIT_STATE = 7,
};

// Split and join.
//
// hi is the master rounded half up, low its lower 16 bits, so hi - (low >= 0x8000) is the upper half again. A NaN is not
// rounded but made quiet, and need not come back as the same NaN. No master rounds up to a zero: where hi is one and
// low >= 0x8000, a program has set the weight to zero by itself, and the master is that zero.
struct Kernels {
  void (*update)(const Segment& segment, const Rule& rule, float multiplier, const void* grad, int32_t grad_kind,
                 int64_t begin, int64_t end);
  void (*cast)(void* dst, int32_t dst_kind, const void* src, int32_t src_kind, int64_t begin, int64_t end);
  void (*accumulate)(void* dst, int32_t dst_kind, const void* src, int32_t src_kind, float scale, int64_t begin,
                     int64_t end);
  double (*sum_squares)(const void* src, int32_t src_kind, int64_t begin, int64_t end);
  void (*split)(const float* master, uint16_t* hi, uint16_t* low, int64_t begin, int64_t end);
  void (*join)(const uint16_t* hi, const uint16_t* low, float* master, int64_t begin, int64_t end);
  void (*quantize)(const float* src, uint8_t* codes, float* scales, int32_t kind, int64_t begin, int64_t end);
  void (*dequantize)(const uint8_t* codes, const float* scales, float* dst, int32_t kind, int64_t begin, int64_t end);
  void (*limit)(int32_t kind, void* const* streams, uint32_t zero, int64_t begin, int64_t end);
};

extern const Kernels kernels_portable;
#if defined(__x86_64__)
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
#elif defined(__aarch64__)
extern const Kernels kernels_neon;
#endif
