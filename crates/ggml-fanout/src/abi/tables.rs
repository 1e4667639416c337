//! Callbacks of buffers and buffer types, whatever the interface's version: [`super::v2`] and [`super::v3`] lay them out.

use super::{Buffer, BufferType, Status, Tensor};
use std::ffi::{c_char, c_void};

/// Callbacks of a buffer type.
#[derive(Clone, Copy)]
pub(crate) struct BufferTypeCallbacks {
    pub(crate) get_name: unsafe extern "C" fn(*mut BufferType) -> *const c_char,
    pub(crate) alloc_buffer: unsafe extern "C" fn(*mut BufferType, usize) -> *mut Buffer,
    pub(crate) get_alignment: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub(crate) get_max_size: unsafe extern "C" fn(*mut BufferType) -> usize,
    pub(crate) get_alloc_size: unsafe extern "C" fn(*mut BufferType, *const Tensor) -> usize,
    pub(crate) is_host: unsafe extern "C" fn(*mut BufferType) -> bool,
}

/// Callbacks of a buffer. The batched ones exist since version 3.
#[derive(Clone, Copy)]
pub(crate) struct BufferCallbacks {
    pub(crate) free_buffer: unsafe extern "C" fn(*mut Buffer),
    pub(crate) get_base: unsafe extern "C" fn(*mut Buffer) -> *mut c_void,
    pub(crate) memset_tensor: unsafe extern "C" fn(*mut Buffer, *mut Tensor, u8, usize, usize),
    pub(crate) set_tensor: unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize),
    pub(crate) get_tensor: unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize),
    pub(crate) set_tensor_2d:
        unsafe extern "C" fn(*mut Buffer, *mut Tensor, *const c_void, usize, usize, usize, usize, usize),
    pub(crate) get_tensor_2d:
        unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut c_void, usize, usize, usize, usize, usize),
    pub(crate) copy_tensor: unsafe extern "C" fn(*mut Buffer, *const Tensor, *mut Tensor) -> bool,
    pub(crate) clear: unsafe extern "C" fn(*mut Buffer, u8),
    pub(crate) set_tensors: SetTensors,
    pub(crate) get_tensors: GetTensors,
    pub(crate) copy_tensors: CopyTensors,
}

pub(crate) type InitTensor = unsafe extern "C" fn(*mut Buffer, *mut Tensor) -> Status;
pub(crate) type SetTensors =
    unsafe extern "C" fn(*mut Buffer, *const *mut Tensor, *const *const c_void, *const usize, *const usize, usize);
pub(crate) type GetTensors =
    unsafe extern "C" fn(*mut Buffer, *const *const Tensor, *const *mut c_void, *const usize, *const usize, usize);
pub(crate) type CopyTensors =
    unsafe extern "C" fn(*mut Buffer, *const *const Tensor, *const *mut Tensor, usize) -> bool;
