// A decode step of few rows, from the tokens to the logits, in one launch. `one_launch.py` says for what, and launches it.
//
// Every multiprocessor runs one block. Its last warp does nothing but ask for weights and for what is cached of earlier tokens, in
// the order in which the others will need them, into a ring of stages in shared memory: it never waits for a result, so memory
// is busy while the others do. The other warps walk through the network phase by phase, each block with its share of every phase:
//
//     qkv | attention | o | gate, up, silu | down | the next layer ... | head
//
// Blocks do not meet. What one writes for others, it writes once, word by word, over words that say ABSENT, and who needs a
// word reads it until it says something else: no fence, no counter, no second trip to memory. Layers take turns with a few
// sets of such words; when a block is through with a layer, all are through with the one before, and it writes ABSENT there.
// What all blocks want lies in few places, which serve one request after the other, so nobody asks for more than has to: rows
// that are not there are not read, one warp waits for its block before the others read, a word is written in two places for
// half of the blocks each, and a product with a long K is cut along it, so that a block needs a part of the activations only; its
// sums then meet those of a few others.
//
// A stage holds 8 rows of a weight and at most 896 of its columns, or a tile of keys and values. Of a weight the warps share K: a
// warp multiplies its columns of the stage by those of the activations, which it holds in registers, and at the end of a batch of
// tiles their sums meet in shared memory, in the order of the warps. So a result depends on nothing but its row.
//
// Sizes come as macros: E hidden, H heads, KV key/value heads, D of a head, INNER, VOCAB, PAGE, HALVES (of 8 rows: 1, 2 or 4),
// STAGES, IN_FLIGHT (of them, asked for at once: enough to keep memory busy), PACE (cycles from one to the next, but for the
// head's; 0 where memory has no time to lose), DOWN_PARTS (of the K of the product down), HEAD_NORMS (0 or 1), LAYERS, BLOCKS (of
// the launch), AHEAD (1: several rows may be tokens of one line, 0: none are),
// ARGUMENTS (their bytes).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS 7  // and the one that asks: with eight, a thread may have 255 registers
#define WORKERS (32 * WARPS)
#define CHUNK_BLOCKS 28  // of 32 columns
#define PITCH (64 * CHUNK_BLOCKS + 64)  // bytes from row to row of a stage: 64 more than its columns send the next row to other banks
#define STAGE (8 * PITCH)
#define MOST_TILES 10  // of 8 weight rows, whose sums the warps have room for
#define G (H / KV)
#define MOST_PARTS 16
#define TOKENS (D == 64 ? 32 : 16)  // of a tile of cached keys and values: as many as a warp has registers for
#define FITS (8 * HALVES)  // rows
#define SIXTEENS ((HALVES + 1) / 2)  // of rows, a tile of the tensor cores each
#define ROWS 32
#define ABSENT 0xffffffffu  // no number is rounded to this pair of bfloat16, nor does a sum give this float32
#define SETS 4              // that layers take turns with; the last two layers have one each to themselves
#define SET (ROWS * ((H + 2 * KV) * D + H * D + INNER + 2 * E))
#define COPIES 2            // of all sets: half of the blocks ask in each
#define COPY ((u64)(SETS + 2) * SET)
#define PART (G * D / 2)    // pairs of columns
#define WATCH_FROM 3           // rows from which on one warp waits for a block: of fewer all may ask, it is little
#define PAIRS (HALVES < 4)     // two tiles of weights at a time, where there are registers for them
#define MOST_TURNS (1u << 26)  // of waiting, a minute or so: then an error instead of a hang

struct alignas(64) Map { u64 words[16]; };  // CUtensorMap

struct Layer {
    const u16 *attn_norm, *qkv, *qkv_bias, *o, *o_bias, *mlp_norm, *gate_up, *gate_up_bias, *down, *down_bias, *q_norm, *k_norm;
    u16 *keys, *values;
};

struct Arguments {
    Map cache;          // of all layers' keys and values, rows of D
    const u16* cached;  // the same memory
    const Layer* layers;
    const u16 *embed, *norm, *head, *rotary;
    const long long *tokens, *positions, *ahead;  // `ahead` is null without AHEAD
    const int *lines, *table;
    u16 *sets, *logits;
    uint4* parts;    // [2][ROWS][KV][MOST_PARTS][PART]: two sums of weighted values, the largest score, the sum of weights
    float* partial;  // of the product down: [2][units][DOWN_PARTS][ROWS][8]
    int rows, table_stride, num_positions, most_parts;
    float eps, scale;
};

static_assert(sizeof(Arguments) == ARGUMENTS, "as who launches it has them");

// A share of the attention: a row's key/value head, and a part of the row's context.
struct Unit {
    int row, kv_head, part, parts, position, begin, end, line;  // begin and end in tiles
    int ahead;  // tokens in front of it that go in with it: the rows in front of it
};

struct Shared {
    u64 full[STAGES], empty[STAGES];
    Layer layers[LAYERS];
    float squares[WARPS][8 * HALVES];
    float peaks[WARPS][8], totals[WARPS][8];
    const u16* embedded[ROWS];
    uint4 angles[AHEAD ? 8 * HALVES : 1][D / 8];  // cos and sin of the unit's position, and of those ahead of it
    Unit unit;
};

// ── small things ──────────────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ u32 address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 packed(float first, float second) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ bool absent(uint4 v) { return v.x == ABSENT || v.y == ABSENT || v.z == ABSENT || v.w == ABSENT; }

// Of what other blocks write in this launch the nearest cache does not know: these ask the L2.
__device__ __forceinline__ uint4 fresh16(const void* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void fresh16_if(bool wanted, uint4& v, const void* from) {
    asm volatile(
        "{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3}, [%4];\n}"
        : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w) : "l"(from), "r"((u32)wanted) : "memory");
}
// Again, where a word is missing.
__device__ __forceinline__ void refresh16(uint4& v, const void* from) { fresh16_if(absent(v), v, from); }
__device__ __forceinline__ u32 fresh4(const void* from) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void put4(void* to, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory"); }
__device__ __forceinline__ void put16(void* to, uint4 v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
__device__ __forceinline__ u32 awaited4(const void* from) {
    u32 v, turns = 0;
    while ((v = fresh4(from)) == ABSENT)
        if (++turns == MOST_TURNS) __trap();
    return v;
}

__device__ __forceinline__ uint2 fresh8(const void* from) {
    uint2 v;
    asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(from) : "memory");
    return v;
}
__device__ __forceinline__ void put8(void* to, u32 x, u32 y) {
    asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1,%2};" ::"l"(to), "r"(x), "r"(y) : "memory");
}

// c[16 x 8] += a[16 x 16] . b[16 x 8]
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void meet_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

// Of a stage.
__device__ __forceinline__ uint4 staged16(u32 from) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
    return v;
}

// The same place in another copy of the sets.
__device__ __forceinline__ u16* in_copy(u16* own, int copy) { return own + copy * COPY - blockIdx.x % COPIES * COPY; }
__device__ __forceinline__ void give4(u16* own, u32 v) {
#pragma unroll
    for (int copy = 0; copy < COPIES; copy++) put4(in_copy(own, copy), v);
}

