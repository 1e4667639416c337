//! Fragment layouts as the manual defines them: the row and column of a lane's `i`-th element, by shape (PTX ISA, "Matrix
//! Fragments for mma").

use super::super::matrix_spec::Element;

/// Extents of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
}

/// Row and column of A; depends on the element's bits.
pub(super) fn a(shape: Shape, element: Element, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let upper = |lower: bool| if lower { group } else { group + 8 };
    match (shape.m, element.bits(), shape.k) {
        (16, 16, 8) => (upper(i < 2), thread * 2 + (i & 1)),
        (16, 16, 16) => (upper(i < 2 || (4..6).contains(&i)), thread * 2 + (i & 1) + if i >= 4 { 8 } else { 0 }),
        (16, 32, 4) => (upper(i == 0), thread),
        (16, 32, 8) => (upper(i == 0 || i == 2), if i < 2 { thread } else { thread + 4 }),
        (8, 64, 4) => (group, thread),
        (16, 64, 4) => (upper(i == 0), thread),
        (16, 64, 8) => (upper(i == 0 || i == 2), if i < 2 { thread } else { thread + 4 }),
        (16, 64, 16) => (upper(i & 1 == 0), if i & 1 == 0 { i * 2 + thread } else { i * 2 - 2 + thread }),
        (8, 8, 16) => (group, thread * 4 + i),
        (16, 8, 16) => (upper(i < 4), thread * 4 + (i & 3)),
        (16, 8, 32) => (upper(i < 4 || (8..12).contains(&i)), thread * 4 + (i & 3) + if i >= 8 { 16 } else { 0 }),
        (8, 4, 32) => (group, thread * 8 + i),
        (16, 4, 32) => (upper(i < 8), thread * 8 + (i & 7)),
        (16, 4, 64) => (upper(i < 8 || (16..24).contains(&i)), thread * 8 + (i & 7) + if i >= 16 { 32 } else { 0 }),
        (8, 1, 128) => (group, thread * 32 + i),
        (16, 1, 128) => (upper(i < 32), thread * 32 + (i & 31)),
        (16, 1, 256) => {
            (upper(i < 32 || (64..96).contains(&i)), thread * 32 + (i & 31) + if i >= 64 { 128 } else { 0 })
        }
        other => panic!("no such A: {other:?}"),
    }
}

/// Row and column of B.
pub(super) fn b(shape: Shape, element: Element, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = match (element.bits(), shape.k) {
        (16, 8) => thread * 2 + i,
        (16, 16) => thread * 2 + (i & 1) + if i < 2 { 0 } else { 8 },
        (32 | 64, 4) => thread,
        (32 | 64, 8) => {
            if i == 0 {
                thread
            } else {
                thread + 4
            }
        }
        (64, 16) => thread + i * 4,
        (8, 16) => thread * 4 + i,
        (8, 32) => thread * 4 + (i & 3) + if i < 4 { 0 } else { 16 },
        (4, 32) => thread * 8 + i,
        (4, 64) => thread * 8 + (i & 7) + if i < 8 { 0 } else { 32 },
        (1, 128) => thread * 32 + i,
        (1, 256) => thread * 32 + (i & 31) + if i < 32 { 0 } else { 128 },
        other => panic!("no such B: {other:?}"),
    };
    (row, group)
}

/// Row and column of C and D.
pub(super) fn c(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}

/// The same for `mma.m8n8k4` of `.f16`, whose fragments belong to a quad pair.
pub(super) mod volta {
    pub(crate) fn a(by_rows: bool, lane: usize, i: usize) -> (usize, usize) {
        if by_rows {
            (if lane < 16 { lane % 4 } else { lane % 4 + 4 }, i)
        } else {
            (if lane < 16 { i % 4 } else { i % 4 + 4 }, lane % 4)
        }
    }

    pub(crate) fn b(by_rows: bool, lane: usize, i: usize) -> (usize, usize) {
        if by_rows {
            (lane % 4, if lane < 16 { i } else { i + 4 })
        } else {
            (i, if lane < 16 { lane % 4 } else { lane % 4 + 4 })
        }
    }

    pub(crate) fn c(half: bool, lane: usize, i: usize) -> (usize, usize) {
        if half {
            return (if lane < 16 { lane % 4 } else { lane % 4 + 4 }, i);
        }
        let x = (lane & 0b1) + (i & 0b10);
        (if lane < 16 { x } else { x + 4 }, (i & 0b100) + (lane & 0b10) + (i & 0b1))
    }
}
