//! Items with lifetimes into as little memory as possible: each gets an offset, and those that live at once share no byte.
//!
//! Optimal packing is NP-hard. Several orders of placing items one by one are tried until one comes close to the least
//! that any packing needs; graphs of networks are nearly always done with the first.

/// Something that needs bytes from one moment to another, both included.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackItem {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) bytes: u64,
}

impl PackItem {
    fn overlaps(&self, other: &PackItem) -> bool {
        self.start <= other.end && other.start <= self.end
    }
}

/// Offsets of items, by item, as if buffers lay one after another.
#[derive(Clone, Debug, Default)]
pub(super) struct Packing {
    pub(super) offsets: Vec<u64>,
    /// One past the last byte.
    pub(super) end: u64,
}

impl Packing {
    /// Buffer and offset of each item, where buffers are `wall` bytes large.
    pub(super) fn allocations(&self, wall: u64) -> impl Iterator<Item = (u32, u64)> {
        self.offsets.iter().map(move |offset| ((offset / wall) as u32, offset % wall))
    }

    /// What is used of each buffer.
    pub(super) fn buffer_sizes(&self, items: &[PackItem], wall: u64) -> Vec<u64> {
        let mut chunks = Vec::new();
        for ((chunk, offset), item) in self.allocations(wall).zip(items) {
            let chunk = chunk as usize;
            chunks.resize(chunks.len().max(chunk + 1), 0);
            chunks[chunk] = (offset + item.bytes).max(chunks[chunk]);
        }
        chunks
    }
}

/// How much more than the least is good enough not to look further: one part in so many.
const GOOD_ENOUGH_FRACTION: u64 = 32;

/// Comparisons of two items that may be spent on each kind of first order.
const MAX_COMPARISONS: usize = 1 << 22;

/// How often an order is changed at most.
const MAX_ROUNDS: usize = 12;

/// Packs items so that none straddles a multiple of `wall`.
pub(super) fn pack(items: &[PackItem], wall: u64) -> Packing {
    let least = peak_bytes(items);
    let good = least + least / GOOD_ENOUGH_FRACTION;
    let mut by_start: Vec<usize> = (0..items.len()).collect();
    by_start.sort_by_key(|&i| (items[i].start, std::cmp::Reverse(items[i].bytes)));
    let mut best = place_in_order(items, &by_start, wall, FitRule::BestFit, true);
    let rounds = MAX_COMPARISONS / (items.len() * items.len()).max(1);
    // From large ones first to those first that take much room for long.
    for power in [0.0, 1.0, 0.5, 0.25, 2.0] {
        let weight =
            |i: usize| (items[i].bytes as f64).ln() + power * ((items[i].end - items[i].start + 1) as f64).ln();
        let mut by_weight: Vec<usize> = (0..items.len()).collect();
        by_weight.sort_by(|&a, &b| weight(b).total_cmp(&weight(a)).then(items[a].start.cmp(&items[b].start)));
        for gap in [FitRule::FirstFit, FitRule::BestFit] {
            let mut order = by_weight.clone();
            for _ in 0..rounds.min(MAX_ROUNDS) {
                if best.end <= good {
                    return best;
                }
                let found = place_in_order(items, &order, wall, gap, false);
                // What came out on top is placed earlier the next time.
                order.sort_by_key(|&i| found.offsets[i] + items[i].bytes <= good);
                if found.end < best.end {
                    best = found;
                }
            }
        }
    }
    best
}

/// Places each item beside all others, also those that live at another time.
pub(super) fn pack_disjoint(items: &[PackItem], wall: u64) -> Packing {
    let mut packed = Packing { offsets: vec![0; items.len()], end: 0 };
    let mut order: Vec<usize> = (0..items.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(items[i].bytes));
    // One past the last byte used of each buffer.
    let mut ends: Vec<u64> = Vec::new();
    for i in order {
        let bytes = items[i].bytes;
        let found = ends.iter().position(|&end| wall - end >= bytes);
        let chunk = found.unwrap_or(ends.len());
        ends.resize(ends.len().max(chunk + 1), 0);
        packed.offsets[i] = chunk as u64 * wall + ends[chunk];
        ends[chunk] += bytes;
        packed.end = packed.end.max(packed.offsets[i] + bytes);
    }
    packed
}

/// The most bytes that live at one moment.
pub(super) fn peak_bytes(items: &[PackItem]) -> u64 {
    let starts = items.iter().map(|item| (item.start, true, item.bytes));
    let mut moments: Vec<_> = starts.chain(items.iter().map(|item| (item.end + 1, false, item.bytes))).collect();
    moments.sort_unstable();
    let (mut now, mut most) = (0, 0);
    for (_, begins, bytes) in moments {
        now = if begins { now + bytes } else { now - bytes };
        most = most.max(now);
    }
    most
}

/// Which of the gaps that are large enough an item gets.
#[derive(Clone, Copy)]
enum FitRule {
    FirstFit,
    BestFit,
}

/// An item that has its place.
struct Placed {
    from: u64,
    to: u64,
    item: PackItem,
}

