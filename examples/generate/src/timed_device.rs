//! A device wrapper that measures compute time: forwards everything to the inner device and times the programs.
//!
//! It also shows that a program can give the scheduler its own implementation of [`Device`].

use fanout::device::{
    Device, DeviceError, ForwardDevice, ForwardQueue, MemoryBudget, Program, Queue, Region, TimelinePoint,
};
use std::fmt;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// A wrapper that times the programs of a local device. Devices of servers are forwarded untimed.
#[derive(Debug)]
pub struct TimedDevice {
    inner: Arc<dyn Device>,
    busy_time: Arc<BusyTime>,
}

/// The compute time of a device, shared by the wrapper, its queues and their timing threads.
#[derive(Debug, Default)]
struct BusyTime {
    state: Mutex<BusyState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct BusyState {
    busy: Duration,
    /// Submitted programs that have no recorded end yet.
    pending: usize,
}

impl BusyTime {
    fn lock(&self) -> MutexGuard<'_, BusyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn finish_program(&self, took: Duration) {
        let mut state = self.lock();
        state.busy += took;
        state.pending -= 1;
        self.changed.notify_all();
    }
}

impl TimedDevice {
    /// Wraps `inner`. Buffers, programs and regions of the two devices are interchangeable.
    pub fn new(inner: Arc<dyn Device>) -> Arc<TimedDevice> {
        Arc::new(TimedDevice { inner, busy_time: Arc::default() })
    }

    /// Returns the compute time of all programs since the last call, summed over the queues, and resets it. First waits until
    /// all submitted programs have ended. `None` for the device of a server: timing it would cost extra messages per program.
    pub fn take_busy_time(&self) -> Option<Duration> {
        if self.inner.link_stats().is_some() {
            return None;
        }
        let mut state = self.busy_time.lock();
        while state.pending > 0 {
            state = self.busy_time.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        Some(std::mem::take(&mut state.busy))
    }

    /// As [`TimedDevice::take_busy_time`], but counts only the programs that have ended, and does not wait.
    pub fn take_finished_time(&self) -> Duration {
        std::mem::take(&mut self.busy_time.lock().busy)
    }
}

impl ForwardDevice for TimedDevice {
    fn inner(&self) -> &dyn Device {
        &*self.inner
    }

    fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let inner = self.inner.queue(budget)?;
        if self.inner.link_stats().is_some() {
            return Ok(inner);
        }
        Ok(Box::new(TimedQueue { inner, busy_time: Arc::clone(&self.busy_time), to_timing_thread: None }))
    }
}

/// A queue that times its programs.
struct TimedQueue {
    inner: Box<dyn Queue>,
    busy_time: Arc<BusyTime>,
    /// Channel to the timing thread: the timeline points before and after each program that did not both start and end during
    /// its submission. `None` until the first such program.
    to_timing_thread: Option<Sender<(TimelinePoint, TimelinePoint)>>,
}

impl fmt::Debug for TimedQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TimedQueue").finish_non_exhaustive()
    }
}

impl TimedQueue {
    /// Calls `submit`, which submits one program, and times that program. A program that starts on an idle queue and ends
    /// within `submit` is timed here, any other by the timing thread.
    fn timed(&mut self, submit: impl FnOnce(&mut dyn Queue) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        let before = self.inner.mark();
        let (idle, start) = (matches!(before.poll(), Ok(true)), Instant::now());
        submit(&mut *self.inner)?;
        let after = self.inner.mark();
        self.busy_time.lock().pending += 1;
        if idle && matches!(after.poll(), Ok(true)) {
            self.busy_time.finish_program(start.elapsed());
            return Ok(());
        }
        let busy_time = &self.busy_time;
        let to_timing_thread = self.to_timing_thread.get_or_insert_with(|| start_timing_thread(Arc::clone(busy_time)));
        if to_timing_thread.send((before, after)).is_err() {
            // The timing thread could not be started: count the program as 0 s, so that `take_busy_time` does not wait for it.
            self.busy_time.finish_program(Duration::ZERO);
        }
        Ok(())
    }
}

