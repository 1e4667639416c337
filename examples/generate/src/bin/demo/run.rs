//! Generates tokens on a list of devices, with the library of this package.

use std::path::PathBuf;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Parser;
use fanout::weights::ModelFile;
use generate::args::Args;
use generate::fused::split_fused;
use generate::hparams::HParams;
use generate::link_traffic::Phase;
use generate::progress::{Progress, Unit};
use generate::report::Report;
use generate::session::Session;

use crate::server::ServerProcess;

/// Number of tokens to generate.
pub const PREDICT: usize = 64;

/// The number of tokens after which a server is killed.
pub const KILL_AFTER: usize = PREDICT / 4;

/// How long a run may take. Without an optimised build, one takes about a minute.
const RUN_TIMEOUT: Duration = Duration::from_secs(600);

/// A run: the devices and their threads.
pub struct Job {
    /// The name beside the progress bar.
    pub name: &'static str,
    pub model: PathBuf,
    pub prompt: Vec<u32>,
    /// Names of devices, all of which compute each layer together.
    pub devices: Vec<String>,
    /// Threads of each CPU device of this process.
    pub threads: usize,
    /// The server to kill in mid-run.
    pub kill: Option<ServerProcess>,
}

impl Job {
    /// Runs the model in a thread of its own, which is abandoned if it does not end in time.
    pub fn run(self) -> anyhow::Result<Report> {
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            // Fails after the deadline, when nothing receives it.
            let _ = sender.send(self.generate());
        });
        match receiver.recv_timeout(RUN_TIMEOUT) {
            Ok(report) => report,
            Err(RecvTimeoutError::Timeout) => bail!("the run has not ended after {RUN_TIMEOUT:?}"),
            Err(RecvTimeoutError::Disconnected) => bail!("the run panicked (a bug)"),
        }
    }

    fn generate(&self) -> anyhow::Result<Report> {
        let args = self.args()?;
        let file = ModelFile::open(&self.model)?;
        let mut gguf = file.parse_gguf()?;
        let hparams = HParams::read(&gguf.metadata)?;
        split_fused(&mut gguf, &hparams);
        let mut session = Session::new(&args, &file, &gguf, &hparams, self.prompt.len())?;
        let load = session.load()?;
        session.warm_up(&self.prompt)?;
        session.begin_phase(Phase::Prompt);
        let (mut token, mut tokens) = (0, Vec::new());
        let prompt_time = session.timed(|session| {
            token = session.append(&self.prompt)?;
            Ok(())
        })?;
        session.begin_phase(Phase::Decode);
        let (mut decode_time, mut decoded) = (Duration::ZERO, 0);
        let progress = Progress::new(true).start(self.name, Unit::Tokens, PREDICT as u64);
        loop {
            tokens.push(token);
            progress.add(1);
            if tokens.len() == PREDICT {
                break;
            }
            if let Some(server) = self.kill.as_ref().filter(|_| tokens.len() == KILL_AFTER) {
                server.kill_and_restart()?;
            }
            decode_time += session.timed(|session| {
                token = session.append(&[token])?;
                Ok(())
            })?;
            decoded += 1;
        }
        let prompt = self.prompt.clone();
        Ok(Report { prompt, tokens, load, prompt_time, decode_time, decoded, ..session.report()? })
    }

    /// The options of the session, as `generate` takes them.
    fn args(&self) -> anyhow::Result<Args> {
        let (model, devices, predict) = (self.model.as_os_str(), self.devices.join(","), PREDICT.to_string());
        let threads = self.threads.to_string();
        let options = ["--tokens=0", "--temp=0", "--retry", "--split=tensor", "--kv-type=f32", "--predict", &predict];
        let options = options.into_iter().chain(["--threads", &threads, "--device", &*devices]).map(AsRef::as_ref);
        Args::try_parse_from(["generate".as_ref(), model].into_iter().chain(options)).context("options of the run")
    }
}
