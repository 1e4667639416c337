//! `rpc-server`: offers this machine's devices to fanout and llama.cpp clients. This file has the options; `supervisor` starts
//! workers, and `serve` opens the devices and serves. The server itself is `fanout::rpc::server`. `connect` is the relay to
//! servers with keys.

mod announce;
#[cfg(unix)]
mod backoff;
mod compute_cache;
mod connect;
#[cfg(unix)]
mod control;
#[cfg(unix)]
mod death;
mod doctor;
#[cfg(unix)]
mod faults;
#[cfg(test)]
mod flags_doc;
#[cfg(unix)]
mod hangup;
#[cfg(unix)]
mod heartbeat;
mod help;
mod http_args;
mod keys;
mod limits;
mod list_devices;
mod log_format;
mod log_writer;
mod lost_device;
mod manual;
mod open_files;
mod sandbox;
mod serve;
mod signals;
#[cfg(unix)]
mod socket_activation;
mod status;
#[cfg(unix)]
mod supervisor;
mod values;
#[cfg(unix)]
mod worker;

use std::fmt::Display;
use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser, Subcommand, error::ErrorKind};
use fanout::io_hint::io_hint;
use fanout::log_level::parse_log_level;
use fanout::registry::{Registry, parse_nonzero_bytes};
use fanout::rpc::keys::PublicKey;
use fanout::rpc::server::{Config, IpNetwork, ListenAddress, Peer, ServedVersion};
use help::AFTER_HELP;
use http_args::HttpArgs;
use limits::LimitArgs;
use log::LevelFilter;
use log_format::LogFormat;
use sandbox::SandboxArgs;
use serve::Role;
use values::{port, seconds, seconds_or_none};

/// Version of the crate, with the revision of its sources if it is known.
const VERSION: &str = fanout::VERSION;

