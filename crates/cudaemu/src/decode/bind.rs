//! Operand binding: turns the operands of the syntax tree into register slots, by the operand kinds of an instruction table
//! row.

use super::Error;
use super::diagnostics::{describe, register, register_from, source_kind, space_name, wrong_count};
use super::function::FunctionDecoder;
use super::names::{Entity, bits, special_register};
use super::state::UnlinkedConstant;
use crate::bytecode::Constant;
use crate::isa::{Operand as Kind, Row, Value};
use crate::operands::{Args, Base, Class, Slot};
use crate::ptx::ast::{Name, Operand, Space};

/// An instruction's operands after binding.
#[derive(Debug, Default)]
pub(super) struct BoundOperands {
    pub(super) args: Args,
    /// Bit set: which of the flattened operands are destinations.
    pub(super) dests: u64,
    /// The static shared variable whose offset the linker adds to the address operand.
    pub(super) shared: Option<usize>,
}

/// The instruction and operand that is bound now, for error messages.
#[derive(Clone, Copy, Debug)]
pub(super) struct OperandSite<'a> {
    pub(super) opcode: &'a str,
    pub(super) line: u32,
    /// Position of the operand in the text, from 1.
    pub(super) place: usize,
}

impl OperandSite<'_> {
    fn expected(&self, what: impl std::fmt::Display, came: impl std::fmt::Display) -> Error {
        let Self { opcode, line, place } = self;
        Error::new(*line, format!("operand {place} of `{opcode}` must be {what}, not {came}"))
    }
}

/// The slots bound so far.
#[derive(Debug, Default)]
struct Flat {
    slots: Vec<Slot>,
    imm: Vec<i64>,
    bound: BoundOperands,
    addresses: usize,
}

impl Flat {
    fn dest(&mut self, slot: Slot) {
        self.bound.dests |= 1u64.checked_shl(self.slots.len() as u32).unwrap_or(0);
        self.slots.push(slot);
    }

    fn vector(&mut self, count: u8) {
        if self.bound.args.vector == 0 {
            self.bound.args.vector = count;
        }
    }
}

impl FunctionDecoder<'_, '_> {
    /// Binds all operands of an instruction to the kinds of a row.
    pub(super) fn bind(
        &mut self,
        opcode: &str,
        line: u32,
        row: &Row,
        operands: &[Operand],
    ) -> Result<BoundOperands, Error> {
        let mut flat = Flat::default();
        let mut rest = operands.iter();
        for kind in &row.operands {
            let place = operands.len() - rest.len() + 1;
            let at = OperandSite { opcode, line, place };
            match (rest.next(), kind) {
                (Some(operand), _) => self.operand(at, row, kind, operand, &mut flat)?,
                (None, Kind::OptIn(_)) => flat.slots.push(Slot::NONE),
                (None, Kind::OptImm(default)) => flat.imm.push(*default),
                (None, _) => return Err(wrong_count(opcode, line, row, operands.len())),
            }
        }
        if rest.next().is_some() {
            return Err(wrong_count(opcode, line, row, operands.len()));
        }
        let Flat { slots, imm, mut bound, .. } = flat;
        let args = &mut bound.args;
        args.k = row.k;
        for (place, &slot) in args.s.iter_mut().zip(&slots) {
            *place = slot;
        }
        if slots.len() > args.s.len() {
            args.all = slots.into();
        }
        if imm.len() > args.imm.len() {
            return Err(Error::new(line, format!("the emulator is at fault: too many immediates for `{}`", row.name)));
        }
        for (place, value) in args.imm.iter_mut().zip(imm) {
            *place = value;
        }
        Ok(bound)
    }

