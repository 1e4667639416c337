//! Memory pools and stream-ordered allocation (`cuMemAllocAsync`).

use std::ffi::{c_int, c_uint};

use super::ffi_guard::{In, Out, api};
use super::physical::AccessDesc;
use crate::driver::driver;
use crate::driver::pool::PoolValue;
use crate::error::{Error, Result};
use crate::handle::{PoolId, StreamId};

/// `CUmemPoolProps`
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_uint,
    handles: c_uint,
    location: [c_int; 2],
    security: u64,
    most: usize,
    reserved: [u8; 56],
}

api! {
    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: StreamId) {
        address.write_with(|| driver()?.allocate_async(bytes as u64, None, stream))
    }

    fn cuMemAllocFromPoolAsync(address: Out<u64>, bytes: usize, pool: PoolId, stream: StreamId) {
        address.write_with(|| driver()?.allocate_async(bytes as u64, Some(pool), stream))
    }

    fn cuMemFreeAsync(address: u64, stream: StreamId) {
        driver()?.free_async(address, stream)
    }

    fn cuMemPoolCreate(pool: Out<PoolId>, properties: In<Properties>) {
        pool.write_with(|| {
            let properties = properties.get()?;
            match (properties.kind, properties.handles, properties.location) {
                (1, 0, [1, device]) => driver()?.create_pool(device, properties.most as u64),
                (1, _, [1..=4, _]) => Err(Error::NotSupported),
                _ => Err(Error::InvalidValue),
            }
        })
    }

    fn cuMemPoolDestroy(pool: PoolId) {
        driver()?.destroy_pool(pool)
    }

    fn cuMemPoolTrimTo(pool: PoolId, _keep: usize) {
        driver()?.trim_pool(pool)
    }

    fn cuMemPoolGetAttribute(pool: PoolId, attribute: c_uint, value: Out<u32>) {
        value.check_not_null()?;
        match driver()?.pool_attribute(pool, attribute)? {
            PoolValue::Int(found) => value.set(found),
            PoolValue::Long(found) => {
                value.set_at(0, found as u32);
                value.set_at(1, (found >> 32) as u32);
            }
        }
        Ok(())
    }

    fn cuMemPoolSetAttribute(pool: PoolId, attribute: c_uint, value: In<u32>) {
        let low = u64::from(value.get()?);
        let value = if attribute <= 3 { low } else { low | u64::from(value.at(1)?) << 32 };
        driver()?.set_pool_attribute(pool, attribute, value)
    }

    fn cuMemPoolSetAccess(pool: PoolId, access: In<AccessDesc>, count: usize) {
        let driver = driver()?;
        for access in access.read_array(count)? {
            driver.set_pool_access(pool, device(access.location)?, access.flags)?;
        }
        Ok(())
    }

    fn cuMemPoolGetAccess(flags: Out<c_uint>, pool: PoolId, location: In<[c_int; 2]>) {
        flags.write_with(|| driver()?.pool_access(pool, device(location.get()?)?))
    }
}

fn device(location: [c_int; 2]) -> Result<c_int> {
    match location {
        [1, device] => Ok(device),
        _ => Err(Error::InvalidValue),
    }
}
