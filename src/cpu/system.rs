//! What the machine has left.

/// Bytes that can be used without pushing anyone else out: the system's word, and the container's limit where there is
/// one. `None` where the system does not say.
pub(crate) fn available_memory() -> Option<u64> {
    let system = meminfo(&std::fs::read_to_string("/proc/meminfo").ok()?)?;
    let number = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let limit = number("/sys/fs/cgroup/memory.max");
    let used = number("/sys/fs/cgroup/memory.current").unwrap_or(0);
    Some(limit.map_or(system, |limit| system.min(limit.saturating_sub(used))))
}

/// `MemAvailable` of `/proc/meminfo`, in bytes.
fn meminfo(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_kibibytes() {
        let text = "MemTotal:       24000000 kB\nMemFree:  1 kB\nMemAvailable:    1000 kB\n";
        assert_eq!(meminfo(text), Some(1_024_000));
        for bad in ["", "MemTotal: 1 kB\n", "MemAvailable: x kB\n", "MemAvailable: 18446744073709551615 kB\n"] {
            assert_eq!(meminfo(bad), None, "{bad:?}");
        }
    }
}
