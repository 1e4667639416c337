//! LOAD: what is found in a folder of models, what is not, and what is wrong there.

use crate::client::{QueueFixture, deadline, options};
use crate::greeted_support::*;
use crate::support::*;
use fanout::device::{LoadOutcome, TensorDigest};
use fanout::gguf::{Gguf, Writer};
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::{BindError, Config, Server};
use fanout::rpc::wire::ext::{Answer, ExtCommand, ExtRequest, Load, Shape, Span};
use fanout::tensor::{DType, TensorDesc};
use std::fs::{self, File, FileTimes};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A model's file with tensors of so many bytes, each of noise of its own seed.
pub(crate) fn model(tensors: &[(&str, u64, usize)]) -> Vec<u8> {
    let add = |file: Writer, &(name, _, bytes): &(&str, u64, usize)| file.tensor(name, &[bytes as u64], DType::I8);
    let mut bytes =
        tensors.iter().fold(Writer::new().text("general.architecture", "test"), add).to_bytes().expect("a valid file");
    let infos = Gguf::parse(&bytes).expect("a model").tensors;
    for (info, &(_, seed, n)) in infos.into_iter().zip(tensors) {
        bytes[info.bytes].copy_from_slice(&noise(seed, n));
    }
    bytes
}

/// Puts a file in its place, with a time of change that the test chooses.
pub(crate) fn put(path: &Path, bytes: &[u8], time: u64) {
    if let Some(dir) = path.parent() {
        fs::create_dir_all(dir).expect("a folder");
    }
    fs::write(path, bytes).expect("written");
    let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000 + time);
    let file = File::options().write(true).open(path).expect("a file");
    file.set_times(FileTimes::new().set_modified(then)).expect("a time");
}

pub(crate) fn serve(dir: &Path) -> TestServer {
    TestServer::start(Config::default().with_models(Some(dir.to_owned())))
}

pub(crate) fn digest(bytes: &[u8]) -> [u8; 32] {
    *blake3::hash(bytes).as_bytes()
}

pub(crate) fn ask(client: &mut Client, span: Span, digest: [u8; 32], name: &str) {
    let shape = Some(Shape { dtype: DType::I8.to_wire(), ne: [span.len as u32, 1, 1, 1] });
    client.ask(&ExtRequest::Load(Load { queue: 0, span, shape, digest, name }));
}

