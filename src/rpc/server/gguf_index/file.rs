//! Opening files of the model folder without blocking on named pipes.

use std::fs::{File, Metadata};
use std::io;
use std::path::Path;

use thiserror::Error;

/// Why a file cannot be opened or read.
#[derive(Debug, Error)]
pub(super) enum FileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("not a regular file")]
    NotAFile,
}

/// Opens a regular file, and returns its metadata. Other kinds of files are rejected without blocking (O_NONBLOCK): opening a
/// named pipe that has just replaced the file would block until a writer opens it.
pub(super) fn open(path: &Path) -> Result<(File, Metadata), FileError> {
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    let file = options.open(path)?;
    let meta = file.metadata()?;
    if meta.is_file() { Ok((file, meta)) } else { Err(FileError::NotAFile) }
}
