// How K and V are stored: 8 neighbouring elements of one token's head, fp32, into a plane of the pool.
//
// The macro KV_FORMAT (FORMAT_NUMBERS of pages.py) decides. A plane is [block_size][HEAD_DIM] elements, and in int8
// behind them [block_size] fp16 scales. Values beyond a format's range are stored as its largest, NaN stays NaN.
#pragma once

#include "common.cuh"

constexpr int KV_FP16 = 0, KV_BF16 = 1, KV_INT8 = 2, KV_E4M3 = 3, KV_E5M2 = 4;

__device__ __forceinline__ float clamp(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

// fp8 of |x| <= the format's largest value, rounded to the nearest, ties to even.
template <int MANTISSA, int BIAS> __device__ __forceinline__ uint32 encode_fp8_in_software(float x) {
    constexpr int DROPPED = 23 - MANTISSA;
    constexpr uint32 SMALLEST_NORMAL = (128 - BIAS) << 23;
    const uint32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    if (x != x) return 0x7f;
    if (magnitude < SMALLEST_NORMAL) {  // adding this power of two rounds to multiples of the smallest subnormal
        const float shift = __uint_as_float((128 - BIAS + DROPPED) << 23);
        return sign | (__float_as_uint(__uint_as_float(magnitude) + shift) - __float_as_uint(shift));
    }
    const uint32 rounded = magnitude + ((1 << (DROPPED - 1)) - 1) + (magnitude >> DROPPED & 1);
    return sign | ((rounded >> DROPPED) - ((127 - BIAS) << MANTISSA));
}

// Two fp8 codes, `low` in the low byte.
template <int FORMAT> __device__ __forceinline__ uint32 encode_fp8(float low, float high) {
    constexpr float LARGEST = FORMAT == KV_E4M3 ? 448.f : 57344.f;
    low = clamp(low, LARGEST);
    high = clamp(high, LARGEST);
#if __CUDA_ARCH__ >= 890 && !defined(FP8_IN_SOFTWARE)
    uint16 codes;
    if (FORMAT == KV_E4M3) {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    }
    return codes;
#else
    constexpr int MANTISSA = FORMAT == KV_E4M3 ? 3 : 2, BIAS = FORMAT == KV_E4M3 ? 7 : 15;
    return encode_fp8_in_software<MANTISSA, BIAS>(low) | encode_fp8_in_software<MANTISSA, BIAS>(high) << 8;
#endif
}

// The scale of a head: its largest magnitude / 127, in fp16. All LANES threads of the head's group must call; NaN wins.
template <int LANES> __device__ __forceinline__ __half int8_scale(const float (&values)[8]) {
    uint32 largest = 0;  // as bits, magnitudes are ordered like integers, and NaN is above infinity
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(clamp(values[i], 65504.f)) & 0x7fffffffu);
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, offset));
    const float scale = __uint_as_float(largest) / 127.f;
    return __float2half_rn(scale < 0x1p-24f ? 0x1p-24f : scale);
}

__device__ __forceinline__ uint32 encode_int8(float x, float scale) {
    const float code = clamp(rintf(clamp(x, 65504.f) / scale), 127.f);
    return static_cast<uint32>(__float2int_rn(code)) & 0xff;
}

// Elements column..column+7 of the token at `slot` of the block. `scale` is int8's, and unused in other formats.
__device__ __forceinline__ void write_elements(uint8 *plane, int slot, int column, const float (&values)[8], __half scale) {
    const int element = slot * HEAD_DIM + column;
    if constexpr (KV_FORMAT == KV_FP16) {
        float clamped[8];
#pragma unroll
        for (int i = 0; i < 8; i++) clamped[i] = clamp(values[i], 65504.f);
        store8(reinterpret_cast<__half *>(plane) + element, clamped);
    } else if constexpr (KV_FORMAT == KV_BF16) {
        store8(reinterpret_cast<__nv_bfloat16 *>(plane) + element, values);
    } else {
        uint2 codes = {};
        uint32 *words = reinterpret_cast<uint32 *>(&codes);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            const uint32 pair = KV_FORMAT == KV_INT8
                ? encode_int8(values[i], __half2float(scale)) | encode_int8(values[i + 1], __half2float(scale)) << 8
                : encode_fp8<KV_FORMAT>(values[i], values[i + 1]);
            words[i / 4] |= pair << (i % 4 * 8);
        }
        *reinterpret_cast<uint2 *>(plane + element) = codes;
    }
}

__device__ __forceinline__ void write_scale(uint8 *plane, int slot, int block_size, __half scale) {
    reinterpret_cast<__half *>(plane + block_size * HEAD_DIM)[slot] = scale;
}
