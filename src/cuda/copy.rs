//! Bytes between host and device and between devices: staged through pinned memory, so that no copy makes the host wait
//! but for room.
#![allow(unsafe_code)]

use super::core::Core;
use super::events::{Event, Stream};
use super::memory::{Memory, Pinned};
use crate::device::{Account, Charge, DeviceError, PATIENCE};
use cudarc::driver::{result, sys};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Parts of a queue's staging memory: while one is filled, the others are on their way.
const SEGMENTS: usize = 4;

/// Bytes of a part: the most that one copy to the device carries.
pub(super) const SEGMENT: usize = 512 << 10;

/// Where the bytes of a queue's uploads wait for their copy.
pub(super) struct Staging {
    block: Pinned,
    /// The part that is being filled, and how far.
    current: usize,
    used: usize,
    /// Behind the last copy out of each other part.
    busy: [Option<Event>; SEGMENTS],
    _charge: Charge,
}

impl Staging {
    /// Memory of the host, which `account` pays for.
    pub(super) fn new(core: &Core, account: &Arc<Account>) -> Result<Staging, DeviceError> {
        let bytes = SEGMENTS * SEGMENT;
        let _charge = account.charge(bytes as u64)?;
        Ok(Staging { block: Pinned::new(core, bytes)?, current: 0, used: 0, busy: Default::default(), _charge })
    }

    /// Has `fill` write `bytes` bytes, at most [`SEGMENT`], and copies them to byte `offset` of `dst`.
    pub(super) fn upload<E: From<DeviceError>>(
        &mut self,
        stream: &Stream,
        dst: &Memory,
        offset: u64,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let core = dst.core();
        self.make_room(core, stream, bytes)?;
        let at = self.current * SEGMENT + self.used;
        let piece =
            self.block.slice_mut(at, bytes).ok_or(DeviceError::Misuse("an upload beyond its staging memory"))?;
        fill(piece)?;
        let address = dst.at(offset, bytes as u64)?;
        // SAFETY: the source lies in pinned memory that is not written again before `busy` says so, the destination in its
        // allocation, which the queue keeps until the copy is done.
        unsafe { result::memcpy_htod_async(address, piece, stream.raw()) }
            .map_err(|e| core.failed("cuMemcpyHtoDAsync", e))?;
        // The next piece begins at a cache line.
        self.used += bytes.next_multiple_of(64);
        Ok(())
    }

    fn make_room(&mut self, core: &Core, stream: &Stream, bytes: usize) -> Result<(), DeviceError> {
        if self.used + bytes <= SEGMENT {
            return Ok(());
        }
        let end = core.event()?;
        end.record(core, stream)?;
        self.busy[self.current] = Some(end);
        self.current = (self.current + 1) % SEGMENTS;
        self.used = 0;
        if let Some(end) = self.busy[self.current].take() {
            wait(core, &end)?;
            core.reuse(end);
        }
        Ok(())
    }
}

/// Copies pinned bytes to byte `offset` of `dst` without staging them, behind all earlier work, and waits for it: the bytes
/// are the caller's again afterwards.
pub(super) fn upload_pinned(stream: &Stream, dst: &Memory, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
    let (core, address) = (dst.core(), dst.at(offset, bytes.len() as u64)?);
    // Earlier work may wait for who knows what. Then nothing is submitted that would read the bytes later.
    let before = core.event()?;
    before.record(core, stream)?;
    wait(core, &before)?;
    core.reuse(before);
    // SAFETY: the source is borrowed until the copy is done, the destination lies in its allocation.
    unsafe { result::memcpy_htod_async(address, bytes, stream.raw()) }
        .map_err(|e| core.failed("cuMemcpyHtoDAsync", e))?;
    stream.synchronize(core)
}

/// Blocks until an event is reached.
fn wait(core: &Core, event: &Event) -> Result<(), DeviceError> {
    let until = Instant::now() + PATIENCE;
    let mut looks = 0u32;
    while !event.reached(core)? {
        if Instant::now() > until {
            return Err(DeviceError::Deadline("room for an upload"));
        }
        looks += 1;
        if looks > 1000 {
            std::thread::sleep(Duration::from_micros(50));
        }
    }
    Ok(())
}

