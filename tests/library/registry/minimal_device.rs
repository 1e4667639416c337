//! A minimal device, written with the public interface alone: ADD and MUL of F32 tensors in its own memory. It has no thread:
//! pending commands run when its completion source is polled, on the polling thread.

use fanout::device::{
    Buffer, Caps, CompletionSource, CopyOutcome, Device, DeviceError, DeviceId, DeviceInfo, DeviceKind, Feature,
    MemoryBudget, MemoryInfo, PendingRead, Program, Queue, Region, Support, Timeline, TimelinePoint, Unsupported,
    UploadSource, check_copy,
};
use fanout::graph::{Graph, SlotOffset};
use fanout::ops::binary::Binary;
use fanout::ops::{NodeView, Op};
use fanout::tensor::{DType, TensorDesc};
use std::any::Any;
use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

const MEMORY: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct MinimalDevice {
    info: DeviceInfo,
    budget: Arc<MemoryBudget>,
    /// The number of nodes computed so far.
    pub(crate) done: Arc<AtomicU64>,
}

impl MinimalDevice {
    pub(crate) fn new(name: &str) -> Arc<MinimalDevice> {
        let mut info = DeviceInfo::new(name, DeviceKind::Gpu);
        "computes on the polling thread".clone_into(&mut info.description);
        (info.alignment, info.max_buffer) = (16, MEMORY);
        info.caps = Caps::default().with_asynchronous(true).with_events(true);
        Arc::new(MinimalDevice { info, budget: MemoryBudget::new(MEMORY), done: Arc::default() })
    }
}

/// The bytes of a buffer.
type Bytes = Mutex<Vec<u8>>;

/// A prepared graph.
type CompiledGraph = Vec<BinaryKernel>;

struct BinaryKernel {
    op: Binary,
    dst: SlotOffset,
    srcs: [SlotOffset; 2],
    bytes: usize,
}

/// The op of a node, if the device supports the node.
fn select(node: &NodeView<'_>) -> Result<Binary, Unsupported> {
    let dense = |t: &TensorDesc| t.dtype() == DType::F32 && t.is_contiguous() && t.same_shape(node.dst);
    let unsupported = |reason: &str| Unsupported { op: node.op.code(), reason: reason.to_owned() };
    match *node.op {
        Op::Binary(op @ (Binary::Add | Binary::Mul)) => {
            let tensors = [node.srcs.get(0), node.srcs.get(1), Some(node.dst)];
            let fits = tensors.into_iter().all(|t| t.is_some_and(dense));
            fits.then_some(op).ok_or_else(|| unsupported("all tensors must be F32, contiguous and of one shape"))
        }
        _ => Err(unsupported("only ADD and MUL are implemented")),
    }
}

impl Device for MinimalDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn features(&self) -> Vec<Feature> {
        vec![Feature::new("kernels", 13)]
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        Ok(MemoryInfo { free: MEMORY - self.budget.used(), total: MEMORY })
    }

    fn alloc(&self, bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError> {
        let reservations = (budget.reserve(bytes)?, self.budget.reserve(bytes)?);
        let memory: Bytes = Mutex::new(vec![0; bytes as usize]);
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(reservations)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        select(&node).map_or_else(Support::No, |_| Support::Yes)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        let mut kernels = CompiledGraph::new();
        for node in graph.nodes() {
            let view = graph.node_view(node).ok_or(DeviceError::Misuse("a node of another graph"))?;
            let op = select(&view)?;
            let place = |id: Option<_>| {
                let place = id.and_then(|id| graph.tensor(id)?.place);
                place.ok_or(DeviceError::Misuse("a tensor without a place"))
            };
            let (dst, srcs) = (place(Some(node.dst))?, [place(node.srcs[0])?, place(node.srcs[1])?]);
            kernels.push(BinaryKernel { op, dst, srcs, bytes: view.dst.extent() });
        }
        Ok(Program::new(graph, Box::new(kernels)))
    }

    fn queue(&self, _: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError> {
        let work = Arc::new(PendingCommands { pending: Mutex::default(), done: Arc::clone(&self.done) });
        let timeline = Timeline::with_source(work.clone());
        Ok(Box::new(MinimalQueue { device: self.info.id, work, timeline, last_mark: 0 }))
    }
}

enum MinimalCommand {
    Write(Region, Vec<u8>),
    Copy(Region, Region),
    Read(Region, Arc<Mutex<Option<Vec<u8>>>>),
    Run(Program, Arc<[Region]>),
    Wait(TimelinePoint),
    Mark(u64),
}

/// The pending commands of a queue.
struct PendingCommands {
    pending: Mutex<VecDeque<MinimalCommand>>,
    done: Arc<AtomicU64>,
}

impl fmt::Debug for PendingCommands {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("pending commands of a minimal device")
    }
}

fn read(region: &Region, offset: usize, bytes: usize) -> Result<Vec<u8>, DeviceError> {
    let at = region.offset() as usize + offset;
    let memory = region.buffer().memory::<Bytes>().ok_or(DeviceError::Misuse("a region of another device"))?;
    Ok(memory.lock().unwrap()[at..at + bytes].to_vec())
}

