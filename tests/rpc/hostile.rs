//! Invalid messages of protocols 7.0 and 8.0: each closes only its own connection and logs exactly one line.

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::{Config, ServedVersion};
use fanout::rpc::wire::*;
use fanout::tensor::DType;

const VERSIONS: [ServedVersion; 2] = [ServedVersion::V7_0, ServedVersion::V8_0];

/// One well-formed request of every command of the version but HELLO.
fn requests(memory: &ClientBuffer, version: ServedVersion) -> Vec<(RpcCommand, Vec<u8>)> {
    let is_8 = version == ServedVersion::V8_0;
    let tensor = memory.byte_tensor();
    let head = SetTensorHead { tensor: tensor.clone(), cache: true, offset: 0 };
    let srcs = [[0; TENSOR_RECORD]; MAX_SRC];
    let remote_ptr = memory.handle;
    let (a, b) = (memory.float_tensor(1, 4, 0), memory.float_tensor(2, 4, 16));
    let sum = node(OpCode::Add, memory.float_tensor(3, 4, 32), &[&a, &b]);
    let requests = [
        Request::AllocBuffer(AllocBuffer { device: 0, size: 64 }),
        Request::GetAlignment(GetAlignment { device: 0 }),
        Request::GetMaxSize(GetMaxSize { device: 0 }),
        Request::BufferGetBase(BufferGetBase { remote_ptr }),
        Request::FreeBuffer(FreeBuffer { remote_ptr }),
        Request::BufferClear(BufferClear { remote_ptr, value: 1 }),
        Request::SetTensor(SetTensor { head, data: &[1; 64] }),
        Request::SetTensorHash(SetTensorHash { tensor: tensor.clone(), offset: 0, hash: 1 }),
        get_tensor_request(&tensor, 0, 64),
        copy_tensor_request(&a, &b),
        Request::GetDeviceMemory(GetDeviceMemory { device: 0 }),
        Request::InitTensor(InitTensor { tensor: tensor.clone() }),
        Request::GetAllocSize(GetAllocSize { device: 0, tensor: tensor.clone(), srcs: &srcs }),
        Request::DeviceCount(DeviceCount {}),
        Request::GraphRecompute(GraphRecompute { device: 0, uid: is_8.then_some(1) }),
        Request::MemsetTensor(MemsetTensor { tensor: tensor.clone(), offset: 0, size: 64, value: 1 }),
    ];
    let row_head = SetTensor2dHead { tensor: tensor.clone(), offset: 0, size: 4, n_copies: 4, stride: 8 };
    let added_in_8 = [
        Request::SetTensor2d(SetTensor2d { head: row_head, data: &[1; 16] }),
        Request::GetTensor2d(GetTensor2d { tensor: tensor.clone(), offset: 0, size: 4, n_copies: 4, stride: 8 }),
        Request::CommInit(CommInit { device: 0, rank: 0, world: 2, port: 1, host: [0; COMM_HOST] }),
        Request::CommAllreduce(CommAllreduce { device: 0, tensor }),
        Request::CommFree(CommFree { device: 0 }),
    ];
    let requests: Vec<_> = requests.iter().chain(added_in_8.iter().filter(|_| is_8)).collect();
    let mut all: Vec<_> = requests.iter().map(|request| (request.command(), encode_message(request))).collect();
    let (nodes, tensors) = ([3_u64.to_le_bytes()], [a.encode(), b.encode(), sum.encode()]);
    let graph = GraphCompute::new(0, &nodes, &tensors).expect("counts within u32");
    let graph = if is_8 { graph.with_uid(1) } else { graph };
    all.push((RpcCommand::GraphCompute, encode_message(&Request::GraphCompute(graph))));
    assert_eq!(all.len() + 1, RpcCommand::ALL.len() - if is_8 { 0 } else { added_in_8.len() });
    all
}

/// A server, and a bystander client with a buffer that must stay unchanged. Each attack uses a new client with its own buffer.
struct AttackFixture {
    server: TestServer,
    version: Version,
    bystander: Client,
    memory: ClientBuffer,
    data: Vec<u8>,
}

