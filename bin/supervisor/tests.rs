//! A supervisor whose workers the tests invent.

use std::io::Write;

use rustix::process::{WaitId, WaitIdOptions, waitid};

use super::*;

/// A supervisor that has served, with this worker.
fn supervisor(worker: Option<Worker>) -> Supervisor {
    Supervisor {
        addresses: Vec::new(),
        drain_timeout: Duration::from_millis(50),
        sockets: None,
        announce: None,
        announcement: None,
        signals: SignalStreams::register(false).expect("signals"),
        worker,
        start_at: None,
        backoff: Backoff::default(),
        has_served: true,
        failed_starts: 0,
        hangup_pending: false,
        faults: FaultCounts::default(),
        end: None,
    }
}

/// A process that is stopped does not handle SIGTERM, so it would not end by itself.
#[test]
#[expect(clippy::zombie_processes, reason = "the supervisor reaps the worker")]
fn a_worker_that_does_not_drain_in_time_is_killed() {
    let child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat");
    let (pid, now) = (Pid::from_child(&child), Instant::now());
    kill_process(pid, Signal::STOP).expect("a process");
    // Of two pending signals, SIGTERM would come first.
    rustix::process::waitpid(Some(pid), WaitOptions::UNTRACED).expect("a child");
    let mut supervisor = supervisor(Some(Worker { ready: Some(now), ..Worker::new(pid, None) }));
    assert_eq!(supervisor.end_on(SIGTERM), None);
    assert_eq!(supervisor.run().expect("an exit status"), DRAIN_FAILED);
    assert!(now.elapsed() >= Duration::from_millis(50), "the worker was stopped, so it did not end by itself");
}

/// Beats count until the worker stops. The test's clock passes the intervals, which take 8 s.
#[test]
fn a_worker_without_a_heartbeat_is_killed() {
    let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::null()).spawn().expect("cat");
    let (pid, now) = (Pid::from_child(&child), Instant::now());
    let (ours, mut workers) = UnixStream::pair().expect("a pair");
    ours.set_nonblocking(true).expect("a socket");
    let worker = Worker::new(pid, Some(ours));
    let mut supervisor = Supervisor { has_served: false, ..supervisor(Some(worker)) };
    let hour = Duration::from_secs(3600);
    supervisor.check_heartbeat(now + hour);
    assert!(supervisor.worker.as_ref().is_some_and(|worker| worker.heartbeat.is_none()), "it is not ready yet");
    workers.write_all(&[control::READY]).expect("room");
    for passes in 1..5 {
        workers.write_all(&[control::BEAT]).expect("room");
        supervisor.read_link(MAX_MESSAGES);
        supervisor.check_heartbeat(now + passes * hour);
    }
    kill_process(pid, Signal::STOP).expect("a process");
    // Leaves the process to be reaped: the supervisor of another test reaps any child.
    let ended = |how| waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT | how);
    for passes in 5..8 {
        assert!(matches!(ended(WaitIdOptions::NOHANG), Ok(None)), "{passes}");
        supervisor.read_link(MAX_MESSAGES);
        supervisor.check_heartbeat(now + passes * hour);
    }
    match ended(WaitIdOptions::empty()) {
        Ok(status) => assert_eq!(status.and_then(|status| status.terminating_signal()), Some(9)),
        Err(e) => assert_eq!(e, rustix::io::Errno::CHILD),
    }
    let _ = child.wait();
    assert!(supervisor.end.is_none() && supervisor.has_served, "another one takes its place");
}

/// A worker that sends messages without end must not keep the supervisor from its signals.
#[test]
fn a_pass_handles_a_limited_number_of_messages() {
    let (ours, mut workers) = UnixStream::pair().expect("a pair");
    ours.set_nonblocking(true).expect("a socket");
    let mut supervisor = supervisor(Some(Worker::new(rustix::process::getpid(), Some(ours))));
    workers.write_all(&[control::BEAT; 3 * MAX_MESSAGES]).expect("room");
    for left in [2, 1, 0] {
        supervisor.read_link(MAX_MESSAGES);
        let link = supervisor.worker.as_ref().and_then(|worker| worker.link.as_ref()).expect("it is open");
        assert_eq!(rustix::io::ioctl_fionread(link).expect("a socket"), (left * MAX_MESSAGES) as u64);
    }
}

/// A process without memory of its own has ended but for its entry, and sends no heartbeat.
#[test]
fn a_process_that_the_kernel_ends_is_told_from_one_that_has_stopped() {
    assert!(!is_ending(rustix::process::getpid()));
    let mut child = Command::new("true").spawn().expect("true");
    let pid = Pid::from_child(&child);
    let ended = waitid(WaitId::Pid(pid), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
    // The supervisor of another test may have reaped it, and then there is no such process.
    assert!(
        ended.is_err() || is_ending(pid) || !std::path::Path::new(&format!("/proc/{}", pid.as_raw_nonzero())).exists()
    );
    let _ = child.wait();
}

/// The status of the program when a worker ends, which may have been ready; `None` if another one starts.
fn after_death(supervisor: &mut Supervisor, was_ready: bool, exit_code: Option<i32>) -> Option<u8> {
    let now = Instant::now();
    let (pid, ready) = (rustix::process::getpid(), was_ready.then_some(now));
    let worker = Worker { ready, ..Worker::new(pid, None) };
    let signal = exit_code.is_none().then_some(9);
    supervisor.after_death(&worker, Death { exit_code, signal })
}

#[test]
fn workers_that_cannot_serve_end_the_program_with_a_failure() {
    for (exit_code, status) in [(Some(0), 1), (Some(1), 1), (Some(75), 75), (Some(-1), 1), (None, 128 + 9)] {
        let mut never_served = Supervisor { has_served: false, ..supervisor(None) };
        assert_eq!(after_death(&mut never_served, false, exit_code), Some(status), "{exit_code:?}");
        let mut supervisor = supervisor(None);
        for _ in 0..2 {
            for _ in 1..MAX_FAILED_STARTS {
                assert_eq!(after_death(&mut supervisor, false, exit_code), None);
            }
            // However many have served and died: clients may have caused it.
            assert_eq!(after_death(&mut supervisor, true, exit_code), None);
        }
        for _ in 1..MAX_FAILED_STARTS {
            assert_eq!(after_death(&mut supervisor, false, exit_code), None);
        }
        assert_eq!(after_death(&mut supervisor, false, exit_code), Some(status), "{exit_code:?}");
    }
}
