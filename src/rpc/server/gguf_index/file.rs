//! Files of the model folder: opening them without blocking, and telling whether they have changed.

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::rpc::server::folder::{FileError, Folder, Links};

/// A regular file, as a scan has found it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct ListedFile {
    pub(super) path: PathBuf,
    /// Whether the path is a symbolic link.
    pub(super) is_link: bool,
}

impl ListedFile {
    pub(super) fn new(path: &Path, is_link: bool) -> ListedFile {
        ListedFile { path: path.to_owned(), is_link }
    }

    /// Opens the file, and returns its metadata. What has replaced the file meanwhile is opened only if a scan would follow it:
    /// no named pipe, no device, and a symbolic link only where [`follows_links`] permits it.
    pub(super) fn open(&self) -> Result<(File, Metadata), FileError> {
        #[cfg(test)]
        tests::OPENED.with(|opened| opened.set(opened.get() + 1));
        let (Some(dir), Some(name)) = (self.path.parent(), self.path.file_name()) else {
            return Err(FileError::NotAFile);
        };
        let folder = Folder::open(dir)?;
        let links = if self.is_link && follows_links(&folder)? { Links::Follow } else { Links::Refuse };
        folder.open_file(name, links)
    }
}

/// Whether the symbolic links in a folder are followed: only if no user other than its owner can create them. Model hubs keep
/// files in one folder and links to them in others. What such a link leads to is the owner's choice, also through further
/// links.
pub(super) fn follows_links(folder: &Folder) -> io::Result<bool> {
    Ok(!folder.is_writable_by_others()?)
}

/// Identity of the content of a file: a file with another one may have other bytes. Times have nanoseconds; the time of the
/// last change of the status (ctime) cannot be set back by the owner of a file, as that of its modification can.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize, Deserialize)]
pub(super) struct FileIdentity {
    pub(super) device: u64,
    pub(super) inode: u64,
    pub(super) bytes: u64,
    pub(super) modified: [i64; 2],
    pub(super) changed: [i64; 2],
}

impl FileIdentity {
    pub(super) fn of(meta: &Metadata) -> FileIdentity {
        FileIdentity {
            device: meta.dev(),
            inode: meta.ino(),
            bytes: meta.len(),
            modified: [meta.mtime(), meta.mtime_nsec()],
            changed: [meta.ctime(), meta.ctime_nsec()],
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::cell::Cell;

    thread_local! {
        /// How many files this thread has opened.
        pub(in super::super) static OPENED: Cell<usize> = const { Cell::new(0) };
    }
}
