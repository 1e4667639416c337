//! Address conversion (`cvta`, `isspacep`, `mapa`, `getctarank`), and the instructions that only advise caches or order memory
//! and so have no effect: `prefetch`, `fence`, `membar`.

use crate::bytecode::{AccessFn, Action};
use crate::exec_context::{ExecContext, Registers, window};
use crate::fault::{Fault, FaultKind};
use crate::isa::{Category, Family, Operand, Row, Value, row};
use crate::operands::Args;

/// State spaces and the start of their window in the generic address space; 0 for global and constant memory, whose addresses
/// are generic already.
const WINDOWS: [(&str, u64); 8] = [
    ("global", 0),
    ("const", 0),
    ("shared", window::SHARED),
    ("shared::cta", window::SHARED),
    ("shared::cluster", window::SHARED),
    ("local", window::LOCAL),
    ("param", window::PARAM),
    ("param::entry", window::PARAM),
];

/// Encodes a window's start in a row's constant: its upper half, since the lower one is zero.
fn encode(start: u64) -> u32 {
    (start >> 32) as u32
}

/// Decodes the start from [`encode`].
fn start(args: &Args) -> u64 {
    u64::from(args.k) << 32
}

fn to_generic(regs: &mut Registers, args: &Args, mask: u32) {
    let start = start(args);
    regs.map1(args, mask, |offset: u64| offset.wrapping_add(start));
}

fn from_generic(regs: &mut Registers, args: &Args, mask: u32) {
    let start = start(args);
    regs.map1(args, mask, |address: u64| address.wrapping_sub(start));
}

fn inside(address: u64, start: u64) -> bool {
    address.wrapping_sub(start) < window::BYTES
}

/// `isspacep`: tests an address against the space's window. Outside of all windows an address is global memory, unless it is
/// constant.
fn is_in(cx: &mut ExecContext<'_>, args: &Args, mask: u32, constant: Option<bool>) -> Result<(), Box<Fault>> {
    let (addresses, start) = (cx.regs.get::<u64>(args.s[1]), start(args));
    let windowed = |a: u64| [window::SHARED, window::LOCAL, window::PARAM].iter().any(|&start| inside(a, start));
    let holds = |a: u64| match constant {
        Some(constant) => !windowed(a) && cx.global.is_constant(a) == constant,
        None => inside(a, start),
    };
    let held = addresses.iter().rev().fold(0, |bits, &a| bits << 1 | u32::from(holds(a)));
    cx.regs.set_pred(args.s[0], held, mask);
    Ok(())
}

/// `mapa`: the address of the same variable in another block of the cluster. Clusters have one block, so only rank 0 exists.
fn map_address(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let ranks = cx.regs.get::<u32>(args.s[2]);
    for lane in (0..32).filter(|&lane| mask >> lane & 1 != 0) {
        if ranks[lane] != 0 {
            let text = format!("mapa to block {} of a cluster of 1", ranks[lane]);
            return Err(Fault::new(FaultKind::InvalidValue(text), lane));
        }
    }
    let addresses = cx.regs.get_any(args.s[1]);
    cx.regs.set_any(args.s[0], &addresses, mask);
    Ok(())
}

/// Writes zeros: the rank of a cluster's only block, and cache policies, which have no effect.
fn zero(regs: &mut Registers, args: &Args, mask: u32) {
    regs.set_any(args.s[0], &[0; 32], mask);
}

fn nothing(_: &mut Registers, _: &Args, _: u32) {}

/// A row without effect.
fn idle(name: impl Into<String>, operands: &[Operand], category: Category) -> Row {
    row(name, operands, category, 0, Action::Compute(nothing))
}

fn conversions(rows: &mut Vec<Row>) {
    use Operand::{In, Out};
    let wide = [Out(Value::B64), In(Value::B64)];
    let test = [Out(Value::Pred), In(Value::B64)];
    for (space, start) in WINDOWS {
        let k = encode(start);
        rows.push(row(format!("cvta.{space}.u64"), &wide, Category::Move, k, Action::Compute(to_generic)));
        rows.push(row(format!("cvta.to.{space}.u64"), &wide, Category::Move, k, Action::Compute(from_generic)));
        let action: AccessFn = match space {
            "global" => |cx, args, mask| is_in(cx, args, mask, Some(false)),
            "const" => |cx, args, mask| is_in(cx, args, mask, Some(true)),
            _ => |cx, args, mask| is_in(cx, args, mask, None),
        };
        rows.push(row(format!("isspacep.{space}"), &test, Category::Predicate, k, Action::Access(action)));
    }
    for (name, address) in
        [("u64", Value::B64), ("shared::cluster.u32", Value::B32), ("shared::cluster.u64", Value::B64)]
    {
        let operands = [Out(address), In(address), In(Value::B32)];
        rows.push(row(format!("mapa.{name}"), &operands, Category::Move, 0, Action::Access(map_address)));
        let operands = [Out(Value::B32), In(address)];
        rows.push(row(format!("getctarank.{name}"), &operands, Category::Move, 0, Action::Compute(zero)));
    }
}

fn prefetches(rows: &mut Vec<Row>) {
    for space in ["", ".global", ".local"] {
        for level in ["L1", "L2"] {
            rows.push(idle(format!("prefetch{space}.{level}"), &[Operand::Address], Category::Other));
        }
    }
}

fn fences(rows: &mut Vec<Row>) {
    use Operand::{Address, Imm};
    let mut fence = |name: &str, operands: &[Operand]| rows.push(idle(name, operands, Category::Barrier));
    for scope in ["cta", "cluster", "gpu", "sys"] {
        fence(&format!("fence.{scope}"), &[]);
        for order in ["sc", "acq_rel", "acquire", "release"] {
            fence(&format!("fence.{order}.{scope}"), &[]);
        }
        fence(&format!("fence.proxy.tensormap::generic.release.{scope}"), &[]);
        fence(&format!("fence.proxy.tensormap::generic.acquire.{scope}"), &[Address, Imm]);
    }
    fence("fence.mbarrier_init.release.cluster", &[]);
    fence("fence.acquire.sync_restrict::shared::cluster.cluster", &[]);
    fence("fence.release.sync_restrict::shared::cta.cluster", &[]);
    fence("fence.proxy.async::generic.acquire.sync_restrict::shared::cluster.cluster", &[]);
    fence("fence.proxy.async::generic.release.sync_restrict::shared::cta.cluster", &[]);
    for proxy in ["alias", "async", "async.global", "async.shared::cta", "async.shared::cluster"] {
        fence(&format!("fence.proxy.{proxy}"), &[]);
    }
    for level in ["cta", "gl", "sys", "proxy.alias"] {
        fence(&format!("membar.{level}"), &[]);
    }
}

pub(crate) fn family() -> Family {
    let mut rows = Vec::new();
    conversions(&mut rows);
    prefetches(&mut rows);
    fences(&mut rows);
    Family { title: "Addresses, caches and fences", rows, hints: Vec::new() }
}
