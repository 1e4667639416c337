//! Folders by their handle, on Unix.

use std::ffi::{OsStr, OsString};
use std::fs::{DirBuilder, File, Metadata};
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, open, openat, renameat, statat, unlinkat};

use super::{EntryKind, FileError, Links};

/// Neither waits for the other end of a named pipe, nor makes a terminal the one of this process.
const OPEN_EXISTING: OFlags = OFlags::RDONLY.union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

/// Permission bits with which users other than the owner can add, rename and remove entries.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// Identifies a folder as long as it exists: its device, and its number there.
pub(in crate::rpc::server) type FolderId = (u64, u64);

/// An open folder.
pub(in crate::rpc::server) struct Folder {
    handle: File,
    /// Its path when it was opened, for log lines.
    pub(super) path: PathBuf,
}

impl Folder {
    /// Opens a folder.
    ///
    /// # Errors
    /// There is no folder at `path`, or it cannot be read.
    pub(in crate::rpc::server) fn open(path: &Path) -> io::Result<Folder> {
        let handle = open(path, OPEN_EXISTING | OFlags::DIRECTORY, Mode::empty())?;
        Ok(Folder { handle: File::from(handle), path: path.to_owned() })
    }

    /// Opens a folder, which is created for this user alone if it does not exist, as are the folders above it.
    ///
    /// # Errors
    /// As [`Folder::open`], or it cannot be created.
    pub(in crate::rpc::server) fn open_or_create(path: &Path) -> io::Result<Folder> {
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Folder::open(path)
    }

    /// Whether users other than its owner can add entries, such as symbolic links. The sticky bit does not help: it keeps them
    /// from removing entries only.
    ///
    /// # Errors
    /// The system's error.
    pub(in crate::rpc::server) fn is_writable_by_others(&self) -> io::Result<bool> {
        Ok(self.handle.metadata()?.mode() & WRITABLE_BY_OTHERS != 0)
    }

    /// The entries with their names.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub(in crate::rpc::server) fn entries(
        &self,
    ) -> io::Result<impl Iterator<Item = io::Result<(OsString, EntryKind)>> + '_> {
        let listing = Dir::read_from(&self.handle)?;
        let is_entry = |name: &[u8]| name != b"." && name != b"..";
        Ok(listing.filter(move |entry| !entry.as_ref().is_ok_and(|e| !is_entry(e.file_name().to_bytes()))).map(
            |entry| {
                let entry = entry?;
                let name = OsString::from_vec(entry.file_name().to_bytes().to_vec());
                let kind = match entry.file_type() {
                    // Some file systems do not tell.
                    FileType::Unknown => {
                        let stat = statat(&self.handle, &name, AtFlags::SYMLINK_NOFOLLOW)?;
                        FileType::from_raw_mode(stat.st_mode)
                    }
                    kind => kind,
                };
                Ok((name, entry_kind(kind)))
            },
        ))
    }

    /// What a symbolic link leads to.
    ///
    /// # Errors
    /// It leads nowhere, or in a circle.
    pub(in crate::rpc::server) fn link_target(&self, name: &OsStr) -> io::Result<EntryKind> {
        let stat = statat(&self.handle, name, AtFlags::empty())?;
        Ok(entry_kind(FileType::from_raw_mode(stat.st_mode)))
    }

    /// Opens a regular file for reading.
    ///
    /// # Errors
    /// [`FileError::NotAFile`], or the file cannot be opened.
    pub(in crate::rpc::server) fn open_file(&self, name: &OsStr, links: Links) -> Result<(File, Metadata), FileError> {
        let handle = openat(&self.handle, name, OPEN_EXISTING | link_flags(links), Mode::empty());
        let file = File::from(handle.map_err(io::Error::from)?);
        let meta = file.metadata()?;
        if meta.is_file() { Ok((file, meta)) } else { Err(FileError::NotAFile) }
    }

    /// Opens a folder in this one.
    ///
    /// # Errors
    /// It is no folder, or it cannot be opened.
    pub(in crate::rpc::server) fn open_folder(&self, name: &OsStr, links: Links) -> io::Result<Folder> {
        let flags = OPEN_EXISTING | OFlags::DIRECTORY | link_flags(links);
        let handle = openat(&self.handle, name, flags, Mode::empty())?;
        Ok(Folder { handle: File::from(handle), path: self.path_of(name) })
    }

    /// The folder's identity, by whatever path it was opened.
    ///
    /// # Errors
    /// The system's error.
    pub(in crate::rpc::server) fn identity(&self) -> io::Result<FolderId> {
        let meta = self.handle.metadata()?;
        Ok((meta.dev(), meta.ino()))
    }

    /// Creates a file for writing that only this user can read.
    pub(super) fn create_file(&self, name: &OsStr) -> io::Result<File> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(File::from(openat(&self.handle, name, flags, Mode::RUSR | Mode::WUSR)?))
    }

    pub(super) fn rename(&self, from: &OsStr, to: &OsStr) -> io::Result<()> {
        Ok(renameat(&self.handle, from, &self.handle, to)?)
    }

    pub(super) fn remove(&self, name: &OsStr) -> io::Result<()> {
        Ok(unlinkat(&self.handle, name, AtFlags::empty())?)
    }
}

fn link_flags(links: Links) -> OFlags {
    match links {
        Links::Refuse => OFlags::NOFOLLOW,
        Links::Follow => OFlags::empty(),
    }
}

fn entry_kind(kind: FileType) -> EntryKind {
    match kind {
        FileType::RegularFile => EntryKind::File,
        FileType::Directory => EntryKind::Folder,
        FileType::Symlink => EntryKind::Link,
        _ => EntryKind::Other,
    }
}
