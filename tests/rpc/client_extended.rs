//! What the client says to our server, and when: queues of the server's own, few messages, failures that stay where they are.
#![allow(clippy::unwrap_used)] // a test says what it needs by failing

use crate::client::{QueueFixture, account, deadline, options};
use crate::greeted_support::Held;
use crate::recorded_commands::RecordedCommands;
use crate::support::{MEMORY, TestServer, WATCHDOG, eventually, noise};
use fanout::device::{Device, DeviceError, Program, Queue, Region, Source, SourceError, Support};
use fanout::graph::{Builder, Graph};
use fanout::ops::OpCode;
use fanout::ops::binary::Binary;
use fanout::ops::rows::Rows;
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::ExtCommand;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::isolated_device::IsolatedDevice;
use fanout_testing::protocol_relay::ProtocolRelay;
use std::sync::Arc;

/// A server with an endpoint of its, and what goes between them.
fn relayed(server: &TestServer) -> (ProtocolRelay, Endpoint) {
    let relay = ProtocolRelay::start(server.addr, false);
    let endpoint = Endpoint::connect(&relay.addr.to_string(), &options()).expect("a server");
    (relay, endpoint)
}

/// Two devices that wait for their gates behind a server.
fn held_devices() -> ([Arc<Held>; 2], TestServer) {
    let devices = [Held::new("CPU0"), Held::new("CPU1")];
    let server = TestServer::with_device_list(
        devices.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect(),
        Config::default(),
    );
    (devices, server)
}

/// A graph that doubles `n` floats where they are.
fn doubling(n: usize) -> Arc<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
    let onto = b.view(x, b.tensor(x).unwrap().desc, 0).unwrap();
    b.node_into(Binary::Add, &[Some(x), Some(x)], onto).unwrap();
    Arc::new(b.build().unwrap())
}

fn program(device: &Arc<dyn Device>, n: usize) -> (QueueFixture, Program) {
    let graph = doubling(n);
    let rig = QueueFixture::new(device, graph.slot_sizes()[0] as u64);
    let program = rig.device.prepare(graph).unwrap();
    (rig, program)
}

#[test]
fn a_step_is_its_inputs_its_graph_and_its_results() {
    let server = TestServer::start(Config::default());
    let (relay, endpoint) = relayed(&server);
    let (mut rig, program) = program(&endpoint.devices()[0], 16);
    let bindings = Arc::from([rig.buffer.whole()]);
    let inputs = [0, 32].map(|at| rig.buffer.region(at, 32).unwrap());
    let mut step = |value: f32| {
        for input in &inputs {
            let bytes = value.to_le_bytes().repeat(8);
            rig.queue.upload(input.clone(), None, Source::Borrowed(&bytes)).unwrap();
        }
        rig.queue.run(&program, &bindings).unwrap();
        let done = rig.queue.mark();
        let results = rig.queue.download_all(&inputs).unwrap();
        done.wait(deadline()).unwrap();
        for result in results {
            assert_eq!(result.wait(deadline()).unwrap(), (2.0 * value).to_le_bytes().repeat(8));
        }
    };
    step(1.0);
    let (before, link) = (relay.commands().len(), rig.device.link_stats().unwrap());
    step(3.0);
    let commands = relay.commands().split_off(before);
    // The mark is proved by the read behind it: nobody asks for it.
    assert_eq!(commands, ["WRITE", "WRITE", "RUN_GRAPH", "MARK", "READ"]);
    let after = rig.device.link_stats().unwrap();
    assert_eq!(after.endpoint, relay.addr.to_string());
    // Five headers, two heads of 48 with 32 bytes each, 12, 12, and 12 with two spans; a notice with its number and 64 bytes.
    assert_eq!((after.sent - link.sent, after.received - link.received), (5 * 9 + 160 + 24 + 12 + 48, 9 + 8 + 64));
    assert!(after.waits - link.waits <= 2, "{after:?}");
}

