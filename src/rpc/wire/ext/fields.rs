//! Fields of requests: spans of buffers, shapes, tokens, texts, and how each is decoded and encoded.

use super::super::codec::{Field, Reader, WireError};
use super::super::command::Limits;
use super::super::graph::GraphCompute;
use super::super::request::Body;
use super::command::{GROUP_SECRET_BYTES, TRANSFER_TOKEN_BYTES};
use super::{text, text_size, write_text};
use crate::tensor::{ByteRuns, ByteRunsError};

/// A transfer token: 16 random bytes that entitle another server to write one region of the session that issued it.
pub type TransferToken = [u8; TRANSFER_TOKEN_BYTES];

/// The secret of a group: 16 random bytes, which authorise a server to attach to the group.
pub type GroupSecret = [u8; GROUP_SECRET_BYTES];

/// Type number that stands for a missing [`TensorShape`].
pub const NO_TENSOR: u32 = u32::MAX;

/// A contiguous part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferSpan {
    /// Handle of the buffer, from ALLOC_BUFFER.
    pub buffer: u64,
    /// Offset from the start of the buffer, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

impl Field for BufferSpan {
    const SIZE: u64 = 24;

    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        Ok(BufferSpan { buffer: r.u64(what)?, offset: r.u64(what)?, len: r.u64(what)? })
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.buffer.write(out);
        self.offset.write(out);
        self.len.write(out);
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

impl Field for Option<TensorShape> {
    const SIZE: u64 = 20;

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
impl Field for ByteRuns {
    const SIZE: u64 = 32;

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
        let mut bytes = [0; 24];
        for (to, n) in bytes.as_chunks_mut::<8>().0.iter_mut().zip([span.buffer, span.offset, span.len]) {
            *to = n.to_le_bytes();
        }
        bytes
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
        self.0.iter().map(|bytes| {
            let [buffer, offset, len] = [0, 8, 16].map(|at| {
                let word = bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
                u64::from_le_bytes(word.unwrap_or([0; 8])) // 24 bytes are three words
            });
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
        addresses.into_iter().for_each(|address| write_text(address, &mut out));
        out
    }

    /// A list to send, of addresses that [`RankAddresses::encode`] has encoded.
    pub const fn new(encoded: &'a [u8]) -> RankAddresses<'a> {
        RankAddresses(encoded)
    }

    /// The addresses in order. Empty: the receiving server itself.
    pub fn iter(&self) -> impl Iterator<Item = &'a str> + use<'a> {
        let mut r = Reader::new(self.0);
        std::iter::from_fn(move || text(&mut r, "address").ok())
    }
}

/// A field of a message, of fixed or variable length. `what` names the field in errors.
pub(super) trait MessageField<'a>: Sized {
    fn decode(r: &mut Reader<'a>, what: &'static str, limits: &Limits) -> Result<Self, WireError>;
    fn encoded_len(&self) -> u64;
    fn encode(&self, out: &mut Vec<u8>);
}

macro_rules! fixed_size_fields {
    ($($ty:ty)*) => {$(
        impl<'a> MessageField<'a> for $ty {
            fn decode(r: &mut Reader<'a>, what: &'static str, _: &Limits) -> Result<Self, WireError> {
                Field::read(r, what)
            }

            fn encoded_len(&self) -> u64 {
                <$ty as Field>::SIZE
            }

            fn encode(&self, out: &mut Vec<u8>) {
                Field::write(self, out);
            }
        }
    )*};
}

fixed_size_fields! { u32 u64 BufferSpan Option<TensorShape> [u8; 32] ByteRuns TransferToken }

impl<'a> MessageField<'a> for GraphCompute<'a> {
    fn decode(r: &mut Reader<'a>, _: &'static str, limits: &Limits) -> Result<Self, WireError> {
        Body::read(r, limits)
    }

    fn encoded_len(&self) -> u64 {
        Body::size(self)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        Body::write(self, out);
    }
}

/// Last field of its message: all remaining bytes are spans.
impl<'a> MessageField<'a> for BufferSpans<'a> {
    fn decode(r: &mut Reader<'a>, what: &'static str, _: &Limits) -> Result<Self, WireError> {
        let (spans, rest) = r.rest().as_chunks();
        if rest.is_empty() {
            return Ok(BufferSpans(spans));
        }
        Err(WireError::Truncated { what, need: 24, have: rest.len() as u64 })
    }

    fn encoded_len(&self) -> u64 {
        self.0.as_flattened().len() as u64
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.0.as_flattened());
    }
}

/// Last field of its message: all remaining bytes are texts.
impl<'a> MessageField<'a> for RankAddresses<'a> {
    fn decode(r: &mut Reader<'a>, what: &'static str, _: &Limits) -> Result<Self, WireError> {
        let encoded = r.rest();
        let mut texts = Reader::new(encoded);
        while texts.remaining() > 0 {
            text(&mut texts, what)?;
        }
        Ok(RankAddresses(encoded))
    }

    fn encoded_len(&self) -> u64 {
        self.0.len() as u64
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.0);
    }
}

impl<'a> MessageField<'a> for &'a str {
    fn decode(r: &mut Reader<'a>, what: &'static str, _: &Limits) -> Result<Self, WireError> {
        text(r, what)
    }

    fn encoded_len(&self) -> u64 {
        text_size(self)
    }

    fn encode(&self, out: &mut Vec<u8>) {
        write_text(self, out);
    }
}

/// Last field of its message: all remaining bytes.
impl<'a> MessageField<'a> for &'a [u8] {
    fn decode(r: &mut Reader<'a>, _: &'static str, _: &Limits) -> Result<Self, WireError> {
        Ok(r.rest())
    }

    fn encoded_len(&self) -> u64 {
        self.len() as u64
    }

    fn encode(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}
