//! The end of a process whose device is lost: by `_exit`, with an exit code of its own.
//!
//! The process does not end by returning from `main`: destructors and the exit handlers of a driver release the device's
//! resources, and may wait for a kernel that never ends.

use std::io;
use std::time::Duration;

use fanout::device::DeviceError;
use fanout::rpc::server::{LOST_DEVICE_DRAIN, ServerHandle};
use log::error;

use super::log_writer;

/// Exit code of a process that ends because a device is lost: EX_TEMPFAIL of sysexits.h. A new process may succeed.
pub(crate) const EXIT_CODE: u8 = 75;

/// How long after [`LOST_DEVICE_DRAIN`] the process ends even if the server has not: it may be blocked on the device.
const MARGIN: Duration = Duration::from_secs(2);

/// Starts the thread that ends this process when a device is lost and the server does not end in time by itself.
///
/// # Errors
/// The thread cannot be started.
pub(crate) fn exit_after_drain(handle: ServerHandle) -> io::Result<()> {
    let watch = move || {
        if let Some(error) = handle.wait_for_lost_device() {
            std::thread::sleep(LOST_DEVICE_DRAIN + MARGIN);
            exit(&error);
        }
    };
    std::thread::Builder::new().name("device-lost".to_owned()).spawn(watch).map(drop)
}

/// Ends this process at once, because of the device whose error this is.
pub(crate) fn exit(error: &DeviceError) -> ! {
    error!("server ended, exit code {EXIT_CODE}: {error}");
    log_writer::flush();
    // `_exit`: no destructors and no exit handlers.
    signal_hook::low_level::exit(EXIT_CODE.into())
}
