// Causal attention of new tokens over the paged KV pool, for SM90a: TMA fills shared memory, wgmma multiplies.
//
// One item of work is 128 queries of one head. A CTA has one warpgroup that loads and two that compute 64 queries each; it
// takes items until none is left, the ones with the longest context of each sequence first. Tiles of 128 keys are visited
// from the last visible one down to the first. While a warpgroup turns the scores of one tile into weights, the tensor
// cores compute its previous tile's weighted sum of values, or the other warpgroup's products.
//
// Tiles lie in shared memory as wgmma wants them with 128-byte swizzle: per 64 columns ("half") one row of 128 bytes per
// key, 16-byte chunk c of row r at place c ^ (r % 8). K is then a B operand "K-major", V one "MN-major".
#include "common.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int QUERIES = 128;  // of an item
constexpr int KEYS = 128;     // of a tile
constexpr int STAGES = 2;     // of the rings of K and V tiles
constexpr int PAGE = 16;      // tokens that one copy moves
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;

constexpr int HALVES = HEAD_DIM / 64;
constexpr int ROW_BYTES = 128;
constexpr int HALF_BYTES = KEYS * ROW_BYTES;
constexpr int TILE_BYTES = HALVES * HALF_BYTES;
constexpr int QUERY_BYTES = HEAD_DIM * 2;
constexpr int QUERY_STRIDE = QUERY_BYTES + 16;  // 8 rows of ldmatrix fall into different banks

constexpr int TICKETS = 64;  // launches that may be under way at once

struct Item {
    int first_row;       // of q and out
    int rows;            // that are queries of this sequence
    int first_position;  // of the first query in its sequence
    int tiles;           // of keys that the last query sees; 0: no work is left
    int head;
    int sequence;
    int context;
};

struct Shared {
    uint8 k[STAGES][TILE_BYTES];
    uint8 v[STAGES][TILE_BYTES];
    uint8 q[QUERIES * QUERY_STRIDE];
    Item item;
    Barrier k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES], q_full, q_empty;
};

struct Pool {
    const uint8 *bytes;
    const int *block_tables;
    int max_blocks, block_size;
    int planes;       // in one block
    int first_plane;  // of this layer's K in its block
    int num_kv_heads;
};

