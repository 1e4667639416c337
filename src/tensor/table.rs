//! The table of element types: one row per type. Dispatch over types, the CUDA manifest, and the lists of types in tests,
//! benches and scripts are generated from the rows. CONTRIBUTING.md lists the steps for adding a type.
//!
//! A row is one line, because `scripts/type_table.py` reads this file too:
//!
//! ```text
//! NAME = number on the wire, elements of a block, bytes of a block, alignment, capabilities;
//! ```
//!
//! The alignment is that of a block's address, in bytes. A GPU faults at misaligned addresses; a CPU does not. A type without
//! capabilities is stored, copied and sent, but not computed with.
//!
//! | capability | meaning of the name after it |
//! |---|---|
//! | `float F` | struct of `tensor/quant/float_types.rs` that converts rows of a plain float type, and its rounding in `cpu/simd` |
//! | `codec B within E` | struct of `tensor/blocks.rs` with a `Codec` in `tensor/quant`; E bounds the error of a round trip ([`DType::round_trip_error`]) |
//! | `decoder B` | as `codec`, but only to f32: `B` has a `Decoder`. ggml has no quantiser for rows of the type, so nodes that write it are refused |
//! | `simd S` | the `PanelFormat` and the `RowFormat`s of that name in `cpu/simd` (repacked panels; rows in place, per instruction set); without it products convert to f32 |
//! | `expanded B` | as `simd`, by an expansion of the struct `B` to 8-bit codes with a scale per sixteen (`Expand` in `tensor/quant`), for each product again; no panels in device memory unless the row has `panel` too |
//! | `panel S` | the `PanelFormat` of that name in `cpu/simd`, for a type whose rows in place are expanded |
//! | `cuda_read C` | struct of `kernels/common` with the device-side decoder; the manifest compiles the kernels that read rows of the type in ggml's layout: GET_ROWS, copies to floats, and products |
//! | `cuda C` | struct of `kernels/common` with the device-side codec; the manifest compiles its kernels, also those that write the type, and the products of repacked weights |
//! | `cache C` | as `cuda`, and FLASH_ATTN_EXT has an entry of its own for K and V of this type |
//!
//! [`DType::round_trip_error`]: super::DType::round_trip_error

