//! Requests of protocol 7.0: one struct per command, with its decoder and encoder.

use super::{
    codec::{Field, Reader, WireError},
    command::{Limits, RpcCommand},
    frame::write_frame,
    graph::{GraphCompute, TensorRecords},
    messages::{messages, requests},
    tensor::{TENSOR_RECORD, TensorRecord},
    version::ConnCaps,
};

/// Maximum number of sources of a tensor.
pub const MAX_SRC: usize = 10;

/// Length in bytes of a SET_TENSOR body before its data.
pub const SET_TENSOR_HEAD: usize = TENSOR_RECORD + 1 + 8;

/// Bytes of a SET_TENSOR_2D body before its data.
pub const SET_TENSOR_2D_HEAD: usize = TENSOR_RECORD + 4 * 8;

/// Bytes of the host field of COMM_INIT.
pub const COMM_HOST: usize = 64;

messages! {
    derive(Clone, Debug, PartialEq)

    /// Allocates a buffer on a device.
    AllocBuffer {
        /// Device, by its index on the server.
        device: u32,
        /// Size in bytes.
        size: u64,
    }

    /// Queries the alignment that a device requires, in bytes.
    GetAlignment {
        /// Device, by its index on the server.
        device: u32,
    }

    /// Queries the maximum size of a buffer of a device, in bytes.
    GetMaxSize {
        /// Device, by its index on the server.
        device: u32,
    }

    /// Queries the base address of a buffer.
    BufferGetBase {
        /// Buffer handle.
        remote_ptr: u64,
    }

    /// Frees a buffer.
    FreeBuffer {
        /// Buffer handle.
        remote_ptr: u64,
    }

    /// Fills a whole buffer with one byte value.
    BufferClear {
        /// Buffer handle.
        remote_ptr: u64,
        /// The byte to fill it with.
        value: u8,
    }

    /// Fills a tensor with data from the cache of the server.
    SetTensorHash {
        /// Destination.
        tensor: TensorRecord,
        /// Offset from the start of the tensor, in bytes.
        offset: u64,
        /// 64-bit FNV-1a hash of the data. The length of the data is not sent.
        hash: u64,
    }

    /// Reads bytes of a tensor.
    GetTensor {
        /// Source.
        tensor: TensorRecord,
        /// Offset from the start of the tensor, in bytes.
        offset: u64,
        /// Number of bytes to read.
        size: u64,
    }

    /// Copies a tensor to another tensor of the same server.
    CopyTensor {
        /// Source.
        src: TensorRecord,
        /// Destination.
        dst: TensorRecord,
    }

    /// Queries the free and the total memory of a device.
    GetDeviceMemory {
        /// Device, by its index on the server.
        device: u32,
    }

    /// Initialises a tensor, for example the padding at the ends of its rows.
    InitTensor {
        /// The tensor.
        tensor: TensorRecord,
    }

    /// Queries the number of devices of the server.
    DeviceCount {}

    /// Fills a part of a tensor with one byte value.
    MemsetTensor {
        /// Destination.
        tensor: TensorRecord,
        /// Offset from the start of the tensor, in bytes.
        offset: u64,
        /// Number of bytes to fill.
        size: u64,
        /// The byte to fill them with.
        value: u8,
    }

    /// Reads rows of equal length from a tensor (from 8.0 on). The response has the rows one after the other.
    GetTensor2d {
        /// Source.
        tensor: TensorRecord,
        /// Offset of the first row from the tensor's start, in bytes.
        offset: u64,
        /// Length of a row in bytes.
        size: u64,
        /// Number of rows.
        n_copies: u64,
        /// Distance from one row to the next, in bytes.
        stride: u64,
    }

    /// Connects a device to that of another server, for COMM_ALLREDUCE (from 8.0 on). Rank 0 listens, rank 1 connects.
    CommInit {
        /// Device by its position on the endpoint.
        device: u32,
        /// Rank of this server: 0 or 1.
        rank: u32,
        /// Number of ranks: 2.
        world: u32,
        /// Port on which rank 0 listens.
        port: u32,
        /// For rank 1: host of rank 0, padded with zeros.
        host: [u8; COMM_HOST],
    }

    /// Replaces a tensor by the sum of itself and the tensor of the other rank (from 8.0 on).
    CommAllreduce {
        /// Device by its position on the endpoint.
        device: u32,
        /// The tensor.
        tensor: TensorRecord,
    }

    /// Closes the connection for collectives of a device (from 8.0 on).
    CommFree {
        /// Device by its position on the endpoint.
        device: u32,
    }

    /// Runs a stored graph again.
    GraphRecompute {
        /// Device by its position on the endpoint.
        device: u32,
        /// The number under which GRAPH_COMPUTE stored the graph; `None` up to 7.0: the graph that the device ran last.
        uid: Option<u64>,
    }

    /// Negotiates the version; the first request of a connection.
    Hello {
        /// Transport capabilities of the client. `None`: the empty HELLO of clients before 4.0.
        conn_caps: Option<ConnCaps>,
    }

    /// Head of a SET_TENSOR: the body without the data.
    SetTensorHead {
        /// Destination.
        tensor: TensorRecord,
        /// Whether the server should store the data in its cache, for a later SET_TENSOR_HASH.
        cache: bool,
        /// Offset from the start of the tensor, in bytes.
        offset: u64,
    }

    /// Writes bytes into a tensor.
    SetTensor<'a> {
        /// Destination and flags.
        head: SetTensorHead,
        /// Data: all bytes after the head.
        data: &'a [u8],
    }

    /// Head of a SET_TENSOR_2D (from 8.0 on): where its rows go.
    SetTensor2dHead {
        /// Destination.
        tensor: TensorRecord,
        /// Offset of the first row from the tensor's start, in bytes.
        offset: u64,
        /// Length of a row in bytes.
        size: u64,
        /// Number of rows.
        n_copies: u64,
        /// Distance from one row to the next, in bytes.
        stride: u64,
    }

    /// Writes rows of equal length into a tensor, at a stride (from 8.0 on).
    SetTensor2d<'a> {
        /// Where the rows go.
        head: SetTensor2dHead,
        /// The rows, one after the other: all bytes after the head.
        data: &'a [u8],
    }

    /// Queries how many bytes a tensor takes on a device.
    GetAllocSize<'a> {
        /// Device, by its index on the server.
        device: u32,
        /// The tensor. Its buffer and address are irrelevant, and may belong to another server.
        tensor: TensorRecord,
        /// Encoded records of its sources; zeros for an absent source.
        srcs: &'a [[u8; TENSOR_RECORD]; MAX_SRC],
    }
}

