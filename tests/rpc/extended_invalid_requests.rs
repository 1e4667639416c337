//! Invalid requests of extended sessions: the server sends the reason (PROTOCOL_ERROR), logs it and closes the connection.
//! Other sessions are not affected.

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{
    BufferSpan, CloseQueue, CopySpan, ExtCommand, ExtHeader, ExtRequest, HelloExt, TensorShape, WRITE_HEAD,
};
use fanout::rpc::wire::*;
use fanout::tensor::DType;

/// An invalid request and parts of the reason that the server must send. The client has queues 0 and 1 on devices 0 and 1, a
/// buffer of 4096 bytes on each device, and graph 7 on device 0.
type InvalidRequest = (fn(&mut Client, &[ClientBuffer; 2]), &'static [&'static str]);

const INVALID_REQUESTS: &[InvalidRequest] = &[
    (|c, _| c.open_queue(0, 0), &["OPEN_QUEUE", "queue 0 is open already"]),
    (|c, _| c.open_queue(2, 2), &["OPEN_QUEUE", "no device 2: there are 2"]),
    (|c, _| (2..300).for_each(|queue| c.open_queue(queue, 0)), &["OPEN_QUEUE", "256 queues are open already"]),
    (|c, _| c.send_ext(&ExtRequest::CloseQueue(CloseQueue { queue: 9 })), &["CLOSE_QUEUE", "no queue 9 is open"]),
    (|c, _| c.send_ext(&ExtRequest::HelloExt(HelloExt { revision: 2 })), &["HELLO_EXT", "right after HELLO, and once"]),
    (|c, _| c.run_graph(0, 8), &["RUN_GRAPH", "no graph 8 is prepared"]),
    (|c, _| c.run_graph(5, 7), &["RUN_GRAPH", "no queue 5"]),
    (|c, _| c.run_graph(1, 7), &["RUN_GRAPH", "queue 1 is of device 1, graph 7 of device 0"]),
    (
        |c, m| c.prepare_graph(7, 0, &[], &[m[0].float_tensor(1, 4, 0)]),
        &["PREPARE_GRAPH", "graph 7 is prepared already"],
    ),
    (|c, _| c.prepare_graph(8, 2, &[], &[]), &["PREPARE_GRAPH", "no device 2"]),
    (|c, m| c.prepare_graph(8, 0, &[9], &[m[0].float_tensor(1, 4, 0)]), &["PREPARE_GRAPH", "invalid graph"]),
    (
        |c, m| c.write_span(0, m[1].whole_span(), None, &[]),
        &["WRITE", "queue 0 is of device 0, the buffer lies on device 1"],
    ),
    (|c, m| c.write_span(0, m[0].span(4000, 97), None, &[]), &["WRITE", "bytes 4000 + 97 reach past", "4096"]),
    (|c, m| c.write_span(0, m[0].span(1 << 63, 1 << 62), None, &[]), &["WRITE", "reach past the buffer"]),
    (|c, m| c.write_span(3, m[0].span(0, 1), None, &[]), &["WRITE", "no queue 3"]),
    (
        |c, _| c.write_span(0, BufferSpan { buffer: 99, offset: 0, len: 4 }, None, &[]),
        &["WRITE", "no buffer has the handle"],
    ),
    (
        |c, m| c.write_span(0, m[0].span(0, 8), shape(DType::F32, [3, 1, 1, 1]), &[]),
        &["WRITE", "the tensor has 12 bytes", "8"],
    ),
    (
        |c, m| c.write_span(0, m[0].span(0, 8), Some(TensorShape { dtype: 99, ne: [1; 4] }), &[]),
        &["WRITE", "type number 99"],
    ),
    (|c, m| c.write_span(0, m[0].span(0, 8), shape(DType::Q4_K, [3, 1, 1, 1]), &[]), &["WRITE", "impossible tensor"]),
    (write_with_wrong_length, &["WRITE", "malformed", "a span of 8 bytes with 9 bytes"]),
    (|c, m| c.read_spans(0, 1, &[m[0].span(0, 4096), m[0].span(4096, 1)]), &["READ", "bytes 4096 + 1 reach past"]),
    (|c, m| c.read_spans(0, 1, &[m[0].span(0, 1), m[1].span(0, 1)]), &["READ", "queue 0 is of device 0"]),
    (|c, m| c.read_spans(0, 1, &vec![m[0].whole_span(); 4097]), &["READ", "over the limit of 16777216"]),
    (|c, m| c.read_spans(0, 1, &[BufferSpan { len: u64::MAX, ..m[0].whole_span() }; 3]), &["READ", "over the limit"]),
    (|c, m| c.fill_span(0, m[1].whole_span(), 1), &["FILL", "queue 0 is of device 0"]),
    (
        |c, m| c.send_ext(&copy(1, m[1].whole_span(), m[0].whole_span())),
        &["COPY", "queue 1 is of device 1, the buffer lies on device 0"],
    ),
    (|c, m| c.send_ext(&copy(0, m[1].span(0, 4), m[0].span(0, 5))), &["COPY", "malformed", "4 bytes to 5 bytes"]),
    (repeat_mark, &["MARK", "mark 4 comes after mark 4"]),
    (|c, _| c.notify_reached(0, 1), &["NOTIFY_REACHED", "queue 0 has no mark 1"]),
    (request_unplaced_mark, &["NOTIFY_REACHED", "queue 0 has no mark 2"]),
    (|c, _| c.wait_for_mark(0, 1, 1), &["WAIT", "queue 1 has no mark 1"]),
    (|c, _| c.wait_for_mark(0, 7, 1), &["WAIT", "no queue 7"]),
    (|c, _| c.wait_for_mark(7, 0, 1), &["WAIT", "queue 0 has no mark 1"]),
    (read_freed_buffer, &["READ", "no buffer has the handle"]),
    (|c, _| c.send(&Request::DeviceCount(DeviceCount {})), &["DEVICE_COUNT", "not served after HELLO_EXT"]),
    (|c, _| c.send(&hello_request()), &["HELLO", "not served after HELLO_EXT"]),
    (|c, m| c.send(&get_tensor_request(&m[0].byte_tensor(), 0, 4)), &["GET_TENSOR", "not served after HELLO_EXT"]),
    (|c, _| c.write(&[23, 0, 0, 0, 0, 0, 0, 0, 0]), &["unknown command 23"]),
    (|c, _| c.write(&[200, 0, 0, 0, 0, 0, 0, 0, 0]), &["unknown command 200"]),
    (|c, _| header(c, ExtCommand::Mark, 11), &["MARK", "expected a body of 12 bytes, the header says 11 bytes"]),
    (|c, _| header(c, ExtCommand::Mark, 13), &["MARK", "expected a body of 12 bytes, the header says 13 bytes"]),
    (|c, _| header(c, ExtCommand::PrepareGraph, 1 << 40), &["PREPARE_GRAPH", "over the limit of 16777216"]),
    (|c, _| header(c, ExtCommand::Write, 47), &["WRITE", "expected a body of at least 48 bytes"]),
];

