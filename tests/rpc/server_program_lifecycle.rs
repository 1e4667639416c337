//! The `rpc-server` program when it is killed, stopped or receives a signal, and its `--status` option.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::server_program::{
    ServerProcess, program, run_server_program, run_to_exit, spawn_server, spawn_server_process,
};
use crate::support::{WATCHDOG, eventually};
use fanout::device::{Buffer, Device, DeviceError, MemoryBudget, Queue, UploadSource};
use fanout::rpc::client::{ConnectError, Endpoint, Options};
use fanout::rpc::wire::ext::REVISION;
use std::net::TcpListener;
use std::process::Command;
use std::time::{Duration, Instant};

pub(crate) const ARGS: [&str; 6] = ["-p", "0", "-t", "1", "--mem", "64M"];

impl ServerProcess {
    pub(crate) fn start_with(args: &[&str]) -> ServerProcess {
        spawn_server(&[&ARGS, args].concat())
    }

    pub(crate) fn signal(&self, signal: &str) {
        send_signal(self.child.id(), signal);
    }

    pub(crate) fn endpoint(&self) -> Result<Endpoint, ConnectError> {
        Endpoint::connect(&self.addr, &options())
    }

    pub(crate) fn exit(&mut self) -> Option<i32> {
        self.child.wait().unwrap().code()
    }
}

pub(crate) fn send_signal(process: u32, signal: &str) {
    let sent = Command::new("kill").args([signal, &process.to_string()]).status().unwrap();
    assert!(sent.success());
}

/// Sends SIGSTOP and waits until all threads are stopped, which may be after `kill` has returned.
pub(crate) fn stop(process: u32) {
    send_signal(process, "-STOP");
    let tasks = format!("/proc/{process}/task");
    let stopped = |stat: &str| stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'));
    let stat = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
    eventually("all threads of the server are stopped", || {
        std::fs::read_dir(&tasks).is_ok_and(|mut tasks| tasks.all(|task| task.is_ok_and(|task| stopped(&stat(task)))))
    });
}

/// The server program with `listener` as descriptor 3, as a service manager passes a socket. A shell sets the variables, since
/// `LISTEN_PID` is the number of the process that becomes the server.
fn socket_activated(listener: &TcpListener, variables: &str, args: &[&str]) -> Command {
    let server = program(&[&ARGS[2..], args].concat());
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{variables} exec \"$@\" 3<&0 4<&- </dev/null"), "sh"]).arg(server.get_program());
    let environment = server.get_envs().filter_map(|(name, value)| Some((name, value?)));
    shell.args(server.get_args()).envs(environment).env_remove("RUST_LOG");
    shell.stdin(std::process::Stdio::from(std::os::fd::OwnedFd::from(listener.try_clone().unwrap())));
    shell
}

/// A client that connects before the server starts is served, also by the worker that replaces one.
#[test]
fn sockets_of_a_service_manager_are_served() {
    for no_supervise in [&["--no-supervise"][..], &[]] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let patient = options().with_silence_timeout(WATCHDOG); // the server is not up yet
        let early = std::thread::spawn(move || Endpoint::connect(&addr.to_string(), &patient).map(drop));
        let port = addr.port().to_string();
        let args = [&["-p", &port], no_supervise].concat();
        let server = spawn_server_process(socket_activated(&listener, "LISTEN_PID=$$ LISTEN_FDS=1", &args));
        assert_eq!(server.addr, addr.to_string());
        early.join().unwrap().unwrap();
        QueueWork::on(&server.endpoint().unwrap());
    }
}

