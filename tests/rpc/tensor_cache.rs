//! The tensor cache on disk: SET_TENSOR with the cache flag, SET_TENSOR_HASH, corrupt files and eviction.

use crate::support::*;
use fanout::rpc::server::{BindError, CacheConfig, Config, Server};
use fanout::rpc::wire::*;
use std::path::{Path, PathBuf};
use std::time::Duration;

const SIZE: usize = 100_000;

/// Size of an entry's header.
const HEADER: u64 = 76;

fn config(dir: &Path, max_bytes: u64) -> Config {
    Config::default().with_cache(Some(CacheConfig::new(dir).with_max_bytes(max_bytes)))
}

pub(crate) fn fnv1a(bytes: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for &byte in bytes {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    hash
}

pub(crate) fn upload_cached(client: &mut Client, tensor: &TensorRecord, data: &[u8]) {
    let head = SetTensorHead { tensor: tensor.clone(), cache: true, offset: 0 };
    client.send(&Request::SetTensor(SetTensor { head, data }));
    client.assert_alive();
}

/// Whether the cache has data of this hash for a tensor. The server then writes the data into the tensor.
pub(crate) fn is_cached(client: &mut Client, tensor: &TensorRecord, offset: u64, hash: u64) -> bool {
    client.request_number(&Request::SetTensorHash(SetTensorHash { tensor: tensor.clone(), offset, hash })) == 1
}

pub(crate) fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(dir).expect("the folder").map(|e| e.expect("an entry").path()).collect();
    files.sort();
    files
}

/// The only entry with this data.
fn entry_of(dir: &Path, data: &[u8]) -> PathBuf {
    let end = format!("-{:016x}.tensor", fnv1a(data));
    let mut found = files(dir).into_iter().filter(|path| path.to_str().is_some_and(|path| path.ends_with(&end)));
    match (found.next(), found.next()) {
        (Some(entry), None) => entry,
        other => panic!("not one entry: {other:?}"),
    }
}

#[test]
fn cached_data_is_found_by_other_clients_and_after_a_restart() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("not/yet/created");
    // The first size is staged in one piece, the second is written in place in several pieces.
    for size in [SIZE, 3 << 20] {
        let data = random_bytes(size as u64, size);
        for restarted in [false, true] {
            let server = TestServer::start(config(&folder, 1 << 30));
            let mut client = Client::connect(&server);
            let memory = client.alloc(0, size as u64 + 100);
            let tensor = memory.tensor(1, fanout::tensor::DType::I8, [size as u32, 1, 1, 1], 0);
            assert_eq!(is_cached(&mut client, &tensor, 0, fnv1a(&data)), restarted);
            if !restarted {
                upload_cached(&mut client, &tensor, &data);
            }
            let mut other = Client::connect(&server);
            let memory = other.alloc(0, size as u64 + 100);
            let tensor = memory.tensor(1, fanout::tensor::DType::I8, [size as u32, 1, 1, 1], 50);
            assert!(is_cached(&mut other, &tensor, 0, fnv1a(&data)));
            assert!(other.get_tensor(&tensor, 0, size as u64) == data);
            assert_eq!(other.get_tensor(&memory.byte_tensor(), 0, 50), [0; 50]);
            for (n, offset) in [(size - 1, 0), (size + 1, 0), (size, 1)] {
                let tensor = memory.tensor(1, fanout::tensor::DType::I8, [n as u32, 1, 1, 1], 0);
                assert!(!is_cached(&mut other, &tensor, offset, fnv1a(&data)), "{n} from {offset}");
            }
        }
    }
}

/// A client from an address of loopback that has uploaded data for the cache.
fn upload_from(server: &TestServer, client: [u8; 4], data: &[u8]) {
    let mut client = Client::connect_from(client, server.addr).exchange_hello(CLIENT_VERSION);
    let memory = client.alloc(0, data.len() as u64);
    upload_cached(&mut client, &memory.byte_tensor(), data);
}

