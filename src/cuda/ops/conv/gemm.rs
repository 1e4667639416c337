//! CONV_2D and CONV_3D with kernels of F16 by im2col and GEMM on tensor cores: kernels/conv_patches.cu converts the
//! patches of the image to columns in scratch memory, which the GEMM of MUL_MAT multiplies with the kernel.

use super::super::mul_mat::gemm::{
    ConvertedProduct, GEMM_DEPTH, Operands, column_bytes, has_short_columns, launch_converted,
};
use super::super::{
    Access, Grid, KernelArguments, MAX_GRID_YZ, MIN_MMA_CAPABILITY, NodeLaunches, NodeOnGpu, Ptr, Unsupported,
    saturating_product,
};
use super::{Conv, ConvArgs, Windows};
use crate::cuda::kernel::Loops;
use crate::tensor::DType::F16;
use bytemuck::{Pod, Zeroable};

/// The least convolution for the GEMM: with fewer output channels, taps times input channels, or positions, most of a
/// tile would be wasted.
const MIN_CHANNELS: u32 = 16;
const MIN_K: u64 = 32;
const MIN_POSITIONS: u32 = 64;

/// Bytes of columns per multiprocessor that are converted at a time: 33 MiB on an H200, so that they are still in its
/// level-2 cache of 50 MiB when the GEMM reads them. Capability 8.6 has smaller caches, and reads them from memory.
const COLUMN_BYTES_PER_MULTIPROCESSOR: u64 = 256 << 10;

/// Chunks into which all columns are divided at most, about: each takes two launches. Larger chunks leave the cache.
const MAX_CHUNKS: u64 = 256;

/// Columns of a chunk that is a part of an image are a multiple of this number, so that tiles of the GEMM are full.
const TILE: u32 = 128;

/// Warps and columns of a block, and elements of a column that a warp collects at a time.
const PATCH_WARPS: u32 = 8;
const PATCH_COLUMNS: u32 = 32;
const PATCH_PIECE: u32 = 64;
const PATCH_THREADS: u32 = 32 * PATCH_WARPS;

/// Blocks per multiprocessor that hide the latency of loads; two fit on 8.6, 8.9 and 12.0, by their shared memory. With
/// fewer columns, blocks share a column.
const BLOCKS_PER_MULTIPROCESSOR: u64 = 4;

/// Instructions to convert an element of a column, about.
const ELEMENT_INSTRUCTIONS: u64 = 40;

/// Alignment in bytes of the parts of the scratch memory.
const ALIGNMENT: u64 = 256;

/// `struct PatchArgs` of kernels/conv_patches.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct PatchArgs {
    x: [u64; 5],
    column: u64,
    taps: [u32; 3],
    extent: [u32; 3],
    outputs: [u32; 3],
    windows: Windows,
    in_channels: u32,
    k: u32,
    pixels: u32,
    first_image: u32,
    positions: u32,
    first: u32,
}

impl KernelArguments for PatchArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        self.windows.check(self.outputs, self.taps)?;
        let of_launch = grid.blocks[2];
        let images = of_launch.saturating_add(self.first_image.into());
        let image = (0..3).fold(Access::one(0), |access, d| access.along(self.extent[d], self.x[d]));
        let largest = 4 * saturating_product(&self.extent);
        let columns = of_launch.saturating_mul(self.positions.into());
        Ok(vec![
            image.along(self.in_channels, self.x[3]).along(images, self.x[4]),
            Access::bytes(1, largest.saturating_mul(images)),
            Access::bytes(2, self.column.saturating_mul(columns)),
        ])
    }
}

/// `struct AlignedRowsArgs` of kernels/conv_patches.cu.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct AlignedRowsArgs {
    k: u32,
    padded: u32,
}

impl KernelArguments for AlignedRowsArgs {
    fn accesses(&self, grid: &Grid) -> Result<Vec<Access>, &'static str> {
        let rows = |pointer, k: u32| Access::elements(pointer, grid.blocks[0].saturating_mul(k.into())).of(F16);
        Ok(vec![rows(0, self.k), rows(1, self.padded)])
    }
}

/// The columns that a pair of launches converts and multiplies: those of some positions of some images.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Chunk {
    first_image: u32,
    images: u32,
    first: u32,
    positions: u32,
}

impl Chunk {
    fn columns(&self) -> u64 {
        u64::from(self.positions) * u64::from(self.images)
    }
}

