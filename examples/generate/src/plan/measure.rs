//! Measuring devices and links for the planner: products with weights of the model's type, whole blocks of the model's shape, and small
//! and large copies. All are repeated until they agree; devices take turns, and then the CPU devices of each machine run together.

use super::machines::{host, shared_cores, shared_hosts};
use super::repeat::{Rounds, Scale, repeat};
use super::sample_block::{SampleBatch, SampleBlock};
use crate::hparams::HParams;
use crate::model::CacheOptions;
use anyhow::{Context, anyhow};
use fanout::device::{CopyOutcome, Device, DeviceError, DeviceKind, LinkSpeed, MemoryBudget, Program, Queue, Region};
use fanout::graph::{Builder, Graph};
use fanout::ops::binary::Binary;
use fanout::ops::mul_mat::MulMat;
use fanout::sched::planner::{
    DeviceSpeed, FEW_COLUMNS, Host, Link, MANY_COLUMNS, MAX_DEVICES, Machine, PeerLink, PlannerError,
};
use fanout::tensor::DType;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes of the weights that are read with one column, free memory permitting. More than most caches hold: a model is read from
/// memory.
const READ_BYTES: u64 = 64 << 20;

/// The number of rows of these weights is a multiple of this, as in models: CPU devices repack whole panels of interleaved rows, and
/// read others at 0.6 of the speed.
const ROW_MULTIPLE: usize = 256;

/// Multiply-adds of a run with many columns, about.
const MULTIPLY_ADDS: f64 = 1e9;

/// Nodes in a row, by which the time of one is measured on a device that cannot run a block.
const NODES: usize = 64;

/// The most blocks of a run.
const MAX_BLOCKS: usize = 32;

/// Positions of the KV cache in most runs of blocks, and in the one from which the speed of reading it follows.
const FEW_POSITIONS: usize = 64;
const MANY_POSITIONS: usize = 512;

/// How long a batch of runs takes about, the most runs of it, and the number of batches, whose median counts: other programs disturb single
/// ones.
const BATCH_TIME: Duration = Duration::from_millis(20);
const MAX_RUNS: usize = 1000;
const BATCHES: usize = 3;

/// As [`BATCH_TIME`], of devices that run together: long, so that their runs overlap.
const TOGETHER_BATCH_TIME: Duration = Duration::from_millis(200);

/// Time limit of the runs that are submitted together.
const TIMEOUT: Duration = Duration::from_secs(60);

/// The byte that fills all tensors: as codes and scales of every type, and as a float, a number that is neither 0 nor subnormal, nor
/// very large. Pages that were never written would share one page of zeros, which stays in the cache.
const FILL: u8 = 0x3c;

/// Copies in a row between two servers.
const PEER_COPIES: usize = 8;

/// The link between devices of one host. Not measured: ranks of a group poll for each other, and copies stay in memory.
const WITHIN_HOST: Link = Link { round_trip: 10e-6, bandwidth: 5e9 };

/// The model; one of its blocks is measured.
pub(super) struct ModelShape<'a> {
    pub(super) hparams: &'a HParams,
    pub(super) cache: &'a CacheOptions,
    /// Nodes of a block, as the planner counts them, and bytes of its weights that a token reads.
    pub(super) nodes: u32,
    pub(super) block_bytes: f64,
}

/// The machine, with the bounds of its figures, and what the figures do not show.
pub(super) struct Measured {
    pub(super) machine: Machine,
    pub(super) notes: Vec<String>,
}

