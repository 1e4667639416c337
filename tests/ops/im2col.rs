//! IM2COL, IM2COL_BACK, IM2COL_3D and COL2IM_1D: results of every device against loops over all taps, and the shape rules.

use crate::devices::devices;
use crate::layouts::{LAYOUTS, layout};
use fanout::ops::im2col::Im2col;
use fanout::ops::{ConvAxis, Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::DType::{self, BF16, F16, F32, I32};
use fanout::tensor::TensorDesc;
use fanout_testing::compare::{assert_close, rounding};
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

fn axis(stride: i32, padding: i32, dilation: i32) -> ConvAxis {
    ConvAxis { stride, padding, dilation }
}

/// The element that a tap reads, if it is inside of an image of `extent`.
fn read(axis: ConvAxis, output: usize, tap: usize, extent: usize) -> Option<usize> {
    let at = output as i64 * i64::from(axis.stride) + tap as i64 * i64::from(axis.dilation) - i64::from(axis.padding);
    usize::try_from(at).ok().filter(|&i| i < extent)
}

/// A geometry: extents of the image, of the kernel, and the axes, along x, y and z.
type Geometry = ([usize; 3], [usize; 3], [ConvAxis; 3]);

fn geometries() -> Vec<Geometry> {
    let one = ConvAxis::PLAIN;
    vec![
        ([1, 1, 1], [1, 1, 1], [one; 3]),
        ([7, 5, 3], [3, 2, 2], [one; 3]),
        ([20, 6, 4], [3, 3, 1], [axis(1, 1, 1), axis(1, 1, 1), one]),
        ([9, 8, 5], [4, 3, 3], [axis(2, 3, 1), axis(3, 1, 2), axis(2, 2, 2)]),
        ([30, 4, 2], [2, 1, 2], [axis(5, 0, 7), axis(2, 2, 3), axis(1, 1, 1)]),
        ([6, 6, 3], [3, 3, 2], [axis(1, -1, 1), axis(2, -1, 1), axis(1, 0, 0)]),
        ([5, 5, 3], [3, 3, 2], [axis(1, 2, -1), axis(1, 1, 0), axis(1, 2, -2)]),
        ([3, 2, 2], [4, 3, 3], [axis(3, 0, 1), axis(2, 9, 4), axis(4, 0, 1)]),
        ([3000, 1, 1], [2, 1, 1], [axis(190, 3, 1), one, one]),
        ([4000, 1, 1], [5, 1, 1], [axis(250, 600, 9), one, one]),
    ]
}

fn outputs((image, kernel, axes): &Geometry) -> [usize; 3] {
    std::array::from_fn(|d| axes[d].output(image[d], kernel[d]).unwrap())
}

/// The value of a patch of `image [w, h, d, n*channels]`: element `i` of dst, whose dimension 3 is `n * depth + z`.
fn patch(image: &[f64], geometry: &Geometry, channels: usize, i: [usize; 4]) -> f64 {
    let ([w, h, d], [kw, kh, kd], [ax, ay, az]) = *geometry;
    let depth = outputs(geometry)[2];
    let (kx, ky, kz, c) = (i[0] % kw, i[0] / kw % kh, i[0] / kw / kh % kd, i[0] / kw / kh / kd);
    let (z, n) = (i[3] % depth, i[3] / depth);
    match (read(ax, i[1], kx, w), read(ay, i[2], ky, h), read(az, z, kz, d)) {
        (Some(x), Some(y), Some(z)) => image[at([w, h, d, usize::MAX], [x, y, z, n * channels + c])],
        _ => 0.0,
    }
}

fn round(dtype: DType, value: f64) -> f64 {
    if dtype == F16 { half::f16::from_f64(value).to_f64() } else { value }
}

#[test]
fn patches_of_every_geometry_are_copied() {
    for (number, geometry) in geometries().into_iter().enumerate() {
        let ([w, h, d], [kw, kh, kd], axes) = geometry;
        let [ow, oh, od] = outputs(&geometry);
        for (channels, images) in [(1, 1), (3, 2)] {
            for (from, to) in [(F32, F32), (F32, F16), (F16, F16)] {
                let kind = (number + channels) % LAYOUTS;
                let values = normal(1, w * h * d * channels * images);
                let mut case = Case::new();
                // Three, two and one dimensions. The kernel's memory is not read.
                let mut nodes = Vec::new();
                let mut add = |op: Im2col, kernel: [usize; 4], image: [usize; 4], ne: [usize; 4], g: Geometry| {
                    let kernel = case.leaf(F16, kernel, &vec![f32::NAN; kernel.iter().product()]);
                    let desc = layout(from, image, kind);
                    let image = case.leaf_with_desc(desc, &values[..desc.elements()]);
                    let dst = case.b.leaf_with_desc(layout(to, ne, if number % 2 == 0 { 0 } else { 1 })).unwrap();
                    case.b.node_into(op, &[Some(kernel), Some(image)], dst).unwrap();
                    nodes.push((dst, image, ne, g));
                };
                let patch_len = kw * kh * channels;
                if from == F32 {
                    let op = Im2col::Im2col3d { axes, channels: channels as i32 };
                    let (kernel, image) = ([kw, kh, kd, 2 * channels], [w, h, d, channels * images]);
                    add(op, kernel, image, [patch_len * kd, ow, oh, od * images], geometry);
                }
                let one = ConvAxis::PLAIN;
                let plane = ([w, h, 1], [kw, kh, 1], [axes[0], axes[1], one]);
                let op = Im2col::Im2col { axes: [axes[0], axes[1]], two_d: true };
                add(op, [kw, kh, channels, 2], [w, h, channels, images], [patch_len, ow, oh, images], plane);
                let line = ([w, 1, 1], [kw, 1, 1], [axes[0], one, one]);
                let op = Im2col::Im2col { axes: [axes[0], one], two_d: false };
                add(op, [kw, channels, 2, 1], [w, channels, images, 1], [kw * channels, ow, images, 1], line);
                let case = case.build();
                for on in devices() {
                    let run = case.run(on);
                    for (dst, image, ne, g) in &nodes {
                        let image = case.values(*image);
                        let line = g.0[1] == 1 && g.1 == [kw, 1, 1] && ne[3] == 1 && ne[2] == images;
                        let want: Vec<f64> = (0..ne.iter().product())
                            .map(|k| {
                                let i = index(*ne, k);
                                // In one dimension, dimension 2 is the image.
                                let i = if line { [i[0], i[1], 0, i[2]] } else { i };
                                round(to, patch(&image, g, channels, i))
                            })
                            .collect();
                        assert_eq!(run.values(*dst), want, "{g:?} {channels} {images} {from} {to} {}", on.name);
                    }
                }
            }
        }
    }
}

/// Wider than a grid of 65,535 blocks in y and z of two columns each.
#[test]
fn patches_of_wide_images_are_copied() {
    let (w, taps) = (176_000, 3);
    let mut case = Case::new();
    let kernel = case.leaf(F16, [taps, 1, 1, 1], &vec![f32::NAN; taps]);
    let image = case.leaf(F32, [w, 1, 1, 1], &normal(4, w));
    let op = Im2col::Im2col { axes: [axis(1, 1, 1), ConvAxis::PLAIN], two_d: false };
    let dst = case.b.leaf(F16, [taps, w, 1, 1]).unwrap();
    case.b.node_into(op, &[Some(kernel), Some(image)], dst).unwrap();
    let case = case.build();
    let values = case.values(image);
    let element = |k: usize| read(axis(1, 1, 1), k / taps, k % taps, w).map_or(0.0, |i| round(F16, values[i]));
    let want: Vec<f64> = (0..taps * w).map(element).collect();
    for on in devices() {
        assert!(case.run(on).values(dst) == want, "{}", on.name);
    }
}

#[test]
fn gradients_of_patches_are_added() {
    for (number, geometry) in geometries().into_iter().enumerate() {
        let ([w, h, _], [kw, kh, _], axes) = geometry;
        let [ow, oh, _] = outputs(&geometry);
        let (channels, images) = (2, 3);
        for two_d in [true, false] {
            let (h, kh, oh) = if two_d { (h, kh, oh) } else { (1, 1, 1) };
            let ay = if two_d { axes[1] } else { ConvAxis::PLAIN };
            let (kernel, image, patches) = if two_d {
                ([kw, kh, channels, 5], [w, h, channels, images], [kw * kh * channels, ow, oh, images])
            } else {
                ([kw, channels, 5, 1], [w, channels, images, 1], [kw * channels, ow, images, 1])
            };
            let mut case = Case::new();
            let values = normal(2, patches.iter().product());
            let gradient = case.leaf_with_desc(layout(F32, patches, number % LAYOUTS), &values);
            let kernel = case.leaf(F16, kernel, &vec![f32::NAN; kernel.iter().product()]);
            let dst = case.b.leaf_with_desc(layout(F32, image, (number + 1) % LAYOUTS)).unwrap();
            let op = Im2col::Im2colBack { axes: [axes[0], ay], two_d };
            case.b.node_into(op, &[Some(gradient), Some(kernel)], dst).unwrap();
            let case = case.build();
            let mut want = vec![0.0; w * h * channels * images];
            for (k, value) in case.values(gradient).into_iter().enumerate() {
                let i = index([kw * kh * channels, ow, oh, images], k);
                let (kx, ky, c) = (i[0] % kw, i[0] / kw % kh, i[0] / kw / kh);
                if let (Some(x), Some(y)) = (read(axes[0], i[1], kx, w), read(ay, i[2], ky, h)) {
                    want[at([w, h, channels, images], [x, y, c, i[3]])] += value;
                }
            }
            for on in devices() {
                let what = format!("{geometry:?} {two_d} {}", on.name);
                assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-5, &what);
            }
        }
    }
}