#[test]
fn an_address_finds_its_own_entries_alone() {
    for loopback_tenants in [false, true] {
        let dir = tempfile::tempdir().expect("a folder");
        let config = || config(dir.path(), 1 << 30).with_loopback_tenants(loopback_tenants);
        let is_cached_for = |server: &TestServer, client, data: &[u8]| {
            let mut client = Client::connect_from(client, server.addr).exchange_hello(CLIENT_VERSION);
            let memory = client.alloc(0, data.len() as u64);
            is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(data))
        };
        let (ours, theirs) = ([127, 0, 0, 2], [127, 0, 0, 3]);
        let data = random_bytes(1, SIZE);
        for restarted in [false, true] {
            let server = TestServer::start(config());
            if !restarted {
                upload_from(&server, ours, &data);
            }
            assert!(is_cached_for(&server, ours, &data));
            assert_eq!(is_cached_for(&server, theirs, &data), !loopback_tenants, "other addresses of loopback");
        }
        let server = TestServer::start(config());
        upload_from(&server, theirs, &data);
        assert!(is_cached_for(&server, theirs, &data) && is_cached_for(&server, ours, &data));
        assert_eq!(files(dir.path()).len(), if loopback_tenants { 2 } else { 1 });
    }
}

/// A file of a version without owners, or of nobody: it is found by no hash, and is evicted for others.
#[test]
fn files_with_other_names_are_evicted_and_never_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let data = random_bytes(1, SIZE);
    let old = dir.path().join(format!("{:016x}.tensor", fnv1a(&data)));
    std::fs::write(&old, &data).expect("written");
    let server = TestServer::start(config(dir.path(), 2 * (SIZE as u64 + HEADER)));
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, SIZE as u64);
    assert!(!is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)));
    assert!(old.exists());
    for seed in 2..4 {
        upload_cached(&mut client, &memory.byte_tensor(), &random_bytes(seed, SIZE));
    }
    assert!(!old.exists());
}

#[test]
fn uploads_without_the_cache_flag_and_small_uploads_are_not_cached() {
    let dir = tempfile::tempdir().expect("a folder");
    for config in [Config::default(), config(dir.path(), 1 << 30)] {
        let server = TestServer::start(config);
        let mut client = Client::connect(&server);
        let memory = client.alloc(0, SIZE as u64);
        let data = random_bytes(1, SIZE);
        client.set_tensor(&memory.byte_tensor(), 0, &data);
        assert!(!is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)));
        upload_cached(&mut client, &memory.byte_tensor(), &data[..1000]);
    }
    assert_eq!(files(dir.path()), Vec::<PathBuf>::new());
}

#[test]
fn corrupt_cache_files_are_removed_and_logged() {
    type Damage = fn(&mut Vec<u8>);
    let damages: &[(&str, Damage)] = &[
        ("digest", |file| file[SIZE / 2] ^= 1),
        ("digest", |file| *file.last_mut().expect("bytes") ^= 0x80),
        ("digest", |file| file[50] ^= 1),
        ("length", |file| file.truncate(SIZE)),
        ("length", |file| file.push(0)),
        ("version", |file| file[0] ^= 1),
        ("version", |file| file[8] = 99),
        ("does not match the file name", |file| file[20] ^= 1),
        ("does not match the file name", |file| file[36] ^= 1),
        ("fill whole buffer", |file| file.truncate(10)),
        ("fill whole buffer", Vec::clear),
    ];
    for size in [SIZE, 1 << 20] {
        for (seed, (reason, damage)) in damages.iter().enumerate() {
            let dir = tempfile::tempdir().expect("a folder");
            let server = TestServer::start(config(dir.path(), 1 << 30));
            let mut client = Client::connect(&server);
            let memory = client.alloc(0, size as u64);
            let data = random_bytes((size + seed) as u64, size);
            upload_cached(&mut client, &memory.byte_tensor(), &data);
            let path = files(dir.path()).pop().expect("a file");
            let mut bytes = std::fs::read(&path).expect("readable");
            damage(&mut bytes);
            std::fs::write(&path, &bytes).expect("writable");
            assert!(!is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)), "{reason}");
            assert_eq!(files(dir.path()), Vec::<PathBuf>::new(), "{reason}");
            let lines = logged_warnings(&path.display().to_string());
            assert!(lines.len() == 1 && lines[0].contains(reason), "{reason}: {lines:?}");
            // A new upload of the data is cached again.
            upload_cached(&mut client, &memory.byte_tensor(), &data);
            assert!(is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)));
        }
    }
}

