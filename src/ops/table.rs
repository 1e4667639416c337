//! The op codes: number on the wire and name of all 102 ops of ggml's RPC protocol 8.0.1, and the ops that are fanout's own.
//! [`super::FAMILIES`] lists the ops that fanout runs. Older versions of the protocol have other numbers.

use std::fmt;

macro_rules! ops {
    (ggml { $($number:literal $code:ident $name:literal;)* } fanout { $($own_number:literal $own:ident $own_name:literal;)* }) => {
        /// An op. The discriminant is its number on the wire of protocol 8.0.1. The numbers of fanout's own ops are far above
        /// ggml's numbers, and no message carries them.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[allow(missing_docs)] // ggml's op names; docs/ops.md describes them
        #[repr(u32)]
        #[non_exhaustive]
        pub enum OpCode {
            $($code = $number,)*
            $($own = $own_number,)*
        }

        impl OpCode {
            /// Every op of protocol 8.0.1, by number.
            pub const ALL: &'static [OpCode] = &[$(OpCode::$code),*];

            /// fanout's own ops, which ggml and its protocol do not have.
            pub const OWN: &'static [OpCode] = &[$(OpCode::$own),*];

            /// The op of protocol 8.0.1 with this number on the wire: never one of [`OpCode::OWN`].
            pub const fn from_wire(number: u32) -> Option<OpCode> {
                match number {
                    $($number => Some(OpCode::$code),)*
                    _ => None,
                }
            }

            /// The op with this number on the wire of fanout's extension, which has all ops.
            pub const fn from_extension_wire(number: u32) -> Option<OpCode> {
                match number {
                    $($own_number => Some(OpCode::$own),)*
                    _ => OpCode::from_wire(number),
                }
            }

            /// The op's name, for example `MUL_MAT`: ggml's, if ggml has the op.
            pub const fn name(self) -> &'static str {
                match self {
                    $(OpCode::$code => $name,)*
                    $(OpCode::$own => $own_name,)*
                }
            }
        }
    };
}

