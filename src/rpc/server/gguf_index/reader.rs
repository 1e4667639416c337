//! Reading tensors and slices of them from files, while hashing all bytes of the tensor.

use std::fs::File;
use std::io::{self, ErrorKind, Read, Seek, SeekFrom};

use thiserror::Error;

use super::file::FileIdentity;
use super::scan::IndexedTensor;
use crate::rpc::server::folder::FileError;
use crate::tensor::{ByteRuns, RunCursor};

/// Size of the chunks in which a file is read: small enough that a chunk is still in the CPU's cache when it is hashed.
pub(super) const READ_CHUNK_BYTES: usize = 256 << 10;

/// Why reading a tensor from its file was stopped.
#[derive(Debug, Error)]
pub(super) enum TensorReadError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("the file has changed since it was indexed")]
    Changed,
    /// The caller aborts the load.
    #[error("the load was aborted")]
    Aborted,
}

impl From<io::Error> for TensorReadError {
    fn from(e: io::Error) -> TensorReadError {
        FileError::from(e).into()
    }
}

/// Reads one tensor from its file, front to back, and hashes its bytes.
pub(super) struct TensorReader<'a> {
    candidate: &'a IndexedTensor,
    should_continue: &'a dyn Fn() -> bool,
    file: File,
    hasher: blake3::Hasher,
    /// Bytes of the tensor that were read.
    position: u64,
}

impl<'a> TensorReader<'a> {
    /// Opens the file at the tensor's first byte. `should_continue` is called between chunks; if it returns false, the read is
    /// aborted.
    ///
    /// # Errors
    /// [`TensorReadError::Changed`] if the file is not the indexed one any more.
    pub(super) fn start(
        candidate: &'a IndexedTensor,
        should_continue: &'a dyn Fn() -> bool,
    ) -> Result<TensorReader<'a>, TensorReadError> {
        let (mut file, meta) = candidate.file().listed.open()?;
        if FileIdentity::of(&meta) != candidate.file().identity {
            return Err(TensorReadError::Changed);
        }
        file.seek(SeekFrom::Start(candidate.start()))?;
        Ok(TensorReader { candidate, should_continue, file, hasher: blake3::Hasher::new(), position: 0 })
    }

    /// Reads the next bytes of the tensor.
    fn read(&mut self, dst: &mut [u8]) -> Result<(), TensorReadError> {
        for chunk in dst.chunks_mut(READ_CHUNK_BYTES) {
            if !(self.should_continue)() {
                return Err(TensorReadError::Aborted);
            }
            self.file.read_exact(chunk)?;
            self.hasher.update(chunk);
            self.position += chunk.len() as u64;
        }
        Ok(())
    }

    /// Reads the next chunk of the tensor into `chunk`: at least one byte.
    fn read_chunk(&mut self, chunk: &mut Vec<u8>) -> Result<(), TensorReadError> {
        let remaining = self.candidate.bytes().saturating_sub(self.position);
        if remaining == 0 {
            return Err(io::Error::from(ErrorKind::UnexpectedEof).into());
        }
        chunk.resize(remaining.min(READ_CHUNK_BYTES as u64) as usize, 0);
        self.read(chunk)
    }

    /// Reads the rest of the tensor and returns the digest of all of it. `chunk`: memory to use.
    fn hash_rest(&mut self, mut chunk: Vec<u8>) -> Result<[u8; 32], TensorReadError> {
        while self.position < self.candidate.bytes() {
            self.read_chunk(&mut chunk)?;
        }
        Ok(*self.hasher.finalize().as_bytes())
    }

    /// Reads the whole tensor and returns its digest.
    ///
    /// # Errors
    /// [`TensorReadError::Changed`] if the file has changed during the read: the digest may not be that of its present bytes.
    pub(super) fn hash(mut self) -> Result<[u8; 32], TensorReadError> {
        let digest = self.hash_rest(Vec::new())?;
        if FileIdentity::of(&self.file.metadata()?) != self.candidate.file().identity {
            return Err(TensorReadError::Changed);
        }
        Ok(digest)
    }
}

/// Reads a slice of one tensor. The bytes between the runs are read, too, because the digest covers the whole tensor.
pub(super) struct SliceReader<'a> {
    tensor: TensorReader<'a>,
    cursor: RunCursor,
    /// The last chunk that was not read in place. While the cursor is before the tensor reader's position, the chunk ends
    /// there and has all bytes from the cursor on.
    chunk: Vec<u8>,
}

impl<'a> SliceReader<'a> {
    /// A reader of `runs`, which lie in the tensor. `tensor` is at its first byte.
    pub(super) fn new(tensor: TensorReader<'a>, runs: &ByteRuns) -> SliceReader<'a> {
        SliceReader { tensor, cursor: RunCursor::new(runs), chunk: Vec::new() }
    }

    /// Reads the next bytes of the slice.
    ///
    /// A run is read in place as far as it has whole chunks. Everything else is read by way of a chunk: a system call and an
    /// update of the hash for each short run would take longer than the copy.
    pub(super) fn read(&mut self, mut dst: &mut [u8]) -> Result<(), TensorReadError> {
        while !dst.is_empty() {
            let run = self.cursor.peek().ok_or_else(|| io::Error::from(ErrorKind::UnexpectedEof))?;
            let position = self.tensor.position;
            let len = (run.end - run.start).min(dst.len() as u64) as usize; // at most the length of `dst`
            if run.start < position {
                let buffered = &self.chunk[self.chunk.len() - (position - run.start) as usize..];
                let len = len.min(buffered.len());
                dst[..len].copy_from_slice(&buffered[..len]);
                self.cursor.take(len as u64);
                dst = &mut dst[len..];
            } else if run.start == position && len >= READ_CHUNK_BYTES {
                // One chunk, so that the positions also agree after an error.
                self.tensor.read(&mut dst[..READ_CHUNK_BYTES])?;
                self.cursor.take(READ_CHUNK_BYTES as u64);
                dst = &mut dst[READ_CHUNK_BYTES..];
            } else {
                self.tensor.read_chunk(&mut self.chunk)?;
            }
        }
        Ok(())
    }

    /// Reads the rest of the tensor after the slice, and returns the digest of all of the tensor.
    pub(super) fn hash_rest(mut self) -> Result<[u8; 32], TensorReadError> {
        self.tensor.hash_rest(std::mem::take(&mut self.chunk))
    }
}
