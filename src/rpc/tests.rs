//! End-to-end tests of client and server over the in-memory transport: with any split and delay of the bytes both ends receive
//! the same messages, and a cut at any position is detected by both ends.

mod keys;

use super::client::{ConnectError, Endpoint, Options};
use super::server::{Config, Ended, Server, ServerHandle};
use super::transport::memory::{LinkConditions, listen_for};
use super::transport::{Deadline, dial, resolve};
use super::wire::*;
use crate::cpu::{CpuDevice, MathMode};
use crate::device::{Device, DeviceError, MemoryBudget, Timeline, TimelinePoint, UploadSource};
use crate::graph::Builder;
use crate::ops::binary::Binary;
use crate::tensor::DType;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Upper limit of every wait in these tests; no test comes close to it.
const WATCHDOG: Duration = Duration::from_secs(60);

/// A server of one CPU device, on a thread that ends when this is dropped.
struct MemoryServer {
    endpoint: String,
    handle: ServerHandle,
    thread: Option<std::thread::JoinHandle<Ended>>,
}

impl MemoryServer {
    fn start(conditions: LinkConditions) -> MemoryServer {
        MemoryServer::with_config(conditions, Config::default())
    }

    fn with_config(conditions: LinkConditions, config: Config) -> MemoryServer {
        MemoryServer::with_clients_at(None, conditions, config)
    }

    /// A server that sees `client` as the address of its clients, if there is one.
    fn with_clients_at(client: Option<SocketAddr>, conditions: LinkConditions, config: Config) -> MemoryServer {
        let listener = listen_for(conditions, client);
        let cpu = CpuDevice::new("CPU", 1, MathMode::Fast, 64 << 20).unwrap();
        let server = Server::bind_with(Box::new(listener), vec![cpu as Arc<dyn Device>], config).unwrap();
        let (endpoint, handle) = (server.endpoint(), server.handle());
        MemoryServer { endpoint, handle, thread: Some(std::thread::spawn(move || server.run())) }
    }
}

impl Drop for MemoryServer {
    fn drop(&mut self) {
        self.handle.shutdown();
        let ended = self.thread.take().map(std::thread::JoinHandle::join);
        assert!(matches!(ended, Some(Ok(_))) || std::thread::panicking());
    }
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len).map(|_| rng.u8(..)).collect()
}

/// Runs a typical session: uploads and downloads of several sizes, a graph that runs repeatedly, and a mark.
fn session(endpoint: &str, timeout: Duration) -> Result<(), DeviceError> {
    let options = Options::default().with_connect_timeout(timeout).with_silence_timeout(timeout);
    let lost = |e: super::client::ConnectError| DeviceError::ConnectionLost {
        endpoint: endpoint.to_owned(),
        reason: e.to_string(),
    };
    let endpoint = Endpoint::connect(endpoint, &options).map_err(lost)?;
    let device = &endpoint.devices()[0];
    let (budget, until) = (MemoryBudget::new(1 << 30), Some(Instant::now() + WATCHDOG));
    let mut queue = device.queue(&budget)?;
    for (seed, len) in [1, 4096, 300_000].into_iter().enumerate() {
        let data = noise(seed as u64, len);
        let buffer = device.alloc(len as u64, &budget)?;
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&data))?;
        assert!(queue.download(buffer.whole())?.wait(until)? == data, "{len} bytes");
    }
    let mut b = Builder::new();
    let (x, y) = (b.leaf(DType::F32, [4, 1, 1, 1]).unwrap(), b.leaf(DType::F32, [4, 1, 1, 1]).unwrap());
    let z = b.node(Binary::Mul, &[Some(x), Some(y)]).unwrap();
    let graph = Arc::new(b.build());
    let program = device.prepare(Arc::clone(&graph))?;
    let memory = device.alloc(graph.slot_sizes()[0] as u64, &budget)?;
    let region = |id| {
        let tensor = graph.tensor(id).unwrap();
        memory.region(tensor.place.unwrap().offset as u64, tensor.desc.extent() as u64)
    };
    let bytes = |v: [f32; 4]| v.map(f32::to_le_bytes).concat();
    for round in 1..20 {
        let round = round as f32;
        queue.upload(region(x)?, None, UploadSource::Borrowed(&bytes([1.0, 2.0, 3.0, round])))?;
        queue.upload(region(y)?, None, UploadSource::Borrowed(&bytes([round; 4])))?;
        queue.run(&program, &Arc::from([memory.whole()]))?;
        let got = queue.download(region(z)?)?.wait(until)?;
        assert_eq!(got, bytes([round, 2.0 * round, 3.0 * round, round * round]));
    }
    queue.mark().wait(until)
}

#[test]
fn a_session_works_for_any_split_and_delay_of_its_bytes() {
    for seed in 0..8 {
        let server = MemoryServer::start(LinkConditions { seed: 100 * seed, cut_after: None });
        session(&server.endpoint, WATCHDOG).unwrap_or_else(|e| panic!("seed {seed}: {e}"));
    }
}