fn shape(dtype: DType, ne: [u32; 4]) -> Option<TensorShape> {
    Some(TensorShape { dtype: dtype.to_wire(), ne })
}

fn copy(queue: u32, src: BufferSpan, dst: BufferSpan) -> ExtRequest<'static> {
    ExtRequest::CopySpan(CopySpan { queue, src, dst })
}

fn header(client: &mut Client, command: ExtCommand, size: u64) {
    client.write(&ExtHeader { command, size }.encode());
}

fn write_with_wrong_length(client: &mut Client, memory: &[ClientBuffer; 2]) {
    let mut bytes = Vec::new();
    let head = ext::WriteHead { queue: 0, span: memory[0].span(0, 8), shape: None };
    ExtRequest::WriteHead(head).encode(&mut bytes);
    bytes[1..9].copy_from_slice(&(WRITE_HEAD as u64 + 9).to_le_bytes());
    client.write(&bytes);
}

fn repeat_mark(client: &mut Client, _: &[ClientBuffer; 2]) {
    client.mark(0, 4);
    client.mark(0, 4);
}

fn request_unplaced_mark(client: &mut Client, _: &[ClientBuffer; 2]) {
    client.mark(0, 1);
    client.mark(0, 3);
    client.notify_reached(0, 2);
}

fn read_freed_buffer(client: &mut Client, memory: &[ClientBuffer; 2]) {
    client.free(&memory[0]);
    client.read_spans(0, 1, &[memory[0].whole_span()]);
}

#[test]
fn an_invalid_request_is_reported_and_ends_only_its_session() {
    let server = TestServer::with_devices(2, Config::default());
    let mut other = Client::connect_with_queues(&server);
    let buffer = other.alloc_ext(0, 1 << 18);
    for (send_invalid, parts) in INVALID_REQUESTS {
        let mut client = Client::connect_with_queues(&server);
        let memory = [client.alloc_ext(0, 4096), client.alloc_ext(1, 4096)];
        let (a, b) = (memory[0].float_tensor(1, 4, 0), memory[0].float_tensor(2, 4, 16));
        let sum = node(OpCode::Add, memory[0].float_tensor(3, 4, 32), &[&a, &b]);
        client.prepare_graph(7, 0, &[3], &[a, b, sum]);
        send_invalid(&mut client, &memory);
        client.expect_protocol_error(parts);
        other.assert_ping_replied();
    }
    eventually("the server has freed the memory of the session", || {
        server.used_bytes(0) == buffer.size && server.used_bytes(1) == 0
    });
}

/// The client receives the reason even if it has sent many requests behind the invalid one.
#[test]
fn the_reason_arrives_before_the_connection_closes() {
    let server = TestServer::start(Config::default());
    for _ in 0..20 {
        let mut client = Client::connect_with_queues(&server);
        let mut bytes = Vec::new();
        ExtRequest::CloseQueue(CloseQueue { queue: 9 }).encode(&mut bytes);
        (0..20_000).for_each(|_| ExtRequest::Ping(ext::Ping {}).encode(&mut bytes));
        client.write(&bytes);
        client.expect_protocol_error(&["CLOSE_QUEUE", "no queue 9 is open"]);
    }
}

#[test]
fn a_client_that_stalls_or_disconnects_in_a_message_is_closed() {
    let server = TestServer::start(Config::default().with_stall_timeout(SHORT_TIMEOUT));
    for disconnects in [true, false] {
        for (promised, sent) in [(64 << 10, 1000), (1 << 20, 300 << 10)] {
            let mut client = Client::connect_with_queues(&server);
            let memory = client.alloc_ext(0, 1 << 20);
            client.write_span(0, memory.span(0, promised), None, &random_bytes(1, sent));
            if disconnects {
                client.shutdown_write();
            }
            let what = if disconnects { "in the middle of a message" } else { "stalled: no more bytes" };
            client.expect_refused(&["WRITE", what]);
        }
    }
    eventually("the server has freed the memory of the session", || server.used_bytes(0) == 0);
}
