//! The report of the benchmark: measurements as a table and as JSON, with the roof that bounds each case.

use crate::roofs::{Machine, Roof};
use crate::run::{Storage, Times};
use fanout_bench::cases::Case;
use std::fmt::Write as _;
use std::rc::Rc;

/// The measured rate of a roof, in units per second.
#[derive(Clone, Copy)]
pub struct Rate {
    pub roof: Roof,
    pub name: &'static str,
    pub rate: f64,
}

impl Rate {
    fn unit(&self) -> &'static str {
        if matches!(self.roof, Roof::Peak(_)) { "Gop/s" } else { "GB/s" }
    }

    /// The rate as a line of text.
    pub fn line(&self) -> String {
        format!("{:22} {:8.1} {}", self.name, self.rate / 1e9, self.unit())
    }

    fn json(&self) -> String {
        format!(r#"{{"name": "{}", "unit": "{}", "rate": {:.2}}}"#, self.name, self.unit(), self.rate / 1e9)
    }
}

/// The roofs that may bound a case. A case with its data in the CPU caches and without products has none; its time stands
/// alone.
pub fn bounds(case: &Case, machine: &Machine) -> Vec<Roof> {
    // A case that writes less than an eighth of what it reads is compared with the read bandwidth, not the copy bandwidth.
    let memory = if case.written * 8 < case.read { Roof::Read } else { Roof::Copy };
    let products = if case.ops > 0 { machine.fastest(case.kind) } else { None };
    case.cold.then_some(memory).into_iter().chain(products).collect()
}

/// A timed case with the roof that bounds it.
pub struct Row {
    case: Rc<Case>,
    storage: Storage,
    times: Times,
    /// The roof that bounds the case most, and the minimum time at this roof in seconds.
    floor: Option<(Rate, f64)>,
}

impl Row {
    /// A row from the times of a case and the rates of its [`bounds`].
    pub fn new(case: Rc<Case>, storage: Storage, times: Times, rates: &[Rate]) -> Row {
        let units = |roof| if matches!(roof, Roof::Peak(_)) { case.ops } else { case.read + case.written };
        let floors = rates.iter().map(|&r| (r, units(r.roof) as f64 / r.rate));
        let floor = floors.max_by(|a, b| a.1.total_cmp(&b.1));
        Row { case, storage, times, floor }
    }

    /// The median time of a node in seconds.
    pub fn median(&self) -> f64 {
        self.times.quantile(0.5)
    }

    /// The row as a line of the table.
    pub fn line(&self) -> String {
        let Row { case, storage, times, floor } = self;
        let spread = format!("[{:.1}-{:.1}]", times.quantile(0.1) * 1e6, times.quantile(0.9) * 1e6);
        let rate = |units: usize| units as f64 / self.median() / 1e9;
        let ops = if case.ops > 0 { format!("{:.1}", rate(case.ops)) } else { "-".to_owned() };
        let bytes = rate(case.read + case.written);
        let roof = match floor {
            Some((roof, floor)) => format!("{:3.0}% of {}", floor / self.median() * 100.0, roof.line()),
            None => "   - in cache".to_owned(),
        };
        let (op, dtype, median) = (case.op, &case.dtype, self.median() * 1e6);
        let shape = if *storage == Storage::Rows { format!("{}, rows", case.shape) } else { case.shape.clone() };
        format!("{op:14} {dtype:8} {shape:40} {median:>10.1} {spread:>21} {ops:>7} {bytes:>6.1} {roof}")
    }

    fn json(&self) -> String {
        let Row { case, storage, times, floor } = self;
        let rows = *storage == Storage::Rows;
        let mut text = format!(
            r#"{{"op": "{}", "type": "{}", "shape": "{}", "rows": {rows}, "ops": {}, "read": {}, "written": {}, "cold": {}"#,
            case.op, case.dtype, case.shape, case.ops, case.read, case.written, case.cold
        );
        for (name, share) in [("p10", 0.1), ("median", 0.5), ("p90", 0.9)] {
            let _ = write!(text, r#", "{name}_us": {:.4}"#, times.quantile(share) * 1e6);
        }
        let _ = write!(text, r#", "samples": {}"#, times.samples());
        if let Some((roof, floor)) = floor {
            let _ = write!(text, r#", "roof": {}, "floor_us": {:.4}"#, roof.json(), floor * 1e6);
        }
        text + "}"
    }
}

/// The header of the table.
pub fn header() -> String {
    let spread = "[p10-p90]";
    format!(
        "{:14} {:8} {:40} {:>10} {spread:>21} {:>7} {:>6} share of its roof",
        "op", "type", "shape", "median us", "Gop/s", "GB/s"
    )
}

/// The whole report as JSON. Names are not escaped: they contain no quotes or backslashes.
pub fn json(device: &str, roofs: &[Rate], rows: &[Row]) -> String {
    let list = |items: Vec<String>| items.join(",\n    ");
    let (roofs, rows) = (list(roofs.iter().map(Rate::json).collect()), list(rows.iter().map(Row::json).collect()));
    format!("{{\n  \"device\": \"{device}\",\n  \"roofs\": [\n    {roofs}\n  ],\n  \"cases\": [\n    {rows}\n  ]\n}}\n")
}
