//! What the contract of transports does not test: handshakes in parts, and how often bytes are copied.

use super::super::contract::{tls_ends, tls_pair};
use super::super::tcp::socket_pair;
use super::super::{bind, dial, listen_on};
use super::*;
use std::sync::Arc;

const WATCHDOG: Duration = Duration::from_secs(30);

/// A handshake message may span records, which rustls takes only when the last one has arrived.
#[test]
fn handshake_messages_may_span_records() {
    let (mut server, mut client) = tls_ends();
    Arc::make_mut(&mut server.config).max_fragment_size = Some(48);
    Arc::make_mut(&mut client.config).max_fragment_size = Some(48);
    tls_pair((server, client));
}

/// A client that sends its handshake byte by byte does not get more time by that.
#[test]
fn bytes_of_a_handshake_do_not_extend_its_deadline() {
    let listener = listen_on(bind("127.0.0.1", 0).unwrap(), Some(tls_ends().0)).unwrap();
    let mut client = dial(&[listener.local_addr()], &Deadline::after(WATCHDOG)).unwrap().1.into_duplex();
    let server = listener.accept(&Deadline::after(WATCHDOG)).unwrap().unwrap().into_duplex();
    assert_eq!(client.try_write(&[22, 3, 1]).unwrap(), Some(3));
    assert!(server.wait(Interest::Read, &Deadline::after(WATCHDOG)).unwrap());
    assert!(!server.wait(Interest::Read, &Deadline::after(Duration::ZERO)).unwrap(), "the deadline has passed");
}

/// Large bodies are copied once more than without TLS at each end: the sender's copy is the encryption, whose output goes to the
/// socket from where it is; the receiver decrypts in place and copies to its reader.
#[test]
fn large_bodies_are_copied_once_at_each_end() {
    const BODY: usize = 1 << 20;
    let (server, client) = tls_ends();
    let (near, far) = socket_pair();
    let near = TlsTransport::client(near, &client).unwrap();
    let far = TlsTransport::server(far, &server).unwrap();
    let (sent, mut got) = (vec![7; BODY], vec![0; BODY]);
    let (mut at, mut read, mut most_pending) = (0, 0, 0);
    while read < BODY {
        if let Some(bytes) = near.try_write(&[IoSlice::new(&sent[at..])]).unwrap() {
            at += bytes;
        }
        if let Some(session) = near.session.get() {
            most_pending = most_pending.max(lock(&session.sealer).pending_bytes());
        }
        if let Some(bytes) = far.try_read(&mut got[read..]).unwrap() {
            read += bytes;
        }
    }
    assert!(got == sent);
    let copied = lock(&far.session.get().unwrap().opener).copied;
    assert!((BODY..BODY + BODY / 8).contains(&copied), "{copied} bytes copied for {BODY}");
    assert!(most_pending <= 4 * (16 << 10) + 512, "{most_pending} bytes wait for the socket");
}
