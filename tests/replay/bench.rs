//! Benchmark: what a decoded token of protocols 7.0 and 8.0 costs. Round trips and bytes are counted in two recorded sessions of
//! the same work, and the server's CPU time is measured by a replay. The CPU time of another process's threads is read as Linux
//! reports it.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic)] // a measurement that fails is a panic

mod cost;
mod driver;
mod recording;
mod translate;

use cost::{RECORDINGS, TOKENS, decoding};
use driver::{MAX_NMSE, Replay, read_response};
use fanout::rpc::wire::{Request, RpcCommand, TensorRecord};
use recording::{Direction, Record, Recording, split_request};
use std::collections::HashSet;
use std::io::Write;

/// Rounds if `--rounds` is not given.
const DEFAULT_ROUNDS: usize = 5;

/// What a client and a server exchange while they decode.
#[derive(Default)]
struct Traffic {
    requests: usize,
    round_trips: usize,
    sent: usize,
    received: usize,
}

/// The traffic of the requests that `is_sent`, and of all responses.
fn traffic(recording: &Recording, is_sent: impl Fn(&Record) -> bool) -> Traffic {
    let mut traffic = Traffic::default();
    for record in &recording.records[decoding(recording)] {
        match record.direction {
            Direction::Request if !is_sent(record) => {}
            Direction::Request => {
                traffic.requests += 1;
                traffic.sent += record.bytes.len();
            }
            Direction::Response => {
                traffic.round_trips += 1;
                traffic.received += record.bytes.len();
            }
        }
    }
    traffic
}

/// How often each side decodes all tokens in a round.
const PASSES: usize = 30;

/// A side of the comparison.
struct Side<'a> {
    recording: &'a Recording,
    /// Tensors whose uploads are sent; `None`: all.
    only: Option<&'a HashSet<String>>,
    /// Microseconds of the server's CPU time per token, of each round.
    times: Vec<f64>,
}

impl Side<'_> {
    fn is_sent(&self, record: &Record) -> bool {
        match (self.only, upload_name(self.recording, &record.bytes)) {
            (Some(only), Some(name)) => only.contains(&name),
            _ => true,
        }
    }

    fn name(&self) -> String {
        let uploads = if self.only.is_some() { " with the uploads of 7.0" } else { "" };
        format!("{}.{}{uploads}", self.recording.version.major, self.recording.version.minor)
    }
}

/// The name that llama.cpp gave a tensor: the client wraps it as `RPC0[127.0.0.1:50052]#name#0`.
fn tensor_name(tensor: &TensorRecord) -> String {
    let name = tensor.name();
    name.split('#').nth(1).unwrap_or(&name).to_owned()
}

/// The name of the tensor to which a request uploads data.
fn upload_name(recording: &Recording, frame: &[u8]) -> Option<String> {
    match recording.decode_request(frame).unwrap() {
        Request::SetTensor(request) => Some(tensor_name(&request.head.tensor)),
        _ => None,
    }
}

/// The recorded requests that decode the tokens, in order.
fn requests(recording: &Recording) -> impl Iterator<Item = &Record> {
    recording.records[decoding(recording)].iter().filter(|record| record.direction == Direction::Request)
}

/// A session with a server of its own that decodes the recorded tokens again and again.
struct DecodingSession<'a> {
    replay: Replay<'a>,
    /// Connection, requests up to one with a reply, and the command of that one. The requests are one write: sent one by
    /// one, the time in which the server polls for the next one, which is the time that this process takes to send it,
    /// would count as the server's.
    round_trips: Vec<(u32, Vec<u8>, RpcCommand)>,
    /// CPU time of the server's threads in the measured passes, in nanoseconds.
    spent: u64,
}

