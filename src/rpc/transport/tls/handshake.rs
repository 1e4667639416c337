//! The TLS handshake: drives rustls over a non-blocking socket, record by record, until both ends have proved their keys.

use std::io::IoSlice;
use std::sync::Arc;

use rustls::client::{ClientConnectionData, UnbufferedClientConnection};
use rustls::kernel::KernelConnection;
use rustls::pki_types::CertificateDer;
use rustls::server::{ServerConnectionData, UnbufferedServerConnection};
use rustls::unbuffered::{ConnectionState, EncodeError, InsufficientSizeError, UnbufferedStatus};
use rustls::{ConnectionTrafficSecrets, ContentType, ExtractedSecrets};

use super::super::tcp::TcpTransport;
use super::super::{Transport, TransportError};
use super::records::{HEADER, Opener, Sealer, record_len};
use super::{ClientTls, ServerTls, TlsError};

/// Most bytes that a peer may send in its handshake: far more than keys and chains of certificates need.
const MAX_HANDSHAKE: usize = 32 << 10;

/// A handshake that is not complete.
pub(super) struct Handshake {
    end: End,
    /// Received records that rustls has not taken, and the front of the next one.
    received: Vec<u8>,
    /// Length of the complete ones. They are not parsed again, because rustls joins messages in this buffer.
    complete: usize,
    /// Bytes received so far.
    total: usize,
    /// Bytes to send; the socket has accepted `sent` of them.
    outgoing: Vec<u8>,
    sent: usize,
    /// The error that ends the handshake, once its alert is sent.
    error: Option<TlsError>,
}

enum End {
    Client(UnbufferedClientConnection),
    Server(UnbufferedServerConnection),
}

impl End {
    /// Whether rustls has bytes to send.
    fn has_output(&self) -> bool {
        match self {
            End::Client(connection) => connection.wants_write(),
            End::Server(connection) => connection.wants_write(),
        }
    }
}

/// The state of the handshake after an attempt to go on with it.
pub(super) enum Progress {
    /// The peer has to send something, or there is no room for what this end has to send.
    Blocked,
    /// The peer has closed its connection before it sent anything.
    Closed,
    Done,
}

/// The rest of rustls' connection, which derives the keys of key updates.
pub(super) enum KeySchedule {
    Client(KernelConnection<ClientConnectionData>),
    Server(KernelConnection<ServerConnectionData>),
}

impl KeySchedule {
    pub(super) fn next_sending_key(&mut self) -> Result<(u64, ConnectionTrafficSecrets), TlsError> {
        Ok(match self {
            KeySchedule::Client(connection) => connection.update_tx_secret()?,
            KeySchedule::Server(connection) => connection.update_tx_secret()?,
        })
    }

    pub(super) fn next_receiving_key(&mut self) -> Result<(u64, ConnectionTrafficSecrets), TlsError> {
        Ok(match self {
            KeySchedule::Client(connection) => connection.update_rx_secret()?,
            KeySchedule::Server(connection) => connection.update_rx_secret()?,
        })
    }
}

/// The result of a handshake.
pub(super) struct Finished {
    pub(super) sealer: Sealer,
    pub(super) opener: Opener,
    pub(super) keys: KeySchedule,
    /// The certificate of the peer, or its raw public key.
    pub(super) peer: Option<CertificateDer<'static>>,
}

/// The result of one step.
enum HandshakeStep {
    Advanced,
    NeedsInput,
    Done,
}

impl Handshake {
    pub(super) fn client(tls: &ClientTls) -> Result<Handshake, TlsError> {
        let connection = UnbufferedClientConnection::new(Arc::clone(&tls.config), tls.server_name.clone())?;
        Ok(Handshake::new(End::Client(connection)))
    }

    pub(super) fn server(tls: &ServerTls) -> Result<Handshake, TlsError> {
        Ok(Handshake::new(End::Server(UnbufferedServerConnection::new(Arc::clone(&tls.config))?)))
    }

    fn new(end: End) -> Handshake {
        Handshake { end, received: Vec::new(), complete: 0, total: 0, outgoing: Vec::new(), sent: 0, error: None }
    }

    fn is_server(&self) -> bool {
        matches!(self.end, End::Server(_))
    }

    /// Whether the peer has sent anything.
    pub(super) fn has_received(&self) -> bool {
        self.total > 0
    }

    /// Whether bytes wait for room.
    pub(super) fn has_output(&self) -> bool {
        self.sent < self.outgoing.len()
    }

    /// Goes on as far as the socket allows.
    pub(super) fn advance(&mut self, socket: &TcpTransport) -> Result<Progress, TransportError> {
        loop {
            if !self.send(socket)? {
                return Ok(Progress::Blocked);
            }
            if let Some(error) = self.error.take() {
                return Err(error.into());
            }
            match self.step() {
                Ok(HandshakeStep::Advanced) => {}
                Ok(HandshakeStep::Done) => return Ok(Progress::Done),
                Ok(HandshakeStep::NeedsInput) => {
                    // Reads stop at the end of the record: another thread may wait in the socket for the bytes after the handshake.
                    let (end, needed) = (self.received.len(), self.complete + self.next_record()?.unwrap_or(HEADER));
                    self.received.resize(needed, 0);
                    let read = socket.try_read(&mut self.received[end..]);
                    self.received.truncate(end + read.as_ref().ok().copied().flatten().unwrap_or(0));
                    match read? {
                        Some(0) if self.total == 0 && self.is_server() => return Ok(Progress::Closed),
                        Some(0) if self.is_server() => return Err(TransportError::Closed),
                        Some(0) => return Err(TlsError::ClosedInHandshake.into()),
                        Some(bytes) => self.count(bytes)?,
                        None => return Ok(Progress::Blocked),
                    }
                }
                Err(error) => {
                    // rustls has an alert for the peer, which is sent first. Not a step more: it would parse the wrong record
                    // again, which rustls asserts not to happen.
                    while self.end.has_output() && matches!(self.step(), Ok(HandshakeStep::Advanced)) {}
                    self.error = Some(error);
                }
            }
        }
    }