/// Divides the columns of all images into chunks of at most `most` columns, as equal as possible: whole images, or
/// parts of one. The chunks are larger if there would be more than [`MAX_CHUNKS`] by far.
fn chunks(positions: u32, images: u32, most: u64) -> Vec<Chunk> {
    let columns = u64::from(positions) * u64::from(images);
    let most = most.max(columns.div_ceil(MAX_CHUNKS)).max(TILE.into());
    let ranges = |all: u32, each: u32| (0..all).step_by(each.max(1) as usize).map(move |i| (i, each.min(all - i)));
    if u64::from(positions) <= most {
        let count = u64::from(images).div_ceil(most / u64::from(positions.max(1)));
        let each = u64::from(images).div_ceil(count.max(1)) as u32;
        let of = |(first_image, images)| Chunk { first_image, images, first: 0, positions };
        return ranges(images, each).map(of).collect();
    }
    // As the positions of an image are more, `most` has 32 bits.
    let count = positions.div_ceil(most as u32 / TILE * TILE);
    let each = positions.div_ceil(count).next_multiple_of(TILE);
    let of_image = |first_image| {
        ranges(positions, each).map(move |(first, positions)| Chunk { first_image, images: 1, first, positions })
    };
    (0..images).flat_map(of_image).collect()
}

/// Whether the GEMM computes a convolution of `op` whose columns have `k` elements.
fn applies(op: Conv, args: &ConvArgs, k: u64, on: &NodeOnGpu<'_>) -> Result<bool, Unsupported> {
    let &ConvArgs { y, extent, outputs, out_channels, images, positions, .. } = args;
    let kernel = on.src(Conv::KERNEL)?;
    // The GEMM stores the results of a channel at equal distances.
    let is_even = |d: usize| outputs[d] == 1 || y[d] == y[0].saturating_mul(saturating_product(&outputs[..d]));
    Ok(matches!(op, Conv::Conv2d { .. } | Conv::Conv3d { .. })
        && on.gpu.capability >= MIN_MMA_CAPABILITY
        && kernel.dtype() == F16
        && kernel.is_contiguous()
        && out_channels >= MIN_CHANNELS
        && positions >= MIN_POSITIONS
        && k >= MIN_K
        && usize::try_from(k).is_ok_and(has_short_columns)
        && saturating_product(&extent) <= i32::MAX as u64
        && u64::from(images) <= MAX_GRID_YZ
        && (1..3).all(is_even))
}

/// The launches of a convolution of `op`. `None` if the direct kernels compute it.
pub(super) fn select(op: Conv, args: &ConvArgs, on: &NodeOnGpu<'_>) -> Result<Option<NodeLaunches>, Unsupported> {
    let &ConvArgs { x, y, taps, extent, outputs, in_channels, out_channels, images, positions, windows, .. } = args;
    let k = saturating_product(&taps).saturating_mul(in_channels.into());
    if !applies(op, args, k, on)? {
        return Ok(None);
    }
    let column = column_bytes(k as usize);
    let most = COLUMN_BYTES_PER_MULTIPROCESSOR * u64::from(on.gpu.multiprocessors) / column;
    let chunks = chunks(positions, images, most);
    let loops = loops(&chunks, k, out_channels, on)?;
    let pixels = saturating_product(&extent);
    let (k, padded) = (k as u32, (k as u32).next_multiple_of(8));
    let mut scratch = 0u64;
    let mut place = |bytes: u64| {
        let at = scratch.next_multiple_of(ALIGNMENT);
        scratch = at + bytes;
        at
    };
    let largest = Ptr::Scratch(place(4 * pixels * u64::from(images)));
    let columns = Ptr::Scratch(place(column * chunks.iter().map(Chunk::columns).max().unwrap_or(0)));
    let aligned = (padded != k).then(|| Ptr::Scratch(place(2 * u64::from(padded) * u64::from(out_channels))));
    let parts_at = place(0);
    let all = PatchArgs {
        x: std::array::from_fn(|d| x[d]),
        column,
        taps,
        extent,
        outputs,
        windows,
        in_channels,
        k,
        pixels: pixels as u32,
        first_image: 0,
        positions,
        first: 0,
    };
    let groups = |n: u64| n.div_ceil(PATCH_COLUMNS.into());
    let launch = |entry: &str, blocks, output, args: &PatchArgs| {
        let pointers = [Ptr::Src(1), largest, output];
        on.launch(("conv_patches", entry), Grid::of(blocks, PATCH_THREADS), &pointers, args)
    };
    let mut launches = vec![launch("conv_pixel_amax", [groups(pixels), 1, images.into()], Ptr::Null, &all)?];
    if let Some(aligned) = aligned {
        let grid = Grid::line(out_channels.into(), PATCH_THREADS);
        let args = AlignedRowsArgs { k, padded };
        launches.push(on.launch(("conv_patches", "conv_aligned_rows"), grid, &[Ptr::Src(0), aligned], &args)?);
    }
    let mut most_parts = 0;
    for chunk in &chunks {
        let &Chunk { first_image, images, first, positions } = chunk;
        let blocks = [groups(positions.into()), shares(chunk, k, on), images.into()];
        let args = PatchArgs { first_image, positions, first, ..all };
        launches.push(launch("conv_patches", blocks, columns, &args)?);
        let dst = Ptr::DstAt(u64::from(first_image) * y[4] + u64::from(first) * y[0]);
        let operands = Operands { weights: aligned.unwrap_or(Ptr::Src(0)), columns, dst, parts: parts_at };
        let product = ConvertedProduct { k, m: out_channels, n: positions, planes: images, dst: [y[3], y[0], y[4]] };
        let (launch, parts) = launch_converted(&product, operands, on)?;
        launches.push(launch);
        most_parts = parts.max(most_parts);
    }
    Ok(Some(NodeLaunches { loops, ..NodeLaunches::new(launches, parts_at + most_parts) }))
}

