// out = x W^T in fp32 for few rows of x, here called tokens, and W in int8 (w8.cuh).
//
// A warp owns a run of 16 rows each of W, whole: one run of memory, which it reads from end to end, STEP_UNITS units
// at a time, STAGES steps ahead into a ring of shared memory that no other warp touches. Blocks share x, as many
// columns of it as fit: then the sums so far wait in `out` while the next columns are brought. So a sum adds its
// groups one after the other in fp32, whatever the tokens beside it, the form and the columns that fit. Weights depend
// on nobody: the rings are filled before the wait for the previous kernel.
//
// Macros: TOKEN_TILES (8 tokens each), WARPS, STAGES, STEP_UNITS.
// Block: WARPS * 32, one on a multiprocessor. Grid: (any, ceil(tokens / TOKENS)).
#include "async_copy.cuh"
#include "mma.cuh"
#include "w8.cuh"

constexpr int THREADS = WARPS * WARP;
constexpr int TOKENS = 8 * TOKEN_TILES;
constexpr int STEP_K = UNIT_K * STEP_UNITS;
constexpr int CODE_BYTES = UNIT_BYTES * STEP_UNITS;
constexpr int STEP_SCALE_BYTES = SCALE_BYTES * STEP_UNITS;
constexpr int STAGE_BYTES = CODE_BYTES + STEP_SCALE_BYTES;
constexpr int X_PADDING = 32;  // rows begin 64 bytes apart, modulo the 128 of all banks: two of them meet in no bank
constexpr int BATCH = 4;       // loads of x under way in a thread

// A warp's weights in the order it needs them: of `chunk` steps of K all its row blocks, then of the next steps.
struct WeightStream {
    uint8 *ring;
    const uint8 *codes, *scales;  // this lane's, of the first step of the first row block
    int tiles, steps, chunk;      // row blocks of this warp, steps of each, steps for which x is held at a time
    int tile, step, begin, stage;  // what to fetch next, where its chunk begins; the ring's oldest stage

    __device__ __forceinline__ WeightStream(uint8 *ring, const uint8 *codes, const uint8 *scales, int first, int tiles,
                                            int steps, int chunk)
        : ring(ring), tiles(tiles), steps(steps), chunk(chunk), tile(0), step(0), begin(tiles > 0 ? 0 : steps),
          stage(0) {
        const int lane = threadIdx.x % WARP;
        this->codes = codes + size_t(first) * steps * CODE_BYTES + lane * 16;
        this->scales = scales + size_t(first) * steps * STEP_SCALE_BYTES + lane * 16;
    }

    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP;
        if (begin < steps) {
            const size_t place = tile * steps + step;
            uint8 *to = ring + stage * STAGE_BYTES + lane * 16;
#pragma unroll
            for (int u = 0; u < STEP_UNITS; u++)
                copy_async(to + u * UNIT_BYTES, codes + place * CODE_BYTES + u * UNIT_BYTES);
            if (lane < STEP_SCALE_BYTES / 16) copy_async(to + CODE_BYTES, scales + place * STEP_SCALE_BYTES);
            if (++step == min(begin + chunk, steps)) {
                if (++tile == tiles) tile = 0, begin += chunk;
                step = begin;
            }
        }
        commit_copies();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// The columns of x that are held: [tokens][row] in shared memory.
struct Tokens {
    Activation *x;
    int count, row;
    int offset[TOKEN_TILES];  // of what this lane takes of a unit; tokens past the end repeat the last

    __device__ __forceinline__ Tokens(Activation *x, int count, int row) : x(x), count(count), row(row) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) offset[i] = min(i * 8 + lane / 4, count - 1) * row + lane % 4 * 8;
    }

    // B fragments of both halves of a unit, its columns in the order in which codes_to_pairs gives those of W.
    __device__ __forceinline__ uint4 load(int tile, int k) const {
        return *reinterpret_cast<const uint4 *>(x + offset[tile] + k);
    }

    // `columns` of x [count, k], zeros past its end. Past the L1, as another kernel has just written them.
    __device__ __forceinline__ void stage(const Activation *from, int k, int begin, int columns) {
        const int pieces = columns / 8, all = count * pieces;
        for (int first = threadIdx.x; first < all; first += BATCH * THREADS) {
            uint4 values[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int piece = first + i * THREADS, token = piece / pieces, column = begin + piece % pieces * 8;
                const uint4 *place = reinterpret_cast<const uint4 *>(from + size_t(token) * k + column);
                values[i] = piece < all && column < k ? __ldcg(place) : uint4{};
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const int piece = first + i * THREADS;
                if (piece < all) *reinterpret_cast<uint4 *>(x + piece / pieces * row + piece % pieces * 8) = values[i];
            }
        }
    }
};

