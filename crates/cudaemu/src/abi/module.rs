//! Modules, functions and their attributes, occupancy.

use std::ffi::{c_char, c_int, c_uint};

use super::ffi_guard::{In, InOut, Out, Text, api, with_state};
use super::jit::{Options, file, image};
use crate::driver::driver;
use crate::driver::occupancy::{available_shared, best_block, blocks_per_sm};
use crate::error::{Error, Result};
use crate::handle::{FunctionId, ModuleId};

/// `CUoccupancyB2DSize`: returns the bytes of dynamic shared memory that a block with this many threads needs.
type SharedOfBlock = Option<extern "C" fn(c_int) -> usize>;

api! {
    fn cuModuleLoad(module: Out<ModuleId>, path: Text) {
        module.write_with(|| {
            let driver = driver()?;
            let image = file(path)?;
            Options::none().load(|| driver.load_module(&image))
        })
    }

    fn cuModuleLoadData(module: Out<ModuleId>, data: In<u8>) {
        module.write_with(|| {
            let driver = driver()?;
            let image = image(data)?;
            Options::none().load(|| driver.load_module(&image))
        })
    }

    fn cuModuleLoadDataEx(module: Out<ModuleId>, data: In<u8>, count: c_uint, options: In<c_uint>, values: InOut<u64>) {
        module.write_with(|| {
            let driver = driver()?;
            let image = image(data)?;
            Options::read(count, options, values)?.load(|| driver.load_module(&image))
        })
    }

    fn cuModuleLoadFatBinary(module: Out<ModuleId>, data: In<u8>) {
        module.write_with(|| {
            let driver = driver()?;
            let image = image(data)?;
            Options::none().load(|| driver.load_module(&image))
        })
    }

    fn cuModuleUnload(module: ModuleId) {
        driver()?.unload(module)
    }

    fn cuModuleGetLoadingMode(mode: Out<c_uint>) {
        // 1: eager. Loading a module loads all its functions.
        mode.write_with(|| driver().map(|_| 1))
    }

    fn cuModuleGetFunction(function: Out<FunctionId>, module: ModuleId, name: Text) {
        function.write_with(|| with_state(|_, state| state.find_function(module, &name.read()?)))
    }

    fn cuModuleGetFunctionCount(count: Out<c_uint>, module: ModuleId) {
        count.write_with(|| with_state(|_, state| Ok(state.modules.get(module)?.functions.len() as c_uint)))
    }

    fn cuModuleEnumerateFunctions(functions: Out<FunctionId>, count: c_uint, module: ModuleId) {
        functions.check_not_null()?;
        with_state(|_, state| {
            let all = &state.modules.get(module)?.functions;
            all.iter().take(count as usize).enumerate().for_each(|(index, &function)| functions.set_at(index, function));
            Ok(())
        })
    }

    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, module: ModuleId, name: Text) {
        let (found, size) = with_state(|_, state| state.find_global(module, &name.read()?))?;
        address.set(found);
        bytes.set(size as usize);
        Ok(())
    }

    fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_uint, function: FunctionId) {
        value.write_with(|| with_state(|driver, state| {
            let function = state.resolve_function(driver, function)?;
            let (function, spec) = state.function(driver, function)?;
            function.attribute(attribute, spec)
        }))
    }

    fn cuFuncSetAttribute(function: FunctionId, attribute: c_uint, value: c_int) {
        set_attribute(function, attribute, value)
    }

    fn cuFuncSetCacheConfig(function: FunctionId, config: c_uint) {
        with_state(|driver, state| {
            let function = state.resolve_function(driver, function)?;
            if config > 3 {
                return Err(Error::InvalidValue);
            }
            state.functions.get_mut(function)?.settings.cache = config;
            Ok(())
        })
    }

    fn cuFuncSetSharedMemConfig(function: FunctionId, config: c_uint) {
        // Without effect, as in `cuCtxSetSharedMemConfig`.
        with_state(|driver, state| state.resolve_function(driver, function).and(if config > 2 { Err(Error::InvalidValue) } else { Ok(()) }))
    }

    fn cuFuncGetModule(module: Out<ModuleId>, function: FunctionId) {
        module.write_with(|| with_state(|driver, state| {
            let function = state.resolve_function(driver, function)?;
            Ok(state.functions.get(function)?.module)
        }))
    }

    fn cuFuncGetName(name: Out<*const c_char>, function: FunctionId) {
        name.write_with(|| with_state(|driver, state| {
            let function = state.resolve_function(driver, function)?;
            // The module owns the name, so the pointer stays valid until the module is unloaded.
            Ok(state.functions.get(function)?.name.as_ptr())
        }))
    }

    fn cuFuncGetParamInfo(function: FunctionId, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        offset.check_not_null()?;
        with_state(|driver, state| {
            let function = state.resolve_function(driver, function)?;
            let param = state.functions.get(function)?.kernel().params.get(index).ok_or(Error::InvalidValue)?;
            offset.set(param.offset as usize);
            bytes.set(param.bytes as usize);
            Ok(())
        })
    }

    fn cuFuncGetParamCount(function: FunctionId, count: Out<usize>) {
        count.write_with(|| with_state(|driver, state| {
            let function = state.resolve_function(driver, function)?;
            Ok(state.functions.get(function)?.kernel().params.len())
        }))
    }

    fn cuFuncIsLoaded(loaded: Out<c_uint>, function: FunctionId) {
        loaded.write_with(|| with_state(|driver, state| state.resolve_function(driver, function).map(|_| 1)))
    }

    fn cuFuncLoad(function: FunctionId) {
        with_state(|driver, state| state.resolve_function(driver, function).map(drop))
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: Out<c_int>, function: FunctionId, threads: c_int, shared: usize) {
        active_blocks(blocks, function, threads, shared, 0)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
        blocks: Out<c_int>,
        function: FunctionId,
        threads: c_int,
        shared: usize,
        flags: c_uint,
    ) {
        active_blocks(blocks, function, threads, shared, flags)
    }

    fn cuOccupancyMaxPotentialBlockSize(
        grid: Out<c_int>,
        block: Out<c_int>,
        function: FunctionId,
        shared_of: SharedOfBlock,
        shared: usize,
        most: c_int,
    ) {
        potential(grid, block, function, shared_of, shared, most, 0)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(
        grid: Out<c_int>,
        block: Out<c_int>,
        function: FunctionId,
        shared_of: SharedOfBlock,
        shared: usize,
        most: c_int,
        flags: c_uint,
    ) {
        potential(grid, block, function, shared_of, shared, most, flags)
    }

    fn cuOccupancyAvailableDynamicSMemPerBlock(bytes: Out<usize>, function: FunctionId, blocks: c_int, threads: c_int) {
        bytes.write_with(|| with_state(|driver, state| {
            let function = state.resolve_function(driver, function)?;
            let (function, spec) = state.function(driver, function)?;
            let [blocks, threads] = [blocks, threads].map(u32::try_from);
            let (Ok(blocks), Ok(threads)) = (blocks, threads) else { return Err(Error::InvalidValue) };
            Ok(available_shared(function.block_resources(), blocks, threads, spec)? as usize)
        }))
    }
}