#[derive(Debug, Parser)]
#[command(name = "rpc-server", version = VERSION, after_long_help = AFTER_HELP, max_term_width = 100)]
#[command(about = "Serves this machine's devices to llama.cpp and fanout clients. All options: --help")]
#[command(long_about = "Serves this machine's devices to llama.cpp and fanout clients over ggml's RPC protocol.")]
#[command(override_usage = "rpc-server [OPTIONS] | rpc-server <COMMAND>")]
#[command(args_conflicts_with_subcommands = true, disable_help_subcommand = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// Address or host name to listen on [default: 127.0.0.1].
    #[arg(short = 'H', long)]
    host: Option<String>,

    /// Port to listen on; 0 for any free port [default: 50052].
    #[arg(short, long, value_parser = port)]
    port: Option<u16>,

    /// Address to listen on, and the version of the protocol for its clients; may be given several times. Without HOST, that of
    /// --host; without VERSION, those of --protocol. Replaces the default address; --host or --port add theirs before it.
    /// 50053=plain,7 serves clients without TLS there, also if there are keys. 50053=plain,7,allow:10.0.0.0/24, with allow: once or
    /// several times, names the clients that may connect there, instead of those of --allow.
    #[arg(long, value_name = "[HOST:]PORT[=VERSION]")]
    listen: Vec<ListenAddress>,

    /// Write the addresses of this server into a file in this folder while it serves: runtimes that share the folder find servers
    /// of --port 0 there (generate --rpc file:DIR).
    #[arg(long, value_name = "DIR")]
    announce: Option<PathBuf>,

    /// Versions to serve on addresses without a version: 8, 7, 5.1, 5.0, 4 (4.0.0 to 4.0.3), 3 (3.0.0 to 3.6.1), gen0 (2024), or an
    /// exact 4.0.x, 3.6.1, 3.0.0. Clients of 3 and gen0 show themselves. A client of 4 or later does not tell its version, and
    /// aborts when another one is answered: its address then gets the next version of the list, and keeps for a day the one that
    /// works. Clients of two such versions at one address need a port each (--listen).
    #[arg(long, value_name = "LIST", default_value = "8,7,3,gen0", value_delimiter = ',')]
    protocol: Vec<ServedVersion>,

    /// Secret key of this server, a file that `rpc-server keygen` writes.
    ///
    /// Clients connect over TLS 1.3, and must prove a key of --allow-keys. With --cert: the key of that certificate. With --status:
    /// the secret key of this client.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// File with this server's certificate, instead of a raw key (PEM; intermediate certificates follow it). Clients must prove
    /// certificates of the CA; the first DNS name of a certificate is the client's name in the log and as a tenant.
    #[arg(long, value_name = "FILE", requires_all = ["key", "ca"])]
    cert: Option<PathBuf>,

    /// File with the certificates of that CA (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    ca: Option<PathBuf>,

    /// List of the public keys of clients; SIGHUP rereads it.
    ///
    /// A line is KEY NAME, then `revoked` if the key may not connect any more, and limits: memory=SIZE and connections=N of all
    /// sessions of the key, devices=LIST (those that it sees, such as 0,2), share=N (weight in the turns on a device, 1 to 1000;
    /// 100 without it). After SIGHUP, sessions get new limits, and end if the key has left the list, or has another name or other
    /// devices. With --cert: cert: and the DNS name of a client instead of a key; without the list, all certificates of the CA may
    /// connect.
    #[arg(long, value_name = "FILE", requires = "key")]
    allow_keys: Option<PathBuf>,

    /// Clients that may connect without keys, such as 10.0.0.0/24.
    ///
    /// By address or network; may be given several times. Others are closed before anything is read, except clients of this machine at
    /// addresses of loopback. Without it and without keys, an address that other machines reach needs --insecure.
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    allow: Vec<IpNetwork>,

    /// Listen without keys and --allow, also where other machines can connect: anyone who reaches the port can use the
    /// devices, and anyone on the network path can read what is sent.
    #[arg(long)]
    insecure: bool,

    /// Devices to serve [default: all GPUs, or the CPU if there is none].
    ///
    /// Separated by commas: GPUs by number or name (0, CUDA0), CPU, or all devices of another server by its HOST:PORT; see
    /// --list-devices. A GPU or CPU that is listed twice is served as two devices.
    #[arg(short, long, value_name = "LIST")]
    device: Option<String>,

    /// Threads of each CPU device [default: all cores, divided among them].
    ///
    /// A GPU's nodes that run on the CPU have as many.
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Memory of the devices, such as 20G or 20G,10G.
    ///
    /// A size for each, separated by commas, or one for all; not for devices of other servers. Limits on the same hardware must not be
    /// more than its memory together [default: the free memory except for a sixteenth or the limit max-host-memory (of a GPU at most
    /// 512M), divided among devices on the same hardware].
    #[arg(long, value_name = "SIZES", value_parser = parse_nonzero_bytes, value_delimiter = ',')]
    mem: Vec<u64>,

    /// Waits for each kernel launch, to name the kernel at fault (slow).
    #[arg(long, hide = true)]
    launch_check: bool,

    /// Launches each kernel of a CUDA graph after the one before has ended, also on GPUs that can launch it earlier (compute
    /// capability 9.0 and later). Results are the same; to find out whether this is at fault for a failure.
    #[arg(long, hide = true)]
    no_programmatic_launch: bool,

    /// Cache large tensors on disk, so that clients need not send them again.
    #[arg(short, long)]
    cache: bool,

    /// Folder of the cache; implies --cache [default: $XDG_CACHE_HOME/fanout or ~/.cache/fanout].
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,

    /// Folder of GGUF files, so that fanout clients need not send weights.
    ///
    /// A client sends the digest of a weight, and the server loads the weight from a file in the folder or its subfolders that has
    /// it. Digests are computed in the background at the first start (--status says how far), and kept in the folder of --cache-dir.
    /// Symbolic links are followed in folders that no other user can write to.
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,

    /// Server with which this one may exchange tensors directly.
    ///
    /// At the request of a client of both: copies, tensor groups, and the collectives of protocol 8.0 (-sm tensor). HOST or a network
    /// such as 10.0.0.0/24, with :PORT if the other server's is not 50052, or :* for any port; may be given several times. Clients must
    /// name the server as here, or by its IP address. Collectives may use the port 1000 above it, too. =KEY: copies and tensor
    /// groups go over TLS; the other server must prove this public key, and list the one of this server in its --allow-keys. =cert:
    /// the same with a certificate of this server's CA. =plain-collectives: collectives only, which are never encrypted, so a
    /// server with keys refuses them without this, except on loopback.
    #[arg(long = "peer", value_name = "ADDRESS[=KEY]", value_delimiter = ',')]
    peers: Vec<Peer>,

    /// Port on which a client's collectives let this server listen for a peer [default: 1000 above the port to which the
    /// client has connected, as llama.cpp's clients expect].
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..), requires = "peers")]
    comm_port: Option<u16>,

    /// File with limits of clients, their memory and times: `rpc-server limits` prints one with all defaults (TOML).
    ///
    /// It is read at the start, and again by each worker that replaces one; SIGHUP does not read it.
    #[arg(long = "limits", value_name = "FILE")]
    limits_file: Option<PathBuf>,

    #[command(flatten)]
    limits: LimitArgs,

    /// Grace period in seconds after SIGTERM or SIGINT, or SIGHUP without --allow-keys: the server accepts no more clients, but
    /// serves the connected ones for up to this time. A second signal ends it at once; a worker that does not end is killed 15 s after
    /// the period.
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds_or_none, allow_negative_numbers = true)]
    drain: Duration,

    /// Serve in this process, for debuggers, or where a service manager restarts it. Without this option (on Unix), a supervisor holds
    /// the listening sockets and starts a worker process that serves; a worker that dies or hangs is replaced, and clients that
    /// connect meanwhile wait.
    #[arg(long)]
    no_supervise: bool,

    #[command(flatten)]
    sandbox: SandboxArgs,

    /// Internal: this process is the worker of the supervisor with this process number.
    #[cfg(unix)]
    #[arg(long, value_name = "PID", hide = true, conflicts_with_all = ["no_supervise", "status", "list_devices"])]
    worker: Option<u32>,

    #[command(flatten)]
    http: HttpArgs,

    /// Print the state of another server and exit.
    ///
    /// With status 0 if it accepts clients, else 1. Devices with memory and load, the rates of the last minute, and sessions with
    /// what they hold and do (their addresses only to clients of the same machine).
    #[arg(long, value_name = "HOST[:PORT]")]
    status: Option<String>,

    /// With --status: as JSON.
    #[arg(long, requires = "status")]
    json: bool,

    /// Public key of the server that --status queries over TLS; --key has the one of this client. For a server with a certificate:
    /// --cert, --key and --ca instead.
    #[arg(long, value_name = "KEY", requires_all = ["status", "key"], conflicts_with = "cert")]
    server_key: Option<PublicKey>,

    /// Print the devices of this machine, or the reason why there is no GPU, and exit.
    #[arg(long)]
    list_devices: bool,

    /// With --list-devices: also load all kernels of each GPU, and print the time of each module and whether it was in the
    /// driver's cache (loaded in less than 5 ms). Compiling all takes seconds.
    #[arg(long, requires = "list_devices")]
    verbose: bool,

    /// Log level: off, error, warn, info, debug or trace [default: RUST_LOG, else info].
    #[arg(long, global = true, value_name = "LEVEL", value_parser = parse_log_level)]
    log_level: Option<LevelFilter>,

    /// Format of the log.
    #[arg(long, global = true, value_enum, value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,
}

