// Products of a weight and few rows on a CPU, in float32: out[t, o] = x[t] · weight[o] + bias[o]. `products.py` says for what.
//
// A tile is the products of `ROWS` rows of x and `COLUMNS` rows of the weight, its sums in registers. These rows of the weight
// stay in the nearest cache while all of x passes by, from the next cache; meanwhile the rows after them are fetched from memory.
// Which numbers a sum adds, and in which order, does not depend on how many rows there are, nor on where a row stands.

#pragma GCC diagnostic ignored "-Wpsabi"  // every function with vectors is inlined

#if defined(__AVX512F__)
#define LANES 16
#define COLUMNS 8
#elif defined(__AVX__)
#define LANES 8
#define COLUMNS 4  // 16 registers, not 32
#elif defined(__SSE__)
#define LANES 4
#define COLUMNS 4
#else
#define LANES 4
#define COLUMNS 8
#endif
#if defined(__SSE__) && !defined(__FMA__)
#define ROWS 2  // a product that is not fused with its sum takes a register more
#else
#define ROWS 3
#endif
#define LINE 16       // numbers of a cache line, which rows are multiples of
#define NEAR 640      // numbers of a row that are taken at once: `COLUMNS` such rows fit the nearest cache
#define ENOUGH 65536  // multiplications that are worth another thread
#define inlined static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int places __attribute__((vector_size(4 * LANES)));
typedef float sums __attribute__((vector_size(4 * COLUMNS), aligned(4), may_alias));

struct Product {
    const float *x, *weight, *bias;
    float* out;
    long T, O, I;
};

#define FROM(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})  // `__builtin_shufflevector` is not in gcc 11

// The sum of each of the vectors.
#if LANES == 16
inlined vec halves(vec a, vec b) {
    return FROM(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
           FROM(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
inlined vec quarters(vec a, vec b) {
    return FROM(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
           FROM(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
inlined vec eighths(vec a, vec b) {
    return FROM(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           FROM(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
inlined sums sums_of(const vec* of) {
    vec first = quarters(halves(of[0], of[1]), halves(of[2], of[3]));
    vec last = quarters(halves(of[4], of[5]), halves(of[6], of[7]));
    vec pairs = eighths(first, last);
    vec twice = FROM(pairs, pairs, 0, 8, 4, 12, 2, 10, 6, 14, 0, 8, 4, 12, 2, 10, 6, 14) +
                FROM(pairs, pairs, 1, 9, 5, 13, 3, 11, 7, 15, 1, 9, 5, 13, 3, 11, 7, 15);
    return *(sums*)&twice;
}
#elif LANES == 8
inlined vec pairs(vec a, vec b) { return FROM(a, b, 0, 2, 8, 10, 4, 6, 12, 14) + FROM(a, b, 1, 3, 9, 11, 5, 7, 13, 15); }
inlined sums sums_of(const vec* of) {
    vec both = pairs(pairs(of[0], of[1]), pairs(of[2], of[3]));
    return ((sums*)&both)[0] + ((sums*)&both)[1];
}
#else
inlined vec pairs(vec a, vec b) { return FROM(a, b, 0, 2, 4, 6) + FROM(a, b, 1, 3, 5, 7); }
inlined sums sums_of(const vec* of) {
    sums all;
#pragma GCC unroll 2
    for (int c = 0; c < COLUMNS; c += 4) ((vec*)&all)[c / 4] = pairs(pairs(of[c], of[c + 1]), pairs(of[c + 2], of[c + 3]));
    return all;
}
#endif

// Numbers [begin, end) of the rows from t and o on, added to what the numbers before them have come to. Of the rows from `next`
// on, `ahead` many are fetched meanwhile.
inlined void tile(
    const int rows, const int columns, const struct Product* p, long t, long o, long begin, long end, const float* next, const int ahead) {
    const float *x = p->x + t * p->I, *weight = p->weight + o * p->I;
    vec sum[ROWS][COLUMNS] = {};
    for (long line = begin; line < end; line += LINE) {
        for (int c = 0; c < ahead; c++) __builtin_prefetch(next + c * p->I + line - begin);
#pragma GCC unroll 2
        for (long i = line; i < line + LINE; i += LANES) {
            vec of_x[ROWS];
#pragma GCC unroll 3
            for (int r = 0; r < rows; r++) of_x[r] = *(const vec*)(x + r * p->I + i);
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) {
                vec of_weight = *(const vec*)(weight + c * p->I + i);
#pragma GCC unroll 3
                for (int r = 0; r < rows; r++) sum[r][c] += of_x[r] * of_weight;
            }
        }
    }
#pragma GCC unroll 3
    for (int r = 0; r < rows; r++) {
        float* out = p->out + (t + r) * p->O + o;
        const float* before = begin ? out : p->bias ? p->bias + o : 0;
        sums all = sums_of(sum[r]);
        if (columns == COLUMNS) {
            if (before) all += *(const sums*)before;
            *(sums*)out = all;
        } else
            for (int c = 0; c < columns; c++) out[c] = before ? all[c] + before[c] : all[c];
    }
}

// All rows of x, and the weight's from o on.
inlined void pass(const int columns, const struct Product* p, long o, long begin, long end, const float* next) {
    const int each = (columns * ROWS + p->T - 1) / p->T;
    int left = columns;
    for (long t = 0; t < p->T; t += ROWS) {
        const int ahead = each < left ? each : left;
        if (t + ROWS <= p->T && !ahead)
            tile(ROWS, columns, p, t, o, begin, end, next, 0);
        else if (t + ROWS <= p->T)
            tile(ROWS, columns, p, t, o, begin, end, next, ahead);
        else if (t + 2 == p->T)
            tile(2, columns, p, t, o, begin, end, next, ahead);
        else
            tile(1, columns, p, t, o, begin, end, next, ahead);
        next += ahead * p->I, left -= ahead;
    }
}

inlined void whole(const int columns, const struct Product* p, long o) {
    const long parts = (p->I + NEAR - 1) / NEAR, size = (p->I / LINE + parts - 1) / parts * LINE;
    for (long begin = 0; begin < p->I; begin += size) {
        const long end = begin + size < p->I ? begin + size : p->I;
        const float* next = p->weight + (end < p->I ? o * p->I + end : (o + columns) * p->I);
        pass(columns, p, o, begin, end, next);
    }
}

void product(const float* x, const float* weight, const float* bias, float* out, long T, long O, long I, int threads) {
    if (T == 0) return;
    const struct Product p = {x, weight, bias, out, T, O, I};
    const long tiled = O / COLUMNS * COLUMNS;
#pragma omp parallel num_threads(threads) if (T * O * I > ENOUGH)
    {
#pragma omp for schedule(static) nowait
        for (long o = 0; o < tiled; o += COLUMNS) whole(COLUMNS, &p, o);
#pragma omp for schedule(static)
        for (long o = tiled; o < O; o++) whole(1, &p, o);
    }
}