/// As a scheduler does it, that looks whether to stop while it waits for the moment of its bytes.
#[test]
fn a_mark_behind_a_read_is_proved_by_it_too() {
    let ([device, _], server) = held_devices();
    let (relay, endpoint) = relayed(&server);
    let mut rig = QueueFixture::new(&endpoint.devices()[0], 64);
    rig.upload(&[3; 64]);
    let (read, mark) = (rig.queue.download(rig.buffer.whole()).unwrap(), rig.queue.mark());
    assert_eq!(mark.poll(), Ok(false));
    device.open();
    mark.wait(deadline()).unwrap();
    assert_eq!(read.wait(deadline()).unwrap(), [3; 64]);
    // Also where its bytes have come before.
    let read = rig.queue.download(rig.buffer.whole()).unwrap();
    assert_eq!(read.wait(deadline()).unwrap(), [3; 64]);
    assert_eq!(rig.queue.mark().poll(), Ok(true));
    // What comes in between does not prove it.
    let _read = rig.queue.download(rig.buffer.whole()).unwrap();
    rig.queue.fill(rig.buffer.whole(), 4).unwrap();
    rig.queue.mark().wait(deadline()).unwrap();
    assert_eq!(relay.count(ExtCommand::Ask), 1);
}

#[test]
fn graphs_are_sent_once_and_both_ends_forget_the_same() {
    let server = TestServer::start(Config::default());
    let (relay, endpoint) = relayed(&server);
    // More than a server keeps, in an order that brings some of them back before they are forgotten.
    let mut rigs: Vec<_> = (1..100).map(|n| program(&endpoint.devices()[0], n)).collect();
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..400 {
        let (rig, program) = &mut rigs[if rng.bool() { rng.usize(..99) } else { rng.usize(..20) }];
        rig.upload(&1f32.to_le_bytes().repeat(rig.buffer.bytes() as usize / 4));
        rig.queue.run(program, &Arc::from([rig.buffer.whole()])).unwrap();
        assert_eq!(rig.bytes()[..4], 2f32.to_le_bytes(), "round {round}");
        if round % 50 == 0 {
            rig.buffer = rig.device.alloc(rig.buffer.bytes(), &account()).unwrap();
        }
    }
    let (kept, run) = (relay.count(ExtCommand::KeepGraph), relay.count(ExtCommand::RunGraph));
    assert!(run == 400 && (99..350).contains(&kept), "{kept} of {run}");
}

#[test]
fn queues_wait_for_each_other_on_the_server_alone() {
    let ([first, second], server) = held_devices();
    let (relay, endpoint) = relayed(&server);
    let [mut a, mut b] = [0, 1].map(|i| QueueFixture::new(&endpoint.devices()[i], 64));
    let mut free = QueueFixture::new(&endpoint.devices()[1], 64);
    second.open();
    // What waits for nothing is done while another device is not.
    free.upload(&[9; 64]);
    a.upload(&[1; 64]);
    let after = a.queue.mark();
    // Neither the wait nor the copy behind it waits here: all of it is said before the gate opens.
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
    let copied = b.queue.mark();
    assert_eq!(free.bytes(), [9; 64]);
    assert_eq!(copied.poll(), Ok(false));
    eventually("all of it is said", || relay.count(ExtCommand::Copy) == 1 && relay.count(ExtCommand::Ask) == 1);
    let commands = relay.commands();
    let at = |command: ExtCommand| commands.iter().position(|&name| name == command.name()).unwrap();
    assert!(at(ExtCommand::Wait) < at(ExtCommand::Copy), "{commands:?}");
    first.open();
    copied.wait(deadline()).unwrap();
    // What it waited for is reached too: nobody has asked for it.
    assert_eq!((after.poll(), relay.count(ExtCommand::Ask)), (Ok(true), 1));
    assert_eq!(b.bytes(), [1; 64]);
}

