//! A graph made ready for the CPU: one kernel per node, and the executor that runs them.

use super::fuse;
use super::layout::{Access, Held, Memory, Needs, Uses, in_order};
use super::memory::{HostMemory, Locals, Shared, View};
use super::ops::{self, Kernel, Path};
use super::pool::{Ask, Member, Pool, Team, Work, lock, run_team};
use super::reuse;
use crate::device::{DeviceError, Region, Unsupported};
use crate::graph::fuse::{FUSION_PATTERNS, FusionPattern, KernelCall as Fusable, select_kernels};
use crate::graph::{Graph, SlotOffset, TensorId};
use crate::ops::{MAX_SRC, NodeView, OpCode};
use crate::tensor::TensorDesc;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

/// Programs below this cost (see [`Kernel::new`]) are small: about a millisecond on one processor.
const SMALL: usize = 1 << 22;

pub(super) struct Code {
    steps: Vec<Step>,
    /// Each tensor that a step names, once.
    operands: Vec<Operand>,
    /// Scratch: floats of each worker, bytes of all together.
    floats: usize,
    shared: usize,
    /// Of all steps together.
    cost: usize,
    /// By slot.
    needs: Vec<Needs>,
    /// By slot: where its region started in the last run and in which state its memory then was.
    settled: Mutex<Vec<Option<(usize, u64)>>>,
}

/// The memories of a run, held.
struct Bound<'a> {
    held: Vec<Held<'a>>,
    /// By slot: which of them, and where the region starts.
    slots: Vec<(usize, usize)>,
}

struct Step {
    code: OpCode,
    kernel: Kernel,
    /// Source 1 lies packed in shared scratch: see [`reuse`].
    finds_columns: bool,
    /// Numbers of operands.
    dst: u32,
    srcs: Box<[Option<u32>]>,
}

pub(super) struct Operand {
    pub(super) desc: TensorDesc,
    pub(super) place: SlotOffset,
}

impl Code {
    pub(super) fn new(graph: &Arc<Graph>, path: Path, workers: usize) -> Result<Code, DeviceError> {
        Code::of(graph, workers, FUSION_PATTERNS, |node| ops::select(node, path))
    }

