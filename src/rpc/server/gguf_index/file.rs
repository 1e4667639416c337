//! Opening files of the models' folder.

use std::fs::{File, Metadata};
use std::io;
use std::path::Path;

use thiserror::Error;

/// A file that cannot be opened or read.
#[derive(Debug, Error)]
pub(super) enum FileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("not a file")]
    NotAFile,
}

/// Opens a regular file. Anything else is refused without waiting: a pipe that was just put in the file's place would wait for
/// a writer.
pub(super) fn open(path: &Path) -> Result<(File, Metadata), FileError> {
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    let file = options.open(path)?;
    let meta = file.metadata()?;
    if meta.is_file() { Ok((file, meta)) } else { Err(FileError::NotAFile) }
}
