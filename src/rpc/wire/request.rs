//! What a client asks, one struct per command.

use super::{
    codec::{Field, Reader, WireError},
    command::{BodySize, Command, Limits},
    frame::RequestHeader,
    graph::{GraphCompute, TensorRecords},
    tensor::{TENSOR_RECORD, TensorRecord},
    version::ConnCaps,
};

/// Sources that a tensor can have.
pub const MAX_SRC: usize = 10;

/// Bytes of a SET_TENSOR body before its data.
pub const SET_TENSOR_HEAD: usize = TENSOR_RECORD + 1 + 8;

/// A request's body, in both directions. `read` leaves trailing bytes to its caller.
pub(super) trait Body<'a>: Sized {
    fn read(r: &mut Reader<'a>, limits: &Limits) -> Result<Self, WireError>;

    fn size(&self) -> u64;

    fn write(&self, out: &mut Vec<u8>);
}

/// Requests that are a fixed list of fields.
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

        const _: () = assert!(matches!(Command::$name.request(), BodySize::Exact(size) if size == $name::SIZE));

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
    /// Allocates a buffer.
    AllocBuffer {
        /// Device by its position on the endpoint.
        device: u32,
        /// Bytes.
        size: u64,
    }

    /// Asks for a device's alignment in bytes.
    GetAlignment {
        /// Device by its position on the endpoint.
        device: u32,
    }

    /// Asks for the largest buffer of a device, in bytes.
    GetMaxSize {
        /// Device by its position on the endpoint.
        device: u32,
    }

    /// Asks for a buffer's address.
    BufferGetBase {
        /// Buffer handle.
        remote_ptr: u64,
    }

    /// Gives a buffer back.
    FreeBuffer {
        /// Buffer handle.
        remote_ptr: u64,
    }

    /// Fills a whole buffer.
    BufferClear {
        /// Buffer handle.
        remote_ptr: u64,
        /// The byte to fill it with.
        value: u8,
    }

    /// Asks the server to fill a tensor with cached data.
    SetTensorHash {
        /// Destination.
        tensor: TensorRecord,
        /// Bytes from the tensor's start.
        offset: u64,
        /// 64-bit FNV-1a of the data, whose length is not sent.
        hash: u64,
    }

    /// Reads bytes of a tensor.
    GetTensor {
        /// Source.
        tensor: TensorRecord,
        /// Bytes from the tensor's start.
        offset: u64,
        /// Bytes to read.
        size: u64,
    }

    /// Copies a tensor to another one of the same server.
    CopyTensor {
        /// Source.
        src: TensorRecord,
        /// Destination.
        dst: TensorRecord,
    }

    /// Asks for a device's free and total memory.
    GetDeviceMemory {
        /// Device by its position on the endpoint.
        device: u32,
    }

    /// Prepares a tensor whose rows end in padding.
    InitTensor {
        /// The tensor.
        tensor: TensorRecord,
    }

    /// Asks how many devices the endpoint has.
    DeviceCount {}

    /// Runs the last graph of a device again.
    GraphRecompute {
        /// Device by its position on the endpoint.
        device: u32,
    }

    /// Fills a part of a tensor.
    MemsetTensor {
        /// Destination.
        tensor: TensorRecord,
        /// Bytes from the tensor's start.
        offset: u64,
        /// Bytes to fill.
        size: u64,
        /// The byte to fill them with.
        value: u8,
    }
}

/// Opens a connection.
#[derive(Clone, Debug, PartialEq)]
pub struct Hello {
    /// The client's transports; `None` from a client before 4.0, whose HELLO is empty.
    pub conn_caps: Option<ConnCaps>,
}

impl Body<'_> for Hello {
    fn read(r: &mut Reader<'_>, _: &Limits) -> Result<Self, WireError> {
        let conn_caps = if r.left() == 0 { None } else { Some(Field::read(r, "conn_caps")?) };
        Ok(Hello { conn_caps })
    }

    fn size(&self) -> u64 {
        if self.conn_caps.is_some() { ConnCaps::SIZE } else { 0 }
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend(self.conn_caps.iter().flatten());
    }
}

