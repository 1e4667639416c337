//! Fields of requests: spans of buffers, shapes, tokens, texts, and how each is decoded and encoded.

use super::super::codec::{Field, Reader, WireError};
use super::super::messages::messages;
use super::command::{GROUP_SECRET_BYTES, TRANSFER_TOKEN_BYTES};
use crate::tensor::{ByteRuns, ByteRunsError};

/// A transfer token: 16 random bytes that entitle another server to write one region of the session that issued it.
pub type TransferToken = [u8; TRANSFER_TOKEN_BYTES];

/// The secret of a group: 16 random bytes, which authorise a server to attach to the group.
pub type GroupSecret = [u8; GROUP_SECRET_BYTES];

/// Type number that stands for a missing [`TensorShape`].
pub const NO_TENSOR: u32 = u32::MAX;

messages! {
    derive(Clone, Copy, Debug, PartialEq, Eq)

    /// A contiguous part of a buffer.
    BufferSpan {
        /// Handle of the buffer, from ALLOC_BUFFER.
        buffer: u64,
        /// Offset from the start of the buffer, in bytes.
        offset: u64,
        /// Length in bytes.
        len: u64,
    }
}

/// Type and shape of a contiguous tensor that fills a span exactly. A server may lay such a tensor out for its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorShape {
    /// Number of the element type.
    pub dtype: u32,
    /// Elements per dimension, fastest first.
    pub ne: [u32; 4],
}

// `TensorShape` is no field by itself, so this is not the optional last field of a message.
impl Field<'_> for Option<TensorShape> {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        let dtype = r.u32(what)?;
        let ne = [r.u32(what)?, r.u32(what)?, r.u32(what)?, r.u32(what)?];
        Ok((dtype != NO_TENSOR).then_some(TensorShape { dtype, ne }))
    }

    fn write(&self, out: &mut Vec<u8>) {
        let TensorShape { dtype, ne } = self.unwrap_or(TensorShape { dtype: NO_TENSOR, ne: [0; 4] });
        dtype.write(out);
        ne.iter().for_each(|n| n.write(out));
    }
}

/// Offset, length of a run, stride and number of the runs. The decoder checks that they do not overlap and that no offset
/// overflows. The receiver compares them with the tensor.
impl Field<'_> for ByteRuns {
    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        let (offset, run_bytes, stride, count) = (r.u64(what)?, r.u64(what)?, r.u64(what)?, r.u64(what)?);
        ByteRuns::new(offset, run_bytes, stride, count).map_err(|e| match e {
            ByteRunsError::Overlap { stride: have, .. } => {
                WireError::BadValue { what, expected: "a stride of at least the bytes of a run", have }
            }
            _ => WireError::BadValue { what, expected: "a number of runs that end below 2^64 bytes", have: count },
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        [self.offset(), self.run_bytes(), self.stride(), self.count()].iter().for_each(|n| n.write(out));
    }
}

/// A list of spans, borrowed from the encoded message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSpans<'a>(&'a [[u8; 24]]);

impl<'a> BufferSpans<'a> {
    /// A list to send, of spans that [`BufferSpans::encode`] has encoded.
    pub const fn new(spans: &'a [[u8; 24]]) -> BufferSpans<'a> {
        BufferSpans(spans)
    }

    /// Encodes one span.
    pub fn encode(span: &BufferSpan) -> [u8; 24] {
        bytemuck::cast([span.buffer, span.offset, span.len].map(u64::to_le_bytes))
    }

    /// Number of spans.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the list is empty.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Decodes the spans in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = BufferSpan> + use<'a> {
        self.0.iter().map(|&bytes| {
            let [buffer, offset, len] = bytemuck::cast::<_, [[u8; 8]; 3]>(bytes).map(u64::from_le_bytes);
            BufferSpan { buffer, offset, len }
        })
    }
}

/// The addresses of the servers of a group's ranks, by rank, borrowed from the encoded message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankAddresses<'a>(&'a [u8]);

impl<'a> RankAddresses<'a> {
    /// Encodes the addresses of a list to send.
    pub fn encode<'b>(addresses: impl IntoIterator<Item = &'b str>) -> Vec<u8> {
        let mut out = Vec::new();
        addresses.into_iter().for_each(|address| address.write(&mut out));
        out
    }

    /// A list to send, of addresses that [`RankAddresses::encode`] has encoded.
    pub const fn new(encoded: &'a [u8]) -> RankAddresses<'a> {
        RankAddresses(encoded)
    }

    /// The addresses in order. Empty: the receiving server itself.
    pub fn iter(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let mut r = Reader::new(self.0);
        std::iter::from_fn(move || Field::read(&mut r, "address").ok())
    }
}

/// Last field of its message: all remaining bytes are spans.
impl<'a> Field<'a> for BufferSpans<'a> {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError> {
        let (spans, rest) = r.rest().as_chunks();
        if rest.is_empty() {
            return Ok(BufferSpans(spans));
        }
        Err(WireError::Truncated { what, need: 24, have: rest.len() as u64 })
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.0.as_flattened());
    }
}

/// Last field of its message: all remaining bytes are texts.
impl<'a> Field<'a> for RankAddresses<'a> {
    fn read(r: &mut Reader<'a>, what: &'static str) -> Result<Self, WireError> {
        let encoded = r.rest();
        let mut texts = Reader::new(encoded);
        while texts.remaining() > 0 {
            <&str>::read(&mut texts, what)?;
        }
        Ok(RankAddresses(encoded))
    }

    fn write(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.0);
    }
}
