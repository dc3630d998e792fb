// RMS norm of fp32 rows: one block per row, 8 columns per thread.
//
// The order of the sum over a row depends on its width alone.
#include "common.cuh"

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
    const float *residual, const float *weight, Activation *out, int width, float eps) {
    const int column = 8 * threadIdx.x;
    const bool inside = column < width;
    float scale[8], x[8] = {};
    if (inside) load8(weight + column, scale);
    let_next_kernel_start();
    wait_for_previous_kernel();
    const long long row = static_cast<long long>(blockIdx.x) * width;
    if (inside) load8(residual + row + column, x);
    float squares = 0.f;
#pragma unroll
    for (int i = 0; i < 8; i++) squares += x[i] * x[i];
    const float factor = rsqrtf(block_sum(squares) / width + eps);
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= factor * scale[i];
    store8(out + row + column, x);
}
