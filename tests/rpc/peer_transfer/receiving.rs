//! The destination server of a peer transfer: order of arrival, valid and invalid tokens, expiry and limits.

use super::support::*;
use crate::extended_support::*;
use crate::support::*;
use fanout::device::DeviceError;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::*;
use std::time::Instant;

#[test]
fn bytes_may_arrive_before_or_after_their_receive() {
    let server = TestServer::start(Config::default());
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    for len in [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, (1 << 20) + 3] {
        let span = dst.alloc_span(len);
        let pieces = len.div_ceil(CHUNK_BYTES);
        for early in [0, pieces / 2, pieces] {
            let data = random_bytes((len + early) as u64, len);
            let (token, split) = (dst.request_token(), (early * CHUNK_BYTES).min(len));
            src.peer_write_all(token, 0, &data[..split]);
            dst.receive_from_peer(span, token);
            dst.read_spans(0, 7, &[span]);
            if split < len {
                dst.assert_ping_replied();
            }
            src.peer_write_all(token, split, &data[split..]);
            assert!(dst.receive_read_bytes() == data, "{len} bytes, {early} pieces early");
        }
    }
}

#[test]
fn a_queue_continues_after_its_bytes_have_arrived() {
    let server = TestServer::start(Config::default());
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    let len = 3 * CHUNK_BYTES + 5;
    let (span, before, after) = (dst.alloc_span(len), dst.alloc_span(len), dst.alloc_span(len));
    let data = random_bytes(1, len);
    for early in [true, false] {
        let token = dst.request_token();
        if early {
            src.peer_write_all(token, 0, &data);
        }
        for value in 0..20 {
            dst.fill_span(0, span, value);
        }
        dst.send_ext(&ExtRequest::CopySpan(CopySpan { queue: 0, src: span, dst: before }));
        dst.receive_from_peer(span, token);
        dst.send_ext(&ExtRequest::CopySpan(CopySpan { queue: 0, src: span, dst: after }));
        dst.fill_span(0, span, 0);
        if !early {
            src.peer_write_all(token, 0, &data);
        }
        assert!(dst.read_bytes(before) == vec![19; len], "work before the transfer, bytes early: {early}");
        assert!(dst.read_bytes(after) == data, "work after the transfer, bytes early: {early}");
        assert!(dst.read_bytes(span) == vec![0; len], "bytes early: {early}");
    }
}

#[test]
fn a_busy_device_does_not_block_the_sender() {
    let held = HeldDevice::new("CPU0");
    let server = TestServer::with_device_list(vec![held.clone()], Config::default());
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    let len = 100 * CHUNK_BYTES + 1;
    let span = dst.alloc_span(len);
    let token = dst.request_token();
    dst.fill_span(0, span, 9);
    dst.receive_from_peer(span, token);
    dst.read_spans(0, 7, &[BufferSpan { len: 1 << 20, ..span }]);
    dst.assert_ping_replied();
    // More pieces than a queue accepts without blocking.
    src.peer_write_all(token, 0, &random_bytes(3, len));
    held.release();
    assert!(dst.receive_read_bytes() == random_bytes(3, len)[..1 << 20]);
    // If the device fails, the receiving queue fails too.
    let held = HeldDevice::new("CPU0");
    let server = TestServer::with_device_list(vec![held.clone()], Config::default());
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    let span = dst.alloc_span(2 * CHUNK_BYTES);
    let token = dst.request_token();
    dst.receive_from_peer(span, token);
    src.peer_write_all(token, 0, &[1; CHUNK_BYTES]);
    held.fail(DeviceError::Misuse("of a test"));
    dst.read_spans(0, 7, &[span]);
    assert!(dst.next_queue_failure().text.contains("of a test"));
}

#[test]
fn bytes_of_later_receives_may_arrive_first() {
    let server = TestServer::start(Config::default());
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    let spans: Vec<_> = (0..5).map(|_| dst.alloc_span(CHUNK_BYTES + 1)).collect();
    let tokens = dst.request_tokens(spans.len() as u32);
    for (span, token) in spans.iter().zip(&tokens) {
        dst.fill_span(0, *span, 9);
        dst.receive_from_peer(*span, *token);
    }
    dst.assert_ping_replied();
    for (seed, token) in tokens.iter().enumerate().rev() {
        src.peer_write_all(*token, 0, &random_bytes(seed as u64, CHUNK_BYTES + 1));
    }
    for (seed, span) in spans.iter().enumerate() {
        assert!(dst.read_bytes(*span) == random_bytes(seed as u64, CHUNK_BYTES + 1), "{seed}");
    }
}

