//! What a client asks in the extensions.

use super::super::codec::{Field, Reader, WireError};
use super::super::command::Limits;
use super::super::graph::GraphCompute;
use super::super::request::Body;
use super::command::{ExtCommand, ExtHeader, TICKET};
use super::{text, write_text};

/// What a ticket's holder may do once: put bytes where they were expected.
pub type Ticket = [u8; TICKET];

/// The type number of a [`Shape`] that is none.
pub const NO_TENSOR: u32 = u32::MAX;

/// Bytes of a WRITE before its data.
pub const WRITE_HEAD: usize = 4 + 24 + 20;

/// Bytes of a PUT before its data.
pub const PUT_HEAD: usize = TICKET;

/// A part of a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// The buffer's handle.
    pub buffer: u64,
    /// Bytes from its start.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

impl Field for Span {
    const SIZE: u64 = 24;

    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        Ok(Span { buffer: r.u64(what)?, offset: r.u64(what)?, len: r.u64(what)? })
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.buffer.write(out);
        self.offset.write(out);
        self.len.write(out);
    }
}

/// Type and shape of the contiguous tensor that a span is all of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The type's number.
    pub dtype: u32,
    /// Its dimensions.
    pub ne: [u32; 4],
}

impl Field for Option<Shape> {
    const SIZE: u64 = 20;

    fn read(r: &mut Reader<'_>, what: &'static str) -> Result<Self, WireError> {
        let dtype = r.u32(what)?;
        let ne = [r.u32(what)?, r.u32(what)?, r.u32(what)?, r.u32(what)?];
        Ok((dtype != NO_TENSOR).then_some(Shape { dtype, ne }))
    }

    fn write(&self, out: &mut Vec<u8>) {
        let Shape { dtype, ne } = self.unwrap_or(Shape { dtype: NO_TENSOR, ne: [0; 4] });
        dtype.write(out);
        ne.iter().for_each(|n| n.write(out));
    }
}

/// Spans, borrowed from a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Spans<'a>(&'a [[u8; 24]]);

impl<'a> Spans<'a> {
    /// Spans to send, as [`Spans::encode`] makes them.
    pub const fn new(spans: &'a [[u8; 24]]) -> Spans<'a> {
        Spans(spans)
    }

    /// A span's bytes.
    pub fn encode(span: &Span) -> [u8; 24] {
        let mut bytes = [0; 24];
        for (to, n) in bytes.as_chunks_mut::<8>().0.iter_mut().zip([span.buffer, span.offset, span.len]) {
            *to = n.to_le_bytes();
        }
        bytes
    }

    /// How many.
    pub const fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The spans in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Span> + use<'a> {
        self.0.iter().map(|bytes| {
            let [buffer, offset, len] = [0, 8, 16].map(|at| {
                let word = bytes.get(at..at + 8).and_then(|word| word.try_into().ok());
                u64::from_le_bytes(word.unwrap_or([0; 8])) // 24 bytes are three words
            });
            Span { buffer, offset, len }
        })
    }
}

/// Tickets, one for each 256 KiB of a span, borrowed from a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TicketList<'a>(pub &'a [Ticket]);

/// Requests that are a fixed list of fields.
macro_rules! fixed {
    ($($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $ty,)*
        }

        impl Body<'_> for $name {
            fn read(_r: &mut Reader<'_>, _: &Limits) -> Result<Self, WireError> {
                Ok($name { $($field: Field::read(_r, stringify!($field))?,)* })
            }

            fn size(&self) -> u64 {
                0 $(+ <$ty as Field>::SIZE)*
            }

            fn write(&self, _out: &mut Vec<u8>) {
                $(self.$field.write(_out);)*
            }
        }
    )*};
}

