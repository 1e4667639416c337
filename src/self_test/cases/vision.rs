//! Cases of ops on images: im2col, conv, pool, upscale, window.

use super::{Draft, EQUAL, IN_F16, IN_F32, case};
use crate::ops::ConvAxis;
use crate::ops::conv::Conv;
use crate::ops::im2col::Im2col;
use crate::ops::pool::{Pool, PoolAxis, PoolKind};
use crate::ops::upscale::{ScaleMode, Upscale};
use crate::ops::window::Window;
use crate::tensor::DType::{F16, F32};

pub(super) fn cases() -> Vec<Draft> {
    [im2col(), conv(), pool(), upscale(), window()].into_iter().flatten().collect()
}

/// Every second window, with a zero at each end: 13 elements and 3 taps have 7 outputs, 9 elements 5.
const SECOND: ConvAxis = ConvAxis { stride: 2, padding: 1, dilation: 1 };

fn im2col() -> Vec<Draft> {
    let (kernel, image, patches) = ([3, 3, 2, 4], [13, 9, 2, 2], [18, 7, 5, 2]);
    let axes = [SECOND; 2];
    let (one_d, volume) = ([SECOND, ConvAxis::PLAIN], [ConvAxis::PLAIN; 3]);
    vec![
        case(EQUAL).normal(F16, kernel).normal(F32, image).node_as(Im2col::Im2col { axes, two_d: true }, F32, patches),
        case(IN_F16).variant("1D F16").normal(F16, [3, 2, 4, 1]).normal(F32, [13, 2, 2, 1]).node_as(
            Im2col::Im2col { axes: one_d, two_d: false },
            F16,
            [6, 7, 2, 1],
        ),
        case(IN_F32).normal(F32, patches).normal(F16, kernel).node_as(
            Im2col::Im2colBack { axes, two_d: true },
            F32,
            image,
        ),
        case(EQUAL).normal(F16, [3, 2, 2, 6]).normal(F32, [9, 7, 5, 6]).node_as(
            Im2col::Im2col3d { axes: volume, channels: 3 },
            F32,
            [36, 7, 6, 8],
        ),
        case(IN_F32).normal(F32, [12, 11, 1, 1]).node(Im2col::Col2im1d { stride: 2, channels: 3, padding: 1 }),
    ]
}

fn conv() -> Vec<Draft> {
    let axes = [SECOND, ConvAxis { stride: 1, padding: 2, dilation: 2 }];
    let volume = Conv::Conv3d { axes: [ConvAxis::PLAIN; 3], channels: 3, batches: 2, outputs: 16 };
    let image = [13, 11, 5, 2];
    vec![
        case(IN_F32).normal(F32, [3, 3, 5, 7]).normal(F32, image).node(Conv::Conv2d { axes }),
        case(IN_F16).variant(F16).normal(F16, [3, 3, 5, 17]).normal(F32, image).node(Conv::Conv2d { axes }),
        case(IN_F16).normal(F16, [3, 2, 2, 48]).normal(F32, [9, 7, 5, 6]).node(volume),
        case(IN_F32).normal(F32, [3, 3, 1, 5]).normal(F32, image).node(Conv::Conv2dDw { axes }),
        case(IN_F32).normal(F32, [4, 5, 6, 1]).normal(F32, [11, 6, 1, 1]).node(Conv::Transpose1d { stride: 2 }),
        case(IN_F16).normal(F16, [3, 2, 5, 6]).normal(F32, [7, 6, 6, 2]).node(Conv::Transpose2d { stride: 2 }),
    ]
}

fn pool() -> Vec<Draft> {
    let axis = PoolAxis { kernel: 3, stride: 2, padding: 1 };
    let axes = [axis; 2];
    let kinds = [("maximum", PoolKind::Max), ("mean", PoolKind::Average)];
    let (image, pooled) = ([13, 11, 3, 2], [7, 6, 3, 2]);
    let rows = |(name, kind)| {
        let case = || case(IN_F32).variant(name);
        [
            case().distinct([29, 5, 2, 1]).node(Pool::Pool1d { kind, axis }),
            case().distinct(image).node(Pool::Pool2d { kind, axes }),
            case().normal(F32, pooled).distinct(image).node(Pool::Pool2dBack { kind, axes }),
        ]
    };
    kinds.map(rows).into_iter().flatten().collect()
}

fn upscale() -> Vec<Draft> {
    let mode = |mode| Upscale { mode, align_corners: false, antialias: false };
    let bilinear = mode(ScaleMode::Bilinear);
    let (larger, smaller) = ([29, 20, 3, 2], [7, 5, 3, 2]);
    let rows = [
        ("nearest", mode(ScaleMode::Nearest), larger),
        ("bilinear", bilinear, larger),
        ("bilinear with aligned corners", Upscale { align_corners: true, ..bilinear }, larger),
        ("bilinear with antialiasing", Upscale { antialias: true, ..bilinear }, smaller),
        ("bicubic", mode(ScaleMode::Bicubic), larger),
    ];
    let row = |(name, op, ne)| case(IN_F32).variant(name).normal(F32, [13, 9, 3, 2]).node_as(op, F32, ne);
    rows.map(row).into()
}

fn window() -> Vec<Draft> {
    let (image, windows) = ([5, 13, 11, 1], [5, 4, 4, 12]);
    vec![
        case(EQUAL).normal(F32, image).node(Window::Part { columns: 4, rows: 3, size: 4 }),
        case(EQUAL).normal(F32, windows).node_as(Window::Unpart { size: 4 }, F32, image),
        case(EQUAL).normal(F16, [6, 13, 1, 1]).node(Window::GetRelPos),
        case(IN_F32)
            .normal(F32, [49, 15, 2, 1])
            .normal(F32, [7, 3, 5, 2])
            .normal(F32, [7, 3, 5, 2])
            .node(Window::AddRelPos),
    ]
}
