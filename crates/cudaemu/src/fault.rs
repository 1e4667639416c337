//! Faults: mistakes of a kernel that the checker or the executor detects, and their reports.

use std::fmt;

/// Kind of fault. A hardware fault makes the context unusable; only the checker detects the other kinds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// No allocation contains the access; the text names the nearest one and the distance.
    OutOfBounds(String),
    /// The allocation was freed.
    UseAfterFree(String),
    /// The address is not a multiple of the access size.
    Misaligned,
    /// The memory belongs to a device or context without enabled peer access, or is not writable.
    NotAccessible(String),
    /// Bytes were read that nothing has written.
    Uninitialised,
    /// Race: two threads access the same bytes without a barrier in between, and at least one writes. The text names the other
    /// thread.
    Race(String),
    /// Only a part of a warp's lanes reached a barrier that all of them must reach together.
    DivergentBarrier(String),
    /// All remaining threads wait for something that cannot happen.
    Deadlock(String),
    /// The mask of a shuffle, vote or warp barrier contains lanes that do not execute it, or a lane reads such a lane.
    InactiveLane(String),
    /// Bytes of an asynchronous copy were accessed before the copy was waited for.
    PendingCopy(String),
    /// `trap`, `brkpt` or a failed assertion, whose message is in the text.
    Trap(String),
    /// The call stack or the thread's local memory is exhausted.
    StackOverflow,
    /// An operand has an invalid value (barrier number 99, misaligned matrix row, …).
    InvalidValue(String),
    /// The launch exceeded `CUDAEMU_MAX_INSTRUCTIONS`.
    InstructionLimit,
    /// A bug of the emulator; please report it.
    Internal(String),
}

/// Memory of an access.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySpace {
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// One lane's fault, before the executor adds the location.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The kind of fault.
    pub kind: FaultKind,
    /// The lane, 0 to 31.
    pub lane: u8,
    /// The access, if it caused the fault.
    pub access: Option<FaultAccess>,
}

/// A faulty access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultAccess {
    /// The memory.
    pub memory: MemorySpace,
    /// Address as the thread computed it; an offset for shared, local and parameter memory.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u32,
    /// Whether it is a write or an update.
    pub write: bool,
}

impl Fault {
    /// A fault of one lane that is not a memory access.
    pub fn new(kind: FaultKind, lane: usize) -> Box<Self> {
        Box::new(Self { kind, lane: lane as u8, access: None })
    }

    /// A fault of one lane's access.
    pub fn access(kind: FaultKind, lane: usize, access: FaultAccess) -> Box<Self> {
        Box::new(Self { kind, lane: lane as u8, access: Some(access) })
    }
}

/// A fault with its location, as reported to the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultReport {
    /// The fault.
    pub fault: Fault,
    /// Name of the kernel.
    pub kernel: String,
    /// `blockIdx`.
    pub block: [u32; 3],
    /// `threadIdx`.
    pub thread: [u32; 3],
    /// Line of the PTX text.
    pub line: u32,
    /// The instruction in that line.
    pub text: String,
}

impl fmt::Display for FaultKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OutOfBounds(text) => write!(f, "access outside an allocation: {text}"),
            Self::UseAfterFree(text) => write!(f, "use after free: {text}"),
            Self::Misaligned => write!(f, "misaligned access"),
            Self::NotAccessible(text) => write!(f, "memory not accessible: {text}"),
            Self::Uninitialised => write!(f, "read of uninitialised memory"),
            Self::Race(text) => write!(f, "data race: {text}"),
            Self::DivergentBarrier(text) => write!(f, "divergent barrier: {text}"),
            Self::Deadlock(text) => write!(f, "deadlock: {text}"),
            Self::InactiveLane(text) => write!(f, "inactive lane: {text}"),
            Self::PendingCopy(text) => write!(f, "asynchronous copy not waited for: {text}"),
            Self::Trap(text) => write!(f, "{text}"),
            Self::StackOverflow => write!(f, "stack overflow"),
            Self::InvalidValue(text) => write!(f, "invalid value: {text}"),
            Self::InstructionLimit => write!(f, "the launch does not end (CUDAEMU_MAX_INSTRUCTIONS)"),
            Self::Internal(text) => write!(f, "the emulator is at fault: {text}"),
        }
    }
}

impl fmt::Display for FaultReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.fault.kind)?;
        if let Some(access) = self.fault.access {
            let verb = if access.write { "write" } else { "read" };
            write!(f, "; {verb} of {} bytes at {:?} {:#x}", access.bytes, access.memory, access.address)?;
        }
        let ([bx, by, bz], [tx, ty, tz]) = (self.block, self.thread);
        write!(
            f,
            "\n  in kernel {}, block ({bx},{by},{bz}), thread ({tx},{ty},{tz})\n  at PTX line {}: {}",
            self.kernel, self.line, self.text
        )
    }
}
