// Causal attention of prompt chunks over the paged pool, for SM90a: TMA fills shared memory, wgmma multiplies.
//
// An item of work is 128 queries of one head. A block has one warpgroup that loads and two that compute 64 queries
// each; it takes items until none is left, of each sequence the one with the most keys first. Tiles of 128 keys are
// visited from the last visible one down to the first. While a warpgroup turns the scores of one tile into weights, the
// tensor cores compute its previous tile's weighted sum of values, or the other warpgroup's products.
//
// Tiles lie in shared memory in the 128-byte swizzle of wgmma.cuh: of each 64 columns (a "half") one row of 128 bytes
// per key. K is then a K-major operand, V an N-major one.
//
// Macros: ACTIVATION_BF16, KV_FORMAT (of 16 bits: the activation's type), HEAD_DIM (64 or 128).
#include "common.cuh"
#include "kv_read.cuh"
#include "mma.cuh"
#include "tma.cuh"
#include "wgmma.cuh"

constexpr int QUERIES = 128;  // of an item
constexpr int KEYS = 128;     // of a tile
constexpr int PAGE = 16;      // keys that certainly lie side by side in the pool
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int THREADS = (1 + CONSUMERS) * WARPGROUP;

constexpr int HALVES = HEAD_DIM / 64;
constexpr int ROW_BYTES = 128;
constexpr int HALF_BYTES = KEYS * ROW_BYTES;
constexpr int TILE_BYTES = HALVES * HALF_BYTES;
constexpr int QUERY_HALF_BYTES = QUERIES * ROW_BYTES;
constexpr int PAGES = KEYS / PAGE;

constexpr bool CONVERTED = KV_ELEMENT_BYTES == 1;  // else the pool holds Activations
static_assert(CONVERTED || KV_FORMAT == ACTIVATION_BF16);
constexpr int LOADERS = CONVERTED ? WARPGROUP / WARP : 1;  // warps that fill tiles

// Tiles in shared memory. V needs more: it is read a step later than K.
enum Kind { K, V };
constexpr int K_STAGES = CONVERTED ? 2 : 3, V_STAGES = 3;

// The launch deals 168 registers to each thread; the warpgroups then divide the same sum otherwise.
constexpr int LOADER_REGISTERS = 56, CONSUMER_REGISTERS = 224;

// Blocks take items from a counter; launches that may be under way at once have one each.
constexpr int TICKETS = 64;
struct Ticket {
    unsigned next, finished;
};
__device__ Ticket tickets[TICKETS];

struct Item {
    int first_row;       // of q and out
    int rows;            // that are queries of this sequence
    int first_position;  // of the first query in its sequence
    int tiles;           // of keys, up to the last that a query sees; 0: no work is left
    int head;
    int sequence;
    int context;
};

struct Sequences {
    const int *query_starts, *context_lens;
    int count, num_heads;
};

struct Pool {
    const uint8 *bytes;
    const TensorMap *rows;  // if it holds Activations: for boxes of PAGE rows
    const int *block_tables;
    int max_blocks;
    int block_shift;  // log2 of a block's tokens
    int planes;       // in one block
    int first_plane;  // of this layer's K in its block
    int num_kv_heads;
};

// A tile as a pool of bytes stores it.
struct Stored {
    alignas(16) uint8 elements[KEYS * HEAD_DIM];
    __half scales[KEYS];
};

struct Shared {
    uint8 tiles[K_STAGES + V_STAGES][TILE_BYTES];
    uint8 q[HALVES * QUERY_HALF_BYTES];
#if KV_FORMAT > 1
    Stored stored[2];
    Barrier stored_full[2], stored_empty[2];
#endif
    Barrier full[K_STAGES + V_STAGES], empty[K_STAGES + V_STAGES];
    Barrier q_full, q_empty;
    Item item;
    int next_number[2];
};

// One thread of a warp, always the same; unlike a test of the lane, the compiler knows that it is one.
__device__ __forceinline__ bool elect() {
    uint32 elected;
    asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(elected));
    return elected;
}

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

