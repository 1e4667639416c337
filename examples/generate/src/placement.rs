//! Placement: assigns each transformer block, and with it its weights and KV cache, to a tensor group. A group has one device,
//! or several that each have a part of the block: see [`fanout::sched::tensor_group`].

use crate::hparams::HParams;
use crate::model::{CacheOptions, ModelError, ROPE_FACTORS, copy_name};
use crate::tensor_names::ModelPart;
use fanout::tensor::TensorDesc;
use thiserror::Error;

/// The assignment of a model's tensors to groups. A group is its index in the list of groups.
#[derive(Clone, Debug)]
pub struct Placement {
    /// The weights to load from the file. A tensor that several groups need is listed once for each.
    pub weights: Vec<PlacedWeight>,
    /// By block: the group of its weights and its KV cache.
    pub blocks: Vec<usize>,
}

/// A weight on a group.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PlacedWeight {
    /// Name in the model; differs from `source` for copies and tied weights.
    pub name: String,
    /// Name in the file.
    pub source: String,
    /// Type and shape.
    pub desc: TensorDesc,
    /// Index of the group.
    pub group: usize,
}

/// A model cannot be placed.
#[derive(Debug, Error)]
pub enum PlacementError {
    /// The shares are not one finite number of at least 0 per device, or all of them are 0.
    #[error(
        "--split has {shares} shares for {devices} devices: give one positive number or 0 for each, and not only 0"
    )]
    Shares {
        /// Number of shares given.
        shares: usize,
        /// Number of devices.
        devices: usize,
    },
    /// The KV cache has an invalid layout for the model.
    #[error(transparent)]
    Model(#[from] ModelError),
}

impl Placement {
    /// Partitions the blocks over the groups, in order: each group gets its share of the number of blocks (`shares`) or,
    /// without shares, bytes in proportion to its `free` memory. The first group with a share gets the embedding. The last one
    /// gets the output weights, as a copy of the embedding if the model ties the two.
    ///
    /// # Errors
    /// [`PlacementError`]. Does not check whether the tensors fit into the memory: [`crate::engine::check_memory`] does.
    pub fn new(
        tensors: &[(String, TensorDesc)],
        hparams: &HParams,
        cache: &CacheOptions,
        free: &[u64],
        shares: Option<&[f32]>,
    ) -> Result<Placement, PlacementError> {
        let cache_bytes = cache.groups * (cache.keys(hparams)?.extent() + cache.values(hparams)?.extent());
        let spread = spread(tensors, hparams, cache_bytes, free, shares)?;
        let mut weights = Vec::new();
        let mut add = |name: &str, (source, desc): &(String, TensorDesc), group: usize| {
            weights.push(PlacedWeight { name: name.to_owned(), source: source.clone(), desc: *desc, group });
        };
        let tied = !tensors.iter().any(|(name, _)| name == "output.weight");
        for tensor in tensors {
            let name = &tensor.0;
            match ModelPart::of(name, hparams) {
                Some(ModelPart::Embedding) => {
                    add(name, tensor, spread.first);
                    if tied && spread.last != spread.first {
                        add("output.weight", tensor, spread.last);
                    }
                }
                Some(ModelPart::Block(i)) => add(name, tensor, spread.blocks[i]),
                Some(ModelPart::Output) => add(name, tensor, spread.last),
                Some(ModelPart::EveryBlock) => {
                    let mut groups = spread.blocks.clone();
                    groups.dedup();
                    groups.into_iter().for_each(|group| add(&copy_name(ROPE_FACTORS, group), tensor, group));
                }
                // `tensor_names::check` has named it.
                None => {}
            }
        }
        Ok(Placement { weights, blocks: spread.blocks })
    }
}

/// The groups of the embedding, of each block, and of the output.
struct GroupSpread {
    first: usize,
    blocks: Vec<usize>,
    last: usize,
}

