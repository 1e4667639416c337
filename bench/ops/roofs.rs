//! The roofs of this machine, measured with as many threads as the device has: bytes per second of memory, products per
//! second of the vector units.
//!
//! On a shared machine they change from one second to the next, so they are not measured once: each case samples the
//! roofs that bound it in the pauses between its own runs.

use crate::peaks::{self, Peak};
use fanout_bench::cases::Kind;
use memmap2::MmapMut;
use std::hint::black_box;
use std::sync::Barrier;
use std::time::Instant;

/// Bytes of one `memcpy`.
const PIECE: usize = 1 << 18;

/// Rounds of a peak's loop in one sample: some 10 ms.
const ROUNDS: u64 = 3 << 20;

/// Something that this machine does at a rate, in units per second.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Roof {
    /// Bytes read.
    Read,
    /// Bytes read and written by a copy, each counted.
    Copy,
    /// Multiplications and additions of an instruction, by its number.
    Peak(usize),
}

/// What the roofs are measured with.
pub struct Machine {
    threads: usize,
    memory: Vec<MmapMut>,
    peaks: Vec<Peak>,
    rounds: u64,
    /// The fastest instruction of each kind.
    fastest: Vec<(Kind, Roof)>,
}

impl Machine {
    /// With `bytes` of memory to read, or as small as can be.
    pub fn new(threads: usize, bytes: usize, smoke: bool) -> std::io::Result<Machine> {
        let memory = (0..threads).map(|_| touched(bytes / threads)).collect::<Result<_, _>>()?;
        let rounds = if smoke { 1 << 10 } else { ROUNDS };
        let mut machine = Machine { threads, memory, peaks: peaks::available(), rounds, fastest: Vec::new() };
        for kind in [Kind::F32, Kind::Bf16, Kind::Int8] {
            // What multiplies f32 multiplies bf16 too.
            let able = |p: &Peak| p.kind == kind || kind == Kind::Bf16 && p.kind == Kind::F32;
            let able =
                (0..machine.peaks.len()).filter(|&i| able(&machine.peaks[i])).map(Roof::Peak).collect::<Vec<_>>();
            let rates = able.into_iter().map(|roof| (machine.median(roof, 5), roof)).collect::<Vec<_>>();
            let fastest = rates.into_iter().max_by(|a, b| a.0.total_cmp(&b.0));
            machine.fastest.extend(fastest.map(|(_, roof)| (kind, roof)));
        }
        Ok(machine)
    }

    /// Every roof.
    pub fn all(&self) -> Vec<Roof> {
        [Roof::Read, Roof::Copy].into_iter().chain((0..self.peaks.len()).map(Roof::Peak)).collect()
    }

    /// The fastest way to do products of a kind, if the processor has one.
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

    /// The middle one of some samples.
    pub fn median(&mut self, roof: Roof, samples: usize) -> f64 {
        let mut rates: Vec<f64> = (0..samples).map(|_| self.sample(roof)).collect();
        rates.sort_by(f64::total_cmp);
        rates[samples / 2]
    }

    /// Measures a roof once: some 10 ms.
    pub fn sample(&mut self, roof: Roof) -> f64 {
        let memory = self.memory.iter_mut().map(|m| &mut m[..]);
        match roof {
            Roof::Read => together(memory, |m| {
                black_box(read(m));
                m.len() as f64
            }),
            Roof::Copy => together(memory, |m| {
                let (to, from) = m.split_at_mut(m.len() / 2);
                // In pieces: `memcpy` writes around the caches when it sees how much there is, as no kernel does.
                for (to, from) in to.chunks_mut(PIECE).zip(from.chunks(PIECE)) {
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

/// Memory as the device takes it, with every page in place.
fn touched(bytes: usize) -> std::io::Result<MmapMut> {
    let mut map = MmapMut::map_anon(bytes)?;
    #[cfg(target_os = "linux")]
    map.advise(memmap2::Advice::HugePage)?;
    map.fill(1);
    Ok(map)
}

/// Reads everything, as four streams: one alone does not keep enough of memory busy.
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

/// Runs `work` on a thread for each item, at the same time. It returns the units it has done; the threads' rates add up,
/// so that one that was held up does not hide what the others did.
fn together<T: Send>(items: impl ExactSizeIterator<Item = T>, work: impl Fn(&mut T) -> f64 + Sync) -> f64 {
    let barrier = Barrier::new(items.len());
    let one = |mut item: T| {
        barrier.wait();
        let start = Instant::now();
        let done = work(&mut item);
        done / start.elapsed().as_secs_f64()
    };
    let one = &one;
    std::thread::scope(|scope| {
        let threads = items.map(|item| scope.spawn(move || one(item))).collect::<Vec<_>>();
        threads.into_iter().map(|t| t.join().expect("a thread that measures")).sum()
    })
}
