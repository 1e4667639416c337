//! Times of work on a device, measured by the host.

use fanout::device::{DeviceError, TimelinePoint};
use std::time::{Duration, Instant};

/// Deadline of a run or a download.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// Waits by spinning. [`TimelinePoint::wait`] would distort the measurement: after 200 us it sleeps between polls, and notices
/// the end up to 100 us late.
pub fn finish(point: &TimelinePoint) -> Result<(), DeviceError> {
    let until = Instant::now() + TIMEOUT;
    while !point.poll()? {
        if Instant::now() > until {
            return Err(DeviceError::Deadline("a run"));
        }
        std::hint::spin_loop();
    }
    Ok(())
}

/// Sorted times of `run`, in seconds: two warm-up runs, then samples for about `time`, at least 5 and at most 5000.
pub fn sample(time: Duration, mut run: impl FnMut() -> Result<(), DeviceError>) -> Result<Vec<f64>, DeviceError> {
    run()?;
    run()?;
    let (start, mut times) = (Instant::now(), Vec::new());
    while times.len() < 5 || (start.elapsed() < time && times.len() < 5000) {
        let begin = Instant::now();
        run()?;
        times.push(begin.elapsed().as_secs_f64());
    }
    times.sort_by(f64::total_cmp);
    Ok(times)
}

/// The value below which `share` of sorted values lie; 0 if there are none.
pub fn quantile(sorted: &[f64], share: f64) -> f64 {
    let last = sorted.len().saturating_sub(1) as f64;
    sorted.get((last * share).round() as usize).copied().unwrap_or(0.0)
}
