// Passes other than the update: casts, sums, split and join, and the limit that memory sets to all of them.
#pragma once

#include "formats.h"

namespace {

template <int TO, int FROM> void cast_as(void* dst, const void* src, int64_t begin, int64_t end) {
  using T = typename Format<TO>::T;
  using S = typename Format<FROM>::T;
  auto* to = static_cast<T*>(dst);
  auto* from = static_cast<const S*>(src);
  auto turn = [](T* into, const S* out) {
    for (int64_t j = 0; j < STEP; j += WIDTH) Format<TO>::write(into + j, Format<FROM>::read(out + j));
  };
  sweep(
      begin, end,
      [&](int64_t i) {
        Format<FROM>::ahead(from, i);
        turn(to + i, from + i);
      },
      [&](int64_t i, int64_t count) {
        Rest<S> out(from + i, count);
        Rest<T> into;
        turn(into.data, out.data);
        into.give(to + i, count);
      });
}

template <int TO, int FROM> void accumulate_as(void* dst, const void* src, float by, int64_t begin, int64_t end) {
  using T = typename Format<TO>::T;
  using S = typename Format<FROM>::T;
  auto* to = static_cast<T*>(dst);
  auto* from = static_cast<const S*>(src);
  const F scale = setf(by);
  auto turn = [&](T* into, const S* out) {
    for (int64_t j = 0; j < STEP; j += WIDTH)
      Format<TO>::write(into + j, add(Format<TO>::read(into + j), mul(scale, Format<FROM>::read(out + j))));
  };
  sweep(
      begin, end,
      [&](int64_t i) {
        Format<FROM>::ahead(from, i);
        Format<TO>::ahead(to, i);
        turn(to + i, from + i);
      },
      [&](int64_t i, int64_t count) {
        Rest<S> out(from + i, count);
        Rest<T> into(to + i, count);
        turn(into.data, out.data);
        into.give(to + i, count);
      });
}

// STEP sums side by side in double, added up in a fixed order: the same on every instruction set.
template <int FROM> double sum_squares_as(const void* src, int64_t begin, int64_t end) {
  using S = typename Format<FROM>::T;
  auto* from = static_cast<const S*>(src);
  D sums[STEP / DOUBLES];
  for (D& sum : sums) sum = zero_doubles();
  auto turn = [&](const S* out) {
    for (int64_t j = 0; j < STEP; j += WIDTH) add_squares(sums + j / DOUBLES, Format<FROM>::read(out + j));
  };
  sweep(
      begin, end,
      [&](int64_t i) {
        Format<FROM>::ahead(from, i);
        turn(from + i);
      },
      [&](int64_t i, int64_t count) { turn(Rest<S>(from + i, count).data); });
  double lanes[STEP];
  for (int64_t j = 0; j < STEP / DOUBLES; ++j) store_doubles(lanes + j * DOUBLES, sums[j]);
  for (int64_t half = STEP / 2; half > 0; half /= 2)
    for (int64_t j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  return lanes[0];
}

template <int TO> void cast_to(void* dst, const void* src, int32_t from, int64_t begin, int64_t end) {
  switch (from) {
    case KIND_F32: return cast_as<TO, KIND_F32>(dst, src, begin, end);
    case KIND_BF16: return cast_as<TO, KIND_BF16>(dst, src, begin, end);
    default: return cast_as<TO, KIND_F16>(dst, src, begin, end);
  }
}
void cast(void* dst, int32_t to, const void* src, int32_t from, int64_t begin, int64_t end) {
  switch (to) {
    case KIND_F32: return cast_to<KIND_F32>(dst, src, from, begin, end);
    case KIND_BF16: return cast_to<KIND_BF16>(dst, src, from, begin, end);
    default: return cast_to<KIND_F16>(dst, src, from, begin, end);
  }
}

template <int TO> void accumulate_to(void* dst, const void* src, int32_t from, float by, int64_t begin, int64_t end) {
  switch (from) {
    case KIND_F32: return accumulate_as<TO, KIND_F32>(dst, src, by, begin, end);
    case KIND_BF16: return accumulate_as<TO, KIND_BF16>(dst, src, by, begin, end);
    default: return accumulate_as<TO, KIND_F16>(dst, src, by, begin, end);
  }
}
void accumulate(void* dst, int32_t to, const void* src, int32_t from, float by, int64_t begin, int64_t end) {
  switch (to) {
    case KIND_F32: return accumulate_to<KIND_F32>(dst, src, from, by, begin, end);
    case KIND_BF16: return accumulate_to<KIND_BF16>(dst, src, from, by, begin, end);
    default: return accumulate_to<KIND_F16>(dst, src, from, by, begin, end);
  }
}

double sum_squares(const void* src, int32_t from, int64_t begin, int64_t end) {
  switch (from) {
    case KIND_F32: return sum_squares_as<KIND_F32>(src, begin, end);
    case KIND_BF16: return sum_squares_as<KIND_BF16>(src, begin, end);
    default: return sum_squares_as<KIND_F16>(src, begin, end);
  }
}

void split(const float* master, uint16_t* hi, uint16_t* low, int64_t begin, int64_t end) {
  auto turn = [](const float* out, uint16_t* upper, uint16_t* lower) {
    for (int64_t j = 0; j < STEP; j += WIDTH) write_split(upper + j, lower + j, load(out + j));
  };
  sweep(
      begin, end,
      [&](int64_t i) {
        prefetch_floats(master, i);
        turn(master + i, hi + i, low + i);
      },
      [&](int64_t i, int64_t count) {
        Rest<float> out(master + i, count);
        Rest<uint16_t> upper, lower;
        turn(out.data, upper.data, lower.data);
        upper.give(hi + i, count);
        lower.give(low + i, count);
      });
}

void join(const uint16_t* hi, const uint16_t* low, float* master, int64_t begin, int64_t end) {
  auto turn = [](const uint16_t* upper, const uint16_t* lower, float* into) {
    for (int64_t j = 0; j < STEP; j += WIDTH) store(into + j, read_split(upper + j, lower + j));
  };
  sweep(
      begin, end,
      [&](int64_t i) {
        prefetch_words(hi, i);
        prefetch_words(low, i);
        turn(hi + i, low + i, master + i);
      },
      [&](int64_t i, int64_t count) {
        Rest<uint16_t> upper(hi + i, count), lower(low + i, count);
        Rest<float> into;
        turn(upper.data, lower.data, into.data);
        into.give(master + i, count);
      });
}

// The limit: an update's streams with no arithmetic but one exclusive or by `zero`, which the compiler cannot drop.
// `update` streams are read and written, in this order: WORDS of 4 bytes, HALVES of 2, BYTES of 1; then those only
// read and those only written.
template <int WORDS, int HALVES, int BYTES, int READ_WORDS, int READ_HALVES, int WRITE_WORDS, int WRITE_HALVES>
void move(void* const* streams, uint32_t zero_raw, int64_t begin, int64_t end) {
  constexpr int READS = WORDS + HALVES + BYTES, WRITES = READS + READ_WORDS + READ_HALVES;
  constexpr int STREAMS = WRITES + WRITE_WORDS + WRITE_HALVES;
  unsigned char* base[STREAMS];
  for (int k = 0; k < STREAMS; ++k) base[k] = static_cast<unsigned char*>(streams[k]);
  const I zero = seti(zero_raw);
  I seen = zero;
  for (int64_t i = begin; i + STEP <= end; i += STEP) {
    for (int k = 0; k < WORDS; ++k) prefetch_floats(base[k], i);
    for (int k = WORDS; k < WORDS + HALVES; ++k) prefetch_words(base[k], i);
    for (int k = READS; k < READS + READ_WORDS; ++k) prefetch_floats(base[k], i);
    for (int k = READS + READ_WORDS; k < WRITES; ++k) prefetch_words(base[k], i);
    for (int k = WRITES; k < WRITES + WRITE_WORDS; ++k) prefetch_floats(base[k], i);
    for (int k = WRITES + WRITE_WORDS; k < STREAMS; ++k) prefetch_words(base[k], i);
    for (int64_t j = i; j < i + STEP; j += WIDTH) {
      for (int k = 0; k < WORDS; ++k) {
        auto* p = reinterpret_cast<uint32_t*>(base[k]) + j;
        store32(p, lxor(load32(p), zero));
      }
      for (int k = WORDS + HALVES; k < READS; ++k) store8(base[k] + j, lxor(load8(base[k] + j), zero));
      for (int k = READS; k < READS + READ_WORDS; ++k)
        seen = lxor(seen, load32(reinterpret_cast<uint32_t*>(base[k]) + j));
      for (int k = WRITES; k < WRITES + WRITE_WORDS; ++k) store32(reinterpret_cast<uint32_t*>(base[k]) + j, seen);
    }
    // Two to a lane: nothing is widened, so that only the memory is measured.
    for (int64_t j = i / 2; j < (i + STEP) / 2; j += WIDTH) {
      for (int k = WORDS; k < WORDS + HALVES; ++k) {
        auto* p = reinterpret_cast<uint32_t*>(base[k]) + j;
        store32(p, lxor(load32(p), zero));
      }
      for (int k = READS + READ_WORDS; k < WRITES; ++k)
        seen = lxor(seen, load32(reinterpret_cast<uint32_t*>(base[k]) + j));
      for (int k = WRITES + WRITE_WORDS; k < STREAMS; ++k) store32(reinterpret_cast<uint32_t*>(base[k]) + j, seen);
    }
  }
  uint32_t lanes[WIDTH];
  store32(lanes, seen);
  volatile uint32_t sink = lanes[0];
  (void)sink;
}

void triad(void* const* streams, float by, int64_t begin, int64_t end) {
  auto* to = static_cast<float*>(streams[2]);
  auto *a = static_cast<const float*>(streams[0]), *b = static_cast<const float*>(streams[1]);
  const F scale = setf(by);
  for (int64_t i = begin; i + STEP <= end; i += STEP) {
    prefetch_floats(a, i);
    prefetch_floats(b, i);
    for (int64_t j = i; j < i + STEP; j += WIDTH) store(to + j, add(load(a + j), mul(scale, load(b + j))));
  }
}

void limit(int32_t kind, void* const* streams, uint32_t zero, int64_t begin, int64_t end) {
  switch (kind) {
    case LIMIT_READ: return move<0, 0, 0, 1, 0, 0, 0>(streams, zero, begin, end);
    case LIMIT_COPY: return move<0, 0, 0, 1, 0, 1, 0>(streams, zero, begin, end);
    case LIMIT_TRIAD: return triad(streams, 3.0f, begin, end);
    case LIMIT_FP32: return move<3, 0, 0, 1, 0, 0, 0>(streams, zero, begin, end);
    case LIMIT_SPLIT: return move<2, 2, 0, 0, 1, 0, 0>(streams, zero, begin, end);
    case LIMIT_WHOLE: return move<3, 0, 0, 0, 1, 0, 1>(streams, zero, begin, end);
    case LIMIT_BF16_STATE: return move<0, 4, 0, 0, 1, 0, 0>(streams, zero, begin, end);
    default: return move<0, 2, 2, 0, 1, 0, 0>(streams, zero, begin, end);
  }
}

}  // namespace
