//! The `rpc-server` program as a supervisor and its worker: what happens when either of them dies or receives a signal.
#![allow(clippy::unwrap_used)] // a failed unwrap fails the test

use crate::server_program::{ServerProcess, program, run_server_program, run_to_exit, spawn_server_with_log};
use crate::server_program_lifecycle::{ARGS, QueueWork, options, send_signal, stop};
use crate::support::{WATCHDOG, encode_message, eventually, hello_request};
use fanout::rpc::client::Endpoint;
use rustix::fs::{OFlags, fcntl_setfl};
use std::io::{BufRead, BufReader, IoSlice, PipeReader, PipeWriter, Read, Write};
use std::mem::MaybeUninit;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use tempfile::NamedTempFile;

/// Limit of the time from the death of a worker to the HELLO reply of the next one. It takes some tens of milliseconds on an idle
/// machine; the rest is for one that runs all tests at a time.
const MAX_RESTART: Duration = Duration::from_secs(5);

/// A server with a supervisor, and its log.
struct Supervised {
    server: ServerProcess,
    log: NamedTempFile,
}

impl Supervised {
    fn start(args: &[&str]) -> Supervised {
        Supervised::start_program(program(&[&ARGS, args].concat()))
    }

    fn start_program(program: Command) -> Supervised {
        let log = NamedTempFile::new().unwrap();
        let server = spawn_server_with_log(program, log.reopen().unwrap().into());
        Supervised { server, log }
    }

    /// The lines that report the deaths of workers.
    fn deaths(&self) -> Vec<String> {
        let text = std::fs::read_to_string(self.log.path()).unwrap();
        let lines = text.lines().filter_map(|line| line.split_once("supervisor: worker "));
        lines.map(|(_, death)| death.to_owned()).collect()
    }

    fn worker(&self) -> u32 {
        next_worker(self.server.child.id(), None)
    }
}

/// The children of a process, also those that have ended and are not reaped.
fn children(process: u32) -> Vec<u32> {
    let listed = std::fs::read_to_string(format!("/proc/{process}/task/{process}/children")).unwrap();
    listed.split_whitespace().map(|child| child.parse().unwrap()).collect()
}

/// The worker of a supervisor, another one than `before`, once it is the only child.
pub(crate) fn next_worker(supervisor: u32, before: Option<u32>) -> u32 {
    let mut worker = before;
    eventually("the supervisor has one worker", || {
        let all = children(supervisor);
        worker = all.first().copied();
        all.len() == 1 && worker != before
    });
    worker.unwrap()
}

/// Sends HELLO and waits for the reply.
fn exchange_hello(stream: &mut TcpStream) {
    stream.set_read_timeout(Some(WATCHDOG)).unwrap();
    stream.write_all(&encode_message(&hello_request())).unwrap();
    stream.read_exact(&mut [0; 36]).unwrap();
}

/// Every client whose connection the dead worker had not accepted is served by the next one, on all addresses.
#[test]
fn a_killed_worker_is_replaced_behind_the_same_sockets() {
    let Supervised { mut server, log } = Supervised::start(&["--listen", "0=7"]);
    let mut listening = server.banner.lines().filter_map(|line| line.strip_prefix("listening on ")?.split(' ').next());
    let second = listening.next_back().unwrap().to_owned();
    assert_ne!(second, server.addr, "{}", server.banner);
    let endpoint = server.endpoint().unwrap();
    let mut work = QueueWork::on(&endpoint);
    let worker = next_worker(server.child.id(), None);
    stop(worker);
    // The stopped worker accepts none of them.
    let mut waiting = [&server.addr, &second].map(|addr| TcpStream::connect(addr).unwrap());
    let killed = Instant::now();
    send_signal(worker, "-KILL");
    exchange_hello(&mut TcpStream::connect(&server.addr).unwrap());
    let served_after = killed.elapsed();
    println!("a new client was served {served_after:?} after SIGKILL");
    assert!(served_after < MAX_RESTART, "{served_after:?}");
    assert!(work.run().is_err(), "the connection to the dead worker");
    waiting.iter_mut().for_each(exchange_hello);
    let again = Endpoint::connect(&server.addr, &options().with_retry(WATCHDOG)).unwrap();
    assert_eq!(QueueWork::on(&again).run(), Ok(vec![7; 64]));
    drop((endpoint, work, again, waiting));
    server.signal("-TERM");
    assert_eq!(server.exit(), Some(0));
    let supervised = Supervised { server, log };
    let deaths = supervised.deaths();
    let start = format!("{worker} was killed by SIGKILL (signal 9) after ");
    assert!(deaths.len() == 1 && deaths[0].starts_with(&start), "{deaths:?}");
    assert!(deaths[0].ends_with("; a new one starts at once"), "{deaths:?}");
}

