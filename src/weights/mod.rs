//! Weights: maps the files of a model, and loads their tensors onto devices.
//!
//! [`ModelFile`] maps one file or all parts of a split model, and [`ModelFile::weights`] lists its tensors. [`Weights::load`] allocates
//! each weight on the device that a function returns for its name, and loads all devices at the same time. A server first receives
//! the digests of its weights and loads those that it finds on its own disk; the client sends the others.
//!
//! ```
//! # use fanout::gguf::Writer;
//! # use fanout::tensor::DType;
//! use fanout::device::MemoryBudget;
//! use fanout::registry::{Options, Registry};
//! use fanout::sched::TaskBuilder;
//! use fanout::weights::{LoadOptions, ModelFile};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("model.gguf");
//! # let file = Writer::new().tensor("blk.0.w", &[32], DType::F32).tensor("blk.1.w", &[32], DType::F32);
//! # std::fs::write(&path, file.to_bytes()?)?;
//! let file = ModelFile::open(&path)?;
//! let devices = Registry::detect().open("CPU,CPU", &Options::default().with_memory(vec![16 << 20]))?;
//! let budget = MemoryBudget::new(16 << 20);
//! let place = |name: &str| Some(usize::from(!name.starts_with("blk.0."))); // block 0 on the first device
//! let loaded = file.weights()?.load(&devices, place, &budget, &LoadOptions::default())?;
//!
//! let mut task = TaskBuilder::new();
//! let weight = &loaded["blk.1.w"];
//! task.stored("blk.1.w", weight.desc, weight.device, Some(weight.region.clone()))?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A runtime that loads parts of weights, or reloads the devices of a lost server only, allocates the memory itself and passes
//! [`LoadJob`]s to [`load()`]. Weights larger than the memory stay in the mapped file: [`LoadOptions::mapped`], or [`Weights::map`] for
//! one device.

#[cfg(feature = "client")]
mod by_digest;
mod load;
mod mapped;
mod model_file;
#[cfg(feature = "safetensors")]
mod safetensors;

use crate::device::{Device, DeviceError, MappedFile};
use crate::gguf::{GgufError, KeyError, TensorInfo};
use crate::io_hint::io_hint;
use crate::tensor::TensorDesc;
pub use load::{LoadJob, LoadOptions, LoadProgress, LoadStats, LoadedWeight, load};
pub use mapped::MappedWeights;
pub use model_file::ModelFile;
use std::collections::HashMap;
use std::io;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::OnceLock;
use thiserror::Error;

/// A model file cannot be used, or weights cannot be loaded.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// A file cannot be opened or mapped.
    #[error("{}{}: {error}{}", path.display(), if *is_part { ", a part of the split model" } else { "" }, io_hint(error))]
    File {
        /// The file.
        path: PathBuf,
        /// Whether the model has several files.
        is_part: bool,
        /// The system's error.
        error: io::Error,
    },
    /// A file is not valid GGUF.
    #[error("{}: {error}", path.display())]
    Gguf {
        /// The file.
        path: PathBuf,
        /// The first invalid part.
        error: Box<GgufError>,
    },
    /// The header of a safetensors file is invalid.
    #[error("{}: {reason}", path.display())]
    Safetensors {
        /// The file.
        path: PathBuf,
        /// The first invalid part.
        reason: String,
    },
    /// A tensor of a safetensors file has a type or shape that devices do not have.
    #[error("{}: tensor {tensor:?} cannot be used: {reason}", path.display())]
    UnsupportedTensor {
        /// The file.
        path: PathBuf,
        /// The tensor.
        tensor: String,
        /// Its type or shape.
        reason: String,
    },
    /// The metadata of a file do not say which part of a split model it is.
    #[error("{}: {error}", path.display())]
    Metadata {
        /// The file.
        path: PathBuf,
        /// The invalid key.
        error: KeyError,
    },
    /// A part of a split model without the others.
    #[error(
        "{}: this is part {part} of {parts} of a split model: give a name that ends in -{part:05}-of-{parts:05}.gguf, with the \
         other parts beside it",
        path.display()
    )]
    OtherPartsMissing {
        /// The file.
        path: PathBuf,
        /// The number of the part, from 1.
        part: u64,
        /// The number of parts.
        parts: u64,
    },
    /// A part of a split model whose name has another number than its metadata.
    #[error("{}: this is not part {part} of the split model, as its name says", path.display())]
    WrongPart {
        /// The file.
        path: PathBuf,
        /// The number in its name, from 1.
        part: usize,
    },
    /// A tensor is in two parts of a split model.
    #[error("{}: {tensor:?} is also in another part of the split model", path.display())]
    Duplicate {
        /// The file of the second tensor.
        path: PathBuf,
        /// The tensor.
        tensor: String,
    },
    /// A weight is placed on a device that is not in the list (caller's error).
    #[error("{weight:?} is placed on device {device}, but there are {devices} devices, numbered from 0")]
    UnknownDevice {
        /// The weight.
        weight: String,
        /// The number of the device.
        device: usize,
        /// The number of devices.
        devices: usize,
    },
    /// A device failed.
    #[error("{}", error.text_on(device))]
    Device {
        /// The device's name.
        device: String,
        /// The device's error.
        error: DeviceError,
    },
}

