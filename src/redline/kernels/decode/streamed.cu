// Attention of one decode step over paged keys and values, on Hopper, in bfloat16: what memory has to give is all it waits for.
//
// A warp is a worker of its own. It takes one item after the other, a share of the context of a row and a key/value head, and
// has the copy engine bring its keys and values into a ring of its own in shared memory, TOKENS of them a stage, always STAGES
// ahead and across the ends of items: so memory has no pause while a softmax ends or a row begins. Only the pages that a stage
// needs are asked for, 16 tokens at a time.
//
//     scores [token, head] = keys · queriesᵀ        tokens are the tall side of the tensor cores' product, up to 8 heads the other
//     sums [d, head] += valuesᵀ · weights
//
// The new token is written to its page, and into the last stage, so that it is one of the tokens there; unless the launch in front
// of this one has stored it, from where it comes like the others. The parts of an item meet in memory, and the warp that ends
// last adds them up, in their order.
//
// Macros: D, G query heads of a key/value head (8 at most), PAGE, WARPS, STAGES, HEAD_NORMS. In front of this stands `hopper.cuh`.

constexpr int TOKENS = 32;               // of a stage
constexpr int SIXTEEN = 16 * LINE;       // bytes of 16 tokens, 64 of their numbers
constexpr int HALVES = D / 64;           // of a head, a line of 128 bytes each
constexpr int SIDE = 2 * SIXTEEN * HALVES;  // keys or values of a stage: [half][token][64 numbers], lines swizzled
constexpr int STAGE = 2 * SIDE;
constexpr int COPIES = 4 * HALVES;       // of a stage, 16 tokens each
constexpr int STEPS = D / 16;            // of the tensor cores along a head
constexpr int FLOATS = 4 * (STEPS + 1);  // a lane's part: its sums, two peaks and two totals
constexpr u32 ALL = 0xffffffffu;
static_assert(G <= 8, "query heads are the columns of a product that has eight");
static_assert(PAGE % 16 == 0, "what is copied at once lies in one page");

struct Arguments {
    Map keys, values;             // [pages · K · PAGE, D] of a layer
    const u16* heads;             // [rows, (G + 2) · K, D]: queries, keys, values, before norm and rotation
    const u16 *q_norm, *k_norm;   // [D] or null
    const u16* rotary;            // cos, sin [2, positions, D / 2]
    u16* out;                     // [rows, G · K, D]
    u16 *new_keys, *new_values;   // the same memory as `keys` and `values`
    const int* table;             // [lines, table_stride]: pages
    const int4* items;            // row (-1: none), line, position of the new token, part + parts · 65,536
    float* parts;                 // [items · K, STEPS + 1, 32, 4]
    int* arrived;                 // [rows, K]: zeros between launches
    float scale, eps;             // scores are in units of log 2
    int kv_heads, most_items, table_stride, num_positions;
    int is_stored;                // 1: the launch in front of this one writes the new tokens to their pages
};

// ── items ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

struct Item {
    int id, row, line, position, part, parts, kv_head;
    int begin, end;        // stages
    int first_page, page;  // of the pages from `first_page` on each lane has one

    __device__ __forceinline__ bool is_there() const { return row >= 0; }
    __device__ __forceinline__ bool has_new_token() const { return part == parts - 1; }
};

struct Work {
    const Arguments& a;
    int* taken;  // by this block's warps
    int lane;

    // The next one for this warp.
    __device__ __forceinline__ Item next() const {
        Item item = {};
        int turn = 0;
        if (lane == 0) turn = atomicAdd(taken, 1);
        turn = __shfl_sync(ALL, turn, 0);
        item.id = blockIdx.x + gridDim.x * turn;
        item.row = -1;
        if (item.id >= a.most_items * a.kv_heads) return item;
        const int4 of = a.items[item.id / a.kv_heads];
        if (of.x < 0) return item;
        item.kv_head = item.id % a.kv_heads;
        item.row = of.x, item.line = of.y, item.position = of.z;
        item.part = of.w & 0xffff, item.parts = of.w >> 16;
        const int stages = (item.position + TOKENS) / TOKENS;  // of positions 0 to `position`; none where it is -1
        item.begin = stages * item.part / item.parts;
        item.end = stages * (item.part + 1) / item.parts;
        look_up(item, item.begin * TOKENS / PAGE);
        return item;
    }
    __device__ __forceinline__ void look_up(Item& item, int first) const {
        item.first_page = first;
        const int page = first + lane;
        item.page = page * PAGE <= item.position ? a.table[(u64)item.line * a.table_stride + page] : 0;
    }
};

