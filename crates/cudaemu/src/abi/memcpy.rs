//! Copies and memsets: `cuMemcpy*` and `cuMemset*`, translated to a [`CopyRequest`] or a fill.

use std::ffi::c_uint;

use super::ffi_guard::{In, api};
use crate::driver::copy::{CallMode, CopyPointer, Extent, Pitch};
use crate::driver::driver;
use crate::driver::graph::CopyRequest;
use crate::engine::Memset;
use crate::error::{Error, Result};
use crate::handle::{ContextId, StreamId};
use crate::mem::HostMemory;

/// `CUDA_MEMCPY2D`
#[repr(C)]
#[derive(Clone, Copy)]
struct Copy2D {
    from: Plane,
    to: Plane,
    width: usize,
    height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Plane {
    x: usize,
    y: usize,
    kind: c_uint,
    host: HostMemory,
    device: u64,
    array: u64,
    pitch: usize,
}

/// `CUDA_MEMCPY3D`, and `CUDA_MEMCPY3D_PEER`, where the reserved fields are contexts.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Copy3D {
    from: Volume,
    to: Volume,
    width: usize,
    height: usize,
    depth: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Volume {
    x: usize,
    y: usize,
    z: usize,
    level: usize,
    kind: c_uint,
    host: HostMemory,
    device: u64,
    array: u64,
    reserved: u64,
    pitch: usize,
    height: usize,
}

api! {
    fn cuMemcpy(to: HostMemory, from: HostMemory, bytes: usize) {
        linear(CopyPointer::Unified(to), CopyPointer::Unified(from), bytes, CallMode::Sync)
    }

    fn cuMemcpyAsync(to: HostMemory, from: HostMemory, bytes: usize, stream: StreamId) {
        linear(CopyPointer::Unified(to), CopyPointer::Unified(from), bytes, CallMode::Async(stream))
    }

    fn cuMemcpyHtoD_v2(to: u64, from: HostMemory, bytes: usize) {
        linear(CopyPointer::Device(to), CopyPointer::Host(from), bytes, CallMode::Sync)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: HostMemory, bytes: usize, stream: StreamId) {
        linear(CopyPointer::Device(to), CopyPointer::Host(from), bytes, CallMode::Async(stream))
    }

    fn cuMemcpyDtoH_v2(to: HostMemory, from: u64, bytes: usize) {
        linear(CopyPointer::Host(to), CopyPointer::Device(from), bytes, CallMode::Sync)
    }

    fn cuMemcpyDtoHAsync_v2(to: HostMemory, from: u64, bytes: usize, stream: StreamId) {
        linear(CopyPointer::Host(to), CopyPointer::Device(from), bytes, CallMode::Async(stream))
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        linear(CopyPointer::Device(to), CopyPointer::Device(from), bytes, CallMode::Sync)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: StreamId) {
        linear(CopyPointer::Device(to), CopyPointer::Device(from), bytes, CallMode::Async(stream))
    }

    fn cuMemcpyPeer(to: u64, to_context: ContextId, from: u64, from_context: ContextId, bytes: usize) {
        driver()?.copy_peer((to, to_context), (from, from_context), bytes as u64, CallMode::Sync)
    }

    fn cuMemcpyPeerAsync(
        to: u64,
        to_context: ContextId,
        from: u64,
        from_context: ContextId,
        bytes: usize,
        stream: StreamId,
    ) {
        driver()?.copy_peer((to, to_context), (from, from_context), bytes as u64, CallMode::Async(stream))
    }

    fn cuMemcpy2D_v2(copy: In<Copy2D>) {
        plane(copy, CallMode::Sync)
    }

    fn cuMemcpy2DUnaligned_v2(copy: In<Copy2D>) {
        plane(copy, CallMode::Sync)
    }

    fn cuMemcpy2DAsync_v2(copy: In<Copy2D>, stream: StreamId) {
        plane(copy, CallMode::Async(stream))
    }

    fn cuMemcpy3D_v2(copy: In<Copy3D>) {
        volume(copy, CallMode::Sync)
    }

    fn cuMemcpy3DAsync_v2(copy: In<Copy3D>, stream: StreamId) {
        volume(copy, CallMode::Async(stream))
    }

    fn cuMemcpy3DPeer(copy: In<Copy3D>) {
        volume(copy, CallMode::Sync)
    }

    fn cuMemcpy3DPeerAsync(copy: In<Copy3D>, stream: StreamId) {
        volume(copy, CallMode::Async(stream))
    }

    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) {
        fill(address, 0, value.into(), 1, [count, 1], CallMode::Sync)
    }

    fn cuMemsetD16_v2(address: u64, value: u16, count: usize) {
        fill(address, 0, value.into(), 2, [count, 1], CallMode::Sync)
    }

    fn cuMemsetD32_v2(address: u64, value: u32, count: usize) {
        fill(address, 0, value, 4, [count, 1], CallMode::Sync)
    }

    fn cuMemsetD8Async(address: u64, value: u8, count: usize, stream: StreamId) {
        fill(address, 0, value.into(), 1, [count, 1], CallMode::Async(stream))
    }

    fn cuMemsetD16Async(address: u64, value: u16, count: usize, stream: StreamId) {
        fill(address, 0, value.into(), 2, [count, 1], CallMode::Async(stream))
    }

    fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: StreamId) {
        fill(address, 0, value, 4, [count, 1], CallMode::Async(stream))
    }

    fn cuMemsetD2D8_v2(address: u64, pitch: usize, value: u8, width: usize, height: usize) {
        fill(address, pitch, value.into(), 1, [width, height], CallMode::Sync)
    }

    fn cuMemsetD2D16_v2(address: u64, pitch: usize, value: u16, width: usize, height: usize) {
        fill(address, pitch, value.into(), 2, [width, height], CallMode::Sync)
    }

    fn cuMemsetD2D32_v2(address: u64, pitch: usize, value: u32, width: usize, height: usize) {
        fill(address, pitch, value, 4, [width, height], CallMode::Sync)
    }

    fn cuMemsetD2D8Async(address: u64, pitch: usize, value: u8, width: usize, height: usize, stream: StreamId) {
        fill(address, pitch, value.into(), 1, [width, height], CallMode::Async(stream))
    }

    fn cuMemsetD2D16Async(address: u64, pitch: usize, value: u16, width: usize, height: usize, stream: StreamId) {
        fill(address, pitch, value.into(), 2, [width, height], CallMode::Async(stream))
    }

    fn cuMemsetD2D32Async(address: u64, pitch: usize, value: u32, width: usize, height: usize, stream: StreamId) {
        fill(address, pitch, value, 4, [width, height], CallMode::Async(stream))
    }
}

fn linear(to: CopyPointer, from: CopyPointer, bytes: usize, when: CallMode) -> Result<()> {
    driver()?.copy(to, Pitch::default(), from, Pitch::default(), Extent::row(bytes as u64), when)
}

fn fill(address: u64, pitch: usize, value: u32, bytes: u8, [width, height]: [usize; 2], when: CallMode) -> Result<()> {
    let (width, height) = (width as u64, height as u64);
    driver()?.memset(Memset { address, pitch: pitch as u64, value, bytes, width, height }, when)
}

impl Volume {
    /// Address and pitch of one side of the copy. A pitch of 0 means that rows follow each other without a gap.
    fn end(self, width: usize, height: usize) -> Result<(CopyPointer, Pitch)> {
        let row = if self.pitch == 0 { width } else { self.pitch };
        let rows = if self.height == 0 { height } else { self.height };
        let slice = row.checked_mul(rows);
        let offset = slice.and_then(|slice| {
            let [x, y, z] = [Some(self.x), self.y.checked_mul(row), self.z.checked_mul(slice)];
            x?.checked_add(y?)?.checked_add(z?)
        });
        let (Some(slice), Some(offset)) = (slice, offset) else { return Err(Error::InvalidValue) };
        let end = match self.kind {
            1 => CopyPointer::Host(self.host.offset(offset as u64).ok_or(Error::InvalidValue)?),
            2 => CopyPointer::Device(self.device.checked_add(offset as u64).ok_or(Error::InvalidValue)?),
            // CUDA arrays hold textures, which the emulator does not support.
            3 => return Err(Error::NotSupported),
            4 => CopyPointer::Unified(HostMemory::at(self.device).offset(offset as u64).ok_or(Error::InvalidValue)?),
            _ => return Err(Error::InvalidValue),
        };
        if self.level != 0 {
            return Err(Error::InvalidValue);
        }
        Ok((end, Pitch { row: row as u64, slice: slice as u64 }))
    }
}

fn plane(copy: In<Copy2D>, when: CallMode) -> Result<()> {
    let Copy2D { from, to, width, height } = copy.get()?;
    let volume = |plane: Plane| Volume {
        x: plane.x,
        y: plane.y,
        z: 0,
        level: 0,
        kind: plane.kind,
        host: plane.host,
        device: plane.device,
        array: plane.array,
        reserved: 0,
        pitch: plane.pitch,
        height: 0,
    };
    boxes(Copy3D { from: volume(from), to: volume(to), width, height, depth: 1 }, when)
}

fn volume(copy: In<Copy3D>, when: CallMode) -> Result<()> {
    boxes(copy.get()?, when)
}

fn boxes(copy: Copy3D, when: CallMode) -> Result<()> {
    let CopyRequest { to, to_pitch, from, from_pitch, extent } = copy.request()?;
    driver()?.copy(to, to_pitch, from, from_pitch, extent, when)
}

impl Copy3D {
    /// The driver's form of the same copy.
    pub(super) fn request(self) -> Result<CopyRequest> {
        let Self { from, to, width, height, depth } = self;
        let (to, to_pitch) = to.end(width, height)?;
        let (from, from_pitch) = from.end(width, height)?;
        let extent = Extent { width: width as u64, height: height as u64, depth: depth as u64 };
        Ok(CopyRequest { to, to_pitch, from, from_pitch, extent })
    }

    /// The C structure of a copy. All offsets are already added to the addresses.
    pub(super) fn of(request: &CopyRequest) -> Self {
        let CopyRequest { to, to_pitch, from, from_pitch, extent } = *request;
        let volume = |end: CopyPointer, pitch: Pitch| {
            let none = HostMemory::at(0);
            let (kind, host, device) = match end {
                CopyPointer::Host(memory) => (1, memory, 0),
                CopyPointer::Device(address) => (2, none, address),
                CopyPointer::Unified(memory) => (4, none, memory.address()),
            };
            let height = pitch.slice.checked_div(pitch.row).unwrap_or(0) as usize;
            let row = pitch.row as usize;
            Volume { x: 0, y: 0, z: 0, level: 0, kind, host, device, array: 0, reserved: 0, pitch: row, height }
        };
        Self {
            from: volume(from, from_pitch),
            to: volume(to, to_pitch),
            width: extent.width as usize,
            height: extent.height as usize,
            depth: extent.depth as usize,
        }
    }
}
