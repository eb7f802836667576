// silu(x · gateᵀ) · (x · upᵀ) of many rows, bfloat16, on Hopper. A block stays on its multiprocessor and computes tile after
// tile.
//
// One thread of the last warpgroup asks the copy engine for 64 of K at a time, into a ring of STAGES, and goes on to the next
// tile while this one is multiplied. The first warpgroups multiply, 64 · TALL rows each. Gate and up of a column end in one
// thread, which rounds where eager torch rounds. So that tensor cores work on while a tile is activated and written, warpgroups
// are not at the same place: each follows the one in front of it LEAD turns behind. What one does not ask of the tensor cores at
// the end of its tile, the other takes.
//
// Two blocks (SHARED) bring half of what they have in common, each for both: the weights of a column (two tiles of rows), or
// (ROWS_SHARED) the rows of two tiles of columns. Tiles are taken in bands of rows, down each column of a band, so that those
// under way at once need few rows and few weights, which they find in the L2.
//
// Macros: COLUMNS of a tile, GROUPS of warps that multiply, TALL, STAGES, SHARED, ROWS_SHARED, LEAD. In front of this stands
// `hopper.cuh`.

constexpr int ROWS = 64 * TALL * GROUPS;
constexpr int STAGE = (ROWS + 2 * COLUMNS) * LINE;
constexpr int MULTIPLYING = 128 * GROUPS;  // threads
constexpr int THREADS = MULTIPLYING + 128;
constexpr bool WEIGHTS_SHARED = SHARED > 1 && !ROWS_SHARED;
static_assert(GROUPS == 2 || GROUPS == 3, "each has 240 registers, or 160");
static_assert(0 < LEAD && LEAD < STAGES, "a group waits for the one in front of it, whose stages it gives back");
static_assert(COLUMNS % 8 == 0 && COLUMNS <= 128, "of the swizzle's pattern; gate and up are one product");

struct Arguments {
    Map x;       // [rows, inner]
    Map weight;  // [2, columns, inner]: gate, up
    u16* out;    // [rows, columns]
    int rows, columns, inner;
    int below, across;  // tiles of a cluster
    int band;           // of them, one below the other, that are taken before the next column's
};

// ── between blocks ────────────────────────────────────────────────────────────────────────────────────────────────────

// At the same barrier of a block of the cluster.
__device__ __forceinline__ void arrive_there(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}"
        ::"r"(barrier), "r"(block) : "memory");
}
__device__ __forceinline__ void bring_weight(u32 to, const Map& weight, int inner, int column, int half, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(to), "l"(&weight), "r"(inner), "r"(column), "r"(half), "r"(barrier) : "memory");
}
// To the same place in all blocks of the cluster, as the next one.
__device__ __forceinline__ void bring_weight_to_all(u32 to, const Map& weight, int inner, int column, int half, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;"
        ::"r"(to), "l"(&weight), "r"(inner), "r"(column), "r"(half), "r"(barrier), "h"((u16)((1 << SHARED) - 1)) : "memory");
}
__device__ __forceinline__ void bring_x_to_all(u32 to, const Map& x, int inner, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&x), "r"(inner), "r"(row), "r"(barrier), "h"((u16)((1 << SHARED) - 1)) : "memory");
}
// Not `aligned`: one thread of the warp that brings comes later than the others.
__device__ __forceinline__ void meet_cluster() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

struct Ring {
    u32 stages, full, empty;
    u32 go;  // four barriers: each group's but the first; the last is nobody's

    __device__ __forceinline__ u32 x(int stage) const { return stages + stage * STAGE; }
    __device__ __forceinline__ u32 weight(int stage) const { return x(stage) + ROWS * LINE; }
};

// Where a tile of this block begins.
struct Place {
    int row, column;

