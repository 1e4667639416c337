//! Server states (ready, full, draining), and clients that retry to connect.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::options;
use crate::support::*;
use fanout::device::{MemoryBudget, UploadSource};
use fanout::registry::{self, Registry};
use fanout::rpc::client::{ConnectError, Endpoint, Options};
use fanout::rpc::server::{Config, Server};
use fanout::rpc::wire::ext::{ExtRequest, ExtResponse, ExtensionOffer, Notification, Ping, REVISION, ServerState};
use fanout::rpc::wire::*;
use std::io::Read;
use std::net::TcpListener;
use std::sync::{Arc, Barrier};
use std::time::Instant;

fn server_with_one_connection() -> TestServer {
    TestServer::start(Config::default().with_max_connections(1))
}

/// Options of a client that retries to connect.
fn retrying_options() -> Options {
    options().with_retry(WATCHDOG)
}

/// Sends HELLO and returns the server state in its reply.
fn request_state(client: &mut Client) -> ServerState {
    client.send(&hello_request());
    let reply = client.read_reply(RpcCommand::Hello);
    let Ok(Response::Hello(reply)) = Response::decode(RpcCommand::Hello, &reply) else { panic!("{reply:?}") };
    assert_eq!((reply.version, reply.conn_caps), (CLIENT_VERSION, Some([0; 24])));
    let offer = ExtensionOffer::from_byte(reply.extension_byte).unwrap();
    assert_eq!(offer.revision, REVISION);
    offer.state
}

/// Asserts that a connection is usable: uploads and downloads 64 bytes.
fn assert_usable(endpoint: &Endpoint) {
    let (device, budget) = (&endpoint.devices()[0], MemoryBudget::new(1 << 20));
    let buffer = device.alloc(64, &budget).unwrap();
    let mut queue = device.queue(&budget).unwrap();
    queue.upload(buffer.whole(), None, UploadSource::Borrowed(&[7; 64])).unwrap();
    let bytes = queue.download(buffer.whole()).unwrap().wait(Some(Instant::now() + WATCHDOG)).unwrap();
    assert_eq!(*bytes, [7; 64]);
}

#[test]
fn a_full_server_replies_full_to_hello() {
    let server = server_with_one_connection();
    let first = Endpoint::connect(&server.addr.to_string(), &options()).unwrap();
    let mut second = Client::connect_without_hello(&server);
    assert_eq!(request_state(&mut second), ServerState::Full);
    second.expect_refused(&["already 1 connections"]);
    // A client of a version that the address does not serve receives no reply.
    let mut old = Client::connect_without_hello(&server);
    old.send(&Request::Hello(Hello { conn_caps: None }));
    old.expect_refused(&["already 1 connections"]);
    let refused = Endpoint::connect(&server.addr.to_string(), &options()).unwrap_err();
    assert!(matches!(refused, ConnectError::Full { .. }), "{refused}");
    assert!(refused.to_string().contains(&server.addr.to_string()), "{refused}");
    assert_usable(&first);
}

#[test]
fn a_full_server_replies_only_to_hello() {
    let request = encode_message(&Request::DeviceCount(DeviceCount {}));
    for (bytes, reason) in [
        (&request[..], "expected HELLO"),
        (&[14, 25, 0, 0, 0, 0, 0, 0, 0], "HELLO: malformed"),
        (&[255; 9], "unknown command"),
    ] {
        let server = server_with_one_connection();
        let _first = Client::connect(&server);
        let mut client = Client::connect_without_hello(&server);
        client.write(bytes);
        client.expect_refused(&[reason]);
    }
}

/// Silent connections do not keep the reason from the clients that are refused.
#[test]
fn a_full_or_draining_server_tells_each_client_so() {
    let server = server_with_one_connection();
    let mut first = Client::connect(&server);
    let silent: Vec<_> = (0..300).map(|_| Client::connect_without_hello(&server)).collect();
    let state = || request_state(&mut Client::connect_without_hello(&server));
    assert_eq!([state(), state()], [ServerState::Full; 2]);
    let handle = server.handle.clone();
    let draining = std::thread::spawn(move || handle.drain(WATCHDOG));
    eventually("the server drains", || state() == ServerState::Draining);
    first.assert_alive();
    drop((first, silent));
    draining.join().unwrap();
}

#[test]
fn a_client_retries_until_the_server_has_a_free_connection() {
    // No other test has a limit of 5, so the log line below is unique.
    let server = TestServer::start(Config::default().with_max_connections(5));
    let first: Vec<_> = (0..5).map(|_| Client::connect(&server)).collect();
    let addr = server.addr.to_string();
    let waiting = std::thread::spawn(move || Endpoint::connect(&addr, &retrying_options()));
    eventually("the server has rejected the client", || !logged_warnings("already 5 connections").is_empty());
    drop(first);
    assert_usable(&waiting.join().unwrap().unwrap());
}

