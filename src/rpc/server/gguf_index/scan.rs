//! Scanning the model folder: lists its valid GGUF files, and indexes their tensors by digest.

#[cfg(test)]
mod tests;

use crate::poison::Unpoisoned;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::{File, Metadata};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use log::warn;
use thiserror::Error;

use super::digest_file::{KnownDigests, TensorDigests};
use super::file::{FileIdentity, ListedFile, follows_links};
use super::hashing::INITIAL_SCAN_TIMEOUT;
use crate::gguf::{self, HeadError};
use crate::rpc::server::folder::{EntryKind, FileError, Folder, FolderId, Links};

/// Limit of the folder depth; the model folder itself is at depth 1.
const MAX_DEPTH: usize = 8;

/// Limit of directory entries per scan, over all folders.
const MAX_ENTRIES: usize = 1 << 16;

/// Limit of indexed tensors, over all files.
pub(super) const MAX_TENSORS: usize = 1 << 18;

/// Limit of a log line about a file, in characters: an error may quote text of the file.
const MAX_PROBLEM_CHARS: usize = 300;

/// Why a file is not indexed.
#[derive(Debug, Error)]
enum ScanError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Head(#[from] HeadError),
}

/// A file whose header was read.
pub(in crate::rpc::server) struct IndexedFile {
    pub(super) listed: ListedFile,
    pub(super) identity: FileIdentity,
    tensors: Vec<TensorEntry>,
    /// Number of tensors that were not indexed because the index had no room for them; `tensors` is empty then.
    dropped_tensors: usize,
    /// Whether the file has changed since it was read. Its tensors are no candidates until the next scan.
    stale: AtomicBool,
}

impl IndexedFile {
    /// A file with `tensors`; they are not indexed if there are more than `room`.
    fn new(listed: &ListedFile, identity: FileIdentity, mut tensors: Vec<TensorEntry>, room: usize) -> IndexedFile {
        let mut dropped_tensors = 0;
        if tensors.len() > room {
            dropped_tensors = tensors.len();
            tensors = Vec::new();
        }
        IndexedFile { listed: listed.clone(), identity, tensors, dropped_tensors, stale: AtomicBool::new(false) }
    }

    pub(in crate::rpc::server) fn path(&self) -> &Path {
        &self.listed.path
    }

    /// Whether the entry can be reused in a new snapshot with room for `room` tensors, without reading the file again.
    fn is_unchanged(&self, identity: FileIdentity, room: usize) -> bool {
        let unchanged = self.identity == identity && !self.is_stale();
        unchanged && self.tensors.len() <= room && !(1..=room).contains(&self.dropped_tensors)
    }

    /// Marks the file as changed: its tensors are not read until the next scan, after which they are hashed again.
    pub(super) fn mark_stale(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Relaxed)
    }
}

/// A tensor in a file's tensor list.
struct TensorEntry {
    /// Offset of its first byte in the file.
    start: u64,
    bytes: u64,
    /// BLAKE3 digest of its bytes, set when they were hashed.
    digest: OnceLock<[u8; 32]>,
}

/// Reference to a tensor of an indexed file.
#[derive(Clone)]
pub(in crate::rpc::server) struct IndexedTensor {
    file: Arc<IndexedFile>,
    /// Index in the file's tensor list.
    tensor: usize,
}

impl IndexedTensor {
    pub(in crate::rpc::server) fn file(&self) -> &IndexedFile {
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

    fn tensor(&self) -> &TensorEntry {
        &self.file.tensors[self.tensor] // in bounds: created from the file's list
    }
}

/// Result of a scan: the files of a folder and their tensors.
#[derive(Default)]
pub(super) struct IndexSnapshot {
    files: HashMap<PathBuf, Arc<IndexedFile>>,
    /// Tensors by the digest of their bytes, as far as it is known.
    by_digest: Mutex<DigestTable>,
    tensors: usize,
    /// Log lines about files that could not be indexed.
    problems: HashSet<String>,
}

#[derive(Default)]
struct DigestTable {
    tensors: HashMap<[u8; 32], Vec<IndexedTensor>>,
    /// Number of tensors in the table.
    count: usize,
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

