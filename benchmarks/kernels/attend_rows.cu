// Attention of a decode step of many rows over paged keys and values. `attend_rows.py` launches it.
//
// A block serves one row and one key/value head. Its last warp asks for the pages of the row's context, one after the other,
// into a ring of stages in shared memory; it does not wait for the launch in front of this one, of whose results it needs
// none. The other warps share each stage, 16 tokens each: scores of the G query heads by tensor cores, then their weights times
// the values. Each has a softmax of its own, and at the end these are merged, in the order of the warps. Several blocks live on
// a multiprocessor: while one begins or ends, the others keep memory busy.
//
// The new token does not make the round trip through memory: the first warp's softmax begins with it.
//
// Sizes come as macros: H heads, KV key/value heads, D of a head, PAGE, HEAD_NORMS (0 or 1), STAGES, RESIDENT (blocks of a
// multiprocessor).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define WARPS 4  // and the one that asks
#define WORKERS (32 * WARPS)
#define TILE (16 * WARPS)                 // tokens of a stage
#define COPY (PAGE < TILE ? PAGE : TILE)  // tokens that lie together
#define G (H / KV)
#define D_BLOCKS (D / 32)
#define STAGE_BYTES (TILE * D * 2)  // of keys, and as many of values

struct Arguments {
    const u16 *heads, *q_norm, *k_norm, *rotary;
    u16 *keys, *values, *out;
    const long long* positions;
    const int *lines, *table;
    int table_stride, num_positions;
    float eps, scale;
};

