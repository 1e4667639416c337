//! LOAD: the server finds tensors by digest in the GGUF files of its models folder, detects changed files and skips invalid
//! ones.

use crate::client::{QueueFixture, deadline, options};
use crate::extended_support::*;
use crate::support::*;
use fanout::device::{LoadOutcome, TensorDigest};
use fanout::gguf::{Gguf, Writer};
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::{BindError, Config, Server};
use fanout::rpc::wire::ext::{BufferSpan, ExtCommand, ExtRequest, ExtResponse, Load, TensorShape};
use fanout::tensor::{ByteRuns, DType, TensorDesc};
use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A GGUF file with I8 tensors: name, seed of the random bytes, and size in bytes.
pub(crate) fn gguf_file(tensors: &[(&str, u64, usize)]) -> Vec<u8> {
    let add = |file: Writer, &(name, _, bytes): &(&str, u64, usize)| file.tensor(name, &[bytes as u64], DType::I8);
    let mut bytes =
        tensors.iter().fold(Writer::new().text("general.architecture", "test"), add).to_bytes().expect("a valid file");
    let infos = Gguf::parse(&bytes).expect("a model").tensors;
    for (info, &(_, seed, n)) in infos.into_iter().zip(tensors) {
        bytes[info.bytes].copy_from_slice(&random_bytes(seed, n));
    }
    bytes
}

/// Writes a file with a given modification time in seconds.
pub(crate) fn write_file(path: &Path, bytes: &[u8], time: u64) {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).expect("a folder");
    }
    fs::write(path, bytes).expect("written");
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000 + time);
    let file = File::options().write(true).open(path).expect("a file");
    file.set_times(FileTimes::new().set_modified(then)).expect("a time");
}

/// A server that has hashed the files in `dir`.
pub(crate) fn server_with_models(dir: &Path) -> TestServer {
    let server = TestServer::start(Config::default().with_models(Some(dir.to_owned())));
    await_index(&server);
    server
}

/// Waits until the server has hashed all of its tensors.
pub(crate) fn await_index(server: &TestServer) {
    eventually("all tensors are indexed", || {
        let endpoint = Endpoint::connect(&server.addr.to_string(), &options()).expect("a server");
        let status = endpoint.status().expect("its status");
        let record = status.limits.iter().find(|(name, _)| name.contains("--models")).expect("a record");
        let (hashed, tensors) = record.1.split_once(" of ").expect("two numbers");
        hashed == tensors
    });
}

pub(crate) fn digest(bytes: &[u8]) -> [u8; 32] {
    *blake3::hash(bytes).as_bytes()
}

pub(crate) fn send_load(client: &mut Client, span: BufferSpan, digest: [u8; 32], name: &str) {
    let shape = Some(TensorShape { dtype: DType::I8.to_wire(), ne: [span.len as u32, 1, 1, 1] });
    let (bytes, runs) = (span.len, ByteRuns::whole(span.len));
    client.send_ext(&ExtRequest::Load(Load { queue: 0, span, shape, digest, bytes, runs, name }));
}

