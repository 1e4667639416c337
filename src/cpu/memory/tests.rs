//! Memory from slabs and mappings: zeroing, disjointness, alignment, what it costs, and what is returned.

use super::slab::{Purpose, SlabAllocator};
use super::{HostMemory, charged_bytes};
use crate::cpu::{CpuDevice, MathMode};
use crate::device::{Budget, Device, DeviceError, MemoryBudget};
use std::sync::Arc;

fn slabs(limit: u64) -> (Arc<Budget>, Arc<SlabAllocator>) {
    let mappings = Budget::new(limit);
    let slabs = SlabAllocator::new(&mappings);
    (mappings, slabs)
}

/// The budget of a client with a quarter of `limit` mappings.
fn client(limit: u64) -> Arc<MemoryBudget> {
    let client = MemoryBudget::for_client(u64::MAX);
    client.mappings().unwrap().set_limit(limit / 4);
    client
}

/// Memory for a buffer of the process's only user.
fn buffer(slabs: &Arc<SlabAllocator>, bytes: usize) -> Result<HostMemory, DeviceError> {
    HostMemory::zeroed_in(slabs, bytes, (Purpose::Buffer, &MemoryBudget::new(0)))
}

#[test]
fn small_memory_costs_a_power_of_two_and_large_memory_its_size() {
    let page = charged_bytes(1);
    assert!(page.is_power_of_two() && page >= 4096);
    for (bytes, want) in [
        (0, 0),
        (page, page),
        (page + 1, 2 * page),
        ((128 << 10) + 1, 256 << 10),
        (256 << 10, 256 << 10),
        ((256 << 10) + 1, (256 << 10) + 1),
        (1 << 40, 1 << 40),
        (u64::MAX, u64::MAX),
    ] {
        assert_eq!(charged_bytes(bytes), want, "{bytes} bytes");
    }
}

#[test]
fn random_allocations_are_zeroed_disjoint_aligned_and_returned() {
    for seed in 0..8 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (mappings, slabs) = slabs(4096);
        let mut live: Vec<(HostMemory, u8)> = Vec::new();
        for _ in 0..600 {
            if !live.is_empty() && rng.u8(..) < 110 {
                let (memory, value) = live.swap_remove(rng.usize(..live.len()));
                let mut bytes = Vec::new();
                assert!(memory.append_to(&mut bytes, 0..memory.bytes()));
                assert!(bytes.iter().all(|&byte| byte == value), "seed {seed}: another memory overlaps");
                continue;
            }
            let largest = 2 << rng.u32(..18);
            let bytes = rng.usize(1..largest);
            let memory = buffer(&slabs, bytes).unwrap();
            let (start, value) = (memory.start.addr().get(), rng.u8(1..));
            assert!(start.is_multiple_of(charged_bytes(1) as usize), "seed {seed}: {bytes} bytes at {start:#x}");
            if rng.bool() {
                memory.populate(0..bytes);
            }
            let mut content = Vec::new();
            assert!(
                memory.append_to(&mut content, 0..bytes) && content.iter().all(|&byte| byte == 0),
                "seed {seed}: not zeroed"
            );
            assert!(memory.fill(0, bytes, value));
            live.push((memory, value));
        }
        drop(live);
        assert_eq!(mappings.used(), 1, "seed {seed}: one unused slab is kept");
        drop(slabs);
        assert_eq!(mappings.used(), 0, "seed {seed}");
    }
}

/// The allocations of a client that made the process run out of mappings.
#[test]
fn many_small_buffers_with_every_second_one_freed_take_few_mappings() {
    let (mappings, slabs) = slabs(4096);
    let mut buffers: Vec<_> = (0..65_536).map(|_| Some(buffer(&slabs, 1).unwrap())).collect();
    let most = 65_536 * charged_bytes(1) / (2 << 20);
    assert_eq!(mappings.used(), most);
    buffers.iter_mut().step_by(2).for_each(|buffer| *buffer = None);
    assert_eq!(mappings.used(), most, "freeing makes no mapping");
    let again: Vec<_> = (0..32_768).map(|_| buffer(&slabs, 1).unwrap()).collect();
    assert_eq!(mappings.used(), most, "freed slots are used again");
    drop((buffers, again));
    assert_eq!(mappings.used(), 1);
}

