//! Opens the devices of the command line, and reopens the devices of lost servers.

use crate::args::Args;
use crate::console;
use crate::servers::{Servers, ServersError, SystemResolver};
use fanout::device::Device;
use fanout::registry::{Options, Registry, RegistryError};
use fanout::rpc::client::{self, ConnectError, Endpoint};
use fanout::rpc::keys::{Certificate, SecretKey};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

/// How long a server that another one may replace is tried before its name or folder is read again.
const ATTEMPT: Duration = Duration::from_secs(1);

/// Pause before names and folders are read again at the start.
const PAUSE: Duration = Duration::from_millis(250);

/// Opens devices by name, with the options of the command line.
pub struct DeviceOpener {
    registry: Registry,
    options: Options,
    servers: Servers,
}

impl DeviceOpener {
    /// Opens the devices of `--rpc` and `--device`, or the default devices of this machine if neither is given. With `--retry`,
    /// waits for servers that are not listed yet or cannot be reached, unless the error is permanent.
    ///
    /// # Errors
    /// A file of a key or certificate that cannot be read, or the last error of the servers and devices.
    pub fn open(args: &Args) -> anyhow::Result<(DeviceOpener, Vec<Arc<dyn Device>>)> {
        let mut opener = DeviceOpener::new(args)?;
        let devices = retry_at_start(args.retry(), |left| opener.open_listed(args, left), thread::sleep)?;
        Ok((opener, devices))
    }

    /// Reads the keys.
    fn new(args: &Args) -> anyhow::Result<DeviceOpener> {
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
            servers: Servers::new(&args.rpc, Box::new(SystemResolver)),
        })
    }

    /// Lists the servers, and opens the devices. Servers are retried for up to `left`, or for [`ATTEMPT`] if a later list may have
    /// others.
    fn open_listed(&mut self, args: &Args, left: Duration) -> anyhow::Result<Vec<Arc<dyn Device>>> {
        self.servers.list()?;
        let list = args.devices(self.servers.names())?.unwrap_or_else(|| {
            let (list, notes) = self.registry.default_list();
            notes.iter().for_each(|note| log::info!("{note}"));
            list
        });
        let mut options = self.options.clone();
        options.rpc.retry = if self.servers.can_change() { left.min(ATTEMPT) } else { left };
        Ok(self.registry.open(&list, &options)?)
    }

    /// The identity of the machine of a server, if the server tells it.
    pub(crate) fn machine_id(&self, endpoint: &str) -> Option<String> {
        let status = Endpoint::connect(endpoint, &self.options.rpc).ok()?.status().ok()?;
        Some(status.machine).filter(|id| !id.is_empty())
    }

    /// Reopens the devices `names`, separated by commas, of the lost server `lost`, on this server or the one that takes its place. Returns that server,
    /// too.
    pub(super) fn reopen_lost(
        &self,
        lost: &str,
        names: &str,
        within: Duration,
    ) -> Result<(Vec<Arc<dyn Device>>, String), RegistryError> {
        let until = Instant::now() + within;
        let mut successors = Vec::new().into_iter();
        loop {
            let Some(server) = successors.next() else {
                successors = self.servers.successors(lost).into_iter();
                continue;
            };
            let left = until.saturating_duration_since(Instant::now());
            let attempt = if self.servers.can_be_replaced(lost) { left.min(ATTEMPT) } else { left };
            match self.reopen(&names.replace(lost, &server), attempt) {
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

/// Repeats `attempt` for up to `within` while its error is transient, and announces that once. `attempt` gets the time that it
/// may spend on retries: none at first, so that the announcement comes early.
fn retry_at_start<T>(
    within: Option<Duration>,
    mut attempt: impl FnMut(Duration) -> anyhow::Result<T>,
    mut sleep: impl FnMut(Duration),
) -> anyhow::Result<T> {
    let mut left = within.unwrap_or_default();
    let mut opened = attempt(Duration::ZERO);
    if let Err(error) = &opened
        && !left.is_zero()
        && is_transient(error)
    {
        console::message(format_args!("{error}; trying for up to {left:?}"));
    }
    while opened.as_ref().is_err_and(is_transient) && !left.is_zero() {
        let start = Instant::now();
        let pause = PAUSE.min(left);
        sleep(pause);
        opened = attempt(left - pause);
        left = left.saturating_sub(start.elapsed().max(pause));
    }
    opened
}

/// Whether the servers may be there later, without any change of configuration.
fn is_transient(error: &anyhow::Error) -> bool {
    let is_listing = error.downcast_ref().is_some_and(ServersError::is_transient);
    is_listing || error.downcast_ref().is_some_and(RegistryError::is_transient)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;
    use crate::servers::ServerSource;
    use anyhow::anyhow;
    use std::io;

    /// An error of an attempt, and whether waiting can help.
    type Case = (fn() -> anyhow::Error, bool);

    fn name() -> String {
        "a:1".to_owned()
    }

    fn full() -> ConnectError {
        ConnectError::Full { endpoint: name() }
    }

    fn wrong_key() -> ConnectError {
        ConnectError::Trust { endpoint: name(), reason: "it has another key".to_owned() }
    }

    fn origin() -> ServerSource {
        ServerSource::Folder("jobs".into())
    }

    fn both(second: ConnectError) -> anyhow::Error {
        RegistryError::Endpoints { servers: 2, errors: vec![full(), second] }.into()
    }

    #[test]
    fn the_start_waits_for_servers_unless_the_error_is_permanent() {
        let cases: [Case; 12] = [
            (|| RegistryError::from(full()).into(), true),
            (|| RegistryError::from(wrong_key()).into(), false),
            (|| both(full()), true),
            (|| both(wrong_key()), false),
            (|| RegistryError::from(ConnectError::Name(name())).into(), false),
            (|| RegistryError::UnknownDevice { name: name(), available: String::new() }.into(), false),
            (|| ServersError::Name { origin: origin(), error: io::ErrorKind::Other.into() }.into(), true),
            (|| ServersError::Empty(origin()).into(), true),
            (|| ServersError::Folder { origin: origin(), error: io::ErrorKind::NotFound.into() }.into(), true),
            (|| ServersError::Folder { origin: origin(), error: io::ErrorKind::PermissionDenied.into() }.into(), false),
            (|| ServersError::NotAServer { origin: origin(), file: name() }.into(), false),
            (|| anyhow!("--split names three devices"), false),
        ];
        for (error, waits) in cases {
            let minute = Some(Duration::from_secs(60));
            for (within, failures) in [(None, 9), (minute, 9), (minute, usize::MAX)] {
                let (mut given, mut slept) = (Vec::new(), Duration::ZERO);
                let attempt = |left| {
                    given.push(left);
                    if given.len() > failures { Ok(()) } else { Err(error()) }
                };
                let opened = retry_at_start(within, attempt, |pause| slept += pause);
                let within = within.filter(|_| waits);
                assert_eq!(opened.is_ok(), within.is_some() && failures == 9, "{}", error());
                assert_eq!(given.len() > 1, within.is_some(), "{}: {given:?}", error());
                assert!(given[0].is_zero() && slept <= within.unwrap_or_default(), "{}: {slept:?}", error());
            }
        }
    }
}