#[test]
fn the_least_recently_used_files_are_evicted() {
    let dir = tempfile::tempdir().expect("a folder");
    let server = TestServer::start(config(dir.path(), 3 * SIZE as u64 + 1000));
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, SIZE as u64);
    let data: Vec<_> = (0..5).map(|seed| random_bytes(seed, SIZE)).collect();
    let age = |back: u64, path: &Path| {
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(back);
        let file = std::fs::File::options().write(true).open(path).expect("a file");
        file.set_modified(then).expect("a time");
    };
    for (i, data) in data[..3].iter().enumerate() {
        upload_cached(&mut client, &memory.byte_tensor(), data);
        age(100 - i as u64, &entry_of(dir.path(), data));
    }
    // A lookup of the oldest file makes the second file the least recently used one.
    assert!(is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data[0])));
    upload_cached(&mut client, &memory.byte_tensor(), &data[3]);
    let found: Vec<_> = data.iter().map(|data| is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(data))).collect();
    assert_eq!(found, [true, false, true, true, false]);
    // A second upload of cached data replaces its file. Until then both are on the disk, so another one is evicted.
    upload_cached(&mut client, &memory.byte_tensor(), &data[3]);
    let found: Vec<_> = data.iter().map(|data| is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(data))).collect();
    assert_eq!((found, files(dir.path()).len()), (vec![false, false, true, true, false], 2));
    // A server with a smaller cache limit evicts files when it starts.
    drop(server);
    let server = TestServer::start(config(dir.path(), SIZE as u64 + 500));
    assert_eq!(files(dir.path()).len(), 1);
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 2 * SIZE as u64);
    upload_cached(&mut client, &memory.byte_tensor(), &random_bytes(9, 2 * SIZE));
    assert_eq!(files(dir.path()).len(), 1, "data larger than the cache limit is not cached");
}

#[test]
fn an_interrupted_upload_leaves_no_cache_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let server = TestServer::start(config(dir.path(), 1 << 30));
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, SIZE as u64);
    let head = SetTensorHead { tensor: memory.byte_tensor(), cache: true, offset: 0 };
    let bytes = encode_message(&Request::SetTensor(SetTensor { head, data: &random_bytes(1, SIZE) }));
    client.write(&bytes[..SIZE / 2]);
    client.shutdown_write();
    client.expect_refused(&["SET_TENSOR", "in the middle of a message"]);
    assert_eq!(files(dir.path()), Vec::<PathBuf>::new());
}

/// A client can interrupt any number of uploads, so the lines about files that cannot be removed are limited too.
#[test]
fn files_that_cannot_be_removed_are_a_few_log_lines() {
    let dir = tempfile::tempdir().expect("a folder");
    let config = config(dir.path(), 1 << 30).with_log_burst(2).with_log_interval(Duration::from_secs(24 * 3600));
    let mut server = TestServer::start(config);
    for round in 1..=5 {
        let mut client = Client::connect(&server);
        let memory = client.alloc(0, SIZE as u64);
        let head = SetTensorHead { tensor: memory.byte_tensor(), cache: true, offset: 0 };
        let bytes = encode_message(&Request::SetTensor(SetTensor { head, data: &random_bytes(1, SIZE) }));
        client.write(&bytes[..SIZE / 2]);
        let partial = || files(dir.path()).into_iter().find(|path| path.is_file());
        eventually("the upload is being cached", || partial().is_some());
        // A folder is not removed like a file, whatever the user may do.
        let partial = partial().expect("a file");
        std::fs::remove_file(&partial).expect("removed");
        std::fs::create_dir(&partial).expect("a folder");
        drop(client);
        eventually("the session has ended", || server.handle.connections() == 0);
        assert_eq!(files(dir.path()).len(), round);
    }
    server.stop();
    let shown = logged_warnings(&format!("cannot remove {}", dir.path().display()));
    assert_eq!(shown.len(), 2, "{shown:#?}");
    assert_eq!(logged_lines("left out: 3 more lines about failures of the cache").len(), 1);
}

