// Causal attention of prompt chunks over the paged pool: one pass over the keys with a running softmax.
//
// A block owns ROWS query rows of one sequence and one KV head, and walks over that sequence's keys, KEYS at a time.
// Row r of a sequence is query head r % ratio of the group at token r / ratio of the chunk: a group reads its K and V
// once. K and V come asynchronously, one step ahead; formats of one byte land as they are stored and are converted once
// per block. Scores and sums are fp32, the products' operands KVValue (kv_read.cuh).
//
// Grid (tiles * KV heads, splits): `tiles` bounds the sequences' tiles from above, blocks without one exit. With
// splits, the blocks of a tile share its keys and leave parts for paged_prefill_merge.
//
// Macros: ACTIVATION_BF16, KV_FORMAT, HEAD_DIM, WARPS, ROWS_PER_WARP (16 or 32), KEYS (a multiple of 16),
// BLOCKS_PER_SM; K_BIAS, 1 where K is stored without its bias. With rotary pairs as complex numbers, a bias b adds
// Re(conj(b) q exp(-i p angle)), summed over pairs, to the score of a key at position p: a second product, in half, of
// conj(b) q, which is found once per row, with rows of a table that all sequences and layers share.
#include "common.cuh"
#include "kv_read.cuh"
#include "mma.cuh"

#ifndef K_BIAS
#define K_BIAS 0
#endif
#if K_BIAS
#include "key_bias.cuh"
#endif

constexpr int THREADS = WARPS * WARP;
constexpr int ROWS = WARPS * ROWS_PER_WARP;
constexpr int ROW_TILES = ROWS_PER_WARP / 16;
constexpr int KEY_TILES = KEYS / 8;
constexpr int COLUMN_TILES = HEAD_DIM / 8;
constexpr int SPAN = 16;  // keys that certainly lie in one block of the pool, side by side

constexpr bool CONVERTED = KV_ELEMENT_BYTES == 1;
constexpr int STAGES = CONVERTED ? 1 : 2;
constexpr int ROW_BYTES = HEAD_DIM * 2;
constexpr int STORED_ROW_BYTES = HEAD_DIM * KV_ELEMENT_BYTES;
constexpr int TILE_BYTES = KEYS * ROW_BYTES;
constexpr int LANDING_BYTES = KEYS * (STORED_ROW_BYTES + (KV_SCALED ? 2 : 0));

// A row's running maximum may lag this far (in powers of two) behind the true one: P stays below 2^8, and most steps
// need not touch what is summed so far.
constexpr float LAG = 8.f;
// Below every score, yet finite: masked scores (-inf) less a maximum that nothing has raised yet give -inf, not NaN.
constexpr float LOWEST = -3.0e38f;

// n / divisor for n < 2^31 / divisor.
struct Divider {
    uint32 divisor, magic;
    __device__ uint32 quotient(uint32 n) const { return __umulhi(2 * n, magic); }
};
__device__ __forceinline__ Divider divider(uint32 d) { return {d, ((1u << 31) + d - 1) / d}; }

// What a block works on: rows [first_row, first_row + ROWS) of the `rows` of a sequence whose chunk begins at token
// first_token of q and at first_position of the sequence; and keys [first_key, end_key), of which there may be none.
struct Work {
    Divider ratio;
    int sequence, rows, first_row, first_token, first_position, first_head, first_key, end_key;

    // Position, in the sequence, of row `row` of the tile; of the last row for rows past it.
    __device__ int position(int row) const { return first_position + ratio.quotient(min(first_row + row, rows - 1)); }

    // Where that row is in q and out, both [T, H, HEAD_DIM].
    __device__ size_t target(int row, int num_heads) const {
        const int index = min(first_row + row, rows - 1), token = ratio.quotient(index);
        const int head = first_head + index - token * ratio.divisor;
        return static_cast<size_t>(first_token + token) * num_heads + head;
    }
    __device__ bool has(int row) const { return first_row + row < rows; }
};

// The sequence's K and V planes of one layer and KV head.
struct Planes {
    Divider block_size;
    const uint8 *first_block;
    const int *block_table;
    int block_bytes, to_values;  // from a block to the next, from a K plane to its V plane

