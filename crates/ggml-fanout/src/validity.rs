//! Validity of memory after a server was lost: which bytes a graph needs, and which it writes.
//!
//! The memory of a server that came back holds the weights, which are loaded again, and zeros. Hosts do not know that: they go on with
//! the positions of a KV cache that they believe to be there. So the bytes that were lost are known ([`LostRanges`]), and before
//! a graph runs on memory that has some, its nodes are followed in order:
//!
//! - Attention reads a position of the cache if its mask is not -inf there. A lost position that is read fails the graph.
//!   Lost positions behind the mask are harmless, because their bytes are zeros.
//! - SET_ROWS writes the rows that its indices name. Whatever writes a tensor makes its bytes valid.
//! - Copies, row lookups and ROPE move lost bytes along, so that shifted and copied caches stay lost.
//! - Any other node that reads a lost byte fails the graph.
//!
//! Masks and indices are inputs of the graph, so they are in the device's memory before it runs, and are read from there. All
//! this costs nothing while no bound memory has lost bytes.

use crate::abi::{FLAG_COMPUTE, Tensor};
use crate::buffer::BufferState;
use crate::host;
use crate::lost_ranges::LostRanges;
use crate::program_cache::PreparedGraph;
use crate::support::describe;
use fanout::ops::OpCode;
use fanout::tensor::{DType, TensorDesc};
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::rc::Rc;

/// Reads bytes of a tensor's memory: buffer, first byte, number of bytes.
pub(crate) type ReadMemory<'a> = dyn FnMut(&BufferState, u64, u64) -> Result<Vec<u8>, String> + 'a;

/// Follows a graph. Returns what is lost of each of its buffers after it has run.
pub(crate) fn follow(
    graph: &PreparedGraph,
    states: &[&BufferState],
    read: &mut ReadMemory<'_>,
) -> Result<Vec<LostRanges>, String> {
    let index = graph.tensors.iter().enumerate().map(|(at, (pointer, _))| (*pointer, at)).collect();
    let lost = states.iter().map(|state| state.lost()).collect();
    let mut follow = Follow {
        graph,
        states,
        index,
        lost,
        lost_scores: HashMap::new(),
        masked_scores: HashSet::new(),
        unread: HashMap::new(),
        inputs: HashMap::new(),
        read,
    };
    for at in 0..graph.readers.len() {
        follow.node(at)?;
    }
    // Scores that no softmax of this graph has masked may be read elsewhere.
    if let Some(&at) = follow.lost_scores.keys().find(|at| !follow.masked_scores.contains(at)) {
        return Err(follow.needs(at));
    }
    Ok(follow.lost)
}

/// By stream (dimension 3): a flag per position of a cache.
type Positions = Vec<Vec<bool>>;

struct Follow<'a, 'r> {
    graph: &'a PreparedGraph,
    states: &'a [&'a BufferState],
    /// Number of each tensor in the graph.
    index: HashMap<*const Tensor, usize>,
    /// By buffer of the graph.
    lost: Vec<LostRanges>,
    /// Scores of attention: positions (dimension 0) that come from lost keys.
    lost_scores: HashMap<usize, Positions>,
    /// Lost scores that a softmax or an element-wise op before it has read.
    masked_scores: HashSet<usize>,
    /// Probabilities of attention: positions that are zero for every query.
    unread: HashMap<usize, Positions>,
    /// Inputs that were read: masks and indices.
    inputs: HashMap<usize, Rc<[u8]>>,
    read: &'a mut ReadMemory<'r>,
}

/// Lost elements of a tensor in one of its rows.
struct LostRun {
    /// Elements of dimension 0; blocks of a block type.
    elements: Range<usize>,
    /// Indices of dimensions 1 to 3.
    row: [usize; 3],
}

