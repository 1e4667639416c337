//! Streams, events, graphs, and the order in which operations execute. Open `stream.rs` first.
//!
//! Submission executes nothing. An operation waits in its stream's queue (`stream`) until the program synchronises (or
//! queries). Then the seed repeatedly chooses a stream (`schedule_rng`) among those whose first operation has all its
//! dependencies met. So every order that CUDA allows can occur, and a program with a missing dependency gets an order that it
//! did not expect. An [`Event`] marks a point of a stream; waiting for an event means waiting for that point. While the program
//! makes no calls, an [`IdleRunner`] executes ready operations.
//!
//! Launching a graph (`graph`) submits its nodes to hidden streams; `capture` tracks which streams record into a graph.
//! Simulated time (`simulated_time`) is computed from what is submitted, in the order of submission.
//!
//! The driver's lock guards the state. Operations execute outside of the lock (`execute`), on the thread that synchronises.

mod capture;
mod event;
mod execute;
mod graph;
mod idle_runner;
mod schedule_rng;
mod simulated_time;
mod stream;
mod stream_op;

pub use capture::{Capture, CaptureMode, Captures, EndedCapture, EventWait};
pub use event::Event;
pub use execute::{OpExecutor, OpOutcome};
pub use graph::{Edge, ExecPlan, Graph, Payload, PlanStep, UpdateMismatch};
pub use idle_runner::{IdleRunner, StepProgress};
pub use schedule_rng::ScheduleRng;
pub use simulated_time::{OpCost, Picos, Timeline};
pub use stream::{HIGHEST_PRIORITY, Stream, StreamKind, StreamPoint, Streams, default_stream_kind};
pub use stream_op::{CopyEndpoint, HostCall, KernelLaunch, Memcpy, Memset, StreamOp, WaitCondition};
