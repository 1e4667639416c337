//! Devices that are lost: the errors of their sessions, the drain of the server, and the end and restart of the program.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::gpus::emulated_program;
use crate::server_program::{ServerProcess, spawn_server_with_log};
use crate::server_program_keys::Fixture;
use crate::server_program_lifecycle::{QueueWork, options};
use crate::server_program_supervisor::next_worker;
use crate::support::*;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{
    Buffer, Device, DeviceError, ForwardDevice, MemoryBudget, MemoryInfo, Program, Queue, UploadSource,
};
use fanout::graph::{Builder, Graph};
use fanout::ops::unary::Unary;
use fanout::rpc::client::Endpoint;
use fanout::rpc::server::{Config, Ended};
use fanout::rpc::wire::{GetDeviceMemory, Request};
use fanout::tensor::DType;
use std::sync::{Arc, OnceLock};
use std::time::Instant;
use tempfile::NamedTempFile;

/// Exit code of a process that ends because a device is lost: EX_TEMPFAIL.
const DEVICE_LOST: i32 = 75;

/// A device that is lost when the test says so.
#[derive(Debug)]
struct LosableDevice {
    inner: Arc<dyn Device>,
    lost: OnceLock<DeviceError>,
}

impl LosableDevice {
    fn usable(&self) -> Result<&dyn Device, DeviceError> {
        self.lost.get().map_or(Ok(&*self.inner), |error| Err(error.clone()))
    }
}

impl ForwardDevice for LosableDevice {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        self.usable()?.memory()
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        self.usable()?.alloc(bytes, budget)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        self.usable()?.prepare(graph)
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        self.usable()?.queue(budget)
    }

    fn lost(&self) -> Option<DeviceError> {
        self.lost.get().cloned()
    }
}

/// Clients of both protocols get errors from a lost device, with the reason in the log. The server drains, in which a session on
/// another device goes on, and ends with the device's error.
#[test]
fn a_server_drains_and_ends_when_a_device_is_lost() {
    let cpu = |name| CpuDevice::new(name, 1, MathMode::Exact, MEMORY).unwrap();
    let losable = Arc::new(LosableDevice { inner: cpu("CPU0"), lost: OnceLock::new() });
    let devices: Vec<Arc<dyn Device>> = vec![Arc::clone(&losable) as Arc<dyn Device>, cpu("CPU1")];
    let mut server = TestServer::with_device_list(devices, Config::default());
    let mut plain = Client::connect(&server);
    plain.assert_alive();
    let (on_lost, elsewhere) = (connect(&server.addr.to_string()), connect(&server.addr.to_string()));
    let mut other = QueueWork::on_device(&*elsewhere.devices()[1]);
    let error = DeviceError::Lost { device: "CPU0".to_owned(), reason: "it fell off the bus".to_owned() };
    losable.lost.set(error.clone()).unwrap();

    assert_eq!(plain.try_alloc(0, 64).remote_ptr, 0);
    plain.send(&Request::GetDeviceMemory(GetDeviceMemory { device: 0 }));
    plain.expect_closed();
    let lines = [plain.infos(), plain.warnings()].concat();
    let lines: Vec<_> = lines.into_iter().filter(|line| line.contains("CPU0")).collect();
    assert!(lines.len() >= 2 && lines.iter().all(|line| line.contains("fell off the bus")), "{lines:#?}");
    let budget = MemoryBudget::new(1 << 20);
    let device = &on_lost.devices()[0];
    assert!(device.alloc(64, &budget).is_err());
    let failed = device.queue(&budget).and_then(|mut queue| queue.mark().wait(Some(Instant::now() + WATCHDOG)));
    assert!(failed.as_ref().is_err_and(|e| e.to_string().contains("fell off the bus")), "{failed:?}");

    assert_eq!(server.handle.wait_for_lost_device(), Some(error.clone()));
    eventually("the server drains", || Endpoint::connect(&server.addr.to_string(), &options()).is_err());
    assert_eq!(other.run(), Ok(vec![7; 64]));
    drop((plain, on_lost, elsewhere, other));
    assert_eq!(server.wait_until_ended(), Ended::DeviceLost(error));
}

#[test]
fn a_server_that_is_shut_down_has_lost_no_device() {
    let mut server = TestServer::start(Config::default());
    let handle = server.handle.clone();
    let waiting = std::thread::spawn(move || handle.wait_for_lost_device());
    server.handle.shutdown();
    assert_eq!(server.wait_until_ended(), Ended::Shutdown);
    assert_eq!(waiting.join().unwrap(), None);
}

fn connect(addr: &str) -> Endpoint {
    Endpoint::connect(addr, &options().with_retry(WATCHDOG)).unwrap()
}

/// A program with one launch on a device of a server.
struct LaunchWork {
    queue: Box<dyn Queue>,
    buffer: Buffer,
    program: Program,
}

