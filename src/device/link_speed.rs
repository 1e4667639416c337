//! Measuring the link to a device: round trip and bandwidth, by transfers of a small buffer. Meant for devices of servers.

use super::{Device, DeviceError, MemoryBudget, UploadSource};
use std::time::{Duration, Instant};

/// Time limit of each transfer.
const TIMEOUT: Duration = Duration::from_secs(20);

/// How long round trips are measured.
const ROUND_TRIP_TIME: Duration = Duration::from_secs(2);

/// Round trips; their median counts.
const ROUND_TRIPS: usize = 31;

/// Most bytes of a transfer by which the bandwidth is measured, and the bytes of the first one.
const TRANSFER: u64 = 8 << 20;
const FIRST_TRANSFER: u64 = 64 << 10;

/// How long transfers in one direction go on.
const TRANSFER_TIME: Duration = Duration::from_millis(400);

/// Most transfers in one direction.
const TRANSFERS: usize = 64;

/// The measured speed of the link to a device.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct LinkSpeed {
    /// Median time from a request for a few bytes to their arrival.
    pub round_trip: Duration,
    /// Number of round trips; this is their median.
    pub round_trips: usize,
    /// Bytes per second to the device.
    pub to_device: f64,
    /// Bytes per second from it.
    pub from_device: f64,
}

impl LinkSpeed {
    /// Measures round trip and bandwidth on a buffer of up to 8 MiB of `device`. Takes up to about 3 s, most of it on slow links.
    /// Returns `None` if the device has no free memory for a transfer.
    ///
    /// # Errors
    /// The failure of an allocation or a transfer; [`DeviceError::Deadline`] if a transfer takes 20 s.
    pub fn measure(device: &dyn Device) -> Result<Option<LinkSpeed>, DeviceError> {
        let bytes = TRANSFER.min(device.memory()?.free / 4);
        if bytes < FIRST_TRANSFER {
            return Ok(None);
        }
        let budget = MemoryBudget::new(2 * TRANSFER);
        let buffer = device.alloc(bytes, &budget)?;
        let mut queue = device.queue(&budget)?;
        let one = buffer.region(0, 4)?;
        let deadline = || Some(Instant::now() + TIMEOUT);
        let mut times = Vec::new();
        let start = Instant::now();
        while times.len() < ROUND_TRIPS && (times.is_empty() || start.elapsed() < ROUND_TRIP_TIME) {
            let began = Instant::now();
            queue.download(one.clone())?.wait(deadline())?;
            times.push(began.elapsed());
        }
        times.sort();

        // Larger transfers, until one takes long enough: that of a slow link must not take minutes. They also touch all pages.
        let mut data = vec![0x5a; FIRST_TRANSFER as usize];
        loop {
            let began = Instant::now();
            let region = buffer.region(0, data.len() as u64)?;
            queue.upload(region, None, UploadSource::Borrowed(&data))?;
            queue.download(one.clone())?.wait(deadline())?;
            if data.len() as u64 == bytes || began.elapsed() > TRANSFER_TIME / 4 {
                break;
            }
            data.resize(bytes.min(2 * data.len() as u64) as usize, 0x5a);
        }
        let region = buffer.region(0, data.len() as u64)?;
        let to_device = rate(region.bytes(), || {
            queue.upload(region.clone(), None, UploadSource::Borrowed(&data))?;
            queue.download(one.clone())?.wait(deadline()).map(drop)
        })?;
        let from_device = rate(region.bytes(), || queue.download(region.clone())?.wait(deadline()).map(drop))?;
        let round_trip = times.get(times.len() / 2).copied().unwrap_or_default();
        Ok(Some(LinkSpeed { round_trip, round_trips: times.len(), to_device, from_device }))
    }
}

/// Bytes per second of transfers, one after another.
fn rate(bytes: u64, mut transfer: impl FnMut() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let (began, mut count) = (Instant::now(), 0);
    while count < TRANSFERS && (count == 0 || began.elapsed() < TRANSFER_TIME) {
        transfer()?;
        count += 1;
    }
    Ok(bytes as f64 * count as f64 / began.elapsed().as_secs_f64().max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::DeviceKind;
    use crate::device::noop::NoopDevice;

    #[test]
    fn a_device_is_measured_if_it_has_the_memory() {
        let device = |bytes| NoopDevice::new("noop", DeviceKind::Cpu).with_memory(bytes).shared();
        let speed = LinkSpeed::measure(&*device(4 * FIRST_TRANSFER)).unwrap().unwrap();
        assert!(speed.round_trips > 0 && speed.to_device > 0.0 && speed.from_device > 0.0, "{speed:?}");
        assert_eq!(LinkSpeed::measure(&*device(4 * FIRST_TRANSFER - 1)).unwrap(), None);
    }
}