#[track_caller]
pub(crate) fn next_load_result(client: &mut Client) -> bool {
    match ExtResponse::decode(ExtCommand::Load, &client.next_ext_reply()) {
        Ok(ExtResponse::Load(found)) => found,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub(crate) fn load(client: &mut Client, span: BufferSpan, digest: [u8; 32], name: &str) -> bool {
    send_load(client, span, digest, name);
    next_load_result(client)
}

/// Reads the bytes of a span.
#[track_caller]
pub(crate) fn read_span(client: &mut Client, span: BufferSpan) -> Vec<u8> {
    client.read_spans(0, 1, &[span]);
    match client.next_notification() {
        ReceivedNotification::ReadData(1, bytes) => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensors_are_found_by_their_digests() {
    let dir = tempfile::tempdir().expect("a folder");
    // Sizes below and above the staging limit, two tensors of one size, and a part of a split model in a nested folder.
    let (small, large) = (1000, 3 << 20);
    write_file(&dir.path().join("a.gguf"), &gguf_file(&[("s", 1, small), ("t", 2, small), ("l", 3, large)]), 9);
    let part = Writer::new().int("split.count", 2).tensor("zeros", &[500], DType::I8).to_bytes().expect("a valid file");
    write_file(&dir.path().join("x/y/b.GGUF"), &part, 9);
    let server = server_with_models(dir.path());
    let (mut client, reply) = Client::connect_extended(&server);
    assert!(reply.capabilities.load_by_digest);
    client.open_queue(0, 0);
    let memory = client.alloc_ext(0, 4 << 20);
    for (seed, n, name) in
        [(1, small, "s"), (2, small, "t"), (2, small, "s"), (1, small, "whatever"), (3, large, "l"), (3, large, "")]
    {
        let bytes = random_bytes(seed, n);
        let span = memory.span(64, n as u64);
        client.fill_span(0, memory.whole_span(), 7);
        assert!(load(&mut client, span, digest(&bytes), name), "{name}");
        assert!(read_span(&mut client, span) == bytes, "{name}");
        assert_eq!(read_span(&mut client, memory.span(0, 64)), [7; 64]);
        assert_eq!(read_span(&mut client, memory.span(64 + n as u64, 64)), [7; 64]);
    }
    assert!(load(&mut client, memory.span(0, 500), digest(&[0; 500]), "zeros"));
    // An empty span is never found.
    assert!(!load(&mut client, memory.span(0, 0), digest(&[]), "s"));
    let (span, bytes) = (memory.whole_span(), 4 << 20);
    let (digest, runs, name) = ([1; 32], ByteRuns::whole(bytes), "s");
    client.send_ext(&ExtRequest::Load(Load { queue: 0, span, shape: None, digest, bytes, runs, name }));
    assert!(!next_load_result(&mut client));
    let shape = Some(TensorShape { dtype: DType::F32.to_wire(), ne: [1, 1, 1, 1] });
    client.send_ext(&ExtRequest::Load(Load { queue: 0, span, shape, digest, bytes, runs, name }));
    client.expect_protocol_error(&["LOAD", "4"]);
}

/// The client sends all requests before it reads the first reply. Replies have the order of the requests.
#[test]
fn pipelined_loads_are_answered_in_order() {
    let dir = tempfile::tempdir().expect("a folder");
    let n = 1500;
    let names: Vec<String> = (0..1000).map(|i| format!("blk.{i}.weight")).collect();
    let tensors: Vec<_> = names.iter().enumerate().map(|(i, name)| (&**name, i as u64, n)).collect();
    write_file(&dir.path().join("m.gguf"), &gguf_file(&tensors), 9);
    let server = server_with_models(dir.path());
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, (n * 1000) as u64);
    let span = |i: usize| memory.span((i * n) as u64, n as u64);
    for &(name, seed, n) in &tensors {
        // Every tenth request has the digest of other bytes.
        let bytes = random_bytes(if seed % 10 == 3 { seed + 5000 } else { seed }, n);
        send_load(&mut client, span(seed as usize), digest(&bytes), name);
    }
    let there: Vec<bool> = tensors.iter().map(|_| next_load_result(&mut client)).collect();
    for (i, there) in there.into_iter().enumerate() {
        assert_eq!(there, i % 10 != 3, "{i}");
        let want = if there { random_bytes(i as u64, n) } else { vec![0; n] };
        assert!(read_span(&mut client, span(i)) == want, "{i}");
    }
}

/// A file whose tensors have the requested names and sizes but other bytes is neither read nor disclosed.
#[test]
fn a_file_with_other_bytes_is_not_read() {
    for n in [2000, 2 << 20] {
        let dir = tempfile::tempdir().expect("a folder");
        write_file(&dir.path().join("m.gguf"), &gguf_file(&[("w", 1, n), ("v", 2, n)]), 9);
        let server = server_with_models(dir.path());
        let mut client = Client::connect_with_queues(&server);
        client.open_queue(1, 0);
        let memory = client.alloc_ext(0, n as u64);
        let right = random_bytes(3, n);
        client.fill_span(0, memory.whole_span(), 7);
        assert!(!load(&mut client, memory.whole_span(), digest(&right), "w"));
        assert!(read_span(&mut client, memory.whole_span()).iter().all(|&byte| byte == 7));
        client.write_span(0, memory.whole_span(), None, &right);
        assert!(read_span(&mut client, memory.whole_span()) == right);
        assert!(load(&mut client, memory.whole_span(), digest(&random_bytes(2, n)), "w"));
        assert!(read_span(&mut client, memory.whole_span()) == random_bytes(2, n));
    }
}

/// A server with one indexed tensor of `n` bytes, on a device whose downloads wait for [`HeldDevice::release`], and the folder of its
/// models.
fn server_with_held_device(n: usize) -> (TestServer, std::sync::Arc<HeldDevice>, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a folder");
    write_file(&dir.path().join("m.gguf"), &gguf_file(&[("w", 1, n)]), 9);
    let held = HeldDevice::new("CPU0");
    let devices = vec![held.clone() as std::sync::Arc<dyn fanout::device::Device>];
    let server = TestServer::with_device_list(devices, Config::default().with_models(Some(dir.path().to_owned())));
    await_index(&server);
    (server, held, dir)
}

/// The reply to an unknown digest depends neither on the files nor on the work of the session.
#[test]
fn an_unknown_digest_is_answered_before_the_device_is_done() {
    let n = 300 << 10;
    let (server, held, _dir) = server_with_held_device(n);
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, n as u64);
    client.read_spans(0, 5, &[memory.whole_span()]);
    assert!(!load(&mut client, memory.whole_span(), [9; 32], "w"));
    held.release();
    assert_eq!(client.next_notification(), data_notification(5, vec![0; n]));
}

#[test]
fn changed_files_are_detected() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, n) = (dir.path().join("m.gguf"), 1 << 20);
    let (old, new) = (gguf_file(&[("w", 1, n)]), gguf_file(&[("w", 2, n)]));
    write_file(&path, &old, 100);
    let server = server_with_models(dir.path());
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, n as u64);
    let mut ask = |seed| load(&mut client, memory.whole_span(), digest(&random_bytes(seed, n)), "w");
    assert!(ask(1));
    // A replaced file: the old bytes are not found, and the new bytes are found after the next scan of the folder.
    write_file(&path, &new, 50);
    assert!(!ask(1));
    eventually("the server has found the replaced file", || ask(2));
    // The file is truncated in place; its header is complete.
    write_file(&path, &new[..new.len() / 2], 40);
    assert!(!ask(2));
    // The file is restored, and then removed.
    write_file(&path, &old, 30);
    eventually("the server has found the restored file", || ask(1));
    fs::remove_file(&path).expect("removed");
    assert!(!ask(1));
    fs::create_dir(&path).expect("a folder of that name");
    assert!(!ask(1));
    // A new file in a new folder.
    write_file(&dir.path().join("later/n.gguf"), &new, 20);
    eventually("the server has found the new file", || ask(2));
    // Other bytes with the same length and modification time.
    write_file(&dir.path().join("later/n.gguf"), &old, 20);
    assert!(!ask(2));
}

