//! The thread pool: hot workers that run one graph together, node by node.
//!
//! A run takes the pool in turn (first come, first served, graph by graph). Worker 0 is the queue's own thread; the
//! others spin for a short while after a run, then sleep. Inside a run, nodes are separated by one barrier; nodes too
//! small to share run one after another on worker 0 without any.
#![allow(unsafe_code)] // one of the modules that DESIGN names

use super::memory::{Locals, Shared, View};
use crate::device::DeviceError;
use crossbeam::utils::CachePadded;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker watches for the next run before it sleeps: longer than the gap between two graphs of one
/// token, far shorter than anyone would notice on a power meter.
const STAY_HOT: Duration = Duration::from_micros(200);

/// Spins at a barrier before the processor is offered to others: they may be what the missing worker waits for.
const SPINS: usize = 2000;

type Job<'a> = &'a (dyn Fn(usize) + Sync);

/// A fixed number of workers.
pub(crate) struct Pool {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
    turn: Turn,
    workers: usize,
}

struct Inner {
    /// The current run's job; valid while `pending` is not 0.
    job: UnsafeCell<Option<Job<'static>>>,
    epoch: CachePadded<AtomicUsize>,
    pending: CachePadded<AtomicUsize>,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

// SAFETY: `job` is written by the one thread whose turn it is while `pending` is 0 (no worker reads it), and read by
// workers only after they have seen the epoch that was published after the write.
unsafe impl Sync for Inner {}
// SAFETY: the reference inside `job` points to a `Sync` closure.
unsafe impl Send for Inner {}

impl Pool {
    /// A pool of `workers` workers, this thread's caller of [`Pool::run`] counted.
    pub(crate) fn new(workers: usize) -> std::io::Result<Pool> {
        let inner = Arc::new(Inner {
            job: UnsafeCell::new(None),
            epoch: CachePadded::default(),
            pending: CachePadded::default(),
            stop: AtomicBool::new(false),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut pool = Pool { inner, threads: Vec::new(), turn: Turn::default(), workers: workers.max(1) };
        for worker in 1..pool.workers {
            let inner = Arc::clone(&pool.inner);
            let thread = std::thread::Builder::new().name(format!("cpu-{worker}"));
            pool.threads.push(thread.spawn(move || inner.work(worker))?);
        }
        Ok(pool)
    }

    /// Workers that a run has.
    pub(crate) fn workers(&self) -> usize {
        self.workers
    }

    /// Runs `job(worker)` on every worker, 0 being this thread, and returns when all have returned. A job must not
    /// panic (the executor catches kernels' panics inside).
    pub(crate) fn run(&self, job: Job<'_>) {
        let _turn = self.turn.take();
        let inner = &*self.inner;
        if self.workers > 1 {
            // SAFETY: only the lifetime changes. Workers use the job between the epoch below and their decrement of
            // `pending`, and this function does not return before `pending` is 0 (`Done` waits even when unwinding).
            let job = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
            // SAFETY: `pending` is 0 and the turn is ours: nobody else touches the cell.
            unsafe { *inner.job.get() = Some(job) };
            inner.pending.store(self.workers - 1, Ordering::Relaxed);
            inner.epoch.fetch_add(1, Ordering::SeqCst);
            if *lock(&inner.sleepers) > 0 {
                inner.wake.notify_all();
            }
        }
        let _done = Done(inner);
        job(0);
    }
}

/// Waits for the other workers, also when worker 0 unwinds.
struct Done<'a>(&'a Inner);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        spin_until(|| self.0.pending.load(Ordering::Acquire) == 0);
    }
}

impl Inner {
    fn work(&self, worker: usize) {
        let mut seen = 0;
        loop {
            let Some(epoch) = self.next_epoch(seen) else { return };
            seen = epoch;
            // SAFETY: the epoch was published after the job was written, and the job stays until we decrement.
            if let Some(job) = unsafe { *self.job.get() } {
                job(worker);
            }
            self.pending.fetch_sub(1, Ordering::Release);
        }
    }

