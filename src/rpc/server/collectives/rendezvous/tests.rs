//! The rendezvous with injected timeouts. The poll of the client is the gate that each test opens at the right time.

use std::cell::{Cell, RefCell};
use std::net::Ipv4Addr;

use super::*;
use crate::device::MemoryBudget;
use crate::rpc::transport::{Receiver, Sender};

/// Longer than any test.
const LONG: Duration = Duration::from_secs(3600);

/// A timeout that a test lets expire.
const SHORT: Duration = Duration::from_millis(20);

fn listener(number: u8) -> (Box<dyn Listen>, SocketAddr) {
    let listener = transport::listen(&format!("127.0.89.{number}"), 0).unwrap();
    let at = listener.local_addr().ip().unwrap();
    (listener, at)
}

/// A free address: `number` is unique among these tests.
fn free_address(number: u8) -> SocketAddr {
    listener(number).1
}

fn allowlist(peer: &str) -> Arc<PeerAllowlist> {
    Arc::new(PeerAllowlist::resolve(&[peer.parse().unwrap()], None).unwrap())
}

fn timeouts(whole: Duration, dial: Duration, capabilities: Duration) -> RendezvousTimeouts {
    RendezvousTimeouts { whole, dial, capabilities }
}

fn rank_0(at: SocketAddr) -> LinkRequest {
    LinkRequest { rank: 0, port: at.port(), host: String::new() }
}

fn rank_1(at: SocketAddr) -> LinkRequest {
    LinkRequest { rank: 1, port: at.port(), host: at.ip().to_string() }
}

/// A peer's connection that has sent `bytes`.
fn peer(at: SocketAddr, bytes: &[u8]) -> (Receiver, Sender) {
    let (receiver, mut sender) = transport::dial(&[Address::Tcp(at)], &Deadline::after(LONG)).unwrap().1.split();
    sender.write_all(&[bytes], LONG).unwrap();
    (receiver, sender)
}

/// More silent peers than rank 0 keeps, and after them the right one.
#[test]
fn silent_peers_do_not_keep_the_right_one_away() {
    for (number, silent, capabilities) in [(1, MAX_CANDIDATES - 1, LONG), (2, MAX_CANDIDATES + 3, SHORT)] {
        let at = free_address(number);
        let peers = RefCell::new(Vec::new());
        let hung_up = || {
            if peers.borrow().is_empty() {
                peers.replace((0..silent).map(|_| peer(at, &[0; 23])).collect());
                peers.borrow_mut().push(peer(at, &[0; 24]));
            }
            false
        };
        let timeouts = timeouts(LONG, LONG, capabilities);
        let (link, _claim) =
            Rendezvous::default().accept(&rank_0(at), at, &allowlist("127.0.0.0/8:*"), timeouts, &hung_up).unwrap();
        let mut peers = peers.into_inner();
        assert_eq!(link.peer().to_string(), peers.pop().unwrap().0.local_addr().unwrap().to_string());
        for (mut silent, _sender) in peers {
            assert!(!matches!(silent.read_into(&mut [0], &Deadline::after(LONG)), Ok(1..)), "closed without a byte");
        }
    }
}

#[test]
fn the_error_names_a_peer_that_is_not_on_the_list() {
    let at = free_address(3);
    let unlisted = RefCell::new(None);
    let hung_up = || {
        unlisted.borrow_mut().get_or_insert_with(|| peer(at, b""));
        false
    };
    let timeouts = timeouts(SHORT, SHORT, SHORT);
    let accepted = Rendezvous::default().accept(&rank_0(at), at, &allowlist("127.9.9.9"), timeouts, &hung_up);
    let (error, unlisted) =
        (accepted.err().unwrap().to_string(), unlisted.into_inner().unwrap().0.local_addr().unwrap());
    let want = format!("no listed server has connected to {at} within 20ms; {unlisted} has, and no --peer permits it");
    assert_eq!(error, want);
}

