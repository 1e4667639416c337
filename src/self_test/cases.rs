//! The table of cases, one row per case: the builder of rows, and the bounds. The rows are in the files of `cases/`, by kind of op.
//!
//! Shapes are small, and not all powers of two, so that the last part of a row or a tile is tested too.

mod elementwise;
mod movement;
mod products;
mod recurrences;
mod training;
mod vision;

use super::{Case, values};
use crate::graph::{BuildError, Builder, TensorId};
use crate::ops::{FAMILIES, Op, OpCode, OutputSpec};
use crate::tensor::{Capability, DIMS, DType, TensorDesc};
use std::collections::HashMap;
use std::sync::Arc;

/// The shape of a tensor, fastest dimension first.
type Shape = [usize; DIMS];

/// Bound of results that are copied, compared or counted: they are equal.
const EQUAL: f64 = 0.0;
/// Bound of f32 arithmetic: sums in another order, functions with an error of some ulps, also of large arguments.
const IN_F32: f64 = 1e-9;
/// Bound of factors or results that are rounded to F16, or to the 10 bits of TF32.
const IN_F16: f64 = 1e-6;
/// Bound of factors or results that are rounded to BF16.
const IN_BF16: f64 = 5e-5;
/// Bound of products with quantised weights, for which a device may round columns to 8-bit codes. The CPU in fast mode and CUDA do: their
/// errors are 3e-5 to 2e-4, the largest with IQ2_S.
const QUANTISED: f64 = 5e-4;
/// Bound of values that are quantised to 8-bit codes: a few codes may differ, where a value is halfway between two.
const IN_Q8: f64 = 1e-5;

/// Every case, in the order of [`FAMILIES`]: at least one for each op that a single device runs.
///
/// The collective ops have none: a device runs them as a rank of a group whose other ranks are other queues or devices.
///
/// # Errors
/// [`BuildError`] for a case with an invalid graph, which is a bug in fanout.
pub fn cases() -> Result<Vec<Case>, BuildError> {
    let drafts = [
        elementwise::cases(),
        movement::cases(),
        products::cases(),
        vision::cases(),
        recurrences::cases(),
        training::cases(),
    ];
    let order: HashMap<OpCode, usize> = FAMILIES.iter().flat_map(|row| row.codes).copied().zip(0..).collect();
    let mut built = Vec::new();
    for draft in drafts.into_iter().flatten() {
        let code = draft.code().ok_or(BuildError::Tensor("a case without a node"))?;
        built.push((order.get(&code), draft.build(code)?));
    }
    built.sort_by_key(|(position, _)| *position); // stable: the cases of an op keep their order
    Ok(built.into_iter().map(|(_, case)| case).collect())
}

/// The types of weights: all that convert to f32.
fn weight_types() -> impl Iterator<Item = DType> {
    DType::with_capability(Capability::Decode)
}

/// The bound of products with factors of this type. Their sums are f32.
fn product_bound(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => IN_F32,
        DType::F16 => IN_F16,
        DType::BF16 => IN_BF16,
        _ => QUANTISED,
    }
}

/// A row of the table.
fn case(bound: f64) -> Draft {
    Draft { variant: String::new(), bound, sources: Vec::new(), nodes: Vec::new() }
}

/// A case under construction: sources, then nodes on them.
struct Draft {
    /// What tells the case from others of its op: the type of weights, the kind of op in capitals, or a description.
    variant: String,
    bound: f64,
    sources: Vec<Source>,
    nodes: Vec<DraftNode>,
}

/// A leaf, or a permuted view of one.
struct Source {
    dtype: DType,
    ne: Shape,
    content: Content,
    /// The order of dimensions in the view that nodes read: dimension `i` of the leaf is dimension `axes[i]` of the view.
    axes: Option<Shape>,
}

/// The values of a leaf.
enum Content {
    Normal,
    Uniform(f32, f32),
    /// A permutation of equidistant values around 0: no two are equal.
    Distinct,
    Listed(Vec<f32>),
    Bytes(Vec<u8>),
}

/// A node on the sources with these numbers.
struct DraftNode {
    op: Op,
    sources: Vec<usize>,
    output: Output,
}

/// The destination of a node.
enum Output {
    Inferred,
    Given(OutputSpec),
    /// The memory of a source.
    Onto(usize),
}

impl Draft {
    /// Names the case, beside its op.
    fn variant(self, variant: impl ToString) -> Draft {
        Draft { variant: variant.to_string(), ..self }
    }

    fn source(mut self, dtype: DType, ne: Shape, content: Content) -> Draft {
        self.sources.push(Source { dtype, ne, content, axes: None });
        self
    }

    /// A source of normally distributed values.
    fn normal(self, dtype: DType, ne: Shape) -> Draft {
        self.source(dtype, ne, Content::Normal)
    }

    /// A source of F32 with uniformly distributed values.
    fn uniform(self, ne: Shape, lo: f32, hi: f32) -> Draft {
        self.source(DType::F32, ne, Content::Uniform(lo, hi))
    }

    /// A source of F32 without two equal values.
    fn distinct(self, ne: Shape) -> Draft {
        self.source(DType::F32, ne, Content::Distinct)
    }

