//! Which weights of a graph are packed into panels before its products run.

use super::*;
use crate::device::FIRST_REPACK_DELAY;

/// Graphs in which a product's weight has a second use, which decides whether the weight is packed.
#[test]
fn second_use_of_a_weight_decides_packing() {
    fn view(g: &mut Builder, a: TensorId, ne: [usize; 4], offset: usize) -> TensorId {
        let dtype = g.tensor(a).unwrap().desc.dtype();
        g.view(a, TensorDesc::contiguous(dtype, ne).unwrap(), offset).unwrap()
    }
    fn product_of(g: &mut Builder, a: TensorId) {
        let ne = g.tensor(a).unwrap().desc.ne();
        let b = g.leaf(DType::F32, [ne[0], 1, 1, 1]).unwrap();
        g.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
    }
    const ROW: usize = K / 32 * 18;
    type Using = fn(&mut Builder, TensorId);
    let cases: &[(&str, bool, Using)] = &[
        ("none", true, |_, _| ()),
        ("another product", true, |g, a| product_of(g, a)),
        ("an embedding", true, |g, a| {
            let ids = g.leaf(DType::I32, [5, 1, 1, 1]).unwrap();
            g.node(Rows::GetRows, &[Some(a), Some(ids)]).unwrap();
        }),
        ("an embedding of whole panels", true, |g, a| {
            let (rows, ids) = (view(g, a, [K, 32, 1, 1], 16 * ROW), g.leaf(DType::I32, [5, 1, 1, 1]).unwrap());
            g.node(Rows::GetRows, &[Some(rows), Some(ids)]).unwrap();
        }),
        ("an embedding across panels", false, |g, a| {
            let (rows, ids) = (view(g, a, [K, 32, 1, 1], 8 * ROW), g.leaf(DType::I32, [5, 1, 1, 1]).unwrap());
            g.node(Rows::GetRows, &[Some(rows), Some(ids)]).unwrap();
        }),
        ("products of panels", true, |g, a| {
            for (rows, from) in [(M / 2, 0), (M / 2, M / 2), (16, 496)] {
                let part = view(g, a, [K, rows, 1, 1], from * ROW);
                product_of(g, part);
            }
        }),
        ("a product of part of a panel", false, |g, a| {
            let part = view(g, a, [K, 24, 1, 1], 0);
            product_of(g, part);
        }),
        ("a product across panels", false, |g, a| {
            let part = view(g, a, [K, 16, 1, 1], ROW);
            product_of(g, part);
        }),
        ("a product of other rows", false, |g, a| {
            let part = view(g, a, [2 * K, M / 2, 1, 1], 0);
            product_of(g, part);
        }),
        ("a product of another type", false, |g, a| {
            let desc = TensorDesc::contiguous(DType::IQ4_NL, [K, M, 1, 1]).unwrap();
            let part = g.view(a, desc, 0).unwrap();
            product_of(g, part);
        }),
        ("a copy", false, |g, a| {
            g.node(CopyOp::Dup, &[Some(a)]).unwrap();
        }),
        ("a write", false, |g, a| {
            let (part, ids) = (view(g, a, [K, 1, 1, 1], 100 * ROW), g.leaf(DType::I32, [1, 1, 1, 1]).unwrap());
            let (row, onto) = (g.leaf(DType::F32, [K, 1, 1, 1]).unwrap(), view(g, part, [K, 1, 1, 1], 0));
            g.node_into(Rows::SetRows, &[Some(row), Some(ids), Some(part)], onto).unwrap();
        }),
    ];
    for (name, packed, more) in cases {
        let (mut fixture, mut rng) = (Fixture::new(), Rng::with_seed(2));
        let case = product_graph(DType::Q4_0, more);
        let (program, buffer) = (fixture.program(&case.graph), fixture.buffer(case.graph.slot_sizes()[0]));
        fill(&mut fixture, &buffer, &case.graph, &mut rng, 1);
        // A copy of the memory that is pinned, so that nothing is packed in it.
        let copy = fixture.buffer(case.graph.slot_sizes()[0]);
        fixture.write(&copy, 0, &row_content(memory(&buffer)));
        memory(&copy).write_map().pin(0..case.graph.slot_sizes()[0]);
        for _ in 0..2 {
            fixture.run(&program, &copy);
            fixture.counts.take();
            fixture.run(&program, &buffer);
            let (panels, rows) = fixture.counts.take();
            assert!((panels > 0) == *packed && (rows > 0) != *packed, "{name}: {panels}, {rows}");
            assert!(row_content(memory(&buffer)) == row_content(memory(&copy)), "{name}");
        }
        // A graph without the second use packs the weight. The graph with the second use converts it back if it needs rows.
        let first = fixture.program(&self::product_graph(DType::Q4_0, |_, _| ()).graph);
        let late = fixture.buffer(case.graph.slot_sizes()[0]);
        fill(&mut fixture, &late, &case.graph, &mut Rng::with_seed(2), 1);
        fixture.run(&first, &late);
        assert_eq!(fixture.counts.take(), (1, 0), "{name}");
        (0..2).for_each(|_| fixture.run(&program, &late));
        assert!(row_content(memory(&late)) == row_content(memory(&copy)), "{name}");
        fixture.run(&first, &late);
        assert_eq!(is_packed(&late, &case.graph, case.a), *packed, "{name}");
    }
}