/// A listed host that speaks another protocol, or offers RDMA, is closed without a byte, as soon as a byte shows it. The error
/// says why, and the right peer is still accepted.
#[test]
fn rank_0_requires_the_capabilities_of_plain_tcp() {
    for (number, caps) in [(8, &b"POST / HTTP/1.1\r\nHost: a"[..]), (9, &[0, 0, 7]), (10, &[7; 24])] {
        let at = free_address(number);
        for then_the_right_one in [false, true] {
            let (wrong, right, polls) = (RefCell::new(None), RefCell::new(None), Cell::new(0));
            let hung_up = || {
                wrong.borrow_mut().get_or_insert_with(|| peer(at, caps));
                // After a poll in which the bytes of the wrong one were there.
                if then_the_right_one && polls.replace(polls.get() + 1) == 5 {
                    right.replace(Some(peer(at, &[0; 24])));
                }
                false
            };
            let whole = if then_the_right_one { LONG } else { SHORT };
            let list = allowlist("127.0.0.0/8:*");
            let accepted = Rendezvous::default().accept(&rank_0(at), at, &list, timeouts(whole, LONG, LONG), &hung_up);
            let (mut wrong, _sender) = wrong.into_inner().unwrap();
            assert_eq!(accepted.is_ok(), then_the_right_one, "the right peer, and only it, is accepted");
            match accepted {
                Ok((link, _)) => {
                    let right = right.into_inner().expect("only the right one is accepted").0;
                    assert_eq!(link.peer().to_string(), right.local_addr().unwrap().to_string());
                }
                Err(error) => {
                    let (text, wrong) = (error.to_string(), wrong.local_addr().unwrap());
                    assert!(
                        text.contains(&format!("; {wrong} has: ")) && text.contains("GGML_RPC_NO_RDMA=1"),
                        "{text}"
                    );
                }
            }
            assert!(!matches!(wrong.read_into(&mut [0], &Deadline::after(LONG)), Ok(1..)), "closed without a byte");
        }
    }
}

#[test]
fn rank_0_waits_until_its_port_is_free() {
    let (listener, at) = listener(4);
    let (listener, polls, stream) = (Cell::new(Some(listener)), Cell::new(0), RefCell::new(None));
    let hung_up = || {
        match polls.replace(polls.get() + 1) {
            2 => drop(listener.take()),
            // The first poll after it listens.
            3 => _ = stream.replace(Some(peer(at, &[0; 24]))),
            _ => {}
        }
        false
    };
    let list = allowlist("127.0.0.0/8:*");
    Rendezvous::default().accept(&rank_0(at), at, &list, timeouts(LONG, LONG, LONG), &hung_up).unwrap();
    // In use until the deadline, and until the client hangs up.
    let _listener = transport::listen_at(at).unwrap();
    for (whole, hung_up, want) in [(SHORT, false, "cannot listen on"), (LONG, true, "the client has closed")] {
        let accepted = Rendezvous::default().accept(&rank_0(at), at, &list, timeouts(whole, LONG, LONG), &|| hung_up);
        assert!(accepted.err().unwrap().to_string().contains(want), "{want}");
    }
}

/// An address belongs to one client while its COMM_INIT is pending, and then until its rank 1 has stopped dialling.
#[test]
fn the_second_client_of_an_address_is_refused() {
    let (at, list, rendezvous) = (free_address(5), allowlist("127.0.0.0/8:*"), Rendezvous::default());
    let refused = || {
        let second = rendezvous.accept(&rank_0(at), at, &list, timeouts(LONG, LONG, LONG), &|| false);
        assert!(matches!(second, Err(RendezvousError::AddressClaimed { .. })), "{:?}", second.err());
    };
    for (dial, expires) in [(LONG, false), (Duration::ZERO, true)] {
        let first = RefCell::new(None);
        let hung_up = || {
            if first.borrow().is_none() {
                refused();
                first.replace(Some(peer(at, &[0; 24])));
            }
            false
        };
        let (_link, claim) = rendezvous.accept(&rank_0(at), at, &list, timeouts(LONG, dial, LONG), &hung_up).unwrap();
        if expires {
            let second = rendezvous.claims.claim(at).unwrap();
            drop(claim);
            refused(); // The claim that expired does not release the one that replaced it.
            drop(second);
        } else {
            refused();
            drop(claim);
        }
        assert!(rendezvous.claims.claim(at).is_ok());
    }
}

