//! Thread pool: workers that run one graph together, node by node.
//!
//! A run locks the pool; the thread that submits it leads it. The runs of a device's queues do not wait for the lock: they take
//! turns (`device::Turn`); one at a time may use the pool. The pool's workers join a run under way ([`team`]). Idle workers spin for the next run for a short while, then park (spin-then-park). Inside a run,
//! one barrier separates two nodes; nodes too small to share run one after another on the leader without a barrier. A run that
//! is small as a whole takes neither the lock nor workers, because sharing would not make it faster.
//!
//! A pool never changes. To change its number of threads, a device gets a new pool: runs under way keep the old pool, and the
//! last of them ends its threads.
//!
//! Not here: which nodes are shared or run serially, which `program.rs` decides. Start with [`Pool::run_team`], then `team.rs`.
#![allow(unsafe_code)] // one of the modules that lib.rs and tests/layout list

mod team;

pub(crate) use team::{KernelContext, Member, StepProgress, Team};

use super::memory::LocalScratch;
use crate::poison::{Unpoisoned, lock};
use crossbeam::utils::CachePadded;
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle worker spins for the next run before it parks: longer than the gap between two graphs of one token, too
/// short to show in the machine's power draw.
const SPIN_BEFORE_PARK: Duration = Duration::from_micros(200);

/// How long a run waits for workers at its start: about the time that a parked worker needs to wake. The first node may be
/// most of the run.
const GATHER_TIMEOUT: Duration = Duration::from_micros(100);

/// Spins at a barrier before the thread yields its processor: the missing worker may need that processor.
const SPINS_BEFORE_YIELD: usize = 2000;

/// The work of a run. It is called with true on the leader and with false on each worker.
type Job<'a> = &'a (dyn Fn(bool) + Sync);

/// A fixed number of workers.
pub(crate) struct Pool {
    shared: Arc<PoolShared>,
    threads: Vec<JoinHandle<()>>,
    run_lock: Mutex<()>,
    workers: usize,
}

/// State shared by the pool's threads.
struct PoolShared {
    /// The current run's job; valid while `epoch` is odd or `workers_inside` is not 0.
    job: UnsafeCell<Option<Job<'static>>>,
    /// Odd while a run is open to workers; each run has its own odd number.
    epoch: CachePadded<AtomicUsize>,
    /// Workers inside a run, or about to check whether it is still open.
    workers_inside: CachePadded<AtomicUsize>,
    /// Whether the pool is being dropped.
    stop: AtomicBool,
    /// Number of parked workers.
    parked: Mutex<usize>,
    /// Notified when a run opens and when the pool ends.
    wake: Condvar,
}

// SAFETY: only the thread that holds the lock writes `job`, after the previous run was closed and `workers_inside` was 0. A
// worker reads `job` only after it has incremented `workers_inside` and then found the run open. All these accesses are
// sequentially consistent, so the thread that closes a run sees every worker that found it open, and waits for those workers.
unsafe impl Sync for PoolShared {}
// SAFETY: the reference inside `job` points to a `Sync` closure.
unsafe impl Send for PoolShared {}

