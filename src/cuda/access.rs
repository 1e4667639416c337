//! Preconditions of kernel launches: which bytes a kernel accesses behind each pointer, by its scalar arguments.
//!
//! Many of these arguments come from a peer: offsets and strides of op_params, counts, strides of tensors. A kernel trusts them, and
//! one access outside of an allocation or at a misaligned address ends the sessions of all clients of the GPU. So each argument struct
//! states its accesses ([`KernelArguments`]), and `ops::select` compares them with the operands of the node once, before a program
//! with the launches exists. A node whose launches break a precondition is [`Unsupported`](crate::device::Unsupported), and runs on
//! the CPU. That operands do not overlap is a rule of [`crate::graph::validate`].

use super::kernel::{COUNTER_BYTES, ColumnConversion, Grid, KernelLaunch, NodeLaunches, Ptr};
use crate::ops::NodeView;
use crate::tensor::{DType, TensorDesc};
use bytemuck::NoUninit;

/// Alignment of scratch memory and converted columns in bytes.
const SCRATCH_ALIGNMENT: u64 = 16;

/// The scalar arguments of a kernel, and its preconditions.
pub(super) trait KernelArguments: NoUninit {
    /// The accesses by the launch of this grid, whose pointers are numbered from 0.
    ///
    /// # Errors
    /// The violated rule for values that no kernel accepts.
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str>;
}

/// Limit of the loops of an [`Access`].
const MAX_LOOPS: usize = 8;

/// Accesses of a kernel through one of its pointers: for each combination of the loops' indices, a run of elements of the operand's type.
#[derive(Clone, Debug)]
pub(super) struct Access {
    /// Index of the pointer.
    pointer: usize,
    /// Type of the elements; `None` for the operand's type. In scratch memory, which has none, runs of elements have a type.
    dtype: Option<DType>,
    /// Byte offset of the first element.
    offset: u64,
    /// Length of the runs.
    run: Run,
    /// Counts and strides in bytes.
    loops: [(u64, u64); MAX_LOOPS],
    used: usize,
    /// All strides are multiples of so many elements, because the kernel accesses as many at once.
    vector: u64,
    /// Whether the kernel accepts elements at any address.
    unaligned: bool,
}

#[derive(Clone, Copy, Debug)]
enum Run {
    Bytes(u64),
    /// Elements of plain types, blocks of block types.
    Blocks(u64),
    Elements(u64),
    /// One element or block. The first loop counts elements, by the stride of blocks.
    Shape,
    /// A column of elements, or what the launch before the product has converted it to.
    Column(u64),
}

impl Access {
    fn new(pointer: usize, run: Run) -> Access {
        Access {
            pointer,
            dtype: None,
            offset: 0,
            run,
            loops: [(1, 0); MAX_LOOPS],
            used: 0,
            vector: 1,
            unaligned: false,
        }
    }

    /// One element, or block of a block type.
    pub(super) fn one(pointer: usize) -> Access {
        Access::new(pointer, Run::Blocks(1))
    }

    /// A run of as many elements as the product of the factors.
    pub(super) fn run(pointer: usize, factors: &[u32]) -> Access {
        Access::new(pointer, Run::Elements(saturating_product(factors)))
    }

    /// A run of elements of a plain type, or of blocks.
    pub(super) fn blocks(pointer: usize, blocks: u64) -> Access {
        Access::new(pointer, Run::Blocks(blocks))
    }

    /// A run of bytes, which the kernel accesses in words that its addresses permit.
    pub(super) fn bytes(pointer: usize, bytes: u64) -> Access {
        Access { dtype: Some(DType::I8), ..Access::new(pointer, Run::Bytes(bytes)) }
    }

    /// A run of `n` elements.
    pub(super) fn elements(pointer: usize, n: u64) -> Access {
        Access::new(pointer, Run::Elements(n))
    }

    /// The elements of a tensor of this shape.
    pub(super) fn shape(pointer: usize, ne: [u32; 4], nb: [u64; 4]) -> Access {
        (0..4).fold(Access::new(pointer, Run::Shape), |access, d| access.along(ne[d], nb[d]))
    }

    /// A column of `k` elements of b in a product.
    pub(super) fn column(pointer: usize, k: u32) -> Access {
        Access::new(pointer, Run::Column(k.into()))
    }

    /// No access unless a condition holds: the kernel does not use the pointer then, whether it is null or not.
    pub(super) fn only_if(self, condition: bool) -> Access {
        self.along(u32::from(condition), 0)
    }

