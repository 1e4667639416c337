//! Leaks: memory and handles that a program has not released are reported when their context ends.

use cudarc::driver::{CudaContext, result};

use crate::gpu::ptx;

#[test]
fn unreleased_memory_streams_events_and_modules_are_reported() {
    let emulator = cudaemu::test::start("").unwrap();
    let text = std::ffi::CString::new(ptx("elementwise.sm_80")).unwrap();
    type Leak = fn(&std::ffi::CStr);
    let rows: [(&str, Leak); 6] = [
        ("", |_| {}),
        ("100 bytes of memory (1 from cuMemAlloc)", |_| {
            // SAFETY: no code accesses the memory.
            unsafe { result::malloc_sync(100) }.unwrap();
        }),
        ("1 stream", |_| {
            result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
        }),
        ("1 event", |_| {
            result::event::create(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
        }),
        ("1 module", |text| {
            // SAFETY: the text ends with a zero.
            unsafe { result::module::load_data(text.as_ptr().cast()) }.unwrap();
        }),
        ("2 streams, 1 event, 1 module, 48 bytes of memory (2 from cuMemAlloc)", |text| {
            for _ in 0..2 {
                result::stream::create(result::stream::StreamKind::NonBlocking).unwrap();
                // SAFETY: no code accesses the memory.
                unsafe { result::malloc_sync(24) }.unwrap();
            }
            result::event::create(cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT).unwrap();
            // SAFETY: the text ends with a zero.
            unsafe { result::module::load_data(text.as_ptr().cast()) }.unwrap();
        }),
    ];
    for (left, leak) in rows {
        let before = emulator.reports().len();
        let context = CudaContext::new(0).unwrap();
        leak(&text);
        drop(context);
        let want = format!("leak: the primary context of device 0 ended with unreleased resources: {left}");
        let want = if left.is_empty() { Vec::new() } else { vec![want] };
        assert_eq!(emulator.reports()[before..], want, "{left}");
    }
}
