//! GET_ROWS and SET_ROWS: kernels/rows.cu for plain types; block types go the way of copies, with named rows.

use super::copy::{Share, Target, from_blocks, has_blocks, to_blocks};
use super::{Grid, Kernel, Launch, On, Ptr, Shape, THREADS, Unsupported, blocks};
use crate::ops::rows::Rows;
use crate::tensor::DType::{F16, F32, I16, I32, I64};
use crate::tensor::{DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// In a longer list of ids, the last of equal ones is found by hashing instead of by reading the rest of the list.
const SHORT_LIST: usize = 32;

/// `struct Ids` of kernels/common/ids.cuh.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Ids {
    nb: [u64; 3],
    wide: u32,
    rows: u32,
    count: u32,
    lists: [u32; 2],
    claims: u32,
}

impl Ids {
    /// Lists of ids of rows of a table.
    fn of(on: &On<'_>, ids: &TensorDesc, table: &TensorDesc) -> Result<Ids, Unsupported> {
        let (rows, Shape { ne, nb }) = (on.shape(table)?.ne[1], on.shape(ids)?);
        let nb = [nb[0], nb[1], nb[2]];
        Ok(Ids { nb, wide: u32::from(ids.dtype() == I64), rows, count: ne[0], lists: [ne[1], ne[2]], claims: 0 })
    }
}

/// `struct Get` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Get {
    table: Shape,
    y: Shape,
    list: Ids,
    share: Share,
    types: [u32; 2],
}

/// `struct Set` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Set {
    x: Shape,
    y: Shape,
    list: Ids,
    share: Share,
    types: [u32; 2],
}

pub(super) fn select(op: Rows, on: &On<'_>) -> Result<Kernel, Unsupported> {
    match op {
        Rows::GetRows => get(on),
        Rows::SetRows => set(on),
    }
}

fn get(on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (table, ids, dst) = (on.src(0)?, on.src(1)?, on.dst());
    let (xs, ys, list) = (on.shape(table)?, on.shape(dst)?, Ids::of(on, ids, table)?);
    let types = match (table.dtype(), dst.dtype()) {
        (I32, I32) => [F32, F32],
        (from, F32) if from.is_float() => [from, F32],
        (from, F32) if has_blocks(from) => return from_blocks(on, xs, ys, Some(list)),
        _ => return Err(on.types()),
    };
    let share = share(on, dst)?;
    let numbers = Get { table: xs, y: ys, list, share, types: types.map(DType::to_wire) };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Dst, Ptr::Verdict];
    on.kernel(("rows", "rows_get"), share.grid(dst.rows()), &pointers, &numbers)
}

fn set(on: &On<'_>) -> Result<Kernel, Unsupported> {
    let (x, ids, dst) = (on.src(0)?, on.src(1)?, on.dst());
    if x.is_empty() {
        return Ok(Kernel::default());
    }
    let (xs, ys, mut list) = (on.shape(x)?, on.shape(dst)?, Ids::of(on, ids, dst)?);
    let mut kernel = Kernel::default();
    let mut claims = Ptr::Null;
    if ids.ne()[0] > SHORT_LIST {
        claims = Ptr::Scratch(0);
        (kernel.launches, kernel.scratch) = claim(on, ids, &mut list)?;
    }
    let types = match (x.dtype(), dst.dtype()) {
        // Halves move as they are.
        (F16, F16) => [I16, I16],
        (F32 | F16, to) if to.is_float() || to == I32 => [x.dtype(), to],
        (F32 | F16, to) if has_blocks(to) => {
            let target = Target::Named(ys, list);
            kernel.launches.push(to_blocks(on, xs, target, [Ptr::Src(0), Ptr::Src(1), claims])?);
            return Ok(kernel);
        }
        _ => return Err(on.types()),
    };
    let share = share(on, x)?;
    let numbers = Set { x: xs, y: ys, list, share, types: types.map(DType::to_wire) };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Dst, claims, Ptr::Verdict];
    kernel.launches.push(on.launch(("rows", "rows_set"), share.grid(x.rows()), &pointers, &numbers)?);
    Ok(kernel)
}

/// How threads share the rows of `t`, four elements an access.
fn share(on: &On<'_>, t: &TensorDesc) -> Result<Share, Unsupported> {
    if u32::try_from(t.rows()).is_err() {
        return Err(on.unsupported("2^32 or more rows"));
    }
    Ok(Share::of(t.ne()[0].div_ceil(4)))
}

/// `struct Clear` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Clear {
    n: u64,
}

/// The launches that fill the tables of claims, with which `list` is then read, and the bytes of these tables.
fn claim(on: &On<'_>, ids: &TensorDesc, list: &mut Ids) -> Result<(Vec<Launch>, u64), Unsupported> {
    let slots = 2 * (list.count as usize).next_power_of_two();
    list.claims = i32::try_from(slots - 1).map_err(|_| on.unsupported("lists of more than 2^29 ids"))? as u32 + 1;
    let n = list.lists.iter().fold(slots, |n, &lists| n.saturating_mul(lists as usize));
    let (clear, count) = (Clear { n: n as u64 }, ids.elements());
    let table = Ptr::Scratch(0);
    let launches = vec![
        on.launch(("rows", "rows_clear"), Grid::line(blocks(n, THREADS, 1), THREADS), &[table], &clear)?,
        on.launch(("rows", "rows_claim"), Grid::line(blocks(count, THREADS, 1), THREADS), &[Ptr::Src(1), table], list)?,
    ];
    Ok((launches, 8 * n as u64))
}