// ── stages ────────────────────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void bring_tokens(u32 to, const Map& from, int inner, int row, u32 barrier, u64 once) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;"
        ::"r"(to), "l"(&from), "r"(inner), "r"(row), "r"(barrier), "l"(once) : "memory");
}

struct Ring {
    u32 stages, full;
    u64 once;

    __device__ __forceinline__ u32 keys(u32 turn) const { return stages + turn % STAGES * STAGE; }
    __device__ __forceinline__ u32 values(u32 turn) const { return keys(turn) + SIDE; }
    __device__ __forceinline__ u32 barrier(u32 turn) const { return full + turn % STAGES * 8; }

    // Cached tokens of a stage. Each of the first lanes asks for 16 of them.
    __device__ __forceinline__ void bring(const Work& work, Item& item, int stage, u32 turn) const {
        const Arguments& a = work.a;
        const int begin = stage * TOKENS, cached = item.position + a.is_stored - begin;
        if ((begin + TOKENS - 1) / PAGE - item.first_page >= 32) work.look_up(item, begin / PAGE);
        const int sixteens = cached <= 0 ? 0 : cached <= 16 ? 1 : 2;
        const int of = work.lane % 2, half = work.lane / 2 % HALVES, side = work.lane / (2 * HALVES) % 2;
        const int token = begin + 16 * of;
        const int page = __shfl_sync(ALL, item.page, token / PAGE - item.first_page);
        if (work.lane == 0) expect(barrier(turn), sixteens * 2 * HALVES * SIXTEEN);
        __syncwarp();
        if (work.lane < COPIES && of < sixteens) {
            const u32 to = keys(turn) + side * SIDE + (half * 2 + of) * SIXTEEN;
            bring_tokens(to, side ? a.values : a.keys, 64 * half, (page * a.kv_heads + item.kv_head) * PAGE + token % PAGE,
                         barrier(turn), once);
        }
    }
};

// Of a stage's keys or values 16 bytes, eight numbers of a head.
__device__ __forceinline__ u32 place(u32 side, int token, int chunk) {
    return side + chunk / 8 * 2 * SIXTEEN + token * LINE + ((chunk % 8 ^ token % 8) << 4);
}

// ── small things ──────────────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ float wide(u16 x) { return __uint_as_float((u32)x << 16); }
__device__ __forceinline__ u16 rounded(float x) { return (u16)packed(x, 0.f); }
__device__ __forceinline__ float power_of_2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
// What a number and the one half a head away become by rotation, rounded where eager torch rounds.
__device__ __forceinline__ void rotate(float& first, float& second, float cos, float sin) {
    auto round = [](float x) { return wide(rounded(x)); };
    const float x = first, y = second;
    first = round(round(x * cos) + round(y * -sin));
    second = round(round(y * cos) + round(x * sin));
}
__device__ __forceinline__ u32 turned(u32 both) {
    u32 there;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(there) : "r"(both));
    return there;
}
typedef u32 Square[4];  // of 16 by 16 numbers what a lane has
__device__ __forceinline__ void load(Square& to, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void load_turned(Square& to, u32 from) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ void add_product(float4& sums, const Square& rows, u32 first, u32 second) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums.x), "+f"(sums.y), "+f"(sums.z), "+f"(sums.w)
        : "r"(rows[0]), "r"(rows[1]), "r"(rows[2]), "r"(rows[3]), "r"(first), "r"(second));
}
// Over the lanes that have the same two heads.
template <class Both>
__device__ __forceinline__ float over_tokens(float x, Both both) {
#pragma unroll
    for (int far = 4; far < 32; far *= 2) x = both(x, __shfl_xor_sync(ALL, x, far));
    return x;
}
__device__ __forceinline__ float larger(float x, float y) { return fmaxf(x, y); }
__device__ __forceinline__ float sum_of(float x, float y) { return x + y; }

