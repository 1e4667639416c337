//! Buffers: memory of a device, and the host's accesses to it. Accesses are synchronous for the host, so a device orders them by
//! one queue; streams wait for its last transfer.

use crate::abi::tables::BufferCallbacks;
use crate::abi::{Buffer, Tensor, USAGE_WEIGHTS};
use crate::device::Device;
use crate::guard::{guarded, lock};
use crate::host;
use crate::outputs::Outputs;
use crate::reservation::AddressRange;
use crate::support;
use fanout::device::{CopyOutcome, DeviceError, Region, TimelinePoint, UploadSource};
use fanout::tensor::TensorDesc;
use std::ffi::c_void;
use std::sync::{Mutex, OnceLock};

/// What a read of memory delivers that has failed, in each byte: NaN in every float type, and -1 in integers.
const FAILED_BYTE: u8 = 0xff;

/// A buffer of the plug-in.
pub(crate) struct BufferState {
    pub(crate) device: &'static Device,
    pub(crate) memory: Region,
    /// Addresses that the host uses for the memory. Nothing is mapped there.
    addresses: AddressRange,
    /// Copies of outputs of the last run.
    pub(crate) outputs: Mutex<Outputs>,
    /// The first failed write. The host is not told of it, so graphs that use the buffer fail from then on.
    broken: OnceLock<String>,
}

impl BufferState {
    /// Allocates zeroed memory.
    pub(crate) fn allocate(device: &'static Device, size: usize) -> Result<BufferState, DeviceError> {
        let addresses = AddressRange::reserve(size)
            .map_err(|e| DeviceError::Exhausted { resource: "addresses", reason: e.to_string() })?;
        let memory = device.fanout.alloc(size as u64, &device.budget)?.whole();
        Ok(BufferState { device, memory, addresses, outputs: Mutex::default(), broken: OnceLock::new() })
    }

    /// The buffer of an object of the host's; `None` for buffers of others.
    ///
    /// # Safety
    /// `buffer` is null or a buffer of the host that is not freed while the result is used.
    pub(crate) unsafe fn of_any<'a>(buffer: *mut Buffer) -> Option<&'a BufferState> {
        if buffer.is_null() {
            return None;
        }
        // SAFETY: the caller passes a valid buffer.
        let fields = unsafe { host::get().buffer_fields(buffer) };
        crate::registry::is_own(fields.buffer_type).then(|| {
            // SAFETY: the context of buffers of the plug-in's types is their state.
            unsafe { &*fields.context.cast::<BufferState>() }
        })
    }

    /// # Safety
    /// `buffer` is a buffer of the plug-in that is not freed while the result is used.
    unsafe fn of<'a>(buffer: *mut Buffer) -> &'a BufferState {
        // SAFETY: the context of the plug-in's buffers is their state.
        unsafe { &*host::get().buffer_fields(buffer).context.cast() }
    }

    /// Bytes from the start of the memory to `offset` bytes into a tensor.
    pub(crate) fn position(&self, tensor: &Tensor, offset: usize) -> u64 {
        (tensor.data as usize).wrapping_sub(self.addresses.start()).wrapping_add(offset) as u64
    }

    /// The region of `bytes` bytes from byte `offset` of a tensor.
    pub(crate) fn region(&self, tensor: &Tensor, offset: usize, bytes: usize) -> Result<Region, DeviceError> {
        self.memory.subregion(self.position(tensor, offset), bytes as u64)
    }

    /// Before memory changes: forgets copies of outputs.
    pub(crate) fn changes(&self) {
        lock(&self.outputs).clear();
    }

    /// Why the memory is not what the host wrote, if so.
    pub(crate) fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    fn fail_read(&self, what: &str, error: &DeviceError) {
        self.device.close_transfers();
        self.device.failures.log(format!("{}: {what}: {error}", self.device.label()));
    }

    fn fail_write(&self, what: &str, error: &DeviceError) {
        let reason = format!("{}: {what}: {error}", self.device.label());
        _ = self.broken.set(format!("{reason}; the model must be loaded again"));
        self.device.failures.log(reason);
    }
}