using Accumulators = float[TOKEN_TILES][4];

// acc += one stage of weights * columns `k` on of x.
__device__ __forceinline__ void multiply(Accumulators &acc, const uint8 *stage, const Tokens &tokens, int k) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int u = 0; u < STEP_UNITS; u++) {
        const uint4 codes = *reinterpret_cast<const uint4 *>(stage + u * UNIT_BYTES + lane * 16);
        const uint8 *scales = stage + CODE_BYTES + u * SCALE_BYTES + lane / 4 * 4;
        const float2 scale = __half22float2(*reinterpret_cast<const __half2 *>(scales));
        uint32 a[2][4];
        codes_to_pairs(codes.x, a[0][0], a[0][2]);
        codes_to_pairs(codes.z, a[0][1], a[0][3]);
        codes_to_pairs(codes.y, a[1][0], a[1][2]);
        codes_to_pairs(codes.w, a[1][1], a[1][3]);
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) {
            const uint4 b = tokens.load(i, k + u * UNIT_K);
            float part[4] = {};
            mma_m16n8k16<Activation>(part, a[0], {b.x, b.y});
            mma_m16n8k16<Activation>(part, a[1], {b.z, b.w});
            acc[i][0] = fmaf(scale.x, part[0], acc[i][0]);
            acc[i][1] = fmaf(scale.x, part[1], acc[i][1]);
            acc[i][2] = fmaf(scale.y, part[2], acc[i][2]);
            acc[i][3] = fmaf(scale.y, part[3], acc[i][3]);
        }
    }
}

struct Output {
    float *out;
    int tokens, n, stride;

    // Visits this lane's sums of the 16 rows from `row` on, with their places in out.
    template <typename Visit> __device__ __forceinline__ void each(Accumulators &acc, int row, Visit visit) const {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int token = i * 8 + lane % 4 * 2 + j % 2, own = row + lane / 4 + j / 2 * 8;
                if (token < tokens && own < n) visit(acc[i][j], out[size_t(token) * stride + own]);
            }
    }
};

// `steps` of a row block of W; x is held for `chunk` of them at a time. Rows of out lie `stride` apart.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
w8_linear(const Activation *x, const uint8 *codes, const uint8 *scales, float *out, int total_tokens, int n, int k,
          int steps, int chunk, int stride) {
    let_next_kernel_start();
    extern __shared__ __align__(16) uint8 shared[];
    const int warp = threadIdx.x / WARP, all = (n + UNIT_ROWS - 1) / UNIT_ROWS;
    const int worker = blockIdx.x * WARPS + warp, workers = gridDim.x * WARPS;
    const int first = all * worker / workers, tiles = all * (worker + 1) / workers - first;
    WeightStream stream(shared + warp * STAGES * STAGE_BYTES, codes, scales, first, tiles, steps, chunk);
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) stream.fetch();

    const int first_token = blockIdx.y * TOKENS;
    Tokens tokens(reinterpret_cast<Activation *>(shared + WARPS * STAGES * STAGE_BYTES),
                  min(TOKENS, total_tokens - first_token), chunk * STEP_K + X_PADDING);
    const Output output = {out + size_t(first_token) * stride, tokens.count, n, stride};

    wait_for_previous_kernel();
#pragma unroll 1
    for (int begin = 0; begin < steps; begin += chunk) {
        const int end = min(begin + chunk, steps);
        if (begin > 0) __syncthreads();  // nobody reads the columns before any more
        tokens.stage(x + size_t(first_token) * k, k, begin * STEP_K, (end - begin) * STEP_K);
        __syncthreads();
#pragma unroll 1
        for (int tile = 0; tile < tiles; tile++) {
            const int row = (first + tile) * UNIT_ROWS;
            Accumulators acc = {};
            if (begin > 0) output.each(acc, row, [](float &sum, float &place) { sum = place; });
#pragma unroll 1
            for (int step = begin; step < end; step++) {
                wait_for_copies<STAGES - 1>();
                __syncwarp();
                multiply(acc, stream.ring + stream.stage * STAGE_BYTES, tokens, (step - begin) * STEP_K);
                __syncwarp();
                stream.fetch();
            }
            output.each(acc, row, [](float &sum, float &place) { place = sum; });
        }
    }
}
