// Attention of one query token per sequence over the paged KV pool.
//
// All query heads of a KV head are computed together, so K and V are read once. Tensor cores work on the transposed
// problem, tokens in the rows of K and dimensions in the rows of V^T, so that the few heads fill the 8 columns:
//   S^T [16 tokens x 8 heads] = K [16 x D] Q^T,   O^T [D x 8 heads] += V^T [D x 16] P^T [16 x 8].
// Which dimension is which step of a product, and which token which row, is free. It is chosen so that every lane
// loads its own fragments of K and V from global memory, in pieces of up to 16 bytes that fill whole sectors. Nothing
// else is loaded into registers while these are on their way: a warp that waits for one load waits for all before it, so
// queries go through shared memory.
//
// A work item is a part of a sequence's tokens for one KV head. The grid is fixed: a block begins with the item of its
// own number. After that it either takes every gridDim.x-th item, so that it knows the next one from the start, or,
// where the plan says so because items are of unequal length, claims one whenever it ends. The warps of a block take
// the steps of an item in turn and keep a softmax each; these are merged at the item's end, while K and V of the next
// item are on their way. Parts of a sequence are merged in a tree of fixed shape, each node by the block that ends last
// in it. So a result depends on the sequence and on how it is cut, and on nothing else.
//
// Macros, besides those of the headers: HEAD_DIM; HEAD_TILES, eights of query heads in an item; WARPS of a block and
// BLOCKS_PER_SM; TILES of 16 tokens that a warp takes at a time; K_BIAS, 1 where K is stored without its bias.
#include "async_copy.cuh"
#include "kv_read.cuh"
#include "mma.cuh"

#ifndef K_BIAS
#define K_BIAS 0
#endif

constexpr int D = HEAD_DIM;
constexpr int HEADS = 8 * HEAD_TILES;  // query heads of one item
constexpr int ROW_BYTES = D * KV_ELEMENT_BYTES;
constexpr int THREADS = WARPS * WARP;
constexpr int TILE = 16;              // tokens
constexpr int STEP = TILES * TILE;    // tokens a warp takes at a time
constexpr int STRIDE = WARPS * STEP;  // tokens from a warp's step to its next
constexpr int PRODUCT_STEPS = D / 16;  // of Q K
constexpr int OUTPUT_TILES = D / 16;   // of O^T, 16 dimensions each
constexpr int WORDS_PER_STEP = 2 / PAIRS_PER_WORD;
constexpr int FAN = 16;  // parts that a node of the tree merges
constexpr int LOADED_PARTS = 8;  // of them at a time

// In K, lane 4g + t reads pieces t, t + 4, ... of the rows 2g and 2g + 1 of a tile; in V, pieces g, g + 8, ... of the
// rows 4t to 4t + 3. A run is a piece's elements.
constexpr int KEY_WORDS = ROW_BYTES / 16, VALUE_WORDS = ROW_BYTES / 32;
constexpr int KEY_PIECE = ROW_BYTES % 64 == 0 ? 16 : 8;
constexpr int VALUE_PIECE = ROW_BYTES % 128 == 0 ? 16 : ROW_BYTES % 64 == 0 ? 8 : 4;
constexpr int KEY_RUN = KEY_PIECE / KV_ELEMENT_BYTES, VALUE_RUN = VALUE_PIECE / KV_ELEMENT_BYTES;

// As an exponent: the smallest power of two above a number from 0 on.
__device__ __forceinline__ int exponent_above(float x) { return (__float_as_int(x) >> 23) - 126; }

__device__ __forceinline__ float power_of_two(int exponent) { return __int_as_float((127 + exponent) << 23); }

// What a maximum starts with: below every score, yet finite, so that differences of two such are no NaN.
constexpr float LOWEST = -1e38f;

// The queries of a block's item. Those after its last head are that one again.
using SharedQuery = Activation[HEADS][D + 32];  // + 32 spreads the heads over the banks

#if K_BIAS
#include "paged_decode_bias.cuh"
#endif

struct Arguments {
    const Activation *q;  // [batch, num_heads, D]
    const uint8 *pool;
    const int *block_tables;  // [batch, max_blocks]
    const int *plan;          // [1 + most_parts, 6]: how many parts there are, and whether blocks claim items; then,
                              // part by part, what `Item` says
    float *partials;          // [slots, HEADS, D]: what an item of several parts has gathered
    float2 *statistics;       // [slots, HEADS]: its largest score, and the sum of weights relative to that
    int *counters;            // [1 + slots]: how many items have been claimed; how many children of a node have ended
    Activation *out;          // as q
    int batch, most_parts, max_blocks, num_heads, num_kv_heads, block_size, block_bytes, layer_offset;
    uint32 block_size_inverse;  // 2^31 / block_size, rounded up
    int ahead;    // tiles of a warp that are brought into the L2 cache before the previous kernel has ended
    float scale;  // includes log2(e)
#if K_BIAS
    TurnedBias bias;
#endif
};

