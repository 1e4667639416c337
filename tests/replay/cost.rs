//! The cost of a decoded token: round trips and bytes, counted in the recordings, and the server's CPU time, measured by a replay.

use crate::driver::{Replay, read_response};
use crate::recording::{Direction, Recording, split_request};
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

fn traffic(recording: &Recording) -> Traffic {
    let mut traffic = Traffic::default();
    for record in &recording.records[decoding(recording)] {
        match record.direction {
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

#[test]
fn a_token_of_protocol_8_takes_no_more_round_trips() {
    let [seven, eight] = RECORDINGS.map(|file| traffic(&Recording::read(file)).round_trips);
    assert!(TOKENS <= eight && eight <= seven, "{eight} round trips of 8.0, {seven} of 7.0");
}

/// The measurement needs the CPU time of another process's threads, which Linux has.
#[cfg(target_os = "linux")]
mod cpu_time {
    use super::*;

    /// How often a measurement decodes all tokens again.
    const PASSES: usize = 20;

    /// Microseconds of the server's CPU time per token: of all its threads, while the recorded tokens are decoded again and again.
    /// The client's side only sends what was prepared before, so it never keeps the server waiting for long.
    fn per_token(recording: &Recording) -> f64 {
        let range = decoding(recording);
        let mut replay = Replay::new(recording, 1);
        replay.run(0..range.end);
        let requests: Vec<_> = recording.records[range]
            .iter()
            .filter(|record| record.direction == Direction::Request)
            .map(|record| (record.connection, split_request(&record.bytes).0, replay.translated(record)))
            .collect();
        let process = replay.server.id();
        let mut decode_all = || {
            for (connection, command, frame) in &requests {
                let stream = replay.stream(*connection);
                stream.write_all(frame).unwrap();
                if command.response().is_some() {
                    read_response(stream, *command);
                }
            }
        };
        decode_all();
        let before = cpu_nanoseconds(process);
        (0..PASSES).for_each(|_| decode_all());
        let spent = cpu_nanoseconds(process) - before;
        spent as f64 / 1e3 / (PASSES * TOKENS) as f64
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

    fn median(values: &[f64]) -> f64 {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        sorted[sorted.len() / 2]
    }

    fn spread(values: &[f64]) -> String {
        let lowest = values.iter().copied().fold(f64::INFINITY, f64::min);
        let highest = values.iter().copied().fold(0.0, f64::max);
        format!("{:.3} [{lowest:.3}-{highest:.3}]", median(values))
    }

    #[test]
    #[ignore = "a measurement, of an optimised server: scripts/bench.sh replay"]
    fn print_the_cost_of_a_token() {
        let rounds: usize = std::env::var("FANOUT_REPLAY_ROUNDS").map_or(5, |text| text.parse().unwrap());
        let recordings = RECORDINGS.map(Recording::read);
        let mut times = [Vec::new(), Vec::new()];
        for round in 0..rounds {
            // The first side may find the machine in another state.
            for side in [round % 2, 1 - round % 2] {
                times[side].push(per_token(&recordings[side]));
            }
        }
        println!("per token of {TOKENS}: medians of {rounds} rounds [lowest-highest]");
        for (recording, times) in recordings.iter().zip(&times) {
            let traffic = traffic(recording);
            let each = |count: usize| count as f64 / TOKENS as f64;
            println!(
                "protocol {}.{}: {:.2} round trips, {:.2} requests, {:.0} bytes sent, {:.0} received, server's CPU time {} us",
                recording.version.major,
                recording.version.minor,
                each(traffic.round_trips),
                each(traffic.requests),
                each(traffic.sent),
                each(traffic.received),
                spread(times),
            );
        }
        let ratios: Vec<f64> = times[1].iter().zip(&times[0]).map(|(eight, seven)| eight / seven).collect();
        println!("CPU time of 8.0 / 7.0: {}", spread(&ratios));
    }
}
