//! Versions of the protocol: their differences from the newest, and the translation of requests between them.
//!
//! ```text
//! layout      the fields of each request that not all versions have, and the lengths of bodies
//! encode      from the newest version to that of a server
//! decode      from the version of a client to the newest one
//! detect      the version of a client, as its requests show it
//! semantics   whether a version computes a node as the newest one does
//! ```
//!
//! All versions have the frame and the tensor record of the newest one and, with few exceptions, its bodies. Ops and unary
//! kinds were added between existing ones, which shifted the numbers of those after them, but never changed the order. The
//! number of an op in an old version is therefore its newest number minus the number of later additions before it.
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
mod layout;
mod semantics;

pub(crate) use decode::{ClientCodec, MAX_UPLOAD_HEAD};
pub(crate) use detect::VersionDetector;

use std::fmt;

use thiserror::Error;

use super::{BodySize, RpcCommand, Version};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::tensor::DType;

/// Supported versions of servers, for messages.
pub(crate) const SUPPORTED_VERSIONS: &str =
    "8.0.1, 8.0.0, 7.0.0, 5.1.0, 5.0.0, 4.0.0 to 4.0.3, 3.6.1, 3.6.0, 3.5.0, 3.0.0 and that of 2024 without HELLO";

/// A version of the protocol, oldest first. A feature has the first version that has it, and `self >= VersionCodec::V7_0` asks
/// for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum VersionCodec {
    /// The first protocol, with the ops of 2024-05-23. No server of it is in use.
    Gen0First,
    /// Without HELLO: servers of 2024 close the connection when they receive it.
    Gen0,
    V3_0,
    /// Ops were added without a new version number: on 2025-11-13 all that 3.5.0 added except TOP_K, and on 2025-11-25 TOP_K.
    V3_0Second,
    V3_0Third,
    V3_5,
    /// FLAG_COMPUTE was added without a new version number: it is sent, and only some servers of 3.6.0 read it. The first clients
    /// do not send it.
    V3_6_0Unflagged,
    V3_6_0,
    V3_6_1,
    V4_0_0,
    V4_0_1,
    V4_0_2,
    V4_0_3,
    V5_0,
    V5_1,
    V7_0,
    V8_0_0,
    V8_0_1,
}

use VersionCodec::{
    Gen0, Gen0First, V3_0, V3_0Second, V3_0Third, V3_5, V3_6_0, V3_6_0Unflagged, V3_6_1, V4_0_0, V4_0_1, V4_0_2,
    V4_0_3, V5_0, V5_1, V7_0, V8_0_0, V8_0_1,
};

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

/// Ops that were added since the first version, newest first, each with the version that added it.
const ADDED_OPS: [(VersionCodec, OpCode); 33] = [
    (V8_0_1, OpCode::TopKMask),
    (V4_0_3, OpCode::Dsv4HcComb),
    (V4_0_3, OpCode::Dsv4HcPre),
    (V4_0_3, OpCode::Dsv4HcPost),
    (V4_0_2, OpCode::LightningIndexer),
    (V4_0_1, OpCode::Col2im1d),
    (V3_6_1, OpCode::GatedDeltaNet),
    (V3_0Third, OpCode::TopK),
    (V3_0Second, OpCode::Cumsum),
    (V3_0Second, OpCode::Tri),
    (V3_0Second, OpCode::Fill),
    (V3_0Second, OpCode::SolveTri),
    (V3_0, OpCode::Im2col3d),
    (V3_0, OpCode::Conv3d),
    (V3_0, OpCode::OptStepSgd),
    (V3_0, OpCode::AddId),
    (V3_0, OpCode::Conv2d),
    (V3_0, OpCode::Glu),
    (V3_0, OpCode::SetRows),
    (V3_0, OpCode::Roll),
    (V3_0, OpCode::Conv2dDw),
    (V3_0, OpCode::Custom),
    (V3_0, OpCode::RwkvWkv7),
    (V3_0, OpCode::L2Norm),
    (V3_0, OpCode::GatedLinearAttn),
    (V3_0, OpCode::PadReflect1d),
    (Gen0, OpCode::Sin),
    (Gen0, OpCode::Cos),
    (Gen0, OpCode::CountEqual),
    (Gen0, OpCode::Im2colBack),
    (Gen0, OpCode::Pool2dBack),
    (Gen0, OpCode::RwkvWkv6),
    (Gen0, OpCode::OptStepAdamw),
];

