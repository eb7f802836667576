// What a step of the engine does between its products, on a CPU. `steps.py` says for what, and calls it.
//
// Sums are float32, and results are rounded wherever eager torch rounds. Rows are multiples of 16 long. Where they are shared
// out among threads, each is computed by one of them, from its own numbers alone.
//
// Macros: D, size of a head; BFLOAT16, 1 for bfloat16 and 0 for float32.

#include <math.h>
#include <stddef.h>

#include "numbers.h"

#define ENOUGH 16384         // numbers that are worth another thread
#define CHAINS (16 / LANES)  // sums of one product that are under way at once

// `delta` may be null; then `sum` is not written.
void add_rms_norm(
    const scalar* x, const scalar* delta, const scalar* weight, scalar* sum, scalar* normed, long T, long E, float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (T * E > ENOUGH)
    for (long row = 0; row < T; row++) {
        const scalar* from = x + row * E;
        vec squares = {};
        if (delta) {
            for (long e = 0; e < E; e += LANES) {
                vec v = rounded(load(from + e) + load(delta + row * E + e));
                store(sum + row * E + e, v);
                squares += v * v;
            }
            from = sum + row * E;
        } else
            for (long e = 0; e < E; e += LANES) squares += load(from + e) * load(from + e);
        float scale = 1.f / sqrtf(sum_of(squares) / E + eps);
        for (long e = 0; e < E; e += LANES) store(normed + row * E + e, load(from + e) * scale * load(weight + e));
    }
}

void silu_mul(const scalar* gate_up, scalar* out, long T, long I, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (T * I > ENOUGH)
    for (long row = 0; row < T; row++)
        for (long i = 0; i < I; i += LANES) {
            vec gate = load(gate_up + row * 2 * I + i), up = load(gate_up + row * 2 * I + I + i);
            vec active = choose(gate < -88.f, gate * 0.f, gate / (1.f + exponential(-gate)));
            store(out + row * I + i, rounded(active) * up);
        }
}

// A head after norm and rotation.
static inline void rotated(float* to, const scalar* head, const scalar* norm, const scalar* cosines, const scalar* sines, float eps) {
    float wide[D];
    vec squares = {};
    for (int d = 0; d < D; d += LANES) {
        vec v = load(head + d);
        squares += v * v;
        *(vec*)(wide + d) = v;
    }
    if (norm) {
        float scale = 1.f / sqrtf(sum_of(squares) / D + eps);
        for (int d = 0; d < D; d += LANES) *(vec*)(wide + d) = rounded(*(vec*)(wide + d) * scale * load(norm + d));
    }
    for (int d = 0; d < D / 2; d += LANES) {
        vec first = *(vec*)(wide + d), second = *(vec*)(wide + D / 2 + d), c = load(cosines + d), s = load(sines + d);
        *(vec*)(to + d) = rounded(rounded(first * c) - rounded(second * s));
        *(vec*)(to + D / 2 + d) = rounded(rounded(second * c) + rounded(first * s));
    }
}

#define TILE 64
#define PARTS (D / LANES)
#define MOST_GROUPED 16
#define MOST_HEADS (2048 / D > MOST_GROUPED ? 2048 / D : MOST_GROUPED)  // taken at once: their sums fit the nearest cache
#define AHEAD 8                                                         // tokens that are fetched before they are needed
// Query heads of a key/value head that are taken at once: as many as there are registers for their sums.
#if LANES == 16 || !defined(__SSE__)
#define SCORED 4
#define ADDED (16 / PARTS >= 4 ? 4 : 16 / PARTS >= 2 ? 2 : 1)
#else
#define SCORED 2
#define ADDED 1
#endif
#define inlined static inline __attribute__((always_inline))

struct Paged {
    scalar *keys, *values;  // [blocks, block, K, D]
    const int64_t* table;   // of one line
    long block, K;
};

static inline int64_t place(const struct Paged* cache, int64_t token, long k) {
    return ((cache->table[token / cache->block] * cache->block + token % cache->block) * cache->K + k) * D;
}

