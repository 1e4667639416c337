//! Divergence: the lane groups of a warp, their scheduling, and their reconvergence.

use std::rc::Rc;

use crate::bytecode::{Action, Control, Convergence, Inst};
use crate::operands::Slot;

use super::calls::CallFrame;
use super::warp::BlockContext;
use crate::exec_context::{ExecContext, Registers};

/// Time slice: warp instructions that a group may run while others wait for a turn.
pub(super) const GROUP_SLICE: u64 = 1 << 14;

/// Lanes with the same program counter and call stack.
#[derive(Clone, Debug)]
pub(super) struct LaneGroup {
    pub(super) pc: u32,
    pub(super) mask: u32,
    /// Call stack, innermost call first.
    pub(super) stack: Option<Rc<CallFrame>>,
    /// Depth of the call stack.
    pub(super) depth: u32,
    /// Start of the current frame in local memory.
    pub(super) frame: u32,
    /// Index of the current function.
    pub(super) function: u32,
    pub(super) state: GroupState,
    /// Warp instructions that it ran while other groups could have run, since all lanes were last in one group.
    pub(super) used: u64,
}

impl LaneGroup {
    /// Number of time slices used up; groups with fewer have priority.
    fn spun(&self) -> u64 {
        self.used / GROUP_SLICE
    }

