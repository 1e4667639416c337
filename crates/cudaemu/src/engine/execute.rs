//! Execution of stream operations, outside of the driver's lock.

use std::sync::Arc;
use std::time::Instant;

use super::stream_op::{CopyEndpoint, KernelLaunch, Memcpy, Memset, StreamOp};
use crate::counts::KernelCounts;
use crate::error::Error;
use crate::exec;
use crate::fault::{FaultKind, FaultReport};
use crate::mem::{AddressSpace, MemorySnapshot, MovedBytes};

/// Shared resources for executing operations; constant for the lifetime of a driver.
#[derive(Debug)]
pub struct OpExecutor {
    /// The address space of all memory.
    pub space: Arc<AddressSpace>,
    /// Number of multiprocessors of each device.
    pub sms: Vec<u32>,
    /// Host threads that execute blocks.
    pub threads: usize,
    /// Limit of warp instructions of one block, after which a launch counts as endless.
    pub max_instructions: u64,
    /// Whether faults that hardware would not notice are reported without stopping the launch.
    pub report_only: bool,
    /// Whether traffic and the distinct bytes that kernels touch are counted.
    pub counting: bool,
    /// Whether kernels are timed by their bytes: then the distinct bytes are counted in any case.
    pub timed_by_bytes: bool,
    /// Time at which the driver started.
    pub began: Instant,
}

/// Result of an operation.
#[derive(Debug, Default)]
pub struct OpOutcome {
    /// The error that the context now has, if the operation failed.
    pub error: Option<Error>,
    /// Reports of the checker.
    pub reports: Vec<String>,
    /// Counts of a kernel, with its name.
    pub counts: Vec<(String, KernelCounts)>,
    /// Bytes that a kernel moved.
    pub moved: MovedBytes,
    /// Bytes copied between host and device.
    pub host_bytes: u64,
    /// Whether the error makes the device unusable, and not only the context.
    pub poisons: bool,
    /// The operation, if it must be retried later.
    pub retry: Option<StreamOp>,
}

impl OpExecutor {
    /// Microseconds since the driver started.
    pub fn now(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1e6
    }

    /// Executes an operation.
    pub fn execute(&self, op: StreamOp) -> OpOutcome {
        let mut done = OpOutcome::default();
        let result = match op {
            StreamOp::Launch(launch) => self.launch(*launch, &mut done),
            StreamOp::Memcpy(copy) => copy.perform(&self.space.snapshot(), &mut done.host_bytes),
            StreamOp::Memset(fill) => fill.perform(&self.space.snapshot()),
            // Callbacks run on the driver's callback thread and never get here.
            StreamOp::Call(_) => Err(FaultKind::Internal("a host function reached the device executor".into())),
            StreamOp::Fault(error, launch) => {
                done.error = Some(error);
                done.poisons = true;
                done.reports.push(format!("injected fault: {launch} ends with {error}"));
                Ok(())
            }
            // The driver keeps hung launches and never executes them.
            StreamOp::Hang(_) => Err(FaultKind::Internal("a hung launch reached the device executor".into())),
            StreamOp::Record(_) | StreamOp::Wait => Ok(()),
            // The submission checked that this is an allocation. If it no longer is one, the program has freed it twice.
            StreamOp::Free(address) => {
                self.space.free(address).map(drop).map_err(|error| FaultKind::UseAfterFree(error.to_string()))
            }
            StreamOp::WriteValue(address, value) => self.space.snapshot().write(address, &value.to_le_bytes()),
            StreamOp::WaitValue(address, value, condition) => {
                let mut found = [0; 4];
                let read = self.space.snapshot().read(address, &mut found);
                if read.is_ok() && !condition.holds(u32::from_le_bytes(found), value) {
                    done.retry = Some(StreamOp::WaitValue(address, value, condition));
                }
                read
            }
        };
        if let Err(kind) = result {
            done.error = Some(hardware_error(&kind));
            done.reports.push(kind.to_string());
        }
        done
    }

