use super::super::assign::assign;
use super::super::assign::tests::SmallTask;
use super::super::{AssignReason, Devices, Options};
use super::*;
use crate::device::noop::NoopDevice;
use crate::device::{DeviceKind, Support, Unsupported};
use crate::ops::binary::Binary;
use crate::ops::copy::CopyOp;
use crate::ops::mul_mat::MulMat;
use crate::ops::unary::Unary;
use crate::tensor::{DType, TensorDesc};
use fastrand::Rng;
use std::collections::BTreeSet;

/// One line for each split: its device and nodes, then the replicas that it reads. `+` is a new replica with its range, origin
/// and last reader; `=` is a reused replica.
fn describe_splits(task: &Task, split_graph: &SplitGraph) -> Vec<String> {
    let name = |slot: u32| match task.slot_tensor(slot).map(|id| task.name(id)) {
        Some(name) if !name.is_empty() => name.to_owned(),
        _ => format!("slot {slot}"),
    };
    let read = |split: usize, number: u32| {
        let Replica { slot, range, origin, first_split: first, last_node: last, device } =
            &split_graph.replicas[number as usize];
        assert_eq!(*device, split_graph.splits[split].device);
        if *first != split {
            return format!(" ={number}");
        }
        let from = match origin {
            ReplicaOrigin::Host => "host".to_owned(),
            ReplicaOrigin::Device(home) => home.to_string(),
            ReplicaOrigin::Experts { home, ids } => format!("{home} by {:?}", task.name(*ids)),
        };
        format!(" +{number} {}[{range:?}]<{from}..{last}", name(*slot))
    };
    let split = |(i, split): (usize, &Split)| {
        let reads = split.reads.iter().map(|&number| read(i, number)).collect::<String>();
        format!("{}: {:?}{reads}", split.device, split.nodes)
    };
    split_graph.splits.iter().enumerate().map(split).collect()
}

/// The splits of a task, with its nodes on these devices, one digit for each node.
fn splits_of(devices: &str, build: impl FnOnce(&mut SmallTask)) -> Vec<String> {
    let mut net = SmallTask::new();
    build(&mut net);
    let task = net.0.build().unwrap();
    let on = |c: char| Assignment { device: c.to_digit(10).unwrap() as usize, reason: AssignReason::Pinned };
    let assigned = devices.chars().map(on).collect::<Vec<_>>();
    assert_eq!(assigned.len(), task.graph().nodes().len());
    describe_splits(&task, &split(&task, &assigned))
}

fn add(net: &mut SmallTask, a: TensorId, b: TensorId) -> TensorId {
    net.op(Binary::Add, &[a, b])
}

#[test]
fn splits_end_where_the_device_changes() {
    assert!(splits_of("", |_| ()).is_empty());
    let chain = |net: &mut SmallTask| {
        let mut x = net.input("x", 1);
        for _ in 0..5 {
            x = net.sqr(x);
        }
    };
    assert_eq!(splits_of("00000", chain), ["0: 0..5 +0 x[0..32]<host..0"]);
    let want = ["0: 0..1 +0 x[0..32]<host..0", "1: 1..3 +1 slot 1[0..32]<0..1", "0: 3..5 +2 slot 3[0..32]<1..3"];
    assert_eq!(splits_of("01100", chain), want);
}

#[test]
fn replicas_are_reused_until_their_slot_is_written() {
    // Device 1 reads y of device 0 twice; a node on device 0 runs in between.
    let twice = |written: bool| {
        move |net: &mut SmallTask| {
            let x = net.input("x", 1);
            let y = net.sqr(x);
            net.sqr(y);
            if written {
                net.onto(Unary::Sqrt, &[y], y)
            } else {
                net.sqr(y)
            };
            net.sqr(y);
        }
    };
    let head = ["0: 0..1 +0 x[0..32]<host..0".to_owned()];
    let again = ["1: 1..2 +1 slot 1[0..32]<0..3", "0: 2..3", "1: 3..4 =1"];
    assert_eq!(splits_of("0101", twice(false)), [&head[..], &again.map(String::from)].concat());
    let anew = ["1: 1..2 +1 slot 1[0..32]<0..1", "0: 2..3", "1: 3..4 +2 slot 1[0..32]<0..3"];
    assert_eq!(splits_of("0101", twice(true)), [&head[..], &anew.map(String::from)].concat());
}