// Some tokens of a line, one after the other, and where the first head of each begins: also of those behind them.
struct Tile {
    int tokens, known;
    int64_t at[TILE + AHEAD];
};

// Without a division for each.
static inline void find(struct Tile* tile, const struct Paged* cache, int64_t begin, int64_t count, long k) {
    const int64_t left = count - begin, width = cache->K * D;
    tile->tokens = left < TILE ? left : TILE, tile->known = left < TILE + AHEAD ? left : TILE + AHEAD;
    int64_t page = begin / cache->block, within = begin % cache->block;
    for (int j = 0; j < tile->known; page++, within = 0)
        for (int64_t at = (cache->table[page] * cache->block + within) * width + k * D; within < cache->block && j < tile->known;
             within++, at += width)
            tile->at[j++] = at;
}

static inline void fetch(const scalar* from, size_t numbers) {
    for (size_t i = 0; i < numbers; i += 64 / sizeof(scalar)) __builtin_prefetch(from + i);
}

// Query heads of `num` key/value heads from k on, G of each, and what they have attended to so far.
struct Heads {
    int G, num;
    long k;
    float query[MOST_HEADS][D], score[MOST_HEADS][TILE], peak[MOST_HEADS], total[MOST_HEADS];
    vec sum[MOST_HEADS][PARTS];
};

// Scores of query heads from `first` on by keys of four tokens, or fewer.
inlined void score(struct Heads* heads, const int num, int first, const scalar* const* keys, int j, int tokens) {
    vec dot[SCORED][4];
#pragma GCC unroll 4
    for (int h = 0; h < num; h++)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) dot[h][i] = (vec){};
#pragma GCC unroll 2
    for (int p = 0; p < PARTS; p++) {
        vec key[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) key[i] = load(keys[i] + p * LANES);
#pragma GCC unroll 4
        for (int h = 0; h < num; h++) {
            const vec query = *(const vec*)(heads->query[first + h] + p * LANES);
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) dot[h][i] += key[i] * query;
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < num; h++) {
        const vec4 sums = sums_of(dot[h][0], dot[h][1], dot[h][2], dot[h][3]);
        if (tokens == 4)
            *(vec4*)(heads->score[first + h] + j) = sums;
        else
            for (int i = 0; i < tokens; i++) heads->score[first + h][j + i] = sums[i];
    }
}

// Keys of the tokens behind are fetched meanwhile, and the values of these, which come next: those of all heads of a token, which lie
// together, in the first one's turn.
static inline void score_tile(struct Heads* heads, const struct Tile* tile, const scalar* all_keys, const scalar* values) {
    for (int n = 0; n < heads->num; n++)
        for (int j = 0; j < tile->tokens; j += 4) {
            const int left = tile->tokens - j < 4 ? tile->tokens - j : 4;
            const scalar* keys[4];
            for (int i = 0; i < 4; i++) keys[i] = all_keys + tile->at[j + (i < left ? i : 0)] + n * D;
            if (n == 0) {
                for (int i = j + AHEAD; i < j + AHEAD + 4 && i < tile->known; i++) fetch(all_keys + tile->at[i], heads->num * D);
                for (int i = j; i < j + left; i++) fetch(values + tile->at[i], heads->num * D);
            }
            int h = n * heads->G, end = h + heads->G;
            for (; h + SCORED <= end; h += SCORED) score(heads, SCORED, h, keys, j, left);
#if SCORED == 4
            if (end - h == 3)
                score(heads, 3, h, keys, j, left);
            else if (end - h == 2)
                score(heads, 2, h, keys, j, left);
            else
#endif
                if (end - h == 1)
                score(heads, 1, h, keys, j, left);
        }
}