impl AttackFixture {
    fn new() -> AttackFixture {
        AttackFixture::with_version(ServedVersion::V7_0)
    }

    fn with_version(version: ServedVersion) -> AttackFixture {
        let server = TestServer::with_devices(2, Config::default().with_protocol(vec![version]));
        let version = match version {
            ServedVersion::V8_0 => PROTOCOL_VERSION,
            _ => Version { major: 7, minor: 0, patch: 0 },
        };
        let mut bystander = Client::connect_as(&server, version);
        let (memory, data) = (bystander.alloc(0, 4096), random_bytes(5, 4096));
        bystander.set_tensor(&memory.byte_tensor(), 0, &data);
        AttackFixture { server, version, bystander, memory, data }
    }

    fn new_attacker(&self) -> (Client, ClientBuffer) {
        let mut client = Client::connect_as(&self.server, self.version);
        let memory = client.alloc(0, 4096);
        (client, memory)
    }

    fn end(mut self) {
        assert_eq!(self.bystander.get_tensor(&self.memory.byte_tensor(), 0, 4096), self.data);
        eventually("the server has freed the memory of all attackers", || {
            self.server.used_bytes(0) == 4096 && self.server.used_bytes(1) == 0
        });
    }
}

#[test]
fn messages_cut_at_any_length_are_rejected() {
    for version in VERSIONS {
        let fixture = AttackFixture::with_version(version);
        for (command, whole) in requests(&ClientBuffer { handle: 1, base: 1, size: 64 }, version) {
            let n = whole.len();
            for len in [1, 2, 8, 9, 10, n / 2, n - 1].into_iter().filter(|&len| len < n) {
                let (mut client, memory) = fixture.new_attacker();
                let (_, whole) =
                    requests(&memory, version).into_iter().find(|r| r.0 == command).expect("the same request");
                client.write(&whole[..len]);
                client.shutdown_write();
                client.expect_refused(&["in the middle of a message"]);
            }
        }
        fixture.end();
    }
}

#[test]
fn headers_with_impossible_sizes_are_rejected() {
    let fixture = AttackFixture::with_version(ServedVersion::V8_0);
    for &command in RpcCommand::ALL {
        let of_graph = 12 + 8 * (1 << 40);
        for size in [1, u64::from(u32::MAX), of_graph, 1 << 62, u64::MAX - 8, u64::MAX] {
            // SET_TENSOR and SET_TENSOR_2D may have data of any length; its range is checked instead: see the next test.
            let streamed_head = match command {
                RpcCommand::SetTensor => SET_TENSOR_HEAD,
                RpcCommand::SetTensor2d => SET_TENSOR_2D_HEAD,
                _ => usize::MAX,
            };
            if (streamed_head as u64..1 << 63).contains(&size) {
                continue;
            }
            let (mut client, _) = fixture.new_attacker();
            client.write(&RequestHeader { command, size }.encode());
            client.expect_refused(&[command.name(), "malformed"]);
        }
    }
    for number in [23, 24, 255] {
        let (mut client, _) = fixture.new_attacker();
        client.write(&[number, 0, 0, 0, 0, 0, 0, 0, 0]);
        client.expect_refused(&[&format!("unknown command {number}")]);
    }
    fixture.end();
}

#[test]
fn uploads_past_the_end_are_rejected_before_their_data_arrives() {
    let fixture = AttackFixture::new();
    for (offset, len) in
        [(0, 4097), (4096, 1), (4097, 0), (1, 1 << 40), (u64::MAX, 1), (u64::MAX, 0), (1 << 63, 1 << 62)]
    {
        let (mut client, memory) = fixture.new_attacker();
        let mut bytes = Vec::new();
        let head = SetTensorHead { tensor: memory.byte_tensor(), cache: false, offset };
        head.encode(len, &mut bytes).expect("a legal length");
        client.write(&bytes);
        client.expect_refused(&["SET_TENSOR", "reach past its buffer of 4096"]);
    }
    let (mut client, memory) = fixture.new_attacker();
    let head = SetTensorHead { tensor: memory.byte_tensor(), cache: false, offset: 0 };
    let mut bytes = encode_message(&Request::SetTensor(SetTensor { head, data: &[] }));
    bytes[REQUEST_HEADER + TENSOR_RECORD] = 2;
    client.write(&bytes);
    client.expect_refused(&["SET_TENSOR", "malformed: cache"]);
    fixture.end();
}

