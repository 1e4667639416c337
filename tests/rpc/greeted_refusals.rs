//! Mistakes of a client that has greeted: it is told what it did, as the log is, and others do not notice.

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::{CloseQueue, Copy, ExtCommand, ExtHeader, ExtRequest, Greet, Shape, Span, WRITE_HEAD};
use fanout::rpc::wire::*;
use fanout::tensor::DType;

/// A mistake of a client with queues 0 and 1 on devices 0 and 1, 4096 bytes on each, and graph 7 on device 0.
type Mistake = (fn(&mut Client, &[ClientBuffer; 2]), &'static [&'static str]);

const MISTAKES: &[Mistake] = &[
    (|c, _| c.open_queue(0, 0), &["OPEN_QUEUE", "queue 0 is open already"]),
    (|c, _| c.open_queue(2, 2), &["OPEN_QUEUE", "no device 2: there are 2"]),
    (|c, _| (2..300).for_each(|queue| c.open_queue(queue, 0)), &["OPEN_QUEUE", "256 queues are open already"]),
    (|c, _| c.ask(&ExtRequest::CloseQueue(CloseQueue { queue: 9 })), &["CLOSE_QUEUE", "no queue 9 is open"]),
    (|c, _| c.ask(&ExtRequest::Greet(Greet { revision: 1 })), &["GREET", "right after HELLO, and once"]),
    (|c, _| c.run_graph(0, 8), &["RUN_GRAPH", "no graph 8 is kept"]),
    (|c, _| c.run_graph(5, 7), &["RUN_GRAPH", "no queue 5"]),
    (|c, _| c.run_graph(1, 7), &["RUN_GRAPH", "queue 1 is of device 1, graph 7 of device 0"]),
    (|c, m| c.keep_graph(7, 0, &[], &[m[0].floats(1, 4, 0)]), &["KEEP_GRAPH", "graph 7 is kept already"]),
    (|c, _| c.keep_graph(8, 2, &[], &[]), &["KEEP_GRAPH", "no device 2"]),
    (|c, m| c.keep_graph(8, 0, &[9], &[m[0].floats(1, 4, 0)]), &["KEEP_GRAPH", "invalid graph"]),
    (|c, m| c.write_span(0, m[1].all(), None, &[]), &["WRITE", "queue 0 is of device 0, the buffer lies on device 1"]),
    (|c, m| c.write_span(0, m[0].span(4000, 97), None, &[]), &["WRITE", "bytes 4000 + 97 reach past", "4096"]),
    (|c, m| c.write_span(0, m[0].span(1 << 63, 1 << 62), None, &[]), &["WRITE", "reach past the buffer"]),
    (|c, m| c.write_span(3, m[0].span(0, 1), None, &[]), &["WRITE", "no queue 3"]),
    (|c, _| c.write_span(0, Span { buffer: 99, offset: 0, len: 4 }, None, &[]), &["WRITE", "no buffer has the handle"]),
    (
        |c, m| c.write_span(0, m[0].span(0, 8), shape(DType::F32, [3, 1, 1, 1]), &[]),
        &["WRITE", "that of 12 bytes", "8"],
    ),
    (|c, m| c.write_span(0, m[0].span(0, 8), Some(Shape { dtype: 99, ne: [1; 4] }), &[]), &["WRITE", "type number 99"]),
    (|c, m| c.write_span(0, m[0].span(0, 8), shape(DType::Q4_K, [3, 1, 1, 1]), &[]), &["WRITE", "impossible tensor"]),
    (lying_write, &["WRITE", "malformed", "a span of 8 bytes with 9 bytes"]),
    (|c, m| c.read_spans(0, 1, &[m[0].span(0, 4096), m[0].span(4096, 1)]), &["READ", "bytes 4096 + 1 reach past"]),
    (|c, m| c.read_spans(0, 1, &[m[0].span(0, 1), m[1].span(0, 1)]), &["READ", "queue 0 is of device 0"]),
    (|c, m| c.read_spans(0, 1, &vec![m[0].all(); 4097]), &["READ", "over the limit of 16777216"]),
    (|c, m| c.read_spans(0, 1, &[Span { len: u64::MAX, ..m[0].all() }; 3]), &["READ", "over the limit"]),
    (|c, m| c.fill_span(0, m[1].all(), 1), &["FILL", "queue 0 is of device 0"]),
    (|c, m| c.ask(&copy(1, m[1].all(), m[0].all())), &["COPY", "queue 1 is of device 1, the buffer lies on device 0"]),
    (|c, m| c.ask(&copy(0, m[1].span(0, 4), m[0].span(0, 5))), &["COPY", "malformed", "4 bytes to 5 bytes"]),
    (marks_backwards, &["MARK", "mark 4 comes after mark 4"]),
    (|c, _| c.ask_for(0, 1), &["ASK", "queue 0 has no mark 1"]),
    (between_marks, &["ASK", "queue 0 has no mark 2"]),
    (|c, _| c.wait_for(0, 1, 1), &["WAIT", "queue 1 has no mark 1"]),
    (|c, _| c.wait_for(0, 7, 1), &["WAIT", "no queue 7"]),
    (|c, _| c.wait_for(7, 0, 1), &["WAIT", "queue 0 has no mark 1"]),
    (freed, &["READ", "no buffer has the handle"]),
    (|c, _| c.send(&Request::DeviceCount(DeviceCount {})), &["DEVICE_COUNT", "not served after GREET"]),
    (|c, _| c.send(&hello()), &["HELLO", "not served after GREET"]),
    (|c, m| c.send(&get(&m[0].bytes(), 0, 4)), &["GET_TENSOR", "not served after GREET"]),
    (|c, _| c.write(&[18, 0, 0, 0, 0, 0, 0, 0, 0]), &["unknown command 18"]),
    (|c, _| c.write(&[200, 0, 0, 0, 0, 0, 0, 0, 0]), &["unknown command 200"]),
    (|c, _| header(c, ExtCommand::Mark, 11), &["MARK", "expected 12 bytes, 11 are left"]),
    (|c, _| header(c, ExtCommand::Mark, 13), &["MARK", "13 is over the limit of 12"]),
    (|c, _| header(c, ExtCommand::KeepGraph, 1 << 40), &["KEEP_GRAPH", "over the limit of 16777216"]),
    (|c, _| header(c, ExtCommand::Write, 47), &["WRITE", "expected 48 bytes"]),
];