/// A SET_TENSOR body up to its data.
#[derive(Clone, Debug, PartialEq)]
pub struct SetTensorHead {
    /// Destination.
    pub tensor: TensorRecord,
    /// Whether the sender asks the server to keep the data for SET_TENSOR_HASH.
    pub cache: bool,
    /// Bytes from the tensor's start.
    pub offset: u64,
}

impl SetTensorHead {
    /// Reads the head alone; the data that follows it is the body's length less [`SET_TENSOR_HEAD`].
    ///
    /// # Errors
    /// [`WireError::BadValue`] for a cache flag that is not 0 or 1.
    pub fn decode(bytes: &[u8; SET_TENSOR_HEAD]) -> Result<SetTensorHead, WireError> {
        SetTensorHead::read(&mut Reader::new(bytes))
    }

    /// Writes the frame up to its data; the caller sends `data_len` bytes after it.
    ///
    /// # Errors
    /// [`WireError::TooLarge`] if no receiver could take that much.
    pub fn encode(&self, data_len: u64, out: &mut Vec<u8>) -> Result<(), WireError> {
        let limit = isize::MAX as u64 - SET_TENSOR_HEAD as u64;
        if data_len > limit {
            return Err(WireError::TooLarge { what: "data", have: data_len, limit });
        }
        let size = SET_TENSOR_HEAD as u64 + data_len;
        out.extend_from_slice(&RequestHeader { command: Command::SetTensor, size }.encode());
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

const _: () = assert!(matches!(Command::SetTensor.request(), BodySize::AtLeast(n) if n == SET_TENSOR_HEAD as u64));

/// Writes bytes into a tensor.
#[derive(Clone, Debug, PartialEq)]
pub struct SetTensor<'a> {
    /// Where to.
    pub head: SetTensorHead,
    /// What: everything that follows the head.
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

/// Asks how many bytes a tensor takes on a device.
#[derive(Clone, Debug, PartialEq)]
pub struct GetAllocSize<'a> {
    /// Device by its position on the endpoint.
    pub device: u32,
    /// The tensor; its buffer and address may be another server's.
    pub tensor: TensorRecord,
    /// Its sources; a record of zeros where there is none.
    pub srcs: &'a [[u8; TENSOR_RECORD]; MAX_SRC],
}

impl<'a> GetAllocSize<'a> {
    /// The sources, decoded one by one.
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
        /// Any request.
        // The largest holds two records by value: a receiver has one at a time, on its stack, and a box would cost
        // every small GET_TENSOR an allocation.
        #[allow(clippy::large_enum_variant)]
        #[derive(Clone, Debug, PartialEq)]
        #[allow(missing_docs)] // each variant is the struct of its name
        #[non_exhaustive]
        pub enum Request<'a> {
            $($name($name $(<$life>)?),)*
        }

        impl<'a> Request<'a> {
            /// Reads the body of a request. Its length is expected to have passed [`Command::request_size`], which
            /// alone checks [`Limits::max_body`].
            ///
            /// # Errors
            /// [`WireError`], naming the first field that is missing, wrong or over `limits`.
            pub fn decode(command: Command, body: &'a [u8], limits: &Limits) -> Result<Request<'a>, WireError> {
                let mut r = Reader::new(body);
                let request = match command {
                    $(Command::$name => Request::$name(Body::read(&mut r, limits)?),)*
                };
                r.finish(command.name())?;
                Ok(request)
            }

            /// The request's command.
            pub const fn command(&self) -> Command {
                match self { $(Request::$name(_) => Command::$name,)* }
            }

            /// Appends the whole frame: header and body.
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Request::$name(body) => {
                        let header = RequestHeader { command: Command::$name, size: body.size() };
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
    MemsetTensor
}
