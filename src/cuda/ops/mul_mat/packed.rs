//! Launches of the vector kernels of packed weights, which also compute fused products: kernels/mul_mat_packed.cu.

use super::super::{Grid, KernelLaunch, MAX_GRID_YZ, NodeLaunches, NodeOnGpu, Ptr, Unsupported};
use super::planes::Planes;
use super::{Columns, MAX_DOT_COLUMNS, MulMatArgs, MulMatIdArgs, VEC_THREADS, WeightLayout};
use super::{blocks_of_rows, columns_of, group_len, launch_typed, log2_lanes, mul_mat_args, mul_mat_id_launch};
use crate::cuda::kernel::COUNTER_BYTES;
use crate::tensor::TensorDesc;
use bytemuck::{Pod, Zeroable};

/// Fewest lanes (log2) with which a thread of a gated product stores one result at most.
pub(super) const MIN_GATED_LANES: u32 = 5;

/// Limit of the products of a launch besides the first one.
const MAX_MORE: usize = 2;

/// `struct PackedVecArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PackedVecArgs {
    stride: u64,
    product: MulMatArgs,
    more: [GridProduct; MAX_MORE],
    gated: u32,
    padding: u32,
}

/// `struct PackedIdArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PackedIdArgs {
    pub(super) stride: u64,
    pub(super) product: MulMatIdArgs,
}

/// `struct GridProduct` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GridProduct {
    first: u32,
    m: u32,
}

/// No product.
const NO_PRODUCT: GridProduct = GridProduct { first: u32::MAX, m: 0 };

/// Products of packed weights in one launch, besides that of source 0.
#[derive(Default)]
pub(in super::super) struct PackedProducts {
    pub(in super::super) others: Vec<OtherProduct>,
    /// Vectors of F32, one for each product, that are added to the columns of its result; or none.
    pub(in super::super) biases: Vec<Ptr>,
    /// Whether the result is the SWIGLU of the products of source 0 and of the only other one.
    pub(in super::super) gated: bool,
    /// Bytes of a column of the result that is also written as quantised columns; 0 if it is not.
    pub(in super::super) quantized: u64,
}

/// A product of the same columns with `rows` rows of weights of the same type.
pub(in super::super) struct OtherProduct {
    pub(in super::super) rows: usize,
    pub(in super::super) weights: Ptr,
    pub(in super::super) result: Ptr,
}

/// The launch of products. `None` if there are more columns than the vector kernels of packed weights use, or several planes of columns.
pub(in super::super) fn products(
    on: &NodeOnGpu<'_>,
    products: &PackedProducts,
) -> Result<Option<NodeLaunches>, Unsupported> {
    let a = on.src(0)?;
    let (columns, conversion) = columns_of(on)?;
    let planes = Planes::of(a, &columns.shape, on)?;
    let splits = !products.gated || log2_lanes(a, a.ne()[1], 1, on) >= MIN_GATED_LANES;
    if planes.n > MAX_DOT_COLUMNS || planes.counts != [1, 1] || products.others.len() > MAX_MORE || !splits {
        return Ok(None);
    }
    let launch = vec_launch(a, &columns, products, on)?;
    Ok(Some(NodeLaunches { columns: conversion, ..NodeLaunches::one(launch) }))
}

/// The launch of MUL_MAT_ID; with weights `up`, the result is the SWIGLU of both products. Source `ids` selects the experts; `quantized`
/// is as in [`PackedProducts`].
pub(in super::super) fn products_by_id(
    on: &NodeOnGpu<'_>,
    ids: u8,
    up: Option<Ptr>,
    quantized: u64,
) -> Result<NodeLaunches, Unsupported> {
    let (columns, conversion) = columns_of(on)?;
    let launch = mul_mat_id_launch(on.src(0)?, &columns, WeightLayout::Packed, (ids, up, quantized), on)?;
    Ok(NodeLaunches { columns: conversion, ..NodeLaunches::one(launch) })
}

/// The launch for at most [`MAX_DOT_COLUMNS`] columns.
pub(super) fn vec_launch(
    a: &TensorDesc,
    columns: &Columns,
    products: &PackedProducts,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let planes = Planes::of(a, &columns.shape, on)?;
    let in_z = u64::from(planes.count(on)?);
    let rows = products.others.iter().fold(a.ne()[1], |all, other| all + other.rows);
    let log2_lanes = log2_lanes(a, rows, in_z, on);
    let (mut more, mut end) = ([NO_PRODUCT; MAX_MORE], blocks_of_rows(a, a.ne()[1], log2_lanes));
    for (product, other) in more.iter_mut().zip(&products.others).filter(|(_, other)| other.rows > 0) {
        *product = GridProduct { first: u32::try_from(end).unwrap_or(u32::MAX), m: other.rows as u32 };
        end += blocks_of_rows(a, other.rows, log2_lanes);
    }
    let mut pointers = vec![Ptr::Src(0), columns.at, Ptr::Dst];
    let of_others =
        |of: fn(&OtherProduct) -> Ptr| (0..MAX_MORE).map(move |i| products.others.get(i).map_or(Ptr::Null, of));
    pointers.extend(of_others(|other| other.weights));
    pointers.extend(of_others(|other| other.result));
    pointers.extend((0..=MAX_MORE).map(|i| products.biases.get(i).copied().unwrap_or(Ptr::Null)));
    pointers.extend(quantized_result(products.quantized));
    let mut product = mul_mat_args(a, &planes, WeightLayout::Packed, log2_lanes, on)?;
    if !products.others.is_empty() {
        // Dense results of all products. Otherwise, the stride of a result with one row would be 0.
        product.dst[0] = size_of::<f32>() as u64;
    }
    let (stride, gated) = (products.quantized, products.gated.into());
    let args = PackedVecArgs { stride, product, more, gated, padding: 0 };
    let width = planes.n.next_power_of_two();
    let grid = Grid::of([end, 1, in_z.min(MAX_GRID_YZ)], VEC_THREADS);
    launch_typed("packed_", &format!("packed_vec{width}"), a, grid, &pointers, &args, on)
}

/// Pointers of quantised columns that a gated product writes, if a column has any bytes.
pub(super) fn quantized_result(bytes: u64) -> [Ptr; 2] {
    if bytes == 0 { [Ptr::Null; 2] } else { [Ptr::ResultColumns, Ptr::Counters] }
}

/// For products with weights like a that read the result of a gated product: elements per scale, and bytes of a column of the result as
/// quantised columns. `None` if the kernel cannot write them.
pub(in super::super) fn quantized_result_form(a: &TensorDesc, dst: &TensorDesc) -> Option<(usize, u64)> {
    let (m, group) = (dst.ne()[0], group_len(a));
    // The kernel counts the blocks of each piece: 256 rows, or 128 for groups of 32.
    let counters = m.div_ceil(group.max(128)).saturating_mul(dst.rows());
    let fits = m.is_multiple_of(group) && counters as u64 <= COUNTER_BYTES / 4;
    fits.then(|| (group, super::quantized_column_bytes(m, group)))
}
