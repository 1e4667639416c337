//! GGUF, the file format of ggml's models: metadata, then tensor infos, then the tensors' bytes. Source: ggml's `docs/gguf.md`,
//! versions 2 and 3.
//!
//! [`Gguf::parse`] parses a file in place, usually a memory mapping, and borrows texts and arrays from it. Start with this
//! file; `reader.rs` has the cursor, `value.rs` the metadata, and `error.rs` the errors. The file is untrusted: each length is
//! checked against the remaining bytes before memory is allocated for it, and each tensor's bytes against the end of the file.
//!
//! [`read_tensors()`] is for files that may be changed or truncated while they are in use, where an access to a mapping would
//! kill the process. It reads the metadata and the tensor infos with `read`, and maps nothing.
//!
//! [`Writer`] builds files in memory.

mod error;
mod read_tensors;
mod reader;
#[cfg(test)]
mod tests;
mod value;
mod writer;

use std::collections::HashSet;
use std::ops::Range;

use crate::tensor::{DType, TensorDesc};

pub use error::{GgufError, GgufFault};
use error::{NamedPart, NumberedPart, Shortened};
pub use read_tensors::{HeadError, MAX_HEAD_BYTES, read_tensors};
use reader::Reader;
pub use value::{Array, KeyError, Metadata, Value, required};
pub use writer::{WriteError, Writer};

/// Alignment of the tensors' data in bytes, if the metadata has no `general.alignment`.
const DEFAULT_ALIGNMENT: u32 = 32;
/// Limit on metadata entries. A model has some dozens.
const MAX_ENTRIES: usize = 1 << 16;
/// Limit on the tensors of a file. The largest models have some ten thousand.
const MAX_TENSORS: usize = 1 << 18;
/// Size in bytes of the smallest metadata entry: an empty key, a type, a byte.
const MIN_ENTRY_BYTES: u64 = 8 + 4 + 1;
/// Size in bytes of the smallest tensor info: an empty name, one dimension, a type, an offset.
const MIN_TENSOR_INFO_BYTES: u64 = 8 + 4 + 8 + 4 + 8;

/// A parsed GGUF file.
#[derive(Clone, Debug)]
pub struct Gguf<'a> {
    /// Format version: 2 or 3.
    pub version: u32,
    /// Metadata entries.
    pub metadata: Metadata<'a>,
    /// Tensors, in the order of the file.
    pub tensors: Vec<TensorInfo>,
}

/// A tensor of the file: name, type, shape and position of its data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name, for example `blk.0.attn_q.weight`. Unique in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Element counts, fastest dimension first. Dimensions that the file omits are 1; none is 0.
    pub ne: [usize; 4],
    /// Byte range of the data in the file. Within the file, and as long as type and shape require.
    pub bytes: Range<usize>,
}

