//! Hardware connections: the queues through which the streams of a context reach their device.
//!
//! A GPU has a limited number of them (8 unless `CUDA_DEVICE_MAX_CONNECTIONS` says otherwise), and a context's streams share
//! them in turn. A connection starts operations in the order of their submission, whatever stream they belong to. So an
//! operation that waits for an event or for a value in memory also holds up all later operations of other streams on its
//! connection. If the value is written by one of these, or by the program once it has waited for one of these, none of
//! them ever starts: a deadlock that machines with more connections, or programs with fewer streams, do not show.
//!
//! The hidden streams of a graph's launch have connections of their own; the launch occupies its stream's connection until all
//! nodes are done. Simulated time ignores connections.

use std::collections::BTreeMap;

use super::{StreamPoint, Streams};
use crate::engine::Stream;
use crate::handle::{ContextId, StreamId};

/// Assigns connections to new streams.
#[derive(Debug, Default)]
pub(super) struct ConnectionCounter {
    /// Connections of a context; `None` if they are not limited.
    most: Option<u32>,
    /// Number of streams that each context has created.
    created: BTreeMap<ContextId, u32>,
}

/// A deadlock of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionDeadlock {
    /// A stream whose next operation cannot start.
    pub blocked: StreamId,
    /// The stream with the earlier operation on the same connection.
    pub behind: StreamId,
    /// Number of the connection in their context, from 0.
    pub connection: u32,
    /// The stream that `behind` depends on in the end, which waits for a value; may be the same.
    pub waiting: StreamId,
    /// Address of the value.
    pub address: u64,
}

/// The first connection on the way from a point to the value that it depends on: the blocked stream, the stream before it, and
/// the number of the connection.
type Shared = (StreamId, StreamId, u32);

impl ConnectionCounter {
    pub(super) fn new(most: Option<u32>) -> Self {
        Self { most, ..Self::default() }
    }

    /// The connection of a context's next stream.
    pub(super) fn next(&mut self, context: ContextId) -> Option<u32> {
        let most = self.most?;
        let created = self.created.entry(context).or_default();
        let connection = *created % most;
        *created = created.wrapping_add(1);
        Some(connection)
    }

    /// Forgets a context that ended.
    pub(super) fn forget(&mut self, context: ContextId) {
        self.created.remove(&context);
    }
}

impl Streams {
    /// The stream with the oldest operation on a stream's connection, if the first operation of `stream` must wait for it to
    /// start. A wait for a value starts when the value is there.
    pub(super) fn blocker(&self, stream: &Stream) -> Option<StreamId> {
        let connection = stream.connection?;
        let own = stream.queue.front()?.order;
        let others = self.table.iter().filter(|(_, other)| {
            (other.context, other.connection) == (stream.context, Some(connection)) && !std::ptr::eq(*other, stream)
        });
        let pending = others.filter_map(|(id, other)| {
            let order = match &other.running {
                Some(running) if running.awaits_value => running.order,
                _ => other.queue.front()?.order,
            };
            Some((order, id))
        });
        pending.filter(|&(order, _)| order < own).min().map(|(_, id)| id)
    }

    /// A connection through which one of these points depends on a value that is not written yet. It is a deadlock if the
    /// program does not write the value before it has waited for the points.
    pub fn connection_deadlock(&self, points: &[StreamPoint]) -> Option<ConnectionDeadlock> {
        let mut seen = Vec::new();
        let unreached = points.iter().filter(|&&point| !self.is_reached(point));
        unreached.map(|point| point.stream).find_map(|stream| self.find_value_wait(stream, None, &mut seen))
    }

