//! The generation loop: evaluates a prompt, samples token by token, and writes text and the report; in a chat once per message.

use crate::args::{Args, ArgsError};
use crate::chat::{self, ChatTemplate, Conversation, Prompt, TEMPLATE_KEY};
use crate::compare::Comparison;
use crate::console;
use crate::hparams::HParams;
use crate::interrupt::Interrupt;
use crate::link_traffic::Phase;
use crate::parallel::{self, Replies};
use crate::perplexity;
use crate::plan::Plan;
use crate::report::{PredictedRates, Report};
use crate::session::Session;
use crate::stop_texts::StopTexts;
use crate::text_file::read_text_file;
use crate::tokenizer::{DecodeStream, Tokenizer, TokenizerError};
use anyhow::{Context, anyhow, bail};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::Device;
use fanout::gguf::Gguf;
use fanout::io_hint::io_hint;
use fanout::weights::ModelFile;
use std::borrow::Cow;
use std::io::{self, BufRead, IsTerminal, Write};
use std::ops::ControlFlow;
use std::sync::Arc;

/// Memory limit in bytes of the reference device of `--compare`: effectively unlimited.
const REFERENCE_MEMORY: u64 = 1 << 40;

/// Longest text of `--perplexity` in bytes.
const MAX_TEXT_BYTES: usize = 1 << 20;

/// Runs the program as the command line specifies. Text and JSON reports go to `out`; progress, logs and the plain report go to
/// standard error. The messages of an interactive chat come from `input`; `interrupt` ends a reply.
///
/// # Errors
/// Invalid arguments, an unsupported model, tokenizer or chat template, a device failure that was not recovered from, a failed
/// write to `out`, or prompts that failed while others did not.
pub fn run_program(
    args: &Args,
    file: &ModelFile,
    gguf: &Gguf<'_>,
    hparams: &HParams,
    (input, interrupt): (&mut dyn BufRead, &Interrupt),
    out: &mut dyn Write,
) -> anyhow::Result<()> {
    let tokenizer = Tokenizer::read(&gguf.metadata);
    if let Some(path) = &args.prompts {
        let prompts = parallel::read_prompts(path, needed(&tokenizer), hparams.vocab)?;
        let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or_default();
        warn_without_tokenizer(&tokenizer);
        let Some((planned, predicted)) = planned_args(args, file, gguf, hparams, longest, out)? else { return Ok(()) };
        let args: &Args = &planned;
        let mut session = Session::new(args, file, gguf, hparams, longest)?;
        let load = session.load()?;
        let replies = Replies::new(args, tokenizer.as_ref().ok(), prompts, session.context())?;
        let totals = Report { load, predicted, ..replies.run(&mut session, out)? };
        return finish(args, &mut session, totals, out);
    }
    if let Some(path) = &args.perplexity {
        let text = read_text_file(path, MAX_TEXT_BYTES, "a text of up to 1 MiB")
            .map_err(|e| anyhow!("--perplexity {}: {e}{}", path.display(), io_hint(&e)))?;
        let tokens = needed(&tokenizer)?.encode(&text)?;
        args.check_prompt(&tokens, hparams.vocab)?;
        let mut session = Session::new(args, file, gguf, hparams, tokens.len())?;
        session.load()?;
        return perplexity::write(&mut session, &tokens, out);
    }
    let mut conversation = if args.chat { Some(conversation(args, gguf, needed(&tokenizer)?)?) } else { None };
    let prompt = match (&args.tokens, &args.prompt, &mut conversation) {
        (Some(tokens), ..) => Some(Prompt { text: None, tokens: tokens.clone() }),
        (None, Some(message), Some(conversation)) => Some(conversation.add_question(message)?),
        (None, Some(text), None) => {
            Some(Prompt { text: Some(text.clone()), tokens: needed(&tokenizer)?.encode(text)? })
        }
        (None, None, _) if args.json => return Err(ArgsError::JsonChat.into()),
        (None, None, _) => None,
    };
    if let Some(prompt) = &prompt {
        args.check_prompt(&prompt.tokens, hparams.vocab)?;
    }
    warn_without_tokenizer(&tokenizer);
    let prompt_tokens = prompt.as_ref().map_or(0, |prompt| prompt.tokens.len());
    let Some((planned, predicted)) = planned_args(args, file, gguf, hparams, prompt_tokens, out)? else {
        return Ok(());
    };
    let args: &Args = &planned;
    let mut session = Session::new(args, file, gguf, hparams, prompt_tokens)?;
    if let (true, Some(prompt)) = (args.compare, &prompt) {
        return compare(&mut session, &prompt.tokens, out);
    }
    let load = session.load()?;
    let totals = Report { load, predicted, ..Report::default() };
    let mut run = Run { args, session, tokenizer: tokenizer.as_ref().ok(), interrupt, out, totals, interrupted: false };
    let mut reply = String::new();
    if let Some(prompt) = &prompt {
        reply = run.reply(prompt)?;
    }
    // A first message on the command line is the only one, unless more can be typed.
    if let Some(mut conversation) = conversation
        && (prompt.is_none() || !args.json && io::stdin().is_terminal())
    {
        if prompt.is_some() {
            conversation.add_reply(reply);
        }
        run.converse(conversation, input)?;
    }
    let Run { mut session, totals, out, interrupted, .. } = run;
    finish(args, &mut session, totals, out)?;
    if interrupted && !args.chat {
        // A shell must see the signal, so that it ends its loop, and does not take the text for complete.
        signal_hook::low_level::emulate_default_handler(signal_hook::consts::SIGINT)?;
    }
    Ok(())
}