#[test]
fn a_peer_write_without_a_valid_token_is_rejected_and_writes_nothing() {
    let server = TestServer::start(Config::default());
    let mut dst = Client::connect_with_queues(&server);
    let span = dst.alloc_span(100);
    dst.fill_span(0, span, 5);
    // Never issued.
    let mut src = Client::connect_with_queues(&server);
    src.peer_write([7; TRANSFER_TOKEN_BYTES], 0, &[1; 100]);
    src.expect_protocol_error(&["PEER_WRITE", "was not issued by this server"]);
    // A used token.
    let token = dst.request_token();
    let mut src = Client::connect_with_queues(&server);
    src.peer_write_all(token, 0, &[6; 100]);
    dst.receive_from_peer(span, token);
    assert_eq!(dst.read_bytes(span), [6; 100]);
    src.peer_write(token, 0, &[1; 100]);
    src.expect_protocol_error(&["PEER_WRITE", "used"]);
    assert_eq!(dst.read_bytes(span), [6; 100]);
    // A token of a closed queue, and a token of an ended session.
    let tokens = dst.request_tokens(2);
    dst.receive_from_peer(span, tokens[0]);
    dst.close_queue();
    dst.assert_ping_replied();
    let mut src = Client::connect_with_queues(&server);
    // The sender cannot know that the queue was closed, so one use of the token is accepted and its bytes are discarded.
    src.peer_write_all(tokens[0], 0, &[1; 100]);
    src.peer_write(tokens[0], 0, &[1; 100]);
    src.expect_protocol_error(&["PEER_WRITE", "used"]);
    dst.open_queue(0, 0);
    assert_eq!(dst.read_bytes(span), [6; 100]);
    let mut src = Client::connect_with_queues(&server);
    src.peer_write(tokens[1], 0, &[1; 100]);
    src.assert_ping_replied();
    drop(dst);
    eventually("the session of the client has ended", || server.handle.connections() == 1 && server.used_bytes(0) == 0);
    // Nor can it know that the session has ended.
    src.peer_write(tokens[1], 0, &[1; 100]);
    src.assert_ping_replied();
}

