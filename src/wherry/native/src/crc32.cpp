// CRC-32 of zlib and PNG: folded by carry-less multiplication, or by the processor's own instruction, where it has one.
#include <cstdint>
#include <cstring>

#include "export.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif

namespace {

#if defined(__x86_64__)
bool supported() { return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1"); }

__attribute__((target("pclmul,sse4.1"))) inline __m128i load(const char* memory) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i*>(memory));
}

__attribute__((target("pclmul,sse4.1"))) inline __m128i fold(__m128i value, __m128i by, __m128i next) {
  const __m128i low = _mm_clmulepi64_si128(value, by, 0x00), high = _mm_clmulepi64_si128(value, by, 0x11);
  return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

// "Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction", V. Gopal and others, Intel 2009; the
// constants are its powers of x modulo the reflected polynomial. `length` is a multiple of 16, and 64 at least.
__attribute__((target("pclmul,sse4.1"))) uint32_t folded(uint32_t crc, const char* memory, int64_t length) {
  const __m128i by4 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4), by1 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  __m128i a = _mm_xor_si128(load(memory), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i b = load(memory + 16), c = load(memory + 32), d = load(memory + 48);
  for (memory += 64, length -= 64; length >= 64; memory += 64, length -= 64) {
    a = fold(a, by4, load(memory));
    b = fold(b, by4, load(memory + 16));
    c = fold(c, by4, load(memory + 32));
    d = fold(d, by4, load(memory + 48));
  }
  a = fold(fold(fold(a, by1, b), by1, c), by1, d);
  for (; length >= 16; memory += 16, length -= 16) a = fold(a, by1, load(memory));
  // 128 bits to 64, to 32 (Barrett).
  const __m128i low_words = _mm_setr_epi32(~0, 0, ~0, 0);
  a = _mm_xor_si128(_mm_srli_si128(a, 8), _mm_clmulepi64_si128(a, by1, 0x10));
  const __m128i by_half = _mm_set_epi64x(0, 0x0163cd6124);
  a = _mm_xor_si128(_mm_srli_si128(a, 4), _mm_clmulepi64_si128(_mm_and_si128(a, low_words), by_half, 0x00));
  const __m128i polynomial = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  __m128i quotient = _mm_clmulepi64_si128(_mm_and_si128(a, low_words), polynomial, 0x10);
  quotient = _mm_clmulepi64_si128(_mm_and_si128(quotient, low_words), polynomial, 0x00);
  return static_cast<uint32_t>(_mm_extract_epi32(_mm_xor_si128(a, quotient), 1));
}
#elif defined(__aarch64__) && defined(__ARM_FEATURE_CRC32)
bool supported() { return true; }

uint32_t folded(uint32_t crc, const char* memory, int64_t length) {
  for (; length >= 8; memory += 8, length -= 8) {
    uint64_t word;
    std::memcpy(&word, memory, 8);
    crc = __crc32d(crc, word);
  }
  return crc;
}
#else
bool supported() { return false; }
uint32_t folded(uint32_t crc, const char*, int64_t) { return crc; }
#endif

}  // namespace

WHERRY_API int32_t wherry_has_crc32() { return supported(); }

// The checksum so far, carried on over `length` bytes, a multiple of 16 and 64 at least.
WHERRY_API uint32_t wherry_crc32(uint32_t crc, const void* memory, int64_t length) {
  return ~folded(~crc, static_cast<const char*>(memory), length);
}
