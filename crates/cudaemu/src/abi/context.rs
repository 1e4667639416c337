//! Contexts: primary contexts, `cuCtx*`, peer access, and the profiler's switches (which do nothing).

use std::ffi::{c_int, c_uint};

use super::ffi_guard::{In, Opaque, Out, api, with_state};
use crate::driver::context::current_handle;
use crate::driver::driver;
use crate::engine::HIGHEST_PRIORITY;
use crate::error::{Error, Result};
use crate::handle::ContextId;

api! {
    fn cuDevicePrimaryCtxRetain(context: Out<ContextId>, device: c_int) {
        context.write_with(|| with_state(|driver, state| state.retain_primary(driver.device(device)?)))
    }

    fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        let driver = driver()?;
        driver.release_primary(driver.device(device)?)
    }

    fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        let driver = driver()?;
        driver.reset_primary(driver.device(device)?)
    }

    fn cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) {
        with_state(|driver, state| state.set_primary_flags(driver.device(device)?, flags))
    }

    fn cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) {
        flags.check_not_null()?;
        active.check_not_null()?;
        with_state(|driver, state| {
            let device = &state.devices[driver.device(device)?];
            flags.set(device.primary_flags);
            active.set(c_int::from(device.primary.is_some()));
            Ok(())
        })
    }

    fn cuCtxCreate_v2(context: Out<ContextId>, flags: c_uint, device: c_int) {
        create(context, flags, device)
    }

    fn cuCtxCreate_v3(context: Out<ContextId>, _affinity: Opaque, affinities: c_int, flags: c_uint, device: c_int) {
        if affinities != 0 {
            return Err(Error::UnsupportedExecAffinity);
        }
        create(context, flags, device)
    }

    fn cuCtxCreate_v4(context: Out<ContextId>, params: In<[u64; 3]>, flags: c_uint, device: c_int) {
        // The three words are execution affinities, their count, and parameters for graphics interoperability: none is
        // supported.
        if params.is_given() && params.get()? != [0; 3] {
            return Err(Error::NotSupported);
        }
        create(context, flags, device)
    }

    fn cuCtxDestroy_v2(context: ContextId) {
        driver()?.destroy_context(context)
    }

    fn cuCtxAttach(_context: Out<ContextId>, _flags: c_uint) {
        Err(Error::NotSupported)
    }

    fn cuCtxDetach(_context: ContextId) {
        Err(Error::NotSupported)
    }

    fn cuCtxPushCurrent_v2(context: ContextId) {
        with_state(|_, state| state.push(context))
    }

    fn cuCtxPopCurrent_v2(context: Out<ContextId>) {
        let popped = with_state(|_, state| state.pop())?;
        context.set(popped);
        Ok(())
    }

    fn cuCtxSetCurrent(context: ContextId) {
        with_state(|_, state| state.set_current(context))
    }

    fn cuCtxGetCurrent(context: Out<ContextId>) {
        context.write_with(|| {
            driver()?;
            Ok(current_handle().unwrap_or_default())
        })
    }

    fn cuCtxGetDevice(device: Out<c_int>) {
        device.write_with(|| with_state(|_, state| Ok(state.contexts.get(state.current_even_lost()?)?.device as c_int)))
    }

    fn cuCtxGetDevice_v2(device: Out<c_int>, context: ContextId) {
        device.write_with(|| with_state(|_, state| Ok(state.contexts.get(state.context_or_current(context)?)?.device as c_int)))
    }

    fn cuCtxGetFlags(flags: Out<c_uint>) {
        flags.write_with(|| with_state(|_, state| Ok(state.contexts.get(state.current()?)?.flags)))
    }

    fn cuCtxSetFlags(flags: c_uint) {
        with_state(|_, state| state.set_flags(flags))
    }

    fn cuCtxGetId(context: ContextId, id: Out<u64>) {
        id.write_with(|| with_state(|_, state| Ok(state.contexts.get(state.context_or_current(context)?)?.id)))
    }

    fn cuCtxGetApiVersion(context: ContextId, version: Out<c_uint>) {
        version.write_with(|| {
            with_state(|_, state| {
                let context = state.context_or_current(context)?;
                state.contexts.get(context).map(|_| 3020)
            })
        })
    }

    fn cuCtxSynchronize() {
        synchronize(ContextId::default())
    }

    fn cuCtxSynchronize_v2(context: ContextId) {
        synchronize(context)
    }

    fn cuCtxGetLimit(value: Out<usize>, limit: c_uint) {
        value.write_with(|| with_state(|_, state| state.limit(limit).map(|value| value as usize)))
    }

    fn cuCtxSetLimit(limit: c_uint, value: usize) {
        with_state(|_, state| state.set_limit(limit, value as u64))
    }

    fn cuCtxResetPersistingL2Cache() {
        with_state(|_, state| state.current().map(drop))
    }

    fn cuCtxGetCacheConfig(config: Out<c_uint>) {
        config.write_with(|| with_state(|_, state| Ok(state.contexts.get(state.current()?)?.cache)))
    }

    fn cuCtxSetCacheConfig(config: c_uint) {
        with_state(|_, state| {
            let context = state.current()?;
            if config > 3 {
                return Err(Error::InvalidValue);
            }
            state.contexts.get_mut(context)?.cache = config;
            Ok(())
        })
    }

    fn cuCtxGetSharedMemConfig(config: Out<c_uint>) {
        config.write_with(|| with_state(|_, state| Ok(state.contexts.get(state.current()?)?.shared)))
    }

    fn cuCtxSetSharedMemConfig(config: c_uint) {
        // Accepted without effect: shared memory banks are 4 bytes wide on every emulated device, and real ones ignore the
        // setting too.
        with_state(|_, state| state.current().and(if config > 2 { Err(Error::InvalidValue) } else { Ok(()) }))
    }

    fn cuCtxGetStreamPriorityRange(least: Out<c_int>, greatest: Out<c_int>) {
        with_state(|_, state| state.current())?;
        least.set(0);
        greatest.set(HIGHEST_PRIORITY);
        Ok(())
    }

    fn cuCtxGetExecAffinity(_affinity: Opaque, _kind: c_uint) {
        Err(Error::UnsupportedExecAffinity)
    }

    fn cuCtxEnablePeerAccess(peer: ContextId, flags: c_uint) {
        with_state(|driver, state| state.enable_peer(driver, peer, flags))
    }

    fn cuCtxDisablePeerAccess(peer: ContextId) {
        let driver = driver()?;
        let state = driver.lock();
        let context = state.current()?;
        // Queued work may still use the peer's memory, so it runs before the access ends.
        let (mut state, _) = driver.synchronize_context(state, context);
        state.disable_peer(peer)
    }

    fn cuProfilerInitialize(_config: Opaque, _output: Opaque, _mode: c_uint) {
        Err(Error::NotSupported)
    }

    fn cuProfilerStart() {
        with_state(|_, state| state.current().map(drop))
    }

    fn cuProfilerStop() {
        with_state(|_, state| state.current().map(drop))
    }
}

fn create(context: Out<ContextId>, flags: c_uint, device: c_int) -> Result<()> {
    context.write_with(|| with_state(|driver, state| state.create_context(driver.device(device)?, flags)))
}

fn synchronize(context: ContextId) -> Result<()> {
    let driver = driver()?;
    let mut state = driver.lock();
    let context = state.context_or_current(context)?;
    state.check_host_wait_context(context)?;
    driver.synchronize_context(state, context).1
}