// Where K or V of a block's tile number `count` goes, and the parity of the place's barriers.
template <Kind KIND> struct Place {
    static constexpr int FIRST = KIND == K ? 0 : K_STAGES, STAGES = KIND == K ? K_STAGES : V_STAGES;
    int index;
    uint32 parity;
    __device__ __forceinline__ explicit Place(int count)
        : index(FIRST + count % STAGES), parity(count / STAGES & 1) {}
};

// ---- loading --------------------------------------------------------------------------------------------------------

// The item of this number, the same in all lanes; tiles = 0 when there are not so many.
__device__ Item find_item(const Sequences &sequences, int number) {
    const int lane = threadIdx.x % WARP;
    int place = number / sequences.num_heads;
    for (int first = 0; first < sequences.count; first += WARP) {
        const int start = sequences.query_starts[min(first + lane, sequences.count)];
        const int end = sequences.query_starts[min(first + lane + 1, sequences.count)];
        int through = (end - start + QUERIES - 1) / QUERIES;  // items of one head, up to this lane's sequence
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int below = __shfl_up_sync(0xffffffffu, through, offset);
            if (lane >= offset) through += below;
        }
        const unsigned candidates = __ballot_sync(0xffffffffu, through > place);
        if (candidates) {
            const int owner = __ffs(candidates) - 1;
            const int index = __shfl_sync(0xffffffffu, through, owner) - 1 - place;  // the last queries come first
            const int queries = __shfl_sync(0xffffffffu, end - start, owner);
            Item item;
            item.first_row = __shfl_sync(0xffffffffu, start, owner) + index * QUERIES;
            item.rows = min(QUERIES, queries - index * QUERIES);
            item.sequence = first + owner;
            item.context = sequences.context_lens[item.sequence];
            item.first_position = item.context - queries + index * QUERIES;
            item.tiles = (item.first_position + item.rows + KEYS - 1) / KEYS;
            item.head = number % sequences.num_heads;
            return item;
        }
        place -= __shfl_sync(0xffffffffu, through, WARP - 1);
    }
    return Item{};
}

// One warp hands an item to the consumers: its numbers and its queries. `q` is the map of [T, num_heads * HEAD_DIM].
__device__ __forceinline__ void publish(Shared &shared, const Item &item, const TensorMap &q, uint32 parity) {
    barrier_wait(&shared.q_empty, parity ^ 1);
    if (elect()) {
        shared.item = item;
        barrier_expect(&shared.q_full, item.tiles ? HALVES * QUERY_HALF_BYTES : 0);
        if (item.tiles == 0) return;
#pragma unroll
        for (int half = 0; half < HALVES; half++) {
            const int column = item.head * HEAD_DIM + half * 64;
            copy_box(shared.q + half * QUERY_HALF_BYTES, q, column, item.first_row, &shared.q_full);
        }
    }
}

__device__ __forceinline__ void sync_loaders() {
    if (LOADERS == 1) __syncwarp();
    else asm volatile("bar.sync 3, %0;" ::"n"(LOADERS * WARP) : "memory");
}

// Each lane of a warp knows about one page of a tile.
__device__ __forceinline__ int own_page() { return threadIdx.x % PAGES; }

// Keys that are loaded together, and how many tiles their block has loaded before.
struct Tile {
    int count, first_key, context;
};

// A Loader fills places with tiles. The next of its kind is announced one fill ahead, with its plane and the block in
// the pool that holds the own page.
#if KV_FORMAT <= 1

// The pool holds Activations: one warp has them copied.
struct Loader {
    Shared &shared;
    const Pool &pool;
    int rows[2] = {};  // of the own page in the pool, counted through all planes; negative is outside: copies zeros

    template <Kind KIND> __device__ __forceinline__ void announce(const Tile &tile, int plane, int block) {
        const int key = tile.first_key + own_page() * PAGE, in_block = key & ((1 << pool.block_shift) - 1);
        rows[KIND] = key < tile.context ? ((block * pool.planes + plane) << pool.block_shift) + in_block : -PAGE;
    }