    /// Waits for a run after `seen`: first hot, then asleep. `None` when the pool ends.
    fn next_epoch(&self, seen: usize) -> Option<usize> {
        let ready = || {
            let epoch = self.epoch.load(Ordering::SeqCst);
            (epoch != seen).then_some(epoch)
        };
        let until = Instant::now() + STAY_HOT;
        while Instant::now() < until {
            for _ in 0..64 {
                if self.stop.load(Ordering::Relaxed) {
                    return None;
                }
                if let Some(epoch) = ready() {
                    return Some(epoch);
                }
                std::hint::spin_loop();
            }
        }
        let mut sleepers = lock(&self.sleepers);
        *sleepers += 1;
        loop {
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(epoch) = ready() {
                *sleepers -= 1;
                return Some(epoch);
            }
            sleepers = self.wake.wait(sleepers).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::SeqCst);
        drop(lock(&self.inner.sleepers));
        self.inner.wake.notify_all();
        for thread in self.threads.drain(..) {
            // A worker that panicked has nothing more to say.
            let _ = thread.join();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Guarded values are counters, whole at every moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn spin_until(ready: impl Fn() -> bool) {
    let mut spins = 0;
    while !ready() {
        spins += 1;
        if spins < SPINS {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

/// A fair lock: sessions get the pool in the order in which they asked.
#[derive(Default)]
struct Turn {
    state: Mutex<(u64, u64)>, // next ticket, now serving
    changed: Condvar,
}

impl Turn {
    fn take(&self) -> TurnGuard<'_> {
        let mut state = lock(&self.state);
        let ticket = state.0;
        state.0 += 1;
        while state.1 != ticket {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        TurnGuard(self)
    }
}

struct TurnGuard<'a>(&'a Turn);

impl Drop for TurnGuard<'_> {
    fn drop(&mut self) {
        lock(&self.0.state).1 += 1;
        self.0.changed.notify_all();
    }
}

/// What the workers of one run share.
pub(crate) struct Team<'a> {
    workers: usize,
    arrived: CachePadded<AtomicUsize>,
    generation: CachePadded<AtomicUsize>,
    /// Next unclaimed item of a phase, by phase modulo 4: see [`Work::sync`].
    claims: [CachePadded<AtomicUsize>; 4],
    abort: &'a AtomicBool,
    failed: AtomicBool,
    failure: Mutex<Option<DeviceError>>,
}

impl<'a> Team<'a> {
    pub(crate) fn new(workers: usize, abort: &'a AtomicBool) -> Team<'a> {
        Team {
            workers,
            arrived: CachePadded::default(),
            generation: CachePadded::default(),
            claims: Default::default(),
            abort,
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
        }
    }

    fn stopping(&self) -> bool {
        self.failed.load(Ordering::Relaxed) || self.abort.load(Ordering::Relaxed)
    }

    fn fail(&self, error: DeviceError) {
        lock(&self.failure).get_or_insert(error);
        self.failed.store(true, Ordering::Relaxed);
    }

    /// The run's failure.
    pub(crate) fn failure(&self) -> Option<DeviceError> {
        lock(&self.failure).clone()
    }

    fn barrier(&self) {
        let generation = self.generation.load(Ordering::Relaxed);
        if self.arrived.fetch_add(1, Ordering::AcqRel) + 1 == self.workers {
            self.arrived.store(0, Ordering::Relaxed);
            self.generation.store(generation.wrapping_add(1), Ordering::Release);
        } else {
            spin_until(|| self.generation.load(Ordering::Acquire) != generation);
        }
    }
}

/// A worker's place in a run: which phase it is in.
pub(crate) struct Member<'a> {
    team: &'a Team<'a>,
    worker: usize,
    phase: Cell<usize>,
}

impl<'a> Member<'a> {
    pub(crate) fn new(team: &'a Team<'a>, worker: usize) -> Member<'a> {
        Member { team, worker, phase: Cell::new(0) }
    }

    /// Whether this is worker 0, which runs the nodes that are not shared.
    pub(crate) fn first(&self) -> bool {
        self.worker == 0
    }

    /// Phases entered so far.
    pub(crate) fn phase(&self) -> usize {
        self.phase.get()
    }

    /// Whether the run is to end early: a kernel failed, or the queue was dropped.
    pub(crate) fn stopping(&self) -> bool {
        self.team.stopping()
    }

    /// Ends the run with an error; the first one wins.
    pub(crate) fn fail(&self, error: DeviceError) {
        self.team.fail(error);
    }

    /// Waits for all workers and starts the next phase, with all items unclaimed.
    ///
    /// Claims of phase p are counted in slot p % 4. Whoever is past the barrier into p knows that nobody is in p-2 any
    /// more, so that slot can be cleared for p+2 while others still enter p.
    pub(crate) fn sync(&self) {
        self.team.barrier();
        let phase = self.phase.get() + 1;
        self.phase.set(phase);
        if self.worker == 0 {
            self.team.claims[(phase + 2) % 4].store(0, Ordering::Relaxed);
        }
    }
}

/// A kernel's view of its run: who it is, what it reads and writes, which part of the work is its own.
pub(crate) struct Work<'a> {
    pub(super) member: &'a Member<'a>,
    pub(super) alone: bool,
    pub(super) dst: View<'a>,
    pub(super) srcs: &'a [Option<View<'a>>],
    pub(super) local: &'a mut [f32],
    pub(super) shared: Shared<'a>,
}

