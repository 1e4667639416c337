//! Tensor groups (tensor parallelism): several devices act as one, and each computes a part of every large product.
//!
//! A task is built for groups instead of devices: a stored tensor's device number is the number of a group. [`TensorSplit`]
//! decides for each stored tensor whether the ranks of its group (the devices, in order) have a part of it or all of it.
//! [`TensorSplit::apply`] turns a task into one for all devices, with each node on its rank and a collective wherever a rank
//! needs what the other ranks have.
//!
//! ```text
//! split_class   dimensions that are split at the same relative positions
//! views         views of split slots
//! propagate     walks the nodes and decides how each tensor is split
//! rules         one rule per op
//! emit          the task of all ranks
//! ```
//!
//! # How a transformer is split
//! The first product after a norm reads whole activations, so its weight is split by rows: queries, keys and values by heads,
//! gate and up projection by channels. What follows is split likewise (ROPE, the KV cache, attention, the activation), up to the
//! next product, whose weight is split by columns: each rank then has a partial sum of the result, and an all-reduce adds
//! these in the order of ranks. So a block has two all-reduces. Norms, biases of partial sums and residuals are computed by
//! every rank. Logits are split by vocabulary.
//!
//! # What cannot be split
//! - Fewer heads of keys than ranks: each rank computes and stores all keys and values, and reads the head that its queries
//!   use, if the number of ranks is a multiple of the number of these heads. Otherwise every rank computes all of attention.
//! - Heads whose parts end within a block of a quantised weight: their results are gathered, and the weight is split by rows.
//! - Embeddings are mirrored. If they are tied to the output, each rank computes its part of the logits with some rows.
//! - Any op without a rule: every rank computes it with whole sources.

mod emit;
mod propagate;
mod rules;
mod split_class;
mod views;

use super::{Devices, Storage, Task};
use crate::device::{CollectiveGroup, Device, Membership, Region, Support};
use crate::graph::{BuildError, TensorId};
use crate::ops::collective::{Collective, CollectiveKind};
use crate::ops::{MAX_SRC, NodeView, Op, OpCode, Sources};
use crate::tensor::{ByteRuns, DIMS, DType, TensorDesc};
use emit::SumExchange;
use propagate::{Decisions, SlotState};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use thiserror::Error;
use views::{block_len, part_desc};

/// Weights up to this many bytes are mirrored if their results would have to be gathered: reading them takes less time than an
/// exchange between devices.
const SMALL_WEIGHT_BYTES: usize = 1 << 20;

/// Devices that act as one. A device's position in the group is its rank.
#[derive(Clone, PartialEq, Debug)]
pub struct TensorGroup {
    devices: Vec<usize>,
    shares: Vec<f32>,
}

impl TensorGroup {
    /// Maximum number of devices of a group.
    pub const MAX_RANKS: usize = CollectiveGroup::MAX_RANKS;

    /// A group of the devices with these indices in the scheduler's list, and the share of the work of each.
    ///
    /// # Errors
    /// [`TensorSplitError::Group`] unless there are 1 to [`TensorGroup::MAX_RANKS`] different devices and as many positive shares.
    pub fn new(devices: Vec<usize>, shares: Vec<f32>) -> Result<TensorGroup, TensorSplitError> {
        let distinct: std::collections::BTreeSet<_> = devices.iter().collect();
        if devices.is_empty() || devices.len() > TensorGroup::MAX_RANKS || distinct.len() != devices.len() {
            return Err(TensorSplitError::Group("a group has 1 to 64 different devices"));
        }
        if shares.len() != devices.len() || !shares.iter().all(|share| share.is_finite() && *share > 0.0) {
            return Err(TensorSplitError::Group("a group has one share above 0 for each of its devices"));
        }
        Ok(TensorGroup { devices, shares })
    }

    /// Number of devices.
    pub fn ranks(&self) -> usize {
        self.devices.len()
    }

    /// By rank: the index of the device.
    pub fn devices(&self) -> &[usize] {
        &self.devices
    }

    /// By rank: the share of the work.
    pub fn shares(&self) -> &[f32] {
        &self.shares
    }
}

/// How the ranks of a group hold a stored tensor.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Distribution {
    /// Each rank has all of it.
    Mirrored,
    /// Each rank has a range of one dimension.
    Split {
        /// The dimension, 0 (fastest) to 3.
        axis: usize,
        /// By rank: the elements of the dimension.
        parts: Vec<Range<usize>>,
    },
}

