//! Spans: the byte ranges of buffers that requests of the extensions name.

use super::error::ExtendedError;
use crate::device::Region;
use crate::rpc::server::session::failure::SessionError;
use crate::rpc::server::session::handle_table::HandleTable;
use crate::rpc::wire::ext::BufferSpan;

/// Resolves a span to its device's index and the region of the buffer.
///
/// # Errors
/// An unknown buffer handle, or [`ExtendedError::SpanOutOfBounds`].
pub(super) fn resolve_span(handles: &HandleTable, span: &BufferSpan) -> Result<(u32, Region), SessionError> {
    let entry = handles.get(span.buffer)?;
    let region = entry.buffer.region(span.offset, span.len);
    let outside = |_| ExtendedError::SpanOutOfBounds { offset: span.offset, len: span.len, size: entry.buffer.bytes() };
    Ok((entry.device, region.map_err(outside)?))
}
