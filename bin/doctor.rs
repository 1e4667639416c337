//! `rpc-server doctor`: checks this machine and servers, and says what is wrong and which command mends it. `machine`, `server`
//! and `ggml` make the findings, `report` prints them.

mod ggml;
mod machine;
mod report;
mod server;

use std::error::Error;
use std::path::PathBuf;
use std::process::ExitCode;
use std::str::FromStr;
use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::{Duration, Instant};

use clap::Args;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, DeviceError, MemoryBudget};
use fanout::rpc::client::{Options, endpoint_with_port};
use fanout::rpc::keys::{Certificate, KeyFileError, PublicKey, SecretKey};
use fanout::rpc::wire::DEFAULT_PORT;
use fanout::self_test::{Case, Verdict, cases, check};

use super::{VERSION, fail, usage_of};
use report::{Finding, Report};

/// Memory of a self-test: its cases run one by one, and each takes a few megabytes.
const TEST_MEMORY: u64 = 64 << 20;

/// Time limit of one case of a self-test. The first one on a GPU waits for the driver to compile kernels.
const CASE_TIMEOUT: Duration = Duration::from_secs(60);

/// How many cases a finding lists by name.
const MAX_NAMES: usize = 8;

#[derive(Debug, Args)]
pub(crate) struct DoctorArgs {
    /// Servers to check besides this machine: `HOST[:PORT]`, with `=KEY` after it for the public key of a server with keys
    /// [default: the server of this machine on port 50052, if one answers].
    #[arg(value_name = "SERVER")]
    servers: Vec<CheckedServer>,

    /// File with the secret key that is proved to servers with `=KEY`. With --cert: the key of that certificate.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// File with the certificate that is proved to servers, instead of a key (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["key", "ca"])]
    cert: Option<PathBuf>,

    /// File with the certificates of its CA (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    ca: Option<PathBuf>,

    /// Run ops also on servers without fanout's extension. llama.cpp's servers abort on ops that their version lacks, and end the
    /// sessions of all their clients with that.
    #[arg(long)]
    self_test: bool,

    /// Check only whether programs with this ggml load fanout's plug-in: the path of their `libggml-base.so`.
    #[arg(long, value_name = "LIBRARY", conflicts_with_all = ["servers", "key", "self_test"])]
    ggml: Option<PathBuf>,

    /// Print the findings as JSON.
    #[arg(long)]
    json: bool,
}

/// A server to check.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct CheckedServer {
    endpoint: String,
    key: Option<PublicKey>,
}

impl FromStr for CheckedServer {
    type Err = String;

    fn from_str(text: &str) -> Result<CheckedServer, String> {
        let (address, key) = match text.split_once('=') {
            Some((address, key)) => (address, Some(key.parse().map_err(|e| format!("{e}"))?)),
            None => (text, None),
        };
        let wrong = || format!("expected a server, such as gpu-1, 10.0.0.5:50052 or [fd00::5]:50052, got {address:?}");
        Ok(CheckedServer { endpoint: endpoint_with_port(address).ok_or_else(wrong)?, key })
    }
}

/// Checks this machine and the servers. Success if nothing is wrong; warnings are not counted.
pub(crate) fn run(args: &DoctorArgs) -> ExitCode {
    if let Some(library) = &args.ggml {
        let mut report = Report::new(args.json);
        ggml::check(&mut report, library);
        return report.finish();
    }
    let credentials = match Credentials::read(args) {
        Ok(credentials) => credentials,
        Err(e) => return fail(&e),
    };
    if let Some(server) = args.servers.iter().find(|server| server.key.is_some() != credentials.key.is_some()) {
        let endpoint = &server.endpoint;
        usage(&match server.key {
            Some(_) if credentials.certificate.is_some() => {
                format!("{endpoint}: with --cert, servers prove certificates: give no key after the address")
            }
            Some(_) => {
                format!("{endpoint} has a key: give this client's with --key FILE (`rpc-server keygen FILE` makes one)")
            }
            None => format!("--key: give the key of {endpoint} after its address, as in {endpoint}=ed25519:…"),
        });
    }
    if args.servers.is_empty() && !credentials.is_empty() {
        usage("--key and --cert are for servers: name one, as in 10.0.0.5=ed25519:…, or without the key with --cert");
    }
    let reference = match Reference::new() {
        Ok(reference) => reference,
        Err(e) => {
            return fail(&format!("cannot prepare the self-test on the CPU, with which devices are compared: {e}"));
        }
    };
    let mut report = Report::new(args.json);
    let local_server = machine::check(&mut report, &reference);
    let default = CheckedServer { endpoint: format!("127.0.0.1:{DEFAULT_PORT}"), key: None };
    let default = (local_server && args.servers.is_empty()).then_some(default);
    for target in args.servers.iter().chain(&default) {
        let target =
            server::Target { server: target, is_named: !args.servers.is_empty(), tests_foreign: args.self_test };
        server::check(&mut report, &target, credentials.options(target.server), &reference);
    }
    report.finish()
}

