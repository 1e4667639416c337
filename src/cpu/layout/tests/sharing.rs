//! Several queues, slots and threads on one memory.

use super::*;

/// A run that converts nothing takes the lock shared, and runs beside other readers.
#[test]
fn unchanged_layout_needs_no_exclusive_lock() {
    let (mut fixture, mut rng) = (Fixture::new(), Rng::with_seed(6));
    let case = product_graph(DType::Q4_0, |_, _| ());
    let (program, buffer) = (fixture.program(&case.graph), fixture.buffer(2 * case.graph.slot_sizes()[0]));
    fill(&mut fixture, &buffer, &case.graph, &mut rng, 1);
    fixture.run(&program, &buffer);
    let reading = memory(&buffer).read_map();
    fixture.run(&program, &buffer);
    fixture.write(&buffer, case.graph.slot_sizes()[0] + 100, &[7; 100]);
    drop(reading);
    // The same program at another offset of the same memory needs its own packing.
    let half = case.graph.slot_sizes()[0] as u64;
    fixture.queue.run(&program, &Arc::from([buffer.region(half, half).unwrap()])).unwrap();
    fixture.queue.mark().wait(deadline()).unwrap();
    assert_eq!(memory(&buffer).read_map().packed().len(), 2);
    fixture.run(&program, &buffer);
    assert_eq!(fixture.counts.take(), (4, 0));
}

/// Two queues without any order between them: one multiplies while the other reads the weights, and writes the bytes that they
/// have. Reads share the lock with the run; writes into panels wait for its end.
#[test]
fn transfers_and_runs_share_a_memory() {
    for round in 0..20 {
        let (mut fixture, mut rng) = (Fixture::new(), Rng::with_seed(round));
        let case = product_graph(DType::Q4_0, |_, _| ());
        let (program, buffer) = (fixture.program(&case.graph), fixture.buffer(case.graph.slot_sizes()[0]));
        fill(&mut fixture, &buffer, &case.graph, &mut rng, 1);
        let content = row_content(memory(&buffer));
        let want = product_without_packing(&case, &content);
        let (a, n) = (offset_of(&case.graph, case.a), case.graph.tensor(case.a).unwrap().desc.extent());
        // Both queues start at the same point.
        let gate = Timeline::new();
        fixture.queue.wait(&TimelinePoint::new(&gate, 1)).unwrap();
        fixture.other.wait(&TimelinePoint::new(&gate, 1)).unwrap();
        for _ in 0..3 {
            fixture.queue.run(&program, &Arc::from([buffer.whole()])).unwrap();
        }
        let mut copies = Vec::new();
        for _ in 0..3 {
            let from = a + rng.usize(..n - 1000);
            copies.push((from, fixture.other.download(buffer.region(from as u64, 1000).unwrap()).unwrap()));
            let region = buffer.region(a as u64, n as u64).unwrap();
            fixture.other.upload(region, None, UploadSource::Borrowed(&content[a..a + n])).unwrap();
            let (from, bytes) = (from as u64, &content[from..from + 1000]);
            fixture.other.upload(buffer.region(from, 1000).unwrap(), None, UploadSource::Borrowed(bytes)).unwrap();
        }
        gate.advance(1);
        fixture.queue.mark().wait(deadline()).unwrap();
        for (from, copy) in copies {
            assert!(copy.wait(deadline()).unwrap() == content[from..from + 1000], "round {round}");
        }
        fixture.other.mark().wait(deadline()).unwrap();
        assert!(row_content(memory(&buffer))[a..a + n] == content[a..a + n], "round {round}");
        fixture.run(&program, &buffer);
        assert!(fixture.read(&buffer, offset_of(&case.graph, case.c), want.len()) == want, "round {round}");
    }
}

/// Commands that have to wait for a memory's lock do not occupy the threads for short commands.
#[test]
fn a_locked_memory_blocks_no_other_queue() {
    let (mut fixture, mut rng) = (Fixture::new(), Rng::with_seed(7));
    let case = product_graph(DType::Q4_0, |_, _| ());
    let (program, buffer) = (fixture.program(&case.graph), fixture.buffer(case.graph.slot_sizes()[0]));
    fill(&mut fixture, &buffer, &case.graph, &mut rng, 1);
    fixture.run(&program, &buffer);
    let packed = buffer.region(offset_of(&case.graph, case.a) as u64, 1000).unwrap();
    let gate = Timeline::new();
    let reading = memory(&buffer).read_map(); // as a program does while it runs
    let mut queues: Vec<_> = (0..5).map(|_| fixture.device.queue(&fixture.budget).unwrap()).collect();
    let write = |(value, queue): (usize, &mut Box<dyn Queue>)| {
        queue.wait(&TimelinePoint::new(&gate, 1)).unwrap(); // so that the write does not run inline
        queue.upload(packed.clone(), None, UploadSource::Borrowed(&[value as u8; 1000])).unwrap();
        queue.mark()
    };
    let blocked: Vec<_> = queues.iter_mut().enumerate().map(write).collect();
    gate.advance(1);
    let mut expected = vec![0; 1 << 20];
    for value in 1..100 {
        let other = fixture.buffer(1 << 20);
        fixture.other.fill(other.whole(), value).unwrap();
        fixture.other.mark().wait(deadline()).unwrap();
        expected.fill(value);
        assert!(fixture.other.download(other.whole()).unwrap().wait(deadline()).unwrap() == expected);
    }
    assert!(blocked.iter().all(|write| !write.poll().unwrap()));
    drop(reading);
    for write in blocked {
        write.wait(deadline()).unwrap();
    }
    let at = packed.offset() as usize;
    let written = &content_as_rows(memory(&buffer))[at..at + 1000];
    assert!(
        written[0] < 5 && written.iter().all(|&byte| byte == written[0]) && is_packed(&buffer, &case.graph, case.a)
    );
}

