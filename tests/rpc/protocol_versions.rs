//! Which version of the protocol a server answers to HELLO, per listener and client address.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::options;
use crate::support::*;
use fanout::rpc::client::{ConnectError, Endpoint};
use fanout::rpc::server::{BindError, Config, ServedVersion, Server};
use fanout::rpc::wire::ext::{ExtensionOffer, ServerState};
use fanout::rpc::wire::*;

const V8: Version = PROTOCOL_VERSION;
const V7: Version = Version { major: 7, minor: 0, patch: 0 };

const LOCALHOST: [u8; 4] = [127, 0, 0, 1];

/// A server that finds out which version works, on one address.
fn probing_server(config: Config) -> TestServer {
    TestServer::with_listeners(&["127.0.0.1:0"], config)
}

/// Sends HELLO, and returns the version and the state in the reply.
fn exchange_hello(client: &mut Client) -> (Version, ServerState) {
    client.send(&hello_request());
    let reply = client.read_reply(RpcCommand::Hello);
    let Ok(Response::Hello(reply)) = Response::decode(RpcCommand::Hello, &reply) else { panic!("{reply:?}") };
    (reply.version, ExtensionOffer::from_byte(reply.extension_byte).unwrap().state)
}

/// As [`exchange_hello`], for versions whose reply has no state.
fn exchange_hello_of_any(client: &mut Client) -> Version {
    client.send(&hello_request());
    let reply = client.read_reply(RpcCommand::Hello);
    Version { major: reply[0], minor: reply[1], patch: reply[2] }
}

fn wait_until_idle(server: &TestServer) {
    eventually("all sessions have ended", || server.handle.connections() == 0);
}

/// Connects to a listener of the server and hangs up after the reply to HELLO, as a client of another version than the answered
/// one does. Returns the answered version, and the lines in the log about the client.
fn hang_up(server: &TestServer, listener: usize, from: [u8; 4]) -> (Version, Vec<String>) {
    let mut client = Client::connect_from(from, server.listeners[listener].addr);
    let (version, state) = exchange_hello(&mut client);
    assert_eq!(state, ServerState::Ready);
    client.shutdown_write();
    client.expect_closed();
    wait_until_idle(server);
    assert!(client.warnings().is_empty(), "{:?}", client.warnings());
    (version, client.infos())
}

/// Connects, sends HELLO and a command. Returns the answered version.
fn send_command(server: &TestServer) -> Version {
    let mut client = Client::connect_from(LOCALHOST, server.addr);
    let (version, _) = exchange_hello(&mut client);
    client.assert_alive();
    drop(client);
    wait_until_idle(server);
    version
}

#[test]
fn a_client_that_hangs_up_after_hello_gets_the_next_version() {
    let server = probing_server(Config::default());
    let (version, lines) = hang_up(&server, 0, LOCALHOST);
    assert_eq!(version, V8);
    assert_eq!(lines.len(), 1, "{lines:?}");
    for part in [
        "answered protocol 8.0, and the client hung up without a command",
        "the next connection from this address is answered 7.0",
        "--listen PORT=7.0",
    ] {
        assert!(lines[0].contains(part), "{part:?} in {lines:?}");
    }
    let (version, lines) = hang_up(&server, 0, LOCALHOST);
    assert!(version == V7 && lines.len() == 1 && lines[0].contains("--listen PORT=5.0"), "{version} {lines:?}");
    // The same changes are not logged again.
    for want in [V8, V7, V8] {
        assert_eq!(hang_up(&server, 0, LOCALHOST), (want, Vec::new()));
    }
    assert_eq!(send_command(&server), V7);
}

/// llama.cpp's clients open connections that they close again without a command: a context that is made to measure memory, one
/// connection per device for pipelining. With two devices, two such connections in a row once changed the answer to the other
/// version, and the next HELLO aborted the client.
#[test]
fn connections_of_a_working_client_without_a_command_keep_its_version() {
    for other in [false, true] {
        let server = probing_server(Config::default());
        let want = if other { V7 } else { V8 };
        if other {
            assert_eq!(hang_up(&server, 0, LOCALHOST).0, V8);
        }
        let mut session = Client::connect_from(LOCALHOST, server.addr);
        assert_eq!(exchange_hello(&mut session).0, want);
        session.assert_alive();
        for _ in 0..4 {
            let mut idle = Client::connect_from(LOCALHOST, server.addr);
            assert_eq!(exchange_hello(&mut idle).0, want);
            idle.shutdown_write();
            idle.expect_closed();
            assert_eq!((idle.infos(), idle.warnings()), (Vec::new(), Vec::new()));
            session.assert_alive();
        }
        drop(session);
        wait_until_idle(&server);
        // Two hang-ups change no proven version, however far apart they are.
        for _ in 0..2 {
            assert_eq!(hang_up(&server, 0, LOCALHOST).0, want);
        }
        assert_eq!(send_command(&server), want);
    }
}

