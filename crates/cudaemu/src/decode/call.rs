//! `call`: binds callee, arguments and results (PTX ISA, "Control Flow Instructions: call").

use super::Error;
use super::bind::{BoundOperands, OperandSite, integer};
use super::diagnostics::describe;
use super::function::FunctionDecoder;
use super::layout::ParamSize;
use super::names::{Entity, bits};
use super::state::UnlinkedConstant;
use crate::bytecode::{Action, ArgLocation, CallSite, Callee, Constant, Control};
use crate::isa::Value;
use crate::operands::{Class, Slot};
use crate::ptx::ast::{Instruction, Name, Operand, Space};

/// The device function that the emulator provides, and the bytes of its arguments; it has no result.
const ASSERT_FAIL: (&str, [u32; 5]) = ("__assertfail", [8, 8, 4, 8, 8]);

/// The operands of a call as written.
struct Parts<'a> {
    returns: &'a [Operand],
    callee: &'a Name,
    args: &'a [Operand],
}

impl FunctionDecoder<'_, '_> {
    pub(super) fn call(&mut self, instruction: &Instruction, guard: Slot, row: u32) -> Result<(), Error> {
        let line = instruction.line;
        let at = OperandSite { opcode: &instruction.opcode, line, place: 1 };
        let Parts { returns, callee: name, args } = parts(instruction)?;
        let (callee, params, results) = match self.look_up(name) {
            Some(Entity::Function(index)) => {
                let signature = &self.module.signatures[index as usize];
                if signature.entry {
                    return Err(Error::new(line, format!("`{name}` is a kernel, which cannot be called")));
                }
                let (params, results) = (signature.params.clone(), signature.returns.clone());
                self.body.calls.insert(index);
                (Callee::Function(index), params, results)
            }
            Some(Entity::Declared) if **name == *ASSERT_FAIL.0 => {
                let params = ASSERT_FAIL.1.map(|bytes| ParamSize { bytes, align: bytes, register: None });
                (Callee::AssertFail, params.to_vec(), Vec::new())
            }
            Some(Entity::Declared) => {
                return Err(Error::new(
                    line,
                    format!(
                        "the function `{name}` is declared, but the module does not define it, and the machine supplies only {}",
                        ASSERT_FAIL.0
                    ),
                ));
            }
            Some(_) => {
                return Err(Error::new(line, format!("`{name}` is no function; calls by address are not supported")));
            }
            None => return Err(Error::new(line, format!("no function `{name}` in this module"))),
        };
        // A call may drop all results, but must pass all arguments.
        if args.len() != params.len() || !returns.is_empty() && returns.len() != results.len() {
            return Err(Error::new(
                line,
                format!(
                    "`{name}` takes {} arguments and gives {} results, {} and {} came",
                    params.len(),
                    results.len(),
                    args.len(),
                    returns.len()
                ),
            ));
        }
        let args = args.iter().zip(&params).map(|(arg, size)| self.passed(at, name, arg, *size, true));
        let args = args.collect::<Result<Box<[_]>, _>>()?;
        let returns = returns.iter().zip(&results).map(|(result, size)| self.passed(at, name, result, *size, false));
        let returns = returns.collect::<Result<Box<[_]>, _>>()?;
        let site = Box::new(CallSite { callee, args, returns });
        self.push(Action::Control(Control::Call(site)), BoundOperands::default(), guard, line, row);
        Ok(())
    }

    /// Binds an argument or result: a `.param` variable of the caller, a register, or (arguments only) a number.
    fn passed(
        &mut self,
        at: OperandSite<'_>,
        callee: &str,
        operand: &Operand,
        size: ParamSize,
        arg: bool,
    ) -> Result<ArgLocation, Error> {
        let role = if arg { "argument" } else { "result" };
        let fail = |came: String| {
            let bytes = size.bytes;
            Err(Error::new(at.line, format!("this {role} of `{callee}` must have {bytes} bytes, not be {came}")))
        };
        if let Operand::Name(name) = operand {
            match self.look_up(name) {
                Some(Entity::Frame { space: Space::Param, offset, bytes }) if bytes == size.bytes => {
                    return Ok(ArgLocation::Param { offset, bytes });
                }
                Some(Entity::Frame { space: Space::Param, bytes, .. }) => {
                    return fail(format!("`{name}`, which has {bytes}"));
                }
                Some(Entity::Slot(slot)) => {
                    let bytes = bits(slot.class()).div_ceil(8);
                    return match bytes == size.bytes {
                        true => Ok(ArgLocation::Register(slot)),
                        false => fail(format!("the register `{name}`, which has {bytes}")),
                    };
                }
                _ => {}
            }
        }
        let value = match size.bytes {
            2 => Value::B16,
            4 => Value::B32,
            8 => Value::B64,
            _ => return fail(describe(operand)),
        };
        match (operand, integer(operand)) {
            (_, Some(number)) if arg => {
                let slot = self.source(at, &Operand::Int(number), value, false)?;
                Ok(ArgLocation::Register(slot))
            }
            (&Operand::F32(single), _) if arg && size.bytes == 4 => self.bits(at, Class::B32, u64::from(single)),
            (&Operand::F64(double), _) if arg && size.bytes == 8 => self.bits(at, Class::B64, double),
            _ => fail(describe(operand)),
        }
    }

    fn bits(&mut self, at: OperandSite<'_>, class: Class, bits: u64) -> Result<ArgLocation, Error> {
        Ok(ArgLocation::Register(self.constant(class, UnlinkedConstant::Known(Constant::Bits(bits)), at.line)?))
    }
}

/// Splits `call (results), callee, (arguments)`; everything but the callee is optional.
fn parts(instruction: &Instruction) -> Result<Parts<'_>, Error> {
    let (returns, rest) = leading_list(&instruction.operands);
    if let [Operand::Name(callee), rest @ ..] = rest
        && let (args, []) = leading_list(rest)
    {
        return Ok(Parts { returns, callee, args });
    }
    let form = "(results), function, (arguments)";
    Err(Error::new(instruction.line, format!("the operands of `{}` must be: {form}", instruction.opcode)))
}

fn leading_list(operands: &[Operand]) -> (&[Operand], &[Operand]) {
    match operands {
        [Operand::List(items), rest @ ..] => (items, rest),
        _ => (&[], operands),
    }
}
