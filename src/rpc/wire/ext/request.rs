//! Requests of the extensions: one struct per command, with its decoder and encoder.

use super::super::codec::{Field, Reader, WireError};
use super::super::command::Limits;
use super::super::frame::write_frame;
use super::super::graph::GraphCompute;
use super::super::messages::{messages, requests};
use super::command::{ExtCommand, TRANSFER_TOKEN_BYTES};
use super::fields::{BufferSpan, BufferSpans, GroupSecret, RankAddresses, TensorShape, TransferToken};
use crate::tensor::ByteRuns;

/// Length in bytes of a WRITE before its data.
pub const WRITE_HEAD: usize = 4 + 24 + 20;

/// Length in bytes of a PEER_WRITE before its data.
pub const PEER_WRITE_HEAD: usize = TRANSFER_TOKEN_BYTES + 8;

/// Length in bytes of a PUBLISH_PART before its data.
pub const PUBLISH_PART_HEAD: usize = 4 + 8 + 4 + 4 + 20 + 4 + 8;

messages! {
    derive(Clone, Copy, Debug, PartialEq, Eq)

    /// Enables the extensions, in the revision that the server offered in its reply to HELLO. Reply:
    /// [`super::ExtResponse::HelloExt`].
    HelloExt {
        /// Revision of the extensions.
        revision: u32,
    }

    /// Opens a queue. No reply.
    OpenQueue {
        /// Queue id, chosen by the client; no open queue of the session may have the same.
        queue: u32,
        /// Device, by its index in the server's list.
        device: u32,
    }

    /// Closes a queue and abandons its work that has not started. No reply.
    CloseQueue {
        /// Queue.
        queue: u32,
    }

    /// Runs a prepared graph. No reply.
    RunGraph {
        /// Queue, on the device of the graph.
        queue: u32,
        /// Id of the graph, from PREPARE_GRAPH.
        graph: u64,
    }

    /// Head of a WRITE, which writes bytes into a span. As many bytes as the span is long follow the head. No reply.
    WriteHead {
        /// Queue, on the device of the buffer.
        queue: u32,
        /// Destination.
        span: BufferSpan,
        /// The tensor that the bytes are, if it is contiguous and fills the span.
        shape: Option<TensorShape>,
    }

    /// Fills a span with one byte value. No reply.
    Fill {
        /// Queue, on the device of the buffer.
        queue: u32,
        /// Destination.
        span: BufferSpan,
        /// The byte to fill it with.
        value: u8,
    }

    /// COPY: copies between two spans of equal length, in buffers on any devices of this server. No reply.
    CopySpan {
        /// Queue, on the device of the destination.
        queue: u32,
        /// Source.
        src: BufferSpan,
        /// Destination.
        dst: BufferSpan,
    }

    /// Places a mark: a numbered point of the queue, reached when all work that was sent to the queue before it is done. No
    /// reply.
    Mark {
        /// Queue.
        queue: u32,
        /// Number of the mark; above the numbers of all earlier marks of the queue.
        number: u64,
    }

    /// Makes later work of a queue wait for a mark of another queue of the session. No reply.
    Wait {
        /// The waiting queue.
        queue: u32,
        /// The queue of the mark.
        other_queue: u32,
        /// Number of the mark, which must have been placed.
        number: u64,
    }

    /// Requests one MARK_REACHED notification, sent when the mark is reached. No reply.
    NotifyReached {
        /// Queue.
        queue: u32,
        /// Number of the mark, which must have been placed.
        number: u64,
    }

    /// Requests transfer tokens. Reply: [`super::ExtResponse::IssueTokens`].
    IssueTokens {
        /// Number of tokens, 1 to 256.
        count: u32,
    }

    /// Assigns a destination to the bytes that another server sends with PEER_WRITE. Later work of the queue waits for them. No
    /// reply.
    ReceiveFromPeer {
        /// Queue, on the device of the buffer.
        queue: u32,
        /// Destination.
        span: BufferSpan,
        /// A token that was issued to this session.
        token: TransferToken,
    }

    /// Checks that the server is alive. Reply: [`super::ExtResponse::Ping`].
    Ping {}

    /// Queries the state of the server. Reply: [`super::ExtResponse::Status`].
    Status {}

    /// Binds this connection to a group, as the one on which the sender sends the parts of its ranks. Sent by one server to
    /// another. Reply, once the ranks of the receiving server have joined: [`super::ExtResponse::AttachGroup`].
    AttachGroup {
        /// Secret of the group.
        secret: GroupSecret,
        /// The first of the sender's ranks.
        from: u32,
        /// The first of the receiver's ranks.
        to: u32,
    }

    /// Head of a PUBLISH_PART, which publishes the part of one of the sender's ranks in the group of the connection. The bytes
    /// of the part follow the head. No reply.
    PublishPartHead {
        /// The rank.
        rank: u32,
        /// Number of the collective in the group, from 0.
        round: u64,
        /// Number of the op.
        op: u32,
        /// Axis of ALL_GATHER and REDUCE_SCATTER, else 0.
        axis: u32,
        /// Type of the part, and shape of what all ranks have together.
        whole: Option<TensorShape>,
        /// Extent along the axis: of ALL_GATHER that of the part, of REDUCE_SCATTER that of the rank's piece. Else 0.
        extent: u32,
        /// Number of bytes that follow. For REDUCE_SCATTER these are the pieces of the receiver's ranks, otherwise the whole part.
        len: u64,
    }

    /// Prepares a graph for repeated runs and stores it under an id. Its tensors lie in buffers of the session, as in a
    /// GRAPH_COMPUTE. No reply.
    PrepareGraph<'a> {
        /// Id, chosen by the client; no earlier graph of the session may have had the same.
        id: u64,
        /// The graph and its device.
        graph: GraphCompute<'a>,
    }

    /// READ: reads spans. When the earlier work of the queue is done, the server sends their bytes in one READ_DATA
    /// notification.
    ReadSpans<'a> {
        /// Queue, on the device of the buffers.
        queue: u32,
        /// Id, which the notification repeats.
        id: u64,
        /// Spans to read. The notification has their bytes in this order.
        spans: BufferSpans<'a>,
    }

    /// Queries whether a device supports a node. Reply: [`super::ExtResponse::SupportsOp`].
    SupportsOp<'a> {
        /// A graph of this one node. Its tensors have no buffer.
        graph: GraphCompute<'a>,
    }

    /// Fills a span with a slice of a tensor that the server finds in its own model files, by the digest of the whole tensor.
    /// Reply: [`super::ExtResponse::Load`], in the order of the requests. If no such tensor is found, the span keeps its bytes
    /// or holds zeros.
    Load<'a> {
        /// Queue, on the device of the buffer.
        queue: u32,
        /// Destination, as long as the slice.
        span: BufferSpan,
        /// The tensor that the slice is, if it is contiguous and fills the span.
        shape: Option<TensorShape>,
        /// BLAKE3 digest of the bytes of the whole tensor in the file.
        digest: [u8; 32],
        /// Length of the whole tensor in bytes.
        bytes: u64,
        /// The slice, as bytes of the whole tensor.
        runs: ByteRuns,
        /// Name of the tensor in its file, for the server's log.
        name: &'a str,
    }

    /// Reads a span and sends it to another server, in PEER_WRITE requests. No reply.
    SendToPeer<'a> {
        /// Queue, on the device of the buffer.
        queue: u32,
        /// Source.
        span: BufferSpan,
        /// A token from the destination server.
        token: TransferToken,
        /// Address of the destination server, `host:port`.
        address: &'a str,
    }

    /// Checks whether this server may and can connect to another server; it connects to find out. Reply:
    /// [`super::ExtResponse::ProbePeer`].
    ProbePeer<'a> {
        /// Address of the destination server, `host:port`.
        address: &'a str,
    }

    /// Makes a queue a rank of a group: programs that it runs later use the group for the collective nodes with this number.
    /// When the queues of all ranks on this server have joined, the server connects to the servers of the other ranks. Later work of
    /// the queue waits until they are connected. No reply.
    JoinGroup<'a> {
        /// Queue.
        queue: u32,
        /// Number of the group in the queue.
        group: u32,
        /// Secret of the group.
        secret: GroupSecret,
        /// The queue's rank.
        rank: u32,
        /// Length of the largest part: the exchange memory that the server reserves.
        part_bytes: u64,
        /// By rank: address of its server, `host:port`. Empty for ranks of this server.
        addresses: RankAddresses<'a>,
    }

    /// Reports that the group of the connection has failed, because of a rank. Sent by one server to another. No reply.
    FailGroup<'a> {
        /// The rank, which may be one of any server. 2^32 - 1: no rank in particular.
        rank: u32,
        /// Why. Empty: it has left the group.
        reason: &'a str,
    }

    /// Writes bytes into the memory of another session, which the token entitles the sender to. Sent by one server to another.
    /// No reply.
    PeerWrite<'a> {
        /// The token; valid for the bytes of one RECEIVE_FROM_PEER.
        token: TransferToken,
        /// Offset of the bytes in the transfer.
        at: u64,
        /// The bytes.
        data: &'a [u8],
    }
}

requests! {
    /// A request of the extensions. Of a WRITE and a PUBLISH_PART it holds only the head, because the data are streamed.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    ExtRequest: ExtCommand, streamed |request| match request {
        ExtRequest::WriteHead(head) => head.span.len,
        ExtRequest::PublishPartHead(head) => head.len,
        _ => 0,
    };
    HelloExt = HelloExt OpenQueue = OpenQueue CloseQueue = CloseQueue PrepareGraph<'a> = PrepareGraph RunGraph = RunGraph
    WriteHead = Write ReadSpans<'a> = Read Fill = Fill CopySpan = Copy Mark = Mark Wait = Wait NotifyReached = NotifyReached
    SupportsOp<'a> = SupportsOp Load<'a> = Load IssueTokens = IssueTokens ReceiveFromPeer = ReceiveFromPeer
    SendToPeer<'a> = SendToPeer ProbePeer<'a> = ProbePeer PeerWrite<'a> = PeerWrite Ping = Ping
    JoinGroup<'a> = JoinGroup AttachGroup = AttachGroup PublishPartHead = PublishPart FailGroup<'a> = FailGroup
    Status = Status
}
