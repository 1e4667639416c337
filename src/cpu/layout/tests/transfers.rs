//! Uploads, downloads, fills and copies of what lies in strips.

use super::*;

/// Every way to touch a packed tensor other than a product: the bytes are those that were uploaded, and it is in strips
/// afterwards, may be again, or stays plain.
#[test]
fn whoever_touches_strips_sees_plain_bytes() {
    #[derive(PartialEq, Debug)]
    enum After {
        Packed,
        /// Until the next product.
        Forgotten,
        /// For good.
        Plain,
    }
    type Touching = fn(&mut Rig, &Buffer, &One, &mut Vec<u8>);
    let cases: &[(&str, After, Touching)] = &[
        ("nothing", After::Packed, |_, _, _, _| ()),
        ("a read", After::Plain, |rig, buffer, one, want| {
            let from = at(&one.graph, one.a) + 1000;
            assert_eq!(rig.read(buffer, from, 10), want[from..from + 10]);
        }),
        ("a read beside it", After::Packed, |rig, buffer, one, want| {
            let from = at(&one.graph, one.a) + one.graph.tensor(one.a).unwrap().desc.extent();
            assert_eq!(rig.read(buffer, from, 64), want[from..from + 64]);
        }),
        ("a partial write", After::Plain, |rig, buffer, one, want| {
            let to = at(&one.graph, one.a) + 5000;
            rig.write(buffer, to, &[1; 77]);
            want[to..to + 77].fill(1);
        }),
        ("a large partial write", After::Plain, |rig, buffer, one, want| {
            let (to, n) = (at(&one.graph, one.a), one.graph.tensor(one.a).unwrap().desc.extent() - 100);
            rig.write(buffer, to, &vec![1; n]);
            want[to..to + n].fill(1);
        }),
        ("a whole write", After::Forgotten, |rig, buffer, one, want| {
            let (to, n) = (at(&one.graph, one.a), one.graph.tensor(one.a).unwrap().desc.extent());
            rig.write(buffer, to, &vec![1; n]);
            want[to..to + n].fill(1);
        }),
        ("a partial fill", After::Plain, |rig, buffer, one, want| {
            let to = at(&one.graph, one.a) + 5000;
            rig.queue.fill(buffer.region(to as u64, 33).unwrap(), 1).unwrap();
            want[to..to + 33].fill(1);
        }),
        ("a fill of everything", After::Forgotten, |rig, buffer, _, want| {
            rig.queue.fill(buffer.whole(), 0).unwrap();
            want.fill(0);
        }),
        ("a copy out of it within", After::Plain, |rig, buffer, one, want| {
            let (from, to) = (at(&one.graph, one.a) + 999, at(&one.graph, one.c));
            let region = |at: usize| buffer.region(at as u64, 1234).unwrap();
            assert!(rig.queue.copy_from(region(from), region(to), None).unwrap().is_submitted());
            want.copy_within(from..from + 1234, to);
        }),
        ("a copy onto parts of itself", After::Plain, |rig, buffer, one, want| {
            let from = at(&one.graph, one.a);
            let region = |at: usize| buffer.region(at as u64, 50_000).unwrap();
            assert!(rig.queue.copy_from(region(from), region(from + 3), None).unwrap().is_submitted());
            want.copy_within(from..from + 50_000, from + 3);
        }),
        ("a copy onto all of it", After::Forgotten, |rig, buffer, one, want| {
            let (to, n) = (at(&one.graph, one.a), one.graph.tensor(one.a).unwrap().desc.extent());
            let from = rig.buffer(n);
            rig.write(&from, 0, &vec![1; n]);
            let to_region = buffer.region(to as u64, n as u64).unwrap();
            assert!(rig.queue.copy_from(from.whole(), to_region, None).unwrap().is_submitted());
            want[to..to + n].fill(1);
        }),
        ("a copy to another memory", After::Plain, |rig, buffer, _, want| {
            let copy = rig.buffer(want.len());
            assert!(rig.queue.copy_from(buffer.whole(), copy.whole(), None).unwrap().is_submitted());
            assert_eq!(rig.read(&copy, 0, want.len()), *want);
        }),
        ("a failing upload of all of it", After::Forgotten, |rig, buffer, one, want| {
            let (to, n) = (at(&one.graph, one.a), one.graph.tensor(one.a).unwrap().desc.extent());
            // Directly, because an upload of this size is staged.
            let failing = &mut |_: &mut [u8]| Err(SourceError::new("cut off"));
            let tensor = one.graph.tensor(one.a).map(|t| t.desc);
            assert!(memory(buffer).upload(to, n, tensor.as_ref(), failing).is_err());
            rig.write(buffer, to, &vec![1; n]);
            want[to..to + n].fill(1);
        }),
    ];
    for dtype in [DType::Q4_0, DType::Q8_0, DType::Q6_K, DType::F16, DType::BF16] {
        for (name, after, touch) in cases {
            let (mut rig, mut rng) = (Rig::new(), Rng::with_seed(1));
            let one = one(dtype, |_, _| ());
            let (program, buffer) = (rig.program(&one.graph), rig.buffer(one.graph.slot_sizes()[0]));
            fill(&mut rig, &buffer, &one.graph, &mut rng, 1);
            let before = peek(memory(&buffer));
            rig.run(&program, &buffer);
            assert!(is_packed(&buffer, &one.graph, one.a), "{dtype}");
            assert_eq!(rig.seen.take(), (1, 0));
            let mut want = peek(memory(&buffer));
            let (a, n) = (at(&one.graph, one.a), one.graph.tensor(one.a).unwrap().desc.extent());
            assert!(before[a..a + n] == want[a..a + n], "{dtype}");
            touch(&mut rig, &buffer, &one, &mut want);
            rig.queue.mark().wait(soon()).unwrap();
            assert!(peek(memory(&buffer)) == want, "{dtype}: {name}");
            assert_eq!(is_packed(&buffer, &one.graph, one.a), *after == After::Packed, "{dtype}: {name}");
            rig.run(&program, &buffer);
            assert_eq!(rig.seen.take(), if *after == After::Plain { (0, 1) } else { (1, 0) }, "{dtype}: {name}");
            let product = rig.read(&buffer, at(&one.graph, one.c), 4 * 2 * M);
            assert_eq!(product, plainly(&one, &want), "{dtype}: {name}");
        }
    }
}

