//! Conversions, fills and copies that give way in their middle.

use super::*;
use crate::graph::SlotOffset;

/// Bytes before the tensor.
const AT: usize = 64;

fn tensor() -> TensorDesc {
    TensorDesc::contiguous(DType::Q4_0, [K, M, 1, 1]).unwrap()
}

/// The panels of [`tensor`].
const PANELS: usize = M / 16;

fn requirements(access: LayoutAccess) -> LayoutRequirements {
    let mut uses = TensorUses::new(1);
    uses.add(SlotOffset { slot: 0, offset: AT }, &tensor(), access);
    uses.requirements().remove(0)
}

/// A memory of two tensors side by side, and its content.
fn random_memory() -> (CpuMemory, Vec<u8>) {
    let n = AT + 2 * tensor().extent();
    let (memory, mut rng) = (CpuMemory::zeroed(n, &MemoryBudget::new(u64::MAX)).unwrap(), Rng::with_seed(8));
    let content: Vec<u8> = (0..n).map(|_| rng.u8(..)).collect();
    memory.write(0, &content, Locking::WAIT).unwrap();
    (memory, content)
}

/// The layout of the tensor: panels, rows, or a part of both.
#[derive(PartialEq, Clone, Copy, Debug)]
enum Found {
    Panels,
    Rows,
    Part,
}

fn found(memory: &CpuMemory) -> Found {
    let (map, span) = (memory.read_map(), PanelSpan::of(AT, &tensor()).unwrap());
    match (map.contains(&span), map.is_row_major(&span.range)) {
        (true, _) => Found::Panels,
        (_, true) => Found::Rows,
        _ => Found::Part,
    }
}

/// A turn of a program; true if it got the layout.
fn turn(memory: &CpuMemory, pool: &Pool, access: LayoutAccess) -> bool {
    let (requirements, locking) = (requirements(access), Locking::GiveWay(&|| true));
    memory.lock_layout([(&requirements, 0)].into_iter(), None, pool, locking).unwrap().is_some()
}

/// From each state between rows and panels, on the way there and back, every access sees the right bytes and ends in a layout
/// that stays.
#[test]
fn a_tensor_packed_in_part_serves_every_access() {
    type Access = fn(&CpuMemory, &Pool, &[u8]) -> bool;
    let cases: [(&str, Found, Access); 4] = [
        ("a product", Found::Panels, |m, pool, _| turn(m, pool, LayoutAccess::PreferPanels)),
        ("an embedding", Found::Panels, |m, pool, _| turn(m, pool, LayoutAccess::RowsOrPanels)),
        ("a write by a node", Found::Rows, |m, pool, _| turn(m, pool, LayoutAccess::Rows)),
        ("an upload of the whole", Found::Rows, |m, _, content| {
            let bytes = &content[AT..AT + tensor().extent()];
            m.write(AT, bytes, Locking::GiveWay(&|| true)).unwrap().is_some()
        }),
    ];
    let pool = Pool::new(1).unwrap();
    for (name, end, access) in cases {
        for (packed, unpacked) in (1..PANELS).step_by(7).map(|n| (n, 0)).chain([(PANELS, 1), (PANELS, PANELS / 2)]) {
            let (memory, mut content) = random_memory();
            (0..packed).for_each(|_| _ = turn(&memory, &pool, LayoutAccess::PreferPanels));
            (0..unpacked).for_each(|_| _ = turn(&memory, &pool, LayoutAccess::Rows));
            assert_eq!(found(&memory), Found::Part, "{packed} {unpacked}");
            assert!(content_as_rows(&memory) == content);
            // Transfers see and write rows, and leave the state as it is.
            assert!(
                read(&memory, 0, content.len()) == content && read(&memory, AT + 1000, 7) == content[AT + 1000..][..7]
            );
            let edge = AT + packed * tensor().extent() / PANELS - 300;
            memory.write(edge, &[5; 600], Locking::WAIT).unwrap();
            content[edge..edge + 600].fill(5);
            assert_eq!(found(&memory), Found::Part, "{packed} {unpacked}");
            assert!(content_as_rows(&memory) == content);
            let mut turns = 1;
            while !access(&memory, &pool, &content) {
                turns += 1;
                assert!(turns <= 2 * PANELS, "{name} after {packed} and {unpacked} panels has no end");
                assert!(
                    content_as_rows(&memory) == content,
                    "{name} after {packed} and {unpacked} panels, turn {turns}"
                );
            }
            // On the way back to rows, no access packs the tensor again.
            let end = if unpacked > 0 && end == Found::Panels { Found::Rows } else { end };
            assert!(found(&memory) == end, "{name} after {packed} and {unpacked} panels");
            assert!(content_as_rows(&memory) == content && memory.read_map().packed().len() <= 1);
        }
    }
}