    // The K plane that key lies in, and the key's place in it.
    __device__ const uint8 *find(uint32 key, uint32 &token) const {
        const uint32 block = block_size.quotient(key);
        token = key - block * block_size.divisor;
        return first_block + static_cast<long long>(__ldg(block_table + block)) * block_bytes;
    }
};

// What the block's threads share about their work, in front of the tiles: registers are what this kernel is short of.
struct alignas(128) Assignment {
    Work work;
    Planes planes;
#if K_BIAS
    KeyBias bias;  // of the group
    const __half *turns;
#endif
    bool idle;
};

// Tiles in shared memory are rows of 16-byte chunks, shuffled so that 8 rows of a column of chunks use all banks.
constexpr int SHUFFLED = COLUMN_TILES % 8 == 0 ? 8 : 4;
__device__ __forceinline__ uint32 shuffle_of(uint32 row) { return SHUFFLED == 8 ? row % 8 : row / 2 % 4; }
__device__ __forceinline__ uint32 place(uint32 row, uint32 chunk) {
    return row * ROW_BYTES + (chunk ^ shuffle_of(row)) * 16;
}

// The thread, read anew at every call: addresses that follow from it are computed again where they are used, rather
// than kept in registers.
__device__ __forceinline__ uint32 thread_now() {
    uint32 thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}

// Where a lane finds its row for ldmatrix: chunk 2 * step + half of its row, and of the one `rows` (8 n) below.
struct LaneRow {
    const uint8 *start;
    uint32 twist;
    __device__ LaneRow(const uint8 *tile, uint32 row, uint32 half)
        : start(tile + row * ROW_BYTES), twist(half ^ shuffle_of(row)) {}
    __device__ const uint8 *at(int rows, int step) const {
        const int chunk = 2 * step;
        return start + rows * ROW_BYTES + chunk / SHUFFLED * SHUFFLED * 16 + ((chunk % SHUFFLED) ^ twist) * 16;
    }
};

// Copies 16 bytes to shared memory without waiting; those from `bytes` on become zero.
__device__ __forceinline__ void copy_async(uint8 *to, const uint8 *from, int bytes) {
    const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(from), "r"(bytes) : "memory");
}

__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The block's tile, for a whole warp: sequences in their order, in each the latest tile, which has the most keys,
// first. False when there are fewer tiles than `wanted`.
__device__ bool find_tile(const int *query_starts, int num_sequences, int wanted, Work &work) {
    const int lane = threadIdx.x % WARP;
    for (int first = 0; first < num_sequences; first += WARP) {
        const int own = min(first + lane, num_sequences - 1);
        const int rows = (query_starts[own + 1] - query_starts[own]) * work.ratio.divisor;
        const int tiles = first + lane < num_sequences ? (rows + ROWS - 1) / ROWS : 0;
        int end = tiles;
#pragma unroll
        for (int offset = 1; offset < WARP; offset *= 2) {
            const int before = __shfl_up_sync(0xffffffffu, end, offset);
            end += lane >= offset ? before : 0;
        }
        const uint32 reached = __ballot_sync(0xffffffffu, wanted < end);
        if (reached) {
            const int owner = __ffs(reached) - 1;
            work.sequence = first + owner;
            work.rows = __shfl_sync(0xffffffffu, rows, owner);
            work.first_row = (__shfl_sync(0xffffffffu, end, owner) - 1 - wanted) * ROWS;
            return true;
        }
        wanted -= __shfl_sync(0xffffffffu, end, WARP - 1);
    }
    return false;
}

// This block's work: its tile, and its share of the keys that the tile's rows see.
__device__ bool find_work(const int *query_starts, const int *context_lens, int num_sequences, int num_kv_heads,
                          Work &work) {
    if (!find_tile(query_starts, num_sequences, blockIdx.x / num_kv_heads, work)) return false;
    work.first_token = query_starts[work.sequence];
    work.first_position = context_lens[work.sequence] - (query_starts[work.sequence + 1] - work.first_token);
    work.first_head = blockIdx.x % num_kv_heads * work.ratio.divisor;
    const int end = work.position(ROWS - 1) + 1, steps = (end + KEYS - 1) / KEYS;
    const int share = (steps + gridDim.y - 1) / gridDim.y * KEYS;
    work.first_key = share * blockIdx.y;
    work.end_key = min(work.first_key + share, end);
    return true;
}

