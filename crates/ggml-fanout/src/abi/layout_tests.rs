//! Compares the structs of this module with the headers of each version of ggml, whose sizes and offsets a C program has printed.

use super::*;
use crate::host::{Interface, TESTED};
use std::collections::HashMap;
use std::mem::offset_of;

/// The records that `tests/plugin/layout.c` prints: a name and a number in each line.
fn recorded(version: &str) -> HashMap<&'static str, i64> {
    let text = match version {
        "0.13.1" => include_str!("../../../../tests/plugin/layout-0.13.1.txt"),
        "0.25.3" => include_str!("../../../../tests/plugin/layout-0.25.3.txt"),
        "0.26.0" => include_str!("../../../../tests/plugin/layout-0.26.0.txt"),
        "0.28.0" => include_str!("../../../../tests/plugin/layout-0.28.0.txt"),
        _ => panic!("no record of {version}"),
    };
    let line = |line: &'static str| {
        let (name, number) = line.rsplit_once(' ').expect("a name and a number");
        (name, number.parse().expect("a number"))
    };
    text.lines().map(line).collect()
}

/// Checks a struct: each field here is named after the recorded field that it is.
macro_rules! check {
    ($recorded:ident, $name:literal, $type:ty $(, $field:ident = $of:literal)*) => {
        $(assert_eq!(
            $recorded.get(concat!($name, ".", $of)).copied(),
            Some(offset_of!($type, $field) as i64),
            concat!($name, ".", $of)
        );)*
        // Of a graph the first fields are enough.
        if let Some(&size) = $recorded.get($name).filter(|_| $name != "ggml_cgraph") {
            assert_eq!(size, size_of::<$type>() as i64, $name);
        }
    };
}

