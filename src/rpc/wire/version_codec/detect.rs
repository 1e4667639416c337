//! Detection of a client's version. Several versions share a HELLO, or have none, so the requests after it must show which of
//! them the client has: by lengths, by flags, and by op numbers.

use std::collections::HashSet;

use super::VersionCodec;
use super::decode::{ClientCodec, ClientGraph, usual_record};
use crate::ops::OpCode;
use crate::rpc::wire::{Limits, MAX_NAME, MAX_SRC, RpcCommand, TensorRecord};
use crate::tensor::{DType, TensorDesc};

/// Ops that decide if they have as many sources as they need ([`source_counts`]), although another version gives the number to
/// an op with the same count. That op is one of training, which clients of a model do not send. Every model has a UNARY or a GLU.
const TELLING_OPS: [OpCode; 4] = [OpCode::Unary, OpCode::Glu, OpCode::TopKMask, OpCode::FlashAttnExt];

/// The fewest and the most sources of an op's nodes; `None` for ops that are never sent: those that call a function of the
/// client, and fanout's own.
/// Where versions differ, the range covers all of them.
const fn source_counts(op: OpCode) -> Option<(usize, usize)> {
    use OpCode as Op;
    Some(match op {
        Op::MapCustom1
        | Op::MapCustom2
        | Op::MapCustom3
        | Op::Custom
        | Op::AllReduce
        | Op::AllGather
        | Op::ReduceScatter => return None,
        Op::None | Op::Arange => (0, 0),
        Op::Dup
        | Op::Sqr
        | Op::Sqrt
        | Op::Log
        | Op::Sin
        | Op::Cos
        | Op::Sum
        | Op::SumRows
        | Op::Cumsum
        | Op::Mean
        | Op::Argmax
        | Op::Repeat
        | Op::RepeatBack
        | Op::Norm
        | Op::RmsNorm
        | Op::GroupNorm
        | Op::L2Norm
        | Op::Scale
        | Op::Reshape
        | Op::View
        | Op::Permute
        | Op::Transpose
        | Op::Diag
        | Op::DiagMaskInf
        | Op::DiagMaskZero
        | Op::Clamp
        | Op::Cont
        | Op::Col2im1d
        | Op::Pool1d
        | Op::Pool2d
        | Op::Upscale
        | Op::Pad
        | Op::PadReflect1d
        | Op::Roll
        | Op::TimestepEmbedding
        | Op::Argsort
        | Op::TopK
        | Op::LeakyRelu
        | Op::Tri
        | Op::Fill
        | Op::WinPart
        | Op::WinUnpart
        | Op::GetRelPos
        | Op::Unary => (1, 1),
        Op::Glu => (1, 2),
        Op::SoftMax => (1, 3),
        Op::Add
        | Op::Add1
        | Op::Acc
        | Op::Sub
        | Op::Mul
        | Op::Div
        | Op::CountEqual
        | Op::Concat
        | Op::SiluBack
        | Op::RmsNormBack
        | Op::MulMat
        | Op::OutProd
        | Op::Set
        | Op::Cpy
        | Op::GetRows
        | Op::SoftMaxBack
        | Op::ConvTranspose1d
        | Op::Im2col
        | Op::Im2colBack
        | Op::Im2col3d
        | Op::Conv2d
        | Op::Conv3d
        | Op::Conv2dDw
        | Op::ConvTranspose2d
        | Op::Pool2dBack
        | Op::SsmConv
        | Op::SolveTri
        | Op::CrossEntropyLoss => (2, 2),
        Op::GetRowsBack | Op::SetRows | Op::Rope | Op::RopeBack => (2, 3),
        Op::TopKMask => (2, 5),
        Op::AddId | Op::MulMatId | Op::AddRelPos | Op::CrossEntropyLossBack | Op::OptStepSgd => (3, 3),
        Op::FlashAttnExt => (3, 5),
        Op::FlashAttnBack | Op::OptStepAdamw => (4, 5),
        Op::GatedLinearAttn => (5, 5),
        Op::RwkvWkv6 => (6, 6),
        Op::SsmScan | Op::RwkvWkv7 | Op::GatedDeltaNet => (6, 7),
        Op::LightningIndexer | Op::Dsv4HcComb | Op::Dsv4HcPre | Op::Dsv4HcPost => (2, MAX_SRC),
    })
}

