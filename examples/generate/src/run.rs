//! The generation loop: encodes the prompt, evaluates it, samples token by token, and writes text and the report.

use crate::args::Args;
use crate::compare::Comparison;
use crate::hparams::HParams;
use crate::link_traffic::Phase;
use crate::report::Report;
use crate::sample::Sampler;
use crate::session::Session;
use crate::tokenizer::{DecodeStream, Tokenizer};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, MappedFile};
use fanout::gguf::Gguf;
use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::Duration;

/// Memory limit in bytes of the reference device of `--compare`: effectively unlimited.
const REFERENCE_MEMORY: u64 = 1 << 40;

/// Runs the program as the command line specifies. Text and JSON reports go to `out`; progress, logs and the plain report go to
/// standard error.
///
/// # Errors
/// Invalid arguments, an unsupported model or tokenizer, a device failure that was not recovered from, or a failed write to
/// `out`.
pub fn run_program(
    args: &Args,
    file: &MappedFile,
    gguf: &Gguf<'_>,
    hparams: &HParams,
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let tokenizer = Tokenizer::read(&gguf.metadata);
    let prompt = match &args.tokens {
        Some(tokens) => tokens.clone(),
        None => {
            let text = args.prompt.as_deref().unwrap_or_default();
            tokenizer.as_ref().map_err(|e| anyhow::anyhow!("{e}"))?.encode(text)?
        }
    };
    let prompt = args.check_prompt(prompt, hparams.vocab)?;
    if let Err(error) = &tokenizer {
        log::warn!("the tokenizer cannot be used, so token ids are printed instead of text: {error}");
    }
    let tokenizer = tokenizer.ok();

    let mut session = Session::new(args, file, gguf, hparams, prompt.len())?;
    if args.compare {
        return compare(&mut session, &prompt, out);
    }
    let report = generate(args, &mut session, tokenizer.as_ref(), prompt, out)?;
    if args.json {
        writeln!(out, "{}", report.json())?;
    } else {
        eprint!("{report}");
    }
    Ok(())
}

/// Evaluates the prompt, then decodes token by token until an end-of-text token or `--predict` tokens.
fn generate(
    args: &Args,
    session: &mut Session<'_>,
    tokenizer: Option<&Tokenizer>,
    prompt: Vec<u32>,
    out: &mut dyn Write,
) -> anyhow::Result<Report> {
    let mut sampler =
        Sampler::new(args.temp, args.top_p.unwrap_or(1.0), args.seed.unwrap_or_else(|| fastrand::u64(..)));
    let mut text = TextOutput { out, stream: tokenizer.map(DecodeStream::new), silent: args.json };
    let load = session.load()?;
    if args.warm_up {
        session.warm_up(&prompt)?;
    }
    session.begin_phase(Phase::Prompt);
    let mut logits = Vec::new();
    let prompt_time = session.timed(|session| {
        logits = session.append(&prompt)?;
        Ok(())
    })?;
    let prompt_laps = session.take_busy_times();
    session.begin_phase(Phase::Decode);
    let (mut tokens, mut decoded, mut decode_time) = (Vec::new(), 0, Duration::ZERO);
    while tokens.len() < args.predict {
        let token = sampler.sample(&logits)?;
        if !args.ignore_eos && tokenizer.is_some_and(|tokenizer| tokenizer.is_end(token)) {
            break;
        }
        tokens.push(token);
        log::debug!("token {}: {token}", tokens.len());
        text.token(token)?;
        if tokens.len() < args.predict {
            decode_time += session.timed(|session| {
                logits = session.append(&[token])?;
                Ok(())
            })?;
            decoded += 1;
        }
    }
    let decode_laps = session.take_busy_times();
    text.finish()?;
    let mut report = Report { prompt, tokens, load, prompt_time, decode_time, decoded, ..session.report()? };
    for (device, laps) in report.devices.iter_mut().zip(prompt_laps.into_iter().zip(decode_laps)) {
        (device.prompt_time, device.decode_time) = laps;
    }
    Ok(report)
}

/// Streams tokens to the output as they are sampled: as text, or as ids if there is no tokenizer.
struct TextOutput<'a> {
    out: &'a mut dyn Write,
    stream: Option<DecodeStream<'a>>,
    silent: bool,
}

impl TextOutput<'_> {
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
        writeln!(self.out, "{}", self.stream.map_or("", DecodeStream::finish))
    }
}

/// Compares the last micro-batch of the prompt with the reference device, node by node.
fn compare(session: &mut Session<'_>, prompt: &[u32], out: &mut dyn Write) -> anyhow::Result<()> {
    let reference: Arc<dyn Device> = CpuDevice::new("reference", threads(), MathMode::Exact, REFERENCE_MEMORY)?;
    let names = session.devices().iter().map(|device| device.info().name.clone()).collect();
    let budget = Arc::clone(session.budget());
    let mut comparison = Comparison::new(out, names);
    let mut printed = Ok(());
    session.engine_ready()?.compare(prompt, &reference, &budget, &mut |seen, here, there| {
        printed = comparison.node(seen, here, there);
        if printed.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })?;
    printed?;
    Ok(comparison.finish()?)
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
