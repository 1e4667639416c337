//! Tensor cache on disk: data of SET_TENSORs by their FNV-1a hash, so that a client can send the hash instead
//! (SET_TENSOR_HASH).
//!
//! One file per hash: a header (magic, version, length, FNV-1a, BLAKE3), then the data. The file that was used least recently
//! is evicted first (LRU), by modification time.
//!
//! Cache poisoning: the protocol prescribes FNV-1a, for which collisions can be constructed. A client that may write to the
//! cache can therefore replace data for all other clients that share it. The BLAKE3 digest in the header only detects damaged
//! files. Hence the cache is opt-in.
//!
//! Errors of the cache never fail a session: an unreadable entry is a miss, and an entry that cannot be written is not cached.

use std::fmt;
use std::fs::{self, File, FileTimes};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use thiserror::Error;

use super::limits::CacheConfig;
use super::log_limits::{LogKind, LogLimits, LogSource};
use crate::rpc::wire::{Reader, WireError};

const MAGIC: &[u8; 8] = b"fanoutTC";
const VERSION: u32 = 1;

/// Bytes before the data: magic, version, length, FNV-1a, BLAKE3.
const HEADER_BYTES: usize = 8 + 4 + 8 + 8 + 32;

/// Smaller data is not cached: sending it again is faster than a lookup. ggml's clients send hashes from 10 MiB on.
const MIN_BYTES: u64 = 64 << 10;

/// Partial files older than this were left by a server that has ended.
const STALE_AGE: Duration = Duration::from_secs(24 * 3600);

/// File name extension of complete entries.
const ENTRY_EXTENSION: &str = "tensor";
/// File name extension of entries that are being written.
const PARTIAL_EXTENSION: &str = "part";

/// Why an entry of the cache is invalid.
#[derive(Debug, Error)]
pub(super) enum CacheError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Header(#[from] WireError),
    #[error("not a cache file of version {VERSION}")]
    Version,
    #[error("the file size does not match the length in its header")]
    Length,
    #[error("the hash in its header does not match the file name")]
    Hash,
    #[error("the data does not match the digest in its header")]
    Digest,
}

/// A tensor cache in a folder. Several servers may share the folder.
pub(super) struct TensorCache {
    dir: PathBuf,
    max_bytes: u64,
    /// Estimated size of all entries; recounted when it exceeds the limit, because other servers may add and remove entries.
    total_bytes: Mutex<u64>,
    logs: Arc<LogLimits>,
}

impl TensorCache {
    /// Opens a folder, which is created if necessary. Removes stale partial files and evicts entries beyond the limit.
    pub(super) fn open(config: &CacheConfig, logs: &Arc<LogLimits>) -> io::Result<TensorCache> {
        fs::create_dir_all(&config.dir)?;
        let (dir, max_bytes) = (config.dir.clone(), config.max_bytes);
        let cache = TensorCache { dir, max_bytes, total_bytes: Mutex::new(0), logs: Arc::clone(logs) };
        for (path, _, modified) in cache.list_files(PARTIAL_EXTENSION)? {
            if modified.elapsed().is_ok_and(|age| age > STALE_AGE) {
                cache.remove_if_exists(&path);
            }
        }
        *cache.lock_total() = cache.list_files(ENTRY_EXTENSION)?.iter().map(|(_, bytes, _)| bytes).sum();
        cache.evict_until_fits(0);
        Ok(cache)
    }

    /// Looks up the data of a hash; `None` unless an entry has exactly `len` bytes. The caller may use the data only after
    /// [`CacheReader::verify`] has succeeded.
    pub(super) fn lookup(&self, fnv: u64, len: u64) -> Option<CacheReader> {
        let path = self.entry_path(fnv);
        let file = File::options().read(true).open(&path).ok()?;
        match CacheReader::open(file, fnv) {
            Ok((reader, have)) if have == len => Some(reader),
            // Another length: other data with the same hash. The entry is valid, but not the requested one.
            Ok(_) => None,
            Err(e) => {
                self.remove_invalid(fnv, &e);
                None
            }
        }
    }

    /// Removes an entry that is invalid or unreadable.
    pub(super) fn remove_invalid(&self, fnv: u64, why: &CacheError) {
        let path = self.entry_path(fnv);
        self.log(LogKind::CacheInvalid, format_args!("removed the invalid entry {}: {why}", path.display()));
        self.remove_if_exists(&path);
    }

    /// Removes a file. It is not an error if another server or session has removed it already.
    fn remove_if_exists(&self, path: &Path) {
        if let Err(e) = fs::remove_file(path)
            && e.kind() != io::ErrorKind::NotFound
        {
            self.log(LogKind::CacheFailure, format_args!("cannot remove {}: {e}", path.display()));
        }
    }

    fn log(&self, kind: LogKind, text: fmt::Arguments<'_>) {
        self.logs.log(LogSource::Server, kind, format_args!("cache: {text}"));
    }

    fn log_write_error(&self, path: &Path, e: &io::Error) {
        self.log(LogKind::CacheFailure, format_args!("cannot write {}: {e}", path.display()));
    }

