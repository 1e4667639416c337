//! The report of a run: rates, times and bytes, as text and as JSON.

use std::fmt;
use std::time::Duration;

use fanout::weights::LoadStats;
use serde_json::{Value, json};

use crate::link_traffic::{LinkTraffic, Phase, ServerTraffic};

/// Results and measurements of a whole run.
#[derive(Clone, Debug, Default)]
pub struct Report {
    /// Architecture and file name of the model.
    pub model: String,
    /// Tokens of the prompt.
    pub prompt: Vec<u32>,
    /// Generated tokens.
    pub tokens: Vec<u32>,
    /// With several prompts, the tokens of each reply.
    pub replies: Vec<Vec<u32>>,
    /// By reply: why it ends before its last token; `None` if it is complete. Empty with a single prompt.
    pub errors: Vec<Option<String>>,
    /// Time from the start of loading until the last byte is on its device.
    pub load: Duration,
    /// Time from the submission of the prompt until the token that follows is read. With several prompts, the time during which any of them
    /// was evaluated.
    pub prompt_time: Duration,
    /// Time from the submission of each decoded token until the next one is read, without output. The first generated token is not
    /// among them: it follows from the prompt. With several prompts, all other time.
    pub decode_time: Duration,
    /// Tokens that were evaluated during `decode_time`.
    pub decoded: usize,
    /// Tokens per micro-batch.
    pub ubatch: usize,
    /// Pipeline depth: micro-batches in flight at a time.
    pub depth: usize,
    /// The graph of a micro-batch of the prompt.
    pub prompt_graph: GraphStats,
    /// The graph of a decoded token.
    pub decode_graph: GraphStats,
    /// The devices, in the order of the command line.
    pub devices: Vec<DeviceStats>,
    /// Traffic on the connections to servers.
    pub links: LinkTraffic,
    /// Losses that the run recovered from.
    pub losses: LossStats,
    /// By device: its compute time during `prompt_time` and `decode_time`; `None` for devices of servers, which are not timed.
    pub busy: Vec<[Option<Duration>; 2]>,
    /// The rates that the planner predicted; `None` without `--auto`.
    pub predicted: Option<PredictedRates>,
}

/// Rates that the planner predicted for a run.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PredictedRates {
    /// Prompt tokens per second.
    pub prompt: f64,
    /// Decoded tokens per second.
    pub decode: f64,
}

/// Servers that were lost during a run, and the cost of recovery.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LossStats {
    /// Number of losses, counted per server.
    pub servers: usize,
    /// Number of recoveries; one recovery may cover the losses of several servers.
    pub recoveries: usize,
    /// Total time of all recoveries. No other time of the report includes any of it. With several prompts also the time in which
    /// sequences were evaluated again, after a loss or after invalid logits.
    pub time: Duration,
}

/// The size of a graph, and how it is split over the devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GraphStats {
    /// Nodes.
    pub nodes: usize,
    /// Splits: sequences of consecutive nodes on one device.
    pub splits: usize,
    /// Tensors that each run copies from one device to another.
    pub copies: usize,
}

/// Memory, traffic and compute time of one device.
#[derive(Clone, Debug, Default)]
pub struct DeviceStats {
    /// Name of the device.
    pub name: String,
    /// Number of the model's blocks on the device.
    pub layers: usize,
    /// Bytes and time of loading the weights.
    pub weights: LoadStats,
    /// Bytes of weights that the device reads from the mapped file instead: not loaded.
    pub mapped_bytes: u64,
    /// Bytes of the KV cache.
    pub cache_bytes: u64,
    /// Bytes of the arenas for intermediate results.
    pub compute_bytes: u64,
    /// Bytes uploaded or copied to the device over the whole run, without weights.
    pub copied_bytes: u64,
    /// Compute time of the prompt; `None` for devices of servers, which are not timed.
    pub prompt_time: Option<Duration>,
    /// Compute time of the decoded tokens; `None` as for `prompt_time`.
    pub decode_time: Option<Duration>,
}

