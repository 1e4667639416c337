//! The process that serves: opens the devices, takes the listening sockets, prints what it offers, and runs the server.

use std::error::Error;
use std::fmt::Write;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;

use fanout::device::{Device, DeviceKind};
use fanout::registry::{Options, Registry, RegistryError};
use fanout::rpc::keys::Certificate;
use fanout::rpc::server::{BindError, BoundSocket, CacheConfig, Config, Ended, ListenerInfo, Server, ServerKeys};
use fanout::rpc::wire::PROTOCOL_VERSION;

use super::announce::Announcement;
use super::lost_device::LostDeviceExit;
use super::sandbox::{self, Access};
use super::signals::{SecondSignal, end_on_signals, reread_on_hangup};
#[cfg(unix)]
use super::worker::SupervisorLink;
use super::{
    Args, VERSION, compute_cache, configuration, fail, listen_addresses, log_writer, open_files, print, usage,
};

/// What to do where the system starts no more threads.
const NO_THREAD_REMEDY: &str =
    "; raise the limits of threads (ulimit -u, TasksMax= of a service) and of memory (ulimit -v)";

/// The parent of this process: the user's shell or service manager, or the supervisor.
pub(crate) enum Role {
    /// The user, or a service manager: this process binds the addresses itself, unless it has got their sockets.
    Alone(Option<Vec<BoundSocket>>),
    /// The supervisor.
    #[cfg(unix)]
    Worker(SupervisorLink),
}

/// Opens the devices and serves them until a signal ends the server.
pub(crate) fn run(mut args: Args, role: Role) -> ExitCode {
    #[cfg(unix)]
    if let Err(e) = super::hangup::prepare(args.allow_keys.is_some()) {
        return fail(&e);
    }
    let registry = Registry::detect();
    let (list, notes) = match &args.device {
        Some(list) => (list.clone(), Vec::new()),
        None => registry.default_list(),
    };
    let host_memory = *args.limits.max_host_memory.get_or_insert_with(|| default_host_memory(&registry));
    let options = Options::default()
        .with_threads(args.threads.map(usize::from))
        .with_memory(args.mem.clone())
        .with_device_timeout(args.limits.device_timeout)
        .with_launch_check(args.launch_check)
        .with_programmatic_launch(!args.no_programmatic_launch)
        .with_precompile(true)
        .with_host_memory(host_memory);
    let config = match configuration_with_files(&args) {
        Ok(config) => config,
        Err(e) => return fail(&e),
    };
    // Before the first thread of this process, since a thread enters the sandbox for itself and those that it starts.
    let mut access =
        Access::of(&config, args.allow_keys.as_deref(), uses_gpu(&registry, &list), args.sandbox.sandbox_mps);
    if matches!(role, Role::Alone(_)) {
        access.allow_writing(args.announce.as_deref());
    }
    let sandbox = match sandbox::enter(args.sandbox.sandbox, &access) {
        Ok(sandbox) => sandbox,
        Err(e) => return fail(&format!("--sandbox: {e}")),
    };
    if let Err(e) = log_writer::start() {
        return fail(&format!("cannot start the thread that writes the log: {e}"));
    }
    #[cfg(unix)]
    if let Role::Worker(link) = &role
        && let Err(e) = link.start_heartbeat()
    {
        return fail(&format!("cannot start the thread of the heartbeat: {e}{NO_THREAD_REMEDY}"));
    }
    if uses_gpu(&registry, &list) {
        compute_cache::warn_if_missing();
    }
    let devices = match registry.open(&list, &options) {
        Ok(devices) => devices,
        Err(e @ RegistryError::UnknownDevice { .. }) => usage(&format!("--device: {e}")),
        Err(
            e @ (RegistryError::MemorySizeCount { .. }
            | RegistryError::MemoryOfServers
            | RegistryError::BeyondMachine { .. }),
        ) => usage(&format!("--mem: {e}")),
        // The argument may be valid: the cause is this machine.
        Err(e @ (RegistryError::NoGpu { .. } | RegistryError::Unusable { .. })) => {
            return fail(&format!("--device: {e}"));
        }
        Err(e) => return fail(&e),
    };
    let notes: Vec<_> = notes.into_iter().chain([sandbox.to_string()]).collect();
    match serve(&args, role, &notes, devices, config) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => fail(&e),
    }
}

