//! Full-duplex exchange: sends and receives at the same time, in one thread.
//!
//! Neither direction waits for the other: the peer may send all of its bytes before it reads any (llama.cpp's rank 0 does), or
//! read all before it sends any. An exchange that finished one chunk in both directions before the next would deadlock with
//! such a peer once the buffers of the connection are full.

use std::time::Duration;

use thiserror::Error;

use super::WATCH_INTERVAL;
use crate::device::AdaptiveSpin;
use crate::device::TRANSFER_CHUNK_BYTES;
use crate::rpc::transport::{Deadline, Duplex, Interest, TransportError};

/// Why an exchange with the peer failed. The connection is then useless: how many bytes were transferred is unknown.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum ExchangeError {
    #[error(transparent)]
    Transport(#[from] TransportError),
    #[error("the client has closed its connection meanwhile")]
    ClientHungUp,
    #[error(
        "it is no server of collectives over plain TCP: its capabilities are not zero (a llama.cpp server with RDMA needs \
         GGML_RPC_NO_RDMA=1)"
    )]
    NotPlainTcp,
}

/// The two sides of an exchange on this server: where sent bytes come from, and where received bytes go.
pub(super) trait Payload {
    type Error: From<ExchangeError>;

    /// The next bytes to send, never empty. `None` after the last.
    fn next_outgoing(&mut self) -> Result<Option<Vec<u8>>, Self::Error>;

    /// Takes the next received bytes, in order: [`TRANSFER_CHUNK_BYTES`] of them, or fewer at the end.
    fn receive(&mut self, bytes: &[u8]) -> Result<(), Self::Error>;
}

/// Limits of an exchange.
pub(super) struct ExchangeLimits<'a> {
    /// Maximum time without a byte in either direction, from the peer's first byte on: until then its device may still be busy
    /// with the work that produces the bytes.
    pub(super) stall: Duration,
    /// Limit of the whole exchange: a peer that sends nothing, or single bytes, must not extend it without end.
    pub(super) deadline: Deadline,
    /// Whether the client that requested the exchange has closed its connection, which ends the exchange.
    pub(super) hung_up: &'a dyn Fn() -> bool,
}

/// Sends all bytes of `payload` and receives `incoming` bytes.
///
/// # Errors
/// [`ExchangeError`], and the errors of `payload`.
pub(super) fn exchange<P: Payload>(
    link: &mut Duplex,
    spin: &AdaptiveSpin,
    incoming: u64,
    payload: &mut P,
    limits: &ExchangeLimits<'_>,
) -> Result<(), P::Error> {
    let transport = |e: TransportError| P::Error::from(e.into());
    let mut chunk = vec![0; incoming.min(TRANSFER_CHUNK_BYTES) as usize];
    let (mut missing, mut filled) = (incoming, 0);
    let (mut outgoing, mut sent, mut flushed) = (payload.next_outgoing()?, 0, false);
    let mut stall = None;
    loop {
        let mut progress = false;
        if let Some(bytes) = &outgoing {
            if let Some(n) = link.try_write(&bytes[sent..]).map_err(transport)? {
                sent += n;
                progress = true;
                if sent == bytes.len() {
                    (outgoing, sent) = (payload.next_outgoing()?, 0);
                }
            }
        } else if !flushed {
            flushed = link.try_flush().map_err(transport)?;
            progress |= flushed;
        }
        if missing > 0 {
            let until = missing.min(TRANSFER_CHUNK_BYTES) as usize;
            if let Some(n) = link.try_read(&mut chunk[filled..until]).map_err(transport)? {
                filled += n;
                progress = true;
                stall = Some(Deadline::after(limits.stall));
                if filled == until {
                    payload.receive(&chunk[..until])?;
                    (missing, filled) = (missing - until as u64, 0);
                }
            }
        }
        if flushed && missing == 0 {
            return Ok(());
        }
        if progress {
            // Renewed before it is checked: the payload may have waited for the device longer than the limit.
            stall = stall.map(|_| Deadline::after(limits.stall));
        }
        let until = stall.filter(|stall| stall.remaining() < limits.deadline.remaining()).unwrap_or(limits.deadline);
        let Some(left) = until.remaining() else {
            return Err(transport(TransportError::TimedOut {
                what: "the other server is late",
                after: until.timeout(),
            }));
        };
        if progress {
            continue;
        }
        let interest = match (flushed, missing) {
            (false, 0) => Interest::Write,
            (false, _) => Interest::ReadOrWrite,
            // Only the peer's bytes are missing: it finishes its own part of the work at about the same time.
            (true, _) => Interest::Read,
        };
        let park = || link.wait(interest, &Deadline::after(left.min(WATCH_INTERVAL)));
        if interest == Interest::Read { spin.wait(|| link.readable(), park) } else { park() }.map_err(transport)?;
        if (limits.hung_up)() {
            return Err(ExchangeError::ClientHungUp.into());
        }
    }
}

#[cfg(test)]
mod tests;
