use super::*;

const MS: Duration = Duration::from_millis(1);

/// A time at which no earlier hold is left.
fn later() -> Instant {
    Instant::now() + Duration::from_secs(3600)
}

/// As [`serve_shares`], with equal shares.
fn serve(
    queue: &mut FairQueue<FlowKeys>,
    total: Duration,
    time: impl Fn(FlowKeys) -> Duration,
) -> HashMap<FlowKeys, Duration> {
    serve_shares(queue, total, |_| DEFAULT_SHARE, time)
}

/// Serves `queue` for `total`: each item is its own keys, whose turn takes `time(keys)` or what its credit allows, whichever is
/// less; it then waits again. Returns the time of each session.
fn serve_shares(
    queue: &mut FairQueue<FlowKeys>,
    total: Duration,
    share: impl Fn(u64) -> u32,
    time: impl Fn(FlowKeys) -> Duration,
) -> HashMap<FlowKeys, Duration> {
    let (mut used, mut sum) = (HashMap::new(), Duration::ZERO);
    while sum < total {
        let (keys, grant) = queue.pop(later()).unwrap();
        let took = time(keys).min(grant);
        *used.entry(keys).or_insert(Duration::ZERO) += took;
        sum += took;
        queue.charge(keys, took, share(keys[0]), later());
        queue.push(keys, keys, false);
    }
    used
}

fn share(used: &HashMap<FlowKeys, Duration>, tenant: u64) -> f64 {
    let of = |wanted: Option<u64>| -> f64 {
        used.iter().filter(|(keys, _)| wanted.is_none_or(|t| keys[0] == t)).map(|(_, t)| t.as_secs_f64()).sum()
    };
    of(Some(tenant)) / of(None)
}

#[test]
fn tenants_get_equal_time_whatever_their_sessions_and_commands() {
    for (name, sessions, short) in
        [("equal", 1, 20 * MS), ("sixteen sessions", 16, 20 * MS), ("short commands", 16, MS / 10)]
    {
        let mut queue = FairQueue::default();
        for session in 0..sessions {
            queue.push([1, session], [1, session], false);
        }
        queue.push([2, 0], [2, 0], false);
        let used = serve(&mut queue, 1000 * MS, |keys| if keys[0] == 1 { short } else { 20 * MS });
        assert!((share(&used, 2) - 0.5).abs() < 0.01, "{name}: {used:?}");
        let of_one: Vec<f64> =
            used.iter().filter(|(keys, _)| keys[0] == 1).map(|(_, t)| t.as_secs_f64() * sessions as f64).collect();
        assert_eq!(of_one.len(), sessions as usize, "{name}");
        assert!(of_one.iter().all(|t| (t / 0.5 - 1.0).abs() < 0.2), "{name}: {used:?}");
    }
}

/// Each tenant gets the part of the time that its share is of all shares, by one session or by several, by commands that are
/// interrupted at the ends of turns or short ones.
#[test]
fn tenants_get_time_in_proportion_to_their_shares() {
    for shares in [&[100, 200][..], &[100, 50], &[50, 50], &[1000, 100, 300], &[1, 100], &[10, 1000, 100]] {
        for (sessions, length) in [(1, 20 * MS), (4, 20 * MS), (4, MS / 2)] {
            let mut queue = FairQueue::default();
            for tenant in 0..shares.len() as u64 {
                for session in 0..sessions {
                    queue.push([tenant, session], [tenant, session], false);
                }
            }
            let share_of = |tenant: u64| shares[tenant as usize];
            // Some tens of turns of the tenant with the smallest share.
            let all: u32 = shares.iter().sum();
            let total = 20 * MS * all / shares.iter().copied().min().unwrap();
            let used = serve_shares(&mut queue, total.max(1000 * MS), share_of, |_| length);
            for (tenant, &wanted) in (0..).zip(shares) {
                let (got, wanted) = (share(&used, tenant), f64::from(wanted) / f64::from(all));
                assert!((got / wanted - 1.0).abs() < 0.1, "{shares:?}, {length:?}: {tenant} has {got}, not {wanted}");
            }
        }
    }
}

