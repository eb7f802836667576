// x · weightᵀ of many rows and a vocabulary of columns, bfloat16, on Hopper; with SUMS also what sampling needs of each COLUMNS
// logits of a row: the largest, and the sum of exp((logit - largest) / divisor), in float32, of logits as they are rounded.
//
// Blocks stay: each computes tile after tile. Two warpgroups multiply, 64 rows of a tile each; one thread of a third one asks
// the copy engine for 64 of K at a time, into a ring of STAGES that does not end with a tile. The two begin some turns apart,
// and so they end: while one of them rounds, the other multiplies. A rounded tile takes half of the registers that it had, so
// weights are added up while the next one's products run (LATE, for at least four turns of K). The two blocks of a cluster have
// the same columns and bring half of the weights each, for both; or (SAME_ROWS) the same rows, and halves of x. Weights do not
// depend on the launch in front of this one, so they are asked for before it has ended.
//
// Macros: COLUMNS of a tile, a multiple of 128; STAGES, LAG, SAME_ROWS, SUMS, LATE. In front of this stands `hopper.cuh`.

constexpr int GROUPS = 2, ROWS = 64 * GROUPS;
constexpr int STAGE = (ROWS + COLUMNS) * LINE;
constexpr int BOX = 16 * LINE;       // 64 columns of a warp's 16 rows, on their way out
constexpr int LEAVING = 2;           // boxes of a warp that leave at once
constexpr int WORDS = COLUMNS / 4;   // pairs of logits that a thread has of a tile
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr u32 IMPOSSIBLE = 0xFF80FF80;  // -inf twice
constexpr float LOG2_E = 1.4426950408889634f;

struct Arguments {
    Map x;       // [rows, inner]
    Map weight;  // [columns, inner]
    Map logits;  // [rows, columns]
    const float* temperature;  // [rows]
    float* peaks;              // [rows, chunks], as the sums
    float* sums;
    int rows, columns, inner, chunks;
};

// ── between blocks and warpgroups ─────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
// At the same barrier of a block of the cluster.
__device__ __forceinline__ void arrive(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}"
        ::"r"(barrier), "r"(block) : "memory");
}
// To the same place in both blocks, whose barriers are told.
__device__ __forceinline__ void bring_both(u32 to, const Map& map, int inner, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&map), "r"(inner), "r"(row), "r"(barrier), "h"((u16)3) : "memory");
}
// The first warpgroup lets the second begin, which waits for that.
__device__ __forceinline__ void let_begin() { asm volatile("bar.arrive 1, 256;" ::: "memory"); }
__device__ __forceinline__ void wait_to_begin() { asm volatile("bar.sync 1, 256;" ::: "memory"); }

struct Ring {
    u32 stages, full, empty;

    __device__ __forceinline__ u32 x(int stage) const { return stages + stage * STAGE; }
    __device__ __forceinline__ u32 weight(int stage) const { return x(stage) + ROWS * LINE; }
};

// Where the ring stands, for a thread that goes around it.
struct Position {
    int stage = 0;
    u32 parity = 0;

    __device__ __forceinline__ void step() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// The tiles of a cluster: all rows of some columns are multiplied at about the same time, so weights come from memory once.
struct Tiles {
    int below, count;  // pairs of tiles: of those with the same columns, and of all

    __device__ __forceinline__ explicit Tiles(const Arguments& a) {
        const int high = SAME_ROWS ? ROWS : 2 * ROWS, wide = SAME_ROWS ? 2 * COLUMNS : COLUMNS;
        below = (a.rows + high - 1) / high;
        count = below * ((a.columns + wide - 1) / wide);
    }
    __device__ __forceinline__ int row(int tile, int rank) const {
        return ROWS * (SAME_ROWS ? tile % below : tile % below * 2 + rank);
    }
    __device__ __forceinline__ int chunk(int tile, int rank) const {
        return SAME_ROWS ? tile / below * 2 + rank : tile / below;
    }
};

// ── the thread that brings ────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void bring(
    const Arguments& a, const Ring& ring, const Tiles& tiles, int cluster, int clusters, int rank
) {
    constexpr int HALF = (SAME_ROWS ? ROWS : COLUMNS) / 2;  // of what the two blocks share
    const int turns = (a.inner + INNER - 1) / INNER, first = turns < STAGES ? turns : STAGES;
    auto weights = [&](int stage, int turn, int column) {
        const u32 full = ring.full + 8 * stage;
        expect(full, STAGE);
#if SAME_ROWS
        bring_x(ring.weight(stage), a.weight, turn * INNER, column, full);
#else
        bring_both(ring.weight(stage) + rank * HALF * LINE, a.weight, turn * INNER, column + rank * HALF, full);
#endif
    };
    auto rows = [&](int stage, int turn, int row) {
        const u32 full = ring.full + 8 * stage;
#if SAME_ROWS
        bring_both(ring.x(stage) + rank * HALF * LINE, a.x, turn * INNER, row + rank * HALF, full);
#else
        bring_x(ring.x(stage), a.x, turn * INNER, row, full);
#endif
    };
    for (int turn = 0; turn < first; turn++) weights(turn, turn, tiles.chunk(cluster, rank) * COLUMNS);
    wait_for_launch_in_front();
    Position at;
    int brought = 0;  // stages in all
    for (int tile = cluster; tile < tiles.count; tile += clusters) {
        const int row = tiles.row(tile, rank), column = tiles.chunk(tile, rank) * COLUMNS;
        for (int turn = 0; turn < turns; turn++, brought++, at.step()) {
            if (brought >= STAGES) wait(ring.empty + 8 * at.stage, at.parity ^ 1);
            if (brought >= first) weights(at.stage, turn, column);
            rows(at.stage, turn, row);
        }
    }
}

