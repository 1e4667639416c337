//! Continuous batching: several sequences share the runs of a model, and join and leave between runs.
//!
//! A product with a weight reads the whole weight, for one column as for eight, so several sequences in one batch cost little more
//! than one. And while a pipeline of devices works on one batch, all of its stages but one are idle, unless there are others: so
//! sequences form groups, and each group has a batch of its own in flight.
//!
//! | part | content |
//! |---|---|
//! | [`SequenceGroup`] | the sequences of a group: joins, leaves, and the tokens of the next batch |
//! | [`KvCells`] | the cells of the group's KV cache: which are free, and which sequence has which |
//! | [`mask`] | nodes that record on the device which sequence wrote each cell, and make the attention mask of a batch from that |
//!
//! # In a runtime
//! Each group has a KV cache and a [`Scheduler`](super::Scheduler) of its own over the same devices, because two runs of one
//! scheduler share their memory for intermediate results, and so wait for each other. The weights are shared. One thread drives
//! all groups in turn: it waits for the results of a group, gives each sequence its next token ([`SequenceGroup::push`]), lets
//! sequences leave and others join, submits the group's next batch ([`SequenceGroup::next_batch`]), and turns to the next group.
//! While it waits for one group, the devices work on the others.
//!
//! # What a sequence computes
//! Attention reads all cells up to the last one in use, and hides the cells of other sequences: with s sequences of n tokens, a token costs s n
//! scores instead of n. That is little beside the products of weights while s n is in the order of the model's width.
//!
//! Its tokens attend to its own cells only, wherever these lie, so other sequences change nothing but the order in which sums are
//! added: a device may choose another kernel for more columns, and adds the terms of attention in the order of cells. Results are
//! therefore equal up to rounding, and a token can differ where two logits are nearly equal.
//!
//! # Example
//! ```
//! use fanout::sched::batching::SequenceGroup;
//!
//! let mut group = SequenceGroup::new(8, 1, 4);
//! let a = group.join(&[10, 11, 12], 5)?;
//! let batch = group.next_batch(4).ok_or("no tokens")?;
//! assert_eq!((&*batch.tokens, &*batch.cells, batch.outputs.len()), (&[10, 11, 12][..], &[0, 1, 2][..], 1));
//!
//! // The sequence goes on, and another one joins: both are in the next batch.
//! group.push(a, 13)?;
//! let b = group.join(&[20, 21], 3)?;
//! let batch = group.next_batch(2).ok_or("no tokens")?;
//! assert_eq!((&*batch.tokens, &*batch.positions), (&[13, 20, 21][..], &[3, 0, 1][..]));
//! assert_eq!(batch.outputs.iter().map(|output| output.sequence).collect::<Vec<_>>(), [a, b]);
//!
//! // There is no room for a third one until one of them leaves.
//! assert!(group.join(&[30], 4).is_err());
//! group.leave(a);
//! assert!(group.join(&[30], 4).is_ok());
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod cells;
pub mod mask;
mod sequences;

pub use cells::{CellError, KvCells, SequenceTag};
pub use sequences::{BatchOutput, SequenceGroup, SequenceId, TokenBatch};
