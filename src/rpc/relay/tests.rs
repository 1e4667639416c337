//! Sessions between a client and a server of the test: wake-ups, copies, ends of the two directions, failures.

use super::session::RelaySession;
use super::*;
use crate::rpc::keys::PublicKey;
use crate::rpc::transport::counting::{Counts, counting};
use crate::rpc::transport::tls::copies;
use crate::rpc::transport::{Receiver, Sender, bind, dial_with, listen_on, tls_ends};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::SeqCst;
use std::thread;

/// Upper limit of every wait in these tests; no test comes close to it.
const WATCHDOG: Duration = Duration::from_secs(30);

const KEY: &str = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo";

fn watchdog() -> Deadline {
    Deadline::after(WATCHDOG)
}

/// Both ends of the two connections of a session.
struct Ends {
    client: (Receiver, Sender),
    relay_client: Connection,
    client_counts: Arc<Counts>,
    relay_server: Connection,
    server_counts: Arc<Counts>,
    server: (Receiver, Sender),
}

impl Ends {
    fn new() -> Ends {
        let (server_tls, client_tls) = tls_ends();
        let connect = |tls: Option<_>, dial_tls: Option<&ClientTls>| {
            let listener = listen_on(bind("127.0.0.1", 0).unwrap(), tls).unwrap();
            let (_, dialled) = dial_with(&[listener.local_addr()], &watchdog(), dial_tls).unwrap();
            (dialled, listener.accept(&watchdog()).unwrap().unwrap())
        };
        let (client, relay_client) = connect(None, None);
        let (relay_server, server) = connect(Some(server_tls), Some(&client_tls));
        thread::scope(|scope| {
            scope.spawn(|| server.handshake(&watchdog()).unwrap());
            relay_server.handshake(&watchdog()).unwrap();
        });
        let ((relay_client, client_counts), (relay_server, server_counts)) =
            (counting(relay_client), counting(relay_server));
        Ends {
            client: client.split(),
            relay_client,
            client_counts,
            relay_server,
            server_counts,
            server: server.split(),
        }
    }
}

/// Runs a session over the connections, and `test` with the ends of its client and its server.
fn with_session(test: impl FnOnce(&mut (Receiver, Sender), &mut (Receiver, Sender), [&Counts; 2])) {
    let Ends { mut client, relay_client, client_counts, relay_server, server_counts, mut server } = Ends::new();
    let forwarded: ForwardedServer = format!("gpu={KEY}").parse().unwrap();
    let logs = LogLimits::new(&Config::default());
    thread::scope(|scope| {
        let session = RelaySession { peer: relay_client.peer(), server: &forwarded, logs: &logs };
        let session = scope.spawn(move || session.forward(relay_client, relay_server));
        test(&mut client, &mut server, [&client_counts, &server_counts]);
        // The session ends with both directions, although the test still holds both connections.
        session.join().unwrap();
    });
}

fn transfer(from: &mut Sender, to: &mut Receiver, bytes: &[u8]) {
    from.write_all(&[bytes], WATCHDOG).unwrap();
    let mut got = vec![0; bytes.len()];
    to.read_exact(&mut got, &watchdog()).unwrap();
    assert!(got == bytes);
}

/// Waits until the relay has begun this many waits.
fn await_waits(waits: &AtomicUsize, count: usize) {
    let deadline = watchdog();
    while waits.load(SeqCst) < count {
        assert!(deadline.remaining().is_some(), "{count} waits");
        thread::yield_now();
    }
}

#[track_caller]
fn assert_ended(receiver: &mut Receiver) {
    assert_eq!(receiver.read_into(&mut [0], &watchdog()).unwrap(), 0);
}

