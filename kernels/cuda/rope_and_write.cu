// From the QKV projection to attention: adds the bias, rotates q and k, writes k and v into the pool.
//
// qkv [T, H + 2G, HEAD_DIM]: q's heads, k's, v's. A rotary pair is two neighbouring elements; rotary [P, HEAD_DIM / 2]
// holds (cos, sin). Each product of a rotation is rounded, as in plain fp32 arithmetic. A position below 0 is padding.
#include "common.cuh"
#include "kv_write.cuh"

constexpr int LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;  // threads of one head: 8 elements each

__device__ __forceinline__ void rotate(float (&x)[8], const float *turns) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float4 turn = reinterpret_cast<const float4 *>(turns)[half];
        float *pair = x + 4 * half;
        const float a = pair[0], b = pair[1], c = pair[2], d = pair[3];
        pair[0] = __fsub_rn(__fmul_rn(a, turn.x), __fmul_rn(b, turn.y));
        pair[1] = __fadd_rn(__fmul_rn(a, turn.y), __fmul_rn(b, turn.x));
        pair[2] = __fsub_rn(__fmul_rn(c, turn.z), __fmul_rn(d, turn.w));
        pair[3] = __fadd_rn(__fmul_rn(c, turn.w), __fmul_rn(d, turn.z));
    }
}

extern "C" __global__ void __launch_bounds__(256) rope_and_write(
    const Activation *qkv, const Activation *bias, const float *rotary, const int *positions, const int *sequences,
    const int *block_tables, uint8 *pool, Activation *q_out, int num_tokens, int num_heads, int num_kv_heads,
    int max_blocks, int block_size, int block_bytes, int layer_offset, int plane_bytes) {
    const int heads = num_heads + 2 * num_kv_heads;
    const int unit = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, column = threadIdx.x % LANES * 8;
    const int token = unit / heads, head = unit % heads;
    const bool inside = token < num_tokens && column < HEAD_DIM;
    float x[8] = {}, added[8] = {};
    if (inside && bias != nullptr) load8(bias + head * HEAD_DIM + column, added);
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int position = inside ? positions[token] : -1;
    if (position >= 0) {
        load8(qkv + (static_cast<long long>(token) * heads + head) * HEAD_DIM + column, x);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] += added[i];
        if (head < num_heads + num_kv_heads) rotate(x, rotary + static_cast<long long>(position) * HEAD_DIM + column);
    }
    __half scale = {};
    if constexpr (KV_FORMAT == KV_INT8) scale = int8_scale<LANES>(x);  // the whole group takes part
    if (position < 0) return;
    if (head < num_heads) {
        store8(q_out + (static_cast<long long>(token) * num_heads + head) * HEAD_DIM + column, x);
        return;
    }
    const int block = block_tables[static_cast<long long>(sequences[token]) * max_blocks + position / block_size];
    uint8 *plane = pool + static_cast<long long>(block) * block_bytes + layer_offset + (head - num_heads) * plane_bytes;
    write_elements(plane, position % block_size, column, x, scale);
    if (KV_FORMAT == KV_INT8 && column == 0) write_scale(plane, position % block_size, block_size, scale);
}