// ── those that multiply ───────────────────────────────────────────────────────────────────────────────────────────────

typedef float Sums[COLUMNS / 2];  // of a thread: of each eight columns two, in two rows eight apart
typedef u32 Words[WORDS];         // the same, rounded: rows take turns

// A tile. `lead` is the turn in which the second warpgroup is let begin; none if negative. While the first products run,
// what is left to do of the tile before is done `beside` them, a quarter in each turn; without LATE nothing is.
template <typename Beside>
__device__ __forceinline__ void multiply_all(Sums& sums, const Ring& ring, Position& at, int turns, int lead, Beside beside) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    int before = 0;
    auto multiply_turn = [&](int turn, int quarter) {
        wait(ring.full + 8 * at.stage, at.parity);
        if (turn == lead) let_begin();
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < INNER / 16; k++)
            multiply(sums, operand(ring.x(at.stage) + group * 64 * LINE + 32 * k), operand(ring.weight(at.stage) + 32 * k));
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
        if (quarter >= 0) beside(quarter);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (turn > 0 && lane < 2) arrive(ring.empty + 8 * before, lane);  // both blocks learn that it has been read
        before = at.stage;
        at.step();
    };
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0.f;
#pragma unroll
    for (int quarter = 0; quarter < 4 * LATE; quarter++) multiply_turn(quarter, quarter);
    for (int turn = 4 * LATE; turn < turns; turn++) multiply_turn(turn, -1);
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(sums[i])::"memory");
    if (lane < 2) arrive(ring.empty + 8 * before, lane);
}

