//! Decoding of a module: declares its names, decodes its functions, links them.

use std::collections::HashMap;
use std::sync::Arc;

use super::Error;
use super::function::decode_function;
use super::layout::param_size;
use super::link::link;
use super::names::Entity;
use super::state::{ModuleState, Signature};
use crate::bytecode::DecodedModule;
use crate::isa::{InstructionTable, table};
use crate::ptx::ast::{self, Name, Variable};

/// Decodes a module. `source` is its PTX text; reports quote lines of it.
pub fn decode(module: &ast::Module, source: &str) -> Result<DecodedModule, Error> {
    decode_with(module, source, table())
}

/// As [`decode`], with another instruction table.
pub(crate) fn decode_with(
    module: &ast::Module,
    source: &str,
    table: &InstructionTable,
) -> Result<DecodedModule, Error> {
    let lines: Vec<Arc<str>> = source.lines().map(Arc::from).collect();
    let mut code = DecodedModule { target: module.target, ..DecodedModule::default() };
    match decode_module(module, table, &mut code) {
        Ok(()) => {
            code.lines = lines;
            Ok(code)
        }
        Err(error) => Err(error.quoting(&lines)),
    }
}

fn decode_module(module: &ast::Module, table: &InstructionTable, code: &mut DecodedModule) -> Result<(), Error> {
    if module.address_size != 64 {
        return Err(Error::new(0, format!(".address_size must be 64, not {}", module.address_size)));
    }
    let mut state = ModuleState {
        table,
        version: module.version,
        target: module.target,
        names: HashMap::new(),
        globals: Vec::new(),
        shared: Vec::new(),
        signatures: Vec::new(),
        frame_align: 16,
    };
    let functions: Vec<&ast::Function> = module.functions.iter().filter(|function| function.body.is_some()).collect();
    for (index, function) in functions.iter().enumerate() {
        if function.cluster.is_some_and(|extents| extents.iter().any(|&extent| extent > 1)) {
            let message =
                format!("`{}` must run in clusters of several blocks, which this machine has not", function.name);
            return Err(Error::new(function.line, message));
        }
        state.define(&function.name, Entity::Function(index as u32), function.line)?;
        let sizes = |list: &[Variable]| list.iter().map(param_size).collect::<Result<Vec<_>, _>>();
        let (returns, params) = match function.entry {
            true => (Vec::new(), Vec::new()),
            false => (sizes(&function.returns)?, sizes(&function.params)?),
        };
        state.signatures.push(Signature { returns, params, entry: function.entry });
    }
    for function in module.functions.iter().filter(|function| function.body.is_none()) {
        state.names.entry(function.name.clone()).or_insert(Entity::Declared);
    }
    for variable in &module.variables {
        let entity = state.place_variable(variable)?;
        // A declaration adds nothing to an existing definition.
        if matches!(entity, Entity::Undefined) {
            state.names.entry(variable.name.clone()).or_insert(entity);
        } else {
            state.define(&variable.name, entity, variable.line)?;
        }
    }
    for variable in &module.variables {
        if let Some(entity) = state.names.get(&variable.name).copied() {
            state.initialise(&entity, variable)?;
        }
    }
    let bodies =
        functions.iter().map(|function| decode_function(&mut state, function)).collect::<Result<Vec<_>, _>>()?;
    link(state, &functions, bodies, code)
}

impl ModuleState<'_> {
    fn define(&mut self, name: &Name, entity: Entity, line: u32) -> Result<(), Error> {
        match self.names.insert(name.clone(), entity) {
            None | Some(Entity::Undefined | Entity::Declared) => Ok(()),
            Some(Entity::DynamicShared(_)) if matches!(self.names.get(name), Some(Entity::DynamicShared(_))) => Ok(()),
            Some(_) => Err(Error::new(line, format!("`{name}` is defined twice in this module"))),
        }
    }
}
