//! The tensor cache: data that a client asked to keep, found again by its FNV-1a.
//!
//! One file per hash: a header (magic, version, length, FNV, blake3), then the data. FNV-1a comes from the protocol and
//! can be forged, so whoever may fill a cache can put other data in its place for everyone who shares the cache; our
//! own digest only tells that a file is what was once written. Hence the cache is opt-in.
//!
//! Its failures are never a session's: what cannot be read is a miss, what cannot be written is not kept.

use std::fs::{self, File, FileTimes};
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use log::{info, warn};
use thiserror::Error;

use super::limits::CacheConfig;
use crate::rpc::wire::{Reader, WireError};

const MAGIC: &[u8; 8] = b"fanoutTC";
const VERSION: u32 = 1;

/// Bytes before the data: magic, version, length, FNV, blake3.
const HEADER: usize = 8 + 4 + 8 + 8 + 32;

/// Less than this is sent again sooner than it is found. Clients ask from 10 MiB on.
const MIN_BYTES: u64 = 64 << 10;

/// Unfinished files of this age belong to a server that is gone.
const STALE: Duration = Duration::from_secs(24 * 3600);

const KEPT: &str = "tensor";
const UNFINISHED: &str = "part";

/// Why a file of the cache is of no use.
#[derive(Debug, Error)]
pub(super) enum CacheError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error(transparent)]
    Header(#[from] WireError),
    #[error("not a file of this cache's version")]
    Version,
    #[error("its length is not what its header says")]
    Length,
    #[error("it holds the data of another hash")]
    Hash,
    #[error("its data does not have the digest that its header says")]
    Digest,
}

/// A cache in a folder. Several servers may share one.
pub(super) struct Cache {
    dir: PathBuf,
    max_bytes: u64,
    /// Bytes of its files, as far as we know; counted anew when they seem too many.
    total: Mutex<u64>,
}

impl Cache {
    /// Opens a folder, made if need be.
    pub(super) fn open(config: &CacheConfig) -> io::Result<Cache> {
        fs::create_dir_all(&config.dir)?;
        let cache = Cache { dir: config.dir.clone(), max_bytes: config.max_bytes, total: Mutex::new(0) };
        for (path, _, modified) in cache.files(UNFINISHED)? {
            if modified.elapsed().is_ok_and(|age| age > STALE) {
                remove_if_there(&path);
            }
        }
        *cache.total() = cache.files(KEPT)?.iter().map(|(_, bytes, _)| bytes).sum();
        cache.make_room(0);
        Ok(cache)
    }

    /// The data of a hash, if there is a file for it that holds exactly `len` bytes. What it yields is to be trusted only
    /// once [`CacheReader::verify`] says so.
    pub(super) fn find(&self, fnv: u64, len: u64) -> Option<CacheReader> {
        let path = self.path(fnv);
        let file = File::options().read(true).open(&path).ok()?;
        match CacheReader::open(file, fnv) {
            Ok((hit, have)) if have == len => Some(hit),
            // A part of the data, or other data of the same hash: not what is asked for, but not broken either.
            Ok(_) => None,
            Err(e) => {
                self.drop_file(fnv, &e);
                None
            }
        }
    }

    /// Drops a file that is not what it should be, or cannot be read.
    pub(super) fn drop_file(&self, fnv: u64, why: &CacheError) {
        let path = self.path(fnv);
        warn!("cache: {} is dropped: {why}", path.display());
        remove_if_there(&path);
    }

    /// Begins to keep `len` bytes that are about to come; `None` if they are not worth it or cannot be kept.
    pub(super) fn keep(&self, len: u64) -> Option<CacheWriter<'_>> {
        if len < MIN_BYTES || len.saturating_add(HEADER as u64) > self.max_bytes {
            return None;
        }
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let path = self.dir.join(format!("{}-{number}.{UNFINISHED}", std::process::id()));
        let begin = || {
            let mut file = File::create(&path)?;
            file.write_all(&[0; HEADER])?;
            Ok(file)
        };
        let file = begin().inspect_err(|e: &io::Error| warn!("cache: cannot write {}: {e}", path.display())).ok()?;
        Some(CacheWriter { cache: self, file, path, len, fnv: Fnv::new(), digest: blake3::Hasher::new(), failed: None })
    }

    /// Removes files, the longest unused first, until `more` bytes fit.
    fn make_room(&self, more: u64) {
        let mut total = self.total();
        *total = total.saturating_add(more);
        if *total <= self.max_bytes {
            return;
        }
        let removed = self.files(KEPT).map(|mut files| {
            files.sort_by_key(|&(_, _, modified)| modified);
            // What the newcomer takes is not on the list yet.
            *total = files.iter().map(|(_, bytes, _)| bytes).sum::<u64>().saturating_add(more);
            for (path, bytes, _) in files {
                if *total <= self.max_bytes {
                    break;
                }
                info!("cache: {} makes room", path.display());
                remove_if_there(&path);
                *total -= bytes;
            }
        });
        if let Err(e) = removed {
            warn!("cache: cannot make room in {}: {e}", self.dir.display());
        }
    }

    /// Path, bytes and time of last use of the files with this ending.
    fn files(&self, ending: &str) -> io::Result<Vec<(PathBuf, u64, SystemTime)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.dir)? {
            let path = entry?.path();
            if path.extension().is_some_and(|e| e == ending) {
                // Another server may have removed it since.
                if let Ok(meta) = fs::metadata(&path) {
                    files.push((path, meta.len(), meta.modified()?));
                }
            }
        }
        Ok(files)
    }

    fn path(&self, fnv: u64) -> PathBuf {
        self.dir.join(format!("{fnv:016x}.{KEPT}"))
    }

    fn total(&self) -> MutexGuard<'_, u64> {
        // A number is whole at every moment.
        self.total.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A file that may hold the data asked for.