// The scores of a tile to weights, relative to the largest so far.
static inline void weigh_tile(struct Heads* heads, int tokens) {
    const int end = (tokens + LANES - 1) / LANES * LANES;
    for (int h = 0; h < heads->num * heads->G; h++) {
        float *score = heads->score[h], most = heads->peak[h];
        for (int j = tokens; j < end; j++) score[j] = -INFINITY;
        vec peaks = all(most);
        for (int j = 0; j < end; j += LANES) peaks = larger(*(vec*)(score + j), peaks);
        most = largest_of(peaks);
        const float fade = expf(heads->peak[h] - most);
        vec weights = {};
        heads->peak[h] = most;
        for (int j = 0; j < end; j += LANES) {
            vec weight = exponential(*(vec*)(score + j) - most);
            *(vec*)(score + j) = weight;
            weights += weight;
        }
        heads->total[h] = heads->total[h] * fade + sum_of(weights);
        for (int p = 0; p < PARTS; p++) heads->sum[h][p] *= fade;
    }
}

// Values of a tile, times the weights of query heads from `first` on, to their sums.
inlined void add(struct Heads* heads, const struct Tile* tile, const scalar* values, const int num, int first, int n) {
    vec sum[ADDED][PARTS];
#pragma GCC unroll 4
    for (int h = 0; h < num; h++)
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) sum[h][p] = heads->sum[first + h][p];
    for (int j = 0; j < tile->tokens; j++) {
        const scalar* value = values + tile->at[j] + n * D;
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) {
            const vec part = load(value + p * LANES);
#pragma GCC unroll 4
            for (int h = 0; h < num; h++) sum[h][p] += heads->score[first + h][j] * part;
        }
    }
#pragma GCC unroll 4
    for (int h = 0; h < num; h++)
#pragma GCC unroll 16
        for (int p = 0; p < PARTS; p++) heads->sum[first + h][p] = sum[h][p];
}

static inline void add_tile(struct Heads* heads, const struct Tile* tile, const scalar* values) {
    for (int n = 0; n < heads->num; n++) {
        int h = n * heads->G, end = h + heads->G;
        for (; h + ADDED <= end; h += ADDED) add(heads, tile, values, ADDED, h, n);
#if ADDED > 2
        if (end - h == 3) add(heads, tile, values, 3, h, n), h = end;
        if (end - h == 2) add(heads, tile, values, 2, h, n), h = end;
#endif
#if ADDED > 1
        if (h < end) add(heads, tile, values, 1, h, n);
#endif
    }
}

// Attention of the heads to the first `count` tokens of a line, of which `tile` has the first.
static void attend_heads(struct Heads* heads, const struct Paged* cache, int64_t count, struct Tile* tile, scalar* out) {
    const int H = heads->num * heads->G;
    for (int h = 0; h < H; h++) {
        heads->peak[h] = -INFINITY, heads->total[h] = 0;
        for (int p = 0; p < PARTS; p++) heads->sum[h][p] = (vec){};
    }
    for (int64_t begin = 0; begin < count; begin += TILE) {
        if (begin) find(tile, cache, begin, count, heads->k);
        score_tile(heads, tile, cache->keys, cache->values);
        weigh_tile(heads, tile->tokens);
        add_tile(heads, tile, cache->values);
    }
    for (int h = 0; h < H; h++)
        for (int p = 0; p < PARTS; p++) store(out + h * D + p * LANES, heads->sum[h][p] / heads->total[h]);
}