// One block's work: `heads` query heads from `first_head` on, over the tokens [begin, end) of a sequence, which are its
// part number `part` of `parts`. `slot` is that of the sequence's first part; the next parts' are `groups` apart.
struct Item {
    int number, sequence, part, parts, slot, groups;
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
        asm volatile("ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                     : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
                     : "l"(address));
    } else if constexpr (BYTES == 8) {
        asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(words[0]), "=r"(words[1]) : "l"(address));
    } else {
        asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(words[0]) : "l"(address));
    }
}

constexpr int NOT_CLAIMED = -2, BEING_CLAIMED = -1;

struct Shared {
    float2 statistics[WARPS][HEADS];
    alignas(16) float output[WARPS][HEADS][D + 4];  // + 4 spreads the heads over the banks
    alignas(16) SharedQuery query;
    // Of each warp the item at hand and the next one: registers are for K and V.
    Item item[WARPS], next[WARPS];
    int items;
    bool claims;
    int claimed;  // the block's next item, or one of the two above
    bool is_last;
#if K_BIAS
    int turned_steps;  // how many of `turns` there are
    float4 onward[D / 4];
    RotatedKeyBias rotated[WARPS];
#endif
};

// ---- Work items -----------------------------------------------------------------------------------------------------

// Parts of a KV head's query heads that are items of their own; more than one where they are many.
__device__ __forceinline__ int count_chunks(const Arguments &arguments) {
    return ceil_divide(arguments.num_heads / arguments.num_kv_heads, HEADS);
}

__device__ __forceinline__ int count_items(const Arguments &arguments) {
    return arguments.plan[0] * arguments.num_kv_heads * count_chunks(arguments);
}

// The item of that number, or one without tokens beyond the last. Its part is looked up before `items` must be known.
__device__ __forceinline__ Item find_item(const Arguments &arguments, int index, int items) {
    Item item = {};
    const int group_heads = arguments.num_heads / arguments.num_kv_heads, chunks = count_chunks(arguments);
    item.groups = arguments.num_kv_heads * chunks;
    const int unit = index / item.groups, group = index - unit * item.groups;
    const int2 *part = reinterpret_cast<const int2 *>(arguments.plan) + 3 * (1 + min(unit, arguments.most_parts - 1));
    const int2 first = part[0], second = part[1], tokens = part[2];
    if (index >= items) return item;
    item.number = index;
    item.sequence = first.x, item.part = first.y, item.parts = second.x;
    item.slot = second.y * item.groups + group;
    item.begin = tokens.x, item.end = tokens.y;
    item.kv_head = group / chunks;
    const int first_head = (group - item.kv_head * chunks) * HEADS;
    item.first_head = item.kv_head * group_heads + first_head;
    item.heads = min(HEADS, group_heads - first_head);
    return item;
}

// Where the calling warp begins; at or past the item's end if there is nothing for it.
__device__ __forceinline__ int first_token(const Item &item) { return item.begin + threadIdx.x / WARP * STEP; }

// ---- Tiles of the pool ----------------------------------------------------------------------------------------------

// Where a tile's rows of K begin, and how much further on their scales; the same of V is `value_offset` further on.
struct Tile {
    const uint8 *keys;
    int to_scales;
};

__device__ __forceinline__ int value_offset(const Arguments &arguments) {
    return arguments.num_kv_heads * plane_bytes(arguments.block_size, D);
}

__device__ __forceinline__ Tile find_tile(const Arguments &arguments, int sequence, int kv_head, uint32 token) {
    const int *table = arguments.block_tables + static_cast<size_t>(sequence) * arguments.max_blocks;
    const uint32 block = __umulhi(2 * token, arguments.block_size_inverse);  // exact below 2^31 / block_size
    const uint32 row = token - block * arguments.block_size;
    const uint8 *plane = arguments.pool + static_cast<size_t>(table[block]) * arguments.block_bytes +
                         arguments.layer_offset + kv_head * plane_bytes(arguments.block_size, D);
    return {plane + row * ROW_BYTES, static_cast<int>((arguments.block_size - row) * ROW_BYTES + 2 * row)};
}

