//! The end of a process whose device is lost: by `_exit`, with an exit code of its own.
//!
//! The process does not end by returning from `main`: destructors and the exit handlers of a driver release the device's
//! resources, and may wait for a kernel that never ends.

use std::io;
use std::sync::{Arc, Once};
use std::time::Duration;

use fanout::device::DeviceError;
use fanout::rpc::server::{LOST_DEVICE_DRAIN, ServerHandle};
use log::error;

use super::log_writer;

/// Exit code of a process that ends because a device is lost: EX_TEMPFAIL of sysexits.h. A new process may succeed.
pub(crate) const EXIT_CODE: u8 = 75;

/// How long after [`LOST_DEVICE_DRAIN`] the process ends even if the server has not: it may be blocked on the device.
const MARGIN: Duration = Duration::from_secs(2);

/// Reports the client whose kernel is the cause of a loss, once, and ends the process.
pub(crate) struct LostDeviceExit {
    handle: ServerHandle,
    /// Called with the client, if it is known.
    report: Box<dyn Fn(&str) + Send + Sync>,
    reported: Once,
}

impl LostDeviceExit {
    /// For the server of `handle`.
    pub(crate) fn new(handle: ServerHandle, report: Box<dyn Fn(&str) + Send + Sync>) -> Arc<LostDeviceExit> {
        Arc::new(LostDeviceExit { handle, report, reported: Once::new() })
    }

    /// Starts the thread that ends this process when a device is lost and the server does not end in time by itself.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn watch(self: &Arc<LostDeviceExit>) -> io::Result<()> {
        let exit = Arc::clone(self);
        let watch = move || {
            if let Some(error) = exit.handle.wait_for_lost_device() {
                exit.report();
                std::thread::sleep(LOST_DEVICE_DRAIN + MARGIN);
                exit.exit(&error);
            }
        };
        std::thread::Builder::new().name("device-lost".to_owned()).spawn(watch).map(drop)
    }

    /// Returns when the report has been sent, by this thread or another one.
    fn report(&self) {
        self.reported.call_once(|| self.handle.faulting_client().iter().for_each(|client| (self.report)(client)));
    }

    /// Ends this process at once, because of the device whose error this is.
    pub(crate) fn exit(&self, error: &DeviceError) -> ! {
        self.report();
        error!("server ended, exit code {EXIT_CODE}: {error}");
        log_writer::flush();
        // `_exit`: no destructors and no exit handlers.
        signal_hook::low_level::exit(EXIT_CODE.into())
    }
}
