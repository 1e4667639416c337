//! What a session does with the time until the next message of a client that uploads weights.

use crate::support::*;
use fanout::cpu::{CpuDevice, Path};
use fanout::device::{DeviceError, ForwardQueue, Prefault, Queue, Region};
use fanout::rpc::server::Config;
use fanout_testing::forwarding_device::ForwardingDevice;
use std::ops::Range;
use std::sync::mpsc::{Sender, channel};

/// A queue that tells what it prefaults.
struct SeerQueue(Box<dyn Queue>, Sender<Range<u64>>);

impl ForwardQueue for SeerQueue {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.0)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        Some(self)
    }
}

impl Prefault for SeerQueue {
    fn prefault(&mut self, region: &Region) {
        if let Some(memory) = self.0.prefault() {
            memory.prefault(region);
        }
        self.1.send(region.offset()..region.offset() + region.bytes()).expect("the test listens");
    }
}

#[test]
fn what_lies_behind_a_large_upload_is_made_ready_once_and_not_changed() {
    const MIB: u64 = 1 << 20;
    let (tell, told) = channel();
    let cpu = CpuDevice::new("CPU", 1, Path::Exact, MEMORY).unwrap();
    let seer = ForwardingDevice::with_queues(cpu, move |queue| Ok(Box::new(SeerQueue(queue, tell.clone()))));
    let server = TestServer::with_device_list(vec![seer], Config::default());
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