/// The options of the run for prompts of up to `prompt` tokens, and the predicted rates if `--auto` has chosen the placement. `None`
/// with `--plan`, which writes the plan to `out` and runs nothing.
fn planned_args<'a>(
    args: &'a Args,
    file: &ModelFile,
    gguf: &Gguf<'_>,
    hparams: &HParams,
    prompt: usize,
    out: &mut dyn Write,
) -> anyhow::Result<Option<(Cow<'a, Args>, Option<PredictedRates>)>> {
    if !args.plan && !args.auto {
        return Ok(Some((Cow::Borrowed(args), None)));
    }
    let plan = Plan::new(args, file, gguf, hparams, prompt)?;
    if args.plan {
        plan.write(args.json, out)?;
        return Ok(None);
    }
    let rates = plan.rates();
    Ok(Some((Cow::Owned(plan.into_args()), Some(rates))))
}

fn warn_without_tokenizer(tokenizer: &Result<Tokenizer, TokenizerError>) {
    if let Err(error) = tokenizer {
        log::warn!("the tokenizer cannot be used, so token ids are printed instead of text: {error}");
    }
}

/// The tokenizer, where nothing can be done without it.
fn needed(tokenizer: &Result<Tokenizer, TokenizerError>) -> anyhow::Result<&Tokenizer> {
    tokenizer.as_ref().map_err(|e| anyhow!("{e}"))
}

/// The conversation of `--chat`, with the template of the command line or of the model.
fn conversation<'a>(args: &Args, gguf: &Gguf<'_>, tokenizer: &'a Tokenizer) -> anyhow::Result<Conversation<'a>> {
    let text;
    let source = match &args.chat_template {
        Some(path) => {
            text = chat::read_template(path).map_err(|e| anyhow!("--chat-template {}: {e}{}", path.display(), io_hint(&e)))?;
            &text
        }
        None => gguf.metadata.text(TEMPLATE_KEY)?.with_context(|| {
            format!(
                "--chat: the model has no chat template ({TEMPLATE_KEY}), so it is probably not trained for conversations: give \
                 a template with --chat-template FILE, or continue a text with --prompt alone"
            )
        })?,
    };
    let template = ChatTemplate::new(source, tokenizer.special_tokens(), jiff::Zoned::now())?;
    let template = template.with_thinking(!args.no_thinking);
    Ok(Conversation::new(template, tokenizer, args.system.as_deref())?)
}

/// A run of the program: what is needed to reply to prompts, and the measurements so far.
struct Run<'a> {
    args: &'a Args,
    session: Session<'a>,
    tokenizer: Option<&'a Tokenizer>,
    interrupt: &'a Interrupt,
    out: &'a mut dyn Write,
    /// Sums over all prompts.
    totals: Report,
    /// Whether Ctrl-C has ended a reply.
    interrupted: bool,
}