#[test]
fn columns_are_added_to_signals() {
    for (samples, columns, stride, channels, padding) in [
        (1, 1, 1, 1, 0),
        (4, 5, 2, 3, 0),
        (16, 40, 8, 2, 4),
        (3, 6, 5, 2, 1),
        (7, 1, 9, 1, 3),
        (2500, 3, 700, 1, 40),
        (5, 700, 2, 3, 2),
    ] {
        for dtype in [F32, F16, BF16] {
            let length = (columns - 1) * stride + samples - 2 * padding;
            let mut case = Case::new();
            let src = case.leaf(dtype, [samples * channels, columns, 1, 1], &normal(3, samples * channels * columns));
            let op = Im2col::Col2im1d { stride: stride as i32, channels: channels as i32, padding: padding as i32 };
            let dst = case.b.node(op, &[Some(src)]).unwrap();
            let case = case.build();
            let values = case.values(src);
            let mut want = vec![0.0; length * channels];
            for (k, value) in values.into_iter().enumerate() {
                let (row, column) = (k % (samples * channels), k / (samples * channels));
                let at = column * stride + row % samples;
                if (padding..padding + length).contains(&at) {
                    want[row / samples * length + at - padding] += value;
                }
            }
            for on in devices() {
                let what = format!("{samples} {columns} {stride} {channels} {padding} {dtype} {}", on.name);
                let tolerance = rounding(dtype);
                assert_close(&case.run(on).values(dst), &want, tolerance, 10.0 * tolerance, &what);
            }
        }
    }
}

