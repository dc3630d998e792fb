// A bias that K as stored lacks: what K is to be added to at which position.
#pragma once

constexpr float TURN_SCALE = 256.f;  // of turns in half, so that half also holds what they are multiplied with

struct KeyBias {
    const float *values;  // [num_kv_heads, HEAD_DIM]
    const float *rotary;  // [positions, HEAD_DIM / 2, 2]: cos, sin, both times a factor that q has too
    int positions;

    // The turns of two neighbouring pairs, of which `pair` is the first; past the table's end there are no tokens.
    __device__ const float4 *turns_at(int position, int pair) const {
        const size_t row = min(position, positions - 1);
        return reinterpret_cast<const float4 *>(rotary + row * HEAD_DIM + 2 * pair);
    }

    // The same pairs of a KV head's bias.
    __device__ const float4 *pairs_at(int kv_head, int pair) const {
        return reinterpret_cast<const float4 *>(values + kv_head * HEAD_DIM + 2 * pair);
    }
};
