//! ggml's structs and constants of its interface between hosts and backends, as the shared library of a host lays them out.
//!
//! The interface has versions, which hosts do not tell. Here are the parts that versions 2 and 3 share; [`v2`] and [`v3`] have
//! the tables that differ. Callbacks have the same signatures in both, so they exist once, and a table of either version holds
//! them. `tests/plugin/layout.c` prints
//! sizes and offsets of the headers of both, and a test compares them.

#[cfg(test)]
mod layout_tests;
pub(crate) mod tables;
pub(crate) mod v2;
pub(crate) mod v3;

use std::ffi::{CStr, c_char, c_int, c_void};

/// Dimensions of a tensor.
pub(crate) const MAX_DIMS: usize = 4;
/// Sources of a node.
pub(crate) const MAX_SRC: usize = 10;

/// `enum ggml_status`.
pub(crate) type Status = c_int;
pub(crate) const STATUS_FAILED: Status = -1;
pub(crate) const STATUS_SUCCESS: Status = 0;

/// `enum ggml_backend_buffer_usage`.
pub(crate) const USAGE_WEIGHTS: c_int = 1;
pub(crate) const USAGE_COMPUTE: c_int = 2;

/// `enum ggml_backend_dev_type`: a device with memory of its own.
pub(crate) const DEVICE_TYPE_GPU: c_int = 1;

/// `ggml_tensor.flags`: an output of the graph, which the host reads after the run.
pub(crate) const FLAG_OUTPUT: i32 = 2;
/// `ggml_tensor.flags`: the node is to be computed.
pub(crate) const FLAG_COMPUTE: i32 = 16;

/// `struct ggml_tensor`, up to `data`. Hosts may choose the length of the name that follows, so nothing reads beyond.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Tensor {
    pub(crate) dtype: u32,
    pub(crate) buffer: *mut Buffer,
    /// Element counts, fastest dimension first.
    pub(crate) ne: [i64; MAX_DIMS],
    /// Byte strides.
    pub(crate) nb: [usize; MAX_DIMS],
    pub(crate) op: u32,
    pub(crate) op_params: [i32; 16],
    pub(crate) flags: i32,
    pub(crate) src: [*mut Tensor; MAX_SRC],
    pub(crate) view_src: *mut Tensor,
    pub(crate) view_offs: usize,
    pub(crate) data: *mut c_void,
}

impl Tensor {
    /// The buffer of the tensor, or of the tensor that it is a view of.
    pub(crate) fn owner(&self) -> *mut Buffer {
        // SAFETY: ggml sets `view_src` to a tensor that lives as long as its view, or null.
        match unsafe { self.view_src.as_ref() } {
            Some(viewed) if self.buffer.is_null() => viewed.buffer,
            _ => self.buffer,
        }
    }
}

/// The name of a tensor, which follows [`Tensor`] in the host's memory.
///
/// # Safety
/// `tensor` is a tensor of the host, and no copy of one.
pub(crate) unsafe fn name_of(tensor: *const Tensor) -> String {
    // SAFETY: the caller passes a tensor, whose name is an array of at least 64 characters with a zero.
    let name = unsafe { std::slice::from_raw_parts(tensor.add(1).cast::<u8>(), 64) };
    CStr::from_bytes_until_nul(name).map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Rows of memory that the host passes to be read.
///
/// # Safety
/// `data` has `rows` rows of `size` bytes, `stride` bytes apart, and `size` is not 0.
pub(crate) unsafe fn rows<'a>(
    data: *const c_void,
    size: usize,
    rows: usize,
    stride: usize,
) -> impl Iterator<Item = &'a [u8]> {
    // SAFETY: the caller passes such memory.
    (0..rows).map(move |row| unsafe { std::slice::from_raw_parts(data.byte_add(row * stride).cast::<u8>(), size) })
}

/// Rows of memory that the host passes to be written.
///
/// # Safety
/// As for [`rows`], and the rows do not overlap.
pub(crate) unsafe fn rows_mut<'a>(
    data: *mut c_void,
    size: usize,
    rows: usize,
    stride: usize,
) -> impl Iterator<Item = &'a mut [u8]> {
    // SAFETY: the caller passes such memory.
    (0..rows).map(move |row| unsafe { std::slice::from_raw_parts_mut(data.byte_add(row * stride).cast::<u8>(), size) })
}