/// What fails when a queue of a device runs it.
pub(crate) fn row_out_of_range(device: &Arc<dyn Device>, queue: &mut dyn Queue) -> (Program, Arc<[Region]>) {
    let mut b = Builder::new();
    let (rows, ids) = (b.leaf(DType::F32, [4, 3, 1, 1]).unwrap(), b.leaf(DType::I32, [1, 1, 1, 1]).unwrap());
    b.node(Rows::GetRows, &[Some(rows), Some(ids)]).unwrap();
    let graph = Arc::new(b.build().unwrap());
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let bindings: Arc<[_]> =
        graph.slot_sizes().iter().map(|&bytes| device.alloc(bytes as u64, &account()).unwrap().whole()).collect();
    for region in bindings.iter() {
        queue.fill(region.clone(), 7).unwrap();
    }
    (program, bindings)
}

#[test]
fn a_queue_fails_alone_and_says_why() {
    let server = TestServer::start(Config::default());
    let (_, endpoint) = relayed(&server);
    let device = &endpoint.devices()[0];
    let mut bad = device.queue(&account()).unwrap();
    let (program, bindings) = row_out_of_range(device, &mut *bad);
    let before = bad.mark();
    before.wait(deadline()).unwrap();
    // Whoever submits may hear of it already.
    let _ = bad.run(&program, &bindings);
    let after = bad.mark();
    let error = bad.download(bindings[0].clone()).and_then(|read| read.wait(deadline())).unwrap_err();
    assert!(matches!(&error, DeviceError::Data { op: OpCode::GetRows, .. }), "{error}");
    assert_eq!((after.wait(deadline()), before.poll()), (Err(error.clone()), Ok(true)));
    assert_eq!(bad.fill(bindings[0].clone(), 0), Err(error.clone()));
    assert_eq!(bad.download(bindings[0].clone()).map(drop), Err(error.clone()));
    // A queue that waits for it fails too, and others do not notice.
    let mut waits = device.queue(&account()).unwrap();
    assert_eq!(waits.wait(&after).and_then(|()| waits.mark().wait(deadline())), Err(error));
    let mut good = QueueFixture::new(device, 100);
    good.upload(&noise(1, 100));
    assert_eq!(good.bytes(), noise(1, 100));
}

#[test]
fn a_queue_does_not_fail_with_one_that_it_has_waited_for() {
    let ([first, second], server) = held_devices();
    let (_, endpoint) = relayed(&server);
    first.open();
    let mut bad = endpoint.devices()[0].queue(&account()).unwrap();
    let (program, bindings) = row_out_of_range(&endpoint.devices()[0], &mut *bad);
    let before = bad.mark();
    // The other one gets to its work when all that it waits for has long been done, which nobody has asked for.
    let mut good = QueueFixture::new(&endpoint.devices()[1], 64);
    good.queue.wait(&before).unwrap();
    good.upload(&[3; 64]);
    let read = good.queue.download(good.buffer.whole()).unwrap();
    let _ = bad.run(&program, &bindings);
    assert!(matches!(bad.mark().wait(deadline()), Err(DeviceError::Data { op: OpCode::GetRows, .. })));
    second.open();
    assert_eq!(read.wait(deadline()).unwrap(), [3; 64]);
}

#[test]
fn a_connection_has_as_many_queues_as_its_server_keeps() {
    let server = TestServer::start(Config::default());
    let (_, endpoint) = relayed(&server);
    let device = &endpoint.devices()[0];
    let mut rig = QueueFixture::new(device, 64);
    let mut more: Vec<_> = (1..256).map(|_| device.queue(&account()).unwrap()).collect();
    let error = device.queue(&account()).map(drop).unwrap_err();
    assert!(matches!(&error, DeviceError::Lacks { device, .. } if device.ends_with("/CPU0")), "{error}");
    // The others go on, and there is room where one ends.
    rig.upload(&[1; 64]);
    assert_eq!(rig.bytes(), [1; 64]);
    more.truncate(100);
    more.extend((100..255).map(|_| device.queue(&account()).unwrap()));
    assert!(device.queue(&account()).is_err());
    more.iter_mut().for_each(|queue| queue.fill(rig.buffer.whole(), 2).unwrap());
    more.iter_mut().for_each(|queue| queue.mark().wait(deadline()).unwrap());
}