impl<'a> DecodingSession<'a> {
    fn new(side: &Side<'a>) -> DecodingSession<'a> {
        let mut replay = Replay::new(side.recording, if side.recording.has_uid() { "8" } else { "7" }, 1);
        replay.run(0..decoding(side.recording).end);
        let nmse = replay.stats.nmse();
        assert!(nmse <= MAX_NMSE, "NMSE {nmse:.2e} against llama.cpp's own server");
        let mut round_trips = Vec::new();
        let mut frames = Vec::new();
        for record in requests(side.recording).filter(|record| side.is_sent(record)) {
            let command = split_request(&record.bytes).0;
            frames.extend(replay.translated(record));
            if command.response().is_some() {
                round_trips.push((record.connection, std::mem::take(&mut frames), command));
            }
        }
        assert!(frames.is_empty(), "the last request has a reply");
        DecodingSession { replay, round_trips, spent: 0 }
    }

    /// Decodes all tokens once and adds the server's CPU time.
    fn run_pass(&mut self) {
        let process = self.replay.server.child.id();
        let before = cpu_nanoseconds(process);
        for (connection, frames, command) in &self.round_trips {
            let stream = self.replay.stream(*connection);
            stream.write_all(frames).unwrap();
            read_response(stream, *command);
        }
        self.spent += cpu_nanoseconds(process) - before;
    }
}

/// CPU time of the process's running threads. None ends while a session decodes.
fn cpu_nanoseconds(process: u32) -> u64 {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of_task = |task: std::fs::DirEntry| {
        let text = std::fs::read_to_string(task.path().join("schedstat")).unwrap();
        text.split_whitespace().next().unwrap().parse::<u64>().unwrap()
    };
    tasks.map(|task| of_task(task.unwrap())).sum()
}

/// Median, lowest and highest value.
fn spread(values: &[f64]) -> String {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    format!("{:.3} [{:.3}-{:.3}]", sorted[sorted.len() / 2], sorted[0], sorted[sorted.len() - 1])
}

/// The number of rounds: the value of `--rounds`. Cargo passes `--bench` as well.
fn rounds() -> usize {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match &arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [] => DEFAULT_ROUNDS,
        ["--rounds", count] if count.parse().is_ok_and(|count: usize| count > 0) => count.parse().unwrap(),
        other => panic!("expected --rounds N with N above 0, got {other:?}"),
    }
}

fn main() {
    let rounds = rounds();
    let [seven, eight] = RECORDINGS.map(Recording::read);
    let uploads: HashSet<String> = requests(&seven).filter_map(|record| upload_name(&seven, &record.bytes)).collect();
    let mut sides = [(&seven, None), (&eight, None), (&eight, Some(&uploads))].map(|(recording, only)| Side {
        recording,
        only,
        times: Vec::new(),
    });
    for _ in 0..rounds {
        let mut sessions = sides.each_ref().map(DecodingSession::new);
        // In turn, so that all sides find the machine in the same state.
        for pass in 0..PASSES {
            (0..sessions.len()).for_each(|at| sessions[(at + pass) % 3].run_pass());
        }
        for (side, session) in sides.iter_mut().zip(&sessions) {
            side.times.push(session.spent as f64 / 1e3 / (PASSES * TOKENS) as f64);
        }
    }
    println!("per token of {TOKENS}: medians of {rounds} rounds [lowest-highest]");
    for side in &sides {
        let traffic = traffic(side.recording, |record| side.is_sent(record));
        let each = |count: usize| count as f64 / TOKENS as f64;
        println!(
            "{}: {:.2} round trips, {:.2} requests, {:.0} bytes sent, {:.0} received, CPU time of the server {} us",
            side.name(),
            each(traffic.round_trips),
            each(traffic.requests),
            each(traffic.sent),
            each(traffic.received),
            spread(&side.times),
        );
    }
    for side in &sides[1..] {
        let ratios: Vec<f64> = side.times.iter().zip(&sides[0].times).map(|(eight, seven)| eight / seven).collect();
        println!("CPU time of {} / 7.0: {}", side.name(), spread(&ratios));
    }
}
