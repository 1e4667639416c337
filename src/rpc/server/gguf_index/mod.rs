//! Weights from the server's own disk: tensors of the GGUF files in a folder that the operator offers.
//!
//! Only bytes whose BLAKE3 is the one that a client asks for are said to be found; names and lengths just tell where to look
//! first. Nothing is mapped: a file may change, shrink or vanish at any time, and what cannot be read is not found. A client
//! names no paths, and learns nothing of a file whose digests it does not know.

mod file;
mod scan;

pub(super) use scan::Wanted;

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
use scan::{Holding, Identity, Library};

/// Tensors that are read for one LOAD, at most.
const MAX_TRIES: usize = 8;

/// Pieces in which a file is read: each is still in the processor's cache when it is hashed.
const PIECE: usize = 256 << 10;

/// The folder is looked at again when something is not found and it was looked at longer ago than this and than so many times
/// what that took: new files are noticed, and a client that asks for what is not there costs little.
const RESCAN: (Duration, u32) = (Duration::from_secs(1), 20);

/// How long the folder is looked at, at most: when the server starts, and while a client waits. What was not reached by then is
/// looked at the next time.
const FIRST_LOOK: Duration = Duration::from_secs(120);
const LATER_LOOKS: Duration = Duration::from_secs(10);

/// Tensors that are known at a time, over all files.
const MAX_TENSORS: usize = 1 << 18;

/// A folder of models. All sessions share it.
pub(super) struct GgufIndex {
    dir: PathBuf,
    library: Mutex<Arc<Library>>,
    /// When the folder is worth looking at again; locked while that is done.
    due: Mutex<Instant>,
}

/// Where the bytes go.
pub(super) struct Place<'a> {
    pub(super) queue: &'a mut dyn Queue,
    pub(super) region: &'a Region,
    pub(super) tensor: Option<&'a TensorDesc>,
    /// Nobody looks there meanwhile: what turns out to be wrong may be written, and overwritten by whoever asked.
    pub(super) alone: bool,
    /// Set when bytes may have been written.
    pub(super) touched: bool,
}

/// Why a tensor's file is not read on.
#[derive(Debug, Error)]
enum ReadError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error("it has changed")]
    Changed,
    /// The caller wants no more of it.
    #[error("the search was ended")]
    Ended,
}

impl From<io::Error> for ReadError {
    fn from(e: io::Error) -> ReadError {
        FileError::from(e).into()
    }
}

/// How a try ended that no device has failed.
enum Try {
    Right,
    /// Other bytes, or fewer.
    Wrong,
    /// The caller does not want to go on.
    Ended,
}

impl GgufIndex {
    /// Looks through a folder for the first time.
    ///
    /// # Errors
    /// When the folder cannot be read. What is wrong with single files is logged.
    pub(super) fn open(dir: &Path) -> io::Result<GgufIndex> {
        std::fs::read_dir(dir)?;
        let (library, due) = look(dir, &Library::default(), FIRST_LOOK, &|| true);
        info!("models: {}: {} tensors in {} files", dir.display(), library.tensors(), library.files());
        Ok(GgufIndex { dir: dir.to_owned(), library: Mutex::new(Arc::new(library)), due: Mutex::new(due) })
    }

    /// Fills a place with the tensor that is wanted; whether it was found. `go_on` is asked now and then while files are read,
    /// and ends the search by `false`.
    ///
    /// # Errors
    /// What fails on the device.
    pub(super) fn load(
        &self,
        wanted: &Wanted<'_>,
        place: &mut Place<'_>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<bool, DeviceError> {
        let mut left = MAX_TRIES;
        let mut library = self.library();
        loop {
            for holding in library.candidates(place.region.bytes(), wanted, left) {
                left -= 1;
                match attempt(&holding, wanted, place, go_on)? {
                    Try::Right => {
                        debug!("models: {} comes from {}", wanted.name, holding.file().path.display());
                        return Ok(true);
                    }
                    Try::Wrong => {}
                    Try::Ended => return Ok(false),
                }
            }
            match self.look_again(&library, go_on) {
                Some(newer) if left > 0 => library = newer,
                _ => return Ok(false),
            }
        }
    }

