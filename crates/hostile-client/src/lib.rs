//! A hostile client of a fanout server: it sends sequences of messages, most of them valid, some of them corrupted. Input bytes
//! determine each choice, so a fuzzer can drive the client.
//!
//! Start with [`Target`] in this file; `extended.rs` has the messages of the extensions. Not here: mutated graphs in process
//! (`tests/hostile`). The fuzz target `session` (`fuzz/`) and a seeded test (`tests/sessions.rs` of this crate) call
//! [`Target::attack`].

mod extended;

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::Device;
use fanout::ops::OpCode;
use fanout::rpc::server::{Config, ServedVersion, Server};
use fanout::rpc::wire::*;
use fanout::tensor::{DType, TensorDesc};
use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Once};
use std::time::{Duration, Instant};

/// Upper limit of an attack; an attack that exceeds it has hung the server.
const WATCHDOG: Duration = Duration::from_secs(60);

/// Limit of the device memory of a session, and of a buffer of the attacker, in bytes.
const SESSION_MEMORY: u64 = 4 << 20;
const MAX_BUFFER_BYTES: u64 = 1 << 16;

/// Address of the first buffer of a session on the server, alignment of buffers, and guard bytes after each. The attacker
/// predicts addresses from these.
const FIRST_BASE: u64 = 1 << 44;
const PAGE: u64 = 4096;
const GUARD: u64 = 1 << 16;

/// Whether any thread of the process has panicked. The server catches its own panics and only logs them.
static PANICKED: AtomicBool = AtomicBool::new(false);

/// The attacked server, in this process, and a well-behaved client. The results of that client show whether an attack damaged
/// the server.
pub struct Target {
    addr: SocketAddr,
    devices: Vec<Arc<dyn Device>>,
    bystander: BystanderClient,
}

impl Target {
    /// Starts the server on a free port.
    #[allow(clippy::new_without_default)] // starts threads, so it is no default value
    pub fn new() -> Target {
        static ONCE: Once = Once::new();
        ONCE.call_once(|| {
            let report = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                PANICKED.store(true, Ordering::SeqCst);
                report(info);
            }));
        });
        let device = |k| CpuDevice::new(k, 2, MathMode::Fast, 64 << 20).expect("a device") as Arc<dyn Device>;
        let devices = vec![device("CPU0"), device("CPU1")];
        // The attacker sends messages of 7.0.
        let config = Config::default().with_protocol(vec![ServedVersion::V7_0]).with_max_memory(Some(SESSION_MEMORY));
        let server = Server::bind("127.0.0.1", 0, devices.clone(), config).expect("a free port");
        let addr = server.local_addr();
        // The server runs until the process ends.
        std::thread::spawn(move || server.run());
        let bystander = BystanderClient::open(addr);
        Target { addr, devices, bystander }
    }

    /// Runs one session of the attacker, with choices from `bytes`, and then checks the results of the well-behaved client.
    /// Returns the number of bytes in the server's replies.
    ///
    /// # Panics
    /// If the server neither replies nor closes the connection, panics, or sends wrong results to the well-behaved client.
    pub fn attack(&mut self, bytes: &[u8]) -> usize {
        let stream = Attacker::new(bytes).message_stream();
        let mut socket = connect(self.addr);
        let mut writer = socket.try_clone().expect("a live socket");
        let total = std::thread::scope(|scope| {
            scope.spawn(move || {
                // Fails if the server closes the connection earlier.
                let _ = writer.write_all(&stream);
                let _ = writer.shutdown(Shutdown::Write);
            });
            let (mut reply, mut total) = (vec![0; 1 << 16], 0);
            loop {
                match socket.read(&mut reply) {
                    Ok(0) => return total,
                    Ok(n) => total += n,
                    Err(e) if e.kind() == std::io::ErrorKind::ConnectionReset => return total,
                    Err(e) => panic!("the server neither replies nor closes the connection, after {total} bytes: {e}"),
                }
            }
        });
        self.bystander.check_results();
        assert!(!PANICKED.load(Ordering::SeqCst), "the server has panicked");
        total
    }

    /// Waits until the server has freed all memory of its devices.
    ///
    /// # Panics
    /// If some memory is still in use after the time limit.
    pub fn wait_until_freed(self) {
        drop(self.bystander);
        let until = Instant::now() + WATCHDOG;
        let used =
            || self.devices.iter().map(|d| d.memory().map_or(0, |m| m.total.saturating_sub(m.free))).sum::<u64>();
        while used() > 0 {
            assert!(Instant::now() < until, "{} bytes are still in use", used());
            std::thread::yield_now();
        }
    }
}