// ── products ──────────────────────────────────────────────────────────────────────────────────────────────────────────

enum Out { HEADS, RESIDUAL, GATED, LOGITS };

// PARTS blocks share the K of their units: each multiplies its part for all of them, and adds up the sums of some.
template <int K, int N, Out OUT, int PARTS = 1>
struct Product {
    static constexpr int parts = PARTS;
    static constexpr int part_chunks = (K / 32 + CHUNK_BLOCKS * parts - 1) / (CHUNK_BLOCKS * parts);
    static constexpr int chunks = part_chunks * parts;
    static constexpr int chunk_blocks = (K / 32 + chunks - 1) / chunks;
    static_assert((chunks - 1) * chunk_blocks < K / 32, "a chunk without columns");
    static constexpr int per_warp = (chunk_blocks + WARPS - 1) / WARPS;
    static constexpr int sides = OUT == GATED ? 2 : 1;  // tiles of a unit
    static constexpr int units = ((OUT == GATED ? N / 2 : N) + 7) / 8;
    static constexpr int groups = BLOCKS / parts;
    static constexpr int most = (units + groups - 1) / groups;  // of a group
    static constexpr int batches = (most * sides + MOST_TILES - 1) / MOST_TILES;
    static constexpr int batch = (most + batches - 1) / batches;  // units
    static constexpr int tiles = batch * sides;
    // Chunks of the activations that a warp has in registers: all of them where it has registers for them.
    static constexpr int room = tiles == 1 ? 6 / HALVES : 2;
    static constexpr int held = part_chunks < room ? part_chunks : room;
    // The blocks with one unit more than others are at the other end for gate and up, which have most of the weights.
    static __device__ __forceinline__ int number() { return OUT == GATED ? blockIdx.x : BLOCKS - 1 - blockIdx.x; }
    static __device__ __forceinline__ int part() { return number() % parts; }
    static __device__ __forceinline__ int first() { return parts > 1 ? number() / parts * most : number(); }
    static __device__ __forceinline__ int end() {
        if (parts == 1) return units;
        int last = first() + most;
        return number() / parts == groups ? 0 : last < units ? last : units;
    }
    static __device__ __forceinline__ bool has_share() { return first() < end(); }
    static __device__ __forceinline__ int unit(int begin, int i) { return parts > 1 ? begin + i : begin + i * BLOCKS; }
    static __device__ __forceinline__ int next(int begin) { return unit(begin, batch); }
    static __device__ __forceinline__ int first_chunk() { return part() * part_chunks; }
    static __device__ __forceinline__ int end_chunk() { return first_chunk() + part_chunks; }
    static __device__ __forceinline__ int weight_row(int unit, int side) { return unit * 8 + side * (N / 2); }
    static __device__ __forceinline__ int blocks_of(int chunk) {
        int left = K / 32 - chunk * chunk_blocks;
        return left < chunk_blocks ? left : chunk_blocks;
    }
};

struct Ring {
    u32 stages, full, empty;
    int stage;
    u32 parity;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ void skip(int count) {
        stage += count;
        while (stage >= STAGES) stage -= STAGES, parity ^= 1;
    }
    __device__ __forceinline__ u32 at() const { return stages + stage * STAGE; }
    __device__ __forceinline__ u32 is_full() const { return full + 8 * stage; }
    __device__ __forceinline__ u32 is_empty() const { return empty + 8 * stage; }
};

