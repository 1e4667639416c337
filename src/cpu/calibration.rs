//! A short measurement when the first device in fast mode of a process opens, on x86-64: how this machine's cores read panels
//! from memory fastest ([`PanelReads`]), whether huge pages are cleared as fast as small ones, and whether bf16 dot products
//! are faster than FMA. Results of kernels depend on the last choice only: it rounds the columns of BF16 products to bf16.
//!
//! A product of one column waits for memory. Whether prefetches help, and how far ahead, does not follow from the brand of the
//! processor: they delay the loads of Zen 4, help types with sub-blocks of 16 on Zen 3, and all types on Intel's servers
//! (docs/lab/matrix-products.md). So each candidate reads the same panels, on as many threads as the first device has (16 at
//! most), because the cores share the queues of memory; later devices use the same choice. Before each sample the panels are
//! flushed from all caches, so that half a megabyte for each thread suffices.

use super::memory::choose_page_size;
use super::pool::spin_until;
use super::simd::{GemmKernels, MAX_PANELS, PanelReadClass, PanelReads, PanelSums, TileOutput, flush_from_caches};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Elements of a row.
const K: usize = 2048;

/// Bytes that a thread reads per sample: several calls of a kernel with the widest type.
const SAMPLE_BYTES: usize = 512 << 10;

/// Most threads that take part.
const MAX_THREADS: usize = 16;

/// Samples of each candidate: in each round, all candidates one after the other.
const ROUNDS: usize = 5;

/// Products of a whole register tile in a sample of bf16: some tens of microseconds.
const BF16_CALLS: usize = 8;

/// Classes that are not measured after this time keep their defaults.
const TIME_LIMIT: Duration = Duration::from_millis(35);

/// A candidate replaces the default if it takes at most this share of the default's time, in the median of the rounds. Other
/// programs on the machine change the times by as much.
const WORTH_IT: f64 = 0.9;

/// Prefetch distances to choose from, in bytes; 0 for none.
const DISTANCES: [u32; 4] = [0, 1024, 2048, 4096];

/// The chosen variants, for reports.
#[derive(Debug)]
pub(super) struct Calibration {
    pub(super) panel_reads: Vec<(PanelReadClass, PanelReads)>,
    pub(super) huge_pages: bool,
    /// Whether products of BF16 weights use bf16 dot products; `None` where the processor has none.
    pub(super) bf16_dots: Option<bool>,
}

static CALIBRATION: OnceLock<Calibration> = OnceLock::new();

impl Calibration {
    /// The calibration of this process. The first call measures it, with up to `threads` threads. No sample of panels begins
    /// after 35 ms; the rest takes some milliseconds. A line of the log (debug level) has the time.
    pub(super) fn of_process(threads: usize) -> &'static Calibration {
        CALIBRATION.get_or_init(|| {
            let began = Instant::now();
            let panel_reads = choose_panel_reads(threads.clamp(1, MAX_THREADS), began);
            let calibration = Calibration { panel_reads, huge_pages: choose_page_size(), bf16_dots: choose_bf16() };
            log::debug!("calibrated the CPU device in {:?}: {calibration:?}", began.elapsed());
            calibration
        })
    }

    /// The calibration of this process, if it was made.
    pub(super) fn made() -> Option<&'static Calibration> {
        CALIBRATION.get()
    }

    /// One word per class, as a feature of the device: the distance of its prefetches, and `/1` where it reads one panel at a
    /// time.
    pub(super) fn text(&self) -> String {
        let word = |(class, panel_reads): &(PanelReadClass, PanelReads)| {
            format!("{class:?}:{}{}", panel_reads.prefetch, if panel_reads.one_panel { "/1" } else { "" })
        };
        self.panel_reads.iter().map(word).collect::<Vec<_>>().join(" ")
    }
}

