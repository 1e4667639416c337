//! Handle table: maps a session's buffer handles and virtual addresses to device buffers. A client never sees a real pointer,
//! and cannot name a buffer of another session.

use std::collections::HashMap;

use super::request_error::RequestError;
use crate::device::{Buffer, Region};
use crate::graph::validate::widen_strides;
use crate::rpc::wire::TensorRecord;
use crate::tensor::{DType, TensorDesc};

/// First virtual address. Large, so that a miscalculated address, such as a bare offset, is not valid by chance.
const FIRST_BASE: u64 = 1 << 44;

/// Virtual addresses of buffers are multiples of this, or of their device's alignment if that is larger. Bytes.
const BASE_ALIGNMENT: u64 = 4096;

/// Guard gap of unused addresses after each buffer, in bytes: an address past the end belongs to no buffer.
const GUARD_BYTES: u64 = 1 << 16;

/// A buffer of a session.
pub(in crate::rpc::server) struct BufferEntry {
    /// Position of its device.
    pub(in crate::rpc::server) device: u32,
    /// Its virtual address.
    pub(in crate::rpc::server) base: u64,
    pub(in crate::rpc::server) buffer: Buffer,
}

/// The buffers of a session. Handles and addresses are never reused, so that equal messages name equal buffers.
pub(in crate::rpc::server) struct HandleTable {
    entries: HashMap<u64, BufferEntry>,
    next_handle: u64,
    next_base: u64,
}

/// A tensor that lies completely inside a buffer of the session.
pub(in crate::rpc::server) struct LocatedTensor<'a> {
    pub(in crate::rpc::server) entry: &'a BufferEntry,
    pub(in crate::rpc::server) desc: TensorDesc,
    /// Offset of the tensor in the buffer, in bytes.
    pub(in crate::rpc::server) start: u64,
}

impl HandleTable {
    pub(in crate::rpc::server) fn new() -> HandleTable {
        HandleTable { entries: HashMap::new(), next_handle: 1, next_base: FIRST_BASE }
    }

    pub(in crate::rpc::server) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Adds a buffer and returns its handle. `None` if the virtual addresses are exhausted.
    pub(in crate::rpc::server) fn insert(&mut self, device: u32, alignment: u64, buffer: Buffer) -> Option<u64> {
        let base = self.next_base.checked_next_multiple_of(alignment.max(BASE_ALIGNMENT))?;
        self.next_base = base.checked_add(buffer.bytes())?.checked_add(GUARD_BYTES)?;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.entries.insert(handle, BufferEntry { device, base, buffer });
        Some(handle)
    }

    pub(in crate::rpc::server) fn get(&self, handle: u64) -> Result<&BufferEntry, RequestError> {
        self.entries.get(&handle).ok_or(RequestError::NoSuchBuffer(handle))
    }

    pub(in crate::rpc::server) fn remove(&mut self, handle: u64) -> Result<BufferEntry, RequestError> {
        self.entries.remove(&handle).ok_or(RequestError::NoSuchBuffer(handle))
    }

    /// Resolves the virtual address of a tensor's first byte to its buffer and the offset in it.
    ///
    /// # Errors
    /// No buffer has the record's handle, or the address is outside the buffer.
    pub(in crate::rpc::server) fn resolve_address(
        &self,
        record: &TensorRecord,
    ) -> Result<(&BufferEntry, u64), RequestError> {
        let entry = self.get(record.buffer)?;
        let size = entry.buffer.bytes();
        match record.data.checked_sub(entry.base) {
            Some(start) if start <= size => Ok((entry, start)),
            _ => Err(RequestError::AddressOutsideBuffer { data: record.data, base: entry.base, size }),
        }
    }

    /// Resolves a tensor and checks that all of its bytes lie inside its buffer.
    ///
    /// # Errors
    /// As [`HandleTable::resolve_address`]; an invalid tensor; a tensor that reaches past its buffer.
    pub(in crate::rpc::server) fn locate(&self, record: &TensorRecord) -> Result<LocatedTensor<'_>, RequestError> {
        let (entry, start) = self.resolve_address(record)?;
        let desc = tensor_desc(record)?;
        let located = LocatedTensor { entry, desc, start };
        located.region(0, desc.extent() as u64)?;
        Ok(located)
    }
}

impl LocatedTensor<'_> {
    /// Bytes `offset..offset + len`, counted from the tensor's start. They must lie inside the buffer, but may lie past the
    /// tensor's end, in its padding.
    pub(in crate::rpc::server) fn region(&self, offset: u64, len: u64) -> Result<Region, RequestError> {
        let outside =
            || RequestError::RangeOutsideBuffer { start: self.start, offset, len, size: self.entry.buffer.bytes() };
        let start = self.start.checked_add(offset).ok_or_else(outside)?;
        self.entry.buffer.region(start, len).map_err(|_| outside())
    }
}

/// Type, shape and strides of a tensor record.
///
/// # Errors
/// An unknown type, or a shape that no tensor can have.
pub(in crate::rpc::server) fn tensor_desc(record: &TensorRecord) -> Result<TensorDesc, RequestError> {
    let dtype = DType::from_wire(record.dtype).ok_or(RequestError::UnknownType(record.dtype))?;
    let ne = record.ne.map(|n| n as usize);
    Ok(TensorDesc::strided(dtype, ne, widen_strides(dtype, ne, record.nb))?)
}
