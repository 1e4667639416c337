//! The servers of a history.

use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::operations::{DEVICES, SERVERS};
use crate::cpu::{CpuDevice, MathMode};
use crate::device::Device;
use crate::rpc::server::{Config, Ended, Server, ServerHandle};
use crate::rpc::transport::memory::{LinkConditions, listen_at, reserve_number};

/// Memory of each device, in bytes.
pub(super) const DEVICE_BYTES: u64 = 8 << 20;

/// Longest time in which a server must have returned the memory of its sessions: far more than it takes.
const MAX_RETURN: Duration = Duration::from_secs(10);

/// Timeouts of impatient histories: a stall without an end costs as much time.
pub(super) const SHORT_TIMEOUT: Duration = Duration::from_millis(100);

/// Counts what sessions hold of a server.
type Resources = Box<dyn Fn() -> [(&'static str, u64); 6] + Send>;

/// A running server.
pub(super) struct TestServer {
    handle: ServerHandle,
    devices: Vec<Arc<CpuDevice>>,
    resources: Resources,
    thread: JoinHandle<Ended>,
}

/// Numbers of the listeners of a history's servers, at which each of them may be replaced.
pub(super) fn reserve_numbers() -> [u64; SERVERS] {
    [(); SERVERS].map(|()| reserve_number())
}

impl TestServer {
    /// Starts a server at the number `numbers[at]`. It may send to all of `numbers`.
    pub(super) fn start(numbers: [u64; SERVERS], at: usize, seed: u64, is_impatient: bool) -> TestServer {
        let listener = listen_at(numbers[at], LinkConditions { seed, cut_after: None }, None);
        let device = |n| CpuDevice::new(&format!("CPU{n}"), 1, MathMode::Fast, DEVICE_BYTES).unwrap();
        let devices: Vec<_> = (0..DEVICES).map(device).collect();
        let peers = numbers.map(|number| format!("memory:{number}").parse().unwrap());
        let mut config = Config::default().with_peers(peers.to_vec()).with_http(false);
        if is_impatient {
            config = config.with_stall_timeout(SHORT_TIMEOUT).with_handshake_timeout(2 * SHORT_TIMEOUT);
        }
        let shared = devices.iter().map(|device| Arc::clone(device) as Arc<dyn Device>);
        let server = Server::bind_with(Box::new(listener), shared.collect(), config).unwrap();
        let (handle, resources) = (server.handle(), Box::new(server.resources_in_use()));
        TestServer { handle, devices, resources, thread: std::thread::spawn(move || server.run()) }
    }

    /// What sessions still hold, as a text; `None`: nothing.
    fn held(&self) -> Option<String> {
        let used = |device: &Arc<CpuDevice>| device.used_memory();
        let memory = self.devices.iter().map(used).sum::<u64>();
        let held = (self.resources)().into_iter().chain([("bytes of device memory", memory)]);
        let held: Vec<_> = held.filter(|(_, n)| *n > 0).map(|(what, n)| format!("{n} {what}")).collect();
        (!held.is_empty()).then(|| held.join(", "))
    }

    /// Waits until the server has returned all that sessions held.
    fn check_is_empty(&self, when: &str) -> Result<(), String> {
        let until = Instant::now() + MAX_RETURN;
        while let Some(held) = self.held() {
            if Instant::now() > until {
                return Err(format!("{when}, the server still holds {held}"));
            }
            std::thread::sleep(Duration::from_micros(100));
        }
        Ok(())
    }

    /// Shuts the server down. `all_left`: its clients have gone before.
    pub(super) fn end(self, all_left: bool) -> Result<(), String> {
        if all_left {
            self.check_is_empty("without clients")?;
        }
        self.handle.shutdown();
        while !self.thread.is_finished() {
            std::thread::sleep(Duration::from_micros(50));
        }
        self.check_is_empty("after its end")?;
        match self.thread.join() {
            Ok(Ended::Shutdown) => Ok(()),
            other => Err(format!("a server ended with {other:?}")),
        }
    }
}