#[test]
fn an_input_is_replicated_on_each_device_that_reads_it() {
    let build = |net: &mut SmallTask| {
        let x = net.input("x", 1);
        let (a, b) = (net.sqr(x), net.sqr(x));
        let c = add(net, x, a);
        add(net, b, c);
    };
    let want =
        ["0: 0..1 +0 x[0..32]<host..2", "1: 1..2 +1 x[0..32]<host..1", "0: 2..3 =0", "1: 3..4 +2 slot 3[0..32]<0..3"];
    assert_eq!(splits_of("0101", build), want);
}

/// The splits on device 1 when a node for each entry reads these rows of a matrix of 16 rows on device 0. `None` is a node on
/// device 0.
fn reads_of(stored: bool, reads: &[Option<Range<usize>>]) -> Vec<String> {
    let devices = reads.iter().map(|read| if read.is_some() { '1' } else { '0' }).collect::<String>();
    let prefix = if stored { "" } else { "0" };
    let mut lines = splits_of(&(prefix.to_owned() + &devices), |net| {
        let own = if stored { net.stored(0, "m", 16) } else { net.stored(0, "x", 16) };
        let m = if stored { own } else { net.sqr(own) };
        net.0.name(m, "m");
        for read in reads {
            let part = net.rows(if read.is_some() { m } else { own }, read.clone().unwrap_or(0..1));
            net.sqr(part);
        }
    });
    lines.retain(|split| split.starts_with('1'));
    lines
}

#[test]
fn overlapping_ranges_become_one_replica() {
    let some = |range| Some(range);
    for (what, reads, want) in [
        ("apart", vec![some(8..9), some(0..2)], vec!["1: 1..3 +0 m[0..64]<0..2 +1 m[256..288]<0..1"]),
        ("touching", vec![some(0..2), some(2..3)], vec!["1: 1..3 +0 m[0..64]<0..1 +1 m[64..96]<0..2"]),
        ("overlapping", vec![some(1..3), some(0..2), some(1..2)], vec!["1: 1..4 +0 m[0..96]<0..3"]),
        (
            "within an existing replica",
            vec![some(0..8), None, some(1..3), some(2..4)],
            vec!["1: 1..2 +0 m[0..256]<0..4", "1: 3..5 =0"],
        ),
        (
            "partly beyond an existing replica",
            vec![some(0..8), None, some(6..9)],
            vec!["1: 1..2 +0 m[0..256]<0..1", "1: 3..4 +1 m[192..288]<0..3"],
        ),
        (
            "next to an existing replica",
            vec![some(0..4), None, some(1..3), some(6..9)],
            vec!["1: 1..2 +0 m[0..128]<0..3", "1: 3..5 =0 +1 m[192..288]<0..4"],
        ),
        (
            "an existing replica overlaps the next read",
            vec![some(0..8), None, some(1..3), some(6..9)],
            vec!["1: 1..2 +0 m[0..256]<0..1", "1: 3..5 +1 m[0..288]<0..4"],
        ),
    ] {
        assert_eq!(reads_of(false, &reads), want, "{what}");
    }
}

#[test]
fn weights_of_other_devices_begin_a_split() {
    // Each weight is copied just before its first use.
    let build = |net: &mut SmallTask| {
        let (x, a, b) = (net.stored(1, "x", 1), net.stored(0, "a", 8), net.stored(0, "b", 8));
        let y = net.sqr(x);
        let y = net.dot(a, y);
        let y = net.sqr(y);
        let y = net.dot(b, y);
        net.dot(a, y);
    };
    let want = ["1: 0..1", "1: 1..3 +0 a[0..256]<0..4", "1: 3..5 =0 +1 b[0..256]<0..3"];
    assert_eq!(splits_of("11111", build), want);
    // Disjoint views of a weight begin a split each.
    let want = ["1: 0..1 +0 m[0..64]<0..0", "1: 1..3 +1 m[96..192]<0..2"];
    assert_eq!(reads_of(true, &[Some(0..2), Some(3..6), Some(4..5)]), want);
    // A cache is not a weight: its readers stay in one split, and only the bytes that they read are copied.
    let build = |net: &mut SmallTask| {
        let (x, cache) = (net.input("x", 1), net.stored(0, "cache", 16));
        let to = net.rows(cache, 3..4);
        net.onto(CopyOp::Cpy, &[x], to);
        let y = net.sqr(x);
        let seen = net.rows(cache, 0..4);
        net.dot(seen, y);
    };
    let want = ["0: 0..1 +0 x[0..32]<host..0", "1: 1..3 +1 x[0..32]<host..1 +2 cache[0..128]<0..2"];
    assert_eq!(splits_of("011", build), want);
}

