// out [M, N] = x [M, K] W^T (+ bias) for four-bit weights W [N, K] and many rows of x, on SM90a.
//
// A tile of TILE_N rows of W and TILE_M rows of x is the product D[n, m] = W x^T: the weights are the operand that wgmma
// takes from registers, where the packed layout (w4.cuh) already has its order. Pieces of STAGE_UNITS * 64 k go through
// a ring of STAGES stages, which a warp of its own fills; each of WARPGROUPS warpgroups turns codes of 64 rows into
// weights and multiplies.
//
// A cluster is MULTICAST tiles that are neighbours in N, which share what they fetch of x, times SPLITS parts of K,
// whose sums are added in the order of K. The result of a row of x depends on SPLITS, not on the other rows.
//
// Macros: ACTIVATION_BF16; SILU (rows of W are gate and up in turns of 8, out [M, N/2] = silu(gate) * up), or ADD (out
// is fp32, and the product is added to it); STAGE_UNITS; STAGE_GROUPS (groups in a piece, at least 1); WARPGROUPS,
// TILE_M, SPLITS, MULTICAST, STAGES; BATCH, the steps of 16 k whose weights are converted at a time; RESIDENT, the
// blocks that shall fit on one multiprocessor.
#include "tma.cuh"
#include "w4.cuh"
#include "wgmma.cuh"

constexpr int STEPS = STAGE_UNITS * UNIT_WORDS;  // of 16 k, in a piece
constexpr int BATCHES = TILE_M < 256 ? STEPS / BATCH : 2;  // that have registers for their weights; 256 rows leave few

constexpr int TILE_N = 64 * WARPGROUPS;
constexpr int TILE_UNITS = TILE_N / UNIT_ROWS;
constexpr int CONSUMERS = 128 * WARPGROUPS;
constexpr int THREADS = CONSUMERS + WARP;
constexpr int CLUSTER = MULTICAST * SPLITS;

constexpr int X_BYTES = TILE_M * UNIT_K * 2;  // of a unit
constexpr int ROW_CODE_BYTES = STAGE_UNITS * UNIT_BYTES, ROW_SCALE_BYTES = STAGE_GROUPS * SCALE_BYTES;  // of 16 rows
constexpr int CODES_AT = STAGE_UNITS * X_BYTES, SCALES_AT = CODES_AT + TILE_UNITS * ROW_CODE_BYTES;
constexpr int FETCHED_BYTES = SCALES_AT + TILE_UNITS * ROW_SCALE_BYTES;
constexpr int STAGE_BYTES = (FETCHED_BYTES + 1023) / 1024 * 1024;

// The parts of K are added by shares of the tile, one for each block: first of rows of x, then of columns too.
constexpr int FRAGMENTS = TILE_M / 8;  // an accumulator is FRAGMENTS times 8 rows of x
constexpr int ROW_SHARES = SPLITS < FRAGMENTS ? SPLITS : FRAGMENTS, COLUMN_SHARES = SPLITS / ROW_SHARES;
constexpr int SHARE_THREADS = CONSUMERS / COLUMN_SHARES;  // whose columns are in the share
constexpr int OUT_FRAGMENTS = FRAGMENTS / ROW_SHARES;
constexpr int OUT_ROWS = 8 * OUT_FRAGMENTS;
constexpr int OUT_COLUMNS = (SILU ? TILE_N / 2 : TILE_N) / COLUMN_SHARES;
constexpr int STAGING_STRIDE = OUT_COLUMNS + 8;  // 16 bytes more, against bank conflicts

// The sums of few rows are sent to a place of their own behind the ring; those of many are left in the ring and fetched.
constexpr bool SENT = SPLITS > 1 && TILE_M <= 32;
constexpr int EXCHANGE_BYTES = SPLITS > 1 ? TILE_M * TILE_N * 4 : 0;
constexpr int STAGING_BYTES = ADD ? 0 : OUT_ROWS * STAGING_STRIDE * 2;
constexpr int RING_BYTES = STAGES * STAGE_BYTES;
constexpr int BARRIERS_AT = RING_BYTES + (SENT ? EXCHANGE_BYTES + STAGING_BYTES : 0);

