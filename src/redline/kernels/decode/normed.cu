// rstd · (x · weightᵀ) + bias of many rows, bfloat16, on Hopper; GATED, silu(rstd · x · gateᵀ) · (rstd · x · upᵀ). That is a
// product of normed rows: x has been multiplied by the norm's gain by who wrote it, who left the squares of each row, too
// (`residual.cu`), and rstd is rsqrt(a row's squares / inner + eps). A block computes one tile of the result.
//
// Its first warpgroups multiply, 64 · TALL rows each; one thread of the last one asks the copy engine for 64 of K at a time,
// into a ring of STAGES, and the warps beside it find rstd meanwhile. Gate and up of a column end in the same thread, which
// rounds where eager torch rounds. Two blocks with the same columns (SHARED) bring half of the weights each, for both. Weights do
// not depend on the launch in front of this one, so they are asked for before it has ended, as many as the ring takes. Each group
// of warps begins LEAD turns behind the one in front of it, which has the tensor cores to itself while its first rows come in;
// results leave through the ring, so all groups end together.
//
// Macros: GATED, COLUMNS of a tile, GROUPS of warps that multiply, TALL, STAGES, SHARED, LEAD. In front of this stands `hopper.cuh`.

constexpr int ROWS = 64 * TALL * GROUPS;
constexpr int WIDTH = GATED ? 2 * COLUMNS : COLUMNS;  // weights' rows
constexpr int STAGE = (ROWS + WIDTH) * LINE;
constexpr int BOXES = GATED ? 2 : SHARED;  // in which weights come
constexpr int BOX = WIDTH / BOXES;
constexpr int PITCH = 2 * COLUMNS + 16;  // bytes of a row on its way out: padded, so that few lanes meet in a bank
constexpr int THREADS = 128 * (GROUPS + 1);
constexpr int SCALING = 96;   // threads
constexpr int GO_BYTES = 16;  // barriers of the second group and the third
static_assert(BOX % 8 == 0 && BOX * BOXES == WIDTH && BOXES % SHARED == 0, "a box begins where the swizzle's pattern does");
static_assert(STAGES > 1, "a stage is given back one turn after it was read");
static_assert(STAGES * STAGE >= ROWS / TALL * PITCH, "results leave through the ring");

struct Arguments {
    Map x;                 // [rows, inner]
    Map weight;            // [2, columns, inner]: gate, up; or [1, columns, inner]
    const u16* bias;       // [columns] or null
    const float* squares;  // [rows, parts]
    u16* out;              // [rows, columns]
    int rows, columns, inner, parts;
    float eps;
};

// ── between blocks ────────────────────────────────────────────────────────────────────────────────────────────────────

// At the same barrier of a block of the cluster.
__device__ __forceinline__ void arrive(u32 barrier, u32 block) {
    asm volatile(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nmbarrier.arrive.shared::cluster.b64 _, [there];\n}"
        ::"r"(barrier), "r"(block) : "memory");
}
// To the same place in all blocks of the cluster.
__device__ __forceinline__ void bring_weight(u32 to, const Map& weight, int inner, int column, int half, u32 barrier) {
#if SHARED > 1
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4}], [%5], %6;"
        ::"r"(to), "l"(&weight), "r"(inner), "r"(column), "r"(half), "r"(barrier), "h"((u16)((1 << SHARED) - 1)) : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
        ::"r"(to), "l"(&weight), "r"(inner), "r"(column), "r"(half), "r"(barrier) : "memory");
#endif
}

struct Ring {
    u32 stages, full, empty;
    u32 go;  // a barrier of each group but the first

    __device__ __forceinline__ u32 x(int stage) const { return stages + stage * STAGE; }
    __device__ __forceinline__ u32 weight(int stage) const { return x(stage) + ROWS * LINE; }
};

// ── the thread that brings ────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void bring(const Arguments& a, const Ring& ring, int turns) {
    const int row = blockIdx.y * ROWS, first_column = blockIdx.x * COLUMNS, share = blockIdx.y % SHARED;
    auto column = [&](int box) { return GATED ? first_column : first_column + box * BOX; };
    auto half = [&](int box) { return GATED ? box : 0; };
    auto weights = [&](int turn, int stage) {
        expect(ring.full + 8 * stage, STAGE);
        for (int box = share; box < BOXES; box += SHARED)
            bring_weight(
                ring.weight(stage) + box * BOX * LINE, a.weight, turn * INNER, column(box), half(box), ring.full + 8 * stage);
    };
    const int first = turns < STAGES ? turns : STAGES;
    for (int turn = 0; turn < first; turn++) weights(turn, turn);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    wait_for_launch_in_front();
    for (int turn = 0; turn < first; turn++) bring_x(ring.x(turn), a.x, turn * INNER, row, ring.full + 8 * turn);
    for (int turn = first; turn < turns; turn++) {
        const int stage = turn % STAGES;
        wait(ring.empty + 8 * stage, turn / STAGES % 2 == 0);
        weights(turn, stage);
        bring_x(ring.x(stage), a.x, turn * INNER, row, ring.full + 8 * stage);
    }
}

// ── the warps beside it, which say what each row is to be multiplied by ───────────────────────────────────────────────────