#[test]
fn workers_that_die_young_are_replaced_after_growing_pauses() {
    let mut supervised = Supervised::start(&[]);
    let mut worker = supervised.worker();
    for died in 1..=3 {
        send_signal(worker, "-KILL");
        eventually("the death is reported", || supervised.deaths().len() == died);
        if died < 3 {
            worker = next_worker(supervised.server.child.id(), Some(worker));
        }
    }
    // During the third pause, no worker delays the end.
    supervised.server.signal("-TERM");
    assert_eq!(supervised.server.exit(), Some(0));
    let deaths = supervised.deaths();
    for (death, next) in deaths.iter().zip(["starts at once", "starts in 0.5 s", "starts in 1.0 s"]) {
        assert!(death.ends_with(next), "{deaths:?}");
    }
}

#[test]
fn the_worker_ends_with_a_killed_supervisor() {
    let mut supervised = Supervised::start(&[]);
    let worker = supervised.worker();
    let mut client = TcpStream::connect(&supervised.server.addr).unwrap();
    exchange_hello(&mut client);
    supervised.server.child.kill().unwrap();
    supervised.server.child.wait().unwrap();
    assert_eq!(client.read(&mut [0]).unwrap_or(0), 0, "the connection ends with worker {worker}");
    eventually("the port is free", || TcpListener::bind(&supervised.server.addr).is_ok());
}

/// A terminal or a service manager may signal the whole group, so the worker gets two signals.
#[test]
fn a_signal_to_both_processes_drains_once() {
    let mut supervised = Supervised::start(&["--drain", "60"]);
    let worker = supervised.worker();
    let endpoint = supervised.server.endpoint().unwrap();
    let mut work = QueueWork::on(&endpoint);
    for signal in ["-TERM", "-INT"] {
        send_signal(worker, signal);
    }
    supervised.server.signal("-TERM");
    eventually("the server drains", || supervised.server.endpoint().is_err());
    assert_eq!(work.run(), Ok(vec![7; 64]));
    drop((endpoint, work));
    assert_eq!(supervised.server.exit(), Some(0));
    assert_eq!(supervised.deaths(), [""; 0]);
}

/// The end of a terminal signals the supervisor and its worker. A process that was started with SIGHUP ignored serves on.
#[test]
fn a_hangup_ends_a_server_without_keys_unless_it_is_ignored() {
    for (args, is_ignored) in [(&[][..], false), (&[], true), (&["--no-supervise"], false), (&["--no-supervise"], true)]
    {
        let program = program(&[&ARGS, args].concat());
        let hangup = if is_ignored { "--ignore-signal=HUP" } else { "--default-signal=HUP" };
        let mut supervised = Supervised::start_program(under_env(hangup, &program));
        let server = supervised.server.child.id();
        let endpoint = supervised.server.endpoint().unwrap();
        // Both at once: a worker that ends by itself would be replaced.
        let both = [server].into_iter().chain(children(server)).map(|process| process.to_string());
        let status = Command::new("kill").arg("-HUP").args(both).status().unwrap();
        // The worker may have ended with the supervisor before its own signal.
        assert!(status.success() || !is_ignored);
        if is_ignored {
            assert_eq!(QueueWork::on(&endpoint).run(), Ok(vec![7; 64]), "{args:?}");
            supervised.server.signal("-TERM");
        }
        drop(endpoint);
        assert_eq!(supervised.server.exit(), Some(0), "{args:?}, ignored: {is_ignored}");
        assert_eq!(supervised.deaths(), [""; 0]);
    }
}

