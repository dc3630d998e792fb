// The rows of the embedding table for a batch of tokens, as fp32: one block per token, 8 columns per thread and turn.
//
// A token is in `ids`, or where source >= 0 it is previous[source]: one that an earlier step drew and the host has not
// seen yet.
//
// Macro: INT8_TABLE. 1: the table is packed (w8.cuh), with its scales. 0: it is in the activation type, and has none.
#include "w8.cuh"

#if INT8_TABLE
using Table = uint8;
#else
using Table = Activation;
#endif

struct Rows {
    const Table *table;
    const __half *scales;
    int width, units;  // of a packed table's rows, padded to `units` units

    __device__ __forceinline__ void load(int row, int column, float (&values)[8]) const {
#if INT8_TABLE
        const size_t place = size_t(row / UNIT_ROWS) * units + column / UNIT_K;
        const int upper = row % 8, half = row % UNIT_ROWS / 8;
        const uint8 *codes = table + place * UNIT_BYTES + upper * 64 + column % UNIT_K * 2 + half * 8;
        weights8(*reinterpret_cast<const uint2 *>(codes), scales[place * UNIT_ROWS + upper * 2 + half], values);
#else
        load8(table + size_t(row) * width + column, values);
#endif
    }
};

extern "C" __global__ void __launch_bounds__(256)
embed(const int *ids, const int *source, const int *previous, const Table *table, const __half *scales, float *out,
      int width, int units) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Rows rows = {table, scales, width, units};
    const int token = blockIdx.x, from = source[token];
    const int row = from >= 0 ? previous[from] : ids[token];
    for (int column = 8 * threadIdx.x; column < width; column += 8 * blockDim.x) {
        float values[8];
        rows.load(row, column, values);
        store8(out + size_t(token) * width + column, values);
    }
}
