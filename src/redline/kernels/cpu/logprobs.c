// Logprobs of chosen tokens and entropies from rows of logits, [M, V], and what comes back to the logits. Logits are float32, or
// with -DBFLOAT16=1 bfloat16; all else is float32. `logprobs.py` calls it.
//
// A row stays in the nearest caches while it is read twice: for its largest number, and for the sums that are relative to that.

#include <math.h>
#include <string.h>

#include "numbers.h"

#define CHUNK 512  // a multiple of LANES; sums are float32 within, float64 beyond
#define NOTHING -87.f  // e to the less is 0, and so is its product with the exponent

#define EACH for (int i = 0; i < CHUNK; i += LANES)

// A chunk of a row where it lies; of the last one, which may end within, a copy that goes on with what has no weight.
static inline scalar* chunk_at(scalar* row, long begin, long V, scalar* copy) {
    if (V - begin >= CHUNK) return row + begin;
    EACH store(copy + i, all(-INFINITY));
    return memcpy(copy, row + begin, (V - begin) * sizeof(scalar));
}

static inline float one(const scalar* from) {
    scalar some[LANES] = {*from};
    return load(some)[0];
}

void summarise(
    scalar* logits, const int64_t* targets, float* logprobs, float* entropies, float* normalizers, long M, long V,
    float temperature, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long m = 0; m < M; m++) {
        scalar *row = logits + m * V, copy[CHUNK];
        vec most = all(-INFINITY);
        for (long begin = 0; begin < V; begin += CHUNK) {
            const scalar* chunk = chunk_at(row, begin, V, copy);
            EACH most = larger(load(chunk + i), most);
        }
        const float peak = largest_of(most) / temperature;
        double sum = 0, tilted = 0;
        for (long begin = 0; begin < V; begin += CHUNK) {
            const scalar* chunk = chunk_at(row, begin, V, copy);
            vec weights = {}, products = {};
            EACH {
                vec below = load(chunk + i) / temperature - peak, weight = exponential(below);
                weights += weight;
                products += choose(below < NOTHING, (vec){}, weight * below);
            }
            sum += sum_of(weights), tilted += sum_of(products);
        }
        // H = log Z - sum p x of logits relative to the largest: neither is negative, so no digits are lost.
        const double log_sum = log(sum);
        logprobs[m] = (double)(one(row + targets[m]) / temperature - peak) - log_sum;
        entropies[m] = log_sum - tilted / sum;
        normalizers[m] = peak + log_sum;
    }
}

// d logprob / d logit = ([v = target] - p) / temperature, d H / d logit = -p (log p + H) / temperature; in the logits' place.
void to_gradient(
    scalar* logits, const int64_t* targets, const float* logprobs, const float* entropies, const float* normalizers,
    const float* grad_logprobs, const float* grad_entropies, long M, long V, float temperature, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long m = 0; m < M; m++) {
        scalar *row = logits + m * V, copy[CHUNK];
        const float back = grad_logprobs[m] / temperature, spread = grad_entropies ? grad_entropies[m] / temperature : 0;
        for (long begin = 0; begin < V; begin += CHUNK) {
            scalar* chunk = chunk_at(row, begin, V, copy);
            EACH {
                vec log_p = load(chunk + i) / temperature - normalizers[m], p = exponential(log_p);
                vec share = choose(log_p < NOTHING, (vec){}, p * (log_p + entropies[m]));
                store(chunk + i, -(back * p + spread * share));
            }
            if (chunk == copy) memcpy(row + begin, copy, (V - begin) * sizeof(scalar));
        }
        const float log_p = logprobs[m], share = log_p < NOTHING ? 0 : expf(log_p) * (log_p + entropies[m]);
        scalar target[LANES];
        store(target, all(-back * expm1f(log_p) - spread * share));
        row[targets[m]] = target[0];
    }
}
