//! Memory of the CPU device that may hold ranges in a layout of its own: sixteen rows of a weight to a strip.
//!
//! What lies in strips is nobody's business but the kernels' that ask for it. A program's products have their first
//! sources packed before the first node runs ([`Memory::hold`]), and an upload of a whole weight packs it as it arrives
//! ([`Memory::upload`]). Whoever else touches such a range finds plain bytes: it is converted back first, all of it, and
//! from then on stays plain as long as the memory lives, so that two uses of one tensor do not convert it to and fro.
//! Overwriting all of it, though, just takes its mark off.
//!
//! # Locks
//! Queues of one process may share a memory and read it at the same time, without points between them. Each memory
//! therefore has a lock, over its layout and not over its content: programs and transfers hold it shared for as long as
//! they run, and whoever converts holds it alone. Threads do not block each other for good, because
//! - a thread takes each memory's lock once at a time, so that a converting one that waits between two of its own
//!   requests cannot keep it from the second;
//! - it takes the locks of several memories in the order of their addresses ([`in_order`]);
//! - while it holds locks it waits for nothing but locks of later memories and its turn on the pool, and whoever has the
//!   turn holds all the locks that it needs. Points are waited for before, tickets answered and sources of uploads read
//!   without a lock: an upload in pieces *pins* its range, which then stays plain without one.

mod marks;
mod needs;
#[cfg(test)]
mod tests;

pub(super) use needs::{Access, Needs, Uses};

use super::memory::{HostMemory, View};
use super::pool::{Ask, Pool};
use super::strip;
use crate::device::{DeviceError, HostBuffer, SourceError};
use crate::tensor::TensorDesc;
use marks::{LEAST, Marks, Span, moved};
use std::cmp::Ordering;
use std::io;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, mpsc};

/// Piece in which plain uploads arrive.
const PIECE: usize = 1 << 20;

/// Piece in which uploads arrive that are packed, or one strip where that is more: it stays in the second cache level
/// until it is packed.
const PACKED_PIECE: usize = 256 << 10;

/// How far ahead of what has arrived an upload has pages ready, and in which steps.
const AHEAD: usize = 4 << 20;
const STEP: usize = 1 << 20;

const OUTSIDE: DeviceError = DeviceError::Misuse("a region reaches past the end of its memory");

/// Whether a tensor can lie in strips.
pub(super) fn in_strips(tensor: &TensorDesc) -> bool {
    Span::of(0, tensor).is_some()
}

/// What fills an upload, piece by piece.
pub(super) type Fill<'a> = dyn FnMut(&mut [u8]) -> Result<(), SourceError> + 'a;

/// Bytes of which parts may lie in strips.
pub(super) struct Memory {
    pages: HostMemory,
    marks: RwLock<Marks>,
}

/// Which form a range takes.
#[derive(Clone, Copy)]
enum Form {
    Strips,
    Rows,
}

/// A transfer's access.
#[derive(Clone, Copy)]
enum Touch {
    /// Of all bytes of a range, whatever they were.
    Overwrite,
    Other,
}

impl Memory {
    /// As [`HostMemory::zeroed`].
    pub(super) fn zeroed(bytes: usize) -> io::Result<Memory> {
        Ok(Memory { pages: HostMemory::zeroed(bytes)?, marks: RwLock::new(Marks::new()) })
    }

    /// As [`HostMemory::over`].
    pub(super) fn over(memory: HostBuffer) -> Memory {
        Memory { pages: HostMemory::over(memory), marks: RwLock::new(Marks::new()) }
    }

    /// Copies bytes in.
    pub(super) fn write(&self, offset: usize, src: &[u8]) -> Result<(), DeviceError> {
        let _held = self.plain(&[(range(offset, src.len())?, Touch::Overwrite)])?;
        inside(self.pages.write(offset, src))
    }

    /// Copies bytes out.
    pub(super) fn read(&self, offset: usize, bytes: usize) -> Result<Vec<u8>, DeviceError> {
        let _held = self.plain(&[(range(offset, bytes)?, Touch::Other)])?;
        self.pages.read(offset, bytes).ok_or(OUTSIDE)
    }

