//! Queues of one session: each in its own order, none in the way of another, and failures that stay where they are.

use crate::greeted_support::*;
use crate::support::*;
use fanout::device::{Device, DeviceError, Domain};
use fanout::ops::OpCode;
use fanout::rpc::server::{Config, MIN_MESSAGE};
use fanout::rpc::wire::ext::{Answer, CloseQueue, Copy, ExtCommand, ExtRequest, Fault, FaultKind, Load, Ping, State};
use fanout::tensor::DType;
use fanout_testing::gated_device::Gate;
use std::sync::Arc;

/// Two devices that wait for their gates, and a client with a queue on each.
fn held() -> ([Arc<Held>; 2], TestServer, Client) {
    let devices = [Held::new("CPU0"), Held::new("CPU1")];
    let server = TestServer::with_device_list(
        devices.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect(),
        Config::default(),
    );
    let client = Client::with_queues(&server);
    (devices, server, client)
}

#[test]
fn each_queue_answers_when_its_work_is_done() {
    let ([first, second], _server, mut client) = held();
    let memory = [client.buffer(0, 64), client.buffer(1, 64)];
    for queue in [0, 1] {
        client.fill_span(queue, memory[queue as usize].all(), 1 + queue as u8);
        client.mark(queue, 5);
        client.ask_for(queue, 5);
        client.read_spans(queue, 10 + u64::from(queue), &[memory[queue as usize].all()]);
        client.mark(queue, 6);
        client.ask_for(queue, 6);
        client.ask_for(queue, 5);
    }
    client.pings();
    // The later one first; each in its own order, with a question that was asked again at the end.
    for (queue, device) in [(1, second), (0, first)] {
        device.open();
        assert_eq!(client.told(), Told::Reached(queue, 5));
        assert_eq!(client.told(), data(10 + u64::from(queue), [1 + queue as u8; 64]));
        assert_eq!(client.told(), Told::Reached(queue, 6));
        assert_eq!(client.told(), Told::Reached(queue, 5));
    }
    client.pings();
}

#[test]
fn a_queue_waits_for_the_mark_of_another() {
    let ([first, second], _server, mut client) = held();
    let memory = client.buffer(0, 64);
    client.open_queue(2, 0);
    client.fill_span(0, memory.all(), 7);
    client.mark(0, 1);
    client.mark(1, 1);
    client.wait_for(2, 0, 1);
    client.wait_for(2, 1, 1);
    // A queue is in order with itself.
    client.wait_for(2, 2, 0);
    client.expect_told_refusal(&["WAIT", "queue 2 has no mark 0"]);
    let mut client = Client::greet(&_server).0;
    for (queue, device) in [(0, 0), (1, 1), (2, 0)] {
        client.open_queue(queue, device);
    }
    let memory = client.buffer(0, 64);
    client.fill_span(0, memory.all(), 7);
    client.mark(0, 1);
    client.mark(1, 3);
    client.wait_for(2, 0, 1);
    client.wait_for(2, 1, 3);
    client.mark(2, 9);
    client.wait_for(2, 2, 9);
    client.read_spans(2, 4, &[memory.all()]);
    client.ask_for(0, 1);
    first.open();
    assert_eq!(client.told(), Told::Reached(0, 1));
    // The mark of the other device is missing yet.
    client.pings();
    second.open();
    assert_eq!(client.told(), data(4, [7; 64]));
}

/// Every order that the marks allow gives the same bytes: a producer on one device, a consumer on another one.
#[test]
fn no_order_of_queues_changes_what_a_client_reads() {
    for seed in 0..20 {
        let gate = Gate::among_threads(seed);
        let devices = ["A", "B"].map(|name| gate.device(name).shared());
        let server = TestServer::with_device_list(devices.to_vec(), Config::default());
        let mut client = Client::with_queues(&server);
        let (from, to) = (client.buffer(0, 256), client.buffer(1, 256));
        for round in 1..6u8 {
            client.fill_span(0, from.all(), round);
            client.mark(0, round.into());
            client.wait_for(1, 0, round.into());
            client.ask(&ExtRequest::Copy(Copy { queue: 1, src: from.all(), dst: to.all() }));
            client.mark(1, round.into());
            client.wait_for(0, 1, round.into());
            client.read_spans(1, round.into(), &[to.span(100, 3)]);
        }
        for round in 1..6u8 {
            assert_eq!(client.told(), data(round.into(), [round; 3]), "seed {seed}");
        }
        assert_eq!(gate.races(), Vec::<String>::new(), "seed {seed}");
    }
}

