//! Test support for protocol 7.0: a server in this process, a client that can send arbitrary bytes, and the captured log.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::Device;
use fanout::ops::OpCode;
use fanout::rpc::server::{Config, Ended, ListenAddress, ListenerInfo, ServedVersion, Server, ServerHandle};
use fanout::rpc::wire::ext::{ExtensionOffer, REVISION, ServerState};
use fanout::rpc::wire::*;
use fanout::tensor::{DType, TensorDesc};
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, Once};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Upper bound of every wait. No correct run takes this long, so a test that reaches it has failed.
pub(crate) const WATCHDOG: Duration = Duration::from_secs(30);

/// Memory of a test device in bytes: small, so that the free memory does not depend on the machine.
pub(crate) const MEMORY: u64 = 256 << 20;

/// Version of the protocol in which [`Client`] sends its requests.
pub(crate) const CLIENT_VERSION: Version = Version { major: 7, minor: 0, patch: 0 };

/// A timeout that a test lets expire.
pub(crate) const SHORT_TIMEOUT: Duration = Duration::from_millis(100);

/// A server on a thread of this process. Dropping it shuts it down.
pub(crate) struct TestServer {
    pub(crate) addr: SocketAddr,
    /// All addresses, `addr` first.
    pub(crate) listeners: Vec<ListenerInfo>,
    pub(crate) devices: Vec<Arc<dyn Device>>,
    pub(crate) handle: ServerHandle,
    thread: Option<JoinHandle<Ended>>,
}

impl TestServer {
    pub(crate) fn start(config: Config) -> TestServer {
        TestServer::with_devices(1, config)
    }

    pub(crate) fn with_devices(count: usize, config: Config) -> TestServer {
        TestServer::with_device_list((0..count).map(cpu_device).collect(), config)
    }

    /// A server that answers [`CLIENT_VERSION`], unless `config` has another order of versions than the default one.
    pub(crate) fn with_device_list(devices: Vec<Arc<dyn Device>>, mut config: Config) -> TestServer {
        if config.protocol == Config::default().protocol {
            config.protocol = vec![ServedVersion::V7_0];
        }
        TestServer::run(&[ListenAddress::new("127.0.0.1", 0)], devices, config)
    }

    /// A server of one device that listens on several addresses, with the versions of `config`.
    pub(crate) fn with_listeners(addresses: &[&str], config: Config) -> TestServer {
        let addresses: Vec<_> = addresses.iter().map(|text| text.parse().expect("an address")).collect();
        TestServer::run(&addresses, vec![cpu_device(0)], config)
    }

    /// Logs all lines, unless `config` has another limit of them than the default one: tests cause many lines from loopback.
    pub(crate) fn run(addresses: &[ListenAddress], devices: Vec<Arc<dyn Device>>, mut config: Config) -> TestServer {
        capture_log();
        if config.log_burst == Config::default().log_burst {
            config.log_burst = u32::MAX;
        }
        let server = Server::bind_all(addresses, devices.clone(), config).expect("free ports");
        let (addr, listeners, handle) = (server.local_addr(), server.listeners(), server.handle());
        let thread = std::thread::spawn(move || server.run());
        TestServer { addr, listeners, devices, handle, thread: Some(thread) }
    }

    /// Bytes in use on a device.
    pub(crate) fn used_bytes(&self, device: usize) -> u64 {
        let memory = self.devices[device].memory().expect("memory");
        memory.total - memory.free
    }

    /// Waits until the server has ended by itself.
    pub(crate) fn wait_until_ended(&mut self) -> Ended {
        self.thread.take().expect("it runs").join().expect("the server thread ends without a panic")
    }

    /// Shuts the server down and joins its thread.
    pub(crate) fn stop(&mut self) {
        self.handle.shutdown();
        if let Some(thread) = self.thread.take() {
            thread.join().expect("the server thread ends without a panic");
        }
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.stop();
        }
    }
}

pub(crate) fn cpu_device(number: usize) -> Arc<dyn Device> {
    CpuDevice::new(&format!("CPU{number}"), 2, MathMode::Exact, MEMORY).expect("a device")
}

/// Polls until a condition holds that another thread establishes. Fails the test after [`WATCHDOG`].
#[track_caller]
pub(crate) fn eventually(what: &str, mut so: impl FnMut() -> bool) {
    let until = Instant::now() + WATCHDOG;
    while !so() {
        assert!(Instant::now() < until, "not within {WATCHDOG:?}: {what}");
        std::thread::yield_now();
    }
}

