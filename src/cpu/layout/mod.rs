//! Device memory with repacked weights: ranges of a memory may hold panels (sixteen interleaved rows, see [`panel`]) instead
//! of row-major bytes.
//!
//! Repacking happens in two places. A program packs the weights (first sources) of its matrix products before its first node
//! runs ([`CpuMemory::lock_layout`]), and an upload of a whole weight packs it as it arrives ([`CpuMemory::upload`]). The
//! layout is invisible to every other access:
//! - A transfer sees rows and leaves panels packed: reads unpack into the reader's bytes, writes to a part of a tensor pack into
//!   the panels that they touch (`row_access`). A transfer that overwrites the whole span removes it from the map, since another
//!   tensor may take its place; the span may be packed again.
//! - A program with a kernel that needs rows, or writes them, converts the whole span back, which delays packing it again
//!   (`RepackDelays`).
//!
//! # Locks
//! Queues of one process may share a memory and read it at the same time, without timeline points that order them. Therefore
//! each memory has a lock over its layout, not over its content. Programs and transfers hold it shared while they run; a
//! conversion and a write into panels hold it exclusively. Deadlock is impossible:
//! - a thread locks each memory at most once at a time, so a waiting conversion cannot block a second request of a thread that
//!   holds the lock;
//! - a thread locks several memories in the order of their addresses ([`lock_order`]);
//! - while it holds locks, a thread waits only for locks of later memories and for the pool, and the thread that runs on the
//!   pool has all its locks. A thread holds no lock while it waits for a timeline point, completes a pending read or reads the
//!   source of an upload. An upload in pieces *pins* its range instead: a pinned range stays row-major without a lock. An upload
//!   over a part of a packed span locks the memory for each of its pieces.
//!
//! The threads for short commands of all queues wait for no lock ([`Locking::Try`]).
//!
//! A conversion of a huge tensor gives way to other queues ([`Locking::GiveWay`]): the map records the panels that it has
//! converted, and the next program that needs the conversion goes on. In between, the tensor is packed in part. A program that
//! cannot use this state finishes it, to panels where packing is allowed and to rows otherwise; as the way to rows delays
//! packing first, two programs cannot convert it back and forth.
//!
//! Start with [`CpuMemory`]. Conversions are in `conversion`, accesses to rows in `row_access`, the map is in `layout_map`, the
//! combination of a program's accesses in `layout_requirements`, what copies bytes in `transfers`.

mod conversion;
mod layout_map;
mod layout_requirements;
mod row_access;
#[cfg(test)]
mod tests;
mod transfers;

pub(super) use layout_requirements::{LayoutAccess, LayoutRequirements, TensorUses};

use super::memory::{HostMemory, View};
use super::pool::Pool;
use crate::device::{
    DeviceError, HostBuffer, Lane, MIN_PACKED_BYTES, MemoryBudget, ReadOnlyMapping, Region, SourceError, Turn,
};
use crate::poison::Unpoisoned;
use crate::tensor::TensorDesc;
use conversion::pack_panel;
use layout_map::{LayoutMap, PanelSpan, shifted};
use std::cmp::Ordering;
use std::ops::Range;
use std::sync::{Arc, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, mpsc};

/// Bytes of a piece of an upload that is not packed.
const UPLOAD_PIECE: usize = 1 << 20;

/// Bytes of a piece of an upload that is packed, or one panel if that is larger: a piece stays in the L2 cache until it is
/// packed.
const PACK_PIECE: usize = 256 << 10;

/// How many bytes ahead of the received data an upload prefaults pages.
const PREFAULT_AHEAD: usize = 4 << 20;

/// Bytes that one system call prefaults.
const PREFAULT_STEP: usize = 1 << 20;

const READ_ONLY: DeviceError =
    DeviceError::Misuse("the memory is a read-only mapping of a file (import_read_only): it cannot be written");

const OUT_OF_BOUNDS: DeviceError = DeviceError::Misuse("a region reaches past the end of its memory");

/// Whether a tensor can be packed into panels.
pub(super) fn fits_panels(tensor: &TensorDesc) -> bool {
    PanelSpan::of(0, tensor).is_some()
}

/// Writes the next piece of an upload.
pub(super) type PieceSource<'a> = dyn FnMut(&mut [u8]) -> Result<(), SourceError> + 'a;

