//! The graphs that a server of protocol 8.0 stores by number (uid), as this client has to count them: both ends drop graphs by the
//! same rule, and a GRAPH_RECOMPUTE of a graph that the server has dropped ends the connection.

use std::collections::HashSet;

/// Number of graphs that a server stores per device. A further one makes it drop all graphs of the device first.
const MAX_STORED: usize = 1024;

/// The graphs that a server stores for one device.
#[derive(Debug, Default)]
pub(super) struct StoredGraphs {
    /// Uids that count towards [`MAX_STORED`].
    counted: HashSet<u64>,
    /// Uids that GRAPH_RECOMPUTE may name. A subset of `counted`.
    usable: HashSet<u64>,
}

impl StoredGraphs {
    /// Whether the server can run the graph by its number.
    pub(super) fn is_usable(&self, uid: u64) -> bool {
        self.usable.contains(&uid)
    }

    /// Records that a GRAPH_COMPUTE with this uid is sent.
    pub(super) fn record_sent(&mut self, uid: u64) {
        if self.counted.len() >= MAX_STORED {
            self.counted.clear();
            self.usable.clear();
        }
        self.counted.insert(uid);
        self.usable.insert(uid);
    }

    /// Records that a FREE_BUFFER is sent: llama.cpp's server then refuses to run any stored graph, and still counts them.
    pub(super) fn invalidate(&mut self) {
        self.usable.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphs_are_dropped_when_the_limit_is_reached_and_unusable_after_a_free() {
        let mut graphs = StoredGraphs::default();
        assert!(!graphs.is_usable(1));
        for uid in 1..=MAX_STORED as u64 {
            graphs.record_sent(uid);
        }
        assert!(graphs.is_usable(1) && graphs.is_usable(MAX_STORED as u64));
        // Also a uid that is stored already clears the others: the server checks the limit first.
        graphs.record_sent(5);
        assert!(graphs.is_usable(5) && !graphs.is_usable(1));
        graphs.invalidate();
        assert!(!graphs.is_usable(5));
        // The uid counts once, although it was sent twice.
        graphs.record_sent(5);
        for uid in 2000..2000 + MAX_STORED as u64 - 1 {
            graphs.record_sent(uid);
        }
        assert!(graphs.is_usable(5));
        graphs.record_sent(9000);
        assert!(!graphs.is_usable(5) && graphs.is_usable(9000));
    }
}