    fn operand(
        &mut self,
        at: OperandSite<'_>,
        row: &Row,
        kind: &Kind,
        operand: &Operand,
        flat: &mut Flat,
    ) -> Result<(), Error> {
        match *kind {
            Kind::Out(value) => flat.dest(self.dest(at, operand, value, false)?),
            Kind::OutWide(value) => flat.dest(self.dest(at, operand, value, true)?),
            Kind::OutPair(first, second) => match operand {
                Operand::Pair(a, b) => {
                    flat.dest(self.dest(at, a, first, false)?);
                    flat.dest(self.dest(at, b, second, false)?);
                }
                _ => {
                    flat.dest(self.dest(at, operand, first, false)?);
                    flat.dest(Slot::NONE);
                }
            },
            Kind::In(value) | Kind::OptIn(value) => flat.slots.push(self.source(at, operand, value, false)?),
            Kind::InWide(value) => flat.slots.push(self.source(at, operand, value, true)?),
            Kind::InPred => {
                let slot = match operand {
                    Operand::Not(name) => self.source(at, &Operand::Name(name.clone()), Value::Pred, false)?.negate(),
                    _ => self.source(at, operand, Value::Pred, false)?,
                };
                flat.slots.push(slot);
            }
            Kind::Imm | Kind::OptImm(_) => match integer(operand) {
                Some(value) => flat.imm.push(value as i64),
                None => return Err(at.expected("a number", describe(operand))),
            },
            Kind::OutVector(count, value) => self.vector(at, operand, count, flat, |this, operand, flat| {
                flat.dest(this.dest(at, operand, value, false)?);
                Ok(())
            })?,
            Kind::OutWideVector(count, value) => self.vector(at, operand, count, flat, |this, operand, flat| {
                flat.dest(this.dest(at, operand, value, true)?);
                Ok(())
            })?,
            Kind::InVector(count, value) => self.vector(at, operand, count, flat, |this, operand, flat| {
                flat.slots.push(this.source(at, operand, value, false)?);
                Ok(())
            })?,
            Kind::InWideVector(count, value) => self.vector(at, operand, count, flat, |this, operand, flat| {
                flat.slots.push(this.source(at, operand, value, true)?);
                Ok(())
            })?,
            Kind::Address => {
                let Operand::Address { base, offset } = operand else {
                    return Err(at.expected("an address in brackets", describe(operand)));
                };
                let space = space(&row.name, flat.addresses);
                flat.addresses += 1;
                let (base, offset, shared) = self.address(at, base.as_ref(), *offset, space)?;
                flat.bound.args.base = base;
                flat.bound.args.offset = offset;
                flat.bound.shared = shared;
            }
            Kind::SecondAddress => {
                let Operand::Address { base, offset } = operand else {
                    return Err(at.expected("an address in brackets", describe(operand)));
                };
                let space = space(&row.name, flat.addresses);
                flat.addresses += 1;
                let (slot, offset) = match self.address(at, base.as_ref(), *offset, space)? {
                    (Base::None, offset, None) => (Slot::NONE, offset),
                    (Base::None, offset, Some(id)) => {
                        (self.constant(Class::B32, UnlinkedConstant::Shared(id, offset), at.line)?, 0)
                    }
                    (Base::Wide(slot) | Base::Narrow(slot), offset, _) => (slot, offset),
                    (Base::Frame | Base::Param, ..) => {
                        return Err(at.expected("a register or a global or shared variable", describe(operand)));
                    }
                };
                flat.slots.push(slot);
                flat.imm.push(offset);
            }
            Kind::Label => {
                return Err(Error::new(at.line, format!("the emulator is at fault: `{}` needs a label", row.name)));
            }
        }
        Ok(())
    }

    /// The elements of a vector operand `{a, b}`. The braces are optional around a single element.
    fn vector(
        &mut self,
        at: OperandSite<'_>,
        operand: &Operand,
        count: u8,
        flat: &mut Flat,
        mut each: impl FnMut(&mut Self, &Operand, &mut Flat) -> Result<(), Error>,
    ) -> Result<(), Error> {
        flat.vector(count);
        match operand {
            Operand::Vector(elements) if elements.len() == usize::from(count) => {
                elements.iter().try_for_each(|element| each(self, element, flat))
            }
            Operand::Vector(elements) => {
                Err(at.expected(format!("a vector of {count}"), format!("one of {}", elements.len())))
            }
            _ if count == 1 => each(self, operand, flat),
            _ => Err(at.expected(format!("a vector of {count}"), describe(operand))),
        }
    }

    /// Binds a destination register; `_` gives no slot.
    pub(super) fn dest(
        &mut self,
        at: OperandSite<'_>,
        operand: &Operand,
        value: Value,
        wide: bool,
    ) -> Result<Slot, Error> {
        let what = || if wide { register_from(value) } else { register(value.class()) };
        match operand {
            Operand::Sink => Ok(Slot::NONE),
            Operand::Name(name) => match self.look_up(name) {
                Some(Entity::Slot(slot)) if fits(slot.class(), value, wide) => Ok(slot),
                Some(Entity::Slot(slot)) => {
                    Err(at.expected(what(), format!("`{name}`, which is {}", register(slot.class()))))
                }
                Some(_) => Err(at.expected(what(), format!("`{name}`, which is not a register"))),
                None => Err(self.unknown(at, name)),
            },
            _ => Err(at.expected(what(), describe(operand))),
        }
    }

