//! Modules: compiles PTX to bytecode, allocates and initialises variables.

use std::sync::Arc;

use super::function::Function;
use super::memory::{AllocationOrigin, memory_error};
use super::{Driver, DriverState};
use crate::bytecode::DecodedModule;
use crate::decode;
use crate::error::{Error, Result};
use crate::handle::{ContextId, FunctionId, ModuleId};
use crate::ptx;

/// A module loaded into a context.
#[derive(Debug)]
pub struct Module {
    /// The context that contains it.
    pub context: ContextId,
    /// Its code.
    pub code: Arc<DecodedModule>,
    /// Device addresses of its variables.
    pub globals: Arc<[u64]>,
    /// Its kernels, in the order of the PTX text.
    pub functions: Vec<FunctionId>,
}

/// The content of a module file.
#[derive(Clone, Debug)]
pub enum ModuleImage {
    /// PTX text up to the first zero byte.
    Text(Vec<u8>),
    /// Machine code or a container with machine code, which the emulator cannot execute. Holds the format's name.
    Binary(&'static str),
}

/// A load error: the result code and the text for the program's error log.
#[derive(Debug)]
pub struct LoadError {
    /// The result code.
    pub error: Error,
    /// The log text.
    pub log: String,
}

impl From<Error> for LoadError {
    fn from(error: Error) -> Self {
        Self { error, log: String::new() }
    }
}

impl LoadError {
    fn new(error: Error, log: impl Into<String>) -> Self {
        Self { error, log: log.into() }
    }
}

/// First driver with `cuFuncLoad`: CUDA 12.4.
pub const FUNC_LOAD_DRIVER: u32 = 12040;

/// The newest PTX version that a driver of this version supports ("PTX ISA", release notes).
fn newest_ptx(driver_version: u32) -> (u32, u32) {
    match (driver_version / 1000, driver_version % 1000 / 10) {
        (11, minor) => (7, minor),
        (12, minor @ 0..=5) => (8, minor),
        (12, 6 | 7) => (8, 5),
        (12, minor) => (8, minor - 1),
        (13.., minor) => (9, minor),
        _ => (6, 5),
    }
}

impl Driver {
    /// Compiles an image for a device of compute capability `sm` (80 for sm_80).
    fn translate(&self, image: &ModuleImage, sm: u32) -> std::result::Result<Arc<DecodedModule>, LoadError> {
        let text = match image {
            ModuleImage::Text(text) => text,
            ModuleImage::Binary(what) => {
                let log = format!("{what} cannot be run: the emulator executes PTX text, compile to that (nvcc -ptx)");
                return Err(LoadError::new(Error::NoBinaryForGpu, log));
            }
        };
        let text = std::str::from_utf8(text)
            .map_err(|error| LoadError::new(Error::InvalidPtx, format!("the text is no PTX: {error}")))?;
        let replaced = self.config.replaced_line.as_ref().and_then(|line| line.apply(text));
        let text = replaced.as_deref().unwrap_or(text);
        let tree = ptx::parse(text).map_err(|error| LoadError::new(Error::InvalidPtx, error.to_string()))?;
        let newest = newest_ptx(self.config.driver_version);
        if tree.version > newest {
            let log = format!(
                "the PTX is of version {}.{}, but driver {} supports none newer than {}.{}",
                tree.version.0, tree.version.1, self.config.driver_version, newest.0, newest.1
            );
            return Err(LoadError::new(Error::UnsupportedPtxVersion, log));
        }
        let fits = if tree.target_suffix.is_empty() { tree.target <= sm } else { tree.target == sm };
        if !fits {
            let log = format!("the PTX is for sm_{}{}, the device is sm_{sm}", tree.target, tree.target_suffix);
            return Err(LoadError::new(Error::InvalidPtx, log));
        }
        let code = decode::decode(&tree, text).map_err(|error| LoadError::new(Error::InvalidPtx, error.to_string()))?;
        Ok(Arc::new(code))
    }

    /// `cuModuleLoad` and similar calls.
    pub fn load_module(&self, image: &ModuleImage) -> std::result::Result<ModuleId, LoadError> {
        let (context, device) = self.lock().current_device()?;
        let code = self.translate(image, self.config.devices[device].spec.sm())?;
        let mut state = self.lock();
        state.check_alive(context)?;
        state.note_compilation();
        Ok(state.place(self, context, code)?)
    }

