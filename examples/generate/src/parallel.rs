//! Replies to many prompts, several at a time: each reply is a sequence, and sequences share the batches of the engine.
//!
//! Sequences also share a KV cache, so one sequence can make the logits of others invalid: a mask is added to attention scores, and
//! NaN plus any mask is NaN, so a NaN in the keys or values of one sequence reaches every sequence of its group. A prompt therefore
//! fails only by logits that it has alone. A sequence with invalid logits beside others is evaluated again alone, in a zeroed cache.

use crate::args::{Args, ArgsError};
use crate::chat::Prompt;
use crate::console;
use crate::engine::Engine;
use crate::link_traffic::Phase;
use crate::report::Report;
use crate::sample::{SampleError, Sampler};
use crate::session::Session;
use crate::text_file::read_text_file;
use crate::tokenizer::{DecodeStream, Tokenizer};
use anyhow::{Context, anyhow, bail};
use fanout::io_hint::io_hint;
use fanout::sched::batching::{BatchOutput, SequenceId};
use std::collections::{HashMap, VecDeque};
use std::io::Write;
use std::path::Path;

/// The beginning of a line of the file that has token ids instead of text.
const TOKENS: &str = "tokens:";

/// Largest file of prompts in bytes.
const MAX_FILE_BYTES: usize = 64 << 20;

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
    let text = read_text_file(path, MAX_FILE_BYTES, "a file with a prompt on each line");
    let text = text.map_err(|e| named(&format!("{e}{}", io_hint(&e))))?;
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
    /// Whether its tokens were evaluated by an engine that is gone, and are evaluated again: until the next token of the reply.
    is_recomputed: bool,
    /// `None` until the reply is complete, or has failed.
    outcome: Option<Result<(), SampleError>>,
}