/// A matrix of 8 x 8 for each of 4 experts.
fn experts(net: &mut SmallTask, device: usize) -> TensorId {
    net.0.stored("experts", TensorDesc::contiguous(DType::F32, [8, 8, 4, 1]).unwrap(), device, None).unwrap()
}

#[test]
fn experts_of_other_devices_are_copied_by_id() {
    let by_ids = |net: &mut SmallTask, w, x, name: &str| {
        let ids = net.ids(1);
        net.0.name(ids, name);
        net.op(MulMat::BY_ID, &[w, x, ids])
    };
    // The copied bytes depend on the ids, so another node cannot reuse the replica.
    let twice = |net: &mut SmallTask| {
        let (w, x) = (experts(net, 0), net.stored(1, "x", 1));
        let y = by_ids(net, w, x, "i");
        let y = net.sqr(y);
        by_ids(net, w, y, "j");
    };
    let want = [
        "1: 0..2 +0 experts[0..1024]<0 by \"i\"..0 +1 i[0..4]<host..0",
        "1: 2..3 +2 experts[0..1024]<0 by \"j\"..2 +3 j[0..4]<host..2",
    ];
    assert_eq!(splits_of("111", twice), want);
    assert_eq!(splits_of("000", twice), ["0: 0..3 +0 x[0..32]<1..0 +1 i[0..4]<host..0 +2 j[0..4]<host..2"], "at home");
    // Another node reads the whole tensor: all experts are copied, and the replica serves both nodes.
    let also_whole = |whole_first: bool| {
        move |net: &mut SmallTask| {
            let (w, x) = (experts(net, 0), net.stored(1, "x", 1));
            if whole_first {
                net.sqr(w);
            }
            by_ids(net, w, x, "i");
            if !whole_first {
                net.sqr(w);
            }
        }
    };
    assert_eq!(splits_of("11", also_whole(true)), ["1: 0..2 +0 experts[0..1024]<0..1 +1 i[0..4]<host..1"]);
    let want = ["1: 0..1 +0 experts[0..1024]<0 by \"i\"..0 +1 i[0..4]<host..0", "1: 1..2 +2 experts[0..1024]<0..1"];
    assert_eq!(splits_of("11", also_whole(false)), want);
    // Experts that a node writes are not weights.
    let written = |net: &mut SmallTask| {
        let (w, x) = (experts(net, 0), net.stored(1, "x", 1));
        net.onto(Unary::Sqr, &[w], w);
        by_ids(net, w, x, "i");
    };
    assert_eq!(splits_of("01", written), ["0: 0..1", "1: 1..2 +0 experts[0..1024]<0..1 +1 i[0..4]<host..1"]);
}

