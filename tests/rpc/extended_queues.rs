//! Queues of one extended session: each queue executes in order, independently of others; marks, waits, copies, failures and
//! limits.

use crate::extended_support::*;
use crate::support::*;
use fanout::device::{Device, DeviceError, Domain};
use fanout::ops::OpCode;
use fanout::rpc::server::{Config, MIN_MESSAGE};
use fanout::rpc::wire::ext::{
    CloseQueue, CopySpan, DeviceFault, DeviceFaultKind, ExtCommand, ExtRequest, ExtResponse, Load, Ping, ServerState,
};
use fanout::tensor::{ByteRuns, DType};
use fanout_testing::gated_device::Gate;
use std::sync::Arc;

/// Two devices that run nothing until they are released, and a client with a queue on each.
fn held_devices_and_client() -> ([Arc<HeldDevice>; 2], TestServer, Client) {
    let devices = [HeldDevice::new("CPU0"), HeldDevice::new("CPU1")];
    let server = TestServer::with_device_list(
        devices.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect(),
        Config::default(),
    );
    let client = Client::connect_with_queues(&server);
    (devices, server, client)
}

#[test]
fn queues_complete_independently_of_each_other() {
    let ([first, second], _server, mut client) = held_devices_and_client();
    let memory = [client.alloc_ext(0, 64), client.alloc_ext(1, 64)];
    for queue in [0, 1] {
        client.fill_span(queue, memory[queue as usize].whole_span(), 1 + queue as u8);
        client.mark(queue, 5);
        client.notify_reached(queue, 5);
        client.read_spans(queue, 10 + u64::from(queue), &[memory[queue as usize].whole_span()]);
        client.mark(queue, 6);
        client.notify_reached(queue, 6);
        client.notify_reached(queue, 5);
    }
    client.assert_ping_replied();
    // The second queue completes first. Each queue reports in submission order; the repeated request is reported last.
    for (queue, device) in [(1, second), (0, first)] {
        device.release();
        assert_eq!(client.next_notification(), ReceivedNotification::MarkReached(queue, 5));
        assert_eq!(client.next_notification(), data_notification(10 + u64::from(queue), [1 + queue as u8; 64]));
        assert_eq!(client.next_notification(), ReceivedNotification::MarkReached(queue, 6));
        assert_eq!(client.next_notification(), ReceivedNotification::MarkReached(queue, 5));
    }
    client.assert_ping_replied();
}

#[test]
fn a_queue_waits_for_marks_of_other_queues() {
    let ([first, second], _server, mut client) = held_devices_and_client();
    let memory = client.alloc_ext(0, 64);
    client.open_queue(2, 0);
    client.fill_span(0, memory.whole_span(), 7);
    client.mark(0, 1);
    client.mark(1, 1);
    client.wait_for_mark(2, 0, 1);
    client.wait_for_mark(2, 1, 1);
    // A queue may wait only for marks that were placed before, also for its own.
    client.wait_for_mark(2, 2, 0);
    client.expect_protocol_error(&["WAIT", "queue 2 has no mark 0"]);
    let mut client = Client::connect_extended(&_server).0;
    for (queue, device) in [(0, 0), (1, 1), (2, 0)] {
        client.open_queue(queue, device);
    }
    let memory = client.alloc_ext(0, 64);
    client.fill_span(0, memory.whole_span(), 7);
    client.mark(0, 1);
    client.mark(1, 3);
    client.wait_for_mark(2, 0, 1);
    client.wait_for_mark(2, 1, 3);
    client.mark(2, 9);
    client.wait_for_mark(2, 2, 9);
    client.read_spans(2, 4, &[memory.whole_span()]);
    client.notify_reached(0, 1);
    first.release();
    assert_eq!(client.next_notification(), ReceivedNotification::MarkReached(0, 1));
    // The mark of the second device is not reached yet.
    client.assert_ping_replied();
    second.release();
    assert_eq!(client.next_notification(), data_notification(4, [7; 64]));
}

