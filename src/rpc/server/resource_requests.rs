//! Requests of ggml's about buffers and a device's memory, which both front ends serve: the extension keeps them as they are.

use super::session::failure::{SessionError, decoder_bug};
use super::session::resources::SessionResources;
use crate::rpc::wire::{AllocBufferReply, Command, DeviceMemoryReply, Request, Response};

/// Whether [`serve`] serves this command.
pub(super) fn includes(command: Command) -> bool {
    matches!(
        command,
        Command::AllocBuffer
            | Command::BufferGetBase
            | Command::FreeBuffer
            | Command::GetDeviceMemory
            | Command::GetAllocSize
    )
}

/// Serves a request. `None`: it has no reply.
pub(super) fn serve<K>(
    resources: &mut SessionResources<'_, K>,
    request: &Request<'_>,
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
            None
        }
        Request::GetDeviceMemory(request) => {
            let memory = resources.memory(request.device)?;
            Some(Response::GetDeviceMemory(DeviceMemoryReply { free: memory.free, total: memory.total }))
        }
        Request::GetAllocSize(request) => {
            Some(Response::GetAllocSize(resources.alloc_size(request.device, &request.tensor)?))
        }
        _ => return Err(decoder_bug()),
    })
}
