// out = x W^T (+ bias, or silu(gate) * up) for few rows of x, here called tokens, and W in four bits (w4.cuh).
//
// Every warp owns a slice of K: it keeps its weights STAGES steps ahead in a ring of shared memory that no other warp
// touches, and its columns of x beside it. A block of ROWS rows of W is multiplied by all warps of a block (of a cluster,
// if CLUSTER > 1) at once; their sums meet in shared memory and are added in the order of K. Blocks walk over the rows
// with a grid's stride, the ring runs on across them. Weights depend on nobody, so the ring is filled before the wait.
//
// Codes are multiplied as exact integers q - 8; a group's fp32 sum is scaled, and z enters by the group's sum of x.
//
// Macros: TOKEN_TILES (8 tokens each), ROW_TILES (16 rows of W each), WARPS, CLUSTER, STAGES, STEP_UNITS (64 k each, all in
// one group, or in STEP_SCALES = 2 groups of 32). Block: WARPS * 32. Grid: (CLUSTER * any, ceil(tokens / TOKENS)).
#include "mma.cuh"
#include "w4.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TOKENS = 8 * TOKEN_TILES;
constexpr int ROWS = UNIT_ROWS * ROW_TILES;
constexpr int STEP_K = UNIT_K * STEP_UNITS;
constexpr int SPAN_K = STEP_K / STEP_SCALES;  // k of a step that share a scale
constexpr int CODE_BYTES = ROW_TILES * STEP_UNITS * UNIT_BYTES;
constexpr int STAGE_BYTES = CODE_BYTES + ROW_TILES * STEP_SCALES * SCALE_BYTES;
constexpr int SUMS = ROW_TILES * TOKEN_TILES * WARP;  // float4 of accumulators that a warp holds
constexpr int SUM_BUFFERS = SUMS <= 128 ? 2 : 1;      // with two, one barrier a block of rows is enough
constexpr int X_PADDING = 8;                          // keeps ldmatrix free of bank conflicts
// As many blocks as registers allow, so that the next kernel's weights can arrive while this one still computes.
constexpr int RESIDENT_THREADS = SUMS <= 32 ? 1024 : SUMS <= 64 ? 768 : SUMS <= 128 ? 512 : 256;
constexpr int RESIDENT_BLOCKS = RESIDENT_THREADS > THREADS ? RESIDENT_THREADS / THREADS : 1;

// The first token of a block; grid.y runs over the tokens.
__device__ __forceinline__ int first_token() { return blockIdx.y * TOKENS; }

struct Shape {
    int n, k, units, groups, group_shift;
    bool silu;
};

__device__ __forceinline__ uint32 shared_address(const void *pointer) { return static_cast<uint32>(__cvta_generic_to_shared(pointer)); }

