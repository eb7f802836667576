// Logprobs of chosen tokens and entropies from rows of logits, [M, V], and what comes back to the logits. Logits are float32, or
// with -DBFLOAT16=1 bfloat16; all else is float32. `logprobs.py` calls it.
//
// A row stays in the nearest caches while it is read twice: for its largest number, and for the sums that are relative to that.

#include <math.h>

#include "numbers.h"

#define CHUNK 512  // a multiple of LANES; sums are float32 within, float64 beyond
#define NOTHING -87.f  // e to the less is 0, and so is its product with the exponent

// A chunk of a row, or what lies in `padded` instead of one that ends within.
#define EACH_CHUNK(row)                                                                            \
    for (long begin = 0; begin < V; begin += CHUNK)                                                \
        for (const scalar* chunk = V - begin < CHUNK ? filled(padded, row + begin, V - begin) : row + begin; chunk; chunk = 0)
#define EACH for (int i = 0; i < CHUNK; i += LANES)

static const scalar* filled(scalar* padded, const scalar* from, long left) {
    const vec lowest = all(-INFINITY);
    EACH store(padded + i, lowest);
    for (long i = 0; i < left; i++) padded[i] = from[i];
    return padded;
}

static inline float one(const scalar* from) {
    scalar some[LANES] = {*from};
    return load(some)[0];
}

void summarise(
    const scalar* logits, const int64_t* targets, float* logprobs, float* entropies, float* normalizers, long M, long V,
    float temperature, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long m = 0; m < M; m++) {
        const scalar* row = logits + m * V;
        scalar padded[CHUNK];
        vec most = all(-INFINITY);
        EACH_CHUNK(row) EACH most = larger(load(chunk + i), most);
        const float peak = largest_of(most) / temperature;
        double sum = 0, tilted = 0;
        EACH_CHUNK(row) {
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
        scalar *row = logits + m * V, *target = row + targets[m], padded[CHUNK], found[CHUNK];
        const float back = grad_logprobs[m] / temperature, spread = grad_entropies ? grad_entropies[m] / temperature : 0;
        EACH_CHUNK(row) {
            scalar* to = chunk == padded ? found : row + begin;
            EACH {
                vec log_p = load(chunk + i) / temperature - normalizers[m], p = exponential(log_p);
                vec share = choose(log_p < NOTHING, (vec){}, p * (log_p + entropies[m]));
                store(to + i, -(back * p + spread * share));
            }
            for (long i = 0; to == found && i < V - begin; i++) row[begin + i] = found[i];
        }
        const float log_p = logprobs[m], share = log_p < NOTHING ? 0 : expf(log_p) * (log_p + entropies[m]);
        scalar some[LANES];
        store(some, all(-back * expm1f(log_p) - spread * share));
        *target = some[0];
    }
}
