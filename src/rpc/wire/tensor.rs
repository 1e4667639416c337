//! Tensor record: description of a tensor on the wire, 296 packed bytes.

use std::borrow::Cow;

use bytemuck::{Pod, Zeroable};

use super::codec::{Field, Reader, WireError};

/// Length of a tensor record in bytes.
pub const TENSOR_RECORD: usize = 296;

/// Length of the name field of a record in bytes, including the final NUL.
pub const MAX_NAME: usize = 64;

/// Generates from one list of fields the decoded struct and the packed struct with the layout of the wire.
macro_rules! record {
    ($($(#[$doc:meta])* $field:ident: $ty:ty,)*) => {
        /// A peer's description of a tensor. All fields are unchecked.
        #[derive(Clone, Debug, PartialEq)]
        pub struct TensorRecord {
            $($(#[$doc])* pub $field: $ty,)*
        }

        /// An encoded record, whose fields can be changed.
        #[derive(Clone, Copy, Pod, Zeroable)]
        #[repr(C, packed)]
        pub(super) struct PackedRecord {
            $(pub(super) $field: $ty,)*
        }

        // Casts between arrays of equal size compile to plain loads, which matters because graphs have thousands of records.
        impl TensorRecord {
            /// Decodes a record. Any 296 bytes are a record; graph validation checks the values of the fields.
            pub fn decode(bytes: &[u8; TENSOR_RECORD]) -> TensorRecord {
                let packed: PackedRecord = bytemuck::cast(*bytes);
                TensorRecord { $($field: packed.$field,)* }
            }

            /// Encodes the record.
            pub fn encode(&self) -> [u8; TENSOR_RECORD] {
                bytemuck::cast(PackedRecord { $($field: self.$field,)* })
            }
        }
    };
}

record! {
    /// Id of the tensor, chosen by the sender: unique within a graph, and not 0 there.
    id: u64,
    /// Number of the element type.
    dtype: u32,
    /// Handle of the tensor's buffer; 0 if the tensor has no buffer on this server.
    buffer: u64,
    /// Elements per dimension, fastest first.
    ne: [u32; 4],
    /// Strides in bytes, fastest dimension first, truncated to their low 32 bits by the sender.
    nb: [u32; 4],
    /// Number of the op.
    op: u32,
    /// Parameters of the op; each op has its own layout.
    op_params: [i32; 16],
    /// Flags: see the `FLAG_` constants.
    flags: i32,
    /// Ids of the sources; 0 for an absent source.
    src: [u64; 10],
    /// Id of the tensor of which this tensor is a view; 0 if it is no view.
    view_src: u64,
    /// Offset of the view in `view_src`, in bytes.
    view_offs: u64,
    /// Address of the first byte, in the address space of BUFFER_GET_BASE.
    data: u64,
    /// Name, terminated by NUL; used only in messages.
    name: [u8; MAX_NAME],
    /// Number of nodes in the sender's whole graph that read this tensor.
    use_count: i32,
}

const _: () = assert!(size_of::<PackedRecord>() == TENSOR_RECORD);

impl TensorRecord {
    /// The tensor is an output of the graph: it must be written to memory even if its node is fused with others.
    pub const FLAG_OUTPUT: i32 = 2;
    /// The node must be computed. A node without this flag is skipped.
    pub const FLAG_COMPUTE: i32 = 16;

    /// The name up to its first NUL, with invalid UTF-8 replaced.
    pub fn name(&self) -> Cow<'_, str> {
        let end = self.name.iter().position(|&byte| byte == 0).unwrap_or(self.name.len());
        String::from_utf8_lossy(&self.name[..end])
    }
}

impl PackedRecord {
    /// The record at the start of `bytes`.
    pub(super) fn at(bytes: &mut [u8]) -> &mut PackedRecord {
        bytemuck::from_bytes_mut(&mut bytes[..TENSOR_RECORD])
    }

    /// Removes the sources from number `first` on.
    pub(super) fn remove_sources_from(&mut self, first: usize) {
        let mut sources = self.src;
        sources[first..].fill(0);
        self.src = sources;
    }
}

impl Field<'_> for TensorRecord {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        r.array(what).map(TensorRecord::decode)
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.encode());
    }
}
