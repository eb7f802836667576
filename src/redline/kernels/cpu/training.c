// What a training step does between its products on a CPU, forward and backward, in float32, in one pass over memory each.
// `training.py` calls it. Rows are multiples of 16 numbers long, halves of a head too.

#include <math.h>
#include <omp.h>
#include <string.h>

#include "vectors.h"

#define EACH(i, size) for (long i = 0; i < (size); i += LANES)

static inline vec get(const float* from) { return *(const vec*)from; }
static inline void put(float* to, vec v) { *(vec*)to = v; }

// x + delta, or x itself without one; its RMS norm; and the factor of each token.
void add_rms_norm(
    const float* x, const float* delta, const float* weight, float* sum, float* normed, float* scales, long T, long E, float eps,
    int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++) {
        const float* row = x + t * E;
        vec squares = {};
        if (delta) {
            float* added = sum + t * E;
            EACH(i, E) {
                vec v = get(row + i) + get(delta + t * E + i);
                put(added + i, v), squares += v * v;
            }
            row = added;
        } else
            EACH(i, E) squares += get(row + i) * get(row + i);
        const float scale = scales[t] = 1 / sqrtf(sum_of(squares) / E + eps);
        EACH(i, E) put(normed + t * E + i, get(row + i) * scale * get(weight + i));
    }
}

// What reaches the sum, from its norm and, if there is any, from elsewhere; and the weight's gradient, a part of it from each
// thread. `parts` are zeros.
void rms_norm_backward(
    const float* sum, const float* weight, const float* scales, const float* grad_normed, const float* grad_sum, float* grad,
    float* parts, long T, long E, int threads) {
#pragma omp parallel num_threads(threads)
    {
        const long me = omp_get_thread_num(), all = omp_get_num_threads();
        float* part = parts + me * E;
        for (long t = T * me / all; t < T * (me + 1) / all; t++) {
            const float *x = sum + t * E, *from = grad_normed + t * E, scale = scales[t];
            vec dots = {};
            EACH(i, E) dots += get(from + i) * get(weight + i) * get(x + i);
            const float back = sum_of(dots) * scale * scale * scale / E;
            EACH(i, E) {
                vec g = get(from + i), v = get(x + i), to = g * get(weight + i) * scale - v * back;
                if (grad_sum) to += get(grad_sum + t * E + i);
                put(grad + t * E + i, to), put(part + i, get(part + i) + g * v * scale);
            }
        }
    }
}

// silu(gate) . up, [T, I], of the two side by side, [T, 2 I]. Where float32 has no number for e to the -gate, it is 0; of minus
// infinity NaN, as in torch.
void silu_mul(const float* gate_up, float* out, long T, long I, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++)
        EACH(i, I) {
            vec gate = get(gate_up + t * 2 * I + i), up = get(gate_up + (t * 2 + 1) * I + i);
            vec active = choose(gate < -88.f, gate * 0.f, gate / (1 + exponential(-gate)));
            put(out + t * I + i, active * up);
        }
}

void silu_mul_backward(const float* gate_up, const float* grad_out, float* grad, long T, long I, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++)
        EACH(i, I) {
            vec gate = get(gate_up + t * 2 * I + i), up = get(gate_up + (t * 2 + 1) * I + i), g = get(grad_out + t * I + i);
            vec share = choose(gate < -88.f, gate * 0.f, 1 / (1 + exponential(-gate)));
            put(grad + t * 2 * I + i, g * up * share * (1 + gate * (1 - share)));
            put(grad + (t * 2 + 1) * I + i, g * gate * share);
        }
}

// The heads of every token, [T, H + 2 K, D], to queries, keys and values, each in a place of its own; queries and keys turned by
// cos and sin, [T, D / 2]. Backwards, their gradients to that of the heads.
void turn_heads(
    float* heads, float* q, float* k, float* v, const float* cos, const float* sin, long T, long H, long K, long D, int backwards,
    int threads) {
    const long half = D / 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++)
        for (long h = 0; h < H + 2 * K; h++) {
            float* whole = heads + (t * (H + 2 * K) + h) * D;
            float* own = h < H ? q + (t * H + h) * D : h < H + K ? k + (t * K + h - H) * D : v + (t * K + h - H - K) * D;
            if (h >= H + K) {
                memcpy(backwards ? whole : own, backwards ? own : whole, D * sizeof(float));
                continue;
            }
            const float* from = backwards ? own : whole;
            float* to = backwards ? whole : own;
            EACH(i, half) {
                vec first = get(from + i), second = get(from + half + i), c = get(cos + t * half + i), s = get(sin + t * half + i);
                if (backwards) s = -s;
                put(to + i, first * c - second * s), put(to + half + i, second * c + first * s);
            }
        }
}
