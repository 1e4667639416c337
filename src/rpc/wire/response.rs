//! What a server answers. Commands that are not here have no response.

use super::{
    codec::{Field, Reader, WireError},
    command::Command,
    frame::ResponseHeader,
    version::{ConnCaps, Version},
};

/// The answer to HELLO.
#[derive(Clone, Debug, PartialEq)]
pub struct HelloReply {
    /// The server's version.
    pub version: Version,
    /// The server's transports; `None` is the form before 4.0, which alone an older client can read.
    pub conn_caps: Option<ConnCaps>,
    /// The byte that is 0 from llama.cpp, and which its clients ignore: see [`super::ext::Greeting`]. It is not sent where
    /// `conn_caps` is `None`.
    pub greeting: u8,
}

/// The answer to ALLOC_BUFFER.
#[derive(Clone, Debug, PartialEq)]
pub struct AllocBufferReply {
    /// The new buffer's handle; 0 if there was no memory.
    pub remote_ptr: u64,
    /// Its size in bytes, at least what was asked for.
    pub remote_size: u64,
}

/// The answer to GET_DEVICE_MEMORY, in bytes.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceMemoryReply {
    /// Memory that can be allocated now.
    pub free: u64,
    /// Memory of the device.
    pub total: u64,
}

/// Any response, named by its command.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Response<'a> {
    /// Handle and size.
    AllocBuffer(AllocBufferReply),
    /// Bytes.
    GetAlignment(u64),
    /// Bytes.
    GetMaxSize(u64),
    /// The buffer's address: not zero, and aligned as GET_ALIGNMENT says.
    BufferGetBase(u64),
    /// Whether the server had the data.
    SetTensorHash(bool),
    /// The bytes asked for. To stream them, send a [`ResponseHeader`] and then the bytes.
    GetTensor(&'a [u8]),
    /// Whether it was copied.
    CopyTensor(bool),
    /// Free and total.
    GetDeviceMemory(DeviceMemoryReply),
    /// Bytes.
    GetAllocSize(u64),
    /// Version and transports.
    Hello(HelloReply),
    /// How many devices.
    DeviceCount(u32),
}

impl<'a> Response<'a> {
    /// Reads the body of the response to `command`.
    ///
    /// # Errors
    /// [`WireError`], naming the first field that is missing or wrong; [`WireError::NoResponse`] if nothing is ever
    /// sent back for `command`.
    pub fn decode(command: Command, body: &'a [u8]) -> Result<Response<'a>, WireError> {
        let mut r = Reader::new(body);
        let response = match command {
            Command::AllocBuffer => Response::AllocBuffer(AllocBufferReply {
                remote_ptr: r.u64("remote_ptr")?,
                remote_size: r.u64("remote_size")?,
            }),
            Command::GetAlignment => Response::GetAlignment(r.u64("alignment")?),
            Command::GetMaxSize => Response::GetMaxSize(r.u64("max_size")?),
            Command::BufferGetBase => Response::BufferGetBase(r.u64("base")?),
            Command::SetTensorHash => Response::SetTensorHash(Field::read(&mut r, "result")?),
            Command::GetTensor => Response::GetTensor(r.rest()),
            Command::CopyTensor => Response::CopyTensor(Field::read(&mut r, "result")?),
            Command::GetDeviceMemory => {
                Response::GetDeviceMemory(DeviceMemoryReply { free: r.u64("free")?, total: r.u64("total")? })
            }
            Command::GetAllocSize => Response::GetAllocSize(r.u64("alloc_size")?),
            Command::Hello => Response::Hello(HelloReply::read(&mut r)?),
            Command::DeviceCount => Response::DeviceCount(r.u32("device_count")?),
            Command::FreeBuffer
            | Command::BufferClear
            | Command::SetTensor
            | Command::GraphCompute
            | Command::InitTensor
            | Command::GraphRecompute
            | Command::MemsetTensor => return Err(WireError::NoResponse(command)),
        };
        r.finish(command.name())?;
        Ok(response)
    }

    /// The command that this answers.
    pub const fn command(&self) -> Command {
        match self {
            Response::AllocBuffer(_) => Command::AllocBuffer,
            Response::GetAlignment(_) => Command::GetAlignment,
            Response::GetMaxSize(_) => Command::GetMaxSize,
            Response::BufferGetBase(_) => Command::BufferGetBase,
            Response::SetTensorHash(_) => Command::SetTensorHash,
            Response::GetTensor(_) => Command::GetTensor,
            Response::CopyTensor(_) => Command::CopyTensor,
            Response::GetDeviceMemory(_) => Command::GetDeviceMemory,
            Response::GetAllocSize(_) => Command::GetAllocSize,
            Response::Hello(_) => Command::Hello,
            Response::DeviceCount(_) => Command::DeviceCount,
        }
    }

    /// Appends the whole frame: header and body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&ResponseHeader { size: self.size() }.encode());
        self.encode_body(out);
    }

    /// Appends the body alone.
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
            Response::SetTensorHash(result) | Response::CopyTensor(result) => result.write(out),
            Response::GetTensor(bytes) => out.extend_from_slice(bytes),
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
            Response::SetTensorHash(_) | Response::CopyTensor(_) => bool::SIZE,
            Response::GetTensor(bytes) => bytes.len() as u64,
            Response::Hello(HelloReply { conn_caps: None, .. }) => 3,
            Response::Hello(HelloReply { conn_caps: Some(_), .. }) => 3 + 1 + ConnCaps::SIZE,
            Response::DeviceCount(_) => u32::SIZE,
        }
    }
}

impl HelloReply {
    fn read(r: &mut Reader<'_>) -> Result<HelloReply, WireError> {
        let version = Version { major: r.u8("major")?, minor: r.u8("minor")?, patch: r.u8("patch")? };
        if r.left() == 0 {
            return Ok(HelloReply { version, conn_caps: None, greeting: 0 });
        }
        let greeting = r.u8("padding")?;
        Ok(HelloReply { version, conn_caps: Some(Field::read(r, "conn_caps")?), greeting })
    }

    fn write(&self, out: &mut Vec<u8>) {
        let Version { major, minor, patch } = self.version;
        out.extend_from_slice(&[major, minor, patch]);
        if let Some(conn_caps) = &self.conn_caps {
            out.push(self.greeting);
            out.extend_from_slice(conn_caps);
        }
    }
}
