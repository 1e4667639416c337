//! Copies between two servers that a client of both submits: the servers exchange the bytes directly.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::client::{QueueFixture, budget, deadline, options};
use crate::client_extended::row_out_of_range;
use crate::extended_support::HeldDevice;
use crate::peer_transfer::config_with_peers;
use crate::recorded_commands::RecordedCommands;
use crate::support::{TestServer, eventually, random_bytes};
use fanout::device::{CopyOutcome, Device, DeviceError};
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::ExtCommand;
use fanout_testing::protocol_relay::ProtocolRelay;
use std::sync::Arc;

fn connect(server: &TestServer) -> Endpoint {
    Endpoint::connect(&server.addr.to_string(), &options()).expect("a server")
}

/// The source server, which may connect to every server of this machine, and the destination server.
fn source_and_destination(source: Arc<dyn Device>) -> [TestServer; 2] {
    [
        TestServer::with_device_list(vec![source], config_with_peers(&["127.0.0.0/8:*"])),
        TestServer::start(Config::default()),
    ]
}

fn released_device() -> Arc<dyn Device> {
    let held = HeldDevice::new("CPU0");
    held.release();
    held
}

#[test]
fn copied_bytes_do_not_pass_through_the_client() {
    let servers = source_and_destination(released_device());
    let [from, to] = servers.each_ref().map(connect);
    let (source, here) = (&from.devices()[0], &to.devices()[0]);
    assert!(here.copies_from(source.info()) && here.copies_from(here.info()));
    // The destination server may not connect to any peer, so it cannot be the source of a copy.
    assert!(!source.copies_from(here.info()) && !here.copies_from(servers[0].devices[0].info()));
    let mut wrong = QueueFixture::new(source, 10);
    assert_eq!(
        wrong.queue.copy_from(QueueFixture::new(here, 10).buffer.whole(), wrong.buffer.whole(), None),
        Ok(CopyOutcome::Unreachable)
    );
    // The longest copy consists of two transfers.
    for (seed, len) in [1, 100, 600_000, 70 << 20].into_iter().enumerate() {
        let [mut a, mut b] = [source, here].map(|device| QueueFixture::new(device, len));
        let data = random_bytes(seed as u64, len as usize);
        a.upload(&data);
        let links = || [source, here].map(|device| device.link_stats().unwrap());
        let before = links();
        let after = a.queue.mark();
        assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
        let copied = b.queue.mark();
        // A fill after the copy does not change the copied bytes.
        a.queue.wait(&copied).unwrap();
        a.queue.fill(a.buffer.whole(), 0).unwrap();
        copied.wait(deadline()).unwrap();
        for (before, after) in before.iter().zip(links()) {
            let transfers = len.div_ceil(64 << 20);
            assert!(after.sent - before.sent < 500 + 20 * transfers, "{len} bytes: {before:?}, {after:?}");
            assert!(after.received - before.received < 9000 + 20 * transfers, "{len} bytes: {before:?}, {after:?}");
        }
        assert!(b.download() == data, "{len} bytes");
    }
}

#[test]
fn a_copy_between_servers_waits_for_the_mark_of_its_source() {
    let held = HeldDevice::new("CPU0");
    let servers = source_and_destination(held.clone());
    let relay = ProtocolRelay::start(servers[0].addr, false);
    let from = Endpoint::connect(&relay.addr.to_string(), &options()).unwrap();
    let to = connect(&servers[1]);
    let (mut a, mut b) = (QueueFixture::new(&from.devices()[0], 1000), QueueFixture::new(&to.devices()[0], 1000));
    assert!(b.device.copies_from(a.device.info()) && b.device.copies_from(a.device.info()));
    let data = random_bytes(1, 1000);
    a.upload(&data);
    let after = a.queue.mark();
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
    let copied = b.queue.mark();
    // The source buffer may be freed at once: the submitted copy keeps it allocated.
    a.buffer = a.device.alloc(1, &budget()).unwrap();
    eventually("the client has submitted the copy", || relay.count(ExtCommand::SendToPeer) == 1);
    assert_eq!(
        (relay.count(ExtCommand::Wait), relay.count(ExtCommand::NotifyReached), relay.count(ExtCommand::ProbePeer)),
        (1, 0, 1)
    );
    assert_eq!((after.poll(), copied.poll()), (Ok(false), Ok(false)));
    held.release();
    copied.wait(deadline()).unwrap();
    assert!(b.download() == data);
}

