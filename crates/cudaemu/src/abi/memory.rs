//! Memory: device, managed and pinned memory; stream-ordered allocation and memory pools.

use std::ffi::{c_int, c_uint};

use super::ffi_guard::{In, Out, api, with_state};
use crate::driver::driver;
use crate::driver::memory::{AllocationOrigin, HOST_FLAGS, MemoryKind, is_host_memory};
use crate::driver::pool::PoolValue;
use crate::engine::StreamOp;
use crate::error::Error;
use crate::handle::{PoolId, StreamId};

/// `CUmemPoolProps`
#[repr(C)]
#[derive(Clone, Copy)]
struct PoolProperties {
    kind: c_uint,
    handles: c_uint,
    location: [c_int; 2],
    security: u64,
    most: usize,
    reserved: [u8; 56],
}

/// `CUmemAccessDesc`
#[repr(C)]
#[derive(Clone, Copy)]
struct AccessDesc {
    location: [c_int; 2],
    flags: c_uint,
}

api! {
    fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) {
        with_state(|driver, state| {
            let (_, device) = state.current_device()?;
            let (limit, used) = (driver.space().limit(device as u32), driver.space().used(device as u32));
            free.set(limit.saturating_sub(used) as usize);
            total.set(limit as usize);
            Ok(())
        })
    }

    fn cuMemAlloc_v2(address: Out<u64>, bytes: usize) {
        address.write_with(|| driver()?.allocate(bytes as u64, MemoryKind::Device, "cuMemAlloc"))
    }

    fn cuMemAllocManaged(address: Out<u64>, bytes: usize, flags: c_uint) {
        address.write_with(|| match flags {
            1 | 2 => driver()?.allocate(bytes as u64, MemoryKind::Managed, "cuMemAllocManaged"),
            _ => Err(Error::InvalidValue),
        })
    }

    fn cuMemFree_v2(address: u64) {
        if address == 0 {
            return driver().map(drop);
        }
        driver()?.free(address, |how| matches!(how, AllocationOrigin::Plain | AllocationOrigin::Pool(_)))
    }

    fn cuMemHostAlloc(pointer: Out<u64>, bytes: usize, flags: c_uint) {
        pointer.write_with(|| match flags & !HOST_FLAGS {
            0 => driver()?.allocate(bytes as u64, MemoryKind::Host, "cuMemHostAlloc"),
            _ => Err(Error::InvalidValue),
        })
    }

    fn cuMemFreeHost(pointer: u64) {
        if pointer == 0 {
            return driver().map(drop);
        }
        driver()?.free(pointer, |how| how == AllocationOrigin::Host)
    }

    fn cuMemHostGetDevicePointer_v2(address: Out<u64>, pointer: u64, flags: c_uint) {
        address.write_with(|| {
            let driver = driver()?;
            let known = driver.find(pointer)?;
            if flags != 0 || !is_host_memory(&known) { Err(Error::InvalidValue) } else { Ok(pointer) }
        })
    }

    fn cuStreamAttachMemAsync(stream: StreamId, address: u64, _bytes: usize, flags: c_uint) {
        let driver = driver()?;
        let mut state = driver.lock();
        let stream = state.resolve_stream(stream)?;
        driver.find(address)?;
        if ![1, 2, 4].contains(&flags) {
            return Err(Error::InvalidValue);
        }
        driver.submit(state, stream, StreamOp::Wait)
    }

    fn cuMemAllocAsync(address: Out<u64>, bytes: usize, stream: StreamId) {
        address.write_with(|| driver()?.allocate_async(bytes as u64, None, stream))
    }

    fn cuMemAllocFromPoolAsync(address: Out<u64>, bytes: usize, pool: PoolId, stream: StreamId) {
        address.write_with(|| driver()?.allocate_async(bytes as u64, Some(pool), stream))
    }

    fn cuMemFreeAsync(address: u64, stream: StreamId) {
        driver()?.free_async(address, stream)
    }

    fn cuMemPoolCreate(pool: Out<PoolId>, properties: In<PoolProperties>) {
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
            let [kind, device] = access.location;
            if kind != 1 {
                return Err(Error::InvalidValue);
            }
            driver.set_pool_access(pool, device, access.flags)?;
        }
        Ok(())
    }
}
