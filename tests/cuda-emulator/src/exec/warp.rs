//! A warp: 32 lanes that execute together, and part and meet where the code says so.
//!
//! Lanes with the same program counter and the same calls are a *group*. While all lanes agree there is one. A branch on
//! which they do not agree splits it; from then on the group with the deepest call and then the smallest program counter
//! goes first, so that the others are met where the paths join. A group that reaches an instruction which other lanes must execute with it
//! (`.sync`, aligned barriers) waits for them while any of them can still come. A group that runs for long lets the
//! others go, so that lanes may wait for each other's stores.

use std::rc::Rc;

use crate::code::{Action, CallSite, Callee, Code, Control, Gather, Inst, Slot};
use crate::fault::{Fault, Kind};

use super::barrier::{Arrival, Barriers};
use super::calls::{self, Call};
use super::{Cx, Registers, builtins};

/// Warp instructions that a group may run while others wait before they get their turn.
const PATIENCE: u64 = 1 << 14;

/// A fault and the instruction that caused it.
#[derive(Debug)]
pub(super) struct Stopped {
    pub(super) fault: Box<Fault>,
    pub(super) pc: u32,
}

/// Where a warp stands after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// All lanes have exited.
    Ended,
    /// Every group waits at a barrier of the block.
    Waiting,
    /// Its turn is over; it can go on.
    Yielded,
}

/// Lanes that are at the same place.
#[derive(Clone, Debug)]
struct Group {
    pc: u32,
    mask: u32,
    /// The calls it is in, innermost first.
    stack: Option<Rc<Call>>,
    /// How many.
    depth: u32,
    /// Start of its frame in local memory.
    frame: u32,
    /// Function it is in.
    function: u32,
    state: State,
    /// How often it used up its patience; the others go before it.
    spun: u32,
}

impl Group {
    /// Whether the two are one group where their program counters agree.
    fn could_join(&self, other: &Self) -> bool {
        let same_calls = match (&self.stack, &other.stack) {
            (None, None) => true,
            (Some(a), Some(b)) => Rc::ptr_eq(a, b),
            _ => false,
        };
        same_calls && self.state != State::Barrier && other.state != State::Barrier
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Ready,
    /// At an instruction that needs lanes which are not here yet.
    Gathering,
    /// At that instruction, and nobody else can come: it goes on alone.
    Alone,
    /// At a barrier of the block.
    Barrier,
}

/// What a warp keeps between turns.
#[derive(Debug, Default)]
pub(super) struct Flow {
    /// Lanes that exist and have not exited.
    pub(super) live: u32,
    groups: Vec<Group>,
}

/// What the loop shares with the block.
pub(super) struct Around<'a> {
    pub(super) code: &'a Code,
    pub(super) barriers: &'a mut Barriers,
    /// Index of the warp in its block.
    pub(super) warp: usize,
    /// Local memory a thread may use.
    pub(super) local_bytes: u32,
    /// Executed warps and lanes, by instruction.
    pub(super) profile: &'a mut super::Profile,
}

impl Flow {
    /// All of `lanes` at the start of a kernel.
    pub(super) fn start(&mut self, lanes: u32, function: u32, pc: u32) {
        self.live = lanes;
        self.groups.clear();
        self.groups.push(Group {
            pc,
            mask: lanes,
            stack: None,
            depth: 0,
            frame: 0,
            function,
            state: State::Ready,
            spun: 0,
        });
    }

    /// Where the warp's first group stands and how: for the report of a deadlock.
    pub(super) fn place(&self) -> (u32, u32) {
        self.groups.first().map_or((0, 0), |group| (group.pc, group.mask))
    }

    /// Whether all lanes have exited.
    pub(super) fn ended(&self) -> bool {
        self.live == 0
    }

    /// Runs until all groups wait or end, or `budget` warp instructions are used up (which it counts down). With `force`,
    /// lanes that wait for lanes at a barrier of the block wait no longer: that barrier cannot complete.
    pub(super) fn run(
        &mut self,
        cx: &mut Cx<'_>,
        around: &mut Around<'_>,
        budget: &mut u64,
        mut force: bool,
    ) -> Result<Turn, Stopped> {
        self.release(cx, around);
        loop {
            if self.live == 0 {
                return Ok(Turn::Ended);
            }
            let Some(chosen) = self.choose(cx.regs, around, std::mem::take(&mut force)) else {
                return Ok(Turn::Waiting);
            };
            if *budget == 0 {
                return Ok(Turn::Yielded);
            }
            if !self.step(chosen, cx, around, budget)? {
                return Ok(Turn::Yielded);
            }
        }
    }