struct Shared {
    u64 full[STAGES], empty[STAGES];
    float peaks[WARPS][8], totals[WARPS][8];
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

__device__ __forceinline__ uint4 from_shared(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

// c[16 x 8] += a[16 x 16] . b[16 x 8]
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a2, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(0), "r"(a2), "r"(0), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void meet_workers() { asm volatile("bar.sync 1, %0;" ::"n"(WORKERS) : "memory"); }

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@done bra over;\nbra again;\nover:\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}

// Until the launch in front of this one has ended; then the next one may begin to begin.
__device__ __forceinline__ void wait_for_launch() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void let_next_begin() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// ── the asking warp ───────────────────────────────────────────────────────────────────────────────────────────────────

__device__ __forceinline__ void ask(const Arguments& a, u32 stages, u32 full, u32 empty, const int* pages, int kv_head, int count) {
    const int lane = threadIdx.x % 32, copies = (count + COPY - 1) / COPY;
    int mine = 0, stage = 0;
    u32 parity = 1;
#pragma unroll 1
    for (int copy = 0; copy < copies; copy++) {
        if (copy % 32 == 0) mine = copy + lane < copies ? __ldg(pages + (copy + lane) * COPY / PAGE) : 0;
        const int page = __shfl_sync(~0u, mine, copy % 32);
        const int token = copy * COPY, inside = token % TILE, left = count - token;
        const u32 bytes = (left < COPY ? left : COPY) * D * 2, barrier = full + 8 * stage;
        if (lane == 0) {
            if (inside == 0) {
                const int tokens = left < TILE ? left : TILE;
                wait(empty + 8 * stage, parity);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(2 * tokens * D * 2) : "memory");
            }
            const u64 at = (((u64)page * KV + kv_head) * PAGE + token % PAGE) * D;
            const u32 to = stages + stage * 2 * STAGE_BYTES + inside * D * 2;
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                ::"r"(to), "l"(a.keys + at), "r"(bytes), "r"(barrier) : "memory");
            asm volatile(
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                ::"r"(to + STAGE_BYTES), "l"(a.values + at), "r"(bytes), "r"(barrier) : "memory");
        }
        if (inside + COPY == TILE && ++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// ── the others ────────────────────────────────────────────────────────────────────────────────────────────────────────

// A head's columns 32 b + 8 t of every b, after norm and rotation, rounded wherever eager torch rounds.
__device__ __forceinline__ void rotated(uint4 (&v)[D_BLOCKS], const Arguments& a, int position, const u16* norm) {
    const int t = threadIdx.x % 4;
#if HEAD_NORMS
    float sum = 0;
#pragma unroll
    for (int b = 0; b < D_BLOCKS; b++) {
        const u32* words = (const u32*)&v[b];
#pragma unroll
        for (int i = 0; i < 4; i++) sum += low(words[i]) * low(words[i]) + high(words[i]) * high(words[i]);
    }
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    float scale;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(scale) : "f"(sum / D + a.eps));
#pragma unroll
    for (int b = 0; b < D_BLOCKS; b++) {
        const uint4 gain = __ldg((const uint4*)(norm + 32 * b + 8 * t));
        u32* words = (u32*)&v[b];
        const u32* gains = (const u32*)&gain;
#pragma unroll
        for (int i = 0; i < 4; i++)
            words[i] = packed(low(words[i]) * scale * low(gains[i]), high(words[i]) * scale * high(gains[i]));
    }
#endif
#pragma unroll
    for (int b = 0; b < D_BLOCKS / 2; b++) {
        const u16* table = a.rotary + (u64)position * (D / 2) + 32 * b + 8 * t;
        const uint4 cos = __ldg((const uint4*)table), sin = __ldg((const uint4*)(table + (u64)a.num_positions * (D / 2)));
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

// A warp's unfinished softmax of the G heads (one for each g): sum[j] holds columns (D / 8) c + j of the values, c the column of
// the tile of tensor cores.
struct Softmax {
    float peak, total, sum[D / 8][4];
};

// The new token: its key and value go to the cache, and the softmax begins with it.
__device__ __forceinline__ void begin_with_new(
    Softmax& soft, const uint4 (&query)[D_BLOCKS], const Arguments& a, const u16* own, int kv_head, int position, int page) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const u16 *key_at = own + (H + kv_head) * D, *value_at = own + (H + KV + kv_head) * D;
    const u64 slot = (((u64)page * KV + kv_head) * PAGE + position % PAGE) * D;
    uint4 key[D_BLOCKS];
#pragma unroll
    for (int b = 0; b < D_BLOCKS; b++) key[b] = *(const uint4*)(key_at + 32 * b + 8 * t);
    rotated(key, a, position, a.k_norm);
    float score = 0;
#pragma unroll
    for (int b = 0; b < D_BLOCKS; b++) {
        const u32 *q = (const u32*)&query[b], *k = (const u32*)&key[b];
#pragma unroll
        for (int i = 0; i < 4; i++) score += low(q[i]) * low(k[i]) + high(q[i]) * high(k[i]);
        if (g == 0) *(uint4*)(a.keys + slot + 32 * b + 8 * t) = key[b];
    }
    score += __shfl_xor_sync(~0u, score, 1);
    score += __shfl_xor_sync(~0u, score, 2);
    if (lane < D / 8) *(uint4*)(a.values + slot + 8 * lane) = *(const uint4*)(value_at + 8 * lane);
    soft.peak = score * a.scale;
    soft.total = t == 0;  // the four threads of a head add theirs up at the end
#pragma unroll
    for (int side = 0; side < 2; side++)
#pragma unroll
        for (int part = 0; part < D / 64; part++) {
            const uint4 value = *(const uint4*)(value_at + (2 * t + side) * (D / 8) + 8 * part);
            const u32* words = (const u32*)&value;
#pragma unroll
            for (int i = 0; i < 4; i++)
                soft.sum[8 * part + 2 * i][side] = low(words[i]), soft.sum[8 * part + 2 * i + 1][side] = high(words[i]);
        }
}

// 16 tokens of a stage, of which the first `left` are there: at least one.
__device__ __forceinline__ void attend(Softmax& soft, const uint4 (&query)[D_BLOCKS], u32 keys, u32 values, int left, float scale) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float score[2][4] = {};
    float peak = soft.peak;
#pragma unroll
    for (int n = 0; n < 2; n++) {
#pragma unroll
        for (int b = 0; b < D_BLOCKS; b++) {
            const uint4 key = from_shared(keys + ((8 * n + g) * D + 32 * b + 8 * t) * 2);
            multiply(score[n], query[b].x, query[b].y, key.x, key.y);
            multiply(score[n], query[b].z, query[b].w, key.z, key.w);
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            score[n][i] = 8 * n + 2 * t + i < left ? score[n][i] * scale : -__int_as_float(0x7f800000);
            peak = fmaxf(peak, score[n][i]);
        }
    }
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 1));
    peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, 2));
    const float fade = power_of_2(soft.peak - peak);
    soft.peak = peak;
    soft.total *= fade;
#pragma unroll
    for (int n = 0; n < 2; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            score[n][i] = power_of_2(score[n][i] - peak);
            soft.total += score[n][i];
        }
#pragma unroll
    for (int j = 0; j < D / 8; j++) soft.sum[j][0] *= fade, soft.sum[j][1] *= fade;
    const u32 a0 = packed(score[0][0], score[0][1]), a2 = packed(score[1][0], score[1][1]);
