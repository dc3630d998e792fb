// out [M, N] = x [M, K] W^T (+ bias) for four-bit weights W [N, K] and many rows of x, on SM90a.
//
// A tile of TILE_N rows of W and TILE_M rows of x is the product D[n, m] = W x^T: the weights are the operand that wgmma
// takes from registers, where the packed layout (w4.cuh) already has its order. Units of 64 k go through a ring of STAGES
// stages, which a warp of its own fills; each of WARPGROUPS warpgroups turns codes of 64 rows into weights and multiplies.
//
// A cluster is MULTICAST tiles that are neighbours in N, which share what they fetch of x, times SPLITS parts of K,
// whose sums are added in the order of K. The result of a row of x depends on SPLITS, not on the other rows.
//
// Macros: ACTIVATION_BF16; SILU (rows of W are gate and up in turns of 8, out [M, N/2] = silu(gate) * up); UNIT_GROUPS
// (groups that begin in a unit of 64 k: 2 for groups of 32, else 1); WARPGROUPS, TILE_M, SPLITS, MULTICAST, STAGES;
// RESIDENT, the blocks that shall fit on one multiprocessor.
#include "tma.cuh"
#include "w4.cuh"
#include "wgmma.cuh"

constexpr int TILE_N = 64 * WARPGROUPS;
constexpr int TILE_UNITS = TILE_N / UNIT_ROWS;
constexpr int STEPS = UNIT_K / 16;
constexpr int CONSUMERS = 128 * WARPGROUPS;
constexpr int THREADS = CONSUMERS + WARP;
constexpr int CLUSTER = MULTICAST * SPLITS;

constexpr int X_BYTES = TILE_M * UNIT_K * 2;
constexpr int CODE_BYTES = TILE_UNITS * UNIT_BYTES;
constexpr int UNIT_SCALE_BYTES = UNIT_GROUPS * SCALE_BYTES;
constexpr int FETCHED_BYTES = X_BYTES + CODE_BYTES + TILE_UNITS * UNIT_SCALE_BYTES;
constexpr int STAGE_BYTES = (FETCHED_BYTES + 1023) / 1024 * 1024;

constexpr int OUT_COLUMNS = SILU ? TILE_N / 2 : TILE_N;  // of a tile
constexpr int OUT_ROWS = TILE_M / SPLITS;                // of a block, after the parts of K have been added
constexpr int FRAGMENTS = TILE_M / 8;                    // an accumulator is FRAGMENTS times 8 rows of x
constexpr int OUT_FRAGMENTS = OUT_ROWS / 8;
constexpr int STAGING_STRIDE = OUT_COLUMNS + 8;          // 16 bytes more, against bank conflicts
constexpr int EXCHANGE_BYTES = SPLITS > 1 ? TILE_M * TILE_N * 4 : 0;
constexpr int STAGING_BYTES = OUT_ROWS * STAGING_STRIDE * 2;

static_assert(EXCHANGE_BYTES + STAGING_BYTES <= STAGES * STAGE_BYTES, "results are staged in the ring");
static_assert(FRAGMENTS % SPLITS == 0 && TILE_M / 8 % MULTICAST == 0, "TILE_M is divided in eights");

struct Operands {
    const TensorMap &x;       // [M, K], boxes of TILE_M / MULTICAST rows x 64 k
    const TensorMap &codes;   // [N/16, K/64 * 512 bytes], boxes of TILE_UNITS x 512 bytes
    const TensorMap &scales;  // [N/16, groups * 64 bytes], boxes of TILE_UNITS x UNIT_GROUPS * 64 bytes
    int units;                // padded K / 64
    int group_shift;          // unit >> group_shift is its group, where UNIT_GROUPS is 1
};

struct Tile {
    int first_column;       // of out, before silu: a row of W
    int first_row;          // of x and out
    int first_unit, units;  // of K
    int peer;               // which of the MULTICAST neighbours
    int split;              // which part of K
};

// Units on their way from global memory to the tensor cores. Stage i holds units i, i + STAGES, ... of the tile.
struct Ring {
    char *stages;
    Barrier *full;   // a unit is there
    Barrier *empty;  // all warps that read the unit have done so, in all blocks that share x

    __device__ char *x(int step) const { return stages + step % STAGES * STAGE_BYTES; }
    __device__ char *codes(int step) const { return x(step) + X_BYTES; }
    __device__ char *scales(int step) const { return codes(step) + CODE_BYTES; }
};

// One thread opens the barriers; nobody goes on before the cluster's are open.
__device__ __forceinline__ void prepare(const Operands &operands, const Ring &ring) {
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            barrier_init(&ring.full[stage], 1);
            barrier_init(&ring.empty[stage], MULTICAST * CONSUMERS / WARP);
        }
        fence_barrier_init();
        prefetch_map(operands.codes);
        prefetch_map(operands.scales);
        prefetch_map(operands.x);
    }
    if constexpr (CLUSTER > 1) {
        __syncwarp();
        cluster_arrive_relaxed();
        cluster_wait();
    } else __syncthreads();
}

