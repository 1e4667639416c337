//! The source's side: whom it dials, and what it says of those that it cannot deliver to.

use super::support::*;
use crate::greeted_support::*;
use crate::support::*;
use fanout::rpc::server::{BindError, Config, Server};
use fanout::rpc::wire::Version;
use fanout::rpc::wire::ext::*;

#[test]
fn a_copy_goes_from_server_to_server() {
    let (a, b) = (TestServer::start(dialling(&["127.0.0.0/8"])), TestServer::start(Config::default()));
    let (mut src, mut dst) = (Client::with_queues(&a), Client::with_queues(&b));
    for (seed, len) in [1, PIECE, (1 << 20) + 3, 40 * PIECE + 1].into_iter().enumerate() {
        let data = noise(seed as u64, len);
        let (from, to) = (src.span(len), dst.span(len));
        let tickets = dst.tickets_for(len);
        src.write_span(0, from, None, &data);
        dst.receive(to, &tickets);
        src.send_to(from, &tickets, &b.addr.to_string());
        // It was read when this is done.
        src.fill_span(0, from, 0);
        assert!(dst.bytes(to) == data, "{len} bytes");
    }
    // The client's two connections, and one between the servers; it goes with the session.
    assert_eq!(b.handle.connections(), 2);
    src.pings();
    drop(src);
    eventually("the link is closed", || b.handle.connections() == 1 && a.handle.connections() == 0);
    dst.pings();
}

#[test]
fn two_queues_share_a_link() {
    let (a, b) = (TestServer::start(dialling(&["127.0.0.1"])), TestServer::start(Config::default()));
    let (mut src, mut dst) = (Client::with_queues(&a), Client::with_queues(&b));
    assert_eq!(src.reach(&b.addr.to_string()), Ok(()));
    src.open_queue(1, 0);
    dst.open_queue(1, 0);
    let len = 2 * PIECE;
    let (from, to) = (src.span(len), dst.span(len));
    src.write_span(0, from, None, &noise(1, len));
    assert!(src.bytes(from) == noise(1, len));
    let (first, second) = (dst.tickets_for(PIECE), dst.tickets_for(PIECE));
    let half = |span: Span, at: usize| Span { offset: (at * PIECE) as u64, len: PIECE as u64, ..span };
    let address = b.addr.to_string();
    for (queue, tickets, at) in [(0, &first, 0), (1, &second, 1)] {
        dst.ask(&ExtRequest::Receive(Receive { queue, span: half(to, at), tickets: TicketList(tickets) }));
        let (span, tickets) = (half(from, at), TicketList(tickets));
        src.ask(&ExtRequest::Send(Send { queue, span, tickets, address: &address }));
    }
    dst.mark(1, 1);
    dst.wait_for(0, 1, 1);
    assert!(dst.bytes(to) == noise(1, len));
    assert_eq!(b.handle.connections(), 2);
}