    /// Lets groups go whose barrier is complete.
    fn release(&mut self, cx: &mut Cx<'_>, around: &mut Around<'_>) {
        for (barrier, waited) in around.barriers.completed() {
            cx.shared.release(barrier, waited);
        }
        for released in around.barriers.released(around.warp) {
            if let Some(group) =
                self.groups.iter_mut().find(|g| g.state == State::Barrier && g.mask & released.mask != 0)
            {
                let inst = &around.code.insts[group.pc as usize];
                if let Action::Control(Control::Barrier(barrier)) = &inst.action {
                    released.deliver(barrier.kind, cx.regs, &inst.args);
                }
                group.pc += 1;
                group.state = State::Ready;
            }
        }
    }

    /// The group to run next; `None` if all wait at barriers of the block.
    fn choose(&mut self, regs: &Registers, around: &Around<'_>, force: bool) -> Option<usize> {
        if let [only] = &mut self.groups[..] {
            if only.state == State::Gathering {
                only.state = State::Alone;
            }
            return (only.state != State::Barrier).then_some(0);
        }
        let first = |groups: &[Group], state: &dyn Fn(State) -> bool| {
            let candidates = groups.iter().enumerate().filter(|(_, g)| state(g.state));
            candidates.min_by_key(|(_, g)| (g.spun, u32::MAX - g.depth, g.pc)).map(|(i, _)| i)
        };
        if let Some(ready) = first(&self.groups, &|s| matches!(s, State::Ready | State::Alone)) {
            return Some(ready);
        }
        if self.meet_at_warp_barriers(regs, around) {
            return first(&self.groups, &|s| s == State::Ready);
        }
        if !force && self.groups.iter().any(|g| g.state == State::Barrier) {
            return None;
        }
        let alone = first(&self.groups, &|s| s == State::Gathering)?;
        self.groups[alone].state = State::Alone;
        Some(alone)
    }

    /// `bar.warp.sync` may stand at different places: if all lanes that a waiting one names wait at any, they go on.
    fn meet_at_warp_barriers(&mut self, regs: &Registers, around: &Around<'_>) -> bool {
        let at_sync = |g: &Group| {
            let inst = &around.code.insts[g.pc as usize];
            (g.state == State::Gathering && matches!(inst.action, Action::Control(Control::WarpSync))).then_some(inst)
        };
        let here = self.groups.iter().filter(|g| at_sync(g).is_some()).fold(0, |mask, g| mask | g.mask);
        let wanted = |g: &Group, inst: &Inst| named_lanes(regs, inst.args.s[0], g.mask) & self.live;
        let Some(met) = self.groups.iter().find_map(|g| {
            let wanted = at_sync(g).map(|inst| wanted(g, inst))?;
            (wanted & !here == 0).then_some(wanted)
        }) else {
            return false;
        };
        for group in &mut self.groups {
            if group.mask & met != 0 && at_sync(group).is_some() {
                group.pc += 1;
                group.state = State::Ready;
            }
        }
        true
    }

    /// Runs one group until it waits, ends, meets another one or uses up a budget. False: the warp's turn is over.
    fn step(
        &mut self,
        chosen: usize,
        cx: &mut Cx<'_>,
        around: &mut Around<'_>,
        budget: &mut u64,
    ) -> Result<bool, Stopped> {
        let code = around.code;
        let mut at = chosen;
        let mut patience = PATIENCE;
        // The next program counter at which another group stands.
        let mut meeting = self.next_meeting(at);
        let mut alone = self.groups[at].state == State::Alone;
        self.groups[at].state = State::Ready;
        let mut pc = self.groups[at].pc;
        let mut active = self.groups[at].mask;
        cx.frame = self.groups[at].frame;
        cx.active = active;
        cx.live = self.live;
        loop {
            if pc == meeting && !alone {
                self.groups[at].pc = pc;
                at = self.merge(at);
                active = self.groups[at].mask;
                cx.active = active;
                meeting = self.next_meeting(at);
            }
            let several = self.groups.len() > 1;
            if *budget == 0 || (several && patience == 0) {
                self.groups[at].pc = pc;
                self.groups[at].spun += u32::from(several && patience == 0);
                return Ok(*budget != 0);
            }
            *budget -= 1;
            patience -= u64::from(several);
            let inst = &code.insts[pc as usize];
            let mask = if inst.guard.is_none() { active } else { active & cx.regs.pred(inst.guard) };
            around.profile.warps[pc as usize] += 1;
            around.profile.lanes[pc as usize] += u64::from(mask.count_ones());
            if mask == 0 {
                pc += 1;
                continue;
            }
            cx.clock += 1;
            cx.line = inst.line;
            cx.padding = inst.args.padding;
            if several && !alone && inst.gather != Gather::None && self.must_wait(inst, active, cx.regs) {
                self.groups[at].pc = pc;
                self.groups[at].state = State::Gathering;
                return Ok(true);
            }
            alone = false;
            let stopped = |fault| Stopped { fault, pc };
            let control = match &inst.action {
                Action::Compute(compute) => {
                    compute(cx.regs, &inst.args, mask);
                    pc += 1;
                    continue;
                }
                Action::Access(access) => {
                    access(cx, &inst.args, mask).map_err(stopped)?;
                    pc += 1;
                    continue;
                }
                Action::Control(control) => control,
            };
            self.groups[at].pc = pc;
            if let Control::Branch(target) = control
                && mask == active
            {
                pc = *target;
                if several {
                    self.groups[at].pc = pc;
                    meeting = self.next_meeting(at);
                }
                continue;
            }
            let goes_on = self.control(at, control, inst, mask, cx, around).map_err(stopped)?;
            if !goes_on {
                return Ok(!matches!(control, Control::Yield));
            }
            pc = self.groups[at].pc;
            active = self.groups[at].mask;
            cx.active = active;
            cx.frame = self.groups[at].frame;
            meeting = self.next_meeting(at);
        }
    }

