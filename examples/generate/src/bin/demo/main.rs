//! The demo: runs a model on one device with all cores, on two devices with half the cores each, and on two servers, one of which is
//! killed on the way; compares tokens and speeds. It needs no other program and no file: its servers are processes of this program, and
//! it makes its model itself.

mod model_file;
mod run;
mod server;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::Parser;
use fanout::weights::ModelFile;
use generate::console::{self, TextWriter};
use generate::report::Report;
use generate::tokenizer::{DecodeStream, Tokenizer};

use model_file::RandomModel;
use run::{Job, KILL_AFTER, PREDICT};
use server::{Serve, ServerProcess};

/// Length of the prompt of a model with random weights, in tokens.
const PROMPT_TOKENS: u32 = 128;

/// The prompt of `--model`, which the model continues.
const PROMPT: &str = "The village lay between the mountains and the sea. In winter the road was closed by snow, and the only way \
    out was by boat. Every morning the baker lit his oven before sunrise, the fishermen mended their nets in the harbour, and the \
    children walked to the small school on the hill. One day in spring, a stranger came down the road with a heavy suitcase, and \
    everybody in the village wanted to know what was in it. The children followed him to the inn, where he";

/// Runs a model on one device, on two devices with half the cores each, and on two servers, one of which is killed on the way; compares
/// their tokens and speeds.
#[derive(Debug, Parser)]
#[command(name = "demo", version, max_term_width = 100, args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    serve: Option<Serve>,

    /// The two devices, one for each server, as for --device of generate: 0,1 for two GPUs; 0,0 for one GPU as two devices.
    #[arg(short, long, value_name = "LIST", default_value = "CPU,CPU", value_parser = two_devices)]
    device: String,

    /// A model of yours (GGUF), whose text is shown, instead of one with random weights.
    #[arg(short, long, value_name = "FILE")]
    model: Option<PathBuf>,

    /// Use a model of 3 MB instead of 300 MB: a quick test, in which more devices are not faster.
    #[arg(long, conflicts_with = "model")]
    tiny: bool,

    /// Folder in which the model with random weights is kept for the next time.
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    folder: PathBuf,
}

