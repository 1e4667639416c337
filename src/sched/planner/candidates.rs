//! The placements that are compared: single devices, layers over several devices, tensor groups, and layers over tensor groups.

use super::cost::{Batch, BlockSums, Costs};
use super::{Goal, Machine, ModelSizes, PlannerError, Prediction, Stage, Workload};
use std::cmp::Ordering;
use std::fmt;

/// Every subset of up to this many devices is a candidate; of more devices only the first ones in each of three orders: by speed,
/// by memory, and as given. So 16 devices have 2,516 subsets of up to four, and at most 36 larger ones.
const ALL_SUBSETS: u32 = 4;

/// Sizes of the tensor groups that are joined to a pipeline.
const GROUP_SIZES: [usize; 3] = [2, 4, 8];

/// The devices of a placement, the number of its stages, and the ranks of the largest.
type Arrangement = (Vec<usize>, (usize, usize));

/// A placement with its prediction.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// The stages of the pipeline.
    pub stages: Vec<Stage>,
    /// The predicted rates and times.
    pub prediction: Prediction,
    /// The predictions for the slowest and the fastest machine of [`Machine::with_bounds`]; without them, equal to `prediction`.
    pub range: [Prediction; 2],
    /// Whether the range overlaps with that of another candidate of its kind, on other devices: no difference was measured.
    pub is_tied: bool,
}

impl Candidate {
    /// The number of devices.
    pub fn devices(&self) -> usize {
        self.stages.iter().map(|stage| stage.devices.len()).sum()
    }

    /// Its devices in the order of their numbers, and its kind.
    fn arrangement(&self) -> Arrangement {
        let mut devices: Vec<usize> = self.stages.iter().flat_map(|stage| stage.devices.iter().copied()).collect();
        devices.sort_unstable();
        (devices, self.kind())
    }

    /// Number of stages, and ranks of the largest.
    fn kind(&self) -> (usize, usize) {
        (self.stages.len(), self.stages.iter().map(|stage| stage.devices.len()).max().unwrap_or(0))
    }

    /// Seconds per token, or per request: less is better.
    fn cost(&self, workload: &Workload) -> f64 {
        cost(&self.prediction, workload)
    }

    /// Whether the ranges of both overlap, so that neither was measured to be faster.
    fn overlaps(&self, other: &Candidate, workload: &Workload) -> bool {
        let is_slower = |a: &Candidate, b: &Candidate| cost(&a.range[0], workload) > cost(&b.range[1], workload);
        is_slower(self, other) && is_slower(other, self)
    }
}

fn cost(prediction: &Prediction, workload: &Workload) -> f64 {
    match workload.goal {
        Goal::DecodeRate => 1.0 / prediction.decode_rate,
        Goal::Request => prediction.request_time(workload),
    }
}

/// The least gain for which more devices are recommended. Predictions differ from a simulation by up to 11 %, so that a smaller gain cannot
/// be told from none; with a larger margin, choices would be less than 95 % of the best fixed placement as simulated.
pub const MIN_GAIN: f64 = 0.03;

/// The most placements that [`choose_admitted`] checks.
pub const MAX_CHECKS: usize = 64;

/// Why a placement was chosen. The ratios are of the goal: rates, or times of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reason {
    /// One device is faster than any set of several; how much faster than the best of these, if any fits.
    OneIsFastest(Option<f64>),
    /// One device and the best set of several differ by less than [`MIN_GAIN`].
    NothingGained,
    /// The ranges of one device and of the best set of several overlap, see [`Machine::with_bounds`].
    NoDifference,
    /// Several devices are faster than the best single one by this factor, at least 1 + [`MIN_GAIN`].
    FasterTogether(f64),
    /// No single device has the memory.
    TooLargeForOne,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::OneIsFastest(None) => f.write_str("one device has the memory, and there is no other choice"),
            Reason::OneIsFastest(Some(ratio)) => {
                write!(f, "one device alone is {ratio:.2} times as fast as the best choice of several")
            }
            Reason::NothingGained => write!(
                f,
                "several devices gain nothing: they differ from one by less than {:.0} %, which is within the error of predictions",
                100.0 * MIN_GAIN
            ),
            Reason::NoDifference => {
                f.write_str("no difference measured between one device and several: their ranges overlap")
            }
            Reason::FasterTogether(ratio) => {
                write!(f, "{ratio:.2} times as fast as the best single device that has the memory")
            }
            Reason::TooLargeForOne => f.write_str("no single device has the memory"),
        }
    }
}

