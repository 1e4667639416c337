//! GGUF index: finds tensors by the BLAKE3 digest of their bytes in the GGUF files of a folder (`--models`), so that clients
//! need not upload weights that the server has on disk.
//!
//! - A tensor is found only if the digest of its bytes equals the requested one. Names and lengths only select and order the
//!   candidates.
//! - Files are read, not memory-mapped: a file may change, shrink or be deleted at any time, and a mapped file would then raise
//!   SIGBUS. A tensor that cannot be read counts as not found.
//! - Clients send no paths. A wrong digest reveals nothing about the files.
//!
//! `scan.rs` lists the files and their tensors; this file reads candidates and loads them. Start reading at
//! [`GgufIndex::load`].

mod file;
mod scan;

pub(super) use scan::WantedTensor;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use log::{debug, info};
use thiserror::Error;

use crate::device::{DeviceError, Queue, Region, UploadError};
use crate::tensor::TensorDesc;
use file::FileError;
use scan::{FileStamp, IndexSnapshot, IndexedTensor};

/// Limit of candidates that are read for one LOAD.
const MAX_CANDIDATES: usize = 8;

/// Size of the chunks in which a file is read: small enough that a chunk is still in the CPU's cache when it is hashed.
const READ_CHUNK_BYTES: usize = 256 << 10;

/// Minimum interval between scans: the duration, or the multiple of the last scan's duration, whichever is longer. A LOAD
/// that finds nothing rescans the folder, so that new files are noticed; the interval bounds the cost of clients that request
/// missing tensors.
const RESCAN_INTERVAL: (Duration, u32) = (Duration::from_secs(1), 20);

/// Limit of the duration of the scan at the start of the server. The next scan continues with the files that were not reached.
const INITIAL_SCAN_TIMEOUT: Duration = Duration::from_secs(120);

/// Limit of the duration of a later scan, during which a client waits.
const RESCAN_TIMEOUT: Duration = Duration::from_secs(10);

/// Limit of indexed tensors, over all files.
const MAX_TENSORS: usize = 1 << 18;

/// Index of a folder of GGUF files. All sessions share it.
pub(super) struct GgufIndex {
    dir: PathBuf,
    snapshot: Mutex<Arc<IndexSnapshot>>,
    /// Earliest time of the next scan. Locked during a scan.
    next_scan: Mutex<Instant>,
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
    /// Scans a folder.
    ///
    /// # Errors
    /// If the folder cannot be read. Problems with single files are only logged.
    pub(super) fn open(dir: &Path) -> io::Result<GgufIndex> {
        std::fs::read_dir(dir)?;
        let (snapshot, next_scan) = timed_scan(dir, &IndexSnapshot::default(), INITIAL_SCAN_TIMEOUT, &|| true);
        info!("models: {}: {} tensors in {} files", dir.display(), snapshot.tensors(), snapshot.files());
        Ok(GgufIndex {
            dir: dir.to_owned(),
            snapshot: Mutex::new(Arc::new(snapshot)),
            next_scan: Mutex::new(next_scan),
        })
    }

    /// Fills `target` with the wanted tensor. Returns whether it was found. `should_continue` is called between chunks; if it
    /// returns false, the load is aborted.
    ///
    /// # Errors
    /// The failure of the device.
    pub(super) fn load(
        &self,
        wanted: &WantedTensor<'_>,
        target: &mut LoadTarget<'_>,
        should_continue: &dyn Fn() -> bool,
    ) -> Result<bool, DeviceError> {
        let mut remaining = MAX_CANDIDATES;
        let mut snapshot = self.snapshot();
        loop {
            for candidate in snapshot.candidates(target.region.bytes(), wanted, remaining) {
                remaining -= 1;
                match try_load(&candidate, wanted, target, should_continue)? {
                    AttemptResult::Match => {
                        debug!("models: {} is loaded from {}", wanted.name, candidate.file().path.display());
                        return Ok(true);
                    }
                    AttemptResult::Mismatch => {}
                    AttemptResult::Aborted => return Ok(false),
                }
            }
            match self.rescan(&snapshot, should_continue) {
                Some(newer) if remaining > 0 => snapshot = newer,
                _ => return Ok(false),
            }
        }
    }

