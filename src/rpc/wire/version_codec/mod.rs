//! Codecs of the versions of the protocol: a table of the differences of each version from the newest, and what is derived from
//! it.
//!
//! ```text
//! encode      requests to servers of older versions
//! decode      requests of clients of older versions
//! detect      the version of a client, as its requests show it
//! long_names  clients whose records have longer names
//! semantics   whether a version computes a node as the newest one does
//! ```
//!
//! All versions have the frame and the tensor record (296 bytes; 360 with long names) of 7.0 and, with few exceptions, its bodies. Ops and unary
//! kinds were added between existing ones, which shifted the numbers of those behind them, but never changed the order. The
//! number of an op in an old version is therefore its number in 7.0 minus the number of later additions before it.
//!
//! From 3.6.1 on the version number determines the set of ops. Before, ops were added without a new version number. 3.0.0
//! covers three numberings; for servers the table has the first, of 2025-10-04, which those built until 2025-11-13 have, and
//! for clients all three. `gen0` is the
//! protocol of 2024, without HELLO and thus without a version number. It covers a dozen numberings; the table has that of
//! 2024-10-03 to 2024-12-03, and, for the server, the first one, of 2024-05-23, whose tensor record lacks its last four bytes.
//! 1.0, 2.0 and 6.0 are unsupported: 2.0 covers ten numberings, and no release of 6.0 is known.

mod decode;
mod detect;
mod encode;
mod long_names;
mod semantics;

pub(crate) use decode::{MAX_SET_TENSOR_2D_HEAD, MAX_SET_TENSOR_HEAD};
pub(crate) use detect::VersionDetector;

use std::fmt;

use thiserror::Error;

use super::{BodySize, RpcCommand, TENSOR_RECORD, Version};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::tensor::DType;

/// Supported versions of servers, for messages.
pub(crate) const SUPPORTED_VERSIONS: &str =
    "8.0.1, 8.0.0, 7.0.0, 5.1.0, 5.0.0, 4.0.0 to 4.0.3, 3.6.1, 3.6.0, 3.5.0, 3.0.0 and that of 2024 without HELLO";

/// Codec of one version of the protocol, described by its differences from 7.0.
#[derive(Debug)]
pub(crate) struct VersionCodec {
    name: &'static str,
    /// This is the codec of the newest version.
    newest: bool,
    hello_form: HelloForm,
    /// The command with the highest number.
    last_command: RpcCommand,
    /// Command numbers of gen0: without SET_TENSOR_HASH, so the commands behind it have a number less by one.
    gen0_numbering: bool,
    /// Requests name a device by its index. Otherwise the server has one device.
    has_device_field: bool,
    /// Length of a tensor record in bytes.
    record_len: usize,
    alloc_size: AllocSizeForm,
    /// SET_TENSOR has the flag by which the client requests that the server caches the data.
    cache_flag: bool,
    /// Commands that have a response, but none in 7.0.
    acknowledged: &'static [RpcCommand],
    /// The server skips nodes without the flag `FLAG_COMPUTE`. Older servers have no such flag and compute all nodes.
    compute_flag: bool,
    /// Tensor records contain the number of nodes that read the tensor.
    use_count: bool,
    /// Graphs have a number (uid) under which GRAPH_RECOMPUTE runs them again. Without it, GRAPH_RECOMPUTE runs the last graph.
    graph_uid: bool,
    /// The fanout servers of this version offer the extensions in a byte that llama.cpp's servers send as 0.
    offers_extensions: bool,
    /// The first so many of [`ADDED_OPS`] are missing. The fields `missing_…` below count likewise.
    missing_ops: usize,
    /// The version has [`REMOVED_OPS`].
    has_removed_ops: bool,
    missing_unary_kinds: usize,
    missing_types: usize,
    /// Number of kinds of GLU.
    glu_kinds: i32,
    semantics: OpSemantics,
}

/// Form of the HELLO request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelloForm {
    /// No HELLO: any request may be the first of a connection.
    Absent,
    /// Without a body.
    Empty,
    /// With the transport capabilities of the client.
    Caps,
}

