//! Collectives of protocol 8.0: two servers add tensors over a connection of their own, and hostile requests for it.
//!
//! Each test uses loopback addresses of its own, so that the port 1000 above a server's belongs to no other test.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::{Config, Peer, ServedVersion};
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Longer than any test: a wait that ends has not ended by this deadline.
const LONG: Duration = Duration::from_secs(3600);

/// Bytes that each end of a link sends first.
const CAPS: [u8; 24] = [0; 24];

/// A loopback address: `number` is unique among the tests.
pub(crate) fn loopback(number: u8) -> Ipv4Addr {
    Ipv4Addr::new(127, 0, 88, number)
}

pub(crate) fn config(peers: &[&str]) -> Config {
    let peers = peers.iter().map(|peer| peer.parse::<Peer>().unwrap()).collect();
    Config::default().with_protocol(vec![ServedVersion::V8_0]).with_peers(peers).with_comm_init_timeout(LONG)
}

pub(crate) fn server(number: u8, config: Config) -> TestServer {
    TestServer::with_listeners(&[&format!("{}:0=8", loopback(number))], config)
}

/// A client on the address of its server.
pub(crate) fn connect(server: &TestServer) -> Client {
    let mut client = Client::connect_from([127, 0, 0, 1], server.addr);
    client.send(&hello_request());
    client.read_reply(RpcCommand::Hello);
    client
}

/// The port on which a server listens for rank 1.
fn comm_address(server: &TestServer) -> SocketAddr {
    SocketAddr::new(server.addr.ip(), server.addr.port() + 1000)
}

pub(crate) fn comm_init(device: u32, rank: u32, port: u32, host: &[u8]) -> CommInit {
    let mut padded = [0; COMM_HOST];
    padded[..host.len()].copy_from_slice(host);
    CommInit { device, rank, world: 2, port, host: padded }
}

pub(crate) fn send_init(client: &mut Client, request: CommInit) {
    client.send(&Request::CommInit(request));
}

fn read_init(client: &mut Client) -> u8 {
    client.read_reply(RpcCommand::CommInit)[0]
}

/// The requests of a client for rank 0 and rank 1, where rank 0 is on `server`.
pub(crate) fn both_ranks(server: &TestServer) -> [CommInit; 2] {
    let at = comm_address(server);
    [comm_init(0, 0, at.port().into(), b""), comm_init(0, 1, at.port().into(), at.ip().to_string().as_bytes())]
}

/// Sends both requests before it reads a reply, as llama.cpp's client does.
pub(crate) fn link(clients: &mut [Client; 2], requests: [CommInit; 2]) {
    clients.iter_mut().zip(requests).for_each(|(client, request)| send_init(client, request));
    clients.iter_mut().for_each(|client| assert_eq!(read_init(client), 1));
}

pub(crate) fn allreduce(client: &mut Client, tensor: &TensorRecord) {
    allreduce_on(client, 0, tensor);
}

fn allreduce_on(client: &mut Client, device: u32, tensor: &TensorRecord) {
    client.send(&Request::CommAllreduce(CommAllreduce { device, tensor: tensor.clone() }));
}

