//! What a real GPU does that an ideal one does not ([`HardwareModel`](crate::config::HardwareModel)): injected faults,
//! unusable devices, launches that never end, corrupted copies, deadlocks of hardware connections.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::{Driver, DriverState, StateGuard};
use crate::bytecode::Function;
use crate::console;
use crate::engine::{KernelLaunch, OpOutcome, StreamOp, StreamPoint};
use crate::error::{Error, Result};
use crate::handle::{ContextId, Handle, StreamId};

/// State of the hardware model.
#[derive(Debug, Default)]
pub struct HardwareState {
    /// Number of launches submitted to each device.
    launches: Vec<u64>,
    /// Launches that never end.
    hung: Vec<HungLaunch>,
    /// A test has ended the hung launches: from then on none hangs.
    hangs_ended: bool,
    /// When a deadlocked connection was first found, since the last progress of any stream.
    deadlocked_since: Option<Instant>,
    /// Whether every fault makes its device unusable.
    poison: bool,
    /// Number of calls that allocate or free memory synchronously on a GPU.
    pub alloc_syncs: u64,
    /// Number of compilations of a module or library.
    pub compilations: u64,
    /// Number of kernels that graphs have launched through a programmatic edge.
    pub programmatic_launches: u64,
    /// Number of kernels that were loaded by their first launch or graph node.
    pub lazy_loads: u64,
    /// The kernels among them that do not wait, each of which is reported once.
    without_wait: BTreeSet<String>,
}

/// A launch that has started and never ends.
#[derive(Debug)]
struct HungLaunch {
    context: ContextId,
    stream: StreamId,
    text: String,
}

impl HardwareState {
    /// No launches yet, on this many devices.
    pub fn new(devices: usize, poison: bool) -> Self {
        Self { launches: vec![0; devices], poison, ..Self::default() }
    }

    /// Number of launches that hang now.
    pub fn hung_launches(&self) -> usize {
        self.hung.len()
    }

    /// An operation was executed.
    pub(super) fn note_progress(&mut self) {
        self.deadlocked_since = None;
    }
}

impl DriverState {
    /// Counts a kernel launched through a programmatic edge, and reports it if it cannot wait. On a GPU such a kernel runs beside
    /// the one before; here it runs after it, so that a race would never show.
    pub(super) fn note_programmatic_launch(&mut self, kernel: &Function) {
        self.hardware.programmatic_launches += 1;
        let name = &kernel.name;
        if !kernel.waits_for_grids && self.hardware.without_wait.insert(name.to_string()) {
            self.report(format!(
                "kernel {name} has a programmatic dependency in a graph, but no griddepcontrol.wait: it may run before the kernel \
                 that it depends on has ended"
            ));
        }
    }
}

impl Driver {
    /// The operation that the hardware model makes of a submitted one: a launch may fail or hang, a copy may write wrong bytes.
    pub(super) fn apply_hardware_model(&self, state: &mut DriverState, work: StreamOp) -> StreamOp {
        match work {
            StreamOp::Launch(launch) => self.apply_to_launch(state, launch),
            StreamOp::Memcpy(mut copy) if !self.config.hardware.corrupt.is_empty() => {
                let devices = copy.addresses().and_then(|(from, to)| self.device_of(from).zip(self.device_of(to)));
                copy.corrupt = devices.is_some_and(|(from, to)| {
                    self.config.hardware.corrupts(self.config_index(from), self.config_index(to))
                        && (state.has_peer_access(from, to) || state.has_peer_access(to, from))
                });
                StreamOp::Memcpy(copy)
            }
            work => work,
        }
    }

    fn apply_to_launch(&self, state: &mut DriverState, launch: Box<KernelLaunch>) -> StreamOp {
        let device = launch.launch.device as usize;
        let Some(launches) = state.hardware.launches.get_mut(device) else { return StreamOp::Launch(launch) };
        *launches += 1;
        let model = &self.config.hardware;
        let here = |at: &crate::config::LaunchNumber| (at.device, at.number) == (self.config_index(device), *launches);
        let text = || format!("launch {launches} of device {device} (kernel {})", launch.launch.kernel().name);
        if let Some(fault) = model.faults.iter().find(|fault| here(&fault.at)) {
            return StreamOp::Fault(fault.error, text());
        }
        match model.hangs.iter().any(here) {
            true => StreamOp::Hang(text()),
            false => StreamOp::Launch(launch),
        }
    }

    /// The device that holds the memory at an address; `None` for host memory.
    pub(super) fn device_of(&self, address: u64) -> Option<usize> {
        let allocation = self.space().find(address)?;
        (!super::memory::is_host_memory(&allocation)).then(|| allocation.device() as usize)
    }

    /// A device's number before `CUDA_VISIBLE_DEVICES` selected among the devices.
    fn config_index(&self, device: usize) -> usize {
        self.config.devices.get(device).map_or(usize::MAX, |device| device.index)
    }

    /// Starts a launch that never ends: its stream stays busy.
    pub(super) fn begin_hung_launch(
        &self,
        state: &mut DriverState,
        context: ContextId,
        stream: StreamId,
        text: String,
    ) {
        console::log_stderr(format_args!("{text} never ends, because CUDAEMU_HANG_AT names it"));
        state.hardware.hung.push(HungLaunch { context, stream, text });
        if state.hardware.hangs_ended {
            state.end_hung_launches();
        }
    }