/// Form of the GET_ALLOC_SIZE request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllocSizeForm {
    Tensor,
    TensorAndSources,
}

/// Supported parameters and sources of ops. A server ignores those that it does not support, and would compute a wrong result
/// without an error.
#[derive(Debug)]
struct OpSemantics {
    /// SCALE adds a bias, its second parameter.
    scale_bias: bool,
    /// Masks may differ between heads and batches.
    mask_per_head: bool,
    /// SOFT_MAX and FLASH_ATTN_EXT have attention sinks as a source.
    sinks: bool,
    /// The kernels of FLASH_ATTN_EXT read the rows of the mask in multiples of this number, so the mask must have that many.
    mask_row_multiple: usize,
    /// In FLASH_ATTN_EXT the rows of values and of keys may differ in length.
    value_len_may_differ: bool,
    /// Supported modes of ROPE.
    rope_modes: &'static [i32],
    /// ROPE may skip the first channels of a row.
    rope_offset: bool,
    /// GROUP_NORM has its epsilon as a parameter. Before, it is 1e-6.
    group_norm_eps: bool,
    /// FLASH_ATTN_EXT caps its scores by its third parameter. Before, that parameter is the precision, now the fourth one.
    softcap: bool,
}

/// Ops that were added since gen0, newest first. Each version lacks a prefix of this list (`missing_ops`). The comments name
/// the version that added the ops below them.
const ADDED_OPS: [OpCode; 33] = [
    // 8.0.1
    OpCode::TopKMask,
    // 4.0.3
    OpCode::Dsv4HcComb,
    OpCode::Dsv4HcPre,
    OpCode::Dsv4HcPost,
    // 4.0.2
    OpCode::LightningIndexer,
    // 4.0.1
    OpCode::Col2im1d,
    // 3.6.1
    OpCode::GatedDeltaNet,
    // 3.5.0
    OpCode::TopK,
    OpCode::Cumsum,
    OpCode::Tri,
    OpCode::Fill,
    OpCode::SolveTri,
    // 3.0.0
    OpCode::Im2col3d,
    OpCode::Conv3d,
    OpCode::OptStepSgd,
    OpCode::AddId,
    OpCode::Conv2d,
    OpCode::Glu,
    OpCode::SetRows,
    OpCode::Roll,
    OpCode::Conv2dDw,
    OpCode::Custom,
    OpCode::RwkvWkv7,
    OpCode::L2Norm,
    OpCode::GatedLinearAttn,
    OpCode::PadReflect1d,
    // gen0 of 2024-10-03
    OpCode::Sin,
    OpCode::Cos,
    OpCode::CountEqual,
    OpCode::Im2colBack,
    OpCode::Pool2dBack,
    OpCode::RwkvWkv6,
    OpCode::OptStepAdamw,
];

/// Ops of gen0 that the newest version no longer has. They stood before MAP_CUSTOM1. Like it, they call a function of the client, so no server
/// can run them.
const REMOVED_OPS: [&str; 5] = ["MAP_UNARY", "MAP_BINARY", "MAP_CUSTOM1_F32", "MAP_CUSTOM2_F32", "MAP_CUSTOM3_F32"];

/// Kinds of UNARY that were added since gen0, newest first, as in [`ADDED_OPS`].
const ADDED_UNARY_KINDS: [UnaryKind; 9] = [
    // 3.5.0
    UnaryKind::Expm1,
    UnaryKind::Softplus,
    UnaryKind::Floor,
    UnaryKind::Ceil,
    UnaryKind::Round,
    UnaryKind::Trunc,
    // 3.0.0
    UnaryKind::Xielu { alpha_n: 0.0, alpha_p: 0.0, beta: 0.0, eps: 0.0 },
    UnaryKind::GeluErf,
    // gen0 of 2024-10-03
    UnaryKind::Exp,
];

