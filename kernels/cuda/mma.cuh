// Tensor core instructions of SM80 and later, one warp each: D[16x8] += A[16x16] B[16x8], and moves of its operands.
//
// Lane 4g + t holds, as pairs of 16-bit values with the lower index in the lower half:
//   A  a[0] = (row g, columns 2t, 2t+1)   a[1] = (g+8, 2t..)   a[2] = (g, 2t+8..)   a[3] = (g+8, 2t+8..)
//   B  b[0] = (rows 2t, 2t+1, column g)   b[1] = (rows 2t+8, 2t+9, column g)
//   D  d[0], d[1] = (row g, columns 2t, 2t+1)   d[2], d[3] = (row g+8, the same)
#pragma once

#include "common.cuh"

// T, the type of A's and B's values, is __half or __nv_bfloat16; d is fp32.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]);

template <>
__device__ __forceinline__ void mma_m16n8k16<__half>(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <>
__device__ __forceinline__ void mma_m16n8k16<__nv_bfloat16>(float (&d)[4], const uint32 (&a)[4], const uint32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices from shared memory; lane l gives the address of row l % 8 of matrix l / 8 (16 bytes, aligned).
// r[i] is matrix i with lane 4g + t holding (row g, columns 2t, 2t+1).
__device__ __forceinline__ void ldmatrix_x4(uint32 (&r)[4], const void *row) {
    const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same with every matrix transposed: lane 4g + t holds (rows 2t, 2t+1, column g).
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32 (&r)[4], const void *row) {
    const uint32 address = static_cast<uint32>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// An 8x8 matrix of which lane 4g + t holds (row g, columns 2t, 2t+1), transposed, held alike.
__device__ __forceinline__ uint32 transpose_8x8(uint32 pair) {
    uint32 transposed;
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}