/// Measures all devices, the links to their servers and between these. `report` gets a line for each. `machine_id` has the identity of the
/// machine of a server, if the server tells it.
///
/// # Errors
/// More devices than are planned; a device that fails, cannot multiply weights of this type, or has no free memory.
pub(super) fn measure(
    devices: &[Arc<dyn Device>],
    weight: DType,
    model: &ModelShape<'_>,
    machine_id: &dyn Fn(&str) -> Option<String>,
    report: &dyn Fn(String),
) -> anyhow::Result<Measured> {
    // Before the measurement, which takes seconds per device: it would be lost.
    if !(1..=MAX_DEVICES).contains(&devices.len()) {
        return Err(PlannerError::Devices(devices.len()).into());
    }
    let mut notes = Vec::new();
    // By server: its first device.
    let mut servers: Vec<(String, &Arc<dyn Device>)> = Vec::new();
    for device in devices {
        if let Some(stats) = device.link_stats()
            && !servers.iter().any(|(endpoint, _)| *endpoint == stats.endpoint)
        {
            servers.push((stats.endpoint, device));
        }
    }
    let hosts: Vec<String> = servers.iter().map(|(endpoint, _)| host(endpoint, machine_id(endpoint))).collect();
    notes.extend(shared_hosts(servers.iter().map(|(endpoint, _)| &**endpoint).zip(&hosts)));
    let links = repeat(servers.len(), |at| {
        let (endpoint, device) = &servers[at];
        let speed = LinkSpeed::measure(&***device)?;
        let speed = speed.with_context(|| format!("{endpoint} has no free memory to measure the link"))?;
        let bandwidth = speed.to_device.min(speed.from_device);
        let link = Link { round_trip: speed.round_trip.as_secs_f64(), bandwidth };
        Ok((link.round_trip, link))
    })?;
    for ((endpoint, _), rounds) in servers.iter().zip(&links) {
        report(format!("{endpoint}: {}", link_text(rounds.median()?)));
        notes.extend(rounds.disagreement(&format!("round trip to {endpoint}")));
    }
    let mut peers = vec![vec![None; servers.len()]; servers.len()];
    for a in 0..servers.len() {
        for b in a + 1..servers.len() {
            let clients = [links[a].median()?, links[b].median()?];
            let link = peer_link(&**servers[a].1, &**servers[b].1, clients)?;
            if let Some(link) = &link {
                let copy = link.copy_latency * 1e6;
                report(format!(
                    "{} and {}: {}, a copy after {copy:.0} us",
                    servers[a].0,
                    servers[b].0,
                    link_text(&link.link)
                ));
            }
            (peers[a][b], peers[b][a]) = (link, link);
        }
    }
    let server = |device: &Arc<dyn Device>| {
        let stats = device.link_stats()?;
        servers.iter().position(|(endpoint, _)| *endpoint == stats.endpoint)
    };
    let this = host("localhost", None);
    let of_device = |device: &Arc<dyn Device>| server(device).map_or(&this, |server| &hosts[server]);
    let cores = shared_cores(devices.iter().map(|device| (device.info().kind, of_device(device).as_str())));
    let speeds = repeat(devices.len(), |at| {
        let device = &devices[at];
        let (host, round_trip) = match server(device) {
            Some(server) => (Host::Server(server), links[server].median()?.round_trip),
            None => (Host::Client, 0.0),
        };
        let speed = device_speed(&**device, host, round_trip, weight, model);
        let speed = speed.with_context(|| format!("measuring {}", device.info().name))?;
        log::debug!(
            "{}: {:.2} GB/s of {weight}, {:.1} us for a node",
            speed.name,
            speed.read_rate / 1e9,
            speed.node_time * 1e6
        );
        let token = model.block_bytes / speed.read_rate + f64::from(model.nodes) * speed.node_time;
        Ok((token, DeviceSpeed { cores: cores[at], ..speed }))
    })?;
    for rounds in &speeds {
        let speed = rounds.median()?;
        report(format!(
            "{}: reads {:.1} GB/s of {weight} and {:.1} GB/s of the KV cache, {:.0} and {:.0} G multiply-adds/s with \
             {FEW_COLUMNS} and {MANY_COLUMNS} columns; {:.1} us for a node, {:.0} us for a run",
            speed.name,
            speed.read_rate / 1e9,
            speed.kv_read_rate / 1e9,
            speed.few_columns_rate / 1e9,
            speed.many_columns_rate / 1e9,
            speed.node_time * 1e6,
            speed.run_time * 1e6
        ));
        notes.extend(rounds.disagreement(&speed.name));
    }
    // By device: the part of its rates that remains while the other devices of its cores work.
    let mut parts = vec![1.0; devices.len()];
    for at in 0..devices.len() {
        let shares_cores = |&other: &usize| cores[at].is_some() && cores[other] == cores[at];
        let cpus: Vec<usize> = (0..devices.len()).filter(shares_cores).collect();
        // Once for each machine, at its first CPU device.
        if cpus.first() != Some(&at) || cpus.len() < 2 {
            continue;
        }
        let together = repeat(1, |_| {
            let rates = rates_together(cpus.iter().map(|&cpu| &*devices[cpu]), weight, model.hparams.width)?;
            Ok((1.0 / rates.iter().sum::<f64>(), rates))
        })?;
        for (&cpu, rate) in cpus.iter().zip(together[0].median()?) {
            let alone = speeds[cpu].median()?;
            parts[cpu] = (rate / alone.read_rate).min(1.0);
            report(format!("{}: {:.2} of that beside the other CPU devices", alone.name, parts[cpu]));
        }
    }
    let machine = |speeds: Vec<DeviceSpeed>, links: Vec<Link>| {
        let with_part = |(speed, &together): (DeviceSpeed, &f64)| DeviceSpeed { together, ..speed };
        Machine::new(speeds.into_iter().zip(&parts).map(with_part).collect(), links, peers.clone(), WITHIN_HOST)
    };
    let bound = |at: usize| -> anyhow::Result<Machine> { Ok(machine(bounds(&speeds, at)?, bounds(&links, at)?)?) };
    let machine = machine(medians(&speeds)?, medians(&links)?)?.with_bounds(bound(0)?, bound(1)?);
    Ok(Measured { machine, notes })
}

