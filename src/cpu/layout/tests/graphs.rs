//! Which tensors of a graph its products find in strips.

use super::*;

/// Graphs in which a product's weight has a second use: whether it is packed.
#[test]
fn a_second_use_in_the_graph_decides() {
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
        ("an embedding of whole strips", true, |g, a| {
            let (rows, ids) = (view(g, a, [K, 32, 1, 1], 16 * ROW), g.leaf(DType::I32, [5, 1, 1, 1]).unwrap());
            g.node(Rows::GetRows, &[Some(rows), Some(ids)]).unwrap();
        }),
        ("an embedding across strips", false, |g, a| {
            let (rows, ids) = (view(g, a, [K, 32, 1, 1], 8 * ROW), g.leaf(DType::I32, [5, 1, 1, 1]).unwrap());
            g.node(Rows::GetRows, &[Some(rows), Some(ids)]).unwrap();
        }),
        ("products of strips", true, |g, a| {
            for (rows, from) in [(M / 2, 0), (M / 2, M / 2), (16, 496)] {
                let part = view(g, a, [K, rows, 1, 1], from * ROW);
                product_of(g, part);
            }
        }),
        ("a product of part of a strip", false, |g, a| {
            let part = view(g, a, [K, 24, 1, 1], 0);
            product_of(g, part);
        }),
        ("a product across strips", false, |g, a| {
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
        let (mut rig, mut rng) = (Rig::new(), Rng::with_seed(2));
        let one = one(DType::Q4_0, more);
        let (program, buffer) = (rig.program(&one.graph), rig.buffer(one.graph.slot_sizes()[0]));
        fill(&mut rig, &buffer, &one.graph, &mut rng, 1);
        // The same with nothing packed.
        let copy = rig.buffer(one.graph.slot_sizes()[0]);
        rig.write(&copy, 0, &peek(memory(&buffer)));
        memory(&copy).alone().pin(0..one.graph.slot_sizes()[0]);
        for _ in 0..2 {
            rig.run(&program, &copy);
            rig.seen.take();
            rig.run(&program, &buffer);
            let (strips, rows) = rig.seen.take();
            assert!((strips > 0) == *packed && (rows > 0) != *packed, "{name}: {strips}, {rows}");
            assert!(peek(memory(&buffer)) == peek(memory(&copy)), "{name}");
        }
        // Packed by a graph that knows nothing of the second use, it is converted back for it, or not.
        let first = rig.program(&self::one(DType::Q4_0, |_, _| ()).graph);
        let late = rig.buffer(one.graph.slot_sizes()[0]);
        fill(&mut rig, &late, &one.graph, &mut Rng::with_seed(2), 1);
        rig.run(&first, &late);
        assert_eq!(rig.seen.take(), (1, 0), "{name}");
        (0..2).for_each(|_| rig.run(&program, &late));
        assert!(peek(memory(&late)) == peek(memory(&copy)), "{name}");
        rig.run(&first, &late);
        assert_eq!(is_packed(&late, &one.graph, one.a), *packed, "{name}");
    }
}

/// A cache written by one graph and read by the next: it is converted back once, and then left alone.
#[test]
fn a_cache_settles_plain() {
    let mut g = Builder::new();
    let cache = g.leaf(DType::Q8_0, [K, M, 1, 1]).unwrap();
    let (row, ids) = (g.leaf(DType::F32, [K, 1, 1, 1]).unwrap(), g.leaf(DType::I32, [1, 1, 1, 1]).unwrap());
    let desc = g.tensor(cache).unwrap().desc;
    let onto = g.view(cache, desc, 0).unwrap();
    g.node_into(Rows::SetRows, &[Some(row), Some(ids), Some(cache)], onto).unwrap();
    let written = Arc::new(g.build().unwrap());
    let read = one(DType::Q8_0, |_, _| ());
    let (mut rig, mut rng) = (Rig::new(), Rng::with_seed(3));
    let bytes = read.graph.slot_sizes()[0].max(written.slot_sizes()[0]);
    let (buffer, writer, reader) = (rig.buffer(bytes), rig.program(&written), rig.program(&read.graph));
    rig.write(&buffer, 0, &weights(&mut rng, DType::Q8_0, K * M));
    let mut kept = Vec::new();
    for step in 0..4 {
        rig.write(&buffer, at(&written, row), &weights(&mut rng, DType::F32, K));
        rig.write(&buffer, at(&written, ids), &(100i32 + step).to_le_bytes());
        rig.run(&writer, &buffer);
        rig.run(&reader, &buffer);
        kept.push(rig.seen.take());
    }
    assert_eq!(kept, [(1, 0), (0, 1), (0, 1), (0, 1)]);
    assert_eq!(rig.read(&buffer, at(&read.graph, read.c), 4 * 2 * M), plainly(&read, &peek(memory(&buffer))));
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
    let graph = Arc::new(g.build().unwrap());
    let (mut rig, mut rng) = (Rig::new(), Rng::with_seed(4));
    let (buffer, plain) = (rig.buffer(graph.slot_sizes()[0]), rig.buffer(graph.slot_sizes()[0]));
    let program = rig.program(&graph);
    fill(&mut rig, &buffer, &graph, &mut rng, 8);
    rig.write(&plain, 0, &peek(memory(&buffer)));
    memory(&plain).alone().pin(0..graph.slot_sizes()[0]);
    rig.run(&program, &buffer);
    assert_eq!(rig.seen.take(), (2, 0));
    assert!(is_packed(&buffer, &graph, a) && is_packed(&buffer, &graph, third));
    rig.run(&program, &plain);
    assert_eq!(rig.seen.take(), (0, 2));
    assert!(peek(memory(&buffer)) == peek(memory(&plain)));
    assert!(rig.read(&buffer, at(&graph, c), 64).iter().chain(&rig.read(&buffer, at(&graph, d), 64)).any(|&b| b != 0));
}

/// What cannot lie in strips, or is not worth it, never does.
#[test]
fn some_tensors_stay_as_they_are() {
    for (dtype, ne) in [
        (DType::Q4_0, [K, M + 8, 1, 1]), // no whole strips
        (DType::Q4_0, [K, 64, 1, 1]),    // small
    ] {
        let mut g = Builder::new();
        let (a, b) = (g.leaf(dtype, ne).unwrap(), g.leaf(DType::F32, [K, 1, 1, 1]).unwrap());
        g.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap();
        let graph = Arc::new(g.build().unwrap());
        let mut rig = Rig::new();
        let (buffer, program) = (rig.buffer(graph.slot_sizes()[0]), rig.program(&graph));
        rig.run(&program, &buffer);
        assert_eq!(rig.seen.take(), (0, 1), "{dtype} {ne:?}");
    }
    let strided = TensorDesc::strided(DType::Q4_0, [K, M, 1, 1], [18, 160, 160 * M, 160 * M]).unwrap();
    let rows_too_long = TensorDesc::contiguous(DType::F16, [1 << 17, 16, 1, 1]).unwrap();
    assert!(!in_strips(&strided) && !in_strips(&rows_too_long));
    assert!(Span::of(usize::MAX - 100, &TensorDesc::contiguous(DType::Q4_0, [K, M, 1, 1]).unwrap()).is_none());
}
