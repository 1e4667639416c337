//! Who can call whom.

use super::state::UnlinkedFunction;

/// The call graph of a module.
#[derive(Debug)]
pub(super) struct CallGraph {
    /// Callees of each function; after them those of one more node, which stands for every call through an address.
    edges: Vec<Vec<usize>>,
}

impl CallGraph {
    /// `taken` are the functions whose address something holds: what an indirect call may reach.
    pub(super) fn new(bodies: &[UnlinkedFunction], taken: impl Iterator<Item = u32>) -> Self {
        let any = bodies.len();
        let direct = |body: &UnlinkedFunction| {
            let calls = body.calls.iter().map(|&callee| callee as usize);
            calls.chain(body.indirect.then_some(any)).collect()
        };
        let mut edges: Vec<Vec<usize>> = bodies.iter().map(direct).collect();
        edges.push(taken.map(|callee| callee as usize).collect());
        Self { edges }
    }

    /// Functions that a call chain from each of `kernels` may reach, in rising order; empty for the others. `weights` says what
    /// each function adds to a kernel that reaches it; `Err` is the first kernel with which it is more than `limit` in all.
    pub(super) fn reachable_functions(
        &self,
        kernels: impl Iterator<Item = usize>,
        weights: &[usize],
        limit: usize,
    ) -> Result<Vec<Vec<usize>>, usize> {
        let mut all = vec![Vec::new(); weights.len()];
        // For which kernel a node was last seen.
        let mut seen = vec![usize::MAX; self.edges.len()];
        let mut weight = 0usize;
        for kernel in kernels {
            let mut open = vec![kernel];
            let mut reached = Vec::new();
            while let Some(node) = open.pop() {
                let own = weights.get(node).copied().unwrap_or(0);
                weight = weight.saturating_add(own).saturating_add(self.edges[node].len());
                if weight > limit {
                    return Err(kernel);
                }
                for &callee in &self.edges[node] {
                    if std::mem::replace(&mut seen[callee], kernel) != kernel {
                        open.push(callee);
                        // The last node is no function.
                        if callee < weights.len() {
                            reached.push(callee);
                        }
                    }
                }
            }
            reached.sort_unstable();
            all[kernel] = reached;
        }
        Ok(all)
    }

    /// Which functions a call chain from themselves may reach: those in a strongly connected component of several nodes, or
    /// with an edge to themselves. (Tarjan's algorithm, with a stack of its own: call chains may be long.)
    pub(super) fn recursive(&self) -> Vec<bool> {
        const NEW: usize = usize::MAX;
        let count = self.edges.len();
        let mut recursive: Vec<bool> = self.edges.iter().enumerate().map(|(node, to)| to.contains(&node)).collect();
        let mut index = vec![NEW; count];
        let mut low = vec![NEW; count];
        let mut on_stack = vec![false; count];
        let mut stack = Vec::new();
        // Nodes that are being visited, with the number of edges followed so far.
        let mut path: Vec<(usize, usize)> = Vec::new();
        let mut next = 0;
        for root in 0..count {
            if index[root] == NEW {
                path.push((root, 0));
            }
            while let Some((node, followed)) = path.last_mut() {
                let node = *node;
                if *followed == 0 && index[node] == NEW {
                    (index[node], low[node]) = (next, next);
                    next += 1;
                    stack.push(node);
                    on_stack[node] = true;
                }
                if let Some(&callee) = self.edges[node].get(*followed) {
                    *followed += 1;
                    if index[callee] == NEW {
                        path.push((callee, 0));
                    } else if on_stack[callee] {
                        low[node] = low[node].min(index[callee]);
                    }
                    continue;
                }
                path.pop();
                if let Some(&(caller, _)) = path.last() {
                    low[caller] = low[caller].min(low[node]);
                }
                if low[node] == index[node] {
                    let start = stack.iter().rposition(|&member| member == node).unwrap_or(0);
                    let component = stack.split_off(start);
                    for &member in &component {
                        on_stack[member] = false;
                        recursive[member] |= component.len() > 1;
                    }
                }
            }
        }
        recursive.truncate(count - 1);
        recursive
    }
}