    __device__ __forceinline__ Place(const Arguments& a, int tile) {
        const int of_band = a.band * a.across, top = tile / of_band * a.band, in_band = tile % of_band;
        const int left = a.below - top, height = left < a.band ? left : a.band, share = blockIdx.x % SHARED;
        const int below = top + in_band % height, across = in_band / height;
        row = (WEIGHTS_SHARED ? below * SHARED + share : below) * ROWS;
        column = (ROWS_SHARED ? across * SHARED + share : across) * COLUMNS;
    }
};

// ── the thread that brings ────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void bring_weights(const Arguments& a, const Ring& ring, int stage, int turn, int column) {
    const u32 to = ring.weight(stage), full = ring.full + 8 * stage, share = blockIdx.x % SHARED;
    if (WEIGHTS_SHARED) {
        bring_weight_to_all(to + share * COLUMNS * LINE, a.weight, turn * INNER, column, share, full);
    } else {
        bring_weight(to, a.weight, turn * INNER, column, 0, full);
        bring_weight(to + COLUMNS * LINE, a.weight, turn * INNER, column, 1, full);
    }
}

__device__ __forceinline__ void bring_rows(const Arguments& a, const Ring& ring, int stage, int turn, int row) {
    const u32 to = ring.x(stage), full = ring.full + 8 * stage, share = blockIdx.x % SHARED;
    if (ROWS_SHARED)
        bring_x_to_all(to + share * (ROWS / 2) * LINE, a.x, turn * INNER, row + share * (ROWS / 2), full);
    else
        bring_x(to, a.x, turn * INNER, row, full);
}

// A tile has at least as many turns as the ring has stages. The weights of the first are asked for before the launch in front
// of this one has ended: they do not depend on it.
__device__ __forceinline__ void bring(const Arguments& a, const Ring& ring, int turns) {
    const int clusters = gridDim.x / SHARED, cluster = blockIdx.x / SHARED, tiles = a.below * a.across;
    const int first_column = Place(a, cluster).column;
    for (int turn = 0; turn < STAGES; turn++) {
        expect(ring.full + 8 * turn, STAGE);
        bring_weights(a, ring, turn, turn, first_column);
    }
    wait_for_launch_in_front();
    int stage = 0;
    u32 round = 0;
    for (int tile = cluster; tile < tiles; tile += clusters) {
        const Place place(a, tile);
        for (int turn = 0; turn < turns; turn++) {
            if (round > 0) {
                wait(ring.empty + 8 * stage, (round - 1) % 2);
                expect(ring.full + 8 * stage, STAGE);
                bring_weights(a, ring, stage, turn, place.column);
            }
            bring_rows(a, ring, stage, turn, place.row);
            if (++stage == STAGES) stage = 0, round++;
        }
    }
}

// ── those that multiply ───────────────────────────────────────────────────────────────────────────────────────────────

typedef float Sums[TALL][COLUMNS];  // of a thread: gate in the first half, up in the second

__device__ __forceinline__ void multiply_all(Sums& sums, const Ring& ring, int turns, int group, int count) {
    const int in_group = threadIdx.x % 128;
    int stage = count * turns % STAGES, last = 0;
    u32 parity = count * turns / STAGES % 2;
    const u32 rows = ring.x(0) + group * TALL * 64 * LINE;
    if (group > 0) wait(ring.go + 8 * group, count % 2);
    for (int turn = 0; turn < turns; turn++) {
        wait(ring.full + 8 * stage, parity);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < INNER / 16; k++)
#pragma unroll
            for (int t = 0; t < TALL; t++)
                multiply(sums[t], operand(rows + stage * STAGE + 64 * LINE * t + 32 * k), operand(ring.weight(stage) + 32 * k));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (turn > 0 && in_group < SHARED) arrive_there(ring.empty + 8 * last, in_group);  // the stage before has been read
        if (turn == LEAD - 1 && group + 1 < GROUPS && in_group == 0) arrive(ring.go + 8 * (group + 1));
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (in_group < SHARED) arrive_there(ring.empty + 8 * last, in_group);
    // A wait that is always over, on a barrier that nobody arrives at: the compiler would begin the activation in front of the
    // arrival, hundreds of instructions, for all of which the stage would stand empty.
    wait(ring.go + 8 * 3, 1);
#pragma unroll
    for (int t = 0; t < TALL; t++)
#pragma unroll
        for (int i = 0; i < COLUMNS; i++) asm volatile("" : "+f"(sums[t][i])::"memory");
}

