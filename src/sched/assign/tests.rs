use super::super::TaskBuilder;
use super::*;
use crate::device::noop::NoopDevice;
use crate::device::{Device, Support};
use crate::graph::TensorId;
use crate::ops::binary::Binary;
use crate::ops::copy::CopyOp;
use crate::ops::mul_mat::MulMat;
use crate::ops::norm::Norm;
use crate::ops::rows::Rows;
use crate::ops::unary::Unary;
use crate::ops::{Op, OpCode};
use crate::tensor::{DType, TensorDesc};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Small tasks: vectors of 8 floats, and matrices of some rows of 8.
#[derive(Default)]
pub(in crate::sched) struct SmallTask(pub(in crate::sched) TaskBuilder);

impl SmallTask {
    pub(in crate::sched) fn new() -> SmallTask {
        SmallTask(TaskBuilder::new())
    }

    pub(in crate::sched) fn input(&mut self, name: &str, rows: usize) -> TensorId {
        self.0.input(name, DType::F32, [8, rows, 1, 1]).unwrap()
    }

    pub(in crate::sched) fn ids(&mut self, count: usize) -> TensorId {
        self.0.input("ids", DType::I32, [count, 1, 1, 1]).unwrap()
    }

    pub(in crate::sched) fn stored(&mut self, device: usize, name: &str, rows: usize) -> TensorId {
        self.0.stored(name, TensorDesc::contiguous(DType::F32, [8, rows, 1, 1]).unwrap(), device, None).unwrap()
    }

    pub(in crate::sched) fn op(&mut self, op: impl Into<Op>, srcs: &[TensorId]) -> TensorId {
        self.0.node(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>()).unwrap()
    }

    pub(in crate::sched) fn onto(&mut self, op: impl Into<Op>, srcs: &[TensorId], dst: TensorId) -> TensorId {
        self.0.node_onto(op, &srcs.iter().copied().map(Some).collect::<Vec<_>>(), dst).unwrap()
    }

    pub(in crate::sched) fn dot(&mut self, weight: TensorId, x: TensorId) -> TensorId {
        self.op(MulMat::PLAIN, &[weight, x])
    }

    pub(in crate::sched) fn sqr(&mut self, x: TensorId) -> TensorId {
        self.op(Unary::Sqr, &[x])
    }

    /// Some rows of a matrix with contiguous rows of 8 floats.
    pub(in crate::sched) fn rows(&mut self, of: TensorId, rows: Range<usize>) -> TensorId {
        let desc = TensorDesc::contiguous(DType::F32, [8, rows.len(), 1, 1]).unwrap();
        self.0.view(of, desc, rows.start * 32).unwrap()
    }
}

/// Devices by letter: `C` a CPU, `G` a GPU, `O` a GPU that prefers to offload MUL_MAT. `refused` lists unsupported ops by
/// device.
fn devices(kinds: &str, refused: &[(usize, OpCode)]) -> Vec<Arc<dyn Device>> {
    let device = |(i, kind): (usize, char)| {
        let (name, what) = if kind == 'C' { ("CPU", DeviceKind::Cpu) } else { ("GPU", DeviceKind::Gpu) };
        let refused = refused.iter().filter(|r| r.0 == i).map(|r| r.1).collect::<Vec<_>>();
        let says = move |node: crate::ops::NodeView<'_>| {
            let op = node.op.code();
            match op {
                op if refused.contains(&op) => Support::No(Unsupported { op, reason: "refused".to_owned() }),
                OpCode::MulMat if kind == 'O' => Support::Offload,
                _ => Support::Yes,
            }
        };
        NoopDevice::new(&format!("{name}{i}"), what).with_support(says).shared()
    };
    kinds.chars().enumerate().map(device).collect()
}

/// One word for each node: its device, and the first letter of its [`AssignReason`].
fn format_assignment(assigned: &[Assignment]) -> String {
    let word = |a: &Assignment| format!("{}{}", a.device, format!("{:?}", a.reason)[..1].to_lowercase());
    assigned.iter().map(word).collect::<Vec<_>>().join(" ")
}

