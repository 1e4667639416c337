//! CONV_2D_DW: each channel is convolved with a kernel of its own, by multiply-adds of whole rows. If the channels of an element
//! are adjacent in memory (the layout C, W, H, N), vectors run along the channels, otherwise along x.

use super::image::{inside, position, steps_inside};
use crate::cpu::ops::{CHUNK, Kernel, RowPieces, math};
use crate::cpu::pool::KernelContext;
use crate::cpu::simd::multiversion;
use crate::ops::ConvAxis;
use crate::ops::conv::Conv;
use crate::tensor::TensorDesc;

pub(super) fn kernel(axes: [ConvAxis; 2], kernel: &TensorDesc, image: &TensorDesc, dst: &TensorDesc) -> Kernel {
    let cost = dst.elements().saturating_mul(taps(kernel));
    let channels_adjacent = image.ne()[2] > 1 && image.nb()[2] == image.dtype().block_bytes();
    let layouts = if channels_adjacent { ChannelsLast::new(kernel, image, dst) } else { None };
    match layouts {
        Some(layouts) => Kernel::new(cost, move |ctx| along_channels(ctx, &axes, &layouts)).with_local(3 * CHUNK),
        None => Kernel::new(cost, move |ctx| along_rows(ctx, &axes)).with_local(2 * CHUNK),
    }
}

fn taps(kernel: &TensorDesc) -> usize {
    kernel.ne()[0].saturating_mul(kernel.ne()[1])
}

/// Vectors along x: each output row is the sum of image rows times single weights.
fn along_rows(ctx: &mut KernelContext<'_>, [ax, ay]: &[ConvAxis; 2]) {
    let (dst, kernel, image) = (ctx.dst(), ctx.src(Conv::KERNEL), ctx.src(Conv::IMAGE));
    let ([kw, kh, ..], [w, h, ..]) = (kernel.ne(), image.ne());
    let [sums, row, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    // A tap of a short piece costs as much as some ten elements.
    RowPieces::with_cost(dst.desc(), taps(kernel.desc()).saturating_mul(16), 1, CHUNK).share(
        ctx,
        |[x, y, c, n], count| {
            let sums = &mut sums[..count];
            sums.fill(0.0);
            for ky in 0..kh {
                let Some(iy) = inside(ay, y, ky, h) else { continue };
                for kx in 0..kw {
                    let (start, step) = (position(ax, x, kx), i64::from(ax.stride));
                    let range = steps_inside(start, step, count, w);
                    if range.is_empty() {
                        continue;
                    }
                    let mut weight = [0.0];
                    kernel.load([kx, ky, 0, c], &mut weight);
                    let first = [(start + range.start as i64 * step) as usize, iy, c, n];
                    let row = &mut row[..range.len()];
                    let x = if step == 1 {
                        image.fetch(first, row)
                    } else {
                        image.load_every(first, step as usize, row);
                        row
                    };
                    math::add_scaled(&mut sums[range], x, weight[0]);
                }
            }
            dst.store([x, y, c, n], sums);
        },
    );
}

/// The operands with dimension 0 along the channels.
struct ChannelsLast {
    /// `[C, KW, KH]`.
    kernel: TensorDesc,
    /// `[C*W, H, N]` if all elements of an image's row are adjacent in memory, else `[C, W, H, N]`.
    image: TensorDesc,
    /// `[C*OW, OH, N]`, else `[C, OW, OH, N]`.
    dst: TensorDesc,
    joined: bool,
    channels: usize,
    /// W and H.
    extents: [usize; 2],
}

impl ChannelsLast {
    fn new(kernel: &TensorDesc, image: &TensorDesc, dst: &TensorDesc) -> Option<ChannelsLast> {
        let ([w, h, channels, n], [ow, oh, ..]) = (image.ne(), dst.ne());
        let kernel = kernel.permuted([1, 2, 3, 0]).ok()?;
        let (image, dst) = (image.permuted([1, 2, 0, 3]).ok()?, dst.permuted([1, 2, 0, 3]).ok()?);
        let joined = channels <= CHUNK && image.is_contiguous() && dst.is_contiguous();
        let (image, dst) = if joined {
            (image.reshaped([channels * w, h, n, 1]).ok()?, dst.reshaped([channels * ow, oh, n, 1]).ok()?)
        } else {
            (image, dst)
        };
        Some(ChannelsLast { kernel, image, dst, joined, channels, extents: [w, h] })
    }

    /// The index of channel `c` of an element of image `n`, in `image` and in `dst`.
    fn index(&self, [x, y]: [usize; 2], c: usize, n: usize) -> [usize; 4] {
        if self.joined { [x * self.channels + c, y, n, 0] } else { [c, x, y, n] }
    }
}

/// Vectors along the channels: each piece is the sum of elements times the kernels' elements of one tap. A piece is all channels
/// of several elements of a row, or some channels of one element.
fn along_channels(ctx: &mut KernelContext<'_>, [ax, ay]: &[ConvAxis; 2], layouts: &ChannelsLast) {
    let (dst, kernel, image) = (ctx.dst(), ctx.src(Conv::KERNEL), ctx.src(Conv::IMAGE));
    let (dst, image) = (dst.with_desc(&layouts.dst), image.with_desc(&layouts.image));
    let kernel = kernel.with_desc(&layouts.kernel);
    let ([_, kw, kh, _], [w, h], channels) = (kernel.ne(), layouts.extents, layouts.channels);
    let [sums, row, weights, ..] = ctx.take_local_scratch().as_chunks_mut::<CHUNK>().0 else { return };
    let unit = if layouts.joined { channels } else { 1 };
    RowPieces::with_cost(dst.desc(), kw * kh, unit, CHUNK).share(ctx, |i, len| {
        let (x, y, n, c, count) =
            if layouts.joined { (i[0] / channels, i[1], i[2], 0, len / channels) } else { (i[1], i[2], i[3], i[0], 1) };
        let (width, sums) = (len / count, &mut sums[..len]);
        sums.fill(0.0);
        for ky in 0..kh {
            let Some(iy) = inside(ay, y, ky, h) else { continue };
            for kx in 0..kw {
                let (start, step) = (position(ax, x, kx), i64::from(ax.stride));
                let range = steps_inside(start, step, count, w);
                if range.is_empty() {
                    continue;
                }
                let weights = kernel.fetch([c, kx, ky, 0], &mut weights[..width]);
                let first = (start + range.start as i64 * step) as usize;
                let row = &mut row[..range.len() * width];
                let x = if step == 1 {
                    image.fetch(layouts.index([first, iy], c, n), row)
                } else {
                    for (k, element) in row.chunks_exact_mut(width).enumerate() {
                        image.load(layouts.index([first + k * step as usize, iy], c, n), element);
                    }
                    row
                };
                add_channels(&mut sums[range.start * width..range.end * width], x, weights);
            }
        }
        dst.store(i, sums);
    });
}

multiversion! {
    /// Adds `x` times `weights` to `sums`, for each run of as many elements as there are weights.
    fn add_channels<'a>(sums: &'a mut [f32], x: &'a [f32], weights: &'a [f32]) {
        let width = weights.len();
        for (sums, x) in sums.chunks_exact_mut(width).zip(x.chunks_exact(width)) {
            for ((sum, x), weight) in sums.iter_mut().zip(x).zip(weights) {
                *sum += x * weight;
            }
        }
    }
}
