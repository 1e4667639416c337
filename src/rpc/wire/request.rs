//! Requests of protocol 7.0: one struct per command, with its decoder and encoder.

use super::{
    codec::{Field, Reader, WireError},
    command::{BodySize, Limits, RpcCommand},
    frame::RequestHeader,
    graph::{GraphCompute, TensorRecords},
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

/// Body of a request, with decoder and encoder. `read` does not check for trailing bytes; its caller does.
pub(super) trait Body<'a>: Sized {
    fn read(r: &mut Reader<'a>, limits: &Limits) -> Result<Self, WireError>;

    fn size(&self) -> u64;

    fn write(&self, out: &mut Vec<u8>);
}

/// Generates requests with fields of fixed size only.
macro_rules! fixed {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }

        impl $name {
            const SIZE: u64 = 0 $(+ <$ty as Field>::SIZE)*;
        }

        const _: () = assert!(matches!(RpcCommand::$name.request(), BodySize::Exact(size) if size == $name::SIZE));

        impl Body<'_> for $name {
            fn read(_r: &mut Reader<'_>, _: &Limits) -> Result<Self, WireError> {
                Ok($name { $($field: Field::read(_r, stringify!($field))?,)* })
            }

            fn size(&self) -> u64 {
                Self::SIZE
            }

            fn write(&self, _out: &mut Vec<u8>) {
                $(self.$field.write(_out);)*
            }
        }
    )*};
}

fixed! {
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
}

/// Runs a stored graph again.
#[derive(Clone, Debug, PartialEq)]
pub struct GraphRecompute {
    /// Device by its position on the endpoint.
    pub device: u32,
    /// The number under which GRAPH_COMPUTE stored the graph; `None` up to 7.0: the graph that the device ran last.
    pub uid: Option<u64>,
}

impl Body<'_> for GraphRecompute {
    fn read(r: &mut Reader<'_>, _: &Limits) -> Result<Self, WireError> {
        let device = Field::read(r, "device")?;
        let has_uid = r.remaining() as u64 >= u64::SIZE;
        let uid = has_uid.then(|| r.u64("uid")).transpose()?;
        Ok(GraphRecompute { device, uid })
    }

    fn size(&self) -> u64 {
        u32::SIZE + if self.uid.is_some() { u64::SIZE } else { 0 }
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.device.write(out);
        self.uid.iter().for_each(|uid| uid.write(out));
    }
}

/// Negotiates the version; the first request of a connection.
#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    /// Transport capabilities of the client. `None`: the empty HELLO of clients before 4.0.
    pub conn_caps: Option<ConnCaps>,
}

impl Body<'_> for Hello {
    fn read(r: &mut Reader<'_>, _: &Limits) -> Result<Self, WireError> {
        let conn_caps = if r.remaining() == 0 { None } else { Some(Field::read(r, "conn_caps")?) };
        Ok(Hello { conn_caps })
    }

    fn size(&self) -> u64 {
        if self.conn_caps.is_some() { ConnCaps::SIZE } else { 0 }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.conn_caps.iter().flatten());
    }
}

/// Head of a SET_TENSOR: the body without the data.
#[derive(Clone, Debug, PartialEq)]
pub struct SetTensorHead {
    /// Destination.
    pub tensor: TensorRecord,
    /// Whether the server should store the data in its cache, for a later SET_TENSOR_HASH.
    pub cache: bool,
    /// Offset from the start of the tensor, in bytes.
    pub offset: u64,
}

impl SetTensorHead {
    /// Decodes the head. The length of the data after it is the length of the body minus [`SET_TENSOR_HEAD`].
    ///
    /// # Errors
    /// [`WireError::BadValue`] for a cache flag that is not 0 or 1.
    pub fn decode(bytes: &[u8; SET_TENSOR_HEAD]) -> Result<SetTensorHead, WireError> {
        SetTensorHead::read(&mut Reader::new(bytes))
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
        let size = SET_TENSOR_HEAD as u64 + data_len;
        out.extend_from_slice(&RequestHeader { command: RpcCommand::SetTensor, size }.encode());
        self.write(out);
        Ok(())
    }

    fn read(r: &mut Reader<'_>) -> Result<SetTensorHead, WireError> {
        let tensor = Field::read(r, "tensor")?;
        let cache = Field::read(r, "cache_flag")?;
        let offset = Field::read(r, "offset")?;
        Ok(SetTensorHead { tensor, cache, offset })
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.tensor.write(out);
        self.cache.write(out);
        self.offset.write(out);
    }
}

const _: () = assert!(matches!(RpcCommand::SetTensor.request(), BodySize::AtLeast(n) if n == SET_TENSOR_HEAD as u64));

/// Writes bytes into a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct SetTensor<'a> {
    /// Destination and flags.
    pub head: SetTensorHead,
    /// Data: all bytes after the head.
    pub data: &'a [u8],
}

impl<'a> Body<'a> for SetTensor<'a> {
    fn read(r: &mut Reader<'a>, _: &Limits) -> Result<Self, WireError> {
        Ok(SetTensor { head: SetTensorHead::read(r)?, data: r.rest() })
    }

    fn size(&self) -> u64 {
        SET_TENSOR_HEAD as u64 + self.data.len() as u64
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.head.write(out);
        out.extend_from_slice(self.data);
    }
}

