//! `rpc-server --sandbox`: a server in the sandbox does all that it offers, and the kernel reports the restrictions. The unit
//! tests in `bin/sandbox/tests.rs` try what is denied.

use crate::client::deadline;
use crate::load_by_digest::{digest, gguf_file, write_file};
use crate::server_program::{ServerProcess, run_server_program, spawn_server};
use crate::server_program_lifecycle::{ARGS, QueueWork, options};
use crate::server_program_supervisor::next_worker;
use crate::support::*;
use crate::tensor_cache::{files, fnv1a, is_cached, upload_cached};
use fanout::device::{LoadOutcome, MemoryBudget, TensorDigest};
use fanout::rpc::client::Endpoint;
use fanout::tensor::{ByteRuns, DType, TensorDesc};

const SIZE: usize = 100_000;

/// Lines of `/proc/PID/status` of a process in the sandbox.
const RESTRICTED: [(&str, &str); 6] = [
    ("NoNewPrivs", "1"),
    ("Seccomp", "2"),
    ("CapInh", "0000000000000000"),
    ("CapPrm", "0000000000000000"),
    ("CapEff", "0000000000000000"),
    ("CapAmb", "0000000000000000"),
];

/// The values of a thread's lines of `/proc` with the names in [`RESTRICTED`].
fn restrictions(status: &std::path::Path) -> Vec<String> {
    let text = std::fs::read_to_string(status).expect("procfs");
    let value = |name: &str| text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    RESTRICTED.iter().map(|(name, _)| value(name).expect("a line").trim().to_owned()).collect()
}

/// The restrictions of all threads of a process.
fn thread_restrictions(process: u32) -> Vec<Vec<String>> {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("procfs");
    tasks.map(|task| restrictions(&task.expect("a thread").path().join("status"))).collect()
}

#[track_caller]
fn assert_restricted(process: u32) {
    let threads = thread_restrictions(process);
    assert!(threads.len() > 1, "threads of devices and signals");
    let want = RESTRICTED.map(|(_, value)| value);
    assert!(threads.iter().all(|thread| *thread == want), "{threads:?}");
}

fn connect(server: &ServerProcess) -> Client {
    let addr = server.addr.parse().expect("an address");
    Client::connect_from([127, 0, 0, 1], addr).exchange_hello(CLIENT_VERSION)
}

/// Waits until the server has hashed all of its models' tensors.
fn endpoint_with_index(server: &ServerProcess) -> Endpoint {
    let mut indexed = None;
    eventually("all tensors are indexed", || {
        let endpoint = Endpoint::connect(&server.addr, &options()).expect("a server");
        let limits = endpoint.status().expect("a fanout server").limits;
        let (_, progress) = limits.iter().find(|(name, _)| name.contains("--models")).expect("a record");
        let done = progress.split_once(" of ").is_some_and(|(hashed, all)| hashed == all && all == "3");
        indexed = done.then_some(endpoint);
        done
    });
    indexed.expect("a connection")
}

/// A folder of models, a link into the folder of a hub beside it, and a linked folder.
fn write_models(dir: &std::path::Path) {
    for (path, seed) in [("models/a.gguf", 1), ("hub/blobs/b", 2), ("library/c.gguf", 3)] {
        write_file(&dir.join(path), &gguf_file(&[("t", seed, SIZE)]), seed);
    }
    for (target, link) in [("hub/blobs/b", "models/b.gguf"), ("library", "models/library")] {
        std::os::unix::fs::symlink(dir.join(target), dir.join(link)).expect("a link");
    }
}

