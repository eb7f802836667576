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
// In bfloat16 a norm needs no launch of its own. ADDED, a product ends in the residual stream, stream + x · weightᵀ + bias: it
// leaves the sum, the sum times the next norm's gain, and the squares of each row, added up over the columns of a tile. NORMED, a
// product takes such rows: it multiplies its sums by rstd, which is rsqrt(a row's squares / inner + eps).
//
// Macros: ROWS of x, a multiple of 8; TALL, the warpgroups that multiply; STAGES, PARTS, GATED, ADDED, NORMED. In front of this
// stands `hopper.cuh`, and in front of that BYTES of a number of x and of the weights.

constexpr int TILE = 64 * TALL;                   // rows of weights; if GATED, eight of gate and eight of up in turn
constexpr int COLUMNS = GATED ? TILE / 2 : TILE;  // of the result
constexpr int STAGE = (TILE + ROWS) * LINE;
constexpr int EIGHTS = ROWS / 8;
static_assert(STAGES > 1, "a stage is given back one turn after it was read");
constexpr int MULTIPLYING = 128 * TALL;           // threads
constexpr int MEETING = PARTS > 1 ? (EIGHTS + PARTS - 1) / PARTS * PARTS * MULTIPLYING * 16 : 0;
constexpr int SCALING = NORMED ? 64 : 0;          // threads
constexpr int THREADS = MULTIPLYING + 32 + SCALING;
constexpr int BESIDE = (ADDED ? 4 * TALL : NORMED) * ROWS * 4;  // squares by warp; or what rows are multiplied by
static_assert(!(ADDED && (GATED || NORMED)) && (BYTES == 2 || !(ADDED || NORMED)), "of such a product nobody has need");

struct Arguments {
    Map x;            // [rows, inner]
    Map weight;       // [columns, inner]; of gate and up [columns / 8, 2, 8, inner]
    const u16* bias;  // [columns] or null
    u16* out;         // [rows, columns]
    const float* x_scale;  // in 8 bits: what numbers of x, and those of the weights, are to be multiplied by
    const float* weight_scale;
    const u16* stream;  // ADDED: [rows, columns], to which the product is added; `out` is the sum
    const u16* gain;    // ADDED: [columns]
    u16* scaled;        // ADDED: [rows, columns], the sum times the gain
    float* squares;     // [rows, tiles]: ADDED, those of the sum; NORMED, those of x
    int rows, columns, inner;
    int whole;          // tiles that are not cut along K, a multiple of PARTS
    int tiles;          // of a row of squares
    float eps;
};

// What a block computes: `whole` tiles come first, PARTS of them in a cluster; of the others each cluster has one.
struct Share {
    int column, begin, turns;
    bool is_whole;

    // Of each eight rows of x, which this block finishes, and how many of them.
    __device__ __forceinline__ int eight(int i) const { return is_whole ? i : i * PARTS + blockIdx.y; }
    __device__ __forceinline__ int eights() const { return is_whole ? EIGHTS : (EIGHTS - (int)blockIdx.y + PARTS - 1) / PARTS; }

    __device__ __forceinline__ explicit Share(const Arguments& a) {
        const int all = (a.inner + INNER - 1) / INNER, wholes = a.whole / PARTS, cluster = blockIdx.x, part = blockIdx.y;
        is_whole = PARTS == 1 || cluster < wholes;
        column = (is_whole ? cluster * PARTS + part : a.whole + cluster - wholes) * COLUMNS;
        begin = is_whole ? 0 : all * part / PARTS;
        turns = is_whole ? all : all * (part + 1) / PARTS - begin;
    }
};

// ── barriers and copies ───────────────────────────────────────────────────────────────────────────────────────────────

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

// Where a thread's two columns of a row of x are, once they are turned: the first of them, and eight columns on.
struct Place {
    int row, column;

