//! Floods of lines, counted: time is an argument, so nothing sleeps.

use super::*;
use crate::poison::lock;
use std::net::SocketAddr;

const SECOND: Duration = Duration::from_secs(1);

fn limits() -> LogLimits {
    LogLimits::new(&config())
}

fn config() -> Config {
    Config::default().with_log_burst(5).with_log_interval(10 * SECOND)
}

fn peer(ip: &str) -> LogSource {
    limits().source(address(ip))
}

fn address(ip: &str) -> PeerAddr {
    PeerAddr::Ip(SocketAddr::new(ip.parse().unwrap(), 40_000))
}

/// What a flood has caused.
#[derive(Default)]
struct Flood {
    shown: u64,
    reported: u64,
}

impl Flood {
    /// A line. Returns whether it was shown.
    fn line(&mut self, limits: &LogLimits, source: LogSource, kind: LogKind, now: Duration) -> bool {
        let left_out = limits.admit(source, kind, now);
        self.shown += u64::from(left_out.is_some());
        self.reported += left_out.as_ref().map_or(0, |left_out| left_out.of_source.1 + left_out.of_all);
        left_out.is_some()
    }

    fn reports(&mut self, limits: &LogLimits, now: Duration) -> usize {
        let due = limits.due_reports(now);
        self.reported += due.iter().map(|left_out| left_out.of_source.1 + left_out.of_all).sum::<u64>();
        due.len()
    }

    /// All lines that were caused, once the server has ended.
    fn total(&mut self, limits: &LogLimits) -> u64 {
        self.shown + self.reported + limits.take_totals().iter().map(|(_, count)| count).sum::<u64>()
    }
}

#[test]
fn a_flood_of_each_kind_gives_a_few_lines_and_an_exact_count() {
    for &kind in KINDS {
        for source in [peer("10.0.0.5"), peer("fd00::1"), LogSource::Loopback, LogSource::Server] {
            let (limits, mut flood) = (limits(), Flood::default());
            // 10,000 lines within a second: the burst.
            for line in 0..10_000 {
                flood.line(&limits, source, kind, SECOND * line / 10_000);
            }
            let burst = u64::from(5 * kind.weight());
            let second = burst + u64::from(kind.weight() / 10);
            assert!((burst..=second).contains(&flood.shown), "{kind:?}, {source:?}: {}", flood.shown);
            assert_eq!(flood.total(&limits), 10_000);
            assert_eq!(limits.take_totals(), []);
        }
    }
}

#[test]
fn the_next_line_says_how_many_were_left_out() {
    let (limits, source, kind) = (limits(), peer("10.0.0.5"), LogKind::RefusedAllocation);
    let mut flood = Flood::default();
    (0..10_000).for_each(|_| _ = flood.line(&limits, source, kind, Duration::ZERO));
    assert_eq!(flood.shown, 5);
    // A token comes back every ten seconds, and only one.
    assert!(limits.admit(source, kind, 10 * SECOND - Duration::from_nanos(1)).is_none());
    let left_out = limits.admit(source, kind, 10 * SECOND).unwrap();
    assert_eq!(left_out, LeftOut { kind, of_source: (source, 9_996), of_all: 0 });
    assert_eq!(left_out.to_string(), "left out: 9996 more lines about refused allocations of 10.0.0.5");
    assert!(limits.admit(source, kind, 10 * SECOND).is_none());
    // A bucket that was full for long has its burst again, and no more.
    let mut later = Flood::default();
    (0..100).for_each(|_| _ = later.line(&limits, source, kind, 10_000 * SECOND));
    assert_eq!((later.shown, later.reported), (5, 1));
}

#[test]
fn sources_and_kinds_do_not_hide_each_other() {
    let limits = limits();
    let mut flood = Flood::default();
    (0..100).for_each(|_| _ = flood.line(&limits, peer("10.0.0.5"), LogKind::BadConnection, Duration::ZERO));
    for (source, kind, shown) in [
        (peer("10.0.0.6"), LogKind::BadConnection, true),
        (peer("10.0.0.5"), LogKind::SessionFailure, true),
        (peer("::ffff:10.0.0.5"), LogKind::BadConnection, false),
        (LogSource::Loopback, LogKind::BadConnection, true),
        (peer("fd00:1:2:3::1"), LogKind::BadConnection, true),
    ] {
        assert_eq!(flood.line(&limits, source, kind, Duration::ZERO), shown, "{source:?}, {kind:?}");
    }
    assert_eq!(peer("fd00:1:2:3::1"), peer("fd00:1:2:3::2"));
    assert_eq!([peer("127.0.0.1"), peer("127.0.0.2"), peer("::1")], [LogSource::Loopback; 3]);
    assert_eq!(peer("fd00:1:2:3::1").to_string(), " of fd00:1:2:3::/64");
}

