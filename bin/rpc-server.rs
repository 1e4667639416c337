//! Serves this machine's devices to fanout and llama.cpp clients.

mod status;

use std::error::Error;
use std::fmt::Display;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{CommandFactory, Parser, error::ErrorKind};
use fanout::device::Device;
use fanout::registry::{Options, Registry, RegistryError, parse_bytes};
use fanout::rpc::server::{CacheConfig, Config, Handle, MIN_MESSAGE, Peer, Server};
use fanout::rpc::wire::PROTOCOL_VERSION;
use log::LevelFilter;

/// The crate's version with the revision it was built from, where that is known.
const VERSION: &str = fanout::VERSION;

/// Examples, below the flags.
const EXAMPLES: &str = "\
Examples:
  rpc-server                          serve all GPUs, or the CPU where there is none, to this machine
                                      only, on port 50052
  rpc-server -d 0,1                   two GPUs, each a device of its own, on one endpoint
  rpc-server -d CUDA1,CPU             a GPU and the processors
  rpc-server -d 0,0 --mem 20G,10G     one GPU as two devices, of 20 and 10 GiB
  CUDA_VISIBLE_DEVICES=2,3 rpc-server only these GPUs, here as CUDA0 and CUDA1
  rpc-server -H 0.0.0.0 -c            serve a trusted network, keep large tensors on disk
  rpc-server -H 10.0.0.5 --peer 10.0.0.6
                                      may copy straight to the server on 10.0.0.6
  rpc-server --models /srv/models     load the tensors of models that are here from this disk
  rpc-server -d CPU,CPU -t 8          two devices of 8 threads each
  rpc-server --mem 32G --max-memory 16G
                                      32 GiB of each device, at most 16 GiB for one client
  rpc-server --drain 600              when told to end, give clients ten minutes to finish
  rpc-server --status 10.0.0.5:50052  how is that server?
  RUST_LOG=fanout=debug rpc-server    say more

  llama-cli -m model.gguf -ngl 99 --rpc 127.0.0.1:50052

The protocol has no authentication and no encryption: whoever reaches the port may use the devices.";

/// Serves this machine's devices to llama.cpp and fanout clients over ggml's RPC protocol.
#[derive(Debug, Parser)]
#[command(name = "rpc-server", version = VERSION, after_help = EXAMPLES, max_term_width = 100)]
struct Args {
    /// Address or host name to listen on: IPv4, IPv6, or a name.
    #[arg(short = 'H', long, default_value = "127.0.0.1")]
    host: String,

    /// Port to listen on; 0 for any free one.
    #[arg(short, long, default_value_t = 50052)]
    port: u16,

    /// Devices to serve, separated by commas: GPUs by number or name (0, CUDA0), the CPU by name; see --list-devices. One
    /// that is named twice is served as two devices [default: all GPUs, or the CPU if there is none].
    #[arg(short, long, value_name = "LIST")]
    device: Option<String>,

    /// Threads of each CPU device, and of the CPU for what GPUs do not run [default: this machine's cores, shared among
    /// its CPU devices].
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Keep large tensors on disk, so that clients need not send them again.
    #[arg(short, long)]
    cache: bool,

    /// Folder of the cache; implies --cache [default: $XDG_CACHE_HOME/fanout or ~/.cache/fanout].
    #[arg(long, value_name = "DIR")]
    cache_dir: Option<PathBuf>,

    /// Largest size of the cache; the files used longest ago make room.
    #[arg(long, value_name = "SIZE", default_value = "20G", value_parser = parse_bytes)]
    cache_size: u64,

    /// Folder of GGUF files, on this machine's disk, that fanout clients' tensors are loaded from where they are the same:
    /// found by their digests, so that clients need not send them. Folders below it are looked into too.
    #[arg(long, value_name = "DIR")]
    models: Option<PathBuf>,

    /// Memory of the devices: a size for each, separated by commas, or one for all [default: what is free, but for a
    /// sixteenth (of a GPU at most 512M), shared by devices that are the same].
    #[arg(long, value_name = "SIZES", value_parser = parse_bytes, value_delimiter = ',')]
    mem: Vec<u64>,

