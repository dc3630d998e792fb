// First half of sampling: over each piece of CHUNK logits of a row, the greatest logit and the greatest Gumbel score.
//
// out [R, chunks] holds both as ranks. Scores are made for rows that are drawn from without filters. What a piece gives
// depends on the row alone, not on the batch.
#include "sampling.cuh"

constexpr int THREADS = 256, TURNS = CHUNK / (4 * THREADS);

// Logits that one thread holds; x[turn][i] belongs to token first + turn * 4 * THREADS + i.
struct Share {
    int first;
    float x[TURNS][4];

    __device__ __forceinline__ int token(int turn, int i) const { return first + turn * 4 * THREADS + i; }
};

__device__ __forceinline__ uint64 greatest_logit(const Share &share) {
    float best = negative_infinity();
    int best_at = share.first;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float x = share.x[turn][i];
            if (x > best || x != x) {  // nothing is greater than a NaN
                best = x;
                best_at = share.token(turn, i);
            }
        }
    return rank(best, best_at);
}

// The thread's greatest score, or the rank of any greater one of the block. `greatest`: the thread's greatest logit.
//
// -log1p(-u) >= u, so that a score can only exceed `best` if u < exp(x - best): that spares most tokens the logarithms.
__device__ __forceinline__ uint64 greatest_score(const Share &share, const Parameters &request, uint64 greatest) {
    const uint64 stream = stream_of(request);
    const float inverse_temperature = 1.f / request.temperature;
    const float first_score = gumbel_score(
        rank_value(greatest) * inverse_temperature, uniform_of(stream, rank_token(greatest)));
    const uint64 known = block_max<THREADS / WARP>(rank(first_score, rank_token(greatest)));
    float best = rank_value(known);
    int best_at = rank_token(known);
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float scaled = share.x[turn][i] * inverse_temperature;
            const float uniform = uniform_of(stream, share.token(turn, i));
            if (uniform > 1.001f * __expf(scaled - best)) continue;
            const float score = gumbel_score(scaled, uniform);
            if (score > best) {
                best = score;
                best_at = share.token(turn, i);
            }
        }
    return rank(best, best_at);
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_scan(
    const float *logits, const Parameters *parameters, ulonglong2 *out, int vocab_size, int row_stride) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const float *row = logits + static_cast<long long>(blockIdx.y) * row_stride;
    Share share;
    share.first = blockIdx.x * CHUNK + 4 * threadIdx.x;
#pragma unroll
    for (int turn = 0; turn < TURNS; turn++) load_logits(row, share.token(turn, 0), vocab_size, share.x[turn]);
    const Parameters request = parameters[blockIdx.y];
    const uint64 own = greatest_logit(share);
    const uint64 greatest = block_max<THREADS / WARP>(own);
    uint64 drawn = 0;
    if (!is_greedy(request) && !needs_largest(request, vocab_size))
        drawn = block_max<THREADS / WARP>(greatest_score(share, request, own));
    if (threadIdx.x == 0) out[blockIdx.y * gridDim.x + blockIdx.x] = {greatest, drawn};
}
