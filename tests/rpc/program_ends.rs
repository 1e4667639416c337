//! The binary when it is killed, stopped or told to end, and what it tells of others.
#![allow(clippy::unwrap_used)] // a test says what it needs by failing

use crate::program::{Running, ended, start};
use crate::support::{WATCHDOG, eventually};
use fanout::device::{Account, Buffer, DeviceError, Queue, Source};
use fanout::rpc::client::{ConnectError, Endpoint, Options};
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

const ARGS: [&str; 6] = ["-p", "0", "-t", "1", "--mem", "64M"];

impl Running {
    fn with(args: &[&str]) -> Running {
        start(&[&ARGS, args].concat())
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success());
    }

    /// Stops it. That is done when none of its threads runs any more, which may be later than `kill` returns.
    fn stop(&self) {
        self.signal("-STOP");
        let tasks = format!("/proc/{}/task", self.child.id());
        let stopped = |stat: &str| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
        let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        eventually("it is stopped", || {
            std::fs::read_dir(&tasks)
                .is_ok_and(|mut tasks| tasks.all(|task| task.is_ok_and(|task| stopped(&stat(task)))))
        });
    }

    fn endpoint(&self) -> Result<Endpoint, ConnectError> {
        Endpoint::connect(&self.addr, &options())
    }

    fn exit(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

fn options() -> Options {
    Options::default().with_connect_timeout(WATCHDOG).with_silence_timeout(Duration::from_secs(1))
}

/// A queue with a buffer, whose upload is done.
struct Work {
    queue: Box<dyn Queue>,
    buffer: Buffer,
}

impl Work {
    fn on(endpoint: &Endpoint) -> Work {
        let (device, account) = (&endpoint.devices()[0], Account::new(1 << 20));
        let (queue, buffer) = (device.queue(&account).unwrap(), device.alloc(64, &account).unwrap());
        let mut work = Work { queue, buffer };
        assert_eq!(work.run(), Ok(vec![7; 64]));
        work
    }

    fn run(&mut self) -> Result<Vec<u8>, DeviceError> {
        self.queue.upload(self.buffer.whole(), None, Source::Borrowed(&[7; 64]))?;
        let bytes = self.queue.download(self.buffer.whole())?;
        self.queue.mark().wait(Some(Instant::now() + WATCHDOG))?;
        Ok(bytes.wait(Some(Instant::now() + WATCHDOG))?.to_vec())
    }
}

#[test]
fn a_server_that_is_killed_is_an_error_that_names_it() {
    let server = Running::with(&[]);
    let endpoint = server.endpoint().unwrap();
    let mut work = Work::on(&endpoint);
    // Stopped first: somebody waits when it dies.
    server.stop();
    let waiting = work.queue.download(work.buffer.whole()).unwrap();
    let point = work.queue.mark();
    let start = Instant::now();
    server.signal("-KILL");
    for lost in [waiting.wait(Some(start + WATCHDOG)).map(drop), point.wait(Some(start + WATCHDOG))] {
        assert!(matches!(&lost, Err(DeviceError::Lost { endpoint, .. }) if *endpoint == server.addr), "{lost:?}");
    }
    assert!(matches!(work.run(), Err(DeviceError::Lost { .. })));
}

#[test]
fn a_server_that_is_stopped_is_lost_in_time_and_lives_on() {
    let mut server = Running::with(&[]);
    let endpoint = server.endpoint().unwrap();
    let mut work = Work::on(&endpoint);
    // It may be asked whether it is there before there is work for it.
    let start = Instant::now();
    server.stop();
    let lost = work.run().unwrap_err().to_string();
    assert!(start.elapsed() >= options().silence_timeout && start.elapsed() < WATCHDOG, "{:?}", start.elapsed());
    assert!(lost.contains(&server.addr) && lost.contains("sent nothing for"), "{lost}");
    assert!(["GET_TENSOR", "READ", "ASK", "PING"].iter().any(|command| lost.contains(command)), "{lost}");
    server.signal("-CONT");
    let again = server.endpoint().unwrap();
    assert_eq!(Work::on(&again).run(), Ok(vec![7; 64]));
    assert!(server.child.try_wait().unwrap().is_none());
}

#[test]
fn a_signal_drains_and_a_second_one_ends() {
    let draining = |server: &Running| {
        server.signal("-TERM");
        eventually("it takes no more", || match server.endpoint() {
            Err(ConnectError::Draining { endpoint }) => endpoint == server.addr,
            other => other.map(|_| false).unwrap(),
        });
    };
    let mut server = Running::with(&["--drain", "60"]);
    let endpoint = server.endpoint().unwrap();
    let mut work = Work::on(&endpoint);
    draining(&server);
    assert_eq!(work.run(), Ok(vec![7; 64]));
    drop((endpoint, work));
    assert_eq!(server.exit(), Some(0), "the last client has left");

    let mut server = Running::with(&["--drain", "60"]);
    let _endpoint = server.endpoint().unwrap();
    draining(&server);
    server.signal("-INT");
    assert_eq!(server.exit(), Some(128 + 2));

    let mut server = Running::with(&["--drain", "0.1"]);
    let _endpoint = server.endpoint().unwrap();
    server.signal("-INT");
    assert_eq!(server.exit(), Some(0), "its time is over");
}

#[test]
fn a_server_is_asked_for_its_status() {
    let server = Running::with(&["--max-connections", "1", "--drain", "60"]);
    let (code, text) = ended(&["--status", &server.addr]);
    assert_eq!(code, Some(0), "{text}");
    let build = format!("\nbuild: rpc-server {}\n", fanout::VERSION);
    let facts =
        ["\nprotocol: 7.0.0, extensions 1\n", "\nsessions: 0 besides this one\n", "/CPU: ", "64 of 64 MiB free\n"];
    for part in [&*format!("{}: ready\n", server.addr), &build].into_iter().chain(facts) {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    // The session of the one that asked may take a moment to end.
    let mut connected = server.endpoint();
    eventually("there is room again", || {
        connected.is_ok() || {
            connected = server.endpoint();
            connected.is_ok()
        }
    });
    let (code, text) = ended(&["--status", &server.addr]);
    assert!(
        code == Some(1) && text.contains(": full\n") && text.contains("is full: it has as many"),
        "{code:?} {text}"
    );
    server.signal("-TERM");
    eventually("it drains", || ended(&["--status", &server.addr]).1.contains(": draining\n"));
    let (code, text) = ended(&["--status", &server.addr]);
    assert!(code == Some(1) && text.contains("is about to end"), "{code:?} {text}");

    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (code, text) = ended(&["--status", &dead]);
    assert!(code == Some(1) && text.contains(&format!("cannot connect to {dead}")), "{code:?} {text}");
    let (code, text) = ended(&["--status", "nonsense"]);
    assert!(code == Some(1) && text.contains("\"nonsense\""), "{code:?} {text}");
}

#[test]
fn a_server_that_does_not_answer_has_a_status_too() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let start = Instant::now();
    let (code, text) = ended(&["--status", &silent.local_addr().unwrap().to_string()]);
    assert!(code == Some(1) && text.contains("no reply to HELLO"), "{code:?} {text}");
    assert!(start.elapsed() < WATCHDOG, "{:?}", start.elapsed());
}
