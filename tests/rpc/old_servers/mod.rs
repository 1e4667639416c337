//! The client against servers of older protocol versions: the same results through each version's encoding, and early errors
//! for features that a version lacks. [`version_proxy`] translates between an old version and a server of 7.0.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

mod late_replies;
mod version_proxy;

use crate::client::options;
use crate::support::{TestServer, WATCHDOG, eventually, random_bytes, random_floats};
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, DeviceError, MemoryBudget, Queue, Region, Support, UploadSource};
use fanout::graph::{Builder, Graph, TensorId};
use fanout::ops::binary::Binary;
use fanout::ops::copy::CopyOp;
use fanout::ops::glu::{Glu, GluKind as Gate};
use fanout::ops::mul_mat::MulMat;
use fanout::ops::norm::Norm;
use fanout::ops::rope::{Rope, RopeMode};
use fanout::ops::rows::Rows;
use fanout::ops::softmax::SoftMax;
use fanout::ops::unary::{Unary, UnaryKind};
use fanout::rpc::client::{ConnectError, Endpoint};
use fanout::rpc::server::Config;
use fanout::sched::{self, Scheduler, TaskBuilder};
use fanout::tensor::{DType, TensorDesc};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;
use version_proxy::{ALL, GEN0, OldVersion, OldVersionProxy, V3_0};

/// A server of an old version: a proxy that speaks it, a server of 7.0 behind the proxy, and a client's endpoint.
struct OldServer {
    endpoint: Endpoint,
    proxy: OldVersionProxy,
    server: TestServer,
}

impl OldServer {
    fn new(version: OldVersion) -> OldServer {
        OldServer::with_devices(1, version)
    }

    fn with_devices(count: usize, version: OldVersion) -> OldServer {
        let server = TestServer::with_devices(count, Config::default());
        let proxy = OldVersionProxy::new(version, server.addr);
        let endpoint = Endpoint::connect(&proxy.addr.to_string(), &options()).unwrap_or_else(|e| panic!("{e}"));
        OldServer { endpoint, proxy, server }
    }

    fn device(&self) -> &Arc<dyn Device> {
        &self.endpoint.devices()[0]
    }

    /// How often the client has sent a command, given by its number in 7.0.
    fn count(&self, version: &OldVersion, command: u8) -> usize {
        version.number(command).map_or(0, |number| self.proxy.count(number))
    }
}

fn budget() -> Arc<MemoryBudget> {
    MemoryBudget::new(1 << 30)
}

fn deadline() -> Option<Instant> {
    Some(Instant::now() + WATCHDOG)
}

fn read(queue: &mut dyn Queue, region: Region) -> Vec<u8> {
    queue.download(region).unwrap().wait(deadline()).unwrap()
}

/// A product, a softmax and the gates that a version supports, over a few rows. All tensors of the graph are in one slot.
fn network(version: &str) -> (Graph, TensorId) {
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [32, 2, 6, 1]).unwrap();
    let positions = b.leaf(DType::I32, [6, 1, 1, 1]).unwrap();
    let w = b.leaf(DType::F32, [32, 64, 1, 1]).unwrap();
    let normed = b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
    let turned = b.node(Rope::new(RopeMode::Neox, 16), &[Some(normed), Some(positions)]).unwrap();
    let product = b.node(MulMat::PLAIN, &[Some(w), Some(turned)]).unwrap();
    let shares = b.node(SoftMax { scale: 0.3, max_bias: 0.0 }, &[Some(product)]).unwrap();
    let curved = b.node(Unary::Kind(UnaryKind::Silu), &[Some(shares)]).unwrap();
    let mut y = b.node(Binary::Add, &[Some(curved), Some(product)]).unwrap();
    if version != "gen0" {
        y = b.node(Glu { kind: Gate::Swiglu, swapped: false }, &[Some(y)]).unwrap();
        let kind = Unary::Kind(UnaryKind::GeluErf);
        y = b.node(kind, &[Some(y)]).unwrap();
    }
    if version > "3.4" && version != "gen0" {
        y = b.node(Unary::Kind(UnaryKind::Expm1), &[Some(y)]).unwrap();
    }
    y = b.node(CopyOp::Cont, &[Some(y)]).unwrap();
    (b.build(), y)
}

