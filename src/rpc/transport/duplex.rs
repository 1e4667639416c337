//! Both directions of a connection in one thread: non-blocking attempts, and one wait for either direction.

use std::sync::Arc;

use super::{Deadline, Interest, PeerAddr, Transport, TransportError};

/// A connection whose owner sends and receives at the same time, in one thread.
#[derive(Debug)]
pub(crate) struct Duplex(Arc<dyn Transport>);

impl Duplex {
    pub(super) fn new(transport: Arc<dyn Transport>) -> Duplex {
        Duplex(transport)
    }

    /// Address of the peer, for the log.
    pub(crate) fn peer(&self) -> PeerAddr {
        self.0.peer()
    }

    /// Whether a read would return at once, also with the end of the stream. Lock-free.
    pub(crate) fn readable(&self) -> bool {
        self.0.readable()
    }

    /// Whether the peer has closed its sending direction, or the connection has ended.
    pub(crate) fn hung_up(&self) -> bool {
        self.0.hung_up()
    }

    /// Reads received bytes into `dst`, which must not be empty. `None`: no byte is available.
    ///
    /// # Errors
    /// [`TransportError::Closed`] at the end of the stream.
    pub(crate) fn try_read(&mut self, dst: &mut [u8]) -> Result<Option<usize>, TransportError> {
        match self.0.try_read(dst)? {
            Some(0) => Err(TransportError::Closed),
            read => Ok(read),
        }
    }

    /// Writes bytes from the front of `src`, which must not be empty. `None`: there is no room. [`Duplex::try_flush`] must
    /// follow the last write.
    pub(crate) fn try_write(&mut self, src: &[u8]) -> Result<Option<usize>, TransportError> {
        self.0.try_write(&[std::io::IoSlice::new(src)])
    }

    /// Sends what `try_write` has buffered. `false`: there is no room for all of it.
    pub(crate) fn try_flush(&mut self) -> Result<bool, TransportError> {
        self.0.try_flush()
    }

    /// Blocks until an attempt would make progress or fail. `false`: the deadline has passed. May wake early.
    pub(crate) fn wait(&self, interest: Interest, deadline: &Deadline) -> Result<bool, TransportError> {
        self.0.wait(interest, deadline)
    }
}