impl SetTensorHead {
    /// Decodes the head. The length of the data after it is the length of the body minus [`SET_TENSOR_HEAD`].
    ///
    /// # Errors
    /// [`WireError::BadValue`] for a cache flag that is not 0 or 1.
    pub fn decode(bytes: &[u8; SET_TENSOR_HEAD]) -> Result<SetTensorHead, WireError> {
        SetTensorHead::read(&mut Reader::new(bytes), "head")
    }

    /// Appends the frame without the data; the caller sends `data_len` bytes after it.
    ///
    /// # Errors
    /// [`WireError::TooLarge`] if `data_len` exceeds the limit of all receivers.
    pub fn encode(&self, data_len: u64, out: &mut Vec<u8>) -> Result<(), WireError> {
        let limit = isize::MAX as u64 - SET_TENSOR_HEAD as u64;
        if data_len > limit {
            return Err(WireError::TooLarge { what: "data", have: data_len, limit });
        }
        write_frame(RpcCommand::SetTensor as u8, data_len, out, |out| self.write(out));
        Ok(())
    }
}

impl SetTensor2dHead {
    /// Decodes the head. The length of the data after it is the length of the body minus [`SET_TENSOR_2D_HEAD`].
    pub fn decode(bytes: &[u8; SET_TENSOR_2D_HEAD]) -> Result<SetTensor2dHead, WireError> {
        SetTensor2dHead::read(&mut Reader::new(bytes), "head")
    }
}

impl<'a> GetAllocSize<'a> {
    /// The records of the sources; each access decodes one.
    pub fn srcs(&self) -> TensorRecords<'a> {
        TensorRecords(self.srcs)
    }
}

impl<'a> Field<'a> for &'a [[u8; TENSOR_RECORD]; MAX_SRC] {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError> {
        Ok(bytemuck::cast_ref(r.array::<{ MAX_SRC * TENSOR_RECORD }>(what)?))
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.as_flattened());
    }
}

requests! {
    /// A request.
    // The largest variant holds two records by value. A receiver has one request at a time, on its stack; a box would cost
    // an allocation for each small GET_TENSOR.
    #[allow(clippy::large_enum_variant)]
    #[derive(Clone, Debug, PartialEq)]
    Request: RpcCommand, streamed |_| 0;
    AllocBuffer = AllocBuffer GetAlignment = GetAlignment GetMaxSize = GetMaxSize BufferGetBase = BufferGetBase
    FreeBuffer = FreeBuffer BufferClear = BufferClear SetTensor<'a> = SetTensor SetTensorHash = SetTensorHash
    GetTensor = GetTensor CopyTensor = CopyTensor GraphCompute<'a> = GraphCompute GetDeviceMemory = GetDeviceMemory
    InitTensor = InitTensor GetAllocSize<'a> = GetAllocSize Hello = Hello DeviceCount = DeviceCount
    GraphRecompute = GraphRecompute MemsetTensor = MemsetTensor SetTensor2d<'a> = SetTensor2d GetTensor2d = GetTensor2d
    CommInit = CommInit CommAllreduce = CommAllreduce CommFree = CommFree
}