#[test]
fn a_request_and_its_reply_wake_the_relay_once_each() {
    const PAIRS: usize = 50;
    with_session(|(from_server, to_server), (from_client, to_client), [client, server]| {
        for pair in 1..=PAIRS {
            // The thread of the direction waits: a message that it finds without a wait costs no wake-up.
            await_waits(&client.read_waits, pair);
            transfer(to_server, from_client, &[pair as u8; 1024]);
            await_waits(&server.read_waits, pair);
            transfer(to_client, from_server, &[pair as u8; 1024]);
        }
        await_waits(&client.read_waits, PAIRS + 1);
        await_waits(&server.read_waits, PAIRS + 1);
        for counts in [client, server] {
            assert_eq!(counts.read_waits.load(SeqCst), PAIRS + 1);
            assert_eq!(counts.read_wakeups.load(SeqCst), PAIRS);
            assert_eq!(counts.write_waits.load(SeqCst), 0);
        }
        to_server.finish(&watchdog()).unwrap();
        to_client.finish(&watchdog()).unwrap();
    });
}

#[test]
fn each_byte_is_copied_once_to_be_sealed_and_written_where_it_was_opened() {
    const BYTES: usize = 8 << 20;
    let data: Vec<u8> = (0..BYTES).map(|i| (i * 7 + i / 251) as u8).collect();
    let Ends { mut client, relay_client, client_counts, relay_server, server_counts, mut server } = Ends::new();
    let ((mut from_client, mut to_client), (mut from_server, mut to_server)) =
        (relay_client.split(), relay_server.split());
    // The bytes that the thread of a direction copies itself, without the copies of system calls.
    let forward = |from: &mut Receiver, to: &mut Sender| {
        assert_eq!(from.forward_to(to).unwrap(), BYTES as u64);
        to.finish(&watchdog()).unwrap();
        copies::counted()
    };
    let read_all = |from: &mut Receiver| {
        let mut got = vec![0; BYTES];
        from.read_exact(&mut got, &watchdog()).unwrap();
        assert!(got == data);
        assert_ended(from);
    };
    let write_all = |to: &mut Sender| {
        to.write_all(&[&data], WATCHDOG).unwrap();
        to.finish(&watchdog()).unwrap();
    };
    let (sealed, opened) = thread::scope(|scope| {
        let requests = scope.spawn(|| forward(&mut from_client, &mut to_server));
        let replies = scope.spawn(|| forward(&mut from_server, &mut to_client));
        scope.spawn(|| write_all(&mut client.1));
        scope.spawn(|| write_all(&mut server.1));
        scope.spawn(|| read_all(&mut client.0));
        read_all(&mut server.0);
        (requests.join().unwrap(), replies.join().unwrap())
    });
    let count = |counter: &AtomicUsize| counter.load(SeqCst);
    // Requests: read by a system call, copied into the records that are sealed; one more record ends the direction.
    assert_eq!((count(&client_counts.read), count(&client_counts.lent)), (BYTES, 0));
    assert_eq!(count(&server_counts.written), BYTES);
    assert_eq!(sealed, BYTES + 2);
    // Replies: opened in place, and written from there. The beginning of a record moves once, if the rest has not arrived.
    assert_eq!((count(&server_counts.read), count(&server_counts.lent)), (0, BYTES));
    assert_eq!(count(&client_counts.written), BYTES);
    assert!(opened < BYTES / 2, "{opened} bytes moved");
}

#[test]
fn the_end_of_one_direction_is_forwarded_and_the_other_goes_on() {
    with_session(|(from_server, to_server), (from_client, to_client), _| {
        to_server.finish(&watchdog()).unwrap();
        assert_ended(from_client);
        transfer(to_client, from_server, &[1; 100_000]);
        to_client.finish(&watchdog()).unwrap();
        assert_ended(from_server);
    });
    with_session(|(from_server, to_server), (from_client, to_client), _| {
        to_client.finish(&watchdog()).unwrap();
        assert_ended(from_server);
        transfer(to_server, from_client, &[1; 100_000]);
        to_server.finish(&watchdog()).unwrap();
        assert_ended(from_client);
    });
}

