//! ggml devices: the CPU, the devices of RPC servers, and ggml's own RPC server.

use std::ffi::{CStr, CString};
use std::net::ToSocketAddrs;
use std::ptr::{self, NonNull};

use llama_cpp_sys_4 as sys;

use crate::Error;

/// A device in ggml's registry. The registry keeps devices until the process ends.
#[derive(Debug, Clone, Copy)]
pub struct Device(NonNull<sys::ggml_backend_device>);

impl Device {
    /// The handle that llama.cpp's functions take.
    pub(crate) fn raw(self) -> sys::ggml_backend_dev_t {
        self.0.as_ptr()
    }

    /// The name, for example `CPU` or `RPC0`.
    pub fn name(self) -> String {
        // SAFETY: the device is in the registry, and its name is a NUL-terminated text that is never freed.
        let name = unsafe { CStr::from_ptr(sys::ggml_backend_dev_name(self.raw())) };
        name.to_string_lossy().into_owned()
    }
}

/// The CPU of this process.
pub fn cpu_device() -> Result<Device, Error> {
    // SAFETY: it only searches the registry.
    let device = unsafe { sys::ggml_backend_dev_by_type(sys::GGML_BACKEND_DEVICE_TYPE_CPU) };
    NonNull::new(device).map(Device).ok_or_else(|| Error::new("ggml has no CPU device"))
}

/// All devices of the server at `endpoint` (`HOST:PORT`, on this machine). ggml aborts the process if the server has another
/// version.
pub fn rpc_devices(endpoint: &str) -> Result<Vec<Device>, Error> {
    check_loopback(endpoint)?;
    let text = c_string(endpoint)?;
    // SAFETY: `text` is NUL-terminated, and ggml copies it.
    let registry = unsafe { sys::ggml_backend_rpc_add_server(text.as_ptr()) };
    if registry.is_null() {
        return Err(Error::new(format!("{endpoint}: no RPC server, or it has no devices")));
    }
    // SAFETY: the registry is not null and lives until the process ends.
    unsafe { sys::ggml_backend_register(registry) };
    // SAFETY: as above.
    let count = unsafe { sys::ggml_backend_reg_dev_count(registry) };
    let device = |index| {
        // SAFETY: as above, and `index` is below the registry's number of devices.
        let device = unsafe { sys::ggml_backend_reg_dev_get(registry, index) };
        NonNull::new(device).map(Device).ok_or_else(|| Error::new(format!("{endpoint}: no device {index}")))
    };
    (0..count).map(device).collect()
}

/// Runs ggml's RPC server with the CPU as its only device. It serves one client at a time and returns only if it cannot listen.
pub fn run_rpc_server(endpoint: &str, threads: usize) -> Result<(), Error> {
    check_loopback(endpoint)?;
    let text = c_string(endpoint)?;
    let mut devices = [cpu_device()?.raw()];
    // SAFETY: the text and the array outlive the call, and the array has the given number of devices.
    unsafe {
        sys::ggml_backend_rpc_start_server(text.as_ptr(), ptr::null(), threads, devices.len(), devices.as_mut_ptr())
    };
    Err(Error::new(format!("{endpoint}: the RPC server ended")))
}

/// Refuses endpoints on other machines: the protocol has no authentication, and a test needs none.
fn check_loopback(endpoint: &str) -> Result<(), Error> {
    let addresses = endpoint.to_socket_addrs().map_err(|e| Error::new(format!("{endpoint}: {e}")))?;
    for address in addresses {
        if !address.ip().is_loopback() {
            return Err(Error::new(format!("{endpoint}: {address} is not on the loopback interface")));
        }
    }
    Ok(())
}

/// A text for C.
pub(crate) fn c_string(text: &str) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::new(format!("{text:?} contains a NUL")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_addresses_are_accepted() {
        for (endpoint, accepted) in [
            ("127.0.0.1:50052", true),
            ("[::1]:1", true),
            ("192.0.2.1:50052", false),
            ("0.0.0.0:1", false),
            ("127.0.0.1", false),
        ] {
            assert_eq!(check_loopback(endpoint).is_ok(), accepted, "{endpoint}");
        }
    }
}
