//! The client against our server, which greets, and as one that speaks 7.0 alone: bytes, order, points, lost servers.
#![allow(clippy::unwrap_used)] // a test says what it needs by failing

use crate::support::{SHORT, TestServer, WATCHDOG, eventually, noise};
use fanout::device::{Account, Buffer, CopyOutcome, Device, DeviceError, DeviceKind, Queue, Source};
use fanout::graph::Builder;
use fanout::ops::binary::Binary;
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::server::Config;
use fanout::tensor::{DType, TensorDesc};
use fanout_testing::protocol_relay::ProtocolRelay;
use std::sync::Arc;
use std::time::Instant;

pub(crate) fn options() -> Options {
    Options::default().with_connect_timeout(WATCHDOG).with_silence_timeout(WATCHDOG)
}

/// How a server is spoken to.
#[derive(Clone, Copy, PartialEq, Debug)]
enum ServerKind {
    Extended,
    /// In 7.0, through a relay that hides that the server is ours.
    Ggml,
}

const SERVER_KINDS: [ServerKind; 2] = [ServerKind::Extended, ServerKind::Ggml];

impl ServerKind {
    fn connect(self, server: &TestServer) -> Endpoint {
        let addr = match self {
            ServerKind::Extended => server.addr,
            ServerKind::Ggml => ProtocolRelay::start(server.addr, true).addr,
        };
        Endpoint::connect(&addr.to_string(), &options()).expect("a server")
    }
}

pub(crate) fn account() -> Arc<Account> {
    Account::new(1 << 30)
}

pub(crate) fn deadline() -> Option<Instant> {
    Some(Instant::now() + WATCHDOG)
}

pub(crate) struct QueueFixture {
    pub(crate) device: Arc<dyn Device>,
    pub(crate) queue: Box<dyn Queue>,
    pub(crate) buffer: Buffer,
}

impl QueueFixture {
    pub(crate) fn new(device: &Arc<dyn Device>, bytes: u64) -> QueueFixture {
        let (queue, buffer) = (device.queue(&account()).unwrap(), device.alloc(bytes, &account()).unwrap());
        QueueFixture { device: Arc::clone(device), queue, buffer }
    }

    pub(crate) fn bytes(&mut self) -> Vec<u8> {
        self.queue.download(self.buffer.whole()).unwrap().wait(deadline()).unwrap()
    }

    pub(crate) fn upload(&mut self, bytes: &[u8]) {
        self.queue.upload(self.buffer.whole(), None, Source::Borrowed(bytes)).unwrap();
    }
}

#[test]
fn devices_are_those_of_the_server() {
    for way in SERVER_KINDS {
        let server = TestServer::with_devices(3, Config::default());
        let endpoint = way.connect(&server);
        assert_eq!(endpoint.devices().len(), 3);
        for (i, (device, theirs)) in endpoint.devices().iter().zip(&server.devices).enumerate() {
            let info = device.info();
            let name = if way == ServerKind::Extended { theirs.info().name.clone() } else { i.to_string() };
            assert_eq!(info.name, format!("{}/{name}", endpoint.name()));
            assert_eq!(info.kind, if way == ServerKind::Extended { DeviceKind::Cpu } else { DeviceKind::Gpu });
            assert_eq!((info.alignment, info.max_buffer), (theirs.info().alignment, theirs.info().max_buffer));
            assert_eq!(device.memory(), theirs.memory());
            assert_eq!(info.domain, endpoint.devices()[0].info().domain);
        }
        assert_ne!(way.connect(&server).devices()[0].info().domain, endpoint.devices()[0].info().domain);
        let padded = TensorDesc::contiguous(DType::Q4_0, [32, 5, 1, 1]).unwrap();
        assert_eq!(endpoint.devices()[0].alloc_size(&padded), server.devices[0].alloc_size(&padded));
    }
}

