//! Conditions of launches, and where converted columns come from.

use super::super::access::{Access, KernelArguments};
use super::super::columns::{ColumnSource, ConvertedColumns, Placed};
use super::super::driver::Gpu;
use super::super::kernel::{ColumnConversion, ColumnTable, Grid, KernelLaunch, Ptr, QuantizingLaunch};
use super::{LaunchCondition, LayoutCondition};
use crate::graph::SlotOffset;
use crate::ops::OpCode;
use crate::tensor::{DType, TensorDesc};
use bytemuck::{Pod, Zeroable};

/// Spans that must all be packed.
fn packed(spans: &[usize]) -> LayoutCondition {
    LayoutCondition { spans: spans.to_vec(), packed: true }
}

/// Spans, one of which must not be packed.
fn not_all(spans: &[usize]) -> LayoutCondition {
    LayoutCondition { spans: spans.to_vec(), packed: false }
}

/// The spans of the conditions of each alternative, and whether they must be packed.
fn alternatives_of(condition: &LaunchCondition) -> Vec<Vec<(Vec<usize>, bool)>> {
    let of = |condition: &LayoutCondition| (condition.spans.clone(), condition.packed);
    condition.0.iter().map(|all| all.iter().map(of).collect()).collect()
}

#[test]
fn a_launch_runs_if_all_conditions_of_an_alternative_hold() {
    // For each condition, whether it holds while these spans are packed: none, 0, 1, both.
    for (name, alternatives, want) in [
        ("without alternatives", vec![], [false; 4]),
        ("without conditions", vec![vec![]], [true; 4]),
        ("one span", vec![vec![packed(&[1])]], [false, false, true, true]),
        ("all spans", vec![vec![packed(&[0, 1])]], [false, false, false, true]),
        ("not one span", vec![vec![not_all(&[1])]], [true, true, false, false]),
        ("not all spans", vec![vec![not_all(&[0, 1])]], [true, true, true, false]),
        ("a node of a group", vec![vec![not_all(&[0, 1]), packed(&[0])]], [false, true, false, false]),
        ("a node of a group in rows", vec![vec![not_all(&[0, 1]), not_all(&[0])]], [true, false, true, false]),
        ("alternatives", vec![vec![packed(&[0, 1])], vec![not_all(&[0, 1]), packed(&[1])]], [false, false, true, true]),
    ] {
        let condition = LaunchCondition(alternatives);
        let got = [[false; 2], [true, false], [false, true], [true; 2]].map(|packed| condition.holds(|i| packed[i]));
        assert_eq!(got, want, "{name}");
    }
}

#[test]
fn equal_alternatives_are_one() {
    let mut condition = LaunchCondition::default();
    let steps: [(&[LayoutCondition], usize); 6] = [
        (&[packed(&[0, 1])], 1),
        (&[packed(&[0, 1])], 1),
        (&[not_all(&[0, 1])], 2),
        (&[not_all(&[0, 1]), packed(&[0])], 3),
        (&[not_all(&[0, 1])], 3),
        (&[], 4),
    ];
    for (all, count) in steps {
        condition.add_alternative(all);
        assert_eq!(condition.0.len(), count);
    }
}

#[test]
fn spans_that_are_never_packed_decide_conditions() {
    // Span 1 is never packed.
    for (name, alternatives, want) in [
        ("without alternatives", vec![], vec![]),
        ("without conditions", vec![vec![]], vec![vec![]]),
        ("the span packed", vec![vec![packed(&[0, 1])]], vec![]),
        ("the span in rows", vec![vec![not_all(&[0, 1])]], vec![vec![]]),
        ("another span", vec![vec![packed(&[0])]], vec![vec![packed(&[0])]]),
        ("another span in rows", vec![vec![not_all(&[0, 2])]], vec![vec![not_all(&[0, 2])]]),
        ("a node of a group", vec![vec![not_all(&[0, 1]), packed(&[0])]], vec![vec![packed(&[0])]]),
        ("the node itself", vec![vec![not_all(&[0, 1]), packed(&[1])]], vec![]),
        ("alternatives", vec![vec![packed(&[1])], vec![packed(&[0])]], vec![vec![packed(&[0])]]),
    ] {
        let mut condition = LaunchCondition(alternatives);
        let before = condition.clone();
        let runs = condition.decide(|&span| span == 1);
        assert_eq!(alternatives_of(&condition), alternatives_of(&LaunchCondition(want)), "{name}");
        assert_eq!(runs, !condition.0.is_empty(), "{name}");
        for others in [[false; 2], [true, false], [false, true], [true; 2]] {
            let is_packed = |span: usize| [others[0], false, others[1]][span];
            assert_eq!(condition.holds(is_packed), before.holds(is_packed), "{name}, {others:?}");
        }
    }
}