#[test]
fn invalid_handles_devices_and_ranges_are_rejected() {
    let fixture = AttackFixture::new();
    type Attack = fn(&ClientBuffer) -> Request<'static>;
    fn changed(memory: &ClientBuffer, change: fn(&mut TensorRecord)) -> TensorRecord {
        let mut tensor = memory.byte_tensor();
        change(&mut tensor);
        tensor
    }
    fn fill(tensor: TensorRecord, offset: u64, size: u64) -> Request<'static> {
        Request::MemsetTensor(MemsetTensor { tensor, offset, size, value: 0 })
    }
    fn sized(device: u32, tensor: TensorRecord) -> Request<'static> {
        Request::GetAllocSize(GetAllocSize { device, tensor, srcs: &[[0; TENSOR_RECORD]; MAX_SRC] })
    }
    const NO_BUFFER: &str = "no buffer has the handle";
    const NO_DEVICE: &str = "there are 2";
    const OUTSIDE: &str = "outside its buffer";
    const PAST: &str = "reach past its buffer";
    let attacks: &[(&str, Attack)] = &[
        (NO_BUFFER, |_| Request::BufferGetBase(BufferGetBase { remote_ptr: 0 })),
        (NO_BUFFER, |m| Request::BufferGetBase(BufferGetBase { remote_ptr: m.handle + 1 })),
        (NO_BUFFER, |_| Request::FreeBuffer(FreeBuffer { remote_ptr: u64::MAX })),
        (NO_BUFFER, |m| Request::FreeBuffer(FreeBuffer { remote_ptr: m.base })),
        (NO_BUFFER, |_| Request::BufferClear(BufferClear { remote_ptr: 0, value: 0 })),
        (NO_BUFFER, |m| get_tensor_request(&changed(m, |t| t.buffer = 0), 0, 1)),
        (NO_BUFFER, |m| get_tensor_request(&changed(m, |t| t.buffer = u64::MAX), 0, 1)),
        (NO_BUFFER, |m| copy_tensor_request(&m.byte_tensor(), &changed(m, |t| t.buffer += 1))),
        (NO_BUFFER, |m| copy_tensor_request(&changed(m, |t| t.buffer += 1), &m.byte_tensor())),
        (NO_DEVICE, |_| Request::AllocBuffer(AllocBuffer { device: 2, size: 0 })),
        (NO_DEVICE, |_| Request::GetAlignment(GetAlignment { device: u32::MAX })),
        (NO_DEVICE, |_| Request::GetMaxSize(GetMaxSize { device: 2 })),
        (NO_DEVICE, |_| Request::GetDeviceMemory(GetDeviceMemory { device: 2 })),
        (NO_DEVICE, |_| Request::GraphRecompute(GraphRecompute { device: 2, uid: None })),
        (NO_DEVICE, |m| sized(2, m.byte_tensor())),
        (OUTSIDE, |m| get_tensor_request(&changed(m, |t| t.data = 0), 0, 1)),
        (OUTSIDE, |m| get_tensor_request(&changed(m, |t| t.data -= 1), 0, 1)),
        (OUTSIDE, |m| get_tensor_request(&changed(m, |t| t.data = u64::MAX), 0, 1)),
        (OUTSIDE, |m| get_tensor_request(&changed(m, |t| t.data += 4097), 0, 1)),
        (PAST, |m| get_tensor_request(&m.byte_tensor(), 0, 4097)),
        (PAST, |m| get_tensor_request(&m.byte_tensor(), 4097, 0)),
        (PAST, |m| get_tensor_request(&m.byte_tensor(), u64::MAX, 2)),
        (PAST, |m| get_tensor_request(&m.byte_tensor(), 2, u64::MAX)),
        (PAST, |m| get_tensor_request(&changed(m, |t| t.data += 4096), 0, 0)),
        (PAST, |m| get_tensor_request(&changed(m, |t| t.ne[1] = 2), 0, 1)),
        (PAST, |m| get_tensor_request(&changed(m, |t| t.nb[0] = 2), 0, 1)),
        (PAST, |m| fill(m.byte_tensor(), 4000, 97)),
        (PAST, |m| fill(m.byte_tensor(), u64::MAX, u64::MAX)),
        (PAST, |m| Request::InitTensor(InitTensor { tensor: changed(m, |t| t.data += 1) })),
        (PAST, |m| copy_tensor_request(&m.byte_tensor(), &changed(m, |t| t.data += 1))),
        (PAST, |m| copy_tensor_request(&changed(m, |t| t.data += 1), &m.byte_tensor())),
        (PAST, |m| Request::SetTensorHash(SetTensorHash { tensor: m.byte_tensor(), offset: u64::MAX, hash: 0 })),
        ("type number 4 is not a tensor type", |m| get_tensor_request(&changed(m, |t| t.dtype = 4), 0, 1)),
        ("type number 4294967295", |m| sized(0, changed(m, |t| t.dtype = u32::MAX))),
        ("not a whole number of Q4_0 blocks", |m| {
            sized(0, changed(m, |t| (t.dtype, t.ne[0]) = (DType::Q4_0.to_wire(), 33)))
        }),
        ("more than 2^62 bytes", |m| sized(0, changed(m, |t| t.ne = [u32::MAX; 4]))),
        ("more than 2^62 bytes", |m| {
            get_tensor_request(&changed(m, |t| (t.ne, t.nb) = ([u32::MAX; 4], [u32::MAX; 4])), 0, 1)
        }),
    ];
    for (reason, attack) in attacks {
        let (mut client, memory) = fixture.new_attacker();
        let request = attack(&memory);
        client.send(&request);
        client.expect_refused(&[request.command().name(), reason]);
    }
    fixture.end();
}

