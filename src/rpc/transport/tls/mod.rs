//! TLS 1.3 over TCP, by rustls: both ends prove a key, and everything is encrypted.
//!
//! - `handshake` drives rustls until both ends have proved their keys.
//! - `records` seals and opens the records after it. The directions share no lock, so that a thread that sends and one that
//!   receives do not wait for each other; rustls' own connection is one object for both, and copies received data once more.
//! - `config` says what the ends prove and demand, and `certificate_fault` what is wrong with a certificate.
//!
//! The end of the stream without TLS's own closing message is taken for the end: messages have lengths, so a stream that was cut
//! ends within a message or where the peer could have ended it.

mod certificate_fault;
mod config;
mod handshake;
mod records;
#[cfg(test)]
mod tests;

pub(crate) use certificate_fault::CertificateFault;
pub(crate) use config::{AllowedPeers, ClientTls, Credentials, Proof, ServerTls, Verdict};
#[cfg(test)]
pub(crate) use records::copies;

use crate::poison::lock;
use std::fmt;
use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::Duration;

use rustls::{AlertDescription, CertificateError, Error};
use thiserror::Error as ErrorTrait;

use super::address::KeyName;
use super::tcp::TcpTransport;
use super::{Deadline, Interest, LendReceived, PeerAddr, Transport, TransportError};
use handshake::{Handshake, KeySchedule, Progress};
use records::{Opener, Received, Sealer};

/// Why a TLS connection cannot be used.
#[derive(Debug, ErrorTrait)]
pub(crate) enum TlsError {
    #[error(
        "the client does not use TLS, which this address demands: it needs a key (--key, --server-key), or `rpc-server connect`"
    )]
    PlainClient,
    #[error(
        "the server does not use TLS at this address: use its address with TLS, or connect without a key of the server"
    )]
    PlainServer,
    #[error(
        "the server closed the connection during the TLS handshake; it may not use TLS at this address (--listen \
         …=plain): its log has the reason"
    )]
    ClosedInHandshake,
    #[error("the client proves no key (--key), or no certificate (--cert)")]
    NoKey,
    #[error(transparent)]
    Certificate(CertificateFault),
    #[error("one end uses raw keys and the other one certificates (--cert, --ca)")]
    OtherProof,
    #[error("the client's key or certificate was revoked (--allow-keys)")]
    RevokedClient,
    #[error("{0}")]
    WrongKey(String),
    #[error(
        "the peer does not accept the key or certificate of this end: a server needs the public key, or cert: and the DNS \
         name, in --allow-keys; a client needs the server's public key in --server-key"
    )]
    KeyNotAllowed,
    #[error("the peer has revoked the key or certificate of this end")]
    KeyRevoked,
    #[error("the peer ended the connection: TLS alert {0:?}")]
    Alert(AlertDescription),
    #[error("a TLS record of {0} bytes, more than any may have")]
    LongRecord(usize),
    #[error("more bytes in a TLS handshake than any needs")]
    LongHandshake,
    #[error("a TLS record of type {0} that is not expected here")]
    UnexpectedRecord(u8),
    #[error("too many TLS records in a row without data")]
    NoData,
    #[error("bug in fanout: rustls is in a state that does not occur here")]
    UnexpectedState,
    #[error("bug in fanout: rustls has chosen a cipher that was not offered")]
    UnknownCipher,
    #[error("TLS: {0}")]
    Other(Error),
}

impl From<Error> for TlsError {
    fn from(e: Error) -> TlsError {
        match e {
            Error::AlertReceived(alert) => alert_error(alert),
            Error::NoCertificatesPresented => TlsError::NoKey,
            Error::InvalidCertificate(CertificateError::Revoked) => TlsError::RevokedClient,
            Error::InvalidCertificate(CertificateError::Other(wrong)) => TlsError::WrongKey(wrong.to_string()),
            Error::InvalidCertificate(e) => TlsError::Certificate(CertificateFault::found(e)),
            Error::PeerIncompatible(_) => TlsError::OtherProof,
            other => TlsError::Other(other),
        }
    }
}

/// The meaning of an alert of the peer.
fn alert_error(alert: AlertDescription) -> TlsError {
    match alert {
        AlertDescription::CertificateUnknown => TlsError::KeyNotAllowed,
        AlertDescription::CertificateRevoked => TlsError::KeyRevoked,
        AlertDescription::UnsupportedCertificate | AlertDescription::HandshakeFailure => TlsError::OtherProof,
        other => CertificateFault::reported(other).map_or(TlsError::Alert(other), TlsError::Certificate),
    }
}