// ── the new token ─────────────────────────────────────────────────────────────────────────────────────────────────────

// Asked for where it stands, long before it is needed: what the ring has asked for may be in front of it.
__device__ __forceinline__ u32 asked32(const u16* from) {
    u32 both;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(both) : "l"(from));
    return both;
}
__device__ __forceinline__ u16 asked16(const u16* from) {
    u16 one;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(one) : "l"(from));
    return one;
}

// A row's queries before norm and rotation, and its angles. As tensor cores take them: of head lane / 4 the numbers
// 16 · step + lane % 4 · 2, the next, and those eight further.
struct RawQueries {
    u32 numbers[STEPS][2], cos[STEPS / 2][2], sin[STEPS / 2][2];

    __device__ __forceinline__ void ask(const Arguments& a, const Item& item) {
        if (!item.is_there() || item.position < 0) return;
        const int lane = threadIdx.x % 32, head = lane / 4, inside = lane % 4 * 2;
        const u16* of = a.heads + ((u64)item.row * (G + 2) * a.kv_heads + item.kv_head * G + head) * D + inside;
        const u16* angles = a.rotary + (u64)item.position * (D / 2) + inside;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int eight = 0; eight < 2; eight++) {
                numbers[step][eight] = head < G ? asked32(of + 16 * step + 8 * eight) : 0;
                if (step >= STEPS / 2) continue;
                cos[step][eight] = asked32(angles + 16 * step + 8 * eight);
                sin[step][eight] = asked32(angles + (u64)a.num_positions * (D / 2) + 16 * step + 8 * eight);
            }
    }
};

struct Queries {
    u32 pairs[STEPS][2];

    __device__ __forceinline__ Queries(const Arguments& a, const RawQueries& raw) {
        float x[STEPS][4];
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[step][i] = one_of(raw.numbers[step], i);
#if HEAD_NORMS
        float squares = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) squares += x[step][i] * x[step][i];
        squares += __shfl_xor_sync(ALL, squares, 1);
        squares += __shfl_xor_sync(ALL, squares, 2);
        const float by = rsqrtf(squares / D + a.eps);
        const u16* gains = a.q_norm + threadIdx.x % 4 * 2;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int i = 0; i < 4; i++) x[step][i] = wide(rounded(x[step][i] * by * wide(gains[16 * step + i / 2 * 8 + i % 2])));
#endif
#pragma unroll
        for (int step = 0; step < STEPS / 2; step++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                rotate(x[step][i], x[step + STEPS / 2][i], one_of(raw.cos[step], i), one_of(raw.sin[step], i));
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            pairs[step][0] = packed(x[step][0], x[step][1]);
            pairs[step][1] = packed(x[step][2], x[step][3]);
        }
    }
    static __device__ __forceinline__ float one_of(const u32 (&pairs)[2], int i) { return i % 2 ? high(pairs[i / 2]) : low(pairs[i / 2]); }
};

// Key and value of the new token. A lane has numbers of both halves of a head, half a head apart.
struct NewToken {
    u16 keys[2][HALVES], values[2][HALVES], cos[HALVES], sin[HALVES];

