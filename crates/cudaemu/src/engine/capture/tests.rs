//! Tests of stream capture: short scripts of calls with the results that CUDA documents.

use super::*;
use crate::handle::Handle;

/// Captures with a minimal graph, whose node ids count up from 1.
#[derive(Default)]
struct CaptureFixture {
    captures: Captures,
    /// The nodes that each node depends on.
    after: BTreeMap<NodeId, Vec<NodeId>>,
}

fn stream(raw: u64) -> StreamId {
    StreamId::from_raw(raw)
}

fn event(raw: u64) -> EventId {
    EventId::from_raw(raw)
}

fn node(raw: u64) -> NodeId {
    NodeId::from_raw(raw)
}

fn this_thread() -> ThreadId {
    std::thread::current().id()
}

fn another_thread() -> ThreadId {
    std::thread::spawn(this_thread).join().unwrap()
}

const GRAPH: u64 = 77;

impl CaptureFixture {
    /// Begins a capture in a stream.
    fn begin(&mut self, on: u64, mode: CaptureMode) -> Result<()> {
        self.captures.begin(stream(on), mode, this_thread(), GraphId::from_raw(GRAPH + on), None)
    }

    /// Captures a node in a stream.
    fn work(&mut self, on: u64) -> Result<NodeId> {
        let after = self.captures.frontier(stream(on))?.1.to_vec();
        let made = node(self.after.len() as u64 + 1);
        self.after.insert(made, after);
        self.captures.advance(stream(on), made);
        Ok(made)
    }

    /// Ends the capture of a stream: an error of the call, or the result of the capture.
    fn end(&mut self, on: u64) -> Result<Result<()>> {
        let after = &self.after;
        let ended = self.captures.end(stream(on), this_thread(), |_, nodes| {
            let (mut found, mut open) = (BTreeSet::new(), nodes.to_vec());
            while let Some(node) = open.pop() {
                if found.insert(node) {
                    open.extend(after.get(&node).into_iter().flatten());
                }
            }
            found
        });
        ended.map(|ended| ended.result)
    }
}

/// Runs a script and returns the result of each step. `b1`: begin a capture in stream 1. `w1`: submit work to it. `r1a`: record
/// event a in stream 1. `s1a`: stream 1 waits for event a. `s1n`: it waits for an event that was never recorded. `e1`: end the
/// capture. `d1`: destroy the stream. `q1`: the host queries stream 1. `ha`: the host queries event a. `u`: an unsafe call.
fn run_script(text: &str) -> (CaptureFixture, Vec<Result<()>>) {
    let mut fixture = CaptureFixture::default();
    let results = text.split_whitespace().map(|step| {
        let letters: Vec<char> = step.chars().collect();
        let number = |at: usize| letters[at].to_digit(10).map_or(letters[at] as u64, u64::from);
        match letters[0] {
            'b' => fixture.begin(number(1), CaptureMode::Global),
            'w' => fixture.work(number(1)).map(drop),
            'r' => fixture.captures.record(event(number(2)), stream(number(1))).map(drop),
            's' => fixture.captures.wait(stream(number(1)), event(number(2)), letters[2] != 'n').map(drop),
            'e' => fixture.end(number(1)).and_then(|result| result),
            'd' => {
                fixture.captures.destroy(stream(number(1)));
                Ok(())
            }
            'q' => fixture.captures.invalidate_streams([stream(number(1))], Error::StreamCaptureUnsupported),
            'h' => fixture.captures.check_host_wait(event(number(1))),
            _ => fixture.captures.check_unsafe_call(this_thread()),
        }
    });
    let results = results.collect();
    (fixture, results)
}

