// Tiles of products in whole numbers on a CPU: `quantized.c` multiplies by weights that were packed, `quantized_training.c` both ways.
//
// Numbers along a row are taken `GROUP` at a time. Those of a group, of a row of x or of the weight, are whole multiples of its
// scale, which is its largest number over `TOP`. What a group adds to a sum is exact in 32 bits, times two scales. So a row has
// the same bits in any company.
//
// The CPU adds the products of a unit, 4 bytes of numbers that lie beside each other in a row, to one sum of 32 bits. The weight is
// laid out for that in tiles of `TILE` of its rows:
//
//     tile:   for each unit of a row: that unit of all rows of the tile        then their scales, group by group
//     x:      for each group of a row: that group of `ROWS` rows
//
// Macros: BITS, 8 or 16. With 16, `TOP` is the largest for which a group cannot overflow.

#pragma GCC diagnostic ignored "-Wpsabi"  // every function with vectors is inlined

#include <math.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

#include "vectors.h"

#if defined(__AVX512F__) || defined(__aarch64__)
#define ROWS 6
#else
#define ROWS 3  // 16 registers, not 32
#endif
#define COLUMNS 2  // vectors of a tile
#define TILE (COLUMNS * LANES)
#define GROUP 64
#define ENOUGH 65536       // multiplications that are worth another thread
#define SMALLEST 1e-30f    // groups with nothing larger are zero
#define inlined static inline __attribute__((always_inline))

#if BITS == 8
typedef int8_t whole;
#define TOP 127
#else
typedef int16_t whole;
#define TOP 5792
#endif
#define UNIT (4 / (int)sizeof(whole))
typedef whole wholes __attribute__((vector_size(LANES * sizeof(whole)), aligned(4), may_alias));

// dot: adds to each sum the products of two units. SHIFT: what is added to the numbers of the weight, where the CPU wants them
// without a sign; sums then begin with what that comes to.
#if BITS == 16 && defined(__AVX512VNNI__)
#define SHIFT 0
inlined ivec dot(ivec sum, ivec weight, ivec x) { return (ivec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)weight, (__m512i)x); }
#elif BITS == 16 && defined(__AVX512BW__)
#define SHIFT 0
inlined ivec dot(ivec sum, ivec weight, ivec x) { return sum + (ivec)_mm512_madd_epi16((__m512i)weight, (__m512i)x); }
#elif BITS == 16 && defined(__AVXVNNI__)
#define SHIFT 0
inlined ivec dot(ivec sum, ivec weight, ivec x) { return (ivec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)weight, (__m256i)x); }
#elif BITS == 16 && defined(__AVX2__)
#define SHIFT 0
inlined ivec dot(ivec sum, ivec weight, ivec x) { return sum + (ivec)_mm256_madd_epi16((__m256i)weight, (__m256i)x); }
#elif BITS == 8 && defined(__AVX512VNNI__)
#define SHIFT 128
inlined ivec dot(ivec sum, ivec weight, ivec x) { return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weight, (__m512i)x); }
#elif BITS == 8 && defined(__AVXVNNI__)
#define SHIFT 128
inlined ivec dot(ivec sum, ivec weight, ivec x) { return (ivec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)weight, (__m256i)x); }
#elif BITS == 8 && defined(__ARM_FEATURE_DOTPROD)
#define SHIFT 0
inlined ivec dot(ivec sum, ivec weight, ivec x) { return (ivec)vdotq_s32((int32x4_t)sum, (int8x16_t)weight, (int8x16_t)x); }
#else
#error "this CPU multiplies whole numbers no faster than others"
#endif

inlined long groups_of(long I) { return (I + GROUP - 1) / GROUP; }
inlined long tile_bytes(long I) { return TILE * (I * (long)sizeof(whole) + groups_of(I) * 4); }
inlined long smaller(long a, long b) { return a < b ? a : b; }
inlined int32_t* units_of(char* tile) { return (int32_t*)tile; }
inlined float* scales_of(char* tile, long I) { return (float*)tile + I / UNIT * TILE; }

