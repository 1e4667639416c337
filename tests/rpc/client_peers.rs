//! Copies between two servers by a client of both: the bytes do not come by it.
#![allow(clippy::unwrap_used)] // a test says what it needs by failing

use crate::client::{QueueFixture, account, deadline, options};
use crate::client_extended::row_out_of_range;
use crate::greeted_support::Held;
use crate::peers::dialling;
use crate::recorded_commands::RecordedCommands;
use crate::support::{TestServer, eventually, noise};
use fanout::device::{CopyOutcome, Device, DeviceError};
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::ExtCommand;
use fanout_testing::protocol_relay::ProtocolRelay;
use std::sync::Arc;

fn connect(server: &TestServer) -> Endpoint {
    Endpoint::connect(&server.addr.to_string(), &options()).expect("a server")
}

/// The source, which dials any server of this machine, and the destination.
fn pair(source: Arc<dyn Device>) -> [TestServer; 2] {
    [TestServer::with_device_list(vec![source], dialling(&["127.0.0.0/8"])), TestServer::start(Config::default())]
}

fn cpu() -> Arc<dyn Device> {
    let held = Held::new("CPU0");
    held.open();
    held
}

#[test]
fn bytes_go_from_server_to_server() {
    let servers = pair(cpu());
    let [from, to] = servers.each_ref().map(connect);
    let (source, here) = (&from.devices()[0], &to.devices()[0]);
    assert!(here.copies_from(source.info()) && here.copies_from(here.info()));
    // The destination dials nobody.
    assert!(!source.copies_from(here.info()) && !here.copies_from(servers[0].devices[0].info()));
    let mut wrong = QueueFixture::new(source, 10);
    assert_eq!(
        wrong.queue.copy_from(QueueFixture::new(here, 10).buffer.whole(), wrong.buffer.whole(), None),
        Ok(CopyOutcome::Unreachable)
    );
    // The longest takes more tickets than come at once.
    for (seed, len) in [1, 100, 600_000, 70 << 20].into_iter().enumerate() {
        let [mut a, mut b] = [source, here].map(|device| QueueFixture::new(device, len));
        let data = noise(seed as u64, len as usize);
        a.upload(&data);
        let links = || [source, here].map(|device| device.link_stats().unwrap());
        let before = links();
        let after = a.queue.mark();
        assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
        let copied = b.queue.mark();
        // What is written there later is not what was sent.
        a.queue.wait(&copied).unwrap();
        a.queue.fill(a.buffer.whole(), 0).unwrap();
        copied.wait(deadline()).unwrap();
        for (before, after) in before.iter().zip(links()) {
            let pieces = len.div_ceil(256 << 10);
            assert!(after.sent - before.sent < 500 + 20 * pieces, "{len} bytes: {before:?}, {after:?}");
            assert!(after.received - before.received < 9000 + 20 * pieces, "{len} bytes: {before:?}, {after:?}");
        }
        assert!(b.bytes() == data, "{len} bytes");
    }
}

#[test]
fn a_copy_waits_for_its_source_on_the_servers() {
    let held = Held::new("CPU0");
    let servers = pair(held.clone());
    let relay = ProtocolRelay::start(servers[0].addr, false);
    let from = Endpoint::connect(&relay.addr.to_string(), &options()).unwrap();
    let to = connect(&servers[1]);
    let (mut a, mut b) = (QueueFixture::new(&from.devices()[0], 1000), QueueFixture::new(&to.devices()[0], 1000));
    assert!(b.device.copies_from(a.device.info()) && b.device.copies_from(a.device.info()));
    let data = noise(1, 1000);
    a.upload(&data);
    let after = a.queue.mark();
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
    let copied = b.queue.mark();
    // The source's memory may be freed at once: what was sent before still has it.
    a.buffer = a.device.alloc(1, &account()).unwrap();
    eventually("the copy is sent", || relay.count(ExtCommand::Send) == 1);
    assert_eq!(
        (relay.count(ExtCommand::Wait), relay.count(ExtCommand::Ask), relay.count(ExtCommand::Reach)),
        (1, 0, 1)
    );
    assert_eq!((after.poll(), copied.poll()), (Ok(false), Ok(false)));
    held.open();
    copied.wait(deadline()).unwrap();
    assert!(b.bytes() == data);
}