    __device__ __forceinline__ Place(const Share& share, int eight)
        : row(8 * eight + threadIdx.x % 32 / 4),
          column(share.column + threadIdx.x / 32 * COLUMNS / (4 * TALL) + threadIdx.x % 4 * 2) {}
    __device__ __forceinline__ bool is_there(const Arguments& a, int side) const {
        return row < a.rows && column + 8 * side < a.columns;
    }
    __device__ __forceinline__ u64 at(const Arguments& a, int side) const { return (u64)row * a.columns + column + 8 * side; }
};

// What an ADDED product adds its sums to, asked for before they are there.
struct Stream {
    u32 x[EIGHTS][2], gain[2];

    // Weights are there before the launch in front has ended.
    __device__ __forceinline__ void read_gain(const Arguments& a, const Share& share) {
        const Place here(share, 0);
#pragma unroll
        for (int side = 0; side < 2; side++)
            gain[side] = here.column + 8 * side < a.columns ? *(const u32*)(a.gain + here.column + 8 * side) : 0;
    }
    __device__ __forceinline__ void read(const Arguments& a, const Share& share) {
#pragma unroll
        for (int i = 0; i < EIGHTS; i++)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                const Place place(share, share.eight(i));
                x[i][side] = i < share.eights() && place.is_there(a, side) ? *(const u32*)(a.stream + place.at(a, side)) : 0;
            }
    }
};

// Of eight rows of x what a thread has of them, `sums`: each two numbers of a column.
__device__ __forceinline__ void scaled(float4& sums, float first, float second) {
    sums.x *= first, sums.y *= second, sums.z *= first, sums.w *= second;
}
__device__ __forceinline__ float bias_of(const Arguments& a, const Share& share, int side) {
    const int column = share.column + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 + 8 * side;
    return a.bias && column < a.columns ? __uint_as_float((u32)a.bias[column] << 16) : 0.f;
}

__device__ __forceinline__ void write(const Arguments& a, const Share& share, int eight, float4 sums) {
    const Place place(share, eight);
    auto put = [&](int side, u32 both) {
        if (place.is_there(a, side)) *(u32*)(a.out + place.at(a, side)) = both;
    };
#if GATED
    const u32 gate = packed(sums.x, sums.y), up = packed(sums.z, sums.w);
    put(0, turned(activated(gate, up)));
#else
    const float upper = bias_of(a, share, 0), lower = bias_of(a, share, 1);
    put(0, turned(packed(sums.x + upper, sums.y + upper)));
    put(1, turned(packed(sums.z + lower, sums.w + lower)));
#endif
}

// The same of an ADDED product. `squares` are the warp's, of each row.
__device__ __forceinline__ void add(
    const Arguments& a, const Share& share, int eight, float4 sums, const u32 (&stream)[2], const u32 (&gain)[2], float* squares) {
    const Place place(share, eight);
    const float upper = bias_of(a, share, 0), lower = bias_of(a, share, 1);
    const u32 product[2] = {turned(packed(sums.x + upper, sums.y + upper)), turned(packed(sums.z + lower, sums.w + lower))};
    float of_row = 0.f;
#pragma unroll
    for (int side = 0; side < 2; side++) {
        const u32 sum = packed(low(stream[side]) + low(product[side]), high(stream[side]) + high(product[side]));
        if (!place.is_there(a, side)) continue;
        of_row += low(sum) * low(sum) + high(sum) * high(sum);
        *(u32*)(a.out + place.at(a, side)) = sum;
        *(u32*)(a.scaled + place.at(a, side)) = packed(low(sum) * low(gain[side]), high(sum) * high(gain[side]));
    }
    of_row += __shfl_xor_sync(~0u, of_row, 1);
    of_row += __shfl_xor_sync(~0u, of_row, 2);
    if (threadIdx.x % 4 == 0) squares[place.row] = of_row;
}
__device__ __forceinline__ void write_squares(const Arguments& a, const Share& share, const float* squares) {
    asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING) : "memory");
    for (int i = threadIdx.x; i < 8 * share.eights(); i += MULTIPLYING) {
        const int row = 8 * share.eight(i / 8) + i % 8;
        float total = 0.f;
#pragma unroll
        for (int warp = 0; warp < 4 * TALL; warp++) total += squares[warp * ROWS + row];
        if (row < a.rows) a.squares[(u64)row * a.tiles + share.column / COLUMNS] = total;
    }
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
__device__ __forceinline__ float4 met(const float4* meeting, int eight) {
    float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
    for (int part = 0; part < PARTS; part++) {
        const float4 one = meeting[(eight / PARTS * PARTS + part) * MULTIPLYING + threadIdx.x];
        total.x += one.x, total.y += one.y, total.z += one.z, total.w += one.w;
    }
    return total;
}