/// The chosen placement and the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Choice {
    /// The best: no other is faster by [`MIN_GAIN`] or more, as far as the measurements can tell.
    pub best: Candidate,
    /// Why.
    pub reason: Reason,
    /// The best of each other kind (number of stages, ranks of the largest one), fastest first.
    pub runners_up: Vec<Candidate>,
}

impl Choice {
    fn new(best: Candidate, runners_up: Vec<Candidate>, workload: &Workload) -> Choice {
        let other = |is_single: bool| runners_up.iter().find(|other| (other.devices() == 1) == is_single);
        let ratio = |other: &Candidate| other.cost(workload) / best.cost(workload);
        let reason = match (best.devices(), other(true), other(false)) {
            (1, _, Some(several)) if (ratio(several) - 1.0).abs() < MIN_GAIN => Reason::NothingGained,
            (1, _, Some(several)) if best.overlaps(several, workload) => Reason::NoDifference,
            (1, _, several) => Reason::OneIsFastest(several.map(ratio)),
            (_, Some(single), _) => Reason::FasterTogether(ratio(single)),
            (_, None, _) => Reason::TooLargeForOne,
        };
        Choice { best, reason, runners_up }
    }
}

/// The result of a check of a placement that knows more than [`ModelSizes`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The placement can run.
    Admitted,
    /// By device of the machine: bytes that the placement needs there beyond the free memory.
    LacksMemory(Vec<u64>),
    /// The placement cannot run on these devices for another reason.
    Refused,
}

/// Chooses the placement with the best prediction for the workload's goal. Every single device that fits is among the candidates,
/// so the prediction is never worse than that of the best one. More devices are chosen only if they gain at least [`MIN_GAIN`]. On a
/// machine with bounds ([`Machine::with_bounds`]), more or other devices are chosen only if the ranges do not overlap: else fewer, or the
/// first. The work is bounded by [`super::MAX_DEVICES`].
///
/// # Errors
/// [`PlannerError::NothingFits`], or a model or workload without work.
pub fn choose(machine: &Machine, model: &ModelSizes, workload: &Workload) -> Result<Choice, PlannerError> {
    choose_admitted(machine, model, workload, &mut |_| Admission::Admitted)
}

/// As [`choose`], but checks the best placement with `admit`, and if that refuses it, the next one. If memory is missing on a
/// device, placements need more there than their estimate: later ones are planned with the free memory of this estimate less what is
/// missing.
/// Checks up to [`MAX_CHECKS`] placements.
///
/// # Errors
/// As [`choose`]; [`PlannerError::NothingAdmitted`] if all placements that were checked are refused.
pub fn choose_admitted(
    machine: &Machine,
    model: &ModelSizes,
    workload: &Workload,
    admit: &mut dyn FnMut(&Candidate) -> Admission,
) -> Result<Choice, PlannerError> {
    workload.check(model)?;
    let (mut machine, mut refused) = (machine.clone(), Vec::new());
    for checked in 0..MAX_CHECKS {
        let mut candidates = best_of_each_kind(&machine, model, workload, &refused);
        let Some(best) = take_best(&mut candidates, workload) else {
            let nothing_admitted = PlannerError::NothingAdmitted { checked };
            return Err(if checked == 0 { nothing_fits(&machine, model, workload) } else { nothing_admitted });
        };
        let reduced = match admit(&best) {
            Admission::Admitted => return Ok(Choice::new(best, candidates, workload)),
            Admission::LacksMemory(missing) => machine.reduce_memory(&best.prediction.memory, &missing),
            Admission::Refused => false,
        };
        if !reduced {
            refused.push(best.arrangement());
        }
    }
    Err(PlannerError::NothingAdmitted { checked: MAX_CHECKS })
}