// Of each token: norm and rotation of its heads, [H + 2 K, D]; its key and value to the cache; then attention to all of its line
// up to itself. Tokens that follow on each other in one line see each other: all are written before any is read.
void attend(
    const scalar* heads, scalar* keys, scalar* values, const scalar* q_norm, const scalar* k_norm, const scalar* rotary,
    const int64_t* positions, const int64_t* lines, const int64_t* tables, scalar* out, long T, long H, long K, long block,
    long table_stride, long num_positions, float eps, float scale, int threads) {
    // Heads of one token lie side by side: where there are tokens enough for all threads, one reads them all.
    const long G = H / K, several = MOST_HEADS / G, num = T < 2 * threads ? 1 : several < K ? several : K;
    int64_t work = 0;
    for (long t = 0; t < T; t++) work += (positions[t] + 1) * K * D;
#pragma omp parallel num_threads(threads) if (work > ENOUGH)
    {
#pragma omp for collapse(2) schedule(static)
        for (long t = 0; t < T; t++)
            for (long k = 0; k < K; k++) {
                const struct Paged cache = {keys, values, tables + lines[t] * table_stride, block, K};
                const scalar *own = heads + t * (H + 2 * K) * D, *cosines = rotary + positions[t] * (D / 2);
                const int64_t slot = place(&cache, positions[t], k);
                float key[D];
                rotated(key, own + (H + k) * D, k_norm, cosines, cosines + num_positions * (D / 2), eps);
                for (int d = 0; d < D; d += LANES) {
                    store(keys + slot + d, *(vec*)(key + d));
                    store(values + slot + d, load(own + (H + K + k) * D + d));
                }
            }
#pragma omp for collapse(2) schedule(dynamic)
        for (long t = 0; t < T; t++)
            for (long k = 0; k < K; k += num) {
                const struct Paged cache = {keys, values, tables + lines[t] * table_stride, block, K};
                const scalar *own = heads + t * (H + 2 * K) * D, *cosines = rotary + positions[t] * (D / 2);
                struct Heads of;
                struct Tile tile;
                of.G = G, of.num = k + num < K ? num : K - k, of.k = k;
                find(&tile, &cache, 0, positions[t] + 1, k);
                for (int j = 0; j < AHEAD && j < tile.known; j++) fetch(keys + tile.at[j], of.num * D);
                for (int h = 0; h < of.num * G; h++) {
                    rotated(of.query[h], own + (k * G + h) * D, q_norm, cosines, cosines + num_positions * (D / 2), eps);
                    for (int d = 0; d < D; d += LANES) *(vec*)(of.query[h] + d) *= scale;
                }
                attend_heads(&of, &cache, positions[t] + 1, &tile, out + (t * H + k * G) * D);
            }
    }
}

typedef void (*Product)(
    const scalar* x, const scalar* weight, const scalar* bias, scalar* out, long T, long O, long I, int threads);

struct Layer {
    const scalar *attn_norm, *qkv, *qkv_bias, *q_norm, *k_norm, *o, *o_bias;
    const scalar *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias;
    scalar *keys, *values;
};

// All layers of a step. `x` is the residual stream, and is used up; `normed` becomes the norm of its end. `scratch` has room for
// T times the rest: what a layer adds, its heads, what they attended to, and its inner numbers.
void hidden(
    Product product, const struct Layer* layers, long num_layers, const scalar* norm, scalar* x, scalar* normed, scalar* scratch,
    const scalar* rotary, const int64_t* positions, const int64_t* lines, const int64_t* tables, long T, long E, long I, long H, long K,
    long block, long table_stride, long num_positions, float eps, float scale, int threads) {
    const long N = H + 2 * K;
    scalar *delta = scratch, *heads = delta + T * E, *attended = heads + T * N * D;
    scalar *inner = attended + T * H * D, *active = inner + T * 2 * I;
    for (long index = 0; index < num_layers; index++) {
        const struct Layer* layer = layers + index;
        add_rms_norm(x, index ? delta : NULL, layer->attn_norm, x, normed, T, E, eps, threads);
        product(normed, layer->qkv, layer->qkv_bias, heads, T, N * D, E, threads);
        attend(
            heads, layer->keys, layer->values, layer->q_norm, layer->k_norm, rotary, positions, lines, tables, attended, T, H, K, block,
            table_stride, num_positions, eps, scale, threads);
        product(attended, layer->o, layer->o_bias, delta, T, E, H * D, threads);
        add_rms_norm(x, delta, layer->mlp_norm, x, normed, T, E, eps, threads);
        product(normed, layer->gate_up, layer->gate_up_bias, inner, T, 2 * I, E, threads);
        silu_mul(inner, active, T, I, threads);
        product(active, layer->down, layer->down_bias, delta, T, E, I, threads);
    }
    add_rms_norm(x, num_layers ? delta : NULL, norm, x, normed, T, E, eps, threads);
}