// The tiles of a step. Those past the item's end are its last one again, so that all may be loaded.
__device__ __forceinline__ void find_tiles(Tile (&tiles)[TILES], const Arguments &arguments, int sequence, int kv_head,
                                           int token, int end) {
#pragma unroll
    for (int i = 0; i < TILES; i++)
        tiles[i] = find_tile(arguments, sequence, kv_head, min(token + TILE * i, (end - 1) & -TILE));
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
                load<KEY_PIECE>(keys.words[i][row] + piece * KEY_PIECE / 4,
                                own + row * ROW_BYTES + 4 * piece * KEY_PIECE);
        }
        if constexpr (KV_SCALED)
            load<4>(reinterpret_cast<uint32 *>(&keys.scales[i]), tiles[i].keys + tiles[i].to_scales + 4 * g);
    }
}

__device__ __forceinline__ void load_values(Values &values, const Tile (&tiles)[TILES], int offset) {
    const int g = threadIdx.x % WARP / 4, t = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        if constexpr (KV_SCALED)
            load<4>(reinterpret_cast<uint32 *>(&values.scales[i]), tiles[i].keys + tiles[i].to_scales + offset + 4 * g);
        const uint8 *own = tiles[i].keys + offset + 4 * t * ROW_BYTES + g * VALUE_PIECE;
#pragma unroll
        for (int piece = 0; piece < VALUE_WORDS * 4 / VALUE_PIECE; piece++) {
#pragma unroll
            for (int row = 0; row < 4; row++)
                load<VALUE_PIECE>(values.words[i][row] + piece * VALUE_PIECE / 4,
                                  own + row * ROW_BYTES + 8 * piece * VALUE_PIECE);
        }
    }
}

// Brings the warp's first tiles, from number `first` on, into the L2 cache, a lane each. This is right at any time:
// what is written later is written there.
__device__ __forceinline__ void prefetch(const Arguments &arguments, const Item &item, int first) {
#if __CUDA_ARCH__ >= 900
    const int tile = threadIdx.x % WARP;
    const int token = first_token(item) + tile / TILES * STRIDE + tile % TILES * TILE;
    if (tile < first || tile >= arguments.ahead || token >= item.end) return;
    const Tile found = find_tile(arguments, item.sequence, item.kv_head, token);
    const int offset = value_offset(arguments);
    for (int i = 0; i < 2; i++) {
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(found.keys + i * offset),
                     "r"(TILE * ROW_BYTES));
        if constexpr (KV_SCALED)
            asm volatile("prefetch.global.L2 [%0];" ::"l"(found.keys + found.to_scales + i * offset));
    }
#endif
}

// ---- Queries --------------------------------------------------------------------------------------------------------

// The B fragments of Q^T, and per head column of the lane what turns a product into a score in powers of two.
struct Queries {
    uint32 pairs[HEAD_TILES][PRODUCT_STEPS][2];
    float factors[HEAD_TILES][2];
};

#if K_BIAS
// A warp's place for its item's output is that of its spins before.
__device__ __forceinline__ Spins &spins_of_warp(Shared &shared) {
    static_assert(sizeof(Spins) <= sizeof(shared.output[0]) && sizeof(shared.output[0]) % sizeof(float4) == 0);
    return reinterpret_cast<Spins &>(shared.output[thread_now() / WARP]);
}
#endif

// Scales a lane's head, as activations, by a power of two to less than 2^bits, and no less than half of that unless the
// power were above 2^most; in KVValue afterwards. Returns the power's exponent.
__device__ __forceinline__ int fit_query(uint32 (&pairs)[PRODUCT_STEPS][2], int bits, int most) {
    Activation2 both = __habs2(reinterpret_cast<const Activation2 &>(pairs[0][0]));
#pragma unroll
    for (int i = 1; i < 2 * PRODUCT_STEPS; i++)
        both = __hmax2(both, __habs2(reinterpret_cast<const Activation2 &>(pairs[i / 2][i % 2])));
    float largest = fmaxf(to_float2(both).x, to_float2(both).y);
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
    const int exponent = min(max(bits - exponent_above(largest), -100), most);
    const float power = power_of_two(exponent);
#pragma unroll
    for (int i = 0; i < 2 * PRODUCT_STEPS; i++) {
        uint32 &words = pairs[i / 2][i % 2];
        const Activation2 pair = reinterpret_cast<const Activation2 &>(words);
        if constexpr (ACTIVATION_BF16 || KV_FORMAT == 1) {
            words = pack_pair(power * to_float2(pair).x, power * to_float2(pair).y);
        } else {
            const Activation2 scaled = __hmul2(pair, {from_float<Activation>(power), from_float<Activation>(power)});
            words = reinterpret_cast<const uint32 &>(scaled);
        }
    }
    return exponent;
}

