//! Progress of loading: one progress bar per device, with MB/s, and the resulting statistics.

use std::time::{Duration, Instant};

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

/// The bars of all devices, on standard error.
pub struct Progress {
    bars: MultiProgress,
}

impl Progress {
    /// The bars are drawn only if `shown` is set and standard error is a terminal.
    pub fn new(shown: bool) -> Progress {
        let target = if shown { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        Progress { bars: MultiProgress::with_draw_target(target) }
    }

    /// Adds the bar of a device that starts to load `total` bytes. Several devices may load at the same time.
    pub fn device(&self, name: &str, total: u64) -> DeviceProgress {
        let bar = self.bars.add(ProgressBar::new(total));
        let rate = |state: &ProgressState, out: &mut dyn std::fmt::Write| {
            let _ = write!(out, "{:.0} MB/s", megabytes_per_second(state.pos(), state.elapsed()).unwrap_or(0.0));
        };
        // An invalid template would only mean an unstyled bar, so the error is ignored.
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
    /// Adds bytes that were loaded.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Finishes the bar; returns the loaded bytes and the time.
    pub fn finish(self) -> LoadStats {
        self.bar.finish();
        LoadStats { bytes: self.bar.position(), from_server_disk: 0, time: self.start.elapsed() }
    }
}

/// Bytes and time of loading a device's weights.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LoadStats {
    /// Bytes of weights.
    pub bytes: u64,
    /// The part of `bytes` that the server loaded from its own disk.
    pub from_server_disk: u64,
    /// Time from the start of the load to its end.
    pub time: Duration,
}

impl LoadStats {
    /// The part of `bytes` that was uploaded.
    pub fn sent(&self) -> u64 {
        self.bytes.saturating_sub(self.from_server_disk)
    }

    /// Rate in MB/s (10^6 bytes); `None` if there is nothing to measure.
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
    fn bytes_are_counted_with_visible_and_hidden_bars() {
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
    fn rates_are_in_millions_of_bytes() {
        let loaded = LoadStats { bytes: 3_000_000, from_server_disk: 0, time: Duration::from_millis(500) };
        assert_eq!(loaded.rate(), Some(6.0));
        assert_eq!(LoadStats::default().rate(), None);
    }
}
