//! Writer of GGUF files: small models in memory for tests and tools, and the heads of larger files.

use std::collections::{BTreeMap, HashSet};

use thiserror::Error;

use super::error::Shortened;
use super::value::ValueType;
use super::{DEFAULT_ALIGNMENT, MAX_ENTRIES, MAX_TENSORS};
use crate::tensor::{DType, DescError, TensorDesc};

/// Metadata key of the alignment of the tensors' data.
const ALIGNMENT_KEY: &str = "general.alignment";

/// Builds a GGUF file of version 3.
///
/// Entries are written sorted by key, tensors in the order in which they were added. [`Writer::to_bytes`] checks all of them.
/// Methods that add an entry have the name of the method of [`Metadata`](super::Metadata) that reads it.
///
/// ```
/// use fanout::gguf::{Gguf, Writer};
/// use fanout::tensor::DType;
///
/// let file = Writer::new()
///     .text("general.architecture", "llama")
///     .int("llama.block_count", 2)
///     .tensor("output_norm.weight", &[4], DType::F32)
///     .to_bytes()?;
/// let gguf = Gguf::parse(&file)?;
/// assert_eq!(gguf.metadata.int("llama.block_count")?, Some(2));
/// assert_eq!(gguf.tensors[0].bytes.len(), 16);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Writer {
    /// By key: the value's type and bytes, as encoded in the file.
    entries: BTreeMap<String, Vec<u8>>,
    tensors: Vec<TensorToWrite>,
}

#[derive(Clone, Debug)]
struct TensorToWrite {
    name: String,
    ne: Vec<u64>,
    dtype: DType,
    /// The tensor's bytes; `None` writes zeros.
    data: Option<Vec<u8>>,
}

/// A file cannot be written: a parser would reject it. Long keys and names are cut in messages.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum WriteError {
    /// An entry to be removed does not exist.
    #[error("there is no metadata entry {0:?}")]
    NoEntry(String),
    /// `general.alignment` is no 32-bit power of two.
    #[error("general.alignment is not a power of two of 32 bits")]
    Alignment,
    /// More entries or tensors than [`Gguf::parse`](super::Gguf::parse) accepts.
    #[error("{count} {what}, and a reader accepts {limit}")]
    TooMany {
        /// The kind of item: entries or tensors.
        what: &'static str,
        /// The number of items.
        count: usize,
        /// The accepted number.
        limit: usize,
    },
    /// Two tensors have one name.
    #[error("two tensors have the name {0:?}")]
    DuplicateTensor(String),
    /// A tensor without dimensions, or with more than four.
    #[error("tensor {tensor:?} has {dimensions} dimensions, expected 1 to 4")]
    Dimensions {
        /// The tensor's name.
        tensor: String,
        /// The number of dimensions.
        dimensions: usize,
    },
    /// A tensor without elements.
    #[error("tensor {0:?} has a dimension of no elements")]
    Empty(String),
    /// A tensor that is too large, or whose rows are not whole blocks of its type.
    #[error("tensor {tensor:?}: {error}")]
    Shape {
        /// The tensor's name.
        tensor: String,
        /// The violated rule of shapes.
        error: DescError,
    },
    /// A tensor's data do not have the length that type and shape require.
    #[error("tensor {tensor:?} takes {expected} bytes, got {got}")]
    DataLength {
        /// The tensor's name.
        tensor: String,
        /// Length in bytes that type and shape require.
        expected: usize,
        /// Length in bytes of the passed data.
        got: usize,
    },
    /// The tensors exceed the address space.
    #[error("the tensors take more bytes than this machine can address")]
    TooLarge,
}

/// Appends a text: its length in bytes, as 64 bits, then the bytes.
fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

/// The number of a value type in the file.
fn type_number(kind: ValueType) -> u32 {
    kind as u32
}

impl Writer {
    /// A file without entries and tensors.
    pub fn new() -> Writer {
        Writer::default()
    }

    /// Sets an entry to a value of any type, given by its number and its bytes, neither of which is checked.
    pub(super) fn entry(mut self, key: &str, kind: u32, value: &[u8]) -> Writer {
        self.entries.insert(key.to_owned(), [&kind.to_le_bytes(), value].concat());
        self
    }