/// Types that were added since gen0, newest first, as in [`ADDED_OPS`].
const ADDED_TYPES: [DType; 5] = [
    // 8.0.1
    DType::F8_E4M3,
    // 4.0.2
    DType::Q2_0,
    // 4.0.0
    DType::Q1_0,
    DType::NVFP4,
    // 3.0.0
    DType::MXFP4,
];

const V8_0_1: VersionCodec = VersionCodec {
    name: "8.0.1",
    newest: true,
    hello_form: HelloForm::Caps,
    last_command: RpcCommand::CommFree,
    gen0_numbering: false,
    has_device_field: true,
    record_len: TENSOR_RECORD,
    alloc_size: AllocSizeForm::TensorAndSources,
    cache_flag: true,
    acknowledged: &[],
    compute_flag: true,
    use_count: true,
    graph_uid: true,
    offers_extensions: true,
    missing_ops: 0,
    has_removed_ops: false,
    missing_unary_kinds: 0,
    missing_types: 0,
    glu_kinds: 7,
    semantics: OpSemantics {
        scale_bias: true,
        mask_per_head: true,
        sinks: true,
        mask_row_multiple: 1,
        value_len_may_differ: true,
        rope_modes: &[0, 2, 8, 24, 40],
        rope_offset: true,
        group_norm_eps: true,
        softcap: true,
    },
};

const V8_0_0: VersionCodec = VersionCodec { name: "8.0.0", newest: false, missing_ops: 1, missing_types: 1, ..V8_0_1 };

const V7_0: VersionCodec =
    VersionCodec { name: "7.0", last_command: RpcCommand::MemsetTensor, graph_uid: false, ..V8_0_0 };

// Each codec is the next newer one without the additions of that version.

const V5_1: VersionCodec = VersionCodec {
    name: "5.1.0",
    offers_extensions: false,
    cache_flag: false,
    acknowledged: &[RpcCommand::FreeBuffer, RpcCommand::BufferClear, RpcCommand::InitTensor, RpcCommand::MemsetTensor],
    glu_kinds: 6,
    semantics: OpSemantics { rope_offset: false, ..V7_0.semantics },
    ..V7_0
};

const V5_0: VersionCodec = VersionCodec { name: "5.0.0", use_count: false, ..V5_1 };

const V4_0_3: VersionCodec = VersionCodec { name: "4.0.3", last_command: RpcCommand::GraphRecompute, ..V5_0 };

const V4_0_2: VersionCodec = VersionCodec { name: "4.0.2", missing_ops: 4, ..V4_0_3 };

const V4_0_1: VersionCodec = VersionCodec { name: "4.0.1", missing_ops: 5, missing_types: 2, ..V4_0_2 };

const V4_0_0: VersionCodec = VersionCodec { name: "4.0.0", missing_ops: 6, ..V4_0_1 };

const V3_6_1: VersionCodec = VersionCodec { name: "3.6.1", hello_form: HelloForm::Empty, missing_types: 4, ..V4_0_0 };

// FLAG_COMPUTE was added without a new version number: it is sent, and only some servers of this version read it.
const V3_6_0: VersionCodec = VersionCodec { name: "3.6.0", missing_ops: 7, ..V3_6_1 };

const V3_6_0_UNFLAGGED: VersionCodec =
    VersionCodec { name: "3.6.0 without compute flags", compute_flag: false, ..V3_6_0 };

const V3_5: VersionCodec = VersionCodec {
    name: "3.5.0",
    alloc_size: AllocSizeForm::Tensor,
    compute_flag: false,
    semantics: OpSemantics { mask_row_multiple: 64, ..V3_6_0.semantics },
    ..V3_6_0
};

const V3_0: VersionCodec = VersionCodec {
    name: "3.0.0",
    last_command: RpcCommand::DeviceCount,
    acknowledged: &[RpcCommand::FreeBuffer, RpcCommand::BufferClear, RpcCommand::InitTensor, RpcCommand::GraphCompute],
    missing_ops: 12,
    missing_unary_kinds: 6,
    semantics: OpSemantics { rope_modes: &[0, 2, 8, 24], ..V3_5.semantics },
    ..V3_5
};

