//! The nodes of a sampler, with shapes in the order of `ne`, of at most three dimensions `[n, a, s]`: s sequences, each with a rows
//! of n elements.

use crate::graph::{BuildError, TensorId};
use crate::ops::binary::Binary;
use crate::ops::concat::Concat;
use crate::ops::copy::CopyOp;
use crate::ops::pad::Pad;
use crate::ops::reduce::Reduce;
use crate::ops::rows::Rows;
use crate::ops::softmax::SoftMax;
use crate::ops::sort::Sort;
use crate::ops::unary::{Unary, UnaryKind};
use crate::ops::{Op, OutputSpec};
use crate::sched::TaskBuilder;
use crate::tensor::{DType, TensorDesc};

type Built = Result<TensorId, BuildError>;

/// Adds the nodes of a sampler to a task.
pub(super) struct Nodes<'a>(pub(super) &'a mut TaskBuilder);

impl Nodes<'_> {
    /// The shape of a tensor of three dimensions.
    pub(super) fn shape(&self, x: TensorId) -> Result<[usize; 3], BuildError> {
        let [n, a, s, _] = self.0.desc(x)?.ne();
        Ok([n, a, s])
    }

    /// A contiguous tensor in another shape.
    pub(super) fn reshape(&mut self, x: TensorId, [n, a, s]: [usize; 3]) -> Built {
        self.0.reshape(x, [n, a, s, 1])
    }

    /// A part of a contiguous tensor: a contiguous tensor that begins `first` elements after it.
    pub(super) fn part(&mut self, x: TensorId, first: usize, [n, a, s]: [usize; 3]) -> Built {
        let desc = TensorDesc::contiguous(self.0.desc(x)?.dtype(), [n, a, s, 1])?;
        self.0.view(x, desc, first * desc.nb()[0])
    }

    /// The last elements of the rows of a contiguous x `[n, a, s]`: a view `[a, s]`.
    pub(super) fn last_of_rows(&mut self, x: TensorId) -> Built {
        let (desc, [n, a, s]) = (self.0.desc(x)?, self.shape(x)?);
        let [element, row, plane, _] = desc.nb();
        let last = TensorDesc::strided(desc.dtype(), [a, s, 1, 1], [row, plane, plane * s, plane * s])?;
        self.0.view(x, last, (n - 1) * element)
    }

    /// The first elements of the rows of a contiguous x `[n, s]`: a view `[1, s]`.
    pub(super) fn first_of_rows(&mut self, x: TensorId) -> Built {
        let (desc, [_, s, _]) = (self.0.desc(x)?, self.shape(x)?);
        let [element, row, ..] = desc.nb();
        let first = TensorDesc::strided(desc.dtype(), [1, s, 1, 1], [element, row, row * s, row * s])?;
        self.0.view(x, first, 0)
    }

    /// Adds a node with the name that all nodes of a sampler have.
    fn named(&mut self, add: impl FnOnce(&mut TaskBuilder) -> Built) -> Built {
        let node = add(self.0)?;
        self.0.name(node, "sampler");
        Ok(node)
    }

    fn unary(&mut self, op: impl Into<Op>, x: TensorId) -> Built {
        self.named(|b| b.node(op, &[Some(x)]))
    }

    pub(super) fn scale(&mut self, x: TensorId, scale: f32, bias: f32) -> Built {
        self.unary(Unary::Scale { scale, bias }, x)
    }

    pub(super) fn clamp(&mut self, x: TensorId, min: f32, max: f32) -> Built {
        self.unary(Unary::Clamp { min, max }, x)
    }

    pub(super) fn log(&mut self, x: TensorId) -> Built {
        self.unary(Unary::Log, x)
    }

    /// 1 where x is above 0, else 0, also where it is NaN.
    pub(super) fn step(&mut self, x: TensorId) -> Built {
        self.unary(Unary::Kind(UnaryKind::Step), x)
    }

    pub(super) fn cumsum(&mut self, x: TensorId) -> Built {
        self.unary(Reduce::Cumsum, x)
    }

    /// The sums of the rows of x `[n, a, s]`: `[a, s]`.
    pub(super) fn row_sums(&mut self, x: TensorId) -> Built {
        let [_, a, s] = self.shape(x)?;
        let sums = self.unary(Reduce::SumRows, x)?;
        self.reshape(sums, [a, s, 1])
    }

    /// Softmax of `scale * x` over each row.
    pub(super) fn soft_max(&mut self, x: TensorId, scale: f32) -> Built {
        self.unary(SoftMax { scale, max_bias: 0.0 }, x)
    }

    fn binary(&mut self, op: Binary, a: TensorId, b: TensorId) -> Built {
        self.named(|builder| builder.node(op, &[Some(a), Some(b)]))
    }

    /// `a + b`; b is repeated to the shape of a, as in the next three functions.
    pub(super) fn add(&mut self, a: TensorId, b: TensorId) -> Built {
        self.binary(Binary::Add, a, b)
    }

    pub(super) fn sub(&mut self, a: TensorId, b: TensorId) -> Built {
        self.binary(Binary::Sub, a, b)
    }

    pub(super) fn mul(&mut self, a: TensorId, b: TensorId) -> Built {
        self.binary(Binary::Mul, a, b)
    }

    pub(super) fn div(&mut self, a: TensorId, b: TensorId) -> Built {
        self.binary(Binary::Div, a, b)
    }

    /// Ids of the k largest elements of each row of x `[n, a, s]`, in any order: I32 `[k, a, s]`.
    pub(super) fn top_k(&mut self, x: TensorId, k: usize) -> Built {
        let [_, a, s] = self.shape(x)?;
        self.named(|b| b.node_as(Sort::TopK, &[Some(x)], OutputSpec { dtype: DType::I32, ne: [k, a, s, 1] }))
    }

    /// Ids of all elements of each row in sorted order.
    pub(super) fn argsort(&mut self, x: TensorId, descending: bool) -> Built {
        self.unary(Sort::Argsort { descending }, x)
    }

    /// Elements of the rows of a contiguous x `[n, a, s]` by ids `[k, a, s]`: `[1, k, a, s]`.
    pub(super) fn lookup(&mut self, x: TensorId, ids: TensorId) -> Built {
        let [n, a, s] = self.shape(x)?;
        let table = self.0.reshape(x, [1, n, a, s])?;
        self.named(|b| b.node(Rows::GetRows, &[Some(table), Some(ids)]))
    }

    /// As [`Nodes::lookup`], in the shape of the ids.
    pub(super) fn elements(&mut self, x: TensorId, ids: TensorId) -> Built {
        let (ne, found) = (self.shape(ids)?, self.lookup(x, ids)?);
        self.reshape(found, ne)
    }

    /// Rows of x `[n, a, s]` by ids `[1, s]`: `[n, s]`.
    pub(super) fn row(&mut self, x: TensorId, ids: TensorId) -> Built {
        let [n, _, s] = self.shape(x)?;
        let found = self.named(|b| b.node(Rows::GetRows, &[Some(x), Some(ids)]))?;
        self.reshape(found, [n, s, 1])
    }

    /// Whole numbers as I32, in the given shape.
    pub(super) fn as_i32(&mut self, x: TensorId, [n, a, s]: [usize; 3]) -> Built {
        self.named(|b| b.node_as(CopyOp::Cpy, &[Some(x)], OutputSpec { dtype: DType::I32, ne: [n, a, s, 1] }))
    }

    /// I32 as F32, in the given shape: exact below 2^24.
    pub(super) fn as_f32(&mut self, x: TensorId, [n, a, s]: [usize; 3]) -> Built {
        self.named(|b| b.node_as(CopyOp::Cpy, &[Some(x)], OutputSpec { dtype: DType::F32, ne: [n, a, s, 1] }))
    }

    /// x `[1, s]` repeated to `[n, s]`.
    pub(super) fn repeat(&mut self, x: TensorId, [n, s]: [usize; 2]) -> Built {
        self.named(|b| b.node_as(Concat::Repeat, &[Some(x)], OutputSpec { dtype: DType::F32, ne: [n, s, 1, 1] }))
    }

    /// a `[n, s]`, then b `[n, s]`: `[n, 2 s]`.
    pub(super) fn join(&mut self, a: TensorId, b: TensorId) -> Built {
        self.named(|builder| builder.node(Concat::Concat { dim: 1 }, &[Some(a), Some(b)]))
    }

    /// x `[m, s]` with zeros after each row, so that it has n elements.
    pub(super) fn pad(&mut self, x: TensorId, n: usize) -> Built {
        let [m, ..] = self.shape(x)?;
        if m == n {
            return Ok(x);
        }
        let after = i32::try_from(n - m).map_err(|_| BuildError::Tensor("a row with more than 2^31 zeros"))?;
        self.unary(Pad::Pad { before: [0; 4], after: [after, 0, 0, 0], circular: false }, x)
    }
}
