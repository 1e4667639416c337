//! A queue whose uploads may still be on their way from another device: a thread waits for them, nobody else does. Another
//! one waits for its moments, so that behind a connection the next upload is on its way before the last one is known to
//! have come.

use super::super::SchedError;
use crate::device::{
    CopyOutcome, DeviceError, ForwardQueue, PATIENCE, PIECE, Point, Prefault, Queue, Region, Source, Ticket, Timeline,
};
use crate::tensor::TensorDesc;
use crossbeam::channel::{Receiver, Sender, unbounded};
use std::sync::Arc;
use std::time::Instant;

/// Brings things to a device, in order.
pub(super) struct HostStagingQueue {
    work: Sender<StagingCommand>,
    timeline: Arc<Timeline>,
    marked: u64,
    /// Whether the queue that the thread has can prefault.
    prefaults: bool,
}

enum StagingCommand {
    Upload(Region, Vec<u8>),
    UploadPending(Region, Ticket),
    Copy(Region, Region, Option<Point>),
    Wait(Point),
    Prefault(Region),
    Mark(u64),
}

impl HostStagingQueue {
    pub(super) fn new(mut queue: Box<dyn Queue>, device: &str) -> Result<HostStagingQueue, SchedError> {
        let (work, loads) = unbounded();
        let (mark, marks) = unbounded();
        let (timeline, prefaults) = (Timeline::new(), queue.prefault().is_some());
        let ends = [(); 2].map(|()| FailOnDrop(Arc::clone(&timeline)));
        let [carrier, watcher] = ends;
        let thread = |name: &str| std::thread::Builder::new().name(format!("{name} {device}"));
        thread("at").spawn(move || run_completion_thread(&marks, &watcher.0)).map_err(SchedError::ThreadSpawn)?;
        thread("to")
            .spawn(move || run_staging_thread(queue, &loads, &mark, &carrier.0))
            .map_err(SchedError::ThreadSpawn)?;
        Ok(HostStagingQueue { work, timeline, marked: 0, prefaults })
    }

    /// Writes bytes that have yet to come.
    pub(super) fn upload_pending(&mut self, dst: Region, bytes: Ticket) -> Result<(), DeviceError> {
        self.send_command(StagingCommand::UploadPending(dst, bytes))
    }

    fn send_command(&mut self, load: StagingCommand) -> Result<(), DeviceError> {
        self.timeline.failure().map_or(Ok(()), Err)?;
        self.work.send(load).map_err(|_| self.timeline.failure().unwrap_or(DeviceError::Ended))
    }
}

impl Drop for HostStagingQueue {
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
    }
}

/// Whoever waits for a point is told when the thread ends, however it does.
struct FailOnDrop(Arc<Timeline>);

impl Drop for FailOnDrop {
    fn drop(&mut self) {
        self.0.fail(DeviceError::Ended);
    }
}

fn run_staging_thread(
    mut queue: Box<dyn Queue>,
    loads: &Receiver<StagingCommand>,
    marks: &Sender<(u64, Point)>,
    timeline: &Timeline,
) {
    for load in loads {
        // Nobody wants the rest when the porter is gone.
        if timeline.failure().is_some() {
            return;
        }
        if let Err(e) = process(&mut *queue, load, marks) {
            timeline.fail(e);
            return;
        }
    }
}

fn process(queue: &mut dyn Queue, load: StagingCommand, marks: &Sender<(u64, Point)>) -> Result<(), DeviceError> {
    match load {
        StagingCommand::Upload(dst, bytes) => upload_in_chunks(queue, &dst, &bytes),
        StagingCommand::UploadPending(dst, ticket) => upload_in_chunks(queue, &dst, &ticket.wait(deadline())?),
        StagingCommand::Copy(src, dst, after) => copy_from_device(queue, src, dst, after.as_ref()),
        StagingCommand::Wait(point) => queue.wait(&point),
        StagingCommand::Prefault(region) => {
            if let Some(memory) = queue.prefault() {
                memory.prefault(&region);
            }
            Ok(())
        }
        // Who waits for them ends only when this does, or when it has said why.
        StagingCommand::Mark(seq) => marks.send((seq, queue.mark())).map_err(|_| DeviceError::Ended),
    }
}

fn deadline() -> Option<Instant> {
    Some(Instant::now() + PATIENCE)
}

/// Waits for the moments of the queue, in order.
fn run_completion_thread(marks: &Receiver<(u64, Point)>, timeline: &Timeline) {
    for (seq, point) in marks {
        match point.wait(deadline()) {
            Ok(()) => timeline.advance(seq),
            Err(e) => return timeline.fail(e),
        }
    }
}

