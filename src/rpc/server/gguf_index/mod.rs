//! GGUF index: finds tensors by the BLAKE3 digest of their bytes in the GGUF files of a folder (`--models`), so that clients
//! need not upload weights that the server has on disk.
//!
//! - The digests are computed in the background, by one thread of low priority, and kept from one start of the server to the
//!   next. They belong to the identity of a file (`FileIdentity`): a file that has changed is hashed again.
//! - A client's request hashes nothing to search for a digest: a digest that is not in the index costs a look-up, whatever
//!   files there are, so neither its time nor its cost tells a client about them. While the index is incomplete, clients
//!   upload.
//! - A tensor that is found is hashed while it is loaded, so a wrong entry of the index, or a file that changes meanwhile, does
//!   not disclose other bytes. The digest covers the whole tensor, so all of it is read and hashed also where a slice is loaded.
//! - Files are read, not memory-mapped: a file may change, shrink or be deleted at any time, and a mapped file would then raise
//!   SIGBUS. A tensor that cannot be read counts as not found.
//! - Clients send no paths. A wrong digest reveals nothing about the files.
//!
//! `scan.rs` lists the files and their tensors, `hashing.rs` computes their digests, `digest_file.rs` keeps them, `reader.rs`
//! reads tensors and slices; this file finds and loads tensors. Start reading at [`GgufIndex::find`].

mod digest_file;
mod file;
mod hashing;
mod reader;
mod scan;

use std::io;
use std::path::Path;
use std::sync::Arc;

use log::{debug, warn};

use crate::device::{DeviceError, Queue, Region, UploadError};
use crate::tensor::{ByteRuns, TensorDesc};
use digest_file::DigestFile;
use hashing::{Hashing, INITIAL_SCAN_TIMEOUT};
use reader::{SliceReader, TensorReadError, TensorReader};
pub(super) use scan::IndexedTensor;
pub use scan::model_link_targets;

/// Limit of the tensors with the requested digest that are read for one LOAD: more than one if files have a tensor in common.
const MAX_CANDIDATES: usize = 8;

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
    /// The slice of it to load, which lies in its bytes.
    pub(super) runs: ByteRuns,
}

/// The region that a LOAD fills, as long as the slice.
pub(super) struct LoadTarget<'a> {
    pub(super) queue: &'a mut dyn Queue,
    pub(super) region: &'a Region,
    /// The slice as a tensor, for devices that repack weights.
    pub(super) tensor: Option<&'a TensorDesc>,
    /// Whether no other work can read the region during the load. Bytes with a wrong digest may then be written, and the caller
    /// overwrites them afterwards.
    pub(super) unobserved: bool,
    /// Set when bytes may have been written to the region.
    pub(super) written: bool,
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

    /// Fills `target` with the slice of the first of `candidates` whose bytes have the digest. Returns whether there is one.
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

/// Loads the slice of one candidate into `target`, and compares the digest of the bytes that were read, which are the bytes of the
/// whole tensor. If other work can read the region, the candidate is hashed before the slice is written.
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
        Ok(reader) => SliceReader::new(reader, &wanted.runs),
        Err(e) => return Ok(abandon_attempt(candidate, &e)),
    };
    target.written = true;
    match target.queue.upload_from(target.region.clone(), target.tensor, |dst| reader.read(dst)) {
        Ok(()) => {}
        Err(UploadError::Source(e)) => return Ok(abandon_attempt(candidate, &e)),
        Err(UploadError::Device(e)) => return Err(e),
    }
    // What lies after the slice.
    match reader.hash_rest() {
        Ok(digest) if digest == wanted.digest => Ok(AttemptResult::Match),
        Ok(_) => Ok(AttemptResult::Mismatch),
        Err(e) => Ok(abandon_attempt(candidate, &e)),
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

#[cfg(all(test, unix))]
mod tests;
