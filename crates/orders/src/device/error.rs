//! The variants of the library's `DeviceError` that the files of the core use. The library's own file needs its ops.

/// As the library's.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    #[error("out of memory: {requested} requested, {available} of {limit} available")]
    OutOfMemory { requested: u64, available: u64, limit: u64 },
    #[error("{0}: the deadline has passed")]
    Deadline(&'static str),
    #[error("the queue has ended")]
    Ended,
    #[error("{device}: {reason}")]
    Remote { device: String, reason: String },
    #[error("{endpoint}: connection lost: {reason}")]
    ConnectionLost { endpoint: String, reason: String },
    #[error("rank {rank} ({device}) has failed: {error}")]
    RankFailed { rank: usize, device: String, error: Box<DeviceError> },
    #[error("rank {rank} ({device}) has left the group")]
    RankLeft { rank: usize, device: String },
    #[error("the ranks of a group disagree: {0}")]
    RanksDisagree(String),
    #[error("misuse: {0}")]
    Misuse(&'static str),
    #[error("bug in fanout: {0}")]
    Bug(String),
    #[error("{0}")]
    Thread(String),
}

impl DeviceError {
    pub(crate) fn thread_spawn_failed(what: &str, error: &std::io::Error) -> DeviceError {
        DeviceError::Thread(format!("cannot start a thread {what}: {error}"))
    }
}
