//! The files of a model: one file, or all parts of a split one (`NAME-00001-of-00003.gguf`).

#[cfg(feature = "safetensors")]
use super::safetensors::{self, HeaderError};
use super::{Weights, WeightsError};
use crate::device::MappedFile;
use crate::gguf::{Gguf, TensorInfo};
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Most parts of a model: their numbers have five digits.
const MAX_PARTS: usize = 99_999;

/// Ends of the names of split models.
const EXTENSIONS: [&str; 2] = ["gguf", "safetensors"];

/// The mapped files of a model, in the order of their numbers. The hazards of [`MappedFile`] hold for them.
#[derive(Debug)]
pub struct ModelFile {
    parts: Vec<MappedFile>,
}

impl ModelFile {
    /// Maps a file. If its name belongs to a part of a split model, maps all parts ([`ModelFile::paths`]).
    ///
    /// # Errors
    /// [`WeightsError::File`] for the first file that cannot be mapped.
    pub fn open(path: impl AsRef<Path>) -> Result<ModelFile, WeightsError> {
        let paths = ModelFile::paths(path);
        let is_part = paths.len() > 1;
        let map = |path: PathBuf| MappedFile::open(&path).map_err(|error| WeightsError::File { path, is_part, error });
        Ok(ModelFile { parts: paths.into_iter().map(map).collect::<Result<_, _>>()? })
    }

    /// The paths of all files of a model: all parts, which are in the same folder, if the name belongs to a part of a split model,
    /// else the path alone. Opens none of them.
    pub fn paths(path: impl AsRef<Path>) -> Vec<PathBuf> {
        let path = path.as_ref();
        part_paths(path).unwrap_or_else(|| vec![path.to_owned()])
    }

    /// The files, in the order of their numbers.
    pub fn parts(&self) -> &[MappedFile] {
        &self.parts
    }

    /// Parses all parts as one GGUF file: the metadata comes from the first part, and the positions of tensors are those in all parts
    /// one after the other.
    ///
    /// # Errors
    /// The first invalid part, parts that do not belong together, and a part without the others.
    pub fn parse_gguf(&self) -> Result<Gguf<'_>, WeightsError> {
        let mut head = None;
        let tensors = self.tensors_of_parts(|number, file| {
            let path = || file.path().to_owned();
            let invalid = |error| WeightsError::Gguf { path: path(), error: Box::new(error) };
            let part = Gguf::parse_part(file.bytes()).map_err(invalid)?;
            let key = |key: &str| {
                let value = part.metadata.int(key).map_err(|error| WeightsError::Metadata { path: path(), error })?;
                Ok::<_, WeightsError>(u64::from(value.unwrap_or_default()))
            };
            let (parts, no) = (key("split.count")?.max(1), key("split.no")?);
            if parts != self.parts.len() as u64 {
                return Err(WeightsError::OtherPartsMissing { path: path(), part: no + 1, parts });
            }
            if no != number as u64 {
                return Err(WeightsError::WrongPart { path: path(), part: number + 1 });
            }
            head.get_or_insert((part.version, part.metadata));
            Ok(part.tensors)
        })?;
        let (version, metadata) = head.unwrap_or_default();
        Ok(Gguf { version, metadata, tensors })
    }

    /// The weights of the file, which is GGUF or, with the feature `safetensors`, safetensors: F64, F32, F16, BF16 and I8 to I64, of at
    /// most four dimensions.
    ///
    /// # Errors
    /// As [`ModelFile::parse_gguf`]; [`WeightsError::Safetensors`], [`WeightsError::UnsupportedTensor`].
    pub fn weights(&self) -> Result<Weights<'_>, WeightsError> {
        #[cfg(feature = "safetensors")]
        if self.parts.first().is_some_and(|file| safetensors::is_safetensors(file.bytes())) {
            let tensors = |_, file: &'_ MappedFile| {
                let path = file.path().to_owned();
                safetensors::tensors(file.bytes()).map_err(|error| match error {
                    HeaderError::Invalid(reason) => WeightsError::Safetensors { path, reason },
                    HeaderError::Unsupported { tensor, reason } => {
                        WeightsError::UnsupportedTensor { path, tensor, reason }
                    }
                })
            };
            return Ok(Weights::of_file(self, &self.tensors_of_parts(tensors)?));
        }
        Ok(Weights::of_file(self, &self.parse_gguf()?.tensors))
    }

    /// The tensors of all parts, which `parse` returns for each part by number. Their positions are those in all parts one after the
    /// other.
    fn tensors_of_parts<'a>(
        &'a self,
        mut parse: impl FnMut(usize, &'a MappedFile) -> Result<Vec<TensorInfo>, WeightsError>,
    ) -> Result<Vec<TensorInfo>, WeightsError> {
        let (mut tensors, mut names, mut start) = (Vec::new(), HashSet::new(), 0);
        for (number, file) in self.parts.iter().enumerate() {
            for mut tensor in parse(number, file)? {
                tensor.bytes = tensor.bytes.start + start..tensor.bytes.end + start;
                if !names.insert(tensor.name.clone()) {
                    return Err(WeightsError::Duplicate { path: file.path().to_owned(), tensor: tensor.name });
                }
                tensors.push(tensor);
            }
            start += file.bytes().len();
        }
        Ok(tensors)
    }
}

