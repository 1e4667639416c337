//! Counts of all launches so far, by kernel, and how they are shown: as a table and as JSON. Both are deterministic.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, PoisonError};

use crate::exec::{Launch, LaunchOutcome};
use crate::exec_context::{MemoryCounts, Traffic};
use crate::isa::{self, Category, Row};

/// What one or more launches of a kernel did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelCounts {
    /// Launches.
    pub launches: u64,
    /// Threads that were started.
    pub threads: u64,
    /// Elements stored to global memory: each element of a vector, each atomic.
    pub elements: u64,
    /// Instructions of warps.
    pub warps: u64,
    /// Instructions of lanes whose guard held, by class.
    pub lanes: BTreeMap<Category, u64>,
    /// Traffic; zeros unless `CUDAEMU_COUNTS` is on.
    pub memory: MemoryCounts,
    /// Distinct bytes of global memory read, and written, summed over launches; zeros unless `CUDAEMU_COUNTS` is on.
    pub distinct: [u64; 2],
}

impl KernelCounts {
    /// What a launch did.
    pub fn of(launch: &Launch, outcome: &LaunchOutcome) -> Self {
        let (mut lanes, mut elements) = (BTreeMap::new(), 0);
        for (inst, &count) in launch.code.insts.iter().zip(&outcome.profile.lanes).filter(|(_, count)| **count > 0) {
            let row = isa::table().row(inst.row);
            *lanes.entry(row.map_or(Category::Other, |row| row.category)).or_default() += count;
            if row.is_some_and(writes_global) {
                elements += count * u64::from(inst.args.vector.max(1));
            }
        }
        Self {
            launches: 1,
            threads: u64::from(launch.threads()) * launch.blocks(),
            elements,
            warps: outcome.profile.warps.iter().sum(),
            lanes,
            memory: outcome.counts.clone(),
            distinct: outcome.footprint.unwrap_or_default(),
        }
    }

    fn add(&mut self, other: &Self) {
        self.launches += other.launches;
        self.threads += other.threads;
        self.elements += other.elements;
        self.warps += other.warps;
        for (&category, count) in &other.lanes {
            *self.lanes.entry(category).or_default() += count;
        }
        self.memory.add(&other.memory);
        self.distinct = [0, 1].map(|i| self.distinct[i] + other.distinct[i]);
    }

    fn all_lanes(&self) -> u64 {
        self.lanes.values().sum()
    }

    /// Lane instructions for each element that is stored.
    fn per_element(&self) -> f64 {
        self.all_lanes() as f64 / self.elements.max(1) as f64
    }
}

/// Whether a row stores to global memory. Of generic stores it is assumed: compilers name the other spaces.
fn writes_global(row: &Row) -> bool {
    matches!(row.category, Category::Store | Category::Atomic)
        && ![".shared", ".local", ".param"].iter().any(|space| row.name.contains(space))
}

/// Calls of each function since the start, however they ended. They are counted before there is a driver.
static CALLS: Mutex<BTreeMap<&'static str, u64>> = Mutex::new(BTreeMap::new());

/// Counts a call.
pub fn count_call(name: &'static str) {
    *CALLS.lock().unwrap_or_else(PoisonError::into_inner).entry(name).or_default() += 1;
}

/// The calls so far.
pub fn call_counts() -> BTreeMap<&'static str, u64> {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Starts afresh.
pub fn reset_call_counts() {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner).clear();
}

/// Sums since the driver began.
#[derive(Debug, Default)]
pub struct Totals {
    kernels: BTreeMap<String, KernelCounts>,
    host_bytes: u64,
}

impl Totals {
    /// Adds what a piece of work counted.
    pub fn add(&mut self, kernels: Vec<(String, KernelCounts)>, host_bytes: u64) {
        self.host_bytes += host_bytes;
        for (name, kernel) in kernels {
            self.kernels.entry(name).or_default().add(&kernel);
        }
    }

