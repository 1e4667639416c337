//! Memory-mapped files, through which a model's weights are used without reading the file first.
#![allow(unsafe_code)] // one of the modules that `tests/layout` names: mapping a file is an unsafe call

use super::HostBuffer;
use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};

/// A read-only memory mapping of a file. The system reads a page when it is first accessed, and may drop it again while it is
/// clean.
///
/// # Guarantees
/// - The file is never written through a mapping. A write to memory of [`MappedFile::map_private`] goes to a private copy of
///   the page (copy-on-write).
/// - The file may be renamed or deleted: its content stays accessible until the last mapping is dropped.
///
/// # Hazards
/// The file must not be modified while it is mapped, as with any mapped file. If another process truncates it, access to the
/// lost bytes kills this process (SIGBUS), also through private mappings. If another process rewrites it in place, pages that
/// were not written here change. To replace a file that may be in use, rename a new file over it, as downloaders do.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
    file: File,
    path: PathBuf,
}

/// The expected access pattern of a file's bytes, as for `madvise`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    /// One read from front to back: the system reads far ahead.
    Sequential,
    /// Access soon: the system starts to read the pages now.
    WillNeed,
}

impl MappedFile {
    /// Maps a file with its current length, which may be 0.
    ///
    /// # Errors
    /// The system's error when the file cannot be opened or mapped. [`ErrorKind::InvalidInput`] for a path that is no regular
    /// file: a folder, a device, a pipe.
    pub fn open(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref().to_owned();
        // Checked before `open`, because opening a pipe blocks until a process opens it for writing.
        if !std::fs::metadata(&path)?.is_file() {
            let text = "a folder, a device or a pipe, and only regular files can be mapped: give a file";
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let file = File::open(&path)?;
        let bytes = file.metadata()?.len();
        // SAFETY: the mapping is private and read-only, and this process does not write its pages. Another process may change
        // the file; the type's docs forbid that, and the bytes are read as `u8` only, for which every value is valid.
        let map = unsafe { MmapOptions::new().len(to_usize(bytes)?).map_copy_read_only(&file)? };
        Ok(MappedFile { map, file, path })
    }

    /// The path that was passed to [`MappedFile::open`].
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All bytes of the file.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// The length in bytes.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Whether the file is empty.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// The bytes in a range of file offsets.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] when the range reaches past the end.
    pub fn slice(&self, range: Range<u64>) -> Result<&[u8]> {
        Ok(&self.map[self.checked_range(range)?])
    }

    /// Advises the system of the expected access to a range (`madvise`). Changes no byte; does nothing on systems without such
    /// a call.
    ///
    /// # Errors
    /// As [`MappedFile::slice`], and the system's error.
    pub fn advise(&self, range: Range<u64>, advice: Advice) -> Result<()> {
        let range = self.checked_range(range)?;
        #[cfg(unix)]
        if !range.is_empty() {
            let advice = match advice {
                Advice::Sequential => memmap2::Advice::Sequential,
                Advice::WillNeed => memmap2::Advice::WillNeed,
            };
            return self.map.advise_range(advice, range.start, range.len());
        }
        let _ = (range, advice);
        Ok(())
    }

    /// Maps a range of the file once more, privately and writable, as memory for [`ImportHost::import`]. Bytes are copied only
    /// when they are written, one page at a time. The address of the first byte equals its file offset modulo the page size, so
    /// the alignment of tensors within the file is kept up to that of a page.
    ///
    /// # Errors
    /// As [`MappedFile::slice`]; [`ErrorKind::UnexpectedEof`] when the file was truncated after it was opened; the system's
    /// error when it cannot map the range.
    ///
    /// [`ImportHost::import`]: super::ImportHost::import
    pub fn map_private(&self, range: Range<u64>) -> Result<HostBuffer> {
        let start = range.start;
        let range = self.existing_range(range)?;
        if range.is_empty() {
            return Ok(HostBuffer::empty());
        }
        let mut options = MmapOptions::new();
        // MAP_NORESERVE, because only written pages take memory. A reservation for the whole range would fail on a machine with
        // less memory than the file has.
        options.offset(start).len(range.len()).no_reserve_swap();
        // SAFETY: as in `open`. Written pages are private to this mapping, and no other slice of the mapping exists.
        Ok(HostBuffer::from_mapping(unsafe { options.map_copy(&self.file)? }))
    }

    /// Maps a range of the file once more, read-only, as memory for [`ImportHost::import_read_only`]. Its pages are the pages of
    /// the page cache: all processes that map the file share them, the system may drop them at any time, and they are read
    /// from the file again at the next access. The address of the first byte is as with [`MappedFile::map_private`].
    ///
    /// # Errors
    /// As [`MappedFile::map_private`].
    ///
    /// [`ImportHost::import_read_only`]: super::ImportHost::import_read_only
    pub fn map_read_only(&self, range: Range<u64>) -> Result<ReadOnlyMapping> {
        let start = range.start;
        let range = self.existing_range(range)?;
        // An empty mapping may start anywhere; at a page's start it is aligned for every device.
        let start = if range.is_empty() { 0 } else { start };
        // SAFETY: as in `open`.
        let map = unsafe { MmapOptions::new().offset(start).len(range.len()).map_copy_read_only(&self.file)? };
        Ok(ReadOnlyMapping(map))
    }

    /// As `checked_range`; an error if the file was truncated since, because access to the lost bytes would kill the process.
    fn existing_range(&self, range: Range<u64>) -> Result<Range<usize>> {
        let end = range.end;
        let range = self.checked_range(range)?;
        let now = self.file.metadata()?.len();
        if end > now {
            let text = format!("{} had {} bytes when it was mapped and has {now} now", self.path.display(), self.len());
            return Err(Error::new(ErrorKind::UnexpectedEof, text));
        }
        Ok(range)
    }

    fn checked_range(&self, range: Range<u64>) -> Result<Range<usize>> {
        let outside = || {
            let Range { start, end } = &range;
            let text = format!("bytes {start} to {end} of {}, which has {} bytes", self.path.display(), self.len());
            Error::new(ErrorKind::InvalidInput, text)
        };
        if range.start > range.end || range.end > self.len() {
            return Err(outside());
        }
        Ok(to_usize(range.start)?..to_usize(range.end)?)
    }
}

fn to_usize(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::new(ErrorKind::InvalidInput, "the file is larger than the address space"))
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}

/// Owned bytes of a file, mapped read-only. Made by [`MappedFile::map_read_only`]; [`ImportHost::import_read_only`] turns the
/// mapping into a buffer of a device. The hazards of [`MappedFile`] hold for it too.
///
/// [`ImportHost::import_read_only`]: super::ImportHost::import_read_only
#[derive(Debug)]
pub struct ReadOnlyMapping(Mmap);

impl Deref for ReadOnlyMapping {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl AsRef<[u8]> for ReadOnlyMapping {
    fn as_ref(&self) -> &[u8] {
        self
    }
}
