// For `paged_decode`: what a bias that K as stored lacks adds to the products of q and K.
//
// A rotary pair of q and of the bias b, two neighbouring elements, is a complex number. With w = b exp(i first angle),
// the bias at position `first`, a token at first + r adds the sum over all pairs of Re(q conj(w) exp(-i r angle)): a
// product of the spin q conj(w) with the turn (cos r angle, sin r angle). Turns are the same for all items. They lie in
// shared memory for a few steps of a warp, after which it turns w onward, in fp32, and finds its spins anew.
//
// This is done while a step's K and V are on their way. So nothing is loaded into registers from global memory: a warp
// that waits for one such load waits for all of them.
//
// Spins and turns are rounded once to half, 2^-12 of an element at most, as an fp16 pool rounds K with its bias.
//
// Of chunk 4i + t of a head's 8-element chunks, lane 4g + t has the pairs of steps 2i and 2i + 1 of the product.
#pragma once

#include "key_bias.cuh"

struct TurnedBias {
    KeyBias bias;
    const uint4 *turns;  // [tiles, PRODUCT_STEPS, WARP]: (cos, sin) times TURN_SCALE of rows 0.. as A of the product
    int tiles, steps;    // steps of a warp that spins serve
};

// Of a warp's step.
using Turns = uint4[TILES][PRODUCT_STEPS][WARP];

// A warp's spins as B of the product, of q times `scales`, a power of two for each head.
struct Spins {
    uint2 fragments[HEAD_TILES][PRODUCT_STEPS][WARP];
    float scales[8 * HEAD_TILES];
};

// The bias at the first token of a warp's step; and what no element exceeds, wherever it is turned to.
struct RotatedKeyBias {
    float4 pairs[D / 4];
    float largest;
};

// x * turn, pair by pair.
__device__ __forceinline__ float4 turn_on(const float4 &x, const float4 &turn) {
    return make_float4(fmaf(x.x, turn.x, -x.y * turn.y), fmaf(x.x, turn.y, x.y * turn.x),
                       fmaf(x.z, turn.z, -x.w * turn.w), fmaf(x.z, turn.w, x.w * turn.z));
}

// x * conj(turn), pair by pair.
__device__ __forceinline__ float4 turn_back(const float4 &x, const float4 &turn) {
    return make_float4(fmaf(x.x, turn.x, x.y * turn.y), fmaf(x.y, turn.x, -x.x * turn.y),
                       fmaf(x.z, turn.z, x.w * turn.w), fmaf(x.w, turn.z, -x.z * turn.w));
}

__device__ __forceinline__ float4 times(float factor, const float4 &x) {
    return make_float4(factor * x.x, factor * x.y, factor * x.z, factor * x.w);
}

__device__ __forceinline__ float4 to_float4(uint32 first, uint32 second) {
    const float2 x = to_float2(reinterpret_cast<const Activation2 &>(first));
    const float2 y = to_float2(reinterpret_cast<const Activation2 &>(second));
    return make_float4(x.x, x.y, y.x, y.y);
}

__device__ __forceinline__ uint32 round_to_half(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32 &>(pair);
}

