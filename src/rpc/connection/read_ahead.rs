//! Input buffer between a receiver and the parser of its messages.

/// Buffer size: one read fetches a header with its small body, or several of them.
const BUFFER_BYTES: usize = 16 << 10;

/// Maximum number of bytes that can be returned at a time: room before the received bytes.
pub(in crate::rpc) const MAX_UNREAD: usize = 512;

/// Source of received bytes. Each end of a connection implements it with its own deadlines and its own way to wait.
pub(in crate::rpc) trait ByteSource {
    type Error;

    /// The error of a read that needs more bytes than the stream has.
    fn ended() -> Self::Error;

    /// Receives at least one byte into `dst`. 0: end of the stream.
    fn receive(&mut self, dst: &mut [u8]) -> Result<usize, Self::Error>;

    /// As [`ByteSource::receive`], for the read-ahead buffer. The bytes may begin a message that the other end has yet to
    /// send, so an implementation may first wait in another way.
    fn receive_ahead(&mut self, dst: &mut [u8]) -> Result<usize, Self::Error> {
        self.receive(dst)
    }
}

/// Received bytes that were not consumed yet.
#[derive(Debug)]
pub(in crate::rpc) struct ReadAhead {
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl ReadAhead {
    pub(in crate::rpc) fn new() -> ReadAhead {
        ReadAhead { buffer: vec![0; MAX_UNREAD + BUFFER_BYTES].into(), start: MAX_UNREAD, end: MAX_UNREAD }
    }

    pub(in crate::rpc) fn is_empty(&self) -> bool {
        self.start == self.end
    }

    /// Receives into the empty buffer. `false`: end of the stream.
    pub(in crate::rpc) fn fill<S: ByteSource>(&mut self, source: &mut S) -> Result<bool, S::Error> {
        let got = source.receive_ahead(&mut self.buffer[MAX_UNREAD..]);
        (self.start, self.end) = (MAX_UNREAD, MAX_UNREAD + *got.as_ref().unwrap_or(&0));
        got.map(|n| n > 0)
    }

    /// Returns the bytes that were read last, at most [`MAX_UNREAD`], so that the next read has them again.
    pub(in crate::rpc) fn unread(&mut self, bytes: &[u8]) {
        self.start -= bytes.len();
        self.buffer[self.start..self.start + bytes.len()].copy_from_slice(bytes);
    }

    /// Takes the received bytes that were not read.
    pub(in crate::rpc) fn take(&mut self) -> Vec<u8> {
        let unread = self.buffer[self.start..self.end].to_vec();
        self.start = self.end;
        unread
    }

    /// Fills `dst` with the next bytes. A remainder larger than the buffer is received directly into `dst`.
    pub(in crate::rpc) fn read_exact<S: ByteSource>(
        &mut self,
        mut dst: &mut [u8],
        source: &mut S,
    ) -> Result<(), S::Error> {
        loop {
            let n = dst.len().min(self.end - self.start);
            dst[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
            self.start += n;
            dst = &mut dst[n..];
            let more = match dst.len() {
                0 => return Ok(()),
                1..BUFFER_BYTES => self.fill(source)?,
                _ => {
                    let got = source.receive(dst)?;
                    dst = &mut dst[got..];
                    got > 0
                }
            };
            if !more {
                return Err(S::ended());
            }
        }
    }

    /// Drops the next `len` bytes.
    pub(in crate::rpc) fn skip<S: ByteSource>(&mut self, mut len: u64, source: &mut S) -> Result<(), S::Error> {
        while len > 0 {
            if self.is_empty() && !self.fill(source)? {
                return Err(S::ended());
            }
            let n = len.min((self.end - self.start) as u64);
            self.start += n as usize; // n is at most end - start
            len -= n;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    /// A source that returns bytes in chunks of random lengths.
    struct Split<'a>(&'a [u8], fastrand::Rng);

    impl ByteSource for Split<'_> {
        /// The end of the stream.
        type Error = ();

        fn ended() {}

        fn receive(&mut self, dst: &mut [u8]) -> Result<usize, ()> {
            let n = dst.len().min(self.1.usize(1..40_000));
            Ok(self.0.read(&mut dst[..n]).unwrap())
        }
    }

    /// Bytes arrive in order and completely for any sizes of reads and of received chunks.
    #[test]
    fn bytes_arrive_in_order_for_any_split() {
        let bytes: Vec<u8> = (0..200_000u32).map(|n| (n * 7 + n / 251) as u8).collect();
        for seed in 0..20 {
            let mut rng = fastrand::Rng::with_seed(seed);
            let mut source = Split(&bytes, fastrand::Rng::with_seed(seed + 1000));
            let (mut ahead, mut at) = (ReadAhead::new(), 0);
            loop {
                let n = if rng.bool() { rng.usize(0..100) } else { rng.usize(0..60_000) };
                let whole = if rng.u8(..4) == 0 {
                    ahead.skip(n as u64, &mut source).is_ok()
                } else {
                    let mut dst = vec![0; n];
                    let mut whole = ahead.read_exact(&mut dst, &mut source).is_ok();
                    assert!(!whole || dst == bytes[at..at + n], "seed {seed}, {n} bytes at {at}");
                    if whole && n <= MAX_UNREAD {
                        ahead.unread(&dst);
                        dst.fill(0);
                        whole = ahead.read_exact(&mut dst, &mut source).is_ok();
                        assert!(whole && dst == bytes[at..at + n], "seed {seed}, {n} bytes at {at} again");
                    }
                    whole
                };
                assert_eq!(whole, at + n <= bytes.len(), "seed {seed}, {n} bytes at {at}");
                if !whole {
                    break;
                }
                at += n;
            }
        }
    }
}
