//! Contexts: the primary CUDA context of a GPU, and the state that all queues and buffers of a device share.

use super::CudaOptions;
use super::deferred_drop::DeferredDrops;
use super::driver::Gpu;
use super::driver_api::{self, DriverError, RetainedContext};
use super::event_timeline::EventTimeline;
use super::events::{Event, Stream};
use super::launch_log::LaunchLog;
use super::memory::MemorySource;
use super::modules::Modules;
use super::peer::Peers;
use super::pinned::{PinnedArena, PinnedBlock};
use super::precompile::Precompiler;
use super::programmatic::ProgrammaticLaunch;
use super::turns::{GpuTurns, StreamStatus};
use crate::device::{DeviceError, MemoryBudget, QueueThreads, Reservation, Timeline, TimelinePoint};
use crate::poison::lock;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, Weak};
use std::time::{Duration, Instant};

/// Pinned memory of a device, in bytes: for uploads and copies through the host, and for downloads; and the least of it with which
/// a device can work.
const TRANSFER_BYTES: usize = 16 << 20;
const MIN_TRANSFER_BYTES: usize = 2 << 20;

/// Pinned memory for the error words of a device's queues: of 4096 queues.
const ERROR_WORD_BYTES: usize = 1 << 20;

/// Work of the service stream may take as many times the device timeout while queues make progress.
const SERVICE_TIMEOUTS: u32 = 10;

/// The primary CUDA context of a GPU. Every driver object holds a reference, so that the context is released after its last
/// object, on any thread and in any order of drops.
#[derive(Debug)]
pub(super) struct PrimaryContext {
    /// Name of the device, for example `CUDA0`.
    pub(super) name: String,
    cuda: Arc<RetainedContext>,
    /// Why the device is unusable until the process is started again.
    lost: OnceLock<Loss>,
    /// A kernel does not end: calls that release something may wait for it.
    hung: AtomicBool,
    /// The launches of the device's queues, for the messages of failures.
    launch_logs: Mutex<Vec<Weak<LaunchLog>>>,
}

/// Why a device is lost.
#[derive(Debug)]
struct Loss {
    error: DeviceError,
    /// The budget of the session whose kernel faulted, if that is known.
    session: Option<Arc<MemoryBudget>>,
}

impl PrimaryContext {
    /// Opens the primary context of a GPU and makes it current on the calling thread. Returns the context and the bytes of free
    /// memory.
    pub(super) fn open(gpu: &Gpu, name: &str) -> Result<(Arc<PrimaryContext>, u64), DeviceError> {
        let failed = |call| move |e| super::driver::driver_error(name, call, e);
        let cuda = RetainedContext::new(gpu.ordinal).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let primary = Arc::new(PrimaryContext {
            name: name.to_owned(),
            cuda: Arc::new(cuda),
            lost: OnceLock::new(),
            hung: AtomicBool::new(false),
            launch_logs: Mutex::default(),
        });
        primary.bind()?;
        let (free, _) = driver_api::memory_info().map_err(failed("cuMemGetInfo"))?;
        Ok((primary, free))
    }

    pub(super) fn cuda(&self) -> &RetainedContext {
        &self.cuda
    }

