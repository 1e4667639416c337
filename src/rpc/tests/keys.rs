//! Tenants by key: clients of ggml's protocol over TLS, beside clients of other keys.

use super::*;
use crate::rpc::keys::{PublicKey, SecretKey};
use crate::rpc::server::{CacheConfig, Ended, ServerKeys};
use crate::rpc::transport::tls::{ClientTls, Credentials};
use crate::rpc::transport::{Address, Receiver, Sender, dial_with};
use std::path::Path;

const DATA_BYTES: usize = 100_000;

/// A server of CPU devices with a list of keys, on a thread that ends when this is dropped.
struct KeyServer {
    dir: tempfile::TempDir,
    own: PublicKey,
    addr: SocketAddr,
    handle: ServerHandle,
    thread: Option<std::thread::JoinHandle<Ended>>,
}

impl KeyServer {
    /// `list`: each key with the rest of its line.
    fn start(list: &[(&SecretKey, &str)], config: Config) -> KeyServer {
        let dir = tempfile::tempdir().unwrap();
        let own = SecretKey::generate().unwrap();
        own.create_file(&dir.path().join("key")).unwrap();
        write_list(dir.path(), list);
        let keys = ServerKeys::read_files(&dir.path().join("key"), &dir.path().join("list")).unwrap();
        let device = |name| CpuDevice::new(name, 1, MathMode::Fast, 64 << 20).unwrap() as Arc<dyn Device>;
        let config = config.with_keys(Some(keys)).with_protocol(vec!["7".parse().unwrap()]);
        let server = Server::bind("127.0.0.1", 0, ["CPU0", "CPU1", "CPU2"].map(device).to_vec(), config).unwrap();
        let (addr, handle) = (server.local_addr(), server.handle());
        let thread = Some(std::thread::spawn(move || server.run()));
        KeyServer { dir, own: own.public_key(), addr, handle, thread }
    }

    /// Rereads the list, as SIGHUP does.
    fn reread(&self, list: &[(&SecretKey, &str)]) {
        write_list(self.dir.path(), list);
        self.handle.reread_keys().unwrap();
    }

    /// A client with a session.
    fn connect(&self, key: &SecretKey) -> KeyClient {
        let credentials = Credentials::of_key(key).unwrap();
        let tls = ClientTls::new(&credentials, &[self.own]).unwrap();
        let deadline = Deadline::after(WATCHDOG);
        let (_, connection) = dial_with(&[Address::Tcp(self.addr)], &deadline, Some(&tls)).unwrap();
        let (receiver, sender) = connection.split();
        let mut client = KeyClient { receiver, sender };
        client.request(&Request::Hello(Hello { conn_caps: Some([0; CAPS_BYTES]) }), 28);
        client
    }
}

impl Drop for KeyServer {
    fn drop(&mut self) {
        self.handle.shutdown();
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(matches!(ended, Some(Ok(_))) || std::thread::panicking());
    }
}

fn write_list(dir: &Path, list: &[(&SecretKey, &str)]) {
    let lines = list.iter().map(|(key, rest)| format!("{} {rest}\n", key.public_key()));
    std::fs::write(dir.join("list"), lines.collect::<String>()).unwrap();
}

/// A client of protocol 7.0.
struct KeyClient {
    receiver: Receiver,
    sender: Sender,
}

impl KeyClient {
    /// Sends a request, and returns the body of its reply of `reply` bytes.
    fn request(&mut self, request: &Request<'_>, reply: usize) -> Vec<u8> {
        self.send(request);
        let mut bytes = vec![0; RESPONSE_HEADER + reply];
        self.receiver.read_exact(&mut bytes, &Deadline::after(WATCHDOG)).unwrap();
        bytes.split_off(RESPONSE_HEADER)
    }

    fn send(&mut self, request: &Request<'_>) {
        let mut out = Vec::new();
        request.encode(&mut out);
        self.sender.write_all(&[&out], WATCHDOG).unwrap();
    }