static_assert(SENT || EXCHANGE_BYTES + STAGING_BYTES <= RING_BYTES, "results are staged in the ring");
static_assert(!(SILU && ADD), "silu(gate) * up is not added");
static_assert(STEPS % (2 * BATCH) == 0, "a piece is divided into batches, at least two");
static_assert(FRAGMENTS % MULTICAST == 0 && FRAGMENTS % ROW_SHARES == 0 && SPLITS % ROW_SHARES == 0,
              "TILE_M is divided in eights");
static_assert(SENT || COLUMN_SHARES == 1, "what is fetched is a share of the rows");

#if ADD
using Result = float;
#else
using Result = Activation;
#endif

struct Operands {
    const TensorMap &x;       // [M, K], boxes of TILE_M / MULTICAST rows x 64 k
    const TensorMap &codes;   // [N/16, K/64 * 512 bytes], boxes of TILE_UNITS x ROW_CODE_BYTES
    const TensorMap &scales;  // [N/16, groups * 64 bytes], boxes of TILE_UNITS x ROW_SCALE_BYTES
    int group_shift;          // a piece, shifted right by this, is its group, where STAGE_GROUPS is 1
};

struct Tile {
    int first_column;         // of out, before silu: a row of W
    int first_row;            // of x and out
    int first_piece, pieces;
    int peer;                 // which of the MULTICAST neighbours
    int split;                // which part of K
};

// Pieces on their way from global memory to the tensor cores, by their addresses in shared memory.
struct Ring {
    uint32 stages;
    uint32 full;   // barriers: a piece is there
    uint32 empty;  // barriers: all warps that read it have done so, in all blocks that share x

    // The barrier of the sums that are sent.
    __device__ __forceinline__ uint32 gathered() const { return empty + STAGES * 8; }
};

// A stage and the parity of its current use.
struct Place {
    int stage = 0;
    uint32 parity = 0;

    __device__ void advance() {
        stage = stage + 1 == STAGES ? 0 : stage + 1;
        parity ^= stage == 0;
    }
    __device__ uint32 in(uint32 first, uint32 bytes) const { return first + stage * bytes; }
};

__device__ __forceinline__ void open_barriers(const Ring &ring) {
    for (int stage = 0; stage < STAGES; stage++) {
        barrier_init(ring.full + stage * 8, 1);
        barrier_init(ring.empty + stage * 8, MULTICAST * CONSUMERS / WARP);
    }
    if constexpr (SENT) barrier_init(ring.gathered(), 1);
    fence_barrier_init();
    if constexpr (SENT) barrier_expect(ring.gathered(), EXCHANGE_BYTES);
}

// Nobody goes on before the cluster's barriers are open.
__device__ __forceinline__ void blocks_meet() {
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    } else __syncthreads();
}

// Bands of 8 tiles in M are swept along N, so that both operands of the tiles under way stay in the L2 cache.
__device__ __forceinline__ Tile choose_tile(int rows, int all_pieces) {
    constexpr int BAND = 8;
    const int tiles_m = (rows + TILE_M - 1) / TILE_M;
    const int clusters_n = gridDim.x / CLUSTER / tiles_m;
    const int cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const int band = cluster / (BAND * clusters_n), place = cluster % (BAND * clusters_n);
    const int height = min(BAND, tiles_m - band * BAND);
    const int split = rank / MULTICAST, peer = rank % MULTICAST;
    const int first_piece = split * all_pieces / SPLITS;
    const int pieces = (split + 1) * all_pieces / SPLITS - first_piece;
    const int tile_n = place / height * MULTICAST + peer, tile_m = band * BAND + place % height;
    return {tile_n * TILE_N, tile_m * TILE_M, first_piece, pieces, peer, split};
}

