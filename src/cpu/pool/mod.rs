//! The thread pool: hot workers that run one graph together, node by node.
//!
//! A run takes the pool in turn (first come, first served, graph by graph) and is led by the thread that asks for it.
//! The pool's workers join while it is under way ([`team`]); they watch for the next run for a short while, then sleep.
//! Inside a run, nodes are separated by one barrier; nodes too small to share run one after another on the leader
//! without any. A run that is small as a whole takes no turn and no workers: it has nothing to gain from company.
//!
//! A pool never changes. A device that is to have another number of workers gets another pool: runs under way keep the one
//! that they began with, and the last of them ends its threads.
#![allow(unsafe_code)] // one of the modules that lib.rs and tests/layout list

mod team;

pub(crate) use team::{Member, Team, Work};

use super::memory::Locals;
use crossbeam::utils::CachePadded;
use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long an idle worker watches for the next run before it sleeps: longer than the gap between two graphs of one
/// token, far shorter than anyone would notice on a power meter.
const STAY_HOT: Duration = Duration::from_micros(200);

/// How long a run waits for workers at its start, about as long as they take to wake: its first node may be most of it.
const GATHER: Duration = Duration::from_micros(100);

/// Spins at a barrier before the processor is offered to others: they may be what the missing worker waits for.
const SPINS: usize = 2000;

type Job<'a> = &'a (dyn Fn(bool) + Sync);

/// A fixed number of workers.
pub(crate) struct Pool {
    inner: Arc<Inner>,
    threads: Vec<JoinHandle<()>>,
    turn: Turn,
    workers: usize,
}

/// What a run may cost those who run it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Ask {
    /// It is over soon: run it alone, whoever has the pool. Company would gain little, and workers that watch for the next
    /// one take processors from those who decide when it comes.
    Small,
    /// Wait for a turn.
    Wait,
    /// Run it only if nobody else has the pool.
    Try,
}

struct Inner {
    /// The current run's job; valid while `epoch` is odd or `inside` is not 0.
    job: UnsafeCell<Option<Job<'static>>>,
    /// Odd while a run is open to workers; each run has its own odd number.
    epoch: CachePadded<AtomicUsize>,
    /// Workers in a run, or about to see whether it is still open.
    inside: CachePadded<AtomicUsize>,
    stop: AtomicBool,
    sleepers: Mutex<usize>,
    wake: Condvar,
}

// SAFETY: `job` is written by the one thread whose turn it is, after its predecessor has closed its run and seen
// `inside` at 0. A worker reads it only after it has raised `inside` and then found the run open: all these are
// sequentially consistent, so whoever closes a run sees every worker that has found it open, and waits for it.
unsafe impl Sync for Inner {}
// SAFETY: the reference inside `job` points to a `Sync` closure.
unsafe impl Send for Inner {}

impl Pool {
    /// A pool of `workers` workers, this thread's caller of [`Pool::run`] counted.
    pub(crate) fn new(workers: usize) -> std::io::Result<Pool> {
        let inner = Arc::new(Inner {
            job: UnsafeCell::new(None),
            epoch: CachePadded::default(),
            inside: CachePadded::default(),
            stop: AtomicBool::new(false),
            sleepers: Mutex::new(0),
            wake: Condvar::new(),
        });
        let mut pool = Pool { inner, threads: Vec::new(), turn: Turn::default(), workers: workers.max(1) };
        for worker in 1..pool.workers {
            let inner = Arc::clone(&pool.inner);
            let thread = std::thread::Builder::new().name(format!("cpu-{worker}"));
            pool.threads.push(thread.spawn(move || inner.work())?);
        }
        Ok(pool)
    }

    /// The most workers that a run can have.
    pub(crate) fn workers(&self) -> usize {
        self.workers
    }

    /// Runs `job(true)` on this thread and `job(false)` on each worker that comes before it returns; returns when all
    /// have returned. False when it was not run: see [`Ask`]. A job must not panic (the executor catches kernels'
    /// panics inside).
    pub(crate) fn run(&self, ask: Ask, job: Job<'_>) -> bool {
        let turn = match ask {
            Ask::Small => None,
            Ask::Wait => Some(self.turn.take()),
            Ask::Try => self.turn.try_take(),
        };
        if turn.is_none() && ask == Ask::Try {
            return false;
        }
        let open = (self.workers > 1 && turn.is_some()).then(|| {
            // SAFETY: only the lifetime changes. Workers use the job only between raising and lowering `inside` in a
            // run that they have found open, and `Open` closes it and waits for them, when unwinding too.
            let job = unsafe { std::mem::transmute::<Job<'_>, Job<'static>>(job) };
            // SAFETY: the turn is ours and no run is open: nobody reads the cell.
            unsafe { *self.inner.job.get() = Some(job) };
            self.inner.open()
        });
        job(true);
        drop(open);
        true
    }
}

