//! Conversions between rows and packed weights (see `layout`), before the accesses that need them.

use super::{CudaExecutor, memory};
use crate::cuda::context::DeviceContext;
use crate::cuda::events::{Event, Stream};
use crate::cuda::kernel::{LaunchAddresses, LoadedLaunch};
use crate::cuda::launch_log::LaunchSpan;
use crate::cuda::layout::{LayoutMap, PackedSpan};
use crate::cuda::memory::DeviceMemory;
use crate::cuda::ops::{self, Repack};
use crate::cuda::program::CudaProgram;
use crate::device::{DeviceError, Region};
use std::ops::Range;
use std::sync::{Arc, RwLockReadGuard};

/// An access to rows of a memory, by a stream.
pub(super) struct RowAccess<'a> {
    pub(super) region: &'a Region,
    pub(super) memory: &'a DeviceMemory,
    pub(super) range: Range<u64>,
    /// Whether it writes all bytes of the range.
    pub(super) overwrites: bool,
    pub(super) stream: Arc<Stream>,
}

/// The layouts of the memories of a run, which do not change while this is alive, and which packable spans of the program are packed.
pub(super) struct RunLayouts<'a> {
    _maps: Vec<RwLockReadGuard<'a, LayoutMap>>,
    pub(super) packed: Arc<[bool]>,
}

/// Locks the maps of memories, which are in the order of their addresses, each once.
fn lock_all<'a>(memories: &[&'a DeviceMemory]) -> Vec<RwLockReadGuard<'a, LayoutMap>> {
    memories.iter().map(|memory| memory.layout.read()).collect()
}

/// Sorts memories by their place on the host, each once.
fn in_order<'a>(memories: impl Iterator<Item = &'a DeviceMemory>) -> Vec<&'a DeviceMemory> {
    let mut memories: Vec<_> = memories.collect();
    memories.sort_by_key(|memory| std::ptr::from_ref::<DeviceMemory>(memory));
    memories.dedup_by(|a, b| std::ptr::eq::<DeviceMemory>(*a, *b));
    memories
}