fn connect(addr: SocketAddr) -> TcpStream {
    let stream = TcpStream::connect(addr).expect("a connection");
    stream.set_read_timeout(Some(WATCHDOG)).expect("a live socket");
    stream.set_write_timeout(Some(WATCHDOG)).expect("a live socket");
    stream.set_nodelay(true).expect("a live socket");
    stream
}

fn encode(request: &Request<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    bytes
}

fn hello() -> Vec<u8> {
    encode(&Request::Hello(Hello { conn_caps: Some([0; 24]) }))
}

/// The encoded GRAPH_COMPUTE of a graph.
fn graph(device: u32, nodes: &[u64], tensors: &[TensorRecord]) -> Vec<u8> {
    let nodes: Vec<_> = nodes.iter().map(|id| id.to_le_bytes()).collect();
    let tensors: Vec<_> = tensors.iter().map(TensorRecord::encode).collect();
    encode(&Request::GraphCompute(GraphCompute::new(device, &nodes, &tensors).expect("few enough")))
}

fn record(id: u64, buffer: u64, data: u64, dtype: DType, ne: [u32; 4]) -> TensorRecord {
    let nb = TensorDesc::default_strides(dtype, ne.map(|n| n as usize)).unwrap_or([0; 4]);
    let zero = TensorRecord::decode(&[0; TENSOR_RECORD]);
    TensorRecord { id, dtype: dtype.to_wire(), buffer, ne, nb: nb.map(|n| n as u32), data, ..zero }
}

fn node(mut dst: TensorRecord, op: OpCode, srcs: &[u64]) -> TensorRecord {
    (dst.op, dst.flags) = (op.to_wire(), TensorRecord::FLAG_COMPUTE);
    dst.src[..srcs.len()].copy_from_slice(srcs);
    dst
}

/// The well-behaved client: adds two vectors and checks the sum, again and again.
struct BystanderClient {
    stream: TcpStream,
    handle: u64,
    base: u64,
    round: u32,
}

impl BystanderClient {
    fn open(addr: SocketAddr) -> BystanderClient {
        let mut client = BystanderClient { stream: connect(addr), handle: 0, base: 0, round: 0 };
        client.request(&hello(), 28);
        let made = client.request(&encode(&Request::AllocBuffer(AllocBuffer { device: 0, size: PAGE })), 16);
        client.handle = u64::from_le_bytes(*made.first_chunk().expect("16 bytes"));
        let base = client.request(&encode(&Request::BufferGetBase(BufferGetBase { remote_ptr: client.handle })), 8);
        client.base = u64::from_le_bytes(*base.first_chunk().expect("8 bytes"));
        assert_eq!((client.handle, client.base), (1, FIRST_BASE), "attackers rely on the same values");
        client
    }

    /// Sends requests, and returns the `n` bytes of the reply.
    fn request(&mut self, request: &[u8], n: usize) -> Vec<u8> {
        self.stream.write_all(request).expect("the server reads");
        let mut reply = vec![0; RESPONSE_HEADER + n];
        self.stream.read_exact(&mut reply).expect("the server replies");
        reply.split_off(RESPONSE_HEADER)
    }

