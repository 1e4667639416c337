//! Pace of a message: a message that has begun must make progress. Only the time in which the server waits for its bytes counts.
//! The time in which the server is busy with a device between two parts of the message does not.

use std::time::Duration;

/// Bytes that a client must send within the limit. With the default limit of 60 s, 4 KiB a second are enough; a client that sends
/// single bytes keeps a connection for at most one limit per message header.
const BYTES_PER_LIMIT: usize = 256 << 10;

/// Counts the time spent waiting for the bytes of a message. When [`BYTES_PER_LIMIT`] bytes have arrived, the time starts anew.
#[derive(Debug)]
pub(super) struct Pace {
    limit: Duration,
    waited: Duration,
    received: usize,
}

impl Pace {
    pub(super) fn new(limit: Duration) -> Pace {
        Pace { limit, waited: Duration::ZERO, received: 0 }
    }

    /// The time within which the next [`BYTES_PER_LIMIT`] bytes of a message must arrive.
    pub(super) fn limit(&self) -> Duration {
        self.limit
    }

    /// How long the next read may wait.
    pub(super) fn remaining(&self) -> Duration {
        self.limit.saturating_sub(self.waited)
    }

    /// Records that a read has waited for `waited` and returned `received` bytes.
    pub(super) fn record(&mut self, waited: Duration, received: usize) {
        self.waited = self.waited.saturating_add(waited);
        self.received += received;
        if self.received >= BYTES_PER_LIMIT {
            self.restart();
        }
    }

    /// Starts anew, at the beginning of a message.
    pub(super) fn restart(&mut self) {
        (self.waited, self.received) = (Duration::ZERO, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn single_bytes_do_not_extend_the_limit_and_large_messages_do() {
        const LIMIT: Duration = Duration::from_secs(10);
        let second = Duration::from_secs(1);
        let mut pace = Pace::new(LIMIT);
        for seconds_left in (0..10).rev() {
            pace.record(second, 1);
            assert_eq!(pace.remaining(), seconds_left * second);
        }
        pace.record(second, 1);
        assert_eq!(pace.remaining(), Duration::ZERO);
        // The last bytes of a slow part are accepted, and the next part has the whole limit.
        pace.record(Duration::ZERO, BYTES_PER_LIMIT - 11);
        assert_eq!(pace.remaining(), LIMIT);
        // A slow client of a large message: a quarter of a part every two seconds.
        for _ in 0..100 {
            pace.record(2 * second, BYTES_PER_LIMIT / 4);
            assert!(pace.remaining() >= LIMIT - 6 * second);
        }
        pace.record(9 * second, 1);
        pace.restart();
        assert_eq!(pace.remaining(), LIMIT);
    }
}
