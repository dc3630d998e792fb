// Attention of one query token per sequence over the paged KV pool.
//
// All query heads of a KV head are computed together, so K and V are read once. Tensor cores work on the transposed
// problem, tokens in the rows of K and dimensions in the rows of V^T, so that the few heads fill the 8 columns:
//   S^T [16 tokens x 8 heads] = K [16 x D] Q^T,   O^T [D x 8 heads] += V^T [D x 16] P^T [16 x 8].
// Which dimension is which step of a product, and which token which row, is free. It is chosen so that every lane loads
// its own fragments from global memory, in pieces of up to 16 bytes that fill whole sectors; nothing is staged.
//
// The grid is fixed: its blocks take work items (sequence, split, KV head) in turn. The warps of a block take the
// tiles of an item in turn and keep a softmax each; these are merged at the item's end. A sequence of several splits is
// merged by the block that ends last, in the order of the splits. So results depend on split_tokens and nothing else.
#include "kv_read.cuh"
#include "mma.cuh"

#ifndef WARPS
#define WARPS 4
#endif
#ifndef HINT
#define HINT ".L2::256B"
#endif
constexpr int THREADS = WARPS * WARP;
constexpr int D = HEAD_DIM;
constexpr int HEADS = 8 * HEAD_TILES;  // query heads of one item
constexpr int ROW_BYTES = D * KV_ELEMENT_BYTES;
constexpr bool IS_SMALL = HEAD_TILES == 1 && D <= 128;
#ifndef BLOCKS_PER_SM
#define BLOCKS_PER_SM (IS_SMALL ? 3 : 2)
#endif
#ifndef TILES
#define TILES (IS_SMALL && ROW_BYTES <= 128 ? 2 : 1)
#endif
constexpr int TILE = 16;            // tokens
constexpr int STEP = TILE * TILES;  // tokens a warp takes at a time
constexpr int PRODUCT_STEPS = D / 16;   // of Q K
constexpr int OUTPUT_TILES = D / 16;    // of O^T, 16 dimensions each
constexpr int WORDS_PER_STEP = 2 / PAIRS_PER_WORD;

// In K, lane 4g + t reads pieces t, t + 4, ... of the rows 2g and 2g + 1 of a tile. In V, pieces g, g + 8, ... of the rows 4t to 4t + 3.
constexpr int KEY_WORDS = ROW_BYTES / 16, VALUE_WORDS = ROW_BYTES / 32;
constexpr int KEY_PIECE = ROW_BYTES % 64 == 0 ? 16 : 8;
constexpr int VALUE_PIECE = ROW_BYTES % 128 == 0 ? 16 : ROW_BYTES % 64 == 0 ? 8 : 4;
constexpr int KEY_RUN = KEY_PIECE / KV_ELEMENT_BYTES, VALUE_RUN = VALUE_PIECE / KV_ELEMENT_BYTES;

// What a maximum starts with: below every score, yet finite, so that differences of two such are no NaN.
constexpr float LOWEST = -1e38f;

struct Arguments {
    const uint8 *pool;
    const int *block_tables;
    int max_blocks, num_heads, num_kv_heads, block_size, block_bytes, layer_offset;
};

// One block's work: `heads` query heads from `first_head` on, over the tokens [begin, end) of a sequence.
struct Item {
    int sequence, split, splits, slot, group, groups;
    int kv_head, first_head, heads;
    int begin, end;
};

__device__ __forceinline__ int ceil_divide(int a, int b) { return (a + b - 1) / b; }

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <int BYTES> __device__ __forceinline__ void load(uint32 *words, const uint8 *address) {
    static_assert(BYTES == 4 || BYTES == 8 || BYTES == 16);
    if constexpr (BYTES == 16) {
        asm volatile("ld.global.L1::no_allocate" HINT ".v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "l"(address));
    } else if constexpr (BYTES == 8) {
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address));
    } else {
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(address));
    }
}

// ---- Work items -----------------------------------------------------------------------------------------------------

