//! GGUF index: finds tensors by the BLAKE3 digest of their bytes in the GGUF files of a folder (`--models`), so that clients
//! need not upload weights that the server has on disk.
//!
//! - The digests are computed in the background, by one thread of low priority, and kept from one start of the server to the
//!   next. They belong to the identity of a file ([`FileIdentity`]): a file that has changed is hashed again.
//! - A client's request hashes nothing to search for a digest: a digest that is not in the index costs a look-up, whatever
//!   files there are, so neither its time nor its cost tells a client about them. While the index is incomplete, clients
//!   upload.
//! - A tensor that is found is hashed while it is loaded, so a wrong entry of the index, or a file that changes meanwhile, does
//!   not disclose other bytes.
//! - Files are read, not memory-mapped: a file may change, shrink or be deleted at any time, and a mapped file would then raise
//!   SIGBUS. A tensor that cannot be read counts as not found.
//! - Clients send no paths. A wrong digest reveals nothing about the files.
//!
//! `scan.rs` lists the files and their tensors, `hashing.rs` computes their digests, `digest_file.rs` keeps them; this file
//! finds and loads tensors. Start reading at [`GgufIndex::find`].

mod digest_file;
mod file;
mod hashing;
mod scan;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use log::{debug, warn};
use thiserror::Error;

use crate::device::{DeviceError, Queue, Region, UploadError};
use crate::rpc::server::folder::FileError;
use crate::tensor::TensorDesc;
use digest_file::DigestFile;
use file::FileIdentity;
use hashing::{Hashing, INITIAL_SCAN_TIMEOUT};
pub(super) use scan::IndexedTensor;
pub use scan::model_link_targets;

/// Limit of the tensors with the requested digest that are read for one LOAD: more than one if files have a tensor in common.
const MAX_CANDIDATES: usize = 8;

/// Size of the chunks in which a file is read: small enough that a chunk is still in the CPU's cache when it is hashed.
const READ_CHUNK_BYTES: usize = 256 << 10;

/// Index of a folder of GGUF files. All sessions share it.
pub(super) struct GgufIndex {
    hashing: Arc<Hashing>,
}

/// The tensor that a LOAD requests.
pub(super) struct WantedTensor<'a> {
    /// Name of the tensor in the client's file, for the log.
    pub(super) name: &'a str,
    /// BLAKE3 digest of its bytes.
    pub(super) digest: [u8; 32],
}

/// The region that a LOAD fills.
pub(super) struct LoadTarget<'a> {
    pub(super) queue: &'a mut dyn Queue,
    pub(super) region: &'a Region,
    /// The tensor in the region, for devices that repack weights.
    pub(super) tensor: Option<&'a TensorDesc>,
    /// Whether no other work can read the region during the load. Bytes with a wrong digest may then be written, and the caller
    /// overwrites them afterwards.
    pub(super) unobserved: bool,
    /// Set when bytes may have been written to the region.
    pub(super) written: bool,
}

/// Why reading a tensor from its file was stopped.
#[derive(Debug, Error)]
enum TensorReadError {
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

/// Result of loading one candidate, if the device has not failed.
enum AttemptResult {
    /// The digest matches: the region is filled.
    Match,
    /// The digest differs, or the file cannot be read.
    Mismatch,
    /// The caller aborts the load.
    Aborted,
}

impl GgufIndex {
    /// Lists the files of a folder, and starts to compute the digests that `digests`, a folder where they are kept, does not
    /// have.
    ///
    /// # Errors
    /// If the folder cannot be read, or the thread cannot be started. Problems with single files are only logged.
    pub(super) fn open(dir: &Path, digests: Option<&Path>) -> io::Result<GgufIndex> {
        std::fs::read_dir(dir)?;
        let digest_file = digests.and_then(|at| {
            let opened = DigestFile::open(at, dir);
            opened.inspect_err(|e| warn!("models: digests are not kept: {}: {e}", at.display())).ok()
        });
        Ok(GgufIndex { hashing: Hashing::start(dir, digest_file, INITIAL_SCAN_TIMEOUT)? })
    }

    /// How many tensors have a digest in the index, and how many there are.
    pub(super) fn progress(&self) -> (usize, usize) {
        let snapshot = self.hashing.snapshot();
        (snapshot.hashed_tensors(), snapshot.tensors())
    }

    /// The tensors of `bytes` bytes with a digest. Neither reads nor hashes. If there are none, the folder is scanned for new
    /// files in the background, but at a bounded rate.
    pub(super) fn find(&self, bytes: u64, digest: &[u8; 32]) -> Vec<IndexedTensor> {
        let found = self.hashing.snapshot().find(bytes, digest, MAX_CANDIDATES);
        if found.is_empty() {
            self.hashing.request_scan();
        }
        found
    }