// 16 bytes from global to shared memory past the L1; `valid` false writes zeros.
__device__ __forceinline__ void copy_async(void *to, const void *from, bool valid = true) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(valid ? 16 : 0) : "memory");
}
// The same for data that is read once.
__device__ __forceinline__ void stream_async(void *to, const void *from, uint64 policy) {
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "l"(policy) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int pending> __device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

__device__ __forceinline__ uint64 evict_first() {
    uint64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ int cluster_rank() {
#if CLUSTER > 1
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

__device__ __forceinline__ void cluster_barrier() {
#if CLUSTER > 1
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

// A float4 of shared memory of the cluster's block `rank`.
__device__ __forceinline__ float4 load_shared_of(const float4 *own, int rank) {
#if CLUSTER > 1
    float4 value;
    uint32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
                 : "r"(address)
                 : "memory");
    return value;
#else
    return *own;
#endif
}

// A warp's weights in the order it needs them: its steps of K for one block of rows after the other.
struct WeightStream {
    const uint8 *codes, *scales;
    const Shape &shape;
    uint8 *ring;
    int begin, end, row_blocks, stride;  // steps of K; blocks of rows
    int row_block, step, stage;          // what is fetched next, and to where; the ring's oldest stage
    uint64 policy;

    __device__ __forceinline__ size_t code_offset(int row_tile) const {
        return (size_t(row_block * ROW_TILES + row_tile) * shape.units + step * STEP_UNITS) * UNIT_BYTES;
    }

    __device__ __forceinline__ bool ended() const { return row_block >= row_blocks || begin == end; }

    __device__ __forceinline__ void advance() {
        if (++step == end) step = begin, row_block += stride;
    }

    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP;
        if (!ended()) {
            uint8 *to = ring + stage * STAGE_BYTES + lane * 16;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int u = 0; u < STEP_UNITS; u++)
                    stream_async(to + (r * STEP_UNITS + u) * UNIT_BYTES, codes + code_offset(r) + u * UNIT_BYTES + lane * 16, policy);
            constexpr int PIECES = STEP_SCALES * SCALE_BYTES / 16;
            if (lane < ROW_TILES * PIECES) {
                const size_t entry = size_t(row_block * ROW_TILES + lane / PIECES) * shape.groups + (step * STEP_K >> shape.group_shift);
                stream_async(to + CODE_BYTES, scales + entry * SCALE_BYTES + lane % PIECES * 16, policy);
            }
            advance();
        }
        commit_copies();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }

    // Asks the L2 for what comes next, without moving on.
    __device__ __forceinline__ void prefetch(int steps) const {
        constexpr int LINES = STEP_UNITS * UNIT_BYTES / 128;
        const int lane = threadIdx.x % WARP;
        WeightStream ahead = *this;
        for (; steps > 0 && !ahead.ended(); steps--, ahead.advance())
            if (lane < ROW_TILES * LINES)
                asm volatile("prefetch.global.L2 [%0];" ::"l"(codes + ahead.code_offset(lane / LINES) + lane % LINES * 128));
    }
};

// A warp's columns of x in shared memory, and their sums over every span of SPAN_K that shares a scale.
struct Tokens {
    Activation *x;          // [tokens][row]
    float *sums;            // [spans][TOKENS]
    int row;                // elements from one token to the next
    int offset[TOKEN_TILES];  // of the row whose address this lane gives to ldmatrix; tokens past the end repeat the last

    __device__ __forceinline__ Tokens(Activation *x, float *sums, int row, int tokens) : x(x), sums(sums), row(row) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) offset[i] = min(i * 8 + lane % 8, tokens - 1) * row + lane / 8 * 8;
    }

    // B fragments of two k-steps: b[0], b[1] of the first, b[2], b[3] of the second.
    __device__ __forceinline__ void load(uint32 (&b)[4], int tile, int k) const { ldmatrix_x4(b, x + offset[tile] + k); }

    __device__ __forceinline__ void stage(const Activation *from, const Shape &shape, int tokens, int begin, int steps) {
        const int lane = threadIdx.x % WARP, pieces = steps * (STEP_K / 8), first = begin * STEP_K;
        __syncwarp();
        for (int token = 0; token < tokens; token++)
            for (int piece = lane; piece < pieces; piece += WARP) {
                const int k = first + piece * 8;
                copy_async(x + token * row + piece * 8, from + size_t(first_token() + token) * shape.k + k, k < shape.k);
            }
        commit_copies();
        wait_for_copies<0>();
        __syncwarp();
#pragma unroll 1
        for (int span = 0; span < steps * STEP_SCALES; span++) sum(span);
        __syncwarp();
    }

    // By a product with ones, whose rows all hold the sum.
    __device__ __forceinline__ void sum(int span) {
        const int lane = threadIdx.x % WARP;
        const Activation2 pair = {from_float<Activation>(1.f), from_float<Activation>(1.f)};
        const uint32 bits = *reinterpret_cast<const uint32 *>(&pair);
        const uint32 ones[4] = {bits, bits, bits, bits};
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) {
            float parts[SPAN_K / 32][4] = {};  // independent, as a product waits long for the one before
#pragma unroll
            for (int j = 0; j < SPAN_K / 32; j++) {
                uint32 b[4];
                load(b, i, span * SPAN_K + j * 32);
                mma_m16n8k16<Activation>(parts[j], ones, {b[0], b[1]});
                mma_m16n8k16<Activation>(parts[j], ones, {b[2], b[3]});
            }
            float2 total = {0.f, 0.f};
#pragma unroll
            for (int j = 0; j < SPAN_K / 32; j++) total.x += parts[j][0], total.y += parts[j][1];
            if (lane < 4) *reinterpret_cast<float2 *>(sums + span * TOKENS + i * 8 + lane * 2) = total;
        }
    }
};