// What one block computes together: a KV head's query heads, or a part of them where they are many.
__device__ __forceinline__ int count_groups(const Arguments &arguments) {
    return arguments.num_kv_heads * ceil_divide(arguments.num_heads / arguments.num_kv_heads, HEADS);
}

// plan: [split_tokens, starts[0..batch]], where starts counts the splits of all sequences before.
__device__ __forceinline__ Item find_item(const Arguments &arguments, const int *plan, const int *context_lens, int batch, int index) {
    const int group_heads = arguments.num_heads / arguments.num_kv_heads;
    const int chunks = ceil_divide(group_heads, HEADS), groups = count_groups(arguments);
    const int unit = index / groups;
    int before = 0;
    for (int sequence = threadIdx.x % WARP; sequence < batch; sequence += WARP) before += plan[2 + sequence] <= unit;

    Item item;
    item.slot = index;
    item.sequence = __reduce_add_sync(0xffffffffu, before);
    item.group = index % groups;
    item.groups = groups;
    item.split = unit - plan[1 + item.sequence];
    item.splits = plan[2 + item.sequence] - plan[1 + item.sequence];
    item.kv_head = item.group / chunks;
    const int first = item.group % chunks * HEADS;
    item.first_head = item.kv_head * group_heads + first;
    item.heads = min(HEADS, group_heads - first);
    item.begin = item.split * plan[0];
    item.end = min(context_lens[item.sequence], item.begin + plan[0]);
    return item;
}

// ---- Tiles of the pool ----------------------------------------------------------------------------------------------

// Where tile `index` of the sequence begins in K; past the item's end, where its last tile does.
struct Tile {
    const uint8 *keys, *scales;
};

__device__ __forceinline__ Tile find_tile(const Arguments &arguments, const Item &item, int token) {
    const int inside = min(token, (item.end - 1) / TILE * TILE);
    const int block = inside / arguments.block_size, offset = inside - block * arguments.block_size;
    const int page = arguments.block_tables[static_cast<size_t>(item.sequence) * arguments.max_blocks + block];
    const uint8 *plane = arguments.pool + static_cast<size_t>(page) * arguments.block_bytes + arguments.layer_offset +
                         item.kv_head * plane_bytes(arguments.block_size, D);
    return {plane + offset * ROW_BYTES, plane + arguments.block_size * ROW_BYTES + 2 * offset};
}

// The tiles a warp takes together.
__device__ __forceinline__ void find_tiles(Tile (&tiles)[TILES], const Arguments &arguments, const Item &item, int token) {
#pragma unroll
    for (int i = 0; i < TILES; i++) tiles[i] = find_tile(arguments, item, token + TILE * i);
}

// The part of K and V that a lane holds. Scales are those of its two score rows, for K and for V.
struct Keys {
    uint32 words[TILES][2][KEY_WORDS];
    __half2 scales[TILES];
};

struct Values {
    uint32 words[TILES][4][VALUE_WORDS];
    __half2 scales[TILES];
};

__device__ __forceinline__ void load_keys(Keys &keys, const Tile (&tiles)[TILES]) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const uint8 *own = tiles[i].keys + 2 * g * ROW_BYTES + t * KEY_PIECE;
#pragma unroll
        for (int piece = 0; piece < KEY_WORDS * 4 / KEY_PIECE; piece++) {
#pragma unroll
            for (int row = 0; row < 2; row++)
                load<KEY_PIECE>(keys.words[i][row] + piece * KEY_PIECE / 4, own + row * ROW_BYTES + 4 * piece * KEY_PIECE);
        }
        if constexpr (KV_SCALED) load<4>(reinterpret_cast<uint32 *>(&keys.scales[i]), tiles[i].scales + 4 * g);
    }
}

__device__ __forceinline__ void load_values(Values &values, const Tile (&tiles)[TILES], int value_offset) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        if constexpr (KV_SCALED) load<4>(reinterpret_cast<uint32 *>(&values.scales[i]), tiles[i].scales + value_offset + 4 * g);
        const uint8 *own = tiles[i].keys + value_offset + 4 * t * ROW_BYTES + g * VALUE_PIECE;
