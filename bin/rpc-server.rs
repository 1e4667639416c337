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
#[cfg(unix)]
mod hangup;
#[cfg(unix)]
mod heartbeat;
mod help;
mod http_args;
mod keys;
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
use log::LevelFilter;
use log_format::LogFormat;
use sandbox::SandboxArgs;
use serve::Role;
use values::{at_least_a_second, message_size, port, seconds, seconds_or_none};

/// Version of the crate, with the revision of its sources if it is known.
const VERSION: &str = fanout::VERSION;

/// Serves this machine's devices to llama.cpp and fanout clients over ggml's RPC protocol.
#[derive(Debug, Parser)]
#[command(name = "rpc-server", version = VERSION, after_help = AFTER_HELP, max_term_width = 100)]
#[command(args_conflicts_with_subcommands = true)]
struct Args {
    #[command(subcommand)]
    command: Option<Command>,

    /// Address or host name to listen on: IPv4, IPv6, or a name [default: 127.0.0.1].
    #[arg(short = 'H', long)]
    host: Option<String>,

    /// Port to listen on; 0 for any free port [default: 50052].
    #[arg(short, long, value_parser = port)]
    port: Option<u16>,

    /// Address to listen on, and the version of the protocol for its clients; may be given several times. Without HOST,
    /// that of --host; without VERSION, those of --protocol. Replaces the default address; --host or --port add theirs
    /// before it. `plain` beside the version (50053=plain,7) serves clients without TLS there, also if there are keys: for
    /// llama.cpp's clients on this machine; those on others use `rpc-server connect`. `allow:ADDRESS`
    /// (50053=plain,7,allow:10.0.0.0/24), once or several times, names the clients that may connect there, instead of those of
    /// --allow.
    #[arg(long, value_name = "[HOST:]PORT[=VERSION]")]
    listen: Vec<ListenAddress>,

    /// Write the addresses of this server into a file in this folder while it serves: runtimes that share the folder find
    /// servers of `--port 0` there (generate --rpc file:DIR).
    #[arg(long, value_name = "DIR")]
    announce: Option<PathBuf>,

    /// Versions to serve on addresses without a version: 8, 7, 5.1, 5.0, 4, 3, gen0, or an exact 4.0.x, 3.6.1, 3.0.0. Clients
    /// of 3 and gen0 (2024) show themselves. From 4 on they do not tell theirs and abort on another, after which their
    /// address gets the next version of the list, and keeps for a day the one that works.
    #[arg(long, value_name = "LIST", default_value = "8,7,3,gen0", value_delimiter = ',')]
    protocol: Vec<ServedVersion>,

    /// File with this server's secret key, which `rpc-server keygen` writes: clients connect over TLS, and must prove a key of
    /// --allow-keys. With --cert: the key of that certificate.
    #[arg(long, value_name = "FILE")]
    key: Option<PathBuf>,

    /// File with this server's certificate, instead of a raw key: PEM, with those between it and its CA behind it. Clients must
    /// prove certificates of the CA, whose first DNS name is their name in the log and as a tenant. --key has its key (PEM).
    #[arg(long, value_name = "FILE", requires_all = ["key", "ca"])]
    cert: Option<PathBuf>,

    /// File with the certificates of that CA (PEM).
    #[arg(long, value_name = "FILE", requires = "cert")]
    ca: Option<PathBuf>,

    /// List of the clients that may connect: a line for each, with its public key, a name, and `revoked` if it may not any
    /// more. Limits may follow: memory=SIZE and connections=N of all its sessions, devices=LIST (those that it sees, such as
    /// 0,2), share=N (weight in the turns on a device, 1 to 1000; without it 100). SIGHUP rereads the list; sessions get the
    /// new limits, and those of keys that it no longer allows, or to which it gives other devices, end. With --cert:
    /// `cert:` and the DNS name of a client instead of a key; without the list, all certificates of the CA may connect.
    #[arg(long, value_name = "FILE", requires = "key")]
    allow_keys: Option<PathBuf>,

    /// Clients that may connect to addresses without TLS, by address or network (10.0.0.0/24); may be given several times.
    /// Others are closed before anything is read, except those of this machine at addresses of loopback [default:
    /// none; an address without TLS beyond loopback then needs --insecure].
    #[arg(long, value_name = "ADDRESS", value_delimiter = ',')]
    allow: Vec<IpNetwork>,

    /// Listen without keys and --allow, also where other machines can connect: anyone who reaches the port can use the
    /// devices, and anyone on the network path can read what is sent.
    #[arg(long)]
    insecure: bool,

    /// Devices to serve, separated by commas: GPUs by number or name (0, CUDA0), the CPU by name; see --list-devices. A
    /// device that is listed twice is served as two devices [default: all GPUs, or the CPU if there is none].
    #[arg(short, long, value_name = "LIST")]
    device: Option<String>,

