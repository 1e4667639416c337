//! Replays recorded sessions of llama.cpp clients against the server binary.
//!
//! The files in `tests/rpc/recordings/` contain the messages between a client of protocol 7.0 and llama.cpp's own server. The
//! test sends the client's requests to this crate's server, with translated handles and addresses, and compares the responses
//! with the recorded ones.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a failed expectation of a test is a panic

mod recording;
mod translate;

use fanout::rpc::wire::{Limits, Request, Response, RpcCommand};
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
    fn start() -> ServerProcess {
        let mut child = Process::new(env!("CARGO_BIN_EXE_rpc-server"))
            .args(["--listen", "127.0.0.1:0=7", "-t", "2", "--mem", "2G"])
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

/// Replays the session in a recording against a new server.
fn replay(file: &str) -> ReplayStats {
    let server = ServerProcess::start();
    let mut streams: HashMap<u32, TcpStream> = HashMap::new();
    let mut pending: HashMap<u32, (RpcCommand, Vec<u8>)> = HashMap::new();
    let mut translator = Translator::default();
    let mut stats = ReplayStats::default();
    for Record { connection, direction, bytes } in read_recording(file) {
        let stream = streams.entry(connection).or_insert_with(|| server.connect());
        match direction {
            Direction::Request => {
                let (command, body) = recording::split_request(&bytes);
                let request = Request::decode(command, body, &LIMITS).unwrap();
                stream.write_all(&translator.request(&request)).unwrap();
                stats.requests += 1;
                stats.graphs += usize::from(matches!(command, RpcCommand::GraphCompute | RpcCommand::GraphRecompute));
                pending.insert(connection, (command, body.to_vec()));
            }
            Direction::Response => {
                let (command, body) = pending.remove(&connection).expect("a response follows a request");
                let recorded = Response::decode(command, &bytes[8..]).unwrap();
                let body_received = read_response(stream, command);
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
        // The padding byte, which differs between servers, is not compared.
        (Request::Hello(_), Response::Hello(theirs), Response::Hello(ours)) => {
            assert_eq!((theirs.version, theirs.conn_caps), (ours.version, ours.conn_caps));
        }
        (Request::GetDeviceMemory(_), _, Response::GetDeviceMemory(ours)) => assert!(ours.free <= ours.total),
        // Alignment and maximum buffer size differ between servers.
        (Request::GetAlignment(_) | Request::GetMaxSize(_), ..) => {}
        (_, theirs, ours) => assert_eq!(theirs, ours, "the response to {}", request.command().name()),
    }
}

/// Replays a recording. It must have at least `reads` GET_TENSORs, and the NMSE of the read values must not exceed `bound`.
fn check(file: &str, reads: usize, bound: f64) {
    let stats = replay(file);
    let nmse = stats.error / stats.power;
    assert!(stats.graphs >= 5 && stats.reads >= reads, "{} graphs, {} reads", stats.graphs, stats.reads);
    assert!(nmse <= bound, "{file}: NMSE {nmse:.2e} against llama.cpp's own server, at most {bound:.0e}");
}

#[test]
fn a_dense_model() {
    check("dense.rec", 5, 1e-3);
}

#[test]
fn a_mixture_of_experts() {
    check("moe.rec", 5, 1e-3);
}

#[test]
fn a_model_with_its_kv_cache_on_the_client() {
    check("kv-on-host.rec", 15, 1e-3);
}
