//! Linker: places the decoded functions in the code array, in the register files and in the shared memory of the kernels that
//! reach them.
//!
//! A function is decoded once, so its registers and shared variables have the same place in every kernel that reaches it.
//! Functions are placed first, one after another, each at the lowest offset that is free in all of those kernels. The registers
//! and variables of each kernel itself follow; no other kernel shares them.

use std::collections::HashMap;

use super::Error;
use super::call_graph::CallGraph;
use super::layout::{MAX_STATIC_SHARED, align_up};
use super::liveness;
use super::state::{ModuleState, UnlinkedConstant, UnlinkedFunction};
use crate::bytecode::{Action, ArgLocation, Constant, Control, DecodedModule, Function, Inst};
use crate::operands::{Base, Class, RegisterCounts, Slot};
use crate::ptx::ast;

/// Limit on the sum, over all kernels of a module, of the functions, calls, constants and shared variables that each of them
/// reaches. Compiled kernels call few functions; without a limit, a few megabytes of text could need any amount of memory.
const MAX_REACHED: usize = 8 << 20;

const CLASSES: [Class; 4] = [Class::Pred, Class::B16, Class::B32, Class::B64];

/// Maximum registers of a thread (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability").
const MAX_REGISTERS: u32 = 255;
/// Registers of a multiprocessor, all of which one block may use.
const BLOCK_REGISTERS: u32 = 64 << 10;

/// Links the decoded `bodies` and appends them, with the module's variables, to `code`. `functions` holds the functions that
/// have a body, in the order of `bodies`.
pub(super) fn link(
    module: ModuleState<'_>,
    functions: &[&ast::Function],
    bodies: Vec<UnlinkedFunction>,
    code: &mut DecodedModule,
) -> Result<(), Error> {
    let graph = CallGraph::new(&bodies);
    let weight = |body: &UnlinkedFunction| 1 + body.constants.len() + body.shared.len();
    let weights: Vec<usize> = bodies.iter().map(weight).collect();
    let kernels = (0..bodies.len()).filter(|&function| functions[function].entry);
    let reached = graph.reachable_functions(kernels, &weights, MAX_REACHED).map_err(|kernel| {
        let ast::Function { name, line, .. } = functions[kernel];
        let text = format!(
            "the kernels up to `{name}` reach more than {MAX_REACHED} functions, calls, constants and shared variables in all: \
             split the module"
        );
        Error::new(*line, text)
    })?;
    let recursive = graph.recursive();
    let registers = place_registers(functions, &bodies, &reached);
    let shared = place_shared(&module, functions, &bodies, &reached)?;
    let live: Vec<u32> = bodies.iter().map(liveness::max_live_registers).collect();
    let mut constants: Vec<Vec<(Slot, Constant)>> = Vec::with_capacity(bodies.len());
    let aligns: Vec<u32> = bodies.iter().map(|body| body.dynamic_align).collect();
    let waits: Vec<bool> = bodies.iter().map(|body| body.waits_for_grids).collect();

    for (index, (body, source)) in bodies.into_iter().zip(functions).enumerate() {
        let placed = FunctionPlacement { base: registers.base[index], line: source.line };
        let offset_of = |id: usize| shared.offsets.get(&(id, None)).or_else(|| shared.offsets.get(&(id, Some(index))));
        let offset_of = |id: usize| i64::from(offset_of(id).copied().unwrap_or(0));
        let start = code.insts.len();
        let mut insts = body.insts;
        for &(inst, id) in &body.shared_addresses {
            let args = &mut insts[inst].args;
            args.offset = args.offset.wrapping_add(offset_of(id));
        }
        for inst in &mut insts {
            placed.relocate_inst(inst, start as u32)?;
        }
        code.insts.append(&mut insts);
        if code.insts.len() >= u32::MAX as usize {
            return Err(Error::new(source.line, "the module has more instructions than can be numbered"));
        }
        let mut own_constants = Vec::with_capacity(body.constants.len());
        for (slot, pending) in body.constants {
            let value = match pending {
                UnlinkedConstant::Known(constant) => constant,
                UnlinkedConstant::Shared(id, offset) => Constant::Bits(offset.wrapping_add(offset_of(id)) as u64),
            };
            own_constants.push((placed.slot(slot)?, value));
        }
        constants.push(own_constants);
        let reach = &reached[index];
        let with_reached = || reach.iter().copied().chain([index]);
        let align = with_reached().map(|function| aligns[function]).max().unwrap_or(0);
        let mut params = body.params;
        let mut returns = body.returns;
        for param in params.iter_mut().chain(&mut returns) {
            param.register = param.register.map(|slot| placed.slot(slot)).transpose()?;
        }
        code.functions.push(Function {
            name: source.name.clone(),
            entry: source.entry,
            start: start as u32,
            end: code.insts.len() as u32,
            params,
            returns,
            param_bytes: body.param_bytes,
            frame_bytes: align_up(u64::from(body.frame_bytes), module.frame_align) as u32,
            stack_bytes: 0,
            shared_bytes: shared.bytes[index],
            dynamic_shared_align: align.max(1),
            registers: registers.counts[index],
            constants: Vec::new(),
            own_registers: body.own.into_iter().map(|slot| placed.slot(slot)).collect::<Result<_, _>>()?,
            recursive: recursive[index],
            max_threads: source.max_threads,
            required_threads: source.required_threads,
            waits_for_grids: with_reached().any(|function| waits[function]),
            reported_registers: registers_to_report(source, with_reached().map(|function| live[function]).max()),
        });
    }
    let frames: Vec<u64> = code.functions.iter().map(|function| u64::from(function.frame_bytes)).collect();
    for (index, function) in code.functions.iter_mut().enumerate() {
        let others = reached[index].iter().filter(|&&other| other != index).map(|&other| frames[other]);
        function.stack_bytes = others.fold(frames[index], u64::saturating_add);
        function.constants = constants[index].clone();
        for &other in reached[index].iter().filter(|&&other| other != index) {
            function.constants.extend_from_slice(&constants[other]);
        }
    }
    code.globals = module.globals;
    Ok(())
}

