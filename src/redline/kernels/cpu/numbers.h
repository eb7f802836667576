// What tensors hold: float32, or with -DBFLOAT16=1 bfloat16. All arithmetic is float32.

#include "vectors.h"

typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if BFLOAT16
typedef uint16_t scalar;
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
#if LANES == 16
// One instruction, of which gcc makes five.
static inline vec load(const scalar* at) {
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i_u*)at)), 16);
}
#else
static inline vec load(const scalar* at) { return (vec)(__builtin_convertvector(*(const hvec*)at, uvec) << 16); }
#endif
static inline uvec rounded_bits(vec x) {
    uvec bits = (uvec)x;
    uvec up = bits + 0x7fff + ((bits >> 16) & 1);
    uvec is_nan = (uvec)(x != x);
    return ((up & ~is_nan) | (is_nan & 0x7fc00000u)) >> 16;
}
#if LANES == 16
static inline void store(scalar* to, vec x) {
    _mm256_storeu_si256((__m256i_u*)to, _mm512_cvtepi32_epi16((__m512i)rounded_bits(x)));
}
#else
static inline void store(scalar* to, vec x) { *(hvec*)to = __builtin_convertvector(rounded_bits(x), hvec); }
#endif
static inline vec rounded(vec x) { return (vec)(rounded_bits(x) << 16); }
#else
typedef float scalar;
static inline vec load(const scalar* at) { return *(const vec*)at; }
static inline void store(scalar* to, vec x) { *(vec*)to = x; }
static inline vec rounded(vec x) { return x; }
#endif