/// The part of a stored tensor that a rank holds.
#[derive(Clone, PartialEq, Debug)]
pub struct StoredPart {
    /// The rank's device.
    pub device: usize,
    /// Type and shape of the part, which is contiguous.
    pub desc: TensorDesc,
    /// Where its bytes lie in the tensor.
    pub runs: ByteRuns,
}

/// The decisions for the stored tensors of a model. All tasks that use these tensors are split with the same decisions.
#[derive(Clone, Debug)]
pub struct TensorSplit {
    groups: Vec<TensorGroup>,
    stored: BTreeMap<String, StoredSplit>,
    copied_collectives: bool,
    sums: SumExchange,
}

#[derive(Clone, Debug)]
struct StoredSplit {
    desc: TensorDesc,
    distribution: Distribution,
    /// By rank.
    parts: Vec<StoredPart>,
}

/// A task for all ranks, made from a task for groups.
#[derive(Clone, Debug)]
pub struct RankTask {
    task: Arc<Task>,
    inputs: BTreeMap<TensorId, TensorId>,
    outputs: BTreeMap<TensorId, (TensorDesc, Vec<OutputPart>)>,
}

/// The part of an output that one rank has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OutputPart {
    /// The tensor to read.
    pub tensor: TensorId,
    /// The dimension of the output that is split.
    pub axis: usize,
    /// The elements of that dimension that the tensor has.
    pub range: Range<usize>,
}