    __device__ __forceinline__ void ask(const Arguments& a, const Item& item) {
        if (!item.has_new_token()) return;
        const int lane = threadIdx.x % 32;
        const u16* key = a.heads + ((u64)item.row * (G + 2) * a.kv_heads + G * a.kv_heads + item.kv_head) * D;
        const u16* angles = a.rotary + (u64)item.position * (D / 2);
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                keys[half][i] = asked16(key + lane + 32 * i + half * D / 2);
                values[half][i] = asked16(key + (u64)a.kv_heads * D + lane + 32 * i + half * D / 2);
            }
            cos[i] = asked16(angles + lane + 32 * i);
            sin[i] = asked16(angles + (u64)a.num_positions * (D / 2) + lane + 32 * i);
        }
    }

    // To its page and to its place in the last stage.
    __device__ __forceinline__ void put(const Work& work, const Item& item, u32 key_side, u32 value_side) const {
        const Arguments& a = work.a;
        const int lane = work.lane, at = item.position % TOKENS;
        float x[HALVES], y[HALVES];
#pragma unroll
        for (int i = 0; i < HALVES; i++) x[i] = wide(keys[0][i]), y[i] = wide(keys[1][i]);
#if HEAD_NORMS
        float squares = 0.f;
#pragma unroll
        for (int i = 0; i < HALVES; i++) squares += x[i] * x[i] + y[i] * y[i];
#pragma unroll
        for (int far = 1; far < 32; far *= 2) squares += __shfl_xor_sync(ALL, squares, far);
        const float by = rsqrtf(squares / D + a.eps);
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            x[i] = wide(rounded(x[i] * by * wide(a.k_norm[lane + 32 * i])));
            y[i] = wide(rounded(y[i] * by * wide(a.k_norm[lane + 32 * i + D / 2])));
        }
#endif
        const int page = __shfl_sync(ALL, item.page, item.position / PAGE - item.first_page);
        const u64 there = (((u64)page * a.kv_heads + item.kv_head) * PAGE + item.position % PAGE) * D;
        auto put_one = [&](u32 side, u16* memory, int number, u16 what) {
            memory[there + number] = what;
            const u32 to = place(side, at, number / 8) + number % 8 * 2;
            asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(what) : "memory");
        };
#pragma unroll
        for (int i = 0; i < HALVES; i++) {
            const int number = lane + 32 * i;
            rotate(x[i], y[i], wide(cos[i]), wide(sin[i]));
            put_one(key_side, a.new_keys, number, rounded(x[i]));
            put_one(key_side, a.new_keys, number + D / 2, rounded(y[i]));
            put_one(value_side, a.new_values, number, values[0][i]);
            put_one(value_side, a.new_values, number + D / 2, values[1][i]);
        }
    }
};

// Zeros for the values behind the last token of a stage: what was never written may be NaN.
__device__ __forceinline__ void clear_behind(u32 values, int last) {
    const int chunks = D / 8, behind = (15 - last % 16) * chunks;
    for (int i = threadIdx.x % 32; i < behind; i += 32)
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};"
                     ::"r"(place(values, last + 1 + i / chunks, i % chunks)), "r"(0) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the copy engine writes there next
    __syncwarp();
}

// ── an unfinished softmax ─────────────────────────────────────────────────────────────────────────────────────────────

// Of heads lane % 4 · 2 and the next; sums of numbers 16 · step + lane / 4 and eight further.
struct Softmax {
    float peak[2], total[2];
    float4 sums[STEPS];

    __device__ __forceinline__ void begin() {
        peak[0] = peak[1] = __int_as_float(0xff800000);
        total[0] = total[1] = 0.f;
#pragma unroll
        for (int step = 0; step < STEPS; step++) sums[step] = {0.f, 0.f, 0.f, 0.f};
    }
    __device__ __forceinline__ void fade(float by_first, float by_second) {
        total[0] *= by_first, total[1] *= by_second;
#pragma unroll
        for (int step = 0; step < STEPS; step++)
            sums[step].x *= by_first, sums[step].y *= by_second, sums[step].z *= by_first, sums[step].w *= by_second;
    }