/// Runs the network of a version on a device. Returns the bytes of its slots, which include the result.
pub(crate) fn run_network(device: &Arc<dyn Device>, version: &str, times: usize) -> Vec<Vec<u8>> {
    let graph = Arc::new(network(version).0);
    let mut queue = device.queue(&budget()).unwrap();
    let regions: Vec<Region> =
        graph.slot_sizes().iter().map(|&bytes| device.alloc(bytes as u64, &budget()).unwrap().whole()).collect();
    for (i, region) in (0..).zip(&regions) {
        // Random floats for all slots but the positions, which are integers: 6 of 4 bytes.
        let mut bytes: Vec<u8> =
            random_floats(i, region.bytes() as usize / 4).iter().flat_map(|f| f.to_le_bytes()).collect();
        if bytes.len() == 24 {
            bytes = (0..6i32).flat_map(|n| (3 * n).to_le_bytes()).collect();
        }
        queue.upload(region.clone(), None, UploadSource::Borrowed(&bytes)).unwrap();
    }
    let program = device.prepare(Arc::clone(&graph)).unwrap();
    let bindings: Arc<[Region]> = regions.clone().into();
    for _ in 0..times {
        queue.run(&program, &bindings).unwrap();
    }
    regions.into_iter().map(|region| read(&mut *queue, region)).collect()
}

#[test]
fn every_version_computes_the_same_results() {
    for version in ALL {
        let old = OldServer::with_devices(if version.name == "gen0" { 1 } else { 2 }, version);
        let devices = old.endpoint.devices();
        assert_eq!(devices.len(), old.server.devices.len(), "{}", version.name);
        for (i, (device, local)) in devices.iter().zip(&old.server.devices).enumerate() {
            assert_eq!(device.info().name, format!("{}/{i}", old.proxy.addr));
            assert!(device.info().description.contains(version.name));
            assert_eq!(device.info().alignment, local.info().alignment);
            assert_eq!(device.memory(), local.memory(), "{}", version.name);
            let wanted = run_network(local, version.name, 3);
            assert!(run_network(device, version.name, 3) == wanted, "{} on device {i}", version.name);
        }
        // Versions with GRAPH_RECOMPUTE receive a repeated graph only once.
        let graphs = [old.count(&version, 10), old.count(&version, 16)];
        let again = version.number(16).is_some();
        assert_eq!(graphs, [devices.len() * if again { 1 } else { 3 }, devices.len() * if again { 2 } else { 0 }]);
        let padded = TensorDesc::contiguous(DType::Q4_0, [32, 5, 1, 1]).unwrap();
        let size = devices[0].alloc_size(&padded);
        // Padding that some devices read behind the last row. The client computes it for servers without GET_ALLOC_SIZE.
        let room = if version.name == "gen0" { 480 / 32 * 18 } else { 0 };
        assert_eq!(size, padded.extent() as u64 + room, "{}", version.name);
    }
}

#[test]
fn uploaded_bytes_are_downloaded_unchanged() {
    for version in ALL {
        let old = OldServer::new(version);
        let device = old.device();
        let mut queue = device.queue(&budget()).unwrap();
        for size in [1, 300, (256 << 10) + 1, 9_000_001] {
            let buffer = device.alloc(size + 7, &budget()).unwrap();
            assert!(read(&mut *queue, buffer.whole()).iter().all(|&b| b == 0), "new memory is zeroed");
            let data = random_bytes(size, size as usize);
            let part = buffer.region(3, size).unwrap();
            queue.fill(buffer.whole(), 7).unwrap();
            queue.upload(part.clone(), None, UploadSource::Borrowed(&data)).unwrap();
            let bytes = read(&mut *queue, buffer.whole());
            assert!(bytes[3..][..size as usize] == data, "{} {size}", version.name);
            assert!(bytes[..3].iter().chain(&bytes[3 + size as usize..]).all(|&b| b == 7));
            queue.fill(part.clone(), 9).unwrap();
            let bytes = read(&mut *queue, buffer.whole());
            assert!(bytes[3..][..size as usize].iter().all(|&b| b == 9), "{} {size}", version.name);
            assert!(bytes[..3].iter().chain(&bytes[3 + size as usize..]).all(|&b| b == 7));
            let copy = device.alloc(size, &budget()).unwrap();
            queue.upload(part.clone(), None, UploadSource::Borrowed(&data)).unwrap();
            assert!(queue.copy_from(part, copy.whole(), None).unwrap().is_submitted());
            assert!(read(&mut *queue, copy.whole()) == data, "{} {size}", version.name);
        }
        // An upload of a whole tensor uses SET_TENSOR with its type if the version supports the type, and raw bytes otherwise.
        let desc = TensorDesc::contiguous(DType::MXFP4, [64, 3, 1, 1]).unwrap();
        let (data, buffer) = (random_bytes(1, desc.extent()), device.alloc(desc.extent() as u64, &budget()).unwrap());
        queue.upload(buffer.whole(), Some(&desc), UploadSource::Borrowed(&data)).unwrap();
        assert!(read(&mut *queue, buffer.whole()) == data);
        assert_eq!(old.count(&version, 17) > 0, version.number(17).is_some(), "{}", version.name);
        drop((buffer, queue, old.endpoint));
        eventually("the server has freed all buffers", || old.server.used_bytes(0) == 0);
    }
}