fixed! {
    /// Takes the extensions up, in a revision that the server's HELLO has named. Answered with [`super::Answer::Greet`].
    Greet {
        /// The revision.
        revision: u32,
    }

    /// Opens a queue. No reply.
    OpenQueue {
        /// A number that no open queue of the session has, chosen by the client.
        queue: u32,
        /// Device by its position on the endpoint.
        device: u32,
    }

    /// Ends a queue: what it has not started is abandoned. No reply.
    CloseQueue {
        /// The queue.
        queue: u32,
    }

    /// Runs a kept graph. No reply.
    RunGraph {
        /// A queue of the graph's device.
        queue: u32,
        /// The graph's number.
        graph: u64,
    }

    /// The head of a WRITE, which has as many bytes as the span says behind it. No reply.
    WriteHead {
        /// A queue of the buffer's device.
        queue: u32,
        /// Where to.
        span: Span,
        /// What it is, where it is all of a contiguous tensor.
        shape: Option<Shape>,
    }

    /// Fills a span. No reply.
    Fill {
        /// A queue of the buffer's device.
        queue: u32,
        /// What to fill.
        span: Span,
        /// With what.
        value: u8,
    }

    /// Copies between two buffers of the server, on any of its devices; both spans are of one length. No reply.
    Copy {
        /// A queue of the destination's device.
        queue: u32,
        /// From.
        src: Span,
        /// To.
        dst: Span,
    }

    /// Gives a number to the moment after all that the queue was sent so far. No reply.
    Mark {
        /// The queue.
        queue: u32,
        /// Above that of every earlier mark of the queue.
        number: u64,
    }

    /// Makes what the queue is sent from now on wait for a mark of another queue of the session. No reply.
    Wait {
        /// The queue that waits.
        queue: u32,
        /// The queue that is waited for.
        of: u32,
        /// Its mark, which has been made.
        number: u64,
    }

    /// Asks for a notice when a mark is reached. No reply.
    Ask {
        /// The queue.
        queue: u32,
        /// Its mark, which has been made.
        number: u64,
    }

    /// Asks for tickets. Answered with [`super::Answer::Tickets`].
    Tickets {
        /// How many, 1 to 256.
        count: u32,
    }

    /// Asks how the server is. Answered with [`super::Answer::Ping`].
    Ping {}
}

/// Messages with parts of any length: each field with how it is read, measured and written.
macro_rules! varied {
    ($($(#[$doc:meta])* $name:ident $(<$life:lifetime>)? { $($(#[$field_doc:meta])* $field:ident: $ty:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name $(<$life>)? {
            $($(#[$field_doc])* pub $field: $ty,)*
        }

        impl<'a> Body<'a> for $name $(<$life>)? {
            fn read(r: &mut Reader<'a>, limits: &Limits) -> Result<Self, WireError> {
                Ok($name { $($field: Part::take(r, stringify!($field), limits)?,)* })
            }

            fn size(&self) -> u64 {
                0 $(+ Part::bytes(&self.$field))*
            }

            fn write(&self, out: &mut Vec<u8>) {
                $(Part::put(&self.$field, out);)*
            }
        }
    )*};
}

varied! {
    /// Keeps a graph whose tensors lie in buffers of the session, as those of a GRAPH_COMPUTE do. No reply.
    KeepGraph<'a> {
        /// A number that no graph of the session has had.
        id: u64,
        /// The graph, with its device.
        graph: GraphCompute<'a>,
    }

    /// Reads spans. Answered, when the queue has come so far, with a notice that has their bytes one after the other.
    Read<'a> {
        /// A queue of the buffers' device.
        queue: u32,
        /// A number for the notice.
        id: u64,
        /// What to read.
        spans: Spans<'a>,
    }

    /// Asks whether a device runs the one node of a graph, whose tensors lie nowhere. Answered with [`super::Answer::Support`].
    Support<'a> {
        /// The graph.
        graph: GraphCompute<'a>,
    }

    /// Fills a span with a tensor's bytes from the server's own disk. Answered with [`super::Answer::Load`], in turn, when they are
    /// on their way or nothing was found: the span then holds what it held, or zeros.
    Load<'a> {
        /// A queue of the buffer's device.
        queue: u32,
        /// Where to.
        span: Span,
        /// What it is.
        shape: Option<Shape>,
        /// BLAKE3 of the bytes.
        digest: [u8; 32],
        /// The name that the tensor has in its file: where to look first.
        name: &'a str,
    }

    /// Says where bytes go that other servers will put. What the queue is sent later waits for them. No reply.
    Receive<'a> {
        /// A queue of the buffer's device.
        queue: u32,
        /// Where to.
        span: Span,
        /// Tickets that this session was issued, one for each 256 KiB of the span.
        tickets: TicketList<'a>,
    }

    /// Reads a span and puts it to another server. No reply.
    Send<'a> {
        /// A queue of the buffer's device.
        queue: u32,
        /// From where.
        span: Span,
        /// Tickets that the other server has issued, one for each 256 KiB of the span.
        tickets: TicketList<'a>,
        /// The other server: `host:port`.
        address: &'a str,
    }

    /// Asks whether this server would dial another one, and does so. Answered with [`super::Answer::Reach`].
    Reach<'a> {
        /// The other server: `host:port`.
        address: &'a str,
    }

    /// Puts the bytes of a ticket. No reply.
    Put<'a> {
        /// The ticket.
        ticket: Ticket,
        /// The bytes.
        data: &'a [u8],
    }
}

/// A part of a message.
pub(super) trait Part<'a>: Sized {
    fn take(r: &mut Reader<'a>, what: &'static str, limits: &Limits) -> Result<Self, WireError>;
    fn bytes(&self) -> u64;
    fn put(&self, out: &mut Vec<u8>);
}

