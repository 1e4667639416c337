//! The library's module `sync` with the types of a scheduler (shuttle), and with the time that it lacks.
//!
//! The scheduler knows no time: its waits have no deadline. Here, a wait with a deadline registers a timer with a *virtual clock*.
//! A harness that lets deadlines pass runs the clock as a further thread ([`orders::with_clock`]), which sets the time to the earliest
//! deadline and wakes its waiter whenever it is scheduled. So each such wait ends by a notification in some orders and by its
//! deadline in others, also in those where both happen at once. Without that thread, deadlines never pass: a lost notification is
//! a deadlock, or where a harness polls, more steps than the scheduler permits.
//!
//! The threads of an execution are coroutines of one thread of the system. So state of the clock may be in thread-local memory, and
//! locks of std that are held over no call of the scheduler never block.

use shuttle::rand::{Rng, thread_rng};
use std::cell::RefCell;
use std::sync::LockResult;
use std::time::Duration;

#[rustfmt::skip] // formatted where the file is
#[path = "../../../src/poison.rs"]
#[allow(dead_code, reason = "its `lock` is for the locks of std")]
mod poison;

pub(crate) use poison::Unpoisoned;
pub(crate) use shuttle::sync::{Mutex, MutexGuard, RwLock, RwLockReadGuard, atomic};
pub(crate) use std::sync::atomic as static_atomic;
pub(crate) use std::sync::{Arc, LazyLock, OnceLock, Weak};
pub(crate) use std::time::Instant;

/// Threads. `park` may return without an `unpark`, so a lost one shows only while all other threads are blocked.
pub(crate) mod thread {
    pub(crate) use shuttle::thread::{Builder, Thread, current, park};
    use std::time::Duration;

    /// Time that passes while a thread yields, so that polling for a limited time ends.
    const YIELD: Duration = Duration::from_micros(10);

    pub(crate) fn yield_now() {
        sleep(YIELD);
    }

    /// Lets the time pass at once: the others may run before and after.
    pub(crate) fn sleep(time: Duration) {
        super::pass(time);
        shuttle::thread::yield_now();
    }
}

/// Locks a mutex.
pub(crate) fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unpoisoned()
}

/// The virtual time.
pub(crate) fn now() -> Instant {
    CLOCK.with_borrow(|clock| clock.began + clock.passed)
}

/// A thread that polls lets others run, and some time pass.
pub(crate) fn spin_loop() {
    thread::sleep(Duration::from_micros(1));
}

/// One of so many executions has spurious wake-ups, and one of so many waits in it is ended by one.
const SPURIOUS_EXECUTIONS: u32 = 8;
const SPURIOUS_WAITS: u32 = 4;

fn pass(time: Duration) {
    CLOCK.with_borrow_mut(|clock| clock.passed += time);
}

thread_local! {
    static CLOCK: RefCell<Clock> = RefCell::new(Clock::default());
}

struct Clock {
    began: Instant,
    passed: Duration,
    /// Waits with a deadline.
    timers: Vec<(Instant, Arc<Waiter>)>,
    /// Whether waits may end spuriously in this execution.
    has_spurious_wakeups: bool,
}

impl Default for Clock {
    fn default() -> Clock {
        Clock { began: Instant::now(), passed: Duration::ZERO, timers: Vec::new(), has_spurious_wakeups: false }
    }
}

/// A thread that waits.
#[derive(Debug, Default)]
struct Waiter {
    /// Only this thread waits on it.
    condvar: shuttle::sync::Condvar,
    /// Whether a notification or the deadline has ended the wait.
    has_ended: static_atomic::AtomicBool,
}

impl Waiter {
    /// Ends the wait. False: it has ended already.
    fn wake(&self) -> bool {
        let has_ended = self.has_ended.swap(true, static_atomic::Ordering::Relaxed);
        if !has_ended {
            self.condvar.notify_one();
        }
        !has_ended
    }
}

/// A condition variable. Its waits end spuriously in a few executions only, since a spurious wake-up hides a lost one.
#[derive(Debug, Default)]
pub(crate) struct Condvar {
    waiters: std::sync::Mutex<Vec<Arc<Waiter>>>,
}

impl Condvar {
    /// Without waiters.
    pub(crate) fn new() -> Condvar {
        Condvar::default()
    }

