//! Functions: their attributes, and launch limits that follow from these.

use std::sync::Arc;

use super::memory::{AllocationOrigin, memory_error};
use super::{Driver, DriverState};
use crate::bytecode::{self, DecodedModule};
use crate::config::spec::{
    DEFAULT_SHARED_PER_BLOCK, MAX_THREADS_PER_BLOCK, REGISTER_ALLOC_UNIT, REGISTERS_PER_SM, Spec, WARP_SIZE,
};
use crate::error::{Error, Result};
use crate::handle::{FunctionId, ModuleId};

/// A kernel of a module.
#[derive(Clone, Debug)]
pub struct Function {
    /// The module that contains it.
    pub module: ModuleId,
    /// The module's code.
    pub code: Arc<DecodedModule>,
    /// Index in [`DecodedModule::functions`].
    pub index: usize,
    /// Attributes that the program can set.
    pub settings: FunctionSettings,
    /// Address of its code; `None` until it is loaded.
    pub code_address: Option<u64>,
}

/// Attributes of a function that `cuFuncSetAttribute` can set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FunctionSettings {
    /// Maximum bytes of dynamic shared memory in a launch.
    pub max_dynamic_shared: u32,
    /// Preferred carveout of shared memory in percent, or -1.
    pub carveout: i32,
    /// Cluster attributes: size must be set, width, height, depth, non-portable size allowed, scheduling policy.
    pub cluster: [u32; 6],
}

/// Resources of a multiprocessor that one block occupies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockResources {
    /// Registers per thread.
    pub registers: u32,
    /// Bytes of static shared memory.
    pub static_shared: u32,
    /// Maximum threads of a block.
    pub max_threads: u32,
}

impl Function {
    /// The decoded function.
    pub fn kernel(&self) -> &bytecode::Function {
        &self.code.functions[self.index]
    }

    /// The attributes directly after loading.
    pub fn settings(kernel: &bytecode::Function) -> FunctionSettings {
        FunctionSettings {
            max_dynamic_shared: DEFAULT_SHARED_PER_BLOCK.saturating_sub(kernel.shared_bytes),
            carveout: -1,
            cluster: [0; 6],
        }
    }

    /// Resources that a block of this function occupies.
    pub fn block_resources(&self) -> BlockResources {
        let kernel = self.kernel();
        let registers = kernel.reported_registers.clamp(8, 255);
        let by_registers = REGISTERS_PER_SM / registers_per_warp(registers) * WARP_SIZE;
        let declared = kernel
            .max_threads
            .map_or(MAX_THREADS_PER_BLOCK, |threads| threads.into_iter().fold(1, u32::saturating_mul));
        BlockResources {
            registers,
            static_shared: kernel.shared_bytes,
            max_threads: declared.min(by_registers).min(MAX_THREADS_PER_BLOCK),
        }
    }

    /// `cuFuncGetAttribute`
    pub fn attribute(&self, attribute: u32, spec: &Spec) -> Result<i32> {
        let kernel = self.kernel();
        let needs = self.block_resources();
        let constant =
            self.code.globals.iter().filter(|global| global.constant).map(|global| global.bytes).sum::<u64>();
        Ok(match attribute {
            0 => needs.max_threads as i32,
            1 => kernel.shared_bytes as i32,
            2 => i32::try_from(constant).unwrap_or(i32::MAX),
            3 => kernel.frame_bytes as i32,
            4 => needs.registers as i32,
            5 => self.code.target as i32,
            6 => spec.sm() as i32,
            7 => 0,
            8 => self.settings.max_dynamic_shared as i32,
            9 => self.settings.carveout,
            10..=15 => self.settings.cluster[attribute as usize - 10] as i32,
            16 | 17 => 0,
            _ => return Err(Error::InvalidValue),
        })
    }

    /// `cuFuncSetAttribute`
    pub fn set_attribute(&mut self, attribute: u32, value: i32, spec: &Spec) -> Result<()> {
        let room = spec.shared_optin.saturating_sub(self.kernel().shared_bytes);
        match (attribute, u32::try_from(value)) {
            (8, Ok(bytes)) if bytes <= room => self.settings.max_dynamic_shared = bytes,
            (9, _) if (-1..=100).contains(&value) => self.settings.carveout = value,
            (11..=15, Ok(value)) if spec.capability.0 >= 9 => self.settings.cluster[attribute as usize - 10] = value,
            _ => return Err(Error::InvalidValue),
        }
        Ok(())
    }
}

/// Registers allocated to a warp: `registers` for each thread, rounded up to the allocation granularity.
pub fn registers_per_warp(registers: u32) -> u32 {
    (registers * WARP_SIZE).next_multiple_of(REGISTER_ALLOC_UNIT)
}

impl DriverState {
    /// Loads a function, if drivers load functions on their own (`CUDAEMU_FUNCTION_BYTES`) and this one is not loaded. Returns whether it
    /// was loaded now.
    pub fn load_function(&mut self, driver: &Driver, id: FunctionId) -> Result<bool> {
        let function = self.functions.get(id)?;
        let context = self.modules.get(function.module)?.context;
        self.check_alive(context)?;
        let (Some(bytes), None) = (driver.config.hardware.function_bytes, function.code_address) else {
            return Ok(false);
        };
        let device = self.contexts.get(context)?.device as u32;
        let code = driver.space().alloc(device, bytes, "a kernel's code").map_err(|error| memory_error(&error))?;
        self.memory.add(&code, context, AllocationOrigin::Global);
        self.functions.get_mut(id)?.code_address = Some(code.base());
        self.note_synchronous_allocation();
        Ok(true)
    }

    /// As [`DriverState::load_function`], for a launch or a graph node, which finishes the loading.
    pub(super) fn load_function_lazily(&mut self, driver: &Driver, id: FunctionId) -> Result<()> {
        if self.load_function(driver, id)? {
            self.hardware.lazy_loads += 1;
        }
        Ok(())
    }

    /// A function and the limits of its device.
    pub fn function<'a>(&'a self, driver: &'a Driver, id: FunctionId) -> Result<(&'a Function, &'a Spec)> {
        let function = self.functions.get(id)?;
        let module = self.modules.get(function.module)?;
        self.check_alive(module.context)?;
        let device = self.contexts.get(module.context)?.device;
        Ok((function, &driver.config.devices[device].spec))
    }
}
