//! Known values for every row of the instruction table, a file per family.

mod bits;
mod carry;
mod compare;
mod integer;
mod logic;
mod moves;
mod video;

/// An integer type of PTX, to state what a whole group of rows should give in unbounded arithmetic.
#[derive(Clone, Copy)]
pub(super) struct Type {
    pub(super) name: &'static str,
    pub(super) bits: u32,
    pub(super) signed: bool,
}

const fn ty(name: &'static str, bits: u32, signed: bool) -> Type {
    Type { name, bits, signed }
}

/// The types of integer arithmetic.
pub(super) const TYPES: [Type; 6] = [
    ty("u16", 16, false),
    ty("s16", 16, true),
    ty("u32", 32, false),
    ty("s32", 32, true),
    ty("u64", 64, false),
    ty("s64", 64, true),
];

impl Type {
    pub(super) fn min(self) -> i128 {
        if self.signed { -1 << (self.bits - 1) } else { 0 }
    }

    pub(super) fn max(self) -> i128 {
        self.min() + (1 << self.bits) - 1
    }

    /// The value of the type with the same low bits.
    pub(super) fn wrap(self, value: i128) -> i128 {
        let unsigned = value & ((1 << self.bits) - 1);
        if unsigned > self.max() { unsigned - (1 << self.bits) } else { unsigned }
    }

    /// Values where things change, and a few in between.
    pub(super) fn edges(self) -> Vec<i128> {
        let middle = 1 << (self.bits / 2);
        let mut values = vec![0, 1, 2, 3, 7, 100, middle - 1, middle, middle + 1, 0x55, self.max() - 1, self.max()];
        if self.signed {
            values.extend([-1, -2, -3, -7, -100, -middle, self.min(), self.min() + 1]);
        }
        let mut random = fastrand::Rng::with_seed(u64::from(self.bits));
        values.extend((0..6).map(|_| self.wrap(i128::from(random.u64(..)))));
        values
    }

    /// All pairs of them.
    pub(super) fn pairs(self) -> Vec<Vec<i128>> {
        let values = self.edges();
        values.iter().flat_map(|&a| values.iter().map(move |&b| vec![a, b])).collect()
    }

    /// Triples: all pairs, each with a few third values.
    pub(super) fn triples(self) -> Vec<Vec<i128>> {
        let third = [0, 1, self.max(), self.min(), 12345 & self.max()];
        let pairs = self.pairs();
        let triple = |(at, pair): (usize, &Vec<i128>)| vec![pair[0], pair[1], third[at % third.len()]];
        pairs.iter().enumerate().map(triple).collect()
    }
}
#[test]
fn bench_tmp() {
    use crate::code::*;
    use crate::exec::Registers;
    use crate::isa::{Decode, Operand};
    let fams = [
        super::integer::family(),
        super::logic::family(),
        super::compare::family(),
        super::bits::family(),
        super::dot::family(),
        super::carry::family(),
        super::moves::family(),
    ];
    let mut regs = Registers::new(&RegisterCounts { pred: 8, b16: 8, b32: 8, b64: 8, b128: 8 });
    for name in [
        "add.s32",
        "add.s64",
        "mad.lo.s32",
        "mul.wide.s32",
        "mul.wide.u32",
        "mul.lo.s32",
        "mul.hi.s32",
        "shl.b32",
        "shr.u32",
        "shl.b64",
        "and.b32",
        "lop3.b32",
        "setp.lt.s32",
        "setp.lt.u64",
        "setp.eq.and.s16",
        "selp.b32",
        "selp.b64",
        "mov.b32",
        "mov.b64.pack2.b32",
        "mov.b64.unpack2.b32",
        "prmt.b32",
        "bfe.u32",
        "bfi.b32",
        "dp4a.s32.s32",
        "shf.l.wrap.b32",
        "add.cc.u32",
        "div.s32",
        "popc.b32",
        "min.s32",
        "and.pred",
        "mad.lo.s64",
        "clz.b32",
    ] {
        let row = fams.iter().flat_map(|f| &f.rows).find(|r| r.name == name).unwrap();
        let mut s = vec![];
        for o in &row.operands {
            match *o {
                Operand::Out(v) | Operand::In(v) => s.push(Slot::new(v.class(), s.len()).unwrap()),
                Operand::OutPair(v, w) => {
                    s.push(Slot::new(v.class(), 0).unwrap());
                    let _ = w;
                    s.push(Slot::NONE)
                }
                Operand::InPred => s.push(Slot::new(Class::Pred, s.len()).unwrap()),
                Operand::InVector(n, v) | Operand::OutVector(n, v) => {
                    for _ in 0..n {
                        s.push(Slot::new(v.class(), s.len()).unwrap())
                    }
                }
                _ => {}
            }
        }
        let mut args = Args { k: row.k, imm: [0x6a, 0], ..Args::default() };
        for (i, x) in s.iter().enumerate() {
            args.s[i] = *x;
        }
        let f = match &row.decode {
            Decode::Plain(Action::Compute(f)) => *f,
            Decode::Move(v) => match super::moves::copy(*v) {
                Action::Compute(f) => f,
                _ => unreachable!(),
            },
            _ => unreachable!(),
        };
        for (mask, label) in [(u32::MAX, "full"), (0x00ff_ffff, "part")] {
            let n = 2_000_000;
            let t = std::time::Instant::now();
            for _ in 0..n {
                std::hint::black_box(f)(&mut regs, std::hint::black_box(&args), mask);
            }
            print!("{name:24} {label} {:6.1} ns   ", t.elapsed().as_secs_f64() * 1e9 / n as f64);
        }
        println!();
    }
}
