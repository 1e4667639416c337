//! From the command line to text: opens the devices, spreads the model over them, and generates.

use crate::args::Args;
use crate::compare::Comparison;
use crate::engine::{self, Engine};
use crate::hyper::Hyper;
use crate::load;
use crate::meter::Metered;
use crate::model::{CacheOptions, PAD};
use crate::placement::Placement;
use crate::progress::{Loaded, Progress};
use crate::report::{self, Report};
use crate::sample::Sampler;
use crate::tokenizer::{Stream, Tokenizer};
use anyhow::Context;
use fanout::cpu::{CpuDevice, Path};
use fanout::device::{Account, Device};
use fanout::gguf::Gguf;
use fanout::registry::{self, Registry};
use fanout::tensor::TensorDesc;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Instant;

/// Memory that the reference of a comparison may take.
const REFERENCE_MEMORY: u64 = 1 << 40;

/// Does what the command line asks for. Text and reports go to `out`, progress to standard error.
///
/// # Errors
/// Whatever is in the way, in words for people.
pub fn run(args: &Args, file: &[u8], gguf: &Gguf<'_>, hyper: &Hyper, out: &mut dyn Write) -> anyhow::Result<()> {
    let tokenizer = Tokenizer::read(&gguf.metadata);
    let prompt = match &args.tokens {
        Some(tokens) => tokens.clone(),
        None => {
            let text = args.prompt.as_deref().unwrap_or_default();
            tokenizer.as_ref().map_err(|e| anyhow::anyhow!("{e}"))?.encode(text)?
        }
    };
    let prompt = args.checked(prompt, hyper.vocab)?;
    if let Err(error) = &tokenizer {
        log::warn!("no text, only token ids: {error}");
    }
    let tokenizer = tokenizer.ok();

    let meters = open(args)?;
    let devices = meters.iter().map(|device| Arc::clone(device) as Arc<dyn Device>).collect();
    let setup = Setup::new(args, gguf, hyper, devices, prompt.len())?;
    let (mut engine, mut report) = setup.load(args, file, gguf)?;
    if args.compare {
        return compare(&mut engine, &setup, &prompt, out);
    }
    generate(args, &mut engine, &meters, tokenizer.as_ref(), prompt, &mut report, out)?;
    finish(&engine, &setup, &mut report);
    if args.json {
        writeln!(out, "{}", report.json())?;
    } else {
        eprint!("{report}");
    }
    Ok(())
}

fn open(args: &Args) -> anyhow::Result<Vec<Arc<Metered>>> {
    let registry = Registry::detect();
    let asked: Vec<&str> = args.rpc.iter().chain(&args.device).map(String::as_str).collect();
    let list = if asked.is_empty() {
        let (list, notes) = registry.default_list();
        notes.iter().for_each(|note| log::info!("{note}"));
        list
    } else {
        asked.join(",")
    };
    let options = registry::Options {
        threads: args.threads.map(usize::from),
        memory: args.mem.clone(),
        ..registry::Options::default()
    };
    Ok(registry.open(&list, &options)?.into_iter().map(Metered::new).collect())
}

/// A model spread over devices.
struct Setup {
    devices: Vec<Arc<dyn Device>>,
    account: Arc<Account>,
    placement: Placement,
    cache: CacheOptions,
    hyper: Hyper,
    ubatch: usize,
    depth: usize,
}

impl Setup {
    fn new(
        args: &Args,
        gguf: &Gguf<'_>,
        hyper: &Hyper,
        devices: Vec<Arc<dyn Device>>,
        prompt: usize,
    ) -> anyhow::Result<Setup> {
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
        Ok(Setup {
            account: Account::new(u64::MAX),
            placement,
            cache,
            hyper: hyper.clone(),
            ubatch: args.ubatch as usize,
            depth: args.depth(devices.len()) as usize,
            devices,
        })
    }

