//! Launches of ADD, ADD1, SUB, MUL, DIV and ADD_ID: kernels/binary.cu.

use super::elementwise::{ElementwiseAnyArgs, ElementwiseArgs, block_shape, elementwise_arguments};
use super::{Access, Grid, KernelArguments, NodeLaunches, NodeOnGpu, Ptr, Unsupported, suffix};
use crate::ops::OpCode;
use crate::ops::binary::Binary;
use crate::tensor::DType::{self, BF16, F16, F32};
use bytemuck::{Pod, Zeroable};

/// Types of a, b and dst with a specialised entry; the other types use `binary_any`.
const SPECIALISED: [[DType; 3]; 7] = [
    [F32, F32, F32],
    [F16, F32, F32],
    [F16, F32, F16],
    [F16, F16, F16],
    [BF16, F32, F32],
    [BF16, F32, BF16],
    [BF16, BF16, BF16],
];

elementwise_arguments! {
    /// `struct BinaryArgs` of the file.
    BinaryArgs: ElementwiseArgs { op: u32, padding: u32 }
    /// `struct BinaryAnyArgs` of the file.
    BinaryAnyArgs: ElementwiseAnyArgs { op: u32, padding: u32 }
}

pub(super) fn select(op: Binary, on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let number = match op {
        // The one element of ADD1 is broadcast.
        Binary::Add | Binary::Add1 => 0,
        Binary::Sub => 1,
        Binary::Mul => 2,
        Binary::Div => 3,
        Binary::AddId => return add_id(on),
    };
    let (a, b, d) = (on.src(0)?, on.src(1)?, on.dst());
    let types = [a.dtype(), b.dtype(), d.dtype()];
    if !types.into_iter().all(DType::is_float) {
        return Err(on.unsupported_types());
    }
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Dst];
    if SPECIALISED.contains(&types)
        && let Some((elementwise, grid)) = ElementwiseArgs::new(a, b, d, [0; 2])
    {
        let name = format!("binary_{}", types.map(suffix).join("_"));
        return on.single_launch(
            ("binary", &name),
            grid,
            &pointers,
            &BinaryArgs { elementwise, op: number, padding: 0 },
        );
    }
    let (elementwise, grid) = ElementwiseAnyArgs::new(on, [a, b, d], [0; 2])?;
    on.single_launch(("binary", "binary_any"), grid, &pointers, &BinaryAnyArgs { elementwise, op: number, padding: 0 })
}

/// `struct AddIdArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AddIdArgs {
    a_nb: [u64; 2],
    ids_nb: [u64; 2],
    d_nb: [u64; 2],
    b_nb: u64,
    n: u32,
    rows: u32,
    used: u32,
    experts: u32,
    tiles: u32,
    wide: u32,
    code: u32,
    padding: u32,
}

impl KernelArguments for AddIdArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let rows = |pointer, nb: [u64; 2]| {
            let row = Access::run(pointer, &[self.n]).along(self.used, nb[0]);
            row.along(self.rows.div_ceil(self.used.max(1)), nb[1]).vectors(self.wide, 4)
        };
        let ids =
            Access::one(2).along(self.used, self.ids_nb[0]).along(self.rows.div_ceil(self.used.max(1)), self.ids_nb[1]);
        let b = Access::run(1, &[self.n]).along(self.experts, self.b_nb).vectors(self.wide, 4);
        Ok(vec![rows(0, self.a_nb), b, ids, rows(3, self.d_nb)])
    }
}

fn add_id(on: &NodeOnGpu<'_>) -> Result<NodeLaunches, Unsupported> {
    let (a, b, ids, d) = (on.src(0)?, on.src(1)?, on.src(2)?, on.dst());
    if [a.dtype(), b.dtype(), d.dtype()] != [F32; 3] {
        return Err(on.unsupported_types());
    }
    let [n, used, ..] = on.shape(d)?.ne;
    let rows = d.rows() as u64;
    let (threads, tiles) = block_shape(u64::from(n).div_ceil(8), rows);
    let outer = |nb: [usize; 4]| [nb[1] as u64, nb[2] as u64];
    let [i0, i1, ..] = ids.nb();
    let (a_nb, d_nb, b_nb) = (outer(a.nb()), outer(d.nb()), b.nb()[1] as u64);
    let wide = a_nb.iter().chain(&d_nb).chain([&b_nb]).all(|nb| nb.is_multiple_of(16));
    let args = AddIdArgs {
        a_nb,
        ids_nb: [i0 as u64, i1 as u64],
        d_nb,
        b_nb,
        n,
        rows: i32::try_from(rows).map_err(|_| on.unsupported("2^31 or more rows"))? as u32,
        used,
        experts: on.shape(b)?.ne[1],
        tiles: tiles as u32,
        wide: u32::from(wide),
        code: OpCode::AddId.to_wire(),
        padding: 0,
    };
    let grid = Grid { blocks: [tiles * rows.div_ceil(u64::from(threads[1])), 1, 1], threads, shared: 0 };
    let pointers = [Ptr::Src(0), Ptr::Src(1), Ptr::Src(2), Ptr::Dst, Ptr::ErrorWord];
    on.single_launch(("binary", "binary_add_id"), grid, &pointers, &args)
}