/// A random task over stored, computed and input tensors of 4 rows of 8 floats, which are read whole or in part and
/// overwritten.
fn random(rng: &mut Rng, devices: usize) -> Task {
    let mut net = SmallTask::new();
    let mut all = vec![net.input("x", 4)];
    let experts = (0..2).map(|_| experts(&mut net, rng.usize(0..devices))).collect::<Vec<_>>();
    let ids = (0..2).map(|_| net.ids(4)).collect::<Vec<_>>();
    for _ in 0..rng.usize(0..4) {
        all.push(net.stored(rng.usize(0..devices), "s", 4));
    }
    if rng.bool() {
        all.push(net.input("z", 4));
    }
    // Only every second of these tensors may be overwritten: the others stay weights.
    let fixed = all.len();
    for _ in 0..rng.usize(1..40) {
        // Mostly recent tensors.
        let pick = |rng: &mut Rng| {
            all[if rng.bool() { rng.usize(all.len().saturating_sub(4)..all.len()) } else { rng.usize(..all.len()) }]
        };
        let (a, b, onto) = (pick(rng), pick(rng), pick(rng));
        let rows = rng.usize(0..4);
        let rows = rows..rng.usize(rows + 1..=4);
        let (sa, sb, so) = (rows.clone(), net.rows(b, rows.clone()), net.rows(onto, rows.clone()));
        let sa = net.rows(a, sa);
        let memory = |net: &SmallTask, id| net.0.tensor(id).and_then(|t| t.place).map(|p| p.slot);
        let writable = all.iter().position(|&id| id == onto).is_some_and(|at| at >= 1 && (at >= fixed || at % 2 == 0));
        let made = match rng.usize(..7) {
            0 => net.sqr(a),
            1 => net.op(Unary::Sqrt, &[a]),
            2 => add(&mut net, a, b),
            3 => net.op(MulMat::BY_ID, &[*rng.choice(&experts).unwrap(), a, *rng.choice(&ids).unwrap()]),
            4 => add(&mut net, a, *rng.choice(&all).unwrap()),
            _ if writable && memory(&net, a) != memory(&net, onto) && memory(&net, b) != memory(&net, onto) => {
                match net.0.node_onto(Binary::Add, &[Some(sa), Some(sb)], so) {
                    Ok(_) => continue,
                    Err(_) => net.sqr(a), // the destination is an input
                }
            }
            _ => {
                add(&mut net, sa, sb);
                continue;
            }
        };
        all.push(made);
    }
    net.0.build().unwrap()
}

/// No-op devices of random kinds. All but one refuse some ops.
fn random_devices(rng: &mut Rng, count: usize) -> Vec<std::sync::Arc<dyn crate::device::Device>> {
    const OPS: [OpCode; 4] = [OpCode::Sqr, OpCode::Sqrt, OpCode::Add, OpCode::MulMatId];
    let able = rng.usize(..count);
    let device = |i: usize| {
        let kind = if rng.bool() { DeviceKind::Cpu } else { DeviceKind::Gpu };
        let refused = OPS.map(|op| (op, i != able && rng.usize(..8) == 0));
        let wants = rng.bool();
        let says = move |node: crate::ops::NodeView<'_>| {
            let op = node.op.code();
            match op {
                _ if refused.contains(&(op, true)) => Support::No(Unsupported { op, reason: "refused".to_owned() }),
                OpCode::MulMatId if wants => Support::Offload,
                _ => Support::Yes,
            }
        };
        NoopDevice::new(&format!("N{i}"), kind).with_support(says).shared()
    };
    (0..count).map(device).collect()
}