    /// Device memory that one client may hold [default: all of it].
    #[arg(long, value_name = "SIZE", value_parser = parse_bytes)]
    max_memory: Option<u64>,

    /// Connections at a time.
    #[arg(long, value_name = "N", default_value_t = Config::default().max_connections)]
    max_connections: usize,

    /// Nodes of one graph.
    #[arg(long, value_name = "N", default_value_t = Config::default().limits.max_nodes)]
    max_nodes: u32,

    /// Size of one message, at least 4K; tensor data does not count.
    #[arg(long, value_name = "SIZE", default_value = "16M", value_parser = message_size)]
    max_message: u64,

    /// Seconds from a connection to the end of its HELLO.
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    handshake_timeout: Duration,

    /// Seconds that a message may pause half-way; between messages a client may be silent for ever.
    #[arg(long, value_name = "SECONDS", default_value = "60", value_parser = seconds)]
    stall_timeout: Duration,

    /// Another server that this one may send tensors to, when a client of both asks it to: HOST, HOST:PORT, or a network such
    /// as 10.0.0.0/24; may be given several times [default: none].
    #[arg(long = "peer", value_name = "ADDRESS", value_delimiter = ',')]
    peers: Vec<Peer>,

    /// Seconds that clients may go on when the server is told to end (SIGTERM, SIGINT); it takes no more then. A second
    /// signal ends it at once.
    #[arg(long, value_name = "SECONDS", default_value = "0", value_parser = seconds_or_none)]
    drain: Duration,

    /// Ask another server how it is, and exit: with status 0 when it takes clients, else 1.
    #[arg(long, value_name = "HOST:PORT")]
    status: Option<String>,

    /// Print the devices of this machine, and why there is no GPU if there is none, and exit.
    #[arg(long)]
    list_devices: bool,

    /// What to log: off, error, warn, info, debug or trace [default: RUST_LOG, else info].
    #[arg(long, value_name = "LEVEL")]
    log_level: Option<LevelFilter>,
}

fn message_size(text: &str) -> Result<u64, String> {
    let bytes = parse_bytes(text).map_err(|e| e.to_string())?;
    if bytes < MIN_MESSAGE { Err(format!("at least {MIN_MESSAGE} bytes")) } else { Ok(bytes) }
}

fn seconds(text: &str) -> Result<Duration, String> {
    let value = seconds_or_none(text)?;
    if value.is_zero() { Err("more than 0, up to a day".to_owned()) } else { Ok(value) }
}

fn seconds_or_none(text: &str) -> Result<Duration, String> {
    let value: f64 = text.parse().map_err(|_| "expected seconds, for example 10 or 0.5".to_owned())?;
    let day = 24.0 * 3600.0;
    if (0.0..=day).contains(&value) {
        Ok(Duration::from_secs_f64(value))
    } else {
        Err("no less than 0, up to a day".to_owned())
    }
}

fn main() -> ExitCode {
    let args = Args::parse();
    start_log(args.log_level);
    if let Some(endpoint) = &args.status {
        return status::print(endpoint);
    }
    let registry = Registry::detect();
    if args.list_devices {
        list_devices(&registry);
        return ExitCode::SUCCESS;
    }
    let (list, notes) = match &args.device {
        Some(list) => (list.clone(), Vec::new()),
        None => registry.default_list(),
    };
    let options = Options::default().with_threads(args.threads.map(usize::from)).with_memory(args.mem.clone());
    let devices = match registry.open(&list, &options) {
        Ok(devices) => devices,
        Err(e @ RegistryError::Unknown { .. }) => usage(&format!("--device: {e}")),
        Err(e @ RegistryError::Sizes { .. }) => usage(&format!("--mem: {e}")),
        // The argument may be right; the machine lacks something.
        Err(e @ (RegistryError::NoGpu { .. } | RegistryError::Unusable { .. })) => {
            return fail(&format!("--device: {e}"));
        }
        Err(e) => return fail(&e),
    };
    match serve(&args, &notes, devices) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(&e),
    }
}