#[test]
fn losing_the_source_server_fails_the_receiving_queue() {
    let [mut source, destination] = source_and_destination(HeldDevice::new("CPU0"));
    let [from, to] = [&source, &destination].map(connect);
    let (a, mut b) = (QueueFixture::new(&from.devices()[0], 100), QueueFixture::new(&to.devices()[0], 100));
    // The source server shuts down before its queue reaches the copy.
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), None).unwrap().is_submitted());
    let copied = b.queue.mark();
    assert_eq!(copied.poll(), Ok(false));
    let name = from.name().to_owned();
    source.stop();
    let error = copied.wait(deadline()).unwrap_err();
    assert!(matches!(&error, DeviceError::ConnectionLost { endpoint, .. } if *endpoint == name), "{error}");
    // Other queues of the destination keep working.
    b.queue = b.device.queue(&budget()).unwrap();
    assert_eq!(b.download(), [0; 100]);
}

/// The receiving queue fails when its thread submits the copy: the source is lost by then. A third queue waits for a mark
/// behind the copy, which is therefore never placed.
#[test]
fn a_copy_that_cannot_be_submitted_fails_the_queues_that_wait_for_it() {
    let [mut source, destination] = source_and_destination(released_device());
    let [from, to] = [&source, &destination].map(connect);
    let (a, mut b) = (QueueFixture::new(&from.devices()[0], 100), QueueFixture::new(&to.devices()[0], 100));
    let held = HeldDevice::new("CPU1");
    let mut slow = QueueFixture::new(&(held.clone() as Arc<dyn Device>), 1);
    slow.queue.fill(slow.buffer.whole(), 0).unwrap();
    b.queue.wait(&slow.queue.mark()).unwrap();
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), None).unwrap().is_submitted());
    let mut third = b.device.queue(&budget()).unwrap();
    third.wait(&b.queue.mark()).unwrap();
    let read = third.download(b.buffer.whole()).unwrap();
    let name = from.name().to_owned();
    source.stop();
    eventually("the client has lost the source", || a.device.memory().is_err());
    held.release();
    let error = read.wait(deadline()).unwrap_err();
    assert!(matches!(&error, DeviceError::ConnectionLost { endpoint, .. } if *endpoint == name), "{error}");
}

#[test]
fn a_long_copy_waits_until_earlier_ones_have_arrived() {
    let held = HeldDevice::new("CPU0");
    // Bytes in flight are charged to the memory of the sessions.
    let with_large_memory = |config: Config| config.with_max_memory(Some(1 << 30));
    let source =
        TestServer::with_device_list(vec![held.clone()], with_large_memory(config_with_peers(&["127.0.0.0/8:*"])));
    let servers = [source, TestServer::start(with_large_memory(Config::default()))];
    let relay = ProtocolRelay::start(servers[0].addr, false);
    let from = Endpoint::connect(&relay.addr.to_string(), &options()).unwrap();
    let to = connect(&servers[1]);
    const PART: u64 = 4 << 20;
    let [mut a, mut b] = [&from, &to].map(|endpoint| QueueFixture::new(&endpoint.devices()[0], 35 * PART));
    for part in 0..35 {
        a.queue.fill(a.buffer.region(part * PART, PART).unwrap(), part as u8 + 1).unwrap();
    }
    let after = a.queue.mark();
    assert!(b.device.copies_from(a.device.info()));
    // Both copies together have more bytes than may be on their way to a queue.
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), None).unwrap().is_submitted());
    let copied = b.queue.mark();
    eventually("the client has submitted what may be on its way", || relay.count(ExtCommand::SendToPeer) == 4);
    assert_eq!(copied.poll(), Ok(false));
    b.device.memory().unwrap();
    held.release();
    copied.wait(deadline()).unwrap();
    assert_eq!(relay.count(ExtCommand::SendToPeer), 6);
    for (part, bytes) in b.download().chunks(PART as usize).enumerate() {
        assert!(bytes.iter().all(|&byte| byte == part as u8 + 1), "part {part}");
    }
}