#[test]
fn only_peers_are_dialled() {
    let other = Impostor::start();
    let port = other.address.rsplit_once(':').expect("a port").1;
    let ours = |host: &str| format!("{host}:{port}");
    for (peers, address, why) in [
        (vec![], ours("127.0.0.1"), "--peer"),
        (vec![], ours("localhost"), "--peer"),
        (vec!["10.0.0.0/8".to_owned()], ours("127.0.0.1"), "none of its --peer flags names it"),
        (vec![ours("127.0.0.2")], ours("127.0.0.1"), "none of its --peer flags names it"),
        (vec!["127.0.0.1:1".to_owned()], ours("127.0.0.1"), "none of its --peer flags names it"),
        (vec!["127.0.0.1:1".to_owned()], ours("localhost"), "none of its --peer flags names it"),
        (vec![ours("127.0.0.1")], "127.0.0.1".to_owned(), "expected an address"),
        (vec![ours("127.0.0.1")], format!("{}:1", "a".repeat(300)), "expected an address"),
    ] {
        let peers: Vec<_> = peers.iter().map(String::as_str).collect();
        let server = TestServer::start(dialling(&peers));
        let mut src = Client::with_queues(&server);
        let said = src.reach(&address).expect_err("not a peer");
        assert!(said.contains(why), "{peers:?} {address}: {said}");
        let span = src.span(1);
        src.send_to(span, &[[0; TICKET]], &address);
        let fault = src.failed();
        assert!(fault.text.contains(why), "{peers:?} {address}: {fault:?}");
        // The session goes on, with other queues.
        src.reopen();
        assert_eq!(src.bytes(span), [0]);
    }
    other.is_alone();
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
fn a_peer_is_dialled_by_any_of_its_names() {
    let b = TestServer::start(Config::default());
    let port = b.addr.port();
    for peer in ["127.0.0.1".to_owned(), format!("127.0.0.1:{port}"), "127.0.0.0/8".to_owned(), "localhost".to_owned()]
    {
        let a = TestServer::start(dialling(&[&peer]));
        let mut src = Client::with_queues(&a);
        for host in ["127.0.0.1", "localhost"] {
            assert_eq!(src.reach(&format!("{host}:{port}")), Ok(()), "{peer} {host}");
        }
    }
}

#[test]
fn nobody_there_is_told() {
    let silent = Impostor::start();
    let config = dialling(&["127.0.0.1"]);
    let server = TestServer::start(config.with_handshake_timeout(4 * SHORT));
    let mut src = Client::with_queues(&server);
    let closed = Impostor::start().address;
    let full = TestServer::start(Config::default().with_max_connections(0));
    for address in [&silent.address, &closed, &full.addr.to_string()] {
        let said = src.reach(address).expect_err("nobody is there");
        assert!(said.contains(address.as_str()), "{said}");
        let span = src.span(1);
        src.send_to(span, &[[0; TICKET]], address);
        let fault = src.failed();
        assert!(fault.text.contains(address.as_str()), "{fault:?}");
        src.reopen();
    }
}

/// In versions other than 7.0 the byte of the greeting is padding: such a server is sent no GREET, and no bytes.
#[test]
fn a_server_of_another_version_is_sent_nothing() {
    let other = Impostor::start();
    let server = TestServer::start(dialling(&["127.0.0.1"]));
    let version = |major, minor| Version { major, minor, patch: 0 };
    for (theirs, why) in [(version(5, 1), "no fanout server"), (version(9, 0), "speaks version 9.0.0")] {
        let mut src = Client::with_queues(&server);
        let span = src.span(1);
        src.send_to(span, &[[0; TICKET]], &other.address);
        let mut guest = other.accept_hello(theirs);
        guest.wait_closed();
        let fault = src.failed();
        assert!(fault.text.contains(why) && fault.text.contains(&other.address), "{theirs}: {fault:?}");
    }
    other.is_alone();
}

#[test]
fn what_is_not_delivered_fails_the_queue() {
    type Case = fn(&mut Guest);
    // More than two sockets hold: no PING is sent for a reply to answer, as nobody reads.
    const MANY: usize = 256;
    let cases: [(&str, usize, Case); 6] = [
        ("closed the connection", 2, |_| {}),
        ("closed the connection", 2, |guest| assert_eq!(guest.next().0, ExtCommand::Put)),
        ("not that one", 2, |guest| {
            assert_eq!(guest.next().0, ExtCommand::Put);
            guest.tell(&Notice::Refused("not that one"));
        }),
        ("took the bytes", 2, |guest| {
            while guest.next().0 != ExtCommand::Ping {}
            guest.wait_closed();
        }),
        ("nobody opened", 2, |guest| guest.tell(&Notice::Reached { queue: 1, number: 1 })),
        ("nobody asked", MANY, |guest| guest.tell(&Notice::Reply(&[0; 5]))),
    ];
    let other = Impostor::start();
    let server = TestServer::start(impatient(dialling(&["127.0.0.1"])));
    for (why, pieces, case) in cases {
        let mut src = Client::with_queues(&server);
        let (span, tickets) = (src.span(pieces * PIECE), vec![[3; TICKET]; pieces]);
        src.send_to(span, &tickets, &other.address);
        case(&mut other.accept());
        let fault = src.failed();
        // A connection that is closed with unread bytes may be reset, or refuse what is written, before anything is read.
        let told = [why, "connection lost", "closed the connection"].iter().any(|text| fault.text.contains(text));
        assert!(told && fault.text.contains(&other.address), "{why}: {fault:?}");
        // Nothing more is done for it; the session goes on.
        src.send_to(span, &tickets, &other.address);
        src.pings();
    }
    other.is_alone();
}

#[test]
fn a_link_that_ends_when_all_is_delivered_is_made_again() {
    let other = Impostor::start();
    let server = TestServer::start(dialling(&["127.0.0.1"]));
    let mut src = Client::with_queues(&server);
    let span = src.span(PIECE + 1);
    src.fill_span(0, span, 8);
    for _ in 0..3 {
        src.send_to(span, &[[3; TICKET], [4; TICKET]], &other.address);
        let mut guest = other.accept();
        for (ticket, len) in [([3; TICKET], PIECE), ([4; TICKET], 1)] {
            let (command, body) = guest.next();
            assert_eq!(command, ExtCommand::Put);
            assert!(body[..TICKET] == ticket && body[TICKET..] == vec![8; len]);
        }
        guest.pong();
        // Closed in order: all that comes is the end.
        guest.hang_up();
        guest.wait_closed();
    }
    assert_eq!(src.bytes(span), vec![8; PIECE + 1]);
}

/// What a device has been read for SENDs lies in the host's memory: the session waits while there is too much of it.
#[test]
fn a_session_with_much_on_its_way_waits() {
    let other = Impostor::start();
    let config = dialling(&["127.0.0.1"]).with_limits(Config::limits(16, 1 << 20));
    let server = TestServer::start(config);
    let mut src = Client::with_queues(&server);
    let span = src.span(4 * PIECE);
    // More than is allowed and what two sockets hold besides.
    let sends = 120;
    for _ in 0..sends {
        src.send_to(span, &[[3; TICKET]; 4], &other.address);
    }
    src.ask(&ExtRequest::Ping(Ping {}));
    assert_eq!(src.heard(), Told::State(State::Ready), "the session waits");
    let mut guest = other.accept();
    for _ in 0..sends {
        for _ in 0..4 {
            assert_eq!(guest.next().0, ExtCommand::Put);
        }
        guest.pong();
    }
    src.answered();
    src.send_to(span, &[[3; TICKET]; 1025], &other.address);
    src.expect_told_refusal(&["SEND", "at most 1024 tickets, got 1025"]);
}

#[test]
fn what_is_on_its_way_is_charged() {
    let other = Impostor::start();
    let config = dialling(&["127.0.0.1"]);
    let server = TestServer::start(config.with_max_memory(Some(3 * PIECE as u64)));
    let mut src = Client::with_queues(&server);
    let span = src.span(2 * PIECE);
    src.send_to(span, &[[3; TICKET]; 2], &other.address);
    assert!(matches!(src.failed().kind, FaultKind::OutOfMemory { .. }));
    let mut src = Client::with_queues(&server);
    let span = src.span(PIECE);
    src.send_to(span, &[[3; TICKET]; 2], &other.address);
    src.expect_told_refusal(&["SEND", "take 1 tickets"]);
}