// A ring that fills up evenly, and not as soon as there is room, leaves way for the words that others wait for: they come the same
// way as weights do.
__device__ __forceinline__ void keep_pace(u32 cycles) {
    const u32 now = (u32)clock(), left = cycles - now % cycles;
    while ((u32)clock() - now < left) {}
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// What the asking warp knows: the stage that is next, and which are on their way.
struct Asker {
    Ring ring, arriving;
    int coming;

    // A stage is free, and no more than IN_FLIGHT come at once: what the others wait for stands in the same queues.
    __device__ __forceinline__ void find_room() {
        wait(ring.is_empty(), ring.parity ^ 1);
        if (++coming > IN_FLIGHT) {
            wait(arriving.is_full(), arriving.parity);
            arriving.next();
        }
    }
    // Nobody looks any more when those arrive that were asked for.
    __device__ __forceinline__ void forget() { arriving = ring, coming = 0; }
};

// The asking warp's part of a product.
template <class P, int K, int N, bool PACED = true>
__device__ __forceinline__ void ask(Asker& asker, const u16* weight) {
    Ring& ring = asker.ring;
    int lane = threadIdx.x % 32;
    u64 once;  // a weight is read once in a step: what the L2 has of other things is not to leave for it
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
#pragma unroll 1
    for (int begin = P::first(); begin < P::end(); begin = P::next(begin))
#pragma unroll 1
        for (int chunk = P::first_chunk(); chunk < P::end_chunk(); chunk++)
#pragma unroll 1
            for (int i = 0; i < P::batch; i++) {
                int unit = P::unit(begin, i);
                if (unit >= P::end()) break;
#pragma unroll 1
                for (int side = 0; side < P::sides; side++) {
                    const u32 bytes = P::blocks_of(chunk) * 64;
                    const int row = P::weight_row(unit, side), rows = N - row < 8 ? N - row : 8;
                    asker.find_room();
                    if (PACE && PACED) keep_pace(PACE * P::chunk_blocks / CHUNK_BLOCKS);
                    if (lane == 0) expect(ring.is_full(), bytes * rows);
                    __syncwarp();
                    if (lane < rows) {
                        const u16* from = weight + (u64)(row + lane) * K + chunk * P::chunk_blocks * 32;
                        u32 to = ring.at() + lane * PITCH;
                        asm volatile(
                            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
                            " [%0], [%1], %2, [%3], %4;"
                            ::"r"(to), "l"(from), "r"(bytes), "r"(ring.is_full()), "l"(once) : "memory");
                    }
                    ring.next();
                }
            }
}

// Eight columns of a row of activations after the norm, rounded as eager torch rounds.
__device__ __forceinline__ uint4 normed(uint4 v, uint4 gain, float scale) {
    return make_uint4(
        packed(low(v.x) * scale * low(gain.x), high(v.x) * scale * high(gain.x)),
        packed(low(v.y) * scale * low(gain.y), high(v.y) * scale * high(gain.y)),
        packed(low(v.z) * scale * low(gain.z), high(v.z) * scale * high(gain.z)),
        packed(low(v.w) * scale * low(gain.w), high(v.w) * scale * high(gain.w)));
}
__device__ __forceinline__ float squared(uint4 v) {
    return low(v.x) * low(v.x) + high(v.x) * high(v.x) + low(v.y) * low(v.y) + high(v.y) * high(v.y) + low(v.z) * low(v.z) +
           high(v.z) * high(v.z) + low(v.w) * low(v.w) + high(v.w) * high(v.w);
}

// The activations that a product multiplies: `from`, rows one after the other, or those of the tokens where it is null. A warp has
// its columns of some chunks in registers, after the norm whose weight is `gain` where the product NORMS. BY_ROW: they come row by
// row, and not column by column.
template <class P, int K, bool NORMS, bool BY_ROW>
struct Activations {
    static_assert(!NORMS || P::parts == 1, "a norm wants all columns");
    static constexpr bool whole = P::part_chunks == P::held;  // no chunk is loaded twice
    const Arguments& a;
    Shared& shared;
    const u16 *from, *gain;
    uint4 held[P::held][P::per_warp][HALVES], gains[NORMS ? P::held : 1][NORMS ? P::per_warp : 1];
    float scale[HALVES];
    const u16* row[HALVES];
    bool is_row[HALVES];  // what else there is room for is zero, and nobody asks for it

    __device__ __forceinline__ Activations(const Arguments& a, Shared& shared, const u16* from, const u16* gain)
        : a(a), shared(shared), from(from), gain(gain) {
        const int g = threadIdx.x % 32 / 4;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            is_row[half] = g + 8 * half < a.rows;
            int index = is_row[half] ? g + 8 * half : 0;
            row[half] = from ? from + index * K : shared.embedded[index];
        }
    }

    // The columns of a thread in some chunk: its last block of them where it has none.
    static __device__ __forceinline__ int column(int chunk, int i) {
        int last = P::blocks_of(chunk) - 1, block = threadIdx.x / 32 + WARPS * i;
        return (chunk * P::chunk_blocks + (block < last ? block : last)) * 32 + 8 * (threadIdx.x % 4);
    }
    static __device__ __forceinline__ int chunk_at(int chunk) { return chunk < P::end_chunk() ? chunk : P::end_chunk() - 1; }

    // Wait for a word of each who writes what the block will need. If all warps asked for all of it again and again, it would
    // come late. Products write a unit's columns of all rows at about the same time; the attention writes row by row.
    __device__ __forceinline__ void watch() const {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        if (warp == 0) {
            constexpr int of_part = P::part_chunks * P::chunk_blocks * 4, most = of_part < BLOCKS ? of_part : BLOCKS;
            const int start = P::part() * of_part, end = start + of_part < K / 8 ? start + of_part : K / 8;
            const int begin = end - start < BLOCKS ? start : end - BLOCKS;
            constexpr int words = BY_ROW ? 2 : (most + 31) / 32;
            for (u32 turns = 0;; turns++) {
                bool missing = false;
#pragma unroll
                for (int k = 0; k < words; k++) {
                    int unit = BY_ROW ? k * (K / 8 - 1) : begin + lane + 32 * k, row = BY_ROW ? lane : a.rows - 1;
                    missing |= fresh4(from + (row < a.rows ? row : 0) * K + 8 * (unit < end ? unit : end - 1) + 6) == ABSENT;
                }
                if (!__any_sync(~0u, missing)) break;
                if (turns == MOST_TURNS) __trap();
            }
        }
        meet_workers();
    }

    __device__ __forceinline__ void load(int first) {
        if (NORMS)
#pragma unroll
            for (int c = 0; c < P::held; c++)
#pragma unroll
                for (int i = 0; i < P::per_warp; i++) gains[c][i] = __ldg((const uint4*)(gain + column(chunk_at(first + c), i)));
#pragma unroll
        for (int c = 0; c < P::held; c++)
#pragma unroll
            for (int i = 0; i < P::per_warp; i++)
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    held[c][i][half] = make_uint4(0, 0, 0, 0);
                    fresh16_if(is_row[half], held[c][i][half], row[half] + column(chunk_at(first + c), i));
                }
        for (u32 turns = 0;; turns++) {
            bool missing = false;
#pragma unroll
            for (int c = 0; c < P::held; c++)
#pragma unroll
                for (int i = 0; i < P::per_warp; i++)
#pragma unroll
                    for (int half = 0; half < HALVES; half++) missing |= absent(held[c][i][half]);
            if (!__any_sync(~0u, missing)) break;
            if (turns == MOST_TURNS) __trap();
#pragma unroll
            for (int c = 0; c < P::held; c++)
#pragma unroll
                for (int i = 0; i < P::per_warp; i++)
#pragma unroll
                    for (int half = 0; half < HALVES; half++) refresh16(held[c][i][half], row[half] + column(chunk_at(first + c), i));
        }
    }

    __device__ __forceinline__ void find_scale() {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        float sum[HALVES] = {};
        for (int c = 0; c < P::chunks; c += P::held) {
            load(c);
#pragma unroll
            for (int cc = 0; cc < P::held; cc++)
#pragma unroll
                for (int i = 0; i < P::per_warp; i++)
#pragma unroll
                    for (int half = 0; half < HALVES; half++)
                        if (c + cc < P::chunks && warp + WARPS * i < P::blocks_of(c + cc)) sum[half] += squared(held[cc][i][half]);
        }
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
            sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
            if (t == 0) shared.squares[warp][g + 8 * half] = sum[half];
        }
        meet_workers();
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            float total = 0;
#pragma unroll
            for (int w = 0; w < WARPS; w++) total += shared.squares[w][g + 8 * half];
            asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(scale[half]) : "f"(total / K + a.eps));
        }
    }

    __device__ __forceinline__ void apply_norm() {
#pragma unroll
        for (int c = 0; c < P::held; c++)
#pragma unroll
            for (int i = 0; i < P::per_warp; i++)
#pragma unroll
                for (int half = 0; half < HALVES; half++) held[c][i][half] = normed(held[c][i][half], gains[c][i], scale[half]);
    }

    // What can be there before the first stage of weights is multiplied.
    __device__ __forceinline__ void begin() {
        if (from && a.rows >= WATCH_FROM) watch();
        if (NORMS) {
            find_scale();
            if (whole) apply_norm();
        } else if (whole) load(P::first_chunk());
    }

    // Chunk `c` and those held with it.
    __device__ __forceinline__ void next(int c) {
        if (whole) return;
        load(c);
        if (NORMS) apply_norm();
    }
};

// COUNT tiles of weights from the ring by the activations that a warp holds of a chunk, added to its sums at `to`, or written there.
template <class P, int COUNT>
__device__ __forceinline__ void multiplied(Ring& ring, const uint4 (&held)[P::per_warp][HALVES], int blocks, float* to, bool adds) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    uint4 w[COUNT][P::per_warp];
    u32 empty[COUNT];
    float part[COUNT][SIXTEENS][2][4] = {};
#pragma unroll
    for (int j = 0; j < COUNT; j++) {
        wait(ring.is_full(), ring.parity);
        u32 at = ring.at() + g * PITCH + t * 16 + warp * 64;
#pragma unroll
        for (int i = 0; i < P::per_warp; i++) {
            w[j][i] = make_uint4(0, 0, 0, 0);
            if (warp + WARPS * i < blocks) w[j][i] = staged16(at + i * WARPS * 64);
        }
        empty[j] = ring.is_empty();
        ring.next();
    }
