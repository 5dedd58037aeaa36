// The update rules, fused with unscaling, weight decay and the cast to working weights: one pass over memory.
//
// Each rule does the operations of torch.optim's single-tensor form in the same order, each rounded by itself.
#pragma once

#include "blocks_impl.h"

namespace {

// PLAIN has neither FLAG_L2 nor FLAG_LERP_HIGH, as nearly every training: without their branches in its loop.
template <bool PLAIN> struct Adam {
  static constexpr int STATES = 2;
  F lerp, lerp_rest, beta2, rest2, bias2_scale, eps, step, keep, decay;
  bool l2, lerp_high;
  explicit Adam(const Rule& r)
      : lerp(setf(r.c[0])), lerp_rest(setf(1.0f - r.c[0])), beta2(setf(r.c[1])), rest2(setf(r.c[2])),
        bias2_scale(setf(r.c[3])), eps(setf(r.c[4])), step(setf(r.c[5])), keep(setf(r.c[6])), decay(setf(r.c[7])),
        l2(!PLAIN && (r.flags & FLAG_L2)), lerp_high(!PLAIN && (r.flags & FLAG_LERP_HIGH)) {}
  F apply(F p, F g, F& m, F& v) const {
    if (!PLAIN && l2) g = add(g, mul(decay, p));
    p = mul(p, keep);
    F gap = sub(g, m);
    m = !PLAIN && lerp_high ? sub(g, mul(gap, lerp_rest)) : add(m, mul(lerp, gap));
    v = add(mul(v, beta2), mul(mul(rest2, g), g));
    F denominator = add(mul(root(v), bias2_scale), eps);
    return add(p, div(mul(step, m), denominator));
  }
};

struct Adagrad {
  static constexpr int STATES = 1;
  F step, eps, decay;
  bool l2;
  explicit Adagrad(const Rule& r) : step(setf(r.c[0])), eps(setf(r.c[1])), decay(setf(r.c[2])), l2(r.flags & FLAG_L2) {}
  F apply(F p, F g, F& sum, F&) const {
    if (l2) g = add(g, mul(decay, p));
    sum = add(sum, mul(g, g));
    return add(p, div(mul(step, g), add(root(sum), eps)));
  }
};

struct Lion {
  static constexpr int STATES = 1;
  F beta1, rest1, beta2, rest2, step, keep;
  explicit Lion(const Rule& r)
      : beta1(setf(r.c[0])), rest1(setf(r.c[1])), beta2(setf(r.c[2])), rest2(setf(r.c[3])), step(setf(r.c[4])),
        keep(setf(r.c[5])) {}
  F apply(F p, F g, F& m, F&) const {
    F toward = add(mul(m, beta1), mul(rest1, g));
    // The sign, 0 of 0 and of a NaN, as torch.sign has it.
    const F zero = setf(0.0f), one = setf(1.0f);
    F sign = sub(select(less(zero, toward), one, zero), select(less(toward, zero), one, zero));
    m = add(mul(m, beta2), mul(rest2, g));
    return add(mul(p, keep), mul(step, sign));
  }
};

template <bool MOMENTUM> struct Sgd {
  static constexpr int STATES = MOMENTUM ? 1 : 0;
  F momentum, rest, step, decay;
  bool l2, first, nesterov;
  explicit Sgd(const Rule& r)
      : momentum(setf(r.c[0])), rest(setf(r.c[1])), step(setf(r.c[2])), decay(setf(r.c[3])), l2(r.flags & FLAG_L2),
        first(r.flags & FLAG_FIRST), nesterov(r.flags & FLAG_NESTEROV) {}
  F apply(F p, F g, F& buffer, F&) const {
    if (l2) g = add(g, mul(decay, p));
    if (MOMENTUM) {
      buffer = first ? g : add(mul(buffer, momentum), mul(rest, g));
      g = nesterov ? add(g, mul(momentum, buffer)) : buffer;
    }
    return add(p, mul(step, g));
  }
};

struct Streams {
  const void* grad;
  float* weight;
  uint16_t* working;
  uint16_t* low;
  float* a;
  float* b;
};

template <int MODE> inline F read_weight(const Streams& s, int64_t i) {
  return MODE == WEIGHT_SPLIT ? read_split(s.working + i, s.low + i) : load(s.weight + i);
}
// Two vectors at a time: packing 32-bit lanes to 16 is cheaper so.
template <int MODE> inline void write_weights(const Streams& s, int64_t i, F p, F q) {
  if (MODE == WEIGHT_SPLIT) return write_split_result(s.working + i, s.low + i, p, q);
  Format<KIND_F32>::write(s.weight + i, p, q);
  if (MODE == WEIGHT_BF16) Format<KIND_BF16>::write(s.working + i, p, q);
  if (MODE == WEIGHT_F16) Format<KIND_F16>::write(s.working + i, p, q);
}

template <class R, int GRAD, int MODE> inline void turn(const Streams& s, const R& rule, F multiplier, int64_t at) {
  const auto* grad = static_cast<const typename Format<GRAD>::T*>(s.grad);
  const auto one = [&](int64_t i) {
    F g = mul(Format<GRAD>::read(grad + i), multiplier);
    F a = R::STATES > 0 ? load(s.a + i) : setf(0.0f);
    F b = R::STATES > 1 ? load(s.b + i) : setf(0.0f);
    F p = rule.apply(read_weight<MODE>(s, i), g, a, b);
    if (R::STATES > 0) store(s.a + i, a);
    if (R::STATES > 1) store(s.b + i, b);
    return p;
  };
  for (int64_t i = at; i < at + STEP; i += 2 * WIDTH) {
    const F p = one(i);
    const F q = one(i + WIDTH);
    write_weights<MODE>(s, i, p, q);
  }
}

template <class R, int GRAD, int MODE> inline void ahead(const Streams& s, int64_t i) {
  Format<GRAD>::ahead(s.grad, i);
  if (R::STATES > 0) prefetch_floats(s.a, i);
  if (R::STATES > 1) prefetch_floats(s.b, i);
  if (MODE != WEIGHT_SPLIT) prefetch_floats(s.weight, i);
  if (MODE != WEIGHT_F32) prefetch_words(s.working, i);
  if (MODE == WEIGHT_SPLIT) prefetch_words(s.low, i);
}

template <class R, int GRAD, int MODE> void fused(Streams s, const Rule& raw, float multiplier, int64_t n) {
  using G = typename Format<GRAD>::T;
  const R rule(raw);
  const F scale = setf(raw.flags & FLAG_MAXIMIZE ? -multiplier : multiplier);
  sweep(
      0, n,
      [&](int64_t i) {
        ahead<R, GRAD, MODE>(s, i);
        turn<R, GRAD, MODE>(s, rule, scale, i);
      },
      [&](int64_t i, int64_t count) {
        Rest<G> grad(static_cast<const G*>(s.grad) + i, count);
        Rest<float> weight, a, b;
        Rest<uint16_t> working, low;
        if (MODE != WEIGHT_SPLIT) weight = Rest<float>(s.weight + i, count);
        if (MODE == WEIGHT_SPLIT) working = Rest<uint16_t>(s.working + i, count);
        if (MODE == WEIGHT_SPLIT) low = Rest<uint16_t>(s.low + i, count);
        if (R::STATES > 0) a = Rest<float>(s.a + i, count);
        if (R::STATES > 1) b = Rest<float>(s.b + i, count);
        turn<R, GRAD, MODE>({grad.data, weight.data, working.data, low.data, a.data, b.data}, rule, scale, 0);
        if (MODE != WEIGHT_SPLIT) weight.give(s.weight + i, count);
        if (MODE != WEIGHT_F32) working.give(s.working + i, count);
        if (MODE == WEIGHT_SPLIT) low.give(s.low + i, count);
        if (R::STATES > 0) a.give(s.a + i, count);
        if (R::STATES > 1) b.give(s.b + i, count);
      });
}

using Pass = void (*)(Streams, const Rule&, float, int64_t);

template <class R, int GRAD> Pass pass_of_mode(int32_t mode) {
  switch (mode) {
    case WEIGHT_F32: return fused<R, GRAD, WEIGHT_F32>;
    case WEIGHT_BF16: return fused<R, GRAD, WEIGHT_BF16>;
    case WEIGHT_F16: return fused<R, GRAD, WEIGHT_F16>;
    default: return fused<R, GRAD, WEIGHT_SPLIT>;
  }
}
template <class R> Pass pass_of_grad(int32_t grad_kind, int32_t mode) {
  switch (grad_kind) {
    case KIND_F32: return pass_of_mode<R, KIND_F32>(mode);
    case KIND_BF16: return pass_of_mode<R, KIND_BF16>(mode);
    default: return pass_of_mode<R, KIND_F16>(mode);
  }
}
inline Pass pass_of(const Rule& rule, int32_t grad_kind, int32_t mode) {
  switch (rule.kind) {
    case RULE_ADAM:
      return rule.flags & (FLAG_L2 | FLAG_LERP_HIGH) ? pass_of_grad<Adam<false>>(grad_kind, mode)
                                                     : pass_of_grad<Adam<true>>(grad_kind, mode);
    case RULE_ADAGRAD: return pass_of_grad<Adagrad>(grad_kind, mode);
    case RULE_LION: return pass_of_grad<Lion>(grad_kind, mode);
    case RULE_SGD: return pass_of_grad<Sgd<false>>(grad_kind, mode);
    default: return pass_of_grad<Sgd<true>>(grad_kind, mode);
  }
}

inline int states_of(const Rule& rule) { return rule.kind == RULE_ADAM ? 2 : rule.kind == RULE_SGD ? 0 : 1; }

inline Streams streams_at(const Segment& s, const void* grad, int32_t grad_kind, int64_t i) {
  int64_t size = grad_kind == KIND_F32 ? 4 : 2;
  return {static_cast<const char*>(grad) + i * size,
          s.weight ? s.weight + i : nullptr,
          s.working ? s.working + i : nullptr,
          s.low ? s.low + i : nullptr,
          nullptr,
          nullptr};
}

// Lossy state is opened a block at a time into fp32 tiles that stay in the first cache.
void update_lossy(const Segment& s, const Rule& rule, Pass pass, float multiplier, const void* grad, int32_t grad_kind,
                  int64_t begin, int64_t end) {
  alignas(64) float tile[2][BLOCK] = {};
  const int states = states_of(rule);
  alignas(64) uint32_t noise[BLOCK];
  const uint32_t seed = seed_of(scramble(rule.seed ^ scramble(s.seed)), s.start);
  for (int64_t i = begin; i < end; i += BLOCK) {
    const int64_t n = i + BLOCK < end ? BLOCK : end - i;
    Streams streams = streams_at(s, grad, grad_kind, i);
    float** targets[2] = {&streams.a, &streams.b};
    for (int k = 0; k < states; ++k) {
      if (s.state_kind[k] == KIND_F32) {
        *targets[k] = static_cast<float*>(s.state[k]) + i;
      } else {
        open_state(s, k, i, n, tile[k]);
        *targets[k] = tile[k];
      }
    }
    pass(streams, rule, multiplier, n);
    draw(noise, static_cast<uint32_t>(s.start + i), seed);
    for (int k = 0; k < states; ++k)
      if (s.state_kind[k] != KIND_F32) close_state(s, k, i, n, tile[k], noise);
  }
}

void update(const Segment& s, const Rule& rule, float multiplier, const void* grad, int32_t grad_kind, int64_t begin,
            int64_t end) {
  const int states = states_of(rule);
  const Pass pass = pass_of(rule, grad_kind, s.weight_mode);
  for (int k = 0; k < states; ++k)
    if (s.state_kind[k] != KIND_F32)
      return update_lossy(s, rule, pass, multiplier, grad, grad_kind, begin, end);
  Streams streams = streams_at(s, grad, grad_kind, begin);
  if (states > 0) streams.a = static_cast<float*>(s.state[0]) + begin;
  if (states > 1) streams.b = static_cast<float*>(s.state[1]) + begin;
  pass(streams, rule, multiplier, end - begin);
}

}  // namespace