ops! {
    ggml {
        0 None "NONE";
        1 Dup "DUP";
        2 Add "ADD";
        3 AddId "ADD_ID";
        4 Add1 "ADD1";
        5 Acc "ACC";
        6 Sub "SUB";
        7 Mul "MUL";
        8 Div "DIV";
        9 Sqr "SQR";
        10 Sqrt "SQRT";
        11 Log "LOG";
        12 Sin "SIN";
        13 Cos "COS";
        14 Sum "SUM";
        15 SumRows "SUM_ROWS";
        16 Cumsum "CUMSUM";
        17 Mean "MEAN";
        18 Argmax "ARGMAX";
        19 CountEqual "COUNT_EQUAL";
        20 Repeat "REPEAT";
        21 RepeatBack "REPEAT_BACK";
        22 Concat "CONCAT";
        23 SiluBack "SILU_BACK";
        24 Norm "NORM";
        25 RmsNorm "RMS_NORM";
        26 RmsNormBack "RMS_NORM_BACK";
        27 GroupNorm "GROUP_NORM";
        28 L2Norm "L2_NORM";
        29 MulMat "MUL_MAT";
        30 MulMatId "MUL_MAT_ID";
        31 OutProd "OUT_PROD";
        32 Scale "SCALE";
        33 Set "SET";
        34 Cpy "CPY";
        35 Cont "CONT";
        36 Reshape "RESHAPE";
        37 View "VIEW";
        38 Permute "PERMUTE";
        39 Transpose "TRANSPOSE";
        40 GetRows "GET_ROWS";
        41 GetRowsBack "GET_ROWS_BACK";
        42 SetRows "SET_ROWS";
        43 Diag "DIAG";
        44 DiagMaskInf "DIAG_MASK_INF";
        45 DiagMaskZero "DIAG_MASK_ZERO";
        46 SoftMax "SOFT_MAX";
        47 SoftMaxBack "SOFT_MAX_BACK";
        48 Rope "ROPE";
        49 RopeBack "ROPE_BACK";
        50 Clamp "CLAMP";
        51 ConvTranspose1d "CONV_TRANSPOSE_1D";
        52 Im2col "IM2COL";
        53 Im2colBack "IM2COL_BACK";
        54 Im2col3d "IM2COL_3D";
        55 Col2im1d "COL2IM_1D";
        56 Conv2d "CONV_2D";
        57 Conv3d "CONV_3D";
        58 Conv2dDw "CONV_2D_DW";
        59 ConvTranspose2d "CONV_TRANSPOSE_2D";
        60 Pool1d "POOL_1D";
        61 Pool2d "POOL_2D";
        62 Pool2dBack "POOL_2D_BACK";
        63 Upscale "UPSCALE";
        64 Pad "PAD";
        65 PadReflect1d "PAD_REFLECT_1D";
        66 Roll "ROLL";
        67 Arange "ARANGE";
        68 TimestepEmbedding "TIMESTEP_EMBEDDING";
        69 Argsort "ARGSORT";
        70 TopK "TOP_K";
        71 LeakyRelu "LEAKY_RELU";
        72 Tri "TRI";
        73 Fill "FILL";
        74 FlashAttnExt "FLASH_ATTN_EXT";
        75 FlashAttnBack "FLASH_ATTN_BACK";
        76 SsmConv "SSM_CONV";
        77 SsmScan "SSM_SCAN";
        78 WinPart "WIN_PART";
        79 WinUnpart "WIN_UNPART";
        80 GetRelPos "GET_REL_POS";
        81 AddRelPos "ADD_REL_POS";
        82 RwkvWkv6 "RWKV_WKV6";
        83 GatedLinearAttn "GATED_LINEAR_ATTN";
        84 RwkvWkv7 "RWKV_WKV7";
        85 SolveTri "SOLVE_TRI";
        86 GatedDeltaNet "GATED_DELTA_NET";
        87 LightningIndexer "LIGHTNING_INDEXER";
        88 Dsv4HcComb "DSV4_HC_COMB";
        89 Dsv4HcPre "DSV4_HC_PRE";
        90 Dsv4HcPost "DSV4_HC_POST";
        91 TopKMask "TOP_K_MASK";
        92 Unary "UNARY";
        93 MapCustom1 "MAP_CUSTOM1";
        94 MapCustom2 "MAP_CUSTOM2";
        95 MapCustom3 "MAP_CUSTOM3";
        96 Custom "CUSTOM";
        97 CrossEntropyLoss "CROSS_ENTROPY_LOSS";
        98 CrossEntropyLossBack "CROSS_ENTROPY_LOSS_BACK";
        99 OptStepAdamw "OPT_STEP_ADAMW";
        100 OptStepSgd "OPT_STEP_SGD";
        101 Glu "GLU";
    }
    fanout {
        0x4000 AllReduce "ALL_REDUCE";
        0x4001 AllGather "ALL_GATHER";
        0x4002 ReduceScatter "REDUCE_SCATTER";
    }
}

impl OpCode {
    /// The op's number on the wire of protocol 8.0.1. The numbers of [`OpCode::OWN`] are in messages of fanout's extension only:
    /// [`OpCode::is_in_protocol`].
    pub const fn to_wire(self) -> u32 {
        self as u32
    }

    /// Whether protocol 8.0.1 has the op: false for fanout's own ops.
    pub const fn is_in_protocol(self) -> bool {
        OpCode::from_wire(self as u32).is_some()
    }