/// A tenant with a small share may have all of the time that no other one wants.
#[test]
fn a_share_is_no_limit_where_no_other_tenant_waits() {
    let (mut queue, start) = (FairQueue::default(), later());
    queue.charge([2, 0], MS, DEFAULT_SHARE, start);
    queue.push([1, 0], [1, 0], false);
    for round in 0..100 {
        let now = start + round * 2 * MS;
        let (keys, grant) = queue.pop(now).expect("a turn, without a hold");
        queue.charge(keys, grant, 10, now + grant);
        queue.push(keys, keys, false);
    }
}

/// A client that has one request at a time, beside a tenant whose sixteen sessions always have one. Requests are cut at the
/// ends of turns.
#[test]
fn a_flow_that_waits_for_replies_gets_its_share() {
    let micros = Duration::from_micros;
    for (request, other_request, pause) in [(100, 100, 50), (1300, 20_000, 300), (700, 20_000, 300), (5000, 100, 1000)]
    {
        let (mut queue, mut used) = (FairQueue::default(), [Duration::ZERO; 2]);
        (0..16).for_each(|session| _ = queue.push([1, session], [1, session], false));
        let (mut now, mut next_request) = (Duration::ZERO, Some(Duration::ZERO));
        let mut left = micros(request);
        while now < 1000 * MS {
            let (keys, mut took) = queue.pop(later()).unwrap();
            if keys[0] == 1 {
                took = took.min(micros(other_request));
                if let Some(at) = next_request.take_if(|at| *at <= now + took)
                    && queue.push([2, 0], [2, 0], false)
                {
                    took = took.min(at.saturating_sub(now).max(MIN_TURN));
                }
                queue.charge(keys, took, DEFAULT_SHARE, later());
                queue.push(keys, keys, false);
            } else {
                took = took.min(left);
                left -= took;
                queue.charge(keys, took, DEFAULT_SHARE, later());
                if left.is_zero() {
                    (left, next_request) = (micros(request), Some(now + took + micros(pause)));
                } else {
                    queue.push(keys, keys, false);
                }
            }
            now += took;
            used[keys[0] as usize - 1] += took;
        }
        let ratio = used[1].as_secs_f64() / used[0].as_secs_f64();
        assert!((0.85..1.15).contains(&ratio), "{request} µs and {pause} µs between: {used:?}");
    }
}

#[test]
fn the_rest_of_an_interrupted_turn_does_not_interrupt() {
    let mut queue = FairQueue::default();
    let (a, b) = ([1, 0], [2, 0]);
    let turn = |queue: &mut FairQueue<FlowKeys>, keys, time| {
        assert_eq!(queue.pop(later()).map(|(keys, _)| keys), Some(keys));
        queue.charge(keys, time, DEFAULT_SHARE, later());
    };
    assert!(!queue.push(a, a, true));
    turn(&mut queue, a, MS / 2);
    assert!(!queue.push(b, b, false), "a newcomer waits");
    turn(&mut queue, b, MS / 2);
    assert!(queue.push(a, a, false), "it comes back with credit");
    turn(&mut queue, a, MS / 2);
    assert!(!queue.push(b, b, false), "its turn was interrupted");
    turn(&mut queue, b, MS / 2);
    assert!(queue.push(a, a, false));
}

/// Between the arrival of work and its turn, each other tenant is served for at most one slice.
#[test]
fn at_most_one_slice_of_each_tenant_passes_before_a_turn() {
    let mut rng = fastrand::Rng::with_seed(26);
    for _ in 0..200 {
        let (mut queue, tenants) = (FairQueue::default(), rng.u64(1..8));
        for tenant in 0..tenants {
            for session in 0..rng.u64(1..20) {
                queue.push([tenant, session], [tenant, session], false);
            }
        }
        let lengths: Vec<Duration> = (0..tenants).map(|_| MS * rng.u32(1..50) / 10).collect();
        serve(&mut queue, MS * rng.u32(0..100), |keys| lengths[keys[0] as usize]);
        let (newcomer, mut passed) = ([100, 0], vec![Duration::ZERO; tenants as usize]);
        queue.push(newcomer, newcomer, false);
        loop {
            let (keys, grant) = queue.pop(later()).unwrap();
            if keys == newcomer {
                break;
            }
            let took = lengths[keys[0] as usize].min(grant);
            passed[keys[0] as usize] += took;
            queue.charge(keys, took, DEFAULT_SHARE, later());
            if rng.bool() {
                queue.push(keys, keys, false);
            }
        }
        assert!(passed.iter().all(|passed| *passed <= SLICE), "{passed:?}");
    }
}