    /// Starts writing an entry of `len` bytes. `None` if the data is too small or too large, or if the file cannot be created.
    pub(super) fn begin_write(&self, len: u64) -> Option<CacheWriter<'_>> {
        if len < MIN_BYTES || len.saturating_add(HEADER_BYTES as u64) > self.max_bytes {
            return None;
        }
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let number = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!("{}-{number}.{PARTIAL_EXTENSION}", std::process::id()));
        let begin = || {
            let mut file = File::create(&path)?;
            file.write_all(&[0; HEADER_BYTES])?;
            Ok(file)
        };
        let file = begin().inspect_err(|e: &io::Error| self.log_write_error(&path, e)).ok()?;
        Some(CacheWriter {
            cache: self,
            file,
            path,
            len,
            fnv: Fnv1a::new(),
            digest: blake3::Hasher::new(),
            failed: None,
        })
    }

    /// Evicts the least recently used entries until `more` bytes fit.
    fn evict_until_fits(&self, more: u64) {
        let mut total = self.lock_total();
        *total = total.saturating_add(more);
        if *total <= self.max_bytes {
            return;
        }
        let removed = self.list_files(ENTRY_EXTENSION).map(|mut files| {
            files.sort_by_key(|&(_, _, modified)| modified);
            // The new entry is not in the list yet.
            *total = files.iter().map(|(_, bytes, _)| bytes).sum::<u64>().saturating_add(more);
            for (path, bytes, _) in files {
                if *total <= self.max_bytes {
                    break;
                }
                self.log(LogKind::CacheEviction, format_args!("evicted {}", path.display()));
                self.remove_if_exists(&path);
                *total -= bytes;
            }
        });
        if let Err(e) = removed {
            self.log(LogKind::CacheFailure, format_args!("cannot evict entries in {}: {e}", self.dir.display()));
        }
    }

    /// Path, size in bytes and time of the last use of the files with an extension.
    fn list_files(&self, extension: &str) -> io::Result<Vec<(PathBuf, u64, SystemTime)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == extension) {
                // Another server may have removed the file in the meantime.
                if let Ok(meta) = fs::metadata(&path) {
                    files.push((path, meta.len(), meta.modified()?));
                }
            }
        }
        Ok(files)
    }

    fn entry_path(&self, fnv: u64) -> PathBuf {
        self.dir.join(format!("{fnv:016x}.{ENTRY_EXTENSION}"))
    }

    fn lock_total(&self) -> MutexGuard<'_, u64> {
        // A single number cannot be left inconsistent by a panic.
        self.total_bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads an entry and computes its digest.
pub(super) struct CacheReader {
    file: BufReader<File>,
    expected_digest: blake3::Hash,
    digest: blake3::Hasher,
}

impl CacheReader {
    /// Reads the header; also returns the length of the data.
    fn open(mut file: File, fnv: u64) -> Result<(CacheReader, u64), CacheError> {
        let mut header = [0; HEADER_BYTES];
        file.read_exact(&mut header)?;
        let mut r = Reader::new(&header);
        if r.array("magic")? != MAGIC || r.u32("version")? != VERSION {
            return Err(CacheError::Version);
        }
        let len = r.u64("length")?;
        if file.metadata()?.len().checked_sub(HEADER_BYTES as u64) != Some(len) {
            return Err(CacheError::Length);
        }
        if r.u64("hash")? != fnv {
            return Err(CacheError::Hash);
        }
        let want = blake3::Hash::from_bytes(*r.array("digest")?);
        // Records the use for LRU eviction. An error only makes the order less exact.
        let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
        Ok((CacheReader { file: BufReader::new(file), expected_digest: want, digest: blake3::Hasher::new() }, len))
    }

    /// Reads the next bytes of the data.
    pub(super) fn read(&mut self, dst: &mut [u8]) -> Result<(), CacheError> {
        self.file.read_exact(dst)?;
        self.digest.update(dst);
        Ok(())
    }

    /// Checks the digest of all data that was read.
    ///
    /// # Errors
    /// [`CacheError::Digest`] if the file is damaged.
    pub(super) fn verify(&self) -> Result<(), CacheError> {
        if self.digest.finalize() == self.expected_digest { Ok(()) } else { Err(CacheError::Digest) }
    }
}

/// Writes an entry to a partial file. Dropping it before [`CacheWriter::commit`] removes the file.
pub(super) struct CacheWriter<'a> {
    cache: &'a TensorCache,
    file: File,
    path: PathBuf,
    len: u64,
    fnv: Fnv1a,
    digest: blake3::Hasher,
    /// First error of a write; reported by [`CacheWriter::commit`].
    failed: Option<io::Error>,
}

impl CacheWriter<'_> {
    /// Appends the next bytes of the data.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.fnv.update(bytes);
            self.digest.update(bytes);
            self.failed = self.file.write_all(bytes).err();
        }
    }

    /// Completes the entry: writes its header and renames the file, so that the entry appears atomically. Errors are logged.
    pub(super) fn commit(mut self) {
        if let Err(e) = self.write_header_and_rename() {
            self.cache.log_write_error(&self.path, &e);
        }
    }

    fn write_header_and_rename(&mut self) -> io::Result<()> {
        if let Some(e) = self.failed.take() {
            return Err(e);
        }
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&self.len.to_le_bytes());
        header.extend_from_slice(&self.fnv.0.to_le_bytes());
        header.extend_from_slice(self.digest.finalize().as_bytes());
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header)?;
        let to = self.cache.entry_path(self.fnv.0);
        let replaced = fs::metadata(&to).map_or(0, |meta| meta.len());
        self.cache.evict_until_fits((self.len + HEADER_BYTES as u64).saturating_sub(replaced));
        fs::rename(&self.path, to)
    }
}

impl Drop for CacheWriter<'_> {
    fn drop(&mut self) {
        // After a commit the file does not exist any more.
        self.cache.remove_if_exists(&self.path);
    }
}

/// 64-bit FNV-1a, with which ggml's protocol identifies data.
struct Fnv1a(u64);

impl Fnv1a {
    const fn new() -> Fnv1a {
        Fnv1a(0xcbf2_9ce4_8422_2325)
    }

    fn update(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |h, &byte| (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv1a_matches_published_vectors() {
        for (text, want) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8_u64)]
        {
            let mut fnv = Fnv1a::new();
            fnv.update(text.as_bytes());
            assert_eq!(fnv.0, want, "{text:?}");
        }
    }
}