/// At any point of a session a cut is reported as the loss of the connection, and no thread keeps waiting.
#[test]
fn a_cut_connection_is_lost_at_both_ends() {
    for seed in 0..24 {
        // From the middle of the handshake to the middle of the largest tensor.
        let after = 9 + (seed * seed * 700) % 320_000;
        let server = MemoryServer::start(LinkConditions { seed, cut_after: Some(after) });
        let error = session(&server.endpoint, WATCHDOG).unwrap_err();
        assert!(matches!(error, DeviceError::ConnectionLost { .. }), "cut after {after}: {error}");
        let until = Instant::now() + WATCHDOG;
        while server.handle.connections() > 0 {
            assert!(Instant::now() < until, "cut after {after}: the server's session does not end");
            std::thread::yield_now();
        }
    }
}

/// A buffer that is dropped while its read waits for another queue stays allocated until the read is sent.
#[test]
fn a_read_that_waits_keeps_its_buffer() {
    let server = MemoryServer::start(LinkConditions { seed: 7, cut_after: None });
    let client = connect(&server, Duration::ZERO).unwrap();
    let (device, budget) = (&client.devices()[0], MemoryBudget::new(1 << 20));
    let mut queue = device.queue(&budget).unwrap();
    let buffer = device.alloc(64, &budget).unwrap();
    queue.upload(buffer.whole(), None, UploadSource::Borrowed(&[7; 64])).unwrap();
    let other = Timeline::new();
    queue.wait(&TimelinePoint::new(&other, 1)).unwrap();
    let read = queue.download(buffer.whole()).unwrap();
    drop(buffer);
    other.advance(1);
    assert_eq!(read.wait(Some(Instant::now() + WATCHDOG)).unwrap(), [7; 64]);
}

/// A peer copy: the source's server dials the destination's server and sends it the data. Links use the same transport as
/// clients.
#[test]
fn a_link_between_servers_works_for_any_split_and_delay_of_its_bytes() {
    for seed in 0..8 {
        let to = MemoryServer::start(LinkConditions { seed: 2000 + 100 * seed, cut_after: None });
        let config = Config::default().with_peers(vec![to.endpoint.parse().unwrap()]);
        let from = MemoryServer::with_config(LinkConditions { seed: 3000 + 100 * seed, cut_after: None }, config);
        let options = Options::default().with_connect_timeout(WATCHDOG).with_silence_timeout(WATCHDOG);
        let endpoints = [&from, &to].map(|server| Endpoint::connect(&server.endpoint, &options).unwrap());
        let [source, destination] = endpoints.each_ref().map(|endpoint| &endpoint.devices()[0]);
        assert!(destination.copies_from(source.info()), "seed {seed}: the source's server cannot dial {}", to.endpoint);
        let (budget, until) = (MemoryBudget::new(1 << 30), Some(Instant::now() + WATCHDOG));
        let [mut out, mut queue] = [source, destination].map(|device| device.queue(&budget).unwrap());
        for len in [1, 4096, 600_000] {
            let data = noise(seed, len);
            let [src, dst] = [source, destination].map(|device| device.alloc(len as u64, &budget).unwrap());
            out.upload(src.whole(), None, UploadSource::Borrowed(&data)).unwrap();
            let after = out.mark();
            assert!(queue.copy_from(src.whole(), dst.whole(), Some(&after)).unwrap().is_submitted());
            assert!(queue.download(dst.whole()).unwrap().wait(until).unwrap() == data, "seed {seed}: {len} bytes");
        }
        // The connection of the client, and the peer connection from the source's server.
        assert_eq!(to.handle.connections(), 2, "seed {seed}");
    }
}

/// A client that is written by hand sends messages of 7.0 over the split and delayed stream.
#[test]
fn a_server_of_7_0_works_for_any_split_and_delay_of_its_bytes() {
    for seed in 0..8 {
        let server = MemoryServer::start(LinkConditions { seed: 1000 + 100 * seed, cut_after: None });
        let deadline = Deadline::after(WATCHDOG);
        let (_, connection) = dial(&resolve(&server.endpoint).unwrap(), &deadline).unwrap();
        let (mut receiver, mut sender) = connection.split();
        let mut request_reply = |request: &Request<'_>, reply: usize| {
            let mut out = Vec::new();
            request.encode(&mut out);
            sender.write_all(&[&out], WATCHDOG).unwrap();
            let mut bytes = vec![0; reply];
            receiver.read_exact(&mut bytes, &deadline).unwrap();
            bytes
        };
        request_reply(&Request::Hello(Hello { conn_caps: Some([0; 24]) }), RESPONSE_HEADER + 28);
        let made = request_reply(&Request::AllocBuffer(AllocBuffer { device: 0, size: 1 << 20 }), RESPONSE_HEADER + 16);
        let handle = u64::from_le_bytes(made[8..16].try_into().unwrap());
        let base = request_reply(&Request::BufferGetBase(BufferGetBase { remote_ptr: handle }), RESPONSE_HEADER + 8);
        let base = u64::from_le_bytes(base[8..].try_into().unwrap());
        for (n, len) in [1, 100, 70_000, 1 << 20].into_iter().enumerate() {
            let data = noise(n as u64, len);
            let mut tensor = TensorRecord::decode(&[0; TENSOR_RECORD]);
            (tensor.buffer, tensor.data, tensor.dtype) = (handle, base, DType::I8.to_wire());
            (tensor.ne, tensor.nb) = ([len as u32, 1, 1, 1], [1, len as u32, len as u32, len as u32]);
            let head = SetTensorHead { tensor: tensor.clone(), cache: false, offset: 0 };
            request_reply(&Request::SetTensor(SetTensor { head, data: &data }), 0);
            let get = GetTensor { tensor, offset: 0, size: len as u64 };
            assert!(request_reply(&Request::GetTensor(get), RESPONSE_HEADER + len)[RESPONSE_HEADER..] == data);
        }
    }
}