/// Measures every class, and uses the best setting from then on.
fn choose_panel_reads(threads: usize, began: Instant) -> Vec<(PanelReadClass, PanelReads)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let sampler = Sampler::default();
    std::thread::scope(|scope| {
        let _guard = StopOnPanic(&sampler);
        let spawn =
            |_| std::thread::Builder::new().name("calibration".to_owned()).spawn_scoped(scope, || sampler.work());
        let workers = (1..threads.min(cores)).map_while(|number| spawn(number).ok()).count();
        _ = sampler.members.set(workers + 1);
        let panels = sample_bytes();
        // `None` after the time limit.
        let time = |class: usize, candidate: PanelReads| {
            if began.elapsed() > TIME_LIMIT {
                return None;
            }
            candidate.set(PanelReadClass::ALL[class].0);
            sampler.nanoseconds.store(0, Ordering::Relaxed);
            sampler.class.store(class, Ordering::Relaxed);
            sampler.barrier();
            sampler.sample(&panels);
            Some(sampler.nanoseconds.load(Ordering::Relaxed))
        };
        let chosen = PanelReadClass::ALL.iter().enumerate().map(|(number, &(class, _))| {
            let mut best = PanelReads::default_of(class);
            let distances = DISTANCES.into_iter().filter(|&distance| distance != best.prefetch);
            let candidates = distances.map(|prefetch| PanelReads { prefetch, ..best });
            best = fastest(&[best].into_iter().chain(candidates).collect::<Vec<_>>(), |it| time(number, it));
            let other = PanelReads { one_panel: !best.one_panel, ..best };
            best = fastest(&[best, other], |it| time(number, it));
            best.set(class);
            (class, best)
        });
        let chosen = chosen.collect();
        sampler.class.store(PanelReadClass::ALL.len(), Ordering::Relaxed);
        sampler.barrier();
        chosen
    })
}

/// The first candidate, unless another one takes clearly less time in most rounds. `time` gives `None` if there is no time left:
/// then the first one stays.
fn fastest(candidates: &[PanelReads], mut time: impl FnMut(PanelReads) -> Option<u64>) -> PanelReads {
    let mut ratios = vec![[0f64; ROUNDS]; candidates.len()];
    for round in 0..ROUNDS {
        let times: Option<Vec<u64>> = candidates.iter().map(|&candidate| time(candidate)).collect();
        let Some(times) = times else { return candidates[0] };
        let first = times[0].max(1) as f64;
        ratios.iter_mut().zip(&times).for_each(|(ratios, &time)| ratios[round] = time as f64 / first);
    }
    let medians = ratios.iter_mut().map(|ratios| {
        ratios.sort_by(f64::total_cmp);
        ratios[ROUNDS / 2]
    });
    let better = medians.zip(candidates).filter(|(median, _)| *median <= WORTH_IT);
    better.min_by(|(a, _), (b, _)| a.total_cmp(b)).map_or(candidates[0], |(_, &candidate)| candidate)
}

/// Measures whether bf16 dot products multiply BF16 weights faster than FMA, in the first cache levels, and uses the faster ones
/// from then on.
fn choose_bf16() -> Option<bool> {
    let rivals = GemmKernels::bf16_candidates()?;
    let panels = vec![0x11; MAX_PANELS * rivals[0].panel_bytes(K)];
    let mut times = [u64::MAX; 2];
    for _ in 0..ROUNDS {
        for (time, kernels) in times.iter_mut().zip(&rivals) {
            let began = Instant::now();
            (0..BF16_CALLS).for_each(|_| multiply(kernels, &panels, kernels.tile_columns()));
            *time = (began.elapsed().as_nanos() as u64).min(*time);
        }
    }
    // Near a tie the default stays, so that two processes on one machine give the same bits.
    let [dots, fma] = times.map(|time| time as f64);
    let enabled = if GemmKernels::uses_bf16_dots() { fma >= WORTH_IT * dots } else { dots < WORTH_IT * fma };
    GemmKernels::set_bf16_dots(enabled);
    Some(enabled)
}

/// The bytes are not zeros: untouched and zeroed pages may all be one page of the system.
fn sample_bytes() -> Vec<u8> {
    vec![0x11; SAMPLE_BYTES]
}

/// Takes samples on several threads at the same moment.
#[derive(Default)]
struct Sampler {
    /// Number of threads, once all have started.
    members: OnceLock<usize>,
    /// Index in [`PanelReadClass::ALL`]; its length ends the workers.
    class: AtomicUsize,
    /// Arrivals at barriers.
    arrivals: AtomicUsize,
    /// Sum of all threads' times in this sample.
    nanoseconds: AtomicU64,
    /// A thread has panicked: barriers no longer wait.
    failed: AtomicBool,
}