    template <Kind KIND> __device__ __forceinline__ void fill(const Tile &tile) {
        const Place<KIND> place(tile.count);
        uint8 *to = shared.tiles[place.index];
        Barrier *full = &shared.full[place.index];
        const int rest = tile.context - tile.first_key;
        const int cut = rest > 0 && rest < KEYS && rest % PAGE ? rest / PAGE : PAGES;  // the page the context ends in
        int row[PAGES];
#pragma unroll
        for (int page = 0; page < PAGES; page++) row[page] = __shfl_sync(0xffffffffu, rows[KIND], page);
        barrier_wait(&shared.empty[place.index], place.parity ^ 1);
        if (cut < PAGES) copy_last_page(to, cut, __shfl_sync(0xffffffffu, rows[KIND], cut), rest % PAGE);
        if (elect()) {
            barrier_expect(full, TILE_BYTES - (cut < PAGES ? PAGE * HEAD_DIM * 2 : 0));
#pragma unroll
            for (int page = 0; page < PAGES; page++) {
                if (page == cut) continue;
#pragma unroll
                for (int half = 0; half < HALVES; half++) {
                    copy_box(to + half * HALF_BYTES + page * PAGE * ROW_BYTES, *pool.rows, half * 64, row[page], full);
                }
            }
        }
        __syncwarp();
    }

    // Rows behind the end become zeros, as 0 times whatever lies there need not be 0.
    __device__ __forceinline__ void copy_last_page(uint8 *tile, int page, int row, int count) {
        constexpr int CHUNKS = HEAD_DIM / 8;
        const uint4 *chunks = reinterpret_cast<const uint4 *>(pool.bytes) + size_t(row) * CHUNKS;
#pragma unroll 1  // saves registers
        for (int i = threadIdx.x; i < PAGE * CHUNKS; i += WARP) {
            const int r = i / CHUNKS, chunk = i % CHUNKS;
            uint8 *to = tile + chunk / 8 * HALF_BYTES + swizzled_128(page * PAGE + r, chunk % 8 * 16);
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(chunks + i),
                         "r"(r < count ? 16 : 0)
                         : "memory");
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        fence_async_proxy();
        __syncwarp();
    }
};

#else

// The pool holds bytes: they are copied as they are, then four warps convert them; all is exact but int8's scaling.
struct Loader {
    Shared &shared;
    const Pool &pool;

    template <Kind KIND> __device__ __forceinline__ void announce(const Tile &tile, int plane, int block) {
        if (threadIdx.x >= WARP) return;
        const int pages = min(PAGES, (tile.context - tile.first_key + PAGE - 1) / PAGE);
        const int block_size = 1 << pool.block_shift;
        Stored &stored = shared.stored[KIND];
        Barrier *full = &shared.stored_full[KIND];
        int blocks[PAGES];
#pragma unroll
        for (int page = 0; page < PAGES; page++) blocks[page] = __shfl_sync(0xffffffffu, block, page);
        barrier_wait(&shared.stored_empty[KIND], (tile.count & 1) ^ 1);
        if (elect()) {
            barrier_expect(full, pages * PAGE * (HEAD_DIM + (KV_SCALED ? 2 : 0)));
#pragma unroll
            for (int page = 0; page < PAGES; page++) {
                if (page >= pages) break;
                const size_t index = size_t(blocks[page]) * pool.planes + plane;
                const uint8 *elements = pool.bytes + index * plane_bytes(block_size, HEAD_DIM);
                const int first = (tile.first_key + page * PAGE) & (block_size - 1), to = page * PAGE;
                copy_bulk(stored.elements + to * HEAD_DIM, elements + first * HEAD_DIM, PAGE * HEAD_DIM, full);
                const uint8 *scales = elements + block_size * HEAD_DIM;
                if (KV_SCALED) copy_bulk(stored.scales + to, scales + first * 2, PAGE * 2, full);
            }
        }
        __syncwarp();
    }

