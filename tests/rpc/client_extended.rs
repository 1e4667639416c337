//! The client with the extended protocol: which commands it sends and when, waits between queues on the server, and failures of
//! single queues. A relay records the commands.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::{QueueFixture, budget, deadline, options};
use crate::extended_support::HeldDevice;
use crate::recorded_commands::RecordedCommands;
use crate::support::{MEMORY, TestServer, WATCHDOG, eventually, random_bytes};
use fanout::device::{
    Device, DeviceError, Program, Queue, Region, SourceError, Support, Timeline, TimelinePoint, UploadSource,
};
use fanout::graph::{Builder, Graph};
use fanout::ops::OpCode;
use fanout::ops::binary::Binary;
use fanout::ops::rows::Rows;
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::ExtCommand;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::forwarding_device::ForwardingDevice;
use fanout_testing::protocol_relay::ProtocolRelay;
use std::sync::Arc;

/// A relay in front of a server, and an endpoint that is connected through it.
pub(crate) fn connect_through_relay(server: &TestServer) -> (ProtocolRelay, Endpoint) {
    let relay = ProtocolRelay::start(server.addr, false);
    let endpoint = Endpoint::connect(&relay.addr.to_string(), &options()).expect("a server");
    (relay, endpoint)
}

/// A server with two devices whose queues run nothing until the device is released.
fn held_devices() -> ([Arc<HeldDevice>; 2], TestServer) {
    let devices = [HeldDevice::new("CPU0"), HeldDevice::new("CPU1")];
    let server = TestServer::with_device_list(
        devices.iter().map(|d| Arc::clone(d) as Arc<dyn Device>).collect(),
        Config::default(),
    );
    (devices, server)
}

/// A graph that doubles `n` floats in place.
fn doubling(n: usize) -> Arc<Graph> {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [n, 1, 1, 1]).unwrap();
    let onto = b.view(x, b.tensor(x).unwrap().desc, 0).unwrap();
    b.node_into(Binary::Add, &[Some(x), Some(x)], onto).unwrap();
    Arc::new(b.build())
}

fn program(device: &Arc<dyn Device>, n: usize) -> (QueueFixture, Program) {
    let graph = doubling(n);
    let fixture = QueueFixture::new(device, graph.slot_sizes()[0] as u64);
    let program = fixture.device.prepare(graph).unwrap();
    (fixture, program)
}

#[test]
fn a_step_sends_its_inputs_one_run_graph_one_mark_and_one_read() {
    let server = TestServer::start(Config::default());
    let (relay, endpoint) = connect_through_relay(&server);
    let (mut fixture, program) = program(&endpoint.devices()[0], 16);
    let bindings = Arc::from([fixture.buffer.whole()]);
    let inputs = [0, 32].map(|at| fixture.buffer.region(at, 32).unwrap());
    let mut step = |value: f32| {
        for input in &inputs {
            let bytes = value.to_le_bytes().repeat(8);
            fixture.queue.upload(input.clone(), None, UploadSource::Borrowed(&bytes)).unwrap();
        }
        fixture.queue.run(&program, &bindings).unwrap();
        let done = fixture.queue.mark();
        let results = fixture.queue.download_all(&inputs).unwrap();
        done.wait(deadline()).unwrap();
        for result in results {
            assert_eq!(result.wait(deadline()).unwrap(), (2.0 * value).to_le_bytes().repeat(8));
        }
    };
    step(1.0);
    let (before, link) = (relay.commands().len(), fixture.device.link_stats().unwrap());
    step(3.0);
    let commands = relay.commands().split_off(before);
    // The data of the read proves the mark directly before it, so the mark is not requested.
    assert_eq!(commands, ["WRITE", "WRITE", "RUN_GRAPH", "MARK", "READ"]);
    let after = fixture.device.link_stats().unwrap();
    assert_eq!(after.endpoint, relay.addr.to_string());
    assert!((1..link.sent).contains(&link.sent_graphs), "the first step sent the graph: {link:?}");
    assert_eq!(after.sent_graphs, link.sent_graphs, "the second one ran it by its number");
    // Sent: five headers, two WRITE heads of 48 bytes with 32 bytes of data each, 12 bytes each for RUN_GRAPH and MARK, and a
    // READ of 12 bytes with two spans. Received: one notification header, the id of the READ, and 64 bytes of data.
    assert_eq!((after.sent - link.sent, after.received - link.received), (5 * 9 + 160 + 24 + 12 + 48, 9 + 8 + 64));
    assert!(after.waits - link.waits <= 2, "{after:?}");
}

