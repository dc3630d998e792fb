// Second half of sampling: one block per row puts its pieces together, and where filters are set, draws under them.
//
// top_k and top_p keep a prefix of the candidates in the order "likelier first, then the lower token". Most often its
// end is near the likeliest one: then the near candidates are listed and compared with each other. Otherwise the end is
// found by a search over histograms of all candidates' distances from the likeliest: first coarse, then ever finer of
// the bin that holds the end. Masses are integers, so that no order of addition matters.
#include "sampling.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / WARP;
constexpr int BIN_BITS = 11, BINS = 1 << BIN_BITS, OWN = BINS / THREADS;
constexpr float BINS_PER_UNIT = 64.f;
constexpr float FARTHEST = 0x1.fffffep4f;  // the last distance that has a coarse bin: what is farther is never drawn
constexpr float NEAR = 8.f;
constexpr int TOKEN_BITS = 18;
constexpr uint64 ALL = ~0ull;

// A row's logits, and what can be drawn from them.
struct Row {
    const float *logits;
    int vocab_size;
    float largest, inverse_temperature;
    float least;  // (logit - largest) / temperature of a candidate is at least this
};

// Number and mass of some candidates; mass in units of 2^-44 of the likeliest one's.
struct Sums {
    uint32 count;
    uint64 mass;
};
__device__ __forceinline__ Sums operator+(const Sums &a, const Sums &b) { return {a.count + b.count, a.mass + b.mass}; }
__device__ __forceinline__ Sums operator-(const Sums &a, const Sums &b) { return {a.count - b.count, a.mass - b.mass}; }
__device__ __forceinline__ uint64 measure(const Sums &sums, bool by_count) { return by_count ? sums.count : sums.mass; }

// A bin of a histogram (-1: none), what lies before it and inside it.
struct Bin {
    int number;
    Sums before, inside;
};

// One thread's neighbouring bins and what lies before them.
struct Share {
    Sums before, own[OWN];
};

// The kept prefix ends with key `last`; its mass.
struct Prefix {
    uint64 last, mass;
};

struct Shared {
    uint32 count[BINS], low[BINS], high[BINS];  // low and high: 64-bit sums of weights in units of 2^-28
    Sums of_warp[WARPS];
    Bin found;
    ulonglong2 near[THREADS];  // key and mass
    int num_near;
};
__shared__ Shared shared;

// The place of a candidate in the order. Keys differ, distances may not.
__device__ __forceinline__ uint64 key_of(float distance, int token) {
    return static_cast<uint64>(__float_as_uint(distance)) << TOKEN_BITS | token;
}
__device__ __forceinline__ uint64 mass_of(float weight) { return __float2ull_rn(weight * 0x1p44f); }
__device__ __forceinline__ int coarse_bin(float distance) { return static_cast<int>(distance * BINS_PER_UNIT); }
__device__ __forceinline__ float edge(int coarse) { return coarse / BINS_PER_UNIT; }

// The least mass that holds a share `top_p` of `mass`.
__device__ __forceinline__ uint64 share_of(uint64 mass, float top_p) {
    return max(1ull, static_cast<uint64>(ceil(static_cast<double>(mass) * top_p)));
}

// The candidate's rank among all draws of the row's parameters.
__device__ __forceinline__ uint64 drawn_rank(float distance, int token, uint64 stream) {
    return rank(gumbel_score(-distance, uniform_of(stream, token)), token);
}

// visit(token, distance) for every candidate of the row; distance >= 0 is log(likeliest / candidate). A thread has
// LOADS loads of 16 bytes in flight, as many as its registers allow.
template <int LOADS, typename Visit> __device__ __forceinline__ void visit_row(const Row &row, Visit visit) {
    constexpr int STRIDE = 4 * THREADS;
    for (int first = 4 * threadIdx.x; first < row.vocab_size; first += LOADS * STRIDE) {
        float x[LOADS][4];
#pragma unroll
        for (int load = 0; load < LOADS; load++)
            load_logits(row.logits, first + load * STRIDE, row.vocab_size, x[load]);
#pragma unroll
        for (int i = 0; i < 4 * LOADS; i++) {
            const float scaled = (x[i / 4][i % 4] - row.largest) * row.inverse_temperature;
            if (scaled >= row.least) visit(first + i / 4 * STRIDE + i % 4, fabsf(scaled));
        }
    }
}

__device__ __forceinline__ Sums warp_sum(Sums x) {
#pragma unroll
    for (int offset = WARP / 2; offset > 0; offset /= 2)
        x = x + Sums{__shfl_xor_sync(0xffffffffu, x.count, offset), __shfl_xor_sync(0xffffffffu, x.mass, offset)};
    return x;
}