#pragma unroll
    for (int i = 0; i < P::per_warp; i++) {
#pragma unroll
        for (int m = 0; m < SIXTEENS; m++) {
            uint4 first = held[i][2 * m], second = HALVES > 1 ? held[i][2 * m + (HALVES > 1)] : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int j = 0; j < COUNT; j++) {
                multiply(part[j][m][0], first.x, second.x, first.y, second.y, w[j][i].x, w[j][i].y);
                multiply(part[j][m][1], first.z, second.z, first.w, second.w, w[j][i].z, w[j][i].w);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < COUNT; j++)
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            float2* sum = (float2*)(to + (j * HALVES + half) * 64);
            float2 before = adds ? *sum : make_float2(0, 0);
            const float *one = &part[j][half / 2][0][half % 2 * 2], *other = &part[j][half / 2][1][half % 2 * 2];
            *sum = make_float2(before.x + (one[0] + other[0]), before.y + (one[1] + other[1]));
        }
    // Only now: the sums are proof that the weights have been read.
    __syncwarp();
    if (lane < COUNT)
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(lane ? empty[COUNT - 1] : empty[0]) : "memory");
}

// What becomes of the warps' sums: added up, with what the product adds to them, and written for the others. `residual` is rows of
// activations, or null for those of the tokens; `partial` is where blocks that share units meet.
template <class P, int N, Out OUT>
struct Ends {
    const Arguments& a;
    const Shared& shared;
    const float* sums;
    const u16 *bias, *residual;
    u16* out;
    float* partial;
    u32 biases[P::sides], residue;

    // What a thread adds to its first sums, asked for before anything is waited for.
    __device__ __forceinline__ Ends(
        const Arguments& a, const Shared& shared, const float* sums, const u16* bias, const u16* residual, u16* out, float* partial)
        : a(a), shared(shared), sums(sums), bias(bias), residual(residual), out(out), partial(partial), residue(ABSENT) {
        const int row = threadIdx.x / 4 % FITS, of_batch = threadIdx.x / 4 / FITS * P::parts + P::part();
        const int unit = P::unit(P::first(), of_batch);
        const bool adds = P::batches == 1 && row < a.rows && of_batch < P::batch && unit < P::end();
        if (adds && bias)
#pragma unroll
            for (int side = 0; side < P::sides; side++) biases[side] = __ldg(bias_at(unit, side, 2 * (threadIdx.x % 4)));
        if (OUT == RESIDUAL && adds) residue = fresh4(residual_at(row, unit * 8 + 2 * (threadIdx.x % 4)));
    }

    __device__ __forceinline__ const u32* bias_at(int unit, int side, int column) const {
        return (const u32*)(bias + P::weight_row(unit, side) + column);
    }
    __device__ __forceinline__ const u16* residual_at(int row, int n) const {
        return (residual ? residual + row * E : shared.embedded[row]) + n;
    }
    __device__ __forceinline__ float* meeting(int unit, int part, int row, int column) const {
        return partial + ((((u64)unit * P::parts + part) * ROWS + row) * 8 + column);
    }

    __device__ __forceinline__ float2 summed(int of_batch, int side, int row, int column) const {
        float2 total = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            float2 part = *(float2*)(sums + ((w * P::tiles + of_batch * P::sides + side) * 8 * HALVES + row) * 8 + column);
            total.x += part.x, total.y += part.y;
        }
        return total;
    }

    // A block's part of the units that others add up.
    __device__ __forceinline__ void send(int begin, int count) const {
#pragma unroll 1
        for (int pair = threadIdx.x; pair < count * FITS * 4; pair += WORKERS) {
            const int column = 2 * (pair % 4), row = pair / 4 % FITS, of_batch = pair / 4 / FITS;
            if (row >= a.rows || of_batch % P::parts == P::part()) continue;
            float2 total = summed(of_batch, 0, row, column);
            put8(meeting(P::unit(begin, of_batch), P::part(), row, column), __float_as_uint(total.x), __float_as_uint(total.y));
        }
    }

    // With the parts of the others, in the order of the parts.
    __device__ __forceinline__ float2 met(float2 own, int unit, int row, int column) const {
        uint2 others[P::parts];
        for (u32 turns = 0;; turns++) {
            bool missing = false;
#pragma unroll
            for (int part = 0; part < P::parts; part++)
                if (part != P::part()) others[part] = fresh8(meeting(unit, part, row, column));
#pragma unroll
            for (int part = 0; part < P::parts; part++)
                missing |= part != P::part() && (others[part].x == ABSENT || others[part].y == ABSENT);
            if (!missing) break;
            if (turns == MOST_TURNS) __trap();
        }
        float2 all = make_float2(0, 0);
#pragma unroll
        for (int part = 0; part < P::parts; part++) {
            all.x += part == P::part() ? own.x : __uint_as_float(others[part].x);
            all.y += part == P::part() ? own.y : __uint_as_float(others[part].y);
        }
        return all;
    }
    __device__ __forceinline__ void forget(int unit, int row, int column) const {
#pragma unroll
        for (int part = 0; part < P::parts; part++)
            if (part != P::part()) put8(meeting(unit, part, row, column), ABSENT, ABSENT);
    }

    __device__ __forceinline__ void write(float2 (&total)[P::sides], bool is_first, int unit, int row, int column) const {
        const int n = unit * 8 + column, width = OUT == GATED ? N / 2 : N;
        if (bias)
#pragma unroll
            for (int side = 0; side < P::sides; side++) {
                u32 add = P::batches == 1 && is_first ? biases[side] : __ldg(bias_at(unit, side, column));
                total[side].x += low(add), total[side].y += high(add);
            }
        u32 result = packed(total[0].x, total[0].y);
        if (OUT == RESIDUAL) {
            u32 before = is_first && residue != ABSENT ? residue : awaited4(residual_at(row, n));
            result = packed(low(before) + low(result), high(before) + high(result));
        }
        if (OUT == GATED) {
            u32 up = packed(total[P::sides - 1].x, total[P::sides - 1].y);
            float first = low(result), second = high(result);
            u32 active = packed(first / (1.f + __expf(-first)), second / (1.f + __expf(-second)));
            result = packed(low(active) * low(up), high(active) * high(up));
        }
        if (OUT == LOGITS) put4(out + (u64)row * width + n, result);
        else give4(out + (u64)row * width + n, result);
    }

    // A batch of units.
    __device__ __forceinline__ void finish(int begin, int count) const {
        if (P::parts > 1) send(begin, count);
#pragma unroll 1
        for (int pair = threadIdx.x; pair < P::batch * FITS * 4; pair += WORKERS) {
            const int column = 2 * (pair % 4), row = pair / 4 % FITS, of_batch = pair / 4 / FITS * P::parts + P::part();
            const int unit = P::unit(begin, of_batch);
            if (of_batch >= count) break;
            if (row >= a.rows) continue;
            float2 total[P::sides];
#pragma unroll
            for (int side = 0; side < P::sides; side++) total[side] = summed(of_batch, side, row, column);
            if (P::parts > 1) total[0] = met(total[0], unit, row, column);
            write(total, pair == threadIdx.x, unit, row, column);
            if (P::parts > 1) forget(unit, row, column);
        }
    }
};

