//! Mapped files, buffers over the host's memory, and memory that devices copy from fast.

use super::{MEMORY, device, soon};
use fanout::cpu::{CpuDevice, Path};
use fanout::device::noop::NoopDevice;
use fanout::device::{
    Account, Advice, Buffer, Device, DeviceError, DeviceKind, HostBuffer, ImportHost, MappedFile, Queue, Source,
};
use fanout::fallback::Fallback;
use fanout::graph::{Builder, Graph};
use fanout::ops::mul_mat::MulMat;
use fanout::tensor::quant::quantiser;
use fanout::tensor::{Capability, DType, TensorDesc};
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
fn a_mapped_file_is_its_bytes() {
    let bytes = noise(3 * 4096 + 123);
    let (file, end) = (file(&bytes), bytes.len() as u64);
    let mapped = MappedFile::open(file.path()).unwrap();
    assert!(mapped.bytes() == bytes && mapped.len() == end && !mapped.is_empty());
    assert_eq!(mapped.path(), file.path());
    for (start, stop) in [(0, end), (0, 0), (end, end), (4096, 8192), (4095, 4097), (7, 12_000)] {
        let part = &bytes[start as usize..stop as usize];
        assert_eq!(mapped.part(start..stop).unwrap(), part);
        assert_eq!(&mapped.private(start..stop).unwrap()[..], part);
        for advice in [Advice::Sequential, Advice::WillNeed] {
            mapped.advise(start..stop, advice).unwrap();
        }
    }
    #[allow(clippy::reversed_empty_ranges)]
    for outside in [0..end + 1, end + 1..end + 1, 5..4, 0..u64::MAX] {
        let error = mapped.part(outside.clone()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{outside:?}");
        assert!(error.to_string().contains(&end.to_string()), "{error}");
        assert!(mapped.private(outside.clone()).is_err() && mapped.advise(outside, Advice::WillNeed).is_err());
    }
    #[cfg(unix)]
    for device in ["/dev/zero", "/dev/null"] {
        let error = MappedFile::open(device).expect_err(device).to_string();
        assert!(error.contains(device), "{error}");
    }
    assert!(MappedFile::open(file.path().parent().unwrap()).is_err(), "a folder");
    assert_eq!(MappedFile::open("/no/such/file").unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn an_empty_file_has_no_bytes() {
    let mapped = MappedFile::open(file(&[]).path()).unwrap();
    assert!(mapped.is_empty() && mapped.bytes().is_empty() && mapped.part(0..0).unwrap().is_empty());
    assert!(mapped.private(0..0).unwrap().is_empty() && mapped.part(0..1).is_err());
    mapped.advise(0..0, Advice::Sequential).unwrap();
    let buffer = device(1).import(mapped.private(0..0).unwrap(), &Account::new(0)).unwrap();
    assert_eq!(buffer.bytes(), 0);
}

#[test]
fn private_memory_is_nobody_elses() {
    let bytes = noise(10_000);
    let file = file(&bytes);
    let mapped = MappedFile::open(file.path()).unwrap();
    let (mut one, two) = (mapped.private(32..9000).unwrap(), mapped.private(64..10_000).unwrap());
    assert_eq!((one.as_ptr().addr() % 4096, two.as_ptr().addr() % 4096), (32, 64));
    one.fill(7);
    assert!(mapped.bytes() == bytes && two[..] == bytes[64..] && fs::read(file.path()).unwrap() == bytes);
    // A deleted file stays as long as it is mapped.
    drop(file);
    assert!(mapped.private(32..9000).unwrap()[..] == bytes[32..9000]);
    drop(mapped);
    assert!(two[..] == bytes[64..] && one.iter().all(|&v| v == 7));
}

#[test]
fn a_file_that_was_shortened_is_not_mapped_again() {
    let file = file(&noise(10_000));
    let mapped = MappedFile::open(file.path()).unwrap();
    file.as_file().set_len(5000).unwrap();
    let error = mapped.private(0..5001).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    assert!(error.to_string().contains("5000"), "{error}");
    assert_eq!(mapped.private(0..5000).unwrap().len(), 5000);
}

/// y = a · x, each in a slot of its own.
fn product(a: &TensorDesc) -> Arc<Graph> {
    let mut b = Builder::with_separate_slots();
    let (a, x) = (b.leaf_with_desc(*a).unwrap(), b.leaf(DType::F32, [a.ne()[0], 3, 1, 1]).unwrap());
    b.node(MulMat::PLAIN, &[Some(a), Some(x)]).unwrap();
    Arc::new(b.build().unwrap())
}

fn values(n: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(n as u64);
    (0..n).map(|_| rng.f32() - 0.5).collect()
}

/// The product of a weight that lies at byte `offset` of `buffer`.
fn multiply(device: &CpuDevice, queue: &mut dyn Queue, a: &TensorDesc, buffer: &Buffer, offset: u64) -> Vec<u8> {
    let (graph, account) = (product(a), Account::new(MEMORY));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let [x, y] = [1, 2].map(|slot| device.alloc(graph.slot_sizes()[slot] as u64, &account).unwrap());
    let columns: Vec<u8> = values(3 * a.ne()[0]).iter().flat_map(|v| v.to_le_bytes()).collect();
    queue.upload(x.whole(), None, Source::Borrowed(&columns)).unwrap();
    let weight = buffer.region(offset, a.extent() as u64).unwrap();
    queue.run(&program, &Arc::from([weight, x.whole(), y.whole()])).unwrap();
    queue.download(y.whole()).unwrap().wait(soon()).unwrap()
}

/// Weights are used where the file has them, at any alignment that files keep, and rearranged in place where products
/// want that: results are those of uploaded weights, and the file stays as it was.
#[test]
fn weights_are_used_as_they_lie_in_a_file() {
    for (i, dtype) in DType::with_capability(Capability::Convert).enumerate() {
        let a = TensorDesc::contiguous(dtype, [512, 528, 1, 1]).unwrap();
        let mut weights = vec![0; a.extent()];
        quantiser(dtype).unwrap()(&values(512 * 528), &mut weights);
        // Imported from the tensor on and from before it; 32 is what GGUF keeps, 64 what the device would choose.
        for (start, offset) in [(4096, 0), (32, 0), (64, 32), (40, 24), (0, 4104)] {
            let path = [Path::Fast, Path::Exact][(i + offset) % 2];
            let what = format!("{dtype} at {start} + {offset}, {path:?}");
            let (device, account) = (CpuDevice::new("CPU", 2, path, MEMORY).unwrap(), Account::new(MEMORY));
            let mut queue = device.queue(&account).unwrap();
            let uploaded = device.alloc(a.extent() as u64, &account).unwrap();
            queue.upload(uploaded.whole(), Some(&a), Source::Borrowed(&weights)).unwrap();
            let want = multiply(&device, &mut *queue, &a, &uploaded, 0);

            let content = [noise(start + offset), weights.clone(), noise(100)].concat();
            let file = file(&content);
            let mapped = MappedFile::open(file.path()).unwrap();
            let private = mapped.private(start as u64..mapped.len()).unwrap();
            let imported = device.import(private, &account).unwrap();
            for _ in 0..2 {
                assert!(multiply(&device, &mut *queue, &a, &imported, offset as u64) == want, "{what}");
            }
            let whole = queue.download(imported.whole()).unwrap().wait(soon()).unwrap();
            assert!(whole == content[start..], "{what}: reads as the file");
            queue.fill(imported.whole(), 0).unwrap();
            queue.mark().wait(soon()).unwrap();
            assert!(mapped.bytes() == content && fs::read(file.path()).unwrap() == content, "{what}: the file stays");
        }
    }
}

#[test]
fn imported_memory_is_charged_checked_and_given_back() {
    let bytes = noise(5000);
    let file = file(&bytes);
    let mapped = MappedFile::open(file.path()).unwrap();
    let (device, small) = (CpuDevice::new("CPU", 1, Path::Fast, 4000).unwrap(), Account::new(3000));
    let import = |start, account| device.import(mapped.private(start..start + 2500).unwrap(), account);
    for start in [1, 4, 12, 4096 - 4] {
        let range = mapped.private(start..start + 8).unwrap();
        assert!(matches!(device.import(range, &small), Err(DeviceError::Misuse(_))), "at {start}");
    }
    let first = import(8, &small).unwrap();
    assert_eq!((first.bytes(), first.device_name(), small.used()), (2500, "CPU", 2500));
    assert_eq!(import(8, &small).unwrap_err(), DeviceError::OutOfMemory { asked: 2500, left: 500, limit: 3000 });
    let large = Account::new(10_000);
    assert_eq!(import(8, &large).unwrap_err(), DeviceError::OutOfMemory { asked: 2500, left: 1500, limit: 4000 });
    assert_eq!((large.used(), device.memory().unwrap().free), (0, 1500));
    drop(first);
    assert_eq!((small.used(), device.memory().unwrap().free), (0, 4000));
    // Memory that was charged before is not charged twice.
    let exact = Account::new(800);
    let mut plain = HostBuffer::zeroed(800, &exact).unwrap();
    plain[..4].copy_from_slice(b"abcd");
    let buffer = device.import(plain, &exact).unwrap();
    let mut queue = device.queue(&exact).unwrap();
    let got = queue.download(buffer.region(0, 6).unwrap()).unwrap().wait(soon()).unwrap();
    assert_eq!((&got[..], exact.used()), (&b"abcd\0\0"[..], 800));
}

#[test]
fn devices_without_the_hosts_memory_say_so() {
    let (gpu, account) = (NoopDevice::new("GPU7", DeviceKind::Gpu).shared(), Account::new(MEMORY));
    assert!(gpu.import_host().is_none());
    // A device that falls back has the memory of its first one.
    let cpu = device(1);
    let memory = || HostBuffer::zeroed(64, &account).unwrap();
    let behind = Fallback::new(Arc::clone(&gpu), Arc::clone(&cpu) as _);
    assert!(behind.import_host().is_none());
    let behind = Fallback::new(cpu, gpu);
    assert_eq!(behind.import_host().unwrap().import(memory(), &account).unwrap().device_name(), "CPU");
    assert_eq!(account.used(), 0);
}

/// Whatever is done with the memory after an upload has returned, the device has what it held before.
#[test]
fn memory_for_uploads_is_free_again_when_they_return() {
    let (device, account) = (device(2), Account::new(MEMORY));
    let mut queue = device.queue(&account).unwrap();
    for n in [0, 1, 1000, 256 << 10, (256 << 10) + 1, 3 << 20] {
        let mut host = (&*device as &dyn Device).alloc_host(n, &account).unwrap();
        assert!(host.len() as u64 == n && host.iter().all(|&v| v == 0) && account.used() == n);
        let bytes = noise(n as usize);
        host.copy_from_slice(&bytes);
        let buffer = device.alloc(n, &account).unwrap();
        // Behind something that is not done yet, where the device is free to wait or to copy.
        queue.fill(buffer.whole(), 1).unwrap();
        queue.upload(buffer.whole(), None, Source::Borrowed(&host)).unwrap();
        host.fill(0);
        drop(host);
        assert!(queue.download(buffer.whole()).unwrap().wait(soon()).unwrap() == bytes, "{n} bytes");
        drop(buffer);
        queue.mark().wait(soon()).unwrap();
        assert_eq!(account.used(), 0);
    }
    assert!(matches!((&*device as &dyn Device).alloc_host(2 * MEMORY, &account), Err(DeviceError::OutOfMemory { .. })));
    assert!((&*device as &dyn Device).alloc_host(u64::MAX, &Account::new(u64::MAX)).is_err());
}