/// A producer on one device and a consumer on another: every execution order that the marks allow gives the same bytes.
#[test]
fn results_do_not_depend_on_the_execution_order_of_queues() {
    for seed in 0..20 {
        let gate = Gate::among_threads(seed);
        let devices = ["A", "B"].map(|name| gate.device(name).shared());
        let server = TestServer::with_device_list(devices.to_vec(), Config::default());
        let mut client = Client::connect_with_queues(&server);
        let (from, to) = (client.alloc_ext(0, 256), client.alloc_ext(1, 256));
        for round in 1..6u8 {
            client.fill_span(0, from.whole_span(), round);
            client.mark(0, round.into());
            client.wait_for_mark(1, 0, round.into());
            client.send_ext(&ExtRequest::CopySpan(CopySpan { queue: 1, src: from.whole_span(), dst: to.whole_span() }));
            client.mark(1, round.into());
            client.wait_for_mark(0, 1, round.into());
            client.read_spans(1, round.into(), &[to.span(100, 3)]);
        }
        for round in 1..6u8 {
            assert_eq!(client.next_notification(), data_notification(round.into(), [round; 3]), "seed {seed}");
        }
        assert_eq!(gate.races(), Vec::<String>::new(), "seed {seed}");
    }
}

/// If devices cannot access each other's memory, the server copies through host memory, in order with the destination's queue.
#[test]
fn copies_work_between_any_two_devices() {
    let gate = Gate::among_threads(1);
    let far = gate.device("B").with_info(|info| info.domain = Domain::named("elsewhere")).shared();
    let server = TestServer::with_device_list(vec![gate.device("A").shared(), far], Config::default());
    let mut client = Client::connect_with_queues(&server);
    let n = 3 << 20;
    let memory = [client.alloc_ext(0, n), client.alloc_ext(1, n)];
    let bytes = random_bytes(1, n as usize);
    client.write_span(0, memory[0].whole_span(), None, &bytes);
    client.mark(0, 1);
    client.wait_for_mark(1, 0, 1);
    let copy = |queue, src, dst| ExtRequest::CopySpan(CopySpan { queue, src, dst });
    for round in 0..2 {
        client.send_ext(&copy(1, memory[0].whole_span(), memory[1].whole_span()));
        client.read_spans(1, round, &[memory[1].whole_span()]);
        assert!(client.next_notification() == data_notification(round, &bytes));
    }
    // Within one device source and destination may overlap.
    client.send_ext(&copy(1, memory[1].span(0, 1000), memory[1].span(10, 1000)));
    client.send_ext(&copy(1, memory[1].span(0, 0), memory[1].span(10, 0)));
    client.read_spans(1, 9, &[memory[1].span(10, 1000)]);
    assert_eq!(client.next_notification(), data_notification(9, &bytes[..1000]));
}

#[test]
fn a_queue_failure_reports_its_cause_and_ends_only_its_queue() {
    let driver = DeviceError::Driver { device: "CPU0".to_owned(), call: "launch", reason: "it fell".to_owned() };
    let text = driver.to_string();
    let memory = DeviceError::OutOfMemory { requested: 3, available: 2, limit: 9 };
    let kind = DeviceFaultKind::OutOfMemory { requested: 3, available: 2, limit: 9 };
    let op = OpCode::GetRows;
    let index = DeviceError::Data { op, reason: "row 9 of 4".to_owned() };
    for (error, fault) in [
        (driver, DeviceFault { kind: DeviceFaultKind::Other, text }),
        (memory, DeviceFault { kind, text: String::new() }),
        (index, DeviceFault { kind: DeviceFaultKind::Data(op.to_wire()), text: "row 9 of 4".to_owned() }),
    ] {
        let ([first, second], server, mut client) = held_devices_and_client();
        let memory = [client.alloc_ext(0, 1 << 20), client.alloc_ext(1, 64)];
        client.fill_span(0, memory[0].whole_span(), 1);
        client.mark(0, 1);
        client.notify_reached(0, 1);
        first.fail(error);
        assert_eq!(client.next_notification(), ReceivedNotification::QueueFailed(0, fault));
        // Commands for a failed queue are ignored. The data of an ignored WRITE must not be decoded as messages.
        client.write_span(0, memory[0].whole_span(), None, &random_bytes(1, 1 << 20));
        client.read_spans(0, 1, &[memory[0].whole_span()]);
        client.fill_span(0, memory[0].whole_span(), 1);
        client.mark(0, 2);
        client.notify_reached(0, 2);
        client.wait_for_mark(0, 1, 0);
        client.expect_protocol_error(&["WAIT", "queue 1 has no mark 0"]);
        drop((second, server));
    }
}

