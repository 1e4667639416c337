//! Weights from the server's own disk: tensors of the GGUF files in a folder that the operator offers.
//!
//! Only bytes whose BLAKE3 is the one that a client asks for are said to be found; names and lengths just tell where to look
//! first. Nothing is mapped: a file may change, shrink or vanish at any time, and what cannot be read is not found. A client
//! names no paths, and learns nothing of a file whose digests it does not know.

mod scan;

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use log::{debug, info};

use crate::device::{DeviceError, Queue, Region, Source};
use crate::tensor::TensorDesc;
use scan::{Holding, Identity, Library};

/// Tensors that are read for one LOAD, at most.
const MAX_TRIES: usize = 8;

/// Pieces in which a file is read: each is still in the processor's cache when it is hashed.
const PIECE: usize = 256 << 10;

/// The folder is looked at again when something is not found and it was looked at longer ago than this and than so many times
/// what that took: new files are noticed, and a client that asks for what is not there costs little.
const RESCAN: (Duration, u32) = (Duration::from_secs(1), 20);

/// A folder of models. All sessions share it.
pub(super) struct Models {
    dir: PathBuf,
    library: Mutex<Arc<Library>>,
    /// When the folder is worth looking at again; locked while that is done.
    due: Mutex<Instant>,
}

/// What a client asks for.
pub(super) struct Wanted<'a> {
    /// The name that the tensor has in its file.
    pub(super) name: &'a str,
    /// BLAKE3 of its bytes.
    pub(super) digest: [u8; 32],
}

/// Where the bytes go.
pub(super) struct Place<'a> {
    pub(super) queue: &'a mut dyn Queue,
    pub(super) region: &'a Region,
    pub(super) tensor: Option<&'a TensorDesc>,
}

/// What came of looking for a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It is on its way.
    Found,
    /// It is not there, and nothing was written.
    Absent,
    /// It is not there, and some other tensor's bytes may have been written.
    Spoilt,
}

/// How a try ended that no device has failed.
enum Try {
    Right,
    /// Other bytes, or fewer.
    Wrong,
    /// The file cannot be used: nothing was written.
    Unusable,
    /// The caller does not want to go on.
    Ended,
}

impl Models {
    /// Looks through a folder for the first time.
    ///
    /// # Errors
    /// When the folder cannot be read. What is wrong with single files is logged.
    pub(super) fn open(dir: &Path) -> io::Result<Models> {
        std::fs::read_dir(dir)?;
        let (library, due) = look(dir, &Library::default());
        info!("models: {}: {} tensors in {} files", dir.display(), library.tensors(), library.files());
        Ok(Models { dir: dir.to_owned(), library: Mutex::new(Arc::new(library)), due: Mutex::new(due) })
    }

    /// Fills a place with the tensor that is wanted. `go_on` is asked now and then while files are read, and ends the search by
    /// `false`.
    ///
    /// # Errors
    /// What fails on the device.
    pub(super) fn load(
        &self,
        wanted: &Wanted<'_>,
        mut place: Place<'_>,
        go_on: &dyn Fn() -> bool,
    ) -> Result<Outcome, DeviceError> {
        let mut outcome = Outcome::Absent;
        let mut left = MAX_TRIES;
        let mut library = self.library();
        loop {
            for holding in library.candidates(place.region.bytes(), wanted, left) {
                left -= 1;
                match attempt(&holding, wanted, &mut place, go_on)? {
                    Try::Right => {
                        debug!("models: {} comes from {}", wanted.name, holding.file().path.display());
                        return Ok(Outcome::Found);
                    }
                    Try::Wrong => outcome = Outcome::Spoilt,
                    Try::Unusable => {}
                    Try::Ended => return Ok(Outcome::Spoilt),
                }
            }
            match self.look_again(&library) {
                Some(newer) if left > 0 => library = newer,
                _ => return Ok(outcome),
            }
        }
    }

    /// What the folder has now, if it is not known yet or it is time to look again.
    fn look_again(&self, known: &Arc<Library>) -> Option<Arc<Library>> {
        let mut due = self.due.lock().unwrap_or_else(PoisonError::into_inner);
        let last = self.library();
        if !Arc::ptr_eq(&last, known) {
            return Some(last); // another session was faster
        }
        if Instant::now() < *due {
            return None;
        }
        let (library, next) = look(&self.dir, known);
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

/// What a folder has, and when it is worth looking at again.
fn look(dir: &Path, before: &Library) -> (Library, Instant) {
    let start = Instant::now();
    let library = scan::look(dir, before);
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
    let path = &holding.file().path;
    let mut file = match open(holding) {
        Ok(file) => file,
        Err(e) => {
            debug!("models: {}: {e}", path.display());
            holding.file().leave();
            return Ok(Try::Unusable);
        }
    };
    let mut hasher = blake3::Hasher::new();
    let (mut failed, mut ended) = (None, false);
    let mut read = |to: &mut [u8]| {
        for piece in to.chunks_mut(PIECE) {
            ended = ended || !go_on();
            let read = if ended { Err(io::ErrorKind::Interrupted.into()) } else { file.read_exact(piece) };
            read.map_err(|e: io::Error| {
                let text = io::Error::other(e.to_string());
                failed = Some(e);
                text
            })?;
            hasher.update(piece);
        }
        Ok(())
    };
    let done = place.queue.upload(place.region.clone(), place.tensor, Source::Writer(&mut read));
    if ended {
        return Ok(Try::Ended);
    }
    if let Some(e) = failed {
        debug!("models: {}: {e}", path.display());
        holding.file().leave();
        return Ok(Try::Wrong);
    }
    done?;
    let digest = *hasher.finalize().as_bytes();
    // What was read while the file changed tells nothing about what it holds now.
    if file.metadata().is_ok_and(|meta| Identity::of(&meta) == holding.file().identity) {
        holding.remember(digest);
    }
    Ok(if digest == wanted.digest { Try::Right } else { Try::Wrong })
}

/// Opens a tensor's file at its first byte, if it is still the file that was looked into.
fn open(holding: &Holding) -> io::Result<File> {
    let (path, identity) = (&holding.file().path, &holding.file().identity);
    // Opening what is no file may block.
    if !std::fs::metadata(path)?.is_file() {
        return Err(io::Error::other("not a file any more"));
    }
    let mut file = File::open(path)?;
    if Identity::of(&file.metadata()?) != *identity {
        return Err(io::Error::other("it has changed"));
    }
    file.seek(SeekFrom::Start(holding.start()))?;
    Ok(file)
}