#pragma unroll
        for (int piece = 0; piece < VALUE_WORDS * 4 / VALUE_PIECE; piece++) {
#pragma unroll
            for (int row = 0; row < 4; row++)
                load<VALUE_PIECE>(values.words[i][row] + piece * VALUE_PIECE / 4, own + row * ROW_BYTES + 8 * piece * VALUE_PIECE);
        }
    }
}

// Brings a warp's first tiles into the L2 cache, which is right at any time: what is written later is written there.
__device__ __forceinline__ void prefetch_first(const Arguments &arguments, const Item &item) {
    const int token = item.begin + threadIdx.x / WARP * STEP;
    if (token >= item.end) return;
    const int value_offset = arguments.num_kv_heads * plane_bytes(arguments.block_size, D);
    Tile tiles[TILES];
    find_tiles(tiles, arguments, item, token);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        for (int offset = threadIdx.x % WARP * 128; offset < TILE * ROW_BYTES; offset += WARP * 128) {
            asm volatile("prefetch.global.L2 [%0];" ::"l"(tiles[i].keys + offset));
            asm volatile("prefetch.global.L2 [%0];" ::"l"(tiles[i].keys + value_offset + offset));
        }
    }
}

// ---- Queries --------------------------------------------------------------------------------------------------------

// The B fragments of Q^T, and what turns a product with them into a score in powers of two, per head column of the lane.
struct Queries {
    uint32 pairs[HEAD_TILES][PRODUCT_STEPS][2];
    float factors[HEAD_TILES][2];
};

// Half holds less than bf16 does: such queries are scaled, head by head, by a power of two to just below its largest.
__device__ __forceinline__ float fit_to_half(uint32 (&pairs)[PRODUCT_STEPS][2]) {
    float largest = 0.f;
#pragma unroll
    for (int i = 0; i < 2 * PRODUCT_STEPS; i++) {
        const float2 pair = to_float2(reinterpret_cast<const Activation2 &>(pairs[i / 2][i % 2]));
        largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
    }
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int exponent = max(__float_as_int(largest) >> 23, 30);  // biased; 254 at most unless there is an infinity
    const float up = __int_as_float((268 - min(exponent, 254)) << 23);
#pragma unroll
    for (int i = 0; i < 2 * PRODUCT_STEPS; i++) {
        const float2 pair = to_float2(reinterpret_cast<const Activation2 &>(pairs[i / 2][i % 2]));
        pairs[i / 2][i % 2] = pack_pair(up * pair.x, up * pair.y);
    }
    return 1.f / up;
}

// bf16 tensor cores take bf16 queries.
__device__ __forceinline__ float round_to_bf16(uint32 (&pairs)[PRODUCT_STEPS][2]) {
#pragma unroll
    for (int i = 0; i < 2 * PRODUCT_STEPS; i++) {
        const float2 pair = to_float2(reinterpret_cast<const Activation2 &>(pairs[i / 2][i % 2]));
        pairs[i / 2][i % 2] = pack_pair(pair.x, pair.y);
    }
    return 1.f;
}

// A column beyond the item's heads is zero.
__device__ __forceinline__ void load_queries(Queries &queries, const Activation *q, const Arguments &arguments, const Item &item, float scale) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        uint32 (&pairs)[PRODUCT_STEPS][2] = queries.pairs[n];
        const int head = 8 * n + g;
        const Activation *row = q + (static_cast<size_t>(item.sequence) * arguments.num_heads + item.first_head + head) * D;
#pragma unroll
        for (int i = 0; i < PRODUCT_STEPS / 2; i++) {  // 8 neighbours are 2 steps
            const int piece = 8 * i / KEY_RUN, inside = 8 * i % KEY_RUN;
            uint4 words = {0, 0, 0, 0};
            if (head < item.heads) words = __ldcg(reinterpret_cast<const uint4 *>(row + (4 * piece + t) * KEY_RUN + inside));
            pairs[2 * i][0] = words.x, pairs[2 * i][1] = words.y;
            pairs[2 * i + 1][0] = words.z, pairs[2 * i + 1][1] = words.w;
        }
        float factor = 1.f;
        if constexpr (ACTIVATION_BF16 && KV_FORMAT != 1) factor = fit_to_half(pairs);
        if constexpr (!ACTIVATION_BF16 && KV_FORMAT == 1) factor = round_to_bf16(pairs);
