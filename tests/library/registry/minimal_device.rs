//! A device as anyone may write one, on the public interface alone: sums and products of F32 tensors in memory of its own. It
//! has no thread: what was submitted is done by whoever looks how far it is.

use fanout::device::{
    Account, Buffer, Caps, CopyOutcome, Device, DeviceError, DeviceId, DeviceInfo, DeviceKind, Feature, MemoryInfo,
    Point, Program, Progress, Queue, Region, Source, Support, Ticket, Timeline, Unsupported,
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
    account: Arc<Account>,
    /// How many nodes it has computed.
    pub(crate) done: Arc<AtomicU64>,
}

impl MinimalDevice {
    pub(crate) fn new(name: &str) -> Arc<MinimalDevice> {
        let mut info = DeviceInfo::new(name, DeviceKind::Gpu);
        "beads on wires".clone_into(&mut info.description);
        (info.alignment, info.max_buffer) = (16, MEMORY);
        info.caps = Caps::default().with_asynchronous(true).with_events(true);
        Arc::new(MinimalDevice { info, account: Account::new(MEMORY), done: Arc::default() })
    }
}

/// The bytes of a buffer.
type Bytes = Mutex<Vec<u8>>;

/// A graph made ready.
type Code = Vec<Step>;

struct Step {
    op: Binary,
    dst: SlotOffset,
    srcs: [SlotOffset; 2],
    bytes: usize,
}

/// What a node needs to be computed here.
fn select(node: &NodeView<'_>) -> Result<Binary, Unsupported> {
    let dense = |t: &TensorDesc| t.dtype() == DType::F32 && t.is_contiguous() && t.same_shape(node.dst);
    let no = |reason: &str| Unsupported { op: node.op.code(), reason: reason.to_owned() };
    match *node.op {
        Op::Binary(op @ (Binary::Add | Binary::Mul)) => {
            let tensors = [node.srcs.get(0), node.srcs.get(1), Some(node.dst)];
            let fits = tensors.into_iter().all(|t| t.is_some_and(dense));
            fits.then_some(op).ok_or_else(|| no("all tensors must be F32, contiguous and of one shape"))
        }
        _ => Err(no("an abacus adds and multiplies")),
    }
}

impl Device for MinimalDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn features(&self) -> Vec<Feature> {
        vec![Feature::new("wires", 13)]
    }

    fn memory(&self) -> Result<MemoryInfo, DeviceError> {
        Ok(MemoryInfo { free: MEMORY - self.account.used(), total: MEMORY })
    }

    fn alloc(&self, bytes: u64, account: &Arc<Account>) -> Result<Buffer, DeviceError> {
        let charges = (account.charge(bytes)?, self.account.charge(bytes)?);
        let memory: Bytes = Mutex::new(vec![0; bytes as usize]);
        Ok(Buffer::new(&self.info, bytes, Box::new(memory), Box::new(charges)))
    }

    fn alloc_size(&self, tensor: &TensorDesc) -> u64 {
        tensor.extent() as u64
    }

    fn support(&self, node: NodeView<'_>) -> Support {
        select(&node).map_or_else(Support::No, |_| Support::Yes)
    }

    fn prepare(&self, graph: Arc<Graph>) -> Result<Program, DeviceError> {
        let mut code = Code::new();
        for node in graph.nodes() {
            let view = graph.node_view(node).ok_or(DeviceError::Misuse("a node of another graph"))?;
            let op = select(&view)?;
            let place = |id: Option<_>| {
                let place = id.and_then(|id| graph.tensor(id)?.place);
                place.ok_or(DeviceError::Misuse("a tensor without a place"))
            };
            let (dst, srcs) = (place(Some(node.dst))?, [place(node.srcs[0])?, place(node.srcs[1])?]);
            code.push(Step { op, dst, srcs, bytes: view.dst.extent() });
        }
        Ok(Program::new(graph, Box::new(code)))
    }

    fn queue(&self, _: &Arc<Account>) -> Result<Box<dyn Queue>, DeviceError> {
        let work = Arc::new(Work { pending: Mutex::default(), done: Arc::clone(&self.done) });
        let timeline = Timeline::looked_at(work.clone());
        Ok(Box::new(MinimalQueue { device: self.info.id, work, timeline, marked: 0 }))
    }
}

enum Command {
    Write(Region, Vec<u8>),
    Copy(Region, Region),
    Read(Region, Arc<Mutex<Option<Vec<u8>>>>),
    Run(Program, Arc<[Region]>),
    Wait(Point),
    Mark(u64),
}

/// What a queue has yet to do.
struct Work {
    pending: Mutex<VecDeque<Command>>,
    done: Arc<AtomicU64>,
}

