//! Replies to many prompts, several at a time: each reply is a sequence, and sequences share the batches of the engine.

use crate::args::{Args, ArgsError};
use crate::chat::Prompt;
use crate::engine::Engine;
use crate::link_traffic::Phase;
use crate::report::Report;
use crate::sample::Sampler;
use crate::session::Session;
use crate::tokenizer::{DecodeStream, Tokenizer};
use anyhow::{Context, anyhow, bail};
use fanout::io_hint::io_hint;
use fanout::sched::batching::{BatchOutput, SequenceId};
use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::time::Duration;

/// What a line of the file begins with that has token ids instead of text.
const TOKENS: &str = "tokens:";

/// Largest file of prompts in bytes.
const MAX_FILE_BYTES: u64 = 64 << 20;

/// Reads the prompts of a file, one for each line that is not empty.
///
/// # Errors
/// A file that cannot be read; text for a model without a tokenizer; a prompt that is not valid for the model.
pub fn read_prompts(
    path: &Path,
    tokenizer: Result<&Tokenizer, anyhow::Error>,
    vocab: usize,
) -> anyhow::Result<Vec<Prompt>> {
    let named = |e: &dyn std::fmt::Display| anyhow!("--prompts {}: {e}", path.display());
    let read = || {
        let mut text = String::new();
        // Not by the length of the file, which a pipe does not have.
        File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
        let fits = text.len() as u64 <= MAX_FILE_BYTES;
        if fits { Ok(text) } else { Err(std::io::Error::other(format!("it has more than {MAX_FILE_BYTES} bytes"))) }
    };
    let text = read().map_err(|e| named(&format!("{e}{}", io_hint(&e))))?;
    let mut prompts = Vec::new();
    for (number, line) in (1..).zip(text.lines()).filter(|(_, line)| !line.is_empty()) {
        let prompt = match line.strip_prefix(TOKENS) {
            Some(ids) => {
                let ids = ids.split(',').map(|id| id.trim().parse::<u32>());
                let tokens = ids.collect::<Result<_, _>>();
                Prompt {
                    text: None,
                    tokens: tokens
                        .map_err(|_| named(&format!("line {number}: expected token ids such as {TOKENS}1,5,9")))?,
                }
            }
            None => {
                let tokenizer = tokenizer.as_ref().map_err(|e| anyhow!("{e}"))?;
                Prompt { text: Some(line.to_owned()), tokens: tokenizer.encode(line)? }
            }
        };
        if let Some(token) = prompt.tokens.iter().find(|&&token| token as usize >= vocab) {
            bail!(named(&format!("line {number}: the model has no token {token}: its ids are below {vocab}")));
        }
        if prompt.tokens.is_empty() {
            bail!(named(&format!("line {number}: the prompt has no tokens")));
        }
        prompts.push(prompt);
    }
    if prompts.is_empty() { Err(ArgsError::NoPrompts.into()) } else { Ok(prompts) }
}

/// A prompt and its reply.
struct Job {
    prompt: Vec<u32>,
    reply: Vec<u32>,
    /// Most tokens of the reply.
    limit: usize,
    is_done: bool,
}

/// The replies to a list of prompts, of which the engine works on some at a time.
pub struct Replies<'a> {
    args: &'a Args,
    tokenizer: Option<&'a Tokenizer>,
    jobs: Vec<Job>,
    /// Numbers of jobs in the order in which they may start.
    waiting: VecDeque<usize>,
    /// By group and sequence: the number of its job.
    running: HashMap<(usize, SequenceId), usize>,
    /// Number of jobs that are not done.
    left: usize,
    /// Number of tokens of all replies.
    tokens: usize,
}