/// Register count for `cuFuncGetAttribute` and occupancy: the maximum live at once in the kernel or any function that it
/// reaches, limited by the hardware and the kernel's own directives. ptxas needs a few more, for addresses and calls.
fn registers_to_report(function: &ast::Function, live: Option<u32>) -> u32 {
    let mut limit = MAX_REGISTERS;
    if function.max_registers > 0 {
        limit = limit.min(function.max_registers);
    }
    if let Some(threads) = function.max_threads {
        let threads = threads.iter().fold(1u32, |product, &extent| product.saturating_mul(extent.max(1)));
        limit = limit.min((BLOCK_REGISTERS / threads).max(1));
    }
    live.unwrap_or(0).clamp(1, limit)
}

/// First slot of each function per register class, and the size of the register file up to its end.
struct RegisterPlaces {
    base: Vec<RegisterCounts>,
    counts: Vec<RegisterCounts>,
}

fn place_registers(
    functions: &[&ast::Function],
    bodies: &[UnlinkedFunction],
    reached: &[Vec<usize>],
) -> RegisterPlaces {
    let mut base = vec![RegisterCounts::default(); bodies.len()];
    let mut counts = vec![RegisterCounts::default(); bodies.len()];
    let kernels = kernels_of(functions, reached);
    let order =
        (0..bodies.len()).filter(|&f| !functions[f].entry).chain((0..bodies.len()).filter(|&f| functions[f].entry));
    for function in order {
        for class in CLASSES {
            let holders = kernels[function].iter().copied().chain(functions[function].entry.then_some(function));
            let start = holders.clone().map(|kernel| counts[kernel].of(class)).max().unwrap_or(0);
            let end = start + bodies[function].counts.of(class);
            *base[function].of_mut(class) = start;
            *counts[function].of_mut(class) = end;
            for kernel in holders {
                *counts[kernel].of_mut(class) = end;
            }
        }
    }
    RegisterPlaces { base, counts }
}

/// For each function, the kernels that reach it.
fn kernels_of(functions: &[&ast::Function], reached: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut kernels = vec![Vec::new(); functions.len()];
    for (kernel, reach) in reached.iter().enumerate().filter(|(kernel, _)| functions[*kernel].entry) {
        for &function in reach {
            kernels[function].push(kernel);
        }
    }
    kernels
}