    /// A source of these values, dimension 0 fastest.
    fn listed(self, dtype: DType, ne: Shape, values: impl IntoIterator<Item = f32>) -> Draft {
        self.source(dtype, ne, Content::Listed(values.into_iter().collect()))
    }

    /// A source of I32 with these values.
    fn indices(self, ne: Shape, indices: impl IntoIterator<Item = i32>) -> Draft {
        self.source(DType::I32, ne, Content::Bytes(indices.into_iter().flat_map(i32::to_le_bytes).collect()))
    }

    /// A source of I64 with these values.
    fn long_indices(self, ne: Shape, indices: impl IntoIterator<Item = i64>) -> Draft {
        self.source(DType::I64, ne, Content::Bytes(indices.into_iter().flat_map(i64::to_le_bytes).collect()))
    }

    /// Nodes read the last source as a view with permuted dimensions: dimension `i` becomes dimension `axes[i]`.
    fn permuted(mut self, axes: Shape) -> Draft {
        if let Some(source) = self.sources.last_mut() {
            source.axes = Some(axes);
        }
        self
    }

    fn node_with(mut self, op: impl Into<Op>, sources: Vec<usize>, output: Output) -> Draft {
        self.nodes.push(DraftNode { op: op.into(), sources, output });
        self
    }

    fn all(&self) -> Vec<usize> {
        (0..self.sources.len()).collect()
    }

    /// A node on all sources.
    fn node(self, op: impl Into<Op>) -> Draft {
        let all = self.all();
        self.node_with(op, all, Output::Inferred)
    }

    /// A node on the sources with these numbers.
    fn node_of(self, op: impl Into<Op>, sources: &[usize]) -> Draft {
        self.node_with(op, sources.to_vec(), Output::Inferred)
    }

    /// A node on all sources with a destination of this type and shape.
    fn node_as(self, op: impl Into<Op>, dtype: DType, ne: Shape) -> Draft {
        let all = self.all();
        self.node_with(op, all, Output::Given(OutputSpec { dtype, ne }))
    }

    /// A node on all sources that writes source `i`.
    fn node_onto(self, op: impl Into<Op>, i: usize) -> Draft {
        let all = self.all();
        self.node_with(op, all, Output::Onto(i))
    }

    /// The op of the case: that of its first node.
    fn code(&self) -> Option<OpCode> {
        self.nodes.first().map(|node| node.op.code())
    }

    fn build(self, code: OpCode) -> Result<Case, BuildError> {
        let unknown = BuildError::Tensor("a source that does not exist");
        let (mut builder, mut ids, mut inputs) = (Builder::new(), Vec::new(), Vec::new());
        for (number, source) in self.sources.into_iter().enumerate() {
            let desc = TensorDesc::contiguous(source.dtype, source.ne)?;
            let leaf = builder.leaf_with_desc(desc)?;
            inputs.push((leaf, source.content.bytes(&desc, (u64::from(code as u32) << 8) + number as u64)?));
            ids.push(match source.axes {
                Some(axes) => builder.view(leaf, desc.permuted(axes)?, 0)?,
                None => leaf,
            });
        }
        for node in self.nodes {
            let sources: Vec<Option<TensorId>> = node.sources.iter().map(|&i| ids.get(i).copied()).collect();
            match node.output {
                Output::Inferred => builder.node(node.op, &sources)?,
                Output::Given(output) => builder.node_with_output(node.op, &sources, output)?,
                Output::Onto(i) => {
                    let target = *ids.get(i).ok_or_else(|| unknown.clone())?;
                    let desc = builder.tensor(target).ok_or_else(|| unknown.clone())?.desc;
                    let view = builder.view(target, desc, 0)?;
                    builder.node_into(node.op, &sources, view)?
                }
            };
        }
        let graph = builder.build();
        let mut memory = vec![0xa5; graph.slot_sizes().iter().sum()];
        for (leaf, bytes) in inputs {
            let place = graph.tensor(leaf).and_then(|t| t.place).ok_or_else(|| unknown.clone())?;
            memory[place.offset..place.offset + bytes.len()].copy_from_slice(&bytes);
        }
        let name = format!("{code} {}", self.variant).trim_end().to_owned();
        Ok(Case { name, graph: Arc::new(graph), memory, bound: self.bound })
    }
}

impl Content {
    /// The bytes of a contiguous tensor. Each leaf of a case has a seed of its own.
    fn bytes(self, desc: &TensorDesc, seed: u64) -> Result<Vec<u8>, BuildError> {
        let n = desc.elements();
        let values = match self {
            Content::Bytes(bytes) if bytes.len() == desc.extent() => return Ok(bytes),
            Content::Bytes(_) => return Err(BuildError::Tensor("a source with another number of indices")),
            Content::Normal => values::normal(seed, n),
            Content::Uniform(lo, hi) => values::uniform(seed, n, lo, hi),
            Content::Distinct => {
                let mut values: Vec<f32> = (0..n).map(|k| 0.37 * (k as f32 - n as f32 / 2.0)).collect();
                fastrand::Rng::with_seed(seed).shuffle(&mut values);
                values
            }
            Content::Listed(values) => values,
        };
        values::encode(desc, &values).ok_or(BuildError::Tensor("a source whose values do not fit its type or shape"))
    }
}
