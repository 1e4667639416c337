//! The commands of protocol 7.0 with valid requests.

use crate::support::*;
use fanout::rpc::server::Config;
use fanout::rpc::wire::*;
use fanout::tensor::DType;

#[test]
fn device_queries_report_count_alignment_and_memory() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::connect(&server);
    assert_eq!(client.request_number(&Request::DeviceCount(DeviceCount {})), 2);
    for device in 0..2 {
        assert_eq!(client.request_number(&Request::GetAlignment(GetAlignment { device })), 64);
        assert_eq!(client.request_number(&Request::GetMaxSize(GetMaxSize { device })), MEMORY);
        client.send(&Request::GetDeviceMemory(GetDeviceMemory { device }));
        let body = client.read_reply(RpcCommand::GetDeviceMemory);
        let want = Response::GetDeviceMemory(DeviceMemoryReply { free: MEMORY, total: MEMORY });
        assert_eq!(Response::decode(RpcCommand::GetDeviceMemory, &body), Ok(want));
    }
}

#[test]
fn alloc_size_does_not_depend_on_the_buffer_of_the_tensor() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let elsewhere = ClientBuffer { handle: 0xdead, base: 0xbeef_0000, size: 0 };
    for (dtype, ne, want) in [(DType::F32, [100, 3, 1, 1], 1200), (DType::Q4_0, [96, 2, 2, 1], 216)] {
        let tensor = elsewhere.tensor(9, dtype, ne, 0);
        let srcs = [[0xff; TENSOR_RECORD]; MAX_SRC];
        let size = client.request_number(&Request::GetAllocSize(GetAllocSize { device: 0, tensor, srcs: &srcs }));
        assert_eq!(size, want, "{dtype}");
    }
}

#[test]
fn a_client_before_4_0_is_closed_where_only_another_version_is_served() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect_without_hello(&server);
    client.send(&Request::Hello(Hello { conn_caps: None }));
    client.expect_refused(&["HELLO", "protocols 1.0 to 3.6, and this address serves 7.0"]);
}

#[test]
fn buffers_are_zeroed_disjoint_and_freed() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let (a, b) = (client.alloc(0, 256 << 10), client.alloc(0, 5 << 20));
    for memory in [&a, &b] {
        assert!(memory.base != 0 && memory.base.is_multiple_of(64), "{memory:?}");
        assert!(client.get_tensor(&memory.byte_tensor(), 0, memory.size).iter().all(|&byte| byte == 0));
    }
    assert!(a.base + a.size < b.base || b.base + b.size < a.base);
    assert_eq!(server.used_bytes(0), a.size + b.size);
    client.free(&a);
    client.assert_alive();
    assert_eq!(server.used_bytes(0), b.size);
    let again = client.alloc(0, 1000);
    assert!(again.handle != a.handle && again.base != a.base, "handles and addresses are not reused");
    let nothing = client.alloc(0, 0);
    assert_eq!(client.get_tensor(&nothing.byte_tensor(), 0, 0), [0u8; 0]);
    client.send(&Request::BufferClear(BufferClear { remote_ptr: nothing.handle, value: 1 }));
    client.free(&nothing);
    client.assert_alive();
}

#[test]
fn uploads_write_only_their_range() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    // The server stages small uploads and writes large ones in place, and reads large downloads in pieces. Sizes around both
    // limits.
    for size in [1, 255, 16 << 10, (256 << 10) - 1, 256 << 10, (256 << 10) + 1, (1 << 20) + 1, (5 << 20) + 3] {
        let memory = client.alloc(0, size + 64);
        client.send(&Request::BufferClear(BufferClear { remote_ptr: memory.handle, value: 0xa5 }));
        let data = random_bytes(size, size as usize);
        let tensor = memory.tensor(1, DType::I8, [size as u32 + 16, 1, 1, 1], 32);
        client.set_tensor(&tensor, 16, &data);
        let all = client.get_tensor(&memory.byte_tensor(), 0, memory.size);
        assert!(
            all[..48] == [0xa5; 48] && all[48 + size as usize..] == [0xa5; 16],
            "bytes before and after an upload of {size} bytes"
        );
        assert!(all[48..48 + size as usize] == data[..], "{size} bytes");
        let (from, len) = (size / 3, size - size / 2);
        assert_eq!(client.get_tensor(&tensor, 16 + from, len), data[from as usize..][..len as usize]);
        client.free(&memory);
    }
}

