//! Copies and memsets: `cuMemcpy*` and `cuMemset*`.

use super::ffi_guard::api;
use crate::driver::copy::{CallMode, CopyPointer};
use crate::driver::driver;
use crate::engine::Memset;
use crate::error::Result;
use crate::handle::{ContextId, StreamId};
use crate::mem::HostMemory;

api! {
    fn cuMemcpyHtoD_v2(to: u64, from: HostMemory, bytes: usize) {
        copy(CopyPointer::Device(to), CopyPointer::Host(from), bytes, CallMode::Sync)
    }

    fn cuMemcpyHtoDAsync_v2(to: u64, from: HostMemory, bytes: usize, stream: StreamId) {
        copy(CopyPointer::Device(to), CopyPointer::Host(from), bytes, CallMode::Async(stream))
    }

    fn cuMemcpyDtoH_v2(to: HostMemory, from: u64, bytes: usize) {
        copy(CopyPointer::Host(to), CopyPointer::Device(from), bytes, CallMode::Sync)
    }

    fn cuMemcpyDtoHAsync_v2(to: HostMemory, from: u64, bytes: usize, stream: StreamId) {
        copy(CopyPointer::Host(to), CopyPointer::Device(from), bytes, CallMode::Async(stream))
    }

    fn cuMemcpyDtoD_v2(to: u64, from: u64, bytes: usize) {
        copy(CopyPointer::Device(to), CopyPointer::Device(from), bytes, CallMode::Sync)
    }

    fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, bytes: usize, stream: StreamId) {
        copy(CopyPointer::Device(to), CopyPointer::Device(from), bytes, CallMode::Async(stream))
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

    fn cuMemsetD8_v2(address: u64, value: u8, count: usize) {
        fill(address, value.into(), 1, count, CallMode::Sync)
    }

    fn cuMemsetD32_v2(address: u64, value: u32, count: usize) {
        fill(address, value, 4, count, CallMode::Sync)
    }

    fn cuMemsetD8Async(address: u64, value: u8, count: usize, stream: StreamId) {
        fill(address, value.into(), 1, count, CallMode::Async(stream))
    }

    fn cuMemsetD32Async(address: u64, value: u32, count: usize, stream: StreamId) {
        fill(address, value, 4, count, CallMode::Async(stream))
    }
}

fn copy(to: CopyPointer, from: CopyPointer, bytes: usize, when: CallMode) -> Result<()> {
    driver()?.copy(to, from, bytes as u64, when)
}

fn fill(address: u64, value: u32, bytes: u8, count: usize, when: CallMode) -> Result<()> {
    driver()?.memset(Memset { address, value, bytes, count: count as u64 }, when)
}