    /// Sets an entry to an array, given by its values' type, their number and their bytes, none of which is checked.
    pub(super) fn array(self, key: &str, kind: u32, count: usize, values: &[u8]) -> Writer {
        let head = [&kind.to_le_bytes()[..], &(count as u64).to_le_bytes()].concat();
        self.entry(key, type_number(ValueType::Array), &[&head, values].concat())
    }

    /// Sets an entry to a whole number.
    pub fn int(self, key: &str, value: u32) -> Writer {
        self.entry(key, type_number(ValueType::U32), &value.to_le_bytes())
    }

    /// Sets an entry to a number in single precision.
    pub fn float(self, key: &str, value: f32) -> Writer {
        self.entry(key, type_number(ValueType::F32), &value.to_le_bytes())
    }

    /// Sets an entry to true or false.
    pub fn flag(self, key: &str, value: bool) -> Writer {
        self.entry(key, type_number(ValueType::Bool), &[value.into()])
    }

    /// Sets an entry to a text.
    pub fn text(self, key: &str, value: &str) -> Writer {
        let mut bytes = Vec::new();
        push_text(&mut bytes, value);
        self.entry(key, type_number(ValueType::Text), &bytes)
    }

    /// Sets an entry to an array of texts.
    pub fn texts<T: AsRef<str>>(self, key: &str, values: &[T]) -> Writer {
        let mut bytes = Vec::new();
        values.iter().for_each(|value| push_text(&mut bytes, value.as_ref()));
        self.array(key, type_number(ValueType::Text), values.len(), &bytes)
    }

    /// Sets an entry to an array of numbers in single precision.
    pub fn floats(self, key: &str, values: &[f32]) -> Writer {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.array(key, type_number(ValueType::F32), values.len(), &bytes)
    }

    /// Sets an entry to an array of whole numbers.
    pub fn ints(self, key: &str, values: &[i32]) -> Writer {
        let bytes: Vec<u8> = values.iter().flat_map(|x| x.to_le_bytes()).collect();
        self.array(key, type_number(ValueType::I32), values.len(), &bytes)
    }

    /// Removes an entry.
    ///
    /// # Errors
    /// [`WriteError::NoEntry`] when no entry has this key.
    pub fn without(mut self, key: &str) -> Result<Writer, WriteError> {
        let removed = self.entries.remove(key);
        removed.map(|_| self).ok_or_else(|| WriteError::NoEntry(Shortened(key).to_text()))
    }

    /// Adds a tensor of zeros. `ne` has the number of elements of 1 to 4 dimensions, fastest first.
    pub fn tensor(mut self, name: &str, ne: &[u64], dtype: DType) -> Writer {
        self.tensors.push(TensorToWrite { name: name.to_owned(), ne: ne.to_vec(), dtype, data: None });
        self
    }

    /// Adds a tensor with its data, packed: blocks of `dtype`, rows one after the other. `ne` as in [`Writer::tensor`].
    pub fn tensor_with_data(mut self, name: &str, ne: &[u64], dtype: DType, data: Vec<u8>) -> Writer {
        self.tensors.push(TensorToWrite { name: name.to_owned(), ne: ne.to_vec(), dtype, data: Some(data) });
        self
    }

    /// The bytes of the file. [`Gguf::parse`](super::Gguf::parse) accepts them, unless entries describe a split model.
    ///
    /// # Errors
    /// [`WriteError`] for the first violation.
    pub fn to_bytes(&self) -> Result<Vec<u8>, WriteError> {
        self.check()?;
        Ok(self.to_bytes_unchecked())
    }