/// A task cannot be split.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum TensorSplitError {
    /// Invalid devices or shares (caller's error).
    #[error("{0}")]
    Group(&'static str),
    /// A stored tensor or a pin names a group that does not exist (caller's error).
    #[error("{name:?} is on group {group}, but there are {groups} groups, numbered from 0")]
    UnknownGroup {
        /// The tensor, or the node's result.
        name: String,
        /// The index.
        group: usize,
        /// Number of groups.
        groups: usize,
    },
    /// A node that writes a tensor again, or a stored tensor, is pinned to another group (caller's error).
    #[error("the node that writes {name:?} is pinned to group {pin}, but the tensor is on group {home}")]
    PinnedElsewhere {
        /// The tensor.
        name: String,
        /// The group of the pin.
        pin: usize,
        /// The group of the tensor.
        home: usize,
    },
    /// The task has collective nodes, as if it were one of all ranks already (caller's error).
    #[error("the task has collective nodes: only tasks for groups can be split")]
    AlreadySplit,
    /// Stored tensors are identified by their names (caller's error).
    #[error("two stored tensors of a task are named {0:?}, or one has no name")]
    StoredName(String),
    /// The task uses a stored tensor without a known decision, or one of another shape (caller's error).
    #[error("stored tensor {0:?} is not one of the task that the split was made for, or has another type or shape")]
    UnknownStored(String),
    /// A node writes a part of a tensor whose split does not allow it.
    #[error("{op} writes into {name:?}, which is split over the ranks in another way")]
    WritesSplitTensor {
        /// The op.
        op: OpCode,
        /// The tensor.
        name: String,
    },
    /// The task of all ranks is invalid.
    #[error("the task of all ranks cannot be built: {0}")]
    Build(BuildError),
    /// A bug in the scheduler: please report it.
    #[error("bug in fanout's tensor groups: {0}")]
    Bug(&'static str),
}

impl From<BuildError> for TensorSplitError {
    fn from(error: BuildError) -> TensorSplitError {
        TensorSplitError::Build(error)
    }
}

impl TensorSplit {
    /// Decides how the stored tensors of a task are split. The device number of each of them is the number of its group.
    ///
    /// # Errors
    /// [`TensorSplitError`] for a task with stored tensors that are not identified by their names, or with unknown groups.
    pub fn new(task: &Task, groups: Vec<TensorGroup>) -> Result<TensorSplit, TensorSplitError> {
        TensorSplit::with_small_weights(task, groups, SMALL_WEIGHT_BYTES)
    }

    /// As [`TensorSplit::new`]. Weights up to `small` bytes are mirrored if their results would have to be gathered; the default
    /// is 1 MiB.
    ///
    /// # Errors
    /// As [`TensorSplit::new`].
    pub fn with_small_weights(
        task: &Task,
        groups: Vec<TensorGroup>,
        small: usize,
    ) -> Result<TensorSplit, TensorSplitError> {
        let mut devices: Vec<usize> = groups.iter().flat_map(|group| group.devices().to_vec()).collect();
        devices.sort_unstable();
        if devices.windows(2).any(|pair| pair[0] == pair[1]) {
            return Err(TensorSplitError::Group("two groups share a device"));
        }
        let program = propagate::propagate(task, &groups, Decisions::default(), small)?;
        let mut stored = BTreeMap::new();
        for (slot, _) in stored_slots(task) {
            let entry = &program.slots[slot as usize];
            let distribution = match entry.state {
                SlotState::Split { axis, class } => {
                    let shares = groups[entry.group].shares();
                    let parts = program.classes.parts(class, entry.desc.ne()[axis], shares);
                    Distribution::Split { axis, parts: parts.ok_or(TensorSplitError::Bug("a split without parts"))? }
                }
                _ => Distribution::Mirrored,
            };
            let name = task.slot_name(slot).to_owned();
            let parts = stored_parts(&groups[entry.group], &entry.desc, &distribution)?;
            let split = StoredSplit { desc: entry.desc, distribution, parts };
            if name.is_empty() || stored.insert(name.clone(), split).is_some() {
                return Err(TensorSplitError::StoredName(name));
            }
        }
        Ok(TensorSplit { groups, stored, copied_collectives: false, sums: SumExchange::default() })
    }

    /// Whether ranks round partial sums to BF16 before they exchange them, which halves the bytes. The sums are still added in
    /// F32 and in the order of ranks, and are equal on all ranks; where they are scattered
    /// ([`TensorSplit::with_scattered_sums`]), the sums are rounded, too. Groups whose collectives are copies do not round.
    #[must_use]
    pub fn with_bf16_sums(self, bf16: bool) -> TensorSplit {
        TensorSplit { sums: SumExchange { bf16, ..self.sums }, ..self }
    }

    /// Size in bytes of a partial sum from which on three or more ranks each add a piece of it, and then gather the pieces,
    /// instead of each adding all of it: 64 KiB by default. The sums have the same bits either way.
    #[must_use]
    pub fn with_scattered_sums(self, bytes: usize) -> TensorSplit {
        TensorSplit { sums: SumExchange { scatter_bytes: bytes, ..self.sums }, ..self }
    }

    /// Whether collectives are copies and additions also on devices that run collective nodes. Needed to run a task node by node
    /// ([`compare`](super::compare)), because a collective node waits for the other ranks.
    #[must_use]
    pub fn with_copied_collectives(self, copied_collectives: bool) -> TensorSplit {
        TensorSplit { copied_collectives, ..self }
    }

    /// The groups.
    pub fn groups(&self) -> &[TensorGroup] {
        &self.groups
    }

    /// Names of the stored tensors.
    pub fn stored(&self) -> impl Iterator<Item = &str> {
        self.stored.keys().map(String::as_str)
    }

    /// How a stored tensor is distributed over its group.
    pub fn distribution(&self, name: &str) -> Option<&Distribution> {
        self.stored.get(name).map(|stored| &stored.distribution)
    }

    /// By rank: the part of a stored tensor. `None` for an unknown tensor.
    pub fn parts(&self, name: &str) -> Option<&[StoredPart]> {
        self.stored.get(name).map(|stored| &*stored.parts)
    }

    /// Makes the task of all ranks, for the scheduler's devices. `region` gives the memory of each part of a stored tensor, by
    /// name and rank; `None` for a task that is only planned.
    ///
    /// # Errors
    /// [`TensorSplitError`] for a task with other stored tensors than the one that the split was made for, with unknown groups, or
    /// with a node that writes a part of a split tensor; for a group with a device that `devices` lacks.
    pub fn apply(
        &self,
        task: &Task,
        devices: &Devices,
        region: &dyn Fn(&str, usize) -> Option<Region>,
    ) -> Result<RankTask, TensorSplitError> {
        let mut has_collectives = Vec::with_capacity(self.groups.len());
        for group in &self.groups {
            let members =
                group.devices().iter().map(|&device| devices.get(device).ok_or(TensorSplitError::Group(NO_DEVICE)));
            let members = members.collect::<Result<Vec<_>, _>>()?;
            has_collectives.push(!self.copied_collectives && form_group(&members));
        }
        let mut decisions = Decisions::default();
        for (slot, desc) in stored_slots(task) {
            let name = task.slot_name(slot);
            let known = self.stored.get(name).filter(|stored| stored.desc == desc);
            let known = known.ok_or_else(|| TensorSplitError::UnknownStored(name.to_owned()))?;
            decisions.known.insert(slot, known.distribution.clone());
        }
        let program = propagate::propagate(task, &self.groups, decisions, SMALL_WEIGHT_BYTES)?;
        emit::emit(task, &self.groups, &has_collectives, self.sums, &program, region)
    }
}

/// By rank of a group: the part of a stored tensor.
fn stored_parts(
    group: &TensorGroup,
    desc: &TensorDesc,
    distribution: &Distribution,
) -> Result<Vec<StoredPart>, TensorSplitError> {
    let whole = desc.ne().map(|ne| 0..ne);
    let part = |(rank, &device): (usize, &usize)| {
        let Distribution::Split { axis, parts } = distribution else {
            return Some(StoredPart { device, desc: *desc, runs: ByteRuns::whole(desc.extent() as u64) });
        };
        let (range, mut slice) = (parts.get(rank)?, whole.clone());
        slice[*axis] = range.clone();
        let runs = ByteRuns::of_slice(desc, &slice).ok()?;
        Some(StoredPart { device, desc: part_desc(desc, *axis, range)?, runs })
    };
    let parts = group.devices().iter().enumerate().map(part).collect::<Option<_>>();
    parts.ok_or(TensorSplitError::Bug("a part that cuts a block"))
}

const NO_DEVICE: &str = "a group has a device that is not in the scheduler's list";

/// Whether devices run collective nodes as a group.
fn form_group(devices: &[&Arc<dyn Device>]) -> bool {
    let devices: Vec<_> = devices.iter().map(|device| &***device).collect();
    devices.iter().all(|device| runs_collectives(*device)) && Membership::can_form_group(&devices)
}

/// Whether a device runs collective nodes.
fn runs_collectives(device: &dyn Device) -> bool {
    let Ok(desc) = TensorDesc::contiguous(DType::F32, [1, 1, 1, 1]) else { return false };
    let op = Op::from(Collective { kind: CollectiveKind::AllReduce, group: 0 });
    let mut srcs = [None; MAX_SRC];
    srcs[0] = Some(&desc);
    let node = NodeView { op: &op, dst: &desc, srcs: Sources::new(op.code(), &srcs), aligned: true };
    device.support(node) == Support::Yes
}

/// The stored slots of a task, with their layout.
fn stored_slots(task: &Task) -> impl Iterator<Item = (u32, TensorDesc)> + '_ {
    let stored = (0..).zip(task.storage()).filter(|(_, storage)| matches!(storage, Storage::Stored { .. }));
    stored.filter_map(|(slot, _)| {
        let desc = task.slot_tensor(slot).and_then(|id| task.graph().tensor(id)).map(|tensor| tensor.desc)?;
        Some((slot, desc))
    })
}