impl Pool {
    /// A pool of `workers` workers, including the thread that leads a run.
    pub(crate) fn new(workers: usize) -> std::io::Result<Pool> {
        let shared = Arc::new(PoolShared {
            job: UnsafeCell::new(None),
            epoch: CachePadded::default(),
            workers_inside: CachePadded::default(),
            stop: AtomicBool::new(false),
            parked: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut pool = Pool { shared, threads: Vec::new(), run_lock: Mutex::default(), workers: workers.max(1) };
        for worker in 1..pool.workers {
            let shared = Arc::clone(&pool.shared);
            let thread = std::thread::Builder::new().name(format!("cpu-{worker}"));
            pool.threads.push(thread.spawn(move || shared.worker_loop())?);
        }
        Ok(pool)
    }

    /// The most workers that a run can have.
    pub(crate) fn workers(&self) -> usize {
        self.workers
    }

    /// Runs `job(true)` on this thread, and `job(false)` on each worker that joins before it returns; returns when all have
    /// returned. A job must not panic.
    pub(crate) fn run(&self, job: Job<'_>) {
        let _open = self.open(job);
        job(true);
    }

    /// Runs `job(member, step, scratch)` on the leader from step `first` on, and on each worker that joins, from the step at
    /// which it joined. Without `with_workers` none joins, and the pool is not locked: for short runs, in which workers would
    /// gain little, and would take processors from the threads that submit the next runs. A job must not panic (the program
    /// catches the panics of kernels).
    pub(crate) fn run_team<'a>(
        &self,
        with_workers: bool,
        team: &'a Team<'a>,
        locals: &LocalScratch<'a>,
        first: usize,
        job: &(dyn Fn(&Member<'a>, usize, &'a mut [f32]) + Sync),
    ) {
        let run_member = |is_leader: bool| {
            if is_leader && with_workers {
                team.gather(self.workers - 1, GATHER_TIMEOUT);
            }
            let joined = if is_leader { Some((team.leader(), first)) } else { team.join() };
            if let Some((member, step)) = joined {
                // SAFETY: no two members of a run have the same rank, and each member is one call of this closure, which ends
                // before the run does.
                let local = unsafe { locals.for_worker(member.rank()) };
                job(&member, step, local);
            }
            if is_leader {
                team.close();
            }
        };
        let _open = with_workers.then(|| self.open(&run_member));
        run_member(true);
    }

    /// Opens a run of `job` to the workers, and locks the pool until the run is dropped.
    fn open<'a>(&'a self, job: Job<'a>) -> OpenRun<'a> {
        let run_lock = lock(&self.run_lock);
        // SAFETY: only the lifetime changes. Workers use the job only between incrementing and decrementing
        // `workers_inside`, in a run that they found open. Dropping `OpenRun`, also while unwinding, closes the run and waits for
        // them. This function is private, and its callers do not leak what it returns.
        let job = unsafe { std::mem::transmute::<Job<'a>, Job<'static>>(job) };
        // SAFETY: this thread holds the lock and no run is open, so no other thread reads the cell.
        unsafe { *self.shared.job.get() = Some(job) };
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        if *lock(&self.shared.parked) > 0 {
            self.shared.wake.notify_all();
        }
        OpenRun { shared: &self.shared, _run_lock: run_lock }
    }
}

/// A run that workers may enter. Dropping it closes the run, waits for the workers inside, and unlocks the pool.
struct OpenRun<'a> {
    shared: &'a PoolShared,
    _run_lock: MutexGuard<'a, ()>,
}

impl Drop for OpenRun<'_> {
    fn drop(&mut self) {
        self.shared.epoch.fetch_add(1, Ordering::SeqCst);
        spin_until(|| self.shared.workers_inside.load(Ordering::SeqCst) == 0);
    }
}

impl PoolShared {
    fn worker_loop(&self) {
        let mut seen = 0;
        while let Some(epoch) = self.wait_for_run(seen) {
            self.workers_inside.fetch_add(1, Ordering::SeqCst);
            if self.epoch.load(Ordering::SeqCst) == epoch {
                seen = epoch;
                // SAFETY: the run was open after `workers_inside` was incremented: the job stays valid until the decrement.
                if let Some(job) = unsafe { *self.job.get() } {
                    job(false);
                }
            }
            self.workers_inside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Waits for an open run other than `seen`: spins first, then parks. `None` when the pool ends.
    fn wait_for_run(&self, seen: usize) -> Option<usize> {
        let ready = || {
            let epoch = self.epoch.load(Ordering::SeqCst);
            (epoch % 2 == 1 && epoch != seen).then_some(epoch)
        };
        let until = Instant::now() + SPIN_BEFORE_PARK;
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
        let mut parked = lock(&self.parked);
        *parked += 1;
        loop {
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
            if let Some(epoch) = ready() {
                *parked -= 1;
                return Some(epoch);
            }
            parked = self.wake.wait(parked).unpoisoned();
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        drop(lock(&self.shared.parked));
        self.shared.wake.notify_all();
        for thread in self.threads.drain(..) {
            // The panic of a worker was reported when it happened.
            let _ = thread.join();
        }
    }
}

/// Waits in a loop, which yields the processor after a while.
pub(super) fn spin_until(ready: impl Fn() -> bool) {
    let mut spins = 0;
    while !ready() {
        spins += 1;
        if spins < SPINS_BEFORE_YIELD {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}