/// A graph that writes rows, and one that multiplies them.
struct CacheGraphs {
    written: Arc<Graph>,
    row: TensorId,
    ids: TensorId,
    read: ProductGraph,
}

fn cache_graphs() -> CacheGraphs {
    let mut g = Builder::new();
    let cache = g.leaf(DType::Q8_0, [K, M, 1, 1]).unwrap();
    let (row, ids) = (g.leaf(DType::F32, [K, 1, 1, 1]).unwrap(), g.leaf(DType::I32, [1, 1, 1, 1]).unwrap());
    let desc = g.tensor(cache).unwrap().desc;
    let onto = g.view(cache, desc, 0).unwrap();
    g.node_into(Rows::SetRows, &[Some(row), Some(ids), Some(cache)], onto).unwrap();
    let written = Arc::new(g.build());
    CacheGraphs { written, row, ids, read: product_graph(DType::Q8_0, |_, _| ()) }
}

/// A cache is written by one graph and read by the next, 1, 16, or more times: it is converted back and forth ever more rarely
/// while both go on, and is packed again once only products use it.
#[test]
fn a_written_cache_is_packed_again_after_a_delay() {
    let CacheGraphs { written, row, ids, read } = cache_graphs();
    for reads in [1, 16, 40] {
        let (mut fixture, mut rng) = (Fixture::new(), Rng::with_seed(3));
        let bytes = read.graph.slot_sizes()[0].max(written.slot_sizes()[0]);
        let (buffer, writer, reader) = (fixture.buffer(bytes), fixture.program(&written), fixture.program(&read.graph));
        fixture.write(&buffer, 0, &weights(&mut rng, DType::Q8_0, K * M));
        // By product: whether it found panels.
        let mut found = Vec::new();
        for step in 0..200 / reads {
            fixture.write(&buffer, offset_of(&written, row), &weights(&mut rng, DType::F32, K));
            fixture.write(&buffer, offset_of(&written, ids), &(100i32 + step).to_le_bytes());
            fixture.run(&writer, &buffer);
            for _ in 0..reads {
                fixture.run(&reader, &buffer);
                found.push(fixture.counts.take() == (1, 0));
            }
        }
        assert_eq!(
            fixture.read(&buffer, offset_of(&read.graph, read.c), 4 * 2 * M),
            product_without_packing(&read, &row_content(memory(&buffer)))
        );
        // Each conversion to rows is followed by twice as many products of rows, if there are so many before the end.
        let runs: Vec<(bool, usize)> = found.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect();
        let as_rows: Vec<usize> = runs.iter().filter(|run| !run.0).map(|run| run.1).collect();
        let (last, whole) = as_rows.split_last().unwrap();
        let doubling = (0..).map(|n| (FIRST_REPACK_DELAY as usize) << n);
        assert!(whole.iter().copied().eq(doubling.clone().take(whole.len())), "{reads}: {runs:?}");
        assert!(*last <= doubling.clone().nth(whole.len()).unwrap() && whole.len() >= 2, "{reads}: {runs:?}");
        // The products alone pack it again, and keep it packed.
        let mut turns = 0;
        while fixture.counts.take() != (1, 0) {
            fixture.run(&reader, &buffer);
            turns += 1;
            assert!(turns <= 1 + (FIRST_REPACK_DELAY << (whole.len() + 1)), "{reads}: {turns} products of rows");
        }
        (0..3).for_each(|_| fixture.run(&reader, &buffer));
        assert_eq!(fixture.counts.take(), (3, 0));
    }
}

