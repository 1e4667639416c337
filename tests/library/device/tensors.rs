//! `TensorPlan` and `TensorMemory`: many tensors in few buffers.

use super::{MEMORY, device, test_deadline};
use fanout::device::noop::NoopDevice;
use fanout::device::{Device, DeviceError, DeviceKind, MemoryBudget, TensorMemory, UploadSource};
use fanout::tensor::{DType, TensorDesc};
use std::sync::Arc;

/// A tensor of `n` bytes.
fn bytes(n: usize) -> TensorDesc {
    TensorDesc::contiguous(DType::I8, [n, 1, 1, 1]).unwrap()
}

fn noop_device(alignment: u64, max_buffer: u64, padding: u64) -> Arc<dyn Device> {
    let null = NoopDevice::new("NULL", DeviceKind::Gpu).with_padding(padding);
    null.with_info(|info| (info.alignment, info.max_buffer) = (alignment, max_buffer)).shared()
}

/// Alignment, largest buffer and padding; tensor sizes; expected buffer sizes; expected buffer and offset of each tensor. In
/// bytes.
type PlacementCase<'a> = ((u64, u64, u64), &'a [usize], &'a [u64], &'a [(usize, u64)]);

#[test]
fn tensors_are_placed_first_fit() {
    let table: &[PlacementCase] = &[
        ((64, u64::MAX, 0), &[], &[], &[]),
        ((64, u64::MAX, 0), &[0], &[0], &[(0, 0)]),
        ((64, u64::MAX, 0), &[10, 64, 1], &[129], &[(0, 0), (0, 64), (0, 128)]),
        ((1, u64::MAX, 0), &[10, 64, 1], &[75], &[(0, 0), (0, 10), (0, 74)]),
        ((0, u64::MAX, 0), &[10, 1], &[11], &[(0, 0), (0, 10)]),
        ((64, u64::MAX, 60), &[10, 1], &[128 + 61], &[(0, 0), (0, 128)]),
        // Later tensors fill the free space of earlier buffers.
        ((64, 200, 0), &[100, 100, 70, 8, 200], &[198, 136, 200], &[(0, 0), (1, 0), (0, 128), (1, 128), (2, 0)]),
        ((64, 200, 0), &[200, 0, 1], &[200, 1], &[(0, 0), (1, 0), (1, 0)]),
        ((64, 200, 10), &[190, 190], &[200, 200], &[(0, 0), (1, 0)]),
    ];
    for &((alignment, max_buffer, padding), sizes, buffers, spots) in table {
        let what = format!("{sizes:?} at {alignment} in {max_buffer}");
        let (device, budget) = (noop_device(alignment, max_buffer, padding), MemoryBudget::new(MEMORY));
        let plan = TensorMemory::plan(&*device, sizes.iter().map(|&n| bytes(n))).unwrap();
        assert_eq!((plan.buffers(), plan.len()), (buffers, sizes.len()), "{what}");
        assert_eq!((plan.bytes(), budget.used()), (buffers.iter().sum(), 0), "{what}: nothing is allocated");
        let memory = plan.allocate(&*device, &budget).unwrap();
        assert_eq!((memory.bytes(), budget.used()), (plan.bytes(), plan.bytes()), "{what}");
        for (tensor, (&size, &(buffer, offset))) in sizes.iter().zip(spots).enumerate() {
            let region = memory.region(tensor).unwrap();
            assert_eq!(region.bytes(), size as u64, "{what}: exactly the tensor");
            let at = (region.buffer().id(), region.offset());
            assert_eq!(at, (memory.buffers()[buffer].id(), offset), "{what}: tensor {tensor}");
        }
        assert!(memory.region(sizes.len()).is_none(), "{what}");
        drop(memory);
        assert_eq!(budget.used(), 0, "{what}");
    }
}

/// On random sets: tensors do not overlap, all are aligned, no buffer exceeds the limit, and less than half of the bytes are
/// unused.
#[test]
fn random_sets_follow_the_placement_rules() {
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..200 {
        let (alignment, max_buffer, padding) = (1 << rng.u32(0..8), rng.u64(300..5000), rng.u64(0..40));
        let (device, budget) = (noop_device(alignment, max_buffer, padding), MemoryBudget::new(MEMORY));
        let tensors: Vec<TensorDesc> = (0..rng.usize(1..60)).map(|_| bytes(rng.usize(1..260))).collect();
        let memory = TensorMemory::new(&*device, tensors.iter().copied(), &budget).unwrap();
        assert!(memory.buffers().iter().all(|buffer| buffer.bytes() <= max_buffer));
        let mut taken: Vec<_> = memory.regions().iter().map(|r| (r.buffer().id(), r.offset(), r.bytes())).collect();
        taken.sort_unstable();
        for pair in taken.windows(2) {
            assert!(pair[0].0 != pair[1].0 || pair[0].1 + pair[0].2 + padding <= pair[1].1, "{pair:?}");
        }
        assert!(
            taken.iter().all(|&(_, offset, bytes)| offset % alignment == 0 && offset + bytes + padding <= max_buffer)
        );
        let least: u64 = tensors.iter().map(|tensor| device.alloc_size(tensor)).sum();
        let rounded = least + alignment * tensors.len() as u64;
        assert!(
            memory.buffers().len() as u64 <= 2 * rounded.div_ceil(max_buffer) + 1,
            "first fit fills at least half of each buffer"
        );
    }
}

