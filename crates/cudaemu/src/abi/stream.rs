//! Streams and events, stream-ordered host functions, and stream-ordered writes of and waits for values in memory.

use std::ffi::c_uint;

use super::ffi_guard::{Opaque, Out, api, with_state};
use crate::driver::driver;
use crate::engine::{HostCall, StreamOp, WaitCondition};
use crate::error::Error;
use crate::handle::{EventId, StreamId};

/// `CUhostFn`
type HostFunction = Option<extern "C" fn(Opaque)>;

/// `CU_STREAM_WAIT_VALUE_FLUSH`: accepted without effect.
const WAIT_VALUE_FLUSH: u32 = 1 << 30;

api! {
    fn cuStreamCreate(stream: Out<StreamId>, flags: c_uint) {
        stream.write_with(|| with_state(|_, state| state.create_stream(flags)))
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

    fn cuLaunchHostFunc(stream: StreamId, function: HostFunction, data: Opaque) {
        let function = function.ok_or(Error::InvalidValue)?;
        let driver = driver()?;
        let mut state = driver.lock();
        let stream = state.resolve_stream(stream)?;
        driver.submit(state, stream, StreamOp::Call(HostCall(Box::new(move || function(data)))))
    }

    fn cuStreamWriteValue32_v2(stream: StreamId, address: u64, value: u32, flags: c_uint) {
        // 1: no memory barrier before the write. Without effect, because a stream's operations run in order.
        if flags > 1 {
            return Err(Error::InvalidValue);
        }
        driver()?.value_work(stream, address, StreamOp::WriteValue(address, value))
    }

    fn cuStreamWaitValue32_v2(stream: StreamId, address: u64, value: u32, flags: c_uint) {
        let condition = match flags & !WAIT_VALUE_FLUSH {
            0 => WaitCondition::Geq,
            1 => WaitCondition::Eq,
            2 => WaitCondition::And,
            3 => WaitCondition::Nor,
            _ => return Err(Error::InvalidValue),
        };
        driver()?.value_work(stream, address, StreamOp::WaitValue(address, value, condition))
    }

    fn cuEventCreate(event: Out<EventId>, flags: c_uint) {
        event.write_with(|| with_state(|_, state| state.create_event(flags)))
    }

    fn cuEventDestroy_v2(event: EventId) {
        with_state(|_, state| state.destroy_event(event))
    }

    fn cuEventRecord(event: EventId, stream: StreamId) {
        driver()?.record_event(event, stream)
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
}
