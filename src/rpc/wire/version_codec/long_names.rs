//! Clients that are built with `GGML_MAX_NAME` of 128, as stable-diffusion.cpp is: their tensor records have 64 bytes more, in the
//! name. ggml's protocol does not tell, so the lengths of a client's messages must ([`VersionDetector`](super::VersionDetector)).
//!
//! The names themselves are cut to 64 bytes: they are used only in messages.

use super::VersionCodec;
use super::{GEN0, V3_0, V3_0_SECOND, V3_0_THIRD, V3_5, V3_6_0, V3_6_0_UNFLAGGED, V3_6_1};
use super::{V4_0_0, V4_0_1, V4_0_2, V4_0_3, V5_0, V5_1, V7_0, V8_0_0, V8_0_1};
use crate::rpc::wire::TENSOR_RECORD;
use crate::rpc::wire::tensor::MAX_NAME;

/// Length of a record with a name of 128 bytes.
pub(super) const LONG_RECORD: usize = TENSOR_RECORD + MAX_NAME;

/// Where the name of a record ends. The number of readers follows.
const NAME_END: usize = TENSOR_RECORD - size_of::<i32>();

/// A record without the second half of its name.
pub(super) fn shorten(long: &[u8; LONG_RECORD]) -> [u8; TENSOR_RECORD] {
    let mut record = [0; TENSOR_RECORD];
    let (start, end) = record.split_at_mut(NAME_END);
    start.copy_from_slice(&long[..NAME_END]);
    end.copy_from_slice(&long[NAME_END + MAX_NAME..]);
    record
}

impl VersionCodec {
    /// Whether this is a codec for clients with long names.
    pub(super) fn has_long_names(&self) -> bool {
        self.record_len == LONG_RECORD
    }
}

/// Generates the codecs of versions with long names, under names of their own.
macro_rules! with_long_names {
    ($($codec:ident: $name:literal,)*) => {
        impl VersionCodec {
            /// The codec for clients of the same version with long names. `None`: it is one, or has no record of the usual length.
            pub(super) fn with_long_names(&self) -> Option<&'static VersionCodec> {
                $({
                    static LONG: VersionCodec =
                        VersionCodec { name: concat!($name, ", names of 128 bytes"), record_len: LONG_RECORD, ..$codec };
                    if *self == $codec {
                        return Some(&LONG);
                    }
                })*
                None
            }
        }
    };
}

with_long_names! {
    V8_0_1: "8.0.1",
    V8_0_0: "8.0.0",
    V7_0: "7.0",
    V5_1: "5.1.0",
    V5_0: "5.0.0",
    V4_0_3: "4.0.3",
    V4_0_2: "4.0.2",
    V4_0_1: "4.0.1",
    V4_0_0: "4.0.0",
    V3_6_1: "3.6.1",
    V3_6_0: "3.6.0",
    V3_6_0_UNFLAGGED: "3.6.0 without compute flags",
    V3_5: "3.5.0",
    V3_0: "3.0.0",
    V3_0_SECOND: "3.0.0 of 2025-11-13",
    V3_0_THIRD: "3.0.0 of 2025-11-25",
    GEN0: "gen0 (2024, before HELLO)",
}
