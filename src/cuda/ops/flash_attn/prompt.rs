//! kernels/flash_attn_prompt.cu: attention of many queries on tensor cores. K and V of other types than F16 and BF16 are converted to F16
//! in scratch memory first.

use super::super::{
    Access, Grid, KernelArguments, KernelLaunch, MIN_MMA_CAPABILITY, NodeOnGpu, Ptr, Unsupported, suffix,
};
use super::Blocks;
use crate::ops::flash_attn::FlashAttn;
use crate::tensor::{DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Queries per block, and fewest positions per part. A tile has 64 positions, or 32 above 128 channels.
const QUERIES: u32 = 64;
const MIN_PART: u32 = 256;
const THREADS: u32 = 128;
/// Fewest queries of a head of k and v, as many as a warp has. With less, half of the products would be wasted.
const MIN_QUERIES: u32 = 16;
/// Fewest queries if k or v is converted: the conversion takes about as many instructions as the products of 110 queries, and the
/// kernels for few queries take six times as many per query.
const MIN_CONVERTED_QUERIES: u32 = 64;
/// Limit of the converted k and v of a node in bytes. Beyond it, the kernels for few queries compute the node.
const MAX_CONVERTED: u64 = 512 << 20;
/// The channels of the variants for F16, and those for BF16, whose heads rarely have other sizes.
const WIDTHS: [usize; 7] = [64, 80, 96, 112, 128, 192, 256];
const BF16_WIDTHS: [usize; 3] = [64, 128, 256];
/// Absolute values of scales: 2^-40 to 2^40.
pub(super) const SCALES: std::ops::RangeInclusive<f32> = 9.094_947e-13..=1.099_511_6e12;
/// Limit of a mask in bytes, because its offsets in elements have 32 bits.
const MAX_MASK: usize = 1 << 33;
/// Alignment of converted rows in scratch memory.
const ALIGNMENT: u64 = 256;

/// A variant of the kernel.
#[derive(Clone, Copy, PartialEq)]
pub(super) struct Prompt {
    width: usize,
    /// Type of the tiles of k and v.
    dtype: DType,
}

impl Prompt {
    /// The variant that computes a node, if there is one. The queries of a single token are left to the kernel for few queries, which splits
    /// its positions over more warps.
    pub(super) fn of(
        op: &FlashAttn,
        [k, v]: [&TensorDesc; 2],
        mask: Option<&TensorDesc>,
        [tokens, queries]: [u32; 2],
        capability: u32,
    ) -> Option<Prompt> {
        let ([dk, ..], [dv, ..]) = (k.ne(), v.ne());
        let is_bf16 = [k, v].iter().all(|t| t.dtype() == DType::BF16);
        let (widths, dtype): (&[usize], _) = if is_bf16 { (&BF16_WIDTHS, DType::BF16) } else { (&WIDTHS, DType::F16) };
        let prompt = Prompt { width: widths.iter().copied().find(|&width| dk <= width)?, dtype };
        let converted = [k, v].into_iter().filter(|t| prompt.converts(t));
        let bytes = converted.clone().map(|t| 2 * t.elements() as u64).sum::<u64>();
        let least = if bytes == 0 { MIN_QUERIES } else { MIN_CONVERTED_QUERIES };
        let are_chunks = dk.is_multiple_of(8) && dv.is_multiple_of(8) && dv <= dk;
        // The kernel takes the strides of positions as 32 bits.
        let are_near = [k, v].iter().all(|t| u32::try_from(t.nb()[1]).is_ok());
        let mask_fits = mask.is_none_or(|mask| mask.extent() < MAX_MASK);
        // Biases are divided by the scale and by up to 2^60, and must stay finite.
        let scale_fits = SCALES.contains(&op.scale.abs());
        // Others may have values that are 0 in F16.
        let keeps_values =
            converted.into_iter().all(|t| t.dtype().is_block() && !matches!(t.dtype(), DType::MXFP4 | DType::NVFP4));
        let fits = are_chunks && are_near && mask_fits && bytes <= MAX_CONVERTED && scale_fits && keeps_values;
        (fits && tokens > 1 && queries >= least && capability >= MIN_MMA_CAPABILITY).then_some(prompt)
    }

    /// Whether k or v is converted.
    fn converts(self, t: &TensorDesc) -> bool {
        t.dtype() != self.dtype
    }

    /// The name of the entry and of its file.
    pub(super) fn entry(self) -> String {
        format!("flash_attn_prompt_{}_{}", suffix(self.dtype), self.width)
    }

    pub(super) fn blocks(self) -> Blocks {
        Blocks {
            log_quads: (QUERIES / 4).ilog2(),
            octets: self.width as u32 / 8,
            threads: THREADS,
            shared: 0,
            step: if self.width > 128 { 32 } else { 64 },
            min_part: MIN_PART,
            at_once: 2,
        }
    }
}

/// K or V as a kernel reads it.
pub(super) struct Rows {
    pub(super) at: Ptr,
    /// Byte strides of positions, heads and batches.
    pub(super) nb: [u64; 3],
    pub(super) dtype: DType,
    /// What converts it before, if it is in scratch memory.
    pub(super) conversion: Option<KernelLaunch>,
}

impl Rows {
    /// Source `source` of the node, converted for `prompt` if necessary. Converted rows are placed behind the `scratch` bytes of scratch
    /// memory that are in use.
    pub(super) fn of(
        t: &TensorDesc,
        source: u8,
        prompt: Option<Prompt>,
        on: &NodeOnGpu<'_>,
        scratch: &mut u64,
    ) -> Result<Rows, Unsupported> {
        let nb = [1, 2, 3].map(|i| t.nb()[i] as u64);
        let Some(prompt) = prompt.filter(|prompt| prompt.converts(t)) else {
            return Ok(Rows { at: Ptr::Src(source), nb, dtype: t.dtype(), conversion: None });
        };
        let [n, positions, heads, batches] = on.shape(t)?.ne;
        let octets = t.elements() as u64 / 8; // fits 32 bits by MAX_CONVERTED
        let at = Ptr::Scratch(scratch.next_multiple_of(ALIGNMENT));
        *scratch = scratch.next_multiple_of(ALIGNMENT) + 16 * octets;
        let dtype = t.dtype().to_wire();
        let args = FlashAttnHalvesArgs { nb, n, positions, heads, octets: octets as u32, dtype, padding: 0 };
        let grid = Grid::of([octets.div_ceil(THREADS.into()), 1, 1], THREADS);
        let launch = on.launch(("flash_attn", "flash_attn_halves"), grid, &[Ptr::Src(source), at], &args)?;
        debug_assert_eq!(u64::from(n / 8) * [positions, heads, batches].map(u64::from).iter().product::<u64>(), octets);
        let row = 2 * u64::from(n);
        let nb = [row, row * u64::from(positions), row * u64::from(positions) * u64::from(heads)];
        Ok(Rows { at, nb, dtype: prompt.dtype, conversion: Some(launch) })
    }
}

/// `struct FlashAttnHalvesArgs` of flash_attn.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct FlashAttnHalvesArgs {
    nb: [u64; 3],
    n: u32,
    positions: u32,
    heads: u32,
    octets: u32,
    dtype: u32,
    padding: u32,
}

impl KernelArguments for FlashAttnHalvesArgs {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        let per_batch = (u64::from(self.n / 8) * u64::from(self.positions)).saturating_mul(self.heads.into());
        let batches = u64::from(self.octets).checked_div(per_batch).ok_or("rows without elements")?;
        let from = Access::run(0, &[self.n]).of_type(self.dtype);
        let from = from.along(self.positions, self.nb[0]).along(self.heads, self.nb[1]).along(batches, self.nb[2]);
        Ok(vec![from, Access::bytes(1, 16 * u64::from(self.octets))])
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernel() {
        let expected = [("ROWS", QUERIES.into()), ("THREADS", THREADS.into())];
        assert_constants(include_str!("../../../../kernels/flash_attn_prompt.cu"), &expected);
        assert_constants(include_str!("../../../../kernels/flash_attn.cu"), &[("THREADS", THREADS.into())]);
    }
}