__device__ __forceinline__ u32 larger(u32 some, u32 others) {
    u32 both;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(both) : "r"(some), "r"(others));  // of a NaN and a number the number
    return both;
}
__device__ __forceinline__ float exp2_of(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// A warp's boxes of a tile, on their way out.
struct Leaving {
    const Arguments& a;
    u32 room;
    int row, column;  // the first of the warp, and of the tile

    // `part` of a tile's columns, as many as leave at once. What left before has been read from here, since `wait_read`.
    __device__ __forceinline__ void put(const Words& words, int part) const {
        const int lane = threadIdx.x % 32;
        const u32 own = room + lane % 16 * LINE + (lane / 16 ^ lane % 8) * 16;  // swizzled, as the copy engine takes it
#pragma unroll
        for (int pair = 0; pair < 4 * LEAVING; pair++) {
            const u32 to = (own ^ pair % 4 * 32) + pair / 4 * BOX;
            const u32* from = words + part * 16 * LEAVING + 4 * pair;
            asm volatile(
                "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                ::"r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
#pragma unroll
            for (int box = 0; box < LEAVING; box++) send(room + box * BOX, column + (part * LEAVING + box) * 64);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }
    // The copy engine leaves out what lies outside.
    __device__ __forceinline__ void send(u32 from, int at) const {
        if (row < a.rows && at < a.columns)
            asm volatile(
                "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];"
                ::"l"(&a.logits), "r"(at), "r"(row), "r"(from) : "memory");
    }
    __device__ __forceinline__ static void wait_read() {
        if (threadIdx.x % 32 == 0) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
        __syncwarp();
    }
};

// Of a row, in the four lanes that have it.
__device__ __forceinline__ float largest_of_quad(float mine) {
    mine = fmaxf(mine, __shfl_xor_sync(~0u, mine, 1));
    return fmaxf(mine, __shfl_xor_sync(~0u, mine, 2));
}
__device__ __forceinline__ float sum_of_quad(float mine) {
    mine += __shfl_xor_sync(~0u, mine, 1);
    return mine + __shfl_xor_sync(~0u, mine, 2);
}

// Rounds; beyond the last column nothing is possible.
__device__ __forceinline__ void round_all(Words& words, const Sums& sums, int column, int columns) {
#pragma unroll
    for (int i = 0; i < WORDS; i++) words[i] = packed(sums[2 * i], sums[2 * i + 1]);
    if (column + COLUMNS > columns)
#pragma unroll
        for (int i = 0; i < WORDS; i++)
            if (column + i / 2 * 8 >= columns) words[i] = IMPOSSIBLE;
}

// A tile that is rounded, of which half has left, and what sampling needs of it.
struct Rounded {
    const Arguments& a;
    Leaving leaving;
    Words words;
    float base[2], scale[2], total[2][2];

    // A peak is a number, or -inf, unless all are NaN; a sum with a NaN among its logits is a NaN.
    __device__ __forceinline__ void begin(const Sums& sums, int row, int column, const float (&temperature)[2]) {
        leaving.row = row, leaving.column = column;
        round_all(words, sums, column, a.columns);
        Leaving::wait_read();
        leaving.put(words, 0);
#if SUMS
        u32 tops[2] = {IMPOSSIBLE, IMPOSSIBLE};
#pragma unroll
        for (int i = 0; i < WORDS; i++) tops[i % 2] = larger(tops[i % 2], words[i]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float peak = largest_of_quad(fmaxf(low(tops[half]), high(tops[half])));
            base[half] = peak == low(IMPOSSIBLE) ? 0.f : peak;
            scale[half] = LOG2_E / (temperature[half] == 0.f ? 1.f : temperature[half]);
            total[half][0] = total[half][1] = 0.f;
            keep(a.peaks, half, peak);
        }
#endif
    }
    // In four parts. The next boxes leave in the second: those before them have been read by then.
    __device__ __forceinline__ void go_on(int quarter) {
        if (quarter > 0 && quarter < COLUMNS / 64 / LEAVING) {
            Leaving::wait_read();
            leaving.put(words, quarter);
        }
#if SUMS
#pragma unroll
        for (int i = 0; i < WORDS / 4; i++) {
            const u32 both = words[quarter * (WORDS / 4) + i];
            total[i % 2][0] += exp2_of((low(both) - base[i % 2]) * scale[i % 2]);
            total[i % 2][1] += exp2_of((high(both) - base[i % 2]) * scale[i % 2]);
        }
        if (quarter == 3)
#pragma unroll
            for (int half = 0; half < 2; half++) keep(a.sums, half, sum_of_quad(total[half][0] + total[half][1]));
#endif
    }
    __device__ __forceinline__ void keep(float* values, int half, float value) const {
        const int row = leaving.row + half * 8 + threadIdx.x % 32 / 4, chunk = leaving.column / COLUMNS;
        if (threadIdx.x % 4 == 0 && row < a.rows && chunk < a.chunks) values[(u64)row * a.chunks + chunk] = value;
    }
};

__device__ __forceinline__ void multiply_and_write(
    const Arguments& a, const Ring& ring, const Tiles& tiles, int cluster, int clusters, int rank, u32 leaving
) {
    const int group = threadIdx.x / 128, warp = threadIdx.x / 32, turns = (a.inner + INNER - 1) / INNER;
    const int lag = LAG < turns ? LAG : turns;
    wait_for_launch_in_front();
    if (group == 1 && lag > 0) wait_to_begin();
    Position at;
    Rounded rounded = {a, {a, leaving + warp * LEAVING * BOX, a.rows, 0}};  // nothing at first, which goes nowhere
    auto go_on = [&](int quarter) { rounded.go_on(quarter); };
    for (int tile = cluster; tile < tiles.count; tile += clusters) {
        const int column = tiles.chunk(tile, rank) * COLUMNS, row = tiles.row(tile, rank) + warp * 16;
        float temperature[2] = {1.f, 1.f};  // asked for long before it is needed
        for (int half = 0; half < 2 * SUMS; half++) {
            const int own = row + half * 8 + threadIdx.x % 32 / 4;
            if (own < a.rows) temperature[half] = a.temperature[own];
        }
        Sums sums;
        multiply_all(sums, ring, at, turns, tile == cluster && group == 0 ? lag - 1 : -1, go_on);
        rounded.begin(sums, row, column, temperature);
        if (!LATE)
#pragma unroll
            for (int quarter = 0; quarter < 4; quarter++) go_on(quarter);
    }
    if (LATE)
#pragma unroll
        for (int quarter = 0; quarter < 4; quarter++) go_on(quarter);
    if (threadIdx.x % 32 == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

extern "C" __global__ __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 1) void head(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    const u32 stages = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    const u32 leaving = stages + STAGES * STAGE, barriers = leaving + GROUPS * 4 * LEAVING * BOX;
    const Ring ring = {stages, barriers, barriers + 8 * STAGES};
    const Tiles tiles(a);
    const int rank = rank_in_cluster(), cluster = blockIdx.x / 2, clusters = gridDim.x / 2;
    if (threadIdx.x == 0) begin_ring(ring.full, ring.empty, STAGES, 2 * 4 * GROUPS);
    __syncwarp();
    meet_cluster();
    if (threadIdx.x >= 128 * GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 128 * GROUPS) bring(a, ring, tiles, cluster, clusters, rank);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        multiply_and_write(a, ring, tiles, cluster, clusters, rank, leaving);
        __syncwarp();
    }
    meet_cluster();  // the other block may still say that it has read a stage
}
