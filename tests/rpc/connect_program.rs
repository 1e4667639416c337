//! `rpc-server connect`: clients without TLS use servers that demand keys, through the program.

use crate::server_program::{ServerProcess, program, run_server_program, spawn_server_with_log};
use crate::server_program_keys::{Fixture, is_served, listening_addresses};
use crate::server_program_lifecycle::options;
use crate::server_program_supervisor::under_env;
use crate::support::*;
use fanout::rpc::client::Endpoint;
use fanout::rpc::keys::{PublicKey, SecretKey};
use fanout::rpc::wire::*;
use socket2::{Domain, Socket, Type};
use std::fs;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::process::Stdio;

const V7: Version = CLIENT_VERSION;
const V8: Version = PROTOCOL_VERSION;

/// A relay with one key.
struct RelayProcess {
    dir: tempfile::TempDir,
    process: ServerProcess,
}

impl RelayProcess {
    fn start(key: &SecretKey, args: &[&str]) -> RelayProcess {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join("key");
        key.create_file(&file).expect("a file");
        let log = fs::File::create(dir.path().join("log")).expect("a file");
        let args = [&["connect", "--key", file.to_str().expect("text")], args].concat();
        let process = spawn_server_with_log(under_env("--default-signal=HUP", &program(&args)), Stdio::from(log));
        RelayProcess { dir, process }
    }

    fn log(&self) -> String {
        fs::read_to_string(self.dir.path().join("log")).expect("text")
    }

    #[track_caller]
    fn await_log(&self, text: &str) {
        eventually(text, || self.log().contains(text));
    }

    /// The local addresses, in the order of the servers.
    fn addresses(&self) -> Vec<SocketAddr> {
        listening_addresses(&self.process).iter().map(|text| text.parse().expect("an address")).collect()
    }

    fn client(&self, index: usize) -> Client {
        Client::connect_from([127, 0, 0, 1], self.addresses()[index])
    }
}

/// A server at `addr`, at any local port.
fn route(addr: &str, key: PublicKey) -> String {
    format!("0={addr}={key}")
}

/// Exchanges HELLO, writes several MiB to the server and reads them back.
fn transfers(client: Client, version: Version) -> Client {
    const SIZE: usize = 5 << 20;
    let mut client = client.exchange_hello(version);
    let memory = client.alloc(0, SIZE as u64);
    let data = random_bytes(SIZE as u64, SIZE);
    client.set_tensor(&memory.byte_tensor(), 0, &data);
    assert!(client.get_tensor(&memory.byte_tensor(), 0, SIZE as u64) == data);
    client
}

#[test]
fn clients_without_tls_use_servers_with_keys() {
    // The first address is that of the options `-p 0`; the others answer one version each.
    let (first, _) = Fixture::start(&["--listen", "127.0.0.1:0=7", "--listen", "127.0.0.1:0=8"]);
    let (second, _) = Fixture::start(&[]);
    let key = SecretKey::generate().expect("a key");
    for fixture in [&first, &second] {
        allow(fixture, &key);
    }
    let at = first.addresses();
    let servers = [
        route(at[1], first.own.public_key()),
        route(at[2], first.own.public_key()),
        route(&second.server.addr, second.own.public_key()),
    ];
    let [seven, eight, other] = servers.each_ref().map(String::as_str);
    let relay = RelayProcess::start(&key, &["--sandbox", "on", seven, eight, other]);
    let banner = &relay.process.banner;
    assert!(banner.contains("\nsandbox: no new privileges, Landlock") && !banner.contains("WARNING"), "{banner}");
    let line =
        format!("listening on {} for {} ({})", relay.addresses()[2], second.server.addr, second.own.public_key());
    assert!(banner.ends_with(&format!("{line}\n")), "{banner}");
    relay.await_log(&format!("{}: ready, protocol 8.0.1, devices: 1", second.server.addr));
    // HELLO as llama.cpp's clients write it: the command, the length of the body, and 24 bytes of capabilities.
    for (index, version) in [(0, [7, 0, 0]), (1, [8, 0, 1])] {
        let mut stream = TcpStream::connect(relay.addresses()[index]).expect("a connection");
        stream.write_all(&[&[14, 24, 0, 0, 0, 0, 0, 0, 0][..], &[0; 24]].concat()).expect("a live socket");
        let mut reply = [0; 36];
        stream.read_exact(&mut reply).expect("a reply");
        assert_eq!((&reply[..8], &reply[8..11]), (&[28, 0, 0, 0, 0, 0, 0, 0][..], &version[..]));
    }
    let mut clients = [transfers(relay.client(0), V7), transfers(relay.client(1), V8)];
    clients.iter_mut().for_each(Client::assert_alive);
    let endpoint = Endpoint::connect(&relay.addresses()[2].to_string(), &options()).expect("a server");
    assert!(is_served(&endpoint) && endpoint.server().is_some());
    // The servers know the relay by its key.
    drop((clients, endpoint));
    eventually("audit lines", || first.log().contains("(laptop)") && second.log().contains("(laptop)"));
    assert!(!relay.log().contains("WARN"), "{}", relay.log());
}

