//! Modules and libraries: compiles PTX to bytecode, allocates and initialises variables.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::Arc;

use super::function::Function;
use super::memory::{AllocationOrigin, memory_error};
use super::{Driver, DriverState};
use crate::bytecode::{DecodedModule, FUNCTION_ADDRESS, Global, Symbol};
use crate::decode;
use crate::error::{Error, Result};
use crate::fault::FaultKind;
use crate::handle::{ContextId, FunctionId, Handle, KernelId, LibraryId, ModuleId};
use crate::mem::MemorySnapshot;
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
    /// The library that it belongs to; only that library can unload it.
    pub library: Option<LibraryId>,
}

/// A library: code that is loaded into a context at the first use of one of its kernels there.
#[derive(Debug)]
pub struct Library {
    code: Arc<DecodedModule>,
    kernels: Vec<KernelId>,
    modules: BTreeMap<ContextId, ModuleId>,
}

/// A kernel of a library.
#[derive(Debug)]
pub struct LibraryKernel {
    /// Its library.
    pub library: LibraryId,
    /// Its name.
    pub name: Arc<std::ffi::CStr>,
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
    /// Compiles an image for a device of compute capability `sm` (80 for sm_80), or for any device if `None`.
    fn translate(&self, image: &ModuleImage, sm: Option<u32>) -> std::result::Result<Arc<DecodedModule>, LoadError> {
        let text = match image {
            ModuleImage::Text(text) => text,
            ModuleImage::Binary(what) => {
                let log = format!("{what} cannot be run: the emulator executes PTX text, compile to that (nvcc -ptx)");
                return Err(LoadError::new(Error::NoBinaryForGpu, log));
            }
        };
        let text = std::str::from_utf8(text)
            .map_err(|error| LoadError::new(Error::InvalidPtx, format!("the text is no PTX: {error}")))?;
        let tree = ptx::parse(text).map_err(|error| LoadError::new(Error::InvalidPtx, error.to_string()))?;
        let newest = newest_ptx(self.config.driver_version);
        if tree.version > newest {
            let log = format!(
                "the PTX is of version {}.{}, but driver {} supports none newer than {}.{}",
                tree.version.0, tree.version.1, self.config.driver_version, newest.0, newest.1
            );
            return Err(LoadError::new(Error::UnsupportedPtxVersion, log));
        }
        if let Some(sm) = sm {
            let fits = if tree.target_suffix.is_empty() { tree.target <= sm } else { tree.target == sm };
            if !fits {
                let log = format!("the PTX is for sm_{}{}, the device is sm_{sm}", tree.target, tree.target_suffix);
                return Err(LoadError::new(Error::InvalidPtx, log));
            }
        }
        let code = decode::decode(&tree, text).map_err(|error| LoadError::new(Error::InvalidPtx, error.to_string()))?;
        Ok(Arc::new(code))
    }

    /// `cuModuleLoad` and similar calls.
    pub fn load_module(&self, image: &ModuleImage) -> std::result::Result<ModuleId, LoadError> {
        let (context, device) = self.lock().current_device()?;
        let code = self.translate(image, Some(self.config.devices[device].spec.sm()))?;
        let mut state = self.lock();
        state.check_alive(context)?;
        state.note_compilation();
        Ok(state.place(self, context, code, None)?)
    }

    /// `cuLibraryLoadData`
    pub fn load_library(&self, image: &ModuleImage) -> std::result::Result<LibraryId, LoadError> {
        let code = self.translate(image, None)?;
        let mut state = self.lock();
        state.note_compilation();
        let id = state.libraries.reserve();
        let mut kernels = Vec::new();
        for function in code.functions.iter().filter(|function| function.entry) {
            kernels.push(state.kernels.insert(LibraryKernel { library: id, name: c_name(&function.name)? }));
        }
        state.libraries.insert_reserved(id, Library { code, kernels, modules: BTreeMap::new() });
        Ok(id)
    }

    /// `cuModuleUnload`: first waits for the context's operations, which may still use the module.
    pub fn unload(&self, id: ModuleId) -> Result<()> {
        let state = self.lock();
        let module = state.modules.get(id)?;
        if module.library.is_some() {
            return Err(Error::NotPermitted);
        }
        let context = module.context;
        state.check_alive(context)?;
        let (mut state, _) = self.synchronize_context(state, context);
        state.drop_module(self, id)
    }

    /// `cuLibraryUnload`
    pub fn unload_library(&self, id: LibraryId) -> Result<()> {
        let state = self.lock();
        state.libraries.get(id)?;
        let ends = state.streams.all_tails();
        let mut state = self.run_until_reached(state, &ends);
        let library = state.libraries.remove(id)?;
        for kernel in library.kernels {
            // Cannot fail: kernels live as long as their library.
            let _ = state.kernels.remove(kernel);
        }
        for module in library.modules.into_values() {
            // Fails harmlessly if the context ended first and took the module with it.
            let _ = state.drop_module(self, module);
        }
        Ok(())
    }
}

