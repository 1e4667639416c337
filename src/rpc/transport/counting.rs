//! Counts what a test's subject does with a connection: waits, and bytes by the way in which they were read and written.

use std::io::IoSlice;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use super::{Connection, Deadline, Interest, LendReceived, PeerAddr, Transport, TransportError};

/// The counts of a connection.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    /// Waits for a read that have begun, and those that have ended.
    pub(crate) read_waits: AtomicUsize,
    pub(crate) read_wakeups: AtomicUsize,
    pub(crate) write_waits: AtomicUsize,
    /// Bytes that were read into a buffer of the reader.
    pub(crate) read: AtomicUsize,
    /// Bytes that the reader has taken from the transport's memory.
    pub(crate) lent: AtomicUsize,
    pub(crate) written: AtomicUsize,
}

#[derive(Debug)]
struct CountingTransport {
    inner: Arc<dyn Transport>,
    counts: Arc<Counts>,
}

/// The same connection, and its counts from now on.
pub(crate) fn counting(connection: Connection) -> (Connection, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    (Connection::new(CountingTransport { inner: connection.0, counts: Arc::clone(&counts) }), counts)
}

impl LendReceived for CountingTransport {
    fn try_lend(&self, wanted: usize, sink: &mut dyn FnMut(&[u8]) -> usize) -> Result<Option<usize>, TransportError> {
        let lender = self.inner.lender().expect("`lender` has returned it");
        lender.try_lend(wanted, &mut |bytes| {
            let taken = sink(bytes);
            self.counts.lent.fetch_add(taken, SeqCst);
            taken
        })
    }
}

impl Transport for CountingTransport {
    fn try_read(&self, dst: &mut [u8]) -> Result<Option<usize>, TransportError> {
        let read = self.inner.try_read(dst)?;
        self.counts.read.fetch_add(read.unwrap_or(0), SeqCst);
        Ok(read)
    }

    fn lender(&self) -> Option<&dyn LendReceived> {
        self.inner.lender().map(|_| self as &dyn LendReceived)
    }

    fn try_handshake(&self) -> Result<bool, TransportError> {
        self.inner.try_handshake()
    }

    fn try_write(&self, src: &[IoSlice<'_>]) -> Result<Option<usize>, TransportError> {
        let written = self.inner.try_write(src)?;
        self.counts.written.fetch_add(written.unwrap_or(0), SeqCst);
        Ok(written)
    }

    fn try_flush(&self) -> Result<bool, TransportError> {
        self.inner.try_flush()
    }

    fn wait(&self, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
        if interest == Interest::Write {
            self.counts.write_waits.fetch_add(1, SeqCst);
            return self.inner.wait(interest, deadline);
        }
        self.counts.read_waits.fetch_add(1, SeqCst);
        let woken = self.inner.wait(interest, deadline);
        self.counts.read_wakeups.fetch_add(1, SeqCst);
        woken
    }

    fn readable(&self) -> bool {
        self.inner.readable()
    }

    fn hung_up(&self) -> bool {
        self.inner.hung_up()
    }

    fn set_loss_timeout(&self, timeout: Duration) {
        self.inner.set_loss_timeout(timeout);
    }

    fn try_finish(&self) -> Result<bool, TransportError> {
        self.inner.try_finish()
    }

    fn abort(&self) {
        self.inner.abort();
    }

    fn peer(&self) -> PeerAddr {
        self.inner.peer()
    }

    fn local_addr(&self) -> Option<SocketAddr> {
        self.inner.local_addr()
    }
}
