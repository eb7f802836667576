// Causal attention over packed segments on a CPU, forward and backward. `attention.py` says for what, and calls it.
//
// A family is a segment that continues none, and those that continue it. A task is a head of keys in one family, with all query
// heads that read it; where families are few, with one of them. Keys of the first segment are laid out once for all of it, and what
// flows back to them is summed in the order of the segments, so that sums are the same whoever computes them. Queries go through
// it some at a time, before all keys that they see; scores stay in a cache, and are computed again in the backward pass.
//
// All arithmetic is float32. Heads are multiples of 16 numbers long.

#include <math.h>
#include <omp.h>
#include <string.h>

#include "numbers.h"
#include "squares.h"

#define ROWS 6  // of a tile, whose sums are in registers
#if LANES == 8
#define WIDE 2  // vectors of such a row: 16 registers, not 32
#else
#define WIDE 4
#endif
#define QUERIES 48  // that are taken at once; a multiple of ROWS
#define EACH(i, size) for (long i = 0; i < (size); i += LANES)

static inline long padded(long size) { return (size + SIDE - 1) / SIDE * SIDE; }
static inline long at_most(long size, long most) { return size < most ? size : most; }

// ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// Numbers by rows, or by columns: `row` and `column` are the steps to the next.
typedef struct {
    float* at;
    long row, column;
} Matrix;

static inline __attribute__((always_inline)) void tile(
    const int wide, float* to, long to_row, const float* a, Matrix by, const float* b, long b_row, long inner, int add) {
    vec sums[ROWS][WIDE];
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++) sums[r][w] = add ? *(vec*)(to + r * to_row + w * LANES) : (vec){};
    for (long i = 0; i < inner; i++) {
        vec factors[WIDE];
        for (int w = 0; w < wide; w++) factors[w] = *(const vec*)(b + i * b_row + w * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < ROWS; r++) {
            const vec x = all(a[r * by.row + i * by.column]);
#pragma GCC unroll 4
            for (int w = 0; w < wide; w++) sums[r][w] += x * factors[w];
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int w = 0; w < wide; w++) *(vec*)(to + r * to_row + w * LANES) = sums[r][w];
}

// Which products are needed where a query sees no own key after its own: all; those of a row before some column; those of which
// a row's sum ends at some term; or those of which it begins there.
typedef enum { ALL, TO_COLUMN, TO_TERM, FROM_TERM } Needed;

// to = a . b, or to += it. Rows are computed up to a multiple of ROWS, of whatever is there; columns are multiples of LANES. The
// first of the queries sees `first` own keys and one.
static void multiply(
    float* to, long to_row, Matrix a, const float* b, long b_row, long rows, long inner, long columns, int add, Needed needed,
    long first) {
    for (long c = 0; c < columns; c += WIDE * LANES)
        for (long r = 0; r < rows; r += ROWS) {
            if (needed == TO_COLUMN && c >= first + r + ROWS) continue;
            const long begin = needed == FROM_TERM && r > first ? r - first : 0;
            const long end = needed == TO_TERM ? at_most(inner, first + r + ROWS) : inner;
            float* here = to + r * to_row + c;
            const float *from = a.at + r * a.row + begin * a.column, *by = b + begin * b_row + c;
            switch (at_most((columns - c) / LANES, WIDE)) {
                case 1: tile(1, here, to_row, from, a, by, b_row, end - begin, add); break;
                case 2: tile(2, here, to_row, from, a, by, b_row, end - begin, add); break;
#if WIDE == 4
                case 3: tile(3, here, to_row, from, a, by, b_row, end - begin, add); break;
                case 4: tile(4, here, to_row, from, a, by, b_row, end - begin, add); break;
#endif
            }
        }
}

// ── what a task has at hand ───────────────────────────────────────────────────────────────────────────────────────────

// Keys and values of a segment, and what flows back to them.
typedef struct {
    long length, pitch;
    float* rows;                   // [length, D]: values forward, keys backward
    float *k_columns, *v_columns;  // [D, pitch], zeros after the last
    float *grad_k, *grad_v;        // [length, D], and room for a tile that stands over
} Keys;

// Some queries of a segment. Of scores there is a row for each, with the keys of the family's first segment and then its own.
typedef struct {
    long pitch;
    float *q, *grad, *result;  // [QUERIES, D]
    float *scores, *slopes;    // [QUERIES, pitch], and room for a tile that stands over
} Block;

typedef struct {
    Keys first, next;
    Block block;
} Desk;

static float* taken(float** from, long numbers) {
    float* start = *from;
    *from += padded(numbers);
    return start;
}