/// An F32 rounded to BF16, to nearest even.
fn bf16(value: f32) -> f32 {
    let bits = value.to_bits();
    f32::from_bits((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff_0000)
}

/// What a server has that adds `received` to `own`.
fn sum(own: &[f32], received: &[f32]) -> Vec<f32> {
    let wire = |x: f32| if own.len() < 32_768 { x } else { bf16(x) };
    own.iter().zip(received).map(|(x, y)| x + wire(*y)).collect()
}

/// Reduces a tensor of `ne` at `offset` on device 0 of both ranks, and compares the results.
fn check_reduction(clients: &mut [Client; 2], memory: &[ClientBuffer; 2], ne: [u32; 4], offset: u64) {
    check_reduction_on([0, 0], clients, memory, ne, offset);
}

fn check_reduction_on(
    devices: [u32; 2],
    clients: &mut [Client; 2],
    memory: &[ClientBuffer; 2],
    ne: [u32; 4],
    offset: u64,
) {
    let tensors = [0, 1].map(|rank| memory[rank].tensor(1, DType::F32, ne, offset));
    let n = ne.iter().product::<u32>() as usize;
    let values = [1, 2].map(|seed| random_floats(seed + n as u64, n));
    for rank in [0, 1] {
        clients[rank].set_floats(&tensors[rank], &values[rank]);
        allreduce_on(&mut clients[rank], devices[rank], &tensors[rank]);
    }
    let got = [0, 1].map(|rank| clients[rank].get_floats(&tensors[rank]));
    for rank in [0, 1] {
        assert!(got[rank] == sum(&values[rank], &values[1 - rank]), "rank {rank}, {ne:?} at {offset}");
    }
    assert!(n >= 32_768 || got[0] == got[1], "F32: the same bits on both ranks");
}

#[test]
fn two_servers_add_their_tensors() {
    let servers = [1, 2].map(|number| server(number, config(&["127.0.0.0/8:*"])));
    let mut clients = [0, 1].map(|rank| connect(&servers[rank]));
    link(&mut clients, both_ranks(&servers[0]));
    let memory = [0, 1].map(|rank| clients[rank].alloc(0, 4 << 20));
    // Sizes around the change to BF16 and around the chunk of 256 KiB; odd sizes; offsets that are only aligned to elements.
    for (ne, offset) in [
        ([1, 1, 1, 1], 0),
        ([7, 1, 1, 1], 4),
        ([8, 5, 3, 2], 12),
        ([4096, 2, 1, 1], 64),
        ([32_767, 1, 1, 1], 0),
        ([32_768, 1, 1, 1], 0),
        ([32_769, 1, 1, 1], 28),
        ([131_072, 1, 1, 1], 0),
        ([4096, 33, 1, 1], 0),
        ([300_001, 1, 1, 1], 8),
        ([7, 1, 1, 1], 4),
    ] {
        check_reduction(&mut clients, &memory, ne, offset);
    }
    // Permuted without gaps, as llama.cpp's client accepts: added in the order of memory.
    let mut permuted = [0, 1].map(|rank| memory[rank].float_tensor(1, 64, 0));
    for (rank, value) in [1.0, 2.0].into_iter().enumerate() {
        clients[rank].set_floats(&permuted[rank], &[value; 64]);
        (permuted[rank].ne, permuted[rank].nb) = ([32, 2, 1, 1], [8, 4, 256, 256]);
        allreduce(&mut clients[rank], &permuted[rank]);
    }
    for rank in [0, 1] {
        assert_eq!(clients[rank].get_floats(&memory[rank].float_tensor(1, 64, 0)), [3.0; 64]);
    }
    // Without elements: nothing is exchanged, wherever the record lies.
    let mut empty = memory[0].float_tensor(1, 1, 0);
    (empty.ne[2], empty.data) = (0, 5);
    allreduce(&mut clients[0], &empty);
    for client in &mut clients {
        client.send(&Request::CommFree(CommFree { device: 0 }));
        client.assert_alive();
    }
    let used = [0, 1].map(|rank: usize| servers[rank].used_bytes(0));
    assert_eq!(used, [4 << 20; 2], "COMM_FREE frees the scratch memory");
}

/// Two names of one server: its sessions wait for each other.
#[test]
fn two_sessions_of_one_server_add_their_tensors() {
    let server = server(3, config(&["127.0.0.0/8:*"]));
    let mut clients = [connect(&server), connect(&server)];
    link(&mut clients, both_ranks(&server));
    let memory = [0, 1].map(|rank| clients[rank].alloc(0, 1 << 20));
    check_reduction(&mut clients, &memory, [4096, 1, 1, 1], 0);
    check_reduction(&mut clients, &memory, [40_000, 1, 1, 1], 0);
}

/// On a GPU, here an emulated one: the server converts and adds there. Device 1 of one session, device 0 of another.
#[cfg(target_os = "linux")]
#[test]
fn gpus_convert_and_add_on_the_device() {
    let emulator = cudaemu::test::start("CUDAEMU_DEVICES=2").unwrap();
    let options = fanout::registry::Options::default().with_threads(Some(2)).with_memory(vec![64 << 20]);
    let devices = fanout::registry::Registry::detect().open("0,1", &options).unwrap();
    let address = format!("{}:0=8", loopback(20)).parse().unwrap();
    let mut server = TestServer::run(&[address], devices, config(&["127.0.0.0/8:*"]));
    let mut clients = [connect(&server), connect(&server)];
    let [rank_0, rank_1] = both_ranks(&server);
    link(&mut clients, [CommInit { device: 1, ..rank_0 }, rank_1]);
    let memory = [clients[0].alloc(1, 1 << 20), clients[1].alloc(0, 1 << 20)];
    for (ne, offset) in [([1000, 1, 1, 1], 4), ([64, 5, 3, 2], 64), ([32_769, 1, 1, 1], 12), ([1000, 1, 1, 1], 4)] {
        let before = emulator.calls("cuLaunchKernel");
        check_reduction_on([1, 0], &mut clients, &memory, ne, offset);
        let launches = emulator.calls("cuLaunchKernel") - before;
        assert!(launches >= 2, "{launches} kernels for the sums of two GPUs");
    }
    drop(clients);
    server.stop();
    drop(server);
    assert!(emulator.wait_contexts_released(Duration::from_secs(20)), "a context is still held");
    assert_eq!(emulator.reports(), Vec::<String>::new());
}

#[test]
fn a_reduction_runs_in_order_with_the_graphs_of_its_device() {
    const N: u32 = 5000;
    let servers = [4, 5].map(|number| server(number, config(&["127.0.0.0/8:*"])));
    let mut clients = [0, 1].map(|rank| connect(&servers[rank]));
    link(&mut clients, both_ranks(&servers[0]));
    let memory = [0, 1].map(|rank| clients[rank].alloc(0, 1 << 20));
    // Layers as under a tensor split: c = a * b, reduced; a = c + b, reduced; without a reply in between.
    let values = [1, 2].map(|seed| [random_floats(seed, N as usize), random_floats(seed + 10, N as usize)]);
    for rank in [0, 1] {
        let (client, memory) = (&mut clients[rank], &memory[rank]);
        let [a, b, c] = [(1, 0), (2, 1 << 16), (3, 1 << 17)].map(|(id, at)| memory.float_tensor(id, N, at));
        client.set_floats(&a, &values[rank][0]);
        client.set_floats(&b, &values[rank][1]);
        let mul = node(OpCode::Mul, c.clone(), &[&a, &b]);
        let add = node(OpCode::Add, a.clone(), &[&c, &b]);
        let compute = |client: &mut Client, uid: u64, id: u64, records: [&TensorRecord; 3]| {
            let (nodes, tensors) = ([id.to_le_bytes()], records.map(TensorRecord::encode));
            client.send(&Request::GraphCompute(GraphCompute::new(0, &nodes, &tensors).unwrap().with_uid(uid)));
        };
        compute(client, 1, 3, [&a, &b, &mul]);
        allreduce(client, &c);
        compute(client, 2, 1, [&c, &b, &add]);
        allreduce(client, &a);
        for uid in [1, 2] {
            client.send(&Request::GraphRecompute(GraphRecompute { device: 0, uid: Some(uid) }));
            allreduce(client, if uid == 1 { &c } else { &a });
        }
    }
    let mut a = [values[0][0].clone(), values[1][0].clone()];
    let zip = |x: &[f32], y: &[f32], f: fn(f32, f32) -> f32| -> Vec<f32> {
        x.iter().zip(y).map(|(&x, &y)| f(x, y)).collect()
    };
    for _ in 0..2 {
        let c = [0, 1].map(|rank: usize| zip(&a[rank], &values[rank][1], |x, y| x * y));
        let c = sum(&c[0], &c[1]);
        let shares = [0, 1].map(|rank: usize| zip(&c, &values[rank][1], |x, y| x + y));
        let total = sum(&shares[0], &shares[1]);
        a = [total.clone(), total];
    }
    for rank in [0, 1] {
        assert_eq!(clients[rank].get_floats(&memory[rank].float_tensor(1, N, 0)), a[rank], "rank {rank}");
    }
}

#[test]
fn a_repeated_comm_init_is_answered_by_the_state_of_the_link() {
    let servers = [6, 7].map(|number| server(number, config(&["127.0.0.0/8:*"])));
    let mut clients = [0, 1].map(|rank| connect(&servers[rank]));
    let requests = both_ranks(&servers[0]);
    link(&mut clients, requests.clone());
    // The same request on a working link: 1 at once, without the other server.
    for (client, request) in clients.iter_mut().zip(&requests) {
        send_init(client, request.clone());
        assert_eq!(read_init(client), 1);
    }
    // A link whose other end is closed is replaced.
    clients[1].send(&Request::CommFree(CommFree { device: 0 }));
    clients[1].assert_alive();
    link(&mut clients, requests);
    let memory = [0, 1].map(|rank| clients[rank].alloc(0, 1 << 20));
    check_reduction(&mut clients, &memory, [100, 1, 1, 1], 0);
}

/// Requests that are answered 0 at once: the server does not dial, and does not listen.
#[test]
fn nothing_is_dialled_or_listened_on_beyond_the_list() {
    let bystander = TcpListener::bind((loopback(8), 0)).unwrap();
    bystander.set_nonblocking(true).unwrap();
    let there = bystander.local_addr().unwrap();
    let (host, port) = (there.ip().to_string(), u32::from(there.port()));
    let long_host = [b'a'; COMM_HOST];
    let hosts: [&[u8]; 9] = [
        host.as_bytes(),
        b"",
        b"localhost",
        b"::1",
        b"[::1]",
        b"127.0.88.8:80",
        b"\xff\xfe\xfd",
        b"127.0.88.8\n",
        &long_host,
    ];
    let only_port = format!("{host}:1");
    for peers in [&[][..], &["127.9.9.9"], &["10.0.0.0/8", &only_port]] {
        let server = server(9, config(peers));
        let own = comm_address(&server);
        let mut client = connect(&server);
        let mut requests: Vec<_> = hosts.iter().map(|host| comm_init(0, 1, port, host)).collect();
        requests.extend([0, 65_536, 65_536 + port, u32::MAX].map(|port| comm_init(0, 1, port, host.as_bytes())));
        // Rank 0 on any port but its own, and, without a list, on its own.
        let ports = [0, 1, 80, port, u32::from(server.addr.port()), 65_536 + u32::from(own.port()), u32::MAX];
        requests.extend(ports.map(|port| comm_init(0, 0, port, b"")));
        if peers.is_empty() {
            requests.push(comm_init(0, 0, own.port().into(), b""));
        }
        // Ranks, worlds and devices that do not exist.
        for (device, rank, world) in
            [(1, 0, 2), (u32::MAX, 1, 2), (0, 2, 2), (0, u32::MAX, 2), (0, 0, 0), (0, 0, 1), (0, 1, 3)]
        {
            requests.push(CommInit { device, rank, world, ..comm_init(0, 0, own.port().into(), host.as_bytes()) });
        }
        for request in requests {
            send_init(&mut client, request.clone());
            assert_eq!(read_init(&mut client), 0, "{peers:?}: {request:?}");
            assert_eq!(TcpStream::connect(own).unwrap_err().kind(), ErrorKind::ConnectionRefused);
        }
        assert_eq!(bystander.accept().unwrap_err().kind(), ErrorKind::WouldBlock, "{peers:?}: dialled");
        let warnings = client.warnings();
        assert_eq!(warnings.len(), 1, "{warnings:#?}");
        assert!(warnings[0].contains("GGML_RPC_NO_COMM=1") && warnings[0].contains("--peer"), "{warnings:#?}");
    }
}

/// Connects to the address on which a server is about to listen for rank 1.
fn dial_from(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
    let mut stream = None;
    eventually("the server listens for rank 1", || {
        let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None).unwrap();
        socket.bind(&SocketAddr::from((from, 0)).into()).unwrap();
        socket.connect(&to.into()).is_ok_and(|()| stream.replace(TcpStream::from(socket)).is_none())
    });
    let stream = stream.unwrap();
    stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    stream
}