/// Reports an invalid argument of the doctor and exits with status 2, as clap does.
fn usage(message: &str) -> ! {
    usage_of(DoctorArgs::augment_args(clap::Command::new("rpc-server doctor")), message)
}

/// The key or certificate that this client proves to servers.
struct Credentials {
    key: Option<SecretKey>,
    certificate: Option<Certificate>,
}

impl Credentials {
    fn read(args: &DoctorArgs) -> Result<Credentials, KeyFileError> {
        if let (Some(cert), Some(key), Some(ca)) = (&args.cert, &args.key, &args.ca) {
            return Ok(Credentials { key: None, certificate: Some(Certificate::read_files(cert, key, ca)?) });
        }
        Ok(Credentials { key: args.key.as_deref().map(SecretKey::read_file).transpose()?, certificate: None })
    }

    fn is_empty(&self) -> bool {
        self.key.is_none() && self.certificate.is_none()
    }

    fn options(&self, server: &CheckedServer) -> Options {
        Options::default()
            .with_server_keys(server.key.into_iter().collect())
            .with_key(self.key.clone())
            .with_certificate(self.certificate.clone())
    }
}

/// The device with whose results others are compared: this machine's CPU, with exact arithmetic.
pub(crate) struct Reference {
    device: Arc<dyn Device>,
    budget: Arc<MemoryBudget>,
    /// Built once for all devices.
    cases: Vec<Case>,
}

impl Reference {
    fn new() -> Result<Reference, Box<dyn Error>> {
        let threads = available_parallelism().map_or(1, |threads| threads.get().min(8));
        let device = CpuDevice::new("CPU", threads, MathMode::Exact, TEST_MEMORY)?;
        Ok(Reference { device, budget: MemoryBudget::new(TEST_MEMORY), cases: cases()? })
    }

    /// Runs the cases of every op on `device`, one by one until `deadline`, and reports whether the device's results are right.
    fn self_test(&self, name: &str, device: &Arc<dyn Device>, deadline: Instant) -> Finding {
        const CHECK: &str = "self-test";
        let cases = &self.cases;
        let (mut passed, mut differing, mut unsupported) = (0usize, Vec::new(), Vec::new());
        let began = Instant::now();
        for case in cases {
            if Instant::now() >= deadline {
                let message =
                    format!("{name}: stopped after {passed} of {} cases, because it takes too long", cases.len());
                let remedy = "the device or the network is busy: try again later; --status shows what the server does";
                return Finding::problem(CHECK, message, remedy).with("passed", passed as f64);
            }
            let until = deadline.min(Instant::now() + CASE_TIMEOUT);
            match check(case, &**device, &*self.device, &self.budget, until) {
                Ok(Verdict::Same { .. }) => passed += 1,
                Ok(Verdict::Unsupported { .. }) => unsupported.push(case.name()),
                Ok(Verdict::Differs { nmse, bound }) => {
                    differing.push(format!("{} (error {nmse:.1e}, allowed {bound:.1e})", case.name()));
                }
                Ok(Verdict::StrayWrite { offset }) => {
                    differing.push(format!("{} (changed byte {offset}, which is not its own)", case.name()));
                }
                Err(e @ DeviceError::OutOfMemory { .. }) => {
                    let message = format!("{name}: not tested after {passed} cases: {e}");
                    return Finding::warning(CHECK, message, failure_remedy(&e)).with("passed", passed as f64);
                }
                Err(e) => {
                    let mut message = format!("{name}: {} failed after {passed} good cases: {e}", case.name());
                    if !differing.is_empty() {
                        message += &format!("; wrong: {}", names(&differing));
                    }
                    return Finding::problem(CHECK, message, failure_remedy(&e)).with("passed", passed as f64);
                }
            }
        }
        let seconds = began.elapsed().as_secs_f64();
        let not_run = match unsupported.len() {
            0 => String::new(),
            count => format!("; {count} not run by this device: {}", names(&unsupported)),
        };
        let finding = if differing.is_empty() && passed > 0 {
            Finding::ok(
                CHECK,
                format!("{name}: {passed} cases agree with exact arithmetic, in {seconds:.1} s{not_run}"),
            )
        } else if differing.is_empty() {
            Finding::problem(CHECK, format!("{name}: runs no op"), "update the server, or use another device")
        } else {
            let (wrong, all) = (differing.len(), cases.len());
            let message = format!("{name}: {wrong} of {all} cases are wrong: {}{not_run}", names(&differing));
            let remedy = "do not use this device; check its memory and cooling, update its driver, and if the error stays \
                          report it with the output of rpc-server doctor --json";
            Finding::problem(CHECK, message, remedy)
        };
        let counts = [("passed", passed), ("differing", differing.len()), ("unsupported", unsupported.len())];
        let counts = counts.map(|(name, count)| (name, count as f64));
        counts.into_iter().fold(finding, |finding, (name, value)| finding.with(name, value)).with("seconds", seconds)
    }
}