    template <Kind KIND> __device__ __forceinline__ void fill(const Tile &tile) {
        const Place<KIND> place(tile.count);
        Stored &stored = shared.stored[KIND];
        barrier_wait(&shared.stored_full[KIND], tile.count & 1);
        if (tile.first_key + KEYS > tile.context) clear(stored, tile.context - tile.first_key);
        barrier_wait(&shared.empty[place.index], place.parity ^ 1);
        convert(shared.tiles[place.index], stored);
        fence_async_proxy();
        __syncwarp();
        if (threadIdx.x % WARP == 0) {
            arrive(&shared.full[place.index]);
            arrive(&shared.stored_empty[KIND]);
        }
    }

    // Behind the end of the context lies anything, and 0 times that need not be 0.
    static __device__ __forceinline__ void clear(Stored &stored, int first) {
#pragma unroll 1
        for (int i = first * HEAD_DIM / 16 + threadIdx.x; i < KEYS * HEAD_DIM / 16; i += WARPGROUP) {
            reinterpret_cast<uint4 *>(stored.elements)[i] = uint4{};
        }
        if (first + threadIdx.x < KEYS) stored.scales[first + threadIdx.x] = __half{};
        sync_loaders();
    }

    // A thread takes 16 elements of every ROWS-th row. The 8 lanes that access shared memory together take 4 pieces of
    // each of two neighbouring rows, in the two halves if there are two: they meet all banks, reading and writing.
    static __device__ __forceinline__ void convert(uint8 *tile, const Stored &stored) {
        constexpr int PIECE = 16, ROWS = WARPGROUP * PIECE / HEAD_DIM;
        constexpr int BATCH = KV_SCALED ? 2 : 4;  // as registers allow
        const int lane = threadIdx.x % WARP, half = HALVES == 2 ? (lane / 4 ^ lane / 8) & 1 : 0;
        const int row = threadIdx.x / WARP * (ROWS / LOADERS) + (HALVES == 2 ? lane / 16 * 2 + lane / 4 % 2 : lane / 4);
        const uint8 *from = stored.elements + row * HEAD_DIM + half * 64 + lane % 4 * PIECE;
        uint8 *to[2];
#pragma unroll
        for (int j = 0; j < 2; j++) to[j] = tile + half * HALF_BYTES + swizzled_128(row, lane % 4 * 32 + j * 16);
#pragma unroll 1
        for (int first = 0; first < KEYS; first += BATCH * ROWS) {
            uint4 pieces[BATCH];
            __half scales[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                pieces[i] = *reinterpret_cast<const uint4 *>(from + (first + i * ROWS) * HEAD_DIM);
                if (KV_SCALED) scales[i] = stored.scales[row + first + i * ROWS];
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                const uint4 &piece = pieces[i];
                const int offset = (first + i * ROWS) * ROW_BYTES;
                *reinterpret_cast<uint4 *>(to[0] + offset) = eight_activations(piece.x, piece.y, scales[i]);
                *reinterpret_cast<uint4 *>(to[1] + offset) = eight_activations(piece.z, piece.w, scales[i]);
            }
        }
    }

    static __device__ __forceinline__ uint4 eight_activations(uint32 low_word, uint32 high_word, __half scale) {
        uint32 low[PAIRS_PER_WORD], high[PAIRS_PER_WORD];
        to_pairs(low_word, low);
        to_pairs(high_word, high);
        return {activations(low[0], scale), activations(low[1], scale), activations(high[0], scale),
                activations(high[1], scale)};
    }

    // Of a pair of halves, scaled.
    static __device__ __forceinline__ uint32 activations(uint32 pair, __half scale) {
        const __half2 halves = reinterpret_cast<const __half2 &>(pair);
#if ACTIVATION_BF16
        float2 values = __half22float2(halves);
        if (KV_SCALED) values = make_float2(values.x * __half2float(scale), values.y * __half2float(scale));
        const __nv_bfloat162 result = __floats2bfloat162_rn(values.x, values.y);
#else
        // The largest scale would take 127 beyond fp16.
        const __half largest = __ushort_as_half(0x6007);  // 515.5
        const __half2 result = KV_SCALED ? __hmul2(halves, __half2half2(__hmin_nan(scale, largest))) : halves;
#endif
        return reinterpret_cast<const uint32 &>(result);
    }
};

#endif

