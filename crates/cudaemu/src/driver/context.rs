//! Contexts: primary and other contexts, each thread's context stack, limits, peer access, and the release of resources when a
//! context ends.

use std::cell::RefCell;
use std::collections::BTreeSet;

use super::{Driver, DriverState, StateGuard};
use crate::error::{Error, Result};
use crate::handle::{ContextId, Handle};

/// A context.
#[derive(Debug)]
pub struct Context {
    /// Index of its device.
    pub device: usize,
    /// Whether it is its device's primary context.
    pub primary: bool,
    /// The fault that destroyed the context's state: every later call in it returns this error.
    pub failed: Option<Error>,
    /// Values of `cuCtxGetLimit`, by number.
    pub limits: [u64; LIMITS],
    /// `CUfunc_cache`
    pub cache: u32,
    /// Contexts whose memory its kernels may access.
    pub peers: BTreeSet<ContextId>,
    /// Number of launches so far.
    pub launches: u64,
}

/// The primary context of a device.
#[derive(Clone, Copy, Debug)]
pub struct Primary {
    /// The context's handle.
    pub context: ContextId,
    /// Reference count of `cuDevicePrimaryCtxRetain`.
    pub retained: u32,
}

/// Number of limits of `cuCtxGetLimit`, which number them from 0.
const LIMITS: usize = 7;
/// Defaults: stack per thread (local memory), printf buffer, heap, depth of launches by kernels, pending launches by kernels,
/// L2 fetch granularity, persisting L2. Sizes in bytes.
const DEFAULT_LIMITS: [u64; LIMITS] = [1024, 1 << 20, 8 << 20, 2, 2048, 64, 0];
/// Valid bits of context flags.
const FLAGS: u32 = 0xff;

thread_local! {
    static STACK: RefCell<Vec<ContextId>> = const { RefCell::new(Vec::new()) };
}

/// The thread's current context; the handle may be invalid by now.
pub fn current_handle() -> Option<ContextId> {
    stack(|stack| stack.last().copied()).ok().flatten().filter(|context| !context.is_null())
}

/// Calls `body` with the thread's context stack. Fails if the thread is ending and its thread-local stack is already destroyed.
fn stack<R>(body: impl FnOnce(&mut Vec<ContextId>) -> R) -> Result<R> {
    STACK.try_with(|stack| body(&mut stack.borrow_mut())).map_err(|_| Error::InvalidContext)
}

impl DriverState {
    /// The thread's current context, even after a fault.
    pub fn current_even_lost(&self) -> Result<ContextId> {
        let context = current_handle().ok_or(Error::InvalidContext)?;
        self.contexts.get(context).map_err(|_| Error::ContextIsDestroyed)?;
        Ok(context)
    }

    /// The thread's current context; fails with its fault after one.
    pub fn current(&self) -> Result<ContextId> {
        let context = self.current_even_lost()?;
        self.check_alive(context)?;
        Ok(context)
    }

    /// Fails with the context's fault after one.
    pub fn check_alive(&self, context: ContextId) -> Result<()> {
        match self.contexts.get(context)?.failed {
            Some(error) => Err(error),
            None => Ok(()),
        }
    }

    /// The current context and its device.
    pub fn current_device(&self) -> Result<(ContextId, usize)> {
        let context = self.current()?;
        Ok((context, self.contexts.get(context)?.device))
    }

    /// The given context, or the current one if it is null.
    pub fn context_or_current(&self, context: ContextId) -> Result<ContextId> {
        if context.is_null() {
            return self.current();
        }
        self.check_alive(context)?;
        Ok(context)
    }

    fn new_context(&mut self, device: usize, primary: bool) -> ContextId {
        self.contexts.insert(Context {
            device,
            primary,
            failed: None,
            limits: DEFAULT_LIMITS,
            cache: 0,
            peers: BTreeSet::new(),
            launches: 0,
        })
    }

    /// `cuDevicePrimaryCtxRetain`
    pub fn retain_primary(&mut self, device: usize) -> Result<ContextId> {
        self.check_device(device)?;
        if let Some(primary) = &mut self.devices[device].primary {
            primary.retained += 1;
            return Ok(primary.context);
        }
        let context = self.new_context(device, true);
        self.devices[device].primary = Some(Primary { context, retained: 1 });
        Ok(context)
    }

    /// `cuCtxCreate`: pushes the new context on the thread's stack.
    pub fn create_context(&mut self, device: usize, flags: u32) -> Result<ContextId> {
        if flags & !FLAGS != 0 {
            return Err(Error::InvalidValue);
        }
        self.check_device(device)?;
        let context = self.new_context(device, false);
        if let Err(error) = stack(|stack| stack.push(context)) {
            self.contexts.remove(context)?;
            return Err(error);
        }
        Ok(context)
    }

    /// `cuCtxSetCurrent`: null pops the stack's top.
    pub fn set_current(&self, context: ContextId) -> Result<()> {
        if !context.is_null() {
            self.contexts.get(context)?;
        }
        stack(|stack| {
            stack.pop();
            if !context.is_null() {
                stack.push(context);
            }
        })
    }

    /// `cuCtxGetLimit`
    pub fn limit(&self, limit: u32) -> Result<u64> {
        let context = self.current()?;
        let limits = &self.contexts.get(context)?.limits;
        limits.get(limit as usize).copied().ok_or(Error::UnsupportedLimit)
    }

