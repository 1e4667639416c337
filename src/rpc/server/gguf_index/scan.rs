//! Scanning the model folder: lists its valid GGUF files, and indexes their tensors by size in bytes.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::fs::{self, Metadata};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::SystemTime;

use log::warn;
use thiserror::Error;

use super::file::{self, FileError};
use crate::gguf::{self, HeadError};

/// Limit of the folder depth; the model folder itself is at depth 1.
const MAX_DEPTH: usize = 8;

/// Limit of directory entries per scan, over all folders.
const MAX_ENTRIES: usize = 1 << 16;

/// Tensors with longer names are not indexed: no model needs them.
const MAX_NAME_BYTES: usize = 256;

/// Limit of a log line about a file, in characters: an error may quote text of the file.
const MAX_PROBLEM_CHARS: usize = 300;

/// The tensor that a LOAD requests.
pub(in crate::rpc::server) struct WantedTensor<'a> {
    /// Name of the tensor in its file.
    pub(in crate::rpc::server) name: &'a str,
    /// BLAKE3 digest of its bytes.
    pub(in crate::rpc::server) digest: [u8; 32],
}

/// Why a file is not indexed.
#[derive(Debug, Error)]
enum ScanError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Head(#[from] HeadError),
}

/// Size and modification time of a file, to detect that it has changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct FileStamp {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl FileStamp {
    pub(super) fn of(meta: &Metadata) -> FileStamp {
        FileStamp { bytes: meta.len(), modified: meta.modified().ok() }
    }
}

/// A file whose header was read.
pub(super) struct IndexedFile {
    pub(super) path: PathBuf,
    pub(super) stamp: FileStamp,
    tensors: Vec<TensorEntry>,
    /// Number of tensors that were not indexed because the index had no room for them; `tensors` is empty then.
    dropped_tensors: usize,
    /// Whether the file has changed since it was read. Its tensors are no candidates until the next scan.
    stale: AtomicBool,
}

impl IndexedFile {
    /// A file with `tensors`; they are not indexed if there are more than `room`.
    fn new(path: &Path, meta: &Metadata, mut tensors: Vec<TensorEntry>, room: usize) -> IndexedFile {
        let mut dropped_tensors = 0;
        if tensors.len() > room {
            dropped_tensors = tensors.len();
            tensors = Vec::new();
        }
        IndexedFile {
            path: path.to_owned(),
            stamp: FileStamp::of(meta),
            tensors,
            dropped_tensors,
            stale: AtomicBool::new(false),
        }
    }

    /// Whether the entry can be reused in a new snapshot with room for `room` tensors, without reading the file again.
    fn is_unchanged(&self, meta: &Metadata, room: usize) -> bool {
        let unchanged = self.stamp == FileStamp::of(meta) && !self.stale.load(Ordering::Relaxed);
        unchanged && self.tensors.len() <= room && !(1..=room).contains(&self.dropped_tensors)
    }

    /// Marks the file as changed: its tensors are not read until the next scan.
    pub(super) fn mark_stale(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }
}

/// A tensor in a file's tensor list.
struct TensorEntry {
    name: Box<str>,
    /// Offset of its first byte in the file.
    start: u64,
    bytes: u64,
    /// BLAKE3 digest of its bytes, set when they were first read.
    digest: OnceLock<[u8; 32]>,
}

/// Reference to a tensor of an indexed file.
#[derive(Clone)]
pub(super) struct IndexedTensor {
    file: Arc<IndexedFile>,
    /// Index in the file's tensor list.
    tensor: usize,
}

impl IndexedTensor {
    pub(super) fn file(&self) -> &IndexedFile {
        &self.file
    }

    /// Offset of its first byte in the file.
    pub(super) fn start(&self) -> u64 {
        self.tensor().start
    }

    /// Size of its data in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.tensor().bytes
    }

    /// Stores the digest, so that later LOADs need not read the tensor to compare it.
    pub(super) fn cache_digest(&self, digest: [u8; 32]) {
        // An error means that another session has set the same digest.
        let _ = self.tensor().digest.set(digest);
    }

    fn tensor(&self) -> &TensorEntry {
        &self.file.tensors[self.tensor] // in bounds: created by `add_file`
    }

    /// Priority as a candidate, the lowest first: known digest, same name, same size only. `None` if it cannot match.
    fn rank(&self, wanted: &WantedTensor<'_>) -> Option<u8> {
        let tensor = self.tensor();
        match tensor.digest.get() {
            _ if self.file.stale.load(Ordering::Relaxed) => None,
            Some(known) => (*known == wanted.digest).then_some(0),
            None if *tensor.name == *wanted.name => Some(1),
            None => Some(2),
        }
    }
}

/// Result of a scan: the files of a folder and their tensors.
#[derive(Default)]
pub(super) struct IndexSnapshot {
    files: HashMap<PathBuf, Arc<IndexedFile>>,
    /// Tensors by their size in bytes.
    by_bytes: HashMap<u64, Vec<IndexedTensor>>,
    tensors: usize,
    /// Log lines about files that could not be indexed.
    problems: HashSet<String>,
}

impl IndexSnapshot {
    /// Number of files with at least one tensor.
    pub(super) fn files(&self) -> usize {
        self.files.values().filter(|file| !file.tensors.is_empty()).count()
    }

    /// Number of tensors.
    pub(super) fn tensors(&self) -> usize {
        self.tensors
    }

    /// Up to `max` tensors of `bytes` bytes that may be the wanted one, the most likely first.
    pub(super) fn candidates(&self, bytes: u64, wanted: &WantedTensor<'_>, max: usize) -> Vec<IndexedTensor> {
        let all = self.by_bytes.get(&bytes).into_iter().flatten();
        let mut ranked: Vec<_> = all.filter_map(|candidate| Some((candidate.rank(wanted)?, candidate))).collect();
        ranked.sort_by_key(|&(rank, _)| rank);
        ranked.into_iter().take(max).map(|(_, candidate)| candidate.clone()).collect()
    }

