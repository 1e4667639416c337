//! Call graph of a module: which functions each kernel may reach, and which functions are recursive.

use super::state::UnlinkedFunction;

/// The call graph of a module.
#[derive(Debug)]
pub(super) struct CallGraph {
    /// Callees of each function.
    edges: Vec<Vec<usize>>,
}

impl CallGraph {
    pub(super) fn new(bodies: &[UnlinkedFunction]) -> Self {
        let callees = |body: &UnlinkedFunction| body.calls.iter().map(|&callee| callee as usize).collect();
        Self { edges: bodies.iter().map(callees).collect() }
    }

    /// For each of `kernels` the functions that it may reach, in ascending order; empty for other functions. Each function adds
    /// its `weights` entry to every kernel that reaches it; `Err` is the first kernel with which the sum over all kernels
    /// exceeds `limit`.
    pub(super) fn reachable_functions(
        &self,
        kernels: impl Iterator<Item = usize>,
        weights: &[usize],
        limit: usize,
    ) -> Result<Vec<Vec<usize>>, usize> {
        let mut all = vec![Vec::new(); weights.len()];
        // The kernel whose traversal visited each node last.
        let mut seen = vec![usize::MAX; self.edges.len()];
        let mut weight = 0usize;
        for kernel in kernels {
            let mut open = vec![kernel];
            let mut reached = Vec::new();
            while let Some(node) = open.pop() {
                weight = weight.saturating_add(weights[node]).saturating_add(self.edges[node].len());
                if weight > limit {
                    return Err(kernel);
                }
                for &callee in &self.edges[node] {
                    if std::mem::replace(&mut seen[callee], kernel) != kernel {
                        open.push(callee);
                        reached.push(callee);
                    }
                }
            }
            reached.sort_unstable();
            all[kernel] = reached;
        }
        Ok(all)
    }

    /// Which functions may call themselves, directly or through others: members of a strongly connected component with several
    /// nodes, or with an edge to themselves. Tarjan's algorithm with an explicit stack, because long call chains would overflow
    /// the thread's stack.
    pub(super) fn recursive(&self) -> Vec<bool> {
        const NEW: usize = usize::MAX;
        let count = self.edges.len();
        let mut recursive: Vec<bool> = self.edges.iter().enumerate().map(|(node, to)| to.contains(&node)).collect();
        let mut index = vec![NEW; count];
        let mut low = vec![NEW; count];
        let mut on_stack = vec![false; count];
        let mut stack = Vec::new();
        // Nodes on the current path, each with the number of its edges followed so far.
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
        recursive
    }
}