#[test]
fn removing_the_cache_folder_ends_no_session() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("cache");
    let server = TestServer::start(config(&folder, 1 << 30));
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, SIZE as u64);
    std::fs::remove_dir_all(&folder).expect("removed");
    let data = random_bytes(1, SIZE);
    upload_cached(&mut client, &memory.byte_tensor(), &data);
    assert!(client.get_tensor(&memory.byte_tensor(), 0, SIZE as u64) == data);
    assert!(!is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)));
    assert_eq!(client.warnings(), Vec::<String>::new());
    assert_eq!(logged_warnings(&folder.display().to_string()).len(), 1);
}

/// An entry's name is known to everyone who knows its data, so another user of the machine may have taken it.
#[cfg(unix)]
#[test]
fn special_files_are_not_taken_for_cached_data() {
    let dir = tempfile::tempdir().expect("a folder");
    let data = random_bytes(1, SIZE);
    let server = TestServer::start(config(dir.path(), 1 << 30));
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, SIZE as u64);
    upload_cached(&mut client, &memory.byte_tensor(), &data);
    let entry = files(dir.path()).pop().expect("a file");
    let elsewhere = tempfile::tempdir().expect("a folder");
    let moved = elsewhere.path().join("moved");
    std::fs::rename(&entry, &moved).expect("renamed");
    // Opening a pipe without another end would block the session.
    let make_pipe = |path: &Path| {
        assert!(std::process::Command::new("mkfifo").arg(path).status().expect("mkfifo").success());
    };
    let make_link = |path: &Path| std::os::unix::fs::symlink(&moved, path).expect("a link");
    let make_folder = |path: &Path| std::fs::create_dir(path).expect("a folder");
    type Make<'a> = &'a dyn Fn(&Path);
    let cases: [(&str, Make<'_>); 3] = [("pipe", &make_pipe), ("link", &make_link), ("folder", &make_folder)];
    for (what, make) in cases {
        make(&entry);
        assert!(!is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)), "{what}");
        assert_eq!(files(dir.path()), std::slice::from_ref(&entry), "{what}");
        upload_cached(&mut client, &memory.byte_tensor(), &data);
        if what == "folder" {
            // It cannot be replaced by a file, so the data is not cached.
            assert!(!is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)));
            std::fs::remove_dir(&entry).expect("removed");
        } else {
            assert!(is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)), "{what}");
            std::fs::remove_file(&entry).expect("removed");
        }
    }
    assert_eq!(std::fs::metadata(&moved).expect("the file of the link").len(), SIZE as u64 + HEADER);
}

/// Symbolic links under the names that temporary files had before these were random, and a temporary file of a killed server.
#[cfg(unix)]
#[test]
fn temporary_files_follow_no_links_and_do_not_stay() {
    let dir = tempfile::tempdir().expect("a folder");
    let victim = dir.path().join("victim");
    let folder = dir.path().join("cache");
    std::fs::create_dir(&folder).expect("a folder");
    std::fs::write(folder.join("0123456789abcdef.part"), [0; 1000]).expect("written");
    let links: Vec<_> = (0..1000).map(|i| folder.join(format!("{}-{i}.part", std::process::id()))).collect();
    links.iter().for_each(|link| std::os::unix::fs::symlink(&victim, link).expect("a link"));
    let server = TestServer::start(config(&folder, 1 << 30));
    assert_eq!(
        files(&folder).len(),
        links.len(),
        "the abandoned file is removed, what the cache did not create is not"
    );
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, SIZE as u64);
    let data = random_bytes(1, SIZE);
    upload_cached(&mut client, &memory.byte_tensor(), &data);
    assert!(is_cached(&mut client, &memory.byte_tensor(), 0, fnv1a(&data)));
    assert!(!victim.exists());
}