/// Waits for a turn on the device, in which an upload packs a piece.
pub(super) type BeginTurn<'a> = dyn Fn(Lane) -> Turn + 'a;

/// Memory in which some ranges may hold panels.
pub(super) struct CpuMemory {
    pages: HostMemory,
    map: RwLock<LayoutMap>,
}

/// A lock for writes to a range: see [`CpuMemory::lock_for_write`].
enum WriteLock<'a> {
    /// The range is row-major.
    Shared(RwLockReadGuard<'a, LayoutMap>),
    /// Some bytes of the range may be packed, and no other thread reads the memory.
    Exclusive(RwLockWriteGuard<'a, LayoutMap>),
}

impl WriteLock<'_> {
    fn map(&self) -> &LayoutMap {
        match self {
            WriteLock::Shared(map) => map,
            WriteLock::Exclusive(map) => map,
        }
    }
}

/// What an access does while another thread has the layout locked, or when the layout has to be converted first.
#[derive(Clone, Copy)]
pub(super) enum Locking<'a> {
    /// It waits for the lock and converts the layout until the closure returns true: then the access stops after some progress,
    /// and is tried again later.
    GiveWay(&'a (dyn Fn() -> bool + Sync)),
    /// It returns without effect if it would have to wait or to convert, or if a large transfer would have to unpack panels.
    Try,
}

impl Locking<'static> {
    /// Never gives way.
    pub(super) const WAIT: Locking<'static> = Locking::GiveWay(&|| false);
}

impl CpuMemory {
    /// As [`HostMemory::zeroed`].
    pub(super) fn zeroed(bytes: usize, budget: &Arc<MemoryBudget>) -> Result<CpuMemory, DeviceError> {
        Ok(CpuMemory { pages: HostMemory::zeroed(bytes, budget)?, map: RwLock::new(LayoutMap::new()) })
    }

    /// As [`HostMemory::from_host_buffer`].
    pub(super) fn from_host_buffer(memory: HostBuffer) -> CpuMemory {
        CpuMemory { pages: HostMemory::from_host_buffer(memory), map: RwLock::new(LayoutMap::new()) }
    }

    /// As [`HostMemory::from_read_only`]. Such memory is never packed.
    pub(super) fn from_read_only(memory: ReadOnlyMapping) -> CpuMemory {
        CpuMemory { pages: HostMemory::from_read_only(memory), map: RwLock::new(LayoutMap::new()) }
    }

    /// The memory of a region.
    pub(super) fn of(region: &Region) -> Result<&CpuMemory, DeviceError> {
        region.buffer().memory().ok_or(DeviceError::Misuse("a region of another kind of device"))
    }

    /// As [`CpuMemory::of`], for a region that a transfer or a program is to write: read-only memory is refused.
    pub(super) fn writable(region: &Region) -> Result<&CpuMemory, DeviceError> {
        let memory = CpuMemory::of(region)?;
        if memory.pages.is_read_only() { Err(READ_ONLY) } else { Ok(memory) }
    }

    /// The memory itself, whose layout the caller must not depend on.
    pub(super) fn pages(&self) -> &HostMemory {
        &self.pages
    }

    /// As [`HostMemory::populate`].
    pub(super) fn populate(&self, offset: usize, bytes: usize) {
        self.pages.populate(offset..offset.saturating_add(bytes));
    }

    /// Writes a range in place: `fill` produces it piece by piece. The caller has waited for all work that touches the range.
    ///
    /// `tensor` describes the tensor that fills the range, if the caller wants it packed. If that tensor can be packed, the range
    /// holds panels afterwards. Packing happens in turns of `begin_turn`. If `fill` fails, the bytes of the range are unspecified.
    pub(super) fn upload(
        &self,
        offset: usize,
        bytes: usize,
        tensor: Option<&TensorDesc>,
        begin_turn: &BeginTurn<'_>,
        fill: &mut PieceSource<'_>,
    ) -> Result<(), DeviceError> {
        let range = byte_range(offset, bytes)?;
        let span = tensor
            .and_then(|tensor| PanelSpan::of(offset, tensor))
            .filter(|s| s.range == range && bytes >= MIN_PACKED_BYTES);
        let pin = self.pin(range.clone())?;
        // Parts of the range belong to packed spans that reach beyond it.
        let middle = pin.range.clone();
        self.upload_into_panels(range.start..middle.start, begin_turn, fill)?;
        self.upload_pinned(pin, span, begin_turn, fill)?;
        self.upload_into_panels(middle.end..range.end, begin_turn, fill)
    }

