//! The servers of `--rpc`: an address, all addresses of a name (`dns:NAME:PORT`), or those that servers have announced in a folder
//! (`file:DIR`, `rpc-server --announce DIR`).
//!
//! Names and folders are read at the start, and again whenever a server of theirs is lost: another address that they list then
//! takes its place. The other servers keep their places, and with them their weights.

use std::collections::BTreeSet;
use std::fmt;
use std::fs;
use std::io;
use std::net::{Ipv6Addr, SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::str::FromStr;

use fanout::rpc::client::ConnectError;
use fanout::rpc::wire::DEFAULT_PORT;
use thiserror::Error;

/// Where the servers of one item of `--rpc` are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerSource {
    /// One server, `host:port`.
    Address(String),
    /// All addresses of a name, such as that of a headless service of Kubernetes.
    Name {
        /// The name.
        host: String,
        /// The port of each server.
        port: u16,
    },
    /// A folder with a file for each server: a line `host:port` for each of its addresses, of which the first one is used.
    Folder(PathBuf),
}

/// The servers of an item of `--rpc` are not known.
#[derive(Debug, Error)]
pub enum ServersError {
    /// The name has no addresses, or the folder cannot be read.
    #[error("--rpc {origin}: {error}")]
    Unreadable {
        /// The item.
        origin: ServerSource,
        /// Why.
        error: io::Error,
    },
    /// The folder has no file of a server.
    #[error(
        "--rpc {0}: no server has announced itself in this folder (rpc-server --announce): start the servers first"
    )]
    Empty(ServerSource),
    /// A file of the folder does not begin with an address.
    #[error("--rpc {origin}: the file {file} does not begin with a line host:port")]
    NoAddress {
        /// The item.
        origin: ServerSource,
        /// The file's name.
        file: String,
    },
}

/// The addresses of names; tests have a resolver of their own.
pub trait Resolver: Send + Sync {
    /// All addresses of `host`, in any order.
    ///
    /// # Errors
    /// The name has none, or the resolver does not answer.
    fn addresses(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>>;
}

/// The system's resolver.
pub struct SystemResolver;

impl Resolver for SystemResolver {
    fn addresses(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
        (host, port).to_socket_addrs().map(Iterator::collect)
    }
}

impl FromStr for ServerSource {
    type Err = String;

    fn from_str(text: &str) -> Result<ServerSource, String> {
        let text = text.trim();
        if let Some(folder) = text.strip_prefix("file:") {
            let is_empty = folder.is_empty();
            return if is_empty {
                Err("file: needs a folder".to_owned())
            } else {
                Ok(ServerSource::Folder(folder.into()))
            };
        }
        let Some(name) = text.strip_prefix("dns:") else { return server_address(text).map(ServerSource::Address) };
        let (host, port) = host_and_port(name).ok_or_else(|| format!("{text:?}: expected dns:NAME:PORT"))?;
        Ok(ServerSource::Name { host: host.to_owned(), port })
    }
}

/// Parses `host` or `host:port`; returns the latter, so that `Registry::open` cannot mistake the name for a device of this machine.
/// The RPC client validates the host.
fn server_address(name: &str) -> Result<String, String> {
    // A bare IPv6 address has colons, but no port.
    let with_port = match name.parse::<Ipv6Addr>() {
        Ok(address) => format!("[{address}]:{DEFAULT_PORT}"),
        Err(_) if name.contains(':') && !name.ends_with(']') => name.to_owned(),
        Err(_) => format!("{name}:{DEFAULT_PORT}"),
    };
    let wrong = || ConnectError::Name(name.to_owned()).to_string();
    let (host, _) = host_and_port(&with_port).ok_or_else(wrong)?;
    // Numbers, CPU and CUDA0 are devices of this machine.
    let is_device = host.parse::<u64>().is_ok()
        || host == "CPU"
        || host.strip_prefix("CUDA").is_some_and(|number| number.parse::<u64>().is_ok());
    if is_device {
        return Err(format!(
            "{host} is a device of this machine: give it to --device; a server is a host or host:port"
        ));
    }
    Ok(with_port)
}

/// The parts of `host:port`.
fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let is_host = !host.is_empty() && !text.contains('/');
    port.parse().ok().filter(|_| is_host).map(|port| (host, port))
}

