// Products of a weight and few rows in bfloat16, on a CPU with matrix units (AMX): out[t, o] = x[t] . weight[o] + bias[o], summed in
// float32 and rounded once. `matrix_products.py` says for what.
//
// A register holds 16 lines of 64 bytes. One takes 32 numbers of 16 rows of the weight, where they lie; another the same 32 numbers
// of 16 rows of x, with pairs of numbers as its lines, as the unit wants its second factor. So x, which is small, is laid out once a
// call, and the weight is read once: 32 rows of it stay in the nearer caches while all of x passes by, and the next 32 are fetched
// meanwhile, in the order in which they lie: the CPU sees no order in lines of 32 rows at once. Sums come out with a line for each
// row of the weight, and are turned on their way to `out`, two rounded ones as a word.
//
// Which numbers a sum adds, and in which order, does not depend on how many rows there are, nor on where a row stands.
//
// Macros: EMULATED, 1 for a machine without such units: what they do in plain C, to be tested.

#define BFLOAT16 1
#include "numbers.h"
#include "squares.h"

#include <stdlib.h>
#include <string.h>

#define INNER 32      // numbers of a line
#define TALL 32       // rows of the weight that are taken at once, and rows of x: two registers each
#define ENOUGH 65536  // multiplications that are worth another thread

