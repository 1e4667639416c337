// Keys of sorted floats.
#pragma once
#include "abi.cuh"

// The key of an element: orders by value (ascending or descending), then by index.
__device__ __forceinline__ u64 key_of(float value, u32 index, u32 descending) {
    const u32 bits = __float_as_uint(value);
    const u32 ascending = bits >> 31 ? ~bits : bits | 0x80000000;
    return (u64)(descending ? ~ascending : ascending) << 32 | index;
}