/// Where devices cannot read each other's memory the server carries the bytes, in order with the destination's queue.
#[test]
fn copies_between_any_two_devices() {
    let gate = Gate::among_threads(1);
    let far = gate.device("B").with_info(|info| info.domain = Domain::named("elsewhere")).shared();
    let server = TestServer::with_device_list(vec![gate.device("A").shared(), far], Config::default());
    let mut client = Client::with_queues(&server);
    let n = 3 << 20;
    let memory = [client.buffer(0, n), client.buffer(1, n)];
    let bytes = noise(1, n as usize);
    client.write_span(0, memory[0].all(), None, &bytes);
    client.mark(0, 1);
    client.wait_for(1, 0, 1);
    let copy = |queue, src, dst| ExtRequest::Copy(Copy { queue, src, dst });
    for round in 0..2 {
        client.ask(&copy(1, memory[0].all(), memory[1].all()));
        client.read_spans(1, round, &[memory[1].all()]);
        assert!(client.told() == data(round, &bytes));
    }
    // Within one device parts may overlap.
    client.ask(&copy(1, memory[1].span(0, 1000), memory[1].span(10, 1000)));
    client.ask(&copy(1, memory[1].span(0, 0), memory[1].span(10, 0)));
    client.read_spans(1, 9, &[memory[1].span(10, 1000)]);
    assert_eq!(client.told(), data(9, &bytes[..1000]));
}

#[test]
fn a_failure_stays_with_its_queue_and_says_what_it_is() {
    let driver = DeviceError::Driver { device: "CPU0".to_owned(), call: "launch", reason: "it fell".to_owned() };
    let text = driver.to_string();
    let memory = DeviceError::OutOfMemory { asked: 3, left: 2, limit: 9 };
    let kind = FaultKind::OutOfMemory { asked: 3, left: 2, limit: 9 };
    let op = OpCode::GetRows;
    let index = DeviceError::Data { op, reason: "row 9 of 4".to_owned() };
    for (error, fault) in [
        (driver, Fault { kind: FaultKind::Other, text }),
        (memory, Fault { kind, text: String::new() }),
        (index, Fault { kind: FaultKind::Data(op.to_wire()), text: "row 9 of 4".to_owned() }),
    ] {
        let ([first, second], server, mut client) = held();
        let memory = [client.buffer(0, 1 << 20), client.buffer(1, 64)];
        client.fill_span(0, memory[0].all(), 1);
        client.mark(0, 1);
        client.ask_for(0, 1);
        first.fail(error);
        assert_eq!(client.told(), Told::Failed(0, fault));
        // All of this is for a queue that has failed: nothing is said, and no byte of the upload is taken for a message.
        client.write_span(0, memory[0].all(), None, &noise(1, 1 << 20));
        client.read_spans(0, 1, &[memory[0].all()]);
        client.fill_span(0, memory[0].all(), 1);
        client.mark(0, 2);
        client.ask_for(0, 2);
        client.wait_for(0, 1, 0);
        client.expect_told_refusal(&["WAIT", "queue 1 has no mark 0"]);
        drop((second, server));
    }
}

#[test]
fn what_waits_for_a_failed_queue_fails_and_others_go_on() {
    let ([first, second], _server, mut client) = held();
    let memory = [client.buffer(0, 64), client.buffer(1, 64)];
    client.open_queue(2, 1);
    client.open_queue(3, 1);
    client.mark(0, 1);
    client.wait_for(2, 0, 1);
    client.mark(2, 1);
    client.ask_for(2, 1);
    client.ask_for(0, 1);
    second.open();
    first.fail(DeviceError::Ended);
    let mut failed = [client.told(), client.told()].map(|told| match told {
        Told::Failed(queue, fault) => (queue, fault.text),
        other => panic!("{other:?}"),
    });
    failed.sort();
    assert_eq!(failed.each_ref().map(|(queue, _)| *queue), [0, 2]);
    // A mark that was made too late is never reached, which whoever waits for it hears.
    client.mark(0, 2);
    client.wait_for(3, 0, 2);
    match client.told() {
        Told::Failed(3, fault) => assert!(fault.text.contains("queue 0, whose mark 2 it waits for"), "{fault:?}"),
        other => panic!("{other:?}"),
    }
    client.fill_span(1, memory[1].all(), 4);
    client.read_spans(1, 1, &[memory[1].all()]);
    assert_eq!(client.told(), data(1, [4; 64]));
    // The number may be used again.
    client.ask(&ExtRequest::CloseQueue(CloseQueue { queue: 3 }));
    client.open_queue(3, 1);
    client.read_spans(3, 2, &[memory[1].all()]);
    assert_eq!(client.told(), data(2, [4; 64]));
}

