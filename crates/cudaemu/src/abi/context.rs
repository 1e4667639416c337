//! Contexts: primary contexts, `cuCtx*`, and peer access.

use std::ffi::{c_int, c_uint};

use super::ffi_guard::{Opaque, Out, api, with_state};
use crate::driver::context::current_handle;
use crate::driver::driver;
use crate::error::Error;
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

    fn cuCtxCreate_v3(context: Out<ContextId>, _affinity: Opaque, affinities: c_int, flags: c_uint, device: c_int) {
        if affinities != 0 {
            return Err(Error::UnsupportedExecAffinity);
        }
        context.write_with(|| with_state(|driver, state| state.create_context(driver.device(device)?, flags)))
    }

    fn cuCtxDestroy_v2(context: ContextId) {
        driver()?.destroy_context(context)
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

    fn cuCtxSynchronize() {
        let driver = driver()?;
        let state = driver.lock();
        let context = state.current()?;
        driver.synchronize_context(state, context).1
    }

    fn cuCtxGetLimit(value: Out<usize>, limit: c_uint) {
        value.write_with(|| with_state(|_, state| state.limit(limit).map(|value| value as usize)))
    }

    fn cuCtxSetLimit(limit: c_uint, value: usize) {
        with_state(|_, state| state.set_limit(limit, value as u64))
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

    fn cuCtxEnablePeerAccess(peer: ContextId, flags: c_uint) {
        with_state(|driver, state| state.enable_peer(driver, peer, flags))
    }
}