/// The line about the last version of the list names the versions that are not in it.
#[test]
fn a_client_of_none_of_the_tried_versions_is_told_the_others() {
    let server = probing_server(Config::default());
    hang_up(&server, 0, LOCALHOST);
    let (_, lines) = hang_up(&server, 0, LOCALHOST);
    let remedy = "--listen PORT=5.1 or --listen PORT=5.0 or --listen PORT=4.0";
    assert!(lines.len() == 1 && lines[0].ends_with(remedy) && lines[0].contains("(8.0, 7.0)"), "{lines:?}");
}

/// Clients of 1.0 and 2.0 accept no version of 3.x.
#[test]
fn a_client_that_hangs_up_after_an_empty_hello_is_logged_once() {
    let server = probing_server(Config::default());
    for lines in [1, 0] {
        let mut client = Client::connect_without_hello(&server);
        client.send(&Request::Hello(Hello { conn_caps: None }));
        assert_eq!(client.read_reply(RpcCommand::Hello), [3, 0, 0]);
        client.shutdown_write();
        client.expect_closed();
        wait_until_idle(&server);
        let infos = client.infos();
        assert!(infos.len() == lines && infos.iter().all(|line| line.contains("update the llama.cpp of the client")));
    }
    assert_eq!(hang_up(&server, 0, LOCALHOST).0, V8, "the version to answer stays");
}

/// Below 7.0 no extensions are offered, so that fanout's client lists the devices by the commands of llama.cpp's.
#[test]
fn queries_pin_no_version_without_extensions() {
    let config = Config::default().with_protocol(vec![ServedVersion::V5_0, ServedVersion::V4_0]);
    let server = probing_server(config);
    let [v5, v4] = [5, 4].map(|major| Version { major, minor: 0, patch: if major == 4 { 3 } else { 0 } });
    let first = |wanted: Version| {
        let mut client = Client::connect_from(LOCALHOST, server.addr);
        assert_eq!(exchange_hello_of_any(&mut client), wanted);
        client
    };
    let mut client = first(v5);
    client.assert_alive();
    drop(client);
    wait_until_idle(&server);
    drop(first(v5));
    wait_until_idle(&server);
    let mut client = first(v4);
    client.alloc(0, 64);
    drop(client);
    wait_until_idle(&server);
    drop(first(v4));
    wait_until_idle(&server);
    drop(first(v4));
}

/// Connections that say nothing about the versions that are tried: without HELLO, with the HELLO of a client before 4.0, and
/// with HELLO_EXT. Fanout's clients work with each version.
#[test]
fn connections_of_other_clients_do_not_count() {
    let server = probing_server(Config::default());
    drop(Client::connect_without_hello(&server));
    wait_until_idle(&server);
    let mut old = Client::connect_without_hello(&server);
    old.send(&Request::Hello(Hello { conn_caps: None }));
    assert_eq!(old.read_reply(RpcCommand::Hello), [3, 0, 0]);
    old.assert_alive();
    drop(old);
    wait_until_idle(&server);
    for want in [V8, V7, V8] {
        for _ in 0..3 {
            let endpoint = Endpoint::connect(&server.addr.to_string(), &options()).unwrap();
            assert_eq!(endpoint.version(), want);
            assert!(endpoint.server().is_some(), "the client uses the extension");
            drop(endpoint);
            wait_until_idle(&server);
        }
        assert_eq!(hang_up(&server, 0, LOCALHOST).0, want);
    }
}

#[test]
fn rejected_clients_do_not_count() {
    let server = probing_server(Config::default().with_max_connections(1));
    let first = Endpoint::connect(&server.addr.to_string(), &options()).unwrap();
    for _ in 0..3 {
        let mut client = Client::connect_without_hello(&server);
        assert_eq!(exchange_hello(&mut client), (V8, ServerState::Full));
        client.expect_closed();
    }
    drop(first);
    wait_until_idle(&server);
    assert_eq!(hang_up(&server, 0, LOCALHOST).0, V8);
    // A full server answers the version that an admitted client would get.
    let _first = Endpoint::connect(&server.addr.to_string(), &options()).unwrap();
    assert_eq!(exchange_hello(&mut Client::connect_without_hello(&server)), (V7, ServerState::Full));
}