/// The versions that a client may have, and those that its requests leave.
#[derive(Clone, Debug)]
pub(crate) struct VersionDetector {
    /// Never empty. The first one is assumed until a request decides.
    candidates: Vec<ClientCodec>,
}

impl VersionDetector {
    /// `versions`: those that the client may have. The first one is assumed until a request decides. Each may also have long
    /// names, which the first record shows.
    pub(crate) fn new(versions: &[VersionCodec]) -> VersionDetector {
        let usual = versions.iter().copied().map(ClientCodec::new);
        VersionDetector { candidates: usual.clone().chain(usual.filter_map(ClientCodec::with_long_names)).collect() }
    }

    /// The codec for the client's requests.
    pub(crate) fn codec(&self) -> ClientCodec {
        // Never empty; the newest codec reads no client's memory wrongly, it only refuses.
        self.candidates.first().copied().unwrap_or(ClientCodec::new(VersionCodec::NEWEST))
    }

    pub(crate) fn is_decided(&self) -> bool {
        self.candidates.len() == 1
    }

    /// Keeps the candidates that `fits`, unless none does: then the request is invalid, or tells nothing.
    fn retain(&mut self, fits: impl Fn(ClientCodec) -> bool) {
        if self.candidates.iter().any(|&codec| fits(codec)) {
            self.candidates.retain(|&codec| fits(codec));
        }
    }

    /// Takes the header of a request into account: versions may lack its command, or have another length of its body.
    pub(crate) fn observe_header(&mut self, number: u8, size: u64) {
        if !self.is_decided() {
            self.retain(|codec| codec.command(number).is_some_and(|command| codec.request_body(command).admits(size)));
        }
    }

    /// Takes the first bytes of a SET_TENSOR or SET_TENSOR_2D into account: [`VersionDetector::upload_start_len`] of them, if the body
    /// is that long. `size`: length of the body. Where a version has a shorter record than another, only the offset and the length
    /// after the right one stay inside of the tensor.
    pub(crate) fn observe_upload(&mut self, command: RpcCommand, start: &[u8], size: u64) {
        if self.is_decided() {
            return;
        }
        if self.codec().shows_long_names(command, start, size).unwrap_or(false) {
            self.retain(ClientCodec::has_long_names);
        } else if command == RpcCommand::SetTensor {
            // The usual ones among themselves: whether a record is long is not decided by a record that fits none.
            let fits =
                |codec: ClientCodec| !codec.has_long_names() && codec.fits_set_tensor(start, size).unwrap_or(false);
            if self.candidates.iter().any(|&codec| fits(codec)) {
                self.candidates.retain(|&codec| codec.has_long_names() || fits(codec));
            }
        }
        // An upload is written by the codec that is assumed now: requests with records of another length must not follow it, since
        // what was written would be wrong for them.
        let is_long = self.codec().has_long_names();
        self.retain(|codec| codec.has_long_names() == is_long);
    }

    /// Bytes of an upload's body that [`VersionDetector::observe_upload`] needs; 0 if it would tell nothing.
    pub(crate) fn upload_start_len(&self, command: RpcCommand) -> usize {
        // Those that show long names lie within a head with short ones: waiting for more would delay the refusal of wrong heads.
        let usual = self.candidates.iter().filter(|codec| !codec.has_long_names());
        let longest = usual.map(|codec| codec.head_len(command)).max();
        longest.filter(|_| !self.is_decided()).unwrap_or(0)
    }

    /// Takes a GRAPH_COMPUTE with the first fields of the newest version into account: with another length of its records, bytes
    /// are missing or left.
    pub(crate) fn observe_graph_body(&mut self, body: &[u8], limits: &Limits) {
        let record_len = self.codec().record_len;
        if self.candidates.iter().any(|codec| codec.record_len != record_len) {
            self.retain(|codec| codec.read_graph(body, limits).is_ok());
        }
    }