__device__ __forceinline__ void fetch_weights(const Operands &from, const Tile &tile, const Ring &ring, Place place, int step) {
    const int piece = tile.first_piece + step, unit_row = tile.first_column / UNIT_ROWS;
    const int group = STAGE_GROUPS == 1 ? piece >> from.group_shift : piece * STAGE_GROUPS;
    const uint32 stage = place.in(ring.stages, STAGE_BYTES), full = place.in(ring.full, 8);
    barrier_expect(full, FETCHED_BYTES);
    copy_box(stage + CODES_AT, from.codes, piece * (ROW_CODE_BYTES / 8), unit_row, full);
    copy_box(stage + SCALES_AT, from.scales, group * (SCALE_BYTES / 2), unit_row, full);
}

// Every block of MULTICAST fetches its share of the rows of x, for all of them.
__device__ __forceinline__ void fetch_x(const Operands &from, const Tile &tile, const Ring &ring, Place place, int step) {
    constexpr int SHARE = TILE_M / MULTICAST;
    const uint32 to = place.in(ring.stages, STAGE_BYTES) + tile.peer * SHARE * UNIT_K * 2, full = place.in(ring.full, 8);
    const int row = tile.first_row + tile.peer * SHARE;
#pragma unroll
    for (int unit = 0; unit < STAGE_UNITS; unit++) {
        const int column = ((tile.first_piece + step) * STAGE_UNITS + unit) * UNIT_K;
        if constexpr (MULTICAST == 1) copy_box(to + unit * X_BYTES, from.x, column, row, full);
        else copy_box_to_many(to + unit * X_BYTES, from.x, column, row, full, ((1 << MULTICAST) - 1) << (tile.split * MULTICAST));
    }
}

// The weights that the ring has room for at first.
__device__ __forceinline__ void fetch_first_weights(const Operands &from, const Tile &tile, const Ring &ring) {
    Place place;
    for (int step = 0; step < min(tile.pieces, STAGES); step++, place.advance()) fetch_weights(from, tile, ring, place, step);
}

// All that follows.
__device__ __forceinline__ void produce(const Operands &from, const Tile &tile, const Ring &ring) {
    const int ahead = min(tile.pieces, STAGES);
    wait_for_previous_kernel();
    Place place;
    for (int step = 0; step < ahead; step++, place.advance()) fetch_x(from, tile, ring, place, step);
    for (int step = ahead; step < tile.pieces; step++, place.advance()) {
        barrier_wait(place.in(ring.empty, 8), place.parity ^ 1);
        fetch_weights(from, tile, ring, place, step);
        fetch_x(from, tile, ring, place, step);
    }
}

__device__ __forceinline__ uint4 read_16_bytes(uint32 address) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(address));
    return value;
}

__device__ __forceinline__ uint2 read_8_bytes(uint32 address) {
    uint2 value;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(value.x), "=r"(value.y) : "r"(address));
    return value;
}

// Codes become weights: (q - 8) * s + z. `scales`: (s, z) of rows g and g + 8.
__device__ __forceinline__ void convert(uint32 word, uint2 scales, uint32 (&a)[4]) {
    const uint32 rows[2] = {scales.x, scales.y};
    codes_to_fragment(word, a);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 pair = *reinterpret_cast<const __half2 *>(&rows[i % 2]);
#if ACTIVATION_BF16
        const float2 both = __half22float2(pair);
        const Activation2 s = __float2bfloat162_rn(both.x), z = __float2bfloat162_rn(both.y);
#else
        const Activation2 s = __low2half2(pair), z = __high2half2(pair);
#endif
        const Activation2 weights = __hfma2(*reinterpret_cast<const Activation2 *>(&a[i]), s, z);
        a[i] = *reinterpret_cast<const uint32 *>(&weights);
    }
}

