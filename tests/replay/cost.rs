//! The cost of a decoded token: round trips and bytes, counted in the recordings, and the server's CPU time, measured by a
//! replay.

use crate::driver::{Replay, read_response};
use crate::recording::{Direction, Record, Recording, split_request};
use fanout::rpc::wire::RpcCommand;
use std::io::Write;
use std::ops::Range;

/// Sessions of the same model, prompt and number of tokens: 7.0 and 8.0.
const RECORDINGS: [&str; 2] = ["decode-7.rec", "decode-8.rec"];
/// Tokens that each of them decodes behind the prompt.
const TOKENS: usize = 200;

/// The records that decode the tokens: behind the prompt's logits, up to the last logits.
fn decoding(recording: &Recording) -> Range<usize> {
    let mut command = None;
    let mut reads = Vec::new();
    for (index, record) in recording.records.iter().enumerate() {
        match record.direction {
            Direction::Request => command = Some(split_request(&record.bytes).0),
            Direction::Response if command == Some(RpcCommand::GetTensor) => reads.push(index),
            Direction::Response => {}
        }
    }
    assert_eq!(reads.len(), 1 + TOKENS, "the client reads the logits of the prompt and of each token");
    reads[0] + 1..reads[TOKENS] + 1
}

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

/// Replays both sessions, with their values compared, and counts the responses that this crate's server sent for the tokens.
#[test]
fn a_token_of_protocol_8_takes_no_more_round_trips() {
    let round_trips = |(file, version): (&str, &str)| {
        let recording = Recording::read(file);
        let mut replay = Replay::new(&recording, version, 2);
        let decoding = decoding(&recording);
        replay.run(0..decoding.start);
        let before = replay.stats.round_trips;
        replay.run(decoding);
        assert!(replay.stats.nmse() <= 1e-3, "{file}: NMSE {:.2e}", replay.stats.nmse());
        replay.stats.round_trips - before
    };
    let [seven, eight] = [(RECORDINGS[0], "7"), (RECORDINGS[1], "8")].map(round_trips);
    assert!(TOKENS <= eight && eight <= seven, "{eight} round trips of 8.0, {seven} of 7.0");
}

/// The measurement needs the CPU time of another process's threads, which Linux has.
#[cfg(target_os = "linux")]
mod cpu_time {
    use super::*;
    use fanout::rpc::wire::{Request, TensorRecord};
    use std::collections::HashSet;

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
            let process = self.replay.server.id();
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

    #[test]
    #[ignore = "a measurement, of an optimised server: scripts/bench.sh replay"]
    fn print_the_cost_of_a_token() {
        let rounds: usize = std::env::var("FANOUT_REPLAY_ROUNDS").map_or(5, |text| text.parse().unwrap());
        let [seven, eight] = RECORDINGS.map(Recording::read);
        let uploads: HashSet<String> =
            requests(&seven).filter_map(|record| upload_name(&seven, &record.bytes)).collect();
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
}
