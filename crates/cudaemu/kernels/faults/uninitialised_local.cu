// Fault: a read of a local array's element that the thread has not written. `count` is 8 for the clean run, less for the
// fault; index[] is below 8: one kernel serves both.

extern "C" __global__ void uninitialised_local(const int* in, const int* index, int* out, int count) {
    int values[8];
    for (int k = 0; k < count; k++) values[in[k] & 7] = k;
    out[threadIdx.x] = values[index[threadIdx.x] & 7] + 1;
}