#[test]
fn queues_that_wait_for_a_failed_queue_fail_and_others_continue() {
    let ([first, second], _server, mut client) = held_devices_and_client();
    let memory = [client.alloc_ext(0, 64), client.alloc_ext(1, 64)];
    client.open_queue(2, 1);
    client.open_queue(3, 1);
    client.mark(0, 1);
    client.wait_for_mark(2, 0, 1);
    client.mark(2, 1);
    client.notify_reached(2, 1);
    client.notify_reached(0, 1);
    second.release();
    first.fail(DeviceError::Ended);
    let mut failed = [client.next_notification(), client.next_notification()].map(|told| match told {
        ReceivedNotification::QueueFailed(queue, fault) => (queue, fault.text),
        other => panic!("{other:?}"),
    });
    failed.sort();
    assert_eq!(failed.each_ref().map(|(queue, _)| *queue), [0, 2]);
    // A mark that is placed after the failure is never reached: the queue that waits for it fails.
    client.mark(0, 2);
    client.wait_for_mark(3, 0, 2);
    match client.next_notification() {
        ReceivedNotification::QueueFailed(3, fault) => {
            assert!(
                fault.text.contains("queue 0 has failed before its mark 2, which this queue waits for"),
                "{fault:?}"
            )
        }
        other => panic!("{other:?}"),
    }
    client.fill_span(1, memory[1].whole_span(), 4);
    client.read_spans(1, 1, &[memory[1].whole_span()]);
    assert_eq!(client.next_notification(), data_notification(1, [4; 64]));
    // After CLOSE_QUEUE the id of a failed queue can be reused.
    client.send_ext(&ExtRequest::CloseQueue(CloseQueue { queue: 3 }));
    client.open_queue(3, 1);
    client.read_spans(3, 2, &[memory[1].whole_span()]);
    assert_eq!(client.next_notification(), data_notification(2, [4; 64]));
}

#[test]
fn out_of_range_rows_fail_the_queue() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, 4096);
    let (table, index) =
        (memory.tensor(1, DType::F32, [4, 4, 1, 1], 0), memory.tensor(2, DType::I32, [1, 1, 1, 1], 512));
    let rows = node(OpCode::GetRows, memory.tensor(3, DType::F32, [4, 1, 1, 1], 1024), &[&table, &index]);
    client.prepare_graph(1, 0, &[3], &[table, index, rows]);
    client.run_graph(0, 1);
    client.write_span(0, memory.span(512, 4), None, &9i32.to_le_bytes());
    client.run_graph(0, 1);
    client.read_spans(0, 1, &[memory.span(1024, 16)]);
    match client.next_notification() {
        ReceivedNotification::QueueFailed(0, fault) => {
            assert_eq!(fault.kind, DeviceFaultKind::Data(OpCode::GetRows.to_wire()), "{fault:?}")
        }
        other => panic!("{other:?}"),
    }
    client.assert_ping_replied();
}

#[test]
fn many_marks_are_reported_in_order() {
    let ([first, _], _server, mut client) = held_devices_and_client();
    // More notifications than the server buffers: it stops reading until some are sent.
    for number in 1..=3000 {
        client.mark(0, number);
        client.notify_reached(0, number);
    }
    first.release();
    for number in 1..=3000 {
        assert_eq!(client.next_notification(), ReceivedNotification::MarkReached(0, number));
    }
    // Marks that the server has forgotten count as reached.
    for number in [1, 2999] {
        client.mark(0, 4000 + number);
        client.notify_reached(0, number);
        assert_eq!(client.next_notification(), ReceivedNotification::MarkReached(0, number));
    }
}

