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

/// Limit of the size of the file: the most tensors that an index has, each in a file of its own.
const MAX_BYTES: u64 = MAX_TENSORS as u64 * 512;

/// Bytes of the first line: the checksum in hexadecimal digits.
const CHECKSUM_LINE: usize = 2 * blake3::OUT_LEN + 1;

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
    Form(#[from] serde_json::Error),
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
        let write = || {
            let bytes = encode(&snapshot.known_digests())?;
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

/// The digests as JSON, after a line with the checksum: a damaged digest would hide its tensor until the model's file changes.
fn encode(known: &[(FileIdentity, TensorDigests)]) -> io::Result<Vec<u8>> {
    let json = serde_json::to_vec(known)?;
    Ok([checksum_line(&json).as_bytes(), &json].concat())
}

fn checksum_line(json: &[u8]) -> String {
    format!("{}\n", blake3::hash(json).to_hex())
}

fn decode(bytes: &[u8]) -> Result<KnownDigests, DigestFileError> {
    let (checksum, json) = bytes.split_at_checked(CHECKSUM_LINE).ok_or(DigestFileError::Checksum)?;
    if checksum != checksum_line(json).as_bytes() {
        return Err(DigestFileError::Checksum);
    }
    let known: Vec<(FileIdentity, TensorDigests)> = serde_json::from_slice(json)?;
    Ok(known.into_iter().collect())
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

    fn encoded(known: &[(FileIdentity, TensorDigests)]) -> Vec<u8> {
        encode(known).expect("JSON")
    }

    fn with_checksum(json: &[u8]) -> Vec<u8> {
        [checksum_line(json).as_bytes(), json].concat()
    }

    #[test]
    fn digests_are_read_as_they_were_written() {
        assert_eq!(decode(&encoded(&example())).expect("valid"), example().into_iter().collect());
        assert!(decode(&encoded(&[])).expect("valid").is_empty());
    }

    #[test]
    fn the_largest_tensor_fits_into_the_limit() {
        let times = [i64::MIN; 2];
        let identity =
            FileIdentity { device: u64::MAX, inode: u64::MAX, bytes: u64::MAX, modified: times, changed: times };
        let of_one = serde_json::to_vec(&(identity, vec![(u64::MAX, u64::MAX, [u8::MAX; 32])])).expect("JSON");
        assert!((of_one.len() as u64 + 1) * MAX_TENSORS as u64 + 100 <= MAX_BYTES, "{}", of_one.len());
    }

    #[test]
    fn invalid_bytes_are_refused() {
        let valid = encoded(&example());
        for len in 0..valid.len() {
            assert!(decode(&valid[..len]).is_err(), "{len} bytes");
        }
        let json = &valid[CHECKSUM_LINE..];
        for len in 0..json.len() {
            assert!(decode(&with_checksum(&json[..len])).is_err(), "{len} bytes with a checksum");
        }
        assert!(decode(&with_checksum(&[json, &[0]].concat())).is_err(), "trailing bytes");
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
        std::fs::write(&path, encoded(&example())).expect("written");
        assert_eq!(file.read().len(), 3);
        std::fs::File::create(&path).expect("a file").set_len(MAX_BYTES + 1).expect("a sparse file");
        assert!(file.read().is_empty(), "too long");
    }
}