/// The loops of all launches together: conversions of the columns, and products, which count as if they had no tensor
/// cores.
fn loops(chunks: &[Chunk], k: u64, out_channels: u32, on: &NodeOnGpu<'_>) -> Result<Loops, Unsupported> {
    let of_element = ELEMENT_INSTRUCTIONS + u64::from(out_channels);
    chunks.iter().try_fold(Loops::default(), |all, chunk| {
        let of_chunk =
            on.loops([chunk.columns(), k.div_ceil(GEMM_DEPTH.into()), u64::from(GEMM_DEPTH) * of_element])?;
        let instructions = all.instructions.saturating_add(of_chunk.instructions);
        Ok(Loops { instructions, chain: all.chain.saturating_add(of_chunk.chain) })
    })
}

/// Blocks that share the columns of a chunk: enough for all multiprocessors, but no more than have a piece.
fn shares(chunk: &Chunk, k: u32, on: &NodeOnGpu<'_>) -> u64 {
    let blocks = u64::from(chunk.positions.div_ceil(PATCH_COLUMNS)) * u64::from(chunk.images);
    let wanted = BLOCKS_PER_MULTIPROCESSOR * u64::from(on.gpu.multiprocessors);
    wanted.div_ceil(blocks.max(1)).clamp(1, k.div_ceil(PATCH_PIECE).max(1).into())
}

#[cfg(test)]
mod tests {
    use super::super::super::kernel_constants::assert_constants;
    use super::*;

    #[test]
    fn constants_are_those_of_the_kernels() {
        let source = include_str!("../../../../kernels/conv_patches.cu");
        let expected = [("PATCH_WARPS", PATCH_WARPS), ("PATCH_COLUMNS", PATCH_COLUMNS), ("PATCH_PIECE", PATCH_PIECE)];
        assert_constants(source, &expected.map(|(name, value)| (name, value.into())));
    }

    /// Each column is in one chunk, and no chunk is larger than allowed, except to bound their number.
    #[test]
    fn chunks_have_all_columns_once() {
        for (positions, images, most, want) in [
            (64, 1, 128, 1),
            (64, 5, 320, 1),
            (64, 5, 319, 2),
            (64, 5, 0, 3),
            (1000, 1, 999, 2),
            (1000, 3, 256, 12),
            (1000, 1, 127, 8),
            (128 * 256, 1, 128, 256),
            (128 * 256 + 1, 1, 128, 257),
            (128 * 512, 1, 128, 256),
            (100, 257, 100, 257),
            (100, 257 * 4, 100, 257),
            (128 * 255, 129, 128, 258),
            (i32::MAX as u32, 1, 1 << 40, 1),
            (i32::MAX as u32, 65535, 1 << 31, 257),
        ] {
            let chunks = chunks(positions, images, most);
            assert_eq!(chunks.len(), want, "{positions} {images} {most}");
            let columns = u64::from(positions) * u64::from(images);
            let allowed = most.max(TILE.into()).max(columns.div_ceil(MAX_CHUNKS));
            let mut next = (0, 0);
            for of in chunks {
                assert!(of.columns() <= allowed && of.positions > 0 && of.images > 0);
                assert_eq!((of.first_image, of.first), next);
                assert!(of.images == 1 || of.positions == positions);
                let end = of.first + of.positions;
                next = if end == positions { (of.first_image + of.images, 0) } else { (of.first_image, end) };
            }
            assert_eq!(next, (images, 0));
        }
    }
}