/// A run that workers may enter; dropping it waits for those who have.
struct Open<'a>(&'a Inner);

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.epoch.fetch_add(1, Ordering::SeqCst);
        spin_until(|| self.0.inside.load(Ordering::SeqCst) == 0);
    }
}

impl Inner {
    fn open(&self) -> Open<'_> {
        self.epoch.fetch_add(1, Ordering::SeqCst);
        if *lock(&self.sleepers) > 0 {
            self.wake.notify_all();
        }
        Open(self)
    }

    fn work(&self) {
        let mut seen = 0;
        while let Some(epoch) = self.next_run(seen) {
            self.inside.fetch_add(1, Ordering::SeqCst);
            if self.epoch.load(Ordering::SeqCst) == epoch {
                seen = epoch;
                // SAFETY: the run was open after `inside` was raised: the job stays until it is lowered.
                if let Some(job) = unsafe { *self.job.get() } {
                    job(false);
                }
            }
            self.inside.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Waits for an open run other than `seen`: first hot, then asleep. `None` when the pool ends.
    fn next_run(&self, seen: usize) -> Option<usize> {
        let ready = || {
            let epoch = self.epoch.load(Ordering::SeqCst);
            (epoch % 2 == 1 && epoch != seen).then_some(epoch)
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

/// Locks a value that is whole at every moment, so that a panic elsewhere cannot have left it torn.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
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

/// A fair lock: sessions get the pool in the order in which they asked. It is handed to the next in line, who alone is
/// woken.
#[derive(Default)]
struct Turn(Mutex<Line>);

#[derive(Default)]
struct Line {
    taken: bool,
    /// Tickets of those who wait, and of the one whose turn it is.
    waiting: VecDeque<(u64, Thread)>,
    next: u64,
    serving: u64,
}

impl Turn {
    fn try_take(&self) -> Option<TurnGuard<'_>> {
        let mut line = lock(&self.0);
        let free = !std::mem::replace(&mut line.taken, true);
        free.then(|| TurnGuard(self))
    }

    fn take(&self) -> TurnGuard<'_> {
        let mut line = lock(&self.0);
        if std::mem::replace(&mut line.taken, true) {
            line.next += 1;
            let ticket = line.next;
            line.waiting.push_back((ticket, std::thread::current()));
            while line.serving != ticket {
                drop(line);
                std::thread::park();
                line = lock(&self.0);
            }
        }
        TurnGuard(self)
    }
}

struct TurnGuard<'a>(&'a Turn);

impl Drop for TurnGuard<'_> {
    fn drop(&mut self) {
        let mut line = lock(&self.0.0);
        let next = line.waiting.pop_front();
        match next {
            Some((ticket, thread)) => {
                line.serving = ticket;
                drop(line);
                thread.unpark();
            }
            None => line.taken = false,
        }
    }
}

/// Runs `job(member, step, scratch)` as the leader, from `first` on, and as each worker that joins, from the step at
/// which it came in. False when it was not run: see [`Ask`].
pub(crate) fn run_team<'a>(
    pool: &Pool,
    ask: Ask,
    team: &'a Team<'a>,
    locals: &Locals<'a>,
    first: usize,
    job: &(dyn Fn(&Member<'a>, usize, &'a mut [f32]) + Sync),
) -> bool {
    pool.run(ask, &|leads| {
        if leads && ask != Ask::Small {
            team.gather(pool.workers() - 1, GATHER);
        }
        let joined = if leads { Some((team.lead(), first)) } else { team.join() };
        if let Some((member, step)) = joined {
            // SAFETY: no two members of a run have the same rank, and each is one call of this closure, which ends
            // before the run does.
            let local = unsafe { locals.of(member.rank()) };
            job(&member, step, local);
        }
        if leads {
            team.close();
        }
    })
}