#[test]
fn bytes_come_back_as_they_went() {
    for way in SERVER_KINDS {
        let server = TestServer::start(Config::default());
        let endpoint = way.connect(&server);
        for size in [1, 300, 256 << 10, (256 << 10) + 1, 9_000_001] {
            let mut rig = QueueFixture::new(&endpoint.devices()[0], size + 7);
            assert!(rig.bytes().iter().all(|&b| b == 0), "new memory is zeroed");
            let data = noise(size, size as usize);
            let part = rig.buffer.region(3, size).unwrap();
            rig.queue.upload(part.clone(), None, Source::Borrowed(&data)).unwrap();
            assert!(rig.bytes()[3..][..size as usize] == data);
            let mut rest = &data[..];
            let mut write = |to: &mut [u8]| {
                let (now, later) = rest.split_at(to.len());
                to.copy_from_slice(now);
                rest = later;
                Ok(())
            };
            rig.queue.fill(rig.buffer.whole(), 7).unwrap();
            let desc = TensorDesc::contiguous(DType::I8, [size as usize, 1, 1, 1]).unwrap();
            rig.queue.upload(part, Some(&desc), Source::Writer(&mut write)).unwrap();
            let bytes = rig.bytes();
            assert!(bytes[3..][..size as usize] == data);
            assert!(bytes[..3].iter().chain(&bytes[3 + size as usize..]).all(|&b| b == 7));
        }
    }
}

#[test]
fn copies_stay_on_the_server_and_may_overlap() {
    for way in SERVER_KINDS {
        let server = TestServer::with_devices(2, Config::default());
        let endpoint = way.connect(&server);
        let [mut a, mut b] = [0, 1].map(|i| QueueFixture::new(&endpoint.devices()[i], 1000));
        let data = noise(1, 1000);
        a.upload(&data);
        for _ in 0..3 {
            // Once to find out whether the server can, then because it can.
            assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), None).unwrap().is_submitted());
            assert!(b.bytes() == data);
            b.queue.fill(b.buffer.whole(), 0).unwrap();
        }
        let (from, to) = (a.buffer.region(0, 600).unwrap(), a.buffer.region(100, 600).unwrap());
        assert!(a.queue.copy_from(from, to, None).unwrap().is_submitted());
        let mut moved = data.clone();
        moved.copy_within(0..600, 100);
        assert!(a.bytes() == moved);
        let elsewhere = QueueFixture::new(&server.devices[0], 1000);
        assert_eq!(a.queue.copy_from(elsewhere.buffer.whole(), a.buffer.whole(), None), Ok(CopyOutcome::Unreachable));
    }
}

/// Many queues, each a chain of programs of its own, with marks that are waited for in any order.
#[test]
fn queues_work_at_the_same_time() {
    for way in SERVER_KINDS {
        let server = TestServer::with_devices(2, Config::default());
        let endpoint = way.connect(&server);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let device = &endpoint.devices()[thread as usize % 2];
                scope.spawn(move || {
                    let mut b = Builder::new();
                    let x = b.leaf(DType::F32, [16, 1, 1, 1]).unwrap();
                    let onto = b.view(x, b.tensor(x).unwrap().desc, 0).unwrap();
                    b.node_into(Binary::Add, &[Some(x), Some(x)], onto).unwrap();
                    let graph = Arc::new(b.build().unwrap());
                    let mut rig = QueueFixture::new(device, graph.slot_sizes()[0] as u64);
                    let program = rig.device.prepare(graph).unwrap();
                    let mut rng = fastrand::Rng::with_seed(thread);
                    let bindings = Arc::from([rig.buffer.whole()]);
                    for round in 0..20 {
                        rig.upload(&(thread as f32 + 1.0).to_le_bytes().repeat(rig.buffer.bytes() as usize / 4));
                        let times = rng.i32(1..10);
                        let mut points = Vec::new();
                        for _ in 0..times {
                            rig.queue.run(&program, &bindings).unwrap();
                            points.push(rig.queue.mark());
                        }
                        rng.shuffle(&mut points);
                        points.iter().take(rng.usize(0..4)).for_each(|point| point.wait(deadline()).unwrap());
                        let want = (thread as f32 + 1.0) * 2f32.powi(times);
                        assert_eq!(rig.bytes()[..4], want.to_le_bytes(), "thread {thread}, round {round}");
                        assert!(points.iter().all(|point| point.poll() == Ok(true)), "a later read proves them all");
                    }
                });
            }
        });
    }
}

