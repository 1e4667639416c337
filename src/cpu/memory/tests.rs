//! Memory from slabs and mappings: zeroing, disjointness, alignment, what it costs, and what is returned.

use super::mapping_budget::MappingBudget;
use super::slab::SlabAllocator;
use super::{HostMemory, charged_bytes};
use crate::cpu::{CpuDevice, MathMode};
use crate::device::{Device, DeviceError, MemoryBudget};
use std::sync::Arc;

fn slabs(limit: usize) -> (Arc<MappingBudget>, Arc<SlabAllocator>) {
    let mappings = MappingBudget::new(limit);
    (Arc::clone(&mappings), SlabAllocator::new(mappings))
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
                let bytes = memory.read(0, memory.bytes()).unwrap();
                assert!(bytes.iter().all(|&byte| byte == value), "seed {seed}: another memory overlaps");
                continue;
            }
            let largest = 2 << rng.u32(..18);
            let bytes = rng.usize(1..largest);
            let memory = HostMemory::zeroed_in(&slabs, bytes).unwrap();
            let (start, value) = (memory.start.addr().get(), rng.u8(1..));
            assert!(start.is_multiple_of(charged_bytes(1) as usize), "seed {seed}: {bytes} bytes at {start:#x}");
            if rng.bool() {
                memory.populate(0..bytes);
            }
            assert!(memory.read(0, bytes).unwrap().iter().all(|&byte| byte == 0), "seed {seed}: not zeroed");
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
    let mut buffers: Vec<_> = (0..65_536).map(|_| Some(HostMemory::zeroed_in(&slabs, 1).unwrap())).collect();
    let most = 65_536 * charged_bytes(1) as usize / (2 << 20);
    assert_eq!(mappings.used(), most);
    buffers.iter_mut().step_by(2).for_each(|buffer| *buffer = None);
    assert_eq!(mappings.used(), most, "freeing makes no mapping");
    let again: Vec<_> = (0..32_768).map(|_| HostMemory::zeroed_in(&slabs, 1).unwrap()).collect();
    assert_eq!(mappings.used(), most, "freed slots are used again");
    drop((buffers, again));
    assert_eq!(mappings.used(), 1);
}

#[test]
fn memory_beyond_the_limit_of_mappings_is_refused_by_name() {
    let (mappings, slabs) = slabs(3);
    let large: Vec<_> = (0..2).map(|_| HostMemory::zeroed_in(&slabs, 1 << 20).unwrap()).collect();
    let small = HostMemory::zeroed_in(&slabs, 1).unwrap();
    // Page-sized slots have room; another slot size and another large memory need a mapping.
    let second = HostMemory::zeroed_in(&slabs, 1).unwrap();
    for bytes in [256 << 10, 1 << 20] {
        let refused = HostMemory::zeroed_in(&slabs, bytes).err().unwrap();
        assert!(matches!(refused, DeviceError::Exhausted { resource: "memory mappings", .. }), "{refused}");
        assert!(refused.to_string().contains("limit of a process is 3"), "{refused}");
    }
    drop((small, second));
    assert!(HostMemory::zeroed_in(&slabs, 256 << 10).is_ok(), "a slab without live slots takes any slot size");
    drop(large);
    assert_eq!(mappings.used(), 1);
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
