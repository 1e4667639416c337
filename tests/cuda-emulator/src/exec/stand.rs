//! All that a warp has around it, for tests of single instructions.

use std::sync::Arc;

use super::{AsyncCopies, Console, Counts, Cx, Global, Local, Registers, Shared};
use crate::fault::Fault;
use crate::mem::Space;

/// Memories and a console of a warp that runs nothing.
#[derive(Debug)]
pub(crate) struct Stand {
    global: Global,
    shared: Shared,
    local: Local,
    copies: AsyncCopies,
    counts: Counts,
    console: Strict,
}

/// Everything that is reported ends the test's instruction.
#[derive(Debug)]
struct Strict;

impl Console for Strict {
    fn report(&mut self, fault: Box<Fault>, _: u32, _: u32) -> Result<(), Box<Fault>> {
        Err(fault)
    }

    fn print(&mut self, _: &str) {}
}

impl Stand {
    /// One device with no memory allocated, 4 KiB of shared memory, 1 KiB of local memory.
    pub(crate) fn new() -> Self {
        let space = Space::new(&[1 << 30]).unwrap_or_else(|e| unreachable!("{e}"));
        Self {
            global: Global::new(Arc::clone(&space.snapshot()), 0, 1, false, None),
            shared: Shared::new(4096, 32, false),
            local: Local::new(1024),
            copies: AsyncCopies::default(),
            counts: Counts::default(),
            console: Strict,
        }
    }

    /// The context of an instruction of lanes `active`, all lanes being there.
    pub(crate) fn cx<'a>(&'a mut self, regs: &'a mut Registers, active: u32) -> Cx<'a> {
        Cx {
            regs,
            active,
            live: u32::MAX,
            global: &mut self.global,
            shared: &mut self.shared,
            local: &mut self.local,
            copies: &mut self.copies,
            params: &[],
            frame: 0,
            counts: &mut self.counts,
            console: &mut self.console,
            warp: 0,
            block: [0; 3],
            shape: [32, 1, 1],
            line: 1,
            clock: 0,
        }
    }
}
