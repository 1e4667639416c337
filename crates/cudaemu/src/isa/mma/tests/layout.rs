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
        (16, 8, 16) => (upper(i < 4), thread * 4 + (i & 3)),
        (16, 8, 32) => (upper(i < 4 || (8..12).contains(&i)), thread * 4 + (i & 3) + if i >= 8 { 16 } else { 0 }),
        other => panic!("no such A: {other:?}"),
    }
}

/// Row and column of B.
pub(super) fn b(shape: Shape, element: Element, lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    let row = match (element.bits(), shape.k) {
        (16, 8) => thread * 2 + i,
        (16, 16) => thread * 2 + (i & 1) + if i < 2 { 0 } else { 8 },
        (32, 4) => thread,
        (32, 8) => {
            if i == 0 {
                thread
            } else {
                thread + 4
            }
        }
        (8, 16) => thread * 4 + i,
        (8, 32) => thread * 4 + (i & 3) + if i < 4 { 0 } else { 16 },
        other => panic!("no such B: {other:?}"),
    };
    (row, group)
}

/// Row and column of C and D.
pub(super) fn c(lane: usize, i: usize) -> (usize, usize) {
    let (group, thread) = (lane >> 2, lane % 4);
    (if i < 2 { group } else { group + 8 }, thread * 2 + (i & 1))
}
