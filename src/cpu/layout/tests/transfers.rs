//! Uploads, downloads, fills and copies of packed ranges.

use super::*;

/// Every access to a packed tensor other than a product sees the uploaded bytes. The next product finds panels, whatever the
/// access.
#[test]
fn accesses_to_packed_tensors_see_row_bytes() {
    #[derive(PartialEq, Debug)]
    enum After {
        Packed,
        /// Row-major; the next product packs it again.
        MayPack,
    }
    type Access = fn(&mut Fixture, &Buffer, &ProductGraph, &mut Vec<u8>);
    let cases: &[(&str, After, Access)] = &[
        ("nothing", After::Packed, |_, _, _, _| ()),
        ("a read", After::Packed, |fixture, buffer, case, want| {
            let from = offset_of(&case.graph, case.a) + 1000;
            assert_eq!(fixture.read(buffer, from, 10), want[from..from + 10]);
        }),
        ("a read beside it", After::Packed, |fixture, buffer, case, want| {
            let from = offset_of(&case.graph, case.a) + case.graph.tensor(case.a).unwrap().desc.extent();
            assert_eq!(fixture.read(buffer, from, 64), want[from..from + 64]);
        }),
        ("a partial write", After::Packed, |fixture, buffer, case, want| {
            let to = offset_of(&case.graph, case.a) + 5000;
            fixture.write(buffer, to, &[1; 77]);
            want[to..to + 77].fill(1);
        }),
        ("a large partial write", After::Packed, |fixture, buffer, case, want| {
            let (to, n) = (offset_of(&case.graph, case.a), case.graph.tensor(case.a).unwrap().desc.extent() - 100);
            fixture.write(buffer, to, &vec![1; n]);
            want[to..to + n].fill(1);
        }),
        ("a whole write", After::MayPack, |fixture, buffer, case, want| {
            let (to, n) = (offset_of(&case.graph, case.a), case.graph.tensor(case.a).unwrap().desc.extent());
            fixture.write(buffer, to, &vec![1; n]);
            want[to..to + n].fill(1);
        }),
        ("a partial fill", After::Packed, |fixture, buffer, case, want| {
            let to = offset_of(&case.graph, case.a) + 5000;
            fixture.queue.fill(buffer.region(to as u64, 33).unwrap(), 1).unwrap();
            want[to..to + 33].fill(1);
        }),
        ("a fill of everything", After::MayPack, |fixture, buffer, _, want| {
            fixture.queue.fill(buffer.whole(), 0).unwrap();
            want.fill(0);
        }),
        ("a copy out of it within", After::Packed, |fixture, buffer, case, want| {
            let (from, to) = (offset_of(&case.graph, case.a) + 999, offset_of(&case.graph, case.c));
            let region = |at: usize| buffer.region(at as u64, 1234).unwrap();
            assert!(fixture.queue.copy_from(region(from), region(to), None).unwrap().is_submitted());
            want.copy_within(from..from + 1234, to);
        }),
        ("a copy onto parts of itself", After::Packed, |fixture, buffer, case, want| {
            let from = offset_of(&case.graph, case.a);
            let region = |at: usize| buffer.region(at as u64, 50_000).unwrap();
            assert!(fixture.queue.copy_from(region(from), region(from + 3), None).unwrap().is_submitted());
            want.copy_within(from..from + 50_000, from + 3);
        }),
        ("a copy onto all of it", After::MayPack, |fixture, buffer, case, want| {
            let (to, n) = (offset_of(&case.graph, case.a), case.graph.tensor(case.a).unwrap().desc.extent());
            let from = fixture.buffer(n);
            fixture.write(&from, 0, &vec![1; n]);
            let to_region = buffer.region(to as u64, n as u64).unwrap();
            assert!(fixture.queue.copy_from(from.whole(), to_region, None).unwrap().is_submitted());
            want[to..to + n].fill(1);
        }),
        ("a copy to another memory", After::Packed, |fixture, buffer, _, want| {
            let copy = fixture.buffer(want.len());
            assert!(fixture.queue.copy_from(buffer.whole(), copy.whole(), None).unwrap().is_submitted());
            assert_eq!(fixture.read(&copy, 0, want.len()), *want);
        }),
        ("a failing upload of all of it", After::MayPack, |fixture, buffer, case, want| {
            let (to, n) = (offset_of(&case.graph, case.a), case.graph.tensor(case.a).unwrap().desc.extent());
            // Called directly, because an upload of this size through a queue is staged.
            let failing = &mut |_: &mut [u8]| Err(SourceError::new("cut off"));
            let tensor = case.graph.tensor(case.a).map(|t| t.desc);
            assert!(memory(buffer).upload(to, n, tensor.as_ref(), &turn, failing).is_err());
            fixture.write(buffer, to, &vec![1; n]);
            want[to..to + n].fill(1);
        }),
    ];
    for dtype in [DType::Q4_0, DType::Q8_0, DType::Q6_K, DType::F16, DType::BF16] {
        for (name, after, access) in cases {
            let (mut fixture, mut rng) = (Fixture::new(), Rng::with_seed(1));
            let case = product_graph(dtype, |_, _| ());
            let (program, buffer) = (fixture.program(&case.graph), fixture.buffer(case.graph.slot_sizes()[0]));
            fill(&mut fixture, &buffer, &case.graph, &mut rng, 1);
            let before = row_content(memory(&buffer));
            fixture.run(&program, &buffer);
            assert!(is_packed(&buffer, &case.graph, case.a), "{dtype}");
            assert_eq!(fixture.counts.take(), (1, 0));
            let mut want = row_content(memory(&buffer));
            let (a, n) = (offset_of(&case.graph, case.a), case.graph.tensor(case.a).unwrap().desc.extent());
            assert!(before[a..a + n] == want[a..a + n], "{dtype}");
            access(&mut fixture, &buffer, &case, &mut want);
            fixture.queue.mark().wait(deadline()).unwrap();
            assert!(row_content(memory(&buffer)) == want, "{dtype}: {name}");
            assert_eq!(is_packed(&buffer, &case.graph, case.a), *after == After::Packed, "{dtype}: {name}");
            fixture.run(&program, &buffer);
            assert_eq!(fixture.counts.take(), (1, 0), "{dtype}: {name}");
            let product = fixture.read(&buffer, offset_of(&case.graph, case.c), 4 * 2 * M);
            assert_eq!(product, product_without_packing(&case, &want), "{dtype}: {name}");
        }
    }
}

