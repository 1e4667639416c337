//! Several queues, slots and threads on one memory.

use super::*;

/// A run that has nothing to convert asks for nothing alone, and goes on beside readers.
#[test]
fn settled_programs_wait_for_no_reader() {
    let (mut rig, mut rng) = (Rig::new(), Rng::with_seed(6));
    let one = one(DType::Q4_0, |_, _| ());
    let (program, buffer) = (rig.program(&one.graph), rig.buffer(2 * one.graph.slot_sizes()[0]));
    fill(&mut rig, &buffer, &one.graph, &mut rng, 1);
    rig.run(&program, &buffer);
    let reading = memory(&buffer).shared();
    rig.run(&program, &buffer);
    rig.write(&buffer, one.graph.slot_sizes()[0] + 100, &[7; 100]);
    drop(reading);
    // The same program elsewhere in the same memory is another matter.
    let half = one.graph.slot_sizes()[0] as u64;
    rig.queue.run(&program, &Arc::from([buffer.region(half, half).unwrap()])).unwrap();
    rig.queue.mark().wait(soon()).unwrap();
    assert_eq!(memory(&buffer).shared().packed().len(), 2);
    rig.run(&program, &buffer);
    assert_eq!(rig.seen.take(), (4, 0));
}

/// Two queues without any order between them: one multiplies while the other reads the weights, and the one that
/// converts waits for the other's run to end.
#[test]
fn readers_wait_for_runs() {
    for round in 0..20 {
        let (mut rig, mut rng) = (Rig::new(), Rng::with_seed(round));
        let one = one(DType::Q4_0, |_, _| ());
        let (program, buffer) = (rig.program(&one.graph), rig.buffer(one.graph.slot_sizes()[0]));
        fill(&mut rig, &buffer, &one.graph, &mut rng, 1);
        let content = peek(memory(&buffer));
        let want = plainly(&one, &content);
        let (a, n) = (at(&one.graph, one.a), one.graph.tensor(one.a).unwrap().desc.extent());
        // Both start together.
        let gate = Timeline::new();
        rig.queue.wait(&Point::new(&gate, 1)).unwrap();
        rig.other.wait(&Point::new(&gate, 1)).unwrap();
        for _ in 0..3 {
            rig.queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        }
        let mut copies = Vec::new();
        for _ in 0..3 {
            let from = a + rng.usize(..n - 1000);
            copies.push((from, rig.other.download(buffer.region(from as u64, 1000).unwrap()).unwrap()));
            let region = buffer.region(a as u64, n as u64).unwrap();
            rig.other.upload(region, None, Source::Borrowed(&content[a..a + n])).unwrap();
        }
        gate.advance(1);
        rig.queue.mark().wait(soon()).unwrap();
        for (from, copy) in copies {
            assert!(copy.wait(soon()).unwrap() == content[from..from + 1000], "round {round}");
        }
        rig.other.mark().wait(soon()).unwrap();
        assert!(peek(memory(&buffer))[a..a + n] == content[a..a + n], "round {round}");
        rig.run(&program, &buffer);
        assert!(rig.read(&buffer, at(&one.graph, one.c), want.len()) == want, "round {round}");
    }
}

/// One memory bound to two slots that want different things of the same bytes: plain serves both.
#[test]
fn slots_of_one_memory_are_settled_together() {
    let pool = Pool::new(2).unwrap();
    let memory = Memory::zeroed(4 << 20).unwrap();
    let tensor = TensorDesc::contiguous(DType::Q4_0, [K, M, 1, 1]).unwrap();
    let other = TensorDesc::contiguous(DType::IQ4_NL, [K, M, 1, 1]).unwrap();
    let needs = |desc: &TensorDesc, access| {
        let mut uses = Uses::new(1);
        uses.add(crate::graph::SlotOffset { slot: 0, offset: 64 }, desc, access);
        uses.needs().remove(0)
    };
    let span = Span::of(64, &tensor).unwrap();
    for (first, second, packed) in [
        (needs(&tensor, Access::Strips), needs(&tensor, Access::Either), true),
        (needs(&tensor, Access::Either), needs(&tensor, Access::Strips), true),
        (needs(&tensor, Access::Strips), needs(&other, Access::Strips), false),
        (needs(&tensor, Access::Plain), needs(&tensor, Access::Strips), false),
        (needs(&other, Access::Either), needs(&tensor, Access::Strips), false),
    ] {
        for _ in 0..2 {
            let held = memory.hold([(&first, 0), (&second, 0)].into_iter(), None, &pool).unwrap();
            assert_eq!(held.marks.holds(&span), packed);
            assert!(packed || held.marks.is_plain(&span.range));
        }
    }
}

/// Threads that copy between memories in both directions, convert and forget, beside runs: none waits for ever, and
/// every byte is where it belongs.
#[test]
fn nobody_waits_for_ever() {
    let memories: Vec<Memory> = (0..3).map(|_| Memory::zeroed(1 << 18).unwrap()).collect();
    let tensor = TensorDesc::contiguous(DType::Q8_0, [K, 256, 1, 1]).unwrap(); // 69 632 bytes
    let n = tensor.extent();
    let pool = Pool::new(2).unwrap();
    let mut uses = Uses::new(1);
    uses.add(crate::graph::SlotOffset { slot: 0, offset: 0 }, &tensor, Access::Strips);
    let needs = uses.needs().remove(0);
    // Each thread has a column of its own in all memories, at its own multiple of the tensor's size.
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (memories, needs, pool) = (&memories, &needs, &pool);
            scope.spawn(move || {
                let mut rng = Rng::with_seed(thread as u64);
                let base = thread * n;
                let mut want = vec![vec![0u8; n]; 3];
                for _ in 0..300 {
                    let (i, j) = (rng.usize(..3), rng.usize(..3));
                    match rng.usize(..5) {
                        0 => {
                            want[i] = (0..n).map(|_| rng.u8(..)).collect();
                            memories[i].write(base, &want[i]).unwrap();
                        }
                        1 => {
                            memories[i].copy_from(base, &memories[j], base, n).unwrap();
                            want[i] = want[j].clone();
                        }
                        2 => {
                            let bytes: Vec<u8> = (0..n).map(|_| rng.u8(..)).collect();
                            let mut rest = &bytes[..];
                            let fill: &mut Fill<'_> = &mut |piece| {
                                piece.copy_from_slice(&rest[..piece.len()]);
                                rest = &rest[piece.len()..];
                                Ok(())
                            };
                            memories[i].upload(base, n, Some(&tensor), fill).unwrap();
                            want[i] = bytes;
                        }
                        3 => {
                            let mut sorted: Vec<&Memory> = memories.iter().collect();
                            sorted.sort_unstable_by(|a, b| in_order(a, b));
                            let mut held = Vec::new();
                            for memory in sorted {
                                held.push(memory.hold([(needs, base)].into_iter(), None, pool).unwrap());
                            }
                        }
                        _ if rng.u8(..10) == 0 => assert!(memories[i].read(base, n).unwrap() == want[i]),
                        _ => {}
                    }
                }
                for (memory, want) in memories.iter().zip(&want) {
                    assert!(memory.read(base, n).unwrap() == *want);
                }
            });
        }
    });
    memories.iter().for_each(|memory| drop(peek(memory)));
}