/// Gives each item in turn a gap between those that were placed before and live at the same time. Where items come in order
/// of their starts, those that have ended need not be looked at again.
fn place_in_order(items: &[PackItem], order: &[usize], wall: u64, gap: FitRule, in_time: bool) -> Packing {
    let mut packed = Packing { offsets: vec![0; items.len()], end: 0 };
    let mut placed: Vec<Placed> = Vec::with_capacity(items.len());
    for &i in order {
        let item = items[i];
        if in_time {
            placed.retain(|other| other.item.end >= item.start);
        }
        let (mut free, mut found) = (0, None);
        for other in placed.iter().filter(|other| other.item.overlaps(&item)) {
            if other.from > free {
                let at = next_fit_in_buffer(free, item.bytes, wall);
                let left = (other.from - free).checked_sub(item.bytes).filter(|_| at + item.bytes <= other.from);
                if let Some(left) = left.filter(|left| found.is_none_or(|(least, _)| *left < least)) {
                    found = Some((left, at));
                    if matches!(gap, FitRule::FirstFit) {
                        break;
                    }
                }
            }
            free = free.max(other.to);
        }
        let from = found.map_or_else(|| next_fit_in_buffer(free, item.bytes, wall), |(_, at)| at);
        let to = from + item.bytes;
        packed.offsets[i] = from;
        packed.end = packed.end.max(to);
        placed.insert(placed.partition_point(|other| other.from < from), Placed { from, to, item });
    }
    packed
}

/// The first offset from `free` on where an item lies in one buffer.
fn next_fit_in_buffer(free: u64, bytes: u64, wall: u64) -> u64 {
    if free % wall + bytes <= wall { free } else { free.next_multiple_of(wall) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fastrand::Rng;

    type Make = fn(&mut Rng, usize) -> Vec<PackItem>;

    /// Any lifetimes and sizes; lifetimes of all lengths and sizes that are powers of two; as graphs of networks have them.
    const KINDS: [Make; 3] = [
        |rng, n| {
            let item =
                |start: usize, rng: &mut Rng| PackItem { start, end: start + rng.usize(0..8), bytes: rng.u64(1..100) };
            (0..n).map(|_| item(rng.usize(0..n), rng)).collect()
        },
        |rng, n| {
            let item = |start: usize, life: usize, rng: &mut Rng| PackItem {
                start,
                end: start + rng.usize(0..life),
                bytes: 1 << rng.u32(0..10),
            };
            (0..n).map(|_| item(rng.usize(0..n), 1 << rng.u32(0..8), rng)).collect()
        },
        |rng, n| {
            let life = |rng: &mut Rng| if rng.u8(0..8) == 0 { rng.usize(0..40) } else { rng.usize(0..3) };
            let item = |(start, rng): (usize, &mut Rng)| PackItem {
                start,
                end: start + life(rng),
                bytes: [1, 4, 4, 4, 12, 32][rng.usize(0..6)],
            };
            (0..n).map(|start| item((start, rng))).collect()
        },
    ];

    fn check(items: &[PackItem], packed: &Packing, wall: u64, apart: impl Fn(&PackItem, &PackItem) -> bool) {
        let chunks = packed.buffer_sizes(items, wall);
        assert!(chunks.iter().all(|&bytes| bytes <= wall));
        let spots: Vec<(u32, u64)> = packed.allocations(wall).collect();
        assert_eq!(spots.len(), items.len());
        for (i, (a, (chunk, from))) in items.iter().zip(&spots).enumerate() {
            assert!(from + a.bytes <= chunks[*chunk as usize], "{a:?} reaches past its buffer");
            for (b, (other, at)) in items.iter().zip(&spots).take(i) {
                let meet = chunk == other && *from < at + b.bytes && *at < from + a.bytes;
                assert!(!meet || apart(a, b), "{a:?} and {b:?} share bytes");
            }
        }
    }

    #[test]
    fn what_lives_at_once_shares_no_byte() {
        let mut rng = Rng::with_seed(1);
        for make in KINDS {
            for round in 0..60 {
                let items = make(&mut rng, 1 + round);
                let largest = items.iter().map(|item| item.bytes).max().unwrap();
                for wall in [1 << 40, largest, 2 * largest] {
                    check(&items, &pack(&items, wall), wall, |a, b| !a.overlaps(b));
                    check(&items, &pack_disjoint(&items, wall), wall, |_, _| false);
                }
            }
        }
        assert_eq!(pack(&[], 64).end, 0);
    }

    #[test]
    fn little_more_than_the_least_is_used() {
        let mut rng = Rng::with_seed(2);
        for make in KINDS {
            for (n, rounds) in [(10, 100), (40, 100), (200, 20)] {
                let mut over = 0;
                for _ in 0..rounds {
                    let items = make(&mut rng, n);
                    // Sometimes nothing can be as small as the largest set.
                    let (least, end) = (peak_bytes(&items), pack(&items, 1 << 40).end);
                    assert!(end >= least && end * 20 <= least * 23, "{end} bytes for {least}: {items:?}");
                    over += usize::from(end * 10 > least * 11);
                }
                assert!(over <= 1, "{over} of {rounds} with {n} items");
            }
        }
    }
}
