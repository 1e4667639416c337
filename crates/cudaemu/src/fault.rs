//! What a kernel did wrong, and where.

use std::fmt;

/// What happened. Hardware faults poison the context; the others are found by the checker alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// No allocation there; the text names the nearest one and how far outside of it the access is.
    OutOfBounds(String),
    /// The allocation was freed.
    UseAfterFree(String),
    /// The address is no multiple of the access's size.
    Misaligned,
    /// The memory belongs to a device or context whose peer access was not enabled, or may not be written.
    NotAccessible(String),
    /// Bytes that nothing has ever written were read.
    Uninitialised,
    /// Two threads touched the same bytes with no barrier between, one of them writing; the text names the other.
    Race(String),
    /// A barrier that all lanes of a warp must reach together was reached by some of them.
    DivergentBarrier(String),
    /// All threads that are left wait for something that cannot come.
    Deadlock(String),
    /// A shuffle, vote or warp barrier whose mask names lanes that do not take part, or that reads one of them.
    InactiveLane(String),
    /// Bytes of an asynchronous copy were touched before the copy was waited for.
    PendingCopy(String),
    /// `trap`, `brkpt` or an assertion of the device code, which the text quotes.
    Trap(String),
    /// The call stack or a thread's local memory is used up.
    StackOverflow,
    /// An instruction got a value that it may not have (barrier number 99, misaligned matrix row, …).
    InvalidValue(String),
    /// The launch ran longer than the limit set by `CUDAEMU_MAX_INSTRUCTIONS`.
    InstructionLimit,
    /// The emulator is at fault; please report it.
    Internal(String),
}

impl FaultKind {
    /// Whether real hardware reports it too, so that the context is lost even where checks only warn.
    pub fn is_hardware_fault(&self) -> bool {
        !matches!(
            self,
            Self::Uninitialised
                | Self::Race(_)
                | Self::DivergentBarrier(_)
                | Self::InactiveLane(_)
                | Self::PendingCopy(_)
        )
    }
}

/// Memory that an access went to.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemorySpace {
    Global,
    Shared,
    Local,
    Param,
    Const,
}

/// One lane's fault, before the executor adds where it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// What happened.
    pub kind: FaultKind,
    /// The lane, 0 to 31.
    pub lane: u8,
    /// Memory and address (as the thread computed it), for accesses.
    pub access: Option<FaultAccess>,
}

/// An access that failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultAccess {
    /// Which memory.
    pub memory: MemorySpace,
    /// Address as computed; an offset for shared, local and param memory.
    pub address: u64,
    /// Bytes.
    pub bytes: u32,
    /// Written (or updated) rather than read.
    pub write: bool,
}

impl Fault {
    /// A fault of one lane that is no memory access.
    pub fn new(kind: FaultKind, lane: usize) -> Box<Self> {
        Box::new(Self { kind, lane: lane as u8, access: None })
    }

    /// A fault of one lane's access.
    pub fn access(kind: FaultKind, lane: usize, access: FaultAccess) -> Box<Self> {
        Box::new(Self { kind, lane: lane as u8, access: Some(access) })
    }
}

/// A fault with its place: what the user reads.
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
    /// That line's instruction.
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