#[cfg(unix)]
#[test]
fn symbolic_links_in_the_folder_are_followed() {
    use std::os::unix::fs::symlink;
    let (dir, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    write_file(&other.path().join("store/blob"), &gguf_file(&[("a", 1, 700)]), 9);
    write_file(&other.path().join("more/b.gguf"), &gguf_file(&[("b", 2, 800)]), 9);
    write_file(&other.path().join("c.gguf"), &gguf_file(&[("c", 3, 900)]), 9);
    symlink(other.path().join("store/blob"), dir.path().join("a.gguf")).expect("a link");
    symlink(other.path().join("more"), dir.path().join("more")).expect("a link");
    symlink(dir.path(), dir.path().join("loop")).expect("a link");
    symlink(dir.path().join("nowhere"), dir.path().join("gone.gguf")).expect("a link");
    let server = server_with_models(dir.path());
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, 1000);
    for (seed, n, there) in [(1, 700, true), (2, 800, true), (3, 900, false)] {
        for name in ["a", "../../c.gguf", "/etc/passwd"] {
            assert_eq!(load(&mut client, memory.span(0, n as u64), digest(&random_bytes(seed, n)), name), there);
        }
    }
    // A broken link is logged once.
    assert_eq!(logged_warnings(&dir.path().join("gone.gguf").display().to_string()).len(), 1);
}

#[test]
fn invalid_files_are_skipped_and_logged() {
    let dir = tempfile::tempdir().expect("a folder");
    let good = gguf_file(&[("w", 1, 600)]);
    let head = |tensors: u64, entries: u64| {
        [&b"GGUF\x03\0\0\0"[..], &tensors.to_le_bytes(), &entries.to_le_bytes(), &[0; 4096]].concat()
    };
    let mut long = Writer::new().tensor(&"n".repeat(100_000), &[32], DType::I8).to_bytes().expect("a valid file");
    long.truncate(long.len() - 32);
    let files: &[(&str, Vec<u8>)] = &[
        ("empty", Vec::new()),
        ("text", b"not a model at all".to_vec()),
        ("counts", head(u64::MAX, u64::MAX)),
        ("tensors", head(1 << 40, 0)),
        ("entries", head(0, 300)),
        ("cut", good[..good.len() - 100].to_vec()),
        ("long", long),
    ];
    for (name, bytes) in files {
        write_file(&dir.path().join(format!("{name}.gguf")), bytes, 9);
    }
    write_file(&dir.path().join("good.gguf"), &good, 9);
    write_file(&dir.path().join("other.bin"), &gguf_file(&[("w", 2, 600)]), 9);
    let server = server_with_models(dir.path());
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, 600);
    assert!(load(&mut client, memory.whole_span(), digest(&random_bytes(1, 600)), "w"));
    assert!(!load(&mut client, memory.whole_span(), digest(&random_bytes(2, 600)), "w"));
    for (name, _) in files {
        let lines = logged_warnings(&dir.path().join(format!("{name}.gguf")).display().to_string());
        assert!(lines.len() == 1 && lines[0].contains("left out") && lines[0].len() < 1000, "{name}: {lines:?}");
    }
}

