// From the QKV projection to attention: adds the bias, rotates q and k, writes k and v into the pool.
//
// qkv [T, H + 2G, HEAD_DIM]: q's heads, k's, v's. A rotary pair is two neighbouring elements; rotary [P, HEAD_DIM / 2]
// holds (cos, sin). Each product of a rotation is rounded, as in plain fp32 arithmetic. A position below 0 is padding.
#include "common.cuh"
#include "kv_write.cuh"

constexpr int LANES = HEAD_DIM <= 64 ? 8 : HEAD_DIM <= 128 ? 16 : 32;  // threads of one head: 8 elements each

__device__ __forceinline__ void rotate(float (&x)[8], const float (&turns)[8]) {
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float a = x[i], b = x[i + 1], cos = turns[i], sin = turns[i + 1];
        x[i] = __fsub_rn(__fmul_rn(a, cos), __fmul_rn(b, sin));
        x[i + 1] = __fadd_rn(__fmul_rn(a, sin), __fmul_rn(b, cos));
    }
}

extern "C" __global__ void __launch_bounds__(256) rope_and_write(
    const Activation *qkv, const Activation *bias, const float *rotary, const int *positions, const int *sequences,
    const int *block_tables, uint8 *pool, Activation *q_out, int num_tokens, int num_heads, int num_kv_heads,
    int max_blocks, int block_size, int block_bytes, int layer_offset, int plane_bytes) {
    const int heads = num_heads + 2 * num_kv_heads;
    const int unit = (blockIdx.x * blockDim.x + threadIdx.x) / LANES, column = threadIdx.x % LANES * 8;
    const int token = unit / heads, head = unit % heads;
    const bool idle = column >= HEAD_DIM;
    float added[8], x[8] = {}, turns[8] = {};
#pragma unroll
    for (int i = 0; i < 8; i++) added[i] = -0.f;  // what changes nothing when it is added
    if (bias != nullptr && !idle) load8(bias + head * HEAD_DIM + column, added);
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (token >= num_tokens) return;
    // Of padding, too, rather than wait for its position.
    if (!idle) load8(qkv + (static_cast<long long>(token) * heads + head) * HEAD_DIM + column, x);
    const int position = positions[token], sequence = sequences[token];
    if (position < 0) return;
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] += added[i];
    if (head < num_heads + num_kv_heads) {
        if (!idle) load8(rotary + static_cast<long long>(position) * HEAD_DIM + column, turns);
        rotate(x, turns);
    }
    if (head < num_heads) {
        if (!idle) store8(q_out + (static_cast<long long>(token) * num_heads + head) * HEAD_DIM + column, x);
        return;
    }
    const int block = block_tables[static_cast<long long>(sequence) * max_blocks + position / block_size];
    uint8 *plane = pool + static_cast<long long>(block) * block_bytes + layer_offset + (head - num_heads) * plane_bytes;
    write_head<LANES>(plane, position % block_size, block_size, column, x);
}
