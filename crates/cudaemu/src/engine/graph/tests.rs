//! Tests of graphs and plans, whose nodes are letters.

use super::*;
use crate::handle::Handle;

fn node(letter: char) -> NodeId {
    NodeId::from_raw(letter as u64)
}

/// Builds a graph from `name<dependencies` words: in "a b<a c<ab", c depends on a and b. Node ids are the letters' codes.
fn graph(text: &str) -> Graph<char> {
    let mut graph = Graph::default();
    for word in text.split_whitespace() {
        let (name, after) = word.split_once('<').unwrap_or((word, ""));
        let name = name.chars().next().unwrap();
        graph.add(node(name), name, &after.chars().map(node).collect::<Vec<_>>()).unwrap();
    }
    graph
}

/// The steps of the graph's plan: each letter with the letters of the steps that it depends on.
fn steps(graph: &Graph<char>) -> Vec<(char, String)> {
    let plan = ExecPlan::new(graph);
    let letter = |&step: &usize| plan.steps()[step].payload;
    plan.steps().iter().map(|step| (step.payload, step.after.iter().map(letter).collect())).collect()
}

fn edge(from: char, to: char) -> (Edge, EdgeData) {
    ((node(from), node(to)), EdgeData::default())
}

#[test]
fn a_plan_orders_the_nodes_by_dependencies_and_age() {
    for (text, order) in [
        ("", ""),
        ("a", "a"),
        ("a b<a c<b", "a b<a c<b"),
        ("a b c<ab", "a b c<ab"),
        ("a b<a c<a d<bc", "a b<a c<a d<bc"),
        ("d c<d b<c a<b", "d c<d b<c a<b"),
    ] {
        let found = steps(&graph(text)).into_iter().map(|(letter, after)| match after.is_empty() {
            true => letter.to_string(),
            false => format!("{letter}<{after}"),
        });
        assert_eq!(found.collect::<Vec<_>>().join(" "), order, "{text}");
    }
    let mut graph = graph("a b c");
    graph.connect(&[edge('c', 'a')]).unwrap();
    assert_eq!(steps(&graph), [('b', String::new()), ('c', String::new()), ('a', "c".into())]);
}

#[test]
fn programmatic_edges_mark_their_steps() {
    let data = EdgeData { from_port: 1, kind: 1, ..EdgeData::default() };
    let mut graph = graph("a b<a c");
    graph.connect(&[((node('b'), node('c')), data)]).unwrap();
    let plan = ExecPlan::new(&graph);
    assert_eq!(plan.steps().iter().map(|step| step.programmatic).collect::<Vec<_>>(), [false, false, true]);
}

#[test]
fn rejected_edges_change_nothing() {
    let before = steps(&graph("a b<a c<b d"));
    let wrong = EdgeData { from_port: 3, kind: 1, ..EdgeData::default() };
    for edges in [
        vec![edge('a', 'a')],
        vec![edge('c', 'a')],
        vec![edge('b', 'a')],
        vec![edge('a', 'b')],
        vec![edge('a', 'x')],
        vec![edge('x', 'a')],
        vec![edge('a', 'd'), edge('d', 'a')],
        vec![edge('d', 'a'), edge('c', 'd')],
        vec![edge('a', 'd'), edge('a', 'd')],
        vec![edge('a', 'd'), ((node('b'), node('d')), wrong)],
    ] {
        let mut graph = graph("a b<a c<b d");
        assert_eq!(graph.connect(&edges), Err(Error::InvalidValue), "{edges:?}");
        assert_eq!(steps(&graph), before, "{edges:?}");
    }
    let mut graph = graph("a b<a c<b d");
    assert_eq!(graph.add(node('e'), 'e', &[node('a'); 2]), Err(Error::InvalidValue));
    assert_eq!(graph.add(node('e'), 'e', &[node('x')]), Err(Error::InvalidValue));
    assert_eq!(graph.add(node('a'), 'e', &[]), Err(Error::InvalidValue));
    assert_eq!(steps(&graph), before);
}

#[test]
fn a_step_is_changed_by_its_node() {
    let mut plan = ExecPlan::new(&graph("a b<a"));
    plan.step_mut(node('b')).unwrap().payload = 'c';
    assert_eq!(plan.steps()[1].payload, 'c');
    assert!(plan.step_mut(node('x')).is_err());
}
