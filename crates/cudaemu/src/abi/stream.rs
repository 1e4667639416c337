//! Streams and events, stream-ordered host functions, and stream-ordered writes of and waits for values in memory.

use std::ffi::{c_int, c_uint};
use std::sync::Arc;

use super::ffi_guard::{In, Opaque, Out, api, with_state};
use crate::driver::driver;
use crate::engine::{HostCall, StreamOp, WaitCondition};
use crate::error::{Error, Result};
use crate::handle::{ContextId, EventId, StreamId};

/// `CUhostFn`
type HostFunction = Option<extern "C" fn(Opaque)>;
/// `CUstreamCallback`
type Callback = Option<extern "C" fn(StreamId, c_uint, Opaque)>;

/// `CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW`, `…_SYNCHRONIZATION_POLICY`, `…_MEM_SYNC_DOMAIN_MAP` and `…_MEM_SYNC_DOMAIN`.
const HINTS: [c_uint; 4] = [1, 3, 9, 10];
/// `CU_LAUNCH_ATTRIBUTE_PRIORITY`
const PRIORITY: c_uint = 8;
/// `CU_STREAM_WAIT_VALUE_FLUSH`: accepted without effect.
const WAIT_VALUE_FLUSH: u32 = 1 << 30;

api! {
    fn cuStreamCreate(stream: Out<StreamId>, flags: c_uint) {
        stream.write_with(|| with_state(|_, state| state.create_stream(flags, 0)))
    }

    fn cuStreamCreateWithPriority(stream: Out<StreamId>, flags: c_uint, priority: c_int) {
        stream.write_with(|| with_state(|_, state| state.create_stream(flags, priority)))
    }

    fn cuStreamDestroy_v2(stream: StreamId) {
        driver()?.end_stream(stream)
    }

    fn cuStreamSynchronize(stream: StreamId) {
        driver()?.synchronize_stream(stream)
    }

    fn cuStreamQuery(stream: StreamId) {
        driver()?.query_stream(stream)
    }

    fn cuStreamWaitEvent(stream: StreamId, event: EventId, flags: c_uint) {
        driver()?.wait_event(stream, event, flags)
    }

    fn cuStreamGetPriority(stream: StreamId, priority: Out<c_int>) {
        priority.write_with(|| with_state(|_, state| {
            let stream = state.resolve_stream(stream)?;
            Ok(state.streams.get(stream)?.priority)
        }))
    }

    fn cuStreamGetFlags(stream: StreamId, flags: Out<c_uint>) {
        flags.write_with(|| with_state(|_, state| {
            let stream = state.resolve_stream(stream)?;
            Ok(state.streams.get(stream)?.flags())
        }))
    }

    fn cuStreamGetId(stream: StreamId, id: Out<u64>) {
        id.write_with(|| with_state(|_, state| {
            let stream = state.resolve_stream(stream)?;
            Ok(state.streams.get(stream)?.id)
        }))
    }

    fn cuStreamGetCtx(stream: StreamId, context: Out<ContextId>) {
        context.write_with(|| with_state(|_, state| state.stream_context(stream)))
    }

    fn cuStreamGetCtx_v2(stream: StreamId, context: Out<ContextId>, green: Out<u64>) {
        context.write_with(|| with_state(|_, state| state.stream_context(stream)))?;
        green.set(0);
        Ok(())
    }

    fn cuStreamGetDevice(stream: StreamId, device: Out<c_int>) {
        device.write_with(|| with_state(|_, state| {
            let context = state.stream_context(stream)?;
            Ok(state.contexts.get(context)?.device as c_int)
        }))
    }

    fn cuStreamCopyAttributes(to: StreamId, from: StreamId) {
        with_state(|_, state| state.resolve_stream(to).and(state.resolve_stream(from)).map(drop))
    }

    fn cuStreamGetAttribute(stream: StreamId, attribute: c_uint, value: Out<[u8; 64]>) {
        value.write_with(|| with_state(|_, state| {
            let stream = state.resolve_stream(stream)?;
            let mut bytes = [0; 64];
            match attribute {
                // Not stored: read as zero.
                _ if HINTS.contains(&attribute) => {}
                PRIORITY => bytes[..4].copy_from_slice(&state.streams.get(stream)?.priority.to_le_bytes()),
                _ => return Err(Error::InvalidValue),
            }
            Ok(bytes)
        }))
    }

    fn cuStreamSetAttribute(stream: StreamId, attribute: c_uint, value: In<[u8; 64]>) {
        // Hints for caches and schedulers: accepted without effect.
        value.get()?;
        with_state(|_, state| state.resolve_stream(stream))?;
        if HINTS.contains(&attribute) || attribute == PRIORITY { Ok(()) } else { Err(Error::InvalidValue) }
    }

    fn cuLaunchHostFunc(stream: StreamId, function: HostFunction, data: Opaque) {
        host_function(stream, function, data)
    }

    fn cuLaunchHostFunc_v2(stream: StreamId, function: HostFunction, data: Opaque, _mode: c_uint) {
        host_function(stream, function, data)
    }

    fn cuStreamAddCallback(stream: StreamId, callback: Callback, data: Opaque, flags: c_uint) {
        let callback = callback.ok_or(Error::InvalidValue)?;
        if flags != 0 {
            return Err(Error::InvalidValue);
        }
        let driver = driver()?;
        let mut state = driver.lock();
        let target = state.resolve_stream(stream)?;
        let run = move |lost: Option<Error>| callback(stream, lost.map_or(0, Error::code), data);
        driver.submit(state, target, StreamOp::Call(HostCall { run: Arc::new(run), run_after_error: true, raw: [0; 2] }))
    }

    fn cuStreamWriteValue32_v2(stream: StreamId, address: u64, value: u32, flags: c_uint) {
        write(stream, address, value.into(), 4, flags)
    }

    fn cuStreamWriteValue64_v2(stream: StreamId, address: u64, value: u64, flags: c_uint) {
        write(stream, address, value, 8, flags)
    }

    fn cuStreamWaitValue32_v2(stream: StreamId, address: u64, value: u32, flags: c_uint) {
        wait(stream, address, value.into(), 4, flags)
    }

    fn cuStreamWaitValue64_v2(stream: StreamId, address: u64, value: u64, flags: c_uint) {
        wait(stream, address, value, 8, flags)
    }

    fn cuStreamWriteValue32(stream: StreamId, address: u64, value: u32, flags: c_uint) {
        write(stream, address, value.into(), 4, flags)
    }

    fn cuStreamWriteValue64(stream: StreamId, address: u64, value: u64, flags: c_uint) {
        write(stream, address, value, 8, flags)
    }

    fn cuStreamWaitValue32(stream: StreamId, address: u64, value: u32, flags: c_uint) {
        wait(stream, address, value.into(), 4, flags)
    }

    fn cuStreamWaitValue64(stream: StreamId, address: u64, value: u64, flags: c_uint) {
        wait(stream, address, value, 8, flags)
    }

    fn cuStreamBatchMemOp_v2(stream: StreamId, count: c_uint, operations: In<[u64; 6]>, flags: c_uint) {
        batch(stream, count, operations, flags)
    }

    fn cuStreamBatchMemOp(stream: StreamId, count: c_uint, operations: In<[u64; 6]>, flags: c_uint) {
        batch(stream, count, operations, flags)
    }

    fn cuEventCreate(event: Out<EventId>, flags: c_uint) {
        event.write_with(|| with_state(|_, state| state.create_event(flags)))
    }

    fn cuEventDestroy_v2(event: EventId) {
        with_state(|_, state| state.destroy_event(event))
    }

    fn cuEventRecord(event: EventId, stream: StreamId) {
        driver()?.record_event(event, stream, 0)
    }

    fn cuEventRecordWithFlags(event: EventId, stream: StreamId, flags: c_uint) {
        driver()?.record_event(event, stream, flags)
    }

    fn cuEventQuery(event: EventId) {
        driver()?.query_event(event)
    }

    fn cuEventSynchronize(event: EventId) {
        driver()?.synchronize_event(event)
    }

    fn cuEventElapsedTime(milliseconds: Out<f32>, from: EventId, to: EventId) {
        milliseconds.write_with(|| driver()?.elapsed(from, to))
    }

    fn cuEventElapsedTime_v2(milliseconds: Out<f32>, from: EventId, to: EventId) {
        milliseconds.write_with(|| driver()?.elapsed(from, to))
    }
}