// ── the warps that say what a NORMED product is multiplied by ─────────────────────────────────────────────────────────────

__device__ __forceinline__ void find_scales(const Arguments& a, float* scales) {
    for (int row = threadIdx.x - MULTIPLYING - 32; row < a.rows; row += SCALING)
        scales[row] = scale_of(a.squares + (u64)row * a.tiles, a.tiles, a.inner, a.eps);
}

extern "C" __global__ __cluster_dims__(1, PARTS, 1) __launch_bounds__(THREADS) void product(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    unsigned char* room = (unsigned char*)(((u64)memory + 1023) & ~1023ull);
    const u32 stages = (u32)__cvta_generic_to_shared(room), meeting = stages + STAGES * STAGE;
    const Ring ring = {stages, meeting + MEETING, meeting + MEETING + 8 * STAGES};
    float* beside = (float*)(room + STAGES * (STAGE + 16) + MEETING);
    const Share share(a);
    const bool multiplies = threadIdx.x < MULTIPLYING;
    if (threadIdx.x == MULTIPLYING) begin_ring(ring.full, ring.empty, STAGES, 4 * TALL);
    if (PARTS > 1) cluster_arrive();
    __syncthreads();
    Sums sums = {};
    Stream stream;
    float scale = 1.f;
    if (multiplies) {
        if (ADDED) stream.read_gain(a, share);
        wait_for_launch_in_front();
        if (BYTES == 1) scale = *a.x_scale * *a.weight_scale;
        if (ADDED) stream.read(a, share);
        multiply_all(sums, ring, share.turns);
        if (NORMED) asm volatile("bar.sync 1, %0;" ::"n"(MULTIPLYING + SCALING) : "memory");
    } else if (threadIdx.x < MULTIPLYING + 32) {
        if (threadIdx.x == MULTIPLYING) bring(a, ring, share);
        __syncwarp();
    } else {
        wait_for_launch_in_front();
        find_scales(a, beside);
        asm volatile("bar.arrive 1, %0;" ::"n"(MULTIPLYING + SCALING) : "memory");
    }
    if (PARTS > 1) cluster_wait();  // all blocks are there
    if (!share.is_whole) {
        if (multiplies) send(sums, meeting);
        cluster_arrive();
        cluster_wait();
    }
    if (!multiplies) return;
    const int pair = threadIdx.x % 4 * 2;
#pragma unroll
    for (int i = 0; i < EIGHTS; i++) {
        if (i >= share.eights()) break;
        const int eight = share.eight(i);
        float4 of = share.is_whole ? float4{sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]}
                                   : met((const float4*)(room + STAGES * STAGE), eight);
        if (BYTES == 1) scaled(of, scale, scale);
        if (NORMED) scaled(of, beside[8 * eight + pair], beside[8 * eight + pair + 1]);
        if (ADDED)
            add(a, share, eight, of, stream.x[i], stream.gain, beside + threadIdx.x / 32 * ROWS);
        else
            write(a, share, eight, of);
    }
    if (ADDED) write_squares(a, share, beside);
}
