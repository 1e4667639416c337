//! Configuration of the emulated machine: environment variables, read when the driver starts; tests can override them before.
//!
//! A value that cannot be parsed is reported on stderr, and `cuInit` returns CUDA_ERROR_INVALID_VALUE. Lists are separated by
//! commas, one value per device; a single value applies to all devices. [`SETTINGS`] lists every variable with its help text.

mod hardware;
mod parse_values;
mod settings;
pub mod spec;

use std::path::PathBuf;

pub use hardware::{FailingCall, HardwareModel, InjectedFault, LaunchNumber, ProgrammaticEdges};
pub use parse_values::failing_calls;
pub use settings::{SETTINGS, Setting};
use spec::Spec;

/// Where counts are written when the process ends.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum CountsOutput {
    /// Nowhere.
    #[default]
    Off,
    /// Nowhere, but counting is on: tests read the counts through `cudaemu_counts_json`.
    On,
    /// A table on stderr.
    Table,
    /// JSON in this file.
    File(PathBuf),
}

/// Rates of simulated time. An operation whose rate is `None` takes no simulated time. If all are `None`, events report real
/// time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SimulatedRates {
    /// Fixed part of the duration of a kernel in microseconds.
    pub kernel_us: Option<f64>,
    /// Bandwidth between a kernel and the memory of its device in gigabytes per second; `None`: its bytes take no time.
    pub kernel_gbps: Option<f64>,
    /// Microseconds that a launch occupies the calling thread.
    pub launch_us: Option<f64>,
    /// Fixed part of the duration of a copy or fill in microseconds.
    pub copy_us: Option<f64>,
    /// Bandwidth between host and device in gigabytes per second.
    pub host_gbps: Option<f64>,
    /// Bandwidth between two devices in gigabytes per second.
    pub peer_gbps: Option<f64>,
    /// Bandwidth within a device in gigabytes per second.
    pub device_gbps: Option<f64>,
    /// Kernels that a device runs concurrently; 0 counts as 1.
    pub kernels_at_once: u32,
    /// Microseconds that a synchronising allocation or free holds the driver's lock, after it has waited for the context's
    /// operations; `None`: allocations wait for nothing, and take no time.
    pub alloc_sync_us: Option<f64>,
    /// Milliseconds that the compilation of a module takes the calling thread.
    pub compile_ms: Option<f64>,
}

/// The parsed settings, before defaults are filled in.
#[derive(Clone, Debug, Default)]
struct Raw {
    devices: Option<u64>,
    capability: Option<Vec<(u32, u32)>>,
    name: Option<Vec<String>>,
    memory: Option<Vec<u64>>,
    sms: Option<Vec<u32>>,
    pci: Option<Vec<Pci>>,
    peers: Option<Peers>,
    seed: Option<u64>,
    report_only: Option<bool>,
    counts: Option<CountsOutput>,
    max_instructions: Option<u64>,
    threads: Option<u64>,
    driver_version: Option<u32>,
    time: SimulatedRates,
    hardware: HardwareModel,
    replaced_line: Option<ReplacedLine>,
    visible: Option<String>,
}

/// A line of PTX that is replaced when its module is loaded, so that a test program can be run with a broken kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReplacedLine {
    /// The entry that contains the line.
    pub entry: String,
    /// Its number; 1 is the line after the entry's name.
    pub line: usize,
    /// What replaces it.
    pub text: String,
}

impl ReplacedLine {
    /// The text of a module with the line replaced. `None` if the module has no such line.
    pub fn apply(&self, module: &str) -> Option<String> {
        let begin = module.find(&format!(".entry {}(", self.entry))?;
        let tail = &module[begin..];
        let mut ends = tail.match_indices('\n').map(|(at, _)| at);
        let start = ends.nth(self.line.checked_sub(1)?)? + 1;
        let end = ends.next()?;
        Some([&module[..begin + start], &self.text, &tail[end..]].concat())
    }
}

/// A PCI address; the function is always 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pci {
    /// Domain.
    pub domain: u32,
    /// Bus.
    pub bus: u32,
    /// Device.
    pub device: u32,
}

/// Which devices can access each other's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Peers {
    All,
    Pairs(Vec<(usize, usize)>),
}

/// Configuration of one device.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Index before CUDA_VISIBLE_DEVICES selects devices; the UUID is derived from it.
    pub index: usize,
    /// Its name.
    pub name: String,
    /// Memory in bytes.
    pub memory: u64,
    /// Limits and attributes.
    pub spec: Spec,
    /// Its PCI address.
    pub pci: Pci,
    /// Visible indices of the devices whose memory it can access.
    pub peers: Vec<usize>,
}

