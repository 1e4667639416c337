//! Weight loading: allocates a model's tensors on their devices and uploads the weights, with one thread per device.
//!
//! A server that may have the weights on its own disk first gets their digests ([`load_by_digest`]); only the weights that it
//! lacks are sent.

use crate::hparams::HParams;
use crate::load_by_digest::{self, LoadProgress};
use crate::model::{CacheOptions, Model, ModelError, SequenceCache, StoredTensor};
use crate::model_file::{ModelFile, locate};
use crate::placement::{PlacedWeight, Placement};
use crate::progress::{LoadStats, Progress, Unit};
use fanout::device::{
    Device, DeviceError, MappedFile, MemoryBudget, Queue, Region, SourceError, TensorMemory, UploadSource,
};
use fanout::gguf::Gguf;
use fanout::sched::sampling::Sampling;
use fanout::sched::tensor_group::{StoredPart, TensorGroup, TensorSplit, TensorSplitError};
use fanout::tensor::TensorDesc;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Bytes copied between two updates of the progress bar.
const COPY_CHUNK_BYTES: u64 = 8 << 20;

/// Deadline for the uploads that are still in flight after the last one was submitted, for each reply of a load by digest, and for
/// clearing the caches of a device.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// Loading a model failed.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A device failed.
    #[error("{device}: {error}")]
    Device {
        /// The device's name.
        device: String,
        /// The device's error.
        error: DeviceError,
    },
    /// The KV cache has an invalid layout for the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model cannot be split over the devices of a group.
    #[error(transparent)]
    Split(#[from] TensorSplitError),
    /// The placement names a tensor that the file lacks.
    #[error("tensor {0:?} is not in the file")]
    NoTensor(String),
    /// The file cannot be mapped again.
    #[error("the weights cannot be mapped: {0}")]
    Map(#[from] std::io::Error),
    /// The loading thread panicked: a bug.
    #[error("the thread that loads {0} panicked (a bug)")]
    Thread(String),
}

/// The weights in a model file, by name.
#[derive(Debug)]
pub struct Weights<'a>(HashMap<&'a str, Weight<'a>>);

/// A weight in the file: its bytes, where they begin, and its digest once computed.
#[derive(Debug)]
pub struct Weight<'a> {
    bytes: &'a [u8],
    /// Number of the file, for a split model.
    part: usize,
    offset: u64,
    digest: OnceLock<[u8; 32]>,
}