#[test]
fn experts_are_packed_as_one_stack() {
    let mut g = Builder::new();
    let a = g.leaf(DType::Q4_0, [K, 64, 8, 1]).unwrap();
    let (b, ids) = (g.leaf(DType::F32, [K, 1, 3, 1]).unwrap(), g.leaf(DType::I32, [2, 3, 1, 1]).unwrap());
    let c = g.node(MulMat::BY_ID, &[Some(a), Some(b), Some(ids)]).unwrap();
    let plane = TensorDesc::contiguous(DType::Q4_0, [K, 64, 1, 1]).unwrap();
    let third = g.view(a, plane, 3 * plane.extent()).unwrap();
    let b = g.leaf(DType::F32, [K, 1, 1, 1]).unwrap();
    let d = g.node(MulMat::PLAIN, &[Some(third), Some(b)]).unwrap();
    let graph = Arc::new(g.build());
    let (mut fixture, mut rng) = (Fixture::new(), Rng::with_seed(4));
    let (buffer, plain) = (fixture.buffer(graph.slot_sizes()[0]), fixture.buffer(graph.slot_sizes()[0]));
    let program = fixture.program(&graph);
    fill(&mut fixture, &buffer, &graph, &mut rng, 8);
    fixture.write(&plain, 0, &row_content(memory(&buffer)));
    memory(&plain).write_map().pin(0..graph.slot_sizes()[0]);
    fixture.run(&program, &buffer);
    assert_eq!(fixture.counts.take(), (2, 0));
    assert!(is_packed(&buffer, &graph, a) && is_packed(&buffer, &graph, third));
    fixture.run(&program, &plain);
    assert_eq!(fixture.counts.take(), (0, 2));
    assert!(row_content(memory(&buffer)) == row_content(memory(&plain)));
    assert!(
        fixture
            .read(&buffer, offset_of(&graph, c), 64)
            .iter()
            .chain(&fixture.read(&buffer, offset_of(&graph, d), 64))
            .any(|&b| b != 0)
    );
}

/// Experts that were uploaded one by one, all of them or some, are panels of the stack; a product packs the rest.
#[test]
fn experts_uploaded_one_by_one_stay_packed() {
    const EXPERTS: usize = 8;
    let mut g = Builder::new();
    let a = g.leaf(DType::Q8_0, [K, 64, EXPERTS, 1]).unwrap();
    let (b, ids) = (g.leaf(DType::F32, [K, 1, 3, 1]).unwrap(), g.leaf(DType::I32, [2, 3, 1, 1]).unwrap());
    g.node(MulMat::BY_ID, &[Some(a), Some(b), Some(ids)]).unwrap();
    let graph = Arc::new(g.build());
    let expert = TensorDesc::contiguous(DType::Q8_0, [K, 64, 1, 1]).unwrap();
    for packed in [0..EXPERTS, 0..0, 0..3, 3..5, 5..EXPERTS] {
        let mut fixture = Fixture::new();
        let (buffer, program) = (fixture.buffer(graph.slot_sizes()[0]), fixture.program(&graph));
        fill(&mut fixture, &buffer, &graph, &mut Rng::with_seed(4), 8);
        let content = row_content(memory(&buffer));
        for number in packed.clone() {
            let at = offset_of(&graph, a) + number * expert.extent();
            let mut rest = &content[at..at + expert.extent()];
            let fill = &mut |piece: &mut [u8]| {
                piece.copy_from_slice(&rest[..piece.len()]);
                rest = &rest[piece.len()..];
                Ok(())
            };
            memory(&buffer).upload(at, expert.extent(), Some(&expert), &turn, fill).unwrap();
        }
        assert_eq!(memory(&buffer).read_map().packed().len(), packed.len());
        let all = packed.len() == EXPERTS;
        assert_eq!(is_packed(&buffer, &graph, a), all, "{packed:?}");
        let version = memory(&buffer).read_map().version();
        (0..2).for_each(|_| fixture.run(&program, &buffer));
        assert_eq!(fixture.counts.take(), (2, 0), "{packed:?}");
        assert!(
            is_packed(&buffer, &graph, a) && (memory(&buffer).read_map().version() == version) == all,
            "{packed:?}"
        );
        let weights = offset_of(&graph, a)..offset_of(&graph, a) + EXPERTS * expert.extent();
        assert!(row_content(memory(&buffer))[weights.clone()] == content[weights], "{packed:?}");
    }
}

/// Tensors that cannot be packed, or are too small, stay row-major.
#[test]
fn small_or_unaligned_tensors_are_not_packed() {
    for (dtype, ne) in [
        (DType::Q4_0, [K, M + 8, 1, 1]), // not a multiple of sixteen rows
        (DType::Q4_0, [K, 64, 1, 1]),    // fewer than `MIN_PACKED_BYTES`
    ] {
        let mut g = Builder::new();
        let (a, b) = (g.leaf(dtype, ne).unwrap(), g.leaf(DType::F32, [K, 1, 1, 1]).unwrap());
        g.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
        let graph = Arc::new(g.build());
        let mut fixture = Fixture::new();
        let (buffer, program) = (fixture.buffer(graph.slot_sizes()[0]), fixture.program(&graph));
        fixture.run(&program, &buffer);
        assert_eq!(fixture.counts.take(), (0, 1), "{dtype} {ne:?}");
    }
    let strided = TensorDesc::strided(DType::Q4_0, [K, M, 1, 1], [18, 160, 160 * M, 160 * M]).unwrap();
    let rows_too_long = TensorDesc::contiguous(DType::F16, [1 << 17, 16, 1, 1]).unwrap();
    assert!(!fits_panels(&strided) && !fits_panels(&rows_too_long));
    assert!(PanelSpan::of(usize::MAX - 100, &TensorDesc::contiguous(DType::Q4_0, [K, M, 1, 1]).unwrap()).is_none());
}
