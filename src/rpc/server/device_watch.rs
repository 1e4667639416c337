//! Device watch: a thread of the server that polls whether a device is lost ([`Device::lost`]), that is, unusable until this
//! process is started again.
//!
//! Sessions that use such a device get the error from their queues. The server as a whole has to end, so that a new process can
//! open the device again, but a session may notice the loss late, or not at all while a kernel hangs. So a thread of its own
//! polls the devices, and begins the drain. The devices of other servers are not polled: a lost connection fails only the sessions
//! that use them.

use crate::poison::{Unpoisoned, lock};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use crate::device::{Device, DeviceError, MemoryBudget};

/// Time between two polls of the devices.
const INTERVAL: Duration = Duration::from_secs(1);

/// Whether a device of the server is lost, shared by the watch's thread, the server and its handles.
#[derive(Default)]
pub(super) struct DeviceWatch {
    state: Mutex<WatchState>,
    /// A device is lost, or the watch has ended.
    changed: Condvar,
}

#[derive(Default)]
struct WatchState {
    lost: Option<DeviceError>,
    /// The identity of the client whose kernel is the cause, if it is known.
    lost_by: Option<String>,
    ended: bool,
}

impl DeviceWatch {
    /// The watch's thread: polls the devices. Returns the error of the first device that is lost, or `None` after
    /// [`DeviceWatch::end`]. `identify` names the client whose session has a budget.
    pub(super) fn run(
        &self,
        devices: &[Arc<dyn Device>],
        identify: impl Fn(&MemoryBudget) -> Option<String>,
    ) -> Option<DeviceError> {
        let mut state = lock(&self.state);
        while !state.ended {
            let mut own = devices.iter().filter(|device| device.endpoint().is_none());
            let lost = own.find_map(|device| device.lost().map(|error| (device, error)));
            if let Some((device, error)) = lost {
                state.lost = Some(error.clone());
                state.lost_by = device.lost_by().and_then(|session| identify(&session));
                self.changed.notify_all();
                return Some(error);
            }
            state = self.changed.wait_timeout(state, INTERVAL).unpoisoned().0;
        }
        None
    }

    /// Ends the thread and all waits for a device that is lost.
    pub(super) fn end(&self) {
        lock(&self.state).ended = true;
        self.changed.notify_all();
    }

    /// The error of the device that the watch has found to be lost.
    pub(super) fn lost(&self) -> Option<DeviceError> {
        lock(&self.state).lost.clone()
    }

    /// The identity of the client whose kernel is the cause of that, if it is known.
    pub(super) fn lost_by(&self) -> Option<String> {
        lock(&self.state).lost_by.clone()
    }

    /// Blocks until a device is lost, and returns its error; `None` after [`DeviceWatch::end`].
    pub(super) fn wait(&self) -> Option<DeviceError> {
        let waits = |state: &mut WatchState| state.lost.is_none() && !state.ended;
        self.changed.wait_while(lock(&self.state), waits).unpoisoned().lost.clone()
    }
}