/// A SET_TENSOR_2D body up to its data (from 8.0 on): where its rows go.
#[derive(Clone, Debug, PartialEq)]
pub struct SetTensor2dHead {
    /// Destination.
    pub tensor: TensorRecord,
    /// Offset of the first row from the tensor's start, in bytes.
    pub offset: u64,
    /// Length of a row in bytes.
    pub size: u64,
    /// Number of rows.
    pub n_copies: u64,
    /// Distance from one row to the next, in bytes.
    pub stride: u64,
}

impl SetTensor2dHead {
    /// Decodes the head alone; the data that follows it is the body's length less [`SET_TENSOR_2D_HEAD`].
    pub fn decode(bytes: &[u8; SET_TENSOR_2D_HEAD]) -> Result<SetTensor2dHead, WireError> {
        SetTensor2dHead::read(&mut Reader::new(bytes))
    }

    fn read(r: &mut Reader<'_>) -> Result<SetTensor2dHead, WireError> {
        Ok(SetTensor2dHead {
            tensor: Field::read(r, "tensor")?,
            offset: r.u64("offset")?,
            size: r.u64("size")?,
            n_copies: r.u64("n_copies")?,
            stride: r.u64("stride")?,
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.tensor.write(out);
        [self.offset, self.size, self.n_copies, self.stride].iter().for_each(|n| n.write(out));
    }
}

/// Writes rows of equal length into a tensor, at a stride (from 8.0 on).
#[derive(Clone, Debug, PartialEq)]
pub struct SetTensor2d<'a> {
    /// Where the rows go.
    pub head: SetTensor2dHead,
    /// The rows, one after the other: everything that follows the head.
    pub data: &'a [u8],
}

impl<'a> Body<'a> for SetTensor2d<'a> {
    fn read(r: &mut Reader<'a>, _: &Limits) -> Result<Self, WireError> {
        Ok(SetTensor2d { head: SetTensor2dHead::read(r)?, data: r.rest() })
    }

    fn size(&self) -> u64 {
        SET_TENSOR_2D_HEAD as u64 + self.data.len() as u64
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.head.write(out);
        out.extend_from_slice(self.data);
    }
}

/// Queries how many bytes a tensor takes on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct GetAllocSize<'a> {
    /// Device, by its index on the server.
    pub device: u32,
    /// The tensor. Its buffer and address are irrelevant, and may belong to another server.
    pub tensor: TensorRecord,
    /// Encoded records of its sources; zeros for an absent source.
    pub srcs: &'a [[u8; TENSOR_RECORD]; MAX_SRC],
}

impl<'a> GetAllocSize<'a> {
    /// The records of the sources; each access decodes one.
    pub fn srcs(&self) -> TensorRecords<'a> {
        TensorRecords(self.srcs)
    }
}

const SRCS: usize = MAX_SRC * TENSOR_RECORD;

impl<'a> Body<'a> for GetAllocSize<'a> {
    fn read(r: &mut Reader<'a>, _: &Limits) -> Result<Self, WireError> {
        let device = Field::read(r, "device")?;
        let tensor = Field::read(r, "tensor")?;
        let srcs = bytemuck::cast_ref(r.array::<SRCS>("srcs")?);
        Ok(GetAllocSize { device, tensor, srcs })
    }

    fn size(&self) -> u64 {
        u32::SIZE + TensorRecord::SIZE + SRCS as u64
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.device.write(out);
        self.tensor.write(out);
        out.extend_from_slice(self.srcs.as_flattened());
    }
}

macro_rules! requests {
    ($($name:ident $(<$life:lifetime>)?)*) => {
        /// A request.
        // The largest variant holds two records by value. A receiver has one request at a time, on its stack; a box would cost
        // an allocation for each small GET_TENSOR.
        #[allow(clippy::large_enum_variant)]
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // each variant is the struct of its name
        #[non_exhaustive]
        pub enum Request<'a> {
            $($name($name $(<$life>)?),)*
        }

        impl<'a> Request<'a> {
            /// Decodes the body of a request. The caller has checked the length with [`RpcCommand::request_size`]; this
            /// function does not check [`Limits::max_body`].
            ///
            /// # Errors
            /// [`WireError`], which names the first field that is missing, invalid or over `limits`.
            pub fn decode(command: RpcCommand, body: &'a [u8], limits: &Limits) -> Result<Request<'a>, WireError> {
                let mut r = Reader::new(body);
                let request = match command {
                    $(RpcCommand::$name => Request::$name(Body::read(&mut r, limits)?),)*
                };
                r.finish(command.name())?;
                Ok(request)
            }

            /// The command of the request.
            pub const fn command(&self) -> RpcCommand {
                match self { $(Request::$name(_) => RpcCommand::$name,)* }
            }

            /// Appends the frame: header and body.
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Request::$name(body) => {
                        let header = RequestHeader { command: RpcCommand::$name, size: body.size() };
                        out.extend_from_slice(&header.encode());
                        body.write(out);
                    })*
                }
            }
        }
    };
}

requests! {
    AllocBuffer GetAlignment GetMaxSize BufferGetBase FreeBuffer BufferClear SetTensor<'a> SetTensorHash GetTensor
    CopyTensor GraphCompute<'a> GetDeviceMemory InitTensor GetAllocSize<'a> Hello DeviceCount GraphRecompute
    MemsetTensor SetTensor2d<'a> GetTensor2d CommInit CommAllreduce CommFree
}