using Accumulators = float[ROW_TILES][TOKEN_TILES][4];

// acc += s * part + z * sum(x), for the span's scale entries of this warp's rows.
__device__ __forceinline__ void add_scaled(Accumulators &acc, const Accumulators &part, const uint8 *scales, const float *sums) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        const RowScales scale = unpack_scales(reinterpret_cast<const uint2 *>(scales + r * STEP_SCALES * SCALE_BYTES)[lane / 4]);
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) {
            const float2 sum = *reinterpret_cast<const float2 *>(sums + i * 8 + lane % 4 * 2);
            acc[r][i][0] = fmaf(scale.upper.x, part[r][i][0], fmaf(scale.upper.y, sum.x, acc[r][i][0]));
            acc[r][i][1] = fmaf(scale.upper.x, part[r][i][1], fmaf(scale.upper.y, sum.y, acc[r][i][1]));
            acc[r][i][2] = fmaf(scale.lower.x, part[r][i][2], fmaf(scale.lower.y, sum.x, acc[r][i][2]));
            acc[r][i][3] = fmaf(scale.lower.x, part[r][i][3], fmaf(scale.lower.y, sum.y, acc[r][i][3]));
        }
    }
}

// acc += (one stage of weights) * (x of the step that begins at column k of the staged ones).
__device__ __forceinline__ void multiply(Accumulators &acc, const uint8 *stage, const Tokens &tokens, int step) {
    const int lane = threadIdx.x % WARP;
    uint32 words[ROW_TILES][STEP_UNITS * UNIT_WORDS];
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int u = 0; u < STEP_UNITS; u++)
            *reinterpret_cast<uint4 *>(&words[r][u * UNIT_WORDS]) = *reinterpret_cast<const uint4 *>(stage + (r * STEP_UNITS + u) * UNIT_BYTES + lane * 16);
#pragma unroll
    for (int span = 0; span < STEP_SCALES; span++) {
        Accumulators part = {};
#pragma unroll
        for (int k = span * SPAN_K; k < (span + 1) * SPAN_K; k += 32) {
            uint32 b[TOKEN_TILES][4];
#pragma unroll
            for (int i = 0; i < TOKEN_TILES; i++) tokens.load(b[i], i, step * STEP_K + k);
#pragma unroll
            for (int half = 0; half < 2; half++)
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    uint32 a[4];
                    codes_to_fragment(words[r][k / 16 + half], a);
#pragma unroll
                    for (int i = 0; i < TOKEN_TILES; i++) mma_m16n8k16<Activation>(part[r][i], a, {b[i][2 * half], b[i][2 * half + 1]});
                }
        }
        add_scaled(acc, part, stage + CODE_BYTES + span * SCALE_BYTES, tokens.sums + (step * STEP_SCALES + span) * TOKENS);
    }
}

// One token's values of rows `row` and `row + 8`; with `silu` they are gate and up.
__device__ __forceinline__ void store(Activation *out, const Activation *bias, const Shape &shape, int row, float upper, float lower) {
    if (bias) {
        if (row < shape.n) upper += to_float(bias[row]);
        if (row + 8 < shape.n) lower += to_float(bias[row + 8]);
    }
    if (shape.silu) {
        if (row < shape.n) out[row / 16 * 8 + row % 8] = from_float<Activation>(upper / (1.f + __expf(-upper)) * lower);
    } else {
        if (row < shape.n) out[row] = from_float<Activation>(upper);
        if (row + 8 < shape.n) out[row + 8] = from_float<Activation>(lower);
    }
}