    // The first `seen` tokens of a stage. Totals are a lane's own until the end.
    __device__ __forceinline__ void add(const Queries& queries, u32 keys, u32 values, int seen, float scale) {
        const int lane = threadIdx.x % 32, of = lane / 8, i = lane % 8;
        const bool both = seen > 16;
        float4 scores[2] = {};
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            Square rows;
            load(rows, place(keys, of % 2 * 8 + i, 2 * step + of / 2));
            add_product(scores[0], rows, queries.pairs[step][0], queries.pairs[step][1]);
            if (both) {
                load(rows, place(keys, 16 + of % 2 * 8 + i, 2 * step + of / 2));
                add_product(scores[1], rows, queries.pairs[step][0], queries.pairs[step][1]);
            }
        }
        const float nothing = __int_as_float(0xff800000);
#pragma unroll
        for (int m = 0; m < 2; m++) {
            const int token = 16 * m + lane / 4;
            const bool sees = token < seen, sees_further = token + 8 < seen;
            scores[m].x = sees ? scores[m].x * scale : nothing, scores[m].y = sees ? scores[m].y * scale : nothing;
            scores[m].z = sees_further ? scores[m].z * scale : nothing, scores[m].w = sees_further ? scores[m].w * scale : nothing;
        }
        const float first = over_tokens(fmaxf(fmaxf(scores[0].x, scores[0].z), fmaxf(scores[1].x, scores[1].z)), larger);
        const float second = over_tokens(fmaxf(fmaxf(scores[0].y, scores[0].w), fmaxf(scores[1].y, scores[1].w)), larger);
        const float peak_0 = fmaxf(peak[0], first), peak_1 = fmaxf(peak[1], second);
        fade(power_of_2(peak[0] - peak_0), power_of_2(peak[1] - peak_1));
        peak[0] = peak_0, peak[1] = peak_1;
#pragma unroll
        for (int m = 0; m < 2; m++) {
            if (m == 1 && !both) break;
            const float x = power_of_2(scores[m].x - peak_0), y = power_of_2(scores[m].y - peak_1);
            const float z = power_of_2(scores[m].z - peak_0), w = power_of_2(scores[m].w - peak_1);
            total[0] += x + z, total[1] += y + w;
            const u32 near = turned(packed(x, y)), far = turned(packed(z, w));
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                Square numbers;
                load_turned(numbers, place(values, 16 * m + of / 2 * 8 + i, 2 * step + of % 2));
                add_product(sums[step], numbers, near, far);
            }
        }
    }

    __device__ __forceinline__ void end() {
        total[0] = over_tokens(total[0], sum_of), total[1] = over_tokens(total[1], sum_of);
    }
    __device__ __forceinline__ void write(const Arguments& a, const Item& item) const {
        const int lane = threadIdx.x % 32, head = lane / 4;
        u16* to = a.out + (((u64)item.row * a.kv_heads + item.kv_head) * G + head) * D + lane % 4 * 2;
        const float by_first = 1.f / total[0], by_second = 1.f / total[1];
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            const u32 near = turned(packed(sums[step].x * by_first, sums[step].y * by_second));
            const u32 far = turned(packed(sums[step].z * by_first, sums[step].w * by_second));
            if (head < G) *(u32*)(to + 16 * step) = near, *(u32*)(to + 16 * step + 8) = far;
        }
    }

    // One of several parts: to memory, for the warp that ends last. Whether this is that warp, which then has all of them.
    __device__ __forceinline__ bool meets(const Work& work, const Item& item) {
        const Arguments& a = work.a;
        auto part = [&](int number) {
            return (float4*)(a.parts + (u64)(item.id + (number - item.part) * a.kv_heads) * FLOATS * 32) + work.lane;
        };
        float4* own = part(item.part);
#pragma unroll
        for (int step = 0; step < STEPS; step++) __stcg(own + 32 * step, sums[step]);
        __stcg(own + 32 * STEPS, make_float4(peak[0], peak[1], total[0], total[1]));
        __threadfence();
        __syncwarp();
        int* counter = a.arrived + item.row * a.kv_heads + item.kv_head;
        int before = 0;
        if (work.lane == 0) before = atomicAdd(counter, 1);
        if (__shfl_sync(ALL, before, 0) != item.parts - 1) return false;
        __threadfence();
        if (work.lane == 0) *counter = 0;
        begin();
#pragma unroll 2
        for (int number = 0; number < item.parts; number++) {
            const float4* other = part(number);
            const float4 end = __ldcg(other + 32 * STEPS);
            const float peak_0 = fmaxf(peak[0], end.x), peak_1 = fmaxf(peak[1], end.y);
            const float by_first = power_of_2(end.x - peak_0), by_second = power_of_2(end.y - peak_1);
            fade(power_of_2(peak[0] - peak_0), power_of_2(peak[1] - peak_1));
            peak[0] = peak_0, peak[1] = peak_1;
            total[0] += end.z * by_first, total[1] += end.w * by_second;
#pragma unroll
            for (int step = 0; step < STEPS; step++) {
                const float4 more = __ldcg(other + 32 * step);
                sums[step].x += more.x * by_first, sums[step].y += more.y * by_second;
                sums[step].z += more.z * by_first, sums[step].w += more.w * by_second;
            }
        }
        return true;
    }
};