    fn upload_pinned(
        &self,
        pin: PinnedRange<'_>,
        span: Option<PanelSpan>,
        begin_turn: &BeginTurn<'_>,
        fill: &mut PieceSource<'_>,
    ) -> Result<(), DeviceError> {
        let range = pin.range.clone();
        match span.filter(|span| span.range == range) {
            Some(span) => {
                self.with_prefault_helper(&span.range, |arrived| self.upload_packed(&span, fill, arrived, begin_turn))?;
                pin.finish_packed(span);
            }
            None => {
                let done = self.with_prefault_helper(&range, |arrived| {
                    let mut at = range.start;
                    self.pages.rewrite_in_pieces(range.start, range.len(), UPLOAD_PIECE, &mut |piece| {
                        fill(piece)?;
                        at += piece.len();
                        arrived(at);
                        Ok(())
                    })
                });
                done?;
            }
        }
        Ok(())
    }

    /// Uploads to a part of a packed span, which stays packed: each piece is staged and packed. Does nothing for an empty range.
    fn upload_into_panels(
        &self,
        range: Range<usize>,
        begin_turn: &BeginTurn<'_>,
        fill: &mut PieceSource<'_>,
    ) -> Result<(), DeviceError> {
        let (mut staging, mut at) = (Vec::new(), range.start);
        while at < range.end {
            let end = range.end.min(self.read_map().panel_end(at + PACK_PIECE));
            staging.resize(end - at, 0);
            fill(&mut staging)?;
            // In the long lane, because the write holds the layout lock exclusively: outside it, a program in the only long turn
            // would wait for this lock.
            let _turn = begin_turn(Lane::Long);
            self.write(at, &staging, Locking::WAIT)?;
            at = end;
        }
        Ok(())
    }

    /// Runs an upload beside a helper thread that prefaults pages (has the system allocate them) ahead of the received data.
    /// `receive` reports the offset that it has reached.
    ///
    /// Allocating pages is half of the work of an upload to new memory. The helper touches no byte and takes no lock. It is at
    /// most [`PREFAULT_AHEAD`] bytes ahead, so that memory grows with the received bytes and not with the announced size.
    fn with_prefault_helper<T>(&self, range: &Range<usize>, receive: impl FnOnce(&dyn Fn(usize)) -> T) -> T {
        if range.len() < PREFAULT_AHEAD {
            // A single call for all pages takes half the time of several.
            self.pages.populate(range.clone());
            return receive(&|_| ());
        }
        let (arrived, arrivals) = mpsc::channel::<usize>();
        // The closure owns the sender: dropping it ends the helper, also on an error or a panic.
        std::thread::scope(move |scope| {
            let helper = move || {
                let mut ready = range.start;
                while let Ok(mut at) = arrivals.recv() {
                    loop {
                        at = arrivals.try_iter().last().unwrap_or(at);
                        ready = ready.max(at);
                        let end = range.end.min(at + PREFAULT_AHEAD).min(ready + PREFAULT_STEP);
                        if ready >= end {
                            break;
                        }
                        self.pages.populate(ready..end);
                        ready = end;
                    }
                }
            };
            // If no thread can be started, the upload takes the page faults itself.
            let _ = std::thread::Builder::new().name("pages".to_owned()).spawn_scoped(scope, helper);
            receive(&|at| _ = arrived.send(at))
        })
    }

    fn upload_packed(
        &self,
        span: &PanelSpan,
        fill: &mut PieceSource<'_>,
        arrived: &dyn Fn(usize),
        begin_turn: &BeginTurn<'_>,
    ) -> Result<(), DeviceError> {
        let panel = span.layout.bytes();
        let mut rows = vec![0; (PACK_PIECE / panel).max(1) * panel];
        let mut at = span.range.start;
        while at < span.range.end {
            let n = rows.len().min(span.range.end - at);
            let rows = &mut rows[..n];
            fill(rows)?;
            arrived(at + n);
            // The lock is not held while the client's bytes arrive, which may take any time.
            let _turn = begin_turn(Lane::Short);
            let mut panels = rows.chunks_exact(panel);
            let packed = self.pages.rewrite_in_pieces(at, n, panel, &mut |to| {
                panels.next().map(|rows| pack_panel(span, rows, to)).ok_or(OUT_OF_BOUNDS)
            });
            packed?;
            at += n;
        }
        Ok(())
    }

