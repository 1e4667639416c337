//! The source server of a peer transfer: which peers it connects to, delivery failures, and limits of the bytes in flight.

use super::support::*;
use crate::extended_support::*;
use crate::support::*;
use fanout::rpc::server::{BindError, Config, Server};
use fanout::rpc::wire::Version;
use fanout::rpc::wire::ext::*;
use std::io::Write;
use std::net::TcpListener;

#[test]
fn send_and_receive_copy_bytes_between_servers() {
    let (a, b) = (TestServer::start(config_with_peers(&["127.0.0.0/8:*"])), TestServer::start(Config::default()));
    let (mut src, mut dst) = (Client::connect_with_queues(&a), Client::connect_with_queues(&b));
    for (seed, len) in [1, CHUNK_BYTES, (1 << 20) + 3, 40 * CHUNK_BYTES + 1].into_iter().enumerate() {
        let data = random_bytes(seed as u64, len);
        let (from, to) = (src.alloc_span(len), dst.alloc_span(len));
        let token = dst.request_token();
        src.write_span(0, from, None, &data);
        dst.receive_from_peer(to, token);
        src.send_to_peer(from, token, &b.addr.to_string());
        // The fill follows the read of the bytes in queue order, so it does not change the sent bytes.
        src.fill_span(0, from, 0);
        assert!(dst.read_bytes(to) == data, "{len} bytes");
    }
    // The destination has its client's connection and one peer connection, which is closed with the source's session.
    assert_eq!(b.handle.connections(), 2);
    src.assert_ping_replied();
    drop(src);
    eventually("the peer connection is closed", || b.handle.connections() == 1 && a.handle.connections() == 0);
    dst.assert_ping_replied();
}

#[test]
fn two_queues_share_one_peer_connection() {
    let (a, b) = (TestServer::start(config_with_peers(&["127.0.0.1:*"])), TestServer::start(Config::default()));
    let (mut src, mut dst) = (Client::connect_with_queues(&a), Client::connect_with_queues(&b));
    assert_eq!(src.probe_peer(&b.addr.to_string()), Ok(()));
    src.open_queue(1, 0);
    dst.open_queue(1, 0);
    let len = 2 * CHUNK_BYTES;
    let (from, to) = (src.alloc_span(len), dst.alloc_span(len));
    src.write_span(0, from, None, &random_bytes(1, len));
    assert!(src.read_bytes(from) == random_bytes(1, len));
    let (first, second) = (dst.request_token(), dst.request_token());
    let half =
        |span: BufferSpan, at: usize| BufferSpan { offset: (at * CHUNK_BYTES) as u64, len: CHUNK_BYTES as u64, ..span };
    let address = b.addr.to_string();
    for (queue, token, at) in [(0, first, 0), (1, second, 1)] {
        dst.send_ext(&ExtRequest::ReceiveFromPeer(ReceiveFromPeer { queue, span: half(to, at), token }));
        let span = half(from, at);
        src.send_ext(&ExtRequest::SendToPeer(SendToPeer { queue, span, token, address: &address }));
    }
    dst.mark(1, 1);
    dst.wait_for_mark(0, 1, 1);
    assert!(dst.read_bytes(to) == random_bytes(1, len));
    assert_eq!(b.handle.connections(), 2);
}

