//! Translation of the requests of clients of all versions to requests of the newest one.
//!
//! What a version lacks gets the value by which the newest version does what the older one did: the device is 0, every listed
//! node is computed, readers of a tensor are uncounted (which forbids fusing it away), and parameters that its servers did not
//! read are as if they were absent.

use std::collections::HashSet;
use std::fmt;
use std::sync::OnceLock;

use super::layout::{Field, fields};
use super::{Gen0, NotExpressible, REMOVED_OPS, V3_0, V7_0, VersionCodec};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::rpc::wire::codec::Reader;
use crate::rpc::wire::graph::{NodeIds, read_nodes_and_records};
use crate::rpc::wire::tensor::PackedRecord;
use crate::rpc::wire::{
    BodySize, Limits, MAX_NAME, RpcCommand, SET_TENSOR_2D_HEAD, TENSOR_RECORD, TensorRecord, WireError,
};

/// Length of the record of a client that is built with `GGML_MAX_NAME` of 128, as stable-diffusion.cpp is: it has 64 bytes more,
/// in the name, which is cut to 64 bytes. ggml's protocol does not tell, so the lengths of a client's messages must
/// ([`VersionDetector`](super::VersionDetector)).
pub(super) const LONG_RECORD: usize = TENSOR_RECORD + MAX_NAME;

/// Bytes of the longest SET_TENSOR or SET_TENSOR_2D of all clients before its data.
pub(crate) const MAX_UPLOAD_HEAD: usize = SET_TENSOR_2D_HEAD + MAX_NAME;

/// Bytes of a GRAPH_COMPUTE of the newest version before its number of nodes: device and uid.
const GRAPH_HEAD: usize = 4 + 8;

/// Clients before 7.0 send a hash before each upload of more than so many bytes, and the server caches these uploads without
/// being asked to.
const HASHED_BYTES: u64 = 10 << 20;

/// A number that no version gives to an op. Translated records with an unknown op have it.
const UNKNOWN_OP: u32 = u32::MAX;

/// A number that no version gives to a kind of UNARY.
const UNKNOWN_KIND: i32 = -1;

/// Index of the parameter of SCALE that is its bias.
const SCALE_BIAS: usize = 1;

/// Index of the parameter of GROUP_NORM that is its epsilon.
const GROUP_NORM_EPS: usize = 1;

/// Indices of the parameters of FLASH_ATTN_EXT that are the cap of the scores and the precision.
const FLASH_ATTN_SOFTCAP: usize = 2;
const FLASH_ATTN_PRECISION: usize = 3;

/// Index of the parameter of ROPE that is the number of channels before the rotated ones.
const ROPE_OFFSET: usize = 15;

/// Index of the parameter of ROPE that is its mode.
const ROPE_MODE: usize = 2;

/// The version of a client, and the length of its tensor records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ClientCodec {
    pub(super) codec: VersionCodec,
    pub(super) record_len: usize,
}

/// A GRAPH_COMPUTE with the numbers of its client's version.
#[derive(Clone, Copy)]
pub(crate) struct ClientGraph<'a> {
    pub(super) nodes: NodeIds<'a>,
    records: &'a [u8],
    record_len: usize,
}

impl ClientGraph<'_> {
    /// Number of its nodes.
    pub(crate) const fn node_count(&self) -> usize {
        self.nodes.len()
    }

    /// Decodes the records in order.
    pub(super) fn records(&self) -> impl Iterator<Item = TensorRecord> {
        self.records.chunks_exact(self.record_len).map(|bytes| TensorRecord::decode(&usual_record(bytes)))
    }
}

impl ClientCodec {
    /// The clients of a version with records of the usual length.
    pub(crate) const fn new(codec: VersionCodec) -> ClientCodec {
        let record_len = if let VersionCodec::Gen0First = codec { TENSOR_RECORD - 4 } else { TENSOR_RECORD };
        ClientCodec { codec, record_len }
    }

    /// The clients of the same version with long names. `None`: a version whose records have no name of the usual length.
    pub(super) fn with_long_names(self) -> Option<ClientCodec> {
        (self.record_len == TENSOR_RECORD).then_some(ClientCodec { record_len: LONG_RECORD, ..self })
    }

    pub(super) fn has_long_names(self) -> bool {
        self.record_len == LONG_RECORD
    }

    /// Whether requests have the newest version, and need no translation.
    pub(crate) fn is_newest(self) -> bool {
        self.codec.is_newest() && self.record_len == TENSOR_RECORD
    }

    /// The version.
    pub(crate) const fn version(self) -> VersionCodec {
        self.codec
    }

    /// The command with this number; `None` if the version has none.
    pub(crate) fn command(self, number: u8) -> Option<RpcCommand> {
        RpcCommand::ALL.iter().copied().find(|&command| self.codec.command_number(command) == Some(number))
    }

    fn field_len(self, field: Field) -> usize {
        self.codec.field_len(field, self.record_len)
    }

    /// Bytes of the fields of a request: of an upload, the bytes before its data.
    pub(crate) fn head_len(self, command: RpcCommand) -> usize {
        fields(command).iter().map(|&field| self.field_len(field)).sum()
    }

