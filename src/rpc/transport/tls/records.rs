//! TLS 1.3 records after the handshake (RFC 8446, section 5): the two directions of a connection, which two threads use without
//! sharing a lock. The ciphers, their nonces and the padding are rustls'; this file splits the stream into records,
//! counts them and follows key updates.
//!
//! rustls' own (unbuffered) connections would do all of this behind one lock of both directions. A version on them was 192 lines
//! longer, because buffers, splitting and alerts stay outside of rustls, and copied each byte once more per direction. It had 0.97 of the
//! rate of uploads and 0.89 of that of downloads (`cargo bench --bench tls -- rates`, medians of 5 paired rounds on 2 busy cores).

use std::collections::VecDeque;
use std::io::IoSlice;
use std::ops::Range;

use rustls::crypto::cipher::{
    InboundOpaqueMessage, MessageDecrypter, MessageEncrypter, OutboundChunks, OutboundPlainMessage,
};
use rustls::{AlertDescription, ConnectionTrafficSecrets, ContentType, ProtocolVersion, Tls13CipherSuite};

use super::super::tcp::TcpTransport;
use super::super::{Transport, TransportError};
use super::{TlsError, alert_error};

/// Length of the header of a record: its type, version and length.
pub(super) const HEADER: usize = 5;

/// Longest plaintext of a record.
const MAX_PLAINTEXT: usize = 1 << 14;

/// Longest body of a record: plaintext, padding, type and tag.
const MAX_BODY: usize = MAX_PLAINTEXT + 256;

/// Records that one write seals: enough for large messages, and a bound on what waits for the socket.
const RECORDS_PER_WRITE: usize = 4;

/// Waiting records in one gathered write: the records of a write of data, a key update before them, and bytes of the handshake.
const MAX_GATHERED: usize = RECORDS_PER_WRITE + 2;

/// Parts of a message in one record.
const MAX_PARTS: usize = 8;

/// Input buffer of a connection that is idle or has small messages.
const SMALL_INPUT: usize = 4 << 10;

/// Input buffer of a connection that receives large bodies: some records per system call.
const LARGE_INPUT: usize = 4 * (HEADER + MAX_BODY);

/// Records without data (alerts that do not end the connection, key updates, empty ones) that a peer may send in a row.
const MAX_RECORDS_WITHOUT_DATA: u32 = 32;

/// Records under one key, below the limit of AES-GCM of 2^24 full records (RFC 8446, section 5.5).
const RECORDS_PER_KEY: u64 = 1 << 22;

/// Type and body of a KeyUpdate (RFC 8446, section 4.6.3) that requests none in return.
const KEY_UPDATE: [u8; 5] = [HandshakeMessage::KEY_UPDATE, 0, 0, 1, 0];

/// The body of an alert that ends the sending direction.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// Types of handshake messages that follow a handshake.
struct HandshakeMessage;

impl HandshakeMessage {
    const NEW_SESSION_TICKET: u8 = 4;
    const KEY_UPDATE: u8 = 24;
}

/// The cipher of a connection.
type Suite = &'static Tls13CipherSuite;

/// The key and the initialisation vector of a direction.
fn key_and_iv(
    secrets: ConnectionTrafficSecrets,
) -> Result<(rustls::crypto::cipher::AeadKey, rustls::crypto::cipher::Iv), TlsError> {
    match secrets {
        ConnectionTrafficSecrets::Aes128Gcm { key, iv }
        | ConnectionTrafficSecrets::Aes256Gcm { key, iv }
        | ConnectionTrafficSecrets::Chacha20Poly1305 { key, iv } => Ok((key, iv)),
        _ => Err(TlsError::UnknownCipher),
    }
}

/// Length of the record at the front of `bytes`, with its header, if the header is complete.
///
/// # Errors
/// The record is longer than any may be.
pub(super) fn record_len(bytes: &[u8]) -> Result<Option<usize>, TlsError> {
    let Some(&[_, _, _, high, low]) = bytes.first_chunk::<HEADER>() else { return Ok(None) };
    let body = usize::from(u16::from_be_bytes([high, low]));
    if body > MAX_BODY { Err(TlsError::LongRecord(body)) } else { Ok(Some(HEADER + body)) }
}