/// `count` per second; `None` if there is nothing to measure.
fn rate(count: usize, time: Duration) -> Option<f64> {
    let seconds = time.as_secs_f64();
    (count > 0 && seconds > 0.0).then(|| count as f64 / seconds)
}

/// Rounds to six decimals: microseconds, for a time in seconds.
fn rounded(x: f64) -> f64 {
    (x * 1e6).round() / 1e6
}

fn seconds(time: Duration) -> f64 {
    rounded(time.as_secs_f64())
}

impl Report {
    /// Prompt tokens per second.
    pub fn prompt_rate(&self) -> Option<f64> {
        rate(self.prompt.len(), self.prompt_time)
    }

    /// Decoded tokens per second.
    pub fn decode_rate(&self) -> Option<f64> {
        rate(self.decoded, self.decode_time)
    }

    /// Adds compute times of the devices to the sum of the prompts or of decoding; times of other phases are in no sum.
    pub fn add_busy_times(&mut self, phase: Phase, times: Vec<Option<Duration>>) {
        self.busy.resize(times.len(), [Some(Duration::ZERO); 2]);
        let column = match phase {
            Phase::Prompt => 0,
            Phase::Decode => 1,
            Phase::Load | Phase::Recovery => return,
        };
        for (sums, time) in self.busy.iter_mut().zip(times) {
            sums[column] = sums[column].zip(time).map(|(sum, time)| sum + time);
        }
    }

    /// The report as one JSON object. Times are in seconds (`_s`), MB are 10^6 bytes; a rate with nothing to measure is `null`.
    pub fn json(&self) -> Value {
        json!({
            "model": self.model,
            "prompt": self.prompt,
            "tokens": self.tokens,
            "replies": self.replies,
            "errors": self.errors,
            "load_s": seconds(self.load),
            "prompt_s": seconds(self.prompt_time),
            "prompt_tok_s": self.prompt_rate().map(rounded),
            "gen_s": seconds(self.decode_time),
            "gen_tok_s": self.decode_rate().map(rounded),
            "ubatch": self.ubatch,
            "depth": self.depth,
            "prompt_graph": self.prompt_graph.json(),
            "gen_graph": self.decode_graph.json(),
            "devices": self.devices.iter().map(DeviceStats::json).collect::<Vec<_>>(),
            "links": self.links.servers().iter().map(ServerTraffic::json).collect::<Vec<_>>(),
            "losses": self.losses.servers,
            "recoveries": self.losses.recoveries,
            "recovery_s": seconds(self.losses.time),
            "predicted_prompt_tok_s": self.predicted.map(|rates| rounded(rates.prompt)),
            "predicted_gen_tok_s": self.predicted.map(|rates| rounded(rates.decode)),
        })
    }
}

impl GraphStats {
    fn json(self) -> Value {
        json!({ "nodes": self.nodes, "splits": self.splits, "copies": self.copies })
    }
}