static Keys room_for_keys(float** from, long longest, long D) {
    const long columns = padded(longest) * D, rows = (longest + ROWS) * D;
    return (Keys){0, 0, taken(from, rows), taken(from, columns), taken(from, columns), taken(from, rows), taken(from, rows)};
}

static Desk desk_at(float** from, long longest_first, long longest_next, long D) {
    Desk desk = {room_for_keys(from, longest_first, D), room_for_keys(from, longest_next, D)};
    Block* block = &desk.block;
    block->pitch = padded(longest_first) + padded(longest_next);
    block->q = taken(from, QUERIES * D), block->grad = taken(from, QUERIES * D), block->result = taken(from, QUERIES * D);
    block->scores = taken(from, QUERIES * block->pitch + SIDE), block->slopes = taken(from, QUERIES * block->pitch + SIDE);
    return desk;
}

// Numbers that a thread needs room for.
long desk_size(long longest_first, long longest_next, long D) {
    float *start = NULL, *end = start;
    desk_at(&end, longest_first, longest_next, D);
    return end - start;
}

static void in_rows(float* to, const scalar* from, long from_row, long rows, long D, float scale) {
    for (long r = 0; r < rows; r++) EACH(d, D) *(vec*)(to + r * D + d) = load(from + r * from_row + d) * scale;
}

static void out_of_rows(scalar* to, long to_row, const float* from, long rows, long D) {
    for (long r = 0; r < rows; r++) EACH(d, D) store(to + r * to_row + d, *(const vec*)(from + r * D + d));
}

static void in_columns(float* to, long pitch, const scalar* from, long from_row, long rows, long D) {
    for (long r = 0; r < pitch; r += SIDE)
        for (long d = 0; d < D; d += SIDE) {
            vec square[SIDE * PER_LINE];
            for (long i = 0; i < SIDE; i++)
                for (long part = 0; part < PER_LINE; part++)
                    square[i * PER_LINE + part] = r + i < rows ? load(from + (r + i) * from_row + d + part * LANES) : (vec){};
            turn(square);
            for (long i = 0; i < SIDE; i++) memcpy(to + (d + i) * pitch + r, square + i * PER_LINE, SIDE * sizeof(float));
        }
}

// ── scores ────────────────────────────────────────────────────────────────────────────────────────────────────────────

// Scores of what a query does not see, fillers after the first segment's keys and own keys after its own; or their slopes.
static void hide(float* row, const Keys* before, long seen, long end, float hidden) {
    for (long i = before->length; i < before->pitch; i++) row[i] = hidden;
    for (long i = before->pitch + seen; i < end; i++) row[i] = hidden;
}

// The largest score of a row, and what e to the scores less it sums to.
typedef struct {
    float largest, sum;
} Softmax;

// Scores to e to them less the largest.
static Softmax exponentials(float* row, long size) {
    vec most = all(-INFINITY), sums = {};
    EACH(i, size) most = larger(*(vec*)(row + i), most);
    const float largest = largest_of(most);
    EACH(i, size) {
        const vec e = exponential(*(vec*)(row + i) - largest);
        *(vec*)(row + i) = e, sums += e;
    }
    return (Softmax){largest, sum_of(sums)};
}

// Scores to probabilities, and gradients of probabilities to gradients of scores.
static void backwards(float* scores, float* slopes, long size, Softmax softmax) {
    vec dots = {};
    EACH(i, size) {
        const vec p = exponential(*(vec*)(scores + i) - softmax.largest) / softmax.sum;
        *(vec*)(scores + i) = p, dots += p * *(vec*)(slopes + i);
    }
    const float mean = sum_of(dots);
    EACH(i, size) *(vec*)(slopes + i) = *(vec*)(scores + i) * (*(vec*)(slopes + i) - mean);
}

// ── a segment ─────────────────────────────────────────────────────────────────────────────────────────────────────────

typedef struct {
    const scalar *q, *k, *v;
    const scalar* grad_out;  // null forward
    scalar* to;              // forward what comes out, backward the gradient of queries
    Softmax* rows;           // [H, T]
    scalar *grad_k, *grad_v;
    float* parts;  // [2, K * P, T, D]: of both, by the P tasks that a head of keys is shared out to; null where it is one
    long T, H, K, D, P;
} Call;