fn two_devices(list: &str) -> Result<String, String> {
    let names: Vec<&str> = list.split(',').collect();
    if names.len() == 2 && !names.contains(&"") {
        Ok(list.to_owned())
    } else {
        Err("expected two devices, separated by a comma, such as CPU,CPU or 0,1".to_owned())
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Some(serve) = &args.serve {
        return serve.main();
    }
    // The table says that a server was killed and how long the recovery took; between its lines, messages about that would be noise.
    console::keep_messages();
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // A failed write is ignored: there is no other place to report it.
            let _ = io::stderr().write_all(&console::take_kept_messages());
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Prints a line, off which progress bars are taken. The reader may have closed standard output.
fn print(line: &str) -> anyhow::Result<()> {
    Ok(console::bars().suspend(|| writeln!(TextWriter, "{line}"))?)
}

fn run(args: &Args) -> anyhow::Result<()> {
    // Two devices of half the cores have as many threads as the one device, so that the speeds show what the division costs.
    let half = (std::thread::available_parallelism().map_or(1, usize::from) / 2).max(1);
    let all = (2 * half).min(std::thread::available_parallelism().map_or(1, usize::from));
    let (first, second) = args.device.split_once(',').context("two devices")?;
    let (path, prompt) = model(args)?;
    let servers = [ServerProcess::start(first, half)?, ServerProcess::start(second, half)?];
    let on_servers: Vec<String> = servers.iter().map(ToString::to_string).collect();
    let two = vec![first.to_owned(), second.to_owned()];
    let [_, killed] = servers;
    let is_cpu = args.device == "CPU,CPU";
    let rows = [
        (if is_cpu { "one device, all cores" } else { "one device" }, vec![first.to_owned()], all, None),
        (if is_cpu { "two devices, half each" } else { "two devices" }, two, half, None),
        ("two servers", on_servers.clone(), half, None),
        ("two servers, one killed", on_servers, half, Some(killed)),
    ];
    print(&line(["", "same tokens", "prompt, tok/s", "decode, tok/s", "recovery, s"]))?;
    let mut reports: Vec<Report> = Vec::new();
    for (name, devices, threads, kill) in rows {
        let kills = kill.is_some();
        let job = Job { name, model: path.clone(), prompt: prompt.clone(), devices, threads, kill };
        let report = job.run().with_context(|| format!("{name} failed"))?;
        ensure!(!kills || report.losses.servers > 0, "{name}: the run did not notice that the server was killed");
        print(&row(name, &report, reports.first()))?;
        reports.push(report);
    }
    print(&summary(&reports))?;
    if args.model.is_some() {
        print(&format!("\n{PROMPT}{}", text(&path, &reports)?))?;
    } else {
        let differs = reports.iter().any(|report| report.tokens != reports[0].tokens);
        ensure!(!differs, "other tokens than on one device");
    }
    Ok(())
}

/// The path of the model, and the tokens of the prompt.
fn model(args: &Args) -> anyhow::Result<(PathBuf, Vec<u32>)> {
    if let Some(path) = &args.model {
        print(&format!("model: {}\n", path.display()))?;
        let tokens = with_tokenizer(path, |tokenizer| Ok(tokenizer.encode(PROMPT)?));
        return Ok((path.clone(), tokens.with_context(|| path.display().to_string())?));
    }
    let (model, folder) = (if args.tiny { RandomModel::TINY } else { RandomModel::FULL }, args.folder.display());
    // Before the model is made, which takes seconds.
    print(&format!("model: {model}, in {folder}\n"))?;
    let path = model.make(&args.folder).with_context(|| format!("the model in {folder}"))?;
    // Any tokens will do, because the weights are random.
    Ok((path, (0..PROMPT_TOKENS).map(|i| i * 7919 % model.vocab()).collect()))
}

fn with_tokenizer<T>(path: &Path, read: impl FnOnce(&Tokenizer) -> anyhow::Result<T>) -> anyhow::Result<T> {
    let file = ModelFile::open(path)?;
    read(&Tokenizer::read(&file.parse_gguf()?.metadata)?)
}

/// The text that the model has written on one device, up to its end token.
fn text(path: &Path, reports: &[Report]) -> anyhow::Result<String> {
    with_tokenizer(path, |tokenizer| {
        let mut stream = DecodeStream::new(tokenizer);
        let tokens = reports.first().map_or(&[][..], |report| &report.tokens);
        let mut text: String =
            tokens.iter().take_while(|&&token| !tokenizer.is_end(token)).map(|&token| stream.push(token)).collect();
        text.push_str(stream.finish());
        Ok(text)
    })
}

/// A line of the table, at most 80 characters.
fn line([name, same, prompt, decode, lost]: [&str; 5]) -> String {
    format!("{name:23} {same:>11} {prompt:>15} {decode:>15} {lost:>11}").trim_end().to_owned()
}

/// The line of a run. The factors compare with the run `one`, on one device.
fn row(name: &str, report: &Report, one: Option<&Report>) -> String {
    let same = one.map_or_else(String::new, |one| match common(&one.tokens, &report.tokens) {
        PREDICT => "yes".to_owned(),
        count => format!("first {count}"),
    });
    let rate = |rate: fn(&Report) -> Option<f64>| {
        let (rate, of_one) = (rate(report).unwrap_or(0.0), one.and_then(rate));
        let factor = of_one.map_or_else(String::new, |one| format!("({:.2}x)", rate / one));
        // As wide with a factor as without one, so that the rates of all lines end in one column.
        format!("{rate:.1} {factor:7}")
    };
    let lost =
        if report.losses.servers > 0 { format!("{:.2}", report.losses.time.as_secs_f64()) } else { String::new() };
    line([name, &same, &rate(Report::prompt_rate), &rate(Report::decode_rate), &lost])
}

/// How many tokens are the same, from the first on.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// What the table shows, in words.
fn summary(reports: &[Report]) -> String {
    let [one, devices, servers, killed] = reports else { return String::new() };
    let same = reports.iter().map(|report| common(&one.tokens, &report.tokens)).min().unwrap_or(0);
    let tokens = if same == PREDICT {
        format!(
            "Tokens: the same {PREDICT} on one device, two devices and two servers, also when one server is killed."
        )
    } else {
        format!(
            "Tokens: the first {same} of {PREDICT} are the same. Sums of quantised weights round differently when divided."
        )
    };
    let millis = |report: &Report| report.decode_rate().map_or(0.0, |rate| 1e3 / rate);
    format!(
        "\n{tokens}\nNetwork: a decoded token takes {:.1} ms on two devices of one process and {:.1} ms on two servers.\nRecovery: \
         {:.2} s from the loss of a server to the next token: a new process, its weights, and {} tokens again.",
        millis(devices),
        millis(servers),
        killed.losses.time.as_secs_f64(),
        killed.prompt.len() + KILL_AFTER - 1,
    )
}
