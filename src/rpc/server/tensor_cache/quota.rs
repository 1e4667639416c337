//! The size limit of a tensor cache: counts the entries and the uploads in progress, and evicts the least recently used entries.

use crate::poison::Unpoisoned;
use std::ffi::OsString;
use std::io;
use std::mem;
use std::sync::MutexGuard;
use std::time::SystemTime;

use super::{ENTRY_EXTENSION, TensorCache};
use crate::device::Reservation;
use crate::rpc::server::folder::Links;
use crate::rpc::server::log_limits::LogKind;

/// Eviction candidates that one listing of the folder yields. A listing opens every entry (0.5 s for 100,000) while uploads
/// wait, so it has to serve many evictions. A candidate takes about 100 bytes of memory.
const MAX_CANDIDATES: usize = 4096;

/// Bytes of the cache, headers included, and the entries to evict next.
#[derive(Default)]
pub(super) struct Usage {
    /// Estimated size of all entries. Each listing counts it anew, because other servers may add and remove entries.
    entries: u64,
    /// Eviction candidates: the least recently used entries of the last listing, the oldest one last. Entries that were added
    /// or used since then are younger than all of them, so the order stays valid without them.
    candidates: Vec<Entry>,
    #[cfg(test)]
    listings: usize,
}

/// A file of the cache.
struct Entry {
    name: OsString,
    /// Size of the file.
    bytes: u64,
    last_use: SystemTime,
}

impl Usage {
    /// Counts a new entry that has replaced `replaced` bytes of an older one.
    pub(super) fn add_entry(&mut self, bytes: u64, replaced: u64) {
        self.entries = self.entries.saturating_sub(replaced).saturating_add(bytes);
    }

    /// Discards the listing after an entry was removed for another reason than its age. Its size on the disk may not be the one
    /// that was counted.
    pub(super) fn invalidate_listing(&mut self) {
        self.candidates.clear();
    }
}