fn medians<T: Clone>(all: &[Rounds<T>]) -> anyhow::Result<Vec<T>> {
    all.iter().map(|rounds| rounds.median().cloned()).collect()
}

fn bounds<T: Scale>(all: &[Rounds<T>], at: usize) -> anyhow::Result<Vec<T>> {
    let bound = |rounds: &Rounds<T>| rounds.bounds()?.into_iter().nth(at).context("one of two bounds");
    all.iter().map(bound).collect()
}

/// By device: bytes of weights per second that it reads while the others do, too.
fn rates_together<'a>(
    devices: impl Iterator<Item = &'a dyn Device>,
    weight: DType,
    width: usize,
) -> anyhow::Result<Vec<f64>> {
    let devices: Vec<_> = devices.collect();
    std::thread::scope(|scope| {
        let run = |&device| {
            scope.spawn(move || {
                let bench = Bench { batch_time: TOGETHER_BATCH_TIME, ..Bench::new(device)? };
                { bench }.read_rate(&Weights::for_device(device, weight, width)?)
            })
        };
        let running: Vec<_> = devices.iter().map(run).collect();
        let joined =
            running.into_iter().map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow!("a thread panicked"))));
        joined.collect()
    })
}

fn link_text(link: &Link) -> String {
    format!("round trip {:.0} us, {:.0} MB/s", link.round_trip * 1e6, link.bandwidth / 1e6)
}

/// Measures one device. Its weights are not uploaded: a slow link would take minutes.
fn device_speed(
    device: &dyn Device,
    host: Host,
    round_trip: f64,
    weight: DType,
    model: &ModelShape<'_>,
) -> anyhow::Result<DeviceSpeed> {
    let (info, free) = (device.info(), device.memory()?.free);
    let mut bench = Bench::new(device)?;
    let (one_node, latency) = bench.time_per_run(sums(model.hparams.width, 1)?, 0)?;
    let collectives = info.kind == DeviceKind::Cpu && bench.queue.collectives().is_some();
    let weights = Weights::for_device(device, weight, model.hparams.width)?;
    let read_rate = bench.read_rate(&weights)?;
    let block = SampleBlock::new(model.hparams, model.cache, weight, free_for_weights(device)?)?;
    let rates = if block.is_supported(device)? {
        bench.block_rates(&block, model, read_rate)?
    } else {
        // A run leaves some nodes of a block to another device.
        bench.product_rates(&weights, read_rate, one_node)?
    };
    // A decoded token waits for the one before it, so that its submission is not hidden behind earlier runs. The node is not part of it.
    let run_time = (latency - round_trip).max(one_node - rates.node_time).max(0.0);
    Ok(DeviceSpeed {
        name: info.name.clone(),
        host,
        read_rate,
        few_columns_rate: rates.few_columns,
        many_columns_rate: rates.many_columns,
        kv_read_rate: rates.kv_read,
        node_time: rates.node_time,
        run_time,
        cores: None,
        together: 1.0,
        free,
        collectives,
    })
}