#[test]
fn only_allowed_peers_are_connected_to() {
    let peer = FakeServer::start();
    let port = peer.address.rsplit_once(':').expect("a port").1;
    let with_port = |host: &str| format!("{host}:{port}");
    for (peers, address, why) in [
        (vec![], with_port("127.0.0.1"), "--peer"),
        (vec![], with_port("localhost"), "--peer"),
        // Without a port, an entry permits that of the default only; a name is not resolved to be compared with addresses.
        (vec!["127.0.0.1".to_owned()], with_port("127.0.0.1"), "none of its --peer flags names it"),
        (vec!["localhost".to_owned()], with_port("localhost"), "none of its --peer flags names it"),
        (vec!["127.0.0.0/8".to_owned()], with_port("127.0.0.1"), "none of its --peer flags names it"),
        (vec!["127.0.0.0/8:*".to_owned()], with_port("localhost"), "none of its --peer flags names it"),
        (vec!["10.0.0.0/8:*".to_owned()], with_port("127.0.0.1"), "none of its --peer flags names it"),
        (vec![with_port("127.0.0.2")], with_port("127.0.0.1"), "none of its --peer flags names it"),
        (vec!["127.0.0.1:1".to_owned()], with_port("127.0.0.1"), "none of its --peer flags names it"),
        (vec!["127.0.0.1:1".to_owned()], with_port("localhost"), "none of its --peer flags names it"),
        (vec![with_port("127.0.0.1")], "127.0.0.1".to_owned(), "expected an address"),
        (vec![with_port("127.0.0.1")], format!("{}:1", "a".repeat(300)), "expected an address"),
    ] {
        let peers: Vec<_> = peers.iter().map(String::as_str).collect();
        let server = TestServer::start(config_with_peers(&peers));
        let mut src = Client::connect_with_queues(&server);
        let error = src.probe_peer(&address).expect_err("the address is not on the allow-list");
        assert!(error.contains(why), "{peers:?} {address}: {error}");
        let span = src.alloc_span(1);
        src.send_to_peer(span, [0; TRANSFER_TOKEN_BYTES], &address);
        let fault = src.next_queue_failure();
        assert!(fault.text.contains(why), "{peers:?} {address}: {fault:?}");
        // Only the queue fails: the session accepts a new queue.
        src.reopen_queue();
        assert_eq!(src.read_bytes(span), [0]);
    }
    peer.assert_no_connection();
}

/// A host name may have at most 63 characters per label, so this one cannot be resolved.
#[test]
fn a_peer_name_that_does_not_resolve_fails_the_start() {
    let peers = vec!["a".repeat(64).parse().expect("a name")];
    let unknown = Server::bind(
        "127.0.0.1",
        0,
        TestServer::start(Config::default()).devices.clone(),
        Config::default().with_peers(peers),
    );
    assert!(matches!(unknown, Err(BindError::Peer { .. })));
}

#[test]
fn a_peer_is_reachable_by_each_of_its_names() {
    let b = TestServer::start(Config::default());
    let port = b.addr.port();
    for (peer, hosts) in [
        ("127.0.0.1:*".to_owned(), &["127.0.0.1"][..]),
        (format!("127.0.0.1:{port}"), &["127.0.0.1"]),
        ("127.0.0.0/8:*".to_owned(), &["127.0.0.1"]),
        (format!("127.0.0.0/8:{port}"), &["127.0.0.1"]),
        (format!("localhost:{port}"), &["127.0.0.1", "localhost"]),
    ] {
        let a = TestServer::start(config_with_peers(&[&peer]));
        let mut src = Client::connect_with_queues(&a);
        for host in hosts {
            assert_eq!(src.probe_peer(&format!("{host}:{port}")), Ok(()), "{peer} {host}");
        }
    }
}

#[test]
fn an_unreachable_peer_is_reported() {
    let silent = FakeServer::start();
    let config = config_with_peers(&["127.0.0.1:*"]);
    let server = TestServer::start(config.with_handshake_timeout(4 * SHORT_TIMEOUT));
    let mut src = Client::connect_with_queues(&server);
    let closed = FakeServer::start().address;
    let full = TestServer::start(Config::default().with_max_connections(0));
    for address in [&silent.address, &closed, &full.addr.to_string()] {
        let error = src.probe_peer(address).expect_err("no usable server is there");
        assert!(error.contains(address.as_str()), "{error}");
        let span = src.alloc_span(1);
        src.send_to_peer(span, [0; TRANSFER_TOKEN_BYTES], address);
        let fault = src.next_queue_failure();
        assert!(fault.text.contains(address.as_str()), "{fault:?}");
        src.reopen_queue();
    }
}