/// Adds a key to a server's list.
fn allow(fixture: &Fixture, key: &SecretKey) {
    use rustix::process::{Pid, Signal, kill_process};
    let list = fs::read_to_string(fixture.path("clients")).expect("text");
    fs::write(fixture.path("clients"), format!("{list}{} laptop\n", key.public_key())).expect("a file");
    kill_process(Pid::from_child(&fixture.server.child), Signal::HUP).expect("a process");
    eventually("the list is read again", || fixture.log().contains("allowed keys: 3"));
}

#[test]
fn a_server_that_cannot_be_used_is_named_at_the_start_and_for_each_client() {
    let (fixture, revoked) = Fixture::start(&["--protocol", "8", "--listen", "127.0.0.1:0=plain"]);
    let stranger = SecretKey::generate().expect("a key");
    let own = fixture.own.public_key();
    let at = fixture.addresses();
    // Bound, but not listening: no other program gets the port.
    let reserved = reserved_port();
    let unreachable = reserved.local_addr().expect("bound").as_socket().expect("an address").to_string();
    for (key, addr, server, says) in [
        (&fixture.alice, at[0], stranger.public_key(), "which this end was not told to expect"),
        (&fixture.alice, at[1], own, "may not use TLS at this address"),
        (&fixture.alice, &unreachable, own, "refused"),
        (&fixture.alice, "no-such-host.invalid:1", own, "no such host"),
        (&revoked, at[0], own, "has revoked the key or certificate"),
        (&stranger, at[0], own, "does not accept the key or certificate"),
    ] {
        let relay = RelayProcess::start(key, &[&route(addr, server), &route(&fixture.server.addr, own)]);
        relay.await_log("until that changes, the relay closes the connections of its clients");
        let warning = relay.log();
        assert!(warning.contains(says) && warning.contains(addr), "{says}: {warning}");
        let mut client = relay.client(0);
        // The relay may have closed the connection already.
        let _ = client.stream.write_all(&encode_message(&hello_request()));
        client.expect_closed();
        let line = format!("{}: {addr}: ", client.addr);
        eventually("a line for the client", || {
            relay
                .log()
                .lines()
                .any(|log| log.contains(&line) && log.contains(says) && log.ends_with("connection closed"))
        });
        // The other server.
        if std::ptr::eq(key, &fixture.alice) {
            assert!(relay.client(1).exchange_hello(V8).stream.peer_addr().is_ok());
        }
    }
}

/// A port of loopback on which a server can listen, and which nobody else gets meanwhile.
fn reserved_port() -> Socket {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).expect("a socket");
    socket.set_reuse_address(true).expect("a socket");
    socket.bind(&SocketAddr::from((Ipv4Addr::LOCALHOST, 0)).into()).expect("a port");
    socket
}

#[test]
fn a_relay_outlives_its_servers_and_clients() {
    let reserved = reserved_port();
    let port = reserved.local_addr().expect("bound").as_socket().expect("an address").port();
    let dir = tempfile::tempdir().expect("a folder");
    let [own, key] = [(); 2].map(|()| SecretKey::generate().expect("a key"));
    own.create_file(&dir.path().join("key")).expect("a file");
    fs::write(dir.path().join("clients"), format!("{} laptop\n", key.public_key())).expect("a file");
    let relay = RelayProcess::start(&key, &[&route(&format!("127.0.0.1:{port}"), own.public_key())]);
    relay.await_log("is a server running there");
    relay.client(0).expect_closed();
    let files = ["key", "clients"].map(|name| dir.path().join(name).display().to_string());
    let start = || {
        let log = fs::File::options().create(true).append(true).open(dir.path().join("log")).expect("a file");
        let text = port.to_string();
        let args = [
            "-p",
            &text,
            "--protocol",
            "8",
            "-d",
            "CPU",
            "-t",
            "1",
            "--mem",
            "64M",
            "--no-supervise",
            "--key",
            &files[0],
        ];
        spawn_server_with_log(program(&[&args[..], &["--allow-keys", &files[1]]].concat()), Stdio::from(log))
    };
    let server_log = || fs::read_to_string(dir.path().join("log")).expect("text");
    for round in 1..=2 {
        // A server that starts later than the relay.
        let server = start();
        let mut client = transfers(relay.client(0), V8);
        // A client that is killed with a reply under way.
        let mut killed = transfers(relay.client(0), V8);
        killed.send(&Request::DeviceCount(DeviceCount {}));
        drop(killed);
        eventually("the session of the killed client ends", || server_log().matches("(laptop)").count() >= round);
        client.assert_alive();
        // A server that is killed.
        drop(server);
        client.expect_closed();
        relay.await_log("has closed the connection; its log may have the reason");
    }
}