__device__ __forceinline__ void arrive(Barrier *barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// `bytes` (a multiple of 16, both ends aligned to 16) from global to shared memory.
__device__ __forceinline__ void copy_bulk(void *to, const void *from, uint32 bytes, Barrier *barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}

template <int N> __device__ __forceinline__ void set_registers(bool more) {
    if (more) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
    else asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

// A place in a ring of stages, and the parity of the barriers when it is reached.
struct Place {
    int stage = 0;
    uint32 parity = 0;
    __device__ __forceinline__ void advance() {
        stage++;
        if (stage == STAGES) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// ---- the producer ----------------------------------------------------------------------------------------------------

struct Ticket {
    unsigned next, finished;
};
__device__ Ticket tickets[TICKETS];

// The item of this number, the same in all lanes; tiles = 0 when there are not so many.
__device__ Item find_item(int number, const int *query_starts, const int *context_lens, int num_sequences, int num_heads) {
    const int lane = threadIdx.x % WARP;
    int place = number / num_heads;
    for (int first = 0; first < num_sequences; first += WARP) {
        const int sequence = first + lane;
        const int start = query_starts[min(sequence, num_sequences)], end = query_starts[min(sequence + 1, num_sequences)];
        const int own = (end - start + QUERIES - 1) / QUERIES;
        int through = own;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int below = __shfl_up_sync(0xffffffffu, through, offset);
            if (lane >= offset) through += below;
        }
        const unsigned later = __ballot_sync(0xffffffffu, through > place);
        if (later) {
            const int owner = __ffs(later) - 1;
            const int index = __shfl_sync(0xffffffffu, through, owner) - 1 - place;  // the last queries come first
            const int queries = __shfl_sync(0xffffffffu, end - start, owner);
            const int context = context_lens[first + owner];
            Item item;
            item.first_row = __shfl_sync(0xffffffffu, start, owner) + index * QUERIES;
            item.rows = min(QUERIES, queries - index * QUERIES);
            item.first_position = context - queries + index * QUERIES;
            item.tiles = (item.first_position + item.rows + KEYS - 1) / KEYS;
            item.head = number % num_heads;
            item.sequence = first + owner;
            item.context = context;
            return item;
        }
        place -= __shfl_sync(0xffffffffu, through, WARP - 1);
    }
    return Item{};
}

__device__ __forceinline__ void copy_queries(Shared &shared, const Activation *q, const Item &item, int num_heads) {
    for (int row = threadIdx.x % WARP; row < QUERIES; row += WARP) {
        const size_t source = size_t(item.first_row + min(row, item.rows - 1)) * num_heads + item.head;
        copy_bulk(shared.q + row * QUERY_STRIDE, q + source * HEAD_DIM, QUERY_BYTES, &shared.q_full);
    }
}

// The page that the context ends in: rows behind the end become zeros, as 0 times whatever lies there need not be 0.
__device__ void copy_last_page(uint8 *rows, const Activation *page, int count) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    for (int i = threadIdx.x % WARP; i < PAGE * CHUNKS; i += WARP) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        const uint4 value = row < count ? reinterpret_cast<const uint4 *>(page)[i] : uint4{};
        *reinterpret_cast<uint4 *>(rows + chunk / 8 * HALF_BYTES + swizzled_128(row, chunk % 8 * 16)) = value;
    }
    fence_async_proxy();
}

// One warp fills a tile with the keys from `first_key` on. Lanes 0..7 copy one half of 8 pages, lanes 8..15 the other.
// `block` is the lane's page's; pages behind the context are copied from outside of the pool, which gives zeros.
__device__ __forceinline__ void fill(uint8 *tile, Barrier *full, const Pool &pool, const TensorMap &map, int plane, int block,
                                     int first_key, int context) {
    const int lane = threadIdx.x % WARP;
    const int page = lane % (KEYS / PAGE), half = lane / (KEYS / PAGE);
    const int key = first_key + page * PAGE;
    const int row = key < context ? (block * pool.planes + plane) * pool.block_size + key % pool.block_size : -PAGE;
    const int filled = context - key;  // rows of this page, if it is the last one
    const unsigned cut = __ballot_sync(0xffffffffu, half == 0 && filled > 0 && filled < PAGE);
    if (cut) {
        const int owner = __ffs(cut) - 1;
        const size_t first = __shfl_sync(0xffffffffu, row, owner);
        copy_last_page(tile + owner * PAGE * ROW_BYTES, reinterpret_cast<const Activation *>(pool.bytes) + first * HEAD_DIM,
                       context % PAGE);
        __syncwarp();
    }
    if (lane == 0) barrier_expect(full, TILE_BYTES - (cut ? PAGE * QUERY_BYTES : 0));
    __syncwarp();
    if (half < HALVES && !(cut >> page & 1)) copy_box(tile + half * HALF_BYTES + page * PAGE * ROW_BYTES, map, half * 64, row, full);
}

__device__ __forceinline__ void produce_item(Shared &shared, const Pool &pool, const TensorMap &map, const Item &item,
                                             int queries_per_kv, Place &k, Place &v) {
    const int plane = pool.first_plane + item.head / queries_per_kv;
    const int *table = pool.block_tables + size_t(item.sequence) * pool.max_blocks;
    const int page = threadIdx.x % WARP % (KEYS / PAGE) * PAGE;
    int block = 0;  // of tile `tile`
    for (int tile = item.tiles; tile >= 0; tile--) {  // K of the tile below goes before V of this one
        int next = 0;
        if (tile > 0) {
            const int key = (tile - 1) * KEYS + page;
            if (key < item.context) next = table[key / pool.block_size];
            barrier_wait(&shared.k_empty[k.stage], k.parity ^ 1);
            fill(shared.k[k.stage], &shared.k_full[k.stage], pool, map, plane, next, (tile - 1) * KEYS, item.context);
            k.advance();
        }
        if (tile < item.tiles) {
            barrier_wait(&shared.v_empty[v.stage], v.parity ^ 1);
            fill(shared.v[v.stage], &shared.v_full[v.stage], pool, map, plane + pool.num_kv_heads, block, tile * KEYS, item.context);
            v.advance();
        }
        block = next;
    }
}

__device__ void produce(Shared &shared, const Pool &pool, const TensorMap &map, const Activation *q, const int *query_starts,
                        const int *context_lens, int num_sequences, int num_heads, Ticket &ticket) {
    const int lane = threadIdx.x % WARP;
    Place k, v;
    uint32 q_parity = 0;
    for (int number = blockIdx.x;;) {
        const Item item = find_item(number, query_starts, context_lens, num_sequences, num_heads);
        barrier_wait(&shared.q_empty, q_parity ^ 1);
        if (lane == 0) {
            shared.item = item;
            barrier_expect(&shared.q_full, item.tiles ? QUERIES * QUERY_BYTES : 0);
        }
        __syncwarp();
        if (item.tiles == 0) break;
        copy_queries(shared, q, item, num_heads);
        produce_item(shared, pool, map, item, num_heads / pool.num_kv_heads, k, v);
        q_parity ^= 1;
        if (lane == 0) number = gridDim.x + atomicAdd(&ticket.next, 1);
        number = __shfl_sync(0xffffffffu, number, 0);
    }
    if (lane == 0) {  // the last one leaves the counters as it found them
        __threadfence();
        if (atomicInc(&ticket.finished, gridDim.x - 1) == gridDim.x - 1) ticket.next = 0;
    }
}

// ---- the consumers ---------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32 pack(float low, float high) {
#if ACTIVATION_BF16
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    const __half2 pair = __floats2half2_rn(low, high);
#endif
    return reinterpret_cast<const uint32 &>(pair);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Lane t of a quad gives x[i] to lane i as its x[t].
__device__ __forceinline__ void quad_transpose(uint32 (&x)[4]) {
#pragma unroll
    for (int step = 1; step <= 2; step *= 2) {
        const bool upper = threadIdx.x & step;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & step) continue;
            const uint32 other = __shfl_xor_sync(0xffffffffu, upper ? x[i] : x[i + step], step);
            if (upper) x[i] = other;
            else x[i + step] = other;
        }
    }
}

