//! Buffers: memory of a device, and the host's accesses to it. Accesses are synchronous for the host, so a device orders them by
//! one queue; streams wait for its last transfer.

use crate::abi::{Buffer, BufferTail, Tensor, USAGE_COMPUTE, USAGE_WEIGHTS};
use crate::device::Device;
use crate::guard::lock;
use crate::host;
use crate::lost_ranges::LostRanges;
use crate::outputs::Outputs;
use crate::reservation::AddressRange;
use crate::server::RestoredBuffer;
use crate::weights::{Weight, Weights};
use fanout::device::{DeviceError, Region, TimelinePoint};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

/// What a read of memory delivers that has failed or was lost, in each byte: NaN in every float type, and -1 in integers. A run of
/// [`LOST_RUN`] such bytes that the host writes back, such as a saved state of a sequence, is lost again.
const FAILED_BYTE: u8 = 0xff;

/// The shortest run of [`FAILED_BYTE`] that counts as lost, in bytes. No valid cache has so many NaNs.
const LOST_RUN: usize = 16;

/// Whether any memory was lost in this process, or any read failed. Until then no write is searched for lost bytes.
static ANY_LOST: AtomicBool = AtomicBool::new(false);

/// A buffer of the plug-in.
pub(crate) struct BufferState {
    pub(crate) device: &'static Device,
    bytes: u64,
    memory: RwLock<Region>,
    /// Addresses that the host uses for the memory. Nothing is mapped there.
    addresses: AddressRange,
    /// `enum ggml_backend_buffer_usage`, when it was last seen.
    usage: AtomicI32,
    /// Copies of outputs of the last run.
    pub(crate) outputs: Mutex<Outputs>,
    /// Of a device of a server: the weights, for loading them again.
    weights: Mutex<Weights>,
    lost: Mutex<Lost>,
    /// The first write that the device refused, or a weight that is gone. The host is not told of it, so graphs that use the
    /// buffer fail from then on.
    broken: OnceLock<String>,
}

/// What was lost with a server.
#[derive(Default)]
struct Lost {
    ranges: LostRanges,
    /// Graphs that have run since then, by an address that identifies them.
    ran: HashSet<usize>,
}

impl BufferState {
    /// Allocates zeroed memory.
    pub(crate) fn allocate(device: &'static Device, size: usize) -> Result<Arc<BufferState>, DeviceError> {
        let addresses = AddressRange::reserve(size)
            .map_err(|e| DeviceError::Exhausted { resource: "addresses", reason: e.to_string() })?;
        let (fanout, generation) = device.fanout()?;
        let memory = fanout.alloc(size as u64, &device.budget).inspect_err(|e| device.notice(generation, e))?.whole();
        let state = Arc::new(BufferState {
            device,
            bytes: size as u64,
            memory: RwLock::new(memory),
            addresses,
            usage: AtomicI32::default(),
            outputs: Mutex::default(),
            weights: Mutex::default(),
            lost: Mutex::default(),
            broken: OnceLock::new(),
        });
        device.add_buffer(&state);
        Ok(state)
    }

    /// The buffer of an object of the host's; `None` for buffers of others, and for empty ones, which have no memory.
    ///
    /// # Safety
    /// `buffer` is null or a buffer of the host that is not freed while the result is used.
    pub(crate) unsafe fn of_any<'a>(buffer: *mut Buffer) -> Option<&'a BufferState> {
        if buffer.is_null() {
            return None;
        }
        // SAFETY: the caller passes a valid buffer.
        let fields = unsafe { host::get().buffer_fields(buffer) };
        if !crate::registry::is_own(fields.buffer_type) {
            return None;
        }
        // SAFETY: the buffer is of one of the plug-in's types.
        unsafe { BufferState::of_fields(fields) }
    }

