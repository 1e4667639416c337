//! Generators of nodes of the ops on images: patches, convolutions, pooling, scaling and windows.

use super::*;
use fanout::ops::ConvAxis;

impl FuzzGenerator<'_> {
    /// The axes of a convolution, whose parameters are sometimes extreme.
    fn conv_axes<const N: usize>(&mut self) -> [ConvAxis; N] {
        std::array::from_fn(|_| {
            let odd = self.one_in(20);
            let extreme = [0, -1, i32::MIN, i32::MAX, 1 << 20, -(1 << 20)];
            let (stride, padding) = (self.pick(&[1, 1, 1, 2, 3, 14]), self.pick(&[0, 0, 1, 1, 2, 7, -1]));
            let axis = ConvAxis { stride, padding, dilation: self.pick(&[1, 1, 1, 2, 3, 0, -1]) };
            match self.rng.usize(..3) {
                0 if odd => ConvAxis { stride: self.pick(&extreme), ..axis },
                1 if odd => ConvAxis { padding: self.pick(&extreme), ..axis },
                _ if odd => ConvAxis { dilation: self.pick(&extreme), ..axis },
                _ => axis,
            }
        })
    }

    /// A kernel's extent for an image, mostly not larger than the image.
    fn kernel_extent(&mut self, image: usize) -> usize {
        let extent = self.pick(&[1, 1, 2, 3, 3, 4, 5, 14]);
        if self.one_in(10) { extent } else { extent.min(image) }
    }

    /// Writes axes as op_params.
    fn set_axes(draft: &mut NodeDraft, axes: &[ConvAxis]) {
        for (d, axis) in axes.iter().enumerate() {
            for (group, value) in [axis.stride, axis.padding, axis.dilation].into_iter().enumerate() {
                draft.params[group * axes.len() + d] = value;
            }
        }
    }

    /// The output size, or a random one where there is none that fits a record.
    fn conv_output(&mut self, axis: ConvAxis, image: usize, kernel: usize) -> usize {
        axis.output(image, kernel).filter(|n| (1..1 << 16).contains(n)).unwrap_or_else(|| self.dim())
    }

    pub(super) fn im2col(&mut self, op: OpCode) -> NodeDraft {
        let (c, n) = (self.pick(&[1, 2, 3, 7]), self.pick(&[1, 1, 2]));
        if op == OpCode::Col2im1d {
            let kernel = self.kernel_extent(14);
            let dtype = self.float_type();
            let (stride, padding) =
                (self.pick(&[1, 1, 2, 3, 8, 8, 0, i32::MAX]), self.pick(&[0, 0, 0, 0, 1, 2, -1, i32::MAX]));
            let columns = self.dim();
            let length = (columns - 1).saturating_mul(stride.max(0) as usize) + kernel;
            let length = length.saturating_sub(2 * padding.max(0) as usize).clamp(1, 5000);
            let src = self.layout(dtype, [kernel * c, columns, 1, 1], true);
            let mut draft = NodeDraft::new(dtype, [length, c, 1, 1], &[src]);
            draft.params[..3].copy_from_slice(&[stride, c as i32, padding]);
            return draft;
        }
        let image = [self.pick(&[1, 5, 16, 33, 100]), self.dim(), c, n];
        let image = self.limit_elements(image, 600);
        let [w, h, c, n] = image;
        let (kernel, kh, kd) = (self.kernel_extent(w), self.kernel_extent(h), self.kernel_extent(c));
        let axes: [ConvAxis; 3] = self.conv_axes();
        let (ow, oh) = (self.conv_output(axes[0], w, kernel), self.conv_output(axes[1], h, kh));
        let dtype = self.pick(&[F32, F16]);
        let from = if dtype == F16 { self.pick(&[F32, F16]) } else { F32 };
        if op == OpCode::Im2col3d {
            let (depth, od) = (c, self.conv_output(axes[2], c, kd));
            let shape = self.tensor(F16, [kernel, kh, kd, 2 * n]);
            let src = self.tensor(F32, [w, h, depth, n]);
            let channels = self.divisor(n);
            let mut draft =
                NodeDraft::new(dtype, [kernel * kh * kd * channels, ow, oh, od * (n / channels)], &[shape, src]);
            Self::set_axes(&mut draft, &axes);
            draft.params[9] = channels as i32;
            return draft;
        }
        let two_d = self.rng.bool();
        let (kernel_ne, image, patches) = if two_d {
            ([kernel, kh, c, 2], image, [kernel * kh * c, ow, oh, n])
        } else {
            ([kernel, h, 2, 1], [w, h, c, 1], [kernel * h, ow, c, 1])
        };
        let kernel = self.tensor(F16, kernel_ne);
        let mut draft = if op == OpCode::Im2col {
            let image = self.tensor(from, image);
            NodeDraft::new(dtype, patches, &[kernel, image])
        } else {
            let gradient = self.tensor(F32, patches);
            NodeDraft::new(F32, image, &[gradient, kernel])
        };
        Self::set_axes(&mut draft, &axes[..2]);
        draft.params[6] = i32::from(two_d);
        draft
    }

    pub(super) fn conv(&mut self, op: OpCode) -> NodeDraft {
        let dtype = self.pick(&[F32, F16]);
        let (c, out, n) = (self.pick(&[1, 2, 3, 16, 17]), self.pick(&[1, 2, 5, 13, 16, 33]), self.pick(&[1, 1, 2]));
        let image = [self.pick(&[1, 5, 16, 33, 100]), self.dim(), c, n];
        let [w, h, c, n] = self.limit_elements(image, 2000);
        let (kw, kh, kd) = (self.kernel_extent(w), self.kernel_extent(h), self.kernel_extent(c).min(3));
        let axes: [ConvAxis; 3] = self.conv_axes();
        let (ow, oh) = (self.conv_output(axes[0], w, kw), self.conv_output(axes[1], h, kh));
        match op {
            OpCode::Conv3d => {
                let (depth, od) = (c, self.conv_output(axes[2], c, kd));
                let channels = self.pick(&[1, 2, 3]);
                let kernel = self.tensor(dtype, [kw, kh, kd, channels * out]);
                let image = self.tensor(F32, [w, h, depth, channels * n]);
                let mut draft = NodeDraft::new(F32, [ow, oh, od, out * n], &[kernel, image]);
                Self::set_axes(&mut draft, &axes);
                draft.params[9..12].copy_from_slice(&[channels as i32, n as i32, out as i32]);
                draft
            }
            _ => {
                let (kernel, channels) =
                    if op == OpCode::Conv2d { ([kw, kh, c, out], out) } else { ([kw, kh, 1, c], c) };
                let (kernel, image) = (self.tensor(dtype, kernel), self.tensor(F32, [w, h, c, n]));
                let mut draft = NodeDraft::new(F32, [ow, oh, channels, n], &[kernel, image]);
                Self::set_axes(&mut draft, &axes[..2]);
                draft
            }
        }
    }

    pub(super) fn conv_transpose(&mut self, op: OpCode) -> NodeDraft {
        let (kw, kh, dtype) = (self.kernel_extent(14), self.kernel_extent(14), self.pick(&[F32, F16]));
        let (c, out, n) = (self.pick(&[1, 2, 3, 16, 17]), self.pick(&[1, 2, 5]), self.pick(&[1, 1, 2]));
        let stride = self.pick(&[1, 1, 2, 2, 3, 8, 20, 0, -1, i32::MAX]);
        let length = |input: usize, kernel: usize| {
            ((input - 1) as i64 * i64::from(stride) + kernel as i64).clamp(1, 5000) as usize
        };
        let (w, h) = (self.pick(&[1, 2, 5, 16, 33]), self.pick(&[1, 2, 5]));
        let mut draft = if op == OpCode::ConvTranspose1d {
            let (kernel, input) = (self.tensor(dtype, [kw, out, c, 1]), self.tensor(F32, [w, c, 1, 1]));
            NodeDraft::new(F32, [length(w, kw), out, 1, 1], &[kernel, input])
        } else {
            let (kernel, input) = (self.tensor(dtype, [kw, kh, out, c]), self.tensor(F32, [w, h, c, n]));
            NodeDraft::new(F32, [length(w, kw), length(h, kh), out, n], &[kernel, input])
        };
        draft.params[0] = stride;
        draft.params[2] = i32::from(op == OpCode::ConvTranspose1d);
        draft
    }

    pub(super) fn pool(&mut self, op: OpCode) -> NodeDraft {
        let dtype = self.pick(&[F32, F32, F16]);
        let image = self.shape(&[dtype]);
        let mut axis = |extent: usize| {
            let extreme = self.one_in(20).then(|| self.pick(&[0, -1, i32::MIN, i32::MAX, 1 << 20]));
            let kernel = extreme.unwrap_or_else(|| self.pick(&[1, 2, 2, 3, 7, 100]).min(extent as i32));
            let (stride, padding) = (self.pick(&[1, 2, 2, 3, 50]), self.pick(&[0, 0, 1, 3, -1, 60]));
            let room = extent as i64 + 2 * i64::from(padding) - i64::from(kernel);
            ([kernel, stride, padding], (room.div_euclid(i64::from(stride)) + 1).clamp(1, 1 << 14) as usize)
        };
        let ((x, ow), (y, oh)) = (axis(image[0]), axis(image[1]));
        let kind = self.rng.i32(0..2);
        if op == OpCode::Pool1d {
            let src = self.tensor(dtype, image);
            let mut draft = NodeDraft::new(F32, [ow, image[1], image[2], image[3]], &[src]);
            draft.params[..4].copy_from_slice(&[kind, x[0], x[1], x[2]]);
            return draft;
        }
        let pooled = [ow, oh, image[2], image[3]];
        let src = self.tensor(dtype, image);
        let mut draft = if op == OpCode::Pool2d {
            NodeDraft::new(F32, pooled, &[src])
        } else {
            let gradient = self.tensor(F32, pooled);
            NodeDraft::new(F32, image, &[gradient, src])
        };
        draft.params[..7].copy_from_slice(&[kind, x[0], y[0], x[1], y[1], x[2], y[2]]);
        draft
    }

    pub(super) fn upscale(&mut self) -> NodeDraft {
        let (from, to) = (self.shape(&[F32]), self.shape(&[F32]));
        let mut draft = NodeDraft::new(F32, to, &[self.tensor(F32, from)]);
        draft.params[0] = self.pick(&[0, 1, 2, 0x100, 0x101, 0x102, 0x201, 0x301]);
        draft
    }

    pub(super) fn window(&mut self, op: OpCode) -> NodeDraft {
        let (c, w, h, size) = (self.dim(), self.dim(), self.dim(), self.pick(&[1, 2, 3, 7, 40]));
        let (columns, rows) = (w.div_ceil(size), h.div_ceil(size));
        match op {
            OpCode::WinPart => {
                let src = self.tensor(F32, [c, w, h, 1]);
                let mut draft = NodeDraft::new(F32, [c, size, size, columns * rows], &[src]);
                draft.params[..3].copy_from_slice(&[columns as i32, rows as i32, size as i32]);
                draft
            }
            OpCode::WinUnpart => {
                let src = self.tensor(F32, [c, size, size, columns * rows]);
                let mut draft = NodeDraft::new(F32, [c, w, h, 1], &[src]);
                draft.params[0] = size as i32;
                draft
            }
            OpCode::GetRelPos => {
                let dtype = self.pick(&[F16, BF16]);
                let src = self.tensor(dtype, [c, 2 * w - 1, 1, 1]);
                NodeDraft::new(F16, [c, w, w, 1], &[src])
            }
            _ => {
                let (n, a, b, c) =
                    (self.pick(&[1, 2, 7, 14]), self.pick(&[1, 3]), self.pick(&[1, 2]), self.pick(&[1, 2]));
                let scores = self.layout(F32, [n * n, a * b, c, 1], true);
                let (pw, ph) = (self.layout(F32, [n, a, b, c], true), self.layout(F32, [n, a, b, c], true));
                let mut draft = NodeDraft::new(F32, [n * n, a * b, c, 1], &[scores, pw, ph]);
                draft.packed = true;
                draft
            }
        }
    }
}
