//! Streams, events, graphs, and the order in which operations execute. Open `stream.rs` first.
//!
//! Submission executes nothing. An operation waits in its stream's queue (`stream`) until the program synchronises or queries,
//! or until an [`IdleRunner`] finds that the program makes no calls. Then a seeded random generator (`schedule_rng`) repeatedly
//! chooses a stream among those whose first operation has all its dependencies met. So every order that CUDA allows can occur,
//! and if a program lacks a dependency, some seeds give an order that it did not expect. An [`Event`] marks a point of a
//! stream; waiting for an event means waiting for that point.
//!
//! Launching a graph (`graph`) submits its nodes to hidden streams. Simulated time (`simulated_time`) is computed from what is
//! submitted, in the order of submission.
//!
//! The driver's lock guards the state. Operations execute outside of the lock (`execute`): on the thread that synchronises
//! or on the idle runner's thread, and host functions on a thread of their own.

mod connections;
mod event;
mod execute;
mod graph;
mod idle_runner;
mod schedule_rng;
mod simulated_time;
mod stream;
mod stream_op;

pub use connections::ConnectionDeadlock;
pub use event::Event;
pub use execute::{OpExecutor, OpOutcome};
pub use graph::{Edge, EdgeData, ExecPlan, Graph, PlanStep};
pub use idle_runner::{IdleRunner, StepProgress};
pub use schedule_rng::ScheduleRng;
pub use simulated_time::{EntryId, OpCost, Picos, Timeline};
pub use stream::{Stream, StreamKind, StreamPoint, Streams, default_stream_kind};
pub use stream_op::{CopyEndpoint, HostCall, KernelLaunch, Memcpy, Memset, StreamOp, WaitCondition};