    /// Repeats the access in a loop.
    pub(super) fn along(mut self, count: impl Into<u64>, stride: u64) -> Access {
        if let Some(free) = self.loops.get_mut(self.used) {
            *free = (count.into(), stride);
            self.used += 1;
        } else {
            debug_assert!(false, "more loops than an access has");
        }
        self
    }

    pub(super) fn at(self, offset: u64) -> Access {
        Access { offset, ..self }
    }

    pub(super) fn of(self, dtype: DType) -> Access {
        Access { dtype: Some(dtype), ..self }
    }

    /// As [`Access::of`], by the type's number.
    pub(super) fn of_type(self, number: u32) -> Access {
        Access { dtype: DType::from_wire(number), ..self }
    }

    /// As [`Access::of`] if this is an access by that pointer.
    pub(super) fn with_type_behind(self, pointer: usize, dtype: DType) -> Access {
        if self.pointer == pointer { self.of(dtype) } else { self }
    }

    /// The kernel accesses `n` elements at once if `vector`.
    pub(super) fn vectors(self, vector: u32, n: u64) -> Access {
        Access { vector: if vector == 0 { 1 } else { n }, ..self }
    }

    pub(super) fn unaligned(self) -> Access {
        Access { unaligned: true, ..self }
    }

    /// Checks the access of an operand.
    fn check(&self, operand: &Operand) -> Result<(), &'static str> {
        let dtype = self.dtype.or(operand.dtype).unwrap_or(DType::I8);
        let (size, block) = (dtype.block_bytes() as u64, dtype.block_len() as u64);
        let mut loops = self.loops;
        let bytes = match self.run {
            Run::Bytes(bytes) => bytes,
            Run::Shape => {
                loops[0].0 = loops[0].0.div_ceil(block);
                size
            }
            Run::Blocks(n) => n.saturating_mul(size),
            Run::Column(_) if operand.column > 0 => operand.column,
            Run::Column(n) | Run::Elements(n) => n.div_ceil(block).saturating_mul(size),
        };
        let is_typed = matches!(self.run, Run::Bytes(_) | Run::Column(_)) || self.dtype.or(operand.dtype).is_some();
        debug_assert!(is_typed, "elements without a type");
        if bytes == 0 || loops.iter().any(|&(count, _)| count == 0) {
            return Ok(());
        }
        let last = |end: Option<u64>, &(count, stride): &(u64, u64)| (count - 1).checked_mul(stride)?.checked_add(end?);
        let end = loops.iter().fold(self.offset.checked_add(bytes), last);
        if end.is_none_or(|end| end > operand.bytes) {
            return Err("beyond the end");
        }
        let align = if self.unaligned { 1 } else { dtype.alignment() as u64 };
        let strides = || loops.iter().filter(|&&(count, _)| count > 1).map(|&(_, stride)| stride);
        if !operand.alignment.is_multiple_of(align) || !self.offset.is_multiple_of(align) {
            return Err("at a misaligned offset");
        }
        if strides().any(|stride| !stride.is_multiple_of(align)) {
            return Err("at misaligned strides");
        }
        let outer = loops.iter().skip(usize::from(matches!(self.run, Run::Shape)));
        let mut outer = outer.filter(|&&(count, _)| count > 1).map(|&(_, stride)| stride);
        if self.vector > 1 && outer.any(|stride| !stride.is_multiple_of(self.vector * size)) {
            return Err("in vectors at misaligned strides");
        }
        Ok(())
    }
}

/// The product of counts, without overflow.
pub(super) fn saturating_product(factors: &[u32]) -> u64 {
    factors.iter().fold(1, |all: u64, &n| all.saturating_mul(u64::from(n)))
}

/// The memory behind a pointer, from its first byte on.
struct Operand {
    bytes: u64,
    alignment: u64,
    dtype: Option<DType>,
    /// Bytes of a converted column; 0 for other memory.
    column: u64,
}

impl Operand {
    fn of(desc: &TensorDesc, aligned: bool) -> Operand {
        let alignment = if aligned { desc.dtype().alignment() as u64 } else { 1 };
        Operand { bytes: desc.extent() as u64, alignment, dtype: Some(desc.dtype()), column: 0 }
    }

    fn of_scratch(bytes: u64, offset: u64) -> Operand {
        Operand { bytes, alignment: SCRATCH_ALIGNMENT, dtype: None, column: 0 }.after(offset)
    }

    /// The memory from a byte offset on.
    fn after(self, offset: u64) -> Operand {
        let alignment = self.alignment.min(1 << (offset | self.alignment).trailing_zeros());
        Operand { bytes: self.bytes.saturating_sub(offset), alignment, ..self }
    }