/// Behind a proxy on the same machine, clients are told apart by their addresses of loopback, if the configuration says so.
#[test]
fn addresses_of_loopback_do_not_hide_each_other_if_they_are_tenants() {
    for (with_loopback, shown) in [(false, false), (true, true)] {
        let limits = LogLimits::new(&config().with_loopback_tenants(with_loopback));
        let [first, second] = ["127.0.0.2", "127.0.0.3"].map(|ip| limits.source(address(ip)));
        let (mut flood, kind) = (Flood::default(), LogKind::RefusedAllocation);
        (0..3000).for_each(|_| _ = flood.line(&limits, first, kind, Duration::ZERO));
        assert_eq!(flood.line(&limits, second, kind, Duration::ZERO), shown, "{with_loopback}");
    }
}

/// Many addresses do not flood the log either, and take bounded memory.
#[test]
fn addresses_share_the_buckets_of_the_process() {
    let (limits, mut flood) = (limits(), Flood::default());
    let kind = LogKind::BadConnection;
    for line in 0..30_000u32 {
        let ip = IpAddr::from((0x0a00_0000 + line / 3).to_be_bytes());
        flood.line(&limits, limits.source(PeerAddr::Ip((ip, 1).into())), kind, Duration::ZERO);
    }
    assert_eq!(flood.shown, 20);
    assert!(lock(&limits.state).by_source.len() <= MAX_BUCKETS);
    // An address that was not seen before, after the bound.
    let left_out = limits.admit(peer("10.9.9.9"), kind, 3 * SECOND).unwrap();
    assert_eq!(left_out.of_source.1, 0);
    flood.shown += 1;
    flood.reported += left_out.of_all;
    assert_eq!(flood.total(&limits), 30_001);
}

/// Without further lines, the count is a line of its own, as soon as there is a token for it; idle buckets are dropped.
#[test]
fn counts_are_reported_when_the_flood_has_ended() {
    let (limits, source) = (limits(), peer("10.0.0.5"));
    let mut flood = Flood::default();
    (0..1000).for_each(|_| _ = flood.line(&limits, source, LogKind::BadConnection, Duration::ZERO));
    assert_eq!(flood.reports(&limits, SECOND), 0, "no token");
    assert_eq!(flood.reports(&limits, 10 * SECOND), 1);
    assert_eq!(flood.reported, 995);
    assert_eq!(flood.reports(&limits, 20 * SECOND), 0);
    assert_eq!(lock(&limits.state).by_source.len(), 1);
    assert_eq!(flood.reports(&limits, 60 * SECOND), 0);
    assert_eq!(lock(&limits.state).by_source.len(), 0);
    assert_eq!(flood.total(&limits), 1000);
    // A pass over the buckets is made at most once a second.
    (0..1000).for_each(|_| _ = flood.line(&limits, source, LogKind::BadConnection, 60 * SECOND));
    let early = Duration::from_millis(60_999);
    assert_eq!(flood.reports(&limits, early), 0);
    assert_eq!(flood.total(&limits), 2000);
}

/// Counts stay exact whatever the order of lines, sources, kinds, times and reports.
#[test]
fn no_line_is_lost_for_any_sequence() {
    for seed in 0..20 {
        let mut rng = fastrand::Rng::with_seed(seed);
        let (limits, mut flood, mut now) = (limits(), Flood::default(), Duration::ZERO);
        let mut lines = 0;
        for _ in 0..3000 {
            match rng.u32(..20) {
                0 => now += SECOND * rng.u32(..30),
                1 => _ = flood.reports(&limits, now),
                _ => {
                    let source = match rng.u8(..5) {
                        0 => LogSource::Server,
                        1 => LogSource::Loopback,
                        host => peer(&format!("10.0.0.{host}")),
                    };
                    flood.line(&limits, source, KINDS[rng.usize(..KINDS.len())], now);
                    lines += 1;
                }
            }
        }
        assert_eq!(flood.total(&limits), lines, "seed {seed}");
    }
}

#[test]
fn a_line_is_escaped_and_bounded() {
    let text = |name: &str| line_text(format_args!("10.0.0.5:1: {name}; connection closed"));
    for (name, want) in [
        ("a\nb\r\tc", r"a\nb\r\tc"),
        ("\x1b[2J\x07\0\x7f", r"\u{1b}[2J\u{7}\u{0}\u{7f}"),
        ("\u{85}\u{9b}31m", r"\u{85}\u{9b}31m"),
        ("\u{2028}\u{202e}\u{2066}\u{feff}", r"\u{2028}\u{202e}\u{2066}\u{feff}"),
        ("zwölf Töne", "zwölf Töne"),
    ] {
        assert_eq!(text(name), format!("10.0.0.5:1: {want}; connection closed"));
    }
    for long in ["x".repeat(5000), "\n".repeat(5000), "ö".repeat(5000)] {
        let line = text(&long);
        assert!(line.len() <= MAX_LINE_BYTES + 16 && line.ends_with('…'), "{}", line.len());
    }
    assert_eq!(line_text(format_args!("{}", "x".repeat(MAX_LINE_BYTES))).len(), MAX_LINE_BYTES);
}