/// The scheduler places a mark behind each read and waits for the mark first: only that wait polls the abort flag.
#[test]
fn a_read_proves_the_mark_directly_behind_it() {
    let ([device, _], server) = held_devices();
    let (relay, endpoint) = connect_through_relay(&server);
    let mut fixture = QueueFixture::new(&endpoint.devices()[0], 64);
    fixture.upload(&[3; 64]);
    let (read, mark) = (fixture.queue.download(fixture.buffer.whole()).unwrap(), fixture.queue.mark());
    assert_eq!(mark.poll(), Ok(false));
    device.release();
    mark.wait(deadline()).unwrap();
    assert_eq!(read.wait(deadline()).unwrap(), [3; 64]);
    // The mark is reached even if the data arrived before the mark was placed.
    let read = fixture.queue.download(fixture.buffer.whole()).unwrap();
    assert_eq!(read.wait(deadline()).unwrap(), [3; 64]);
    assert_eq!(fixture.queue.mark().poll(), Ok(true));
    // A read does not prove the work that is submitted between the read and the mark.
    let _read = fixture.queue.download(fixture.buffer.whole()).unwrap();
    fixture.queue.fill(fixture.buffer.whole(), 4).unwrap();
    fixture.queue.mark().wait(deadline()).unwrap();
    assert_eq!(relay.count(ExtCommand::NotifyReached), 1);
}

#[test]
fn client_and_server_evict_the_same_graphs() {
    let server = TestServer::start(Config::default());
    let (relay, endpoint) = connect_through_relay(&server);
    // More graphs than the server caches. Twenty of them are used more often, so that some are reused before they are evicted.
    let mut fixtures: Vec<_> = (1..100).map(|n| program(&endpoint.devices()[0], n)).collect();
    let mut rng = fastrand::Rng::with_seed(7);
    for round in 0..400 {
        let (fixture, program) = &mut fixtures[if rng.bool() { rng.usize(..99) } else { rng.usize(..20) }];
        fixture.upload(&1f32.to_le_bytes().repeat(fixture.buffer.bytes() as usize / 4));
        fixture.queue.run(program, &Arc::from([fixture.buffer.whole()])).unwrap();
        assert_eq!(fixture.download()[..4], 2f32.to_le_bytes(), "round {round}");
        if round % 50 == 0 {
            fixture.buffer = fixture.device.alloc(fixture.buffer.bytes(), &budget()).unwrap();
        }
    }
    let (kept, run) = (relay.count(ExtCommand::PrepareGraph), relay.count(ExtCommand::RunGraph));
    assert!(run == 400 && (99..350).contains(&kept), "{kept} of {run}");
}