// bf16 tensor cores take bf16 queries.
__device__ __forceinline__ void round_to_bf16(uint32 (&pairs)[PRODUCT_STEPS][2]) {
#pragma unroll
    for (int i = 0; i < 2 * PRODUCT_STEPS; i++) {
        const float2 pair = to_float2(reinterpret_cast<const Activation2 &>(pairs[i / 2][i % 2]));
        pairs[i / 2][i % 2] = pack_pair(pair.x, pair.y);
    }
}

// Begins to copy an item's queries, by all threads of a block.
__device__ __forceinline__ void copy_query(Shared &shared, const Arguments &arguments, const Item &item) {
    if (item.heads == 0) return;
    const size_t first_row = static_cast<size_t>(item.sequence) * arguments.num_heads + item.first_head;
    for (int unit = threadIdx.x; unit < HEADS * D / 8; unit += THREADS) {
        const int head = unit / (D / 8), dim = unit % (D / 8) * 8;
        copy_async(&shared.query[head][dim], arguments.q + (first_row + min(head, item.heads - 1)) * D + dim);
    }
}

// The lanes of a warp are together before and afterwards.
__device__ __forceinline__ void load_queries(Queries &queries, Shared &shared, float scale) {
    const int lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        uint32 (&pairs)[PRODUCT_STEPS][2] = queries.pairs[n];
#pragma unroll
        for (int i = 0; i < PRODUCT_STEPS / 2; i++) {  // 8 neighbours are 2 steps
            const int piece = 8 * i / KEY_RUN, inside = 8 * i % KEY_RUN;
            const Activation *from = shared.query[8 * n + g] + (4 * piece + t) * KEY_RUN + inside;
            const uint4 words = *reinterpret_cast<const uint4 *>(from);
            pairs[2 * i][0] = words.x, pairs[2 * i][1] = words.y;
            pairs[2 * i + 1][0] = words.z, pairs[2 * i + 1][1] = words.w;
        }
        queries.factors[n][0] = queries.factors[n][1] = scale;
        int exponent = 0;
#if K_BIAS
        exponent = fit_query(pairs, find_query_bits(shared.rotated[threadIdx.x / WARP]), ACTIVATION_BF16 ? 100 : 0);
        if (t == 0) spins_of_warp(shared).scales[8 * n + g] = power_of_two(exponent);
        __syncwarp();
#else
        if constexpr (!ACTIVATION_BF16 && KV_FORMAT == 1) round_to_bf16(pairs);
        if constexpr (ACTIVATION_BF16 && KV_FORMAT != 1) exponent = fit_query(pairs, 15, 100);  // half holds less
#endif
        if constexpr (K_BIAS || (ACTIVATION_BF16 && KV_FORMAT != 1)) {
#pragma unroll
            for (int column = 0; column < 2; column++)  // lane 4g has head g's; this lane's columns are 2t and 2t + 1
                queries.factors[n][column] *= power_of_two(-__shfl_sync(0xffffffffu, exponent, 4 * (2 * t + column)));
        }
    }
}

// ---- Attention over the steps of a warp -----------------------------------------------------------------------------

// A lane's scores of a step: rows 2g and 2g + 1 of a tile by its two head columns; [2 * row + column].
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

#if K_BIAS
extern __shared__ Turns turns[];  // of a warp's steps, one by one

__device__ __forceinline__ int count_turned_steps(const Arguments &arguments, const Item &item) {
    return min(ceil_divide(item.end - item.begin, STRIDE), arguments.bias.steps);
}

// By all threads of a block, before an item that may be longer than those before.
__device__ __forceinline__ void complete_turns(Shared &shared, const Arguments &arguments, const Item &item) {
    const int there = shared.turned_steps, wanted = count_turned_steps(arguments, item);
    if (wanted <= there) return;
    copy_turns(turns, arguments.bias, there, wanted);
    commit_copies();
    wait_for_copies<0>();
    __syncthreads();
    if (threadIdx.x == 0) shared.turned_steps = wanted;
}

// The bias as it is at the calling warp's first step of an item.
__device__ __forceinline__ void rotate_bias(Shared &shared, const Arguments &arguments, const Item &item) {
    rotate_bias(shared.rotated[threadIdx.x / WARP], arguments.bias.bias, item.kv_head, first_token(item));
}