/// The cache's size limit holds also while uploads are in progress, whose bytes are on the disk already.
#[test]
fn uploads_in_progress_count_against_the_cache_size() {
    const UPLOAD: usize = 4 << 20;
    let dir = tempfile::tempdir().expect("a folder");
    let limit = 3 * (UPLOAD as u64 + HEADER) + 1000;
    let server = TestServer::start(config(dir.path(), limit));
    let used = || files(dir.path()).iter().filter_map(|path| Some(path.metadata().ok()?.len())).sum::<u64>();
    // Fills the cache: the uploads evict this entry when their bytes arrive, and not before.
    let mut first = Client::connect(&server);
    let memory = first.alloc(0, 2 * UPLOAD as u64);
    upload_cached(&mut first, &memory.byte_tensor(), &random_bytes(9, 2 * UPLOAD));
    assert_eq!(files(dir.path()).len(), 1);
    let begin = |seed, missing: usize| {
        let mut client = Client::connect(&server);
        let tensor = client.alloc(0, UPLOAD as u64).byte_tensor();
        let data = random_bytes(seed, UPLOAD);
        let head = SetTensorHead { tensor: tensor.clone(), cache: true, offset: 0 };
        let mut message = encode_message(&Request::SetTensor(SetTensor { head, data: &data }));
        let rest = message.split_off(message.len() - missing);
        client.write(&message);
        (client, tensor, data, rest)
    };
    let finish = |(mut client, tensor, data, rest): (Client, TensorRecord, Vec<u8>, Vec<u8>)| {
        client.write(&rest);
        assert!(client.get_tensor(&tensor, 0, UPLOAD as u64) == data, "an upload that is not cached succeeds");
        assert!(used() <= limit);
    };
    // Four uploads of 3 of their 4 MiB fill the cache, so that no other one fits.
    let uploads: Vec<_> = (0..4)
        .map(|seed| {
            let upload = begin(seed, 1 << 20);
            let arrived = (seed + 1) * (HEADER + (3 << 20));
            eventually("the upload is being cached", || {
                let partial =
                    files(dir.path()).into_iter().filter(|path| path.extension().is_some_and(|e| e == "part"));
                partial.filter_map(|path| Some(path.metadata().ok()?.len())).sum::<u64>() == arrived
            });
            upload
        })
        .collect();
    finish(begin(4, 0));
    assert_eq!(files(dir.path()).len(), 4);
    uploads.into_iter().for_each(finish);
    // The first one to go on found no room; the next three have it.
    assert_eq!(files(dir.path()).len(), 3);
    // The uploads have given back what they held.
    for seed in [7, 8] {
        let memory = first.alloc(0, UPLOAD as u64);
        let data = random_bytes(seed, UPLOAD);
        upload_cached(&mut first, &memory.byte_tensor(), &data);
        assert!(is_cached(&mut first, &memory.byte_tensor(), 0, fnv1a(&data)));
        assert!(used() <= limit);
    }
}

#[test]
fn an_unusable_cache_folder_fails_the_bind() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("file");
    std::fs::write(&file, b"not a folder").expect("writable");
    let server = TestServer::start(Config::default());
    let bound = Server::bind("127.0.0.1", 0, server.devices.clone(), config(&file, 1 << 30));
    assert!(matches!(bound, Err(BindError::Cache { .. })));
}
