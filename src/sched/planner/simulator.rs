//! A discrete-event simulator for the tests of the planner. It plays batches block by block on devices and links in virtual time,
//! and shares no formula with `cost`: rounds, bubbles and queues on links come out of the events.

use super::{DeviceSpeed, Host, Machine, ModelSizes, Stage, Workload};
use std::collections::VecDeque;

/// Rounds that are played, and those before the measurement.
const ROUNDS: usize = 8;
const WARM_UP: usize = 3;

/// A step of a batch.
#[derive(Clone)]
enum Op {
    /// Waits for a stage, first come, first served.
    Acquire(usize),
    Compute(f64),
    AllReduce(usize, f64),
    Release(usize),
    /// Copies as many bytes to each destination, one after another.
    Send(Host, Vec<Host>, f64),
    /// Bytes from each host to the client; nothing for the client itself.
    ToClient(Vec<Host>, f64),
    FromClient(Vec<Host>, f64),
}

/// A batch on its way through the stages.
struct Job {
    ops: Vec<Op>,
    next: usize,
    /// When its next step may begin; `None` while it waits for a stage, or for its turn.
    ready: Option<f64>,
    /// When each of its rounds ended.
    finished: Vec<f64>,
}

/// A simulated run of one placement.
pub(super) struct Simulation<'a> {
    pub(super) machine: &'a Machine,
    pub(super) model: &'a ModelSizes,
    pub(super) workload: &'a Workload,
    pub(super) stages: &'a [Stage],
}

/// The users of the stages and the network interfaces.
struct SimulatorState {
    busy: Vec<bool>,
    waiting: Vec<VecDeque<usize>>,
    /// By host, the client first: when its interface has sent what was given to it.
    interface_free: Vec<f64>,
}

