//! Liveness analysis: the maximum number of registers of a function that are live at once.

use super::names::bits;
use super::state::UnlinkedFunction;
use crate::bytecode::{Action, ArgLocation, Control, Inst};
use crate::operands::{Base, Class, Slot};

/// Maximum words of bit sets. A larger function is assumed to need all registers.
const MAX_WORDS: usize = 4 << 20;

/// The maximum sum of 32-bit units live at once. Predicates have a separate register file and do not count.
pub(super) fn max_live_registers(body: &UnlinkedFunction) -> u32 {
    let numbers = Numbers::new(body);
    let blocks = Blocks::new(&body.insts);
    let words = numbers.total.div_ceil(64);
    if words.saturating_mul(blocks.starts.len()) > MAX_WORDS {
        return u32::MAX;
    }
    let mut live_in = vec![vec![0u64; words]; blocks.starts.len()];
    let mut most = 0;
    // Iterates backwards to the fixed point; it terminates because the live sets only grow.
    loop {
        let mut changed = false;
        for block in (0..blocks.starts.len()).rev() {
            let mut live = vec![0u64; words];
            for &next in &blocks.next[block] {
                live.iter_mut().zip(&live_in[next]).for_each(|(live, more)| *live |= more);
            }
            let mut units: u32 = numbers.units_of(&live);
            most = most.max(units);
            for at in blocks.range(block).rev() {
                let guarded = !body.insts[at].guard.is_none();
                operands(&body.insts[at], body.dests[at], |slot, dest| {
                    // A guarded write keeps the old value in some lanes, so it does not end the live range.
                    if dest && !guarded {
                        units -= numbers.remove(&mut live, slot);
                    }
                });
                operands(&body.insts[at], body.dests[at], |slot, dest| {
                    if !dest {
                        units += numbers.insert(&mut live, slot);
                    }
                });
                most = most.max(units);
            }
            if live != live_in[block] {
                live_in[block] = live;
                changed = true;
            }
        }
        if !changed {
            return most;
        }
    }
}

/// Registers, numbered across classes. Constants are not registers.
struct Numbers {
    starts: [usize; 4],
    total: usize,
    /// 32-bit units by register number; 0 for constants and predicates.
    units: Vec<u32>,
}

impl Numbers {
    fn new(body: &UnlinkedFunction) -> Self {
        let mut starts = [0; 4];
        let mut total = 0;
        for (start, class) in starts.iter_mut().zip([Class::Pred, Class::B16, Class::B32, Class::B64]) {
            *start = total;
            total += body.counts.of(class);
        }
        let mut numbers = Self { starts, total, units: vec![0; total] };
        for &slot in body.own.iter().filter(|slot| slot.class() != Class::Pred) {
            let number = numbers.of(slot);
            numbers.units[number] = bits(slot.class()).div_ceil(32);
        }
        numbers
    }

    fn of(&self, slot: Slot) -> usize {
        self.starts[slot.class() as usize] + slot.index()
    }

    fn units_of(&self, live: &[u64]) -> u32 {
        let mut sum = 0;
        for (word, &bits) in live.iter().enumerate() {
            let mut bits = bits;
            while bits != 0 {
                sum += self.units[word * 64 + bits.trailing_zeros() as usize];
                bits &= bits - 1;
            }
        }
        sum
    }

    /// Adds the slot to the live set; returns the units that became live.
    fn insert(&self, live: &mut [u64], slot: Slot) -> u32 {
        let number = self.of(slot);
        let bit = 1 << (number % 64);
        if self.units[number] == 0 || live[number / 64] & bit != 0 {
            return 0;
        }
        live[number / 64] |= bit;
        self.units[number]
    }

    /// Removes the slot from the live set; returns the units that ended.
    fn remove(&self, live: &mut [u64], slot: Slot) -> u32 {
        let number = self.of(slot);
        let bit = 1 << (number % 64);
        if live[number / 64] & bit == 0 {
            return 0;
        }
        live[number / 64] &= !bit;
        self.units[number]
    }
}

/// Calls `each` with every slot of an instruction and whether the instruction writes it.
fn operands(inst: &Inst, dests: u64, mut each: impl FnMut(Slot, bool)) {
    let args = &inst.args;
    let flat = if args.all.is_empty() { &args.s[..] } else { &args.all };
    for (place, &slot) in flat.iter().enumerate().filter(|(_, slot)| !slot.is_none()) {
        each(slot, place < 64 && dests >> place & 1 != 0);
    }
    if let Base::Wide(slot) | Base::Narrow(slot) = args.base {
        each(slot, false);
    }
    if let Action::Control(Control::Call(site)) = &inst.action {
        let passed =
            site.args.iter().map(|passed| (passed, false)).chain(site.returns.iter().map(|passed| (passed, true)));
        for (passed, dest) in passed {
            if let ArgLocation::Register(slot) = *passed {
                each(slot, dest);
            }
        }
    }
}

/// Basic blocks: code entered only at the first and left only at the last instruction.
struct Blocks {
    starts: Vec<usize>,
    next: Vec<Vec<usize>>,
    end: usize,
}

impl Blocks {
    fn new(insts: &[Inst]) -> Self {
        let mut starts = vec![0];
        for (at, inst) in insts.iter().enumerate() {
            let targets = targets(inst);
            if !targets.is_empty() || leaves(inst) {
                starts.push(at + 1);
            }
            starts.extend(targets.iter().map(|&target| target as usize));
        }
        starts.sort_unstable();
        starts.dedup();
        starts.retain(|&start| start < insts.len());
        let mut blocks = Self { starts, next: Vec::new(), end: insts.len() };
        blocks.next = (0..blocks.starts.len())
            .map(|block| {
                let Some(last) = blocks.range(block).last().map(|at| &insts[at]) else { return Vec::new() };
                let jumps = targets(last).iter().filter_map(|&to| blocks.starts.binary_search(&(to as usize)).ok());
                let falls = (!leaves(last) && block + 1 < blocks.starts.len()).then_some(block + 1);
                jumps.chain(falls).collect()
            })
            .collect();
        blocks
    }

    fn range(&self, block: usize) -> std::ops::Range<usize> {
        self.starts[block]..self.starts.get(block + 1).copied().unwrap_or(self.end)
    }
}

fn targets(inst: &Inst) -> &[u32] {
    match &inst.action {
        Action::Control(Control::Branch(target)) => std::slice::from_ref(target),
        _ => &[],
    }
}

/// Whether execution never continues with the next instruction.
fn leaves(inst: &Inst) -> bool {
    use Control::{Branch, Exit, Return};
    inst.guard.is_none() && matches!(inst.action, Action::Control(Branch(_) | Return | Exit))
}