fn spread(
    tensors: &[(String, TensorDesc)],
    hparams: &HParams,
    cache_bytes: usize,
    free: &[u64],
    shares: Option<&[f32]>,
) -> Result<GroupSpread, PlacementError> {
    // The weight of each part in the partition: the embedding, each block, the output.
    let mut sizes = vec![0.0; hparams.layers + 2];
    let shares: Vec<f64> = match shares {
        Some(shares) => {
            sizes[1..=hparams.layers].fill(1.0);
            shares.iter().map(|&share| f64::from(share)).collect()
        }
        None => {
            sizes[1..=hparams.layers].fill(cache_bytes as f64);
            for (name, desc) in tensors {
                match ModelPart::of(name, hparams) {
                    Some(ModelPart::Embedding) => sizes[0] += desc.extent() as f64,
                    Some(ModelPart::Block(i)) => sizes[i + 1] += desc.extent() as f64,
                    Some(ModelPart::Output) => sizes[hparams.layers + 1] += desc.extent() as f64,
                    _ => {}
                }
            }
            free.iter().map(|&bytes| bytes as f64).collect()
        }
    };
    let bad = || PlacementError::Shares { shares: shares.len(), devices: free.len() };
    let sum: f64 = shares.iter().sum();
    let valid = shares.len() == free.len() && shares.iter().all(|&s| s >= 0.0) && sum.is_finite() && sum > 0.0;
    let first = shares.iter().position(|&s| s > 0.0).filter(|_| valid).ok_or_else(bad)?;
    let last = shares.iter().rposition(|&s| s > 0.0).ok_or_else(bad)?;

    let total: f64 = sizes.iter().sum();
    let (mut before, mut device, mut ends_at) = (sizes[0], first, shares[first] / sum * total);
    let blocks = sizes[1..=hparams.layers].iter().map(|size| {
        // Each device covers an interval of the sizes; a block goes to the device that covers the block's midpoint.
        let middle = before + size / 2.0;
        while middle > ends_at && device < last {
            device += 1;
            ends_at += shares[device] / sum * total;
        }
        before += size;
        device
    });
    Ok(GroupSpread { first, blocks: blocks.collect(), last })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;
    use crate::hparams::{Arch, RopeFactors, Variant};
    use fanout::ops::rope::Rope;
    use fanout::tensor::DType;

    /// Places a model with 256 bytes of weights and 2048 bytes of KV cache per block.
    fn place(
        layers: usize,
        more: &[(&str, usize)],
        free: &[u64],
        shares: Option<&[f32]>,
    ) -> Result<Placement, PlacementError> {
        let arch = Arch::Llama;
        let hparams = HParams {
            arch,
            layers,
            width: 8,
            heads: 1,
            kv_heads: 1,
            head_width: 1,
            ff: 8,
            experts: None,
            vocab: 8,
            context: 256,
            rms_epsilon: 1e-5,
            rope: Rope::new(arch.spec().rope_mode, 2),
            rope_factors: RopeFactors::One,
            variant: Variant::LLAMA,
        };
        let tensor = |name: String, n: usize| (name, TensorDesc::contiguous(DType::F32, [n, 1, 1, 1]).unwrap());
        let mut tensors: Vec<_> = more.iter().map(|&(name, n)| tensor(name.to_owned(), n)).collect();
        tensors.extend((0..layers).map(|i| tensor(format!("blk.{i}.ffn_up.weight"), 64)));
        let cache = CacheOptions { groups: 1, cells: 256, dtype: DType::F32, flash_attn: true };
        Placement::new(&tensors, &hparams, &cache, free, shares)
    }

    #[test]
    fn blocks_follow_shares_or_free_memory() {
        let blocks = |layers, free: &[u64], shares| place(layers, &[], free, shares).unwrap().blocks;
        assert_eq!(blocks(8, &[1, 1], Some(&[3.0, 1.0])), [0, 0, 0, 0, 0, 0, 1, 1]);
        assert_eq!(blocks(4, &[9, 9, 9], Some(&[1.0, 0.0, 1.0])), [0, 0, 2, 2]);
        assert_eq!(blocks(3, &[9, 9], Some(&[0.0, 1.0])), [1, 1, 1]);
        assert_eq!(blocks(2, &[1], None), [0, 0]);
        assert_eq!(blocks(4, &[100, 300], None), [0, 1, 1, 1]);
        assert_eq!(blocks(2, &[1, 1, 1, 1, 1, 1, 1, 1], None), [1, 5], "more devices than blocks");
    }

    #[test]
    fn the_embedding_counts_for_the_first_device_and_the_output_for_the_last() {
        // The embedding and the output are as large as two blocks each.
        let ends = [("token_embd.weight", 1152), ("output.weight", 1152)];
        let placement = place(4, &ends, &[1, 1], None).unwrap();
        assert_eq!(placement.blocks, [0, 0, 1, 1]);
        let device = |name: &str| placement.weights.iter().find(|w| w.name == name).unwrap().group;
        assert_eq!((device("token_embd.weight"), device("output.weight")), (0, 1));
        assert_eq!(place(4, &ends[..1], &[1, 1], None).unwrap().blocks, [0, 1, 1, 1]);
    }

    #[test]
    fn shared_tensors_are_copied_to_every_device_that_needs_them() {
        let more = [("token_embd.weight", 8), ("rope_freqs.weight", 4), ("output_norm.weight", 8), ("blk.9.extra", 1)];
        let names = |free: &[u64]| -> Vec<(String, usize)> {
            let placement = place(2, &more, free, None).unwrap();
            placement.weights.into_iter().filter(|w| !w.name.starts_with("blk")).map(|w| (w.name, w.group)).collect()
        };
        let named = |list: &[(&str, usize)]| list.iter().map(|&(n, d)| (n.to_owned(), d)).collect::<Vec<_>>();
        let two = [
            ("token_embd.weight", 0),
            ("output.weight", 1),
            ("rope_freqs.weight@0", 0),
            ("rope_freqs.weight@1", 1),
            ("output_norm.weight", 1),
        ];
        assert_eq!(names(&[1, 1]), named(&two));
        assert_eq!(
            names(&[1]),
            named(&[("token_embd.weight", 0), ("rope_freqs.weight@0", 0), ("output_norm.weight", 0)])
        );
    }

    #[test]
    fn invalid_shares_are_rejected() {
        for shares in [&[1.0][..], &[0.0, 0.0], &[1.0, -1.0], &[f32::NAN, 1.0], &[f32::INFINITY, 1.0]] {
            let error = place(2, &[], &[1, 1], Some(shares)).unwrap_err().to_string();
            assert!(error.contains("for 2 devices"), "{error}");
        }
    }
}