/// Calls `$then! { [args] rows }` with all rows of the table.
macro_rules! for_each_type {
    ($then:ident!($($args:tt)*)) => {
        $then! { [$($args)*]
            F32     =  0,   1 elements in   4 bytes, aligned 4, float F32, cuda F32, cache F32;
            F16     =  1,   1 elements in   2 bytes, aligned 2, float F16, cuda F16, cache F16;
            Q4_0    =  2,  32 elements in  18 bytes, aligned 2, codec BlockQ4_0 within 0.009, simd Q4_0, cuda Q4_0, cache Q4_0;
            Q4_1    =  3,  32 elements in  20 bytes, aligned 2, codec BlockQ4_1 within 0.0075, simd Q4_1, cuda Q4_1, cache Q4_1;
            Q5_0    =  6,  32 elements in  22 bytes, aligned 2, codec BlockQ5_0 within 0.0023, simd Q5_0, cuda Q5_0, cache Q5_0;
            Q5_1    =  7,  32 elements in  24 bytes, aligned 2, codec BlockQ5_1 within 0.0018, simd Q5_1, cuda Q5_1, cache Q5_1;
            Q8_0    =  8,  32 elements in  34 bytes, aligned 2, codec BlockQ8_0 within 4e-5, simd Q8_0, cuda Q8_0, cache Q8_0;
            Q8_1    =  9,  32 elements in  36 bytes, aligned 2, codec BlockQ8_1 within 4e-5;
            Q2_K    = 10, 256 elements in  84 bytes, aligned 2, codec BlockQ2K within 0.08, simd Q2_K, cuda Q2_K;
            Q3_K    = 11, 256 elements in 110 bytes, aligned 2, codec BlockQ3K within 0.024, simd Q3_K, cuda Q3_K;
            Q4_K    = 12, 256 elements in 144 bytes, aligned 2, codec BlockQ4K within 0.0055, simd Q4_K, cuda Q4_K;
            Q5_K    = 13, 256 elements in 176 bytes, aligned 2, codec BlockQ5K within 0.0014, simd Q5_K, cuda Q5_K;
            Q6_K    = 14, 256 elements in 210 bytes, aligned 2, codec BlockQ6K within 0.00035, simd Q6_K, cuda Q6_K;
            Q8_K    = 15, 256 elements in 292 bytes, aligned 2, codec BlockQ8K within 6e-5;
            IQ2_XXS = 16, 256 elements in  66 bytes, aligned 2, decoder BlockIq2Xxs, expanded BlockIq2Xxs, cuda_read IQ2_XXS;
            IQ2_XS  = 17, 256 elements in  74 bytes, aligned 2, decoder BlockIq2Xs, expanded BlockIq2Xs, cuda_read IQ2_XS;
            IQ3_XXS = 18, 256 elements in  98 bytes, aligned 2, decoder BlockIq3Xxs, expanded BlockIq3Xxs, cuda_read IQ3_XXS;
            IQ1_S   = 19, 256 elements in  50 bytes, aligned 2, decoder BlockIq1S, expanded BlockIq1S, cuda_read IQ1_S;
            IQ4_NL  = 20,  32 elements in  18 bytes, aligned 2, codec BlockIq4Nl within 0.0075, simd IQ4_NL, cuda IQ4_NL, cache IQ4_NL;
            IQ3_S   = 21, 256 elements in 110 bytes, aligned 2, decoder BlockIq3S, expanded BlockIq3S, cuda_read IQ3_S;
            IQ2_S   = 22, 256 elements in  82 bytes, aligned 2, decoder BlockIq2S, expanded BlockIq2S, cuda_read IQ2_S;
            IQ4_XS  = 23, 256 elements in 136 bytes, aligned 2, codec BlockIq4Xs within 0.007, expanded BlockIq4Xs, panel IQ4_XS, cuda_read IQ4_XS;
            I8      = 24,   1 elements in   1 bytes, aligned 1;
            I16     = 25,   1 elements in   2 bytes, aligned 2;
            I32     = 26,   1 elements in   4 bytes, aligned 4;
            I64     = 27,   1 elements in   8 bytes, aligned 8;
            F64     = 28,   1 elements in   8 bytes, aligned 8;
            IQ1_M   = 29, 256 elements in  56 bytes, aligned 2, decoder BlockIq1M, expanded BlockIq1M, cuda_read IQ1_M;
            BF16    = 30,   1 elements in   2 bytes, aligned 2, float BF16, cuda BF16, cache BF16;
            TQ1_0   = 34, 256 elements in  54 bytes, aligned 2, codec BlockTq1_0 within 0.8, expanded BlockTq1_0, cuda_read TQ1_0;
            TQ2_0   = 35, 256 elements in  66 bytes, aligned 2, codec BlockTq2_0 within 0.8, expanded BlockTq2_0, panel TQ2_0, cuda_read TQ2_0;
            MXFP4   = 39,  32 elements in  17 bytes, aligned 1, codec BlockMxfp4 within 0.015, simd MXFP4, cuda MXFP4;
            NVFP4   = 40,  64 elements in  36 bytes, aligned 2, codec BlockNvfp4 within 0.011, expanded BlockNvfp4, panel NVFP4, cuda_read NVFP4;
            Q1_0    = 41, 128 elements in  18 bytes, aligned 2, codec BlockQ1_0 within 0.5, expanded BlockQ1_0, panel Q1_0, cuda_read Q1_0;
            Q2_0    = 42,  64 elements in  18 bytes, aligned 2, codec BlockQ2_0 within 0.65, expanded BlockQ2_0, panel Q2_0, cuda_read Q2_0;
            F8_E4M3 = 43,   1 elements in   1 bytes, aligned 1, codec BlockF8E4M3 within 0.0013;
        }
    };
}

/// Calls `$then! { [args] NAME BLOCK LENGTH; ... }` with the block types that convert from and to f32.
macro_rules! for_each_codec {
    ($then:ident!($($args:tt)*)) => { $crate::tensor::table::for_each_type! { for_each_codec!($then [$($args)*]) } };
    ([$then:ident $args:tt] $($name:ident = $number:literal, $len:literal elements in $bytes:literal bytes, aligned $align:literal
        $(, float $float:ident)? $(, codec $block:ident within $error:literal)? $(, decoder $decoder:ident)?
        $(, simd $simd:ident)? $(, expanded $expanded:ident)? $(, panel $panel:ident)?
        $(, cuda_read $cuda_read:ident)? $(, cuda $cuda:ident)? $(, cache $cache:ident)?;)*) => {
        $then! { $args $($($name $block $len;)?)* }
    };
}