/// The same program, with an option of `env`: the tests themselves may run with SIGHUP ignored, as `nohup` starts them.
pub(crate) fn under_env(option: &str, program: &Command) -> Command {
    let mut env = Command::new("env");
    env.arg(option).arg(program.get_program()).args(program.get_args());
    for (name, value) in program.get_envs() {
        match value {
            Some(value) => env.env(name, value),
            None => env.env_remove(name),
        };
    }
    env.stdin(Stdio::null());
    env
}

#[test]
fn a_worker_that_is_killed_while_it_drains_is_a_failure() {
    let mut supervised = Supervised::start(&["--drain", "60"]);
    let worker = supervised.worker();
    let _endpoint = supervised.server.endpoint().unwrap();
    supervised.server.signal("-TERM");
    eventually("the server drains", || supervised.server.endpoint().is_err());
    send_signal(worker, "-KILL");
    assert_eq!(supervised.server.exit(), Some(1));
    let deaths = supervised.deaths();
    assert!(deaths.len() == 1 && deaths[0].ends_with(", while it drained"), "{deaths:?}");
}

/// A pipe that takes no more bytes until it is read.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, writer) = std::io::pipe().unwrap();
    fcntl_setfl(&writer, OFlags::NONBLOCK).unwrap();
    for bytes in [&[0; 4096][..], &[0]] {
        while (&writer).write(bytes).is_ok() {}
    }
    fcntl_setfl(&writer, OFlags::empty()).unwrap();
    (reader, writer)
}

/// Supervisor and worker log the restart; nobody reads it.
#[test]
fn a_log_that_nobody_reads_does_not_delay_a_restart() {
    let (_unread, log) = full_pipe();
    let mut server = spawn_server_with_log(program(&ARGS), log.into());
    let worker = next_worker(server.child.id(), None);
    send_signal(worker, "-KILL");
    next_worker(server.child.id(), Some(worker));
    exchange_hello(&mut TcpStream::connect(&server.addr).unwrap());
    server.signal("-TERM");
    assert_eq!(server.exit(), Some(0));
}

#[test]
fn a_closed_standard_output_ends_no_server() {
    let closed = || std::io::pipe().unwrap().1;
    for mode in [&[][..], &["--no-supervise"]] {
        let log = NamedTempFile::new().unwrap();
        let text = || std::fs::read_to_string(log.path()).unwrap();
        let mut program = program(&[&ARGS, mode].concat());
        let child = program.stdout(closed()).stderr(log.reopen().unwrap()).spawn().unwrap();
        let mut server = ServerProcess { child, banner: String::new(), addr: String::new() };
        eventually("the address is in the log", || {
            let address =
                text().split_once("listening on ").and_then(|(_, rest)| Some(rest.split_once(' ')?.0.to_owned()));
            server.addr = address.unwrap_or_default();
            !server.addr.is_empty()
        });
        exchange_hello(&mut TcpStream::connect(&server.addr).unwrap());
        server.signal("-TERM");
        assert_eq!(server.exit(), Some(0), "{mode:?}");
        let text = text();
        assert!(text.contains("cannot write to standard output: ") && !text.contains("panicked"), "{mode:?}: {text}");
        assert!(!text.contains("supervisor: worker "), "{text}");
    }
    let mut query = program(&["--list-devices"]);
    let output = query.stdout(closed()).stderr(Stdio::piped()).spawn().unwrap().wait_with_output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && text.contains("cannot write to standard output: "), "{text}");
}