#[test]
fn parameters_survive_the_wire() {
    let axes = [axis(2, 3, 4), axis(5, -6, 7)];
    for op in [
        Im2col::Im2col { axes, two_d: true },
        Im2col::Im2col { axes: [axes[0], ConvAxis::PLAIN], two_d: false },
        Im2col::Im2colBack { axes, two_d: true },
        Im2col::Im2col3d { axes: [axes[0], axes[1], axis(8, 9, -10)], channels: 11 },
        Im2col::Col2im1d { stride: 2, channels: 3, padding: 4 },
    ]
    .map(Op::from)
    {
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
    }
    let words = OpParams([2, 5, 3, -6, 4, 7, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(Op::decode(OpCode::Im2col, &words).unwrap(), Some(Im2col::Im2col { axes, two_d: true }.into()));
    // The builder of one dimension leaves the words of y at 0.
    let line = OpParams([1, 0, 1, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    assert!(Op::decode(OpCode::Im2col, &line).is_ok());
    assert!(Op::decode(OpCode::Im2col, &line.with_int(6, 1)).is_err(), "a stride of 0 along y");
    for (code, words) in [
        (OpCode::Im2col, [0, 0, 0, 0, 1, 1]),
        (OpCode::Im2colBack, [-1, 1, 0, 0, 1, 1]),
        (OpCode::Im2col3d, [1, 1, 0, 0, 0, 0]),
        (OpCode::Im2col3d, [1, 1, 1, 0, 0, 0]),
        (OpCode::Col2im1d, [0, 1, 0, 0, 0, 0]),
        (OpCode::Col2im1d, [1, 0, 0, 0, 0, 0]),
        (OpCode::Col2im1d, [1, 1, -1, 0, 0, 0]),
    ] {
        let params = words.iter().enumerate().fold(OpParams::default(), |p, (k, &word)| p.with_int(k, word));
        assert!(Op::decode(code, &params).is_err(), "{code} {words:?}");
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let built = |op: Im2col, srcs: [(DType, [usize; 4]); 2], dst: (DType, [usize; 4])| {
        let mut case = Case::new();
        let srcs = srcs.map(|(dtype, ne)| case.b.leaf(dtype, ne).ok());
        let count = Op::from(op).code().max_sources();
        case.b.node_with_output(op, &srcs[..count], OutputSpec { dtype: dst.0, ne: dst.1 }).is_ok()
    };
    let one = ConvAxis::PLAIN;
    let plane = |axes| Im2col::Im2col { axes, two_d: true };
    let (kernel, image) = ((F32, [3, 2, 4, 7]), (F32, [6, 5, 4, 2]));
    let patches = [24, 4, 4, 2];
    assert!(built(plane([one; 2]), [kernel, image], (F16, patches)));
    assert!(!built(plane([one; 2]), [kernel, image], (F16, [24, 4, 4, 1])), "another shape");
    assert!(!built(plane([one; 2]), [(F32, [3, 2, 3, 7]), image], (F16, [18, 4, 4, 2])), "another number of channels");
    assert!(!built(plane([axis(1, 0, 3), one]), [kernel, image], (F16, [24, 0, 4, 2])), "no output");
    assert!(!built(plane([axis(1, -2, 1), one]), [kernel, image], (F16, [24, 0, 4, 2])), "cropped away");
    assert!(built(Im2col::Im2colBack { axes: [one; 2], two_d: true }, [(F32, patches), kernel], (F32, image.1)));
    let back = Im2col::Im2colBack { axes: [one; 2], two_d: true };
    assert!(!built(back, [(F32, [24, 4, 3, 2]), kernel], (F32, image.1)), "a row of gradients is missing");
    assert!(!built(back, [(F32, patches), kernel], (F16, image.1)), "another type");
    let line = Im2col::Im2col { axes: [one; 2], two_d: false };
    assert!(built(line, [(F32, [3, 4, 7, 1]), (F32, [6, 4, 2, 1])], (F16, [12, 4, 2, 1])));
    assert!(!built(line, [(F32, [3, 4, 7, 1]), (F32, [6, 4, 2, 2])], (F16, [12, 4, 2, 1])), "four dimensions");
    let volume = Im2col::Im2col3d { axes: [one; 3], channels: 2 };
    assert!(built(volume, [(F32, [2, 2, 2, 6]), (F32, [3, 3, 3, 4])], (F32, [16, 2, 2, 4])));
    assert!(
        !built(volume, [(F32, [2, 2, 2, 6]), (F32, [3, 3, 3, 4])], (F32, [16, 2, 2, 8])),
        "another number of planes"
    );
    let columns = Im2col::Col2im1d { stride: 2, channels: 3, padding: 1 };
    let src = (F32, [12, 5, 1, 1]);
    assert!(built(columns, [src, src], (F32, [10, 3, 1, 1])));
    assert!(!built(columns, [src, src], (F16, [10, 3, 1, 1])), "another type");
    assert!(!built(columns, [(F32, [13, 5, 1, 1]), src], (F32, [10, 3, 1, 1])), "no whole channels");
    assert!(!built(columns, [(F32, [12, 5, 2, 1]), src], (F32, [10, 3, 1, 1])), "no matrix");
    let cropped = Im2col::Col2im1d { stride: 1, channels: 1, padding: i32::MAX };
    assert!(!built(cropped, [src, src], (F32, [1, 1, 1, 1])), "nothing is left");
    // Types that the rules allow and no kernel has.
    for (op, srcs, dst) in [
        (plane([one; 2]), [kernel, (F16, image.1)], (F32, patches)),
        (plane([one; 2]), [kernel, (BF16, image.1)], (F16, patches)),
        (plane([one; 2]), [kernel, image], (BF16, patches)),
        (back, [(F16, patches), kernel], (F32, image.1)),
        (back, [(F32, patches), (BF16, kernel.1)], (F32, image.1)),
        (columns, [(I32, src.1), src], (I32, [10, 3, 1, 1])),
    ] {
        let mut case = Case::new();
        let srcs = srcs.map(|(dtype, ne)| case.b.leaf(dtype, ne).ok());
        let count = Op::from(op).code().max_sources();
        case.b.node_with_output(op, &srcs[..count], OutputSpec { dtype: dst.0, ne: dst.1 }).unwrap();
        let case = case.build();
        for on in devices() {
            assert!(case.try_run(on).is_err(), "{op:?} {dst:?} {}", on.name);
        }
    }
}

/// Extents beyond 2^31 elements: the shape rule computes with them, and refuses what overflows.
#[test]
fn huge_extents_do_not_overflow() {
    let desc = |ne| TensorDesc::strided(F32, ne, [4, 0, 0, 0]).unwrap();
    let check = |op: Im2col, srcs: [TensorDesc; 2], ne| {
        let op = Op::from(op);
        let srcs = [Some(&srcs[0]), Some(&srcs[1])];
        let dst = TensorDesc::strided(F16, ne, [2, 0, 0, 0]).unwrap();
        let srcs = fanout::ops::Sources::new(op.code(), &srcs);
        op.check(&fanout::ops::NodeView { op: &op, dst: &dst, srcs, aligned: true })
    };
    let plane = |axes| Im2col::Im2col { axes, two_d: true };
    let one = ConvAxis::PLAIN;
    let srcs = [desc([3, 1, 1, 1]), desc([1 << 40, 1, 1, 1])];
    assert!(check(plane([one; 2]), srcs, [3, (1 << 40) - 2, 1, 1]).is_ok());
    let wide = axis(1, i32::MAX, i32::MAX);
    assert!(check(plane([wide, one]), srcs, [3, 1 << 40, 1, 1]).is_ok());
    let reach = axis(1, 0, i32::MAX);
    let one_patch = [1 << 40, 1, 1, 1];
    assert!(check(plane([reach, one]), [desc(one_patch), desc([5, 1, 1, 1])], one_patch).is_err());
    let kernel = desc([1 << 40, 1 << 18, 1, 1]);
    let image = desc([1 << 40, 1 << 18, 1, 1]);
    assert!(check(plane([one; 2]), [kernel, image], [1 << 58, 1, 1, 1]).is_ok());
    assert!(check(plane([one; 2]), [kernel, desc(one_patch)], one_patch).is_err(), "a kernel that is too high");
}
