//! A generation session that survives lost servers: devices, weights, KV cache and the sequence of tokens so far.
//!
//! After a loss the session reopens the server's devices, reloads the weights that were on them, and recomputes the KV cache by
//! replaying the tokens. The replay of a single sequence uses the same batches as the first time: larger batches would be faster, but they round
//! differently, so the generated tokens could change.

mod device_opener;

pub use device_opener::DeviceOpener;

use crate::args::{Args, WeightStorage};
use crate::console;
use crate::engine::{self, Engine, EngineOptions};
use crate::hparams::HParams;
use crate::link_traffic::{LinkTraffic, Phase};
use crate::load;
use crate::model::{KV_PAD, Model, cache_names};
use crate::placed_model::PlacedModel;
use crate::placement::Placement;
use crate::progress::{Progress, Unit};
use crate::recover::{LostServer, find_loss};
use crate::report::{self, GraphStats, LossStats, Report};
use crate::sample::Sampler;
use crate::timed_device::TimedDevice;
use crate::token_history::TokenHistory;
use anyhow::Context;
use fanout::device::{Device, MemoryBudget};
use fanout::gguf::Gguf;
use fanout::recovery::{Loss, RetryBudgets};
use fanout::sched::tensor_group::TensorSplit;
use fanout::weights::{LoadStats, ModelFile, Weights};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A model spread over devices, and one sequence of tokens.
pub struct Session<'a> {
    args: &'a Args,
    weights: Weights<'a>,
    opener: DeviceOpener,
    timed_devices: Vec<Arc<TimedDevice>>,
    budget: Arc<MemoryBudget>,
    placement: Placement,
    model: Model,
    split: TensorSplit,
    options: EngineOptions,
    sampler: Sampler,
    /// Most tokens of a sequence.
    context: usize,
    /// Whether the memory check has passed. It runs once, before the first load.
    fits: bool,
    /// By device: bytes of weights that the device reads from the mapped file.
    mapped: Vec<u64>,
    /// `None` before the first use, and after a loss until everything is loaded again.
    engine: Option<Engine>,
    /// Nodes, splits and copies of the engine's largest graphs: a full micro-batch and a single token.
    graph_stats: [GraphStats; 2],
    /// The sequence so far.
    history: TokenHistory,
    /// Retry time per server; `None` without `--retry`.
    retry_budgets: Option<RetryBudgets>,
    phase: Phase,
    /// Whether the session is repeating work after a loss: its traffic and times count as recovery.
    recovering: bool,
    links: LinkTraffic,
    losses: LossStats,
    loaded: Vec<LoadStats>,
    /// By device: compute time saved when a loss occurred, not yet returned by [`Session::take_busy_times`].
    busy: Vec<Duration>,
    /// By device: bytes that earlier engines uploaded or copied to it.
    copied: Vec<u64>,
}