    /// Follows the dependencies of a stream's first operation to a wait for a value.
    fn find_value_wait(
        &self,
        id: StreamId,
        shared: Option<Shared>,
        seen: &mut Vec<(StreamId, bool)>,
    ) -> Option<ConnectionDeadlock> {
        if seen.contains(&(id, shared.is_some())) {
            return None;
        }
        seen.push((id, shared.is_some()));
        let stream = self.table.get(id).ok()?;
        if stream.running.is_some() {
            return None;
        }
        let first = stream.queue.front()?;
        if let Some(behind) = self.blocker(stream) {
            let shared = shared.or_else(|| Some((id, behind, stream.connection?)));
            if let Some(found) = self.find_value_wait(behind, shared, seen) {
                return Some(found);
            }
        }
        let mut unreached = first.after.iter().filter(|&&point| !self.is_reached(point)).peekable();
        if unreached.peek().is_none()
            && let (Some((blocked, behind, connection)), Some(address)) = (shared, first.work.awaited_address())
        {
            return Some(ConnectionDeadlock { blocked, behind, connection, waiting: id, address });
        }
        unreached.find_map(|point| self.find_value_wait(point.stream, shared, seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{StreamKind, StreamOp, Timeline, WaitCondition};
    use crate::mem::MovedBytes;

    fn streams<const N: usize>(connections: u32) -> (Streams, [StreamId; N]) {
        let mut streams = Streams::new(Timeline::default(), Some(connections));
        let ids = [0; N].map(|_| streams.create(ContextId::default(), StreamKind::NonBlocking));
        (streams, ids)
    }

    fn submit(streams: &mut Streams, stream: StreamId, work: StreamOp) -> StreamPoint {
        streams.submit(stream, work).unwrap_or_else(|error| panic!("{error}"))
    }

    const WAIT: StreamOp = StreamOp::WaitValue(64, 1, WaitCondition::Eq);

    #[test]
    fn streams_share_connections_in_turn_and_start_in_the_order_of_submission() {
        let (mut streams, [a, b, c]) = streams(2);
        assert_eq!([a, b, c].map(|id| streams.table.get(id).unwrap().connection), [Some(0), Some(1), Some(0)]);
        for stream in [a, b, c] {
            submit(&mut streams, stream, StreamOp::Wait);
        }
        submit(&mut streams, a, StreamOp::Wait);
        assert_eq!(streams.ready(), [a, b]);
        // The first operation of `a` has started, so that of `c` may start; the second of `a` is behind `c`.
        assert!(streams.begin(a).is_some());
        assert_eq!(streams.ready(), [b, c]);
        streams.finish(a, MovedBytes::default());
        assert_eq!(streams.ready(), [b, c]);
        assert!(streams.begin(c).is_some());
        assert_eq!(streams.ready(), [a, b]);
    }

    #[test]
    fn a_wait_for_a_value_holds_up_its_connection_while_it_is_tried() {
        let (mut streams, [a, _, c]) = streams(2);
        submit(&mut streams, a, WAIT);
        let point = submit(&mut streams, c, StreamOp::Wait);
        for _ in 0..2 {
            let Some((_, wait)) = streams.begin(a) else { panic!("the stream has an operation") };
            assert_eq!(streams.ready(), []);
            streams.requeue(a, wait);
            assert_eq!(streams.ready(), [a]);
        }
        let expected = ConnectionDeadlock { blocked: c, behind: a, connection: 0, waiting: a, address: 64 };
        assert_eq!(streams.connection_deadlock(&[point]), Some(expected));
        assert!(streams.begin(a).is_some());
        streams.finish(a, MovedBytes::default());
        assert_eq!((streams.connection_deadlock(&[point]), streams.ready()), (None, vec![c]));
    }

    #[test]
    fn deadlocks_are_found_through_events_and_only_behind_shared_connections() {
        let (mut streams, [a, b, c, d]) = streams(3);
        let waited = submit(&mut streams, a, WAIT);
        // `b` has its own connection and waits for `a`'s value itself: no deadlock of a connection.
        assert_eq!(streams.wait(b, waited), Ok(()));
        let own = streams.tail(b);
        assert_eq!(streams.connection_deadlock(&[waited, own]), None);
        // `d` is behind `a`, `c` waits for `d` by an event.
        let behind = submit(&mut streams, d, StreamOp::Wait);
        assert_eq!(streams.wait(c, behind), Ok(()));
        let last = submit(&mut streams, c, StreamOp::Wait);
        let found = streams.connection_deadlock(&[last]).map(|found| (found.blocked, found.behind, found.waiting));
        assert_eq!(found, Some((d, a, a)));
    }
}
