//! CONV_2D, CONV_3D, CONV_2D_DW and the transposed convolutions: results of every device against sums over all taps in f64, and
//! the shape rules.

use crate::devices::devices;
use crate::layouts::{LAYOUTS, layout};
use fanout::ops::conv::Conv;
use fanout::ops::{ConvAxis, Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::DType::{self, BF16, F16, F32};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

fn axis(stride: i32, padding: i32, dilation: i32) -> ConvAxis {
    ConvAxis { stride, padding, dilation }
}

fn read(axis: ConvAxis, output: usize, tap: usize, extent: usize) -> Option<usize> {
    let at = output as i64 * i64::from(axis.stride) + tap as i64 * i64::from(axis.dilation) - i64::from(axis.padding);
    usize::try_from(at).ok().filter(|&i| i < extent)
}

/// Adds a node with layouts of kinds `kind`, `kind + 1` and `kind + 2` for kernel, image and destination, and compares.
fn compare(
    op: Conv,
    kernel: (DType, [usize; 4]),
    image: [usize; 4],
    kind: usize,
    want: impl Fn(&[f64], &[f64], [usize; 4]) -> Vec<f64>,
) {
    let mut case = Case::new();
    let count = |ne: [usize; 4]| ne.iter().product::<usize>();
    let k = case.leaf_with_desc(layout(kernel.0, kernel.1, kind % LAYOUTS), &normal(1, count(kernel.1)));
    let x = case.leaf_with_desc(layout(F32, image, (kind + 1) % LAYOUTS), &normal(2, count(image)));
    let out = {
        let srcs = [case.b.tensor(k).unwrap().desc, case.b.tensor(x).unwrap().desc];
        let op = Op::from(op);
        op.infer(&fanout::ops::Sources::new(op.code(), &[Some(&srcs[0]), Some(&srcs[1])])).unwrap()
    };
    let dst = case.b.leaf_with_desc(layout(out.dtype, out.ne, (kind + 2) % LAYOUTS)).unwrap();
    case.b.node_into(op, &[Some(k), Some(x)], dst).unwrap();
    let case = case.build();
    let want = want(&case.values(k), &case.values(x), out.ne);
    let scale = (want.iter().map(|w| w * w).sum::<f64>() / want.len() as f64).sqrt();
    // Tensor cores multiply patches that are rounded to F16, from 16 output channels and 64 positions on, with contiguous kernels.
    let (channels, positions) = match op {
        Conv::Conv3d { outputs, .. } => (outputs as usize, out.ne[..3].iter().product()),
        _ => (out.ne[2], out.ne[0] * out.ne[1]),
    };
    let may_round = matches!(op, Conv::Conv2d { .. } | Conv::Conv3d { .. })
        && layout(kernel.0, kernel.1, kind % LAYOUTS).is_contiguous()
        && kernel.0 == F16
        && channels >= 16
        && positions >= 64;
    for on in devices() {
        let what = format!("{op:?} {kernel:?} {image:?} {kind} {}", on.name);
        let absolute = if may_round && on.name == "CUDA" { 2e-3 } else { 3e-5 };
        assert_close(&case.run(on).values(dst), &want, 1e-5, absolute * scale, &what);
    }
}

/// Extents of image and kernel along x and y, and the axes.
fn planes() -> Vec<([usize; 2], [usize; 2], [ConvAxis; 2])> {
    let one = ConvAxis::PLAIN;
    vec![
        ([1, 1], [1, 1], [one; 2]),
        ([9, 7], [3, 3], [axis(1, 1, 1); 2]),
        ([11, 5], [3, 2], [axis(2, 2, 2), axis(3, 1, 1)]),
        ([40, 3], [5, 1], [axis(1, 2, 1), one]),
        ([70, 5], [4, 2], [axis(1, 0, 3), axis(1, -1, 1)]),
        ([28, 28], [14, 14], [axis(14, 0, 1); 2]),
        ([3, 90], [2, 3], [axis(2, 5, -1), axis(1, 1, 0)]),
        ([2, 2], [4, 3], [axis(3, 0, 1), axis(2, 9, 4)]),
        ([4, 5], [2, 2], [axis(7, 30, 1), axis(5, 20, 9)]),
    ]
}

#[test]
fn convolutions_match_the_sums() {
    for (kind, (x, k, axes)) in planes().into_iter().enumerate() {
        for (channels, outputs, images) in [(1, 1, 1), (3, 7, 2), (40, 20, 1)] {
            for dtype in [F32, F16] {
                let (ke, ie) = ([k[0], k[1], channels, outputs], [x[0], x[1], channels, images]);
                for kind in if channels == 3 { vec![0, kind, kind + 1] } else { vec![kind] } {
                    compare(Conv::Conv2d { axes }, (dtype, ke), ie, kind, |kernel, image, ne| {
                        sums(ne, |[ox, oy, oc, n]| {
                            sums_of(&[k[0], k[1], channels], |[kx, ky, c]| {
                                let x = read(axes[0], ox, kx, x[0]).zip(read(axes[1], oy, ky, x[1]));
                                x.map_or(0.0, |(x, y)| kernel[at(ke, [kx, ky, c, oc])] * image[at(ie, [x, y, c, n])])
                            })
                        })
                    });
                }
            }
        }
    }
}

fn sums(ne: [usize; 4], value: impl Fn([usize; 4]) -> f64) -> Vec<f64> {
    (0..ne.iter().product()).map(|k| value(index(ne, k))).collect()
}

fn sums_of(counts: &[usize; 3], value: impl Fn([usize; 3]) -> f64) -> f64 {
    let ne = [counts[0], counts[1], counts[2], 1];
    (0..ne.iter().product()).map(|k| value([index(ne, k)[0], index(ne, k)[1], index(ne, k)[2]])).sum()
}

#[test]
fn depthwise_convolutions_match_the_sums() {
    for (number, (x, k, axes)) in planes().into_iter().enumerate() {
        for (channels, images) in [(1, 1), (5, 2), (33, 1), (1030, 1)] {
            if channels > 1000 && number != 2 {
                continue;
            }
            for dtype in [F32, F16] {
                let (ke, ie) = ([k[0], k[1], 1, channels], [x[0], x[1], channels, images]);
                // Image and destination contiguous, with gaps, with channels first, and with rows exchanged; then all of them
                // with channels first, as ggml makes them.
                for kind in [3, 0, 1, 2, LAYOUTS] {
                    let want = |kernel: &[f64], image: &[f64], ne| {
                        sums(ne, |[ox, oy, c, n]| {
                            sums_of(&[k[0], k[1], 1], |[kx, ky, _]| {
                                let x = read(axes[0], ox, kx, x[0]).zip(read(axes[1], oy, ky, x[1]));
                                x.map_or(0.0, |(x, y)| kernel[at(ke, [kx, ky, 0, c])] * image[at(ie, [x, y, c, n])])
                            })
                        })
                    };
                    if kind < LAYOUTS {
                        compare(Conv::Conv2dDw { axes }, (dtype, ke), ie, kind, want);
                        continue;
                    }
                    let mut case = Case::new();
                    let count = |ne: [usize; 4]| ne.iter().product::<usize>();
                    // Kernel [KW, KH, 1, C] with the channels first.
                    let size = dtype.block_bytes();
                    let nb = [channels * size, channels * k[0] * size, channels * size, size];
                    let desc = fanout::tensor::TensorDesc::strided(dtype, ke, nb).unwrap();
                    let kernel = case.leaf_with_desc(desc, &normal(3, count(ke)));
                    let image = case.leaf_with_desc(layout(F32, ie, 2), &normal(4, count(ie)));
                    let [ow, oh] = [0, 1].map(|d| axes[d].output(x[d], k[d]).unwrap());
                    let ne = [ow, oh, channels, images];
                    let dst = case.b.leaf_with_desc(layout(F32, ne, 2)).unwrap();
                    case.b.node_into(Conv::Conv2dDw { axes }, &[Some(kernel), Some(image)], dst).unwrap();
                    let case = case.build();
                    let want = want(&case.values(kernel), &case.values(image), ne);
                    for on in devices() {
                        let what = format!("{x:?} {k:?} {axes:?} {channels} {}", on.name);
                        assert_close(&case.run(on).values(dst), &want, 1e-5, 1e-5, &what);
                    }
                }
            }
        }
    }
}

#[test]
fn convolutions_of_volumes_match_the_sums() {
    let one = ConvAxis::PLAIN;
    for (kind, (x, k, axes)) in [
        ([1, 1, 1], [1, 1, 1], [one; 3]),
        ([6, 5, 4], [3, 2, 2], [axis(1, 1, 1); 3]),
        ([9, 4, 5], [2, 3, 3], [axis(2, 0, 3), axis(1, 2, 1), axis(2, 1, 2)]),
        ([5, 4, 5], [2, 2, 2], [axis(1, 1, -1), axis(3, 0, 0), axis(1, -1, 1)]),
    ]
    .into_iter()
    .enumerate()
    {
        for (channels, outputs, batches, kind) in [(1, 1, 1, kind), (3, 5, 2, kind), (5, 17, 2, 0)] {
            for dtype in [F32, F16] {
                let (ke, ie) = ([k[0], k[1], k[2], channels * outputs], [x[0], x[1], x[2], channels * batches]);
                let [c, n, o] = [channels, batches, outputs].map(|n| n as i32);
                let op = Conv::Conv3d { axes, channels: c, batches: n, outputs: o };
                compare(op, (dtype, ke), ie, kind, |kernel, image, ne| {
                    sums(ne, |[ox, oy, oz, i3]| {
                        let (out, n) = (i3 % outputs, i3 / outputs);
                        (0..channels)
                            .map(|c| {
                                sums_of(&k, |[kx, ky, kz]| {
                                    let at_x = read(axes[0], ox, kx, x[0]);
                                    let at_yz = read(axes[1], oy, ky, x[1]).zip(read(axes[2], oz, kz, x[2]));
                                    at_x.zip(at_yz).map_or(0.0, |(x, (y, z))| {
                                        kernel[at(ke, [kx, ky, kz, out * channels + c])]
                                            * image[at(ie, [x, y, z, n * channels + c])]
                                    })
                                })
                            })
                            .sum()
                    })
                });
            }
        }
    }
}

#[test]
fn transposed_convolutions_match_the_sums() {
    for (kind, (x, k, stride)) in [
        ([1, 1], [1, 1], 1),
        ([5, 4], [3, 2], 1),
        ([5, 4], [4, 4], 2),
        ([33, 3], [5, 3], 3),
        ([4, 3], [2, 3], 4),
        ([3, 2], [16, 7], 5),
        ([1, 2], [3, 1], 9),
    ]
    .into_iter()
    .enumerate()
    {
        for (channels, outputs, images) in [(1, 1, 1), (3, 7, 2), (40, 9, 1)] {
            for dtype in [F32, F16] {
                let (ke, ie) = ([k[0], k[1], outputs, channels], [x[0], x[1], channels, images]);
                let add = |kernel: &[f64], image: &[f64], ne: [usize; 4], ke: [usize; 4], ie: [usize; 4]| {
                    let mut want = vec![0.0; ne.iter().product()];
                    for ([ix, iy, c, n], value) in image.iter().enumerate().map(|(k, v)| (index(ie, k), v)) {
                        for ([kx, ky, out, _], weight) in
                            kernel.iter().enumerate().map(|(k, w)| (index(ke, k), w)).filter(|(i, _)| i[3] == c)
                        {
                            want[at(ne, [ix * stride + kx, iy * stride + ky, out, n])] += value * weight;
                        }
                    }
                    want
                };
                let op = Conv::Transpose2d { stride: stride as i32 };
                compare(op, (dtype, ke), ie, kind, |kernel, image, ne| add(kernel, image, ne, ke, ie));
                let op = Conv::Transpose1d { stride: stride as i32 };
                let (line, input) = ([k[0], outputs, channels, 1], [x[0], channels, 1, 1]);
                compare(op, (dtype, line), input, kind, |kernel, image, [length, ..]| {
                    let (line, input) = ([k[0], 1, outputs, channels], [x[0], 1, channels, 1]);
                    add(kernel, image, [length, 1, outputs, 1], line, input)
                });
            }
        }
    }
}

/// Enough taps, outputs and channels for several cache blocks, units and workers.
#[test]
fn large_convolutions_match_the_sums() {
    let (x, k, c, out) = ([35, 21], [3, 3], 70, 30);
    let axes = [axis(1, 1, 1); 2];
    let (ke, ie) = ([k[0], k[1], c, out], [x[0], x[1], c, 1]);
    for dtype in [F32, F16] {
        compare(Conv::Conv2d { axes }, (dtype, ke), ie, 0, |kernel, image, ne| {
            sums(ne, |[ox, oy, oc, n]| {
                sums_of(&[k[0], k[1], c], |[kx, ky, c]| {
                    let x = read(axes[0], ox, kx, x[0]).zip(read(axes[1], oy, ky, x[1]));
                    x.map_or(0.0, |(x, y)| kernel[at(ke, [kx, ky, c, oc])] * image[at(ie, [x, y, c, n])])
                })
            })
        });
    }
}

/// Kernels without elements, no input channels, and images that are padding only: sums over no taps are 0, as in ggml.
#[test]
fn convolutions_over_no_taps_are_zeros() {
    let padded = axis(1, 2, 1);
    let volume = |channels| Conv::Conv3d { axes: [padded; 3], channels, batches: 1, outputs: 2 };
    for dtype in [F32, F16] {
        for (op, kernel, image) in [
            (Conv::Conv2d { axes: [padded; 2] }, [0, 3, 4, 7], [6, 5, 4, 2]),
            (Conv::Conv2d { axes: [padded; 2] }, [3, 3, 0, 7], [6, 5, 0, 2]),
            (Conv::Conv2d { axes: [padded; 2] }, [3, 3, 4, 7], [0, 5, 4, 2]),
            (Conv::Conv2dDw { axes: [padded; 2] }, [3, 0, 1, 4], [6, 5, 4, 2]),
            (volume(3), [3, 0, 2, 6], [4, 4, 4, 3]),
            (Conv::Transpose1d { stride: 2 }, [0, 5, 4, 1], [6, 4, 1, 1]),
            (Conv::Transpose1d { stride: 2 }, [3, 5, 0, 1], [6, 0, 1, 1]),
            (Conv::Transpose2d { stride: 2 }, [0, 2, 5, 4], [6, 5, 4, 2]),
        ] {
            compare(op, (dtype, kernel), image, 0, |_, _, ne| vec![0.0; ne.iter().product()]);
        }
    }
}

#[test]
fn parameters_survive_the_wire() {
    let axes = [axis(2, 3, 4), axis(5, -6, 0)];
    for op in [
        Conv::Conv2d { axes },
        Conv::Conv2dDw { axes },
        Conv::Conv3d { axes: [axes[0], axes[1], axis(8, 9, -10)], channels: 11, batches: 12, outputs: 13 },
        Conv::Transpose1d { stride: 3 },
        Conv::Transpose2d { stride: 4 },
    ]
    .map(Op::from)
    {
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
    }
    for (code, words) in [
        (OpCode::Conv2d, [0, 1, 0, 0, 1, 1]),
        (OpCode::Conv2d, [1, -1, 0, 0, 1, 1]),
        (OpCode::Conv2dDw, [i32::MIN, 1, 0, 0, 1, 1]),
        (OpCode::Conv3d, [1, 1, 1, 0, 0, 0]),
        (OpCode::ConvTranspose1d, [0, 0, 1, 0, 0, 0]),
        (OpCode::ConvTranspose1d, [1, 1, 1, 0, 0, 0]),
        (OpCode::ConvTranspose1d, [1, 0, 2, 0, 0, 0]),
        (OpCode::ConvTranspose2d, [0, 0, 0, 0, 0, 0]),
    ] {
        let params = words.iter().enumerate().fold(OpParams::default(), |p, (k, &word)| p.with_int(k, word));
        assert!(Op::decode(code, &params).is_err(), "{code} {words:?}");
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let one = ConvAxis::PLAIN;
    let built = |op: Conv, srcs: [(DType, [usize; 4]); 2], dst: (DType, [usize; 4])| {
        let mut case = Case::new();
        let srcs = srcs.map(|(dtype, ne)| case.b.leaf(dtype, ne).ok());
        case.b.node_with_output(op, &srcs, OutputSpec { dtype: dst.0, ne: dst.1 }).is_ok()
    };
    let conv = Conv::Conv2d { axes: [one; 2] };
    let (kernel, image, out) = ((F32, [3, 2, 4, 7]), (F32, [6, 5, 4, 2]), (F32, [4, 4, 7, 2]));
    assert!(built(conv, [kernel, image], out));
    assert!(!built(conv, [(F32, [3, 2, 3, 7]), image], out), "another number of channels");
    assert!(!built(conv, [kernel, image], (F32, [4, 4, 7, 1])), "another shape");
    assert!(!built(conv, [kernel, image], (F16, out.1)), "another type than the image's");
    assert!(!built(conv, [(F32, [9, 2, 4, 7]), image], out), "a kernel that is too large");
    let dw = Conv::Conv2dDw { axes: [one; 2] };
    assert!(built(dw, [(F32, [3, 2, 1, 4]), image], (F32, [4, 4, 4, 2])));
    assert!(!built(dw, [(F32, [3, 2, 4, 1]), image], (F32, [4, 4, 4, 2])), "a kernel of several channels");
    assert!(!built(dw, [(F32, [3, 2, 1, 5]), image], (F32, [4, 4, 4, 2])), "another number of kernels");
    let volume = Conv::Conv3d { axes: [one; 3], channels: 2, batches: 3, outputs: 5 };
    let (k3, i3) = ((F32, [2, 2, 2, 10]), (F32, [3, 3, 3, 6]));
    assert!(built(volume, [k3, i3], (F32, [2, 2, 2, 15])));
    assert!(!built(volume, [(F32, [2, 2, 2, 9]), i3], (F32, [2, 2, 2, 15])), "a kernel too few");
    assert!(!built(volume, [k3, (F32, [3, 3, 3, 5])], (F32, [2, 2, 2, 15])), "an image too few");
    let huge = Conv::Conv3d { axes: [one; 3], channels: i32::MAX, batches: i32::MAX, outputs: i32::MAX };
    assert!(!built(huge, [k3, i3], (F32, [2, 2, 2, 15])));
    let line = Conv::Transpose1d { stride: 2 };
    assert!(built(line, [(F32, [3, 5, 4, 1]), (F32, [6, 4, 1, 1])], (F32, [13, 5, 1, 1])));
    assert!(!built(line, [(F32, [3, 5, 4, 1]), (F32, [6, 4, 2, 1])], (F32, [13, 5, 2, 1])), "no matrix");
    assert!(!built(line, [(F32, [3, 5, 3, 1]), (F32, [6, 4, 1, 1])], (F32, [13, 5, 1, 1])), "other channels");
    let plane = Conv::Transpose2d { stride: 2 };
    assert!(built(plane, [(F32, [3, 2, 5, 4]), image], (F32, [13, 10, 5, 2])));
    assert!(!built(plane, [(F32, [3, 2, 5, 3]), image], (F32, [13, 10, 5, 2])), "other channels");
    assert!(!built(plane, [(F32, [3, 2, 5, 4]), image], (F32, [14, 10, 5, 2])), "another shape");
    for types in [(BF16, F32), (DType::Q8_0, F32), (F32, F16)] {
        let mut case = Case::new();
        let srcs = [case.b.leaf(types.0, [32, 1, 4, 7]).ok(), case.b.leaf(types.1, [40, 5, 4, 2]).ok()];
        case.b.node(conv, &srcs).unwrap();
        let case = case.build();
        for on in devices() {
            assert!(case.try_run(on).is_err(), "{types:?} {}", on.name);
        }
    }
}