#[test]
fn a_source_that_is_lost_fails_those_that_wait_for_its_bytes() {
    let [mut source, destination] = pair(Held::new("CPU0"));
    let [from, to] = [&source, &destination].map(connect);
    let (a, mut b) = (QueueFixture::new(&from.devices()[0], 100), QueueFixture::new(&to.devices()[0], 100));
    // The source has not come so far when it ends.
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), None).unwrap().is_submitted());
    let copied = b.queue.mark();
    assert_eq!(copied.poll(), Ok(false));
    let name = from.name().to_owned();
    source.stop();
    let error = copied.wait(deadline()).unwrap_err();
    assert!(matches!(&error, DeviceError::Lost { endpoint, .. } if *endpoint == name), "{error}");
    // The destination's other queues go on.
    b.queue = b.device.queue(&account()).unwrap();
    assert_eq!(b.bytes(), [0; 100]);
}

#[test]
fn a_long_copy_waits_until_tickets_are_used() {
    let held = Held::new("CPU0");
    // Bytes on their way are charged to the sessions.
    let roomy = |config: Config| config.with_max_memory(Some(1 << 30));
    let source = TestServer::with_device_list(vec![held.clone()], roomy(dialling(&["127.0.0.0/8"])));
    let servers = [source, TestServer::start(roomy(Config::default()))];
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
    // Together more pieces than a session may have tickets.
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), Some(&after)).unwrap().is_submitted());
    assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), None).unwrap().is_submitted());
    let copied = b.queue.mark();
    eventually("all that there are tickets for is asked for", || relay.count(ExtCommand::Send) == 4);
    assert_eq!(copied.poll(), Ok(false));
    b.device.memory().unwrap();
    held.open();
    copied.wait(deadline()).unwrap();
    assert_eq!(relay.count(ExtCommand::Send), 6);
    for (part, bytes) in b.bytes().chunks(PART as usize).enumerate() {
        assert!(bytes.iter().all(|&byte| byte == part as u8 + 1), "part {part}");
    }
}

/// Two that receive from one device, and the source's server alone knows of both.
#[test]
fn a_destination_that_is_lost_fails_no_other_copy() {
    let held = Held::new("CPU0");
    let [source, mut lost] = pair(held.clone());
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
    eventually("both are sent", || relay.count(ExtCommand::Send) == 2);
    lost.stop();
    assert!(matches!(copied[0].wait(deadline()), Err(DeviceError::Lost { .. })));
    held.open();
    copied[1].wait(deadline()).unwrap();
    assert_eq!(to_good.bytes(), [7; 1000]);
}

#[test]
fn a_copy_neither_waits_nor_fails_for_another() {
    let held = Held::new("CPU1");
    let source = TestServer::with_device_list(vec![cpu(), held.clone()], dialling(&["127.0.0.0/8"]));
    let servers = [source, TestServer::start(Config::default())];
    let [from, to] = servers.each_ref().map(connect);
    let [mut a, mut first, mut second] =
        [&from, &to, &to].map(|endpoint| QueueFixture::new(&endpoint.devices()[0], 1000));
    assert!(first.device.copies_from(a.device.info()));
    a.upload(&noise(1, 1000));
    a.queue.mark().wait(deadline()).unwrap();
    // A queue that will fail when another one has come so far.
    let mut fails = a.device.queue(&account()).unwrap();
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
        assert!(second.bytes() == noise(1, 1000), "{what}");
    };
    copies("while the first one waits");
    held.open();
    let error = first.queue.mark().wait(deadline()).unwrap_err();
    assert!(error.to_string().contains("GET_ROWS"), "{error}");
    copies("when the first one has failed");
    // Whoever receives has a queue of its own at the source, as long as it is there.
    first.queue = first.device.queue(&account()).unwrap();
    assert!(first.queue.copy_from(a.buffer.whole(), first.buffer.whole(), None).unwrap().is_submitted());
    assert!(first.bytes() == noise(1, 1000));
}
