//! Progress of long work: a bar on a terminal, else a line now and then. Both tell how much is done, the rate and the time left.

use std::fmt::Write as _;
use std::io::{self, IsTerminal};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fanout::printable::printable_line;
use indicatif::{ProgressBar, ProgressState, ProgressStyle};

use crate::console;

/// Time between two lines of progress where there are no bars.
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// How progress is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Nothing is shown.
    Hidden,
    /// As a bar for each task.
    Bars,
    /// As lines.
    Lines,
}

/// The unit of the progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Bytes, shown in MB (10^6 bytes).
    Bytes,
    /// Tokens.
    Tokens,
}

impl Unit {
    fn rate(self, per_second: f64) -> String {
        match self {
            Unit::Bytes => format!("{:.0} MB/s", per_second / 1e6),
            Unit::Tokens => format!("{per_second:.0} tok/s"),
        }
    }

    /// How much is done, the rate so far, and the time left at that rate.
    fn status(self, done: u64, total: u64, elapsed: Duration) -> String {
        let mut text = match self {
            Unit::Bytes => format!("{:.0} of {:.0} MB", done as f64 / 1e6, total as f64 / 1e6),
            Unit::Tokens => format!("{done} of {total} tokens"),
        };
        if let Some(rate) = per_second(done, elapsed) {
            let left = Duration::from_secs_f64((total.saturating_sub(done) as f64 / rate).min(1e9));
            let _ = write!(text, ", {}, {} left", self.rate(rate), short(left));
        }
        text
    }
}

/// A time in its largest two units.
fn short(time: Duration) -> String {
    let seconds = time.as_secs_f64().ceil() as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

impl Progress {
    /// Bars if standard error is a terminal, else lines; hidden unless `shown` is set.
    pub fn new(shown: bool) -> Progress {
        match shown {
            false => Progress::Hidden,
            true if io::stderr().is_terminal() => Progress::Bars,
            true => Progress::Lines,
        }
    }

    /// Starts to show a task. Several tasks may be shown at the same time.
    pub fn start(self, name: impl Into<String>, unit: Unit, total: u64) -> Task {
        let (name, start) = (name.into(), Instant::now());
        let bar = if self == Progress::Bars {
            let status = move |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                let _ = out.write_str(&unit.status(state.pos(), total, state.elapsed()));
            };
            let bar = console::bars().add(ProgressBar::new(total));
            // An invalid template would only mean an unstyled bar, so the error is ignored.
            if let Ok(style) = ProgressStyle::with_template("{prefix} {wide_bar} {status}") {
                bar.set_style(style.with_key("status", status));
            }
            bar.set_prefix(printable_line(&name));
            bar
        } else {
            // A hidden bar only counts.
            ProgressBar::with_draw_target(Some(total), indicatif::ProgressDrawTarget::hidden())
        };
        let next_line = (self == Progress::Lines).then(|| Mutex::new(start + LINE_INTERVAL));
        Task { bar, name, unit, total, start, next_line }
    }
}

/// A task whose progress is shown. It disappears from a terminal when it is dropped.
pub struct Task {
    bar: ProgressBar,
    name: String,
    unit: Unit,
    total: u64,
    start: Instant,
    /// When the next line is due, where progress is shown as lines.
    next_line: Option<Mutex<Instant>>,
}

impl Task {
    /// Adds what was done.
    pub fn add(&self, count: u64) {
        self.bar.inc(count);
        let Some(next) = &self.next_line else { return };
        let (now, mut next) = (Instant::now(), next.lock().unwrap_or_else(PoisonError::into_inner));
        if now >= *next {
            *next = now + LINE_INTERVAL;
            let status = self.unit.status(self.bar.position(), self.total, now - self.start);
            console::message(format_args!("{}: {status}", self.name));
        }
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
        console::bars().remove(&self.bar);
    }
}

fn per_second(count: u64, time: Duration) -> Option<f64> {
    let seconds = time.as_secs_f64();
    (count > 0 && seconds > 0.0).then(|| count as f64 / seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_counted_whether_it_is_shown_or_not() {
        for progress in [Progress::Hidden, Progress::Bars, Progress::Lines] {
            let (a, b) = (progress.start("CPU0", Unit::Bytes, 100), progress.start("CPU1", Unit::Bytes, 50));
            a.add(60);
            b.add(50);
            a.add(40);
            assert_eq!((a.bar.position(), b.bar.position()), (100, 50));
        }
    }

    #[test]
    fn the_status_has_count_rate_and_time_left() {
        let cases = [
            (Unit::Bytes, 0, 4_400_000_000, 0, "0 of 4400 MB"),
            (Unit::Bytes, 1_100_000_000, 4_400_000_000, 10, "1100 of 4400 MB, 110 MB/s, 30 s left"),
            (Unit::Bytes, 1_000_000, 100_000_000, 1, "1 of 100 MB, 1 MB/s, 1 min 39 s left"),
            (Unit::Tokens, 512, 4096, 256, "512 of 4096 tokens, 2 tok/s, 29 min 52 s left"),
            (Unit::Tokens, 1, 10_000, 1, "1 of 10000 tokens, 1 tok/s, 2 h 46 min left"),
            (Unit::Tokens, 9, 9, 3, "9 of 9 tokens, 3 tok/s, 0 s left"),
        ];
        for (unit, done, total, seconds, expected) in cases {
            assert_eq!(unit.status(done, total, Duration::from_secs(seconds)), expected);
        }
    }
}