// Sums over all threads up to and with this one; the warps' sums stay in shared.of_warp.
__device__ Sums scan_block(const Sums &own) {
    static_assert(WARPS == WARP, "the lanes of a warp hold the sums of all warps");
    const int lane = threadIdx.x % WARP;
    Sums upto = own;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const Sums other = {__shfl_up_sync(0xffffffffu, upto.count, offset),
                            __shfl_up_sync(0xffffffffu, upto.mass, offset)};
        if (lane >= offset) upto = upto + other;
    }
    __syncthreads();
    if (lane == WARP - 1) shared.of_warp[threadIdx.x / WARP] = upto;
    __syncthreads();
    return upto + warp_sum(lane < threadIdx.x / WARP ? shared.of_warp[lane] : Sums{});
}

// What `scan_block` gave the last thread.
__device__ Sums block_total() {
    return warp_sum(shared.of_warp[threadIdx.x % WARP]);
}

// ---- The near candidates ----

// List the candidates nearer than NEAR, as many as fit; the sums of the others.
__device__ Sums list_near(const Row &row) {
    if (threadIdx.x == 0) shared.num_near = 0;
    __syncthreads();
    uint32 far_count = 0;
    float far_weight = 0.f;
    visit_row<4>(row, [&](int token, float distance) {
        const float weight = __expf(-distance);
        if (distance >= NEAR) {
            far_count++;
            far_weight += weight;
        } else if (*static_cast<volatile int *>(&shared.num_near) <= THREADS) {
            const int place = atomicAdd(&shared.num_near, 1);
            if (place < THREADS) shared.near[place] = {key_of(distance, token), mass_of(weight)};
        }
    });
    scan_block({far_count, mass_of(far_weight)});
    return block_total();
}

// The sums of the near candidates before `key`.
__device__ Sums before_near(uint64 key) {
    Sums before = {};
#pragma unroll 4
    for (int i = 0; i < shared.num_near; i++) {
        const ulonglong2 other = shared.near[i];
        if (other.x < key) before = before + Sums{1, other.y};
    }
    return before;
}

// The best of the kept candidates, or 0 when some of them are not near, or too many are.
__device__ uint64 draw_near(const Row &row, const Parameters &request) {
    const Sums far = list_near(row);
    if (shared.num_near > THREADS) return 0;
    const bool listed = threadIdx.x < shared.num_near;
    const ulonglong2 own = listed ? shared.near[threadIdx.x] : ulonglong2{};
    const Sums before = listed ? before_near(own.x) : Sums{};
    bool kept = listed;
    if (limits_count(request, row.vocab_size)) {
        if (request.top_k > shared.num_near && far.count > 0) return 0;
        kept = kept && before.count < request.top_k;
    }
    if (limits_mass(request)) {
        scan_block(kept ? Sums{1, own.y} : Sums{});
        const Sums near = block_total();
        const bool open = !limits_count(request, row.vocab_size);
        const uint64 target = share_of(near.mass + (open ? far.mass : 0), request.top_p);
        if (near.mass < target) return 0;
        kept = kept && before.mass < target;
    }
    const float distance = __uint_as_float(own.x >> TOKEN_BITS);
    const int token = own.x & ((1 << TOKEN_BITS) - 1);
    return block_max<WARPS>(kept ? drawn_rank(distance, token, stream_of(request)) : 0);
}

// ---- The search ----

__device__ __forceinline__ void clear_histogram() {
    for (int bin = threadIdx.x; bin < BINS; bin += THREADS) shared.count[bin] = shared.low[bin] = shared.high[bin] = 0;
    __syncthreads();
}

// `weight` is relative to the edge of the candidate's coarse bin, which keeps 28 bits of it wherever it is.
__device__ __forceinline__ void add_to_histogram(int bin, float distance) {
    const uint32 weight = __float2uint_rn(__expf(edge(coarse_bin(distance)) - distance) * 0x1p28f);
    atomicAdd(&shared.count[bin], 1);
    const uint32 before = atomicAdd(&shared.low[bin], weight);
    if (before + weight < before) atomicAdd(&shared.high[bin], 1);
}

// The thread's share of the histogram. edge_of(bin) is the edge that the bin's weights are relative to.
template <typename Edge> __device__ Share scan_histogram(Edge edge_of) {
    __syncthreads();
    Share share;
    Sums sum = {};
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int bin = OWN * threadIdx.x + i;
        const float weight = static_cast<float>(static_cast<uint64>(shared.high[bin]) << 32 | shared.low[bin]);
        share.own[i] = {shared.count[bin], mass_of(weight * 0x1p-28f * expf(-edge_of(bin)))};
        sum = sum + share.own[i];
    }
    share.before = scan_block(sum) - sum;
    return share;
}

