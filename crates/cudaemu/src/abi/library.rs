//! Libraries (`CUlibrary`) and their kernels.

use std::ffi::{c_char, c_int, c_uint};

use super::ffi_guard::{In, InOut, Out, Text, api, with_state};
use super::jit::{Options, file, image};
use super::module::set_attribute;
use crate::driver::driver;
use crate::error::Error;
use crate::handle::{FunctionId, Handle, KernelId, LibraryId, ModuleId};

api! {
    fn cuLibraryLoadData(
        library: Out<LibraryId>,
        data: In<u8>,
        options: In<c_uint>,
        values: InOut<u64>,
        count: c_uint,
        _library_options: In<c_uint>,
        _library_values: In<u64>,
        _library_count: c_uint,
    ) {
        library.write_with(|| {
            let driver = driver()?;
            let image = image(data)?;
            Options::read(count, options, values)?.load(|| driver.load_library(&image))
        })
    }

    fn cuLibraryLoadFromFile(
        library: Out<LibraryId>,
        path: Text,
        options: In<c_uint>,
        values: InOut<u64>,
        count: c_uint,
        _library_options: In<c_uint>,
        _library_values: In<u64>,
        _library_count: c_uint,
    ) {
        library.write_with(|| {
            let driver = driver()?;
            let image = file(path)?;
            Options::read(count, options, values)?.load(|| driver.load_library(&image))
        })
    }

    fn cuLibraryUnload(library: LibraryId) {
        driver()?.unload_library(library)
    }

    fn cuLibraryGetKernel(kernel: Out<KernelId>, library: LibraryId, name: Text) {
        kernel.write_with(|| with_state(|_, state| state.find_kernel(library, &name.read()?)))
    }

    fn cuLibraryGetKernelCount(count: Out<c_uint>, library: LibraryId) {
        count.write_with(|| with_state(|_, state| Ok(state.library_kernels(library)?.len() as c_uint)))
    }

    fn cuLibraryEnumerateKernels(kernels: Out<KernelId>, count: c_uint, library: LibraryId) {
        kernels.check_not_null()?;
        with_state(|_, state| {
            let all = state.library_kernels(library)?;
            all.iter().take(count as usize).enumerate().for_each(|(index, &kernel)| kernels.set_at(index, kernel));
            Ok(())
        })
    }

    fn cuLibraryGetModule(module: Out<ModuleId>, library: LibraryId) {
        module.write_with(|| with_state(|driver, state| state.library_module(driver, library)))
    }

    fn cuLibraryGetGlobal(address: Out<u64>, bytes: Out<usize>, library: LibraryId, name: Text) {
        let (found, size) = with_state(|driver, state| {
            let module = state.library_module(driver, library)?;
            state.find_global(module, &name.read()?)
        })?;
        address.set(found);
        bytes.set(size as usize);
        Ok(())
    }

    fn cuLibraryGetManaged(_address: Out<u64>, _bytes: Out<usize>, library: LibraryId, _name: Text) {
        // A library has no managed variables: loading refuses PTX with the `.managed` attribute.
        with_state(|_, state| state.library_kernels(library).map(drop))?;
        Err(Error::NotFound)
    }

    fn cuKernelGetFunction(function: Out<FunctionId>, kernel: KernelId) {
        function.write_with(|| with_state(|driver, state| state.kernel_function(driver, kernel)))
    }

    fn cuKernelGetLibrary(library: Out<LibraryId>, kernel: KernelId) {
        library.write_with(|| with_state(|_, state| Ok(state.kernels.get(kernel)?.library)))
    }

    fn cuKernelGetName(name: Out<*const c_char>, kernel: KernelId) {
        // The library owns the name, so the pointer stays valid until the library is unloaded.
        name.write_with(|| with_state(|_, state| Ok(state.kernels.get(kernel)?.name.as_ptr())))
    }

    fn cuKernelGetAttribute(value: Out<c_int>, attribute: c_uint, kernel: KernelId, _device: c_int) {
        value.write_with(|| with_state(|driver, state| {
            let function = state.kernel_function(driver, kernel)?;
            let (function, spec) = state.function(driver, function)?;
            function.attribute(attribute, spec)
        }))
    }

    fn cuKernelSetAttribute(attribute: c_uint, value: c_int, kernel: KernelId, _device: c_int) {
        set_attribute(FunctionId::from_raw(kernel.raw()), attribute, value)
    }

    fn cuKernelSetCacheConfig(kernel: KernelId, config: c_uint, _device: c_int) {
        with_state(|driver, state| {
            let function = state.kernel_function(driver, kernel)?;
            if config > 3 {
                return Err(Error::InvalidValue);
            }
            state.functions.get_mut(function)?.settings.cache = config;
            Ok(())
        })
    }

    fn cuKernelGetParamInfo(kernel: KernelId, index: usize, offset: Out<usize>, bytes: Out<usize>) {
        offset.check_not_null()?;
        with_state(|driver, state| {
            let function = state.kernel_function(driver, kernel)?;
            let param = state.functions.get(function)?.kernel().params.get(index).ok_or(Error::InvalidValue)?;
            offset.set(param.offset as usize);
            bytes.set(param.bytes as usize);
            Ok(())
        })
    }

    fn cuKernelGetParamCount(kernel: KernelId, count: Out<usize>) {
        count.write_with(|| with_state(|driver, state| {
            let function = state.kernel_function(driver, kernel)?;
            Ok(state.functions.get(function)?.kernel().params.len())
        }))
    }
}