/// Configuration of the whole machine.
#[derive(Clone, Debug)]
pub struct Config {
    /// The visible devices.
    pub devices: Vec<DeviceConfig>,
    /// Seed of the choice among the execution orders that CUDA allows.
    pub seed: u64,
    /// Faults that real hardware would not notice are reported without stopping the launch.
    pub report_only: bool,
    /// Where counts go at the end.
    pub counts: CountsOutput,
    /// Limit of warp instructions in one launch, after which a kernel counts as endless.
    pub max_instructions: u64,
    /// Host threads that execute blocks.
    pub threads: usize,
    /// Version that `cuDriverGetVersion` returns: 1000 × major + 10 × minor.
    pub driver_version: u32,
    /// Rates of simulated time.
    pub time: SimulatedRates,
    /// What a real GPU does that an ideal one does not.
    pub hardware: HardwareModel,
    /// The line of PTX that is replaced.
    pub replaced_line: Option<ReplacedLine>,
}

impl Config {
    /// Parses settings given as (name, text). The last of several values for a name applies. The error names the setting and
    /// the reason.
    pub fn from_settings(settings: impl IntoIterator<Item = (String, String)>) -> Result<Self, String> {
        let mut raw = Raw::default();
        for (name, text) in settings {
            let Some(setting) = SETTINGS.iter().find(|setting| setting.name == name) else {
                if name.starts_with("CUDAEMU_") {
                    let known: Vec<&str> = SETTINGS.iter().map(|setting| setting.name).collect();
                    return Err(format!("{name} is no setting; the settings are {}", known.join(", ")));
                }
                continue;
            };
            (setting.read)(&mut raw, text.trim())
                .map_err(|reason| format!("{name}={text} cannot be used: {reason}; expected: {}", setting.help))?;
        }
        raw.machine()
    }

    /// The settings in the process environment.
    pub fn environment() -> impl Iterator<Item = (String, String)> {
        std::env::vars_os()
            .filter_map(|(name, text)| Some((name.into_string().ok()?, text.to_string_lossy().into_owned())))
            .filter(|(name, _)| name.starts_with("CUDAEMU_") || name == "CUDA_VISIBLE_DEVICES")
    }
}

impl Raw {
    fn machine(self) -> Result<Config, String> {
        let count = self.devices.unwrap_or(1) as usize;
        let devices = (0..count).map(|index| self.device(index, count)).collect::<Result<Vec<_>, _>>()?;
        let shown = match &self.visible {
            None => (0..count).collect(),
            Some(text) => visible(text, &devices),
        };
        let can = |a: usize, b: usize| match self.peers.as_ref().unwrap_or(&Peers::All) {
            Peers::All => true,
            Peers::Pairs(pairs) => pairs.contains(&(a, b)) || pairs.contains(&(b, a)),
        };
        let devices = shown.iter().map(|&index| {
            let peers = (0..shown.len()).filter(|&other| shown[other] != index && can(index, shown[other])).collect();
            DeviceConfig { peers, ..devices[index].clone() }
        });
        Ok(Config {
            devices: devices.collect(),
            seed: self.seed.unwrap_or(0),
            report_only: self.report_only.unwrap_or(false),
            counts: self.counts.unwrap_or_default(),
            max_instructions: self.max_instructions.unwrap_or(4 << 30),
            threads: match self.threads {
                Some(threads) => threads as usize,
                None => std::thread::available_parallelism().map_or(1, usize::from),
            },
            driver_version: self.driver_version.unwrap_or(12090),
            time: self.time,
            hardware: self.hardware,
            replaced_line: self.replaced_line,
        })
    }

    fn device(&self, index: usize, count: usize) -> Result<DeviceConfig, String> {
        let capability = *one("CUDAEMU_CAPABILITY", &self.capability, index, count)?.unwrap_or(&(8, 0));
        let mut spec = Spec::of(capability)?;
        if let Some(&sms) = one("CUDAEMU_SMS", &self.sms, index, count)? {
            spec.sms = sms;
        }
        let name = one("CUDAEMU_NAME", &self.name, index, count)?;
        let memory = *one("CUDAEMU_MEMORY", &self.memory, index, count)?.unwrap_or(&(8 << 30));
        let pci = match &self.pci {
            Some(list) if list.len() == 1 && count == 1 => list[0],
            Some(list) if list.len() == count => list[index],
            Some(list) => {
                return Err(format!("CUDAEMU_PCI names {} addresses, but there are {count} devices", list.len()));
            }
            None => Pci { domain: 0, bus: index as u32 + 1, device: 0 },
        };
        Ok(DeviceConfig {
            index,
            name: name.cloned().unwrap_or_else(|| format!("CUDA emulator sm_{}{}", capability.0, capability.1)),
            memory,
            spec,
            pci,
            peers: Vec::new(),
        })
    }
}

