//! Launches of the kernels that also compute fused products: the vector kernels of packed weights, kernels/mul_mat_packed.cu, and those of
//! F16 and BF16, kernels/mul_mat_half.cu.

use super::super::{
    Access, Grid, KernelArguments, KernelLaunch, MAX_GRID_YZ, NodeLaunches, NodeOnGpu, Ptr, Unsupported,
    saturating_product,
};
use super::experts::ExpertGroups;
use super::planes::Planes;
use super::{
    Columns, LaneGroups, MMA_ROWS, MulMatArgs, MulMatIdArgs, ProductKernel, VEC_THREADS, WeightLayout, Weights,
};
use super::{columns_of, group_len, half_warps, launch_typed, mul_mat_args, mul_mat_id_launch};
use crate::cuda::kernel::COUNTER_BYTES;
use crate::ops::mul_mat::Precision;
use crate::tensor::TensorDesc;
use bytemuck::{Pod, Zeroable};

/// Limit of the products of a launch besides the first one.
const MAX_MORE: usize = 2;

/// `struct ProductsArgs` of kernels/mul_mat_products.cuh.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ProductsArgs {
    stride: u64,
    product: MulMatArgs,
    more: [GridProduct; MAX_MORE],
    gated: u32,
    strides: u32,
}

impl KernelArguments for ProductsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let MulMatArgs { k, m, n, a, .. } = self.product;
        let mut accesses = Vec::from(self.product.accesses());
        let biases = [m, self.more[0].m, self.more[1].m].into_iter().enumerate();
        accesses.extend(biases.map(|(i, m)| Access::run(7 + i, &[m])));
        let rows = if self.gated != 0 { [m, 0] } else { self.more.map(|more| more.m) };
        for (i, m) in rows.into_iter().enumerate() {
            accesses.push(Access::run(3 + i, &[k]).along(m, a[0]));
            accesses.push(Access::run(5 + i, &[m, n]));
        }
        accesses.push(Access::bytes(10, self.stride.saturating_mul(n.into())));
        Ok(accesses)
    }
}

/// `struct PackedIdArgs` of kernels/mul_mat_packed.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct PackedIdArgs {
    pub(super) stride: u64,
    pub(super) product: MulMatIdArgs,
}

impl KernelArguments for PackedIdArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let mut accesses = self.product.accesses(grid)?;
        let MulMatIdArgs { k, m, experts, used, tokens, a, .. } = self.product;
        accesses.push(Access::run(5, &[k]).along(m, a[0]).along(experts, a[1]));
        accesses.push(Access::bytes(6, self.stride.saturating_mul(saturating_product(&[used, tokens]))));
        Ok(accesses)
    }
}

/// `struct GridProduct` of kernels/mul_mat_products.cuh.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GridProduct {
    first: u32,
    m: u32,
}

/// No product.
const NO_PRODUCT: GridProduct = GridProduct { first: u32::MAX, m: 0 };

