//! Allocation of many tensors on one device, in as few buffers as the device's largest buffer size allows.

use super::{Buffer, Device, DeviceError, DeviceId, MemoryBudget, Queue, Region};
use crate::tensor::TensorDesc;
use std::sync::Arc;

/// A memory layout for a list of tensors: buffer sizes, and each tensor's buffer and offset. Nothing is allocated yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorPlan {
    device: DeviceId,
    /// Bytes of each buffer.
    buffers: Vec<u64>,
    places: Vec<TensorPlace>,
}

/// Allocated memory for a list of tensors on one device: a model's weights, a KV cache. Dropping it drops its handles of the
/// buffers; their memory is freed when no region of them is held elsewhere.
///
/// ```
/// use fanout::cpu::{CpuDevice, MathMode};
/// use fanout::device::{Device, MemoryBudget, TensorMemory};
/// use fanout::tensor::{DType, TensorDesc};
///
/// let (cpu, budget) = (CpuDevice::new("CPU", 1, MathMode::Fast, 1 << 20)?, MemoryBudget::new(1 << 20));
/// let tensors = [TensorDesc::contiguous(DType::F32, [100, 3, 1, 1])?, TensorDesc::contiguous(DType::F16, [5, 1, 1, 1])?];
/// let plan = TensorMemory::plan(&*cpu, tensors)?;
/// assert_eq!((plan.bytes(), plan.buffers()), (1226, &[1226][..])); // the second tensor begins at a multiple of 64
/// let memory = plan.allocate(&*cpu, &budget)?;
/// assert_eq!(memory.region(1).map(|region| (region.offset(), region.bytes())), Some((1216, 10)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorMemory {
    buffers: Vec<Buffer>,
    /// By buffer: bytes from its start that tensors occupy.
    used: Vec<u64>,
    regions: Vec<Region>,
}

/// A tensor's buffer and offset.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct TensorPlace {
    buffer: usize,
    offset: u64,
    /// The tensor's extent, which is the size of its region. Padding that the device reserves after it is not included.
    bytes: u64,
}

/// First-fit placement: puts each tensor at the end of the first buffer with enough space.
struct FirstFit<'a> {
    device: &'a dyn Device,
    /// By buffer: the end of its last tensor, in bytes.
    used: Vec<u64>,
    places: Vec<TensorPlace>,
}

impl FirstFit<'_> {
    /// Bytes that the device reserves for a tensor.
    fn reserved_bytes(&self, tensor: &TensorDesc) -> u64 {
        // A device must not reserve less than the extent; `max` guards against a faulty `alloc_size`.
        self.device.alloc_size(tensor).max(tensor.extent() as u64)
    }

    /// The aligned offset at which the next tensor of a buffer may begin.
    fn next_offset(&self, used: u64) -> u64 {
        // On overflow: an offset at which no tensor fits.
        used.checked_next_multiple_of(self.device.info().alignment.max(1)).unwrap_or(u64::MAX)
    }

    /// Places a tensor in the first buffer with enough space; `size` returns a buffer's size by index. Returns false if none
    /// has enough.
    fn try_place(&mut self, tensor: &TensorDesc, size: impl Fn(usize) -> u64) -> bool {
        let bytes = self.reserved_bytes(tensor);
        for buffer in 0..self.used.len() {
            let offset = self.next_offset(self.used[buffer]);
            let end = offset.checked_add(bytes).filter(|&end| end <= size(buffer));
            if let Some(end) = end {
                self.used[buffer] = end;
                self.places.push(TensorPlace { buffer, offset, bytes: tensor.extent() as u64 });
                return true;
            }
        }
        false
    }
}

impl TensorPlan {
    /// Bytes of each buffer, none more than the device's [`max_buffer`](super::DeviceInfo::max_buffer).
    pub fn buffers(&self) -> &[u64] {
        &self.buffers
    }

    /// Bytes of all buffers together; saturates at `u64::MAX`.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// The number of tensors.
    pub fn len(&self) -> usize {
        self.places.len()
    }

    /// Whether the list of tensors is empty.
    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Allocates the buffers, zeroed, on the device for which the plan was made, reserved in `budget`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the budget or the device has fewer bytes available; no buffer stays allocated then.
    /// [`DeviceError::Misuse`] for another device.
    pub fn allocate(&self, device: &dyn Device, budget: &Arc<MemoryBudget>) -> Result<TensorMemory, DeviceError> {
        if device.info().id != self.device {
            return Err(DeviceError::Misuse("the tensors were planned for another device"));
        }
        let buffers = self.buffers.iter().map(|&bytes| device.alloc(bytes, budget)).collect::<Result<Vec<_>, _>>()?;
        let mut memory = TensorMemory { used: self.buffers.clone(), buffers, regions: Vec::new() };
        memory.regions = memory.regions_of(&self.places)?;
        Ok(memory)
    }
}

