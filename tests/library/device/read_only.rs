//! Weights in a read-only mapping of a file: products, refused writes, and whose memory the pages are.

use super::{MEMORY, floats, test_deadline};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Buffer, Device, DeviceError, ImportHost, MappedFile, MemoryBudget, Queue, UploadSource};
use fanout::graph::{Builder, Graph};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::unary::Unary;
use fanout::tensor::{Capability, DType, TensorDesc};
use fanout_testing::inputs::encode_row;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Command, Stdio};
use std::sync::Arc;
use tempfile::NamedTempFile;

/// Columns of a product: few, which read the rows in place, and many, which pack rows for one product.
const COLUMNS: [usize; 3] = [1, 3, 40];

fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| rng.f32() - 0.5).collect()
}

/// A weight of each type with a codec, one after another in a file, with its offset.
fn weights_file() -> (NamedTempFile, Vec<(TensorDesc, u64)>) {
    let (mut bytes, mut weights) = (vec![0; 32], Vec::new());
    for dtype in DType::with_capability(Capability::Decode) {
        let a = TensorDesc::contiguous(dtype, [512, 144, 1, 1]).unwrap();
        let start = bytes.len();
        bytes.resize((start + a.extent()).next_multiple_of(32), 0);
        encode_row(dtype, &values(512 * 144, 1), &mut bytes[start..][..a.extent()]);
        weights.push((a, start as u64));
    }
    let mut file = NamedTempFile::new().unwrap();
    file.write_all(&bytes).unwrap();
    (file, weights)
}

/// y = a · x, each in a slot of its own.
fn product(a: &TensorDesc, columns: usize) -> Arc<Graph> {
    let mut b = Builder::with_separate_slots();
    let (a, x) = (b.leaf_with_desc(*a).unwrap(), b.leaf(DType::F32, [a.ne()[0], columns, 1, 1]).unwrap());
    b.node(MulMat::PLAIN, &[Some(a), Some(x)]).unwrap();
    Arc::new(b.build())
}

fn multiply(
    device: &CpuDevice,
    queue: &mut dyn Queue,
    a: &TensorDesc,
    (buffer, offset): (&Buffer, u64),
    columns: usize,
) -> Vec<f32> {
    let (graph, budget) = (product(a, columns), MemoryBudget::new(MEMORY));
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let [x, y] = [1, 2].map(|slot| device.alloc(graph.slot_sizes()[slot] as u64, &budget).unwrap());
    let bytes: Vec<u8> = values(columns * a.ne()[0], 2).iter().flat_map(|v| v.to_le_bytes()).collect();
    queue.upload(x.whole(), None, UploadSource::Borrowed(&bytes)).unwrap();
    let weight = buffer.region(offset, a.extent() as u64).unwrap();
    queue.run(&program, &Arc::from([weight, x.whole(), y.whole()])).unwrap();
    floats(&queue.download(y.whole()).unwrap().wait(test_deadline()).unwrap())
}

/// A field of the mapping at an address in `/proc/self/smaps`, in KiB.
fn smaps(address: usize, field: &str) -> usize {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let (mut found, prefix) = (false, format!("{field}:"));
    for line in text.lines() {
        let range = line.split(' ').next().and_then(|range| range.split_once('-'));
        if let Some((Ok(start), Ok(end))) =
            range.map(|(start, end)| (usize::from_str_radix(start, 16), usize::from_str_radix(end, 16)))
        {
            found = (start..end).contains(&address);
        } else if found && let Some(value) = line.strip_prefix(&prefix) {
            return value.trim().trim_end_matches(" kB").parse().unwrap();
        }
    }
    panic!("no {field} of {address:x}");
}