#[test]
fn sockets_that_do_not_fit_the_options_are_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let other = port.parse::<u16>().unwrap() ^ 1;
    let listen = [&port, &other.to_string()].map(|port| format!("--listen={port}"));
    let both = listen.each_ref().map(String::as_str);
    let own = |sockets| format!("LISTEN_PID=$$ LISTEN_FDS={sockets}");
    for (variables, args, message) in [
        (own("1"), &[][..], format!("listens on 127.0.0.1:{port}, but the options have port 50052")),
        (own("2"), &["-p", &port], "announces 2 sockets, but the options name 1 addresses".to_owned()),
        (own("2"), &both, "descriptor 4 of LISTEN_FDS: Bad file descriptor".to_owned()),
        (own("one"), &[], "LISTEN_FDS=one: not a number of sockets".to_owned()),
        // Those of another process are not taken: the server binds the port itself, which is in use.
        ("LISTEN_PID=1 LISTEN_FDS=1".to_owned(), &["-p", &port], format!("cannot listen on 127.0.0.1:{port}")),
    ] {
        let (code, text) = run_to_exit(socket_activated(&listener, &variables, args));
        assert!(code == Some(1) && text.contains(&message), "{variables} {args:?}: {code:?}, {text}");
    }
}

pub(crate) fn options() -> Options {
    Options::default().with_connect_timeout(WATCHDOG).with_silence_timeout(Duration::from_secs(1))
}

/// A queue with a buffer, to run uploads and downloads.
pub(crate) struct QueueWork {
    queue: Box<dyn Queue>,
    buffer: Buffer,
}

impl QueueWork {
    pub(crate) fn on(endpoint: &Endpoint) -> QueueWork {
        QueueWork::on_device(&*endpoint.devices()[0])
    }

    pub(crate) fn on_device(device: &dyn Device) -> QueueWork {
        let budget = MemoryBudget::new(1 << 20);
        let (queue, buffer) = (device.queue(&budget).unwrap(), device.alloc(64, &budget).unwrap());
        let mut work = QueueWork { queue, buffer };
        assert_eq!(work.run(), Ok(vec![7; 64]));
        work
    }

    pub(crate) fn run(&mut self) -> Result<Vec<u8>, DeviceError> {
        self.queue.upload(self.buffer.whole(), None, UploadSource::Borrowed(&[7; 64]))?;
        let bytes = self.queue.download(self.buffer.whole())?;
        self.queue.mark().wait(Some(Instant::now() + WATCHDOG))?;
        Ok(bytes.wait(Some(Instant::now() + WATCHDOG))?.to_vec())
    }
}

#[test]
fn a_killed_server_is_reported_by_address() {
    let server = ServerProcess::start_with(&["--no-supervise"]);
    let endpoint = server.endpoint().unwrap();
    let mut work = QueueWork::on(&endpoint);
    // The server is stopped first, so that calls are waiting when it is killed.
    stop(server.child.id());
    let waiting = work.queue.download(work.buffer.whole()).unwrap();
    let point = work.queue.mark();
    let start = Instant::now();
    server.signal("-KILL");
    for lost in [waiting.wait(Some(start + WATCHDOG)).map(drop), point.wait(Some(start + WATCHDOG))] {
        assert!(
            matches!(&lost, Err(DeviceError::ConnectionLost { endpoint, .. }) if *endpoint == server.addr),
            "{lost:?}"
        );
    }
    assert!(matches!(work.run(), Err(DeviceError::ConnectionLost { .. })));
}

#[test]
fn a_stopped_server_is_lost_after_the_timeout_and_usable_when_resumed() {
    let mut server = ServerProcess::start_with(&["--no-supervise"]);
    let endpoint = server.endpoint().unwrap();
    let mut work = QueueWork::on(&endpoint);
    // The heartbeat may detect the stopped server before the next command is sent.
    let start = Instant::now();
    stop(server.child.id());
    let lost = work.run().unwrap_err().to_string();
    assert!(start.elapsed() >= options().silence_timeout && start.elapsed() < WATCHDOG, "{:?}", start.elapsed());
    assert!(lost.contains(&server.addr) && lost.contains("sent nothing for"), "{lost}");
    assert!(["GET_TENSOR", "READ", "NOTIFY_REACHED", "PING"].iter().any(|command| lost.contains(command)), "{lost}");
    server.signal("-CONT");
    let again = server.endpoint().unwrap();
    assert_eq!(QueueWork::on(&again).run(), Ok(vec![7; 64]));
    assert!(server.child.try_wait().unwrap().is_none());
}