impl TensorCache {
    /// Counts the entries, and evicts those beyond the limit.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(super) fn evict_at_start(&self) -> io::Result<()> {
        let mut usage = self.lock_usage();
        self.list_entries(&mut usage)?;
        self.evict_until_fits(&mut usage);
        Ok(())
    }

    /// Reserves the first `bytes` bytes of an upload's file before they are written. Returns whether they fit; if not, nothing
    /// more is reserved. An upload reserves what has arrived: a client that announces a large upload and sends nothing neither
    /// empties the cache nor keeps other clients from it.
    pub(super) fn reserve_upload(&self, upload: &mut Reservation, bytes: u64) -> bool {
        let before = upload.bytes();
        let mut usage = self.lock_usage();
        // What uploads alone exceed needs no listing, which could not help.
        let fits = upload.grow(bytes.saturating_sub(before)).is_ok() && self.evict_until_fits(&mut usage);
        if !fits {
            upload.shrink_to(before);
        }
        fits
    }

    /// Evicts the least recently used entries until they fit beside the uploads in progress. Returns whether they do.
    fn evict_until_fits(&self, usage: &mut Usage) -> bool {
        let mut listed = false;
        while usage.entries.saturating_add(self.uploads.used()) > self.uploads.limit() {
            if let Some(entry) = usage.candidates.pop() {
                self.evict(usage, &entry);
            } else if mem::replace(&mut listed, true) {
                return false;
            } else if let Err(e) = self.list_entries(usage) {
                let folder = self.folder.path().display();
                self.log(LogKind::CacheFailure, format_args!("cannot evict entries in {folder}: {e}"));
                return false;
            }
        }
        let excess = usage.candidates.len().saturating_sub(MAX_CANDIDATES);
        if excess > 0 {
            usage.candidates.drain(..excess);
            usage.candidates.shrink_to_fit();
        }
        true
    }

    /// Removes an entry, unless it was used or replaced since the listing. The size of an entry that is gone or cannot be
    /// removed still counts, so that the folder does not grow beyond its limit: another server on the folder has evicted the
    /// entry to write others in its place.
    fn evict(&self, usage: &mut Usage, entry: &Entry) {
        let now = self.folder.open_file(&entry.name, Links::Refuse).ok().and_then(|(_, meta)| meta.modified().ok());
        if now == Some(entry.last_use) && self.remove(&entry.name) {
            self.log(LogKind::CacheEviction, format_args!("evicted {}", self.folder.path_of(&entry.name).display()));
            usage.entries = usage.entries.saturating_sub(entry.bytes);
        }
    }

    /// Lists the folder: counts its entries, and makes all of them candidates.
    fn list_entries(&self, usage: &mut Usage) -> io::Result<()> {
        let mut entries = Vec::new();
        for name in self.folder.files_with_extension(ENTRY_EXTENSION)? {
            // Another server may have removed the file in the meantime.
            if let Ok((_, meta)) = self.folder.open_file(&name, Links::Refuse) {
                entries.push(Entry { name, bytes: meta.len(), last_use: meta.modified()? });
            }
        }
        entries.sort_by_key(|entry| std::cmp::Reverse(entry.last_use));
        usage.entries = entries.iter().map(|entry| entry.bytes).sum();
        usage.candidates = entries;
        #[cfg(test)]
        {
            usage.listings += 1;
        }
        Ok(())
    }

    pub(super) fn lock_usage(&self) -> MutexGuard<'_, Usage> {
        // A panic can leave the numbers too large, which costs cache, but not wrong in the other direction.
        self.usage.lock().unpoisoned()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{CacheOwner, HEADER_BYTES};
    use super::*;
    use crate::rpc::server::limits::{CacheConfig, Config};
    use crate::rpc::server::log_limits::LogLimits;
    use std::fs::{self, File};
    use std::path::{Path, PathBuf};
    use std::sync::Arc;
    use std::time::Duration;

    const DATA_BYTES: usize = 64 << 10;
    const ENTRY_BYTES: u64 = (DATA_BYTES + HEADER_BYTES) as u64;

    fn open(dir: &Path, max_entries: u64) -> TensorCache {
        let logs = Arc::new(LogLimits::new(&Config::default()));
        TensorCache::open(&CacheConfig::new(dir).with_max_bytes(max_entries * ENTRY_BYTES), &logs).expect("a folder")
    }

    fn write(cache: &TensorCache, number: usize) {
        let mut data = vec![0; DATA_BYTES];
        data[..8].copy_from_slice(&number.to_le_bytes());
        let mut writer = cache.begin_write(CacheOwner::new("one"), DATA_BYTES as u64).expect("a writer");
        data.chunks(DATA_BYTES / 4).for_each(|chunk| writer.update(chunk));
        writer.commit();
    }

    fn listings(cache: &TensorCache) -> usize {
        cache.lock_usage().listings
    }

    /// Files that look like entries, as an eviction sees them, from the oldest to the youngest.
    fn write_old_entries(dir: &Path, count: usize) -> Vec<PathBuf> {
        let write = |number: usize| {
            let path = dir.join(format!("{number:016x}.{ENTRY_EXTENSION}"));
            let file = File::create(&path).expect("a file");
            file.set_len(ENTRY_BYTES).expect("a size");
            let age = Duration::from_secs((3600 + count - number) as u64);
            file.set_modified(SystemTime::now() - age).expect("a time");
            path
        };
        (0..count).map(write).collect()
    }

    #[test]
    fn one_listing_serves_the_evictions_of_many_uploads() {
        const ENTRIES: usize = 100;
        let dir = tempfile::tempdir().expect("a folder");
        let old = write_old_entries(dir.path(), ENTRIES);
        let cache = open(dir.path(), ENTRIES as u64);
        for number in 0..ENTRIES / 2 {
            write(&cache, number);
        }
        assert_eq!(listings(&cache), 1, "at the start");
        let left: Vec<_> = old.iter().map(|path| path.exists()).collect();
        // Until it is complete, an upload counts beside the entries, so each one evicts the next-oldest entry.
        assert_eq!(left, [vec![false; ENTRIES / 2], vec![true; ENTRIES / 2]].concat());
        // The rest of the listing is used up, and the entries that were written since are in the next one.
        for number in ENTRIES / 2..2 * ENTRIES {
            write(&cache, number);
        }
        assert_eq!(fs::read_dir(dir.path()).expect("the folder").count(), ENTRIES);
        assert_eq!(listings(&cache), 2);
    }

    /// An entry that was used after the listing is not among the least recently used ones any more.
    #[test]
    fn entries_used_or_removed_since_the_listing_are_passed_over() {
        let dir = tempfile::tempdir().expect("a folder");
        let old = write_old_entries(dir.path(), 4);
        let cache = open(dir.path(), 4);
        File::options().write(true).open(&old[0]).expect("a file").set_modified(SystemTime::now()).expect("a time");
        fs::remove_file(&old[1]).expect("removed");
        write(&cache, 0);
        assert_eq!(old.iter().map(|path| path.exists()).collect::<Vec<_>>(), [true, false, false, true]);
        assert_eq!(listings(&cache), 1);
    }

    #[test]
    fn candidates_beyond_the_limit_are_forgotten_and_listed_again() {
        const ENTRIES: usize = MAX_CANDIDATES + 10;
        let dir = tempfile::tempdir().expect("a folder");
        write_old_entries(dir.path(), ENTRIES + 5);
        let cache = open(dir.path(), ENTRIES as u64);
        let usage = cache.lock_usage();
        assert_eq!(
            (usage.candidates.len(), usage.entries, usage.listings),
            (MAX_CANDIDATES, ENTRIES as u64 * ENTRY_BYTES, 1)
        );
        assert!(usage.candidates.capacity() <= 2 * MAX_CANDIDATES);
    }

    /// A client that announces an upload as large as the cache and sends little of it must not keep others from caching.
    #[test]
    fn an_upload_counts_as_far_as_it_has_arrived() {
        let dir = tempfile::tempdir().expect("a folder");
        let cache = open(dir.path(), 2);
        let announced = 2 * ENTRY_BYTES - HEADER_BYTES as u64;
        let mut slow = cache.begin_write(CacheOwner::new("one"), announced).expect("a writer");
        slow.update(&[1; 100]);
        assert!(cache.begin_write(CacheOwner::new("one"), announced + 1).is_none(), "larger than the cache");
        write(&cache, 0);
        let entries = || cache.folder.files_with_extension(ENTRY_EXTENSION).expect("the folder").len();
        assert_eq!(entries(), 1);
        // Its bytes evict entries when they arrive, and what does not fit beside other uploads is not cached.
        slow.update(&vec![1; announced as usize - 100 - DATA_BYTES]);
        assert_eq!(entries(), 0);
        let mut other = cache.begin_write(CacheOwner::new("one"), DATA_BYTES as u64).expect("a writer");
        other.update(&[2; DATA_BYTES]);
        other.commit();
        assert_eq!(entries(), 0);
        drop(slow);
        assert_eq!(cache.uploads.used(), 0);
        write(&cache, 1);
        assert_eq!(entries(), 1);
    }
}