/// Products of every weight with few and many columns: the results of uploaded weights, no memory reserved, and no page of the
/// mapping becomes memory of the process.
#[test]
fn products_read_a_read_only_mapping_and_leave_its_pages_to_the_file() {
    let (file, weights) = weights_file();
    let mapped = MappedFile::open(file.path()).unwrap();
    for mode in [MathMode::Fast, MathMode::Exact] {
        let (device, budget) = (CpuDevice::new("CPU", 2, mode, MEMORY).unwrap(), MemoryBudget::new(MEMORY));
        let mut queue = device.queue(&budget).unwrap();
        let mapping = mapped.map_read_only(0..mapped.len()).unwrap();
        assert!(mapping[..] == *mapped.bytes());
        let address = mapping.as_ptr().addr();
        let imported = device.import_read_only(mapping).unwrap();
        assert_eq!((imported.bytes(), imported.device_name()), (mapped.len(), "CPU"));
        for (a, offset) in &weights {
            let uploaded = device.alloc(a.extent() as u64, &budget).unwrap();
            let bytes = mapped.slice(*offset..offset + a.extent() as u64).unwrap();
            queue.upload(uploaded.whole(), Some(a), UploadSource::Borrowed(bytes)).unwrap();
            for columns in COLUMNS {
                let want = multiply(&device, &mut *queue, a, (&uploaded, 0), columns);
                let got = multiply(&device, &mut *queue, a, (&imported, *offset), columns);
                let largest = want.iter().fold(0f32, |most, v| most.max(v.abs()));
                // Rows and panels sum in another order.
                let bound = if mode == MathMode::Exact { 0.0 } else { 1e-5 * largest };
                let error = want.iter().zip(&got).fold(0f32, |most, (a, b)| most.max((a - b).abs()));
                assert!(error <= bound, "{mode:?}, {}, {columns} columns: {error} of {largest}", a.dtype());
            }
        }
        let read = queue.download(imported.whole()).unwrap().wait(test_deadline()).unwrap();
        assert!(read == mapped.bytes());
        // `mapped` has touched each page too, so smaps counts the pages as shared, whether the file is written to the disk or not.
        let size = smaps(address, "Size");
        assert!(size * 1024 >= mapped.bytes().len() && smaps(address, "Rss") * 2 > size, "{size} KiB");
        for field in ["Private_Dirty", "Anonymous"] {
            assert!(smaps(address, field) <= size / 100, "{field}: {} of {size} KiB", smaps(address, field));
        }
    }
}

/// Each refusal comes from the call itself, writes nothing, and does not stick to the queue.
#[test]
fn writes_to_a_read_only_mapping_are_refused() {
    let (file, weights) = weights_file();
    let mapped = MappedFile::open(file.path()).unwrap();
    let (device, budget) = (CpuDevice::new("CPU", 2, MathMode::Fast, MEMORY).unwrap(), MemoryBudget::new(MEMORY));
    let imported = device.import_read_only(mapped.map_read_only(0..mapped.len()).unwrap()).unwrap();
    let other = device.alloc(mapped.len(), &budget).unwrap();
    let mut queue = device.queue(&budget).unwrap();
    let refused = |result: Result<(), DeviceError>, what: &str| match result {
        Err(DeviceError::Misuse(text)) => assert!(text.contains("read-only"), "{what}: {text}"),
        other => panic!("{what}: {other:?}"),
    };
    // Small and large transfers take different paths.
    for bytes in [64, mapped.len()] {
        let (to, from) = (imported.region(0, bytes).unwrap(), other.region(0, bytes).unwrap());
        let content = vec![1; bytes as usize];
        refused(queue.upload(to.clone(), None, UploadSource::Borrowed(&content)), "upload");
        let mut writer = |_: &mut [u8]| panic!("the source of a refused upload is not read");
        refused(queue.upload(to.clone(), None, UploadSource::Writer(&mut writer)), "upload by a writer");
        refused(queue.fill(to.clone(), 1), "fill");
        refused(queue.copy_from(from.clone(), to.clone(), None).map(drop), "copy");
        refused(queue.copy_from(to.clone(), to, None).map(drop), "copy inside");
        assert!(queue.copy_from(imported.region(0, bytes).unwrap(), from, None).unwrap().is_submitted());
    }
    let a = weights.iter().find(|(a, _)| a.dtype() == DType::F32).unwrap().0;
    let graph = product(&a, 1);
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let [x, y] = [1, 2].map(|slot| imported.region(0, graph.slot_sizes()[slot] as u64).unwrap());
    let weight = imported.region(32, a.extent() as u64).unwrap();
    let mut b = Builder::new();
    let leaf = b.leaf(DType::F32, [64, 1, 1, 1]).unwrap();
    b.node(Unary::Sqr, &[Some(leaf)]).unwrap();
    let in_one_slot = Arc::new(b.build());
    let square = device.prepare(Arc::clone(&in_one_slot)).unwrap();
    let slot = imported.region(0, in_one_slot.slot_sizes()[0] as u64).unwrap();
    for (program, bindings) in [(&program, vec![weight, x, y]), (&square, vec![slot])] {
        let bindings: Arc<[_]> = bindings.into();
        refused(queue.run(program, &bindings), "run");
        refused(queue.run_inline(program, &bindings, std::time::Duration::from_secs(1)), "run inline");
    }
    if let Some(memory) = queue.prefault() {
        memory.prefault(&imported.whole());
    }
    assert!(queue.load_by_digest().is_none());
    let read = queue.download(imported.whole()).unwrap().wait(test_deadline()).unwrap();
    assert!(read == mapped.bytes() && std::fs::read(file.path()).unwrap() == mapped.bytes());
}

