//! Folders by their path, on systems where this crate's dependencies cannot use them by a handle. The checks are the same, but
//! not atomic with what follows them.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, FileType, Metadata};
use std::io;
use std::path::{Path, PathBuf};

use super::{EntryKind, FileError, Links};

/// Identifies a folder: its path without symbolic links.
pub(in crate::rpc::server) type FolderId = PathBuf;

/// A folder that existed when it was opened.
pub(in crate::rpc::server) struct Folder {
    pub(super) path: PathBuf,
}

impl Folder {
    pub(in crate::rpc::server) fn open(path: &Path) -> io::Result<Folder> {
        fs::read_dir(path)?;
        Ok(Folder { path: path.to_owned() })
    }

    pub(in crate::rpc::server) fn open_or_create(path: &Path) -> io::Result<Folder> {
        fs::create_dir_all(path)?;
        Folder::open(path)
    }

    /// The permissions of a folder are unknown, so its links are not followed.
    pub(in crate::rpc::server) fn is_writable_by_others(&self) -> io::Result<bool> {
        Ok(true)
    }

    pub(in crate::rpc::server) fn entries(
        &self,
    ) -> io::Result<impl Iterator<Item = io::Result<(OsString, EntryKind)>> + '_> {
        Ok(fs::read_dir(&self.path)?.map(|entry| {
            let entry = entry?;
            Ok((entry.file_name(), entry_kind(entry.file_type()?)))
        }))
    }

    pub(in crate::rpc::server) fn link_target(&self, name: &OsStr) -> io::Result<EntryKind> {
        Ok(entry_kind(fs::metadata(self.path_of(name))?.file_type()))
    }

    pub(in crate::rpc::server) fn open_file(&self, name: &OsStr, links: Links) -> Result<(File, Metadata), FileError> {
        self.check_kind(name, links, EntryKind::File)?;
        let file = File::open(self.path_of(name))?;
        let meta = file.metadata()?;
        if meta.is_file() { Ok((file, meta)) } else { Err(FileError::NotAFile) }
    }

    pub(in crate::rpc::server) fn open_folder(&self, name: &OsStr, links: Links) -> io::Result<Folder> {
        self.check_kind(name, links, EntryKind::Folder).map_err(io::Error::other)?;
        Folder::open(&self.path_of(name))
    }

    pub(in crate::rpc::server) fn identity(&self) -> io::Result<FolderId> {
        fs::canonicalize(&self.path)
    }

    pub(super) fn create_file(&self, name: &OsStr) -> io::Result<File> {
        File::create_new(self.path_of(name))
    }

    pub(super) fn rename(&self, from: &OsStr, to: &OsStr) -> io::Result<()> {
        fs::rename(self.path_of(from), self.path_of(to))
    }

    pub(super) fn remove(&self, name: &OsStr) -> io::Result<()> {
        fs::remove_file(self.path_of(name))
    }

    /// Checks what an entry is before it is opened: opening a named pipe or a device may block.
    fn check_kind(&self, name: &OsStr, links: Links, wanted: EntryKind) -> Result<(), FileError> {
        let path = self.path_of(name);
        let meta = if links == Links::Follow { fs::metadata(path) } else { fs::symlink_metadata(path) };
        if entry_kind(meta?.file_type()) == wanted { Ok(()) } else { Err(FileError::NotAFile) }
    }
}

fn entry_kind(kind: FileType) -> EntryKind {
    if kind.is_file() {
        EntryKind::File
    } else if kind.is_dir() {
        EntryKind::Folder
    } else if kind.is_symlink() {
        EntryKind::Link
    } else {
        EntryKind::Other
    }
}
