//! Version 3 of the interface: buffers are allocated for lists of tensors, and from some version between ggml 0.26 and 0.28 on, take
//! lists of them.

use super::tables::{BufferCallbacks, BufferTypeCallbacks, CopyTensors, GetTensors, SetTensors};
use super::v2;
use super::{Buffer, BufferType, Tensor};
use std::ffi::{c_char, c_int};

/// The number that [`super::Registry::api_version`] has.
pub(crate) const VERSION: i32 = 3;

/// `struct ggml_backend_buffer_type_i`.
#[repr(C)]
pub(crate) struct BufferTypeTable {
    pub(super) get_name: unsafe extern "C" fn(*mut BufferType) -> *const c_char,
    pub(super) alloc_buffer: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer,
    pub(super) alloc_buffer_for: Option<unsafe extern "C" fn(*mut BufferType, *mut *mut Tensor, c_int) -> *mut Buffer>,
    pub(super) get_alignment: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub(super) get_max_size: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub(super) get_alloc_size: unsafe extern "C" fn(*mut BufferType, *const Tensor) -> usize,
    pub(super) get_alloc_size_of: Option<unsafe extern "C" fn(*mut BufferType, *mut *mut Tensor, c_int) -> usize>,
    pub(super) is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
}

impl From<BufferTypeCallbacks> for BufferTypeTable {
    fn from(callbacks: BufferTypeCallbacks) -> BufferTypeTable {
        let BufferTypeCallbacks { get_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size, is_host } =
            callbacks;
        let (alloc_buffer_for, get_alloc_size_of) = (None, None);
        BufferTypeTable {
            get_name,
            alloc_buffer,
            alloc_buffer_for,
            get_alignment,
            get_max_size,
            get_alloc_size,
            get_alloc_size_of,
            is_host,
        }
    }
}

/// `struct ggml_backend_buffer_i`: that of version 2, and three callbacks more.
#[repr(C)]
pub(crate) struct BufferTable {
    pub(super) version_2: v2::BufferTable,
    pub(super) set_tensors: SetTensors,
    pub(super) get_tensors: GetTensors,
    pub(super) copy_tensors: CopyTensors,
}

impl From<BufferCallbacks> for BufferTable {
    fn from(callbacks: BufferCallbacks) -> BufferTable {
        BufferTable {
            version_2: callbacks.into(),
            set_tensors: callbacks.set_tensors,
            get_tensors: callbacks.get_tensors,
            copy_tensors: callbacks.copy_tensors,
        }
    }
}
