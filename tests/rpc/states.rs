//! Servers that are full or about to end, and clients that try again.
#![allow(clippy::unwrap_used)] // a test says what it needs by failing

use crate::client::options;
use crate::support::*;
use fanout::device::{Account, Source};
use fanout::registry::{self, Registry};
use fanout::rpc::client::{ConnectError, Endpoint, Options};
use fanout::rpc::server::{Config, Server};
use fanout::rpc::wire::ext::{Answer, ExtRequest, Greeting, Notice, Ping, REVISION, State};
use fanout::rpc::wire::*;
use std::io::Read;
use std::net::TcpListener;
use std::sync::{Arc, Barrier};
use std::time::Instant;

fn one_place() -> TestServer {
    TestServer::start(Config::default().with_max_connections(1))
}

/// Options of a client that tries again.
fn patient() -> Options {
    options().with_retry(WATCHDOG)
}

/// The state that a HELLO is answered with.
fn told(client: &mut Client) -> State {
    client.send(&hello());
    let reply = client.reply(Command::Hello);
    let Ok(Response::Hello(reply)) = Response::decode(Command::Hello, &reply) else { panic!("{reply:?}") };
    assert_eq!((reply.version, reply.conn_caps), (PROTOCOL_VERSION, Some([0; 24])));
    let greeting = Greeting::from_byte(reply.greeting).unwrap();
    assert_eq!(greeting.revision, REVISION);
    greeting.state
}

/// That a connection still does what it is for.
fn works(endpoint: &Endpoint) {
    let (device, account) = (&endpoint.devices()[0], Account::new(1 << 20));
    let buffer = device.alloc(64, &account).unwrap();
    let mut queue = device.queue(&account).unwrap();
    queue.upload(buffer.whole(), None, Source::Borrowed(&[7; 64])).unwrap();
    let bytes = queue.download(buffer.whole()).unwrap().wait(Some(Instant::now() + WATCHDOG)).unwrap();
    assert_eq!(*bytes, [7; 64]);
}

#[test]
fn a_full_server_says_so() {
    let server = one_place();
    let first = Endpoint::connect(&server.addr.to_string(), &options()).unwrap();
    let mut second = Client::raw(&server);
    assert_eq!(told(&mut second), State::Full);
    second.expect_refused(&["already 1 connections"]);
    // A client from before 4.0 hears its version, in the form that it can read.
    let mut old = Client::raw(&server);
    old.send(&Request::Hello(Hello { conn_caps: None }));
    assert_eq!(old.reply(Command::Hello), [7, 0, 0]);
    old.expect_refused(&["already 1 connections"]);
    let refused = Endpoint::connect(&server.addr.to_string(), &options()).unwrap_err();
    assert!(matches!(refused, ConnectError::Full { .. }), "{refused}");
    assert!(refused.to_string().contains(&server.addr.to_string()), "{refused}");
    works(&first);
}

#[test]
fn what_is_no_hello_is_not_answered_by_a_full_server() {
    let server = one_place();
    let _first = Client::open(&server);
    for bytes in [&frame(&Request::DeviceCount(DeviceCount {}))[..], &[14, 25, 0, 0, 0, 0, 0, 0, 0], &[255; 9]] {
        let mut client = Client::raw(&server);
        client.write(bytes);
        client.expect_refused(&["already 1 connections"]);
    }
}

/// Whoever is turned away costs a thread for a moment: there are only so many.
#[test]
fn at_most_64_are_turned_away_with_a_word() {
    let server = one_place();
    let mut first = Client::open(&server);
    let crowd: Vec<_> = (0..64).map(|_| Client::raw(&server)).collect();
    let mut late = Client::raw(&server);
    late.send(&hello());
    late.expect_refused(&["already 1 connections"]);
    first.assert_alive();
    crowd.into_iter().for_each(|mut client| client.expect_closed());
    assert_eq!(told(&mut Client::raw(&server)), State::Full, "there is room at the door again");
}

#[test]
fn a_client_waits_for_a_place() {
    // As many as no other test has, for the log.
    let server = TestServer::start(Config::default().with_max_connections(5));
    let first: Vec<_> = (0..5).map(|_| Client::open(&server)).collect();
    let addr = server.addr.to_string();
    let waiting = std::thread::spawn(move || Endpoint::connect(&addr, &patient()));
    eventually("it is turned away", || !logged("already 5 connections").is_empty());
    drop(first);
    works(&waiting.join().unwrap().unwrap());
}

