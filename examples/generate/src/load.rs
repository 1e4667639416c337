//! A model's tensors on their devices: first where they will lie, then their bytes, all devices at a time.

use crate::hparams::HParams;
use crate::load_by_digest;
use crate::model::{CacheOptions, LayerCache, Model, ModelError, StoredTensor};
use crate::placement::{PlacedWeight, Placement};
use crate::progress::{LoadStats, Progress};
use fanout::device::{Account, Device, DeviceError, Queue, Region, Source, SourceError, TensorMemory};
use fanout::gguf::Gguf;
use fanout::tensor::TensorDesc;
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::thread::ScopedJoinHandle;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Bytes that go to a device between two looks at the progress.
const COPY_CHUNK_BYTES: u64 = 8 << 20;

/// How long a device may take for what is still on its way at the end.
const LOAD_TIMEOUT: Duration = Duration::from_secs(600);

/// Why a model is not on its devices.
#[derive(Debug, Error)]
pub enum LoadError {
    /// A device failed.
    #[error("{device}: {source}")]
    Device {
        /// Its name.
        device: String,
        /// What happened.
        source: DeviceError,
    },
    /// A cache that cannot be.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A tensor that the placement has and the file has not.
    #[error("tensor {0:?} is not in the file")]
    NoTensor(String),
    /// A thread that ended otherwise than by returning: a bug.
    #[error("loading to {0} ended without a result")]
    Thread(String),
}

/// The weights in a model's file, by their names there.
#[derive(Debug)]
pub struct Weights<'a>(HashMap<&'a str, Weight<'a>>);

/// A weight in the file.
#[derive(Debug)]
pub struct Weight<'a> {
    bytes: &'a [u8],
    digest: OnceLock<[u8; 32]>,
}

impl<'a> Weights<'a> {
    /// Those of a file.
    pub fn new(file: &'a [u8], gguf: &'a Gguf<'_>) -> Weights<'a> {
        let weight = |bytes| Weight { bytes, digest: OnceLock::new() };
        let tensors = gguf.tensors.iter();
        Weights(tensors.filter_map(|info| Some((&*info.name, weight(file.get(info.bytes.clone())?)))).collect())
    }

    /// The weight of a name.
    pub fn get(&self, name: &str) -> Option<&Weight<'a>> {
        self.0.get(name)
    }
}

impl Weight<'_> {
    /// BLAKE3 of its bytes, computed when somebody asks for it first.
    pub fn digest(&self) -> [u8; 32] {
        *self.digest.get_or_init(|| *blake3::hash(self.bytes).as_bytes())
    }
}

/// The model as it will be, without memory: for planning.
///
/// # Errors
/// [`LoadError::Model`].
pub fn model_without_memory(
    hyper: &HParams,
    cache_options: CacheOptions,
    placement: &Placement,
) -> Result<Model, LoadError> {
    let stored = |desc: TensorDesc, device: usize| StoredTensor { desc, device, region: None };
    let weights = placement.weights.iter().map(|placed| (placed.name.clone(), stored(placed.desc, placed.device)));
    let (keys, values) = (cache_options.keys(hyper)?, cache_options.values(hyper)?);
    let block = |&device: &usize| LayerCache { keys: stored(keys, device), values: stored(values, device) };
    Ok(Model {
        hparams: hyper.clone(),
        weights: weights.collect(),
        cache: placement.blocks.iter().map(block).collect(),
        cache_options,
    })
}

/// Gives tensors that have no memory yet some on their devices, and the weights among them their bytes out of the file. One
/// thread for each device. By device: what it has loaded, or why it has not, which leaves its tensors without memory.
pub fn load(
    model: &mut Model,
    weights: &Weights<'_>,
    placement: &Placement,
    devices: &[Arc<dyn Device>],
    account: &Arc<Account>,
    progress: &Progress,
) -> Vec<Result<LoadStats, LoadError>> {
    let name = |device: &Arc<dyn Device>| device.info().name.clone();
    let failed = |device: &Arc<dyn Device>, source| LoadError::Device { device: name(device), source };
    let jobs = devices.iter().enumerate().map(|at| {
        let jobs = allocate(model, weights, placement, at, account)?;
        // A device without weights to load needs no queue.
        let queue =
            if jobs.is_empty() { None } else { Some(at.1.queue(account).map_err(|source| failed(at.1, source))?) };
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
                    .map_err(|source| failed(device, source))
            })
        });
        let threads: Vec<_> = threads.collect();
        let join = |(thread, device): (ScopedJoinHandle<'_, _>, _)| {
            thread.join().unwrap_or_else(|_| Err(LoadError::Thread(name(device))))
        };
        threads.into_iter().zip(devices).map(join).collect()
    });
    let failed = loaded.iter().enumerate().filter(|(_, loaded)| loaded.is_err());
    failed.for_each(|(device, _)| unload(model, device));
    loaded
}

