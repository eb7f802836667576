// x · weightᵀ of some rows, on Hopper, in bfloat16; GATED, silu(x · gateᵀ) · (x · upᵀ). Or by factors in 8 bits, e4m3, with a
// scale for each of the two.
//
// So few rows take as long as their weights take to come. So the weights are the tall factor of the tensor cores' product, and a
// block asks for as many of them as it has room for before the launches in front of it have ended; only then it waits for x.
// Its first warpgroups multiply, 64 rows of weights each; one thread of the last warp asks the copy engine for 128 bytes of K
// at a time, into a ring of STAGES. Tiles that would leave part of the device idle are cut along K: the blocks of a cluster,
// PARTS of them, share such a tile. Their sums meet in the cluster's shared memory, where each block adds up those of some rows
// of x, in the order of the parts.
//
// Macros: ROWS of x, a multiple of 8; TALL, the warpgroups that multiply; STAGES, PARTS, GATED. In front of this stands
// `hopper.cuh`, and in front of that BYTES of a number of x and of the weights.

constexpr int TILE = 64 * TALL;                   // rows of weights; if GATED, eight of gate and eight of up in turn
constexpr int COLUMNS = GATED ? TILE / 2 : TILE;  // of the result
constexpr int STAGE = (TILE + ROWS) * LINE;
constexpr int EIGHTS = ROWS / 8;
static_assert(STAGES > 1, "a stage is given back one turn after it was read");
constexpr int MULTIPLYING = 128 * TALL;           // threads
constexpr int MEETING = PARTS > 1 ? (EIGHTS + PARTS - 1) / PARTS * PARTS * MULTIPLYING * 16 : 0;

struct Arguments {
    Map x;            // [rows, inner]
    Map weight;       // [columns, inner]; of gate and up [columns / 8, 2, 8, inner]
    const u16* bias;  // [columns] or null
    u16* out;         // [rows, columns]
    const float* x_scale;  // in 8 bits: what numbers of x, and those of the weights, are to be multiplied by
    const float* weight_scale;
    int rows, columns, inner;
    int whole;        // tiles that are not cut along K, a multiple of PARTS
};

// What a block computes: `whole` tiles come first, PARTS of them in a cluster; of the others each cluster has one.
struct Share {
    int column, begin, turns;
    bool is_whole;

    __device__ __forceinline__ explicit Share(const Arguments& a) {
        const int all = (a.inner + INNER - 1) / INNER, wholes = a.whole / PARTS, cluster = blockIdx.x, part = blockIdx.y;
        is_whole = PARTS == 1 || cluster < wholes;
        column = (is_whole ? cluster * PARTS + part : a.whole + cluster - wholes) * COLUMNS;
        begin = is_whole ? 0 : all * part / PARTS;
        turns = is_whole ? all : all * (part + 1) / PARTS - begin;
    }
};

// ── barriers and copies ───────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void bring_weight(u32 to, const Map& weight, int inner, int column, u32 barrier, u64 once) {
#if GATED
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, 0, 0, %3}], [%4], %5;"
        ::"r"(to), "l"(&weight), "r"(inner), "r"(column / 8), "r"(barrier), "l"(once) : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&weight), "r"(inner), "r"(column), "r"(barrier), "l"(once) : "memory");
#endif
}
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }

struct Ring {
    u32 stages, full, empty;

    __device__ __forceinline__ u32 weight(int stage) const { return stages + stage * STAGE; }
    __device__ __forceinline__ u32 x(int stage) const { return weight(stage) + TILE * LINE; }
};

// ── the thread that brings ────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void bring(const Arguments& a, const Ring& ring, const Share& share) {
    u64 once;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
    auto weights = [&](int turn, int stage) {
        expect(ring.full + 8 * stage, STAGE);
        bring_weight(ring.weight(stage), a.weight, (share.begin + turn) * INNER, share.column, ring.full + 8 * stage, once);
    };
    auto rows = [&](int turn, int stage) { bring_x(ring.x(stage), a.x, (share.begin + turn) * INNER, 0, ring.full + 8 * stage); };
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

typedef float Sums[4 * EIGHTS];  // of a thread: of each eight rows two, by two rows of weights, eight apart

__device__ __forceinline__ void finish(Sums& sums) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4 * EIGHTS; i++) asm volatile("" : "+f"(sums[i])::"memory");
}

// Of products in 8 bits tensor cores keep 14 bits of a sum. So the sums of this many turns are added up in float32 beside them.
constexpr int TURNS_KEPT = 4;

