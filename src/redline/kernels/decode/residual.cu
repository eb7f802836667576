// x + y · weightᵀ of many rows, bfloat16, on Hopper, and what the norm behind it needs: the sum times the norm's gain, and the
// squares of each row, added up over the columns of a tile. What is left of that norm is one number for each row, by which the
// product behind it (`normed.cu`) multiplies its own sums.
//
// A block computes a tile for a part of K. Its first warpgroups multiply, 64 · TALL rows each; one thread of the last warp asks
// the copy engine for 64 of K at a time, into a ring of STAGES. A cluster is SHARED · PARTS blocks: SHARED with the same
// columns and the same K bring the weights for each other, and PARTS have the same tile. Their sums meet in the cluster's
// shared memory, where each block adds up those of some of the rows, in the order of the parts, and finishes them. Weights do
// not depend on the launch in front of this one, so they are asked for before it has ended, as many as the ring takes.
//
// Macros: COLUMNS of a tile, GROUPS of warps that multiply, TALL, STAGES, SHARED, PARTS; APART, whether sums meet beside the ring
// or in it. In front of this stands `hopper.cuh`.

constexpr int ROWS = 64 * TALL * GROUPS;
constexpr int STAGE = (ROWS + COLUMNS) * LINE;
constexpr int MULTIPLYING = 128 * GROUPS;  // threads
constexpr int WARPS = 4 * GROUPS;
constexpr int CLUSTER = SHARED * PARTS;
constexpr int BOX = COLUMNS / SHARED;  // weights' rows that a block brings
constexpr int EIGHTS = COLUMNS / 8;    // of columns: 16 bytes of a result's row
constexpr int OWN = ROWS / PARTS;      // rows that a block finishes
constexpr int BANDS = OWN / 16;        // of a warp's rows
constexpr int PITCH = 2 * COLUMNS + 16;  // bytes of a row on its way out: padded, so that few lanes meet in a bank
constexpr int MEETING = PARTS > 1 ? ROWS * COLUMNS * 4 : 0;
constexpr int LANES = COLUMNS > 128 ? 32 : COLUMNS > 64 ? 16 : 8;  // that finish a row
constexpr int AT_ONCE = WARPS * (32 / LANES);                      // rows
constexpr int ROUNDS = (OWN + AT_ONCE - 1) / AT_ONCE;
static_assert(STAGES > 1, "a stage is given back one turn after it was read");
static_assert(COLUMNS % (8 * SHARED) == 0, "what a block brings begins where the swizzle's pattern does");
static_assert(OWN % 16 == 0 && BANDS * 16 * PARTS == ROWS, "a warp's rows end in one block");
static_assert(STAGES * STAGE >= (APART ? 0 : MEETING) + OWN * PITCH, "results leave through the ring");

struct Arguments {
    Map y;            // [rows, inner]
    Map weight;       // [columns, inner]
    const u16* bias;  // [columns] or null
    const u16* x;     // [rows, columns]
    const u16* gain;  // [columns]
    u16* sum;         // [rows, columns]: x + y · weightᵀ + bias
    u16* scaled;      // [rows, columns]: sum · gain
    float* squares;   // [rows, tiles of columns]
    int rows, columns, inner;
};

// What a block computes.
struct Share {
    int part, with;  // of PARTS, of SHARED
    int row, column, begin, turns;

    __device__ __forceinline__ explicit Share(const Arguments& a) {
        const int all = (a.inner + INNER - 1) / INNER, rank = blockIdx.y % CLUSTER;
        part = rank / SHARED, with = rank % SHARED;
        row = (blockIdx.y / CLUSTER * SHARED + with) * ROWS, column = blockIdx.x * COLUMNS;
        begin = all * part / PARTS, turns = all * (part + 1) / PARTS - begin;
    }
};

// ── between blocks ────────────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ u32 in_block(u32 at, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(at), "r"(block));
    return there;
}
__device__ __forceinline__ void arrive(u32 barrier, u32 block) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(in_block(barrier, block)) : "memory");
}
__device__ __forceinline__ void meet() {
    asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
__device__ __forceinline__ void multiplying_meet() { asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory"); }

// To the same place in all blocks that share them.
__device__ __forceinline__ void bring_weight(u32 to, const Map& weight, int inner, int column, u32 barrier, int part) {
#if SHARED > 1
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&weight), "r"(inner), "r"(column), "r"(barrier), "h"((u16)(((1 << SHARED) - 1) << part * SHARED))
        : "memory");
#else
    bring_x(to, weight, inner, column, barrier);
#endif
}
struct Ring {
    u32 stages, full, empty;

    __device__ __forceinline__ u32 y(int stage) const { return stages + stage * STAGE; }
    __device__ __forceinline__ u32 weight(int stage) const { return y(stage) + ROWS * LINE; }
};

