//! Host-staged copies (staging copies): a queue wrapper with a thread that waits for downloads from other devices and then
//! uploads them.
//!
//! With the wait on this thread, the host can submit further steps. A second thread waits for the completion of the queue's
//! marks. Over a connection, the next upload is therefore sent before the completion of the previous upload has arrived.

use super::super::SchedError;
use crate::device::{
    CopyOutcome, DEVICE_TIMEOUT, DeviceError, ForwardQueue, PendingRead, Prefault, Queue, Region, TRANSFER_CHUNK_BYTES,
    Timeline, TimelinePoint, UploadSource,
};
use crate::tensor::TensorDesc;
use crossbeam::channel::{Receiver, Sender, unbounded};
use std::sync::Arc;
use std::time::Instant;

/// An in-order queue for uploads and copies. Its commands run on a staging thread.
pub(super) struct HostStagingQueue {
    commands: Sender<StagingCommand>,
    timeline: Arc<Timeline>,
    /// Number of the last mark.
    last_mark: u64,
    /// Whether the wrapped queue supports prefault hints.
    prefaults: bool,
}

/// A command for the staging thread.
enum StagingCommand {
    Upload(Region, Vec<u8>),
    UploadPending(Region, PendingRead),
    Copy(Region, Region, Option<TimelinePoint>),
    Wait(TimelinePoint),
    Prefault(Region),
    Mark(u64),
}

impl HostStagingQueue {
    pub(super) fn new(mut queue: Box<dyn Queue>, device: &str) -> Result<HostStagingQueue, SchedError> {
        let (commands, received_commands) = unbounded();
        let (marks, received_marks) = unbounded();
        let (timeline, prefaults) = (Timeline::new(), queue.prefault().is_some());
        let [staging, completion] = [(); 2].map(|()| FailOnDrop(Arc::clone(&timeline)));
        let thread = |name: &str| std::thread::Builder::new().name(format!("{name} {device}"));
        thread("done")
            .spawn(move || run_completion_thread(&received_marks, &completion.0))
            .map_err(SchedError::ThreadSpawn)?;
        thread("stage")
            .spawn(move || run_staging_thread(queue, &received_commands, &marks, &staging.0))
            .map_err(SchedError::ThreadSpawn)?;
        Ok(HostStagingQueue { commands, timeline, last_mark: 0, prefaults })
    }

    /// Uploads the bytes of a pending download. The staging thread waits for them.
    pub(super) fn upload_pending(&mut self, dst: Region, bytes: PendingRead) -> Result<(), DeviceError> {
        self.send_command(StagingCommand::UploadPending(dst, bytes))
    }

    fn send_command(&mut self, command: StagingCommand) -> Result<(), DeviceError> {
        self.timeline.failure().map_or(Ok(()), Err)?;
        self.commands.send(command).map_err(|_| self.timeline.failure().unwrap_or(DeviceError::Ended))
    }
}

impl Drop for HostStagingQueue {
    fn drop(&mut self) {
        self.timeline.fail(DeviceError::Ended);
    }
}

/// Fails the timeline when a thread ends for any reason, a panic included, so that waiters for its points do not hang.
struct FailOnDrop(Arc<Timeline>);

impl Drop for FailOnDrop {
    fn drop(&mut self) {
        self.0.fail(DeviceError::Ended);
    }
}

fn run_staging_thread(
    mut queue: Box<dyn Queue>,
    commands: &Receiver<StagingCommand>,
    marks: &Sender<(u64, TimelinePoint)>,
    timeline: &Timeline,
) {
    for command in commands {
        // After the `HostStagingQueue` was dropped or a command failed, the remaining commands are discarded.
        if timeline.failure().is_some() {
            return;
        }
        if let Err(e) = process(&mut *queue, command, marks) {
            timeline.fail(e);
            return;
        }
    }
}

fn process(
    queue: &mut dyn Queue,
    command: StagingCommand,
    marks: &Sender<(u64, TimelinePoint)>,
) -> Result<(), DeviceError> {
    match command {
        StagingCommand::Upload(dst, bytes) => upload_in_chunks(queue, &dst, &bytes),
        StagingCommand::UploadPending(dst, read) => upload_in_chunks(queue, &dst, &read.wait(deadline())?),
        StagingCommand::Copy(src, dst, after) => copy_from_device(queue, src, dst, after.as_ref()),
        StagingCommand::Wait(point) => queue.wait(&point),
        StagingCommand::Prefault(region) => {
            if let Some(memory) = queue.prefault() {
                memory.prefault(&region);
            }
            Ok(())
        }
        // The completion thread ends only after this thread has ended, or after it has failed the timeline with the cause.
        StagingCommand::Mark(seq) => marks.send((seq, queue.mark())).map_err(|_| DeviceError::Ended),
    }
}

fn deadline() -> Option<Instant> {
    Some(Instant::now() + DEVICE_TIMEOUT)
}