#[test]
fn the_source_of_an_upload_keeps_nobody_waiting() {
    let server = TestServer::start(Config::default());
    let (_, endpoint) = relayed(&server);
    const SIZE: usize = 5 << 20;
    let [mut rig, mut other] = [0; 2].map(|_| QueueFixture::new(&endpoint.devices()[0], SIZE as u64));
    let desc = TensorDesc::contiguous(DType::I8, [SIZE, 1, 1, 1]).unwrap();
    let (go, asked) = std::sync::mpsc::channel();
    let (told, has) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            other.upload(&vec![4; SIZE]);
            for () in asked {
                told.send(other.bytes()).unwrap();
            }
        });
        let mut fill = |to: &mut [u8]| {
            go.send(()).map_err(SourceError::new)?;
            to.copy_from_slice(&has.recv_timeout(WATCHDOG).map_err(SourceError::new)?[..to.len()]);
            Ok(())
        };
        rig.queue.upload(rig.buffer.whole(), Some(&desc), Source::Writer(&mut fill)).unwrap();
        assert!(rig.bytes().iter().all(|&b| b == 4));
        drop(go);
    });
}

#[test]
fn graphs_are_cut_where_the_server_wants_it() {
    let limits = Config::default().limits.with_max_body(64 << 10);
    let server = TestServer::start(Config::default().with_limits(limits));
    let (relay, endpoint) = relayed(&server);
    let device = &endpoint.devices()[0];
    let mut b = Builder::new();
    let [x, one] = [0; 2].map(|_| b.leaf(DType::F32, [16, 1, 1, 1]).unwrap());
    let desc = b.tensor(x).unwrap().desc;
    // Half of them write a tensor of their own, half of them one and the same.
    let shared = b.view(x, desc, 0).unwrap();
    for i in 0..600 {
        let onto = if i % 2 == 0 { b.view(x, desc, 0).unwrap() } else { shared };
        b.node_into(Binary::Add, &[Some(x), Some(one)], onto).unwrap();
    }
    let graph = Arc::new(b.build().unwrap());
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let mut rig = QueueFixture::new(device, graph.slot_sizes()[0] as u64);
    let start: Vec<u8> = 1f32.to_le_bytes().repeat(rig.buffer.bytes() as usize / 4);
    for _ in 0..2 {
        rig.upload(&start);
        rig.queue.run(&program, &Arc::from([rig.buffer.whole()])).unwrap();
        let at = graph.tensor(x).unwrap().place.unwrap().offset;
        assert_eq!(rig.bytes()[at..][..4], 601f32.to_le_bytes());
    }
    // 600 nodes and as many records take about 180 KiB.
    assert_eq!((relay.count(ExtCommand::KeepGraph), relay.count(ExtCommand::RunGraph)), (3, 6));
}

#[test]
fn a_queue_that_is_dropped_leaves_nobody_waiting() {
    let ([first, _], server) = held_devices();
    let (relay, endpoint) = relayed(&server);
    let mut rig = QueueFixture::new(&endpoint.devices()[0], 64);
    let queue = || endpoint.devices()[0].queue(&account()).unwrap();
    rig.upload(&[1; 64]);
    let (point, read) = (rig.queue.mark(), rig.queue.download(rig.buffer.whole()).unwrap());
    rig.queue = queue();
    assert_eq!(point.wait(deadline()), Err(DeviceError::Ended));
    assert_eq!(read.wait(deadline()), Err(DeviceError::Ended));
    first.open();
    // What was done before the end is known to be.
    rig.queue.fill(rig.buffer.whole(), 2).unwrap();
    let done = rig.queue.mark();
    let mut other = queue();
    other.wait(&done).unwrap();
    assert_eq!(other.download(rig.buffer.whole()).unwrap().wait(deadline()).unwrap(), [2; 64]);
    rig.queue = other;
    assert_eq!(done.wait(deadline()), Ok(()));
    // A queue that was never used ends without a word too much.
    drop(queue());
    eventually("it ends", || relay.count(ExtCommand::CloseQueue) == 3);
    assert_eq!(rig.bytes(), [2; 64]);
}

