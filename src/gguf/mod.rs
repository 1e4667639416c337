//! GGUF, the file format of ggml's models: metadata, then tensor infos, then the tensors' bytes.
//!
//! The file is parsed where it lies, usually mapped into memory: texts and arrays are borrowed from it. Nothing in it is
//! trusted: each length is checked against what is left of the file before anything is allocated for it, and each
//! tensor's bytes against the file's end. Source: ggml's `docs/gguf.md`, versions 2 and 3.
//!
//! [`read_tensors`] is for files that may change or end while they are in use, which a mapping would not survive: it reads what
//! stands before the tensors, and nothing is mapped.
//!
//! [`Writer`] builds files in memory.

mod error;
mod head;
mod read;
#[cfg(test)]
mod tests;
mod value;
mod writer;

use std::collections::HashSet;
use std::ops::Range;

use crate::tensor::{DType, TensorDesc};

pub use error::{Fault, GgufError};
use error::{Named, Nth, Shown};
pub use head::{HeadError, MAX_HEAD, read_tensors};
use read::Reader;
pub use value::{Array, KeyError, Metadata, Value, required};
pub use writer::{WriteError, Writer};

/// Alignment of the tensors' data where the file names none.
const ALIGNMENT: u32 = 32;
/// The most entries of the metadata: a model has some dozens.
const MAX_ENTRIES: usize = 1 << 16;
/// The most tensors of a file: the largest models have some ten thousand.
const MAX_TENSORS: usize = 1 << 18;
/// Bytes of the smallest entry of the metadata: an empty key, a type, a byte.
const SMALLEST_ENTRY: u64 = 8 + 4 + 1;
/// Bytes of the smallest tensor info: an empty name, one dimension, a type, an offset.
const SMALLEST_INFO: u64 = 8 + 4 + 8 + 4 + 8;

/// A parsed file.
#[derive(Clone, Debug)]
pub struct Gguf<'a> {
    /// 2 or 3.
    pub version: u32,
    /// Metadata.
    pub metadata: Metadata<'a>,
    /// Tensors, in the file's order.
    pub tensors: Vec<TensorInfo>,
}

/// A tensor in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name, for example `blk.0.attn_q.weight`; unique in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Element counts, fastest dimension first; missing ones are 1, none is 0.
    pub ne: [usize; 4],
    /// Where its data lies in the file; always within it, and as long as type and shape say.
    pub bytes: Range<usize>,
}

impl<'a> Gguf<'a> {
    /// Parses a whole file.
    ///
    /// # Errors
    /// [`GgufError`] for the first part that is not as it should be, and for one file of a split model.
    pub fn parse(file: &'a [u8]) -> Result<Gguf<'a>, GgufError> {
        let (gguf, reader) = Gguf::parse_head(file, file.len())?;
        refuse_split(&reader, &gguf.metadata)?;
        Ok(gguf)
    }

    /// Parses what stands before the tensors of a file of `end` bytes; it may be one of a split model.
    fn parse_head(head: &'a [u8], end: usize) -> Result<(Gguf<'a>, Reader<'a>), GgufError> {
        let mut reader = Reader::new(head, 0);
        let version = header(&mut reader)?;
        let tensors = count(&mut reader, "number of tensors", SMALLEST_INFO, MAX_TENSORS)?;
        let entries = count(&mut reader, "number of metadata entries", SMALLEST_ENTRY, MAX_ENTRIES)?;
        let metadata = metadata(&mut reader, entries)?;
        let alignment = alignment(&reader, &metadata)?;
        let infos: Vec<_> = (0..tensors).map(|at| Info::read(&mut reader, at)).collect::<Result<_, _>>()?;
        // The end of the infos is within the file, and an alignment fits 32 bits: no overflow in 64.
        let data = (reader.at() as u64).next_multiple_of(alignment as u64);
        let mut names = HashSet::new();
        if let Some(twice) = infos.iter().find(|info| !names.insert(info.name)) {
            let fault = Fault::Twice(Shown(twice.name).to_text());
            return Err(GgufError { offset: twice.offset, what: "tensor name".to_owned(), fault });
        }
        let tensors = infos.iter().map(|info| info.place(end, data, alignment)).collect::<Result<_, _>>()?;
        Ok((Gguf { version, metadata, tensors }, reader))
    }

    /// The tensor of a name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|tensor| tensor.name == name)
    }
}