/// Arguments without accesses.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Arguments([u64; 8]);

impl KernelArguments for Arguments {
    fn accesses(&self, _: &Grid) -> Result<Vec<Access>, &'static str> {
        Ok(Vec::new())
    }
}

/// A launch that differs from others by its number of blocks.
fn launch(blocks: u64) -> KernelLaunch {
    let (entry, grid) = (("mul_mat", "mul_mat_quantize"), Grid::line(blocks, 32));
    let gpu = Gpu::with_capability(80);
    KernelLaunch::new(OpCode::MulMat, &gpu, entry, grid, &[Ptr::Src(1), Ptr::Columns], &Arguments([0; 8])).unwrap()
}

/// Floats at a byte of slot 0.
fn floats(offset: usize, ne: [usize; 4]) -> Placed {
    Placed { place: SlotOffset { slot: 0, offset }, desc: TensorDesc::contiguous(DType::F32, ne).unwrap() }
}

/// The number of a conversion by `launch(blocks)`, and where it comes from. It is read from launch `next` on.
fn add(
    columns: &mut ConvertedColumns,
    source: Placed,
    blocks: u64,
    group: Option<usize>,
    next: usize,
) -> (usize, String) {
    let conversion = ColumnConversion { launch: launch(blocks), table: None, bytes: 100, column: 0, group };
    let (number, from) = columns.add(source, None, conversion, next);
    let from = match from {
        ColumnSource::Shared => "shared".to_owned(),
        ColumnSource::Launches(_, launch) => format!("launch {}", launch.blocks()),
        ColumnSource::Replace(index, launch, None) => format!("{index} is {}", launch.blocks()),
        ColumnSource::Replace(index, launch, Some((condition, other))) => {
            format!("{index} is {}, or {} if not {:?}", launch.blocks(), other.blocks(), condition.spans)
        }
    };
    (number, from)
}

const SHAPE: [usize; 4] = [256, 2, 1, 1];

/// Conversions; launch 3, which writes `SHAPE` at byte 0, can be replaced by launches that write columns in groups of 32 (7
/// blocks) and of 256 (8 blocks).
fn with_producer(unless: Option<LayoutCondition>) -> ConvertedColumns {
    let mut columns = ConvertedColumns::default();
    let replacement = |(group, blocks)| QuantizingLaunch { launch: launch(blocks), k: 256, group };
    columns.add_producer(floats(0, SHAPE), 3, unless, [(32, 7), (256, 8)].map(replacement).into());
    columns
}

#[test]
fn conversions_of_the_same_columns_are_shared() {
    let mut columns = ConvertedColumns::default();
    let x = floats(0, SHAPE);
    for (name, source, blocks, want) in [
        ("the first", x, 1, (0, "launch 1")),
        ("the same", x, 1, (0, "shared")),
        ("another form", x, 2, (1, "launch 2")),
        ("another place", floats(4096, SHAPE), 1, (2, "launch 1")),
        ("another shape, whose rows merge to the same ones", floats(0, [256, 1, 2, 1]), 1, (0, "shared")),
        ("the other form again", x, 2, (1, "shared")),
    ] {
        let (number, from) = add(&mut columns, source, blocks, Some(32), 5);
        assert_eq!((number, from.as_str()), want, "{name}");
    }
    assert_eq!((columns.use_at(0, 9), columns.use_at(3, 9)), (5..6, 0..0));
}

/// Columns of experts depend on the ids, too.
#[test]
fn gathered_columns_are_shared_with_their_table() {
    let mut columns = ConvertedColumns::default();
    let x = floats(0, SHAPE);
    let add = |columns: &mut ConvertedColumns, ids: Placed, blocks, next| {
        let table = Some(ColumnTable { launch: launch(blocks), source: 2 });
        let conversion = ColumnConversion { launch: launch(1), table, bytes: 100, column: 0, group: None };
        let (number, from) = columns.add(x, Some(ids), conversion, next);
        let launches = match from {
            ColumnSource::Launches(table, launch) => table.iter().chain([&launch]).map(KernelLaunch::blocks).collect(),
            _ => Vec::new(),
        };
        (number, launches)
    };
    let [ids, other] = [4096, 8192].map(|offset| floats(offset, SHAPE));
    assert_eq!(add(&mut columns, ids, 9, 5), (0, vec![9, 1]));
    assert_eq!(add(&mut columns, ids, 9, 7), (0, vec![]), "the same");
    assert_eq!(add(&mut columns, other, 9, 7), (1, vec![9, 1]), "other ids");
    assert_eq!(add(&mut columns, ids, 8, 7), (2, vec![8, 1]), "another table");
    assert_eq!(columns.use_at(0, 9), 5..7);
    columns.overwrite(&ids);
    assert_eq!(add(&mut columns, other, 9, 8), (1, vec![]), "unchanged ids");
    assert_eq!(add(&mut columns, ids, 9, 8), (3, vec![9, 1]), "changed ids");
}