#[test]
fn a_read_only_mapping_has_the_range_and_the_alignment_of_its_file() {
    let (file, _) = weights_file();
    let mapped = MappedFile::open(file.path()).unwrap();
    // A device without memory: none is reserved.
    let device = CpuDevice::new("CPU", 1, MathMode::Fast, 0).unwrap();
    for (start, end) in [(0, mapped.len()), (8, 5000), (4096, 8192), (7, 7), (0, 0)] {
        let mapping = mapped.map_read_only(start..end).unwrap();
        assert_eq!(&mapping[..], mapped.slice(start..end).unwrap());
        assert_eq!(device.import_read_only(mapping).unwrap().bytes(), end - start);
    }
    for start in [1, 4, 12, 4096 - 4] {
        let mapping = mapped.map_read_only(start..start + 8).unwrap();
        assert!(matches!(device.import_read_only(mapping), Err(DeviceError::Misuse(_))), "at {start}");
    }
    assert!(mapped.map_read_only(0..mapped.len() + 1).is_err());
    file.as_file().set_len(5000).unwrap();
    assert!(mapped.map_read_only(0..5001).is_err() && mapped.map_read_only(0..5000).is_ok());
}

/// Names the file of the child process in `two_processes_share_the_pages_of_a_file`.
const CHILD_FILE: &str = "FANOUT_TEST_MAPPED_FILE";

/// The test starts itself once more as a process that maps the same file and reads all of it.
#[test]
fn two_processes_share_the_pages_of_a_file() {
    let child_file = std::env::var_os(CHILD_FILE);
    let (file, path) = match &child_file {
        Some(path) => (None, path.into()),
        None => {
            let file = weights_file().0;
            let path = file.path().to_owned();
            (Some(file), path)
        }
    };
    let mapped = MappedFile::open(&path).unwrap();
    let (device, budget) = (CpuDevice::new("CPU", 1, MathMode::Fast, MEMORY).unwrap(), MemoryBudget::new(MEMORY));
    let mapping = mapped.map_read_only(0..mapped.len()).unwrap();
    let address = mapping.as_ptr().addr();
    let imported = device.import_read_only(mapping).unwrap();
    let mut queue = device.queue(&budget).unwrap();
    let read = queue.download(imported.whole()).unwrap().wait(test_deadline()).unwrap();
    assert_eq!(read.len() as u64, mapped.len());
    if child_file.is_some() {
        println!("\nall pages are mapped");
        // Keeps the mapping until the parent has measured its own, and closes the pipe.
        std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
        return;
    }
    let name = std::thread::current().name().unwrap_or_default().to_owned();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([&*name, "--exact", "--nocapture"])
        .env(CHILD_FILE, &path)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "all pages are mapped"), "the child has mapped the file");
    let (rss, pss) = (smaps(address, "Rss"), smaps(address, "Pss"));
    drop(child.stdin.take());
    assert!(child.wait().unwrap().success());
    drop(file);
    assert!(rss * 1024 > mapped.bytes().len() * 9 / 10 && pss * 10 <= rss * 6, "Pss {pss} of Rss {rss} KiB");
}