/// A large upload of a weight is packed as it arrives; a failed upload leaves the range row-major.
#[test]
fn uploads_pack_weights() {
    for (dtype, k, m) in [(DType::Q4_0, 256, 4096), (DType::Q6_K, 5120, 176), (DType::F16, 40_000, 16)] {
        let tensor = TensorDesc::contiguous(dtype, [k, m, 1, 1]).unwrap();
        let bytes = weights(&mut Rng::with_seed(5), dtype, k * m);
        let memory = CpuMemory::zeroed(bytes.len() + 100, &MemoryBudget::new(u64::MAX)).unwrap();
        let upload = |until: usize| {
            let mut rest = &bytes[..];
            memory.upload(64, bytes.len(), Some(&tensor), &turn, &mut |piece| {
                if bytes.len() - rest.len() >= until {
                    return Err(SourceError::new("cut off"));
                }
                piece.copy_from_slice(&rest[..piece.len()]);
                rest = &rest[piece.len()..];
                Ok(())
            })
        };
        let span = PanelSpan::of(64, &tensor).unwrap();
        for until in [0, 1, bytes.len() / 2] {
            let whole = upload(until).is_ok();
            assert_eq!(memory.read_map().contains(&span), whole, "{dtype}");
            assert!(memory.read_map().may_pack(&span.range) || whole, "{dtype}");
        }
        for _ in 0..2 {
            upload(usize::MAX).unwrap();
            assert!(memory.read_map().contains(&span), "{dtype}");
            assert!(row_content(&memory)[64..64 + bytes.len()] == bytes, "{dtype}");
        }
        // Overwriting makes the range row-major and packable; reading does not.
        memory.write(64, &vec![1; bytes.len()], Locking::WAIT).unwrap();
        assert!(!memory.read_map().contains(&span) && memory.read_map().may_pack(&span.range), "{dtype}");
        upload(usize::MAX).unwrap();
        assert!(read(&memory, 64, 4) == bytes[..4] && read(&memory, 64, bytes.len()) == bytes, "{dtype}");
        assert!(memory.read_map().contains(&span), "{dtype}");
    }
}