#[test]
fn buffers_are_freed_when_nothing_needs_them() {
    for way in SERVER_KINDS {
        let server = TestServer::start(Config::default());
        let endpoint = way.connect(&server);
        let device = &endpoint.devices()[0];
        let mut queue = device.queue(&account()).unwrap();
        let before = server.used(0);
        let ours = account();
        let buffer = device.alloc(1 << 20, &ours).unwrap();
        assert_eq!((server.used(0) - before, ours.used()), (1 << 20, 1 << 20));
        queue.upload(buffer.whole(), None, Source::Borrowed(&vec![1; 1 << 20])).unwrap();
        let bytes = queue.download(buffer.whole()).unwrap();
        drop(buffer);
        assert!(bytes.wait(deadline()).unwrap().iter().all(|&b| b == 1));
        assert_eq!(ours.used(), 0);
        eventually("the buffer is freed", || server.used(0) == before);
        let refused = device.alloc(1 << 40, &Account::new(u64::MAX)).unwrap_err();
        assert!(matches!(refused, DeviceError::OutOfMemory { asked, .. } if asked == 1 << 40), "{refused}");
        drop((queue, endpoint));
        eventually("everything is", || server.used(0) == 0 && server.handle.connections() == 0);
    }
}

#[test]
fn a_server_that_ends_is_named_by_all_that_waits() {
    for way in SERVER_KINDS {
        let mut server = TestServer::start(Config::default());
        let endpoint = way.connect(&server);
        let name = endpoint.name().to_owned();
        let mut rigs = [0; 3].map(|_| QueueFixture::new(&endpoint.devices()[0], 64));
        let points = rigs.each_mut().map(|rig| {
            rig.upload(&[1; 64]);
            rig.queue.mark()
        });
        server.stop();
        let lost = |e: DeviceError| match &e {
            DeviceError::Lost { endpoint, .. } => assert_eq!(*endpoint, name),
            other => panic!("{other}"),
        };
        points.iter().for_each(|point| lost(point.wait(deadline()).unwrap_err()));
        for rig in &mut rigs {
            lost(rig.queue.download(rig.buffer.whole()).unwrap_err());
            lost(rig.queue.mark().wait(deadline()).err().unwrap_or(DeviceError::Ended));
            lost(rig.device.memory().unwrap_err());
            lost(rig.device.queue(&account()).map(drop).unwrap_err());
        }
        let name = server.addr.to_string();
        let options = options().with_connect_timeout(SHORT);
        let refused = Endpoint::connect(&name, &options).unwrap_err().to_string();
        assert!(refused.contains(&name) && refused.contains("cannot connect"), "{refused}");
    }
}

#[test]
fn lists_of_devices_name_servers() {
    use fanout::registry::{Options, Registry, RegistryError};
    let servers = [TestServer::with_devices(2, Config::default()), TestServer::start(Config::default())];
    let [a, b] = servers.each_ref().map(|server| server.addr.to_string());
    let (registry, options) = (Registry::detect(), Options::default().with_threads(Some(1)));
    let names = |list: &str| -> Result<Vec<String>, RegistryError> {
        Ok(registry.open(list, &options)?.iter().map(|device| device.info().name.clone()).collect())
    };
    let (all, one) = ([format!("{a}/CPU0"), format!("{a}/CPU1")], format!("{b}/CPU0"));
    // By the server's name of it, and by its number.
    for named in [&*one, &format!("{b}/cpu0"), &format!("{b}/0")] {
        assert_eq!(names(&format!("{a}, CPU,{named}")).unwrap(), [&*all[0], &all[1], "CPU", &one]);
    }
    let two = registry.open(&format!("{a}/1,{a}/0"), &options).unwrap();
    assert_eq!(two[0].info().domain, two[1].info().domain);
    let error = |list: &str| names(list).unwrap_err().to_string();
    assert!(error(&format!("{b}/1")).contains(&one));
    assert!(error(&format!("{a}/CPU1,{a}/1")).contains("more than once"));
    assert!(error(&format!("{a},{a}/0")).contains("more than once"));
    assert!(error("CPU,nowhere:x").contains("nowhere:x"));
}
