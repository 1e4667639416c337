//! Execution of stream operations, outside of the driver's lock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use super::stream_op::{CopyEndpoint, KernelLaunch, Memcpy, Memset, StreamOp};
use crate::console::Printer;
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
    /// Held while a cooperative kernel runs, because the cooperative kernels of a context share one workspace, and two threads
    /// of the program may execute operations at once.
    pub cooperative: Mutex<()>,
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
            StreamOp::WriteValue(address, value, bytes) => {
                self.space.snapshot().write(address, &value.to_le_bytes()[..bytes as usize])
            }
            StreamOp::WaitValue(address, value, bytes, condition) => {
                let mut found = [0; 8];
                let read = self.space.snapshot().read(address, &mut found[..bytes as usize]);
                if read.is_ok() && !condition.holds(u64::from_le_bytes(found), value, bytes) {
                    done.retry = Some(StreamOp::WaitValue(address, value, bytes, condition));
                }
                read
            }
            StreamOp::Batch(ops) => {
                let mut ops = ops.into_iter();
                while let Some(op) = ops.next() {
                    let part = self.execute(op);
                    done.add(part);
                    if let Some(again) = done.retry.take() {
                        done.retry = Some(StreamOp::Batch(std::iter::once(again).chain(ops).collect()));
                        break;
                    }
                }
                Ok(())
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
        let printer = Printer::default();
        let machine = exec::ExecutorConfig {
            sms: self.sms.get(launch.device as usize).copied().unwrap_or(1),
            threads: self.threads,
            max_instructions: self.max_instructions,
            report_only: self.report_only,
            local_bytes: work.local_bytes,
            counting: self.counting,
            footprint: self.counting || self.timed_by_bytes,
            print: printer.sink(),
        };
        let cooperative_guard =
            launch.cooperative.then(|| self.cooperative.lock().unwrap_or_else(PoisonError::into_inner));
        let outcome = exec::run_grid(&launch, &self.space.snapshot(), &machine);
        drop(cooperative_guard);
        printer.finish();
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

impl OpOutcome {
    fn add(&mut self, part: Self) {
        self.error = self.error.or(part.error);
        self.reports.extend(part.reports);
        self.counts.extend(part.counts);
        self.host_bytes += part.host_bytes;
        self.retry = part.retry;
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
    /// Copies row by row; adds the bytes copied between host and device to `host_bytes`.
    fn perform(&self, view: &MemorySnapshot, host_bytes: &mut u64) -> Result<(), FaultKind> {
        let crosses = self.from.on_host(view) != self.to.on_host(view);
        if crosses {
            *host_bytes += self.width * self.height * self.depth;
        }
        if self.width == 0 {
            return Ok(());
        }
        for slice in 0..self.depth {
            for row in 0..self.height {
                self.row(view, slice, row)?;
            }
        }
        Ok(())
    }

    fn row(&self, view: &MemorySnapshot, slice: u64, row: u64) -> Result<(), FaultKind> {
        let width = self.width as usize;
        match (&self.from, &self.to) {
            (CopyEndpoint::Known { .. }, CopyEndpoint::Known { .. }) => {
                view.copy(self.to.address(slice, row), self.from.address(slice, row), self.width)?;
                match self.corrupt {
                    true => corrupt(view, self.to.address(slice, row), self.width),
                    false => Ok(()),
                }
            }
            (CopyEndpoint::Known { .. }, CopyEndpoint::Host { memory, .. }) => {
                let mut bytes = vec![0; width];
                view.read(self.from.address(slice, row), &mut bytes)?;
                memory.write(self.to.address(slice, row), &bytes);
                Ok(())
            }
            (CopyEndpoint::Host { memory, .. }, to) => {
                let bytes = memory.read(self.from.address(slice, row), width);
                self.write_row(view, to, slice, row, &bytes)
            }
            (CopyEndpoint::Staged(bytes), to) => {
                let at = (slice * self.height + row) as usize * width;
                let bytes = bytes.get(at..at + width);
                let bytes = bytes.ok_or_else(|| FaultKind::Internal("a staged copy is too short".into()))?;
                self.write_row(view, to, slice, row, bytes)
            }
            (_, CopyEndpoint::Staged(_)) => Err(FaultKind::Internal("a copy into staged bytes".into())),
        }
    }

    fn write_row(
        &self,
        view: &MemorySnapshot,
        to: &CopyEndpoint,
        slice: u64,
        row: u64,
        bytes: &[u8],
    ) -> Result<(), FaultKind> {
        match to {
            CopyEndpoint::Known { .. } => view.write(to.address(slice, row), bytes),
            CopyEndpoint::Host { memory, .. } => {
                memory.write(to.address(slice, row), bytes);
                Ok(())
            }
            CopyEndpoint::Staged(_) => Err(FaultKind::Internal("a copy into staged bytes".into())),
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
    /// Address of a row in memory of the address space, or its offset in pageable memory.
    fn address(&self, slice_index: u64, row: u64) -> u64 {
        match self {
            Self::Known { address, pitch, slice } => address + slice * slice_index + pitch * row,
            Self::Host { pitch, slice, .. } => slice * slice_index + pitch * row,
            Self::Staged(_) => 0,
        }
    }

    fn on_host(&self, view: &MemorySnapshot) -> bool {
        match self {
            Self::Known { address, .. } => view.find(*address, 1).is_ok_and(|allocation| {
                use crate::mem::AllocationKind::{PinnedHost, RegisteredHost};
                matches!(allocation.kind(), PinnedHost | RegisteredHost)
            }),
            Self::Host { .. } | Self::Staged(_) => true,
        }
    }
}

impl Memset {
    fn perform(&self, view: &MemorySnapshot) -> Result<(), FaultKind> {
        let pattern = &self.value.to_le_bytes()[..usize::from(self.bytes)];
        if self.height > 1 && self.pitch == self.width * u64::from(self.bytes) {
            return view.fill(self.address, pattern, self.width * self.height);
        }
        (0..self.height).try_for_each(|row| view.fill(self.address + row * self.pitch, pattern, self.width))
    }
}