__device__ __forceinline__ void multiply_all(Sums& total, const Ring& ring, int turns) {
    const int group = threadIdx.x / 128, lane = threadIdx.x % 32;
    Sums apart = {};
    Sums& sums = BYTES == 1 ? apart : total;
    for (int turn = 0; turn < turns; turn++) {
        const int stage = turn % STAGES;
        wait(ring.full + 8 * stage, turn / STAGES % 2);
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
        for (int k = 0; k < LINE / 32; k++)
            multiply(sums, operand(ring.weight(stage) + group * 64 * LINE + 32 * k), operand(ring.x(stage) + 32 * k));
        asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
        // The stage before has been read; those of the last turns are asked for by nobody.
        if (turn > 0 && turn - 1 + STAGES < turns && lane == 0) arrive(ring.empty + 8 * ((turn - 1) % STAGES));
        if (BYTES == 1 && turn % TURNS_KEPT == TURNS_KEPT - 1) {
            finish(sums);
#pragma unroll
            for (int i = 0; i < 4 * EIGHTS; i++) total[i] += sums[i], sums[i] = 0.f;
        }
    }
    finish(sums);
#pragma unroll
    for (int i = 0; i < 4 * EIGHTS; i++)
        if (BYTES == 1) total[i] += sums[i];
}

// Two rows' numbers of a column, for two columns' numbers of a row.
__device__ __forceinline__ u32 turned(u32 both) {
    u32 there;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(there) : "r"(both));
    return there;
}

// Of eight rows of x what a thread has of them, `sums`.
__device__ __forceinline__ void write(const Arguments& a, const Share& share, float scale, int eight, float4 sums) {
    if (BYTES == 1) sums.x *= scale, sums.y *= scale, sums.z *= scale, sums.w *= scale;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 8 * eight + lane / 4;
    const int first = share.column + warp * COLUMNS / (4 * TALL);
    auto put = [&](int column, u32 both) {
        if (row < a.rows && column < a.columns) *(u32*)(a.out + (u64)row * a.columns + column) = both;
    };
#if GATED
    const u32 gate = packed(sums.x, sums.y), up = packed(sums.z, sums.w);
    put(first + lane % 4 * 2, turned(activated(gate, up)));
#else
    auto added = [&](int column) { return a.bias && column < a.columns ? __uint_as_float((u32)a.bias[column] << 16) : 0.f; };
    const float upper = added(first + lane / 4), lower = added(first + 8 + lane / 4);
    put(first + lane % 4 * 2, turned(packed(sums.x + upper, sums.y + upper)));
    put(first + 8 + lane % 4 * 2, turned(packed(sums.z + lower, sums.w + lower)));
#endif
}

// The sums of a cluster: those of each eight rows go to one of its blocks.
__device__ __forceinline__ void send(const Sums& sums, u32 meeting) {
#pragma unroll
    for (int eight = 0; eight < EIGHTS; eight++) {
        const u32 here = meeting + ((eight / PARTS * PARTS + blockIdx.y) * MULTIPLYING + threadIdx.x) * 16;
        const float* of = sums + 4 * eight;
        asm volatile(
            "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %1;\nst.shared::cluster.v4.f32 [there], {%2, %3, %4, %5};\n}"
            ::"r"(here), "r"(eight % PARTS), "f"(of[0]), "f"(of[1]), "f"(of[2]), "f"(of[3]) : "memory");
    }
}
__device__ __forceinline__ void write_met(const Arguments& a, const Share& share, float scale, const float4* meeting) {
    for (int eight = blockIdx.y; eight < EIGHTS; eight += PARTS) {
        float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            const float4 one = meeting[(eight / PARTS * PARTS + part) * MULTIPLYING + threadIdx.x];
            total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
        }
        write(a, share, scale, eight, total);
    }
}

extern "C" __global__ __cluster_dims__(1, PARTS, 1) __launch_bounds__(MULTIPLYING + 32) void product(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    unsigned char* room = (unsigned char*)(((u64)memory + 1023) & ~1023ull);
    const u32 stages = (u32)__cvta_generic_to_shared(room), meeting = stages + STAGES * STAGE;
    const Ring ring = {stages, meeting + MEETING, meeting + MEETING + 8 * STAGES};
    const Share share(a);
    const bool brings = threadIdx.x >= MULTIPLYING;
    if (threadIdx.x == MULTIPLYING) begin_ring(ring.full, ring.empty, STAGES, 4 * TALL);
    if (PARTS > 1) cluster_arrive();
    __syncthreads();
    Sums sums = {};
    float scale = 1.f;
    if (brings) {
        if (threadIdx.x == MULTIPLYING) bring(a, ring, share);
        __syncwarp();
    } else {
        wait_for_launch_in_front();
        if (BYTES == 1) scale = *a.x_scale * *a.weight_scale;
        multiply_all(sums, ring, share.turns);
    }
    if (PARTS > 1) cluster_wait();  // all blocks are there
    if (share.is_whole) {
        if (!brings)
#pragma unroll
            for (int eight = 0; eight < EIGHTS; eight++)
                write(a, share, scale, eight, {sums[4 * eight], sums[4 * eight + 1], sums[4 * eight + 2], sums[4 * eight + 3]});
        return;
    }
    if (!brings) send(sums, meeting);
    cluster_arrive();
    cluster_wait();
    if (!brings) write_met(a, share, scale, (const float4*)(room + STAGES * STAGE));
}