/// The sending direction.
pub(super) struct Sealer {
    suite: Suite,
    encrypter: Box<dyn MessageEncrypter>,
    next_record: u64,
    /// Sealed records that the socket has not accepted, each as rustls has written it: a gathered write sends them without
    /// copying them into one buffer.
    pending: VecDeque<Vec<u8>>,
    /// How many bytes of the first of them the socket has accepted.
    sent: usize,
    finished: bool,
}

impl Sealer {
    pub(super) fn new(suite: Suite, (next_record, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, TlsError> {
        let (key, iv) = key_and_iv(secrets)?;
        let encrypter = suite.aead_alg.encrypter(key, iv);
        Ok(Sealer { suite, encrypter, next_record, pending: VecDeque::new(), sent: 0, finished: false })
    }

    /// Appends bytes of the handshake that the socket has not accepted.
    pub(super) fn with_pending(mut self, bytes: &[u8]) -> Self {
        self.push(bytes.to_vec());
        self
    }

    /// Whether the key should be replaced before the next record of data.
    pub(super) fn needs_update(&self) -> bool {
        self.next_record >= RECORDS_PER_KEY
    }

    /// Sends a KeyUpdate, and uses the next key from then on.
    pub(super) fn update(&mut self, (next_record, secrets): (u64, ConnectionTrafficSecrets)) -> Result<(), TlsError> {
        self.seal(ContentType::Handshake, &[&KEY_UPDATE])?;
        let (key, iv) = key_and_iv(secrets)?;
        self.encrypter = self.suite.aead_alg.encrypter(key, iv);
        self.next_record = next_record;
        Ok(())
    }

    /// Seals bytes from the front of `src` and sends them as far as there is room. Returns how many it has taken; `None`: earlier
    /// ones still wait for room.
    pub(super) fn write(
        &mut self,
        socket: &TcpTransport,
        src: &[IoSlice<'_>],
    ) -> Result<Option<usize>, TransportError> {
        if self.finished {
            return Err(TransportError::cut());
        }
        if !self.flush(socket)? {
            return Ok(None);
        }
        let mut rest = Parts { parts: src, offset: 0 };
        let mut taken = 0;
        for _ in 0..RECORDS_PER_WRITE {
            let mut parts = [&[][..]; MAX_PARTS];
            let (count, bytes) = rest.take(&mut parts);
            if bytes == 0 {
                break;
            }
            self.seal(ContentType::ApplicationData, &parts[..count])?;
            taken += bytes;
        }
        self.flush(socket)?;
        Ok(Some(taken))
    }

    /// Sends what waits for room. `false`: there is no room for all of it.
    pub(super) fn flush(&mut self, socket: &TcpTransport) -> Result<bool, TransportError> {
        while let Some(first) = self.pending.front() {
            let mut parts = [IoSlice::new(&[]); MAX_GATHERED];
            for (part, record) in parts.iter_mut().zip(&self.pending) {
                *part = IoSlice::new(record);
            }
            parts[0] = IoSlice::new(first.get(self.sent..).unwrap_or_default());
            let count = self.pending.len().min(parts.len());
            match socket.try_write(&parts[..count])? {
                Some(bytes) => self.advance(bytes),
                None => return Ok(false),
            }
        }
        Ok(true)
    }

    /// Drops records after the socket has accepted `bytes` more of them: an idle connection holds none.
    fn advance(&mut self, bytes: usize) {
        self.sent += bytes;
        while let Some(first) = self.pending.front()
            && self.sent >= first.len()
        {
            self.sent -= first.len();
            self.pending.pop_front();
        }
    }

    fn push(&mut self, record: Vec<u8>) {
        // A write of only empty parts would look like the end of the connection.
        if !record.is_empty() {
            self.pending.push_back(record);
        }
    }

    /// Sends the alert that ends this direction. `false`: there is no room for all of it.
    pub(super) fn finish(&mut self, socket: &TcpTransport) -> Result<bool, TransportError> {
        if !std::mem::replace(&mut self.finished, true) {
            self.seal(ContentType::Alert, &[&CLOSE_NOTIFY])?;
        }
        self.flush(socket)
    }

    fn seal(&mut self, typ: ContentType, parts: &[&[u8]]) -> Result<(), TlsError> {
        let plain =
            OutboundPlainMessage { typ, version: ProtocolVersion::TLSv1_3, payload: OutboundChunks::new(parts) };
        copies::count(parts.iter().map(|part| part.len()).sum());
        let record = self.encrypter.encrypt(plain, self.next_record)?.encode();
        self.next_record += 1;
        self.push(record);
        Ok(())
    }
}

/// Bytes of a gathered write that are not yet taken.
struct Parts<'a, 'b> {
    parts: &'a [IoSlice<'b>],
    /// Taken bytes of the first part.
    offset: usize,
}

impl<'a> Parts<'a, '_> {
    /// Takes the bytes of the next record, as slices in `into`. Returns the number of the slices and of the bytes.
    fn take(&mut self, into: &mut [&'a [u8]; MAX_PARTS]) -> (usize, usize) {
        let (mut count, mut bytes) = (0, 0);
        while let Some(part) = self.parts.first()
            && count < into.len()
            && bytes < MAX_PLAINTEXT
        {
            let rest = part.get(self.offset..).unwrap_or_default();
            let (taken, left) = rest.split_at(rest.len().min(MAX_PLAINTEXT - bytes));
            if !taken.is_empty() {
                into[count] = taken;
                count += 1;
                bytes += taken.len();
            }
            if left.is_empty() {
                self.parts = &self.parts[1..];
                self.offset = 0;
            } else {
                self.offset += taken.len();
            }
        }
        (count, bytes)
    }
}

/// The receiving direction.
pub(super) struct Opener {
    suite: Suite,
    decrypter: Box<dyn MessageDecrypter>,
    next_record: u64,
    input: Vec<u8>,
    /// Received bytes in `input` that are not yet opened.
    sealed: Range<usize>,
    /// Opened bytes in `input` that are not yet read.
    plain: Range<usize>,
    without_data: u32,
    ended: bool,
    /// A record could not be opened: nothing after it is.
    failed: bool,
}

/// The next item that a connection has for its reader.
pub(super) enum Received {
    /// Data, or the end of the stream.
    Ready,
    /// A KeyUpdate: the next records have the next key. `true`: the peer requests one in return.
    KeyUpdate(bool),
    /// Nothing.
    Nothing,
}

impl Opener {
    pub(super) fn new(suite: Suite, (next_record, secrets): (u64, ConnectionTrafficSecrets)) -> Result<Self, TlsError> {
        let (key, iv) = key_and_iv(secrets)?;
        let (decrypter, input) = (suite.aead_alg.decrypter(key, iv), Vec::new());
        Ok(Opener {
            suite,
            decrypter,
            next_record,
            input,
            sealed: 0..0,
            plain: 0..0,
            without_data: 0,
            ended: false,
            failed: false,
        })
    }

    /// Uses the next key.
    pub(super) fn update(&mut self, (next_record, secrets): (u64, ConnectionTrafficSecrets)) -> Result<(), TlsError> {
        let (key, iv) = key_and_iv(secrets)?;
        self.decrypter = self.suite.aead_alg.decrypter(key, iv);
        self.next_record = next_record;
        Ok(())
    }

    /// Whether [`Opener::plain`] has data, or the end is reached, without the socket.
    pub(super) fn is_ready(&self) -> bool {
        !self.plain.is_empty() || self.ended
    }

    /// Whether the next record is complete.
    pub(super) fn has_record(&self) -> bool {
        matches!(record_len(self.sealed_bytes()), Ok(Some(len)) if len <= self.sealed.len())
    }

    /// Opened bytes that are not yet read; none at the end of the stream.
    pub(super) fn plain(&self) -> &[u8] {
        self.input.get(self.plain.clone()).unwrap_or_default()
    }

    /// Marks bytes from the front of [`Opener::plain`] as read.
    pub(super) fn consume(&mut self, bytes: usize) {
        self.plain.start += bytes.min(self.plain.len());
    }

    /// Reads opened bytes into `dst`; 0 at the end of the stream, or if there are none.
    pub(super) fn read(&mut self, dst: &mut [u8]) -> usize {
        let plain = self.plain();
        let bytes = dst.len().min(plain.len());
        if let (Some(dst), Some(src)) = (dst.get_mut(..bytes), plain.get(..bytes)) {
            copies::count(bytes);
            dst.copy_from_slice(src);
        }
        self.consume(bytes);
        bytes
    }

    /// Receives and opens records until there is data or nothing more. `wanted`: how many bytes the reader would take.
    pub(super) fn receive(&mut self, socket: &TcpTransport, wanted: usize) -> Result<Received, TransportError> {
        loop {
            if self.is_ready() {
                return Ok(Received::Ready);
            }
            if self.failed {
                return Err(TransportError::cut());
            }
            match self.open_next().inspect_err(|_| self.failed = true)? {
                Some(Received::Nothing) => {}
                Some(received) => return Ok(received),
                None if !self.fill(socket, wanted)? => return Ok(Received::Nothing),
                None => {}
            }
        }
    }

    /// Receives further encrypted bytes, and keeps them after the bytes that are not decrypted yet. `false`: none are available.
    fn fill(&mut self, socket: &TcpTransport, wanted: usize) -> Result<bool, TransportError> {
        let needed = record_len(self.sealed_bytes())?.unwrap_or(HEADER);
        if self.sealed.start > 0 {
            copies::count(self.sealed.len());
            self.input.copy_within(self.sealed.clone(), 0);
        }
        self.sealed = 0..self.sealed.len();
        self.plain = 0..0;
        let space = needed.max(if wanted > SMALL_INPUT { LARGE_INPUT } else { SMALL_INPUT });
        if self.input.len() < space {
            self.input.resize(space, 0);
        }
        match socket.try_read(self.input.get_mut(self.sealed.end..).unwrap_or_default())? {
            Some(0) => self.ended = true,
            Some(bytes) => self.sealed.end += bytes,
            None => {
                if self.sealed.is_empty() && self.input.len() > SMALL_INPUT {
                    self.input = Vec::new();
                }
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn sealed_bytes(&self) -> &[u8] {
        self.input.get(self.sealed.clone()).unwrap_or_default()
    }

    /// Opens the next record. `None`: it is not complete.
    fn open_next(&mut self) -> Result<Option<Received>, TlsError> {
        let Some(len) = record_len(self.sealed_bytes())?.filter(|&len| len <= self.sealed.len()) else {
            return Ok(None);
        };
        let start = self.sealed.start;
        self.sealed.start += len;
        let (header, body) =
            self.input.get_mut(start..start + len).and_then(|record| record.split_first_chunk_mut::<HEADER>()).unzip();
        let (Some(header), Some(body)) = (header, body) else { return Ok(None) };
        if header[0] != u8::from(ContentType::ApplicationData) {
            return Err(TlsError::UnexpectedRecord(header[0]));
        }
        let sealed = InboundOpaqueMessage::new(ContentType::ApplicationData, ProtocolVersion::TLSv1_2, body);
        let opened = self.decrypter.decrypt(sealed, self.next_record)?;
        let (typ, bytes) = (opened.typ, opened.payload.len());
        self.next_record += 1;
        let plain = start + HEADER..start + HEADER + bytes;
        if typ == ContentType::ApplicationData && bytes > 0 {
            self.without_data = 0;
            self.plain = plain;
            return Ok(Some(Received::Ready));
        }
        self.without_data += 1;
        if self.without_data > MAX_RECORDS_WITHOUT_DATA {
            return Err(TlsError::NoData);
        }
        let message = self.input.get(plain).unwrap_or_default();
        match (typ, message) {
            (ContentType::ApplicationData, _) => Ok(Some(Received::Nothing)),
            (ContentType::Alert, &[_, description]) => match AlertDescription::from(description) {
                AlertDescription::CloseNotify => {
                    self.ended = true;
                    Ok(Some(Received::Ready))
                }
                AlertDescription::UserCanceled => Ok(Some(Received::Nothing)),
                alert => Err(alert_error(alert)),
            },
            (ContentType::Handshake, &[HandshakeMessage::KEY_UPDATE, 0, 0, 1, requested @ (0 | 1)]) => {
                Ok(Some(Received::KeyUpdate(requested == 1)))
            }
            // Sessions are not resumed.
            (ContentType::Handshake, &[HandshakeMessage::NEW_SESSION_TICKET, ..]) => Ok(Some(Received::Nothing)),
            _ => Err(TlsError::UnexpectedRecord(typ.into())),
        }
    }
}

/// Counts the bytes that this thread copies in user space, for tests: sealing copies each byte once, into the record that it
/// encrypts; opening decrypts in place, and moves a part of a record to the front of the input before the rest arrives.
pub(crate) mod copies {
    #[cfg(test)]
    thread_local! {
        static BYTES: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
    }

    #[cfg(test)]
    pub(super) fn count(bytes: usize) {
        BYTES.set(BYTES.get() + bytes);
    }

    #[cfg(not(test))]
    pub(super) fn count(_: usize) {}

    /// The bytes that this thread has copied so far.
    #[cfg(test)]
    pub(crate) fn counted() -> usize {
        BYTES.get()
    }
}