    fn check_results(&mut self) {
        self.round += 1;
        let (x, ne) = (self.round as f32, [16, 1, 1, 1]);
        let tensor = |id: u64| record(id, self.handle, self.base + 64 * id, DType::F32, ne);
        let (a, b, c) = (tensor(1), tensor(2), node(tensor(3), OpCode::Add, &[1, 2]));
        let set = |tensor: &TensorRecord, data: &[u8]| {
            let head = SetTensorHead { tensor: tensor.clone(), cache: false, offset: 0 };
            encode(&Request::SetTensor(SetTensor { head, data }))
        };
        let bytes = x.to_le_bytes().repeat(16);
        let get = encode(&Request::GetTensor(GetTensor { tensor: c.clone(), offset: 0, size: 64 }));
        let all = [set(&a, &bytes), set(&b, &bytes), graph(0, &[3], &[a, b, c]), get].concat();
        assert_eq!(self.request(&all, 64), (2.0 * x).to_le_bytes().repeat(16));
    }
}

/// Source of choices: the input bytes, then zeros.
struct Choices<'a>(&'a [u8]);

impl Choices<'_> {
    fn byte(&mut self) -> u8 {
        let Some((&first, rest)) = self.0.split_first() else { return 0 };
        self.0 = rest;
        first
    }

    fn below(&mut self, n: usize) -> usize {
        usize::from(u16::from_le_bytes([self.byte(), if n > 256 { self.byte() } else { 0 }])) % n.max(1)
    }

    fn word(&mut self) -> u64 {
        u64::from_le_bytes(std::array::from_fn(|_| self.byte()))
    }

    /// A number that tends to overflow, or any number.
    fn extreme(&mut self) -> u64 {
        let all =
            [0, 1, 2, 4095, 4097, 1 << 16, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, 1 << 63, u64::MAX - 7, u64::MAX];
        match self.below(16) {
            k if k < all.len() => all[k],
            _ => self.word(),
        }
    }

    fn one_in(&mut self, n: u8) -> bool {
        self.byte() % n == n - 1
    }
}

struct Attacker<'a> {
    choices: Choices<'a>,
    /// Handle, address and size of each buffer, as predicted from the allocations so far.
    buffers: Vec<(u64, u64, u64)>,
    handles: u64,
    base: u64,
    used: u64,
    /// Remaining messages that stay valid, so that the later invalid ones hit a session with buffers and graphs.
    valid_left: usize,
    /// Whether device 0 should have a last graph.
    computed: bool,
    extended: extended::ExtendedState,
}