#[test]
fn a_launch_is_replaced_by_one_that_also_quantises_its_result() {
    let strided = TensorDesc::strided(DType::F32, SHAPE, [4, 2048, 4096, 4096]).unwrap();
    let strided = Placed { desc: strided, ..floats(0, SHAPE) };
    for (name, source, group, want) in [
        ("groups of 32", floats(0, SHAPE), Some(32), "3 is 7"),
        ("groups of 256", floats(0, SHAPE), Some(256), "3 is 8"),
        ("a view in another shape", floats(0, [256, 1, 2, 1]), Some(256), "3 is 8"),
        ("columns of another length", floats(0, [128, 4, 1, 1]), Some(32), "launch 1"),
        ("other groups", floats(0, SHAPE), Some(64), "launch 1"),
        ("another form", floats(0, SHAPE), None, "launch 1"),
        ("one of the columns", floats(0, [256, 1, 1, 1]), Some(32), "launch 1"),
        ("another place", floats(1024, SHAPE), Some(32), "launch 1"),
        ("columns with gaps", strided, Some(32), "launch 1"),
    ] {
        let (number, from) = add(&mut with_producer(None), source, 1, group, 5);
        assert_eq!((number, from.as_str()), (0, want), "{name}");
    }
    // The launch does not run while a weight is in rows.
    let mut columns = with_producer(Some(not_all(&[0, 1])));
    let first = add(&mut columns, floats(0, SHAPE), 1, Some(32), 5);
    assert_eq!(first, (0, "3 is 7, or 1 if not [0, 1]".to_owned()));
    assert!(columns.use_at(0, 6).is_empty(), "no launch of its own");
    // A launch writes one form.
    assert_eq!(add(&mut columns, floats(0, SHAPE), 1, Some(32), 6), (0, "shared".to_owned()));
    assert_eq!(add(&mut columns, floats(0, SHAPE), 2, Some(256), 6), (1, "launch 2".to_owned()));
}

#[test]
fn columns_are_kept_from_the_launch_that_writes_them_to_the_last_reader() {
    let mut columns = with_producer(None);
    // Written by launch 3, read by 5; written and read between; and after it.
    add(&mut columns, floats(0, SHAPE), 1, Some(32), 5);
    add(&mut columns, floats(4096, SHAPE), 1, None, 4);
    add(&mut columns, floats(8192, SHAPE), 1, None, 6);
    let (offsets, _) = columns.place(0);
    assert_eq!(offsets, [0, 256, 0]);
    columns.use_at(0, 6);
    let (offsets, _) = columns.place(0);
    assert_eq!(offsets, [0, 256, 256]);
}

#[test]
fn columns_of_a_tensor_that_is_overwritten_are_converted_again() {
    for (name, written, is_current) in [
        ("the tensor", floats(0, SHAPE), false),
        ("its last element", floats(2044, [1, 1, 1, 1]), false),
        ("what lies behind it", floats(2048, SHAPE), true),
        ("another slot", Placed { place: SlotOffset { slot: 1, offset: 0 }, ..floats(0, SHAPE) }, true),
    ] {
        let mut columns = ConvertedColumns::default();
        add(&mut columns, floats(0, SHAPE), 1, None, 5);
        columns.overwrite(&written);
        let want = if is_current { (0, "shared") } else { (1, "launch 1") };
        let (number, from) = add(&mut columns, floats(0, SHAPE), 1, None, 6);
        assert_eq!((number, from.as_str()), want, "{name}, converted");

        let mut columns = with_producer(None);
        columns.overwrite(&written);
        let want = if is_current { "3 is 7" } else { "launch 1" };
        assert_eq!(add(&mut columns, floats(0, SHAPE), 1, Some(32), 5).1, want, "{name}, quantised by a launch");
    }
}