    /// Sets bytes.
    pub(super) fn fill(&self, offset: usize, bytes: usize, value: u8) -> Result<(), DeviceError> {
        let _held = self.plain(&[(range(offset, bytes)?, Touch::Overwrite)])?;
        inside(self.pages.fill(offset, bytes, value))
    }

    /// Copies between two memories or within one, overlap allowed.
    pub(super) fn copy_from(&self, to: usize, src: &Memory, from: usize, bytes: usize) -> Result<(), DeviceError> {
        let (reads, writes) = (range(from, bytes)?, range(to, bytes)?);
        let (reads, writes) = ((reads, Touch::Other), (writes, Touch::Overwrite));
        let _held = match in_order(src, self) {
            // What is read is made plain before what is overwritten is forgotten.
            Ordering::Equal => [Some(self.plain(&[reads, writes])?), None],
            Ordering::Less => [Some(src.plain(&[reads])?), Some(self.plain(&[writes])?)],
            Ordering::Greater => [Some(self.plain(&[writes])?), Some(src.plain(&[reads])?)],
        };
        inside(self.pages.copy_from(to, &src.pages, from, bytes))
    }

    /// As [`HostMemory::populate`].
    pub(super) fn populate(&self, offset: usize, bytes: usize) {
        self.pages.populate(offset..offset.saturating_add(bytes));
    }

    /// Lets `fill` write a part in place, in pieces. The caller has waited for all work that touches the part.
    ///
    /// With the `tensor` that the part is, it lies in strips afterwards, if it can and may. When `fill` fails, the part
    /// is plain, and what has arrived by then lies anyhow.
    pub(super) fn upload(
        &self,
        offset: usize,
        bytes: usize,
        tensor: Option<&TensorDesc>,
        fill: &mut Fill<'_>,
    ) -> Result<(), DeviceError> {
        let range = range(offset, bytes)?;
        let span = tensor.and_then(|tensor| Span::of(offset, tensor)).filter(|s| s.range == range && bytes >= LEAST);
        let pin = self.pin(range.clone())?;
        match span.filter(|span| !self.shared().stays_plain(&span.range)) {
            Some(span) => {
                self.ahead(&span.range, |arrived| self.stream_packed(&span, fill, arrived))?;
                pin.packed(span);
            }
            None => {
                let done = self.ahead(&range, |arrived| {
                    let mut at = offset;
                    self.pages.stream(offset, bytes, PIECE, &mut |piece| {
                        fill(piece)?;
                        at += piece.len();
                        arrived(at);
                        Ok(())
                    })
                });
                done?;
            }
        }
        Ok(())
    }

    /// Runs an upload with a helper that has pages ready ahead of what arrives. `receive` tells where it has come to.
    ///
    /// Taking pages from the system is half of the work of an upload to new memory. The helper touches no byte and takes no
    /// lock; it is at most [`AHEAD`] bytes ahead, so that memory grows with what arrives and not with what was promised.
    fn ahead<T>(&self, range: &Range<usize>, receive: impl FnOnce(&dyn Fn(usize)) -> T) -> T {
        if range.len() < AHEAD {
            // All at once they come in half the time.
            self.pages.populate(range.clone());
            return receive(&|_| ());
        }
        let (arrived, arrivals) = mpsc::channel::<usize>();
        // The sender goes with the closure: that ends the helper, whatever happened.
        std::thread::scope(move |scope| {
            let helper = move || {
                let mut ready = range.start;
                while let Ok(mut at) = arrivals.recv() {
                    loop {
                        at = arrivals.try_iter().last().unwrap_or(at);
                        ready = ready.max(at);
                        let end = range.end.min(at + AHEAD).min(ready + STEP);
                        if ready >= end {
                            break;
                        }
                        self.pages.populate(ready..end);
                        ready = end;
                    }
                }
            };
            // Without a helper everything goes the same way, slower.
            let _ = std::thread::Builder::new().name("pages".to_owned()).spawn_scoped(scope, helper);
            receive(&|at| _ = arrived.send(at))
        })
    }

