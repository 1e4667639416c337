//! The digests of a model folder in a file, so that a server that starts again need not hash the models again.
//!
//! The file is untrusted: an invalid one is ignored, and a wrong digest costs time only, because LOAD hashes what it loads.

use std::collections::HashMap;
use std::ffi::OsString;
use std::io::{self, BufWriter, Read, Write};
use std::path::Path;

use log::warn;
use thiserror::Error;

use super::file::FileIdentity;
use super::scan::{IndexSnapshot, MAX_TENSORS};
use crate::rpc::server::folder::{FileError, Folder, Links};
use crate::rpc::wire::{Reader, WireError};

const MAGIC: &[u8; 8] = b"fanoutGD";
const VERSION: u32 = 1;

/// Limit of the size of the file: the most tensors that an index has, each in a file of its own.
const MAX_BYTES: u64 = MAX_TENSORS as u64 * (IDENTITY_BYTES + 4 + TENSOR_BYTES) + 48;

/// Size of a [`FileIdentity`] in the file.
const IDENTITY_BYTES: u64 = 7 * 8;

/// Size of a tensor in the file: offset, size, digest.
const TENSOR_BYTES: u64 = 8 + 8 + 32;

/// Digests of a file's tensors: offset in the file, size in bytes, digest.
pub(super) type TensorDigests = Vec<(u64, u64, [u8; 32])>;

/// Digests by the files that have them.
pub(super) type KnownDigests = HashMap<FileIdentity, TensorDigests>;

/// Why a file of digests is not used.
#[derive(Debug, Error)]
enum DigestFileError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Form(#[from] WireError),
    #[error("not a file of digests of version {VERSION}")]
    Version,
    #[error("longer than {MAX_BYTES} bytes")]
    TooLong,
    #[error("damaged: it does not match its checksum")]
    Checksum,
}

/// Where the digests of a model folder are kept.
pub(super) struct DigestFile {
    folder: Folder,
    name: OsString,
}

impl DigestFile {
    /// The file for the models in `models`, in the folder `dir`, which is created if necessary.
    pub(super) fn open(dir: &Path, models: &Path) -> io::Result<DigestFile> {
        let folder = Folder::open_or_create(dir)?;
        folder.remove_abandoned()?;
        let models = std::fs::canonicalize(models)?;
        let hash = blake3::hash(models.as_os_str().as_encoded_bytes()).to_hex();
        Ok(DigestFile { folder, name: format!("{}.digests", &hash[..16]).into() })
    }

    /// Reads the file. No digests if it is absent or invalid.
    pub(super) fn read(&self) -> KnownDigests {
        match self.try_read() {
            Ok(known) => known,
            Err(DigestFileError::File(FileError::Io(e))) if e.kind() == io::ErrorKind::NotFound => KnownDigests::new(),
            Err(e) => {
                warn!("models: {} is ignored: {e}", self.folder.path_of(&self.name).display());
                KnownDigests::new()
            }
        }
    }

    fn try_read(&self) -> Result<KnownDigests, DigestFileError> {
        let (file, _) = self.folder.open_file(&self.name, Links::Refuse)?;
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(FileError::from)?;
        if bytes.len() as u64 > MAX_BYTES {
            return Err(DigestFileError::TooLong);
        }
        decode(&bytes)
    }

    /// Writes the digests that a snapshot has. An error is logged.
    pub(super) fn write(&self, snapshot: &IndexSnapshot) {
        let bytes = encode(&snapshot.known_digests());
        let write = || {
            let mut partial = self.folder.create_partial()?;
            let mut out = BufWriter::new(partial.file());
            out.write_all(&bytes)?;
            out.flush()?;
            drop(out);
            partial.rename_to(&self.name)
        };
        if let Err(e) = write() {
            warn!("models: cannot write {}: {e}", self.folder.path_of(&self.name).display());
        }
    }
}

