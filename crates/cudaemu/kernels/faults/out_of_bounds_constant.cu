// Fault: an index past the constants of the module, and a write through a pointer to them.

__constant__ int constants[16] = {3, 1, 4, 1, 5, 9, 2, 6};

extern "C" __global__ void constant_clean(const int* index, int* out) { out[threadIdx.x] = constants[index[threadIdx.x] & 15]; }

// `index` is 1 << 20 for one thread.
extern "C" __global__ void constant_fault(const int* index, int* out) { out[threadIdx.x] = constants[index[threadIdx.x]]; }
