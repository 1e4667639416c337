//! The extensions: every request, answer and notice there and back, cut at every length, and bent.

use crate::rpc::wire::ext::*;
use crate::rpc::wire::{GraphCompute, REQUEST_HEADER, TENSOR_RECORD, WireError};
use fastrand::Rng;

use super::inputs::{LIMITS, Store, mutate};

/// What requests borrow besides a [`Store`].
struct More {
    spans: Vec<[u8; 24]>,
    tickets: Vec<Ticket>,
    text: String,
}

impl More {
    fn new(rng: &mut Rng, n: usize) -> More {
        More {
            spans: (0..n).map(|_| Spans::encode(&span(rng))).collect(),
            tickets: (0..n).map(|_| std::array::from_fn(|_| rng.u8(..))).collect(),
            text: (0..n).map(|_| ['a', '0', 'é', '/', '東'][rng.usize(0..5)]).collect(),
        }
    }
}

fn span(rng: &mut Rng) -> Span {
    Span { buffer: rng.u64(..), offset: rng.u64(..), len: rng.u64(..1 << 40) }
}

fn shape(rng: &mut Rng) -> Option<Shape> {
    rng.bool().then(|| Shape { dtype: rng.u32(..NO_TENSOR), ne: std::array::from_fn(|_| rng.u32(..)) })
}

fn request<'a>(command: ExtCommand, rng: &mut Rng, store: &'a Store, more: &'a More) -> ExtRequest<'a> {
    let (queue, device, number, span) = (rng.u32(..), rng.u32(..), rng.u64(..), span(rng));
    let graph = GraphCompute::new(device, &store.nodes, &store.tensors).expect("few enough");
    let (tickets, text) = (TicketList(&more.tickets), more.text.as_str());
    match command {
        ExtCommand::Greet => ExtRequest::Greet(Greet { revision: rng.u32(..) }),
        ExtCommand::OpenQueue => ExtRequest::OpenQueue(OpenQueue { queue, device }),
        ExtCommand::CloseQueue => ExtRequest::CloseQueue(CloseQueue { queue }),
        ExtCommand::KeepGraph => ExtRequest::KeepGraph(KeepGraph { id: number, graph }),
        ExtCommand::RunGraph => ExtRequest::RunGraph(RunGraph { queue, graph: number }),
        ExtCommand::Write => ExtRequest::WriteHead(WriteHead { queue, span, shape: shape(rng) }),
        ExtCommand::Read => ExtRequest::Read(Read { queue, id: number, spans: Spans::new(&more.spans) }),
        ExtCommand::Fill => ExtRequest::Fill(Fill { queue, span, value: rng.u8(..) }),
        ExtCommand::Copy => ExtRequest::Copy(Copy { queue, src: span, dst: self::span(rng) }),
        ExtCommand::Mark => ExtRequest::Mark(Mark { queue, number }),
        ExtCommand::Wait => ExtRequest::Wait(Wait { queue, of: device, number }),
        ExtCommand::Ask => ExtRequest::Ask(Ask { queue, number }),
        ExtCommand::Support => ExtRequest::Support(Support { graph }),
        ExtCommand::Load => {
            let digest = std::array::from_fn(|_| rng.u8(..));
            ExtRequest::Load(Load { queue, span, shape: shape(rng), digest, name: text })
        }
        ExtCommand::Tickets => ExtRequest::Tickets(Tickets { count: rng.u32(..) }),
        ExtCommand::Receive => ExtRequest::Receive(Receive { queue, span, tickets }),
        ExtCommand::Send => ExtRequest::Send(Send { queue, span, tickets, address: text }),
        ExtCommand::Reach => ExtRequest::Reach(Reach { address: text }),
        ExtCommand::Put => {
            let ticket = std::array::from_fn(|_| rng.u8(..));
            ExtRequest::Put(Put { ticket, data: &store.data })
        }
        ExtCommand::Ping => ExtRequest::Ping(Ping {}),
    }
}

/// The header and the body of a request; of a WRITE, the head.
fn frame(request: &ExtRequest<'_>) -> ([u8; REQUEST_HEADER], Vec<u8>) {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    let body = bytes.split_off(REQUEST_HEADER);
    (bytes.try_into().expect("a header"), body)
}

fn fault(rng: &mut Rng, text: &str) -> Fault {
    let kind = match rng.u8(0..4) {
        0 => FaultKind::Other,
        1 => FaultKind::OutOfMemory { asked: rng.u64(..), left: rng.u64(..), limit: rng.u64(..) },
        2 => FaultKind::Unsupported(rng.u32(..)),
        _ => FaultKind::Data(rng.u32(..)),
    };
    Fault { kind, text: text.to_owned() }
}