    /// Locks the layout for a run. Packs the spans that the program prefers as panels (`requirements`, each with the base
    /// offset of its slot) and converts back the ranges that it needs as rows. Nothing is checked if `known_version`, the
    /// version after an earlier run with the same requirements, is still current. `None`: see [`Locking`]; the next call goes on
    /// with the conversion.
    pub(super) fn lock_layout<'n>(
        &self,
        requirements: impl Iterator<Item = (&'n LayoutRequirements, usize)> + Clone,
        known_version: Option<u64>,
        pool: &Pool,
        locking: Locking<'_>,
    ) -> Result<Option<LayoutGuard<'_>>, DeviceError> {
        let Some(map) = self.read_map_with(locking) else { return Ok(None) };
        if known_version == Some(map.version()) || self.pages.is_read_only() {
            return Ok(Some(LayoutGuard { pages: &self.pages, map, is_final: true }));
        }
        if requirements.clone().all(|(requirements, base)| requirements.satisfied_by(base, &map)) {
            return Ok(Some(self.layout_guard(map, requirements)));
        }
        if let Locking::Try = locking {
            return Ok(None);
        }
        drop(map);
        let mut map = self.write_map();
        let mut rests = Vec::new();
        for (requirements, base) in requirements.clone() {
            // A tensor that is packed in part is packed completely also for kernels without a preference: the conversion to
            // rows would delay packing.
            let begun = |span: &PanelSpan| !map.is_row_major(&span.range);
            let in_part = requirements.rows_or_panels.iter().filter_map(|span| span.shifted(base)).filter(begun);
            let in_part: Vec<_> = in_part.collect();
            for span in requirements.prefer_panels.iter().filter_map(|span| span.shifted(base)).chain(in_part) {
                if span.range.end <= self.pages.bytes() {
                    for rest in map.unpacked_rests(&span) {
                        map.mark_packed(span.range.start, rest.clone());
                        rests.push(rest);
                    }
                }
            }
        }
        if !self.pack(&mut map, &rests, pool, locking)? {
            return Ok(None);
        }
        // After all packing, because regions bound to two slots may share bytes.
        let mut spans = Vec::new();
        for (requirements, base) in requirements.clone() {
            for range in requirements.rows_only.iter().filter_map(|range| shifted(range, base)) {
                spans.append(&mut map.remove_packed(&range));
            }
            for span in requirements
                .prefer_panels
                .iter()
                .chain(&requirements.rows_or_panels)
                .filter_map(|span| span.shifted(base))
            {
                if !map.contains(&span) {
                    spans.append(&mut map.remove_packed(&span.range));
                }
            }
        }
        if !self.unpack(&mut map, &spans, pool, locking)? {
            return Ok(None);
        }
        Ok(Some(self.layout_guard(RwLockWriteGuard::downgrade(map), requirements)))
    }

    fn layout_guard<'a, 'n>(
        &'a self,
        map: RwLockReadGuard<'a, LayoutMap>,
        mut requirements: impl Iterator<Item = (&'n LayoutRequirements, usize)>,
    ) -> LayoutGuard<'a> {
        let delayed = requirements.any(|(requirements, base)| requirements.is_delayed(base, &map));
        LayoutGuard { pages: &self.pages, map, is_final: !delayed }
    }

    fn read_map(&self) -> RwLockReadGuard<'_, LayoutMap> {
        // The map is consistent at every moment. A panic can only leave a range with unspecified bytes.
        self.map.read().unpoisoned()
    }

    /// As `read_map`. `None`: another thread has the map locked exclusively or waits for that, and `locking` is
    /// [`Locking::Try`].
    fn read_map_with(&self, locking: Locking<'_>) -> Option<RwLockReadGuard<'_, LayoutMap>> {
        match (locking, self.map.try_read()) {
            (_, Ok(map)) => Some(map),
            (_, Err(TryLockError::Poisoned(poisoned))) => Some(poisoned.into_inner()),
            (Locking::Try, Err(TryLockError::WouldBlock)) => None,
            (_, Err(TryLockError::WouldBlock)) => Some(self.read_map()),
        }
    }

    fn write_map(&self) -> RwLockWriteGuard<'_, LayoutMap> {
        self.map.write().unpoisoned()
    }

    /// Pins a range that is about to be overwritten, less its parts that belong to packed spans which reach beyond it: it stays
    /// row-major while the upload writes it without the lock.
    fn pin(&self, range: Range<usize>) -> Result<PinnedRange<'_>, DeviceError> {
        if range.end > self.pages.bytes() {
            return Err(OUT_OF_BOUNDS);
        }
        let mut map = self.write_map();
        map.forget_overwritten(&range);
        map.delays.forget(&range);
        let Range { mut start, mut end } = range;
        for span in map.packed_in(&range) {
            if span.range.start <= start {
                start = span.range.end.min(end);
            } else {
                end = span.range.start;
            }
        }
        map.pin(start..end);
        Ok(PinnedRange { memory: self, range: start..end })
    }
}