    /// Takes a graph into account: whether its nodes have the flag by which later versions compute them, and the numbers of its
    /// ops.
    pub(crate) fn observe_graph(&mut self, graph: &ClientGraph<'_>) {
        if self.is_decided() {
            return;
        }
        if self.candidates.iter().any(|codec| !codec.codec.has_compute_flag()) {
            if graph.records().any(|record| record.flags & TensorRecord::FLAG_COMPUTE != 0) {
                self.retain(|codec| codec.codec.has_compute_flag());
            } else {
                // A client with the flag may send a graph without any, so that only the order changes. The sort is stable.
                self.candidates.sort_by_key(|codec| codec.codec.has_compute_flag());
            }
        }
        for record in graph.records() {
            self.retain(|codec| codec.codec.admits_op(&record));
            let telling = self.candidates.iter().filter(|codec| codec.codec.is_telling_op(&record)).count();
            if (1..self.candidates.len()).contains(&telling) {
                self.retain(|codec| codec.codec.is_telling_op(&record));
            }
        }
    }

    /// Whether the candidates give a node of the graph different ops, so that its computation would be a guess.
    pub(crate) fn disagrees_on(&self, graph: &ClientGraph<'_>) -> bool {
        let Some((first, others @ [_, ..])) = self.candidates.split_first() else { return false };
        let differs = |record: &TensorRecord| {
            let op = first.codec.op_and_kind(record);
            others.iter().any(|codec| codec.codec.op_and_kind(record) != op)
        };
        let differing = graph.records().filter(differs);
        let differing: HashSet<u64> = differing.map(|record| record.id).collect();
        // The op of a leaf is irrelevant.
        !differing.is_empty() && graph.nodes.iter().any(|id| differing.contains(&id))
    }

    /// Whether some candidates reply to GRAPH_COMPUTE with a status, and others do not.
    pub(crate) fn is_graph_status_undecided(&self) -> bool {
        let with_status = self.candidates.iter().filter(|codec| codec.has_graph_status()).count();
        (1..self.candidates.len()).contains(&with_status)
    }

    /// Takes into account whether the client waits for the reply to a GRAPH_COMPUTE: without a status, it sends its next request
    /// at once.
    pub(crate) fn observe_wait_for_status(&mut self, waits: bool) {
        self.retain(|codec| codec.has_graph_status() == waits);
    }

    /// Names of the candidates, for messages.
    pub(crate) fn candidate_names(&self) -> String {
        self.candidates.iter().map(ClientCodec::to_string).collect::<Vec<_>>().join(", ")
    }
}

impl VersionCodec {
    /// Whether a record of this version has as many sources as its op needs.
    fn admits_op(self, record: &TensorRecord) -> bool {
        let sources = record.src.iter().filter(|&&id| id != 0).count();
        let counts = self.op(record.op).and_then(source_counts);
        counts.is_some_and(|(fewest, most)| (fewest..=most).contains(&sources))
    }

    /// Whether a record of this version has one of [`TELLING_OPS`], with as many sources as it needs.
    fn is_telling_op(self, record: &TensorRecord) -> bool {
        self.op(record.op).is_some_and(|op| TELLING_OPS.contains(&op)) && self.admits_op(record)
    }

    /// The op of a record of this version, and the kind of a UNARY, both as in the newest version.
    fn op_and_kind(self, record: &TensorRecord) -> (Option<OpCode>, Option<i32>) {
        let op = self.op(record.op);
        (op, if op == Some(OpCode::Unary) { self.unary_kind(record.op_params[0]) } else { None })
    }
}

impl ClientCodec {
    fn has_graph_status(&self) -> bool {
        self.codec.response_size(RpcCommand::GraphCompute).is_some()
    }

    /// Whether an upload that begins with `start` and has `size` bytes is that of a client with long names. Read as one with short
    /// names, its cache flag, offset and row length are in the second half of the name: characters, or zeros. A whole tensor then
    /// seems to have as many bytes more as the name has. `None`: it is too short.
    fn shows_long_names(self, command: RpcCommand, start: &[u8], size: u64) -> Option<bool> {
        let head = self.head_len(command);
        let (start, len) = (start.get(..head)?, size.checked_sub(head as u64)?);
        if command == RpcCommand::SetTensor2d {
            let row_len = read_number(start, self.record_len + 8)?;
            return Some(row_len > len || row_len == 0 && len > 0);
        }
        // Between the record and the offset is at most the flag.
        let offset_at = head.checked_sub(size_of::<u64>())?;
        if start.get(self.record_len..offset_at)?.first().is_some_and(|flag| *flag >= b' ') {
            return Some(true);
        }
        Some(read_number(start, offset_at)? == 0 && self.extent(start)?.checked_add(MAX_NAME as u64)? == len)
    }