/// Offsets in bytes of static shared variables.
struct SharedPlaces {
    /// By variable and kernel; the kernel is `None` for a variable that device functions name, whose offset is common to all
    /// kernels.
    offsets: HashMap<(usize, Option<usize>), u32>,
    /// Bytes of static shared memory per kernel.
    bytes: Vec<u32>,
}

fn place_shared(
    module: &ModuleState<'_>,
    functions: &[&ast::Function],
    bodies: &[UnlinkedFunction],
    reached: &[Vec<usize>],
) -> Result<SharedPlaces, Error> {
    let kernels = kernels_of(functions, reached);
    // Kernels that need a variable: `through` a function (its offset must then be the same in all of them), or `direct`ly.
    let mut through: Vec<Option<Vec<usize>>> = vec![None; module.shared.len()];
    let mut direct: Vec<Vec<usize>> = vec![Vec::new(); module.shared.len()];
    for (function, body) in bodies.iter().enumerate() {
        for &id in &body.shared {
            match functions[function].entry {
                true => direct[id].push(function),
                false => through[id].get_or_insert_default().extend(&kernels[function]),
            }
        }
    }
    let mut ends = vec![0u64; bodies.len()];
    let mut offsets = HashMap::new();
    for (id, variable) in module.shared.iter().enumerate() {
        let mut place = |holders: &[usize], key: Option<usize>| {
            let start = holders.iter().map(|&kernel| ends[kernel]).max().unwrap_or(0);
            let offset = align_up(start, variable.align);
            holders.iter().for_each(|&kernel| ends[kernel] = offset + u64::from(variable.bytes));
            offsets.insert((id, key), u32::try_from(offset).unwrap_or(u32::MAX));
        };
        match &through[id] {
            Some(kernels) => place(&[&**kernels, &direct[id]].concat(), None),
            None => direct[id].iter().for_each(|&kernel| place(&[kernel], Some(kernel))),
        }
    }
    for (function, &bytes) in functions.iter().zip(&ends) {
        if bytes > MAX_STATIC_SHARED {
            return Err(Error::new(
                function.line,
                format!(
                    "the kernel `{}` has {bytes} bytes of static shared memory, at most {MAX_STATIC_SHARED} are possible: \
                     use dynamic shared memory for more",
                    function.name
                ),
            ));
        }
    }
    Ok(SharedPlaces { offsets, bytes: ends.into_iter().map(|end| end as u32).collect() })
}

/// A function's place in the register file.
struct FunctionPlacement {
    /// Its first slot of each class.
    base: RegisterCounts,
    /// Its line in the PTX text, for errors.
    line: u32,
}

impl FunctionPlacement {
    /// The slot of the kernel's register file for a slot of the function.
    fn slot(&self, slot: Slot) -> Result<Slot, Error> {
        if slot.is_none() {
            return Ok(slot);
        }
        let class = slot.class();
        let moved = Slot::new(class, slot.index() + self.base.of(class))
            .ok_or_else(|| Error::new(self.line, "the module uses more registers than there are slots"))?;
        Ok(if slot.negated() { moved.negate() } else { moved })
    }

    fn relocate_slot(&self, slot: &mut Slot) -> Result<(), Error> {
        *slot = self.slot(*slot)?;
        Ok(())
    }

    /// Moves the instruction's slots to their place in the register file, and adds `start` to its branch targets.
    fn relocate_inst(&self, inst: &mut Inst, start: u32) -> Result<(), Error> {
        let args = &mut inst.args;
        for slot in args.s.iter_mut().chain(&mut args.all).chain([&mut inst.guard]) {
            self.relocate_slot(slot)?;
        }
        if let Base::Wide(slot) | Base::Narrow(slot) = &mut args.base {
            self.relocate_slot(slot)?;
        }
        match &mut inst.action {
            Action::Control(Control::Branch(target)) => *target += start,
            Action::Control(Control::Call(site)) => {
                for passed in site.args.iter_mut().chain(&mut site.returns) {
                    if let ArgLocation::Register(slot) = passed {
                        self.relocate_slot(slot)?;
                    }
                }
            }
            _ => {}
        }
        Ok(())
    }
}