    /// Logs a problem with a file, unless the previous snapshot `before` has logged the same.
    fn log_problem(&mut self, before: &IndexSnapshot, path: &Path, problem: &str) {
        let line: String = format!("models: {}: {problem}", path.display()).chars().take(MAX_PROBLEM_CHARS).collect();
        // Logged once while the problem persists.
        if !before.problems.contains(&line) && !self.problems.contains(&line) {
            warn!("{line}");
        }
        self.problems.insert(line);
    }

    /// Adds the file at `path`. Its header is read unless the previous snapshot `before` has it unchanged.
    fn index_file(&mut self, path: &Path, before: &IndexSnapshot, max: usize) {
        let meta = match fs::metadata(path) {
            Ok(meta) if meta.is_file() => meta,
            Ok(_) => return,
            Err(e) => return self.log_problem(before, path, &e.to_string()),
        };
        let room = max.saturating_sub(self.tensors);
        let file = match before.files.get(path) {
            Some(file) if file.is_unchanged(&meta, room) => Arc::clone(file),
            _ => match read_tensor_list(path) {
                Ok((meta, tensors)) => Arc::new(IndexedFile::new(path, &meta, tensors, room)),
                Err(e) => {
                    self.log_problem(before, path, &format!("left out of the index: {e}"));
                    // An invalid file is recorded without tensors, so that it is not read again until it changes. IO errors
                    // may be temporary.
                    if matches!(e, ScanError::File(_) | ScanError::Head(HeadError::Io(_))) {
                        return;
                    }
                    Arc::new(IndexedFile::new(path, &meta, Vec::new(), room))
                }
            },
        };
        if file.dropped_tensors > 0 {
            self.log_problem(
                before,
                path,
                &format!("left out of the index: its tensors would exceed the limit of {max} tensors"),
            );
        }
        self.add_file(file);
    }

    fn add_file(&mut self, file: Arc<IndexedFile>) {
        for (index, tensor) in file.tensors.iter().enumerate() {
            let candidate = IndexedTensor { file: Arc::clone(&file), tensor: index };
            self.by_bytes.entry(tensor.bytes).or_default().push(candidate);
        }
        self.tensors += file.tensors.len();
        self.files.insert(file.path.clone(), file);
    }
}

/// Scans a folder for up to `max` tensors, while `should_continue` returns true. Files that have not changed since the snapshot
/// `before` are not read again. If the scan is aborted, the entries of the remaining files are copied from `before`.
pub(super) fn scan_folder(
    dir: &Path,
    before: &IndexSnapshot,
    max: usize,
    should_continue: &dyn Fn() -> bool,
) -> IndexSnapshot {
    let mut snapshot = IndexSnapshot::default();
    let mut paths = list_gguf_files(dir, before, &mut snapshot, should_continue);
    paths.sort();
    for path in &paths {
        if !should_continue() {
            break;
        }
        snapshot.index_file(path, before, max);
    }
    if !should_continue() {
        snapshot.log_problem(before, dir, "the scan took too long: the next scan continues with the remaining files");
        for (path, file) in &before.files {
            if !snapshot.files.contains_key(path) && snapshot.tensors + file.tensors.len() <= max {
                snapshot.add_file(Arc::clone(file));
            }
        }
    }
    snapshot
}

/// Paths of all files with the extension `gguf` in a folder and its subfolders. Symbolic links are followed, because only the
/// operator can create them.
fn list_gguf_files(
    dir: &Path,
    before: &IndexSnapshot,
    snapshot: &mut IndexSnapshot,
    should_continue: &dyn Fn() -> bool,
) -> Vec<PathBuf> {
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut folders = vec![(dir.to_owned(), 1)];
    let mut entries = 0;
    while let Some((folder, depth)) = folders.pop() {
        // A folder that is reachable by several paths is visited once. This also ends cycles of symbolic links.
        let first_visit = fs::canonicalize(&folder).and_then(|real| Ok((seen.insert(real), fs::read_dir(&folder)?)));
        let listing = match first_visit {
            Ok((true, listing)) => listing,
            Ok((false, _)) => continue,
            Err(e) => {
                snapshot.log_problem(before, &folder, &e.to_string());
                continue;
            }
        };
        for entry in listing.map_while(Result::ok) {
            entries += 1;
            if !should_continue() {
                return found;
            }
            if entries > MAX_ENTRIES {
                snapshot.log_problem(
                    before,
                    dir,
                    &format!("more than {MAX_ENTRIES} directory entries: the rest is ignored"),
                );
                return found;
            }
            let path = entry.path();
            if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf")) {
                found.push(path.clone());
            }
            if path.is_dir() {
                if depth < MAX_DEPTH {
                    folders.push((path, depth + 1));
                } else {
                    snapshot.log_problem(before, &path, &format!("nested deeper than {MAX_DEPTH} folders: ignored"));
                }
            }
        }
    }
    found
}

/// Reads a file's header: its tensors' names, offsets and sizes.
fn read_tensor_list(path: &Path) -> Result<(Metadata, Vec<TensorEntry>), ScanError> {
    let (file, meta) = file::open(path)?;
    let tensors = gguf::read_tensors(file, meta.len())?;
    let tensors = tensors.into_iter().filter(|info| info.name.len() <= MAX_NAME_BYTES).map(|info| TensorEntry {
        name: info.name.into(),
        start: info.bytes.start as u64,
        bytes: info.bytes.len() as u64,
        digest: OnceLock::new(),
    });
    Ok((meta, tensors.collect()))
}
