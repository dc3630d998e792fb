// Copies that run on their own on SM90 (TMA), the barriers in shared memory that say when they are done, and clusters:
// blocks on neighbouring multiprocessors that reach each other's shared memory.
//
// A barrier's phase ends when its expected arrivals have come and as many bytes as were announced have landed. A waiter
// names the parity of the phase: 0 for the first, 1 for the second, 0 again. Waiting for parity 1 of a barrier in its
// first phase returns at once, which suits whoever fills a buffer that is empty at the start.
#pragma once

#include "common.cuh"

using Barrier = uint64;

// A tensor map as the driver encodes it (kernels/tensor_map.py), a kernel parameter: const __grid_constant__ TensorMap.
struct alignas(64) TensorMap {
    uint64 opaque[16];
};

// Places in shared memory are given as pointers or as their 32-bit addresses, which a loop keeps in a register where the
// compiler would make a pointer anew in every round.
__device__ __forceinline__ uint32 shared_address(const void *pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}
__device__ __forceinline__ uint32 shared_address(uint32 address) { return address; }

template <typename Place> __device__ __forceinline__ void barrier_init(Place barrier, uint32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// After a thread's barrier_init calls: shows them to the cluster and to copies.
__device__ __forceinline__ void fence_barrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;\n\tfence.proxy.async.shared::cta;" ::: "memory");
}

// Arrives once and announces bytes that copies will bring.
template <typename Place> __device__ __forceinline__ void barrier_expect(Place barrier, uint32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Arrives at the barrier at the same place in block `rank` of the cluster (which may be the own one).
template <typename Place> __device__ __forceinline__ void barrier_arrive(Place barrier, uint32 rank) {
    asm volatile(
        "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
        "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(shared_address(barrier)), "r"(rank)
        : "memory");
}

template <typename Place> __device__ __forceinline__ void barrier_wait(Place barrier, uint32 parity) {
    uint32 done;
    do {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}

// The same for what other blocks of the cluster have sent.
template <typename Place> __device__ __forceinline__ void barrier_wait_cluster(Place barrier, uint32 parity) {
    uint32 done;
    do {
        asm volatile(
            "{.reg .pred p; mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
            : "=r"(done)
            : "r"(shared_address(barrier)), "r"(parity)
            : "memory");
    } while (!done);
}

// The box of a two-dimensional tensor whose first element is (row, column); what lies outside of the tensor is zero.
template <typename To, typename Place>
__device__ __forceinline__ void copy_box(To to, const TensorMap &map, int column, int row, Place barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
            shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// The same into every block of the cluster whose bit is set in `ranks`: to the same place, told to the same barrier.
template <typename To, typename Place>
__device__ __forceinline__ void copy_box_to_many(To to, const TensorMap &map, int column, int row, Place barrier, uint16 ranks) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(ranks)
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const TensorMap &map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// All threads of the cluster meet: what was written before one's arrival is seen after another's wait. A relaxed arrival
// shows nothing of its own, but what fence_barrier_init has shown; the other one waits for all writes, which takes long.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// 16 bytes from the same place in block `rank`'s shared memory.
template <typename Place> __device__ __forceinline__ float4 read_remote(Place place, uint32 rank) {
    float4 value;
    asm volatile(
        "{.reg .b32 remote; mapa.shared::cluster.u32 remote, %4, %5;"
        "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];}"
        : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
        : "r"(shared_address(place)), "r"(rank));
    return value;
}

// 16 bytes to the same place in block `rank`'s shared memory, told to the barrier at the same place there.
template <typename Place, typename Told> __device__ __forceinline__ void send(Place place, float4 value, Told barrier, uint32 rank) {
    asm volatile(
        "{.reg .b32 there, told; mapa.shared::cluster.u32 there, %0, %6; mapa.shared::cluster.u32 told, %5, %6;"
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%1, %2, %3, %4}, [told];}" ::"r"(
            shared_address(place)),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(shared_address(barrier)), "r"(rank)
        : "memory");
}
