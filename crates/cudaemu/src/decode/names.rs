//! Name resolution: module scope, the scopes of a function, registers, special registers.

use std::collections::HashMap;

use crate::bytecode::SpecialRegister;
use crate::operands::{Class, RegisterCounts, Slot};
use crate::ptx::ast::{Name, Space, Type};

/// The entity that a name denotes.
#[derive(Clone, Copy, Debug)]
pub(super) enum Entity {
    /// A register without a slot, because nothing has used it yet.
    Register(Class),
    /// A register with its slot.
    Slot(Slot),
    /// A `.local` or `.param` variable of the function's frame, at this offset.
    Frame { space: Space, offset: u32, bytes: u32 },
    /// A parameter of the kernel, at this offset of the parameter block.
    KernelParam(u32),
    /// A static shared variable: its index in the module.
    Shared(usize),
    /// Dynamic shared memory with this alignment in bytes.
    DynamicShared(u32),
    /// A variable in global or constant memory: its index in the module.
    Global { index: u32, space: Space },
    /// A function with a body: its index.
    Function(u32),
    /// A function that is only declared.
    Declared,
    /// An `.extern` variable that the module does not define.
    Undefined,
}

/// The register class for values of a type.
pub(super) fn class_of(ty: Type) -> Class {
    match ty {
        Type::Pred => Class::Pred,
        Type::B8 | Type::U8 | Type::S8 | Type::B16 | Type::U16 | Type::S16 | Type::F16 | Type::BF16 => Class::B16,
        Type::B32 | Type::U32 | Type::S32 | Type::F32 | Type::F16x2 | Type::BF16x2 => Class::B32,
        Type::B64 | Type::U64 | Type::S64 | Type::F64 => Class::B64,
    }
}

/// Bits of a register of the class.
pub(super) fn bits(class: Class) -> u32 {
    match class {
        Class::Pred => 1,
        Class::B16 => 16,
        Class::B32 => 32,
        Class::B64 => 64,
    }
}

/// Registers declared together, as in `.reg .b32 %r<7>`.
#[derive(Clone, Copy, Debug)]
pub(super) struct RegisterRange {
    pub(super) class: Class,
    pub(super) count: u32,
}

/// One `{ … }` scope of a function.
#[derive(Debug, Default)]
pub(super) struct Scope {
    names: HashMap<Name, Entity>,
    /// Register ranges such as `%r<10>`, by prefix.
    ranges: HashMap<Name, RegisterRange>,
    /// Label numbers, assigned before the labels are reached.
    pub(super) labels: HashMap<Name, usize>,
}

impl Scope {
    /// Declares a name; returns `false` if the scope already declares it.
    pub(super) fn declare(&mut self, name: &Name, entity: Entity) -> bool {
        self.names.insert(name.clone(), entity).is_none()
    }

    /// Declares `prefix<count>`; returns `false` if the scope already declares the prefix.
    pub(super) fn declare_range(&mut self, prefix: &Name, range: RegisterRange) -> bool {
        self.ranges.insert(prefix.clone(), range).is_none()
    }

    /// Resolves a name in this scope only. A register gets its slot at its first use, so unused declarations take no space in
    /// the register file.
    fn look_up(&mut self, name: &Name, used: &mut SlotAllocator) -> Option<Entity> {
        match self.names.get_mut(name) {
            Some(entity) => {
                if let Entity::Register(class) = *entity {
                    *entity = Entity::Slot(used.register(class)?);
                }
                Some(*entity)
            }
            None => {
                let class = self.range_of(name)?;
                let entity = Entity::Slot(used.register(class)?);
                self.names.insert(name.clone(), entity);
                Some(entity)
            }
        }
    }

    /// The class of `%r7` if this scope declares `%r<n>` with n > 7. A prefix may end in digits.
    fn range_of(&self, name: &str) -> Option<Class> {
        let digits = name.len() - name.trim_end_matches(|c: char| c.is_ascii_digit()).len();
        (1..=digits.min(10)).find_map(|length| {
            let (prefix, number) = name.split_at(name.len() - length);
            let RegisterRange { class, count } = *self.ranges.get(prefix)?;
            let leading_zero = length > 1 && number.starts_with('0');
            (!leading_zero && number.parse::<u32>().is_ok_and(|number| number < count)).then_some(class)
        })
    }
}

