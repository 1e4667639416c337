//! Codec of the extensions: round trips of all requests, replies and notifications, truncation at each length, mutated bytes.

use crate::rpc::wire::BodySize::{AtLeast, Between, Buffered, Exact};
use crate::rpc::wire::ext::*;
use crate::rpc::wire::{GraphCompute, REQUEST_HEADER, TENSOR_RECORD, WireError};
use crate::tensor::ByteRuns;
use fastrand::Rng;

use super::inputs::{LIMITS, RequestBuffers, mutate};

/// Data that messages of the extensions borrow, besides a [`RequestBuffers`].
struct ExtRequestBuffers {
    spans: Vec<[u8; 24]>,
    tokens: Vec<TransferToken>,
    text: String,
    addresses: Vec<u8>,
}

impl ExtRequestBuffers {
    fn new(rng: &mut Rng, n: usize) -> ExtRequestBuffers {
        ExtRequestBuffers {
            spans: (0..n).map(|_| BufferSpans::encode(&span(rng))).collect(),
            tokens: (0..n).map(|_| std::array::from_fn(|_| rng.u8(..))).collect(),
            addresses: RankAddresses::encode((0..n).map(|i| ["", "a:1", "gpu-2:50052"][i % 3])),
            text: (0..n).map(|_| ['a', '0', 'é', '/', '東'][rng.usize(0..5)]).collect(),
        }
    }
}

/// docs/protocol.md names the revision of the code in its title, and in no other place, where it could become wrong.
#[test]
fn the_document_names_the_revision_once() {
    let document = include_str!("../../../../docs/protocol.md");
    let title = format!("# fanout's extensions of ggml's RPC protocol, revision {REVISION}\n");
    let rest = document.strip_prefix(&title).expect("docs/protocol.md: the title names another revision");
    let numbered = |word: &str| word.trim_start_matches(['(', ' ']).starts_with(|c: char| c.is_ascii_digit());
    assert!(!rest.split("revision").skip(1).any(numbered), "docs/protocol.md: a revision outside of the title");
}

fn span(rng: &mut Rng) -> BufferSpan {
    BufferSpan { buffer: rng.u64(..), offset: rng.u64(..), len: rng.u64(..1 << 40) }
}

fn shape(rng: &mut Rng) -> Option<TensorShape> {
    rng.bool().then(|| TensorShape { dtype: rng.u32(..NO_TENSOR), ne: std::array::from_fn(|_| rng.u32(..)) })
}

fn runs(rng: &mut Rng) -> ByteRuns {
    let run_bytes = rng.u64(..1 << 30);
    ByteRuns::new(rng.u64(..1 << 63), run_bytes, run_bytes + rng.u64(..1 << 30), rng.u64(..1 << 30)).expect("63 bits")
}

