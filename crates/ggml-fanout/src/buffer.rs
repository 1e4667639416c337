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
    /// Counts the losses. What was submitted before a loss writes nothing.
    epoch: u64,
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
        let mut weights = lock(&self.weights);
        let end = position + weight.bytes;
        weights.retain(|&start, known| start < position || start + known.bytes > end);
        weights.insert(position, weight);
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
        ANY_LOST.store(true, Ordering::Relaxed);
        let mut lost = lock(&self.lost);
        *lost = Lost { ranges: LostRanges::all(self.bytes), ran: HashSet::new(), epoch: lost.epoch + 1 };
        for (at, range) in restored.filled.iter().enumerate() {
            // The bytes up to the next weight are padding, if they are too few for another tensor.
            let next = restored.filled.get(at + 1).map_or(self.bytes, |next| next.start);
            let is_padding = next.saturating_sub(range.end) < self.device.alignment() as u64;
            lost.ranges.remove(range.start..if is_padding { next.max(range.end) } else { range.end });
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
    pub(crate) fn set_lost(&self, epoch: u64, ranges: LostRanges, graph: usize) {
        let mut lost = lock(&self.lost);
        if lost.epoch != epoch {
            return;
        }
        lost.ranges = ranges;
        if !lost.ran.insert(graph) && self.usage.load(Ordering::Relaxed) == USAGE_COMPUTE {
            (lost.ranges, lost.ran) = (LostRanges::default(), HashSet::new());
        }
    }

    /// How many losses there were: read before work is submitted.
    pub(crate) fn epoch(&self) -> u64 {
        lock(&self.lost).epoch
    }

    /// A range of the memory is written, by work that was submitted in an epoch.
    pub(crate) fn is_written(&self, epoch: u64, range: Range<u64>) {
        let mut lost = lock(&self.lost);
        if lost.epoch == epoch {
            lost.ranges.remove(range);
        }
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
        if lost_with_server {
            self.is_lost(range);
        } else {
            _ = self.broken.set(format!("{reason}; the model must be loaded again"));
        }
        self.device.failures.log(reason);
    }
}

/// Writes bytes of a tensor by `upload`. Bytes that were lost when the host read them are zeros, and lost again.
pub(crate) fn write(
    state: &BufferState,
    tensor: &Tensor,
    range: Range<u64>,
    bytes: &[u8],
    upload: impl FnOnce(Region, &[u8]) -> Result<(), DeviceError>,
) -> Result<(), DeviceError> {
    state.changes();
    let epoch = state.epoch();
    let region = state.memory().subregion(range.start, bytes.len() as u64)?;
    if !ANY_LOST.load(Ordering::Relaxed) {
        return upload(region, bytes);
    }
    let float = host::get().numbers.dtype(tensor.dtype).filter(|dtype| dtype.is_float());
    let lost = lost_runs(bytes, float.map(|dtype| dtype.block_bytes()));
    if lost.is_empty() {
        upload(region, bytes)?;
    } else {
        let mut zeroed = bytes.to_vec();
        lost.iter().for_each(|run| zeroed[run.clone()].fill(0));
        upload(region, &zeroed)?;
    }
    state.is_written(epoch, range.clone());
    lost.into_iter().for_each(|run| state.is_lost(range.start + run.start as u64..range.start + run.end as u64));
    Ok(())
}

/// Runs of bytes that a failed or lost read has delivered. In a tensor of floats of `element` bytes one element is enough: no
/// valid cache has a NaN of these bits.
fn lost_runs(bytes: &[u8], element: Option<usize>) -> Vec<Range<usize>> {
    let shortest = element.unwrap_or(LOST_RUN);
    let mut runs = Vec::new();
    let mut start = 0;
    while let Some(first) = bytes[start..].iter().position(|&byte| byte == FAILED_BYTE) {
        let mut first = start + first;
        let end = first + bytes[first..].iter().take_while(|&&byte| byte == FAILED_BYTE).count();
        start = end;
        let whole = first == 0 && end == bytes.len();
        let mut last = end;
        if let Some(element) = element {
            (first, last) = (first.next_multiple_of(element), end - end % element);
        }
        if whole || (first < last && last - first >= shortest) {
            runs.push(first..last);
        }
    }
    runs
}

/// Fills memory of the host whose read has failed.
pub(crate) fn mark_failed(bytes: &mut [u8]) {
    ANY_LOST.store(true, Ordering::Relaxed);
    bytes.fill(FAILED_BYTE);
}

/// The lost parts of `bytes` bytes of memory from `position` on, relative to it.
pub(crate) fn lost_parts(state: &BufferState, position: u64, bytes: usize) -> Vec<Range<usize>> {
    if !ANY_LOST.load(Ordering::Relaxed) {
        return Vec::new();
    }
    let lost = lock(&state.lost);
    let parts = lost.ranges.within(&(position..position + bytes as u64));
    parts.map(|part| (part.start - position) as usize..(part.end - position) as usize).collect()
}

/// After a copy between buffers, which was submitted in `epoch` of the target: what was lost of the source is lost of the copy.
pub(crate) fn copy_lost(from: &BufferState, src: &Tensor, to: &BufferState, dst: &Tensor, epoch: u64) {
    if !ANY_LOST.load(Ordering::Relaxed) {
        return;
    }
    // SAFETY: a tensor of the host.
    let bytes = unsafe { host::get().tensor_bytes(src) } as u64;
    let (source, target) = (from.position(src, 0), to.position(dst, 0));
    let lost = from.lost();
    to.is_written(epoch, target..target + bytes);
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
        assert!(lost_runs(&bytes, None).is_empty());
        bytes[3..3 + LOST_RUN].fill(FAILED_BYTE);
        bytes[40..40 + LOST_RUN - 1].fill(FAILED_BYTE);
        let runs = |element| lost_runs(&bytes, element).into_iter().map(|run| (run.start, run.end)).collect::<Vec<_>>();
        assert_eq!(runs(None), [(3, 19)], "a shorter run may be data");
        assert_eq!(runs(Some(4)), [(4, 16), (40, 52)], "whole elements");
        let all = lost_runs(&[FAILED_BYTE; 5], Some(2));
        assert!(all.len() == 1 && all[0].start == 0, "all of a short write");
    }
}