// The product of the block's pieces. BATCHES are under way at a time: the weights of one are converted while those before
// are multiplied.
__device__ __forceinline__ void multiply(const Tile &tile, const Ring &ring, int warp, int lane, float (&d)[TILE_M / 2]) {
    const uint32 codes_at = ring.stages + CODES_AT + warp * ROW_CODE_BYTES + lane * 16;
    const uint32 scales_at = ring.stages + SCALES_AT + warp * ROW_SCALE_BYTES + lane / 4 * 8;
    uint32 previous_empty = ring.empty;
    uint32 a[BATCHES * BATCH][4];
    Place place;
#pragma unroll 1
    for (int step = 0; step < tile.pieces; step++, place.advance()) {
        const uint32 offset = place.in(0, STAGE_BYTES);
        // From one lane: so the compiler keeps descriptors in registers of the warp. No sum carries into their upper half.
        const uint64 x = swizzled_descriptor(__shfl_sync(0xffffffffu, ring.stages + offset, 0));
        const uint32 x_low = static_cast<uint32>(x);
        barrier_wait(place.in(ring.full, 8), place.parity);
        uint2 scales[STAGE_GROUPS];
#pragma unroll
        for (int i = 0; i < STAGE_GROUPS; i++) scales[i] = read_8_bytes(scales_at + offset + i * SCALE_BYTES);
        uint4 codes;
#pragma unroll
        for (int first = 0; first < STEPS; first += BATCH) {
            if (first % UNIT_WORDS == 0) codes = read_16_bytes(codes_at + offset + first / UNIT_WORDS * UNIT_BYTES);
            const uint32 words[UNIT_WORDS] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (int i = first; i < first + BATCH; i++)
                convert(words[i % UNIT_WORDS], scales[i * STAGE_GROUPS / STEPS], a[i % (BATCHES * BATCH)]);
            wgmma_begin();
            wgmma_wait<BATCHES - 2>();
            // The stage before has been read. Nobody waits for the last ones, and the neighbours may be gone by then.
            if (first == (BATCHES - 2) * BATCH && step >= 1 && step - 1 + STAGES < tile.pieces && lane < MULTICAST)
                barrier_arrive(previous_empty, tile.split * MULTICAST + lane);
#pragma unroll
            for (int i = first; i < first + BATCH; i++) {
                const uint64 b = x & 0xffffffff00000000ull | x_low + (i / UNIT_WORDS * X_BYTES + i % UNIT_WORDS * 32) / 16;
                wgmma(d, a[i % (BATCHES * BATCH)], b, step + i > 0);
            }
            wgmma_commit();
            wgmma_begin();  // keeps the compiler from converting the next weights between these wgmma
        }
        previous_empty = place.in(ring.empty, 8);
    }
    wgmma_wait<0>();
    wgmma_settle(d);
}

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// What of the tile this block writes: `split` becomes the share of its rows.
__device__ __forceinline__ Tile share_of(const Tile &tile) {
    Tile share = tile;
    share.split = tile.split / COLUMN_SHARES;
    share.first_column += tile.split % COLUMN_SHARES * (TILE_N / COLUMN_SHARES);
    return share;
}

// Adds the parts of K, in their order: read(split, j) is this thread's part of fragment j.
template <typename Read> __device__ __forceinline__ void add_splits(float (&sum)[OUT_FRAGMENTS * 4], Read read) {
#pragma unroll
    for (int j = 0; j < OUT_FRAGMENTS; j++) {
        float4 parts[SPLITS];
#pragma unroll
        for (int split = 0; split < SPLITS; split++) parts[split] = read(split, j);
        float4 total = parts[0];
#pragma unroll
        for (int split = 1; split < SPLITS; split++) {
            total.x += parts[split].x, total.y += parts[split].y, total.z += parts[split].z, total.w += parts[split].w;
        }
        sum[4 * j] = total.x, sum[4 * j + 1] = total.y, sum[4 * j + 2] = total.z, sum[4 * j + 3] = total.w;
    }
}

__device__ __forceinline__ float4 fragment(const float (&d)[TILE_M / 2], int j) {
    return make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
}

