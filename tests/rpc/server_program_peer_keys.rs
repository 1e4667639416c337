//! `rpc-server --peer HOST=KEY`: copies between servers over TLS, and what all ends say of a server that is not trusted.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::{QueueFixture, budget, deadline};
use crate::server_program::{ServerProcess, program, run_server_program, spawn_server_with_log};
use crate::server_program_lifecycle::options;
use crate::support::*;
use fanout::device::{DeviceError, Membership, UploadSource};
use fanout::graph::Builder;
use fanout::ops::OutputSpec;
use fanout::ops::collective::{Collective, CollectiveKind};
use fanout::rpc::client::Endpoint;
use fanout::rpc::keys::{PublicKey, SecretKey};
use fanout::tensor::DType;
use std::collections::HashSet;
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::sync::{Arc, Mutex};

/// Bytes of a copy: two pieces.
const LEN: u64 = 300_000;

/// A server with a key, and its client.
struct KeyedServer {
    dir: tempfile::TempDir,
    process: ServerProcess,
    public: PublicKey,
}

impl KeyedServer {
    /// Starts a server with the key `own` on an address of loopback. `allowed` has the lines of its list, `peers` its --peer
    /// flags.
    fn start(host: &str, own: &SecretKey, allowed: &[String], peers: &[String]) -> KeyedServer {
        let dir = tempfile::tempdir().unwrap();
        own.create_file(&dir.path().join("key")).unwrap();
        let path = |name| dir.path().join(name).to_str().unwrap().to_owned();
        fs::write(path("clients"), allowed.concat()).unwrap();
        let mut args: Vec<_> =
            ["-H", host, "-p", "0", "-d", "CPU", "-t", "1", "--mem", "64M"].map(str::to_owned).into();
        args.extend(["--key".to_owned(), path("key"), "--allow-keys".to_owned(), path("clients")]);
        args.extend(peers.iter().flat_map(|peer| ["--peer".to_owned(), peer.clone()]));
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let log = fs::File::create(path("log")).unwrap();
        let process = spawn_server_with_log(program(&args), Stdio::from(log));
        KeyedServer { dir, process, public: own.public_key() }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).unwrap()
    }

    /// Connects the client to this server, or to a relay before it.
    fn connect(&self, at: &str, client: &SecretKey) -> Endpoint {
        let options = options().with_server_keys(vec![self.public]).with_key(Some(client.clone()));
        Endpoint::connect(at, &options).unwrap()
    }

    /// Replaces the list of allowed keys.
    fn reread(&self, allowed: &[String]) {
        use rustix::process::{Pid, Signal, kill_process};
        fs::write(self.dir.path().join("clients"), allowed.concat()).unwrap();
        kill_process(Pid::from_child(&self.process.child), Signal::HUP).unwrap();
    }
}

fn keys<const N: usize>() -> [SecretKey; N] {
    [(); N].map(|()| SecretKey::generate().unwrap())
}

fn line(key: &SecretKey, rest: &str) -> String {
    format!("{} {rest}\n", key.public_key())
}

fn peer(host: &str, key: &SecretKey) -> String {
    format!("{host}:*={}", key.public_key())
}

/// Copies from the buffer of one server to that of another, which must not go through the client.
fn copy(from: &mut QueueFixture, to: &mut QueueFixture) -> Result<(), DeviceError> {
    assert!(to.device.copies_from(from.device.info()));
    let after = from.queue.mark();
    assert!(to.queue.copy_from(from.buffer.whole(), to.buffer.whole(), Some(&after))?.is_submitted());
    to.queue.mark().wait(deadline())
}

/// A relay for any number of connections. It records the bytes that clients send, and those that the server sends.
struct RecordingRelay {
    addr: SocketAddr,
    recorded: [Arc<Mutex<Vec<u8>>>; 2],
}

impl RecordingRelay {
    fn start(host: &str, server: &str) -> RecordingRelay {
        let listener = TcpListener::bind((host, 0)).unwrap();
        let (addr, server) = (listener.local_addr().unwrap(), server.to_owned());
        let recorded = [(); 2].map(|()| Arc::default());
        let records = recorded.clone();
        std::thread::spawn(move || {
            for client in listener.incoming() {
                let (client, server) = (client.unwrap(), TcpStream::connect(&server).unwrap());
                let ends = [[client.try_clone().unwrap(), server.try_clone().unwrap()], [server, client]];
                for ([from, to], record) in ends.into_iter().zip(&records) {
                    let record = Arc::clone(record);
                    std::thread::spawn(move || relay(from, to, &record));
                }
            }
        });
        RecordingRelay { addr, recorded }
    }

    /// Whether 16 bytes of `data` in a row have passed from the clients to the server, and from the server to the clients.
    fn has_seen(&self, data: &[u8]) -> [bool; 2] {
        let windows: HashSet<&[u8]> = data.windows(16).collect();
        self.recorded.each_ref().map(|bytes| bytes.lock().unwrap().windows(16).any(|window| windows.contains(window)))
    }
}

