//! Streams: ggml's backends, which submit to the queue of their device, and events between them.

use crate::abi::{self, Backend, BackendTable, Event, Graph, STATUS_FAILED, STATUS_SUCCESS, Status, Tensor};
use crate::buffer::{self, BufferState};
use crate::buffer_calls;
use crate::device::{Device, EventState, Ticket, event_state};
use crate::graph;
use crate::guard::{self, guarded, lock};
use crate::host;
use crate::lost_ranges::LostRanges;
use crate::program_cache::PreparedGraph;
use crate::validity;
use fanout::device::{DeviceError, PendingRead, Queue};
use std::ffi::{c_char, c_void};
use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

/// A stream of the plug-in.
pub(crate) struct Stream {
    device: &'static Device,
    work: Mutex<Work>,
}

#[derive(Default)]
struct Work {
    /// Reads that the host waits for by `synchronize`.
    reads: Vec<Read>,
    /// A failure that no call could report yet. The next graph fails with it.
    failure: Option<String>,
}

struct Read {
    result: PendingRead,
    ticket: Ticket,
    to: *mut u8,
    bytes: usize,
    /// The parts that had been lost before.
    lost: Vec<Range<usize>>,
}

// SAFETY: the host keeps the destination of a read until it has synchronised the stream, on whatever thread.
unsafe impl Send for Work {}

/// Creates the host's object for a stream.
pub(crate) fn new(device: &'static Device) -> *mut Backend {
    let stream = Box::new(Stream { device, work: Mutex::default() });
    let backend =
        Backend { guid: host::guid(), iface: TABLE, device: device.object(), context: Box::into_raw(stream).cast() };
    Box::into_raw(Box::new(backend))
}

const TABLE: BackendTable = BackendTable {
    get_name,
    free,
    set_tensor_async,
    get_tensor_async,
    set_tensor_2d_async,
    get_tensor_2d_async,
    copy_tensor_async,
    synchronize,
    graph_plans: [None; 4],
    graph_compute,
    event_record,
    event_wait,
    graph_optimize: None,
};

impl Stream {
    /// # Safety
    /// `backend` is a stream of the plug-in that is not freed while the result is used.
    unsafe fn of<'a>(backend: *mut Backend) -> &'a Stream {
        // SAFETY: the context of the plug-in's backends is their stream.
        unsafe { &*(*backend).context.cast() }
    }

    /// The stream of a backend; `None` for backends of others.
    ///
    /// # Safety
    /// `backend` is null or a backend of the host that is not freed while the result is used.
    unsafe fn of_any<'a>(backend: *mut Backend) -> Option<&'a Stream> {
        // SAFETY: the caller passes a valid backend, and only backends of the plug-in have its guid.
        unsafe { (!backend.is_null() && (*backend).guid == host::guid()).then(|| Stream::of(backend)) }
    }

    /// Submits work to the queue. A failure stays until a graph reports it.
    fn submit<T>(
        &self,
        what: &str,
        submit: impl FnOnce(&mut dyn Queue) -> Result<T, DeviceError>,
    ) -> Option<(T, Ticket)> {
        self.device.submit(submit).map_err(|error| self.fail(what, &error)).ok()
    }

    /// A tensor that is not on the device: a mistake of the host, which the next graph reports.
    fn refuse(&self, what: &str) {
        self.fail(what, &DeviceError::Misuse("a tensor that is not in memory of the device"));
    }

    /// Keeps a failure, which the next graph reports.
    fn fail(&self, what: &str, error: &DeviceError) {
        let text = self.device.describe_failure(what, error);
        lock(&self.work).failure.get_or_insert_with(|| text.clone());
        self.device.failures.log(text);
    }

    /// Waits for all work, and delivers the reads.
    fn finish(&self) {
        let reads = std::mem::take(&mut lock(&self.work).reads);
        for Read { result, ticket, to, bytes, lost } in reads {
            // SAFETY: the host keeps the destination until this call returns.
            let to = unsafe { std::slice::from_raw_parts_mut(to, bytes) };
            match self.device.waited(ticket, result.wait(None)) {
                Ok(result) => {
                    to.copy_from_slice(&result);
                    lost.into_iter().for_each(|part| buffer::mark_failed(&mut to[part]));
                }
                Err(error) => {
                    buffer::mark_failed(to);
                    self.fail("reading a tensor", &error);
                }
            }
        }
        if let Some((point, ticket)) = self.device.mark_awaited()
            && let Err(error) = self.device.waited(ticket, point.wait(None))
        {
            self.fail("work on the device", &error);
        }
    }

