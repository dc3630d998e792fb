// silu(gate) * up. gate_up [T, 2 * width] holds gate and up in turns of 8 columns; out [T, width].
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) silu_multiply(const Activation *gate_up, Activation *out, int units) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int unit = blockIdx.x * blockDim.x + threadIdx.x;  // 8 columns of one token
    if (unit >= units) return;
    const uint4 gate_bits = reinterpret_cast<const uint4 *>(gate_up)[2 * unit];
    const uint4 up_bits = reinterpret_cast<const uint4 *>(gate_up)[2 * unit + 1];
    const Activation2 *gate = reinterpret_cast<const Activation2 *>(&gate_bits);
    const Activation2 *up = reinterpret_cast<const Activation2 *>(&up_bits);
    uint4 result;
    Activation *values = reinterpret_cast<Activation *>(&result);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 g = to_float2(gate[i]), u = to_float2(up[i]);
        values[2 * i] = from_float<Activation>(g.x / (1.f + __expf(-g.x)) * u.x);
        values[2 * i + 1] = from_float<Activation>(g.y / (1.f + __expf(-g.y)) * u.y);
    }
    reinterpret_cast<uint4 *>(out)[unit] = result;
}
