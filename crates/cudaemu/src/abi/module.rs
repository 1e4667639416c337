//! Modules, functions and their attributes, occupancy.

use std::ffi::{c_int, c_uint};

use super::ffi_guard::{In, InOut, Out, Text, api, with_state};
use super::jit::{Options, file, image};
use crate::driver::driver;
use crate::driver::occupancy::best_block;
use crate::error::Error;
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

    fn cuModuleUnload(module: ModuleId) {
        driver()?.unload(module)
    }

    fn cuModuleGetFunction(function: Out<FunctionId>, module: ModuleId, name: Text) {
        function.write_with(|| with_state(|driver, state| state.find_function(driver, module, &name.read()?)))
    }

    fn cuModuleGetGlobal_v2(address: Out<u64>, bytes: Out<usize>, module: ModuleId, name: Text) {
        let (found, size) = with_state(|_, state| state.find_global(module, &name.read()?))?;
        address.set(found);
        bytes.set(size as usize);
        Ok(())
    }

    fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_uint, function: FunctionId) {
        value.write_with(|| with_state(|driver, state| {
            let (function, spec) = state.function(driver, function)?;
            function.attribute(attribute, spec)
        }))
    }

    fn cuFuncSetAttribute(function: FunctionId, attribute: c_uint, value: c_int) {
        with_state(|driver, state| {
            let spec = state.function(driver, function)?.1.clone();
            state.functions.get_mut(function)?.set_attribute(attribute, value, &spec)
        })
    }

    fn cuFuncLoad(function: FunctionId) {
        with_state(|driver, state| state.load_function(driver, function).map(drop))
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
        grid.check_not_null()?;
        block.check_not_null()?;
        let most = u32::try_from(most).map_err(|_| Error::InvalidValue)?;
        if flags > 1 {
            return Err(Error::InvalidValue);
        }
        // The program's callback runs without the lock: it may call the driver.
        let (needs, spec) = with_state(|driver, state| {
            let (function, spec) = state.function(driver, function)?;
            Ok((function.block_resources(), spec.clone()))
        })?;
        let shared = |threads: u32| shared_of.map_or(shared, |shared_of| shared_of(threads as c_int)) as u64;
        let (blocks, threads) = best_block(needs, shared, most, &spec)?;
        grid.set(blocks as c_int);
        block.set(threads as c_int);
        Ok(())
    }
}
