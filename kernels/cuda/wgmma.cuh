// Tensor core instructions of SM90a, issued by a warpgroup (four neighbouring warps, all 128 threads alike):
// D[64 x N] += A[64 x 16] B[16 x N] in fp32, A from registers or shared memory, B from shared memory.
//
// Warp w of the warpgroup holds rows 16w..16w+15. There lane 4g + t holds
//   A  a[0] = (row g, columns 2t, 2t+1)   a[1] = (g+8, 2t..)   a[2] = (g, 2t+8..)   a[3] = (g+8, 2t+8..)
//   D  d[4j], d[4j+1] = (row g, columns 8j+2t, 8j+2t+1)   d[4j+2], d[4j+3] = (row g+8, the same)
//
// The instructions run on their own. The order to keep:
//   wgmma_begin()    before the first one, and again whenever ordinary code has written a or d since
//   wgmma(...)       any number
//   wgmma_commit()   closes a group of them
//   wgmma_wait<P>()  until at most P groups run; only then may their d be read and their a or shared memory be written
//   wgmma_settle(d)  after the wait, so that the compiler does not read d too early
// What ordinary stores or cp.async wrote to shared memory is visible to wgmma after fence_async_proxy().
#pragma once

#include "common.cuh"

#if ACTIVATION_BF16
#define WGMMA_TYPES ".f32.bf16.bf16"
#else
#define WGMMA_TYPES ".f32.f16.f16"
#endif

// Describes an operand in shared memory in the 128-byte swizzle (as TMA writes it, or swizzled_128 below): rows of 128 bytes,
// 8 of them an atom of 1024 bytes, to which tiles are aligned.
//   K-major (a row is 64 values of k, one n or m):   row_group = bytes from 8 rows to the next 8, column_group unused.
//                                                    The next 16 of k are 32 bytes further: descriptor + 2.
//   N-major (a row is 64 values of n, one k; TRANSPOSED_B): row_group = bytes from 8 k to the next 8,
//                                                    column_group = bytes from 64 n to the next 64.
__device__ __forceinline__ uint64 swizzled_descriptor(uint32 shared_address, uint32 row_group = 1024, uint32 column_group = 16) {
    return static_cast<uint64>((shared_address & 0x3ffff) >> 4 | column_group >> 4 << 16) |
           static_cast<uint64>(row_group >> 4) << 32 | 1ull << 62;
}
__device__ __forceinline__ uint64 swizzled_descriptor(const void *tile, uint32 row_group = 1024, uint32 column_group = 16) {
    return swizzled_descriptor(static_cast<uint32>(__cvta_generic_to_shared(tile)), row_group, column_group);
}

// Where byte `column` (0..127) of row `row` lies in a tile of the 128-byte swizzle.
__device__ __forceinline__ uint32 swizzled_128(uint32 row, uint32 column) { return row * 128 + (column ^ (row % 8) * 16); }

__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void wgmma_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

template <int COUNT> __device__ __forceinline__ void wgmma_settle(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}

#define WGMMA_NUMBERS_8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define WGMMA_NUMBERS_16 WGMMA_NUMBERS_8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define WGMMA_NUMBERS_32 WGMMA_NUMBERS_16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define WGMMA_NUMBERS_48 WGMMA_NUMBERS_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define WGMMA_NUMBERS_64 WGMMA_NUMBERS_48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define WGMMA_NUMBERS_96                                                               \
    WGMMA_NUMBERS_64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79" \
                     ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define WGMMA_NUMBERS_128                                                                              \
    WGMMA_NUMBERS_96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"    \
                     ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

#define WGMMA_D8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define WGMMA_D_8 WGMMA_D8(0)
#define WGMMA_D_16 WGMMA_D_8, WGMMA_D8(8)
#define WGMMA_D_32 WGMMA_D_16, WGMMA_D8(16), WGMMA_D8(24)
#define WGMMA_D_48 WGMMA_D_32, WGMMA_D8(32), WGMMA_D8(40)
#define WGMMA_D_64 WGMMA_D_48, WGMMA_D8(48), WGMMA_D8(56)
#define WGMMA_D_96 WGMMA_D_64, WGMMA_D8(64), WGMMA_D8(72), WGMMA_D8(80), WGMMA_D8(88)
#define WGMMA_D_128 WGMMA_D_96, WGMMA_D8(96), WGMMA_D8(104), WGMMA_D8(112), WGMMA_D8(120)

// wgmma(d, a, b, accumulate): d has COUNT = N/2 floats, so its size chooses N; b is a descriptor, a one too or registers.
// d = A B where accumulate is false. The numbers behind the counts are those of the operands that follow d.
#define WGMMA_DEFINE(N, COUNT, I0, I1, I2, I3, I4, I5, I6)                                                             \
    template <int TRANSPOSED_B = 0>                                                                                    \
    __device__ __forceinline__ void wgmma(float (&d)[COUNT], const uint32 (&a)[4], uint64 b, bool accumulate) {        \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I5 ", 0;"                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES " {" WGMMA_NUMBERS_##COUNT "}, "         \
                     "{%" #I0 ",%" #I1 ",%" #I2 ",%" #I3 "}, %" #I4 ", p, 1, 1, %" #I6 ";}"                            \
                     : WGMMA_D_##COUNT                                                                                 \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(TRANSPOSED_B));   \
    }                                                                                                                  \
    template <int TRANSPOSED_B = 0>                                                                                    \
    __device__ __forceinline__ void wgmma(float (&d)[COUNT], uint64 a, uint64 b, bool accumulate) {                    \
        asm volatile("{.reg .pred p; setp.ne.b32 p, %" #I2 ", 0;"                                                      \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16" WGMMA_TYPES " {" WGMMA_NUMBERS_##COUNT "}, "         \
                     "%" #I0 ", %" #I1 ", p, 1, 1, 0, %" #I3 ";}"                                                      \
                     : WGMMA_D_##COUNT                                                                                 \
                     : "l"(a), "l"(b), "r"(int(accumulate)), "n"(TRANSPOSED_B));                                       \
    }

WGMMA_DEFINE(16, 8, 8, 9, 10, 11, 12, 13, 14)
WGMMA_DEFINE(32, 16, 16, 17, 18, 19, 20, 21, 22)
WGMMA_DEFINE(64, 32, 32, 33, 34, 35, 36, 37, 38)
WGMMA_DEFINE(96, 48, 48, 49, 50, 51, 52, 53, 54)
WGMMA_DEFINE(128, 64, 64, 65, 66, 67, 68, 69, 70)
WGMMA_DEFINE(256, 128, 128, 129, 130, 131, 132, 133, 134)