/// In versions other than 7.0 the extension byte of the HELLO reply is padding, so the source closes the connection without a
/// HELLO_EXT and without data.
#[test]
fn a_peer_of_another_version_receives_no_data() {
    let peer = FakeServer::start();
    let server = TestServer::start(config_with_peers(&["127.0.0.1:*"]));
    let version = |major, minor| Version { major, minor, patch: 0 };
    for (peer_version, why) in [(version(5, 1), "no fanout server"), (version(9, 0), "no fanout server")] {
        let mut src = Client::connect_with_queues(&server);
        let span = src.alloc_span(1);
        src.send_to_peer(span, [0; TRANSFER_TOKEN_BYTES], &peer.address);
        let mut connection = peer.accept_hello(peer_version);
        connection.wait_closed();
        let fault = src.next_queue_failure();
        assert!(fault.text.contains(why) && fault.text.contains(&peer.address), "{peer_version}: {fault:?}");
    }
    peer.assert_no_connection();
}

/// A client could otherwise read from services that only the server reaches.
#[test]
fn errors_quote_nothing_of_what_another_service_sends() {
    // The first bytes as the size of a reply: 1 to 28 are those of HELLO, and others are refused before the body is read.
    let banners: [&[u8]; 4] = [
        b"SSH-2.0-OpenSSH_9.6 a longer banner\r\n",
        b"\x1c\0\0\0\0\0\0\0secret bytes in the reply...",
        b"\x03\0\0\0\0\0\0\0\xc8\xc9\xca",
        b"\0\0\0\0\0\0\0\0",
    ];
    let service = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let address = service.local_addr().expect("bound").to_string();
    let server = TestServer::start(config_with_peers(&["127.0.0.1:*"]));
    let mut texts = Vec::new();
    for banner in banners {
        let mut src = Client::connect_with_queues(&server);
        src.send_ext(&ExtRequest::ProbePeer(ProbePeer { address: &address }));
        let mut connection = service.accept().expect("a connection").0;
        connection.write_all(banner).expect("an open connection");
        match ExtResponse::decode(ExtCommand::ProbePeer, &src.next_ext_reply()) {
            Ok(ExtResponse::ProbePeer(Err(text))) => texts.push(text.to_owned()),
            other => panic!("{other:?}"),
        }
    }
    let texts: std::collections::HashSet<_> = texts.into_iter().collect();
    assert!(texts.len() == 1 && texts.iter().all(|text| text.contains("no fanout server")), "{texts:?}");
}

#[test]
fn undelivered_bytes_fail_the_sending_queue() {
    type Case = fn(&mut FakeServerConnection);
    /// What the other end sends must not reach the client.
    const SECRET: &str = "not for the client";
    // More bytes than the socket buffers hold: the source blocks before its PING, so every reply is unsolicited.
    const MANY: usize = 256;
    let cases: [(&str, usize, Case); 6] = [
        ("closed the connection", 2, |_| {}),
        ("closed the connection", 2, |connection| assert_eq!(connection.read_message().0, ExtCommand::PeerWrite)),
        ("a protocol error", 2, |connection| {
            assert_eq!(connection.read_message().0, ExtCommand::PeerWrite);
            connection.send_notification(&Notification::ProtocolError(SECRET));
        }),
        ("not confirmed the bytes", 2, |connection| {
            while connection.read_message().0 != ExtCommand::Ping {}
            connection.wait_closed();
        }),
        ("no queue was opened", 2, |connection| {
            connection.send_notification(&Notification::MarkReached { queue: 1, number: 1 })
        }),
        ("no request is waiting for", MANY, |connection| connection.send_notification(&Notification::Reply(&[0; 5]))),
    ];
    let peer = FakeServer::start();
    let server = TestServer::start(with_short_stall_timeout(config_with_peers(&["127.0.0.1:*"])));
    for (expected_text, pieces, case) in cases {
        let mut src = Client::connect_with_queues(&server);
        let (span, token) = (src.alloc_span(pieces * CHUNK_BYTES), [3; TRANSFER_TOKEN_BYTES]);
        src.send_to_peer(span, token, &peer.address);
        case(&mut peer.accept());
        let fault = src.next_queue_failure();
        // A connection that is closed with unread bytes may be reset, or its writes may fail, before the source reads the
        // reason.
        let texts = [expected_text, "connection lost", "closed the connection", "Connection reset"];
        let reason_given = texts.iter().any(|text| fault.text.contains(text));
        assert!(reason_given && fault.text.contains(&peer.address), "{expected_text}: {fault:?}");
        assert!(!fault.text.contains(SECRET), "{fault:?}");
        // Later sends on the failed queue are ignored, and the session continues.
        src.send_to_peer(span, token, &peer.address);
        src.assert_ping_replied();
    }
    peer.assert_no_connection();
}

