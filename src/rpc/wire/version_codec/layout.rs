//! Layout of the requests: the fields of each body, and which versions have them.

use super::{HelloForm, V3_0, V3_6_0Unflagged, V7_0, VersionCodec};
use crate::rpc::wire::{CAPS_BYTES, COMM_HOST, MAX_SRC, RpcCommand};

/// A field of a body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    /// Device. Servers before 3.0 have one.
    Device,
    /// Number of a stored graph.
    Uid,
    /// By which a client of SET_TENSOR requests that the server caches the data.
    CacheFlag,
    /// Transport capabilities.
    Caps,
    /// A tensor record.
    Record,
    /// Records of the sources of GET_ALLOC_SIZE.
    Sources,
    /// So many bytes, the same in all versions.
    Bytes(usize),
}

/// The fields of a request. After them are the data of an upload, and the counts, ids and records of a graph.
pub(super) const fn fields(command: RpcCommand) -> &'static [Field] {
    use Field::{Bytes, CacheFlag, Caps, Device, Record, Sources, Uid};
    const COMM_INIT_NUMBERS: usize = 3 * size_of::<u32>();
    match command {
        RpcCommand::AllocBuffer => &[Device, Bytes(8)],
        RpcCommand::GetAlignment | RpcCommand::GetMaxSize | RpcCommand::GetDeviceMemory | RpcCommand::CommFree => {
            &[Device]
        }
        RpcCommand::BufferGetBase | RpcCommand::FreeBuffer => &[Bytes(8)],
        RpcCommand::BufferClear => &[Bytes(8 + 1)],
        RpcCommand::SetTensor => &[Record, CacheFlag, Bytes(8)],
        RpcCommand::SetTensorHash | RpcCommand::GetTensor => &[Record, Bytes(2 * 8)],
        RpcCommand::CopyTensor => &[Record, Record],
        RpcCommand::GraphCompute | RpcCommand::GraphRecompute => &[Device, Uid],
        RpcCommand::InitTensor => &[Record],
        RpcCommand::GetAllocSize => &[Device, Record, Sources],
        RpcCommand::Hello => &[Caps],
        RpcCommand::DeviceCount => &[],
        RpcCommand::MemsetTensor => &[Record, Bytes(2 * 8 + 1)],
        RpcCommand::SetTensor2d | RpcCommand::GetTensor2d => &[Record, Bytes(4 * 8)],
        RpcCommand::CommInit => &[Device, Bytes(COMM_INIT_NUMBERS + COMM_HOST)],
        RpcCommand::CommAllreduce => &[Device, Record],
    }
}

impl VersionCodec {
    /// Length of a field in bytes, 0 if the version lacks it. `record_len`: length of a tensor record.
    pub(super) fn field_len(self, field: Field, record_len: usize) -> usize {
        let (present, len) = match field {
            Field::Device => (self >= V3_0, size_of::<u32>()),
            Field::Uid => (self.has_graph_uid(), size_of::<u64>()),
            Field::CacheFlag => (self >= V7_0, 1),
            Field::Caps => (self.hello_form() == HelloForm::Caps, CAPS_BYTES),
            Field::Record => (true, record_len),
            Field::Sources => (self >= V3_6_0Unflagged, MAX_SRC * record_len),
            Field::Bytes(len) => (true, len),
        };
        if present { len } else { 0 }
    }
}