    /// Allowed lengths of the body of a request.
    pub(crate) fn request_body(self, command: RpcCommand) -> BodySize {
        let head = self.head_len(command) as u64;
        match command.request() {
            BodySize::AtLeast(_) => BodySize::AtLeast(head),
            BodySize::Graph if self.codec.has_device_field() => BodySize::Graph,
            // The numbers of nodes and tensors are in the body.
            BodySize::Graph => BodySize::AtLeast(head + 4 + 4),
            _ => BodySize::Exact(head),
        }
    }

    /// The checked length of a request's body: see [`RpcCommand::request_size`].
    ///
    /// # Errors
    /// As [`RpcCommand::request_size`].
    pub(crate) fn body_len(self, command: RpcCommand, size: u64, limits: &Limits) -> Result<usize, WireError> {
        command.request_size_of_form(self.request_body(command), size, limits)
    }

    /// The body of the newest version for `body`, whose length was checked. Of an upload: its head, for the head `body` before
    /// `data_len` bytes of data. Not for GRAPH_COMPUTE.
    pub(crate) fn newest_body(self, command: RpcCommand, mut body: &[u8], data_len: u64) -> Vec<u8> {
        let mut newest = Vec::new();
        for &field in fields(command) {
            let (bytes, rest) = body.split_at(self.field_len(field));
            body = rest;
            let newest_len = newest.len() + VersionCodec::NEWEST.field_len(field, TENSOR_RECORD);
            match field {
                Field::Record | Field::Sources => {
                    for record in bytes.chunks_exact(self.record_len) {
                        let start = newest.len();
                        newest.extend(usual_record(record));
                        // The op of a tensor is irrelevant outside of graphs.
                        let _ = self.codec.translate(PackedRecord::at(&mut newest[start..]));
                    }
                }
                Field::CacheFlag if bytes.is_empty() => newest.push(u8::from(data_len > HASHED_BYTES)),
                // Without a number, GRAPH_RECOMPUTE runs the last graph. HELLO may be empty.
                Field::Uid | Field::Caps if bytes.is_empty() => continue,
                _ => newest.extend_from_slice(bytes),
            }
            newest.resize(newest_len, 0);
        }
        newest
    }

    /// How many bytes fewer than in the newest version a GRAPH_COMPUTE has before its number of nodes.
    pub(crate) fn graph_gap(self) -> usize {
        GRAPH_HEAD - self.head_len(RpcCommand::GraphCompute)
    }

    /// Gives a GRAPH_COMPUTE the first fields of the newest version. `body` has [`ClientCodec::graph_gap`] free bytes in front.
    pub(crate) fn complete_graph_head(self, body: &mut [u8]) {
        let gap = self.graph_gap();
        if self.codec.has_device_field() {
            body.copy_within(gap..gap + size_of::<u32>(), 0);
            body[size_of::<u32>()..][..gap].fill(0);
        } else {
            body[..gap].fill(0);
        }
    }

    /// The form of a GRAPH_COMPUTE with the first fields of the newest version.
    ///
    /// # Errors
    /// [`WireError`], naming the first field that is missing, invalid or over `limits`.
    pub(crate) fn read_graph<'a>(self, body: &'a [u8], limits: &Limits) -> Result<ClientGraph<'a>, WireError> {
        let mut r = Reader::with_limits(body, *limits);
        r.bytes("device, uid", GRAPH_HEAD)?;
        let (nodes, records) = read_nodes_and_records(&mut r, self.record_len)?;
        r.finish(RpcCommand::GraphCompute.name())?;
        Ok(ClientGraph { nodes, records, record_len: self.record_len })
    }

    /// Length of the newest body of a graph that has `len` bytes with the first fields of the newest version.
    pub(crate) fn newest_graph_len(self, graph: &ClientGraph<'_>, len: usize) -> usize {
        len - graph.records.len() + graph.records.len() / self.record_len * TENSOR_RECORD
    }

    /// Translates the records of a graph that [`ClientCodec::read_graph`] has checked. `body` has the length of the graph or of
    /// its newest body, whichever is larger.
    ///
    /// # Errors
    /// [`NotExpressible`] names the op or the parameter of a node that has no counterpart in the newest version.
    pub(crate) fn translate_graph(
        self,
        body: &mut [u8],
        n_nodes: usize,
        newest_len: usize,
    ) -> Result<(), NotExpressible> {
        if self.is_newest() {
            return Ok(());
        }
        const IDS: usize = GRAPH_HEAD + 4;
        let (head, records) = body[..].split_at_mut(IDS + n_nodes * size_of::<u64>() + 4);
        let count = (newest_len - head.len()) / TENSOR_RECORD;
        let mut nodes = None;
        for n in 0..count {
            // Records that become longer move from the last one on.
            let at = if self.record_len < TENSOR_RECORD { count - 1 - n } else { n };
            if self.record_len != TENSOR_RECORD {
                let record = usual_record(&records[at * self.record_len..][..self.record_len]);
                records[at * TENSOR_RECORD..][..TENSOR_RECORD].copy_from_slice(&record);
            }
            let record = PackedRecord::at(&mut records[at * TENSOR_RECORD..]);
            let Err(what) = self.codec.translate(record) else { continue };
            // The op of a leaf is irrelevant. Few graphs have a record that fails, so the set is built only then.
            let ids = || NodeIds(head[IDS..].as_chunks().0).iter().collect::<HashSet<u64>>();
            if nodes.get_or_insert_with(ids).contains(&{ record.id }) {
                return Err(self.codec.not_expressible(what));
            }
        }
        Ok(())
    }
}

