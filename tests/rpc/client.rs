//! The client against fanout's server, with the extended protocol and with protocol 7.0 only: transfers, ordering, timeline
//! points and lost servers.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::support::{SHORT_TIMEOUT, TestServer, WATCHDOG, eventually, random_bytes};
use fanout::device::{Buffer, CopyOutcome, Device, DeviceError, DeviceKind, MemoryBudget, Queue, UploadSource};
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

/// The protocol between client and server.
#[derive(Clone, Copy, PartialEq, Debug)]
enum ServerKind {
    Extended,
    /// Protocol 7.0: a relay hides that the server supports the extended protocol.
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

pub(crate) fn budget() -> Arc<MemoryBudget> {
    MemoryBudget::new(1 << 30)
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
        let (queue, buffer) = (device.queue(&budget()).unwrap(), device.alloc(bytes, &budget()).unwrap());
        QueueFixture { device: Arc::clone(device), queue, buffer }
    }

    pub(crate) fn download(&mut self) -> Vec<u8> {
        self.queue.download(self.buffer.whole()).unwrap().wait(deadline()).unwrap()
    }

    pub(crate) fn upload(&mut self, bytes: &[u8]) {
        self.queue.upload(self.buffer.whole(), None, UploadSource::Borrowed(bytes)).unwrap();
    }
}

#[test]
fn remote_devices_have_the_names_limits_and_memory_of_the_servers_devices() {
    for kind in SERVER_KINDS {
        let server = TestServer::with_devices(3, Config::default());
        let endpoint = kind.connect(&server);
        assert_eq!(endpoint.devices().len(), 3);
        for (i, (device, theirs)) in endpoint.devices().iter().zip(&server.devices).enumerate() {
            let info = device.info();
            let name = if kind == ServerKind::Extended { theirs.info().name.clone() } else { i.to_string() };
            assert_eq!(info.name, format!("{}/{name}", endpoint.name()));
            assert_eq!(info.kind, if kind == ServerKind::Extended { DeviceKind::Cpu } else { DeviceKind::Gpu });
            assert_eq!((info.alignment, info.max_buffer), (theirs.info().alignment, theirs.info().max_buffer));
            assert_eq!(device.memory(), theirs.memory());
            assert_eq!(info.domain, endpoint.devices()[0].info().domain);
        }
        assert_ne!(kind.connect(&server).devices()[0].info().domain, endpoint.devices()[0].info().domain);
        let padded = TensorDesc::contiguous(DType::Q4_0, [32, 5, 1, 1]).unwrap();
        assert_eq!(endpoint.devices()[0].alloc_size(&padded), server.devices[0].alloc_size(&padded));
    }
}

#[test]
fn uploaded_bytes_are_downloaded_unchanged() {
    for kind in SERVER_KINDS {
        let server = TestServer::start(Config::default());
        let endpoint = kind.connect(&server);
        for size in [1, 300, 256 << 10, (256 << 10) + 1, 9_000_001] {
            let mut fixture = QueueFixture::new(&endpoint.devices()[0], size + 7);
            assert!(fixture.download().iter().all(|&b| b == 0), "new memory is zeroed");
            let data = random_bytes(size, size as usize);
            let part = fixture.buffer.region(3, size).unwrap();
            fixture.queue.upload(part.clone(), None, UploadSource::Borrowed(&data)).unwrap();
            assert!(fixture.download()[3..][..size as usize] == data);
            let mut rest = &data[..];
            let mut write = |to: &mut [u8]| {
                let (now, later) = rest.split_at(to.len());
                to.copy_from_slice(now);
                rest = later;
                Ok(())
            };
            fixture.queue.fill(fixture.buffer.whole(), 7).unwrap();
            let desc = TensorDesc::contiguous(DType::I8, [size as usize, 1, 1, 1]).unwrap();
            fixture.queue.upload(part, Some(&desc), UploadSource::Writer(&mut write)).unwrap();
            let bytes = fixture.download();
            assert!(bytes[3..][..size as usize] == data);
            assert!(bytes[..3].iter().chain(&bytes[3 + size as usize..]).all(|&b| b == 7));
        }
    }
}

#[test]
fn copies_within_a_server_may_overlap() {
    for kind in SERVER_KINDS {
        let server = TestServer::with_devices(2, Config::default());
        let endpoint = kind.connect(&server);
        let [mut a, mut b] = [0, 1].map(|i| QueueFixture::new(&endpoint.devices()[i], 1000));
        let data = random_bytes(1, 1000);
        a.upload(&data);
        for _ in 0..3 {
            // In the first round the client probes whether the server copies; later rounds rely on the result.
            assert!(b.queue.copy_from(a.buffer.whole(), b.buffer.whole(), None).unwrap().is_submitted());
            assert!(b.download() == data);
            b.queue.fill(b.buffer.whole(), 0).unwrap();
        }
        let (from, to) = (a.buffer.region(0, 600).unwrap(), a.buffer.region(100, 600).unwrap());
        assert!(a.queue.copy_from(from, to, None).unwrap().is_submitted());
        let mut moved = data.clone();
        moved.copy_within(0..600, 100);
        assert!(a.download() == moved);
        let elsewhere = QueueFixture::new(&server.devices[0], 1000);
        assert_eq!(a.queue.copy_from(elsewhere.buffer.whole(), a.buffer.whole(), None), Ok(CopyOutcome::Unreachable));
    }
}

