// What a training step does between its products on a CPU, forward and backward, in one pass over memory each. `training.py`
// calls it. Rows are multiples of 16 numbers long, halves of a head too. Sums are float32; forward, results are rounded wherever
// eager torch rounds and the engine's steps do, backward where they are written.

#include <math.h>
#include <omp.h>
#include <string.h>

#include "numbers.h"

#define EACH(i, size) for (long i = 0; i < (size); i += LANES)

// x + delta, or x itself without one; its RMS norm; and the factor of each token.
void add_rms_norm(
    const scalar* x, const scalar* delta, const scalar* weight, scalar* sum, scalar* normed, float* scales, long T, long E,
    float eps, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++) {
        const scalar* row = x + t * E;
        vec squares = {};
        if (delta) {
            scalar* added = sum + t * E;
            EACH(i, E) {
                vec v = rounded(load(row + i) + load(delta + t * E + i));
                store(added + i, v), squares += v * v;
            }
            row = added;
        } else
            EACH(i, E) squares += load(row + i) * load(row + i);
        const float scale = scales[t] = 1 / sqrtf(sum_of(squares) / E + eps);
        EACH(i, E) store(normed + t * E + i, load(row + i) * scale * load(weight + i));
    }
}

// What reaches the sum, from its norm and, if there is any, from elsewhere; and the weight's gradient, a part of it from each
// thread. `parts` are zeros.
void rms_norm_backward(
    const scalar* sum, const scalar* weight, const float* scales, const scalar* grad_normed, const scalar* grad_sum,
    scalar* grad, float* parts, long T, long E, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const long me = omp_get_thread_num(), all = omp_get_num_threads();
        float* part = parts + me * E;
        for (long t = T * me / all; t < T * (me + 1) / all; t++) {
            const scalar *x = sum + t * E, *from = grad_normed + t * E;
            const float scale = scales[t];
            vec dots = {};
            EACH(i, E) dots += load(from + i) * load(weight + i) * load(x + i);
            const float back = sum_of(dots) * scale * scale * scale / E;
            EACH(i, E) {
                vec g = load(from + i), v = load(x + i), to = g * load(weight + i) * scale - v * back;
                if (grad_sum) to += load(grad_sum + t * E + i);
                store(grad + t * E + i, to);
                *(vec*)(part + i) += g * v * scale;
            }
        }
    }
}

// silu(gate) . up, [T, I], of the two side by side, [T, 2 I]. Where float32 has no number for e to the -gate, it is 0; of minus
// infinity NaN, as in torch.
void silu_mul(const scalar* gate_up, scalar* out, long T, long I, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++)
        EACH(i, I) {
            vec gate = load(gate_up + t * 2 * I + i), up = load(gate_up + (t * 2 + 1) * I + i);
            vec active = choose(gate < -88.f, gate * 0.f, gate / (1 + exponential(-gate)));
            store(out + t * I + i, rounded(active) * up);
        }
}

void silu_mul_backward(const scalar* gate_up, const scalar* grad_out, scalar* grad, long T, long I, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++)
        EACH(i, I) {
            vec gate = load(gate_up + t * 2 * I + i), up = load(gate_up + (t * 2 + 1) * I + i), g = load(grad_out + t * I + i);
            vec share = choose(gate < -88.f, gate * 0.f, 1 / (1 + exponential(-gate)));
            store(grad + t * 2 * I + i, g * up * share * (1 + gate * (1 - share)));
            store(grad + (t * 2 + 1) * I + i, g * gate * share);
        }
}

// The heads of every token, [T, H + 2 K, D], to queries, keys and values, each in a place of its own; queries and keys turned by
// cos and sin, [T, D / 2]. Backwards, their gradients to that of the heads.
void turn_heads(
    scalar* heads, scalar* q, scalar* k, scalar* v, const scalar* cos, const scalar* sin, long T, long H, long K, long D,
    int backwards, int threads) {
    const long half = D / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++)
        for (long h = 0; h < H + 2 * K; h++) {
            scalar* whole = heads + (t * (H + 2 * K) + h) * D;
            scalar* own = h < H ? q + (t * H + h) * D : h < H + K ? k + (t * K + h - H) * D : v + (t * K + h - H - K) * D;
            if (h >= H + K) {
                memcpy(backwards ? whole : own, backwards ? own : whole, D * sizeof(scalar));
                continue;
            }
            const scalar* from = backwards ? own : whole;
            scalar* to = backwards ? whole : own;
            EACH(i, half) {
                vec first = load(from + i), second = load(from + half + i), c = load(cos + t * half + i), s = load(sin + t * half + i);
                if (backwards) s = -s;
                store(to + i, rounded(first * c) - rounded(second * s));
                store(to + half + i, rounded(second * c) + rounded(first * s));
            }
        }
}