    /// Whether a SET_TENSOR that begins with `start` and has `size` bytes stays inside of its tensor. `None`: it is too short.
    fn fits_set_tensor(self, start: &[u8], size: u64) -> Option<bool> {
        let head = self.head_len(RpcCommand::SetTensor);
        let len = size.checked_sub(head as u64)?;
        Some(read_number(start, head - 8)?.checked_add(len)? <= self.extent(start)?)
    }

    /// Bytes from the first to the last one of the tensor of an upload; `None` if no tensor is like its record.
    fn extent(self, start: &[u8]) -> Option<u64> {
        let record = TensorRecord::decode(&usual_record(start.get(..self.record_len)?));
        let dtype = DType::from_wire(record.dtype)?;
        let desc = TensorDesc::strided(dtype, record.ne.map(|n| n as usize), record.nb.map(|n| n as usize)).ok()?;
        Some(desc.extent() as u64)
    }
}

fn read_number(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..)?.first_chunk().copied().map(u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::wire::{GraphCompute, REQUEST_HEADER, Request, TENSOR_RECORD, Version};

    type Number = (u8, u8, u8);

    /// Candidates, op and sources of each record, flags of all of them, and the expected version.
    type Case = (&'static [Number], &'static [(u32, usize)], i32, Number);

    fn codec((major, minor, patch): Number) -> VersionCodec {
        VersionCodec::for_version(Version { major, minor, patch }).expect("a version of the table")
    }

    fn record(op: u32, sources: usize, flags: i32) -> [u8; TENSOR_RECORD] {
        let mut record = TensorRecord::decode(&[0; TENSOR_RECORD]);
        (record.op, record.flags) = (op, flags);
        record.src[..sources].fill(7);
        record.encode()
    }

    fn observe_graph(detector: &mut VersionDetector, tensors: &[[u8; TENSOR_RECORD]]) {
        let mut body = Vec::new();
        Request::GraphCompute(GraphCompute::new(0, &[], tensors).expect("few").with_uid(0)).encode(&mut body);
        let limits = Limits::new(9, 9, u64::MAX);
        let graph = detector.codec().read_graph(&body[REQUEST_HEADER..], &limits).expect("a graph");
        detector.observe_graph(&graph);
    }

    #[test]
    fn the_first_telling_record_decides_for_a_version() {
        let (v8, v4, v3): (&[Number], &[Number], &[Number]) = (
            &[(8, 0, 1), (8, 0, 0)],
            &[(4, 0, 3), (4, 0, 2), (4, 0, 1), (4, 0, 0)],
            &[(3, 6, 1), (3, 6, 0), (3, 0, 0), (3, 5, 0)],
        );
        let cases: [Case; 27] = [
            (v8, &[], 16, (8, 0, 1)),
            (v8, &[(2, 2), (29, 2), (0, 0)], 16, (8, 0, 1)),
            (v8, &[(91, 1)], 16, (8, 0, 0)),
            (v8, &[(91, 2)], 16, (8, 0, 1)),
            (v8, &[(91, 5)], 16, (8, 0, 1)),
            (v8, &[(92, 1)], 16, (8, 0, 1)),
            (v8, &[(100, 1)], 16, (8, 0, 0)),
            (v8, &[(100, 2)], 16, (8, 0, 0)),
            (v8, &[(101, 1)], 16, (8, 0, 1)),
            (v8, &[(29, 2), (101, 2), (91, 1)], 16, (8, 0, 1)),
            (v8, &[(29, 2), (91, 1), (101, 2)], 16, (8, 0, 0)),
            (v4, &[(2, 2)], 16, (4, 0, 3)),
            (v4, &[(86, 1)], 16, (4, 0, 0)),
            (v4, &[(87, 1)], 16, (4, 0, 1)),
            (v4, &[(88, 1)], 16, (4, 0, 2)),
            (v4, &[(91, 1)], 16, (4, 0, 3)),
            (v4, &[(95, 2)], 16, (4, 0, 0)),
            (v4, &[(96, 2)], 16, (4, 0, 1)),
            (v4, &[(97, 1)], 16, (4, 0, 2)),
            (v4, &[(100, 1)], 16, (4, 0, 3)),
            (v3, &[(2, 2)], 16, (3, 6, 1)),
            (v3, &[(2, 2)], 0, (3, 0, 0)),
            (v3, &[(86, 1)], 16, (3, 6, 1)),
            (v3, &[(85, 1)], 16, (3, 6, 0)),
            (v3, &[(80, 1)], 0, (3, 0, 0)),
            (v3, &[(85, 1)], 0, (3, 5, 0)),
            (v3, &[(89, 1)], 0, (3, 0, 0)),
        ];
        for (candidates, records, flags, want) in cases {
            let mut detector = VersionDetector::new(&candidates.iter().map(|&v| codec(v)).collect::<Vec<_>>());
            let tensors: Vec<_> = records.iter().map(|&(op, sources)| record(op, sources, flags)).collect();
            observe_graph(&mut detector, &tensors);
            assert_eq!(detector.codec(), ClientCodec::new(codec(want)), "{candidates:?}: {records:?} {flags}");
        }
    }

    /// The first clients of 3.6.0 have the lengths of 3.6 and mark no node to compute.
    #[test]
    fn a_client_of_3_6_without_flags_is_told_by_lengths_and_flags() {
        use VersionCodec::{V3_0, V3_5, V3_6_0, V3_6_0Unflagged, V3_6_1};
        let mut detector = VersionDetector::new(&[V3_6_1, V3_6_0, V3_6_0Unflagged, V3_0, V3_5]);
        detector.observe_header(13, 4 + 11 * 296);
        observe_graph(&mut detector, &[record(85, 1, 0)]);
        assert_eq!(detector.codec(), ClientCodec::new(V3_6_0Unflagged));
    }

    #[test]
    fn lengths_tell_versions_apart() {
        let v3 = || VersionDetector::new(&[codec((3, 6, 1)), codec((3, 0, 0))]);
        let gen0 = || VersionDetector::new(&[VersionCodec::Gen0, VersionCodec::Gen0First]);
        for (mut detector, number, size, want) in [
            (v3(), 13, 4 + 296, codec((3, 0, 0))),
            (v3(), 13, 4 + 11 * 296, codec((3, 6, 1))),
            (v3(), 16, 4, codec((3, 6, 1))),
            (v3(), 13, 5, codec((3, 6, 1))),
            (v3(), 200, 5, codec((3, 6, 1))),
            (gen0(), 7, 292 + 16, VersionCodec::Gen0First),
            (gen0(), 7, 296 + 16, VersionCodec::Gen0),
            (gen0(), 8, 2 * 292, VersionCodec::Gen0First),
            (gen0(), 0, 8, VersionCodec::Gen0),
        ] {
            detector.observe_header(number, size);
            assert_eq!(detector.codec(), ClientCodec::new(want), "{number} {size}");
        }
    }

    /// The same bytes of a whole upload, with both lengths of its record.
    #[test]
    fn an_upload_inside_of_its_tensor_tells_the_length_of_a_record() {
        let mut tensor = TensorRecord::decode(&[0; TENSOR_RECORD]);
        (tensor.ne, tensor.nb) = ([4, 2, 1, 1], [4, 16, 32, 32]);
        for (codec, want_len) in [(VersionCodec::Gen0, 304), (VersionCodec::Gen0First, 300)] {
            for (offset, data, decided) in [(0_u64, 32, true), (16, 16, true), (0, 8, false)] {
                let mut detector = VersionDetector::new(&[VersionCodec::Gen0, VersionCodec::Gen0First]);
                let mut body = tensor.encode()[..want_len - 8].to_vec();
                body.extend(offset.to_le_bytes());
                body.extend([1; 32].iter().take(data));
                assert_eq!(detector.upload_start_len(RpcCommand::SetTensor), 304);
                detector.observe_upload(RpcCommand::SetTensor, &body[..304], body.len() as u64);
                let found = detector.codec().version();
                assert!(found == codec || !decided && codec == VersionCodec::Gen0First);
            }
        }
    }
}