/// Two queues that use a tensor in different ways, turn by turn: neither undoes the other's work for ever.
#[test]
fn opposite_uses_of_a_tensor_reach_an_end() {
    for workers in [1, 3] {
        let pool = Pool::new(workers).unwrap();
        for head_start in [0, 1, PANELS / 2, PANELS] {
            let (memory, content) = random_memory();
            (0..head_start).for_each(|_| _ = turn(&memory, &pool, LayoutAccess::PreferPanels));
            let (mut product, mut write, mut turns) = (false, false, 0);
            while !(product && write) {
                product |= turn(&memory, &pool, LayoutAccess::PreferPanels);
                write |= turn(&memory, &pool, LayoutAccess::Rows);
                turns += 1;
                assert!(turns <= 2 * PANELS, "{workers} workers, head start {head_start}");
            }
            // Packing is delayed, so both find the layout as it is for a while.
            while !turn(&memory, &pool, LayoutAccess::Rows) {}
            let version = memory.read_map().version();
            assert!(turn(&memory, &pool, LayoutAccess::PreferPanels) && turn(&memory, &pool, LayoutAccess::Rows));
            assert_eq!(memory.read_map().version(), version);
            assert!(row_content(&memory) == content);
        }
    }
}

/// Two slots with overlapping tensors of the same rows, before another packed tensor: where packing gives way, the map takes back
/// what belongs to them only.
#[test]
fn overlapping_tensors_that_give_way_leave_their_neighbour_packed() {
    let half = TensorDesc::contiguous(DType::Q4_0, [K, M / 2, 1, 1]).unwrap();
    let mut uses = TensorUses::new(1);
    uses.add(SlotOffset { slot: 0, offset: AT }, &half, LayoutAccess::PreferPanels);
    let (first, whole) = (uses.requirements().remove(0), requirements(LayoutAccess::PreferPanels));
    let (pool, (memory, content)) = (Pool::new(1).unwrap(), random_memory());
    let at_neighbour = [(&whole, tensor().extent())];
    drop(memory.lock_layout(at_neighbour.into_iter(), None, &pool, Locking::WAIT).unwrap());
    let mut turns = 1;
    let slots = [(&first, 0), (&whole, 0)];
    while memory.lock_layout(slots.into_iter(), None, &pool, Locking::GiveWay(&|| true)).unwrap().is_none() {
        turns += 1;
        assert!(content_as_rows(&memory) == content && turns <= 2 * PANELS, "turn {turns}");
        let neighbour = PanelSpan::of(AT, &tensor()).unwrap().shifted(tensor().extent()).unwrap();
        assert!(memory.read_map().contains(&neighbour), "turn {turns}");
    }
    assert!(found(&memory) == Found::Panels && row_content(&memory) == content);
}

/// While a conversion to rows gives way, no number of runs on a part of the tensor lets another program pack it back.
#[test]
fn a_conversion_to_rows_ends_whatever_runs_are_counted() {
    let part = TensorDesc::contiguous(DType::Q4_0, [K, 16, 1, 1]).unwrap();
    let mut uses = TensorUses::new(1);
    uses.add(SlotOffset { slot: 0, offset: AT }, &part, LayoutAccess::RowsOrPanels);
    let of_part = uses.requirements().remove(0);
    let (pool, (memory, content)) = (Pool::new(1).unwrap(), random_memory());
    while !turn(&memory, &pool, LayoutAccess::PreferPanels) {}
    let whole = requirements(LayoutAccess::PreferPanels);
    let mut turns = 1;
    while !turn(&memory, &pool, LayoutAccess::Rows) {
        let span = PanelSpan::of(AT, &tensor()).unwrap();
        (0..2000).for_each(|_| memory.read_map().delays.count_run(&span.range));
        assert!(memory.read_map().delays.is_delayed(&span.range) && memory.read_map().unpacked_rests(&span).is_empty());
        let guard = memory.lock_layout([(&of_part, 0)].into_iter(), None, &pool, Locking::GiveWay(&|| true)).unwrap();
        drop(guard);
        turns += 1;
        assert!(turns <= PANELS + 1, "no end");
    }
    assert!(found(&memory) == Found::Rows && content_as_rows(&memory) == content);
    // Then the runs count, runs of a part too if it is the begin.
    for left in (0..16).rev() {
        assert!(memory.read_map().delays.is_delayed(&PanelSpan::of(AT, &tensor()).unwrap().range), "{left}");
        let guard = memory.lock_layout([(&whole, 0)].into_iter(), None, &pool, Locking::WAIT).unwrap().unwrap();
        assert_eq!(guard.version(), None);
        guard.count_run(&whole, 0);
    }
    while !turn(&memory, &pool, LayoutAccess::PreferPanels) {}
    assert!(found(&memory) == Found::Panels && row_content(&memory) == content);
}