// `activated`, without what guards numbers that end as zeros in any case.
__device__ __forceinline__ float silu(float x) {
    float power, part;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(part) : "f"(1.f + power));
    return x * part;
}
__device__ __forceinline__ u32 activated_fast(u32 gate, u32 up) {
    const u32 active = packed(silu(low(gate)), silu(high(gate)));
    return packed(low(active) * low(up), high(active) * high(up));
}

// Of four lanes and four numbers each: lane i's number j for lane j's number i.
__device__ __forceinline__ void turn_four(u32 (&four)[4]) {
#pragma unroll
    for (int bit = 1; bit <= 2; bit *= 2) {
        const bool upper = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            const u32 got = __shfl_xor_sync(~0u, upper ? four[i] : four[i + bit], bit);
            if (upper)
                four[i] = got;
            else
                four[i + bit] = got;
        }
    }
}

// Four lanes have eight columns of a row. Each gets another eight of 32 columns, so that 64 bytes of a row are written at once.
__device__ __forceinline__ void write(const Arguments& a, const Sums& sums, const Place& place, int group) {
    constexpr int UP = COLUMNS / 2, EIGHTS = COLUMNS / 8;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TALL; t++)
#pragma unroll
        for (int lower = 0; lower < 2; lower++) {
            const int row = place.row + (group * TALL + t) * 64 + warp * 16 + lower * 8 + lane / 4;
            u16* to = a.out + (u64)row * a.columns;
#pragma unroll
            for (int first = 0; first < EIGHTS; first += 4) {
                u32 four[4];
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    if (first + j >= EIGHTS) {
                        four[j] = 0;
                        continue;
                    }
                    const int i = 4 * (first + j) + 2 * lower;
                    const u32 gate = packed(sums[t][i], sums[t][i + 1]), up = packed(sums[t][UP + i], sums[t][UP + i + 1]);
                    four[j] = activated_fast(gate, up);
                }
                turn_four(four);
                const int eight = first + lane % 4, column = place.column + 8 * eight;
                if (eight < EIGHTS && row < a.rows && column < a.columns)
                    *(uint4*)(to + column) = uint4{four[0], four[1], four[2], four[3]};
            }
        }
}

__device__ __forceinline__ void multiply_and_write(const Arguments& a, const Ring& ring, int turns) {
    const int clusters = gridDim.x / SHARED, cluster = blockIdx.x / SHARED, tiles = a.below * a.across;
    const int group = threadIdx.x / 128;
    for (int count = 0; cluster + count * clusters < tiles; count++) {
        Sums sums = {};
        multiply_all(sums, ring, turns, group, count);
        write(a, sums, Place(a, cluster + count * clusters), group);
    }
}

extern "C" __global__ __cluster_dims__(SHARED, 1, 1) __launch_bounds__(THREADS, 1) void
gated_many(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    const u32 stages = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u, full = stages + STAGES * STAGE;
    const Ring ring = {stages, full, full + 8 * STAGES, full + 16 * STAGES};
    const int turns = (a.inner + INNER - 1) / INNER;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 4; i++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ring.go + 8 * i));
        begin_ring(ring.full, ring.empty, STAGES, GROUPS * SHARED);
    }
    __syncwarp();
    meet_cluster();
    if (threadIdx.x >= MULTIPLYING) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == MULTIPLYING) bring(a, ring, turns);
        __syncwarp();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 240 : 160));
        multiply_and_write(a, ring, turns);
    }
    meet_cluster();  // nobody leaves while another may still arrive at its barriers
}