    /// Why no server can run an op of the protocol; `None` for an op that it can run.
    pub const fn impossible(self) -> Option<&'static str> {
        match self {
            OpCode::MapCustom1 | OpCode::MapCustom2 | OpCode::MapCustom3 | OpCode::Custom => {
                Some("it calls a function in the address space of the client")
            }
            OpCode::FlashAttnBack => Some("in ggml it always aborts"),
            _ => None,
        }
    }

    /// The largest number of sources of a node of the op.
    pub const fn max_sources(self) -> usize {
        match self {
            OpCode::Arange | OpCode::None => 0,
            OpCode::Repeat
            | OpCode::RepeatBack
            | OpCode::Sqr
            | OpCode::Sqrt
            | OpCode::Log
            | OpCode::Sin
            | OpCode::Cos
            | OpCode::Unary
            | OpCode::Scale
            | OpCode::Clamp
            | OpCode::LeakyRelu
            | OpCode::Fill
            | OpCode::Sum
            | OpCode::SumRows
            | OpCode::Cumsum
            | OpCode::Mean
            | OpCode::Argmax
            | OpCode::Norm
            | OpCode::RmsNorm
            | OpCode::GroupNorm
            | OpCode::L2Norm
            | OpCode::Dup
            | OpCode::Cont
            | OpCode::Argsort
            | OpCode::TopK
            | OpCode::Col2im1d
            | OpCode::Pool1d
            | OpCode::Pool2d
            | OpCode::Upscale
            | OpCode::WinPart
            | OpCode::WinUnpart
            | OpCode::GetRelPos
            | OpCode::TimestepEmbedding
            | OpCode::Diag
            | OpCode::DiagMaskInf
            | OpCode::DiagMaskZero
            | OpCode::Tri
            | OpCode::Pad
            | OpCode::PadReflect1d
            | OpCode::Roll
            | OpCode::AllReduce
            | OpCode::AllGather
            | OpCode::ReduceScatter
            | OpCode::Reshape
            | OpCode::View
            | OpCode::Permute
            | OpCode::Transpose => 1,
            OpCode::AddId
            | OpCode::MulMatId
            | OpCode::Rope
            | OpCode::RopeBack
            | OpCode::SoftMax
            | OpCode::SetRows
            | OpCode::AddRelPos
            | OpCode::Dsv4HcComb
            | OpCode::CrossEntropyLossBack
            | OpCode::OptStepSgd => 3,
            OpCode::LightningIndexer | OpCode::Dsv4HcPost => 4,
            OpCode::FlashAttnExt | OpCode::TopKMask | OpCode::GatedLinearAttn | OpCode::OptStepAdamw => 5,
            OpCode::RwkvWkv6 | OpCode::GatedDeltaNet => 6,
            OpCode::SsmScan | OpCode::RwkvWkv7 => 7,
            _ => 2,
        }
    }

    /// Whether the op is a view op: it describes existing memory differently and computes nothing.
    pub const fn is_view(self) -> bool {
        matches!(self, OpCode::None | OpCode::Reshape | OpCode::View | OpCode::Permute | OpCode::Transpose)
    }
}

impl fmt::Debug for OpCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Display for OpCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_the_rows_of_protocol_8_0_1() {
        assert_eq!(OpCode::ALL.len(), 102);
        for (i, &op) in OpCode::ALL.iter().enumerate() {
            assert_eq!(op.to_wire() as usize, i);
            assert_eq!(OpCode::from_wire(i as u32), Some(op));
        }
        assert_eq!(OpCode::from_wire(102), None);
        assert!(OpCode::ALL.iter().all(|op| op.is_in_protocol()));
        assert!(OpCode::OWN.iter().all(|op| !op.is_in_protocol() && OpCode::from_wire(op.to_wire()).is_none()));
        let every = OpCode::ALL.iter().chain(OpCode::OWN);
        assert!(every.into_iter().all(|&op| OpCode::from_extension_wire(op.to_wire()) == Some(op)));
        assert_eq!((OpCode::MulMat.to_wire(), OpCode::TopKMask.to_wire(), OpCode::Glu.to_wire()), (29, 91, 101));
    }
}