fn write(region: &Region, offset: usize, bytes: &[u8]) -> Result<(), DeviceError> {
    let at = region.offset() as usize + offset;
    let memory = region.buffer().memory::<Bytes>().ok_or(DeviceError::Misuse("a region of another device"))?;
    memory.lock().unwrap()[at..at + bytes.len()].copy_from_slice(bytes);
    Ok(())
}

impl PendingCommands {
    /// Runs a command. False if it has to wait.
    fn process(&self, command: &MinimalCommand, timeline: &Timeline) -> Result<bool, DeviceError> {
        match command {
            MinimalCommand::Write(dst, bytes) => write(dst, 0, bytes)?,
            MinimalCommand::Copy(src, dst) => write(dst, 0, &read(src, 0, src.bytes() as usize)?)?,
            MinimalCommand::Read(src, to) => *to.lock().unwrap() = Some(read(src, 0, src.bytes() as usize)?),
            MinimalCommand::Run(program, bindings) => {
                for kernel in
                    program.compiled::<CompiledGraph>().ok_or(DeviceError::Misuse("a program of another device"))?
                {
                    let source = |place: &SlotOffset| read(&bindings[place.slot as usize], place.offset, kernel.bytes);
                    let [a, b] =
                        [source(&kernel.srcs[0])?, source(&kernel.srcs[1])?].map(|bytes| super::floats(&bytes));
                    let values = a.iter().zip(&b).map(|(a, b)| if kernel.op == Binary::Add { a + b } else { a * b });
                    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
                    write(&bindings[kernel.dst.slot as usize], kernel.dst.offset, &bytes)?;
                    self.done.fetch_add(1, Relaxed);
                }
            }
            MinimalCommand::Wait(point) => return point.poll(),
            MinimalCommand::Mark(seq) => timeline.advance(*seq),
        }
        Ok(true)
    }
}

impl CompletionSource for PendingCommands {
    fn poll(&self, timeline: &Timeline) {
        // If another thread is running the commands, it runs all that are ready.
        let Ok(mut pending) = self.pending.try_lock() else { return };
        while let Some(command) = pending.front() {
            match self.process(command, timeline) {
                Ok(true) => drop(pending.pop_front()),
                Ok(false) => return,
                Err(e) => {
                    pending.clear();
                    timeline.fail(e);
                }
            }
        }
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

struct MinimalQueue {
    device: DeviceId,
    work: Arc<PendingCommands>,
    timeline: Arc<Timeline>,
    last_mark: u64,
}

impl MinimalQueue {
    fn submit(&self, regions: &[&Region], command: MinimalCommand) -> Result<(), DeviceError> {
        if regions.iter().any(|region| region.buffer().device() != self.device) {
            return Err(DeviceError::Misuse("a region of another device"));
        }
        if let Some(failure) = self.timeline.failure() {
            return Err(failure);
        }
        self.work.pending.lock().unwrap().push_back(command);
        Ok(())
    }
}

impl Queue for MinimalQueue {
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        src.check_size(dst.bytes())?;
        let bytes = src.into_bytes(dst.bytes())?;
        self.submit(&[&dst.clone()], MinimalCommand::Write(dst, bytes))
    }

    fn download(&mut self, src: Region) -> Result<PendingRead, DeviceError> {
        let bytes = Arc::new(Mutex::new(None));
        self.submit(&[&src.clone()], MinimalCommand::Read(src, Arc::clone(&bytes)))?;
        let point = self.mark();
        Ok(PendingRead::at(point, move || bytes.lock().unwrap().take().ok_or(DeviceError::Ended)))
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        let bytes = vec![value; dst.bytes() as usize];
        self.submit(&[&dst.clone()], MinimalCommand::Write(dst, bytes))
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        if src.buffer().memory::<Bytes>().is_none() {
            return Ok(CopyOutcome::Unreachable);
        }
        check_copy(&src, &dst)?;
        if let Some(point) = after {
            self.wait(point)?;
        }
        self.submit(&[&dst.clone()], MinimalCommand::Copy(src, dst))?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        program.check_bindings(bindings)?;
        let regions: Vec<_> = bindings.iter().collect();
        self.submit(&regions, MinimalCommand::Run(program.clone(), Arc::clone(bindings)))
    }

    fn mark(&mut self) -> TimelinePoint {
        self.last_mark += 1;
        // On a failed queue, `submit` fails and the point fails with the timeline.
        let _ = self.submit(&[], MinimalCommand::Mark(self.last_mark));
        TimelinePoint::new(&self.timeline, self.last_mark)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        // A point of this queue needs no wait: its work is in order.
        let own = point.completion_source::<PendingCommands>().is_some_and(|work| std::ptr::eq(work, &*self.work));
        if own { Ok(()) } else { self.submit(&[], MinimalCommand::Wait(point.clone())) }
    }
}

impl Drop for MinimalQueue {
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
        self.work.pending.lock().unwrap().clear();
    }
}
