//! The demo: runs a model on one device, on two devices of one server and on two servers, kills a server on the way, and compares
//! tokens and speeds. It needs no other program than `rpc-server`, and makes its model itself.

mod model_file;
mod run;
mod server;

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, ensure};
use clap::Parser;
use generate::console;
use generate::report::Report;

use model_file::ModelFile;
use run::Job;
use server::Server;

/// Runs a model on one device, on two devices of one server, and on two servers, one of which is killed on the way; compares
/// their tokens and speeds.
#[derive(Debug, Parser)]
#[command(name = "demo", version, max_term_width = 100)]
struct Args {
    /// The two devices of each server, as for --device of rpc-server: 0,1 for two GPUs; 0,0 for one GPU as two devices.
    #[arg(short, long, value_name = "LIST", default_value = "CPU,CPU", value_parser = two_devices)]
    device: String,

    /// Use a model of 3 MB instead of 300 MB: a quick test, in which more devices are not faster.
    #[arg(long)]
    tiny: bool,

    /// The program rpc-server [default: the one beside this program].
    #[arg(long, value_name = "FILE")]
    server: Option<PathBuf>,

    /// Folder in which the model is kept for the next time.
    #[arg(long, value_name = "DIR", default_value = "target/demo")]
    folder: PathBuf,
}

/// Each server has two devices, so that it can be compared with two servers.
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

/// Prints a line. The reader may have closed standard output.
fn print(line: &str) -> anyhow::Result<()> {
    writeln!(io::stdout(), "{line}").context("cannot write to standard output")
}

fn run(args: &Args) -> anyhow::Result<()> {
    let program = server_program(args.server.as_deref())?;
    // Half of the cores for a device: two devices then have all of them, and the speeds show what the second half adds.
    let threads = (std::thread::available_parallelism().map_or(1, usize::from) / 2).max(1);
    let start = || Server::start(&program, &args.device, threads);
    let servers = [start()?, start()?];
    let [first, second] = &servers;
    print(&format!("2 servers on this machine, each with the devices {} (threads of a CPU: {threads})", args.device))?;
    let (model, folder) = (if args.tiny { ModelFile::TINY } else { ModelFile::FULL }, args.folder.display());
    // Before the model is made, which takes seconds.
    print(&format!("1 model of {model}, in {folder}\n"))?;
    let path = model.make(&args.folder).with_context(|| format!("the model in {folder}"))?;

    let two_servers = vec![first.device(0), second.device(1)];
    let rows = [
        ("one device", vec![first.device(0)], false),
        ("two devices, one server", vec![first.device(0), first.device(1)], false),
        ("two servers", two_servers.clone(), false),
        ("two servers, one killed", two_servers, true),
    ];
    print(&line(["", "same tokens", "prompt, tok/s", "decode, tok/s", "recovery, s"]))?;
    let mut one: Option<Report> = None;
    let mut differing = Vec::new();
    for (name, devices, kills) in rows {
        let kill = if kills { Some(second.worker()?) } else { None };
        let report = Job { model: path.clone(), devices, kill }.run().with_context(|| format!("{name} failed"))?;
        ensure!(!kills || report.losses.servers > 0, "{name}: the run did not notice that the worker was killed");
        let same = one.as_ref().map(|one| one.tokens == report.tokens);
        print(&row(name, same, &report, one.as_ref()))?;
        if same == Some(false) {
            differing.push(name);
        }
        one.get_or_insert(report);
    }
    ensure!(differing.is_empty(), "other tokens than on one device: {}", differing.join("; "));
    Ok(())
}

/// A line of the table, at most 80 characters.
fn line([name, same, prompt, decode, lost]: [&str; 5]) -> String {
    format!("{name:23} {same:>11} {prompt:>15} {decode:>15} {lost:>11}").trim_end().to_owned()
}

/// The line of a run. The factors compare with the run `one`, on one device.
fn row(name: &str, same: Option<bool>, report: &Report, one: Option<&Report>) -> String {
    let same = same.map_or("", |same| if same { "yes" } else { "NO" });
    let rate = |rate: fn(&Report) -> Option<f64>| {
        let (rate, of_one) = (rate(report).unwrap_or(0.0), one.and_then(rate));
        let factor = of_one.map_or_else(String::new, |one| format!("({:.2}x)", rate / one));
        // As wide with a factor as without one, so that the rates of all lines end in one column.
        format!("{rate:.1} {factor:7}")
    };
    let lost =
        if report.losses.servers > 0 { format!("{:.2}", report.losses.time.as_secs_f64()) } else { String::new() };
    line([name, same, &rate(Report::prompt_rate), &rate(Report::decode_rate), &lost])
}

/// The program of `--server`, or the one beside this program.
fn server_program(named: Option<&Path>) -> anyhow::Result<PathBuf> {
    let program = match named {
        Some(program) => program.to_owned(),
        None => std::env::current_exe().context("the path of this program")?.with_file_name("rpc-server"),
    };
    ensure!(
        program.is_file(),
        "there is no program {}: build it with `cargo build --release --bin rpc-server`, or name it with --server",
        program.display()
    );
    Ok(program)
}