// The first bin up to whose end the count, or else the mass, reaches `target`, a positive number.
__device__ Bin find(const Share &share, bool by_count, uint64 target) {
    if (threadIdx.x == 0) shared.found.number = -1;
    __syncthreads();
    Sums before = share.before;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
        const Sums after = before + share.own[i];
        if (measure(before, by_count) < target && target <= measure(after, by_count))
            shared.found = {static_cast<int>(OWN * threadIdx.x + i), before, share.own[i]};
        before = after;
    }
    __syncthreads();
    const Bin found = shared.found;
    __syncthreads();
    return found;
}

// The shortest prefix whose count, or else mass, reaches `target`, given the coarse bin in which it ends.
__device__ __forceinline__ Prefix search(const Row &row, const Bin &coarse, bool by_count, uint64 target) {
    const float from = edge(coarse.number);
    uint64 low = key_of(from, 0), high = key_of(edge(coarse.number + 1), 0), mass = coarse.before.mass;
    Sums inside = coarse.inside;  // of the keys from low to below high
    target -= measure(coarse.before, by_count);
    while (inside.count > 1 && high - low > 1) {
        const int shift = max(0, 64 - __clzll(high - low - 1) - BIN_BITS);
        clear_histogram();
        visit_row<2>(row, [&](int token, float distance) {
            const uint64 key = key_of(distance, token);
            if (low <= key && key < high) add_to_histogram(static_cast<int>((key - low) >> shift), distance);
        });
        const Bin next = find(scan_histogram([&](int) { return from; }), by_count, target);
        if (next.number < 0) break;  // the whole bin, but for rounding
        target -= measure(next.before, by_count);
        mass += next.before.mass;
        inside = next.inside;
        low += static_cast<uint64>(next.number) << shift;
        high = min(high, low + (1ull << shift));
    }
    return {high - 1, mass + inside.mass};
}

// The last key that top_k and top_p keep.
__device__ uint64 last_kept(const Row &row, const Parameters &request) {
    clear_histogram();
    visit_row<4>(row, [](int, float distance) { add_to_histogram(coarse_bin(distance), distance); });
    const Share share = scan_histogram([](int bin) { return edge(bin); });
    Prefix kept = {ALL, block_total().mass};
#pragma unroll 1
    for (int filter = 0; filter < 2; filter++) {
        const bool by_count = filter == 0;
        if (by_count ? !limits_count(request, row.vocab_size) : !limits_mass(request)) continue;
        const uint64 target = by_count ? request.top_k : share_of(kept.mass, request.top_p);
        const Bin bin = find(share, by_count, target);
        if (bin.number < 0) continue;
        const Prefix prefix = search(row, bin, by_count, target);
        kept = {min(kept.last, prefix.last), prefix.mass};
    }
    return kept.last;
}

// The best candidate under the request's filters.
__device__ uint64 draw(const Row &row, const Parameters &request) {
    uint64 last = ALL;
    if (limits_count(request, row.vocab_size) || limits_mass(request)) {
        const uint64 best = draw_near(row, request);
        if (best != 0) return best;
        last = last_kept(row, request);
    }
    const uint64 stream = stream_of(request);
    uint64 best = 0;
    visit_row<4>(row, [&](int token, float distance) {
        if (key_of(distance, token) <= last) best = max(best, drawn_rank(distance, token, stream));
    });
    return block_max<WARPS>(best);
}

extern "C" __global__ void __launch_bounds__(THREADS) sample_choose(
    const float *logits, const Parameters *parameters, const ulonglong2 *pieces, int *tokens, int *finite, int chunks,
    int vocab_size, int row_stride) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Parameters request = parameters[blockIdx.x];
    uint64 greatest = 0, drawn = 0;
    for (int chunk = threadIdx.x % WARP; chunk < chunks; chunk += WARP) {  // every warp for itself
        const ulonglong2 piece = pieces[blockIdx.x * chunks + chunk];
        greatest = max(greatest, piece.x);
        drawn = max(drawn, piece.y);
    }
    greatest = warp_max(greatest);
    uint64 chosen = is_greedy(request) ? greatest : warp_max(drawn);
    const float largest = rank_value(greatest);
    const bool is_finite = fabsf(largest) < __int_as_float(0x7f800000);
    if (is_finite && needs_largest(request, vocab_size)) {
        const float *row = logits + static_cast<long long>(blockIdx.x) * row_stride;
        const float least = fmaxf(request.log_min_p, -FARTHEST);
        chosen = draw({row, vocab_size, largest, 1.f / request.temperature, least}, request);
    }
    if (threadIdx.x == 0) {
        tokens[blockIdx.x] = is_finite ? rank_token(chosen) : 0;
        finite[blockIdx.x] = is_finite;
    }
}