#[test]
fn points_can_be_waited_for_in_any_order() {
    for version in [GEN0, V3_0, ALL[4]] {
        let old = OldServer::new(version);
        let device = old.device();
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [16, 1, 1, 1]).unwrap();
        let onto = b.view(x, b.tensor(x).unwrap().desc, 0).unwrap();
        b.node_into(Binary::Add, &[Some(x), Some(x)], onto).unwrap();
        let graph = Arc::new(b.build());
        let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget()).unwrap();
        let program = device.prepare(graph).unwrap();
        let mut queues = [0; 2].map(|_| device.queue(&budget()).unwrap());
        let bindings = Arc::from([buffer.whole()]);
        let mut rng = fastrand::Rng::with_seed(1);
        for round in 0..20 {
            let one = 1f32.to_le_bytes().repeat(buffer.bytes() as usize / 4);
            queues[0].upload(buffer.whole(), None, UploadSource::Borrowed(&one)).unwrap();
            let (times, mut points) = (rng.i32(1..10), Vec::new());
            for turn in 0..times as usize {
                if let Some(point) = points.last() {
                    queues[turn % 2].wait(point).unwrap();
                }
                queues[turn % 2].run(&program, &bindings).unwrap();
                points.push(queues[turn % 2].mark());
            }
            let last = points[points.len() - 1].clone();
            rng.shuffle(&mut points);
            points.iter().take(rng.usize(0..4)).for_each(|point| point.wait(deadline()).unwrap());
            queues[0].wait(&last).unwrap();
            let bytes = read(&mut *queues[0], buffer.whole());
            assert_eq!(bytes[..4], 2f32.powi(times).to_le_bytes(), "{}, round {round}", version.name);
        }
    }
}

#[test]
fn features_that_a_version_lacks_are_reported_as_unsupported() {
    let scale = |bias| Unary::Scale { scale: 2.0, bias };
    // The version, whether it supports SCALE with a bias, and the reason if not.
    let mut checked = 0;
    for (version, supported, reason) in [
        (GEN0, false, "version gen0 (2024, before HELLO) of the RPC protocol has no SCALE with a bias"),
        (V3_0, true, ""),
    ] {
        let old = OldServer::new(version);
        for (bias, supported) in [(0.0, true), (1.0, supported)] {
            let mut b = Builder::new();
            let x = b.leaf(DType::F32, [16, 1, 1, 1]).unwrap();
            b.node(scale(bias), &[Some(x)]).unwrap();
            let graph = Arc::new(b.build());
            let support = old.device().support(graph.node_view(&graph.nodes()[0]).unwrap());
            let prepared = old.device().prepare(Arc::clone(&graph));
            assert_eq!((support.runs(), prepared.is_ok()), (supported, supported), "{}: {bias}", version.name);
            if let (Support::No(no), Err(DeviceError::Unsupported(same))) = (support, prepared.map(drop)) {
                assert_eq!((&*no.reason, &no), (reason, &same));
            }
            checked += 1;
        }
    }
    assert_eq!(checked, 4);
    let old = OldServer::new(V3_0);
    let mut b = Builder::new();
    let x = b.leaf(DType::F32, [16, 1, 1, 1]).unwrap();
    b.node(Unary::Fill { value: 1.0 }, &[Some(x)]).unwrap();
    let weights = b.leaf(DType::NVFP4, [64, 4, 1, 1]).unwrap();
    let wide = b.leaf(DType::F32, [64, 1, 1, 1]).unwrap();
    b.node(MulMat::PLAIN, &[Some(weights), Some(wide)]).unwrap();
    let graph = b.build();
    for (node, lacks) in graph.nodes().iter().zip(["FILL", "NVFP4"]) {
        match old.device().support(graph.node_view(node).unwrap()) {
            Support::No(no) => assert!(no.reason.contains("3.0.0") && no.reason.contains(lacks), "{}", no.reason),
            other => panic!("{lacks}: {other:?}"),
        }
    }
}

