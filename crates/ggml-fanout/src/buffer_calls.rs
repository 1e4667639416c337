//! The host's calls of buffers. They are synchronous for the host.

use crate::abi::tables::BufferCallbacks;
use crate::abi::{self, Buffer, Tensor};
use crate::buffer::{
    BufferState, before_copy_to, copy_lost, copy_regions, lost_parts, mark_failed, submit_copy, write,
};
use crate::device::Ticket;
use crate::guard::{guarded, is_forked, lock};
use crate::host;
use crate::support;
use crate::uploads::Upload;
use fanout::device::{DeviceError, Queue, TimelinePoint, UploadSource};
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

/// The host's object for a buffer; null if the host has no memory.
pub(crate) fn into_host(state: Arc<BufferState>) -> *mut Buffer {
    let (buffer_type, size) = (state.device.buffer_type(), state.bytes() as usize);
    let context = Arc::into_raw(state).cast_mut();
    // SAFETY: the buffer type is the device's, and the context is what the callbacks below expect.
    let buffer = unsafe { host::get().new_buffer(buffer_type, CALLBACKS, context.cast(), size) };
    if buffer.is_null() {
        // SAFETY: the context was made above, and nothing else has it.
        drop(unsafe { Arc::from_raw(context) });
    }
    buffer
}

const CALLBACKS: BufferCallbacks = BufferCallbacks {
    free_buffer,
    get_base,
    memset_tensor,
    set_tensor,
    get_tensor,
    set_tensor_2d,
    get_tensor_2d,
    copy_tensor,
    clear,
    set_tensors,
    get_tensors,
    copy_tensors,
};

pub(crate) unsafe extern "C" fn free_buffer(buffer: *mut Buffer) {
    guarded((), || {
        // SAFETY: the host frees a buffer of the plug-in once.
        let state = unsafe { Arc::from_raw(host::get().buffer_fields(buffer).context.cast::<BufferState>()) };
        lock(&state.device.programs).forget_buffer(buffer);
        drop(state);
    });
}

/// The buffer of a callback.
///
/// # Safety
/// `buffer` is a buffer of the plug-in that is not freed while the result is used. Empty ones have no callbacks.
unsafe fn state_of<'a>(buffer: *mut Buffer) -> &'a BufferState {
    // SAFETY: the context of the plug-in's buffers is their state.
    unsafe { BufferState::of_fields(host::get().buffer_fields(buffer)).unwrap_unchecked() }
}

unsafe extern "C" fn get_base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: the host passes a buffer of the plug-in.
    unsafe { state_of(buffer) }.base() as *mut c_void
}

unsafe extern "C" fn memset_tensor(buffer: *mut Buffer, tensor: *mut Tensor, value: u8, offset: usize, size: usize) {
    // SAFETY: the host passes a buffer of the plug-in and a tensor in it.
    let (state, tensor) = unsafe { (state_of(buffer), &*tensor) };
    guarded((), || {
        let start = state.position(tensor, offset);
        fill(state, start..start + size as u64, value);
    });
}

unsafe extern "C" fn clear(buffer: *mut Buffer, value: u8) {
    // SAFETY: the host passes a buffer of the plug-in.
    let state = unsafe { state_of(buffer) };
    guarded((), || fill(state, 0..state.bytes(), value));
}

fn fill(state: &BufferState, range: Range<u64>, value: u8) {
    state.changes();
    state.forget(&range);
    let epoch = state.epoch();
    let region = state.memory().subregion(range.start, range.end - range.start);
    match region.and_then(|region| state.submit(|queue| queue.fill(region, value))) {
        Ok(_) => state.mark_valid(epoch, range),
        Err(error) => state.fail_write("filling memory", range, &error),
    }
}

unsafe extern "C" fn set_tensor(
    buffer: *mut Buffer,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as for several rows.
    unsafe { set_tensor_2d(buffer, tensor, data, offset, size, 1, size, size) };
}