// Tensor cores may still read these registers until here.
template <int N> __device__ __forceinline__ void keep(uint32 (&registers)[N][4]) {
#pragma unroll
    for (int i = 0; i < N * 4; i++) asm volatile("" : "+r"(registers[i / 4][i % 4])::"memory");
}

// One thread's part of 64 queries: with lane = 4g + t, of rows g and g + 8 of its warp's 16 the columns 8j + 2t and + 1,
// as registers 4j, 4j + 1 and 4j + 2, 4j + 3.
struct Consumer {
    Shared &shared;
    float scale;  // of scores, times log2(e)
    uint32 q[HEAD_DIM / 16][4];
    float scores[KEYS / 2];
    uint32 weights[KEYS / 16][4];
    float output[HEAD_DIM / 2];
    float row_max[2], row_sum[2];
    bool wanted;       // this warp has queries
    float rescale[2];  // what sums over earlier tiles must be multiplied by
    Place k, v;

    // scores = q K^T, asynchronously.
    __device__ __forceinline__ void multiply_keys() {
        barrier_wait(&shared.k_full[k.stage], k.parity);
        const uint64 tile = swizzled_descriptor(shared.k[k.stage]);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) wgmma(scores, q[i], tile + (i / 4 * HALF_BYTES + i % 4 * 32) / 16, i > 0);
        wgmma_commit();
    }

    // output += weights V, asynchronously.
    __device__ __forceinline__ void multiply_values() {
        barrier_wait(&shared.v_full[v.stage], v.parity);
        const uint64 tile = swizzled_descriptor(shared.v[v.stage], 1024, HALF_BYTES);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) wgmma<1>(output, weights[i], tile + i * 16 * ROW_BYTES / 16, true);
        wgmma_commit();
    }

    __device__ __forceinline__ void release(Barrier *empty, Place &place) {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(&empty[place.stage]);
        place.advance();
    }

    // `last_seen` is the last key within the tile that row g sees.
    __device__ __forceinline__ void mask(int last_seen) {
        const int column = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            if (i / 4 * 8 + i % 2 + column > last_seen + i / 2 % 2 * 8) scores[i] = negative_infinity();
        }
    }

    // Scores become weights, exp2(scaled score - maximum so far).
    __device__ __forceinline__ void weigh() {
        float base[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float largest = row_max[r];
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4) largest = fmaxf(largest, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
            largest = quad_max(largest);
            base[r] = largest == negative_infinity() ? 0.f : largest * scale;
            rescale[r] = exp2_fast(row_max[r] * scale - base[r]);
            row_max[r] = largest;
            row_sum[r] *= rescale[r];
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            scores[i] = exp2_fast(scores[i] * scale - base[i / 2 % 2]);
            row_sum[i / 2 % 2] += scores[i];
        }
    }

    // The first tile's scores and weights: nothing to overlap with.
    __device__ __forceinline__ void begin(int last_seen) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) output[i] = 0.f;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            row_max[r] = negative_infinity();
            row_sum[r] = 0.f;
        }
        multiply_keys();
        wgmma_wait<0>();
        wgmma_settle(scores);
        release(shared.k_empty, k);
        mask(last_seen);
        weigh();
        pack_weights();
    }

    __device__ __forceinline__ void pack_weights() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weights[i / 4][i % 4] = pack(scores[2 * i], scores[2 * i + 1]);
    }

    // A further tile's scores and weights, while the tile before it is multiplied with its values.
    template <bool MASKED> __device__ __forceinline__ void step(int last_seen, int own_turn, int others_turn) {
        asm volatile("bar.sync %0, %1;" ::"r"(own_turn), "n"(CONSUMERS * WARPGROUP) : "memory");
        multiply_keys();
        multiply_values();
        asm volatile("bar.arrive %0, %1;" ::"r"(others_turn), "n"(CONSUMERS * WARPGROUP) : "memory");
        wgmma_wait<1>();
        wgmma_settle(scores);
        release(shared.k_empty, k);
        // Without a branch here the compiler moves the wait below in front of the arithmetic it is to overlap with.
        if (wanted) {
            if (MASKED) mask(last_seen);
            weigh();
        }
        wgmma_wait<0>();
        wgmma_settle(output);
        keep(weights);
        release(shared.v_empty, v);
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) output[i] *= rescale[i / 2 % 2];
        pack_weights();
    }

    __device__ __forceinline__ void finish() {
        multiply_values();
        wgmma_wait<0>();
        wgmma_settle(output);
        keep(weights);
        release(shared.v_empty, v);
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] = 1.f / quad_sum(row_sum[r]);
    }

    // `row` is this thread's row g of the item, `out` points to the item's first row and head.
    __device__ __forceinline__ void store(Activation *out, int stride, int row, int rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 32; j++) {
                uint32 x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = output + 4 * (4 * j + i) + 2 * r;
                    x[i] = pack(pair[0] * row_sum[r], pair[1] * row_sum[r]);
                }
                quad_transpose(x);
                if (row + 8 * r < rows) {
                    Activation *to = out + size_t(row + 8 * r) * stride + 8 * (4 * j + threadIdx.x % 4);
                    *reinterpret_cast<uint4 *>(to) = make_uint4(x[0], x[1], x[2], x[3]);
                }
            }
        }
    }
};

