//! Tests of turns.

use super::*;
use std::sync::mpsc::channel;

impl Turn {
    /// Ends the turn as if it had taken a slice.
    fn end_after_a_slice(self) {
        // Not by `drop`, which would add the time that this thread was not running.
        let turn = std::mem::ManuallyDrop::new(self);
        turn.lanes.end_turn(turn.lane, &turn.session, SLICE);
    }
}

fn waiting(threads: &QueueThreads) -> usize {
    lock(&threads.lanes().state).lane(Lane::Short).waiting.len()
}

/// Each other tenant has one slice between two turns of a tenant, however many sessions and threads it has.
#[test]
fn waiting_threads_of_tenants_alternate() {
    let threads = QueueThreads::start("test", 1).unwrap();
    let tenants = [(); 3].map(|()| MemoryBudget::for_client(0));
    let first = threads.try_begin(Lane::Short, &tenants[0]).unwrap();
    let (to, turns) = channel();
    std::thread::scope(|scope| {
        let mut waiters = 0;
        // The first tenant waits with 15 sessions, the others with one session each, of three threads.
        let sessions = |tenant: usize| if tenant == 0 { (15, 1) } else { (1, 3) };
        for tenant in 0..tenants.len() {
            let (count, of_each) = sessions(tenant);
            for session in 0..count {
                let session =
                    if session == 0 { Arc::clone(&tenants[tenant]) } else { MemoryBudget::within(&tenants[tenant], 0) };
                for _ in 0..of_each {
                    let (threads, session, to) = (&threads, Arc::clone(&session), to.clone());
                    scope.spawn(move || {
                        let turn = threads.begin(Lane::Short, &session);
                        to.send(tenant).unwrap();
                        turn.end_after_a_slice();
                    });
                    waiters += 1;
                }
            }
        }
        while waiting(&threads) < waiters {
            std::thread::yield_now();
        }
        assert!(threads.try_begin(Lane::Short, &tenants[1]).is_none());
        first.end_after_a_slice();
    });
    let turns: Vec<usize> = turns.try_iter().collect();
    for tenant in [1, 2] {
        let at: Vec<_> = (0..turns.len()).filter(|&turn| turns[turn] == tenant).collect();
        assert!(at[0] < 3 && at.windows(2).all(|pair| pair[1] - pair[0] <= 3), "{tenant}: {turns:?}");
    }
}

/// A command is interrupted for another session, of its own tenant or not, and not for another queue of its own session.
#[test]
fn commands_are_interrupted_for_other_sessions_only() {
    let threads = QueueThreads::start("test", 0).unwrap();
    let tenant = MemoryBudget::for_client(0);
    let sessions = [MemoryBudget::within(&tenant, 0), MemoryBudget::within(&tenant, 0), MemoryBudget::for_client(0)];
    let mut turn = threads.try_begin(Lane::Long, &sessions[0]).unwrap();
    turn.slice = Duration::ZERO;
    assert_eq!((turn.is_over(), turn.interrupts_command()), (false, false), "nobody waits");
    for (waiter, interrupts) in [(0, false), (0, false), (1, true), (2, true)] {
        let waiting = WaitingThread {
            session: Arc::clone(&sessions[waiter]),
            thread: std::thread::current(),
            turn: Mutex::new(None),
        };
        threads.lanes().push(Lane::Long, sessions[waiter].flow_keys(), Waiter::Thread(Arc::new(waiting)));
        assert_eq!((turn.is_over(), turn.interrupts_command()), (true, interrupts), "session {waiter} waits");
    }
    // Dropped, the turn would pass to the first waiter, which is this thread and takes none.
    std::mem::forget(turn);
}

/// A session that had the device to itself for long does not pay for that when others come.
#[test]
fn time_that_nobody_waited_for_is_not_charged() {
    let threads = QueueThreads::start("test", 1).unwrap();
    let tenants = [(); 2].map(|()| MemoryBudget::for_client(0));
    let mut turn = threads.try_begin(Lane::Short, &tenants[0]).unwrap();
    turn.began -= 1000 * SLICE;
    assert!(!turn.is_over(), "nobody waits");
    std::thread::scope(|scope| {
        scope.spawn(|| threads.begin(Lane::Short, &tenants[1]));
        while waiting(&threads) == 0 {
            std::thread::yield_now();
        }
        assert!(turn.is_over());
        {
            let mut state = lock(&threads.lanes().state);
            let since = state.lane(Lane::Short).contended_since.unwrap();
            for (contended, time, charged) in [(0, 1000, 1), (3, 1000, 4), (3, 2, 2)] {
                let got = state.lane(Lane::Short).charged_time(time * SLICE, since + contended * SLICE);
                assert_eq!(got, charged * SLICE, "{time} slices, {contended} of them contended");
            }
        }
        drop(turn);
    });
    assert!(lock(&threads.lanes().state).lane(Lane::Short).contended_since.is_none());
    assert!(tenants[0].device_time() >= 1000 * SLICE);
}
