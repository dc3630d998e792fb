// The rows of the embedding table for a batch of tokens, as fp32: one block per token, 8 columns per thread and turn.
//
// A token is in `ids`, or where source >= 0 it is previous[source]: one that an earlier step drew and the host has not
// seen yet.
#include "common.cuh"

extern "C" __global__ void __launch_bounds__(256)
    embed(const int *ids, const int *source, const int *previous, const Activation *table, float *out, int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int row = blockIdx.x, from = source[row];
    const int token = from >= 0 ? previous[from] : ids[row];
    for (int column = 8 * threadIdx.x; column < width; column += 8 * blockDim.x) {
        float values[8];
        load8(table + static_cast<long long>(token) * width + column, values);
        store8(out + static_cast<long long>(row) * width + column, values);
    }
}
