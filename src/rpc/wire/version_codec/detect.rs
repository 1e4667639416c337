//! Detection of a client's version. Several versions share a HELLO, or have none, so the requests behind it must show which of
//! them the client has: by lengths, by flags, and by op numbers.

use super::VersionCodec;
use crate::ops::OpCode;
use crate::rpc::wire::{GraphCompute, Limits, RpcCommand, TensorRecord};
use crate::tensor::{DType, TensorDesc};

/// The ops whose numbers tell versions apart, with the fewest and the most sources of their nodes. Every model has a UNARY or a
/// GLU. What has the same number in another version has other sources, or calls a function of the client and is never sent.
const TELLING_OPS: [(OpCode, usize, usize); 4] =
    [(OpCode::Unary, 1, 1), (OpCode::Glu, 1, 2), (OpCode::TopKMask, 2, 5), (OpCode::FlashAttnExt, 3, 5)];

/// The versions that a client may have, and those that its requests leave.
#[derive(Clone, Debug)]
pub(crate) struct VersionDetector {
    /// Never empty. The first one is assumed until a request decides.
    candidates: Vec<&'static VersionCodec>,
}

impl VersionDetector {
    /// `others`: further versions that the client may have. `assumed` is used until a request decides.
    pub(crate) fn new(
        assumed: &'static VersionCodec,
        others: impl IntoIterator<Item = &'static VersionCodec>,
    ) -> VersionDetector {
        VersionDetector { candidates: std::iter::once(assumed).chain(others).collect() }
    }

