//! Files mapped into memory: a model's weights without reading them first.
#![allow(unsafe_code)] // one of the modules that `tests/layout` names: mapping a file is an unsafe call

use super::HostBuffer;
use memmap2::{Mmap, MmapOptions};
use std::fs::File;
use std::io::{Error, ErrorKind, Result};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A file as bytes in memory. The system reads its pages when they are first looked at, and may forget them again as
/// long as nobody writes them.
///
/// # What is promised
/// - The file is never written through a mapping: whoever writes to [`MappedFile::private`] memory writes to pages of
///   its own.
/// - The file may be renamed or deleted: its bytes stay until the last mapping is gone.
///
/// # What cannot be promised
/// The file has to stay as it is while it is mapped, as with every program that maps files. If someone shortens it,
/// reading the bytes that it lost ends the process (SIGBUS), those of private pages too. If someone rewrites it in place,
/// bytes that were not written here change as they are read. Replace a file that may be in use by renaming a new one
/// over it, as downloaders do.
#[derive(Debug)]
pub struct MappedFile {
    map: Mmap,
    file: File,
    path: PathBuf,
}

/// What is about to be done with a file's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Advice {
    /// They are read once, from front to back: the system reads far ahead.
    Sequential,
    /// They are read soon: the system starts to bring them now.
    WillNeed,
}

impl MappedFile {
    /// Maps a file as long as it is now. An empty one has no bytes.
    ///
    /// # Errors
    /// When the file cannot be opened or mapped. [`ErrorKind::InvalidInput`] for what has no length: a folder, a device, a
    /// pipe.
    pub fn open(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref().to_owned();
        // Before it is opened: opening a pipe waits for whoever writes to it.
        if !std::fs::metadata(&path)?.is_file() {
            let text = format!("{} is no file: only files can be mapped", path.display());
            return Err(Error::new(ErrorKind::InvalidInput, text));
        }
        let file = File::open(&path)?;
        let bytes = file.metadata()?.len();
        // SAFETY: the mapping is private and read only, and nothing here writes its pages. Others can change the file; the
        // bytes are only ever looked at as bytes, of which any value is one (the type's docs say what is asked of them).
        let map = unsafe { MmapOptions::new().len(length(bytes)?).map_copy_read_only(&file)? };
        Ok(MappedFile { map, file, path })
    }

    /// Where it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// All of it.
    pub fn bytes(&self) -> &[u8] {
        &self.map
    }

    /// Its length in bytes.
    pub fn len(&self) -> u64 {
        self.map.len() as u64
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.map.is_empty()
    }

    /// A part of it.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] when the part reaches past the end.
    pub fn part(&self, range: Range<u64>) -> Result<&[u8]> {
        Ok(&self.map[self.inside(range)?])
    }

    /// Tells the system what a part is about to be used for. Changes no byte, and does nothing where systems do not listen.
    ///
    /// # Errors
    /// As [`MappedFile::part`], and when the system refuses.
    pub fn advise(&self, range: Range<u64>, advice: Advice) -> Result<()> {
        let range = self.inside(range)?;
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

    /// A part as memory of its own, for [`ImportHost::import`]: nothing is copied until someone writes, and then page by
    /// page. Its first byte lies as far behind a page's start as the part begins behind one in the file: a part from byte
    /// 4128 on lies at a multiple of 32.
    ///
    /// # Errors
    /// As [`MappedFile::part`]; when the file has been shortened since; when the system cannot map it once more.
    ///
    /// [`ImportHost::import`]: super::ImportHost::import
    pub fn private(&self, range: Range<u64>) -> Result<HostBuffer> {
        let (start, end) = (range.start, range.end);
        let range = self.inside(range)?;
        let now = self.file.metadata()?.len();
        if end > now {
            let text = format!("{} had {} bytes when it was mapped and has {now} now", self.path.display(), self.len());
            return Err(Error::new(ErrorKind::UnexpectedEof, text));
        }
        if range.is_empty() {
            return Ok(HostBuffer::empty());
        }
        let mut options = MmapOptions::new();
        // Only what is written takes memory: no reserve for all of it, which a machine smaller than the file would refuse.
        options.offset(start).len(range.len()).no_reserve_swap();
        // SAFETY: as in `open`; the pages that are written are this mapping's own, and no other slice of them exists.
        Ok(HostBuffer::of_pages(unsafe { options.map_copy(&self.file)? }))
    }

    fn inside(&self, range: Range<u64>) -> Result<Range<usize>> {
        let outside = || {
            let Range { start, end } = &range;
            let text = format!("bytes {start} to {end} of {}, which has {}", self.path.display(), self.len());
            Error::new(ErrorKind::InvalidInput, text)
        };
        if range.start > range.end || range.end > self.len() {
            return Err(outside());
        }
        Ok(length(range.start)?..length(range.end)?)
    }
}

fn length(bytes: u64) -> Result<usize> {
    usize::try_from(bytes).map_err(|_| Error::new(ErrorKind::InvalidInput, "a file beyond the address space"))
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        self.bytes()
    }
}