/// The limit counts the marks of all queues of a session. Marks of failed queues do not count.
#[test]
fn unreached_marks_are_limited_per_session() {
    const MOST: u64 = 1 << 16;
    let ([first, _second], _server, mut client) = held_devices_and_client();
    for number in 1..=MOST / 2 {
        client.mark(0, number);
        client.mark(1, number);
    }
    client.assert_ping_replied();
    client.mark(0, MOST);
    client.expect_protocol_error(&["MARK", "65536 marks are not reached"]);
    let mut client = Client::connect_with_queues(&_server);
    for number in 1..=MOST {
        client.mark(0, number);
    }
    client.notify_reached(0, 9);
    first.fail(DeviceError::Ended);
    assert!(matches!(client.next_notification(), ReceivedNotification::QueueFailed(0, _)));
    (1..=MOST).for_each(|number| client.mark(1, number));
    client.assert_ping_replied();
    // The marks of the failed queue do not count as reached.
    client.wait_for_mark(1, 0, 9);
    assert!(matches!(client.next_notification(), ReceivedNotification::QueueFailed(1, _)));
    client.assert_ping_replied();
}

/// A large upload blocks the session's thread until earlier work of the queue is done. Meanwhile the session sends SERVER_STATE
/// as a heartbeat.
#[test]
fn a_blocked_session_sends_heartbeats() {
    let ([first, _], _server, mut client) = held_devices_and_client();
    let memory = client.alloc_ext(0, 1 << 20);
    let bytes = random_bytes(1, 1 << 20);
    client.write_span(0, memory.whole_span(), None, &bytes);
    client.read_spans(0, 1, &[memory.whole_span()]);
    for _ in 0..2 {
        assert_eq!(client.next_notification_or_state(), ReceivedNotification::ServerState(ServerState::Ready));
    }
    first.release();
    assert!(client.next_notification() == data_notification(1, &bytes));
    client.assert_ping_replied();
}

/// The limit of outstanding reads counts the host memory of a read, which is more than its bytes, so small reads reach it too.
#[test]
fn many_small_reads_count_against_the_read_limit() {
    // Fewer commands than a queue accepts without blocking: only the read limit can block the session.
    for (reads, spans) in [(20, 1), (2, 30)] {
        let held = HeldDevice::new("CPU0");
        let config = Config::default().with_limits(Config::limits(16, MIN_MESSAGE));
        let server = TestServer::with_device_list(vec![held.clone()], config);
        let mut client = Client::connect_with_queues(&server);
        let memory = client.alloc_ext(0, 1 << 10);
        let spans: Vec<_> = (0..spans).map(|at| memory.span(at, 1)).collect();
        client.fill_span(0, memory.whole_span(), 3);
        for id in 0..reads {
            client.read_spans(0, id, &spans);
        }
        client.send_ext(&ExtRequest::Ping(Ping {}));
        assert_eq!(
            client.next_notification_or_state(),
            ReceivedNotification::ServerState(ServerState::Ready),
            "the session is blocked"
        );
        held.release();
        // The session replies to PING once it has accepted the last read. The data of that read may arrive before or after the
        // reply.
        let (mut told, mut answers) = (Vec::new(), 0);
        while told.len() + answers < reads as usize + 1 {
            match client.next_notification() {
                ReceivedNotification::Reply(_) => answers += 1,
                other => told.push(other),
            }
        }
        assert_eq!(told, (0..reads).map(|id| data_notification(id, vec![3; spans.len()])).collect::<Vec<_>>());
        assert_eq!(answers, 1);
    }
}

#[test]
fn load_finds_nothing_without_a_models_folder() {
    let server = TestServer::start(Config::default());
    let mut client = Client::connect_with_queues(&server);
    let span = client.alloc_ext(0, 64).whole_span();
    let (bytes, runs) = (64, ByteRuns::whole(64));
    client.send_ext(&ExtRequest::Load(Load { queue: 0, span, shape: None, digest: [0; 32], bytes, runs, name: "a" }));
    let body = client.next_ext_reply();
    assert_eq!(ExtResponse::decode(ExtCommand::Load, &body), Ok(ExtResponse::Load(false)));
}