    /// Makes the context current on the calling thread. Required before each driver call for this device.
    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        self.cuda.bind().map_err(|e| self.driver_error("cuCtxSetCurrent", e))
    }

    /// As `bind`, before a call that releases a driver object. Returns false if the call must not be made: the context is unusable,
    /// or the call could wait for a kernel that never ends. The object then lives until the process ends.
    pub(super) fn bind_for_release(&self) -> bool {
        !self.is_hung() && self.cuda.bind().is_ok()
    }

    /// The error of a failed driver call on this device. If it makes the context unusable, the device is lost.
    pub(super) fn driver_error(&self, call: &'static str, e: DriverError) -> DeviceError {
        let error = super::driver::driver_error(&self.name, call, e);
        if e.poisons() { self.mark_lost(&format!("{call} failed: {e}"), e.is_kernel_fault()) } else { error }
    }

    /// Marks the device as lost because a kernel does not end, and returns the error. From now on, nothing of the device is
    /// released.
    pub(super) fn mark_hung(&self, timeout: Duration) -> DeviceError {
        if !self.hung.swap(true, Ordering::SeqCst) {
            // Releasing the context would wait for the kernel.
            std::mem::forget(Arc::clone(&self.cuda));
        }
        self.mark_lost(&format!("no progress for {} s (the device timeout)", timeout.as_secs_f32()), false)
    }

    /// Marks the device as lost, by a fault of a kernel or by another cause (also a hang, which a stuck driver or another process
    /// may cause), and returns the error, that of the first time.
    pub(super) fn mark_lost(&self, reason: &str, by_kernel: bool) -> DeviceError {
        let loss = self.lost.get_or_init(|| {
            let logs = lock(&self.launch_logs);
            let running = LaunchLog::describe_running(&logs);
            let error = DeviceError::Lost { device: self.name.clone(), reason: format!("{reason}; {running}") };
            log::error!("{error}");
            Loss { error, session: by_kernel.then(|| LaunchLog::sole_tenant(&logs)).flatten() }
        });
        loss.error.clone()
    }

    /// Why the device is unusable until the process is started again, if it is.
    pub(super) fn lost(&self) -> Option<&DeviceError> {
        self.lost.get().map(|loss| &loss.error)
    }

    /// The budget of the session whose kernel faulted, if that is the cause and the session is known.
    pub(super) fn lost_by(&self) -> Option<Arc<MemoryBudget>> {
        self.lost.get()?.session.clone()
    }

    /// Fails if the device is lost.
    pub(super) fn check_lost(&self) -> Result<(), DeviceError> {
        self.lost().map_or(Ok(()), |e| Err(e.clone()))
    }

    pub(super) fn is_hung(&self) -> bool {
        self.hung.load(Ordering::SeqCst)
    }

    /// Adds the log of a queue.
    pub(super) fn add_launch_log(&self, log: &Arc<LaunchLog>) {
        let mut logs = lock(&self.launch_logs);
        logs.retain(|log| log.strong_count() > 0);
        logs.push(Arc::downgrade(log));
    }
}

/// The state that all queues and buffers of a device share.
pub(super) struct DeviceContext {
    pub(super) gpu: Gpu,
    pub(super) options: CudaOptions,
    pub(super) modules: Modules,
    /// Whether kernels of graphs are launched while the ones before still run.
    pub(super) programmatic: ProgrammaticLaunch,
    pub(super) precompiler: Precompiler,
    /// Memory budget of all buffers and queues of the device.
    pub(super) budget: Arc<MemoryBudget>,
    event_pool: Mutex<Vec<Event>>,
    /// Pinned memory of uploads, and of copies between devices through the host.
    pub(super) upload_memory: TransferMemory,
    /// Pinned memory of pending downloads.
    pub(super) download_memory: TransferMemory,
    /// Pinned memory of the queues' error words.
    error_words: Arc<PinnedArena>,
    pub(super) memory_source: MemorySource,
    /// Stream for work outside of any queue: allocating, clearing and freeing memory.
    service_stream: Stream,
    pub(super) deferred_drops: DeferredDrops,
    /// The order in which sessions submit programs.
    pub(super) turns: GpuTurns,
    /// The threads that submit what queues hold back.
    pub(super) queue_threads: QueueThreads,
    /// All queues of the device.
    queues: Mutex<Vec<Weak<Timeline>>>,
    busy: Mutex<SampledTime>,
    /// How bytes are copied from other GPUs.
    pub(super) peers: Peers,
    // Last field: dropped after all driver objects above.
    primary: Arc<PrimaryContext>,
}

impl fmt::Debug for DeviceContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.primary.name, self.gpu)
    }
}

/// An arena of pinned memory, and the budget that its users share.
#[derive(Debug)]
pub(super) struct TransferMemory {
    arena: Arc<PinnedArena>,
    pub(super) budget: Arc<MemoryBudget>,
}

/// A block of transfer memory. The owner must not drop it while submitted work still uses it.
#[derive(Debug)]
pub(super) struct TransferBlock {
    pub(super) block: PinnedBlock,
    _reservation: Reservation,
}

