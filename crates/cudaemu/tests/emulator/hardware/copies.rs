//! Copies between devices whose link corrupts bytes.

use crate::driver::support::{PrimaryContext, get, ok};
use cudarc::driver::sys;

const BYTES: usize = 10_000;

/// Copies bytes of value 5 from device `from` to device `to`; returns the positions and values of the wrong ones.
fn wrong_bytes(from: &PrimaryContext, to: &PrimaryContext, peer_call: bool) -> Vec<(usize, u8)> {
    // SAFETY: out parameters point to variables of their types; the arrays have the sizes of the copies.
    unsafe {
        let [source, target] = [from, to].map(|primary| {
            ok(sys::cuCtxSetCurrent(primary.context));
            get(|a| sys::cuMemAlloc_v2(a, BYTES))
        });
        ok(sys::cuCtxSetCurrent(from.context));
        ok(sys::cuMemsetD8_v2(source, 5, BYTES));
        let stream = std::ptr::null_mut();
        match peer_call {
            true => ok(sys::cuMemcpyPeerAsync(target, to.context, source, from.context, BYTES, stream)),
            false => ok(sys::cuMemcpyDtoDAsync_v2(target, source, BYTES, stream)),
        }
        ok(sys::cuCtxSynchronize());
        let mut data = vec![0u8; BYTES];
        ok(sys::cuMemcpyDtoH_v2(data.as_mut_ptr().cast(), target, BYTES));
        for address in [source, target] {
            ok(sys::cuMemFree_v2(address));
        }
        data.into_iter().enumerate().filter(|&(_, byte)| byte != 5).collect()
    }
}

#[test]
fn copies_with_peer_access_between_the_named_devices_write_wrong_bytes() {
    let emulator = cudaemu::test::start("CUDAEMU_DEVICES=3\nCUDAEMU_PEER_CORRUPT=0-1").unwrap();
    let devices = [0, 1, 2].map(PrimaryContext::new);
    let wrong = vec![(0, !5), (4096, !5), (8192, !5)];
    // Without peer access, the driver copies through host memory.
    assert_eq!(wrong_bytes(&devices[0], &devices[1], true), []);
    for (from, to) in [(0, 1), (0, 2), (1, 2)] {
        // SAFETY: the contexts are alive.
        unsafe {
            ok(sys::cuCtxSetCurrent(devices[from].context));
            ok(sys::cuCtxEnablePeerAccess(devices[to].context, 0));
        }
    }
    for peer_call in [false, true] {
        for (from, to, corrupt) in [(0, 1, true), (1, 0, true), (0, 0, false), (0, 2, false), (2, 1, false)] {
            let expected = if corrupt { wrong.clone() } else { Vec::new() };
            assert_eq!(wrong_bytes(&devices[from], &devices[to], peer_call), expected, "{from} to {to}");
        }
    }
    drop(devices);
    assert_eq!(emulator.reports(), Vec::<String>::new(), "a GPU does not notice either");
}
