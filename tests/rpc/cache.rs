//! SET_TENSOR_HASH: data that is kept, found, found broken, and makes room.

use crate::support::*;
use fanout::rpc::server::{BindError, CacheConfig, Config, Server};
use fanout::rpc::wire::*;
use std::path::{Path, PathBuf};

const SIZE: usize = 100_000;

fn config(dir: &Path, max_bytes: u64) -> Config {
    Config::default().with_cache(Some(CacheConfig::new(dir).with_max_bytes(max_bytes)))
}

fn fnv(bytes: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for &byte in bytes {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    hash
}

fn keep(client: &mut Client, tensor: &TensorRecord, data: &[u8]) {
    let head = SetTensorHead { tensor: tensor.clone(), cache: true, offset: 0 };
    client.send(&Request::SetTensor(SetTensor { head, data }));
    client.assert_alive();
}

/// Whether the server has data of this hash for a tensor.
fn has(client: &mut Client, tensor: &TensorRecord, offset: u64, hash: u64) -> bool {
    client.request_number(&Request::SetTensorHash(SetTensorHash { tensor: tensor.clone(), offset, hash })) == 1
}

fn files(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = std::fs::read_dir(dir).expect("the folder").map(|e| e.expect("an entry").path()).collect();
    files.sort();
    files
}

#[test]
fn data_is_found_again_by_others_and_after_a_restart() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("not/yet/there");
    // In one staged piece, and in several in place.
    for size in [SIZE, 3 << 20] {
        let data = noise(size as u64, size);
        for restarted in [false, true] {
            let server = TestServer::start(config(&folder, 1 << 30));
            let mut client = Client::open(&server);
            let memory = client.alloc(0, size as u64 + 100);
            let tensor = memory.tensor(1, fanout::tensor::DType::I8, [size as u32, 1, 1, 1], 0);
            assert_eq!(has(&mut client, &tensor, 0, fnv(&data)), restarted);
            if !restarted {
                keep(&mut client, &tensor, &data);
            }
            let mut other = Client::open(&server);
            let memory = other.alloc(0, size as u64 + 100);
            let tensor = memory.tensor(1, fanout::tensor::DType::I8, [size as u32, 1, 1, 1], 50);
            assert!(has(&mut other, &tensor, 0, fnv(&data)));
            assert!(other.get(&tensor, 0, size as u64) == data);
            assert_eq!(other.get(&memory.bytes(), 0, 50), [0; 50]);
            for (n, offset) in [(size - 1, 0), (size + 1, 0), (size, 1)] {
                let tensor = memory.tensor(1, fanout::tensor::DType::I8, [n as u32, 1, 1, 1], 0);
                assert!(!has(&mut other, &tensor, offset, fnv(&data)), "{n} from {offset}");
            }
        }
    }
}

#[test]
fn nothing_is_kept_unasked() {
    let dir = tempfile::tempdir().expect("a folder");
    for config in [Config::default(), config(dir.path(), 1 << 30)] {
        let server = TestServer::start(config);
        let mut client = Client::open(&server);
        let memory = client.alloc(0, SIZE as u64);
        let data = noise(1, SIZE);
        client.set(&memory.bytes(), 0, &data);
        assert!(!has(&mut client, &memory.bytes(), 0, fnv(&data)));
        keep(&mut client, &memory.bytes(), &data[..1000]);
    }
    assert_eq!(files(dir.path()), Vec::<PathBuf>::new());
}

#[test]
fn broken_files_are_dropped_and_said_so() {
    type Damage = fn(&mut Vec<u8>);
    let damages: &[(&str, Damage)] = &[
        ("digest", |file| file[SIZE / 2] ^= 1),
        ("digest", |file| *file.last_mut().expect("bytes") ^= 0x80),
        ("digest", |file| file[40] ^= 1),
        ("length", |file| file.truncate(SIZE)),
        ("length", |file| file.push(0)),
        ("version", |file| file[0] ^= 1),
        ("version", |file| file[8] = 99),
        ("another hash", |file| file[20] ^= 1),
        ("fill whole buffer", |file| file.truncate(10)),
        ("fill whole buffer", Vec::clear),
    ];
    for size in [SIZE, 1 << 20] {
        for (seed, (reason, damage)) in damages.iter().enumerate() {
            let dir = tempfile::tempdir().expect("a folder");
            let server = TestServer::start(config(dir.path(), 1 << 30));
            let mut client = Client::open(&server);
            let memory = client.alloc(0, size as u64);
            let data = noise((size + seed) as u64, size);
            keep(&mut client, &memory.bytes(), &data);
            let path = files(dir.path()).pop().expect("a file");
            let mut bytes = std::fs::read(&path).expect("readable");
            damage(&mut bytes);
            std::fs::write(&path, &bytes).expect("writable");
            assert!(!has(&mut client, &memory.bytes(), 0, fnv(&data)), "{reason}");
            assert_eq!(files(dir.path()), Vec::<PathBuf>::new(), "{reason}");
            let lines = logged(&path.display().to_string());
            assert!(lines.len() == 1 && lines[0].contains(reason), "{reason}: {lines:?}");
            // The client sends it again, and all is well.
            keep(&mut client, &memory.bytes(), &data);
            assert!(has(&mut client, &memory.bytes(), 0, fnv(&data)));
        }
    }
}