// `count` tiles went before; returns how many there are then.
__device__ __forceinline__ int load_item(Loader &loader, const Item &item, int kv_head, int count) {
    const Pool &pool = loader.pool;
    const int k_plane = pool.first_plane + kv_head, v_plane = k_plane + pool.num_kv_heads;
    const int *table = pool.block_tables + size_t(item.sequence) * pool.max_blocks;
    const auto own_block = [&](const Tile &tile) {
        const int key = tile.first_key + own_page() * PAGE;
        return tile.first_key >= 0 && key < item.context ? table[key >> pool.block_shift] : 0;
    };
    Tile tile{count, (item.tiles - 1) * KEYS, item.context};
    int block = own_block(tile);
    loader.announce<K>(tile, k_plane, block);
    while (tile.first_key >= 0) {
        const Tile next{tile.count + 1, tile.first_key - KEYS, item.context};
        const int next_block = own_block(next);
        loader.announce<V>(tile, v_plane, block);
        loader.fill<K>(tile);
        if (next.first_key >= 0) loader.announce<K>(next, k_plane, next_block);
        loader.fill<V>(tile);
        tile = next;
        block = next_block;
    }
    return tile.count;
}

// The number of the block's next item, the same for all loading threads: items go to whoever is free.
__device__ __forceinline__ int take_number(Shared &shared, Ticket &ticket, int turn) {
    if (threadIdx.x == 0) shared.next_number[turn] = gridDim.x + atomicAdd(&ticket.next, 1);
    sync_loaders();
    return shared.next_number[turn];
}

__device__ void load(Shared &shared, const TensorMap &q, const Sequences &sequences, const Pool &pool, Ticket &ticket) {
    Loader loader{shared, pool};
    const int heads_per_kv = sequences.num_heads / pool.num_kv_heads;
    int number = blockIdx.x, count = 0;
    for (int turn = 0;; turn ^= 1) {
        const Item item = find_item(sequences, number);
        if (threadIdx.x < WARP) publish(shared, item, q, turn);
        if (item.tiles == 0) break;
        count = load_item(loader, item, item.head / heads_per_kv, count);
        number = take_number(shared, ticket, turn);
    }
    if (threadIdx.x == 0) {  // the last block leaves the counters as it found them
        __threadfence();
        if (atomicInc(&ticket.finished, gridDim.x - 1) == gridDim.x - 1) ticket.next = 0;
    }
}

// ---- computing ------------------------------------------------------------------------------------------------------

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ uint32 pack_weights(float low, float high) {
#if ACTIVATION_BF16
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
#else
    const __half2 pair = __floats2half2_rn(low, high);
#endif
    return reinterpret_cast<const uint32 &>(pair);
}