// The chunk that this thread takes in the given pass over a tile whose rows have ROW_CHUNKS chunks.
template <uint32 ROW_CHUNKS> __device__ __forceinline__ uint2 row_and_chunk(uint32 pass) {
    if constexpr (THREADS % ROW_CHUNKS == 0) {  // the same chunk in every pass: what depends on it is computed once
        return make_uint2(threadIdx.x / ROW_CHUNKS + pass * (THREADS / ROW_CHUNKS), threadIdx.x % ROW_CHUNKS);
    } else {
        const uint32 i = threadIdx.x + pass * THREADS;
        return make_uint2(i / ROW_CHUNKS, i % ROW_CHUNKS);
    }
}

// Rows of q to shared memory, as KVValue; rows past the sequence's end are zero.
__device__ void load_queries(uint8 *tile, const Activation *q, const Work &work, int num_heads) {
    for (uint32 pass = 0; pass < ROWS * COLUMN_TILES / THREADS; pass++) {
        const auto [row, chunk] = row_and_chunk<COLUMN_TILES>(pass);
        const Activation *from = q + work.target(row, num_heads) * HEAD_DIM + chunk * 8;
        uint8 *to = tile + place(row, chunk);
        if constexpr (ACTIVATION_BF16 == (KV_FORMAT == 1)) {
            copy_async(to, reinterpret_cast<const uint8 *>(from), work.has(row) ? 16 : 0);
        } else {
            const uint4 loaded = work.has(row) ? *reinterpret_cast<const uint4 *>(from) : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int e = 0; e < 8; e++) {
                const Activation value = reinterpret_cast<const Activation *>(&loaded)[e];
                reinterpret_cast<KVValue *>(to)[e] = from_float<KVValue>(to_float(value));
            }
        }
    }
}

// Begins to copy KEYS rows of K and V as they are stored; rows from `end` on become zero. Two-byte formats land where
// they are used, shuffled; others in rows one behind the other, and int8's scales behind all rows.
__device__ __forceinline__ void
load_keys(uint8 *keys, uint8 *values, const Planes &shared_planes, int first_key, int end) {
    constexpr uint32 ROW_CHUNKS = STORED_ROW_BYTES / 16, SPAN_CHUNKS = SPAN * ROW_CHUNKS, CHUNKS = KEYS * ROW_CHUNKS;
    constexpr uint32 PASSES = (CHUNKS + THREADS - 1) / THREADS;
    const Planes planes = shared_planes;
    const uint8 *spans[PASSES];
#pragma unroll
    for (uint32 pass = 0; pass < PASSES; pass++) {
        if (SPAN_CHUNKS % THREADS == 0 && pass * THREADS % SPAN_CHUNKS != 0) {
            spans[pass] = spans[pass - 1];
        } else {
            const int row = row_and_chunk<ROW_CHUNKS>(pass).x;
            uint32 token;
            const uint8 *plane = planes.find(min(first_key + row, end - 1), token);
            spans[pass] = plane + token / SPAN * SPAN * STORED_ROW_BYTES;
        }
    }
#pragma unroll
    for (uint32 pass = 0; pass < PASSES; pass++) {
        const auto [row, chunk] = row_and_chunk<ROW_CHUNKS>(pass);
        if (CHUNKS % THREADS != 0 && row >= KEYS) break;
        const uint8 *from = spans[pass] + row % SPAN * STORED_ROW_BYTES + chunk * 16;
        const uint32 to = CONVERTED ? row * STORED_ROW_BYTES + chunk * 16 : place(row, chunk);
        const int bytes = first_key + static_cast<int>(row) < end ? 16 : 0;
        copy_async(keys + to, from, bytes);
        copy_async(values + to, from + planes.to_values, bytes);
    }
    if (KV_SCALED && threadIdx.x < KEYS / 8) {
        const int first = first_key + threadIdx.x * 8, to = KEYS * STORED_ROW_BYTES + threadIdx.x * 16;
        uint32 token;
        const uint8 *plane = planes.find(min(first, end - 1), token);
        const uint8 *from = plane + planes.block_size.divisor * HEAD_DIM + token / 8 * 16;
        const int bytes = 2 * max(0, min(end - first, 8));
        copy_async(keys + to, from, bytes);
        copy_async(values + to, from + planes.to_values, bytes);
    }
}

