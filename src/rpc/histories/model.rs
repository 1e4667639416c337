//! The model of a history: what each byte of a buffer may be, and with which errors each queue may fail.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::device::DeviceError;
use crate::graph::{Builder, Graph};
use crate::ops::{binary::Binary, copy::CopyOp, mul_mat::MulMat};
use crate::tensor::DType;

/// The values that a byte may have. A failed write leaves the old or the new value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Cell {
    One(u8),
    Two(u8, u8),
    Any,
}

impl Cell {
    pub(super) fn allows(self, byte: u8) -> bool {
        match self {
            Cell::One(a) => a == byte,
            Cell::Two(a, b) => a == byte || b == byte,
            Cell::Any => true,
        }
    }

    pub(super) fn union(self, other: Cell) -> Cell {
        let (Cell::One(a) | Cell::Two(a, _)) = self else { return Cell::Any };
        let (b, others) = match (self, other) {
            (Cell::Two(_, b), _) => (b, other),
            (_, Cell::One(c) | Cell::Two(c, _)) => (c, other),
            (_, _) => return Cell::Any,
        };
        match others {
            Cell::One(c) | Cell::Two(c, _) if c != a && c != b => Cell::Any,
            Cell::Two(_, d) if d != a && d != b => Cell::Any,
            Cell::Any => Cell::Any,
            _ if a == b => Cell::One(a),
            _ => Cell::Two(a, b),
        }
    }
}

/// Bytes that a read returned against the bytes of the model. Describes the first difference.
pub(super) fn difference(expected: &[Cell], got: &[u8]) -> Option<String> {
    if expected.len() != got.len() {
        return Some(format!("{} bytes instead of {}", got.len(), expected.len()));
    }
    let at = expected.iter().zip(got).position(|(cell, &byte)| !cell.allows(byte))?;
    let wrong = expected.iter().zip(got).filter(|(cell, byte)| !cell.allows(**byte)).count();
    Some(format!(
        "byte {at} is {:#04x}, expected {:?}; {wrong} of {} bytes are wrong",
        got[at],
        expected[at],
        got.len()
    ))
}

/// Bytes of small whole numbers as F32, with which graphs compute exactly.
pub(super) fn numbers(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = fastrand::Rng::with_seed(seed);
    (0..len.div_ceil(4)).flat_map(|_| f32::from(rng.u8(..8)).to_le_bytes()).take(len).collect()
}

/// A graph that histories run, over tensors of 8 x 4 F32 in one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Graphs {
    /// z = x + y
    Add,
    /// w = MUL_MAT(x, y)
    MulMat,
    /// z = x + y; y = CPY(z), so that each run adds x once more
    Accumulate,
    /// z = x + y; w = MUL_MAT(x, z); y = CPY(z)
    All,
}

pub(super) const GRAPHS: [Graphs; 4] = [Graphs::Add, Graphs::MulMat, Graphs::Accumulate, Graphs::All];

/// Dimensions of x, y and z.
const NE: [usize; 2] = [8, 4];

/// Largest number for which products are exact, also after rounding to BF16.
const MAX_NUMBER: f32 = 256.0;

impl Graphs {
    fn adds(self) -> bool {
        self != Graphs::MulMat
    }

    fn multiplies(self) -> bool {
        matches!(self, Graphs::MulMat | Graphs::All)
    }

    fn copies(self) -> bool {
        matches!(self, Graphs::Accumulate | Graphs::All)
    }

    pub(super) fn build(self) -> Arc<Graph> {
        let mut b = Builder::new();
        let [x, y] = [(); 2].map(|()| b.leaf(DType::F32, [NE[0], NE[1], 1, 1]).unwrap());
        let sum = self.adds().then(|| b.node(Binary::Add, &[Some(x), Some(y)]).unwrap());
        if self.multiplies() {
            b.node(MulMat::PLAIN, &[Some(x), sum.or(Some(y))]).unwrap();
        }
        if let Some(sum) = sum.filter(|_| self.copies()) {
            let desc = b.tensor(y).unwrap().desc;
            let target = b.view(y, desc, 0).unwrap();
            b.node_into(CopyOp::Cpy, &[Some(sum), Some(y)], target).unwrap();
        }
        Arc::new(b.build())
    }

