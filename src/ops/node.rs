//! The input of shape rules: a node's op, destination and sources as tensor descriptions, and the error for a violated rule.

use super::{MAX_SRC, OpCode};
use crate::tensor::{DIMS, DType, TensorDesc};
use std::fmt::Write as _;
use thiserror::Error;

/// The sources of a node, by position; absent sources are `None`.
#[derive(Clone, Copy, Debug)]
pub struct Sources<'a> {
    /// The op of the node, for error messages.
    op: OpCode,
    list: [Option<&'a TensorDesc>; MAX_SRC],
    /// Where they start, if that is known: the slot, and the offset in it.
    starts: [Option<(u32, usize)>; MAX_SRC],
}

impl<'a> Sources<'a> {
    /// Sources of `op` from a list. Only the first [`MAX_SRC`] entries are used; missing entries are absent sources.
    pub fn new(op: OpCode, list: &[Option<&'a TensorDesc>]) -> Sources<'a> {
        let mut all = [None; MAX_SRC];
        for (slot, &src) in all.iter_mut().zip(list) {
            *slot = src;
        }
        Sources { op, list: all, starts: [None; MAX_SRC] }
    }

    /// The same sources, which start at these offsets in the slots of a graph.
    pub(crate) fn with_starts(self, starts: [Option<(u32, usize)>; MAX_SRC]) -> Sources<'a> {
        Sources { starts, ..self }
    }

    /// Whether sources `i` and `j` are known to start at the same address.
    pub(crate) fn start_together(&self, i: usize, j: usize) -> bool {
        let start = |i: usize| self.starts.get(i).copied().flatten();
        start(i).is_some_and(|of_i| start(j) == Some(of_i))
    }

    /// Source `i`, or an error that names the missing one.
    ///
    /// # Errors
    /// [`ShapeError`] when there is no source `i`.
    pub fn required(&self, i: usize) -> Result<&'a TensorDesc, ShapeError> {
        self.get(i).ok_or_else(|| self.rule_error(MISSING[i.min(MAX_SRC - 1)]))
    }

    /// Source `i`, if present.
    pub fn get(&self, i: usize) -> Option<&'a TensorDesc> {
        self.list.get(i).copied().flatten()
    }

    /// The error for sources that violate `rule`.
    pub fn rule_error(&self, rule: &'static str) -> ShapeError {
        ShapeError { op: self.op, rule, node: self.describe() }
    }

    fn describe(&self) -> String {
        let mut text = String::new();
        for (i, src) in self.list.iter().enumerate() {
            if let Some(src) = src {
                let _ = write!(text, " s{i}={}", Pretty(src));
            }
        }
        text
    }
}

const MISSING: [&str; MAX_SRC] = [
    "source 0 is missing",
    "source 1 is missing",
    "source 2 is missing",
    "source 3 is missing",
    "source 4 is missing",
    "source 5 is missing",
    "source 6 is missing",
    "source 7 is missing",
    "source 8 is missing",
    "source 9 is missing",
];

/// A node, as passed to shape rules and devices.
#[derive(Clone, Copy, Debug)]
pub struct NodeView<'a> {
    /// The op with its parameters.
    pub op: &'a super::Op,
    /// The destination.
    pub dst: &'a TensorDesc,
    /// The sources.
    pub srcs: Sources<'a>,
    /// Whether every element of every operand is aligned for its type, relative to the start of its slot: see
    /// [`DType::alignment`].
    pub aligned: bool,
}

impl<'a> NodeView<'a> {
    /// Source `i`, or an error that names the missing one.
    ///
    /// # Errors
    /// [`ShapeError`] when there is no source `i`.
    pub fn src(&self, i: usize) -> Result<&'a TensorDesc, ShapeError> {
        self.srcs.required(i)
    }

    /// The error for a node that violates `rule`.
    pub fn rule_error(&self, rule: &'static str) -> ShapeError {
        ShapeError { op: self.op.code(), rule, node: format!(" dst={}{}", Pretty(self.dst), self.srcs.describe()) }
    }

    /// Checks that the destination has exactly the inferred type and shape.
    ///
    /// # Errors
    /// [`ShapeError`] if type or shape differ.
    pub fn expect_dst(&self, out: OutputSpec) -> Result<(), ShapeError> {
        ensure!(self, self.dst.ne() == out.ne, "the destination's shape must follow from its sources");
        ensure!(self, self.dst.dtype() == out.dtype, "the destination's type must follow from its sources");
        Ok(())
    }
}

/// Type and shape of a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutputSpec {
    /// Element type.
    pub dtype: DType,
    /// Element counts, fastest dimension first.
    pub ne: [usize; DIMS],
}

impl OutputSpec {
    /// Type and shape of an existing tensor.
    pub fn like(t: &TensorDesc) -> OutputSpec {
        OutputSpec { dtype: t.dtype(), ne: t.ne() }
    }
}

/// A node violates its op's shape rule: an error in the graph, not in the device.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{op}: {rule}; got{node}")]
pub struct ShapeError {
    /// The op.
    pub op: OpCode,
    /// The violated rule.
    pub rule: &'static str,
    /// Types, shapes and strides of the node.
    pub node: String,
}

/// Formats the type, shape and strides of a tensor.
struct Pretty<'a>(&'a TensorDesc);

impl std::fmt::Display for Pretty<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}{:?}/{:?}", self.0.dtype(), self.0.ne(), self.0.nb())
    }
}

/// `ensure!(node, condition, "rule")`: returns the node's [`ShapeError`] if the condition is false.
macro_rules! ensure {
    ($node:expr, $condition:expr, $rule:literal) => {
        // Not `if !condition`: clippy flags negated float comparisons, and rewriting one as the inverse comparison would accept
        // NaN. Any comparison with NaN is false and must be rejected.
        if $condition {
        } else {
            return Err($node.rule_error($rule));
        }
    };
}
pub(crate) use ensure;