fn request<'a>(
    command: ExtCommand,
    rng: &mut Rng,
    buffers: &'a RequestBuffers,
    ext_buffers: &'a ExtRequestBuffers,
) -> ExtRequest<'a> {
    let (queue, device, number, span) = (rng.u32(..), rng.u32(..), rng.u64(..), span(rng));
    let graph = GraphCompute::new(device, &buffers.nodes, &buffers.tensors).expect("few enough");
    let (token, text) = (std::array::from_fn(|_| rng.u8(..)), ext_buffers.text.as_str());
    match command {
        ExtCommand::HelloExt => ExtRequest::HelloExt(HelloExt { revision: rng.u32(..) }),
        ExtCommand::OpenQueue => ExtRequest::OpenQueue(OpenQueue { queue, device }),
        ExtCommand::CloseQueue => ExtRequest::CloseQueue(CloseQueue { queue }),
        ExtCommand::PrepareGraph => ExtRequest::PrepareGraph(PrepareGraph { id: number, graph }),
        ExtCommand::RunGraph => ExtRequest::RunGraph(RunGraph { queue, graph: number }),
        ExtCommand::Write => ExtRequest::WriteHead(WriteHead { queue, span, shape: shape(rng) }),
        ExtCommand::Read => {
            ExtRequest::ReadSpans(ReadSpans { queue, id: number, spans: BufferSpans::new(&ext_buffers.spans) })
        }
        ExtCommand::Fill => ExtRequest::Fill(Fill { queue, span, value: rng.u8(..) }),
        ExtCommand::Copy => ExtRequest::CopySpan(CopySpan { queue, src: span, dst: self::span(rng) }),
        ExtCommand::Mark => ExtRequest::Mark(Mark { queue, number }),
        ExtCommand::Wait => ExtRequest::Wait(Wait { queue, other_queue: device, number }),
        ExtCommand::NotifyReached => ExtRequest::NotifyReached(NotifyReached { queue, number }),
        ExtCommand::SupportsOp => ExtRequest::SupportsOp(SupportsOp { graph }),
        ExtCommand::Load => {
            let digest = std::array::from_fn(|_| rng.u8(..));
            ExtRequest::Load(Load {
                queue,
                span,
                shape: shape(rng),
                digest,
                bytes: number,
                runs: runs(rng),
                name: text,
            })
        }
        ExtCommand::IssueTokens => ExtRequest::IssueTokens(IssueTokens { count: rng.u32(..) }),
        ExtCommand::ReceiveFromPeer => ExtRequest::ReceiveFromPeer(ReceiveFromPeer { queue, span, token }),
        ExtCommand::SendToPeer => ExtRequest::SendToPeer(SendToPeer { queue, span, token, address: text }),
        ExtCommand::ProbePeer => ExtRequest::ProbePeer(ProbePeer { address: text }),
        ExtCommand::PeerWrite => ExtRequest::PeerWrite(PeerWrite { token, at: number, data: &buffers.data }),
        ExtCommand::Ping => ExtRequest::Ping(Ping {}),
        ExtCommand::Status => ExtRequest::Status(Status {}),
        ExtCommand::JoinGroup => {
            let (secret, addresses) = (std::array::from_fn(|_| rng.u8(..)), RankAddresses::new(&ext_buffers.addresses));
            ExtRequest::JoinGroup(JoinGroup {
                queue,
                group: device,
                secret,
                rank: rng.u32(..),
                part_bytes: number,
                addresses,
            })
        }
        ExtCommand::AttachGroup => {
            let secret = std::array::from_fn(|_| rng.u8(..));
            ExtRequest::AttachGroup(AttachGroup { secret, from: rng.u32(..), to: rng.u32(..) })
        }
        ExtCommand::PublishPart => ExtRequest::PublishPartHead(PublishPartHead {
            rank: rng.u32(..),
            round: number,
            op: rng.u32(..),
            axis: rng.u32(..),
            whole: shape(rng),
            extent: rng.u32(..),
            len: rng.u64(..1 << 40),
        }),
        ExtCommand::FailGroup => ExtRequest::FailGroup(FailGroup { rank: device, reason: text }),
    }
}

/// Header and body of an encoded request; of a WRITE, the head.
fn frame(request: &ExtRequest<'_>) -> ([u8; REQUEST_HEADER], Vec<u8>) {
    let mut bytes = Vec::new();
    request.encode(&mut bytes);
    let body = bytes.split_off(REQUEST_HEADER);
    (bytes.try_into().expect("a header"), body)
}

fn fault(rng: &mut Rng, text: &str) -> DeviceFault {
    let kind = match rng.u8(0..4) {
        0 => DeviceFaultKind::Other,
        1 => DeviceFaultKind::OutOfMemory { requested: rng.u64(..), available: rng.u64(..), limit: rng.u64(..) },
        2 => DeviceFaultKind::Unsupported(rng.u32(..)),
        _ => DeviceFaultKind::Data(rng.u32(..)),
    };
    DeviceFault { kind, text: text.to_owned() }
}

fn state(rng: &mut Rng) -> ServerState {
    [ServerState::Ready, ServerState::Full, ServerState::Draining][rng.usize(0..3)]
}