/// Asserts that a connection ends without a byte.
#[track_caller]
fn expect_nothing(stream: &mut TcpStream) {
    match stream.read(&mut [0]) {
        Ok(0) => {}
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn rank_0_takes_a_listed_peer_on_its_own_address_and_stops_listening() {
    let (listed, unlisted) = (loopback(11), loopback(12));
    let server = server(10, config(&[&listed.to_string()]));
    let at = comm_address(&server);
    let mut client = connect(&server);
    send_init(&mut client, comm_init(0, 0, at.port().into(), b""));
    // A listed peer that ends in the middle of its capabilities, one of another protocol, and unlisted ones: rank 0 goes on waiting.
    let http = b"POST /x HTTP/1.1\r\nHost: rank-0:51052\r\n\r\n";
    for (from, bytes) in [
        (unlisted, &CAPS[..]),
        (listed, &CAPS[..10]),
        (listed, http),
        (listed, &[7; 24]),
        (unlisted, b""),
        (listed, b""),
    ] {
        let mut stream = dial_from(from, at);
        let sent = stream.write_all(bytes);
        if from == listed {
            sent.unwrap();
            // Fails if the server has closed already.
            let _ = stream.shutdown(std::net::Shutdown::Write);
        }
        expect_nothing(&mut stream);
    }
    let other_address = SocketAddr::from((Ipv4Addr::LOCALHOST, at.port()));
    assert_eq!(TcpStream::connect(other_address).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    let mut peer = dial_from(listed, at);
    peer.write_all(&CAPS).unwrap();
    let mut caps = [9; 24];
    peer.read_exact(&mut caps).unwrap();
    assert_eq!(caps, CAPS);
    assert_eq!(read_init(&mut client), 1);
    assert_eq!(TcpStream::connect(at).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    // The link has no header: the elements of this server, and then those of the peer, added.
    let memory = client.alloc(0, 1024);
    let tensor = memory.float_tensor(1, 3, 16);
    client.set_floats(&tensor, &[1.0, 2.0, 3.0]);
    allreduce(&mut client, &tensor);
    let mut elements = [0; 12];
    peer.read_exact(&mut elements).unwrap();
    assert_eq!(elements, *[1.0_f32, 2.0, 3.0].map(f32::to_le_bytes).as_flattened());
    peer.write_all([10.0_f32, 20.0, 30.0].map(f32::to_le_bytes).as_flattened()).unwrap();
    assert_eq!(client.get_floats(&tensor), [11.0, 22.0, 33.0]);
}

#[test]
fn the_operator_may_name_the_port() {
    let port = TcpListener::bind((loopback(13), 0)).unwrap().local_addr().unwrap().port();
    let server = server(13, config(&["127.0.0.0/8:*"]).with_comm_port(Some(port)));
    let mut client = connect(&server);
    send_init(&mut client, comm_init(0, 0, comm_address(&server).port().into(), b""));
    assert_eq!(read_init(&mut client), 0);
    send_init(&mut client, comm_init(0, 0, port.into(), b""));
    dial_from(loopback(13), SocketAddr::from((loopback(13), port))).write_all(&CAPS).unwrap();
    assert_eq!(read_init(&mut client), 1);
}

/// A client that hangs up ends each kind of wait at once, long before its deadline, and no other session notices the wait.
#[test]
fn a_client_that_hangs_up_ends_its_wait() {
    let server = server(14, config(&["127.0.0.0/8:*"]));
    let mut other = connect(&server);
    let at = comm_address(&server);
    let unused = TcpListener::bind((loopback(15), 0)).unwrap().local_addr().unwrap();
    let rank_0 = comm_init(0, 0, at.port().into(), b"");
    let rank_1 = comm_init(0, 1, unused.port().into(), unused.ip().to_string().as_bytes());
    for request in [rank_0.clone(), rank_1] {
        let mut client = connect(&server);
        send_init(&mut client, request);
        // On Linux, what follows in the stream does not hide its end.
        if cfg!(target_os = "linux") {
            client.send(&Request::DeviceCount(DeviceCount {}));
        }
        other.assert_alive();
        drop(client);
        eventually("the session has ended", || server.handle.connections() == 1);
    }
    // A peer has connected, silently. Another client of the address is answered 0 at once.
    let mut client = connect(&server);
    send_init(&mut client, rank_0.clone());
    let mut silent = dial_from(loopback(15), at);
    send_init(&mut other, rank_0);
    assert_eq!(read_init(&mut other), 0);
    assert!(other.warnings()[0].contains("another client's COMM_INIT uses"), "{:?}", other.warnings());
    drop(client);
    eventually("the session has ended", || server.handle.connections() == 1);
    expect_nothing(&mut silent);
    assert_eq!(TcpStream::connect(at).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    // While the peer's elements are missing.
    let mut client = connect(&server);
    let mut peer = linked(&server, &mut client);
    let memory = client.alloc(0, 64);
    allreduce(&mut client, &memory.float_tensor(1, 4, 0));
    peer.read_exact(&mut [0; 16]).unwrap();
    drop(client);
    eventually("the session has ended", || server.handle.connections() == 1);
    expect_nothing(&mut peer);
}

#[test]
fn a_comm_init_without_its_counterpart_ends_at_its_deadline() {
    let server = server(16, config(&["127.0.0.0/8:*"]).with_comm_init_timeout(SHORT_TIMEOUT));
    let at = comm_address(&server);
    let unused = TcpListener::bind((loopback(17), 0)).unwrap().local_addr().unwrap();
    let silent = TcpListener::bind((loopback(17), 0)).unwrap();
    let there = silent.local_addr().unwrap();
    let rank_0 = comm_init(0, 0, at.port().into(), b"");
    let rank_1 = |to: SocketAddr| comm_init(0, 1, to.port().into(), to.ip().to_string().as_bytes());
    let both_0 = [rank_0.clone(), rank_0.clone()];
    for requests in [both_0, [rank_1(unused), rank_1(unused)], [rank_1(there), rank_1(unused)]] {
        let mut clients = [connect(&server), connect(&server)];
        clients.iter_mut().zip(requests).for_each(|(client, request)| send_init(client, request));
        for client in &mut clients {
            assert_eq!(read_init(client), 0);
            client.assert_alive();
        }
    }
    // Rank 0 with a silent peer on the list.
    let mut client = connect(&server);
    send_init(&mut client, rank_0);
    let _silent_peer = TcpStream::connect(at); // fails if the wait has ended before
    assert_eq!(read_init(&mut client), 0);
    client.assert_alive();
}

/// A link to a peer that the test plays.
pub(crate) fn linked(server: &TestServer, client: &mut Client) -> TcpStream {
    send_init(client, comm_init(0, 0, comm_address(server).port().into(), b""));
    let mut peer = dial_from(Ipv4Addr::LOCALHOST, comm_address(server));
    peer.write_all(&CAPS).unwrap();
    peer.read_exact(&mut [0; 24]).unwrap();
    assert_eq!(read_init(client), 1);
    peer
}

#[test]
fn a_lost_peer_ends_the_session_with_the_reason() {
    let server = server(18, config(&["127.0.0.0/8:*"]).with_stall_timeout(SHORT_TIMEOUT));
    for (sent, ends, reason) in [(0, true, "closed the connection"), (100, true, "closed"), (100, false, "is late")] {
        let mut client = connect(&server);
        let mut peer = linked(&server, &mut client);
        let memory = client.alloc(0, 4096);
        peer.write_all(&vec![1; sent]).unwrap();
        if ends {
            peer.shutdown(std::net::Shutdown::Write).unwrap();
        }
        allreduce(&mut client, &memory.float_tensor(1, 1000, 0));
        client.expect_refused(&["COMM_ALLREDUCE", "127.0.0.1", reason]);
    }
}
