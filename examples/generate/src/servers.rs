//! The servers of `--rpc`: an address, all addresses of a name (`dns:NAME:PORT`), or those that servers have announced in a folder
//! (`file:DIR`, `rpc-server --announce DIR`).
//!
//! Names and folders are read at the start (with `--retry` until their servers can be used), and again whenever a server of theirs is
//! lost: another address that they list then takes its place. The other servers keep their places, and with them their weights.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use fanout::io_hint::io_hint;
use fanout::rpc::client::{ConnectError, endpoint_with_port};
use thiserror::Error;

/// Most entries of a folder of servers, which other users may be able to write.
const MAX_FILES: usize = 1024;

/// Longest file of a server: a line for each of its addresses.
const MAX_FILE_BYTES: u64 = 64 << 10;

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
    /// A folder with a file for each server: a line `host:port` for each of its addresses. The first one is used.
    Folder(PathBuf),
}

/// The servers of an item of `--rpc` are not known.
#[derive(Debug, Error)]
pub enum ServersError {
    /// The name has no addresses.
    #[error("--rpc {origin}: {error}; check the spelling of the name")]
    Name {
        /// The item.
        origin: ServerSource,
        /// Why.
        error: io::Error,
    },
    /// The folder cannot be read.
    #[error("--rpc {origin}: {error}{}; `rpc-server --announce` writes the folder", io_hint(error))]
    Folder {
        /// The item.
        origin: ServerSource,
        /// Why.
        error: io::Error,
    },
    /// A file of the folder cannot be read.
    #[error("--rpc {origin}: {file}: {error}{}", io_hint(error))]
    File {
        /// The item.
        origin: ServerSource,
        /// The file's name.
        file: String,
        /// Why.
        error: io::Error,
    },
    /// The folder has no file of a server.
    #[error(
        "--rpc {0}: no server has announced itself in this folder (rpc-server --announce): start the servers first"
    )]
    Empty(ServerSource),
    /// An entry of the folder is no file of a server: no regular file, too long, or without an address in its first line.
    #[error(
        "--rpc {origin}: {file} is no file of a server, whose first line is host:port: remove it, or give the servers a folder of \
         their own (rpc-server --announce)"
    )]
    NotAServer {
        /// The item.
        origin: ServerSource,
        /// The file's name.
        file: String,
    },
    /// More entries than are read.
    #[error(
        "--rpc {0}: the folder has more than {MAX_FILES} files: give the servers a folder of their own (rpc-server --announce)"
    )]
    TooManyFiles(ServerSource),
}

impl ServersError {
    /// Whether the item may have servers later: a name of a container network resolves, and a folder is filled, only once
    /// servers run.
    pub fn is_transient(&self) -> bool {
        match self {
            ServersError::Name { .. } | ServersError::Empty(_) => true,
            ServersError::Folder { error, .. } => error.kind() == io::ErrorKind::NotFound,
            ServersError::File { .. } | ServersError::NotAServer { .. } | ServersError::TooManyFiles(_) => false,
        }
    }
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
    let host = name.rsplit_once(':').map_or(name, |(host, _)| host);
    // Numbers, CPU and CUDA0 are devices of this machine.
    let is_device = host.parse::<u64>().is_ok()
        || host == "CPU"
        || host.strip_prefix("CUDA").is_some_and(|number| number.parse::<u64>().is_ok());
    if is_device {
        return Err(format!(
            "{host} is a device of this machine: give it to --device; a server is a host or host:port"
        ));
    }
    let endpoint = endpoint_with_port(name).filter(|endpoint| host_and_port(endpoint).is_some());
    endpoint.ok_or_else(|| ConnectError::Name(name.to_owned()).to_string())
}

/// The text of a file; empty if it is longer than [`MAX_FILE_BYTES`], or no text.
fn read_start(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    bytes.truncate(if bytes.len() as u64 > MAX_FILE_BYTES { 0 } else { bytes.len() });
    Ok(String::from_utf8(bytes).unwrap_or_default())
}

