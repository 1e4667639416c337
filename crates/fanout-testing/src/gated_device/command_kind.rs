//! The commands of a gated queue, and the bytes that they access.

use fanout::device::{Program, Region};
use fanout::graph::TensorId;
use fanout::ops::OpCode;
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// A command of a gated queue.
pub(super) enum CommandKind {
    Upload { dst: Region, bytes: Vec<u8> },
    Download { src: Region, to: Arc<Mutex<Vec<u8>>> },
    Fill { dst: Region, value: u8 },
    Copy { src: Region, dst: Region },
    Run { program: Program, bindings: Arc<[Region]> },
    Wait,
}

impl CommandKind {
    /// Whether the command is a program that waits for programs of other queues.
    pub(super) fn has_collectives(&self) -> bool {
        match self {
            CommandKind::Run { program, .. } => {
                program.graph().nodes().iter().any(|node| OpCode::OWN.contains(&node.op.code()))
            }
            _ => false,
        }
    }

    /// Calls `visit` with each access of the command: the command's kind, whether it writes, the region, and which bytes of it.
    pub(super) fn accesses(&self, mut visit: impl FnMut(&'static str, bool, &Region, Range<u64>)) {
        let all = |region: &Region| 0..region.bytes();
        match self {
            CommandKind::Upload { dst, .. } => visit("an upload", true, dst, all(dst)),
            CommandKind::Download { src, .. } => visit("a download", false, src, all(src)),
            CommandKind::Fill { dst, .. } => visit("a fill", true, dst, all(dst)),
            CommandKind::Copy { src, dst } => {
                visit("a copy", false, src, all(src));
                visit("a copy", true, dst, all(dst));
            }
            CommandKind::Wait => {}
            CommandKind::Run { program, bindings } => {
                let graph = program.graph();
                let mut operand = |writes, id: TensorId| {
                    let Some((tensor, place)) = graph.tensor(id).and_then(|t| Some((t, t.place?))) else { return };
                    let Some(region) = bindings.get(place.slot as usize) else { return };
                    let start = place.offset as u64;
                    visit("a program", writes, region, start..start + tensor.desc.extent() as u64);
                };
                for node in graph.nodes() {
                    for (i, id) in node.srcs.iter().enumerate() {
                        if let Some(id) = id.filter(|_| !node.op.writes_onto(i)) {
                            operand(node.op.updates(i), id);
                        }
                    }
                    operand(true, node.dst);
                }
            }
        }
    }
}
