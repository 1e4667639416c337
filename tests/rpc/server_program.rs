//! The `rpc-server` program: its output, its exit codes, and its memory use with hostile clients.

use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::wire::*;
use fanout::tensor::DType;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command as Process, Output, Stdio};

pub(crate) struct ServerProcess {
    pub(crate) child: Child,
    /// Standard output up to the lines with the listening addresses.
    pub(crate) banner: String,
    pub(crate) addr: String,
}

/// The server program without a CUDA driver: the files with the driver's names cannot be loaded.
pub(crate) fn program(args: &[&str]) -> Process {
    let folder = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("no-driver");
    std::fs::create_dir_all(&folder).expect("a folder for tests");
    for name in ["libcuda.so", "libcuda.so.1"] {
        std::fs::write(folder.join(name), "no library").expect("a file");
    }
    let mut process = Process::new(env!("CARGO_BIN_EXE_rpc-server"));
    process.args(args).env("LD_LIBRARY_PATH", folder).env_remove("RUST_LOG").stdin(Stdio::null());
    process
}

pub(crate) fn spawn_server(args: &[&str]) -> ServerProcess {
    spawn_server_process(program(args))
}

pub(crate) fn spawn_server_process(program: Process) -> ServerProcess {
    spawn_server_with_log(program, Stdio::null())
}

/// Starts a server with its standard error in `log`.
pub(crate) fn spawn_server_with_log(mut program: Process, log: Stdio) -> ServerProcess {
    let child = program.stdout(Stdio::piped()).stderr(log).spawn().expect("started");
    let mut server = ServerProcess { child, banner: String::new(), addr: String::new() };
    let mut stdout = BufReader::new(server.child.stdout.take().expect("a pipe"));
    while server.addr.is_empty() {
        let mut line = String::new();
        assert!(stdout.read_line(&mut line).expect("text") > 0, "the server program ended after {:?}", server.banner);
        server.banner.push_str(&line);
        let rest = line.strip_prefix("listening on ").unwrap_or_default();
        server.addr = rest.split_whitespace().next().unwrap_or_default().to_owned();
    }
    // The lines of all addresses are written at once.
    server.banner.push_str(std::str::from_utf8(stdout.buffer()).expect("text"));
    server
}

pub(crate) fn run_server_program(args: &[&str]) -> (Option<i32>, String) {
    run_to_exit(program(args))
}

/// Runs a program to its end. Returns its exit code and its output.
pub(crate) fn run_to_exit(mut program: Process) -> (Option<i32>, String) {
    let Output { status, stdout, stderr } = program.output().expect("started");
    (status.code(), String::from_utf8_lossy(&[stdout, stderr].concat()).into_owned())
}

