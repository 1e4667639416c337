//! Versions of the protocol before 7.0, as a client speaks them: a table of what each lacks, and requests in its bytes.
//!
//! All of them share the frame, the tensor record of 296 bytes and, with few exceptions, the bodies of 7.0. What came later is
//! missing; ops and kinds were put in between, so that the numbers of those behind them moved. Their order never changed:
//! a version's number of an op is that of 7.0 less the later ones before it.
//!
//! From 3.6.1 on a version number says exactly which ops there are. Before, ops came without a new number: 3.0.0 stands for
//! three numberings (the table has the first, of 2025-10-04, which a server may have up to 2025-11-13), and what is called
//! gen0 here, which says no version at all, for a dozen (the table has that of 2024-10-03 to 2024-12-03). 1.0, 2.0 and 6.0
//! are not served: 2.0 stands for ten numberings, and no release of 6.0 is known.

mod encode;
mod meaning;

use std::fmt;

use thiserror::Error;

use super::{BodySize, Command, Version};
use crate::ops::OpCode;
use crate::ops::unary::UnaryKind;
use crate::tensor::DType;

/// The versions that a client serves, for messages.
pub(crate) const SERVED: &str =
    "7.0.0, 5.1.0, 5.0.0, 4.0.0 to 4.0.3, 3.6.1, 3.6.0, 3.5.0, 3.0.0 and the one of 2024 that has no HELLO";

/// One version of the protocol: what of 7.0 it has, and how it says it.
#[derive(Debug)]
pub(crate) struct Dialect {
    name: &'static str,
    /// 7.0 itself.
    current: bool,
    hello: HelloForm,
    /// The command of the highest number.
    last: Command,
    /// SET_TENSOR_HASH had not come between the others yet, nor anything behind GET_DEVICE_MEMORY.
    first_numbers: bool,
    /// Whether requests name a device, of which there may be several.
    devices: bool,
    alloc_size: AllocSizeForm,
    /// Whether SET_TENSOR says if the data is worth keeping.
    cache_flag: bool,
    /// Commands with a response that has none in 7.0.
    acknowledged: &'static [Command],
    /// Whether listed nodes are computed only where a flag says so.
    compute_flag: bool,
    /// Whether records say how many nodes read a tensor.
    use_count: bool,
    /// How many of [`LATER_OPS`] are missing, from the front; likewise below.
    later_ops: usize,
    /// Ops that are gone: how many, before which one.
    gone_ops: (u32, OpCode),
    later_kinds: usize,
    later_types: usize,
    /// The kinds of GLU.
    glu_kinds: i32,
    meaning: Meaning,
}

/// How HELLO is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelloForm {
    /// There is none: the connection's first message may be any.
    Absent,
    /// Without a body.
    Empty,
    /// With the client's transports.
    Caps,
}

/// What GET_ALLOC_SIZE tells of the tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AllocSizeForm {
    Tensor,
    TensorAndSources,
}

/// What parameters and sources mean. A server ignores those that it does not know, and computes something else.
#[derive(Debug)]
struct Meaning {
    /// SCALE adds its second parameter.
    scale_bias: bool,
    /// Masks may differ between heads and batches.
    large_masks: bool,
    /// SOFT_MAX and FLASH_ATTN_EXT take sinks.
    sinks: bool,
    /// Rows of a mask of FLASH_ATTN_EXT that kernels read: a multiple of this.
    mask_rows: usize,
    /// FLASH_ATTN_EXT takes values of another length than the keys'.
    wide_values: bool,
    /// The modes of ROPE.
    rope_modes: &'static [i32],
    /// ROPE may begin behind a row's first channels.
    rope_offset: bool,
}

/// What came after the first version that is served, the last to come first: each version lacks some from the front.
const LATER_OPS: [OpCode; 25] = [
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
];

const LATER_KINDS: [UnaryKind; 8] = [
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
];

const LATER_TYPES: [DType; 4] = [
    // 4.0.2
    DType::Q2_0,
    // 4.0.0
    DType::Q1_0,
    DType::NVFP4,
    // 3.0.0
    DType::MXFP4,
];

const V7_0: Dialect = Dialect {
    name: "7.0",
    current: true,
    hello: HelloForm::Caps,
    last: Command::MemsetTensor,
    first_numbers: false,
    devices: true,
    alloc_size: AllocSizeForm::TensorAndSources,
    cache_flag: true,
    acknowledged: &[],
    compute_flag: true,
    use_count: true,
    later_ops: 0,
    gone_ops: (0, OpCode::None),
    later_kinds: 0,
    later_types: 0,
    glu_kinds: 7,
    meaning: Meaning {
        scale_bias: true,
        large_masks: true,
        sinks: true,
        mask_rows: 1,
        wide_values: true,
        rope_modes: &[0, 2, 8, 24, 40],
        rope_offset: true,
    },
};

// Each as the next one, less what came with that.

const V5_1: Dialect = Dialect {
    name: "5.1.0",
    current: false,
    cache_flag: false,
    acknowledged: &[Command::FreeBuffer, Command::BufferClear, Command::InitTensor, Command::MemsetTensor],
    glu_kinds: 6,
    meaning: Meaning { rope_offset: false, ..V7_0.meaning },
    ..V7_0
};

const V5_0: Dialect = Dialect { name: "5.0.0", use_count: false, ..V5_1 };