impl<'a> Weights<'a> {
    /// The weights of the parsed model, which borrow from its mapped files.
    pub fn new(file: &'a ModelFile, gguf: &'a Gguf<'_>) -> Weights<'a> {
        let parts: Vec<&[u8]> = file.parts().iter().map(MappedFile::bytes).collect();
        Weights::of_parts(&parts, gguf)
    }

    /// The weights in the bytes of one file, or of all parts of a split model.
    pub fn of_parts(parts: &[&'a [u8]], gguf: &'a Gguf<'_>) -> Weights<'a> {
        let tensors = gguf.tensors.iter().filter_map(|info| {
            let (part, bytes) = locate(parts, info.bytes.clone())?;
            let (bytes, offset) = (parts[part].get(bytes.clone())?, bytes.start as u64);
            Some((&*info.name, Weight { bytes, part, offset, digest: OnceLock::new() }))
        });
        Weights(tensors.collect())
    }

    /// The weight with this name.
    pub fn get(&self, name: &str) -> Option<&Weight<'a>> {
        self.0.get(name)
    }
}

impl Weight<'_> {
    /// Length in bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// BLAKE3 digest of the bytes, computed on the first call.
    pub fn digest(&self) -> [u8; 32] {
        *self.digest.get_or_init(|| *blake3::hash(self.bytes).as_bytes())
    }
}

/// The placed model with no memory allocated yet. Graphs of it can be planned, so that the memory check runs before any load.
///
/// # Errors
/// [`LoadError::Model`].
pub fn model_without_memory(
    hparams: &HParams,
    cache_options: CacheOptions,
    sampling: Sampling,
    placement: &Placement,
    groups: &[TensorGroup],
) -> Result<Model, LoadError> {
    let ranks = |group: usize| groups.get(group).map_or(1, TensorGroup::ranks);
    let stored = |desc: TensorDesc, group: usize| StoredTensor { desc, group, regions: vec![None; ranks(group)] };
    let weights = placement.weights.iter().map(|placed| (placed.name.clone(), stored(placed.desc, placed.group)));
    let cache = SequenceCache::new(hparams, &cache_options, &placement.blocks, &stored)?;
    Ok(Model {
        hparams: hparams.clone(),
        weights: weights.collect(),
        caches: vec![cache; cache_options.groups],
        cache_options,
        sampling,
    })
}

/// Allocates every tensor, or part of one, that has no memory yet, and loads the weights among them from the file, with one
/// thread per device.
///
/// Returns one result per device. A failed device is unloaded again: all of its tensors are left without memory, so that a
/// later call starts over for that device only.
pub fn load(
    model: &mut Model,
    weights: &Weights<'_>,
    (placement, split): (&Placement, &TensorSplit),
    devices: &[Arc<dyn Device>],
    budget: &Arc<MemoryBudget>,
    progress: Progress,
) -> Vec<Result<LoadStats, LoadError>> {
    let name = |device: &Arc<dyn Device>| device.info().name.clone();
    let failed = |device: &Arc<dyn Device>, error| LoadError::Device { device: name(device), error };
    let jobs = devices.iter().enumerate().map(|at| {
        let jobs = allocate(model, weights, (placement, split), at, budget)?;
        // A device that has nothing to load needs no queue.
        let queue = if jobs.is_empty() { None } else { Some(at.1.queue(budget).map_err(|error| failed(at.1, error))?) };
        Ok((jobs, queue))
    });
    let mut jobs: Vec<Result<_, LoadError>> = jobs.collect();
    let queues = jobs.iter_mut().flatten().filter_map(|(_, queue)| queue.as_mut());
    let loading = queues.filter_map(|queue| queue.load_by_digest()).count();
    let loaded: Vec<_> = std::thread::scope(|scope| {
        let threads = devices.iter().zip(jobs).map(|(device, jobs)| {
            scope.spawn(move || {
                let (jobs, Some(queue)) = jobs? else { return Ok(LoadStats::default()) };
                load_device_weights(&**device, queue, &jobs, load_by_digest::hash_threads(loading), progress)
                    .map_err(|error| failed(device, error))
            })
        });
        let threads: Vec<_> = threads.collect();
        let join = |(thread, device): (ScopedJoinHandle<'_, _>, _)| {
            thread.join().unwrap_or_else(|_| Err(LoadError::Thread(name(device))))
        };
        threads.into_iter().zip(devices).map(join).collect()
    });
    let failed = loaded.iter().enumerate().filter(|(_, loaded)| loaded.is_err());
    failed.for_each(|(device, _)| unload(model, split, device));
    loaded
}

/// Gives the weights of a device the pages of the mapped files as their memory, read-only: see [`ImportHost::import_read_only`].
/// Nothing is read or copied. Returns the bytes of the device's weights; 0 for a device that cannot use the host's memory. The
/// weights of such devices, and parts that are not consecutive bytes of the file, are left to [`load`].
///
/// [`ImportHost::import_read_only`]: fanout::device::ImportHost::import_read_only
///
/// # Errors
/// The file cannot be mapped again, or the device refuses it.
pub fn map_weights(
    model: &mut Model,
    weights: &Weights<'_>,
    (placement, split): (&Placement, &TensorSplit),
    file: &ModelFile,
    (number, device): (usize, &dyn Device),
) -> Result<u64, LoadError> {
    let failed = |error| LoadError::Device { device: device.info().name.clone(), error };
    let Some(import) = device.import_host() else { return Ok(0) };
    let buffer = |part: &MappedFile| import.import_read_only(part.map_read_only(0..part.len())?).map_err(failed);
    let buffers = file.parts().iter().map(buffer).collect::<Result<Vec<_>, _>>()?;
    let mut bytes = 0;
    for placed in &placement.weights {
        let Some(rank) = rank_of(split, placed.group, number) else { continue };
        let weight = weights.get(&placed.source).ok_or_else(|| LoadError::NoTensor(placed.source.clone()))?;
        let part = part(split, &placed.name, rank)?;
        if let Some(stored) = model.weights.get_mut(&placed.name)
            && part.runs.count() == 1
            && let Some(buffer) = buffers.get(weight.part)
        {
            let (offset, part_bytes) = (weight.offset + part.runs.offset(), part.runs.bytes());
            stored.regions[rank] = Some(buffer.region(offset, part_bytes).map_err(failed)?);
            bytes += part_bytes;
        }
    }
    Ok(bytes)
}

/// Releases the memory of a device's tensors. The next [`load`] allocates and loads them again.
pub fn unload(model: &mut Model, split: &TensorSplit, device: usize) {
    let caches = model.caches.iter_mut().flat_map(|cache| cache.tensors_mut().map(|(_, stored)| stored));
    for stored in model.weights.values_mut().chain(caches) {
        if let Some(rank) = rank_of(split, stored.group, device) {
            stored.regions[rank] = None;
        }
    }
}

/// Releases the memory of the vectors that record which sequence wrote each cell. The next [`load`] allocates them again, zeroed:
/// otherwise the sequences of a new engine, whose tags begin at 1 again, would see cells of the sequences of the last one.
pub fn forget_cells(model: &mut Model) {
    let vectors = model.caches.iter_mut().flat_map(|cache| cache.cells.values_mut());
    for stored in vectors.flat_map(|vectors| [&mut vectors.tags, &mut vectors.positions]) {
        stored.regions.iter_mut().for_each(|region| *region = None);
    }
}

/// Overwrites the keys and values of all caches with zeros, and waits for that. Nothing that uses them may be in flight: different
/// queues of a device are not ordered. Without this, NaN in the cells of sequences that have left would reach other sequences.
///
/// # Errors
/// [`LoadError::Device`].
pub fn clear_caches(
    model: &Model,
    split: &TensorSplit,
    devices: &[Arc<dyn Device>],
    budget: &Arc<MemoryBudget>,
) -> Result<(), LoadError> {
    for (number, device) in devices.iter().enumerate() {
        let failed = |error| LoadError::Device { device: device.info().name.clone(), error };
        // Memory that is not allocated is zeroed when it is.
        let of_device = |stored: &StoredTensor| stored.regions.get(rank_of(split, stored.group, number)?)?.clone();
        let layers = model.caches.iter().flat_map(|cache| &cache.layers);
        let regions: Vec<Region> =
            layers.flat_map(|layer| [&layer.keys, &layer.values]).filter_map(of_device).collect();
        if regions.is_empty() {
            continue;
        }
        let mut queue = device.queue(budget).map_err(failed)?;
        regions.into_iter().try_for_each(|region| queue.fill(region, 0)).map_err(failed)?;
        queue.mark().wait(Some(Instant::now() + LOAD_TIMEOUT)).map_err(failed)?;
    }
    Ok(())
}

/// Bytes that the KV cache of one group of sequences takes on a device.
pub fn cache_bytes(model: &Model, split: &TensorSplit, (number, device): (usize, &dyn Device)) -> u64 {
    let names = model.caches.first().map(SequenceCache::names).unwrap_or_default();
    let parts = names.iter().filter_map(|name| split.parts(name)).flatten().filter(|part| part.device == number);
    let aligned = |part: &StoredPart| {
        device.alloc_size(&part.desc).checked_next_multiple_of(device.info().alignment.max(1)).unwrap_or(u64::MAX)
    };
    parts.fold(0, |sum: u64, part| sum.saturating_add(aligned(part)))
}

/// The rank of a device in a group, if it is in the group.
fn rank_of(split: &TensorSplit, group: usize, device: usize) -> Option<usize> {
    split.groups().get(group)?.devices().iter().position(|&other| other == device)
}

/// The part of a stored tensor that a rank has.
fn part(split: &TensorSplit, name: &str, rank: usize) -> Result<StoredPart, LoadError> {
    let part = split.parts(name).and_then(|parts| parts.get(rank)).cloned();
    part.ok_or_else(|| LoadError::NoTensor(name.to_owned()))
}

/// Allocates the tensors of a device that have no memory, and returns the weights among them, which must be loaded.
fn allocate<'a>(
    model: &mut Model,
    weights: &'a Weights<'_>,
    (placement, split): (&'a Placement, &TensorSplit),
    (number, device): (usize, &Arc<dyn Device>),
    budget: &Arc<MemoryBudget>,
) -> Result<Vec<WeightJob<'a>>, LoadError> {
    let lacks = |stored: &StoredTensor| {
        rank_of(split, stored.group, number).filter(|&rank| stored.regions.get(rank).is_some_and(Option::is_none))
    };
    let mut placed: Vec<(&PlacedWeight, usize, StoredPart)> = Vec::new();
    for weight in &placement.weights {
        if let Some(rank) = model.weights.get(&weight.name).and_then(lacks) {
            placed.push((weight, rank, part(split, &weight.name, rank)?));
        }
    }
    let mut caches: Vec<(&mut StoredTensor, usize, StoredPart)> = Vec::new();
    for (name, stored) in model.caches.iter_mut().flat_map(SequenceCache::tensors_mut) {
        if let Some(rank) = lacks(stored) {
            caches.push((stored, rank, part(split, &name, rank)?));
        }
    }
    if placed.is_empty() && caches.is_empty() {
        return Ok(Vec::new());
    }
    let parts = placed.iter().map(|(_, _, part)| part).chain(caches.iter().map(|(_, _, part)| part));
    let descs: Vec<TensorDesc> = parts.map(|part| part.desc).collect();
    let failed = |error| LoadError::Device { device: device.info().name.clone(), error };
    let memory = TensorMemory::new(&**device, descs, budget).map_err(failed)?;
    let (of_weights, of_caches) = memory.regions().split_at(placed.len());
    for ((stored, rank, _), region) in caches.iter_mut().zip(of_caches) {
        stored.regions[*rank] = Some(region.clone());
    }
    let mut jobs = Vec::with_capacity(placed.len());
    for ((placed, rank, part), region) in placed.into_iter().zip(of_weights) {
        let weight = weights.get(&placed.source).ok_or_else(|| LoadError::NoTensor(placed.source.clone()))?;
        jobs.push(WeightJob { name: &placed.source, part, region: region.clone(), weight });
        if let Some(stored) = model.weights.get_mut(&placed.name) {
            stored.regions[rank] = Some(region.clone());
        }
    }
    Ok(jobs)
}