#[track_caller]
pub(crate) fn found(client: &mut Client) -> bool {
    match Answer::decode(ExtCommand::Load, &client.answered()) {
        Ok(Answer::Load(found)) => found,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub(crate) fn load(client: &mut Client, span: Span, digest: [u8; 32], name: &str) -> bool {
    ask(client, span, digest, name);
    found(client)
}

/// What lies in a span.
#[track_caller]
pub(crate) fn read(client: &mut Client, span: Span) -> Vec<u8> {
    client.read_spans(0, 1, &[span]);
    match client.told() {
        Told::Data(1, bytes) => bytes,
        other => panic!("{other:?}"),
    }
}

#[test]
fn tensors_are_found_by_their_digests() {
    let dir = tempfile::tempdir().expect("a folder");
    // Smaller and larger than what is staged; two of one length; in a folder below, and a part of a split model.
    let (small, large) = (1000, 3 << 20);
    put(&dir.path().join("a.gguf"), &model(&[("s", 1, small), ("t", 2, small), ("l", 3, large)]), 9);
    let part = Writer::new().int("split.count", 2).tensor("zeros", &[500], DType::I8).to_bytes().expect("a valid file");
    put(&dir.path().join("x/y/b.GGUF"), &part, 9);
    let server = serve(dir.path());
    let (mut client, reply) = Client::greet(&server);
    assert!(reply.abilities.loads);
    client.open_queue(0, 0);
    let memory = client.buffer(0, 4 << 20);
    for (seed, n, name) in
        [(1, small, "s"), (2, small, "t"), (2, small, "s"), (1, small, "whatever"), (3, large, "l"), (3, large, "")]
    {
        let bytes = noise(seed, n);
        let span = memory.span(64, n as u64);
        client.fill_span(0, memory.all(), 7);
        assert!(load(&mut client, span, digest(&bytes), name), "{name}");
        assert!(read(&mut client, span) == bytes, "{name}");
        assert_eq!(read(&mut client, memory.span(0, 64)), [7; 64]);
        assert_eq!(read(&mut client, memory.span(64 + n as u64, 64)), [7; 64]);
    }
    assert!(load(&mut client, memory.span(0, 500), digest(&[0; 500]), "zeros"));
    // Nothing has no digest worth looking for.
    assert!(!load(&mut client, memory.span(0, 0), digest(&[]), "s"));
    client.ask(&ExtRequest::Load(Load { queue: 0, span: memory.all(), shape: None, digest: [1; 32], name: "s" }));
    assert!(!found(&mut client));
    let shape = Some(Shape { dtype: DType::F32.to_wire(), ne: [1, 1, 1, 1] });
    client.ask(&ExtRequest::Load(Load { queue: 0, span: memory.all(), shape, digest: [1; 32], name: "s" }));
    client.expect_told_refusal(&["LOAD", "4"]);
}

/// Many are asked for before the first answer, and answered in order.
#[test]
fn a_thousand_tensors_are_loaded() {
    let dir = tempfile::tempdir().expect("a folder");
    let n = 1500;
    let names: Vec<String> = (0..1000).map(|i| format!("blk.{i}.weight")).collect();
    let tensors: Vec<_> = names.iter().enumerate().map(|(i, name)| (&**name, i as u64, n)).collect();
    put(&dir.path().join("m.gguf"), &model(&tensors), 9);
    let server = serve(dir.path());
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, (n * 1000) as u64);
    let span = |i: usize| memory.span((i * n) as u64, n as u64);
    for &(name, seed, n) in &tensors {
        // Each tenth is another one.
        let bytes = noise(if seed % 10 == 3 { seed + 5000 } else { seed }, n);
        ask(&mut client, span(seed as usize), digest(&bytes), name);
    }
    let there: Vec<bool> = tensors.iter().map(|_| found(&mut client)).collect();
    for (i, there) in there.into_iter().enumerate() {
        assert_eq!(there, i % 10 != 3, "{i}");
        let want = if there { noise(i as u64, n) } else { vec![0; n] };
        assert!(read(&mut client, span(i)) == want, "{i}");
    }
}

/// A file of the same name, with tensors of the same names and lengths and other bytes, is found out; nothing of it is shown.
#[test]
fn a_wrong_file_is_found_out() {
    for n in [2000, 2 << 20] {
        let dir = tempfile::tempdir().expect("a folder");
        put(&dir.path().join("m.gguf"), &model(&[("w", 1, n), ("v", 2, n)]), 9);
        let server = serve(dir.path());
        let mut client = Client::with_queues(&server);
        client.open_queue(1, 0);
        let memory = client.buffer(0, n as u64);
        let right = noise(3, n);
        // The second time it is known that there is nothing to read.
        for left in [0, 7] {
            client.fill_span(0, memory.all(), 7);
            assert!(!load(&mut client, memory.all(), digest(&right), "w"));
            assert!(read(&mut client, memory.all()).iter().all(|&byte| byte == left));
        }
        client.write_span(0, memory.all(), None, &right);
        assert!(read(&mut client, memory.all()) == right);
        // What was read in vain is known, and loaded for who knows it.
        assert!(load(&mut client, memory.all(), digest(&noise(2, n)), "w"));
        assert!(read(&mut client, memory.all()) == noise(2, n));
    }
}

#[test]
fn more_than_some_candidates_are_not_read_at_a_time() {
    let dir = tempfile::tempdir().expect("a folder");
    let names: Vec<String> = (0..30).map(|i| i.to_string()).collect();
    let tensors: Vec<_> = names.iter().enumerate().map(|(i, name)| (&**name, i as u64, 900)).collect();
    put(&dir.path().join("m.gguf"), &model(&tensors), 9);
    let server = serve(dir.path());
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, 900);
    // The last one, under a name that no tensor has: each time eight others are read first.
    let answers: Vec<bool> = (0..5).map(|_| load(&mut client, memory.all(), digest(&noise(29, 900)), "none")).collect();
    assert_eq!(answers, [false, false, false, true, true]);
}

