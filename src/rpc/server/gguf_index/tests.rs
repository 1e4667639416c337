use super::file::tests::OPENED;
use super::reader::READ_CHUNK_BYTES;
use super::*;
use crate::device::noop::NoopDevice;
use crate::device::{DeviceKind, MemoryBudget};
use crate::gguf::{Gguf, Writer};
use crate::tensor::DType;
use std::fs;
use std::time::Duration;

/// A GGUF file with a tensor of zeros for each size, so that each has a digest of its own.
fn write_gguf(path: &Path, sizes: &[u64]) {
    let file = sizes.iter().fold(Writer::new(), |file, &size| file.tensor(&size.to_string(), &[size], DType::I8));
    fs::write(path, file.to_bytes().expect("a valid file")).expect("written");
}

fn digest_of_zeros(size: u64) -> [u8; 32] {
    *blake3::hash(&vec![0; size as usize]).as_bytes()
}

fn eventually(mut so: impl FnMut() -> bool) {
    let until = std::time::Instant::now() + Duration::from_secs(60);
    while !so() {
        assert!(std::time::Instant::now() < until);
        std::thread::yield_now();
    }
}

fn await_complete(index: &GgufIndex) {
    eventually(|| matches!(index.progress(), (hashed, tensors) if hashed == tensors));
}

#[test]
fn search_for_a_digest_opens_no_file() {
    let dir = tempfile::tempdir().expect("a folder");
    write_gguf(&dir.path().join("m.gguf"), &[64, 96, 128]);
    let index = GgufIndex::open(dir.path(), None).expect("an index");
    await_complete(&index);
    OPENED.set(0);
    assert_eq!(index.find(96, &digest_of_zeros(96)).len(), 1);
    // A tensor of that length exists, but not with those bytes; a digest that exists, but not of that length.
    for (bytes, digest) in
        [(96, [7; 32]), (96, digest_of_zeros(64)), (97, digest_of_zeros(96)), (0, digest_of_zeros(0))]
    {
        assert!(index.find(bytes, &digest).is_empty(), "{bytes} bytes");
    }
    assert_eq!(OPENED.get(), 0);
    // The counter counts: a tensor that is found is read.
    let found = index.find(96, &digest_of_zeros(96));
    let digest = TensorReader::start(&found[0], &|| true).and_then(TensorReader::hash).expect("a readable file");
    assert_eq!((digest, OPENED.get()), (digest_of_zeros(96), 1));
}

/// A client cannot make one LOAD read all copies of a tensor that many files have in common.
#[test]
fn one_load_opens_at_most_eight_files() {
    let device = NoopDevice::new("GPU0", DeviceKind::Gpu).shared();
    let budget = MemoryBudget::new(1 << 20);
    let region = device.alloc(64, &budget).expect("a buffer").whole();
    let mut queue = device.queue(&budget).expect("a queue");
    for unobserved in [false, true] {
        let dir = tempfile::tempdir().expect("a folder");
        let paths = (0..=MAX_CANDIDATES).map(|n| dir.path().join(format!("{n}.gguf"))).collect::<Vec<_>>();
        paths.iter().for_each(|path| write_gguf(path, &[64]));
        let index = GgufIndex::open(dir.path(), None).expect("an index");
        await_complete(&index);
        let found = index.find(64, &digest_of_zeros(64));
        assert_eq!(found.len(), MAX_CANDIDATES);
        // No candidate is the wanted tensor any more, so the load tries all of them.
        paths.iter().for_each(|path| fs::write(path, b"changed").expect("written"));
        let wanted = WantedTensor { name: "t", digest: digest_of_zeros(64), runs: ByteRuns::whole(64) };
        let mut target = LoadTarget { queue: &mut *queue, region: &region, tensor: None, unobserved, written: false };
        OPENED.set(0);
        assert_eq!(index.load(&found, &wanted, &mut target, &|| true), Ok(false));
        assert_eq!(OPENED.get(), MAX_CANDIDATES, "unobserved: {unobserved}");
    }
}

