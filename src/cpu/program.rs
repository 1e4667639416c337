//! A graph made ready for the CPU: one kernel per node, and the executor that runs them.

use super::fuse::{self, Pattern};
use super::memory::{HostMemory, Locals, Shared, View};
use super::ops::{Kernel, Path};
use super::pool::{Member, Pool, Team, Work, run_team};
use crate::device::{DeviceError, Region, Unsupported};
use crate::graph::{Graph, Place, TensorId};
use crate::ops::{MAX_SRC, OpCode};
use crate::tensor::TensorDesc;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

pub(super) struct Code {
    steps: Vec<Step>,
    /// Bytes of scratch: locals of all workers, then shared.
    locals: usize,
    floats: usize,
    shared: usize,
}

struct Step {
    code: OpCode,
    kernel: Kernel,
    dst: Operand,
    srcs: Vec<Option<Operand>>,
}

struct Operand {
    desc: TensorDesc,
    place: Place,
}

impl Operand {
    /// The operand in the bound memories (each with the offset where its region starts); `None` when it does not fit.
    fn view<'a>(&'a self, bound: &[(&'a HostMemory, usize)]) -> Option<View<'a>> {
        let &(memory, base) = bound.get(self.place.slot as usize)?;
        View::new(memory, base.checked_add(self.place.offset)?, &self.desc)
    }
}

impl Code {
    pub(super) fn new(graph: &Arc<Graph>, path: Path, workers: usize) -> Result<Code, DeviceError> {
        Self::fused(graph, path, workers, fuse::TABLE)
    }

    /// As [`Code::new`], with neighbours fused by these patterns only.
    pub(super) fn fused(
        graph: &Arc<Graph>,
        path: Path,
        workers: usize,
        patterns: &[Pattern],
    ) -> Result<Code, DeviceError> {
        let operand = |id: TensorId| {
            let tensor = graph.tensor(id).ok_or(DeviceError::Misuse("a node of another graph"))?;
            let place = tensor.place.ok_or(DeviceError::Misuse("a node without memory"))?;
            Ok::<_, DeviceError>(Operand { desc: tensor.desc, place })
        };
        let mut steps = Vec::with_capacity(graph.nodes().len());
        let (mut floats, mut shared) = (0, 0);
        for fuse::Step { code, kernel, dst, srcs } in fuse::steps(graph, path, patterns)? {
            floats = floats.max(kernel.local());
            shared = shared.max(kernel.shared());
            let srcs = srcs.into_iter().map(|id| id.map(operand).transpose()).collect::<Result<_, _>>()?;
            steps.push(Step { code, kernel, dst: operand(dst)?, srcs });
        }
        let too_much = || Unsupported { op: OpCode::None, reason: "scratch beyond the address space".to_owned() };
        let locals = Locals::bytes(workers, floats).ok_or_else(too_much)?;
        locals.checked_add(shared).filter(|&n| n < 1 << 62).ok_or_else(too_much)?;
        Ok(Code { steps, locals, floats, shared })
    }

    /// Bytes of scratch for the workers' own parts, and for the shared part.
    pub(super) fn scratch(&self) -> (usize, usize) {
        (self.locals, self.shared)
    }

    /// Runs all nodes on the pool, in order.
    pub(super) fn run(
        &self,
        pool: &Pool,
        bindings: &[Region],
        locals: &HostMemory,
        shared: &HostMemory,
        abort: &AtomicBool,
    ) -> Result<(), DeviceError> {
        let memories = bindings
            .iter()
            .map(|r| Some((r.buffer().memory::<HostMemory>()?, r.offset() as usize)))
            .collect::<Option<Vec<_>>>()
            .ok_or(DeviceError::Misuse("a binding lies on another device"))?;
        let team = Team::new(pool.workers(), abort);
        let locals = Locals::new(locals, self.floats);
        run_team(pool, &team, &locals, &|member, local| self.work(member, local, Shared::new(shared), &memories));
        team.failure().map_or(Ok(()), Err)
    }

    fn work<'a>(
        &'a self,
        member: &Member<'a>,
        local: &mut [f32],
        shared: Shared<'a>,
        bound: &'a [(&'a HostMemory, usize)],
    ) {
        let mut shared_before = false;
        for step in &self.steps {
            let alone = step.kernel.alone();
            // Two nodes that worker 0 runs alone follow each other without meeting the others.
            if !alone || shared_before {
                member.sync();
            }
            shared_before = !alone;
            if alone && !member.first() {
                continue;
            }
            let syncs = if alone { 0 } else { step.kernel.syncs() };
            let until = member.phase() + syncs;
            if !member.stopping() {
                self.step(step, member, alone, local, shared, bound);
            }
            // A worker that stopped early, or whose kernel panicked, still meets the others as often as they expect.
            while member.phase() < until {
                member.sync();
            }
        }
    }

    fn step<'a>(
        &'a self,
        step: &'a Step,
        member: &Member<'a>,
        alone: bool,
        local: &mut [f32],
        shared: Shared<'a>,
        bound: &'a [(&'a HostMemory, usize)],
    ) {
        let mut srcs = [None; MAX_SRC];
        for (slot, operand) in srcs.iter_mut().zip(&step.srcs) {
            *slot = operand.as_ref().and_then(|operand| operand.view(bound));
        }
        let outside = DeviceError::Misuse("a binding is smaller than its slot");
        let Some(dst) = step.dst.view(bound) else { return member.fail(outside) };
        if step.srcs.iter().zip(&srcs).any(|(operand, view)| operand.is_some() && view.is_none()) {
            return member.fail(outside);
        }
        let local = &mut local[..step.kernel.local()];
        let mut work = Work { member, alone, dst, srcs: &srcs, local, shared };
        // A panic here is a bug of ours that an input has found: it ends this queue, not the server.
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| step.kernel.run(&mut work))) {
            let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            let text = text.unwrap_or("no message");
            member.fail(DeviceError::Bug(format!("the kernel of {} panicked: {text}", step.code)));
        }
    }
}
