//! Mapped files, imported memory of the host, and pinned memory.

use super::{MEMORY, device, test_deadline};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::noop::NoopDevice;
use fanout::device::{
    Advice, Buffer, Device, DeviceError, DeviceKind, HostBuffer, ImportHost, MappedFile, MemoryBudget, Queue,
    UploadSource,
};
use fanout::fallback::Fallback;
use fanout::graph::{Builder, Graph};
use fanout::ops::mul_mat::MulMat;
use fanout::tensor::{Capability, DType, TensorDesc};
use fanout_testing::inputs::encode_row;
use std::fs;
use std::io::{ErrorKind, Write};
use std::sync::Arc;
use tempfile::NamedTempFile;

fn file(bytes: &[u8]) -> NamedTempFile {
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(bytes).unwrap();
    file
}

fn noise(n: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(n as u64);
    (0..n).map(|_| rng.u8(..)).collect()
}

#[test]
fn a_mapped_file_reads_as_the_file() {
    let bytes = noise(3 * 4096 + 123);
    let (file, end) = (file(&bytes), bytes.len() as u64);
    let mapped = MappedFile::open(file.path()).unwrap();
    assert!(mapped.bytes() == bytes && mapped.len() == end && !mapped.is_empty());
    assert_eq!(mapped.path(), file.path());
    for (start, stop) in [(0, end), (0, 0), (end, end), (4096, 8192), (4095, 4097), (7, 12_000)] {
        let part = &bytes[start as usize..stop as usize];
        assert_eq!(mapped.slice(start..stop).unwrap(), part);
        assert_eq!(&mapped.map_private(start..stop).unwrap()[..], part);
        for advice in [Advice::Sequential, Advice::WillNeed] {
            mapped.advise(start..stop, advice).unwrap();
        }
    }
    #[allow(clippy::reversed_empty_ranges)]
    for outside in [0..end + 1, end + 1..end + 1, 5..4, 0..u64::MAX] {
        let error = mapped.slice(outside.clone()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{outside:?}");
        assert!(error.to_string().contains(&end.to_string()), "{error}");
        assert!(mapped.map_private(outside.clone()).is_err() && mapped.advise(outside, Advice::WillNeed).is_err());
    }
    #[cfg(unix)]
    for device in ["/dev/zero", "/dev/null"] {
        let error = MappedFile::open(device).expect_err(device).to_string();
        assert!(error.contains("only regular files"), "{device}: {error}");
    }
    assert!(MappedFile::open(file.path().parent().unwrap()).is_err(), "a folder");
    assert_eq!(MappedFile::open("/no/such/file").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn an_empty_file_has_no_bytes() {
    let mapped = MappedFile::open(file(&[]).path()).unwrap();
    assert!(mapped.is_empty() && mapped.bytes().is_empty() && mapped.slice(0..0).unwrap().is_empty());
    assert!(mapped.map_private(0..0).unwrap().is_empty() && mapped.slice(0..1).is_err());
    mapped.advise(0..0, Advice::Sequential).unwrap();
    let buffer = device(1).import(mapped.map_private(0..0).unwrap(), &MemoryBudget::new(0)).unwrap();
    assert_eq!(buffer.bytes(), 0);
}

#[test]
fn private_mappings_are_copy_on_write() {
    let bytes = noise(10_000);
    let file = file(&bytes);
    let mapped = MappedFile::open(file.path()).unwrap();
    let (mut one, two) = (mapped.map_private(32..9000).unwrap(), mapped.map_private(64..10_000).unwrap());
    assert_eq!((one.as_ptr().addr() % 4096, two.as_ptr().addr() % 4096), (32, 64));
    one.fill(7);
    assert!(mapped.bytes() == bytes && two[..] == bytes[64..] && fs::read(file.path()).unwrap() == bytes);
    // A deleted file stays readable while it is mapped.
    drop(file);
    assert!(mapped.map_private(32..9000).unwrap()[..] == bytes[32..9000]);
    drop(mapped);
    assert!(two[..] == bytes[64..] && one.iter().all(|&v| v == 7));
}

#[test]
fn a_truncated_file_is_not_mapped_again() {
    let file = file(&noise(10_000));
    let mapped = MappedFile::open(file.path()).unwrap();
    file.as_file().set_len(5000).unwrap();
    let error = mapped.map_private(0..5001).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    assert!(error.to_string().contains("5000"), "{error}");
    assert_eq!(mapped.map_private(0..5000).unwrap().len(), 5000);
}

/// y = a · x, each in a slot of its own.
fn product(a: &TensorDesc) -> Arc<Graph> {
    let mut b = Builder::with_separate_slots();
    let (a, x) = (b.leaf_with_desc(*a).unwrap(), b.leaf(DType::F32, [a.ne()[0], 3, 1, 1]).unwrap());
    b.node(MulMat::PLAIN, &[Some(a), Some(x)]).unwrap();
    Arc::new(b.build())
}

fn values(n: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(n as u64);
    (0..n).map(|_| rng.f32() - 0.5).collect()
}

/// The product with a weight at byte `offset` of `buffer`.
fn multiply(device: &CpuDevice, queue: &mut dyn Queue, a: &TensorDesc, buffer: &Buffer, offset: u64) -> Vec<u8> {
    let (graph, budget) = (product(a), MemoryBudget::new(MEMORY));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let [x, y] = [1, 2].map(|slot| device.alloc(graph.slot_sizes()[slot] as u64, &budget).unwrap());
    let columns: Vec<u8> = values(3 * a.ne()[0]).iter().flat_map(|v| v.to_le_bytes()).collect();
    queue.upload(x.whole(), None, UploadSource::Borrowed(&columns)).unwrap();
    let weight = buffer.region(offset, a.extent() as u64).unwrap();
    queue.run(&program, &Arc::from([weight, x.whole(), y.whole()])).unwrap();
    queue.download(y.whole()).unwrap().wait(test_deadline()).unwrap()
}

/// Imported weights give the same results as uploaded weights, at every alignment that files have, also after the device
/// repacked them in place. The file does not change.
#[test]
fn imported_weights_give_the_results_of_uploaded_weights() {
    for (i, dtype) in DType::with_capability(Capability::Decode).enumerate() {
        let a = TensorDesc::contiguous(dtype, [512, 528, 1, 1]).unwrap();
        let mut weights = vec![0; a.extent()];
        encode_row(dtype, &values(512 * 528), &mut weights);
        // Imported from the tensor's start, and from an earlier byte. 32 is GGUF's alignment, 64 the device's.
        for (start, offset) in [(4096, 0), (32, 0), (64, 32), (40, 24), (0, 4104)] {
            let path = [MathMode::Fast, MathMode::Exact][(i + offset) % 2];
            let what = format!("{dtype} at {start} + {offset}, {path:?}");
            let (device, budget) = (CpuDevice::new("CPU", 2, path, MEMORY).unwrap(), MemoryBudget::new(MEMORY));
            let mut queue = device.queue(&budget).unwrap();
            let uploaded = device.alloc(a.extent() as u64, &budget).unwrap();
            queue.upload(uploaded.whole(), Some(&a), UploadSource::Borrowed(&weights)).unwrap();
            let want = multiply(&device, &mut *queue, &a, &uploaded, 0);

            let content = [noise(start + offset), weights.clone(), noise(100)].concat();
            let file = file(&content);
            let mapped = MappedFile::open(file.path()).unwrap();
            let private = mapped.map_private(start as u64..mapped.len()).unwrap();
            let imported = device.import(private, &budget).unwrap();
            for _ in 0..2 {
                assert!(multiply(&device, &mut *queue, &a, &imported, offset as u64) == want, "{what}");
            }
            let whole = queue.download(imported.whole()).unwrap().wait(test_deadline()).unwrap();
            assert!(whole == content[start..], "{what}: reads as the file");
            queue.fill(imported.whole(), 0).unwrap();
            queue.mark().wait(test_deadline()).unwrap();
            assert!(mapped.bytes() == content && fs::read(file.path()).unwrap() == content, "{what}: the file stays");
        }
    }
}

#[test]
fn imported_memory_is_reserved_checked_and_released() {
    let bytes = noise(5000);
    let file = file(&bytes);
    let mapped = MappedFile::open(file.path()).unwrap();
    let (device, small) = (CpuDevice::new("CPU", 1, MathMode::Fast, 4000).unwrap(), MemoryBudget::new(3000));
    let import = |start, budget| device.import(mapped.map_private(start..start + 2500).unwrap(), budget);
    for start in [1, 4, 12, 4096 - 4] {
        let range = mapped.map_private(start..start + 8).unwrap();
        assert!(matches!(device.import(range, &small), Err(DeviceError::Misuse(_))), "at {start}");
    }
    let first = import(8, &small).unwrap();
    assert_eq!((first.bytes(), first.device_name(), small.used()), (2500, "CPU", 2500));
    assert_eq!(
        import(8, &small).unwrap_err(),
        DeviceError::OutOfMemory { requested: 2500, available: 500, limit: 3000 }
    );
    let large = MemoryBudget::new(10_000);
    assert_eq!(
        import(8, &large).unwrap_err(),
        DeviceError::OutOfMemory { requested: 2500, available: 1500, limit: 4000 }
    );
    assert_eq!((large.used(), device.memory().unwrap().free), (0, 1500));
    drop(first);
    assert_eq!((small.used(), device.memory().unwrap().free), (0, 4000));
    // Memory with a reservation is not reserved twice.
    let exact = MemoryBudget::new(800);
    let mut plain = HostBuffer::zeroed(800, &exact).unwrap();
    plain[..4].copy_from_slice(b"abcd");
    let buffer = device.import(plain, &exact).unwrap();
    let mut queue = device.queue(&exact).unwrap();
    let got = queue.download(buffer.region(0, 6).unwrap()).unwrap().wait(test_deadline()).unwrap();
    assert_eq!((&got[..], exact.used()), (&b"abcd\0\0"[..], 800));
}

#[test]
fn import_host_is_absent_on_devices_without_it() {
    let (gpu, budget) = (NoopDevice::new("GPU7", DeviceKind::Gpu).shared(), MemoryBudget::new(MEMORY));
    assert!(gpu.import_host().is_none());
    // A fallback device has the memory of its primary.
    let cpu = device(1);
    let memory = || HostBuffer::zeroed(64, &budget).unwrap();
    let behind = Fallback::new(Arc::clone(&gpu), Arc::clone(&cpu) as _);
    assert!(behind.import_host().is_none());
    let behind = Fallback::new(cpu, gpu);
    assert_eq!(behind.import_host().unwrap().import(memory(), &budget).unwrap().device_name(), "CPU");
    assert_eq!(budget.used(), 0);
}

/// Changing or dropping the source memory after an upload returned does not change the uploaded bytes.
#[test]
fn source_memory_may_change_after_an_upload_returns() {
    let (device, budget) = (device(2), MemoryBudget::new(MEMORY));
    let mut queue = device.queue(&budget).unwrap();
    for n in [0, 1, 1000, 256 << 10, (256 << 10) + 1, 3 << 20] {
        let mut host = (&*device as &dyn Device).alloc_host(n, &budget).unwrap();
        assert!(host.len() as u64 == n && host.iter().all(|&v| v == 0) && budget.used() == n);
        let bytes = noise(n as usize);
        host.copy_from_slice(&bytes);
        let buffer = device.alloc(n, &budget).unwrap();
        // After work that is still pending: the device may wait, or copy the bytes.
        queue.fill(buffer.whole(), 1).unwrap();
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&host)).unwrap();
        host.fill(0);
        drop(host);
        assert!(queue.download(buffer.whole()).unwrap().wait(test_deadline()).unwrap() == bytes, "{n} bytes");
        drop(buffer);
        queue.mark().wait(test_deadline()).unwrap();
        assert_eq!(budget.used(), 0);
    }
    assert!(matches!((&*device as &dyn Device).alloc_host(2 * MEMORY, &budget), Err(DeviceError::OutOfMemory { .. })));
    assert!((&*device as &dyn Device).alloc_host(u64::MAX, &MemoryBudget::new(u64::MAX)).is_err());
}