#[test]
fn clients_of_a_draining_server_do_not_count() {
    let mut server = probing_server(Config::default());
    let mut clients = [(); 3].map(|()| Client::connect_without_hello(&server));
    eventually("the clients are connected", || server.handle.connections() == clients.len());
    let handle = server.handle.clone();
    let draining = std::thread::spawn(move || handle.drain(WATCHDOG));
    // Clients of the extension do not count either, so that this loop changes no version.
    eventually("the server rejects new connections", || {
        matches!(Endpoint::connect(&server.addr.to_string(), &options()), Err(ConnectError::Draining { .. }))
    });
    assert_eq!(exchange_hello(&mut Client::connect_without_hello(&server)), (V8, ServerState::Draining));
    for (number, client) in clients.iter_mut().enumerate() {
        assert_eq!(exchange_hello(client), (V8, ServerState::Draining));
        client.expect_closed();
        eventually("the session has ended", || server.handle.connections() < 3 - number);
    }
    draining.join().unwrap();
    server.stop();
}

#[test]
fn each_port_answers_its_versions_and_a_shutdown_ends_all() {
    let mut server = TestServer::with_listeners(&["127.0.0.1:0=8", "127.0.0.1:0=7", "127.0.0.1:0"], Config::default());
    let versions: Vec<_> = server.listeners.iter().map(|listener| listener.versions.clone()).collect();
    let (v8, v7) = (ServedVersion::V8_0, ServedVersion::V7_0);
    assert_eq!(versions, [vec![v8], vec![v7], vec![v8, v7, ServedVersion::V3, ServedVersion::Gen0]]);
    assert_eq!(server.addr, server.listeners[0].addr);
    for _ in 0..3 {
        for (listener, want) in [(0, V8), (1, V7)] {
            assert_eq!(hang_up(&server, listener, LOCALHOST), (want, Vec::new()));
            let endpoint = Endpoint::connect(&server.listeners[listener].addr.to_string(), &options()).unwrap();
            assert_eq!(endpoint.version(), want);
            drop(endpoint);
            wait_until_idle(&server);
        }
    }
    assert_eq!(hang_up(&server, 2, LOCALHOST).0, V8);
    assert_eq!(hang_up(&server, 2, LOCALHOST).0, V7);
    let mut connected: Vec<_> =
        server.listeners.iter().map(|listener| Client::connect_from(LOCALHOST, listener.addr)).collect();
    connected.iter_mut().for_each(|client| _ = exchange_hello(client));
    server.stop();
    connected.iter_mut().for_each(Client::expect_closed);
}

/// On Linux the whole network 127.0.0.0/8 consists of addresses of this machine.
#[cfg(target_os = "linux")]
#[test]
fn client_addresses_are_independent_and_ports_share_what_is_known() {
    let server = TestServer::with_listeners(&["127.0.0.1:0", "127.0.0.1:0"], Config::default());
    let other = [127, 0, 0, 2];
    assert_eq!(hang_up(&server, 0, LOCALHOST).0, V8);
    assert_eq!(hang_up(&server, 0, other).0, V8);
    assert_eq!(hang_up(&server, 1, LOCALHOST).0, V7);
    assert_eq!(hang_up(&server, 1, LOCALHOST).0, V8);
    assert_eq!(hang_up(&server, 0, other).0, V7);
}

#[test]
fn a_server_needs_an_address_and_a_version() {
    let devices = TestServer::start(Config::default()).devices.clone();
    let bind = |addresses: &[&str], protocol: &[ServedVersion]| {
        let addresses: Vec<_> = addresses.iter().map(|text| text.parse().unwrap()).collect();
        Server::bind_all(&addresses, devices.clone(), Config::default().with_protocol(protocol.to_vec()))
    };
    assert!(matches!(bind(&[], &[ServedVersion::V7_0]), Err(BindError::NoAddress)));
    assert!(matches!(bind(&["127.0.0.1:0"], &[]), Err(BindError::NoVersion)));
    assert!(bind(&["127.0.0.1:0=7"], &[]).is_ok());
    let used = bind(&["127.0.0.1:0=7"], &[]).unwrap();
    let again = bind(&["127.0.0.1:0=8", &used.endpoint()], &[ServedVersion::V7_0]).err().unwrap();
    assert!(again.to_string().contains(&format!("cannot listen on {}", used.endpoint())), "{again}");
}