__device__ __forceinline__ uint32 pack_output(float low, float high) {
    Activation2 pair;
    pair.x = from_float<Activation>(low);
    pair.y = from_float<Activation>(high);
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

// Warpgroups multiply in turns, so that one's products run beside the other's arithmetic.
__device__ __forceinline__ void await_turn(int warpgroup) {
    asm volatile("bar.sync %0, %1;" ::"r"(1 + warpgroup), "n"(CONSUMERS * WARPGROUP) : "memory");
}
__device__ __forceinline__ void give_turn(int warpgroup) {
    asm volatile("bar.arrive %0, %1;" ::"r"(1 + warpgroup), "n"(CONSUMERS * WARPGROUP) : "memory");
}

// One thread's part of a warpgroup's 64 queries, in the layout of wgmma.cuh: of rows g and g + 8 of its warp's 16.
struct Consumer {
    Shared &shared;
    int warpgroup;
    float scale;  // of scores, times log2(e)
    int count;    // of tiles whose keys were multiplied
    bool wanted;  // there is a query in this warp
    uint32 q[HEAD_DIM / 16][4];
    float scores[KEYS / 2];
    uint32 weights[KEYS / 16][4];
    float output[HEAD_DIM / 2];
    float row_max[2], row_sum[2];
    float rescale[2];  // what sums over earlier tiles must be multiplied by

    // The 16 queries of the item that begin with `first` are this warp's.
    __device__ __forceinline__ void take_queries(int first) {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            const uint8 *half = shared.q + i / 4 * QUERY_HALF_BYTES;
            ldmatrix_x4(q[i], half + swizzled_128(first + lane % 16, i % 4 * 32 + lane / 16 * 16));
        }
        arrive(&shared.q_empty);
    }

    // scores = q K^T of tile `count`, asynchronously.
    __device__ __forceinline__ void multiply_keys() {
        const Place<K> place(count);
        barrier_wait(&shared.full[place.index], place.parity);
        const uint64 tile = swizzled_descriptor(shared.tiles[place.index]);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 16; i++) {
            wgmma(scores, q[i], tile + (i / 4 * HALF_BYTES + i % 4 * 32) / 16, i > 0);
        }
        wgmma_commit();
    }

    // output += weights V of the tile before, asynchronously.
    __device__ __forceinline__ void multiply_values() {
        const Place<V> place(count - 1);
        barrier_wait(&shared.full[place.index], place.parity);
        const uint64 tile = swizzled_descriptor(shared.tiles[place.index], 8 * ROW_BYTES, HALF_BYTES);
        wgmma_begin();
#pragma unroll
        for (int i = 0; i < KEYS / 16; i++) wgmma<1>(output, weights[i], tile + i * 16 * ROW_BYTES / 16, true);
        wgmma_commit();
    }

    __device__ __forceinline__ void release(Barrier *empty) {
        __syncwarp();
        if (threadIdx.x % WARP == 0) arrive(empty);
    }

    // `last_seen` is the last key within the tile that row g sees.
    __device__ __forceinline__ void mask(int last_seen) {
        const int column = 2 * (threadIdx.x % 4);
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            if (i / 4 * 8 + i % 2 + column > last_seen + i / 2 % 2 * 8) scores[i] = negative_infinity();
        }
    }

    // Scores become weights, exp2(scaled score - maximum so far). The roundings are spelled out: left to the compiler,
    // masked and other tiles would differ in them, and a query's result would depend on where its chunk begins.
    __device__ __forceinline__ void weigh() {
        float base[2], sum[2] = {};
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float largest = row_max[r];
#pragma unroll
            for (int i = 0; i < KEYS / 2; i += 4) {
                largest = fmaxf(largest, fmaxf(scores[i + 2 * r], scores[i + 2 * r + 1]));
            }
            largest = quad_max(largest);
            base[r] = largest == negative_infinity() ? 0.f : __fmul_rn(largest, scale);
            rescale[r] = exp2_fast(__fmaf_rn(row_max[r], scale, -base[r]));
            row_max[r] = largest;
        }
#pragma unroll
        for (int i = 0; i < KEYS / 2; i++) {
            scores[i] = exp2_fast(__fmaf_rn(scores[i], scale, -base[i / 2 % 2]));
            sum[i / 2 % 2] += scores[i];
        }
#pragma unroll
        for (int r = 0; r < 2; r++) row_sum[r] = __fmaf_rn(row_sum[r], rescale[r], sum[r]);
    }

    __device__ __forceinline__ void round_weights() {
#pragma unroll
        for (int i = 0; i < KEYS / 4; i++) weights[i / 4][i % 4] = pack_weights(scores[2 * i], scores[2 * i + 1]);
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
        release(&shared.empty[Place<K>(count++).index]);
        mask(last_seen);
        weigh();
        round_weights();
    }

    // A further tile's scores and weights, while the tile before it is multiplied with its values.
    template <bool MASKED> __device__ __forceinline__ void step(int last_seen) {
        await_turn(warpgroup);
        multiply_keys();
        multiply_values();
        give_turn(warpgroup ^ 1);
        wgmma_wait<1>();
        wgmma_settle(scores);
        release(&shared.empty[Place<K>(count).index]);
        // Without a branch here the compiler moves the wait below in front of the arithmetic it is to overlap with.
        if (wanted) {
            if (MASKED) mask(last_seen);
            weigh();
        }
        settle_output();
        count++;
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) output[i] *= rescale[i / 2 % 2];
        round_weights();
    }

    __device__ __forceinline__ void finish() {
        multiply_values();
        settle_output();
    }

    __device__ __forceinline__ void settle_output() {
        wgmma_wait<0>();
        wgmma_settle(output);
        keep(weights);
        release(&shared.empty[Place<V>(count - 1).index]);
    }

    // `row` is this thread's row g of the item, `out` points to the item's first row and head.
    __device__ __forceinline__ void store(Activation *out, int stride, int row, int rows) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const float factor = 1.f / quad_sum(row_sum[r]);