/// A TLS connection.
pub(super) struct TlsTransport {
    socket: TcpTransport,
    /// The clients that a server accepts; `None` at a client.
    server: Option<ServerTls>,
    /// `None`: it is complete, or has failed.
    handshake: Mutex<Option<Handshake>>,
    session: OnceLock<TlsSession>,
    /// Whether bytes of the handshake have arrived.
    has_begun: AtomicBool,
    /// Whether the peer closed its connection before the handshake began.
    closed: AtomicBool,
    /// Whether a thread of this process has ended the connection: what has arrived is not opened any more.
    aborted: AtomicBool,
}

/// A connection after its handshake. A lock of `keys` is taken last.
struct TlsSession {
    sealer: Mutex<Sealer>,
    opener: Mutex<Opener>,
    keys: Mutex<KeySchedule>,
    /// Whether [`Opener`] has data or the end, for [`Transport::readable`].
    is_ready: AtomicBool,
    /// Whether the peer demands a key update, which the next write sends.
    owes_update: AtomicBool,
    /// The client's key, at a server.
    client: Option<KeyName>,
}

impl TlsTransport {
    pub(super) fn client(socket: TcpTransport, tls: &ClientTls) -> Result<TlsTransport, TlsError> {
        Ok(TlsTransport::new(socket, None, Handshake::client(tls)?))
    }

    pub(super) fn server(socket: TcpTransport, tls: &ServerTls) -> Result<TlsTransport, TlsError> {
        Ok(TlsTransport::new(socket, Some(tls.clone()), Handshake::server(tls)?))
    }

    fn new(socket: TcpTransport, server: Option<ServerTls>, handshake: Handshake) -> TlsTransport {
        let (handshake, session) = (Mutex::new(Some(handshake)), OnceLock::new());
        let [has_begun, closed, aborted] = [(); 3].map(|()| AtomicBool::new(false));
        TlsTransport { socket, server, handshake, session, has_begun, closed, aborted }
    }

    /// The session, after going on with the handshake as far as possible. `None`: it is not complete.
    fn session(&self) -> Result<Option<&TlsSession>, TransportError> {
        if let Some(session) = self.session.get() {
            return Ok(Some(session));
        }
        let mut handshake = lock(&self.handshake);
        let Some(attempt) = &mut *handshake else {
            // Another thread has completed it, or it has failed before.
            return self.session.get().map(Some).ok_or_else(TransportError::cut);
        };
        let progress = attempt.advance(&self.socket);
        self.has_begun.store(attempt.has_received(), Ordering::Relaxed);
        match progress {
            Ok(Progress::Blocked) => return Ok(None),
            Ok(Progress::Closed) => {
                self.closed.store(true, Ordering::Relaxed);
                return Ok(None);
            }
            Ok(Progress::Done) => {}
            Err(e) => {
                *handshake = None;
                return Err(e);
            }
        }
        let Some(done) = handshake.take() else { return Ok(None) };
        let done = done.finish()?;
        let client = match &self.server {
            None => None,
            Some(tls) => {
                let identity = done.peer.as_ref().and_then(|certificate| tls.identity_of(certificate));
                let identity = identity.ok_or(TlsError::UnexpectedState)?;
                Some(tls.name_of(&identity).ok_or_else(TransportError::cut)?)
            }
        };
        let session = self.session.get_or_init(|| TlsSession {
            sealer: Mutex::new(done.sealer),
            opener: Mutex::new(done.opener),
            keys: Mutex::new(done.keys),
            is_ready: AtomicBool::new(false),
            owes_update: AtomicBool::new(false),
            client,
        });
        // The thread that removes keys from the list ends the sessions that it sees. It has seen this one with its key, or the list has
        // changed before this.
        if let (Some(tls), Some(name)) = (&self.server, client)
            && tls.name_of(name.identity()) != Some(name)
        {
            self.abort();
            return Err(TransportError::cut());
        }
        Ok(Some(session))
    }

    /// What to wait for while the handshake is not complete.
    fn handshake_interest(&self) -> Interest {
        match &*lock(&self.handshake) {
            // Nothing is read before that.
            Some(handshake) if handshake.has_output() => Interest::Write,
            _ => Interest::Read,
        }
    }
}

impl TlsSession {
    /// Receives and opens records until there is data, the end, or nothing more.
    fn receive(&self, opener: &mut Opener, socket: &TcpTransport, wanted: usize) -> Result<(), TransportError> {
        loop {
            match opener.receive(socket, wanted) {
                Ok(Received::KeyUpdate(is_requested)) => {
                    opener.update(lock(&self.keys).next_receiving_key()?)?;
                    if is_requested {
                        self.owes_update.store(true, Ordering::Relaxed);
                    }
                }
                Ok(_) => {
                    self.is_ready.store(opener.is_ready(), Ordering::Relaxed);
                    return Ok(());
                }
                Err(e) => {
                    // The reader finds the error again, or the end.
                    self.is_ready.store(true, Ordering::Relaxed);
                    return Err(e);
                }
            }
        }
    }
}