/// A tensor's delay neither grows over its neighbours nor outlives an upload over it.
#[test]
fn delays_keep_to_their_tensor() {
    let (pool, (memory, content)) = (Pool::new(1).unwrap(), random_memory());
    let n = tensor().extent();
    let both = TensorDesc::contiguous(DType::Q4_0, [K, M, 2, 1]).unwrap();
    let mut uses = TensorUses::new(1);
    uses.add(SlotOffset { slot: 0, offset: AT }, &both, LayoutAccess::PreferPanels);
    let (both, rows) = (uses.requirements().remove(0), requirements(LayoutAccess::Rows));
    let panels = requirements(LayoutAccess::PreferPanels);
    let lock = |requirements, base| {
        memory.lock_layout([(requirements, base)].into_iter(), None, &pool, Locking::WAIT).unwrap().unwrap()
    };
    drop(lock(&both, 0));
    drop(lock(&rows, 0)); // converts the stack
    let ranges = [AT..AT + n, AT + n..AT + 2 * n];
    let delayed = || ranges.clone().map(|range| memory.read_map().delays.is_delayed(&range));
    assert_eq!(delayed(), [true, true]);
    (0..16).for_each(|_| lock(&both, 0).count_run(&both, 0));
    assert_eq!(delayed(), [false, false]);
    // The second tensor is uploaded, and packed as it arrives, while the first one is converted to rows again.
    drop(lock(&panels, 0));
    let (second, mut done) = (content[AT + n..AT + 2 * n].to_vec(), 0);
    let upload = memory.upload(AT + n, n, Some(&tensor()), &super::turn, &mut |piece| {
        drop(lock(&rows, 0));
        piece.copy_from_slice(&second[done..done + piece.len()]);
        done += piece.len();
        Ok(())
    });
    upload.unwrap();
    assert_eq!(delayed(), [true, false]);
    assert!(read(&memory, 0, content.len()) == content && memory.read_map().packed().len() == 1);
    let mut unchanged = content[AT..AT + n].chunks(n);
    let fill = &mut |piece: &mut [u8]| {
        piece.copy_from_slice(unchanged.next().map(|bytes| &bytes[..piece.len()]).unwrap_or(&[]));
        Ok(())
    };
    memory.upload(AT, n, None, &super::turn, fill).unwrap();
    assert_eq!(delayed(), [false, false]);
    assert!(row_content(&memory) == content);
}

/// An upload over the ends of two packed tensors and what lies between them packs the ends, and writes the rest in place.
#[test]
fn an_upload_over_parts_of_packed_tensors_leaves_them_packed() {
    let n = tensor().extent();
    let (memory, pool) = (CpuMemory::zeroed(AT + 3 * n, &MemoryBudget::new(u64::MAX)).unwrap(), Pool::new(2).unwrap());
    let panels = requirements(LayoutAccess::PreferPanels);
    let slots = [(&panels, 0), (&panels, 2 * n)];
    drop(memory.lock_layout(slots.into_iter(), None, &pool, Locking::WAIT).unwrap());
    let mut rng = Rng::with_seed(3);
    let mut content = row_content(&memory);
    for (start, end) in [(AT + 100, AT + 3 * n - 7), (AT + 5, AT + n), (AT + n - 1, AT + n + 1), (AT + 3, AT + 9)] {
        let bytes: Vec<u8> = (start..end).map(|_| rng.u8(..)).collect();
        let (mut done, turns) = (0, Count::new(0));
        let long_turns = |lane| {
            turns.fetch_add(usize::from(lane == Lane::Long), Relaxed);
            super::turn(lane)
        };
        let upload = memory.upload(start, end - start, None, &long_turns, &mut |piece| {
            piece.copy_from_slice(&bytes[done..done + piece.len()]);
            done += piece.len();
            Ok(())
        });
        upload.unwrap();
        content[start..end].copy_from_slice(&bytes);
        assert!(row_content(&memory) == content, "{start}..{end}");
        assert_eq!(memory.read_map().packed().len(), 2);
        assert!(turns.into_inner() <= 2, "only the ends are staged");
    }
}