const V4_0_3: Dialect = Dialect { name: "4.0.3", last: Command::GraphRecompute, ..V5_0 };

const V4_0_2: Dialect = Dialect { name: "4.0.2", later_ops: 3, ..V4_0_3 };

const V4_0_1: Dialect = Dialect { name: "4.0.1", later_ops: 4, later_types: 1, ..V4_0_2 };

const V4_0_0: Dialect = Dialect { name: "4.0.0", later_ops: 5, ..V4_0_1 };

const V3_6_1: Dialect = Dialect { name: "3.6.1", hello: HelloForm::Empty, later_types: 3, ..V4_0_0 };

// The flag of nodes to compute came while this was the version: it is set, and not everyone reads it.
const V3_6_0: Dialect = Dialect { name: "3.6.0", later_ops: 6, ..V3_6_1 };

const V3_5: Dialect = Dialect {
    name: "3.5.0",
    alloc_size: AllocSizeForm::Tensor,
    compute_flag: false,
    meaning: Meaning { mask_rows: 64, ..V3_6_0.meaning },
    ..V3_6_0
};

const V3_0: Dialect = Dialect {
    name: "3.0.0",
    last: Command::DeviceCount,
    acknowledged: &[Command::FreeBuffer, Command::BufferClear, Command::InitTensor, Command::GraphCompute],
    later_ops: 11,
    later_kinds: 6,
    meaning: Meaning { rope_modes: &[0, 2, 8, 24], ..V3_5.meaning },
    ..V3_5
};

const GEN0: Dialect = Dialect {
    name: "gen0 (2024, before HELLO)",
    hello: HelloForm::Absent,
    last: Command::GetDeviceMemory,
    first_numbers: true,
    devices: false,
    acknowledged: &[Command::FreeBuffer, Command::BufferClear, Command::SetTensor, Command::GraphCompute],
    later_ops: 25,
    gone_ops: (5, OpCode::MapCustom1),
    later_kinds: 8,
    later_types: 4,
    glu_kinds: 0,
    meaning: Meaning {
        scale_bias: false,
        large_masks: false,
        sinks: false,
        wide_values: false,
        rope_modes: &[0, 2],
        ..V3_0.meaning
    },
    ..V3_0
};

/// What a version has no word for.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("version {version} of the RPC protocol has no {what}")]
pub(crate) struct Unsayable {
    /// The version.
    pub(crate) version: &'static str,
    /// What it lacks.
    pub(crate) what: String,
}

impl Dialect {
    /// 7.0, which everything else here is written in.
    #[cfg(test)]
    pub(crate) const CURRENT: &'static Dialect = &V7_0;

    /// The version of servers that do not know HELLO and close the connection on it.
    pub(crate) const FIRST: &'static Dialect = &GEN0;

    /// The dialect of a version that a server states; `None` if it is not served.
    pub(crate) const fn of(version: Version) -> Option<&'static Dialect> {
        Some(match (version.major, version.minor, version.patch) {
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

    /// Whether this is 7.0.
    pub(crate) const fn is_current(&self) -> bool {
        self.current
    }

    /// How the version opens a connection.
    pub(crate) const fn hello(&self) -> HelloForm {
        self.hello
    }

    /// A command's number, where the version has it.
    pub(crate) const fn number(&self, command: Command) -> Option<u8> {
        let number = command as u8;
        if !self.first_numbers {
            return if number <= self.last as u8 { Some(number) } else { None };
        }
        match command {
            Command::SetTensorHash => None,
            _ if number > self.last as u8 => None,
            _ if number > Command::SetTensorHash as u8 => Some(number - 1),
            _ => Some(number),
        }
    }

    /// The length of the response's body; `None` if nothing is sent back.
    pub(crate) fn reply(&self, command: Command) -> Option<BodySize> {
        if !self.acknowledged.contains(&command) {
            return command.response();
        }
        // GRAPH_COMPUTE's is the status of the computation.
        Some(BodySize::Exact(if command == Command::GraphCompute { 1 } else { 0 }))
    }

    /// An op's number, where the version has it.
    pub(crate) fn op(&self, op: OpCode) -> Option<u32> {
        let later = &LATER_OPS[..self.later_ops];
        if later.contains(&op) {
            return None;
        }
        let (gone, behind) = self.gone_ops;
        let gone = if op >= behind { gone } else { 0 };
        Some(op.to_wire() - later.iter().filter(|&&other| other < op).count() as u32 + gone)
    }

    /// The number of a kind of UNARY, where the version has it.
    pub(crate) fn kind(&self, kind: &UnaryKind) -> Option<i32> {
        let later = LATER_KINDS[..self.later_kinds].iter().map(UnaryKind::wire_number);
        let number = kind.wire_number();
        let missing = later.clone().any(|other| other == number);
        (!missing).then(|| number - later.filter(|&other| other < number).count() as i32)
    }

    /// Whether the version has a kind of GLU, by its number.
    pub(crate) const fn has_glu(&self, kind: i32) -> bool {
        kind < self.glu_kinds
    }

    /// Whether the version has a type. The numbers of types have never changed.
    pub(crate) fn has_type(&self, dtype: DType) -> bool {
        !LATER_TYPES[..self.later_types].contains(&dtype)
    }

    fn no(&self, what: impl Into<String>) -> Unsayable {
        Unsayable { version: self.name, what: what.into() }
    }
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}
