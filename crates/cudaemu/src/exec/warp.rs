//! Execution of a warp: 32 lanes that execute together and may diverge and reconverge.
//!
//! Lanes with the same program counter and call stack form a *group*. While all lanes agree there is one group. A divergent
//! branch splits it; from then on the group with the deepest call and then the smallest program counter runs first, so that the
//! groups reconverge where the paths join. At an instruction that other lanes must execute too (`.sync`, aligned barriers), a
//! group waits while any of these lanes can still arrive. A group that runs for long yields to the others, so that lanes may
//! wait for each other's stores.

use std::rc::Rc;

use crate::bytecode::{Action, CallSite, Callee, Control, Convergence, DecodedModule, Inst};
use crate::fault::{Fault, FaultKind};

use super::barrier::{Arrival, Barriers};
use super::builtins;
use super::calls::{self, CallFrame};
use super::divergence::{GROUP_SLICE, GroupState, LaneGroups, mask_operand};
use crate::exec_context::ExecContext;

/// Maximum depth of calls in addition to those that local memory has room for.
const CALLS: u32 = 1024;
/// Bytes of local memory that a call takes at least, for computing the maximum depth.
const CALL_BYTES: u32 = 16;

/// A fault and the instruction that caused it.
#[derive(Debug)]
pub(super) struct WarpFault {
    pub(super) fault: Box<Fault>,
    pub(super) pc: u32,
}

/// State of a warp after a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WarpStatus {
    /// All lanes have exited.
    Ended,
    /// Every group waits at a block barrier.
    Waiting,
    /// The turn is over; the warp can continue.
    Yielded,
}

/// Parts of the block that the interpreter loop uses.
pub(super) struct BlockContext<'a> {
    pub(super) code: &'a DecodedModule,
    pub(super) barriers: &'a mut Barriers,
    /// Index of the warp in its block.
    pub(super) warp: usize,
    /// Maximum bytes of local memory per thread.
    pub(super) local_bytes: u32,
    /// Executed warp and lane instructions.
    pub(super) profile: &'a mut super::Profile,
}

impl LaneGroups {
    /// Runs until all groups wait or have exited, or `budget` warp instructions (counted down) are used up. `force` releases
    /// lanes that wait for other lanes which are at a block barrier: neither wait could ever end otherwise.
    pub(super) fn run(
        &mut self,
        cx: &mut ExecContext<'_>,
        around: &mut BlockContext<'_>,
        budget: &mut u64,
        mut force: bool,
    ) -> Result<WarpStatus, WarpFault> {
        self.release(cx, around);
        loop {
            if self.live == 0 {
                return Ok(WarpStatus::Ended);
            }
            let Some(chosen) = self.choose(cx, around, std::mem::take(&mut force)) else {
                return Ok(WarpStatus::Waiting);
            };
            if *budget == 0 {
                return Ok(WarpStatus::Yielded);
            }
            if !self.step(chosen, cx, around, budget)? {
                return Ok(WarpStatus::Yielded);
            }
        }
    }