/// One memory bound to two slots with conflicting requirements for the same bytes: rows satisfy both.
#[test]
fn requirements_of_slots_sharing_a_memory_are_combined() {
    let pool = Pool::new(2).unwrap();
    let memory = CpuMemory::zeroed(4 << 20, &MemoryBudget::new(u64::MAX)).unwrap();
    let tensor = TensorDesc::contiguous(DType::Q4_0, [K, M, 1, 1]).unwrap();
    let other = TensorDesc::contiguous(DType::IQ4_NL, [K, M, 1, 1]).unwrap();
    let requirements = |desc: &TensorDesc, access| {
        let mut uses = TensorUses::new(1);
        uses.add(crate::graph::SlotOffset { slot: 0, offset: 64 }, desc, access);
        uses.requirements().remove(0)
    };
    let span = PanelSpan::of(64, &tensor).unwrap();
    for (first, second, packed) in [
        (requirements(&tensor, LayoutAccess::PreferPanels), requirements(&tensor, LayoutAccess::RowsOrPanels), true),
        (requirements(&tensor, LayoutAccess::RowsOrPanels), requirements(&tensor, LayoutAccess::PreferPanels), true),
        (requirements(&tensor, LayoutAccess::PreferPanels), requirements(&other, LayoutAccess::PreferPanels), false),
        (requirements(&tensor, LayoutAccess::Rows), requirements(&tensor, LayoutAccess::PreferPanels), false),
        (requirements(&other, LayoutAccess::RowsOrPanels), requirements(&tensor, LayoutAccess::PreferPanels), false),
    ] {
        for _ in 0..2 {
            let guard = memory
                .lock_layout([(&first, 0), (&second, 0)].into_iter(), None, &pool, Locking::WAIT)
                .unwrap()
                .unwrap();
            assert_eq!(guard.map.contains(&span), packed);
            assert!(packed || guard.map.is_row_major(&span.range));
        }
    }
}

/// Threads copy between memories in both directions and convert, beside runs: no deadlock, and every byte is correct.
#[test]
fn concurrent_copies_and_conversions_do_not_deadlock() {
    let memories: Vec<CpuMemory> =
        (0..3).map(|_| CpuMemory::zeroed(1 << 18, &MemoryBudget::new(u64::MAX)).unwrap()).collect();
    let tensor = TensorDesc::contiguous(DType::Q8_0, [K, 256, 1, 1]).unwrap(); // 69 632 bytes
    let n = tensor.extent();
    let pool = Pool::new(2).unwrap();
    let mut uses = TensorUses::new(1);
    uses.add(crate::graph::SlotOffset { slot: 0, offset: 0 }, &tensor, LayoutAccess::PreferPanels);
    let requirements = uses.requirements().remove(0);
    // Each thread owns one range of all memories, at its own multiple of the tensor's size.
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let (memories, requirements, pool) = (&memories, &requirements, &pool);
            scope.spawn(move || {
                let mut rng = Rng::with_seed(thread as u64);
                let base = thread * n;
                let mut want = vec![vec![0u8; n]; 3];
                for _ in 0..300 {
                    let (i, j) = (rng.usize(..3), rng.usize(..3));
                    match rng.usize(..5) {
                        0 => {
                            want[i] = (0..n).map(|_| rng.u8(..)).collect();
                            memories[i].write(base, &want[i], Locking::WAIT).unwrap();
                        }
                        1 => {
                            memories[i].copy_from(base, &memories[j], base, n, 0, Locking::WAIT).unwrap();
                            want[i] = want[j].clone();
                        }
                        2 => {
                            let bytes: Vec<u8> = (0..n).map(|_| rng.u8(..)).collect();
                            let mut rest = &bytes[..];
                            let fill: &mut PieceSource<'_> = &mut |piece| {
                                piece.copy_from_slice(&rest[..piece.len()]);
                                rest = &rest[piece.len()..];
                                Ok(())
                            };
                            memories[i].upload(base, n, Some(&tensor), &turn, fill).unwrap();
                            want[i] = bytes;
                        }
                        3 => {
                            let mut sorted: Vec<&CpuMemory> = memories.iter().collect();
                            sorted.sort_unstable_by(|a, b| lock_order(a, b));
                            let mut guard = Vec::new();
                            for memory in sorted {
                                guard.push(
                                    memory
                                        .lock_layout([(requirements, base)].into_iter(), None, pool, Locking::WAIT)
                                        .unwrap()
                                        .unwrap(),
                                );
                            }
                        }
                        _ if rng.u8(..10) == 0 => {
                            assert!(read(&memories[i], base, n) == want[i])
                        }
                        _ => {}
                    }
                }
                for (memory, want) in memories.iter().zip(&want) {
                    assert!(read(memory, base, n) == *want);
                }
            });
        }
    });
    memories.iter().for_each(|memory| drop(row_content(memory)));
}
