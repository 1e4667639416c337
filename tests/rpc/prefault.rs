//! Prefaulting: behind a large upload the session touches the pages that the next upload will write, while it waits for the
//! next message.

use crate::support::*;
use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{DeviceError, ForwardQueue, Prefault, Queue, Region};
use fanout::rpc::server::Config;
use fanout_testing::forwarding_device::ForwardingDevice;
use std::ops::Range;
use std::sync::mpsc::{Sender, channel};

/// A queue that sends each prefaulted byte range to the test.
struct PrefaultRecorder(Box<dyn Queue>, Sender<Range<u64>>);

impl ForwardQueue for PrefaultRecorder {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.0)
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        Some(self)
    }
}

impl Prefault for PrefaultRecorder {
    fn prefault(&mut self, region: &Region) {
        if let Some(memory) = self.0.prefault() {
            memory.prefault(region);
        }
        self.1.send(region.offset()..region.offset() + region.bytes()).expect("the test listens");
    }
}

#[test]
fn memory_behind_a_large_upload_is_prefaulted_once_and_not_changed() {
    const MIB: u64 = 1 << 20;
    let (sender, prefaulted) = channel();
    let cpu = CpuDevice::new("CPU", 1, MathMode::Exact, MEMORY).unwrap();
    let device = ForwardingDevice::new(cpu)
        .with_queues(move |queue| Ok(Box::new(PrefaultRecorder(queue, sender.clone()))))
        .shared();
    let server = TestServer::with_device_list(vec![device], Config::default());
    let mut client = Client::connect(&server);
    let (one, other) = (client.alloc(0, 6 * MIB), client.alloc(0, 4 * MIB));
    let weight = random_bytes(1, 2 << 20);
    // The buffer, the start of the upload in MiB, and the starts of the prefaulted ranges of 1 MiB behind it.
    let cases = [
        (&one, 0, vec![2, 3, 4, 5]),
        // The rest of the buffer was prefaulted before.
        (&one, 2, vec![]),
        (&other, 0, vec![2, 3]),
        (&other, 2, vec![]),
    ];
    for (memory, at, starts) in cases {
        client.set_tensor(&memory.byte_tensor(), at * MIB, &weight);
        for step in starts {
            assert_eq!(prefaulted.recv_timeout(WATCHDOG), Ok(step * MIB..(step + 1) * MIB));
        }
        assert!(client.get_tensor(&memory.byte_tensor(), at * MIB, 2 * MIB) == weight);
    }
    // Small uploads are inputs of a graph, not weights: they start no prefaulting.
    client.set_tensor(&other.byte_tensor(), 0, &weight[..4096]);
    assert!(client.get_tensor(&one.byte_tensor(), 0, 2 * MIB) == weight);
    drop(server);
    assert_eq!(prefaulted.try_iter().collect::<Vec<_>>(), []);
}