type Case = (&'static str, &'static str, &'static [(usize, OpCode)], fn(&mut SmallTask), &'static str);

/// The assignment in the form of [`format_assignment`], or the error.
fn run(kinds: &str, refused: &[(usize, OpCode)], build: fn(&mut SmallTask), options: &Options) -> String {
    let mut net = SmallTask::new();
    build(&mut net);
    match assign(&net.0.build().unwrap(), &devices(kinds, refused), options) {
        Ok(assigned) => format_assignment(&assigned),
        Err(error) => error.to_string(),
    }
}

fn check_all(cases: &[Case]) {
    for (what, kinds, refused, build, want) in cases {
        assert_eq!(run(kinds, refused, *build, &Options::default()), *want, "{what}");
    }
}

fn one_dot(net: &mut SmallTask, device: usize) {
    let (x, w) = (net.input("x", 1), net.stored(device, "w", 8));
    net.dot(w, x);
}

fn two_dots(net: &mut SmallTask) {
    let (x, a, b) = (net.input("x", 1), net.stored(0, "a", 8), net.stored(1, "b", 8));
    let y = net.dot(a, x);
    net.dot(b, y);
}

fn dot_sqr_dot(net: &mut SmallTask) {
    let (x, a, b) = (net.input("x", 1), net.stored(0, "a", 8), net.stored(1, "b", 8));
    let y = net.dot(a, x);
    let y = net.sqr(y);
    net.dot(b, y);
}

/// A chain of nodes: a digit is a product with a matrix stored on that device, `.` is SQR.
fn chain(net: &mut SmallTask, devices: &str) {
    let mut y = net.input("x", 1);
    for c in devices.chars() {
        y = match c.to_digit(10) {
            Some(device) => {
                let w = net.stored(device as usize, "w", 8);
                net.dot(w, y)
            }
            None => net.sqr(y),
        };
    }
}

#[test]
fn nodes_run_where_their_largest_stored_tensor_is() {
    check_all(&[
        ("each where its weight is", "GG", &[], two_dots, "0s 1s"),
        ("also on CPUs", "CC", &[], two_dots, "0s 1s"),
        (
            "the larger of two",
            "GG",
            &[],
            |n| {
                let (a, b) = (n.stored(0, "a", 1), n.stored(1, "b", 4));
                n.dot(a, b);
            },
            "1s",
        ),
        (
            "the first of equal ones",
            "GG",
            &[],
            |n| {
                let (a, b) = (n.stored(1, "a", 4), n.stored(0, "b", 4));
                n.dot(a, b);
            },
            "1s",
        ),
        (
            "only the bytes that the node reads count",
            "GG",
            &[],
            |n| {
                let (a, b) = (n.stored(0, "a", 64), n.stored(1, "b", 4));
                let a = n.rows(a, 3..4);
                n.dot(a, b);
            },
            "1s",
        ),
        ("its device does not support the node", "GC", &[(0, OpCode::MulMat)], |n| one_dot(n, 0), "1l"),
        ("then the neighbour's device", "GGC", &[(0, OpCode::MulMat)], |n| chain(n, "10"), "1s 1n"),
    ]);
}

#[test]
fn unassigned_nodes_join_their_neighbours() {
    check_all(&[
        ("down and up, around a CPU", "GGC", &[], |n| chain(n, ".0.2.1."), "0n 0s 0n 2s 1n 1s 1n"),
        ("between CPUs", "GGC", &[], |n| chain(n, "2.2.1"), "2s 2n 2s 1n 1s"),
        ("only a CPU has a neighbour", "GC", &[], |n| chain(n, ".1."), "1n 1s 1n"),
        ("all are CPUs", "CC", &[], |n| chain(n, ".0.1."), "0n 0s 0n 1s 1n"),
        ("none is a CPU", "GG", &[], |n| chain(n, ".0.1."), "0n 0s 0n 1s 1n"),
        ("refused from above, taken from below", "GG", &[(0, OpCode::Sqr)], dot_sqr_dot, "0s 1n 1s"),
        ("refused by both", "GGC", &[(0, OpCode::Sqr), (1, OpCode::Sqr)], dot_sqr_dot, "0s 2l 1s"),
        (
            "an unsupported node does not separate its neighbours",
            "GC",
            &[(0, OpCode::Sqr)],
            |n| {
                let (x, w) = (n.input("x", 1), n.stored(0, "w", 8));
                let y = n.dot(w, x);
                let z = n.sqr(y);
                n.op(Binary::Add, &[y, z]);
            },
            "0s 1l 0n",
        ),
    ]);
}