/// One reply to each command that has one, with the command.
fn responses<'a>(rng: &mut Rng, ext_buffers: &'a ExtRequestBuffers) -> Vec<(ExtCommand, ExtResponse<'a>)> {
    let text = ext_buffers.text.as_str();
    let devices = (0..rng.usize(0..4)).map(|_| DeviceRecord {
        name: text.to_owned(),
        description: text.repeat(2),
        kind: rng.u8(..),
        caps: rng.u32(..),
        alignment: rng.u64(..),
        max_buffer: rng.u64(..),
        features: vec![(text.to_owned(), String::new()); rng.usize(0..3)],
    });
    let devices = devices.collect();
    let reply = HelloExtReply {
        devices,
        build: text.to_owned(),
        max_message: rng.u64(..),
        graph_budget: rng.u64(..),
        max_graphs: rng.u32(..),
        capabilities: ServerCapabilities { load_by_digest: rng.bool(), peer_transfers: rng.bool() },
    };
    let support = if rng.bool() { Ok(rng.bool()) } else { Err(fault(rng, text)) };
    let reach = if rng.bool() { Ok(()) } else { Err(text) };
    vec![
        (ExtCommand::HelloExt, ExtResponse::HelloExt(reply)),
        (ExtCommand::SupportsOp, ExtResponse::SupportsOp(support)),
        (ExtCommand::Load, ExtResponse::Load(rng.bool())),
        (ExtCommand::IssueTokens, ExtResponse::IssueTokens(&ext_buffers.tokens)),
        (ExtCommand::ProbePeer, ExtResponse::ProbePeer(reach)),
        (ExtCommand::AttachGroup, ExtResponse::AttachGroup(reach)),
        (ExtCommand::Ping, ExtResponse::Ping(state(rng), rng.u32(..))),
        (ExtCommand::Status, ExtResponse::Status(text)),
    ]
}

fn notifications<'a>(
    rng: &mut Rng,
    buffers: &'a RequestBuffers,
    ext_buffers: &'a ExtRequestBuffers,
) -> Vec<Notification<'a>> {
    vec![
        Notification::Reply(&buffers.data),
        Notification::MarkReached { queue: rng.u32(..), number: rng.u64(..) },
        Notification::ReadData { id: rng.u64(..), bytes: &buffers.data },
        Notification::QueueFailed { queue: rng.u32(..), fault: fault(rng, &ext_buffers.text) },
        Notification::ProtocolError(&ext_buffers.text),
        Notification::ServerState(state(rng)),
    ]
}

fn encoded(response: &ExtResponse<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    response.encode_body(&mut bytes);
    bytes
}

/// Header and body of an encoded notification.
fn split(notification: &Notification<'_>) -> (NotificationHeader, Vec<u8>) {
    let mut bytes = Vec::new();
    notification.encode(&mut bytes);
    let body = bytes.split_off(NOTIFICATION_HEADER);
    let header = NotificationHeader::decode(bytes.first_chunk().expect("a header")).expect("a kind");
    assert_eq!((header.kind, header.size), (notification.kind(), body.len() as u64));
    assert_eq!(header.encode().to_vec(), bytes);
    (header, body)
}

#[test]
fn round_trip() {
    let mut rng = Rng::with_seed(31);
    for round in 0..50 {
        let (buffers, ext_buffers) =
            (RequestBuffers::new(&mut rng, round, 2 * round, 100 * round), ExtRequestBuffers::new(&mut rng, round));
        for &command in ExtCommand::ALL {
            let sent = request(command, &mut rng, &buffers, &ext_buffers);
            let (header, body) = frame(&sent);
            assert!(ExtHeader::is_extension(&header));
            let header = ExtHeader::decode(&header).expect("a command");
            let streamed = match &sent {
                ExtRequest::WriteHead(head) => head.span.len,
                ExtRequest::PublishPartHead(head) => head.len,
                _ => 0,
            };
            assert_eq!(header, ExtHeader { command, size: body.len() as u64 + streamed });
            assert_eq!(header.body_len(&LIMITS), Ok(header.size as usize), "{command}");
            assert_eq!(sent.command(), command);
            assert_eq!(ExtRequest::decode(command, &body, &LIMITS).as_ref(), Ok(&sent), "{command}");
        }
        for (command, sent) in responses(&mut rng, &ext_buffers) {
            assert_eq!(ExtResponse::decode(command, &encoded(&sent)).as_ref(), Ok(&sent), "{command}");
        }
        for sent in notifications(&mut rng, &buffers, &ext_buffers) {
            let (header, body) = split(&sent);
            assert_eq!(Notification::decode(header.kind, &body).as_ref(), Ok(&sent));
        }
    }
}