/// A sixteenth of the memory that is available to this process now, from 256 MiB to 4 GiB.
fn default_host_memory(registry: &Registry) -> u64 {
    let cpu = registry.entries().iter().find(|entry| entry.kind == DeviceKind::Cpu);
    let free = cpu.and_then(|cpu| cpu.free_memory().ok());
    free.map_or(Config::default().max_host_memory, |free| (free / 16).clamp(256 << 20, 4 << 30))
}

/// Whether a device of the list is a GPU of this machine.
fn uses_gpu(registry: &Registry, list: &str) -> bool {
    let mut named = list.split(',').filter_map(|name| registry.by_name(name.trim()));
    named.any(|entry| entry.kind == DeviceKind::Gpu)
}

/// The configuration that the options give, with keys, and the folders of the cache and of the digests.
fn configuration_with_files(args: &Args) -> Result<Config, Box<dyn Error>> {
    let mut config = configuration(args);
    config.keys = match (&args.key, &args.cert, &args.ca, &args.allow_keys) {
        (Some(key), Some(cert), Some(ca), list) => {
            Some(ServerKeys::with_certificate(Certificate::read_files(cert, key, ca)?, list.as_deref())?)
        }
        (Some(key), _, _, Some(list)) => Some(ServerKeys::read_files(key, list)?),
        _ => None,
    };
    if args.cache || args.cache_dir.is_some() {
        let dir = args.cache_dir.clone().or_else(CacheConfig::default_dir);
        let dir = dir.ok_or("no home directory for the cache: give one with --cache-dir")?;
        config.cache = Some(CacheConfig::new(dir).with_max_bytes(args.limits.cache_size));
    }
    if args.models.is_some() {
        config.digests = args.cache_dir.clone().or_else(CacheConfig::default_dir);
    }
    Ok(config)
}

fn serve(
    args: &Args,
    mut role: Role,
    notes: &[String],
    devices: Vec<Arc<dyn Device>>,
    config: Config,
) -> Result<(), Box<dyn Error>> {
    let few_files = open_files::raise_limit(config.max_connections as u64, 1);
    let (server, is_restart) = bind(args, &mut role, devices.clone(), config.clone())?;
    let second = if matches!(role, Role::Alone(_)) { SecondSignal::Exit } else { SecondSignal::Ignore };
    let (handle, drain) = (server.handle(), args.drain);
    end_on_signals(second, move || if drain.is_zero() { handle.shutdown() } else { handle.drain(drain) })
        .map_err(|e| format!("cannot start the thread that handles signals: {e}{NO_THREAD_REMEDY}"))?;
    let fault_report: Box<dyn Fn(&str) + Send + Sync> = match &role {
        #[cfg(unix)]
        Role::Worker(link) => Box::new(link.fault_report()?),
        Role::Alone(_) => Box::new(|client| log::warn!("a kernel of {client} has made a device unusable")),
    };
    let lost_device = LostDeviceExit::new(server.handle(), fault_report);
    lost_device.watch().map_err(|e| format!("cannot start the thread that ends the process: {e}{NO_THREAD_REMEDY}"))?;
    if let Some(keys) = config.keys.as_ref().filter(|_| args.allow_keys.is_some()) {
        reread_on_hangup(server.handle(), keys.clone())?;
    }
    let notes: Vec<_> = notes.iter().chain(&few_files).collect();
    let banner = banner(args, &server, &notes, &devices, &config)?;
    let (handle, listeners) = (server.handle(), server.listeners());
    let mut reported = Ok(None);
    // Reported only when all threads run: a supervisor ends with a worker that cannot serve, and replaces one that has served.
    let ended = server.run_with(|| {
        reported = report_ready(args, role, &listeners, &banner, is_restart);
        if reported.is_err() {
            handle.shutdown();
        }
    });
    drop(reported?);
    match ended {
        Ended::DeviceLost(error) => lost_device.exit(&error),
        Ended::NoThread(error) => Err(format!("{error}{NO_THREAD_REMEDY}").into()),
        _ => {
            log::info!("server ended");
            Ok(())
        }
    }
}

/// Reports that this process serves, to its supervisor or in the folder of `--announce`, and shows what it offers: on standard
/// output, or in the log if it replaces a worker that has died.
fn report_ready(
    args: &Args,
    role: Role,
    listeners: &[ListenerInfo],
    banner: &str,
    is_restart: bool,
) -> Result<Option<Announcement>, Box<dyn Error>> {
    // Before the banner: a script may kill this process as soon as it has read the addresses.
    let mut announcement = None;
    match role {
        // The supervisor announces its sockets.
        #[cfg(unix)]
        Role::Worker(link) => link.report_ready()?,
        Role::Alone(_) => {
            let addresses: Vec<_> = listeners.iter().filter(|of| !of.versions.is_empty()).map(|of| of.addr).collect();
            announcement = args.announce.as_ref().map(|folder| Announcement::write(folder, &addresses)).transpose()?;
        }
    }
    // The reader of the first worker's standard output may have closed it since.
    let is_printed = !is_restart
        && print(banner)
            .inspect_err(|e| log::warn!("cannot write to standard output: {e}; the log has the lines"))
            .is_ok();
    if !is_printed {
        banner.lines().for_each(|line| log::info!("{line}"));
    }
    Ok(announcement)
}