macro_rules! plain_parts {
    ($($ty:ty)*) => {$(
        impl<'a> Part<'a> for $ty {
            fn take(r: &mut Reader<'a>, what: &'static str, _: &Limits) -> Result<Self, WireError> {
                Field::read(r, what)
            }

            fn bytes(&self) -> u64 {
                <$ty as Field>::SIZE
            }

            fn put(&self, out: &mut Vec<u8>) {
                Field::write(self, out);
            }
        }
    )*};
}

plain_parts! { u32 u64 Span Option<Shape> [u8; 32] Ticket }

impl<'a> Part<'a> for GraphCompute<'a> {
    fn take(r: &mut Reader<'a>, _: &'static str, limits: &Limits) -> Result<Self, WireError> {
        Body::read(r, limits)
    }

    fn bytes(&self) -> u64 {
        Body::size(self)
    }

    fn put(&self, out: &mut Vec<u8>) {
        Body::write(self, out);
    }
}

/// As many as are left.
impl<'a> Part<'a> for Spans<'a> {
    fn take(r: &mut Reader<'a>, what: &'static str, _: &Limits) -> Result<Self, WireError> {
        let (spans, rest) = r.rest().as_chunks();
        if rest.is_empty() {
            return Ok(Spans(spans));
        }
        Err(WireError::Truncated { what, need: 24, have: rest.len() as u64 })
    }

    fn bytes(&self) -> u64 {
        self.0.as_flattened().len() as u64
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self.0.as_flattened());
    }
}

impl<'a> Part<'a> for TicketList<'a> {
    fn take(r: &mut Reader<'a>, what: &'static str, _: &Limits) -> Result<Self, WireError> {
        let count = r.u32(what)?;
        Ok(TicketList(r.arrays(what, count)?))
    }

    fn bytes(&self) -> u64 {
        4 + self.0.as_flattened().len() as u64
    }

    fn put(&self, out: &mut Vec<u8>) {
        (self.0.len() as u32).write(out); // of the pieces of one buffer
        out.extend_from_slice(self.0.as_flattened());
    }
}

impl<'a> Part<'a> for &'a str {
    fn take(r: &mut Reader<'a>, what: &'static str, _: &Limits) -> Result<Self, WireError> {
        text(r, what)
    }

    fn bytes(&self) -> u64 {
        super::text_size(self)
    }

    fn put(&self, out: &mut Vec<u8>) {
        write_text(self, out);
    }
}

/// As many as are left.
impl<'a> Part<'a> for &'a [u8] {
    fn take(r: &mut Reader<'a>, _: &'static str, _: &Limits) -> Result<Self, WireError> {
        Ok(r.rest())
    }

    fn bytes(&self) -> u64 {
        self.len() as u64
    }

    fn put(&self, out: &mut Vec<u8>) {
        out.extend_from_slice(self);
    }
}

macro_rules! requests {
    ($($name:ident $(<$life:lifetime>)? = $command:ident)*) => {
        /// Any request of the extensions but WRITE, whose data streams: see [`WriteHead`].
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[allow(missing_docs)] // each variant is the struct of its name
        #[non_exhaustive]
        pub enum ExtRequest<'a> {
            $($name($name $(<$life>)?),)*
        }

        impl<'a> ExtRequest<'a> {
            /// Reads the body of a request; of a WRITE, its head. Its length is expected to have passed
            /// [`ExtHeader::body_len`].
            ///
            /// # Errors
            /// [`WireError`], naming the first field that is missing, wrong or over `limits`.
            pub fn decode(command: ExtCommand, body: &'a [u8], limits: &Limits) -> Result<ExtRequest<'a>, WireError> {
                let mut r = Reader::new(body);
                let request = match command {
                    $(ExtCommand::$command => ExtRequest::$name(Body::read(&mut r, limits)?),)*
                };
                r.finish(command.name())?;
                Ok(request)
            }

            /// The request's command.
            pub const fn command(&self) -> ExtCommand {
                match self { $(ExtRequest::$name(_) => ExtCommand::$command,)* }
            }

            /// Appends the whole frame: header and body; of a WRITE, all before its data.
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(ExtRequest::$name(body) => {
                        let data = if let ExtRequest::WriteHead(head) = self { head.span.len } else { 0 };
                        let size = body.size().saturating_add(data); // no buffer is so large
                        let header = ExtHeader { command: ExtCommand::$command, size };
                        out.extend_from_slice(&header.encode());
                        body.write(out);
                    })*
                }
            }
        }
    };
}

requests! {
    Greet = Greet OpenQueue = OpenQueue CloseQueue = CloseQueue KeepGraph<'a> = KeepGraph RunGraph = RunGraph
    WriteHead = Write Read<'a> = Read Fill = Fill Copy = Copy Mark = Mark Wait = Wait Ask = Ask Support<'a> = Support
    Load<'a> = Load Tickets = Tickets Receive<'a> = Receive Send<'a> = Send Reach<'a> = Reach Put<'a> = Put Ping = Ping
}