    /// What the folder has now, if it is not known yet or it is time to look again. Nobody waits for another session that looks:
    /// what that finds serves the next time.
    fn look_again(&self, known: &Arc<Library>, go_on: &dyn Fn() -> bool) -> Option<Arc<Library>> {
        let mut due = match self.due.try_lock() {
            Ok(due) => due,
            Err(TryLockError::Poisoned(due)) => due.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let last = self.library();
        if !Arc::ptr_eq(&last, known) {
            return Some(last); // another session was faster
        }
        if Instant::now() < *due {
            return None;
        }
        let (library, next) = look(&self.dir, known, LATER_LOOKS, go_on);
        let library = Arc::new(library);
        *self.held() = Arc::clone(&library);
        *due = next;
        Some(library)
    }

    fn library(&self) -> Arc<Library> {
        Arc::clone(&self.held())
    }

    fn held(&self) -> MutexGuard<'_, Arc<Library>> {
        // It is replaced as a whole.
        self.library.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a folder has, as far as that can be told within `most`, and when it is worth looking at again.
fn look(dir: &Path, before: &Library, most: Duration, go_on: &dyn Fn() -> bool) -> (Library, Instant) {
    let start = Instant::now();
    let library = scan::look(dir, before, MAX_TENSORS, &|| start.elapsed() < most && go_on());
    let (least, times) = RESCAN;
    (library, Instant::now() + least.max(start.elapsed() * times))
}

/// Writes what a file has, and says whether it was what is wanted.
fn attempt(
    holding: &Holding,
    wanted: &Wanted<'_>,
    place: &mut Place<'_>,
    go_on: &dyn Fn() -> bool,
) -> Result<Try, DeviceError> {
    if !place.alone {
        let first = Reading::start(holding, go_on).and_then(Reading::hash);
        match first {
            Ok(digest) if digest == wanted.digest => {}
            Ok(_) => return Ok(Try::Wrong),
            Err(e) => return Ok(given_up(holding, &e)),
        }
    }
    let mut reading = match Reading::start(holding, go_on) {
        Ok(reading) => reading,
        Err(e) => return Ok(given_up(holding, &e)),
    };
    place.touched = true;
    match place.queue.upload_from(place.region.clone(), place.tensor, |to| reading.read(to)) {
        Ok(()) => Ok(if reading.end() == wanted.digest { Try::Right } else { Try::Wrong }),
        Err(UploadError::Source(e)) => Ok(given_up(holding, &e)),
        Err(UploadError::Device(e)) => Err(e),
    }
}

/// What becomes of a tensor's try whose file could not be read to the end.
fn given_up(holding: &Holding, e: &ReadError) -> Try {
    if matches!(e, ReadError::Ended) {
        return Try::Ended;
    }
    debug!("models: {}: {e}", holding.file().path.display());
    holding.file().leave();
    Try::Wrong
}

/// A tensor that is read from its file, and what its bytes are.
struct Reading<'a> {
    holding: &'a Holding,
    go_on: &'a dyn Fn() -> bool,
    file: File,
    hasher: blake3::Hasher,
}

impl<'a> Reading<'a> {
    /// At the tensor's first byte, if its file is still the one that was looked into.
    fn start(holding: &'a Holding, go_on: &'a dyn Fn() -> bool) -> Result<Reading<'a>, ReadError> {
        let (mut file, meta) = file::open(&holding.file().path)?;
        if Identity::of(&meta) != holding.file().identity {
            return Err(ReadError::Changed);
        }
        file.seek(SeekFrom::Start(holding.start()))?;
        Ok(Reading { holding, go_on, file, hasher: blake3::Hasher::new() })
    }

    /// The next bytes.
    fn read(&mut self, to: &mut [u8]) -> Result<(), ReadError> {
        for piece in to.chunks_mut(PIECE) {
            if !(self.go_on)() {
                return Err(ReadError::Ended);
            }
            self.file.read_exact(piece)?;
            self.hasher.update(piece);
        }
        Ok(())
    }

    /// Reads all of it, for its digest.
    fn hash(mut self) -> Result<[u8; 32], ReadError> {
        let mut piece = vec![0; PIECE.min(self.holding.bytes() as usize)];
        let mut left = self.holding.bytes();
        while left > 0 {
            let now = piece.len().min(left as usize);
            self.read(&mut piece[..now])?;
            left -= now as u64;
        }
        Ok(self.end())
    }

    /// What all of it was.
    fn end(self) -> [u8; 32] {
        let digest = *self.hasher.finalize().as_bytes();
        // What was read while the file changed tells nothing about what it holds now.
        if self.file.metadata().is_ok_and(|meta| Identity::of(&meta) == self.holding.file().identity) {
            self.holding.remember(digest);
        }
        digest
    }
}
