//! Replays recorded sessions of llama.cpp clients against the server binary.
//!
//! The files in `tests/rpc/recordings/` contain the messages between a client of protocol 7.0 or older and llama.cpp's own
//! server of the same version. The test sends the client's requests to this crate's server, with translated handles and
//! addresses, and compares the responses with the recorded ones.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a failed expectation of a test is a panic

mod recording;
mod translate;

use fanout::rpc::wire::{HelloReply, Limits, Request, Response, RpcCommand};
use fanout::tensor::quant::dequantiser;
use fanout::tensor::{DType, TensorDesc};
use recording::{Direction, Record, read_recording};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;
use translate::Translator;

const LIMITS: Limits = Limits::new(1 << 16, 1 << 17, 1 << 28);

/// A process of the server binary on a free port; killed on drop.
struct ServerProcess {
    child: Child,
    address: String,
}

impl ServerProcess {
    /// Starts a server of a version of the protocol.
    fn start(version: &str) -> ServerProcess {
        let mut child = Process::new(env!("CARGO_BIN_EXE_rpc-server"))
            .args(["--listen", &format!("127.0.0.1:0={version}"), "-t", "2", "--mem", "2G"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .map(|line| line.unwrap())
            .find_map(|line| Some(line.split_once("listening on ")?.1.split_whitespace().next()?.to_owned()))
            .expect("the server logs the address on which it listens");
        ServerProcess { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Counts and errors of a replay.
#[derive(Default)]
struct ReplayStats {
    requests: usize,
    graphs: usize,
    reads: usize,
    /// Sum of the squared differences of read values.
    error: f64,
    /// Sum of the squared recorded values.
    power: f64,
}

/// Replays the session in a recording against a new server of its version.
fn replay(file: &str, version: &str) -> ReplayStats {
    let server = ServerProcess::start(version);
    let mut streams: HashMap<u32, TcpStream> = HashMap::new();
    let mut pending: HashMap<u32, (RpcCommand, Vec<u8>)> = HashMap::new();
    let mut translator = Translator::default();
    let mut stats = ReplayStats::default();
    for Record { connection, direction, bytes } in read_recording(file) {
        let stream = streams.entry(connection).or_insert_with(|| server.connect());
        match direction {
            Direction::Request => {
                let (command, body) = recording::split_request(&bytes);
                stream.write_all(&translator.request(command, body)).unwrap();
                stats.requests += 1;
                stats.graphs += usize::from(matches!(command, RpcCommand::GraphCompute | RpcCommand::GraphRecompute));
                pending.insert(connection, (command, body.to_vec()));
            }
            Direction::Response => {
                let (command, body) = pending.remove(&connection).expect("a response follows a request");
                let body_received = read_response(stream, command);
                if command.response().is_none() {
                    // Versions before 7.0 acknowledge some commands with an empty response.
                    assert!(bytes.len() == 8 && body_received.is_empty(), "the response to {}", command.name());
                    continue;
                }
                let recorded = Response::decode(command, &bytes[8..]).unwrap();
                let response = Response::decode(command, &body_received).unwrap();
                let request = Request::decode(command, &body, &LIMITS).unwrap();
                compare_responses(&request, &recorded, &response, &mut translator, &mut stats);
            }
        }
    }
    stats
}

fn read_response(stream: &mut TcpStream, command: RpcCommand) -> Vec<u8> {
    let mut size = [0; 8];
    stream.read_exact(&mut size).unwrap_or_else(|e| panic!("the response to {}: {e}", command.name()));
    let mut body = vec![0; u64::from_le_bytes(size) as usize];
    stream.read_exact(&mut body).unwrap();
    body
}

fn compare_responses(
    request: &Request<'_>,
    recorded: &Response<'_>,
    response: &Response<'_>,
    translator: &mut Translator,
    stats: &mut ReplayStats,
) {
    match (request, recorded, response) {
        (Request::AllocBuffer(_), Response::AllocBuffer(theirs), Response::AllocBuffer(ours)) => {
            assert!(ours.remote_ptr != 0 && ours.remote_size >= theirs.remote_size.min(ours.remote_size));
            translator.record_buffer(theirs.remote_ptr, ours.remote_ptr, theirs.remote_size);
        }
        (Request::BufferGetBase(r), Response::BufferGetBase(theirs), Response::BufferGetBase(ours)) => {
            assert!(*ours != 0 && ours.is_multiple_of(64));
            translator.record_base(r.remote_ptr, *theirs, *ours);
        }
        (Request::GetTensor(r), Response::GetTensor(theirs), Response::GetTensor(ours)) => {
            let dtype = DType::from_wire(r.tensor.dtype).unwrap();
            let convert = dequantiser(dtype).unwrap_or_else(|| panic!("{dtype} tensors are not compared"));
            let values = |bytes: &[u8]| {
                let mut out = vec![0.0; bytes.len() / dtype.block_bytes() * dtype.block_len()];
                convert(bytes, &mut out);
                out
            };
            assert_eq!(theirs.len(), ours.len());
            for (want, got) in values(theirs).into_iter().zip(values(ours)) {
                assert!(got.is_finite(), "{}: {got}, recorded {want}", r.tensor.name());
                stats.error += f64::from(got - want).powi(2);
                stats.power += f64::from(want).powi(2);
            }
            stats.reads += 1;
        }
        (Request::GetAllocSize(r), _, Response::GetAllocSize(ours)) => {
            let desc = TensorDesc::strided(
                DType::from_wire(r.tensor.dtype).unwrap(),
                r.tensor.ne.map(|n| n as usize),
                r.tensor.nb.map(|n| n as usize),
            );
            assert!(*ours >= desc.unwrap().extent() as u64);
        }
        // The patch number and the padding byte, which differ between servers, are not compared.
        (Request::Hello(_), Response::Hello(theirs), Response::Hello(ours)) => {
            let version = |reply: &HelloReply| (reply.version.major, reply.version.minor);
            assert_eq!((version(theirs), theirs.conn_caps), (version(ours), ours.conn_caps));
            let old = ours.version.major < 7;
            assert!(!old || ours.extension_byte == 0, "versions before 7.0 offer no extensions");
        }
        (Request::GetDeviceMemory(_), _, Response::GetDeviceMemory(ours)) => assert!(ours.free <= ours.total),
        // Alignment and maximum buffer size differ between servers.
        (Request::GetAlignment(_) | Request::GetMaxSize(_), ..) => {}
        (_, theirs, ours) => assert_eq!(theirs, ours, "the response to {}", request.command().name()),
    }
}

/// Replays a recording. It must have at least `runs` graphs and `reads` GET_TENSORs, and the NMSE of the read values must not
/// exceed 1e-3.
fn check(file: &str, version: &str, runs: usize, reads: usize) {
    const BOUND: f64 = 1e-3;
    let stats = replay(file, version);
    let nmse = stats.error / stats.power;
    assert!(stats.graphs >= runs && stats.reads >= reads, "{} graphs, {} reads", stats.graphs, stats.reads);
    assert!(nmse <= BOUND, "{file}: NMSE {nmse:.2e} against llama.cpp's own server, at most {BOUND:.0e}");
}

#[test]
fn a_dense_model() {
    check("dense.rec", "7", 5, 5);
}

#[test]
fn a_mixture_of_experts() {
    check("moe.rec", "7", 5, 5);
}

#[test]
fn a_model_with_its_kv_cache_on_the_client() {
    check("kv-on-host.rec", "7", 5, 15);
}

/// Real clients of older versions, on a port of their exact version.
#[test]
fn clients_of_older_versions() {
    for (file, version) in [("5.0.rec", "5.0"), ("4.0.2.rec", "4.0.2"), ("4.0.1.rec", "4.0.1")] {
        check(file, version, 3, 3);
    }
}

/// The server answers 4.0.3 to every client of 4.0, and the numbers in the first graph tell the client's version.
#[test]
fn the_graphs_of_a_client_of_4_0_tell_its_version() {
    for file in ["4.0.2.rec", "4.0.1.rec"] {
        check(file, "4.0", 3, 3);
    }
}
