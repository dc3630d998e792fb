// out = x W^T (+ bias, or silu(gate) * up) for few rows of x, here called tokens, and W in four bits (w4.cuh).
//
// ROWS rows of W are multiplied at a time, which is a turn, by a team of SLICES warps; TEAMS of them make a block. Every
// warp of a team owns a slice of K (of a cluster's blocks' too, if CLUSTER > 1), and the teams share the slices of x. A
// warp keeps its weights STAGES steps ahead in a ring of shared memory that no other warp touches. After some rounds, in
// each of which every team has a turn, the slices' sums meet in shared memory and are added in the order of K. Blocks walk
// over the rows with a grid's stride, and the rings run on across turns. Weights depend on nobody, so the rings are filled
// before the wait for the previous kernel.
//
// Codes are multiplied as they stand; a group's fp32 sum is scaled, and its minimum enters by the group's sum of x.
//
// ADD: `out` is fp32, and the product is added to it.
//
// Macros: TOKEN_TILES (8 tokens each), ROW_TILES (16 rows of W each), TEAMS, SLICES, CLUSTER, STAGES, STEP_UNITS (64 k each,
// all in one group, or in STEP_SCALES = 2 groups of 32); RESIDENT, the blocks whose registers shall fit on a
// multiprocessor; ADD.
// Block: TEAMS * SLICES * 32. Grid: (CLUSTER * any, ceil(tokens / TOKENS)).
#include "async_copy.cuh"
#include "mma.cuh"
#include "w4.cuh"

constexpr int WARPS = TEAMS * SLICES;
constexpr int THREADS = WARPS * WARP;
constexpr int TOKENS = 8 * TOKEN_TILES;
constexpr int ROWS = UNIT_ROWS * ROW_TILES;
constexpr int STEP_K = UNIT_K * STEP_UNITS;
constexpr int SPAN_K = STEP_K / STEP_SCALES;  // k of a step that share a scale
constexpr int CODE_BYTES = ROW_TILES * STEP_UNITS * UNIT_BYTES;
constexpr int STAGE_BYTES = CODE_BYTES + ROW_TILES * STEP_SCALES * SCALE_BYTES;
constexpr int ROW_PAIRS = 8 * ROW_TILES;  // rows g and g + 8 of every 16
constexpr int CHAINS = ROW_TILES * TOKEN_TILES <= 2 ? 2 : 1;  // products wait long for the one before, if few are beside it
constexpr int BATCH = WARPS * RESIDENT > 12 ? 8 : 12;         // loads of x under way in a thread, as registers allow
constexpr int X_PADDING = 8;                                  // keeps ldmatrix free of bank conflicts
constexpr bool ALONE = SLICES * CLUSTER == 1;                 // a warp has the whole sum

static_assert(TEAMS == 1 || SLICES < 16, "every slice has a barrier");

#if ADD
using Result = float;
#else
using Result = Activation;
#endif

struct Shape {
    int n, k, units, groups, group_shift;
    bool silu;

    // A block's turn `turn` begins at this block of ROWS rows. A team takes every TEAMS-th turn.
    __device__ __forceinline__ int row_block(int turn) const { return blockIdx.x / CLUSTER + turn * stride(); }
    __device__ __forceinline__ int stride() const { return gridDim.x / CLUSTER; }
    __device__ __forceinline__ int turns() const { return ((n + ROWS - 1) / ROWS - row_block(0) + stride() - 1) / stride(); }
};

// The first token of a block; grid.y runs over the tokens.
__device__ __forceinline__ int first_token() { return blockIdx.y * TOKENS; }

__device__ __forceinline__ int cluster_rank() {
    if constexpr (CLUSTER == 1) return 0;
    uint32 rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// Meets the warps that share a slice of x.
__device__ __forceinline__ void sync_slice() {
    if constexpr (TEAMS == 1) __syncwarp();
    else asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.x / WARP % SLICES + 1), "n"(TEAMS * WARP) : "memory");
}

// Into the shared memory of the cluster's block `rank`, where `own` is this block's counterpart.
__device__ __forceinline__ void store_shared_of(float4 *own, int rank, float4 value) {
    uint32 address;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared_address(own)), "r"(rank));
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1,%2,%3,%4};" ::"r"(address), "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w) : "memory");
}

