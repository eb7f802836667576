// What kernels for Hopper have in common that bring their factors with the copy engine and multiply on tensor cores.
// In front of it stand BYTES of a number and `multiply` (`hopper.py`).

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int LINE = 128;            // bytes of a row, in a stage; eight rows are one pattern of the copy engine's swizzle
constexpr int INNER = LINE / BYTES;  // of K

struct alignas(64) Map { u64 words[16]; };  // CUtensorMap

__device__ __forceinline__ u32 packed(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
__device__ __forceinline__ float low(u32 both) { return __uint_as_float(both << 16); }
__device__ __forceinline__ float high(u32 both) { return __uint_as_float(both & 0xFFFF0000u); }

// silu(gate) · up of two numbers, rounded where eager torch rounds.
__device__ __forceinline__ u32 activated(u32 gate, u32 up) {
    auto silu = [](float x) { return __fdividef(x, 1.f + __expf(-x)); };
    const u32 active = packed(silu(low(gate)), silu(high(gate)));
    return packed(low(active) * low(up), high(active) * high(up));
}

// What a row is to be multiplied by, for its norm: rsqrt(its squares / inner + eps). They come in parts.
__device__ __forceinline__ float scale_of(const float* squares, int parts, int inner, float eps) {
    constexpr int AT_ONCE = 8;  // loads: one after the other they would take as long as the product
    float total = 0.f;
#pragma unroll 1
    for (int first = 0; first < parts; first += AT_ONCE) {
        float some[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) some[i] = first + i < parts ? squares[first + i] : 0.f;
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) total += some[i];
    }
    return rsqrtf(total / inner + eps);
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n.reg .pred there;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 there, [%0], %1;\n@!there bra again;\n}"
        ::"r"(barrier), "r"(parity) : "memory");
}
__device__ __forceinline__ void bring_x(u32 to, const Map& x, int inner, int row, u32 barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(to), "l"(&x), "r"(inner), "r"(row), "r"(barrier) : "memory");
}
__device__ __forceinline__ void wait_for_launch_in_front() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// The barriers of a ring: `full` of each stage for what comes, `empty` for so many that are through with it.
__device__ __forceinline__ void begin_ring(u32 full, u32 empty, int stages, int readers) {
    for (int stage = 0; stage < stages; stage++) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(full + 8 * stage));
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(empty + 8 * stage), "r"(readers));
    }
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async;" ::: "memory");
}

// Rows of a stage, as tensor cores want to be told of them: swizzled lines, eight of them 1,024 bytes apart.
__device__ __forceinline__ u64 operand(u32 at) { return (u64)(at >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
