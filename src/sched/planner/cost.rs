//! The prediction for one placement: time of each stage, rates, load time and memory.

use super::{BlockSizes, DeviceSpeed, Host, Machine, ModelSizes, Stage, Workload};
use std::ops::Range;

/// All-reduces of a block in a tensor group: after the output of attention, and after the down projection.
pub(super) const ALL_REDUCES_PER_BLOCK: f64 = 2.0;

/// Bytes of an element of a hidden state.
const F32_BYTES: f64 = 4.0;

/// The predicted rates and times of a placement.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// Decoded tokens per second, of all sequences together.
    pub decode_rate: f64,
    /// Groups of sequences in flight that reach this rate.
    pub groups: u32,
    /// Seconds from one token of a sequence to its next.
    pub step_time: f64,
    /// By stage: the share of the time for which it computes or takes part in collectives, while tokens are decoded.
    pub busy: Vec<f64>,
    /// Tokens of a prompt per second.
    pub prompt_rate: f64,
    /// Seconds for one prompt.
    pub prompt_time: f64,
    /// Seconds to send the weights to the devices, without reading them from a disk.
    pub load_time: f64,
    /// By device of the machine: bytes of weights, KV caches and results; 0 if the placement does not use it. Weights in a mapped
    /// file do not count.
    pub memory: Vec<u64>,
}

impl Prediction {
    /// Seconds for the prompt and the decoded tokens of a sequence.
    pub fn request_time(&self, workload: &Workload) -> f64 {
        self.prompt_time + f64::from(workload.decode_tokens) * self.step_time
    }
}

/// Sums over the blocks of a stage.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct BlockSums {
    pub(super) blocks: f64,
    /// Bytes of weights without experts, of experts, and of the experts that one token uses.
    dense: f64,
    experts: f64,
    routed: f64,
    multiply_adds: f64,
    kv_bytes: f64,
    pub(super) nodes: f64,
}

impl BlockSums {
    fn of(block: &BlockSizes) -> BlockSums {
        BlockSums {
            blocks: 1.0,
            dense: block.weight_bytes.saturating_sub(block.expert_bytes) as f64,
            experts: block.expert_bytes as f64,
            routed: block.routed_bytes as f64,
            multiply_adds: block.multiply_adds,
            kv_bytes: block.kv_bytes as f64,
            nodes: f64::from(block.nodes),
        }
    }

    /// `self + factor * other`.
    fn plus(&self, factor: f64, other: &BlockSums) -> BlockSums {
        BlockSums {
            blocks: self.blocks + factor * other.blocks,
            dense: self.dense + factor * other.dense,
            experts: self.experts + factor * other.experts,
            routed: self.routed + factor * other.routed,
            multiply_adds: self.multiply_adds + factor * other.multiply_adds,
            kv_bytes: self.kv_bytes + factor * other.kv_bytes,
            nodes: self.nodes + factor * other.nodes,
        }
    }
}

/// The tokens that a step takes through the stages: one of each of several sequences, or several of one prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch {
    pub(super) sequences: f64,
    /// Tokens of each sequence.
    pub(super) tokens: f64,
    /// Positions of the KV cache that each token attends to.
    pub(super) positions: f64,
}

impl Batch {
    pub(super) fn decode(workload: &Workload, sequences: f64) -> Batch {
        Batch { sequences, tokens: 1.0, positions: workload.decode_positions() }
    }

    pub(super) fn prompt(workload: &Workload) -> Batch {
        let tokens = workload.micro_batches().1;
        Batch { sequences: 1.0, tokens, positions: f64::from(workload.prompt_tokens) / 2.0 }
    }

    fn columns(&self) -> f64 {
        self.sequences * self.tokens
    }
}

/// One batch on its way through the stages. Interfaces are by host, the client first: seconds for which they are busy sending.
struct Pass {
    /// Seconds from the client through all stages and back.
    latency: f64,
    /// By stage: seconds for which it is busy.
    busy: Vec<f64>,
    /// By stage: interfaces in all-reduces.
    all_reduces: Vec<Vec<f64>>,
    /// Interfaces in copies between stages and with the client.
    copies: Vec<f64>,
}

/// Sums over the batches of a round.
#[derive(Default)]
struct Round {
    latency: f64,
    busy: Vec<f64>,
    all_reduces: Vec<Vec<f64>>,
    copies: Vec<f64>,
}