    /// Runs one group until it waits, exits, can merge with another one or uses up a budget. Returns false when the warp's turn
    /// is over.
    fn step(
        &mut self,
        chosen: usize,
        cx: &mut ExecContext<'_>,
        around: &mut BlockContext<'_>,
        budget: &mut u64,
    ) -> Result<bool, WarpFault> {
        let code = around.code;
        let mut at = chosen;
        // The next program counter at which this group could merge with another one.
        let mut meeting = self.next_reconvergence(at);
        let mut alone = self.groups[at].state == GroupState::Alone;
        self.groups[at].state = GroupState::Ready;
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
                meeting = self.next_reconvergence(at);
            }
            let several = self.groups.len() > 1;
            if *budget == 0 {
                self.groups[at].pc = pc;
                return Ok(false);
            }
            *budget -= 1;
            if several {
                let group = &mut self.groups[at];
                group.used += 1;
                if group.used.is_multiple_of(GROUP_SLICE) {
                    // The time slice is used up: the next instruction runs when the group is chosen again.
                    group.pc = pc;
                    return Ok(true);
                }
            }
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
            if several && !alone && inst.convergence != Convergence::None && self.must_wait(inst, active, cx.regs) {
                self.groups[at].pc = pc;
                self.groups[at].state = GroupState::Converging;
                return Ok(true);
            }
            alone = false;
            let stopped = |fault| WarpFault { fault, pc };
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
                    meeting = self.next_reconvergence(at);
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
            meeting = self.next_reconvergence(at);
        }
    }

    /// Executes control flow other than a uniform branch. Returns false if the groups changed or the group waits, so that the
    /// caller must choose again.
    fn control(
        &mut self,
        at: usize,
        control: &Control,
        inst: &Inst,
        mask: u32,
        cx: &mut ExecContext<'_>,
        around: &mut BlockContext<'_>,
    ) -> Result<bool, Box<Fault>> {
        let (pc, active) = (self.groups[at].pc, self.groups[at].mask);
        match control {
            Control::Branch(target) => {
                let taken = self.split(at, mask);
                self.groups[at].pc += 1;
                self.groups[taken].pc = *target;
                Ok(false)
            }
            Control::Call(site) => self.call(at, site, mask, cx, around),
            Control::Return if self.groups[at].stack.is_some() => {
                if mask != active {
                    let rest = self.split(at, active & !mask);
                    self.groups[rest].pc += 1;
                }
                self.give_back(at, mask, cx, around)?;
                Ok(false)
            }
            Control::Return | Control::Exit => {
                self.live &= !mask;
                cx.live = self.live;
                self.remove_exited(at, mask);
                around.barriers.exited(around.warp, mask);
                if self.live == 0 {
                    cx.shared.exit(cx.warp);
                }
                Ok(false)
            }
            Control::Barrier(barrier) => {
                let arrival = Arrival { warp: around.warp, mask, live: self.live, barrier: *barrier };
                if !around.barriers.arrive(&arrival, &inst.args, cx)? {
                    self.groups[at].pc = pc + 1;
                    // It may have been the last arrival, which releases the waiting warps and orders their accesses.
                    self.release(cx, around);
                    return Ok(true);
                }
                let waiting = self.split(at, mask);
                self.groups[waiting].state = GroupState::Barrier;
                if waiting != at {
                    self.groups[at].pc = pc + 1;
                }
                self.release(cx, around);
                Ok(false)
            }
            Control::WarpSync => {
                let named = mask_operand(cx.regs, inst.args.s[0], mask);
                let missing = named & self.live & !mask;
                if missing != 0 {
                    let text = format!("bar.warp.sync waits for lanes {missing:#010x}, which cannot arrive");
                    cx.report_kind(FaultKind::InactiveLane(text), mask.trailing_zeros() as usize)?;
                }
                cx.shared.warp_sync(cx.warp, mask, self.live);
                self.groups[at].pc = pc + 1;
                Ok(true)
            }
            Control::Yield => {
                self.groups[at].pc = pc + 1;
                if self.groups.len() > 1 {
                    self.groups[at].used = (self.groups[at].used / GROUP_SLICE + 1) * GROUP_SLICE;
                }
                Ok(false)
            }
        }
    }

    fn call(
        &mut self,
        at: usize,
        site: &CallSite,
        mask: u32,
        cx: &mut ExecContext<'_>,
        around: &mut BlockContext<'_>,
    ) -> Result<bool, Box<Fault>> {
        let callee = match site.callee {
            Callee::Function(index) => index,
            Callee::AssertFail => return Err(builtins::assertion(site, self.groups[at].frame, mask, cx)?),
        };
        let called = self.split(at, mask);
        if called != at {
            self.groups[at].pc += 1;
        }
        let group = &mut self.groups[called];
        let caller = &around.code.functions[group.function as usize];
        let function = &around.code.functions[callee as usize];
        let frame = group.frame + caller.frame_bytes;
        let full = frame.checked_add(function.frame_bytes).is_none_or(|end| end > around.local_bytes);
        if full || group.depth >= CALLS + around.local_bytes / CALL_BYTES {
            return Err(Fault::new(FaultKind::StackOverflow, mask.trailing_zeros() as usize));
        }
        let saved = if caller.recursive { calls::save(cx.regs, &caller.own_registers) } else { Vec::new() };
        cx.local.enter_frame(frame, function.frame_bytes, mask);
        calls::pass_args(&site.args, group.frame, &function.params, frame, mask, cx)?;
        let call =
            CallFrame { pc: group.pc, frame: group.frame, function: group.function, saved, parent: group.stack.take() };
        group.stack = Some(Rc::new(call));
        group.depth += 1;
        group.frame = frame;
        group.function = callee;
        group.pc = function.start;
        Ok(false)
    }

    /// `ret` of the lanes in `mask`: passes results to the caller and restores its frame.
    fn give_back(
        &mut self,
        at: usize,
        mask: u32,
        cx: &mut ExecContext<'_>,
        around: &BlockContext<'_>,
    ) -> Result<(), Box<Fault>> {
        let group = &mut self.groups[at];
        let Some(call) = group.stack.take() else { return Ok(()) };
        let function = &around.code.functions[group.function as usize];
        let results = calls::results(&function.returns, group.frame, cx);
        calls::restore(cx.regs, &call.saved, mask);
        if let Action::Control(Control::Call(site)) = &around.code.insts[call.pc as usize].action {
            calls::write_results(&site.returns, call.frame, &results, mask, cx)?;
        }
        group.pc = call.pc + 1;
        group.frame = call.frame;
        group.function = call.function;
        group.depth -= 1;
        group.stack = call.parent.clone();
        Ok(())
    }
}
