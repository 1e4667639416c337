//! `--plan` and `--auto`: measures the devices and links, lets fanout's planner choose the placement, and prints it or runs with it.

mod admission;
mod command;
mod machines;
mod measure;
mod repeat;
mod sample_block;
mod sizes;
mod table;

use crate::args::{Args, GroupShares, Split};
use crate::console;
use crate::hparams::HParams;
use crate::model::CacheOptions;
use crate::report::PredictedRates;
use crate::session::DeviceOpener;
use admission::{AdmittedPlacement, PlanInputs};
use anyhow::Context;
use fanout::device::{Device, DeviceKind};
use fanout::gguf::Gguf;
use fanout::sched::planner::{Candidate, Choice, Goal, MIN_GAIN, Machine, Stage, Workload};
use fanout::weights::ModelFile;
use measure::Measured;
use std::io::Write;
use std::sync::Arc;
use std::thread::available_parallelism;

/// Tokens of a prompt that is not known yet.
const UNKNOWN_PROMPT: usize = 512;

/// Micro-batches in flight, unless `--depth` is given: the default of several devices.
const DEPTH: u32 = 4;

/// Bytes of a token that the client sends: its id, position and row, twice a number for the mask, and a uniform number.
const BYTES_TO_DEVICES: f64 = 28.0;

/// Bytes of a token that the client receives: its id and its probability.
const BYTES_FROM_DEVICES: f64 = 8.0;

/// The choice of the planner for a model, a prompt and the devices of a command line.
pub struct Plan {
    machine: Machine,
    workload: Workload,
    choice: Choice,
    /// Remarks that the numbers do not show.
    notes: Vec<String>,
    /// The options of a run with the chosen placement.
    args: Args,
    /// The command line of such a run.
    command: String,
}

impl Plan {
    /// Opens the devices, measures them and the links, and chooses the best placement that the admission check of a run admits. The
    /// devices are closed again.
    ///
    /// # Errors
    /// A device that cannot be opened or measured, a `--ctx` that is too small, or no placement that fits.
    pub fn new(
        args: &Args,
        file: &ModelFile,
        gguf: &Gguf<'_>,
        hparams: &HParams,
        prompt: usize,
    ) -> anyhow::Result<Plan> {
        let context = args.padded_context(prompt, hparams.context)?;
        // A group of sequences attends to the cells of all of its sequences; at worst there is one group.
        let cells = context.saturating_mul(args.sequences());
        let cache = CacheOptions { groups: 1, cells, dtype: args.kv_type.dtype(), flash_attn: args.flash_attn };
        let (sizes, weight_type) = sizes::model_sizes(gguf, hparams, &cache, args)?;
        let expected = if prompt == 0 { UNKNOWN_PROMPT.min(context.div_ceil(2)) } else { prompt };
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let workload = Workload {
            sequences: count(args.sequences()),
            max_groups: count(args.sequences()),
            prompt_tokens: count(expected),
            decode_tokens: count(args.predict(expected, context)?),
            context: count(context),
            micro_batch: args.ubatch,
            depth: args.depth.unwrap_or(DEPTH),
            input_bytes: BYTES_TO_DEVICES,
            result_bytes: BYTES_FROM_DEVICES,
            goal: Goal::DecodeRate,
        };
        let (opener, devices) = DeviceOpener::open(args)?;
        let report = |line: String| {
            if !args.json {
                console::message(line);
            }
        };
        let block = sizes.blocks.first().context("the model has no blocks")?;
        let block_bytes = (block.weight_bytes - block.expert_bytes + block.routed_bytes) as f64;
        let shape = measure::ModelShape { hparams, cache: &cache, nodes: block.nodes, block_bytes };
        let machine_id = |endpoint: &str| opener.machine_id(endpoint);
        let Measured { machine, notes: differences } =
            measure::measure(&devices, weight_type, &shape, &machine_id, &report)?;
        let inputs = PlanInputs { args, file, gguf, hparams, prompt, devices: &devices };
        let AdmittedPlacement { choice, args: chosen, kept, notes: admission } =
            inputs.choose(&machine, &sizes, &workload)?;
        let notes: Vec<String> = differences.into_iter().chain(undecided(&choice)).chain(admission).collect();
        if args.auto && args.json && chosen.weights != args.weights {
            log::warn!(
                "the weights of CPU devices stay in the mapped file: predicted rates hold while the system keeps it in memory"
            );
        }
        // `--plan` prints them with its table.
        if args.auto {
            notes.iter().for_each(|note| report(format!("note: {note}")));
        }
        let command = command::command_line(std::env::args_os(), &chosen, kept);
        Ok(Plan { notes, machine, workload, choice, args: chosen, command })
    }