/// Versions before 3.5 reply to GRAPH_COMPUTE with a status. The client does not wait for it: a failure is reported by the next
/// wait.
#[test]
fn a_graph_failure_on_the_server_fails_its_queue() {
    for (version, status, why) in [(GEN0, 255, "failed"), (V3_0, 254, "out of memory"), (V3_0, 1, "aborted")] {
        let old = OldServer::new(version);
        let device = old.device();
        let graph = Arc::new(network(version.name).0);
        let bind = || -> Arc<[Region]> {
            graph.slot_sizes().iter().map(|&n| device.alloc(n as u64, &budget()).unwrap().whole()).collect()
        };
        let program = device.prepare(Arc::clone(&graph)).unwrap();
        let mut queues = [0; 2].map(|_| device.queue(&budget()).unwrap());
        let bindings = bind();
        queues[0].run(&program, &bindings).unwrap();
        queues[0].mark().wait(deadline()).unwrap();
        old.proxy.state.status.store(status, Ordering::SeqCst);
        // The status may arrive before `run` returns, which then fails itself.
        let ran = queues[0].run(&program, &bindings);
        let failed = ran.and_then(|()| queues[0].mark().wait(deadline())).unwrap_err().to_string();
        let addr = old.proxy.addr.to_string();
        assert!([&*addr, "GRAPH_COMPUTE", why].iter().all(|part| failed.contains(part)), "{failed}");
        assert!(queues[0].download(bindings[0].clone()).is_err());
        // Queue 1 and the connection stay usable.
        old.proxy.state.status.store(0, Ordering::SeqCst);
        queues[1].run(&program, &bindings).unwrap();
        queues[1].mark().wait(deadline()).unwrap();
    }
}

#[test]
fn every_waiting_call_names_the_lost_server() {
    for version in [GEN0, V3_0, ALL[6]] {
        let mut old = OldServer::new(version);
        let device = Arc::clone(old.device());
        let mut queue = device.queue(&budget()).unwrap();
        let buffer = device.alloc(64, &budget()).unwrap();
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&[1; 64])).unwrap();
        let point = queue.mark();
        old.server.stop();
        let name = old.proxy.addr.to_string();
        let lost = |e: DeviceError| match &e {
            DeviceError::ConnectionLost { endpoint, .. } => assert_eq!(*endpoint, name),
            other => panic!("{other}"),
        };
        lost(point.wait(deadline()).unwrap_err());
        lost(queue.download(buffer.whole()).unwrap_err());
        lost(device.memory().unwrap_err());
    }
}

/// A server that closes this many connections, and then replies to HELLO with a version, if any. Returns its address.
fn server_that_closes(times: usize, reply: Option<[u8; 3]>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    std::thread::spawn(move || {
        for _ in 0..times {
            drop(listener.accept());
        }
        if let (Some(reply), Ok((mut stream, _))) = (reply, listener.accept()) {
            let _ = stream.read_exact(&mut [0; 9]);
            let _ = stream.write_all(&[&3u64.to_le_bytes()[..], &reply].concat());
        }
    });
    addr
}

#[test]
fn unknown_versions_are_rejected_with_a_reason() {
    let refused = |times, reply| {
        let addr = server_that_closes(times, reply);
        let error = Endpoint::connect(&addr, &options()).unwrap_err();
        assert!(error.to_string().contains(&addr), "{error}");
        error
    };
    for version in [[1, 0, 0], [2, 0, 0], [3, 0, 1], [3, 7, 0]] {
        let error = refused(1, Some(version));
        let message = error.to_string();
        assert!(matches!(error, ConnectError::Version { .. }), "{message}");
        let [major, minor, patch] = version;
        for part in [&*format!("{major}.{minor}.{patch}"), "7.0.0", "3.0.0", "update the server"] {
            assert!(message.contains(part), "{message}");
        }
    }
    let error = refused(3, None);
    assert!(matches!(error, ConnectError::Closed { .. }), "{error}");
    assert!(error.to_string().contains("with its body and without, and on the first request"), "{error}");
    let error = refused(1, None);
    assert!(error.to_string().contains("closed the connection on HELLO"), "{error}");
}