#[test]
fn files_may_change_at_any_time() {
    let dir = tempfile::tempdir().expect("a folder");
    let (path, n) = (dir.path().join("m.gguf"), 1 << 20);
    let (old, new) = (model(&[("w", 1, n)]), model(&[("w", 2, n)]));
    put(&path, &old, 100);
    let server = serve(dir.path());
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, n as u64);
    let mut ask = |seed| load(&mut client, memory.all(), digest(&noise(seed, n)), "w");
    assert!(ask(1));
    // Replaced: the old bytes are not there, and the new ones as soon as the folder is looked at again.
    put(&path, &new, 50);
    assert!(!ask(1));
    eventually("the new file is noticed", || ask(2));
    // Cut off in place, with the head whole.
    put(&path, &new[..new.len() / 2], 40);
    assert!(!ask(2));
    // Whole again, and then gone.
    put(&path, &old, 30);
    eventually("the file is back", || ask(1));
    fs::remove_file(&path).expect("removed");
    assert!(!ask(1));
    fs::create_dir(&path).expect("a folder of that name");
    assert!(!ask(1));
    // Another file, in a folder that was not there.
    put(&dir.path().join("later/n.gguf"), &new, 20);
    eventually("a new file is noticed", || ask(2));
    // Other bytes, of the same length and time: nothing tells that they are others until they are read.
    put(&dir.path().join("later/n.gguf"), &old, 20);
    assert!(!ask(2));
}

#[cfg(unix)]
#[test]
fn links_are_the_operators() {
    use std::os::unix::fs::symlink;
    let (dir, other) = (tempfile::tempdir().expect("a folder"), tempfile::tempdir().expect("a folder"));
    put(&other.path().join("store/blob"), &model(&[("a", 1, 700)]), 9);
    put(&other.path().join("more/b.gguf"), &model(&[("b", 2, 800)]), 9);
    put(&other.path().join("c.gguf"), &model(&[("c", 3, 900)]), 9);
    symlink(other.path().join("store/blob"), dir.path().join("a.gguf")).expect("a link");
    symlink(other.path().join("more"), dir.path().join("more")).expect("a link");
    symlink(dir.path(), dir.path().join("loop")).expect("a link");
    symlink(dir.path().join("nowhere"), dir.path().join("gone.gguf")).expect("a link");
    let server = serve(dir.path());
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, 1000);
    for (seed, n, there) in [(1, 700, true), (2, 800, true), (3, 900, false)] {
        for name in ["a", "../../c.gguf", "/etc/passwd"] {
            assert_eq!(load(&mut client, memory.span(0, n as u64), digest(&noise(seed, n)), name), there);
        }
    }
    // What cannot be read is said, once.
    assert_eq!(logged(&dir.path().join("gone.gguf").display().to_string()).len(), 1);
}

#[test]
fn hostile_files_are_left_out_and_said_so() {
    let dir = tempfile::tempdir().expect("a folder");
    let good = model(&[("w", 1, 600)]);
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
        put(&dir.path().join(format!("{name}.gguf")), bytes, 9);
    }
    put(&dir.path().join("good.gguf"), &good, 9);
    put(&dir.path().join("other.bin"), &model(&[("w", 2, 600)]), 9);
    let server = serve(dir.path());
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, 600);
    assert!(load(&mut client, memory.all(), digest(&noise(1, 600)), "w"));
    assert!(!load(&mut client, memory.all(), digest(&noise(2, 600)), "w"));
    for (name, _) in files {
        let lines = logged(&dir.path().join(format!("{name}.gguf")).display().to_string());
        assert!(lines.len() == 1 && lines[0].contains("left out") && lines[0].len() < 1000, "{name}: {lines:?}");
    }
}

