//! Function bodies: decodes scopes, labels and instructions.

use std::collections::HashMap;

use super::Error;
use super::bind::{BoundOperands, too_many};
use super::layout::{MAX_FRAME, MAX_PARAMS, MAX_PARAMS_8_1, ParamSize, align_up, param_size, sized};
use super::names::{Entity, RegisterRange, Scopes, SlotAllocator, class_of};
use super::state::{ModuleState, UnlinkedConstant, UnlinkedFunction};
use crate::bytecode::{Action, Control, Convergence, Inst, Param};
use crate::isa::{Decode, Row};
use crate::operands::{Args, Class, Slot};
use crate::ptx::ast::{self, Instruction, Name, Operand, Space, Statement, Variable};

/// Maximum nesting of `{ … }` scopes. Compilers nest two or three levels.
const MAX_DEPTH: usize = 64;

/// State while one function is decoded.
#[derive(Debug)]
pub(super) struct FunctionDecoder<'a, 'm> {
    pub(super) module: &'a mut ModuleState<'m>,
    pub(super) scopes: Scopes,
    pub(super) used: SlotAllocator,
    pub(super) constants: HashMap<(Class, UnlinkedConstant), Slot>,
    pub(super) body: UnlinkedFunction,
    /// Instruction index of each label, by label number; `None` until the label is reached.
    labels: Vec<Option<u32>>,
    frame: u64,
    /// The bytes that a `used_bytes_mask` pragma marks for the next instruction, if that is a load.
    used_bytes: Option<u32>,
    /// Whether the function is a kernel.
    entry: bool,
}

/// Decodes the body of a function. Branch targets, slots and shared offsets are relative to the function; the linker moves
/// them.
pub(super) fn decode_function(
    module: &mut ModuleState<'_>,
    function: &ast::Function,
) -> Result<UnlinkedFunction, Error> {
    let mut decoder = FunctionDecoder {
        module,
        scopes: Scopes::default(),
        used: SlotAllocator::default(),
        constants: HashMap::new(),
        body: UnlinkedFunction::default(),
        labels: Vec::new(),
        frame: 0,
        used_bytes: None,
        entry: function.entry,
    };
    decoder.scopes.enter();
    decoder.parameters(function)?;
    decoder.block(function.body.as_deref().unwrap_or_default(), function.line)?;
    decoder.finish(function)
}

impl FunctionDecoder<'_, '_> {
    /// Resolves a name in the current scope.
    pub(super) fn look_up(&mut self, name: &Name) -> Option<Entity> {
        self.scopes.look_up(name, &mut self.used).or_else(|| self.module.names.get(name).copied())
    }

    fn parameters(&mut self, function: &ast::Function) -> Result<(), Error> {
        if !function.entry {
            self.body.returns = self.function_params(&function.returns)?;
            self.body.params = self.function_params(&function.params)?;
            return Ok(());
        }
        if let Some(result) = function.returns.first() {
            return Err(Error::new(
                result.line,
                format!("the kernel `{}` has a result; kernels have none", function.name),
            ));
        }
        let limit = match self.module.version >= (8, 1) && self.module.target >= 70 {
            true => MAX_PARAMS_8_1,
            false => MAX_PARAMS,
        };
        let mut end = 0;
        for param in &function.params {
            if param.space != Space::Param {
                return Err(Error::new(
                    param.line,
                    format!("`{}` must be a .param: a kernel has no others", param.name),
                ));
            }
            let (bytes, align) = sized(param, limit)?;
            let offset = align_up(end, align);
            end = offset + u64::from(bytes);
            if end > limit {
                return Err(Error::new(
                    param.line,
                    format!("the parameters of `{}` take more than {limit} bytes, PTX's limit", function.name),
                ));
            }
            let offset = offset as u32;
            self.declare(&param.name, Entity::KernelParam(offset), param.line)?;
            self.body.params.push(Param { register: None, offset, bytes, align });
        }
        self.body.param_bytes = end as u32;
        Ok(())
    }

    fn function_params(&mut self, params: &[Variable]) -> Result<Vec<Param>, Error> {
        let mut placed = Vec::with_capacity(params.len());
        for param in params {
            let ParamSize { bytes, align, register } = param_size(param)?;
            placed.push(match register {
                Some(class) => {
                    let slot = self.used.register(class).ok_or_else(|| too_many(param.line))?;
                    self.declare(&param.name, Entity::Slot(slot), param.line)?;
                    Param { register: Some(slot), offset: 0, bytes, align }
                }
                None => Param { register: None, offset: self.frame_variable(param, Space::Param)?, bytes, align },
            });
        }
        Ok(placed)
    }

