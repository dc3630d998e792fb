// What the sampling kernels share: a row's parameters, how candidates compare, and the random numbers.
#pragma once

#include "common.cuh"

constexpr float GREEDY_BELOW = 1e-5f;
// Below this temperature x / temperature is too coarse to draw from, unless the largest logit is subtracted first.
constexpr float COLD = 1.f / 16;
constexpr uint64 GOLDEN_RATIO = 0x9E3779B97F4A7C15;

// One row of `PARAMETERS` in sampling.py.
struct __align__(16) Parameters {
    float temperature;
    int top_k;
    float top_p, log_min_p;
    uint64 seed;
    uint32 output_index, unused;
};

__device__ __forceinline__ bool is_greedy(const Parameters &row) { return row.temperature < GREEDY_BELOW; }
__device__ __forceinline__ bool limits_count(const Parameters &row, int vocab_size) {
    return row.top_k > 0 && row.top_k < vocab_size;
}
__device__ __forceinline__ bool limits_mass(const Parameters &row) { return row.top_p < 1.f; }

// Whether the largest logit must be known before the draw.
__device__ __forceinline__ bool needs_largest(const Parameters &row, int vocab_size) {
    return !is_greedy(row) && (row.temperature < COLD || row.log_min_p > negative_infinity() || limits_mass(row) ||
                               limits_count(row, vocab_size));
}

// A candidate as one number, the greatest being the best: by value, then by the lower token. NaN is above everything.
__device__ __forceinline__ uint64 rank(float value, int token) {
    const uint32 bits = value != value ? 0x7fffffffu : __float_as_uint(value + 0.f);  // -0 becomes 0
    const uint32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return static_cast<uint64>(ordered) << 32 | ~static_cast<uint32>(token);
}
__device__ __forceinline__ int rank_token(uint64 rank) { return static_cast<int>(~static_cast<uint32>(rank)); }
__device__ __forceinline__ float rank_value(uint64 rank) {
    const uint32 ordered = rank >> 32;
    return __uint_as_float(ordered & 0x80000000u ? ordered & 0x7fffffffu : ~ordered);
}

__device__ __forceinline__ uint64 warp_max(uint64 x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2) x = max(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// The greatest x of a block of WARPS warps, in every thread.
template <int WARPS> __device__ __forceinline__ uint64 block_max(uint64 x) {
    __shared__ uint64 of_warp[WARPS];
    x = warp_max(x);
    __syncthreads();  // the call before this one has been read
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_max(of_warp[threadIdx.x % WARPS]);
}

// SplitMix64's finalizer.
__device__ __forceinline__ uint64 mix(uint64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB;
    return x ^ (x >> 31);
}

// The state of one draw's random numbers: a function of the request's seed and the place in its output alone.
__device__ __forceinline__ uint64 stream_of(const Parameters &row) {
    return mix(row.seed * GOLDEN_RATIO + row.output_index);
}

// The token's number in (0, 1] of one draw: fine near 0, where the winners are.
__device__ __forceinline__ float uniform_of(uint64 stream, int token) {
    const uint32 bits = mix(stream + (token + 1ull) * GOLDEN_RATIO) >> 32;
    return __uint2float_rn(bits) * 0x1p-32f + 0x1p-33f;
}

// log-weight + Gumbel noise. The token with the greatest score is a draw from softmax(log_weight).
__device__ __forceinline__ float gumbel_score(float log_weight, float uniform) {
    return log_weight - __logf(-log1pf(-uniform));
}

// Logits token..token+3 of a row, for a token divisible by 4; from vocab_size on there is nothing to draw.
__device__ __forceinline__ void load_logits(const float *row, int token, int vocab_size, float (&x)[4]) {
    float4 loaded = {};
    if (token < vocab_size) loaded = *reinterpret_cast<const float4 *>(row + token);
    x[0] = token < vocab_size ? loaded.x : negative_infinity();
    x[1] = token + 1 < vocab_size ? loaded.y : negative_infinity();
    x[2] = token + 2 < vocab_size ? loaded.z : negative_infinity();
    x[3] = token + 3 < vocab_size ? loaded.w : negative_infinity();
}
