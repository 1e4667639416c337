// Fault: a read, a write or an atomic on memory that the host has freed. The kernels are the same for fault and clean twin: the
// host frees `cells` before the launch, or while the launch is still queued.

extern "C" __global__ void read_cells(const int* cells, int* out) { out[threadIdx.x] = cells[threadIdx.x]; }

extern "C" __global__ void write_cells(int* cells, int value) { cells[threadIdx.x] = value; }

extern "C" __global__ void add_to_cells(int* cells, int value) { atomicAdd(cells + threadIdx.x, value); }

// Keeps an address in memory: a later launch uses it, after the host has freed the memory at that address.
extern "C" __global__ void keep_address(int** kept, int* cells) { *kept = cells; }
extern "C" __global__ void use_address(int** kept, int* out) { out[threadIdx.x] = (*kept)[threadIdx.x]; }