    /// Fills `target` with the first of `candidates` whose bytes have the digest. Returns whether there is one.
    /// `should_continue` is called between chunks; if it returns false, the load is aborted.
    ///
    /// # Errors
    /// The failure of the device.
    pub(super) fn load(
        &self,
        candidates: &[IndexedTensor],
        wanted: &WantedTensor<'_>,
        target: &mut LoadTarget<'_>,
        should_continue: &dyn Fn() -> bool,
    ) -> Result<bool, DeviceError> {
        for candidate in candidates {
            match try_load(candidate, wanted, target, should_continue)? {
                AttemptResult::Match => {
                    debug!("models: {} is loaded from {}", wanted.name, candidate.file().path().display());
                    return Ok(true);
                }
                // The file is hashed again after the next scan.
                AttemptResult::Mismatch => candidate.file().mark_stale(),
                AttemptResult::Aborted => return Ok(false),
            }
        }
        self.hashing.request_scan();
        Ok(false)
    }
}

impl Drop for GgufIndex {
    fn drop(&mut self) {
        self.hashing.stop();
    }
}

/// Loads one candidate into `target` and compares its digest. If other work can read the region, the candidate is hashed
/// before it is written.
fn try_load(
    candidate: &IndexedTensor,
    wanted: &WantedTensor<'_>,
    target: &mut LoadTarget<'_>,
    should_continue: &dyn Fn() -> bool,
) -> Result<AttemptResult, DeviceError> {
    if !target.unobserved {
        let first = TensorReader::start(candidate, should_continue).and_then(TensorReader::hash);
        match first {
            Ok(digest) if digest == wanted.digest => {}
            Ok(_) => return Ok(AttemptResult::Mismatch),
            Err(e) => return Ok(abandon_attempt(candidate, &e)),
        }
    }
    let mut reader = match TensorReader::start(candidate, should_continue) {
        Ok(reader) => reader,
        Err(e) => return Ok(abandon_attempt(candidate, &e)),
    };
    target.written = true;
    match target.queue.upload_from(target.region.clone(), target.tensor, |dst| reader.read(dst)) {
        Ok(()) => Ok(if reader.digest() == wanted.digest { AttemptResult::Match } else { AttemptResult::Mismatch }),
        Err(UploadError::Source(e)) => Ok(abandon_attempt(candidate, &e)),
        Err(UploadError::Device(e)) => Err(e),
    }
}

/// The result for a candidate that could not be read.
fn abandon_attempt(candidate: &IndexedTensor, e: &TensorReadError) -> AttemptResult {
    if matches!(e, TensorReadError::Aborted) {
        return AttemptResult::Aborted;
    }
    debug!("models: {}: {e}", candidate.file().path().display());
    AttemptResult::Mismatch
}

/// Reads one tensor from its file and hashes its bytes.
struct TensorReader<'a> {
    candidate: &'a IndexedTensor,
    should_continue: &'a dyn Fn() -> bool,
    file: File,
    hasher: blake3::Hasher,
}

impl<'a> TensorReader<'a> {
    /// Opens the file at the tensor's first byte.
    ///
    /// # Errors
    /// [`TensorReadError::Changed`] if the file is not the indexed one any more.
    fn start(
        candidate: &'a IndexedTensor,
        should_continue: &'a dyn Fn() -> bool,
    ) -> Result<TensorReader<'a>, TensorReadError> {
        let (mut file, meta) = candidate.file().listed.open()?;
        if FileIdentity::of(&meta) != candidate.file().identity {
            return Err(TensorReadError::Changed);
        }
        file.seek(SeekFrom::Start(candidate.start()))?;
        Ok(TensorReader { candidate, should_continue, file, hasher: blake3::Hasher::new() })
    }

    /// Reads the next bytes.
    fn read(&mut self, dst: &mut [u8]) -> Result<(), TensorReadError> {
        for chunk in dst.chunks_mut(READ_CHUNK_BYTES) {
            if !(self.should_continue)() {
                return Err(TensorReadError::Aborted);
            }
            self.file.read_exact(chunk)?;
            self.hasher.update(chunk);
        }
        Ok(())
    }

    /// Reads the whole tensor and returns its digest.
    ///
    /// # Errors
    /// [`TensorReadError::Changed`] if the file has changed during the read: the digest may not be that of its present bytes.
    fn hash(mut self) -> Result<[u8; 32], TensorReadError> {
        let mut chunk = vec![0; READ_CHUNK_BYTES.min(self.candidate.bytes() as usize)];
        let mut remaining = self.candidate.bytes();
        while remaining > 0 {
            let len = chunk.len().min(remaining as usize);
            self.read(&mut chunk[..len])?;
            remaining -= len as u64;
        }
        if FileIdentity::of(&self.file.metadata()?) != self.candidate.file().identity {
            return Err(TensorReadError::Changed);
        }
        Ok(self.digest())
    }

    /// The digest of all bytes that were read.
    fn digest(&self) -> [u8; 32] {
        *self.hasher.finalize().as_bytes()
    }
}

#[cfg(all(test, unix))]
mod tests;
