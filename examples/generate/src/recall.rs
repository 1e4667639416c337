//! Weights that a device may find by itself, on the disk of its server: it is told their digests, and sent what it lacks.

use crate::load::Job;
use fanout::device::{DeviceError, Known, Queue, Ticket};
use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::Builder;
use std::time::{Duration, Instant};

/// Threads of a device that hash, at most.
const MAX_THREADS: usize = 4;

/// Digests that may be there before the device was told.
const AHEAD: usize = 64;

/// How many threads may hash for one of several devices.
pub fn threads(devices: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / devices.max(1)).clamp(1, MAX_THREADS)
}

/// Fills jobs' regions with what the device finds by itself; which of them it did, in their order. The device is told of each
/// tensor as soon as its digest is known, and answers when it can; `patience` is for each answer. `found` hears of the bytes
/// of each.
///
/// # Errors
/// Whatever the device says.
pub fn recall(
    queue: &mut dyn Queue,
    jobs: &[Job<'_>],
    threads: usize,
    patience: Duration,
    found: impl Fn(u64),
) -> Result<Vec<bool>, DeviceError> {
    let next = AtomicUsize::new(0);
    let mut there = vec![false; jobs.len()];
    let mut settle = |number: usize, ticket: Ticket| {
        let is_there = ticket.wait(Some(Instant::now() + patience))? == [1];
        if let (Some(there), Some(job)) = (there.get_mut(number), jobs.get(number).filter(|_| is_there)) {
            *there = true;
            found(job.region.bytes());
        }
        Ok::<_, DeviceError>(())
    };
    std::thread::scope(|scope| {
        let (digests, known) = sync_channel(AHEAD);
        for _ in 0..threads {
            let (digests, next) = (digests.clone(), &next);
            let started =
                Builder::new().name("hash".to_owned()).spawn_scoped(scope, move || hash(jobs, next, &digests));
            // What nobody hashes is not recalled.
            started.map(drop).unwrap_or_else(|e: io::Error| log::warn!("no thread to hash weights: {e}"));
        }
        drop(digests);
        let mut asked = VecDeque::new();
        for (number, digest) in known {
            let Some(job) = jobs.get(number) else { continue };
            let known = Known { digest, name: job.name };
            asked.push_back((number, queue.recall(job.region.clone(), Some(&job.desc), known)?));
            while let Some((number, ticket)) = asked.pop_front_if(|(_, ticket)| ticket.is_ready()) {
                settle(number, ticket)?;
            }
        }
        asked.into_iter().try_for_each(|(number, ticket)| settle(number, ticket))
    })?;
    Ok(there)
}

/// Hashes jobs that nobody hashes yet, until there are none or nobody wants them.
fn hash(jobs: &[Job<'_>], next: &AtomicUsize, digests: &SyncSender<(usize, [u8; 32])>) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(job) = jobs.get(number) else { return };
        if digests.send((number, job.weight.digest())).is_err() {
            return;
        }
    }
}