    /// Checks that there is room for everything, then loads.
    fn load(&self, args: &Args, file: &[u8], gguf: &Gguf<'_>) -> anyhow::Result<(Engine, Report)> {
        let model = load::planned(&self.hyper, self.cache, &self.placement)?;
        engine::check(&model, &self.devices, self.ubatch, self.depth)
            .context("nothing was loaded; other devices, another --split, a smaller --ctx or --ubatch may help")?;
        let start = Instant::now();
        let progress = Progress::new(!args.json);
        let source = (file, &*gguf.tensors);
        let (model, loaded) = load::load(model, source, &self.placement, &self.devices, &self.account, &progress)?;
        let engine = Engine::new(model, self.devices.clone(), &self.account, self.ubatch, self.depth)?;
        let [prompt_graph, decode_graph] = engine.laid();
        let block_cache = (self.cache.keys(&self.hyper)?.extent() + self.cache.values(&self.hyper)?.extent()) as u64;
        let device = |(number, weights): (usize, Loaded)| {
            let layers = self.placement.blocks.iter().filter(|&&device| device == number).count();
            let name = self
                .devices
                .get(number)
                .map_or_else(String::new, |device: &Arc<dyn Device>| device.info().name.clone());
            let cache_bytes = layers as u64 * block_cache;
            report::Device { name, layers, weights, cache_bytes, ..report::Device::default() }
        };
        let report = Report {
            model: format!("{} {}", self.hyper.arch, args.model.display()),
            load: start.elapsed(),
            ubatch: self.ubatch,
            depth: self.depth,
            prompt_graph,
            decode_graph,
            devices: loaded.into_iter().enumerate().map(device).collect(),
            ..Report::default()
        };
        Ok((engine, report))
    }
}

/// The prompt, then token by token until the text or the number of tokens ends.
fn generate(
    args: &Args,
    engine: &mut Engine,
    meters: &[Arc<Metered>],
    tokenizer: Option<&Tokenizer>,
    prompt: Vec<u32>,
    report: &mut Report,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let mut sampler =
        Sampler::new(args.temp, args.top_p.unwrap_or(1.0), args.seed.unwrap_or_else(|| fastrand::u64(..)));
    let mut text = Text { out, stream: tokenizer.map(Stream::new), silent: args.json };
    let start = Instant::now();
    let mut logits = engine.append(&prompt)?;
    report.prompt_time = start.elapsed();
    report.devices.iter_mut().zip(meters).for_each(|(device, meter)| device.prompt_time = meter.lap());
    report.prompt = prompt;
    let start = Instant::now();
    while report.tokens.len() < args.predict {
        let token = sampler.sample(&logits)?;
        if !args.ignore_eos && tokenizer.is_some_and(|tokenizer| tokenizer.is_end(token)) {
            break;
        }
        report.tokens.push(token);
        text.token(token)?;
        if report.tokens.len() < args.predict {
            logits = engine.append(&[token])?;
            report.decoded += 1;
        }
    }
    report.decode_time = start.elapsed();
    report.devices.iter_mut().zip(meters).for_each(|(device, meter)| device.decode_time = meter.lap());
    text.finish()?;
    Ok(())
}

/// Tokens as they come: as text, or as ids where there is no tokenizer.
struct Text<'a> {
    out: &'a mut dyn Write,
    stream: Option<Stream<'a>>,
    silent: bool,
}

impl Text<'_> {
    fn token(&mut self, token: u32) -> io::Result<()> {
        if self.silent {
            return Ok(());
        }
        match &mut self.stream {
            Some(stream) => write!(self.out, "{}", stream.push(token))?,
            None => write!(self.out, "{token} ")?,
        }
        self.out.flush()
    }

    fn finish(self) -> io::Result<()> {
        if self.silent {
            return Ok(());
        }
        writeln!(self.out, "{}", self.stream.map_or("", Stream::finish))
    }
}

/// What the devices did all in all.
fn finish(engine: &Engine, setup: &Setup, report: &mut Report) {
    let (counts, compute) = (engine.counts(), engine.compute_bytes());
    for number in 0..setup.devices.len() {
        if let Some(device) = report.devices.get_mut(number) {
            let of = |list: &[u64]| list.get(number).copied().unwrap_or(0);
            device.compute_bytes = of(&compute);
            device.copied_bytes = of(&counts.uploaded) + of(&counts.copied);
        }
    }
}

/// The last micro-batch of the prompt, node by node.
fn compare(engine: &mut Engine, setup: &Setup, prompt: &[u32], out: &mut dyn Write) -> anyhow::Result<()> {
    let reference: Arc<dyn Device> = CpuDevice::new("reference", threads(), Path::Exact, REFERENCE_MEMORY)?;
    let names = setup.devices.iter().map(|device| device.info().name.clone()).collect();
    let mut comparison = Comparison::new(out, names);
    let mut printed = Ok(());
    engine.compare(prompt, &reference, &setup.account, &mut |seen, here, there| {
        printed = comparison.node(seen, here, there);
        if printed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    printed?;
    Ok(comparison.finish()?)
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
