// For `paged_decode`: what a bias that K as stored lacks adds to the scores.
//
// A rotary pair of q and of the bias b, two neighbouring elements, is a complex number; with z = conj(b) q and the
// pair's angle per token, a token at position p adds the sum over all pairs of Re(z exp(-i p angle)). With
// p = first + r, r inside a warp's step, this is a product of z exp(-i first angle), which the warp turns on from step
// to step in fp32, with (cos r angle, sin r angle), which are the same for all items and lie in shared memory. Both are
// split into two halves, high + low, so the sum is about as exact as fp32 makes it.
//
// Of chunk 4i + t of a head's 8-element chunks, lane 4g + t has the pairs of steps 2i and 2i + 1 of the product.
#pragma once

#include "key_bias.cuh"

// `fragments`: A of the product, high and low. `step`: the turn from a warp's step to its next.
struct Turns {
    uint4 fragments[TILES][2][PRODUCT_STEPS][WARP];
    float4 step[PRODUCT_STEPS][4];
};

// A lane's z, two pairs per step of the product, and per head column what turns a product into a score.
using Spins = float4[HEAD_TILES][PRODUCT_STEPS][WARP];
using SpinFactors = float[HEAD_TILES][2];

// x * conj(turn), pair by pair.
__device__ __forceinline__ float4 turn_back(const float4 &x, const float4 &turn) {
    return make_float4(fmaf(x.x, turn.x, x.y * turn.y), fmaf(x.y, turn.x, -x.x * turn.y),
                       fmaf(x.z, turn.z, x.w * turn.w), fmaf(x.w, turn.z, -x.z * turn.w));
}

__device__ __forceinline__ uint32 round_to_half(float x, float y) {
    const __half2 pair = __floats2half2_rn(x, y);
    return reinterpret_cast<const uint32 &>(pair);
}

// x = high + low, as halves.
__device__ __forceinline__ void split(float x, float y, uint32 &high, uint32 &low) {
    high = round_to_half(x, y);
    const float2 rounded = __half22float2(reinterpret_cast<const __half2 &>(high));
    low = round_to_half(x - rounded.x, y - rounded.y);
}

// The first of two neighbouring pairs.
__device__ __forceinline__ int pair_of(int step, int t) { return (step / 2 * 4 + t) * 4 + step % 2 * 2; }

// The turns of two neighbouring pairs over so many tokens.
__device__ __forceinline__ float4 find_unit_turn(const KeyBias &bias, int distance, int pair) {
    const float inverse = 1.f / __ldg(bias.rotary);  // the cosine of 0 times the factor
    const float4 turn = bias.turns(distance, pair);
    return make_float4(turn.x * inverse, turn.y * inverse, turn.z * inverse, turn.w * inverse);
}

// By all threads of a block. Reads only what no kernel writes.
__device__ __forceinline__ void fill(Turns &turns, const KeyBias &bias) {
    for (int unit = threadIdx.x; unit < TILES * PRODUCT_STEPS * WARP; unit += THREADS) {
        const int lane = unit % WARP, step = unit / WARP % PRODUCT_STEPS, tile = unit / (WARP * PRODUCT_STEPS);
        const int row = tile * TILE + lane / 4 * 2, pair = pair_of(step, lane % 4);
        const float4 even = find_unit_turn(bias, row, pair), odd = find_unit_turn(bias, row + 1, pair);
        uint4 high, low;
        split(even.x, even.y, high.x, low.x);
        split(odd.x, odd.y, high.y, low.y);
        split(even.z, even.w, high.z, low.z);
        split(odd.z, odd.w, high.w, low.w);
        turns.fragments[tile][0][step][lane] = high;
        turns.fragments[tile][1][step][lane] = low;
    }
    for (int unit = threadIdx.x; unit < PRODUCT_STEPS * 4; unit += THREADS)
        turns.step[unit / 4][unit % 4] = find_unit_turn(bias, STRIDE, pair_of(unit / 4, unit % 4));
}