#[test]
fn truncated_or_trailing_bytes_are_errors() {
    let mut rng = Rng::with_seed(32);
    for n in 0..5 {
        let (buffers, ext_buffers) = (RequestBuffers::new(&mut rng, n, n, 20), ExtRequestBuffers::new(&mut rng, n));
        for &command in ExtCommand::ALL {
            let sent = request(command, &mut rng, &buffers, &ext_buffers);
            let mut body = frame(&sent).1;
            for len in 0..body.len() {
                match (ExtRequest::decode(command, &body[..len], &LIMITS), &sent) {
                    // The last field has any length.
                    (Ok(ExtRequest::PeerWrite(write)), ExtRequest::PeerWrite(_)) => {
                        assert_eq!(write.data, &buffers.data[..len - PEER_WRITE_HEAD])
                    }
                    (Ok(ExtRequest::ReadSpans(read)), ExtRequest::ReadSpans(_)) => {
                        assert_eq!(read.spans.len(), (len - 12) / 24)
                    }
                    (Ok(ExtRequest::JoinGroup(join)), ExtRequest::JoinGroup(sent)) => {
                        assert!(sent.addresses.iter().zip(join.addresses.iter()).all(|(sent, got)| sent == got))
                    }
                    (Err(WireError::Truncated { .. }), _) => {}
                    (other, _) => panic!("{command} at {len}: {other:?}"),
                }
            }
            body.push(0);
            match ExtRequest::decode(command, &body, &LIMITS) {
                Ok(ExtRequest::PeerWrite(write)) => assert_eq!(write.data.len(), buffers.data.len() + 1),
                Err(WireError::Truncated { what: "spans", need: 24, have: 1 }) if command == ExtCommand::Read => {}
                Err(WireError::Truncated { what: "addresses", .. }) if command == ExtCommand::JoinGroup => {}
                other => assert_eq!(other, Err(WireError::Trailing { what: command.name(), extra: 1 })),
            }
        }
        for (command, sent) in responses(&mut rng, &ext_buffers) {
            let mut body = encoded(&sent);
            for len in 0..body.len() {
                let cut = ExtResponse::decode(command, &body[..len]);
                assert!(matches!(cut, Err(WireError::Truncated { .. })), "{command} at {len}: {cut:?}");
            }
            body.push(0);
            let trailing = WireError::Trailing { what: command.name(), extra: 1 };
            assert_eq!(ExtResponse::decode(command, &body), Err(trailing));
        }
        for sent in notifications(&mut rng, &buffers, &ext_buffers) {
            let (NotificationHeader { kind, .. }, body) = split(&sent);
            if let Notification::Reply(_) | Notification::ReadData { .. } = sent {
                continue; // bytes of any length; the receiver compares the length with its request
            }
            for len in 0..body.len() {
                let cut = Notification::decode(kind, &body[..len]);
                assert!(matches!(cut, Err(WireError::Truncated { .. })), "{kind:?} at {len}: {cut:?}");
            }
            let long = [&body[..], &[0]].concat();
            assert_eq!(Notification::decode(kind, &long), Err(WireError::Trailing { what: "notification", extra: 1 }));
        }
    }
}

