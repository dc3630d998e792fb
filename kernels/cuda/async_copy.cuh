// Copies of 16 bytes from global to shared memory that a thread does not wait for (SM80 and later).
#pragma once

#include "common.cuh"

__device__ __forceinline__ uint32 shared_address(const void *pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

// Past the L1. A thread waits for its own copies, in the groups in which it committed them, oldest first.
__device__ __forceinline__ void copy_async(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until at most so many of the last groups are under way.
template <int pending> __device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}