    /// Waits for a notification.
    pub(crate) fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        Ok(self.block(guard, None))
    }

    /// Waits for a notification, or until the time has passed. Why the wait has ended is not told: the core does not ask.
    pub(crate) fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        time: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, ())> {
        Ok((self.block(guard, Some(now() + time)), ()))
    }

    /// As [`Condvar::wait_timeout`], until `condition` is false.
    pub(crate) fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        time: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, ())> {
        let until = now() + time;
        while condition(&mut guard) && now() < until {
            guard = self.block(guard, Some(until));
        }
        Ok((guard, ()))
    }

    fn block<'a, T>(&self, guard: MutexGuard<'a, T>, until: Option<Instant>) -> MutexGuard<'a, T> {
        let waiter = Arc::new(Waiter::default());
        self.waiters.lock().unpoisoned().push(Arc::clone(&waiter));
        if let Some(until) = until {
            CLOCK.with_borrow_mut(|clock| clock.timers.push((until, Arc::clone(&waiter))));
        }
        if CLOCK.with_borrow(|clock| clock.has_spurious_wakeups) && thread_rng().gen_ratio(1, SPURIOUS_WAITS) {
            let waiter = Arc::clone(&waiter);
            shuttle::thread::spawn(move || waiter.wake());
        }
        // The wait may have ended while the thread above was started.
        let has_ended = waiter.has_ended.load(static_atomic::Ordering::Relaxed);
        let guard = if has_ended { guard } else { waiter.condvar.wait(guard).unpoisoned() };
        let is_other = |other: &Arc<Waiter>| !Arc::ptr_eq(other, &waiter);
        self.waiters.lock().unpoisoned().retain(is_other);
        CLOCK.with_borrow_mut(|clock| clock.timers.retain(|(_, other)| is_other(other)));
        guard
    }

    /// Wakes one of the waiters, any of them.
    pub(crate) fn notify_one(&self) {
        loop {
            let mut waiters = self.waiters.lock().unpoisoned();
            if waiters.is_empty() {
                return;
            }
            let chosen = thread_rng().gen_range(0..waiters.len());
            let waiter = waiters.swap_remove(chosen);
            drop(waiters);
            if waiter.wake() {
                return;
            }
        }
    }

    /// Wakes all waiters.
    pub(crate) fn notify_all(&self) {
        let waiters = std::mem::take(&mut *self.waiters.lock().unpoisoned());
        waiters.iter().for_each(|waiter| _ = waiter.wake());
    }
}

/// What harnesses use.
pub(crate) mod orders {
    use super::{CLOCK, Clock, Rng, SPURIOUS_EXECUTIONS, thread_rng};
    use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler, Scheduler};
    use shuttle::{Config, MaxSteps, Runner};
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    pub(crate) use shuttle::thread::{spawn, yield_now};

    /// Changes of priorities in a schedule of PCT: races that need so many preemptions are found with a known probability.
    const PCT_DEPTH: usize = 3;

    /// Steps after which a thread counts as one that polls for ever. The longest harness takes a tenth of them.
    const MAX_STEPS: usize = 200_000;

    /// Runs `harness` in as many orders, half of them random and half of them by PCT. A failure prints its schedule.
    pub(crate) fn check(harness: fn(), orders: usize, seed: u64) {
        let half = orders.div_ceil(2);
        run(RandomScheduler::new_from_seed(seed, half), harness);
        run(PctScheduler::new_from_seed(seed, PCT_DEPTH, half), harness);
    }

    /// Runs `harness` in the order that a failure has printed.
    pub(crate) fn replay(harness: fn(), schedule: &str) {
        run(ReplayScheduler::new_from_encoded(schedule.trim()), harness);
    }

    fn run(scheduler: impl Scheduler + 'static, harness: fn()) {
        let mut config = Config::new();
        config.stack_size = 512 << 10;
        config.silence_warnings = true;
        config.max_steps = MaxSteps::FailAfter(MAX_STEPS);
        Runner::new(scheduler, config).run(move || {
            let has_spurious_wakeups = thread_rng().gen_ratio(1, SPURIOUS_EXECUTIONS);
            CLOCK.set(Clock { has_spurious_wakeups, ..Clock::default() });
            harness();
        });
    }

    /// Runs `body` while deadlines may pass.
    pub(crate) fn with_clock<T>(body: impl FnOnce() -> T) -> T {
        let ended = Arc::new(AtomicBool::new(false));
        let clock = {
            let ended = Arc::clone(&ended);
            spawn(move || {
                while !ended.load(Ordering::Relaxed) {
                    fire_earliest();
                    yield_now();
                }
            })
        };
        let result = body();
        ended.store(true, Ordering::Relaxed);
        clock.join().expect("the clock does not panic");
        result
    }

    /// Sets the time to the earliest deadline, which passes.
    pub(crate) fn fire_earliest() {
        let waiter = CLOCK.with_borrow_mut(|clock| {
            let (first, &(at, _)) = clock.timers.iter().enumerate().min_by_key(|(_, (at, _))| *at)?;
            clock.passed = clock.passed.max(at.saturating_duration_since(clock.began));
            Some(clock.timers.swap_remove(first).1)
        });
        if let Some(waiter) = waiter {
            waiter.wake();
        }
    }
}
