//! Resources of a session, for both front ends: memory budget, buffers, compiled graphs.

use std::sync::Arc;

use super::failure::SessionError;
use super::handle_table::{HandleTable, tensor_desc};
use super::program_cache::{CacheLimits, ProgramCache};
use super::request_error::RequestError;
use crate::device::{Device, DeviceError, MemoryBudget, MemoryInfo};
use crate::rpc::server::context::ServerContext;
use crate::rpc::server::host_memory::{HostCharge, SessionMemory};
use crate::rpc::server::log_limits::LogKind;
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::TensorRecord;
use crate::size::Bytes;

/// Host memory that a buffer is charged: its entries in tables of the session and of the device.
const BUFFER_BYTES: u64 = 512;

/// Resources of one session. `K` is the front end's key of a graph. Dropping this frees all of them.
pub(in crate::rpc::server) struct SessionResources<'a, K> {
    pub(in crate::rpc::server) server: &'a ServerContext,
    /// The devices that the client may use. It names a device by its position in this list.
    pub(in crate::rpc::server) devices: Vec<&'a Arc<dyn Device>>,
    /// Address of the client, for the log.
    pub(in crate::rpc::server) peer: PeerAddr,
    /// Lies within the budget of the client's tenant, if it has one.
    pub(in crate::rpc::server) budget: Arc<MemoryBudget>,
    pub(in crate::rpc::server) handles: HandleTable,
    pub(in crate::rpc::server) programs: ProgramCache<K>,
    /// Host memory of the session.
    pub(in crate::rpc::server) memory: Arc<SessionMemory>,
    /// Pays for the bookkeeping of the buffers.
    buffers: HostCharge,
}

impl<'a, K> SessionResources<'a, K> {
    /// Resources of a new session. `programs`: the limits of its program cache.
    pub(in crate::rpc::server) fn new(
        server: &'a ServerContext,
        peer: PeerAddr,
        memory: &Arc<SessionMemory>,
        programs: CacheLimits,
    ) -> SessionResources<'a, K> {
        let devices = server.devices_of(peer);
        let limit = server.config.max_memory.unwrap_or_else(|| {
            let totals = devices.iter().filter_map(|device| device.memory().ok());
            totals.fold(0, |sum: u64, memory| sum.saturating_add(memory.total))
        });
        let budget = match server.tenants.memory_budget(peer) {
            Some(tenant) => MemoryBudget::within(&tenant, limit),
            None => MemoryBudget::for_client(limit),
        };
        if let Some(max) = server.config.max_run {
            budget.limit_runs(max);
        }
        SessionResources {
            server,
            devices,
            peer,
            budget,
            handles: HandleTable::new(),
            programs: ProgramCache::new(programs, memory),
            memory: Arc::clone(memory),
            buffers: memory.empty(),
        }
    }

    /// The device at a position in the session's list.
    pub(in crate::rpc::server) fn device(&self, device: u32) -> Result<&'a Arc<dyn Device>, RequestError> {
        let found = self.devices.get(device as usize).copied();
        found.ok_or(RequestError::NoSuchDevice { device, count: self.devices.len() })
    }

    /// Allocates a buffer of `size` bytes and returns its handle. `None` if there is not enough memory, or the limit of buffers
    /// is reached; the reason is logged. This is no error: both protocols have a reply for it.
    pub(in crate::rpc::server) fn alloc(&mut self, device: u32, size: u64) -> Result<Option<u64>, RequestError> {
        let target = self.device(device)?;
        let max = self.server.config.max_buffers;
        let allocated = if self.handles.len() < max {
            match self.buffers.grow(BUFFER_BYTES) {
                Ok(()) => target.alloc(size, &self.budget).map_err(|e| self.refusal_text(&e)),
                Err(e) => Err(e.to_string()),
            }
        } else {
            Err(format!("the session has {max} buffers already, the limit (max_buffers)"))
        };
        let handle = allocated.and_then(|buffer| {
            let handle = self.handles.insert(device, target.info().alignment, buffer);
            handle.ok_or_else(|| "the session's virtual addresses are exhausted".to_owned())
        });
        if let Err(why) = &handle {
            self.buffers.shrink_to(self.handles.len() as u64 * BUFFER_BYTES);
            let (peer, device) = (self.peer, &target.info().name);
            let text = format_args!("{peer}: cannot allocate a buffer of {} on {device}: {why}", Bytes(size));
            self.server.logs.log(peer, LogKind::RefusedAllocation, text);
        }
        Ok(handle.ok())
    }

    /// The text of a failed allocation. Names the limit that has refused it: the first one, from the session outwards, that has
    /// less left than the device requested, which may be more than the client did.
    fn refusal_text(&self, error: &DeviceError) -> String {
        let limit = match error {
            &DeviceError::OutOfMemory { requested, .. }
                if self.budget.limit().saturating_sub(self.budget.used()) < requested =>
            {
                "; that is the limit of one client (max-memory in --limits)"
            }
            &DeviceError::OutOfMemory { requested, .. } if self.budget.available() < requested => {
                return format!("{error}; that is {}", self.server.tenants.name_of_memory_limit(self.peer));
            }
            DeviceError::OutOfMemory { .. } => "; that is the device's memory (--mem)",
            _ => "",
        };
        format!("{error}{limit}")
    }

    /// Frees a buffer and the cached programs that are bound to it.
    pub(in crate::rpc::server) fn free(&mut self, handle: u64) -> Result<(), RequestError> {
        self.handles.remove(handle)?;
        self.buffers.shrink_to(self.handles.len() as u64 * BUFFER_BYTES);
        self.programs.remove_programs_of_buffer(handle);
        Ok(())
    }

    /// Memory of a device. The free part is limited to what the session's budget, and that of its tenant, have left.
    pub(in crate::rpc::server) fn device_memory(&self, device: u32) -> Result<MemoryInfo, SessionError> {
        let memory = self.device(device)?.memory()?;
        Ok(MemoryInfo { free: memory.free.min(self.budget.available()), ..memory })
    }

    /// Bytes that a device needs for a tensor, with padding.
    pub(in crate::rpc::server) fn alloc_size(&self, device: u32, tensor: &TensorRecord) -> Result<u64, RequestError> {
        let device = self.device(device)?;
        Ok(device.alloc_size(&tensor_desc(tensor)?))
    }
}