/// Where the bytes of downloads arrive: a pinned block that goes back to its device's pool when nobody reads it any more.
#[derive(Debug)]
pub(super) struct Landing {
    core: Arc<Core>,
    block: Option<Pinned>,
}

impl Landing {
    /// For `bytes` bytes.
    pub(super) fn new(core: &Arc<Core>, bytes: usize) -> Result<Landing, DeviceError> {
        Ok(Landing { core: Arc::clone(core), block: Some(core.pinned(bytes)?) })
    }

    /// Starts to bring bytes from byte `offset` of `src` to the range `to`, which nothing else is brought to. They are there when
    /// the stream's work is done; until then the landing must be kept, also where this fails.
    pub(super) fn bring(
        &mut self,
        stream: &Stream,
        (src, offset): (&Memory, u64),
        to: Range<usize>,
    ) -> Result<(), DeviceError> {
        let address = src.at(offset, to.len() as u64)?;
        let piece = self.block.as_mut().and_then(|block| block.slice_mut(to.start, to.len()));
        let piece = piece.ok_or(DeviceError::Misuse("a download beyond its block"))?;
        // SAFETY: the source lies in its allocation; the destination is pinned memory that is kept until the copy is done, and
        // nobody else looks at before.
        unsafe { result::memcpy_dtoh_async(piece, address, stream.raw()) }
            .map_err(|e| self.core.failed("cuMemcpyDtoHAsync", e))
    }

    /// The bytes of a range, once they are there.
    pub(super) fn bytes(&self, range: Range<usize>) -> Result<Vec<u8>, DeviceError> {
        let block = self.block.as_ref().and_then(|block| block.slice(range.end)?.get(range));
        Ok(block.ok_or(DeviceError::Misuse("a download beyond its block"))?.to_vec())
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            self.core.give_back(block);
        }
    }
}

/// Copies within one device, between ranges that do not overlap.
pub(super) fn within(
    stream: &Stream,
    (src, from): (&Memory, u64),
    (dst, to): (&Memory, u64),
    bytes: u64,
) -> Result<(), DeviceError> {
    let (core, from, to) = (dst.core(), src.at(from, bytes)?, dst.at(to, bytes)?);
    // SAFETY: both ranges lie in their allocations, which the queue keeps until the copy is done.
    unsafe { result::memcpy_dtod_async(to, from, bytes as usize, stream.raw()) }
        .map_err(|e| core.failed("cuMemcpyDtoDAsync", e))
}

/// Whether `core`'s device reaches `other`'s memory, and the other way round; from now on it may.
pub(super) fn connect(core: &Core, other: &Core) -> Result<bool, DeviceError> {
    let [here, there] =
        [core, other].map(|c| i32::try_from(c.gpu.ordinal).ok().and_then(|n| result::device::get(n).ok()));
    let (Some(here), Some(there)) = (here, there) else { return Ok(false) };
    for (a, b) in [(here, there), (there, here)] {
        let mut can = 0;
        // SAFETY: both devices are ones that the driver gave; one int is written.
        let asked = unsafe { sys::cuDeviceCanAccessPeer(&raw mut can, a, b) }.result();
        asked.map_err(|e| core.failed("cuDeviceCanAccessPeer", e))?;
        if can == 0 {
            return Ok(false);
        }
    }
    for (from, to) in [(core, other), (other, core)] {
        from.bind()?;
        // SAFETY: the context of `from` is current, and that of `to` is alive as long as its device.
        match unsafe { sys::cuCtxEnablePeerAccess(to.context().cu_ctx(), 0) }.result() {
            Ok(()) => {}
            Err(e) if e.0 == sys::CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => {}
            // Devices without a link, or too many links already.
            Err(e) => {
                log::info!("no direct copies between {} and {}: {}", from.name, to.name, super::driver::describe(e));
                core.bind()?;
                return Ok(false);
            }
        }
    }
    core.bind()?;
    Ok(true)
}

