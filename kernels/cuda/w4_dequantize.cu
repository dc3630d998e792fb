// A packed four-bit matrix (w4.cuh) as out [n, k] in the activation type: (q - 8) * s + z in fp32, rounded once.
//
// One warp turns one unit of 16 rows x 64 k; shared memory brings its fragments into row order for 16-byte stores.
// Block: 256. Grid: (ceil(units of a row / 8), rows of units).
#include "w4.cuh"

constexpr int WARPS = 8;
constexpr int ROW_PAIRS = UNIT_K / 2 + 4;  // pairs of values; the padding keeps both accesses free of bank conflicts

extern "C" __global__ void __launch_bounds__(WARPS * WARP)
w4_dequantize(const uint4 *codes, const uint2 *scales, Activation *out, int n, int k, int units, int groups,
              int group_shift) {
    let_next_kernel_start();
    __shared__ __align__(16) Activation2 rows[WARPS][UNIT_ROWS][ROW_PAIRS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int unit = blockIdx.x * WARPS + warp, tile = blockIdx.y, upper = lane / 4, pair = lane % 4;
    if (unit < units) {
        const uint4 packed = codes[(size_t(tile) * units + unit) * WARP + lane];
        const uint32 words[UNIT_WORDS] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
        for (int j = 0; j < UNIT_WORDS; j++) {
            const int group = (unit * UNIT_K + j * 16) >> group_shift;
            const RowScales scale = unpack_scales(scales[(size_t(tile) * groups + group) * 8 + upper]);
            uint32 fragment[4];
            codes_to_fragment(words[j], fragment);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float2 code = to_float2(*reinterpret_cast<const Activation2 *>(&fragment[i]));
                const float2 row_scale = i % 2 ? scale.lower : scale.upper;
                rows[warp][upper + i % 2 * 8][j * 8 + i / 2 * 4 + pair] = {
                    from_float<Activation>(fmaf(code.x, row_scale.x, row_scale.y)),
                    from_float<Activation>(fmaf(code.y, row_scale.x, row_scale.y))};
            }
        }
    }
    __syncwarp();
    wait_for_previous_kernel();
#pragma unroll
    for (int i = 0; i < UNIT_ROWS / 4; i++) {
        const int row = i * 4 + lane / 8, column = unit * UNIT_K + lane % 8 * 8;
        if (tile * UNIT_ROWS + row < n && column < k)
            *reinterpret_cast<uint4 *>(out + size_t(tile * UNIT_ROWS + row) * k + column) =
                *reinterpret_cast<const uint4 *>(&rows[warp][row][lane % 8 * 4]);
    }
}