#if K_BIAS
// Rows of conj(b) q, such that their products with turns are what the bias adds to those of q and K.
__device__ void load_spins(uint8 *tile, const Activation *q, const Work &work, const KeyBias &bias, int num_heads) {
    const float factor = __ldg(bias.rotary) / TURN_SCALE;  // turns have none
    for (uint32 pass = 0; pass < ROWS * COLUMN_TILES / THREADS; pass++) {
        const auto [row, chunk] = row_and_chunk<COLUMN_TILES>(pass);
        float values[8] = {};
        if (work.has(row)) load8(q + work.target(row, num_heads) * HEAD_DIM + chunk * 8, values);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const float4 pairs = __ldg(bias.pairs_at(0, 4 * chunk + 2 * i));
            const float4 x = make_float4(values[4 * i], values[4 * i + 1], values[4 * i + 2], values[4 * i + 3]);
            values[4 * i] = factor * fmaf(x.x, pairs.x, x.y * pairs.y);
            values[4 * i + 1] = factor * fmaf(x.y, pairs.x, -x.x * pairs.y);
            values[4 * i + 2] = factor * fmaf(x.z, pairs.z, x.w * pairs.w);
            values[4 * i + 3] = factor * fmaf(x.w, pairs.z, -x.z * pairs.w);
        }
        store8(reinterpret_cast<__half *>(tile + place(row, chunk)), values);
    }
}

// Behind the spins there are two tiles of turns, used in turn.
__device__ __forceinline__ uint8 *turn_tile_of(uint8 *spin_tile, int first_key) {
    return spin_tile + ROWS * ROW_BYTES + first_key / KEYS % 2 * TILE_BYTES;
}

// Begins to copy the turns of KEYS positions. Past the table's end there are no keys.
__device__ __forceinline__ void load_turns(uint8 *tile, const Assignment &assignment, int first_key) {
    constexpr uint32 PASSES = (KEYS * COLUMN_TILES + THREADS - 1) / THREADS;
#pragma unroll
    for (uint32 pass = 0; pass < PASSES; pass++) {
        const auto [row, chunk] = row_and_chunk<COLUMN_TILES>(pass);
        if (KEYS * COLUMN_TILES % THREADS != 0 && row >= KEYS) break;
        const size_t position = min(first_key + static_cast<int>(row), assignment.bias.positions - 1);
        const __half *from = assignment.turns + position * HEAD_DIM + chunk * 8;
        copy_async(tile + place(row, chunk), reinterpret_cast<const uint8 *>(from), 16);
    }
}
#endif

// KEYS rows of a one-byte format as KVValue. int8's scales are applied here: the rounding is that of an fp16 pool.
__device__ __forceinline__ void convert(uint8 *tile, const uint8 *landed) {
    constexpr uint32 PASSES = (KEYS * COLUMN_TILES + THREADS - 1) / THREADS;
#pragma unroll 4
    for (uint32 pass = 0; pass < PASSES; pass++) {
        const auto [row, chunk] = row_and_chunk<COLUMN_TILES>(pass);
        if (KEYS * COLUMN_TILES % THREADS != 0 && row >= KEYS) break;
        const uint2 stored = *reinterpret_cast<const uint2 *>(landed + row * STORED_ROW_BYTES + chunk * 8);
        uint32 pairs[2][PAIRS_PER_WORD];
        to_pairs(stored.x, pairs[0]);
        to_pairs(stored.y, pairs[1]);
        uint4 values = make_uint4(pairs[0][0], pairs[0][1 % PAIRS_PER_WORD], pairs[1][0], pairs[1][1 % PAIRS_PER_WORD]);
        if constexpr (KV_SCALED) {
            // 127 * 515.5 is the largest product that fp16 holds; only values beyond 65450 have a larger scale.
            const __half scale = __hmin_nan(reinterpret_cast<const __half *>(landed + KEYS * STORED_ROW_BYTES)[row],
                                            __ushort_as_half(0x6007));
            __half2 *products = reinterpret_cast<__half2 *>(&values);
#pragma unroll
            for (int e = 0; e < 4; e++) products[e] = __hmul2(products[e], __half2half2(scale));
        }
        *reinterpret_cast<uint4 *>(tile + place(row, chunk)) = values;
    }
}

