//! The driver of a replay: starts the server binary, sends it a recording's requests with translated handles and addresses, and
//! compares the responses with the recorded ones.

use crate::recording::{Direction, Record, Recording, split_request};
use crate::translate::Translator;
use fanout::rpc::wire::{HelloReply, Request, Response, RpcCommand};
use fanout::tensor::quant::dequantiser;
use fanout::tensor::{DType, TensorDesc};
use std::collections::HashMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::process::{Child, Command as Process, Stdio};
use std::time::Duration;

/// A process of the server binary on a free port; killed on drop.
pub(crate) struct ServerProcess {
    pub(crate) child: Child,
    address: String,
}

impl ServerProcess {
    /// Starts a server of a version of the protocol, as `--listen` names it.
    fn start(version: &str, threads: usize) -> ServerProcess {
        let listen = format!("127.0.0.1:0={version}");
        let mut child = Process::new(env!("CARGO_BIN_EXE_rpc-server"))
            // In one process, whose CPU time the benchmark reads.
            .args(["--no-supervise", "--listen", &listen, "-d", "CPU", "-t", &threads.to_string(), "--mem", "2G"])
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
        stream.set_nodelay(true).unwrap();
        stream
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Limit of the normalised mean squared error of a session's read values against those of llama.cpp's own server.
pub(crate) const MAX_NMSE: f64 = 1e-3;

/// Counts and errors of a replay.
#[derive(Default)]
pub(crate) struct ReplayStats {
    pub(crate) graphs: usize,
    pub(crate) round_trips: usize,
    pub(crate) reads: usize,
    /// Sum of the squared differences of read values.
    error: f64,
    /// Sum of the squared recorded values.
    power: f64,
}

impl ReplayStats {
    /// Normalised mean squared error of the read values.
    pub(crate) fn nmse(&self) -> f64 {
        self.error / self.power
    }
}

/// A session that is being replayed against a new server.
pub(crate) struct Replay<'a> {
    recording: &'a Recording,
    pub(crate) server: ServerProcess,
    streams: HashMap<u32, TcpStream>,
    /// The request of each connection whose response comes next.
    pending: HashMap<u32, &'a Record>,
    translator: Translator,
    pub(crate) stats: ReplayStats,
}

impl<'a> Replay<'a> {
    /// A replay against a server of `version`, as `--listen` names it, with `threads` threads.
    pub(crate) fn new(recording: &'a Recording, version: &str, threads: usize) -> Replay<'a> {
        Replay {
            recording,
            server: ServerProcess::start(version, threads),
            streams: HashMap::new(),
            pending: HashMap::new(),
            translator: Translator::default(),
            stats: ReplayStats::default(),
        }
    }

    /// Replays the records of a range and compares their responses.
    pub(crate) fn run(&mut self, range: Range<usize>) {
        for record in &self.recording.records[range] {
            match record.direction {
                Direction::Request => {
                    let frame = self.translated(record);
                    self.stream(record.connection).write_all(&frame).unwrap();
                    let command = split_request(&record.bytes).0;
                    let is_graph = matches!(command, RpcCommand::GraphCompute | RpcCommand::GraphRecompute);
                    self.stats.graphs += usize::from(is_graph);
                    self.pending.insert(record.connection, record);
                }
                Direction::Response => {
                    let request = self.pending.remove(&record.connection).expect("a response follows a request");
                    let command = split_request(&request.bytes).0;
                    let body = read_response(self.stream(record.connection), command);
                    self.stats.round_trips += 1;
                    if command.response().is_none() {
                        // Versions before 7.0 acknowledge some commands with an empty response.
                        assert!(record.bytes.len() == 8 && body.is_empty(), "the response to {}", command.name());
                        continue;
                    }
                    let recorded = Response::decode(command, &record.bytes[8..]).unwrap();
                    let response = Response::decode(command, &body).unwrap();
                    let request = self.recording.decode_request(&request.bytes).unwrap();
                    compare_responses(&request, &recorded, &response, &mut self.translator, &mut self.stats);
                }
            }
        }
    }

    /// A recorded request as this server's client would send it, given the responses so far.
    pub(crate) fn translated(&self, record: &Record) -> Vec<u8> {
        let (command, body) = split_request(&record.bytes);
        self.translator.request(command, body, self.recording.has_uid())
    }

    /// The stream of a recorded connection; connects if it is new.
    pub(crate) fn stream(&mut self, connection: u32) -> &mut TcpStream {
        self.streams.entry(connection).or_insert_with(|| self.server.connect())
    }
}

/// Reads the body of a response.
pub(crate) fn read_response(stream: &mut TcpStream, command: RpcCommand) -> Vec<u8> {
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
