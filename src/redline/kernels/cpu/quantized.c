// Products of a weight in whole numbers and some rows on a CPU: out[t, o] = x[t] · weight[o] + bias[o]. `quantized.py` says for what.
//
// Numbers along a row are taken `GROUP` at a time. Those of a group, of a row of x or of the weight, are whole multiples of its
// scale, which is its largest number over `TOP`. What a group adds to a sum is exact in 32 bits, times two scales. So a row has
// the same bits in any company.
//
// The CPU adds the products of a unit, 4 bytes of numbers that lie beside each other in a row, to one sum of 32 bits. The weight is
// laid out for that in tiles of `TILE` of its rows:
//
//     tile:   for each unit of a row: that unit of all rows of the tile        then their scales, group by group
//     x:      for each unit of a row: that unit of `ROWS` rows
//
// Macros: BITS, 8 or 16. With 16, `TOP` is the largest for which a group cannot overflow.

#pragma GCC diagnostic ignored "-Wpsabi"  // every function with vectors is inlined

#include <math.h>
#include <stdlib.h>

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
#define CHUNK (21 * ROWS)  // rows of x that stay in a cache while the weight passes by
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
inlined long at_most(long a, long b) { return a < b ? a : b; }

// ── to whole numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────

// A group of `count` numbers as units, `stride` units apart, of 4 bytes each. Returns the scale, NaN if a number is not finite,
// and the sum of the whole numbers.
inlined float group_to_units(const float* from, long count, int32_t* units, long stride, int shift, int32_t* sum) {
    vec most = {}, spoilt = {};
    for (long i = 0; i < count; i += LANES) {
        vec v = *(const vec*)(from + i);
        most = larger(most, larger(v, -v));
        spoilt += v * 0.f;
    }
    const float largest = largest_of(most), inverse = largest > SMALLEST ? TOP / largest : 0.f;
    ivec sums = {};
    for (long i = 0; i < count; i += LANES) {
        vec v = *(const vec*)(from + i) * inverse;
        ivec number = __builtin_convertvector(v + choose(v < 0.f, all(-0.5f), all(0.5f)), ivec);
        sums += number;
        int32_t four_bytes[LANES / UNIT];
        *(wholes*)four_bytes = __builtin_convertvector(number + shift, wholes);
        for (int u = 0; u < LANES / UNIT; u++) units[(i / UNIT + u) * stride] = four_bytes[u];
    }
    *sum = 0;
    for (int l = 0; l < LANES; l++) *sum += sums[l];
    return (largest > SMALLEST ? largest / TOP : 0.f) + sum_of(spoilt);
}

long packed_bytes(long O, long I) { return (O + TILE - 1) / TILE * tile_bytes(I); }

// `packed` begins on 64 bytes. Rows beyond the last are zero.
void pack(const float* weight, char* packed, long O, long I, int threads) {
    static const float nothing[GROUP] = {};
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long o = 0; o < O; o += TILE) {
        int32_t* units = (int32_t*)(packed + o / TILE * tile_bytes(I));
        float* scales = (float*)(units + I / UNIT * TILE);
        for (long c = 0; c < TILE; c++)
            for (long begin = 0; begin < I; begin += GROUP) {
                const float* from = o + c < O ? weight + (o + c) * I + begin : nothing;
                int32_t sum, *to = units + begin / UNIT * TILE + c;
                scales[begin / GROUP * TILE + c] = group_to_units(from, at_most(GROUP, I - begin), to, TILE, SHIFT, &sum);
            }
    }
}

// ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Product {
    const char* packed;
    const float* bias;
    float* out;
    long T, O, I;
    int32_t* units;  // of x: rows [t, t + ROWS) begin at t · I / UNIT
    float* scales;   // and here, and in `starts`, at t · groups
    int32_t* starts;
};

static void rows_to_units(const struct Product* p, const float* x, long t) {
    const long rows = at_most(ROWS, p->T - t), groups = groups_of(p->I);
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < groups; g++) {
            int32_t sum, *to = p->units + t * (p->I / UNIT) + g * (GROUP / UNIT) * rows + r;
            const float* from = x + (t + r) * p->I + g * GROUP;
            p->scales[t * groups + g * rows + r] = group_to_units(from, at_most(GROUP, p->I - g * GROUP), to, rows, 0, &sum);
            p->starts[t * groups + g * rows + r] = -SHIFT * sum;
        }
}

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
            ivec of_x = x[u * rows + r] - (ivec){};
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
    float* to = p->out + t * p->O + o;
    if (o + LANES <= p->O) {
        if (p->bias) sum += *(const vec*)(p->bias + o);
        *(vec*)to = sum;
    } else {
        float each[LANES];
        *(vec*)each = sum;
        for (int l = 0; o + l < p->O; l++) to[l] = p->bias ? each[l] + p->bias[o + l] : each[l];
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
    switch (at_most(ROWS, p->T - t)) {
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

// Rows [first, last) of x and the tile from the weight's row o on.
inlined void pass(const struct Product* p, long first, long last, long o) {
    const long bytes = tile_bytes(p->I), groups = p->I / GROUP, fetches = (last - first + ROWS - 1) / ROWS * groups;
    const long ahead = fetches && o + TILE < p->O ? (bytes / 64 + fetches - 1) / fetches : 0;
    const char* next = p->packed + (o / TILE + 1) * bytes;
    for (long t = first; t < last; t += ROWS, next += groups * ahead * 64) some_rows(p, t, o, next, ahead);
}

// `packed` is what `pack` has made. Where there is no memory for x in whole numbers, what comes out is NaN.
void product(const float* x, const char* packed, const float* bias, float* out, long T, long O, long I, int threads) {
    if (T == 0) return;
    const long groups = groups_of(I);
    char* room = aligned_alloc(64, (T * (I * (long)sizeof(whole) + groups * 8) + 63) / 64 * 64);
    if (!room) {
        for (long i = 0; i < T * O; i++) out[i] = NAN;
        return;
    }
    int32_t* units = (int32_t*)room;
    float* scales = (float*)(units + T * (I / UNIT));
    const struct Product p = {packed, bias, out, T, O, I, units, scales, (int32_t*)(scales + T * groups)};
#pragma omp parallel num_threads(threads) if (T * O * I > ENOUGH)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < T; t += ROWS) rows_to_units(&p, x, t);
        for (long first = 0; first < T; first += CHUNK) {
#pragma omp for schedule(static) nowait
            for (long o = 0; o < O; o += TILE) pass(&p, first, at_most(T, first + CHUNK), o);
        }
    }
    free(room);
}
