//! Which device each block of a model lies on, and how many bytes that takes: all known before anything is read.

use crate::hyper::Hyper;
use crate::model::{CacheOptions, ModelError, copy_name};
use fanout::device::{Device, DeviceError};
use fanout::tensor::TensorDesc;
use std::fmt::Write as _;
use std::sync::Arc;
use thiserror::Error;

/// Where a model's tensors go. Devices are numbers in the list.
#[derive(Clone, Debug)]
pub struct Placement {
    /// What is read from the file: some tensors go to several devices.
    pub weights: Vec<Placed>,
    /// By block, the device of its weights and its cache.
    pub blocks: Vec<usize>,
    /// By device.
    pub needs: Vec<Need>,
}

/// A tensor on a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Placed {
    /// What the model calls it.
    pub name: String,
    /// What the file calls it.
    pub source: String,
    /// Type and shape.
    pub desc: TensorDesc,
    /// The device's number.
    pub device: usize,
}

/// What a device has to hold, in bytes.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Need {
    /// The device's name.
    pub device: String,
    /// Weights.
    pub weights: u64,
    /// Keys and values.
    pub cache: u64,
    /// What running takes; 0 until it is known.
    pub compute: u64,
    /// What is free there.
    pub free: u64,
}

impl Need {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights.saturating_add(self.cache).saturating_add(self.compute)
    }
}

/// Why a model cannot be placed.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// Neither one share for each device, nor shares at all.
    #[error(
        "--split has {shares} shares for {devices} devices: give one positive number or 0 for each, and not only 0"
    )]
    Shares {
        /// How many were given.
        shares: usize,
        /// How many devices.
        devices: usize,
    },
    /// More than there is room for.
    #[error("the model does not fit, nothing was loaded:\n{}", table(.0))]
    DoesNotFit(Vec<Need>),
    /// A cache that cannot be.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A device that does not say what it has.
    #[error("{device}: {source}")]
    Device {
        /// Its name.
        device: String,
        /// What happened.
        source: DeviceError,
    },
}

impl Placement {
    /// Spreads a model over devices: blocks in order, by `shares` of their number or, without any, by their bytes in
    /// proportion to what each device has free. The embedding goes to the first device that has a share and the output to the
    /// last, which gets a copy of the embedding where the output is tied to it.
    ///
    /// # Errors
    /// [`PlacementError`], but for [`PlacementError::DoesNotFit`], which [`Placement::check`] finds.
    pub fn new(
        tensors: &[(String, TensorDesc)],
        hyper: &Hyper,
        cache: &CacheOptions,
        devices: &[Arc<dyn Device>],
        shares: Option<&[f64]>,
    ) -> Result<Placement, PlacementError> {
        let mut needs = Vec::with_capacity(devices.len());
        for device in devices {
            let name = device.info().name.clone();
            let memory = device.memory().map_err(|source| PlacementError::Device { device: name.clone(), source })?;
            needs.push(Need { device: name, free: memory.free, ..Need::default() });
        }
        let reserved = |device: usize, desc: &TensorDesc| {
            let device = &devices[device];
            device.alloc_size(desc).next_multiple_of(device.info().alignment.max(1))
        };
        let kept = [cache.keys(hyper)?, cache.values(hyper)?];
        let layout = spread(tensors, hyper, &kept, &needs, shares)?;

        let mut weights = Vec::new();
        let tied = !tensors.iter().any(|(name, _)| name == "output.weight");
        for (name, desc) in tensors {
            let mut put = |name: &str, source: &str, device: usize| {
                needs[device].weights = needs[device].weights.saturating_add(reserved(device, desc));
                weights.push(Placed { name: name.to_owned(), source: source.to_owned(), desc: *desc, device });
            };
            match Part::of(name, hyper) {
                Some(Part::Embedding) => {
                    put(name, name, layout.first);
                    if tied && layout.last != layout.first {
                        put("output.weight", name, layout.last);
                    }
                }
                Some(Part::Block(i)) => put(name, name, layout.blocks[i]),
                Some(Part::Output) => put(name, name, layout.last),
                Some(Part::EveryBlock) => {
                    let mut used = layout.blocks.clone();
                    used.dedup();
                    used.into_iter().for_each(|device| put(&copy_name(name, device), name, device));
                }
                None => log::info!("tensor {name:?} is not used"),
            }
        }
        for &device in &layout.blocks {
            let bytes = kept.iter().map(|desc| reserved(device, desc)).sum();
            needs[device].cache = needs[device].cache.saturating_add(bytes);
        }
        Ok(Placement { weights, blocks: layout.blocks, needs })
    }