impl Simulation<'_> {
    /// Decoded tokens per second with `groups` groups of sequences.
    pub(super) fn decode_rate(&self, groups: u32) -> f64 {
        let sequences = self.workload.sequences;
        let sizes: Vec<f64> =
            (0..groups).map(|g| f64::from(sequences / groups + u32::from(g < sequences % groups))).collect();
        let positions = f64::from(self.workload.prompt_tokens) + f64::from(self.workload.decode_tokens) / 2.0;
        let job = |&size: &f64| self.job(size, 1.0, positions, size);
        let mut jobs: Vec<Job> = sizes.iter().map(job).collect();
        self.play(&mut jobs, ROUNDS, usize::MAX);
        let rate = |(job, size): (&Job, &f64)| {
            let time = job.finished[ROUNDS - 1] - job.finished[WARM_UP - 1];
            size * (ROUNDS - WARM_UP) as f64 / time
        };
        jobs.iter().zip(&sizes).map(rate).sum()
    }

    /// Seconds of a prompt.
    pub(super) fn prompt_time(&self) -> f64 {
        let (mut left, mut jobs) = (self.workload.prompt_tokens, Vec::new());
        // Equal micro-batches, as far as that is possible.
        let mut count = left.div_ceil(self.workload.micro_batch);
        while left > 0 {
            let tokens = left.div_ceil(count);
            (left, count) = (left - tokens, count - 1);
            let positions = f64::from(self.workload.prompt_tokens) / 2.0;
            jobs.push(self.job(1.0, f64::from(tokens), positions, if left == 0 { 1.0 } else { 0.0 }));
        }
        self.play(&mut jobs, 1, self.workload.depth as usize);
        jobs.iter().map(|job| job.finished[0]).fold(0.0, f64::max)
    }

    fn host(&self, device: usize) -> Host {
        self.machine.devices()[device].host
    }

    fn hosts(&self, stage: &Stage) -> Vec<Host> {
        stage.devices.iter().map(|&device| self.host(device)).collect()
    }

    fn job(&self, sequences: f64, tokens: f64, positions: f64, rows: f64) -> Job {
        let columns = sequences * tokens;
        let hidden = columns * 4.0 * self.model.width as f64;
        let mut ops = Vec::new();
        if let Some(first) = self.stages.first() {
            ops.push(Op::FromClient(self.hosts(first), sequences * self.workload.input_bytes));
        }
        for (at, stage) in self.stages.iter().enumerate() {
            let slowest = |time: &dyn Fn(&DeviceSpeed, f64) -> f64| {
                let ranks = stage.devices.iter().zip(&stage.shares);
                ranks.map(|(&device, &share)| time(&self.machine.devices()[device], share)).fold(0.0, f64::max)
            };
            ops.push(Op::Acquire(at));
            ops.push(Op::Compute(slowest(&|device, _| device.run_time)));
            for block in &self.model.blocks[stage.blocks.clone()] {
                let dense = (block.weight_bytes - block.expert_bytes) as f64;
                let read = dense + (block.expert_bytes as f64).min(columns * block.routed_bytes as f64);
                let kv = sequences * positions * block.kv_bytes as f64;
                let time = slowest(&|device, share| {
                    let heads =
                        if stage.devices.len() == 1 { 1.0 } else { share.max(1.0 / self.model.kv_heads as f64) };
                    let weights = share * product_time(device, read, block.multiply_adds, columns);
                    let scores = 2.0 * columns * positions * self.model.width as f64;
                    let scores_time = if tokens > 1.0 { share * scores / multiply_rate(device, tokens) } else { 0.0 };
                    let attention = (heads * kv / device.kv_read_rate).max(scores_time);
                    weights + attention + f64::from(block.nodes) * device.node_time
                });
                if stage.devices.len() == 1 {
                    ops.push(Op::Compute(time));
                } else {
                    let half = [Op::Compute(time / 2.0), Op::AllReduce(at, hidden)];
                    ops.extend(half.iter().chain(&half).cloned());
                }
            }
            let last = at + 1 == self.stages.len();
            if last && rows > 0.0 {
                let weights = (self.model.width * self.model.vocabulary) as f64;
                ops.push(Op::Compute(slowest(&|device, share| {
                    share * product_time(device, self.model.output_bytes as f64, weights, rows)
                })));
            }
            ops.push(Op::Release(at));
            let from = self.host(stage.devices[0]);
            match self.stages.get(at + 1) {
                Some(next) => {
                    ops.push(Op::Send(from, self.hosts(next), hidden));
                }
                None if rows > 0.0 => {
                    let bytes = rows * self.workload.result_bytes / stage.devices.len() as f64;
                    ops.push(Op::ToClient(self.hosts(stage), bytes));
                }
                None => {}
            }
        }
        Job { ops, next: 0, ready: None, finished: Vec::new() }
    }

    /// Plays `rounds` rounds of each job; at most `depth` jobs are in flight.
    fn play(&self, jobs: &mut [Job], rounds: usize, depth: usize) {
        let mut state = SimulatorState {
            busy: vec![false; self.stages.len()],
            waiting: vec![VecDeque::new(); self.stages.len()],
            interface_free: vec![0.0; self.machine.servers().len() + 1],
        };
        let mut begun = depth.min(jobs.len());
        jobs[..begun].iter_mut().for_each(|job| job.ready = Some(0.0));
        // The earliest job takes its next step; of several, the one that began first.
        while let Some((at, now)) = earliest(jobs) {
            let job = &mut jobs[at];
            let Some(op) = job.ops.get(job.next) else {
                job.finished.push(now);
                job.next = 0;
                if job.finished.len() == rounds {
                    job.ready = None;
                    if let Some(next) = jobs.get_mut(begun) {
                        next.ready = Some(now);
                        begun += 1;
                    }
                }
                continue;
            };
            job.next += 1;
            match op {
                Op::Compute(time) => job.ready = Some(now + time),
                &Op::AllReduce(stage, bytes) => job.ready = Some(self.all_reduce(&mut state, stage, bytes, now)),
                Op::Send(from, to, bytes) => {
                    let arrivals =
                        to.iter().map(|&to| self.send(&mut state, *from, to, *bytes, now) + self.copy_delay(*from, to));
                    job.ready = Some(arrivals.fold(now, f64::max));
                }
                Op::ToClient(hosts, bytes) | Op::FromClient(hosts, bytes) => {
                    let to_client = matches!(op, Op::ToClient(..));
                    let arrivals = hosts.iter().filter(|&&host| host != Host::Client).map(|&host| {
                        let (from, to) = if to_client { (host, Host::Client) } else { (Host::Client, host) };
                        self.send(&mut state, from, to, *bytes, now)
                    });
                    job.ready = Some(arrivals.fold(now, f64::max));
                }
                &Op::Acquire(stage) => {
                    if std::mem::replace(&mut state.busy[stage], true) {
                        state.waiting[stage].push_back(at);
                        job.ready = None;
                    }
                }
                &Op::Release(stage) => match state.waiting[stage].pop_front() {
                    Some(next) => jobs[next].ready = Some(now),
                    None => state.busy[stage] = false,
                },
            }
        }
    }

    fn is_relayed(&self, from: Host, to: Host) -> bool {
        matches!((from, to), (Host::Server(a), Host::Server(b)) if a != b && self.machine.peer(a, b).is_none())
    }

    /// By how much a copy between stages arrives later than what ranks send each other.
    fn copy_delay(&self, from: Host, to: Host) -> f64 {
        match (from, to) {
            (Host::Server(a), Host::Server(b)) if a != b => {
                self.machine.peer(a, b).map_or(0.0, |peer| peer.copy_latency - peer.link.round_trip / 2.0)
            }
            _ => 0.0,
        }
    }

    /// When bytes arrive that are given to the interface of `from` now.
    fn send(&self, state: &mut SimulatorState, from: Host, to: Host, bytes: f64, now: f64) -> f64 {
        let link = match (from, to) {
            _ if from == to => {
                let within = self.machine.within();
                return now + within.round_trip / 2.0 + bytes / within.bandwidth;
            }
            _ if self.is_relayed(from, to) => {
                let at_client = self.send(state, from, Host::Client, bytes, now);
                return self.send(state, Host::Client, to, bytes, at_client);
            }
            (Host::Server(a), Host::Server(b)) => self.machine.peer(a, b).unwrap().link,
            (Host::Client, Host::Server(server)) | (Host::Server(server), Host::Client) => {
                self.machine.servers()[server]
            }
            (Host::Client, Host::Client) => self.machine.within(),
        };
        let host = match from {
            Host::Client => 0,
            Host::Server(server) => server + 1,
        };
        let sent = state.interface_free[host].max(now) + bytes / link.bandwidth;
        state.interface_free[host] = sent;
        sent + link.round_trip / 2.0
    }

    /// When all ranks have the sum.
    fn all_reduce(&self, state: &mut SimulatorState, stage: usize, bytes: f64, now: f64) -> f64 {
        let ranks = &self.stages[stage].devices;
        let collective = self.machine.has_collectives(ranks);
        let mut exchange = |bytes: f64, now: f64| {
            let (mut end, mut at_client) = (now, Vec::new());
            for &a in ranks {
                let mut served: Vec<Host> = Vec::new();
                let mut neighbours = 0.0;
                for &b in ranks.iter().filter(|&&b| b != a) {
                    let (from, to) = (self.host(a), self.host(b));
                    if from == to {
                        neighbours += 1.0;
                    } else if !(collective && served.contains(&to)) {
                        served.push(to);
                        if self.is_relayed(from, to) {
                            at_client.push((self.send(state, from, Host::Client, bytes, now), to));
                        } else {
                            end = end.max(self.send(state, from, to, bytes, now));
                        }
                    }
                }
                if neighbours > 0.0 {
                    end = end.max(self.send(state, self.host(a), self.host(a), neighbours * bytes, now));
                }
            }
            at_client.sort_by(|a, b| a.0.total_cmp(&b.0));
            let arrivals = at_client.iter().map(|&(then, to)| self.send(state, Host::Client, to, bytes, then));
            arrivals.fold(end, f64::max)
        };
        if !collective {
            let runs = ranks.iter().map(|&device| self.machine.devices()[device].run_time).fold(0.0, f64::max);
            return exchange(bytes, now + runs);
        }
        if ranks.len() > 2 && bytes >= 65_536.0 {
            let pieces = exchange(bytes / ranks.len() as f64, now);
            return exchange(bytes / ranks.len() as f64, pieces);
        }
        exchange(bytes, now)
    }
}

