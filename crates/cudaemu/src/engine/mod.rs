//! Streams, events and the order in which work runs.
//!
//! Nothing runs when it is submitted. Work waits in its stream's queue ([`stream`]) until the program synchronises with
//! something (or asks whether it is done), and then one stream after another is chosen by the seed among those whose first work
//! has all that it waits for ([`order`]): so every order that CUDA allows can occur, and a program that forgot a dependency
//! meets one that it did not expect. An [`event`] is a point of a stream; to wait for it is to wait for that point.
//! While the program makes no calls, a [`runner`] of ours does what is ready.
//!
//! A [`graph`] becomes work in streams of its own when it is launched; [`capture`] knows which streams record into one. What
//! [`time`] simulates is computed from what is submitted, in the order of submission.
//!
//! The state is guarded by the driver's lock; work itself runs outside of it ([`run`]), on the thread that synchronises.

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