// Adds the slices' sums of one block of rows in the order of K and stores them; every block of a cluster takes its share.
__device__ __forceinline__ void finish(const float4 *sums, Activation *out, const Activation *bias, const Shape &shape, int tokens, int row_block, int turn) {
    constexpr int SHARE = SUMS / CLUSTER;
    const int width = shape.silu ? shape.n / 2 : shape.n;
    // The warps take turns, as most often one is enough.
#pragma unroll 1
    for (int index = (threadIdx.x + turn * WARP) % THREADS; index < SHARE; index += THREADS) {
        const int element = cluster_rank() * SHARE + index, lane = element % WARP, tile = element / WARP;
        const int token = tile % TOKEN_TILES * 8 + lane % 4 * 2, row = row_block * ROWS + tile / TOKEN_TILES * UNIT_ROWS + lane / 4;
        if (token >= tokens) continue;
        float4 total = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int rank = 0; rank < CLUSTER; rank++)
#pragma unroll
            for (int warp = 0; warp < WARPS; warp++) {
                const float4 part = load_shared_of(sums + warp * SUMS + element, rank);
                total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
            }
        Activation *row_of_out = out + size_t(first_token() + token) * width;
        store(row_of_out, bias, shape, row, total.x, total.z);
        if (token + 1 < tokens) store(row_of_out + width, bias, shape, row, total.y, total.w);
    }
}

#if CLUSTER > 1
#define CLUSTER_SHAPE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SHAPE
#endif

extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(THREADS, RESIDENT_BLOCKS)
w4_linear(const Activation *x, const uint8 *codes, const uint8 *scales, const Activation *bias, Activation *out,
          int total_tokens, int n, int k, int units, int groups, int group_shift, int silu,
          int chunk_steps, int prefetch_steps) {
    let_next_kernel_start();
    extern __shared__ __align__(16) uint8 shared[];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const Shape shape = {n, k, units, groups, group_shift, silu != 0};
    const int steps = units / STEP_UNITS, slice = cluster_rank() * WARPS + warp;
    const int begin = steps * slice / (CLUSTER * WARPS), end = steps * (slice + 1) / (CLUSTER * WARPS);
    const int row_blocks = (n + ROWS - 1) / ROWS, first_row_block = blockIdx.x / CLUSTER, stride = gridDim.x / CLUSTER;

    WeightStream stream = {codes, scales, shape, shared + warp * STAGES * STAGE_BYTES, begin, end, row_blocks, stride,
                           first_row_block, begin, 0, evict_first()};
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) stream.fetch();
    stream.prefetch(prefetch_steps);

    float4 *sums = reinterpret_cast<float4 *>(shared + WARPS * STAGES * STAGE_BYTES);
    const int x_row = chunk_steps * STEP_K + X_PADDING, x_rows = min(TOKENS, total_tokens);
    uint8 *x_memory = reinterpret_cast<uint8 *>(sums + SUM_BUFFERS * WARPS * SUMS);
    float *x_sums = reinterpret_cast<float *>(x_memory + WARPS * x_rows * x_row * 2);
    const int tokens = min(TOKENS, total_tokens - first_token());
    Tokens own(reinterpret_cast<Activation *>(x_memory) + warp * x_rows * x_row, x_sums + warp * chunk_steps * STEP_SCALES * TOKENS, x_row, tokens);

    wait_for_previous_kernel();
    const bool resident = end - begin <= chunk_steps;
    int turn = 0;
    for (int row_block = first_row_block; row_block < row_blocks; row_block += stride, turn++) {
        Accumulators acc = {};
        for (int chunk = begin; chunk < end; chunk += chunk_steps) {
            const int chunk_end = min(chunk + chunk_steps, end);
            if (!resident || turn == 0) own.stage(x, shape, tokens, chunk, chunk_end - chunk);
#pragma unroll 1
            for (int step = chunk; step < chunk_end; step++) {
                wait_for_copies<STAGES - 1>();
                __syncwarp();
                multiply(acc, stream.ring + stream.stage * STAGE_BYTES, own, step - chunk);
                __syncwarp();
                stream.fetch();
            }
        }
        float4 *buffer = sums + turn % SUM_BUFFERS * WARPS * SUMS;
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < TOKEN_TILES; i++)
                if (i * 8 + lane % 4 * 2 < tokens)
                    buffer[warp * SUMS + (r * TOKEN_TILES + i) * WARP + lane] = {acc[r][i][0], acc[r][i][1], acc[r][i][2], acc[r][i][3]};
        cluster_barrier();
        finish(buffer, out, bias, shape, tokens, row_block, turn);
        if (SUM_BUFFERS == 1) cluster_barrier();
    }
    if (CLUSTER > 1) cluster_barrier();  // nobody leaves while another reads its sums
}
