//! The roofline of this machine: memory bandwidth and peak arithmetic throughput, measured with as many threads as the device
//! has.
//!
//! On a shared machine, the roofs change from one second to the next. Therefore each case samples its roofs again in the pauses
//! between its own runs, instead of relying on one measurement at the start.

use crate::peaks::{self, Peak};
use fanout_bench::cases::Kind;
use memmap2::MmapMut;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Bytes of one `memcpy` call in the copy measurement.
const COPY_CHUNK_BYTES: usize = 1 << 18;

/// Rounds of a peak loop in one sample: about 10 ms.
const ROUNDS: u64 = 3 << 20;

/// A roof: a resource of this machine with a rate in units per second.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Roof {
    /// Bytes read.
    Read,
    /// Bytes read plus bytes written by a copy.
    Copy,
    /// Multiplications and additions by an instruction, given by its index in `peaks`.
    Peak(usize),
}

/// Memory, peak loops and threads that the roofs are measured with.
pub struct Machine {
    threads: usize,
    memory: Vec<MmapMut>,
    peaks: Vec<Peak>,
    rounds: u64,
    /// The fastest instruction of each kind.
    fastest: Vec<(Kind, Roof)>,
}

impl Machine {
    /// Allocates `bytes` of memory and finds the fastest instruction of each kind. `smoke` shortens the peak loops.
    pub fn new(threads: usize, bytes: usize, smoke: bool) -> std::io::Result<Machine> {
        let memory = (0..threads).map(|_| prefaulted(bytes / threads)).collect::<Result<_, _>>()?;
        let rounds = if smoke { 1 << 10 } else { ROUNDS };
        let mut machine = Machine { threads, memory, peaks: peaks::available(), rounds, fastest: Vec::new() };
        for kind in [Kind::F32, Kind::Bf16, Kind::Int8] {
            // bf16 products can also be computed with f32 instructions.
            let is_usable = |p: &Peak| p.kind == kind || kind == Kind::Bf16 && p.kind == Kind::F32;
            let usable =
                (0..machine.peaks.len()).filter(|&i| is_usable(&machine.peaks[i])).map(Roof::Peak).collect::<Vec<_>>();
            let rates = usable.into_iter().map(|roof| (machine.median(roof, 5), roof)).collect::<Vec<_>>();
            let fastest = rates.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
            machine.fastest.extend(fastest.map(|(_, roof)| (kind, roof)));
        }
        Ok(machine)
    }

    /// Every roof.
    pub fn all(&self) -> Vec<Roof> {
        [Roof::Read, Roof::Copy].into_iter().chain((0..self.peaks.len()).map(Roof::Peak)).collect()
    }

    /// The fastest instruction for products of a kind, if the processor has one.
    pub fn fastest(&self, kind: Kind) -> Option<Roof> {
        self.fastest.iter().find(|(k, _)| *k == kind).map(|(_, roof)| *roof)
    }

    pub fn name(&self, roof: Roof) -> &'static str {
        match roof {
            Roof::Read => "memory read",
            Roof::Copy => "memory copy",
            Roof::Peak(i) => self.peaks[i].name,
        }
    }

    /// The median rate of a number of samples.
    pub fn median(&mut self, roof: Roof, samples: usize) -> f64 {
        let mut rates: Vec<f64> = (0..samples).map(|_| self.sample(roof)).collect();
        rates.sort_by(f64::total_cmp);
        rates[samples / 2]
    }

    /// Measures a roof once; takes about 10 ms.
    pub fn sample(&mut self, roof: Roof) -> f64 {
        let memory = self.memory.iter_mut().map(|m| &mut m[..]);
        match roof {
            Roof::Read => together(memory, |m| {
                black_box(read(m));
                m.len() as f64
            }),
            Roof::Copy => together(memory, |m| {
                let (to, from) = m.split_at_mut(m.len() / 2);
                // In chunks: for one large copy, `memcpy` would use non-temporal stores, which kernels do not use.
                for (to, from) in to.chunks_mut(COPY_CHUNK_BYTES).zip(from.chunks(COPY_CHUNK_BYTES)) {
                    to.copy_from_slice(from);
                }
                m.len() as f64
            }),
            Roof::Peak(i) => together((0..self.threads).map(|_| ()), |()| {
                self.peaks[i].run(self.rounds);
                (self.rounds * self.peaks[i].ops) as f64
            }),
        }
    }
}

/// Allocates memory in huge pages where the system has them, and prefaults every page.
fn prefaulted(bytes: usize) -> std::io::Result<MmapMut> {
    let mut map = MmapMut::map_anon(bytes)?;
    #[cfg(target_os = "linux")]
    map.advise(memmap2::Advice::HugePage)?;
    map.fill(1);
    Ok(map)
}

/// Reads all bytes in four concurrent streams: a single stream does not saturate the memory bandwidth.
fn read(bytes: &[u8]) -> u64 {
    let words = bytemuck::cast_slice::<u8, [u64; 4]>(&bytes[..bytes.len() & !127]);
    let (a, b) = words.split_at(words.len() / 2);
    let ((a, b), (c, d)) = (a.split_at(a.len() / 2), b.split_at(b.len() / 2));
    let mut sums = [[0u64; 4]; 4];
    for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
        for (sum, words) in sums.iter_mut().zip([a, b, c, d]) {
            for (sum, word) in sum.iter_mut().zip(words) {
                *sum ^= word;
            }
        }
    }
    sums.into_iter().flatten().fold(0, |all, sum| all ^ sum)
}

/// Runs `work` concurrently on one thread per item. `work` returns the number of units done. The result is the sum of the
/// threads' rates; dividing the total by the longest time instead would let one delayed thread lower the rate of all.
fn together<T: Send>(items: impl ExactSizeIterator<Item = T>, work: impl Fn(&mut T) -> f64 + Sync) -> f64 {
    let barrier = Barrier::new(items.len());
    let measure = |mut item: T| {
        barrier.wait();
        let start = Instant::now();
        let done = work(&mut item);
        done / start.elapsed().as_secs_f64()
    };
    let measure = &measure;
    std::thread::scope(|scope| {
        let threads = items.map(|item| scope.spawn(move || measure(item))).collect::<Vec<_>>();
        threads.into_iter().map(|t| t.join().expect("a measuring thread panicked")).sum()
    })
}