using Scores = float[ROW_TILES][KEY_TILES][4];
using Sums = float[ROW_TILES][COLUMN_TILES][4];
using RowNumbers = float[ROW_TILES][2];  // of rows g and g + 8 of each 16

// What a warp has of its rows so far: sums of P V, each row's maximum of scores * scale that P is relative to, and each
// lane's part of the row's sum of P.
struct Running {
    Sums sums;
    RowNumbers maxima, weights;
};

// scores += A B^T for a tile of ROWS_PER_WARP rows and one of KEYS rows, both HEAD_DIM wide, of values T.
template <typename T>
__device__ __forceinline__ void add_scores(Scores &scores, const LaneRow &a_rows, const LaneRow &b_rows) {
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++) {
        uint32 a[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++) ldmatrix_x4(a[m], a_rows.at(16 * m, step));
#pragma unroll
        for (int n = 0; n < KEY_TILES; n += 2) {
            uint32 loaded[4];
            ldmatrix_x4(loaded, b_rows.at(8 * n, step));
            const uint32 b[2][2] = {{loaded[0], loaded[1]}, {loaded[2], loaded[3]}};
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                mma_m16n8k16<T>(scores[m][n], a[m], b[0]);
                mma_m16n8k16<T>(scores[m][n + 1], a[m], b[1]);
            }
        }
    }
}

// sums += P V.
__device__ __forceinline__ void add_values(Sums &sums, const Scores &p, const LaneRow &v_rows) {
#pragma unroll
    for (int step = 0; step < KEYS / 16; step++) {
        uint32 a[ROW_TILES][4];
#pragma unroll
        for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float *pair = &p[m][2 * step + i / 2][i % 2 * 2];
                a[m][i] = pack_pair(pair[0], pair[1]);
            }
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n += 2) {
            uint32 loaded[4];
            ldmatrix_x4_transposed(loaded, v_rows.at(16 * step, n / 2));
            const uint32 b[2][2] = {{loaded[0], loaded[1]}, {loaded[2], loaded[3]}};
#pragma unroll
            for (int m = 0; m < ROW_TILES; m++) {
                mma_m16n8k16<KVValue>(sums[m][n], a[m], b[0]);
                mma_m16n8k16<KVValue>(sums[m][n + 1], a[m], b[1]);
            }
        }
    }
}

// Scores of keys that come after their query become -inf, whatever they were.
__device__ __forceinline__ void mask(Scores &scores, const Work &work, int first_row, int first_key) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int last = work.position(first_row + 16 * m + 8 * half + lane / 4) - first_key - lane % 4 * 2;
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (8 * n + e > last) scores[m][n][2 * half + e] = negative_infinity();
        }
}

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Raises the maxima to those `found` in this step, and scales what is summed so far to fit.
__device__ __forceinline__ void raise(Running &running, const RowNumbers &found) {
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float raised = fmaxf(running.maxima[m][half], found[m][half]);
            raised = fmaxf(raised, __shfl_xor_sync(0xffffffffu, raised, 1));
            raised = fmaxf(raised, __shfl_xor_sync(0xffffffffu, raised, 2));
            const float factor = exp2_fast(running.maxima[m][half] - raised);
            running.maxima[m][half] = raised;
            running.weights[m][half] *= factor;
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
                running.sums[m][n][2 * half] *= factor;
                running.sums[m][n][2 * half + 1] *= factor;
            }
        }
}

