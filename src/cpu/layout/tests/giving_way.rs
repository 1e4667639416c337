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