impl Follow<'_, '_> {
    fn node(&mut self, at: usize) -> Result<(), String> {
        let tensor = self.tensor(at);
        let Some((op, params)) = host::get().numbers.op(tensor.op, &tensor.op_params) else { return Ok(()) };
        if op.is_view() || tensor.ne.contains(&0) || tensor.flags & FLAG_COMPUTE == 0 {
            return Ok(());
        }
        let sources: Vec<Option<usize>> = tensor.src.iter().map(|&src| self.find(src, at)).collect();
        let source = |i: usize| sources.get(i).copied().flatten();
        // Lost scores reach the softmax that masks them by element-wise ops, and nothing else.
        let elementwise =
            matches!(op, OpCode::SoftMax | OpCode::Scale | OpCode::Unary | OpCode::Add | OpCode::Mul | OpCode::Clamp);
        let mut lost_scores = None;
        for (i, source) in sources.iter().enumerate().filter_map(|(i, source)| Some((i, (*source)?))) {
            let shown = self.shown(source);
            if let Some(lost) = self.lost_scores.get(&shown) {
                if !elementwise || i != 0 || self.base(source) != shown {
                    return Err(self.needs(source));
                }
                lost_scores = Some(lost.clone());
                self.masked_scores.insert(shown);
            }
        }
        match op {
            OpCode::FlashAttnExt => {
                let queries = source(0).map_or(0, |queries| self.tensor(queries).ne[1]);
                for kv in [source(1), source(2)].into_iter().flatten() {
                    let lost = self.lost_positions(kv, 1);
                    if lost.iter().flatten().any(|&lost| lost) {
                        let unread = self.masked(source(3), queries)?;
                        self.expect_unread(kv, &lost, unread.as_ref())?;
                    }
                }
                self.expect_valid([source(0), source(3), source(4)])?;
                self.write(at);
            }
            OpCode::MulMat => {
                let (Some(weights), Some(columns)) = (source(0), source(1)) else { return Ok(()) };
                match self.unread.get(&self.base(columns)).cloned() {
                    // Values of attention: the product sums over positions.
                    Some(unread) => {
                        let lost = self.lost_positions(weights, 0);
                        self.expect_unread(weights, &lost, Some(&unread))?;
                    }
                    // Keys of attention: each row of them is a row of scores.
                    None => {
                        let lost = self.lost_positions(weights, 1);
                        if lost.iter().flatten().any(|&lost| lost) {
                            let in_cache = self.place(weights).is_some_and(|(at, _)| !self.states[at].holds_weights());
                            if !in_cache {
                                return Err(self.needs(weights));
                            }
                            self.lost_scores.insert(at, lost);
                        }
                    }
                }
                self.expect_valid([Some(columns)])?;
                self.write(at);
            }
            OpCode::SoftMax => {
                let unread = self.masked(source(1), tensor.ne[1])?;
                if let (Some(scores), Some(lost)) = (source(0), lost_scores) {
                    self.expect_unread(scores, &lost, unread.as_ref())?;
                }
                self.expect_valid(sources.iter().copied())?;
                self.write(at);
                if let Some(unread) = unread {
                    self.unread.insert(at, unread);
                }
            }
            OpCode::SetRows => {
                let (Some(rows), Some(indices)) = (source(0), source(1)) else { return Ok(()) };
                self.expect_valid([Some(indices)])?;
                let rows_lost = !self.lost_runs(rows).is_empty();
                let indices = self.integers(indices)?;
                self.set_rows(at, rows, &indices, rows_lost);
            }
            OpCode::GetRows => {
                let (Some(table), Some(indices)) = (source(0), source(1)) else { return Ok(()) };
                self.expect_valid([Some(indices)])?;
                let any = !self.lost_runs(table).is_empty();
                self.write(at);
                if any {
                    let indices = self.integers(indices)?;
                    self.get_rows(at, table, &indices);
                }
            }
            // States of sequences by index: only the rows that the indices name are read.
            OpCode::SsmScan if source(6).is_some() => {
                let (Some(states), Some(indices)) = (source(0), source(6)) else { return Ok(()) };
                let lost = self.lost_runs(states);
                if !lost.is_empty() {
                    let indices = self.integers(indices)?;
                    if lost.iter().any(|run| indices.contains(&(run.row[2] as i64))) {
                        return Err(self.needs(states));
                    }
                }
                self.expect_valid(sources[1..].iter().copied())?;
                self.write(at);
            }
            // Zeroing of a state.
            OpCode::Scale if f32::from_bits(params[0].cast_unsigned()) == 0.0 => self.write(at),
            OpCode::Dup | OpCode::Cpy | OpCode::Cont | OpCode::Rope | OpCode::RopeBack => {
                let Some(from) = source(0) else { return Ok(()) };
                self.expect_valid(sources[1..].iter().copied().filter(|_| op == OpCode::Rope))?;
                let lost = self.lost_runs(from);
                self.write(at);
                self.move_lost(from, at, &lost);
            }
            OpCode::Scale | OpCode::Unary | OpCode::Add | OpCode::Mul | OpCode::Clamp => {
                self.expect_valid(sources.iter().copied())?;
                self.write(at);
                if let Some(scores) = lost_scores {
                    self.lost_scores.insert(at, scores);
                }
            }
            _ => {
                self.expect_valid(sources.iter().copied())?;
                self.write(at);
            }
        }
        Ok(())
    }

    fn tensor(&self, at: usize) -> Tensor {
        self.graph.tensors[at].1
    }