#[test]
fn sizes_are_checked_before_a_body_is_read() {
    let bad = |command, expected, have| Err(WireError::BodySize { command, expected, have });
    let too_large = |what, have, limit| Err(WireError::TooLarge { what, have, limit });
    for (command, size, want) in [
        (ExtCommand::HelloExt, 3, bad("HELLO_EXT", Exact(4), 3)),
        (ExtCommand::HelloExt, 5, bad("HELLO_EXT", Exact(4), 5)),
        (ExtCommand::Ping, 0, Ok(0)),
        (ExtCommand::Ping, 1, bad("PING", Exact(0), 1)),
        (ExtCommand::Status, 1, bad("STATUS", Exact(0), 1)),
        (ExtCommand::PrepareGraph, 19, bad("PREPARE_GRAPH", Buffered(20), 19)),
        (ExtCommand::PrepareGraph, LIMITS.max_body, Ok(LIMITS.max_body as usize)),
        (
            ExtCommand::PrepareGraph,
            LIMITS.max_body + 1,
            too_large("PREPARE_GRAPH", LIMITS.max_body + 1, LIMITS.max_body),
        ),
        (ExtCommand::Read, u64::MAX, too_large("READ", u64::MAX, LIMITS.max_body)),
        (ExtCommand::Write, 47, bad("WRITE", AtLeast(48), 47)),
        (ExtCommand::Write, 1 << 40, Ok(1 << 40)),
        (ExtCommand::Write, u64::MAX, too_large("WRITE", u64::MAX, isize::MAX as u64)),
        (ExtCommand::PublishPart, 51, bad("PUBLISH_PART", AtLeast(52), 51)),
        (ExtCommand::PublishPart, 1 << 40, Ok(1 << 40)),
        (ExtCommand::AttachGroup, 25, bad("ATTACH_GROUP", Exact(24), 25)),
        (ExtCommand::FailGroup, 4105, bad("FAIL_GROUP", Between(8, 4104), 4105)),
        (ExtCommand::PeerWrite, (256 << 10) + 24, Ok((256 << 10) + 24)),
        (ExtCommand::PeerWrite, (256 << 10) + 25, bad("PEER_WRITE", Between(24, (256 << 10) + 24), (256 << 10) + 25)),
    ] {
        assert_eq!(ExtHeader { command, size }.body_len(&LIMITS), want, "{command} {size}");
    }
    for number in (0..128).chain(153..=255) {
        assert_eq!(ExtHeader::decode(&[number; REQUEST_HEADER]), Err(WireError::UnknownCommand(number)));
    }
}

#[test]
fn counts_allocate_no_memory() {
    let huge = u32::MAX.to_le_bytes();
    let list = |what: &'static str, need| WireError::Truncated { what, need: need * u64::from(u32::MAX), have: 4 };
    let tokens = [&huge[..], &[0; 4]].concat();
    assert_eq!(ExtResponse::decode(ExtCommand::IssueTokens, &tokens), Err(list("tokens", TRANSFER_TOKEN_BYTES as u64)));
    assert_eq!(ExtResponse::decode(ExtCommand::ProbePeer, &[&[1][..], &tokens].concat()), Err(list("reason", 1)));
    // Counts of 2^32 - 1 elements: decoding ends at the first missing one.
    let devices = [&[0; 4 + 8 + 8 + 4 + 2][..], &huge].concat();
    let features = [&devices[..], &[0; 4 + 4 + 1 + 4 + 8 + 8], &huge].concat();
    for reply in [devices, features] {
        let decoded = ExtResponse::decode(ExtCommand::HelloExt, &reply);
        assert!(matches!(decoded, Err(WireError::Truncated { what: "name", .. })), "{decoded:?}");
    }
    let graph = [&[0; 12][..], &huge, &[0; TENSOR_RECORD]].concat();
    let over = WireError::TooLarge { what: "n_nodes", have: u32::MAX.into(), limit: LIMITS.max_nodes.into() };
    assert_eq!(ExtRequest::decode(ExtCommand::PrepareGraph, &graph, &LIMITS), Err(over));
}