/// A large upload of a weight arrives in strips; a broken one leaves nothing behind.
#[test]
fn weights_are_packed_as_they_arrive() {
    for (dtype, k, m) in [(DType::Q4_0, 256, 4096), (DType::Q6_K, 5120, 176), (DType::F16, 40_000, 16)] {
        let tensor = TensorDesc::contiguous(dtype, [k, m, 1, 1]).unwrap();
        let bytes = weights(&mut Rng::with_seed(5), dtype, k * m);
        let memory = Memory::zeroed(bytes.len() + 100).unwrap();
        let upload = |until: usize| {
            let mut rest = &bytes[..];
            memory.upload(64, bytes.len(), Some(&tensor), &mut |piece| {
                if bytes.len() - rest.len() >= until {
                    return Err(SourceError::new("cut off"));
                }
                piece.copy_from_slice(&rest[..piece.len()]);
                rest = &rest[piece.len()..];
                Ok(())
            })
        };
        let span = Span::of(64, &tensor).unwrap();
        for until in [0, 1, bytes.len() / 2] {
            let whole = upload(until).is_ok();
            assert_eq!(memory.shared().holds(&span), whole, "{dtype}");
            assert!(memory.shared().may_pack(&span.range) || whole, "{dtype}");
        }
        for _ in 0..2 {
            upload(usize::MAX).unwrap();
            assert!(memory.shared().holds(&span), "{dtype}");
            assert!(peek(&memory)[64..64 + bytes.len()] == bytes, "{dtype}");
        }
        // Overwritten, it is plain, and may be packed again; read plainly once, it stays so.
        memory.write(64, &vec![1; bytes.len()]).unwrap();
        assert!(!memory.shared().holds(&span) && memory.shared().may_pack(&span.range), "{dtype}");
        upload(usize::MAX).unwrap();
        assert!(memory.read(64, 4).unwrap() == bytes[..4] && !memory.shared().holds(&span));
        upload(usize::MAX).unwrap();
        assert!(!memory.shared().holds(&span) && memory.read(64, bytes.len()).unwrap() == bytes, "{dtype}");
    }
}
