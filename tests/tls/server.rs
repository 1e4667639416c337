//! The measured server: a process of the program that serves one device at an address with TLS and at a plain one.

use fanout::device::{Buffer, Device, MemoryBudget, Queue, UploadSource};
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::keys::SecretKey;
use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use tempfile::TempDir;

/// Memory of the device in bytes.
const MEMORY: u64 = 1 << 30;

/// A server; killed on drop.
pub(crate) struct Server {
    child: Child,
    pub(crate) tls: String,
    pub(crate) plain: String,
    pub(crate) key: SecretKey,
    /// The only client key that the server allows.
    pub(crate) client: SecretKey,
    folder: TempDir,
}

impl Server {
    pub(crate) fn start(binary: &Path, flags: &[&str]) -> Server {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let [key, client] = [(); 2].map(|()| SecretKey::generate().unwrap());
        key.create_file(&at("key")).unwrap();
        fs::write(at("clients"), format!("{} client\n", client.public_key())).unwrap();
        let mut child = Command::new(binary)
            .args(["--port", "0", "--listen", "127.0.0.1:0=plain", "--device", "CPU", "--threads", "1"])
            .args(["--mem", &MEMORY.to_string(), "--no-supervise", "--key"])
            .arg(at("key"))
            .arg("--allow-keys")
            .arg(at("clients"))
            .args(flags)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(at("log")).unwrap())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", binary.display()));
        let addresses: Vec<_> = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .filter_map(|line| Some(line.unwrap().strip_prefix("listening on ")?.split(' ').next()?.to_owned()))
            .take(2)
            .collect();
        let [tls, plain] = addresses.try_into().expect("the server prints the addresses on which it listens");
        Server { child, tls, plain, key, client, folder }
    }

    pub(crate) fn options(&self) -> Options {
        Options::default().with_server_keys(vec![self.key.public_key()]).with_key(Some(self.client.clone()))
    }

    pub(crate) fn connect_tls(&self) -> Endpoint {
        Endpoint::connect(&self.tls, &self.options()).unwrap()
    }

    pub(crate) fn connect_plain(&self) -> Endpoint {
        Endpoint::connect(&self.plain, &Options::default()).unwrap()
    }

    /// What Linux reports of the process, in its units: `Threads`, or `VmRSS` in KiB.
    pub(crate) fn status(&self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).unwrap();
        line.trim().trim_end_matches(" kB").parse().unwrap()
    }

    pub(crate) fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A session with a buffer and a queue.
pub(crate) struct Session {
    pub(crate) queue: Box<dyn Queue>,
    pub(crate) buffer: Buffer,
    _endpoint: Endpoint,
}

impl Session {
    pub(crate) fn new(endpoint: Endpoint, bytes: u64) -> Session {
        let budget = MemoryBudget::new(MEMORY);
        let device: &Arc<dyn Device> = &endpoint.devices()[0];
        let (buffer, queue) = (device.alloc(bytes, &budget).unwrap(), device.queue(&budget).unwrap());
        Session { queue, buffer, _endpoint: endpoint }
    }

    /// Uploads to the whole buffer, and waits until the server has all bytes.
    pub(crate) fn upload(&mut self, bytes: &[u8]) {
        self.queue.upload(self.buffer.whole(), None, UploadSource::Borrowed(bytes)).unwrap();
        self.round_trip();
    }

    pub(crate) fn download(&mut self) -> Vec<u8> {
        self.queue.download(self.buffer.whole()).unwrap().wait(None).unwrap().to_vec()
    }

    /// A request whose reply has 4 bytes.
    pub(crate) fn round_trip(&mut self) {
        let front = self.buffer.region(0, 4).unwrap();
        self.queue.download(front).unwrap().wait(None).unwrap();
    }
}