#pragma unroll
            for (int j = 0; j < HEAD_DIM / 32; j++) {
                uint32 x[4];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float *pair = output + 4 * (4 * j + i) + 2 * r;
                    x[i] = pack_output(pair[0] * factor, pair[1] * factor);
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

__device__ __forceinline__ void compute(Shared &shared, Activation *out, int num_heads, float scale) {
    const int warpgroup = threadIdx.x / WARPGROUP - 1;
    const int warp_row = (threadIdx.x - WARPGROUP) / WARP * 16, row = warp_row + threadIdx.x % WARP / 4;
    if (warpgroup == 1) give_turn(0);
    Consumer consumer{shared, warpgroup, scale, 0};
    for (uint32 parity = 0;; parity ^= 1) {
        barrier_wait(&shared.q_full, parity);
        const Item item = shared.item;
        if (item.tiles == 0) return;
        consumer.take_queries(warp_row);
        consumer.wanted = warp_row < item.rows;

        const int position = item.first_position + row;
        const int unmasked = (item.first_position + warpgroup * 64 + 1) / KEYS;  // tiles that all 64 rows see
        int tile = item.tiles - 1;
        consumer.begin(position - tile * KEYS);
#pragma unroll 1
        for (tile--; tile >= unmasked; tile--) consumer.step<true>(position - tile * KEYS);
#pragma unroll 1
        for (; tile >= 0; tile--) consumer.step<false>(0);
        consumer.finish();
        const size_t first = (size_t(item.first_row) * num_heads + item.head) * HEAD_DIM;
        consumer.store(out + first, num_heads * HEAD_DIM, row, item.rows);
    }
}

// One thread's work. A tile is filled by the loading warps, and emptied by the computing ones.
__device__ void init_barriers(Shared &shared) {
    constexpr int READERS = CONSUMERS * WARPGROUP / WARP;
    for (Barrier &barrier : shared.full) barrier_init(&barrier, LOADERS);
    for (Barrier &barrier : shared.empty) barrier_init(&barrier, READERS);
#if KV_FORMAT > 1
    for (Barrier &barrier : shared.stored_full) barrier_init(&barrier, 1);
    for (Barrier &barrier : shared.stored_empty) barrier_init(&barrier, LOADERS);
#endif
    barrier_init(&shared.q_full, 1);
    barrier_init(&shared.q_empty, CONSUMERS * WARPGROUP);
    fence_barrier_init();
}

// q and out are [T, num_heads * HEAD_DIM]; sequence s has their rows query_starts[s] to query_starts[s + 1]. `rows` is
// the map of a pool of Activations as [planes * block size, HEAD_DIM].
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    paged_prefill_hopper(const __grid_constant__ TensorMap q, const __grid_constant__ TensorMap rows,
                         const uint8 *pool_bytes, const int *block_tables, const int *query_starts,
                         const int *context_lens, Activation *out, int num_sequences, int max_blocks, int block_shift,
                         int planes, int first_plane, int num_heads, int num_kv_heads, float scale, int ticket) {
    extern __shared__ uint8 unaligned[];
    Shared &shared = *reinterpret_cast<Shared *>(unaligned + (-shared_address(unaligned) & 1023));
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (threadIdx.x < WARPGROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(LOADER_REGISTERS));
        const Sequences sequences{query_starts, context_lens, num_sequences, num_heads};
        const Pool pool{pool_bytes, &rows, block_tables, max_blocks, block_shift, planes, first_plane, num_kv_heads};
        if (threadIdx.x < LOADERS * WARP) load(shared, q, sequences, pool, tickets[ticket]);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
        compute(shared, out, num_heads, scale);
    }
}
