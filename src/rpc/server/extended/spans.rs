//! Spans: how requests of the extension name a part of a buffer.

use super::error::ExtendedError;
use crate::device::Region;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::handle_table::HandleTable;
use crate::rpc::wire::ext::Span;

/// The region that a span names, with the position of its device.
pub(super) fn region(handles: &HandleTable, span: &Span) -> Result<(u32, Region), SessionError> {
    let entry = handles.get(span.buffer)?;
    let region = entry.buffer.region(span.offset, span.len);
    let outside = |_| ExtendedError::Span { offset: span.offset, len: span.len, size: entry.buffer.bytes() };
    Ok((entry.device, region.map_err(outside)?))
}
