//! WIN_PART, WIN_UNPART, GET_REL_POS and ADD_REL_POS: results of every device against their index formulas, and the shape rules.

use crate::devices::devices;
use crate::layouts::{LAYOUTS, layout};
use fanout::ops::window::Window;
use fanout::ops::{Op, OpCode, OpParams, OutputSpec};
use fanout::tensor::DType::{self, BF16, F16, F32};
use fanout_testing::compare::assert_close;
use fanout_testing::inputs::{at, index, normal};
use fanout_testing::op_case::Case;

#[test]
fn images_are_parted_and_joined() {
    let cases = [([1, 1, 1, 1], 1), ([3, 8, 6, 1], 2), ([5, 7, 9, 1], 4), ([2, 3, 2, 1], 5), ([1100, 5, 4, 1], 3)];
    for (number, (image, size)) in cases.into_iter().enumerate() {
        let (image, size): ([usize; 4], usize) = (image, size);
        let [c, w, h, _] = image;
        let (columns, rows) = (w.div_ceil(size), h.div_ceil(size));
        let parts = [c, size, size, columns * rows];
        let mut case = Case::new();
        let src = case.leaf_with_desc(layout(F32, image, number % LAYOUTS), &normal(1, c * w * h));
        let part = Window::Part { columns: columns as i32, rows: rows as i32, size: size as i32 };
        let windows = case.b.node(part, &[Some(src)]).unwrap();
        let back = case.b.leaf_with_desc(layout(F32, image, (number + 1) % LAYOUTS)).unwrap();
        case.b.node_into(Window::Unpart { size: size as i32 }, &[Some(windows)], back).unwrap();
        let case = case.build();
        let values = case.values(src);
        let want: Vec<f64> = (0..parts.iter().product())
            .map(|k| {
                let [c, x, y, p] = index(parts, k);
                let (x, y) = (p % columns * size + x, p / columns * size + y);
                if x < w && y < h { values[at(image, [c, x, y, 0])] } else { 0.0 }
            })
            .collect();
        for on in devices() {
            let run = case.run(on);
            assert_eq!(run.values(windows), want, "{image:?} {size} {}", on.name);
            assert_eq!(run.values(back), values, "{image:?} {size} {}", on.name);
        }
    }
}

#[test]
fn relative_positions_are_selected_bit_by_bit() {
    for dtype in [F16, BF16] {
        for (c, k) in [(1, 1), (3, 4), (64, 14)] {
            let table = [c, 2 * k - 1, 1, 1];
            let mut rng = fastrand::Rng::with_seed(1);
            let bytes: Vec<u8> = (0..2 * c * (2 * k - 1)).map(|_| rng.u8(..)).collect();
            let mut case = Case::new();
            let src = case.raw(dtype, table, bytes.clone());
            let dst = case.b.node(Window::GetRelPos, &[Some(src)]).unwrap();
            let case = case.build();
            let want: Vec<u8> = (0..c * k * k)
                .flat_map(|n| {
                    let [i, x, y, _] = index([c, k, k, 1], n);
                    let from = 2 * at(table, [i, k - 1 - x + y, 0, 0]);
                    [bytes[from], bytes[from + 1]]
                })
                .collect();
            for on in devices() {
                assert!(case.run(on).bytes(dst) == want, "{dtype} {c} {k} {}", on.name);
            }
        }
    }
}

#[test]
fn relative_positions_are_added() {
    for ([n, a, b, c], n3, in_place) in
        [([1, 1, 1, 1], 1, false), ([4, 2, 3, 2], 1, true), ([3, 5, 1, 2], 2, false), ([40, 3, 2, 1], 1, true)]
    {
        let (shape, embedding) = ([n * n, a * b, c, n3], [n, a, b, c]);
        let mut case = Case::new();
        let count = embedding.iter().product();
        let scores = case.leaf(F32, shape, &normal(1, shape.iter().product()));
        let pw = case.leaf(F32, embedding, &normal(2, count));
        let ph = case.leaf(F32, embedding, &normal(3, count));
        let srcs = [Some(scores), Some(pw), Some(ph)];
        let dst = if in_place {
            let desc = case.b.tensor(scores).unwrap().desc;
            let dst = case.b.view(scores, desc, 0).unwrap();
            case.b.node_into(Window::AddRelPos, &srcs, dst).unwrap()
        } else {
            case.b.node(Window::AddRelPos, &srcs).unwrap()
        };
        let case = case.build();
        let (mut want, pw, ph) = (case.values(scores), case.values(pw), case.values(ph));
        // As ggml's loops.
        for p in 0..a * b * c {
            for i in 0..n {
                for j in 0..n {
                    want[p * n * n + i * n + j] += ph[p * n + i];
                    want[p * n * n + j * n + i] += pw[p * n + i];
                }
            }
        }
        for on in devices() {
            assert_close(&case.run(on).values(dst), &want, 1e-6, 1e-6, &format!("{shape:?} {}", on.name));
        }
    }
}

