// The products of a training step in whole numbers on a CPU: out[t, o] = Σ left(t, i) · right(o, i) over i, in float32.
// `quantized_training.py` says which, `quantized.h` how a tile is multiplied.
//
// Both factors come in float32, row by row or column by column, and become whole numbers here, a block at a time:
//
//     for `HEIGHT` rows of left
//         for `DEPTH` numbers along i          left to units, by all threads together
//             for each thread's tiles of right, as many as stay in its cache
//                                              right to units, and their products with every `ROWS` rows of left
//
// What a row of `out` is does not depend on the others, nor on how many there are: a row has the same bits in any company.
//
// Macros: BITS, 8 or 16.

#include <omp.h>
#include <stdlib.h>
#include <string.h>

#include "quantized.h"

#define HEIGHT 2016
#define DEPTH 2048
#define NEAR_BYTES (384 * 1024)
#ifndef AHEAD
#define AHEAD (4*LANES)
#endif
#define PIECE 16  // numbers that groups are filled up to with zeros

// A factor [rows, inner]. Number i of row r lies at `from[r * row + i]`; with `columns` at `from[r + i * row]`.
struct Factor {
    const float* from;
    long rows, row;
    int columns;
};

// Numbers [first, first + count) along i; `padded` with the zeros behind them.
struct Depth {
    long first, count, padded, groups;
};

inlined long in_pieces(long count) { return (count + PIECE - 1) / PIECE * PIECE; }
inlined const float* at(const struct Factor* f, long r, long i) { return f->from + (f->columns ? r + i * f->row : r * f->row + i); }

// ── to whole numbers ─────────────────────────────────────────────────────────────────────────────────────────────────────

// A group of `LANES` rows that lie beside each other, `stride` from one number of a row to the next. Scales and sums are those of
// `group_to_units`.
inlined void columns_to_units(const float* from, long stride, long count, int shift, ivec* units, float* scales, ivec* sums) {
    ivec bits = {}, sum = {};
    vec near[GROUP];
    for (long i = 0; i < count; i++) {
        __builtin_prefetch(from + i * stride + AHEAD, 0, 3);
        near[i] = *(const vec*)(from + i * stride);
        bits = larger_bits(bits, near[i]);
    }
    const vec largest = (vec)bits;
    const ivec some = largest > SMALLEST;
    const vec inverse = choose(some, TOP / largest, (vec){});
    *(vec*)scales = choose(largest < INFINITY, choose(some, largest / TOP, (vec){}), all(NAN));
    for (long u = 0; u * UNIT < count; u++) {
        ivec unit = {};
#pragma GCC unroll 4
        for (int k = 0; k < UNIT; k++) {
            const ivec number = rounded(near[u * UNIT + k] * inverse);
            sum += number;
            unit |= ((number + shift) & ((1 << BITS) - 1)) << (k * BITS);
        }
        units[u] = unit;
    }
    *sums = sum;
}

// The same at the edges of a factor, where numbers and rows are missing: zeros in their place.
inlined void some_columns(const struct Factor* f, long r, long i, long count, int shift, ivec* units, float* scales, ivec* sums) {
    if (r + LANES <= f->rows && count == GROUP) return columns_to_units(at(f, r, i), f->row, GROUP, shift, units, scales, sums);
    float filled[GROUP][LANES] = {};
    for (long n = 0; n < count; n++) memcpy(filled[n], at(f, r, i + n), smaller(LANES, f->rows - r) * sizeof(float));
    columns_to_units(filled[0], LANES, in_pieces(count), shift, units, scales, sums);
}

// Where the group g of left's row t lies among units, and what belongs to it among scales and starts.
struct Place {
    int32_t* units;
    long scale;
};

inlined struct Place place_of(const struct Product* p, const struct Depth* d, long t, long g) {
    const long begin = t / ROWS * ROWS, rows = smaller(ROWS, p->T - begin), units = smaller(GROUP, d->padded - g * GROUP) / UNIT;
    const long before = begin * d->padded + g * GROUP * rows;
    return (struct Place){p->units + before / UNIT + (t - begin) * units, begin * d->groups + g * rows + t - begin};
}

static void left_row(const struct Product* p, const struct Factor* left, const struct Depth* d, long t, long g) {
    const long count = smaller(GROUP, d->count - g * GROUP);
    const float* from = at(left, t, d->first + g * GROUP);
    float filled[GROUP] = {};
    if (count % PIECE) from = memcpy(filled, from, count * sizeof(float));
    const struct Place place = place_of(p, d, t, g);
    int32_t sum;
    p->scales[place.scale] = group_to_units(from, in_pieces(count), place.units, 0, &sum);
    p->starts[place.scale] = -SHIFT * sum;
}

// A group of `LANES` rows, from row r on.
static void left_columns(const struct Product* p, const struct Factor* left, const struct Depth* d, long r, long g) {
    const long count = smaller(GROUP, d->count - g * GROUP), units = in_pieces(count) / UNIT;
    ivec square[GROUP / UNIT] = {}, sums;
    float scales[LANES];
    some_columns(left, r, d->first + g * GROUP, count, 0, square, scales, &sums);
    for (long first = 0; first < units; first += LANES) transpose(square + first);
    for (long l = 0; l < smaller(LANES, p->T - r); l++) {
        const struct Place place = place_of(p, d, r + l, g);
        for (long first = 0; first < units; first += LANES)
            memcpy(place.units + first, &square[first + l], smaller(LANES, units - first) * sizeof(int32_t));
        p->scales[place.scale] = scales[l], p->starts[place.scale] = -SHIFT * sums[l];
    }
}

