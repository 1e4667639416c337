//! Tensor cache on disk: data of SET_TENSORs by their FNV-1a hash, so that a client can send the hash instead
//! (SET_TENSOR_HASH).
//!
//! One file per owner and hash: a header (magic, version, length, owner, FNV-1a, BLAKE3), then the data. The file that was used
//! least recently is evicted first (LRU), by modification time. A file with the extension of entries that is none, such as an
//! entry of an older version, is never read, but counts against the size limit and is evicted like the others.
//!
//! Cache poisoning: the protocol prescribes FNV-1a, for which collisions can be constructed, so a client could store data under
//! the hash of another client's tensor. Therefore an entry belongs to the tenant that has written it (`owner.rs`), and a lookup
//! of another tenant misses. Data that several tenants upload is stored once for each: only a digest without collisions could
//! be shared, and the lookup has none. Clients of one tenant can still poison each other's entries; without keys these are the
//! clients of one address, and without `Config::loopback_tenants` all clients of loopback. The BLAKE3 digest in the header only
//! detects damaged files. Hence the cache is opt-in.
//!
//! The folder is used by its handle ([`Folder`]): symbolic links, named pipes and other special files in it are never opened.
//! The size limit counts the bytes of uploads in progress as they arrive (`quota.rs`); an upload that does not fit beside the
//! others in progress is not cached.
//!
//! Errors of the cache never fail a session: an unreadable entry is a miss, and an entry that cannot be written is not cached.

mod owner;
mod quota;

pub(super) use owner::{CacheOwner, EntryKey};

use std::ffi::OsStr;
use std::fmt;
use std::fs::{File, FileTimes};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use log::{debug, warn};
use thiserror::Error;

use super::folder::{Folder, Links, PartialFile};
use super::limits::CacheConfig;
use super::log_limits::{LogKind, LogLimits};
use crate::device::{Budget, Reservation};
use crate::rpc::wire::{Reader, WireError};
use owner::OWNER_BYTES;
use quota::Usage;

const MAGIC: &[u8; 8] = b"fanoutTC";
const VERSION: u32 = 2;

/// Bytes before the data: magic, version, length, owner, FNV-1a, BLAKE3.
const HEADER_BYTES: usize = 8 + 4 + 8 + OWNER_BYTES + 8 + 32;

/// Smaller data is not cached: sending it again is faster than a lookup. ggml's clients send hashes from 10 MiB on.
const MIN_BYTES: u64 = 64 << 10;

/// File name extension of complete entries.
const ENTRY_EXTENSION: &str = "tensor";

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
    #[error("the owner or the hash in its header does not match the file name")]
    Key,
    #[error("the data does not match the digest in its header")]
    Digest,
}

/// A tensor cache in a folder. Several servers may share the folder; each counts the entries of all of them, and its own
/// uploads.
pub(super) struct TensorCache {
    folder: Folder,
    /// The uploads in progress, as far as their bytes have arrived, within the size limit.
    uploads: Arc<Budget>,
    usage: Mutex<Usage>,
    logs: Arc<LogLimits>,
}

impl TensorCache {
    /// Opens a folder, which is created if necessary. Removes the partial files of servers that were killed, and evicts entries
    /// beyond the limit.
    pub(super) fn open(config: &CacheConfig, logs: &Arc<LogLimits>) -> io::Result<TensorCache> {
        let folder = Folder::open_or_create(&config.dir)?;
        if folder.is_writable_by_others()? {
            warn!("cache: other users of this machine may write to {}", folder.path().display());
        }
        folder.remove_abandoned()?;
        let (uploads, logs) = (Budget::new(config.max_bytes), Arc::clone(logs));
        let cache = TensorCache { folder, uploads, usage: Mutex::default(), logs };
        cache.evict_at_start()?;
        Ok(cache)
    }

    fn log(&self, kind: LogKind, text: fmt::Arguments<'_>) {
        self.logs.log_server(kind, format_args!("cache: {text}"));
    }

    /// Looks up an entry; `None` unless it has exactly `len` bytes of data. The caller may use the data only after
    /// [`CacheReader::verify`] has succeeded.
    pub(super) fn lookup(&self, key: EntryKey, len: u64) -> Option<CacheReader> {
        // A file that is not regular was not created by the cache, and is left alone.
        let (file, _) = self.folder.open_file(&key.file_name(), Links::Refuse).ok()?;
        match CacheReader::open(file, key) {
            Ok((reader, have)) if have == len => Some(reader),
            // Another length: other data with the same hash. The entry is valid, but not the requested one.
            Ok(_) => None,
            Err(e) => {
                self.remove_invalid(key, &e);
                None
            }
        }
    }

    /// Removes an entry that is invalid or unreadable.
    pub(super) fn remove_invalid(&self, key: EntryKey, why: &CacheError) {
        let name = key.file_name();
        if self.remove(&name) {
            self.lock_usage().invalidate_listing();
            let path = self.folder.path_of(&name);
            self.log(LogKind::CacheInvalid, format_args!("removed the invalid entry {}: {why}", path.display()));
        }
    }

    /// Removes an entry. Returns whether it is gone; a failure is logged.
    fn remove(&self, name: &OsStr) -> bool {
        let removed = self.folder.remove_if_exists(name);
        removed.inspect_err(|e| self.log_remove_error(&self.folder.path_of(name), e)).is_ok()
    }