/// Multiply-adds per second of a product with `columns` columns: 8 and 64 were measured, and the time between them is a line.
fn multiply_rate(device: &DeviceSpeed, columns: f64) -> f64 {
    let time_of_8 = 8.0 / device.few_columns_rate;
    let time_of_64 = 64.0 / device.many_columns_rate;
    match columns {
        ..=8.0 => device.few_columns_rate,
        64.0.. => device.many_columns_rate,
        _ => columns / (time_of_8 + (columns - 8.0) * (time_of_64 - time_of_8) / 56.0),
    }
}

/// Seconds of a product whose time was measured with 1 and with 8 columns: a line between them, and no less than reading after it.
fn product_time(device: &DeviceSpeed, bytes: f64, multiply_adds: f64, columns: f64) -> f64 {
    let read = bytes / device.read_rate;
    let computing = columns * multiply_adds / multiply_rate(device, columns);
    if columns >= 8.0 {
        return read.max(computing);
    }
    let of_8 = (8.0 * multiply_adds / device.few_columns_rate).max(read);
    read + (of_8 - read) / 7.0 * (columns - 1.0)
}

fn earliest(jobs: &[Job]) -> Option<(usize, f64)> {
    let ready = jobs.iter().enumerate().filter_map(|(at, job)| Some((at, job.ready?)));
    ready.min_by(|a, b| a.1.total_cmp(&b.1))
}
