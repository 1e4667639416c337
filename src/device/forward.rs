//! Forwarding traits for wrappers: a device or queue that wraps another device or queue, changes a few methods and forwards all
//! others.
//!
//! A wrapper implements [`ForwardDevice`] or [`ForwardQueue`] instead of [`Device`] or [`Queue`]: its `inner` returns the
//! wrapped object, and it overrides the methods that it changes. All others are forwarded, capabilities included, and so are
//! methods that the contract gains later: the two lists in this file must have every method of the contract, which a lint checks.
//!
//! # Rules for wrappers
//! - A wrapper that returns buffers of the wrapped device must have the wrapped device's [`DeviceInfo::id`].
//! - Override a capability's accessor together with the methods that it changes. For example, a queue that counts programs must
//!   override both [`Queue::run`] and [`Queue::run_inline`], since the wrapped queue's `run_inline` does not call the wrapper.
//! - Return a capability only if the wrapped device or queue has it.

use super::{
    Buffer, Collectives, CopyOutcome, Device, DeviceActivity, DeviceError, DeviceInfo, Feature, HostThreads,
    ImportHost, LinkStats, LoadByDigest, MemoryBudget, MemoryInfo, PeerCopies, PendingRead, PinnedMemory, Prefault,
    Program, Queue, QueueAborter, Region, Support, Timeline, TimelinePoint, UploadSource,
};
use crate::graph::Graph;
use crate::ops::NodeView;
use crate::tensor::TensorDesc;
use std::fmt::Debug;
use std::sync::Arc;
use std::time::Duration;

/// Methods of a contract, of a trait with their names whose defaults forward to the wrapped object (`default`), or of the
/// implementation of the contract for all that implement that trait (`blanket`).
macro_rules! forward {
    ($how:ident $forward:ident $this:ident $receiver:tt $inner:tt
     $($name:ident($($arg:ident: $type:ty),*) -> $out:ty;)*) => {
        $(forward! { @$how $forward $this $receiver $inner $name [$($arg: $type),*] [$out] })*
    };
    (@default $forward:ident $this:ident ($($receiver:tt)*) ($($inner:tt)*)
     $name:ident [$($arg:ident: $type:ty),*] [$out:ty]) => {
        fn $name($($receiver)*, $($arg: $type),*) -> $out {
            $($inner)*.$name($($arg),*)
        }
    };
    (@blanket $forward:ident $this:ident ($($receiver:tt)*) $inner:tt
     $name:ident [$($arg:ident: $type:ty),*] [$out:ty]) => {
        fn $name($($receiver)*, $($arg: $type),*) -> $out {
            $forward::$name($this, $($arg),*)
        }
    };
}

macro_rules! device_methods {
    ($how:ident) => {
        forward! { $how ForwardDevice self (&self) (self.inner())
            info() -> &DeviceInfo;
            features() -> Vec<Feature>;
            memory() -> Result<MemoryInfo, DeviceError>;
            alloc(bytes: u64, budget: &Arc<MemoryBudget>) -> Result<Buffer, DeviceError>;
            alloc_size(tensor: &TensorDesc) -> u64;
            support(node: NodeView<'_>) -> Support;
            prepare(graph: Arc<Graph>) -> Result<Program, DeviceError>;
            queue(budget: &Arc<MemoryBudget>) -> Result<Box<dyn Queue>, DeviceError>;
            lost() -> Option<DeviceError>;
            endpoint() -> Option<&str>;
            lost_by() -> Option<Arc<MemoryBudget>>;
            activity() -> Option<DeviceActivity>;
            link_stats() -> Option<LinkStats>;
            peer_copies() -> Option<&dyn PeerCopies>;
            import_host() -> Option<&dyn ImportHost>;
            pinned_memory() -> Option<&dyn PinnedMemory>;
            host_threads() -> Option<&dyn HostThreads>;
        }
    };
}

macro_rules! queue_methods {
    ($how:ident) => {
        forward! { $how ForwardQueue self (&mut self) (self.inner()?)
            upload(dst: Region, tensor: Option<&TensorDesc>, src: UploadSource<'_>) -> Result<(), DeviceError>;
            download(src: Region) -> Result<PendingRead, DeviceError>;
            download_all(srcs: &[Region]) -> Result<Vec<PendingRead>, DeviceError>;
            fill(dst: Region, value: u8) -> Result<(), DeviceError>;
            copy_from(src: Region, dst: Region, after: Option<&TimelinePoint>) -> Result<CopyOutcome, DeviceError>;
            run(program: &Program, bindings: &Arc<[Region]>) -> Result<(), DeviceError>;
            run_inline(program: &Program, bindings: &Arc<[Region]>, budget: Duration) -> Result<(), DeviceError>;
            wait(point: &TimelinePoint) -> Result<(), DeviceError>;
        }
        forward! { $how ForwardQueue self (&mut self) (self.inner().ok()?)
            prefault() -> Option<&mut dyn Prefault>;
            load_by_digest() -> Option<&mut dyn LoadByDigest>;
            collectives() -> Option<&mut dyn Collectives>;
            aborter() -> Option<QueueAborter>;
        }
    };
}

/// A device that wraps a device. Has the methods of [`Device`], which forward to [`ForwardDevice::inner`] by default.
#[allow(missing_docs)] // documented in `Device`
#[allow(clippy::missing_errors_doc)]
pub trait ForwardDevice: Send + Sync + Debug {
    /// The wrapped device.
    fn inner(&self) -> &dyn Device;

    device_methods!(default);
}

/// A queue that wraps a queue. Has the methods of [`Queue`], which forward to [`ForwardQueue::inner`] by default.
#[allow(missing_docs)] // documented in `Queue`
#[allow(clippy::missing_errors_doc)]
pub trait ForwardQueue: Send {
    /// The wrapped queue. A wrapper that lends the queue to a thread blocks here until the thread returns it.
    ///
    /// # Errors
    /// When the wrapped queue is not available. Forwarded methods return this error, [`ForwardQueue::mark`] returns a point
    /// that fails with it, and capabilities are absent.
    fn inner(&mut self) -> Result<&mut dyn Queue, DeviceError>;

    queue_methods!(default);

    fn mark(&mut self) -> TimelinePoint {
        match self.inner() {
            Ok(inner) => inner.mark(),
            Err(error) => {
                let failed = Timeline::new();
                failed.fail(error);
                TimelinePoint::new(&failed, 1)
            }
        }
    }
}

// A method that is missing here would run the contract's default instead of the wrapped device's method. That is the bug which
// this file exists to prevent.
#[deny(clippy::missing_trait_methods)]
impl<T: ForwardDevice> Device for T {
    device_methods!(blanket);
}

#[deny(clippy::missing_trait_methods)]
impl<T: ForwardQueue> Queue for T {
    queue_methods!(blanket);

    fn mark(&mut self) -> TimelinePoint {
        ForwardQueue::mark(self)
    }
}