/// The paths of all parts of a split model, if the name belongs to one.
fn part_paths(path: &Path) -> Option<Vec<PathBuf>> {
    let name = path.file_name()?.to_str()?;
    let (stem, extension) = name.rsplit_once('.').filter(|(_, extension)| EXTENSIONS.contains(extension))?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let is_number = |text: &&str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let parse = |text| Some(text).filter(is_number)?.parse().ok();
    let (number, count): (usize, usize) = (parse(number)?, parse(count)?);
    if !(1..=count).contains(&number) || count > MAX_PARTS {
        return None;
    }
    let part = |number| path.with_file_name(format!("{name}-{number:05}-of-{count:05}.{extension}"));
    Some((1..=count).map(part).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::super::locate;
    use super::*;
    use crate::gguf::Writer;
    use crate::tensor::DType;

    #[test]
    fn all_parts_of_a_split_model_are_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let write = |name: &str, count, number, tensor| {
            let file = Writer::new().text("name", name).int("split.count", count).int("split.no", number);
            let bytes = file.tensor(tensor, &[8], DType::F32).to_bytes().unwrap();
            std::fs::write(folder.path().join(name), bytes).unwrap();
            folder.path().join(name)
        };
        let parse =
            |path: &Path| ModelFile::open(path).and_then(|file| file.parse_gguf().map(drop)).unwrap_err().to_string();
        let first = write("m-00001-of-00002.gguf", 2, 0, "a");
        assert!(parse(&first).contains("m-00002-of-00002.gguf, a part of the split model: "));
        let second = write("m-00002-of-00002.gguf", 2, 1, "b");
        for path in [&first, &second] {
            let file = ModelFile::open(path).unwrap();
            let gguf = file.parse_gguf().unwrap();
            assert_eq!(gguf.metadata.text("name").unwrap(), Some("m-00001-of-00002.gguf"));
            let parts: Vec<&[u8]> = file.parts().iter().map(MappedFile::bytes).collect();
            for (number, tensor) in gguf.tensors.iter().enumerate() {
                let own = Gguf::parse_part(parts[number]).unwrap().tensors.remove(0).bytes;
                assert_eq!(locate(&parts, tensor.bytes.clone()), Some((number, own)), "{}", tensor.name);
            }
            let weights = file.weights().unwrap();
            assert_eq!(weights.iter().map(|weight| weight.name()).collect::<Vec<_>>(), ["a", "b"]);
            assert_eq!(weights.get("b").unwrap().desc(), weights.get("a").unwrap().desc());
        }
        write("m-00002-of-00002.gguf", 2, 1, "a");
        assert!(parse(&first).ends_with("\"a\" is also in another part of the split model"));
        write("m-00002-of-00002.gguf", 2, 0, "b");
        assert!(parse(&first).contains("not part 2 of the split model"));
        let other = write("m.gguf", 2, 1, "b");
        assert!(
            parse(&other)
                .contains("this is part 2 of 2 of a split model: give a name that ends in -00002-of-00002.gguf")
        );
    }
}