    /// `cuModuleUnload`: first waits for the context's operations, which may still use the module.
    pub fn unload(&self, id: ModuleId) -> Result<()> {
        let state = self.lock();
        let context = state.modules.get(id)?.context;
        state.check_alive(context)?;
        let (mut state, _) = self.synchronize_context(state, context);
        state.drop_module(self, id)
    }
}

impl DriverState {
    /// Allocates a module's variables and creates handles for its kernels.
    fn place(&mut self, driver: &Driver, context: ContextId, code: Arc<DecodedModule>) -> Result<ModuleId> {
        let device = self.contexts.get(context)?.device as u32;
        let mut globals = Vec::new();
        for global in &code.globals {
            let bytes = global.bytes.max(1);
            let made = match global.constant {
                true => driver.space().alloc_constant(device, bytes, "a module's variable"),
                false => driver.space().alloc(device, bytes, "a module's variable"),
            };
            match made {
                Ok(allocation) => {
                    // CUDA zeroes variables without initialiser. New memory is zero already, so it only needs to be marked as
                    // written.
                    allocation.physical().mark_written(0, allocation.physical().bytes());
                    self.memory.add(&allocation, context, AllocationOrigin::Global);
                    globals.push(allocation.base());
                }
                Err(error) => {
                    self.free_globals(driver, &globals);
                    return Err(memory_error(&error));
                }
            }
        }
        let view = driver.space().snapshot();
        for (global, &address) in code.globals.iter().zip(&globals) {
            // The rest is zero already.
            let init = global.init.as_deref().unwrap_or_default();
            if view.write(address, &init[..init.len().min(global.bytes as usize)]).is_err() {
                self.free_globals(driver, &globals);
                return Err(Error::Unknown);
            }
        }
        let id = self.modules.reserve();
        let mut functions = Vec::new();
        for (index, kernel) in code.functions.iter().enumerate().filter(|(_, function)| function.entry) {
            functions.push(self.functions.insert(Function {
                module: id,
                code: code.clone(),
                index,
                settings: Function::settings(kernel),
                code_address: None,
            }));
        }
        self.modules.insert_reserved(id, Module { context, code, globals: globals.into(), functions });
        Ok(id)
    }

    fn free_globals(&mut self, driver: &Driver, globals: &[u64]) {
        for &address in globals {
            self.memory.remove(address);
            // The allocation exists, unless the context freed it already.
            let _ = driver.space().free(address);
        }
    }

    fn drop_module(&mut self, driver: &Driver, id: ModuleId) -> Result<()> {
        let module = self.modules.remove(id)?;
        let mut addresses: Vec<u64> = module.globals.to_vec();
        for function in &module.functions {
            // Cannot fail: functions live as long as their module.
            addresses.extend(self.functions.remove(*function).ok().and_then(|function| function.code_address));
        }
        self.free_globals(driver, &addresses);
        Ok(())
    }

    /// Unloads all modules of a context; returns how many these are.
    pub(super) fn drop_modules(&mut self, driver: &Driver, context: ContextId) -> usize {
        let gone: Vec<ModuleId> =
            self.modules.iter().filter(|(_, module)| module.context == context).map(|(id, _)| id).collect();
        for &id in &gone {
            // Cannot fail: the module was found above.
            let _ = self.drop_module(driver, id);
        }
        gone.len()
    }

    /// `cuModuleGetFunction`. Drivers before CUDA 12.4, which have no call that loads a function, load it here.
    pub fn find_function(&mut self, driver: &Driver, module: ModuleId, name: &str) -> Result<FunctionId> {
        let module = self.modules.get(module)?;
        self.check_alive(module.context)?;
        let named = |id: &&FunctionId| self.functions.get(**id).is_ok_and(|function| &*function.kernel().name == name);
        let found = module.functions.iter().find(named).copied().ok_or(Error::NotFound)?;
        if driver.config.driver_version < FUNC_LOAD_DRIVER {
            self.load_function(driver, found)?;
        }
        Ok(found)
    }

    /// `cuModuleGetGlobal`: address and size in bytes.
    pub fn find_global(&self, module: ModuleId, name: &str) -> Result<(u64, u64)> {
        let module = self.modules.get(module)?;
        self.check_alive(module.context)?;
        let at = module.code.globals.iter().position(|global| &*global.name == name).ok_or(Error::NotFound)?;
        Ok((module.globals[at], module.code.globals[at].bytes))
    }
}
