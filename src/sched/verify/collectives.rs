//! Collectives: the ranks of a group run the same collectives in the same order, and every program finishes.
//!
//! A program waits at a collective until the programs of all other ranks have reached the same collective. Two mistakes of a plan
//! deadlock. Two queues run the collectives of two groups in different orders: each waits for the other at another collective. Or
//! a rank's program waits for a mark of another rank's program, which waits for the first at a collective before the mark.

use super::{PlanFault, step_name};
use crate::ops::Op;
use crate::ops::collective::CollectiveKind;
use crate::sched::{Plan, StepAction};
use crate::tensor::{DIMS, DType};
use std::collections::BTreeMap;

/// A collective node.
#[derive(Clone, Copy, PartialEq, Debug)]
struct PlannedCollective {
    group: usize,
    kind: CollectiveKind,
    /// Type of the parts.
    dtype: DType,
    /// Shape of what all ranks have together.
    ne: [usize; DIMS],
}

pub(super) fn check(plan: &Plan) -> Result<(), PlanFault> {
    let collectives: Vec<Vec<PlannedCollective>> = (0..plan.steps.len()).map(|step| of_step(plan, step)).collect();
    if collectives.iter().all(Vec::is_empty) {
        return Ok(());
    }
    check_sequences(plan, &collectives)?;
    check_progress(plan, &collectives)
}

/// The collectives of a step, in order.
fn of_step(plan: &Plan, step: usize) -> Vec<PlannedCollective> {
    let StepAction::RunSplit(split) = plan.steps[step].action else { return Vec::new() };
    let graph = plan.task.graph();
    let nodes = graph.nodes().get(plan.split_graph.splits[split as usize].nodes.clone()).unwrap_or_default();
    let planned = nodes.iter().filter_map(|node| {
        let Op::Collective(op) = &node.op else { return None };
        let (part, dst) = (graph.tensor(node.srcs[0]?)?.desc, graph.tensor(node.dst)?.desc);
        let is_scattered = matches!(op.kind, CollectiveKind::ReduceScatter { .. });
        let ne = if is_scattered { part.ne() } else { dst.ne() };
        Some(PlannedCollective { group: op.group as usize, kind: op.kind, dtype: part.dtype(), ne })
    });
    planned.collect()
}

fn fault(what: String, expected: &str, found: String) -> PlanFault {
    PlanFault::Structure { what, expected: expected.to_owned(), found }
}

/// Each collective is on a device of its group, and all devices of the group have the same ones.
fn check_sequences(plan: &Plan, collectives: &[Vec<PlannedCollective>]) -> Result<(), PlanFault> {
    let mut sequences: BTreeMap<(usize, usize), Vec<PlannedCollective>> = BTreeMap::new();
    for (number, of_step) in collectives.iter().enumerate() {
        let device = plan.queues[plan.steps[number].queue].device;
        for collective in of_step {
            let group = plan.task.collective_groups().get(collective.group);
            if !group.is_some_and(|group| group.contains(&device)) {
                let what = format!("the group of a collective in {}", step_name(plan, number));
                return Err(fault(what, "one that the device is in", format!("group {}", collective.group)));
            }
            sequences.entry((collective.group, device)).or_default().push(*collective);
        }
    }
    for (number, group) in plan.task.collective_groups().iter().enumerate() {
        let of = |device: &usize| sequences.get(&(number, *device)).map_or(&[][..], Vec::as_slice);
        let first = group.first().map_or(&[][..], of);
        if let Some(device) = group.iter().find(|device| of(device) != first) {
            let what = format!("the collectives of group {number} on {}", plan.devices[*device]);
            let same = of(device).iter().zip(first).take_while(|(a, b)| a == b).count();
            let found = format!("{} collectives, of which the first {same} are equal", of(device).len());
            return Err(fault(what, "those of the first rank, in the same order", found));
        }
    }
    Ok(())
}

/// Runs the queues symbolically: each as far as it can, until all steps of a run are done. Marks of earlier runs are reached.
fn check_progress(plan: &Plan, collectives: &[Vec<PlannedCollective>]) -> Result<(), PlanFault> {
    let mut steps: Vec<Vec<usize>> = vec![Vec::new(); plan.queues.len()];
    for (number, step) in plan.steps.iter().enumerate() {
        steps[step.queue].push(number);
    }
    // By queue: the next step, and how many of its collectives are done.
    let mut at = vec![(0, 0); plan.queues.len()];
    let mut reached = vec![false; plan.marks as usize];
    loop {
        let mut progress = false;
        for queue in 0..plan.queues.len() {
            while let Some(&number) = steps[queue].get(at[queue].0) {
                let step = &plan.steps[number];
                let waits = step.waits.iter().any(|wait| wait.runs_ago == 0 && !reached[wait.mark as usize]);
                if waits || at[queue].1 < collectives[number].len() {
                    break;
                }
                if let Some(mark) = step.mark {
                    reached[mark as usize] = true;
                }
                at[queue] = (at[queue].0 + 1, 0);
                progress = true;
            }
        }
        // The collective at which a device's queue waits, if its step has begun.
        let waiting = |device: usize, at: &[(usize, usize)]| {
            (0..plan.queues.len()).filter(|&queue| plan.queues[queue].device == device).find_map(|queue| {
                let &number = steps[queue].get(at[queue].0)?;
                let begun = plan.steps[number].waits.iter().all(|w| w.runs_ago > 0 || reached[w.mark as usize]);
                let next = collectives[number].get(at[queue].1).filter(|_| begun)?;
                Some((queue, next.group))
            })
        };
        for (number, group) in plan.task.collective_groups().iter().enumerate() {
            let queues = group.iter().map(|&device| waiting(device, &at).filter(|(_, group)| *group == number));
            if let Some(queues) = queues.collect::<Option<Vec<_>>>() {
                queues.iter().for_each(|(queue, _)| at[*queue].1 += 1);
                progress |= !queues.is_empty();
            }
        }
        if !progress {
            break;
        }
    }
    let stuck = (0..plan.queues.len()).find_map(|queue| steps[queue].get(at[queue].0));
    match stuck {
        Some(&number) => {
            Err(fault("progress".to_owned(), "that every step ends", format!("{} never does", step_name(plan, number))))
        }
        None => Ok(()),
    }
}
