//! Many tensors on one device, in as few buffers as it allows.

use super::{Account, Buffer, Device, DeviceError, DeviceId, Queue, Region};
use crate::tensor::TensorDesc;
use std::sync::Arc;

/// Where tensors will lie, and how large the buffers are that this takes: nothing is allocated yet.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TensorPlan {
    device: DeviceId,
    /// Bytes of each buffer.
    buffers: Vec<u64>,
    spots: Vec<Spot>,
}

/// Memory for a set of tensors on one device: a model's weights, a cache. Dropping it lets the buffers go, as soon as
/// nothing else has a region of them.
///
/// ```
/// use fanout::cpu::{CpuDevice, Path};
/// use fanout::device::{Account, Device, TensorMemory};
/// use fanout::tensor::{DType, TensorDesc};
///
/// let (cpu, account) = (CpuDevice::new("CPU", 1, Path::Fast, 1 << 20)?, Account::new(1 << 20));
/// let tensors = [TensorDesc::contiguous(DType::F32, [100, 3, 1, 1])?, TensorDesc::contiguous(DType::F16, [5, 1, 1, 1])?];
/// let plan = TensorMemory::plan(&*cpu, tensors)?;
/// assert_eq!((plan.bytes(), plan.buffers()), (1226, &[1226][..])); // the second tensor begins at a multiple of 64
/// let memory = plan.allocate(&*cpu, &account)?;
/// assert_eq!(memory.region(1).map(|region| (region.offset(), region.bytes())), Some((1216, 10)));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TensorMemory {
    buffers: Vec<Buffer>,
    /// Bytes of each that tensors take, from its start.
    used: Vec<u64>,
    regions: Vec<Region>,
}

/// Where a tensor lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Spot {
    buffer: usize,
    offset: u64,
    /// Its extent: the region's size. What the device reserves behind it is not part of the region.
    bytes: u64,
}

/// Places tensors one after the other, each in the first buffer with room for it.
struct Packer<'a> {
    device: &'a dyn Device,
    /// By buffer: where its last tensor ends.
    used: Vec<u64>,
    spots: Vec<Spot>,
}

