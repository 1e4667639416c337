//! Initialisation, versions, error names; attributes and peer access of devices.

use std::ffi::{c_char, c_int, c_uint, c_void};

use super::extension::at_exit;
use super::ffi_guard::{Buffer, Opaque, Out, api};
use crate::config::spec;
use crate::driver::{driver, init};
use crate::error::Error;

api! {
    fn cuInit(flags: c_uint) {
        init(flags)?;
        at_exit();
        Ok(())
    }

    fn cuDriverGetVersion(version: Out<c_int>) {
        // Works before cuInit; 12.9 is the version of the default settings.
        version.write_with(|| Ok(driver().map_or(12090, |driver| driver.config.driver_version) as c_int))
    }

    fn cuGetErrorName(error: c_uint, text: Out<*const c_char>) {
        error_text(error, text, |(name, _)| name)
    }

    fn cuGetErrorString(error: c_uint, text: Out<*const c_char>) {
        error_text(error, text, |(_, text)| text)
    }

    fn cuDeviceGetCount(count: Out<c_int>) {
        count.write_with(|| Ok(driver()?.config.devices.len() as c_int))
    }

    // Tables of private functions. There are none, but NVRTC calls this without a check that it exists.
    fn cuGetExportTable(_table: Out<*const c_void>, _id: Opaque) {
        Err(Error::NotSupported)
    }

    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        device.write_with(|| Ok(driver()?.device(ordinal)? as c_int))
    }

    fn cuDeviceGetName(name: Buffer, room: c_int, device: c_int) {
        let driver = driver()?;
        let device = driver.device(device)?;
        name.write(&driver.config.devices[device].name, usize::try_from(room).map_err(|_| Error::InvalidValue)?)
    }

    fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) {
        bytes.write_with(|| {
            let driver = driver()?;
            Ok(driver.config.devices[driver.device(device)?].memory as usize)
        })
    }

    fn cuDeviceGetAttribute(value: Out<c_int>, attribute: c_uint, device: c_int) {
        value.write_with(|| {
            let driver = driver()?;
            let spec = &driver.config.devices[driver.device(device)?];
            if attribute == spec::MEMORY_POOLS && !driver.config.hardware.pools {
                return Ok(0);
            }
            spec::device_attribute(spec, attribute)
        })
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        can.write_with(|| {
            let driver = driver()?;
            let (device, peer) = (driver.device(device)?, driver.device(peer)?);
            Ok(c_int::from(driver.config.devices[device].peers.contains(&peer)))
        })
    }
}

fn error_text(
    error: c_uint,
    text: Out<*const c_char>,
    pick: fn((&'static str, &'static str)) -> &'static str,
) -> Result<(), Error> {
    text.check_not_null()?;
    let texts = Error::texts(error);
    text.set(texts.map_or(std::ptr::null(), |texts| pick(texts).as_ptr().cast()));
    texts.map(drop).ok_or(Error::InvalidValue)
}