// ── the thread that brings ────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void bring(const Arguments& a, const Ring& ring, const Share& share) {
    const int column = share.column + share.with * BOX;
    auto weights = [&](int turn, int stage) {
        const u32 to = ring.weight(stage) + share.with * BOX * LINE, barrier = ring.full + 8 * stage;
        expect(barrier, STAGE);
        bring_weight(to, a.weight, (share.begin + turn) * INNER, column, barrier, share.part);
    };
    auto rows = [&](int turn, int stage) {
        bring_x(ring.y(stage), a.y, (share.begin + turn) * INNER, share.row, ring.full + 8 * stage);
    };
    const int turns = share.turns, first = turns < STAGES ? turns : STAGES;
    for (int turn = 0; turn < first; turn++) weights(turn, turn);
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    wait_for_launch_in_front();
    for (int turn = 0; turn < first; turn++) rows(turn, turn);
    for (int turn = first; turn < turns; turn++) {
        const int stage = turn % STAGES;
        wait(ring.empty + 8 * stage, turn / STAGES % 2 == 0);
        weights(turn, stage);
        rows(turn, stage);
    }
}

// ── those that multiply ───────────────────────────────────────────────────────────────────────────────────────────────

typedef float Sums[TALL][COLUMNS / 2];  // of a thread: of each eight columns two, in two rows, eight apart

__device__ __forceinline__ void multiply_all(Sums& sums, const Ring& ring, const Share& share) {
    const int group = threadIdx.x / 128, in_group = threadIdx.x % 128, turns = share.turns;
    for (int turn = 0; turn < turns; turn++) {
        const int stage = turn % STAGES;
        wait(ring.full + 8 * stage, turn / STAGES % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < INNER / 16; k++)
#pragma unroll
            for (int t = 0; t < TALL; t++)
                multiply(sums[t], operand(ring.y(stage) + (group * TALL + t) * 64 * LINE + 32 * k),
                         operand(ring.weight(stage) + 32 * k));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        // The stage before has been read; those of the last turns are asked for by nobody.
        if (turn > 0 && turn - 1 + STAGES < turns && in_group < SHARED)
            arrive(ring.empty + 8 * ((turn - 1) % STAGES), share.part * SHARED + in_group);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int t = 0; t < TALL; t++)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++) asm volatile("" : "+f"(sums[t][i])::"memory");
}

// Of sixteen rows of a tile, which of them are this warp's.
__device__ __forceinline__ int band_of(int t) { return (threadIdx.x / 128 * TALL + t) * 4 + threadIdx.x / 32 % 4; }

// A product of eight columns, rounded, on its way out.
__device__ __forceinline__ void put(
    const Arguments& a, const Share& share, unsigned char* room, int band, int eight, float4 sums) {
    const int lane = threadIdx.x % 32, column = eight * 8 + lane % 4 * 2;
    u32 bias = 0;
    if (a.bias && share.column + column < a.columns) bias = *(const u32*)(a.bias + share.column + column);
    unsigned char* to = room + (band * 16 + lane / 4) * PITCH + 2 * column;
    *(u32*)to = packed(sums.x + low(bias), sums.y + high(bias));
    *(u32*)(to + 8 * PITCH) = packed(sums.z + low(bias), sums.w + high(bias));
}
__device__ __forceinline__ void put_all(const Arguments& a, const Share& share, unsigned char* room, const Sums& sums) {
#pragma unroll
    for (int t = 0; t < TALL; t++)
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            const float* of = sums[t] + 4 * eight;
            put(a, share, room, band_of(t), eight, {of[0], of[1], of[2], of[3]});
        }
}

// The sums of parts, as threads hold them: those of sixteen rows go to the block that finishes these.
__device__ __forceinline__ void send(const Sums& sums, const Share& share, u32 meeting) {
#pragma unroll
    for (int t = 0; t < TALL; t++) {
        const int band = band_of(t), here = (band % BANDS * PARTS + share.part) * EIGHTS * 32 + threadIdx.x % 32;
        const u32 block = band / BANDS * SHARED + share.with, there = in_block(meeting + here * 16, block);
#pragma unroll
        for (int eight = 0; eight < EIGHTS; eight++) {
            const float* of = sums[t] + 4 * eight;
            asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};"
                         ::"r"(there + eight * 512), "f"(of[0]), "f"(of[1]), "f"(of[2]), "f"(of[3]) : "memory");
        }
    }
}
__device__ __forceinline__ void put_met(
    const Arguments& a, const Share& share, unsigned char* room, const float4* meeting) {
    constexpr int ALL = BANDS * EIGHTS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 4
    for (int i = 0; i < (ALL + WARPS - 1) / WARPS; i++) {
        const int one = i * WARPS + warp, band = one / EIGHTS, eight = one % EIGHTS;
        if (one >= ALL) break;
        float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const float4 more = meeting[((band * PARTS + part) * EIGHTS + eight) * 32 + lane];
            total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        put(a, share, room, band, eight, total);
    }
}