    fn check(&self) -> Result<(), WriteError> {
        let counts =
            [("metadata entries", self.entries.len(), MAX_ENTRIES), ("tensors", self.tensors.len(), MAX_TENSORS)];
        if let Some((what, count, limit)) = counts.into_iter().find(|&(_, count, limit)| count > limit) {
            return Err(WriteError::TooMany { what, count, limit });
        }
        if self.entries.contains_key(ALIGNMENT_KEY) && self.alignment().is_none() {
            return Err(WriteError::Alignment);
        }
        let alignment = self.alignment().unwrap_or(DEFAULT_ALIGNMENT) as usize;
        let (mut names, mut total) = (HashSet::new(), 0usize);
        for tensor in &self.tensors {
            let bytes = tensor.check()?;
            if !names.insert(&tensor.name) {
                return Err(WriteError::DuplicateTensor(tensor.shown_name()));
            }
            let end = total.checked_add(bytes).and_then(|end| end.checked_next_multiple_of(alignment));
            total = end.filter(|&end| end <= isize::MAX as usize).ok_or(WriteError::TooLarge)?;
        }
        Ok(())
    }

    /// The alignment in the metadata, if it is valid.
    fn alignment(&self) -> Option<u32> {
        let (kind, value) = self.entries.get(ALIGNMENT_KEY)?.split_first_chunk()?;
        let value = u32::from_le_bytes(value.try_into().ok()?);
        (u32::from_le_bytes(*kind) == type_number(ValueType::U32) && value.is_power_of_two()).then_some(value)
    }

    /// The bytes of the file before the first tensor's data, for a program that writes the data itself, tensor by tensor, because
    /// the file is too large for memory: in the order of the tensors, each padded to the alignment (32 bytes by default).
    ///
    /// # Errors
    /// [`WriteError`] for the first violation.
    pub fn head(&self) -> Result<Vec<u8>, WriteError> {
        self.check()?;
        Ok(self.head_unchecked())
    }

    fn head_unchecked(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(3u32.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.entries.len() as u64).to_le_bytes());
        for (key, value) in &self.entries {
            push_text(&mut out, key);
            out.extend(value);
        }
        let alignment = self.alignment().unwrap_or(DEFAULT_ALIGNMENT) as usize;
        let mut offset = 0;
        for tensor in &self.tensors {
            push_text(&mut out, &tensor.name);
            out.extend((tensor.ne.len() as u32).to_le_bytes());
            tensor.ne.iter().for_each(|n| out.extend(n.to_le_bytes()));
            out.extend(tensor.dtype.to_wire().to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += tensor.data_bytes().next_multiple_of(alignment);
        }
        // A file without data needs no padding in front of it.
        if offset > 0 {
            out.resize(out.len().next_multiple_of(alignment), 0);
        }
        out
    }

    /// Encodes the file without checks, for tests of invalid files. A tensor with an invalid shape gets no data.
    pub(super) fn to_bytes_unchecked(&self) -> Vec<u8> {
        let mut out = self.head_unchecked();
        let alignment = self.alignment().unwrap_or(DEFAULT_ALIGNMENT) as usize;
        for tensor in &self.tensors {
            let end = out.len() + tensor.data_bytes().next_multiple_of(alignment);
            out.extend(tensor.data.iter().flatten());
            out.resize(end, 0);
        }
        out
    }
}

impl TensorToWrite {
    /// Length of the data in bytes that type and shape require.
    fn bytes(&self) -> Result<usize, DescError> {
        let mut ne = [1; 4];
        // A value beyond `usize` becomes one that every shape check refuses.
        ne.iter_mut().zip(&self.ne).for_each(|(to, &n)| *to = usize::try_from(n).unwrap_or(usize::MAX));
        Ok(TensorDesc::contiguous(self.dtype, ne)?.extent())
    }

    /// Length of the data in bytes as they are written; 0 for zeros of an invalid shape.
    fn data_bytes(&self) -> usize {
        self.data.as_ref().map_or_else(|| self.bytes().unwrap_or(0), Vec::len)
    }

    fn check(&self) -> Result<usize, WriteError> {
        if !(1..=4).contains(&self.ne.len()) {
            return Err(WriteError::Dimensions { tensor: self.shown_name(), dimensions: self.ne.len() });
        }
        if self.ne.contains(&0) {
            return Err(WriteError::Empty(self.shown_name()));
        }
        let expected = self.bytes().map_err(|error| WriteError::Shape { tensor: self.shown_name(), error })?;
        match self.data.as_ref().map_or(expected, Vec::len) {
            got if got == expected => Ok(expected),
            got => Err(WriteError::DataLength { tensor: self.shown_name(), expected, got }),
        }
    }