    /// Threads of each CPU device, and of the CPU that runs the ops that a GPU does not support [default: this machine's
    /// cores, divided among its CPU devices].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Cache large tensors on disk, so that clients need not send them again.
    #[arg(short, long)]
    cache: bool,

    /// Folder of the cache; implies --cache [default: $XDG_CACHE_HOME/fanout or ~/.cache/fanout].
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,

    /// Maximum size of the cache; the least recently used files are evicted.
    #[arg(long, value_name = "SIZE", default_value = "20G", value_parser = parse_nonzero_bytes)]
    cache_size: u64,

    /// Folder of GGUF files, searched recursively. A fanout client sends the digest of a weight, and the server loads the
    /// weight from these files if it is in one of them, so that the client need not send it. Their digests are computed in the
    /// background at the first start, and kept in the folder of --cache-dir. Symbolic links are followed in folders that no
    /// other user can write to.
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,

    /// Memory of the devices: a size for each, separated by commas, or one for all [default: the free memory except for
    /// a sixteenth or --max-host-memory (of a GPU at most 512M), divided among devices on the same hardware].
    #[arg(long, value_name = "SIZES", value_parser = parse_nonzero_bytes, value_delimiter = ',')]
    mem: Vec<u64>,

    /// Maximum device memory of one client, over all devices [default: all memory of the devices].
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes)]
    max_memory: Option<u64>,

    /// Maximum device memory of the clients of one key, or of one address (IPv6: one network of 64 bits) except loopback
    /// [default: all memory of the devices].
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes)]
    max_memory_per_address: Option<u64>,

    /// Maximum host memory that clients may cause outside of devices: messages, prepared graphs, replies, transfers; one
    /// key or address may hold as much as stays free, at loopback one session [default: a sixteenth of the free memory, from 256M to 4G].
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_bytes)]
    max_host_memory: Option<u64>,

    /// Maximum number of sessions at a time: connections whose HELLO is complete.
    #[arg(long, value_name = "N", default_value_t = Config::default().max_connections as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections: u32,

    /// Maximum number of sessions at a time of one key, or from one address (IPv6: one network of 64 bits) except loopback.
    #[arg(long, value_name = "N", default_value_t = Config::default().max_connections_per_address as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_connections_per_address: u32,

    /// Count addresses of loopback (127.0.0.2, …) like others, for a machine with several users or containers: limits per
    /// address hold for them, and the sessions of one share its time.
    #[arg(long)]
    loopback_tenants: bool,

    /// Maximum number of connections whose HELLO is not complete, of which one address may have a quarter; beyond it, the oldest
    /// one is closed.
    #[arg(long, value_name = "N", default_value_t = Config::default().max_handshakes as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_handshakes: u32,

    /// Maximum number of queues of fanout clients, of which one key or address may have a quarter; a queue beyond it fails.
    #[arg(long, value_name = "N", default_value_t = Config::default().max_queues as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_queues: u32,

    /// Maximum number of threads for transfers and tensor groups between servers, of which one key or address may have a quarter.
    #[arg(long, value_name = "N", default_value_t = Config::default().max_transfer_threads as u32, value_parser = clap::value_parser!(u32).range(1..))]
    max_transfer_threads: u32,

    /// Maximum number of nodes in a graph.
    #[arg(long, value_name = "N", default_value_t = Config::default().limits.max_nodes, value_parser = clap::value_parser!(u32).range(1..))]
    max_nodes: u32,

    /// Host memory for the graphs that one client of protocol 8.0 has numbered; beyond it, the least recently used are dropped.
    #[arg(long, value_name = "SIZE", default_value = "64M", value_parser = parse_nonzero_bytes)]
    max_graph_memory: u64,

    /// Maximum size of a message, at least 4K; tensor data does not count.
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = message_size)]
    max_message: u64,

    /// Maximum seconds from the connection of a client to its complete HELLO.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    handshake_timeout: Duration,

    /// Maximum seconds within which 256 KiB of a message, or its end, must arrive. Also the time in which all queues of a tensor
    /// group must join, and a server of it must reply to a heartbeat.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    stall_timeout: Duration,

    /// Maximum seconds between two requests of a client, also while its queues have work; the heartbeat of fanout's clients
    /// counts as requests. Above 10 with tensor groups of servers, whose connections send a heartbeat every 10 s [default: no
    /// limit].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    idle_timeout: Option<Duration>,

    /// Maximum seconds for which one graph may use a CPU device, not counting the turns of other clients; a graph that takes
    /// longer fails. Waits for memory that another queue uses count; the conversion of a weight before its first use is not
    /// ended [default: no limit].
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    max_run: Option<Duration>,

    /// Seconds without any progress after which a GPU counts as hung, at least 1. Its sessions fail, and the process ends with
    /// status 75, because only a new one can use the GPU again.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = at_least_a_second)]
    device_timeout: Duration,

    /// Waits for each kernel launch, to name the kernel at fault (slow).
    #[arg(long)]
    launch_check: bool,

    /// Launches each kernel of a CUDA graph after the one before has ended, also on GPUs that can launch it earlier (compute
    /// capability 9.0 and later). Results are the same; to find out whether this is at fault for a failure.
    #[arg(long)]
    no_programmatic_launch: bool,

    /// Server with which this server may exchange tensors directly, at the request of a client of both: copies, tensor groups,
    /// and the collectives of protocol 8.0. HOST or a network such as 10.0.0.0/24, with :PORT if the other server's is not
    /// 50052, or :* for any port; may be given several times. Collectives may use the port 1000 above it, too. Clients must
    /// name the server as here, or by its IP address. =KEY behind it: copies and tensor groups go over TLS; the other server
    /// must prove this public key, and have that of --key in its --allow-keys. =cert: the same with a certificate of this
    /// server's CA. Without either, copies need an address of the other server without TLS. =plain-collectives: only
    /// collectives, which are never encrypted; a server with keys refuses them without this, except on loopback [default:
    /// none].
    #[arg(long = "peer", value_name = "ADDRESS[=KEY]", value_delimiter = ',')]
    peers: Vec<Peer>,

    /// Port on which a client's collectives let this server listen for a peer [default: 1000 above the port to which the
    /// client has connected, as llama.cpp's clients expect].
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..), requires = "peers")]
    comm_port: Option<u16>,

    /// Grace period in seconds after SIGTERM or SIGINT: the server accepts no more clients, but serves the connected ones
    /// for up to this time. A second signal ends it at once.
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds_or_none, allow_negative_numbers = true)]
    drain: Duration,

    /// Serve in this process. Without this option (on Unix), a supervisor holds the listening sockets and starts a worker
    /// process that serves; if the worker dies, another one takes its place, and clients that connect meanwhile wait.
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

    /// Print the state of another server and exit: with status 0 if it accepts clients, else 1. Devices with memory and load, the
    /// rates of the last minute, and sessions with what they hold and do (their addresses only to clients of the same machine).
    #[arg(long, value_name = "HOST:PORT")]
    status: Option<String>,

    /// With --status: as JSON.
    #[arg(long, requires = "status")]
    json: bool,

    /// Key of the server that --status queries over TLS; --client-key has the key of this client. For a server with a certificate: --cert,
    /// --key and --ca instead of both.
    #[arg(long, value_name = "KEY", requires_all = ["status", "client_key"], conflicts_with = "cert")]
    server_key: Option<PublicKey>,

    /// File with the secret key that --status proves to the server.
    #[arg(long, value_name = "FILE", requires = "server_key")]
    client_key: Option<PathBuf>,

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
    /// Write the pages of man and the completions of bash, zsh and fish.
    Manual {
        /// The folder for the files.
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    let args = Args::parse();
    log_format::start(args.log_level, args.log_format);
    let code = run(args);
    log_writer::flush();
    code
}

