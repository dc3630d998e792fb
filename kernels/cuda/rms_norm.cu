// RMS norm of fp32 rows, after adding `add` (may be null) to them: one block per row, 8 columns per thread.
//
// CHOSEN_ROWS 0: every row; the sum is written back to `residual`. CHOSEN_ROWS 1: out[r] is row rows[r], and `residual`
// stays as it is. The order of the sum over a row depends on its width alone.
#include "common.cuh"

#ifndef CHOSEN_ROWS
#define CHOSEN_ROWS 0
#endif

constexpr int MOST_WARPS = 32;

// The sum of `x` over the block, in every thread.
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[MOST_WARPS];
    const int warps = blockDim.x / WARP;
    x = warp_sum(x);
    if (threadIdx.x % WARP == 0) of_warp[threadIdx.x / WARP] = x;
    __syncthreads();
    return warp_sum(threadIdx.x % WARP < warps ? of_warp[threadIdx.x % WARP] : 0.f);
}

extern "C" __global__ void __launch_bounds__(1024) rms_norm(
    float *residual, const float *weight, const int *rows, const Activation *add, Activation *out, int width, float eps) {
    const int column = 8 * threadIdx.x;
    const bool inside = column < width;
    float scale[8], x[8] = {}, added[8] = {};
    if (inside) load8(weight + column, scale);
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long row = CHOSEN_ROWS ? rows[blockIdx.x] : blockIdx.x;
    float squares = 0.f;
    if (inside) {
        load8(residual + row * width + column, x);
        if (add != nullptr) load8(add + row * width + column, added);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            x[i] += added[i];
            squares += x[i] * x[i];
        }
        if (!CHOSEN_ROWS && add != nullptr) store8(residual + row * width + column, x);
    }
    const float factor = rsqrtf(block_sum(squares) / width + eps);
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= factor * scale[i];
    store8(out + static_cast<long long>(blockIdx.x) * width + column, x);
}
