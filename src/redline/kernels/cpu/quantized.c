// Products of a weight in whole numbers and some rows on a CPU: out[t, o] = x[t] · weight[o] + bias[o]. `quantized.py` says for what,
// `quantized.h` how.
//
// Macros: BITS, 8 or 16.

#include <stdlib.h>

#include "quantized.h"

#define CHUNK (21 * ROWS)  // rows of x that stay in a cache while the weight passes by

long packed_bytes(long O, long I) { return (O + TILE - 1) / TILE * tile_bytes(I); }

// `packed` begins on 64 bytes. Rows beyond the last are zero.
void pack(const float* weight, char* packed, long O, long I, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long o = 0; o < O; o += TILE) {
        char* tile = packed + o / TILE * tile_bytes(I);
        for (long begin = 0; begin < I; begin += GROUP)
            for (long c = 0; c < TILE; c += LANES) {
                int32_t* units = units_of(tile) + begin / UNIT * TILE + c;
                float* scales = scales_of(tile, I) + begin / GROUP * TILE + c;
                rows_to_tile(weight + (o + c) * I + begin, I, O - o - c, smaller(GROUP, I - begin), units, scales);
            }
    }
}

// ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

static void rows_to_units(const struct Product* p, const float* x, long t) {
    const long rows = smaller(ROWS, p->T - t), groups = groups_of(p->I);
    for (long r = 0; r < rows; r++)
        for (long g = 0; g < groups; g++) {
            const long count = smaller(GROUP, p->I - g * GROUP), at = t * groups + g * rows + r;
            int32_t sum, *to = p->units + t * (p->I / UNIT) + (g * GROUP * rows + r * count) / UNIT;
            p->scales[at] = group_to_units(x + (t + r) * p->I + g * GROUP, count, to, 0, &sum);
            p->starts[at] = -SHIFT * sum;
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
    const struct Product p = {packed, bias, out, O, 0, T, O, I, units, scales, (int32_t*)(scales + T * groups)};
#pragma omp parallel num_threads(threads) if (T * O * I > ENOUGH)
    {
#pragma omp for schedule(static)
        for (long t = 0; t < T; t += ROWS) rows_to_units(&p, x, t);
        for (long first = 0; first < T; first += CHUNK) {
#pragma omp for schedule(static) nowait
            for (long o = 0; o < O; o += TILE) pass(&p, first, smaller(T, first + CHUNK), o);
        }
    }
    free(room);
}