    /// `{"host_device_bytes": …, "kernels": {"name": {…}}, "calls": {"name": …}, "simulated_us": …}`,
    /// the last being when all work so far ends in simulated time (`simulated` is in picoseconds).
    pub fn json(&self, calls: &BTreeMap<&'static str, u64>, simulated: u64) -> String {
        let mut text = format!("{{\"host_device_bytes\": {}, \"kernels\": {{", self.host_bytes);
        for (index, (name, kernel)) in self.kernels.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            // Writing to a string cannot fail.
            let _ = write!(text, "{comma}\n  \"{}\": {}", escaped(name), kernel.json());
        }
        let calls: Vec<_> = calls.iter().map(|(name, count)| format!("\"{name}\": {count}")).collect();
        let _ =
            write!(text, "\n}}, \"calls\": {{{}}}, \"simulated_us\": {}}}", calls.join(", "), simulated as f64 / 1e6);
        text
    }

    /// A line per kernel, then what its instructions were.
    pub fn table(&self) -> String {
        let mut text = format!("bytes between host and devices: {}\n", self.host_bytes);
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{:<32} {:>8} {:>14} {:>12} {:>11} | {:>12} {:>12} {:>12} | {:>12} {:>12} {:>12} | {:>9} {:>11}",
            "kernel",
            "launches",
            "lane insts",
            "elements",
            "per element",
            "bytes read",
            "in sectors",
            "distinct",
            "bytes written",
            "in sectors",
            "distinct",
            "conflicts",
            "local bytes"
        );
        for (name, kernel) in &self.kernels {
            let memory = &kernel.memory;
            let _ = writeln!(
                text,
                "{name:<32} {:>8} {:>14} {:>12} {:>11.1} | {:>12} {:>12} {:>12} | {:>13} {:>12} {:>12} | {:>9} {:>11}",
                kernel.launches,
                kernel.all_lanes(),
                kernel.elements,
                kernel.per_element(),
                memory.global_read.bytes,
                memory.global_read.sectors * SECTOR,
                kernel.distinct[0],
                memory.global_written.bytes,
                memory.global_written.sectors * SECTOR,
                kernel.distinct[1],
                memory.bank_conflicts,
                memory.local_read.bytes + memory.local_written.bytes,
            );
        }
        for (name, kernel) in &self.kernels {
            let class = |(category, count): (&Category, &u64)| format!("{} {count}", class_name(*category));
            let classes: Vec<String> = kernel.lanes.iter().map(class).collect();
            let _ = writeln!(text, "{name}: {}", classes.join(", "));
        }
        text
    }
}

/// Bytes of a sector.
const SECTOR: u64 = 32;

fn class_name(category: Category) -> String {
    format!("{category:?}").to_lowercase()
}

impl KernelCounts {
    fn json(&self) -> String {
        let classes: Vec<String> =
            self.lanes.iter().map(|(category, count)| format!("\"{}\": {count}", class_name(*category))).collect();
        let memory = &self.memory;
        let traffic = |traffic: &Traffic| {
            format!(
                "{{\"requests\": {}, \"bytes\": {}, \"sectors\": {}}}",
                traffic.requests, traffic.bytes, traffic.sectors
            )
        };
        format!(
            "{{\"launches\": {}, \"threads\": {}, \"output_elements\": {}, \"warp_instructions\": {}, \
             \"lane_instructions\": {}, \"lane_instructions_per_element\": {:.3}, \"classes\": {{{}}}, \
             \"global_read\": {}, \"global_read_distinct_bytes\": {}, \"global_written\": {}, \"global_written_distinct_bytes\": {}, \
             \"shared_read\": {}, \"shared_written\": {}, \"bank_conflicts\": {}, \"local_read\": {}, \"local_written\": {}}}",
            self.launches,
            self.threads,
            self.elements,
            self.warps,
            self.all_lanes(),
            self.per_element(),
            classes.join(", "),
            traffic(&memory.global_read),
            self.distinct[0],
            traffic(&memory.global_written),
            self.distinct[1],
            traffic(&memory.shared_read),
            traffic(&memory.shared_written),
            memory.bank_conflicts,
            traffic(&memory.local_read),
            traffic(&memory.local_written),
        )
    }
}

fn escaped(name: &str) -> String {
    name.chars().flat_map(|c| [(c == '"' || c == '\\').then_some('\\'), Some(c)]).flatten().collect()
}