impl fmt::Display for ClientCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}{}", self.codec, if self.has_long_names() { ", names of 128 bytes" } else { "" })
    }
}

/// A record of any client with the length of the newest version: without the second half of a long name, or with an unknown
/// number of readers.
pub(super) fn usual_record(bytes: &[u8]) -> [u8; TENSOR_RECORD] {
    /// Where the name of a record ends. The number of readers follows.
    const NAME_END: usize = TENSOR_RECORD - size_of::<i32>();
    let mut record = [0; TENSOR_RECORD];
    record[..NAME_END].copy_from_slice(&bytes[..NAME_END]);
    let readers = &bytes[bytes.len().min(if bytes.len() == LONG_RECORD { LONG_RECORD - 4 } else { NAME_END })..];
    record[NAME_END..][..readers.len()].copy_from_slice(readers);
    record
}

impl VersionCodec {
    /// Translates a record of this version to the newest one.
    ///
    /// # Errors
    /// Names the op or the parameter that the newest version lacks, or that has another meaning in it. As a node, the record is
    /// invalid.
    fn translate(self, record: &mut PackedRecord) -> Result<(), String> {
        if self.is_newest() {
            return Ok(());
        }
        if !self.has_compute_flag() {
            record.flags |= TensorRecord::FLAG_COMPUTE;
        }
        if !self.has_use_count() {
            record.use_count = 0;
        }
        let number = record.op;
        let Some(op) = self.op(number) else {
            record.op = UNKNOWN_OP;
            return Err(self.unknown_op(number));
        };
        record.op = op.to_wire();
        let kind = record.op_params[0];
        match op {
            OpCode::Unary => {
                let newest = self.unary_kind(kind);
                record.op_params[0] = newest.unwrap_or(UNKNOWN_KIND);
                newest.ok_or_else(|| format!("kind {kind} of {op}"))?;
            }
            OpCode::Glu if !self.has_glu(kind) => return Err(format!("kind {kind} of {op}")),
            OpCode::Rope => {
                if self < V7_0 {
                    record.op_params[ROPE_OFFSET] = 0;
                }
                let mode = record.op_params[ROPE_MODE];
                if !self.has_rope_mode(mode) {
                    return Err(format!("mode {mode} of {op}"));
                }
            }
            OpCode::Scale if self < V3_0 => record.op_params[SCALE_BIAS] = 0,
            OpCode::GroupNorm if self < Gen0 => record.op_params[GROUP_NORM_EPS] = 1e-6_f32.to_bits() as i32,
            OpCode::SoftMax if self < V3_0 => record.remove_sources_from(2),
            OpCode::FlashAttnExt => {
                if self < V3_0 {
                    record.remove_sources_from(4);
                }
                if self < Gen0 {
                    record.op_params[FLASH_ATTN_PRECISION] = record.op_params[FLASH_ATTN_SOFTCAP];
                    record.op_params[FLASH_ATTN_SOFTCAP] = 0;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Name of an op without a counterpart in the newest version.
    fn unknown_op(self, number: u32) -> String {
        let (removed, next) = self.removed_ops();
        let first = self.op_number(next).map_or(0, |end| end - removed);
        match number.checked_sub(first).and_then(|at| REMOVED_OPS.get(at as usize)).filter(|_| removed > 0) {
            Some(name) => format!("op {number} ({name}) that this server could run"),
            None => format!("op {number}"),
        }
    }

    /// The op with this number; `None` if the version has none, or if the newest version no longer has it.
    pub(crate) fn op(self, number: u32) -> Option<OpCode> {
        /// The ops by number, for each version whose clients have sent one.
        static OPS: [OnceLock<Vec<Option<OpCode>>>; VersionCodec::NEWEST as usize + 1] =
            [const { OnceLock::new() }; VersionCodec::NEWEST as usize + 1];
        let ops = OPS[self as usize].get_or_init(|| {
            let mut ops = vec![None; OpCode::ALL.len() + REMOVED_OPS.len()];
            let numbered = OpCode::ALL.iter().filter_map(|&op| Some((self.op_number(op)?, op)));
            numbered.for_each(|(number, op)| ops[number as usize] = Some(op));
            ops
        });
        *ops.get(number as usize)?
    }

    /// The number of UNARY's kind in the newest version, given that in this version; `None` if the version has none.
    pub(crate) fn unary_kind(self, number: i32) -> Option<i32> {
        UnaryKind::ALL.iter().position(|kind| self.unary_number(kind) == Some(number)).map(|newest| newest as i32)
    }
}