/// The scopes around a statement, innermost last.
#[derive(Debug, Default)]
pub(super) struct Scopes(Vec<Scope>);

impl Scopes {
    pub(super) fn enter(&mut self) {
        self.0.push(Scope::default());
    }

    pub(super) fn leave(&mut self) {
        self.0.pop();
    }

    pub(super) fn depth(&self) -> usize {
        self.0.len()
    }

    /// The innermost scope, which receives declarations.
    pub(super) fn innermost(&mut self) -> &mut Scope {
        if self.0.is_empty() {
            self.enter();
        }
        let last = self.0.len() - 1;
        &mut self.0[last]
    }

    /// Resolves a name among the function's scopes, from the innermost outwards.
    pub(super) fn look_up(&mut self, name: &Name, used: &mut SlotAllocator) -> Option<Entity> {
        self.0.iter_mut().rev().find_map(|scope| scope.look_up(name, used))
    }

    /// The first `Some` of `pick`, from the innermost scope outwards.
    pub(super) fn find<'a, T>(&'a self, pick: impl Fn(&'a Scope) -> Option<T>) -> Option<T> {
        self.0.iter().rev().find_map(pick)
    }
}

/// Slots of a function, counted from 0 per class. The linker moves them to free places in the kernel's register file.
#[derive(Debug, Default)]
pub(super) struct SlotAllocator {
    pub(super) counts: RegisterCounts,
    /// Slots of registers, without constants.
    pub(super) own: Vec<Slot>,
}

impl SlotAllocator {
    /// Allocates a slot; `None` if the class has 2^28 of them already.
    pub(super) fn slot(&mut self, class: Class) -> Option<Slot> {
        let count = self.counts.of_mut(class);
        let slot = Slot::new(class, *count)?;
        *count += 1;
        Some(slot)
    }

    /// Allocates a register.
    pub(super) fn register(&mut self, class: Class) -> Option<Slot> {
        let slot = self.slot(class)?;
        self.own.push(slot);
        Some(slot)
    }
}

/// The special register of this name if it is constant for a thread, with its class (PTX ISA, "Special Registers").
pub(super) fn special_register(name: &str) -> Option<(SpecialRegister, Class)> {
    let name = name.strip_prefix('%')?;
    if let Some((name, axis)) = name.split_once('.') {
        let axis = match axis {
            "x" => 0,
            "y" => 1,
            "z" => 2,
            _ => return None,
        };
        let special = match name {
            "tid" => SpecialRegister::Tid(axis),
            "ntid" => SpecialRegister::Ntid(axis),
            "ctaid" => SpecialRegister::Ctaid(axis),
            "nctaid" => SpecialRegister::Nctaid(axis),
            "clusterid" => SpecialRegister::ClusterId(axis),
            "nclusterid" => SpecialRegister::NclusterId(axis),
            "cluster_ctaid" => SpecialRegister::ClusterCtaid(axis),
            "cluster_nctaid" => SpecialRegister::ClusterNctaid(axis),
            _ => return None,
        };
        return Some((special, Class::B32));
    }
    let special = match name {
        "laneid" => SpecialRegister::LaneId,
        "warpid" => SpecialRegister::WarpId,
        "nwarpid" => SpecialRegister::NwarpId,
        "smid" => SpecialRegister::SmId,
        "nsmid" => SpecialRegister::NsmId,
        "gridid" => return Some((SpecialRegister::GridId, Class::B64)),
        "lanemask_eq" => SpecialRegister::LanemaskEq,
        "lanemask_lt" => SpecialRegister::LanemaskLt,
        "lanemask_le" => SpecialRegister::LanemaskLe,
        "lanemask_gt" => SpecialRegister::LanemaskGt,
        "lanemask_ge" => SpecialRegister::LanemaskGe,
        "dynamic_smem_size" => SpecialRegister::DynamicSmemSize,
        "total_smem_size" => SpecialRegister::TotalSmemSize,
        "aggr_smem_size" => SpecialRegister::AggrSmemSize,
        "cluster_ctarank" => SpecialRegister::ClusterCtarank,
        "cluster_nctarank" => SpecialRegister::ClusterNctarank,
        "is_explicit_cluster" => return Some((SpecialRegister::IsExplicitCluster, Class::Pred)),
        _ => return None,
    };
    Some((special, Class::B32))
}