// Ops were added without a new version number: on 2025-11-13 all that 3.5.0 added except TOP_K, and on 2025-11-25 TOP_K.
const V3_0_SECOND: VersionCodec =
    VersionCodec { name: "3.0.0 of 2025-11-13", missing_ops: 8, missing_unary_kinds: 0, ..V3_0 };

const V3_0_THIRD: VersionCodec = VersionCodec { name: "3.0.0 of 2025-11-25", missing_ops: 7, ..V3_0_SECOND };

const GEN0: VersionCodec = VersionCodec {
    name: "gen0 (2024, before HELLO)",
    hello_form: HelloForm::Absent,
    last_command: RpcCommand::GetDeviceMemory,
    gen0_numbering: true,
    has_device_field: false,
    acknowledged: &[RpcCommand::FreeBuffer, RpcCommand::BufferClear, RpcCommand::SetTensor, RpcCommand::GraphCompute],
    missing_ops: 26,
    has_removed_ops: true,
    missing_unary_kinds: 8,
    missing_types: 5,
    glu_kinds: 0,
    semantics: OpSemantics {
        scale_bias: false,
        mask_per_head: false,
        sinks: false,
        value_len_may_differ: false,
        rope_modes: &[0, 2],
        ..V3_0.semantics
    },
    ..V3_0
};

/// The first protocol with the ops of 2024-05-23. No server of it is in use, so only this crate's server needs the codec.
const GEN0_FIRST: VersionCodec = VersionCodec {
    name: "gen0-first (2024-05)",
    record_len: 292,
    missing_ops: 33,
    missing_unary_kinds: 9,
    semantics: OpSemantics { group_norm_eps: false, softcap: false, ..GEN0.semantics },
    ..GEN0
};

/// A request or node that a version of the protocol cannot express.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("version {version} of the RPC protocol has no {what}")]
pub(crate) struct NotExpressible {
    /// Name of the version.
    pub(crate) version: &'static str,
    /// The missing command, op, type, parameter or source.
    pub(crate) what: String,
}

impl VersionCodec {
    /// Codec for servers of 2024 without HELLO, which close the connection when they receive it.
    pub(crate) const GEN0: &'static VersionCodec = &GEN0;

    /// Codec for the first clients of 3.6.0, which do not mark the nodes to compute.
    pub(crate) const V3_6_0_UNFLAGGED: &'static VersionCodec = &V3_6_0_UNFLAGGED;

    /// Codecs for clients of 3.0.0 that were built after ops had been added to it.
    pub(crate) const V3_0_SECOND: &'static VersionCodec = &V3_0_SECOND;
    pub(crate) const V3_0_THIRD: &'static VersionCodec = &V3_0_THIRD;

    /// Codec of 7.0.
    pub(super) const V7_0: &'static VersionCodec = &V7_0;

    /// Length of a tensor record in bytes.
    pub(super) const fn record_len(&self) -> usize {
        self.record_len
    }

    /// Codec for clients of the first months without HELLO.
    pub(crate) const GEN0_FIRST: &'static VersionCodec = &GEN0_FIRST;

