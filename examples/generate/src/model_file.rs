//! The files of a model: one GGUF file, or all parts of a split one (`NAME-00001-of-00003.gguf`).

use anyhow::{Context, anyhow, bail};
use fanout::device::MappedFile;
use fanout::gguf::Gguf;
use fanout::io_hint::io_hint;
use std::collections::HashSet;
use std::path::{Path, PathBuf};

/// Most parts of a model: their numbers have five digits.
const MAX_PARTS: usize = 99_999;

/// The mapped files of a model, in the order of their numbers.
pub struct ModelFile {
    parts: Vec<MappedFile>,
}

impl ModelFile {
    /// Maps a file. If its name belongs to a part of a split model, maps all parts, which are in the same folder.
    ///
    /// # Errors
    /// A file that cannot be mapped, by its path.
    pub fn open(path: &Path) -> anyhow::Result<ModelFile> {
        let (paths, what) = match part_paths(path) {
            Some(paths) => (paths, ", a part of the split model"),
            None => (vec![path.to_owned()], ""),
        };
        let map = |path: &PathBuf| {
            MappedFile::open(path).map_err(|e| anyhow!("{}{what}: {e}{}", path.display(), io_hint(&e)))
        };
        Ok(ModelFile { parts: paths.iter().map(map).collect::<Result<_, _>>()? })
    }

    /// The files, in the order of their numbers.
    pub fn parts(&self) -> &[MappedFile] {
        &self.parts
    }

    /// Parses all parts as one file: the metadata comes from the first part, and the positions of tensors are those in all parts one
    /// after the other ([`locate`]).
    ///
    /// # Errors
    /// The first invalid part, parts that do not belong together, and a part without the others, by the path of the file.
    pub fn parse(&self) -> anyhow::Result<Gguf<'_>> {
        let mut whole: Option<Gguf<'_>> = None;
        let (mut start, mut names) = (0, HashSet::new());
        for (number, file) in self.parts.iter().enumerate() {
            let path = || file.path().display().to_string();
            let mut part = Gguf::parse_part(file.bytes()).with_context(path)?;
            let key = |key: &str| part.metadata.int(key).with_context(path);
            let count = key("split.count")?.unwrap_or(1).max(1) as usize;
            if count != self.parts.len() {
                let part = key("split.no")?.unwrap_or_default().saturating_add(1);
                bail!(
                    "{}: this is part {part} of {count} of a split model: give a name that ends in -{part:05}-of-{count:05}.gguf, \
                     with the other parts beside it",
                    path()
                );
            }
            if key("split.no")?.unwrap_or_default() as usize != number {
                bail!("{}: this is not part {} of the split model, as its name says", path(), number + 1);
            }
            for tensor in &mut part.tensors {
                tensor.bytes = tensor.bytes.start + start..tensor.bytes.end + start;
                if !names.insert(tensor.name.clone()) {
                    bail!("{}: {:?} is also in another part of the split model", path(), tensor.name);
                }
            }
            start += file.bytes().len();
            match &mut whole {
                Some(whole) => whole.tensors.append(&mut part.tensors),
                None => whole = Some(part),
            }
        }
        whole.context("a model has a file")
    }
}

/// The part that has a range of bytes of all parts one after the other: its number, and the range in it.
pub fn locate(parts: &[&[u8]], bytes: std::ops::Range<usize>) -> Option<(usize, std::ops::Range<usize>)> {
    let mut start = 0;
    for (number, part) in parts.iter().enumerate() {
        if bytes.start < start + part.len() {
            let range = bytes.start - start..bytes.end - start;
            return (range.end <= part.len()).then_some((number, range));
        }
        start += part.len();
    }
    None
}

/// The paths of all parts of a split model, if the name belongs to one.
pub(crate) fn part_paths(path: &Path) -> Option<Vec<PathBuf>> {
    let name = path.file_name()?.to_str()?;
    let (rest, count) = name.strip_suffix(".gguf")?.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let is_number = |text: &&str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let parse = |text| Some(text).filter(is_number)?.parse().ok();
    let (number, count): (usize, usize) = (parse(number)?, parse(count)?);
    if !(1..=count).contains(&number) || count > MAX_PARTS {
        return None;
    }
    Some((1..=count).map(|number| path.with_file_name(format!("{name}-{number:05}-of-{count:05}.gguf"))).collect())
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod tests {
    use super::*;
    use fanout::gguf::Writer;
    use fanout::tensor::DType;

    #[test]
    fn all_parts_of_a_split_model_are_one_file() {
        let folder = std::env::temp_dir().join(format!("fanout-parts-{}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let write = |name: &str, count, number, tensor| {
            let file = Writer::new().text("name", name).int("split.count", count).int("split.no", number);
            let bytes = file.tensor(tensor, &[8], DType::F32).to_bytes().unwrap();
            std::fs::write(folder.join(name), bytes).unwrap();
            folder.join(name)
        };
        let parse =
            |path: &Path| ModelFile::open(path).and_then(|file| file.parse().map(drop)).unwrap_err().to_string();
        let first = write("m-00001-of-00002.gguf", 2, 0, "a");
        assert!(parse(&first).contains("m-00002-of-00002.gguf, a part of the split model: "));
        let second = write("m-00002-of-00002.gguf", 2, 1, "b");
        for path in [&first, &second] {
            let file = ModelFile::open(path).unwrap();
            let gguf = file.parse().unwrap();
            assert_eq!(gguf.metadata.text("name").unwrap(), Some("m-00001-of-00002.gguf"));
            let parts: Vec<&[u8]> = file.parts().iter().map(MappedFile::bytes).collect();
            for (number, tensor) in gguf.tensors.iter().enumerate() {
                let own = Gguf::parse_part(parts[number]).unwrap().tensors.remove(0).bytes;
                assert_eq!(locate(&parts, tensor.bytes.clone()), Some((number, own)), "{}", tensor.name);
            }
            assert_eq!(gguf.tensors.len(), 2);
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
        std::fs::remove_dir_all(&folder).unwrap();
    }
}