    /// Number of tensors whose digest is known.
    pub(super) fn hashed_tensors(&self) -> usize {
        self.lock_table().count
    }

    /// Up to `max` tensors of `bytes` bytes with a digest.
    pub(super) fn find(&self, bytes: u64, digest: &[u8; 32], max: usize) -> Vec<IndexedTensor> {
        let table = self.lock_table();
        let found = table.tensors.get(digest).into_iter().flatten();
        found.filter(|tensor| tensor.bytes() == bytes && !tensor.file.is_stale()).take(max).cloned().collect()
    }

    /// Adds a tensor that was hashed.
    pub(super) fn add_digest(&self, tensor: IndexedTensor, digest: [u8; 32]) {
        // The thread that hashes sets each digest once.
        if tensor.tensor().digest.set(digest).is_ok() {
            self.add_to_table(tensor, digest);
        }
    }

    fn add_to_table(&self, tensor: IndexedTensor, digest: [u8; 32]) {
        let mut table = self.lock_table();
        table.tensors.entry(digest).or_default().push(tensor);
        table.count += 1;
    }

    /// The files with tensors that are to be hashed, in the order of their paths.
    pub(super) fn unhashed_files(&self) -> Vec<Arc<IndexedFile>> {
        let unhashed =
            |file: &&Arc<IndexedFile>| !file.is_stale() && file.tensors.iter().any(|t| t.digest.get().is_none());
        let mut files: Vec<_> = self.files.values().filter(unhashed).cloned().collect();
        files.sort_by(|a, b| a.listed.cmp(&b.listed));
        files
    }

    /// The tensors of a file that are to be hashed.
    pub(super) fn unhashed_tensors(file: &Arc<IndexedFile>) -> Vec<IndexedTensor> {
        let unhashed = |&(_, tensor): &(usize, &TensorEntry)| tensor.digest.get().is_none();
        let reference = |(tensor, _)| IndexedTensor { file: Arc::clone(file), tensor };
        file.tensors.iter().enumerate().filter(unhashed).map(reference).collect()
    }

    /// The digests of all files.
    pub(super) fn known_digests(&self) -> Vec<(FileIdentity, TensorDigests)> {
        let digest = |tensor: &TensorEntry| Some((tensor.start, tensor.bytes, *tensor.digest.get()?));
        let digests = |file: &Arc<IndexedFile>| (file.identity, file.tensors.iter().filter_map(digest).collect());
        self.files
            .values()
            .filter(|file| !file.is_stale())
            .map(digests)
            .filter(|(_, digests): &(_, TensorDigests)| !digests.is_empty())
            .collect()
    }

    fn lock_table(&self) -> MutexGuard<'_, DigestTable> {
        // Tensors are only added, so a panic leaves the table usable.
        self.by_digest.lock().unpoisoned()
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