#[test]
fn waits_between_queues_are_executed_by_the_server() {
    let ([first, second], server) = held_devices();
    let (relay, endpoint) = connect_through_relay(&server);
    let [mut a, mut b] = [0, 1].map(|i| QueueFixture::new(&endpoint.devices()[i], 64));
    let mut free = QueueFixture::new(&endpoint.devices()[1], 64);
    second.release();
    // A queue that waits for nothing completes while the other device is held.
    free.upload(&[9; 64]);
    a.upload(&[1; 64]);
    let after = a.queue.mark();
    // Neither the wait nor the copy behind it blocks the client: all commands are sent before the first device is released.
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
    let copied = b.queue.mark();
    assert_eq!(free.download(), [9; 64]);
    assert_eq!(copied.poll(), Ok(false));
    eventually("the client has sent COPY and NOTIFY_REACHED", || {
        relay.count(ExtCommand::Copy) == 1 && relay.count(ExtCommand::NotifyReached) == 1
    });
    let commands = relay.commands();
    let at = |command: ExtCommand| commands.iter().position(|&name| name == command.name()).unwrap();
    assert!(at(ExtCommand::Wait) < at(ExtCommand::Copy), "{commands:?}");
    first.release();
    copied.wait(deadline()).unwrap();
    // The reached copy implies the mark that it waited for, so no second mark is requested.
    assert_eq!((after.poll(), relay.count(ExtCommand::NotifyReached)), (Ok(true), 1));
    assert_eq!(b.download(), [1; 64]);
}

/// A program that fails when it runs: GET_ROWS with a row index that is out of range.
pub(crate) fn row_out_of_range(device: &Arc<dyn Device>, queue: &mut dyn Queue) -> (Program, Arc<[Region]>) {
    let mut b = Builder::new();
    let (rows, ids) = (b.leaf(DType::F32, [4, 3, 1, 1]).unwrap(), b.leaf(DType::I32, [1, 1, 1, 1]).unwrap());
    b.node(Rows::GetRows, &[Some(rows), Some(ids)]).unwrap();
    let graph = Arc::new(b.build());
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let bindings: Arc<[_]> =
        graph.slot_sizes().iter().map(|&bytes| device.alloc(bytes as u64, &budget()).unwrap().whole()).collect();
    for region in bindings.iter() {
        queue.fill(region.clone(), 7).unwrap();
    }
    (program, bindings)
}

#[test]
fn a_failed_queue_reports_the_cause_and_other_queues_keep_working() {
    let server = TestServer::start(Config::default());
    let (_, endpoint) = connect_through_relay(&server);
    let device = &endpoint.devices()[0];
    let mut bad = device.queue(&budget()).unwrap();
    let (program, bindings) = row_out_of_range(device, &mut *bad);
    let before = bad.mark();
    before.wait(deadline()).unwrap();
    // The submission itself fails if the failure has arrived before.
    let _ = bad.run(&program, &bindings);
    let after = bad.mark();
    let error = bad.download(bindings[0].clone()).and_then(|read| read.wait(deadline())).unwrap_err();
    assert!(matches!(&error, DeviceError::Data { op: OpCode::GetRows, .. }), "{error}");
    assert_eq!((after.wait(deadline()), before.poll()), (Err(error.clone()), Ok(true)));
    assert_eq!(bad.fill(bindings[0].clone(), 0), Err(error.clone()));
    assert_eq!(bad.download(bindings[0].clone()).map(drop), Err(error.clone()));
    // A queue that waits for the failed queue fails too. Other queues keep working.
    let mut waits = device.queue(&budget()).unwrap();
    assert_eq!(waits.wait(&after).and_then(|()| waits.mark().wait(deadline())), Err(error));
    let mut good = QueueFixture::new(device, 100);
    good.upload(&random_bytes(1, 100));
    assert_eq!(good.download(), random_bytes(1, 100));
}

#[test]
fn a_satisfied_wait_does_not_propagate_a_later_failure() {
    let ([first, second], server) = held_devices();
    let (_, endpoint) = connect_through_relay(&server);
    first.release();
    let mut bad = endpoint.devices()[0].queue(&budget()).unwrap();
    let (program, bindings) = row_out_of_range(&endpoint.devices()[0], &mut *bad);
    let before = bad.mark();
    // The second queue runs long after the mark that it waits for was reached. The client never requested that mark.
    let mut good = QueueFixture::new(&endpoint.devices()[1], 64);
    good.queue.wait(&before).unwrap();
    good.upload(&[3; 64]);
    let read = good.queue.download(good.buffer.whole()).unwrap();
    let _ = bad.run(&program, &bindings);
    assert!(matches!(bad.mark().wait(deadline()), Err(DeviceError::Data { op: OpCode::GetRows, .. })));
    second.release();
    assert_eq!(read.wait(deadline()).unwrap(), [3; 64]);
}