fn header(reader: &mut Reader<'_>) -> Result<u32, GgufError> {
    let start = reader.clone();
    let magic = reader.array("magic number")?;
    if &magic != b"GGUF" {
        return Err(start.error("magic number", Fault::Magic(magic)));
    }
    let start = reader.clone();
    match reader.u32("version")? {
        version @ 2..=3 => Ok(version),
        other if (1..=3).contains(&other.swap_bytes()) => Err(start.error("version", Fault::BigEndian)),
        other => Err(start.error("version", Fault::Version(other))),
    }
}

/// A number of items, which what is left can hold and which is not out of all proportion.
fn count(reader: &mut Reader<'_>, what: &str, smallest: u64, limit: usize) -> Result<usize, GgufError> {
    let start = reader.clone();
    let count = reader.count(what, smallest)?;
    if count > limit { Err(start.error(what, Fault::TooMany { count, limit })) } else { Ok(count) }
}

fn metadata<'a>(reader: &mut Reader<'a>, count: usize) -> Result<Metadata<'a>, GgufError> {
    let start = reader.clone();
    let mut entries = Vec::new();
    for at in 0..count {
        let key = reader.text(Nth("key of metadata entry", at))?;
        entries.push((key, Value::read(reader, Named("metadata entry", key))?));
    }
    Metadata::new(entries).map_err(|key| start.error("metadata", Fault::Twice(Shown(key).to_text())))
}

fn alignment(reader: &Reader<'_>, metadata: &Metadata<'_>) -> Result<usize, GgufError> {
    let refused = |found: String| reader.error("general.alignment", Fault::Alignment(found));
    let alignment = metadata.int("general.alignment").map_err(|e| refused(e.to_string()))?.unwrap_or(ALIGNMENT);
    if alignment.is_power_of_two() { Ok(alignment as usize) } else { Err(refused(alignment.to_string())) }
}

/// One file of a model that was split says so in its metadata; alone it lacks tensors.
fn refuse_split(reader: &Reader<'_>, metadata: &Metadata<'_>) -> Result<(), GgufError> {
    let number = |key| if let Some(&Value::Int(n)) = metadata.get(key) { u64::try_from(n).unwrap_or(0) } else { 0 };
    let parts = number("split.count");
    if parts > 1 {
        let part = number("split.no").saturating_add(1);
        return Err(reader.error("split.count", Fault::Split { part, parts }));
    }
    Ok(())
}

/// A tensor info as it stands in the file.
struct Info<'a> {
    /// Of the info in the file.
    offset: usize,
    name: &'a str,
    dtype: DType,
    ne: [usize; 4],
    /// From the start of the tensor data.
    data: u64,
}

impl<'a> Info<'a> {
    fn read(reader: &mut Reader<'a>, at: usize) -> Result<Info<'a>, GgufError> {
        let offset = reader.at();
        let name = reader.text(Nth("name of tensor", at))?;
        let what = Named("tensor", name);
        let start = reader.clone();
        let dims = reader.u32(what)?;
        if !(1..=4).contains(&dims) {
            return Err(start.error(what, Fault::Dimensions(dims)));
        }
        let mut ne = [1; 4];
        for d in 0..dims {
            let start = reader.clone();
            let n = reader.u64(what)?;
            if n == 0 {
                return Err(start.error(what, Fault::Empty(d)));
            }
            // A number too large for the machine becomes one that no shape has.
            ne[d as usize] = usize::try_from(n).unwrap_or(usize::MAX);
        }
        let start = reader.clone();
        let number = reader.u32(what)?;
        let dtype = DType::from_wire(number).ok_or_else(|| start.error(what, Fault::TensorType(number)))?;
        Ok(Info { offset, name, dtype, ne, data: reader.u64(what)? })
    }

    /// Finds the data: `start` is where that of all tensors begins, in bytes of a file of `end`.
    fn place(&self, end: usize, start: u64, alignment: usize) -> Result<TensorInfo, GgufError> {
        let Info { offset, name, dtype, ne, data } = *self;
        let error = |fault| GgufError { offset, what: Named("tensor", name).to_string(), fault };
        if !data.is_multiple_of(alignment as u64) {
            return Err(error(Fault::Misaligned { offset: data, alignment }));
        }
        let bytes = TensorDesc::contiguous(dtype, ne).map_err(|e| error(e.into()))?.extent();
        let outside = || error(Fault::Outside { dtype, ne, bytes, start: start.saturating_add(data), end });
        let first = start.checked_add(data).and_then(|at| usize::try_from(at).ok()).ok_or_else(outside)?;
        let last = first.checked_add(bytes).filter(|&last| last <= end).ok_or_else(outside)?;
        Ok(TensorInfo { name: name.to_owned(), dtype, ne, bytes: first..last })
    }
}
