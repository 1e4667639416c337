//! The tensor record: one tensor as the wire describes it.

use std::borrow::Cow;

use bytemuck::{Pod, Zeroable};

use super::codec::{Field, Reader, WireError};

/// Bytes of a tensor record.
pub const TENSOR_RECORD: usize = 296;

/// Bytes of a record's name field, the closing NUL included.
pub const MAX_NAME: usize = 64;

/// One list of fields gives the struct to work with and its packed twin on the wire.
macro_rules! record {
    ($($(#[$doc:meta])* $field:ident: $ty:ty,)*) => {
        /// A tensor as a peer describes it: 296 packed bytes, none of them checked yet.
        #[derive(Clone, Debug, PartialEq)]
        pub struct TensorRecord {
            $($(#[$doc])* pub $field: $ty,)*
        }

        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C, packed)]
        struct Packed {
            $($field: $ty,)*
        }

        // Casts between arrays of one size compile to loads: graphs carry thousands of records.
        impl TensorRecord {
            /// Any 296 bytes are a record; what they mean is for others to judge.
            pub fn decode(bytes: &[u8; TENSOR_RECORD]) -> TensorRecord {
                let packed: Packed = bytemuck::cast(*bytes);
                TensorRecord { $($field: packed.$field,)* }
            }

            /// The record's bytes.
            pub fn encode(&self) -> [u8; TENSOR_RECORD] {
                bytemuck::cast(Packed { $($field: self.$field,)* })
            }
        }
    };
}

record! {
    /// The sender's own key for this tensor: unique within one graph, never 0 there.
    id: u64,
    /// Element type, by its number.
    dtype: u32,
    /// Handle of the buffer that holds it; 0 if it lives on no buffer of this server.
    buffer: u64,
    /// Elements per dimension, innermost first.
    ne: [u32; 4],
    /// Strides in bytes; the sender keeps only the low 32 bits.
    nb: [u32; 4],
    /// Op, by its number.
    op: u32,
    /// The op's parameters, in a layout of its own.
    op_params: [i32; 16],
    /// Bits, see the `FLAG_` constants.
    flags: i32,
    /// Ids of the sources; 0 where there is none.
    src: [u64; 10],
    /// Id of the tensor that this one is a view of, or 0.
    view_src: u64,
    /// Byte offset into `view_src`.
    view_offs: u64,
    /// Address inside the buffer, on the scale of BUFFER_GET_BASE.
    data: u64,
    /// NUL-terminated name, for messages only.
    name: [u8; MAX_NAME],
    /// How many nodes of the sender's whole graph read this tensor.
    use_count: i32,
}

const _: () = assert!(size_of::<Packed>() == TENSOR_RECORD);

impl TensorRecord {
    /// Read by the user after a run: must be written out, whatever is fused.
    pub const FLAG_OUTPUT: i32 = 2;
    /// A listed node without this flag is not computed.
    pub const FLAG_COMPUTE: i32 = 16;

    /// The name up to its first NUL, invalid UTF-8 replaced.
    pub fn name(&self) -> Cow<'_, str> {
        let end = self.name.iter().position(|&byte| byte == 0).unwrap_or(self.name.len());
        String::from_utf8_lossy(&self.name[..end])
    }
}

impl Field for TensorRecord {
    const SIZE: u64 = TENSOR_RECORD as u64;

    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        r.array(what).map(TensorRecord::decode)
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.encode());
    }
}
