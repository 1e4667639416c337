//! Layout of a device memory: which ranges hold repacked weights.
//!
//! Block types put scales and codes of a few weights side by side, so a thread would read a block by loads of one or two bytes.
//! Products are fast if the codes of a row lie side by side, and its scales after them. Repacking permutes the
//! bytes of a weight in this way, in place: the groups of rows of [`PackedLayout`] keep their size and place.
//!
//! The layout is invisible outside of the device:
//! - The first product that reads a weight packs it, in the order of its stream.
//! - Products, and GET_ROWS, read both layouts. A program with another use of a packed weight, a download or a write to a part of it
//!   unpacks the weight first, which delays packing it again ([`RepackDelays`]).
//!
//! # Order and locks
//! Queues may share a memory and read it at the same time, without points that order them. A conversion writes what all of them
//! read, so each memory has a lock over its layout ([`MemoryLayout`]): accesses hold it shared while they are submitted, and a
//! conversion exclusively. On the device, a conversion is ordered after all earlier accesses: weights are packed only while no other
//! stream that uses the memory has work, and before one is unpacked the host waits for that work. Later accesses of other streams
//! are submitted once the conversion is done.
//!
//! A thread locks several memories in the order of their addresses, holds the locks while it waits for a turn, and waits for no
//! lock while it has a turn, and for no pinned memory while it has a lock. Packing never waits for a lock: without it, products read
//! the weight as it is.

use super::events::{Event, Stream};
use super::ops::can_pack;
use crate::device::{DeviceError, MIN_PACKED_BYTES, RepackDelays, next_layout_version};
use crate::poison::Unpoisoned;
use crate::poison::lock;
use crate::tensor::{DType, TensorDesc};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError, Weak};

/// Loads of packed weights are this wide, in bytes: groups of rows are multiples of it.
const LOAD_BYTES: u64 = 16;

/// Largest group in bytes: it is converted within the shared memory of one block of threads (PACK_SHARED_BYTES of kernels/mul_mat.cu).
const MAX_GROUP_BYTES: u64 = 48 << 10;

/// How rows of a type and length are packed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct PackedLayout {
    pub(super) dtype: DType,
    pub(super) row_bytes: u64,
}

impl PackedLayout {
    /// Rows that are packed together: as few as make a multiple of the widest load.
    pub(super) fn group_rows(self) -> u64 {
        (0..)
            .map(|log2| 1 << log2)
            .find(|rows| (rows * self.row_bytes).is_multiple_of(LOAD_BYTES))
            .unwrap_or(LOAD_BYTES)
    }

    fn group_bytes(self) -> u64 {
        self.group_rows() * self.row_bytes
    }
}

/// A range of a memory, in bytes, that consists of whole groups of rows.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct PackedSpan {
    pub(super) range: Range<u64>,
    pub(super) layout: PackedLayout,
}

impl PackedSpan {
    /// The span of a tensor at byte 0; `None` if it cannot be packed. What can be packed is a contiguous tensor of a block type with
    /// products on the GPU, and each of its matrices has whole groups of rows.
    pub(super) fn of(tensor: &TensorDesc) -> Option<PackedSpan> {
        let dtype = tensor.dtype();
        if !can_pack(dtype) || tensor.is_empty() || !tensor.is_contiguous() {
            return None;
        }
        let layout = PackedLayout { dtype, row_bytes: tensor.row_bytes() as u64 };
        let bytes = tensor.extent() as u64;
        let fits = bytes >= MIN_PACKED_BYTES as u64
            && layout.group_bytes() <= MAX_GROUP_BYTES
            && (tensor.ne()[1] as u64).is_multiple_of(layout.group_rows());
        fits.then_some(PackedSpan { range: 0..bytes, layout })
    }

    /// The same span, `by` bytes further. `None` if groups would not be aligned there.
    pub(super) fn shifted(&self, by: u64) -> Option<PackedSpan> {
        let range = self.range.start.checked_add(by)?..self.range.end.checked_add(by)?;
        range.start.is_multiple_of(LOAD_BYTES).then_some(PackedSpan { range, layout: self.layout })
    }

    /// Number of groups of rows.
    pub(super) fn groups(&self) -> u64 {
        (self.range.end - self.range.start) / self.layout.group_bytes()
    }

    /// Whether `inner` consists of groups of this span.
    fn contains(&self, inner: &PackedSpan) -> bool {
        self.range.start <= inner.range.start
            && inner.range.end <= self.range.end
            && self.layout == inner.layout
            && (inner.range.start - self.range.start).is_multiple_of(self.layout.group_bytes())
    }
}

