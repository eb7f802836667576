// Vectors of 16 numbers, which the compiler cuts into those that the CPU has.

#include <stdint.h>

#define LANES 16
typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));

static inline vec all(float x) { return x - (vec){}; }
static inline vec choose(ivec which, vec a, vec b) { return (vec)(((ivec)a & which) | ((ivec)b & ~which)); }

// e to the x, for x of at most 88; 0 for what float32 has no number for.
static inline vec exponential(vec x) {
    vec scaled = x * 1.44269504088896341f;
    scaled = choose(scaled < -126.f, all(-126.f), scaled);
    scaled = choose(scaled > 127.f, all(127.f), scaled);
    ivec whole = __builtin_convertvector(scaled + choose(scaled < 0.f, all(-0.5f), all(0.5f)), ivec);
    vec t = (scaled - __builtin_convertvector(whole, vec)) * 0.693147180559945309f;
    vec y = t * (1.f / 5040) + 1.f / 720;
    y = y * t + 1.f / 120;
    y = y * t + 1.f / 24;
    y = y * t + 1.f / 6;
    y = y * t + 0.5f;
    y = y * t + 1.f;
    y = y * t + 1.f;
    vec power = (vec)((whole + 127) << 23);
    vec result = y * power;
    return choose(x < -87.f, (vec){}, result);
}