static void lay_out(const Call* call, Keys* keys, long start, long length, long head) {
    const long D = call->D, row = call->K * D, from = start * row + head * D;
    keys->length = length, keys->pitch = padded(length);
    in_columns(keys->k_columns, keys->pitch, call->k + from, row, length, D);
    in_rows(keys->rows, (call->grad_out ? call->k : call->v) + from, row, length, D, 1);
    if (!call->grad_out) return;
    in_columns(keys->v_columns, keys->pitch, call->v + from, row, length, D);
    memset(keys->grad_k, 0, length * D * sizeof(float));
    memset(keys->grad_v, 0, length * D * sizeof(float));
}

static void hand_out(const Call* call, const Keys* keys, long start, long part) {
    const long D = call->D, row = call->K * D, numbers = keys->length * D;
    float* place = call->parts + (part * call->T + start) * D;
    if (call->P > 1) {
        memcpy(place, keys->grad_k, numbers * sizeof(float));
        memcpy(place + call->K * call->P * call->T * D, keys->grad_v, numbers * sizeof(float));
    } else {
        out_of_rows(call->grad_k + start * row + part * D, row, keys->grad_k, keys->length, D);
        out_of_rows(call->grad_v + start * row + part * D, row, keys->grad_v, keys->length, D);
    }
}

static Matrix by_rows(float* at, long row) { return (Matrix){at, row, 1}; }
static Matrix by_columns(float* at, long row) { return (Matrix){at, 1, row}; }

static void attend(const Call* call, const Keys* before, const Keys* own, const Block* block, long start, long h) {
    const long D = call->D, row = call->H * D, pitch = block->pitch, earlier = before->pitch;
    const Matrix q = by_rows(block->q, D), scores = by_rows(block->scores, pitch), own_scores = by_rows(block->scores + earlier, pitch);
    for (long first = 0; first < own->length; first += QUERIES) {
        const long rows = at_most(QUERIES, own->length - first), seen = first + rows, at = (start + first) * row + h * D;
        Softmax* softmax = call->rows + h * call->T + start + first;
        in_rows(block->q, call->q + at, row, rows, D, 1 / sqrtf(D));
        multiply(scores.at, pitch, q, before->k_columns, earlier, rows, D, earlier, 0, ALL, 0);
        multiply(own_scores.at, pitch, q, own->k_columns, own->pitch, rows, D, padded(seen), 0, TO_COLUMN, first);
        for (long r = 0; r < rows; r++) {
            const long end = earlier + padded(at_most(first + r + ROWS, seen));
            hide(block->scores + r * pitch, before, first + r + 1, end, -INFINITY);
            softmax[r] = exponentials(block->scores + r * pitch, end);
        }
        multiply(block->result, D, scores, before->rows, D, rows, before->length, D, 0, ALL, 0);
        multiply(block->result, D, own_scores, own->rows, D, rows, seen, D, 1, TO_TERM, first);
        for (long r = 0; r < rows; r++)
            EACH(d, D) store(call->to + at + r * row + d, *(vec*)(block->result + r * D + d) * (1 / softmax[r].sum));
    }
}

static void attend_backwards(const Call* call, const Keys* before, const Keys* own, const Block* block, long start, long h) {
    const long D = call->D, row = call->H * D, pitch = block->pitch, earlier = before->pitch;
    const float scale = 1 / sqrtf(D);
    const Matrix q = by_rows(block->q, D), grad = by_rows(block->grad, D);
    float *scores = block->scores, *slopes = block->slopes;
    for (long first = 0; first < own->length; first += QUERIES) {
        const long rows = at_most(QUERIES, own->length - first), seen = first + rows, at = (start + first) * row + h * D;
        const Softmax* softmax = call->rows + h * call->T + start + first;
        in_rows(block->q, call->q + at, row, rows, D, scale);
        in_rows(block->grad, call->grad_out + at, row, rows, D, 1);
        multiply(scores, pitch, q, before->k_columns, earlier, rows, D, earlier, 0, ALL, 0);
        multiply(slopes, pitch, grad, before->v_columns, earlier, rows, D, earlier, 0, ALL, 0);
        multiply(scores + earlier, pitch, q, own->k_columns, own->pitch, rows, D, padded(seen), 0, TO_COLUMN, first);
        multiply(slopes + earlier, pitch, grad, own->v_columns, own->pitch, rows, D, padded(seen), 0, TO_COLUMN, first);
        for (long r = 0; r < rows; r++) {
            const long end = earlier + padded(at_most(first + r + ROWS, seen));
            hide(scores + r * pitch, before, first + r + 1, end, -INFINITY);
            hide(slopes + r * pitch, before, first + r + 1, end, 0);
            backwards(scores + r * pitch, slopes + r * pitch, end, softmax[r]);
        }
        const Matrix scores_by_key = by_columns(scores, pitch), slopes_by_key = by_columns(slopes, pitch);
        const Matrix own_scores = by_columns(scores + earlier, pitch), own_slopes = by_columns(slopes + earlier, pitch);
        multiply(before->grad_v, D, scores_by_key, block->grad, D, before->length, rows, D, 1, ALL, 0);
        multiply(before->grad_k, D, slopes_by_key, block->q, D, before->length, rows, D, 1, ALL, 0);
        multiply(own->grad_v, D, own_scores, block->grad, D, seen, rows, D, 1, FROM_TERM, first);
        multiply(own->grad_k, D, own_slopes, block->q, D, seen, rows, D, 1, FROM_TERM, first);
        multiply(block->result, D, by_rows(slopes, pitch), before->rows, D, rows, before->length, D, 0, ALL, 0);
        multiply(block->result, D, by_rows(slopes + earlier, pitch), own->rows, D, rows, seen, D, 1, TO_TERM, first);
        for (long r = 0; r < rows; r++)
            EACH(d, D) store(call->to + at + r * row + d, *(vec*)(block->result + r * D + d) * scale);
    }
}