#[test]
fn a_client_waits_for_a_server_that_comes_back() {
    // What is there at first closes every connection, and then is gone.
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = other.local_addr().unwrap();
    let waiting = std::thread::spawn(move || Endpoint::connect(&addr.to_string(), &patient()));
    (0..2).for_each(|_| drop(other.accept().unwrap()));
    drop(other);
    let devices = TestServer::start(Config::default()).devices.clone();
    let server = Server::bind("127.0.0.1", addr.port(), devices, Config::default()).unwrap();
    let handle = server.handle();
    let serving = std::thread::spawn(move || server.run());
    works(&waiting.join().unwrap().unwrap());
    handle.shutdown();
    serving.join().unwrap();
}

#[test]
fn who_gave_up_says_after_how_many_attempts() {
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let error = Endpoint::connect(&addr, &options().with_retry(2 * SHORT)).unwrap_err().to_string();
    for part in [&*format!("cannot connect to {addr}"), "is a server running there", " attempts in "] {
        assert!(error.contains(part), "{error}");
    }
}

#[test]
fn a_draining_server_serves_those_it_has_and_ends_with_the_last() {
    let mut server = TestServer::start(Config::default());
    let addr = server.addr.to_string();
    let first = Endpoint::connect(&addr, &options()).unwrap();
    let mut silent = Client::raw(&server);
    eventually("both are there", || server.handle.connections() == 2);
    let handle = server.handle.clone();
    let draining = std::thread::spawn(move || handle.drain(WATCHDOG));
    eventually("no more are taken", || {
        matches!(Endpoint::connect(&addr, &options()), Err(ConnectError::Draining { .. }))
    });
    // It was there before, and says its HELLO now.
    assert_eq!(told(&mut silent), State::Draining);
    silent.expect_closed();
    works(&first);
    drop(first);
    draining.join().unwrap();
    server.stop();
}

#[test]
fn who_has_greeted_is_told_that_the_server_drains() {
    let mut server = TestServer::start(Config::default());
    let (mut client, reply) = Client::greet(&server);
    assert_eq!(reply.sessions, 1);
    let handle = server.handle.clone();
    let draining = std::thread::spawn(move || handle.drain(WATCHDOG));
    let mut expect = |notice: Notice<'_>| {
        let mut want = Vec::new();
        notice.encode(&mut want);
        let mut got = vec![0; want.len()];
        client.stream.read_exact(&mut got).unwrap();
        assert_eq!(got, want, "{notice:?}");
        client.ask(&ExtRequest::Ping(Ping {}));
    };
    expect(Notice::State(State::Draining));
    let mut answer = Vec::new();
    Answer::Ping(State::Draining, 1).encode(&mut answer);
    expect(Notice::Reply(&answer));
    expect(Notice::Reply(&answer));
    drop(client);
    draining.join().unwrap();
    server.stop();
}

#[test]
fn a_drain_ends_when_its_time_is_over() {
    let mut server = TestServer::start(Config::default());
    let mut client = Client::open(&server);
    let start = Instant::now();
    server.handle.drain(SHORT);
    assert!(start.elapsed() >= SHORT);
    client.expect_closed();
    server.stop();
}

#[test]
fn endpoints_of_ipv6() {
    let devices = TestServer::start(Config::default()).devices.clone();
    // Not every machine has it.
    let Ok(server) = Server::bind("::1", 0, devices, Config::default()) else { return };
    let (addr, handle) = (server.local_addr().to_string(), server.handle());
    let serving = std::thread::spawn(move || server.run());
    assert!(addr.starts_with("[::1]:"), "{addr}");
    works(&Endpoint::connect(&addr, &options()).unwrap());
    let opened = Registry::detect().open(&format!("{addr}/0"), &registry::Options::default()).unwrap();
    assert!(opened[0].info().name.starts_with(&format!("{addr}/")), "{}", opened[0].info().name);
    drop(opened);
    handle.shutdown();
    serving.join().unwrap();
}

/// Each of two servers answers only once the other has been called.
#[test]
fn servers_of_a_list_are_connected_to_at_the_same_time() {
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