/// Runs that end within a chunk, at its end and after it, read in pieces of any length: each has the bytes of the slice, and the
/// digest is the whole tensor's.
#[test]
fn slices_are_read_while_the_whole_tensor_is_hashed() {
    let (dir, n) = (tempfile::tempdir().expect("a folder"), 3 * READ_CHUNK_BYTES + 1000);
    let path = dir.path().join("m.gguf");
    let file = Writer::new().tensor("a", &[50], DType::I8).tensor("t", &[n as u64], DType::I8);
    let mut file = file.to_bytes().expect("a valid file");
    let mut rng = fastrand::Rng::with_seed(71);
    let tensor: Vec<u8> = (0..n).map(|_| rng.u8(..)).collect();
    let at = Gguf::parse(&file).expect("a valid file").tensors[1].bytes.clone();
    file[at].copy_from_slice(&tensor);
    fs::write(&path, file).expect("written");
    let index = GgufIndex::open(dir.path(), None).expect("an index");
    await_complete(&index);
    let digest = *blake3::hash(&tensor).as_bytes();
    let found = index.find(n as u64, &digest);
    let chunk = READ_CHUNK_BYTES as u64;
    let mut cases = vec![
        ByteRuns::whole(n as u64),
        ByteRuns::new(0, chunk, chunk, 3).expect("valid runs"),
        ByteRuns::new(chunk, chunk, 2 * chunk, 1).expect("valid runs"),
        ByteRuns::new(chunk - 1, 2, chunk, 3).expect("valid runs"),
        ByteRuns::new(n as u64 - 1, 1, 1, 1).expect("valid runs"),
    ];
    while cases.len() < 40 {
        let [run_bits, gap_bits] = [0, 0].map(|_| rng.u32(0..20));
        let (offset, run_bytes) = (rng.u64(0..2 * chunk), rng.u64(1..=1 << run_bits));
        let stride = run_bytes + rng.u64(0..1 << gap_bits);
        let count = (n as u64).saturating_sub(offset + run_bytes) / stride;
        cases.extend((count > 0).then(|| ByteRuns::new(offset, run_bytes, stride, count).expect("valid runs")));
    }
    for runs in cases {
        let mut reader = SliceReader::new(TensorReader::start(&found[0], &|| true).expect("a file"), &runs);
        let mut slice = vec![0; runs.bytes() as usize];
        let mut rest = &mut slice[..];
        while !rest.is_empty() {
            let bits = rng.u32(8..21);
            let (now, later) = rest.split_at_mut(rng.usize(1..=1 << bits).min(rest.len()));
            reader.read(now).expect("bytes");
            rest = later;
        }
        let want = runs.slices(&tensor).expect("runs in the tensor").collect::<Vec<_>>().concat();
        assert!(slice == want, "{runs:?}");
        assert!(reader.read(&mut [0]).is_err(), "more bytes than the slice has");
        assert_eq!(reader.hash_rest().expect("bytes"), digest, "{runs:?}");
    }
    // An aborted load ends at the next chunk.
    let stop = || false;
    let mut reader = SliceReader::new(TensorReader::start(&found[0], &stop).expect("a file"), &ByteRuns::whole(10));
    assert!(matches!(reader.read(&mut [0; 10]), Err(TensorReadError::Aborted)));
    assert!(matches!(reader.hash_rest(), Err(TensorReadError::Aborted)));
}

#[test]
fn digests_are_kept_for_files_that_have_not_changed() {
    let (dir, kept) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    write_gguf(&dir.path().join("a.gguf"), &[64, 96]);
    write_gguf(&dir.path().join("b.gguf"), &[128]);
    let index = GgufIndex::open(dir.path(), Some(kept.path())).expect("an index");
    await_complete(&index);
    let digest_file =
        || fs::read_dir(kept.path()).expect("a folder").next().map(|entry| entry.expect("an entry").path());
    eventually(|| digest_file().is_some_and(|path| path.extension().is_some_and(|e| e == "digests")));
    drop(index);
    // The digests of all files are known at once.
    let index = GgufIndex::open(dir.path(), Some(kept.path())).expect("an index");
    assert_eq!(index.progress(), (3, 3));
    assert_eq!(index.find(128, &digest_of_zeros(128)).len(), 1);
    drop(index);
    // A file of the same size that was replaced has another identity.
    let bytes = fs::read(dir.path().join("b.gguf")).expect("a file");
    fs::remove_file(dir.path().join("b.gguf")).expect("removed");
    fs::write(dir.path().join("new"), [&bytes[..bytes.len() - 1], &[1]].concat()).expect("written");
    fs::rename(dir.path().join("new"), dir.path().join("b.gguf")).expect("renamed");
    let index = GgufIndex::open(dir.path(), Some(kept.path())).expect("an index");
    assert!(index.find(128, &digest_of_zeros(128)).is_empty());
    await_complete(&index);
    assert!(index.find(128, &digest_of_zeros(128)).is_empty());
    assert_eq!(index.find(64, &digest_of_zeros(64)).len(), 1);
    drop(index);
    // A damaged file of digests is ignored.
    let path = digest_file().expect("a file");
    let mut bytes = fs::read(&path).expect("a file");
    bytes[30] ^= 1;
    fs::write(&path, bytes).expect("written");
    let index = GgufIndex::open(dir.path(), Some(kept.path())).expect("an index");
    await_complete(&index);
    assert_eq!(index.find(64, &digest_of_zeros(64)).len(), 1);
}

#[test]
fn file_that_has_changed_is_not_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let path = dir.path().join("m.gguf");
    write_gguf(&path, &[64]);
    let index = GgufIndex::open(dir.path(), None).expect("an index");
    await_complete(&index);
    let found = index.find(64, &digest_of_zeros(64));
    let pipe = || rustix::fs::mknodat(rustix::fs::CWD, &path, rustix::fs::FileType::Fifo, rustix::fs::Mode::RUSR, 0);
    let link = || std::os::unix::fs::symlink(dir.path().join("other"), &path);
    fs::rename(&path, dir.path().join("other")).expect("renamed");
    pipe().expect("a pipe");
    assert!(TensorReader::start(&found[0], &|| true).is_err());
    fs::remove_file(&path).expect("removed");
    link().expect("a link");
    assert!(TensorReader::start(&found[0], &|| true).is_err(), "a link that the scan has not seen");
    fs::remove_file(&path).expect("removed");
    write_gguf(&path, &[64]);
    assert!(matches!(TensorReader::start(&found[0], &|| true), Err(TensorReadError::Changed)));
}

/// A slow disk does not delay the start of the server by more than the limit: the thread finds the files that are left.
#[test]
fn files_that_the_scan_at_the_start_has_not_reached_are_found_in_the_background() {
    let dir = tempfile::tempdir().expect("a folder");
    write_gguf(&dir.path().join("m.gguf"), &[64, 96]);
    let index = GgufIndex { hashing: Hashing::start(dir.path(), None, Duration::ZERO).expect("a thread") };
    // No request asks for a scan.
    eventually(|| index.progress() == (2, 2));
    assert_eq!(index.find(96, &digest_of_zeros(96)).len(), 1);
}