/// Copies between two devices that reach each other's memory, on a stream of the destination's.
pub(super) fn direct(
    stream: &Stream,
    (src, from): (&Memory, u64),
    (dst, to): (&Memory, u64),
    bytes: u64,
) -> Result<(), DeviceError> {
    let (core, other) = (dst.core(), src.core());
    let (from, to) = (src.at(from, bytes)?, dst.at(to, bytes)?);
    // SAFETY: as in `within`; both contexts are alive: their devices are.
    unsafe {
        result::memcpy_peer_async(
            core.context().cu_ctx(),
            to,
            other.context().cu_ctx(),
            from,
            bytes as usize,
            stream.raw(),
        )
    }
    .map_err(|e| core.failed("cuMemcpyPeerAsync", e))
}

/// The way between two devices that do not reach each other's memory: through two pinned blocks of the host in turn. Events
/// alone order it.
pub(super) struct Bounce {
    /// Of the source's device.
    stream: Stream,
    source: Arc<Core>,
    legs: [Leg; 2],
    next: usize,
    _charge: Charge,
}

struct Leg {
    block: Pinned,
    /// Behind the copy into the block, on the source's device.
    filled: Event,
    /// Behind the copy out of it, on the destination's; whether there ever was one.
    emptied: Event,
    used: bool,
}

impl Bounce {
    /// A way from `source` to `core`, whose blocks `account` pays for.
    pub(super) fn new(core: &Core, source: &Arc<Core>, account: &Arc<Account>) -> Result<Bounce, DeviceError> {
        let _charge = account.charge(2 * SEGMENT as u64)?;
        let leg = || {
            let (block, filled, emptied) = (Pinned::new(source, SEGMENT)?, Event::new(source)?, Event::new(core)?);
            Ok::<_, DeviceError>(Leg { block, filled, emptied, used: false })
        };
        let (legs, stream) = ([leg()?, leg()?], Stream::new(source)?);
        core.bind()?;
        Ok(Bounce { stream, source: Arc::clone(source), legs, next: 0, _charge })
    }

    /// Copies once what `stream`, of the destination's device, has been given so far is done.
    pub(super) fn copy(
        &mut self,
        stream: &Stream,
        (src, from): (&Memory, u64),
        (dst, to): (&Memory, u64),
        bytes: u64,
    ) -> Result<(), DeviceError> {
        let (core, source) = (dst.core(), &*self.source);
        let before = core.event()?;
        before.record(core, stream)?;
        self.stream.wait(source, &before)?;
        core.reuse(before);
        let mut at = 0;
        while at < bytes {
            let n = (bytes - at).min(SEGMENT as u64);
            self.next = 1 - self.next;
            let leg = &mut self.legs[self.next];
            let (from, to) = (src.at(from + at, n)?, dst.at(to + at, n)?);
            source.bind()?;
            if leg.used {
                self.stream.wait(source, &leg.emptied)?;
            }
            let host = leg.block.slice_mut(0, n as usize).ok_or(DeviceError::Misuse("a piece beyond its block"))?;
            // SAFETY: the source's range lies in its allocation, which the queue keeps; the block is written only after the copy
            // out of it (`emptied`), and the host never looks at it.
            unsafe { result::memcpy_dtoh_async(host, from, self.stream.raw()) }
                .map_err(|e| source.failed("cuMemcpyDtoHAsync", e))?;
            leg.filled.record(source, &self.stream)?;
            core.bind()?;
            stream.wait(core, &leg.filled)?;
            // SAFETY: as above, in the other direction: it runs after `filled`.
            unsafe { result::memcpy_htod_async(to, host, stream.raw()) }
                .map_err(|e| core.failed("cuMemcpyHtoDAsync", e))?;
            leg.emptied.record(core, stream)?;
            leg.used = true;
            at += n;
        }
        Ok(())
    }
}