    /// The number of a source of node `at`; `None` for an absent one, and for the node itself.
    fn find(&self, pointer: *const Tensor, at: usize) -> Option<usize> {
        self.index.get(&pointer).copied().filter(|&found| found != at)
    }

    /// The tensor that a view shows a part of.
    fn shown(&self, at: usize) -> usize {
        let mut shown = at;
        while let Some(source) = self.viewed(shown) {
            shown = source;
        }
        shown
    }

    /// The tensor that a view shows, as far as they start at the same byte.
    fn base(&self, at: usize) -> usize {
        let mut base = at;
        while let Some(source) = self.viewed(base)
            && self.tensor(source).data == self.tensor(base).data
        {
            base = source;
        }
        base
    }

    /// The source of a view op.
    fn viewed(&self, at: usize) -> Option<usize> {
        let tensor = self.tensor(at);
        let is_view = host::get().numbers.op(tensor.op, &tensor.op_params).is_some_and(|(op, _)| op.is_view());
        if is_view { self.find(tensor.src[0], at) } else { None }
    }

    /// The buffer of a tensor in the graph, and its first byte; `None` for memory of no device.
    fn place(&self, at: usize) -> Option<(usize, u64)> {
        let tensor = self.tensor(at);
        let buffer = self.graph.buffers.iter().position(|&buffer| buffer == tensor.owner())?;
        Some((buffer, self.states[buffer].position(&tensor, 0)))
    }

    fn desc(&self, at: usize) -> Option<TensorDesc> {
        describe(&self.tensor(at))
    }

    /// The bytes of each row of a tensor: its indices of dimensions 1 to 3, and the range in its buffer. A row whose elements
    /// are apart is one range per element.
    fn runs(&self, at: usize) -> Vec<(Range<usize>, [usize; 3], Range<u64>)> {
        let (Some(desc), Some((_, start))) = (self.desc(at), self.place(at)) else { return Vec::new() };
        let (ne, nb, block) = (desc.ne(), desc.nb(), desc.dtype().block_bytes());
        let blocks = desc.row_bytes() / block;
        let mut runs = Vec::new();
        for i3 in 0..ne[3] {
            for i2 in 0..ne[2] {
                for i1 in 0..ne[1] {
                    let row = start + (i1 * nb[1] + i2 * nb[2] + i3 * nb[3]) as u64;
                    if nb[0] == block {
                        runs.push((0..blocks, [i1, i2, i3], row..row + (blocks * block) as u64));
                    } else {
                        runs.extend((0..blocks).map(|i0| {
                            let element = row + (i0 * nb[0]) as u64;
                            (i0..i0 + 1, [i1, i2, i3], element..element + block as u64)
                        }));
                    }
                }
            }
        }
        runs
    }

    /// The lost elements of a tensor.
    fn lost_runs(&self, at: usize) -> Vec<LostRun> {
        let (Some((buffer, start)), Some(desc)) = (self.place(at), self.desc(at)) else { return Vec::new() };
        let lost = &self.lost[buffer];
        if !lost.overlaps(&(start..start + desc.extent() as u64)) {
            return Vec::new();
        }
        let block = desc.dtype().block_bytes() as u64;
        let mut found = Vec::new();
        for (elements, row, bytes) in self.runs(at) {
            found.extend(lost.within(&bytes).map(|part| {
                let first = elements.start + ((part.start - bytes.start) / block) as usize;
                let last = elements.start + (part.end - bytes.start).div_ceil(block) as usize;
                LostRun { elements: first..last, row }
            }));
        }
        found
    }

    /// The positions of a cache that have a lost element: `dimension` 0 or 1 counts them, dimension 3 the streams.
    fn lost_positions(&self, at: usize, dimension: usize) -> Positions {
        let ne = self.tensor(at).ne.map(|n| n as usize);
        let mut lost = vec![vec![false; ne[dimension]]; ne[3]];
        let block = self.desc(at).map_or(1, |desc| desc.dtype().block_len());
        for LostRun { elements, row: [i1, _, i3] } in self.lost_runs(at) {
            match dimension {
                0 => {
                    let end = (elements.end * block).min(ne[0]);
                    lost[i3][elements.start * block..end].fill(true);
                }
                _ => lost[i3][i1] = true,
            }
        }
        lost
    }