impl<'a> Gguf<'a> {
    /// Parses a whole file.
    ///
    /// # Errors
    /// [`GgufError`] for the first invalid part, and for one file of a split model.
    pub fn parse(file: &'a [u8]) -> Result<Gguf<'a>, GgufError> {
        let (gguf, reader) = Gguf::parse_head(file, file.len())?;
        reject_split(&reader, &gguf.metadata)?;
        Ok(gguf)
    }

    /// As [`Gguf::parse`], and accepts one file of a split model, which has a part of the tensors.
    ///
    /// # Errors
    /// [`GgufError`] for the first invalid part.
    pub fn parse_part(file: &'a [u8]) -> Result<Gguf<'a>, GgufError> {
        Ok(Gguf::parse_head(file, file.len())?.0)
    }

    /// Parses the header, the metadata and the tensor infos of a file of `end` bytes. Accepts a file of a split model.
    fn parse_head(head: &'a [u8], end: usize) -> Result<(Gguf<'a>, Reader<'a>), GgufError> {
        let mut reader = Reader::new(head, 0);
        let version = header(&mut reader)?;
        let tensors = count(&mut reader, "number of tensors", MIN_TENSOR_INFO_BYTES, MAX_TENSORS)?;
        let entries = count(&mut reader, "number of metadata entries", MIN_ENTRY_BYTES, MAX_ENTRIES)?;
        let metadata = metadata(&mut reader, entries)?;
        let alignment = alignment(&reader, &metadata)?;
        let infos: Vec<_> = (0..tensors).map(|at| RawTensorInfo::read(&mut reader, at)).collect::<Result<_, _>>()?;
        // No overflow in 64 bits: the end of the infos is within the file, and the alignment has 32 bits.
        let data = (reader.offset() as u64).next_multiple_of(alignment as u64);
        let mut names = HashSet::new();
        if let Some(twice) = infos.iter().find(|info| !names.insert(info.name)) {
            let fault = GgufFault::Duplicate(Shortened(twice.name).to_text());
            return Err(GgufError { offset: twice.offset, what: "tensor name".to_owned(), fault });
        }
        let tensors = infos.iter().map(|info| info.locate(end, data, alignment)).collect::<Result<_, _>>()?;
        Ok((Gguf { version, metadata, tensors }, reader))
    }

    /// The tensor with this name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

fn header(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let start = reader.clone();
    let magic = reader.array("magic number")?;
    if &magic != b"GGUF" {
        return Err(start.error("magic number", GgufFault::Magic(magic)));
    }
    let start = reader.clone();
    match reader.u32("version")? {
        version @ 2..=3 => Ok(version),
        other if (1..=3).contains(&other.swap_bytes()) => Err(start.error("version", GgufFault::BigEndian)),
        other => Err(start.error("version", GgufFault::Version(other))),
    }
}

/// Reads a number of items, and checks that the remaining bytes can hold as many and that it is at most `limit`.
fn count(reader: &mut Reader<'_>, what: &str, smallest: u64, limit: usize) -> Result<usize, GgufError> {
    let start = reader.clone();
    let count = reader.count(what, smallest)?;
    if count > limit { Err(start.error(what, GgufFault::TooMany { count, limit })) } else { Ok(count) }
}

fn metadata<'a>(reader: &mut Reader<'a>, count: usize) -> Result<Metadata<'a>, GgufError> {
    let start = reader.clone();
    let mut entries = Vec::new();
    for at in 0..count {
        let key = reader.text(NumberedPart("key of metadata entry", at))?;
        entries.push((key, Value::read(reader, NamedPart("metadata entry", key))?));
    }
    Metadata::new(entries).map_err(|key| start.error("metadata", GgufFault::Duplicate(Shortened(key).to_text())))
}

fn alignment(reader: &Reader<'_>, metadata: &Metadata<'_>) -> Result<usize, GgufError> {
    let refused = |found: String| reader.error("general.alignment", GgufFault::Alignment(found));
    let alignment = metadata.int("general.alignment").map_err(|e| refused(e.to_string()))?.unwrap_or(DEFAULT_ALIGNMENT);
    if alignment.is_power_of_two() { Ok(alignment as usize) } else { Err(refused(alignment.to_string())) }
}

/// Rejects one file of a split model, which its metadata mark: it does not have all tensors.
fn reject_split(reader: &Reader<'_>, metadata: &Metadata<'_>) -> Result<(), GgufError> {
    let number = |key| if let Some(&Value::Int(n)) = metadata.get(key) { u64::try_from(n).unwrap_or(0) } else { 0 };
    let parts = number("split.count");
    if parts > 1 {
        let part = number("split.no").saturating_add(1);
        return Err(reader.error("split.count", GgufFault::Split { part, parts }));
    }
    Ok(())
}

/// A tensor info as encoded in the file.
struct RawTensorInfo<'a> {
    /// Offset of the info in the file.
    offset: usize,
    name: &'a str,
    dtype: DType,
    ne: [usize; 4],
    /// Offset of the tensor's data, in bytes from the start of all tensor data.
    data: u64,
}

impl<'a> RawTensorInfo<'a> {
    fn read(reader: &mut Reader<'a>, at: usize) -> Result<RawTensorInfo<'a>, GgufError> {
        let offset = reader.offset();
        let name = reader.text(NumberedPart("name of tensor", at))?;
        let what = NamedPart("tensor", name);
        let start = reader.clone();
        let dims = reader.u32(what)?;
        if !(1..=4).contains(&dims) {
            return Err(start.error(what, GgufFault::Dimensions(dims)));
        }
        let mut ne = [1; 4];
        for d in 0..dims {
            let start = reader.clone();
            let n = reader.u64(what)?;
            if n == 0 {
                return Err(start.error(what, GgufFault::Empty(d)));
            }
            // A value beyond `usize` becomes one that every shape check refuses.
            ne[d as usize] = usize::try_from(n).unwrap_or(usize::MAX);
        }
        let start = reader.clone();
        let number = reader.u32(what)?;
        let dtype = DType::from_wire(number).ok_or_else(|| start.error(what, GgufFault::TensorType(number)))?;
        Ok(RawTensorInfo { offset, name, dtype, ne, data: reader.u64(what)? })
    }

    /// Computes the position of the data in a file of `end` bytes, with the tensor data starting at byte `start`.
    fn locate(&self, end: usize, start: u64, alignment: usize) -> Result<TensorInfo, GgufError> {
        let RawTensorInfo { offset, name, dtype, ne, data } = *self;
        let error = |fault| GgufError { offset, what: NamedPart("tensor", name).to_string(), fault };
        if !data.is_multiple_of(alignment as u64) {
            return Err(error(GgufFault::Misaligned { offset: data, alignment }));
        }
        let bytes = TensorDesc::contiguous(dtype, ne).map_err(|e| error(e.into()))?.extent();
        let outside = || error(GgufFault::OutOfFile { dtype, ne, bytes, start: start.saturating_add(data), end });
        let first = start.checked_add(data).and_then(|at| usize::try_from(at).ok()).ok_or_else(outside)?;
        let last = first.checked_add(bytes).filter(|&last| last <= end).ok_or_else(outside)?;
        Ok(TensorInfo { name: name.to_owned(), dtype, ne, bytes: first..last })
    }
}