const WIDTH: usize = 32;

/// Runs a task of three layers over the devices; layer `i` has its weights on device `homes[i]`. A layer is a product, a gate,
/// which the oldest version lacks, and a sum. Returns the results of 12 runs, and the numbers of splits and copies.
fn run_scheduled(devices: &[Arc<dyn Device>], homes: [usize; 3], depth: usize) -> (Vec<Vec<u8>>, Vec<usize>) {
    let budget = budget();
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [WIDTH, 2, 1, 1]).unwrap();
    let mut h = x;
    for (layer, home) in homes.into_iter().enumerate() {
        let desc = TensorDesc::contiguous(DType::F32, [WIDTH, 2 * WIDTH, 1, 1]).unwrap();
        let region = devices[home].alloc(desc.extent() as u64, &budget).unwrap().whole();
        let mut queue = devices[home].queue(&budget).unwrap();
        let values = random_floats(layer as u64, desc.elements());
        queue.upload(region.clone(), Some(&desc), UploadSource::Borrowed(bytemuck::cast_slice(&values))).unwrap();
        queue.mark().wait(deadline()).unwrap();
        let w = b.stored(format!("w{layer}"), desc, home, Some(region)).unwrap();
        let product = b.node(MulMat::PLAIN, &[Some(w), Some(h)]).unwrap();
        let gated = b.node(Glu { kind: Gate::Swiglu, swapped: false }, &[Some(product)]).unwrap();
        h = b.node(Binary::Add, &[Some(gated), Some(h)]).unwrap();
    }
    b.output(h).unwrap();
    let options = sched::Options::default().with_depth(depth);
    let mut scheduler = Scheduler::new(devices.to_vec(), options, &budget).unwrap();
    let mut prepared = scheduler.build(&Arc::new(b.build().unwrap())).unwrap();
    let mut pending_reads = Vec::new();
    for run in 0..12 {
        let input = random_floats(100 + run, 2 * WIDTH);
        scheduler.submit(&mut prepared, &[(x, bytemuck::cast_slice(&input))]).unwrap();
        pending_reads.push(scheduler.read(&prepared, h).unwrap());
    }
    let results = pending_reads.into_iter().map(|pending_read| pending_read.wait(deadline()).unwrap()).collect();
    (results, vec![prepared.plan().splits(), prepared.plan().copies()])
}

#[test]
fn a_scheduler_runs_over_an_old_server_and_this_process() {
    let cpu = || CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 24).unwrap() as Arc<dyn Device>;
    let (wanted, _) = run_scheduled(&[cpu()], [0; 3], 1);
    for version in ALL {
        let old = OldServer::new(version);
        let devices = [old.device().clone(), cpu()];
        for depth in [1, 4] {
            let (results, counts) = run_scheduled(&devices, [0, 1, 0], depth);
            let splits = counts[0];
            assert!(results == wanted, "{}, depth {depth}", version.name);
            // The CPU device computes the gates for a server without them, so the plan has more splits.
            assert_eq!(splits > 3, version.name == "gen0", "{}: {splits}", version.name);
        }
    }
}

/// The oldest version has no SET_ROWS: a task that stores its cache on such a server cannot be planned.
#[test]
fn a_task_with_an_op_that_its_server_lacks_is_rejected() {
    let old = OldServer::new(GEN0);
    let budget = budget();
    let mut b = TaskBuilder::new();
    let x = b.input("x", DType::F32, [WIDTH, 2, 1, 1]).unwrap();
    let row = b.input("row", DType::I64, [2, 1, 1, 1]).unwrap();
    let desc = TensorDesc::contiguous(DType::F32, [WIDTH, 8, 1, 1]).unwrap();
    let region = old.device().alloc(desc.extent() as u64, &budget).unwrap().whole();
    let cache = b.stored("cache", desc, 0, Some(region)).unwrap();
    let set = b.node_onto(Rows::SetRows, &[Some(x), Some(row), Some(cache)], cache).unwrap();
    b.output(set).unwrap();
    let mut scheduler = Scheduler::new(vec![old.device().clone()], sched::Options::default(), &budget).unwrap();
    let refused = scheduler.build(&Arc::new(b.build().unwrap())).map(drop).unwrap_err().to_string();
    assert!(refused.contains("SET_ROWS") && refused.contains("gen0"), "{refused}");
}