impl DriverState {
    /// Allocates a module's variables and creates handles for its kernels.
    fn place(
        &mut self,
        driver: &Driver,
        context: ContextId,
        code: Arc<DecodedModule>,
        library: Option<LibraryId>,
    ) -> Result<ModuleId> {
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
            if initialise(&view, address, global, &globals).is_err() {
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
                name: c_name(&kernel.name)?,
                settings: Function::settings(kernel),
            }));
        }
        self.modules.insert_reserved(id, Module { context, code, globals: globals.into(), functions, library });
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
        for function in &module.functions {
            // Cannot fail: functions live as long as their module.
            let _ = self.functions.remove(*function);
        }
        let globals: Vec<u64> = module.globals.to_vec();
        self.free_globals(driver, &globals);
        Ok(())
    }

    /// Unloads all modules of a context; returns how many of them the program leaked.
    pub(super) fn drop_modules(&mut self, driver: &Driver, context: ContextId) -> usize {
        let gone: Vec<(ModuleId, bool)> = self
            .modules
            .iter()
            .filter(|(_, module)| module.context == context)
            .map(|(id, module)| (id, module.library.is_none()))
            .collect();
        for (_, library) in self.libraries.iter_mut() {
            library.modules.remove(&context);
        }
        for &(id, _) in &gone {
            // Cannot fail: the module was found above.
            let _ = self.drop_module(driver, id);
        }
        gone.iter().filter(|(_, own)| *own).count()
    }

    /// `cuModuleGetFunction`
    pub fn find_function(&self, module: ModuleId, name: &str) -> Result<FunctionId> {
        let module = self.modules.get(module)?;
        self.check_alive(module.context)?;
        let named = |id: &&FunctionId| self.functions.get(**id).is_ok_and(|function| &*function.kernel().name == name);
        module.functions.iter().find(named).copied().ok_or(Error::NotFound)
    }

    /// `cuModuleGetGlobal`: address and size in bytes.
    pub fn find_global(&self, module: ModuleId, name: &str) -> Result<(u64, u64)> {
        let module = self.modules.get(module)?;
        self.check_alive(module.context)?;
        let at = module.code.globals.iter().position(|global| &*global.name == name).ok_or(Error::NotFound)?;
        Ok((module.globals[at], module.code.globals[at].bytes))
    }

    /// A library's module in the current context; loads it at the first use.
    pub fn library_module(&mut self, driver: &Driver, id: LibraryId) -> Result<ModuleId> {
        let (context, device) = self.current_device()?;
        let library = self.libraries.get(id)?;
        if let Some(&module) = library.modules.get(&context) {
            return Ok(module);
        }
        let code = library.code.clone();
        if code.target > driver.config.devices[device].spec.sm() {
            return Err(Error::NoBinaryForGpu);
        }
        let module = self.place(driver, context, code, Some(id))?;
        self.libraries.get_mut(id)?.modules.insert(context, module);
        Ok(module)
    }

    /// `cuKernelGetFunction`: the kernel's function in the current context.
    pub fn kernel_function(&mut self, driver: &Driver, kernel: KernelId) -> Result<FunctionId> {
        let LibraryKernel { library, name } = self.kernels.get(kernel)?;
        let (library, name) = (*library, name.clone());
        let module = self.library_module(driver, library)?;
        self.find_function(module, name.to_str().map_err(|_| Error::NotFound)?)
    }

    /// Resolves a function handle, which may be the handle of a library's kernel.
    pub fn resolve_function(&mut self, driver: &Driver, function: FunctionId) -> Result<FunctionId> {
        if self.functions.get(function).is_ok() {
            return Ok(function);
        }
        match KernelId::from_raw(function.raw()) {
            kernel if self.kernels.get(kernel).is_ok() => self.kernel_function(driver, kernel),
            _ => Err(Error::InvalidHandle),
        }
    }

    /// `cuLibraryGetKernel`
    pub fn find_kernel(&self, library: LibraryId, name: &str) -> Result<KernelId> {
        let named =
            |id: &&KernelId| self.kernels.get(**id).is_ok_and(|kernel| kernel.name.to_bytes() == name.as_bytes());
        self.libraries.get(library)?.kernels.iter().find(named).copied().ok_or(Error::NotFound)
    }

    /// The kernels of a library.
    pub fn library_kernels(&self, library: LibraryId) -> Result<&[KernelId]> {
        Ok(&self.libraries.get(library)?.kernels)
    }
}

/// Writes a variable's initial bytes; the rest is zero already.
fn initialise(
    view: &MemorySnapshot,
    address: u64,
    global: &Global,
    addresses: &[u64],
) -> std::result::Result<(), FaultKind> {
    if let Some(init) = &global.init {
        view.write(address, &init[..init.len().min(global.bytes as usize)])?;
    }
    for relocation in &global.relocations {
        let of = match relocation.of {
            Symbol::Global(index) => addresses.get(index as usize).copied().unwrap_or(0),
            Symbol::Function(index) => FUNCTION_ADDRESS + u64::from(index),
        };
        let value = of.wrapping_add_signed(relocation.offset).to_le_bytes();
        let source = match relocation.bytes {
            1 => &value[relocation.byte.min(7) as usize..][..1],
            count => &value[..count.min(8) as usize],
        };
        view.write(address.saturating_add(relocation.at), source)?;
    }
    Ok(())
}

fn c_name(name: &str) -> Result<Arc<std::ffi::CStr>> {
    CString::new(name).map(|name| name.into()).map_err(|_| Error::InvalidPtx)
}