// A warp's weights in the order it needs them: its steps of K for one turn of its team after the other.
struct WeightStream {
    const Shape &shape;
    uint8 *ring;
    const uint8 *code, *scale;  // this lane's: of the next step, and of the first group of its row
    int begin, end;             // the steps of a turn
    int step, left, stage;      // the next one; how many remain in all turns; the ring's oldest stage

    static constexpr int PIECES = STEP_SCALES * SCALE_BYTES / 16;
    static constexpr int STEP_BYTES = STEP_UNITS * UNIT_BYTES;

    __device__ __forceinline__ WeightStream(const Shape &shape, uint8 *ring, const uint8 *codes, const uint8 *scales, int team, int begin, int end)
        : shape(shape), ring(ring), begin(begin), end(end), step(begin), stage(0) {
        const int lane = threadIdx.x % WARP;
        const size_t tile = size_t(shape.row_block(team)) * ROW_TILES;
        left = (shape.turns() - team + TEAMS - 1) / TEAMS * (end - begin);
        code = codes + tile * code_bytes() + begin * STEP_BYTES + lane * 16;
        scale = scales + tile * scale_bytes() + lane / PIECES * scale_bytes() + lane % PIECES * 16;
    }

    // Of 16 rows.
    __device__ __forceinline__ int code_bytes() const { return shape.units * UNIT_BYTES; }
    __device__ __forceinline__ int scale_bytes() const { return shape.groups * SCALE_BYTES; }

    __device__ __forceinline__ void fetch() {
        const int lane = threadIdx.x % WARP;
        if (left > 0) {
            uint8 *to = ring + stage * STAGE_BYTES + lane * 16;
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
                for (int u = 0; u < STEP_UNITS; u++)
                    copy_async(to + r * STEP_BYTES + u * UNIT_BYTES, code + r * code_bytes() + u * UNIT_BYTES);
            if (lane < ROW_TILES * PIECES) copy_async(to + CODE_BYTES, scale + (step * STEP_K >> shape.group_shift) * SCALE_BYTES);
            left--;
            code += STEP_BYTES;
            if (++step == end) {
                step = begin;
                code += shape.stride() * TEAMS * ROW_TILES * code_bytes() - (end - begin) * STEP_BYTES;
                scale += shape.stride() * TEAMS * ROW_TILES * scale_bytes();
            }
        }
        commit_copies();
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
};

// A slice's columns of x in shared memory, and their sums over every span of SPAN_K that shares a scale.
struct Tokens {
    Activation *x;            // [tokens][row]
    float *sums;              // [spans][1 << sum_shift], the tokens rounded up
    int count, row, sum_shift;
    int offset[TOKEN_TILES];  // of the row whose address this lane gives to ldmatrix; tokens past the end repeat the last

