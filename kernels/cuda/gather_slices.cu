// Slices of scattered blocks, of the GPU's memory or of pinned host memory, one behind another. From the host they come
// over the bus: many reads of 16 bytes are under way at once, which a copy engine does not reach with small pieces.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    gather_slices(const uint8 *source, const int *blocks, uint4 *target, int block_bytes, int offset, int words) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const uint64 begin = static_cast<uint64>(blocks[blockIdx.x]) * block_bytes + offset;
    const uint4 *from = reinterpret_cast<const uint4 *>(source + begin);
    uint4 *to = target + static_cast<uint64>(blockIdx.x) * words;
    const int first = blockIdx.y * THREADS * EACH + threadIdx.x;
    uint4 values[EACH];
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (first + i * THREADS < words) values[i] = from[first + i * THREADS];
    }
#pragma unroll
    for (int i = 0; i < EACH; i++) {
        if (first + i * THREADS < words) to[first + i * THREADS] = values[i];
    }
}