impl DeviceStats {
    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "layers": self.layers,
            "weight_bytes": self.weights.bytes,
            "weight_bytes_from_its_disk": self.weights.from_server_disk,
            "weight_bytes_sent": self.weights.sent(),
            "weight_bytes_mapped": self.mapped_bytes,
            "load_s": seconds(self.weights.time),
            "load_mb_s": self.weights.rate().map(rounded),
            "cache_bytes": self.cache_bytes,
            "compute_bytes": self.compute_bytes,
            "copied_bytes": self.copied_bytes,
            "prompt_s": self.prompt_time.map(seconds),
            "gen_s": self.decode_time.map(seconds),
        })
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rate = |rate: Option<f64>| rate.map_or(String::new(), |rate| format!(", {rate:.1} tok/s"));
        let loaded: u64 = self.devices.iter().map(|device| device.weights.bytes).sum();
        let of_all = LoadStats { bytes: loaded, from_server_disk: 0, time: self.load };
        let load_rate = of_all.rate().map_or(String::new(), |rate| format!(", {rate:.0} MB/s"));
        writeln!(f, "load    {:8.3} s  {:6} MB{load_rate}", self.load.as_secs_f64(), loaded / 1_000_000)?;
        let line = |f: &mut fmt::Formatter<'_>, name, time: Duration, tokens, per_second, graph: GraphStats| {
            write!(f, "{name:7} {:8.3} s  {tokens:6} tokens{}", time.as_secs_f64(), rate(per_second))?;
            writeln!(f, "; {} nodes, {} splits, {} copies", graph.nodes, graph.splits, graph.copies)
        };
        line(f, "prompt", self.prompt_time, self.prompt.len(), self.prompt_rate(), self.prompt_graph)?;
        line(f, "decode", self.decode_time, self.decoded, self.decode_rate(), self.decode_graph)?;
        if let Some(predicted) = self.predicted {
            let both =
                [("prompt", predicted.prompt, self.prompt_rate()), ("decode", predicted.decode, self.decode_rate())];
            for (name, predicted, measured) in both {
                let Some(measured) = measured else { continue };
                let ratio = measured / predicted;
                writeln!(f, "{name}: predicted {predicted:.1} tok/s, measured {measured:.1} tok/s (ratio {ratio:.2})")?;
            }
        }
        for device in &self.devices {
            writeln!(f, "{device}")?;
        }
        for server in self.links.servers() {
            let (load, decode) = (server.traffic(Phase::Load), server.traffic(Phase::Decode));
            let each = |bytes: u64| bytes.checked_div(self.decoded as u64).unwrap_or(0);
            write!(f, "{}: {:.1} MB sent to load; ", server.endpoint, load.sent as f64 / 1e6)?;
            let (sent, graphs) = (each(decode.sent.saturating_sub(decode.sent_graphs)), each(decode.sent_graphs));
            let received = each(decode.received);
            writeln!(f, "{sent} bytes sent, {received} received, and {graphs} of new graphs for each decoded token")?;
        }
        let LossStats { servers, recoveries, time } = self.losses;
        if recoveries > 0 {
            let seconds = time.as_secs_f64();
            writeln!(
                f,
                "servers were lost {servers} times; the run went on {recoveries} times, after {seconds:.3} s in all"
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for DeviceStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let megabytes = |bytes: u64| bytes as f64 / 1e6;
        let rate = self.weights.rate().map_or(String::new(), |rate| format!(" at {rate:.0} MB/s"));
        write!(f, "{}: {} layers, {:.1} MB of weights{rate}", self.name, self.layers, megabytes(self.weights.bytes))?;
        if self.weights.from_server_disk > 0 {
            let (from_disk, sent) = (megabytes(self.weights.from_server_disk), megabytes(self.weights.sent()));
            write!(f, " ({from_disk:.1} MB from its own disk, {sent:.1} MB sent)")?;
        }
        if self.mapped_bytes > 0 {
            write!(f, ", {:.1} MB mapped from the file", megabytes(self.mapped_bytes))?;
        }
        write!(f, ", ")?;
        write!(f, "{:.1} MB of KV cache, ", megabytes(self.cache_bytes))?;
        write!(f, "{:.1} MB of compute buffers, ", megabytes(self.compute_bytes))?;
        write!(f, "{:.1} MB copied to it", megabytes(self.copied_bytes))?;
        let (Some(prompt), Some(decode)) = (self.prompt_time, self.decode_time) else { return Ok(()) };
        let (prompt, decode) = (prompt.as_secs_f64(), decode.as_secs_f64());
        write!(f, "; busy for {prompt:.3} s of the prompt, {decode:.3} s of decoding")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Report {
        let device = DeviceStats {
            name: "CPU0".to_owned(),
            layers: 2,
            weights: LoadStats { bytes: 5_000_000, from_server_disk: 3_000_000, time: Duration::from_millis(500) },
            mapped_bytes: 0,
            cache_bytes: 2_000_000,
            compute_bytes: 1_500_000,
            copied_bytes: 4096,
            prompt_time: Some(Duration::from_millis(300)),
            decode_time: Some(Duration::from_millis(700)),
        };
        Report {
            model: "llama tiny.gguf".to_owned(),
            prompt: vec![1, 5, 9],
            tokens: vec![7, 8, 2],
            load: Duration::from_secs(1),
            prompt_time: Duration::from_millis(600),
            decode_time: Duration::from_millis(800),
            decoded: 2,
            ubatch: 512,
            depth: 4,
            prompt_graph: GraphStats { nodes: 60, splits: 2, copies: 5 },
            decode_graph: GraphStats { nodes: 58, splits: 2, copies: 4 },
            devices: vec![device],
            losses: LossStats { servers: 3, recoveries: 2, time: Duration::from_millis(1500) },
            predicted: Some(PredictedRates { prompt: 10.0, decode: 2.0 }),
            ..Report::default()
        }
    }

    #[test]
    fn json_has_ids_rates_and_bytes() {
        let json = sample().json();
        assert_eq!(json["tokens"], json!([7, 8, 2]));
        assert_eq!(
            (&json["load_s"], &json["prompt_tok_s"], &json["gen_tok_s"]),
            (&json!(1.0), &json!(5.0), &json!(2.5))
        );
        assert_eq!(json["prompt_graph"], json!({ "nodes": 60, "splits": 2, "copies": 5 }));
        let device = &json["devices"][0];
        assert_eq!((&device["name"], &device["weight_bytes"]), (&json!("CPU0"), &json!(5_000_000)));
        let (disk, sent) = (&device["weight_bytes_from_its_disk"], &device["weight_bytes_sent"]);
        assert_eq!((disk, sent), (&json!(3_000_000), &json!(2_000_000)));
        assert_eq!((&device["load_mb_s"], &device["copied_bytes"]), (&json!(10.0), &json!(4096)));
        assert_eq!((&json["losses"], &json["recoveries"], &json["recovery_s"]), (&json!(3), &json!(2), &json!(1.5)));
        assert_eq!(json["links"], json!([]));
        assert_eq!((&json["predicted_prompt_tok_s"], &json["predicted_gen_tok_s"]), (&json!(10.0), &json!(2.0)));
        // Scripts read the report as the last line of the output, so it must be a single line.
        assert!(!json.to_string().contains('\n'));
    }

    #[test]
    fn busy_times_are_added_by_device_and_phase() {
        let mut report = Report::default();
        let times = |ms| vec![Some(Duration::from_millis(ms)), None];
        for (phase, ms) in [(Phase::Prompt, 1), (Phase::Recovery, 100), (Phase::Decode, 10), (Phase::Prompt, 2)] {
            report.add_busy_times(phase, times(ms));
        }
        let sums = [3, 10].map(|ms| Some(Duration::from_millis(ms)));
        assert_eq!(report.busy, [sums, [None; 2]], "the second device is that of a server");
    }

    #[test]
    fn rates_without_a_measurement_are_null() {
        let json = Report { prompt: vec![1], tokens: vec![2], ..Report::default() }.json();
        assert_eq!((&json["prompt_tok_s"], &json["gen_tok_s"]), (&Value::Null, &Value::Null));
        assert!(!Report::default().to_string().contains("tok/s"));
    }

    #[test]
    fn the_text_report_has_one_line_per_phase_and_device() {
        let expected = "\
load       1.000 s       5 MB, 5 MB/s
prompt     0.600 s       3 tokens, 5.0 tok/s; 60 nodes, 2 splits, 5 copies
decode     0.800 s       2 tokens, 2.5 tok/s; 58 nodes, 2 splits, 4 copies
prompt: predicted 10.0 tok/s, measured 5.0 tok/s (ratio 0.50)
decode: predicted 2.0 tok/s, measured 2.5 tok/s (ratio 1.25)
CPU0: 2 layers, 5.0 MB of weights at 10 MB/s (3.0 MB from its own disk, 2.0 MB sent), 2.0 MB of KV cache, 1.5 MB of compute buffers, 0.0 MB copied to it; \
busy for 0.300 s of the prompt, 0.700 s of decoding
servers were lost 3 times; the run went on 2 times, after 1.500 s in all
";
        assert_eq!(sample().to_string(), expected);
    }
}