#[test]
fn a_failed_allocation_reports_sizes_and_reserves_nothing() {
    let (device, budget) = (noop_device(64, 200, 10), MemoryBudget::new(500));
    let error = TensorMemory::plan(&*device, [5, 191].map(bytes)).unwrap_err();
    assert_eq!(error, DeviceError::TensorTooLarge { tensor: 1, device: "NULL".to_owned(), bytes: 201, limit: 200 });
    let text = error.to_string();
    assert!(["1", "201", "200", "NULL"].iter().all(|word| text.contains(word)), "{text}");
    // Two buffers fit the budget, the third does not.
    let plan = TensorMemory::plan(&*device, [190; 3].map(bytes)).unwrap();
    let error = plan.allocate(&*device, &budget).unwrap_err();
    assert_eq!((error, budget.used()), (DeviceError::OutOfMemory { requested: 200, available: 100, limit: 500 }, 0));
    let other = NoopDevice::new("OTHER", DeviceKind::Gpu).shared();
    assert!(matches!(plan.allocate(&*other, &budget), Err(DeviceError::Misuse(_))));
}

#[test]
fn sizes_near_2_to_the_64_do_not_overflow() {
    let (device, budget) = (noop_device(64, u64::MAX, u64::MAX - 100), MemoryBudget::new(MEMORY));
    let plan = TensorMemory::plan(&*device, [10, 20].map(bytes)).unwrap();
    assert_eq!((plan.buffers(), plan.bytes()), (&[u64::MAX - 90, u64::MAX - 80][..], u64::MAX));
    assert!(matches!(plan.allocate(&*device, &budget), Err(DeviceError::OutOfMemory { .. })));
    assert_eq!(budget.used(), 0);
}

#[test]
fn buffers_are_reused_after_a_reset() {
    let (device, budget) = (noop_device(64, 200, 0), MemoryBudget::new(400));
    let mut memory = TensorMemory::new(&*device, [150, 100].map(bytes), &budget).unwrap();
    let ids: Vec<u64> = memory.buffers().iter().map(|buffer| buffer.id()).collect();
    // The second set uses the buffers of the first, which have the sizes that the first set needed.
    let full = DeviceError::OutOfMemory { requested: 1, available: 0, limit: 250 };
    assert_eq!(memory.place(&*device, [bytes(1)]), Err(full));
    memory.reset();
    assert!(memory.region(0).is_none() && memory.bytes() == 250);
    let error = memory.place(&*device, [80, 151].map(bytes)).unwrap_err();
    assert_eq!(error, DeviceError::OutOfMemory { requested: 151, available: 100, limit: 250 });
    assert!(memory.regions().is_empty(), "all or none");
    memory.place(&*device, [80, 90].map(bytes)).unwrap();
    memory.place(&*device, [20].map(bytes)).unwrap();
    let spots: Vec<_> = memory.regions().iter().map(|r| (r.buffer().id(), r.offset(), r.bytes())).collect();
    assert_eq!(spots, [(ids[0], 0, 80), (ids[1], 0, 90), (ids[0], 128, 20)]);
    let other = NoopDevice::new("OTHER", DeviceKind::Gpu).shared();
    assert!(matches!(memory.place(&*other, [bytes(1)]), Err(DeviceError::Misuse(_))));
}

#[test]
fn tensors_on_the_cpu_are_written_read_and_cleared() {
    let (device, budget) = (device(1), MemoryBudget::new(MEMORY));
    let tensors = [100, 1 << 20, 3].map(bytes);
    let memory = TensorMemory::new(&*device, tensors, &budget).unwrap();
    assert_eq!(memory.buffers().len(), 1);
    let mut queue = device.queue(&budget).unwrap();
    for (i, (region, tensor)) in memory.regions().iter().zip(&tensors).enumerate() {
        queue
            .upload(region.clone(), Some(tensor), UploadSource::Borrowed(&vec![i as u8 + 1; tensor.extent()]))
            .unwrap();
    }
    for (i, region) in memory.regions().iter().enumerate() {
        let got = queue.download(region.clone()).unwrap().wait(test_deadline()).unwrap();
        assert!(got.len() == tensors[i].extent() && got.iter().all(|&v| v == i as u8 + 1), "tensor {i}");
    }
    memory.clear(&mut *queue, 9).unwrap();
    let got = queue.download(memory.buffers()[0].whole()).unwrap().wait(test_deadline()).unwrap();
    assert!(got.iter().all(|&v| v == 9));
}