/// The best candidate of each kind, best first. Candidates with an arrangement in `refused` are left out.
fn best_of_each_kind(
    machine: &Machine,
    model: &ModelSizes,
    workload: &Workload,
    refused: &[Arrangement],
) -> Vec<Candidate> {
    let costs = Costs::new(machine, model, workload);
    let bounds = machine.bounds().map(|bounds| bounds.each_ref().map(|bound| Costs::new(bound, model, workload)));
    let (mut all, mut best_of_kind): (Vec<Candidate>, Vec<Candidate>) = Default::default();
    for devices in subsets(machine) {
        for groups in groupings(&costs, &devices) {
            for blocks in Balance::ALL.into_iter().filter_map(|balance| costs.assign_blocks(&groups, balance)) {
                let stages = stages(&groups, &blocks);
                let Some(prediction) = costs.predict(&stages) else { continue };
                let bound = |costs: &Costs<'_>| costs.predict(&stages).unwrap_or_else(|| prediction.clone());
                let range = bounds.as_ref().map(|bounds| bounds.each_ref().map(bound));
                let range = range.unwrap_or_else(|| [prediction.clone(), prediction.clone()]);
                let new = Candidate { stages, prediction, range, is_tied: false };
                if !refused.is_empty() && refused.contains(&new.arrangement()) {
                    continue;
                }
                // Noise of the same devices is common to both, and that of others is not.
                let replaces = |old: &Candidate| {
                    rank(&new, old, workload).is_lt()
                        && (new.arrangement() == old.arrangement() || !new.overlaps(old, workload))
                };
                match best_of_kind.iter_mut().find(|old| old.kind() == new.kind()) {
                    Some(old) if replaces(old) => *old = new.clone(),
                    Some(_) => {}
                    None => best_of_kind.push(new.clone()),
                }
                all.extend(machine.bounds().is_some().then_some(new));
            }
        }
    }
    for best in &mut best_of_kind {
        best.is_tied = all.iter().any(|other| {
            other.kind() == best.kind() && other.arrangement() != best.arrangement() && other.overlaps(best, workload)
        });
    }
    best_of_kind.sort_by(|a, b| rank(a, b, workload));
    best_of_kind
}

/// Removes the candidate to recommend from a list that is sorted by [`rank`]: a placement on more devices replaces one on fewer only if
/// it is faster by [`MIN_GAIN`], and their ranges do not overlap.
fn take_best(candidates: &mut Vec<Candidate>, workload: &Workload) -> Option<Candidate> {
    let mut order: Vec<usize> = (0..candidates.len()).collect();
    // Stable: of candidates with as many devices, the fastest stays first.
    order.sort_by_key(|&at| candidates[at].devices());
    let cost = |at: usize| candidates[at].cost(workload);
    let is_faster = |at: usize, best: usize| {
        cost(at) * (1.0 + MIN_GAIN) <= cost(best) && !candidates[at].overlaps(&candidates[best], workload)
    };
    let best = order.into_iter().reduce(|best, at| if is_faster(at, best) { at } else { best })?;
    Some(candidates.remove(best))
}

/// Best first; of equals, fewer devices, whose failures are fewer, too.
fn rank(a: &Candidate, b: &Candidate, workload: &Workload) -> Ordering {
    a.cost(workload).total_cmp(&b.cost(workload)).then(a.devices().cmp(&b.devices()))
}

fn nothing_fits(machine: &Machine, model: &ModelSizes, workload: &Workload) -> PlannerError {
    let costs = Costs::new(machine, model, workload);
    let all = costs.sums(&(0..model.blocks.len()));
    let (weights, others) = costs.rank_memory(1.0, 1, &all, (true, true), 1);
    let free = machine.devices().iter().fold(0, |sum: u64, device| sum.saturating_add(device.free));
    PlannerError::NothingFits { needed: (weights + others).ceil() as u64, free }
}

/// The sets of devices that are tried. Devices of a host are neighbours, the client's first, so that a pipeline changes hosts as
/// rarely as it can.
pub(super) fn subsets(machine: &Machine) -> Vec<Vec<usize>> {
    let devices = machine.devices();
    let numbers = || (0..devices.len()).collect::<Vec<_>>();
    let small = (1u32..1 << devices.len()).filter(|set| set.count_ones() <= ALL_SUBSETS);
    let mut sets: Vec<Vec<usize>> =
        small.map(|set| numbers().into_iter().filter(|device| set >> device & 1 == 1).collect()).collect();
    let mut by_speed = numbers();
    by_speed.sort_by(|&a, &b| devices[b].read_rate.total_cmp(&devices[a].read_rate));
    let mut by_memory = numbers();
    by_memory.sort_by_key(|&device| std::cmp::Reverse(devices[device].free));
    for order in [numbers(), by_speed, by_memory] {
        sets.extend((ALL_SUBSETS as usize + 1..=order.len()).map(|count| order[..count].to_vec()));
    }
    for set in &mut sets {
        set.sort_by_key(|&device| (devices[device].host, device));
    }
    sets
}