/// The weights of a model file, by name and in the order of the file. They borrow the bytes of the mapped file.
#[derive(Debug)]
pub struct Weights<'a> {
    weights: Vec<Weight<'a>>,
    by_name: HashMap<String, usize>,
    /// Empty for weights in memory, which cannot be mapped.
    files: &'a [MappedFile],
}

/// A weight of a model file.
#[derive(Debug)]
pub struct Weight<'a> {
    name: String,
    desc: TensorDesc,
    bytes: &'a [u8],
    /// Number of the file, for a split model.
    part: usize,
    /// Offset in the file, in bytes.
    offset: u64,
    digest: OnceLock<[u8; 32]>,
}

impl WeightsError {
    fn on(device: &dyn Device, error: DeviceError) -> WeightsError {
        WeightsError::Device { device: device.info().name.clone(), error }
    }
}

impl<'a> Weights<'a> {
    /// The tensors `tensors` of the file, in place of all that [`ModelFile::weights`] lists: a runtime that uses a range of the rows
    /// of a tensor lists it as a tensor. Positions are those in all parts of the model, one after the other, as in
    /// [`ModelFile::parse_gguf`]; tensors that are not in the file are left out.
    pub fn of_file(file: &'a ModelFile, tensors: &[TensorInfo]) -> Weights<'a> {
        let parts: Vec<&[u8]> = file.parts().iter().map(MappedFile::bytes).collect();
        Weights { files: file.parts(), ..Weights::of_bytes(&parts, tensors) }
    }

    /// As [`Weights::of_file`], of files whose bytes are in memory.
    pub fn of_bytes(parts: &[&'a [u8]], tensors: &[TensorInfo]) -> Weights<'a> {
        let weight = |info: &TensorInfo| {
            let (part, range) = locate(parts, info.bytes.clone())?;
            let desc = TensorDesc::contiguous(info.dtype, info.ne).ok()?;
            let (bytes, offset) = (parts[part].get(range.clone())?, range.start as u64);
            let digest = OnceLock::new();
            (bytes.len() == desc.extent()).then(|| Weight {
                name: info.name.clone(),
                desc,
                bytes,
                part,
                offset,
                digest,
            })
        };
        let weights: Vec<_> = tensors.iter().filter_map(weight).collect();
        let by_name = weights.iter().enumerate().map(|(number, weight)| (weight.name.clone(), number)).collect();
        Weights { weights, by_name, files: &[] }
    }

    /// The weight with this name.
    pub fn get(&self, name: &str) -> Option<&Weight<'a>> {
        self.weights.get(*self.by_name.get(name)?)
    }

    /// All weights, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = &Weight<'a>> {
        self.weights.iter()
    }
}

impl Weight<'_> {
    /// The name in the file.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Type and shape. The weight is contiguous.
    pub fn desc(&self) -> TensorDesc {
        self.desc
    }

    /// The bytes, as many as [`TensorDesc::extent`].
    pub fn bytes(&self) -> &[u8] {
        self.bytes
    }

    /// BLAKE3 digest of the bytes, computed on the first call.
    #[cfg(feature = "client")]
    fn digest(&self) -> [u8; 32] {
        *self.digest.get_or_init(|| *blake3::hash(self.bytes).as_bytes())
    }
}

/// The part that has a range of bytes of all parts one after the other: its number, and the range in it.
fn locate(parts: &[&[u8]], bytes: Range<usize>) -> Option<(usize, Range<usize>)> {
    let mut start = 0;
    for (number, part) in parts.iter().enumerate() {
        if bytes.start < start + part.len() {
            let range = bytes.start - start..bytes.end.checked_sub(start)?;
            return (range.end <= part.len()).then_some((number, range));
        }
        start += part.len();
    }
    None
}
