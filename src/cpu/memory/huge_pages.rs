//! Huge pages for large mappings. A core then needs fewer page walks, which cost most in a virtual machine. A system without
//! free huge pages has to make some first, and a model would take twice as long to load: so a measurement decides.

use memmap2::MmapMut;
use std::sync::atomic::{AtomicBool, Ordering};

/// Smallest mapping for which huge pages are asked for, in bytes. Smaller ones hold few whole huge pages.
const MIN_BYTES: usize = 16 << 20;

/// A huge page of x86-64; other architectures are not calibrated.
const HUGE_PAGE: usize = 2 << 20;

/// Pairs of samples; the least of each side counts.
const ROUNDS: usize = 2;

static USE: AtomicBool = AtomicBool::new(false);

/// Measures whether the system provides a huge page as fast as the small pages of the same size, and uses them from then on if
/// so. Returns the choice.
pub(crate) fn choose_page_size() -> bool {
    if !are_allowed() {
        return false;
    }
    let mut times = [None, None];
    for _ in 0..ROUNDS {
        for (huge, least) in times.iter_mut().enumerate() {
            *least = (*least).into_iter().chain(time(huge == 1)).min();
        }
    }
    let chosen = matches!(times, [Some(small), Some(huge)] if huge <= small);
    USE.store(chosen, Ordering::Relaxed);
    chosen
}

/// Whether the system gives huge pages to programs that ask for them.
fn are_allowed() -> bool {
    let enabled = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
    enabled.is_ok_and(|modes| !modes.contains("[never]"))
}

/// Asks for huge pages for a new mapping, where they were chosen: for the whole ones inside it, so that none reaches into a
/// neighbouring mapping and stays there when this one is gone.
pub(super) fn advise(map: &MmapMut) {
    #[cfg(target_os = "linux")]
    if map.len() >= MIN_BYTES && USE.load(Ordering::Relaxed) {
        let start = map.as_ptr().align_offset(HUGE_PAGE);
        let bytes = (map.len() - start) / HUGE_PAGE * HUGE_PAGE;
        // Without support, the mapping keeps small pages.
        _ = map.advise_range(memmap2::Advice::HugePage, start, bytes);
    }
    #[cfg(not(target_os = "linux"))]
    let _ = (map, &USE, MIN_BYTES);
}

/// How long the system takes to provide the pages of a huge page's size, small ones or a huge one. `None` if it cannot.
#[cfg(target_os = "linux")]
fn time(huge: bool) -> Option<std::time::Duration> {
    use memmap2::Advice::{HugePage, NoHugePage, PopulateWrite};
    let map = MmapMut::map_anon(2 * HUGE_PAGE).ok()?;
    map.advise(if huge { HugePage } else { NoHugePage }).ok()?;
    let aligned = map.as_ptr().align_offset(HUGE_PAGE);
    let began = std::time::Instant::now();
    map.advise_range(PopulateWrite, aligned, HUGE_PAGE).ok()?;
    Some(began.elapsed())
}

#[cfg(not(target_os = "linux"))]
fn time(_: bool) -> Option<std::time::Duration> {
    let _ = HUGE_PAGE;
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The system reports the advice for the whole huge pages inside a mapping, and for nothing else.
    #[cfg(target_os = "linux")]
    #[test]
    fn large_mappings_ask_for_the_huge_pages_inside_them() {
        let chosen = choose_page_size();
        let map = MmapMut::map_anon(MIN_BYTES + 4096).unwrap();
        advise(&map);
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let (start, mut advised, mut inside) = (map.as_ptr().addr(), 0, None);
        for line in smaps.lines() {
            let range = line.split_whitespace().next().and_then(|word| word.split_once('-'));
            let range = range.and_then(|(from, to)| {
                Some((usize::from_str_radix(from, 16).ok()?, usize::from_str_radix(to, 16).ok()?))
            });
            inside = range.or(inside);
            if let Some((from, to)) = inside
                && line.starts_with("VmFlags:")
                && line.split_whitespace().any(|flag| flag == "hg")
                && from >= start
                && to <= start + map.len()
            {
                assert!(from.is_multiple_of(HUGE_PAGE) && to.is_multiple_of(HUGE_PAGE), "{from:x}-{to:x}");
                advised += to - from;
            }
        }
        let want = if chosen { MIN_BYTES - HUGE_PAGE..=MIN_BYTES } else { 0..=0 };
        assert!(want.contains(&advised), "{advised} bytes, chosen: {chosen}");
    }
}