fn start_log(level: Option<LevelFilter>) {
    let mut log = match level {
        // What is asked for by name beats what the environment happens to hold.
        Some(level) => {
            let mut log = env_logger::Builder::new();
            log.filter_level(level);
            log
        }
        None => env_logger::Builder::from_env(env_logger::Env::default().default_filter_or("info")),
    };
    log.format_target(false).init();
}

fn list_devices(registry: &Registry) {
    for entry in registry.entries() {
        let unusable = entry.unusable.as_ref().map_or(String::new(), |why| format!("; not usable: {why}"));
        println!("{}: {}{unusable}", entry.name, entry.description);
    }
    if let Some(why) = registry.no_gpu() {
        println!("no GPU: {why}");
    }
}

/// Ends with status 2, as for every wrong argument.
fn usage(message: &str) -> ! {
    Args::command().error(ErrorKind::InvalidValue, message).exit()
}

fn fail(e: &dyn Display) -> ExitCode {
    eprintln!("rpc-server: {e}");
    ExitCode::FAILURE
}

fn serve(args: &Args, notes: &[String], devices: Vec<Arc<dyn Device>>) -> Result<(), Box<dyn Error>> {
    let mut config = Config::default()
        .with_max_connections(args.max_connections)
        .with_max_memory(args.max_memory)
        .with_limits(Config::limits(args.max_nodes, args.max_message))
        .with_handshake_timeout(args.handshake_timeout)
        .with_stall_timeout(args.stall_timeout)
        .with_peers(args.peers.clone())
        .with_models(args.models.clone());
    if args.cache || args.cache_dir.is_some() {
        let dir = args.cache_dir.clone().or_else(CacheConfig::default_dir);
        let dir = dir.ok_or("no home directory for the cache: give one with --cache-dir")?;
        config.cache = Some(CacheConfig::new(dir).with_max_bytes(args.cache_size));
    }
    let cache = config.cache.clone();
    let server = Server::bind(&args.host, args.port, devices.clone(), config)?;
    end_on_signals(server.handle(), args.drain)?;

    let addr = server.local_addr();
    println!("rpc-server {VERSION}, RPC protocol {}.{}", PROTOCOL_VERSION.major, PROTOCOL_VERSION.minor);
    for note in notes {
        println!("{note}");
    }
    for (number, device) in devices.iter().enumerate() {
        let (info, memory) = (device.info(), device.memory()?);
        let (free, total) = (memory.free >> 20, memory.total >> 20);
        println!("device {number}: {} ({}), {free} of {total} MiB free", info.name, info.description);
    }
    if let Some(cache) = cache {
        println!("cache: {}, up to {} MiB", cache.dir.display(), cache.max_bytes >> 20);
    }
    if let Some(dir) = &args.models {
        println!("models: {}", dir.display());
    }
    if !addr.ip().is_loopback() {
        println!("WARNING: {addr} can be reached from other machines, without authentication or encryption.");
        println!("WARNING: whoever reaches it may use the devices. Never expose it to a network you do not trust.");
    }
    println!("listening on {addr}");
    server.run();
    log::info!("ended");
    Ok(())
}

/// SIGINT and SIGTERM end the server in good order, once its clients have had so much time to leave; a second one at once.
#[cfg(unix)]
fn end_on_signals(handle: Handle, drain: Duration) -> std::io::Result<()> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    use std::sync::atomic::AtomicBool;

    let asked = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal finds the flag unset, and sets it.
        signal_hook::flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&asked))?;
        signal_hook::flag::register(signal, Arc::clone(&asked))?;
    }
    let mut signals = signal_hook::iterator::Signals::new([SIGINT, SIGTERM])?;
    std::thread::Builder::new().name("signals".to_owned()).spawn(move || match signals.forever().next() {
        Some(_) if drain.is_zero() => handle.shutdown(),
        Some(_) => handle.drain(drain),
        None => {}
    })?;
    Ok(())
}

/// Elsewhere the system ends the process.
#[cfg(not(unix))]
fn end_on_signals(_: Handle, _: Duration) -> std::io::Result<()> {
    Ok(())
}
