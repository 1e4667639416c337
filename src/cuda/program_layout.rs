//! What a program needs of the layout of its memory: which tensors it can read packed, and what it reads and writes in rows.

use super::layout::{LayoutMap, PackedSpan};
use crate::poison::lock;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// A span of a slot that launches can read in both layouts.
struct PackableUse {
    slot: usize,
    /// The span from the first byte of the slot on.
    span: PackedSpan,
    /// Whether the span is packed before the program runs.
    packs: bool,
}

/// The layouts that a program needs.
#[derive(Default)]
pub(super) struct ProgramLayout {
    packable: Vec<PackableUse>,
    /// By slot: what launches read or write in rows, sorted and disjoint.
    rows: Vec<Vec<Range<u64>>>,
    /// The last result of `plan`, unless it asked for a conversion.
    cached: Mutex<Option<Cached>>,
}

/// For which addresses and layouts a result holds.
struct Cached {
    key: Vec<u64>,
    packed: Arc<[bool]>,
}

/// A memory of the program's bindings, by index, and a span of it.
pub(super) type SpanOfMemory = (usize, PackedSpan);

/// Which of a program's packable spans are packed, and what to convert first.
pub(super) struct LayoutPlan {
    /// For each packable span.
    pub(super) packed: Arc<[bool]>,
    /// Spans that launches need as rows.
    pub(super) unpack: Vec<SpanOfMemory>,
    /// Spans that would be packed for the program.
    pub(super) pack: Vec<SpanOfMemory>,
}

impl ProgramLayout {
    pub(super) fn new(slots: usize) -> ProgramLayout {
        ProgramLayout { rows: vec![Vec::new(); slots], ..ProgramLayout::default() }
    }

    /// Adds a span that launches read in both layouts, at a byte of a slot, and returns its number. `None` if groups of rows would not
    /// be aligned.
    pub(super) fn add_packable(
        &mut self,
        (slot, offset): (usize, u64),
        span: &PackedSpan,
        packs: bool,
    ) -> Option<usize> {
        let span = span.shifted(offset)?;
        let known = self.packable.iter().position(|known| known.slot == slot && known.span == span);
        let number = known.unwrap_or(self.packable.len());
        match self.packable.get_mut(number) {
            Some(known) => known.packs |= packs,
            None => self.packable.push(PackableUse { slot, span, packs }),
        }
        Some(number)
    }

    /// Adds a range of a slot that launches read or write in rows.
    pub(super) fn add_rows(&mut self, slot: usize, range: Range<u64>) {
        if let Some(rows) = self.rows.get_mut(slot)
            && !range.is_empty()
        {
            rows.push(range);
        }
    }

    /// Sorts what was added. Returns, for each packable span, whether the program packs it; `None` if another launch needs its rows,
    /// so that no launch may read it packed.
    pub(super) fn finish(&mut self) -> Vec<Option<bool>> {
        for rows in &mut self.rows {
            rows.sort_by_key(|range| range.start);
            rows.dedup_by(|next, before| {
                let meets = next.start <= before.end;
                if meets {
                    before.end = before.end.max(next.end);
                }
                meets
            });
        }
        let no_rows = |of: &PackableUse| {
            let rows = self.rows.get(of.slot).map_or(&[][..], Vec::as_slice);
            let next = rows.partition_point(|range| range.end <= of.span.range.start);
            rows.get(next).is_none_or(|range| of.span.range.end <= range.start)
        };
        let may: Vec<_> = self.packable.iter().map(|of| no_rows(of).then_some(of.packs)).collect();
        // What may not be packed is read in rows.
        for (of, _) in self.packable.iter_mut().zip(&may).filter(|(_, may)| may.is_none()) {
            of.packs = false;
            if let Some(rows) = self.rows.get_mut(of.slot) {
                rows.push(of.span.range.clone());
            }
        }
        may
    }