impl CudaExecutor {
    /// An access of this queue's stream.
    pub(super) fn row_access<'a>(
        &self,
        region: &'a Region,
        range: Range<u64>,
        overwrites: bool,
    ) -> Result<RowAccess<'a>, DeviceError> {
        let range = region.offset() + range.start..region.offset() + range.end;
        Ok(RowAccess { region, memory: memory(region)?, range, overwrites, stream: self.stream()? })
    }

    /// Makes sure that the ranges hold rows. The accesses are submitted while the result is alive; meanwhile no other thread converts
    /// what they access.
    pub(super) fn lock_rows<'a>(
        &mut self,
        accesses: &[RowAccess<'a>],
    ) -> Result<Vec<RwLockReadGuard<'a, LayoutMap>>, DeviceError> {
        let memories = in_order(accesses.iter().map(|access| access.memory));
        loop {
            let maps = lock_all(&memories);
            let map_of = |access: &RowAccess<'_>| memories.iter().position(|&m| std::ptr::eq(m, access.memory));
            let needs_conversion = |access: &&RowAccess<'a>| {
                let map = map_of(access).and_then(|index| maps.get(index));
                map.is_some_and(|map| !map.packed_in(&access.range).is_empty())
            };
            let Some(access) = accesses.iter().find(needs_conversion) else {
                for access in accesses {
                    self.wait_for_conversion(access.memory, &access.stream)?;
                }
                return Ok(maps);
            };
            drop(maps);
            let layout = &access.memory.layout;
            let mut map = layout.write();
            if access.overwrites {
                map.overwrite(&access.range);
            }
            let spans = map.packed_in(&access.range);
            self.unpack(access.memory, &mut map, &spans, &access.stream)?;
            drop(map);
            // A conversion ends with an event, until which the caller has retained the regions.
            for access in accesses {
                self.events.retain_until(self.numbers.next(), Box::new(access.region.clone()));
            }
        }
    }

    /// Forgets the packed spans and the delays within a region that an upload writes as a whole, so that nothing unpacks what is
    /// overwritten. If the source of the bytes fails, the content of the region is unspecified.
    pub(super) fn forget_overwritten(&self, region: &Region) -> Result<(), DeviceError> {
        let layout = &memory(region)?.layout;
        if !layout.read().is_empty() {
            layout.write().overwrite(&(region.offset()..region.offset() + region.bytes()));
        }
        Ok(())
    }

    /// Waits until the last conversion of a memory is done, unless the stream is ordered after it. That is short, except if the stream that
    /// converts has other work in front. (If the stream waited instead, it would look hung meanwhile.)
    pub(super) fn wait_for_conversion(
        &mut self,
        memory: &DeviceMemory,
        stream: &Arc<Stream>,
    ) -> Result<(), DeviceError> {
        match memory.layout.begin_access(stream) {
            Some(conversion) => {
                let waited = self.wait_for_events(&[&conversion.event]);
                waited.inspect_err(|_| memory.layout.mark_unordered(stream))
            }
            None => Ok(()),
        }
    }

    /// Blocks until events of any devices are reached.
    fn wait_for_events(&self, awaited: &[&Event]) -> Result<(), DeviceError> {
        let (context, events) = (Arc::clone(&self.context), Arc::clone(&self.events));
        let all_reached = || {
            // Notices a hung GPU.
            context.poll_queues();
            for event in awaited {
                event.context().bind()?;
                if !event.is_reached()? {
                    return Ok(false);
                }
            }
            Ok(true)
        };
        events.wait_until(all_reached, || events.check())?;
        self.context.bind()
    }

    fn is_own(&self, stream: &Arc<Stream>) -> bool {
        self.stream.as_ref().is_some_and(|own| Arc::ptr_eq(own, stream))
    }

    /// Converts packed spans to rows, after all other accesses to the memory.
    fn unpack(
        &mut self,
        memory: &DeviceMemory,
        map: &mut LayoutMap,
        spans: &[PackedSpan],
        stream: &Arc<Stream>,
    ) -> Result<(), DeviceError> {
        if spans.is_empty() {
            return Ok(());
        }
        self.wait_for_conversion(memory, stream)?;
        self.wait_for_other_streams(memory, stream)?;
        let end = Event::new(stream.context())?;
        let converted = spans.iter().try_for_each(|span| {
            self.convert(memory, span, Repack::Unpack, stream)?;
            map.set_unpacked(span);
            Ok(())
        });
        // The event also covers the conversions before a failed one.
        self.end_conversion(memory, stream, end)?;
        converted
    }

    /// Blocks until the work that other streams have submitted is done, if they use the memory.
    fn wait_for_other_streams(&mut self, memory: &DeviceMemory, stream: &Arc<Stream>) -> Result<(), DeviceError> {
        let mut events = Vec::new();
        for other in memory.layout.other_streams(stream) {
            let event = Event::new(other.context())?;
            event.record(&other)?;
            events.push(event);
        }
        self.wait_for_events(&events.iter().collect::<Vec<_>>())
    }

    /// Packs spans of a memory, if no other thread or stream uses it and no delay is left.
    fn pack(&mut self, memory: &DeviceMemory, spans: &[PackedSpan], stream: &Arc<Stream>) -> Result<(), DeviceError> {
        let Some(mut map) = memory.layout.try_write() else { return Ok(()) };
        self.wait_for_conversion(memory, stream)?;
        if !memory.layout.is_unused_by_others(stream)? {
            return Ok(());
        }
        let spans = spans.iter().filter(|span| map.try_begin_pack(span)).collect::<Vec<_>>();
        if spans.is_empty() {
            return Ok(());
        }
        let end = Event::new(stream.context())?;
        let converted = spans.into_iter().try_for_each(|span| {
            self.convert(memory, span, Repack::Pack, stream)?;
            map.set_packed(span.clone());
            Ok(())
        });
        // The event also covers the conversions before a failed one.
        self.end_conversion(memory, stream, end)?;
        converted
    }

    /// Submits the conversion of a span. An error means that nothing was submitted, which `end_conversion` relies on.
    fn convert(
        &mut self,
        memory: &DeviceMemory,
        span: &PackedSpan,
        direction: Repack,
        stream: &Arc<Stream>,
    ) -> Result<(), DeviceError> {
        let context: &DeviceContext = memory.context();
        let launch = ops::repack_launch(span, direction, &context.gpu).map_err(|e| DeviceError::Bug(e.reason))?;
        let launch: LoadedLaunch = launch.load(context)?;
        let dst = memory.address_of(span.range.start, span.range.end - span.range.start)?;
        let kernel = launch.name();
        let seq = self.numbers.next();
        self.events
            .launch_log
            .push(seq, LaunchSpan { first: 0, last: 0, first_kernel: kernel, last_kernel: kernel, of: 1 });
        let addresses = LaunchAddresses { dst, ..LaunchAddresses::default() };
        context.bind()?;
        launch.launch(context, stream, &addresses)
    }

    /// Records `end`, the event after conversions. The layout says what was converted, so other streams must not run ahead of the
    /// conversions: if the event cannot be recorded, the host waits until they are done.
    fn end_conversion(&mut self, memory: &DeviceMemory, stream: &Arc<Stream>, end: Event) -> Result<(), DeviceError> {
        match stream.context().bind().and_then(|()| end.record(stream)) {
            Ok(()) => memory.layout.set_conversion(stream, end),
            Err(_) => stream.wait_out(|| self.context.poll_queues()),
        }
        self.context.bind()?;
        if self.is_own(stream) {
            self.record()?;
        }
        Ok(())
    }

    /// Converts what a program needs in another layout. Weights that cannot be packed at once are multiplied in rows.
    pub(super) fn lock_layouts<'a>(
        &mut self,
        program: &CudaProgram,
        bindings: &'a [Region],
    ) -> Result<RunLayouts<'a>, DeviceError> {
        let stream = self.stream()?;
        let mut of_slots = Vec::with_capacity(bindings.len());
        for region in bindings {
            of_slots.push(memory(region)?);
        }
        let memories = in_order(of_slots.iter().copied());
        let index_of = |of: &DeviceMemory| memories.iter().position(|&m| std::ptr::eq(m, of)).unwrap_or(0);
        let slots: Vec<_> = of_slots.iter().zip(bindings).map(|(of, region)| (index_of(of), region.offset())).collect();
        let addresses: Vec<_> =
            of_slots.iter().zip(bindings).map(|(of, region)| of.address() + region.offset()).collect();
        let mut packs = true;
        loop {
            let maps = lock_all(&memories);
            let plan = program.layout.plan(&slots, &addresses, &maps.iter().map(|map| &**map).collect::<Vec<_>>());
            if plan.unpack.is_empty() && (!packs || plan.pack.is_empty()) {
                for memory in &memories {
                    self.wait_for_conversion(memory, &stream)?;
                }
                // Other devices' streams may have been polled and dropped.
                self.context.bind()?;
                return Ok(RunLayouts { _maps: maps, packed: plan.packed });
            }
            drop(maps);
            for (index, memory) in memories.iter().enumerate() {
                let of_memory = |spans: &[(usize, PackedSpan)]| {
                    spans.iter().filter(|(of, _)| *of == index).map(|(_, span)| span.clone()).collect::<Vec<_>>()
                };
                let unpack = of_memory(&plan.unpack);
                if !unpack.is_empty() {
                    let mut map = memory.layout.write();
                    // Another thread may have unpacked them meanwhile; several uses may have named one.
                    for span in unpack {
                        if map.is_packed(&span) {
                            self.unpack(memory, &mut map, &[span], &stream)?;
                        }
                    }
                }
                if packs {
                    self.pack(memory, &of_memory(&plan.pack), &stream)?;
                }
            }
            packs = false;
        }
    }
}