#[test]
fn messages_may_arrive_in_arbitrary_pieces() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 64);
    let data = random_bytes(3, 64);
    let head = SetTensorHead { tensor: memory.byte_tensor(), cache: false, offset: 0 };
    let mut bytes = encode_message(&Request::SetTensor(SetTensor { head, data: &data }));
    bytes.extend(encode_message(&get_tensor_request(&memory.byte_tensor(), 0, 64)));
    for byte in bytes.chunks(7) {
        client.write(byte);
    }
    assert_eq!(client.read_reply(RpcCommand::GetTensor), data);
    // Many messages in one write.
    client.write(&bytes.repeat(50));
    for _ in 0..50 {
        assert_eq!(client.read_reply(RpcCommand::GetTensor), data);
    }
}

#[test]
fn memset_and_clear_fill_only_their_range() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 100);
    client.send(&Request::BufferClear(BufferClear { remote_ptr: memory.handle, value: 7 }));
    let tensor = memory.tensor(1, DType::I8, [50, 1, 1, 1], 20);
    client.send(&Request::MemsetTensor(MemsetTensor { tensor: tensor.clone(), offset: 10, size: 5, value: 9 }));
    client.send(&Request::MemsetTensor(MemsetTensor { tensor, offset: 0, size: 0, value: 1 }));
    let mut want = [7; 100];
    want[30..35].fill(9);
    assert_eq!(client.get_tensor(&memory.byte_tensor(), 0, 100), want);
}

#[test]
fn init_tensor_changes_no_bytes() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect(&server);
    let memory = client.alloc(0, 64);
    client.send(&Request::BufferClear(BufferClear { remote_ptr: memory.handle, value: 3 }));
    let tensor = memory.tensor(1, DType::Q4_0, [32, 2, 1, 1], 0);
    client.send(&Request::InitTensor(InitTensor { tensor: tensor.clone() }));
    assert_eq!(client.get_tensor(&tensor, 0, 36), [3; 36]);
}

#[test]
fn copy_tensor_works_within_and_between_devices() {
    let server = TestServer::with_devices(2, Config::default());
    let mut client = Client::connect(&server);
    let memory = [client.alloc(0, 2 << 20), client.alloc(0, 2 << 20), client.alloc(1, 2 << 20)];
    for (from, to) in [(0, 1), (1, 2), (2, 0), (0, 0)] {
        let (src, dst) = (&memory[from], &memory[to]);
        let n = 1 << 20;
        let (src, dst) = (src.tensor(1, DType::I8, [n, 1, 1, 1], 0), dst.tensor(2, DType::I8, [n, 1, 1, 1], n.into()));
        for round in 0..4 {
            let data = random_bytes(round, n as usize);
            client.set_tensor(&src, 0, &data);
            assert_eq!(client.request_number(&copy_tensor_request(&src, &dst)), 1);
            // Overwrites the source at once: the copy must be executed before.
            client.set_tensor(&src, 0, &random_bytes(99, n as usize));
            assert!(client.get_tensor(&dst, 0, n.into()) == data, "{from} to {to}");
        }
    }
    let (few, many) = (memory[0].float_tensor(1, 10, 0), memory[1].float_tensor(2, 11, 0));
    assert_eq!(
        client.request_number(&copy_tensor_request(&few, &many)),
        0,
        "tensors of different sizes are not copied"
    );
    let (none, nothing) = (memory[0].float_tensor(1, 0, 0), memory[1].float_tensor(2, 0, 0));
    assert_eq!(client.request_number(&copy_tensor_request(&none, &nothing)), 1);
}

#[test]
fn clients_cannot_access_buffers_of_other_clients() {
    let server = TestServer::start(Config::default());
    let (mut a, mut b) = (Client::connect(&server), Client::connect(&server));
    let (of_a, of_b) = (a.alloc(0, 64), b.alloc(0, 64));
    assert_eq!(of_a.handle, of_b.handle, "handles are per session");
    a.set_tensor(&of_a.byte_tensor(), 0, &[1; 64]);
    b.set_tensor(&of_b.byte_tensor(), 0, &[2; 64]);
    assert_eq!(
        (a.get_tensor(&of_a.byte_tensor(), 0, 64), b.get_tensor(&of_b.byte_tensor(), 0, 64)),
        (vec![1; 64], vec![2; 64])
    );
    let second = a.alloc(0, 64);
    b.send(&get_tensor_request(&second.byte_tensor(), 0, 64));
    b.expect_refused(&["GET_TENSOR", "no buffer has the handle"]);
    assert_eq!(a.get_tensor(&of_a.byte_tensor(), 0, 64), [1; 64]);
}