#[test]
fn remaining_nodes_follow_the_bytes_of_their_sources() {
    check_all(&[
        ("the first device, when nothing decides", "GC", &[], |n| chain(n, ".."), "0l 0l"),
        ("the first that can", "GC", &[(0, OpCode::Sqr)], |n| chain(n, ".."), "1l 1l"),
        (
            "most bytes",
            "GGG",
            &[(0, OpCode::MulMat)],
            |n| {
                let (a, b) = (n.stored(0, "a", 8), n.stored(2, "b", 4));
                n.dot(a, b);
            },
            "2l",
        ),
        (
            "of computed ones",
            "GGG",
            &[(0, OpCode::Sqr), (1, OpCode::Sqrt), (2, OpCode::Sqrt)],
            |n| {
                let x = n.input("x", 1);
                let y = n.op(Unary::Sqrt, &[x]);
                let z = n.sqr(y);
                n.op(Binary::Add, &[z, z]);
            },
            "0l 1l 1l",
        ),
    ]);
}

fn written_cache(net: &mut SmallTask) {
    let (x, ids, w) = (net.input("x", 1), net.ids(1), net.stored(0, "w", 8));
    let cache = net.stored(1, "cache", 64);
    let k = net.dot(w, x);
    net.onto(Rows::SetRows, &[k, ids, cache], cache);
}

/// A computed matrix of 2 rows. The product of another device is copied to its second row.
fn written_view(net: &mut SmallTask) {
    let (x, a, b) = (net.input("x", 2), net.stored(0, "a", 8), net.stored(1, "b", 8));
    let y = net.dot(a, x);
    let first = net.rows(y, 0..1);
    let z = net.dot(b, first);
    let second = net.rows(y, 1..2);
    net.onto(CopyOp::Cpy, &[z], second);
}

/// As [`written_view`], without stored tensors and with the copy pinned.
fn pinned_view(net: &mut SmallTask) {
    let x = net.input("x", 2);
    let y = net.sqr(x);
    let (from, to) = (net.rows(x, 0..1), net.rows(y, 1..2));
    net.onto(CopyOp::Cpy, &[from], to);
    net.0.pin(1).unwrap();
}

#[test]
fn nodes_run_where_their_destination_is() {
    const CPY: OpCode = OpCode::Cpy;
    const SET: OpCode = OpCode::SetRows;
    check_all(&[
        ("rows of a cache", "GG", &[], written_cache, "0s 1d"),
        ("a view of a computed tensor", "GG", &[], written_view, "0s 1s 0d"),
        ("the maker goes to the device of a pinned follower", "GG", &[], pinned_view, "1d 1p"),
        ("the maker goes to a device that supports both", "GC", &[(0, CPY)], written_view, "1n 1s 1d"),
        (
            "a cache's device refuses",
            "GG",
            &[(1, SET)],
            written_cache,
            "cannot place SET_ROWS (tensor 5): on GPU1, SET_ROWS is not supported: refused",
        ),
        (
            "no device supports all nodes that write it",
            "GG",
            &[(0, CPY), (1, OpCode::MulMat)],
            |n| {
                let (x, a) = (n.input("x", 2), n.stored(0, "a", 8));
                let y = n.dot(a, x);
                let (from, to) = (n.rows(x, 0..1), n.rows(y, 1..2));
                n.onto(CopyOp::Cpy, &[from], to);
            },
            "cannot place MUL_MAT (tensor 2): on GPU0, CPY is not supported: refused; on GPU1, MUL_MAT is not \
             supported: refused",
        ),
    ]);
}