    /// As [`Code::new`], with neighbours fused by these patterns only and kernels of the caller's choice.
    pub(super) fn of(
        graph: &Arc<Graph>,
        workers: usize,
        patterns: &[FusionPattern],
        select: impl Fn(&NodeView<'_>) -> Result<Kernel, Unsupported>,
    ) -> Result<Code, DeviceError> {
        let (mut operands, mut numbers) = (Vec::new(), vec![None; graph.tensors().len()]);
        let mut uses = Uses::new(graph.slot_sizes().len());
        let mut operand = |id: TensorId, access: Access| {
            let tensor = graph.tensor(id).ok_or(DeviceError::Misuse("a node of another graph"))?;
            let place = tensor.place.ok_or(DeviceError::Misuse("a node without memory"))?;
            uses.add(place, &tensor.desc, access);
            Ok::<_, DeviceError>(*numbers[id.0 as usize].get_or_insert_with(|| {
                operands.push(Operand { desc: tensor.desc, place });
                (operands.len() - 1) as u32 // no more than tensors, which a u32 counts
            }))
        };
        let mut made = Vec::with_capacity(graph.nodes().len());
        let (mut floats, mut shared, mut cost) = (0, 0, 0usize);
        select_kernels(graph, patterns, select, fuse::kernel, |Fusable { code, kernel, dst, srcs }| {
            floats = floats.max(kernel.local());
            shared = shared.max(kernel.shared());
            cost = cost.saturating_add(kernel.cost());
            let dst = operand(dst, Access::Plain)?;
            let srcs = srcs.into_iter().enumerate();
            let srcs = srcs.map(|(i, id)| id.map(|id| operand(id, kernel.access(i))).transpose());
            let srcs = srcs.collect::<Result<Box<[_]>, _>>()?;
            made.push(Step { code, kernel, finds_columns: false, dst, srcs });
            Ok::<_, DeviceError>(())
        })?;
        drop(numbers);
        let mut steps = made;
        steps.shrink_to_fit();
        operands.shrink_to_fit();
        let mut held = reuse::Held::default();
        for step in &mut steps {
            let operand = |n: &u32| &operands[*n as usize];
            match (step.kernel.leaves_columns(), step.srcs.get(1)) {
                (Some(packing), Some(Some(b))) => {
                    step.finds_columns = held.product(packing, operand(&step.dst), operand(b));
                }
                _ => held.other(step.kernel.shared() > 0, step.srcs.iter().flatten().chain([&step.dst]).map(operand)),
            }
        }
        let settled = Mutex::new(vec![None; graph.slot_sizes().len()]);
        let code = Code { steps, operands, floats, shared, cost, needs: uses.needs(), settled };
        code.scratch(workers)?;
        Ok(code)
    }

    /// Bytes of scratch for so many workers' own parts, and for the shared part. A run may have other workers than there
    /// were when the program was made.
    pub(super) fn scratch(&self, workers: usize) -> Result<(usize, usize), DeviceError> {
        let too_much = || Unsupported { op: OpCode::None, reason: "scratch beyond the address space".to_owned() };
        let locals = Locals::bytes(workers, self.floats).ok_or_else(too_much)?;
        locals.checked_add(self.shared).filter(|&n| n < 1 << 62).ok_or_else(too_much)?;
        Ok((locals, self.shared))
    }

    /// Runs the nodes from `first` on, in order. With a deadline it does not wait for the pool, and stops at the first
    /// barrier behind it. The node to go on with; `None` when all have run.
    pub(super) fn run(
        &self,
        pool: &Pool,
        bindings: &[Region],
        scratch: (&HostMemory, &HostMemory),
        abort: &AtomicBool,
        first: usize,
        until: Option<Instant>,
    ) -> Result<Option<usize>, DeviceError> {
        let bound = self.bind(pool, bindings)?;
        let team = Team::new(abort);
        let (locals, shared) = (Locals::new(scratch.0, self.floats), Shared::new(scratch.1));
        let ask = match until {
            _ if self.cost < SMALL => Ask::Small,
            Some(_) => Ask::Try,
            None => Ask::Wait,
        };
        let paused_at = AtomicUsize::new(usize::MAX);
        let ran = run_team(pool, ask, &team, &locals, first, &|member, first, local| {
            if let Some(step) = self.work(member, first, local, shared, &bound, until) {
                paused_at.store(step, Ordering::Relaxed);
            }
        });
        if let Some(failure) = team.failure() {
            return Err(failure);
        }
        let next = if ran { paused_at.into_inner() } else { first };
        Ok((next < self.steps.len()).then_some(next))
    }

    /// Holds the bound memories for a run, each once and in order, with the layouts that the nodes need.
    fn bind<'a>(&self, pool: &Pool, bindings: &'a [Region]) -> Result<Bound<'a>, DeviceError> {
        let mut regions = Vec::with_capacity(bindings.len());
        for (slot, region) in bindings.iter().enumerate().take(self.needs.len()) {
            let memory = region.buffer().memory::<Memory>();
            let memory = memory.ok_or(DeviceError::Misuse("a binding lies on another device"))?;
            regions.push((memory, slot, region.offset() as usize));
        }
        regions.sort_unstable_by(|a, b| in_order(a.0, b.0));
        let mut bound = Bound { held: Vec::new(), slots: vec![(0, 0); regions.len()] };
        for of_one in regions.chunk_by(|a, b| std::ptr::eq(a.0, b.0)) {
            // This lock is never held while another one is waited for.
            let settled = |&(_, slot, base): &(_, usize, usize)| {
                lock(&self.settled)[slot].and_then(|(at, stamp)| (at == base).then_some(stamp))
            };
            let stamp = settled(&of_one[0]).filter(|stamp| of_one.iter().all(|r| settled(r) == Some(*stamp)));
            let needs = of_one.iter().map(|&(_, slot, base)| (&self.needs[slot], base));
            let held = of_one[0].0.hold(needs, stamp, pool)?;
            for &(_, slot, base) in of_one {
                if stamp != Some(held.stamp()) {
                    lock(&self.settled)[slot] = Some((base, held.stamp()));
                }
                bound.slots[slot] = (bound.held.len(), base);
            }
            bound.held.push(held);
        }
        Ok(bound)
    }

    /// One member's part; the step that is left when the run pauses.
    fn work<'a>(
        &'a self,
        member: &Member<'a>,
        first: usize,
        local: &mut [f32],
        shared: Shared<'a>,
        bound: &'a Bound<'a>,
        until: Option<Instant>,
    ) -> Option<usize> {
        let late = || until.is_some_and(|until| Instant::now() > until);
        let mut shared_before = false;
        for (at, step) in self.steps.iter().enumerate().skip(first) {
            let alone = step.kernel.alone();
            // Two nodes that the leader runs alone follow each other without meeting the others. A worker comes in
            // behind the barrier of its first step.
            let met = at == first && !member.first();
            if (!alone || shared_before) && !met && !member.meet(at, late) {
                return Some(at);
            }
            shared_before = !alone;
            if alone && !member.first() {
                continue;
            }
            let syncs = if alone || step.finds_columns { 0 } else { step.kernel.syncs() };
            let last = member.phase() + syncs;
            if !member.stopping() {
                // A panic here is a bug of ours that an input has found: it ends this queue, not the server.
                let run = AssertUnwindSafe(|| self.step(step, member, alone, local, shared, bound));
                if let Err(panic) = catch_unwind(run) {
                    let text = panic.downcast_ref::<String>().map(String::as_str);
                    let text = text.or(panic.downcast_ref::<&str>().copied()).unwrap_or("no message");
                    member.fail(DeviceError::Bug(format!("the kernel of {} panicked: {text}", step.code)));
                }
            }
            // A worker that stopped early, or whose kernel panicked, still meets the others as often as they expect.
            while member.phase() < last {
                member.sync();
            }
        }
        None
    }

    /// An operand in the bound memories; `None` when it does not fit.
    fn view<'a>(&'a self, number: u32, bound: &'a Bound<'_>, access: Access) -> Option<View<'a>> {
        let Operand { desc, place } = self.operands.get(number as usize)?;
        let &(held, base) = bound.slots.get(place.slot as usize)?;
        bound.held.get(held)?.view(base.checked_add(place.offset)?, desc, access != Access::Plain)
    }

    fn step<'a>(
        &'a self,
        step: &'a Step,
        member: &Member<'a>,
        alone: bool,
        local: &mut [f32],
        shared: Shared<'a>,
        bound: &'a Bound<'a>,
    ) {
        let mut srcs = [None; MAX_SRC];
        for (i, (slot, operand)) in srcs.iter_mut().zip(&step.srcs).enumerate() {
            *slot = operand.and_then(|number| self.view(number, bound, step.kernel.access(i)));
        }
        let outside = DeviceError::Misuse("a binding is smaller than its slot");
        let Some(dst) = self.view(step.dst, bound, Access::Plain) else { return member.fail(outside) };
        if step.srcs.iter().zip(&srcs).any(|(operand, view)| operand.is_some() && view.is_none()) {
            return member.fail(outside);
        }
        let local = &mut local[..step.kernel.local()];
        let finds_columns = step.finds_columns;
        let mut work = Work { member, alone, finds_columns, dst, srcs: &srcs, local, shared };
        step.kernel.run(&mut work);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::CpuDevice;
    use crate::device::{Account, Device, Program};
    use crate::graph::Builder;
    use crate::ops::norm::Norm;
    use crate::tensor::DType;
    use std::time::Duration;

    /// A node, large enough to be shared, whose kernel panics on one worker while the others wait for it.
    fn faulty(who: usize) -> (Arc<Graph>, Code) {
        let mut b = Builder::new();
        let x = b.leaf(DType::F32, [64, 64, 1, 1]).unwrap();
        b.node(Norm::RmsNorm { eps: 1e-5 }, &[Some(x)]).unwrap();
        let graph = Arc::new(b.build().unwrap());
        let code = Code::of(&graph, 2, &[], |_| {
            let kernel = Kernel::new(SMALL, move |work| {
                assert!(work.worker() != who, "worker {who} has had enough");
                work.sync();
            });
            Ok(kernel.with_syncs(1))
        });
        (graph, code.unwrap())
    }

    #[test]
    fn a_panic_on_any_worker_ends_the_queue_alone() {
        let device = CpuDevice::new("CPU", 2, Path::Exact, 1 << 20).unwrap();
        let account = Account::new(1 << 20);
        for who in [0, 1] {
            let (graph, code) = faulty(who);
            let program = Program::new(Arc::clone(&graph), Box::new(code));
            let buffer = device.alloc(1 << 16, &account).unwrap();
            let (mut queue, until) = (device.queue(&account).unwrap(), Instant::now() + Duration::from_secs(60));
            let failure = loop {
                // A worker that comes too late for a run has no part in it.
                let ran = queue.run(&program, &Arc::from([buffer.whole()]));
                let ran = ran.and_then(|()| queue.download(buffer.whole())?.wait(Some(until)).map(drop));
                if let Err(failure) = ran {
                    break failure.to_string();
                }
                assert!(Instant::now() < until, "worker {who} never came");
            };
            assert!(failure.contains(&format!("RMS_NORM panicked: worker {who} has had enough")), "{failure}");
            let mut other = device.queue(&account).unwrap();
            other.fill(buffer.whole(), 7).unwrap();
            assert!(other.download(buffer.whole()).unwrap().wait(Some(until)).unwrap().iter().all(|&b| b == 7));
        }
    }
}
