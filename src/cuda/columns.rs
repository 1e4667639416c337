//! Converted columns: the second operands of products in the form that their kernels read, in scratch memory. Products of the
//! same columns (queries, keys and values; gate and up) share one conversion, until a node writes the tensor.
//!
//! Each conversion gets its own part of the scratch memory, from the launch that writes it to the last one that reads it.

use super::kernel::{ColumnConversion, KernelLaunch, QuantizingLaunch};
use super::program_builder::LayoutCondition;
use crate::graph::SlotOffset;
use crate::tensor::TensorDesc;
use std::ops::{Range, RangeInclusive};

/// Alignment in bytes of the parts.
pub(super) const ALIGNMENT: u64 = 256;

/// Limits of the conversions and of the producers that products are searched for; beyond them, the oldest one is forgotten, and a product
/// converts its columns again.
const MAX_CURRENT: usize = 32;
const MAX_PRODUCERS: usize = 32;

/// A tensor in the memory of a slot.
#[derive(Clone, Copy)]
pub(super) struct Placed {
    pub(super) place: SlotOffset,
    pub(super) desc: TensorDesc,
}

impl Placed {
    /// The bytes from the first to the last element.
    fn bytes(&self) -> Range<usize> {
        self.place.offset..self.place.offset + self.desc.extent()
    }

    pub(super) fn overlaps(&self, other: &Placed) -> bool {
        let (a, b) = (self.bytes(), other.bytes());
        self.place.slot == other.place.slot && a.start < b.end && b.start < a.end
    }

    /// Whether both have the same elements one after the other, whatever their shapes are.
    fn has_elements_of(&self, other: &Placed) -> bool {
        let contiguous = self.desc.is_contiguous() && other.desc.is_contiguous();
        self.place == other.place && contiguous && self.desc.elements() == other.desc.elements()
    }
}

/// A conversion of a program.
struct Conversion {
    source: Placed,
    launch: KernelLaunch,
    /// The launch that writes the table of the columns, if there is one, and its source.
    table: Option<(KernelLaunch, Placed)>,
    /// Indices of these launches; none if the launch that computes the source writes the columns.
    launches: Range<usize>,
    bytes: u64,
    /// Indices of the launch that writes the result and of the last one that reads it.
    used: RangeInclusive<usize>,
}

/// A launch that could also write its result as quantised columns.
struct Producer {
    result: Placed,
    index: usize,
    /// When other launches run instead, which do not write them.
    unless: Option<LayoutCondition>,
    replacements: Vec<QuantizingLaunch>,
}

/// The conversions of a program, in the order of their first launches.
#[derive(Default)]
pub(super) struct ConvertedColumns {
    all: Vec<Conversion>,
    /// Those whose sources are unchanged, by number.
    current: Vec<usize>,
    /// Those whose result is unchanged.
    producers: Vec<Producer>,
}

/// Where converted columns come from.
pub(super) enum ColumnSource {
    /// An earlier launch wrote them.
    Shared,
    /// The launch of this index writes them if it is replaced. Under the condition, they need a launch, the next one.
    Replace(usize, KernelLaunch, Option<(LayoutCondition, KernelLaunch)>),
    /// They need launches, the next ones: that of their table, if they have one, and that of the conversion.
    Launches(Option<KernelLaunch>, KernelLaunch),
}

impl ConvertedColumns {
    /// The number of a conversion of `source`, and where it comes from. `tabulated` is the source of its table. The launches from index
    /// `next` on read it.
    pub(super) fn add(
        &mut self,
        source: Placed,
        tabulated: Option<Placed>,
        conversion: ColumnConversion,
        next: usize,
    ) -> (usize, ColumnSource) {
        let ColumnConversion { launch, table, bytes, group, .. } = conversion;
        let table = table.map(|table| table.launch).zip(tabulated);
        let same_table = |of: &Conversion| match (&of.table, &table) {
            (None, None) => true,
            (Some((a, from)), Some((b, other))) => from.place == other.place && a.is_same(b),
            _ => false,
        };
        let same = |of: &Conversion| of.source.place == source.place && of.launch.is_same(&launch) && same_table(of);
        if let Some(&number) = self.current.iter().find(|&&number| self.all.get(number).is_some_and(same)) {
            return (number, ColumnSource::Shared);
        }
        let number = self.all.len();
        let fits = |of: &QuantizingLaunch| Some(of.group) == group && of.k == source.desc.ne()[0];
        let producer = self.producers.iter_mut().filter(|producer| producer.result.has_elements_of(&source));
        let replaced =
            producer.into_iter().find_map(|producer| Some((producer.replacements.iter().position(fits)?, producer)));
        let (first, launches, from) = match replaced {
            Some((position, producer)) => {
                let replacement = producer.replacements.swap_remove(position).launch;
                // One form for each launch.
                producer.replacements.clear();
                let otherwise = producer.unless.clone().map(|condition| (condition, launch.clone()));
                (producer.index, next..next, ColumnSource::Replace(producer.index, replacement, otherwise))
            }
            None => {
                let before = table.as_ref().map(|(launch, _)| launch.clone());
                let launches = next..next + 1 + usize::from(before.is_some());
                (next, launches, ColumnSource::Launches(before, launch.clone()))
            }
        };
        let last = launches.end.saturating_sub(1).max(next);
        self.all.push(Conversion { source, launch, table, launches, bytes, used: first..=last });
        if self.current.len() == MAX_CURRENT {
            self.current.remove(0);
        }
        self.current.push(number);
        (number, from)
    }