#[test]
fn scripts_end_with_the_results_of_cuda() {
    use Error::{
        CapturedEvent, IllegalState, StreamCaptureInvalidated as Invalidated, StreamCaptureIsolation,
        StreamCaptureMerge, StreamCaptureUnjoined, StreamCaptureUnmatched, StreamCaptureUnsupported,
    };
    for (text, last) in [
        ("b1 e1", Ok(())),
        ("b1 w1 w1 e1", Ok(())),
        ("b1 b1", Err(IllegalState)),
        ("e1", Err(IllegalState)),
        ("w1", Err(IllegalState)),
        ("b1 e1 w1", Err(IllegalState)),
        // Fork into other streams and join them again.
        ("b1 w1 r1a s2a w2 r2b s1b e1", Ok(())),
        ("b1 w1 r1a s2a w2 r2b s1b w1 e1", Ok(())),
        ("b1 r1a s2a w2 r2b s1b e1", Ok(())),
        ("b1 w1 r1a s2a w2 e1", Err(StreamCaptureUnjoined)),
        ("b1 w1 r1a s2a w2 r2b w2 s1b e1", Err(StreamCaptureUnjoined)),
        ("b1 w1 r1a s2a w2 r2b s3b w3 r3c s1c e1", Ok(())),
        ("b1 w1 r1a s2a e1", Ok(())),
        ("b1 w1 r1a s2a w2 e1 w2", Err(IllegalState)),
        ("b1 w1 r1a s2a w2 r2b s1b e2", Err(StreamCaptureUnmatched)),
        ("b1 w1 r1a s2a w2 r2b s1b e2 e1", Ok(())),
        ("b1 w1 r1a s2a b2", Err(IllegalState)),
        // The joined stream can be captured again afterwards.
        ("b1 w1 r1a s2a w2 r2b s1b e1 b2", Ok(())),
        // Events of other streams and captures.
        ("r1a b1 s1a", Err(StreamCaptureIsolation)),
        ("r1a b1 s1a e1", Err(Invalidated)),
        ("b1 s1n", Ok(())),
        ("b1 b2 w2 r2a s1a", Err(StreamCaptureMerge)),
        ("b1 b2 w2 r2a s1a e2", Err(Invalidated)),
        ("b1 b2 w2 r2a s1a e1", Err(Invalidated)),
        ("b1 w1 r1a e1 s2a", Err(CapturedEvent)),
        ("b1 w1 r1a e1 r1a s2a", Ok(())),
        ("b1 w1 r1a ha", Err(CapturedEvent)),
        ("b1 w1 r1a ha w1", Err(Invalidated)),
        ("b1 r1a q1 s2a", Err(Invalidated)),
        ("b1 q1 r1a", Err(Invalidated)),
        // Queries and unsafe calls of the host.
        ("q1", Ok(())),
        ("b1 q2 w1 e1", Ok(())),
        ("b1 q1", Err(StreamCaptureUnsupported)),
        ("b1 q1 q1", Err(Invalidated)),
        ("b1 q1 w1", Err(Invalidated)),
        ("b1 q1 e1", Err(Invalidated)),
        ("b1 q1 e1 b1 w1 e1", Ok(())),
        ("u", Ok(())),
        ("b1 u", Err(StreamCaptureUnsupported)),
        ("b1 u e1", Err(Invalidated)),
        // Destroyed streams.
        ("b1 d1 e1", Err(IllegalState)),
        ("b1 d1 b1 e1", Ok(())),
        ("b1 w1 r1a s2a d2 e1", Err(Invalidated)),
        ("b1 w1 r1a s2a d1 w2", Err(IllegalState)),
    ] {
        let (_, results) = run_script(text);
        assert_eq!(results.last(), Some(&last), "{text}: {results:?}");
    }
}

#[test]
fn a_node_depends_on_earlier_work_and_on_joined_streams() {
    let (fixture, _) = run_script("b1 w1 r1a s2a w2 w1 r2b s1b w1 e1");
    let after = |raw: u64| fixture.after[&node(raw)].clone();
    assert_eq!(after(1), []);
    assert_eq!(after(2), [node(1)]);
    assert_eq!(after(3), [node(1)]);
    assert_eq!(after(4), [node(3), node(2)]);
}

#[test]
fn dependencies_can_be_added_and_replaced() {
    let mut fixture = CaptureFixture::default();
    fixture.begin(1, CaptureMode::Relaxed).unwrap();
    let (a, b) = (fixture.work(1).unwrap(), fixture.work(1).unwrap());
    fixture.captures.update(stream(1), &[a], false).unwrap();
    assert_eq!(fixture.captures.frontier(stream(1)).unwrap().1, [b, a]);
    fixture.captures.update(stream(1), &[a], true).unwrap();
    let c = fixture.work(1).unwrap();
    assert_eq!(fixture.after[&c], [a]);
    // No node depends on b any more, so its work is not joined.
    assert_eq!(fixture.end(1), Ok(Err(Error::StreamCaptureUnjoined)));
    assert_eq!(fixture.captures.update(stream(1), &[a], true), Err(Error::IllegalState));
}

#[test]
fn modes_decide_which_threads_may_make_unsafe_calls() {
    use CaptureMode::{Global, Relaxed, ThreadLocal};
    let (mine, its) = (this_thread(), another_thread());
    for (capture, thread, exchanged, allowed) in [
        (Global, mine, Global, false),
        (Global, its, Global, false),
        (Global, its, ThreadLocal, true),
        (Global, mine, ThreadLocal, false),
        (Global, mine, Relaxed, true),
        (ThreadLocal, mine, Global, false),
        (ThreadLocal, its, Global, true),
        (ThreadLocal, mine, Relaxed, true),
        (Relaxed, mine, Global, true),
    ] {
        let mut fixture = CaptureFixture::default();
        fixture.begin(1, capture).unwrap();
        assert_eq!(fixture.captures.exchange(thread, exchanged), Global);
        assert_eq!(fixture.captures.check_unsafe_call(thread).is_ok(), allowed, "{capture:?} {exchanged:?}");
        assert_eq!(fixture.captures.exchange(thread, Global), exchanged);
        assert_eq!(fixture.work(1).is_ok(), allowed);
    }
}

#[test]
fn only_a_relaxed_capture_ends_in_another_thread() {
    for (mode, result) in [
        (CaptureMode::Global, Err(Error::StreamCaptureWrongThread)),
        (CaptureMode::ThreadLocal, Err(Error::StreamCaptureWrongThread)),
        (CaptureMode::Relaxed, Ok(Ok(()))),
    ] {
        let mut fixture = CaptureFixture::default();
        fixture.begin(1, mode).unwrap();
        let ended = fixture.captures.end(stream(1), another_thread(), |_, _| BTreeSet::new());
        assert_eq!(ended.map(|ended| ended.result), result);
    }
}
