// What tensors hold: float32, or with -DBFLOAT16=1 bfloat16. All arithmetic is float32.

#include "vectors.h"

typedef uint32_t uvec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

#if BFLOAT16
typedef uint16_t scalar;
typedef uint16_t hvec __attribute__((vector_size(2 * LANES), aligned(2), may_alias));
static inline vec load(const scalar* at) { return (vec)(__builtin_convertvector(*(const hvec*)at, uvec) << 16); }
static inline uvec rounded_bits(vec x) {
    uvec bits = (uvec)x;
    uvec up = bits + 0x7fff + ((bits >> 16) & 1);
    uvec is_nan = (uvec)(x != x);
    return ((up & ~is_nan) | (is_nan & 0x7fc00000u)) >> 16;
}
static inline void store(scalar* to, vec x) { *(hvec*)to = __builtin_convertvector(rounded_bits(x), hvec); }
static inline vec rounded(vec x) { return (vec)(rounded_bits(x) << 16); }
#else
typedef float scalar;
static inline vec load(const scalar* at) { return *(const vec*)at; }
static inline void store(scalar* to, vec x) { *(vec*)to = x; }
static inline vec rounded(vec x) { return x; }
#endif