    /// Adds a file. Its header is read unless the previous snapshot `before` has it unchanged.
    fn index_file(&mut self, listed: &ListedFile, before: &IndexSnapshot, max: usize, known: &mut KnownDigests) {
        let path = &listed.path;
        let (opened, meta) = match listed.open() {
            Ok(opened) => opened,
            Err(e) => return self.log_problem(before, path, &format!("left out of the index: {e}")),
        };
        let identity = FileIdentity::of(&meta);
        let room = max.saturating_sub(self.tensors);
        let file = match before.files.get(path) {
            Some(file) if file.is_unchanged(identity, room) => Arc::clone(file),
            _ => match read_tensor_list(opened, &meta) {
                Ok(tensors) => {
                    set_known_digests(&tensors, known.remove(&identity).unwrap_or_default());
                    Arc::new(IndexedFile::new(listed, identity, tensors, room))
                }
                Err(e) => {
                    self.log_problem(before, path, &format!("left out of the index: {e}"));
                    // An invalid file is recorded without tensors, so that it is not read again until it changes. IO errors
                    // may be temporary.
                    if matches!(e, ScanError::File(_) | ScanError::Head(HeadError::Io(_))) {
                        return;
                    }
                    Arc::new(IndexedFile::new(listed, identity, Vec::new(), room))
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
            if let Some(digest) = tensor.digest.get() {
                self.add_to_table(IndexedTensor { file: Arc::clone(&file), tensor: index }, *digest);
            }
        }
        self.tensors += file.tensors.len();
        self.files.insert(file.listed.path.clone(), file);
    }
}

/// Scans a folder for up to `max` tensors, while `should_continue` returns true. Files that have not changed since the snapshot
/// `before` are not read again; new ones take their digests from `known`. If the scan is aborted, the entries of the remaining
/// files are copied from `before`.
pub(super) fn scan_folder(
    dir: &Path,
    before: &IndexSnapshot,
    max: usize,
    known: &mut KnownDigests,
    should_continue: &dyn Fn() -> bool,
) -> IndexSnapshot {
    let mut snapshot = IndexSnapshot::default();
    let Listing { mut files, problems, .. } = list_gguf_files(dir, should_continue);
    for (problem, paths) in problems {
        // One line for each kind of problem: a folder may have thousands of subfolders that this user may not read.
        if let Some(first) = paths.first() {
            let more = if paths.len() > 1 { format!(" (and {} more)", paths.len() - 1) } else { String::new() };
            snapshot.log_problem(before, first, &format!("{problem}{more}"));
        }
    }
    files.sort();
    for listed in &files {
        if !should_continue() {
            break;
        }
        snapshot.index_file(listed, before, max, known);
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

/// The targets of the symbolic links that a server follows in a folder of models ([`Config::models`]): GGUF files and folders,
/// by paths without links. A program that restricts its own access to files needs them beside the folder. The search ends after
/// 5 s, as the first scan of a server does; targets that it has not found by then are missing, and the log has a warning.
///
/// [`Config::models`]: crate::rpc::server::Config::models
pub fn model_link_targets(dir: &Path) -> Vec<PathBuf> {
    let until = Instant::now() + INITIAL_SCAN_TIMEOUT;
    let Listing { files, linked_folders, .. } = list_gguf_files(dir, &|| Instant::now() < until);
    if Instant::now() >= until {
        warn!("models: {}: not searched within {INITIAL_SCAN_TIMEOUT:?}: some links may not work", dir.display());
    }
    let linked_files = files.into_iter().filter(|file| file.is_link).map(|file| file.path);
    // A link that was removed meanwhile has no target.
    linked_files.chain(linked_folders).filter_map(|link| std::fs::canonicalize(link).ok()).collect()
}

/// What a folder and its subfolders contain.
#[derive(Default)]
struct Listing {
    /// All files with the extension `gguf`.
    files: Vec<ListedFile>,
    /// Symbolic links to folders that were listed, too.
    linked_folders: Vec<PathBuf>,
    /// What could not be listed, by the reason.
    problems: BTreeMap<String, BTreeSet<PathBuf>>,
}

/// Lists all files with the extension `gguf` in a folder and its subfolders.
fn list_gguf_files(dir: &Path, should_continue: &dyn Fn() -> bool) -> Listing {
    let mut lister = Lister { root: dir, should_continue, found: Listing::default(), seen: HashSet::new(), entries: 0 };
    match Folder::open(dir) {
        Ok(folder) => _ = lister.list(&folder, 1),
        Err(e) => lister.add_problem(dir, &e.to_string()),
    }
    lister.found
}

/// Lists the GGUF files of a folder. Each folder is opened in its parent, so none that replaces it meanwhile is listed instead.
struct Lister<'a> {
    root: &'a Path,
    should_continue: &'a dyn Fn() -> bool,
    found: Listing,
    /// A folder that is reachable by several paths is visited once. This also ends cycles of symbolic links.
    seen: HashSet<FolderId>,
    /// Number of entries so far.
    entries: usize,
}

impl Lister<'_> {
    /// Lists `folder`, which is at `depth`. Returns whether the listing goes on.
    fn list(&mut self, folder: &Folder, depth: usize) -> bool {
        let first_visit = folder.identity().and_then(|id| Ok((self.seen.insert(id), folder.entries()?)));
        let (entries, links) = match first_visit.and_then(|visit| Ok((visit, follows_links(folder)?))) {
            Ok(((true, entries), links)) => (entries, links),
            Ok(((false, _), _)) => return true,
            Err(e) => {
                self.add_problem(folder.path(), &e.to_string());
                return true;
            }
        };
        for (name, kind) in entries.map_while(Result::ok) {
            self.entries += 1;
            if !(self.should_continue)() {
                return false;
            }
            if self.entries > MAX_ENTRIES {
                self.add_problem(self.root, &format!("more than {MAX_ENTRIES} directory entries: the rest is ignored"));
                return false;
            }
            let path = folder.path_of(&name);
            let is_gguf = path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("gguf"));
            let is_link = kind == EntryKind::Link;
            if is_link && !links {
                self.add_problem(folder.path(), "others may write to the folder: its symbolic links are not followed");
                continue;
            }
            let target = if is_link { folder.link_target(&name) } else { Ok(kind) };
            let kind = match target {
                Ok(kind) => kind,
                Err(e) if is_gguf => {
                    self.add_problem(&path, &e.to_string());
                    continue;
                }
                Err(_) => continue,
            };
            match kind {
                EntryKind::File if is_gguf => self.found.files.push(ListedFile::new(&path, is_link)),
                EntryKind::Folder if depth >= MAX_DEPTH => {
                    self.add_problem(&path, &format!("nested deeper than {MAX_DEPTH} folders: ignored"));
                }
                EntryKind::Folder => {
                    if is_link {
                        self.found.linked_folders.push(path.clone());
                    }
                    let links = if is_link { Links::Follow } else { Links::Refuse };
                    match folder.open_folder(&name, links) {
                        Ok(folder) if !self.list(&folder, depth + 1) => return false,
                        Ok(_) => {}
                        Err(e) => self.add_problem(&path, &e.to_string()),
                    }
                }
                EntryKind::Link | EntryKind::Other if is_gguf => self.add_problem(&path, "not a regular file: ignored"),
                EntryKind::File | EntryKind::Link | EntryKind::Other => {}
            }
        }
        true
    }

    fn add_problem(&mut self, path: &Path, problem: &str) {
        self.found.problems.entry(problem.to_owned()).or_default().insert(path.to_owned());
    }
}

/// Reads a file's header: its tensors' offsets and sizes. Tensors without bytes are never requested.
fn read_tensor_list(file: File, meta: &Metadata) -> Result<Vec<TensorEntry>, ScanError> {
    let entry = |info: gguf::TensorInfo| TensorEntry {
        start: info.bytes.start as u64,
        bytes: info.bytes.len() as u64,
        digest: OnceLock::new(),
    };
    let tensors = gguf::read_tensors(file, meta.len())?;
    Ok(tensors.into_iter().map(entry).filter(|tensor| tensor.bytes > 0).collect())
}

/// Sets the digests of a file's tensors that are known from an earlier start of the server.
fn set_known_digests(tensors: &[TensorEntry], known: TensorDigests) {
    let known: HashMap<_, _> = known.into_iter().map(|(start, bytes, digest)| ((start, bytes), digest)).collect();
    for tensor in tensors {
        if let Some(&digest) = known.get(&(tensor.start, tensor.bytes)) {
            // The entry is new, so it has no digest yet.
            let _ = tensor.digest.set(digest);
        }
    }
}
