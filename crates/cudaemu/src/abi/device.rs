//! Initialisation, versions, error names; attributes, PCI addresses, peer access and memory pools of devices.

use std::ffi::{c_char, c_int, c_uint};

use super::extension::at_exit;
use super::ffi_guard::{Buffer, In, Out, Text, api, with_state};
use crate::config::Pci;
use crate::config::spec::{
    self, DEFAULT_SHARED_PER_BLOCK, MAX_BLOCK, MAX_GRID, MAX_THREADS_PER_BLOCK, REGISTERS_PER_SM, WARP_SIZE,
};
use crate::driver::{driver, init};
use crate::error::Error;
use crate::handle::PoolId;

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

    fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) {
        device.write_with(|| Ok(driver()?.device(ordinal)? as c_int))
    }

    fn cuDeviceGetName(name: Buffer, room: c_int, device: c_int) {
        let driver = driver()?;
        let device = driver.device(device)?;
        name.write(&driver.config.devices[device].name, usize::try_from(room).map_err(|_| Error::InvalidValue)?)
    }

    fn cuDeviceGetUuid(uuid: Out<[u8; 16]>, device: c_int) {
        device_uuid(uuid, device)
    }

    fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) {
        device_uuid(uuid, device)
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

    fn cuDeviceGetProperties(properties: Out<[c_int; 14]>, device: c_int) {
        properties.write_with(|| {
            let driver = driver()?;
            let clock = driver.config.devices[driver.device(device)?].spec.clock;
            let [bx, by, bz] = MAX_BLOCK;
            let [gx, gy, gz] = MAX_GRID;
            let max_pitch = i32::MAX as u32;
            // The fields of `CUdevprop` in their order; the last one is the texture alignment in bytes.
            let values = [MAX_THREADS_PER_BLOCK, bx, by, bz, gx, gy, gz, DEFAULT_SHARED_PER_BLOCK, spec::CONSTANT_BYTES, WARP_SIZE, max_pitch, REGISTERS_PER_SM, clock, 512];
            Ok(values.map(|value| value as c_int))
        })
    }

    fn cuDeviceComputeCapability(major: Out<c_int>, minor: Out<c_int>, device: c_int) {
        major.check_not_null()?;
        minor.check_not_null()?;
        let driver = driver()?;
        let capability = driver.config.devices[driver.device(device)?].spec.capability;
        major.set(capability.0 as c_int);
        minor.set(capability.1 as c_int);
        Ok(())
    }

    fn cuDeviceGetPCIBusId(text: Buffer, room: c_int, device: c_int) {
        let driver = driver()?;
        let device = driver.device(device)?;
        text.write(&driver.config.devices[device].pci.text(), usize::try_from(room).map_err(|_| Error::InvalidValue)?)
    }

    fn cuDeviceGetByPCIBusId(device: Out<c_int>, text: Text) {
        device.write_with(|| {
            let driver = driver()?;
            let pci = Pci::parse(&text.read()?).ok_or(Error::InvalidValue)?;
            let found = driver.config.devices.iter().position(|device| device.pci == pci);
            found.map(|device| device as c_int).ok_or(Error::InvalidDevice)
        })
    }

    fn cuDeviceCanAccessPeer(can: Out<c_int>, device: c_int, peer: c_int) {
        can.write_with(|| can_access(device, peer).map(c_int::from))
    }

    fn cuDeviceGetP2PAttribute(value: Out<c_int>, attribute: c_uint, from: c_int, to: c_int) {
        value.write_with(|| {
            let can = can_access(from, to)?;
            match attribute {
                // 1: performance rank. All links between devices have the same rank, 0.
                1 => Ok(0),
                // 2: access; 3: native atomics.
                2 | 3 => Ok(c_int::from(can)),
                // 4: access to CUDA arrays, 5: partial native atomics; both are unsupported.
                4 | 5 => Ok(0),
                _ => Err(Error::InvalidValue),
            }
        })
    }

    fn cuDeviceGetDefaultMemPool(pool: Out<PoolId>, device: c_int) {
        pool.write_with(|| with_state(|driver, state| Ok(state.devices[driver.device(device)?].default_pool)))
    }

    fn cuDeviceGetMemPool(pool: Out<PoolId>, device: c_int) {
        pool.write_with(|| with_state(|driver, state| Ok(state.devices[driver.device(device)?].pool)))
    }

    fn cuDeviceSetMemPool(device: c_int, pool: PoolId) {
        let driver = driver()?;
        driver.set_device_pool(driver.device(device)?, pool)
    }

    fn cuMemGetDefaultMemPool(pool: Out<PoolId>, location: In<[c_int; 2]>, kind: c_uint) {
        pool.write_with(|| {
            let device = pool_location(location, kind)?;
            with_state(|driver, state| Ok(state.devices[driver.device(device)?].default_pool))
        })
    }

    fn cuMemGetMemPool(pool: Out<PoolId>, location: In<[c_int; 2]>, kind: c_uint) {
        pool.write_with(|| {
            let device = pool_location(location, kind)?;
            with_state(|driver, state| Ok(state.devices[driver.device(device)?].pool))
        })
    }

    fn cuMemSetMemPool(location: In<[c_int; 2]>, kind: c_uint, pool: PoolId) {
        let driver = driver()?;
        driver.set_device_pool(driver.device(pool_location(location, kind)?)?, pool)
    }

    fn cuDeviceGetExecAffinitySupport(value: Out<c_int>, kind: c_uint, device: c_int) {
        value.write_with(|| {
            driver()?.device(device)?;
            // 0: affinity to a number of multiprocessors, the only kind; it is not supported.
            if kind == 0 { Ok(0) } else { Err(Error::InvalidValue) }
        })
    }
}

/// The device of a `CUmemLocation` {type, id}; fails unless the location and the allocation kind mean pinned device memory.
fn pool_location(location: In<[c_int; 2]>, kind: c_uint) -> Result<c_int, Error> {
    match (location.get()?, kind) {
        ([1, device], 1) => Ok(device),
        _ => Err(Error::NotSupported),
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

fn device_uuid(uuid: Out<[u8; 16]>, device: c_int) -> Result<(), Error> {
    uuid.write_with(|| {
        let driver = driver()?;
        Ok(driver.config.devices[driver.device(device)?].uuid())
    })
}

fn can_access(device: c_int, peer: c_int) -> Result<bool, Error> {
    let driver = driver()?;
    let (device, peer) = (driver.device(device)?, driver.device(peer)?);
    Ok(driver.config.devices[device].peers.contains(&peer))
}
