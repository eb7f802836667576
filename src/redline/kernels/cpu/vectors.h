// The vectors that the CPU has: gcc cuts longer ones into single numbers where it compares them.

#include <stdint.h>
#if defined(__AVX__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef float vec4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef int32_t ivec4 __attribute__((vector_size(16)));

static inline vec all(float x) { return x - (vec){}; }
static inline vec choose(ivec which, vec a, vec b) { return (vec)(((ivec)a & which) | ((ivec)b & ~which)); }

#if LANES == 16
static inline vec larger(vec a, vec b) { return (vec)_mm512_max_ps((__m512)a, (__m512)b); }
static inline vec smaller(vec a, vec b) { return (vec)_mm512_min_ps((__m512)a, (__m512)b); }
#elif LANES == 8
static inline vec larger(vec a, vec b) { return (vec)_mm256_max_ps((__m256)a, (__m256)b); }
static inline vec smaller(vec a, vec b) { return (vec)_mm256_min_ps((__m256)a, (__m256)b); }
#else
static inline vec larger(vec a, vec b) { return choose(a > b, a, b); }
static inline vec smaller(vec a, vec b) { return choose(a < b, a, b); }
#endif

// Four numbers with the same sum.
static inline vec4 folded(vec v) {
#if LANES == 16
    vec8 half = ((vec8*)&v)[0] + ((vec8*)&v)[1];
    return ((vec4*)&half)[0] + ((vec4*)&half)[1];
#elif LANES == 8
    return ((vec4*)&v)[0] + ((vec4*)&v)[1];
#else
    return v;
#endif
}

static inline float sum_of(vec v) {
    vec4 b = folded(v);
    return (b[0] + b[2]) + (b[1] + b[3]);
}

// `sum_of` each, to the bit.
static inline vec4 sums_of(vec a, vec b, vec c, vec d) {
    const vec4 of_a = folded(a), of_b = folded(b), of_c = folded(c), of_d = folded(d);
    const vec4 ab = __builtin_shuffle(of_a, of_b, (ivec4){0, 1, 4, 5}) + __builtin_shuffle(of_a, of_b, (ivec4){2, 3, 6, 7});
    const vec4 cd = __builtin_shuffle(of_c, of_d, (ivec4){0, 1, 4, 5}) + __builtin_shuffle(of_c, of_d, (ivec4){2, 3, 6, 7});
    return __builtin_shuffle(ab, cd, (ivec4){0, 2, 4, 6}) + __builtin_shuffle(ab, cd, (ivec4){1, 3, 5, 7});
}

static inline float largest_of(vec v) {
    for (int left = LANES / 2; left; left /= 2)
        for (int i = 0; i < left; i++) v[i] = v[i] > v[i + left] ? v[i] : v[i + left];
    return v[0];
}

// e to the x, for x of at most 88; 0 for what float32 has no number for.
static inline vec exponential(vec x) {
    vec scaled = smaller(all(127.f), larger(all(-126.f), x * 1.44269504088896341f));
    vec moved = scaled + 12582912.f;  // the nearest whole number is in its last bits
    vec t = (scaled - (moved - 12582912.f)) * 0.693147180559945309f;
    vec y = t * (1.f / 5040) + 1.f / 720;
    y = y * t + 1.f / 120;
    y = y * t + 1.f / 24;
    y = y * t + 1.f / 6;
    y = y * t + 0.5f;
    y = y * t + 1.f;
    y = y * t + 1.f;
    vec power = (vec)(((ivec)moved + 127) << 23);
    vec result = y * power;
    return choose(x < -87.f, (vec){}, result);
}