    /// Binds a source: a register, or a constant slot for a value that is known before the kernel runs.
    pub(super) fn source(
        &mut self,
        at: OperandSite<'_>,
        operand: &Operand,
        value: Value,
        wide: bool,
    ) -> Result<Slot, Error> {
        match operand {
            Operand::Name(name) => self.named_source(at, name, 0, value, wide),
            Operand::Offset(name, offset) => self.named_source(at, name, *offset, value, wide),
            _ => match immediate(operand, value) {
                Some(bits) => self.constant(value.class(), UnlinkedConstant::Known(Constant::Bits(bits)), at.line),
                None => Err(at.expected(source_kind(value, wide), describe(operand))),
            },
        }
    }

    fn named_source(
        &mut self,
        at: OperandSite<'_>,
        name: &Name,
        offset: i64,
        value: Value,
        wide: bool,
    ) -> Result<Slot, Error> {
        let class = value.class();
        let Some(entity) = self.look_up(name) else {
            return match special_register(name) {
                Some((special, width)) if width == class && offset == 0 => {
                    self.constant(class, UnlinkedConstant::Known(Constant::Special(special)), at.line)
                }
                Some((_, width)) => {
                    Err(at.expected(source_kind(value, wide), format!("`{name}`, which has {} bits", bits(width))))
                }
                None => match integer(&Operand::Name(name.clone())) {
                    Some(number) => self.source(at, &Operand::Int(number), value, wide),
                    None => Err(self.unknown(at, name)),
                },
            };
        };
        let refuse = |what: &str| Err(at.expected(source_kind(value, wide), format!("`{name}`, which is {what}")));
        let pending = match entity {
            Entity::Slot(slot) if offset == 0 && fits(slot.class(), value, wide) => return Ok(slot),
            Entity::Slot(slot) if offset == 0 => return refuse(&register(slot.class())),
            Entity::Slot(_) | Entity::Register(_) => return refuse("a register with an offset"),
            Entity::Declared | Entity::Undefined => return Err(undefined(name, at.line)),
            _ if !matches!(class, Class::B32 | Class::B64) => return refuse("an address"),
            Entity::Function(_) => return refuse("a function"),
            Entity::Global { .. } if class != Class::B64 => return refuse("a 64-bit address"),
            Entity::Global { index, .. } => UnlinkedConstant::Known(Constant::Global(index, offset)),
            Entity::Shared(id) => {
                self.body.shared.insert(id);
                UnlinkedConstant::Shared(id, offset)
            }
            Entity::DynamicShared(align) => {
                self.body.dynamic_align = self.body.dynamic_align.max(align);
                UnlinkedConstant::Known(Constant::DynamicShared(offset))
            }
            Entity::KernelParam(start) => {
                UnlinkedConstant::Known(Constant::Bits(truncate(i128::from(start) + i128::from(offset), bits(class))))
            }
            // The frame's address is only known at the call, so an instruction computes it into a register first.
            Entity::Frame { .. } => {
                let Some(slot) = self.used.register(class) else { return Err(too_many(at.line)) };
                self.frame_address(at.line, Slot::NONE, slot, name, offset)?;
                return Ok(slot);
            }
        };
        self.constant(class, pending, at.line)
    }

    /// The slot that holds this constant when a warp starts.
    pub(super) fn constant(&mut self, class: Class, value: UnlinkedConstant, line: u32) -> Result<Slot, Error> {
        if let Some(&slot) = self.constants.get(&(class, value)) {
            return Ok(slot);
        }
        let slot = self.used.slot(class).ok_or_else(|| too_many(line))?;
        self.constants.insert((class, value), slot);
        self.body.constants.push((slot, value));
        Ok(slot)
    }

