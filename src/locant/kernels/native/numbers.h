/* The formats of numbers in memory, and conversions of rows of 16-bit numbers. */

#ifndef LOCANT_NUMBERS_H
#define LOCANT_NUMBERS_H

#include <stdint.h>
#include <string.h>

#ifdef __F16C__
#include <immintrin.h>
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "this code splits 32 bits into two numbers of 16 bits in the order of a little-endian machine"
#endif

/* The numbers in `native.DTYPES`. */
enum { FLOAT64, FLOAT32, FLOAT16, BFLOAT16 };
static const int64_t SIZE[4] = {8, 4, 2, 2};

static inline float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float from_bfloat16(uint32_t half) { return as_float(half << 16); }

static inline uint32_t to_bfloat16(float value) {
    uint32_t bits = as_bits(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
    return value != value ? 0x7fc0u : rounded;
}

/* The value rounded to bfloat16, in the high half of the result. The low half is to be discarded. NaN stays NaN if its low
   half is zero, as in numbers that come from bfloat16 and in NaN that arithmetic makes. The lowest bit to keep is added
   to the low half by "or", which does not change whether this half is above a tie, and is one operation with AVX-512. */
static inline uint32_t to_high_half(float value) {
    uint32_t bits = as_bits(value);
    return (bits | ((bits >> 16) & 1)) + 0x7fffu;
}

/* A word is two numbers of 16 bits, aligned like one. Two numbers of bfloat16 become two of float32, and back, without
   moving numbers between the lanes of vectors. */
typedef uint32_t __attribute__((aligned(2), may_alias)) Word;

static inline float first_of(Word word) { return as_float(word << 16); }
static inline float second_of(Word word) { return as_float(word & 0xffff0000u); }
static inline uint32_t to_word(float first, float second) {
    return to_high_half(first) >> 16 | (to_high_half(second) & 0xffff0000u);
}

/* Both conversions of float16 are those of torch (c10/util/Half.h): float arithmetic instead of branches, so that the
   compiler can vectorise them. Adding a power of two rounds numbers below 2^-14, for which float16 has fewer bits. */
static inline float from_float16(uint32_t half) {
    uint32_t high = half << 16, twice = high + high;
    float normal = as_float((twice >> 4) + (0xe0u << 23)) * 0x1.0p-112f;
    float small = as_float((twice >> 17) | (126u << 23)) - 0.5f;
    return as_float((high & 0x80000000u) | (twice < (1u << 27) ? as_bits(small) : as_bits(normal)));
}

static inline uint32_t to_float16(float value) {
    uint32_t bits = as_bits(value), twice = bits + bits, exponent = twice & 0xff000000u;
    float size = as_float(bits & 0x7fffffffu) * 0x1.0p+112f * 0x1.0p-110f; /* too large becomes infinite */
    exponent = exponent < 0x71000000u ? 0x71000000u : exponent;
    uint32_t sum = as_bits(as_float((exponent >> 1) + 0x07800000u) + size);
    uint32_t rounded = ((sum >> 13) & 0x7c00u) + (sum & 0x0fffu);
    return ((bits >> 16) & 0x8000u) | (twice > 0xff000000u ? 0x7e00u : rounded);
}

/* Special instructions convert rows of float16. gcc 12 does not find them itself. */
static inline void widen(const uint16_t *x, float *y, int64_t n) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) _mm512_storeu_ps(y + i, _mm512_cvtph_ps(_mm256_loadu_si256((const void *)(x + i))));
#elif defined __F16C__
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_cvtph_ps(_mm_loadu_si128((const void *)(x + i))));
#endif
    for (; i < n; i++) y[i] = from_float16(x[i]);
}

static inline void narrow(const float *x, uint16_t *y, int64_t n) {
    int64_t i = 0;
#ifdef __AVX512F__
    for (; i + 16 <= n; i += 16) _mm256_storeu_si256((void *)(y + i), _mm512_cvtps_ph(_mm512_loadu_ps(x + i), 0));
#elif defined __F16C__
    for (; i + 8 <= n; i += 8) _mm_storeu_si128((void *)(y + i), _mm256_cvtps_ph(_mm256_loadu_ps(x + i), 0));
#endif
    for (; i < n; i++) y[i] = (uint16_t)to_float16(x[i]);
}

#endif