static inline float number(scalar bits) {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

// ── the matrix unit ───────────────────────────────────────────────────────────────────────────────────────────────────

#if EMULATED
typedef union {
    float sums[SIDE][SIDE];
    uint16_t pairs[SIDE][SIDE][2];
    char lines[SIDE][64];
} Register;
static _Thread_local Register of[8];

int may_compute(void) { return 1; }
static void begin(void) {}
static void end(void) {}
static void multiply(Register* sums, const Register* a, const Register* b) {
    for (int m = 0; m < SIDE; m++)
        for (int k = 0; k < SIDE; k++)
            for (int n = 0; n < SIDE; n++)
                for (int half = 0; half < 2; half++) sums->sums[m][n] += number(a->pairs[m][k][half]) * number(b->pairs[k][n][half]);
}
#define CLEAR(to) memset(&of[to], 0, sizeof(Register))
#define LOAD(to, from, pitch) \
    for (int line = 0; line < SIDE; line++) memcpy(of[to].lines[line], (const char*)(from) + line * (pitch), 64)
#define STORE(to, pitch, from) \
    for (int line = 0; line < SIDE; line++) memcpy((char*)(to) + line * (pitch), of[from].lines[line], 64)
#define MULTIPLY(sums, a, b) multiply(&of[sums], &of[a], &of[b])

#elif defined(__AMX_BF16__) && defined(__AVX512F__) && defined(__linux__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// The kernel wants to be asked, once for a process: the registers are large, and every switch of threads saves them.
int may_compute(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}
static void begin(void) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t lines[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.bytes[i] = 64, shape.lines[i] = SIDE;
    _tile_loadconfig(&shape);
    __asm__ volatile("" ::: "memory");  // gcc does not know that what follows reads memory
}
static void end(void) { _tile_release(); }
#define CLEAR(to) _tile_zero(to)
#define LOAD(to, from, pitch) _tile_loadd(to, from, pitch)
#define STORE(to, pitch, from) _tile_stored(from, to, pitch)
#define MULTIPLY(sums, a, b) _tile_dpbf16ps(sums, a, b)

#else
#define NONE 1
int may_compute(void) { return 0; }
void product(void) {}
#endif

#if !NONE

// ── the factors ───────────────────────────────────────────────────────────────────────────────────────────────────────

struct Product {
    const scalar *weight, *bias;
    scalar* out;
    long T, O, I, pairs;
    char* rows;  // of x, [pairs of registers][I / INNER][2] registers
};

#define REGISTER (64 * SIDE)

static inline char* place_of(const struct Product* p, long pair, long k) { return p->rows + (pair * (p->I / INNER) + k) * 2 * REGISTER; }

// 32 numbers of up to 32 rows of x, as two registers; rows that are not there are zeros.
static inline void lay_out(const struct Product* p, const scalar* x, long pair, long k) {
    for (int half = 0; half < 2; half++) {
        vec lines[SIDE * PER_LINE];
        for (int i = 0; i < SIDE; i++) {
            const long t = pair * TALL + half * SIDE + i;
            if (t < p->T)
                memcpy(lines + i * PER_LINE, x + t * p->I + k * INNER, 64);
            else
                memset(lines + i * PER_LINE, 0, 64);
        }
        turn(lines);
        memcpy(place_of(p, pair, k) + half * REGISTER, lines, REGISTER);
    }
}

// 32 rows of the weight by 32 rows of x, or by 16. Meanwhile the cache gets its share of the next 32 rows.
static inline __attribute__((always_inline)) void multiplied(
    const struct Product* p, long o, long pair, const int both, float (*sums)[TALL]) {
    const scalar *upper = p->weight + o * p->I, *lower = upper + SIDE * p->I;
    const long pitch = sizeof(scalar) * p->I, lines = TALL / p->pairs;
    const char* ahead = (const char*)(lower + SIDE * p->I) + pair * lines * pitch;
    CLEAR(0);
    CLEAR(1);
    CLEAR(2);
    CLEAR(3);
    for (long k = 0; k < p->I / INNER; k++) {
        const char* x = place_of(p, pair, k);
        for (long i = 0; i < lines; i++) __builtin_prefetch(ahead + (k * lines + i) * 64, 0, 2);
        LOAD(4, upper + k * INNER, pitch);
        LOAD(6, x, 64);
        LOAD(5, lower + k * INNER, pitch);
        MULTIPLY(0, 4, 6);
        MULTIPLY(2, 5, 6);
        if (both) {
            LOAD(7, x + REGISTER, 64);
            MULTIPLY(1, 4, 7);
            MULTIPLY(3, 5, 7);
        }
    }
    STORE(&sums[0][0], sizeof *sums, 0);
    STORE(&sums[SIDE][0], sizeof *sums, 2);
    if (both) {
        STORE(&sums[0][SIDE], sizeof *sums, 1);
        STORE(&sums[SIDE][SIDE], sizeof *sums, 3);
    }
}

// Sums of 32 rows of the weight and 16 of x, with the bias, rounded and turned.
static inline void written(const struct Product* p, long o, long first, const float (*sums)[TALL]) {
    vec lines[SIDE * PER_LINE];
    for (int i = 0; i < SIDE; i++)
        for (int part = 0; part < PER_LINE; part++) {
            vec even = *(const vec*)(sums[2 * i] + part * LANES), odd = *(const vec*)(sums[2 * i + 1] + part * LANES);
            if (p->bias) even += number(p->bias[o + 2 * i]), odd += number(p->bias[o + 2 * i + 1]);
            lines[i * PER_LINE + part] = (vec)(rounded_bits(even) | rounded_bits(odd) << 16);
        }
    turn(lines);
    for (int i = 0; i < SIDE && first + i < p->T; i++) memcpy(p->out + (first + i) * p->O + o, lines + i * PER_LINE, 64);
}

// Where there is no memory for x, what comes out is NaN. O is at least 32: the last rows of a weight are taken together with some that
// were taken before, and have the same bits again.
void product(
    const scalar* x, const scalar* weight, const scalar* bias, scalar* out, long T, long O, long I, int threads) {
    if (T == 0) return;
    const long pairs = (T + TALL - 1) / TALL, parts = I / INNER, blocks = (O + TALL - 1) / TALL;
    char* rows = aligned_alloc(64, pairs * parts * 2 * REGISTER);
    if (!rows) {
        for (long i = 0; i < T * O; i++) out[i] = 0x7fc0;
        return;
    }
    const struct Product p = {weight, bias, out, T, O, I, pairs, rows};
#pragma omp parallel num_threads(threads) if (T * O * I > ENOUGH)
    {
#pragma omp for schedule(static)
        for (long i = 0; i < pairs * parts; i++) lay_out(&p, x, i / parts, i % parts);
        begin();
#pragma omp for schedule(static) nowait
        for (long block = 0; block < blocks; block++) {
            float sums[TALL][TALL] __attribute__((aligned(64)));
            const long o = (block + 1) * TALL <= O ? block * TALL : O - TALL;
            for (long pair = 0; pair < pairs; pair++) {
                const long first = pair * TALL;
                if (first + SIDE < T)
                    multiplied(&p, o, pair, 1, sums);
                else
                    multiplied(&p, o, pair, 0, sums);
                for (int half = 0; half < 2 && first + half * SIDE < T; half++)
                    written(&p, o, first + half * SIDE, (const float(*)[TALL])&sums[0][half * SIDE]);
            }
        }
        end();
    }
    free(rows);
}
#endif
