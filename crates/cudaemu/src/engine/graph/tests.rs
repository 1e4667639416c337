//! Tests of graphs and plans, whose nodes are letters.

use super::*;
use crate::handle::Handle;

/// The operation of a node: a letter, or a child graph.
#[derive(Clone, Debug, PartialEq)]
enum TestOp {
    Letter(char),
    Child(GraphId),
}

impl Payload for TestOp {
    fn child(&self) -> Option<GraphId> {
        match self {
            Self::Letter(_) => None,
            Self::Child(graph) => Some(*graph),
        }
    }
}

fn node(raw: u64) -> NodeId {
    NodeId::from_raw(raw)
}

/// Builds a graph from `name<dependencies` words: in "a b<a c<ab", c depends on a and b. Node ids are the letters' codes.
fn graph(text: &str) -> Graph<TestOp> {
    let mut graph = Graph::default();
    for word in text.split_whitespace() {
        let (name, after) = word.split_once('<').unwrap_or((word, ""));
        let name = name.chars().next().unwrap();
        let after: Vec<NodeId> = after.chars().map(|c| node(c as u64)).collect();
        graph.add(node(name as u64), TestOp::Letter(name), &after).unwrap();
    }
    graph
}

fn letters(ids: &[NodeId]) -> String {
    ids.iter().map(|id| char::from(id.raw() as u8)).collect()
}

#[test]
fn roots_order_and_edges_follow_the_dependencies() {
    for (text, roots, order, edges) in [
        ("", "", "", 0),
        ("a", "a", "a", 0),
        ("a b<a c<b", "a", "abc", 2),
        ("a b c<ab", "ab", "abc", 2),
        ("a b<a c<a d<bc", "a", "abcd", 4),
        ("d c<d b<c a<b", "d", "dcba", 3),
    ] {
        let graph = graph(text);
        assert_eq!(letters(&graph.roots()), roots, "{text}");
        assert_eq!(letters(&graph.order()), order, "{text}");
        assert_eq!(graph.edges().len(), edges, "{text}");
    }
}

#[test]
fn the_data_of_an_edge_lives_as_long_as_the_edge() {
    let data = EdgeData { from_port: 1, kind: 1, ..EdgeData::default() };
    let [ab, bc] = [(97, 98), (98, 99)].map(|(from, to)| (node(from), node(to)));
    let mut graph = graph("a b<a c<b");
    graph.set_edge_data(ab, data);
    graph.set_edge_data(bc, data);
    let mut next = 200;
    let (copy, names) = graph.copy(|| {
        next += 1;
        node(next)
    });
    assert_eq!(copy.edge_data((names[&ab.0], names[&ab.1])), data);
    let plan = ExecPlan::new(&graph, &|_| None).unwrap();
    assert_eq!(plan.steps().iter().map(|step| step.programmatic).collect::<Vec<_>>(), [false, true, true]);
    graph.disconnect(&[ab]).unwrap();
    graph.connect(&[ab]).unwrap();
    graph.remove(node(99)).unwrap();
    assert_eq!([ab, bc].map(|edge| graph.edge_data(edge)), [EdgeData::default(); 2]);
}

#[test]
fn rejected_edges_change_nothing() {
    let (a, b, c, d) = (node(97), node(98), node(99), node(100));
    let fresh = || graph("a b<a c<b d");
    let before = fresh().edges();
    for edges in [
        vec![(a, a)],
        vec![(c, a)],
        vec![(b, a)],
        vec![(a, b)],
        vec![(a, node(7))],
        vec![(node(7), a)],
        vec![(a, d), (d, a)],
        vec![(d, a), (c, d)],
        vec![(a, d), (a, d)],
    ] {
        let mut graph = fresh();
        assert_eq!(graph.connect(&edges), Err(Error::InvalidValue), "{edges:?}");
        assert_eq!(graph.edges(), before, "{edges:?}");
    }
    for edges in [vec![(b, a)], vec![(a, b), (a, b)], vec![(a, b), (a, d)]] {
        let mut graph = fresh();
        assert_eq!(graph.disconnect(&edges), Err(Error::InvalidValue), "{edges:?}");
        assert_eq!(graph.edges(), before);
    }
    let mut graph = fresh();
    assert_eq!(graph.add(node(101), TestOp::Letter('e'), &[a, a]), Err(Error::InvalidValue));
    assert_eq!(graph.add(node(101), TestOp::Letter('e'), &[node(9)]), Err(Error::InvalidValue));
    assert_eq!(graph.add(a, TestOp::Letter('e'), &[]), Err(Error::InvalidValue));
    assert_eq!(graph.edges(), before);
}

#[test]
fn edges_and_nodes_are_removed() {
    let mut graph = graph("a b<a c<ab");
    graph.disconnect(&[(node(97), node(99)), (node(97), node(98))]).unwrap();
    assert_eq!(letters(&graph.roots()), "ab");
    graph.connect(&[(node(99), node(97))]).unwrap();
    assert_eq!(letters(&graph.order()), "bca");
    assert_eq!(graph.remove(node(99)).unwrap(), TestOp::Letter('c'));
    assert_eq!((letters(&graph.roots()), graph.edges().len()), ("ab".into(), 0));
    assert_eq!(graph.remove(node(99)), Err(Error::InvalidValue));
    assert_eq!(letters(&graph.dependencies(node(97)).unwrap()), "");
}