fn relay(mut from: TcpStream, mut to: TcpStream, record: &Mutex<Vec<u8>>) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        record.lock().unwrap().extend(&buffer[..n]);
        if to.write_all(&buffer[..n]).is_err() {
            break;
        }
    }
    let _ = (from.shutdown(Shutdown::Read), to.shutdown(Shutdown::Write));
}

/// The first server sends to the second, and the second to the third; each through a relay that belongs to its destination.
#[test]
fn a_recording_of_copies_over_tls_has_no_bytes_of_the_tensor() {
    let [first, second, third, alice] = &keys();
    let data = random_bytes(5, LEN as usize);
    let allowed = |sender: &SecretKey, name: &str| [line(alice, "alice"), line(sender, name)];
    let servers = [
        KeyedServer::start("127.0.90.1", first, &[line(alice, "alice")], &[peer("127.0.90.12", second)]),
        KeyedServer::start("127.0.90.2", second, &allowed(first, "gpu-1"), &[peer("127.0.90.13", third)]),
        KeyedServer::start("127.0.90.3", third, &allowed(second, "gpu-2"), &[]),
    ];
    let relays = [
        RecordingRelay::start("127.0.90.12", &servers[1].process.addr),
        RecordingRelay::start("127.0.90.13", &servers[2].process.addr),
    ];
    let endpoints = [
        servers[0].connect(&servers[0].process.addr, alice),
        servers[1].connect(&relays[0].addr.to_string(), alice),
        servers[2].connect(&relays[1].addr.to_string(), alice),
    ];
    let [mut a, mut b, mut c] = endpoints.each_ref().map(|endpoint| QueueFixture::new(&endpoint.devices()[0], LEN));
    a.upload(&data);
    copy(&mut a, &mut b).unwrap();
    copy(&mut b, &mut c).unwrap();
    assert!(c.download() == data);
    for relay in &relays {
        assert!(relay.recorded[0].lock().unwrap().len() > LEN as usize, "the copy has passed");
        assert_eq!(relay.has_seen(&data), [false; 2]);
    }
    drop((a, b, c, endpoints));
    // The sessions of servers have the names of their keys.
    eventually("audit lines", || servers[1].log().contains("(gpu-1)") && servers[2].log().contains("(gpu-2)"));
}

/// The ranks of a group on two servers with keys have the sums, and a relay before one of them sees no part.
#[test]
fn groups_exchange_their_parts_over_tls() {
    const N: usize = 300_000;
    let [first, second, alice] = &keys();
    let servers = [
        KeyedServer::start(
            "127.0.90.31",
            first,
            &[line(alice, "alice"), line(second, "gpu-2")],
            &[peer("127.0.90.33", second)],
        ),
        KeyedServer::start(
            "127.0.90.32",
            second,
            &[line(alice, "alice"), line(first, "gpu-1")],
            &[peer("127.0.90.31", first)],
        ),
    ];
    let relay = RecordingRelay::start("127.0.90.33", &servers[1].process.addr);
    let endpoints =
        [servers[0].connect(&servers[0].process.addr, alice), servers[1].connect(&relay.addr.to_string(), alice)];
    let devices = endpoints.each_ref().map(|endpoint| Arc::clone(&endpoint.devices()[0]));
    let mut b = Builder::new();
    let part = b.leaf(DType::F32, [N, 1, 1, 1]).unwrap();
    let op = Collective { kind: CollectiveKind::AllReduce, group: 1 };
    let sums = b.node_with_output(op, &[Some(part)], OutputSpec { dtype: DType::F32, ne: [N, 1, 1, 1] }).unwrap();
    let graph = Arc::new(b.build());
    let place = |id| {
        let tensor = graph.tensor(id).unwrap();
        (tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64)
    };
    let members = Membership::group(&devices.each_ref().map(|device| &**device), 4 * N as u64, &budget()).unwrap();
    let parts = [1, 2].map(|seed| random_floats(seed, N));
    let bytes = |floats: &[f32]| floats.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
    let mut ranks = Vec::new();
    for ((device, member), part_of_rank) in devices.iter().zip(members).zip(&parts) {
        let mut rank = QueueFixture::new(device, graph.slot_sizes()[0] as u64);
        rank.queue.collectives().unwrap().join(1, member).unwrap();
        let (offset, len) = place(part);
        let region = rank.buffer.region(offset, len).unwrap();
        rank.queue.upload(region, None, UploadSource::Borrowed(&bytes(part_of_rank))).unwrap();
        let program = device.prepare(Arc::clone(&graph)).unwrap();
        (0..3).for_each(|_| rank.queue.run(&program, &Arc::from([rank.buffer.whole()])).unwrap());
        ranks.push(rank);
    }
    let want: Vec<f32> = parts[0].iter().zip(&parts[1]).map(|(a, b)| a + b).collect();
    for rank in &mut ranks {
        let (offset, len) = place(sums);
        let region = rank.buffer.region(offset, len).unwrap();
        assert!(rank.queue.download(region).unwrap().wait(deadline()).unwrap() == bytes(&want));
    }
    for part in &parts {
        assert_eq!(relay.has_seen(&bytes(part)), [false; 2]);
    }
    assert!(relay.recorded[0].lock().unwrap().len() > 3 * 4 * N, "the parts have passed");
}