/// Takes the listening sockets. Returns whether this process replaces a worker that has died.
fn bind(
    args: &Args,
    role: &mut Role,
    devices: Vec<Arc<dyn Device>>,
    config: Config,
) -> Result<(Server, bool), BindError> {
    let addresses = listen_addresses(args);
    match role {
        Role::Alone(sockets) => match sockets.take() {
            Some(sockets) => Ok((Server::bind_sockets(&addresses, || Ok(sockets), devices, config)?, false)),
            None => Ok((Server::bind_all(&addresses, devices, config)?, false)),
        },
        #[cfg(unix)]
        Role::Worker(link) => {
            let (mut is_restart, mut refused) = (false, Vec::new());
            let request = || {
                let start = link.request_sockets(addresses.len())?;
                (is_restart, refused) = (start.is_restart, start.refused);
                Ok(start.sockets)
            };
            let server = Server::bind_sockets(&addresses, request, devices, config)?;
            server.handle().refuse(&refused);
            Ok((server, is_restart))
        }
    }
}

/// The address at which this machine reaches a listener.
fn reachable(addr: SocketAddr) -> SocketAddr {
    let ip = match addr.ip() {
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    SocketAddr::new(ip, addr.port())
}

/// What the server offers, and on which addresses.
fn banner(
    args: &Args,
    server: &Server,
    notes: &[&String],
    devices: &[Arc<dyn Device>],
    config: &Config,
) -> Result<String, Box<dyn Error>> {
    let mut text =
        format!("rpc-server {VERSION}, RPC protocol {}.{}\n", PROTOCOL_VERSION.major, PROTOCOL_VERSION.minor);
    for note in notes {
        writeln!(text, "{note}")?;
    }
    for (number, device) in devices.iter().enumerate() {
        let (info, memory) = (device.info(), device.memory()?);
        let (free, total) = (memory.free >> 20, memory.total >> 20);
        writeln!(text, "device {number}: {} ({}), {free} of {total} MiB free", info.name, info.description)?;
    }
    if let Some(cache) = &config.cache {
        writeln!(text, "cache: {}, up to {} MiB", cache.dir.display(), cache.max_bytes >> 20)?;
    }
    if let Some(dir) = &args.models {
        writeln!(text, "models: {}", dir.display())?;
    }
    let listeners = server.listeners();
    if let Some(keys) = &config.keys {
        match keys.certificate() {
            Some(certificate) => write!(text, "certificate: {}; allowed names: ", certificate.name())?,
            None => {
                let key = keys.public_key().map_or(String::new(), |key| key.to_string());
                write!(text, "key: {key} (for --server-key of clients); allowed keys: ")?;
            }
        }
        writeln!(text, "{}", keys.allowed().map_or("all of the CA".to_owned(), |count| count.to_string()))?;
        if keys.allowed() == Some(0) {
            writeln!(
                text,
                "WARNING: no client can connect, because --allow-keys lists none: add them, and send SIGHUP."
            )?;
        }
    }
    let is_exposed = |listener: &&ListenerInfo| {
        !listener.tls && !listener.versions.is_empty() && !listener.addr.ip().to_canonical().is_loopback()
    };
    let exposed: Vec<_> = listeners.iter().filter(is_exposed).collect();
    for ListenerInfo { addr, .. } in &exposed {
        writeln!(text, "WARNING: {addr} can be reached from other machines, without authentication or encryption.")?;
    }
    if exposed.iter().any(|listener| listener.allowed.is_empty()) {
        let warning =
            "WARNING: anyone who can reach it can use the devices. Never expose it to a network you do not trust.";
        writeln!(text, "{warning}")?;
    }
    for listener in &listeners {
        writeln!(text, "listening on {listener}")?;
    }
    if let Some(listener) = listeners.iter().find(|listener| listener.http) {
        writeln!(text, "status page: http://{}/", reachable(listener.addr))?;
    }
    Ok(text)
}