#[test]
fn opening_more_queues_than_the_limit_fails_that_request() {
    let server = TestServer::start(Config::default());
    let (_, endpoint) = connect_through_relay(&server);
    let device = &endpoint.devices()[0];
    let mut fixture = QueueFixture::new(device, 64);
    let mut more: Vec<_> = (1..256).map(|_| device.queue(&budget()).unwrap()).collect();
    let error = device.queue(&budget()).map(drop).unwrap_err();
    assert!(matches!(&error, DeviceError::CapabilityMissing { device, .. } if device.ends_with("/CPU0")), "{error}");
    // Other queues keep working, and closing a queue allows a new one.
    fixture.upload(&[1; 64]);
    assert_eq!(fixture.download(), [1; 64]);
    more.truncate(100);
    more.extend((100..255).map(|_| device.queue(&budget()).unwrap()));
    assert!(device.queue(&budget()).is_err());
    more.iter_mut().for_each(|queue| queue.fill(fixture.buffer.whole(), 2).unwrap());
    more.iter_mut().for_each(|queue| queue.mark().wait(deadline()).unwrap());
}

#[test]
fn a_slow_upload_source_does_not_block_other_queues() {
    let server = TestServer::start(Config::default());
    let (_, endpoint) = connect_through_relay(&server);
    const SIZE: usize = 5 << 20;
    let [mut fixture, mut other] = [0; 2].map(|_| QueueFixture::new(&endpoint.devices()[0], SIZE as u64));
    let desc = TensorDesc::contiguous(DType::I8, [SIZE, 1, 1, 1]).unwrap();
    let (request_bytes, byte_requests) = std::sync::mpsc::channel();
    let (send_bytes, received_bytes) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            other.upload(&vec![4; SIZE]);
            for () in byte_requests {
                send_bytes.send(other.download()).unwrap();
            }
        });
        let mut fill = |to: &mut [u8]| {
            request_bytes.send(()).map_err(SourceError::new)?;
            to.copy_from_slice(&received_bytes.recv_timeout(WATCHDOG).map_err(SourceError::new)?[..to.len()]);
            Ok(())
        };
        fixture.queue.upload(fixture.buffer.whole(), Some(&desc), UploadSource::Writer(&mut fill)).unwrap();
        assert!(fixture.download().iter().all(|&b| b == 4));
        drop(request_bytes);
    });
}

#[test]
fn graphs_are_split_at_the_message_limit_of_the_server() {
    let limits = Config::default().limits.with_max_body(64 << 10);
    let server = TestServer::start(Config::default().with_limits(limits));
    let (relay, endpoint) = connect_through_relay(&server);
    let device = &endpoint.devices()[0];
    let mut b = Builder::new();
    let [x, one] = [0; 2].map(|_| b.leaf(DType::F32, [16, 1, 1, 1]).unwrap());
    let desc = b.tensor(x).unwrap().desc;
    // Half of the nodes write a view of their own, the other half write one shared view.
    let shared = b.view(x, desc, 0).unwrap();
    for i in 0..600 {
        let onto = if i % 2 == 0 { b.view(x, desc, 0).unwrap() } else { shared };
        b.node_into(Binary::Add, &[Some(x), Some(one)], onto).unwrap();
    }
    let graph = Arc::new(b.build());
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let mut fixture = QueueFixture::new(device, graph.slot_sizes()[0] as u64);
    let start: Vec<u8> = 1f32.to_le_bytes().repeat(fixture.buffer.bytes() as usize / 4);
    for _ in 0..2 {
        fixture.upload(&start);
        fixture.queue.run(&program, &Arc::from([fixture.buffer.whole()])).unwrap();
        let at = graph.tensor(x).unwrap().place.unwrap().offset;
        assert_eq!(fixture.download()[at..][..4], 601f32.to_le_bytes());
    }
    // 600 nodes with one tensor record each take about 180 KiB, so the graph is split into three.
    assert_eq!((relay.count(ExtCommand::PrepareGraph), relay.count(ExtCommand::RunGraph)), (3, 6));
}