impl<'a> Session<'a> {
    /// Opens the devices and plans the placement, for sequences with prompts of up to `prompt` tokens. Loads nothing yet. With
    /// `--retry`, waits for servers that cannot be reached.
    ///
    /// # Errors
    /// A device that cannot be opened, a `--ctx` that is too small, or a `--split` that does not match the devices.
    pub fn new(
        args: &'a Args,
        file: &'a ModelFile,
        gguf: &Gguf<'_>,
        hparams: &HParams,
        prompt: usize,
    ) -> anyhow::Result<Session<'a>> {
        let (opener, devices) = DeviceOpener::open(args)?;
        let seed = args.seed.unwrap_or_else(|| fastrand::u64(..));
        let sampler = Sampler::from_args(args, seed);
        let placed = PlacedModel::new(args, &devices, gguf, hparams, prompt, sampler.sampling()?)?;
        let PlacedModel { context, placement, model, split, options } = placed;
        if context > hparams.context.next_multiple_of(KV_PAD) {
            log::warn!(
                "the context has {context} positions, but the model was trained for {}: output beyond that may be noise",
                hparams.context
            );
        }
        Ok(Session {
            args,
            context,
            weights: Weights::of_file(file, &gguf.tensors),
            opener,
            budget: MemoryBudget::new(u64::MAX),
            split,
            model,
            placement,
            options,
            sampler,
            fits: false,
            mapped: vec![0; devices.len()],
            engine: None,
            graph_stats: Default::default(),
            history: TokenHistory::default(),
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

    /// The devices, in the order of the command line.
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.timed_devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect()
    }

    /// The memory budget that all allocations on the devices are charged to.
    pub fn budget(&self) -> &Arc<MemoryBudget> {
        &self.budget
    }

    /// Checks that the model fits and loads it. Returns the time that this took, without the time spent on recovery.
    ///
    /// # Errors
    /// A model that does not fit, a device failure, or a lost server that did not come back in time.
    pub fn load(&mut self) -> anyhow::Result<Duration> {
        self.timed(|session| session.with_recovery(|session| session.engine_ready().map(drop)))
    }

    /// The engine, after loading everything that is not loaded yet.
    ///
    /// # Errors
    /// As [`Session::load`], but without recovery: the first loss is returned as an error.
    pub fn engine_ready(&mut self) -> anyhow::Result<&mut Engine> {
        if self.engine.is_none() {
            let devices = self.devices();
            if !self.fits {
                self.choose_weight_storage(&devices).context(
                    "nothing was loaded: try other devices, another --split, a larger --mem, or a smaller --ctx or --ubatch",
                )?;
                self.fits = true;
            }
            let progress = Progress::new(!self.args.json);
            let (model, placed) = (&mut self.model, (&self.placement, &self.split));
            let all = load::load(model, &self.weights, placed, &devices, &self.budget, progress);
            let mut failed = None;
            for (stats, loaded) in self.loaded.iter_mut().zip(all) {
                match loaded {
                    // A reload is part of the recovery: the statistics of the first load stay, and its time does not count
                    // here.
                    Ok(_) if stats.bytes > 0 => {}
                    Ok(loaded) if self.recovering => *stats = LoadStats { time: Duration::ZERO, ..loaded },
                    Ok(loaded) => *stats = loaded,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            failed.map_or(Ok(()), Err)?;
            let engine = Engine::new((self.model.clone(), self.split.clone()), &devices, &self.budget, self.options)?;
            self.graph_stats = engine.graph_stats();
            self.engine = Some(engine);
        }
        self.engine.as_mut().context("the engine that was just built is missing (a bug)")
    }

    /// Verifies that the model fits, before anything is loaded. Chooses how CPU devices hold their weights, and maps those that
    /// they read from the file: mapped weights need no memory.
    fn choose_weight_storage(&mut self, devices: &[Arc<dyn Device>]) -> anyhow::Result<()> {
        let storage = self.args.weights;
        if storage != Some(WeightStorage::Mapped) {
            let fits = engine::check_memory((&self.model, &self.split), devices, self.options);
            let cpu = devices.iter().any(|device| device.import_host().is_some());
            match fits {
                Err(error) if storage.is_none() && cpu && error.is_out_of_memory() => {
                    log::warn!("the weights stay in the mapped file, as --weights mapped does: {error}");
                }
                fits => return Ok(fits?),
            }
        }
        for (number, device) in devices.iter().enumerate() {
            let at = (number, &**device);
            let placed = (&self.placement, &self.split);
            self.mapped[number] = load::map_weights(&mut self.model, &self.weights, placed, at)?;
        }
        if self.mapped.iter().all(|&bytes| bytes == 0) {
            log::warn!("no weights are mapped: only CPU devices of this machine can read them from the file");
        }
        Ok(engine::check_memory((&self.model, &self.split), devices, self.options)?)
    }

    /// Appends tokens to the sequence and returns the token that follows. Recovers from lost servers if `--retry` is given.
    ///
    /// # Errors
    /// Invalid logits, a device failure, or a lost server that did not come back in time.
    pub fn append(&mut self, tokens: &[u32]) -> anyhow::Result<u32> {
        self.history.push(tokens);
        let token = self.with_recovery(|session| {
            let history = std::mem::take(&mut session.history);
            let token = session.evaluate_last(&history);
            session.history = history;
            token
        })?;
        self.restore_retry_time();
        Ok(token)
    }

    /// Appends tokens to the sequence and returns the logits of the token that follows, with recovery as [`Session::append`].
    ///
    /// # Errors
    /// As [`Session::append`].
    pub fn append_for_logits(&mut self, tokens: &[u32]) -> anyhow::Result<Vec<f32>> {
        self.history.push(tokens);
        let logits = self.with_recovery(|session| {
            let history = std::mem::take(&mut session.history);
            let evaluated = session.evaluate_last(&history);
            session.history = history;
            evaluated?;
            session.engine_ready()?.logits(0)?.pop().context("a result without logits (a bug)")
        })?;
        self.restore_retry_time();
        Ok(logits)
    }

    /// How tokens are sampled.
    pub fn sampler(&self) -> &Sampler {
        &self.sampler
    }

    /// Runs `work` on the engine, and after each loss again on a new one, which has no sequences.
    ///
    /// # Errors
    /// As [`Session::append`].
    pub fn with_engine<T>(&mut self, mut work: impl FnMut(&mut Engine) -> anyhow::Result<T>) -> anyhow::Result<T> {
        self.with_recovery(|session| work(session.engine_ready()?))
    }

    /// Drops the engine with its sequences, and zeroes the KV caches, in which invalid keys and values of the sequences may be.
    ///
    /// # Errors
    /// As [`Session::load`].
    pub fn clear_caches(&mut self) -> anyhow::Result<()> {
        self.with_recovery(|session| {
            if let Some(engine) = &mut session.engine {
                // A queue that is dropped does not wait for the program that it runs, which could write cells after they are zeroed.
                engine.synchronize()?;
            }
            session.drop_engine();
            Ok(load::clear_caches(&session.model, &session.split, &session.devices(), &session.budget)?)
        })
    }

    /// Restores the full retry time of every server. Only for finished batches: a server that crashes on every computation must not
    /// cause endless retries.
    pub fn restore_retry_time(&mut self) {
        self.retry_budgets.iter_mut().for_each(RetryBudgets::reset);
    }

    /// Evaluates the last batch of the sequence, after all others if the engine is new.
    fn evaluate_last(&mut self, history: &TokenHistory) -> anyhow::Result<u32> {
        let (now, before) = history.batches().split_last().context("nothing to append")?;
        let (quiet, ubatch) = (self.args.json, self.args.ubatch as usize);
        let sampler = self.sampler.clone();
        let uniform = sampler.uniform(0, now.start + now.tokens.len());
        let engine = self.engine_ready()?;
        // Replay batch by batch. One large prompt would be faster, but its sums round differently, so that the tokens that follow
        // could differ.
        let before = if engine.length() == 0 { before } else { &[] };
        let total: usize = before.iter().chain([now]).map(|batch| batch.tokens.len()).sum();
        let name = if before.is_empty() { "prompt" } else { "recomputing" };
        let task = Progress::new(total > ubatch && !quiet).start(name, Unit::Tokens, total as u64);
        for batch in before {
            engine.truncate(batch.start);
            engine.replay(&batch.tokens)?;
            task.add(batch.tokens.len() as u64);
        }
        engine.truncate(now.start);
        let sampled = engine.append(&now.tokens, uniform, &|tokens| task.add(tokens as u64))?;
        if !sampled.probability.is_nan() && !sampler.penalises() {
            return Ok(sampled.token);
        }
        let mut logits = engine.logits(0)?.pop().context("a result without logits (a bug)")?;
        sampler.penalise(&mut logits, &history.tokens());
        Ok(sampler.sample_on_host(&logits, uniform)?)
    }

    /// Shortens the sequence to what it has in common with the start of `tokens`, but never to all of them, because their last one
    /// must be evaluated again. Returns the length of the sequence.
    pub fn keep_common_prefix(&mut self, tokens: &[u32]) -> usize {
        let length = self.history.common_prefix(tokens).min(tokens.len().saturating_sub(1));
        self.history.truncate(length);
        length
    }

    /// Most tokens of a sequence.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Evaluates tokens and forgets them again ([`Engine::warm_up`]); devices' compute times do not include it.
    ///
    /// # Errors
    /// As [`Session::append`].
    pub fn warm_up(&mut self, tokens: &[u32]) -> anyhow::Result<()> {
        self.with_recovery(|session| Ok(session.engine_ready()?.warm_up(tokens)?))?;
        self.take_busy_times();
        Ok(())
    }

    /// Runs `work`; on a loss, recovers and runs it again, until it succeeds or recovery fails.
    fn with_recovery<T>(&mut self, mut work: impl FnMut(&mut Self) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let mut since = None;
        let done = loop {
            match work(self) {
                Ok(done) => break done,
                Err(error) => {
                    if since.is_none() {
                        // Save the compute time of programs that have finished. The results of running ones are discarded, so
                        // their time does not count.
                        let busy = self.busy.iter_mut().zip(&self.timed_devices);
                        busy.for_each(|(busy, device)| *busy += device.take_finished_time());
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
            for device in &self.timed_devices {
                device.take_busy_time();
            }
            self.recovering = false;
            self.losses.recoveries += 1;
            self.losses.time += Instant::now() - since;
        }
        Ok(done)
    }

    /// Adds the traffic since the last call to the current phase, or to the recovery.
    fn record_traffic(&mut self) {
        let phase = if self.recovering { Phase::Recovery } else { self.phase };
        self.links.record_all(&self.devices(), phase);
    }

    /// Recovers from the loss that caused `error`: waits until a retry makes sense, and reopens the devices of a lost server.
    /// Loads nothing: the caller's retry does. Errors that no loss caused, and losses without `--retry`, are returned.
    fn recover(&mut self, error: anyhow::Error) -> anyhow::Result<()> {
        // Drops all queues: the surviving devices abandon pending work, and keep the weights that are loaded.
        self.drop_engine();
        let mut devices = self.devices();
        let Some(lost) = find_loss(&error, &devices, self.retry_budgets.as_ref()) else { return Err(error) };
        let Some(waits) = &mut self.retry_budgets else {
            return Err(LostServer::new(lost, error).into());
        };
        let (limit, start) = (waits.limit(), Instant::now());
        let is_lost = matches!(lost, Loss::Server { .. });
        if is_lost {
            self.losses.servers += 1;
            console::message(format_args!("{lost}; trying for up to {limit:?} to reach it again"));
        } else {
            console::message(format_args!("{lost}; trying again for up to {limit:?}"));
        }
        let mut server = lost.endpoint().to_owned();
        let reopened = waits.reopen(&lost, &mut devices, |names, left| {
            let (devices, new) = self.opener.reopen_lost(lost.endpoint(), names, left)?;
            server = new;
            Ok(devices)
        })?;
        if !is_lost {
            return Ok(());
        }
        let seconds = start.elapsed().as_secs_f64();
        if server == lost.endpoint() {
            console::message(format_args!("{server} is back after {seconds:.1} s"));
        } else {
            console::message(format_args!("{server} takes the place of {} after {seconds:.1} s", lost.endpoint()));
            self.opener.replace_server(lost.endpoint(), &server);
        }
        self.links.reconnected(lost.endpoint());
        for number in reopened {
            load::unload(&mut self.model, &self.split, number);
            self.timed_devices[number] = TimedDevice::new(Arc::clone(&devices[number]));
        }
        Ok(())
    }

    /// Drops the engine, if there is one, with what its KV caches know, and adds its transfer counts to the totals.
    fn drop_engine(&mut self) {
        load::forget_cells(&mut self.model);
        if let Some(engine) = self.engine.take() {
            self.copied.iter_mut().zip(engine.transferred_bytes()).for_each(|(sum, bytes)| *sum += bytes);
        }
    }

    /// Counts the traffic from now on towards `phase`.
    pub fn begin_phase(&mut self, phase: Phase) {
        self.record_traffic();
        self.phase = phase;
    }

    /// Runs `work` and returns the time it took, without the time spent on recovery.
    pub fn timed(&mut self, work: impl FnOnce(&mut Self) -> anyhow::Result<()>) -> anyhow::Result<Duration> {
        let (start, lost) = (Instant::now(), self.losses.time);
        work(self)?;
        Ok(start.elapsed().saturating_sub(self.losses.time - lost))
    }

    /// Adds the time of work that was repeated to that of the recoveries. Not for time within a recovery, which is counted already.
    pub fn add_recovery_time(&mut self, time: Duration) {
        self.losses.time += time;
    }

    /// By device: compute time since the last call, without recovery; `None` for the devices of servers, which are not timed.
    pub fn take_busy_times(&mut self) -> Vec<Option<Duration>> {
        let busy = self.busy.iter_mut().map(std::mem::take);
        self.timed_devices.iter().zip(busy).map(|(device, busy)| Some(device.take_busy_time()? + busy)).collect()
    }

    /// The report of the whole run; the caller fills in the prompt, the tokens and all times.
    ///
    /// # Errors
    /// A KV cache with a layout that is invalid for the model.
    pub fn report(&mut self) -> anyhow::Result<Report> {
        self.record_traffic();
        let compute = self.engine.as_ref().map_or_else(Vec::new, Engine::compute_bytes);
        self.drop_engine();
        let stats = |(number, device): (usize, &Arc<TimedDevice>)| {
            let has = |&(_, group): &(usize, &usize)| self.split.groups()[*group].devices().contains(&number);
            let layers = self.placement.blocks.iter().enumerate().filter(has);
            let of_device = |name: &String| {
                let parts = self.split.parts(name).unwrap_or_default();
                parts.iter().filter(|part| part.device == number).map(|part| part.desc.extent() as u64).sum::<u64>()
            };
            let cache_bytes = layers.clone().map(|(layer, _)| cache_names(layer).iter().map(of_device).sum::<u64>());
            let (cache_bytes, layers) = (cache_bytes.sum::<u64>() * self.model.caches.len() as u64, layers.count());
            report::DeviceStats {
                name: device.info().name.clone(),
                layers,
                weights: self.loaded[number],
                mapped_bytes: self.mapped[number],
                cache_bytes,
                compute_bytes: compute.get(number).copied().unwrap_or(0),
                copied_bytes: self.copied[number],
                ..report::DeviceStats::default()
            }
        };
        let [prompt_graph, decode_graph] = self.graph_stats;
        Ok(Report {
            model: format!("{} {}", self.model.hparams.arch, self.args.model().display()),
            ubatch: self.args.ubatch as usize,
            depth: self.options.depth,
            prompt_graph,
            decode_graph,
            devices: self.timed_devices.iter().enumerate().map(stats).collect(),
            links: self.links.clone(),
            losses: self.losses,
            ..Report::default()
        })
    }
}
