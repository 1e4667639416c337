// Rows that are named by index: GET_ROWS and SET_ROWS.
#pragma once
#include "abi.cuh"

// Op numbers, for refuse().
constexpr u32 GET_ROWS = 40, SET_ROWS = 42;

// The lists of ids of a node: id k of list [i, j] lies at k * nb[0] + i * nb[1] + j * nb[2].
struct Ids {
    u64 nb[3];
    u32 wide;      // I64, not I32
    u32 rows;      // of the table: ids are below
    u32 count;     // in each list
    u32 lists[2];  // numbers of lists; list [i % lists[0], j % lists[1]] is that of matrix [i, j]
    u32 claims;    // slots of each list's table of claims, a power of two; 0 without one

    __device__ i64 at(const u8 *ids, u32 k, u32 i, u32 j) const {
        const u8 *id = ids + k * nb[0] + i * nb[1] + j * nb[2];
        return wide ? *(const i64 *)id : *(const int *)id;
    }

    __device__ bool inside(i64 id) const { return (u64)id < rows; }
};

// Claims tell which of equal ids is the last one. An open hash table: a slot is 0, or row + 1 in its upper half and the last
// position that names the row + 1 in its lower half. The table has at least twice as many slots as the list has ids.
__device__ inline u32 first_slot(u32 row, u32 slots) { return row * 0x9e3779b1u >> (__clz(slots) + 1); }

__device__ inline void claim(u64 *table, u32 slots, u32 row, u32 position) {
    const u64 mine = (u64)(row + 1) << 32 | (position + 1);
    for (u32 slot = first_slot(row, slots);; slot = (slot + 1) & (slots - 1)) {
        const u64 found = atomicCAS(table + slot, 0ull, mine);
        if (found == 0) return;
        // A slot never changes its row.
        if (found >> 32 == row + 1) {
            atomicMax(table + slot, mine);
            return;
        }
    }
}

__device__ inline bool holds(const u64 *table, u32 slots, u32 row, u32 position) {
    for (u32 slot = first_slot(row, slots);; slot = (slot + 1) & (slots - 1)) {
        const u64 found = table[slot];
        if (found >> 32 == row + 1) return (u32)found == position + 1;
        if (found == 0) return false;
    }
}

// Whether position k of the list of matrix [i, j], which names `row`, is the last that does. `claims` are those of all lists
// (made by an earlier launch); without them the rest of the list is read.
__device__ inline bool last_of_equal(const Ids &list, const u8 *ids, const u64 *claims, u32 k, u32 i, u32 j, u32 row) {
    if (list.claims) return holds(claims + (u64)(j * list.lists[0] + i) * list.claims, list.claims, row, k);
    for (u32 later = k + 1; later < list.count; later++) {
        if (list.at(ids, later, i, j) == row) return false;
    }
    return true;
}