impl TlsTransport {
    /// Reads by `take` if data or the end is available, and returns its result. `wanted`: how many bytes the reader would take.
    /// `take` runs under the lock of the receiving direction.
    fn read_by(&self, wanted: usize, take: impl FnOnce(&mut Opener) -> usize) -> Result<Option<usize>, TransportError> {
        if self.aborted.load(Ordering::Relaxed) {
            return Ok(Some(0));
        }
        let Some(session) = self.session()? else {
            return Ok(self.closed.load(Ordering::Relaxed).then_some(0));
        };
        let mut opener = lock(&session.opener);
        session.receive(&mut opener, &self.socket, wanted)?;
        if !opener.is_ready() {
            return Ok(None);
        }
        let read = take(&mut opener);
        session.is_ready.store(opener.is_ready() || opener.has_record(), Ordering::Relaxed);
        Ok(Some(read))
    }
}

impl LendReceived for TlsTransport {
    fn try_lend(&self, wanted: usize, sink: &mut dyn FnMut(&[u8]) -> usize) -> Result<Option<usize>, TransportError> {
        self.read_by(wanted, |opener| {
            let lent = opener.plain().len();
            if lent > 0 {
                let taken = sink(opener.plain());
                opener.consume(taken);
            }
            lent
        })
    }
}

impl Transport for TlsTransport {
    fn try_read(&self, dst: &mut [u8]) -> Result<Option<usize>, TransportError> {
        self.read_by(dst.len(), |opener| opener.read(dst))
    }

    fn lender(&self) -> Option<&dyn LendReceived> {
        Some(self)
    }

    fn try_handshake(&self) -> Result<bool, TransportError> {
        Ok(self.session()?.is_some() || self.closed.load(Ordering::Relaxed))
    }

    fn has_received(&self) -> bool {
        self.has_begun.load(Ordering::Relaxed) || self.socket.has_received()
    }

    fn try_write(&self, src: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError> {
        if self.aborted.load(Ordering::Relaxed) {
            return Err(TransportError::cut());
        }
        let Some(session) = self.session()? else { return Ok(None) };
        let mut sealer = lock(&session.sealer);
        if sealer.needs_update() || session.owes_update.swap(false, Ordering::Relaxed) {
            sealer.update(lock(&session.keys).next_sending_key()?)?;
        }
        sealer.write(&self.socket, src)
    }

    fn try_flush(&self) -> Result<bool, TransportError> {
        match self.session()? {
            Some(session) => lock(&session.sealer).flush(&self.socket),
            None => Ok(true),
        }
    }

    fn wait(&self, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
        let Some(session) = self.session.get() else {
            // The socket's wait returns true after the deadline if there are bytes: a peer that sends a byte of its handshake now
            // and then would pass the deadline.
            if deadline.remaining().is_none() {
                return Ok(false);
            }
            return self.socket.wait(self.handshake_interest(), deadline);
        };
        if interest != Interest::Write && session.is_ready.load(Ordering::Relaxed) {
            return Ok(true);
        }
        self.socket.wait(interest, deadline)
    }

    fn readable(&self) -> bool {
        let Some(session) = self.session.get() else { return self.socket.readable() };
        if session.is_ready.load(Ordering::Relaxed) {
            return true;
        }
        // Only the reader takes this lock, which is also the one that asks.
        if (self.socket.readable() || self.aborted.load(Ordering::Relaxed))
            && let Ok(mut opener) = session.opener.try_lock()
        {
            return session.receive(&mut opener, &self.socket, 0).is_err() || opener.is_ready();
        }
        false
    }

    fn hung_up(&self) -> bool {
        self.socket.hung_up()
    }

    fn set_loss_timeout(&self, timeout: Duration) {
        self.socket.set_loss_timeout(timeout);
    }

    fn try_finish(&self) -> Result<bool, TransportError> {
        let done = match self.session()? {
            Some(session) => lock(&session.sealer).finish(&self.socket)?,
            // The peer learns of the end as of a connection that is closed within its handshake.
            None => true,
        };
        if done { self.socket.try_finish() } else { Ok(false) }
    }

    fn abort(&self) {
        self.aborted.store(true, Ordering::Relaxed);
        self.socket.abort();
    }

    fn peer(&self) -> PeerAddr {
        let peer = self.socket.peer();
        match (peer, self.session.get().and_then(|session| session.client)) {
            (PeerAddr::Ip(addr), Some(name)) => PeerAddr::Key(addr, name),
            _ => peer,
        }
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.socket.local_addr()
    }
}

impl fmt::Debug for TlsTransport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsTransport").field("socket", &self.socket).finish_non_exhaustive()
    }
}