impl<'a> Replies<'a> {
    /// Replies to `prompts`; nothing is evaluated yet.
    ///
    /// # Errors
    /// A prompt that is longer than the context.
    pub fn new(
        args: &'a Args,
        tokenizer: Option<&'a Tokenizer>,
        prompts: Vec<Prompt>,
        context: usize,
    ) -> anyhow::Result<Replies<'a>> {
        let jobs = prompts.into_iter().map(|prompt| {
            let limit = args.predict(prompt.tokens.len(), context)?;
            if limit == 0 {
                return Err(ArgsError::NoReplies);
            }
            Ok(Job { prompt: prompt.tokens, reply: Vec::new(), limit, is_done: false })
        });
        let jobs = jobs.collect::<Result<Vec<_>, ArgsError>>()?;
        let (waiting, left) = ((0..jobs.len()).collect(), jobs.len());
        Ok(Replies { args, tokenizer, jobs, waiting, running: HashMap::new(), left, tokens: 0 })
    }

    /// Evaluates all prompts and decodes all replies; writes each text when it and those before it are complete. Returns the
    /// measurements. A pass counts as time of the prompts if a batch of it has tokens of one.
    ///
    /// # Errors
    /// A device failure that was not recovered from, invalid logits, or a failed write to `out`.
    pub fn run(mut self, session: &mut Session<'_>, out: &mut dyn Write) -> anyhow::Result<Report> {
        let busy = session.take_busy_times().iter().map(|_| [Some(Duration::ZERO); 2]).collect();
        let mut report = Report { busy, ..Report::default() };
        let (mut written, mut was_prompt, mut phase) = (0, true, Phase::Prompt);
        session.begin_phase(phase);
        loop {
            let (before, mut pass) = (self.tokens, Pass::default());
            let time = session.timed(|session| {
                let sampler = session.sampler().clone();
                pass = session.with_engine(|engine, is_new| self.pass(engine, is_new, &sampler))?;
                if pass.results > 0 {
                    session.restore_retry_time();
                }
                let next = if pass.prompt || was_prompt { Phase::Prompt } else { Phase::Decode };
                // Only now and then, because it waits for the batches in flight.
                if next != phase || pass.tokens == 0 {
                    add_busy_times(&mut report.busy, phase, session);
                    session.begin_phase(next);
                    phase = next;
                }
                Ok(())
            })?;
            match phase {
                Phase::Decode => {
                    report.decode_time += time;
                    report.decoded += self.tokens - before;
                }
                _ => report.prompt_time += time,
            }
            was_prompt = pass.prompt;
            while self.jobs.get(written).is_some_and(|job| job.is_done) {
                self.write(written, out)?;
                written += 1;
            }
            if pass.tokens == 0 {
                break;
            }
        }
        if written < self.jobs.len() {
            bail!("{} replies are missing (a bug)", self.jobs.len() - written);
        }
        for job in self.jobs {
            report.prompt.extend(&job.prompt);
            report.tokens.extend(&job.reply);
            report.replies.push(job.reply);
        }
        Ok(report)
    }

    /// Puts the jobs that run in front of the queue.
    fn wait_again(&mut self) {
        let mut running: Vec<usize> = self.running.drain().map(|(_, number)| number).collect();
        running.sort_unstable();
        running.into_iter().rev().for_each(|number| self.waiting.push_front(number));
    }

    /// One turn for each group of sequences: reads the results of its batch, appends the tokens, lets others join, and submits its
    /// next batch. While it waits for one group, the devices work on the batches of the others.
    fn pass(&mut self, engine: &mut Engine, is_new: bool, sampler: &Sampler) -> anyhow::Result<Pass> {
        if is_new {
            // Nothing is in its caches: sequences of the last engine join again, with the tokens that they have.
            self.wait_again();
        }
        let mut pass = Pass::default();
        for group in 0..engine.groups() {
            let results = engine.finish(group)?;
            pass.results += results.len();
            for (row, (output, sampled)) in results.into_iter().enumerate() {
                let number = self.number(group, output.sequence).context("a result of no sequence (a bug)")?;
                let mut token = sampled.token;
                if sampled.probability.is_nan() {
                    let logits =
                        engine.logits(group)?.into_iter().nth(row).context("a result without logits (a bug)")?;
                    let uniform = sampler.uniform(number as u64, output.position + 1);
                    token =
                        sampler.sample_on_host(&logits, uniform).with_context(|| format!("prompt {}", number + 1))?;
                }
                let job = &mut self.jobs[number];
                let ends = !self.args.ignore_eos && self.tokenizer.is_some_and(|tokenizer| tokenizer.is_end(token));
                if !ends {
                    job.reply.push(token);
                    self.tokens += 1;
                }
                let sequences = engine.sequences(group).context("a group without sequences (a bug)")?;
                if ends || job.reply.len() >= job.limit {
                    sequences.leave(output.sequence);
                    job.is_done = true;
                    self.running.remove(&(group, output.sequence));
                    self.left -= 1;
                } else {
                    sequences.push(output.sequence, token)?;
                }
            }
            self.admit(engine, group)?;
            let uniform = |output: &BatchOutput| {
                let number = self.number(group, output.sequence).unwrap_or_default();
                sampler.uniform(number as u64, output.position + 1)
            };
            let started = engine.start(group, &uniform)?;
            pass.tokens += started.tokens;
            pass.prompt |= started.prompt;
        }
        Ok(pass)
    }

    /// The number of the job of a sequence.
    fn number(&self, group: usize, sequence: SequenceId) -> Option<usize> {
        self.running.get(&(group, sequence)).copied()
    }

    /// Starts sequences in a group, up to its part of --parallel, and up to an equal part of the replies that are not complete.
    fn admit(&mut self, engine: &mut Engine, group: usize) -> anyhow::Result<()> {
        let (groups, all) = (engine.groups(), self.args.sequences());
        let share = all / groups + usize::from(group < all % groups);
        let most = self.left.div_ceil(groups).min(share);
        let sequences = engine.sequences(group).context("a group without sequences (a bug)")?;
        while sequences.sequences() < most {
            let Some(number) = self.waiting.pop_front() else { break };
            let job = &mut self.jobs[number];
            let tokens = [&*job.prompt, &*job.reply].concat();
            // The last token of the reply is not evaluated.
            let positions = job.prompt.len() + job.limit - 1;
            self.running.insert((group, sequences.join(&tokens, positions)?), number);
        }
        Ok(())
    }

    fn write(&self, number: usize, out: &mut dyn Write) -> anyhow::Result<()> {
        if self.args.json {
            return Ok(());
        }
        let reply = &self.jobs[number].reply;
        let text = match self.tokenizer {
            Some(tokenizer) => {
                let mut stream = DecodeStream::new(tokenizer);
                let text: String = reply.iter().map(|&token| stream.push(token)).collect();
                text + stream.finish()
            }
            None => reply.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
        };
        writeln!(out, "--- {}\n{text}", number + 1)?;
        Ok(out.flush()?)
    }
}

/// Adds the devices' compute times since the last call to those of a phase.
fn add_busy_times(busy: &mut [[Option<Duration>; 2]], phase: Phase, session: &mut Session<'_>) {
    for (sums, time) in busy.iter_mut().zip(session.take_busy_times()) {
        let sum = &mut sums[usize::from(phase == Phase::Decode)];
        *sum = sum.zip(time).map(|(sum, time)| sum + time);
    }
}

/// What a pass has done.
#[derive(Clone, Copy, Debug, Default)]
struct Pass {
    /// Tokens that were submitted.
    tokens: usize,
    /// Whether some of them are of prompts.
    prompt: bool,
    /// Results that were read.
    results: usize,
}