    /// That all devices have the room, once it is known what running takes on each.
    ///
    /// # Errors
    /// [`PlacementError::DoesNotFit`] with the figures of all devices.
    pub fn check(&self, compute: &[u64]) -> Result<(), PlacementError> {
        let mut needs = self.needs.clone();
        needs.iter_mut().zip(compute).for_each(|(need, &bytes)| need.compute = bytes);
        if needs.iter().all(|need| need.total() <= need.free) { Ok(()) } else { Err(PlacementError::DoesNotFit(needs)) }
    }
}

/// What a tensor belongs to.
enum Part {
    Embedding,
    Block(usize),
    Output,
    EveryBlock,
}

impl Part {
    fn of(name: &str, hyper: &Hyper) -> Option<Part> {
        if let Some(rest) = name.strip_prefix("blk.") {
            let i = rest.split('.').next()?.parse().ok()?;
            return (i < hyper.layers).then_some(Part::Block(i));
        }
        match name {
            "token_embd.weight" => Some(Part::Embedding),
            "output_norm.weight" | "output.weight" | "output.bias" => Some(Part::Output),
            "rope_freqs.weight" => Some(Part::EveryBlock),
            _ => None,
        }
    }
}

/// Devices of a model's parts.
struct Spread {
    first: usize,
    blocks: Vec<usize>,
    last: usize,
}

fn spread(
    tensors: &[(String, TensorDesc)],
    hyper: &Hyper,
    kept: &[TensorDesc],
    needs: &[Need],
    shares: Option<&[f64]>,
) -> Result<Spread, PlacementError> {
    // The size of each part: the embedding, the blocks, the output.
    let mut sizes = vec![0.0; hyper.layers + 2];
    let shares = match shares {
        Some(shares) => {
            sizes[1..=hyper.layers].fill(1.0);
            shares.to_vec()
        }
        None => {
            let cache: usize = kept.iter().map(TensorDesc::extent).sum();
            sizes[1..=hyper.layers].fill(cache as f64);
            for (name, desc) in tensors {
                match Part::of(name, hyper) {
                    Some(Part::Embedding) => sizes[0] += desc.extent() as f64,
                    Some(Part::Block(i)) => sizes[i + 1] += desc.extent() as f64,
                    Some(Part::Output) => sizes[hyper.layers + 1] += desc.extent() as f64,
                    _ => {}
                }
            }
            needs.iter().map(|need| need.free as f64).collect()
        }
    };
    let bad = || PlacementError::Shares { shares: shares.len(), devices: needs.len() };
    let sum: f64 = shares.iter().sum();
    let sound = shares.len() == needs.len() && shares.iter().all(|&s| s >= 0.0) && sum.is_finite() && sum > 0.0;
    let first = shares.iter().position(|&s| s > 0.0).filter(|_| sound).ok_or_else(bad)?;
    let last = shares.iter().rposition(|&s| s > 0.0).ok_or_else(bad)?;

    let total: f64 = sizes.iter().sum();
    let (mut before, mut device, mut ends_at) = (sizes[0], first, shares[first] / sum * total);
    let blocks = sizes[1..=hyper.layers].iter().map(|size| {
        // A part goes where its middle falls.
        let middle = before + size / 2.0;
        while middle > ends_at && device < last {
            device += 1;
            ends_at += shares[device] / sum * total;
        }
        before += size;
        device
    });
    Ok(Spread { first, blocks: blocks.collect(), last })
}

/// One line per device.
fn table(needs: &[Need]) -> String {
    let mib = |bytes: u64| format!("{:.1}", bytes as f64 / f64::from(1 << 20));
    let mut text = String::new();
    for need in needs {
        let Need { device, weights, cache, compute, free } = need;
        let verdict = match need.total().checked_sub(*free) {
            Some(over) if over > 0 => format!(": {} MiB too much", mib(over)),
            _ => String::new(),
        };
        let _ = writeln!(
            text,
            "  {device}: weights {} + cache {} + computing {} = {} MiB of {} free{verdict}",
            mib(*weights),
            mib(*cache),
            mib(*compute),
            mib(need.total()),
            mib(*free),
        );
    }
    text + "give more or other devices, another --split, or a smaller --ctx or --ubatch"
}