// z of the head's two neighbouring pairs, at the warp's first token.
__device__ __forceinline__ float4 find_spin(const uint2 &q, const float4 &bias, const float4 &turn) {
    const float2 first = to_float2(reinterpret_cast<const Activation2 &>(q.x));
    const float2 second = to_float2(reinterpret_cast<const Activation2 &>(q.y));
    return turn_back(turn_back(make_float4(first.x, first.y, second.x, second.y), bias), turn);
}

// The lane's z of a head, scaled by a power of two to just below the largest half; returns what undoes that.
__device__ __forceinline__ float fit_spins(float4 (&spins)[PRODUCT_STEPS]) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < PRODUCT_STEPS; i++)
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(spins[i].x), fabsf(spins[i].y)),
                                       fmaxf(fabsf(spins[i].z), fabsf(spins[i].w))));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int exponent = min(max(__float_as_int(largest) >> 23, 30), 254);  // biased
    const float up = __int_as_float((268 - exponent) << 23);  // to below 2^15, and below 2^15.5 however it is turned
#pragma unroll
    for (int i = 0; i < PRODUCT_STEPS; i++)
        spins[i] = make_float4(up * spins[i].x, up * spins[i].y, up * spins[i].z, up * spins[i].w);
    return 1.f / up;
}

// What a warp begins an item with. A head beyond the item's is zero.
__device__ __forceinline__ void begin_spins(Spins &spins, SpinFactors &factors, const KeyBias &bias,
                                            const Activation *first_query, int heads, int kv_head, int token) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        const int head = 8 * n + g;
        float4 own[PRODUCT_STEPS];
#pragma unroll
        for (int i = 0; i < PRODUCT_STEPS; i++) {
            const int pair = pair_of(i, t);
            uint2 q = {0, 0};
            if (head < heads) q = __ldcg(reinterpret_cast<const uint2 *>(first_query + head * D + 2 * pair));
            own[i] = find_spin(q, bias.pairs(kv_head, pair), bias.turns(token, pair));
        }
        const float factor = fit_spins(own);
#pragma unroll
        for (int i = 0; i < PRODUCT_STEPS; i++) spins[n][i][lane] = own[i];
#pragma unroll
        for (int column = 0; column < 2; column++)  // lane 4g has head g's; this lane's columns are 2t and 2t + 1
            factors[n][column] = __shfl_sync(0xffffffffu, factor, 4 * (2 * t + column));
    }
}

// What the bias adds to the scores of a step, before `factors`; z moves on to the warp's next step.
__device__ __forceinline__ void multiply_spins(float (&products)[TILES][HEAD_TILES][4], Spins &spins,
                                               const Turns &turns) {
    const int lane = threadIdx.x % WARP, t = lane % 4;
#pragma unroll
    for (int step = 0; step < PRODUCT_STEPS; step++) {
        uint32 high[HEAD_TILES][2], low[HEAD_TILES][2];
#pragma unroll
        for (int n = 0; n < HEAD_TILES; n++) {
            const float4 spin = spins[n][step][lane];
            split(spin.x, spin.y, high[n][0], low[n][0]);
            split(spin.z, spin.w, high[n][1], low[n][1]);
            spins[n][step][lane] = turn_back(spin, turns.step[step][t]);
        }
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const uint4 a = turns.fragments[i][0][step][lane], b = turns.fragments[i][1][step][lane];
            const uint32 a_high[4] = {a.x, a.y, a.z, a.w}, a_low[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
            for (int n = 0; n < HEAD_TILES; n++) {
                mma_m16n8k16<__half>(products[i][n], a_high, high[n]);
                mma_m16n8k16<__half>(products[i][n], a_high, low[n]);
                mma_m16n8k16<__half>(products[i][n], a_low, high[n]);
            }
        }
    }
}