/// `c = a + b` in a buffer of 4096 bytes; ids 1, 2, 3.
fn sum(memory: &ClientBuffer) -> [TensorRecord; 3] {
    let (a, b) = (memory.float_tensor(1, 64, 0), memory.float_tensor(2, 64, 256));
    let c = node(OpCode::Add, memory.float_tensor(3, 64, 512), &[&a, &b]);
    [a, b, c]
}

#[test]
fn invalid_graphs_are_rejected() {
    let fixture = AttackFixture::new();
    type Attack = fn(&mut Vec<u64>, &mut Vec<TensorRecord>);
    let attacks: &[(&str, Attack)] = &[
        ("two tensors with id 0x1", |_, t| t[1].id = 1),
        ("node 0x3 is listed twice", |n, _| n.push(3)),
        ("node 0x9 is not among", |n, _| n.push(9)),
        ("source 0x9 is not among", |_, t| t[2].src[0] = 9),
        ("ADD: source 0 is computed by a later node", |_, t| t[2].src[0] = 3),
        ("is computed by a later node", |n, t| {
            // A cycle: nodes 1 and 3 read each other's result.
            t[0].op = OpCode::Add.to_wire();
            t[0].flags = TensorRecord::FLAG_COMPUTE;
            (t[0].src[0], t[0].src[1]) = (3, 2);
            n.insert(0, 1);
        }),
        ("version 7.0 of the RPC protocol has no op 101", |_, t| t[2].op = 101),
        ("has no op 4294967295", |_, t| t[2].op = u32::MAX),
        ("op FLASH_ATTN_BACK is not supported", |_, t| t[2].op = OpCode::FlashAttnBack.to_wire()),
        ("type number 31 is not a tensor type", |_, t| t[2].dtype = 31),
        ("type number 1000", |_, t| t[0].dtype = 1000),
        ("ADD: source 1 is missing", |_, t| t[2].src[1] = 0),
        ("ADD", |_, t| t[1].ne[0] = 65),
        ("2^62 bytes", |_, t| t[0].ne = [u32::MAX; 4]),
        ("spans 256 bytes of a buffer of 4096", |_, t| t[2].data += 4096 - 512),
        ("of a buffer of 4096", |_, t| t.iter_mut().for_each(|t| (t.ne[1], t.nb[1]) = (2, u32::MAX))),
        ("of a buffer of 4096", |_, t| {
            for t in t {
                t.ne[1] = 17;
            }
        }),
        ("overlap", |_, t| (t[2].ne[1], t[2].nb[1], t[0].ne[1], t[0].nb[1]) = (4, 0, 4, 256)),
        ("overlaps source 0", |_, t| t[2].data -= 508),
        ("outside its buffer", |_, t| t[0].data += 1 << 40),
        ("outside its buffer", |_, t| t[2].data = 1),
        ("no buffer has the handle", |_, t| t[1].buffer = 77),
        ("has no memory on this server", |_, t| (t[1].buffer, t[1].data) = (0, 0)),
        ("has the address", |_, t| t[1].buffer = 0),
    ];
    for (reason, attack) in attacks {
        let (mut client, memory) = fixture.new_attacker();
        let (mut nodes, mut tensors) = (vec![3], sum(&memory).to_vec());
        client.compute_graph(0, &nodes, &tensors);
        client.assert_alive();
        attack(&mut nodes, &mut tensors);
        client.compute_graph(0, &nodes, &tensors);
        client.expect_refused(&["GRAPH_COMPUTE", reason]);
    }
    let (mut client, memory) = fixture.new_attacker();
    let other = client.alloc(1, 4096);
    let [_, b, c] = sum(&memory);
    let mut a = other.float_tensor(1, 64, 0);
    a.name[..6].copy_from_slice(b"cached");
    client.compute_graph(0, &[3], &[a, b, c]);
    client.expect_refused(&["GRAPH_COMPUTE", "\"cached\" lies on device 1, the graph runs on device 0"]);
    let (mut client, memory) = fixture.new_attacker();
    client.compute_graph(5, &[3], &sum(&memory));
    client.expect_refused(&["GRAPH_COMPUTE", "no device 5"]);
    fixture.end();
}

