//! Memory pools and stream-ordered allocation.

use std::collections::BTreeSet;

use super::Driver;
use super::memory::{AllocationOrigin, memory_error};
use crate::error::{Error, Result};
use crate::handle::{PoolId, StreamId};

/// A memory pool.
#[derive(Debug)]
pub struct Pool {
    /// Device that holds its memory.
    pub device: u32,
    /// A default pool, which cannot be destroyed.
    pub fixed: bool,
    /// The program destroyed it; it is removed when its last allocation is freed.
    pub destroyed: bool,
    /// Values of attributes 1 to 4.
    settings: [u64; 4],
    /// High-water mark of bytes in use since its last reset.
    high: u64,
    /// Maximum bytes that it may hold; 0 for no limit of its own.
    most: u64,
    /// Other devices that may access its memory.
    pub accessible: BTreeSet<u32>,
}

impl Pool {
    /// An empty pool.
    pub fn new(device: u32, fixed: bool) -> Self {
        Self { device, fixed, destroyed: false, settings: [1, 1, 1, 0], high: 0, most: 0, accessible: BTreeSet::new() }
    }
}

/// Value of a pool attribute, 4 or 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PoolValue {
    /// `int`
    Int(u32),
    /// `cuuint64_t`
    Long(u64),
}

impl Driver {
    /// `cuMemPoolCreate`
    pub fn create_pool(&self, device: i32, most: u64) -> Result<PoolId> {
        let device = self.device(device)? as u32;
        if !self.config.hardware.pools {
            return Err(Error::NotSupported);
        }
        let mut pool = Pool::new(device, false);
        pool.most = most;
        Ok(self.lock().pools.insert(pool))
    }

    /// `cuMemPoolDestroy`: memory in use stays valid until it is freed.
    pub fn destroy_pool(&self, id: PoolId) -> Result<()> {
        let mut state = self.lock();
        let pool = live(state.pools.get_mut(id)?)?;
        if pool.fixed {
            return Err(Error::InvalidValue);
        }
        pool.destroyed = true;
        if state.memory.pool_bytes(id) == 0 {
            state.pools.remove(id)?;
        }
        Ok(())
    }

    /// `cuMemPoolGetAttribute`
    pub fn pool_attribute(&self, id: PoolId, attribute: u32) -> Result<PoolValue> {
        let mut state = self.lock();
        let used = state.memory.pool_bytes(id);
        let pool = live(state.pools.get_mut(id)?)?;
        pool.high = pool.high.max(used);
        Ok(match attribute {
            1..=3 => PoolValue::Int(pool.settings[attribute as usize - 1] as u32),
            4 => PoolValue::Long(pool.settings[3]),
            // A pool keeps no freed memory, so reserved memory equals memory in use.
            5 | 7 => PoolValue::Long(used),
            6 | 8 => PoolValue::Long(pool.high),
            _ => return Err(Error::InvalidValue),
        })
    }

    /// `cuMemPoolSetAttribute`: high-water marks can only be reset to 0.
    pub fn set_pool_attribute(&self, id: PoolId, attribute: u32, value: u64) -> Result<()> {
        let mut state = self.lock();
        let used = state.memory.pool_bytes(id);
        let pool = live(state.pools.get_mut(id)?)?;
        match attribute {
            1..=4 => pool.settings[attribute as usize - 1] = value,
            6 | 8 if value == 0 => pool.high = used,
            _ => return Err(Error::InvalidValue),
        }
        Ok(())
    }

    /// `cuMemAllocAsync` (without a pool: the default pool of the stream's device) and `cuMemAllocFromPoolAsync`.
    pub fn allocate_async(&self, bytes: u64, pool: Option<PoolId>, stream: StreamId) -> Result<u64> {
        let mut state = self.lock();
        let stream = state.resolve_stream(stream)?;
        let context = state.streams.get(stream)?.context;
        let device = state.contexts.get(context)?.device;
        if bytes == 0 {
            return Err(Error::InvalidValue);
        }
        let id = pool.unwrap_or(state.devices[device].pool);
        let pool = live(state.pools.get_mut(id)?)?;
        let (device, most) = (pool.device, pool.most);
        if most != 0 && state.memory.pool_bytes(id) + bytes > most {
            return Err(Error::OutOfMemory);
        }
        let make = || self.space().alloc(device, bytes, "cuMemAllocAsync");
        let (mut state, made) = self.alloc_with_retry(state, make);
        let allocation = made.map_err(|error| memory_error(&error))?;
        state.memory.add(&allocation, context, AllocationOrigin::Pool(id));
        let used = state.memory.pool_bytes(id);
        if let Ok(pool) = state.pools.get_mut(id) {
            pool.high = pool.high.max(used);
        }
        Ok(allocation.base())
    }

    /// `cuMemPoolSetAccess` for one device.
    pub fn set_pool_access(&self, id: PoolId, device: i32, access: u32) -> Result<()> {
        let device = self.device(device)?;
        let mut state = self.lock();
        let pool = live(state.pools.get_mut(id)?)?;
        if pool.device == device as u32 {
            return if access == 3 { Ok(()) } else { Err(Error::InvalidValue) };
        }
        if !self.config.devices[device].peers.contains(&(pool.device as usize)) {
            return Err(Error::InvalidDevice);
        }
        match access {
            0 => pool.accessible.remove(&(device as u32)),
            1 | 3 => pool.accessible.insert(device as u32),
            _ => return Err(Error::InvalidValue),
        };
        Ok(())
    }

    /// `cuMemPoolTrimTo`: only checks the handle, because a pool keeps no freed memory.
    pub fn trim_pool(&self, id: PoolId) -> Result<()> {
        live(self.lock().pools.get_mut(id)?).map(drop)
    }
}

fn live(pool: &mut Pool) -> Result<&mut Pool> {
    if pool.destroyed { Err(Error::InvalidValue) } else { Ok(pool) }
}
