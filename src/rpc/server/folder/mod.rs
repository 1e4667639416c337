//! Folders of the server that are opened once and used by their handle (`openat`), so that renaming or replacing a folder, or a
//! part of its path, does not redirect the server to other files.
//!
//! Only regular files are opened, as the opened handle itself says (`fstat`), and without waiting: opening a named pipe would
//! block until another process opens its other end. New files are written under a name that cannot be predicted
//! ([`PartialFile`]), because another user may have left a symbolic link under a name that can be.

mod unix;

pub(in crate::rpc::server) use unix::{Folder, FolderId};

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use log::{debug, warn};
use thiserror::Error;

/// File name extension of files that are being written.
const PARTIAL_EXTENSION: &str = "part";

/// Why a file cannot be opened or read.
#[derive(Debug, Error)]
pub(in crate::rpc::server) enum FileError {
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("not a regular file")]
    NotAFile,
}

/// What an entry of a folder is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::rpc::server) enum EntryKind {
    File,
    Folder,
    /// A symbolic link.
    Link,
    /// A named pipe, a socket or a device.
    Other,
}

/// Whether the last part of a name may be a symbolic link. A link that is not followed is an error.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::rpc::server) enum Links {
    Refuse,
    Follow,
}

impl Folder {
    pub(in crate::rpc::server) fn path(&self) -> &Path {
        &self.path
    }

    /// The path of an entry, for log lines.
    pub(in crate::rpc::server) fn path_of(&self, name: &OsStr) -> PathBuf {
        self.path.join(name)
    }

    /// Starts a file that gets its name when it is complete.
    ///
    /// # Errors
    /// The file cannot be created, or the system has no random bytes for its name.
    pub(in crate::rpc::server) fn create_partial(&self) -> io::Result<PartialFile<'_>> {
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(io::Error::other)?;
        let name = OsString::from(format!("{:032x}.{PARTIAL_EXTENSION}", u128::from_le_bytes(random)));
        let file = self.create_file(&name)?;
        // The lock tells other servers that the file is in use, see `remove_abandoned`. It ends with the handle.
        let _ = file.try_lock();
        Ok(PartialFile { folder: self, file, name, settled: false })
    }

    /// Removes the partial files of servers that have ended before they were complete. Those that a running server writes are
    /// locked. A file that cannot be removed is logged: only the start of a server calls this, so no client can cause the lines.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(in crate::rpc::server) fn remove_abandoned(&self) -> io::Result<()> {
        for name in self.files_with_extension(PARTIAL_EXTENSION)? {
            if let Ok((file, _)) = self.open_file(&name, Links::Refuse)
                && file.try_lock().is_ok()
                && let Err(e) = self.remove_if_exists(&name)
            {
                warn!("cannot remove {}: {e}", self.path_of(&name).display());
            }
        }
        Ok(())
    }

    /// The names of the regular files with an extension.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(in crate::rpc::server) fn files_with_extension(&self, extension: &str) -> io::Result<Vec<OsString>> {
        let mut names = Vec::new();
        for entry in self.entries()? {
            let (name, kind) = entry?;
            if kind == EntryKind::File && Path::new(&name).extension().is_some_and(|e| e == extension) {
                names.push(name);
            }
        }
        Ok(names)
    }

    /// Removes a file. It is not an error if another server or session has removed it already.
    ///
    /// # Errors
    /// The file is still there, as in a folder that was made read-only.
    pub(in crate::rpc::server) fn remove_if_exists(&self, name: &OsStr) -> io::Result<()> {
        self.remove(name).or_else(|e| if e.kind() == io::ErrorKind::NotFound { Ok(()) } else { Err(e) })
    }
}

/// A file that is being written. Dropping it before [`PartialFile::rename_to`] has succeeded removes the file.
pub(in crate::rpc::server) struct PartialFile<'a> {
    folder: &'a Folder,
    file: File,
    name: OsString,
    /// Whether the file has its name, or [`PartialFile::discard`] has tried to remove it.
    settled: bool,
}

impl PartialFile<'_> {
    pub(in crate::rpc::server) fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// Its path until it gets its name, for messages.
    pub(in crate::rpc::server) fn path(&self) -> PathBuf {
        self.folder.path_of(&self.name)
    }

    /// Gives the file its name, under which it appears as a whole. Replaces a file of that name.
    ///
    /// # Errors
    /// The file cannot be renamed, as when the folder was removed.
    pub(in crate::rpc::server) fn rename_to(&mut self, name: &OsStr) -> io::Result<()> {
        self.folder.rename(&self.name, name)?;
        self.settled = true;
        Ok(())
    }

    /// Removes the file unless it has its name.
    ///
    /// # Errors
    /// The file is still there. The next start of a server on the folder removes it.
    pub(in crate::rpc::server) fn discard(&mut self) -> io::Result<()> {
        if std::mem::replace(&mut self.settled, true) { Ok(()) } else { self.folder.remove_if_exists(&self.name) }
    }
}

impl Drop for PartialFile<'_> {
    fn drop(&mut self) {
        // Not a warning: a client can drop any number of uploads. A caller that reports the error calls `discard` itself.
        if let Err(e) = self.discard() {
            debug!("cannot remove {}: {e}", self.path().display());
        }
    }
}

#[cfg(all(test, unix))]
mod tests;
