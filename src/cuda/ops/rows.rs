//! Launches of GET_ROWS and SET_ROWS: kernels/rows.cu for plain types; the quantising and dequantising copies for block types.

use super::copy::{BlockTarget, RowPartition, from_blocks, has_blocks, reads_blocks, to_blocks};
use super::{
    Access, Grid, KernelArguments, KernelLaunch, NodeLaunches, NodeOnGpu, Ptr, Shape, THREADS, Unsupported, blocks,
    saturating_product,
};
use crate::ops::rows::Rows;
use crate::tensor::DType::{F16, F32, I16, I32, I64};
use crate::tensor::{DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Longest list of ids in which SET_ROWS finds the last of equal ids by scanning. Longer lists use a hash table ("claims"),
/// because the scan is quadratic.
const MAX_SCANNED_LIST: usize = 32;

/// `struct Ids` of kernels/common/ids.cuh.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Ids {
    nb: [u64; 3],
    wide: u32,
    pub(super) rows: u32,
    count: u32,
    lists: [u32; 2],
    claims: u32,
}

impl KernelArguments for Ids {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![self.access(0), self.claims_access(1)])
    }
}

impl Ids {
    /// The accesses of the ids.
    pub(super) fn access(&self, pointer: usize) -> Access {
        let ids = Access::one(pointer).of(if self.wide != 0 { I64 } else { I32 }).along(self.count, self.nb[0]);
        ids.along(self.lists[0], self.nb[1]).along(self.lists[1], self.nb[2])
    }

    /// The accesses of the tables of claims.
    pub(super) fn claims_access(&self, pointer: usize) -> Access {
        let [n1, n2] = self.lists;
        Access::bytes(pointer, saturating_product(&[8, self.claims, n1, n2]))
    }

    /// The lists `ids`, which select rows of `table`.
    fn of(on: &NodeOnGpu<'_>, ids: &TensorDesc, table: &TensorDesc) -> Result<Ids, Unsupported> {
        let (rows, Shape { ne, nb }) = (on.shape(table)?.ne[1], on.shape(ids)?);
        let nb = [nb[0], nb[1], nb[2]];
        Ok(Ids { nb, wide: u32::from(ids.dtype() == I64), rows, count: ne[0], lists: [ne[1], ne[2]], claims: 0 })
    }
}

/// `struct GetRowsArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct GetRowsArgs {
    table: Shape,
    y: Shape,
    list: Ids,
    partition: RowPartition,
    types: [u32; 2],
}

impl KernelArguments for GetRowsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [n, _, n2, n3] = self.y.ne;
        let table = Access::shape(0, [n, self.list.rows, n2, n3], self.table.nb);
        Ok(vec![table, self.list.access(1), self.y.access(2)])
    }
}

/// `struct SetRowsArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct SetRowsArgs {
    x: Shape,
    y: Shape,
    list: Ids,
    partition: RowPartition,
    types: [u32; 2],
}

impl KernelArguments for SetRowsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let [n, _, n2, n3] = self.x.ne;
        let rows = Access::shape(2, [n, self.list.rows, n2, n3], self.y.nb);
        Ok(vec![self.x.access(0), self.list.access(1), rows, self.list.claims_access(3)])
    }
}

pub(super) fn select(op: Rows, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    match op {
        Rows::GetRows => get_rows(on),
        Rows::SetRows => set_rows(on),
    }
}

fn get_rows(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (table, ids, dst) = (on.src(0)?, on.src(1)?, on.dst());
    let (xs, ys, list) = (on.shape(table)?, on.shape(dst)?, Ids::of(on, ids, table)?);
    let types = match (table.dtype(), dst.dtype()) {
        (I32, I32) => [F32, F32],
        (from, F32) if from.is_float() => [from, F32],
        (from, F32) if reads_blocks(from) => return from_blocks(on, xs, ys, Some(list)),
        _ => return Err(on.unsupported_types()),
    };
    let partition = row_partition(on, dst)?;
    let args = GetRowsArgs { table: xs, y: ys, list, partition, types: types.map(DType::to_wire) };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Dst, Ptr::ErrorWord];
    on.single_launch(("rows", "rows_get"), partition.grid(dst.rows()), &pointers, &args)
}

fn set_rows(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (x, ids, dst) = (on.src(0)?, on.src(1)?, on.dst());
    if x.is_empty() {
        return Ok(NodeLaunches::default());
    }
    let (xs, ys, mut list) = (on.shape(x)?, on.shape(dst)?, Ids::of(on, ids, dst)?);
    let mut kernel = NodeLaunches::default();
    let mut claims = Ptr::Null;
    if ids.ne()[0] > MAX_SCANNED_LIST {
        claims = Ptr::Scratch(0);
        (kernel.launches, kernel.scratch) = claim_launches(on, ids, &mut list)?;
    }
    let types = match (x.dtype(), dst.dtype()) {
        // F16 is copied bit for bit.
        (F16, F16) => [I16, I16],
        (F32 | F16, to) if to.is_float() || to == I32 => [x.dtype(), to],
        (F32 | F16, to) if has_blocks(to) => {
            let target = BlockTarget::Named(ys, list);
            kernel.launches.push(to_blocks(on, xs, target, [Ptr::Src(0), Ptr::Src(1), claims])?);
            return Ok(kernel);
        }
        _ => return Err(on.unsupported_types()),
    };
    let partition = row_partition(on, x)?;
    let args = SetRowsArgs { x: xs, y: ys, list, partition, types: types.map(DType::to_wire) };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Dst, claims, Ptr::ErrorWord];
    kernel.launches.push(on.launch(("rows", "rows_set"), partition.grid(x.rows()), &pointers, &args)?);
    Ok(kernel)
}

/// Partition of threads among the rows of `t`, with four elements per access.
fn row_partition(on: &NodeOnGpu<'_>, t: &TensorDesc) -> Result<RowPartition, Unsupported> {
    if u32::try_from(t.rows()).is_err() {
        return Err(on.unsupported("2^32 or more rows"));
    }
    Ok(RowPartition::of(t.ne()[0].div_ceil(4)))
}

/// `struct ClearClaimsArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct ClearClaimsArgs {
    n: u64,
}

impl KernelArguments for ClearClaimsArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![Access::bytes(0, self.n.saturating_mul(8))])
    }
}

/// The launches that build the hash tables of claims, one per list, and the bytes of the tables. Records the table size in
/// `list`.
fn claim_launches(
    on: &NodeOnGpu<'_>,
    ids: &TensorDesc,
    list: &mut Ids,
) -> Result<(Vec<KernelLaunch>, u64), Unsupported> {
    let slots = 2 * (list.count as usize).next_power_of_two();
    list.claims = i32::try_from(slots - 1).map_err(|_| on.unsupported("lists of more than 2^29 ids"))? as u32 + 1;
    let n = list.lists.iter().fold(slots, |n, &lists| n.saturating_mul(lists as usize));
    let (clear, count) = (ClearClaimsArgs { n: n as u64 }, ids.elements());
    let table = Ptr::Scratch(0);
    let launches = vec![
        on.launch(("rows", "rows_clear"), Grid::line(blocks(n, THREADS, 1), THREADS), &[table], &clear)?,
        on.launch(("rows", "rows_claim"), Grid::line(blocks(count, THREADS, 1), THREADS), &[Ptr::Src(1), table], list)?,
    ];
    Ok((launches, 8 * n as u64))
}