// Adds what the bias makes of a step's products. `turned`: how many steps ago the spins were found.
__device__ __forceinline__ void multiply_bias(Scores &scores, int &turned, Shared &shared,
                                              const Arguments &arguments) {
    Spins &spins = spins_of_warp(shared);
    if (turned == arguments.bias.steps) {
        RotatedKeyBias &rotated = shared.rotated[thread_now() / WARP];
        turn_onward(rotated, shared.onward);
        find_spins(spins, rotated, shared.query);
        turned = 0;
    }
    multiply_spins(scores, spins, turns[turned++]);
}
#endif

// The products of q and K in powers of two, where `scores` are zeros or the products of q and the bias.
__device__ __forceinline__ void find_scores(Scores &scores, const Queries &queries, const Keys &keys) {
    Scores unscaled = {};
    if constexpr (KV_SCALED) {
        multiply_keys(unscaled, queries, keys);
    } else {
        multiply_keys(scores, queries, keys);
    }
#pragma unroll
    for (int i = 0; i < TILES; i++) {
        const float2 row_scales = KV_SCALED ? to_float2(keys.scales[i]) : make_float2(1.f, 1.f);
#pragma unroll
        for (int n = 0; n < HEAD_TILES; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float row_scale = j < 2 ? row_scales.x : row_scales.y, factor = queries.factors[n][j % 2];
                float &score = scores[i][n][j];
                if constexpr (!KV_SCALED) {
                    score *= factor;
                } else if constexpr (!K_BIAS) {
                    score = unscaled[i][n][j] * (row_scale * factor);
                } else {
                    score = fmaf(unscaled[i][n][j], row_scale, score) * factor;
                }
            }
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
            for (int n = 0; n < HEAD_TILES; n++)
                scores[i][n][2 * row] = scores[i][n][2 * row + 1] = negative_infinity();
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

// Of a scale; 0 counts as the smallest that half has, 2^-24.
__device__ __forceinline__ float exponent_of(float x) {
    return static_cast<float>(max(__float_as_int(x) >> 23 & 0xff, 103) - 127);
}

// One head column: scores become weights relative to the largest score so far, and what was gathered becomes so too.
// V's scales go into the weights that the product takes; so that half holds these whatever the scales are, "largest" is
// then the largest of score + exponent of the scale.
__device__ __forceinline__ void weigh_column(Gathered &gathered, Scores &scores, const Values &values, int n,
                                             int column) {
    float largest = gathered.largest[n][column];
#pragma unroll
    for (int i = 0; i < 2 * TILES; i++) {
        const float score = scores[i / 2][n][2 * (i % 2) + column];
        largest = fmaxf(largest, KV_SCALED ? score + exponent_of(row_scale(values.scales, i)) : score);
    }
#pragma unroll
    for (int distance = 4; distance < WARP; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, distance));
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

// The B fragments of P^T.
using Weights = uint32[TILES][HEAD_TILES][2];

__device__ __forceinline__ void weigh(Gathered &gathered, Weights &weights, Scores &scores, const Values &values) {
#pragma unroll
    for (int n = 0; n < HEAD_TILES; n++) {
        weigh_column(gathered, scores, values, n, 0);
        weigh_column(gathered, scores, values, n, 1);
#pragma unroll
        for (int i = 0; i < 2 * TILES; i++) {
            const float (&score)[4] = scores[i / 2][n];
            weights[i / 2][n][i % 2] = transpose_8x8(pack_pair(score[2 * (i % 2)], score[2 * (i % 2) + 1]));
        }
    }
}

__device__ __forceinline__ void multiply_values(Gathered &gathered, const Weights &weights, const Values &values) {
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

// The number of the block's next item, claimed once by the first warp to ask, for all.
__device__ __forceinline__ int claim(Shared &shared, const Arguments &arguments) {
    int number;
    if (threadIdx.x % WARP == 0) {
        if (atomicCAS(&shared.claimed, NOT_CLAIMED, BEING_CLAIMED) == NOT_CLAIMED) {
            const int before = atomicAdd(arguments.counters, 1);
            if (before == shared.items - 1) *arguments.counters = 0;  // every item's end has claimed: this is the last
            atomicExch(&shared.claimed, before + gridDim.x);
        }
        while ((number = atomicOr(&shared.claimed, 0)) < 0) {}
    }
    return __shfl_sync(0xffffffffu, number, 0);
}

// Keeps one of the calling warp's items. What lies there is no longer read.
__device__ __forceinline__ void keep(Item (&items)[WARPS], const Item &item) {
    if (threadIdx.x % WARP == 0) items[threadIdx.x / WARP] = item;
    __syncwarp();
}

// The block's next item. Where items are claimed, this is when.
__device__ __forceinline__ const Item &find_next(Shared &shared, const Arguments &arguments) {
    if (shared.claims) keep(shared.next, find_item(arguments, claim(shared, arguments), shared.items));
    return shared.next[threadIdx.x / WARP];
}

__device__ __forceinline__ void load_step(Keys &keys, Values &values, const Arguments &arguments,
                                          const Tile (&tiles)[TILES]) {
    load_keys(keys, tiles);
    load_values(values, tiles, value_offset(arguments));
}

// Loads a warp's first step of an item, unless there is none.
__device__ __forceinline__ void load_first(Keys &keys, Values &values, const Arguments &arguments, const Item &item) {
    if (first_token(item) >= item.end) return;
    Tile tiles[TILES];
    find_tiles(tiles, arguments, item.sequence, item.kv_head, first_token(item), item.end);
    load_step(keys, values, arguments, tiles);
}

// A warp's steps of an item, of which the first is in `keys` and `values`, or on its way there. Leaves the first of the
// next item there: as soon as a step's K or V is consumed, that of the step after it is asked for.
__device__ __forceinline__ void attend(Shared &shared, Gathered &gathered, Keys &keys, Values &values,
                                       const Queries &queries, const Arguments &arguments, const Item &item) {
    if (first_token(item) >= item.end) load_first(keys, values, arguments, find_next(shared, arguments));
#if K_BIAS
    int turned = 0;
#endif
#pragma unroll 1
    for (int token = first_token(item); token < item.end; token += STRIDE) {
        Scores scores = {};
#if K_BIAS
        multiply_bias(scores, turned, shared, arguments);
#endif
        const int remaining = item.end - token;
        const bool goes_on = remaining > STRIDE;
        const Item &after = goes_on ? item : find_next(shared, arguments);
        const int ahead = goes_on ? token + STRIDE : first_token(after);
        const int end = after.end, sequence = after.sequence, kv_head = after.kv_head;
        const bool loads = ahead < end;
        Tile tiles[TILES];
        if (loads) find_tiles(tiles, arguments, sequence, kv_head, ahead, end);
        find_scores(scores, queries, keys);
        if (remaining < STEP) mask_scores(scores, values, remaining);
        if (loads) load_keys(keys, tiles);
        Weights weights;
        weigh(gathered, weights, scores, values);
        if (remaining < STEP) mask_values(values, remaining);
        multiply_values(gathered, weights, values);
        if (loads) load_values(values, tiles, value_offset(arguments));
    }
}

// ---- Merging --------------------------------------------------------------------------------------------------------

// Of one head, attention over some of the tokens: 4 dimensions of the output, and the sum of weights, relative to the
// largest score.
struct Part {
    float4 output;
    float2 statistics;  // largest, sum
};

template <int COUNT> __device__ __forceinline__ Part merge(const Part (&parts)[COUNT]) {
    Part merged = {{0.f, 0.f, 0.f, 0.f}, {LOWEST, 0.f}};
#pragma unroll
    for (int i = 0; i < COUNT; i++) merged.statistics.x = fmaxf(merged.statistics.x, parts[i].statistics.x);
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const float shrink = exp2_fast(parts[i].statistics.x - merged.statistics.x);
        merged.statistics.y += shrink * parts[i].statistics.y;
        merged.output.x += shrink * parts[i].output.x, merged.output.y += shrink * parts[i].output.y;
        merged.output.z += shrink * parts[i].output.z, merged.output.w += shrink * parts[i].output.w;
    }
    return merged;
}

// No token, no weight: zeros. A sum that is NaN stays NaN.
__device__ __forceinline__ void store_output(const Arguments &arguments, const Item &item, int head, int dim,
                                             const Part &part) {
    const float inverse = part.statistics.y == 0.f ? 0.f : __fdividef(1.f, part.statistics.y);
    const float4 x = part.output;
    const Activation values[4] = {from_float<Activation>(x.x * inverse), from_float<Activation>(x.y * inverse),
                                  from_float<Activation>(x.z * inverse), from_float<Activation>(x.w * inverse)};
    const size_t row = static_cast<size_t>(item.sequence) * arguments.num_heads + item.first_head + head;
    *reinterpret_cast<uint2 *>(arguments.out + row * D + dim) = reinterpret_cast<const uint2 &>(values);
}

__device__ __forceinline__ void store_partial(const Arguments &arguments, int slot, int head, int dim,
                                              const Part &part) {
    const size_t row = static_cast<size_t>(slot) * HEADS + head;
    *reinterpret_cast<float4 *>(arguments.partials + row * D + dim) = part.output;
    if (dim == 0) arguments.statistics[row] = part.statistics;
}

// Past L1, which knows nothing of other blocks' writes.
__device__ __forceinline__ Part load_partial(const Arguments &arguments, int slot, int head, int dim) {
    const size_t row = static_cast<size_t>(slot) * HEADS + head;
    return {__ldcg(reinterpret_cast<const float4 *>(arguments.partials + row * D + dim)),
            __ldcg(arguments.statistics + row)};
}

__device__ __forceinline__ void share(Shared &shared, Gathered &gathered) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * HEAD_TILES; i++) {
        const int n = i / 2, column = i % 2, head = 8 * n + 2 * t + column;
        float sum = gathered.sum[n][column];
#pragma unroll
        for (int distance = 4; distance < WARP; distance *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, distance);
        if (g == 0) shared.statistics[warp][head] = make_float2(gathered.largest[n][column], sum);
#pragma unroll
        for (int tile = 0; tile < OUTPUT_TILES; tile += 2) {  // 4 neighbouring dimensions
            const float (&low)[4] = gathered.output[tile][n], (&high)[4] = gathered.output[tile + 1][n];
            const int piece = 2 * tile / VALUE_RUN, inside = 2 * tile % VALUE_RUN;
            *reinterpret_cast<float4 *>(&shared.output[warp][head][(8 * piece + g) * VALUE_RUN + inside]) =
                make_float4(low[column], low[column + 2], high[column], high[column + 2]);
        }
    }
    __syncthreads();
}

