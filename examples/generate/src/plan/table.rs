//! A plan as text and as JSON.

use super::Plan;
use fanout::sched::planner::{Candidate, Machine, Stage};
use serde_json::{Value, json};
use std::fmt;

/// Rows of the table at most.
const ROWS: usize = 10;

impl Plan {
    /// The plan as one JSON object. Times are in seconds (`_s`), rates in tokens per second.
    pub(super) fn json(&self) -> Value {
        let others = &self.choice.runners_up;
        json!({
            "best": self.candidate_json(&self.choice.best),
            "reason": self.choice.reason.to_string(),
            "others": others.iter().map(|candidate| self.candidate_json(candidate)).collect::<Vec<_>>(),
            "devices": self.machine.devices().iter().map(|device| json!({
                "name": device.name,
                "read_bytes_s": device.read_rate,
                "few_columns_multiply_adds_s": device.few_columns_rate,
                "many_columns_multiply_adds_s": device.many_columns_rate,
                "kv_read_bytes_s": device.kv_read_rate,
                "cores": device.cores,
                "rates_together": device.together,
                "node_s": device.node_time,
                "run_s": device.run_time,
                "free_bytes": device.free,
            })).collect::<Vec<_>>(),
            "notes": self.notes,
            "command": self.command,
        })
    }

    fn candidate_json(&self, candidate: &Candidate) -> Value {
        let prediction = &candidate.prediction;
        let stage = |stage: &Stage| {
            json!({
                "devices": stage.devices.iter().map(|&device| self.name(device)).collect::<Vec<_>>(),
                "shares": stage.shares,
                "layers": stage.blocks.len(),
            })
        };
        json!({
            "stages": candidate.stages.iter().map(stage).collect::<Vec<_>>(),
            "gen_tok_s": prediction.decode_rate,
            "gen_tok_s_range": decode_range(candidate),
            "prompt_tok_s": prediction.prompt_rate,
            "request_s": prediction.request_time(&self.workload),
            "load_s": prediction.load_time,
            "memory_bytes": prediction.memory,
        })
    }

    fn name(&self, device: usize) -> &str {
        device_name(&self.machine, device)
    }
}

/// Decoded tokens per second on the slowest and on the fastest devices that the measurements permit.
fn decode_range(candidate: &Candidate) -> [f64; 2] {
    candidate.range.each_ref().map(|prediction| prediction.decode_rate)
}

fn device_name(machine: &Machine, device: usize) -> &str {
    machine.devices().get(device).map_or("", |device| &device.name)
}

/// A placement in a few words: `CPU 12 layers, tensor CUDA0 75% CUDA1 25% 20 layers`.
pub(super) fn placement_text(machine: &Machine, stages: &[Stage]) -> String {
    let stage = |stage: &Stage| {
        let rank = |(&device, share): (&usize, &f64)| format!("{} {:.0}%", device_name(machine, device), 100.0 * share);
        let devices = match &stage.devices[..] {
            [device] => device_name(machine, *device).to_owned(),
            ranks => format!("tensor {}", ranks.iter().zip(&stage.shares).map(rank).collect::<Vec<_>>().join(" ")),
        };
        if stages.len() == 1 { devices } else { format!("{devices} {} layers", stage.blocks.len()) }
    };
    stages.iter().map(stage).collect::<Vec<_>>().join(", ")
}

impl fmt::Display for Plan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let best = &self.choice.best;
        writeln!(f, "  decode                 prompt      load    placement")?;
        writeln!(f, "  tok/s                  tok/s       s")?;
        for (number, candidate) in [best].into_iter().chain(&self.choice.runners_up).take(ROWS).enumerate() {
            let (mark, prediction) = (if number == 0 { '*' } else { ' ' }, &candidate.prediction);
            let (decode, prompt, load) = (prediction.decode_rate, prediction.prompt_rate, prediction.load_time);
            let placement = placement_text(&self.machine, &candidate.stages);
            let [slowest, fastest] = decode_range(candidate);
            let decode = format!("{decode:.2} ({slowest:.2}-{fastest:.2})");
            writeln!(f, "{mark} {decode:<22} {prompt:<11.1} {load:<7.1} {placement}")?;
        }
        writeln!(f, "chosen: {}: {}", placement_text(&self.machine, &best.stages), self.choice.reason)?;
        for (device, bytes) in self.machine.devices().iter().zip(&best.prediction.memory) {
            if *bytes > 0 {
                writeln!(f, "memory: {}: {} of {} MiB free", device.name, bytes.div_ceil(1 << 20), device.free >> 20)?;
            }
        }
        let load = "without hashing and reading of disks";
        writeln!(f, "loading: {:.1} s over the links, {load}", best.prediction.load_time)?;
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))?;
        writeln!(f, "{}", self.command)
    }
}