impl<'a> Work<'a> {
    /// The destination.
    pub(crate) fn dst(&self) -> View<'a> {
        self.dst
    }

    /// Source `i`, which the shape rule requires.
    ///
    /// # Panics
    /// When there is none: a bug, the rule does not require it.
    pub(crate) fn src(&self, i: usize) -> View<'a> {
        self.srcs[i].expect("a source that the shape rule requires")
    }

    /// Source `i`, where there is one.
    pub(crate) fn optional(&self, i: usize) -> Option<View<'a>> {
        self.srcs.get(i).copied().flatten()
    }

    /// This worker's index, below [`Work::workers`].
    pub(crate) fn worker(&self) -> usize {
        if self.alone { 0 } else { self.member.worker }
    }

    /// Workers that run this node together (1 when it is too small to share).
    pub(crate) fn workers(&self) -> usize {
        if self.alone { 1 } else { self.member.team.workers }
    }

    /// This worker's own scratch: as many floats as the kernel asked for, with old values. Once per call.
    pub(crate) fn take_local(&mut self) -> &'a mut [f32] {
        std::mem::take(&mut self.local)
    }

    /// Scratch that all workers of the node share.
    pub(crate) fn shared(&self) -> Shared<'a> {
        self.shared
    }

    /// Waits for all workers of the node; what they wrote to shared scratch can be read after it. Every worker calls
    /// it equally often.
    pub(crate) fn sync(&self) {
        if !self.alone {
            self.member.sync();
        }
    }

    /// Ranges of `0..total`, each of at most `grain` items and handed to one worker only; together they cover
    /// everything, unless the run is stopping. At most once between two [`Work::sync`]s.
    pub(crate) fn chunks(&self, total: usize, grain: usize) -> Chunks<'a> {
        let phase = self.member.phase.get() % 4;
        let claims = (!self.alone).then(|| &*self.member.team.claims[phase]);
        Chunks { team: self.member.team, claims, next: 0, total, grain: grain.max(1) }
    }

    /// Ends the run because data is not what the op allows (a row index out of range).
    pub(crate) fn fail(&self, error: DeviceError) {
        self.member.team.fail(error);
    }
}

/// Iterator of [`Work::chunks`].
pub(crate) struct Chunks<'a> {
    team: &'a Team<'a>,
    claims: Option<&'a AtomicUsize>,
    next: usize,
    total: usize,
    grain: usize,
}

impl Iterator for Chunks<'_> {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        if self.next >= self.total || self.team.stopping() {
            return None;
        }
        let start = match self.claims {
            Some(claims) => claims.fetch_add(self.grain, Ordering::Relaxed),
            None => self.next,
        };
        self.next = start.saturating_add(self.grain);
        (start < self.total).then(|| start..self.next.min(self.total))
    }
}

/// Runs `job` as each worker of a run, with scratch of its own.
pub(crate) fn run_team<'a>(
    pool: &Pool,
    team: &'a Team<'a>,
    locals: &Locals<'a>,
    job: &(dyn Fn(&Member<'a>, &'a mut [f32]) + Sync),
) {
    pool.run(&|worker| {
        let member = Member::new(team, worker);
        // SAFETY: `Pool::run` calls this once per worker and run, and each call ends before the run does.
        let local = unsafe { locals.of(worker) };
        job(&member, local);
    });
}