impl fmt::Debug for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("work on an abacus")
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

impl Work {
    /// Does a command; false where that has to wait.
    fn obey(&self, command: &Command, timeline: &Timeline) -> Result<bool, DeviceError> {
        match command {
            Command::Write(dst, bytes) => write(dst, 0, bytes)?,
            Command::Copy(src, dst) => write(dst, 0, &read(src, 0, src.bytes() as usize)?)?,
            Command::Read(src, to) => *to.lock().unwrap() = Some(read(src, 0, src.bytes() as usize)?),
            Command::Run(program, bindings) => {
                for step in program.code::<Code>().ok_or(DeviceError::Misuse("a program of another device"))? {
                    let source = |place: &SlotOffset| read(&bindings[place.slot as usize], place.offset, step.bytes);
                    let [a, b] = [source(&step.srcs[0])?, source(&step.srcs[1])?].map(|bytes| super::floats(&bytes));
                    let values = a.iter().zip(&b).map(|(a, b)| if step.op == Binary::Add { a + b } else { a * b });
                    let bytes: Vec<u8> = values.flat_map(f32::to_le_bytes).collect();
                    write(&bindings[step.dst.slot as usize], step.dst.offset, &bytes)?;
                    self.done.fetch_add(1, Relaxed);
                }
            }
            Command::Wait(point) => return point.poll(),
            Command::Mark(seq) => timeline.advance(*seq),
        }
        Ok(true)
    }
}

impl Progress for Work {
    fn look(&self, timeline: &Timeline) {
        // Where someone else is at it, that one goes on.
        let Ok(mut pending) = self.pending.try_lock() else { return };
        while let Some(command) = pending.front() {
            match self.obey(command, timeline) {
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
    work: Arc<Work>,
    timeline: Arc<Timeline>,
    marked: u64,
}

impl MinimalQueue {
    fn submit(&self, regions: &[&Region], command: Command) -> Result<(), DeviceError> {
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
    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        let bytes = match src {
            Source::Borrowed(bytes) => bytes.to_vec(),
            Source::Writer(fill) => {
                let mut bytes = vec![0; dst.bytes() as usize];
                fill(&mut bytes)?;
                bytes
            }
        };
        if bytes.len() as u64 != dst.bytes() {
            return Err(DeviceError::Misuse("an upload's length is not its region's"));
        }
        self.submit(&[&dst.clone()], Command::Write(dst, bytes))
    }

    fn download(&mut self, src: Region) -> Result<Ticket, DeviceError> {
        let bytes = Arc::new(Mutex::new(None));
        self.submit(&[&src.clone()], Command::Read(src, Arc::clone(&bytes)))?;
        let point = self.mark();
        Ok(Ticket::fetched(move |deadline| {
            point.wait(deadline)?;
            bytes.lock().unwrap().take().ok_or(DeviceError::Ended)
        }))
    }

    fn fill(&mut self, dst: Region, value: u8) -> Result<(), DeviceError> {
        let bytes = vec![value; dst.bytes() as usize];
        self.submit(&[&dst.clone()], Command::Write(dst, bytes))
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        if src.buffer().memory::<Bytes>().is_none() {
            return Ok(CopyOutcome::Unreachable);
        }
        if src.bytes() != dst.bytes() {
            return Err(DeviceError::Misuse("a copy's regions differ in size"));
        }
        if let Some(point) = after {
            self.wait(point)?;
        }
        self.submit(&[&dst.clone()], Command::Copy(src, dst))?;
        Ok(CopyOutcome::Submitted)
    }

    fn run(&mut self, program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError> {
        let slots = program.graph().slot_sizes();
        let fits = bindings.len() == slots.len() && bindings.iter().zip(slots).all(|(r, &s)| r.bytes() >= s as u64);
        if !fits {
            return Err(DeviceError::Misuse("the bindings do not fit the program's slots"));
        }
        let regions: Vec<_> = bindings.iter().collect();
        self.submit(&regions, Command::Run(program.clone(), Arc::clone(bindings)))
    }

    fn mark(&mut self) -> Point {
        self.marked += 1;
        // On a queue that failed the point fails too.
        let _ = self.submit(&[], Command::Mark(self.marked));
        Point::new(&self.timeline, self.marked)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        // In order with itself.
        let own = point.progress::<Work>().is_some_and(|work| std::ptr::eq(work, &*self.work));
        if own { Ok(()) } else { self.submit(&[], Command::Wait(point.clone())) }
    }
}

impl Drop for MinimalQueue {
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
        self.work.pending.lock().unwrap().clear();
    }
}
