// For `paged_decode`: what a bias that K as stored lacks adds to the scores.
//
// A rotary pair of q and of the bias b, two neighbouring elements, is a complex number. With w = b exp(i first angle),
// the bias at position `first`, a token at first + r adds the sum over all pairs of Re(q conj(w) exp(-i r angle)): a
// product of the spin q conj(w) with the turn (cos r angle, sin r angle). Turns are the same for all items, 16 rows per
// step of a warp; they lie in shared memory for a few of its steps, after which it finds its spins anew. A step's tiles
// have the same turns, and spins of their own.
//
// Both are rounded once to half, 2^-12 of an element at most, as an fp16 pool rounds K with its bias.
//
// Of chunk 4i + t of a head's 8-element chunks, lane 4g + t has the pairs of steps 2i and 2i + 1 of the product.
#pragma once

#include "key_bias.cuh"

struct TurnedBias {
    KeyBias bias;
    const uint4 *turns;  // [tiles, PRODUCT_STEPS, WARP]: (cos, sin) times TURN_SCALE of rows 0.. as A of the product
    int tiles, steps;    // steps of a warp that spins serve
};

using Turns = uint4[PRODUCT_STEPS][WARP];

// B of the product for every tile of a warp's step.
struct alignas(8 * TILES) Spin {
    uint2 tiles[TILES];
};

// A warp's spins, each head's scaled by a power of two; and what undoes that.
struct Spins {
    Spin fragments[HEAD_TILES][PRODUCT_STEPS][WARP];
    float factors[8 * HEAD_TILES];
};

// The bias at the first token of every tile of a warp's step, and the largest of its elements.
struct RotatedKeyBias {
    float4 tiles[TILES][D / 4];
    float largest;
};

// What a lane needs of its head in every head tile: its pairs of two steps at a time.
using QueryPairs = uint4[HEAD_TILES][PRODUCT_STEPS / 2];

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
    constexpr int UNITS = PRODUCT_STEPS * WARP;
    for (int unit = first * UNITS + threadIdx.x; unit < end * UNITS; unit += THREADS) {
        const int tile = min(unit / UNITS * (STRIDE / TILE), bias.tiles - 1);  // past the last there are no tokens
        const uint32 to = static_cast<uint32>(__cvta_generic_to_shared(turns[0][0] + unit));
        const uint4 *from = bias.turns + tile * UNITS + unit % UNITS;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
    }
}

__device__ __forceinline__ void wait_for_turns() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Elements are spread over the lanes. Reads only what no kernel writes.
__device__ __forceinline__ void rotate_bias(RotatedKeyBias &rotated, const KeyBias &bias, int kv_head, int token) {
    float largest = 0.f;
#pragma unroll
    for (int unit = threadIdx.x % WARP; unit < D / 4; unit += WARP) {
        const float4 pairs = bias.pairs(kv_head, 2 * unit);
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            const float4 x = turn_on(pairs, bias.turns(token + i * TILE, 2 * unit));
            rotated.tiles[i][unit] = x;
            largest = fmaxf(largest, fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w))));
        }
    }
    const uint32 bits = __reduce_max_sync(0xffffffffu, __float_as_uint(largest));  // as numbers from 0 on compare
    if (threadIdx.x % WARP == 0) rotated.largest = __uint_as_float(bits);
    __syncwarp();
}

// A head beyond the item's is zero.
__device__ __forceinline__ void load_query_pairs(QueryPairs &pairs, const Activation *first_query, int heads) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        const uint4 *query = reinterpret_cast<const uint4 *>(first_query + (8 * n + g) * D);
#pragma unroll
        for (int i = 0; i < PRODUCT_STEPS / 2; i++) {
            pairs[n][i] = make_uint4(0, 0, 0, 0);
            if (8 * n + g < heads) pairs[n][i] = __ldcg(query + 4 * i + t);
        }
    }
}

__device__ __forceinline__ float4 to_float4(uint32 first, uint32 second) {
    const float2 x = to_float2(reinterpret_cast<const Activation2 &>(first));
    const float2 y = to_float2(reinterpret_cast<const Activation2 &>(second));
    return make_float4(x.x, x.y, y.x, y.y);
}

// The largest element of the lane's head.
__device__ __forceinline__ float find_largest(const uint4 (&pairs)[PRODUCT_STEPS / 2]) {
    const auto magnitude = [](const uint32 &pair) { return __habs2(reinterpret_cast<const Activation2 &>(pair)); };
    Activation2 largest = magnitude(pairs[0].x);
#pragma unroll
    for (int i = 0; i < PRODUCT_STEPS / 2; i++) {
        const uint4 &words = pairs[i];
        largest = __hmax2(largest, __hmax2(__hmax2(magnitude(words.x), magnitude(words.y)),
                                           __hmax2(magnitude(words.z), magnitude(words.w))));
    }
    const float2 both = to_float2(largest);
    float one = fmaxf(both.x, both.y);
    one = fmaxf(one, __shfl_xor_sync(0xffffffffu, one, 1));
    return fmaxf(one, __shfl_xor_sync(0xffffffffu, one, 2));
}

// The biased exponent of the power of two with which no spin of such q and bias overflows: twice their product becomes
// less than 2^15. That is a bound, but half has bits to spare.
__device__ __forceinline__ int find_exponent(float largest_query, float largest_bias) {
    const int exponents = (__float_as_int(largest_query) >> 23) + (__float_as_int(largest_bias) >> 23);
    return min(max(393 - exponents, 30), 200);  // a bias of zero leaves no bound
}

// The spins of q in the step whose bias is `rotated`. The lanes of a warp are together before and afterwards.
__device__ __forceinline__ void find_spins(Spins &spins, const RotatedKeyBias &rotated, const QueryPairs &pairs) {
    const int lane = threadIdx.x % WARP, t = lane % 4;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        const int exponent = find_exponent(find_largest(pairs[n]), rotated.largest);
        const float scale = __int_as_float(exponent << 23);
        if (t == 0) spins.factors[8 * n + lane / 4] = __int_as_float((254 - exponent) << 23) / TURN_SCALE;
#pragma unroll
        for (int step = 0; step < PRODUCT_STEPS; step++) {
            const uint4 &words = pairs[n][step / 2];
            const float4 q = times(scale, step % 2 == 0 ? to_float4(words.x, words.y) : to_float4(words.z, words.w));
            Spin spin;
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const float4 turned = turn_back(q, rotated.tiles[i][(step / 2 * 4 + t) * 2 + step % 2]);
                spin.tiles[i] = {round_to_half(turned.x, turned.y), round_to_half(turned.z, turned.w)};
            }
            spins.fragments[n][step][lane] = spin;
        }
    }
    __syncwarp();
}

// What the bias adds to the scores of a step, before `factors`.
__device__ __forceinline__ void multiply_spins(float (&products)[TILES][HEAD_TILES][4], const Spins &spins,
                                               const Turns &turns) {
    const int lane = thread_now() % WARP;
#pragma unroll
    for (int step = 0; step < PRODUCT_STEPS; step++) {
        const uint4 turn = turns[step][lane];
        const uint32 a[4] = {turn.x, turn.y, turn.z, turn.w};
#pragma unroll
        for (int n = 0; n < HEAD_TILES; n++) {
            const Spin spin = spins.fragments[n][step][lane];
#pragma unroll
            for (int i = 0; i < TILES; i++) {
                const uint32 b[2] = {spin.tiles[i].x, spin.tiles[i].y};
                mma_m16n8k16<__half>(products[i][n], a, b);
            }
        }
    }
}