#pragma unroll
    for (int part = 0; part < D / 64; part++) {
        uint4 v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int token = 2 * t + i % 2 + 8 * (i / 2);
            v[i] = from_shared(values + (token * D + g * (D / 8) + 8 * part) * 2);
            // What lies beyond the end is whatever was there before; zeros keep a NaN out of the products.
            if (token >= left) v[i] = make_uint4(0, 0, 0, 0);
        }
        const u32 *v0 = (const u32*)&v[0], *v1 = (const u32*)&v[1], *v2 = (const u32*)&v[2], *v3 = (const u32*)&v[3];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            multiply(soft.sum[8 * part + 2 * i], a0, a2, __byte_perm(v0[i], v1[i], 0x5410), __byte_perm(v2[i], v3[i], 0x5410));
            multiply(soft.sum[8 * part + 2 * i + 1], a0, a2, __byte_perm(v0[i], v1[i], 0x7632), __byte_perm(v2[i], v3[i], 0x7632));
        }
    }
}

extern "C" __global__ void __launch_bounds__(WORKERS + 32, RESIDENT) attend_rows(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) unsigned char memory[];
    Shared& shared = *(Shared*)(memory + STAGES * 2 * STAGE_BYTES);
    const int row = blockIdx.x, kv_head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int position = (int)__ldg(a.positions + row);
    const int* pages = a.table + (u64)__ldg(a.lines + row) * a.table_stride;
    u16* out = a.out + ((u64)row * H + kv_head * G) * D;
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(&shared.full[i])) : "memory");
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(&shared.empty[i])), "n"(WARPS) : "memory");
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    const u32 stages = address(memory), full = address(shared.full), empty = address(shared.empty);
    if (threadIdx.x >= WORKERS) {
        ask(a, stages, full, empty, pages, kv_head, position);
        return;
    }
    const int new_page = position < 0 ? 0 : __ldg(pages + position / PAGE);
    wait_for_launch();
    let_next_begin();
    if (position < 0) {  // a row that is not live gets zeros
        for (int i = threadIdx.x; i < G * D / 8; i += WORKERS) ((uint4*)out)[i] = make_uint4(0, 0, 0, 0);
        return;
    }

    const u16* own = a.heads + (u64)row * (H + 2 * KV) * D;
    uint4 query[D_BLOCKS];
#pragma unroll
    for (int b = 0; b < D_BLOCKS; b++) query[b] = *(const uint4*)(own + (kv_head * G + (g < G ? g : 0)) * D + 32 * b + 8 * t);
    rotated(query, a, position, a.q_norm);
    Softmax soft = {-__int_as_float(0x7f800000)};
    if (warp == 0) begin_with_new(soft, query, a, own, kv_head, position, new_page);
    int stage = 0;
    u32 parity = 0;
#pragma unroll 1
    for (int first = 0; first < position; first += TILE) {
        wait(full + 8 * stage, parity);
        const u32 keys = stages + stage * 2 * STAGE_BYTES + warp * 16 * D * 2;
        const int left = position - first - 16 * warp;
        if (left > 0) attend(soft, query, keys, keys + STAGE_BYTES, left, a.scale);
        __syncwarp();
        if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(empty + 8 * stage) : "memory");
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }

    // The stages are nobody's now, and hold what the warps have found: [warp][head][column].
    soft.total += __shfl_xor_sync(~0u, soft.total, 1);
    soft.total += __shfl_xor_sync(~0u, soft.total, 2);
    meet_workers();
    float* sums = (float*)memory;
    if (t == 0) shared.peaks[warp][g] = soft.peak, shared.totals[warp][g] = soft.total;
    if (g < G) {
#pragma unroll
        for (int j = 0; j < D / 8; j++) {
            sums[(warp * G + g) * D + 2 * t * (D / 8) + j] = soft.sum[j][0];
            sums[(warp * G + g) * D + (2 * t + 1) * (D / 8) + j] = soft.sum[j][1];
        }
    }
    meet_workers();
#pragma unroll 1
    for (int pair = threadIdx.x; pair < G * D / 2; pair += WORKERS) {
        const int head = 2 * pair / D, column = 2 * pair % D;
        float most = -__int_as_float(0x7f800000), all = 0;
        float2 merged = make_float2(0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; w++) most = fmaxf(most, shared.peaks[w][head]);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float weight = power_of_2(shared.peaks[w][head] - most);
            const float2 part = *(float2*)(sums + (w * G + head) * D + column);
            all += weight * shared.totals[w][head];
            merged.x += weight * part.x, merged.y += weight * part.y;
        }
        *(u32*)(out + head * D + column) = packed(merged.x / all, merged.y / all);
    }
}