    /// By stream and position: whether the mask is -inf for each of the first `queries`. `None` without a mask.
    fn masked(&mut self, mask: Option<usize>, queries: i64) -> Result<Option<Positions>, String> {
        let Some(mask) = mask.map(|mask| self.input(mask)) else { return Ok(None) };
        let Some(desc) = self.desc(mask) else { return Ok(None) };
        // A mask that the graph computes is not known before it has run.
        if mask < self.graph.readers.len() || !self.lost_runs(mask).is_empty() {
            return Ok(None);
        }
        let (ne, nb) = (desc.ne(), desc.nb());
        let bytes = self.bytes(mask, &desc)?;
        let is_masked = |at: usize| match desc.dtype() {
            DType::F16 => bytes.get(at..at + 2) == Some(&0xfc00u16.to_le_bytes()),
            _ => bytes.get(at..at + 4) == Some(&f32::NEG_INFINITY.to_le_bytes()),
        };
        let mut masked = vec![vec![true; ne[0]]; ne[3]];
        for (i3, positions) in masked.iter_mut().enumerate() {
            for i2 in 0..ne[2] {
                for i1 in 0..ne[1].min(queries as usize) {
                    let row = i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
                    for (i0, position) in positions.iter_mut().enumerate() {
                        *position &= is_masked(row + i0 * nb[0]);
                    }
                }
            }
        }
        Ok(Some(masked))
    }

    /// Integers of an input: indices of rows.
    fn integers(&mut self, at: usize) -> Result<Vec<i64>, String> {
        let at = self.input(at);
        let desc = self.desc(at).ok_or("indices of a type that fanout does not know")?;
        let bytes = self.bytes(at, &desc)?;
        let wide = desc.dtype() == DType::I64;
        let ne = desc.ne();
        let mut integers = Vec::with_capacity(desc.elements());
        for row in 0..desc.rows() {
            let [i1, i2, i3] = desc.row_index(row);
            let nb = desc.nb();
            for i0 in 0..ne[0] {
                let at = i0 * nb[0] + i1 * nb[1] + i2 * nb[2] + i3 * nb[3];
                let number = |n: usize| bytes.get(at..at + n);
                integers.push(match wide {
                    true => number(8).and_then(|b| b.try_into().ok()).map_or(-1, i64::from_le_bytes),
                    false => number(4).and_then(|b| b.try_into().ok()).map_or(-1, |b| i64::from(i32::from_le_bytes(b))),
                });
            }
        }
        Ok(integers)
    }

    /// The input that a tensor is a copy of: the host's scheduler and casts put copies between.
    fn input(&self, at: usize) -> usize {
        let mut input = at;
        while input < self.graph.readers.len() {
            let tensor = self.tensor(input);
            let op = host::get().numbers.op(tensor.op, &tensor.op_params).map(|(op, _)| op);
            let Some(source) = self.find(tensor.src[0], input) else { break };
            let same_shape = tensor.ne == self.tensor(source).ne;
            match op {
                Some(OpCode::Cpy | OpCode::Cont | OpCode::Dup) if same_shape => input = source,
                Some(op) if op.is_view() && same_shape && tensor.data == self.tensor(source).data => input = source,
                _ => break,
            }
        }
        input
    }

    fn bytes(&mut self, at: usize, desc: &TensorDesc) -> Result<Rc<[u8]>, String> {
        if let Some(known) = self.inputs.get(&at) {
            return Ok(Rc::clone(known));
        }
        let (buffer, start) = self.place(at).ok_or("an input without memory on the device")?;
        let range = start..start + desc.extent() as u64;
        if at < self.graph.readers.len() || self.lost[buffer].overlaps(&range) {
            return Err(self.needs(at));
        }
        let bytes: Rc<[u8]> = (self.read)(self.states[buffer], start, desc.extent() as u64)?.into();
        self.inputs.insert(at, Rc::clone(&bytes));
        Ok(bytes)
    }

    /// Fails if a lost position may be read.
    fn expect_unread(&self, at: usize, lost: &Positions, unread: Option<&Positions>) -> Result<(), String> {
        for (stream, positions) in lost.iter().enumerate() {
            let unread = unread.and_then(|unread| unread.get(stream % unread.len().max(1)));
            let is_unread = |position: usize| unread.is_some_and(|unread| unread.get(position) == Some(&true));
            if positions.iter().enumerate().any(|(position, &lost)| lost && !is_unread(position)) {
                return Err(self.needs(at));
            }
        }
        Ok(())
    }

    /// Fails if a byte of the tensors is lost.
    fn expect_valid(&self, tensors: impl IntoIterator<Item = Option<usize>>) -> Result<(), String> {
        match tensors.into_iter().flatten().find(|&at| !self.lost_runs(at).is_empty()) {
            Some(lost) => Err(self.needs(lost)),
            None => Ok(()),
        }
    }