// ── a batch ───────────────────────────────────────────────────────────────────────────────────────────────────────────

// Segments by families: of each where it starts and how long it is; and the number of the first of each family.
typedef struct {
    const long (*segments)[2], *families;
    long count, longest_first, longest_next;
    float* desks;
} Plan;

static void family(const Call* call, const Plan* plan, Desk* desk, long root, long end, long part) {
    const long group = call->H / call->K, head = part / call->P;
    const long from = head * group + part % call->P * group / call->P, to = head * group + (part % call->P + 1) * group / call->P;
    const Keys none = {0};
    for (long s = root; s < end; s++) {
        const long start = plan->segments[s][0], length = plan->segments[s][1];
        Keys* own = s == root ? &desk->first : &desk->next;
        lay_out(call, own, start, length, head);
        for (long h = from; h < to; h++)
            (call->grad_out ? attend_backwards : attend)(call, s == root ? &none : &desk->first, own, &desk->block, start, h);
        if (call->grad_out && s != root) hand_out(call, own, start, part);
    }
    if (call->grad_out) hand_out(call, &desk->first, plan->segments[root][0], part);
}

static void all_families(const Call* call, const Plan* plan, int threads) {
    const long numbers = desk_size(plan->longest_first, plan->longest_next, call->D), parts = call->K * call->P;
#pragma omp parallel num_threads(threads)
    {
        float* from = plan->desks + omp_get_thread_num() * numbers;
        Desk desk = desk_at(&from, plan->longest_first, plan->longest_next, call->D);
#pragma omp for schedule(dynamic, 1)
        for (long task = 0; task < plan->count * parts; task++)
            family(call, plan, &desk, plan->families[task / parts], plan->families[task / parts + 1], task % parts);
    }
}

void attention(
    const scalar* q, const scalar* k, const scalar* v, scalar* out, Softmax* rows, const long (*segments)[2],
    const long* families, float* desks, long T, long H, long K, long D, long P, long count, long longest_first,
    long longest_next, int threads) {
    const Call call = {.q = q, .k = k, .v = v, .to = out, .rows = rows, .T = T, .H = H, .K = K, .D = D, .P = P};
    const Plan plan = {segments, families, count, longest_first, longest_next, desks};
    all_families(&call, &plan, threads);
}

void attention_backward(
    const scalar* q, const scalar* k, const scalar* v, const scalar* grad_out, scalar* grad_q, scalar* grad_k,
    scalar* grad_v, Softmax* rows, float* parts, const long (*segments)[2], const long* families,
    float* desks, long T, long H, long K, long D, long P, long count, long longest_first, long longest_next, int threads) {
    const Call call = {q, k, v, grad_out, grad_q, rows, grad_k, grad_v, parts, T, H, K, D, P};
    const Plan plan = {segments, families, count, longest_first, longest_next, desks};
    all_families(&call, &plan, threads);
    if (P == 1) return;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (long t = 0; t < T; t++)
        for (long head = 0; head < K; head++)
            EACH(d, D) {
                vec sum_k = {}, sum_v = {};
                for (long part = head * P; part < (head + 1) * P; part++) {
                    sum_k += *(const vec*)(parts + (part * T + t) * D + d);
                    sum_v += *(const vec*)(parts + ((K * P + part) * T + t) * D + d);
                }
                store(grad_k + (t * K + head) * D + d, sum_k);
                store(grad_v + (t * K + head) * D + d, sum_v);
            }
}
