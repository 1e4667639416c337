//! What a real GPU and its driver do that an ideal GPU does not: faults, hangs, shared connections, corrupted copies. All of it
//! is off by default.

use crate::error::Error;

/// The settings of these behaviours. Devices are numbered as before `CUDA_VISIBLE_DEVICES` selects among them.
#[derive(Clone, Debug)]
pub struct HardwareModel {
    /// A fault of a kernel makes its device unusable until the driver is reset, not only its context.
    pub poison: bool,
    /// Launches that fail and make their device unusable.
    pub faults: Vec<InjectedFault>,
    /// Launches that never end.
    pub hangs: Vec<LaunchNumber>,
    /// Hardware connections of a context; `None`: each stream has its own.
    pub connections: Option<u32>,
    /// Milliseconds of real time without progress after which a deadlock of a connection is reported.
    pub deadlock_ms: u64,
    /// Whether devices have memory pools.
    pub pools: bool,
    /// What the driver does with programmatic edges of graphs.
    pub programmatic_edges: ProgrammaticEdges,
    /// Pairs of devices between which copies with peer access write wrong bytes, in both directions.
    pub corrupt: Vec<(usize, usize)>,
    /// Calls that fail.
    pub failing_calls: Vec<FailingCall>,
    /// Bytes of device memory that a kernel takes when it is loaded, after its module; `None`: modules load their kernels.
    pub function_bytes: Option<u64>,
}

/// What the driver does with programmatic edges of graphs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProgrammaticEdges {
    /// They are refused as not supported.
    Refused,
    /// They may be added, but kernels behind them cannot be changed in an executable graph.
    Fixed,
    /// They are as other edges.
    Allowed,
}

impl Default for HardwareModel {
    fn default() -> Self {
        Self {
            poison: false,
            faults: Vec::new(),
            hangs: Vec::new(),
            connections: None,
            deadlock_ms: 1000,
            pools: true,
            programmatic_edges: ProgrammaticEdges::Allowed,
            corrupt: Vec::new(),
            failing_calls: Vec::new(),
            function_bytes: None,
        }
    }
}

impl HardwareModel {
    /// Whether copies between these devices write wrong bytes.
    pub fn corrupts(&self, a: usize, b: usize) -> bool {
        self.corrupt.iter().any(|&pair| pair == (a, b) || pair == (b, a))
    }
}

/// A call that does nothing and returns a code.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FailingCall {
    /// Name of the function; `None`: calls of all functions count.
    pub function: Option<String>,
    /// Number of the call among those of the function, from 1.
    pub number: u64,
    /// What it returns; may be a code that no driver has.
    pub code: u32,
}

/// A launch of a device, in the order of submission. The launch of a graph counts each of its kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LaunchNumber {
    /// The device.
    pub device: usize,
    /// Number of the launch, from 1.
    pub number: u64,
}

/// A fault that a launch causes instead of running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InjectedFault {
    /// The launch.
    pub at: LaunchNumber,
    /// The error that every later call for the device returns.
    pub error: Error,
}