/// A weight, or a part of one, to load into device memory.
pub struct WeightJob<'a> {
    /// Name in the file.
    pub name: &'a str,
    /// The part of the weight, with its type and shape.
    pub part: StoredPart,
    /// Destination on the device.
    pub region: Region,
    /// Source in the file.
    pub weight: &'a Weight<'a>,
}

/// Loads weights onto a device: by digest where the device supports it, and by upload for every weight that it does not find.
/// Up to `threads` threads compute digests.
///
/// # Errors
/// Any error of the device; [`DeviceError::Deadline`] if the last uploads or a reply take longer than 10 minutes.
pub fn load_device_weights(
    device: &dyn Device,
    mut queue: Box<dyn Queue>,
    jobs: &[WeightJob<'_>],
    threads: usize,
    progress: Progress,
) -> Result<LoadStats, DeviceError> {
    let name = &device.info().name;
    let bar = progress.start(format!("loading {name}"), Unit::Bytes, jobs.iter().map(|job| job.region.bytes()).sum());
    let mut found = Vec::new();
    if let Some(loads) = queue.load_by_digest() {
        let to_hash = jobs.iter().map(|job| job.weight.bytes()).sum();
        let hashing = progress.start(format!("hashing for {name}"), Unit::Bytes, to_hash);
        let progress = LoadProgress { hashed: &|bytes| hashing.add(bytes), found: &|bytes| bar.add(bytes) };
        found = load_by_digest::load_weights_by_digest(loads, jobs, threads, LOAD_TIMEOUT, progress)?;
    }
    let is_found = |number: usize| found.get(number).copied().unwrap_or(false);
    let from_disk = jobs.iter().enumerate().filter(|&(number, _)| is_found(number));
    let from_disk = from_disk.map(|(_, job)| job.region.bytes()).sum();
    for (_, job) in jobs.iter().enumerate().filter(|&(number, _)| !is_found(number)) {
        let (region, desc) = (&job.region, &job.part.desc);
        // Zero copy: a connection sends directly from the mapped file, so this thread does not copy the bytes first.
        let runs = &job.part.runs;
        if device.link_stats().is_some()
            && runs.count() == 1
            && let Some(bytes) = job.weight.bytes.get(runs.offset() as usize..runs.end() as usize)
        {
            queue.upload(region.clone(), Some(desc), UploadSource::Borrowed(bytes))?;
            bar.add(region.bytes());
            continue;
        }
        let mut reader = runs.reader(job.weight.bytes).map_err(|_| DeviceError::Misuse("the file is too short"))?;
        // Copies from the mapped file into the device's memory or staging buffer, without a buffer in between.
        let mut write = |to: &mut [u8]| {
            for chunk in to.chunks_mut(COPY_CHUNK_BYTES as usize) {
                reader.read(chunk).map_err(SourceError::new)?;
                bar.add(chunk.len() as u64);
            }
            Ok(())
        };
        queue.upload(region.clone(), Some(desc), UploadSource::Writer(&mut write))?;
    }
    queue.mark().wait(Some(Instant::now() + LOAD_TIMEOUT))?;
    Ok(LoadStats { from_server_disk: from_disk, ..bar.finish() })
}