/// The replies to a list of prompts; the engine works on some of them at a time.
pub struct Replies<'a> {
    args: &'a Args,
    tokenizer: Option<&'a Tokenizer>,
    jobs: Vec<Job>,
    /// Numbers of jobs in the order in which they may start.
    waiting: VecDeque<usize>,
    /// Numbers of jobs that had invalid logits beside others. The first one runs, or is the next to run, and no other job runs then.
    alone: VecDeque<usize>,
    /// By group and sequence: the number of its job.
    running: HashMap<(usize, SequenceId), usize>,
    /// Number of jobs without an outcome.
    left: usize,
    /// Number of tokens of all replies.
    tokens: usize,
    /// Whether results were invalid since the caches were cleared, so that NaN may be in them.
    is_cache_invalid: bool,
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
            Ok(Job { prompt: prompt.tokens, reply: Vec::new(), limit, is_recomputed: false, outcome: None })
        });
        let jobs = jobs.collect::<Result<Vec<_>, ArgsError>>()?;
        let (waiting, left) = ((0..jobs.len()).collect(), jobs.len());
        let (alone, running) = (VecDeque::new(), HashMap::new());
        Ok(Replies { args, tokenizer, jobs, waiting, alone, running, left, tokens: 0, is_cache_invalid: false })
    }

    /// Evaluates all prompts and decodes all replies; writes each text when it and those before it are complete. Returns the
    /// measurements, and why replies have failed. A pass counts as recovery if its batches or those before it repeat tokens, else as
    /// time of the prompts if they have tokens of one.
    ///
    /// # Errors
    /// A device failure that was not recovered from, or a failed write to `out`.
    pub fn run(mut self, session: &mut Session<'_>, out: &mut dyn Write) -> anyhow::Result<Report> {
        session.take_busy_times();
        let sampler = session.sampler().clone();
        let mut report = Report::default();
        let (mut written, mut last, mut phase) = (0, Phase::Prompt, Phase::Prompt);
        session.begin_phase(phase);
        loop {
            let (before, mut pass) = (self.tokens, Pass::default());
            let time = session.timed(|session| {
                pass = session.with_engine(|engine| self.pass(engine, &sampler))?;
                if pass.results > 0 {
                    session.restore_retry_time();
                }
                // A pass waits for the batches of the pass before, and submits the next ones: its time counts for the phases of both.
                let phases = [last, pass.phase()];
                let next = [Phase::Recovery, Phase::Prompt].into_iter().find(|phase| phases.contains(phase));
                let next = next.unwrap_or(Phase::Decode);
                // Only now and then, because it waits for the batches in flight.
                if next != phase || pass.tokens == 0 {
                    report.add_busy_times(phase, session.take_busy_times());
                    session.begin_phase(next);
                    phase = next;
                }
                if self.is_cache_invalid && self.left > 0 {
                    session.clear_caches()?;
                    self.is_cache_invalid = false;
                }
                Ok(())
            })?;
            match phase {
                Phase::Decode => {
                    report.decode_time += time;
                    report.decoded += self.tokens - before;
                }
                Phase::Recovery => session.add_recovery_time(time),
                Phase::Prompt | Phase::Load => report.prompt_time += time,
            }
            last = pass.phase();
            while self.jobs.get(written).is_some_and(|job| job.outcome.is_some()) {
                self.write(written, out)?;
                written += 1;
            }
            if self.left == 0 || (pass.tokens == 0 && !pass.is_invalid) {
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
            report.errors.push(job.outcome.and_then(Result::err).map(|error| error.to_string()));
        }
        Ok(report)
    }

    /// Puts the jobs that run in front of the queue.
    fn wait_again(&mut self) {
        let mut running: Vec<usize> = self.running.drain().map(|(_, number)| number).collect();
        running.sort_unstable();
        for number in running.into_iter().rev() {
            self.jobs[number].is_recomputed = true;
            if !self.alone.contains(&number) {
                self.waiting.push_front(number);
            }
        }
    }

    /// One turn for each group of sequences: reads the results of its batch, appends the tokens, lets others join, and submits its
    /// next batch. While it waits for one group, the devices work on the batches of the others. After invalid logits, the caches must
    /// be cleared before the next pass, so nothing more is submitted.
    fn pass(&mut self, engine: &mut Engine, sampler: &Sampler) -> anyhow::Result<Pass> {
        if self.is_cache_invalid {
            // A server was lost after invalid results and before the caches were cleared.
            return Ok(Pass { is_invalid: true, ..Pass::default() });
        }
        if !engine.has_sequences() {
            // The engine may be new: sequences of the last one join again, with the tokens that they have.
            self.wait_again();
        }
        let mut pass = Pass::default();
        for group in 0..engine.groups() {
            pass.results += self.read_results(engine, group, sampler)?;
            if self.is_cache_invalid {
                continue;
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
        pass.is_invalid = self.is_cache_invalid;
        pass.recomputes = self.running.values().any(|&number| self.jobs[number].is_recomputed);
        Ok(pass)
    }

    /// Waits for the batch of a group, and appends its tokens to the replies and to the sequences. Returns their number.
    fn read_results(&mut self, engine: &mut Engine, group: usize, sampler: &Sampler) -> anyhow::Result<usize> {
        let results = engine.finish(group)?;
        let count = results.len();
        let mut logits: Option<Vec<Vec<f32>>> = None;
        for (row, (output, sampled)) in results.into_iter().enumerate() {
            let number = self.number(group, output.sequence).context("a result of no sequence (a bug)")?;
            let mut token = Ok(sampled.token);
            if sampled.probability.is_nan() || sampler.penalises() {
                if logits.is_none() {
                    logits = Some(engine.logits(group)?);
                }
                let logits =
                    logits.as_mut().and_then(|rows| rows.get_mut(row)).context("a result without logits (a bug)")?;
                let Job { prompt, reply, .. } = &self.jobs[number];
                sampler.penalise(logits, &[&**prompt, &**reply].concat());
                token = sampler.sample_on_host(logits, sampler.uniform(number as u64, output.position + 1));
            }
            let job = &mut self.jobs[number];
            let outcome = match token {
                Ok(token) => {
                    job.is_recomputed = false;
                    let ends = !self.args.ignore_eos && self.tokenizer.is_some_and(|tokenizer| tokenizer.is_end(token));
                    if !ends {
                        job.reply.push(token);
                        self.tokens += 1;
                        log::debug!("prompt {}, token {}: {token}", number + 1, job.reply.len());
                    }
                    if !ends && job.reply.len() < job.limit {
                        let sequences = engine.sequences(group).context("a group without sequences (a bug)")?;
                        sequences.push(output.sequence, token)?;
                        continue;
                    }
                    Ok(())
                }
                Err(error) => {
                    self.is_cache_invalid = true;
                    if self.alone.front() != Some(&number) {
                        log::info!("prompt {}: {error}; it is evaluated again, alone", number + 1);
                        self.alone.push_back(number);
                        continue;
                    }
                    console::message(format_args!("prompt {}: {error}", number + 1));
                    Err(error)
                }
            };
            job.outcome = Some(outcome);
            self.left -= 1;
            self.running.remove(&(group, output.sequence));
            self.alone.retain(|&other| other != number);
            engine.sequences(group).context("a group without sequences (a bug)")?.leave(output.sequence);
        }
        Ok(count)
    }

    /// The number of the job of a sequence.
    fn number(&self, group: usize, sequence: SequenceId) -> Option<usize> {
        self.running.get(&(group, sequence)).copied()
    }

    /// Starts sequences in a group, up to its part of --parallel, and up to an equal part of the replies that are not complete; only
    /// one in all groups while a job must run alone.
    fn admit(&mut self, engine: &mut Engine, group: usize) -> anyhow::Result<()> {
        let (groups, all) = (engine.groups(), self.args.sequences());
        let share = all / groups + usize::from(group < all % groups);
        let most = self.left.div_ceil(groups).min(share);
        let sequences = engine.sequences(group).context("a group without sequences (a bug)")?;
        while sequences.sequences() < most {
            let next = match self.alone.front() {
                Some(&number) => self.running.is_empty().then_some(number),
                None => self.waiting.pop_front(),
            };
            let Some(number) = next else { break };
            let job = &self.jobs[number];
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
        let Job { reply, outcome, .. } = &self.jobs[number];
        let text = match self.tokenizer {
            Some(tokenizer) => {
                let mut stream = DecodeStream::new(tokenizer);
                let text: String = reply.iter().map(|&token| stream.push(token)).collect();
                text + stream.finish()
            }
            None => reply.iter().map(ToString::to_string).collect::<Vec<_>>().join(" "),
        };
        match outcome {
            Some(Err(error)) => writeln!(out, "--- {} failed: {error}\n{text}", number + 1)?,
            _ => writeln!(out, "--- {}\n{text}", number + 1)?,
        }
        Ok(out.flush()?)
    }
}

/// The result of a pass.
#[derive(Clone, Copy, Debug, Default)]
struct Pass {
    /// Tokens that were submitted.
    tokens: usize,
    /// Whether some of them are of prompts.
    prompt: bool,
    /// Whether sequences in the batches repeat what an earlier engine has evaluated.
    recomputes: bool,
    /// Results that were read.
    results: usize,
    /// Whether some of them had invalid logits.
    is_invalid: bool,
}

impl Pass {
    /// The phase to which its batches belong.
    fn phase(self) -> Phase {
        match self {
            Pass { recomputes: true, .. } | Pass { is_invalid: true, .. } => Phase::Recovery,
            Pass { prompt: true, .. } => Phase::Prompt,
            _ => Phase::Decode,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]
mod tests;
