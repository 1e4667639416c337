//! Tests of the budget, with threads that wait for each other.

use super::*;
use crate::size::Bytes;

fn memory(limit: u64) -> Arc<HostMemory> {
    HostMemory::new(Budget::new(limit), 0, Duration::from_secs(600))
}

#[test]
fn sessions_share_what_their_bases_leave() {
    const SHARED: u64 = 600 << 10;
    for sessions in [1, 2, 3, 5] {
        let server = memory(sessions * BASE_BYTES + SHARED);
        let admitted: Vec<_> = (0..sessions).map(|_| server.admit().unwrap()).collect();
        assert_eq!(server.status().used, sessions * BASE_BYTES);
        let mut charges: Vec<_> = admitted.iter().map(|session| session.reserve(PREPAID_BYTES).unwrap()).collect();
        assert_eq!(server.status().used, sessions * BASE_BYTES, "the base has prepaid these");
        // All of them take what they get, a KiB at a time.
        while charges.iter_mut().filter_map(|charge| charge.grow(1 << 10).ok()).count() > 0 {}
        for charge in &charges {
            let share = SHARED / (sessions + 1);
            let own = charge.bytes() - PREPAID_BYTES;
            assert!(own.abs_diff(share) <= 2 << 10, "{own} of {share} with {sessions} sessions");
        }
        let refused = charges[0].grow(u64::MAX).unwrap_err().to_string();
        assert!(refused.contains("max-host-memory"), "{refused}");
        assert!(server.admit().is_ok() || SHARED / (sessions + 1) < BASE_BYTES, "a newcomer finds room");
        charges[0].shrink_to(1);
        let first = charges.remove(0);
        drop(charges);
        drop(admitted);
        assert_eq!(server.status().used, BASE_BYTES, "a charge keeps the base of its session");
        drop(first);
        assert_eq!(server.status().used, 0);
        assert!(server.status().peak <= server.status().limit);
    }
}

#[test]
fn charges_leave_the_bases_of_sessions_to_come() {
    for (max_sessions, admitted) in [(0, 1 + 2), (4, 4), (100, 5)] {
        let server = HostMemory::new(Budget::new(10 * BASE_BYTES), max_sessions, Duration::ZERO);
        let first = server.admit().unwrap();
        let mut held = first.reserve(PREPAID_BYTES).unwrap();
        while held.grow(1 << 10).is_ok() {}
        let mut others = Vec::new();
        // Each newcomer takes all that it can get.
        while let Ok(other) = server.admit() {
            let mut charge = other.reserve(PREPAID_BYTES).unwrap();
            while charge.grow(1 << 10).is_ok() {}
            others.push((other, charge));
        }
        assert!(1 + others.len() >= admitted, "{max_sessions}: {}", others.len());
        assert!(server.status().peak <= server.status().limit);
    }
}

#[test]
fn a_connection_without_its_base_is_refused() {
    let server = memory(2 * BASE_BYTES - 1);
    let first = server.admit().unwrap();
    assert!(matches!(server.admit(), Err(HostMemoryError::Exhausted { requested: BASE_BYTES, held: 0, .. })));
    drop(first);
    assert!(server.admit().is_ok());
}

#[test]
fn a_wait_ends_by_a_release_by_the_client_s_end_or_at_once_if_it_is_hopeless() {
    let server = memory(3 * BASE_BYTES + 300);
    let [first, second] = [(); 2].map(|()| server.admit().unwrap());
    let third = BASE_BYTES / 2 + PREPAID_BYTES;
    let mut held = first.reserve(third).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| second.wait(third).map(|charge| charge.bytes()));
        while server.lock().waiting == 0 {
            std::thread::yield_now();
        }
        held.shrink_to(0);
        assert_eq!(waiter.join().unwrap(), Ok(third));
        held = first.reserve(third).unwrap();
        let waiter = scope.spawn(|| second.wait(third).map(|charge| charge.bytes()));
        while server.lock().waiting == 0 {
            std::thread::yield_now();
        }
        second.close();
        assert_eq!(waiter.join().unwrap(), Err(HostMemoryError::ClientGone));
    });
    let (free, total) = (BASE_REPLY_BYTES, 1 << 30);
    assert_eq!((first.reply_piece(free, total).0, first.reply_piece(free, total).1.bytes()), (free, 0));
    assert_eq!((second.reply_piece(total, 9).0, second.reply_piece(total, 9).1.bytes()), (9, 18));
    assert_eq!(second.reply_piece(total, total).0, BASE_REPLY_BYTES / 2, "small pieces if memory is short");
    // More than a session could ever hold is not waited for.
    let hopeless = first.wait(2 * BASE_BYTES);
    assert!(matches!(hopeless, Err(HostMemoryError::Exhausted { waited: false, .. })));
    let [mut a, b] = [3, 4].map(|bytes| first.reserve(bytes).unwrap());
    a.absorb(b);
    assert_eq!(a.bytes(), 7);
}

#[test]
fn a_wait_ends_at_its_deadline() {
    let server = HostMemory::new(Budget::new(3 * BASE_BYTES), 0, Duration::ZERO);
    let [first, second] = [(); 2].map(|()| server.admit().unwrap());
    let _held = first.reserve(PREPAID_BYTES + BASE_BYTES / 2).unwrap();
    let refused = second.wait(PREPAID_BYTES + BASE_BYTES / 2).map(|charge| charge.bytes());
    assert!(matches!(refused, Err(HostMemoryError::Exhausted { waited: true, .. })), "{refused:?}");
}