    fn stream_packed(&self, span: &Span, fill: &mut Fill<'_>, arrived: &dyn Fn(usize)) -> Result<(), DeviceError> {
        let strip = span.strips.bytes();
        let mut rows = vec![0; (PACKED_PIECE / strip).max(1) * strip];
        let mut at = span.range.start;
        while at < span.range.end {
            let n = rows.len().min(span.range.end - at);
            let rows = &mut rows[..n];
            fill(rows)?;
            arrived(at + n);
            let mut strips = rows.chunks_exact(strip);
            let packed = self
                .pages
                .stream(at, n, strip, &mut |to| strips.next().map(|rows| pack(span, rows, to)).ok_or(OUTSIDE));
            packed?;
            at += n;
        }
        Ok(())
    }

    /// Holds the memory for a run: packs what a program wants packed (`needs`, each with the offset of its slot) and
    /// converts back what it uses otherwise, unless `settled`, the memory's state after an earlier run of the same
    /// needs, is the state that it is still in.
    pub(super) fn hold<'n>(
        &self,
        needs: impl Iterator<Item = (&'n Needs, usize)> + Clone,
        settled: Option<u64>,
        pool: &Pool,
    ) -> Result<Held<'_>, DeviceError> {
        let marks = self.shared();
        if settled == Some(marks.stamp()) || needs.clone().all(|(needs, base)| needs.met(base, &marks)) {
            return Ok(Held { pages: &self.pages, marks });
        }
        drop(marks);
        let mut marks = self.alone();
        let mut spans = Vec::new();
        for (needs, base) in needs.clone() {
            for span in needs.packs.iter().filter_map(|span| span.moved(base)) {
                if span.range.end <= self.pages.bytes() && marks.may_pack(&span.range) {
                    marks.pack(span.clone());
                    spans.push(span);
                }
            }
        }
        self.convert(&spans, Form::Strips, Some(pool))?;
        // Only now, when nothing more is packed: regions bound to two slots may share bytes.
        let mut spans = Vec::new();
        for (needs, base) in needs {
            for range in needs.plain.iter().filter_map(|range| moved(range, base)) {
                spans.append(&mut marks.unpack(&range));
            }
            for span in needs.packs.iter().chain(&needs.reads).filter_map(|span| span.moved(base)) {
                if !marks.holds(&span) {
                    spans.append(&mut marks.unpack(&span.range));
                }
            }
        }
        self.convert(&spans, Form::Rows, Some(pool))?;
        Ok(Held { pages: &self.pages, marks: RwLockWriteGuard::downgrade(marks) })
    }

    fn shared(&self) -> RwLockReadGuard<'_, Marks> {
        // Marks are whole at every moment; what a panic may leave behind is a range of any bytes.
        self.marks.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn alone(&self) -> RwLockWriteGuard<'_, Marks> {
        self.marks.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// The lock, with ranges converted back, one after the other, as far as that is necessary.
    fn plain(&self, touches: &[(Range<usize>, Touch)]) -> Result<RwLockReadGuard<'_, Marks>, DeviceError> {
        let marks = self.shared();
        if touches.iter().all(|(range, _)| marks.is_plain(range)) {
            return Ok(marks);
        }
        drop(marks);
        let mut marks = self.alone();
        for (range, touch) in touches {
            self.make_plain(&mut marks, range, *touch)?;
        }
        Ok(RwLockWriteGuard::downgrade(marks))
    }

    fn make_plain(&self, marks: &mut Marks, range: &Range<usize>, touch: Touch) -> Result<(), DeviceError> {
        if range.end > self.pages.bytes() {
            return Err(OUTSIDE);
        }
        if let Touch::Overwrite = touch {
            marks.forget(range);
        }
        self.convert(&marks.unpack(range), Form::Rows, None)
    }

    /// Keeps a range, all of which is about to be overwritten, plain while it is written without the lock.
    fn pin(&self, range: Range<usize>) -> Result<Pin<'_>, DeviceError> {
        let mut marks = self.alone();
        self.make_plain(&mut marks, &range, Touch::Overwrite)?;
        marks.pin(range.clone());
        Ok(Pin { memory: self, range })
    }

    /// Rewrites spans in place, strip by strip. The caller holds the lock alone, so that nobody looks meanwhile.
    fn convert(&self, spans: &[Span], to: Form, pool: Option<&Pool>) -> Result<(), DeviceError> {
        // The number of each span's last strip, one further.
        let ends: Vec<usize> = spans
            .iter()
            .scan(0, |end, span| {
                *end += span.range.len() / span.strips.bytes();
                Some(*end)
            })
            .collect();
        let Some(&total) = ends.last() else { return Ok(()) };
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || {
            let mut scratch = Vec::new();
            loop {
                let unit = next.fetch_add(1, Relaxed);
                if unit >= total {
                    return Ok(());
                }
                let at = ends.partition_point(|&end| end <= unit);
                let (span, first) = (&spans[at], if at == 0 { 0 } else { ends[at - 1] });
                let bytes = span.strips.bytes();
                scratch.resize(bytes, 0);
                self.pages.stream(span.range.start + (unit - first) * bytes, bytes, bytes, &mut |strip| {
                    scratch.copy_from_slice(strip);
                    match to {
                        Form::Strips => pack(span, &scratch, strip),
                        Form::Rows => unpack(span, &scratch, strip),
                    }
                    Ok(())
                })?;
            }
        };
        // A worker of the pool must come back, whatever happens.
        let job = |_: bool| {
            if !matches!(catch_unwind(AssertUnwindSafe(work)), Ok(Ok::<_, DeviceError>(()))) {
                failed.store(true, Relaxed);
            }
        };
        match pool {
            // It has waited for its turn: it was run.
            Some(pool) => _ = pool.run(Ask::Wait, &job),
            None => job(true),
        }
        if failed.into_inner() {
            return Err(DeviceError::Bug("a range could not change its layout".to_owned()));
        }
        Ok(())
    }
}