/// Which ranges of a memory are packed, and which may not be packed for now. Plain data.
#[derive(Debug)]
pub(super) struct LayoutMap {
    /// Packed spans by their first byte; disjoint.
    packed: BTreeMap<u64, PackedSpan>,
    delays: RepackDelays,
    /// Changes with the map, and is unique in the process.
    version: u64,
}

impl Default for LayoutMap {
    fn default() -> LayoutMap {
        LayoutMap { packed: BTreeMap::new(), delays: RepackDelays::default(), version: next_layout_version() }
    }
}

/// A range of a memory as [`RepackDelays`] has it.
fn to_usize(range: &Range<u64>) -> Range<usize> {
    range.start as usize..range.end as usize
}

impl LayoutMap {
    /// Changes whenever the map does. No two memories have the same version.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    /// Whether the span holds packed weights of its layout.
    pub(super) fn is_packed(&self, span: &PackedSpan) -> bool {
        let at = self.packed.range(..=span.range.start).next_back();
        at.is_some_and(|(_, packed)| packed.contains(span))
    }

    /// The packed spans that overlap a range.
    pub(super) fn packed_in(&self, range: &Range<u64>) -> Vec<PackedSpan> {
        if range.is_empty() {
            return Vec::new();
        }
        let before = self.packed.range(..range.start).next_back().filter(|(_, span)| span.range.end > range.start);
        before.into_iter().chain(self.packed.range(range.clone())).map(|(_, span)| span.clone()).collect()
    }

    /// Whether a span may be packed now: nothing in it is packed, and no delay is left. Counts the run, which wants it packed.
    pub(super) fn try_begin_pack(&mut self, span: &PackedSpan) -> bool {
        let range = to_usize(&span.range);
        let is_delayed = self.delays.is_delayed(&range);
        self.delays.count_run(&range);
        !is_delayed && self.packed_in(&span.range).is_empty()
    }

    /// Records that a span is packed now.
    pub(super) fn set_packed(&mut self, span: PackedSpan) {
        self.version = next_layout_version();
        self.packed.insert(span.range.start, span);
    }

    /// Records that a packed span holds rows now, because something needed rows.
    pub(super) fn set_unpacked(&mut self, span: &PackedSpan) {
        self.version = next_layout_version();
        self.packed.remove(&span.range.start);
        let range = to_usize(&span.range);
        self.delays.begin(range.clone());
        self.delays.finish(&range);
    }

    /// Forgets what was within a range, whose bytes are all written. Spans that reach beyond it stay.
    pub(super) fn overwrite(&mut self, range: &Range<u64>) {
        for span in self.packed_in(range) {
            if range.start <= span.range.start && span.range.end <= range.end {
                self.packed.remove(&span.range.start);
                self.version = next_layout_version();
            }
        }
        self.delays.forget(&to_usize(range));
    }

    /// Whether nothing is packed and nothing delayed.
    pub(super) fn is_empty(&self) -> bool {
        self.packed.is_empty() && self.delays.is_empty()
    }
}

/// The layout of a memory, and the streams that use the memory.
#[derive(Debug, Default)]
pub(super) struct MemoryLayout {
    map: RwLock<LayoutMap>,
    users: Mutex<LayoutUsers>,
}

/// The last conversion, and the streams with accesses.
#[derive(Debug, Default)]
struct LayoutUsers {
    conversion: Option<Arc<Conversion>>,
    /// Each with the number of the last conversion that it is ordered after.
    streams: Vec<(Weak<Stream>, u64)>,
}

/// A conversion that was submitted.
#[derive(Debug)]
pub(super) struct Conversion {
    /// Counts the conversions of a memory.
    number: u64,
    /// Recorded after the conversion.
    pub(super) event: Event,
}

impl LayoutUsers {
    /// Number of the last conversion.
    fn last(&self) -> u64 {
        self.conversion.as_ref().map_or(0, |conversion| conversion.number)
    }

    /// Records that a stream is ordered after the last conversion. Returns whether it was so before.
    fn mark_behind(&mut self, stream: &Arc<Stream>) -> bool {
        let number = self.last();
        let same = |user: &Weak<Stream>| std::ptr::eq(user.as_ptr(), Arc::as_ptr(stream));
        if let Some((_, behind)) = self.streams.iter_mut().find(|(user, _)| same(user)) {
            return std::mem::replace(behind, number) == number;
        }
        self.streams.retain(|(user, _)| user.strong_count() > 0);
        self.streams.push((Arc::downgrade(stream), number));
        number == 0
    }
}