impl ServerProcess {
    fn connect(&self) -> TcpStream {
        let mut stream = TcpStream::connect(&self.addr).expect("a connection");
        stream.set_read_timeout(Some(WATCHDOG)).expect("a live socket");
        stream.write_all(&encode_message(&hello_request())).expect("the server accepts the bytes");
        stream.read_exact(&mut [0; 36]).expect("a HELLO");
        stream
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn the_banner_lists_the_served_devices() {
    let server = spawn_server(&["-p", "0", "-d", "CPU,cpu", "-t", "1", "--mem", "64M"]);
    let Version { major, minor, .. } = PROTOCOL_VERSION;
    let version = format!("rpc-server {}, RPC protocol {major}.{minor}\n", fanout::VERSION);
    assert!(server.banner.starts_with(&version), "{}", server.banner);
    for (start, end) in
        [("device 0: CPU0 (1 thread, ", "64 of 64 MiB free"), ("device 1: CPU1 (1 thread, ", "64 of 64 MiB free")]
    {
        let line = server.banner.lines().find(|line| line.starts_with(start));
        assert!(line.is_some_and(|line| line.ends_with(end)), "{}", server.banner);
    }
    assert!(!server.banner.contains("WARNING"), "{}", server.banner);
    let open = spawn_server(&["-H", "0.0.0.0", "--insecure", "-p", "0", "-t", "1", "--mem", "64M"]);
    assert!(open.banner.contains("WARNING") && open.banner.contains("authentication"), "{}", open.banner);
}

/// `--listen` replaces the default address, and adds to that of `--host` and `--port`.
#[test]
fn the_banner_lists_the_addresses_with_their_versions() {
    const LOCAL: &str = "127.0.0.1";
    const ALL: &str = "8.0, else 7.0; 3.x; gen0";
    for (args, want) in [
        (&["-p", "0"][..], &[(LOCAL, ALL)][..]),
        (&["-p", "0", "--protocol", "7,8"], &[(LOCAL, "7.0, else 8.0")]),
        (&["-p", "0", "--protocol", "7"], &[(LOCAL, "7.0")]),
        (&["-p", "0", "--protocol", "7,gen0,5,3,4.0.1"], &[(LOCAL, "7.0, else 5.0, else 4.0.1; gen0; 3.x")]),
        (&["--listen", "0"], &[(LOCAL, ALL)]),
        (&["--listen", "0=8", "--listen", "localhost:0=7.0"], &[(LOCAL, "8.0"), (LOCAL, "7.0")]),
        (&["-p", "0", "--listen", "0=7"], &[(LOCAL, ALL), (LOCAL, "7.0")]),
        (
            &["-H", "0.0.0.0", "--insecure", "-p", "0", "--listen", "0=8", "--listen", "127.0.0.1:0=7"],
            &[("0.0.0.0", ALL), ("0.0.0.0", "8.0"), (LOCAL, "7.0")],
        ),
    ] {
        let server = spawn_server(&[args, &["-d", "CPU", "-t", "1", "--mem", "64M"]].concat());
        let lines: Vec<_> = server.banner.lines().filter_map(|line| line.strip_prefix("listening on ")).collect();
        assert_eq!(lines.len(), want.len(), "{args:?}: {lines:?}");
        for (line, (host, versions)) in lines.iter().zip(want) {
            let (addr, rest) = line.split_once(' ').expect("an address, and more");
            let (at, port) = addr.rsplit_once(':').expect("a port");
            assert!(at == *host && port.parse::<u16>().is_ok_and(|port| port > 0), "{args:?}: {line}");
            assert_eq!(rest, format!("(protocol {versions})"), "{args:?}");
            let (_, status) = run_server_program(&["--status", &format!("127.0.0.1:{port}")]);
            let newest = versions.split([',', ';']).next().expect("a version");
            assert!(status.contains(&format!("\nprotocol: {newest}.")), "{args:?}: {status}");
        }
    }
}

#[test]
fn wrong_arguments_exit_with_2_and_other_failures_with_1() {
    for (args, says) in [
        (&["-d", "GPU7"][..], "--device: no device \"GPU7\"; available: CPU"),
        (&["--mem", "much"], "expected a size such as"),
        (&["--mem", "1G,1G"], "--mem: 2 memory sizes for 1 devices"),
        (&["--max-message", "1K"], "at least 4 KiB"),
        (&["--stall-timeout", "0"], "must be more than 0 seconds, up to a day"),
        (
            &["--mem", "1G", "-d", "127.0.0.1:1"],
            "--mem: all devices belong to servers, whose memory their own --mem limits",
        ),
        (&["--mem", "0"], "must be more than 0 bytes"),
        (&["--mem", "1M,0", "-d", "CPU,CPU"], "must be more than 0 bytes"),
        (&["--mem", "4096T"], "--mem: CPU: the limits of 1 device on it are 4096 TiB together, more than its "),
        (&["--mem", "2048T", "-d", "CPU,CPU"], "a single size counts for each device; give smaller sizes"),
        (&["--max-memory", "0"], "must be more than 0 bytes"),
        (&["--cache-size", "0"], "must be more than 0 bytes"),
        (&["--max-connections", "0"], "0 is not in 1.."),
        (&["--max-nodes", "0"], "0 is not in 1.."),
        (&["--log-level", "loud"], "expected off, error, warn, info, debug or trace, got \"loud\""),
        (&["-d", "CPU,"], "a name is empty"),
        (&["-d", "localhost"], "the devices of a server are named HOST:PORT: the port is missing"),
        (&["--port", "65536"], "65536"),
        (&["--listen", "gpu-2"], "expected an address such as 50052"),
        (&["--listen", "::1:50052"], "expected an address such as 50052"),
        (&["--listen", "50052=9"], "\"9\" is no version of the protocol that this server supports: 8.0, 7.0"),
        (&["--protocol", "8,6"], "\"6\" is no version of the protocol that this server supports: 8.0, 7.0"),
        (&["--what"], "--what"),
    ] {
        let (code, text) = run_server_program(args);
        assert!(code == Some(2) && text.contains(says), "{args:?}: {code:?} {text}");
    }
    let server = spawn_server(&["-p", "0", "-t", "1", "--mem", "64M"]);
    let (_, port) = server.addr.rsplit_once(':').expect("a port");
    let (code, text) = run_server_program(&["-p", port, "-t", "1", "--mem", "64M"]);
    assert!(code == Some(1) && text.contains(&format!("cannot listen on {}", server.addr)), "{code:?} {text}");
    let (code, text) = run_server_program(&["-H", "192.0.2.1", "-t", "1", "--mem", "64M"]);
    assert!(code == Some(1) && text.contains("192.0.2.1"), "{code:?} {text}");
    for (args, says) in [("--list-devices", "CPU:"), ("--version", env!("CARGO_PKG_VERSION")), ("--help", "Examples")] {
        let (code, text) = run_server_program(&[args]);
        assert!(code == Some(0) && text.contains(says), "{args}: {code:?} {text}");
    }
}

#[cfg(unix)]
#[test]
fn signals_shut_the_server_program_down() {
    for signal in ["-INT", "-TERM"] {
        let mut server = spawn_server(&["-p", "0", "-t", "1", "--mem", "64M"]);
        let mut client = server.connect();
        let killed = Process::new("kill").args([signal, &server.child.id().to_string()]).status().expect("kill");
        assert!(killed.success());
        assert_eq!(client.read(&mut [0]).expect("the server closes the connection"), 0);
        assert_eq!(server.child.wait().expect("ended").code(), Some(0), "{signal}");
    }
}

/// Options of a server whose memory is measured: all of it belongs to the process that the test has started.
#[cfg(target_os = "linux")]
const MEASURED: [&str; 8] = ["--no-supervise", "-p", "0", "--protocol=7", "-t", "1", "--log-level", "off"];

#[cfg(target_os = "linux")]
impl ServerProcess {
    /// A memory size of `/proc/PID/status`, in bytes.
    fn status(&self, name: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("procfs");
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a line of that name");
        line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
    }
}

/// Sends different graphs of the maximum size while the device is busy: messages, decoded graphs and programs must not
/// accumulate. The server is a separate process, so the peak of resident memory is the server's alone.
#[cfg(target_os = "linux")]
#[test]
fn graphs_queued_behind_a_busy_device_use_bounded_memory() {
    const NODES: u64 = 1 << 15;
    const BODY: usize = 16 << 20;
    let server = spawn_server(&[&MEASURED[..], &["--mem", "64M"]].concat());
    let mut client = server.connect();
    let mut say = |request: &[u8], reply: usize| {
        client.write_all(request).expect("the server accepts the bytes");
        let mut bytes = vec![0; RESPONSE_HEADER + reply];
        client.read_exact(&mut bytes).expect("a reply");
        bytes.split_off(RESPONSE_HEADER)
    };
    let made = say(&encode_message(&Request::AllocBuffer(AllocBuffer { device: 0, size: 4 << 20 })), 16);
    let handle = u64::from_le_bytes(*made.first_chunk().expect("16 bytes"));
    let base = say(&encode_message(&Request::BufferGetBase(BufferGetBase { remote_ptr: handle })), 8);
    let base = u64::from_le_bytes(*base.first_chunk().expect("8 bytes"));
    let memory = ClientBuffer { handle, base, size: 4 << 20 };
    let matrix = |id: u64| memory.tensor(id, DType::F32, [512, 512, 1, 1], (id - 1) << 20);
    let (a, b) = (matrix(1), matrix(2));
    let slow: Vec<_> = (3..13)
        .map(|id| node(OpCode::MulMat, TensorRecord { data: base + (2 << 20), id, ..matrix(3) }, &[&a, &b]))
        .collect();
    let ids: Vec<_> = slow.iter().map(|t| t.id).collect();
    let slow = graph_compute_message(0, &ids, &[vec![a, b], slow].concat());
    // Each large graph is queued behind the slow products.
    let leaves = ((BODY - 12) / TENSOR_RECORD) as u64 - NODES * (TENSOR_RECORD + 8) as u64 / TENSOR_RECORD as u64 - 1;
    let before = server.status("VmRSS");
    for round in 0..6 {
        let mut tensors: Vec<_> = (1..=leaves).map(|id| memory.float_tensor(id, 4, 0)).collect();
        let offset = 64 * (1 + round);
        tensors.extend((0..NODES).map(|k| {
            let mut sum = node(OpCode::Add, memory.float_tensor(leaves + 1 + k, 4, offset), &[]);
            for (i, src) in sum.src.iter_mut().enumerate() {
                *src = 1 + (k + i as u64 * 4099) % leaves;
            }
            sum
        }));
        let nodes: Vec<_> = (leaves + 1..=leaves + NODES).collect();
        client.write_all(&slow).expect("the server accepts the bytes");
        client.write_all(&graph_compute_message(0, &nodes, &tensors)).expect("the server accepts the bytes");
    }
    client.write_all(&encode_message(&Request::DeviceCount(DeviceCount {}))).expect("the server accepts the bytes");
    client.read_exact(&mut [0; 12]).expect("an answer");
    let grown = server.status("VmHWM") - before;
    assert!(grown < 64 << 20, "{} MiB more", grown >> 20);
}

/// The size in a header allocates no memory before the bytes arrive, even with many clients at once.
#[cfg(target_os = "linux")]
#[test]
fn announced_message_sizes_allocate_no_memory() {
    let server = spawn_server(&[&MEASURED[..], &["--mem", "8G"]].concat());
    let resident = || server.status("VmRSS");
    let mut quiet = server.connect();
    let before = resident();
    let attackers: Vec<_> = (0..64)
        .map(|i| {
            let mut client = server.connect();
            let attack = match i % 8 {
                // The header of a graph just below the size limit, and 1000 bytes of the graph.
                0..4 => {
                    let size = 12 + 8 * ((30 << 20) / 8);
                    let mut bytes = RequestHeader { command: RpcCommand::GraphCompute, size }.encode().to_vec();
                    bytes.extend([0; 1000]);
                    bytes
                }
                // An upload that stops after 1000 bytes: only the pages that it has touched may be resident.
                4 => {
                    client
                        .write_all(&encode_message(&Request::AllocBuffer(AllocBuffer { device: 0, size: 128 << 20 })))
                        .expect("the server accepts the bytes");
                    let mut reply = [0; 24];
                    client.read_exact(&mut reply).expect("a reply");
                    let remote_ptr = u64::from_le_bytes(*reply[8..].first_chunk().expect("24 bytes"));
                    client
                        .write_all(&encode_message(&Request::BufferGetBase(BufferGetBase { remote_ptr })))
                        .expect("the server accepts the bytes");
                    let mut reply = [0; 16];
                    client.read_exact(&mut reply).expect("a reply");
                    let base = u64::from_le_bytes(*reply[8..].first_chunk().expect("16 bytes"));
                    let memory = ClientBuffer { handle: remote_ptr, base, size: 128 << 20 };
                    let head = SetTensorHead { tensor: memory.byte_tensor(), cache: false, offset: 0 };
                    let mut bytes = Vec::new();
                    head.encode(memory.size, &mut bytes).expect("a size");
                    bytes.extend([1; 1000]);
                    bytes
                }
                _ => RequestHeader { command: RpcCommand::SetTensor, size: u64::MAX }.encode().to_vec(),
            };
            client.write_all(&attack).expect("the server accepts the bytes");
            client
        })
        .collect();
    // The server has received or rejected every header once it replies to later requests of another client.
    for _ in 0..10 {
        quiet.write_all(&encode_message(&Request::DeviceCount(DeviceCount {}))).expect("the server accepts the bytes");
        quiet.read_exact(&mut [0; 12]).expect("an answer");
    }
    let grown = resident().saturating_sub(before);
    assert!(grown < 32 << 20, "{} MiB more", grown >> 20);
    drop(attackers);
}
