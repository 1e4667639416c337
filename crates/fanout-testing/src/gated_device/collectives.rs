//! Programs with collective nodes: such a program ends only when the programs of the other ranks run, too. The gate starts it on
//! the CPU device and then runs commands of other queues. The seed determines the order in which programs start.

use super::command_kind::CommandKind;
use super::{COMMAND_TIMEOUT, GateState, GatedQueue, QueueState};
use crate::races::VectorClock;
use fanout::device::{Collectives, DeviceError, Membership, TimelinePoint};
use std::time::{Duration, Instant};

/// Time between two checks of the programs that run.
const SLICE: Duration = Duration::from_millis(1);

/// A program that was started.
pub(super) struct RunningProgram {
    end: TimelinePoint,
    /// The commands that are ordered before its end.
    clock: VectorClock,
}

impl QueueState {
    /// Starts a program, whose end has this clock.
    pub(super) fn start(&mut self, command: CommandKind, clock: VectorClock) -> Result<(), DeviceError> {
        let CommandKind::Run { program, bindings } = command else {
            return Err(DeviceError::Misuse("a command without a program"));
        };
        self.inner.run(&program, &bindings)?;
        self.running = Some(RunningProgram { end: self.inner.mark(), clock });
        Ok(())
    }
}

impl GateState {
    /// Completes the programs that have ended.
    pub(super) fn finish_programs(&mut self) {
        for queue in &mut self.queues {
            let ended = queue.running.as_ref().map_or(Ok(false), |program| program.end.poll());
            match ended {
                Ok(false) => {}
                Ok(true) => queue.running.take().into_iter().for_each(|program| queue.complete(program.clock)),
                Err(failure) => {
                    queue.running = None;
                    queue.fail(failure);
                }
            }
        }
    }

    /// Waits until one of the started programs ends. Returns false if no program was started, or if all of them wait for ranks
    /// whose programs cannot start.
    pub(super) fn wait_for_programs(&mut self) -> bool {
        let until = Instant::now() + COMMAND_TIMEOUT;
        let running = |state: &GateState| state.queues.iter().filter(|queue| queue.running.is_some()).count();
        let before = running(self);
        while before > 0 && Instant::now() < until {
            let first = self.queues.iter().find_map(|queue| queue.running.as_ref());
            if let Some(program) = first {
                // An error is found below; a timeout is none.
                let _ = program.end.wait(Some(Instant::now() + SLICE));
            }
            self.finish_programs();
            if running(self) < before {
                return true;
            }
        }
        false
    }
}

impl Collectives for GatedQueue {
    /// At once, so the caller must wait for the queue's earlier programs with collectives.
    fn join(&mut self, group: u32, member: Membership) -> Result<(), DeviceError> {
        let mut state = self.gate.lock();
        let refused = DeviceError::Misuse("the CPU device has no collectives");
        state.queues[self.queue].inner.collectives().ok_or(refused)?.join(group, member)
    }
}
