//! What a folder of models holds: its files, as far as they are what they should be, and their tensors by length.

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

/// How deep folders are looked through, the first one counted.
const MAX_DEPTH: usize = 8;

/// Names in all folders that are looked at.
const MAX_ENTRIES: usize = 1 << 16;

/// Longer names are no tensor's that a model needs.
const MAX_NAME: usize = 256;

/// Characters of what is logged about a file: its faults may quote it.
const MAX_NOTE: usize = 300;

/// What a client asks for.
pub(in crate::rpc::server) struct Wanted<'a> {
    /// The name that the tensor has in its file.
    pub(in crate::rpc::server) name: &'a str,
    /// BLAKE3 of its bytes.
    pub(in crate::rpc::server) digest: [u8; 32],
}

/// A file that is left out.
#[derive(Debug, Error)]
enum ScanError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Head(#[from] HeadError),
}

/// What tells a file from what it was before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Identity {
    bytes: u64,
    modified: Option<SystemTime>,
}

impl Identity {
    pub(super) fn of(meta: &Metadata) -> Identity {
        Identity { bytes: meta.len(), modified: meta.modified().ok() }
    }
}

/// A file that was looked into.
pub(super) struct ModelFile {
    pub(super) path: PathBuf,
    pub(super) identity: Identity,
    tensors: Vec<Tensor>,
    /// How many it would have, where there was no room for them.
    crowded: usize,
    /// It is not what it was any more.
    left: AtomicBool,
}

impl ModelFile {
    /// With room for so many tensors.
    fn new(path: &Path, meta: &Metadata, mut tensors: Vec<Tensor>, room: usize) -> ModelFile {
        let mut crowded = 0;
        if tensors.len() > room {
            crowded = tensors.len();
            tensors = Vec::new();
        }
        let left = AtomicBool::new(false);
        ModelFile { path: path.to_owned(), identity: Identity::of(meta), tensors, crowded, left }
    }

    /// Whether it need not be read again, with room for so many tensors.
    fn is_known(&self, meta: &Metadata, room: usize) -> bool {
        let same = self.identity == Identity::of(meta) && !self.left.load(Ordering::Relaxed);
        same && self.tensors.len() <= room && !(1..=room).contains(&self.crowded)
    }

    /// Leaves the file alone until the folder is looked at again.
    pub(super) fn leave(&self) {
        self.left.store(true, Ordering::Relaxed);
    }
}

struct Tensor {
    name: Box<str>,
    start: u64,
    bytes: u64,
    /// Of its bytes, once they were read.
    digest: OnceLock<[u8; 32]>,
}

/// A tensor in its file.
#[derive(Clone)]
pub(super) struct Holding {
    file: Arc<ModelFile>,
    tensor: usize,
}

impl Holding {
    pub(super) fn file(&self) -> &ModelFile {
        &self.file
    }

    /// Where its bytes begin in the file.
    pub(super) fn start(&self) -> u64 {
        self.tensor().start
    }

    /// How many those are.
    pub(super) fn bytes(&self) -> u64 {
        self.tensor().bytes
    }

    /// Its bytes are known from now on.
    pub(super) fn remember(&self, digest: [u8; 32]) {
        // Another session may have been faster.
        let _ = self.tensor().digest.set(digest);
    }

    fn tensor(&self) -> &Tensor {
        &self.file.tensors[self.tensor] // made for each tensor of the file
    }

    /// Where in the order of tries it comes; `None` if it is known to be something else.
    fn rank(&self, wanted: &Wanted<'_>) -> Option<u8> {
        let tensor = self.tensor();
        match tensor.digest.get() {
            _ if self.file.left.load(Ordering::Relaxed) => None,
            Some(known) => (*known == wanted.digest).then_some(0),
            None if *tensor.name == *wanted.name => Some(1),
            None => Some(2),
        }
    }
}

/// What was found in a folder.
#[derive(Default)]
pub(super) struct Library {
    files: HashMap<PathBuf, Arc<ModelFile>>,
    by_bytes: HashMap<u64, Vec<Holding>>,
    tensors: usize,
    /// What was in the way.
    notes: HashSet<String>,
}

impl Library {
    /// Files with at least one tensor.
    pub(super) fn files(&self) -> usize {
        self.files.values().filter(|file| !file.tensors.is_empty()).count()
    }

    /// Tensors in all of them.
    pub(super) fn tensors(&self) -> usize {
        self.tensors
    }

    /// Tensors of so many bytes that may be what is wanted, the likeliest first, `most` of them.
    pub(super) fn candidates(&self, bytes: u64, wanted: &Wanted<'_>, most: usize) -> Vec<Holding> {
        let all = self.by_bytes.get(&bytes).into_iter().flatten();
        let mut ranked: Vec<_> = all.filter_map(|holding| Some((holding.rank(wanted)?, holding))).collect();
        ranked.sort_by_key(|&(rank, _)| rank);
        ranked.into_iter().take(most).map(|(_, holding)| holding.clone()).collect()
    }