/// A peer that does not read blocks the relay's thread, which ends nevertheless when that peer is lost.
#[test]
fn the_loss_of_a_peer_that_does_not_read_ends_the_session() {
    for client_is_lost in [true, false] {
        let Ends { client, relay_client, client_counts, relay_server, server_counts, server } = Ends::new();
        let forwarded: ForwardedServer = format!("gpu={KEY}").parse().unwrap();
        let logs = LogLimits::new(&Config::default());
        let (lost, counts, mut other) =
            if client_is_lost { (client, client_counts, server) } else { (server, server_counts, client) };
        thread::scope(|scope| {
            let session = RelaySession { peer: relay_client.peer(), server: &forwarded, logs: &logs };
            let session = scope.spawn(move || session.forward(relay_client, relay_server));
            let (mut receiver, sender) = (other.0, &mut other.1);
            scope.spawn(move || {
                // Until the relay's connection to the lost peer has failed.
                while sender.write_all(&[&[7; 100_000]], WATCHDOG).is_ok() {}
            });
            await_waits(&counts.write_waits, 1);
            drop(lost);
            assert!(matches!(receiver.read_into(&mut [0], &watchdog()), Ok(0) | Err(_)));
            session.join().unwrap();
        });
    }
}

#[test]
fn a_server_is_an_address_and_a_key_behind_a_local_address() {
    let key: PublicKey = KEY.parse().unwrap();
    for (text, local, endpoint) in [
        ("gpu-1", None, "gpu-1:50052"),
        ("gpu-1:7", None, "gpu-1:7"),
        ("10.0.0.5", None, "10.0.0.5:50052"),
        ("[fd00::5]", None, "[fd00::5]:50052"),
        ("50060=gpu-1", Some(("127.0.0.1", 50060)), "gpu-1:50052"),
        ("0=[fd00::5]:7", Some(("127.0.0.1", 0)), "[fd00::5]:7"),
        ("127.0.0.2:50060=gpu-1:7", Some(("127.0.0.2", 50060)), "gpu-1:7"),
        ("[::1]:50060=gpu-1:7", Some(("::1", 50060)), "gpu-1:7"),
    ] {
        let server: ForwardedServer = format!("{text}={KEY}").parse().unwrap();
        assert_eq!((server.endpoint(), server.key()), (endpoint, key), "{text}");
        assert_eq!(server.local().map(|local| (local.host(), local.port())), local, "{text}");
        assert_eq!(server.to_string(), format!("{endpoint} ({KEY})"));
    }
    for (text, says) in [
        ("", "key is missing"),
        ("gpu-1", "key is missing"),
        ("50060=gpu-1:50052", "key is missing"),
        ("gpu-1=ed25519:short", "expected a public key"),
        (&format!("={KEY}"), "the server's address"),
        (&format!("50060={KEY}"), "the server's address"),
        (&format!("50060==gpu-1={KEY}"), "a local address"),
        (&format!("::1={KEY}"), "the server's address"),
        (&format!("gpu-1:70000={KEY}"), "the server's address"),
        (&format!("local=gpu-1={KEY}"), "a local address"),
        (&format!("50060=7=gpu-1={KEY}"), "a local address"),
        (&format!("50060=plain=gpu-1={KEY}"), "a local address"),
        (&format!("50060=allow:10.0.0.0/24=gpu-1={KEY}"), "a local address"),
        ("gpu-1=cert", "servers with certificates"),
    ] {
        let error = text.parse::<ForwardedServer>().unwrap_err().to_string();
        assert!(error.contains(says), "{text}: {error}");
    }
}

#[test]
fn a_server_without_a_local_address_gets_a_port_by_its_place() {
    assert_eq!(default_address(0), Some(ListenAddress::new("127.0.0.1", 50052)));
    assert_eq!(default_address(2), Some(ListenAddress::new("127.0.0.1", 50054)));
    assert_eq!(default_address(15_483).map(|address| address.port()), Some(65535));
    for none in [15_484, 65_536, usize::MAX] {
        assert_eq!(default_address(none), None);
    }
}

#[test]
fn a_relay_that_other_machines_reach_needs_consent() {
    let server: ForwardedServer = format!("0.0.0.0:0=gpu={KEY}").parse().unwrap();
    let config = RelayConfig::new(SecretKey::generate().unwrap());
    let refused = Relay::bind(std::slice::from_ref(&server), &config).map(drop).unwrap_err();
    assert!(matches!(refused, RelayError::Insecure { .. }), "{refused}");
    assert!(Relay::bind(&[server], &config.with_insecure(true)).is_ok());
}
