//! Allocates a model's tensors on their devices, and loads the weights among them ([`fanout::weights`]).

use crate::hparams::HParams;
use crate::model::{CacheOptions, Model, ModelError, SequenceCache, StoredTensor};
use crate::placement::{PlacedWeight, Placement};
use crate::progress::{Progress, Task, Unit};
use fanout::device::{Device, DeviceError, MemoryBudget, Region, TensorMemory};
use fanout::sched::sampling::Sampling;
use fanout::sched::tensor_group::{StoredPart, TensorGroup, TensorSplit, TensorSplitError};
use fanout::tensor::TensorDesc;
use fanout::weights::{self, LoadJob, LoadOptions, LoadProgress, LoadStats, Weights, WeightsError};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Deadline for clearing the caches of a device.
const CLEAR_TIMEOUT: Duration = Duration::from_secs(600);

/// Loading a model failed.
#[derive(Debug, Error)]
pub enum LoadError {
    /// The KV cache has an invalid layout for the model.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model cannot be split over the devices of a group.
    #[error(transparent)]
    Split(#[from] TensorSplitError),
    /// The placement names a tensor that the file lacks.
    #[error("tensor {0:?} is not in the file")]
    NoTensor(String),
    /// A device failed, or the weights cannot be mapped.
    #[error(transparent)]
    Weights(#[from] WeightsError),
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
    let mut refused = Vec::new();
    let jobs = devices.iter().enumerate().map(|at| {
        let jobs = allocate(model, weights, (placement, split), at, budget);
        let (jobs, error) = jobs.map_or_else(|error| (Vec::new(), Some(error)), |jobs| (jobs, None));
        refused.push(error);
        jobs
    });
    let jobs: Vec<_> = jobs.collect();
    let bars: Vec<_> = devices.iter().zip(&jobs).map(|(device, jobs)| LoadBars::new(progress, device, jobs)).collect();
    let show = |event| match event {
        LoadProgress::Hashed { device, bytes } => bars[device].hashed(progress, bytes),
        LoadProgress::Loaded { device, bytes } => bars[device].loading.iter().for_each(|bar| bar.add(bytes)),
        _ => {}
    };
    let loaded = weights::load(devices, &jobs, budget, &LoadOptions::default().with_progress(&show));
    let result = |(refused, loaded): (Option<LoadError>, Result<_, WeightsError>)| match refused {
        Some(error) => Err(error),
        None => loaded.map_err(LoadError::from),
    };
    let loaded: Vec<_> = refused.into_iter().zip(loaded).map(result).collect();
    let failed = loaded.iter().enumerate().filter(|(_, loaded)| loaded.is_err());
    failed.for_each(|(device, _)| unload(model, split, device));
    loaded
}

/// Gives the weights of a device the pages of the mapped files as their memory ([`Weights::map`]). Nothing is read or copied. Returns
/// the bytes of the device's weights; 0 for a device that cannot use the host's memory. What cannot be mapped is left to [`load`].
///
/// # Errors
/// The file cannot be mapped again, or the device refuses it.
pub fn map_weights(
    model: &mut Model,
    weights: &Weights<'_>,
    (placement, split): (&Placement, &TensorSplit),
    (number, device): (usize, &dyn Device),
) -> Result<u64, LoadError> {
    let Some(pages) = weights.map(device)? else { return Ok(0) };
    let mut bytes = 0;
    for placed in &placement.weights {
        let Some(rank) = rank_of(split, placed.group, number) else { continue };
        let weight = weights.get(&placed.source).ok_or_else(|| LoadError::NoTensor(placed.source.clone()))?;
        let part = part(split, &placed.name, rank)?;
        if let Some(stored) = model.weights.get_mut(&placed.name)
            && let Some(region) = pages.region(weight, part.runs)
        {
            bytes += region.bytes();
            stored.regions[rank] = Some(region);
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
/// [`LoadError::Weights`].
pub fn clear_caches(
    model: &Model,
    split: &TensorSplit,
    devices: &[Arc<dyn Device>],
    budget: &Arc<MemoryBudget>,
) -> Result<(), LoadError> {
    for (number, device) in devices.iter().enumerate() {
        let failed = |error| failed_on(&**device, error);
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
        queue.mark().wait(Some(Instant::now() + CLEAR_TIMEOUT)).map_err(failed)?;
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

fn failed_on(device: &dyn Device, error: DeviceError) -> LoadError {
    WeightsError::Device { device: device.info().name.clone(), error }.into()
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
) -> Result<Vec<LoadJob<'a>>, LoadError> {
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
    let failed = |error| failed_on(&**device, error);
    let memory = TensorMemory::new(&**device, descs, budget).map_err(failed)?;
    let (of_weights, of_caches) = memory.regions().split_at(placed.len());
    for ((stored, rank, _), region) in caches.iter_mut().zip(of_caches) {
        stored.regions[*rank] = Some(region.clone());
    }
    let mut jobs = Vec::with_capacity(placed.len());
    for ((placed, rank, part), region) in placed.into_iter().zip(of_weights) {
        let weight = weights.get(&placed.source).ok_or_else(|| LoadError::NoTensor(placed.source.clone()))?;
        jobs.push(LoadJob { weight, runs: part.runs, desc: part.desc, region: region.clone() });
        if let Some(stored) = model.weights.get_mut(&placed.name) {
            stored.regions[rank] = Some(region.clone());
        }
    }
    Ok(jobs)
}

/// The progress of loading a device.
struct LoadBars {
    device: String,
    /// `None` for a device that has nothing to load.
    loading: Option<Task>,
    to_hash: u64,
    /// Starts with the first weight that is hashed.
    hashing: OnceLock<Task>,
}

impl LoadBars {
    fn new(progress: Progress, device: &Arc<dyn Device>, jobs: &[LoadJob<'_>]) -> LoadBars {
        let device = device.info().name.clone();
        let (bytes, to_hash) = jobs.iter().fold((0, 0), |(bytes, to_hash), job| {
            (bytes + job.region.bytes(), to_hash + job.weight.bytes().len() as u64)
        });
        let loading = (bytes > 0).then(|| progress.start(format!("loading {device}"), Unit::Bytes, bytes));
        LoadBars { device, loading, to_hash, hashing: OnceLock::new() }
    }

    fn hashed(&self, progress: Progress, bytes: u64) {
        let start = || progress.start(format!("hashing for {}", self.device), Unit::Bytes, self.to_hash);
        self.hashing.get_or_init(start).add(bytes);
    }
}