    /// The codec for the client's requests.
    pub(crate) fn codec(&self) -> &'static VersionCodec {
        // Never empty; the newest codec reads no client's memory wrongly, it only refuses.
        self.candidates.first().copied().unwrap_or(VersionCodec::NEWEST)
    }

    fn is_decided(&self) -> bool {
        self.candidates.len() == 1
    }

    /// Keeps the candidates that `fits`, unless none does: then the request is invalid, or tells nothing.
    fn retain(&mut self, fits: impl Fn(&'static VersionCodec) -> bool) {
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

    /// Takes the first bytes of a SET_TENSOR into account: at least those of the longest head of all candidates, if the body is
    /// that long. `size`: length of the body. Where a version has a shorter record than another, only the offset and the length
    /// behind the right one stay inside of the tensor.
    pub(crate) fn observe_set_tensor(&mut self, start: &[u8], size: u64) {
        if !self.is_decided() {
            self.retain(|codec| codec.fits_set_tensor(start, size).unwrap_or(false));
        }
    }

    /// Bytes of a SET_TENSOR's body that [`VersionDetector::observe_set_tensor`] needs; 0 if it would tell nothing.
    pub(crate) fn set_tensor_start_len(&self) -> usize {
        let lens = || self.candidates.iter().map(|codec| codec.set_tensor_head_len());
        let (shortest, longest) = (lens().min().unwrap_or(0), lens().max().unwrap_or(0));
        if shortest == longest { 0 } else { longest }
    }

    /// Takes the form of a GRAPH_COMPUTE body into account: with another length of its records, bytes are missing or left.
    pub(crate) fn observe_graph_body(&mut self, body: &[u8], limits: &Limits) {
        let record_len = self.codec().record_len();
        if self.candidates.iter().any(|codec| codec.record_len() != record_len) {
            self.retain(|codec| codec.decode(RpcCommand::GraphCompute, body, limits).is_ok());
        }
    }

    /// Takes a GRAPH_COMPUTE into account: whether its nodes have the flag by which later versions compute them, and the
    /// numbers of its ops.
    pub(crate) fn observe_graph(&mut self, graph: &GraphCompute<'_>) {
        if self.is_decided() {
            return;
        }
        if self.candidates.iter().any(|codec| !codec.compute_flag) {
            let flagged = graph.tensors().iter_raw().any(|record| record.flags & TensorRecord::FLAG_COMPUTE != 0);
            self.retain(|codec| codec.compute_flag == flagged);
        }
        for record in graph.tensors().iter_raw() {
            let tells = |codec: &&VersionCodec| codec.is_telling_op(&record);
            let telling = self.candidates.iter().filter(|codec| tells(codec)).count();
            if (1..self.candidates.len()).contains(&telling) {
                self.retain(|codec| tells(&codec));
            }
        }
    }
}

impl VersionCodec {
    /// Whether a record of this version has one of [`TELLING_OPS`], with as many sources as it needs.
    fn is_telling_op(&self, record: &TensorRecord) -> bool {
        let sources = record.src.iter().filter(|&&id| id != 0).count();
        self.op(record.op).is_some_and(|op| {
            TELLING_OPS.iter().any(|&(telling, fewest, most)| op == telling && (fewest..=most).contains(&sources))
        })
    }

    /// Whether a SET_TENSOR that begins with `start` and has `size` bytes stays inside of its tensor. `None`: it is too short.
    fn fits_set_tensor(&self, start: &[u8], size: u64) -> Option<bool> {
        let head = self.decode_set_tensor_head(start).ok()?;
        let len = size.checked_sub(self.set_tensor_head_len() as u64)?;
        let record = &head.tensor;
        let dtype = DType::from_wire(record.dtype)?;
        let desc = TensorDesc::strided(dtype, record.ne.map(|n| n as usize), record.nb.map(|n| n as usize)).ok()?;
        Some(head.offset.checked_add(len)? <= desc.extent() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rpc::wire::{TENSOR_RECORD, Version};

    type Number = (u8, u8, u8);

    /// Candidates, op and sources of each record, flags of all of them, and the expected version.
    type Case = (&'static [Number], &'static [(u32, usize)], i32, Number);

    fn codec((major, minor, patch): Number) -> &'static VersionCodec {
        VersionCodec::for_version(Version { major, minor, patch }).expect("a version of the table")
    }

    fn record(op: u32, sources: usize, flags: i32) -> [u8; TENSOR_RECORD] {
        let mut record = TensorRecord::decode(&[0; TENSOR_RECORD]);
        (record.op, record.flags) = (op, flags);
        record.src[..sources].fill(7);
        record.encode()
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
            let mut detector = VersionDetector::new(codec(candidates[0]), candidates[1..].iter().map(|&v| codec(v)));
            let tensors: Vec<_> = records.iter().map(|&(op, sources)| record(op, sources, flags)).collect();
            detector.observe_graph(&GraphCompute::new(0, &[], &tensors).expect("few"));
            assert_eq!(detector.codec(), codec(want), "{candidates:?}: {records:?} {flags}");
        }
    }

    /// The first clients of 3.6.0 have the lengths of 3.6 and mark no node to compute.
    #[test]
    fn a_client_of_3_6_without_flags_is_told_by_lengths_and_flags() {
        let others = [codec((3, 6, 0)), VersionCodec::V3_6_0_UNFLAGGED, codec((3, 0, 0)), codec((3, 5, 0))];
        let mut detector = VersionDetector::new(codec((3, 6, 1)), others);
        detector.observe_header(13, 4 + 11 * 296);
        let tensors = [record(85, 1, 0)];
        detector.observe_graph(&GraphCompute::new(0, &[], &tensors).expect("few"));
        assert_eq!(detector.codec(), VersionCodec::V3_6_0_UNFLAGGED);
    }

    #[test]
    fn lengths_tell_versions_apart() {
        let v3 = || VersionDetector::new(codec((3, 6, 1)), [codec((3, 0, 0))]);
        let gen0 = || VersionDetector::new(VersionCodec::GEN0, [VersionCodec::GEN0_FIRST]);
        for (mut detector, number, size, want) in [
            (v3(), 13, 4 + 296, codec((3, 0, 0))),
            (v3(), 13, 4 + 11 * 296, codec((3, 6, 1))),
            (v3(), 16, 4, codec((3, 6, 1))),
            (v3(), 13, 5, codec((3, 6, 1))),
            (v3(), 200, 5, codec((3, 6, 1))),
            (gen0(), 7, 292 + 16, VersionCodec::GEN0_FIRST),
            (gen0(), 7, 296 + 16, VersionCodec::GEN0),
            (gen0(), 8, 2 * 292, VersionCodec::GEN0_FIRST),
            (gen0(), 0, 8, VersionCodec::GEN0),
        ] {
            detector.observe_header(number, size);
            assert_eq!(detector.codec(), want, "{number} {size}");
        }
    }

    /// The same bytes of a whole upload, with both lengths of its record.
    #[test]
    fn an_upload_inside_of_its_tensor_tells_the_length_of_a_record() {
        let mut tensor = TensorRecord::decode(&[0; TENSOR_RECORD]);
        (tensor.ne, tensor.nb) = ([4, 2, 1, 1], [4, 16, 32, 32]);
        for (codec, want_len) in [(VersionCodec::GEN0, 304), (VersionCodec::GEN0_FIRST, 300)] {
            for (offset, data, decided) in [(0_u64, 32, true), (16, 16, true), (0, 8, false)] {
                let mut detector = VersionDetector::new(VersionCodec::GEN0, [VersionCodec::GEN0_FIRST]);
                let mut body = tensor.encode()[..want_len - 8].to_vec();
                body.extend(offset.to_le_bytes());
                body.extend([1; 32].iter().take(data));
                assert_eq!(detector.set_tensor_start_len(), 304);
                detector.observe_set_tensor(&body[..304], body.len() as u64);
                assert!(detector.codec() == codec || !decided && codec == VersionCodec::GEN0_FIRST);
            }
        }
    }
}