// A block's share of a product. What is asked for and written is as `Activations` and `Ends` say.
template <class P, int K, int N, Out OUT, bool NORMS, bool BY_ROW = false>
__device__ __forceinline__ void work(
    Ring& ring, Shared& shared, float* sums, const Arguments& a, const u16* from, const u16* gain, const u16* bias,
    const u16* residual, u16* out, float* partial = 0) {
    if (!P::has_share()) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    Activations<P, K, NORMS, BY_ROW> x(a, shared, from, gain);
    const Ends<P, N, OUT> ends(a, shared, sums, bias, residual, out, partial);
    x.begin();
#pragma unroll 1
    for (int begin = P::first(); begin < P::end(); begin = P::next(begin)) {
        int count = P::parts > 1 ? P::end() - begin : (P::units - begin + BLOCKS - 1) / BLOCKS;
        if (count > P::batch) count = P::batch;
        // The warp's sums, where the others find them: [warp][tile][row][8 columns].
        float* mine = sums + (warp * P::tiles * 8 * HALVES + g) * 8 + 2 * t;
#pragma unroll 1
        for (int c = P::first_chunk(); c < P::end_chunk(); c += P::held) {
            x.next(c);
#pragma unroll
            for (int cc = 0; cc < P::held; cc++) {
                if (c + cc >= P::end_chunk()) break;
                const int blocks = P::blocks_of(c + cc);
                const bool adds = c + cc > P::first_chunk();
                int tile = 0;
                // Two tiles at a time, so that products wait less for those before.
                if (PAIRS && P::tiles > 1)
#pragma unroll 1
                    for (; tile + 1 < count * P::sides; tile += 2) multiplied<P, 2>(ring, x.held[cc], blocks, mine + tile * HALVES * 64, adds);
#pragma unroll 1
                for (; tile < count * P::sides; tile++) multiplied<P, 1>(ring, x.held[cc], blocks, mine + tile * HALVES * 64, adds);
            }
        }
        meet_workers();
        ends.finish(begin, count);
        meet_workers();
    }
}

// ── attention ─────────────────────────────────────────────────────────────────────────────────────────────────────────
//
// A warp takes a tile of tokens at a time, of one row and key/value head: scores of its G heads by tensor cores, then their
// weights times the values. Keys and values of earlier tokens do not depend on this step, so they come as weights do, a tile to a
// stage of the ring between the products' own, and what of a context the ring has room for is there before anything is waited for.
// Where a row's context is cut into parts, the block of the first one merges them.

#define D_BLOCKS (D / 32)
#define PAGED (TOKENS / 16)               // runs of 16 tokens, each in one page
#define RUNS (PAGE % TOKENS ? PAGED : 1)  // that a tile is copied in: all of it is in one page, if it can be
#define LINES (D / 64)                    // of a token's keys: 128 bytes each, swizzled by the copy engine
#define HALF_TILE (TOKENS * D * 2)        // bytes: a stage has first the keys of a tile, [line][token], then its values
#define TILE_COPIES (2 * LINES * RUNS)
static_assert(2 * HALF_TILE + 1023 <= STAGE, "a stage takes a tile, which begins where the pattern of swizzled lines does");

// Tokens are the columns of scores and the K of weighted values in such an order that no two lanes ask one bank of shared memory
// for two things: of eight the 0th, 4th, 5th, 1st, 2nd, 6th, 7th, 3rd.
__device__ __forceinline__ int in_order(int column) { return column / 2 ^ (column % 2 ^ column / 2 % 2) * 4; }
__device__ __forceinline__ int key_token(int n) { return 8 * n + in_order(threadIdx.x % 32 / 4); }
__device__ __forceinline__ int score_token(int n, int i) { return 8 * n + in_order(threadIdx.x % 4 * 2 + i); }

typedef uint4 Keys[TOKENS / 8][D_BLOCKS];  // of key_token(n): columns 32 b + 8 t

__device__ __forceinline__ Unit unit_of(const Arguments& a, int index) {
    Unit u;
    u.part = index % a.most_parts;
    u.kv_head = index / a.most_parts % KV;
    u.row = index / a.most_parts / KV;
    u.position = (int)__ldg(a.positions + u.row);
    u.line = __ldg(a.lines + u.row);
    u.ahead = AHEAD ? (int)__ldg(a.ahead + u.row) : 0;
    int tiles = u.position < 0 ? 0 : u.position / TOKENS + 1;
    int wanted = (tiles + WARPS - 1) / WARPS;
    u.parts = wanted < 1 ? 1 : wanted < a.most_parts ? wanted : a.most_parts;
    u.begin = tiles * u.part / u.parts;
    u.end = u.part < u.parts ? tiles * (u.part + 1) / u.parts : u.begin;
    return u;
}

// The first of the unit's tokens that are not in the cache yet.
__device__ __forceinline__ int first_new(const Unit& u) { return AHEAD ? u.position - u.ahead : u.position; }

__device__ __forceinline__ int page_of(const Arguments& a, const Unit& u, int token) {
    return token <= u.position ? __ldg(a.table + (u64)u.line * a.table_stride + token / PAGE) : 0;
}

// Which row of a layer's keys, or of its values, is a token's.
__device__ __forceinline__ int slot_of(const Unit& u, int page, int token) { return (page * KV + u.kv_head) * PAGE + token % PAGE; }

// What every layer wants to know of the unit.
__device__ __forceinline__ void prepare(Shared& shared, const Arguments& a, int index) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Unit u = unit_of(a, index);
    if (threadIdx.x == 0) shared.unit = u;
    if (threadIdx.x < D / 8 && u.position >= 0) {
        int half = threadIdx.x / (D / 16), column = threadIdx.x % (D / 16) * 8;
#pragma unroll 1
        for (int back = 0; back <= (AHEAD ? u.ahead : 0); back++)
            shared.angles[back][threadIdx.x] =
                __ldg((const uint4*)(a.rotary + ((u64)half * a.num_positions + u.position - back) * (D / 2) + column));
    }
    meet_workers();
}

__device__ __forceinline__ u32 tile_at(const Ring& ring) { return (ring.at() + 1023) & ~1023u; }

// The asking warp's part of the attention: what was in the cache before this step. A tile's last tokens may be none of these.
__device__ __forceinline__ void ask_tiles(Asker& asker, const Arguments& a, const Layer& layer, const Unit& u) {
    constexpr int AT_ONCE = 32 / RUNS;  // tiles whose pages are looked up together, one by each lane
    const int lane = threadIdx.x % 32, run = lane % RUNS, line = lane / RUNS % LINES, side = lane / (RUNS * LINES) % 2;
    const int first_row = (int)(((side ? layer.values : layer.keys) - a.cached) / D);
    const u32 within_tile = side * HALF_TILE + (line * TOKENS + run * (TOKENS / RUNS)) * 128;
    Ring& ring = asker.ring;
#pragma unroll 1
    for (int begin = u.begin; begin < u.end; begin += AT_ONCE) {
        const int token = (begin + lane / RUNS) * TOKENS + run * (TOKENS / RUNS);
        const int slot = slot_of(u, page_of(a, u, token), token);
        const int end = begin + AT_ONCE < u.end ? begin + AT_ONCE : u.end;
#pragma unroll 1
        for (int tile = begin; tile < end; tile++) {
            const int row = first_row + __shfl_sync(~0u, slot, (tile - begin) * RUNS + run);
            wait(ring.is_empty(), ring.parity ^ 1);
            if (lane == 0) expect(ring.is_full(), 2 * HALF_TILE);
            if (lane < TILE_COPIES)
                asm volatile(
                    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                    ::"r"(tile_at(ring) + within_tile), "l"(&a.cache), "r"(64 * line), "r"(row), "r"(ring.is_full()) : "memory");
            ring.next();
        }
    }
    if (u.begin < u.end) asker.forget();
}

