//! Reading of the tensor infos of a GGUF file without mapping the file.

use super::{Gguf, GgufError, TensorInfo};
use std::io::{self, Read};
use thiserror::Error;

/// Bytes of the file's start that are read first. Doubled while the tensor infos are longer.
const FIRST_READ_BYTES: u64 = 2 << 20;

/// Limit on the bytes of metadata and tensor infos that [`read_tensors`] reads into memory. The largest vocabularies need a
/// quarter of it.
pub const MAX_HEAD_BYTES: u64 = 64 << 20;

/// The tensor infos of a file could not be read.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum HeadError {
    /// Reading the file failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The file is not a valid GGUF file.
    #[error(transparent)]
    Gguf(#[from] GgufError),
    /// Metadata and tensor infos exceed [`MAX_HEAD_BYTES`].
    #[error("its metadata takes more than {MAX_HEAD_BYTES} bytes")]
    TooLong,
}

/// Reads the tensor infos of a GGUF file of `len` bytes, which may be one file of a split model. Reads the start of the file
/// only, up to the tensors' data, and holds it in memory during the call.
///
/// # Errors
/// [`HeadError`] when reading fails, for an invalid file, and for metadata beyond the limit.
pub fn read_tensors(mut file: impl Read, len: u64) -> Result<Vec<TensorInfo>, HeadError> {
    let end = usize::try_from(len).map_err(|_| io::Error::from(io::ErrorKind::FileTooLarge))?;
    let mut head = Vec::new();
    let mut limit = FIRST_READ_BYTES;
    loop {
        // Reads stop at `len`, because the file may be growing.
        let missing = limit.min(len).saturating_sub(head.len() as u64);
        file.by_ref().take(missing).read_to_end(&mut head)?;
        let whole_file = (head.len() as u64) < limit;
        match Gguf::parse_head(&head, end) {
            Err(e) if e.ends_early() && !whole_file && limit < MAX_HEAD_BYTES => limit *= 2,
            Err(e) if e.ends_early() && !whole_file => return Err(HeadError::TooLong),
            parsed => return Ok(parsed?.0.tensors),
        }
    }
}