    /// Returns a newer snapshot than `known`, scanning the folder if the last scan is long enough ago; `None` if there is no
    /// newer one. Does not wait for a scan of another session, whose result serves later LOADs.
    fn rescan(&self, known: &Arc<IndexSnapshot>, should_continue: &dyn Fn() -> bool) -> Option<Arc<IndexSnapshot>> {
        let mut next_scan = match self.next_scan.try_lock() {
            Ok(next_scan) => next_scan,
            Err(TryLockError::Poisoned(next_scan)) => next_scan.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let last = self.snapshot();
        if !Arc::ptr_eq(&last, known) {
            return Some(last); // another session has scanned in the meantime
        }
        if Instant::now() < *next_scan {
            return None;
        }
        let (snapshot, next) = timed_scan(&self.dir, known, RESCAN_TIMEOUT, should_continue);
        let snapshot = Arc::new(snapshot);
        *self.lock_snapshot() = Arc::clone(&snapshot);
        *next_scan = next;
        Some(snapshot)
    }

    /// The current snapshot.
    fn snapshot(&self) -> Arc<IndexSnapshot> {
        Arc::clone(&self.lock_snapshot())
    }

    fn lock_snapshot(&self) -> MutexGuard<'_, Arc<IndexSnapshot>> {
        // The snapshot is replaced as a whole, so a panic cannot leave it inconsistent.
        self.snapshot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Scans a folder for at most `limit`. Returns the snapshot and the earliest time of the next scan.
fn timed_scan(
    dir: &Path,
    before: &IndexSnapshot,
    limit: Duration,
    should_continue: &dyn Fn() -> bool,
) -> (IndexSnapshot, Instant) {
    let start = Instant::now();
    let snapshot = scan::scan_folder(dir, before, MAX_TENSORS, &|| start.elapsed() < limit && should_continue());
    let (min_interval, duration_factor) = RESCAN_INTERVAL;
    (snapshot, Instant::now() + min_interval.max(start.elapsed() * duration_factor))
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
        Ok(()) => Ok(if reader.finish() == wanted.digest { AttemptResult::Match } else { AttemptResult::Mismatch }),
        Err(UploadError::Source(e)) => Ok(abandon_attempt(candidate, &e)),
        Err(UploadError::Device(e)) => Err(e),
    }
}

/// The result for a candidate that could not be read. Marks its file as stale, unless the caller has aborted the load.
fn abandon_attempt(candidate: &IndexedTensor, e: &TensorReadError) -> AttemptResult {
    if matches!(e, TensorReadError::Aborted) {
        return AttemptResult::Aborted;
    }
    debug!("models: {}: {e}", candidate.file().path.display());
    candidate.file().mark_stale();
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
        let (mut file, meta) = file::open(&candidate.file().path)?;
        if FileStamp::of(&meta) != candidate.file().stamp {
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
    fn hash(mut self) -> Result<[u8; 32], TensorReadError> {
        let mut chunk = vec![0; READ_CHUNK_BYTES.min(self.candidate.bytes() as usize)];
        let mut remaining = self.candidate.bytes();
        while remaining > 0 {
            let len = chunk.len().min(remaining as usize);
            self.read(&mut chunk[..len])?;
            remaining -= len as u64;
        }
        Ok(self.finish())
    }

    /// The digest of all bytes that were read. It is cached in the index if the file has not changed during the read.
    fn finish(self) -> [u8; 32] {
        let digest = *self.hasher.finalize().as_bytes();
        // If the file changed during the read, the digest may not be that of its present contents.
        if self.file.metadata().is_ok_and(|meta| FileStamp::of(&meta) == self.candidate.file().stamp) {
            self.candidate.cache_digest(digest);
        }
        digest
    }
}
