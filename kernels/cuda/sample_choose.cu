// Second half of sampling: one block per row puts its pieces together, and where filters are set, draws under them.
//
// Filters keep a prefix of the candidates in the order "likelier first, then the lower token". Its last member is found
// by a search over histograms of their distance from the largest logit: first coarse and of all candidates, then ever
// finer of the bin that holds the end. Sums are integers, so that no order of addition matters.
#include "sampling.cuh"

constexpr int THREADS = 1024, WARPS = THREADS / WARP;
constexpr int BIN_BITS = 11, BINS = 1 << BIN_BITS, OWN = BINS / THREADS;
constexpr float BINS_PER_UNIT = 64.f;
constexpr float FARTHEST = 0x1.fffffep4f;  // the last distance that has a coarse bin: what is farther is never drawn
constexpr int TOKEN_BITS = 18;
constexpr int LISTED = 2048;
constexpr float NEAR = 8.f;  // candidates so near are listed at once, as the end is most often among them

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
    int tokens[LISTED];
    float distances[LISTED];
    int listed;
};
__shared__ Shared shared;

// The place of a candidate in the order. Keys differ, distances may not.
__device__ __forceinline__ uint64 key_of(float distance, int token) {
    return static_cast<uint64>(__float_as_uint(distance)) << TOKEN_BITS | token;
}
__device__ __forceinline__ int coarse_bin(float distance) { return static_cast<int>(distance * BINS_PER_UNIT); }
__device__ __forceinline__ float edge(int coarse) { return coarse / BINS_PER_UNIT; }

// visit(token, distance) for every candidate of the row; distance >= 0 is log(likeliest / candidate). A thread has LOADS
// loads of 16 bytes in flight.
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

// The same for the listed candidates, when there is a list.
template <int LOADS, typename Visit>
__device__ __forceinline__ void visit_nearest(const Row &row, bool listed, Visit visit) {
    if (!listed) return visit_row<LOADS>(row, visit);
    for (int i = threadIdx.x; i < shared.listed; i += THREADS) visit(shared.tokens[i], shared.distances[i]);
}

// Put a candidate on the list; what comes when it is full is counted only.
__device__ __forceinline__ void list(int token, float distance) {
    const int place = atomicAdd(&shared.listed, 1);
    if (place >= LISTED) return;
    shared.tokens[place] = token;
    shared.distances[place] = distance;
}

// Whether all candidates up to the end of a coarse bin are, or could be, listed.
__device__ bool list_nearest(const Row &row, const Bin &bin) {
    if (shared.listed <= LISTED && bin.number < coarse_bin(NEAR)) return true;
    if ((bin.before + bin.inside).count > LISTED) return false;
    __syncthreads();
    if (threadIdx.x == 0) shared.listed = 0;
    __syncthreads();
    visit_row<4>(row, [&](int token, float distance) {
        if (coarse_bin(distance) <= bin.number) list(token, distance);
    });
    __syncthreads();
    return true;
}

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
        share.own[i] = {shared.count[bin], __float2ull_rn(weight * 0x1p16f * expf(-edge_of(bin)))};
        sum = sum + share.own[i];
    }
    Sums upto = sum;
#pragma unroll
    for (int offset = 1; offset < WARP; offset *= 2) {
        const Sums other = {__shfl_up_sync(0xffffffffu, upto.count, offset),
                            __shfl_up_sync(0xffffffffu, upto.mass, offset)};
        if (threadIdx.x % WARP >= offset) upto = upto + other;
    }
    if (threadIdx.x % WARP == WARP - 1) shared.of_warp[threadIdx.x / WARP] = upto;
    __syncthreads();
    share.before = upto - sum;
    for (int warp = 0; warp < threadIdx.x / WARP; warp++) share.before = share.before + shared.of_warp[warp];
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
__device__ __forceinline__ Prefix
search(const Row &row, bool listed, const Bin &coarse, bool by_count, uint64 target) {
    uint64 low = key_of(edge(coarse.number), 0), high = key_of(edge(coarse.number + 1), 0);
    Bin bin = coarse;
    while (bin.inside.count > 1 && high - low > 1) {
        const int shift = max(0, 64 - __clzll(high - low - 1) - BIN_BITS);
        clear_histogram();
        visit_nearest<1>(row, listed, [&](int token, float distance) {
            const uint64 key = key_of(distance, token);
            if (low <= key && key < high) add_to_histogram(static_cast<int>((key - low) >> shift), distance);
        });
        const Share share = scan_histogram([&](int) { return edge(coarse.number); });
        const Bin next = find(share, by_count, target - measure(bin.before, by_count));
        if (next.number < 0) break;  // the whole bin, but for rounding
        bin = {next.number, bin.before + next.before, next.inside};
        low += static_cast<uint64>(next.number) << shift;
        high = min(high, low + (1ull << shift));
    }
    return {high - 1, (bin.before + bin.inside).mass};
}

// The least mass that holds a share `top_p` of `mass`.
__device__ __forceinline__ uint64 share_of(uint64 mass, float top_p) {
    return max(1ull, static_cast<uint64>(ceil(static_cast<double>(mass) * top_p)));
}

// The last key that top_k and top_p keep. Sets `listed` when the kept candidates, and some more, are in the list.
__device__ uint64 last_kept(const Row &row, const Parameters &request, bool &listed) {
    if (threadIdx.x == 0) shared.listed = 0;
    clear_histogram();
    visit_row<4>(row, [](int token, float distance) {
        add_to_histogram(coarse_bin(distance), distance);
        if (distance < NEAR) list(token, distance);
    });
    const Share share = scan_histogram([](int bin) { return edge(bin); });
    Prefix kept = {~0ull, 0};
    for (int warp = 0; warp < WARPS; warp++) kept.mass += shared.of_warp[warp].mass;
#pragma unroll 1
    for (int filter = 0; filter < 2; filter++) {
        const bool by_count = filter == 0;
        if (by_count ? !limits_count(request, row.vocab_size) : !limits_mass(request)) continue;
        const uint64 target = by_count ? request.top_k : share_of(kept.mass, request.top_p);
        const Bin bin = find(share, by_count, target);
        if (bin.number < 0) continue;
        if (!listed) listed = list_nearest(row, bin);
        const Prefix prefix = search(row, listed, bin, by_count, target);
        kept = {min(kept.last, prefix.last), prefix.mass};
    }
    return kept.last;
}

// The best candidate under the request's filters.
__device__ uint64 draw(const Row &row, const Parameters &request) {
    bool listed = false;
    uint64 last = ~0ull;
    if (limits_count(request, row.vocab_size) || limits_mass(request)) last = last_kept(row, request, listed);
    const uint64 stream = stream_of(request);
    uint64 best = 0;
    visit_nearest<4>(row, listed, [&](int token, float distance) {
        if (key_of(distance, token) > last) return;
        best = max(best, rank(gumbel_score(-distance, uniform_of(stream, token)), token));
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
