// Penalties and bans, in place: one thread per entry (row, token, count).
//
// count > 0: the token is so often in the row's output; 0: in its prompt only; BANNED: it must not be drawn.
#include "sampling.cuh"

constexpr int BANNED = -1;

extern "C" __global__ void __launch_bounds__(256) sample_penalize(
    float *logits, const int *entries, const float *penalties, int num_entries, int vocab_size, int row_stride) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int entry = blockIdx.x * blockDim.x + threadIdx.x;
    if (entry >= num_entries) return;
    const int row = entries[3 * entry], token = entries[3 * entry + 1], count = entries[3 * entry + 2];
    if (token < 0 || token >= vocab_size) return;  // a prompt may hold the model's padding ids
    const float repetition = penalties[3 * row], frequency = penalties[3 * row + 1], presence = penalties[3 * row + 2];
    float *logit = logits + static_cast<long long>(row) * row_stride + token;
    float x = *logit > 0.f ? *logit / repetition : *logit * repetition;
    if (count > 0) x -= __fadd_rn(__fmul_rn(frequency, static_cast<float>(count)), presence);
    *logit = count == BANNED ? negative_infinity() : x;
}