/// The host's object for a buffer; null if the host has no memory.
pub(crate) fn into_host(state: BufferState) -> *mut Buffer {
    let (buffer_type, size) = (state.device.buffer_type(), state.memory.bytes() as usize);
    let context = Box::into_raw(Box::new(state));
    // SAFETY: the buffer type is the device's, and the context is what the callbacks below expect.
    let buffer = unsafe { host::get().new_buffer(buffer_type, CALLBACKS, context.cast(), size) };
    if buffer.is_null() {
        // SAFETY: the context was made above, and nothing else has it.
        drop(unsafe { Box::from_raw(context) });
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

unsafe extern "C" fn free_buffer(buffer: *mut Buffer) {
    // SAFETY: the host frees a buffer of the plug-in once.
    let state = unsafe { Box::from_raw(host::get().buffer_fields(buffer).context.cast::<BufferState>()) };
    guarded((), || {
        lock(&state.device.programs).forget_buffer(buffer);
        drop(state);
    });
}

unsafe extern "C" fn get_base(buffer: *mut Buffer) -> *mut c_void {
    // SAFETY: the host passes a buffer of the plug-in.
    unsafe { BufferState::of(buffer) }.addresses.start() as *mut c_void
}

unsafe extern "C" fn memset_tensor(buffer: *mut Buffer, tensor: *mut Tensor, value: u8, offset: usize, size: usize) {
    // SAFETY: the host passes a buffer of the plug-in and a tensor in it.
    let (state, tensor) = unsafe { (BufferState::of(buffer), &*tensor) };
    guarded((), || fill(state, state.region(tensor, offset, size), value));
}

unsafe extern "C" fn clear(buffer: *mut Buffer, value: u8) {
    // SAFETY: the host passes a buffer of the plug-in.
    let state = unsafe { BufferState::of(buffer) };
    guarded((), || fill(state, Ok(state.memory.clone()), value));
}

fn fill(state: &BufferState, region: Result<Region, DeviceError>, value: u8) {
    state.changes();
    let filled = region.and_then(|region| state.device.transfer(|queue| queue.fill(region, value)));
    if let Err(error) = filled {
        state.fail_write("filling memory", &error);
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

unsafe extern "C" fn set_tensor_2d(
    buffer: *mut Buffer,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
    rows: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    guarded((), || {
        // SAFETY: the host passes a buffer of the plug-in and a tensor in it.
        let (state, weights, tensor) = unsafe {
            let usage = host::get().buffer_fields(buffer).usage;
            (BufferState::of(buffer), usage == USAGE_WEIGHTS, &*tensor)
        };
        for row in 0..rows {
            // SAFETY: the host passes `rows` rows of `size` bytes, `stride_data` bytes apart.
            let bytes = unsafe { std::slice::from_raw_parts(data.byte_add(row * stride_data).cast::<u8>(), size) };
            let whole = weights && offset == 0 && rows == 1;
            if let Err(error) = write(state, tensor, offset + row * stride_tensor, bytes, whole) {
                state.fail_write("writing a tensor", &error);
                return;
            }
        }
    });
}

/// Writes bytes of a tensor; `whole` if they may be all bytes of a weight, which the device may then repack.
fn write(state: &BufferState, tensor: &Tensor, offset: usize, bytes: &[u8], whole: bool) -> Result<(), DeviceError> {
    if bytes.is_empty() {
        return Ok(());
    }
    state.changes();
    let desc: Option<TensorDesc> =
        whole.then(|| support::describe(tensor)).flatten().filter(|desc| desc.extent() == bytes.len());
    let region = state.region(tensor, offset, bytes.len())?;
    state.device.transfer(|queue| queue.upload(region, desc.as_ref(), UploadSource::Borrowed(bytes)))
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
    guarded((), || {
        // SAFETY: the host passes a buffer of the plug-in and a tensor in it.
        let (state, tensor) = unsafe { (BufferState::of(buffer), &*tensor) };
        let reads = (0..rows).map(|row| {
            // SAFETY: the host passes a place for `rows` rows of `size` bytes, `stride_data` bytes apart.
            let bytes = unsafe { std::slice::from_raw_parts_mut(data.byte_add(row * stride_data).cast::<u8>(), size) };
            (state.position(tensor, offset + row * stride_tensor), bytes)
        });
        read(state, reads.collect());
    });
}

/// Reads memory: from copies of outputs, else from the device. Failed reads deliver [`FAILED_BYTE`].
fn read(state: &BufferState, mut reads: Vec<(u64, &mut [u8])>) {
    reads.retain_mut(|(position, bytes)| !bytes.is_empty() && !lock(&state.outputs).read(*position, bytes));
    if reads.is_empty() {
        return;
    }
    let download = || {
        let regions = reads
            .iter()
            .map(|(position, bytes)| state.memory.subregion(*position, bytes.len() as u64))
            .collect::<Result<Vec<_>, _>>()?;
        let pending = state.device.transfer(|queue| queue.download_all(&regions))?;
        pending.into_iter().map(|read| read.wait(None)).collect::<Result<Vec<_>, _>>()
    };
    match download() {
        Ok(results) => reads.iter_mut().zip(results).for_each(|((_, bytes), result)| bytes.copy_from_slice(&result)),
        Err(error) => {
            state.fail_read("reading a tensor", &error);
            reads.iter_mut().for_each(|(_, bytes)| mark_failed(bytes));
        }
    }
}

/// Fills memory of the host whose read has failed.
pub(crate) fn mark_failed(bytes: &mut [u8]) {
    bytes.fill(FAILED_BYTE);
}

unsafe extern "C" fn copy_tensor(buffer: *mut Buffer, src: *const Tensor, dst: *mut Tensor) -> bool {
    guarded(false, || {
        // SAFETY: the host passes a buffer of the plug-in, a tensor of any buffer, and a tensor in the plug-in's buffer.
        let (state, src, dst) = unsafe { (BufferState::of(buffer), &*src, &*dst) };
        // SAFETY: the host keeps the source's buffer during the call.
        let Some(from) = (unsafe { BufferState::of_any(src.buffer) }) else { return false };
        state.changes();
        let copied = copy_between(from, src, state, dst).and_then(|copied| match copied {
            None => Ok(false),
            // The host may change the source as soon as the call returns.
            Some(done) => done.wait(None).map(|()| true),
        });
        copied.unwrap_or_else(|error| {
            state.fail_read("copying a tensor", &error);
            // The host then copies through its memory, where a failure is seen once more.
            false
        })
    })
}

/// Copies a tensor between two buffers of the plug-in on the queues of transfers. Returns the point after the copy; `None` if
/// the devices cannot copy directly.
fn copy_between(
    from: &BufferState,
    src: &Tensor,
    to: &BufferState,
    dst: &Tensor,
) -> Result<Option<TimelinePoint>, DeviceError> {
    let (from_region, to_region, after) = copy_regions(from, src, to, dst)?;
    to.device.transfer(|queue| match queue.copy_from(from_region, to_region, after.as_ref())? {
        CopyOutcome::Submitted => Ok(Some(queue.mark())),
        CopyOutcome::Unreachable => Ok(None),
    })
}

/// The regions of a copy, and the last transfer of the source's device, which the copy waits for.
pub(crate) fn copy_regions(
    from: &BufferState,
    src: &Tensor,
    to: &BufferState,
    dst: &Tensor,
) -> Result<(Region, Region, Option<TimelinePoint>), DeviceError> {
    // SAFETY: both are tensors of the host.
    let bytes = unsafe { host::get().tensor_bytes(src).min(host::get().tensor_bytes(dst)) };
    Ok((from.region(src, 0, bytes)?, to.region(dst, 0, bytes)?, from.device.last_transfer()))
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
    // SAFETY: the caller passes a valid tensor, and ggml sets `view_src` to a tensor or null.
    unsafe {
        let owner = if (*tensor).view_src.is_null() { tensor } else { (*tensor).view_src.cast_const() };
        if (*owner).buffer.is_null() { buffer } else { (*owner).buffer }
    }
}