/// A client of protocol 7.0: methods send valid requests, and `stream` sends arbitrary bytes.
pub(crate) struct Client {
    pub(crate) stream: TcpStream,
    pub(crate) addr: SocketAddr,
    since: Instant,
    /// Bytes that the methods have written and read.
    counted: [u64; 2],
}

impl Client {
    /// A connection without HELLO.
    pub(crate) fn connect_without_hello(server: &TestServer) -> Client {
        Client::connect_from([127, 0, 0, 1], server.addr)
    }

    /// A connection without HELLO, from an address of this machine to one of a server.
    pub(crate) fn connect_from(client: [u8; 4], server: SocketAddr) -> Client {
        // Tests search the log by the client's port. Binding before connecting reserves a port that no other open client uses.
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).expect("a socket");
        socket.bind(&SocketAddr::from((client, 0)).into()).expect("a port");
        let since = Instant::now();
        socket.connect(&server.into()).expect("a connection");
        let stream = TcpStream::from(socket);
        stream.set_nodelay(true).expect("a live socket");
        stream.set_read_timeout(Some(WATCHDOG)).expect("a live socket");
        let addr = stream.local_addr().expect("bound");
        Client { stream, addr, since, counted: [0; 2] }
    }

    /// A connection that has exchanged HELLO with a server that answers [`CLIENT_VERSION`].
    pub(crate) fn connect(server: &TestServer) -> Client {
        Client::connect_as(server, CLIENT_VERSION)
    }

    /// A connection that has exchanged HELLO with a server that answers `version`.
    pub(crate) fn connect_as(server: &TestServer, version: Version) -> Client {
        Client::connect_without_hello(server).exchange_hello(version)
    }

    /// Exchanges HELLO with a server that answers `version`.
    pub(crate) fn exchange_hello(mut self, version: Version) -> Client {
        self.send(&hello_request());
        let reply = self.read_reply(RpcCommand::Hello);
        let offer = ExtensionOffer { revision: REVISION, state: ServerState::Ready }.to_byte();
        let want = Response::Hello(HelloReply { version, conn_caps: Some([0; 24]), extension_byte: offer });
        assert_eq!(Response::decode(RpcCommand::Hello, &reply), Ok(want));
        self
    }

    pub(crate) fn send(&mut self, request: &Request<'_>) {
        self.write(&encode_message(request));
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).expect("the server accepts the bytes");
        self.counted[0] += bytes.len() as u64;
    }

    /// Bytes that were sent and received, by the methods of this client.
    pub(crate) fn counted_bytes(&self) -> [u64; 2] {
        self.counted
    }

    /// The body of the next reply.
    pub(crate) fn read_reply(&mut self, command: RpcCommand) -> Vec<u8> {
        let mut header = [0; RESPONSE_HEADER];
        self.stream.read_exact(&mut header).unwrap_or_else(|e| panic!("no reply to {command}: {e}"));
        let size = ResponseHeader::decode(&header).size;
        let mut body = vec![0; command.response_size(size, MEMORY).expect("a reply of the right size")];
        self.stream.read_exact(&mut body).expect("a whole reply");
        self.counted[1] += (header.len() + body.len()) as u64;
        body
    }

    /// Sends a request and returns the number in its reply.
    pub(crate) fn request_number(&mut self, request: &Request<'_>) -> u64 {
        self.send(request);
        let mut bytes = self.read_reply(request.command());
        bytes.resize(8, 0);
        u64::from_le_bytes(bytes.try_into().expect("8 bytes"))
    }

    /// Asserts that the connection is open. The server handles requests in order, so it has accepted all earlier requests.
    #[track_caller]
    pub(crate) fn assert_alive(&mut self) {
        assert!(self.request_number(&Request::DeviceCount(DeviceCount {})) > 0);
    }

    pub(crate) fn try_alloc(&mut self, device: u32, size: u64) -> AllocBufferReply {
        self.send(&Request::AllocBuffer(AllocBuffer { device, size }));
        let body = self.read_reply(RpcCommand::AllocBuffer);
        match Response::decode(RpcCommand::AllocBuffer, &body) {
            Ok(Response::AllocBuffer(reply)) => reply,
            other => panic!("{other:?}"),
        }
    }

    /// Allocates a buffer and requests its base address.
    pub(crate) fn alloc(&mut self, device: u32, size: u64) -> ClientBuffer {
        let reply = self.try_alloc(device, size);
        assert!(reply.remote_ptr != 0 && reply.remote_size >= size, "{reply:?}");
        let base = self.request_number(&Request::BufferGetBase(BufferGetBase { remote_ptr: reply.remote_ptr }));
        ClientBuffer { handle: reply.remote_ptr, base, size }
    }

    pub(crate) fn free(&mut self, memory: &ClientBuffer) {
        self.send(&Request::FreeBuffer(FreeBuffer { remote_ptr: memory.handle }));
    }

    pub(crate) fn set_tensor(&mut self, tensor: &TensorRecord, offset: u64, data: &[u8]) {
        let head = SetTensorHead { tensor: tensor.clone(), cache: false, offset };
        self.send(&Request::SetTensor(SetTensor { head, data }));
    }

    pub(crate) fn get_tensor(&mut self, tensor: &TensorRecord, offset: u64, size: u64) -> Vec<u8> {
        self.send(&get_tensor_request(tensor, offset, size));
        let body = self.read_reply(RpcCommand::GetTensor);
        assert_eq!(body.len() as u64, size);
        body
    }

    pub(crate) fn set_floats(&mut self, tensor: &TensorRecord, values: &[f32]) {
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.set_tensor(tensor, 0, &bytes);
    }

    pub(crate) fn get_floats(&mut self, tensor: &TensorRecord) -> Vec<f32> {
        let n = tensor.ne.iter().product::<u32>();
        let bytes = self.get_tensor(tensor, 0, u64::from(n) * 4);
        bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    }

    pub(crate) fn compute_graph(&mut self, device: u32, nodes: &[u64], tensors: &[TensorRecord]) {
        let body = graph_compute_message(device, nodes, tensors);
        self.write(&body);
    }

    /// Shuts down the writing side of the socket, as the kernel does for a killed client.
    pub(crate) fn shutdown_write(&self) {
        self.stream.shutdown(Shutdown::Write).expect("a live socket");
    }

    /// Asserts that the server closes the connection without another reply.
    #[track_caller]
    pub(crate) fn expect_closed(&mut self) {
        let closed = self.wait_closed();
        assert!(closed.is_ok(), "expected the connection to be closed: {closed:?}");
    }

    /// Waits until the server has closed the connection, without a byte before it.
    pub(crate) fn wait_closed(&mut self) -> Result<(), String> {
        let mut byte = [0];
        match self.stream.read(&mut byte) {
            Ok(0) => Ok(()),
            Err(e) if e.kind() == ErrorKind::ConnectionReset => Ok(()),
            other => Err(format!("{other:?} {byte:?}")),
        }
    }

    /// Asserts that the server closed the connection and logged exactly one warning, which contains `parts`.
    #[track_caller]
    pub(crate) fn expect_refused(mut self, parts: &[&str]) {
        let closed = self.wait_closed();
        assert!(closed.is_ok(), "expected the server to close the connection and log {parts:?}: {closed:?}");
        let lines = self.warnings();
        assert!(lines.len() == 1 && parts.iter().all(|p| lines[0].contains(p)), "expected {parts:?} in {lines:#?}");
    }

    /// The server's log lines about this client at level warn or error. Complete once the connection is closed.
    pub(crate) fn warnings(&self) -> Vec<String> {
        self.log_lines(Level::Error..=Level::Warn)
    }

    /// As [`Client::warnings`], at level info.
    pub(crate) fn infos(&self) -> Vec<String> {
        self.log_lines(Level::Info..=Level::Info)
    }

    fn log_lines(&self, levels: RangeInclusive<Level>) -> Vec<String> {
        let start = format!("{}:", self.addr);
        let lines = LOG_LINES.lock().expect("the log");
        let ours =
            |line: &&LogLine| line.at >= self.since && line.text.starts_with(&start) && levels.contains(&line.level);
        lines.iter().filter(ours).map(|line| line.text.clone()).collect()
    }
}