    fn count(&mut self, bytes: usize) -> Result<(), TlsError> {
        let is_first = self.total == 0;
        self.total += bytes;
        let first = self.received.first().copied().unwrap_or_default();
        if is_first && first != u8::from(ContentType::Handshake) && first != u8::from(ContentType::Alert) {
            return Err(if self.is_server() { TlsError::PlainClient } else { TlsError::PlainServer });
        }
        if self.total > MAX_HANDSHAKE { Err(TlsError::LongHandshake) } else { Ok(()) }
    }

    /// Sends what there is to send. `false`: there is no room for all of it.
    fn send(&mut self, socket: &TcpTransport) -> Result<bool, TransportError> {
        while self.has_output() {
            match socket.try_write(&[IoSlice::new(&self.outgoing[self.sent..])])? {
                Some(sent) => self.sent += sent,
                None => return Ok(false),
            }
        }
        self.outgoing.clear();
        self.sent = 0;
        Ok(true)
    }

    /// Length of the record after the complete ones, if its header has arrived.
    fn next_record(&self) -> Result<Option<usize>, TlsError> {
        record_len(self.received.get(self.complete..).unwrap_or_default())
    }

    /// One step of rustls, with the complete records. Several wait if a handshake message spans them: rustls takes none of them
    /// before the last.
    fn step(&mut self) -> Result<HandshakeStep, TlsError> {
        while let Some(len) = self.next_record()?.filter(|&len| self.complete + len <= self.received.len()) {
            self.complete += len;
        }
        let Handshake { end, received, complete, outgoing, .. } = self;
        let records = &mut received[..*complete];
        let (discard, step, is_complete) = match end {
            End::Client(connection) => {
                let (discard, step) = apply(connection.process_tls_records(records), outgoing);
                (discard, step, !connection.is_handshaking())
            }
            End::Server(connection) => {
                let (discard, step) = apply(connection.process_tls_records(records), outgoing);
                (discard, step, !connection.is_handshaking())
            }
        };
        let discard = discard.min(*complete);
        received.drain(..discard);
        *complete -= discard;
        // A server may send before the client has proved its key; this one does not.
        let step = step.map(|step| {
            if matches!(step, HandshakeStep::Done) && !is_complete { HandshakeStep::NeedsInput } else { step }
        })?;
        // A record that rustls has taken is progress, also if it is only a part of a message.
        Ok(if matches!(step, HandshakeStep::NeedsInput) && discard > 0 { HandshakeStep::Advanced } else { step })
    }

    /// The two directions, after a handshake that is [`Progress::Done`].
    pub(super) fn finish(self) -> Result<Finished, TlsError> {
        let first = |chain: Option<&[CertificateDer<'_>]>| {
            chain.and_then(|chain| chain.first()).map(|cert| cert.clone().into_owned())
        };
        let (peer, secrets, keys, suite) = match self.end {
            End::Client(connection) => {
                let peer = first(connection.peer_certificates());
                let (secrets, kernel) = connection.dangerous_into_kernel_connection()?;
                let suite = kernel.negotiated_cipher_suite();
                (peer, secrets, KeySchedule::Client(kernel), suite)
            }
            End::Server(connection) => {
                let peer = first(connection.peer_certificates());
                let (secrets, kernel) = connection.dangerous_into_kernel_connection()?;
                let suite = kernel.negotiated_cipher_suite();
                (peer, secrets, KeySchedule::Server(kernel), suite)
            }
        };
        let suite = suite.tls13().ok_or(TlsError::UnknownCipher)?;
        let ExtractedSecrets { tx, rx } = secrets;
        let sealer = Sealer::new(suite, tx)?.with_pending(&self.outgoing[self.sent..]);
        Ok(Finished { sealer, opener: Opener::new(suite, rx)?, keys, peer })
    }
}

/// Does what rustls asks for. Returns how many bytes of its input it has taken.
fn apply<Data>(
    status: UnbufferedStatus<'_, '_, Data>,
    outgoing: &mut Vec<u8>,
) -> (usize, Result<HandshakeStep, TlsError>) {
    let UnbufferedStatus { discard, state } = status;
    let step = match state {
        Err(e) => Err(e.into()),
        Ok(ConnectionState::EncodeTlsData(mut data)) => {
            let at = outgoing.len();
            let needed = match data.encode(&mut []) {
                Err(EncodeError::InsufficientSize(InsufficientSizeError { required_size })) => required_size,
                _ => 0,
            };
            outgoing.resize(at + needed, 0);
            match data.encode(&mut outgoing[at..]) {
                Ok(_) => Ok(HandshakeStep::Advanced),
                Err(_) => Err(TlsError::UnexpectedState),
            }
        }
        Ok(ConnectionState::TransmitTlsData(data)) => {
            // They are sent before anything else.
            data.done();
            Ok(HandshakeStep::Advanced)
        }
        Ok(ConnectionState::BlockedHandshake) => Ok(HandshakeStep::NeedsInput),
        Ok(ConnectionState::WriteTraffic(_)) => Ok(HandshakeStep::Done),
        Ok(ConnectionState::PeerClosed | ConnectionState::Closed) => Err(TlsError::ClosedInHandshake),
        Ok(_) => Err(TlsError::UnexpectedState),
    };
    (discard, step)
}