    /// Codec of the version in a server's reply to HELLO; `None` if it is unsupported.
    pub(crate) const fn for_version(version: Version) -> Option<&'static VersionCodec> {
        Some(match (version.major, version.minor, version.patch) {
            (8, 0, 0) => &V8_0_0,
            (8, 0, _) => &V8_0_1,
            (7, 0, _) => &V7_0,
            (5, 1, 0) => &V5_1,
            (5, 0, 0) => &V5_0,
            (4, 0, 3) => &V4_0_3,
            (4, 0, 2) => &V4_0_2,
            (4, 0, 1) => &V4_0_1,
            (4, 0, 0) => &V4_0_0,
            (3, 6, 1) => &V3_6_1,
            (3, 6, 0) => &V3_6_0,
            (3, 5, 0) => &V3_5,
            (3, 0, 0) => &V3_0,
            _ => return None,
        })
    }

    /// The codec of the newest version, in whose numbers fanout's extensions and this crate's types and ops are numbered.
    pub(crate) const NEWEST: &'static VersionCodec = &V8_0_1;

    /// Whether this is the codec of the newest version.
    pub(crate) const fn is_newest(&self) -> bool {
        self.newest
    }

    /// Whether GRAPH_COMPUTE gives graphs a number, by which GRAPH_RECOMPUTE names them.
    pub(crate) const fn has_graph_uid(&self) -> bool {
        self.graph_uid
    }

    /// Whether a reply to HELLO may offer fanout's extensions.
    pub(crate) const fn offers_extensions(&self) -> bool {
        self.offers_extensions
    }

    /// Whether SET_TENSOR has the flag by which the client requests that the server caches the data.
    pub(crate) const fn has_cache_flag(&self) -> bool {
        self.cache_flag
    }

    /// Whether requests name a device by its index. Otherwise the server has one device.
    pub(crate) const fn has_device_field(&self) -> bool {
        self.has_device_field
    }

    /// Form of the HELLO request in this version.
    pub(crate) const fn hello_form(&self) -> HelloForm {
        self.hello_form
    }

    /// Number of a command; `None` if the version lacks it.
    pub(crate) const fn command_number(&self, command: RpcCommand) -> Option<u8> {
        let number = command as u8;
        if !self.gen0_numbering {
            return if number <= self.last_command as u8 { Some(number) } else { None };
        }
        match command {
            RpcCommand::SetTensorHash => None,
            _ if number > self.last_command as u8 => None,
            _ if number > RpcCommand::SetTensorHash as u8 => Some(number - 1),
            _ => Some(number),
        }
    }

    /// Allowed lengths of the response's body; `None` if the command has no response.
    pub(crate) fn response_size(&self, command: RpcCommand) -> Option<BodySize> {
        if !self.acknowledged.contains(&command) {
            return command.response();
        }
        // The response to GRAPH_COMPUTE is the status of the computation, one byte. The others are empty.
        Some(BodySize::Exact(if command == RpcCommand::GraphCompute { 1 } else { 0 }))
    }

    /// Number of an op; `None` if the version lacks it.
    pub(crate) fn op_number(&self, op: OpCode) -> Option<u32> {
        let later = &ADDED_OPS[..self.missing_ops];
        if later.contains(&op) || !op.is_in_protocol() {
            return None;
        }
        let (removed, next) = self.removed_ops();
        let removed = if op >= next { removed } else { 0 };
        Some(op.to_wire() - later.iter().filter(|&&other| other < op).count() as u32 + removed)
    }

    /// How many of [`REMOVED_OPS`] the version has, and the op of the newest version before which they stand.
    const fn removed_ops(&self) -> (u32, OpCode) {
        (if self.has_removed_ops { REMOVED_OPS.len() as u32 } else { 0 }, OpCode::MapCustom1)
    }

    /// Number of a kind of UNARY; `None` if the version lacks it.
    pub(crate) fn unary_number(&self, kind: &UnaryKind) -> Option<i32> {
        let later = ADDED_UNARY_KINDS[..self.missing_unary_kinds].iter().map(UnaryKind::wire_number);
        let number = kind.wire_number();
        let missing = later.clone().any(|other| other == number);
        (!missing).then(|| number - later.filter(|&other| other < number).count() as i32)
    }

    /// Whether the version has the kind of GLU with this number.
    pub(crate) const fn has_glu(&self, kind: i32) -> bool {
        kind < self.glu_kinds
    }

    /// Whether the version has a type. Types have the same numbers in all versions.
    pub(crate) fn has_type(&self, dtype: DType) -> bool {
        !ADDED_TYPES[..self.missing_types].contains(&dtype)
    }

    fn not_expressible(&self, what: impl Into<String>) -> NotExpressible {
        NotExpressible { version: self.name, what: what.into() }
    }
}

/// A name belongs to one codec.
impl PartialEq for VersionCodec {
    fn eq(&self, other: &VersionCodec) -> bool {
        self.name == other.name
    }
}

impl Eq for VersionCodec {}

impl fmt::Display for VersionCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