/// A command that cannot be interrupted is paid for by its session's later turns, not by the sessions that waited.
#[test]
fn overlong_turns_are_paid_back_and_forgotten_when_the_device_was_idle() {
    let mut queue = FairQueue::default();
    queue.push([1, 0], [1, 0], false);
    queue.pop(later()).unwrap();
    queue.push([2, 0], [2, 0], false);
    queue.charge([1, 0], 40 * MS, DEFAULT_SHARE, later());
    queue.push([1, 0], [1, 0], false);
    let mut before = Duration::ZERO;
    loop {
        let (keys, grant) = queue.pop(later()).unwrap();
        if keys[0] == 1 {
            break;
        }
        before += grant;
        queue.charge(keys, grant, DEFAULT_SHARE, later());
        queue.push(keys, keys, false);
    }
    assert!((36 * MS..=44 * MS).contains(&before), "{before:?}");
    queue.charge([1, 0], 1000 * MS, DEFAULT_SHARE, later());
    while queue.pop(later() + 2000 * MS).is_some() {}
    for keys in [[1, 0], [2, 0]] {
        queue.push(keys, keys, true);
    }
    assert_eq!(queue.pop(later()).map(|(keys, _)| keys), Some([1, 0]));
}

#[test]
fn a_debtor_is_held_while_another_tenant_is_expected_back() {
    let (mut queue, start) = (FairQueue::default(), Instant::now());
    let at = |ms: u32| start + ms * MS;
    let (debtor, other) = ([1, 0], [2, 0]);
    let pop_at = |queue: &mut FairQueue<FlowKeys>, ms| queue.pop(at(ms)).map(|(keys, _)| keys);
    queue.push(debtor, debtor, true);
    assert_eq!(pop_at(&mut queue, 0), Some(debtor));
    queue.push(other, other, false);
    // It could not be interrupted for 60 ms.
    queue.charge(debtor, 60 * MS, DEFAULT_SHARE, at(60));
    queue.push(debtor, debtor, false);
    assert_eq!(pop_at(&mut queue, 60), Some(other));
    queue.charge(other, MS, DEFAULT_SHARE, at(61));
    // The other tenant prepares its next request.
    assert_eq!(pop_at(&mut queue, 61), None);
    assert_eq!(queue.held_until(), Some(at(61) + RECENT));
    queue.push(other, other, false);
    assert_eq!(pop_at(&mut queue, 80), Some(other));
    queue.charge(other, MS, DEFAULT_SHARE, at(81));
    assert_eq!(pop_at(&mut queue, 81), None);
    // Its debt is paid by time, before the other tenant is given up.
    assert!(queue.held_until().is_some_and(|end| end > at(117) && end < at(119)));
    assert_eq!(pop_at(&mut queue, 119), Some(debtor));
    // The other tenant does not come back: nothing holds the next turn.
    queue.charge(debtor, 500 * MS, DEFAULT_SHARE, at(619));
    queue.push(debtor, debtor, false);
    assert_eq!(pop_at(&mut queue, 619), Some(debtor));
}

/// A client may open sessions without end.
#[test]
fn flows_that_have_left_are_forgotten() {
    let mut queue = FairQueue::default();
    queue.push([0, 0], [0, 0], false);
    for session in 0..10_000 {
        for keys in [[1, session], [2 + session, 0]] {
            queue.push(keys, keys, false);
            queue.remove(keys, |_| true);
        }
        let (keys, grant) = queue.pop(later()).unwrap();
        queue.charge(keys, grant, DEFAULT_SHARE, later());
        queue.push(keys, keys, false);
    }
    assert_eq!(queue.len(), 1);
    assert!(queue.tenants.flows.len() <= 2 * KEPT_FLOWS, "{}", queue.tenants.flows.len());
    let of_one = queue.tenants.flows.get(&1).map_or(0, |tenant| tenant.waiting.flows.len());
    assert!(of_one <= 2 * KEPT_FLOWS + 2, "{of_one}");
}
