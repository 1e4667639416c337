//! Responses of protocol 7.0. Commands without a variant of [`Response`] have no response.

use super::{
    codec::{Field, Reader, WireError},
    command::RpcCommand,
    frame::ResponseHeader,
    version::{ConnCaps, Version},
};

/// Response to HELLO.
#[derive(Clone, Debug, PartialEq)]
pub struct HelloReply {
    /// Version of the server.
    pub version: Version,
    /// Transport capabilities of the server. `None`: the short form of versions before 4.0, the only form that older clients
    /// accept.
    pub conn_caps: Option<ConnCaps>,
    /// Padding byte of 7.0, in which fanout servers offer the extensions ([`super::ext::ExtensionOffer`]). llama.cpp's server
    /// sends 0, and its client ignores the byte. Absent on the wire if `conn_caps` is `None`.
    pub extension_byte: u8,
}

/// Response to ALLOC_BUFFER.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocBufferReply {
    /// Handle of the new buffer; 0 if the memory is exhausted.
    pub remote_ptr: u64,
    /// Size of the buffer in bytes, at least the requested size.
    pub remote_size: u64,
}

/// Response to GET_DEVICE_MEMORY, in bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceMemoryReply {
    /// Memory that can be allocated.
    pub free: u64,
    /// Total memory of the device.
    pub total: u64,
}