    /// Runs a graph: returns once it has run, if the host reads outputs of it; else once it is submitted.
    fn run(&self, graph: &PreparedGraph) -> Result<(), String> {
        // SAFETY: the host keeps the buffers of a graph that it computes.
        let states = graph.buffers.iter().filter_map(|&buffer| unsafe { BufferState::of_any(buffer) });
        let states: Vec<&BufferState> = states.collect();
        if let Some(reason) = states.iter().find_map(|state| state.broken()) {
            return Err(reason.to_owned());
        }
        states.iter().for_each(|state| state.changes());
        graph.writes.iter().for_each(|(buffer, range)| states[*buffer].forget(range));
        let Some(program) = &graph.program else { return Ok(()) };
        if let Some(failure) = lock(&self.work).failure.take().or_else(|| self.device.take_latched()) {
            return Err(failure);
        }
        let epochs: Vec<u64> = states.iter().map(|state| state.epoch()).collect();
        let lost = match states.iter().any(|state| state.has_lost()) {
            true => Some(self.follow(graph, &states)?),
            false => None,
        };
        let host_reads = self.device.host_reads.load(Ordering::Relaxed);
        let fetched: Vec<_> = graph.outputs.iter().filter(|output| output.always || host_reads).collect();
        let outputs = fetched.iter().map(|output| graph.bindings[output.buffer].subregion(output.start, output.bytes));
        let submitted = outputs.collect::<Result<Vec<_>, _>>().and_then(|outputs| {
            self.device.submit(|queue| {
                queue.run(program, &graph.bindings)?;
                if outputs.is_empty() { Ok(Vec::new()) } else { queue.download_all(&outputs) }
            })
        });
        // The graph may have been submitted to a new queue while what the failed one has not written still counted as valid.
        if submitted.is_ok() && states.iter().zip(&epochs).any(|(state, &epoch)| state.epoch() != epoch) {
            return Err(format!("{}: a graph: memory that it uses was lost meanwhile", self.device.label()));
        }
        let results = submitted.and_then(|(reads, ticket)| match reads.is_empty() {
            true => Ok(Vec::new()),
            false => self.device.waited(ticket, reads.into_iter().map(|read| read.wait(None)).collect()),
        });
        let results = results.map_err(|error| self.device.describe_failure("a graph", &error))?;
        for (output, bytes) in fetched.iter().zip(results) {
            lock(&states[output.buffer].outputs).keep(output.start, bytes);
        }
        for ((state, epoch), ranges) in states.iter().zip(epochs).zip(lost.into_iter().flatten()) {
            state.set_lost_ranges(epoch, ranges, graph.serial);
        }
        self.device.failures.clear();
        Ok(())
    }

    /// What is lost of each buffer after the graph has run; an error if it needs what is lost.
    fn follow(&self, graph: &PreparedGraph, states: &[&BufferState]) -> Result<Vec<LostRanges>, String> {
        let followed = validity::follow(graph, states, &mut |state, position, bytes| {
            let region = state.memory().subregion(position, bytes);
            let submitted = region.and_then(|region| self.device.submit(|queue| queue.download(region)));
            let read = submitted.and_then(|(read, ticket)| self.device.waited(ticket, read.wait(None)));
            read.map_err(|error| error.to_string())
        });
        followed.map_err(|reason| format!("{}: a graph: {reason}", self.device.label()))
    }
}

unsafe extern "C" fn get_name(backend: *mut Backend) -> *const c_char {
    // SAFETY: the host passes a stream of the plug-in.
    unsafe { Stream::of(backend) }.device.name()
}

unsafe extern "C" fn free(backend: *mut Backend) {
    guarded((), || {
        // SAFETY: the host frees a stream of the plug-in once; `new` made both boxes.
        unsafe {
            let backend = Box::from_raw(backend);
            drop(Box::from_raw(backend.context.cast::<Stream>()));
        }
    });
}

/// The buffer of a tensor, and the position of `offset` bytes into it.
///
/// # Safety
/// `tensor` is a tensor of the host in a buffer of the plug-in.
unsafe fn locate<'a>(tensor: *const Tensor, offset: usize) -> Option<(&'a BufferState, u64)> {
    // SAFETY: the caller passes a valid tensor, whose buffer the host keeps.
    unsafe { BufferState::of_any((*tensor).owner()).map(|state| (state, state.position(&*tensor, offset))) }
}

