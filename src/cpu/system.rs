//! Memory of the machine: its total, and what is available now.

/// Bytes that can be used without swapping: `MemAvailable` of the system, or what a container's limit leaves, whichever is
/// smaller. `None` where the system reports neither.
pub(crate) fn available_memory() -> Option<u64> {
    let system = meminfo_field("MemAvailable")?;
    let used = cgroup_number("memory.current").unwrap_or(0);
    Some(cgroup_number("memory.max").map_or(system, |limit| system.min(limit.saturating_sub(used))))
}

/// Bytes of memory that this process can ever have: the machine's, or a container's limit, whichever is smaller. `None` where
/// the system reports neither.
pub(crate) fn total_memory() -> Option<u64> {
    let system = meminfo_field("MemTotal")?;
    Some(cgroup_number("memory.max").map_or(system, |limit| system.min(limit)))
}

/// A number of the control group (version 2) at the root of this process's namespace; `None` for no limit (`max`).
fn cgroup_number(file: &str) -> Option<u64> {
    std::fs::read_to_string(format!("/sys/fs/cgroup/{file}")).ok()?.trim().parse().ok()
}

fn meminfo_field(field: &str) -> Option<u64> {
    parse_meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?, field)
}

/// A field of `/proc/meminfo`, in bytes.
fn parse_meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        let text = "MemTotal:       24000000 kB\nMemFree:  1 kB\nMemAvailable:    1000 kB\n";
        assert_eq!(parse_meminfo(text, "MemAvailable"), Some(1_024_000));
        assert_eq!(parse_meminfo(text, "MemTotal"), Some(24_576_000_000));
        assert_eq!(parse_meminfo(text, "Mem"), None);
        for bad in ["", "MemTotal: 1 kB\n", "MemAvailable: x kB\n", "MemAvailable: 18446744073709551615 kB\n"] {
            assert_eq!(parse_meminfo(bad, "MemAvailable"), None, "{bad:?}");
        }
    }
}