    /// Records that the launch of an index reads a conversion. Returns the indices of the launches that convert.
    pub(super) fn use_at(&mut self, number: usize, index: usize) -> Range<usize> {
        let Some(conversion) = self.all.get_mut(number) else { return 0..0 };
        conversion.used = *conversion.used.start()..=index.max(*conversion.used.end());
        conversion.launches.clone()
    }

    /// Records that a launch writes a tensor.
    pub(super) fn overwrite(&mut self, written: &Placed) {
        let all = &self.all;
        let overlaps = |of: &Conversion| {
            of.source.overlaps(written) || of.table.as_ref().is_some_and(|(_, source)| source.overlaps(written))
        };
        self.current.retain(|&number| all.get(number).is_some_and(|of| !overlaps(of)));
        self.producers.retain(|producer| !producer.result.overlaps(written));
    }

    /// Records that the launch of an index, which has written `result`, can be replaced. It runs unless a condition holds.
    pub(super) fn add_producer(
        &mut self,
        result: Placed,
        index: usize,
        unless: Option<LayoutCondition>,
        replacements: Vec<QuantizingLaunch>,
    ) {
        if !replacements.is_empty() {
            if self.producers.len() == MAX_PRODUCERS {
                self.producers.remove(0);
            }
            self.producers.push(Producer { result, index, unless, replacements });
        }
    }

    /// For each of `launches` launches, whether a later one reads columns that this one or an earlier one writes.
    pub(super) fn alive_behind(&self, launches: usize) -> Vec<bool> {
        let mut changes = vec![0i64; launches];
        for Conversion { used, .. } in self.all.iter().filter(|of| of.used.start() < of.used.end()) {
            for (index, change) in [(*used.start(), 1), (*used.end(), -1)] {
                if let Some(at) = changes.get_mut(index) {
                    *at += change;
                }
            }
        }
        let alive = changes.iter().scan(0, |alive, change| {
            *alive += change;
            Some(*alive > 0)
        });
        alive.collect()
    }

    /// Places the conversions in scratch memory from byte `start` on. Returns the offset of each, and the end.
    pub(super) fn place(&self, start: u64) -> (Vec<u64>, u64) {
        let sizes = self.all.iter().map(|of| (of.used.clone(), of.bytes));
        place_by_lifetime(&sizes.collect::<Vec<_>>(), start)
    }
}

/// Places parts with lifetimes, each at the lowest offset from `start` on that no other part alive has (first fit). Returns the
/// offsets and the end.
pub(super) fn place_by_lifetime(parts: &[(RangeInclusive<usize>, u64)], start: u64) -> (Vec<u64>, u64) {
    let start = start.next_multiple_of(ALIGNMENT);
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by_key(|&part| parts[part].0.start());
    let (mut offsets, mut end) = (vec![start; parts.len()], start);
    // The parts alive, by offset.
    let mut alive: Vec<usize> = Vec::new();
    for part in order {
        let (lifetime, bytes) = &parts[part];
        alive.retain(|&other| parts[other].0.end() >= lifetime.start());
        let mut at = start;
        let mut position = 0;
        for &other in &alive {
            if at + bytes <= offsets[other] {
                break;
            }
            at = (offsets[other] + parts[other].1).next_multiple_of(ALIGNMENT);
            position += 1;
        }
        offsets[part] = at;
        end = end.max(at + bytes);
        alive.insert(position, part);
    }
    (offsets, if parts.is_empty() { 0 } else { end })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_alive_at_a_time_do_not_overlap() {
        // A linear congruential generator; its upper bits.
        let mut state = 11u64;
        let mut below = |n: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 33) % n
        };
        for _ in 0..100 {
            let parts: Vec<_> = (0..30)
                .map(|_| {
                    let first = below(40) as usize;
                    (first..=first + below(8) as usize, 1 + below(2000))
                })
                .collect();
            let (offsets, end) = place_by_lifetime(&parts, 1000);
            for (i, (a, bytes)) in parts.iter().enumerate() {
                assert!(offsets[i] >= 1000 && offsets[i].is_multiple_of(ALIGNMENT) && offsets[i] + bytes <= end);
                for (j, (b, other)) in parts.iter().enumerate().skip(i + 1) {
                    let together = a.start() <= b.end() && b.start() <= a.end();
                    let apart = offsets[i] + bytes <= offsets[j] || offsets[j] + other <= offsets[i];
                    assert!(!together || apart, "{i} and {j}");
                }
            }
        }
    }

    #[test]
    fn memory_of_parts_that_are_no_longer_used_is_used_again() {
        let (offsets, end) = place_by_lifetime(&[(0..=1, 300), (1..=2, 300), (2..=3, 300), (4..=4, 600)], 0);
        assert_eq!((offsets, end), (vec![0, 512, 0, 0], 812));
        assert_eq!(place_by_lifetime(&[], 300), (Vec::new(), 0));
    }
}