    /// Declares a variable of the frame; returns its offset in bytes.
    fn frame_variable(&mut self, variable: &Variable, space: Space) -> Result<u32, Error> {
        let (bytes, align) = sized(variable, MAX_FRAME)?;
        let offset = align_up(self.frame, align);
        self.frame = offset + u64::from(bytes);
        if self.frame > MAX_FRAME {
            return Err(Error::new(
                variable.line,
                format!("with `{}` the function's local variables take more than {MAX_FRAME} bytes", variable.name),
            ));
        }
        self.module.frame_align = self.module.frame_align.max(align);
        let offset = offset as u32;
        self.declare(&variable.name, Entity::Frame { space, offset, bytes }, variable.line)?;
        Ok(offset)
    }

    fn declare(&mut self, name: &Name, entity: Entity, line: u32) -> Result<(), Error> {
        match self.scopes.innermost().declare(name, entity) {
            true => Ok(()),
            false => Err(Error::new(line, format!("`{name}` is declared twice in one scope"))),
        }
    }

    fn block(&mut self, statements: &[Statement], line: u32) -> Result<(), Error> {
        if self.scopes.depth() > MAX_DEPTH {
            return Err(Error::new(line, format!("blocks are nested deeper than {MAX_DEPTH}")));
        }
        self.scopes.enter();
        self.forward_names(statements)?;
        for statement in statements {
            match statement {
                Statement::Label(name, _) => {
                    let here = self.body.insts.len() as u32;
                    if let Some(&number) = self.scopes.innermost().labels.get(name) {
                        self.labels[number] = Some(here);
                    }
                }
                Statement::Registers { ty, name, count, line } => self.registers(*ty, name, *count, *line)?,
                Statement::Variable(variable) => self.variable(variable)?,
                Statement::UsedBytes(mask) => self.used_bytes = Some(*mask),
                Statement::Block(inner) => self.block(inner, line)?,
                Statement::Instruction(instruction) => self.instruction(instruction)?,
            }
        }
        self.scopes.leave();
        Ok(())
    }

    /// Declares the labels of a scope in advance: they may be used before their definition.
    fn forward_names(&mut self, statements: &[Statement]) -> Result<(), Error> {
        for statement in statements {
            if let Statement::Label(name, line) = statement {
                let number = self.labels.len();
                self.labels.push(None);
                if self.scopes.innermost().labels.insert(name.clone(), number).is_some() {
                    return Err(Error::new(*line, format!("the label `{name}` stands twice in one scope")));
                }
            }
        }
        Ok(())
    }

    fn label(&self, name: &Name, line: u32) -> Result<usize, Error> {
        self.scopes
            .find(|scope| scope.labels.get(name).copied())
            .ok_or_else(|| Error::new(line, format!("no label `{name}` in this scope of the function")))
    }

    fn registers(&mut self, ty: ast::Type, name: &Name, count: Option<u32>, line: u32) -> Result<(), Error> {
        let class = class_of(ty);
        let Some(count) = count else { return self.declare(name, Entity::Register(class), line) };
        match self.scopes.innermost().declare_range(name, RegisterRange { class, count }) {
            true => Ok(()),
            false => Err(Error::new(line, format!("`{name}<…>` is declared twice in one scope"))),
        }
    }

    fn variable(&mut self, variable: &Variable) -> Result<(), Error> {
        match variable.space {
            Space::Reg => self.registers(variable.ty, &variable.name, None, variable.line),
            Space::Local | Space::Param => self.frame_variable(variable, variable.space).map(drop),
            Space::Global | Space::Const | Space::Shared => {
                let entity = self.module.place_variable(variable)?;
                self.module.initialise(&entity, variable)?;
                self.declare(&variable.name, entity, variable.line)
            }
        }
    }

    fn instruction(&mut self, instruction: &Instruction) -> Result<(), Error> {
        let table = self.module.table;
        let (opcode, line) = (&*instruction.opcode, instruction.line);
        // In a device function `.param` means its frame, even if the address is in a register.
        let candidates = match opcode.split_once(".param.") {
            Some((head, rest)) if !self.entry => table.candidates(&format!("{head}.param::func.{rest}")),
            _ => table.candidates(opcode),
        };
        let Some((index, row)) = candidates.first().and_then(|&index| Some((index, table.row(index)?))) else {
            return Err(self.no_instruction(opcode, line));
        };
        let guard = self.guard(instruction)?;
        self.body.waits_for_grids |= opcode == "griddepcontrol.wait";
        match &row.decode {
            Decode::Plain(_) => self.plain(instruction, guard, candidates),
            Decode::Move(value) => self.mov(instruction, guard, index, *value),
            Decode::Branch => {
                let [Operand::Name(label)] = &*instruction.operands else {
                    return Err(Error::new(line, format!("`{opcode}` takes one operand, the label it goes to")));
                };
                let target = self.label(label, line)? as u32;
                self.push(Action::Control(Control::Branch(target)), BoundOperands::default(), guard, line, index);
                Ok(())
            }
            Decode::Call => self.call(instruction, guard, index),
        }
    }

