//! The products whose inner loops `scripts/loop_counts.py` counts: each type with kernels of its own, with 1, 2, 4 and 8 columns.
//! Weights are packed into panels first, for the micro-kernels; then they are strided rows, which the device reads in place, for
//! the row dot products.
//!
//! Under `valgrind --tool=callgrind`, each product is a profile of its own, between two calls of
//! [`profile_boundary`]; the program prints the products in their order. Run alone, it only computes them. The weights are zeros, because no kernel branches on values.

use fanout::cpu::{CpuDevice, MathMode};
use fanout::device::{Device, MemoryBudget, Region};
use fanout::graph::Builder;
use fanout::ops::mul_mat::MulMat;
use fanout::tensor::DType::{self, BF16, F16, F32};
use fanout::tensor::{Capability, TensorDesc};
use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;

/// Rows and columns of the weights: some panels, and rows so long that the loops are most of a kernel.
const ROWS: usize = 64;
const ROW_ELEMENTS: usize = 2048;

/// Columns of the products with panels, and with rows in place.
const PANEL_COLUMNS: [usize; 4] = [1, 2, 4, 8];
const ROW_COLUMNS: [usize; 3] = [1, 2, 4];

/// Memory of the device in bytes.
const MEMORY: u64 = 64 << 20;

fn main() -> Result<(), Box<dyn Error>> {
    // One thread: the leader runs every unit.
    let device = CpuDevice::new("CPU", 1, MathMode::Fast, MEMORY)?;
    println!("{ROWS} {ROW_ELEMENTS}");
    // Rows of the other types are expanded by a function of their own before the row dot product, which counts none of it: they
    // are the types without products on CUDA.
    let native = |t: &&DType| t.can(Capability::Simd) && t.can(Capability::Cuda);
    for &dtype in DType::ALL.iter().filter(|t| native(t) || [F32, F16, BF16].contains(t)) {
        for (layout, columns) in [("panels", &PANEL_COLUMNS[..]), ("rows", &ROW_COLUMNS)] {
            for &columns in columns {
                println!("{dtype} {layout} {columns}");
                run(&device, dtype, layout == "rows", columns)?;
            }
        }
    }
    Ok(())
}

/// Computes one product twice; the second time is measured.
fn run(device: &Arc<CpuDevice>, dtype: DType, strided: bool, columns: usize) -> Result<(), Box<dyn Error>> {
    let budget = MemoryBudget::new(MEMORY);
    let mut b = Builder::new();
    let dense = TensorDesc::contiguous(dtype, [ROW_ELEMENTS, ROWS, 1, 1])?;
    let [element, row, ..] = dense.nb();
    let stride = if strided { row + element } else { row };
    let weights = TensorDesc::strided(dtype, dense.ne(), [element, stride, ROWS * stride, ROWS * stride])?;
    let weights = b.leaf_with_desc(weights)?;
    let values = b.leaf(DType::F32, [ROW_ELEMENTS, columns, 1, 1])?;
    b.node(MulMat::PLAIN, &[Some(weights), Some(values)])?;
    let graph = Arc::new(b.build());
    let memory = device.alloc(graph.slot_sizes()[0] as u64, &budget)?;
    let bindings: Arc<[Region]> = Arc::from([memory.whole()]);
    let mut queue = device.queue(&budget)?;
    queue.fill(memory.whole(), 0)?;
    let program = device.prepare(graph)?;
    let mut product = || {
        queue.run(&program, &bindings)?;
        queue.mark().wait(None)
    };
    // The first run may pack the weights into panels.
    product()?;
    profile_boundary();
    product()?;
    profile_boundary();
    Ok(())
}

/// Callgrind writes a profile at each call (`--dump-before`), of what was executed since the call before.
#[inline(never)]
fn profile_boundary() {
    black_box(());
}
