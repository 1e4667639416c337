//! Runs of nodes on one device, and what they need from elsewhere.

use super::{Assigned, Cut, Task};

/// Cuts the list of nodes where the device changes.
pub(crate) fn split(task: &Task, assigned: &[Assigned]) -> Cut {
    let _ = (task, assigned);
    Cut::default()
}