#[test]
fn a_server_in_the_sandbox_serves_caches_and_loads_models() {
    for alone in [&[][..], &["--no-supervise"]] {
        let dir = tempfile::tempdir().expect("a folder");
        write_models(dir.path());
        let path = |name: &str| dir.path().join(name).display().to_string();
        let folders = ["--models", &path("models"), "--cache-dir", &path("new/cache")];
        let server = spawn_server(&[&ARGS[..], alone, &folders, &["--protocol", "7", "--sandbox", "on"]].concat());
        let line = server.banner.lines().find(|line| line.starts_with("sandbox: ")).expect("a line");
        assert!(line.starts_with("sandbox: no new privileges, Landlock (ABI "), "{line}");
        assert!(line.ends_with("), no capabilities, system calls filtered"), "{line}");
        let supervisor = server.child.id();
        assert_restricted(if alone.is_empty() { next_worker(supervisor, None) } else { supervisor });
        // The cache, by llama.cpp's protocol.
        let data = random_bytes(9, SIZE);
        let mut client = connect(&server);
        let memory = client.alloc(0, SIZE as u64);
        upload_cached(&mut client, &memory.byte_tensor(), &data);
        let mut other = connect(&server);
        let memory = other.alloc(0, SIZE as u64);
        assert!(is_cached(&mut other, &memory.byte_tensor(), 0, fnv1a(&data)));
        assert!(other.get_tensor(&memory.byte_tensor(), 0, SIZE as u64) == data);
        // Models, by the extension: a file, a linked one, and one in a linked folder.
        let endpoint = endpoint_with_index(&server);
        assert_eq!(QueueWork::on(&endpoint).run(), Ok(vec![7; 64]));
        let (device, budget) = (&endpoint.devices()[0], MemoryBudget::new(1 << 30));
        let mut queue = device.queue(&budget).expect("a queue");
        let buffer = device.alloc(SIZE as u64, &budget).expect("memory");
        let desc = TensorDesc::contiguous(DType::I8, [SIZE, 1, 1, 1]).expect("a tensor");
        for seed in 1..=3 {
            let bytes = random_bytes(seed, SIZE);
            let wanted = TensorDigest { digest: digest(&bytes), bytes: SIZE as u64, name: "t" };
            let loads = queue.load_by_digest().expect("a server with models");
            let whole = ByteRuns::whole(SIZE as u64);
            let outcome =
                loads.load_by_digest(buffer.whole(), Some(&desc), wanted, whole).expect("a submitted request");
            assert_eq!(outcome.wait(deadline()).expect("an answer"), LoadOutcome::Found, "file {seed}");
            let there = queue.download(buffer.whole()).expect("a submitted request").wait(deadline()).expect("bytes");
            assert!(there == bytes, "file {seed}");
        }
        // The threads of sessions, too.
        assert_restricted(if alone.is_empty() { next_worker(supervisor, None) } else { supervisor });
        eventually("the digests are kept", || {
            files(&dir.path().join("new/cache")).iter().any(|file| file.extension().is_some_and(|e| e == "digests"))
        });
    }
}

#[test]
fn the_sandbox_is_automatic_and_can_be_turned_off() {
    for (args, in_sandbox) in [(&[][..], true), (&["--sandbox", "auto"], true), (&["--sandbox", "off"], false)] {
        let server = ServerProcess::start_with(args);
        let threads = thread_restrictions(next_worker(server.child.id(), None));
        // The test's process and the supervisor may have restrictions of their own.
        let own = restrictions("/proc/self/status".as_ref());
        if in_sandbox {
            assert_restricted(next_worker(server.child.id(), None));
        } else {
            assert!(threads.iter().all(|thread| *thread == own), "{threads:?}");
            assert!(server.banner.contains("\nsandbox: off (--sandbox off)\n"), "{}", server.banner);
        }
        assert!(thread_restrictions(server.child.id()).iter().all(|thread| *thread == own), "the supervisor");
    }
    let (code, text) = run_server_program(&["--sandbox", "some"]);
    assert!(code == Some(2) && text.contains("auto, on, off"), "{code:?} {text}");
}

/// The folder of the cache cannot be created: the error is that of the server.
#[test]
fn a_folder_that_cannot_be_used_is_reported_in_the_sandbox() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("file");
    std::fs::write(&file, "no folder").expect("written");
    for (option, path) in [("--cache-dir", file.clone()), ("--models", file), ("--models", dir.path().join("none"))] {
        let path = path.display().to_string();
        let (code, text) = run_server_program(&[&ARGS[..], &["--sandbox", "on", option, &path]].concat());
        assert!(code == Some(1) && text.contains(&path) && !text.contains("Permission"), "{option}: {code:?} {text}");
    }
}