impl MemoryLayout {
    /// The map, for an access that is submitted while the guard is held.
    pub(super) fn read(&self) -> RwLockReadGuard<'_, LayoutMap> {
        // A panic leaves the map whole: each change is one call.
        self.map.read().unpoisoned()
    }

    /// The map, for a conversion. Waits for the accesses that other threads are submitting.
    pub(super) fn write(&self) -> RwLockWriteGuard<'_, LayoutMap> {
        self.map.write().unpoisoned()
    }

    /// As `write`, if no other thread has the lock.
    pub(super) fn try_write(&self) -> Option<RwLockWriteGuard<'_, LayoutMap>> {
        match self.map.try_write() {
            Ok(map) => Some(map),
            Err(TryLockError::Poisoned(e)) => Some(e.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Records that a stream accesses the memory. If nothing orders the stream after the last conversion, returns that conversion,
    /// for which the caller waits before it submits the access. The caller has the lock of the map.
    pub(super) fn begin_access(&self, stream: &Arc<Stream>) -> Option<Arc<Conversion>> {
        let mut users = lock(&self.users);
        if users.mark_behind(stream) { None } else { users.conversion.clone() }
    }

    /// Records that a stream, which has accessed the memory, is not ordered after the last conversion.
    pub(super) fn mark_unordered(&self, stream: &Arc<Stream>) {
        let mut users = lock(&self.users);
        let same = |(user, _): &&mut (Weak<Stream>, u64)| std::ptr::eq(user.as_ptr(), Arc::as_ptr(stream));
        if let Some((_, behind)) = users.streams.iter_mut().find(same) {
            *behind = 0;
        }
    }

    /// The other streams that have accessed the memory.
    pub(super) fn other_streams(&self, stream: &Arc<Stream>) -> Vec<Arc<Stream>> {
        let users = lock(&self.users);
        users.streams.iter().filter_map(|(user, _)| user.upgrade()).filter(|user| !Arc::ptr_eq(user, stream)).collect()
    }

    /// Records a conversion on a stream, with the event after it. The caller has the map for writing. Dropping the event before it
    /// may make another context current.
    pub(super) fn set_conversion(&self, stream: &Arc<Stream>, event: Event) {
        let mut users = lock(&self.users);
        let number = users.last() + 1;
        let before = users.conversion.replace(Arc::new(Conversion { number, event }));
        // The stream is ordered after its own conversion.
        users.mark_behind(stream);
        drop(users);
        drop(before);
    }

    /// Whether no other stream that uses the memory has work.
    pub(super) fn is_unused_by_others(&self, stream: &Arc<Stream>) -> Result<bool, DeviceError> {
        for other in self.other_streams(stream) {
            if !other.is_idle()? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::FIRST_REPACK_DELAY;
    use std::collections::BTreeSet;

    fn tensor(dtype: DType, ne: [usize; 4]) -> TensorDesc {
        TensorDesc::contiguous(dtype, ne).unwrap()
    }

    fn span(dtype: DType, ne: [usize; 4], at: u64) -> PackedSpan {
        PackedSpan::of(&tensor(dtype, ne)).unwrap().shifted(at).unwrap()
    }

    #[test]
    fn groups_are_multiples_of_the_widest_load() {
        use DType::{MXFP4, Q2_K, Q3_K, Q4_0, Q4_K, Q5_K, Q6_K, Q8_0};
        for (dtype, k, rows) in [
            (Q4_0, 256, 1),
            (Q4_0, 32, 8),
            (Q8_0, 256, 1),
            (Q8_0, 4096, 1),
            (Q8_0, 96, 8),
            (MXFP4, 512, 1),
            (MXFP4, 32, 16),
            (Q4_K, 256, 1),
            (Q5_K, 3584, 1),
            (Q6_K, 2048, 1),
            (Q6_K, 3584, 4),
            (Q3_K, 256, 8),
            (Q2_K, 256, 4),
        ] {
            let layout = PackedLayout { dtype, row_bytes: dtype.row_bytes(k).unwrap() as u64 };
            assert_eq!(layout.group_rows(), rows, "{dtype}, {k}");
        }
    }

    #[test]
    fn only_whole_weights_of_block_types_are_packed() {
        use DType::{F16, IQ2_XXS, Q4_K, Q6_K};
        let of = |dtype, ne| PackedSpan::of(&tensor(dtype, ne)).map(|span| (span.range.end, span.groups()));
        assert_eq!(of(Q4_K, [256, 128, 1, 1]), Some((18432, 128)));
        assert_eq!(of(Q4_K, [256, 64, 3, 2]), Some((144 * 384, 384)));
        assert_eq!(of(Q4_K, [256, 113, 1, 1]), None, "below 16 KiB");
        assert_eq!(of(Q6_K, [256, 127, 1, 1]), None, "a part of a group");
        assert_eq!(of(Q6_K, [256, 4, 40, 1]), None, "a matrix with a part of a group");
        assert_eq!(of(Q6_K, [256, 128, 1, 1]), Some((26880, 16)));
        assert_eq!(of(F16, [256, 128, 1, 1]), None);
        assert_eq!(of(IQ2_XXS, [256, 512, 1, 1]), None, "no products on the GPU");
        assert_eq!(of(Q6_K, [1 << 20, 16, 1, 1]), None, "a group beyond the shared memory");
        assert_eq!(PackedSpan::of(&tensor(Q4_K, [256, 128, 1, 1])).unwrap().shifted(8), None);
    }

    #[test]
    fn parts_of_a_packed_weight_are_packed_if_they_are_groups() {
        let mut map = LayoutMap::default();
        let whole = span(DType::Q6_K, [256, 128, 1, 1], 64);
        assert!(map.try_begin_pack(&whole));
        let before = map.version();
        map.set_packed(whole.clone());
        assert_ne!(map.version(), before);
        assert!(map.is_packed(&whole));
        let part = |row: u64| PackedSpan { range: 64 + 210 * row..64 + 210 * (row + 16), layout: whole.layout };
        assert!(map.is_packed(&part(8)) && map.is_packed(&part(112)));
        assert!(!map.is_packed(&part(4)), "not a group");
        assert!(!map.is_packed(&part(120)), "beyond the end");
        let other = PackedLayout { dtype: DType::Q6_K, row_bytes: 420 };
        assert!(!map.is_packed(&PackedSpan { range: part(8).range, layout: other }));
        for (range, count) in
            [(0..64, 0), (0..65, 1), (64 + 26880..1 << 30, 0), (64 + 26879..1 << 30, 1), (100..101, 1)]
        {
            assert_eq!(map.packed_in(&range).len(), count, "{range:?}");
        }
        assert!(!map.try_begin_pack(&part(4)), "it would overlap");
    }

    #[test]
    fn what_was_unpacked_stays_so_for_a_while() {
        let mut map = LayoutMap::default();
        let weight = span(DType::Q4_K, [256, 128, 1, 1], 0);
        let unpack = |map: &mut LayoutMap| {
            assert!(map.try_begin_pack(&weight));
            map.set_packed(weight.clone());
            map.set_unpacked(&weight);
        };
        unpack(&mut map);
        for run in 0..FIRST_REPACK_DELAY {
            assert!(!map.try_begin_pack(&weight), "run {run}");
        }
        unpack(&mut map);
        map.overwrite(&weight.range);
        assert!(map.try_begin_pack(&weight), "an upload ends the delay");
        assert!(map.is_empty());
    }

    #[test]
    fn an_upload_over_a_packed_weight_removes_it() {
        let mut map = LayoutMap::default();
        let [first, second] = [0, 18432].map(|at| span(DType::Q4_K, [256, 128, 1, 1], at));
        map.set_packed(first.clone());
        map.set_packed(second.clone());
        let before = map.version();
        map.overwrite(&(0..20000));
        assert_ne!(map.version(), before);
        assert_eq!(map.packed_in(&(0..40000)), [second]);
    }

    /// The map against a model with one entry per byte, in random orders.
    #[test]
    fn random_changes_agree_with_a_model() {
        const BYTES: u64 = 4 * 18432;
        // A linear congruential generator; its upper bits.
        let mut state = 7u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        let mut map = LayoutMap::default();
        let mut model = vec![None; BYTES as usize];
        for step in 0..2000 {
            let rows = 114 + below(64);
            let bytes = rows * 144;
            let at = below(BYTES - bytes + 1) / 16 * 16;
            let layout = PackedLayout { dtype: DType::Q4_K, row_bytes: 144 };
            let span = PackedSpan { range: at..at + bytes, layout };
            let bytes = at as usize..(at + bytes) as usize;
            match below(3) {
                0 if map.try_begin_pack(&span) => {
                    assert!(model[bytes.clone()].iter().all(Option::is_none), "step {step}");
                    map.set_packed(span);
                    model[bytes].fill(Some(step));
                }
                1 => {
                    for packed in map.packed_in(&span.range) {
                        map.set_unpacked(&packed);
                        model[packed.range.start as usize..packed.range.end as usize].fill(None);
                    }
                    assert!(model[bytes].iter().all(Option::is_none), "step {step}");
                }
                _ => {
                    map.overwrite(&span.range);
                    let inside: BTreeSet<u32> = model[bytes.clone()].iter().flatten().copied().collect();
                    for packed in inside {
                        let count = |part: &[Option<u32>]| part.iter().filter(|&&b| b == Some(packed)).count();
                        if count(&model[bytes.clone()]) == count(&model) {
                            model.iter_mut().filter(|b| **b == Some(packed)).for_each(|b| *b = None);
                        }
                    }
                }
            }
            let all = map.packed_in(&(0..BYTES));
            let packed: u64 = all.iter().map(|span| span.range.end - span.range.start).sum();
            assert_eq!(packed as usize, model.iter().flatten().count(), "step {step}");
        }
    }
}