// Every thread sends its sums to the blocks that add them: [SPLITS][OUT_FRAGMENTS][SHARE_THREADS] from `exchange` on.
__device__ __forceinline__ void send_and_add(const float (&d)[TILE_M / 2], float4 *exchange, const Ring &ring, const Tile &tile,
                                             float (&sum)[OUT_FRAGMENTS * 4]) {
    float4 *slot = exchange + threadIdx.x % SHARE_THREADS;
#pragma unroll
    for (int j = 0; j < FRAGMENTS; j++) {
        const int share = j / OUT_FRAGMENTS * COLUMN_SHARES + threadIdx.x / SHARE_THREADS;
        send(slot + (tile.split * OUT_FRAGMENTS + j % OUT_FRAGMENTS) * SHARE_THREADS, fragment(d, j), ring.gathered(),
             share * MULTICAST + tile.peer);
    }
    barrier_wait_cluster(ring.gathered(), 0);
    add_splits(sum, [&](int split, int j) { return slot[(split * OUT_FRAGMENTS + j) * SHARE_THREADS]; });
}

// Every thread leaves its sums in the ring, [FRAGMENTS][CONSUMERS], and fetches those that it adds.
__device__ __forceinline__ void fetch_and_add(const float (&d)[TILE_M / 2], float4 *exchange, const Tile &tile,
                                              float (&sum)[OUT_FRAGMENTS * 4]) {
    float4 *own = exchange + threadIdx.x;
#pragma unroll
    for (int j = 0; j < FRAGMENTS; j++) own[j * CONSUMERS] = fragment(d, j);
    cluster_arrive();
    cluster_wait();
    add_splits(sum, [&](int split, int j) {
        return read_remote(&own[(tile.split * OUT_FRAGMENTS + j) * CONSUMERS], split * MULTICAST + tile.peer);
    });
}

__device__ __forceinline__ uint32 pack(float x, float y) {
    Activation values[2] = {from_float<Activation>(x), from_float<Activation>(y)};
    return *reinterpret_cast<uint32 *>(values);
}

__device__ __forceinline__ float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

// Writes fragments [n, m] to staging [m, n], where silu makes one row of n out of two.
__device__ __forceinline__ void stage_results(const float (&d)[OUT_FRAGMENTS * 4], float upper_bias, float lower_bias,
                                              Activation *staging, int warp, int lane) {
    constexpr int MATRICES = SILU ? 1 : 2;  // 8x8
    const Activation *row = staging + lane % 8 * STAGING_STRIDE + warp * MATRICES * 8 + (lane / 8 % MATRICES) * 8;
#pragma unroll
    for (int j = 0; j < OUT_FRAGMENTS; j++) {
        const float2 upper = make_float2(d[4 * j] + upper_bias, d[4 * j + 1] + upper_bias);
        const float2 lower = make_float2(d[4 * j + 2] + lower_bias, d[4 * j + 3] + lower_bias);
        const uint32 address = shared_address(row + j * 8 * STAGING_STRIDE);
#if SILU
        const uint32 product = pack(silu(upper.x) * lower.x, silu(upper.y) * lower.y);
        asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(address), "r"(product) : "memory");
#else
        asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(address),
                     "r"(pack(upper.x, upper.y)), "r"(pack(lower.x, lower.y))
                     : "memory");
#endif
    }
}

__device__ __forceinline__ void store_results(const Activation *staging, const Tile &tile, Activation *out, int rows, int width) {
    constexpr int PARTS = OUT_COLUMNS / 8;  // of 16 bytes
    for (int i = threadIdx.x; i < OUT_ROWS * PARTS; i += CONSUMERS) {
        const int row = tile.first_row + tile.split * OUT_ROWS + i / PARTS;
        const int column = (SILU ? tile.first_column / 2 : tile.first_column) + i % PARTS * 8;
        if (row >= rows || column >= width) continue;
        const Activation *from = staging + i / PARTS * STAGING_STRIDE + i % PARTS * 8;
        Activation *to = out + static_cast<long long>(row) * width + column;
        if (width % 8 == 0) *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
        else for (int c = 0; c < min(8, width - column); c++) to[c] = from[c];
    }
}