/// Calls `$then! { [args] NAME BLOCK LENGTH; ... }` with the block types that convert to f32.
macro_rules! for_each_decoder {
    ($then:ident!($($args:tt)*)) => { $crate::tensor::table::for_each_type! { for_each_decoder!($then [$($args)*]) } };
    ([$then:ident $args:tt] $($name:ident = $number:literal, $len:literal elements in $bytes:literal bytes, aligned $align:literal
        $(, float $float:ident)? $(, codec $block:ident within $error:literal)? $(, decoder $decoder:ident)?
        $(, simd $simd:ident)? $(, expanded $expanded:ident)? $(, panel $panel:ident)?
        $(, cuda_read $cuda_read:ident)? $(, cuda $cuda:ident)? $(, cache $cache:ident)?;)*) => {
        $then! { $args $($($name $block $len;)? $($name $decoder $len;)?)* }
    };
}

/// Calls `$then! { [args] NAME FLOAT; ... }` with the plain float types.
macro_rules! for_each_float {
    ($then:ident!($($args:tt)*)) => { $crate::tensor::table::for_each_type! { for_each_float!($then [$($args)*]) } };
    ([$then:ident $args:tt] $($name:ident = $number:literal, $len:literal elements in $bytes:literal bytes, aligned $align:literal
        $(, float $float:ident)? $(, codec $block:ident within $error:literal)? $(, decoder $decoder:ident)?
        $(, simd $simd:ident)? $(, expanded $expanded:ident)? $(, panel $panel:ident)?
        $(, cuda_read $cuda_read:ident)? $(, cuda $cuda:ident)? $(, cache $cache:ident)?;)*) => {
        $then! { $args $($($name $float;)?)* }
    };
}

/// Calls `$then! { [args] NAME FORMAT; ... }` with the block types that have a format for panels.
macro_rules! for_each_panel {
    ($then:ident!($($args:tt)*)) => { $crate::tensor::table::for_each_type! { for_each_panel!($then [$($args)*]) } };
    ([$then:ident $args:tt] $($name:ident = $number:literal, $len:literal elements in $bytes:literal bytes, aligned $align:literal
        $(, float $float:ident)? $(, codec $block:ident within $error:literal)? $(, decoder $decoder:ident)?
        $(, simd $simd:ident)? $(, expanded $expanded:ident)? $(, panel $panel:ident)?
        $(, cuda_read $cuda_read:ident)? $(, cuda $cuda:ident)? $(, cache $cache:ident)?;)*) => {
        $then! { $args $($($name $simd;)? $($name $panel;)?)* }
    };
}

/// Calls `$then! { [args] NAME BLOCK LENGTH; ... }` with the block types that expand to 8-bit codes.
macro_rules! for_each_expanded {
    ($then:ident!($($args:tt)*)) => { $crate::tensor::table::for_each_type! { for_each_expanded!($then [$($args)*]) } };
    ([$then:ident $args:tt] $($name:ident = $number:literal, $len:literal elements in $bytes:literal bytes, aligned $align:literal
        $(, float $float:ident)? $(, codec $block:ident within $error:literal)? $(, decoder $decoder:ident)?
        $(, simd $simd:ident)? $(, expanded $expanded:ident)? $(, panel $panel:ident)?
        $(, cuda_read $cuda_read:ident)? $(, cuda $cuda:ident)? $(, cache $cache:ident)?;)*) => {
        $then! { $args $($($name $expanded $len;)?)* }
    };
}

/// Calls `$then! { [args] NAME FORMAT; ... }` with the block types that have formats for panels and for rows in place.
macro_rules! for_each_simd {
    ($then:ident!($($args:tt)*)) => { $crate::tensor::table::for_each_type! { for_each_simd!($then [$($args)*]) } };
    ([$then:ident $args:tt] $($name:ident = $number:literal, $len:literal elements in $bytes:literal bytes, aligned $align:literal
        $(, float $float:ident)? $(, codec $block:ident within $error:literal)? $(, decoder $decoder:ident)?
        $(, simd $simd:ident)? $(, expanded $expanded:ident)? $(, panel $panel:ident)?
        $(, cuda_read $cuda_read:ident)? $(, cuda $cuda:ident)? $(, cache $cache:ident)?;)*) => {
        $then! { $args $($($name $simd;)?)* }
    };
}

pub(crate) use {
    for_each_codec, for_each_decoder, for_each_expanded, for_each_float, for_each_panel, for_each_simd, for_each_type,
};
