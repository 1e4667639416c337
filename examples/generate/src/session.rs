//! A model at work over devices of which some may go and come back: what is lost with a server is loaded again, and the
//! state is computed again from the tokens, in the steps in which it was computed first.

use crate::args::Args;
use crate::engine::{self, Engine};
use crate::hyper::Hyper;
use crate::links::{Links, Phase};
use crate::load::{self, Weights};
use crate::meter::Metered;
use crate::model::{CacheOptions, Model, PAD};
use crate::placement::Placement;
use crate::progress::{Loaded, Progress};
use crate::recover::{Lost, Waits, culprit, endpoint};
use crate::report::{self, Graph, Losses, Report};
use anyhow::Context;
use fanout::device::{Account, Device};
use fanout::gguf::Gguf;
use fanout::registry::{Options, Registry};
use fanout::rpc::client;
use fanout::tensor::TensorDesc;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Devices by name, and how they are opened.
struct Opener {
    registry: Registry,
    options: Options,
}

impl Opener {
    fn new(args: &Args) -> Opener {
        let rpc = client::Options::default().with_patience(args.rpc_timeout());
        let (threads, memory) = (args.threads.map(usize::from), args.mem.clone());
        Opener {
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
    opener: Opener,
    meters: Vec<Arc<Metered>>,
    account: Arc<Account>,
    placement: Placement,
    model: Model,
    depth: usize,
    /// Whether it is known that there is room for all of it.
    fits: bool,
    /// None before the first use, and from a loss until what is lost is there again.
    engine: Option<Engine>,
    /// How the engine's largest graphs lie.
    laid: [Graph; 2],
    /// The sequence as it was appended: the prompt, and token by token.
    batches: Vec<Vec<u32>>,
    /// How long to wait for lost servers, if at all.
    waits: Option<Waits>,
    phase: Phase,
    /// Whether something is done again after a loss.
    recovering: bool,
    links: Links,
    losses: Losses,
    loaded: Vec<Loaded>,
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
        hyper: &Hyper,
        prompt: usize,
    ) -> anyhow::Result<Session<'a>> {
        let opener = Opener::new(args);
        let devices = opener.open(args)?;
        let context = args.context(prompt)?.next_multiple_of(PAD);
        if context > hyper.context.next_multiple_of(PAD) {
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
            model: load::planned(hyper, cache, &placement)?,
            placement,
            depth: args.depth(devices.len()) as usize,
            fits: false,
            engine: None,
            laid: Default::default(),
            batches: Vec::new(),
            waits: args.retry().map(Waits::new),
            phase: Phase::Load,
            recovering: false,
            links: Links::default(),
            losses: Losses::default(),
            loaded: vec![Loaded::default(); devices.len()],
            busy: vec![Duration::ZERO; devices.len()],
            copied: vec![0; devices.len()],
            meters: devices.into_iter().map(Metered::new).collect(),
        })
    }

    /// The devices, in the list's order.
    pub fn devices(&self) -> Vec<Arc<dyn Device>> {
        self.meters.iter().map(|meter| Arc::clone(meter) as Arc<dyn Device>).collect()
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
        self.timed(|session| session.enduring(|session| session.ready().map(drop)))
    }

    /// The engine, with everything loaded.
    ///
    /// # Errors
    /// As [`Session::load`], but for the first loss already.
    pub fn ready(&mut self) -> anyhow::Result<&mut Engine> {
        if self.engine.is_none() {
            let (devices, ubatch) = (self.devices(), self.args.ubatch as usize);
            if !self.fits {
                engine::check(&self.model, &devices, ubatch, self.depth).context(
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
                    Ok(loaded) if self.recovering => *known = Loaded { time: Duration::ZERO, ..loaded },
                    Ok(loaded) => *known = loaded,
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            failed.map_or(Ok(()), Err)?;
            let engine = Engine::new(self.model.clone(), devices, &self.account, ubatch, self.depth)?;
            self.laid = engine.laid();
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
        let logits = self.enduring(|session| {
            let batches = std::mem::take(&mut session.batches);
            let logits = session.ready().and_then(|engine| {
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
        self.waits.iter_mut().for_each(Waits::progress);
        Ok(logits)
    }

    /// Does something again whenever something is lost in it, once that is back.
    fn enduring<T>(&mut self, mut work: impl FnMut(&mut Self) -> anyhow::Result<T>) -> anyhow::Result<T> {
        let mut since = None;
        let done = loop {
            match work(self) {
                Ok(done) => break done,
                Err(error) => {
                    if since.is_none() {
                        // What still runs now, nobody gets anything of.
                        let busy = self.busy.iter_mut().zip(&self.meters);
                        busy.for_each(|(busy, meter)| *busy += meter.so_far());
                    }
                    since.get_or_insert_with(Instant::now);
                    self.tally();
                    self.recovering = true;
                    self.recover(error)?;
                }
            }
        };
        if let Some(since) = since {
            self.tally();
            for meter in &self.meters {
                meter.lap();
            }
            self.recovering = false;
            self.losses.recoveries += 1;
            self.losses.time += Instant::now() - since;
        }
        Ok(done)
    }

    /// Counts what has gone over connections for what is going on.
    fn tally(&mut self) {
        let phase = if self.recovering { Phase::Recovery } else { self.phase };
        self.links.tally(&self.devices(), phase);
    }

    /// Waits until what is behind an error may be there again, and opens the devices of a lost server. Nothing is loaded yet.
    fn recover(&mut self, error: anyhow::Error) -> anyhow::Result<()> {
        // Its queues are dropped: the devices that live let go of what they were doing, and keep what is loaded.
        self.retire();
        let Some(lost) = culprit(&error, &self.devices(), self.waits.as_ref()) else { return Err(error) };
        let Some(waits) = &mut self.waits else {
            let said = error.chain().any(|cause| cause.to_string().contains(&lost.to_string()));
            return Err(if said { error } else { error.context(lost) });
        };
        let (limit, start) = (waits.limit(), Instant::now());
        if !matches!(lost, Lost::Server { .. }) {
            eprintln!("generate: {lost}; trying again for up to {limit:?}");
            // The server is there, and so is what it has of ours.
            return Ok(waits.reach(&lost, |_| Ok(()))?);
        }
        self.losses.servers += 1;
        eprintln!("generate: {lost}; trying for up to {limit:?} to reach it again");
        let is_lost = |meter: &Metered| endpoint(meter) == Some(lost.endpoint());
        let numbers: Vec<usize> = (0..self.meters.len()).filter(|&i| is_lost(&self.meters[i])).collect();
        let names = numbers.iter().map(|&i| self.meters[i].info().name.clone()).collect::<Vec<_>>().join(",");
        numbers.iter().for_each(|&i| load::unload(&mut self.model, i));
        let devices = waits.reach(&lost, |left| self.opener.reopen(&names, left))?;
        eprintln!("generate: {} is back after {:.1} s", lost.endpoint(), start.elapsed().as_secs_f64());
        self.links.reconnected(lost.endpoint());
        for (number, device) in numbers.into_iter().zip(devices) {
            self.meters[number] = Metered::new(device);
        }
        Ok(())
    }

    /// Ends the engine, if there is one.
    fn retire(&mut self) {
        if let Some(engine) = self.engine.take() {
            let counts = engine.counts();
            for (sum, bytes) in self.copied.iter_mut().zip(counts.uploaded.iter().zip(&counts.copied)) {
                *sum += bytes.0 + bytes.1;
            }
        }
    }

    /// From now on this is what connections are used for.
    pub fn begin(&mut self, phase: Phase) {
        self.tally();
        self.phase = phase;
    }

    /// How long something takes, but for what lost servers cost.
    pub fn timed(&mut self, work: impl FnOnce(&mut Self) -> anyhow::Result<()>) -> anyhow::Result<Duration> {
        let (start, lost) = (Instant::now(), self.losses.time);
        work(self)?;
        Ok(start.elapsed().saturating_sub(self.losses.time - lost))
    }

    /// By device: how long it has computed since this was last asked, but for what lost servers cost, where that is known.
    pub fn lap(&mut self) -> Vec<Option<Duration>> {
        let busy = self.busy.iter_mut().map(std::mem::take);
        self.meters.iter().zip(busy).map(|(meter, busy)| Some(meter.lap()? + busy)).collect()
    }

    /// What the devices did all in all. Times are for who took them to say.
    ///
    /// # Errors
    /// For a cache that cannot be.
    pub fn report(&mut self) -> anyhow::Result<Report> {
        self.tally();
        let compute = self.engine.as_ref().map_or_else(Vec::new, Engine::compute_bytes);
        let depth = self.depth;
        self.retire();
        let (cache, hyper) = (&self.model.cache_options, &self.model.hyper);
        let block = (cache.keys(hyper)?.extent() + cache.values(hyper)?.extent()) as u64;
        let device = |(number, meter): (usize, &Arc<Metered>)| {
            let layers = self.placement.blocks.iter().filter(|&&device| device == number).count();
            report::Device {
                name: meter.info().name.clone(),
                layers,
                weights: self.loaded[number],
                cache_bytes: layers as u64 * block,
                compute_bytes: compute.get(number).copied().unwrap_or(0),
                copied_bytes: self.copied[number],
                ..report::Device::default()
            }
        };
        let [prompt_graph, decode_graph] = self.laid;
        Ok(Report {
            model: format!("{} {}", hyper.arch, self.args.model.display()),
            ubatch: self.args.ubatch as usize,
            depth,
            prompt_graph,
            decode_graph,
            devices: self.meters.iter().enumerate().map(device).collect(),
            links: self.links.clone(),
            losses: self.losses,
            ..Report::default()
        })
    }
}
