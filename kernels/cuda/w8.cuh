// Int8 weights in the packed layout of kernels/w8.py, for everything that multiplies or reads them.
//
// A unit is 16 rows x 32 k: 32 lanes x 16 bytes. Lane 4g + t holds columns 8t to 8t + 7 of row g, then of row g + 8. A
// group of 32 columns is a unit's: its scales are fp16 [8][2], row g beside row g + 8, and weight = code * scale.
#pragma once

#include "common.cuh"

constexpr int UNIT_ROWS = 16;
constexpr int UNIT_K = 32;
constexpr int UNIT_BYTES = UNIT_ROWS * UNIT_K;
constexpr int SCALE_BYTES = UNIT_ROWS * 2;

// Four codes as exact pairs of the activation type.
__device__ __forceinline__ void codes_to_pairs(uint32 word, uint32 &first, uint32 &second) {
    uint32 *const pairs[2] = {&first, &second};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint32 selector = i == 0 ? 0x4140 : 0x4342;
#if ACTIVATION_BF16
        // 0x4300 | u is 128 + u for u below 128, and 256 for u = 128: a code is its low seven bits less its sign bit.
        const uint32 magic = __byte_perm(word, 0x43434343u, selector);
        const uint32 low = magic & 0xff7fff7fu, sign = magic & 0xff80ff80u;
#else
        // 0x6400 | u is the half 1024 + u.
        const uint32 low = __byte_perm(word ^ 0x80808080u, 0x64646464u, selector), sign = 0x64806480u;  // 1024 + 128
#endif
        const Activation2 pair =
            __hsub2(*reinterpret_cast<const Activation2 *>(&low), *reinterpret_cast<const Activation2 *>(&sign));
        *pairs[i] = *reinterpret_cast<const uint32 *>(&pair);
    }
}

// Eight neighbouring weights of a row.
__device__ __forceinline__ void weights8(uint2 codes, __half scale, float (&values)[8]) {
    const signed char *bytes = reinterpret_cast<const signed char *>(&codes);
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = bytes[i] * to_float(scale);
}