pub(crate) unsafe extern "C" fn set_tensor_2d(
    buffer: *mut Buffer,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
    rows: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    if size == 0 {
        return;
    }
    guarded((), || {
        // SAFETY: the host passes a buffer of the plug-in and a tensor in it.
        let state = unsafe { state_of(buffer) };
        // SAFETY: as above.
        let name = || unsafe { abi::name_of(tensor) };
        // SAFETY: as above.
        let tensor = unsafe { &*tensor };
        // SAFETY: the host passes such rows.
        for (row, bytes) in unsafe { abi::rows(data, size, rows, stride_data) }.enumerate() {
            let start = state.position(tensor, offset + row * stride_tensor);
            let range = start..start + size as u64;
            let written = match state.holds_weights() {
                true => write_weight(state, tensor, name(), range.clone(), bytes),
                false => write(state, tensor, range.clone(), bytes),
            };
            if let Err(error) = written {
                state.fail_write("writing a tensor", range, &error);
            }
        }
    });
}

/// Writes bytes of a weight. The weights of a server are loaded from its disk if they are there, and remembered.
fn write_weight(
    state: &BufferState,
    tensor: &Tensor,
    name: String,
    range: Range<u64>,
    bytes: &[u8],
) -> Result<(), DeviceError> {
    state.changes();
    // All of a tensor may be repacked by the device.
    let starts = state.position(tensor, 0) == range.start;
    let desc = support::describe(tensor).filter(|desc| starts && desc.extent() == bytes.len());
    let region = || state.memory().subregion(range.start, bytes.len() as u64);
    if !state.device.is_remote() {
        let region = region()?;
        let upload = |queue: &mut dyn Queue| queue.upload(region, desc.as_ref(), UploadSource::Borrowed(bytes));
        return state.submit(upload).map(|_| ());
    }
    let weight = Upload::new(bytes, desc, name);
    let epoch = state.epoch();
    state.remember(range.start, weight.clone());
    state.submit(|queue| {
        let region = region()?;
        if state.device.disk.has(queue, &region, &weight)? {
            return Ok(());
        }
        queue.upload(region, weight.whole.as_ref(), UploadSource::Borrowed(bytes))
    })?;
    state.mark_valid(epoch, range);
    Ok(())
}

unsafe extern "C" fn get_tensor(
    buffer: *mut Buffer,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as for several rows.
    unsafe { get_tensor_2d(buffer, tensor, data, offset, size, 1, size, size) };
}

unsafe extern "C" fn get_tensor_2d(
    buffer: *mut Buffer,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
    rows: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    if size == 0 {
        return;
    }
    if is_forked() {
        // SAFETY: the host passes a place for such rows.
        return unsafe { abi::rows_mut(data, size, rows, stride_data) }.for_each(mark_failed);
    }
    guarded((), || {
        // SAFETY: the host passes a buffer of the plug-in and a tensor in it.
        let (state, tensor) = unsafe { (state_of(buffer), &*tensor) };
        // SAFETY: the host passes a place for such rows.
        let rows = unsafe { abi::rows_mut(data, size, rows, stride_data) }.enumerate();
        let reads = rows.map(|(row, bytes)| (state.position(tensor, offset + row * stride_tensor), bytes));
        read(state, reads.collect());
    });
}

/// Reads memory: from copies of outputs, else from the device. Failed reads and lost bytes deliver [`FAILED_BYTE`].
fn read(state: &BufferState, mut reads: Vec<(u64, &mut [u8])>) {
    reads.retain_mut(|(position, bytes)| !lock(&state.outputs).read(*position, bytes));
    if reads.is_empty() {
        return;
    }
    state.note_host_read();
    let download = || {
        let memory = state.memory();
        let regions = reads
            .iter()
            .map(|(position, bytes)| memory.subregion(*position, bytes.len() as u64))
            .collect::<Result<Vec<_>, _>>()?;
        let (pending, ticket) = state.device.submit(|queue| queue.download_all(&regions))?;
        let results: Result<Vec<_>, _> = pending.into_iter().map(|read| read.wait(None)).collect();
        state.device.waited(ticket, results)
    };
    match download() {
        Ok(results) => {
            for ((position, bytes), result) in reads.iter_mut().zip(results) {
                bytes.copy_from_slice(&result);
                lost_parts(state, *position, bytes.len()).into_iter().for_each(|part| mark_failed(&mut bytes[part]));
            }
        }
        Err(error) => {
            state.fail_read("reading a tensor", &error);
            reads.iter_mut().for_each(|(_, bytes)| mark_failed(bytes));
        }
    }
}