fn shape(dtype: DType, ne: [u32; 4]) -> Option<Shape> {
    Some(Shape { dtype: dtype.to_wire(), ne })
}

fn copy(queue: u32, src: Span, dst: Span) -> ExtRequest<'static> {
    ExtRequest::Copy(Copy { queue, src, dst })
}

fn header(client: &mut Client, command: ExtCommand, size: u64) {
    client.write(&ExtHeader { command, size }.encode());
}

fn lying_write(client: &mut Client, memory: &[ClientBuffer; 2]) {
    let mut bytes = Vec::new();
    let head = ext::WriteHead { queue: 0, span: memory[0].span(0, 8), shape: None };
    ExtRequest::WriteHead(head).encode(&mut bytes);
    bytes[1..9].copy_from_slice(&(WRITE_HEAD as u64 + 9).to_le_bytes());
    client.write(&bytes);
}

fn marks_backwards(client: &mut Client, _: &[ClientBuffer; 2]) {
    client.mark(0, 4);
    client.mark(0, 4);
}

fn between_marks(client: &mut Client, _: &[ClientBuffer; 2]) {
    client.mark(0, 1);
    client.mark(0, 3);
    client.ask_for(0, 2);
}

fn freed(client: &mut Client, memory: &[ClientBuffer; 2]) {
    client.free(&memory[0]);
    client.read_spans(0, 1, &[memory[0].all()]);
}

#[test]
fn each_mistake_is_told_and_ends_its_own_session() {
    let server = TestServer::with_devices(2, Config::default());
    let mut other = Client::with_queues(&server);
    let kept = other.buffer(0, 64);
    for (mistake, parts) in MISTAKES {
        let mut client = Client::with_queues(&server);
        let memory = [client.buffer(0, 4096), client.buffer(1, 4096)];
        let (a, b) = (memory[0].floats(1, 4, 0), memory[0].floats(2, 4, 16));
        let sum = node(OpCode::Add, memory[0].floats(3, 4, 32), &[&a, &b]);
        client.keep_graph(7, 0, &[3], &[a, b, sum]);
        mistake(&mut client, &memory);
        client.expect_told_refusal(parts);
        other.pings();
    }
    eventually("the memory is back", || server.used(0) == kept.size && server.used(1) == 0);
}

/// However much a client has sent behind its mistake: it reads why.
#[test]
fn the_reason_arrives_before_the_end() {
    let server = TestServer::start(Config::default());
    for _ in 0..20 {
        let mut client = Client::with_queues(&server);
        let mut bytes = Vec::new();
        ExtRequest::CloseQueue(CloseQueue { queue: 9 }).encode(&mut bytes);
        (0..20_000).for_each(|_| ExtRequest::Ping(ext::Ping {}).encode(&mut bytes));
        client.write(&bytes);
        client.expect_told_refusal(&["CLOSE_QUEUE", "no queue 9 is open"]);
    }
}

#[test]
fn a_client_that_stalls_or_leaves_in_a_message_is_closed() {
    let server = TestServer::start(Config::default().with_stall_timeout(SHORT));
    for leaves in [true, false] {
        for (promised, sent) in [(64 << 10, 1000), (1 << 20, 300 << 10)] {
            let mut client = Client::with_queues(&server);
            let memory = client.buffer(0, 1 << 20);
            client.write_span(0, memory.span(0, promised), None, &noise(1, sent));
            if leaves {
                client.hang_up();
            }
            let what = if leaves { "in the middle of a message" } else { "stalled: no more bytes" };
            client.expect_refused(&["WRITE", what]);
        }
    }
    eventually("the memory is back", || server.used(0) == 0);
}
