//! Where uploads came from, so that they can be loaded again after their server was lost: by digest from the server's disk, else from
//! the file that the host read them from, or a copy.

use fanout::tensor::TensorDesc;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// An upload of weights.
#[derive(Clone, Debug)]
pub(crate) struct Upload {
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
const MAX_COPY: usize = 64 << 10;

/// The uploads of a buffer, by the position of their first byte.
pub(crate) type Uploads = BTreeMap<u64, Upload>;

impl Origin {
    /// Where bytes come from that the host is about to upload.
    fn of(bytes: &[u8]) -> Origin {
        if bytes.len() <= MAX_COPY {
            return Origin::Copy(bytes.into());
        }
        match mapped_file(bytes) {
            Some((path, offset)) => Origin::Mapped(path, offset),
            None => Origin::Open(open_models()),
        }
    }
}

impl Upload {
    /// Describes an upload of `bytes`.
    pub(crate) fn new(bytes: &[u8], whole: Option<TensorDesc>, name: String) -> Upload {
        let digest = *blake3::hash(bytes).as_bytes();
        Upload { bytes: bytes.len() as u64, digest, whole, name, origin: Origin::of(bytes) }
    }

    /// The bytes, from where they came from, or from a model file that has a tensor with them.
    pub(crate) fn read(&self, files: &mut ModelFiles) -> Result<Vec<u8>, String> {
        let known = match &self.origin {
            Origin::Mapped(path, offset) => vec![(path.clone(), *offset)],
            Origin::Open(paths) => self.find_in(paths, files),
            Origin::Copy(bytes) => return Ok(bytes.to_vec()),
        };
        let mut reasons = Vec::new();
        let in_folder = files.in_folder();
        for (path, offset) in known.into_iter().chain(self.find_in(&in_folder, files)) {
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
    fn find_in(&self, paths: &[PathBuf], files: &mut ModelFiles) -> Vec<(PathBuf, u64)> {
        let place = |path: &PathBuf| {
            let &(start, bytes) = files.tensors(path).get(&self.name)?;
            (bytes == self.bytes).then(|| (path.clone(), start))
        };
        paths.iter().filter_map(place).collect()
    }
}

/// The model files of one restoring, each of which is parsed once.
pub(crate) struct ModelFiles {
    folder: Option<PathBuf>,
    /// By file and tensor: position and bytes.
    parsed: HashMap<PathBuf, HashMap<String, (u64, u64)>>,
}

impl ModelFiles {
    /// No file is parsed yet. `folder` is searched after the file that an upload came from.
    pub(crate) fn new(folder: Option<PathBuf>) -> ModelFiles {
        ModelFiles { folder, parsed: HashMap::new() }
    }

    fn in_folder(&self) -> Vec<PathBuf> {
        let entries = self.folder.iter().filter_map(|folder| std::fs::read_dir(folder).ok()).flatten().flatten();
        entries.map(|entry| entry.path()).filter(|path| is_model(path)).collect()
    }

    /// The tensors of a file; none if it is no model file.
    fn tensors(&mut self, path: &Path) -> &HashMap<String, (u64, u64)> {
        self.parsed.entry(path.to_owned()).or_insert_with(|| {
            let tensors = File::open(path).and_then(|file| Ok((file.metadata()?.len(), file))).ok();
            let tensors =
                tensors.and_then(|(len, file)| fanout::gguf::read_tensors(io::BufReader::new(file), len).ok());
            let place = |bytes: &Range<usize>| (bytes.start as u64, bytes.len() as u64);
            tensors.into_iter().flatten().map(|tensor| (tensor.name.clone(), place(&tensor.bytes))).collect()
        })
    }
}

/// The model files that the process has open. Hosts that do not map a model close it after loading.
fn open_models() -> Vec<PathBuf> {
    let descriptors = std::fs::read_dir("/proc/self/fd").into_iter().flatten().flatten();
    let files = descriptors.filter_map(|entry| std::fs::read_link(entry.path()).ok());
    files.filter(|path| is_model(path)).collect()
}

/// Whether a file begins as GGUF does: in stores by content, names tell nothing.
fn is_model(path: &Path) -> bool {
    let mut magic = [0; 4];
    // Opening another kind of file may wait.
    let is_file = path.metadata().is_ok_and(|data| data.is_file());
    is_file && File::open(path).and_then(|file| file.read_exact_at(&mut magic, 0)).is_ok() && magic == *b"GGUF"
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
    fn uploads_are_found_again_by_name_and_digest() {
        let folder = tempfile();
        let data: Vec<u8> = (0..MAX_COPY + 4).map(|at| at as u8).collect();
        let ne = [data.len() as u64 / 4];
        let model = fanout::gguf::Writer::new().tensor_with_data("w", &ne, fanout::tensor::DType::F32, data.clone());
        std::fs::write(folder.join("blob"), model.to_bytes().unwrap()).unwrap();
        let read = |upload: &Upload, folder: Option<&PathBuf>| upload.read(&mut ModelFiles::new(folder.cloned()));
        let upload = Upload::new(&data, None, "w".to_owned());
        assert_eq!(read(&upload, Some(&folder)).as_deref(), Ok(&*data));
        let other = Upload { digest: [0; 32], ..upload.clone() };
        assert!(read(&other, Some(&folder)).unwrap_err().ends_with("blob has changed"));
        assert!(read(&upload, None).unwrap_err().contains("FANOUT_MODELS"));
        let open = File::open(folder.join("blob")).unwrap();
        let from_file = Upload::new(&data, None, "w".to_owned());
        drop(open);
        assert_eq!(read(&from_file, None).as_deref(), Ok(&*data));
        let small = Upload::new(&data[..8], None, "v".to_owned());
        assert_eq!(read(&small, None).as_deref(), Ok(&data[..8]));
        std::fs::remove_dir_all(&folder).unwrap();
    }

    fn tempfile() -> PathBuf {
        let folder = std::env::temp_dir().join(format!("fanout-uploads-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }
}
