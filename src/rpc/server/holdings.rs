//! What a client has of the server, in whichever way the two talk: its account and its buffers.

use std::sync::Arc;

use log::info;

use super::handles::{Handles, desc};
use super::{Refusal, Shared};
use crate::device::{Account, Device, Region};
use crate::rpc::transport::PeerAddr;
use crate::rpc::wire::ext::Span;
use crate::rpc::wire::{AllocBuffer, AllocBufferReply, DeviceMemoryReply, GetAllocSize, Response};

/// A session's own things. All of it is given back when this is dropped.
pub(super) struct Holdings<'a> {
    pub(super) shared: &'a Shared,
    /// For the log.
    pub(super) peer: PeerAddr,
    pub(super) account: Arc<Account>,
    pub(super) handles: Handles,
}

impl<'a> Holdings<'a> {
    pub(super) fn new(shared: &'a Shared, peer: PeerAddr) -> Holdings<'a> {
        let limit = shared.config.max_memory.unwrap_or_else(|| {
            let totals = shared.devices.iter().filter_map(|device| device.memory().ok());
            totals.fold(0, |sum: u64, memory| sum.saturating_add(memory.total))
        });
        Holdings { shared, peer, account: Account::new(limit), handles: Handles::new() }
    }

    pub(super) fn device(&self, device: u32) -> Result<&'a Arc<dyn Device>, Refusal> {
        let devices = &self.shared.devices;
        devices.get(device as usize).ok_or(Refusal::Device { device, count: devices.len() })
    }

    pub(super) fn alloc_buffer(&mut self, request: &AllocBuffer) -> Result<Response<'static>, Refusal> {
        let device = self.device(request.device)?;
        let max = self.shared.config.max_buffers;
        let made = if self.handles.len() < max {
            device.alloc(request.size, &self.account).map_err(|e| e.to_string())
        } else {
            Err(format!("the session has {max} buffers already"))
        };
        let made = made.and_then(|buffer| {
            let handle = self.handles.insert(request.device, device.info().alignment, buffer);
            handle.ok_or_else(|| "the session's addresses are used up".to_owned())
        });
        let reply = match made {
            Ok(remote_ptr) => AllocBufferReply { remote_ptr, remote_size: request.size },
            // No fault of the client's: the protocol has an answer for it.
            Err(why) => {
                let (peer, size, name) = (self.peer, request.size, &device.info().name);
                info!("{peer}: no buffer of {size} bytes on {name}: {why}");
                AllocBufferReply { remote_ptr: 0, remote_size: 0 }
            }
        };
        Ok(Response::AllocBuffer(reply))
    }

    pub(super) fn buffer_base(&self, handle: u64) -> Result<Response<'static>, Refusal> {
        Ok(Response::BufferGetBase(self.handles.get(handle)?.base))
    }

    pub(super) fn device_memory(&self, device: u32) -> Result<Response<'static>, Refusal> {
        let memory = self.device(device)?.memory()?;
        let left = self.account.limit().saturating_sub(self.account.used());
        let reply = DeviceMemoryReply { free: memory.free.min(left), total: memory.total };
        Ok(Response::GetDeviceMemory(reply))
    }

    pub(super) fn alloc_size(&self, request: &GetAllocSize<'_>) -> Result<Response<'static>, Refusal> {
        let device = self.device(request.device)?;
        Ok(Response::GetAllocSize(device.alloc_size(&desc(&request.tensor)?)))
    }

    /// A part of a buffer, with the position of the device that it lies on.
    pub(super) fn span(&self, span: &Span) -> Result<(u32, Region), Refusal> {
        let entry = self.handles.get(span.buffer)?;
        let region = entry.buffer.region(span.offset, span.len);
        let outside = |_| Refusal::Span { offset: span.offset, len: span.len, size: entry.buffer.bytes() };
        Ok((entry.device, region.map_err(outside)?))
    }
}