/// Ranks with their shares.
#[derive(Clone)]
struct Group {
    devices: Vec<usize>,
    shares: Vec<f64>,
}

/// The ways to use a set of devices: each alone with whole layers, all as one tensor group, or tensor groups of equal size, of
/// neighbours or of devices of similar speed. Several groups are tried in this order, and with the group that computes the output fastest
/// as the last stage.
fn groupings(costs: &Costs<'_>, devices: &[usize]) -> Vec<Vec<Group>> {
    let alone = |&device: &usize| Group { devices: vec![device], shares: vec![1.0] };
    let mut found: Vec<Vec<Group>> = vec![devices.iter().map(alone).collect()];
    let mut by_speed = devices.to_vec();
    by_speed.sort_by(|&a, &b| {
        let rate = |device: usize| costs.machine.devices()[device].read_rate;
        rate(b).total_cmp(&rate(a))
    });
    let sizes = GROUP_SIZES.into_iter().filter(|size| devices.len() > *size && devices.len().is_multiple_of(*size));
    for (size, order) in
        sizes.flat_map(|size| [(size, devices), (size, &by_speed[..])]).chain([(devices.len(), devices)])
    {
        // Other numbers of ranks cannot divide the heads: all ranks would compute all of attention.
        let (heads, kv_heads) = (costs.model.heads as usize, costs.model.kv_heads as usize);
        if size > 1 && (size <= kv_heads || (size <= heads && size.is_multiple_of(kv_heads))) {
            found.push(order.chunks(size).map(|ranks| costs.tensor_group(ranks, devices.len() / size)).collect());
        }
    }
    let reordered: Vec<_> = found.iter().filter_map(|groups| costs.with_fastest_output(groups)).collect();
    found.extend(reordered);
    found
}

/// How the blocks are divided over the stages.
#[derive(Clone, Copy)]
enum Balance {
    /// As many as fit on the fastest stage, then on the next: one sequence passes through all stages, so only the sum of their
    /// times counts.
    FastestFirst,
    /// Equal times of all stages for a decoded token of each sequence, for groups in flight.
    Decode,
    /// Equal times of all stages for a micro-batch.
    Prompt,
}

impl Balance {
    const ALL: [Balance; 3] = [Balance::FastestFirst, Balance::Decode, Balance::Prompt];
}