#[test]
fn without_a_folder_nothing_is_found() {
    let server = TestServer::start(Config::default());
    let (mut client, reply) = Client::connect_extended(&server);
    assert!(!reply.capabilities.load_by_digest);
    client.open_queue(0, 0);
    let memory = client.alloc_ext(0, 100);
    client.fill_span(0, memory.whole_span(), 7);
    assert!(!load(&mut client, memory.whole_span(), digest(&[0; 100]), "w"));
    assert_eq!(read_span(&mut client, memory.whole_span()), [7; 100]);
    let dir = tempfile::tempdir().expect("a folder");
    let missing = dir.path().join("missing");
    let config = Config::default().with_models(Some(missing.clone()));
    let bound = Server::bind("127.0.0.1", 0, server.devices.clone(), config);
    let error = bound.err().expect("an error");
    assert!(matches!(error, BindError::Models { .. }) && error.to_string().contains(&*missing.to_string_lossy()));
}

/// LOAD writes unverified bytes, so all queues of the session that could read the buffer must first finish their work.
#[test]
fn other_queues_finish_before_file_bytes_are_written() {
    let n = 300 << 10;
    let (server, held, _dir) = server_with_held_device(n);
    let mut client = Client::connect_with_queues(&server);
    client.open_queue(1, 0);
    let memory = client.alloc_ext(0, n as u64);
    client.read_spans(1, 5, &[memory.whole_span()]);
    send_load(&mut client, memory.whole_span(), digest(&random_bytes(1, n)), "w");
    held.release();
    // The notifications of two queues arrive in either order.
    let told = [client.next_notification(), client.next_notification()];
    assert!(told.contains(&data_notification(5, vec![0; n])), "the read returns the bytes before the load");
    assert!(told.contains(&ReceivedNotification::Reply(vec![1])));
    assert!(read_span(&mut client, memory.whole_span()) == random_bytes(1, n));
}

/// Tensors that the server finds on its own disk are not sent over the connection.
#[test]
fn a_client_sends_digests_instead_of_weights() {
    let dir = tempfile::tempdir().expect("a folder");
    let n = 1 << 20;
    write_file(&dir.path().join("m.gguf"), &gguf_file(&[("a", 1, n), ("b", 2, n)]), 9);
    let server = server_with_models(dir.path());
    let endpoint = Endpoint::connect(&server.addr.to_string(), &options()).expect("a server");
    let mut fixture = QueueFixture::new(&endpoint.devices()[0], 2 * n as u64);
    assert!(fixture.queue.load_by_digest().is_some());
    let halves = [0, n as u64].map(|at| fixture.buffer.region(at, n as u64).expect("a half"));
    let desc = TensorDesc::contiguous(DType::I8, [n, 1, 1, 1]).expect("a tensor");
    let mut load_both = |seeds: [u64; 2]| {
        let mut pending_reads = Vec::new();
        for ((half, seed), name) in halves.iter().zip(seeds).zip(["a", "b"]) {
            let wanted = TensorDigest { digest: digest(&random_bytes(seed, n)), bytes: n as u64, name };
            let loads = fixture.queue.load_by_digest().expect("a server with models");
            let load = loads.load_by_digest(half.clone(), Some(&desc), wanted, ByteRuns::whole(n as u64));
            pending_reads.push(load.expect("a submitted request"));
        }
        let answers = pending_reads.into_iter().map(|pending_read| pending_read.wait(deadline()).expect("an answer"));
        (answers.collect::<Vec<_>>(), fixture.device.link_stats().expect("a connection").sent)
    };
    let (answers, sent) = load_both([1, 3]);
    assert_eq!(answers, [LoadOutcome::Found, LoadOutcome::Missing]);
    assert!(sent < 4096, "{sent} bytes were sent");
    assert_eq!(load_both([1, 2]).0, [LoadOutcome::Found; 2]);
    for (half, seed) in halves.iter().zip([1, 2]) {
        let there = fixture.queue.download(half.clone()).expect("a submitted request").wait(deadline()).expect("bytes");
        assert!(there == random_bytes(seed, n));
    }
}
