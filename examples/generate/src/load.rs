//! A model's tensors on their devices: first where they will lie, then their bytes, all devices at a time.

use crate::hyper::Hyper;
use crate::model::{CacheOptions, LayerCache, Model, ModelError, Stored};
use crate::placement::{Placed, Placement};
use crate::progress::{Loaded, Progress};
use fanout::device::{Account, Device, DeviceError, Region, Source, TensorMemory};
use fanout::gguf::TensorInfo;
use fanout::tensor::TensorDesc;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Bytes that go to a device between two looks at the progress.
const PIECE: u64 = 8 << 20;

/// How long a device may take for what is still on its way at the end.
const PATIENCE: Duration = Duration::from_secs(600);

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

/// What each device has loaded, in the list's order.
pub type LoadedAll = Vec<Loaded>;

/// The model as it will be, without memory: for planning.
///
/// # Errors
/// [`LoadError::Model`].
pub fn planned(hyper: &Hyper, cache_options: CacheOptions, placement: &Placement) -> Result<Model, LoadError> {
    let stored = |desc: TensorDesc, device: usize| Stored { desc, device, region: None };
    let weights = placement.weights.iter().map(|placed| (placed.name.clone(), stored(placed.desc, placed.device)));
    let (keys, values) = (cache_options.keys(hyper)?, cache_options.values(hyper)?);
    let block = |&device: &usize| LayerCache { keys: stored(keys, device), values: stored(values, device) };
    Ok(Model {
        hyper: hyper.clone(),
        weights: weights.collect(),
        cache: placement.blocks.iter().map(block).collect(),
        cache_options,
    })
}

/// Gives a planned model memory on its devices, and the weights their bytes out of the file. One thread for each device.
///
/// # Errors
/// [`LoadError`] for the first device, in the list's order, that fails.
pub fn load(
    mut model: Model,
    (file, tensors): (&[u8], &[TensorInfo]),
    placement: &Placement,
    devices: &[Arc<dyn Device>],
    account: &Arc<Account>,
    progress: &Progress,
) -> Result<(Model, LoadedAll), LoadError> {
    let bytes: HashMap<&str, &[u8]> =
        tensors.iter().filter_map(|info| Some((&*info.name, file.get(info.bytes.clone())?))).collect();
    let mut weights = Vec::with_capacity(devices.len());
    for (number, device) in devices.iter().enumerate() {
        let here = |of: &usize| *of == number;
        let placed: Vec<&Placed> = placement.weights.iter().filter(|placed| here(&placed.device)).collect();
        let mut caches: Vec<&mut Stored> = model.cache.iter_mut().flat_map(|c| [&mut c.keys, &mut c.values]).collect();
        caches.retain(|stored| here(&stored.device));
        let descs = placed.iter().map(|placed| placed.desc).chain(caches.iter().map(|stored| stored.desc));
        let failed = |source| LoadError::Device { device: device.info().name.clone(), source };
        let memory = TensorMemory::new(&**device, descs, account).map_err(failed)?;
        let (of_weights, of_caches) = memory.regions().split_at(placed.len());
        for (stored, region) in caches.iter_mut().zip(of_caches) {
            stored.region = Some(region.clone());
        }
        let mut jobs = Vec::with_capacity(placed.len());
        for (placed, region) in placed.iter().zip(of_weights) {
            let source = bytes.get(&*placed.source).ok_or_else(|| LoadError::NoTensor(placed.source.clone()))?;
            jobs.push(Job { desc: placed.desc, region: region.clone(), bytes: source });
            if let Some(stored) = model.weights.get_mut(&placed.name) {
                stored.region = Some(region.clone());
            }
        }
        weights.push(jobs);
    }
    let loaded = std::thread::scope(|scope| {
        let threads = devices
            .iter()
            .zip(weights)
            .map(|(device, jobs)| (device, scope.spawn(move || upload(&**device, &jobs, account, progress))));
        let threads: Vec<_> = threads.collect();
        let join =
            |(device, thread): (&Arc<dyn Device>, std::thread::ScopedJoinHandle<'_, Result<Loaded, DeviceError>>)| {
                let name = || device.info().name.clone();
                let done = thread.join().map_err(|_| LoadError::Thread(name()))?;
                done.map_err(|source| LoadError::Device { device: name(), source })
            };
        threads.into_iter().map(join).collect::<Result<Vec<_>, _>>()
    })?;
    Ok((model, loaded))
}

/// A tensor to be uploaded.
struct Job<'a> {
    desc: TensorDesc,
    region: Region,
    bytes: &'a [u8],
}

fn upload(
    device: &dyn Device,
    jobs: &[Job<'_>],
    account: &Arc<Account>,
    progress: &Progress,
) -> Result<Loaded, DeviceError> {
    let bar = progress.device(&device.info().name, jobs.iter().map(|job| job.region.bytes()).sum());
    let mut queue = device.queue(account)?;
    for Job { desc, region, bytes } in jobs {
        let mut rest = *bytes;
        // Straight from the file's pages to where they go.
        let mut write = |to: &mut [u8]| {
            for piece in to.chunks_mut(PIECE as usize) {
                let (now, later) = rest.split_at_checked(piece.len()).ok_or(std::io::ErrorKind::UnexpectedEof)?;
                piece.copy_from_slice(now);
                rest = later;
                bar.add(now.len() as u64);
            }
            Ok(())
        };
        queue.upload(region.clone(), Some(desc), Source::Writer(&mut write))?;
    }
    queue.mark().wait(Some(Instant::now() + PATIENCE))?;
    Ok(bar.finish())
}