/// A worker whose device is a server that does not answer is not ready.
#[test]
fn before_a_worker_has_served_its_death_ends_the_program() {
    for (to_supervisor, signal, code, says) in
        [(false, "-KILL", 128 + 9, "was killed by SIGKILL (signal 9)"), (true, "-TERM", 0, ""), (true, "-INT", 0, "")]
    {
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let device = silent.local_addr().unwrap().to_string();
        let log = NamedTempFile::new().unwrap();
        let mut child =
            program(&["-p", "0", "-d", &device]).stdout(Stdio::null()).stderr(log.reopen().unwrap()).spawn();
        let child = child.as_mut().unwrap();
        let _connection = silent.accept().unwrap();
        let process = if to_supervisor { child.id() } else { next_worker(child.id(), None) };
        send_signal(process, signal);
        assert_eq!(child.wait().unwrap().code(), Some(code), "{signal}");
        let text = std::fs::read_to_string(log.path()).unwrap();
        assert!(text.contains(says), "{signal}: {text}");
    }
}

/// A server with two addresses, whose address space is limited, up to its first line: `Ok` if it serves, else its exit code and what
/// it has printed to standard error.
fn start_with_address_space(megabytes: u64) -> Result<(), (Option<i32>, String)> {
    let plain = program(&[&ARGS[..], &["-d", "CPU", "--listen", "0=7"]].concat());
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(format!("ulimit -v {}; exec \"$0\" \"$@\"", megabytes << 10));
    shell.arg(plain.get_program()).args(plain.get_args()).env_remove("RUST_LOG");
    shell.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?))));
    // An arena for each thread would take the address space in large steps.
    shell.env("MALLOC_ARENA_MAX", "1").stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    // Dropped, and with it killed, when it serves.
    let mut server = ServerProcess { child: shell.spawn().unwrap(), banner: String::new(), addr: String::new() };
    BufReader::new(server.child.stdout.take().unwrap()).read_line(&mut server.banner).unwrap();
    if !server.banner.is_empty() {
        return Ok(());
    }
    let mut text = String::new();
    server.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
    Err((server.exit(), text))
}

/// A worker is ready when all its threads run: if one cannot be started, the program ends and says so, and starts no other worker. The
/// last thread accepts the connections of the second address; each has 2 MiB of address space for its stack. So it is that thread for
/// which a server has no room whose limit is one megabyte less than the smallest one with which it serves.
#[cfg(target_env = "gnu")]
#[test]
fn a_worker_without_its_threads_is_never_ready() {
    let (mut too_few, mut enough) = (8, 256);
    assert_eq!(start_with_address_space(enough), Ok(()));
    let (mut code, mut text) = start_with_address_space(too_few).unwrap_err();
    while enough - too_few > 1 {
        let middle = (too_few + enough) / 2;
        match start_with_address_space(middle) {
            Ok(()) => enough = middle,
            Err(end) => (too_few, (code, text)) = (middle, end),
        }
        assert_ne!(code, Some(0), "{too_few} MiB: {text}");
    }
    let says = "rpc-server: the host is out of threads: cannot start one that accepts connections: ";
    assert!(code == Some(1) && text.contains(says) && text.contains("ulimit -v"), "{too_few} MiB: {code:?} {text}");
}

/// What process 1 of a container must do: its children are not only those that it has started. A shell that executes the
/// program leaves it such children.
#[test]
fn children_that_are_no_workers_are_reaped() {
    let plain = program(&ARGS);
    let mut shell = Command::new("sh");
    shell.args(["-c", "true & true & exec \"$0\" \"$@\""]).arg(plain.get_program()).args(plain.get_args());
    shell.envs(plain.get_envs().filter_map(|(name, value)| Some((name, value?)))).env_remove("RUST_LOG");
    let mut supervised = Supervised::start_program(shell);
    let worker = supervised.worker();
    exchange_hello(&mut TcpStream::connect(&supervised.server.addr).unwrap());
    send_signal(worker, "-KILL");
    next_worker(supervised.server.child.id(), Some(worker));
    exchange_hello(&mut TcpStream::connect(&supervised.server.addr).unwrap());
    supervised.server.signal("-TERM");
    assert_eq!(supervised.server.exit(), Some(0));
    assert_eq!(supervised.deaths().len(), 1);
}

