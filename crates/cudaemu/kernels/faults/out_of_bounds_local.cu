// Fault: an index past a thread's local memory. The clean kernel masks the index; the faulty one uses it unchanged (a large
// value such as 1 << 20).

extern "C" __global__ void local_array_clean(const int* in, const int* index, int* out) {
    int values[8];
    for (int k = 0; k < 8; k++) values[k] = in[k] * threadIdx.x;
    out[threadIdx.x] = values[index[threadIdx.x] & 7];
}

extern "C" __global__ void local_array_fault(const int* in, const int* index, int* out) {
    int values[8];
    for (int k = 0; k < 8; k++) values[k] = in[k] * threadIdx.x;
    out[threadIdx.x] = values[index[threadIdx.x]];
}
