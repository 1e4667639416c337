//! Version 2 of the interface (ggml 0.13 to 0.25).

use super::tables::{BufferCallbacks, BufferTypeCallbacks, InitTensor};
use super::{Buffer, BufferType, Tensor};
use std::ffi::{c_char, c_void};

/// The number that [`super::Registry::api_version`] has.
pub(crate) const VERSION: i32 = 2;

/// `struct ggml_backend_buffer_type_i`.
#[repr(C)]
pub(crate) struct BufferTypeTable {
    pub(super) get_name: unsafe extern "C" fn(*mut BufferType) -> *const c_char,
    pub(super) alloc_buffer: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer,
    pub(super) get_alignment: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub(super) get_max_size: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub(super) get_alloc_size: unsafe extern "C" fn(*mut BufferType, *const Tensor) -> usize,
    pub(super) is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
}

impl From<BufferTypeCallbacks> for BufferTypeTable {
    fn from(callbacks: BufferTypeCallbacks) -> BufferTypeTable {
        let BufferTypeCallbacks { get_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size, is_host } =
            callbacks;
        BufferTypeTable { get_name, alloc_buffer, get_alignment, get_max_size, get_alloc_size, is_host }
    }
}

/// `struct ggml_backend_buffer_i`.
#[repr(C)]
pub(crate) struct BufferTable {
    pub(super) free_buffer: unsafe extern "C" fn(*mut Buffer),
    pub(super) get_base: unsafe extern "C" fn(*mut Buffer) -> *mut c_void,
    pub(super) init_tensor: Option<InitTensor>,
    pub(super) memset_tensor: unsafe extern "C" fn(*mut Buffer, *mut Tensor, u8, usize, usize),
    pub(super) set_tensor: unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize),
    pub(super) get_tensor: unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize),
    pub(super) set_tensor_2d:
        unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize, usize, usize, usize),
    pub(super) get_tensor_2d:
        unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize, usize, usize, usize),
    pub(super) copy_tensor: unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut Tensor) -> bool,
    pub(super) clear: unsafe extern "C" fn(*mut Buffer, u8),
    pub(super) reset: Option<unsafe extern "C" fn(*mut Buffer)>,
}

impl From<BufferCallbacks> for BufferTable {
    fn from(callbacks: BufferCallbacks) -> BufferTable {
        BufferTable {
            free_buffer: callbacks.free_buffer,
            get_base: callbacks.get_base,
            init_tensor: None,
            memset_tensor: callbacks.memset_tensor,
            set_tensor: callbacks.set_tensor,
            get_tensor: callbacks.get_tensor,
            set_tensor_2d: callbacks.set_tensor_2d,
            get_tensor_2d: callbacks.get_tensor_2d,
            copy_tensor: callbacks.copy_tensor,
            clear: callbacks.clear,
            reset: None,
        }
    }
}