    fn of_columns(conversion: Option<&ColumnConversion>) -> Operand {
        let (bytes, column) = conversion.map_or((0, 0), |of| (of.bytes, of.column));
        Operand { column, ..Operand::of_scratch(bytes, 0) }
    }
}

/// Memory that the launches of a node share.
#[derive(Clone, Copy)]
struct SharedMemory<'a> {
    /// Bytes of scratch memory.
    scratch: u64,
    columns: Option<&'a ColumnConversion>,
    /// Bytes of the result as quantised columns.
    result_columns: u64,
}

/// Checks the preconditions of all launches of a node, or of fused nodes. Afterwards the launches no longer hold them.
///
/// # Errors
/// The kernel, the pointer and the violated precondition.
pub(super) fn check(launches: &mut NodeLaunches, node: &NodeView<'_>) -> Result<(), String> {
    let NodeLaunches { launches, scratch, columns, quantizing, packed, .. } = launches;
    check_all(launches, columns, node, *scratch)?;
    if let Some(packed) = packed {
        check_all(&mut packed.launches, &mut packed.columns, node, *scratch)?;
    }
    let columns = packed.as_ref().map_or(columns.as_ref(), |packed| packed.columns.as_ref());
    quantizing.iter_mut().try_for_each(|quantizing| {
        let column = super::ops::quantized_column_bytes(quantizing.k, quantizing.group);
        let result_columns = column.saturating_mul((node.dst.elements() / quantizing.k.max(1)) as u64);
        check_launch(&mut quantizing.launch, node, SharedMemory { scratch: *scratch, columns, result_columns })
    })
}

/// Checks launches, and the launch that converts the columns that they read.
fn check_all(
    launches: &mut [KernelLaunch],
    columns: &mut Option<ColumnConversion>,
    node: &NodeView<'_>,
    scratch: u64,
) -> Result<(), String> {
    let converting = columns.as_mut().map(|columns| std::mem::take(&mut columns.launch.accesses)).unwrap_or_default();
    let table = columns.as_mut().and_then(|columns| columns.table.as_mut());
    let tabulating = table.map(|table| std::mem::take(&mut table.launch.accesses)).unwrap_or_default();
    let shared = SharedMemory { scratch, columns: columns.as_ref(), result_columns: 0 };
    if let Some(columns) = shared.columns {
        check_accesses(&columns.launch, &converting, node, shared)?;
        if let Some(table) = &columns.table {
            check_accesses(&table.launch, &tabulating, node, shared)?;
        }
    }
    launches.iter_mut().try_for_each(|launch| check_launch(launch, node, shared))
}

fn check_launch(launch: &mut KernelLaunch, node: &NodeView<'_>, shared: SharedMemory<'_>) -> Result<(), String> {
    let accesses = std::mem::take(&mut launch.accesses);
    check_accesses(launch, &accesses, node, shared)
}

fn check_accesses(
    launch: &KernelLaunch,
    accesses: &[Access],
    node: &NodeView<'_>,
    shared: SharedMemory<'_>,
) -> Result<(), String> {
    if launch.is_empty() {
        return Ok(());
    }
    debug_assert!(
        all_declared(launch, accesses),
        "{} has a pointer without an access: {:?}",
        launch.entry().name,
        launch.pointers
    );
    for access in accesses {
        let Some(&pointer) = launch.pointers.get(access.pointer) else {
            return Err(format!("has no pointer {}, a bug: {}", access.pointer, launch.entry().name));
        };
        let source = |i: u8| node.srcs.get(i.into()).map(|desc| Operand::of(desc, node.aligned));
        let operand = match pointer {
            Ptr::Null => None,
            Ptr::Dst => Some(Operand::of(node.dst, node.aligned)),
            Ptr::DstAt(offset) => Some(Operand::of(node.dst, node.aligned).after(offset)),
            Ptr::Src(i) => source(i),
            Ptr::Scratch(offset) => Some(Operand::of_scratch(shared.scratch, offset)),
            Ptr::Columns => Some(Operand::of_columns(shared.columns)),
            Ptr::ResultColumns => Some(Operand::of_scratch(shared.result_columns, 0)),
            Ptr::Counters => Some(Operand::of_scratch(COUNTER_BYTES, 0)),
            Ptr::ErrorWord => Some(Operand::of_scratch(4, 0)),
        };
        if let Some(operand) = operand {
            access
                .check(&operand)
                .map_err(|what| format!("{} would access {pointer:?} {what}", launch.entry().name))?;
        }
    }
    Ok(())
}