unsafe extern "C" fn set_tensor_async(
    backend: *mut Backend,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as for several rows.
    unsafe { set_tensor_2d_async(backend, tensor, data, offset, size, 1, size, size) };
}

unsafe extern "C" fn set_tensor_2d_async(
    backend: *mut Backend,
    tensor: *mut Tensor,
    data: *const c_void,
    offset: usize,
    size: usize,
    rows: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    // SAFETY: the host passes a stream of the plug-in and a tensor in a buffer of its device.
    let (stream, located) = unsafe { (Stream::of(backend), locate(tensor, offset)) };
    if size == 0 {
        return;
    }
    // SAFETY: as above.
    let target = unsafe { &*tensor };
    guarded((), || {
        let Some((state, start)) = located else { return stream.refuse("writing a tensor") };
        if state.holds_weights() {
            // SAFETY: the host's arguments are those of the synchronous call, which remembers weights.
            return unsafe {
                let buffer = (*tensor).owner();
                buffer_calls::set_tensor_2d(buffer, tensor, data, offset, size, rows, stride_tensor, stride_data)
            };
        }
        // SAFETY: the host passes such rows.
        for (row, bytes) in unsafe { abi::rows(data, size, rows, stride_data) }.enumerate() {
            let start = start + (row * stride_tensor) as u64;
            let range = start..start + size as u64;
            if let Err(error) = buffer::write(state, target, range.clone(), bytes) {
                stream.fail("writing a tensor", &error);
                state.mark_lost(range);
            }
        }
    });
}

unsafe extern "C" fn get_tensor_async(
    backend: *mut Backend,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
) {
    // SAFETY: as for several rows.
    unsafe { get_tensor_2d_async(backend, tensor, data, offset, size, 1, size, size) };
}

unsafe extern "C" fn get_tensor_2d_async(
    backend: *mut Backend,
    tensor: *const Tensor,
    data: *mut c_void,
    offset: usize,
    size: usize,
    rows: usize,
    stride_tensor: usize,
    stride_data: usize,
) {
    // SAFETY: the host passes a stream of the plug-in and a tensor in a buffer of its device.
    let (stream, located) = unsafe { (Stream::of(backend), locate(tensor, offset)) };
    if size == 0 {
        return;
    }
    if guard::is_forked() {
        // SAFETY: the host passes a place for such rows.
        return unsafe { abi::rows_mut(data, size, rows, stride_data) }.for_each(buffer::mark_failed);
    }
    guarded((), || {
        // SAFETY: the host passes a place for such rows.
        for (row, bytes) in unsafe { abi::rows_mut(data, size, rows, stride_data) }.enumerate() {
            let Some((state, start)) = located else {
                stream.refuse("reading a tensor");
                buffer::mark_failed(bytes);
                continue;
            };
            let position = start + (row * stride_tensor) as u64;
            if lock(&state.outputs).read(position, bytes) {
                continue;
            }
            state.note_host_read();
            let submitted = stream
                .submit("reading a tensor", |queue| queue.download(state.memory().subregion(position, size as u64)?));
            match submitted {
                Some((result, ticket)) => {
                    let lost = buffer::lost_parts(state, position, size);
                    lock(&stream.work).reads.push(Read { result, ticket, to: bytes.as_mut_ptr(), bytes: size, lost });
                }
                None => buffer::mark_failed(bytes),
            }
        }
    });
}

unsafe extern "C" fn copy_tensor_async(
    backend_src: *mut Backend,
    backend_dst: *mut Backend,
    src: *const Tensor,
    dst: *mut Tensor,
) -> bool {
    guarded(false, || {
        // SAFETY: the host passes two backends, the second one of them the plug-in's, and tensors in buffers of theirs.
        let (streams, from, to) = unsafe {
            let streams = Stream::of_any(backend_src).zip(Stream::of_any(backend_dst));
            (streams, BufferState::of_any((*src).owner()), BufferState::of_any((*dst).owner()))
        };
        let (Some((source, target)), Some(from), Some(to)) = (streams, from, to) else { return false };
        // SAFETY: as above.
        let (src, dst) = unsafe { (&*src, &*dst) };
        buffer::before_copy_to(to, dst);
        let epoch = to.epoch();
        let copied = buffer_calls::copy_between(from, src, to, dst);
        match copied.map_err(|error| target.fail("copying a tensor", &error)).ok() {
            // The source's later work may overwrite the tensor.
            Some((Some(done), _)) => {
                if !std::ptr::eq(from.device, to.device) {
                    _ = source.submit("waiting for a copy", |queue| queue.wait(&done));
                }
                buffer::copy_lost(from, src, to, dst, epoch);
                true
            }
            Some((None, _)) => false,
            None => {
                // The failure is kept for the next graph, and should the server be back by then, the copy is missing.
                to.mark_lost(to.range_of(dst));
                true
            }
        }
    })
}