/// The order in which a thread that needs both takes their locks.
pub(super) fn in_order(a: &Memory, b: &Memory) -> Ordering {
    std::ptr::from_ref(a).cmp(&std::ptr::from_ref(b))
}

fn pack(span: &Span, rows: &[u8], strip: &mut [u8]) {
    let n = span.strips.row_bytes;
    strip::pack(span.strips.dtype, &std::array::from_fn(|r| &rows[r * n..][..n]), strip);
}

fn unpack(span: &Span, strip: &[u8], rows: &mut [u8]) {
    for (r, row) in rows.chunks_exact_mut(span.strips.row_bytes).enumerate() {
        strip::unpack_row(span.strips.dtype, strip, r, row);
    }
}

fn range(offset: usize, bytes: usize) -> Result<Range<usize>, DeviceError> {
    Ok(offset..offset.checked_add(bytes).ok_or(OUTSIDE)?)
}

fn inside(ok: bool) -> Result<(), DeviceError> {
    if ok { Ok(()) } else { Err(OUTSIDE) }
}

/// A range that is written in pieces.
struct Pin<'a> {
    memory: &'a Memory,
    range: Range<usize>,
}

impl Pin<'_> {
    /// All pieces were written, as strips.
    fn packed(self, span: Span) {
        let mut marks = self.memory.alone();
        marks.unpin(&self.range);
        // Another upload to the same bytes, which nothing has ordered, may still be under way.
        if marks.may_pack(&span.range) {
            marks.pack(span);
        }
    }
}

impl Drop for Pin<'_> {
    fn drop(&mut self) {
        self.memory.alone().unpin(&self.range);
    }
}

/// A memory whose layout does not change while this lives.
pub(super) struct Held<'a> {
    pages: &'a HostMemory,
    marks: RwLockReadGuard<'a, Marks>,
}

impl Held<'_> {
    /// The memory's state, for [`Memory::hold`].
    pub(super) fn stamp(&self) -> u64 {
        self.marks.stamp()
    }

    /// A tensor as a kernel sees it; `strips` for one that can read strips. `None` when it does not lie inside.
    ///
    /// # Panics
    /// Without `strips` on a tensor that lies in some: a bug, the needs that this was held for are others.
    pub(super) fn view<'v>(&'v self, offset: usize, desc: &'v TensorDesc, strips: bool) -> Option<View<'v>> {
        let view = View::new(self.pages, offset, desc)?;
        if strips && Span::of(offset, desc).is_some_and(|span| self.marks.holds(&span)) {
            return Some(view.in_strips());
        }
        debug_assert!(self.marks.is_plain(&(offset..offset + desc.extent())), "{desc:?} is plain");
        Some(view)
    }
}