impl fmt::Display for ServerSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServerSource::Address(address) => f.write_str(address),
            ServerSource::Name { host, port } => write!(f, "dns:{host}:{port}"),
            ServerSource::Folder(folder) => write!(f, "file:{}", folder.display()),
        }
    }
}

impl ServerSource {
    /// The servers that are listed now, each `host:port`: those of a name ordered by address, those of a folder by file name.
    fn list(&self, resolver: &dyn Resolver) -> Result<Vec<String>, ServersError> {
        let unreadable = |error| ServersError::Unreadable { origin: self.clone(), error };
        match self {
            ServerSource::Address(address) => Ok(vec![address.clone()]),
            ServerSource::Name { host, port } => {
                let addresses: BTreeSet<_> = resolver.addresses(host, *port).map_err(unreadable)?.into_iter().collect();
                Ok(addresses.iter().map(ToString::to_string).collect())
            }
            ServerSource::Folder(folder) => {
                let mut servers = Vec::new();
                let entries = fs::read_dir(folder).map_err(unreadable)?.collect::<io::Result<Vec<_>>>();
                let mut entries = entries.map_err(unreadable)?;
                entries.sort_by_key(fs::DirEntry::file_name);
                for entry in entries {
                    let file = entry.file_name().to_string_lossy().into_owned();
                    // A file that is being written.
                    if file.starts_with('.') {
                        continue;
                    }
                    let text = match fs::read_to_string(entry.path()) {
                        // The server has ended meanwhile.
                        Err(e) if e.kind() == io::ErrorKind::NotFound => continue,
                        text => text.map_err(unreadable)?,
                    };
                    let first = text.lines().next().map(str::trim).filter(|line| host_and_port(line).is_some());
                    let address = first.ok_or_else(|| ServersError::NoAddress { origin: self.clone(), file })?;
                    servers.push(address.to_owned());
                }
                if servers.is_empty() { Err(ServersError::Empty(self.clone())) } else { Ok(servers) }
            }
        }
    }
}

/// The servers of all items of `--rpc`, in their order.
pub struct Servers {
    resolver: Box<dyn Resolver>,
    /// Each item, with its servers.
    listed: Vec<(ServerSource, Vec<String>)>,
}

impl Servers {
    /// Lists the servers of each of `sources`.
    ///
    /// # Errors
    /// [`ServersError`].
    pub fn list(sources: &[ServerSource], resolver: Box<dyn Resolver>) -> Result<Servers, ServersError> {
        let listed = sources.iter().map(|source| Ok::<_, ServersError>((source.clone(), source.list(&*resolver)?)));
        Ok(Servers { listed: listed.collect::<Result<_, _>>()?, resolver })
    }

