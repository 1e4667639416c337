//! `mov`: registers, numbers, special registers, addresses; packing and unpacking of vectors.

use super::Error;
use super::bind::{BoundOperands, OperandSite};
use super::function::FunctionDecoder;
use super::names::{Entity, bits, special_register};
use crate::isa::moves::copy;
use crate::isa::{Decode, Row, Value};
use crate::operands::{Base, Class, Slot};
use crate::ptx::ast::{Instruction, Name, Operand};

impl FunctionDecoder<'_, '_> {
    pub(super) fn mov(&mut self, instruction: &Instruction, guard: Slot, row: u32, value: Value) -> Result<(), Error> {
        let (opcode, line) = (&*instruction.opcode, instruction.line);
        let [to, from] = &*instruction.operands else {
            let came = instruction.operands.len();
            return Err(Error::new(line, format!("`{opcode}` takes 2 operands (destination, source), {came} came")));
        };
        let class = value.class();
        match (to, from) {
            (Operand::Vector(elements), _) => {
                return self.derived(instruction, guard, &vector_form(opcode, "unpack", elements.len(), class));
            }
            (_, Operand::Vector(elements)) => {
                return self.derived(instruction, guard, &vector_form(opcode, "pack", elements.len(), class));
            }
            _ => {}
        }
        let (name, offset) = match from {
            Operand::Name(name) => (Some(name), 0),
            Operand::Offset(name, offset) => (Some(name), *offset),
            _ => (None, 0),
        };
        if let Some(name) = name {
            match self.look_up(name) {
                Some(Entity::Frame { .. }) if matches!(class, Class::B32 | Class::B64) => {
                    let slot = self.dest(OperandSite { opcode, line, place: 1 }, to, value, false)?;
                    return self.frame_address(line, guard, slot, name, offset);
                }
                // A special register that changes while the warp runs (such as `%clock`) needs an instruction that reads it.
                None if name.starts_with('%') && special_register(name).is_none() => {
                    let form = format!("mov.u{}.{name}", bits(class));
                    if let [index, ..] = *self.module.table.candidates(&form) {
                        let mut bound = BoundOperands { dests: 1, ..BoundOperands::default() };
                        bound.args.s[0] = self.dest(OperandSite { opcode, line, place: 1 }, to, value, false)?;
                        return self.push_row(index, bound, guard, line);
                    }
                }
                _ => {}
            }
        }
        let mut bound = BoundOperands { dests: 1, ..BoundOperands::default() };
        bound.args.s[0] = self.dest(OperandSite { opcode, line, place: 1 }, to, value, false)?;
        bound.args.s[1] = self.source(OperandSite { opcode, line, place: 2 }, from, value, false)?;
        self.push(copy(value), bound, guard, line, row);
        Ok(())
    }

    /// Decodes an instruction by another row than its opcode names.
    fn derived(&mut self, instruction: &Instruction, guard: Slot, form: &str) -> Result<(), Error> {
        let candidates = self.module.table.candidates(form);
        if candidates.is_empty() {
            return Err(Error::new(
                instruction.line,
                format!("`{}` has no form for these vectors (`{form}`)", instruction.opcode),
            ));
        }
        self.plain(instruction, guard, candidates)
    }

    /// Emits the instruction that writes the address of a frame variable into a register.
    pub(super) fn frame_address(
        &mut self,
        line: u32,
        guard: Slot,
        to: Slot,
        name: &Name,
        offset: i64,
    ) -> Result<(), Error> {
        let Some(Entity::Frame { offset: start, .. }) = self.look_up(name) else {
            return Err(Error::new(line, format!("`{name}` is not a variable of the function's frame")));
        };
        let form = if to.class() == Class::B32 { "mov.u32.frame" } else { "mov.u64.frame" };
        let [index, ..] = *self.module.table.candidates(form) else { return Err(self.no_instruction(form, line)) };
        let mut bound = BoundOperands { dests: 1, ..BoundOperands::default() };
        bound.args.s[0] = to;
        bound.args.base = Base::Frame;
        bound.args.offset = offset
            .checked_add(i64::from(start))
            .ok_or_else(|| Error::new(line, format!("the offset {offset} from `{name}` leaves the address space")))?;
        self.push_row(index, bound, guard, line)
    }

    /// Emits the instruction of a row with operands that are already bound.
    fn push_row(&mut self, index: u32, mut bound: BoundOperands, guard: Slot, line: u32) -> Result<(), Error> {
        let Some(Row { decode: Decode::Plain(action), k, .. }) = self.module.table.row(index) else {
            return Err(Error::new(line, "the emulator is at fault: a form of mov is no plain row"));
        };
        bound.args.k = *k;
        self.push(action.clone(), bound, guard, line, index);
        Ok(())
    }
}

/// The row of a `mov` with a vector operand: `mov.b64` with two elements is `mov.b64.pack2.b32` or `mov.b64.unpack2.b32`.
fn vector_form(opcode: &str, verb: &str, count: usize, class: Class) -> String {
    format!("{opcode}.{verb}{count}.b{}", bits(class) as usize / count.max(1))
}
