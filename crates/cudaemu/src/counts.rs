//! Counts of all launches so far by kernel, and their output as table and as JSON. Both outputs are deterministic.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::config::FailingCall;
use crate::exec::{Launch, LaunchOutcome};
use crate::exec_context::{MemoryCounts, Traffic};
use crate::isa::{self, Category, Row};

/// Counts of one or more launches of a kernel.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelCounts {
    /// Number of launches.
    pub launches: u64,
    /// Blocks started.
    pub blocks: u64,
    /// Threads started.
    pub threads: u64,
    /// Elements stored to global memory: each element of a vector store and each atomic counts as one.
    pub elements: u64,
    /// Instructions executed by warps.
    pub warps: u64,
    /// Instructions executed by warps, by line of the PTX text; empty unless distinct bytes are counted. Tools that compile the
    /// PTX with line numbers (scripts/roofline.sh) transfer them to machine code.
    pub lines: BTreeMap<u32, u64>,
    /// Instructions executed by lanes whose guard was true, by category.
    pub lanes: BTreeMap<Category, u64>,
    /// Memory traffic; zeros unless `CUDAEMU_COUNTS` is on.
    pub memory: MemoryCounts,
    /// Distinct bytes of global memory read and written, summed over launches; zeros unless `CUDAEMU_COUNTS` is on or kernels
    /// are timed by their bytes.
    pub distinct: [u64; 2],
}

impl KernelCounts {
    /// The counts of one launch.
    pub fn of(launch: &Launch, outcome: &LaunchOutcome) -> Self {
        let (mut lanes, mut elements) = (BTreeMap::new(), 0);
        for (inst, &count) in launch.code.insts.iter().zip(&outcome.profile.lanes).filter(|(_, count)| **count > 0) {
            let row = isa::table().row(inst.row);
            *lanes.entry(row.map_or(Category::Other, |row| row.category)).or_default() += count;
            if row.is_some_and(writes_global) {
                elements += count * u64::from(inst.args.vector.max(1));
            }
        }
        let mut lines = BTreeMap::new();
        if outcome.footprint.is_some() {
            for (inst, &count) in launch.code.insts.iter().zip(&outcome.profile.warps).filter(|(_, count)| **count > 0)
            {
                *lines.entry(inst.line).or_default() += count;
            }
        }
        Self {
            launches: 1,
            blocks: launch.blocks(),
            lines,
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
        self.blocks += other.blocks;
        self.threads += other.threads;
        self.elements += other.elements;
        self.warps += other.warps;
        for (&category, count) in &other.lanes {
            *self.lanes.entry(category).or_default() += count;
        }
        for (&line, count) in &other.lines {
            *self.lines.entry(line).or_default() += count;
        }
        self.memory.add(&other.memory);
        self.distinct = [0, 1].map(|i| self.distinct[i] + other.distinct[i]);
    }

    fn all_lanes(&self) -> u64 {
        self.lanes.values().sum()
    }

    /// Lane instructions per stored element.
    fn per_element(&self) -> f64 {
        self.all_lanes() as f64 / self.elements.max(1) as f64
    }
}

/// Whether an instruction row stores to global memory. Generic stores count as global, because compilers name the other state
/// spaces.
fn writes_global(row: &Row) -> bool {
    matches!(row.category, Category::Store | Category::Atomic)
        && ![".shared", ".local", ".param"].iter().any(|space| row.name.contains(space))
}

/// The calls of API functions. A static, because calls happen before `cuInit` makes a driver.
static CALLS: Mutex<Calls> = Mutex::new(Calls { counts: BTreeMap::new(), failing: Vec::new() });

struct Calls {
    /// Number of calls of each function since process start, successful or not.
    counts: BTreeMap<&'static str, u64>,
    /// The calls that are to fail, each with its number counted from the next call on.
    failing: Vec<FailingCall>,
}

fn calls() -> MutexGuard<'static, Calls> {
    CALLS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a call of an API function. Returns the code with which it has to fail, if it has to.
pub fn count_call(name: &'static str) -> Option<u32> {
    let mut calls = calls();
    *calls.counts.entry(name).or_default() += 1;
    if !name.starts_with("cu") || name.starts_with("cudaemu_") {
        return None;
    }
    for call in calls.failing.iter_mut().filter(|call| call.function.as_deref().is_none_or(|function| function == name))
    {
        call.number -= 1;
    }
    // Several may be due at once: the first one is what the call returns.
    let code = calls.failing.iter().find(|call| call.number == 0)?.code;
    calls.failing.retain(|call| call.number > 0);
    Some(code)
}

/// Replaces the calls that are to fail, whose numbers count from the next call on. Returns how many of those before have not failed.
pub fn fail_calls(failing: Vec<FailingCall>) -> usize {
    std::mem::replace(&mut calls().failing, failing).len()
}

/// The counts of API calls so far.
pub fn call_counts() -> BTreeMap<&'static str, u64> {
    calls().counts.clone()
}

/// Resets the counts of API calls.
pub fn reset_call_counts() {
    calls().counts.clear();
}

/// Simulated time since the driver started, or since a test restarted it. Times are in picoseconds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimulatedTime {
    /// Time until the end of all work.
    pub makespan: u64,
    /// For each device, the sum of the durations of its kernels, and of its copies and fills within the device.
    pub busy: Vec<u64>,
    /// Number of times that a host thread waited for the end of operations.
    pub host_waits: u64,
}