fn state(rng: &mut Rng) -> State {
    [State::Ready, State::Full, State::Draining][rng.usize(0..3)]
}

/// Answers with the command that each is to.
fn answers<'a>(rng: &mut Rng, more: &'a More) -> Vec<(ExtCommand, Answer<'a>)> {
    let text = more.text.as_str();
    let devices = (0..rng.usize(0..4)).map(|_| DeviceRecord {
        name: text.to_owned(),
        description: text.repeat(2),
        kind: rng.u8(..),
        caps: rng.u32(..),
        alignment: rng.u64(..),
        max_buffer: rng.u64(..),
        features: vec![(text.to_owned(), String::new()); rng.usize(0..3)],
    });
    let reply = GreetReply {
        devices: devices.collect(),
        build: text.to_owned(),
        max_message: rng.u64(..),
        graph_budget: rng.u64(..),
        max_graphs: rng.u32(..),
        abilities: Abilities { loads: rng.bool(), dials: rng.bool() },
        sessions: rng.u32(..),
    };
    let support = if rng.bool() { Ok(rng.bool()) } else { Err(fault(rng, text)) };
    let reach = if rng.bool() { Ok(()) } else { Err(text) };
    vec![
        (ExtCommand::Greet, Answer::Greet(reply)),
        (ExtCommand::Support, Answer::Support(support)),
        (ExtCommand::Load, Answer::Load(rng.bool())),
        (ExtCommand::Tickets, Answer::Tickets(TicketList(&more.tickets))),
        (ExtCommand::Reach, Answer::Reach(reach)),
        (ExtCommand::Ping, Answer::Ping(state(rng), rng.u32(..))),
    ]
}

fn notices<'a>(rng: &mut Rng, store: &'a Store, more: &'a More) -> Vec<Notice<'a>> {
    vec![
        Notice::Reply(&store.data),
        Notice::Reached { queue: rng.u32(..), number: rng.u64(..) },
        Notice::Data { id: rng.u64(..), bytes: &store.data },
        Notice::Failed { queue: rng.u32(..), fault: fault(rng, &more.text) },
        Notice::Refused(&more.text),
        Notice::State(state(rng)),
    ]
}

fn encoded(answer: &Answer<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    answer.encode(&mut bytes);
    bytes
}

/// Header and body of a notice.
fn split(notice: &Notice<'_>) -> (NoticeHeader, Vec<u8>) {
    let mut bytes = Vec::new();
    notice.encode(&mut bytes);
    let body = bytes.split_off(NOTICE_HEADER);
    let header = NoticeHeader::decode(bytes.first_chunk().expect("a header")).expect("a kind");
    assert_eq!((header.kind, header.size), (notice.kind(), body.len() as u64));
    assert_eq!(header.encode().to_vec(), bytes);
    (header, body)
}

#[test]
fn round_trip() {
    let mut rng = Rng::with_seed(31);
    for round in 0..50 {
        let (store, more) = (Store::new(&mut rng, round, 2 * round, 100 * round), More::new(&mut rng, round));
        for &command in ExtCommand::ALL {
            let sent = request(command, &mut rng, &store, &more);
            let (header, body) = frame(&sent);
            assert!(ExtHeader::is_one(&header));
            let header = ExtHeader::decode(&header).expect("a command");
            let streamed = if let ExtRequest::WriteHead(head) = &sent { head.span.len } else { 0 };
            assert_eq!(header, ExtHeader { command, size: body.len() as u64 + streamed });
            assert_eq!(header.body_len(&LIMITS), Ok(header.size as usize), "{command}");
            assert_eq!(sent.command(), command);
            assert_eq!(ExtRequest::decode(command, &body, &LIMITS).as_ref(), Ok(&sent), "{command}");
        }
        for (command, sent) in answers(&mut rng, &more) {
            assert_eq!(Answer::decode(command, &encoded(&sent)).as_ref(), Ok(&sent), "{command}");
        }
        for sent in notices(&mut rng, &store, &more) {
            let (header, body) = split(&sent);
            assert_eq!(Notice::decode(header.kind, &body).as_ref(), Ok(&sent));
        }
    }
}

