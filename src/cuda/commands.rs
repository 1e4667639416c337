//! The commands of a CUDA queue that are held back, and the numbers of its events.

use super::context::TransferBlock;
use super::event_timeline::{EventTimeline, is_point_seq};
use super::events::Stream;
use crate::device::{Command, DeviceError, Lane, Program, Region, Reservation, TimelinePoint};
use std::ops::Range;
use std::sync::{Arc, OnceLock};

/// The sequence numbers of a queue's events. Points have numbers that the queue knows before their events are recorded (see
/// [`point_seq`](super::event_timeline::point_seq)); events that the executor records for itself lie between them.
#[derive(Default)]
pub(super) struct EventNumbers {
    last: u64,
}

impl EventNumbers {
    /// The number that covers all work so far: the next event's, or a smaller one.
    pub(super) fn next(&self) -> u64 {
        self.last + 1
    }

    /// Sets the number of the event that was recorded last, that of a point.
    pub(super) fn set_last(&mut self, seq: u64) {
        self.last = seq;
    }

    /// Records an event after all work so far and returns its number.
    pub(super) fn record(&mut self, events: &EventTimeline, stream: &Stream) -> Result<u64, DeviceError> {
        let seq = self.next();
        if is_point_seq(seq) {
            return Err(DeviceError::Bug("a queue records events without end, and no point".to_owned()));
        }
        events.record(stream, seq)?;
        self.last = seq;
        Ok(seq)
    }
}

/// What a download has put into host memory, once its event is reached.
pub(super) enum Downloaded {
    /// The ranges of all regions in one block.
    Block(TransferBlock),
    /// The bytes of each region.
    Bytes(Vec<Vec<u8>>),
}

/// A download: the regions, their ranges in the block, and where the executor puts the result.
pub(super) struct Download {
    pub(super) srcs: Vec<Region>,
    pub(super) ranges: Vec<Range<usize>>,
    pub(super) result: Arc<OnceLock<Downloaded>>,
    /// Number of the queue's point after it.
    pub(super) point: u64,
}

/// A command that the queue has held back.
pub(super) enum CudaCommand {
    /// The bytes, charged to the session.
    Upload {
        dst: Region,
        bytes: Vec<u8>,
        _reservation: Reservation,
    },
    Download(Download),
    Fill {
        dst: Region,
        value: u8,
    },
    Copy {
        src: Region,
        dst: Region,
    },
    /// A program from a segment on.
    Run {
        program: Program,
        bindings: Arc<[Region]>,
        from: usize,
    },
    Wait(TimelinePoint),
    /// Records the event of a point, by its number.
    Mark(u64),
}

impl Command for CudaCommand {
    fn staged_bytes(&self) -> usize {
        if let CudaCommand::Upload { bytes, .. } = self { bytes.len() } else { 0 }
    }

    fn lane(&self) -> Lane {
        use CudaCommand::{Copy, Download, Fill, Mark, Run, Upload, Wait};
        match self {
            // These wait for pinned memory, a turn, or the layout of a memory.
            Upload { .. } | Download(_) | Copy { .. } | Fill { .. } | Run { .. } => Lane::Long,
            Wait(_) | Mark(_) => Lane::Short,
        }
    }
}
