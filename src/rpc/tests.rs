//! Whole sessions over the transport in memory: whatever it does to the bytes, both ends see the same messages, and where it cuts
//! them, both ends find out.

use super::client::{Endpoint, Options};
use super::server::{Config, Handle, Server};
use super::transport::memory::{Weather, listen};
use super::transport::{Deadline, dial, resolve};
use super::wire::*;
use crate::cpu::{CpuDevice, Path};
use crate::device::{Account, Device, DeviceError, Source};
use crate::graph::Builder;
use crate::ops::binary::Binary;
use crate::tensor::DType;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Longer than anything here takes.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A server of one CPU, on a thread that ends with it.
struct MemoryServer {
    endpoint: String,
    handle: Handle,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl MemoryServer {
    fn start(weather: Weather) -> MemoryServer {
        MemoryServer::with(weather, Config::default())
    }

    fn with(weather: Weather, config: Config) -> MemoryServer {
        let listener = listen(weather);
        let cpu = CpuDevice::new("CPU", 1, Path::Fast, 64 << 20).unwrap();
        let server = Server::over(|| Ok(Box::new(listener)), vec![cpu as Arc<dyn Device>], config).unwrap();
        let (endpoint, handle) = (server.endpoint(), server.handle());
        MemoryServer { endpoint, handle, thread: Some(std::thread::spawn(move || server.run())) }
    }
}

impl Drop for MemoryServer {
    fn drop(&mut self) {
        self.handle.shutdown();
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(matches!(ended, Some(Ok(()))) || std::thread::panicking());
    }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| rng.u8(..)).collect()
}

/// What a runtime does: tensors of some sizes there and back, a graph, points.
fn session(endpoint: &str, patience: Duration) -> Result<(), DeviceError> {
    let options = Options { connect_timeout: patience, silence_timeout: patience, retry: Duration::ZERO };
    let lost =
        |e: super::client::ConnectError| DeviceError::Lost { endpoint: endpoint.to_owned(), reason: e.to_string() };
    let endpoint = Endpoint::connect(endpoint, &options).map_err(lost)?;
    let device = &endpoint.devices()[0];
    let (account, until) = (Account::new(1 << 30), Some(Instant::now() + WATCHDOG));
    let mut queue = device.queue(&account)?;
    for (seed, len) in [1, 4096, 300_000].into_iter().enumerate() {
        let data = noise(seed as u64, len);
        let buffer = device.alloc(len as u64, &account)?;
        queue.upload(buffer.whole(), None, Source::Borrowed(&data))?;
        assert!(queue.download(buffer.whole())?.wait(until)? == data, "{len} bytes");
    }
    let mut b = Builder::new();
    let (x, y) = (b.leaf(DType::F32, [4, 1, 1, 1]).unwrap(), b.leaf(DType::F32, [4, 1, 1, 1]).unwrap());
    let z = b.node(Binary::Mul, &[Some(x), Some(y)]).unwrap();
    let graph = Arc::new(b.build().unwrap());
    let program = device.prepare(Arc::clone(&graph))?;
    let memory = device.alloc(graph.slot_sizes()[0] as u64, &account)?;
    let region = |id| {
        let tensor = graph.tensor(id).unwrap();
        memory.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64)
    };
    let bytes = |v: [f32; 4]| v.map(f32::to_le_bytes).concat();
    for round in 1..20 {
        let round = round as f32;
        queue.upload(region(x)?, None, Source::Borrowed(&bytes([1.0, 2.0, 3.0, round])))?;
        queue.upload(region(y)?, None, Source::Borrowed(&bytes([round; 4])))?;
        queue.run(&program, &Arc::from([memory.whole()]))?;
        let got = queue.download(region(z)?)?.wait(until)?;
        assert_eq!(got, bytes([round, 2.0 * round, 3.0 * round, round * round]));
    }
    queue.mark().wait(until)
}

