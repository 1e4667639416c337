//! Which results are private: products of a layer whose memory an allocator shares with other tensors.

use super::{MAX_BYTES, with_private_results};
use crate::graph::{Builder, SlotOffset, TensorId};
use crate::ops::mul_mat::MulMat;
use crate::ops::rows::Rows;
use crate::ops::unary::Unary;
use crate::tensor::DType::{F32, I64, Q8_0};
use crate::tensor::TensorDesc;

const K: usize = 64;

/// A graph: two products of the same columns, the second in the place of the first, and readers of both.
struct Draft {
    b: Builder,
    /// Result of the second product, and a view of it.
    second: TensorId,
    view: TensorId,
    /// Memory of the first product.
    memory: TensorId,
}

/// `rows` is the number of rows of the second product, and `readers` the number of readers of its view.
fn draft(rows: usize, readers: usize) -> Draft {
    let mut b = Builder::new();
    let columns = b.leaf(F32, [K, 1, 1, 1]).unwrap();
    let memory = b.leaf(F32, [rows.max(K), 1, 1, 1]).unwrap();
    let product = |b: &mut Builder, rows: usize| {
        let weights = b.leaf(Q8_0, [K, rows, 1, 1]).unwrap();
        let onto = b.view(memory, TensorDesc::contiguous(F32, [rows, 1, 1, 1]).unwrap(), 0).unwrap();
        b.node_into(MulMat::PLAIN, &[Some(weights), Some(columns)], onto).unwrap()
    };
    let first = product(&mut b, K);
    b.node(Unary::Sqr, &[Some(first)]).unwrap();
    let second = product(&mut b, rows);
    b.set_use_count(second, 1).unwrap();
    let view = b.view(second, TensorDesc::contiguous(F32, [rows / 2, 1, 1, 1]).unwrap(), 4 * (rows / 2)).unwrap();
    b.set_use_count(view, readers as u32).unwrap();
    for _ in 0..readers {
        b.node(Unary::Sqr, &[Some(view)]).unwrap();
    }
    Draft { b, second, view, memory }
}

/// Places of the second product and of its view, if the product is private, and the bytes of the slot.
fn private_places(draft: Draft) -> Option<([SlotOffset; 2], u64)> {
    let (graph, bytes) = with_private_results(&draft.b.build())?;
    Some(([draft.second, draft.view].map(|id| graph.tensor(id).unwrap().place.unwrap()), bytes))
}

#[test]
fn a_result_in_the_memory_of_an_earlier_one_is_private() {
    for (rows, readers, bytes) in [(K, 1, 256), (K, 3, 256), (4 * K, 2, 1024), (MAX_BYTES / 4, 1, MAX_BYTES as u64)] {
        let want = [0, rows / 2 * 4].map(|offset| SlotOffset { slot: 1, offset });
        assert_eq!(private_places(draft(rows, readers)), Some((want, bytes)), "{rows} rows, {readers} readers");
    }
}

#[test]
fn a_result_that_others_may_read_stays_in_the_clients_memory() {
    let change = |change: &dyn Fn(&mut Draft)| {
        let mut draft = draft(K, 1);
        change(&mut draft);
        private_places(draft)
    };
    assert!(change(&|_| {}).is_some());
    for (name, got) in [
        ("a large result", private_places(draft(MAX_BYTES / 4 + 2, 1))),
        ("a result that no node reads", private_places(draft(K, 0))),
        ("another reader of the result", change(&|d| d.b.set_use_count(d.second, 2).unwrap())),
        ("another reader of the view", change(&|d| d.b.set_use_count(d.view, 2).unwrap())),
        ("an output", {
            let mut b = draft(K, 1);
            // Without a use count.
            let graph = std::mem::take(&mut b.b).build();
            let (readers, slots) = (vec![9; graph.tensors().len()], graph.slot_sizes().to_vec());
            let outputs = graph.subgraph(0..graph.nodes().len(), &readers, slots, |t| t.place);
            with_private_results(&outputs).map(|_| ([SlotOffset { slot: 0, offset: 0 }; 2], 0))
        }),
        (
            "a reader of the memory",
            change(&|d| {
                d.b.node(Unary::Sqr, &[Some(d.memory)]).unwrap();
            }),
        ),
        ("a result onto which its last reader sets rows", {
            let mut d = draft(K, 1);
            let cache = d.b.view(d.memory, TensorDesc::contiguous(F32, [K, 1, 1, 1]).unwrap(), 0).unwrap();
            let (rows, ids) = (d.b.leaf(F32, [K, 1, 1, 1]).unwrap(), d.b.leaf(I64, [1, 1, 1, 1]).unwrap());
            d.b.set_use_count(d.second, 2).unwrap();
            d.b.node_into(Rows::SetRows, &[Some(rows), Some(ids), Some(d.second)], cache).unwrap();
            private_places(d)
        }),
        ("a view outside of the result", {
            let mut d = draft(K, 1);
            let far = d.b.leaf(F32, [K, 1, 1, 1]).unwrap();
            let place = d.b.tensor(far).unwrap().place.unwrap();
            let graph = std::mem::take(&mut d.b).build().with_places([(d.view, place)]);
            with_private_results(&graph).map(|_| ([place; 2], 0))
        }),
        ("a result that is changed in place, and read again", {
            let mut d = draft(K, 2);
            let half = TensorDesc::contiguous(F32, [K / 2, 1, 1, 1]).unwrap();
            let onto = d.b.view(d.memory, half, 4 * (K / 2)).unwrap();
            d.b.set_use_count(d.view, 4).unwrap();
            d.b.node_into(Unary::Sqr, &[Some(d.view)], onto).unwrap();
            d.b.node(Unary::Sqr, &[Some(d.view)]).unwrap();
            private_places(d)
        }),
    ] {
        assert_eq!(got, None, "{name}");
    }
}

#[test]
fn memory_that_is_written_again_may_be_read() {
    let mut draft = draft(K, 1);
    let x = draft.b.leaf(F32, [K, 1, 1, 1]).unwrap();
    draft.b.node_into(Unary::Sqr, &[Some(x)], draft.memory).unwrap();
    draft.b.node(Unary::Sqr, &[Some(draft.memory)]).unwrap();
    assert!(private_places(draft).is_some());
}

#[test]
fn products_that_are_not_in_each_others_way_stay_in_the_clients_memory() {
    let mut b = Builder::new();
    let columns = b.leaf(F32, [K, 1, 1, 1]).unwrap();
    for _ in 0..3 {
        let weights = b.leaf(Q8_0, [K, K, 1, 1]).unwrap();
        let product = b.node(MulMat::PLAIN, &[Some(weights), Some(columns)]).unwrap();
        b.set_use_count(product, 1).unwrap();
        b.node(Unary::Sqr, &[Some(product)]).unwrap();
    }
    assert!(with_private_results(&b.build()).is_none());
}