/// `struct ggml_cgraph`, of which only the counts of readers are read here: the host has functions for the rest.
#[repr(C)]
pub(crate) struct Graph {
    size: c_int,
    n_nodes: c_int,
    n_leafs: c_int,
    nodes: *mut *mut Tensor,
    grads: *mut *mut Tensor,
    grad_accs: *mut *mut Tensor,
    leafs: *mut *mut Tensor,
    /// How many nodes of the whole graph, of which this one may be a part, read a tensor: by its place in the hash table.
    use_counts: *mut i32,
    visited: HashSet,
}

/// `struct ggml_hash_set`: tensors by address, with linear probing.
#[repr(C)]
pub(crate) struct HashSet {
    size: usize,
    /// A bit per place: whether a tensor is there.
    used: *mut u32,
    keys: *mut *mut Tensor,
}

impl Graph {
    /// How many nodes of the whole graph read a tensor; 0 if the graph does not tell.
    ///
    /// # Safety
    /// `graph` is a graph of the host that does not change during the call.
    pub(crate) unsafe fn readers(graph: *mut Graph, tensor: *const Tensor) -> i32 {
        // SAFETY: the caller passes a valid graph.
        let (set, counts) = unsafe { (&(*graph).visited, (*graph).use_counts) };
        if set.size == 0 || counts.is_null() || set.used.is_null() || set.keys.is_null() {
            return 0;
        }
        let first = (tensor as usize >> 4) % set.size;
        for place in (first..set.size).chain(0..first) {
            // SAFETY: `place` is below the size of the table, which all three arrays have.
            unsafe {
                if *set.used.add(place / 32) & (1 << (place % 32)) == 0 {
                    return 0;
                }
                if std::ptr::eq(*set.keys.add(place), tensor) {
                    return *counts.add(place);
                }
            }
        }
        0
    }
}

/// `struct ggml_backend_buffer`: the table of callbacks, whose size depends on the version, and then [`BufferTail`].
#[repr(C)]
pub(crate) struct Buffer {
    _opaque: [u8; 0],
}

/// The fields of `struct ggml_backend_buffer` after its table of callbacks.
#[repr(C)]
pub(crate) struct BufferTail {
    pub(crate) buffer_type: *mut BufferType,
    pub(crate) context: *mut c_void,
    pub(crate) size: usize,
    pub(crate) usage: c_int,
}

/// `struct ggml_backend_buffer_type`: the table of callbacks, whose size depends on the version, and then [`BufferTypeTail`].
#[repr(C)]
pub(crate) struct BufferType {
    _opaque: [u8; 0],
}

/// The fields of `struct ggml_backend_buffer_type` after its table of callbacks.
#[repr(C)]
pub(crate) struct BufferTypeTail {
    pub(crate) device: *mut Device,
    pub(crate) context: *mut c_void,
}

/// `struct ggml_backend`: a stream of work on a device.
#[repr(C)]
pub(crate) struct Backend {
    pub(crate) guid: *const [u8; 16],
    pub(crate) iface: BackendTable,
    pub(crate) device: *mut Device,
    pub(crate) context: *mut c_void,
}

/// `struct ggml_backend_i`. `None` for an optional callback that does not exist.
#[repr(C)]
pub(crate) struct BackendTable {
    pub(crate) get_name: unsafe extern "C" fn(*mut Backend) -> *const c_char,
    pub(crate) free: unsafe extern "C" fn(*mut Backend),
    pub(crate) set_tensor_async: unsafe extern "C" fn(*mut Backend, *mut Tensor, *const c_void, usize, usize),
    pub(crate) get_tensor_async: unsafe extern "C" fn(*mut Backend, *const Tensor, *mut c_void, usize, usize),
    pub(crate) set_tensor_2d_async:
        unsafe extern "C" fn(*mut Backend, *mut Tensor, *const c_void, usize, usize, usize, usize, usize),
    pub(crate) get_tensor_2d_async:
        unsafe extern "C" fn(*mut Backend, *const Tensor, *mut c_void, usize, usize, usize, usize, usize),
    pub(crate) copy_tensor_async: unsafe extern "C" fn(*mut Backend, *mut Backend, *const Tensor, *mut Tensor) -> bool,
    pub(crate) synchronize: unsafe extern "C" fn(*mut Backend),
    /// Plans of graphs, which no host uses: four callbacks.
    pub(crate) graph_plans: [Option<unsafe extern "C" fn()>; 4],
    pub(crate) graph_compute: unsafe extern "C" fn(*mut Backend, *mut Graph) -> Status,
    pub(crate) event_record: unsafe extern "C" fn(*mut Backend, *mut Event),
    pub(crate) event_wait: unsafe extern "C" fn(*mut Backend, *mut Event),
    pub(crate) graph_optimize: Option<unsafe extern "C" fn()>,
}

