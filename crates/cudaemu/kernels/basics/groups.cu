// The cooperative groups library: grid synchronisation, tiles, and groups of the active lanes.

#include <cooperative_groups.h>
namespace cg = cooperative_groups;

// The blocks add their numbers to every cell in turn. Needs a cooperative launch.
extern "C" __global__ void groups_grid(int* cells) {
    cg::grid_group grid = cg::this_grid();
    int i = threadIdx.x;
    for (int turn = 0; turn < gridDim.x; turn++) {
        if (turn == blockIdx.x) cells[i] = cells[i] * 2 + blockIdx.x;
        grid.sync();
    }
}

// out[i] = sum of the tile of 8 that i is in, plus the rank in it.
extern "C" __global__ void groups_tile(const int* in, int* out) {
    cg::thread_block block = cg::this_thread_block();
    cg::thread_block_tile<8> tile = cg::tiled_partition<8>(block);
    int i = blockIdx.x * blockDim.x + block.thread_rank();
    int sum = in[i];
    for (int step = 4; step > 0; step /= 2) sum += tile.shfl_xor(sum, step);
    tile.sync();
    out[i] = sum + tile.thread_rank();
    block.sync();
}

// out[i] = number of active lanes with an odd value before lane i.
extern "C" __global__ void groups_active(const int* in, int* out) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    out[i] = -1;
    if (in[i] & 1) {
        cg::coalesced_group active = cg::coalesced_threads();
        out[i] = active.thread_rank() + 100 * active.size();
    }
}