/// The headings of `--help` and docs/flags.md, with the options below each.
const HEADINGS: [(&str, &[&str]); 8] = [
    ("Addresses", &["host", "port", "listen", "announce", "protocol"]),
    ("Clients", &["key", "allow_keys", "cert", "ca", "allow", "insecure"]),
    ("Devices", &["device", "threads", "mem"]),
    ("Weights on disk", &["models", "cache", "cache_dir"]),
    ("Other servers", &["peers", "comm_port"]),
    ("Limits", &["limits_file"]),
    ("Process and log", &["drain", "no_supervise", "sandbox", "sandbox_mps", "log_level", "log_format"]),
    ("State", &["status", "json", "server_key", "http", "http_host", "list_devices", "verbose"]),
];

/// The options of `-h`, which fits a screen.
const COMMON: [&str; 11] =
    ["host", "port", "key", "allow_keys", "allow", "device", "threads", "mem", "models", "peers", "status"];

/// The command line. Its parser hides the limits, which belong in a file; `-h` has no headings.
fn command() -> clap::Command {
    let limits = limits::ids();
    let is_short = std::env::args_os().any(|arg| arg == "-h");
    Args::command().mut_args(|arg| {
        let id = arg.get_id().to_string();
        let heading = HEADINGS.iter().find(|(_, ids)| ids.contains(&id.as_str())).map(|&(heading, _)| heading);
        let hidden = arg.is_hide_set() || limits.contains(&id);
        arg.help_heading(heading.filter(|_| !is_short)).hide(hidden).hide_short_help(!COMMON.contains(&id.as_str()))
    })
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Write a new secret key to a file that only this user can read, and print its public part.
    Keygen {
        /// The file; it must not exist.
        file: PathBuf,

        /// Print the public part of the key in the file instead.
        #[arg(long)]
        public: bool,
    },
    /// Listen on this machine for clients without TLS, such as llama.cpp's, and connect them to servers that demand keys.
    Connect(connect::ConnectArgs),
    /// Check this machine and servers: drivers, limits, versions, speed of the network, and the results of every op. Prints what is
    /// wrong and what mends it; exit status 1 if something does not work.
    Doctor(doctor::DoctorArgs),
    /// Print the limits of a server with their defaults, as a file for --limits.
    Limits,
    /// Write the pages of man and the completions of bash, zsh and fish.
    Manual {
        /// The folder for the files.
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    let matches = command().get_matches();
    let args = limits::with_file(&matches).unwrap_or_else(|e| usage(&e));
    log_format::start(args.log_level, args.log_format);
    // A worker has the options of its supervisor, which has warned.
    if !(cfg!(unix) && matches.contains_id("worker")) {
        limits::warn_of_options(&matches);
    }
    let code = run(args);
    log_writer::flush();
    code
}

fn run(args: Args) -> ExitCode {
    match &args.command {
        Some(Command::Keygen { file, public }) => return keys::keygen(file, *public),
        Some(Command::Connect(args)) => return connect::run(args),
        Some(Command::Doctor(args)) => return doctor::run(args),
        Some(Command::Limits) => return print_or_fail(&limits::toml(), ExitCode::SUCCESS),
        Some(Command::Manual { folder }) => return manual::run(folder),
        None => {}
    }
    if let Some(endpoint) = &args.status {
        return match keys::status_options(&args) {
            Ok(options) => status::print(endpoint, options, args.json),
            Err(e) => fail(&e),
        };
    }
    if args.list_devices {
        return print_or_fail(&list_devices::text(&Registry::detect(), args.verbose), ExitCode::SUCCESS);
    }
    if let Err(e) = keys::check_options(&args) {
        usage(&e);
    }
    #[cfg(unix)]
    if let Some(pid) = args.worker {
        return match worker::SupervisorLink::open(pid) {
            Ok(link) => serve::run(args, Role::Worker(link)),
            Err(e) => usage(&format!("--worker: {e}")),
        };
    }
    #[cfg(unix)]
    {
        let addresses = listen_addresses(&args);
        match socket_activation::take(&addresses) {
            Ok(sockets) if args.no_supervise => serve::run(args, Role::Alone(sockets)),
            Ok(sockets) => supervisor::run(supervisor::Settings {
                addresses,
                sockets,
                drain: args.drain,
                rereads_keys: args.allow_keys.is_some(),
                announce: args.announce,
            }),
            Err(e) => fail(&e),
        }
    }
    #[cfg(not(unix))]
    serve::run(args, Role::Alone(None))
}

/// Prints all of `text` in one write: a script that waits for the first line may close the pipe after it.
fn print(text: &str) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush())
}