impl Packer<'_> {
    /// Bytes that the device reserves for a tensor.
    fn bytes(&self, tensor: &TensorDesc) -> u64 {
        // No device reserves less than the tensor has.
        self.device.alloc_size(tensor).max(tensor.extent() as u64)
    }

    /// Where the next tensor of a buffer may begin.
    fn next(&self, used: u64) -> u64 {
        // Nothing fits behind the end of the address space.
        used.checked_next_multiple_of(self.device.info().alignment.max(1)).unwrap_or(u64::MAX)
    }

    /// Places a tensor in the first buffer whose size, by its number, leaves room. Whether there is one.
    fn put(&mut self, tensor: &TensorDesc, size: impl Fn(usize) -> u64) -> bool {
        let bytes = self.bytes(tensor);
        for buffer in 0..self.used.len() {
            let offset = self.next(self.used[buffer]);
            let end = offset.checked_add(bytes).filter(|&end| end <= size(buffer));
            if let Some(end) = end {
                self.used[buffer] = end;
                self.spots.push(Spot { buffer, offset, bytes: tensor.extent() as u64 });
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

    /// Bytes of all buffers together; `u64::MAX` where that is not enough.
    pub fn bytes(&self) -> u64 {
        self.buffers.iter().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }

    /// How many tensors there are.
    pub fn len(&self) -> usize {
        self.spots.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.spots.is_empty()
    }

    /// Allocates the buffers, zeroed, on the device that this was planned for.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when account or device have less left; nothing stays allocated then.
    /// [`DeviceError::Misuse`] for another device.
    pub fn allocate(&self, device: &dyn Device, account: &Arc<Account>) -> Result<TensorMemory, DeviceError> {
        if device.info().id != self.device {
            return Err(DeviceError::Misuse("tensors that were planned for another device"));
        }
        let buffers = self.buffers.iter().map(|&bytes| device.alloc(bytes, account)).collect::<Result<Vec<_>, _>>()?;
        let mut memory = TensorMemory { used: self.buffers.clone(), buffers, regions: Vec::new() };
        memory.regions = memory.regions_of(&self.spots)?;
        Ok(memory)
    }
}

impl TensorMemory {
    /// Says where tensors would lie on a device: in the order given, each aligned as the device wants it and in the first
    /// buffer with room for all that the device [reserves](Device::alloc_size) for it.
    ///
    /// # Errors
    /// [`DeviceError::TooLarge`] for a tensor that fits no buffer of the device.
    pub fn plan(device: &dyn Device, tensors: impl IntoIterator<Item = TensorDesc>) -> Result<TensorPlan, DeviceError> {
        let info = device.info();
        let mut packer = Packer { device, used: Vec::new(), spots: Vec::new() };
        for (number, tensor) in tensors.into_iter().enumerate() {
            if packer.put(&tensor, |_| info.max_buffer) {
                continue;
            }
            packer.used.push(0);
            if !packer.put(&tensor, |_| info.max_buffer) {
                let (device, bytes, limit) = (info.name.clone(), packer.bytes(&tensor), info.max_buffer);
                return Err(DeviceError::TooLarge { tensor: number, device, bytes, limit });
            }
        }
        Ok(TensorPlan { device: info.id, buffers: packer.used, spots: packer.spots })
    }

    /// As [`TensorMemory::plan`] and [`TensorPlan::allocate`].
    ///
    /// # Errors
    /// As both.
    pub fn new(
        device: &dyn Device,
        tensors: impl IntoIterator<Item = TensorDesc>,
        account: &Arc<Account>,
    ) -> Result<TensorMemory, DeviceError> {
        TensorMemory::plan(device, tensors)?.allocate(device, account)
    }

    /// Tensor number `tensor`, from 0 in the order given: a region of exactly its extent.
    pub fn region(&self, tensor: usize) -> Option<&Region> {
        self.regions.get(tensor)
    }

    /// All tensors' regions, in the order given.
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

    /// Sets every byte, what lies between tensors too, in order with the queue's other work.
    ///
    /// # Errors
    /// As [`Queue::fill`].
    pub fn clear(&self, queue: &mut dyn Queue, value: u8) -> Result<(), DeviceError> {
        self.buffers.iter().try_for_each(|buffer| queue.fill(buffer.whole(), value))
    }

    /// Forgets the tensors and keeps the buffers, with the bytes in them, for others: see [`TensorMemory::place`]. Regions
    /// that someone still has stay regions of the same bytes.
    pub fn reset(&mut self) {
        self.regions.clear();
        self.used.fill(0);
    }

    /// Adds tensors in the room that the buffers have left, with whatever bytes are there. `device` is the one that the
    /// memory is on.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] with the first tensor's bytes for which there is no room and the largest room left;
    /// nothing is added then. [`DeviceError::Misuse`] for another device.
    pub fn place(
        &mut self,
        device: &dyn Device,
        tensors: impl IntoIterator<Item = TensorDesc>,
    ) -> Result<(), DeviceError> {
        if self.buffers.iter().any(|buffer| buffer.device() != device.info().id) {
            return Err(DeviceError::Misuse("tensors for memory of another device"));
        }
        let mut packer = Packer { device, used: self.used.clone(), spots: Vec::new() };
        let size = |buffer: usize| self.buffers[buffer].bytes();
        for tensor in tensors {
            if !packer.put(&tensor, size) {
                let rooms = packer.used.iter().enumerate().map(|(i, &used)| size(i).saturating_sub(packer.next(used)));
                let left = rooms.max().unwrap_or(0);
                return Err(DeviceError::OutOfMemory { asked: packer.bytes(&tensor), left, limit: self.bytes() });
            }
        }
        let mut added = self.regions_of(&packer.spots)?;
        self.regions.append(&mut added);
        self.used = packer.used;
        Ok(())
    }

    fn regions_of(&self, spots: &[Spot]) -> Result<Vec<Region>, DeviceError> {
        spots.iter().map(|spot| self.buffers[spot.buffer].region(spot.offset, spot.bytes)).collect()
    }
}