// The item's result from its warps' parts: output, or for one part of several a partial.
__device__ __forceinline__ void merge_warps(const Shared &shared, const Arguments &arguments, const Item &item) {
    for (int unit = threadIdx.x; unit < item.heads * D / 4; unit += THREADS) {
        const int head = unit / (D / 4), dim = unit % (D / 4) * 4;
        Part parts[WARPS];
#pragma unroll
        for (int warp = 0; warp < WARPS; warp++)
            parts[warp] = {*reinterpret_cast<const float4 *>(&shared.output[warp][head][dim]),
                           shared.statistics[warp][head]};
        if (item.parts == 1) {
            store_output(arguments, item, head, dim, merge(parts));
        } else {
            store_partial(arguments, item.slot + item.part * item.groups, head, dim, merge(parts));
        }
    }
}

// Whether this block is the last of `count` to come here with `counter`, which is zero again then. What the others
// wrote before is visible to the last one.
__device__ __forceinline__ bool comes_last(Shared &shared, int *counter, int count) {
    __syncthreads();
    if (threadIdx.x == 0) {
        int before;
        asm volatile("atom.global.add.acq_rel.gpu.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
        shared.is_last = before == count - 1;
        if (shared.is_last) *counter = 0;
    }
    __syncthreads();
    return shared.is_last;
}

// From an item's partial up the tree to the output. A node's partial lies in the slot of its first part; the counter
// of a node of level l is that of the l-th part after it, which no other node counts with.
__device__ __forceinline__ void merge_parts(Shared &shared, const Arguments &arguments, const Item &item) {
#pragma unroll 1
    for (int level = 1, reach = 1; reach < item.parts; level++, reach *= FAN) {
        const int first = item.part / (reach * FAN) * (reach * FAN);
        const int children = min(FAN, ceil_divide(item.parts - first, reach));
        if (children == 1) continue;
        const int slot = item.slot + first * item.groups;
        if (!comes_last(shared, arguments.counters + 1 + slot + level * item.groups, children)) return;
        for (int unit = threadIdx.x; unit < item.heads * D / 4; unit += THREADS) {
            const int head = unit / (D / 4), dim = unit % (D / 4) * 4;
            Part merged = {{0.f, 0.f, 0.f, 0.f}, {LOWEST, 0.f}};
#pragma unroll 1
            for (int first_child = 0; first_child < children; first_child += LOADED_PARTS) {
                Part parts[1 + LOADED_PARTS] = {merged};
#pragma unroll
                for (int i = 0; i < LOADED_PARTS; i++) {
                    const int child = first_child + i;
                    parts[1 + i] = {{0.f, 0.f, 0.f, 0.f}, {LOWEST, 0.f}};
                    if (child < children)
                        parts[1 + i] = load_partial(arguments, slot + child * reach * item.groups, head, dim);
                }
                merged = merge(parts);
            }
            if (reach * FAN >= item.parts) {
                store_output(arguments, item, head, dim, merged);
            } else {
                store_partial(arguments, slot, head, dim, merged);
            }
        }
    }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

// `shared` has the item, and afterwards the next one.
__device__ __forceinline__ void compute_item(Shared &shared, Keys &keys, Values &values, const Arguments &arguments) {
    const Item &item = shared.item[threadIdx.x / WARP];
    Queries queries;
    load_queries(queries, shared, arguments.scale);
#if K_BIAS
    complete_turns(shared, arguments, item);
    if (first_token(item) < item.end)
        find_spins(spins_of_warp(shared), shared.rotated[threadIdx.x / WARP], shared.query);
#endif
    if (!shared.claims) {
        const int number = item.number + gridDim.x;
        if (number < shared.items) {  // or else nothing need be looked up
            keep(shared.next, find_item(arguments, number, shared.items));
        } else {
            keep(shared.next, {});
        }
    }
    Gathered gathered = {};
#pragma unroll
    for (int i = 0; i < 2 * HEAD_TILES; i++) gathered.largest[i / 2][i % 2] = LOWEST;
    attend(shared, gathered, keys, values, queries, arguments, item);
    share(shared, gathered);
    copy_query(shared, arguments, shared.next[threadIdx.x / WARP]);  // all warps have theirs, and know the next item
    commit_copies();
    if (threadIdx.x == 0) shared.claimed = NOT_CLAIMED;
    merge_warps(shared, arguments, item);
    if (item.parts > 1) merge_parts(shared, arguments, item);
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    paged_decode(const Activation *q, const uint8 *pool, const int *block_tables, const int *plan, float *partials,
                 float2 *statistics, int *counters, Activation *out, int batch, int most_parts, int max_blocks,
                 int num_heads, int num_kv_heads, int block_size, int block_bytes, int layer_offset,
                 uint32 block_size_inverse, int ahead, float scale
#if K_BIAS
                 ,
                 const float *key_bias, const float *rotary, int positions, const uint4 *unit_turns, int turn_tiles,
                 int turned_steps
#endif
    ) {
    let_next_kernel_start();
    const Arguments arguments = {q,          pool,       block_tables, plan,      partials,     statistics,
                                 counters,   out,        batch,        most_parts, max_blocks,  num_heads,
                                 num_kv_heads, block_size, block_bytes, layer_offset, block_size_inverse, ahead, scale
#if K_BIAS
                                 ,
                                 {{key_bias, rotary, positions}, unit_turns, turn_tiles, turned_steps}
#endif
    };
    __shared__ Shared shared;
    const int items = count_items(arguments);
    const Item item = find_item(arguments, blockIdx.x, items);
    if (threadIdx.x == 0) shared.items = items, shared.claims = plan[1] != 0, shared.claimed = NOT_CLAIMED;
    // The previous kernel writes at most a token of each row. What it does not write is loaded before it has ended.
    const bool loads = first_token(item) < item.end, early = first_token(item) + STEP <= item.end - batch;
    Tile tiles[TILES];
    if (loads) find_tiles(tiles, arguments, item.sequence, item.kv_head, first_token(item), item.end);
#if K_BIAS
    copy_onward(shared.onward, arguments.bias);
    copy_turns(turns, arguments.bias, 0, count_turned_steps(arguments, item));
#endif
    Keys keys;
    Values values;
    if (loads && early) load_step(keys, values, arguments, tiles);
    prefetch(arguments, item, early ? TILES : 0);
#if K_BIAS
    if (threadIdx.x == 0) shared.turned_steps = count_turned_steps(arguments, item);
    rotate_bias(shared, arguments, item);
#endif
    wait_for_previous_kernel();
    copy_query(shared, arguments, item);
    commit_copies();
    if (loads && !early) load_step(keys, values, arguments, tiles);
    keep(shared.item, item);
    wait_for_copies<0>();
    __syncthreads();
#pragma unroll 1
    while (shared.item[threadIdx.x / WARP].heads > 0) {
        compute_item(shared, keys, values, arguments);
        wait_for_copies<0>();
        __syncthreads();  // before the next item writes to shared memory
        keep(shared.item, shared.next[threadIdx.x / WARP]);
#if K_BIAS
        rotate_bias(shared, arguments, shared.item[threadIdx.x / WARP]);
#endif
    }
}