/// Takes a device's tensors their memory: [`load`] gives them some again.
pub fn unload(model: &mut Model, device: usize) {
    let stored = model.weights.values_mut().chain(model.cache.iter_mut().flat_map(|c| [&mut c.keys, &mut c.values]));
    stored.filter(|stored| stored.device == device).for_each(|stored| stored.region = None);
}

/// Memory for the tensors of a device that have none; what is to be uploaded there.
fn allocate<'a>(
    model: &mut Model,
    weights: &'a Weights<'_>,
    placement: &'a Placement,
    (number, device): (usize, &Arc<dyn Device>),
    account: &Arc<Account>,
) -> Result<Vec<WeightJob<'a>>, LoadError> {
    let lacks = |stored: &StoredTensor| stored.device == number && stored.region.is_none();
    let placed = placement.weights.iter().filter(|placed| model.weights.get(&placed.name).is_some_and(lacks));
    let placed: Vec<&PlacedWeight> = placed.collect();
    let mut caches: Vec<&mut StoredTensor> =
        model.cache.iter_mut().flat_map(|c| [&mut c.keys, &mut c.values]).collect();
    caches.retain(|stored| lacks(stored));
    if placed.is_empty() && caches.is_empty() {
        return Ok(Vec::new());
    }
    let descs = placed.iter().map(|placed| placed.desc).chain(caches.iter().map(|stored| stored.desc));
    let failed = |source| LoadError::Device { device: device.info().name.clone(), source };
    let memory = TensorMemory::new(&**device, descs, account).map_err(failed)?;
    let (of_weights, of_caches) = memory.regions().split_at(placed.len());
    for (stored, region) in caches.iter_mut().zip(of_caches) {
        stored.region = Some(region.clone());
    }
    let mut jobs = Vec::with_capacity(placed.len());
    for (placed, region) in placed.iter().zip(of_weights) {
        let weight = weights.get(&placed.source).ok_or_else(|| LoadError::NoTensor(placed.source.clone()))?;
        jobs.push(WeightJob { name: &placed.source, desc: placed.desc, region: region.clone(), weight });
        if let Some(stored) = model.weights.get_mut(&placed.name) {
            stored.region = Some(region.clone());
        }
    }
    Ok(jobs)
}

/// A tensor to be brought to its place.
pub struct WeightJob<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Type and shape.
    pub desc: TensorDesc,
    /// Its place.
    pub region: Region,
    /// Its bytes.
    pub weight: &'a Weight<'a>,
}

/// Brings weights to a device: those that it does not find by itself are sent. Up to `threads` hash.
///
/// # Errors
/// Whatever the device says.
pub fn load_device_weights(
    device: &dyn Device,
    mut queue: Box<dyn Queue>,
    jobs: &[WeightJob<'_>],
    threads: usize,
    progress: &Progress,
) -> Result<LoadStats, DeviceError> {
    let bar = progress.device(&device.info().name, jobs.iter().map(|job| job.region.bytes()).sum());
    let mut there = Vec::new();
    if let Some(loads) = queue.load_by_digest() {
        there = load_by_digest::load_weights_by_digest(loads, jobs, threads, LOAD_TIMEOUT, |bytes| bar.add(bytes))?;
    }
    let is_there = |number: usize| there.get(number).copied().unwrap_or(false);
    let recalled = jobs.iter().enumerate().filter(|&(number, _)| is_there(number));
    let recalled = recalled.map(|(_, job)| job.region.bytes()).sum();
    for (_, WeightJob { desc, region, weight, .. }) in jobs.iter().enumerate().filter(|&(number, _)| !is_there(number))
    {
        // A connection sends the file's pages as they are: nobody waits while they are copied first.
        if device.link_stats().is_some() && weight.bytes.len() as u64 == region.bytes() {
            queue.upload(region.clone(), Some(desc), Source::Borrowed(weight.bytes))?;
            bar.add(region.bytes());
            continue;
        }
        let mut rest = weight.bytes;
        // Straight from the file's pages to where they go.
        let mut write = |to: &mut [u8]| {
            for piece in to.chunks_mut(COPY_CHUNK_BYTES as usize) {
                let (now, later) =
                    rest.split_at_checked(piece.len()).ok_or_else(|| SourceError::new("the file is too short"))?;
                piece.copy_from_slice(now);
                rest = later;
                bar.add(now.len() as u64);
            }
            Ok(())
        };
        queue.upload(region.clone(), Some(desc), Source::Writer(&mut write))?;
    }
    queue.mark().wait(Some(Instant::now() + LOAD_TIMEOUT))?;
    Ok(LoadStats { from_server_disk: recalled, ..bar.finish() })
}
