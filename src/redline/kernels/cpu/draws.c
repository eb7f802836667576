// A token of each row of logits, drawn as `sampler.sample` draws it, on a CPU. `draws.py` calls it.
//
// A row is read twice: for its largest logit, and for the sums of the weights of each chunk, relative to that. Then one chunk more,
// in which the token lies. A row's token and logprob come of its own numbers alone. Temperatures divide, as they do in torch: logits
// that were divided there, since another row asks for filters, come to the same bits.

#include <math.h>

#include "vectors.h"

#define CHUNK 128  // a multiple of LANES

// The logits of a chunk over the temperature; beyond the vocabulary, -inf.
static inline void scaled_chunk(vec* to, const float* logits, long left, float temperature) {
    float padded[CHUNK];
    if (left < CHUNK) {
        for (int i = 0; i < CHUNK; i++) padded[i] = i < left ? logits[i] : -INFINITY;
        logits = padded;
    }
    for (int v = 0; v < CHUNK / LANES; v++) to[v] = *(const vec*)(logits + v * LANES) / temperature;
}

static inline float largest(const float* logits, long V) {
    vec most = all(-INFINITY);
    long i = 0;
    for (; i + LANES <= V; i += LANES) most = larger(*(const vec*)(logits + i), most);
    float peak = largest_of(most);
    for (; i < V; i++) peak = logits[i] > peak ? logits[i] : peak;
    return peak;
}

// Number `counter` of a stream, in [0, 1): splitmix64's upper 53 bits.
static inline double uniform(uint64_t stream, uint64_t counter) {
    uint64_t z = stream + (counter + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return ((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// The first token of the chunk up to which the weights exceed the target, and the last that has any where rounding finds none.
static inline int within(const vec* scaled, float peak, double target) {
    float weights[CHUNK];
    for (int v = 0; v < CHUNK / LANES; v++) *(vec*)(weights + v * LANES) = exponential(scaled[v] - peak);
    double before = 0;
    int token = 0;
    for (int i = 0; i < CHUNK; i++) {
        if (weights[i] > 0) token = i;
        before += weights[i];
        if (before > target) break;
    }
    return token;
}

static int64_t token_of(const float* logits, const double* sums, long V, float temperature, float peak, double target) {
    vec scaled[CHUNK / LANES];
    const long last = (V - 1) / CHUNK;
    long chunk = 0;
    while (chunk < last && !(sums[chunk] > target)) target -= sums[chunk++];
    while (chunk > 0 && sums[chunk] == 0) chunk--, target = INFINITY;  // rounding went beyond the last weight
    scaled_chunk(scaled, logits + chunk * CHUNK, V - chunk * CHUNK, temperature);
    return chunk * CHUNK + within(scaled, peak, target);
}

// `sums` is scratch, [B, chunks]. A temperature of 0 takes the likeliest token, with its logprob at 1.
void draw(
    const float* logits, const float* temperatures, const int64_t* streams, const int64_t* counters, double* sums, int64_t* tokens,
    float* logprobs, long B, long V, int threads) {
    const long C = (V + CHUNK - 1) / CHUNK;
#pragma omp parallel for schedule(static) num_threads(threads) if (B > 1)
    for (long b = 0; b < B; b++) {
        const float *row = logits + b * V, temperature = temperatures[b] ? temperatures[b] : 1, top = largest(row, V);
        const float peak = top / temperature;
        double total = 0;
        for (long c = 0; c < C; c++) {
            vec scaled[CHUNK / LANES], sum = {};
            scaled_chunk(scaled, row + c * CHUNK, V - c * CHUNK, temperature);
            for (int v = 0; v < CHUNK / LANES; v++) sum += exponential(scaled[v] - peak);
            total += sums[b * C + c] = sum_of(sum);
        }
        int64_t token = 0;
        if (temperatures[b])
            token = token_of(row, sums + b * C, V, temperature, peak, uniform(streams[b], counters[b]) * total);
        else
            while (token < V - 1 && row[token] != top) token++;
        tokens[b] = token < V ? token : V - 1;
        logprobs[b] = row[tokens[b]] / temperature - peak - (float)log(total);
    }
}
