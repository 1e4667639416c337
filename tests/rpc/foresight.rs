//! What a session does with the time until the next message of a client that uploads weights.

use crate::support::*;
use fanout::cpu::{CpuDevice, Path};
use fanout::device::{DeviceError, Point, Program, Queue, Region, Source, Ticket};
use fanout::rpc::server::Config;
use fanout::tensor::TensorDesc;
use fanout_testing::forwarding_device::ForwardingDevice;
use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};

/// A queue that tells what it foresees.
struct SeerQueue(Box<dyn Queue>, Sender<Range<u64>>);

impl Queue for SeerQueue {
    fn upload(&mut self, dst: Region, tensor: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        self.0.upload(dst, tensor, src)
    }

    fn foresee(&mut self, region: &Region) {
        self.0.foresee(region);
        self.1.send(region.offset()..region.offset() + region.bytes()).expect("the test listens");
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        self.0.download(src)
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        self.0.fill(dst, value)
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<bool, DeviceError> {
        self.0.copy_from(src, dst, after)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.0.run(program, bindings)
    }

    fn mark(&mut self) -> Point {
        self.0.mark()
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.0.wait(point)
    }
}

#[test]
fn what_lies_behind_a_large_upload_is_made_ready_once_and_not_changed() {
    const MIB: u64 = 1 << 20;
    let (tell, told) = channel();
    let cpu = CpuDevice::new("CPU", 1, Path::Exact, MEMORY).unwrap();
    let seer = ForwardingDevice::with_queues(cpu, move |queue| Ok(Box::new(SeerQueue(queue, tell.clone()))));
    let server = TestServer::of(vec![seer], Config::default());
    let mut client = Client::open(&server);
    let (one, other) = (client.alloc(0, 6 * MIB), client.alloc(0, 4 * MIB));
    let weight = noise(1, 2 << 20);
    // The buffer, where the upload begins, and the parts that are seen to behind it, in MiB.
    let cases = [
        (&one, 0, vec![2, 3, 4, 5]),
        // Nothing is left to be made ready there.
        (&one, 2, vec![]),
        (&other, 0, vec![2, 3]),
        (&other, 2, vec![]),
    ];
    for (memory, at, seen) in cases {
        client.set(&memory.bytes(), at * MIB, &weight);
        for step in seen {
            assert_eq!(told.recv_timeout(WATCHDOG), Ok(step * MIB..(step + 1) * MIB));
        }
        assert!(client.get(&memory.bytes(), at * MIB, 2 * MIB) == weight);
    }
    // Inputs are small: nothing follows from them.
    client.set(&other.bytes(), 0, &weight[..4096]);
    assert!(client.get(&one.bytes(), 0, 2 * MIB) == weight);
    drop(server);
    assert_eq!(told.try_iter().collect::<Vec<_>>(), []);
}
