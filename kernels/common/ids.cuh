// Lists of row ids of GET_ROWS and SET_ROWS, and the hash table that finds the last of equal ids.
#pragma once
#include "abi.cuh"

// Op numbers, for report_bad_index().
constexpr u32 GET_ROWS = 40, SET_ROWS = 42;

// The lists of ids of a node: id k of list [i, j] is at byte k * nb[0] + i * nb[1] + j * nb[2].
struct Ids {
    u64 nb[3];
    u32 wide;      // ids are I64; otherwise I32
    u32 rows;      // rows of the table; valid ids are smaller
    u32 count;     // ids per list
    u32 lists[2];  // counts of lists; matrix [i, j] uses list [i % lists[0], j % lists[1]]
    u32 claims;    // slots of the claim table of each list, a power of two; 0 if there is none

    __device__ i64 at(const u8 *ids, u32 k, u32 i, u32 j) const {
        const u8 *id = ids + k * nb[0] + i * nb[1] + j * nb[2];
        return wide ? *(const i64 *)id : *(const int *)id;
    }

    __device__ bool inside(i64 id) const { return (u64)id < rows; }
};

// Claim table: a hash table with open addressing that maps a row to the last position in the list with this id, so that exactly
// one thread writes the row. A slot is 0, or has row + 1 in its upper half and the last position + 1 in its lower half. The
// table has at least twice as many slots as the list has ids.
__device__ inline u32 first_slot(u32 row, u32 slots) { return row * 0x9e3779b1u >> (__clz(slots) + 1); }

__device__ inline void claim(u64 *table, u32 slots, u32 row, u32 position) {
    const u64 mine = (u64)(row + 1) << 32 | (position + 1);
    for (u32 slot = first_slot(row, slots);; slot = (slot + 1) & (slots - 1)) {
        const u64 found = atomicCAS(table + slot, 0ull, mine);
        if (found == 0) return;
        // The row of a used slot never changes, so the maximum applies to the position.
        if (found >> 32 == row + 1) {
            atomicMax(table + slot, mine);
            return;
        }
    }
}

// Whether `position` is the last one that claimed `row`.
__device__ inline bool is_last_claim(const u64 *table, u32 slots, u32 row, u32 position) {
    for (u32 slot = first_slot(row, slots);; slot = (slot + 1) & (slots - 1)) {
        const u64 found = table[slot];
        if (found >> 32 == row + 1) return (u32)found == position + 1;
        if (found == 0) return false;
    }
}

// Whether position k of the list of matrix [i, j], which contains `row`, is the last position with this id. `claims` holds the
// claim tables of all lists, built by an earlier launch. Without claim tables, the rest of the list is scanned.
__device__ inline bool last_of_equal(const Ids &list, const u8 *ids, const u64 *claims, u32 k, u32 i, u32 j, u32 row) {
    if (list.claims) return is_last_claim(claims + (u64)(j * list.lists[0] + i) * list.claims, list.claims, row, k);
    for (u32 later = k + 1; later < list.count; later++) {
        if (list.at(ids, later, i, j) == row) return false;
    }
    return true;
}