    fn note(&mut self, before: &Library, path: &Path, what: &str) {
        let note: String = format!("models: {}: {what}", path.display()).chars().take(MAX_NOTE).collect();
        // Said once, as long as it is so.
        if !before.notes.contains(&note) && !self.notes.contains(&note) {
            warn!("{note}");
        }
        self.notes.insert(note);
    }

    /// Looks at what is called a model.
    fn visit(&mut self, path: &Path, before: &Library, most: usize) {
        let meta = match fs::metadata(path) {
            Ok(meta) if meta.is_file() => meta,
            Ok(_) => return,
            Err(e) => return self.note(before, path, &e.to_string()),
        };
        let room = most.saturating_sub(self.tensors);
        let file = match before.files.get(path) {
            Some(file) if file.is_known(&meta, room) => Arc::clone(file),
            _ => match read(path) {
                Ok((meta, tensors)) => Arc::new(ModelFile::new(path, &meta, tensors, room)),
                Err(e) => {
                    self.note(before, path, &format!("left out: {e}"));
                    // One that is no model's is none until it changes.
                    if matches!(e, ScanError::File(_) | ScanError::Head(HeadError::Io(_))) {
                        return;
                    }
                    Arc::new(ModelFile::new(path, &meta, Vec::new(), room))
                }
            },
        };
        if file.crowded > 0 {
            self.note(before, path, &format!("left out: there are {most} tensors without it"));
        }
        self.add(file);
    }

    fn add(&mut self, file: Arc<ModelFile>) {
        for (number, tensor) in file.tensors.iter().enumerate() {
            let holding = Holding { file: Arc::clone(&file), tensor: number };
            self.by_bytes.entry(tensor.bytes).or_default().push(holding);
        }
        self.tensors += file.tensors.len();
        self.files.insert(file.path.clone(), file);
    }
}

/// Looks through a folder, for `most` tensors and while `go_on` says so. Files that have not changed since `before` are not read
/// again, and what is not reached is as it was.
pub(super) fn look(dir: &Path, before: &Library, most: usize, go_on: &dyn Fn() -> bool) -> Library {
    let mut library = Library::default();
    let mut paths = walk(dir, before, &mut library, go_on);
    paths.sort();
    for path in &paths {
        if !go_on() {
            break;
        }
        library.visit(path, before, most);
    }
    if !go_on() {
        library.note(before, dir, "it takes too long to look through: some of it is left for later");
        for (path, file) in &before.files {
            if !library.files.contains_key(path) && library.tensors + file.tensors.len() <= most {
                library.add(Arc::clone(file));
            }
        }
    }
    library
}

/// Paths of all that is called a model, in a folder and those below it. Links are followed: they are the operator's.
fn walk(dir: &Path, before: &Library, library: &mut Library, go_on: &dyn Fn() -> bool) -> Vec<PathBuf> {
    let (mut found, mut seen) = (Vec::new(), HashSet::new());
    let mut folders = vec![(dir.to_owned(), 1)];
    let mut entries = 0;
    while let Some((folder, depth)) = folders.pop() {
        // A folder that several ways lead to, or one that leads to itself, is one folder.
        let known = fs::canonicalize(&folder).and_then(|real| Ok((seen.insert(real), fs::read_dir(&folder)?)));
        let listing = match known {
            Ok((true, listing)) => listing,
            Ok((false, _)) => continue,
            Err(e) => {
                library.note(before, &folder, &e.to_string());
                continue;
            }
        };
        for entry in listing.map_while(Result::ok) {
            entries += 1;
            if !go_on() {
                return found;
            }
            if entries > MAX_ENTRIES {
                library.note(before, dir, &format!("more than {MAX_ENTRIES} files: some are not looked at"));
                return found;
            }
            let path = entry.path();
            if path.extension().is_some_and(|ending| ending.eq_ignore_ascii_case("gguf")) {
                found.push(path.clone());
            }
            if path.is_dir() {
                if depth < MAX_DEPTH {
                    folders.push((path, depth + 1));
                } else {
                    library.note(before, &path, &format!("deeper than {MAX_DEPTH} folders: not looked into"));
                }
            }
        }
    }
    found
}

fn read(path: &Path) -> Result<(Metadata, Vec<Tensor>), ScanError> {
    let (file, meta) = file::open(path)?;
    let tensors = gguf::read_tensors(file, meta.len())?;
    let tensors = tensors.into_iter().filter(|info| info.name.len() <= MAX_NAME).map(|info| Tensor {
        name: info.name.into(),
        start: info.bytes.start as u64,
        bytes: info.bytes.len() as u64,
        digest: OnceLock::new(),
    });
    Ok((meta, tensors.collect()))
}