/// Waits for the points of the wrapped queue in order, and advances the timeline.
fn run_completion_thread(marks: &Receiver<(u64, TimelinePoint)>, timeline: &Timeline) {
    for (seq, point) in marks {
        match point.wait(deadline()) {
            Ok(()) => timeline.advance(seq),
            Err(e) => return timeline.fail(e),
        }
    }
}

/// Submits a copy to a device for which [`Device::copies_from`](crate::device::Device) returned true.
pub(super) fn copy_from_device(
    queue: &mut dyn Queue,
    src: Region,
    dst: Region,
    after: Option<&TimelinePoint>,
) -> Result<(), DeviceError> {
    match queue.copy_from(src, dst, after)? {
        CopyOutcome::Submitted => Ok(()),
        CopyOutcome::Unreachable => {
            Err(DeviceError::Bug("copies_from returned true, but copy_from returned Unreachable".to_owned()))
        }
    }
}

/// Uploads in chunks of at most [`TRANSFER_CHUNK_BYTES`] bytes.
pub(super) fn upload_in_chunks(queue: &mut dyn Queue, dst: &Region, bytes: &[u8]) -> Result<(), DeviceError> {
    if bytes.len() as u64 <= TRANSFER_CHUNK_BYTES {
        return queue.upload(dst.clone(), None, UploadSource::Borrowed(bytes));
    }
    for (at, chunk) in (0..).step_by(TRANSFER_CHUNK_BYTES as usize).zip(bytes.chunks(TRANSFER_CHUNK_BYTES as usize)) {
        queue.upload(dst.subregion(at, chunk.len() as u64)?, None, UploadSource::Borrowed(chunk))?;
    }
    Ok(())
}

impl ForwardQueue for HostStagingQueue {
    /// The staging thread owns the wrapped queue, so calls that no method below sends to the thread are refused.
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
        Err(DeviceError::Misuse("a host staging queue only uploads and copies"))
    }

    fn upload(&mut self, dst: Region, _: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError> {
        let bytes = src.into_bytes(dst.bytes())?;
        self.send_command(StagingCommand::Upload(dst, bytes))
    }

    fn copy_from(
        &mut self,
        src: Region,
        dst: Region,
        after: Option<&TimelinePoint>,
    ) -> Result<CopyOutcome, DeviceError> {
        self.send_command(StagingCommand::Copy(src, dst, after.cloned()))?;
        Ok(CopyOutcome::Submitted)
    }

    fn mark(&mut self) -> TimelinePoint {
        self.last_mark += 1;
        // If the thread has ended, the timeline already carries the cause.
        let _ = self.send_command(StagingCommand::Mark(self.last_mark));
        TimelinePoint::new(&self.timeline, self.last_mark)
    }

    fn wait(&mut self, point: &TimelinePoint) -> Result<(), DeviceError> {
        self.send_command(StagingCommand::Wait(point.clone()))
    }

    fn prefault(&mut self) -> Option<&mut dyn Prefault> {
        if self.prefaults { Some(self) } else { None }
    }
}

impl Prefault for HostStagingQueue {
    fn prefault(&mut self, region: &Region) {
        // Prefaulting is a hint, so an ended thread is no error here.
        let _ = self.send_command(StagingCommand::Prefault(region.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::noop::NoopDevice;
    use crate::device::{DeviceKind, MemoryBudget};
    use std::time::Duration;

    /// A queue that reports the prefaulted bytes.
    struct ReportingQueue(Box<dyn Queue>, Sender<u64>);

    impl ForwardQueue for ReportingQueue {
        fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError> {
            Ok(&mut *self.0)
        }

        fn prefault(&mut self) -> Option<&mut dyn Prefault> {
            Some(self)
        }
    }

    impl Prefault for ReportingQueue {
        fn prefault(&mut self, region: &Region) {
            self.1.send(region.bytes()).unwrap();
        }
    }

    #[test]
    fn prefault_hints_are_forwarded_and_other_commands_than_uploads_are_refused() {
        let (device, budget) = (NoopDevice::new("N", DeviceKind::Gpu).shared(), MemoryBudget::new(1 << 10));
        let buffer = device.alloc(64, &budget).unwrap();
        let (report, reported) = unbounded();
        let reporting = ReportingQueue(device.queue(&budget).unwrap(), report);
        let mut staging: Box<dyn Queue> = Box::new(HostStagingQueue::new(Box::new(reporting), "N").unwrap());
        staging.prefault().unwrap().prefault(&buffer.whole());
        assert_eq!(reported.recv_timeout(Duration::from_secs(60)), Ok(64));
        assert!(staging.load_by_digest().is_none());
        assert!(matches!(staging.download(buffer.whole()), Err(DeviceError::Misuse(_))));
        assert!(matches!(staging.fill(buffer.whole(), 0), Err(DeviceError::Misuse(_))));
        staging.upload(buffer.whole(), None, UploadSource::Borrowed(&[0; 64])).unwrap();
        staging.mark().wait(deadline()).unwrap();
        let mut plain: Box<dyn Queue> = Box::new(HostStagingQueue::new(device.queue(&budget).unwrap(), "N").unwrap());
        assert!(plain.prefault().is_none());
    }
}
