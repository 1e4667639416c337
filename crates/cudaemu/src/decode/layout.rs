//! Layout of variables: sizes, alignments and initial bytes.

use super::Error;
use super::diagnostics::space_name;
use super::names::{Entity, class_of};
use super::state::{ModuleState, SharedVariable};
use crate::bytecode::Global;
use crate::operands::Class;
use crate::ptx::ast::{Linkage, Space, Type, Variable};

/// Maximum bytes of a kernel's static shared memory, as in ptxas. More needs dynamic shared memory.
pub(super) const MAX_STATIC_SHARED: u64 = 48 << 10;
/// Maximum bytes of local memory per thread (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
pub(super) const MAX_FRAME: u64 = 512 << 10;
/// Maximum bytes of a kernel's parameters; [`MAX_PARAMS_8_1`] applies from PTX 8.1 on for sm_70 and later (PTX ISA, "Kernel
/// Function Parameters").
pub(super) const MAX_PARAMS: u64 = 4096;
pub(super) const MAX_PARAMS_8_1: u64 = 32764;
/// Maximum bytes of a global variable: larger than any device's memory, so a larger size must be a mistake.
const MAX_GLOBAL: u64 = 1 << 42;
/// Maximum alignment in bytes: larger than any hardware or tool requires.
const MAX_ALIGN: u32 = 1 << 16;

/// Size of a parameter, and its register class if it is declared `.reg`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ParamSize {
    pub(super) bytes: u32,
    pub(super) align: u32,
    pub(super) register: Option<Class>,
}

/// Bytes and alignment of a variable in memory; an open extent (`[]`) counts as 0 bytes.
pub(super) fn memory_size(variable: &Variable) -> Result<(u64, u32), Error> {
    let fail = |message: String| Err(Error::new(variable.line, message));
    let name = &variable.name;
    if variable.ty == Type::Pred {
        return fail(format!("`{name}` is a predicate: predicates exist in registers only"));
    }
    let element = u64::from(variable.ty.bytes()) * u64::from(variable.vector.max(1));
    let bytes = variable.dims.iter().try_fold(element, |bytes, &extent| bytes.checked_mul(extent));
    let Some(bytes) = bytes.filter(|&bytes| bytes <= MAX_GLOBAL) else {
        return fail(format!("`{name}` is larger than any memory: at most {MAX_GLOBAL} bytes are possible"));
    };
    let align = if variable.align == 0 { element as u32 } else { variable.align };
    if !align.is_power_of_two() || align > MAX_ALIGN {
        return fail(format!("`{name}` has alignment {align}: a power of two up to {MAX_ALIGN} was expected"));
    }
    Ok((bytes, align))
}

/// As [`memory_size`], for a variable that needs a size of at most `limit` bytes.
pub(super) fn sized(variable: &Variable, limit: u64) -> Result<(u32, u32), Error> {
    let (bytes, align) = memory_size(variable)?;
    if bytes == 0 {
        return Err(Error::new(variable.line, format!("`{}` has no size: an extent is missing or 0", variable.name)));
    }
    match u32::try_from(bytes) {
        Ok(small) if bytes <= limit => Ok((small, align)),
        _ => Err(Error::new(
            variable.line,
            format!("`{}` takes {bytes} bytes, more than the {limit} possible here", variable.name),
        )),
    }
}

/// Size of a parameter or result of a function.
pub(super) fn param_size(variable: &Variable) -> Result<ParamSize, Error> {
    if variable.space == Space::Reg {
        let class = class_of(variable.ty);
        let bytes = variable.ty.bytes().max(1);
        return Ok(ParamSize { bytes, align: bytes, register: Some(class) });
    }
    let (bytes, align) = sized(variable, MAX_FRAME)?;
    Ok(ParamSize { bytes, align, register: None })
}

/// Rounds `offset` up to a multiple of `align`, a power of two.
pub(super) fn align_up(offset: u64, align: u32) -> u64 {
    offset.next_multiple_of(u64::from(align.max(1)))
}

impl ModuleState<'_> {
    /// Allocates a module-scope, shared or constant variable and returns the entity for its name. [`ModuleState::initialise`]
    /// fills in its initialiser later, when all names are declared.
    pub(super) fn place_variable(&mut self, variable: &Variable) -> Result<Entity, Error> {
        let fail = |message: String| Err(Error::new(variable.line, message));
        let name = &variable.name;
        match variable.space {
            Space::Global | Space::Const => {
                if variable.linkage == Linkage::Extern {
                    return Ok(Entity::Undefined);
                }
                let (bytes, align) = memory_size(variable)?;
                let given = variable.init.len() as u64 * u64::from(variable.ty.bytes());
                // The initialiser determines an open extent.
                let bytes = if variable.dims.first() == Some(&0) { given } else { bytes };
                if bytes == 0 {
                    return fail(format!("`{name}` has no size: an extent is missing or 0"));
                }
                let index = self.globals.len() as u32;
                self.globals.push(Global {
                    name: name.clone(),
                    constant: variable.space == Space::Const,
                    bytes,
                    align,
                    init: None,
                });
                Ok(Entity::Global { index, space: variable.space })
            }
            Space::Shared if variable.linkage == Linkage::Extern => Ok(Entity::DynamicShared(memory_size(variable)?.1)),
            Space::Shared => {
                let (bytes, align) = sized(variable, MAX_STATIC_SHARED)?;
                self.shared.push(SharedVariable { bytes, align });
                Ok(Entity::Shared(self.shared.len() - 1))
            }
            Space::Local | Space::Param | Space::Reg => {
                fail(format!("`{name}` is a {} variable, which only a function can have", space_name(variable.space)))
            }
        }
    }

    /// Computes the initial bytes of a variable that has its place.
    pub(super) fn initialise(&mut self, entity: &Entity, variable: &Variable) -> Result<(), Error> {
        if variable.init.is_empty() {
            return Ok(());
        }
        let fail = |message: String| Err(Error::new(variable.line, message));
        let name = &variable.name;
        let &Entity::Global { index, .. } = entity else {
            return fail(format!("`{name}` has an initialiser, which only global and constant variables can have"));
        };
        let element = u64::from(variable.ty.bytes());
        let given = variable.init.len() as u64 * element;
        let room = self.globals[index as usize].bytes;
        if given > room {
            return fail(format!("the initialiser of `{name}` has {given} bytes, the variable {room}"));
        }
        let bytes = |bits: &u64| u128::from(*bits).to_le_bytes().into_iter().take(element as usize);
        let bytes = variable.init.iter().flat_map(bytes).collect();
        let global = &mut self.globals[index as usize];
        global.init = Some(bytes);
        Ok(())
    }
}
