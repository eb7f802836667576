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

struct Paged {
    scalar *keys, *values;  // [blocks, block, K, D]
    const int64_t* table;   // of one line
    long block, K;
};

static inline int64_t place(const struct Paged* cache, int64_t token, long k) {
    return ((cache->table[token / cache->block] * cache->block + token % cache->block) * cache->K + k) * D;
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

static inline void score_tile(struct Heads* heads, const struct Paged* cache, int64_t begin, int tokens, int64_t count) {
    for (int j = 0; j < tokens; j++) {
        const scalar* key = cache->keys + place(cache, begin + j, heads->k);
        if (begin + j + AHEAD < count) fetch(cache->keys + place(cache, begin + j + AHEAD, heads->k), heads->num * D);
        for (int n = 0; n < heads->num; n++, key += D) {
            vec part[PARTS];
            for (int p = 0; p < PARTS; p++) part[p] = load(key + p * LANES);
            for (int h = n * heads->G; h < (n + 1) * heads->G; h++) {
                const float* query = heads->query[h];
                vec dot[CHAINS];
                for (int p = 0; p < CHAINS; p++) dot[p] = part[p] * *(const vec*)(query + p * LANES);
                for (int p = CHAINS; p < PARTS; p++) dot[p % CHAINS] += part[p] * *(const vec*)(query + p * LANES);
                for (int left = CHAINS / 2; left; left /= 2)
                    for (int p = 0; p < left; p++) dot[p] += dot[p + left];
                heads->score[h][j] = sum_of(dot[0]);
            }
        }
    }
}

// The scores of a tile to weights, relative to the largest so far.
static inline void weigh_tile(struct Heads* heads, int tokens) {
    for (int h = 0; h < heads->num * heads->G; h++) {
        float *score = heads->score[h], most = heads->peak[h];
        for (int j = tokens; j < TILE; j++) score[j] = -INFINITY;
        vec peaks = all(most);
        for (int j = 0; j < TILE; j += LANES) peaks = larger(*(vec*)(score + j), peaks);
        most = largest_of(peaks);
        const float fade = expf(heads->peak[h] - most);
        vec weights = {};
        heads->peak[h] = most;
        for (int j = 0; j < TILE; j += LANES) {
            vec weight = exponential(*(vec*)(score + j) - most);
            *(vec*)(score + j) = weight;
            weights += weight;
        }
        heads->total[h] = heads->total[h] * fade + sum_of(weights);
        for (int p = 0; p < PARTS; p++) heads->sum[h][p] *= fade;
    }
}

static inline void add_tile(struct Heads* heads, const struct Paged* cache, int64_t begin, int tokens, int64_t count) {
    for (int j = 0; j < tokens; j++) {
        const scalar* value = cache->values + place(cache, begin + j, heads->k);
        if (begin + j + AHEAD < count) fetch(cache->values + place(cache, begin + j + AHEAD, heads->k), heads->num * D);
        for (int n = 0; n < heads->num; n++, value += D) {
            vec part[PARTS];
            for (int p = 0; p < PARTS; p++) part[p] = load(value + p * LANES);
            for (int h = n * heads->G; h < (n + 1) * heads->G; h++)
                for (int p = 0; p < PARTS; p++) heads->sum[h][p] += heads->score[h][j] * part[p];
        }
    }
}

// Attention of the heads to the first `count` tokens of a line.
static void attend_heads(struct Heads* heads, const struct Paged* cache, int64_t count, scalar* out) {
    const int H = heads->num * heads->G;
    for (int h = 0; h < H; h++) {
        heads->peak[h] = -INFINITY, heads->total[h] = 0;
        for (int p = 0; p < PARTS; p++) heads->sum[h][p] = (vec){};
    }
    for (int64_t begin = 0; begin < count; begin += TILE) {
        const int tokens = count - begin < TILE ? count - begin : TILE;
        score_tile(heads, cache, begin, tokens, count);
        weigh_tile(heads, tokens);
        add_tile(heads, cache, begin, tokens, count);
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
                of.G = G, of.num = k + num < K ? num : K - k, of.k = k;
                for (int h = 0; h < of.num * G; h++) {
                    rotated(of.query[h], own + (k * G + h) * D, q_norm, cosines, cosines + num_positions * (D / 2), eps);
                    for (int d = 0; d < D; d += LANES) *(vec*)(of.query[h] + d) *= scale;
                }
                attend_heads(&of, &cache, positions[t] + 1, out + (t * H + k * G) * D);
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
