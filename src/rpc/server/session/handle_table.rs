//! What a session's handles and addresses stand for. A client never sees a real pointer, nor another client's buffer.

use std::collections::HashMap;

use super::request_error::RequestError;
use crate::device::{Buffer, Region};
use crate::graph::validate::widen_strides;
use crate::rpc::wire::TensorRecord;
use crate::tensor::{DType, TensorDesc};

/// The first virtual address: far from anything that a miscalculated one could hit by chance.
const FIRST_BASE: u64 = 1 << 44;

/// Buffers start at multiples of this, or of their device's alignment where that is larger.
const BASE_ALIGNMENT: u64 = 4096;

/// Addresses left free behind each buffer, so that one past its end is nobody's.
const GUARD: u64 = 1 << 16;

/// A buffer of a session.
pub(in crate::rpc::server) struct Entry {
    /// The device it lies on, by its position.
    pub(in crate::rpc::server) device: u32,
    /// Its virtual address.
    pub(in crate::rpc::server) base: u64,
    pub(in crate::rpc::server) buffer: Buffer,
}

/// A session's buffers. Handles and addresses are never used twice.
pub(in crate::rpc::server) struct HandleTable {
    entries: HashMap<u64, Entry>,
    next_handle: u64,
    next_base: u64,
}

/// A tensor that lies inside a buffer of the session.
pub(in crate::rpc::server) struct Located<'a> {
    pub(in crate::rpc::server) entry: &'a Entry,
    pub(in crate::rpc::server) desc: TensorDesc,
    /// Bytes from the buffer's start.
    pub(in crate::rpc::server) start: u64,
}

impl HandleTable {
    pub(in crate::rpc::server) fn new() -> HandleTable {
        HandleTable { entries: HashMap::new(), next_handle: 1, next_base: FIRST_BASE }
    }

    pub(in crate::rpc::server) fn len(&self) -> usize {
        self.entries.len()
    }

    /// A handle for a buffer; `None` when the addresses are used up.
    pub(in crate::rpc::server) fn insert(&mut self, device: u32, alignment: u64, buffer: Buffer) -> Option<u64> {
        let base = self.next_base.checked_next_multiple_of(alignment.max(BASE_ALIGNMENT))?;
        self.next_base = base.checked_add(buffer.bytes())?.checked_add(GUARD)?;
        let handle = self.next_handle;
        self.next_handle += 1;
        self.entries.insert(handle, Entry { device, base, buffer });
        Some(handle)
    }

    pub(in crate::rpc::server) fn get(&self, handle: u64) -> Result<&Entry, RequestError> {
        self.entries.get(&handle).ok_or(RequestError::Buffer(handle))
    }

    pub(in crate::rpc::server) fn remove(&mut self, handle: u64) -> Result<Entry, RequestError> {
        self.entries.remove(&handle).ok_or(RequestError::Buffer(handle))
    }

    /// The buffer of a record's first byte, and that byte's distance from the buffer's start.
    pub(in crate::rpc::server) fn place(&self, record: &TensorRecord) -> Result<(&Entry, u64), RequestError> {
        let entry = self.get(record.buffer)?;
        let size = entry.buffer.bytes();
        match record.data.checked_sub(entry.base) {
            Some(start) if start <= size => Ok((entry, start)),
            _ => Err(RequestError::Address { data: record.data, base: entry.base, size }),
        }
    }

    /// A tensor that must lie in a buffer of the session from its first byte to its last.
    pub(in crate::rpc::server) fn locate(&self, record: &TensorRecord) -> Result<Located<'_>, RequestError> {
        let (entry, start) = self.place(record)?;
        let desc = desc(record)?;
        let located = Located { entry, desc, start };
        located.region(0, desc.extent() as u64)?;
        Ok(located)
    }
}

impl Located<'_> {
    /// Bytes `offset..offset + len` of the tensor, inside its buffer but possibly past its end: padding.
    pub(in crate::rpc::server) fn region(&self, offset: u64, len: u64) -> Result<Region, RequestError> {
        let outside = || RequestError::Range { start: self.start, offset, len, size: self.entry.buffer.bytes() };
        let start = self.start.checked_add(offset).ok_or_else(outside)?;
        self.entry.buffer.region(start, len).map_err(|_| outside())
    }
}

/// Type, shape and strides of a record.
pub(in crate::rpc::server) fn desc(record: &TensorRecord) -> Result<TensorDesc, RequestError> {
    let dtype = DType::from_wire(record.dtype).ok_or(RequestError::Type(record.dtype))?;
    let ne = record.ne.map(|n| n as usize);
    Ok(TensorDesc::strided(dtype, ne, widen_strides(dtype, ne, record.nb))?)
}