    pub(super) fn no_instruction(&self, opcode: &str, line: u32) -> Error {
        let closest = self.module.table.closest(opcode, 3);
        let hint = match closest.is_empty() {
            true => String::new(),
            false => format!("; the closest supported ones: {}", closest.join(", ")),
        };
        Error::new(line, format!("no instruction `{opcode}` in this machine{hint}"))
    }

    fn guard(&mut self, instruction: &Instruction) -> Result<Slot, Error> {
        let Some((name, negated)) = &instruction.guard else { return Ok(Slot::NONE) };
        match self.look_up(name) {
            Some(Entity::Slot(slot)) if slot.class() == Class::Pred => Ok(if *negated { slot.negate() } else { slot }),
            Some(_) => Err(Error::new(instruction.line, format!("the guard `{name}` is not a predicate register"))),
            None => Err(Error::new(instruction.line, format!("no predicate register `{name}` is declared here"))),
        }
    }

    /// Decodes an instruction without special operand forms. If several rows have its name, the first one whose operand kinds
    /// match applies.
    pub(super) fn plain(&mut self, instruction: &Instruction, guard: Slot, candidates: &[u32]) -> Result<(), Error> {
        let table = self.module.table;
        let (opcode, line) = (&*instruction.opcode, instruction.line);
        let mut refused = None;
        for &index in candidates {
            let Some(Row { decode: Decode::Plain(action), .. }) = table.row(index) else { continue };
            let Some(row) = table.row(index) else { continue };
            match self.bind(opcode, line, row, &instruction.operands) {
                Ok(bound) => {
                    self.push(action.clone(), bound, guard, line, index);
                    return Ok(());
                }
                // Prefer the error of the row with the right number of operands: it is more useful than "wrong number of
                // operands".
                Err(error) if refused.is_none() || row.operands.len() == instruction.operands.len() => {
                    refused = Some(error);
                }
                Err(_) => {}
            }
        }
        Err(refused.unwrap_or_else(|| self.no_instruction(opcode, line)))
    }

    /// Appends an instruction. Its branch targets are still label numbers.
    pub(super) fn push(&mut self, action: Action, mut bound: BoundOperands, guard: Slot, line: u32, row: u32) {
        let name = self.module.table.row(row).map_or("", |row| &row.name);
        let used_bytes = self.used_bytes.take();
        if name.starts_with("ld.") {
            bound.args.padding = used_bytes.map_or(0, |used| !used);
        }
        if let Some(shared) = bound.shared {
            self.body.shared_addresses.push((self.body.insts.len(), shared));
        }
        let gather = Convergence::of(name, &action, &bound.args);
        self.body.insts.push(Inst { action, args: bound.args, guard, convergence: gather, line, row });
        self.body.dests.push(bound.dests);
    }

    fn finish(mut self, function: &ast::Function) -> Result<UnlinkedFunction, Error> {
        self.scopes.leave();
        let end = self.body.insts.len() as u32;
        let ends = self.body.insts.last().is_some_and(|last| {
            last.guard.is_none() && matches!(last.action, Action::Control(Control::Return | Control::Exit))
        });
        if !ends || self.labels.contains(&Some(end)) {
            let line = self.body.insts.last().map_or(function.line, |last| last.line);
            let Some((row, _)) = self.module.table.find("ret") else { return Err(self.no_instruction("ret", line)) };
            self.body.insts.push(Inst {
                action: Action::Control(Control::Return),
                args: Args::default(),
                guard: Slot::NONE,
                convergence: Convergence::None,
                line,
                row,
            });
            self.body.dests.push(0);
        }
        let pc = |label: u32| self.labels.get(label as usize).copied().flatten().unwrap_or(end);
        for inst in &mut self.body.insts {
            if let Action::Control(Control::Branch(target)) = &mut inst.action {
                *target = pc(*target);
            }
        }
        let mut body = self.body;
        body.counts = self.used.counts;
        body.own = self.used.own;
        body.frame_bytes = self.frame as u32;
        Ok(body)
    }
}
