// Rotary position embedding.
#pragma once

#include "common.cuh"

// Rotates 4 pairs of neighbours by (cos, sin) pairs. Each product is rounded, as in plain fp32 arithmetic.
__device__ __forceinline__ void rotate(float (&x)[8], const float (&turns)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float a = x[i], b = x[i + 1], cos = turns[i], sin = turns[i + 1];
        x[i] = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
        x[i + 1] = __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos));
    }
}