/// Each of eight queues runs its own chain of programs and waits for its marks in a random order.
#[test]
fn queues_run_concurrently() {
    for kind in SERVER_KINDS {
        let server = TestServer::with_devices(2, Config::default());
        let endpoint = kind.connect(&server);
        std::thread::scope(|scope| {
            for thread in 0..8u64 {
                let device = &endpoint.devices()[thread as usize % 2];
                scope.spawn(move || {
                    let mut b = Builder::new();
                    let x = b.leaf(DType::F32, [16, 1, 1, 1]).unwrap();
                    let onto = b.view(x, b.tensor(x).unwrap().desc, 0).unwrap();
                    b.node_into(Binary::Add, &[Some(x), Some(x)], onto).unwrap();
                    let graph = Arc::new(b.build());
                    let mut fixture = QueueFixture::new(device, graph.slot_sizes()[0] as u64);
                    let program = fixture.device.prepare(graph).unwrap();
                    let mut rng = fastrand::Rng::with_seed(thread);
                    let bindings = Arc::from([fixture.buffer.whole()]);
                    for round in 0..20 {
                        fixture
                            .upload(&(thread as f32 + 1.0).to_le_bytes().repeat(fixture.buffer.bytes() as usize / 4));
                        let times = rng.i32(1..10);
                        let mut points = Vec::new();
                        for _ in 0..times {
                            fixture.queue.run(&program, &bindings).unwrap();
                            points.push(fixture.queue.mark());
                        }
                        rng.shuffle(&mut points);
                        points.iter().take(rng.usize(0..4)).for_each(|point| point.wait(deadline()).unwrap());
                        let want = (thread as f32 + 1.0) * 2f32.powi(times);
                        assert_eq!(fixture.download()[..4], want.to_le_bytes(), "thread {thread}, round {round}");
                        assert!(points.iter().all(|point| point.poll() == Ok(true)), "a later read proves all marks");
                    }
                });
            }
        });
    }
}

#[test]
fn buffers_are_freed_after_their_last_use() {
    for kind in SERVER_KINDS {
        let server = TestServer::start(Config::default());
        let endpoint = kind.connect(&server);
        let device = &endpoint.devices()[0];
        let mut queue = device.queue(&budget()).unwrap();
        let before = server.used_bytes(0);
        let budget = budget();
        let buffer = device.alloc(1 << 20, &budget).unwrap();
        assert_eq!((server.used_bytes(0) - before, budget.used()), (1 << 20, 1 << 20));
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&vec![1; 1 << 20])).unwrap();
        let bytes = queue.download(buffer.whole()).unwrap();
        drop(buffer);
        assert!(bytes.wait(deadline()).unwrap().iter().all(|&b| b == 1));
        assert_eq!(budget.used(), 0);
        eventually("the buffer is freed", || server.used_bytes(0) == before);
        let refused = device.alloc(1 << 40, &MemoryBudget::new(u64::MAX)).unwrap_err();
        assert!(matches!(refused, DeviceError::OutOfMemory { requested, .. } if requested == 1 << 40), "{refused}");
        drop((queue, endpoint));
        eventually("the server has freed all buffers and closed the connection", || {
            server.used_bytes(0) == 0 && server.handle.connections() == 0
        });
    }
}

#[test]
fn every_waiting_call_names_the_lost_server() {
    for kind in SERVER_KINDS {
        let mut server = TestServer::start(Config::default());
        let endpoint = kind.connect(&server);
        let name = endpoint.name().to_owned();
        let mut fixtures = [0; 3].map(|_| QueueFixture::new(&endpoint.devices()[0], 64));
        let points = fixtures.each_mut().map(|fixture| {
            fixture.upload(&[1; 64]);
            fixture.queue.mark()
        });
        server.stop();
        let lost = |e: DeviceError| match &e {
            DeviceError::ConnectionLost { endpoint, .. } => assert_eq!(*endpoint, name),
            other => panic!("{other}"),
        };
        points.iter().for_each(|point| lost(point.wait(deadline()).unwrap_err()));
        for fixture in &mut fixtures {
            lost(fixture.queue.download(fixture.buffer.whole()).unwrap_err());
            lost(fixture.queue.mark().wait(deadline()).err().unwrap_or(DeviceError::Ended));
            lost(fixture.device.memory().unwrap_err());
            lost(fixture.device.queue(&budget()).map(drop).unwrap_err());
        }
        let name = server.addr.to_string();
        let options = options().with_connect_timeout(SHORT_TIMEOUT);
        let refused = Endpoint::connect(&name, &options).unwrap_err().to_string();
        assert!(refused.contains(&name) && refused.contains("cannot connect"), "{refused}");
    }
}

#[test]
fn device_lists_may_name_devices_of_servers() {
    use fanout::registry::{Options, Registry, RegistryError};
    let servers = [TestServer::with_devices(2, Config::default()), TestServer::start(Config::default())];
    let [a, b] = servers.each_ref().map(|server| server.addr.to_string());
    let (registry, options) = (Registry::detect(), Options::default().with_threads(Some(1)));
    let names = |list: &str| -> Result<Vec<String>, RegistryError> {
        Ok(registry.open(list, &options)?.iter().map(|device| device.info().name.clone()).collect())
    };
    let (all, one) = ([format!("{a}/CPU0"), format!("{a}/CPU1")], format!("{b}/CPU0"));
    // A device is named by the server's name of the device or by its index.
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