// A barrier tells one phase from the next, and not from the one after: what was in this stage before may be a tile of another warp
// that is still on its way, while later ones have come. So first that one has to be gone.
static_assert(STAGES > WARPS, "a warp's next tile may be a whole ring ahead");
__device__ __forceinline__ void await_tile(const Ring& ring) {
    wait(ring.is_empty(), ring.parity ^ 1);
    wait(ring.is_full(), ring.parity);
}

// Eight columns of a token, in the keys or values of a tile.
__device__ __forceinline__ u32 within(int token, int column) {
    return (column / 64 * TOKENS + token) * 128 + ((column % 64 / 8 ^ token % 8) << 4);
}

__device__ __forceinline__ void read_keys(Keys& keys, u32 tile) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
        for (int b = 0; b < D_BLOCKS; b++) keys[n][b] = staged16(tile + 1024 * n + within(key_token(0), 32 * b + 8 * t));
}

// Of tokens 16 k to 16 k + 15, in order, columns 16 j to 16 j + 15, turned: columns are the rows of the product.
__device__ __forceinline__ uint4 turned_values(u32 tile, int k, int j) {
    const int of = threadIdx.x % 32 / 8, token = of / 2 * 8 + in_order(threadIdx.x % 8);
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(tile + HALF_TILE + 2048 * k + within(token, 16 * j + of % 2 * 8)) : "memory");
    return v;
}

// Eight columns of a token that the copy engine has not brought.
__device__ __forceinline__ void put_value(u32 tile, int token, int column, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};"
                 ::"r"(tile + HALF_TILE + within(token, column)), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// What lies behind the new token was never written: zeros keep a NaN there out of the products.
__device__ __forceinline__ void clear_behind(u32 tile, int token) {
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < (TOKENS - 1 - token) * (D / 8); i += 32)
        put_value(tile, token + 1 + i / (D / 8), i % (D / 8) * 8, make_uint4(0, 0, 0, 0));
}

// A head's columns 32 b + 8 t of every b, after norm and rotation, rounded wherever eager torch rounds.
__device__ __forceinline__ void rotated(uint4 (&v)[D_BLOCKS], const uint4 (&angles)[D / 8], const Arguments& a, const u16* norm) {
    const int t = threadIdx.x % 4;
#if HEAD_NORMS
    float sum = 0;
#pragma unroll
    for (int b = 0; b < D_BLOCKS; b++) sum += squared(v[b]);
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    float scale;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(sum / D + a.eps));
#pragma unroll
    for (int b = 0; b < D_BLOCKS; b++) v[b] = normed(v[b], __ldg((const uint4*)(norm + 32 * b + 8 * t)), scale);
#endif
#pragma unroll
    for (int b = 0; b < D_BLOCKS / 2; b++) {
        uint4 cos = angles[4 * b + t], sin = angles[D / 16 + 4 * b + t];
        u32* first = (u32*)&v[b];
        u32* second = (u32*)&v[b + D_BLOCKS / 2];
        const u32 *c = (const u32*)&cos, *s = (const u32*)&sin;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 x = first[i], y = second[i];
            u32 x_cos = packed(low(x) * low(c[i]), high(x) * high(c[i])), y_sin = packed(-low(y) * low(s[i]), -high(y) * high(s[i]));
            u32 y_cos = packed(low(y) * low(c[i]), high(y) * high(c[i])), x_sin = packed(low(x) * low(s[i]), high(x) * high(s[i]));
            first[i] = packed(low(x_cos) + low(y_sin), high(x_cos) + high(y_sin));
            second[i] = packed(low(y_cos) + low(x_sin), high(y_cos) + high(x_sin));
        }
    }
}

// Keys and values of the tokens of a tile that go in ahead of the unit's own. They are on their way to the cache: here they are
// taken from where the products of this step put them; values to the tile, which is `at`.
__device__ __forceinline__ void take_ahead(
    Keys& keys, u32 at, const Shared& shared, const Arguments& a, const Layer& layer, const Unit& u, int tile, const u16* heads) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, width = (H + 2 * KV) * D;
    const u16* key_at = heads + (u64)u.row * width + (H + u.kv_head) * D + 8 * t;
    const u16* value_at = heads + (u64)u.row * width + (H + KV + u.kv_head) * D + g * (D / 8);
    // How far in front of the unit's token one of the tile is; 0 for all that is not ahead of it in this step.
    auto back_of = [&](int token) {
        int back = u.position - tile * TOKENS - token;
        return back > 0 && back <= u.ahead ? back : 0;
    };
    uint4 values[TOKENS / 4][D / 64] = {};  // of tokens 4 i + t
    for (u32 turns = 0;; turns++) {
        bool missing = false;
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            const int back = back_of(key_token(n));
#pragma unroll
            for (int b = 0; b < D_BLOCKS; b++) {
                fresh16_if(back && (!turns || absent(keys[n][b])), keys[n][b], key_at - back * width + 32 * b);
                missing |= back && absent(keys[n][b]);
            }
        }
#pragma unroll
        for (int i = 0; i < TOKENS / 4; i++) {
            const int back = back_of(4 * i + t);
#pragma unroll
            for (int p = 0; p < D / 64; p++) {
                fresh16_if(back && (!turns || absent(values[i][p])), values[i][p], value_at - back * width + 8 * p);
                missing |= absent(values[i][p]);
            }
        }
        if (!__any_sync(~0u, missing)) break;
        if (turns == MOST_TURNS) __trap();
    }
#pragma unroll
    for (int i = 0; i < TOKENS / 4; i++)
#pragma unroll
        for (int p = 0; p < D / 64; p++)
            if (back_of(4 * i + t)) put_value(at, 4 * i + t, g * (D / 8) + 8 * p, values[i][p]);
#pragma unroll
    for (int n = 0; n < TOKENS / 8; n++) {
        const int back = back_of(key_token(n));
        uint4 key[D_BLOCKS];
#pragma unroll
        for (int b = 0; b < D_BLOCKS; b++) key[b] = keys[n][b];
        rotated(key, shared.angles[back], a, layer.k_norm);  // by all of the warp, who exchange sums for it
#pragma unroll
        for (int b = 0; b < D_BLOCKS; b++)
            if (back) keys[n][b] = key[b];
    }
}

