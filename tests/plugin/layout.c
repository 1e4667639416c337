// Prints sizes of the structs that a host and its backends share, offsets of their fields, and constants, as the headers of this
// version of ggml have them: lines `struct size`, `struct.field offset` and `CONSTANT value`.
// layout-VERSION.txt is its output with the headers of a version that the plug-in serves.
#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <stddef.h>
#include <stdio.h>

#define SIZE(type) printf(#type " %zu\n", sizeof(struct type))
#define NUMBER(name) printf(#name " %d\n", (int) (name))
#define FIELD(type, field) printf(#type "." #field " %zu\n", offsetof(struct type, field))

static void tensor(void) {
#define F(field) FIELD(ggml_tensor, field)
    // The name and the padding that follow are not part of the interface.
    F(type), F(buffer), F(ne), F(nb), F(op), F(op_params), F(flags), F(src), F(view_src), F(view_offs), F(data), F(name);
#undef F
}

// Hosts have no function for the use counts of a graph.
static void graphs(void) {
    SIZE(ggml_cgraph);
#define F(field) FIELD(ggml_cgraph, field)
    F(size), F(n_nodes), F(n_leafs), F(nodes), F(grads), F(grad_accs), F(leafs), F(use_counts), F(visited_hash_set);
    F(order), F(uid);
#undef F
    SIZE(ggml_hash_set);
#define F(field) FIELD(ggml_hash_set, field)
    F(size), F(used), F(keys);
#undef F
}

static void buffer_types(void) {
    SIZE(ggml_backend_buffer_type_i);
#define F(field) FIELD(ggml_backend_buffer_type_i, field)
    F(get_name), F(alloc_buffer), F(get_alignment), F(get_max_size), F(get_alloc_size), F(is_host);
#if GGML_BACKEND_API_VERSION >= 3
    F(alloc_buffer_n), F(get_alloc_size_n);
#endif
#undef F
    SIZE(ggml_backend_buffer_type);
#define F(field) FIELD(ggml_backend_buffer_type, field)
    F(iface), F(device), F(context);
#undef F
}

static void buffers(void) {
    SIZE(ggml_backend_buffer_i);
#define F(field) FIELD(ggml_backend_buffer_i, field)
    F(free_buffer), F(get_base), F(init_tensor), F(memset_tensor), F(set_tensor), F(get_tensor), F(set_tensor_2d);
    F(get_tensor_2d), F(cpy_tensor), F(clear), F(reset);
#ifndef WITHOUT_LISTS // of ggml 0.26
#if GGML_BACKEND_API_VERSION >= 3
    F(set_tensor_n), F(get_tensor_n), F(cpy_tensor_n);
#endif
#endif
#undef F
    SIZE(ggml_backend_buffer);
#define F(field) FIELD(ggml_backend_buffer, field)
    F(iface), F(buft), F(context), F(size), F(usage);
#undef F
}

static void streams(void) {
    SIZE(ggml_backend_i);
#define F(field) FIELD(ggml_backend_i, field)
    F(get_name), F(free), F(set_tensor_async), F(get_tensor_async), F(set_tensor_2d_async), F(get_tensor_2d_async);
    F(cpy_tensor_async), F(synchronize), F(graph_plan_create), F(graph_plan_free), F(graph_plan_update);
    F(graph_plan_compute), F(graph_compute), F(event_record), F(event_wait), F(graph_optimize);
#undef F
    SIZE(ggml_backend);
#define F(field) FIELD(ggml_backend, field)
    F(guid), F(iface), F(device), F(context);
#undef F
    SIZE(ggml_backend_event);
    FIELD(ggml_backend_event, device), FIELD(ggml_backend_event, context);
}

static void devices(void) {
    SIZE(ggml_backend_device_i);
#define F(field) FIELD(ggml_backend_device_i, field)
    F(get_name), F(get_description), F(get_memory), F(get_type), F(get_props), F(init_backend), F(get_buffer_type);
    F(get_host_buffer_type), F(buffer_from_host_ptr), F(supports_op), F(supports_buft), F(offload_op), F(event_new);
    F(event_free), F(event_synchronize);
#undef F
    SIZE(ggml_backend_device);
#define F(field) FIELD(ggml_backend_device, field)
    F(iface), F(reg), F(context);
#undef F
    SIZE(ggml_backend_dev_props);
#define F(field) FIELD(ggml_backend_dev_props, field)
    F(name), F(description), F(memory_free), F(memory_total), F(type), F(device_id), F(caps);
#undef F
    SIZE(ggml_backend_dev_caps);
#define F(field) FIELD(ggml_backend_dev_caps, field)
    F(async), F(host_buffer), F(buffer_from_host_ptr), F(events);
#ifndef WITHOUT_MMAP_SUPPORT // of ggml 0.13
    F(mmap_support);
#endif
#undef F
}

static void registries(void) {
    SIZE(ggml_backend_reg_i);
#define F(field) FIELD(ggml_backend_reg_i, field)
    F(get_name), F(get_device_count), F(get_device), F(get_proc_address);
#undef F
    SIZE(ggml_backend_reg);
#define F(field) FIELD(ggml_backend_reg, field)
    F(api_version), F(iface), F(context);
#undef F
}

static void numbers(void) {
    NUMBER(GGML_BACKEND_API_VERSION);
    NUMBER(GGML_MAX_DIMS);
    NUMBER(GGML_MAX_SRC);
    NUMBER(GGML_MAX_OP_PARAMS);
    // One more than the largest number: the plug-in asks the host for the name of each.
    NUMBER(GGML_OP_COUNT);
    NUMBER(GGML_UNARY_OP_COUNT);
    NUMBER(GGML_GLU_OP_COUNT);
    NUMBER(GGML_TYPE_COUNT);
    NUMBER(GGML_STATUS_FAILED);
    NUMBER(GGML_STATUS_SUCCESS);
    NUMBER(GGML_TENSOR_FLAG_OUTPUT);
    NUMBER(GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    NUMBER(GGML_BACKEND_DEVICE_TYPE_GPU);
    NUMBER(GGML_LOG_LEVEL_DEBUG);
    NUMBER(GGML_LOG_LEVEL_INFO);
    NUMBER(GGML_LOG_LEVEL_ERROR);
}

int main(void) {
    numbers();
    tensor();
    graphs();
    buffer_types();
    buffers();
    streams();
    devices();
    registries();
    return 0;
}
