//! Where the weights of a buffer came from, so that they can be loaded again after their server was lost: by digest from the
//! server's disk, else from the file that the host read them from.

use fanout::tensor::TensorDesc;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An upload of weights.
#[derive(Clone, Debug)]
pub(crate) struct Weight {
    pub(crate) bytes: u64,
    /// BLAKE3 of the bytes.
    pub(crate) digest: [u8; 32],
    /// The tensor, if the upload is all of it.
    pub(crate) whole: Option<TensorDesc>,
    /// The tensor's name.
    pub(crate) name: String,
    /// Where the bytes came from, as far as the process shows it.
    origin: Origin,
}

#[derive(Clone, Debug)]
enum Origin {
    /// A mapped file, and the offset in it.
    Mapped(PathBuf, u64),
    /// Model files that the process had open: it read one of them.
    Open(Vec<PathBuf>),
    /// The bytes themselves, if they are few.
    Copy(Arc<[u8]>),
}

/// Limit of bytes that are kept as a copy: a vector of a model, such as a control vector.
const MAX_COPY: usize = 128 << 10;

/// The uploads of a buffer, by the position of their first byte.
pub(crate) type Weights = BTreeMap<u64, Weight>;

impl Origin {
    /// Where bytes come from that the host is about to upload.
    fn of(bytes: &[u8]) -> Origin {
        match mapped_file(bytes) {
            Some((path, offset)) => Origin::Mapped(path, offset),
            None => Origin::Open(open_models()),
        }
    }
}

impl Weight {
    /// Describes an upload of `bytes`.
    pub(crate) fn new(bytes: &[u8], whole: Option<TensorDesc>, name: String) -> Weight {
        Weight::with_origin(bytes, whole, name, Origin::of(bytes))
    }

    fn with_origin(bytes: &[u8], whole: Option<TensorDesc>, name: String, origin: Origin) -> Weight {
        Weight { bytes: bytes.len() as u64, digest: *blake3::hash(bytes).as_bytes(), whole, name, origin }
    }

    /// Describes a write of `bytes` that is no upload of weights; `None` if the bytes could not be found again.
    pub(crate) fn of_write(bytes: &[u8], whole: Option<TensorDesc>, name: String) -> Option<Weight> {
        let origin = match bytes.len() {
            0..=MAX_COPY => Origin::Copy(bytes.into()),
            _ => Origin::of(bytes),
        };
        let is_known = !matches!(&origin, Origin::Open(files) if files.is_empty());
        is_known.then(|| Weight::with_origin(bytes, whole, name, origin))
    }

    /// The bytes, from the file of the upload, or from a model file that has a tensor with them.
    pub(crate) fn read(&self, models: Option<&Path>) -> Result<Vec<u8>, String> {
        let mut reasons = Vec::new();
        let known = match &self.origin {
            Origin::Mapped(path, offset) => vec![(path.clone(), *offset)],
            Origin::Open(paths) => self.search(paths.iter().cloned()),
            Origin::Copy(bytes) => return Ok(bytes.to_vec()),
        };
        let in_folder = models.into_iter().flat_map(|folder| self.search(models_in(folder)));
        for (path, offset) in known.into_iter().chain(in_folder) {
            match read_range(&path, offset, self.bytes) {
                Ok(bytes) if blake3::hash(&bytes).as_bytes() == &self.digest => return Ok(bytes),
                Ok(_) => reasons.push(format!("{} has changed", path.display())),
                Err(error) => reasons.push(format!("{}: {error}", path.display())),
            }
        }
        if reasons.is_empty() {
            reasons.push("its file is unknown; FANOUT_MODELS=FOLDER names a folder with it".to_owned());
        }
        Err(format!("{}: {}", self.name, reasons.join("; ")))
    }

    /// Places in model files that may have the bytes: tensors with the name and size.
    fn search(&self, files: impl Iterator<Item = PathBuf>) -> Vec<(PathBuf, u64)> {
        files.filter_map(|path| self.find_in(&path).map(|offset| (path, offset))).collect()
    }

