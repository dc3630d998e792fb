// A packed int8 matrix (w8.cuh) as out [n, k] in the activation type: code * scale in fp32, rounded once.
//
// A thread turns 8 columns of rows g and g + 8; a warp 256 columns of them. Block: 256, a warp for every g.
// Grid: (ceil(units of a row / 8), rows of units).
#include "w8.cuh"

extern "C" __global__ void __launch_bounds__(8 * WARP)
w8_dequantize(const uint4 *codes, const __half2 *scales, Activation *out, int n, int k, int units) {
    let_next_kernel_start();
    const int lane = threadIdx.x % WARP, upper = threadIdx.x / WARP, quarter = lane % 4;
    const int unit = blockIdx.x * 8 + lane / 4, tile = blockIdx.y, column = unit * UNIT_K + quarter * 8;
    if (column >= k) return wait_for_previous_kernel();
    const size_t place = size_t(tile) * units + unit;
    const uint4 packed = codes[place * WARP + upper * 4 + quarter];
    const __half2 scale = scales[place * (UNIT_ROWS / 2) + upper];
    float first[8], second[8];
    weights8({packed.x, packed.y}, __low2half(scale), first);
    weights8({packed.z, packed.w}, __high2half(scale), second);
    wait_for_previous_kernel();
    const int row = tile * UNIT_ROWS + upper;
    if (row < n) store8(out + size_t(row) * k + column, first);
    if (row + 8 < n) store8(out + size_t(row + 8) * k + column, second);
}