#[test]
fn a_client_works_however_bytes_are_split_and_delayed() {
    for seed in 0..8 {
        let server = MemoryServer::start(Weather { seed: 100 * seed, cut_after: None });
        session(&server.endpoint, WATCHDOG).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// However far a session has come, its end is an error that names the connection, and nobody waits on.
#[test]
fn a_cut_connection_is_lost_at_both_ends() {
    for seed in 0..24 {
        // From the middle of the handshake to the middle of the largest tensor.
        let after = 9 + (seed * seed * 700) % 320_000;
        let server = MemoryServer::start(Weather { seed, cut_after: Some(after) });
        let told = session(&server.endpoint, WATCHDOG).unwrap_err();
        assert!(matches!(told, DeviceError::Lost { .. }), "cut after {after}: {told}");
        let until = Instant::now() + WATCHDOG;
        while server.handle.connections() > 0 {
            assert!(Instant::now() < until, "cut after {after}: the server's session goes on");
            std::thread::yield_now();
        }
    }
}

/// The source's server dials the destination's and sends it the bytes: a link uses the same transport as clients do.
#[test]
fn a_link_between_servers_works_however_bytes_are_split_and_delayed() {
    for seed in 0..8 {
        let to = MemoryServer::start(Weather { seed: 2000 + 100 * seed, cut_after: None });
        let config = Config::default().with_peers(vec![to.endpoint.parse().unwrap()]);
        let from = MemoryServer::with(Weather { seed: 3000 + 100 * seed, cut_after: None }, config);
        let options = Options { connect_timeout: WATCHDOG, silence_timeout: WATCHDOG, retry: Duration::ZERO };
        let endpoints = [&from, &to].map(|server| Endpoint::connect(&server.endpoint, &options).unwrap());
        let [source, here] = endpoints.each_ref().map(|endpoint| &endpoint.devices()[0]);
        assert!(here.copies_from(source.info()), "seed {seed}: the source's server does not reach {}", to.endpoint);
        let (account, until) = (Account::new(1 << 30), Some(Instant::now() + WATCHDOG));
        let [mut out, mut queue] = [source, here].map(|device| device.queue(&account).unwrap());
        for len in [1, 4096, 600_000] {
            let data = noise(seed, len);
            let [src, dst] = [source, here].map(|device| device.alloc(len as u64, &account).unwrap());
            out.upload(src.whole(), None, Source::Borrowed(&data)).unwrap();
            let after = out.mark();
            assert!(queue.copy_from(src.whole(), dst.whole(), Some(&after)).unwrap().is_submitted());
            assert!(queue.download(dst.whole()).unwrap().wait(until).unwrap() == data, "seed {seed}: {len} bytes");
        }
        // The client's connection, and the link from the other server.
        assert_eq!(to.handle.connections(), 2, "seed {seed}");
    }
}

/// A client of ggml's messages, by hand: what it sends is one stream, and so are the replies.
#[test]
fn a_server_serves_7_0_however_bytes_are_split_and_delayed() {
    for seed in 0..8 {
        let server = MemoryServer::start(Weather { seed: 1000 + 100 * seed, cut_after: None });
        let deadline = Deadline::after(WATCHDOG);
        let (_, connection) = dial(&resolve(&server.endpoint).unwrap(), &deadline).unwrap();
        let (mut receiver, mut sender) = connection.split();
        let mut ask = |request: &Request<'_>, reply: usize| {
            let mut out = Vec::new();
            request.encode(&mut out);
            sender.write_all(&[&out], WATCHDOG).unwrap();
            let mut bytes = vec![0; reply];
            receiver.read_exact(&mut bytes, &deadline).unwrap();
            bytes
        };
        ask(&Request::Hello(Hello { conn_caps: Some([0; 24]) }), RESPONSE_HEADER + 28);
        let made = ask(&Request::AllocBuffer(AllocBuffer { device: 0, size: 1 << 20 }), RESPONSE_HEADER + 16);
        let handle = u64::from_le_bytes(made[8..16].try_into().unwrap());
        let base = ask(&Request::BufferGetBase(BufferGetBase { remote_ptr: handle }), RESPONSE_HEADER + 8);
        let base = u64::from_le_bytes(base[8..].try_into().unwrap());
        for (n, len) in [1, 100, 70_000, 1 << 20].into_iter().enumerate() {
            let data = noise(n as u64, len);
            let mut tensor = TensorRecord::decode(&[0; TENSOR_RECORD]);
            (tensor.buffer, tensor.data, tensor.dtype) = (handle, base, DType::I8.to_wire());
            (tensor.ne, tensor.nb) = ([len as u32, 1, 1, 1], [1, len as u32, len as u32, len as u32]);
            let head = SetTensorHead { tensor: tensor.clone(), cache: false, offset: 0 };
            ask(&Request::SetTensor(SetTensor { head, data: &data }), 0);
            let get = GetTensor { tensor, offset: 0, size: len as u64 };
            assert!(ask(&Request::GetTensor(get), RESPONSE_HEADER + len)[RESPONSE_HEADER..] == data);
        }
    }
}