/// Products in one launch, besides that of source 0.
#[derive(Default)]
pub(in super::super) struct Products {
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

/// The launch of products. `None` if no kernel fuses products of this type with as many columns, or there are several planes of columns.
pub(in super::super) fn products(on: &NodeOnGpu<'_>, products: &Products) -> Result<Option<NodeLaunches>, Unsupported> {
    let a = on.src(0)?;
    let (columns, conversion) = columns_of(on)?;
    let planes = Planes::of(a, &columns.shape, on)?;
    let layout = if a.dtype().is_block() { WeightLayout::Packed } else { WeightLayout::Ggml };
    let fuses = match ProductKernel::of(a, planes.n, layout, on) {
        ProductKernel::PackedVec { width } | ProductKernel::Half { width } => planes.n <= width,
        _ => false,
    };
    if !fuses || planes.counts != [1, 1] || products.others.len() > MAX_MORE {
        return Ok(None);
    }
    let weights = Weights { desc: a, at: Ptr::Src(0), layout };
    let launch = launch(&weights, &columns, Ptr::Dst, products, on)?;
    Ok(Some(NodeLaunches { columns: conversion, ..NodeLaunches::one(launch) }))
}

/// The launch of MUL_MAT_ID; with weights `up`, the result is the SWIGLU of both products. Source `ids` selects the experts; `quantized`
/// is as in [`Products`]. Nodes with many tokens are not fused.
pub(in super::super) fn products_by_id(
    on: &NodeOnGpu<'_>,
    ids: u8,
    up: Option<Ptr>,
    quantized: u64,
) -> Result<NodeLaunches, Unsupported> {
    // Any: refused in each case in which the node's own precision permits groups.
    if ExpertGroups::of(Precision::Any, on.src(0)?, ids, WeightLayout::Packed, on)?.is_some() {
        return Err(on.unsupported("so many tokens that the columns of an expert are multiplied at a time"));
    }
    let (columns, conversion) = columns_of(on)?;
    let launch = mul_mat_id_launch(on.src(0)?, &columns, WeightLayout::Packed, (ids, up, quantized), on)?;
    Ok(NodeLaunches { columns: conversion, ..NodeLaunches::one(launch) })
}

/// The launch that multiplies weights and columns into `to`, by a kernel that fuses products.
pub(super) fn launch(
    &Weights { desc: a, at, layout }: &Weights<'_>,
    columns: &Columns,
    to: Ptr,
    products: &Products,
    on: &NodeOnGpu<'_>,
) -> Result<KernelLaunch, Unsupported> {
    let planes = Planes::of(a, &columns.shape, on)?;
    let in_z = u64::from(planes.count(on)?);
    let all_rows = products.others.iter().fold(a.ne()[1], |all, other| all + other.rows);
    let kernel = ProductKernel::of(a, planes.n, layout, on);
    let (ProductKernel::PackedVec { width } | ProductKernel::Half { width }) = kernel else {
        return Err(on.unsupported("bug: a kernel that does not fuse products"));
    };
    let in_y = u64::from(planes.n.div_ceil(width));
    // The kernels of F16 and BF16 have no groups of lanes: a block has 16 rows.
    let groups = matches!(kernel, ProductKernel::PackedVec { .. })
        .then(|| LaneGroups::of(a, layout, width, (all_rows, in_y.saturating_mul(in_z)), on));
    let blocks_of = |m: usize| groups.map_or(m.div_ceil(MMA_ROWS as usize) as u64, |groups| groups.blocks(m));
    let (mut more, mut in_x) = ([NO_PRODUCT; MAX_MORE], blocks_of(a.ne()[1]));
    for (product, other) in more.iter_mut().zip(&products.others).filter(|(_, other)| other.rows > 0) {
        *product = GridProduct { first: u32::try_from(in_x).unwrap_or(u32::MAX), m: other.rows as u32 };
        in_x += blocks_of(other.rows);
    }
    let mut pointers = vec![at, columns.at, to];
    let of_others =
        |of: fn(&OtherProduct) -> Ptr| (0..MAX_MORE).map(move |i| products.others.get(i).map_or(Ptr::Null, of));
    pointers.extend(of_others(|other| other.weights));
    pointers.extend(of_others(|other| other.result));
    pointers.extend((0..=MAX_MORE).map(|i| products.biases.get(i).copied().unwrap_or(Ptr::Null)));
    pointers.extend(quantized_result(products.quantized));
    let mut product = mul_mat_args(a, &planes, layout, groups.map_or(0, |groups| groups.log2_lanes), on)?;
    if !products.others.is_empty() {
        // Weights and results of all products are dense. Otherwise, the strides of a first product with one row would be 0.
        product.a[0] = a.row_bytes() as u64;
        product.dst[0] = size_of::<f32>() as u64;
    }
    let (stride, gated) = (products.quantized, products.gated.into());
    let bits = |strides: &[u64]| strides.iter().fold(0, |all, stride| all | (stride % 16)) as u32;
    let strides = bits(&product.a) | (bits(&product.b) << 4) | (bits(&product.dst) << 8);
    let args = ProductsArgs { stride, product, more, gated, strides };
    let grid = [in_x, in_y.min(MAX_GRID_YZ), in_z.min(MAX_GRID_YZ)];
    if groups.is_none() {
        let threads = 32 * half_warps(product.k, in_x.saturating_mul(in_y).saturating_mul(in_z), on);
        let entry = format!("half{width}");
        return launch_typed("half_", &entry, a, Grid::of(grid, threads), &pointers, &args, on);
    }
    launch_typed("packed_", &format!("packed_vec{width}"), a, Grid::of(grid, VEC_THREADS), &pointers, &args, on)
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
