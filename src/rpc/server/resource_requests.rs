//! Resource requests: the requests of ggml's protocol about buffers and device memory. Both front ends serve them, because the
//! extension uses them unchanged.

use super::session::failure::{SessionError, decoder_bug};
use super::session::resources::SessionResources;
use crate::rpc::wire::{AllocBufferReply, DeviceMemoryReply, Request, Response, RpcCommand};

/// Whether `command` is a resource request, which [`serve`] serves.
pub(super) fn is_resource_request(command: RpcCommand) -> bool {
    matches!(
        command,
        RpcCommand::AllocBuffer
            | RpcCommand::BufferGetBase
            | RpcCommand::FreeBuffer
            | RpcCommand::GetDeviceMemory
            | RpcCommand::GetAllocSize
    )
}

/// Serves a resource request. Returns `None` if the command has no reply. `on_free` gets the handle of a buffer that the request
/// has freed, so that the front end drops what it keeps of the buffer.
///
/// # Errors
/// An invalid request, a failed device, or [`decoder_bug`] if `request` is no resource request.
pub(super) fn serve<K>(
    resources: &mut SessionResources<'_, K>,
    request: &Request<'_>,
    on_free: impl FnOnce(u64),
) -> Result<Option<Response<'static>>, SessionError> {
    Ok(match request {
        Request::AllocBuffer(request) => {
            let reply = match resources.alloc(request.device, request.size)? {
                Some(remote_ptr) => AllocBufferReply { remote_ptr, remote_size: request.size },
                None => AllocBufferReply { remote_ptr: 0, remote_size: 0 },
            };
            Some(Response::AllocBuffer(reply))
        }
        Request::BufferGetBase(request) => {
            Some(Response::BufferGetBase(resources.handles.get(request.remote_ptr)?.base))
        }
        Request::FreeBuffer(request) => {
            resources.free(request.remote_ptr)?;
            on_free(request.remote_ptr);
            None
        }
        Request::GetDeviceMemory(request) => {
            let memory = resources.device_memory(request.device)?;
            Some(Response::GetDeviceMemory(DeviceMemoryReply { free: memory.free, total: memory.total }))
        }
        Request::GetAllocSize(request) => {
            Some(Response::GetAllocSize(resources.alloc_size(request.device, &request.tensor)?))
        }
        _ => return Err(decoder_bug()),
    })
}