    /// Computes the graph on the cells of its slot.
    pub(super) fn run(self, graph: &Graph, cells: &mut [Cell]) {
        let place = |index: usize| graph.tensors()[index].place.unwrap().offset;
        let (n, count) = (NE[0] * NE[1], NE[1] * NE[1]);
        let mut next = 2;
        let x = load(cells, place(0), n);
        let mut b = load(cells, place(1), n);
        if self.adds() {
            b = x.iter().zip(&b).map(|(x, y)| Some((*x)? + (*y)?)).collect();
            store(cells, place(next), &b);
            next += 1;
        }
        if self.multiplies() {
            let small = |v: Option<f32>| v.filter(|v| *v <= MAX_NUMBER);
            let dot = |at: usize| {
                let (i, j) = (at % NE[1] * NE[0], at / NE[1] * NE[0]);
                (0..NE[0]).map(|k| Some(small(x[i + k])? * small(b[j + k])?)).sum::<Option<f32>>()
            };
            store(cells, place(next), &(0..count).map(dot).collect::<Vec<_>>());
        }
        if self.copies() {
            store(cells, place(1), &b);
        }
    }
}

/// The numbers at a place; `None` where a number is not known, or not a small whole one.
fn load(cells: &[Cell], at: usize, count: usize) -> Vec<Option<f32>> {
    let number = |cells: &[Cell]| {
        let mut bytes = [0; 4];
        for (byte, cell) in bytes.iter_mut().zip(cells) {
            let Cell::One(value) = cell else { return None };
            *byte = *value;
        }
        let number = f32::from_le_bytes(bytes);
        let is_exact = (0.0..65536.0).contains(&number) && number.fract() == 0.0 && !number.is_sign_negative();
        is_exact.then_some(number)
    };
    cells[at..at + 4 * count].chunks(4).map(number).collect()
}

fn store(cells: &mut [Cell], at: usize, numbers: &[Option<f32>]) {
    for (cells, number) in cells[at..].chunks_mut(4).zip(numbers) {
        match number {
            None => cells.fill(Cell::Any),
            Some(number) => cells.iter_mut().zip(number.to_le_bytes()).for_each(|(cell, byte)| *cell = Cell::One(byte)),
        }
    }
}

/// Why the work of a queue may fail, by the faults so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Causes {
    /// The connections whose loss fails the queue.
    pub(super) connections: BTreeSet<usize>,
    /// The queues for whose points the queue waits.
    pub(super) queues: BTreeSet<usize>,
    /// The servers between which the queue copies: from, to.
    pub(super) links: BTreeSet<(usize, usize)>,
    /// Whether the queue was dropped.
    pub(super) is_dropped: bool,
}

/// What faults may have done.
#[derive(Debug, Default)]
pub(super) struct Faults {
    /// By the number of a connection: its endpoint, and whether it may be lost.
    pub(super) connections: Vec<(String, bool)>,
    /// The pairs of servers between which copies may fail.
    pub(super) links: BTreeSet<(usize, usize)>,
    /// By the number of a queue.
    pub(super) queues: Vec<Causes>,
}

impl Faults {
    /// Checks that a queue may fail with an error.
    pub(super) fn check(&self, queue: usize, error: &DeviceError) -> Result<(), String> {
        let (mut reached, mut next) = (BTreeSet::from([queue]), vec![queue]);
        while let Some(queue) = next.pop() {
            next.extend(self.queues[queue].queues.iter().filter(|queue| reached.insert(**queue)));
        }
        let mut causes = reached.iter().map(|queue| &self.queues[*queue]);
        let is_allowed = match error {
            DeviceError::ConnectionLost { endpoint, .. } => causes.any(|causes| {
                let mut lost = causes.connections.iter().map(|connection| &self.connections[*connection]);
                lost.any(|(name, may_be_lost)| *may_be_lost && name == endpoint)
            }),
            DeviceError::Remote { .. } => {
                causes.any(|causes| causes.is_dropped || !causes.links.is_disjoint(&self.links))
            }
            DeviceError::Ended => causes.any(|causes| causes.is_dropped),
            _ => false,
        };
        if is_allowed { Ok(()) } else { Err(format!("queue {queue} fails without a cause: {error:?}")) }
    }
}