#[test]
fn invalid_values_are_errors() {
    let bad = |what, expected, have| WireError::BadValue { what, expected, have };
    assert_eq!(ExtResponse::decode(ExtCommand::SupportsOp, &[3]), Err(bad("support", "0 to 2", 3)));
    assert_eq!(ExtResponse::decode(ExtCommand::Load, &[2]), Err(bad("found", "0 or 1", 2)));
    assert_eq!(ExtResponse::decode(ExtCommand::Ping, &[3, 0, 0, 0, 0]), Err(bad("state", "0 to 2", 3)));
    assert_eq!(ExtResponse::decode(ExtCommand::Mark, &[]), Err(WireError::NoResponse("MARK")));
    let load = |runs: [u64; 4]| {
        let runs = runs.map(u64::to_le_bytes);
        let body = [&[0; 4 + 24 + 20 + 32 + 8][..], runs.as_flattened(), &[0; 4]].concat();
        ExtRequest::decode(ExtCommand::Load, &body, &LIMITS).map(drop)
    };
    let (stride, number) = ("a stride of at least the bytes of a run", "a number of runs that end below 2^64 bytes");
    assert_eq!(load([9, 8, 7, 2]), Err(bad("runs", stride, 7)));
    assert_eq!(load([9, 8, 0, u64::MAX]), Err(bad("runs", stride, 0)));
    assert_eq!(load([0, 1 << 31, 1 << 32, 1 << 32]), Err(bad("runs", number, 1 << 32)));
    assert_eq!(load([u64::MAX, 1, 1, 1]), Err(bad("runs", number, 1)));
    assert_eq!(load([u64::MAX - 1, 1, 1, 1]), Ok(()));
    let text = [&[1, 2, 0, 0, 0][..], &[b'a', 0xff]].concat();
    assert_eq!(ExtResponse::decode(ExtCommand::ProbePeer, &text), Err(bad("reason", "UTF-8", 0xff)));
    assert_eq!(
        Notification::decode(NotificationKind::QueueFailed, &[0, 0, 0, 0, 4, 0, 0, 0]),
        Err(bad("kind", "0 to 3", 4))
    );
    for kind in 6..=255 {
        assert_eq!(
            NotificationHeader::decode(&[kind; NOTIFICATION_HEADER]),
            Err(bad("notification kind", "0 to 5", kind.into()))
        );
    }
}

#[test]
fn the_offer_is_one_byte() {
    for byte in 0..=255 {
        let offer = ExtensionOffer::from_byte(byte);
        assert_eq!(offer.is_some(), byte & 15 > 0 && byte < 0x30, "{byte:#x}");
        assert!(offer.is_none_or(|offer| offer.to_byte() == byte));
    }
    let ready = ExtensionOffer { revision: REVISION, state: ServerState::Ready };
    assert_eq!((ready.to_byte(), ExtensionOffer { state: ServerState::Draining, ..ready }.to_byte()), (7, 0x27));
}

/// An accepted message encodes to the same bytes.
#[test]
fn mutated_messages_are_rejected_or_canonical() {
    let mut rng = Rng::with_seed(33);
    let (mut accepted, mut rejected) = (0, 0);
    let mut count = |same: Option<bool>| match same {
        Some(same) => {
            assert!(same, "an accepted message encodes to other bytes");
            accepted += 1;
        }
        None => rejected += 1,
    };
    for _ in 0..3000 {
        let (nodes, tensors, data) = (rng.usize(0..4), rng.usize(0..3), rng.usize(0..50));
        let (buffers, ext_buffers) =
            (RequestBuffers::new(&mut rng, nodes, tensors, data), ExtRequestBuffers::new(&mut rng, nodes));
        for &command in ExtCommand::ALL {
            let mut body = frame(&request(command, &mut rng, &buffers, &ext_buffers)).1;
            mutate(&mut body, &mut rng);
            let again = ExtRequest::decode(command, &body, &LIMITS).map(|request| frame(&request).1);
            // The dimensions of a missing shape are ignored, so they may differ.
            let shaped = matches!(command, ExtCommand::Write | ExtCommand::Load | ExtCommand::PublishPart);
            count(again.ok().map(|again| again == body || (shaped && again.len() == body.len())));
        }
        for (command, sent) in responses(&mut rng, &ext_buffers) {
            let mut body = encoded(&sent);
            mutate(&mut body, &mut rng);
            // The reason of a positive reply is ignored, so it may differ.
            let has_ignored_text = matches!(command, ExtCommand::ProbePeer | ExtCommand::AttachGroup);
            count(
                ExtResponse::decode(command, &body).ok().map(|response| encoded(&response) == body || has_ignored_text),
            );
        }
        for sent in notifications(&mut rng, &buffers, &ext_buffers) {
            let (NotificationHeader { kind, .. }, mut body) = split(&sent);
            mutate(&mut body, &mut rng);
            count(Notification::decode(kind, &body).ok().map(|notification| split(&notification).1 == body));
        }
    }
    assert!(accepted > 20_000 && rejected > 10_000, "{accepted} accepted, {rejected} rejected: too few of one kind");
}