    __device__ __forceinline__ Tokens(Activation *x, float *sums, int count, int row, int sum_shift)
        : x(x), sums(sums), count(count), row(row), sum_shift(sum_shift) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) offset[i] = min(i * 8 + lane % 8, count - 1) * row + lane / 8 * 8;
    }

    // B fragments of two k-steps: b[0], b[1] of the first, b[2], b[3] of the second.
    __device__ __forceinline__ void load(uint32 (&b)[4], int tile, int k) const { ldmatrix_x4(b, x + offset[tile] + k); }

    // Many loads at once, past the L1, as another kernel has just written x; and not in the queue behind the ring's copies.
    // Pieces are 16 bytes; a token's are counted up to a power of two, which spares divisions.
    __device__ __forceinline__ void stage(const Activation *from, int k, int begin, int steps, int team) {
        constexpr int LOADERS = TEAMS * WARP;
        const int pieces = steps * STEP_K / 8, existing = k / 8 - begin * STEP_K / 8;
        const int shift = WARP - __clz(pieces - 1), all = count << shift;
        from += begin * STEP_K;
        sync_slice();
        for (int done = team * WARP; done < all; done += BATCH * LOADERS) {
            const int first = done + threadIdx.x % WARP;
            uint4 values[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (done + i * LOADERS >= all) break;  // few tokens: few loads
                const int token = (first + i * LOADERS) >> shift, piece = (first + i * LOADERS) & ((1 << shift) - 1);
                values[i] = token < count && piece < existing ? __ldcg(reinterpret_cast<const uint4 *>(from + token * k + piece * 8)) : uint4{};
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                if (done + i * LOADERS >= all) break;
                const int token = (first + i * LOADERS) >> shift, piece = (first + i * LOADERS) & ((1 << shift) - 1);
                if (token < count && piece < pieces) *reinterpret_cast<uint4 *>(x + token * row + piece * 8) = values[i];
            }
        }
        sync_slice();
        sum(steps * STEP_SCALES, team);
        sync_slice();
    }

    // By products with ones: a column is a span of a token, all rows hold its sum.
    __device__ __forceinline__ void sum(int spans, int team) {
        const int lane = threadIdx.x % WARP;
        const Activation2 pair = {from_float<Activation>(1.f), from_float<Activation>(1.f)};
        const uint32 bits = *reinterpret_cast<const uint32 *>(&pair);
        const uint32 ones[4] = {bits, bits, bits, bits};
#pragma unroll 2
        for (int column = team * 8; column < spans << sum_shift; column += TEAMS * 8) {
            const int own = column + lane % 8, token = own & ((1 << sum_shift) - 1);
            const Activation *from = x + min(token, count - 1) * row + min(own >> sum_shift, spans - 1) * SPAN_K + lane / 8 * 8;
            float parts[SPAN_K / 32][4] = {};
#pragma unroll
            for (int i = 0; i < SPAN_K / 32; i++) {
                uint32 b[4];
                ldmatrix_x4(b, from + i * 32);
                mma_m16n8k16<Activation>(parts[i], ones, {b[0], b[1]});
                mma_m16n8k16<Activation>(parts[i], ones, {b[2], b[3]});
            }
            float2 total = {0.f, 0.f};
#pragma unroll
            for (int i = 0; i < SPAN_K / 32; i++) total.x += parts[i][0], total.y += parts[i][1];
            if (lane < 4) *reinterpret_cast<float2 *>(sums + column + lane * 2) = total;
        }
    }
};

using Accumulators = float[ROW_TILES][TOKEN_TILES][4];

// acc += factor * part + summand * sum(x), for one span.
__device__ __forceinline__ void add_scaled(Accumulators &acc, const Accumulators (&parts)[CHAINS], const uint8 *scales, const float *sums) {
    const int lane = threadIdx.x % WARP;
    float2 sum[TOKEN_TILES];
#pragma unroll
    for (int i = 0; i < TOKEN_TILES; i++) sum[i] = *reinterpret_cast<const float2 *>(sums + i * 8 + lane % 4 * 2);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        const RowScales scale = scales_of_raw(unpack_scales(reinterpret_cast<const uint2 *>(scales + r * STEP_SCALES * SCALE_BYTES)[lane / 4]));
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) {
            float part[4];
#pragma unroll
            for (int j = 0; j < 4; j++) part[j] = CHAINS == 2 ? parts[0][r][i][j] + parts[CHAINS - 1][r][i][j] : parts[0][r][i][j];
            acc[r][i][0] = fmaf(scale.upper.x, part[0], fmaf(scale.upper.y, sum[i].x, acc[r][i][0]));
            acc[r][i][1] = fmaf(scale.upper.x, part[1], fmaf(scale.upper.y, sum[i].y, acc[r][i][1]));
            acc[r][i][2] = fmaf(scale.lower.x, part[2], fmaf(scale.lower.y, sum[i].x, acc[r][i][2]));
            acc[r][i][3] = fmaf(scale.lower.x, part[3], fmaf(scale.lower.y, sum[i].y, acc[r][i][3]));
        }
    }
}

// acc += one stage of weights * step `step` of the staged x.
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
        Accumulators parts[CHAINS] = {};
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
                    codes_to_raw_fragment(words[r][k / 16 + half], a);
#pragma unroll
                    for (int i = 0; i < TOKEN_TILES; i++)
                        mma_m16n8k16<Activation>(parts[half % CHAINS][r][i], a, {b[i][2 * half], b[i][2 * half + 1]});
                }
        }
        add_scaled(acc, parts, stage + CODE_BYTES + span * SCALE_BYTES, tokens.sums + ((step * STEP_SCALES + span) << tokens.sum_shift));
    }
}

__device__ __forceinline__ void put(Activation *to, float value) { *to = from_float<Activation>(value); }
// Atomic so that nobody waits for the old value. One thread of the kernel adds to an element, so the order is fixed.
__device__ __forceinline__ void put(float *to, float value) { atomicAdd(to, value); }