impl TransferMemory {
    fn new(primary: &Arc<PrimaryContext>) -> Result<TransferMemory, DeviceError> {
        let arena = PinnedArena::new(primary, TRANSFER_BYTES, MIN_TRANSFER_BYTES)?;
        let budget = MemoryBudget::new(arena.bytes() as u64);
        Ok(TransferMemory { arena, budget })
    }

    /// A block of at least `bytes` bytes, counted in the budget of a queue, which lies within `budget`. `None` if that or the arena
    /// has no room.
    pub(super) fn acquire(&self, of_queue: &Arc<MemoryBudget>, bytes: usize) -> Option<TransferBlock> {
        let _reservation = of_queue.reserve(bytes as u64).ok()?;
        Some(TransferBlock { block: self.arena.acquire(bytes)?, _reservation })
    }

    /// As `acquire`, but at most as much as stays free, so that one client cannot take what all others need.
    pub(super) fn acquire_share(&self, of_queue: &Arc<MemoryBudget>, bytes: usize) -> Option<TransferBlock> {
        let left = self.budget.available().checked_sub(bytes as u64)?;
        let is_alone = self.budget.used() == 0;
        if is_alone || of_queue.used() + bytes as u64 <= left { self.acquire(of_queue, bytes) } else { None }
    }
}

/// Of [`DeviceContext::sampled_busy_time`].
struct SampledTime {
    last_call: Instant,
    time: Duration,
}

impl DeviceContext {
    /// Opens a device. `limit` chooses its memory limit from the number of free bytes.
    pub(super) fn new(
        gpu: &Gpu,
        name: &str,
        options: CudaOptions,
        limit: impl FnOnce(u64) -> u64,
    ) -> Result<Arc<DeviceContext>, DeviceError> {
        let (primary, free) = PrimaryContext::open(gpu, name)?;
        let context = Arc::new(DeviceContext {
            gpu: gpu.clone(),
            options,
            modules: Modules::default(),
            programmatic: ProgrammaticLaunch::new(gpu, &options),
            precompiler: Precompiler::default(),
            budget: MemoryBudget::new(limit(free)),
            event_pool: Mutex::default(),
            upload_memory: TransferMemory::new(&primary)?,
            download_memory: TransferMemory::new(&primary)?,
            error_words: PinnedArena::new(&primary, ERROR_WORD_BYTES, ERROR_WORD_BYTES)?,
            memory_source: MemorySource::new(&primary, gpu.ordinal)
                .map_err(|e| primary.driver_error("cuMemPoolCreate", e))?,
            service_stream: Stream::new(&primary)?,
            deferred_drops: DeferredDrops::default(),
            turns: GpuTurns::default(),
            // One thread for commands that may block, one for others.
            queue_threads: QueueThreads::start("cuda-queue", 1)
                .map_err(|e| DeviceError::thread_spawn_failed("for a GPU", &e))?,
            queues: Mutex::default(),
            busy: Mutex::new(SampledTime { last_call: Instant::now(), time: Duration::ZERO }),
            peers: Peers::default(),
            primary,
        });
        super::peer::connect(&context)?;
        Ok(context)
    }

    pub(super) fn bind(&self) -> Result<(), DeviceError> {
        self.primary.bind()
    }

    pub(super) fn primary(&self) -> &Arc<PrimaryContext> {
        &self.primary
    }

    pub(super) fn service_stream(&self) -> &Stream {
        &self.service_stream
    }

    /// Free and total bytes of the GPU's memory at this moment. Memory that the pools of its devices keep is free.
    pub(super) fn memory_info(&self) -> Result<(u64, u64), DeviceError> {
        self.primary.check_lost()?;
        self.bind()?;
        let (free, total) = driver_api::memory_info().map_err(|e| self.driver_error("cuMemGetInfo", e))?;
        let kept: u64 =
            super::peer::devices_of(self.gpu.ordinal).iter().map(|device| device.memory_source.kept()).sum();
        Ok((free + kept, total))
    }

    pub(super) fn driver_error(&self, call: &'static str, e: DriverError) -> DeviceError {
        self.primary.driver_error(call, e)
    }