#[test]
fn without_a_folder_nothing_is_found() {
    let server = TestServer::start(Config::default());
    let (mut client, reply) = Client::greet(&server);
    assert!(!reply.abilities.loads);
    client.open_queue(0, 0);
    let memory = client.buffer(0, 100);
    client.fill_span(0, memory.all(), 7);
    assert!(!load(&mut client, memory.all(), digest(&[0; 100]), "w"));
    assert_eq!(read(&mut client, memory.all()), [7; 100]);
    let dir = tempfile::tempdir().expect("a folder");
    let missing = dir.path().join("missing");
    let config = Config::default().with_models(Some(missing.clone()));
    let bound = Server::bind("127.0.0.1", 0, server.devices.clone(), config);
    let error = bound.err().expect("an error");
    assert!(matches!(error, BindError::Models { .. }) && error.to_string().contains(&*missing.to_string_lossy()));
}

/// Every queue that could show them has done its work before bytes are written that the client may not know.
#[test]
fn other_queues_are_done_before_files_are_read() {
    let dir = tempfile::tempdir().expect("a folder");
    let n = 300 << 10;
    put(&dir.path().join("m.gguf"), &model(&[("w", 1, n)]), 9);
    let held = Held::new("CPU0");
    let devices = vec![held.clone() as std::sync::Arc<dyn fanout::device::Device>];
    let server = TestServer::with_device_list(devices, Config::default().with_models(Some(dir.path().to_owned())));
    let mut client = Client::with_queues(&server);
    client.open_queue(1, 0);
    let memory = client.buffer(0, n as u64);
    client.read_spans(1, 5, &[memory.all()]);
    ask(&mut client, memory.all(), [9; 32], "w");
    held.open();
    // In either order: the answers of two queues.
    let told = [client.told(), client.told()];
    assert!(told.contains(&data(5, vec![0; n])), "the read shows what was there before");
    assert!(told.contains(&Told::Reply(vec![0])));
    assert!(read(&mut client, memory.all()).iter().all(|&byte| byte == 0));
}

/// What a device behind a connection finds on its own disk does not go over the connection.
#[test]
fn a_client_sends_digests_and_no_weights() {
    let dir = tempfile::tempdir().expect("a folder");
    let n = 1 << 20;
    put(&dir.path().join("m.gguf"), &model(&[("a", 1, n), ("b", 2, n)]), 9);
    let server = serve(dir.path());
    let endpoint = Endpoint::connect(&server.addr.to_string(), &options()).expect("a server");
    let mut rig = QueueFixture::new(&endpoint.devices()[0], 2 * n as u64);
    assert!(rig.queue.load_by_digest().is_some());
    let halves = [0, n as u64].map(|at| rig.buffer.region(at, n as u64).expect("a half"));
    let desc = TensorDesc::contiguous(DType::I8, [n, 1, 1, 1]).expect("a tensor");
    let mut recall = |seeds: [u64; 2]| {
        let mut tickets = Vec::new();
        for ((half, seed), name) in halves.iter().zip(seeds).zip(["a", "b"]) {
            let wanted = TensorDigest { digest: digest(&noise(seed, n)), name };
            let loads = rig.queue.load_by_digest().expect("a server with models");
            tickets.push(loads.load_by_digest(half.clone(), Some(&desc), wanted).expect("asked"));
        }
        let answers = tickets.into_iter().map(|ticket| ticket.wait(deadline()).expect("an answer"));
        (answers.collect::<Vec<_>>(), rig.device.link_stats().expect("a connection").sent)
    };
    let (answers, sent) = recall([1, 3]);
    assert_eq!(answers, [LoadOutcome::Found, LoadOutcome::Missing]);
    assert!(sent < 4096, "{sent} bytes were sent");
    assert_eq!(recall([1, 2]).0, [LoadOutcome::Found; 2]);
    for (half, seed) in halves.iter().zip([1, 2]) {
        let there = rig.queue.download(half.clone()).expect("asked").wait(deadline()).expect("bytes");
        assert!(there == noise(seed, n));
    }
}
