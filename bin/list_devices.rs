//! `rpc-server --list-devices`: the devices of this machine and, with `--verbose`, the times of loading the kernels of its GPUs.

use std::fmt::Write;
use std::time::Duration;

use fanout::device::ModuleLoad;
use fanout::registry::{DeviceEntry, Registry};

/// A line for each device, and why there is no GPU if there is none. `verbose`: with the times of loading all kernels.
pub(crate) fn text(registry: &Registry, verbose: bool) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    for entry in registry.entries() {
        let unusable = entry.unusable.as_ref().map_or(String::new(), |why| format!("; not usable: {why}"));
        let _ = writeln!(text, "{}: {}{unusable}", entry.name, entry.description);
        if verbose && entry.unusable.is_none() {
            text += &module_times(entry);
        }
    }
    if let Some(why) = registry.no_gpu_reason() {
        let _ = writeln!(text, "no GPU: {why}");
    }
    text
}

/// A line for each module of a device's kernels, and one for all of them.
fn module_times(entry: &DeviceEntry) -> String {
    let loads = match entry.load_modules() {
        Ok(loads) => loads,
        Err(e) => return format!("  kernels cannot be loaded: {e}\n"),
    };
    if loads.is_empty() {
        return String::new();
    }
    let line = |load: &ModuleLoad| {
        let source = if load.was_cached() { "probably from the driver's cache" } else { "probably compiled" };
        format!("  {}: {:.1} ms, {source}\n", load.name, load.time.as_secs_f64() * 1e3)
    };
    let cached = loads.iter().filter(|load| load.was_cached()).count();
    let total: Duration = loads.iter().map(|load| load.time).sum();
    loads.iter().map(line).collect::<String>()
        + &format!("  {} modules in {:.2} s, {cached} from the driver's cache\n", loads.len(), total.as_secs_f64())
}
