// For `paged_decode`: what a bias that K as stored lacks adds to the scores.
//
// A rotary pair of q and of the bias b, two neighbouring elements, is a complex number; with z = conj(b) q and the
// pair's angle per token, a token at position p adds the sum over all pairs of Re(z exp(-i p angle)). With
// p = first + r this is a product of the spin z exp(-i first angle) with the turn (cos r angle, sin r angle). Turns are
// the same for all items, 16 rows per step of a warp; they lie in shared memory for a few of its steps, after which it
// finds its spins anew. A step's tiles have the same turns, and spins of their own.
//
// Both are rounded once to half, 2^-12 of an element at most, as an fp16 pool rounds K with its bias. On a real model
// that costs a KL of about 0.00003, where int8 costs 0.0003 even without a bias.
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

// The first of two neighbouring pairs.
__device__ __forceinline__ int pair_of(int step, int t) { return (step / 2 * 4 + t) * 4 + step % 2 * 2; }

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

// z of two neighbouring pairs of a head.
__device__ __forceinline__ float4 find_z(const KeyBias &bias, const Activation *query, int kv_head, int pair) {
    const uint2 q = __ldcg(reinterpret_cast<const uint2 *>(query + 2 * pair));
    const float2 first = to_float2(reinterpret_cast<const Activation2 &>(q.x));
    const float2 second = to_float2(reinterpret_cast<const Activation2 &>(q.y));
    return turn_back(make_float4(first.x, first.y, second.x, second.y), bias.pairs(kv_head, pair));
}

// The power of two that takes the lane's z of a head to just below the largest half, however it is turned.
__device__ __forceinline__ float find_scale(const float4 (&z)[PRODUCT_STEPS]) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < PRODUCT_STEPS; i++)
        largest = fmaxf(largest, fmaxf(fmaxf(fabsf(z[i].x), fabsf(z[i].y)), fmaxf(fabsf(z[i].z), fabsf(z[i].w))));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int exponent = min(max(__float_as_int(largest) >> 23, 30), 254);  // biased
    return __int_as_float((267 - exponent) << 23);  // to below 2^14; and turns may double it
}

// The spin of z in a step that begins at `token`.
__device__ __forceinline__ Spin find_spin(const KeyBias &bias, const float4 &z, int token, int pair) {
    Spin spin;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const float4 turned = turn_back(z, bias.turns(token + i * TILE, pair));
        spin.tiles[i] = {round_to_half(turned.x, turned.y), round_to_half(turned.z, turned.w)};
    }
    return spin;
}

// What a warp begins an item with. A head beyond the item's is zero.
__device__ __forceinline__ void begin_spins(Spins &spins, const KeyBias &bias, const Activation *first_query,
                                            int heads, int kv_head, int token) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        const int head = 8 * n + g;
        float4 z[PRODUCT_STEPS] = {};
#pragma unroll
        for (int i = 0; i < PRODUCT_STEPS; i++)
            if (head < heads) z[i] = find_z(bias, first_query + head * D, kv_head, pair_of(i, t));
        const float scale = find_scale(z);
        if (t == 0) spins.factors[head] = 1.f / (scale * TURN_SCALE);
#pragma unroll
        for (int i = 0; i < PRODUCT_STEPS; i++) {
            spins.fragments[n][i][lane] = find_spin(bias, times(scale, z[i]), token, pair_of(i, t));
        }
    }
    __syncwarp();
}

// The same spins, at a later token.
__device__ __forceinline__ void turn_spins(Spins &spins, const KeyBias &bias, const Activation *first_query, int heads,
                                           int kv_head, int token) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        const int head = 8 * n + g;
        if (head >= heads) continue;
        const float scale = 1.f / (spins.factors[head] * TURN_SCALE);
#pragma unroll 1
        for (int i = 0; i < PRODUCT_STEPS; i++) {
            const float4 z = find_z(bias, first_query + head * D, kv_head, pair_of(i, t));
            spins.fragments[n][i][lane] = find_spin(bias, times(scale, z), token, pair_of(i, t));
        }
    }
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