#[test]
fn structs_are_laid_out_as_the_hosts() {
    for tested in TESTED {
        let mut r = recorded(tested.version);
        // The last property is new. Where it is missing, it lies in the padding of the properties, which no host reads.
        if r.insert("ggml_backend_dev_caps.mmap_support", 4).is_none() {
            assert_eq!(r.insert("ggml_backend_dev_caps", 5), Some(4));
        }
        check!(
            r,
            "ggml_tensor",
            Tensor,
            dtype = "type",
            buffer = "buffer",
            ne = "ne",
            nb = "nb",
            op = "op",
            op_params = "op_params",
            flags = "flags",
            src = "src",
            view_src = "view_src",
            view_offs = "view_offs",
            data = "data"
        );
        assert_eq!(r["ggml_tensor.name"], size_of::<Tensor>() as i64, "the name follows");
        check!(r, "ggml_cgraph", Graph, n_nodes = "n_nodes", use_counts = "use_counts", visited = "visited_hash_set");
        check!(r, "ggml_hash_set", HashSet, size = "size", used = "used", keys = "keys");
        check!(r, "ggml_backend_event", Event, device = "device", context = "context");
        check!(r, "ggml_backend", Backend, guid = "guid", iface = "iface", device = "device", context = "context");
        check!(
            r,
            "ggml_backend_i",
            BackendTable,
            get_name = "get_name",
            free = "free",
            set_tensor_async = "set_tensor_async",
            get_tensor_async = "get_tensor_async",
            set_tensor_2d_async = "set_tensor_2d_async",
            get_tensor_2d_async = "get_tensor_2d_async",
            copy_tensor_async = "cpy_tensor_async",
            synchronize = "synchronize",
            graph_plans = "graph_plan_create",
            graph_compute = "graph_compute",
            event_record = "event_record",
            event_wait = "event_wait",
            graph_optimize = "graph_optimize"
        );
        check!(r, "ggml_backend_device", Device, iface = "iface", registry = "reg", context = "context");
        check!(
            r,
            "ggml_backend_device_i",
            DeviceTable,
            get_name = "get_name",
            get_description = "get_description",
            get_memory = "get_memory",
            get_type = "get_type",
            get_props = "get_props",
            init_backend = "init_backend",
            get_buffer_type = "get_buffer_type",
            get_host_buffer_type = "get_host_buffer_type",
            buffer_from_host_ptr = "buffer_from_host_ptr",
            supports_op = "supports_op",
            supports_buffer_type = "supports_buft",
            offload_op = "offload_op",
            event_new = "event_new",
            event_free = "event_free",
            event_synchronize = "event_synchronize"
        );
        check!(
            r,
            "ggml_backend_dev_props",
            DeviceProps,
            name = "name",
            description = "description",
            memory_free = "memory_free",
            memory_total = "memory_total",
            device_type = "type",
            device_id = "device_id",
            caps = "caps"
        );
        check!(
            r,
            "ggml_backend_dev_caps",
            DeviceCaps,
            asynchronous = "async",
            host_buffer = "host_buffer",
            buffer_from_host_ptr = "buffer_from_host_ptr",
            events = "events",
            mmap_support = "mmap_support"
        );
        check!(r, "ggml_backend_reg", Registry, api_version = "api_version", iface = "iface", context = "context");
        check!(
            r,
            "ggml_backend_reg_i",
            RegistryTable,
            get_name = "get_name",
            get_device_count = "get_device_count",
            get_device = "get_device",
            get_proc_address = "get_proc_address"
        );
        let buffer_type = match tested.interface {
            Interface::V2 => {
                check!(
                    r,
                    "ggml_backend_buffer_type_i",
                    v2::BufferTypeTable,
                    get_name = "get_name",
                    alloc_buffer = "alloc_buffer",
                    get_alignment = "get_alignment",
                    get_max_size = "get_max_size",
                    get_alloc_size = "get_alloc_size",
                    is_host = "is_host"
                );
                size_of::<v2::BufferTypeTable>()
            }
            Interface::V3 => {
                check!(
                    r,
                    "ggml_backend_buffer_type_i",
                    v3::BufferTypeTable,
                    get_name = "get_name",
                    alloc_buffer = "alloc_buffer",
                    alloc_buffer_for = "alloc_buffer_n",
                    get_alignment = "get_alignment",
                    get_max_size = "get_max_size",
                    get_alloc_size = "get_alloc_size",
                    get_alloc_size_of = "get_alloc_size_n",
                    is_host = "is_host"
                );
                size_of::<v3::BufferTypeTable>()
            }
        };
        let buffer = if tested.lists {
            check!(
                r,
                "ggml_backend_buffer_i",
                v3::BufferTable,
                set_tensors = "set_tensor_n",
                get_tensors = "get_tensor_n",
                copy_tensors = "cpy_tensor_n"
            );
            size_of::<v3::BufferTable>()
        } else {
            assert_eq!(r["ggml_backend_buffer_i"], size_of::<v2::BufferTable>() as i64);
            size_of::<v2::BufferTable>()
        };
        for (name, offset) in [
            ("free_buffer", offset_of!(v2::BufferTable, free_buffer)),
            ("get_base", offset_of!(v2::BufferTable, get_base)),
            ("init_tensor", offset_of!(v2::BufferTable, init_tensor)),
            ("memset_tensor", offset_of!(v2::BufferTable, memset_tensor)),
            ("set_tensor", offset_of!(v2::BufferTable, set_tensor)),
            ("get_tensor", offset_of!(v2::BufferTable, get_tensor)),
            ("set_tensor_2d", offset_of!(v2::BufferTable, set_tensor_2d)),
            ("get_tensor_2d", offset_of!(v2::BufferTable, get_tensor_2d)),
            ("cpy_tensor", offset_of!(v2::BufferTable, copy_tensor)),
            ("clear", offset_of!(v2::BufferTable, clear)),
            ("reset", offset_of!(v2::BufferTable, reset)),
        ] {
            assert_eq!(r[&*format!("ggml_backend_buffer_i.{name}")], offset as i64, "{name}");
        }
        // The fields after the tables.
        let tails = [
            ("ggml_backend_buffer.buft", buffer + offset_of!(BufferTail, buffer_type)),
            ("ggml_backend_buffer.context", buffer + offset_of!(BufferTail, context)),
            ("ggml_backend_buffer.size", buffer + offset_of!(BufferTail, size)),
            ("ggml_backend_buffer.usage", buffer + offset_of!(BufferTail, usage)),
            ("ggml_backend_buffer_type.device", buffer_type + offset_of!(BufferTypeTail, device)),
            ("ggml_backend_buffer_type.context", buffer_type + offset_of!(BufferTypeTail, context)),
        ];
        for (name, offset) in tails {
            assert_eq!(r[name], offset as i64, "{name}");
        }
    }
}

#[test]
fn numbers_are_those_of_the_hosts() {
    for tested in TESTED {
        let r = recorded(tested.version);
        let api_version = if tested.interface == Interface::V2 { v2::VERSION } else { v3::VERSION };
        for (name, number) in [
            ("GGML_BACKEND_API_VERSION", i64::from(api_version)),
            ("GGML_MAX_DIMS", MAX_DIMS as i64),
            ("GGML_MAX_SRC", MAX_SRC as i64),
            ("GGML_OP_COUNT", i64::from(tested.ops)),
            ("GGML_UNARY_OP_COUNT", i64::from(tested.unary_ops)),
            ("GGML_GLU_OP_COUNT", i64::from(tested.gated_units)),
            ("GGML_TYPE_COUNT", i64::from(tested.types)),
            ("GGML_STATUS_FAILED", i64::from(STATUS_FAILED)),
            ("GGML_STATUS_SUCCESS", i64::from(STATUS_SUCCESS)),
            ("GGML_TENSOR_FLAG_OUTPUT", i64::from(FLAG_OUTPUT)),
            ("GGML_BACKEND_BUFFER_USAGE_WEIGHTS", i64::from(USAGE_WEIGHTS)),
            ("GGML_BACKEND_DEVICE_TYPE_GPU", i64::from(DEVICE_TYPE_GPU)),
        ] {
            assert_eq!(r[name], number, "{name} of {tested:?}");
        }
    }
}
