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

/// Records that no handshake begins with are answered by one alert, if the server answers, and end the connection.
#[test]
fn wrong_records_end_a_handshake() {
    for bytes in [&[22, 3, 1, 0, 0][..], &[22, 2, 1, 0, 1, 0xff], &[21, 3, 3, 0, 0], &[22, 3, 1, 0, 4, 9, 9, 9, 9]] {
        let (near, far) = socket_pair();
        let far = TlsTransport::server(far, &tls_ends().0).unwrap();
        assert_eq!(near.try_write(&[IoSlice::new(bytes)]).unwrap(), Some(bytes.len()));
        near.try_finish().unwrap();
        let failed = std::iter::repeat_with(|| far.try_read(&mut [0])).find(|read| !matches!(read, Ok(None)));
        assert!(matches!(failed, Some(Err(_))), "{bytes:?}: {failed:?}");
    }
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
    let (mut at, mut read, mut sealed, mut opened) = (0, 0, 0, 0);
    let counted = |work: &mut dyn FnMut()| {
        let before = copies::counted();
        work();
        copies::counted() - before
    };
    while read < BODY {
        sealed += counted(&mut || at += near.try_write(&[IoSlice::new(&sent[at..])]).unwrap().unwrap_or(0));
        opened += counted(&mut || read += far.try_read(&mut got[read..]).unwrap().unwrap_or(0));
    }
    assert!(got == sent);
    assert_eq!(sealed, BODY);
    // The front of a record moves if the rest has not arrived.
    assert!((BODY..BODY + BODY / 8).contains(&opened), "{opened} bytes copied for {BODY}");
}