/// Takes a KiB at a time until nothing more is granted. Returns the bytes beyond what the base has prepaid.
fn fill(charge: &mut HostCharge) -> u64 {
    while charge.grow(1 << 10).is_ok() {}
    charge.bytes() - PREPAID_BYTES
}

#[test]
fn a_tenant_holds_as_much_as_stays_free_whatever_the_number_of_its_sessions() {
    const SHARED: u64 = 4 << 20;
    for sessions in [1, 2, 20] {
        let server = memory((sessions + 1) * BASE_BYTES + SHARED);
        let new_tenant = || Budget::within(&server.budget, u64::MAX);
        let tenant = new_tenant();
        let session = |tenant: &Arc<Budget>| {
            let session = server.connect(|| {});
            session.reserve_base(Some(Arc::clone(tenant))).unwrap();
            session.reserve(PREPAID_BYTES).unwrap()
        };
        let mut other = session(&new_tenant());
        let mut charges: Vec<_> = (0..sessions).map(|_| session(&tenant)).collect();
        // Each takes all that it gets, one after the other.
        let held: Vec<_> = charges.iter_mut().map(fill).collect();
        let sum: u64 = held.iter().sum();
        let (most, least) = (SHARED / 2, SHARED / 2 * 3 / 4 - (1 << 10));
        assert!((least..=most).contains(&sum), "{sum} of {sessions} sessions");
        assert!(held[0] <= SHARED / 2 * 3 / 4, "one session leaves a quarter of it to the others: {held:?}");
        assert!(held.len() < 2 || held[1] >= SHARED / 16, "{held:?}");
        // A client of another tenant finds half of the rest.
        let of_other = fill(&mut other);
        assert!(of_other >= (SHARED - sum) / 2 * 3 / 4 - (1 << 10), "{of_other} beside {sum}");
        let refused = charges[0].grow(1 << 20).unwrap_err().to_string();
        assert!(refused.contains(&format!("all of its key or address {}", Bytes(sum))), "{refused}");
        drop((charges, other));
        assert_eq!((tenant.used(), server.status().used), (0, 0));
    }
}

/// Of those that hold more than the waiting session would: only sessions with an unfinished message, and no more of them than
/// are needed.
#[test]
fn a_wait_ends_unfinished_messages_of_the_largest_holder() {
    const KIB: u64 = 1 << 10;
    let mut server = memory(5 * BASE_BYTES + 1000 * KIB);
    Arc::get_mut(&mut server).unwrap().evict_after = Duration::ZERO;
    let (ended, end) = std::sync::mpsc::channel();
    let large = Budget::within(&server.budget, u64::MAX);
    let session = |name: &'static str, tenant: Option<&Arc<Budget>>, kib: u64| {
        let ended = ended.clone();
        let session = server.connect(move || ended.send(name).unwrap());
        session.reserve_base(tenant.cloned()).unwrap();
        let charge = session.reserve(PREPAID_BYTES + kib * KIB).unwrap();
        (session, charge)
    };
    let finished = session("finished", Some(&large), 200);
    let first = session("first", Some(&large), 80);
    let second = session("second", Some(&large), 100);
    let small = session("small", None, 150);
    let unfinished = [&first, &second, &small].map(|(session, _)| session.begin_message(1 << 20));
    assert!(unfinished.iter().all(Option::is_some) && finished.0.begin_message(BASE_BODY_BYTES).is_none());
    // 470 KiB are free.
    let (waiter, _) = session("waiter", None, 0);
    std::thread::scope(|scope| {
        let granted = scope.spawn(|| waiter.wait(PREPAID_BYTES + 260 * KIB).map(|charge| charge.bytes()));
        // 50 KiB are missing. The tenant `large` holds more than 260 KiB, and the largest message of it is enough.
        assert_eq!(end.recv(), Ok("second"));
        assert!(matches!(second.0.eviction(), Some(HostMemoryError::Evicted { .. })));
        assert!(matches!(second.0.wait(KIB).map(drop), Err(HostMemoryError::Evicted { .. })));
        drop(second);
        assert_eq!(granted.join().unwrap(), Ok(PREPAID_BYTES + 260 * KIB));
    });
    assert!(end.try_recv().is_err(), "no other session was ended");
    drop((finished, first, small, unfinished));
}

#[test]
fn a_wait_ends_no_session_if_that_would_not_suffice() {
    const KIB: u64 = 1 << 10;
    let server = HostMemory::new(Budget::new(3 * BASE_BYTES + 1000 * KIB), 0, Duration::from_millis(80));
    let (ended, end) = std::sync::mpsc::channel();
    let large = Budget::within(&server.budget, u64::MAX);
    let [finished, unfinished] = [(); 2].map(|()| {
        let ended = ended.clone();
        let session = server.connect(move || ended.send(()).unwrap());
        session.reserve_base(Some(Arc::clone(&large))).unwrap();
        session
    });
    let _held = [(&finished, 300), (&unfinished, 100)].map(|(s, kib)| s.reserve(PREPAID_BYTES + kib * KIB).unwrap());
    let _message = unfinished.begin_message(1 << 20);
    // 180 KiB are missing, and the unfinished message holds 100 KiB.
    let refused = server.admit().unwrap().wait(PREPAID_BYTES + 390 * KIB).map(drop);
    assert!(matches!(refused, Err(HostMemoryError::Exhausted { waited: true, .. })), "{refused:?}");
    assert!(end.try_recv().is_err(), "no session was ended");
}