impl Attacker<'_> {
    fn new(bytes: &[u8]) -> Attacker<'_> {
        let (mut choices, base) = (Choices(bytes), FIRST_BASE);
        let valid_messages = choices.below(40);
        Attacker {
            choices,
            buffers: Vec::new(),
            handles: 0,
            base,
            used: 0,
            valid_left: valid_messages,
            computed: false,
            extended: extended::ExtendedState::default(),
        }
    }

    /// Chooses whether to make an error here: never while messages must be valid, else once in `n` times.
    fn is_invalid_here(&mut self, n: u8) -> bool {
        self.valid_left == 0 && self.choices.one_in(n)
    }

    /// Generates all messages of the session.
    fn message_stream(mut self) -> Vec<u8> {
        let extended = self.choices.one_in(2);
        let mut stream = if self.is_invalid_here(16) { Vec::new() } else { hello() };
        if extended {
            stream.extend(extended::opening_messages());
        }
        for _ in 0..64 {
            if self.choices.0.is_empty() {
                break;
            }
            let mut message = if extended { self.extended_message() } else { self.message() };
            if self.is_invalid_here(12) {
                self.corrupt(&mut message);
            }
            stream.extend(message);
            self.valid_left = self.valid_left.saturating_sub(1);
        }
        stream
    }

    fn message(&mut self) -> Vec<u8> {
        if self.buffers.is_empty() {
            return self.alloc();
        }
        let device = if self.is_invalid_here(24) { self.choices.extreme() as u32 } else { 0 };
        let remote_ptr = self.buffer().0;
        let (srcs, data) = ([[1; TENSOR_RECORD]; MAX_SRC], [7; 300]);
        match self.choices.below(24) {
            0..2 => self.alloc(),
            2..8 => self.graph(),
            8 if self.computed || self.is_invalid_here(4) => {
                encode(&Request::GraphRecompute(GraphRecompute { device, uid: None }))
            }
            9..11 => {
                let (tensor, offset, n) = (self.tensor(1), self.small_number(), self.choices.below(300));
                let head = SetTensorHead { tensor, cache: self.choices.one_in(2), offset };
                encode(&Request::SetTensor(SetTensor { head, data: &data[..n] }))
            }
            11..13 => {
                let (tensor, offset, size) = (self.tensor(1), self.small_number(), self.small_number());
                encode(&Request::GetTensor(GetTensor { tensor, offset, size }))
            }
            13 => {
                let (src, dst) = (self.tensor(1), self.tensor(2));
                encode(&Request::CopyTensor(CopyTensor { src, dst }))
            }
            14 => {
                let (tensor, offset, size) = (self.tensor(1), self.small_number(), self.small_number());
                encode(&Request::MemsetTensor(MemsetTensor { tensor, offset, size, value: self.choices.byte() }))
            }
            15 => encode(&Request::BufferClear(BufferClear { remote_ptr, value: self.choices.byte() })),
            16 => {
                self.computed = false;
                self.buffers.retain(|b| b.0 != remote_ptr);
                encode(&Request::FreeBuffer(FreeBuffer { remote_ptr }))
            }
            17 => encode(&Request::InitTensor(InitTensor { tensor: self.tensor(1) })),
            18 => encode(&Request::GetAllocSize(GetAllocSize { device, tensor: self.tensor(1), srcs: &srcs })),
            19 => {
                let (tensor, offset, hash) = (self.tensor(1), self.small_number(), self.choices.word());
                encode(&Request::SetTensorHash(SetTensorHash { tensor, offset, hash }))
            }
            20 => encode(&Request::GetDeviceMemory(GetDeviceMemory { device })),
            21 => encode(&Request::BufferGetBase(BufferGetBase { remote_ptr })),
            22 => [
                encode(&Request::DeviceCount(DeviceCount {})),
                encode(&Request::GetAlignment(GetAlignment { device })),
                encode(&Request::GetMaxSize(GetMaxSize { device })),
            ]
            .concat(),
            23 if self.is_invalid_here(2) => {
                let command = RpcCommand::ALL[self.choices.below(RpcCommand::ALL.len())];
                RequestHeader { command, size: self.choices.extreme() }.encode().to_vec()
            }
            _ => encode(&Request::GetMaxSize(GetMaxSize { device })),
        }
    }

    fn alloc(&mut self) -> Vec<u8> {
        let odd = self.is_invalid_here(3);
        let size = match self.choices.below(4) {
            0 if odd => self.choices.extreme(),
            1 if odd => self.choices.below(5000) as u64,
            2 if odd => 0,
            k => (2 * PAGE) << k,
        };
        if size <= MAX_BUFFER_BYTES && self.used + size <= SESSION_MEMORY {
            self.handles += 1;
            self.buffers.push((self.handles, self.base, size));
            self.used += size;
            self.base = (self.base + size + GUARD).next_multiple_of(PAGE);
        }
        let device = u32::from(self.is_invalid_here(16));
        encode(&Request::AllocBuffer(AllocBuffer {
            device,
            size: if size > MAX_BUFFER_BYTES { u64::MAX - size } else { size },
        }))
    }

    /// Handle, address and size of a buffer; sometimes invalid ones.
    fn buffer(&mut self) -> (u64, u64, u64) {
        if self.is_invalid_here(40) {
            return (self.choices.extreme(), self.choices.extreme(), PAGE);
        }
        let k = self.choices.below(self.buffers.len());
        self.buffers.get(k).copied().unwrap_or((1, FIRST_BASE, PAGE))
    }

    fn small_number(&mut self) -> u64 {
        if self.is_invalid_here(24) { self.choices.extreme() } else { self.choices.below(64) as u64 }
    }

    /// A tensor record, mostly of a tensor within a buffer.
    fn tensor(&mut self, id: u64) -> TensorRecord {
        let (handle, base, size) = self.buffer();
        let types = [DType::F32, DType::F32, DType::F32, DType::F16, DType::I32, DType::Q8_0, DType::Q4_K];
        let dtype = types[self.choices.below(if self.valid_left > 0 { 3 } else { types.len() })];
        let n = [1, 2, 4, 8][self.choices.below(4)];
        let n = if dtype.is_block() { dtype.block_len() as u32 } else { n };
        let ne = [n, 1 + self.choices.below(3) as u32, 1 + self.choices.below(12) as u32 / 11, 1];
        let offset = 64 * self.choices.below(48) as u64;
        let mut tensor = record(id, handle, base.wrapping_add(offset.min(size)), dtype, ne);
        if !self.is_invalid_here(8) {
            return tensor;
        }
        match self.choices.below(6) {
            0 => tensor.ne[self.choices.below(4)] = self.choices.extreme() as u32,
            1 => tensor.nb[self.choices.below(4)] = self.choices.extreme() as u32,
            2 => tensor.dtype = self.choices.extreme() as u32,
            3 => tensor.data = self.choices.extreme(),
            4 => tensor.id = self.choices.extreme(),
            _ => {}
        }
        tensor
    }

    /// A graph of a few nodes. Its tensors mostly have the same buffer and shape.
    fn graph(&mut self) -> Vec<u8> {
        let mut tensors = vec![self.tensor(1)];
        let like = tensors[0].clone();
        let mut listed = Vec::new();
        let simple = [OpCode::Add, OpCode::Mul, OpCode::Sqr, OpCode::Scale, OpCode::SoftMax, OpCode::Cont];
        let ops: Vec<_> = OpCode::ALL.iter().filter(|op| op.stem().is_some_and(|stem| stem != "view")).collect();
        for id in 2..4 + self.choices.below(4) as u64 {
            let mut tensor =
                if self.is_invalid_here(6) { self.tensor(id) } else { TensorRecord { id, ..like.clone() } };
            tensor.data = like.data.wrapping_add(512 * id);
            if self.choices.one_in(3) {
                tensors.push(tensor);
                continue;
            }
            let any = self.is_invalid_here(4);
            let op = if any { *ops[self.choices.below(ops.len())] } else { simple[self.choices.below(6)] };
            let source = |me: &mut Self| 1 + me.choices.below(id as usize - 1) as u64;
            let srcs = [source(self), source(self), source(self)];
            let two = matches!(op, OpCode::Add | OpCode::Mul);
            let count = if any { self.choices.below(4) } else { 1 + usize::from(two) };
            let mut dst = node(tensor, op, &srcs[..count]);
            if self.is_invalid_here(8) {
                dst.op_params[self.choices.below(16)] = self.choices.extreme() as i32;
            }
            tensors.push(dst);
            listed.push(id);
        }
        self.computed = true;
        graph(0, &listed, &tensors)
    }

    /// Corrupts an encoded message.
    fn corrupt(&mut self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        let at = self.choices.below(bytes.len());
        match self.choices.below(6) {
            0 => bytes.truncate(at),
            1 => bytes.insert(at, self.choices.byte()),
            2 => bytes[at] ^= 1 << self.choices.below(8),
            3 => bytes[at] = self.choices.byte(),
            4 => {
                for (byte, new) in bytes[at..].iter_mut().zip(self.choices.extreme().to_le_bytes()) {
                    *byte = new;
                }
            }
            _ => bytes[0] = self.choices.byte(),
        }
    }
}
