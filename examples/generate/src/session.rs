//! A model at work over devices of which some may go and come back: what is lost with a server is loaded again, and the
//! state is computed again from the tokens, in the steps in which it was computed first.

use crate::args::Args;
use crate::engine::{self, Engine};
use crate::hparams::HParams;
use crate::link_traffic::{LinkTraffic, Phase};
use crate::load::{self, Weights};
use crate::model::{CacheOptions, KV_PAD, Model};
use crate::placement::Placement;
use crate::progress::{LoadStats, Progress};
use crate::recover::{Loss, RetryBudgets, endpoint, find_loss};
use crate::report::{self, GraphStats, LossStats, Report};
use crate::timed_device::TimedDevice;
use anyhow::Context;
use fanout::device::{Account, Device};
use fanout::gguf::Gguf;
use fanout::registry::{Options, Registry};
use fanout::rpc::client;
use fanout::tensor::TensorDesc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Devices by name, and how they are opened.
struct DeviceOpener {
    registry: Registry,
    options: Options,
}

impl DeviceOpener {
    fn new(args: &Args) -> DeviceOpener {
        let rpc = client::Options::default().with_silence_timeout(args.rpc_timeout());
        let (threads, memory) = (args.threads.map(usize::from), args.mem.clone());
        DeviceOpener {
            registry: Registry::detect(),
            options: Options::default().with_threads(threads).with_memory(memory).with_rpc(rpc),
        }
    }

    /// The devices that are asked for, or those there are.
    fn open(&self, args: &Args) -> anyhow::Result<Vec<Arc<dyn Device>>> {
        let list = args.devices()?.unwrap_or_else(|| {
            let (list, notes) = self.registry.default_list();
            notes.iter().for_each(|note| log::info!("{note}"));
            list
        });
        Ok(self.registry.open(&list, &self.options)?)
    }

    /// Devices of a server, which is tried for so long.
    fn reopen(&self, names: &str, within: Duration) -> Result<Vec<Arc<dyn Device>>, fanout::registry::RegistryError> {
        let mut options = self.options.clone();
        // Sizes are for the whole list, and not for servers.
        options.memory.clear();
        options.rpc.retry = within;
        options.rpc.connect_timeout = options.rpc.connect_timeout.min(within);
        self.registry.open(names, &options)
    }
}

/// A model spread over devices, and a sequence of tokens that only grows.
pub struct Session<'a> {
    args: &'a Args,
    weights: Weights<'a>,
    opener: DeviceOpener,
    timed_devices: Vec<Arc<TimedDevice>>,
    account: Arc<Account>,
    placement: Placement,
    model: Model,
    depth: usize,
    /// Whether it is known that there is room for all of it.
    fits: bool,
    /// None before the first use, and from a loss until what is lost is there again.
    engine: Option<Engine>,
    /// How the engine's largest graphs lie.
    graph_stats: [GraphStats; 2],
    /// The sequence as it was appended: the prompt, and token by token.
    batches: Vec<Vec<u32>>,
    /// How long to wait for lost servers, if at all.
    retry_budgets: Option<RetryBudgets>,
    phase: Phase,
    /// Whether something is done again after a loss.
    recovering: bool,
    links: LinkTraffic,
    losses: LossStats,
    loaded: Vec<LoadStats>,
    /// By device: how long it has computed for what was not lost, since somebody has asked.
    busy: Vec<Duration>,
    /// By device: bytes that engines before this one brought to it.
    copied: Vec<u64>,
}