fn run(args: Args) -> ExitCode {
    match &args.command {
        Some(Command::Keygen { file, public }) => return keys::keygen(file, *public),
        Some(Command::Connect(args)) => return connect::run(args),
        Some(Command::Doctor(args)) => return doctor::run(args),
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
    usage_of(Args::command(), message)
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
        .with_max_connections(count(args.max_connections))
        .with_max_connections_per_address(count(args.max_connections_per_address))
        .with_loopback_tenants(args.loopback_tenants)
        .with_max_handshakes(count(args.max_handshakes))
        .with_max_memory(args.max_memory)
        .with_max_memory_per_address(args.max_memory_per_address)
        .with_max_host_memory(args.max_host_memory.unwrap_or(Config::default().max_host_memory))
        .with_max_queues(count(args.max_queues))
        .with_max_transfer_threads(count(args.max_transfer_threads))
        .with_max_graph_memory(args.max_graph_memory)
        .with_limits(Config::limits(args.max_nodes, args.max_message))
        .with_handshake_timeout(args.handshake_timeout)
        .with_stall_timeout(args.stall_timeout)
        .with_idle_timeout(args.idle_timeout)
        .with_max_run(args.max_run)
        .with_peers(args.peers.clone())
        .with_comm_port(args.comm_port)
        .with_models(args.models.clone());
    args.http.apply(config, &listen_addresses(args))
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
        assert_eq!(args.cache_size, CacheConfig::DEFAULT_BYTES);
        let devices = fanout::registry::Options::default();
        assert_eq!((args.device_timeout, args.launch_check), (devices.device_timeout, devices.launch_check));
        assert_eq!(!args.no_programmatic_launch, devices.programmatic_launch);
    }
}