    /// The predicted rates of the chosen placement.
    pub fn rates(&self) -> PredictedRates {
        let prediction = &self.choice.best.prediction;
        PredictedRates { prompt: prediction.prompt_rate, decode: prediction.decode_rate }
    }

    /// The options of a run with the chosen placement.
    pub fn into_args(self) -> Args {
        self.args
    }

    /// Writes the plan as text, or as one line of JSON.
    ///
    /// # Errors
    /// A failed write.
    pub fn write(&self, json: bool, out: &mut dyn Write) -> anyhow::Result<()> {
        if json {
            writeln!(out, "{}", self.json())?
        } else {
            write!(out, "{self}")?
        }
        Ok(())
    }
}

/// Why a placement of a higher rate, or on other devices, is not chosen, if there is one.
fn undecided(choice: &Choice) -> Option<String> {
    let rate = |candidate: &Candidate| candidate.prediction.decode_rate;
    let highest = choice.runners_up.iter().map(rate).fold(0.0, f64::max);
    if highest >= (1.0 + MIN_GAIN) * rate(&choice.best) {
        let note = "no difference measured between the chosen placement and one of a higher rate, on more devices: their ranges overlap";
        return Some(note.to_owned());
    }
    if choice.best.is_tied {
        let note = "no difference measured between the chosen devices and as many others: their ranges overlap, and those that are listed first are chosen";
        return Some(note.to_owned());
    }
    let note = format!(
        "a placement of a higher rate gains less than {:.0} %, which is within the error of predictions: the chosen one needs fewer devices",
        100.0 * MIN_GAIN
    );
    (highest > rate(&choice.best)).then_some(note)
}

/// The devices of a placement, in the order of its stages and ranks.
fn device_order(stages: &[Stage]) -> Vec<usize> {
    stages.iter().flat_map(|stage| stage.devices.iter().copied()).collect()
}

/// The options of a run on the stages' devices, and whether `--rpc`, `--device`, `--mem` and `--threads` are as given.
fn chosen_args(args: &Args, devices: &[Arc<dyn Device>], stages: &[Stage]) -> (Args, bool) {
    let order = device_order(stages);
    let split = match stages {
        [stage] if stage.devices.len() == 1 => None,
        _ if stages.iter().all(|stage| stage.devices.len() == 1) => {
            Some(Split::Layers(stages.iter().map(|stage| stage.blocks.len() as f32).collect()))
        }
        _ => Some(Split::Tensor(stages.iter().map(|stage| group_shares(stage, stages.len())).collect())),
    };
    let base = Args { plan: false, auto: false, split, ..args.clone() };
    if order.iter().copied().eq(0..devices.len()) {
        return (base, true);
    }
    let is_local = |device: &usize| devices[*device].link_stats().is_none();
    let is_local_cpu = |device: &usize| is_local(device) && devices[*device].info().kind == DeviceKind::Cpu;
    let mem = match order.iter().any(is_local) {
        false => Vec::new(),
        true if args.mem.len() > 1 => order.iter().filter_map(|&device| args.mem.get(device).copied()).collect(),
        true => args.mem.clone(),
    };
    // The default shares the cores among the CPU devices of the list, which may be fewer now: the measured ones had so many.
    let cpus = (0..devices.len()).filter(is_local_cpu).count();
    let cores = available_parallelism().map_or(1, usize::from);
    let measured = u16::try_from((cores / cpus.max(1)).max(1)).ok();
    let threads =
        args.threads.or(measured.filter(|_| order.iter().filter(|device| is_local_cpu(device)).count() != cpus));
    let names: Vec<&str> = order.iter().map(|&device| list_entry(&*devices[device])).collect();
    (Args { rpc: Vec::new(), device: Some(names.join(",")), mem, threads, ..base }, false)
}