/// Spans of tensors side by side stay separate, so that a conversion of one of them leaves the other packed.
#[test]
fn parts_of_a_tensor_become_one_span() {
    let (pool, (memory, content)) = (Pool::new(1).unwrap(), random_memory());
    let requirements = requirements(LayoutAccess::PreferPanels);
    for base in [0, tensor().extent()] {
        let mut turns = 1;
        let locking = Locking::GiveWay(&|| true);
        while memory.lock_layout([(&requirements, base)].into_iter(), None, &pool, locking).unwrap().is_none() {
            turns += 1;
        }
        assert_eq!(turns, PANELS);
    }
    assert_eq!(memory.read_map().packed().len(), 2);
    while !turn(&memory, &pool, LayoutAccess::Rows) {}
    assert_eq!(memory.read_map().packed().len(), 1);
    assert!(row_content(&memory) == content);
}

/// Without a reason to give way, a conversion and a transfer end in one call.
#[test]
fn nothing_gives_way_without_a_reason() {
    let (pool, (memory, _)) = (Pool::new(2).unwrap(), random_memory());
    let (calls, requirements) = (Count::new(0), requirements(LayoutAccess::PreferPanels));
    let is_due = || {
        calls.fetch_add(1, Relaxed);
        false
    };
    let locking = Locking::GiveWay(&is_due);
    assert!(memory.lock_layout([(&requirements, 0)].into_iter(), None, &pool, locking).unwrap().is_some());
    let checks = calls.swap(0, Relaxed);
    assert!(checks <= PANELS + 1, "{checks}"); // at most one before each panel, and before each worker's end
    let n = AT + 2 * tensor().extent();
    assert_eq!(memory.fill(0, n, 0, 7, locking).unwrap(), n);
    assert_eq!(memory.copy_from(0, &memory, 10, n - 10, 0, locking).unwrap(), n - 10);
    assert_eq!(calls.into_inner(), 0); // both are one piece
}

#[test]
fn fills_and_copies_go_on_where_they_gave_way() {
    const N: usize = (9 << 20) + 5;
    let (memory, pool) =
        (CpuMemory::zeroed(N + (1 << 20), &MemoryBudget::new(u64::MAX)).unwrap(), Pool::new(2).unwrap());
    let mut rng = Rng::with_seed(9);
    let mut content: Vec<u8> = (0..N + (1 << 20)).map(|_| rng.u8(..)).collect();
    memory.write(0, &content, Locking::WAIT).unwrap();
    let locking = Locking::GiveWay(&|| true);
    let requirements = requirements(LayoutAccess::PreferPanels);
    let mut finish = |memory: &CpuMemory, work: &dyn Fn(usize) -> usize| {
        let (mut done, mut turns) = (0, 0);
        while done < N {
            // Before some turns, a program packs a tensor anywhere.
            if turns < 4 {
                let at = [(&requirements, rng.usize(..N))];
                drop(memory.lock_layout(at.into_iter(), None, &pool, Locking::WAIT).unwrap());
            }
            (done, turns) = (work(done), turns + 1);
            assert!(turns < 10 * PANELS, "no end");
        }
        turns
    };
    for (from, to) in [(1000, 0), (0, 1000), (1 << 20, 0), (0, 1 << 20)] {
        let turns = finish(&memory, &|done| memory.copy_from(to, &memory, from, N, done, locking).unwrap());
        assert!(turns >= 3, "{turns} turns");
        content.copy_within(from..from + N, to);
        assert!(row_content(&memory) == content, "from {from} to {to}");
    }
    let turns = finish(&memory, &|done| memory.fill(100, N, done, 9, locking).unwrap());
    assert!(turns >= 3, "{turns} turns");
    content[100..100 + N].fill(9);
    assert!(row_content(&memory) == content);
}