// Scores become P = 2^(score * scale - maximum), and the weights grow by it.
__device__ __forceinline__ void soften(Scores &scores, Running &running, float scale) {
    RowNumbers found;
    bool higher = false;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float highest = negative_infinity();
#pragma unroll
            for (int n = 0; n < KEY_TILES; n++)
                highest = fmaxf(highest, fmaxf(scores[m][n][2 * half], scores[m][n][2 * half + 1]));
            found[m][half] = highest * scale;
            higher |= found[m][half] > running.maxima[m][half] + LAG;
        }
    if (__any_sync(0xffffffffu, higher)) raise(running, found);
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int n = 0; n < KEY_TILES; n++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float p = exp2_fast(fmaf(scores[m][n][e], scale, -running.maxima[m][e / 2]));
                scores[m][n][e] = p;
                running.weights[m][e / 2] += p;
            }
}

// All of the block's keys for the warp's rows, which begin at first_row of the tile.
__device__ __forceinline__ void attend(Running &running, uint8 *query_tile, const Assignment &assignment, int first_row,
                                       float scale) {
    const Work &work = assignment.work;
    const Planes &planes = assignment.planes;
    uint8 *const spin_tile = query_tile + ROWS * ROW_BYTES;  // with K_BIAS
    uint8 *const tiles = spin_tile + K_BIAS * (ROWS * ROW_BYTES + 2 * TILE_BYTES);
    uint8 *const landing = tiles + (CONVERTED ? 2 * TILE_BYTES : 0);
    constexpr int ARRIVING_BYTES = CONVERTED ? LANDING_BYTES : TILE_BYTES;
    const int end_key = work.end_key;
    const int last_position = work.has(first_row) ? work.position(first_row + ROWS_PER_WARP - 1) : -1;
    int stage = 0;
    load_keys(landing, landing + ARRIVING_BYTES, planes, work.first_key, end_key);
#if K_BIAS
    load_turns(turn_tile_of(spin_tile, work.first_key), assignment, work.first_key);
#endif
    for (int key = work.first_key; key < end_key; key += KEYS) {
        wait_for_copies();
        __syncthreads();  // these KEYS are there, and all warps are done with those before
        uint8 *const keys = tiles + stage * 2 * TILE_BYTES, *const values = keys + TILE_BYTES;
        if constexpr (CONVERTED) {
            convert(keys, landing);
            convert(values, landing + LANDING_BYTES);
            __syncthreads();
        }
        stage = (stage + 1) % STAGES;
        if (key + KEYS < end_key) {
            uint8 *const next = landing + stage * 2 * TILE_BYTES;
            load_keys(next, next + ARRIVING_BYTES, planes, key + KEYS, end_key);
#if K_BIAS
            load_turns(turn_tile_of(spin_tile, key + KEYS), assignment, key + KEYS);
#endif
        }
        if (key > last_position) continue;
        Scores scores = {};
        const uint32 thread = thread_now(), lane = thread % WARP;
        const uint32 own_row = thread / WARP * ROWS_PER_WARP + lane % 16, own_key = lane / 16 * 8 + lane % 8;
        add_scores<KVValue>(scores, LaneRow(query_tile, own_row, lane / 16), LaneRow(keys, own_key, lane / 8 % 2));
#if K_BIAS
        add_scores<__half>(scores, LaneRow(spin_tile, own_row, lane / 16),
                           LaneRow(turn_tile_of(spin_tile, key), own_key, lane / 8 % 2));
#endif
        if (key + KEYS - 1 > work.position(first_row)) mask(scores, work, first_row, key);
        soften(scores, running, scale);
        add_values(running.sums, scores, LaneRow(values, lane % 16, lane / 16));
    }
}