/// A client that does not read stops its own connection alone, and takes a bounded part of the relay's memory.
#[test]
fn a_client_that_does_not_read_blocks_itself_alone() {
    const SIZE: usize = 8 << 20;
    let (fixture, _) = Fixture::start(&["--protocol", "8"]);
    let relay = RelayProcess::start(&fixture.alice, &[&route(&fixture.server.addr, fixture.own.public_key())]);
    let mut slow = relay.client(0).exchange_hello(V8);
    let memory = slow.alloc(0, SIZE as u64);
    let data = random_bytes(1, SIZE);
    slow.set_tensor(&memory.byte_tensor(), 0, &data);
    const READS: usize = 16;
    for _ in 0..READS {
        slow.send(&get_tensor_request(&memory.byte_tensor(), 0, SIZE as u64));
    }
    for _ in 0..3 {
        transfers(relay.client(0), V8);
    }
    let status = fs::read_to_string(format!("/proc/{}/status", relay.process.child.id())).expect("procfs");
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.split_whitespace().next());
    let peak: usize = peak.expect("a line").parse().expect("a number");
    assert!(peak < 64 << 10, "{peak} KiB");
    for _ in 0..READS {
        assert!(slow.read_reply(RpcCommand::GetTensor) == data);
    }
    slow.assert_alive();
}

#[test]
fn connections_beyond_the_limit_are_closed_and_a_signal_ends_all() {
    let (fixture, _) = Fixture::start(&["--protocol", "8"]);
    let server = route(&fixture.server.addr, fixture.own.public_key());
    let mut relay = RelayProcess::start(&fixture.alice, &["--max-connections", "2", &server, &server]);
    // The limit holds for all listeners together.
    let mut first = relay.client(0).exchange_hello(V8);
    let second = relay.client(1).exchange_hello(V8);
    let mut rejected = relay.client(0);
    rejected.expect_closed();
    relay
        .await_log(&format!("{}: rejected: the relay has 2 connections, its limit (--max-connections)", rejected.addr));
    drop(second);
    eventually("a free place", || {
        let mut stream = TcpStream::connect(relay.addresses()[1]).expect("a connection");
        stream.write_all(&encode_message(&hello_request())).is_ok() && stream.read_exact(&mut [0; 36]).is_ok()
    });
    first.assert_alive();
    relay.process.signal("-HUP");
    assert_eq!(relay.process.child.wait().expect("a child").code(), Some(0), "{}", relay.log());
    first.expect_closed();
}

#[test]
fn wrong_arguments_of_connect_are_explained() {
    let dir = tempfile::tempdir().expect("a folder");
    let file = dir.path().join("key").display().to_string();
    let key = SecretKey::generate().expect("a key");
    key.create_file(file.as_ref()).expect("a file");
    let key = key.public_key();
    let other = dir.path().join("none").display().to_string();
    for (args, code, says) in [
        (&[][..], 2, "--key <FILE>"),
        (&["--key", &file], 2, "SERVER"),
        (&["--key", &file, "gpu-1:50052"], 2, "the server's key is missing, as in gpu-1:50052=ed25519:"),
        (&["--key", &file, "gpu-1=ed25519:short"], 2, "expected a public key"),
        (&["--key", &file, &format!("::1={key}")], 2, "expected the server's address, such as gpu-1"),
        (&["--key", &file, "gpu-1=cert"], 2, "it cannot use servers with certificates"),
        (&["--key", &file, &format!("50060=allow:10.0.0.0/24=gpu-1={key}")], 2, "expected a local address"),
        (&["--key", &file, &format!("here=gpu-1={key}")], 2, "expected a local address, such as 50060"),
        (&["--key", &file, "--max-connections", "0", &format!("gpu-1={key}")], 2, "--max-connections"),
        (&["--key", &file, "--device", "CPU", &format!("gpu-1={key}")], 2, "--device"),
        (&["--key", &other, &format!("gpu-1={key}")], 1, "No such file"),
        (&["--key", &file, &format!("0.0.0.0:0=gpu-1={key}")], 1, "listen on loopback, or give --insecure"),
        (&["--key", &file, &format!("192.0.2.1:0=gpu-1={key}")], 1, "cannot listen on 192.0.2.1:0"),
    ] {
        let (status, text) = run_server_program(&[&["connect"], args].concat());
        assert!(status == Some(code) && text.contains(says), "{args:?}: {status:?} {text}");
    }
    let open = RelayProcess::start(
        &SecretKey::generate().expect("a key"),
        &["--insecure", &format!("0.0.0.0:0=127.0.0.1:1={key}")],
    );
    assert!(open.process.banner.contains("WARNING: 0.0.0.0:"), "{}", open.process.banner);
}