/// Whether each pointer has an access. The error word is 4 bytes for every kernel. The counters need none, because each `select` compares
/// their number with [`COUNTER_BYTES`] before it chooses an entry that counts.
fn all_declared(launch: &KernelLaunch, accesses: &[Access]) -> bool {
    launch.pointers.iter().enumerate().all(|(index, pointer)| {
        matches!(pointer, Ptr::Null | Ptr::ErrorWord | Ptr::Counters) || accesses.iter().any(|of| of.pointer == index)
    })
}

/// Checks the preconditions of a launch whose only operand is a memory of so many bytes, at a multiple of the widest load.
///
/// # Errors
/// The violated precondition.
pub(super) fn check_memory(launch: &mut KernelLaunch, bytes: u64) -> Result<(), &'static str> {
    let operand = Operand::of_scratch(bytes, 0);
    std::mem::take(&mut launch.accesses).iter().try_for_each(|access| access.check(&operand))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::DType::{F16, F32, I64, Q8_0};

    /// What is wrong with an access of a tensor of this type and so many bytes, whose elements are aligned.
    fn outcome(access: Access, dtype: DType, bytes: u64) -> Result<(), &'static str> {
        access.check(&Operand { bytes, alignment: dtype.alignment() as u64, dtype: Some(dtype), column: 0 })
    }

    /// In scratch memory, bytes and converted columns need no type. Columns of a source are elements.
    #[test]
    fn columns_have_the_length_of_their_conversion() {
        let converted = |bytes| Operand { column: 48, ..Operand::of_scratch(bytes, 0) };
        let columns = Access::column(0, 32).along(3u32, 48);
        assert_eq!(columns.check(&converted(144)), Ok(()));
        assert_eq!(columns.check(&converted(143)), Err("beyond the end"));
        assert_eq!(outcome(Access::column(0, 32).along(3u32, 128), F32, 384), Ok(()));
        assert_eq!(outcome(Access::column(0, 32).along(3u32, 128), F32, 383), Err("beyond the end"));
        assert_eq!(Access::run(0, &[8]).of(F16).check(&Operand::of_scratch(15, 0)), Err("beyond the end"));
        assert_eq!(Access::bytes(0, 16).check(&Operand::of_scratch(15, 0)), Err("beyond the end"));
        assert_eq!(Access::bytes(0, 16).only_if(false).check(&Operand::of_scratch(15, 0)), Ok(()));
    }

    #[test]
    fn accesses_stay_inside_and_aligned() {
        let (end, offset, strides) =
            (Err("beyond the end"), Err("at a misaligned offset"), Err("at misaligned strides"));
        for (access, dtype, bytes, want) in [
            (Access::one(0), F32, 4, Ok(())),
            (Access::one(0), F32, 3, end),
            (Access::one(0).at(1), F32, 8, offset),
            (Access::one(0).at(1).unaligned(), F32, 5, Ok(())),
            (Access::one(0).at(u64::MAX), F32, 8, end),
            (Access::one(0).along(3u32, 8), F32, 20, Ok(())),
            (Access::one(0).along(3u32, 8), F32, 19, end),
            (Access::one(0).along(3u32, 6), F32, 64, strides),
            (Access::one(0).along(1u32, 6), F32, 4, Ok(())),
            (Access::one(0).along(0u32, 6).at(1), F32, 0, Ok(())),
            (Access::one(0).along(u64::MAX, u64::MAX), F32, 64, end),
            (Access::run(0, &[u32::MAX; 4]), F32, 64, end),
            (Access::run(0, &[64]), Q8_0, 68, Ok(())),
            (Access::run(0, &[64]), Q8_0, 67, end),
            (Access::shape(0, [64, 2, 1, 1], [34, 70, 0, 0]), Q8_0, 138, Ok(())),
            (Access::shape(0, [64, 2, 1, 1], [34, 71, 0, 0]), Q8_0, 200, strides),
            (Access::one(0).of(I64), F32, 8, offset),
            (Access::bytes(0, 7).at(1).along(2u32, 9), F16, 17, Ok(())),
            (Access::run(0, &[4]).along(2u32, 16).vectors(1, 4), F32, 32, Ok(())),
            (Access::run(0, &[4]).along(2u32, 20).vectors(0, 4), F32, 36, Ok(())),
            (Access::run(0, &[4]).along(2u32, 20).vectors(1, 4), F32, 36, Err("in vectors at misaligned strides")),
        ] {
            assert_eq!(outcome(access.clone(), dtype, bytes), want, "{access:?} {dtype} {bytes}");
        }
    }
}