// Adds fragments [n, m] to out [m, n]: a warp's 8 rows of n are 32 bytes beside each other. Atomic so that nobody waits
// for the old value; one thread of the kernel adds to an element, so the order is fixed.
__device__ __forceinline__ void add_results(const float (&d)[OUT_FRAGMENTS * 4], float upper_bias, float lower_bias,
                                            float *out, int first_row, int rows, int column, int columns) {
#pragma unroll
    for (int j = 0; j < OUT_FRAGMENTS; j++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first_row + j * 8 + i;
            if (row >= rows) continue;
            float *to = out + static_cast<long long>(row) * columns + column;
            if (column < columns) atomicAdd(to, d[4 * j + i] + upper_bias);
            if (column + 8 < columns) atomicAdd(to + 8, d[4 * j + 2 + i] + lower_bias);
        }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    w4_wide(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap codes,
            const __grid_constant__ TensorMap scales, const Activation *bias, Result *out, int rows, int columns,
            int pieces, int group_shift) {
    extern __shared__ __align__(1024) char shared[];
    uint32 base;
    asm volatile("mov.u32 %0, %1;" : "=r"(base) : "r"(shared_address(shared)));
    const Ring ring{base, base + BARRIERS_AT, base + BARRIERS_AT + STAGES * 8};
    const Operands operands{x, codes, scales, group_shift};
    const Tile tile = choose_tile(rows, pieces);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    let_next_kernel_start();
    if (threadIdx.x == CONSUMERS) {
        prefetch_map(operands.codes);
        prefetch_map(operands.scales);
        prefetch_map(operands.x);
        open_barriers(ring);
        fetch_first_weights(operands, tile, ring);
    }
    blocks_meet();
    if (warp == CONSUMERS / WARP) {
        if (lane == 0) produce(operands, tile, ring);
        return;
    }

    const Tile share = share_of(tile);
    const int column = share.first_column + warp * UNIT_ROWS + lane / 4;
    const float upper_bias = bias && column < columns ? to_float(bias[column]) : 0.f;
    const float lower_bias = bias && column + 8 < columns ? to_float(bias[column + 8]) : 0.f;
    float d[TILE_M / 2], sum[OUT_FRAGMENTS * 4];
    multiply(tile, ring, warp, lane, d);
    if constexpr (!SENT) consumers_meet();  // the ring is free
    char *results = shared + (SENT ? RING_BYTES : 0);
    float4 *exchange = reinterpret_cast<float4 *>(results);
    if constexpr (SENT) send_and_add(d, exchange, ring, tile, sum);
    else if constexpr (SPLITS > 1) fetch_and_add(d, exchange, tile, sum);
    else add_splits(sum, [&](int, int j) { return fragment(d, j); });
#if ADD
    if constexpr (SPLITS > 1 && !SENT) cluster_arrive();  // the others' sums have been read, used or not yet
    const int first_row = share.first_row + share.split * OUT_ROWS + lane % 4 * 2;
    if (threadIdx.x < SHARE_THREADS) add_results(sum, upper_bias, lower_bias, out, first_row, rows, column, columns);
#else
    Activation *staging = reinterpret_cast<Activation *>(results + EXCHANGE_BYTES);
    if (threadIdx.x < SHARE_THREADS) stage_results(sum, upper_bias, lower_bias, staging, warp, lane);
    if constexpr (SPLITS > 1 && !SENT) cluster_arrive_relaxed();  // the others' sums have been read
    consumers_meet();
    store_results(staging, share, out, rows, SILU ? columns / 2 : columns);
#endif
    if constexpr (SPLITS > 1 && !SENT) cluster_wait();
}