#pragma unroll
        for (int column = 0; column < 2; column++)  // lane 4g holds head g; this lane's columns are 2t and 2t + 1
            queries.factors[n][column] = scale * __shfl_sync(0xffffffffu, factor, 4 * (2 * t + column));
    }
}

// ---- Attention over the tiles of a warp -----------------------------------------------------------------------------

// A lane's scores of a tile: rows 2g and 2g + 1 by its two head columns; [2 * row + column].
using Scores = float[TILES][HEAD_TILES][4];

// What a warp has gathered: the lane's part of O^T; per head column the largest score and this lane's part of the sum.
struct Gathered {
    float output[OUTPUT_TILES][HEAD_TILES][4];
    float largest[HEAD_TILES][2], sum[HEAD_TILES][2];
};

__device__ __forceinline__ void multiply_keys(Scores &scores, const Queries &queries, const Keys &keys) {
#pragma unroll
    for (int step = 0; step < PRODUCT_STEPS; step++) {
#pragma unroll
        for (int i = 0; i < TILES; i++) {
            uint32 a[4];
#pragma unroll
            for (int word = 0; word < WORDS_PER_STEP; word++) {
#pragma unroll
                for (int row = 0; row < 2; row++) {
                    uint32 pairs[PAIRS_PER_WORD];
                    to_pairs(keys.words[i][row][step * WORDS_PER_STEP + word], pairs);
#pragma unroll
                    for (int p = 0; p < PAIRS_PER_WORD; p++) a[row + 2 * (word * PAIRS_PER_WORD + p)] = pairs[p];
                }
            }
#pragma unroll
            for (int n = 0; n < HEAD_TILES; n++) mma_m16n8k16<KVValue>(scores[i][n], a, queries.pairs[n][step]);
        }
    }
}

// Scores in powers of two. A term that K as stored lacks is to be added here, as further steps of the product.
__device__ __forceinline__ void find_scores(Scores &scores, const Queries &queries, const Keys &keys) {
#pragma unroll
    for (int i = 0; i < TILES * HEAD_TILES * 4; i++) scores[i / (HEAD_TILES * 4)][i / 4 % HEAD_TILES][i % 4] = 0.f;
    multiply_keys(scores, queries, keys);
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const float2 row_scales = KV_SCALED ? to_float2(keys.scales[i]) : make_float2(1.f, 1.f);
#pragma unroll
        for (int n = 0; n < HEAD_TILES; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) scores[i][n][j] *= queries.factors[n][j % 2] * (j < 2 ? row_scales.x : row_scales.y);
        }
    }
}

// Tokens past the end: whatever lies there, their scores are -inf and their V is zero (0 * NaN would be NaN).
__device__ __forceinline__ void mask_scores(Scores &scores, Values &values, int remaining) {
    const int g = threadIdx.x % WARP / 4;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int row = 0; row < 2; row++) {
            if (TILE * i + 2 * g + row < remaining) continue;
#pragma unroll
            for (int n = 0; n < HEAD_TILES; n++) scores[i][n][2 * row] = scores[i][n][2 * row + 1] = negative_infinity();
            if constexpr (KV_SCALED) (row == 0 ? values.scales[i].x : values.scales[i].y) = __ushort_as_half(0);
        }
    }
}

__device__ __forceinline__ void mask_values(Values &values, int remaining) {
    const int t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int row = 0; row < 4; row++) {
#pragma unroll
            for (int word = 0; word < VALUE_WORDS; word++)
                values.words[i][row][word] = TILE * i + 4 * t + row < remaining ? values.words[i][row][word] : 0;
        }
    }
}