/// The value for device `index` from a list setting: a single value applies to all devices.
fn one<'a, T>(setting: &str, list: &'a Option<Vec<T>>, index: usize, count: usize) -> Result<Option<&'a T>, String> {
    match list {
        None => Ok(None),
        Some(list) if list.len() == 1 => Ok(list.first()),
        Some(list) if list.len() == count => Ok(list.get(index)),
        Some(list) => Err(format!(
            "{setting} has {} values, but there are {count} devices: give one value, or {count}",
            list.len()
        )),
    }
}

/// Parses CUDA_VISIBLE_DEVICES as the real driver does: the list ends before the first entry that names no device or repeats
/// one.
fn visible(text: &str, devices: &[DeviceConfig]) -> Vec<usize> {
    let mut shown = Vec::new();
    for entry in text.split(',').map(str::trim) {
        let index = match entry.strip_prefix("GPU-") {
            Some(uuid) => devices.iter().position(|device| device.uuid_text().starts_with(uuid)),
            None => entry.parse::<usize>().ok().filter(|&index| index < devices.len()),
        };
        match index {
            Some(index) if !shown.contains(&index) => shown.push(index),
            _ => break,
        }
    }
    shown
}

impl DeviceConfig {
    /// 16 bytes that differ between devices and are the same in every run.
    pub fn uuid(&self) -> [u8; 16] {
        let mut uuid = *b"cudaemu\0\x80\0\0\0\0\0\0\0";
        uuid[15] = self.index as u8;
        uuid
    }

    /// The UUID in the format of nvidia-smi, without the `GPU-` prefix.
    fn uuid_text(&self) -> String {
        let hex: Vec<String> = self.uuid().iter().map(|byte| format!("{byte:02x}")).collect();
        let part = |from: usize, to: usize| hex[from..to].concat();
        [part(0, 4), part(4, 6), part(6, 8), part(8, 10), part(10, 16)].join("-")
    }
}

impl Pci {
    /// `0000:01:00.0`
    pub fn text(&self) -> String {
        format!("{:04X}:{:02X}:{:02X}.0", self.domain, self.bus, self.device)
    }