#[test]
fn cut_at_any_length_or_one_byte_too_long() {
    let mut rng = Rng::with_seed(32);
    for n in 0..5 {
        let (store, more) = (Store::new(&mut rng, n, n, 20), More::new(&mut rng, n));
        for &command in ExtCommand::ALL {
            let sent = request(command, &mut rng, &store, &more);
            let mut body = frame(&sent).1;
            for len in 0..body.len() {
                match (ExtRequest::decode(command, &body[..len], &LIMITS), &sent) {
                    // Messages that end with as many as there are.
                    (Ok(ExtRequest::Put(put)), ExtRequest::Put(_)) => {
                        assert_eq!(put.data, &store.data[..len - PUT_HEAD])
                    }
                    (Ok(ExtRequest::Read(read)), ExtRequest::Read(_)) => assert_eq!(read.spans.len(), (len - 12) / 24),
                    (Err(WireError::Truncated { .. }), _) => {}
                    (other, _) => panic!("{command} at {len}: {other:?}"),
                }
            }
            body.push(0);
            match ExtRequest::decode(command, &body, &LIMITS) {
                Ok(ExtRequest::Put(put)) => assert_eq!(put.data.len(), store.data.len() + 1),
                Err(WireError::Truncated { what: "spans", need: 24, have: 1 }) if command == ExtCommand::Read => {}
                other => assert_eq!(other, Err(WireError::Trailing { what: command.name(), extra: 1 })),
            }
        }
        for (command, sent) in answers(&mut rng, &more) {
            let mut body = encoded(&sent);
            for len in 0..body.len() {
                let cut = Answer::decode(command, &body[..len]);
                assert!(matches!(cut, Err(WireError::Truncated { .. })), "{command} at {len}: {cut:?}");
            }
            body.push(0);
            let trailing = WireError::Trailing { what: command.name(), extra: 1 };
            assert_eq!(Answer::decode(command, &body), Err(trailing));
        }
        for sent in notices(&mut rng, &store, &more) {
            let (NoticeHeader { kind, .. }, body) = split(&sent);
            if let Notice::Reply(_) | Notice::Data { .. } = sent {
                continue; // bytes of any length: a reader holds the server to what it asked for
            }
            for len in 0..body.len() {
                let cut = Notice::decode(kind, &body[..len]);
                assert!(matches!(cut, Err(WireError::Truncated { .. })), "{kind:?} at {len}: {cut:?}");
            }
            let long = [&body[..], &[0]].concat();
            assert_eq!(Notice::decode(kind, &long), Err(WireError::Trailing { what: "notice", extra: 1 }));
        }
    }
}

#[test]
fn sizes_are_checked_before_a_body_is_read() {
    let truncated = |what, need, have| Err(WireError::Truncated { what, need, have });
    let too_large = |what, have, limit| Err(WireError::TooLarge { what, have, limit });
    for (command, size, want) in [
        (ExtCommand::Greet, 3, truncated("GREET", 4, 3)),
        (ExtCommand::Greet, 5, too_large("GREET", 5, 4)),
        (ExtCommand::Ping, 0, Ok(0)),
        (ExtCommand::Ping, 1, too_large("PING", 1, 0)),
        (ExtCommand::KeepGraph, LIMITS.max_body, Ok(LIMITS.max_body as usize)),
        (ExtCommand::KeepGraph, LIMITS.max_body + 1, too_large("KEEP_GRAPH", LIMITS.max_body + 1, LIMITS.max_body)),
        (ExtCommand::Read, u64::MAX, too_large("READ", u64::MAX, LIMITS.max_body)),
        (ExtCommand::Write, 47, truncated("WRITE", 48, 47)),
        (ExtCommand::Write, 1 << 40, Ok(1 << 40)),
        (ExtCommand::Write, u64::MAX, too_large("WRITE", u64::MAX, isize::MAX as u64)),
        (ExtCommand::Put, (256 << 10) + 16, Ok((256 << 10) + 16)),
        (ExtCommand::Put, (256 << 10) + 17, too_large("PUT", (256 << 10) + 17, (256 << 10) + 16)),
    ] {
        assert_eq!(ExtHeader { command, size }.body_len(&LIMITS), want, "{command} {size}");
    }
    for number in (0..128).chain(148..=255) {
        assert_eq!(ExtHeader::decode(&[number; REQUEST_HEADER]), Err(WireError::UnknownCommand(number)));
    }
}