// ── rows, in lines ────────────────────────────────────────────────────────────────────────────────────────────────────

// Where a thread is in a round.
struct Place {
    int own, row, column;
    bool is_row, is_there;

    __device__ __forceinline__ Place(const Arguments& a, const Share& share, int round) {
        const int lane = threadIdx.x % 32;
        own = round * AT_ONCE + threadIdx.x / 32 * (32 / LANES) + lane / LANES;
        row = share.row + share.part * OWN + own, column = share.column + lane % LANES * 8;
        is_row = own < OWN && row < a.rows;
        is_there = is_row && lane % LANES < EIGHTS && column < a.columns;
    }
};

struct Stream { uint4 x[ROUNDS]; };

__device__ __forceinline__ void read(const Arguments& a, const Share& share, Stream& stream) {
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const Place at(a, share, round);
        stream.x[round] = at.is_there ? *(const uint4*)(a.x + (u64)at.row * a.columns + at.column) : uint4{0, 0, 0, 0};
    }
}

__device__ __forceinline__ void finish(
    const Arguments& a, const Share& share, const Stream& stream, uint4 gain, const unsigned char* room) {
    const int eight = threadIdx.x % LANES;
    auto added = [](u32 x, u32 y, float& squares) {
        const u32 sum = packed(low(x) + low(y), high(x) + high(y));
        squares += low(sum) * low(sum) + high(sum) * high(sum);
        return sum;
    };
    auto times = [](u32 x, u32 y) { return packed(low(x) * low(y), high(x) * high(y)); };
#pragma unroll
    for (int round = 0; round < ROUNDS; round++) {
        const Place at(a, share, round);
        const u64 to = (u64)at.row * a.columns + at.column;
        float squares = 0.f;
        if (at.is_there) {
            const uint4 x = stream.x[round], y = *(const uint4*)(room + at.own * PITCH + eight * 16);
            uint4 sum;
            sum.x = added(x.x, y.x, squares), sum.y = added(x.y, y.y, squares);
            sum.z = added(x.z, y.z, squares), sum.w = added(x.w, y.w, squares);
            *(uint4*)(a.sum + to) = sum;
            *(uint4*)(a.scaled + to) = {times(sum.x, gain.x), times(sum.y, gain.y), times(sum.z, gain.z), times(sum.w, gain.w)};
        }
#pragma unroll
        for (int other = LANES / 2; other > 0; other /= 2) squares += __shfl_xor_sync(~0u, squares, other);
        if (eight == 0 && at.is_row) a.squares[(u64)at.row * gridDim.x + blockIdx.x] = squares;
    }
}

extern "C" __global__ __cluster_dims__(1, CLUSTER, 1) __launch_bounds__(MULTIPLYING + 32, 1)
void residual(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    unsigned char* room = memory + (-(u32)__cvta_generic_to_shared(memory) & 1023);
    const u32 stages = (u32)__cvta_generic_to_shared(room), behind = stages + STAGES * STAGE + (APART ? MEETING : 0);
    const Ring ring = {stages, behind, behind + 8 * STAGES};
    const int met_at = APART ? STAGES * STAGE : 0, out_at = APART ? 0 : MEETING;
    const Share share(a);
    const bool brings = threadIdx.x >= MULTIPLYING;
    if (threadIdx.x == MULTIPLYING) begin_ring(ring.full, ring.empty, STAGES, GROUPS * SHARED);
    __syncwarp();
    if (CLUSTER > 1) meet(); else __syncthreads();
    Sums sums = {};
    Stream stream;
    uint4 gain = {0, 0, 0, 0};
    if (brings) {
        if (threadIdx.x == MULTIPLYING) bring(a, ring, share);
        __syncwarp();
    } else {
        const int eight = threadIdx.x % LANES, column = share.column + eight * 8;
        if (eight < EIGHTS && column < a.columns) gain = *(const uint4*)(a.gain + column);
        wait_for_launch_in_front();
        read(a, share, stream);
        multiply_all(sums, ring, share);
    }
    if (PARTS > 1) {
        if (!APART) meet();  // nobody's stages are read any more
        if (!brings) send(sums, share, stages + met_at);
        meet();
        if (!brings) put_met(a, share, room + out_at, (const float4*)(room + met_at));
    } else if (!brings) {
        multiplying_meet();  // nobody reads the stages any more
        put_all(a, share, room, sums);
    }
    if (brings) return;
    multiplying_meet();
    finish(a, share, stream, gain, room + out_at);
}
