//! Syntax tree of a PTX module, as written: names are not resolved, opcodes are not looked up.
//!
//! Declarations, labels and instructions keep their line (from 1), so that later stages can quote it in errors.

use std::sync::Arc;

/// A name as written, with its `%` or `$`; a special register includes its component: `%tid.x`.
pub type Name = Arc<str>;

/// One PTX file.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// `.version`, major and minor.
    pub version: (u32, u32),
    /// `.target sm_80` is 80; the suffix of `sm_90a` is in `target_suffix`.
    pub target: u32,
    /// The suffix of the target, `a` or `f`, or empty.
    pub target_suffix: String,
    /// `.address_size` in bits; 64 by default.
    pub address_size: u32,
    /// Variables in module scope, in order.
    pub variables: Vec<Variable>,
    /// Functions and entries, in order; declarations have no body.
    pub functions: Vec<Function>,
}

/// Fundamental types of declarations (PTX ISA, "Fundamental Types").
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Type {
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F16x2,
    BF16,
    BF16x2,
    F32,
    F64,
    Pred,
}

impl Type {
    /// Bytes of a value in memory; 0 for predicates, which cannot be in memory.
    pub fn bytes(self) -> u32 {
        match self {
            Self::Pred => 0,
            Self::B8 | Self::U8 | Self::S8 => 1,
            Self::B16 | Self::U16 | Self::S16 | Self::F16 | Self::BF16 => 2,
            Self::B32 | Self::U32 | Self::S32 | Self::F32 | Self::F16x2 | Self::BF16x2 => 4,
            Self::B64 | Self::U64 | Self::S64 | Self::F64 => 8,
        }
    }
}

/// State space of a variable.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Space {
    Reg,
    Const,
    Global,
    Local,
    Param,
    Shared,
}

/// `.visible`, `.extern`, `.weak`, `.common`, or none of them.
#[allow(missing_docs, reason = "the names are PTX's own")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Linkage {
    #[default]
    Internal,
    Visible,
    Extern,
    Weak,
    Common,
}

/// A variable or parameter: `.global .align 16 .b8 name[2][8] = {…};`
#[derive(Clone, Debug)]
pub struct Variable {
    /// Its name; a parameterised declaration `%r<10>` is a [`Statement::Registers`] instead.
    pub name: Name,
    /// Its state space.
    pub space: Space,
    /// Type of an element.
    pub ty: Type,
    /// Components: 1, or 2 and 4 for `.v2` and `.v4`.
    pub vector: u32,
    /// `.align` in bytes, or 0 without one (then the type's own size applies).
    pub align: u32,
    /// Array extents, outermost first; 0 for an open one (`[]`). Empty for a scalar.
    pub dims: Vec<u64>,
    /// The initialiser, each element as the bits of the variable's type: missing elements at the end are zero. Its length
    /// determines the extent of an open array.
    pub init: Vec<u64>,
    /// Linkage.
    pub linkage: Linkage,
    /// Line of the declaration.
    pub line: u32,
}

/// A function or kernel.
#[derive(Clone, Debug)]
pub struct Function {
    /// Its name.
    pub name: Name,
    /// `.entry`: a kernel.
    pub entry: bool,
    /// Returned parameters of a `.func`.
    pub returns: Vec<Variable>,
    /// Parameters.
    pub params: Vec<Variable>,
    /// `None` for a declaration.
    pub body: Option<Vec<Statement>>,
    /// `.maxntid`, or `.reqntid` with `required_threads` set; absent dimensions are 1; `None` without either.
    pub max_threads: Option<[u32; 3]>,
    /// Whether the limit is exact (`.reqntid`).
    pub required_threads: bool,
    /// `.reqnctapercluster`: blocks of a cluster; absent dimensions are 1.
    pub cluster: Option<[u32; 3]>,
    /// `.maxnreg`, 0 if absent.
    pub max_registers: u32,
    /// `.noreturn`.
    pub noreturn: bool,
    /// Linkage.
    pub linkage: Linkage,
    /// Line of the declaration.
    pub line: u32,
}

/// A statement in a function body.
#[derive(Clone, Debug)]
pub enum Statement {
    /// `name:`; the name and its line.
    Label(Name, u32),
    /// `.reg .b32 %r<10>;` declares `%r0` to `%r9`; without `<n>`, `count` is `None` and the name is the register.
    Registers {
        /// Type of each register.
        ty: Type,
        /// Name or prefix.
        name: Name,
        /// Number of registers, if parameterised.
        count: Option<u32>,
        /// Line.
        line: u32,
    },
    /// A `.local`, `.shared`, `.param` (or other) variable of this scope.
    Variable(Variable),
    /// `.pragma "used_bytes_mask 0x7";`: mask of the bytes that the next load uses, from the lowest address.
    UsedBytes(u32),
    /// `{ … }`: a scope.
    Block(Vec<Statement>),
    /// An instruction.
    Instruction(Instruction),
}

/// `@!%p1 ld.global.v2.f32 {%f1, %f2}, [%rd1+8];`
#[derive(Clone, Debug)]
pub struct Instruction {
    /// `@p` or `@!p` (true: negated).
    pub guard: Option<(Name, bool)>,
    /// Opcode with all its modifiers, as written: `ld.global.v2.f32`, `shfl.sync.bfly.b32`, `mma.sync.aligned.…`.
    pub opcode: Arc<str>,
    /// Operands in order.
    pub operands: Vec<Operand>,
    /// Line of the opcode.
    pub line: u32,
}

/// An operand.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register, special register, variable, function or label.
    Name(Name),
    /// `!p`, where a predicate is read.
    Not(Name),
    /// `_`
    Sink,
    /// An integer, wide enough for `-1` and for `0xFFFFFFFFFFFFFFFF`.
    Int(i128),
    /// `0f3F800000`
    F32(u32),
    /// `0d3FF0000000000000`, or a decimal literal with a point or exponent.
    F64(u64),
    /// `{a, b}`
    Vector(Vec<Operand>),
    /// `[base+offset]`
    Address {
        /// A register or variable; `None` for an absolute address, which is entirely in `offset`.
        base: Option<Name>,
        /// Offset in bytes.
        offset: i64,
    },
    /// `p|q`: two destinations.
    Pair(Box<Operand>, Box<Operand>),
    /// `name+offset` without brackets (mov of a variable's address plus a constant).
    Offset(Name, i64),
    /// `(a, b)` in a call.
    List(Vec<Operand>),
}