    /// Control flow other than a branch that all lanes take. False: the groups changed, or wait: choose again.
    fn control(
        &mut self,
        at: usize,
        control: &Control,
        inst: &Inst,
        mask: u32,
        cx: &mut Cx<'_>,
        around: &mut Around<'_>,
    ) -> Result<bool, Box<Fault>> {
        let Group { pc, mask: active, .. } = self.groups[at];
        match control {
            Control::Branch(target) => {
                let taken = self.part(at, mask);
                self.groups[at].pc += 1;
                self.groups[taken].pc = *target;
                Ok(false)
            }
            Control::BranchIndexed(targets) => {
                let indices = cx.regs.get::<u32>(inst.args.s[0]);
                let mut left = mask;
                while left != 0 {
                    let lane = left.trailing_zeros() as usize;
                    let same = (0..32).filter(|&l| indices[l] == indices[lane]).fold(0, |m, l| m | 1 << l) & left;
                    let Some(&target) = targets.get(indices[lane] as usize) else {
                        let text = format!("brx.idx with index {} of {} targets", indices[lane], targets.len());
                        return Err(Fault::new(Kind::InvalidValue(text), lane));
                    };
                    let taken = self.part(at, same);
                    self.groups[taken].pc = target;
                    left &= !same;
                }
                if mask != active {
                    self.groups[at].pc = pc + 1;
                }
                Ok(false)
            }
            Control::Call(site) => self.call(at, site, mask, cx, around),
            Control::Return if self.groups[at].stack.is_some() => {
                if mask != active {
                    let rest = self.part(at, active & !mask);
                    self.groups[rest].pc += 1;
                }
                self.give_back(at, mask, cx, around)?;
                Ok(false)
            }
            Control::Return | Control::Exit => {
                self.live &= !mask;
                cx.live = self.live;
                self.leave(at, mask);
                around.barriers.exited(mask.count_ones());
                if self.live == 0 {
                    cx.shared.exit(cx.warp);
                }
                Ok(false)
            }
            Control::Barrier(barrier) => {
                let arrival = Arrival { warp: around.warp, mask, live: self.live, barrier: *barrier };
                if !around.barriers.arrive(&arrival, &inst.args, cx)? {
                    self.groups[at].pc = pc + 1;
                    // It may have been the last to arrive: then others go on, and what they did is ordered.
                    self.release(cx, around);
                    return Ok(true);
                }
                let waiting = self.part(at, mask);
                self.groups[waiting].state = State::Barrier;
                if waiting != at {
                    self.groups[at].pc = pc + 1;
                }
                self.release(cx, around);
                Ok(false)
            }
            Control::WarpSync => {
                let named = named_lanes(cx.regs, inst.args.s[0], mask);
                let missing = named & self.live & !mask;
                if missing != 0 {
                    let text = format!("bar.warp.sync waits for lanes {missing:#010x}, which cannot come");
                    cx.report_kind(Kind::InactiveLane(text), mask.trailing_zeros() as usize)?;
                }
                cx.shared.warp_sync(cx.warp, mask, self.live);
                self.groups[at].pc = pc + 1;
                Ok(true)
            }
            Control::Yield => {
                self.groups[at].pc = pc + 1;
                self.groups[at].spun += u32::from(self.groups.len() > 1);
                Ok(false)
            }
        }
    }

