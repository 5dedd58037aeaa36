// Reading and writing lanes in every stored format, on top of one instruction set's vectors.
#pragma once

#include "kernels.h"

namespace {

// One turn of a loop reads STEP elements: a line of a 2-byte stream, two of a 4-byte one.
inline void prefetch_floats(const void* base, int64_t i) {
  const float* p = static_cast<const float*>(base) + i;
  prefetch(p, prefetch_ahead);
  prefetch(p, prefetch_ahead + 64);
}
inline void prefetch_words(const void* base, int64_t i) {
  prefetch(static_cast<const uint16_t*>(base) + i, prefetch_ahead / 2);
}

template <int KIND> struct Format;

template <> struct Format<KIND_F32> {
  using T = float;
  static F read(const float* p) { return load(p); }
  static void write(float* p, F a) { store(p, a); }
  static void write(float* p, F a, F b) {
    store(p, a);
    store(p + WIDTH, b);
  }
  static void ahead(const void* p, int64_t i) { prefetch_floats(p, i); }
};

// bf16: to nearest even, a NaN to the one NaN torch's scalar cast gives.
template <> struct Format<KIND_BF16> {
  using T = uint16_t;
  static F read(const uint16_t* p) { return floats(shl<16>(load16(p))); }
  static I rounded(F a) {
    I raw = bits(a);
    I even = land(shr<16>(raw), seti(1));
    return select(nan(a), seti(0x7fc0), shr<16>(add(raw, add(even, seti(0x7fff)))));
  }
  static void write(uint16_t* p, F a) { store16(p, rounded(a)); }
  static void write(uint16_t* p, F a, F b) { store16(p, rounded(a), rounded(b)); }
  static void ahead(const void* p, int64_t i) { prefetch_words(p, i); }
};

template <> struct Format<KIND_F16> {
  using T = uint16_t;
  static F read(const uint16_t* p) { return load_half(p); }
  static void write(uint16_t* p, F a) { store_half(p, a); }
  static void write(uint16_t* p, F a, F b) {
    store_half(p, a);
    store_half(p + WIDTH, b);
  }
  static void ahead(const void* p, int64_t i) { prefetch_words(p, i); }
};

// Random bits of an element: a function of its number and a seed alone, so threads and vector widths do not matter.
inline uint32_t scramble(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}
inline I random_bits(uint32_t number, uint32_t seed) {
  I x = lxor(add(iota(), seti(number)), seti(seed));
  x = lxor(x, shr<16>(x));
  x = mul(x, seti(0x7feb352du));
  x = lxor(x, shr<15>(x));
  x = mul(x, seti(0x846ca68bu));
  return lxor(x, shr<16>(x));
}
// Elements are numbered modulo 2^32; the number of the run's first one goes into the seed whole.
inline uint32_t seed_of(uint32_t seed, int64_t start) {
  return scramble(seed ^ scramble(static_cast<uint32_t>(static_cast<uint64_t>(start) >> 32)));
}

// `noise` has 16 random bits; infinity stays, a NaN is the one NaN.
inline void write_bf16_stochastic(uint16_t* p, F a, I noise) {
  I rounded = shr<16>(add(bits(a), noise));
  store16(p, select(nan(a), seti(0x7fc0), rounded));
}

// See kernels.h for what the pair (hi, low) means.
inline void write_split(uint16_t* hi, uint16_t* low, F a) {
  I raw = bits(a);
  I quiet = lor(shr<16>(raw), seti(0x40));
  store16(hi, select(nan(a), quiet, shr<16>(add(raw, seti(0x8000)))));
  store16(low, land(raw, seti(0xffff)));
}
inline F read_split(const uint16_t* hi, const uint16_t* low) {
  const I borrow = seti(0x7fff8000);  // taken from a zero
  I upper = shl<16>(load16(hi));
  I raw = add(upper, load16_signed(low));
  return floats(select(equal(land(raw, borrow), borrow), upper, raw));
}

// The same for what an operation has yielded: its NaNs are quiet.
inline I upper_of_result(F a) { return shr<16>(add(bits(a), unless(nan(a), seti(0x8000)))); }
inline void write_split_result(uint16_t* hi, uint16_t* low, F a, F b) {
  store16(hi, upper_of_result(a), upper_of_result(b));
  store16(low, land(bits(a), seti(0xffff)), land(bits(b), seti(0xffff)));
}

// A loop over [begin, end) in turns of STEP; `turn(i)` does a whole one, `last(i, count)` what is left.
template <class Turn, class Last> inline void sweep(int64_t begin, int64_t end, Turn turn, Last last) {
  int64_t i = begin;
  for (; i + STEP <= end; i += STEP) turn(i);
  if (i < end) last(i, end - i);
}

// What is left of a stream, in a buffer as long as a turn.
template <class T> struct Rest {
  alignas(64) T data[STEP] = {};
  Rest() = default;
  Rest(const T* from, int64_t count) {
    for (int64_t i = 0; i < count; ++i) data[i] = from[i];
  }
  void give(T* to, int64_t count) const {
    for (int64_t i = 0; i < count; ++i) to[i] = data[i];
  }
};

}  // namespace