// Of a row that is not live.
__device__ __forceinline__ void write_zeros(const Arguments& a, const Item& item) {
    u16* to = a.out + ((u64)item.row * a.kv_heads + item.kv_head) * G * D;
    for (int i = threadIdx.x % 32; i < G * D / 8; i += 32) ((uint4*)to)[i] = {0, 0, 0, 0};
}

// ── a warp ────────────────────────────────────────────────────────────────────────────────────────────────────────────

extern "C" __global__ __launch_bounds__(32 * WARPS, 1) void attend(const __grid_constant__ Arguments a) {
    extern __shared__ unsigned char memory[];
    __shared__ int taken;
    __shared__ alignas(8) u64 barriers[WARPS][STAGES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 room = ((u32)__cvta_generic_to_shared(memory) + 1023) & ~1023u;
    Ring ring = {room + warp * STAGES * STAGE, (u32)__cvta_generic_to_shared(barriers[warp]), 0};
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(ring.once));
    if (threadIdx.x == 0) taken = 0;
    if (lane == 0) {
        for (int stage = 0; stage < STAGES; stage++) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(ring.barrier(stage)));
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
    }
    __syncthreads();
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    if (a.is_stored) wait_for_launch_in_front();

    const Work work = {a, &taken, lane};
    Item item = work.next(), coming = {};
    u32 asked = 0, read = 0;
    int asked_of_item = item.begin, asked_of_coming = 0;
    auto ask = [&](u32 most) {
        while (asked - read < most) {
            if (asked_of_item < item.end)
                ring.bring(work, item, asked_of_item++, asked++);
            else if (asked_of_coming < coming.end)
                ring.bring(work, coming, asked_of_coming++, asked++);
            else
                break;
        }
    };
    RawQueries raw, raw_of_coming;
    // Queries are asked for before the ring is full: they would come behind all of it.
    if (!a.is_stored) {
        ask(1);
        wait_for_launch_in_front();
    }
    raw.ask(a, item);
    ask(STAGES);
    auto take = [&] {
        coming = work.next(), asked_of_coming = coming.begin;
        raw_of_coming.ask(a, coming);
    };
    take();
    while (item.is_there()) {
        if (item.position < 0) write_zeros(a, item);
        else {
            const Queries queries(a, raw);
            NewToken token;
            if (!a.is_stored) token.ask(a, item);
            Softmax softmax;
            softmax.begin();
            for (int stage = item.begin; stage < item.end; stage++) {
                ask(STAGES);
                wait(ring.barrier(read), read / STAGES % 2);
                const bool is_last = item.has_new_token() && stage == item.end - 1;
                if (is_last) {
                    if (!a.is_stored) token.put(work, item, ring.keys(read), ring.values(read));
                    clear_behind(ring.values(read), item.position % TOKENS);
                }
                softmax.add(queries, ring.keys(read), ring.values(read), is_last ? item.position % TOKENS + 1 : TOKENS, a.scale);
                __syncwarp();
                read++;
            }
            ask(STAGES);
            softmax.end();
            if (item.parts == 1 || softmax.meets(work, item)) softmax.write(a, item);
        }
        item = coming, asked_of_item = asked_of_coming, raw = raw_of_coming;
        take();
    }
}
