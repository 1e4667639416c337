//! Warp communication: `shfl`, `vote`, `redux`, `activemask`, `elect` (PTX ISA, "Data Movement and Conversion
//! Instructions: shfl.sync", "Parallel Synchronization and Communication Instructions").
//!
//! A `.sync` instruction has a mask of member lanes. The warp's interpreter loop gathers them first. The handlers report
//! members that have not exited and still do not execute the instruction, and lanes that read such a lane.

use super::{Category, Family, Operand, Row, Value, row};
use crate::bytecode::{AccessFn, Action};
use crate::exec_context::{ExecContext, LANES, Lanes};
use crate::fault::{Fault, FaultKind};
use crate::operands::{Args, Slot};

/// The operands; a shuffle has more than fit into [`Args::s`].
fn operands(args: &Args) -> &[Slot] {
    if args.all.is_empty() { &args.s } else { &args.all }
}

fn contains_lane(mask: u32, lane: usize) -> bool {
    mask >> lane & 1 != 0
}

/// The group of each lane: the members of its mask that execute the instruction.
fn groups(cx: &mut ExecContext<'_>, members: Slot, mask: u32) -> Result<Lanes<u32>, Box<Fault>> {
    let members: Lanes<u32> = cx.regs.get(members);
    let live = cx.live;
    let first = members[mask.trailing_zeros() as usize & 31];
    // Fast path: all lanes have the same mask, and its members execute the instruction.
    if first & mask == mask && first & live & !mask == 0 && members.iter().all(|&named| named == first) {
        return Ok([first & mask; LANES]);
    }
    let wrong = (0..LANES).filter(|&lane| contains_lane(mask, lane)).find_map(|lane| {
        let named = members[lane];
        let away = named & live & !mask;
        let other = (0..LANES).find(|&other| contains_lane(named & mask, other) && members[other] != named);
        let text = if !contains_lane(named, lane) {
            format!("the member mask {named:#010x} does not name lane {lane}, which executes it")
        } else if away != 0 {
            format!("the member mask {named:#010x} names lanes {away:#010x}, which do not execute it")
        } else if let Some(other) = other {
            format!("lane {lane} has the member mask {named:#010x}, lane {other} {:#010x}", members[other])
        } else {
            return None;
        };
        Some((lane, text))
    });
    if let Some((lane, text)) = wrong {
        cx.report_kind(FaultKind::InactiveLane(text), lane)?;
    }
    Ok(std::array::from_fn(|lane| members[lane] & mask | 1 << lane))
}

/// Computes the lane to read from, and whether it is in range (otherwise a lane reads itself).
type Source = fn(lane: i32, b: i32, lowest: i32, highest: i32, segment: i32) -> (i32, bool);

fn up(lane: i32, b: i32, _: i32, highest: i32, _: i32) -> (i32, bool) {
    (lane - b, lane - b >= highest)
}

fn down(lane: i32, b: i32, _: i32, highest: i32, _: i32) -> (i32, bool) {
    (lane + b, lane + b <= highest)
}

fn butterfly(lane: i32, b: i32, _: i32, highest: i32, _: i32) -> (i32, bool) {
    (lane ^ b, lane ^ b <= highest)
}

fn index(_: i32, b: i32, lowest: i32, highest: i32, segment: i32) -> (i32, bool) {
    let source = lowest | b & !segment & 31;
    (source, source <= highest)
}

/// `d|p = a` of another lane. Operand c holds the clamp in bits 0–4 and the segment mask in bits 8–12.
fn shuffle(cx: &mut ExecContext<'_>, args: &Args, mask: u32, source: Source) -> Result<(), Box<Fault>> {
    let slots = operands(args);
    let groups = groups(cx, slots.get(5).copied().unwrap_or_default(), mask)?;
    let a = cx.regs.get::<u32>(slots[2]);
    let (b, c) = (cx.regs.get::<u32>(slots[3]), cx.regs.get::<u32>(slots[4]));
    let (mut result, mut in_range, mut absent) = (a, 0, None);
    for lane in 0..LANES {
        let (segment, clamp) = ((c[lane] >> 8 & 31) as i32, (c[lane] & 31) as i32);
        let lowest = lane as i32 & segment;
        let (from, valid) = source(lane as i32, (b[lane] & 31) as i32, lowest, lowest | clamp & !segment, segment);
        if valid {
            let from = (from & 31) as usize;
            in_range |= 1 << lane;
            result[lane] = a[from];
            if contains_lane(mask, lane) && !contains_lane(groups[lane], from) && absent.is_none() {
                absent = Some((lane, from));
            }
        }
    }
    if let Some((lane, from)) = absent {
        let why = if !contains_lane(cx.live, from) {
            "has exited or never was"
        } else if contains_lane(mask, from) {
            "is no member"
        } else {
            "does not execute the shuffle"
        };
        cx.report_kind(FaultKind::InactiveLane(format!("lane {lane} reads from lane {from}, which {why}")), lane)?;
    }
    cx.regs.set(slots[0], &result, mask);
    cx.regs.set_pred(slots[1], in_range, mask);
    Ok(())
}