unsafe extern "C" fn copy_tensor(buffer: *mut Buffer, src: *const Tensor, dst: *mut Tensor) -> bool {
    guarded(false, || {
        // SAFETY: the host passes a buffer of the plug-in, a tensor of any buffer, and a tensor in the plug-in's buffer.
        let (state, src, dst) = unsafe { (state_of(buffer), &*src, &*dst) };
        // SAFETY: the host keeps the source's buffer during the call.
        let Some(from) = (unsafe { BufferState::of_any(src.owner()) }) else { return false };
        before_copy_to(state, dst);
        let epoch = state.epoch();
        let copied = copy_between(from, src, state, dst).and_then(|(copied, ticket)| match copied {
            None => Ok(false),
            // The host may change the source as soon as the call returns.
            Some(done) => state.device.waited(ticket, done.wait(None)).map(|()| {
                copy_lost(from, src, state, dst, epoch);
                true
            }),
        });
        copied.unwrap_or_else(|error| {
            state.fail_read("copying a tensor", &error);
            // The host then copies through its memory, where a failure is seen once more.
            false
        })
    })
}

/// Copies a tensor between two buffers of the plug-in. Returns the point after the copy; `None` if the devices cannot copy directly.
pub(crate) fn copy_between(
    from: &BufferState,
    src: &Tensor,
    to: &BufferState,
    dst: &Tensor,
) -> Result<(Option<TimelinePoint>, Ticket), DeviceError> {
    let regions = copy_regions(from, src, to, dst)?;
    let after = from.device.mark().map(|(point, _)| point);
    to.submit(|queue| submit_copy(queue, regions, after.as_ref()))
}

unsafe extern "C" fn set_tensors(
    buffer: *mut Buffer,
    tensors: *const *mut Tensor,
    data: *const *const c_void,
    offsets: *const usize,
    sizes: *const usize,
    count: usize,
) {
    for at in 0..count {
        // SAFETY: the host passes `count` elements in each list. A tensor may be in another buffer of the same type.
        unsafe {
            let tensor = *tensors.add(at);
            set_tensor(buffer_of(buffer, tensor), tensor, *data.add(at), *offsets.add(at), *sizes.add(at));
        }
    }
}

unsafe extern "C" fn get_tensors(
    buffer: *mut Buffer,
    tensors: *const *const Tensor,
    data: *const *mut c_void,
    offsets: *const usize,
    sizes: *const usize,
    count: usize,
) {
    for at in 0..count {
        // SAFETY: as for `set_tensors`.
        unsafe {
            let tensor = *tensors.add(at);
            get_tensor(buffer_of(buffer, tensor), tensor, *data.add(at), *offsets.add(at), *sizes.add(at));
        }
    }
}

unsafe extern "C" fn copy_tensors(
    buffer: *mut Buffer,
    srcs: *const *const Tensor,
    dsts: *const *mut Tensor,
    count: usize,
) -> bool {
    // The interface forbids a part of the copies. A direct copy between two devices is possible for all tensors or for none,
    // so one by one the host copies as well.
    if count != 1 {
        return false;
    }
    // SAFETY: the host passes one element in each list.
    unsafe { copy_tensor(buffer_of(buffer, *dsts), *srcs, *dsts) }
}

/// The buffer of a tensor of a batch, which `buffer` is for the first one.
///
/// # Safety
/// `tensor` is a tensor of the host.
unsafe fn buffer_of(buffer: *mut Buffer, tensor: *const Tensor) -> *mut Buffer {
    // SAFETY: the caller passes a valid tensor.
    let owner = unsafe { (*tensor).owner() };
    if owner.is_null() { buffer } else { owner }
}