// Of the scales of all tiles, in the order of scores: row i % 2 of tile i / 2.
__device__ __forceinline__ float row_scale(const __half2 (&scales)[TILES], int i) {
    return to_float(i % 2 == 0 ? scales[i / 2].x : scales[i / 2].y);
}

__device__ __forceinline__ float exponent_of(float x) { return static_cast<float>((__float_as_int(x) >> 23 & 0xff) - 127); }

// Scores become weights relative to the largest score so far, what was gathered becomes relative to it too, and the
// B fragments of P^T are made. V's scales go into P; so that fp16 holds the product whatever they are, "largest" is then
// the largest of score + exponent of the scale.
__device__ __forceinline__ void weigh(Gathered &gathered, uint32 (&weights)[TILES][HEAD_TILES][2], Scores &scores, const Values &values) {
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
#pragma unroll
        for (int column = 0; column < 2; column++) {
            float largest = gathered.largest[n][column];
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                const float score = scores[i / 2][n][2 * (i % 2) + column];
                largest = fmaxf(largest, KV_SCALED ? score + exponent_of(row_scale(values.scales, i)) : score);
            }
#pragma unroll
            for (int distance = 4; distance < WARP; distance *= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
            const float shrink = exp2_fast(gathered.largest[n][column] - largest);
            gathered.largest[n][column] = largest;
            gathered.sum[n][column] *= shrink;
#pragma unroll
            for (int i = 0; i < 2 * TILES; i++) {
                float &score = scores[i / 2][n][2 * (i % 2) + column];
                const float weight = exp2_fast(score - largest);
                gathered.sum[n][column] += weight;
                score = KV_SCALED ? weight * row_scale(values.scales, i) : weight;
            }
#pragma unroll
            for (int tile = 0; tile < OUTPUT_TILES; tile++) {
                gathered.output[tile][n][column] *= shrink;
                gathered.output[tile][n][column + 2] *= shrink;
            }
        }
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const float (&score)[4] = scores[i / 2][n];
            weights[i / 2][n][i % 2] = transpose_8x8(pack_pair(score[2 * (i % 2)], score[2 * (i % 2) + 1]));
        }
    }
}

__device__ __forceinline__ void multiply_values(Gathered &gathered, const uint32 (&weights)[TILES][HEAD_TILES][2], const Values &values) {
#pragma unroll
    for (int i = 0; i < TILES; i++) {
#pragma unroll
        for (int word = 0; word < VALUE_WORDS; word++) {
            uint32 even[2 * PAIRS_PER_WORD], odd[2 * PAIRS_PER_WORD];
            to_pairs_across(values.words[i][0][word], values.words[i][2][word], even);
            to_pairs_across(values.words[i][1][word], values.words[i][3][word], odd);
#pragma unroll
            for (int p = 0; p < PAIRS_PER_WORD; p++) {
                const uint32 a[4] = {even[2 * p], even[2 * p + 1], odd[2 * p], odd[2 * p + 1]};
#pragma unroll
                for (int n = 0; n < HEAD_TILES; n++)
                    mma_m16n8k16<KVValue>(gathered.output[word * PAIRS_PER_WORD + p][n], a, weights[i][n]);
            }
        }
    }
}

// A warp's share of an item. K and V of its next tiles are on their way while it computes.
__device__ __forceinline__ void attend(Gathered &gathered, const Queries &queries, const Arguments &arguments, const Item &item) {
    const int value_offset = arguments.num_kv_heads * plane_bytes(arguments.block_size, D);
    int token = item.begin + threadIdx.x / WARP * STEP;
    if (token >= item.end) return;
    Tile tiles[TILES];
    Keys keys;
    Values values;
    find_tiles(tiles, arguments, item, token);
    load_keys(keys, tiles);
    load_values(values, tiles, value_offset);
    while (true) {
        const int remaining = item.end - token;
        const bool more = remaining > WARPS * STEP;
        if (more) find_tiles(tiles, arguments, item, token + WARPS * STEP);
        Scores scores;
        find_scores(scores, queries, keys);
        if (remaining < STEP) mask_scores(scores, values, remaining);
        if (more) load_keys(keys, tiles);
        uint32 weights[TILES][HEAD_TILES][2];
        weigh(gathered, weights, scores, values);
        if (remaining < STEP) mask_values(values, remaining);
        multiply_values(gathered, weights, values);
        if (!more) return;
        load_values(values, tiles, value_offset);
        token += WARPS * STEP;
    }
}

