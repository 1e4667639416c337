//! The tensors of a file that is read, not mapped.

use super::{Gguf, GgufError, TensorInfo};
use std::io::{self, Read};
use thiserror::Error;

/// Bytes of metadata and tensor infos that are read at first.
const FIRST: u64 = 2 << 20;

/// The most bytes of metadata and tensor infos that [`read_tensors`] holds; those of the largest vocabularies take a
/// quarter of it.
pub const MAX_HEAD: u64 = 64 << 20;

/// Why the tensors of a file cannot be told.
#[derive(Debug, Error)]
pub enum HeadError {
    /// It cannot be read.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// It is no GGUF file, or a broken one.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// What stands before its tensors is longer than any model needs.
    #[error("its metadata takes more than {MAX_HEAD} bytes")]
    TooLong,
}

/// The tensors of a GGUF file of `len` bytes, which may be one file of a split model. Only what stands before their data is
/// read, and held while this runs.
///
/// # Errors
/// [`HeadError`].
pub fn read_tensors(mut file: impl Read, len: u64) -> Result<Vec<TensorInfo>, HeadError> {
    let end = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    let mut head = Vec::new();
    let mut most = FIRST;
    loop {
        // No more than is there, and than the file was said to have: it may be growing.
        let missing = most.min(len).saturating_sub(head.len() as u64);
        file.by_ref().take(missing).read_to_end(&mut head)?;
        let whole = (head.len() as u64) < most;
        match Gguf::parse_head(&head, end) {
            Err(e) if e.ends_early() && !whole && most < MAX_HEAD => most *= 2,
            Err(e) if e.ends_early() && !whole => return Err(HeadError::TooLong),
            parsed => return Ok(parsed?.0.tensors),
        }
    }
}