    fn find_in(&self, path: &Path) -> Option<u64> {
        let file = File::open(path).ok()?;
        let len = file.metadata().ok()?.len();
        let tensors = fanout::gguf::read_tensors(io::BufReader::new(file), len).ok()?;
        let found = tensors.iter().find(|tensor| tensor.name == self.name)?;
        (found.bytes.len() as u64 == self.bytes).then_some(found.bytes.start as u64)
    }
}

/// The model files of a folder.
fn models_in(folder: &Path) -> impl Iterator<Item = PathBuf> {
    std::fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()).filter(|path| is_model(path))
}

fn is_model(path: &Path) -> bool {
    path.extension().is_some_and(|end| end == "gguf")
}

/// The model files that the process has open. Hosts that do not map a model close it after loading.
fn open_models() -> Vec<PathBuf> {
    let descriptors = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let files = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    files.filter(|path| is_model(path)).collect()
}

fn read_range(path: &Path, offset: u64, bytes: u64) -> io::Result<Vec<u8>> {
    let mut buffer = vec![0; bytes as usize];
    File::open(path)?.read_exact_at(&mut buffer, offset)?;
    Ok(buffer)
}

/// The file and offset that a slice is mapped from, if it is.
fn mapped_file(bytes: &[u8]) -> Option<(PathBuf, u64)> {
    let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
    let (start, end) = (bytes.as_ptr() as u64, bytes.as_ptr() as u64 + bytes.len() as u64);
    maps.lines().find_map(|line| mapped_line(line, start, end))
}

/// The file and offset of addresses, from a line of `/proc/self/maps` that has all of them.
fn mapped_line(line: &str, start: u64, end: u64) -> Option<(PathBuf, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (from, to) = fields.next()?.split_once('-')?;
    let (from, to) = (u64::from_str_radix(from, 16).ok()?, u64::from_str_radix(to, 16).ok()?);
    let (_permissions, offset, _device, _inode) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
    let path = fields.next().filter(|path| path.starts_with('/'))?;
    // A path with spaces goes on to the end of the line.
    let path = &line[line.find(path)?..];
    let inside = from <= start && end <= to;
    let offset = u64::from_str_radix(offset, 16).ok()?;
    inside.then(|| (PathBuf::from(path), offset + (start - from)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_maps_locate_files() {
        let line = "7f0000001000-7f0000003000 r--s 00002000 08:01 42   /models/a model.gguf";
        let found = |start, end| mapped_line(line, start, end);
        assert_eq!(found(0x7f00_0000_1010, 0x7f00_0000_1020), Some((PathBuf::from("/models/a model.gguf"), 0x2010)));
        assert_eq!(found(0x7f00_0000_2ff0, 0x7f00_0000_3010), None, "beyond the mapping");
        assert_eq!(mapped_line("7f00-8f00 rw-p 00000000 00:00 0 [heap]", 0x7f10, 0x7f20), None);
        assert_eq!(mapped_line("7f00-8f00 rw-p 00000000 00:00 0", 0x7f10, 0x7f20), None);
    }

    #[test]
    fn weights_are_found_again_by_name_and_digest() {
        let folder = std::env::temp_dir().join(format!("fanout-weights-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let data: Vec<u8> = (0..=255).collect();
        let model = fanout::gguf::Writer::new().tensor_with_data("w", &[64], fanout::tensor::DType::F32, data.clone());
        std::fs::write(folder.join("m.gguf"), model.to_bytes().unwrap()).unwrap();
        let weight = Weight::new(&data, None, "w".to_owned());
        assert_eq!(weight.read(Some(&folder)).as_deref(), Ok(&*data));
        let other = Weight { digest: [0; 32], ..weight.clone() };
        assert!(other.read(Some(&folder)).unwrap_err().ends_with("m.gguf has changed"));
        assert!(weight.read(None).unwrap_err().contains("FANOUT_MODELS"));
        let open = File::open(folder.join("m.gguf")).unwrap();
        let read_from_file = Weight::new(&data, None, "w".to_owned());
        drop(open);
        assert_eq!(read_from_file.read(None).as_deref(), Ok(&*data));
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
