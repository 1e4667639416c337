//! What a client owns of the server, whichever front end it uses: its memory budget, its buffers, its prepared graphs.

use std::sync::Arc;

use log::info;

use super::failure::SessionError;
use super::handle_table::{HandleTable, desc};
use super::program_cache::{Bound, ProgramCache};
use super::request_error::RequestError;
use crate::device::{Account, Device, MemoryInfo};
use crate::rpc::server::context::ServerContext;
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::TensorRecord;

/// A session's own things, whose front end names graphs by `K`. All of it is freed when this is dropped.
pub(in crate::rpc::server) struct SessionResources<'a, K> {
    pub(in crate::rpc::server) server: &'a ServerContext,
    /// For the log.
    pub(in crate::rpc::server) peer: PeerAddr,
    pub(in crate::rpc::server) budget: Arc<Account>,
    pub(in crate::rpc::server) handles: HandleTable,
    pub(in crate::rpc::server) programs: ProgramCache<K>,
}

impl<'a, K> SessionResources<'a, K> {
    /// Of a new session, with the bound of its prepared graphs.
    pub(in crate::rpc::server) fn new(
        server: &'a ServerContext,
        peer: PeerAddr,
        programs: Bound,
    ) -> SessionResources<'a, K> {
        let limit = server.config.max_memory.unwrap_or_else(|| {
            let totals = server.devices.iter().filter_map(|device| device.memory().ok());
            totals.fold(0, |sum: u64, memory| sum.saturating_add(memory.total))
        });
        let (budget, handles) = (Account::new(limit), HandleTable::new());
        SessionResources { server, peer, budget, handles, programs: ProgramCache::new(programs) }
    }

    /// A device by its position.
    pub(in crate::rpc::server) fn device(&self, device: u32) -> Result<&'a Arc<dyn Device>, RequestError> {
        let devices = &self.server.devices;
        devices.get(device as usize).ok_or(RequestError::Device { device, count: devices.len() })
    }

    /// Allocates a buffer and returns its handle. `None` when that is not possible, which the log says: the client did nothing
    /// wrong, and both protocols have a reply for it.
    pub(in crate::rpc::server) fn alloc(&mut self, device: u32, size: u64) -> Result<Option<u64>, RequestError> {
        let on = self.device(device)?;
        let max = self.server.config.max_buffers;
        let made = if self.handles.len() < max {
            on.alloc(size, &self.budget).map_err(|e| e.to_string())
        } else {
            Err(format!("the session has {max} buffers already"))
        };
        let made = made.and_then(|buffer| {
            let handle = self.handles.insert(device, on.info().alignment, buffer);
            handle.ok_or_else(|| "the session's addresses are used up".to_owned())
        });
        if let Err(why) = &made {
            info!("{}: no buffer of {size} bytes on {}: {why}", self.peer, on.info().name);
        }
        Ok(made.ok())
    }

    /// Frees a buffer, and the programs that are bound to it.
    pub(in crate::rpc::server) fn free(&mut self, handle: u64) -> Result<(), RequestError> {
        self.handles.remove(handle)?;
        self.programs.forget_buffer(handle);
        Ok(())
    }

    /// A device's memory, of which the session sees no more as free than its budget has left.
    pub(in crate::rpc::server) fn memory(&self, device: u32) -> Result<MemoryInfo, SessionError> {
        let memory = self.device(device)?.memory()?;
        let left = self.budget.limit().saturating_sub(self.budget.used());
        Ok(MemoryInfo { free: memory.free.min(left), ..memory })
    }

    /// Bytes that a device reserves for a tensor.
    pub(in crate::rpc::server) fn alloc_size(&self, device: u32, tensor: &TensorRecord) -> Result<u64, RequestError> {
        let device = self.device(device)?;
        Ok(device.alloc_size(&desc(tensor)?))
    }
}
