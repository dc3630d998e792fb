// Four-bit weights in the packed layout of kernels/w4.py, for everything that multiplies them with tensor cores.
//
// A unit is 16 rows x 64 k: 32 lanes x 16 bytes. Word j of a lane holds its A fragment of mma.m16n8k16 (and of wgmma)
// for k-step j: pairs of neighbouring k, the first k of a pair in the low half. Nibbles 0 and 4 are register a0,
// 1 and 5 a1, 2 and 6 a2, 3 and 7 a3. A scale entry is half2 (s, z), the weight is (q - 8) * s + z.
#pragma once

#include "common.cuh"

constexpr int UNIT_ROWS = 16;
constexpr int UNIT_K = 64;
constexpr int UNIT_WORDS = UNIT_K / 16;            // words of a lane: one per k-step of 16
constexpr int UNIT_BYTES = WARP * UNIT_WORDS * 4;  // 512
constexpr int SCALE_BYTES = UNIT_ROWS * 4;         // (s, z) of 16 rows in one group: [8][2], row g beside row g + 8

// (s, z) of a lane's two rows, g and g + 8: the 8 bytes at index g of a group's scale entries.
struct RowScales {
    float2 upper, lower;
};

__device__ __forceinline__ RowScales unpack_scales(uint2 bits) {
    return {__half22float2(*reinterpret_cast<const __half2 *>(&bits.x)),
            __half22float2(*reinterpret_cast<const __half2 *>(&bits.y))};
}

// (bits & mask) | magic in one instruction.
template <uint32 mask, uint32 magic> __device__ __forceinline__ uint32 and_or(uint32 bits) {
    uint32 result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(bits), "n"(mask), "n"(magic));
    return result;
}

// The four registers of an A fragment as exact pairs q - 8 in the activation type.
//
// A code put into the mantissa of a power of two is that power plus the code. fp16 has room for codes in bits 0-3
// (1024 + q) and 4-7 (1024 + 16 q); bf16, with seven mantissa bits, only in bits 0-3 (128 + q).
__device__ __forceinline__ void codes_to_fragment(uint32 word, uint32 (&a)[4]) {
#if ACTIVATION_BF16
    const __nv_bfloat162 offset = __floats2bfloat162_rn(136.f, 136.f);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32 bits = and_or<0x000f000fu, 0x43004300u>(word >> (4 * i));
        const __nv_bfloat162 pair = __hsub2(*reinterpret_cast<const __nv_bfloat162 *>(&bits), offset);
        a[i] = *reinterpret_cast<const uint32 *>(&pair);
    }
#else
    const __half2 offset = __floats2half2_rn(1032.f, 1032.f);
    const __half2 sixteenth = __floats2half2_rn(0.0625f, 0.0625f), raised_offset = __floats2half2_rn(-72.f, -72.f);
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint32 low = and_or<0x000f000fu, 0x64006400u>(word >> (4 * i));
        const uint32 high = and_or<0x00f000f0u, 0x64006400u>(word >> (4 * i));
        const __half2 first = __hsub2(*reinterpret_cast<const __half2 *>(&low), offset);
        const __half2 second = __hfma2(*reinterpret_cast<const __half2 *>(&high), sixteenth, raised_offset);
        a[i] = *reinterpret_cast<const uint32 *>(&first);
        a[i + 1] = *reinterpret_cast<const uint32 *>(&second);
    }
#endif
}

// The same four registers without arithmetic, for products whose fp32 sums are scaled afterwards: a pair holds
// CODE_SCALE(i) * q + CODE_OFFSET exactly. In fp16 the codes as they stand are subnormal: tensor cores take those.
__device__ __forceinline__ void codes_to_raw_fragment(uint32 word, uint32 (&a)[4]) {
#if ACTIVATION_BF16
#pragma unroll
    for (int i = 0; i < 4; i++) a[i] = and_or<0x000f000fu, 0x43004300u>(word >> (4 * i));
#else
    a[0] = word & 0x000f000fu;
    a[1] = word & 0x00f000f0u;
    a[2] = (word >> 8) & 0x000f000fu;
    a[3] = (word >> 8) & 0x00f000f0u;
#endif
}

// (s, z) become (factor, summand): a sum over a group is factor * (raw codes * x) + summand * (x alone).
__device__ __forceinline__ RowScales scales_of_raw(RowScales scales) {
#if ACTIVATION_BF16
    const float upper = 1.f, lower = 1.f, offset = 8.f + 128.f;
#else
    const float upper = 16777216.f, lower = 1048576.f, offset = 8.f;  // 2^24 and, as four bits higher, 2^20
#endif
    return {{scales.upper.x * upper, fmaf(-offset, scales.upper.x, scales.upper.y)},
            {scales.lower.x * lower, fmaf(-offset, scales.lower.x, scales.lower.y)}};
}
