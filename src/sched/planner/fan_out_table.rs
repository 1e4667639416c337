//! The tables of docs/fan-out.md, computed by the planner: the document must have these rows.

use super::{BlockSizes, DeviceSpeed, Goal, Host, Link, Machine, ModelSizes, PeerLink, Workload, choose};
use std::fmt::Write;

/// Links of two servers with the client and with each other: name, round trip in seconds, bytes per second.
const LINKS: [(&str, f64, f64); 4] = [
    ("one host", 20e-6, 2e9),
    ("10 Gbit/s, 0.1 ms", 100e-6, 1.18e9),
    ("1 Gbit/s, 0.3 ms", 300e-6, 118e6),
    ("100 Mbit/s, 1 ms", 1e-3, 11.8e6),
];

/// Devices on servers that are numbered when there are several.
fn cpu() -> DeviceSpeed {
    DeviceSpeed {
        name: "CPU".to_owned(),
        host: Host::Server(0),
        read_rate: 50e9,
        few_columns_rate: 0.7e12,
        many_columns_rate: 1e12,
        kv_read_rate: 50e9,
        node_time: 2e-6,
        run_time: 30e-6,
        cores: None,
        together: 1.0,
        free: 64 << 30,
        collectives: true,
    }
}

fn gpu() -> DeviceSpeed {
    DeviceSpeed {
        name: "GPU".to_owned(),
        read_rate: 800e9,
        few_columns_rate: 30e12,
        many_columns_rate: 30e12,
        kv_read_rate: 800e9,
        node_time: 4e-6,
        free: 24 << 30,
        collectives: false,
        ..cpu()
    }
}

/// A model of llama's architecture with weights of 4.5 bits and a KV cache of F16.
fn model(blocks: usize, width: u64, ff: u64, heads: u64, kv_width: u64, tied: bool) -> ModelSizes {
    let bytes = |weights: u64| weights * 9 / 16;
    let weights = 2 * width * width + 2 * width * kv_width + 3 * width * ff;
    let block = BlockSizes {
        weight_bytes: bytes(weights),
        multiply_adds: weights as f64,
        kv_bytes: 4 * kv_width,
        nodes: 24,
        ..BlockSizes::default()
    };
    let vocabulary = 128_256;
    ModelSizes {
        blocks: vec![block; blocks],
        embedding_bytes: bytes(vocabulary * width),
        output_bytes: bytes(vocabulary * width),
        tied,
        width,
        heads,
        kv_heads: 8,
        vocabulary,
        scratch_bytes: 4 * (6 * width + 3 * ff),
        ..ModelSizes::default()
    }
}

/// 1B, 8B and 70B, with the shapes of Llama 3.
fn models() -> [ModelSizes; 3] {
    [
        model(16, 2048, 8192, 32, 512, true),
        model(32, 4096, 14336, 32, 1024, false),
        model(80, 8192, 28672, 64, 1024, false),
    ]
}

fn machine(count: usize, device: &DeviceSpeed, link: (&str, f64, f64)) -> Machine {
    let link = Link { round_trip: link.1, bandwidth: link.2 };
    let device = |server: usize| DeviceSpeed { host: Host::Server(server), ..device.clone() };
    let within = Link { round_trip: 10e-6, bandwidth: 5e9 };
    Machine::new(
        (0..count).map(device).collect(),
        vec![link; count],
        vec![vec![Some(PeerLink::direct(link)); count]; count],
        within,
    )
    .unwrap()
}

fn workload(sequences: u32) -> Workload {
    let (prompt_tokens, decode_tokens, context) = (512, 128, 640);
    let (micro_batch, depth, input_bytes, result_bytes) = (512, 4, 16.0, 16.0);
    let (max_groups, goal) = (sequences.min(4), Goal::DecodeRate);
    Workload {
        sequences,
        max_groups,
        prompt_tokens,
        decode_tokens,
        context,
        micro_batch,
        depth,
        input_bytes,
        result_bytes,
        goal,
    }
}

/// Three significant digits.
fn digits(x: f64) -> String {
    let places = if x < 9.995 { 2 } else { usize::from(x < 99.95) };
    format!("{x:.places$}")
}

/// The best rate of one device, and of two if they gain enough to be chosen, with how they are used.
fn cell(device: &DeviceSpeed, link: (&str, f64, f64), model: &ModelSizes, workload: &Workload) -> String {
    let rate = |count| choose(&machine(count, device, link), model, workload).ok().map(|choice| choice.best);
    let one = rate(1).map_or("none".to_owned(), |best| digits(best.prediction.decode_rate));
    let Some(best) = rate(2).filter(|best| best.devices() > 1) else { return one };
    let how = match (best.stages.len(), best.prediction.groups) {
        (1, _) => "tensor".to_owned(),
        (_, 1) => "layers".to_owned(),
        (_, groups) => format!("layers, {groups} groups"),
    };
    format!("{one} → **{}** {how}", digits(best.prediction.decode_rate))
}

fn table(device: &DeviceSpeed) -> String {
    let mut text = "| link | sequences | 1B | 8B | 70B |\n|---|---|---|---|---|\n".to_owned();
    for link in LINKS {
        for sequences in [1, 16] {
            let workload = workload(sequences);
            let cells = models().map(|model| cell(device, link, &model, &workload));
            writeln!(text, "| {} | {sequences} | {} |", link.0, cells.join(" | ")).unwrap();
        }
    }
    text
}

#[test]
fn the_document_has_the_figures_of_the_planner() {
    let document = include_str!("../../../docs/fan-out.md");
    for device in [cpu(), gpu()] {
        let table = table(&device);
        let name = device.name;
        assert!(document.contains(&table), "docs/fan-out.md: the table of {name} devices should be:\n{table}");
    }
}
