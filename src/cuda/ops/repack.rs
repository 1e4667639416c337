//! Conversions of weights between rows and the packed form (see `layout`): mul_mat_pack of kernels/mul_mat.cu, which permutes the
//! bytes of groups of rows in place.

use super::{Access, Grid, KernelArguments, KernelLaunch, Ptr, THREADS, access, saturating_product};
use crate::cuda::driver::Gpu;
use crate::cuda::layout::PackedSpan;
use crate::device::Unsupported;
use crate::ops::OpCode;
use crate::tensor::DType;
use bytemuck::{Pod, Zeroable};

/// Limit of the fields of a block.
const MAX_FIELDS: usize = 4;

/// Groups for each block of threads, so that the grid of a large weight stays small.
const GROUPS_PER_BLOCK: u64 = 4;

/// The direction of a conversion.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::cuda) enum Repack {
    Pack,
    Unpack,
}

/// `struct PackBlocksArgs` of the file.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PackBlocksArgs {
    groups: u64,
    blocks: u32,
    block_bytes: u32,
    fields: u32,
    unpack: u32,
    offsets: [u32; MAX_FIELDS],
    bytes: [u32; MAX_FIELDS],
}

impl KernelArguments for PackBlocksArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(vec![Access::bytes(0, self.groups.saturating_mul(saturating_product(&[self.blocks, self.block_bytes])))])
    }
}

/// The fields of a block in the order of the packed form, the codes first: byte offset and size in the block. Empty for types without
/// a packed form. `Fields` of the types in kernels/common are the same.
const fn fields(dtype: DType) -> &'static [(u32, u32)] {
    use DType::{IQ4_NL, MXFP4, Q2_K, Q3_K, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    match dtype {
        Q4_0 | IQ4_NL => &[(2, 16), (0, 2)],
        Q4_1 => &[(4, 16), (0, 4)],
        Q5_0 => &[(6, 16), (2, 4), (0, 2)],
        Q5_1 => &[(8, 16), (4, 4), (0, 4)],
        Q8_0 => &[(2, 32), (0, 2)],
        MXFP4 => &[(1, 16), (0, 1)],
        Q2_K => &[(16, 64), (0, 16), (80, 4)],
        Q3_K => &[(32, 64), (0, 32), (96, 12), (108, 2)],
        Q4_K => &[(16, 128), (4, 12), (0, 4)],
        Q5_K => &[(48, 128), (16, 32), (4, 12), (0, 4)],
        Q6_K => &[(0, 128), (128, 64), (192, 16), (208, 2)],
        _ => &[],
    }
}

/// Elements that a lane of the vector kernels handles at a time: `UNIT` of the type's `QuantDot`, or eight of plain types.
pub(super) const fn unit_len(dtype: DType) -> usize {
    use DType::{Q2_K, Q3_K, Q4_K, Q5_K, Q8_0, TQ2_0};
    match dtype {
        Q2_K | Q3_K | Q4_K | Q5_K | TQ2_0 => 64,
        Q8_0 => 16,
        _ if dtype.is_block() => 32,
        _ => 8,
    }
}

/// Whether weights of a type can be packed.
pub(in crate::cuda) fn can_pack(dtype: DType) -> bool {
    !fields(dtype).is_empty()
}

/// The launch that converts a span, whose first byte is the destination.
///
/// # Errors
/// [`Unsupported`]: a bug, since [`PackedSpan::of`] accepts only what can be packed, and [`PackedSpan::shifted`] only at multiples of the
/// widest load.
pub(in crate::cuda) fn repack_launch(
    span: &PackedSpan,
    direction: Repack,
    gpu: &Gpu,
) -> Result<KernelLaunch, Unsupported> {
    let layout = span.layout;
    let fields = fields(layout.dtype);
    let at = |index: usize| fields.get(index).copied().unwrap_or_default();
    let block_bytes = layout.dtype.block_bytes() as u64;
    let (groups, blocks) = (span.groups(), layout.group_rows() * (layout.row_bytes / block_bytes));
    let args = PackBlocksArgs {
        groups,
        blocks: blocks as u32,
        block_bytes: block_bytes as u32,
        fields: fields.len() as u32,
        unpack: u32::from(direction == Repack::Unpack),
        offsets: std::array::from_fn(|index| at(index).0),
        bytes: std::array::from_fn(|index| at(index).1),
    };
    let grid = Grid::line(groups.div_ceil(GROUPS_PER_BLOCK), THREADS);
    let mut launch = KernelLaunch::new(OpCode::MulMat, gpu, ("mul_mat", "mul_mat_pack"), grid, &[Ptr::Dst], &args)?;
    // No node has these operands, so `access::check` does not see the launch.
    let checked = access::check_memory(&mut launch, span.range.end - span.range.start);
    checked.map_err(|what| Unsupported {
        op: OpCode::MulMat,
        reason: format!("mul_mat_pack would access a span {what}"),
    })?;
    Ok(launch)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::Capability;

    /// Each byte of a block belongs to one field, and fields with wider loads come first.
    #[test]
    fn fields_cover_their_block() {
        for dtype in DType::ALL.iter().copied().filter(|dtype| dtype.is_block() && dtype.can(Capability::Cuda)) {
            assert!(can_pack(dtype), "{dtype}");
            let mut bytes: Vec<_> = fields(dtype).iter().flat_map(|&(at, bytes)| at..at + bytes).collect();
            bytes.sort_unstable();
            assert!(bytes.into_iter().eq(0..dtype.block_bytes() as u32), "{dtype}");
            let alignments: Vec<_> = fields(dtype).iter().map(|(_, bytes)| (bytes | 16).trailing_zeros()).collect();
            assert!(alignments.is_sorted_by(|before, after| before >= after), "{dtype}: {alignments:?}");
        }
    }
    /// The number behind `name` in a definition of a kernel's source.
    fn number(text: &str, name: &str) -> u32 {
        let rest = text.split_once(name).unwrap().1;
        rest.chars().take_while(char::is_ascii_digit).collect::<String>().parse().unwrap()
    }

    #[test]
    fn fields_are_those_of_the_kernels() {
        const SOURCES: [&str; 2] = [
            include_str!("../../../kernels/common/quants_legacy.cuh"),
            include_str!("../../../kernels/common/quants_k.cuh"),
        ];
        for dtype in DType::ALL.iter().copied().filter(|dtype| can_pack(*dtype)) {
            let of_type = SOURCES.iter().find_map(|text| text.split_once(&format!("struct {dtype} : "))).unwrap().1;
            let list = of_type.split_once("using Fields = FieldList<").unwrap().1.split_once('>').unwrap().0;
            let field = |name: &str| {
                let text = of_type.split_once(&format!("using {name} = Field<")).unwrap().1;
                (number(&format!("<{text}"), "<"), number(text, ", "))
            };
            assert_eq!(list.split(", ").map(field).collect::<Vec<_>>(), fields(dtype), "{dtype}");
        }
    }
}