/// What the times of whole blocks give: rates of products with the norms, activations and attention around them.
struct BlockRates {
    node_time: f64,
    kv_read: f64,
    few_columns: f64,
    many_columns: f64,
}

/// The weights of the products that a device runs.
struct Weights {
    dtype: DType,
    /// Elements of a row, and bytes.
    k: usize,
    row_bytes: usize,
    /// Rows of the product of one column.
    read_rows: usize,
}

impl Weights {
    fn for_device(device: &dyn Device, dtype: DType, width: usize) -> anyhow::Result<Weights> {
        let k = width.next_multiple_of(dtype.block_len());
        let row_bytes = dtype.row_bytes(k).context("the width of the model is too large")?;
        let read_rows = whole_panels(usize::try_from(sample_limit(device)?).unwrap_or(usize::MAX) / row_bytes);
        Ok(Weights { dtype, k, row_bytes, read_rows })
    }
}

/// Bytes of the weights of a block: one of a large model has more than the other measurements.
fn free_for_weights(device: &dyn Device) -> anyhow::Result<u64> {
    Ok((device.memory()?.free / 4).min(device.info().max_buffer / 2))
}

/// Bytes of the weights of a measurement.
fn sample_limit(device: &dyn Device) -> anyhow::Result<u64> {
    Ok(READ_BYTES.min(free_for_weights(device)?))
}

fn whole_panels(rows: usize) -> usize {
    (rows / ROW_MULTIPLE).max(1) * ROW_MULTIPLE
}

/// A product of `[k, rows]` weights with `columns` columns.
fn product(weight: DType, k: usize, rows: usize, columns: usize) -> anyhow::Result<Graph> {
    let mut b = Builder::new();
    let weights = b.leaf(weight, [k, rows, 1, 1])?;
    let x = b.leaf(DType::F32, [k, columns, 1, 1])?;
    b.node(MulMat::PLAIN, &[Some(weights), Some(x)])?;
    Ok(b.build())
}

/// `nodes` sums of `width` elements, each of which reads the one before it.
fn sums(width: usize, nodes: usize) -> anyhow::Result<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [width, 1, 1, 1])?;
    let mut sum = x;
    for _ in 0..nodes {
        sum = b.node(Binary::Add, &[Some(sum), Some(x)])?;
    }
    Ok(b.build())
}

/// Times programs on a queue of a device.
struct Bench<'a> {
    queue: Box<dyn Queue>,
    device: &'a dyn Device,
    batch_time: Duration,
}

