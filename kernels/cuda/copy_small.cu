// A few words between the GPU and pinned host memory, which the kernel reads or writes over the bus itself. FROM_HOST:
// no kernel writes the source, so it is read while the previous kernel still runs.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256) copy_small(const uint32 *source, uint32 *target, int words) {
    let_next_kernel_start();
    if (!FROM_HOST) wait_for_previous_kernel();
    const int word = blockIdx.x * blockDim.x + threadIdx.x;
    const uint32 value = word < words ? source[word] : 0;
    if (FROM_HOST) wait_for_previous_kernel();
    if (word < words) target[word] = value;
}
