//! Who can call whom.

use super::state::Body;

/// The call graph of a module.
#[derive(Debug)]
pub(super) struct Graph {
    /// Callees of each function; after them those of one more node, which stands for every call through an address.
    edges: Vec<Vec<usize>>,
}

impl Graph {
    /// `taken` are the functions whose address something holds: what an indirect call may reach.
    pub(super) fn new(bodies: &[Body], taken: impl Iterator<Item = u32>) -> Self {
        let any = bodies.len();
        let direct = |body: &Body| {
            let calls = body.calls.iter().map(|&callee| callee as usize);
            calls.chain(body.indirect.then_some(any)).collect()
        };
        let mut edges: Vec<Vec<usize>> = bodies.iter().map(direct).collect();
        edges.push(taken.map(|callee| callee as usize).collect());
        Self { edges }
    }

    /// Functions that a call chain from this one may reach; itself only if the chain can come back.
    pub(super) fn reached(&self, from: usize) -> Vec<usize> {
        let mut seen = vec![false; self.edges.len()];
        let mut open = vec![from];
        let mut reached = Vec::new();
        while let Some(node) = open.pop() {
            for &callee in &self.edges[node] {
                if !std::mem::replace(&mut seen[callee], true) {
                    open.push(callee);
                    // The last node is no function.
                    if callee + 1 < self.edges.len() {
                        reached.push(callee);
                    }
                }
            }
        }
        reached.sort_unstable();
        reached
    }
}