    /// Acquires an event from the event pool, or creates one.
    pub(super) fn acquire_event(&self) -> Result<Event, DeviceError> {
        match lock(&self.event_pool).pop() {
            Some(event) => Ok(event),
            None => Event::new(&self.primary),
        }
    }

    /// Returns an event to the event pool. The caller no longer queries it; streams that wait for it are not affected.
    pub(super) fn recycle_event(&self, event: Event) {
        lock(&self.event_pool).push(event);
    }

    /// The error word of a queue, 0.
    pub(super) fn acquire_error_word(&self) -> Result<PinnedBlock, DeviceError> {
        let word = self.error_words.acquire(4).ok_or_else(|| DeviceError::Exhausted {
            resource: "pinned memory",
            reason: format!("{} has {ERROR_WORD_BYTES} bytes for the error words of queues", self.primary.name),
        })?;
        word.first_word().store(0, Ordering::Release);
        Ok(word)
    }

    /// Adds a queue to those that `poll_queues` polls.
    pub(super) fn add_queue(&self, timeline: &Arc<Timeline>) {
        let mut queues = lock(&self.queues);
        queues.retain(|queue| queue.strong_count() > 0);
        queues.push(Arc::downgrade(timeline));
    }

    /// Polls all queues of the device, which releases what work that is done no longer uses.
    pub(super) fn poll_queues(self: &Arc<Self>) {
        DeferredDrops::retry(self);
        let queues: Vec<_> = lock(&self.queues).iter().filter_map(Weak::upgrade).collect();
        queues.iter().for_each(|queue| queue.poll());
    }

    /// Estimate of the time in which the GPU has worked, by samples: the time since the last call counts if a queue has work that is
    /// not done.
    pub(super) fn sampled_busy_time(&self) -> Duration {
        let is_busy = self.primary.check_lost().is_ok() && self.any_queue(StreamStatus::is_busy);
        let mut busy = lock(&self.busy);
        let (last, now) = (busy.last_call, Instant::now());
        busy.last_call = now;
        if is_busy {
            busy.time += now.duration_since(last);
        }
        busy.time
    }

    /// Whether the stream of a queue waits for another device.
    pub(super) fn waits_for_other_device(&self) -> bool {
        self.any_queue(EventTimeline::waits_for_other_device)
    }

    /// Whether a condition holds for the events of a queue of the device.
    fn any_queue(&self, condition: fn(&EventTimeline) -> bool) -> bool {
        let queues: Vec<_> = lock(&self.queues).iter().filter_map(Weak::upgrade).collect();
        queues
            .iter()
            .any(|queue| TimelinePoint::new(queue, 1).completion_source::<EventTimeline>().is_some_and(condition))
    }

    /// Submits `work` to the device's service stream and blocks until it is done. Other threads submit to the stream meanwhile.
    pub(super) fn run_blocking(
        self: &Arc<Self>,
        work: impl FnOnce(&Stream) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        self.primary.check_lost()?;
        self.bind()?;
        let end = self.acquire_event()?;
        let done = work(&self.service_stream).and_then(|()| self.wait_for_service(&end));
        if done.is_err() {
            // The caller releases what the work accesses.
            self.service_stream.wait_out(|| self.poll_queues());
            self.bind()?;
        }
        self.recycle_event(end);
        done
    }

    /// Blocks until the service stream's work so far is done; `end` is recorded after it.
    fn wait_for_service(self: &Arc<Self>, end: &Event) -> Result<(), DeviceError> {
        end.record(&self.service_stream)?;
        // The work is short, but it may run after that of queues, which count as hung first.
        let (timeout, mut began) = (self.options.device_timeout, Instant::now());
        while !end.is_reached()? {
            if began.elapsed() > timeout {
                self.poll_queues();
                if self.waits_for_other_device() {
                    began = Instant::now();
                }
                self.bind()?;
                self.primary.check_lost()?;
                if began.elapsed() > SERVICE_TIMEOUTS * timeout {
                    return Err(self.primary.mark_hung(SERVICE_TIMEOUTS * timeout));
                }
            }
            std::thread::sleep(super::events::POLL_INTERVAL);
        }
        Ok(())
    }
}
