// silu(gate) * up. gate_up [T, 2 * width] holds gate and up in turns of 8 columns; out [T, width].
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) silu_multiply(const Activation *gate_up, Activation *out, int units) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int unit = blockIdx.x * blockDim.x + threadIdx.x;  // 8 columns of one token
    if (unit >= units) return;
    float gate[8], up[8];
    load8(gate_up + 16ll * unit, gate);
    load8(gate_up + 16ll * unit + 8, up);
#pragma unroll
    for (int i = 0; i < 8; i++) up[i] *= gate[i] / (1.f + __expf(-gate[i]));
    store8(out + 8ll * unit, up);
}