/// The control of the test above: without keys, the same relay sees the tensor.
#[test]
fn a_recording_of_plain_copies_has_the_tensor() {
    let data = random_bytes(5, LEN as usize);
    let start = |args: &[&str]| {
        let all = [&["-p", "0", "-d", "CPU", "-t", "1", "--mem", "64M"], args].concat();
        spawn_server_with_log(program(&all), Stdio::null())
    };
    let (from, to) = (start(&["--peer", "127.0.90.22:*"]), start(&[]));
    let relay = RecordingRelay::start("127.0.90.22", &to.addr);
    let connect = |at: &str| Endpoint::connect(at, &options()).unwrap();
    let endpoints = [connect(&from.addr), connect(&relay.addr.to_string())];
    let [mut a, mut b] = endpoints.each_ref().map(|endpoint| QueueFixture::new(&endpoint.devices()[0], LEN));
    a.upload(&data);
    copy(&mut a, &mut b).unwrap();
    assert_eq!(relay.has_seen(&data), [true, false]);
    assert!(b.download() == data);
    eventually("the download has passed", || relay.has_seen(&data) == [true; 2]);
}

/// The client gets fixed texts, which the log of this process has; the servers' logs name the keys.
#[test]
fn servers_that_are_not_trusted_are_not_copied_to() {
    capture_log(); // of the client
    let [own, other, stranger, alice] = &keys();
    let all = [line(alice, "alice"), line(own, "gpu-1")];
    let revoked = [line(alice, "alice"), line(own, "gpu-1 revoked")];
    for (number, (name, expected, allowed, says, source_log, destination_log)) in [
        ("another key", stranger, &all[..], "proves another key", "which this end was not told to expect", "alert"),
        ("not allowed", other, &all[..1], "does not allow this server's key", "does not accept the key", "not allowed"),
        ("revoked", other, &revoked, "has revoked this server's key", "has revoked the key", "was revoked"),
    ]
    .into_iter()
    .enumerate()
    {
        let host = format!("127.0.91.{number}");
        let from = KeyedServer::start("127.0.0.1", own, &all[..1], &[peer(&host, expected)]);
        let to = KeyedServer::start(&host, other, allowed, &[]);
        let endpoints = [&from, &to].map(|server| server.connect(&server.process.addr, alice));
        let [a, b] = endpoints.each_ref().map(|endpoint| &endpoint.devices()[0]);
        assert!(!b.copies_from(a.info()), "{name}");
        let at = format!("cannot send to {} directly", to.process.addr);
        let lines = logged_lines(&at);
        assert!(lines.len() == 1 && lines[0].contains(says), "{name}: {lines:?}");
        eventually(name, || from.log().contains(source_log));
        assert!(from.log().contains("(alice): cannot connect to"), "{name}: {}", from.log());
        if destination_log != "alert" {
            eventually(name, || to.log().contains(destination_log));
        }
    }
}

/// The destination's session of the source server ends, and the queue with it; the next attempt is not accepted.
#[test]
fn revoking_the_key_of_a_server_ends_its_copies() {
    let [own, other, alice] = &keys();
    let allowed = [line(alice, "alice"), line(own, "gpu-1")];
    let from = KeyedServer::start("127.0.92.1", own, &allowed[..1], &[peer("127.0.92.2", other)]);
    let to = KeyedServer::start("127.0.92.2", other, &allowed, &[]);
    let endpoints = [&from, &to].map(|server| server.connect(&server.process.addr, alice));
    let [mut a, mut b] = endpoints.each_ref().map(|endpoint| QueueFixture::new(&endpoint.devices()[0], LEN));
    let data = random_bytes(6, LEN as usize);
    a.upload(&data);
    copy(&mut a, &mut b).unwrap();
    to.reread(&[line(alice, "alice"), line(own, "gpu-1 revoked")]);
    eventually("the session has ended", || to.log().contains("the list no longer allows its key under this name"));
    let error = copy(&mut a, &mut b).unwrap_err().to_string();
    assert!(error.contains("cannot copy to") || error.contains("closed"), "{error}");
    // The client is served on, and the copy works again with the key.
    let [mut a, mut b] = endpoints.each_ref().map(|endpoint| QueueFixture::new(&endpoint.devices()[0], LEN));
    a.upload(&data);
    assert!(a.download() == data);
    to.reread(&allowed);
    eventually("the list was read", || to.log().contains("allowed keys: 2"));
    copy(&mut a, &mut b).unwrap();
    assert!(b.download() == data);
}

#[test]
fn a_peer_with_a_key_demands_one_of_this_server() {
    let [key] = keys();
    let (status, error) = run_server_program(&["-p", "0", "-d", "CPU", "--peer", &peer("10.0.0.6", &key)]);
    assert_eq!(status, Some(2), "{error}");
    assert!(error.contains("give --key and --allow-keys"), "{error}");
    let (status, error) = run_server_program(&["-p", "0", "-d", "CPU", "--peer", "10.0.0.6=ed25519:short"]);
    assert!(status == Some(2) && error.contains("=plain-collectives"), "{error}");
}