// Bands of 8 tiles in M are swept along N, so that both operands of the tiles under way stay in the L2 cache.
__device__ __forceinline__ Tile choose_tile(int rows, int all_units) {
    constexpr int BAND = 8;
    const int tiles_m = (rows + TILE_M - 1) / TILE_M;
    const int clusters_n = gridDim.x / CLUSTER / tiles_m;
    const int cluster = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
    const int band = cluster / (BAND * clusters_n), place = cluster % (BAND * clusters_n);
    const int height = min(BAND, tiles_m - band * BAND);
    const int split = rank / MULTICAST, peer = rank % MULTICAST;
    const int first_unit = split * all_units / SPLITS;
    const int units = (split + 1) * all_units / SPLITS - first_unit;
    return {(place / height * MULTICAST + peer) * TILE_N, (band * BAND + place % height) * TILE_M, first_unit, units, peer, split};
}

__device__ __forceinline__ void fetch_weights(const Operands &from, const Tile &tile, const Ring &ring, int step) {
    const int unit = tile.first_unit + step, unit_row = tile.first_column / UNIT_ROWS;
    const int group = UNIT_GROUPS == 1 ? unit >> from.group_shift : unit * UNIT_GROUPS;
    Barrier *full = &ring.full[step % STAGES];
    barrier_expect(full, FETCHED_BYTES);
    copy_box(ring.codes(step), from.codes, unit * (UNIT_BYTES / 4), unit_row, full);
    copy_box(ring.scales(step), from.scales, group * (SCALE_BYTES / 2), unit_row, full);
}

// Every block of MULTICAST fetches its share of the rows of x, for all of them.
__device__ __forceinline__ void fetch_x(const Operands &from, const Tile &tile, const Ring &ring, int step) {
    constexpr int SHARE = TILE_M / MULTICAST;
    const int column = (tile.first_unit + step) * UNIT_K, row = tile.first_row + tile.peer * SHARE;
    char *to = ring.x(step) + tile.peer * SHARE * UNIT_K * 2;
    Barrier *full = &ring.full[step % STAGES];
    if constexpr (MULTICAST == 1) copy_box(to, from.x, column, row, full);
    else copy_box_to_many(to, from.x, column, row, full, ((1 << MULTICAST) - 1) << (tile.split * MULTICAST));
}

__device__ __forceinline__ void produce(const Operands &from, const Tile &tile, const Ring &ring) {
    const int ahead = min(tile.units, STAGES);
    for (int step = 0; step < ahead; step++) fetch_weights(from, tile, ring, step);
    wait_for_previous_kernel();
    for (int step = 0; step < ahead; step++) fetch_x(from, tile, ring, step);
    for (int step = ahead; step < tile.units; step++) {
        barrier_wait(&ring.empty[step % STAGES], (step / STAGES - 1) & 1);
        fetch_weights(from, tile, ring, step);
        fetch_x(from, tile, ring, step);
    }
}

