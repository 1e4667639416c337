//! A model that is placed on open devices by the options of a run, before any memory is allocated: what the admission check needs.

use crate::args::Args;
use crate::engine::{self, EngineOptions};
use crate::hparams::HParams;
use crate::load;
use crate::model::{CacheOptions, Model};
use crate::placement::Placement;
use crate::tensor_names::ModelPart;
use fanout::device::Device;
use fanout::gguf::Gguf;
use fanout::sched::sampling::Sampling;
use fanout::sched::tensor_group::{TensorGroup, TensorSplit};
use fanout::tensor::TensorDesc;
use std::sync::Arc;

/// A model without memory, its placement, and how an engine will run it.
pub struct PlacedModel {
    /// Most tokens of a sequence.
    pub context: usize,
    /// The placement of the weights and blocks.
    pub placement: Placement,
    /// The model.
    pub model: Model,
    /// The split of its tensors over the devices of each group.
    pub split: TensorSplit,
    /// How an engine runs batches.
    pub options: EngineOptions,
}

impl PlacedModel {
    /// Places a model on `devices`, for sequences with prompts of up to `prompt` tokens. Does not check whether it fits:
    /// [`engine::check_memory`] does.
    ///
    /// # Errors
    /// A `--ctx` that is too small, a `--split` that does not match the devices, or a model that cannot be placed or split.
    pub fn new(
        args: &Args,
        devices: &[Arc<dyn Device>],
        gguf: &Gguf<'_>,
        hparams: &HParams,
        prompt: usize,
        sampling: Sampling,
    ) -> anyhow::Result<PlacedModel> {
        let context = args.padded_context(prompt, hparams.context)?;
        let (groups, shares) = args.tensor_groups(devices.len())?;
        let sequences = args.sequences();
        // A batch in flight for each stage of the pipeline.
        let sequence_groups = args.sequence_groups.map_or(groups.len(), usize::from).min(sequences);
        let options = EngineOptions {
            ubatch: args.ubatch as usize,
            depth: args.depth(groups.len(), sequence_groups),
            sequences: sequences.div_ceil(sequence_groups),
        };
        let cells = context.saturating_mul(options.sequences);
        let cache =
            CacheOptions { groups: sequence_groups, cells, dtype: args.kv_type.dtype(), flash_attn: args.flash_attn };
        let factors = hparams.rope_factors_name(context);
        let used = gguf.tensors.iter().filter(|info| {
            ModelPart::of(&info.name, hparams) != Some(ModelPart::EveryBlock) || Some(&*info.name) == factors
        });
        let tensors = used.map(|info| Ok((info.name.clone(), TensorDesc::contiguous(info.dtype, info.ne)?)));
        let tensors = tensors.collect::<anyhow::Result<Vec<_>>>()?;
        let free = devices.iter().map(|device| Ok(device.memory()?.free)).collect::<anyhow::Result<Vec<_>>>()?;
        let sum =
            |group: &TensorGroup| group.devices().iter().fold(0, |sum: u64, &device| sum.saturating_add(free[device]));
        let free: Vec<u64> = groups.iter().map(sum).collect();
        let placement = Placement::new(&tensors, hparams, &cache, &free, shares.as_deref())?;
        let model = load::model_without_memory(hparams, cache, sampling, &placement, &groups)?;
        let split =
            engine::split_model(&model, groups)?.with_copied_collectives(args.compare).with_bf16_sums(args.bf16_sums);
        Ok(PlacedModel { context, placement, model, split, options })
    }
}
