//! Random sequences of transfers and products: weights stay packed, and every access sees the right bytes.

use super::*;
use crate::cpu::panel::PANEL_ROWS;

/// A stack of matrices (experts), a vector, and their product.
struct Case {
    name: &'static str,
    graph: Arc<Graph>,
    a: TensorId,
    c: TensorId,
}

fn product_of(name: &'static str, dtype: DType, [k, m, experts]: [usize; 3]) -> Case {
    let mut g = Builder::new();
    let a = g.leaf(dtype, [k, m, experts, 1]).unwrap();
    let c = if experts == 1 {
        let b = g.leaf(DType::F32, [k, 2, 1, 1]).unwrap();
        g.node(MulMat::PLAIN, &[Some(a), Some(b)]).unwrap()
    } else {
        let (b, ids) = (g.leaf(DType::F32, [k, 1, 3, 1]).unwrap(), g.leaf(DType::I32, [2, 3, 1, 1]).unwrap());
        g.node(MulMat::BY_ID, &[Some(a), Some(b), Some(ids)]).unwrap()
    };
    Case { name, graph: Arc::new(g.build()), a, c }
}

/// Reads, partial and whole writes, fills, copies to and from and inside, and failing uploads, in any order: each sees and leaves
/// the bytes that a plain vector has, and each product in between finds panels.
#[test]
fn products_find_panels_after_any_transfers() {
    let cases = [
        product_of("Q4_0", DType::Q4_0, [K, M, 1]),
        product_of("Q5_0", DType::Q5_0, [K, 96, 1]),
        product_of("Q6_K", DType::Q6_K, [2 * K, 48, 1]),
        product_of("BF16", DType::BF16, [96, 112, 1]),
        product_of("F16", DType::F16, [90, 112, 1]),
        product_of("experts of Q8_0", DType::Q8_0, [K, 32, 4]),
    ];
    for (number, Case { name, graph, a, c }) in cases.iter().enumerate() {
        let (mut fixture, mut rng) = (Fixture::new(), Rng::with_seed(number as u64));
        let size = graph.slot_sizes()[0];
        let (buffer, plain, other) = (fixture.buffer(size), fixture.buffer(size), fixture.buffer(size));
        let program = fixture.program(graph);
        // Nothing is packed in `plain`.
        memory(&plain).write_map().pin(0..size);
        fill(&mut fixture, &buffer, graph, &mut rng, 4);
        let (at, n) = (offset_of(graph, *a), graph.tensor(*a).unwrap().desc.extent());
        let desc = graph.tensor(*a).unwrap().desc;
        let mut want = row_content(memory(&buffer));
        let mut want_other = vec![0; size];
        fixture.run(&program, &buffer);
        assert_eq!(fixture.counts.take(), (1, 0), "{name}");
        want = {
            // the result
            let mut now = row_content(memory(&buffer));
            now[at..at + n].copy_from_slice(&want[at..at + n]);
            now
        };
        for step in 0..150 {
            // A range of the weight, from a few bytes to all of it.
            let bytes = (n >> rng.u32(..16)).max(1);
            let from = at + rng.usize(..=n - bytes);
            let region = buffer.region(from as u64, bytes as u64).unwrap();
            let text = format!("{name}, step {step}: {bytes} bytes from {}", from - at);
            match rng.usize(..8) {
                0 => assert!(fixture.read(&buffer, from, bytes) == want[from..from + bytes], "{text}"),
                1 => {
                    let values =
                        weights(&mut rng, desc.dtype(), n / desc.dtype().block_bytes() * desc.dtype().block_len());
                    fixture.write(&buffer, from, &values[from - at..from - at + bytes]);
                    want[from..from + bytes].copy_from_slice(&values[from - at..from - at + bytes]);
                }
                2 => {
                    fixture.queue.fill(region, 1).unwrap();
                    want[from..from + bytes].fill(1);
                }
                3 => {
                    let to = other.region(from as u64, bytes as u64).unwrap();
                    assert!(fixture.queue.copy_from(region, to, None).unwrap().is_submitted());
                    want_other[from..from + bytes].copy_from_slice(&want[from..from + bytes]);
                }
                4 => {
                    let of_other = other.region(from as u64, bytes as u64).unwrap();
                    assert!(fixture.queue.copy_from(of_other, region, None).unwrap().is_submitted());
                    want[from..from + bytes].copy_from_slice(&want_other[from..from + bytes]);
                }
                5 => {
                    let to = at + rng.usize(..=n - bytes);
                    let to_region = buffer.region(to as u64, bytes as u64).unwrap();
                    assert!(fixture.queue.copy_from(region, to_region, None).unwrap().is_submitted());
                    want.copy_within(from..from + bytes, to);
                }
                6 => {
                    // Whole panels, as the experts of a stack.
                    let panel = PANEL_ROWS * desc.row_bytes();
                    let (first, panels) = (rng.usize(..n / panel), n / panel);
                    let count = 1 + rng.usize(..panels - first);
                    let (from, bytes) = (at + first * panel, count * panel);
                    assert!(fixture.read(&buffer, from, bytes) == want[from..from + bytes], "{text}");
                }
                _ => {
                    // A whole upload that fails, or ends well.
                    let cut = if rng.bool() { rng.usize(..n) } else { usize::MAX };
                    let (values, mut done) = (want[at..at + n].to_vec(), 0);
                    let upload = memory(&buffer).upload(at, n, Some(&desc), &turn, &mut |piece| {
                        if done + piece.len() > cut {
                            return Err(SourceError::new("cut off"));
                        }
                        piece.copy_from_slice(&values[done..done + piece.len()]);
                        done += piece.len();
                        Ok(())
                    });
                    if upload.is_err() {
                        fixture.write(&buffer, at, &values);
                    }
                }
            }
            fixture.queue.mark().wait(deadline()).unwrap();
            assert!(row_content(memory(&buffer)) == want, "{text}");
            assert!(row_content(memory(&other)) == want_other, "{text}");
            if rng.u8(..3) == 0 {
                fixture.run(&program, &buffer);
                assert_eq!(fixture.counts.take(), (1, 0), "{text}");
                fixture.write(&plain, 0, &want);
                fixture.run(&program, &plain);
                assert_eq!(fixture.counts.take(), (0, 1), "{text}");
                want = row_content(memory(&plain));
                assert!(row_content(memory(&buffer)) == want, "{text}");
            }
        }
        assert!(want[offset_of(graph, *c)..].iter().any(|&byte| byte != 0));
    }
}