/// A buffer of the server: its handle, base address and size.
#[derive(Clone, Debug)]
pub(crate) struct ClientBuffer {
    pub(crate) handle: u64,
    pub(crate) base: u64,
    pub(crate) size: u64,
}

impl ClientBuffer {
    /// A contiguous tensor at an offset of the buffer.
    pub(crate) fn tensor(&self, id: u64, dtype: DType, ne: [u32; 4], offset: u64) -> TensorRecord {
        let desc = TensorDesc::contiguous(dtype, ne.map(|n| n as usize)).expect("a tensor");
        TensorRecord {
            id,
            dtype: dtype.to_wire(),
            buffer: self.handle,
            ne,
            nb: desc.nb().map(|n| n as u32),
            data: self.base.wrapping_add(offset),
            ..zero_record()
        }
    }

    /// The whole buffer as an I8 tensor.
    pub(crate) fn byte_tensor(&self) -> TensorRecord {
        self.tensor(1, DType::I8, [self.size as u32, 1, 1, 1], 0)
    }

    /// A row of `n` floats at an offset of the buffer.
    pub(crate) fn float_tensor(&self, id: u64, n: u32, offset: u64) -> TensorRecord {
        self.tensor(id, DType::F32, [n, 1, 1, 1], offset)
    }
}

