//! Buffers: memory of a device, and the host's accesses to it.

use crate::abi::{self, Buffer, BufferTail, Tensor, USAGE_COMPUTE, USAGE_WEIGHTS};
use crate::buffer_calls;
use crate::device::{Device, Ticket};
use crate::guard::lock;
use crate::host;
use crate::lost_ranges::LostRanges;
use crate::outputs::Outputs;
use crate::reservation::AddressRange;
use crate::server::RestoredBuffer;
use crate::support;
use crate::uploads::{Upload, Uploads};
use fanout::device::{CopyOutcome, DeviceError, Queue, Region, TimelinePoint, UploadSource};
use std::collections::HashSet;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

/// What a read of memory delivers that has failed or was lost, in each byte: NaN in every float type, and -1 in integers. An element
/// or block of such bytes that the host writes back, such as a saved state of a sequence, is lost again.
const FAILED_BYTE: u8 = 0xff;

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
    /// Of a device of a server: the weights, and what else the host wrote and no graph has overwritten, such as adapters, for
    /// loading them again.
    uploads: Mutex<Uploads>,
    lost: Mutex<Lost>,
    /// The first write that the device refused, or a weight that is gone. The host is not told of it, so graphs that use the
    /// buffer fail from then on.
    broken: OnceLock<String>,
}

/// What was lost with a server.
#[derive(Default)]
struct Lost {
    ranges: LostRanges,
    /// Graphs that have run since then, by their numbers.
    ran: HashSet<u64>,
    /// The number of losses of all memory. What was submitted before a loss makes nothing valid.
    epoch: u64,
}

impl Lost {
    /// A loss of all memory.
    fn all(&mut self, bytes: u64) {
        ANY_LOST.store(true, Ordering::Relaxed);
        *self = Lost { ranges: LostRanges::all(bytes), ran: HashSet::new(), epoch: self.epoch + 1 };
    }
}

impl BufferState {
    /// Allocates zeroed memory.
    pub(crate) fn allocate(device: &'static Device, size: usize) -> Result<Arc<BufferState>, DeviceError> {
        let addresses = AddressRange::reserve(size)
            .map_err(|e| DeviceError::Exhausted { resource: "addresses", reason: e.to_string() })?;
        let (fanout, generation) = device.fanout()?;
        let memory =
            fanout.alloc(size as u64, &device.budget).inspect_err(|e| device.report_loss(generation, e))?.whole();
        let state = Arc::new(BufferState {
            device,
            bytes: size as u64,
            memory: RwLock::new(memory),
            addresses,
            usage: AtomicI32::default(),
            outputs: Mutex::default(),
            uploads: Mutex::default(),
            lost: Mutex::default(),
            broken: OnceLock::new(),
        });
        device.add_buffer(&state);
        // A server that came back in between does not know the buffer.
        match device.fanout()? {
            (_, now) if now == generation => Ok(state),
            _ => Err(DeviceError::Ended),
        }
    }

    /// The buffer of an object of the host's; `None` for buffers of others, and for empty ones, which have no memory.
    ///
    /// # Safety
    /// `buffer` is null or a buffer of the host that is not freed while the result is used.
    pub(crate) unsafe fn of_any<'a>(buffer: *mut Buffer) -> Option<&'a BufferState> {
        if buffer.is_null() {
            return None;
        }
        // SAFETY: the caller passes a valid buffer. Those with the plug-in's callbacks have its contexts.
        unsafe {
            let own = host::get().free_callback(buffer) == buffer_calls::free_buffer as *const () as usize;
            if own { BufferState::of_fields(host::get().buffer_fields(buffer)) } else { None }
        }
    }

