// How K and V are stored: 8 neighbouring elements of one token's head, fp32, into a plane of the pool.
//
// The macro KV_FORMAT (FORMAT_NUMBERS of pages.py) decides. A plane is [block_size][HEAD_DIM] elements, and in int8
// behind them [block_size] fp16 scales. Values beyond a format's range are stored as its largest, NaN stays NaN.
#pragma once

#include "common.cuh"

#ifndef SOFTWARE_FP8
#define SOFTWARE_FP8 0  // 1: convert as devices before SM89 do
#endif

constexpr int KV_FP16 = 0, KV_BF16 = 1, KV_INT8 = 2, KV_E4M3 = 3, KV_E5M2 = 4;
constexpr int ELEMENT_BYTES = KV_FORMAT <= KV_BF16 ? 2 : 1;

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
#if __CUDA_ARCH__ >= 890 && !SOFTWARE_FP8
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

// The scale of a head: its largest magnitude / 127, in fp16; NaN wins. The LANES neighbouring threads of the head call.
template <int LANES> __device__ __forceinline__ __half int8_scale(const float (&values)[8]) {
    uint32 largest = 0;  // as bits, magnitudes are ordered like integers, and NaN is above infinity
#pragma unroll
    for (int i = 0; i < 8; i++) largest = max(largest, __float_as_uint(clamp(values[i], 65504.f)) & 0x7fffffffu);
    const uint32 group = 0xffffffffu >> (WARP - LANES) << (threadIdx.x % WARP / LANES * LANES);
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
        largest = max(largest, __shfl_xor_sync(group, largest, offset));
    const float scale = __uint_as_float(largest) / 127.f;
    return __float2half_rn(scale < 0x1p-24f ? 0x1p-24f : scale);
}

__device__ __forceinline__ uint32 encode_int8(float x, float scale) {
    const float code = clamp(rintf(clamp(x, 65504.f) / scale), 127.f);
    return static_cast<uint32>(__float2int_rn(code)) & 0xff;
}

__device__ __forceinline__ void write_elements(uint8 *to, const float (&values)[8], float scale) {
    if constexpr (KV_FORMAT == KV_FP16) {
        float clamped[8];
#pragma unroll
        for (int i = 0; i < 8; i++) clamped[i] = clamp(values[i], 65504.f);
        store8(reinterpret_cast<__half *>(to), clamped);
    } else if constexpr (KV_FORMAT == KV_BF16) {
        store8(reinterpret_cast<__nv_bfloat16 *>(to), values);
    } else {
        uint2 codes = {};
        uint32 *words = reinterpret_cast<uint32 *>(&codes);
#pragma unroll
        for (int i = 0; i < 8; i += 2) {
            uint32 pair;
            if constexpr (KV_FORMAT == KV_INT8) {
                pair = encode_int8(values[i], scale) | encode_int8(values[i + 1], scale) << 8;
            } else {
                pair = encode_fp8<KV_FORMAT>(values[i], values[i + 1]);
            }
            words[i / 4] |= pair << (i % 4 * 8);
        }
        *reinterpret_cast<uint2 *>(to) = codes;
    }
}

// Write a head's elements column..column+7 to the token's slot in a plane. The LANES neighbouring threads that hold the
// head call this together; a thread whose column is not in the head brings zeros.
template <int LANES> __device__ __forceinline__ void
write_head(uint8 *plane, int slot, int block_size, int column, const float (&values)[8]) {
    __half scale = {};
    if constexpr (KV_FORMAT == KV_INT8) scale = int8_scale<LANES>(values);
    if (column >= HEAD_DIM) return;
    write_elements(plane + (slot * HEAD_DIM + column) * ELEMENT_BYTES, values, __half2float(scale));
    if (KV_FORMAT == KV_INT8 && column == 0) reinterpret_cast<__half *>(plane + block_size * HEAD_DIM)[slot] = scale;
}