/// `struct ggml_backend_event`.
#[repr(C)]
pub(crate) struct Event {
    pub(crate) device: *mut Device,
    pub(crate) context: *mut c_void,
}

/// `struct ggml_backend_device`.
#[repr(C)]
pub(crate) struct Device {
    pub(crate) iface: DeviceTable,
    pub(crate) registry: *mut Registry,
    pub(crate) context: *mut c_void,
}

/// `struct ggml_backend_device_i`. `None` for an optional callback that does not exist.
#[repr(C)]
pub(crate) struct DeviceTable {
    pub(crate) get_name: unsafe extern "C" fn(*mut Device) -> *const c_char,
    pub(crate) get_description: unsafe extern "C" fn(*mut Device) -> *const c_char,
    pub(crate) get_memory: unsafe extern "C" fn(*mut Device, *mut usize, *mut usize),
    pub(crate) get_type: unsafe extern "C" fn(*mut Device) -> c_int,
    pub(crate) get_props: unsafe extern "C" fn(*mut Device, *mut DeviceProps),
    pub(crate) init_backend: unsafe extern "C" fn(*mut Device, *const c_char) -> *mut Backend,
    pub(crate) get_buffer_type: unsafe extern "C" fn(*mut Device) -> *mut BufferType,
    pub(crate) get_host_buffer_type: Option<unsafe extern "C" fn(*mut Device) -> *mut BufferType>,
    pub(crate) buffer_from_host_ptr:
        Option<unsafe extern "C" fn(*mut Device, *mut c_void, usize, usize) -> *mut Buffer>,
    pub(crate) supports_op: unsafe extern "C" fn(*mut Device, *const Tensor) -> bool,
    pub(crate) supports_buffer_type: unsafe extern "C" fn(*mut Device, *mut BufferType) -> bool,
    pub(crate) offload_op: unsafe extern "C" fn(*mut Device, *const Tensor) -> bool,
    pub(crate) event_new: unsafe extern "C" fn(*mut Device) -> *mut Event,
    pub(crate) event_free: unsafe extern "C" fn(*mut Device, *mut Event),
    pub(crate) event_synchronize: unsafe extern "C" fn(*mut Device, *mut Event),
}

/// `struct ggml_backend_dev_props`.
#[repr(C)]
pub(crate) struct DeviceProps {
    pub(crate) name: *const c_char,
    pub(crate) description: *const c_char,
    pub(crate) memory_free: usize,
    pub(crate) memory_total: usize,
    pub(crate) device_type: c_int,
    pub(crate) device_id: *const c_char,
    pub(crate) caps: DeviceCaps,
}

/// `struct ggml_backend_dev_caps`.
#[repr(C)]
pub(crate) struct DeviceCaps {
    pub(crate) asynchronous: bool,
    pub(crate) host_buffer: bool,
    pub(crate) buffer_from_host_ptr: bool,
    pub(crate) events: bool,
    pub(crate) mmap_support: bool,
}

/// `struct ggml_backend_reg`.
#[repr(C)]
pub struct Registry {
    pub(crate) api_version: c_int,
    pub(crate) iface: RegistryTable,
    pub(crate) context: *mut c_void,
}

/// `struct ggml_backend_reg_i`.
#[repr(C)]
pub(crate) struct RegistryTable {
    pub(crate) get_name: unsafe extern "C" fn(*mut Registry) -> *const c_char,
    pub(crate) get_device_count: unsafe extern "C" fn(*mut Registry) -> usize,
    pub(crate) get_device: unsafe extern "C" fn(*mut Registry, usize) -> *mut Device,
    pub(crate) get_proc_address: unsafe extern "C" fn(*mut Registry, *const c_char) -> *mut c_void,
}