fn encode(known: &[(FileIdentity, TensorDigests)]) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend_from_slice(&VERSION.to_le_bytes());
    out.extend_from_slice(&(known.len() as u32).to_le_bytes());
    for (FileIdentity { device, inode, bytes, modified, changed }, tensors) in known {
        for number in [device, inode, bytes] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        for number in [modified, changed].into_iter().flatten() {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&(tensors.len() as u32).to_le_bytes());
        for (start, bytes, digest) in tensors {
            out.extend_from_slice(&start.to_le_bytes());
            out.extend_from_slice(&bytes.to_le_bytes());
            out.extend_from_slice(digest);
        }
    }
    let checksum = blake3::hash(&out);
    out.extend_from_slice(checksum.as_bytes());
    out
}

fn decode(bytes: &[u8]) -> Result<KnownDigests, DigestFileError> {
    let (body, checksum) = bytes.split_last_chunk::<32>().ok_or(DigestFileError::Checksum)?;
    let mut r = Reader::new(body);
    if r.array("magic")? != MAGIC || r.u32("version")? != VERSION {
        return Err(DigestFileError::Version);
    }
    if blake3::hash(body) != *checksum {
        return Err(DigestFileError::Checksum);
    }
    let mut known = KnownDigests::new();
    for _ in 0..r.u32("number of files")? {
        let mut number = || r.u64("identity of a file");
        let identity = FileIdentity {
            device: number()?,
            inode: number()?,
            bytes: number()?,
            modified: [number()?.cast_signed(), number()?.cast_signed()],
            changed: [number()?.cast_signed(), number()?.cast_signed()],
        };
        let tensors = r.u32("number of tensors")?;
        // Grows as tensors are read: the count may be wrong.
        let mut digests = Vec::new();
        for _ in 0..tensors {
            digests.push((r.u64("offset")?, r.u64("size")?, *r.array("digest")?));
        }
        known.insert(identity, digests);
    }
    r.finish("digests")?;
    Ok(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Vec<(FileIdentity, TensorDigests)> {
        let identity = |inode| FileIdentity { device: 1, inode, bytes: 3, modified: [-4, 5], changed: [6, 7] };
        vec![
            (identity(1), vec![(32, 64, [1; 32]), (96, 8, [2; 32])]),
            (identity(2), Vec::new()),
            (identity(3), vec![(0, 1, [3; 32])]),
        ]
    }

    fn with_checksum(mut body: Vec<u8>) -> Vec<u8> {
        let checksum = blake3::hash(&body);
        body.extend_from_slice(checksum.as_bytes());
        body
    }

    #[test]
    fn digests_are_read_as_they_were_written() {
        assert_eq!(decode(&encode(&example())).expect("valid"), example().into_iter().collect());
        assert!(decode(&encode(&[])).expect("valid").is_empty());
    }

    #[test]
    fn invalid_bytes_are_refused() {
        let valid = encode(&example());
        for len in 0..valid.len() {
            assert!(decode(&valid[..len]).is_err(), "{len} bytes");
        }
        let body = &valid[..valid.len() - 32];
        for len in 0..body.len() {
            assert!(decode(&with_checksum(body[..len].to_vec())).is_err(), "{len} bytes with a checksum");
        }
        assert!(decode(&with_checksum([body, &[0]].concat())).is_err(), "trailing bytes");
        for at in 0..valid.len() {
            let mut bytes = valid.clone();
            bytes[at] ^= 1;
            assert!(decode(&bytes).is_err(), "byte {at}");
        }
    }

    #[test]
    fn unusable_file_is_ignored() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = DigestFile::open(&dir.path().join("new"), dir.path()).expect("a folder");
        assert!(file.read().is_empty(), "absent");
        let path = file.folder.path_of(&file.name);
        std::fs::write(&path, encode(&example())).expect("written");
        assert_eq!(file.read().len(), 3);
        std::fs::File::create(&path).expect("a file").set_len(MAX_BYTES + 1).expect("a sparse file");
        assert!(file.read().is_empty(), "too long");
    }
}