// Sums of rows g and g + 8 for two tokens, and where they belong. Elements of a turn: [ROW_PAIRS][1 << pair_shift].
struct Output {
    Result *out;
    const Activation *bias;
    const Shape &shape;
    int tokens, pair_shift;

    // One token's values of rows `row` and `row + 8`; with silu they are gate and up.
    __device__ __forceinline__ void store(int token, int row, float upper, float lower) const {
        if (bias) {
            if (row < shape.n) upper += to_float(bias[row]);
            if (row + 8 < shape.n) lower += to_float(bias[row + 8]);
        }
        Result *to = out + size_t(first_token() + token) * (shape.silu ? shape.n / 2 : shape.n);
        if (shape.silu) {
            if (row < shape.n) put(to + row / 16 * 8 + row % 8, upper / (1.f + __expf(-upper)) * lower);
        } else {
            if (row < shape.n) put(to + row, upper);
            if (row + 8 < shape.n) put(to + row + 8, lower);
        }
    }

    // Of rows `place` and `place + 8` in 16 of a turn's rows, tokens 2 * pair and 2 * pair + 1.
    __device__ __forceinline__ void store(int turn, int place, int pair, float4 total) const {
        const int row = shape.row_block(turn) * ROWS + place / 8 * UNIT_ROWS + place % 8;
        if (2 * pair < tokens) store(2 * pair, row, total.x, total.z);
        if (2 * pair + 1 < tokens) store(2 * pair + 1, row, total.y, total.w);
    }

    // Which turn an element belongs to, when those of some turns are counted on.
    __device__ __forceinline__ int turn_of(int index) const { return (index >> pair_shift) / ROW_PAIRS; }

    __device__ __forceinline__ void store(int first, int index, float4 total) const {
        store(first + turn_of(index), (index >> pair_shift) % ROW_PAIRS, index & ((1 << pair_shift) - 1), total);
    }
};

__device__ __forceinline__ float4 operator+(float4 a, float4 b) { return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w}; }

// By halves, so that 16 warps add exactly as two blocks of 8 do.
template <int count> __device__ __forceinline__ float4 sum_of(const float4 *parts, int stride) {
    if constexpr (count == 1) return parts[0];
    else return sum_of<count / 2>(parts, stride) + sum_of<count - count / 2>(parts + count / 2 * stride, stride);
}

// Adds the slices' sums of `turns` turns in the order of K and stores them. sums: [turns][SLICES][elements]; `gathered`, for
// a cluster: what its blocks send to the one that stores, [its share of turns * elements][CLUSTER].
__device__ __forceinline__ void finish(const float4 *sums, float4 *gathered, const Output &output, int turn, int turns) {
    const int elements = ROW_PAIRS << output.pair_shift, all = turns * elements;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < all; i += THREADS) {
        const float4 total = sum_of<SLICES>(sums + i + output.turn_of(i) * (SLICES - 1) * elements, elements);
        if constexpr (CLUSTER == 1) output.store(turn, i, total);
        else store_shared_of(gathered + i / CLUSTER * CLUSTER + cluster_rank(), i % CLUSTER, total);
    }
    if constexpr (CLUSTER > 1) {
        cluster_arrive();
        cluster_wait();
#pragma unroll 1
        for (int i = threadIdx.x * CLUSTER + cluster_rank(); i < all; i += THREADS * CLUSTER)
            output.store(turn, i, sum_of<CLUSTER>(gathered + i / CLUSTER * CLUSTER, 1));
    }
}

#if CLUSTER > 1
#define CLUSTER_SHAPE __cluster_dims__(CLUSTER, 1, 1)
#else
#define CLUSTER_SHAPE
#endif

// A warp's sums of its team's turn `turn`, beside the other slices' in `sums` [elements], or all there is to store.
__device__ __forceinline__ void hand_over(const Accumulators &acc, float4 *sums, const Output &output, int turn) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int i = 0; i < TOKEN_TILES; i++) {
            const int place = r * 8 + lane / 4, pair = i * 4 + lane % 4;
            const float4 sum = {acc[r][i][0], acc[r][i][1], acc[r][i][2], acc[r][i][3]};
            if constexpr (ALONE) output.store(turn, place, pair, sum);
            else if (pair < 1 << output.pair_shift) sums[(place << output.pair_shift) + pair] = sum;
        }
}

