//! Progress of loading: a bar for each device, with its MB/s.

use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// The bars of all devices, on standard error.
pub struct Progress {
    bars: MultiProgress,
}

impl Progress {
    /// Bars are drawn if `shown`, and only on a terminal.
    pub fn new(shown: bool) -> Progress {
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Progress { bars: MultiProgress::with_draw_target(target) }
    }

    /// A device begins to load so many bytes. Several may load at a time.
    pub fn device(&self, name: &str, total: u64) -> DeviceProgress {
        let bar = self.bars.add(ProgressBar::new(total));
        let rate = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{:.0} MB/s", megabytes_per_second(state.pos(), state.elapsed()).unwrap_or(0.0));
        };
        // The template is this program's own; one that were wrong would only look plain.
        if let Ok(style) =
            ProgressStyle::with_template("{prefix:8} {bar:40} {decimal_bytes:>10} of {decimal_total_bytes}, {rate}")
        {
            bar.set_style(style.with_key("rate", rate));
        }
        bar.set_prefix(name.to_owned());
        DeviceProgress { bar, start: Instant::now() }
    }
}

/// Progress of one device.
pub struct DeviceProgress {
    bar: ProgressBar,
    start: Instant,
}

impl DeviceProgress {
    /// So many more bytes are on the device.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// All is loaded: bytes, and how long that took.
    pub fn finish(self) -> LoadStats {
        self.bar.finish();
        LoadStats { bytes: self.bar.position(), from_server_disk: 0, time: self.start.elapsed() }
    }
}

/// What a device has loaded.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadStats {
    /// Bytes of weights.
    pub bytes: u64,
    /// Those of them that it found by itself, and was not sent.
    pub from_server_disk: u64,
    /// From the first byte to the last.
    pub time: Duration,
}

impl LoadStats {
    /// Bytes that were sent to it.
    pub fn sent(&self) -> u64 {
        self.bytes.saturating_sub(self.from_server_disk)
    }

    /// Its rate in MB/s, 10^6 bytes; none where there was nothing to measure.
    pub fn rate(&self) -> Option<f64> {
        megabytes_per_second(self.bytes, self.time)
    }
}

fn megabytes_per_second(bytes: u64, time: Duration) -> Option<f64> {
    let seconds = time.as_secs_f64();
    (bytes > 0 && seconds > 0.0).then(|| bytes as f64 / 1e6 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_counted_whether_or_not_they_are_shown() {
        for shown in [false, true] {
            let progress = Progress::new(shown);
            let (a, b) = (progress.device("CPU0", 100), progress.device("CPU1", 50));
            a.add(60);
            b.add(50);
            a.add(40);
            assert_eq!((a.finish().bytes, b.finish().bytes), (100, 50));
        }
    }

    #[test]
    fn rates_are_of_millions() {
        let loaded = LoadStats { bytes: 3_000_000, from_server_disk: 0, time: Duration::from_millis(500) };
        assert_eq!(loaded.rate(), Some(6.0));
        assert_eq!(LoadStats::default().rate(), None);
    }
}