    fn launch(&self, work: KernelLaunch, done: &mut OpOutcome) -> Result<(), FaultKind> {
        let launch = work.launch;
        let machine = exec::ExecutorConfig {
            sms: self.sms.get(launch.device as usize).copied().unwrap_or(1),
            threads: self.threads,
            max_instructions: self.max_instructions,
            report_only: self.report_only,
            local_bytes: work.local_bytes,
            counting: self.counting,
            footprint: self.counting || self.timed_by_bytes,
        };
        let outcome = exec::run_grid(&launch, &self.space.snapshot(), &machine);
        done.reports.extend(outcome.warnings.iter().map(FaultReport::to_string));
        if outcome.more_warnings > 0 {
            done.reports.push(format!("… and {} more faults of that launch", outcome.more_warnings));
        }
        let name = launch.code.functions.get(launch.function).map_or_else(String::new, |f| f.name.to_string());
        done.moved = outcome.moved;
        done.counts.push((name, KernelCounts::of(&launch, &outcome)));
        if let Err(report) = outcome.result {
            done.error = Some(hardware_error(&report.fault.kind));
            done.reports.push(report.to_string());
        }
        Ok(())
    }
}

/// The error code of a context after a fault. The faults without a code of their own become an unspecified launch
/// failure.
fn hardware_error(kind: &FaultKind) -> Error {
    match kind {
        FaultKind::OutOfBounds(_) | FaultKind::UseAfterFree(_) | FaultKind::NotAccessible(_) => Error::IllegalAddress,
        FaultKind::Misaligned => Error::MisalignedAddress,
        FaultKind::Trap(text) if text.to_ascii_lowercase().contains("assert") => Error::Assert,
        FaultKind::InvalidValue(_) => Error::IllegalInstruction,
        FaultKind::StackOverflow => Error::HardwareStackError,
        FaultKind::InstructionLimit | FaultKind::Deadlock(_) => Error::LaunchTimeout,
        FaultKind::Internal(_) => Error::Unknown,
        FaultKind::Trap(_)
        | FaultKind::Uninitialised
        | FaultKind::Race(_)
        | FaultKind::DivergentBarrier(_)
        | FaultKind::InactiveLane(_)
        | FaultKind::PendingCopy(_) => Error::LaunchFailed,
    }
}

impl Memcpy {
    /// Copies the bytes; adds those copied between host and device to `host_bytes`.
    fn perform(&self, view: &MemorySnapshot, host_bytes: &mut u64) -> Result<(), FaultKind> {
        if self.from.on_host(view) != self.to.on_host(view) {
            *host_bytes += self.bytes;
        }
        match (&self.from, &self.to) {
            (CopyEndpoint::Known(from), CopyEndpoint::Known(to)) => {
                view.copy(*to, *from, self.bytes)?;
                if self.corrupt { corrupt(view, *to, self.bytes) } else { Ok(()) }
            }
            (CopyEndpoint::Known(from), CopyEndpoint::Host(memory)) => {
                let mut bytes = vec![0; self.bytes as usize];
                view.read(*from, &mut bytes)?;
                memory.write(&bytes);
                Ok(())
            }
            (CopyEndpoint::Staged(bytes), CopyEndpoint::Known(to)) => view.write(*to, bytes),
            _ => Err(FaultKind::Internal("a copy between host memories".into())),
        }
    }
}

/// Distance in bytes between the wrong bytes of a corrupted copy.
const CORRUPT_DISTANCE: usize = 4096;

/// Inverts the first byte of each [`CORRUPT_DISTANCE`] bytes, so that also the shortest copy is wrong.
fn corrupt(view: &MemorySnapshot, address: u64, width: u64) -> Result<(), FaultKind> {
    (0..width).step_by(CORRUPT_DISTANCE).try_for_each(|offset| {
        let mut byte = [0];
        view.read(address + offset, &mut byte)?;
        view.write(address + offset, &[!byte[0]])
    })
}

impl CopyEndpoint {
    fn on_host(&self, view: &MemorySnapshot) -> bool {
        match self {
            Self::Known(address) => view
                .find(*address, 1)
                .is_ok_and(|allocation| allocation.kind() == crate::mem::AllocationKind::PinnedHost),
            Self::Host(_) | Self::Staged(_) => true,
        }
    }
}

impl Memset {
    fn perform(&self, view: &MemorySnapshot) -> Result<(), FaultKind> {
        view.fill(self.address, &self.value.to_le_bytes()[..usize::from(self.bytes)], self.count)
    }
}