    /// The buffer of an object's fields; `None` for an empty one.
    ///
    /// # Safety
    /// The object has the plug-in's callbacks, and is not freed while the result is used.
    pub(crate) unsafe fn of_fields<'a>(fields: &BufferTail) -> Option<&'a BufferState> {
        // SAFETY: the context of the plug-in's buffers is their state.
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

    /// The bytes of a tensor, from the start of the memory.
    pub(crate) fn range_of(&self, tensor: &Tensor) -> Range<u64> {
        let start = self.position(tensor, 0);
        // SAFETY: a tensor of the host.
        start..start + unsafe { host::get().tensor_bytes(tensor) } as u64
    }

    /// The region of `bytes` bytes from byte `offset` of a tensor.
    pub(crate) fn region(&self, tensor: &Tensor, offset: usize, bytes: usize) -> Result<Region, DeviceError> {
        self.memory().subregion(self.position(tensor, offset), bytes as u64)
    }

    /// Before memory changes: forgets copies of outputs.
    pub(crate) fn changes(&self) {
        lock(&self.outputs).clear();
    }

    /// Notes that the host reads results of a graph that are no outputs: from now on graphs deliver them, too.
    pub(crate) fn note_host_read(&self) {
        if self.is_computed() {
            self.device.host_reads.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the memory is that of one run of a graph.
    pub(crate) fn is_computed(&self) -> bool {
        self.usage.load(Ordering::Relaxed) == USAGE_COMPUTE
    }

    /// Why the memory is not what the host wrote, if so.
    pub(crate) fn broken(&self) -> Option<&str> {
        self.broken.get().map(String::as_str)
    }

    pub(crate) fn holds_weights(&self) -> bool {
        self.usage.load(Ordering::Relaxed) == USAGE_WEIGHTS
    }

    /// Submits work that writes the memory.
    pub(crate) fn submit<T>(
        &self,
        submit: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Result<(T, Ticket), DeviceError> {
        self.device.submit_write(!self.is_computed(), submit)
    }

    /// Remembers an upload. Earlier uploads that start in its range are dropped. One that starts before it stays, and is loaded before
    /// it, because memory is restored in the order of positions.
    pub(crate) fn remember(&self, position: u64, upload: Upload) {
        let mut uploads = lock(&self.uploads);
        let end = position + upload.bytes;
        uploads.retain(|&start, _| start < position || start >= end);
        uploads.insert(position, upload);
    }

    /// Forgets uploads of which any part is overwritten.
    pub(crate) fn forget(&self, range: &Range<u64>) {
        if self.device.is_remote() {
            lock(&self.uploads).retain(|&start, known| start >= range.end || start + known.bytes <= range.start);
        }
    }

    /// The uploads, for loading them again.
    pub(crate) fn uploads(&self) -> Uploads {
        lock(&self.uploads).clone()
    }

    /// Installs the memory of a server that is back: what was not loaded again counts as lost.
    pub(crate) fn install(&self, restored: RestoredBuffer) {
        *self.memory.write().unwrap_or_else(PoisonError::into_inner) = restored.memory;
        self.changes();
        if let Some(reason) = restored.missing {
            _ = self.broken.set(format!("{reason}; the model must be loaded again"));
        }
        let mut lost = lock(&self.lost);
        lost.all(self.bytes);
        let uploads = lock(&self.uploads);
        for (at, (range, digest)) in restored.filled.iter().enumerate() {
            // What the host has replaced meanwhile stays lost.
            if uploads.get(&range.start).is_none_or(|upload| upload.digest != *digest) {
                continue;
            }
            // The bytes up to the next weight are padding, if they are too few for another tensor.
            let next = restored.filled.get(at + 1).map_or(self.bytes, |(next, _)| next.start);
            let is_padding = self.holds_weights() && next.saturating_sub(range.end) < self.device.alignment() as u64;
            lost.ranges.remove(range.start..if is_padding { next.max(range.end) } else { range.end });
        }
    }

    pub(crate) fn has_lost(&self) -> bool {
        !lock(&self.lost).ranges.is_empty()
    }

    pub(crate) fn lost(&self) -> LostRanges {
        lock(&self.lost).ranges.clone()
    }

    /// Sets what is lost after a graph, whose number is `graph`, has run.
    ///
    /// The host writes the inputs of each run, and computed memory is not used beyond one run of its graphs. So once a graph has
    /// run twice, all computed memory is of runs after the loss, and what was never written is not used.
    pub(crate) fn set_lost_ranges(&self, epoch: u64, ranges: LostRanges, graph: u64) {
        let mut lost = lock(&self.lost);
        if lost.epoch != epoch {
            return;
        }
        lost.ranges = ranges;
        if !lost.ran.insert(graph) && self.is_computed() {
            (lost.ranges, lost.ran) = (LostRanges::default(), HashSet::new());
        }
    }

    /// How many losses there were: read before work is submitted.
    pub(crate) fn epoch(&self) -> u64 {
        lock(&self.lost).epoch
    }

    /// Makes a range valid after a write that was submitted in `epoch`.
    pub(crate) fn mark_valid(&self, epoch: u64, range: Range<u64>) {
        let mut lost = lock(&self.lost);
        if lost.epoch == epoch {
            lost.ranges.remove(range);
        }
    }

    /// Makes a range lost: a write of it has failed, or what was written there was lost.
    pub(crate) fn mark_lost(&self, range: Range<u64>) {
        ANY_LOST.store(true, Ordering::Relaxed);
        lock(&self.lost).ranges.insert(range);
    }

    /// The queue has failed with work that may not have run.
    pub(crate) fn lose_all(&self, error: &DeviceError) {
        if self.holds_weights() && !self.device.is_remote() {
            _ = self.broken.set(format!("{error}; the model must be loaded again"));
        } else {
            lock(&self.lost).all(self.bytes);
        }
    }

    pub(crate) fn fail_read(&self, what: &str, error: &DeviceError) {
        let reason = self.device.describe_failure(what, error);
        self.device.latch(reason.clone());
        self.device.failures.log(reason);
    }

    /// A write of a range has failed. What a server did not get counts as lost, and weights are loaded again when it is back.
    pub(crate) fn fail_write(&self, what: &str, range: Range<u64>, error: &DeviceError) {
        let reason = self.device.describe_failure(what, error);
        if self.device.is_remote() || !self.holds_weights() {
            self.mark_lost(range);
        } else {
            _ = self.broken.set(format!("{reason}; the model must be loaded again"));
        }
        self.device.failures.log(reason);
    }
}

/// Writes bytes of a tensor that is no weight. Bytes that were lost when the host read them are zeros, and lost again.
pub(crate) fn write(state: &BufferState, tensor: &Tensor, range: Range<u64>, bytes: &[u8]) -> Result<(), DeviceError> {
    state.changes();
    let epoch = state.epoch();
    let region = state.memory().subregion(range.start, bytes.len() as u64)?;
    let upload =
        |bytes: &[u8]| state.submit(|queue| queue.upload(region, None, UploadSource::Borrowed(bytes))).map(|_| ());
    if !ANY_LOST.load(Ordering::Relaxed) {
        remember_write(state, tensor, &range, bytes);
        return upload(bytes);
    }
    // Integers are no content of caches, and may be -1.
    let dtype = host::get().numbers.dtype(tensor.dtype).filter(|dtype| dtype.is_float() || dtype.block_len() > 1);
    let from = range.start.wrapping_sub(state.position(tensor, 0)) as usize;
    let lost = dtype.map_or_else(Vec::new, |dtype| lost_runs(bytes, from, dtype.block_bytes()));
    if lost.is_empty() {
        remember_write(state, tensor, &range, bytes);
        upload(bytes)?;
    } else {
        state.forget(&range);
        let mut zeroed = bytes.to_vec();
        lost.iter().for_each(|run| zeroed[run.clone()].fill(0));
        upload(&zeroed)?;
    }
    state.mark_valid(epoch, range.clone());
    lost.into_iter().for_each(|run| state.mark_lost(range.start + run.start as u64..range.start + run.end as u64));
    Ok(())
}

/// Remembers what the host writes to memory beyond one run, such as adapters: whole tensors.
fn remember_write(state: &BufferState, tensor: &Tensor, range: &Range<u64>, bytes: &[u8]) {
    if !state.device.is_remote() || state.is_computed() {
        return;
    }
    state.forget(range);
    if *range == state.range_of(tensor) && tensor.view_src.is_null() {
        // SAFETY: a tensor of the host.
        let name = unsafe { abi::name_of(tensor) };
        state.remember(range.start, Upload::new(bytes, support::describe(tensor), name));
    }
}

/// Runs of elements or blocks of `element` bytes that a failed or lost read has delivered. `from` is the position of the first byte
/// in its tensor. No valid element or block has only ones: a float is NaN then, and so is the scale of a block.
fn lost_runs(bytes: &[u8], from: usize, element: usize) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    let mut start = from.next_multiple_of(element) - from;
    while let Some(block) = bytes.get(start..start + element) {
        let end = start + element;
        if block.iter().all(|&byte| byte == FAILED_BYTE) {
            match runs.last_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => runs.push(start..end),
            }
        }
        start = end;
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
    to.mark_valid(epoch, target..target + bytes);
    for part in lost.within(&(source..source + bytes)) {
        to.mark_lost(part.start - source + target..part.end - source + target);
    }
}

/// To be called before a tensor is overwritten by a copy.
pub(crate) fn before_copy_to(to: &BufferState, dst: &Tensor) {
    to.changes();
    to.forget(&to.range_of(dst));
}

/// The regions of a copy: of the source, and of the target.
pub(crate) fn copy_regions(
    from: &BufferState,
    src: &Tensor,
    to: &BufferState,
    dst: &Tensor,
) -> Result<(Region, Region), DeviceError> {
    // SAFETY: both are tensors of the host.
    let bytes = unsafe { host::get().tensor_bytes(src).min(host::get().tensor_bytes(dst)) };
    Ok((from.region(src, 0, bytes)?, to.region(dst, 0, bytes)?))
}

/// Submits a copy to the target's queue, once `after` is reached. Returns the point after the copy; `None` if the devices cannot
/// copy directly.
pub(crate) fn submit_copy(
    queue: &mut dyn Queue,
    (from, to): (Region, Region),
    after: Option<&TimelinePoint>,
) -> Result<Option<TimelinePoint>, DeviceError> {
    Ok(match queue.copy_from(from, to, after)? {
        CopyOutcome::Submitted => Some(queue.mark()),
        CopyOutcome::Unreachable => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_of_failed_bytes_are_lost() {
        let mut bytes = [0u8; 64];
        assert!(lost_runs(&bytes, 0, 2).is_empty());
        bytes[3..19].fill(FAILED_BYTE);
        bytes[40..55].fill(FAILED_BYTE);
        let runs = |from, element| {
            lost_runs(&bytes, from, element).into_iter().map(|run| (run.start, run.end)).collect::<Vec<_>>()
        };
        assert_eq!(runs(0, 4), [(4, 16), (40, 52)], "whole elements");
        assert_eq!(runs(1, 4), [(3, 19), (43, 55)], "elements start before the bytes");
        assert!(runs(0, 34).is_empty(), "a block of q8_0 with codes of -1 is data");
    }
}