impl LaunchWork {
    fn on_device(device: &dyn Device) -> LaunchWork {
        let budget = MemoryBudget::new(1 << 20);
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [16, 1, 1, 1]).unwrap();
        let desc = b.tensor(x).unwrap().desc;
        let onto = b.view(x, desc, 0).unwrap();
        b.node_into(Unary::Scale { scale: 2.0, bias: 0.0 }, &[Some(x)], onto).unwrap();
        let graph = Arc::new(b.build());
        let buffer = device.alloc(graph.slot_sizes()[0] as u64, &budget).unwrap();
        let program = device.prepare(graph).unwrap();
        LaunchWork { queue: device.queue(&budget).unwrap(), buffer, program }
    }

    /// The first of the doubled numbers.
    fn run(&mut self) -> Result<f32, DeviceError> {
        let ones: Vec<u8> = [1_f32; 16].iter().flat_map(|v| v.to_le_bytes()).collect();
        let numbers = self.buffer.region(0, 64).unwrap();
        self.queue.upload(numbers.clone(), None, UploadSource::Borrowed(&ones))?;
        self.queue.run(&self.program, &Arc::from([self.buffer.whole()]))?;
        let bytes = self.queue.download(numbers)?.wait(Some(Instant::now() + WATCHDOG))?;
        Ok(f32::from_le_bytes(*bytes.first_chunk().unwrap()))
    }
}

/// A server program with two GPUs, of which the second one fails at its first launch. Returns it and its log.
fn start_failing(args: &[&str]) -> (ServerProcess, NamedTempFile) {
    let log = NamedTempFile::new().unwrap();
    let settings = [("CUDAEMU_DEVICES", "2"), ("CUDAEMU_MEMORY", "64M"), ("CUDAEMU_FAULT_AT", "1:ecc@1")];
    let program = emulated_program(&settings, &[&["-p", "0", "-t", "1", "-d", "0,1"], args].concat());
    (spawn_server_with_log(program, log.reopen().unwrap().into()), log)
}

/// Lets the second GPU of a server fail. A session on the first one then gets its answers within the drain.
fn lose_second_gpu(addr: &str) {
    let (endpoint, other_endpoint) = (connect(addr), connect(addr));
    let mut other = LaunchWork::on_device(&*other_endpoint.devices()[0]);
    assert_eq!(other.run(), Ok(2.0));
    let error = LaunchWork::on_device(&*endpoint.devices()[1]).run().unwrap_err().to_string();
    assert!(error.contains("ECC"), "{error}");
    eventually("the server drains", || Endpoint::connect(addr, &options()).is_err());
    assert_eq!(other.run(), Ok(2.0));
}

#[test]
fn a_program_whose_gpu_is_lost_ends_with_75() {
    let (mut server, log) = start_failing(&["--no-supervise"]);
    lose_second_gpu(&server.addr);
    assert_eq!(server.exit(), Some(DEVICE_LOST));
    let text = std::fs::read_to_string(log.path()).unwrap();
    let says =
        ["CUDA1 is lost until its process is started again: ", "the server drains for at most 10s", "exit code 75"];
    assert!(says.iter().all(|part| text.contains(part)), "{text}");
}

#[test]
fn the_supervisor_replaces_a_worker_whose_gpu_is_lost() {
    let (mut server, log) = start_failing(&[]);
    let worker = next_worker(server.child.id(), None);
    lose_second_gpu(&server.addr);
    next_worker(server.child.id(), Some(worker));
    let again = connect(&server.addr);
    assert_eq!(LaunchWork::on_device(&*again.devices()[0]).run(), Ok(2.0));
    drop(again);
    server.signal("-TERM");
    assert_eq!(server.exit(), Some(0));
    let text = std::fs::read_to_string(log.path()).unwrap();
    let says = format!("supervisor: worker {worker} ended with exit code 75, because a device is lost");
    assert!(text.contains(&says), "{text}");
}

/// A client whose kernels fault twice is refused by the third worker, by its key. Other keys are served, and what a client did whose
/// device is lost by another cause counts for nothing.
#[test]
fn a_client_whose_kernels_fault_twice_is_refused() {
    for (fault, is_refused) in [("1:address", true), ("1:ecc", false)] {
        let settings = [("CUDAEMU_DEVICES", "1"), ("CUDAEMU_MEMORY", "64M"), ("CUDAEMU_FAULT_AT", fault)];
        let (fixture, _) = Fixture::start_program(["", ""], &["-d", "0"], |args| emulated_program(&settings, args));
        let supervisor = fixture.server.child.id();
        let mut worker = next_worker(supervisor, None);
        for _ in 0..2 {
            let endpoint =
                Endpoint::connect(&fixture.server.addr, &fixture.options(Some(&fixture.alice)).with_retry(WATCHDOG));
            let error = LaunchWork::on_device(&*endpoint.unwrap().devices()[0]).run().unwrap_err().to_string();
            assert!(error.contains("is lost"), "{error}");
            worker = next_worker(supervisor, Some(worker));
        }
        let devices = |key| {
            let endpoint = Endpoint::connect(&fixture.server.addr, &fixture.options(Some(key)).with_retry(WATCHDOG));
            endpoint.map(|endpoint| endpoint.devices().len()).map_err(|e| e.to_string())
        };
        assert_eq!(devices(&fixture.bob), Ok(1));
        let alice = Endpoint::connect(&fixture.server.addr, &fixture.options(Some(&fixture.alice)));
        assert_eq!(alice.is_err(), is_refused, "{fault}: {}", fixture.log());
        let key = fixture.alice.public_key();
        let lines = [
            format!("supervisor: a kernel of {key} has made a device unusable"),
            format!("supervisor: a kernel of {key} has made a device unusable again: refused for 3600s"),
            "rejected: kernels of its key or address have made a device unusable more than once".to_owned(),
        ];
        for line in lines {
            if is_refused {
                // The threads that log run beside the sessions.
                eventually(&line, || fixture.log().contains(&line));
            } else {
                assert!(!fixture.log().contains(&line), "{fault}: {line}\n{}", fixture.log());
            }
        }
    }
}