__device__ __forceinline__ void load_queries(uint32 (&q)[HEAD_DIM / 16][4], const uint8 *rows) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) ldmatrix_x4(q[i], rows + lane % 16 * QUERY_STRIDE + lane / 16 * 16 + i * 32);
}

__device__ __forceinline__ void consume(Shared &shared, Activation *out, int num_heads, float scale) {
    const int group = threadIdx.x / WARPGROUP - 1, warp_row = threadIdx.x / WARP * 16 - WARPGROUP / WARP * 16;
    const int row = warp_row + threadIdx.x % WARP / 4;
    const int own_turn = 1 + group, others_turn = 2 - group;
    if (group == 1) asm volatile("bar.arrive %0, %1;" ::"r"(others_turn), "n"(CONSUMERS * WARPGROUP) : "memory");
    Consumer state{shared, scale};
    for (uint32 q_parity = 0;; q_parity ^= 1) {
        barrier_wait(&shared.q_full, q_parity);
        const Item item = shared.item;
        if (item.tiles == 0) return;
        load_queries(state.q, shared.q + warp_row * QUERY_STRIDE);
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(&shared.q_empty);

        const int position = item.first_position + row;
        const int unmasked = min(item.tiles - 1, (item.first_position + group * 64 + 1) / KEYS);  // tiles that all 64 rows see
        state.wanted = warp_row < item.rows;
        int tile = item.tiles - 1;
        state.begin(position - tile * KEYS);
#pragma unroll 1
        for (tile--; tile >= unmasked; tile--) state.step<true>(position - tile * KEYS, own_turn, others_turn);
#pragma unroll 1
        for (; tile >= 0; tile--) state.step<false>(0, own_turn, others_turn);
        state.finish();
        state.store(out + (size_t(item.first_row) * num_heads + item.head) * HEAD_DIM, num_heads * HEAD_DIM, row, item.rows);
    }
}

// q [T, num_heads, HEAD_DIM]; out [T, num_heads * HEAD_DIM]; sequence s has the rows query_starts[s] .. query_starts[s + 1].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_prefill_hopper(const Activation *q, const uint8 *pool_bytes, const __grid_constant__ TensorMap map, const int *block_tables, const int *query_starts,
                         const int *context_lens, Activation *out, int num_sequences, int max_blocks, int block_size, int planes,
                         int first_plane, int num_heads, int num_kv_heads, float scale, int ticket) {
    extern __shared__ uint8 unaligned[];
    Shared &shared = *reinterpret_cast<Shared *>(unaligned + (-shared_address(unaligned) & 1023));
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&shared.k_full[i], 1);
            barrier_init(&shared.v_full[i], 1);
            barrier_init(&shared.k_empty[i], CONSUMERS * WARPGROUP / WARP);
            barrier_init(&shared.v_empty[i], CONSUMERS * WARPGROUP / WARP);
        }
        barrier_init(&shared.q_full, 1);
        barrier_init(&shared.q_empty, CONSUMERS * WARPGROUP / WARP);
        fence_barrier_init();
    }
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (threadIdx.x < WARPGROUP) {
        set_registers<40>(false);
        const Pool pool{pool_bytes, block_tables, max_blocks, block_size, planes, first_plane, num_kv_heads};
        if (threadIdx.x < WARP) produce(shared, pool, map, q, query_starts, context_lens, num_sequences, num_heads, tickets[ticket]);
    } else {
        set_registers<232>(true);
        consume(shared, out, num_heads, scale);
    }
}