    fn call(
        &mut self,
        at: usize,
        site: &CallSite,
        mut mask: u32,
        cx: &mut Cx<'_>,
        around: &mut Around<'_>,
    ) -> Result<bool, Box<Fault>> {
        let (active, wanted) = (self.groups[at].mask, mask);
        let callee = match &site.callee {
            Callee::Function(index) => *index,
            Callee::Indirect(slot) => {
                // One callee at a time: the other lanes come back to this instruction.
                let (index, same) = calls::resolve(cx.regs, *slot, mask, around.code)?;
                mask = same;
                index
            }
            builtin => {
                builtins::call(builtin, site, self.groups[at].frame, mask, cx)?;
                self.groups[at].pc += 1;
                return Ok(true);
            }
        };
        let called = self.part(at, mask);
        if called != at && active & !mask & wanted == 0 {
            self.groups[at].pc += 1;
        }
        let group = &mut self.groups[called];
        let caller = &around.code.functions[group.function as usize];
        let function = &around.code.functions[callee as usize];
        let frame = group.frame + caller.frame_bytes;
        if frame.checked_add(function.frame_bytes).is_none_or(|end| end > around.local_bytes) {
            return Err(Fault::new(Kind::StackOverflow, mask.trailing_zeros() as usize));
        }
        let saved = if caller.recursive { calls::save(cx.regs, &caller.own) } else { Vec::new() };
        cx.local.enter(frame, function.frame_bytes, mask);
        calls::pass(&site.args, group.frame, &function.params, frame, mask, cx)?;
        let call =
            Call { pc: group.pc, frame: group.frame, function: group.function, saved, parent: group.stack.take() };
        group.stack = Some(Rc::new(call));
        group.depth += 1;
        group.frame = frame;
        group.function = callee;
        group.pc = function.start;
        Ok(false)
    }

    /// `ret` of the lanes in `mask`: results to the caller, whose frame is theirs again.
    fn give_back(&mut self, at: usize, mask: u32, cx: &mut Cx<'_>, around: &Around<'_>) -> Result<(), Box<Fault>> {
        let group = &mut self.groups[at];
        let Some(call) = group.stack.take() else { return Ok(()) };
        let function = &around.code.functions[group.function as usize];
        let results = calls::results(&function.returns, group.frame, cx);
        calls::restore(cx.regs, &call.saved, mask);
        if let Action::Control(Control::Call(site)) = &around.code.insts[call.pc as usize].action {
            calls::take(&site.returns, call.frame, &results, mask, cx)?;
        }
        group.pc = call.pc + 1;
        group.frame = call.frame;
        group.function = call.function;
        group.depth -= 1;
        group.stack = call.parent.clone();
        Ok(())
    }

    /// Whether lanes that this instruction needs are elsewhere and may still come.
    fn must_wait(&self, inst: &Inst, active: u32, regs: &Registers) -> bool {
        let needed = match inst.gather {
            Gather::None => return false,
            Gather::All => self.live,
            Gather::Mask(slot) => named_lanes(regs, slot, active) & self.live,
        };
        needed & !active != 0
    }

    /// Makes the lanes in `mask` a group of their own, at the same place; gives its index (`at` if that is all of it).
    fn part(&mut self, at: usize, mask: u32) -> usize {
        if self.groups[at].mask == mask {
            return at;
        }
        let mut parted = self.groups[at].clone();
        parted.mask = mask;
        self.groups[at].mask &= !mask;
        self.groups.push(parted);
        self.groups.len() - 1
    }

    /// Takes exited lanes out of a group.
    fn leave(&mut self, at: usize, mask: u32) {
        self.groups[at].mask &= !mask;
        if self.groups[at].mask == 0 {
            self.groups.swap_remove(at);
        } else {
            self.groups[at].pc += 1;
        }
    }

    /// Joins every group at the same place to this one; gives its index after that.
    fn merge(&mut self, at: usize) -> usize {
        let mut at = at;
        let mut other = 0;
        while other < self.groups.len() {
            let (a, b) = (&self.groups[at], &self.groups[other]);
            if other == at || a.pc != b.pc || !a.could_join(b) {
                other += 1;
                continue;
            }
            self.groups[at].mask |= self.groups[other].mask;
            self.groups[at].state = State::Ready;
            self.groups[at].spun = 0;
            self.groups.swap_remove(other);
            if at == self.groups.len() {
                at = other;
            }
        }
        at
    }

    /// The nearest place after this group's at which another one stands that it could join.
    fn next_meeting(&self, at: usize) -> u32 {
        if self.groups.len() == 1 {
            return u32::MAX;
        }
        let here = &self.groups[at];
        let joins = |&(i, g): &(usize, &Group)| i != at && g.pc >= here.pc && here.could_join(g);
        self.groups.iter().enumerate().filter(joins).map(|(_, g)| g.pc).min().unwrap_or(u32::MAX)
    }
}

/// Lanes that the mask operand of a `.sync` instruction names.
fn named_lanes(regs: &Registers, slot: Slot, active: u32) -> u32 {
    regs.get::<u32>(slot)[active.trailing_zeros() as usize & 31]
}