/// Computes a predicate per lane from its group: `test` gets the group and the lanes of it whose source is true.
fn vote(cx: &mut ExecContext<'_>, args: &Args, mask: u32, test: impl Fn(u32, u32) -> bool) -> Result<(), Box<Fault>> {
    let groups = groups(cx, args.s[2], mask)?;
    let held = cx.regs.pred(args.s[1]);
    let result = (0..LANES).fold(0, |bits, lane| bits | u32::from(test(groups[lane], groups[lane] & held)) << lane);
    cx.regs.set_pred(args.s[0], result, mask);
    Ok(())
}

fn ballot(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let groups = groups(cx, args.s[2], mask)?;
    let held = cx.regs.pred(args.s[1]);
    cx.regs.set(args.s[0], &groups.map(|group| group & held), mask);
    Ok(())
}

/// Reduces the values of all members to one.
fn reduce(
    cx: &mut ExecContext<'_>,
    args: &Args,
    mask: u32,
    combine: impl Fn(u32, u32) -> u32,
) -> Result<(), Box<Fault>> {
    let groups = groups(cx, args.s[2], mask)?;
    let values = cx.regs.get::<u32>(args.s[1]);
    let of =
        |group: u32| (0..LANES).filter(|&lane| contains_lane(group, lane)).map(|lane| values[lane]).reduce(&combine);
    let result: Lanes<u32> = std::array::from_fn(|lane| of(groups[lane]).unwrap_or_default());
    cx.regs.set(args.s[0], &result, mask);
    Ok(())
}

fn active_mask(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    cx.regs.set(args.s[0], &[mask; LANES], mask);
    Ok(())
}

/// `elect.sync`: the lowest member is the leader.
fn elect(cx: &mut ExecContext<'_>, args: &Args, mask: u32) -> Result<(), Box<Fault>> {
    let groups = groups(cx, args.s[2], mask)?;
    let leader = groups.map(u32::trailing_zeros);
    let leads = (0..LANES).fold(0, |bits, lane| bits | u32::from(leader[lane] == lane as u32) << lane);
    cx.regs.set(args.s[0], &leader, mask);
    cx.regs.set_pred(args.s[1], leads, mask);
    Ok(())
}

pub(crate) fn family() -> Family {
    use Operand::{In, InPred, Out, OutPair};
    let mut rows: Vec<Row> = Vec::new();
    let word = In(Value::B32);
    let mut add = |name: &str, operands: &[Operand], action: AccessFn| {
        rows.push(row(name, operands, Category::Shuffle, 0, Action::Access(action)));
    };

    let shuffles: [(&str, AccessFn); 4] = [
        ("up", |cx, a, m| shuffle(cx, a, m, up)),
        ("down", |cx, a, m| shuffle(cx, a, m, down)),
        ("bfly", |cx, a, m| shuffle(cx, a, m, butterfly)),
        ("idx", |cx, a, m| shuffle(cx, a, m, index)),
    ];
    for (mode, action) in shuffles {
        let operands = [OutPair(Value::B32, Value::Pred), word, word, word, word];
        add(&format!("shfl.sync.{mode}.b32"), &operands, action);
    }

    let votes: [(&str, Value, AccessFn); 4] = [
        ("all.pred", Value::Pred, |cx, a, m| vote(cx, a, m, |group, held| held == group)),
        ("any.pred", Value::Pred, |cx, a, m| vote(cx, a, m, |_, held| held != 0)),
        ("uni.pred", Value::Pred, |cx, a, m| vote(cx, a, m, |group, held| held == 0 || held == group)),
        ("ballot.b32", Value::B32, ballot),
    ];
    for (mode, value, action) in votes {
        add(&format!("vote.sync.{mode}"), &[Out(value), InPred, word], action);
    }

    let reductions: [(&str, AccessFn); 9] = [
        ("add.u32", |cx, a, m| reduce(cx, a, m, u32::wrapping_add)),
        ("add.s32", |cx, a, m| reduce(cx, a, m, u32::wrapping_add)),
        ("min.u32", |cx, a, m| reduce(cx, a, m, u32::min)),
        ("max.u32", |cx, a, m| reduce(cx, a, m, u32::max)),
        ("min.s32", |cx, a, m| reduce(cx, a, m, |x, y| (x as i32).min(y as i32) as u32)),
        ("max.s32", |cx, a, m| reduce(cx, a, m, |x, y| (x as i32).max(y as i32) as u32)),
        ("and.b32", |cx, a, m| reduce(cx, a, m, |x, y| x & y)),
        ("or.b32", |cx, a, m| reduce(cx, a, m, |x, y| x | y)),
        ("xor.b32", |cx, a, m| reduce(cx, a, m, |x, y| x ^ y)),
    ];
    for (op, action) in reductions {
        add(&format!("redux.sync.{op}"), &[Out(Value::B32), word, word], action);
    }

    add("activemask.b32", &[Out(Value::B32)], active_mask);
    add("elect.sync", &[OutPair(Value::B32, Value::Pred), word], elect);
    Family { title: "Shuffles, votes and reductions of a warp", rows, hints: Vec::new() }
}

#[cfg(test)]
mod tests;