__device__ __forceinline__ void attend(
    Ring& ring, Shared& shared, float* sums, const Arguments& a, const Layer& layer, int parity, const u16* heads, u16* attended) {
    const Unit u = shared.unit;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = u.begin + warp;
    const u16* own = heads + (u64)u.row * (H + 2 * KV) * D;
    float peak = -__int_as_float(0x7f800000), total = 0;
    float sum[D / 16][4] = {};  // column 16 j + g of heads 2 t and 2 t + 1, then column 16 j + g + 8
    uint4 query[D_BLOCKS], key[D_BLOCKS] = {}, value[D / 64] = {};
    const int last = u.position / TOKENS;
    const bool has_new = last < u.end && last >= first && (last - first) % WARPS == 0;
    Ring mine = ring;  // at the stage of the warp's next tile
    ring.skip(u.end - u.begin);
    mine.skip(warp);
    Keys keys;
    auto take = [&](int tile) {
        await_tile(mine);
        read_keys(keys, tile_at(mine));
        if (tile == last) clear_behind(tile_at(mine), u.position % TOKENS);
    };
    if (first < u.end) take(first);
#pragma unroll 1
    for (int i = 0; first + i * WARPS < u.end; i++) {
        const int tile = first + i * WARPS, next = tile + WARPS;
        const u32 at = tile_at(mine), empty = mine.is_empty();
        if (i == 0) {
            const u16 *query_at = own + (u.kv_head * G + (g < G ? g : 0)) * D + 8 * t, *key_at = own + (H + u.kv_head) * D + 8 * t;
            const u16* value_at = own + (H + KV + u.kv_head) * D + g * (D / 8);
            for (u32 turns = 0;; turns++) {
                bool missing = false;
#pragma unroll
                for (int b = 0; b < D_BLOCKS; b++) {
                    query[b] = fresh16(query_at + 32 * b);
                    fresh16_if(has_new, key[b], key_at + 32 * b);
                }
#pragma unroll
                for (int p = 0; p < D / 64; p++) {
                    fresh16_if(has_new, value[p], value_at + 8 * p);
                    missing |= absent(value[p]);
                }
#pragma unroll
                for (int b = 0; b < D_BLOCKS; b++) missing |= absent(query[b]) || absent(key[b]);
                if (!__any_sync(~0u, missing)) break;
                if (turns == MOST_TURNS) __trap();
            }
            rotated(query, shared.angles[0], a, layer.q_norm);
            if (has_new) {
                rotated(key, shared.angles[0], a, layer.k_norm);
                u64 slot = (u64)slot_of(u, page_of(a, u, u.position), u.position) * D;
#pragma unroll
                for (int b = 0; b < D_BLOCKS; b++)
                    if (g == 0) *(uint4*)(layer.keys + slot + 32 * b + 8 * t) = key[b];
#pragma unroll
                for (int p = 0; p < D / 64; p++)
                    if (t == 0) *(uint4*)(layer.values + slot + g * (D / 8) + 8 * p) = value[p];
            }
        }
        const bool adds_ahead = AHEAD && u.ahead && tile * TOKENS + TOKENS - 1 >= first_new(u);
        if (adds_ahead) take_ahead(keys, at, shared, a, layer, u, tile, heads);
        if (tile == last) {
            // The new token is in this tile.
            const int token = u.position % TOKENS;
#pragma unroll
            for (int b = 0; b < D_BLOCKS; b++)
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
                    if (key_token(n) == token) keys[n][b] = key[b];
#pragma unroll
            for (int p = 0; p < D / 64; p++)
                if (t == 0) put_value(at, token, g * (D / 8) + 8 * p, value[p]);
        }
        if (tile == last || adds_ahead) __syncwarp();
        float score[TOKENS / 8][4] = {};
#pragma unroll
        for (int b = 0; b < D_BLOCKS; b++)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) multiply(score[n], query[b].x, 0, query[b].y, 0, keys[n][b].x, keys[n][b].y);
#pragma unroll
        for (int b = 0; b < D_BLOCKS; b++)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++) multiply(score[n], query[b].z, 0, query[b].w, 0, keys[n][b].z, keys[n][b].w);
        if (tile == last)
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (score_token(n, i) > u.position % TOKENS) score[n][i] = -__int_as_float(0x7f800000);
        float new_peak = peak;
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) new_peak = fmaxf(new_peak, fmaxf(score[n][0], score[n][1]));
        mine.skip(WARPS);
        if (next < u.end) take(next);
        new_peak = fmaxf(new_peak, __shfl_xor_sync(~0u, new_peak, 1));
        new_peak = fmaxf(new_peak, __shfl_xor_sync(~0u, new_peak, 2));
        const float fade = power_of_2((peak - new_peak) * a.scale), most = new_peak * a.scale;
        peak = new_peak;
        total *= fade;
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                score[n][i] = power_of_2(fmaf(score[n][i], a.scale, -most));
                total += score[n][i];
            }
        const float fades[2] = {__shfl_sync(~0u, fade, 8 * t), __shfl_sync(~0u, fade, 8 * t + 4)};
#pragma unroll
        for (int j = 0; j < D / 16; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) sum[j][i] *= fades[i % 2];
#pragma unroll
        for (int k = 0; k < PAGED; k++) {
            const float *first = score[2 * k], *second = score[2 * k + 1];
            const u32 first_eight = packed(first[0], first[1]), others = packed(second[0], second[1]);
#pragma unroll
            for (int j = 0; j < D / 16; j++) {
                const uint4 v = turned_values(at, k, j);
                multiply(sum[j], v.x, v.y, v.z, v.w, first_eight, others);
            }
        }
        // Only now: the sums are proof that keys and values have been read.
#pragma unroll
        for (int j = 0; j < D / 16; j++)
            asm volatile("" : "+f"(sum[j][0]), "+f"(sum[j][1]), "+f"(sum[j][2]), "+f"(sum[j][3]) : : "memory");
        // What lanes have put there comes before what the copy engine writes there next.
        if (tile == last || adds_ahead) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(empty), "n"(WARPS) : "memory");
    }
    total += __shfl_xor_sync(~0u, total, 1);
    total += __shfl_xor_sync(~0u, total, 2);
    if (t == 0) shared.peaks[warp][g] = peak * a.scale, shared.totals[warp][g] = total;
#pragma unroll
    for (int i = 0; i < 2; i++)
        if (2 * t + i < G && first < u.end)
#pragma unroll
            for (int j = 0; j < D / 16; j++) {
                float* to = sums + (warp * G + 2 * t + i) * D + 16 * j + g;
                to[0] = sum[j][i], to[8] = sum[j][i + 2];
            }
    meet_workers();
    uint4* parts = a.parts + (((u64)parity * ROWS + u.row) * KV + u.kv_head) * MOST_PARTS * PART;
    u16* out = attended + ((u64)u.row * H + u.kv_head * G) * D;