// The thread, read anew at every call: what follows from it is computed again where it is used, rather than kept in
// registers.
__device__ __forceinline__ uint32 thread_now() {
    uint32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Begins to copy the turns of a warp's steps [first, end), by all threads of a block. Reads only what no kernel writes.
__device__ __forceinline__ void copy_turns(Turns *turns, const TurnedBias &bias, int first, int end) {
    constexpr int UNITS = PRODUCT_STEPS * WARP;  // of a tile
    for (int unit = first * TILES * UNITS + threadIdx.x; unit < end * TILES * UNITS; unit += THREADS) {
        const int step = unit / (TILES * UNITS), tile = step * (STRIDE / TILE) + unit / UNITS % TILES;
        const int there = min(tile, bias.tiles - 1);  // past the last there are no tokens
        copy_async(turns[0][0][0] + unit, bias.turns + there * UNITS + unit % UNITS);
    }
}

// By all threads of a block: the turn from a warp's steps to those `steps` further on, times the table's factor.
__device__ __forceinline__ void copy_onward(float4 (&onward)[D / 4], const TurnedBias &bias) {
    static_assert(THREADS >= D / 4);
    if (threadIdx.x < D / 4) copy_async(onward + threadIdx.x, bias.bias.turns_at(bias.steps * STRIDE, 2 * threadIdx.x));
}

// Pairs are spread over the lanes, which are together afterwards, here and below. Reads only what no kernel writes.
__device__ __forceinline__ void rotate_bias(RotatedKeyBias &rotated, const KeyBias &bias, int kv_head, int token) {
    float largest = 0.f;
#pragma unroll
    for (int unit = threadIdx.x % WARP; unit < D / 4; unit += WARP) {
        const float4 x = turn_on(__ldg(bias.pairs_at(kv_head, 2 * unit)), __ldg(bias.turns_at(token, 2 * unit)));
        rotated.pairs[unit] = x;
        largest = fmaxf(largest, fmaxf(fabsf(x.x) + fabsf(x.y), fabsf(x.z) + fabsf(x.w)));
    }
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));  // as numbers from 0 on compare
    if (threadIdx.x % WARP == 0) rotated.largest = __uint_as_float(bits);
    __syncwarp();
}

__device__ __forceinline__ float4 without_factor(const float4 &turn) {
    const float x = rsqrtf(turn.x * turn.x + turn.y * turn.y), y = rsqrtf(turn.z * turn.z + turn.w * turn.w);
    return make_float4(x * turn.x, x * turn.y, y * turn.z, y * turn.w);
}

__device__ __forceinline__ void turn_onward(RotatedKeyBias &rotated, const float4 (&onward)[D / 4]) {
#pragma unroll
    for (int unit = threadIdx.x % WARP; unit < D / 4; unit += WARP)
        rotated.pairs[unit] = turn_on(rotated.pairs[unit], without_factor(onward[unit]));
    __syncwarp();
}

// So many bits may q have that no spin overflows, turns being TURN_SCALE times as large: twice their product becomes
// less than 2^15. That is a bound, but half has bits to spare.
__device__ __forceinline__ int find_query_bits(const RotatedKeyBias &rotated) {
    return min(15, 22 - exponent_above(rotated.largest));
}

// The spins of an item's scaled heads in the step whose bias is `rotated`.
__device__ __forceinline__ void find_spins(Spins &spins, const RotatedKeyBias &rotated, const SharedQuery &query) {
    const int lane = thread_now() % WARP, t = lane % 4;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        const uint4 *row = reinterpret_cast<const uint4 *>(query[8 * n + lane / 4]);
        const float scale = spins.scales[8 * n + lane / 4] / TURN_SCALE;
#pragma unroll
        for (int i = 0; i < PRODUCT_STEPS / 2; i++) {
            const uint4 words = row[4 * i + t];
#pragma unroll
            for (int j = 0; j < 2; j++) {
                const float4 q = times(scale, j == 0 ? to_float4(words.x, words.y) : to_float4(words.z, words.w));
                const float4 spin = turn_back(q, rotated.pairs[(4 * i + t) * 2 + j]);
                spins.fragments[n][2 * i + j][lane] = {round_to_half(spin.x, spin.y), round_to_half(spin.z, spin.w)};
            }
        }
    }
    __syncwarp();
}

// Adds to the products of a step what the bias makes of them.
__device__ __forceinline__ void multiply_spins(float (&products)[TILES][HEAD_TILES][4], const Spins &spins,
                                               const Turns &turns) {
    const int lane = thread_now() % WARP;
#pragma unroll
    for (int step = 0; step < PRODUCT_STEPS; step++) {
        uint32 b[HEAD_TILES][2];
#pragma unroll
        for (int n = 0; n < HEAD_TILES; n++)
            reinterpret_cast<uint2 &>(b[n]) = spins.fragments[n][step][lane];
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const uint4 turn = turns[i][step][lane];
            const uint32 a[4] = {turn.x, turn.y, turn.z, turn.w};
#pragma unroll
            for (int n = 0; n < HEAD_TILES; n++) mma_m16n8k16<__half>(products[i][n], a, b[n]);
        }
    }
}