#[test]
fn random_graphs_are_in_order_and_reject_cycles() {
    for seed in 0..200 {
        let mut random = fastrand::Rng::with_seed(seed);
        let count = random.u64(2..20);
        let mut graph = Graph::default();
        for id in 0..count {
            graph.add(node(id), TestOp::Letter('x'), &[]).unwrap();
        }
        for _ in 0..60 {
            let edge = (node(random.u64(0..count)), node(random.u64(0..count)));
            let closes = graph.ancestors(&[edge.0]).contains(&edge.1) || graph.edges().contains(&edge);
            assert_eq!(graph.connect(&[edge]).is_err(), closes);
        }
        let order = graph.order();
        assert_eq!(order.len() as u64, count);
        let place = |id| order.iter().position(|&other| other == id).unwrap();
        assert!(graph.edges().iter().all(|&(from, to)| place(from) < place(to)));
        let mut made = 1000;
        let (copy, names) = graph.copy(|| {
            made += 1;
            node(made)
        });
        let renamed: Vec<Edge> = graph.edges().iter().map(|(from, to)| (names[from], names[to])).collect();
        assert_eq!(copy.edges(), renamed);
    }
}

/// The plan as text: each step's letter, or `.` for the begin and the end of a child graph, and the indices of the steps that
/// it depends on.
fn plan_text(plan: &ExecPlan<TestOp>) -> String {
    let steps = plan.steps().iter().map(|step| {
        let name = match &step.payload {
            Some(TestOp::Letter(letter)) => *letter,
            _ => '.',
        };
        let after: Vec<String> = step.after.iter().map(usize::to_string).collect();
        format!("{name}{}", after.join(","))
    });
    steps.collect::<Vec<_>>().join(" ")
}

/// The graph `outer`, plus a child graph node that depends on `child_after`, plus a node `z` that depends on the child.
fn graph_with_child(outer: &str, child_after: &str, child: GraphId) -> Graph<TestOp> {
    let mut graph = graph(outer);
    let after: Vec<NodeId> = child_after.chars().map(|c| node(c as u64)).collect();
    graph.add(node(200), TestOp::Child(child), &after).unwrap();
    graph.add(node(201), TestOp::Letter('z'), &[node(200)]).unwrap();
    graph
}

#[test]
fn a_plan_flattens_child_graphs_between_an_entry_and_an_exit_step() {
    assert_eq!(plan_text(&ExecPlan::new(&graph("a b<a c<a d<bc"), &|_| None).unwrap()), "a b0 c0 d1,2");
    let inner = graph("p q r<p");
    let id = GraphId::from_raw(1);
    let outer = graph_with_child("a b", "a", id);
    let graphs = |wanted: GraphId| (wanted == id).then_some(&inner);
    let mut plan = ExecPlan::new(&outer, &graphs).unwrap();
    assert_eq!(plan_text(&plan), "a b .0 p2 q2 r3 .4,5 z6");
    let empty = Graph::default();
    assert_eq!(plan_text(&ExecPlan::new(&outer, &|_| Some(&empty)).unwrap()), "a b .0 .2 z3");
    assert_eq!(ExecPlan::new(&outer, &|_| None).unwrap_err(), Error::InvalidValue);

    let other = graph("s t u<s");
    let other = ExecPlan::new(&other, &|_| None).unwrap();
    plan.update_child::<()>(node(200), &other, |_, _| Ok(())).unwrap();
    assert_eq!(plan_text(&plan), "a b .0 s2 t2 u3 .4,5 z6");
    assert_eq!(plan.update_child::<()>(node(97), &other, |_, _| Ok(())), Err(UpdateMismatch::Topology(None)));
    // Steps are still found by the nodes of the graph that was instantiated.
    assert_eq!(plan.step(node('r' as u64)).unwrap().payload, Some(TestOp::Letter('u')));
    // A graph that contains itself cannot be planned.
    let deep = graph_with_child("", "", id);
    assert_eq!(ExecPlan::new(&deep, &|_| Some(&deep)).unwrap_err(), Error::InvalidValue);
}

#[test]
fn an_update_needs_the_same_topology_and_fitting_nodes() {
    let plan = |text: &str| ExecPlan::new(&graph(text), &|_| None).unwrap();
    let fits = |old: &TestOp, new: &TestOp| match (old, new) {
        (_, TestOp::Letter('x')) => Err('x'),
        _ => Ok(()),
    };
    for (old, new, result) in [
        ("a b<a", "c d<c", Ok(())),
        ("a b<a", "c d", Err(UpdateMismatch::Topology(Some(node('d' as u64))))),
        ("a b<a", "c", Err(UpdateMismatch::Topology(None))),
        ("a b<a", "c d<c e", Err(UpdateMismatch::Topology(Some(node('e' as u64))))),
        ("a b<a", "c x<c", Err(UpdateMismatch::Node(node('x' as u64), node('b' as u64), 'x'))),
    ] {
        let mut mine = plan(old);
        let its = plan(new);
        assert_eq!(mine.update(&its, fits), result, "{old} / {new}");
        let expected = if result.is_ok() { plan_text(&its) } else { plan_text(&plan(old)) };
        assert_eq!(plan_text(&mine), expected, "{old} / {new}");
    }
    let mut mine = plan("a b<a");
    mine.step_mut(node('a' as u64)).unwrap().enabled = false;
    mine.update(&plan("c d<c"), fits).unwrap();
    assert!(!mine.step(node('a' as u64)).unwrap().enabled);
}