#[test]
fn pinned_nodes_run_on_their_device() {
    check_all(&[
        (
            "against the weight, and neighbours follow",
            "GG",
            &[],
            |n| {
                let (x, w) = (n.input("x", 1), n.stored(0, "w", 8));
                let y = n.dot(w, x);
                n.0.pin(1).unwrap();
                n.sqr(y);
            },
            "1p 1n",
        ),
        (
            "where the destination is",
            "GG",
            &[],
            |n| {
                written_cache(n);
                n.0.pin(1).unwrap();
            },
            "0s 1p",
        ),
        (
            "not where the destination is",
            "GG",
            &[],
            |n| {
                written_cache(n);
                n.0.pin(0).unwrap();
            },
            "cannot place SET_ROWS (tensor 5): on GPU0, SET_ROWS is not supported: it writes memory that lies on GPU1",
        ),
        (
            "two for one memory",
            "GG",
            &[],
            |n| {
                let x = n.input("x", 1);
                let y = n.sqr(x);
                n.0.pin(0).unwrap();
                n.0.name(y, "y");
                let y = n.onto(CopyOp::Cpy, &[x], y);
                n.0.name(y, "y again");
                n.0.pin(1).unwrap();
            },
            "cannot place CPY \"y again\": on GPU1, CPY is not supported: it writes memory that lies on GPU0",
        ),
        (
            "to a device that does not support the node",
            "GG",
            &[(1, OpCode::MulMat)],
            |n| {
                one_dot(n, 0);
                n.0.pin(1).unwrap();
            },
            "cannot place MUL_MAT (tensor 2): on GPU1, MUL_MAT is not supported: refused",
        ),
        (
            "to a device that does not support another node that writes the memory",
            "GG",
            &[(1, OpCode::Sqr)],
            pinned_view,
            "cannot place SQR (tensor 1): on GPU1, SQR is not supported: refused",
        ),
        (
            "beyond the list",
            "GG",
            &[],
            |n| {
                one_dot(n, 0);
                n.0.pin(2).unwrap();
            },
            "MUL_MAT (tensor 2) names device 2, but there are 2 devices, numbered from 0",
        ),
        (
            "a stored tensor beyond the list",
            "GG",
            &[],
            |n| one_dot(n, 7),
            "\"w\" names device 7, but there are 2 devices, numbered from 0",
        ),
    ]);
}

#[test]
fn offload_moves_nodes_from_the_cpu_to_a_device_that_prefers_them() {
    const DOT: OpCode = OpCode::MulMat;
    let on_the_last: fn(&mut SmallTask) = |n| one_dot(n, 2);
    let cases: &[(Case, &str)] = &[
        (("the first device that prefers them", "OOC", &[], on_the_last, "0o"), "2s"),
        (("the next device, if the first does not support them", "OOC", &[(0, DOT)], on_the_last, "1o"), "2s"),
        (("not a device that does not prefer them", "GGC", &[], on_the_last, "2s"), "2s"),
        (("not weights of a GPU", "OOG", &[], on_the_last, "2s"), "2s"),
        (("not a device after the CPU in the list", "COO", &[], |n| one_dot(n, 0), "0s"), "0s"),
        (
            (
                "not a tensor that a node writes",
                "OC",
                &[],
                |n| {
                    let (x, cache) = (n.input("x", 1), n.stored(1, "cache", 8));
                    n.onto(Unary::Sqr, &[cache], cache);
                    n.dot(cache, x);
                },
                "1d 1s",
            ),
            "1d 1s",
        ),
        (
            (
                "not a device that does not support the followers",
                "OC",
                &[(0, OpCode::Cpy)],
                |n| {
                    let (x, w) = (n.input("x", 1), n.stored(1, "w", 8));
                    let y = n.dot(w, x);
                    n.onto(CopyOp::Cpy, &[x], y);
                },
                "1s 1d",
            ),
            "1s 1d",
        ),
    ];
    for ((what, kinds, refused, build, with), without) in cases {
        for (offload, want) in [(true, with), (false, without)] {
            let options = Options { offload, ..Options::default() };
            assert_eq!(run(kinds, refused, *build, &options), *want, "{what}, offload {offload}");
        }
    }
}