/// Copies between devices of which one has said that it copies from the other.
pub(super) fn copy_from_device(
    queue: &mut dyn Queue,
    src: Region,
    dst: Region,
    after: Option<&Point>,
) -> Result<(), DeviceError> {
    match queue.copy_from(src, dst, after)? {
        CopyOutcome::Submitted => Ok(()),
        CopyOutcome::Unreachable => {
            Err(DeviceError::Bug("a device does not copy what it has said that it copies".to_owned()))
        }
    }
}

/// Uploads in pieces that are taken in at once.
pub(super) fn upload_in_chunks(queue: &mut dyn Queue, dst: &Region, bytes: &[u8]) -> Result<(), DeviceError> {
    if bytes.len() as u64 <= PIECE {
        return queue.upload(dst.clone(), None, Source::Borrowed(bytes));
    }
    for (at, piece) in (0..).step_by(PIECE as usize).zip(bytes.chunks(PIECE as usize)) {
        queue.upload(dst.part(at, piece.len() as u64)?, None, Source::Borrowed(piece))?;
    }
    Ok(())
}

impl ForwardQueue for HostStagingQueue {
    /// The queue is with the thread. What no method below hands to the thread is refused: a porter only brings.
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Err(DeviceError::Misuse("a porter only brings"))
    }

    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: Source<'_>) -> Result<(), DeviceError> {
        let bytes = match src {
            Source::Borrowed(bytes) => bytes.to_vec(),
            Source::Writer(fill) => {
                let mut bytes = vec![0; dst.bytes() as usize];
                fill(&mut bytes)?;
                bytes
            }
        };
        self.send_command(StagingCommand::Upload(dst, bytes))
    }

    fn copy_from(&mut self, src: Region, dst: Region, after: Option<&Point>) -> Result<CopyOutcome, DeviceError> {
        self.send_command(StagingCommand::Copy(src, dst, after.cloned()))?;
        Ok(CopyOutcome::Submitted)
    }

    fn mark(&mut self) -> Point {
        self.marked += 1;
        // When the thread is gone, the timeline already carries why.
        let _ = self.send_command(StagingCommand::Mark(self.marked));
        Point::new(&self.timeline, self.marked)
    }

    fn wait(&mut self, point: &Point) -> Result<(), DeviceError> {
        self.send_command(StagingCommand::Wait(point.clone()))
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        if self.prefaults { Some(self) } else { None }
    }
}

impl Prefault for HostStagingQueue {
    fn prefault(&mut self, region: &Region) {
        // A hint: when the thread is gone, nothing needs it.
        let _ = self.send_command(StagingCommand::Prefault(region.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::noop::NoopDevice;
    use crate::device::{Account, DeviceKind};
    use std::time::Duration;

    /// A queue that reports the prefaulted bytes.
    struct Reporting(Box<dyn Queue>, Sender<u64>);

    impl ForwardQueue for Reporting {
        fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
            Ok(&mut *self.0)
        }

        fn prefault(&mut self) -> Option<&mut dyn Prefault> {
            Some(self)
        }
    }

    impl Prefault for Reporting {
        fn prefault(&mut self, region: &Region) {
            self.1.send(region.bytes()).unwrap();
        }
    }

    #[test]
    fn a_porter_forwards_hints_and_refuses_what_it_does_not_bring() {
        let (device, account) = (NoopDevice::new("N", DeviceKind::Gpu).shared(), Account::new(1 << 10));
        let buffer = device.alloc(64, &account).unwrap();
        let (tell, told) = unbounded();
        let reporting = Reporting(device.queue(&account).unwrap(), tell);
        let mut porter: Box<dyn Queue> = Box::new(HostStagingQueue::new(Box::new(reporting), "N").unwrap());
        porter.prefault().unwrap().prefault(&buffer.whole());
        assert_eq!(told.recv_timeout(Duration::from_secs(60)), Ok(64));
        assert!(porter.load_by_digest().is_none() && porter.run_inline().is_none());
        assert!(matches!(porter.download(buffer.whole()), Err(DeviceError::Misuse(_))));
        assert!(matches!(porter.fill(buffer.whole(), 0), Err(DeviceError::Misuse(_))));
        porter.upload(buffer.whole(), None, Source::Borrowed(&[0; 64])).unwrap();
        porter.mark().wait(deadline()).unwrap();
        let mut plain: Box<dyn Queue> = Box::new(HostStagingQueue::new(device.queue(&account).unwrap(), "N").unwrap());
        assert!(plain.prefault().is_none());
    }
}