    fn needs(&self, at: usize) -> String {
        // SAFETY: the host keeps the tensors of a graph that it computes.
        let name = unsafe { crate::abi::name_of(self.graph.tensors[at].0) };
        let advice = match self.place(at) {
            Some((buffer, _)) if self.states[buffer].holds_weights() => "the model must be loaded again",
            _ => "the sequence must be evaluated again from its start, or an adapter loaded again",
        };
        format!("it reads {name}, which was lost with the device's work or its server: {advice}")
    }

    /// All bytes of a tensor are written.
    fn write(&mut self, at: usize) {
        let (Some((buffer, _)), false) = (self.place(at), self.lost.iter().all(LostRanges::is_empty)) else { return };
        match (self.desc(at), self.place(at)) {
            (Some(desc), Some((_, start))) if desc.is_contiguous() => {
                self.lost[buffer].remove(start..start + desc.extent() as u64);
            }
            _ => self.runs(at).into_iter().for_each(|(_, _, bytes)| self.lost[buffer].remove(bytes)),
        }
    }

    /// Lost elements of `from` are lost in `to`, a copy of it with elements in the same order.
    fn move_lost(&mut self, from: usize, to: usize, lost: &[LostRun]) {
        let (Some(source), Some(target), Some((buffer, start))) = (self.desc(from), self.desc(to), self.place(to))
        else {
            return;
        };
        if lost.is_empty() {
            return;
        }
        let exact = target.is_contiguous()
            && (source.dtype() == target.dtype() || !source.dtype().is_block() && !target.dtype().is_block());
        if !exact {
            for (_, _, bytes) in self.runs(to) {
                self.lost[buffer].insert(bytes);
            }
            return;
        }
        let (ne, block) = (source.ne(), target.dtype().block_bytes());
        let blocks = source.row_bytes() / source.dtype().block_bytes();
        for LostRun { elements, row: [i1, i2, i3] } in lost {
            let row = blocks * (i1 + ne[1] * (i2 + ne[2] * i3));
            let bytes = |element: usize| start + ((row + element) * block) as u64;
            self.lost[buffer].insert(bytes(elements.start)..bytes(elements.end));
        }
    }

    /// SET_ROWS: the rows of `at` that the indices name are written, from lost rows or others.
    fn set_rows(&mut self, at: usize, rows: usize, indices: &[i64], rows_lost: bool) {
        let (Some((buffer, start)), Some(desc)) = (self.place(at), self.desc(at)) else { return };
        let lost_rows: Vec<[usize; 3]> =
            if rows_lost { self.lost_runs(rows).iter().map(|run| run.row).collect() } else { Vec::new() };
        let (nb, ne, count) = (desc.nb(), desc.ne(), self.tensor(rows).ne.map(|n| n as usize));
        let row_bytes = desc.row_bytes() as u64;
        let index_ne =
            self.find(self.tensor(at).src[1], at).map_or([1; 4], |at| self.tensor(at).ne.map(|n| n as usize));
        for i3 in 0..count[3].min(ne[3]) {
            for i2 in 0..count[2].min(ne[2]) {
                for i1 in 0..count[1] {
                    // Indices repeat over the dimensions in which they are shorter.
                    let (j2, j3) = (i2 % index_ne[1].max(1), i3 % index_ne[2].max(1));
                    let index = indices.get(i1 + index_ne[0] * (j2 + index_ne[1] * j3)).copied().unwrap_or(-1);
                    let Some(row) = usize::try_from(index).ok().filter(|&row| row < ne[1]) else { continue };
                    let first = start + (row * nb[1] + i2 * nb[2] + i3 * nb[3]) as u64;
                    if lost_rows.contains(&[i1, i2, i3]) {
                        self.lost[buffer].insert(first..first + row_bytes);
                    } else {
                        self.lost[buffer].remove(first..first + row_bytes);
                    }
                }
            }
        }
    }

    /// GET_ROWS: a row of `at` is lost if the row of the table is.
    fn get_rows(&mut self, at: usize, table: usize, indices: &[i64]) {
        let (Some((buffer, start)), Some(desc)) = (self.place(at), self.desc(at)) else { return };
        let lost: Vec<i64> = self.lost_runs(table).iter().map(|run| run.row[0] as i64).collect();
        for row in 0..desc.rows() {
            if indices.get(row).is_none_or(|index| lost.contains(index)) {
                let [i1, i2, i3] = desc.row_index(row);
                let nb = desc.nb();
                let first = start + (i1 * nb[1] + i2 * nb[2] + i3 * nb[3]) as u64;
                self.lost[buffer].insert(first..first + desc.row_bytes() as u64);
            }
        }
    }
}