/// `cuFuncSetAttribute` and `cuKernelSetAttribute`.
pub(super) fn set_attribute(function: FunctionId, attribute: c_uint, value: c_int) -> Result<()> {
    with_state(|driver, state| {
        let id = state.resolve_function(driver, function)?;
        let spec = state.function(driver, id)?.1.clone();
        state.functions.get_mut(id)?.set_attribute(attribute, value, &spec)
    })
}

fn active_blocks(blocks: Out<c_int>, function: FunctionId, threads: c_int, shared: usize, flags: c_uint) -> Result<()> {
    blocks.write_with(|| {
        with_state(|driver, state| {
            let function = state.resolve_function(driver, function)?;
            let (function, spec) = state.function(driver, function)?;
            match u32::try_from(threads) {
                Ok(threads) if flags <= 1 => {
                    Ok(blocks_per_sm(function.block_resources(), threads, shared as u64, spec)? as c_int)
                }
                _ => Err(Error::InvalidValue),
            }
        })
    })
}

fn potential(
    grid: Out<c_int>,
    block: Out<c_int>,
    function: FunctionId,
    shared_of: SharedOfBlock,
    shared: usize,
    most: c_int,
    flags: c_uint,
) -> Result<()> {
    grid.check_not_null()?;
    block.check_not_null()?;
    let most = u32::try_from(most).map_err(|_| Error::InvalidValue)?;
    if flags > 1 {
        return Err(Error::InvalidValue);
    }
    // The program's callback runs without the lock: it may call the driver.
    let (needs, spec) = with_state(|driver, state| {
        let function = state.resolve_function(driver, function)?;
        let (function, spec) = state.function(driver, function)?;
        Ok((function.block_resources(), spec.clone()))
    })?;
    let shared = |threads: u32| shared_of.map_or(shared, |shared_of| shared_of(threads as c_int)) as u64;
    let (blocks, threads) = best_block(needs, shared, most, &spec)?;
    grid.set(blocks as c_int);
    block.set(threads as c_int);
    Ok(())
}