/// A tensor record with all bytes zero.
pub(crate) fn zero_record() -> TensorRecord {
    TensorRecord::decode(&[0; TENSOR_RECORD])
}

/// The record of a node that computes `op` of `srcs` into `dst`.
pub(crate) fn node(op: OpCode, mut dst: TensorRecord, srcs: &[&TensorRecord]) -> TensorRecord {
    (dst.op, dst.flags) = (op.to_wire(), TensorRecord::FLAG_COMPUTE);
    for (slot, src) in dst.src.iter_mut().zip(srcs) {
        *slot = src.id;
    }
    dst
}

pub(crate) fn hello_request() -> Request<'static> {
    Request::Hello(Hello { conn_caps: Some([0; 24]) })
}

pub(crate) fn get_tensor_request(tensor: &TensorRecord, offset: u64, size: u64) -> Request<'static> {
    Request::GetTensor(GetTensor { tensor: tensor.clone(), offset, size })
}

pub(crate) fn copy_tensor_request(src: &TensorRecord, dst: &TensorRecord) -> Request<'static> {
    Request::CopyTensor(CopyTensor { src: src.clone(), dst: dst.clone() })
}

pub(crate) fn encode_message(request: &Request<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    bytes
}

/// A GRAPH_COMPUTE message: header and body.
pub(crate) fn graph_compute_message(device: u32, nodes: &[u64], tensors: &[TensorRecord]) -> Vec<u8> {
    let nodes: Vec<_> = nodes.iter().map(|id| id.to_le_bytes()).collect();
    let tensors: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
    encode_message(&Request::GraphCompute(GraphCompute::new(device, &nodes, &tensors).expect("counts within u32")))
}

/// `n` random bytes from a seed.
pub(crate) fn random_bytes(seed: u64, n: usize) -> Vec<u8> {
    let mut bytes = vec![0; n];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// `n` random floats from a seed.
pub(crate) fn random_floats(seed: u64, n: usize) -> Vec<f32> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..n).map(|_| rng.f32() - 0.5).collect()
}

/// A line of the server's log, at level info or above.
struct LogLine {
    at: Instant,
    level: Level,
    text: String,
}

static LOG_LINES: Mutex<Vec<LogLine>> = Mutex::new(Vec::new());

struct LogCapture;

impl Log for LogCapture {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Info
    }

    fn log(&self, record: &Record<'_>) {
        if self.enabled(record.metadata()) {
            let line = LogLine { at: Instant::now(), level: record.level(), text: record.args().to_string() };
            LOG_LINES.lock().expect("the log").push(line);
        }
    }

    fn flush(&self) {}
}

pub(crate) fn capture_log() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        log::set_logger(&LogCapture).expect("the only logger");
        log::set_max_level(LevelFilter::Debug);
    });
}

/// The log lines that contain a text.
pub(crate) fn logged_lines(text: &str) -> Vec<String> {
    let lines = LOG_LINES.lock().expect("the log");
    lines.iter().filter(|line| line.text.contains(text)).map(|line| line.text.clone()).collect()
}

/// The log lines at level warn or error that contain a text.
pub(crate) fn logged_warnings(text: &str) -> Vec<String> {
    let lines = LOG_LINES.lock().expect("the log");
    let wanted = |line: &&LogLine| line.level <= Level::Warn && line.text.contains(text);
    lines.iter().filter(wanted).map(|line| line.text.clone()).collect()
}