    /// The buffer of an object's fields; `None` for an empty one.
    ///
    /// # Safety
    /// The object is of one of the plug-in's buffer types, and is not freed while the result is used.
    pub(crate) unsafe fn of_fields<'a>(fields: &BufferTail) -> Option<&'a BufferState> {
        // SAFETY: the context of buffers of the plug-in's types is their state, or null.
        let state = unsafe { fields.context.cast::<BufferState>().as_ref() }?;
        state.usage.store(fields.usage, Ordering::Relaxed);
        Some(state)
    }

    /// The address that the host uses for the first byte.
    pub(crate) fn base(&self) -> usize {
        self.addresses.start()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(crate) fn memory(&self) -> Region {
        self.memory.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Bytes from the start of the memory to `offset` bytes into a tensor.
    pub(crate) fn position(&self, tensor: &Tensor, offset: usize) -> u64 {
        (tensor.data as usize).wrapping_sub(self.addresses.start()).wrapping_add(offset) as u64
    }

    /// The region of `bytes` bytes from byte `offset` of a tensor.
    pub(crate) fn region(&self, tensor: &Tensor, offset: usize, bytes: usize) -> Result<Region, DeviceError> {
        self.memory().subregion(self.position(tensor, offset), bytes as u64)
    }

    /// Before memory changes: forgets copies of outputs.
    pub(crate) fn changes(&self) {
        lock(&self.outputs).clear();
    }

    /// Why the memory is not what the host wrote, if so.
    pub(crate) fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    pub(crate) fn holds_weights(&self) -> bool {
        self.usage.load(Ordering::Relaxed) == USAGE_WEIGHTS
    }

    /// Remembers an upload of weights.
    pub(crate) fn remember(&self, position: u64, weight: Weight) {
        lock(&self.weights).insert(position, weight);
    }

    /// The weights, for loading them again.
    pub(crate) fn weights(&self) -> Weights {
        lock(&self.weights).clone()
    }

    /// The server is back, with new memory.
    pub(crate) fn install(&self, restored: RestoredBuffer) {
        *self.memory.write().unwrap_or_else(PoisonError::into_inner) = restored.memory;
        self.changes();
        if let Some(reason) = restored.missing {
            _ = self.broken.set(format!("{reason}; the model must be loaded again"));
        }
        let has_weights = !lock(&self.weights).is_empty();
        if !has_weights {
            ANY_LOST.store(true, Ordering::Relaxed);
            *lock(&self.lost) = Lost { ranges: LostRanges::all(self.bytes), ran: HashSet::new() };
        }
    }

    pub(crate) fn has_lost(&self) -> bool {
        !lock(&self.lost).ranges.is_empty()
    }

    pub(crate) fn lost(&self) -> LostRanges {
        lock(&self.lost).ranges.clone()
    }

    /// A graph has run, after which `ranges` are lost. `graph` identifies it.
    ///
    /// The host writes the inputs of each run, and computed memory is not used beyond one run of its graphs. So once a graph has
    /// run twice, all computed memory is of runs after the loss, and what was never written is not used.
    pub(crate) fn set_lost(&self, ranges: LostRanges, graph: usize) {
        let mut lost = lock(&self.lost);
        lost.ranges = ranges;
        if !lost.ran.insert(graph) && self.usage.load(Ordering::Relaxed) == USAGE_COMPUTE {
            *lost = Lost::default();
        }
    }

    /// A range of the memory is written.
    pub(crate) fn is_written(&self, range: Range<u64>) {
        lock(&self.lost).ranges.remove(range);
    }

    /// A write of a range has failed, or what was written there was lost.
    pub(crate) fn is_lost(&self, range: Range<u64>) {
        ANY_LOST.store(true, Ordering::Relaxed);
        lock(&self.lost).ranges.insert(range);
    }

    pub(crate) fn fail_read(&self, what: &str, error: &DeviceError) {
        self.device.close_transfers(error);
        self.device.failures.log(self.device.describe_failure(what, error));
    }

    /// A write of a range has failed. What a lost server did not get counts as lost; its weights are loaded again.
    pub(crate) fn fail_write(&self, what: &str, range: Range<u64>, error: &DeviceError) {
        let reason = self.device.describe_failure(what, error);
        let lost_with_server = self.device.is_remote() && matches!(error, DeviceError::ConnectionLost { .. });
        match (lost_with_server, self.holds_weights()) {
            (true, true) => {}
            (true, false) => self.is_lost(range),
            (false, _) => _ = self.broken.set(format!("{reason}; the model must be loaded again")),
        }
        self.device.failures.log(reason);
    }
}

/// Writes bytes by `upload`. Bytes that were lost when the host read them are zeros, and lost again.
pub(crate) fn write(
    state: &BufferState,
    range: Range<u64>,
    bytes: &[u8],
    upload: impl FnOnce(Region, &[u8]) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    state.changes();
    let region = state.memory().subregion(range.start, bytes.len() as u64)?;
    if !ANY_LOST.load(Ordering::Relaxed) {
        return upload(region, bytes);
    }
    let lost = lost_runs(bytes);
    if lost.is_empty() {
        upload(region, bytes)?;
    } else {
        let mut zeroed = bytes.to_vec();
        lost.iter().for_each(|run| zeroed[run.clone()].fill(0));
        upload(region, &zeroed)?;
    }
    state.is_written(range.clone());
    lost.into_iter().for_each(|run| state.is_lost(range.start + run.start as u64..range.start + run.end as u64));
    Ok(())
}

/// Runs of bytes that a failed or lost read has delivered.
fn lost_runs(bytes: &[u8]) -> Vec<Range<usize>> {
    let mut runs = Vec::new();
    let mut start = 0;
    while let Some(first) = bytes[start..].iter().position(|&byte| byte == FAILED_BYTE) {
        let first = start + first;
        let len = bytes[first..].iter().take_while(|&&byte| byte == FAILED_BYTE).count();
        if len >= LOST_RUN || len == bytes.len() {
            runs.push(first..first + len);
        }
        start = first + len;
    }
    runs
}

/// Fills memory of the host whose read has failed.
pub(crate) fn mark_failed(bytes: &mut [u8]) {
    ANY_LOST.store(true, Ordering::Relaxed);
    bytes.fill(FAILED_BYTE);
}

/// Marks the lost parts of memory that was read from `position` on.
pub(crate) fn mark_lost(state: &BufferState, position: u64, bytes: &mut [u8]) {
    if !ANY_LOST.load(Ordering::Relaxed) {
        return;
    }
    let lost = lock(&state.lost);
    for part in lost.ranges.within(&(position..position + bytes.len() as u64)) {
        bytes[(part.start - position) as usize..(part.end - position) as usize].fill(FAILED_BYTE);
    }
}

/// After a copy between buffers: what was lost of the source is lost of the copy.
pub(crate) fn copy_lost(from: &BufferState, src: &Tensor, to: &BufferState, dst: &Tensor) {
    if !ANY_LOST.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: a tensor of the host.
    let bytes = unsafe { host::get().tensor_bytes(src) } as u64;
    let (source, target) = (from.position(src, 0), to.position(dst, 0));
    let lost = from.lost();
    to.is_written(target..target + bytes);
    for part in lost.within(&(source..source + bytes)) {
        to.is_lost(part.start - source + target..part.end - source + target);
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_of_failed_bytes_are_lost() {
        let mut bytes = [0u8; 64];
        assert!(lost_runs(&bytes).is_empty());
        bytes[3..3 + LOST_RUN].fill(FAILED_BYTE);
        bytes[40..40 + LOST_RUN - 1].fill(FAILED_BYTE);
        let one = lost_runs(&bytes);
        assert!(one.len() == 1 && one[0] == (3..3 + LOST_RUN), "a shorter run may be data: {one:?}");
        let all = lost_runs(&[FAILED_BYTE; 4]);
        assert!(all.len() == 1 && all[0] == (0..4), "all of a short write");
    }
}
