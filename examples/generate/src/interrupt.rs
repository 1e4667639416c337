//! Ctrl-C: the first one ends the reply that is being generated, and the next one the program.

use signal_hook::consts::SIGINT;
use signal_hook::flag;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a reply should end. A clone is the same flag.
#[derive(Clone, Debug)]
pub struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// A flag that no signal sets.
    pub fn never() -> Interrupt {
        Interrupt(Arc::new(AtomicBool::new(true)))
    }

    /// Sets a flag on SIGINT. Where it is set already, which it is unless a reply is being generated, the signal ends the program.
    ///
    /// # Errors
    /// The system refuses the handler.
    pub fn on_signal() -> io::Result<Interrupt> {
        let interrupt = Interrupt::never();
        // In this order: the first action must see the flag as it was before the signal.
        flag::register_conditional_default(SIGINT, Arc::clone(&interrupt.0))?;
        flag::register(SIGINT, Arc::clone(&interrupt.0))?;
        Ok(interrupt)
    }

    /// From now on, the first signal ends the reply. Until the result is dropped.
    pub fn begin_reply(&self) -> InterruptibleReply<'_> {
        self.0.store(false, Ordering::SeqCst);
        InterruptibleReply(&self.0)
    }
}

/// A reply that a signal can end.
#[derive(Debug)]
pub struct InterruptibleReply<'a>(&'a AtomicBool);

impl InterruptibleReply<'_> {
    /// Whether there was a signal.
    pub fn is_interrupted(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

impl Drop for InterruptibleReply<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::SeqCst);
    }
}