/// Prints what a query has found. The result is `code`, or failure if standard output is closed.
fn print_or_fail(text: &str, code: ExitCode) -> ExitCode {
    match print(text) {
        Ok(()) => code,
        Err(e) => fail(&format!("cannot write to standard output: {e}{}", io_hint(&e))),
    }
}

/// Reports an invalid argument and exits with status 2, as clap does.
fn usage(message: &str) -> ! {
    usage_of(command(), message)
}

/// As [`usage`], with the usage of `command`.
fn usage_of(mut command: clap::Command, message: &str) -> ! {
    log_writer::flush();
    command.error(ErrorKind::InvalidValue, message).exit()
}

fn fail(e: &dyn Display) -> ExitCode {
    log_writer::flush();
    eprintln!("rpc-server: {e}");
    ExitCode::FAILURE
}

/// The addresses to listen on, as the options `--host`, `--port` and `--listen` give them.
fn listen_addresses(args: &Args) -> Vec<ListenAddress> {
    let host = args.host.as_deref().unwrap_or(ListenAddress::DEFAULT_HOST);
    let by_default = args.listen.is_empty() || args.host.is_some() || args.port.is_some();
    let first = by_default.then(|| ListenAddress::new(host, args.port.unwrap_or(ListenAddress::DEFAULT_PORT)));
    let listen = args.listen.iter().cloned().chain(args.http.address()).map(|address| address.or_host(host));
    first.into_iter().chain(listen).collect()
}

/// A limit of the command line as one of the library.
fn count(limit: u32) -> usize {
    usize::try_from(limit).unwrap_or(usize::MAX)
}

/// The configuration that the options give, without the cache, whose folder may be missing.
fn configuration(args: &Args) -> Config {
    let config = Config::default()
        .with_protocol(args.protocol.clone())
        .with_insecure(args.insecure)
        .with_allow(args.allow.clone())
        .with_peers(args.peers.clone())
        .with_comm_port(args.comm_port)
        .with_models(args.models.clone());
    args.http.apply(args.limits.apply(config), &listen_addresses(args))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fanout::rpc::server::CacheConfig;

    /// Sizes and times have readable texts as their defaults, which must mean the numbers of the library.
    #[test]
    fn options_default_to_the_values_of_the_library() {
        let args = Args::parse_from(["rpc-server"]);
        let (given, default) = (configuration(&args), Config::default());
        assert_eq!(format!("{given:?}"), format!("{default:?}"));
        assert_eq!(args.limits.cache_size, CacheConfig::DEFAULT_BYTES);
        let devices = fanout::registry::Options::default();
        assert_eq!((args.limits.device_timeout, args.launch_check), (devices.device_timeout, devices.launch_check));
        assert_eq!(!args.no_programmatic_launch, devices.programmatic_launch);
    }
}