#[test]
fn parameters_survive_the_wire() {
    for op in [
        Window::Part { columns: 2, rows: 3, size: 4 },
        Window::Unpart { size: 5 },
        Window::GetRelPos,
        Window::AddRelPos,
    ]
    .map(Op::from)
    {
        assert_eq!(Op::decode(op.code(), &op.encode()).unwrap(), Some(op));
    }
    let in_place = OpParams::default().with_int(0, 1);
    assert_eq!(Op::decode(OpCode::AddRelPos, &in_place).unwrap(), Some(Window::AddRelPos.into()));
    for (code, words) in [
        (OpCode::WinPart, [0, 1, 1]),
        (OpCode::WinPart, [1, -1, 1]),
        (OpCode::WinPart, [1, 1, 0]),
        (OpCode::WinUnpart, [0, 1, 1]),
    ] {
        let params = words.iter().enumerate().fold(OpParams::default(), |p, (k, &word)| p.with_int(k, word));
        assert!(Op::decode(code, &params).is_err(), "{code} {words:?}");
    }
}

#[test]
fn invalid_nodes_are_rejected() {
    let built = |op: Window, srcs: &[(DType, [usize; 4])], dst: (DType, [usize; 4])| {
        let mut case = Case::new();
        let srcs: Vec<_> = srcs.iter().map(|&(dtype, ne)| case.b.leaf(dtype, ne).ok()).collect();
        case.b.node_with_output(op, &srcs, OutputSpec { dtype: dst.0, ne: dst.1 }).is_ok()
    };
    let part = |columns, rows, size| Window::Part { columns, rows, size };
    let (image, parts) = ((F32, [3, 7, 5, 1]), (F32, [3, 4, 4, 4]));
    assert!(built(part(2, 2, 4), &[image], parts));
    assert!(!built(part(2, 3, 4), &[image], (F32, [3, 4, 4, 6])), "a row of windows too many");
    assert!(!built(part(2, 2, 4), &[(F32, [3, 7, 5, 2])], parts), "two images");
    assert!(!built(part(2, 2, 4), &[(F16, image.1)], parts), "another type");
    assert!(!built(part(i32::MAX, i32::MAX, 1), &[image], parts));
    let unpart = Window::Unpart { size: 4 };
    assert!(built(unpart, &[parts], image));
    assert!(!built(unpart, &[(F32, [3, 4, 4, 3])], image), "a window is missing");
    assert!(!built(unpart, &[parts], (F32, [3, 9, 5, 1])), "a wider image");
    assert!(!built(unpart, &[(F32, [3, 4, 3, 4])], image), "windows that are no squares");
    assert!(!built(unpart, &[parts], (F32, [2, 7, 5, 1])), "other channels");
    assert!(built(Window::GetRelPos, &[(F16, [8, 7, 1, 1])], (F16, [8, 4, 4, 1])));
    assert!(!built(Window::GetRelPos, &[(F16, [8, 6, 1, 1])], (F16, [8, 3, 3, 1])), "an even number of rows");
    assert!(!built(Window::GetRelPos, &[(F32, [8, 7, 1, 1])], (F16, [8, 4, 4, 1])), "another type");
    let embedding = (F32, [4, 2, 3, 5]);
    let scores = (F32, [16, 6, 5, 1]);
    assert!(built(Window::AddRelPos, &[scores, embedding, embedding], scores));
    assert!(!built(Window::AddRelPos, &[scores, embedding, (F32, [4, 3, 2, 5])], scores), "two shapes");
    assert!(
        !built(Window::AddRelPos, &[(F32, [15, 6, 5, 1]), embedding, embedding], (F32, [15, 6, 5, 1])),
        "no square"
    );
    assert!(!built(Window::AddRelPos, &[scores, embedding], scores), "two sources");
}