    /// The record of a new tensor of `DATA_BYTES` bytes.
    fn tensor(&mut self) -> TensorRecord {
        let size = DATA_BYTES as u64;
        let made = self.request(&Request::AllocBuffer(AllocBuffer { device: 0, size }), 16);
        let handle = u64::from_le_bytes(made[..8].try_into().unwrap());
        let base = self.request(&Request::BufferGetBase(BufferGetBase { remote_ptr: handle }), 8);
        let mut tensor = TensorRecord::decode(&[0; TENSOR_RECORD]);
        (tensor.buffer, tensor.data) = (handle, u64::from_le_bytes(base.try_into().unwrap()));
        let row = DATA_BYTES as u32;
        (tensor.dtype, tensor.ne, tensor.nb) = (DType::I8.to_wire(), [row, 1, 1, 1], [1, row, row, row]);
        tensor
    }

    /// Uploads data for the cache.
    fn upload_cached(&mut self, data: &[u8]) {
        let head = SetTensorHead { tensor: self.tensor(), cache: true, offset: 0 };
        self.send(&Request::SetTensor(SetTensor { head, data }));
        self.request(&Request::DeviceCount(DeviceCount {}), 4);
    }

    /// Whether the cache has an entry for this hash.
    fn is_cached(&mut self, hash: u64) -> bool {
        let tensor = self.tensor();
        self.request(&Request::SetTensorHash(SetTensorHash { tensor, offset: 0, hash }), 1) == [1]
    }
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

#[test]
fn a_key_finds_its_entries_of_the_cache_alone_and_by_any_name() {
    let [alice, bob] = [(); 2].map(|()| SecretKey::generate().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let config = Config::default().with_cache(Some(CacheConfig::new(folder.path())));
    let server = KeyServer::start(&[(&alice, "alice"), (&bob, "bob")], config);
    let (data, of_bob) = (noise(1, DATA_BYTES), noise(2, DATA_BYTES));
    let is_cached = |key, data: &[u8]| server.connect(key).is_cached(fnv1a(data));
    server.connect(&alice).upload_cached(&data);
    assert!(is_cached(&alice, &data) && !is_cached(&bob, &data));
    server.connect(&bob).upload_cached(&of_bob);
    assert!(is_cached(&bob, &of_bob) && !is_cached(&alice, &of_bob));
    server.connect(&bob).upload_cached(&data);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 3, "an entry for each owner");
    // The names change places.
    server.reread(&[(&alice, "bob"), (&bob, "alice")]);
    assert!(is_cached(&alice, &data) && !is_cached(&alice, &of_bob) && is_cached(&bob, &of_bob));
}

#[test]
fn a_key_names_its_devices_from_0() {
    let [alice, bob] = [(); 2].map(|()| SecretKey::generate().unwrap());
    let server = KeyServer::start(&[(&alice, "alice devices=2,0"), (&bob, "bob")], Config::default());
    for (key, count) in [(&alice, 2), (&bob, 3)] {
        let mut client = server.connect(key);
        assert_eq!(client.request(&Request::DeviceCount(DeviceCount {}), 4), u32::to_le_bytes(count));
        let memory = |device| Request::GetDeviceMemory(GetDeviceMemory { device });
        for device in 0..count {
            client.request(&memory(device), 16);
        }
        client.send(&memory(count));
        let ended = client.receiver.read_into(&mut [0], &Deadline::after(WATCHDOG));
        assert!(ended.is_err() || ended.is_ok_and(|bytes| bytes == 0), "device {count}");
    }
}

/// The address has one connection at a time until it has proved its key.
#[test]
fn sessions_of_keys_leave_the_connections_of_their_address() {
    let [alice, bob] = [(); 2].map(|()| SecretKey::generate().unwrap());
    let config = Config::default().with_loopback_tenants(true).with_max_connections_per_address(1);
    let server = KeyServer::start(&[(&alice, "alice connections=3"), (&bob, "bob")], config);
    let mut clients: Vec<_> = [&alice, &alice, &bob, &alice].map(|key| server.connect(key)).into();
    assert_eq!(server.handle.connections(), 4);
    clients.clear();
    let until = Instant::now() + WATCHDOG;
    while server.handle.connections() > 0 {
        assert!(Instant::now() < until, "the sessions do not end");
        std::thread::yield_now();
    }
    server.connect(&bob);
}