static void left_to_units(const struct Product* p, const struct Factor* left, const struct Depth* d) {
    if (left->columns) {
#pragma omp for schedule(static) collapse(2)
        for (long g = 0; g < d->groups; g++)
            for (long r = 0; r < p->T; r += LANES) left_columns(p, left, d, r, g);
    } else {
#pragma omp for schedule(static)
        for (long t = 0; t < p->T; t++)
            for (long g = 0; g < d->groups; g++) left_row(p, left, d, t, g);
    }
}

// A group of a tile, from right's row o on.
static void right_group(char* tile, const struct Factor* right, const struct Depth* d, long o, long g) {
    const long i = d->first + g * GROUP, count = smaller(GROUP, d->count - g * GROUP), units = in_pieces(count) / UNIT;
    for (long c = 0; c < TILE; c += LANES) {
        int32_t* to = units_of(tile) + g * (GROUP / UNIT) * TILE + c;
        float* scales = scales_of(tile, d->padded) + g * TILE + c;
        if (o + c >= right->rows) {
            for (long u = 0; u < units; u++) *(ivec*)(to + u * TILE) = (ivec){};
            *(vec*)scales = (vec){};
        } else if (right->columns) {
            ivec made[GROUP / UNIT], sums;
            some_columns(right, o + c, i, count, SHIFT, made, scales, &sums);
            for (long u = 0; u < units; u++) *(ivec*)(to + u * TILE) = made[u];
        } else if (count % PIECE == 0) {
            rows_to_tile(at(right, o + c, i), right->row, right->rows - o - c, count, to, scales);
        } else {
            float filled[LANES][GROUP] = {};
            for (long r = 0; r < smaller(LANES, right->rows - o - c); r++)
                memcpy(filled[r], at(right, o + c + r, i), count * sizeof(float));
            rows_to_tile(filled[0], GROUP, LANES, in_pieces(count), to, scales);
        }
    }
}

// Tiles [first, last), in the order in which the numbers lie.
static void right_to_units(char* tiles, const struct Factor* right, const struct Depth* d, long first, long last) {
    const long bytes = tile_bytes(d->padded), number = last - first;
    for (long each = 0; each < number * d->groups; each++) {
        const long n = right->columns ? each % number : each / d->groups, g = right->columns ? each / number : each % d->groups;
        right_group(tiles + n * bytes, right, d, (first + n) * TILE, g);
    }
}

// ── products ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Task {
    struct Factor left, right;
    const float* bias;
    float* out;
    long I;
    int adds;
};

// Rows [t, t + rows) of left and the numbers of `d` by the tiles [begin, end) of right, `near` at a time. All threads call it at once,
// each with its own tiles and memory for them; `room` is that for left.
static void block(
    const struct Task* task, long t, long rows, const struct Depth* d, long begin, long end, long near, char* room, char* tiles) {
    const long O = task->right.rows, groups = d->groups;
    float* scales = (float*)room + rows * (d->padded / UNIT);
    struct Product p = {tiles, NULL, NULL, O, task->adds || d->first, rows, O, d->padded, (int32_t*)room, scales};
    p.starts = (int32_t*)(scales + rows * groups);
    struct Factor left = task->left;
    left.from = at(&left, t, 0), left.rows = rows;
    left_to_units(&p, &left, d);
    for (long first = begin; first < end; first += near) {
        const long last = smaller(end, first + near), o = first * TILE;
        right_to_units(tiles, &task->right, d, first, last);
        p.out = task->out + t * O + o, p.O = O - o, p.bias = task->bias && !d->first ? task->bias + o : NULL;
        for (long r = 0; r < rows; r += ROWS)
            for (long n = first; n < last; n++) some_rows(&p, r, (n - first) * TILE, tiles, 0);
    }
#pragma omp barrier
}

// out[T, O], or what is added to it; as it was where nothing is to be summed. Where there is no memory for whole numbers, what comes out is NaN.
void multiply(
    const float* left, const float* right, const float* bias, float* out, long T, long O, long I, int left_columns, int right_columns,
    int adds, int threads) {
    if (T == 0 || O == 0 || I == 0) return;
    const struct Task task = {
        {left, T, left_columns ? T : I, left_columns}, {right, O, right_columns ? O : I, right_columns}, bias, out, I, adds};
    const long depth = smaller(DEPTH, in_pieces(I)), height = smaller(HEIGHT, T), tiles = (O + TILE - 1) / TILE;
    const long bytes = tile_bytes(depth), near = NEAR_BYTES > bytes ? NEAR_BYTES / bytes : 1;
    const long for_left = (height * (depth * (long)sizeof(whole) + groups_of(depth) * 8) + 63) / 64 * 64;
    char* room = aligned_alloc(64, for_left + threads * near * bytes);
    if (!room) {
        for (long i = 0; i < T * O; i++) out[i] = NAN;
        return;
    }
#pragma omp parallel num_threads(threads) if (T * O * I > ENOUGH)
    {
        const long me = omp_get_thread_num(), all = omp_get_num_threads();
        char* own = room + for_left + me * near * bytes;
        for (long t = 0; t < T; t += height)
            for (long i = 0; i < I; i += DEPTH) {
                const long count = smaller(DEPTH, I - i), padded = in_pieces(count);
                const struct Depth d = {i, count, padded, groups_of(padded)};
                block(&task, t, smaller(height, T - t), &d, tiles * me / all, tiles * (me + 1) / all, near, room, own);
            }
    }
    free(room);
}