#[test]
fn memory_beyond_the_limit_of_mappings_is_refused_by_name() {
    let (mappings, slabs) = slabs(3);
    let large: Vec<_> = (0..2).map(|_| buffer(&slabs, 1 << 20).unwrap()).collect();
    let small = buffer(&slabs, 1).unwrap();
    // Page-sized slots have room; another slot size and another large memory need a mapping.
    let second = buffer(&slabs, 1).unwrap();
    for bytes in [256 << 10, 1 << 20] {
        let refused = buffer(&slabs, bytes).err().unwrap();
        assert!(matches!(refused, DeviceError::Exhausted { resource: "memory mappings", .. }), "{refused}");
        assert!(refused.to_string().contains("limit of a process is 3"), "{refused}");
    }
    drop((small, second));
    assert!(buffer(&slabs, 256 << 10).is_ok(), "a slab without live slots takes any slot size");
    drop(large);
    assert_eq!(mappings.used(), 1);
}

/// Fills slabs of one size after the other until an allocation is refused, and keeps one slot of each slab. At the end, takes
/// mappings with large buffers.
fn pin_slabs(slabs: &Arc<SlabAllocator>, request: (Purpose, &Arc<MemoryBudget>)) -> Vec<HostMemory> {
    let mut pinned = Vec::new();
    for shift in 0..7 {
        let bytes = (256 << 10) >> shift;
        let filled = std::iter::from_fn(|| HostMemory::zeroed_in(slabs, bytes, request).ok());
        let filled: Vec<_> = filled.take(65_536).collect();
        pinned.extend(filled.into_iter().step_by((2 << 20) / bytes));
    }
    pinned.extend(std::iter::from_fn(|| HostMemory::zeroed_in(slabs, 1 << 20, request).ok()).take(4096));
    pinned
}

/// A client took all mappings by small buffers alone. Here it allocates in two sessions, whose budgets lie within its own.
#[test]
fn a_client_that_pins_slabs_takes_a_quarter_of_the_mappings() {
    let (mappings, slabs) = slabs(256);
    let mut pinned = Vec::new();
    for (others, purpose) in (0..).zip([Purpose::Buffer, Purpose::Scratch, Purpose::Buffer]) {
        let client = client(256);
        let sessions = [0, 1].map(|_| MemoryBudget::within(&client, u64::MAX));
        for session in &sessions {
            pinned.extend(pin_slabs(&slabs, (purpose, session)));
        }
        // One slab may be the spare one.
        let most = (others + 1) * 64 + 1;
        assert!(mappings.used() <= most, "{} mappings with {others} other clients", mappings.used());
        for session in &sessions {
            let refused = HostMemory::zeroed_in(&slabs, 1 << 20, (Purpose::Buffer, session)).err().unwrap();
            assert!(refused.to_string().contains("its 64 mappings, a quarter of the process's"), "{refused}");
        }
        // Others allocate memory of all sizes.
        let other = self::client(256);
        for purpose in [Purpose::Buffer, Purpose::Scratch] {
            for bytes in [1, 64 << 10, 256 << 10, 1 << 20] {
                HostMemory::zeroed_in(&slabs, bytes, (purpose, &other)).unwrap();
            }
        }
    }
    drop(pinned);
    assert_eq!(mappings.used(), 1);
}