pub(super) struct CacheReader {
    file: BufReader<File>,
    want: blake3::Hash,
    digest: blake3::Hasher,
}

impl CacheReader {
    /// Reads the header; also returns the length of the data.
    fn open(mut file: File, fnv: u64) -> Result<(CacheReader, u64), CacheError> {
        let mut header = [0; HEADER];
        file.read_exact(&mut header)?;
        let mut r = Reader::new(&header);
        if r.array("magic")? != MAGIC || r.u32("version")? != VERSION {
            return Err(CacheError::Version);
        }
        let len = r.u64("length")?;
        if file.metadata()?.len().checked_sub(HEADER as u64) != Some(len) {
            return Err(CacheError::Length);
        }
        if r.u64("hash")? != fnv {
            return Err(CacheError::Hash);
        }
        let want = blake3::Hash::from_bytes(*r.array("digest")?);
        // The longest unused is the first to go: this one has just been used. Not worth failing for.
        let _ = file.set_times(FileTimes::new().set_modified(SystemTime::now()));
        Ok((CacheReader { file: BufReader::new(file), want, digest: blake3::Hasher::new() }, len))
    }

    /// Reads the next bytes of the data.
    pub(super) fn read(&mut self, dst: &mut [u8]) -> Result<(), CacheError> {
        self.file.read_exact(dst)?;
        self.digest.update(dst);
        Ok(())
    }

    /// Whether all that was read is what was once written.
    pub(super) fn verify(&self) -> Result<(), CacheError> {
        if self.digest.finalize() == self.want { Ok(()) } else { Err(CacheError::Digest) }
    }
}

/// Data on its way into the cache. Dropped before [`CacheWriter::commit`], it leaves nothing.
pub(super) struct CacheWriter<'a> {
    cache: &'a Cache,
    file: File,
    path: PathBuf,
    len: u64,
    fnv: Fnv,
    digest: blake3::Hasher,
    failed: Option<io::Error>,
}

impl CacheWriter<'_> {
    /// Takes the next bytes of the data.
    pub(super) fn update(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.fnv.update(bytes);
            self.digest.update(bytes);
            self.failed = self.file.write_all(bytes).err();
        }
    }

    /// Puts the complete data in its place.
    pub(super) fn commit(mut self) {
        if let Err(e) = self.finish() {
            warn!("cache: cannot write {}: {e}", self.path.display());
        }
    }

    fn finish(&mut self) -> io::Result<()> {
        if let Some(e) = self.failed.take() {
            return Err(e);
        }
        let mut header = Vec::with_capacity(HEADER);
        header.extend_from_slice(MAGIC);
        header.extend_from_slice(&VERSION.to_le_bytes());
        header.extend_from_slice(&self.len.to_le_bytes());
        header.extend_from_slice(&self.fnv.0.to_le_bytes());
        header.extend_from_slice(self.digest.finalize().as_bytes());
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&header)?;
        let to = self.cache.path(self.fnv.0);
        let replaced = fs::metadata(&to).map_or(0, |meta| meta.len());
        self.cache.make_room((self.len + HEADER as u64).saturating_sub(replaced));
        fs::rename(&self.path, to)
    }
}

impl Drop for CacheWriter<'_> {
    fn drop(&mut self) {
        // After a commit it is not there any more.
        remove_if_there(&self.path);
    }
}

/// Another server, or another session, may have been faster.
fn remove_if_there(path: &Path) {
    if let Err(e) = fs::remove_file(path)
        && e.kind() != io::ErrorKind::NotFound
    {
        warn!("cache: cannot remove {}: {e}", path.display());
    }
}

/// 64-bit FNV-1a, the protocol's name for data.
struct Fnv(u64);

impl Fnv {
    const fn new() -> Fnv {
        Fnv(0xcbf2_9ce4_8422_2325)
    }

    fn update(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |h, &byte| (h ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fnv_of_published_vectors() {
        for (text, want) in
            [("", 0xcbf2_9ce4_8422_2325), ("a", 0xaf63_dc4c_8601_ec8c), ("foobar", 0x8594_4171_f739_67e8_u64)]
        {
            let mut fnv = Fnv::new();
            fnv.update(text.as_bytes());
            assert_eq!(fnv.0, want, "{text:?}");
        }
    }
}
