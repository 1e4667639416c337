//! Runs the body of the fuzz target `session` with seeded random bytes.
//!
//! More sessions: `HOSTILE_SESSIONS=100000 HOSTILE_SEED=7 cargo test --release --workspace --test sessions`.

use fastrand::Rng;
use hostile_client::Target;

/// Reads a number from an environment variable, for longer runs by hand.
fn env_number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// Resident memory of this process, in bytes.
#[cfg(target_os = "linux")]
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux has this file");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line VmRSS");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn hostile_sessions_do_not_damage_the_server_or_leak_memory() {
    let (sessions, mut rng) = (env_number("HOSTILE_SESSIONS", 400), Rng::with_seed(env_number("HOSTILE_SEED", 1)));
    let mut target = Target::new();
    #[cfg(target_os = "linux")]
    let before = resident();
    let mut served = 0;
    for _ in 0..sessions {
        let mut bytes = vec![0; rng.usize(..1200)];
        rng.fill(&mut bytes);
        served += target.attack(&bytes);
    }
    // Each session begins with some valid messages.
    assert!(served as u64 > 200 * sessions, "{served} bytes of replies: the server has served too few requests");
    target.wait_until_freed();
    #[cfg(target_os = "linux")]
    {
        let grown = resident().saturating_sub(before);
        assert!(grown < 64 << 20, "the memory of the process has grown by {} MiB", grown >> 20);
    }
}