    /// Base and offset of an address operand, and the static shared variable that it names.
    fn address(
        &mut self,
        at: OperandSite<'_>,
        base: Option<&Name>,
        offset: i64,
        space: Option<Space>,
    ) -> Result<(Base, i64, Option<usize>), Error> {
        let Some(name) = base else { return Ok((Base::None, offset, None)) };
        let Some(entity) = self.look_up(name) else { return Err(self.unknown(at, name)) };
        let within = |start: u32| {
            offset
                .checked_add(i64::from(start))
                .ok_or_else(|| at.expected("an address", format!("one with an offset of {offset}")))
        };
        let in_space = |own: Space| match space {
            Some(space) if space == own => Ok(()),
            Some(space) => Err(at.expected(
                format!("an address in {} memory", space_name(space)),
                format!("`{name}`, which is a {} variable", space_name(own)),
            )),
            None if matches!(own, Space::Global | Space::Const) => Ok(()),
            None => Err(at.expected(
                "a generic address",
                format!(
                    "`{name}`, which is a {} variable: name its space in the opcode, or convert with cvta",
                    space_name(own)
                ),
            )),
        };
        Ok(match entity {
            Entity::Slot(slot) => match (slot.class(), space) {
                (Class::B64, _) => (Base::Wide(slot), offset, None),
                (Class::B32, Some(Space::Shared | Space::Local | Space::Param | Space::Const)) => {
                    (Base::Narrow(slot), offset, None)
                }
                (class, _) => {
                    return Err(at.expected(
                        "an address in a 64-bit register (32-bit for shared, local, param and const memory)",
                        format!("`{name}`, which is {}", register(class)),
                    ));
                }
            },
            Entity::Frame { space, offset: start, .. } => {
                in_space(space)?;
                (Base::Frame, within(start)?, None)
            }
            Entity::KernelParam(start) => {
                in_space(Space::Param)?;
                (Base::Param, within(start)?, None)
            }
            Entity::Shared(id) => {
                in_space(Space::Shared)?;
                self.body.shared.insert(id);
                (Base::None, offset, Some(id))
            }
            Entity::DynamicShared(align) => {
                in_space(Space::Shared)?;
                self.body.dynamic_align = self.body.dynamic_align.max(align);
                let start = UnlinkedConstant::Known(Constant::DynamicShared(0));
                (Base::Narrow(self.constant(Class::B32, start, at.line)?), offset, None)
            }
            Entity::Global { index, space } => {
                in_space(space)?;
                let start = UnlinkedConstant::Known(Constant::Global(index, 0));
                (Base::Wide(self.constant(Class::B64, start, at.line)?), offset, None)
            }
            Entity::Declared | Entity::Undefined => return Err(undefined(name, at.line)),
            Entity::Function(_) | Entity::Register(_) => {
                return Err(at.expected("an address", format!("`{name}`, which is no memory")));
            }
        })
    }

    fn unknown(&self, at: OperandSite<'_>, name: &str) -> Error {
        let what =
            if name.starts_with('%') { "register or special register" } else { "register, variable or function" };
        Error::new(at.line, format!("operand {} of `{}`: no {what} `{name}` is declared here", at.place, at.opcode))
    }
}

/// The state space of the opcode's `index`-th address. If the opcode names fewer spaces than addresses, the last one applies.
pub(super) fn space(opcode: &str, index: usize) -> Option<Space> {
    let mut spaces = opcode.split('.').filter_map(|part| match part.split("::").next().unwrap_or(part) {
        "global" => Some(Space::Global),
        "const" => Some(Space::Const),
        "shared" => Some(Space::Shared),
        "local" => Some(Space::Local),
        "param" => Some(Space::Param),
        _ => None,
    });
    let first = spaces.next();
    (0..index).fold(first, |space, _| spaces.next().or(space))
}

fn fits(class: Class, value: Value, wide: bool) -> bool {
    class == value.class() || wide && class != Class::Pred && bits(class) >= bits(value.class())
}

/// The value of an integer operand that is a literal.
pub(super) fn integer(operand: &Operand) -> Option<i128> {
    match operand {
        Operand::Int(value) => Some(*value),
        Operand::Name(name) if &**name == "WARP_SZ" => Some(32),
        _ => None,
    }
}

/// The low `bits` bits of an integer.
fn truncate(value: i128, bits: u32) -> u64 {
    if bits >= 64 { value as u64 } else { value as u64 & ((1 << bits) - 1) }
}

/// The bits of a literal as a value of this type; `None` if PTX has no such literal for it.
fn immediate(operand: &Operand, value: Value) -> Option<u64> {
    match (operand, value) {
        // NVRTC writes -1 for true.
        (&Operand::Int(number), Value::Pred) => (-1..=1).contains(&number).then(|| u64::from(number != 0)),
        (&Operand::Int(number), Value::B16 | Value::B32 | Value::B64) => Some(truncate(number, bits(value.class()))),
        (&Operand::F32(single), Value::F32 | Value::B32) => Some(u64::from(single)),
        (&Operand::F64(double), Value::F64 | Value::B64) => Some(double),
        (&Operand::F64(double), Value::F32) => Some(u64::from((f64::from_bits(double) as f32).to_bits())),
        (&Operand::F32(single), Value::F64) => Some(f64::from(f32::from_bits(single)).to_bits()),
        _ => None,
    }
}

pub(super) fn too_many(line: u32) -> Error {
    Error::new(line, "the function uses more registers than there are slots")
}

pub(super) fn undefined(name: &str, line: u32) -> Error {
    Error::new(line, format!("`{name}` is declared, but the module does not define it"))
}