    /// Plans the layouts of a run. `slots` has the memory of each slot, by its index in `maps`, and the byte at which the slot begins;
    /// `addresses` names the memories.
    pub(super) fn plan(&self, slots: &[(usize, u64)], addresses: &[u64], maps: &[&LayoutMap]) -> LayoutPlan {
        let versions = maps.iter().map(|map| map.version());
        let key: Vec<_> = addresses.iter().copied().chain(versions).collect();
        if let Some(cached) = lock(&self.cached).as_ref().filter(|cached| cached.key == key) {
            return LayoutPlan { packed: Arc::clone(&cached.packed), unpack: Vec::new(), pack: Vec::new() };
        }
        let (mut packed, mut unpack, mut pack) = (Vec::with_capacity(self.packable.len()), Vec::new(), Vec::new());
        let mut need_rows = |index: usize, range: Range<u64>| {
            let spans = maps.get(index).map_or_else(Vec::new, |map| map.packed_in(&range));
            let found = !spans.is_empty();
            unpack.extend(spans.into_iter().map(|span| (index, span)));
            found
        };
        for of in &self.packable {
            let Some(&(index, start)) = slots.get(of.slot) else {
                packed.push(false);
                continue;
            };
            let span = of.span.shifted(start);
            let is_packed = maps.get(index).zip(span.as_ref()).is_some_and(|(map, span)| map.is_packed(span));
            packed.push(is_packed);
            let range = of.span.range.start + start..of.span.range.end + start;
            if !is_packed && !need_rows(index, range) && of.packs {
                pack.extend(span.map(|span| (index, span)));
            }
        }
        for (rows, &(index, start)) in self.rows.iter().zip(slots) {
            for range in rows {
                need_rows(index, range.start + start..range.end + start);
            }
        }
        let packed: Arc<[bool]> = packed.into();
        if unpack.is_empty() && pack.is_empty() {
            *lock(&self.cached) = Some(Cached { key, packed: Arc::clone(&packed) });
        }
        LayoutPlan { packed, unpack, pack }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::{DType, TensorDesc};

    /// Weights that can be packed.
    fn span(rows: usize) -> PackedSpan {
        PackedSpan::of(&TensorDesc::contiguous(DType::Q8_0, [8192, rows, 1, 1]).unwrap()).unwrap()
    }

    #[test]
    fn a_span_whose_rows_are_needed_is_not_packed() {
        let bytes = span(8).range.end;
        for (name, rows, packs, may) in [
            ("nothing in rows", vec![], true, Some(true)),
            ("never packed by this program", vec![], false, Some(false)),
            ("beside it", vec![(0, 0..64), (0, 64 + bytes..128 + bytes)], true, Some(true)),
            ("another slot", vec![(1, 0..1 << 20)], true, Some(true)),
            ("nothing of it", vec![(0, 128..128)], true, Some(true)),
            ("its first byte", vec![(0, 0..65)], true, None),
            ("its last byte", vec![(0, 63 + bytes..64 + bytes)], true, None),
            ("all, in pieces", vec![(0, 96..128 + bytes), (0, 0..96)], true, None),
        ] {
            let mut layout = ProgramLayout::new(2);
            assert_eq!(layout.add_packable((0, 64), &span(8), packs), Some(0), "{name}");
            rows.into_iter().for_each(|(slot, range)| layout.add_rows(slot, range));
            assert_eq!(layout.finish(), [may], "{name}");
        }
        // Groups of rows would not be aligned.
        assert_eq!(ProgramLayout::new(1).add_packable((0, 8), &span(8), true), None);
    }

    #[test]
    fn uses_of_one_span_are_one() {
        let mut layout = ProgramLayout::new(2);
        assert_eq!(layout.add_packable((0, 0), &span(8), false), Some(0));
        assert_eq!(layout.add_packable((1, 0), &span(8), false), Some(1));
        assert_eq!(layout.add_packable((0, 0), &span(8), true), Some(0));
        assert_eq!(layout.add_packable((0, 0), &span(16), true), Some(2));
        assert_eq!(layout.finish(), [Some(true), Some(false), Some(true)]);
    }

    /// What a plan converts, and which spans it reads packed, for a weight of 8 rows in slot 0 and rows in slot 1.
    #[test]
    fn plans_follow_the_layout_of_the_memories() {
        let whole = span(16);
        let (first, second) = (span(8), span(8).shifted(span(8).range.end).unwrap());
        let none: Vec<PackedSpan> = Vec::new();
        for (name, packed_before, is_packed, unpack, pack) in [
            ("in rows", none.clone(), false, none.clone(), vec![first.clone()]),
            ("packed", vec![first.clone()], true, none.clone(), none.clone()),
            ("part of a packed tensor", vec![whole.clone()], true, vec![whole.clone()], none.clone()),
            ("the other half", vec![second.clone()], false, vec![second.clone()], vec![first.clone()]),
            ("both halves", vec![first.clone(), second.clone()], true, vec![second.clone()], none.clone()),
        ] {
            let mut layout = ProgramLayout::new(2);
            layout.add_packable((0, 0), &first, true).unwrap();
            layout.add_rows(1, 0..16);
            layout.finish();
            let mut map = LayoutMap::default();
            packed_before.into_iter().for_each(|span| map.set_packed(span));
            // Both slots lie in one memory: slot 1 begins after the weight.
            let (slots, addresses) = ([(0, 0), (0, first.range.end)], [0x1000, 0x1000 + first.range.end]);
            let plan = layout.plan(&slots, &addresses, &[&map]);
            let spans = |list: Vec<SpanOfMemory>| list.into_iter().map(|(_, span)| span).collect::<Vec<_>>();
            assert_eq!(*plan.packed, [is_packed], "{name}");
            assert_eq!((spans(plan.unpack), spans(plan.pack)), (unpack, pack), "{name}");
        }
    }

    #[test]
    fn a_result_is_cached_for_addresses_and_layouts() {
        let mut layout = ProgramLayout::new(1);
        layout.add_packable((0, 0), &span(8), false).unwrap();
        layout.finish();
        let (mut map, other) = (LayoutMap::default(), LayoutMap::default());
        let packed = |map: &LayoutMap, address| layout.plan(&[(0, 0)], &[address], &[map]).packed;
        let first = packed(&map, 0x1000);
        assert!(Arc::ptr_eq(&first, &packed(&map, 0x1000)));
        for again in [packed(&map, 0x2000), packed(&other, 0x1000)] {
            assert!(!Arc::ptr_eq(&first, &again) && *again == [false]);
        }
        map.set_packed(span(8));
        assert_eq!(*packed(&map, 0x1000), [true]);
    }
}