    /// Parses `domain:bus:device.function`; domain and function are optional.
    pub fn parse(text: &str) -> Option<Self> {
        let text = match text.split_once('.') {
            Some((address, function)) => (u32::from_str_radix(function, 16) == Ok(0)).then_some(address)?,
            None => text,
        };
        let parts = text.split(':').map(|part| u32::from_str_radix(part, 16).ok()).collect::<Option<Vec<u32>>>()?;
        let pci = match parts[..] {
            [bus, device] => Self { domain: 0, bus, device },
            [domain, bus, device] => Self { domain, bus, device },
            _ => return None,
        };
        (pci.domain <= 0xffff && pci.bus <= 0xff && pci.device <= 0x1f).then_some(pci)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Error;

    fn read(text: &str) -> Result<Config, String> {
        let pair = |setting: &str| setting.split_once('=').map(|(a, b)| (a.to_owned(), b.to_owned()));
        Config::from_settings(text.split_whitespace().filter_map(pair))
    }

    #[test]
    fn defaults_and_lists() {
        let config = read("").unwrap();
        assert_eq!((config.devices.len(), config.driver_version, config.report_only), (1, 12090, false));
        assert_eq!(config.devices[0].spec.capability, (8, 0));
        let config = read("CUDAEMU_DEVICES=2 CUDAEMU_CAPABILITY=8.0,9.0 CUDAEMU_MEMORY=64M CUDAEMU_SEED=7").unwrap();
        assert_eq!(config.devices[1].spec.capability, (9, 0));
        assert_eq!(config.devices.iter().map(|d| d.memory).collect::<Vec<_>>(), [64 << 20; 2]);
        assert_eq!(config.devices[0].peers, [1]);
        assert_eq!(config.devices[1].pci.text(), "0000:02:00.0");
        assert_eq!(config.seed, 7);
    }

    #[test]
    fn visible_devices() {
        for (text, shown) in [("1,0", vec![1, 0]), ("2", vec![2]), ("0,9,1", vec![0]), ("", vec![]), ("1,1", vec![1])] {
            let config = read(&format!("CUDAEMU_DEVICES=3 CUDAEMU_PEERS=0-1 CUDA_VISIBLE_DEVICES={text}")).unwrap();
            assert_eq!(config.devices.iter().map(|d| d.index).collect::<Vec<_>>(), shown, "{text}");
        }
        let config = read("CUDAEMU_DEVICES=3 CUDAEMU_PEERS=0-2 CUDA_VISIBLE_DEVICES=2,1,0").unwrap();
        assert_eq!(config.devices[0].peers, [2]);
        assert!(config.devices[1].peers.is_empty());
        let uuid = config.devices[1].uuid_text();
        let config = read(&format!("CUDAEMU_DEVICES=3 CUDA_VISIBLE_DEVICES=GPU-{uuid}")).unwrap();
        assert_eq!(config.devices[0].index, 1);
    }

    #[test]
    fn launches_of_faults_and_hangs() {
        let at = |device, number| LaunchNumber { device, number };
        let config = read("CUDAEMU_FAULT_AT=3,7:ecc@1,2:lost CUDAEMU_HANG_AT=4@2").unwrap();
        let faults: Vec<_> = config.hardware.faults.iter().map(|fault| (fault.at, fault.error)).collect();
        let expected =
            [(at(0, 3), Error::IllegalAddress), (at(1, 7), Error::EccUncorrectable), (at(0, 2), Error::Unknown)];
        assert_eq!(faults, expected);
        assert_eq!(config.hardware.hangs, [at(2, 4)]);
        let config = read("CUDAEMU_FAIL_CALL=cuGraphLaunch:2:226,*:7:4294967295").unwrap();
        let failing: Vec<_> =
            config.hardware.failing_calls.iter().map(|c| (c.function.as_deref(), c.number, c.code)).collect();
        assert_eq!(failing, [(Some("cuGraphLaunch"), 2, 226), (None, 7, u32::MAX)]);
        let config = read("CUDAEMU_PEER_CORRUPT=0-1").unwrap();
        assert!(config.hardware.corrupts(1, 0) && config.hardware.corrupts(0, 1) && !config.hardware.corrupts(0, 2));
    }

    #[test]
    fn a_line_of_an_entry_is_replaced() {
        let line = read("CUDAEMU_PTX_LINE=add:2:ret;").unwrap().replaced_line.unwrap();
        let module = ".visible .entry add2(\n)\n{\n}\n.visible .entry add(\n)\n{\nexit;\n}\n";
        let expected = ".visible .entry add2(\n)\n{\n}\n.visible .entry add(\n)\nret;\nexit;\n}\n";
        assert_eq!(line.apply(module).as_deref(), Some(expected));
        assert_eq!(ReplacedLine { line: 9, ..line.clone() }.apply(module), None);
        assert_eq!(line.apply(".visible .entry add2(\n)\n{\n}\n"), None);
    }

    #[test]
    fn wrong_values_say_what_is_wrong() {
        for (text, part) in [
            ("CUDAEMU_DEVICES=many", "no whole number"),
            ("CUDAEMU_DEVICES=65", "not within 0 to 64"),
            ("CUDAEMU_MEMORY=1T", "no whole number"),
            ("CUDAEMU_CAPABILITY=6.1", "expected: compute capability"),
            ("CUDAEMU_DEVICES=3 CUDAEMU_SMS=1,2", "has 2 values, but there are 3 devices"),
            ("CUDAEMU_PEERS=0", "is no pair"),
            ("CUDAEMU_CHECK=maybe", "none of the choices"),
            ("CUDAEMU_KERNEL_US=-1", "no positive number"),
            ("CUDAEMU_PCI=zz", "no PCI address"),
            ("CUDAEMU_SPEED=9", "is no setting"),
            ("CUDAEMU_FAULT_AT=0", "not within 1 to"),
            ("CUDAEMU_FAULT_AT=3:fire", "none of the choices"),
            ("CUDAEMU_HANG_AT=3@64", "not within 0 to 63"),
            ("CUDAEMU_CONNECTIONS=0", "not within 1 to 128"),
            ("CUDAEMU_PEER_CORRUPT=1", "is no pair"),
            ("CUDAEMU_POISON=yes", "none of the choices"),
            ("CUDAEMU_FAIL_CALL=cuInit:1", "is no FUNCTION:NUMBER:CODE"),
            ("CUDAEMU_FAIL_CALL=*:1:0", "not within 1 to"),
            ("CUDAEMU_PTX_LINE=rope:1", "is no ENTRY:LINE:TEXT"),
            ("CUDAEMU_PTX_LINE=rope:0:ret;", "not within 1 to"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(part), "{text}: {error}");
        }
    }
}