// The rows' results, through the warp's own part of the query tile, which has served, to `out` [T, H * HEAD_DIM].
__device__ void write_rows(Activation *out, uint8 *tile, const Running &running, const Work &work, int first_row,
                           int num_heads) {
    const int lane = threadIdx.x % WARP;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float inverse = 1.f / running.weights[m][half];
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) {
                Activation *pair = reinterpret_cast<Activation *>(
                    tile + place(first_row + 16 * m + 8 * half + lane / 4, n) + lane % 4 * 4);
                pair[0] = from_float<Activation>(running.sums[m][n][2 * half] * inverse);
                pair[1] = from_float<Activation>(running.sums[m][n][2 * half + 1] * inverse);
            }
        }
    __syncwarp();
    for (int i = lane; i < ROWS_PER_WARP * COLUMN_TILES; i += WARP) {
        const int row = first_row + i / COLUMN_TILES, chunk = i % COLUMN_TILES;
        if (!work.has(row)) break;
        *reinterpret_cast<uint4 *>(out + work.target(row, num_heads) * HEAD_DIM + chunk * 8) =
            *reinterpret_cast<const uint4 *>(tile + place(row, chunk));
    }
}

// The rows' parts: `parts` fp32 [T, H, HEAD_DIM], each divided by its weight, and log2 of the weight: `levels` [T, H].
__device__ void write_parts(float *parts, float *levels, const Running &running, const Work &work, int first_row,
                            int num_heads) {
    const int lane = threadIdx.x % WARP;
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + 16 * m + 8 * half + lane / 4;
            if (!work.has(row)) continue;
            const size_t target = work.target(row, num_heads);
            const float weight = running.weights[m][half], inverse = weight == 0.f ? 0.f : 1.f / weight;
            if (lane % 4 == 0) levels[target] = running.maxima[m][half] + log2f(weight);
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++)
                *reinterpret_cast<float2 *>(parts + target * HEAD_DIM + 8 * n + lane % 4 * 2) =
                    make_float2(running.sums[m][n][2 * half] * inverse, running.sums[m][n][2 * half + 1] * inverse);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
paged_prefill(const Activation *q, const uint8 *pool, const int *block_tables, const int *query_starts,
              const int *context_lens, Activation *out, float *parts, float *levels, int num_tokens, int num_sequences,
              int num_heads, int num_kv_heads, int block_size, int max_blocks, int block_bytes, int layer_offset,
              float scale
#if K_BIAS
              ,
              const float *key_bias, const float *rotary, int positions, const __half *turns
#endif
) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    extern __shared__ uint8 shared[];
    Assignment &assignment = *reinterpret_cast<Assignment *>(shared);
    uint8 *const query_tile = shared + sizeof(Assignment);
    const int first_row = threadIdx.x / WARP * ROWS_PER_WARP;
    if (threadIdx.x < WARP) {
        Work work{divider(num_heads / num_kv_heads)};
        const bool found = find_work(query_starts, context_lens, num_sequences, num_kv_heads, work);
        if (threadIdx.x == 0) {
            const int plane = plane_bytes(block_size, HEAD_DIM), group = blockIdx.x % num_kv_heads;
            assignment.planes = Planes{divider(block_size), pool + layer_offset + group * plane,
                                       block_tables + work.sequence * max_blocks, block_bytes, num_kv_heads * plane};
            assignment.work = work;
#if K_BIAS
            assignment.bias = {key_bias + group * HEAD_DIM, rotary, positions};
            assignment.turns = turns;
#endif
            assignment.idle = !found;
        }
    }
    __syncthreads();
    if (assignment.idle) return;

    const Work &work = assignment.work;
    Running running = {};
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++) running.maxima[m][0] = running.maxima[m][1] = LOWEST;
    if (work.first_key < work.end_key) {
        load_queries(query_tile, q, work, num_heads);
#if K_BIAS
        load_spins(query_tile + ROWS * ROW_BYTES, q, work, assignment.bias, num_heads);
#endif
        attend(running, query_tile, assignment, first_row, scale);
    }
#pragma unroll
    for (int m = 0; m < ROW_TILES; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            running.weights[m][half] += __shfl_xor_sync(0xffffffffu, running.weights[m][half], 1);
            running.weights[m][half] += __shfl_xor_sync(0xffffffffu, running.weights[m][half], 2);
        }
    if (gridDim.y == 1) {
        write_rows(out, query_tile, running, work, first_row, num_heads);
    } else {
        const size_t rows = static_cast<size_t>(num_tokens) * num_heads * blockIdx.y;
        write_parts(parts + rows * HEAD_DIM, levels + rows, running, work, first_row, num_heads);
    }
}
