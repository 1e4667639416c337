//! Responses of ggml's protocol. Commands without a variant of [`Response`] have no response.

use super::{
    codec::{Field, Reader, WireError},
    command::RpcCommand,
    frame::{RESPONSE_HEADER, ResponseHeader},
    messages::{messages, responses},
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

messages! {
    derive(Clone, Debug, PartialEq)

    /// Response to ALLOC_BUFFER.
    AllocBufferReply {
        /// Handle of the new buffer; 0 if the memory is exhausted.
        remote_ptr: u64,
        /// Size of the buffer in bytes, at least the requested size.
        remote_size: u64,
    }

    /// Response to GET_DEVICE_MEMORY, in bytes.
    DeviceMemoryReply {
        /// Memory that can be allocated.
        free: u64,
        /// Total memory of the device.
        total: u64,
    }
}

responses! {
    /// A response; each variant has the name of its command.
    Response: RpcCommand;
    /// Handle and size of the new buffer.
    AllocBuffer(buffer: AllocBufferReply);
    /// Alignment in bytes.
    GetAlignment(alignment: u64);
    /// Maximum size of a buffer in bytes.
    GetMaxSize(max_size: u64);
    /// Base address of the buffer: not 0, and a multiple of the device's alignment.
    BufferGetBase(base: u64);
    /// Whether the cache of the server had the data.
    SetTensorHash(result: bool);
    /// The requested bytes. To stream them, send a [`ResponseHeader`] and then the bytes.
    GetTensor(bytes: &'a [u8]);
    /// Whether the tensor was copied.
    CopyTensor(result: bool);
    /// Free and total memory.
    GetDeviceMemory(memory: DeviceMemoryReply);
    /// Size of the allocation in bytes.
    GetAllocSize(alloc_size: u64);
    /// Version and transport capabilities.
    Hello(reply: HelloReply);
    /// Number of devices.
    DeviceCount(device_count: u32);
    /// The requested rows, one after the other. To stream them, send a [`ResponseHeader`] and then the bytes.
    GetTensor2d(bytes: &'a [u8]);
    /// Whether the device is connected for collectives.
    CommInit(result: bool);
}

impl Response<'_> {
    /// Appends the frame: header and body.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(&[0; RESPONSE_HEADER]);
        self.encode_body(out);
        let size = (out.len() - start - RESPONSE_HEADER) as u64;
        out[start..start + RESPONSE_HEADER].copy_from_slice(&ResponseHeader { size }.encode());
    }
}

impl Field<'_> for HelloReply {
    fn read(r: &mut Reader<'_>, _: &'static str) -> Result<Self, WireError> {
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