    /// `cuCtxSetLimit`: rounds up or caps the value as the real driver does.
    pub fn set_limit(&mut self, limit: u32, value: u64) -> Result<()> {
        let context = self.current()?;
        let value = match limit {
            0 => value.next_multiple_of(16).min(512 << 10),
            1..=4 | 6 => value,
            5 => value.min(128),
            _ => return Err(Error::UnsupportedLimit),
        };
        self.contexts.get_mut(context)?.limits[limit as usize] = value;
        Ok(())
    }

    /// Devices whose memory a context's kernels may access, as a bit mask.
    pub fn accessible_devices(&self, context: ContextId) -> Result<u64> {
        let own = self.contexts.get(context)?;
        let peers = own.peers.iter().filter_map(|&peer| self.contexts.get(peer).ok()).map(|peer| peer.device as u32);
        let pools =
            self.pools.iter().map(|(_, pool)| pool).filter(|pool| pool.accessible.contains(&(own.device as u32)));
        Ok(peers.chain(pools.map(|pool| pool.device)).fold(1 << own.device, |mask, device| mask | 1 << device))
    }

    /// `cuCtxEnablePeerAccess`
    pub fn enable_peer(&mut self, driver: &Driver, peer: ContextId, flags: u32) -> Result<()> {
        let context = self.current()?;
        let (from, to) = (self.contexts.get(context)?.device, self.contexts.get(peer)?.device);
        if flags != 0 {
            return Err(Error::InvalidValue);
        }
        if context == peer || !driver.config.devices[from].peers.contains(&to) {
            return Err(if context == peer { Error::InvalidContext } else { Error::PeerAccessUnsupported });
        }
        match self.contexts.get_mut(context)?.peers.insert(peer) {
            true => Ok(()),
            false => Err(Error::PeerAccessAlreadyEnabled),
        }
    }

    /// Ends a context with everything that it owns, and reports the leaks.
    fn end_context(&mut self, driver: &Driver, id: ContextId) {
        let Ok(context) = self.contexts.remove(id) else { return };
        for (_, other) in self.contexts.iter_mut() {
            other.peers.remove(&id);
        }
        let streams = self.streams.drop_context(id).len();
        let events = self.events.remove_where(|_, event| event.context == id).len();
        let modules = self.drop_modules(driver, id);
        let memory = self.drop_memory(driver, id);
        // After a fault the program cannot free anything, so leaks are not its mistake.
        if context.failed.is_some() {
            return;
        }
        let mut left = Vec::new();
        for (count, what) in [(streams, "stream"), (events, "event"), (modules, "module")] {
            if count > 0 {
                left.push(format!("{count} {what}{}", if count == 1 { "" } else { "s" }));
            }
        }
        left.extend(memory);
        if !left.is_empty() {
            let kind = if context.primary { "primary context" } else { "context" };
            self.report(format!(
                "leak: the {kind} of device {} ended with unreleased resources: {}",
                context.device,
                left.join(", ")
            ));
        }
    }
}

impl Driver {
    /// `cuCtxSynchronize`: runs all operations of the context. Fails with the context's fault if one of them caused it.
    pub fn synchronize_context<'a>(
        &'a self,
        state: StateGuard<'a>,
        context: ContextId,
    ) -> (StateGuard<'a>, Result<()>) {
        let ends = state.streams.context_tails(context);
        let state = self.run_until_reached(state, &ends);
        let result = state.check_alive(context);
        (state, result)
    }

    /// As [`Driver::synchronize_context`], before the context ends. Operations that other threads have begun meanwhile use the
    /// context's memory and the program's, so they are waited for too. Operations that are only queued are dropped with the
    /// context.
    fn still_context<'a>(&'a self, state: StateGuard<'a>, context: ContextId) -> StateGuard<'a> {
        let (state, _) = self.synchronize_context(state, context);
        self.wait_quiescent(state, |running| running == context)
    }

    /// `cuDevicePrimaryCtxRelease`: of an unusable device, releases the context and returns the device's error.
    pub fn release_primary(&self, device: usize) -> Result<()> {
        let mut state = self.lock();
        let primary = state.devices[device].primary.as_mut().ok_or(Error::InvalidContext)?;
        primary.retained = primary.retained.checked_sub(1).ok_or(Error::InvalidContext)?;
        match primary.retained {
            0 => self.end_primary(state, device, |primary| primary.retained == 0),
            _ => state.check_device(device),
        }
    }

    /// `cuDevicePrimaryCtxReset`: does not make an unusable device usable.
    pub fn reset_primary(&self, device: usize) -> Result<()> {
        self.end_primary(self.lock(), device, |_| true)
    }

    /// Runs the primary context's operations and then ends it if `still` holds: other threads may retain or end it meanwhile.
    fn end_primary(&self, state: StateGuard<'_>, device: usize, still: fn(&Primary) -> bool) -> Result<()> {
        let Some(Primary { context, .. }) = state.devices[device].primary else { return state.check_device(device) };
        let mut state = self.still_context(state, context);
        if state.devices[device].primary.is_some_and(|primary| primary.context == context && still(&primary)) {
            state.devices[device].primary = None;
            state.end_context(self, context);
        }
        state.check_device(device)
    }

    /// `cuCtxDestroy`: fails for a primary context, which `cuDevicePrimaryCtxRelease` releases.
    pub fn destroy_context(&self, context: ContextId) -> Result<()> {
        let state = self.lock();
        let &Context { primary, device, .. } = state.contexts.get(context)?;
        if primary {
            return Err(Error::InvalidContext);
        }
        let mut state = self.still_context(state, context);
        state.end_context(self, context);
        if current_handle() == Some(context) {
            stack(Vec::pop)?;
        }
        state.check_device(device)
    }
}