/// The thread that dials counts against a limit until it ends.
#[test]
fn dialling_keeps_its_permit_until_the_thread_ends() {
    let (threads, list) = (MemoryBudget::new(1), allowlist("127.0.0.0/8:*"));
    let (listener, at) = listener(6);
    let permit = threads.reserve(1).unwrap();
    // The listener does not answer.
    let error = dial(&rank_1(at), permit, &list, timeouts(LONG, LONG, SHORT), &|| false).err().unwrap();
    assert!(matches!(error, RendezvousError::NotEstablished(_)), "{error}");
    while threads.used() > 0 {
        std::thread::yield_now();
    }
    let accept = || listener.accept(&Deadline::after(Duration::ZERO)).unwrap();
    assert_eq!(std::iter::from_fn(accept).count(), 1, "dialled once");
}

/// A service that greets its clients is no rank 0, and no port of a system service is dialled.
#[test]
fn rank_1_requires_the_capabilities_of_plain_tcp() {
    let (threads, list) = (MemoryBudget::new(9), allowlist("127.0.0.0/8:*"));
    let (listener, at) = listener(7);
    let dial = |request: &LinkRequest| {
        super::dial(request, threads.reserve(1).unwrap(), &list, timeouts(LONG, LONG, LONG), &|| false)
    };
    for (caps, accepted) in [(*b"SSH-2.0-OpenSSH_9.2p1 De", false), ([0; 24], true)] {
        std::thread::scope(|scope| {
            let link = scope.spawn(|| dial(&rank_1(at)));
            let connection = listener.accept(&Deadline::after(LONG)).unwrap().unwrap();
            let (_receiver, mut sender) = connection.split();
            sender.write_all(&[&caps], LONG).unwrap();
            let link = link.join().unwrap();
            assert_eq!(link.is_ok(), accepted);
            assert!(accepted || link.err().unwrap().to_string().contains("GGML_RPC_NO_RDMA=1"));
        });
    }
    for port in [1, 22, 1000] {
        let request = rank_1(SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        assert!(dial(&request).err().unwrap().to_string().contains("1000 above"), "{port}");
    }
}

/// Collectives are not encrypted. The reason comes at once: a client would otherwise wait for a server that is never accepted.
#[test]
fn a_server_with_keys_neither_listens_nor_dials_beyond_loopback() {
    use crate::rpc::keys::SecretKey;
    use crate::rpc::transport::tls::{Credentials, Proof};
    let credentials = Credentials::of_key(&SecretKey::generate().unwrap()).unwrap();
    // Not an address of this machine: listening on it would fail with another reason.
    let at: SocketAddr = "192.0.2.1:51052".parse().unwrap();
    let rendezvous = Rendezvous::default();
    for (peer, is_consent) in [("192.0.2.1", false), ("192.0.2.1=plain-collectives", true)] {
        let list = PeerAllowlist::resolve(&[peer.parse().unwrap()], Some(Proof::Key(credentials.clone()))).unwrap();
        let timeouts = timeouts(SHORT, SHORT, SHORT);
        let listened = rendezvous.accept(&rank_0(at), at, &list, timeouts, &|| false).err().unwrap();
        let dialled =
            dial(&rank_1(at), MemoryBudget::new(1).reserve(1).unwrap(), &list, timeouts, &|| false).err().unwrap();
        for error in [listened, dialled] {
            assert_eq!(error.to_string().contains("=plain-collectives"), !is_consent, "{peer}: {error}");
        }
    }
}
