// What all kernels share: the activation type, conversions, warp reductions, and the hand-over between kernels.
//
// Activations are half or __nv_bfloat16: the macro ACTIVATION_BF16 (0 or 1) decides.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef ACTIVATION_BF16
#define ACTIVATION_BF16 0
#endif

#if ACTIVATION_BF16
using Activation = __nv_bfloat16;
using Activation2 = __nv_bfloat162;
#else
using Activation = __half;
using Activation2 = __half2;
#endif

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

constexpr int WARP = 32;

__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float2 to_float2(__half2 x) { return __half22float2(x); }
__device__ __forceinline__ float2 to_float2(__nv_bfloat162 x) { return __bfloat1622float2(x); }

template <typename To> __device__ __forceinline__ To from_float(float x);
// fp16 saturates at its largest finite value: a finite number never becomes an infinity on the way.
template <> __device__ __forceinline__ __half from_float<__half>(float x) {
    constexpr float LARGEST = 65504.f, LARGEST_FLOAT = 3.4028234e38f;
    return __float2half_rn(x > LARGEST    ? (x > LARGEST_FLOAT ? x : LARGEST)
                           : x < -LARGEST ? (x < -LARGEST_FLOAT ? x : -LARGEST)
                                          : x);
}
template <> __device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
    return __float2bfloat16_rn(x);
}

// 8 neighbouring activations, 16 bytes, to and from fp32.
__device__ __forceinline__ void unpack8(const uint4 &bits, float (&values)[8]) {
    const Activation2 *pairs = reinterpret_cast<const Activation2 *>(&bits);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 pair = to_float2(pairs[i]);
        values[2 * i] = pair.x;
        values[2 * i + 1] = pair.y;
    }
}

__device__ __forceinline__ void load8(const Activation *from, float (&values)[8]) {
    unpack8(*reinterpret_cast<const uint4 *>(from), values);
}

template <typename To> __device__ __forceinline__ void store8(To *to, const float (&values)[8]) {
    uint4 bits;
#pragma unroll
    for (int i = 0; i < 8; i++) reinterpret_cast<To *>(&bits)[i] = from_float<To>(values[i]);
    *reinterpret_cast<uint4 *>(to) = bits;
}

__device__ __forceinline__ void load8(const float *from, float (&values)[8]) {
    reinterpret_cast<float4 *>(values)[0] = reinterpret_cast<const float4 *>(from)[0];
    reinterpret_cast<float4 *>(values)[1] = reinterpret_cast<const float4 *>(from)[1];
}

__device__ __forceinline__ void store8(float *to, const float (&values)[8]) {
    reinterpret_cast<float4 *>(to)[0] = reinterpret_cast<const float4 *>(values)[0];
    reinterpret_cast<float4 *>(to)[1] = reinterpret_cast<const float4 *>(values)[1];
}

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Programmatic dependent launch. Before this call a kernel may only read what no kernel writes (weights, tables).
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may occupy what this one leaves free; it still waits for this one's end before it reads results.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