#[test]
fn support_is_asked_once_for_each_kind_of_node() {
    let server = TestServer::start(Config::default());
    let (relay, endpoint) = relayed(&server);
    let device = &endpoint.devices()[0];
    for n in [4, 8, 4] {
        let graph = doubling(n);
        for node in graph.nodes() {
            let view = graph.node_view(node).unwrap();
            assert_eq!(device.support(view), server.devices[0].support(view));
        }
    }
    assert_eq!(relay.count(ExtCommand::Support), 2);
    drop(server);
    let graph = doubling(5);
    let view = graph.node_view(&graph.nodes()[0]).unwrap();
    match device.support(view) {
        Support::No(no) => assert!(no.reason.contains(&relay.addr.to_string()), "{no}"),
        other => panic!("{other:?}"),
    }
}

/// A GPU that would have weights brought over its bus for every large batch.
#[test]
fn no_weights_are_worth_bringing_over_a_network() {
    let device = IsolatedDevice::new("X0", MEMORY).with_offload(&[OpCode::Add]).shared();
    let server = TestServer::with_device_list(vec![device], Config::default());
    let (_, endpoint) = relayed(&server);
    let graph = doubling(4);
    let view = graph.node_view(&graph.nodes()[0]).unwrap();
    assert_eq!(server.devices[0].support(view), Support::Offload);
    assert_eq!(endpoint.devices()[0].support(view), Support::Yes);
}

#[test]
fn large_reads_and_streams_are_cut_where_the_server_wants_it() {
    let limits = Config::default().limits;
    let limits = limits.with_max_body(64 << 10);
    let server = TestServer::start(Config::default().with_limits(limits));
    let (relay, endpoint) = relayed(&server);
    let mut rig = QueueFixture::new(&endpoint.devices()[0], 1_000_001);
    let data = noise(3, 1_000_001);
    rig.upload(&data);
    let parts = [(0, 300_000), (300_000, 1), (300_001, 0), (300_001, 700_000)];
    let regions = parts.map(|(at, len)| rig.buffer.region(at, len).unwrap());
    let tickets = rig.queue.download_all(&regions).unwrap();
    let bytes: Vec<_> = tickets.into_iter().flat_map(|ticket| ticket.wait(deadline()).unwrap()).collect();
    assert!(bytes == data);
    assert!((1_000_001usize.div_ceil(64 << 10)..25).contains(&relay.count(ExtCommand::Read)));
    // A tensor's bytes stream in one message; where their source fails, the queue and the connection go on.
    let writes = relay.count(ExtCommand::Write);
    let desc = TensorDesc::contiguous(DType::I8, [1_000_001, 1, 1, 1]).unwrap();
    let mut fail = |_: &mut [u8]| Err(SourceError::new("the file ended"));
    let failed = rig.queue.upload(rig.buffer.whole(), Some(&desc), Source::Writer(&mut fail)).unwrap_err();
    assert_eq!(failed, DeviceError::Source(SourceError::new("the file ended")));
    let mut fill = |to: &mut [u8]| {
        to.fill(5);
        Ok(())
    };
    rig.queue.upload(rig.buffer.whole(), Some(&desc), Source::Writer(&mut fill)).unwrap();
    assert!(rig.bytes().iter().all(|&b| b == 5));
    assert_eq!(relay.count(ExtCommand::Write) - writes, 1);
}

#[test]
fn a_server_without_a_disk_to_look_at_finds_nothing() {
    let server = TestServer::start(Config::default());
    let (relay, endpoint) = relayed(&server);
    let mut rig = QueueFixture::new(&endpoint.devices()[0], 64);
    assert!(rig.queue.load_by_digest().is_none());
    assert_eq!(relay.count(ExtCommand::Load), 0);
    assert!(!rig.device.copies_from(server.devices[0].info()));
}