impl TensorMemory {
    /// Plans the layout of tensors on a device, in the given order, first fit: each tensor is aligned to the device's
    /// [`alignment`](super::DeviceInfo::alignment) and goes into the first buffer with space for its
    /// [`alloc_size`](Device::alloc_size).
    ///
    /// # Errors
    /// [`DeviceError::TensorTooLarge`] for a tensor that exceeds the device's largest buffer.
    pub fn plan(device: &dyn Device, tensors: impl IntoIterator<Item = TensorDesc>) -> Result<TensorPlan, DeviceError> {
        let info = device.info();
        let mut first_fit = FirstFit { device, used: Vec::new(), places: Vec::new() };
        for (index, tensor) in tensors.into_iter().enumerate() {
            if first_fit.try_place(&tensor, |_| info.max_buffer) {
                continue;
            }
            first_fit.used.push(0);
            if !first_fit.try_place(&tensor, |_| info.max_buffer) {
                let (device, bytes, limit) = (info.name.clone(), first_fit.reserved_bytes(&tensor), info.max_buffer);
                return Err(DeviceError::TensorTooLarge { tensor: index, device, bytes, limit });
            }
        }
        Ok(TensorPlan { device: info.id, buffers: first_fit.used, places: first_fit.places })
    }

    /// [`TensorMemory::plan`] followed by [`TensorPlan::allocate`].
    ///
    /// # Errors
    /// As [`TensorMemory::plan`] and [`TensorPlan::allocate`].
    pub fn new(
        device: &dyn Device,
        tensors: impl IntoIterator<Item = TensorDesc>,
        budget: &Arc<MemoryBudget>,
    ) -> Result<TensorMemory, DeviceError> {
        TensorMemory::plan(device, tensors)?.allocate(device, budget)
    }

    /// The region of the tensor with index `tensor` in the given order, from 0. Its size is the tensor's extent.
    pub fn region(&self, tensor: usize) -> Option<&Region> {
        self.regions.get(tensor)
    }

    /// The regions of all tensors, in the given order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// The buffers.
    pub fn buffers(&self) -> &[Buffer] {
        &self.buffers
    }

    /// Bytes of all buffers together.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().map(Buffer::bytes).sum()
    }

    /// Sets every byte of the buffers to `value`, padding between tensors included, in order with the queue's other work.
    ///
    /// # Errors
    /// As [`Queue::fill`].
    pub fn clear(&self, queue: &mut dyn Queue, value: u8) -> Result<(), DeviceError> {
        self.buffers.iter().try_for_each(|buffer| queue.fill(buffer.whole(), value))
    }

    /// Removes all tensors and keeps the buffers and their content, so that [`TensorMemory::place`] can place other tensors in
    /// them. Regions obtained before stay valid and refer to the same bytes.
    pub fn reset(&mut self) {
        self.regions.clear();
        self.used.fill(0);
    }

    /// Places further tensors in the free space of the buffers, whose content does not change. `device` must be the device that
    /// owns the memory.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with the size of the first tensor that does not fit and the largest free space of a buffer;
    /// no tensor is added then. [`DeviceError::Misuse`] for another device.
    pub fn place(
        &mut self,
        device: &dyn Device,
        tensors: impl IntoIterator<Item = TensorDesc>,
    ) -> Result<(), DeviceError> {
        if self.buffers.iter().any(|buffer| buffer.device() != device.info().id) {
            return Err(DeviceError::Misuse("tensors placed in memory of another device"));
        }
        let mut first_fit = FirstFit { device, used: self.used.clone(), places: Vec::new() };
        let size = |buffer: usize| self.buffers[buffer].bytes();
        for tensor in tensors {
            if !first_fit.try_place(&tensor, size) {
                let spaces = first_fit
                    .used
                    .iter()
                    .enumerate()
                    .map(|(i, &used)| size(i).saturating_sub(first_fit.next_offset(used)));
                let available = spaces.max().unwrap_or(0);
                return Err(DeviceError::OutOfMemory {
                    requested: first_fit.reserved_bytes(&tensor),
                    available,
                    limit: self.bytes(),
                });
            }
        }
        let mut added = self.regions_of(&first_fit.places)?;
        self.regions.append(&mut added);
        self.used = first_fit.used;
        Ok(())
    }

    fn regions_of(&self, places: &[TensorPlace]) -> Result<Vec<Region>, DeviceError> {
        places.iter().map(|place| self.buffers[place.buffer].region(place.offset, place.bytes)).collect()
    }
}
