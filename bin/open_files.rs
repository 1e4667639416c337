//! The limit of open files (`ulimit -n`): every connection of a client takes one, and in `rpc-server connect` two.

/// Open files other than clients' connections: handshakes in flight, connections for HTTP, the standard streams, listeners, models, the
/// cache, and connections to other servers.
const OTHER_FILES: u64 = 512;

/// The open files of a server or relay with `max_connections` clients that take `each` files.
pub(crate) fn needed(max_connections: u64, each: u64) -> u64 {
    max_connections.saturating_mul(each).saturating_add(OTHER_FILES)
}

/// The new soft limit for `max_connections` clients that take `each` files, and a warning if the hard limit does not allow it.
/// `None` for no limit.
fn wanted_limit(
    (soft, hard): (Option<u64>, Option<u64>),
    max_connections: u64,
    each: u64,
) -> (Option<u64>, Option<String>) {
    let needed = needed(max_connections, each);
    let Some(current) = soft.filter(|&soft| soft < needed) else { return (soft, None) };
    let Some(hard) = hard.filter(|&hard| hard < needed) else { return (Some(needed), None) };
    let warning = format!(
        "WARNING: the limit of open files is {hard} (ulimit -n), so that about {} clients fit; {max_connections} \
         (max-connections) need {needed}.",
        hard.saturating_sub(OTHER_FILES) / each.max(1)
    );
    (Some(hard.max(current)), Some(warning))
}

/// Raises the limit of open files to what `max_connections` clients need, with `each` files for one, as far as the system allows
/// it. Returns a warning if that is too little.
#[cfg(unix)]
pub(crate) fn raise_limit(max_connections: u64, each: u64) -> Option<String> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let (wanted, warning) = wanted_limit((current, maximum), max_connections, each);
    if wanted != current
        && let Err(e) = setrlimit(Resource::Nofile, Rlimit { current: wanted, maximum })
    {
        return Some(format!("WARNING: cannot raise the limit of open files (ulimit -n): {e}."));
    }
    warning
}

#[cfg(not(unix))]
pub(crate) fn raise_limit(_: u64, _: u64) -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_soft_limit_is_raised_as_far_as_the_hard_limit_allows() {
        // Soft and hard limit, connections, files of each, new soft limit, whether there is a warning.
        for (limits, connections, each, soft, warns) in [
            ((Some(1024), Some(20_000)), 1024, 1, Some(1536), false),
            ((Some(4096), Some(20_000)), 1024, 1, Some(4096), false),
            ((Some(1024), None), 100_000, 1, Some(100_512), false),
            ((None, None), 100_000, 1, None, false),
            ((Some(1024), Some(1024)), 1024, 1, Some(1024), true),
            ((Some(256), Some(1024)), 2000, 1, Some(1024), true),
            ((Some(1024), Some(2000)), u64::MAX, 2, Some(2000), true),
            ((Some(1024), Some(100)), 5000, 1, Some(1024), true),
            ((Some(256), Some(1024)), 256, 2, Some(1024), false),
        ] {
            let (wanted, warning) = wanted_limit(limits, connections, each);
            assert_eq!(
                (wanted, warning.is_some()),
                (soft, warns),
                "{limits:?}, {connections} connections: {warning:?}"
            );
        }
    }
}