    /// The name as shown in messages.
    fn shown_name(&self) -> String {
        Shortened(&self.name).to_text()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{Gguf, Value};
    use super::*;

    fn write_error(writer: &Writer) -> WriteError {
        writer.to_bytes().unwrap_err()
    }

    #[test]
    fn written_files_parse_to_the_same_content() {
        let data: Vec<u8> = (0..18).collect();
        let file = Writer::new()
            .tensor("zeros", &[3], DType::F32)
            .tensor_with_data("q", &[32, 1], DType::Q4_0, data.clone())
            .flag("b", true)
            .int("a", 7)
            .int("a", 8);
        for (alignment, file) in [(32, file.clone()), (128, file.int("general.alignment", 128))] {
            let bytes = file.to_bytes().unwrap();
            let gguf = Gguf::parse(&bytes).unwrap();
            assert_eq!(
                (gguf.metadata.get("a"), gguf.metadata.get("b")),
                (Some(&Value::Int(8)), Some(&Value::Bool(true)))
            );
            let [zeros, q] = &gguf.tensors[..] else { panic!("{:?}", gguf.tensors) };
            assert_eq!((&bytes[zeros.bytes.clone()], &bytes[q.bytes.clone()]), (&[0; 12][..], &data[..]));
            assert!(q.bytes.start.is_multiple_of(alignment) && q.bytes.start - zeros.bytes.start == alignment);
            assert_eq!(file.head().unwrap(), bytes[..zeros.bytes.start]);
        }
    }

    #[test]
    fn an_entry_is_removed_once() {
        let file = Writer::new().int("a", 1).without("a").unwrap();
        assert_eq!(file.without("a").unwrap_err(), WriteError::NoEntry("a".to_owned()));
    }

    #[test]
    fn files_that_a_parser_rejects_are_not_written() {
        let file = Writer::new();
        let name = || "x".to_owned();
        let tensor = |ne: &[u64], dtype| file.clone().tensor("x", ne, dtype);
        assert_eq!(write_error(&file.clone().int("general.alignment", 24)), WriteError::Alignment);
        assert_eq!(write_error(&file.clone().text("general.alignment", "32")), WriteError::Alignment);
        assert_eq!(
            write_error(&tensor(&[1], DType::F32).tensor("x", &[2], DType::F32)),
            WriteError::DuplicateTensor(name())
        );
        assert_eq!(write_error(&tensor(&[], DType::F32)), WriteError::Dimensions { tensor: name(), dimensions: 0 });
        assert_eq!(write_error(&tensor(&[1; 5], DType::F32)), WriteError::Dimensions { tensor: name(), dimensions: 5 });
        assert_eq!(write_error(&tensor(&[4, 0], DType::F32)), WriteError::Empty(name()));
        assert!(matches!(write_error(&tensor(&[33], DType::Q4_0)), WriteError::Shape { .. }));
        assert!(matches!(write_error(&tensor(&[u64::MAX, 2], DType::F32)), WriteError::Shape { .. }));
        let short = file.clone().tensor_with_data("x", &[2], DType::F32, vec![0; 7]);
        assert_eq!(write_error(&short), WriteError::DataLength { tensor: name(), expected: 8, got: 7 });
        let huge = |i: u64| (i.to_string(), [1 << 57]);
        let many = (0..65).map(huge).fold(file.clone(), |file, (name, ne)| file.tensor(&name, &ne, DType::I8));
        assert_eq!(write_error(&many), WriteError::TooLarge);
        let many = (0..=MAX_ENTRIES).fold(file.clone(), |file, i| file.int(&i.to_string(), 0));
        assert!(matches!(write_error(&many), WriteError::TooMany { count: 65537, limit: 65536, .. }));
        let long = write_error(&file.tensor(&"n".repeat(1 << 20), &[], DType::F32)).to_string();
        assert!(long.len() < 200, "{} bytes", long.len());
    }
}
