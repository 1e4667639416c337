//! The body of the fuzz target `session` over seeded choices.
//!
//! `HOSTILE_SESSIONS=100000 HOSTILE_SEED=7 cargo test --release --workspace --test sessions` tries more of them.

use fastrand::Rng;
use hostile_client::Target;

/// A number from the environment, for longer runs by hand.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |text| text.parse().unwrap_or_else(|e| panic!("{name}: {e}")))
}

/// Resident memory of this process, in bytes.
#[cfg(target_os = "linux")]
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux tells");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a line of that name");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

#[test]
fn sessions_of_any_bytes_leave_the_server_as_it_was() {
    let (sessions, mut rng) = (setting("HOSTILE_SESSIONS", 400), Rng::with_seed(setting("HOSTILE_SEED", 1)));
    let mut target = Target::new();
    #[cfg(target_os = "linux")]
    let before = resident();
    let mut served = 0;
    for _ in 0..sessions {
        let mut bytes = vec![0; rng.usize(..1200)];
        rng.fill(&mut bytes);
        served += target.attack(&bytes);
    }
    // Each begins with some messages in which nothing is wrong.
    assert!(served as u64 > 200 * sessions, "{served} bytes of replies: nothing was served");
    target.wait_until_freed();
    #[cfg(target_os = "linux")]
    {
        let grown = resident().saturating_sub(before);
        assert!(grown < 64 << 20, "{} MiB more", grown >> 20);
    }
}