#[test]
fn placement_errors_list_the_reason_of_each_device() {
    const SQR: OpCode = OpCode::Sqr;
    let refused = "cannot place SQR (tensor 1): on GPU0, SQR is not supported: refused; on CPU1, SQR is not supported: \
                   refused";
    check_all(&[
        ("refused by all", "GC", &[(0, SQR), (1, SQR)], |n| chain(n, "."), refused),
        ("no devices", "", &[], |n| chain(n, "."), "cannot place SQR (tensor 1): "),
        ("no nodes", "G", &[], |_| (), ""),
    ]);
}

/// A decoder with blocks of 20 nodes each, spread evenly over the devices. The caches of a block are on the device of its
/// weights.
pub(in crate::sched) fn decoder(blocks: usize, devices: usize) -> Task {
    let mut net = SmallTask::new();
    let (mut x, ids, mask) = (net.input("x", 1), net.ids(1), net.0.input("mask", DType::F32, [16, 1, 1, 1]).unwrap());
    for block in 0..blocks {
        let device = block * devices / blocks;
        let [norm, norm2] = ["norm", "norm2"].map(|name| net.stored(device, name, 1));
        let [q, k, v, o, gate, up, down] = ["q", "k", "v", "o", "gate", "up", "down"].map(|n| net.stored(device, n, 8));
        let [keys, values] = ["keys", "values"].map(|name| net.stored(device, name, 16));
        let h = net.op(Norm::RmsNorm { eps: 1e-6 }, &[x]);
        let h = net.op(Binary::Mul, &[h, norm]);
        let [q, k, v] = [q, k, v].map(|w| net.dot(w, h));
        net.onto(Rows::SetRows, &[k, ids, keys], keys);
        net.onto(Rows::SetRows, &[v, ids, values], values);
        let scores = net.dot(keys, q);
        let scores = net.op(Binary::Add, &[scores, mask]);
        let columns = net.0.permute(values, [1, 0, 2, 3]).unwrap();
        let columns = net.op(CopyOp::Cont, &[columns]);
        let seen = net.dot(columns, scores);
        let out = net.dot(o, seen);
        x = net.op(Binary::Add, &[x, out]);
        let h = net.op(Norm::RmsNorm { eps: 1e-6 }, &[x]);
        let h = net.op(Binary::Mul, &[h, norm2]);
        let [gate, up] = [gate, up].map(|w| net.dot(w, h));
        let gate = net.sqr(gate);
        let h = net.op(Binary::Mul, &[gate, up]);
        let h = net.dot(down, h);
        x = net.op(Binary::Add, &[x, h]);
    }
    net.0.build().unwrap()
}

#[test]
fn support_is_queried_once_per_assigned_node() {
    let queries = Arc::new(AtomicUsize::new(0));
    let list = (0..8).map(|i| {
        let queries = Arc::clone(&queries);
        let says = move |_: crate::ops::NodeView<'_>| {
            queries.fetch_add(1, Ordering::Relaxed);
            Support::Yes
        };
        NoopDevice::new(&format!("GPU{i}"), DeviceKind::Gpu).with_support(says).shared()
    });
    let (task, list) = (decoder(40, 8), list.collect::<Vec<_>>());
    let assigned = assign(&task, &list, &Options::default()).unwrap();
    assert_eq!(queries.load(Ordering::Relaxed), assigned.len());
    let mut used = assigned.iter().map(|a| a.device).collect::<Vec<_>>();
    assert!(used.is_sorted(), "{used:?}");
    used.dedup();
    assert_eq!(used.len(), 8);
}