/// Ops of gen0 that the newest version no longer has. They stood before MAP_CUSTOM1. Like it, they call a function of the client, so no server
/// can run them.
const REMOVED_OPS: [&str; 5] = ["MAP_UNARY", "MAP_BINARY", "MAP_CUSTOM1_F32", "MAP_CUSTOM2_F32", "MAP_CUSTOM3_F32"];

/// Kinds of UNARY that were added since the first version, as in [`ADDED_OPS`].
const ADDED_UNARY_KINDS: [(VersionCodec, UnaryKind); 9] = [
    (V3_0Second, UnaryKind::Expm1),
    (V3_0Second, UnaryKind::Softplus),
    (V3_0Second, UnaryKind::Floor),
    (V3_0Second, UnaryKind::Ceil),
    (V3_0Second, UnaryKind::Round),
    (V3_0Second, UnaryKind::Trunc),
    (V3_0, UnaryKind::Xielu { alpha_n: 0.0, alpha_p: 0.0, beta: 0.0, eps: 0.0 }),
    (V3_0, UnaryKind::GeluErf),
    (Gen0, UnaryKind::Exp),
];

/// Types that were added since the first version, as in [`ADDED_OPS`].
const ADDED_TYPES: [(VersionCodec, DType); 5] = [
    (V8_0_1, DType::F8_E4M3),
    (V4_0_2, DType::Q2_0),
    (V4_0_0, DType::Q1_0),
    (V4_0_0, DType::NVFP4),
    (V3_0, DType::MXFP4),
];

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
    /// The newest version, in whose numbers fanout's extensions and this crate's types and ops are numbered.
    pub(crate) const NEWEST: VersionCodec = V8_0_1;

    /// The version in a server's reply to HELLO; `None` if it is unsupported.
    pub(crate) const fn for_version(version: Version) -> Option<VersionCodec> {
        Some(match (version.major, version.minor, version.patch) {
            (8, 0, 0) => V8_0_0,
            (8, 0, _) => V8_0_1,
            (7, 0, _) => V7_0,
            (5, 1, 0) => V5_1,
            (5, 0, 0) => V5_0,
            (4, 0, 3) => V4_0_3,
            (4, 0, 2) => V4_0_2,
            (4, 0, 1) => V4_0_1,
            (4, 0, 0) => V4_0_0,
            (3, 6, 1) => V3_6_1,
            (3, 6, 0) => V3_6_0,
            (3, 5, 0) => V3_5,
            (3, 0, 0) => V3_0,
            _ => return None,
        })
    }

    /// Name for messages.
    const fn name(self) -> &'static str {
        match self {
            Gen0First => "gen0-first (2024-05)",
            Gen0 => "gen0 (2024, before HELLO)",
            V3_0 => "3.0.0",
            V3_0Second => "3.0.0 of 2025-11-13",
            V3_0Third => "3.0.0 of 2025-11-25",
            V3_5 => "3.5.0",
            V3_6_0Unflagged => "3.6.0 without compute flags",
            V3_6_0 => "3.6.0",
            V3_6_1 => "3.6.1",
            V4_0_0 => "4.0.0",
            V4_0_1 => "4.0.1",
            V4_0_2 => "4.0.2",
            V4_0_3 => "4.0.3",
            V5_0 => "5.0.0",
            V5_1 => "5.1.0",
            V7_0 => "7.0",
            V8_0_0 => "8.0.0",
            V8_0_1 => "8.0.1",
        }
    }

    /// Whether this is the newest version.
    pub(crate) fn is_newest(self) -> bool {
        self == VersionCodec::NEWEST
    }

    /// Whether GRAPH_COMPUTE gives graphs a number (uid), by which GRAPH_RECOMPUTE names them. Before, GRAPH_RECOMPUTE runs the
    /// last graph.
    pub(crate) fn has_graph_uid(self) -> bool {
        self >= V8_0_0
    }

    /// Whether the reply to HELLO may offer fanout's extensions, in a byte that llama.cpp's servers send as 0.
    pub(crate) fn offers_extensions(self) -> bool {
        self >= V7_0
    }

    /// Whether requests name a device by its index. Otherwise the server has one device.
    pub(crate) fn has_device_field(self) -> bool {
        self >= V3_0
    }

    /// Whether the server skips nodes without the flag `FLAG_COMPUTE`. Older servers have no such flag and compute all nodes.
    fn has_compute_flag(self) -> bool {
        self >= V3_6_0
    }

    /// Whether tensor records contain the number of nodes that read the tensor.
    fn has_use_count(self) -> bool {
        self >= V5_1
    }

    /// Form of the HELLO request in this version.
    pub(crate) const fn hello_form(self) -> HelloForm {
        match self {
            Gen0First | Gen0 => HelloForm::Absent,
            V3_0 | V3_0Second | V3_0Third | V3_5 | V3_6_0Unflagged | V3_6_0 | V3_6_1 => HelloForm::Empty,
            _ => HelloForm::Caps,
        }
    }

    /// Number of a command; `None` if the version lacks it.
    pub(crate) fn command_number(self, command: RpcCommand) -> Option<u8> {
        use RpcCommand as Command;
        let since = match command {
            Command::SetTensorHash
            | Command::InitTensor
            | Command::GetAllocSize
            | Command::Hello
            | Command::DeviceCount => V3_0,
            Command::GraphRecompute => V3_5,
            Command::MemsetTensor => V5_0,
            Command::SetTensor2d
            | Command::GetTensor2d
            | Command::CommInit
            | Command::CommAllreduce
            | Command::CommFree => V8_0_0,
            _ => Gen0First,
        };
        // Without SET_TENSOR_HASH, the commands after it have a number less by one.
        let shifted = self < V3_0 && command as u8 > Command::SetTensorHash as u8;
        (self >= since).then_some(command as u8 - u8::from(shifted))
    }

    /// Allowed lengths of the response's body; `None` if the command has no response.
    pub(crate) fn response_size(self, command: RpcCommand) -> Option<BodySize> {
        use RpcCommand::{BufferClear, FreeBuffer, GraphCompute, InitTensor, MemsetTensor, SetTensor};
        match command {
            FreeBuffer | BufferClear | InitTensor | MemsetTensor if self < V7_0 => Some(BodySize::Exact(0)),
            SetTensor if self < V3_0 => Some(BodySize::Exact(0)),
            // The status of the computation.
            GraphCompute if self < V3_5 => Some(BodySize::Exact(1)),
            _ => command.response(),
        }
    }

    /// Number of an op; `None` if the version lacks it.
    pub(crate) fn op_number(self, op: OpCode) -> Option<u32> {
        if self.missing(&ADDED_OPS).any(|other| other == op) || !op.is_in_protocol() {
            return None;
        }
        let (removed, next) = self.removed_ops();
        let removed = if op >= next { removed } else { 0 };
        Some(op.to_wire() - self.missing(&ADDED_OPS).filter(|&other| other < op).count() as u32 + removed)
    }

    /// How many of [`REMOVED_OPS`] the version has, and the op of the newest version before which they stand.
    fn removed_ops(self) -> (u32, OpCode) {
        (if self < V3_0 { REMOVED_OPS.len() as u32 } else { 0 }, OpCode::MapCustom1)
    }

    /// Number of a kind of UNARY; `None` if the version lacks it.
    pub(crate) fn unary_number(self, kind: &UnaryKind) -> Option<i32> {
        let later = || self.missing(&ADDED_UNARY_KINDS).map(|kind| kind.wire_number());
        let number = kind.wire_number();
        let missing = later().any(|other| other == number);
        (!missing).then(|| number - later().filter(|&other| other < number).count() as i32)
    }

    /// Whether the version has the kind of GLU with this number.
    pub(crate) fn has_glu(self, kind: i32) -> bool {
        kind < if self < V3_0 {
            0
        } else if self < V7_0 {
            6
        } else {
            7
        }
    }

    /// Whether the version has a mode of ROPE.
    fn has_rope_mode(self, mode: i32) -> bool {
        let modes: &[i32] = if self < V3_0 {
            &[0, 2]
        } else if self < V3_5 {
            &[0, 2, 8, 24]
        } else {
            &[0, 2, 8, 24, 40]
        };
        modes.contains(&mode)
    }

    /// Whether the version has a type. Types have the same numbers in all versions.
    pub(crate) fn has_type(self, dtype: DType) -> bool {
        self.missing(&ADDED_TYPES).all(|missing| missing != dtype)
    }

    /// What later versions than this one have added.
    fn missing<T: Copy>(self, added: &'static [(VersionCodec, T)]) -> impl Iterator<Item = T> {
        added.iter().take_while(move |(since, _)| *since > self).map(|(_, added)| *added)
    }

    fn not_expressible(self, what: impl Into<String>) -> NotExpressible {
        NotExpressible { version: self.name(), what: what.into() }
    }
}

impl fmt::Display for VersionCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