#pragma unroll 1
    for (int pair = threadIdx.x; pair < PART; pair += WORKERS) {
        int head = 2 * pair / D, column = 2 * pair % D;
        float most = -__int_as_float(0x7f800000), all = 0;
        float2 merged = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared.peaks[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; w++)
            if (u.begin + w < u.end) {
                float weight = power_of_2(shared.peaks[w][head] - most);
                float2 part = *(float2*)(sums + (w * G + head) * D + column);
                all += weight * shared.totals[w][head];
                merged.x += weight * part.x, merged.y += weight * part.y;
            }
        if (u.part) {
            // Each pair of columns brings its own peak and total along: whoever has the words has all it needs.
            const uint4 words = make_uint4(
                __float_as_uint(merged.x), __float_as_uint(merged.y), __float_as_uint(most), __float_as_uint(all));
            put16(parts + u.part * PART + pair, words);
            continue;
        }
        // All parts are asked for together: it is a long way.
        uint4 others[MOST_PARTS];
#pragma unroll
        for (int part = 1; part < MOST_PARTS; part++) {
            others[part] = make_uint4(0, 0, 0, 0);
            fresh16_if(part < u.parts, others[part], parts + part * PART + pair);
        }
        for (u32 turns = 0;; turns++) {
            bool missing = false;
#pragma unroll
            for (int part = 1; part < MOST_PARTS; part++) missing |= absent(others[part]);
            if (!missing) break;
            if (turns == MOST_TURNS) __trap();
#pragma unroll
            for (int part = 1; part < MOST_PARTS; part++) refresh16(others[part], parts + part * PART + pair);
        }
#pragma unroll
        for (int part = 1; part < MOST_PARTS; part++)
            if (part < u.parts) {
                float other = __uint_as_float(others[part].z), of_both = fmaxf(most, other);
                float fade = power_of_2(most - of_both), weight = power_of_2(other - of_both);
                all = all * fade + __uint_as_float(others[part].w) * weight;
                merged.x = merged.x * fade + __uint_as_float(others[part].x) * weight;
                merged.y = merged.y * fade + __uint_as_float(others[part].y) * weight;
                most = of_both;
            }
        float divisor = all > 0 ? all : 1;  // a row that is not live gets zeros
        give4(out + head * D + column, packed(merged.x / divisor, merged.y / divisor));
    }
    meet_workers();
    if (u.part == 0)
#pragma unroll 1
        for (int pair = PART + threadIdx.x; pair < u.parts * PART; pair += WORKERS)
            put16(parts + pair, make_uint4(ABSENT, ABSENT, ABSENT, ABSENT));
}

// ── the step ──────────────────────────────────────────────────────────────────────────────────────────────────────────

// Where a layer's activations are, in a set.
struct Between {
    u16 *heads, *attended, *inner, *middle, *x;
    __device__ __forceinline__ Between(u16* sets, int layer) {
        heads = sets + blockIdx.x % COPIES * COPY + (u64)SET * (layer >= LAYERS - 2 ? SETS + layer - (LAYERS - 2) : layer % SETS);
        attended = heads + ROWS * (H + 2 * KV) * D;
        inner = attended + ROWS * H * D;
        middle = inner + ROWS * INNER;
        x = middle + ROWS * E;
    }
};

extern "C" __global__ void __launch_bounds__(WORKERS + 32, 1) decode_step(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *(Shared*)(memory + STAGES * STAGE);
    float* sums = (float*)(memory + STAGES * STAGE + (sizeof(Shared) + 127) / 128 * 128);
    typedef Product<E, (H + 2 * KV) * D, HEADS> Qkv;
    typedef Product<H * D, E, RESIDUAL> Attended;
    typedef Product<E, 2 * INNER, GATED> GateUp;
    typedef Product<INNER, E, RESIDUAL, DOWN_PARTS> Down;
    typedef Product<E, VOCAB, LOGITS> Head;
    static_assert(Qkv::units >= BLOCKS && GateUp::units >= BLOCKS, "a block without a share does not know when others are through");

    for (int i = threadIdx.x; i < LAYERS * (int)(sizeof(Layer) / 8); i += WORKERS + 32)
        ((u64*)shared.layers)[i] = ((const u64*)a.layers)[i];
    if (threadIdx.x < a.rows) shared.embedded[threadIdx.x] = a.embed + (u64)a.tokens[threadIdx.x] * E;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&shared.full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&shared.empty[i])), "n"(WARPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    Ring ring = {address(memory), address(shared.full), address(shared.empty), 0, 0};
    const int units = a.rows * KV * a.most_parts;  // of the attention: usually a block has one, or none

    if (threadIdx.x >= WORKERS) {
        Asker asker = {ring, ring, 0};
#pragma unroll 1
        for (int index = 0; index < LAYERS; index++) {
            const Layer& layer = shared.layers[index];
            ask<Qkv, E, (H + 2 * KV) * D>(asker, layer.qkv);
#pragma unroll 1
            for (int unit = blockIdx.x; unit < units; unit += BLOCKS) ask_tiles(asker, a, layer, unit_of(a, unit));
            ask<Attended, H * D, E>(asker, layer.o);
            ask<GateUp, E, 2 * INNER>(asker, layer.gate_up);
            ask<Down, INNER, E>(asker, layer.down);
        }
        ask<Head, E, VOCAB, false>(asker, a.head);
        return;
    }

    if (blockIdx.x < units) prepare(shared, a, blockIdx.x);
    const bool attends = blockIdx.x < units && shared.unit.part < shared.unit.parts;
    auto forget = [&](int layer) {
        // All are through with it, since all of the next layer is there. (Of the last two layers: in the next launch, which does
        // not know how many rows they had.)
        Between old(a.sets, layer < 0 ? LAYERS + layer : layer);
        const int rows = layer < 0 ? ROWS : a.rows;
        auto clear = [&](u16* words, int width) {
#pragma unroll 1
            for (int i = blockIdx.x * WORKERS + threadIdx.x; i < rows * width / 8; i += BLOCKS * WORKERS)
#pragma unroll
                for (int copy = 0; copy < COPIES; copy++)
                    ((uint4*)in_copy(words, copy))[i] = make_uint4(ABSENT, ABSENT, ABSENT, ABSENT);
        };
        clear(old.heads, (H + 2 * KV) * D), clear(old.attended, H * D), clear(old.inner, INNER), clear(old.middle, E), clear(old.x, E);
        __threadfence();
    };
    const u16* x = 0;  // the tokens' own
#pragma unroll 1
    for (int index = 0; index < LAYERS; index++) {
        const Layer& layer = shared.layers[index];
        Between here(a.sets, index);
        work<Qkv, E, (H + 2 * KV) * D, HEADS, true>(ring, shared, sums, a, x, layer.attn_norm, layer.qkv_bias, 0, here.heads);
        if (attends) {
#pragma unroll 1
            for (int next = blockIdx.x; next < units; next += BLOCKS) {
                if (units > BLOCKS) prepare(shared, a, next);
                if (shared.unit.part < shared.unit.parts) attend(ring, shared, sums, a, layer, index % 2, here.heads, here.attended);
            }
        } else
            forget(index - 2);  // while it waits for those that attend
        work<Attended, H * D, E, RESIDUAL, false, true>(ring, shared, sums, a, here.attended, 0, layer.o_bias, x, here.middle);
        if (attends) forget(index - 2);
        work<GateUp, E, 2 * INNER, GATED, true>(
            ring, shared, sums, a, here.middle, layer.mlp_norm, layer.gate_up_bias, 0, here.inner);
        work<Down, INNER, E, RESIDUAL, false>(
            ring, shared, sums, a, here.inner, 0, layer.down_bias, here.middle, here.x,
            a.partial + index % 2 * (u64)Down::units * Down::parts * ROWS * 8);
        x = here.x;
    }
    work<Head, E, VOCAB, LOGITS, true>(ring, shared, sums, a, x, a.norm, 0, 0, a.logits);
}