// ---- Merging warps and splits ---------------------------------------------------------------------------------------

struct Shared {
    float largest[WARPS][HEADS], sum[WARPS][HEADS];
    alignas(16) float output[WARPS][HEADS][D + 4];  // + 4 spreads the heads over the banks
    bool is_last;
};

struct Workspace {
    float *partials;     // [slots, HEADS, D], relative to the split's largest score
    float2 *statistics;  // [slots, HEADS]: largest score, sum
    int *counters;       // [batch, groups]: splits that have ended
};

// Everybody's part goes to shared memory, relative to the largest score of all warps.
__device__ __forceinline__ void share(Shared &shared, Gathered &gathered) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * HEAD_TILES; i++) {
        float &sum = gathered.sum[i / 2][i % 2];
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        const int head = i / 2 * 8 + 2 * t + i % 2;
        if (g == 0) shared.largest[warp][head] = gathered.largest[i / 2][i % 2], shared.sum[warp][head] = sum;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2 * HEAD_TILES; i++) {
        const int head = i / 2 * 8 + 2 * t + i % 2;
        float largest = LOWEST;
#pragma unroll
        for (int other = 0; other < WARPS; other++) largest = fmaxf(largest, shared.largest[other][head]);
        const float shrink = exp2_fast(gathered.largest[i / 2][i % 2] - largest);
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; tile += 2) {  // 4 neighbouring dimensions
            const float (&low)[4] = gathered.output[tile][i / 2], (&high)[4] = gathered.output[tile + 1][i / 2];
            const int piece = 2 * tile / VALUE_RUN, inside = 2 * tile % VALUE_RUN;
            *reinterpret_cast<float4 *>(&shared.output[warp][head][(8 * piece + g) * VALUE_RUN + inside]) =
                make_float4(low[i % 2] * shrink, low[i % 2 + 2] * shrink, high[i % 2] * shrink, high[i % 2 + 2] * shrink);
        }
    }
    __syncthreads();
}

__device__ __forceinline__ float2 merge_statistics(const Shared &shared, int head) {
    float2 merged = {LOWEST, 0.f};
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) merged.x = fmaxf(merged.x, shared.largest[warp][head]);
#pragma unroll
    for (int warp = 0; warp < WARPS; warp++) merged.y += exp2_fast(shared.largest[warp][head] - merged.x) * shared.sum[warp][head];
    return merged;
}

// No token, no weight: zeros. A sum that is NaN stays NaN.
__device__ __forceinline__ float inverse_of(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }

// The item's result from its warps' parts, as output or, for one split of several, as a partial.
__device__ __forceinline__ void finish_item(const Shared &shared, const Workspace &workspace, Activation *out, const Item &item) {
    for (int unit = threadIdx.x; unit < item.heads * D / 4; unit += THREADS) {
        const int head = unit / (D / 4), dim = unit % (D / 4) * 4;
        float4 value = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++) {
            const float4 part = *reinterpret_cast<const float4 *>(&shared.output[warp][head][dim]);
            value.x += part.x, value.y += part.y, value.z += part.z, value.w += part.w;
        }
        const float2 statistics = merge_statistics(shared, head);
        if (item.splits > 1) {
            const size_t row = static_cast<size_t>(item.slot) * HEADS + head;
            *reinterpret_cast<float4 *>(workspace.partials + row * D + dim) = value;
            if (dim == 0) workspace.statistics[row] = statistics;
            continue;
        }
        const float inverse = inverse_of(statistics.y);
        Activation values[4] = {from_float<Activation>(value.x * inverse), from_float<Activation>(value.y * inverse),
                                from_float<Activation>(value.z * inverse), from_float<Activation>(value.w * inverse)};
        *reinterpret_cast<uint2 *>(out + head * D + dim) = reinterpret_cast<const uint2 &>(values);
    }
}