/// A response; each variant has the name of its command.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Response<'a> {
    /// Handle and size of the new buffer.
    AllocBuffer(AllocBufferReply),
    /// Alignment in bytes.
    GetAlignment(u64),
    /// Maximum size of a buffer in bytes.
    GetMaxSize(u64),
    /// Base address of the buffer: not 0, and a multiple of the device's alignment.
    BufferGetBase(u64),
    /// Whether the cache of the server had the data.
    SetTensorHash(bool),
    /// The requested bytes. To stream them, send a [`ResponseHeader`] and then the bytes.
    GetTensor(&'a [u8]),
    /// Whether the tensor was copied.
    CopyTensor(bool),
    /// Free and total memory.
    GetDeviceMemory(DeviceMemoryReply),
    /// Size of the allocation in bytes.
    GetAllocSize(u64),
    /// Version and transport capabilities.
    Hello(HelloReply),
    /// Number of devices.
    DeviceCount(u32),
    /// The requested rows, one after the other. To stream them, send a [`ResponseHeader`] and then the bytes.
    GetTensor2d(&'a [u8]),
    /// Whether the device is connected for collectives.
    CommInit(bool),
}

impl<'a> Response<'a> {
    /// Decodes the body of the response to `command`.
    ///
    /// # Errors
    /// [`WireError`], which names the first field that is missing or invalid; [`WireError::NoResponse`] if `command` has no
    /// response.
    pub fn decode(command: RpcCommand, body: &'a [u8]) -> Result<Response<'a>, WireError> {
        let mut r = Reader::new(body);
        let response = match command {
            RpcCommand::AllocBuffer => Response::AllocBuffer(AllocBufferReply {
                remote_ptr: r.u64("remote_ptr")?,
                remote_size: r.u64("remote_size")?,
            }),
            RpcCommand::GetAlignment => Response::GetAlignment(r.u64("alignment")?),
            RpcCommand::GetMaxSize => Response::GetMaxSize(r.u64("max_size")?),
            RpcCommand::BufferGetBase => Response::BufferGetBase(r.u64("base")?),
            RpcCommand::SetTensorHash => Response::SetTensorHash(Field::read(&mut r, "result")?),
            RpcCommand::GetTensor => Response::GetTensor(r.rest()),
            RpcCommand::CopyTensor => Response::CopyTensor(Field::read(&mut r, "result")?),
            RpcCommand::GetDeviceMemory => {
                Response::GetDeviceMemory(DeviceMemoryReply { free: r.u64("free")?, total: r.u64("total")? })
            }
            RpcCommand::GetAllocSize => Response::GetAllocSize(r.u64("alloc_size")?),
            RpcCommand::Hello => Response::Hello(HelloReply::read(&mut r)?),
            RpcCommand::DeviceCount => Response::DeviceCount(r.u32("device_count")?),
            RpcCommand::GetTensor2d => Response::GetTensor2d(r.rest()),
            RpcCommand::CommInit => Response::CommInit(Field::read(&mut r, "result")?),
            RpcCommand::FreeBuffer
            | RpcCommand::BufferClear
            | RpcCommand::SetTensor
            | RpcCommand::GraphCompute
            | RpcCommand::InitTensor
            | RpcCommand::GraphRecompute
            | RpcCommand::MemsetTensor
            | RpcCommand::SetTensor2d
            | RpcCommand::CommAllreduce
            | RpcCommand::CommFree => return Err(WireError::NoResponse(command)),
        };
        r.finish(command.name())?;
        Ok(response)
    }

    /// The command of the request.
    pub const fn command(&self) -> RpcCommand {
        match self {
            Response::AllocBuffer(_) => RpcCommand::AllocBuffer,
            Response::GetAlignment(_) => RpcCommand::GetAlignment,
            Response::GetMaxSize(_) => RpcCommand::GetMaxSize,
            Response::BufferGetBase(_) => RpcCommand::BufferGetBase,
            Response::SetTensorHash(_) => RpcCommand::SetTensorHash,
            Response::GetTensor(_) => RpcCommand::GetTensor,
            Response::CopyTensor(_) => RpcCommand::CopyTensor,
            Response::GetDeviceMemory(_) => RpcCommand::GetDeviceMemory,
            Response::GetAllocSize(_) => RpcCommand::GetAllocSize,
            Response::Hello(_) => RpcCommand::Hello,
            Response::DeviceCount(_) => RpcCommand::DeviceCount,
            Response::GetTensor2d(_) => RpcCommand::GetTensor2d,
            Response::CommInit(_) => RpcCommand::CommInit,
        }
    }

    /// Appends the frame: header and body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&ResponseHeader { size: self.size() }.encode());
        self.encode_body(out);
    }

    /// Appends the body without a header.
    pub fn encode_body(&self, out: &mut Vec<u8>) {
        match self {
            Response::AllocBuffer(reply) => {
                reply.remote_ptr.write(out);
                reply.remote_size.write(out);
            }
            Response::GetAlignment(value)
            | Response::GetMaxSize(value)
            | Response::BufferGetBase(value)
            | Response::GetAllocSize(value) => value.write(out),
            Response::SetTensorHash(result) | Response::CopyTensor(result) | Response::CommInit(result) => {
                result.write(out)
            }
            Response::GetTensor(bytes) | Response::GetTensor2d(bytes) => out.extend_from_slice(bytes),
            Response::GetDeviceMemory(reply) => {
                reply.free.write(out);
                reply.total.write(out);
            }
            Response::Hello(reply) => reply.write(out),
            Response::DeviceCount(count) => count.write(out),
        }
    }

    fn size(&self) -> u64 {
        match self {
            Response::AllocBuffer(_) | Response::GetDeviceMemory(_) => 2 * u64::SIZE,
            Response::GetAlignment(_)
            | Response::GetMaxSize(_)
            | Response::BufferGetBase(_)
            | Response::GetAllocSize(_) => u64::SIZE,
            Response::SetTensorHash(_) | Response::CopyTensor(_) | Response::CommInit(_) => bool::SIZE,
            Response::GetTensor(bytes) | Response::GetTensor2d(bytes) => bytes.len() as u64,
            Response::Hello(HelloReply { conn_caps: None, .. }) => 3,
            Response::Hello(HelloReply { conn_caps: Some(_), .. }) => 3 + 1 + ConnCaps::SIZE,
            Response::DeviceCount(_) => u32::SIZE,
        }
    }
}

impl HelloReply {
    fn read(r: &mut Reader<'_>) -> Result<HelloReply, WireError> {
        let version = Version { major: r.u8("major")?, minor: r.u8("minor")?, patch: r.u8("patch")? };
        if r.remaining() == 0 {
            return Ok(HelloReply { version, conn_caps: None, extension_byte: 0 });
        }
        let extension_byte = r.u8("padding")?;
        Ok(HelloReply { version, conn_caps: Some(Field::read(r, "conn_caps")?), extension_byte })
    }

    fn write(&self, out: &mut Vec<u8>) {
        let Version { major, minor, patch } = self.version;
        out.extend_from_slice(&[major, minor, patch]);
        if let Some(conn_caps) = &self.conn_caps {
            out.push(self.extension_byte);
            out.extend_from_slice(conn_caps);
        }
    }
}
