// Fault: access through a null pointer, plain and with a small offset. Clean: the same with a check.

struct Node {
    int value;
    Node* next;
};

extern "C" __global__ void null_pointer_clean(const Node* node, int* out) {
    out[threadIdx.x] = node != nullptr ? node->value : -1;
}

extern "C" __global__ void null_pointer_read_fault(const Node* node, int* out) { out[threadIdx.x] = node->value; }

extern "C" __global__ void null_pointer_offset_fault(const Node* node, int* out) { out[threadIdx.x] = node->next == nullptr; }

extern "C" __global__ void null_pointer_write_fault(Node* node, int* out) { node->value = out[threadIdx.x]; }
