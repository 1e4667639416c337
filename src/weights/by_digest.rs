//! Load by digest: sends a server the digests of weights, so that it loads the matching tensors from its own disk. The caller
//! uploads the weights that the server does not find.

use super::{LoadJob, LoadOptions, LoadProgress};
use crate::device::{DeviceError, LoadByDigest, LoadOutcome, PendingRead, TensorDigest};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::thread::Builder;
use std::time::Instant;

/// Most threads that compute digests for one device.
const MAX_HASH_THREADS: usize = 4;

/// Capacity of the channel from the hashing threads to the sending thread. Backpressure: hashing pauses when it is full.
const DIGESTS_AHEAD: usize = 64;

/// Hashing threads per device, when `devices` devices load at the same time on this machine's cores.
pub(super) fn hash_threads(devices: usize) -> usize {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (cores / devices.max(1)).clamp(1, MAX_HASH_THREADS)
}

/// Requests every job's weight by digest from the device with this number. Returns for each job, in order, whether the device has
/// found and loaded it.
///
/// Hashing, requests and replies are pipelined: a request is sent as soon as its digest is computed, and replies are collected
/// as they arrive. Each reply may take up to the timeout.
///
/// # Errors
/// Any error of the device, and [`DeviceError::Deadline`] for a reply that takes too long.
pub(super) fn load_by_digest(
    device: &mut dyn LoadByDigest,
    number: usize,
    jobs: &[LoadJob<'_>],
    threads: usize,
    options: &LoadOptions<'_>,
) -> Result<Vec<bool>, DeviceError> {
    let next = AtomicUsize::new(0);
    let mut loaded = vec![false; jobs.len()];
    let mut await_reply = |job: usize, reply: PendingRead<LoadOutcome>| {
        if reply.wait(Instant::now().checked_add(options.timeout))? == LoadOutcome::Found {
            loaded[job] = true;
            options.report(LoadProgress::Loaded { device: number, bytes: jobs[job].region.bytes() });
        }
        Ok::<_, DeviceError>(())
    };
    std::thread::scope(|scope| {
        let (digests, hashed) = sync_channel(DIGESTS_AHEAD);
        for _ in 0..threads {
            let (digests, next) = (digests.clone(), &next);
            let hash = move || {
                hash_weights(jobs, next, &digests, |bytes| {
                    options.report(LoadProgress::Hashed { device: number, bytes });
                });
            };
            // Not fatal: weights without a digest are uploaded.
            if let Err(e) = Builder::new().name("hash".to_owned()).spawn_scoped(scope, hash) {
                log::warn!("cannot start a thread to hash weights, more of them may be uploaded: {e}");
            }
        }
        drop(digests);
        let mut pending = VecDeque::new();
        for (number, digest) in hashed {
            let job = &jobs[number];
            let wanted = TensorDigest { digest, bytes: job.weight.bytes().len() as u64, name: job.weight.name() };
            pending.push_back((number, device.load_by_digest(job.region.clone(), Some(&job.desc), wanted, job.runs)?));
            while let Some((number, reply)) = pending.pop_front_if(|(_, reply)| reply.is_ready()) {
                await_reply(number, reply)?;
            }
        }
        pending.into_iter().try_for_each(|(number, reply)| await_reply(number, reply))
    })?;
    Ok(loaded)
}

/// A hashing thread: takes the next unhashed job until none is left, or until the receiver is dropped after an error. Sends the
/// numbers of jobs with the digests of their weights.
fn hash_weights(
    jobs: &[LoadJob<'_>],
    next: &AtomicUsize,
    digests: &SyncSender<(usize, [u8; 32])>,
    report: impl Fn(u64),
) {
    loop {
        let number = next.fetch_add(1, Ordering::Relaxed);
        let Some(job) = jobs.get(number) else { return };
        let digest = job.weight.digest();
        report(job.weight.bytes().len() as u64);
        if digests.send((number, digest)).is_err() {
            return;
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, clippy::panic)] // a failed unwrap fails the test
mod tests {
    use super::super::{LoadStats, Weights, WeightsError, load};
    use super::*;
    use crate::cpu::{CpuDevice, MathMode};
    use crate::device::{Device, ForwardDevice, ForwardQueue, MemoryBudget, Queue, Region, TensorMemory};
    use crate::gguf::{Gguf, Writer};
    use crate::tensor::{ByteRuns, DType, TensorDesc};
    use std::sync::{Arc, Mutex};

    /// A CPU device that loads by digest from a simulated disk.
    #[derive(Debug)]
    struct DeviceWithDisk {
        inner: Arc<CpuDevice>,
        /// The contents of the tensors on the disk.
        disk: Vec<Vec<u8>>,
        /// Number of requests that are answered before the connection is lost.
        replies: usize,
    }

    impl ForwardDevice for DeviceWithDisk {
        fn inner(&self) -> &dyn Device {
            &*self.inner
        }
        fn queue(&self, budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
            let (inner, disk) = (self.inner.queue(budget)?, self.disk.clone());
            Ok(Box::new(DiskQueue { inner, disk, replies: self.replies }))
        }
    }

    struct DiskQueue {
        inner: Box<dyn Queue>,
        disk: Vec<Vec<u8>>,
        replies: usize,
    }

    impl ForwardQueue for DiskQueue {
        fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
            Ok(&mut *self.inner)
        }
        fn load_by_digest(&mut self) -> Option<&mut dyn LoadByDigest> {
            Some(self)
        }
    }

    impl LoadByDigest for DiskQueue {
        fn load_by_digest(
            &mut self,
            dst: Region,
            tensor: Option<&TensorDesc>,
            wanted: TensorDigest<'_>,
            runs: ByteRuns,
        ) -> Result<PendingRead<LoadOutcome>, DeviceError> {
            self.replies = self.replies.checked_sub(1).ok_or(DeviceError::Ended)?;
            let is_it = |bytes: &&Vec<u8>| *blake3::hash(bytes).as_bytes() == wanted.digest;
            let found = self.disk.iter().find(is_it).cloned();
            match &found {
                Some(bytes) => {
                    let mut reader = runs.reader(bytes).unwrap();
                    self.inner.upload_from(dst, tensor, |to| reader.read(to)).unwrap();
                }
                None => self.inner.fill(dst, 0xee)?,
            }
            let (sender, reply) = PendingRead::new();
            sender.send(Ok(if found.is_some() { LoadOutcome::Found } else { LoadOutcome::Missing }));
            Ok(reply)
        }
    }

    type Tensors = Vec<Vec<u8>>;

    /// Loads 40 tensors of `n` bytes onto a device. Its disk holds the bytes that `on_disk` derives from each tensor. Returns
    /// the bytes in the device's memory afterwards, and the expected bytes.
    fn loaded(
        n: usize,
        replies: usize,
        on_disk: impl Fn(usize, &[u8]) -> Vec<u8>,
    ) -> Result<(LoadStats, [Tensors; 2]), WeightsError> {
        let names: Vec<String> = (0..40).map(|i| format!("blk.{i}.weight")).collect();
        let file = names.iter().fold(Writer::new(), |file, name| file.tensor(name, &[n as u64], DType::I8));
        let mut file = file.to_bytes().unwrap();
        let infos = Gguf::parse(&file).unwrap().tensors;
        let mut rng = fastrand::Rng::with_seed(n as u64);
        infos.iter().for_each(|info| rng.fill(&mut file[info.bytes.clone()]));
        let want: Vec<Vec<u8>> = infos.iter().map(|info| file[info.bytes.clone()].to_vec()).collect();
        let gguf = Gguf::parse(&file).unwrap();
        let weights = Weights::of_bytes(&[&file], &gguf.tensors);

        let inner = CpuDevice::new("CPU", 1, MathMode::Exact, 1 << 30).unwrap();
        let disk = want.iter().enumerate().map(|(i, bytes)| on_disk(i, bytes)).collect();
        let device = Arc::new(DeviceWithDisk { inner, disk, replies }) as Arc<dyn Device>;
        let budget = MemoryBudget::new(1 << 30);
        let memory = TensorMemory::new(&*device, weights.iter().map(|weight| weight.desc()), &budget).unwrap();
        let jobs = weights.iter().zip(memory.regions()).map(|(weight, region)| LoadJob::whole(weight, region.clone()));
        let jobs = [jobs.collect::<Vec<_>>()];
        let progress = Mutex::new([0, 0]);
        let report = |event| {
            let mut progress = progress.lock().unwrap();
            match event {
                LoadProgress::Hashed { device: 0, bytes } => progress[0] += bytes,
                LoadProgress::Loaded { device: 0, bytes } => progress[1] += bytes,
                other => panic!("{other:?}"),
            }
        };
        let options = LoadOptions::default().with_progress(&report);
        let loaded = load(&[Arc::clone(&device)], &jobs, &budget, &options).remove(0)?;
        assert_eq!(*progress.lock().unwrap(), [40 * n as u64; 2]);
        let jobs = &jobs[0];
        let mut queue = device.queue(&budget).unwrap();
        let there = jobs.iter().map(|job| queue.download(job.region.clone()).unwrap().wait(None).unwrap()).collect();
        Ok((loaded, [there, want]))
    }

    #[test]
    fn weights_that_the_server_lacks_are_uploaded() {
        for n in [10, 5000, 1 << 20] {
            let all = 40 * n as u64;
            let flipped = |bytes: &[u8]| [&[bytes[0] ^ 1], &bytes[1..]].concat();
            type Disk<'a> = &'a dyn Fn(usize, &[u8]) -> Vec<u8>;
            let cases: [(Disk<'_>, u64); 4] = [
                (&|_, bytes| bytes.to_vec(), all),
                (&|_, _| Vec::new(), 0),
                // A different file of the same shape, and a file in which a quarter of the tensors differ.
                (&|_, bytes| flipped(bytes), 0),
                (&|i, bytes| if i % 4 == 1 { flipped(bytes) } else { bytes.to_vec() }, all / 4 * 3),
            ];
            for (disk, from_disk) in cases {
                let (loaded, [there, want]) = loaded(n, 40, disk).unwrap();
                assert!(there == want, "{n} bytes, {from_disk} from disk");
                assert_eq!((loaded.bytes, loaded.from_server_disk, loaded.sent()), (all, from_disk, all - from_disk));
            }
        }
    }

    #[test]
    fn a_device_failure_ends_the_load() {
        for replies in [0, 7] {
            let error = loaded(3000, replies, |_, bytes| bytes.to_vec()).unwrap_err();
            assert!(matches!(error, WeightsError::Device { error: DeviceError::Ended, .. }), "{error}");
        }
    }
}