/// Lock order: a thread that needs both memories locks the lesser one first.
pub(super) fn lock_order(a: &CpuMemory, b: &CpuMemory) -> Ordering {
    std::ptr::from_ref(a).cmp(&std::ptr::from_ref(b))
}

fn byte_range(offset: usize, bytes: usize) -> Result<Range<usize>, DeviceError> {
    Ok(offset..offset.checked_add(bytes).ok_or(OUT_OF_BOUNDS)?)
}

fn check_bounds(ok: bool) -> Result<(), DeviceError> {
    if ok { Ok(()) } else { Err(OUT_OF_BOUNDS) }
}

/// A pinned range; dropping it unpins the range.
struct PinnedRange<'a> {
    memory: &'a CpuMemory,
    range: Range<usize>,
}

impl PinnedRange<'_> {
    /// Unpins the range and records it as packed: all pieces were written as panels.
    fn finish_packed(self, span: PanelSpan) {
        let mut map = self.memory.write_map();
        map.unpin(&self.range);
        // Another upload to the same bytes, not ordered with this one, may still be under way.
        if map.is_unclaimed(&span.range) {
            map.mark_packed(span.range.start, span);
        }
        drop(map);
        std::mem::forget(self); // unpinned already
    }
}

impl Drop for PinnedRange<'_> {
    fn drop(&mut self) {
        self.memory.write_map().unpin(&self.range);
    }
}

/// A memory whose layout cannot change while the guard lives.
pub(super) struct LayoutGuard<'a> {
    pages: &'a HostMemory,
    map: RwLockReadGuard<'a, LayoutMap>,
    /// Whether the run has the layout that it prefers, as far as packing is allowed at all.
    is_final: bool,
}

impl LayoutGuard<'_> {
    /// The version of the map, for [`CpuMemory::lock_layout`]. `None` while packing is delayed: the next run has to check.
    pub(super) fn version(&self) -> Option<u64> {
        self.is_final.then(|| self.map.version())
    }

    /// Counts a run that has got all its memories and begins: after a number of runs, delayed packing is allowed again.
    pub(super) fn count_run(&self, requirements: &LayoutRequirements, base: usize) {
        if !self.is_final {
            requirements.count_run(base, &self.map);
        }
    }

    /// View of a tensor for a kernel; `panels` if the kernel can read panels. `None` if the tensor does not lie inside the
    /// memory.
    ///
    /// # Panics
    /// In debug builds, if some of the tensor's bytes are packed, except as exactly this tensor's panels for a kernel that
    /// reads panels. That is a bug: the layout was locked for other requirements.
    pub(super) fn view<'v>(&'v self, offset: usize, desc: &'v TensorDesc, panels: bool) -> Option<View<'v>> {
        let view = View::new(self.pages, offset, desc)?;
        if panels && PanelSpan::of(offset, desc).is_some_and(|span| self.map.contains(&span)) {
            return Some(view.with_panels());
        }
        debug_assert!(self.map.is_row_major(&(offset..offset + desc.extent())), "{desc:?} overlaps packed panels");
        Some(view)
    }
}