/// Counts of the driver's own work since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DriverCounts {
    /// Calls that allocate or free device memory or pinned memory, and synchronise on a GPU.
    pub alloc_syncs: u64,
    /// Compilations of a module or library.
    pub compilations: u64,
    /// Launches that hang now.
    pub hung_launches: u64,
    /// Devices whose primary context is retained now.
    pub primary_contexts: u64,
    /// Kernels that graphs have launched through a programmatic edge.
    pub programmatic_launches: u64,
    /// Kernels that were loaded by their first launch or graph node.
    pub lazy_loads: u64,
}

/// Sums over all launches and copies since the driver started.
#[derive(Debug, Default)]
pub struct Totals {
    kernels: BTreeMap<String, KernelCounts>,
    host_bytes: u64,
}

impl Totals {
    /// Adds the counts of one finished operation.
    pub fn add(&mut self, kernels: Vec<(String, KernelCounts)>, host_bytes: u64) {
        self.host_bytes += host_bytes;
        for (name, kernel) in kernels {
            self.kernels.entry(name).or_default().add(&kernel);
        }
    }

    /// `{"host_device_bytes": …, "kernels": {"name": {…}}, "calls": {"name": …}, "alloc_syncs": …, "compilations": …,
    /// "hung_launches": …, "primary_contexts": …, "programmatic_launches": …, "lazy_loads": …, "host_waits": …, "simulated_busy_us": [device 0, …], "simulated_us": …}`.
    /// `simulated_us` is the makespan.
    pub fn json(
        &self,
        calls: &BTreeMap<&'static str, u64>,
        driver: &DriverCounts,
        simulated: &SimulatedTime,
    ) -> String {
        let mut text = format!("{{\"host_device_bytes\": {}, \"kernels\": {{", self.host_bytes);
        for (index, (name, kernel)) in self.kernels.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            // Writing to a string cannot fail.
            let _ = write!(text, "{comma}\n  \"{}\": {}", escaped(name), kernel.json());
        }
        let calls: Vec<_> = calls.iter().map(|(name, count)| format!("\"{name}\": {count}")).collect();
        let micros = |picos: u64| picos as f64 / 1e6;
        let busy: Vec<String> = simulated.busy.iter().map(|&busy| micros(busy).to_string()).collect();
        let _ = write!(
            text,
            "\n}}, \"calls\": {{{}}}, \"alloc_syncs\": {}, \"compilations\": {}, \"hung_launches\": {}, \"primary_contexts\": {}, \
             \"programmatic_launches\": {}, \"lazy_loads\": {}, \"host_waits\": {}, \"simulated_busy_us\": [{}], \"simulated_us\": {}}}",
            calls.join(", "),
            driver.alloc_syncs,
            driver.compilations,
            driver.hung_launches,
            driver.primary_contexts,
            driver.programmatic_launches,
            driver.lazy_loads,
            simulated.host_waits,
            busy.join(", "),
            micros(simulated.makespan)
        );
        text
    }

    /// A table with a line per kernel, followed by its instructions by category.
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

/// Bytes of a sector, the unit of DRAM and L2 traffic.
const SECTOR: u64 = 32;

fn class_name(category: Category) -> String {
    format!("{category:?}").to_lowercase()
}

impl KernelCounts {
    fn json(&self) -> String {
        let classes: Vec<String> =
            self.lanes.iter().map(|(category, count)| format!("\"{}\": {count}", class_name(*category))).collect();
        let lines: Vec<String> = self.lines.iter().map(|(line, count)| format!("\"{line}\": {count}")).collect();
        let memory = &self.memory;
        let traffic = |traffic: &Traffic| {
            format!(
                "{{\"requests\": {}, \"bytes\": {}, \"sectors\": {}}}",
                traffic.requests, traffic.bytes, traffic.sectors
            )
        };
        format!(
            "{{\"launches\": {}, \"blocks\": {}, \"threads\": {}, \"output_elements\": {}, \"warp_instructions\": {}, \
             \"lane_instructions\": {}, \"lane_instructions_per_element\": {:.3}, \"classes\": {{{}}}, \
             \"global_read\": {}, \"global_read_distinct_bytes\": {}, \"block_sectors\": {}, \"global_written\": {}, \"global_written_distinct_bytes\": {}, \
             \"shared_read\": {}, \"shared_written\": {}, \"shared_passes\": {}, \"bank_conflicts\": {}, \"local_read\": {}, \"local_written\": {}, \
             \"warp_instructions_by_line\": {{{}}}}}",
            self.launches,
            self.blocks,
            self.threads,
            self.elements,
            self.warps,
            self.all_lanes(),
            self.per_element(),
            classes.join(", "),
            traffic(&memory.global_read),
            self.distinct[0],
            memory.block_sectors,
            traffic(&memory.global_written),
            self.distinct[1],
            traffic(&memory.shared_read),
            traffic(&memory.shared_written),
            memory.shared_passes,
            memory.bank_conflicts,
            traffic(&memory.local_read),
            traffic(&memory.local_written),
            lines.join(", "),
        )
    }
}

fn escaped(name: &str) -> String {
    name.chars().flat_map(|c| [(c == '"' || c == '\\').then_some('\\'), Some(c)]).flatten().collect()
}