#[test]
fn an_idle_peer_connection_that_was_closed_is_reopened() {
    let peer = FakeServer::start();
    let server = TestServer::start(config_with_peers(&["127.0.0.1:*"]));
    let mut src = Client::connect_with_queues(&server);
    let span = src.alloc_span(CHUNK_BYTES + 1);
    src.fill_span(0, span, 8);
    for _ in 0..3 {
        src.send_to_peer(span, [3; TRANSFER_TOKEN_BYTES], &peer.address);
        let mut connection = peer.accept();
        for (at, len) in [(0, CHUNK_BYTES), (CHUNK_BYTES, 1)] {
            let (command, body) = connection.read_message();
            assert_eq!(command, ExtCommand::PeerWrite);
            let head = [&[3; TRANSFER_TOKEN_BYTES][..], &(at as u64).to_le_bytes()].concat();
            assert!(body[..PEER_WRITE_HEAD] == head && body[PEER_WRITE_HEAD..] == vec![8; len]);
        }
        connection.reply_to_ping();
        // An orderly close after all bytes were acknowledged is no error.
        connection.shutdown_write();
        connection.wait_closed();
    }
    assert_eq!(src.read_bytes(span), vec![8; CHUNK_BYTES + 1]);
}

/// Bytes to send are staged in host memory. The session blocks while too many staged bytes are in flight.
#[test]
fn a_session_blocks_while_too_many_bytes_are_in_flight() {
    let peer = FakeServer::start();
    let config = config_with_peers(&["127.0.0.1:*"]).with_limits(Config::limits(16, 1 << 20));
    let server = TestServer::start(config);
    let mut src = Client::connect_with_queues(&server);
    let span = src.alloc_span(4 * CHUNK_BYTES);
    // More bytes than the limit of staged bytes and the socket buffers together.
    let sends = 120;
    for _ in 0..sends {
        src.send_to_peer(span, [3; TRANSFER_TOKEN_BYTES], &peer.address);
    }
    src.send_ext(&ExtRequest::Ping(Ping {}));
    assert_eq!(
        src.next_notification_or_state(),
        ReceivedNotification::ServerState(ServerState::Ready),
        "the session is blocked"
    );
    let mut connection = peer.accept();
    for _ in 0..sends {
        for _ in 0..4 {
            assert_eq!(connection.read_message().0, ExtCommand::PeerWrite);
        }
        connection.reply_to_ping();
    }
    src.next_ext_reply();
}

#[test]
fn bytes_in_flight_are_charged_to_the_session() {
    let peer = FakeServer::start();
    let config = config_with_peers(&["127.0.0.1:*"]);
    let server = TestServer::start(config.with_max_memory(Some(3 * CHUNK_BYTES as u64)));
    let mut src = Client::connect_with_queues(&server);
    let span = src.alloc_span(2 * CHUNK_BYTES);
    src.send_to_peer(span, [3; TRANSFER_TOKEN_BYTES], &peer.address);
    assert!(matches!(src.next_queue_failure().kind, DeviceFaultKind::OutOfMemory { .. }));
}