impl Run<'_> {
    /// Replies to each line of the input.
    fn converse(&mut self, mut conversation: Conversation<'_>, input: &mut dyn BufRead) -> anyhow::Result<()> {
        let terminal = io::stdin().is_terminal();
        loop {
            if terminal {
                console::lines("> ");
            }
            let mut line = String::new();
            if input.read_line(&mut line).context("standard input")? == 0 {
                break;
            }
            let message = line.trim_end_matches(['\r', '\n']);
            if !message.is_empty() {
                let prompt = conversation.add_question(message)?;
                conversation.add_reply(self.reply(&prompt)?);
            }
        }
        if terminal {
            console::lines("\n");
        }
        Ok(())
    }

    /// Evaluates the prompt, as far as the KV cache does not have it from earlier turns, then decodes token by token until an end
    /// token or the limit. Writes and returns the text.
    fn reply(&mut self, prompt: &Prompt) -> anyhow::Result<String> {
        let Run { args, session, tokenizer, interrupt, out, totals, interrupted } = self;
        let predict = args.predict(prompt.tokens.len(), session.context())?;
        let stops = StopTexts::new(&args.stop);
        let mut text =
            TextOutput { out: &mut **out, stream: tokenizer.map(DecodeStream::new), stops, silent: args.json };
        let interruptible = interrupt.begin_reply();
        let kept = session.keep_common_prefix(&prompt.tokens);
        let new = &prompt.tokens[kept..];
        if args.warm_up && kept == 0 {
            session.warm_up(new)?;
        }
        session.begin_phase(Phase::Prompt);
        let mut token = 0;
        totals.prompt_time += session.timed(|session| {
            token = session.append(new)?;
            Ok(())
        })?;
        totals.prompt.extend(new);
        // After the progress bar of the prompt, which would clear the line on which the text ends.
        if args.echo {
            text.echo(prompt)?;
        }
        totals.add_busy_times(Phase::Prompt, session.take_busy_times());
        session.begin_phase(Phase::Decode);
        let (mut reply, mut count, mut ended) = (String::new(), 0, false);
        while count < predict {
            ended = !args.ignore_eos && tokenizer.is_some_and(|tokenizer| tokenizer.is_end(token));
            if ended {
                break;
            }
            totals.tokens.push(token);
            count += 1;
            log::debug!("token {}: {token}", totals.tokens.len());
            reply += &text.token(token)?;
            let signal = interruptible.is_interrupted();
            *interrupted |= signal;
            ended = text.stops.is_found() || signal;
            if ended {
                break;
            }
            if count < predict {
                totals.decode_time += session.timed(|session| {
                    token = session.append(&[token])?;
                    Ok(())
                })?;
                totals.decoded += 1;
            }
        }
        reply += &text.finish()?;
        totals.add_busy_times(Phase::Decode, session.take_busy_times());
        if args.chat && args.predict.is_none() && !ended {
            log::warn!(
                "the context of {} tokens is full, so the reply was cut off: give a larger --ctx",
                session.context()
            );
        }
        Ok(reply)
    }
}

/// Writes the report: the totals, and what the session knows.
///
/// # Errors
/// A failed write to `out`; afterwards also replies that have failed.
fn finish(args: &Args, session: &mut Session<'_>, totals: Report, out: &mut dyn Write) -> anyhow::Result<()> {
    let Report { prompt, tokens, replies, errors, load, prompt_time, decode_time, decoded, busy, predicted, .. } =
        totals;
    let report = session.report()?;
    let mut report =
        Report { prompt, tokens, replies, errors, load, prompt_time, decode_time, decoded, predicted, ..report };
    for (device, busy) in report.devices.iter_mut().zip(busy) {
        [device.prompt_time, device.decode_time] = busy;
    }
    if args.json {
        writeln!(out, "{}", report.json())?;
    } else {
        console::lines(&report);
    }
    match report.errors.iter().flatten().count() {
        0 => Ok(()),
        failed => bail!("{failed} of {} prompts failed", report.errors.len()),
    }
}

/// Streams tokens to the output as they are sampled: as text, or as ids if there is no tokenizer.
struct TextOutput<'a> {
    out: &'a mut dyn Write,
    stream: Option<DecodeStream<'a>>,
    stops: StopTexts<'a>,
    silent: bool,
}

impl TextOutput<'_> {
    fn echo(&mut self, prompt: &Prompt) -> io::Result<()> {
        match &prompt.text {
            Some(text) => self.write(text),
            None => prompt.tokens.iter().try_for_each(|&token| {
                let text = self.text(token);
                self.write(&text)
            }),
        }
    }

    /// Writes a token of the reply; returns its text, up to a stop text.
    fn token(&mut self, token: u32) -> io::Result<String> {
        let text = self.text(token);
        let text = self.stops.push(&text);
        self.write(&text)?;
        Ok(text)
    }

    fn text(&mut self, token: u32) -> String {
        self.stream.as_mut().map_or_else(|| format!("{token} "), |stream| stream.push(token))
    }

    fn write(&mut self, text: &str) -> io::Result<()> {
        if self.silent {
            return Ok(());
        }
        self.out.write_all(text.as_bytes())?;
        self.out.flush()
    }

    /// Writes the rest of the reply, and returns it.
    fn finish(mut self) -> io::Result<String> {
        let rest = self.stream.take().map_or("", DecodeStream::finish);
        let mut text = self.stops.push(rest);
        text += &std::mem::replace(&mut self.stops, StopTexts::new(&[])).finish();
        self.write(&format!("{text}\n"))?;
        Ok(text)
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