// ── to whole numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────

// The larger of the bits of two numbers without a sign: those of NaN and infinity are the largest.
inlined ivec larger_bits(ivec most, vec v) {
    const ivec bits = (ivec)v & 0x7fffffff;
#if defined(__AVX512F__)
    return (ivec)_mm512_max_epi32((__m512i)most, (__m512i)bits);
#else
    const ivec which = most > bits;
    return (most & which) | (bits & ~which);
#endif
}

inlined float largest_of_bits(ivec v) {
#if defined(__AVX512F__)
    const int32_t largest = _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t largest = v[0];
    for (int l = 1; l < LANES; l++) largest = v[l] > largest ? v[l] : largest;
#endif
    float number;
    return __builtin_memcpy(&number, &largest, 4), number;
}

inlined ivec rounded(vec v) {
    const ivec half = (ivec)all(0.5f) | ((ivec)v & (int32_t)0x80000000);  // with the sign of v
    return __builtin_convertvector(v + (vec)half, ivec);
}

inlined float scale_of(float largest) {
    if (!(largest < INFINITY)) return NAN;
    return largest > SMALLEST ? largest / TOP : 0.f;
}

inlined float inverse_of(float largest) { return largest > SMALLEST ? TOP / largest : 0.f; }

// A group of `count` numbers as units of 4 bytes. Returns the scale, NaN if a number is not finite, and the sum of the whole
// numbers.
inlined float group_to_units(const float* from, long count, int32_t* units, int shift, int32_t* sum) {
    ivec bits = {}, sums = {};
#pragma GCC unroll 4
    for (long i = 0; i < count; i += LANES) bits = larger_bits(bits, *(const vec*)(from + i));
    const float largest = largest_of_bits(bits), inverse = inverse_of(largest);
#pragma GCC unroll 4
    for (long i = 0; i < count; i += LANES) {
        const ivec number = rounded(*(const vec*)(from + i) * inverse);
        sums += number;
        *(wholes*)(units + i / UNIT) = __builtin_convertvector(number + shift, wholes);
    }
    *sum = 0;
    if (SHIFT)
        for (int l = 0; l < LANES; l++) *sum += sums[l];
    return scale_of(largest);
}

// Row r, column c becomes row c, column r.
inlined void transpose(ivec square[LANES]) {
#pragma GCC unroll 4
    for (int step = 1; step < LANES; step *= 2) {
        ivec low, high;  // lanes of two rows `step` apart, counted through
#pragma GCC unroll 16
        for (int l = 0; l < LANES; l++) low[l] = l & step ? LANES + l - step : l, high[l] = l & step ? LANES + l : l + step;
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++)
            if (!(r & step)) {
                const ivec a = square[r], b = square[r + step];
                square[r] = __builtin_shuffle(a, b, low), square[r + step] = __builtin_shuffle(a, b, high);
            }
    }
}

// A group of `LANES` rows of a tile, of which `rows` are there: row r lies at `from + r * stride`. `units` and `scales` are those
// of the first.
inlined void rows_to_tile(const float* from, long stride, long rows, long count, int32_t* units, float* scales) {
    int32_t of_rows[LANES][GROUP / UNIT] = {};
    for (long r = 0; r < LANES; r++) {
        int32_t sum;
        scales[r] = r < rows ? group_to_units(from + r * stride, count, of_rows[r], SHIFT, &sum) : 0.f;
    }
    for (long first = 0; first < count / UNIT; first += LANES) {
        ivec square[LANES];
        for (int r = 0; r < LANES; r++) square[r] = *(const ivec*)(of_rows[r] + first);
        transpose(square);
        for (long u = 0; u < LANES && first + u < count / UNIT; u++) *(ivec*)(units + (first + u) * TILE) = square[u];
    }
}

// ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Product {
    const char* packed;
    const float* bias;
    float* out;
    long row;  // numbers from a row of `out` to the next
    int adds;  // to what is in `out`
    long T, O, I;
    int32_t* units;  // of x: rows [t, t + ROWS) begin at t · I / UNIT
    float* scales;   // and here, and in `starts`, at t · groups
    int32_t* starts;
};

// What a group adds to `out`: `count` units of some rows of x and of a tile.
inlined void add_group(
    const int rows, const long count, const int32_t* x, const int32_t* weight, const float* scales_x, const float* scales,
    const int32_t* starts, vec out[ROWS][COLUMNS]) {
    ivec sum[ROWS][COLUMNS];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++) sum[r][c] = starts[r] - (ivec){};
#pragma GCC unroll 4
    for (long u = 0; u < count; u++) {
        ivec of_weight[COLUMNS];
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++) of_weight[c] = *(const ivec*)(weight + u * TILE + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            ivec of_x = x[r * count + u] - (ivec){};
#pragma GCC unroll 2
            for (int c = 0; c < COLUMNS; c++) sum[r][c] = dot(sum[r][c], of_weight[c], of_x);
        }
    }
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; c++) {
        vec scale = *(const vec*)(scales + c * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) out[r][c] += __builtin_convertvector(sum[r][c], vec) * (scale * scales_x[r]);
    }
}

inlined void store(const struct Product* p, vec sum, long t, long o) {
    float* to = p->out + t * p->row + o;
    if (o + LANES <= p->O) {
        if (p->bias) sum += *(const vec*)(p->bias + o);
        if (p->adds) sum += *(const vec*)to;
        *(vec*)to = sum;
    } else {
        float each[LANES];
        *(vec*)each = sum;
        for (int l = 0; o + l < p->O; l++) to[l] = (p->adds ? to[l] : 0.f) + (p->bias ? each[l] + p->bias[o + l] : each[l]);
    }
}

// Some rows of x and the tile from the weight's row o on. Of the tile behind it, `ahead` lines are fetched with each group, from
// `next` on.
inlined void tile(const int rows, const struct Product* p, long t, long o, const char* next, long ahead) {
    const long groups = groups_of(p->I), full = p->I / GROUP;
    const int32_t *x = p->units + t * (p->I / UNIT), *weight = (const int32_t*)(p->packed + o / TILE * tile_bytes(p->I));
    const int32_t* starts = p->starts + t * groups;
    const float *scales_x = p->scales + t * groups, *scales = (const float*)(weight + p->I / UNIT * TILE);
    vec out[ROWS][COLUMNS] = {};
    for (long g = 0; g < full; g++) {
        for (long line = 0; line < ahead; line++, next += 64) __builtin_prefetch(next, 0, 2);
        add_group(rows, GROUP / UNIT, x, weight, scales_x, scales, starts, out);
        x += GROUP / UNIT * rows, weight += GROUP / UNIT * TILE;
        scales_x += rows, scales += TILE, starts += rows;
    }
    if (full < groups) add_group(rows, p->I % GROUP / UNIT, x, weight, scales_x, scales, starts, out);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int c = 0; c < COLUMNS; c++)
            if (o + c * LANES < p->O) store(p, out[r][c], t + r, o + c * LANES);
}

inlined void some_rows(const struct Product* p, long t, long o, const char* next, long ahead) {
    switch (smaller(ROWS, p->T - t)) {
        case 1: return tile(1, p, t, o, next, ahead);
        case 2: return tile(2, p, t, o, next, ahead);
        case 3: return tile(3, p, t, o, next, ahead);
#if ROWS == 6
        case 4: return tile(4, p, t, o, next, ahead);
        case 5: return tile(5, p, t, o, next, ahead);
        case 6: return tile(6, p, t, o, next, ahead);
#endif
    }
}