/// One device sends to two destinations. Only the source server has a connection to both.
#[test]
fn losing_one_destination_does_not_fail_copies_to_others() {
    let held = HeldDevice::new("CPU0");
    let [source, mut lost] = source_and_destination(held.clone());
    let good = TestServer::start(Config::default());
    let relay = ProtocolRelay::start(source.addr, false);
    let from = Endpoint::connect(&relay.addr.to_string(), &options()).unwrap();
    let [mut to_lost, mut to_good] =
        [&lost, &good].map(|server| QueueFixture::new(&connect(server).devices()[0], 1000));
    let mut a = QueueFixture::new(&from.devices()[0], 1000);
    a.queue.fill(a.buffer.whole(), 7).unwrap();
    let after = a.queue.mark();
    let copied = [&mut to_lost, &mut to_good].map(|b| {
        assert!(b.device.copies_from(a.device.info()));
        assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
        b.queue.mark()
    });
    eventually("the client has submitted both copies", || relay.count(ExtCommand::SendToPeer) == 2);
    lost.stop();
    assert!(matches!(copied[0].wait(deadline()), Err(DeviceError::ConnectionLost { .. })));
    held.release();
    copied[1].wait(deadline()).unwrap();
    assert_eq!(to_good.download(), [7; 1000]);
}

#[test]
fn a_blocked_or_failed_copy_does_not_affect_other_copies() {
    let held = HeldDevice::new("CPU1");
    let source =
        TestServer::with_device_list(vec![released_device(), held.clone()], config_with_peers(&["127.0.0.0/8:*"]));
    let servers = [source, TestServer::start(Config::default())];
    let [from, to] = servers.each_ref().map(connect);
    let [mut a, mut first, mut second] =
        [&from, &to, &to].map(|endpoint| QueueFixture::new(&endpoint.devices()[0], 1000));
    assert!(first.device.copies_from(a.device.info()));
    a.upload(&random_bytes(1, 1000));
    a.queue.mark().wait(deadline()).unwrap();
    // A queue that waits for another queue and then fails.
    let mut fails = a.device.queue(&budget()).unwrap();
    let mut slow = QueueFixture::new(&from.devices()[1], 1);
    slow.queue.fill(slow.buffer.whole(), 0).unwrap();
    fails.wait(&slow.queue.mark()).unwrap();
    let (program, bindings) = row_out_of_range(&a.device, &mut *fails);
    fails.run(&program, &bindings).unwrap();
    let never = fails.mark();
    assert!(first.queue.copy_from(a.buffer.whole(), first.buffer.whole(), Some(&never)).unwrap().is_submitted());
    let mut copies = |what: &str| {
        second.queue.fill(second.buffer.whole(), 0).unwrap();
        assert!(second.queue.copy_from(a.buffer.whole(), second.buffer.whole(), None).unwrap().is_submitted());
        assert!(second.download() == random_bytes(1, 1000), "{what}");
    };
    copies("while the first one waits");
    held.release();
    let error = first.queue.mark().wait(deadline()).unwrap_err();
    assert!(error.to_string().contains("GET_ROWS"), "{error}");
    copies("when the first one has failed");
    // Each receiving queue has its own send queue on the source server. It lives as long as the receiving queue.
    first.queue = first.device.queue(&budget()).unwrap();
    assert!(first.queue.copy_from(a.buffer.whole(), first.buffer.whole(), None).unwrap().is_submitted());
    assert!(first.download() == random_bytes(1, 1000));
}