/// The first names of a list.
fn names<S: AsRef<str>>(all: &[S]) -> String {
    let listed: Vec<&str> = all.iter().take(MAX_NAMES).map(AsRef::as_ref).collect();
    let listed = listed.join(", ");
    match all.len().saturating_sub(MAX_NAMES) {
        0 => listed,
        more => format!("{listed} and {more} more"),
    }
}

/// What to do when a device fails.
fn failure_remedy(e: &DeviceError) -> &'static str {
    match e.root() {
        DeviceError::OutOfMemory { .. } => {
            "wait until other clients of the device have ended, or limit theirs: max-memory in the server's --limits file"
        }
        DeviceError::ConnectionLost { .. } => {
            "the server's log has the reason (journalctl -u fanout, if systemd runs it)"
        }
        DeviceError::Deadline(_) => {
            "the device or the network is busy or hangs: rpc-server --status HOST:PORT shows what it does"
        }
        DeviceError::RunTooLong { .. } => "raise max-run in the server's --limits file",
        DeviceError::Exhausted { .. } | DeviceError::CapabilityMissing { .. } => {
            "try again when fewer clients use the server, or raise the limit that the message names"
        }
        DeviceError::Driver { .. } => "update the driver; nvidia-smi and dmesg tell more",
        DeviceError::Lost { .. } => "restart the server; if it happens again, check the GPU with nvidia-smi and dmesg",
        _ => "try again; if the error stays, report it with the output of rpc-server doctor --json",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_a_port_and_may_have_a_key() {
        let key = SecretKey::generate().expect("random bytes").public_key();
        for (text, endpoint, with_key) in [
            ("gpu-1".to_owned(), "gpu-1:50052", false),
            ("10.0.0.5:50060".to_owned(), "10.0.0.5:50060", false),
            (format!("gpu-1={key}"), "gpu-1:50052", true),
            (format!("[fd00::5]:50053={key}"), "[fd00::5]:50053", true),
        ] {
            let want = CheckedServer { endpoint: endpoint.to_owned(), key: with_key.then_some(key) };
            assert_eq!(text.parse(), Ok(want), "{text}");
        }
        for text in ["", "50052", "a:b:c", "gpu-1:70000", "gpu-1=", "gpu-1=ed25519:x", "http://gpu-1"] {
            assert!(text.parse::<CheckedServer>().is_err(), "{text}");
        }
    }

    #[test]
    fn lists_of_names_are_short() {
        assert_eq!(names(&["a", "b"]), "a, b");
        assert_eq!(names(&["x"; 10]), format!("{} and 2 more", ["x"; 8].join(", ")));
    }
}