    /// Whether the two groups can merge when their program counters are equal.
    pub(super) fn could_join(&self, other: &Self) -> bool {
        let same_calls = match (&self.stack, &other.stack) {
            (None, None) => true,
            (Some(a), Some(b)) => Rc::ptr_eq(a, b),
            _ => false,
        };
        same_calls && self.state != GroupState::Barrier && other.state != GroupState::Barrier
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GroupState {
    Ready,
    /// Waits at an instruction for lanes that it needs.
    Converging,
    /// At an instruction whose other lanes can no longer arrive: executes it without them.
    Alone,
    /// Waits at a block barrier.
    Barrier,
}

/// Lane groups of a warp, kept between turns.
#[derive(Debug, Default)]
pub(super) struct LaneGroups {
    /// Lanes that exist and have not exited.
    pub(super) live: u32,
    pub(super) groups: Vec<LaneGroup>,
}

impl LaneGroups {
    /// Starts a kernel with all of `lanes` in one group.
    pub(super) fn start(&mut self, lanes: u32, function: u32, pc: u32) {
        self.live = lanes;
        self.groups.clear();
        self.groups.push(LaneGroup {
            pc,
            mask: lanes,
            stack: None,
            depth: 0,
            frame: 0,
            function,
            state: GroupState::Ready,
            used: 0,
        });
    }

    /// Function and program counter of the warp's first group, for the report of a deadlock.
    pub(super) fn place(&self) -> (u32, u32) {
        self.groups.first().map_or((0, 0), |group| (group.pc, group.mask))
    }

    /// Whether all lanes have exited.
    pub(super) fn ended(&self) -> bool {
        self.live == 0
    }

    /// Resumes groups whose barrier is complete.
    pub(super) fn release(&mut self, cx: &mut ExecContext<'_>, around: &mut BlockContext<'_>) {
        for (barrier, waited) in around.barriers.completed() {
            cx.shared.release(barrier, waited);
        }
        for released in around.barriers.released(around.warp) {
            if let Some(group) =
                self.groups.iter_mut().find(|g| g.state == GroupState::Barrier && g.mask & released.mask != 0)
            {
                let inst = &around.code.insts[group.pc as usize];
                if let Action::Control(Control::Barrier(barrier)) = &inst.action {
                    released.deliver(barrier.kind, cx.regs, &inst.args);
                }
                group.pc += 1;
                group.state = GroupState::Ready;
            }
        }
    }

    /// The group to run next; `None` if all wait at block barriers.
    pub(super) fn choose(&mut self, cx: &mut ExecContext<'_>, around: &BlockContext<'_>, force: bool) -> Option<usize> {
        if let [only] = &mut self.groups[..] {
            if only.state == GroupState::Converging {
                only.state = GroupState::Alone;
            }
            return (only.state != GroupState::Barrier).then_some(0);
        }
        let first = |groups: &[LaneGroup], state: &dyn Fn(GroupState) -> bool| {
            let candidates = groups.iter().enumerate().filter(|(_, g)| state(g.state));
            candidates.min_by_key(|(_, g)| (g.spun(), u32::MAX - g.depth, g.pc)).map(|(i, _)| i)
        };
        if let Some(ready) = first(&self.groups, &|s| matches!(s, GroupState::Ready | GroupState::Alone)) {
            return Some(ready);
        }
        // Exited lanes no longer need to arrive.
        let satisfied = |g: &LaneGroup| {
            let inst = &around.code.insts[g.pc as usize];
            g.state == GroupState::Converging && !self.must_wait(inst, g.mask, cx.regs)
        };
        if let Some(at) = self.groups.iter().position(satisfied) {
            self.groups[at].state = GroupState::Ready;
            return Some(at);
        }
        if self.meet_at_warp_barriers(cx, around) {
            return first(&self.groups, &|s| s == GroupState::Ready);
        }
        if !force && self.groups.iter().any(|g| g.state == GroupState::Barrier) {
            return None;
        }
        let alone = first(&self.groups, &|s| s == GroupState::Converging)?;
        self.groups[alone].state = GroupState::Alone;
        Some(alone)
    }

    /// Completes `bar.warp.sync`, whose lanes may wait at different instructions: once all lanes of a group's mask wait at any
    /// of them, they continue.
    fn meet_at_warp_barriers(&mut self, cx: &mut ExecContext<'_>, around: &BlockContext<'_>) -> bool {
        let at_sync = |g: &LaneGroup| {
            let inst = &around.code.insts[g.pc as usize];
            (g.state == GroupState::Converging && matches!(inst.action, Action::Control(Control::WarpSync)))
                .then_some(inst)
        };
        let here = self.groups.iter().filter(|g| at_sync(g).is_some()).fold(0, |mask, g| mask | g.mask);
        let wanted = |g: &LaneGroup, inst: &Inst| mask_operand(cx.regs, inst.args.s[0], g.mask) & self.live;
        let Some(met) = self.groups.iter().find_map(|g| {
            let wanted = at_sync(g).map(|inst| wanted(g, inst))?;
            (wanted & !here == 0).then_some(wanted)
        }) else {
            return false;
        };
        cx.shared.warp_sync(cx.warp, met, self.live);
        for group in &mut self.groups {
            if group.mask & met != 0 && at_sync(group).is_some() {
                group.pc += 1;
                group.state = GroupState::Ready;
            }
        }
        true
    }

    /// Whether lanes that this instruction needs are elsewhere and may still arrive.
    pub(super) fn must_wait(&self, inst: &Inst, active: u32, regs: &Registers) -> bool {
        let needed = match inst.convergence {
            Convergence::None => return false,
            Convergence::All => self.live,
            Convergence::Mask(slot) => mask_operand(regs, slot, active) & self.live,
        };
        needed & !active != 0
    }

    /// Splits the lanes in `mask` off into their own group at the same place; returns its index (`at` if that is the whole
    /// group).
    pub(super) fn split(&mut self, at: usize, mask: u32) -> usize {
        if self.groups[at].mask == mask {
            return at;
        }
        let mut parted = self.groups[at].clone();
        parted.mask = mask;
        self.groups[at].mask &= !mask;
        self.groups.push(parted);
        self.groups.len() - 1
    }

    /// Removes exited lanes from a group.
    pub(super) fn remove_exited(&mut self, at: usize, mask: u32) {
        self.groups[at].mask &= !mask;
        if self.groups[at].mask == 0 {
            self.groups.swap_remove(at);
        } else {
            self.groups[at].pc += 1;
        }
    }

    /// Merges all groups at the same place into this one; returns its new index.
    pub(super) fn merge(&mut self, at: usize) -> usize {
        let mut at = at;
        let mut other = 0;
        while other < self.groups.len() {
            let (a, b) = (&self.groups[at], &self.groups[other]);
            if other == at || a.pc != b.pc || !a.could_join(b) {
                other += 1;
                continue;
            }
            self.groups[at].mask |= self.groups[other].mask;
            self.groups[at].state = GroupState::Ready;
            // Keep the larger use, so that lanes that diverge and reconverge in a loop still exhaust their time slice.
            self.groups[at].used = self.groups[at].used.max(self.groups[other].used);
            self.groups.swap_remove(other);
            if at == self.groups.len() {
                at = other;
            }
        }
        if let [only] = &mut self.groups[..] {
            only.used = 0;
        }
        at
    }

    /// The nearest later program counter at which this group could merge with another one.
    pub(super) fn next_reconvergence(&self, at: usize) -> u32 {
        if self.groups.len() == 1 {
            return u32::MAX;
        }
        let here = &self.groups[at];
        let joins = |&(i, g): &(usize, &LaneGroup)| i != at && g.pc >= here.pc && here.could_join(g);
        self.groups.iter().enumerate().filter(joins).map(|(_, g)| g.pc).min().unwrap_or(u32::MAX)
    }
}

/// The lanes in the mask operand of a `.sync` instruction.
pub(super) fn mask_operand(regs: &Registers, slot: Slot, active: u32) -> u32 {
    regs.get::<u32>(slot)[active.trailing_zeros() as usize & 31]
}