#[test]
fn a_client_retries_until_the_server_has_restarted() {
    // The first listener closes every connection, and is then closed itself.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = other.local_addr().unwrap();
    let waiting = std::thread::spawn(move || Endpoint::connect(&addr.to_string(), &retrying_options()));
    (0..2).for_each(|_| drop(other.accept().unwrap()));
    drop(other);
    let devices = TestServer::start(Config::default()).devices.clone();
    let server = Server::bind("127.0.0.1", addr.port(), devices, Config::default()).unwrap();
    let handle = server.handle();
    let serving = std::thread::spawn(move || server.run());
    assert_usable(&waiting.join().unwrap().unwrap());
    handle.shutdown();
    serving.join().unwrap();
}

#[test]
fn a_failed_retry_reports_the_number_of_attempts() {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let error = Endpoint::connect(&addr, &options().with_retry(2 * SHORT_TIMEOUT)).unwrap_err().to_string();
    for part in [&*format!("cannot connect to {addr}"), "is a server running there", " attempts in "] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_draining_server_serves_its_connections_and_ends_with_the_last() {
    let mut server = TestServer::start(Config::default());
    let addr = server.addr.to_string();
    let first = Endpoint::connect(&addr, &options()).unwrap();
    let mut silent = Client::connect_without_hello(&server);
    eventually("both clients are connected", || server.handle.connections() == 2);
    let handle = server.handle.clone();
    let draining = std::thread::spawn(move || handle.drain(WATCHDOG));
    eventually("the server rejects new connections", || {
        matches!(Endpoint::connect(&addr, &options()), Err(ConnectError::Draining { .. }))
    });
    // A client that connected before the drain and sends its HELLO now.
    assert_eq!(request_state(&mut silent), ServerState::Draining);
    silent.expect_closed();
    assert_usable(&first);
    drop(first);
    draining.join().unwrap();
    server.stop();
}

#[test]
fn extended_clients_are_notified_of_a_drain() {
    let mut server = TestServer::start(Config::default());
    let (mut client, _) = Client::connect_extended(&server);
    let handle = server.handle.clone();
    let draining = std::thread::spawn(move || handle.drain(WATCHDOG));
    let mut expect = |notification: Notification<'_>| {
        let mut want = Vec::new();
        notification.encode(&mut want);
        let mut got = vec![0; want.len()];
        client.stream.read_exact(&mut got).unwrap();
        assert_eq!(got, want, "{notification:?}");
        client.send_ext(&ExtRequest::Ping(Ping {}));
    };
    expect(Notification::ServerState(ServerState::Draining));
    let mut answer = Vec::new();
    ExtResponse::Ping(ServerState::Draining, 1).encode_body(&mut answer);
    expect(Notification::Reply(&answer));
    expect(Notification::Reply(&answer));
    drop(client);
    draining.join().unwrap();
    server.stop();
}

#[test]
fn a_drain_ends_at_its_deadline() {
    let mut server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let start = Instant::now();
    server.handle.drain(SHORT_TIMEOUT);
    assert!(start.elapsed() >= SHORT_TIMEOUT);
    client.expect_closed();
    server.stop();
}

#[test]
fn ipv6_endpoints_are_supported() {
    let devices = TestServer::start(Config::default()).devices.clone();
    // Skipped on machines without IPv6.
    let Ok(server) = Server::bind("::1", 0, devices, Config::default()) else { return };
    let (addr, handle) = (server.local_addr().to_string(), server.handle());
    let serving = std::thread::spawn(move || server.run());
    assert!(addr.starts_with("[::1]:"), "{addr}");
    assert_usable(&Endpoint::connect(&addr, &options()).unwrap());
    let opened = Registry::detect().open(&format!("{addr}/0"), &registry::Options::default()).unwrap();
    assert!(opened[0].info().name.starts_with(&format!("{addr}/")), "{}", opened[0].info().name);
    drop(opened);
    handle.shutdown();
    serving.join().unwrap();
}

/// Both servers keep their connection open until each has accepted one, so a client that connects one after the other blocks.
#[test]
fn the_servers_of_a_device_list_are_connected_concurrently() {
    let both = Arc::new(Barrier::new(2));
    let listen = || {
        let (listener, both) = (TcpListener::bind("127.0.0.1:0").unwrap(), Arc::clone(&both));
        let addr = listener.local_addr().unwrap().to_string();
        let thread = std::thread::spawn(move || {
            let _stream = listener.accept().unwrap();
            both.wait();
        });
        (addr, thread)
    };
    let servers = [listen(), listen()];
    let [a, b] = servers.each_ref().map(|(addr, _)| addr);
    let options = registry::Options::default().with_rpc(options());
    let error = Registry::detect().open(&format!("{a},CPU,{b}/0,{b}/1"), &options).unwrap_err().to_string();
    assert!(error.starts_with("2 of 2 servers cannot be used"), "{error}");
    for addr in [a, b] {
        assert!(error.contains(&format!("{addr} closed the connection on HELLO")), "{error}");
    }
    servers.into_iter().for_each(|(_, thread)| thread.join().unwrap());
}
