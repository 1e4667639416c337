//! Opens the devices of the command line, and reopens those of lost servers.

use crate::args::Args;
use crate::console;
use crate::servers::{Servers, SystemResolver};
use fanout::device::Device;
use fanout::registry::{Options, Registry, RegistryError};
use fanout::rpc::client::{self, ConnectError, Endpoint};
use fanout::rpc::keys::{Certificate, SecretKey};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a lost server that another one may replace is tried before its name or folder is read again.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Opens devices by name, with the options of the command line.
pub struct DeviceOpener {
    registry: Registry,
    options: Options,
    servers: Servers,
}

impl DeviceOpener {
    /// Reads the keys, and lists the servers.
    ///
    /// # Errors
    /// A file of a key or certificate, or a name or folder of servers, that cannot be read.
    pub fn new(args: &Args) -> anyhow::Result<DeviceOpener> {
        let (key, certificate) = match (&args.cert, &args.key, &args.ca) {
            (Some(cert), Some(key), Some(ca)) => (None, Some(Certificate::read_files(cert, key, ca)?)),
            (_, key, _) => (key.as_deref().map(SecretKey::read_file).transpose()?, None),
        };
        let rpc = client::Options::default()
            .with_silence_timeout(args.rpc_timeout())
            .with_server_keys(args.server_key.clone())
            .with_key(key)
            .with_certificate(certificate);
        let (threads, memory) = (args.threads.map(usize::from), args.mem.clone());
        Ok(DeviceOpener {
            registry: Registry::detect(),
            options: Options::default().with_threads(threads).with_memory(memory).with_precompile(true).with_rpc(rpc),
            servers: Servers::list(&args.rpc, Box::new(SystemResolver))?,
        })
    }

    /// Opens the devices of `--rpc` and `--device`, or the default devices of this machine if neither is given.
    ///
    /// # Errors
    /// A device that cannot be opened.
    pub fn open(&self, args: &Args) -> anyhow::Result<Vec<Arc<dyn Device>>> {
        self.open_within(args, None)
    }

    /// As [`DeviceOpener::open`], and waits for servers that cannot be reached for up to `within`.
    pub(crate) fn open_within(&self, args: &Args, within: Option<Duration>) -> anyhow::Result<Vec<Arc<dyn Device>>> {
        let list = args.devices(self.servers.names())?.unwrap_or_else(|| {
            let (list, notes) = self.registry.default_list();
            notes.iter().for_each(|note| log::info!("{note}"));
            list
        });
        match (self.registry.open(&list, &self.options), within) {
            (Err(error @ (RegistryError::Endpoint(_) | RegistryError::Endpoints { .. })), Some(within)) => {
                console::message(format_args!("{error}; trying for up to {within:?} to reach it"));
                let mut options = self.options.clone();
                options.rpc.retry = within;
                Ok(self.registry.open(&list, &options)?)
            }
            (opened, _) => Ok(opened?),
        }
    }

    /// The identity of the machine of a server, if the server tells it.
    pub(crate) fn machine_id(&self, endpoint: &str) -> Option<String> {
        let status = Endpoint::connect(endpoint, &self.options.rpc).ok()?.status().ok()?;
        Some(status.machine).filter(|id| !id.is_empty())
    }

    /// Reopens the devices `names` of the lost server `lost`, on this server or the one that takes its place. Returns that server,
    /// too.
    pub(super) fn reopen_lost(
        &self,
        lost: &str,
        names: &[String],
        within: Duration,
    ) -> Result<(Vec<Arc<dyn Device>>, String), RegistryError> {
        let until = Instant::now() + within;
        let mut successors = Vec::new().into_iter();
        loop {
            let Some(server) = successors.next() else {
                successors = self.servers.successors(lost).into_iter();
                continue;
            };
            let names: Vec<_> = names.iter().map(|name| name.replacen(lost, &server, 1)).collect();
            let left = until.saturating_duration_since(Instant::now());
            let attempt = if self.servers.can_be_replaced(lost) { left.min(ATTEMPT) } else { left };
            match self.reopen(&names.join(","), attempt) {
                // It may have ended, too, or have other devices.
                Err(_) if server != lost => {}
                Err(RegistryError::Endpoint(ConnectError::GivenUp { .. })) if attempt < left => {}
                opened => return Ok((opened?, server)),
            }
        }
    }

    /// Records that a server has taken the place of a lost one.
    pub(super) fn replace_server(&mut self, lost: &str, server: &str) {
        self.servers.replace(lost, server);
    }

    /// Reopens devices of servers; connection attempts are retried for up to `within`.
    fn reopen(&self, names: &str, within: Duration) -> Result<Vec<Arc<dyn Device>>, RegistryError> {
        let mut options = self.options.clone();
        // `--mem` sizes are matched to the full device list by position, and they do not apply to servers.
        options.memory.clear();
        options.rpc.retry = within;
        options.rpc.connect_timeout = options.rpc.connect_timeout.min(within);
        self.registry.open(names, &options)
    }
}