#[test]
fn dropping_a_queue_ends_the_waits_for_it() {
    let ([first, _], server) = held_devices();
    let (relay, endpoint) = connect_through_relay(&server);
    let mut fixture = QueueFixture::new(&endpoint.devices()[0], 64);
    let queue = || endpoint.devices()[0].queue(&budget()).unwrap();
    fixture.upload(&[1; 64]);
    let (point, read) = (fixture.queue.mark(), fixture.queue.download(fixture.buffer.whole()).unwrap());
    fixture.queue = queue();
    assert_eq!(point.wait(deadline()), Err(DeviceError::Ended));
    assert_eq!(read.wait(deadline()), Err(DeviceError::Ended));
    first.release();
    // Marks that were placed before the queue was dropped are still reached.
    fixture.queue.fill(fixture.buffer.whole(), 2).unwrap();
    let done = fixture.queue.mark();
    let mut other = queue();
    other.wait(&done).unwrap();
    assert_eq!(other.download(fixture.buffer.whole()).unwrap().wait(deadline()).unwrap(), [2; 64]);
    fixture.queue = other;
    assert_eq!(done.wait(deadline()), Ok(()));
    // Dropping an unused queue sends only CLOSE_QUEUE.
    drop(queue());
    eventually("the client has closed three queues", || relay.count(ExtCommand::CloseQueue) == 3);
    assert_eq!(fixture.download(), [2; 64]);
}

/// An abort ends one queue of a connection: its points, its reads, and a call that waits for earlier commands. Other queues keep
/// working.
#[test]
fn an_aborted_queue_ends_alone() {
    let ([first, _], server) = held_devices();
    let (_relay, endpoint) = connect_through_relay(&server);
    let mut fixture = QueueFixture::new(&endpoint.devices()[0], 1 << 20);
    let mut other = endpoint.devices()[0].queue(&budget()).unwrap();
    let aborter = fixture.queue.aborter().unwrap();
    fixture.upload(&[1; 1 << 20]);
    let (point, read) = (fixture.queue.mark(), fixture.queue.download(fixture.buffer.whole()).unwrap());
    assert_eq!(point.poll(), Ok(false));
    // The queue's thread waits for a point of this process.
    let gate = Timeline::new();
    fixture.queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
    let unsent = fixture.queue.download(fixture.buffer.whole()).unwrap();
    let (queue, whole) = (&mut fixture.queue, fixture.buffer.whole());
    std::thread::scope(|scope| {
        let upload = scope.spawn(|| queue.upload(whole, None, UploadSource::Borrowed(&[2; 1 << 20])));
        aborter.abort();
        assert_eq!(upload.join().unwrap(), Err(DeviceError::Ended));
    });
    assert_eq!(point.wait(deadline()), Err(DeviceError::Ended));
    assert_eq!(read.wait(deadline()), Err(DeviceError::Ended));
    assert_eq!(unsent.wait(deadline()), Err(DeviceError::Ended));
    assert_eq!(fixture.queue.mark().wait(deadline()), Err(DeviceError::Ended));
    assert_eq!(fixture.queue.fill(fixture.buffer.whole(), 3), Err(DeviceError::Ended));
    assert_eq!(fixture.queue.download(fixture.buffer.whole()).map(drop), Err(DeviceError::Ended));
    gate.advance(1);
    first.release();
    other.fill(fixture.buffer.whole(), 4).unwrap();
    let bytes = other.download(fixture.buffer.region(0, 8).unwrap()).unwrap();
    assert_eq!(bytes.wait(deadline()).unwrap(), [4; 8]);
    aborter.abort();
    drop(fixture);
    aborter.abort();
}

