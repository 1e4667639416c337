//! Recorded sessions of real llama.cpp clients, replayed against the server binary.
//!
//! `tests/rpc/recordings/` holds what a client of protocol 7.0 and llama.cpp's own server said to each other. The client's
//! messages go to our server with handles and addresses translated; what it answers must match the recorded server.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a test says what it needs by failing

mod recording;
mod translate;

use fanout::rpc::wire::{Command, Limits, Request, Response};
use fanout::tensor::quant::dequantiser;
use fanout::tensor::{DType, TensorDesc};
use recording::{Direction, Record, read};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;
use translate::Translator;

const LIMITS: Limits = Limits::new(1 << 16, 1 << 17, 1 << 28);

/// The server binary on a free port; killed when dropped.
struct Server {
    child: Child,
    address: String,
}

impl Server {
    fn start() -> Server {
        let mut child = Process::new(env!("CARGO_BIN_EXE_rpc-server"))
            .args(["-H", "127.0.0.1", "-p", "0", "-t", "2", "--mem", "2G"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let address = lines
            .map(|line| line.unwrap())
            .find_map(|line| Some(line.split_once("listening on ")?.1.split_whitespace().next()?.to_owned()))
            .expect("the server says where it listens");
        Server { child, address }
    }

    fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(&self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whatever a session was compared by.
#[derive(Default)]
struct Tally {
    requests: usize,
    graphs: usize,
    reads: usize,
    error: f64,
    power: f64,
}

fn replay(file: &str) -> Tally {
    let server = Server::start();
    let mut streams: HashMap<u32, TcpStream> = HashMap::new();
    let mut pending: HashMap<u32, (Command, Vec<u8>)> = HashMap::new();
    let mut translator = Translator::default();
    let mut tally = Tally::default();
    for Record { connection, direction, bytes } in read(file) {
        let stream = streams.entry(connection).or_insert_with(|| server.connect());
        match direction {
            Direction::Request => {
                let (command, body) = recording::request(&bytes);
                let request = Request::decode(command, body, &LIMITS).unwrap();
                stream.write_all(&translator.request(&request)).unwrap();
                tally.requests += 1;
                tally.graphs += usize::from(matches!(command, Command::GraphCompute | Command::GraphRecompute));
                pending.insert(connection, (command, body.to_vec()));
            }
            Direction::Response => {
                let (command, body) = pending.remove(&connection).expect("a response follows a request");
                let recorded = Response::decode(command, &bytes[8..]).unwrap();
                let answer = response(stream, command);
                let answer = Response::decode(command, &answer).unwrap();
                let request = Request::decode(command, &body, &LIMITS).unwrap();
                compare(&request, &recorded, &answer, &mut translator, &mut tally);
            }
        }
    }
    tally
}

fn response(stream: &mut TcpStream, command: Command) -> Vec<u8> {
    let mut size = [0; 8];
    stream.read_exact(&mut size).unwrap_or_else(|e| panic!("the answer to {}: {e}", command.name()));
    let mut body = vec![0; u64::from_le_bytes(size) as usize];
    stream.read_exact(&mut body).unwrap();
    body
}

fn compare(
    request: &Request<'_>,
    recorded: &Response<'_>,
    answer: &Response<'_>,
    t: &mut Translator,
    tally: &mut Tally,
) {
    match (request, recorded, answer) {
        (Request::AllocBuffer(_), Response::AllocBuffer(theirs), Response::AllocBuffer(ours)) => {
            assert!(ours.remote_ptr != 0 && ours.remote_size >= theirs.remote_size.min(ours.remote_size));
            t.allocated(theirs.remote_ptr, ours.remote_ptr, theirs.remote_size);
        }
        (Request::BufferGetBase(r), Response::BufferGetBase(theirs), Response::BufferGetBase(ours)) => {
            assert!(*ours != 0 && ours.is_multiple_of(64));
            t.based(r.remote_ptr, *theirs, *ours);
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
                tally.error += f64::from(got - want).powi(2);
                tally.power += f64::from(want).powi(2);
            }
            tally.reads += 1;
        }
        (Request::GetAllocSize(r), _, Response::GetAllocSize(ours)) => {
            let desc = TensorDesc::strided(
                DType::from_wire(r.tensor.dtype).unwrap(),
                r.tensor.ne.map(|n| n as usize),
                r.tensor.nb.map(|n| n as usize),
            );
            assert!(*ours >= desc.unwrap().extent() as u64);
        }
        // The byte of it that clients ignore is a server's own.
        (Request::Hello(_), Response::Hello(theirs), Response::Hello(ours)) => {
            assert_eq!((theirs.version, theirs.conn_caps), (ours.version, ours.conn_caps));
        }
        (Request::GetDeviceMemory(_), _, Response::GetDeviceMemory(ours)) => assert!(ours.free <= ours.total),
        // Figures of their own: alignment, largest buffer.
        (Request::GetAlignment(_) | Request::GetMaxSize(_), ..) => {}
        (_, theirs, ours) => assert_eq!(theirs, ours, "the answer to {}", request.command().name()),
    }
}

fn check(file: &str, reads: usize, bound: f64) {
    let tally = replay(file);
    let nmse = tally.error / tally.power;
    assert!(tally.graphs >= 5 && tally.reads >= reads, "{} graphs, {} reads", tally.graphs, tally.reads);
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
fn a_model_with_its_cache_on_the_client() {
    check("kv-on-host.rec", 15, 1e-3);
}