/// A server whose clients have the address 10.0.0.5.
fn server_with_remote_clients(config: Config) -> MemoryServer {
    let client = SocketAddr::from(([10, 0, 0, 5], 40_000));
    MemoryServer::with_clients_at(Some(client), LinkConditions { seed: 1, cut_after: None }, config)
}

/// Connects to a server. Tries again for up to `retry` while the server is full.
fn connect(server: &MemoryServer, retry: Duration) -> Result<Endpoint, ConnectError> {
    let options = Options::default().with_connect_timeout(WATCHDOG).with_silence_timeout(WATCHDOG).with_retry(retry);
    Endpoint::connect(&server.endpoint, &options)
}

#[test]
fn connections_of_one_address_beyond_its_limit_receive_full() {
    let server = server_with_remote_clients(Config::default().with_max_connections_per_address(2));
    let mut clients: Vec<_> = (0..2).map(|_| connect(&server, Duration::ZERO).unwrap()).collect();
    for _ in 0..3 {
        let refused = connect(&server, Duration::ZERO).map(drop).unwrap_err();
        assert!(matches!(refused, ConnectError::Full { .. }), "{refused}");
    }
    clients.truncate(1);
    connect(&server, WATCHDOG).unwrap();
}

/// One handshake per address: a client that sends no HELLO is closed for the next one, and a client with a HELLO is not.
#[test]
fn an_address_has_a_quarter_of_the_handshakes() {
    let server = server_with_remote_clients(Config::default().with_max_handshakes(4));
    let _clients = [0, 1].map(|_| connect(&server, Duration::ZERO).unwrap());
    let deadline = Deadline::after(WATCHDOG);
    let dial = || dial(&resolve(&server.endpoint).unwrap(), &deadline).unwrap().1;
    let (mut receiver, _sender) = dial().split();
    let clients = [0, 1].map(|_| connect(&server, Duration::ZERO).unwrap());
    assert_eq!(receiver.read_into(&mut [0], &deadline).unwrap(), 0, "closed without a reply");
    assert!(clients.iter().all(|client| client.devices()[0].memory().is_ok()));
}

#[test]
fn the_clients_of_one_address_share_its_memory() {
    let server = server_with_remote_clients(Config::default().with_max_memory_per_address(Some(1000 << 10)));
    let clients = [0, 1].map(|_| connect(&server, Duration::ZERO).unwrap());
    let budget = MemoryBudget::new(1 << 30);
    let [first, second] = clients.each_ref().map(|client| &client.devices()[0]);
    let _held = first.alloc(600 << 10, &budget).unwrap();
    let refused = second.alloc(600 << 10, &budget).unwrap_err();
    assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
    assert_eq!(second.memory().unwrap().free, 400 << 10);
    second.alloc(400 << 10, &budget).unwrap();
}

#[test]
fn a_queue_beyond_the_limit_of_its_address_fails_and_the_session_goes_on() {
    let server = server_with_remote_clients(Config::default().with_max_queues(4));
    let clients = [0, 1].map(|_| connect(&server, Duration::ZERO).unwrap());
    let (budget, until) = (MemoryBudget::new(1 << 30), Some(Instant::now() + WATCHDOG));
    let mut queues = Vec::new();
    let mut use_queue = |client: &Endpoint| {
        let device = &client.devices()[0];
        let buffer = device.alloc(64, &budget)?;
        // Kept, so that the queue stays open.
        queues.push(device.queue(&budget)?);
        let queue = queues.last_mut().unwrap();
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&[7; 64]))?;
        queue.download(buffer.whole())?.wait(until)
    };
    assert_eq!(use_queue(&clients[0]).unwrap(), [7; 64]);
    let failed = use_queue(&clients[1]).unwrap_err();
    assert!(
        failed.to_string().contains("already 1 queues, a quarter of the limit (max-queues in --limits)"),
        "{failed}"
    );
    assert!(clients.iter().all(|client| client.devices()[0].memory().is_ok()));
}