impl Round {
    fn add(&mut self, count: f64, pass: &Pass) {
        let add = |sums: &mut Vec<f64>, values: &[f64]| {
            sums.resize(values.len(), 0.0);
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += count * value);
        };
        self.latency = self.latency.max(pass.latency);
        add(&mut self.busy, &pass.busy);
        add(&mut self.copies, &pass.copies);
        self.all_reduces.resize(pass.all_reduces.len(), Vec::new());
        self.all_reduces.iter_mut().zip(&pass.all_reduces).for_each(|(sums, values)| add(sums, values));
    }

    fn time(&self) -> f64 {
        self.latency.max(self.slowest())
    }

    /// Seconds of the slowest stage or interface. A stage whose all-reduces cross hosts waits for the interfaces of these hosts: what
    /// else they send adds to its time.
    fn slowest(&self) -> f64 {
        let interface = |host: usize| self.copies[host] + self.all_reduces.iter().map(|stage| stage[host]).sum::<f64>();
        let others = |own: &Vec<f64>| {
            let crossed = own.iter().enumerate().filter(|(_, own)| **own > 0.0);
            crossed.map(|(host, own)| interface(host) - own).fold(0.0, f64::max)
        };
        let stages = self.busy.iter().zip(&self.all_reduces).map(|(busy, own)| busy + others(own));
        stages.chain((0..self.copies.len()).map(interface)).fold(0.0, f64::max)
    }
}

/// Computes times and memory of stages.
pub(super) struct Costs<'a> {
    pub(super) machine: &'a Machine,
    pub(super) model: &'a ModelSizes,
    pub(super) workload: &'a Workload,
    /// Sums over the first n blocks, by n: the sum of a range is a difference.
    sums: Vec<BlockSums>,
    /// The mean block.
    pub(super) mean: BlockSums,
}