/// The first buffers of a client use free slots of slabs that other clients share. Its further buffers have slabs in which no
/// other client has slots, so each of these slabs is unmapped when the client frees its last slot.
#[test]
fn a_clients_many_small_buffers_have_slabs_of_their_own() {
    let (mappings, slabs) = slabs(256);
    let [first, second] = [0, 1].map(|_| client(256));
    let fill = |client, n: usize| -> Vec<_> {
        (0..n).map(|_| HostMemory::zeroed_in(&slabs, 256 << 10, (Purpose::Buffer, client)).unwrap()).collect()
    };
    let count = |client: &Arc<MemoryBudget>| client.mappings().unwrap().used();
    // Two shared slabs of eight slots, and six slabs of its own.
    let buffers = fill(&first, 16 + 6 * 8);
    assert_eq!((count(&first), mappings.used()), (16 + 6, 2 + 6));
    let held: Vec<_> = buffers.into_iter().skip(16).step_by(8).collect();
    assert_eq!((count(&first), mappings.used()), (6, 6 + 1));
    // The second client uses none of the six slabs with room.
    let others = fill(&second, 16 + 2 * 8);
    assert_eq!((count(&second), mappings.used()), (16 + 2, 6 + 4));
    drop((held, others));
    assert_eq!((count(&first), count(&second), mappings.used()), (0, 0, 1));
}

#[test]
fn buffers_leave_mappings_to_scratch() {
    let (mappings, slabs) = slabs(64);
    let alloc = |bytes, purpose| HostMemory::zeroed_in(&slabs, bytes, (purpose, &MemoryBudget::for_client(0)));
    let buffers: Vec<_> = std::iter::from_fn(|| alloc(1 << 20, Purpose::Buffer).ok()).take(64).collect();
    assert_eq!((buffers.len(), mappings.used()), (56, 56));
    for bytes in [1, 1 << 20] {
        drop(alloc(bytes, Purpose::Scratch).unwrap());
        // The mapping of that scratch does not go to a buffer, whether it is live or not.
        let _scratch = alloc(bytes, Purpose::Scratch).unwrap();
        let refused = alloc(1, Purpose::Buffer).err().unwrap().to_string();
        assert!(refused.contains("limit of a process is 64, of which 8 are kept for scratch"), "{refused}");
    }
    let scratch: Vec<_> = std::iter::from_fn(|| alloc(1 << 20, Purpose::Scratch).ok()).take(64).collect();
    assert_eq!((scratch.len(), mappings.used()), (8, 64));
}

#[test]
fn budgets_are_charged_by_slots_and_released() {
    let device = CpuDevice::new("CPU", 1, MathMode::Exact, 8 << 20).unwrap();
    let budget = MemoryBudget::new(4 << 20);
    let sizes = [0, 1, 4097, 100_000, 256 << 10, 300_000];
    let buffers: Vec<_> = sizes.iter().map(|&bytes| device.alloc(bytes, &budget).unwrap()).collect();
    let charged: u64 = sizes.iter().map(|&bytes| charged_bytes(bytes)).sum();
    assert!(buffers.iter().zip(sizes).all(|(buffer, bytes)| buffer.bytes() == bytes));
    assert_eq!((budget.used(), device.budget.used()), (charged, charged));
    drop(buffers);
    assert_eq!((budget.used(), device.budget.used()), (0, 0));
    // A buffer as large as a limit that is no multiple of a page.
    let odd = CpuDevice::new("CPU", 1, MathMode::Exact, 1_000_001).unwrap();
    let whole = odd.alloc(odd.memory().unwrap().total, &budget).unwrap();
    assert_eq!((whole.bytes(), odd.budget.used()), (1_000_001, 1_000_001));
    // As many one-byte buffers as the budget has pages.
    let page = charged_bytes(1);
    drop(whole);
    let pages: Vec<_> = (0..budget.limit() / page).map(|_| device.alloc(1, &budget).unwrap()).collect();
    assert!(matches!(device.alloc(1, &budget), Err(DeviceError::OutOfMemory { available: 0, .. })));
    drop(pages);
}