unsafe extern "C" fn synchronize(backend: *mut Backend) {
    // SAFETY: the host passes a stream of the plug-in.
    let stream = unsafe { Stream::of(backend) };
    guarded((), || stream.finish());
}

unsafe extern "C" fn graph_compute(backend: *mut Backend, graph: *mut Graph) -> Status {
    // SAFETY: the host passes a stream of the plug-in and a graph, which do not change during the call.
    let (stream, nodes) = unsafe { (Stream::of(backend), host::get().nodes(graph)) };
    guarded(STATUS_FAILED, || {
        let nodes: Vec<*mut Tensor> = nodes.collect();
        let device = stream.device;
        // SAFETY: the host passes a graph that does not change during the call.
        let readers: Vec<i32> = nodes.iter().map(|&node| unsafe { Graph::readers(graph, node) }).collect();
        let known = match device.fanout() {
            // SAFETY: the nodes are of the host's graph.
            Ok((_, generation)) => unsafe { lock(&device.programs).find(&nodes, &readers, generation) },
            Err(_) => None,
        };
        let prepared = match known {
            _ if guard::has_panicked() => Err("a callback has panicked; start the program again".to_owned()),
            Some(known) => Ok(known),
            // SAFETY: as above.
            None => unsafe { graph::prepare(device, &nodes, &readers) }
                .inspect(|prepared| lock(&device.programs).insert(prepared.clone()))
                .map_err(|e| format!("{}: a graph: {e}", device.label())),
        };
        match prepared.and_then(|prepared| stream.run(&prepared)) {
            Ok(()) => STATUS_SUCCESS,
            Err(reason) => {
                device.failures.log(reason);
                STATUS_FAILED
            }
        }
    })
}

unsafe extern "C" fn event_record(backend: *mut Backend, event: *mut Event) {
    // SAFETY: the host passes a stream and an event of the plug-in.
    let (stream, state) = unsafe { (Stream::of(backend), event_state(event)) };
    guarded((), || *lock(state) = stream.device.mark().map(|(point, _)| point));
}

unsafe extern "C" fn event_wait(backend: *mut Backend, event: *mut Event) {
    // SAFETY: the host passes a stream and an event of the plug-in.
    let (stream, state) = unsafe { (Stream::of(backend), event_state(event)) };
    guarded((), || {
        // A point that has failed orders nothing: data of its queue fail by themselves. A host records an event again only after a
        // graph has succeeded, so a failure by the event would be for ever.
        if let Some(point) = lock(state).clone().filter(|point| point.failure().is_none()) {
            _ = stream.submit("waiting for an event", |queue| queue.wait(&point));
        }
    });
}

pub(crate) unsafe extern "C" fn event_new(device: *mut abi::Device) -> *mut Event {
    guarded(std::ptr::null_mut(), || {
        let state = Box::new(EventState::default());
        Box::into_raw(Box::new(Event { device, context: Box::into_raw(state).cast() }))
    })
}

pub(crate) unsafe extern "C" fn event_free(_: *mut abi::Device, event: *mut Event) {
    if event.is_null() {
        return;
    }
    guarded((), || {
        // SAFETY: the host frees an event of the plug-in once; `event_new` made both boxes.
        unsafe {
            let event = Box::from_raw(event);
            drop(Box::from_raw(event.context.cast::<EventState>()));
        }
    });
}

pub(crate) unsafe extern "C" fn event_synchronize(_: *mut abi::Device, event: *mut Event) {
    // SAFETY: the host passes an event of the plug-in.
    let state = unsafe { event_state(event) };
    guarded((), || {
        // If it fails, so does the stream whose point it is, and the next graph of that stream reports it.
        let point = lock(state).clone();
        _ = point.map(|point| point.wait(None));
    });
}