impl<'a> Costs<'a> {
    pub(super) fn new(machine: &'a Machine, model: &'a ModelSizes, workload: &'a Workload) -> Costs<'a> {
        let mut sums = vec![BlockSums::default()];
        for block in &model.blocks {
            sums.push(BlockSums::of(block).plus(1.0, sums.last().unwrap_or(&BlockSums::default())));
        }
        let all = sums.last().copied().unwrap_or_default();
        let mean = BlockSums::default().plus(1.0 / all.blocks, &all);
        Costs { machine, model, workload, sums, mean }
    }

    /// Sums over some blocks of the model.
    pub(super) fn sums(&self, blocks: &Range<usize>) -> BlockSums {
        self.sums[blocks.end].plus(-1.0, &self.sums[blocks.start])
    }

    fn device(&self, index: usize) -> &DeviceSpeed {
        &self.machine.devices()[index]
    }

    /// The part of keys and values on a rank with `share` of a group of `ranks`. Heads are not divided: with more ranks than heads,
    /// several ranks hold the same head.
    fn kv_share(&self, share: f64, ranks: usize) -> f64 {
        if ranks == 1 { 1.0 } else { share.max(1.0 / self.model.kv_heads as f64) }
    }

    /// Seconds of a rank for products and attention of some blocks.
    ///
    /// - Products: [`DeviceSpeed::product_time`]. Of the experts, each token reads its own, until all have been read.
    /// - Attention: reading keys and values, once per sequence. With several tokens of a sequence, the longer of this and of computing
    ///   scores and sums (two products of `width` per position and token); with one token, the measured rate of reading includes them.
    fn rank_time(&self, speed: &DeviceSpeed, shares: (f64, f64), sums: &BlockSums, batch: &Batch) -> f64 {
        let ((share, kv_share), columns) = (shares, batch.columns());
        let read = sums.dense + sums.experts.min(sums.routed * columns);
        let products = speed.product_time(share * read, share * sums.multiply_adds, columns);
        let kv_read = kv_share * batch.sequences * batch.positions * sums.kv_bytes / speed.kv_read_rate;
        if batch.tokens <= 1.0 {
            return products + kv_read;
        }
        let scores = 2.0 * batch.sequences * batch.positions * self.model.width as f64 * sums.blocks;
        products + kv_read.max(share * speed.multiply_time(scores, batch.tokens))
    }

    /// The part of a device's rates that remains beside `working` ones of the same cores.
    fn remaining_rate(&self, device: usize, working: &[usize]) -> f64 {
        let speed = self.device(device);
        let shares_cores = |&other: &usize| other != device && self.device(other).cores == speed.cores;
        if speed.cores.is_some() && working.iter().any(shares_cores) { speed.together } else { 1.0 }
    }

    /// Seconds of a stage for some blocks: the slowest rank, and the all-reduces. `working`: the devices that work at the same time.
    pub(super) fn blocks_time(
        &self,
        (devices, shares): (&[usize], &[f64]),
        working: &[usize],
        sums: &BlockSums,
        batch: &Batch,
    ) -> f64 {
        let rank = |(&device, &share): (&usize, &f64)| {
            let (speed, shares) = (self.device(device), (share, self.kv_share(share, devices.len())));
            // A node has a fixed time on each rank, whatever its share.
            self.rank_time(speed, shares, sums, batch) / self.remaining_rate(device, working)
                + sums.nodes * speed.node_time
        };
        let slowest = devices.iter().zip(shares).map(rank).fold(0.0, f64::max);
        if devices.len() == 1 {
            return slowest;
        }
        slowest + sums.blocks * ALL_REDUCES_PER_BLOCK * self.machine.all_reduce(devices, self.hidden_bytes(batch)).time
    }

    /// Bytes of the hidden states of a batch.
    fn hidden_bytes(&self, batch: &Batch) -> f64 {
        batch.columns() * self.model.width as f64 * F32_BYTES
    }

    /// Seconds to submit a run: the slowest rank.
    fn run_time(&self, devices: &[usize]) -> f64 {
        devices.iter().map(|&device| self.device(device).run_time).fold(0.0, f64::max)
    }

    /// Seconds of the product with the output weights for `rows` tokens, split by vocabulary.
    pub(super) fn output_time(&self, (devices, shares): (&[usize], &[f64]), working: &[usize], rows: f64) -> f64 {
        if rows == 0.0 {
            return 0.0;
        }
        let (bytes, weights) = (self.model.output_bytes as f64, (self.model.width * self.model.vocabulary) as f64);
        let rank = |(&device, &share): (&usize, &f64)| {
            let speed = self.device(device);
            speed.product_time(share * bytes, share * weights, rows) / self.remaining_rate(device, working)
        };
        devices.iter().zip(shares).map(rank).fold(0.0, f64::max)
    }

    /// One batch on its way through the stages. `rows`: tokens whose output is computed and returned. `in_flight`: batches in
    /// flight; with several, all stages work at the same time.
    fn pass(&self, stages: &[Stage], batch: &Batch, rows: f64, in_flight: u32) -> Pass {
        let last = stages.len().saturating_sub(1);
        let all: Vec<usize> = stages.iter().flat_map(|stage| stage.devices.iter().copied()).collect();
        let mut pass =
            Pass { latency: 0.0, busy: Vec::new(), all_reduces: Vec::new(), copies: self.machine.idle_interfaces() };
        for (number, stage) in stages.iter().enumerate() {
            let sums = self.sums(&stage.blocks);
            let working = if in_flight > 1 { &all } else { &stage.devices };
            let blocks = self.blocks_time((&stage.devices, &stage.shares), working, &sums, batch);
            let output =
                if number == last { self.output_time((&stage.devices, &stage.shares), working, rows) } else { 0.0 };
            pass.busy.push(self.run_time(&stage.devices) + blocks + output);
            let each = self.machine.all_reduce(&stage.devices, self.hidden_bytes(batch)).interfaces;
            let count = if stage.devices.len() > 1 { sums.blocks * ALL_REDUCES_PER_BLOCK } else { 0.0 };
            pass.all_reduces.push(each.into_iter().map(|busy| count * busy).collect());
        }
        pass.latency += pass.busy.iter().sum::<f64>();
        // Hidden states: each rank of the next stage gets a copy.
        for pair in stages.windows(2) {
            let from = self.device(pair[0].devices[0]).host;
            let copies =
                pair[1].devices.iter().map(|&device| (from, self.device(device).host, self.hidden_bytes(batch)));
            pass.latency += self.add_copies(&mut pass.copies, copies);
        }
        let servers = |stage: &Stage| {
            let hosts = stage.devices.iter().map(|&device| self.device(device).host);
            hosts.filter(|&host| host != Host::Client).collect::<Vec<_>>()
        };
        // The inputs of the first stage; other stages get theirs while the stages before them compute.
        if let [first, ..] = stages {
            let bytes = batch.sequences * self.workload.input_bytes;
            let copies = servers(first).into_iter().map(|host| (Host::Client, host, bytes));
            pass.latency += self.add_copies(&mut pass.copies, copies);
        }
        // Each rank of the last stage returns its part of the result.
        if let ([.., last], true) = (stages, rows > 0.0) {
            let bytes = rows * self.workload.result_bytes / last.devices.len() as f64;
            let copies = servers(last).into_iter().map(|host| (host, Host::Client, bytes));
            pass.latency += self.add_copies(&mut pass.copies, copies);
        }
        pass
    }

    /// Adds copies that begin at the same time to the times of interfaces; returns when the last one has arrived. Copies of one
    /// path follow one another.
    fn add_copies(&self, interfaces: &mut [f64], copies: impl Iterator<Item = (Host, Host, f64)>) -> f64 {
        let (mut latest, mut paths) = (0.0f64, Vec::new());
        for (from, to, bytes) in copies {
            self.machine.add_copy(interfaces, from, to, bytes);
            let before = paths.iter().filter(|&&path| path == (from, to)).count() as f64;
            let queued = before * self.machine.copy_interval(from, to, bytes);
            latest = latest.max(queued + self.machine.copy_time(from, to, bytes));
            paths.push((from, to));
        }
        latest
    }

    /// Seconds of a round in which `groups` groups of sequences each decode a token, and the stages' busy seconds in it: the longest
    /// of one group through all stages and the client, because its next token needs this one, and of what all groups need of one
    /// stage or interface.
    fn decode_round(&self, stages: &[Stage], groups: u32) -> (f64, Vec<f64>) {
        let sequences = self.workload.sequences;
        // Groups differ by one sequence at most.
        let large = sequences % groups;
        let sizes = [(large, sequences / groups + 1), (groups - large, sequences / groups)];
        let mut round = Round::default();
        for (count, size) in sizes.into_iter().filter(|&(count, _)| count > 0) {
            let size = f64::from(size);
            round.add(f64::from(count), &self.pass(stages, &Batch::decode(self.workload, size), size, groups));
        }
        (round.time(), round.busy)
    }

    /// Seconds of a prompt: the first micro-batch passes all stages, then one leaves at a time: after the slowest stage or
    /// interface, or after an equal part of the latency if too few micro-batches are in flight to keep a stage busy.
    fn prompt_time(&self, stages: &[Stage]) -> f64 {
        let batch = Batch::prompt(self.workload);
        let (count, _) = self.workload.micro_batches();
        let in_flight = self.workload.depth.min(count as u32);
        let (each, last) = (self.pass(stages, &batch, 0.0, in_flight), self.pass(stages, &batch, 1.0, in_flight));
        let mut round = Round::default();
        round.add(1.0, &each);
        let interval = round.slowest().max(each.latency / f64::from(self.workload.depth));
        last.latency + (count - 1.0) * interval
    }

    /// By device: bytes of weights, and bytes of KV cache and results with this number of groups of sequences.
    fn memory(&self, stages: &[Stage], groups: u32) -> Vec<(f64, f64)> {
        let mut bytes = vec![(0.0, 0.0); self.machine.devices().len()];
        for (number, stage) in stages.iter().enumerate() {
            let ends = (number == 0, number + 1 == stages.len());
            let sums = self.sums(&stage.blocks);
            for (&device, &share) in stage.devices.iter().zip(&stage.shares) {
                let needed = self.rank_memory(share, stage.devices.len(), &sums, ends, groups);
                bytes[device] = self.allocated(device, stage.devices.len(), needed);
            }
        }
        bytes
    }

    /// The part of [`Costs::rank_memory`] that a device allocates: weights that it reads from the mapped file take none. In a tensor
    /// group all weights count, because the parts of some are not consecutive bytes of the file, and are copied.
    pub(super) fn allocated(&self, device: usize, ranks: usize, (weights, others): (f64, f64)) -> (f64, f64) {
        if ranks == 1 && self.machine.maps_weights(device) { (0.0, others) } else { (weights, others) }
    }

    /// Bytes of weights, and bytes of KV cache and results, of a rank with some blocks. `ends`: whether it also has the embedding
    /// and the output. Every rank has the whole embedding.
    ///
    /// Each of the groups of sequences has a KV cache and an arena of its own. An arena is reserved for a full micro-batch over a
    /// full cache, not for the prompt at hand.
    pub(super) fn rank_memory(
        &self,
        share: f64,
        ranks: usize,
        sums: &BlockSums,
        ends: (bool, bool),
        groups: u32,
    ) -> (f64, f64) {
        let (model, workload) = (self.model, self.workload);
        let embedding = if ends.0 { model.embedding_bytes as f64 } else { 0.0 };
        let output = match ends {
            (true, true) if model.tied => 0.0,
            // Tied weights are mirrored: a rank computes its rows of the logits from a whole copy.
            (_, true) if model.tied => model.output_bytes as f64,
            (_, true) => share * model.output_bytes as f64,
            (_, false) => 0.0,
        };
        let weights = share * (sums.dense + sums.experts) + embedding + output;
        let (groups, rows) = (f64::from(groups), f64::from(workload.sequences.div_ceil(groups.max(1))));
        let cells = f64::from(workload.context) * rows;
        let tokens = f64::from(workload.micro_batch).max(rows).min(cells).max(1.0);
        let results = if ends.1 { rows * model.output_scratch_bytes as f64 } else { 0.0 };
        let arena = tokens * (model.scratch_bytes as f64 + cells * model.cell_scratch_bytes as f64) + results;
        (weights, groups * (self.kv_share(share, ranks) * sums.kv_bytes * cells + arena))
    }

    /// Seconds to send the weights. The links of several servers work at the same time, but leave through one interface of the
    /// client, whose speed is taken to be that of the fastest link.
    fn load_time(&self, memory: &[(f64, f64)]) -> f64 {
        let (machine, mut all) = (self.machine, 0.0);
        let of_host = |host: Host| {
            let devices = machine.devices().iter().zip(memory).filter(move |(device, _)| device.host == host);
            devices.map(|(_, bytes)| bytes.0).sum::<f64>()
        };
        let mut slowest = of_host(Host::Client) / machine.within().bandwidth;
        for (server, link) in machine.servers().iter().enumerate() {
            let bytes = of_host(Host::Server(server));
            all += bytes;
            slowest = slowest.max(bytes / link.bandwidth);
        }
        let interface = machine.servers().iter().map(|link| link.bandwidth).fold(0.0, f64::max);
        if interface > 0.0 { slowest.max(all / interface) } else { slowest }
    }

    /// The prediction for one placement; `None` if it does not fit.
    pub(super) fn predict(&self, stages: &[Stage]) -> Option<Prediction> {
        let fits = |(device, bytes): (&DeviceSpeed, &(f64, f64))| bytes.0 + bytes.1 <= device.free as f64;
        let workload = self.workload;
        let round = |groups| {
            let memory = self.memory(stages, groups);
            let all_fit = self.machine.devices().iter().zip(&memory).all(fits);
            all_fit.then(|| (groups, memory, self.decode_round(stages, groups)))
        };
        let rounds = (1..=workload.groups_of(2 * stages.len())).filter_map(round);
        // The round with the fewest groups, of equal ones.
        let (groups, memory, (step_time, busy)) = rounds.min_by(|a, b| a.2.0.total_cmp(&b.2.0))?;
        let prompt_time = self.prompt_time(stages);
        Some(Prediction {
            decode_rate: f64::from(workload.sequences) / step_time,
            groups,
            step_time,
            busy: busy.into_iter().map(|busy| busy / step_time).collect(),
            prompt_rate: f64::from(workload.prompt_tokens) / prompt_time,
            prompt_time,
            load_time: self.load_time(&memory),
            memory: memory.into_iter().map(|(weights, others)| (weights + others).ceil() as u64).collect(),
        })
    }
}

/// The prediction for one placement. `stages` must cover the blocks in order and name devices of the machine, each once at most.
/// Returns `None` if a device has too little memory, or the stages are not such a placement.
pub fn predict(machine: &Machine, model: &ModelSizes, workload: &Workload, stages: &[Stage]) -> Option<Prediction> {
    workload.check(model).ok()?;
    if !is_placement(machine, model, stages) {
        return None;
    }
    Costs::new(machine, model, workload).predict(stages)
}

/// Whether the stages cover all blocks in order, and each device has one place at most.
fn is_placement(machine: &Machine, model: &ModelSizes, stages: &[Stage]) -> bool {
    let mut used = vec![false; machine.devices().len()];
    let mut covered = 0;
    for stage in stages {
        let shares: f64 = stage.shares.iter().sum();
        if stage.blocks.start != covered
            || stage.blocks.is_empty()
            || stage.devices.is_empty()
            || stage.shares.len() != stage.devices.len()
            || stage.shares.iter().any(|&share| share.is_nan() || share <= 0.0)
            || (shares - 1.0).abs() > 1e-6
        {
            return false;
        }
        for &device in &stage.devices {
            match used.get_mut(device) {
                Some(used) if !*used => *used = true,
                _ => return false,
            }
        }
        covered = stage.blocks.end;
    }
    covered == model.blocks.len()
}