impl<'a> Session<'a> {
    /// Opens the devices and decides what lies where, for a prompt of so many tokens; nothing is loaded yet.
    ///
    /// # Errors
    /// For devices that are not there, and a model that cannot be spread over them as it is asked for.
    pub fn new(
        args: &'a Args,
        file: &'a [u8],
        gguf: &'a Gguf<'_>,
        hyper: &HParams,
        prompt: usize,
    ) -> anyhow::Result<Session<'a>> {
        let opener = DeviceOpener::new(args);
        let devices = opener.open(args)?;
        let context = args.context(prompt)?.next_multiple_of(KV_PAD);
        if context > hyper.context.next_multiple_of(KV_PAD) {
            log::warn!(
                "{context} positions, and the model was trained for {}: what is beyond may be noise",
                hyper.context
            );
        }
        let cache = CacheOptions { context, dtype: args.kv_type.dtype(), flash_attn: args.flash_attn };
        let tensors =
            gguf.tensors.iter().map(|info| Ok((info.name.clone(), TensorDesc::contiguous(info.dtype, info.ne)?)));
        let tensors = tensors.collect::<anyhow::Result<Vec<_>>>()?;
        let free = devices.iter().map(|device| Ok(device.memory()?.free)).collect::<anyhow::Result<Vec<_>>>()?;
        let shares = args.shares(devices.len())?;
        let placement = Placement::new(&tensors, hyper, &cache, &free, shares.as_deref())?;
        Ok(Session {
            args,
            weights: Weights::new(file, gguf),
            opener,
            account: Account::new(u64::MAX),
            model: load::model_without_memory(hyper, cache, &placement)?,
            placement,
            depth: args.depth(devices.len()) as usize,
            fits: false,
            engine: None,
            graph_stats: Default::default(),
            batches: Vec::new(),
            retry_budgets: args.retry().map(RetryBudgets::new),
            phase: Phase::Load,
            recovering: false,
            links: LinkTraffic::default(),
            losses: LossStats::default(),
            loaded: vec![LoadStats::default(); devices.len()],
            busy: vec![Duration::ZERO; devices.len()],
            copied: vec![0; devices.len()],
            timed_devices: devices.into_iter().map(TimedDevice::new).collect(),
        })
    }

    /// The devices, in the list's order.
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.timed_devices.iter().map(|meter| Arc::clone(meter) as Arc<dyn Device>).collect()
    }

    /// Who pays for memory on the devices.
    pub fn account(&self) -> &Arc<Account> {
        &self.account
    }

    /// Checks that there is room for everything, and loads it. How long that took, but for what lost servers cost.
    ///
    /// # Errors
    /// Whatever a device says; a server that is lost and does not come back.
    pub fn load(&mut self) -> anyhow::Result<Duration> {
        self.timed(|session| session.with_recovery(|session| session.engine_ready().map(drop)))
    }

    /// The engine, with everything loaded.
    ///
    /// # Errors
    /// As [`Session::load`], but for the first loss already.
    pub fn engine_ready(&mut self) -> anyhow::Result<&mut Engine> {
        if self.engine.is_none() {
            let (devices, ubatch) = (self.devices(), self.args.ubatch as usize);
            if !self.fits {
                engine::check_memory(&self.model, &devices, ubatch, self.depth).context(
                    "nothing was loaded; other devices, another --split, a smaller --ctx or --ubatch may help",
                )?;
                self.fits = true;
            }
            let progress = Progress::new(!self.args.json);
            let (model, placement) = (&mut self.model, &self.placement);
            let all = load::load(model, &self.weights, placement, &devices, &self.account, &progress);
            let mut failed = None;
            for (known, loaded) in self.loaded.iter_mut().zip(all) {
                match loaded {
                    // What is loaded again is part of the recovery, and so is how long that takes.
                    Ok(_) if known.bytes > 0 => {}
                    Ok(loaded) if self.recovering => *known = LoadStats { time: Duration::ZERO, ..loaded },
                    Ok(loaded) => *known = loaded,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            failed.map_or(Ok(()), Err)?;
            let engine = Engine::new(self.model.clone(), devices, &self.account, ubatch, self.depth)?;
            self.graph_stats = engine.graph_stats();
            self.engine = Some(engine);
        }
        self.engine.as_mut().context("an engine that was just made is gone")
    }

    /// Puts tokens behind those that are there; the logits of the last one.
    ///
    /// # Errors
    /// Whatever a device says; a server that is lost and does not come back.
    pub fn append(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<f32>> {
        self.batches.push(tokens.to_vec());
        let logits = self.with_recovery(|session| {
            let batches = std::mem::take(&mut session.batches);
            let logits = session.engine_ready().and_then(|engine| {
                let (now, before) = batches.split_last().context("nothing to append")?;
                if engine.length() == 0 {
                    // Not as one prompt, although that is faster: its sums round otherwise, and other tokens may follow.
                    before.iter().try_for_each(|batch| engine.replay(batch))?;
                }
                Ok(engine.append(now)?)
            });
            session.batches = batches;
            logits
        })?;
        // Only a token is progress: a server that is lost whenever it computes must not keep this busy for ever.
        self.retry_budgets.iter_mut().for_each(RetryBudgets::reset);
        Ok(logits)
    }

    /// Does something again whenever something is lost in it, once that is back.
    fn with_recovery<T>(&mut self, mut work: impl FnMut(&mut Self) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let mut since = None;
        let done = loop {
            match work(self) {
                Ok(done) => break done,
                Err(error) => {
                    if since.is_none() {
                        // What still runs now, nobody gets anything of.
                        let busy = self.busy.iter_mut().zip(&self.timed_devices);
                        busy.for_each(|(busy, meter)| *busy += meter.take_finished_time());
                    }
                    since.get_or_insert_with(Instant::now);
                    self.record_traffic();
                    self.recovering = true;
                    self.recover(error)?;
                }
            }
        };
        if let Some(since) = since {
            self.record_traffic();
            for meter in &self.timed_devices {
                meter.take_busy_time();
            }
            self.recovering = false;
            self.losses.recoveries += 1;
            self.losses.time += Instant::now() - since;
        }
        Ok(done)
    }

    /// Counts what has gone over connections for what is going on.
    fn record_traffic(&mut self) {
        let phase = if self.recovering { Phase::Recovery } else { self.phase };
        self.links.record_all(&self.devices(), phase);
    }

    /// Waits until what is behind an error may be there again, and opens the devices of a lost server. Nothing is loaded yet.
    fn recover(&mut self, error: anyhow::Error) -> anyhow::Result<()> {
        // Its queues are dropped: the devices that live let go of what they were doing, and keep what is loaded.
        self.drop_engine();
        let Some(lost) = find_loss(&error, &self.devices(), self.retry_budgets.as_ref()) else { return Err(error) };
        let Some(waits) = &mut self.retry_budgets else {
            let said = error.chain().any(|cause| cause.to_string().contains(&lost.to_string()));
            return Err(if said { error } else { error.context(lost) });
        };
        let (limit, start) = (waits.limit(), Instant::now());
        if !matches!(lost, Loss::Server { .. }) {
            eprintln!("generate: {lost}; trying again for up to {limit:?}");
            // The server is there, and so is what it has of ours.
            return Ok(waits.retry(&lost, |_| Ok(()))?);
        }
        self.losses.servers += 1;
        eprintln!("generate: {lost}; trying for up to {limit:?} to reach it again");
        let is_lost = |meter: &TimedDevice| endpoint(meter) == Some(lost.endpoint());
        let numbers: Vec<usize> = (0..self.timed_devices.len()).filter(|&i| is_lost(&self.timed_devices[i])).collect();
        let names = numbers.iter().map(|&i| self.timed_devices[i].info().name.clone()).collect::<Vec<_>>().join(",");
        numbers.iter().for_each(|&i| load::unload(&mut self.model, i));
        let devices = waits.retry(&lost, |left| self.opener.reopen(&names, left))?;
        eprintln!("generate: {} is back after {:.1} s", lost.endpoint(), start.elapsed().as_secs_f64());
        self.links.reconnected(lost.endpoint());
        for (number, device) in numbers.into_iter().zip(devices) {
            self.timed_devices[number] = TimedDevice::new(device);
        }
        Ok(())
    }

    /// Ends the engine, if there is one.
    fn drop_engine(&mut self) {
        if let Some(engine) = self.engine.take() {
            let counts = engine.transfer_counts();
            for (sum, bytes) in self.copied.iter_mut().zip(counts.uploaded.iter().zip(&counts.copied)) {
                *sum += bytes.0 + bytes.1;
            }
        }
    }

    /// From now on this is what connections are used for.
    pub fn begin_phase(&mut self, phase: Phase) {
        self.record_traffic();
        self.phase = phase;
    }

    /// How long something takes, but for what lost servers cost.
    pub fn timed(&mut self, work: impl FnOnce(&mut Self) -> anyhow::Result<()>) -> anyhow::Result<Duration> {
        let (start, lost) = (Instant::now(), self.losses.time);
        work(self)?;
        Ok(start.elapsed().saturating_sub(self.losses.time - lost))
    }

    /// By device: how long it has computed since this was last asked, but for what lost servers cost, where that is known.
    pub fn take_busy_times(&mut self) -> Vec<Option<Duration>> {
        let busy = self.busy.iter_mut().map(std::mem::take);
        self.timed_devices.iter().zip(busy).map(|(meter, busy)| Some(meter.take_busy_time()? + busy)).collect()
    }

    /// What the devices did all in all. Times are for who took them to say.
    ///
    /// # Errors
    /// For a cache that cannot be.
    pub fn report(&mut self) -> anyhow::Result<Report> {
        self.record_traffic();
        let compute = self.engine.as_ref().map_or_else(Vec::new, Engine::compute_bytes);
        let depth = self.depth;
        self.drop_engine();
        let (cache, hyper) = (&self.model.cache_options, &self.model.hparams);
        let block = (cache.keys(hyper)?.extent() + cache.values(hyper)?.extent()) as u64;
        let device = |(number, meter): (usize, &Arc<TimedDevice>)| {
            let layers = self.placement.blocks.iter().filter(|&&device| device == number).count();
            report::DeviceStats {
                name: meter.info().name.clone(),
                layers,
                weights: self.loaded[number],
                cache_bytes: layers as u64 * block,
                compute_bytes: compute.get(number).copied().unwrap_or(0),
                copied_bytes: self.copied[number],
                ..report::DeviceStats::default()
            }
        };
        let [prompt_graph, decode_graph] = self.graph_stats;
        Ok(Report {
            model: format!("{} {}", hyper.arch, self.args.model.display()),
            ubatch: self.args.ubatch as usize,
            depth,
            prompt_graph,
            decode_graph,
            devices: self.timed_devices.iter().enumerate().map(device).collect(),
            links: self.links.clone(),
            losses: self.losses,
            ..Report::default()
        })
    }
}