    /// Ends all hung launches with CUDA_ERROR_LAUNCH_TIMEOUT, as a watchdog does. From now on, no launch hangs.
    pub fn end_hung_launches(&self) {
        let mut state = self.state();
        state.hardware.hangs_ended = true;
        state.end_hung_launches();
        drop(state);
        self.changed.notify_all();
    }

    /// Reports a deadlock if one of these points, for which the program waits, depends through a hardware connection on a value
    /// that is not written, and no stream has made progress for `CUDAEMU_DEADLOCK_MS`. The context then fails, which ends
    /// all its waits.
    pub(super) fn check_deadlock(&self, state: &mut DriverState, points: &[StreamPoint]) {
        if self.config.hardware.connections.is_none() {
            return;
        }
        let Some(found) = state.streams.connection_deadlock(points) else { return };
        let since = *state.hardware.deadlocked_since.get_or_insert_with(Instant::now);
        if since.elapsed() < Duration::from_millis(self.config.hardware.deadlock_ms) {
            return;
        }
        state.hardware.note_progress();
        let Some(context) = state.streams.context_of(found.waiting) else { return };
        let Ok(owner) = state.contexts.get_mut(context) else { return };
        owner.failed.get_or_insert(Error::LaunchTimeout);
        let device = owner.device;
        let name = |stream: StreamId| format!("stream {:#x}", stream.raw());
        let waiting = match found.behind == found.waiting {
            true => "which waits".to_owned(),
            false => format!("which depends on {}, which waits", name(found.waiting)),
        };
        state.report(format!(
            "deadlock: {} of device {device} cannot start behind {} on hardware connection {}, {waiting} for a value at {:#x} \
             that nothing has written for {} ms; submit such a wait only after all that the value depends on",
            name(found.blocked),
            name(found.behind),
            found.connection,
            found.address,
            self.config.hardware.deadlock_ms,
        ));
        self.changed.notify_all();
    }

    /// Waits for the context's operations before a synchronising allocation, if `CUDAEMU_ALLOC_SYNC_US` is set.
    pub(super) fn synchronize_allocation<'a>(
        &'a self,
        mut state: StateGuard<'a>,
        context: ContextId,
    ) -> Result<StateGuard<'a>> {
        if state.streams.time.allocations_synchronise() {
            let result;
            (state, result) = self.synchronize_context(state, context);
            result?;
        }
        state.note_synchronous_allocation();
        Ok(state)
    }
}

impl DriverState {
    /// Counts a synchronising allocation or free, which holds the driver's lock for its simulated duration.
    pub(super) fn note_synchronous_allocation(&mut self) {
        self.hardware.alloc_syncs += 1;
        self.streams.host_allocated();
    }

    /// Counts a compilation, which takes the calling thread its simulated duration.
    pub(super) fn note_compilation(&mut self) {
        self.hardware.compilations += 1;
        self.streams.host_compiled();
    }

    /// Handles an operation's error: its context fails, and its device too if so configured or if the fault was injected.
    pub(super) fn fail(&mut self, context: ContextId, error: Error, poisons: bool) {
        let Ok(owner) = self.contexts.get_mut(context) else { return };
        let error = *owner.failed.get_or_insert(error);
        let device = owner.device;
        if poisons || self.hardware.poison {
            self.poison(device, error);
        }
    }

    /// Makes a device unusable: all its contexts fail, and no new one can be made. Its hung launches end.
    fn poison(&mut self, device: usize, error: Error) {
        let Some(found) = self.devices.get_mut(device) else { return };
        let error = *found.poisoned.get_or_insert(error);
        let mut contexts = Vec::new();
        for (id, context) in self.contexts.iter_mut().filter(|(_, context)| context.device == device) {
            context.failed.get_or_insert(error);
            contexts.push(id);
        }
        let (ended, hung) =
            std::mem::take(&mut self.hardware.hung).into_iter().partition(|hung| contexts.contains(&hung.context));
        self.hardware.hung = hung;
        let ended: Vec<HungLaunch> = ended;
        for hung in ended {
            self.streams.finish(hung.stream, Default::default());
        }
    }

    /// Fails with the device's error if a fault has made the device unusable.
    pub fn check_device(&self, device: usize) -> Result<()> {
        self.devices.get(device).and_then(|device| device.poisoned).map_or(Ok(()), Err)
    }

    /// As [`DriverState::check_device`], for the device of a context.
    pub(super) fn check_device_of(&self, context: ContextId) -> Result<()> {
        self.contexts.get(context).map_or(Ok(()), |context| self.check_device(context.device))
    }

    fn end_hung_launches(&mut self) {
        for HungLaunch { context, stream, text } in std::mem::take(&mut self.hardware.hung) {
            let reports = vec![format!("{text} has hung until it was ended")];
            self.finish(
                context,
                stream,
                OpOutcome { error: Some(Error::LaunchTimeout), reports, ..OpOutcome::default() },
            );
        }
    }

    /// Whether a context of the first device has access to memory of the second.
    fn has_peer_access(&self, from: usize, to: usize) -> bool {
        let own = self.contexts.iter().filter(|(_, context)| context.device == from);
        from != to && own.filter_map(|(id, _)| self.accessible_devices(id).ok()).any(|devices| devices >> to & 1 != 0)
    }
}