#[test]
fn rows_that_are_not_there_fail_the_queue() {
    let server = TestServer::start(Config::default());
    let mut client = Client::with_queues(&server);
    let memory = client.buffer(0, 4096);
    let (table, index) =
        (memory.tensor(1, DType::F32, [4, 4, 1, 1], 0), memory.tensor(2, DType::I32, [1, 1, 1, 1], 512));
    let rows = node(OpCode::GetRows, memory.tensor(3, DType::F32, [4, 1, 1, 1], 1024), &[&table, &index]);
    client.keep_graph(1, 0, &[3], &[table, index, rows]);
    client.run_graph(0, 1);
    client.write_span(0, memory.span(512, 4), None, &9i32.to_le_bytes());
    client.run_graph(0, 1);
    client.read_spans(0, 1, &[memory.span(1024, 16)]);
    match client.told() {
        Told::Failed(0, fault) => assert_eq!(fault.kind, FaultKind::Data(OpCode::GetRows.to_wire()), "{fault:?}"),
        other => panic!("{other:?}"),
    }
    client.pings();
}

#[test]
fn many_marks_and_answers_are_kept_in_order() {
    let ([first, _], _server, mut client) = held();
    // More answers than are kept: the server reads on when there are fewer.
    for number in 1..=3000 {
        client.mark(0, number);
        client.ask_for(0, number);
    }
    first.open();
    for number in 1..=3000 {
        assert_eq!(client.told(), Told::Reached(0, number));
    }
    // Those that are forgotten are reached.
    for number in [1, 2999] {
        client.mark(0, 4000 + number);
        client.ask_for(0, number);
        assert_eq!(client.told(), Told::Reached(0, number));
    }
}

/// The limit is the session's. What a queue that has failed will never reach does not count.
#[test]
fn marks_that_are_not_reached_are_bounded() {
    const MOST: u64 = 1 << 16;
    let ([first, _second], _server, mut client) = held();
    for number in 1..=MOST / 2 {
        client.mark(0, number);
        client.mark(1, number);
    }
    client.pings();
    client.mark(0, MOST);
    client.expect_told_refusal(&["MARK", "65536 marks are not reached"]);
    let mut client = Client::with_queues(&_server);
    for number in 1..=MOST {
        client.mark(0, number);
    }
    client.ask_for(0, 9);
    first.fail(DeviceError::Ended);
    assert!(matches!(client.told(), Told::Failed(0, _)));
    (1..=MOST).for_each(|number| client.mark(1, number));
    client.pings();
    // They are not taken for reached.
    client.wait_for(1, 0, 9);
    assert!(matches!(client.told(), Told::Failed(1, _)));
    client.pings();
}

/// A large upload waits for the queue's earlier work, and the session's thread with it.
#[test]
fn a_session_that_is_kept_waiting_shows_that_it_lives() {
    let ([first, _], _server, mut client) = held();
    let memory = client.buffer(0, 1 << 20);
    let bytes = noise(1, 1 << 20);
    client.write_span(0, memory.all(), None, &bytes);
    client.read_spans(0, 1, &[memory.all()]);
    for _ in 0..2 {
        assert_eq!(client.heard(), Told::State(State::Ready));
    }
    first.open();
    assert!(client.told() == data(1, &bytes));
    client.pings();
}

/// What nobody has read yet is bounded by what it takes of the host, which is more than its bytes.
#[test]
fn small_reads_are_no_way_around_the_limit() {
    // Fewer than a queue takes in without waiting.
    for (reads, spans) in [(20, 1), (2, 30)] {
        let held = Held::new("CPU0");
        let config = Config::default().with_limits(Config::limits(16, MIN_MESSAGE));
        let server = TestServer::with_device_list(vec![held.clone()], config);
        let mut client = Client::with_queues(&server);
        let memory = client.buffer(0, 1 << 10);
        let spans: Vec<_> = (0..spans).map(|at| memory.span(at, 1)).collect();
        client.fill_span(0, memory.all(), 3);
        for id in 0..reads {
            client.read_spans(0, id, &spans);
        }
        client.ask(&ExtRequest::Ping(Ping {}));
        assert_eq!(client.heard(), Told::State(State::Ready), "the session waits");
        held.open();
        // The session answers once it could take in the last read, whose data may come before or after that.
        let (mut told, mut answers) = (Vec::new(), 0);
        while told.len() + answers < reads as usize + 1 {
            match client.told() {
                Told::Reply(_) => answers += 1,
                other => told.push(other),
            }
        }
        assert_eq!(told, (0..reads).map(|id| data(id, vec![3; spans.len()])).collect::<Vec<_>>());
        assert_eq!(answers, 1);
    }
}

#[test]
fn what_others_add_is_not_offered_yet() {
    let server = TestServer::start(Config::default());
    let mut client = Client::with_queues(&server);
    let span = client.buffer(0, 64).all();
    client.ask(&ExtRequest::Load(Load { queue: 0, span, shape: None, digest: [0; 32], name: "a" }));
    let body = client.answered();
    assert_eq!(Answer::decode(ExtCommand::Load, &body), Ok(Answer::Load(false)));
}
