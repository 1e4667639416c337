//! Random mutations of a generated graph, as a faulty or hostile peer might send it.

use crate::fuzz_generator::{FuzzGraph, SLOTS};
use fanout::graph::SlotOffset;
use fastrand::Rng;

/// Counts and strides that tend to overflow or to break rounding.
const EXTREMES: [u32; 14] =
    [0, 1, 2, 3, 31, 33, 255, 4097, 1 << 16, (1 << 16) + 1, 1 << 30, 1 << 31, u32::MAX - 1, u32::MAX];

impl FuzzGraph {
    /// Index of the record of a random node; 0 if no record has the id of the node.
    fn node(&self, rng: &mut Rng) -> usize {
        let id = self.listed[rng.usize(..self.listed.len())];
        self.records.iter().position(|t| t.id == id).unwrap_or(0)
    }
}

/// Applies one random mutation to a graph: to a count, stride, type, op, parameter, source, location or the list of nodes.
pub(crate) fn mutate(graph: &mut FuzzGraph, rng: &mut Rng) {
    let ids = graph.records.len() as u64 + 2;
    let (size, nodes) = (graph.size, graph.listed.len());
    let at = rng.usize(..graph.records.len());
    let node = graph.node(rng);
    let record = &mut graph.records[at];
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
            graph.records[node].params[rng.usize(..16)] =
                [0, 1, 2, 3, -1, i32::MAX, i32::MIN, f32::NAN.to_bits() as i32, rng.i32(..)][rng.usize(..9)];
        }
        10 => record.place = Some(SlotOffset { slot: rng.u32(..SLOTS as u32 + 1), offset: rng.usize(..=size) }),
        11 => {
            if let Some(place) = &mut record.place {
                place.offset = place.offset.wrapping_add_signed(rng.isize(-9..=9));
            }
        }
        12 => {
            // At or near the location of another tensor.
            let other = graph.records[rng.usize(..at + 1)].place;
            graph.records[at].place =
                other.map(|p| SlotOffset { offset: p.offset.wrapping_add(rng.usize(..2) * rng.usize(..200)), ..p });
        }
        13 => record.place = if rng.bool() { None } else { Some(SlotOffset { slot: rng.u32(..), offset: usize::MAX }) },
        14 => {
            let slot = rng.usize(..10);
            graph.records[node].srcs[slot] = rng.u64(..ids);
        }
        15 => graph.records[node].srcs[rng.usize(..3)] = 0,
        16 => graph.listed.insert(rng.usize(..=nodes), rng.u64(..ids)),
        _ => record.op = rng.u32(..103),
    }
}

/// Changes one word of a node's parameters, or one stride or offset by a few bytes: the numbers that become arguments of a kernel.
pub(crate) fn mutate_parameter(graph: &mut FuzzGraph, rng: &mut Rng) {
    let node = graph.node(rng);
    let at = rng.usize(..graph.records.len());
    match rng.u8(..6) {
        0 => {
            let record = &mut graph.records[at];
            let d = rng.usize(..4);
            record.nb[d] = record.nb[d].wrapping_add(rng.u32(1..=4));
        }
        1 => {
            if let Some(place) = &mut graph.records[at].place {
                place.offset = place.offset.wrapping_sub(rng.usize(1..=4));
            }
        }
        _ => {
            let word = &mut graph.records[node].params[rng.usize(..8)];
            let values = [1, 2, 3, 5, 65_535, 65_536, -1, i32::MAX, i32::MIN, f32::NAN.to_bits() as i32, rng.i32(..)];
            *word = match rng.u8(..4) {
                0 => values[rng.usize(..values.len())],
                1 => word.wrapping_mul(rng.i32(-1..4)),
                _ => word.wrapping_add(rng.i32(-5..=5)),
            };
        }
    }
}
