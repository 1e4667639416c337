//! Kernel launches: checks a grid against the device's limits and turns it into a stream operation.

use std::sync::Arc;

use super::occupancy::blocks_per_sm;
use super::{Driver, StateGuard};
use crate::bytecode;
use crate::config::spec::{MAX_BLOCK, MAX_GRID, MAX_THREADS_PER_BLOCK};
use crate::engine::{KernelLaunch, StreamOp};
use crate::error::{Error, Result};
use crate::exec;
use crate::handle::{ContextId, FunctionId, StreamId};

/// Maximum bytes of local memory per thread (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
const MAX_LOCAL: u64 = 512 << 10;

/// A launch as the program requested it.
#[derive(Clone, Copy, Debug)]
pub struct LaunchRequest {
    /// The function.
    pub function: FunctionId,
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
    /// Dynamic shared memory in bytes.
    pub shared: u32,
    /// The stream.
    pub stream: StreamId,
    /// Blocks of a cluster in x, y, z; [1, 1, 1] without clusters.
    pub cluster: [u32; 3],
}

impl Driver {
    /// Submits any launch. `params` reads the parameter block once the kernel is known.
    pub fn launch(
        &self,
        request: LaunchRequest,
        params: impl FnOnce(&bytecode::Function) -> Result<Vec<u8>>,
    ) -> Result<()> {
        let mut state = self.lock();
        let stream = state.resolve_stream(request.stream)?;
        let (launch, context) = self.checked_launch(&mut state, request, params)?;
        if state.streams.get(stream)?.context != context {
            return Err(Error::InvalidHandle);
        }
        self.submit(state, stream, StreamOp::Launch(Box::new(launch)))
    }

    /// Checks a launch against the limits of device and kernel, and returns it with the kernel's context.
    pub fn checked_launch(
        &self,
        state: &mut StateGuard<'_>,
        request: LaunchRequest,
        params: impl FnOnce(&bytecode::Function) -> Result<Vec<u8>>,
    ) -> Result<(KernelLaunch, ContextId)> {
        state.load_function_lazily(self, request.function)?;
        let (function, spec) = state.function(self, request.function)?;
        let module = state.modules.get(function.module)?;
        let context = module.context;
        let within =
            |extents: [u32; 3], most: [u32; 3]| extents.iter().zip(most).all(|(&n, most)| (1..=most).contains(&n));
        let threads = request.block.iter().try_fold(1u32, |product, &n| product.checked_mul(n));
        let threads = threads.filter(|&threads| threads <= MAX_THREADS_PER_BLOCK).ok_or(Error::InvalidValue)?;
        if !within(request.grid, MAX_GRID) || !within(request.block, MAX_BLOCK) {
            return Err(Error::InvalidValue);
        }
        let kernel = function.kernel();
        if kernel.required_threads && kernel.max_threads != Some(request.block) {
            return Err(Error::InvalidValue);
        }
        let needs = function.block_resources();
        if request.shared > function.settings.max_dynamic_shared {
            return Err(Error::InvalidValue);
        }
        if request.cluster != [1; 3] {
            return Err(if spec.capability.0 < 9 { Error::InvalidClusterSize } else { Error::NotSupported });
        }
        if kernel.param_bytes > spec.parameter_bytes() {
            return Err(Error::InvalidValue);
        }
        let fitting = blocks_per_sm(needs, threads, u64::from(request.shared), spec)?;
        if threads > needs.max_threads || fitting == 0 {
            return Err(Error::LaunchOutOfResources);
        }
        let params: Arc<[u8]> = params(kernel)?.into();
        let owner = state.contexts.get(context)?;
        let local_bytes = local_bytes(&function.code, kernel, owner.limits[0])?;
        let launch = exec::Launch {
            code: function.code.clone(),
            function: function.index,
            grid: request.grid,
            block: request.block,
            dynamic_shared: request.shared,
            params,
            globals: module.globals.clone(),
            device: owner.device as u32,
            peers: state.accessible_devices(context)?,
            id: owner.launches,
        };
        state.contexts.get_mut(context)?.launches += 1;
        Ok((KernelLaunch { launch, local_bytes }, context))
    }
}

/// Factor by which the granted stack grows for recursion: the emulator's frames contain parameters that hardware keeps in
/// registers.
const PARAMETERS: u64 = 8;

/// Bytes of local memory per thread: the frames of all functions that the kernel may call. For recursion it adds the context's
/// stack limit (`stack`, `CU_LIMIT_STACK_SIZE`) times [`PARAMETERS`], as far as `MAX_LOCAL` allows.
fn local_bytes(code: &bytecode::DecodedModule, kernel: &bytecode::Function, stack: u64) -> Result<u32> {
    let needed = kernel.stack_bytes;
    if needed > MAX_LOCAL {
        return Err(Error::LaunchOutOfResources);
    }
    // Whether this kernel reaches the recursive function is unknown here, so any recursion in the module grants the stack.
    let recursion = needed > 0 && code.functions.iter().any(|function| function.recursive);
    let granted = if recursion { needed.saturating_add(stack.saturating_mul(PARAMETERS)) } else { needed };
    Ok(granted.min(MAX_LOCAL) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn local_memory_covers_frames_and_recursion() {
        let function =
            |stack_bytes, recursive| bytecode::Function { stack_bytes, recursive, ..bytecode::Function::default() };
        for (needed, recursive, stack, bytes) in [
            (0, false, 1024, Ok(0)),
            (0, true, 1024, Ok(0)),
            (48, false, 1024, Ok(48)),
            (48, true, 1024, Ok(48 + 8192)),
            (48, true, u64::MAX, Ok(512 << 10)),
            (512 << 10, true, 1024, Ok(512 << 10)),
            ((512 << 10) + 16, false, 0, Err(Error::LaunchOutOfResources)),
            (u64::MAX, true, u64::MAX, Err(Error::LaunchOutOfResources)),
        ] {
            let code = bytecode::DecodedModule {
                functions: vec![function(16, recursive)],
                ..bytecode::DecodedModule::default()
            };
            assert_eq!(local_bytes(&code, &function(needed, false), stack), bytes, "{needed} {recursive} {stack}");
        }
    }
}