    /// Starts writing an entry of `owner` with `len` bytes of data. `None` if the data is too small, if it is larger than the
    /// cache, or if the file cannot be created.
    pub(super) fn begin_write(&self, owner: CacheOwner, len: u64) -> Option<CacheWriter<'_>> {
        if len < MIN_BYTES || len.checked_add(HEADER_BYTES as u64)? > self.uploads.limit() {
            return None;
        }
        let charge = self.uploads.reserve(0).ok()?;
        let begin = || {
            let mut file = self.folder.create_partial()?;
            file.file().seek(SeekFrom::Start(HEADER_BYTES as u64))?;
            Ok(file)
        };
        let file = begin().inspect_err(|e| self.log_write_error(e)).ok()?;
        let entry = PartialEntry { cache: self, file, charge, owner, fnv: Fnv1a::new(), digest: blake3::Hasher::new() };
        Some(CacheWriter { cache: self, len, entry: Some(entry) })
    }

    fn log_write_error(&self, e: &io::Error) {
        self.log(LogKind::CacheFailure, format_args!("cannot write to {}: {e}", self.folder.path().display()));
    }

    fn log_remove_error(&self, path: &Path, e: &io::Error) {
        self.log(LogKind::CacheFailure, format_args!("cannot remove {}: {e}", path.display()));
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
    fn open(mut file: File, key: EntryKey) -> Result<(CacheReader, u64), CacheError> {
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
        if r.array("owner")? != key.owner.as_bytes() || r.u64("hash")? != key.fnv {
            return Err(CacheError::Key);
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
    /// Length of the data.
    len: u64,
    /// `None` after an error: the data is not cached.
    entry: Option<PartialEntry<'a>>,
}

struct PartialEntry<'a> {
    cache: &'a TensorCache,
    // Dropped before the charge, so that the bytes are counted as long as the file exists.
    file: PartialFile<'a>,
    /// The part of the size limit that the upload holds: the bytes that it has written.
    charge: Reservation,
    owner: CacheOwner,
    fnv: Fnv1a,
    digest: blake3::Hasher,
}

impl CacheWriter<'_> {
    /// Appends the next bytes of the data. After an error, or if they do not fit, the file is removed and further bytes are
    /// ignored.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        let Some(entry) = &mut self.entry else { return };
        let written = entry.file.file().stream_position().and_then(|at| {
            let fits = self.cache.reserve_upload(&mut entry.charge, at.saturating_add(bytes.len() as u64));
            if fits {
                entry.fnv.update(bytes);
                entry.digest.update(bytes);
                entry.file.file().write_all(bytes)?;
            }
            Ok(fits)
        });
        match written {
            Ok(true) => return,
            // Not a warning: several large uploads at a time are no failure. Entries that cannot be evicted are logged.
            Ok(false) => debug!("cache: an upload of {} bytes does not fit beside others: it is not cached", self.len),
            Err(e) => self.cache.log_write_error(&e),
        }
        self.entry = None;
    }

    /// Completes the entry: writes its header and renames the file, so that the entry appears atomically. Errors are logged.
    pub(super) fn commit(self) {
        let CacheWriter { cache, len, entry } = self;
        if let Some(Err(e)) = entry.map(|entry| entry.complete(cache, len)) {
            cache.log_write_error(&e);
        }
    }
}

impl PartialEntry<'_> {
    fn complete(mut self, cache: &TensorCache, len: u64) -> io::Result<()> {
        let mut header = Vec::with_capacity(HEADER_BYTES);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&len.to_le_bytes());
        header.extend_from_slice(self.owner.as_bytes());
        header.extend_from_slice(&self.fnv.0.to_le_bytes());
        header.extend_from_slice(self.digest.finalize().as_bytes());
        self.file.file().seek(SeekFrom::Start(0))?;
        self.file.file().write_all(&header)?;
        let name: &OsStr = &EntryKey { owner: self.owner, fnv: self.fnv.0 }.file_name();
        // The charge is dropped after the lock: until then the file counts twice, which may only evict too much.
        let mut usage = cache.lock_usage();
        let replaced = cache.folder.open_file(name, Links::Refuse).map_or(0, |(_, meta)| meta.len());
        self.file.rename_to(name)?;
        usage.add_entry(self.charge.bytes(), replaced);
        Ok(())
    }
}

impl Drop for PartialEntry<'_> {
    fn drop(&mut self) {
        if let Err(e) = self.file.discard() {
            self.cache.log_remove_error(&self.file.path(), &e);
        }
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

    /// A file system that fills up in the middle of an entry, or before its header: a miss, and no file is left.
    #[cfg(target_os = "linux")]
    #[test]
    fn an_entry_on_a_full_file_system_is_not_cached() {
        let dir = tempfile::tempdir().expect("a folder");
        let config = CacheConfig { dir: dir.path().to_owned(), max_bytes: 1 << 20 };
        let logs = Arc::new(LogLimits::new(&crate::rpc::server::Config::default()));
        let cache = TensorCache::open(&config, &logs).expect("a cache");
        let (data, owner) = (vec![7; MIN_BYTES as usize], CacheOwner::new("one"));
        let (half, rest) = data.split_at(data.len() / 2);
        let mut fnv = Fnv1a::new();
        fnv.update(&data);
        for full_after in [0, 1, 2] {
            let mut writer = cache.begin_write(owner, MIN_BYTES).expect("a writer");
            for (step, part) in [half, rest, &[]].into_iter().enumerate() {
                if let (true, Some(entry)) = (step == full_after, &mut writer.entry) {
                    *entry.file.file() = File::options().write(true).open("/dev/full").expect("a device");
                }
                writer.update(part);
            }
            writer.commit();
            assert!(cache.lookup(EntryKey { owner, fnv: fnv.0 }, MIN_BYTES).is_none(), "{full_after}");
            assert_eq!(std::fs::read_dir(dir.path()).expect("the folder").count(), 0, "{full_after}");
        }
    }
}