__device__ __forceinline__ void find_scales(const Arguments& a, float* scales) {
    for (int own = threadIdx.x - 128 * GROUPS - 32; own < ROWS; own += SCALING) {
        const int row = blockIdx.y * ROWS + own;
        if (row < a.rows) scales[own] = scale_of(a.squares + (u64)row * a.parts, a.parts, a.inner, a.eps);
    }
}

// ── those that multiply ───────────────────────────────────────────────────────────────────────────────────────────────

typedef float Sums[TALL][WIDTH / 2];  // of a thread: if GATED, gate in the first half, up in the second

__device__ __forceinline__ void multiply_all(Sums& sums, const Ring& ring, int turns) {
    const int group = threadIdx.x / 128, in_group = threadIdx.x % 128, lead = LEAD < turns ? LEAD : turns;
    if (LEAD > 0 && group > 0) wait(ring.go + 8 * (group - 1), 0);
    for (int turn = 0; turn < turns; turn++) {
        const int stage = turn % STAGES;
        wait(ring.full + 8 * stage, turn / STAGES % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < INNER / 16; k++)
#pragma unroll
            for (int t = 0; t < TALL; t++)
                multiply(sums[t], operand(ring.x(stage) + (group * TALL + t) * 64 * LINE + 32 * k),
                         operand(ring.weight(stage) + 32 * k));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (turn == lead - 1 && group + 1 < GROUPS && in_group == 0) arrive(ring.go + 8 * group);
        // The stage before has been read; those of the last turns are asked for by nobody.
        if (turn > 0 && turn - 1 + STAGES < turns && in_group < SHARED)
            arrive(ring.empty + 8 * ((turn - 1) % STAGES), in_group);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int t = 0; t < TALL; t++)
#pragma unroll
        for (int i = 0; i < WIDTH / 2; i++) asm volatile("" : "+f"(sums[t][i])::"memory");
}

// Two columns of a row of the result, rounded.
__device__ __forceinline__ u32 result(const Arguments& a, const float* sums, int column, float scale) {
#if GATED
    const float* up = sums + COLUMNS / 2;
    return activated(packed(sums[0] * scale, sums[1] * scale), packed(up[0] * scale, up[1] * scale));
#else
    u32 bias = 0;
    if (a.bias && column < a.columns) bias = *(const u32*)(a.bias + column);
    return packed(sums[0] * scale + low(bias), sums[1] * scale + high(bias));
#endif
}

// A warp's 16 · TALL rows of the tile, through `room` of its own, so that they are written in lines.
__device__ __forceinline__ void write(const Arguments& a, const Sums& sums, const float* scales, unsigned char* room) {
    constexpr int CHUNKS = COLUMNS / 8;  // of 16 bytes
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = blockIdx.x * COLUMNS;
#pragma unroll
    for (int t = 0; t < TALL; t++) {
        const int own = (warp / 4 * TALL + t) * 64 + warp % 4 * 16, top = blockIdx.y * ROWS + own;
        const float scale[2] = {scales[own + lane / 4], scales[own + 8 + lane / 4]};
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i += 2) {
            const int lower = i / 2 % 2, row = lower * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2;
            *(u32*)(room + row * PITCH + 2 * column) = result(a, sums[t] + i, first + column, scale[lower]);
        }
        __syncwarp();
        for (int i = lane; i < 16 * CHUNKS; i += 32) {
            const int row = top + i / CHUNKS, column = first + i % CHUNKS * 8;
            if (row < a.rows && column < a.columns)
                *(uint4*)(a.out + (u64)row * a.columns + column) = *(uint4*)(room + i / CHUNKS * PITCH + i % CHUNKS * 16);
        }
        __syncwarp();
    }
}

extern "C" __global__ __cluster_dims__(1, SHARED, 1) __launch_bounds__(THREADS, 1)
void normed(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    unsigned char* room = memory + (-(u32)__cvta_generic_to_shared(memory) & 1023);
    const u32 stages = (u32)__cvta_generic_to_shared(room);
    const u32 behind = stages + STAGES * STAGE;
    const Ring ring = {stages, behind, behind + 8 * STAGES, behind + 16 * STAGES};
    float* scales = (float*)(room + STAGES * (STAGE + 16) + GO_BYTES);
    const int turns = (a.inner + INNER - 1) / INNER;
    if (threadIdx.x == 0) {
        for (int group = 1; group < GROUPS; group++)
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ring.go + 8 * (group - 1)));
        begin_ring(ring.full, ring.empty, STAGES, GROUPS * SHARED);
    }
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (threadIdx.x >= 128 * GROUPS) {
        if (GROUPS > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 128 * GROUPS) bring(a, ring, turns);
        if (threadIdx.x >= THREADS - SCALING) {
            wait_for_launch_in_front();
            find_scales(a, scales);
            asm volatile("bar.arrive 1, %0;" ::"n"(128 * GROUPS + SCALING) : "memory");
        }
    } else {
        if (GROUPS > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 2 ? 240 : 160));
        Sums sums = {};
        multiply_all(sums, ring, turns);
        asm volatile("bar.sync 1, %0;" ::"n"(128 * GROUPS + SCALING) : "memory");  // nobody reads the stages any more
        write(a, sums, scales, room + threadIdx.x / 32 * 16 * PITCH);
    }
}