/// Starts the timing thread of a queue: it waits for pairs of timeline points, until the queue is dropped.
fn start_timing_thread(busy_time: Arc<BusyTime>) -> Sender<(TimelinePoint, TimelinePoint)> {
    let (send, pairs) = channel::<(TimelinePoint, TimelinePoint)>();
    let body = move || {
        for (before, after) in pairs {
            let start = before.wait(None).map(|()| Instant::now());
            let took = after.wait(None).and(start).map_or(Duration::ZERO, |start| start.elapsed());
            busy_time.finish_program(took);
        }
    };
    if let Err(error) = std::thread::Builder::new().name("device-timer".to_owned()).spawn(body) {
        log::warn!("cannot start a thread to time a device; its busy time will be too low: {error}");
    }
    send
}

impl ForwardQueue for TimedQueue {
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Ok(&mut *self.inner)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        self.timed(|queue| queue.run(program, bindings))
    }

    fn run_inline(&mut self, program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError> {
        self.timed(|queue| queue.run_inline(program, bindings, budget))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a failed unwrap fails the test
mod tests {
    use super::*;
    use fanout::cpu::{CpuDevice, MathMode};
    use fanout::device::UploadSource;
    use fanout::graph::Builder;
    use fanout::ops::mul_mat::MulMat;
    use fanout::tensor::DType;

    #[test]
    fn inline_and_queued_programs_are_timed() {
        let device = TimedDevice::new(CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 30).unwrap());
        let mut b = Builder::new();
        let a = b.leaf(DType::F32, [256, 256, 1, 1]).unwrap();
        b.node(MulMat::PLAIN, &[Some(a), Some(a)]).unwrap();
        let graph = Arc::new(b.build());
        let budget = MemoryBudget::new(1 << 30);
        let memory = Device::alloc(&*device, graph.slot_sizes()[0] as u64, &budget).unwrap();
        let (program, bindings) = (Device::prepare(&*device, graph).unwrap(), Arc::from([memory.whole()]));
        let mut queue = Device::queue(&*device, &budget).unwrap();
        assert_eq!(device.take_busy_time(), Some(Duration::ZERO));
        let start = Instant::now();
        queue.run_inline(&program, &bindings, Duration::from_secs(9)).unwrap();
        let inline_time = device.take_busy_time().unwrap();
        assert!(inline_time > Duration::ZERO && inline_time <= start.elapsed());
        for _ in 0..3 {
            queue.run(&program, &bindings).unwrap();
        }
        let queued_time = device.take_busy_time().unwrap();
        assert!(queued_time > Duration::ZERO && queued_time <= start.elapsed());
        assert_eq!(device.take_busy_time(), Some(Duration::ZERO));
        queue.run_inline(&program, &bindings, Duration::from_secs(9)).unwrap();
        // A program that is still running is counted by a later call.
        let (so_far, rest) = (device.take_finished_time(), device.take_busy_time().unwrap());
        assert!(so_far + rest > Duration::ZERO && so_far + rest <= start.elapsed());
        assert_eq!((device.take_finished_time(), device.take_busy_time()), (Duration::ZERO, Some(Duration::ZERO)));
    }

    /// The wrapper forwards the capabilities of the CPU device, and their effects reach the inner device.
    #[test]
    fn capabilities_are_those_of_the_inner_device() {
        let cpu = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 30).unwrap();
        let device: Arc<dyn Device> = TimedDevice::new(Arc::clone(&cpu) as _);
        assert_eq!(device.info().id, cpu.info().id);
        assert!(device.import_host().is_some() && device.pinned_memory().is_none() && device.peer_copies().is_none());
        device.host_threads().unwrap().set_threads(2).unwrap();
        assert_eq!(cpu.threads(), 2);
        let budget = MemoryBudget::new(1 << 20);
        let (buffer, mut queue) = (device.alloc(64, &budget).unwrap(), device.queue(&budget).unwrap());
        assert!(queue.load_by_digest().is_none());
        queue.prefault().unwrap().prefault(&buffer.whole());
        queue.upload(buffer.whole(), None, UploadSource::Borrowed(&[7; 64])).unwrap();
        assert_eq!(queue.download(buffer.whole()).unwrap().wait(None), Ok(vec![7; 64]));
    }
}