// `pair_shift`: 2 << pair_shift is at least the tokens of a block. `chunk_steps` steps of a slice of x are held at once, all
// of them if they fit. After `rounds_at_once` rounds, a power of two, sums are added; where there is one round only, they
// lie where x was.
extern "C" __global__ void CLUSTER_SHAPE __launch_bounds__(THREADS, RESIDENT)
w4_linear(const Activation *x, const uint8 *codes, const uint8 *scales, const Activation *bias, Result *out,
          int total_tokens, int n, int k, int units, int groups, int group_shift, int silu,
          int pair_shift, int chunk_steps, int rounds_at_once) {
    let_next_kernel_start();
    if constexpr (CLUSTER > 1) cluster_arrive();
    extern __shared__ __align__(16) uint8 shared[];
    const int warp = threadIdx.x / WARP, team = warp / SLICES, slice = warp % SLICES;
    const Shape shape = {n, k, units, groups, group_shift, !ADD && silu != 0};
    const int steps = units / STEP_UNITS, part = cluster_rank() * SLICES + slice;
    const int begin = steps * part / (CLUSTER * SLICES), end = steps * (part + 1) / (CLUSTER * SLICES);
    const int turns = shape.turns(), rounds = (turns + TEAMS - 1) / TEAMS;
    WeightStream stream(shape, shared + warp * STAGES * STAGE_BYTES, codes, scales, team, begin, end);
#pragma unroll 1
    for (int i = 0; i < STAGES; i++) stream.fetch();

    const int elements = ROW_PAIRS << pair_shift, sum_elements = rounds_at_once * TEAMS * elements;
    float4 *gathered = reinterpret_cast<float4 *>(shared + WARPS * STAGES * STAGE_BYTES);
    float4 *sums = gathered + (CLUSTER == 1 ? 0 : rounds > 1 ? 2 * sum_elements : sum_elements);
    uint8 *x_memory = reinterpret_cast<uint8 *>(sums + (ALONE || rounds == 1 ? 0 : SLICES * sum_elements));
    const int x_row = chunk_steps * STEP_K + X_PADDING, x_bytes = min(TOKENS, total_tokens) * x_row * 2;
    const int x_sums = ((chunk_steps * STEP_SCALES) << (pair_shift + 1)) + TOKENS;
    Tokens tokens(reinterpret_cast<Activation *>(x_memory + slice * x_bytes), reinterpret_cast<float *>(x_memory + SLICES * x_bytes) + slice * x_sums,
                  min(TOKENS, total_tokens - first_token()), x_row, pair_shift + 1);
    const Output output = {out, bias, shape, tokens.count, pair_shift};

    wait_for_previous_kernel();
    if constexpr (CLUSTER > 1) cluster_wait();  // all blocks run: their memory may be written to
    for (int round = 0; round < rounds; round++) {
        const int slot = round & (rounds_at_once - 1), turn = round * TEAMS + team;
        Accumulators acc = {};
        for (int chunk = begin; chunk < end; chunk += chunk_steps) {
            const int chunk_end = min(chunk + chunk_steps, end);
            if (round == 0 || end - begin > chunk_steps) tokens.stage(x + size_t(first_token()) * k, k, chunk, chunk_end - chunk, team);
            if (turn >= turns) continue;
#pragma unroll 1
            for (int step = chunk; step < chunk_end; step++) {
                wait_for_copies<STAGES - 1>();
                __syncwarp();
                multiply(acc, stream.ring + stream.stage * STAGE_BYTES, tokens, step - chunk);
                __syncwarp();
                stream.fetch();
            }
        }
        if (!ALONE && rounds == 1) __syncthreads();  // nobody reads x any more
        hand_over(acc, sums + ((slot * TEAMS + team) * SLICES + slice) * elements, output, turn);
        if (!ALONE && (slot + 1 == rounds_at_once || round + 1 == rounds)) {
            finish(sums, gathered + (round & rounds_at_once ? sum_elements : 0), output, (round - slot) * TEAMS, (slot + 1) * TEAMS);
            if (CLUSTER == 1 && round + 1 < rounds) __syncthreads();  // a cluster has met already
        }
    }
}