    /// The servers, each `host:port`.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.listed.iter().flat_map(|(_, servers)| servers).map(String::as_str)
    }

    /// Whether another server may take the place of `server`: it comes from a name or a folder.
    pub fn can_be_replaced(&self, server: &str) -> bool {
        let found = self.listed.iter().find(|(_, servers)| servers.iter().any(|name| name == server));
        found.is_some_and(|(source, _)| !matches!(source, ServerSource::Address(_)))
    }

    /// The servers to which to connect in place of the lost server `lost`, by what its name or folder lists now: those that are not
    /// used yet, and itself. A killed server may stay in its folder, so that being listed does not mean that it comes back.
    pub fn successors(&self, lost: &str) -> Vec<String> {
        let listed = self.listed.iter().find(|(_, servers)| servers.iter().any(|name| name == lost));
        let now = listed.and_then(|(source, _)| source.list(&*self.resolver).ok()).unwrap_or_default();
        let is_used = |server: &String| self.names().any(|name| name == server);
        now.into_iter().filter(|server| !is_used(server)).chain([lost.to_owned()]).collect()
    }

    /// Records that `new` has taken the place of `lost`.
    pub fn replace(&mut self, lost: &str, new: &str) {
        let places = self.listed.iter_mut().flat_map(|(_, servers)| servers);
        places.filter(|name| *name == lost).for_each(|name| *name = new.to_owned());
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};

    #[test]
    fn items_are_addresses_names_or_folders() {
        for (text, expected) in [
            ("a:1", Some(ServerSource::Address("a:1".to_owned()))),
            (" [::1]:2 ", Some(ServerSource::Address("[::1]:2".to_owned()))),
            ("dns:fanout.ns.svc:50052", Some(ServerSource::Name { host: "fanout.ns.svc".to_owned(), port: 50052 })),
            ("file:/shared/job", Some(ServerSource::Folder("/shared/job".into()))),
            ("a:1/0", None),
            ("a:65536", None),
            (":1", None),
            ("dns:a", None),
            ("dns::1", None),
            ("file:", None),
        ] {
            let parsed = text.parse::<ServerSource>();
            assert_eq!(parsed.clone().ok(), expected, "{text}: {parsed:?}");
            assert!(parsed.is_err() || parsed.unwrap().to_string() == text.trim(), "{text}");
        }
        assert_eq!("a".parse(), Ok(ServerSource::Address("a:50052".to_owned())));
    }

    /// A resolver whose only name has these addresses.
    #[derive(Clone, Default)]
    struct Addresses(Arc<Mutex<Vec<&'static str>>>);

    impl Resolver for Addresses {
        fn addresses(&self, host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
            assert_eq!((host, port), ("name", 7));
            let addresses: Vec<_> = self.0.lock().unwrap().iter().map(|address| address.parse().unwrap()).collect();
            if addresses.is_empty() { Err(io::Error::other("no addresses")) } else { Ok(addresses) }
        }
    }

    /// The addresses of a name while its servers come and go; each lost server and its successors.
    #[test]
    fn addresses_of_a_name_keep_their_places() {
        let addresses = Addresses::default();
        let sources = ["a:1", "dns:name:7"].map(|text| text.parse().unwrap());
        let error = Servers::list(&sources, Box::new(addresses.clone())).err().unwrap();
        assert_eq!(error.to_string(), "--rpc dns:name:7: no addresses");
        *addresses.0.lock().unwrap() = vec!["10.0.0.10:7", "10.0.0.9:7", "10.0.0.9:7"];
        let mut servers = Servers::list(&sources, Box::new(addresses.clone())).unwrap();
        assert_eq!(servers.names().collect::<Vec<_>>(), ["a:1", "10.0.0.9:7", "10.0.0.10:7"]);
        assert_eq!(["a:1", "10.0.0.9:7"].map(|server| servers.can_be_replaced(server)), [false, true]);
        for (now, lost, successors) in [
            (&["10.0.0.9:7", "10.0.0.10:7"][..], "10.0.0.9:7", &["10.0.0.9:7"][..]),
            (&["10.0.0.10:7"], "10.0.0.9:7", &["10.0.0.9:7"]),
            (&[], "10.0.0.9:7", &["10.0.0.9:7"]),
            (&["10.0.0.9:7", "10.0.0.11:7"], "10.0.0.9:7", &["10.0.0.11:7", "10.0.0.9:7"]),
            (&["10.0.0.12:7", "10.0.0.10:7", "10.0.0.2:7"], "10.0.0.9:7", &["10.0.0.2:7", "10.0.0.12:7", "10.0.0.9:7"]),
            (&["10.0.0.12:7"], "a:1", &["a:1"]),
        ] {
            *addresses.0.lock().unwrap() = now.to_vec();
            assert_eq!(servers.successors(lost), successors, "{now:?}, {lost}");
        }
        servers.replace("10.0.0.9:7", "10.0.0.11:7");
        assert_eq!(servers.names().collect::<Vec<_>>(), ["a:1", "10.0.0.11:7", "10.0.0.10:7"]);
    }

    #[test]
    fn a_folder_lists_servers_in_the_order_of_its_files() {
        let folder = std::env::temp_dir().join(format!("fanout-servers-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let sources = [ServerSource::Folder(folder.clone())];
        let list = || {
            let servers = Servers::list(&sources, Box::new(SystemResolver)).map_err(|e| e.to_string())?;
            Ok::<_, String>(servers.names().collect::<Vec<_>>().join(","))
        };
        assert!(list().unwrap_err().contains("no server has announced itself"));
        for (file, text) in [("b-2", "b:2\n"), ("a-1", "a:1\n[::1]:1\n"), (".c-3", "")] {
            fs::write(folder.join(file), text).unwrap();
        }
        assert_eq!(list().unwrap(), "a:1,b:2");
        fs::write(folder.join("d"), "no address").unwrap();
        assert!(list().unwrap_err().contains("the file d does not begin with"));
        fs::remove_dir_all(&folder).unwrap();
        assert!(list().unwrap_err().contains("No such file"));
    }
}