impl Costs<'_> {
    /// A tensor group of a pipeline of `stages`, with shares in whole percent by which all ranks take the same time.
    ///
    /// A rank takes `fixed + share * scaled`: its nodes cost the same whatever its share. Equal times `t` mean that
    /// `share = (t - fixed) / scaled`, and the sum of 1 gives `t`.
    fn tensor_group(&self, ranks: &[usize], stages: usize) -> Group {
        let batch = self.decode_batch(stages);
        let times = ranks.iter().map(|&device| {
            let fixed = self.mean.nodes * self.machine.devices()[device].node_time;
            (fixed, (self.blocks_time((&[device], &[1.0]), ranks, &self.mean, &batch) - fixed).max(f64::MIN_POSITIVE))
        });
        let times: Vec<(f64, f64)> = times.collect();
        let (fixed, speed) =
            times.iter().fold((0.0, 0.0), |sums, (fixed, scaled)| (sums.0 + fixed / scaled, sums.1 + 1.0 / scaled));
        let equal = (1.0 + fixed) / speed;
        let percent = times.iter().map(|(fixed, scaled)| (100.0 * (equal - fixed) / scaled).round().max(1.0));
        let percent: Vec<f64> = percent.collect();
        let sum: f64 = percent.iter().sum();
        Group { devices: ranks.to_vec(), shares: percent.into_iter().map(|share| share / sum).collect() }
    }

    /// The groups, with the one that computes the output fastest moved to the end; `None` if the last group is as fast.
    fn with_fastest_output(&self, groups: &[Group]) -> Option<Vec<Group>> {
        let sequences = self.decode_batch(groups.len()).sequences;
        let times =
            groups.iter().map(|group| self.output_time((&group.devices, &group.shares), &group.devices, sequences));
        // The last one of equals.
        let (fastest, _) = times.enumerate().min_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0)))?;
        let mut groups = groups.to_vec();
        let last = (fastest + 1 < groups.len()).then(|| groups.remove(fastest))?;
        groups.push(last);
        Some(groups)
    }

    /// A decoded token of each sequence of a group, with as many groups as there are stages.
    fn decode_batch(&self, stages: usize) -> Batch {
        let groups = self.workload.groups_of(stages);
        Batch::decode(self.workload, f64::from(self.workload.sequences.div_ceil(groups)))
    }

    /// The number of blocks of each group, at least one; `None` if the groups lack the memory, or there are fewer blocks.
    ///
    /// Greedy: each block goes to the stage that has the room and, with that block, the least time. With equal blocks this is the
    /// partition whose slowest stage is fastest.
    fn assign_blocks(&self, groups: &[Group], balance: Balance) -> Option<Vec<usize>> {
        let total = self.model.blocks.len();
        if groups.len() > total {
            return None;
        }
        let batch = match balance {
            Balance::Prompt => Batch::prompt(self.workload),
            _ => self.decode_batch(groups.len()),
        };
        let time: Vec<f64> = groups
            .iter()
            .map(|group| self.blocks_time((&group.devices, &group.shares), &group.devices, &self.mean, &batch))
            .collect();
        // The last stage has the output, too.
        let output = match groups.last() {
            Some(last) if matches!(balance, Balance::Decode) => {
                self.output_time((&last.devices, &last.shares), &last.devices, batch.sequences)
            }
            _ => 0.0,
        };
        let sequence_groups = match balance {
            Balance::FastestFirst => 1,
            Balance::Decode | Balance::Prompt => self.workload.groups_of(groups.len()),
        };
        let room: Vec<usize> = (0..groups.len()).map(|at| self.room(groups, at, sequence_groups)).collect();
        // Blocks without bytes have nearly endless room on each device.
        if room.contains(&0) || room.iter().fold(0usize, |sum, &room| sum.saturating_add(room)) < total {
            return None;
        }
        let mut blocks = vec![1; groups.len()];
        for _ in groups.len()..total {
            let cost = |&stage: &usize| match balance {
                Balance::FastestFirst => time[stage],
                Balance::Decode | Balance::Prompt => {
                    let others = if stage + 1 == groups.len() { output } else { 0.0 };
                    others + time[stage] * (blocks[stage] + 1) as f64
                }
            };
            let open = (0..groups.len()).filter(|&stage| blocks[stage] < room[stage]);
            let next = open.min_by(|a, b| cost(a).total_cmp(&cost(b)))?;
            blocks[next] += 1;
        }
        Some(blocks)
    }

    /// How many blocks of mean size a stage has memory for, with this number of groups of sequences.
    fn room(&self, groups: &[Group], at: usize, sequence_groups: u32) -> usize {
        let group = &groups[at];
        let ends = (at == 0, at + 1 == groups.len());
        let of_rank = |(&device, &share): (&usize, &f64)| {
            let bytes = |sums: &BlockSums, ends| {
                let ranks = group.devices.len();
                let needed = self.rank_memory(share, ranks, sums, ends, sequence_groups);
                let (weights, others) = self.allocated(device, ranks, needed);
                weights + others
            };
            let none = bytes(&BlockSums::default(), (false, false));
            let fixed = bytes(&BlockSums::default(), ends);
            let left = self.machine.devices()[device].free as f64 - fixed;
            // Blocks without bytes always fit.
            (left / (bytes(&self.mean, (false, false)) - none).max(1.0)).max(0.0) as usize
        };
        group.devices.iter().zip(&group.shares).map(of_rank).min().unwrap_or(0)
    }
}

fn stages(groups: &[Group], blocks: &[usize]) -> Vec<Stage> {
    let mut next = 0;
    let stage = |(group, &count): (&Group, &usize)| {
        let blocks = next..next + count;
        next += count;
        Stage { devices: group.devices.clone(), shares: group.shares.clone(), blocks }
    };
    groups.iter().zip(blocks).map(stage).collect()
}