// Whether this block is the one that ends last of its sequence and group; the counter is zero again then.
__device__ __forceinline__ bool ends_last(Shared &shared, const Workspace &workspace, const Item &item) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        int *counter = workspace.counters + item.sequence * item.groups + item.group;
        shared.is_last = atomicAdd(counter, 1) == item.splits - 1;
        if (shared.is_last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return shared.is_last;
}

// The output of all splits, in their order: a warp per head, 32 neighbouring dimensions at a time.
__device__ __forceinline__ void merge_splits(const Workspace &workspace, Activation *out, const Item &item) {
    const int lane = threadIdx.x % WARP;
    for (int head = threadIdx.x / WARP; head < item.heads; head += WARPS) {
        const size_t first_row = static_cast<size_t>(item.slot - item.split * item.groups) * HEADS + head, stride = item.groups * HEADS;
        float largest = LOWEST, sum = 0.f, value[D / WARP] = {};
        for (int split = lane; split < item.splits; split += WARP)
            largest = fmaxf(largest, __ldcg(workspace.statistics + first_row + split * stride).x);
        largest = warp_max(largest);
#pragma unroll 4
        for (int split = 0; split < item.splits; split++) {
            const size_t row = first_row + split * stride;
            const float2 statistics = __ldcg(workspace.statistics + row);
            const float shrink = exp2_fast(statistics.x - largest);
            sum += shrink * statistics.y;
#pragma unroll
            for (int i = 0; i < D / WARP; i++) value[i] += shrink * __ldcg(workspace.partials + row * D + WARP * i + lane);
        }
        const float inverse = inverse_of(sum);
#pragma unroll
        for (int i = 0; i < D / WARP; i++) out[head * D + WARP * i + lane] = from_float<Activation>(value[i] * inverse);
    }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ void compute_item(Shared &shared, const Activation *q, const Arguments &arguments, const Workspace &workspace, Activation *out, const Item &item, float scale) {
    Queries queries;
    load_queries(queries, q, arguments, item, scale);
    Gathered gathered = {};
#pragma unroll
    for (int i = 0; i < 2 * HEAD_TILES; i++) gathered.largest[i / 2][i % 2] = LOWEST;
    attend(gathered, queries, arguments, item);
    share(shared, gathered);
    Activation *item_out = out + (static_cast<size_t>(item.sequence) * arguments.num_heads + item.first_head) * D;
    finish_item(shared, workspace, item_out, item);
    if (item.splits > 1 && ends_last(shared, workspace, item)) merge_splits(workspace, item_out, item);
    __syncthreads();  // before the next item writes to shared memory
}

// q [batch, num_heads, D], out alike; block_tables [batch, max_blocks]; scale includes log2(e).
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    paged_decode(const Activation *q, const uint8 *pool, const int *block_tables, const int *context_lens, const int *plan,
                 float *partials, float2 *statistics, int *counters, Activation *out, int batch, int max_blocks, int num_heads,
                 int num_kv_heads, int block_size, int block_bytes, int layer_offset, float scale) {
    let_next_kernel_start();
    const Arguments arguments = {pool, block_tables, max_blocks, num_heads, num_kv_heads, block_size, block_bytes, layer_offset};
    const Workspace workspace = {partials, statistics, counters};
    __shared__ Shared shared;
    const int items = plan[1 + batch] * count_groups(arguments);
    int index = blockIdx.x;
    Item item;
    if (index < items) {
        item = find_item(arguments, plan, context_lens, batch, index);
        prefetch_first(arguments, item);
    }
    wait_for_previous_kernel();
    while (index < items) {
        compute_item(shared, q, arguments, workspace, out, item, scale);
        index += gridDim.x;
        if (index < items) item = find_item(arguments, plan, context_lens, batch, index);
    }
}