/// The parts of `host:port`. A comma would make two names of it in the list of devices.
fn host_and_port(text: &str) -> Option<(&str, u16)> {
    let (host, port) = text.rsplit_once(':')?;
    let is_host = !host.is_empty() && !host.contains(|c: char| "/,".contains(c) || c.is_whitespace() || c.is_control());
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
    /// The servers that are listed now, each `host:port`: servers of a name ordered by address, servers of a folder by file name.
    fn list(&self, resolver: &dyn Resolver) -> Result<Vec<String>, ServersError> {
        match self {
            ServerSource::Address(address) => Ok(vec![address.clone()]),
            ServerSource::Name { host, port } => {
                let addresses = resolver.addresses(host, *port);
                let addresses = addresses.map_err(|error| ServersError::Name { origin: self.clone(), error })?;
                Ok(BTreeSet::from_iter(addresses).iter().map(ToString::to_string).collect())
            }
            ServerSource::Folder(folder) => {
                let unreadable = |error| ServersError::Folder { origin: self.clone(), error };
                let entries = fs::read_dir(folder).map_err(unreadable)?.take(MAX_FILES + 1);
                let mut entries = entries.collect::<io::Result<Vec<_>>>().map_err(unreadable)?;
                if entries.len() > MAX_FILES {
                    return Err(ServersError::TooManyFiles(self.clone()));
                }
                entries.sort_by_key(fs::DirEntry::file_name);
                let mut servers = Vec::new();
                for entry in entries {
                    // An address counts once, even if a killed server has left a file with it.
                    match self.address_in(&entry)? {
                        Some(address) if !servers.contains(&address) => servers.push(address),
                        _ => {}
                    }
                }
                if servers.is_empty() { Err(ServersError::Empty(self.clone())) } else { Ok(servers) }
            }
        }
    }

    /// The address in the first line of a file of the folder. `None`: the file is being written, or its server has ended meanwhile.
    fn address_in(&self, entry: &fs::DirEntry) -> Result<Option<String>, ServersError> {
        let file = entry.file_name().to_string_lossy().into_owned();
        if file.starts_with('.') {
            return Ok(None);
        }
        // The kind first: opening a pipe would block until another process writes to it.
        // Links are followed: folders of Kubernetes consist of them.
        let text = fs::metadata(entry.path())
            .and_then(|found| if found.is_file() { read_start(&entry.path()).map(Some) } else { Ok(None) });
        let text = match text {
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(ServersError::File { origin: self.clone(), file, error }),
            Ok(text) => text,
        };
        let address = text.as_deref().and_then(|text| text.lines().next()).map(str::trim);
        match address.filter(|line| host_and_port(line).is_some()) {
            Some(address) => Ok(Some(address.to_owned())),
            None => Err(ServersError::NotAServer { origin: self.clone(), file }),
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
    /// The servers of `sources`, which [`Servers::list`] is to list.
    pub fn new(sources: &[ServerSource], resolver: Box<dyn Resolver>) -> Servers {
        Servers { listed: sources.iter().map(|source| (source.clone(), Vec::new())).collect(), resolver }
    }

    /// Lists the servers of each item as they are now, in place of an earlier list.
    ///
    /// # Errors
    /// [`ServersError`].
    pub fn list(&mut self) -> Result<(), ServersError> {
        for (source, servers) in &mut self.listed {
            *servers = source.list(&*self.resolver)?;
        }
        Ok(())
    }

    /// Whether a later list may have other servers: an item is a name or a folder.
    pub fn can_change(&self) -> bool {
        self.listed.iter().any(|(source, _)| !matches!(source, ServerSource::Address(_)))
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
        let mut servers = Servers::new(&sources, Box::new(addresses.clone()));
        let error = servers.list().unwrap_err();
        assert_eq!(error.to_string(), "--rpc dns:name:7: no addresses; check the spelling of the name");
        assert!(error.is_transient() && servers.can_change());
        *addresses.0.lock().unwrap() = vec!["10.0.0.10:7", "10.0.0.9:7", "10.0.0.9:7"];
        servers.list().unwrap();
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
            let mut servers = Servers::new(&sources, Box::new(SystemResolver));
            servers.list().map_err(|e| format!("{}{e}", if e.is_transient() { "later: " } else { "" }))?;
            Ok::<_, String>(servers.names().collect::<Vec<_>>().join(","))
        };
        let error = list().unwrap_err();
        assert!(error.starts_with("later: ") && error.contains("no server has announced itself"), "{error}");
        for (file, text) in [("b-2", "b:2\n"), ("a-1", "a:1\n[::1]:1\n"), (".c-3", "")] {
            fs::write(folder.join(file), text).unwrap();
        }
        assert_eq!(list().unwrap(), "a:1,b:2");
        fs::write(folder.join("c"), "a:1\n").unwrap();
        assert_eq!(list().unwrap(), "a:1,b:2", "each address counts once");
        let long = "c:3\n".repeat(1 + MAX_FILE_BYTES as usize / 4);
        for content in ["no address", "a:1,b:2", "a\u{1b}:1", "", "\u{0}", &long] {
            fs::write(folder.join("d"), content).unwrap();
            let error = list().unwrap_err();
            assert!(error.starts_with("--rpc ") && error.contains(": d is no file of a server"), "{error}");
        }
        fs::remove_file(folder.join("d")).unwrap();
        fs::create_dir(folder.join("d")).unwrap();
        assert!(list().unwrap_err().contains(": d is no file of a server"));
        fs::remove_dir(folder.join("d")).unwrap();
        std::os::unix::fs::symlink("/dev/zero", folder.join("d")).unwrap();
        assert!(list().unwrap_err().contains(": d is no file of a server"));
        fs::remove_file(folder.join("d")).unwrap();
        (0..=MAX_FILES).for_each(|number| fs::write(folder.join(format!(".{number}")), "").unwrap());
        assert!(list().unwrap_err().contains("more than 1024 files"));
        fs::remove_dir_all(&folder).unwrap();
        let error = list().unwrap_err();
        assert!(error.starts_with("later: ") && error.contains("No such file"), "{error}");
    }
}