#[test]
fn the_longest_unused_make_room() {
    let dir = tempfile::tempdir().expect("a folder");
    let server = TestServer::start(config(dir.path(), 3 * SIZE as u64 + 1000));
    let mut client = Client::open(&server);
    let memory = client.alloc(0, SIZE as u64);
    let data: Vec<_> = (0..5).map(|seed| noise(seed, SIZE)).collect();
    let age = |back: u64, path: &Path| {
        let then = std::time::SystemTime::now() - std::time::Duration::from_secs(back);
        let file = std::fs::File::options().write(true).open(path).expect("a file");
        file.set_modified(then).expect("a time");
    };
    for (i, data) in data[..3].iter().enumerate() {
        keep(&mut client, &memory.bytes(), data);
        age(100 - i as u64, &dir.path().join(format!("{:016x}.tensor", fnv(data))));
    }
    // The oldest is used: the second one is the longest unused now.
    assert!(has(&mut client, &memory.bytes(), 0, fnv(&data[0])));
    keep(&mut client, &memory.bytes(), &data[3]);
    let found: Vec<_> = data.iter().map(|data| has(&mut client, &memory.bytes(), 0, fnv(data))).collect();
    assert_eq!(found, [true, false, true, true, false]);
    // The same data again takes no more room.
    keep(&mut client, &memory.bytes(), &data[3]);
    assert_eq!(files(dir.path()).len(), 3);
    // A smaller cache drops what it cannot hold as soon as it is opened.
    drop(server);
    let server = TestServer::start(config(dir.path(), SIZE as u64 + 500));
    assert_eq!(files(dir.path()).len(), 1);
    let mut client = Client::open(&server);
    let memory = client.alloc(0, 2 * SIZE as u64);
    keep(&mut client, &memory.bytes(), &noise(9, 2 * SIZE));
    assert_eq!(files(dir.path()).len(), 1, "more than the whole cache is not kept");
}

#[test]
fn an_upload_that_breaks_off_leaves_no_file() {
    let dir = tempfile::tempdir().expect("a folder");
    let server = TestServer::start(config(dir.path(), 1 << 30));
    let mut client = Client::open(&server);
    let memory = client.alloc(0, SIZE as u64);
    let head = SetTensorHead { tensor: memory.bytes(), cache: true, offset: 0 };
    let bytes = frame(&Request::SetTensor(SetTensor { head, data: &noise(1, SIZE) }));
    client.write(&bytes[..SIZE / 2]);
    client.hang_up();
    client.expect_refused(&["SET_TENSOR", "in the middle of a message"]);
    assert_eq!(files(dir.path()), Vec::<PathBuf>::new());
}

#[test]
fn a_folder_that_vanishes_costs_no_session() {
    let dir = tempfile::tempdir().expect("a folder");
    let folder = dir.path().join("cache");
    let server = TestServer::start(config(&folder, 1 << 30));
    let mut client = Client::open(&server);
    let memory = client.alloc(0, SIZE as u64);
    std::fs::remove_dir_all(&folder).expect("removed");
    let data = noise(1, SIZE);
    keep(&mut client, &memory.bytes(), &data);
    assert!(client.get(&memory.bytes(), 0, SIZE as u64) == data);
    assert!(!has(&mut client, &memory.bytes(), 0, fnv(&data)));
    assert_eq!(client.warnings(), Vec::<String>::new());
    assert_eq!(logged(&folder.display().to_string()).len(), 1);
}

#[test]
fn a_folder_that_cannot_be_is_said_at_once() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("file");
    std::fs::write(&file, b"not a folder").expect("writable");
    let server = TestServer::start(Config::default());
    let bound = Server::bind("127.0.0.1", 0, server.devices.clone(), config(&file, 1 << 30));
    assert!(matches!(bound, Err(BindError::Cache { .. })));
}
