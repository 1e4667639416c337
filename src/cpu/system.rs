//! Memory of the machine: its total, and what is available now.

use super::cgroup;

/// Bytes that can be used without swapping: `MemAvailable` of the system, or what the limits of the process's control groups
/// leave, whichever is smallest. `None` where the system reports neither.
pub(crate) fn available_memory() -> Option<u64> {
    let groups = cgroup::process_limits().into_iter().map(|group| group.available());
    Some(groups.fold(meminfo_field("MemAvailable")?, u64::min))
}

/// Bytes of memory that this process can ever have: the machine's, or a limit of its control groups, whichever is smallest.
/// `None` where the system reports neither.
pub(crate) fn total_memory() -> Option<u64> {
    let groups = cgroup::process_limits().into_iter().map(|group| group.limit);
    Some(groups.fold(meminfo_field("MemTotal")?, u64::min))
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