// a: q - 8 becomes (q - 8) * s + z. `scales`: (s, z) of rows g and g + 8.
__device__ __forceinline__ void scale_fragment(uint32 (&a)[4], uint2 scales) {
    const uint32 rows[2] = {scales.x, scales.y};
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

// The product of the block's units. wgmma runs LAG + 1 k-steps behind the conversion of codes; a wide tile's sums leave few
// registers for more.
__device__ __forceinline__ void multiply(const Tile &tile, const Ring &ring, int warp, int lane, float (&d)[TILE_M / 2]) {
    constexpr int LAG = TILE_M <= 128 ? 2 : 0, FRAGMENTS_A = LAG + 2;
    uint32 a[FRAGMENTS_A][4];
#pragma unroll 1
    for (int step = 0; step < tile.units; step++) {
        barrier_wait(&ring.full[step % STAGES], step / STAGES & 1);
        const uint4 codes = reinterpret_cast<const uint4 *>(ring.codes(step))[warp * WARP + lane];
        const uint2 *row_scales = reinterpret_cast<const uint2 *>(ring.scales(step)) + warp * UNIT_GROUPS * 8 + lane / 4;
        const uint64 x = swizzled_descriptor(ring.x(step));
        const uint32 words[STEPS] = {codes.x, codes.y, codes.z, codes.w};
        uint2 scales[UNIT_GROUPS];
#pragma unroll
        for (int i = 0; i < UNIT_GROUPS; i++) scales[i] = row_scales[i * 8];
#pragma unroll
        for (int j = 0; j < STEPS; j++) {
            uint32(&weights)[4] = a[j % FRAGMENTS_A];
            codes_to_fragment(words[j], weights);
            scale_fragment(weights, scales[j * UNIT_GROUPS / STEPS]);
            wgmma_wait<LAG>();  // what reads the fragment that is converted next
            wgmma_begin();
            wgmma(d, weights, x + 2 * j, step + j > 0);
            wgmma_commit();
        }
        // The unit before has been multiplied. Nobody waits for the last stages, and the neighbours may be gone by then.
        if (step >= 1 && step - 1 + STAGES < tile.units && lane < MULTICAST)
            barrier_arrive(&ring.empty[(step - 1) % STAGES], tile.split * MULTICAST + lane);
    }
    wgmma_wait<0>();
    wgmma_settle(d);
}

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" ::"n"(CONSUMERS) : "memory"); }

// Adds the parts of K, in their order: this block gets the sum of its share of the fragments.
__device__ __forceinline__ void add_splits(const float (&d)[TILE_M / 2], char *exchange, const Tile &tile,
                                           float (&sum)[OUT_FRAGMENTS * 4]) {
    if constexpr (SPLITS == 1) {
#pragma unroll
        for (int i = 0; i < OUT_FRAGMENTS * 4; i++) sum[i] = d[i];
        return;
    }
    float4 *own = reinterpret_cast<float4 *>(exchange) + threadIdx.x;
#pragma unroll
    for (int j = 0; j < FRAGMENTS; j++) own[j * CONSUMERS] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
    cluster_arrive();
    cluster_wait();
#pragma unroll
    for (int j = 0; j < OUT_FRAGMENTS; j++) {
        float4 parts[SPLITS];
#pragma unroll
        for (int split = 0; split < SPLITS; split++)
            parts[split] = read_remote(&own[(tile.split * OUT_FRAGMENTS + j) * CONSUMERS], split * MULTICAST + tile.peer);
        float4 total = parts[0];
#pragma unroll
        for (int split = 1; split < SPLITS; split++) {
            total.x += parts[split].x, total.y += parts[split].y, total.z += parts[split].z, total.w += parts[split].w;
        }
        sum[4 * j] = total.x, sum[4 * j + 1] = total.y, sum[4 * j + 2] = total.z, sum[4 * j + 3] = total.w;
    }
}

__device__ __forceinline__ uint32 pack(float x, float y) {
    Activation values[2] = {from_float<Activation>(x), from_float<Activation>(y)};
    return *reinterpret_cast<uint32 *>(values);
}

__device__ __forceinline__ float silu(float x) { return x / (1.f + __expf(-x)); }

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
    constexpr int PIECES = OUT_COLUMNS / 8;  // of 16 bytes
    for (int i = threadIdx.x; i < OUT_ROWS * PIECES; i += CONSUMERS) {
        const int row = tile.first_row + tile.split * OUT_ROWS + i / PIECES;
        const int column = (SILU ? tile.first_column / 2 : tile.first_column) + i % PIECES * 8;
        if (row >= rows || column >= width) continue;
        const Activation *from = staging + i / PIECES * STAGING_STRIDE + i % PIECES * 8;
        Activation *to = out + static_cast<long long>(row) * width + column;
        if (width % 8 == 0) *reinterpret_cast<uint4 *>(to) = *reinterpret_cast<const uint4 *>(from);
        else for (int c = 0; c < min(8, width - column); c++) to[c] = from[c];
    }
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS, RESIDENT)
    w4_wide(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap codes, const __grid_constant__ TensorMap scales,
            const Activation *bias, Activation *out, int rows, int columns, int units, int group_shift) {
    extern __shared__ __align__(1024) char shared[];
    Barrier *barriers = reinterpret_cast<Barrier *>(shared + STAGES * STAGE_BYTES);
    const Ring ring{shared, barriers, barriers + STAGES};
    const Operands operands{x, codes, scales, units, group_shift};
    const Tile tile = choose_tile(rows, units);
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    prepare(operands, ring);
    let_next_kernel_start();
    if (warp == CONSUMERS / WARP) {
        if (lane == 0) produce(operands, tile, ring);
        return;
    }

    const int column = tile.first_column + warp * UNIT_ROWS + lane / 4;
    const float upper_bias = bias && column < columns ? to_float(bias[column]) : 0.f;
    const float lower_bias = bias && column + 8 < columns ? to_float(bias[column + 8]) : 0.f;
    float d[TILE_M / 2], sum[OUT_FRAGMENTS * 4];
    multiply(tile, ring, warp, lane, d);
    consumers_meet();  // the ring is free
    add_splits(d, ring.stages, tile, sum);
    Activation *staging = reinterpret_cast<Activation *>(ring.stages + EXCHANGE_BYTES);
    stage_results(sum, upper_bias, lower_bias, staging, warp, lane);
    if constexpr (SPLITS > 1) cluster_arrive_relaxed();  // the others' sums have been read
    consumers_meet();
    store_results(staging, tile, out, rows, SILU ? columns / 2 : columns);
    if constexpr (SPLITS > 1) cluster_wait();
}
