// Elements of the KV pool as tensor cores take them: exact, as pairs of half or, from a bf16 pool, of __nv_bfloat16.
//
// The macro KV_FORMAT is 0 fp16, 1 bf16, 2 int8 (a scale per token lies behind the plane's elements and is not applied
// here), 3 fp8 e4m3, 4 fp8 e5m2. SOFTWARE_FP8 = 1 forces the decoding that devices before SM89 use.
#pragma once

#include "common.cuh"

#ifndef SOFTWARE_FP8
#define SOFTWARE_FP8 0
#endif

constexpr int KV_ELEMENT_BYTES = KV_FORMAT <= 1 ? 2 : 1;
constexpr bool KV_SCALED = KV_FORMAT == 2;

#if KV_FORMAT == 1
using KVValue = __nv_bfloat16;
#else
using KVValue = __half;
#endif

// Bytes of K or V of one head in one block and layer.
__device__ __forceinline__ int plane_bytes(int block_size, int head_dim) {
    return block_size * (head_dim * KV_ELEMENT_BYTES + (KV_SCALED ? 2 : 0));
}

// Two fp32 numbers as a pair of KVValue, the first in the lower half.
__device__ __forceinline__ uint32 pack_pair(float low, float high) {
#if KV_FORMAT == 1
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    const __half2 pair = __floats2half2_rn(low, high);
#endif
    return reinterpret_cast<const uint32 &>(pair);
}

// Words that each hold two elements, from words as they are stored: one from one, or two in the 1-byte formats.
constexpr int PAIRS_PER_WORD = 2 / KV_ELEMENT_BYTES;

#if KV_FORMAT == 2
// 0x6400 | u is the half 1024 + u.
__device__ __forceinline__ void to_pairs(uint32 word, uint32 (&pairs)[PAIRS_PER_WORD]) {
    const uint32 raised = word ^ 0x80808080u;  // code + 128
    const __half2 offset = __half2half2(__ushort_as_half(0x6480));  // 1024 + 128
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32 magic = __byte_perm(raised, 0x64646464u, i == 0 ? 0x4140 : 0x4342);
        const __half2 pair = __hsub2(reinterpret_cast<const __half2 &>(magic), offset);
        pairs[i] = reinterpret_cast<const uint32 &>(pair);
    }
}
#elif KV_FORMAT == 3 && __CUDA_ARCH__ >= 890 && !SOFTWARE_FP8
__device__ __forceinline__ void to_pairs(uint32 word, uint32 (&pairs)[PAIRS_PER_WORD]) {
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(pairs[0]), "=r"(pairs[1])
        : "r"(word));
}
#elif KV_FORMAT == 3
// The seven bits below the sign, moved to where half keeps exponent and mantissa, are the number / 256, subnormals too.
// 480 would be exponent 15, mantissa 7: the format's NaN.
__device__ __forceinline__ void to_pairs(uint32 word, uint32 (&pairs)[PAIRS_PER_WORD]) {
    const __half2 bias = __half2half2(__ushort_as_half(0x5c00));  // 256
    const __half2 nan = __half2half2(__ushort_as_half(0x5f80));   // 480
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32 high = __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);  // each code in the upper byte of a half
        const uint32 small = (high & 0x80008000u) | ((high >> 1) & 0x3f803f80u);
        const __half2 pair = __hmul2(reinterpret_cast<const __half2 &>(small), bias);
        pairs[i] = reinterpret_cast<const uint32 &>(pair) | __hge2_mask(__habs2(pair), nan);
    }
}
#elif KV_FORMAT == 4
// e5m2 is the upper byte of a half, infinities and NaN included.
__device__ __forceinline__ void to_pairs(uint32 word, uint32 (&pairs)[PAIRS_PER_WORD]) {
    pairs[0] = __byte_perm(word, 0, 0x1404);
    pairs[1] = __byte_perm(word, 0, 0x3424);
}
#else
__device__ __forceinline__ void to_pairs(uint32 word, uint32 (&pairs)[PAIRS_PER_WORD]) { pairs[0] = word; }
#endif

// The other way round, two rows become columns: of words `a` and `b` of two rows, element by element (a, b) pairs.
__device__ __forceinline__ void to_pairs_across(uint32 a, uint32 b, uint32 (&pairs)[2 * PAIRS_PER_WORD]) {
    if constexpr (KV_ELEMENT_BYTES == 2) {
        pairs[0] = __byte_perm(a, b, 0x5410);
        pairs[1] = __byte_perm(a, b, 0x7632);
    } else {
        uint32 lower[PAIRS_PER_WORD], upper[PAIRS_PER_WORD];
        to_pairs(__byte_perm(a, b, 0x5140), lower);
        to_pairs(__byte_perm(a, b, 0x7362), upper);
#pragma unroll
        for (int i = 0; i < PAIRS_PER_WORD; i++) {
            pairs[i] = lower[i];
            pairs[PAIRS_PER_WORD + i] = upper[i];
        }
    }
}