#[test]
fn the_first_signal_drains_and_the_second_one_exits() {
    let draining = |server: &ServerProcess| {
        server.signal("-TERM");
        eventually("the server rejects new connections", || match server.endpoint() {
            Err(ConnectError::Draining { endpoint }) => endpoint == server.addr,
            other => other.map(|_| false).unwrap(),
        });
    };
    for mode in [&[][..], &["--no-supervise"]] {
        let start = |drain| ServerProcess::start_with(&[mode, &["--drain", drain]].concat());
        let mut server = start("60");
        let endpoint = server.endpoint().unwrap();
        let mut work = QueueWork::on(&endpoint);
        draining(&server);
        assert_eq!(work.run(), Ok(vec![7; 64]));
        drop((endpoint, work));
        assert_eq!(server.exit(), Some(0), "{mode:?}: exit code after the last client has disconnected");

        let mut server = start("60");
        let _endpoint = server.endpoint().unwrap();
        draining(&server);
        server.signal("-INT");
        assert_eq!(server.exit(), Some(128 + 2), "{mode:?}");

        let mut server = start("0.1");
        let _endpoint = server.endpoint().unwrap();
        server.signal("-INT");
        assert_eq!(server.exit(), Some(0), "{mode:?}: exit code after the drain timeout");
    }
}

#[test]
fn the_status_option_reports_the_state_of_a_server() {
    let server = ServerProcess::start_with(&["--max-connections", "1", "--drain", "60"]);
    let (code, text) = run_server_program(&["--status", &server.addr]);
    assert_eq!(code, Some(0), "{text}");
    let build = format!("\nbuild: rpc-server {}, up for ", fanout::VERSION);
    let protocol = format!("\nprotocol: 8.0.1, extensions {REVISION}\n");
    let port = format!("\nport {}: protocol 8.0, else 7.0; 3.x; gen0\n", server.addr.rsplit(':').next().unwrap());
    let limits = [
        "\nlimit: connections (max-connections): 1 of 1, 0 refused since the start\n",
        "\nlimit: connections of this address (max-connections-per-address): not counted, as of loopback\n",
        "\nlimit: queues (max-queues): 0 of 4096, 0 refused since the start\n",
        "\nlimit: host memory of clients (max-host-memory): 0 of ",
        "\nlimit: pause before a request (idle-timeout): none\n",
    ];
    let facts = [&*protocol, &port, "\nsessions: 0 besides this one\n", "\ndevice CPU: ", "64 of 64 MiB free"];
    let facts = facts.into_iter().chain(limits);
    for part in [&*format!("{}: ready\n", server.addr), &build].into_iter().chain(facts) {
        assert!(text.contains(part), "{part:?} in {text}");
    }
    // The session of the status query may take a moment to end.
    let mut connected = server.endpoint();
    eventually("the server accepts a connection again", || {
        connected.is_ok() || {
            connected = server.endpoint();
            connected.is_ok()
        }
    });
    let (code, text) = run_server_program(&["--status", &server.addr]);
    assert!(
        code == Some(1) && text.contains(": full\n") && text.contains("is full: it has as many"),
        "{code:?} {text}"
    );
    server.signal("-TERM");
    eventually("the status of the server is draining", || {
        run_server_program(&["--status", &server.addr]).1.contains(": draining\n")
    });
    let (code, text) = run_server_program(&["--status", &server.addr]);
    assert!(code == Some(1) && text.contains("is about to end"), "{code:?} {text}");

    let dead = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let (code, text) = run_server_program(&["--status", &dead]);
    assert!(code == Some(1) && text.contains(&format!("cannot connect to {dead}")), "{code:?} {text}");
    let (code, text) = run_server_program(&["--status", "::1"]);
    assert!(code == Some(2) && text.contains("\"::1\""), "{code:?} {text}");
}

#[test]
fn the_status_option_reports_an_unresponsive_server() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let start = Instant::now();
    let (code, text) = run_server_program(&["--status", &silent.local_addr().unwrap().to_string()]);
    assert!(code == Some(1) && text.contains("no reply to HELLO"), "{code:?} {text}");
    assert!(start.elapsed() < WATCHDOG, "{:?}", start.elapsed());
}