fn group_shares(stage: &Stage, stages: usize) -> GroupShares {
    let percent = |share: &f64| (100.0 * share).round().max(1.0) as f32;
    GroupShares {
        layers: (stages > 1).then_some(stage.blocks.len() as f32),
        devices: stage.shares.iter().map(percent).collect(),
    }
}

/// The entry of `--device` for an opened device. A device of this machine that a list names twice has a number after its name.
fn list_entry(device: &dyn Device) -> &str {
    let info = device.info();
    match (device.link_stats(), info.kind) {
        (Some(_), _) => &info.name,
        (None, DeviceKind::Cpu) => "CPU",
        (None, _) => info.name.split('.').next().unwrap_or(&info.name),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use fanout::device::noop::NoopDevice;

    fn args(line: &str) -> Args {
        Args::try_parse_from(["generate", "m.gguf", "-p", "x"].into_iter().chain(line.split_whitespace())).unwrap()
    }

    fn stage(devices: &[usize], shares: &[f64], blocks: std::ops::Range<usize>) -> Stage {
        Stage { devices: devices.to_vec(), shares: shares.to_vec(), blocks }
    }

    #[test]
    fn a_placement_becomes_options() {
        let devices = [("CPU0", DeviceKind::Cpu), ("CPU1", DeviceKind::Cpu), ("CUDA0.0", DeviceKind::Gpu)];
        let devices = devices.map(|(name, kind)| NoopDevice::new(name, kind).shared());
        let chosen = |line: &str, stages: &[Stage]| chosen_args(&args(line), &devices, stages);
        let list = "--auto -d CPU,CPU,CUDA0 --mem 1G,2G,3G --threads 2";
        let all = [0, 1, 2].map(|at| stage(&[at], &[1.0], 2 * at..2 * at + 2));
        let (kept, is_kept) = chosen(list, &all);
        assert_eq!((kept.device.as_deref(), kept.mem.len(), is_kept), (Some("CPU,CPU,CUDA0"), 3, true));
        assert_eq!((kept.split, kept.auto), (Some(Split::Layers(vec![2.0; 3])), false));
        let (one, is_kept) = chosen(list, &[stage(&[2], &[1.0], 0..6)]);
        assert_eq!((one.device.as_deref(), one.mem, one.split, is_kept), (Some("CUDA0"), vec![3 << 30], None, false));
        let group = [stage(&[2, 1], &[0.75, 0.25], 0..6)];
        let shares = |layers, devices: &[f32]| GroupShares { layers, devices: devices.to_vec() };
        let (two, _) = chosen("--auto -d CPU,CPU,CUDA0", &group);
        assert_eq!(two.device.as_deref(), Some("CUDA0,CPU"));
        assert_eq!(two.split, Some(Split::Tensor(vec![shares(None, &[75.0, 25.0])])));
        // A CPU device that is chosen alone, of two, keeps its half of the cores.
        let half = available_parallelism().map_or(1, usize::from) / 2;
        assert_eq!(two.threads.map(usize::from), Some(half.max(1)));
        let groups = [stage(&[0, 1], &[0.5, 0.5], 0..4), stage(&[2], &[1.0], 4..6)];
        let both = Split::Tensor(vec![shares(Some(4.0), &[50.0, 50.0]), shares(Some(2.0), &[100.0])]);
        assert_eq!(chosen(list, &groups).0.split, Some(both));
    }

    #[test]
    fn the_share_of_layers_is_that_of_the_plan() {
        let split = command::split_text(&Split::Tensor(vec![
            GroupShares { layers: Some(22.0), devices: vec![60.0, 40.0] },
            GroupShares { layers: Some(10.0), devices: vec![100.0] },
        ]));
        assert_eq!(split, "tensor=22:60,40/10:100");
        let (groups, shares) = args(&format!("--split {split}")).tensor_groups(3).unwrap();
        assert_eq!((groups.len(), shares), (2, Some(vec![22.0 / 32.0, 10.0 / 32.0])));
    }
}
