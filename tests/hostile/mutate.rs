//! What a careless or hostile peer does to a plausible graph.

use crate::maker::{SLOTS, Script};
use fanout::graph::SlotOffset;
use fastrand::Rng;

/// Counts and strides at which arithmetic breaks.
const EXTREMES: [u32; 14] =
    [0, 1, 2, 3, 31, 33, 255, 4097, 1 << 16, (1 << 16) + 1, 1 << 30, 1 << 31, u32::MAX - 1, u32::MAX];

impl Script {
    /// The record of a listed node; of any when its key is nobody's.
    fn node(&self, rng: &mut Rng) -> usize {
        let id = self.listed[rng.usize(..self.listed.len())];
        self.records.iter().position(|t| t.id == id).unwrap_or(0)
    }
}

/// Changes one thing.
pub(crate) fn mutate(script: &mut Script, rng: &mut Rng) {
    let ids = script.records.len() as u64 + 2;
    let (size, nodes) = (script.size, script.listed.len());
    let at = rng.usize(..script.records.len());
    let node = script.node(rng);
    let record = &mut script.records[at];
    let d = rng.usize(..4);
    match rng.u8(..18) {
        0 => record.ne[d] = EXTREMES[rng.usize(..EXTREMES.len())],
        1 => record.ne[d] = record.ne[d].wrapping_add_signed(rng.i32(-2..=2)),
        2 => record.ne[d] = record.ne[d].wrapping_mul(rng.u32(0..4)),
        3 => record.ne.swap(d, rng.usize(..4)),
        4 => record.nb[d] = EXTREMES[rng.usize(..EXTREMES.len())],
        5 => record.nb[d] = record.nb[d].wrapping_add_signed(rng.i32(-5..=5)),
        6 => record.nb[d] = record.nb[d].wrapping_mul(rng.u32(0..4)),
        7 => record.nb.swap(d, rng.usize(..4)),
        8 => record.dtype = rng.u32(..44),
        9 => {
            script.records[node].params[rng.usize(..16)] =
                [0, 1, 2, 3, -1, i32::MAX, i32::MIN, f32::NAN.to_bits() as i32, rng.i32(..)][rng.usize(..9)];
        }
        10 => record.place = Some(SlotOffset { slot: rng.u32(..SLOTS as u32 + 1), offset: rng.usize(..=size) }),
        11 => {
            if let Some(place) = &mut record.place {
                place.offset = place.offset.wrapping_add_signed(rng.isize(-9..=9));
            }
        }
        12 => {
            // Where another tensor lies, or nearly.
            let other = script.records[rng.usize(..at + 1)].place;
            script.records[at].place =
                other.map(|p| SlotOffset { offset: p.offset.wrapping_add(rng.usize(..2) * rng.usize(..200)), ..p });
        }
        13 => record.place = if rng.bool() { None } else { Some(SlotOffset { slot: rng.u32(..), offset: usize::MAX }) },
        14 => {
            let slot = rng.usize(..10);
            script.records[node].srcs[slot] = rng.u64(..ids);
        }
        15 => script.records[node].srcs[rng.usize(..3)] = 0,
        16 => script.listed.insert(rng.usize(..=nodes), rng.u64(..ids)),
        _ => record.op = rng.u32(..103),
    }
}