#[test]
fn support_is_requested_once_per_kind_of_node() {
    let server = TestServer::start(Config::default());
    let (relay, endpoint) = connect_through_relay(&server);
    let device = &endpoint.devices()[0];
    for n in [4, 8, 4] {
        let graph = doubling(n);
        for node in graph.nodes() {
            let view = graph.node_view(node).unwrap();
            assert_eq!(device.support(view), server.devices[0].support(view));
        }
    }
    assert_eq!(relay.count(ExtCommand::SupportsOp), 2);
    drop(server);
    let graph = doubling(5);
    let view = graph.node_view(&graph.nodes()[0]).unwrap();
    match device.support(view) {
        Support::No(no) => assert!(no.reason.contains(&relay.addr.to_string()), "{no}"),
        other => panic!("{other:?}"),
    }
}

/// The device prefers to offload large batches, with weights copied over its bus. Over a network such copies never pay off, so
/// the remote device reports plain support.
#[test]
fn remote_devices_do_not_prefer_offload() {
    let device = ForwardingDevice::isolated("X0", MEMORY).with_offload(&[OpCode::Add]).shared();
    let server = TestServer::with_device_list(vec![device], Config::default());
    let (_, endpoint) = connect_through_relay(&server);
    let graph = doubling(4);
    let view = graph.node_view(&graph.nodes()[0]).unwrap();
    assert_eq!(server.devices[0].support(view), Support::Offload);
    assert_eq!(endpoint.devices()[0].support(view), Support::Yes);
}

#[test]
fn large_reads_are_split_and_a_failed_upload_source_fails_only_its_upload() {
    let limits = Config::default().limits;
    let limits = limits.with_max_body(64 << 10);
    let server = TestServer::start(Config::default().with_limits(limits));
    let (relay, endpoint) = connect_through_relay(&server);
    let mut fixture = QueueFixture::new(&endpoint.devices()[0], 1_000_001);
    let data = random_bytes(3, 1_000_001);
    fixture.upload(&data);
    let parts = [(0, 300_000), (300_000, 1), (300_001, 0), (300_001, 700_000)];
    let regions = parts.map(|(at, len)| fixture.buffer.region(at, len).unwrap());
    let pending_reads = fixture.queue.download_all(&regions).unwrap();
    let bytes: Vec<_> =
        pending_reads.into_iter().flat_map(|pending_read| pending_read.wait(deadline()).unwrap()).collect();
    assert!(bytes == data);
    assert!((1_000_001usize.div_ceil(64 << 10)..25).contains(&relay.count(ExtCommand::Read)));
    // A streamed tensor is one WRITE. If its source fails, the queue and the connection stay usable.
    let writes = relay.count(ExtCommand::Write);
    let desc = TensorDesc::contiguous(DType::I8, [1_000_001, 1, 1, 1]).unwrap();
    let mut fail = |_: &mut [u8]| Err(SourceError::new("the file ended"));
    let failed =
        fixture.queue.upload(fixture.buffer.whole(), Some(&desc), UploadSource::Writer(&mut fail)).unwrap_err();
    assert_eq!(failed, DeviceError::Source(SourceError::new("the file ended")));
    let mut fill = |to: &mut [u8]| {
        to.fill(5);
        Ok(())
    };
    fixture.queue.upload(fixture.buffer.whole(), Some(&desc), UploadSource::Writer(&mut fill)).unwrap();
    assert!(fixture.download().iter().all(|&b| b == 5));
    assert_eq!(relay.count(ExtCommand::Write) - writes, 1);
}

#[test]
fn a_server_without_models_offers_no_load_by_digest() {
    let server = TestServer::start(Config::default());
    let (relay, endpoint) = connect_through_relay(&server);
    let mut fixture = QueueFixture::new(&endpoint.devices()[0], 64);
    assert!(fixture.queue.load_by_digest().is_none());
    assert_eq!(relay.count(ExtCommand::Load), 0);
    assert!(!fixture.device.copies_from(server.devices[0].info()));
}