impl<'a> Bench<'a> {
    fn new(device: &'a dyn Device) -> anyhow::Result<Bench<'a>> {
        Ok(Bench { queue: device.queue(&MemoryBudget::new(u64::MAX))?, device, batch_time: BATCH_TIME })
    }

    /// Bytes of weights per second of products of one column.
    fn read_rate(&mut self, weights: &Weights) -> anyhow::Result<f64> {
        let Weights { dtype, k, row_bytes, read_rows, .. } = *weights;
        let (time, _) = self.time_per_run(product(dtype, k, read_rows, 1)?, 0)?;
        Ok((read_rows * row_bytes) as f64 / time)
    }

    /// Rates of products alone, for a device that cannot run a block. `one_node`: seconds per run of a graph of one node.
    fn product_rates(&mut self, weights: &Weights, read_rate: f64, one_node: f64) -> anyhow::Result<BlockRates> {
        let Weights { dtype, k, read_rows, .. } = *weights;
        let mut rate = |columns: u32| -> anyhow::Result<f64> {
            let columns = columns as usize;
            let rows = whole_panels(MULTIPLY_ADDS as usize / columns / k).min(read_rows);
            let (time, _) = self.time_per_run(product(dtype, k, rows, columns)?, 0)?;
            Ok((k * rows * columns) as f64 / time)
        };
        let (few_columns, many_columns) = (rate(FEW_COLUMNS)?, rate(MANY_COLUMNS)?);
        let (many_nodes, _) = self.time_per_run(sums(k, NODES)?, 0)?;
        let node_time = ((many_nodes - one_node) / (NODES - 1) as f64).max(0.0);
        Ok(BlockRates { node_time, kv_read: read_rate, few_columns, many_columns })
    }

    /// The times of whole blocks of the model, in terms of the planner's costs.
    fn block_rates(
        &mut self,
        block: &SampleBlock,
        model: &ModelShape<'_>,
        read_rate: f64,
    ) -> anyhow::Result<BlockRates> {
        let limit = sample_limit(self.device)?;
        let (weight_bytes, kv_bytes) = (block.weight_bytes()? as f64, block.kv_bytes()? as f64);
        // At most twice the bytes of the other measurements, with the KV caches, unless one block has more.
        let bytes = weight_bytes + f64::from(FEW_COLUMNS) * MANY_POSITIONS as f64 * kv_bytes;
        let all = ((2.0 * limit as f64 / bytes) as usize).clamp(1, MAX_BLOCKS);
        // For many columns, which are bound by arithmetic: a whole block of a large model could take seconds.
        let small = block.narrowed(limit);
        let mut time = |block: &SampleBlock, blocks: usize, batch: SampleBatch| -> anyhow::Result<f64> {
            let (graph, zeros) = block.graph(blocks, batch)?;
            Ok(self.time_per_run(graph, zeros)?.0 / blocks as f64)
        };
        let batch = |sequences: u32, tokens: u32, positions: usize| SampleBatch {
            sequences: sequences as usize,
            tokens: tokens as usize,
            positions,
        };
        let one = time(block, all, batch(1, 1, FEW_POSITIONS))?;
        let few = time(block, all, batch(FEW_COLUMNS, 1, FEW_POSITIONS))?;
        let few_with_many_positions = time(block, all, batch(FEW_COLUMNS, 1, MANY_POSITIONS))?;
        let products = small.multiply_adds() * f64::from(MANY_COLUMNS);
        let many_blocks = ((MULTIPLY_ADDS / products) as usize).clamp(1, all);
        let many = time(&small, many_blocks, batch(1, MANY_COLUMNS, FEW_POSITIONS))?;
        let read = |sequences: f64, positions: usize| sequences * positions as f64 * kv_bytes;
        let sequences = f64::from(FEW_COLUMNS);
        let more = read(sequences, MANY_POSITIONS - FEW_POSITIONS);
        // At least a twentieth of the time: a difference within the noise would give an arbitrarily high rate.
        let kv_read = more / (few_with_many_positions - few).max(few_with_many_positions / 20.0);
        let fixed = (one - weight_bytes / read_rate - read(1.0, FEW_POSITIONS) / kv_read).max(0.0);
        // What is left for the products: at least a quarter of the time, so that noise cannot make the rate infinite or negative.
        let rate = |block: &SampleBlock, columns: u32, time: f64, sequences: f64| {
            let left = time - fixed - read(sequences, FEW_POSITIONS) / kv_read;
            f64::from(columns) * block.multiply_adds() / left.max(time / 4.0)
        };
        let node_time = fixed / f64::from(model.nodes);
        let (few_columns, many_columns) =
            (rate(block, FEW_COLUMNS, few, sequences), rate(&small, MANY_COLUMNS, many, 1.0));
        Ok(BlockRates { node_time, kv_read, few_columns, many_columns })
    }

    /// Seconds per run of a graph when runs are submitted one after another, and seconds from the submission of a single run to its
    /// end. The first `zeros` bytes of its memory are 0.
    fn time_per_run(&mut self, graph: Graph, zeros: u64) -> anyhow::Result<(f64, f64)> {
        let bytes = graph.slot_sizes().first().copied().unwrap_or(0) as u64;
        let buffer = self.device.alloc(bytes, &MemoryBudget::new(u64::MAX))?;
        self.queue.fill(buffer.whole(), FILL)?;
        self.queue.fill(buffer.region(0, zeros)?, 0)?;
        let bindings: Arc<[Region]> = Arc::new([buffer.whole()]);
        let program = self.device.prepare(Arc::new(graph))?;
        // The first run may compile, and repacks the weights.
        self.time(&program, &bindings, 1)?;
        let one = median(&mut self.times(&program, &bindings, 1)?);
        let count = (self.batch_time.as_secs_f64() / one.max(1e-9)).clamp(2.0, MAX_RUNS as f64) as usize;
        // The difference leaves out the round trip that ends a batch.
        let many = median(&mut self.times(&program, &bindings, 1 + count)?);
        Ok((((many - one) / count as f64).max(1e-9), one))
    }

    fn times(&mut self, program: &Program, bindings: &Arc<[Region]>, count: usize) -> Result<Vec<f64>, DeviceError> {
        (0..BATCHES).map(|_| self.time(program, bindings, count)).collect()
    }

    fn time(&mut self, program: &Program, bindings: &Arc<[Region]>, count: usize) -> Result<f64, DeviceError> {
        let began = Instant::now();
        for _ in 0..count {
            // As the scheduler runs a token on devices of this process: on the caller's thread.
            self.queue.run_inline(program, bindings, TIMEOUT)?;
        }
        self.queue.mark().wait(Some(Instant::now() + TIMEOUT))?;
        Ok(began.elapsed().as_secs_f64())
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The link between two servers, by copies back and forth, each of which waits for the one before it; `None` if the servers cannot
/// connect to each other. `clients` has the links to both, by which the size of the copies is chosen.
fn peer_link(a: &dyn Device, b: &dyn Device, clients: [&Link; 2]) -> anyhow::Result<Option<PeerLink>> {
    if !a.copies_from(b.info()) || !b.copies_from(a.info()) {
        return Ok(None);
    }
    let large = (clients[0].bandwidth.min(clients[1].bandwidth) * 0.02).clamp(65_536.0, 4_194_304.0) as u64;
    let budget = MemoryBudget::new(u64::MAX);
    let buffers = [a.alloc(large, &budget)?, b.alloc(large, &budget)?];
    let mut queues = [a.queue(&budget)?, b.queue(&budget)?];
    let mut time = |bytes: u64, copies: usize| -> Result<Option<f64>, DeviceError> {
        let regions = [buffers[0].region(0, bytes)?, buffers[1].region(0, bytes)?];
        let (began, mut after) = (Instant::now(), None);
        for at in 0..copies {
            let (from, to) = (at % 2, (at + 1) % 2);
            let copied = queues[to].copy_from(regions[from].clone(), regions[to].clone(), after.as_ref())?;
            if copied == CopyOutcome::Unreachable {
                return Ok(None);
            }
            after = Some(queues[to].mark());
        }
        after.map_or(Ok(()), |last| last.wait(Some(Instant::now() + TIMEOUT)))?;
        Ok(Some(began.elapsed().as_secs_f64()))
    };
    let mut per_copy = |bytes: u64| -> Result<Option<f64>, DeviceError> {
        // The first copy opens the connection.
        let (Some(_), Some(two), Some(many)) = (time(bytes, 2)?, time(bytes, 2)?, time(bytes, 2 + PEER_COPIES)?) else {
            return Ok(None);
        };
        Ok(Some(((many - two) / PEER_COPIES as f64).max(1e-9)))
    };
    let (Some(small), Some(large_time)) = (per_copy(4)?, per_copy(large)?) else { return Ok(None) };
    let sending = (large_time - small).max(1e-6);
    // The client takes part in a copy, but not in what ranks of a group send: 156 us one way on loopback, where a round trip to the
    // client takes 46 us. So the links to the client are the estimate for ranks where they are faster.
    let round_trip = (2.0 * small).min(clients[0].round_trip.max(clients[1].round_trip));
    Ok(Some(PeerLink { link: Link { round_trip, bandwidth: large as f64 / sending }, copy_latency: small }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hparams::Arch;
    use crate::model::tests::toy::ToyModel;
    use fanout::device::noop::NoopDevice;

    /// The rule of support panics, so that a device which is measured fails the test.
    #[test]
    fn too_many_devices_are_refused_before_any_is_measured() {
        let unused = |_: usize| NoopDevice::new("noop", DeviceKind::Gpu).with_support(|_| panic!("measured")).shared();
        let hparams = ToyModel::new(Arch::Llama).hparams;
        for count in [0, MAX_DEVICES + 1] {
            let devices: Vec<_> = (0..count).map(unused).collect();
            let cache = CacheOptions { groups: 1, cells: 256, dtype: DType::F16, flash_attn: true };
            let model = ModelShape { hparams: &hparams, cache: &cache, nodes: 1, block_bytes: 1.0 };
            let measured = measure(&devices, DType::F32, &model, &|_| None, &|line| panic!("{line}"));
            let error = measured.err().unwrap();
            assert_eq!(error.downcast_ref(), Some(&PlannerError::Devices(count)));
        }
    }
}