fn host_function(stream: StreamId, function: HostFunction, data: Opaque) -> Result<()> {
    let function = function.ok_or(Error::InvalidValue)?;
    let raw = [function as usize as u64, data.address()];
    let driver = driver()?;
    let mut state = driver.lock();
    let stream = state.resolve_stream(stream)?;
    let call = HostCall { run: Arc::new(move |_| function(data)), run_after_error: false, raw };
    driver.submit(state, stream, StreamOp::Call(call))
}

fn write_op(address: u64, value: u64, bytes: u32, flags: u32) -> Result<StreamOp> {
    // 1: no memory barrier before the write. Without effect, because a stream's operations run in order.
    if flags > 1 { Err(Error::InvalidValue) } else { Ok(StreamOp::WriteValue(address, value, bytes)) }
}

fn wait_op(address: u64, value: u64, bytes: u32, flags: u32) -> Result<StreamOp> {
    let condition = match flags & !WAIT_VALUE_FLUSH {
        0 => WaitCondition::Geq,
        1 => WaitCondition::Eq,
        2 => WaitCondition::And,
        3 => WaitCondition::Nor,
        _ => return Err(Error::InvalidValue),
    };
    Ok(StreamOp::WaitValue(address, value, bytes, condition))
}

fn write(stream: StreamId, address: u64, value: u64, bytes: u32, flags: u32) -> Result<()> {
    driver()?.value_work(stream, address, bytes, write_op(address, value, bytes, flags)?)
}

fn wait(stream: StreamId, address: u64, value: u64, bytes: u32, flags: u32) -> Result<()> {
    driver()?.value_work(stream, address, bytes, wait_op(address, value, bytes, flags)?)
}

/// `CUstreamBatchMemOpParams`: each operation is 48 bytes, {operation, address, value, flags, alias, unused}.
fn batch(stream: StreamId, count: u32, operations: In<[u64; 6]>, flags: u32) -> Result<()> {
    if count > 256 || flags != 0 {
        return Err(Error::InvalidValue);
    }
    let mut ops = Vec::new();
    for [operation, address, value, flags, ..] in operations.read_array(count as usize)? {
        let (operation, flags) = (operation as u32, flags as u32);
        let bytes = if operation >= 4 { 8 } else { 4 };
        let value = if bytes == 4 { value & u64::from(u32::MAX) } else { value };
        ops.push((
            address,
            bytes,
            match operation {
                // CU_STREAM_MEM_OP_WAIT_VALUE_32 and _64, then CU_STREAM_MEM_OP_WRITE_VALUE_32 and _64.
                1 | 4 => wait_op(address, value, bytes, flags)?,
                2 | 5 => write_op(address, value, bytes, flags)?,
                // Flush of remote writes, barrier: nothing to do, because a stream's operations run in order.
                3 | 6 => StreamOp::Wait,
                _ => return Err(Error::InvalidValue),
            },
        ));
    }
    driver()?.value_batch(stream, ops)
}
