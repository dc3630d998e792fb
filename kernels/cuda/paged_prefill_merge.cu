// The parts that paged_prefill's splits left of each query row, merged. Parts fp32 [splits, T, H, HEAD_DIM], levels
// [splits, T, H]: log2 of what a part was divided by, -inf where there is none. A block takes blockDim.y rows of T * H,
// a thread 4 columns. Macros: ACTIVATION_BF16, HEAD_DIM.
#include "common.cuh"

extern "C" __global__ void paged_prefill_merge(const float4 *parts, const float *levels, const int *query_starts,
                                               Activation *out, int num_sequences, int num_tokens, int num_heads,
                                               int splits) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    if (row >= query_starts[num_sequences] * num_heads) return;
    const size_t rows = static_cast<size_t>(num_tokens) * num_heads;
    float highest = negative_infinity();
    for (int split = 0; split < splits; split++) highest = fmaxf(highest, levels[split * rows + row]);
    float weights = 0.f;
    float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
    for (int split = 0; split < splits; split++) {
        const float level = levels[split * rows + row];
        if (level == negative_infinity()) continue;
        const float weight = exp2f(level - highest);
        const float4 part = parts[(split * rows + row) * (HEAD_DIM / 4) + threadIdx.x];
        weights += weight;
        sum.x += weight * part.x;
        sum.y += weight * part.y;
        sum.z += weight * part.z;
        sum.w += weight * part.w;
    }
    uint2 result;
    Activation *values = reinterpret_cast<Activation *>(&result);
    values[0] = from_float<Activation>(sum.x / weights);
    values[1] = from_float<Activation>(sum.y / weights);
    values[2] = from_float<Activation>(sum.z / weights);
    values[3] = from_float<Activation>(sum.w / weights);
    reinterpret_cast<uint2 *>(out)[static_cast<size_t>(row) * (HEAD_DIM / 4) + threadIdx.x] = result;
}