/// Checks the splits in order: each node's device supports it, and each of its sources is current, at home or in exactly one
/// replica.
fn check(task: &Task, devices: &Devices, assigned: &[Assignment], split_graph: &SplitGraph) {
    let nodes = task.graph().nodes();
    assert_eq!(assigned.len(), nodes.len());
    let slots = task.storage().len();
    let (mut content, mut makers) = (vec![0u32; slots], vec![None; slots]);
    let mut versions = vec![None; split_graph.replicas.len()];
    let mut last = vec![None; split_graph.replicas.len()];
    let mut next = 0;
    for (s, split) in split_graph.splits.iter().enumerate() {
        assert_eq!(split.nodes.start, next);
        assert!(!split.nodes.is_empty());
        next = split.nodes.end;
        for (number, replica) in split_graph.replicas.iter().enumerate().filter(|(_, r)| r.first_split == s) {
            let earlier = |i: usize| {
                let other: &Replica = &split_graph.replicas[i];
                let whole = !matches!(other.origin, ReplicaOrigin::Experts { .. });
                whole
                    && other.device == replica.device
                    && other.slot == replica.slot
                    && contains(&other.range, &replica.range)
            };
            let now = Some(content[replica.slot as usize]);
            assert!(
                !(0..number).any(|i| earlier(i) && versions[i] == now),
                "{replica:?} duplicates an earlier replica"
            );
            assert!(split.reads.contains(&(number as u32)));
            versions[number] = now;
        }
        let reads = split.reads.iter().map(|&i| &split_graph.replicas[i as usize]).collect::<Vec<_>>();
        assert!(
            reads
                .windows(2)
                .all(|w| w[0].slot < w[1].slot || (w[0].slot == w[1].slot && w[0].range.end <= w[1].range.start))
        );
        assert!(reads.iter().all(|r| r.device == split.device && r.first_split <= s));
        for at in split.nodes.clone() {
            let (node, device) = (&nodes[at], assigned[at].device);
            assert_eq!(device, split.device);
            assert!(devices[device].support(task.graph().node_view(node).unwrap()).runs());
            let mut weight = false;
            for (id, slot, range) in task.reads(node) {
                let home = match task.storage()[slot as usize] {
                    Storage::Stored { device, .. } => Some(device),
                    Storage::Input => None,
                    Storage::Computed => Some(makers[slot as usize].unwrap()),
                };
                assert_eq!(home, split_graph.homes[slot as usize]);
                let is_here = |&&i: &&u32| {
                    split_graph.replicas[i as usize].slot == slot
                        && contains(&split_graph.replicas[i as usize].range, &range)
                };
                let here = split.reads.iter().filter(is_here).collect::<Vec<_>>();
                if home == Some(device) {
                    assert!(here.is_empty());
                    continue;
                }
                assert_eq!(here.len(), 1, "node {at} reads {range:?} of slot {slot}");
                let number = *here[0] as usize;
                assert_eq!(
                    versions[number],
                    Some(content[slot as usize]),
                    "node {at} reads stale bytes of slot {slot}"
                );
                weight |= split_graph.replicas[number].first_split == s;
                match (split_graph.replicas[number].origin, home) {
                    (ReplicaOrigin::Host, None) => (),
                    (ReplicaOrigin::Device(from), Some(home)) => assert_eq!(from, home),
                    (ReplicaOrigin::Experts { home: from, ids }, Some(home)) => {
                        assert_eq!((from, node.op.code(), node.srcs[0]), (home, OpCode::MulMatId, Some(id)));
                        assert_eq!(
                            (node.srcs[2], at, &split_graph.replicas[number].range),
                            (Some(ids), split.nodes.start, &range)
                        );
                        assert_eq!(last[number], None, "a replica of experts serves two nodes");
                    }
                    other => panic!("{other:?}"),
                }
                last[number] = Some(at);
            }
            // A split on the same device as the split before it must begin with a new replica.
            assert!(at > split.nodes.start || at == 0 || assigned[at - 1].device != device || weight);
            if let Some((slot, _)) = task.write_range(node) {
                content[slot as usize] += 1;
                let made = *makers[slot as usize].get_or_insert(device);
                let home =
                    if let Storage::Stored { device, .. } = task.storage()[slot as usize] { device } else { made };
                assert_eq!(device, home, "node {at} writes a slot of another device");
            }
        }
    }
    assert_eq!(next, nodes.len());
    for (replica, last) in split_graph.replicas.iter().zip(last) {
        assert_eq!(Some(replica.last_node), last);
    }
}

#[test]
fn random_tasks_read_current_bytes() {
    let mut rng = Rng::with_seed(21);
    let (mut placed, mut seen) = (0, BTreeSet::new());
    for _ in 0..400 {
        let count = rng.usize(1..=4);
        let (task, devices) = (random(&mut rng, count), random_devices(&mut rng, count));
        // `assign` fails if the device of a cache does not support a node that writes it.
        let Ok(assigned) = assign(&task, &devices, &Options::default()) else { continue };
        let split_graph = split(&task, &assigned);
        check(&task, &devices, &assigned, &split_graph);
        placed += 1;
        seen.extend(assigned.iter().map(|a| format!("{:?}", a.reason)));
        seen.extend(split_graph.replicas.iter().map(|r| format!("{:?}", r.origin)[..4].to_owned()));
    }
    assert!(placed > 250, "{placed}");
    let want = ["Destination", "Devi", "Expe", "Host", "LastResort", "Neighbour", "Offload", "Stored"];
    assert_eq!(seen.iter().map(String::as_str).collect::<Vec<_>>(), want);
}