#[test]
fn without_a_supervisor_there_is_one_process() {
    let mut server = ServerProcess::start_with(&["--no-supervise"]);
    assert_eq!(children(server.child.id()), [0; 0]);
    let endpoint = server.endpoint().unwrap();
    assert_eq!(QueueWork::on(&endpoint).run(), Ok(vec![7; 64]));
    server.signal("-KILL");
    assert_eq!(server.exit(), None);
}

/// Hands a socket to a worker, as a supervisor does.
fn send_socket(link: &UnixStream, socket: BorrowedFd<'_>) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = rustix::net::SendAncillaryBuffer::new(&mut space);
    let descriptors = [socket];
    assert!(ancillary.push(rustix::net::SendAncillaryMessage::ScmRights(&descriptors)));
    rustix::net::sendmsg(link, &[IoSlice::new(b"S")], &mut ancillary, rustix::net::SendFlags::empty()).unwrap();
}

/// The other end of the heartbeat; `bin/supervisor/tests.rs` stops a worker. The test is the supervisor.
#[test]
fn a_worker_sends_a_heartbeat() {
    let (mut ours, workers) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(WATCHDOG)).unwrap();
    let parent = std::process::id().to_string();
    let mut worker = program(&[&ARGS[..], &["-d", "CPU", "--worker", &parent]].concat());
    worker.stdin(Stdio::from(OwnedFd::from(workers))).stdout(Stdio::null()).stderr(Stdio::null());
    let mut worker = ServerProcess { child: worker.spawn().unwrap(), banner: String::new(), addr: String::new() };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut beats_since_ready = None;
    while beats_since_ready < Some(2) {
        let mut message = [0];
        ours.read_exact(&mut message).unwrap();
        match &message {
            b"S" => {
                send_socket(&ours, listener.as_fd());
                // A first start, and no clients to refuse.
                ours.write_all(b"F\0\0").unwrap();
            }
            b"R" => beats_since_ready = Some(0),
            b"B" => beats_since_ready = beats_since_ready.map(|beats| beats + 1),
            _ => panic!("{message:?}"),
        }
    }
    worker.signal("-TERM");
    assert_eq!(worker.exit(), Some(0));
}

/// The option by which the supervisor starts workers, used by others.
#[test]
fn the_internal_worker_option_needs_a_supervisor() {
    let parent = std::process::id().to_string();
    for (args, says) in [
        (&["--worker", "1"][..], "the parent is "),
        (&["--worker", &parent], "standard input is not a connection"),
        (&["--worker", &parent, "--no-supervise"], "cannot be used with"),
    ] {
        let (code, text) = run_server_program(args);
        assert!(code == Some(2) && text.contains(says), "{args:?}: {code:?} {text}");
    }
    let stream = TcpStream::connect(TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap()).unwrap();
    for (sent, says) in
        [(Some(stream.as_fd()), "the descriptor is not a listening TCP socket"), (None, "the supervisor has ended")]
    {
        let (ours, workers) = UnixStream::pair().unwrap();
        if let Some(descriptor) = sent {
            send_socket(&ours, descriptor);
        }
        ours.shutdown(std::net::Shutdown::Write).unwrap();
        let mut worker = program(&[&ARGS[..], &["-d", "CPU", "--worker", &parent]].concat());
        worker.stdin(Stdio::from(OwnedFd::from(workers)));
        let (code, text) = run_to_exit(worker);
        let start = "rpc-server: cannot take over the listening sockets: ";
        assert!(code == Some(1) && text.starts_with(start) && text.contains(says), "{code:?} {text}");
    }
}