#[test]
fn graphs_with_wrong_counts_are_rejected() {
    let fixture = AttackFixture::new();
    let whole = graph_compute_message(0, &[3], &sum(&fixture.memory));
    let counts = [REQUEST_HEADER + 4, REQUEST_HEADER + 8 + 8];
    for at in counts {
        for lie in [0, 2, 4, 1000, u32::MAX / 8, u32::MAX] {
            let mut bytes = whole.clone();
            bytes[at..at + 4].copy_from_slice(&lie.to_le_bytes());
            let (mut client, _) = fixture.new_attacker();
            client.write(&bytes);
            client.expect_refused(&["GRAPH_COMPUTE", "malformed"]);
        }
    }
    fixture.end();
}

#[test]
fn randomly_changed_messages_end_at_most_their_connection() {
    for version in VERSIONS {
        let fixture = AttackFixture::with_version(version);
        let mut rng = fastrand::Rng::with_seed(7);
        for _ in 0..300 {
            let (mut client, memory) = fixture.new_attacker();
            let mut all = requests(&memory, version);
            let chosen = rng.usize(..all.len());
            let (_, bytes) = &mut all[chosen];
            for _ in 0..rng.usize(1..4) {
                let at = rng.usize(..bytes.len());
                bytes[at] = if rng.bool() { rng.u8(..) } else { 0xff };
            }
            // The changed message may be valid or incomplete; the connection ends in both cases.
            client.write(bytes);
            client.shutdown_write();
            let mut rest = Vec::new();
            let _ = std::io::Read::read_to_end(&mut client.stream, &mut rest);
            assert!(client.warnings().len() <= 1);
        }
        assert_eq!(logged_warnings("bug in fanout"), Vec::<String>::new());
        fixture.end();
    }
}