#[test]
fn counts_cost_nothing() {
    let huge = u32::MAX.to_le_bytes();
    let list = |what: &'static str, need| WireError::Truncated { what, need: need * u64::from(u32::MAX), have: 4 };
    let tickets = [&huge[..], &[0; 4]].concat();
    assert_eq!(Answer::decode(ExtCommand::Tickets, &tickets), Err(list("tickets", TICKET as u64)));
    let receive = [&[0; 28][..], &tickets].concat();
    assert_eq!(ExtRequest::decode(ExtCommand::Receive, &receive, &LIMITS), Err(list("tickets", TICKET as u64)));
    assert_eq!(Answer::decode(ExtCommand::Reach, &[&[1][..], &tickets].concat()), Err(list("reason", 1)));
    // A device and a feature for each of four thousand million: the first that is missing is the end.
    let greet = [&[0; 4 + 8 + 8 + 4 + 2 + 4][..], &huge].concat();
    assert!(matches!(Answer::decode(ExtCommand::Greet, &greet), Err(WireError::Truncated { what: "name", .. })));
    let device = [&greet[..], &[0; 4 + 4 + 1 + 4 + 8 + 8], &huge].concat();
    assert!(matches!(Answer::decode(ExtCommand::Greet, &device), Err(WireError::Truncated { what: "feature", .. })));
    let graph = [&[0; 12][..], &huge, &[0; TENSOR_RECORD]].concat();
    let over = WireError::TooLarge { what: "n_nodes", have: u32::MAX.into(), limit: LIMITS.max_nodes.into() };
    assert_eq!(ExtRequest::decode(ExtCommand::KeepGraph, &graph, &LIMITS), Err(over));
}

#[test]
fn values_that_no_field_has() {
    let bad = |what, expected, have| WireError::BadValue { what, expected, have };
    assert_eq!(Answer::decode(ExtCommand::Support, &[3]), Err(bad("support", "0 to 2", 3)));
    assert_eq!(Answer::decode(ExtCommand::Load, &[2]), Err(bad("found", "0 or 1", 2)));
    assert_eq!(Answer::decode(ExtCommand::Ping, &[3, 0, 0, 0, 0]), Err(bad("state", "0 to 2", 3)));
    assert_eq!(Answer::decode(ExtCommand::Mark, &[]), Err(WireError::UnknownCommand(137)));
    let text = [&[1, 2, 0, 0, 0][..], &[b'a', 0xff]].concat();
    assert_eq!(Answer::decode(ExtCommand::Reach, &text), Err(bad("reason", "UTF-8", 0xff)));
    assert_eq!(Notice::decode(NoticeKind::Failed, &[0, 0, 0, 0, 4, 0, 0, 0]), Err(bad("kind", "0 to 3", 4)));
    for kind in 6..=255 {
        assert_eq!(NoticeHeader::decode(&[kind; NOTICE_HEADER]), Err(bad("notice", "0 to 5", kind.into())));
    }
}

#[test]
fn the_greeting_is_one_byte() {
    for byte in 0..=255 {
        let greeting = Greeting::from_byte(byte);
        assert_eq!(greeting.is_some(), byte & 15 > 0 && byte < 0x30, "{byte:#x}");
        assert!(greeting.is_none_or(|greeting| greeting.to_byte() == byte));
    }
    let ready = Greeting { revision: REVISION, state: State::Ready };
    assert_eq!((ready.to_byte(), Greeting { state: State::Draining, ..ready }.to_byte()), (1, 0x21));
}

/// What is accepted encodes to the bytes that it came from.
#[test]
fn bent_messages_are_refused_or_canonical() {
    let mut rng = Rng::with_seed(33);
    let (mut accepted, mut refused) = (0, 0);
    let mut count = |kept: Option<bool>| match kept {
        Some(same) => {
            assert!(same, "not what came");
            accepted += 1;
        }
        None => refused += 1,
    };
    for _ in 0..3000 {
        let (nodes, tensors, data) = (rng.usize(0..4), rng.usize(0..3), rng.usize(0..50));
        let (store, more) = (Store::new(&mut rng, nodes, tensors, data), More::new(&mut rng, nodes));
        for &command in ExtCommand::ALL {
            let mut body = frame(&request(command, &mut rng, &store, &more)).1;
            mutate(&mut body, &mut rng);
            let again = ExtRequest::decode(command, &body, &LIMITS).map(|request| frame(&request).1);
            // Of a shape that is none the dimensions mean nothing.
            let shaped = matches!(command, ExtCommand::Write | ExtCommand::Load);
            count(again.ok().map(|again| again == body || (shaped && again.len() == body.len())));
        }
        for (command, sent) in answers(&mut rng, &more) {
            let mut body = encoded(&sent);
            mutate(&mut body, &mut rng);
            // Why not, of a server that does.
            let told = command == ExtCommand::Reach;
            count(Answer::decode(command, &body).ok().map(|answer| encoded(&answer) == body || told));
        }
        for sent in notices(&mut rng, &store, &more) {
            let (NoticeHeader { kind, .. }, mut body) = split(&sent);
            mutate(&mut body, &mut rng);
            count(Notice::decode(kind, &body).ok().map(|notice| split(&notice).1 == body));
        }
    }
    assert!(accepted > 20_000 && refused > 10_000, "{accepted} accepted, {refused} refused: a one-sided test");
}