/// Releases the threads of a sampler if this thread panics: the scope would otherwise wait for them for ever.
struct StopOnPanic<'a>(&'a Sampler);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.class.store(PanelReadClass::ALL.len(), Ordering::Relaxed);
            self.0.failed.store(true, Ordering::Release);
            _ = self.0.members.set(1);
        }
    }
}

impl Sampler {
    fn work(&self) {
        let _guard = StopOnPanic(self);
        let panels = sample_bytes();
        self.members.wait();
        loop {
            self.barrier();
            if self.class.load(Ordering::Relaxed) == PanelReadClass::ALL.len() {
                return;
            }
            self.sample(&panels);
        }
    }

    /// The part of one thread in a sample.
    fn sample(&self, panels: &[u8]) {
        flush_from_caches(panels);
        self.barrier();
        let began = Instant::now();
        if let Some((_, dtype)) = PanelReadClass::ALL.get(self.class.load(Ordering::Relaxed))
            && let Some(kernels) = GemmKernels::of(*dtype)
        {
            multiply(&kernels, panels, 1);
        }
        self.nanoseconds.fetch_add(began.elapsed().as_nanos() as u64, Ordering::Relaxed);
        self.barrier();
    }

    /// Waits for all members. Spins, since a sample takes less time than to wake a thread.
    fn barrier(&self) {
        let members = *self.members.wait();
        let arrived = self.arrivals.fetch_add(1, Ordering::AcqRel);
        let end = (arrived / members + 1) * members;
        spin_until(|| self.arrivals.load(Ordering::Acquire) >= end || self.failed.load(Ordering::Acquire));
    }
}

/// Multiplies all panels by columns of zeros.
fn multiply(kernels: &GemmKernels, bytes: &[u8], columns: usize) {
    let Some(kernel) = kernels.micro_kernel(K) else { return };
    let column = vec![0f32; kernels.packing().column_bytes(K) / size_of::<f32>()];
    let columns: Vec<&[u8]> = vec![bytemuck::cast_slice(&column); columns];
    let mut sums = vec![PanelSums::default(); MAX_PANELS * columns.len()];
    for call in bytes.chunks_exact(kernels.panels() * kernels.panel_bytes(K)) {
        let panels: Vec<&[u8]> = call.chunks_exact(kernels.panel_bytes(K)).collect();
        kernel.run(&panels, &columns, TileOutput { sums: &mut sums, stride: MAX_PANELS, accumulate: false });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_candidate_stays_unless_another_one_is_clearly_faster() {
        let candidates = [0, 1024, 2048].map(|prefetch| PanelReads { prefetch, one_panel: false });
        for (times, want) in [([100, 97, 95], 0), ([100, 89, 80], 2), ([100, 80, 89], 1), ([80, 100, 100], 0)] {
            let at = |it: PanelReads| candidates.iter().position(|&candidate| candidate == it).unwrap();
            // The machine is slower in some rounds, and a candidate is disturbed in fewer than half of them.
            let mut calls = 0;
            let chosen = fastest(&candidates, |it| {
                let (round, disturbed) = (calls / candidates.len(), calls % 7 == 0);
                calls += 1;
                Some(times[at(it)] * (1 + round as u64 % 3) * if disturbed { 10 } else { 1 })
            });
            assert_eq!((at(chosen), calls), (want, ROUNDS * candidates.len()), "{times:?}");
            // Without time for all rounds, the first one stays.
            let mut left = 2 * candidates.len();
            let chosen = fastest(&candidates, |it| {
                left = left.checked_sub(1)?;
                Some(times[at(it)])
            });
            assert_eq!(at(chosen), 0);
        }
    }

    /// A second call of `of_process` measures nothing.
    #[test]
    fn the_calibration_ends_with_any_number_of_threads() {
        for threads in [1, 3] {
            let chosen = choose_panel_reads(threads, Instant::now());
            assert_eq!(chosen.len(), PanelReadClass::ALL.len());
            for (class, panel_reads) in chosen {
                assert!(DISTANCES.contains(&panel_reads.prefetch), "{class:?}");
            }
        }
        assert!(std::ptr::eq(Calibration::of_process(2), Calibration::of_process(1)));
    }
}