impl RankTask {
    /// The task, for the scheduler.
    pub fn task(&self) -> &Arc<Task> {
        &self.task
    }

    /// The input tensor of the task of all ranks, for one of the original task.
    pub fn input(&self, original: TensorId) -> Option<TensorId> {
        self.inputs.get(&original).copied()
    }

    /// The parts of an output of the original task: one, or one per rank. Only outputs that are no views are known.
    pub fn output(&self, original: TensorId) -> Option<&[OutputPart]> {
        self.outputs.get(&original).map(|(_, parts)| &**parts)
    }

    /// Joins the bytes of an output's parts, in the order of [`RankTask::output`]. `None` if `original` is no output, or if a part
    /// is missing or has another length.
    pub fn join_output(&self, original: TensorId, parts: &[Vec<u8>]) -> Option<Vec<u8>> {
        let (desc, of_ranks) = self.outputs.get(&original)?;
        let axis = of_ranks.first()?.axis;
        let element = desc.nb()[axis] / block_len(desc, axis);
        let rows: usize = (axis + 1..DIMS).map(|dim| desc.ne()[dim]).product();
        let mut all = Vec::with_capacity(desc.dense_bytes());
        for row in 0..rows {
            for (part, bytes) in of_ranks.iter().zip(parts) {
                let run = part.range.len() * element;
                all.extend_from_slice(bytes.get(row * run..(row + 1) * run)?);
            }
        }
        (all.len() == desc.dense_bytes()).then_some(all)
    }
}