/// One peer connection carries the bytes of many queues, so it must survive the end of one receiving queue.
#[test]
fn bytes_for_an_ended_queue_are_discarded() {
    type Case = fn(&mut Client, &HeldDevice, &ExtRequest<'_>);
    let cases: [(&str, Case); 4] = [
        ("closed", |dst, _, receive| {
            dst.send_ext(receive);
            dst.send_ext(&ExtRequest::CloseQueue(CloseQueue { queue: 1 }));
        }),
        ("failed before", |dst, held, receive| {
            held.fail(DeviceError::Ended);
            dst.mark(1, 1);
            dst.notify_reached(1, 1);
            assert!(matches!(dst.next_notification(), ReceivedNotification::QueueFailed(1, _)));
            dst.send_ext(receive);
        }),
        ("failed behind", |dst, held, receive| {
            dst.send_ext(receive);
            dst.mark(1, 1);
            dst.notify_reached(1, 1);
            held.fail(DeviceError::Ended);
            assert!(matches!(dst.next_notification(), ReceivedNotification::QueueFailed(1, _)));
        }),
        ("failed for its client", |dst, _, receive| {
            dst.send_ext(receive);
            let span = dst.alloc_ext(1, 1).whole_span();
            let token = [0; TRANSFER_TOKEN_BYTES];
            dst.send_ext(&ExtRequest::SendToPeer(SendToPeer { queue: 1, span, token, address: "127.0.0.1:1" }));
            assert!(matches!(dst.next_notification(), ReceivedNotification::QueueFailed(1, _)));
        }),
    ];
    for (what, case) in cases {
        let (open, held) = (HeldDevice::new("CPU0"), HeldDevice::new("CPU1"));
        open.release();
        let server = TestServer::with_device_list(vec![open, held.clone()], Config::default());
        let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
        let (span, lost) = (dst.alloc_span(100), dst.alloc_ext(1, 100).whole_span());
        let tokens = dst.request_tokens(2);
        case(&mut dst, &held, &ExtRequest::ReceiveFromPeer(ReceiveFromPeer { queue: 1, span: lost, token: tokens[1] }));
        dst.receive_from_peer(span, tokens[0]);
        dst.assert_ping_replied();
        src.peer_write(tokens[1], 0, &[1; 100]);
        src.peer_write_all(tokens[0], 0, &[2; 100]);
        assert_eq!(dst.read_bytes(span), [2; 100], "{what}");
        src.peer_write(tokens[1], 0, &[1; 100]);
        src.expect_protocol_error(&["PEER_WRITE", "used"]);
    }
}

#[test]
fn tokens_of_ended_queues_are_remembered_up_to_a_limit() {
    let server = TestServer::start(Config::default());
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    let span = dst.alloc_span(1);
    let mut lost = Vec::new();
    for _ in 0..5 {
        // Tokens that a RECEIVE_FROM_PEER has named do not count against the limit of unused tokens.
        let tokens = dst.request_tokens(256);
        // Fewer than a queue holds back: further ones would block the session.
        for tokens in tokens.chunks(32) {
            tokens.iter().for_each(|token| dst.receive_from_peer(span, *token));
            dst.reopen_queue();
        }
        lost.extend(tokens);
    }
    dst.assert_ping_replied();
    for token in &lost[256..] {
        src.peer_write(*token, 0, &[1]);
    }
    src.assert_ping_replied();
    src.peer_write(lost[0], 0, &[1]);
    src.expect_protocol_error(&["PEER_WRITE", "expired"]);
    // A wrong length and a second RECEIVE_FROM_PEER of a token are errors for ended queues too.
    let tokens = dst.request_tokens(2);
    tokens.iter().for_each(|token| dst.receive_from_peer(span, *token));
    dst.reopen_queue();
    dst.assert_ping_replied();
    let mut src = Client::connect_with_queues(&server);
    src.peer_write(tokens[0], 0, &[]);
    src.expect_protocol_error(&["PEER_WRITE", "got 0"]);
    dst.receive_from_peer(span, tokens[1]);
    dst.expect_protocol_error(&["RECEIVE_FROM_PEER", "not issued to this session"]);
}

/// The thread of a session blocks on a queue that waits for bytes of a peer, and does not read the client's socket. The session
/// must still end when the client disconnects.
#[test]
fn a_session_that_waits_for_a_peer_ends_with_its_client() {
    let server = TestServer::start(Config::default());
    let mut dst = Client::connect_with_queues(&server);
    let span = dst.alloc_span(1 << 20);
    let token = dst.request_token();
    dst.receive_from_peer(BufferSpan { len: 1, ..span }, token);
    dst.write_span(0, span, None, &random_bytes(1, 1 << 20));
    assert_eq!(
        dst.next_notification_or_state(),
        ReceivedNotification::ServerState(ServerState::Ready),
        "the session is blocked"
    );
    drop(dst);
    eventually("the session of the client has ended", || server.handle.connections() == 0 && server.used_bytes(0) == 0);
}

#[test]
fn bytes_of_a_wrong_length_fail_the_receiving_queue() {
    let server = TestServer::start(Config::default());
    let cases = [0, 99, 101].into_iter().flat_map(|len| [true, false].map(|early| (len, early)));
    // The client learns of the failure also if it awaits no notification of the queue.
    for ((len, early), reads) in cases.flat_map(|case| [true, false].map(|reads| (case, reads))) {
        let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
        let span = dst.alloc_span(100);
        dst.fill_span(0, span, 5);
        let token = dst.request_token();
        if !early {
            dst.receive_from_peer(span, token);
            dst.assert_ping_replied();
        }
        src.peer_write(token, 0, &vec![1; len]);
        if early && len > 0 {
            src.assert_ping_replied();
        } else {
            src.expect_protocol_error(&["PEER_WRITE", &format!("got {len}")]);
        }
        if early {
            dst.receive_from_peer(span, token);
        }
        if reads {
            dst.read_spans(0, 7, &[span]);
        }
        let fault = dst.next_queue_failure();
        assert!(fault.text.contains(&format!("got {len}")), "{len}, early {early}, reads {reads}: {fault:?}");
        dst.reopen_queue();
        assert_eq!(dst.read_bytes(span), [5; 100], "{len}, early {early}");
    }
}

/// The failure takes its turn behind what the queue still has to report.
#[test]
fn a_failed_transfer_is_reported_after_earlier_notifications() {
    let held = HeldDevice::new("CPU0");
    let server = TestServer::with_device_list(vec![held.clone()], Config::default());
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    let span = dst.alloc_span(100);
    let token = dst.request_token();
    dst.fill_span(0, span, 5);
    dst.read_spans(0, 7, &[span]);
    dst.receive_from_peer(span, token);
    dst.assert_ping_replied();
    src.peer_write(token, 0, &[1; 99]);
    src.expect_protocol_error(&["PEER_WRITE", "got 99"]);
    dst.assert_ping_replied();
    held.release();
    assert_eq!(dst.next_notification(), data_notification(7, vec![5; 100]));
    assert!(dst.next_queue_failure().text.contains("got 99"));
}

#[test]
fn transfer_tokens_expire() {
    let server = TestServer::start(with_short_reply_timeout(Config::default()));
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    let span = dst.alloc_span(CHUNK_BYTES + 1);
    let token = dst.request_token();
    dst.receive_from_peer(span, token);
    dst.mark(0, 1);
    // The waits for the bytes and for the mark have the same limit. The former must end first: until then a write is accepted.
    let received = Instant::now();
    while received.elapsed() < SHORT_TIMEOUT {
        dst.assert_ping_replied();
    }
    dst.notify_reached(0, 1);
    let fault = dst.next_queue_failure();
    assert!(fault.text.contains("deadline"), "{fault:?}");
    src.peer_write(token, 0, &[1; CHUNK_BYTES]);
    src.expect_protocol_error(&["PEER_WRITE", "expired"]);
    dst.assert_ping_replied();
}

/// The bytes of a region come once and in order: a peer with the token can write each byte only once.
#[test]
fn each_byte_of_a_transfer_is_written_once() {
    let server = TestServer::start(Config::default());
    let mut dst = Client::connect_with_queues(&server);
    let span = dst.alloc_span(2 * CHUNK_BYTES + 1);
    let (first, short) = (vec![1; CHUNK_BYTES], vec![1; CHUNK_BYTES - 1]);
    for (at, piece) in
        [(0, &first), (2 * CHUNK_BYTES, &first), (CHUNK_BYTES, &short), (CHUNK_BYTES - 1, &first), (usize::MAX, &first)]
    {
        let (mut src, mut other) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
        let token = dst.request_token();
        dst.receive_from_peer(span, token);
        dst.assert_ping_replied();
        src.peer_write_all(token, 0, &first);
        other.peer_write(token, at, piece);
        other.expect_protocol_error(&["PEER_WRITE", &format!("got {} from byte {at} on", piece.len())]);
        let fault = dst.next_queue_failure();
        assert!(fault.text.contains(&format!("from byte {CHUNK_BYTES} of the transfer on")), "{fault:?}");
        src.peer_write(token, CHUNK_BYTES, &first);
        src.expect_protocol_error(&["PEER_WRITE", "used"]);
        dst.reopen_queue();
    }
}

#[test]
fn only_unused_tokens_of_the_session_are_accepted() {
    let server = TestServer::start(Config::default());
    let mut other = Client::connect_with_queues(&server);
    let foreign = other.request_token();
    for is_foreign in [true, false] {
        let mut dst = Client::connect_with_queues(&server);
        let span = dst.alloc_span(CHUNK_BYTES + 1);
        let token = if is_foreign { foreign } else { dst.request_token() };
        dst.receive_from_peer(span, token);
        if !is_foreign {
            dst.receive_from_peer(span, token);
        }
        dst.expect_protocol_error(&["RECEIVE_FROM_PEER", "not issued to this session"]);
    }
    // The rejected request did not invalidate the token of its session.
    let span = other.alloc_span(CHUNK_BYTES + 1);
    other.receive_from_peer(span, foreign);
    Client::connect_with_queues(&server).peer_write_all(foreign, 0, &random_bytes(1, CHUNK_BYTES + 1));
    assert!(other.read_bytes(span) == random_bytes(1, CHUNK_BYTES + 1));
}

#[test]
fn unused_tokens_and_early_bytes_are_limited() {
    let server = TestServer::start(Config::default().with_max_memory(Some(1 << 20)));
    let mut dst = Client::connect_with_queues(&server);
    for _ in 0..4 {
        dst.request_tokens(256);
    }
    dst.send_ext(&ExtRequest::IssueTokens(IssueTokens { count: 1 }));
    dst.expect_protocol_error(&["ISSUE_TOKENS", "1025 unused tokens"]);
    for count in [0, 257] {
        let mut dst = Client::connect_with_queues(&server);
        dst.send_ext(&ExtRequest::IssueTokens(IssueTokens { count }));
        dst.expect_protocol_error(&["ISSUE_TOKENS", "1 to 256"]);
    }
    // Early bytes are charged to the session's memory until they are copied to their buffer.
    let (mut dst, mut src) = (Client::connect_with_queues(&server), Client::connect_with_queues(&server));
    let span = dst.alloc_span(2 * CHUNK_BYTES);
    for round in 0..4 {
        let token = dst.request_token();
        src.peer_write_all(token, 0, &random_bytes(round, 2 * CHUNK_BYTES));
        dst.receive_from_peer(span, token);
        assert!(dst.read_bytes(span) == random_bytes(round, 2 * CHUNK_BYTES));
    }
    let tokens = dst.request_tokens(2);
    src.peer_write_all(tokens[0], 0, &random_bytes(1, 2 * CHUNK_BYTES));
    src.peer_write_all(tokens[1], 0, &[1]);
    dst.receive_from_peer(BufferSpan { len: 1, ..span }, tokens[1]);
    dst.read_spans(0, 7, &[span]);
    assert!(matches!(dst.next_queue_failure().kind, DeviceFaultKind::OutOfMemory { requested: 1, .. }));
}
