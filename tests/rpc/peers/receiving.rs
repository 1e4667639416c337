//! The destination's side: where bytes go, when, and whose are refused.

use super::support::*;
use crate::greeted_support::*;
use crate::support::*;
use fanout::device::DeviceError;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::*;

#[test]
fn bytes_go_to_their_place_whenever_they_come() {
    let server = TestServer::start(Config::default());
    let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
    for len in [1, PIECE - 1, PIECE, PIECE + 1, (1 << 20) + 3] {
        let span = dst.span(len);
        for early in [0, len.div_ceil(PIECE) / 2, len.div_ceil(PIECE)] {
            let data = noise((len + early) as u64, len);
            let tickets = dst.tickets_for(len);
            let split = (early * PIECE).min(len);
            // The last pieces first.
            for (ticket, piece) in tickets.iter().zip(data.chunks(PIECE)).take(early).rev() {
                src.put(*ticket, piece);
            }
            src.pings();
            dst.receive(span, &tickets);
            dst.read_spans(0, 7, &[span]);
            if split < len {
                dst.pings();
            }
            src.puts(&tickets[early..], &data[split..]);
            assert!(dst.bytes_told() == data, "{len} bytes, {early} pieces early");
        }
    }
}

#[test]
fn a_queue_goes_on_when_its_bytes_are_there() {
    let server = TestServer::start(Config::default());
    let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
    let len = 3 * PIECE + 5;
    let (span, before, after) = (dst.span(len), dst.span(len), dst.span(len));
    let data = noise(1, len);
    for early in [true, false] {
        let tickets = dst.tickets_for(len);
        if early {
            src.puts(&tickets, &data);
        }
        for value in 0..20 {
            dst.fill_span(0, span, value);
        }
        dst.ask(&ExtRequest::Copy(Copy { queue: 0, src: span, dst: before }));
        dst.receive(span, &tickets);
        dst.ask(&ExtRequest::Copy(Copy { queue: 0, src: span, dst: after }));
        dst.fill_span(0, span, 0);
        if !early {
            src.puts(&tickets, &data);
        }
        assert!(dst.bytes(before) == vec![19; len], "work before, early: {early}");
        assert!(dst.bytes(after) == data, "work behind, early: {early}");
        assert!(dst.bytes(span) == vec![0; len], "early: {early}");
    }
}

#[test]
fn nobody_waits_for_a_device_to_bring_its_bytes() {
    let held = Held::new("CPU0");
    let server = TestServer::with_device_list(vec![held.clone()], Config::default());
    let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
    let len = 100 * PIECE + 1;
    let span = dst.span(len);
    let tickets = dst.tickets_for(len);
    dst.fill_span(0, span, 9);
    dst.receive(span, &tickets);
    dst.read_spans(0, 7, &[Span { len: 1 << 20, ..span }]);
    dst.pings();
    // More than a queue takes in without waiting.
    src.puts(&tickets, &noise(3, len));
    held.open();
    assert!(dst.bytes_told() == noise(3, len)[..1 << 20]);
    // One that fails takes what waits for it along.
    let held = Held::new("CPU0");
    let server = TestServer::with_device_list(vec![held.clone()], Config::default());
    let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
    let span = dst.span(2 * PIECE);
    let tickets = dst.tickets(2);
    dst.receive(span, &tickets);
    src.puts(&tickets[..1], &[1; PIECE]);
    held.fail(DeviceError::Misuse("of a test"));
    dst.read_spans(0, 7, &[span]);
    assert!(dst.failed().text.contains("of a test"));
}

#[test]
fn later_bytes_may_come_before_earlier_ones() {
    let server = TestServer::start(Config::default());
    let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
    let spans: Vec<_> = (0..5).map(|_| dst.span(PIECE + 1)).collect();
    let all: Vec<_> = spans.iter().map(|_| dst.tickets_for(PIECE + 1)).collect();
    for (span, tickets) in spans.iter().zip(&all) {
        dst.fill_span(0, *span, 9);
        dst.receive(*span, tickets);
    }
    dst.pings();
    for (seed, tickets) in all.iter().enumerate().rev() {
        src.puts(tickets, &noise(seed as u64, PIECE + 1));
    }
    for (seed, span) in spans.iter().enumerate() {
        assert!(dst.bytes(*span) == noise(seed as u64, PIECE + 1), "{seed}");
    }
}

#[test]
fn a_put_without_a_good_ticket_is_refused_and_writes_nothing() {
    let server = TestServer::start(Config::default());
    let mut dst = Client::with_queues(&server);
    let span = dst.span(100);
    dst.fill_span(0, span, 5);
    // Never issued.
    let mut src = Client::with_queues(&server);
    src.put([7; TICKET], &[1; 100]);
    src.expect_told_refusal(&["PUT", "was not issued here"]);
    // Used before and after its RECEIVE.
    let tickets = dst.tickets(1);
    let mut src = Client::with_queues(&server);
    src.puts(&tickets, &[6; 100]);
    src.put(tickets[0], &[1; 100]);
    src.expect_told_refusal(&["PUT", "used"]);
    dst.receive(span, &tickets);
    assert_eq!(dst.bytes(span), [6; 100]);
    let mut src = Client::with_queues(&server);
    src.put(tickets[0], &[1; 100]);
    src.expect_told_refusal(&["PUT", "used"]);
    assert_eq!(dst.bytes(span), [6; 100]);
    // Of a queue that was closed, and of a session that has ended.
    let tickets = dst.tickets(2);
    dst.receive(span, &tickets[..1]);
    dst.close_queue();
    dst.pings();
    let mut src = Client::with_queues(&server);
    // Whoever brought the bytes could not know: once.
    src.puts(&tickets[..1], &[1; 100]);
    src.put(tickets[0], &[1; 100]);
    src.expect_told_refusal(&["PUT", "used"]);
    dst.open_queue(0, 0);
    assert_eq!(dst.bytes(span), [6; 100]);
    let mut src = Client::with_queues(&server);
    src.put(tickets[1], &[1; 100]);
    src.pings();
    drop(dst);
    eventually("the session has ended", || server.handle.connections() == 1 && server.used(0) == 0);
    src.put(tickets[1], &[1; 100]);
    src.expect_told_refusal(&["PUT", "expired"]);
}

/// A link carries the bytes of many queues: that one of them has ended is no reason to end it.
#[test]
fn bytes_for_a_queue_that_has_ended_are_dropped() {
    type Case = fn(&mut Client, &Held, &ExtRequest<'_>);
    let cases: [(&str, Case); 4] = [
        ("closed", |dst, _, receive| {
            dst.ask(receive);
            dst.ask(&ExtRequest::CloseQueue(CloseQueue { queue: 1 }));
        }),
        ("failed before", |dst, held, receive| {
            held.fail(DeviceError::Ended);
            dst.mark(1, 1);
            dst.ask_for(1, 1);
            assert!(matches!(dst.told(), Told::Failed(1, _)));
            dst.ask(receive);
        }),
        ("failed behind", |dst, held, receive| {
            dst.ask(receive);
            dst.mark(1, 1);
            dst.ask_for(1, 1);
            held.fail(DeviceError::Ended);
            assert!(matches!(dst.told(), Told::Failed(1, _)));
        }),
        ("failed for its client", |dst, _, receive| {
            dst.ask(receive);
            let span = dst.buffer(1, 1).all();
            let tickets = TicketList(&[[0; TICKET]]);
            dst.ask(&ExtRequest::Send(Send { queue: 1, span, tickets, address: "127.0.0.1:1" }));
            assert!(matches!(dst.told(), Told::Failed(1, _)));
        }),
    ];
    for (what, case) in cases {
        let (open, held) = (Held::new("CPU0"), Held::new("CPU1"));
        open.open();
        let server = TestServer::with_device_list(vec![open, held.clone()], Config::default());
        let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
        let (span, lost) = (dst.span(100), dst.buffer(1, 100).all());
        let tickets = dst.tickets(2);
        case(
            &mut dst,
            &held,
            &ExtRequest::Receive(Receive { queue: 1, span: lost, tickets: TicketList(&tickets[1..]) }),
        );
        dst.receive(span, &tickets[..1]);
        dst.pings();
        src.put(tickets[1], &[1; 100]);
        src.puts(&tickets[..1], &[2; 100]);
        assert_eq!(dst.bytes(span), [2; 100], "{what}");
        src.put(tickets[1], &[1; 100]);
        src.expect_told_refusal(&["PUT", "used"]);
    }
}

#[test]
fn few_tickets_of_ended_queues_are_remembered() {
    let server = TestServer::start(Config::default());
    let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
    let many = dst.span(64 * PIECE);
    let span = Span { len: 1, ..many };
    let mut lost = Vec::new();
    for _ in 0..5 {
        // They are not among the unused ones.
        let tickets = dst.tickets(256);
        tickets.chunks(64).for_each(|tickets| dst.receive(many, tickets));
        dst.reopen();
        lost.extend(tickets);
    }
    dst.pings();
    for ticket in &lost[256..] {
        src.put(*ticket, &[1]);
    }
    src.pings();
    src.put(lost[0], &[1]);
    src.expect_told_refusal(&["PUT", "expired"]);
    // A length that no ticket has is a mistake here too, and naming one again.
    let tickets = dst.tickets(2);
    tickets.chunks(1).for_each(|ticket| dst.receive(span, ticket));
    dst.reopen();
    dst.pings();
    let mut src = Client::with_queues(&server);
    src.put(tickets[0], &[]);
    src.expect_told_refusal(&["PUT", "got 0"]);
    dst.receive(span, &tickets[1..]);
    dst.expect_told_refusal(&["RECEIVE", "ticket 0 of the list"]);
}

/// A session's thread that waits for a queue, which waits for another server, does not see that its client is gone.
#[test]
fn a_client_that_is_gone_is_not_waited_for() {
    let server = TestServer::start(Config::default());
    let mut dst = Client::with_queues(&server);
    let span = dst.span(1 << 20);
    let tickets = dst.tickets(1);
    dst.receive(Span { len: 1, ..span }, &tickets);
    dst.write_span(0, span, None, &noise(1, 1 << 20));
    assert_eq!(dst.heard(), Told::State(State::Ready), "the session waits");
    drop(dst);
    eventually("the session has ended", || server.handle.connections() == 0 && server.used(0) == 0);
}

#[test]
fn bytes_of_another_length_fail_the_queue_that_waits_for_them() {
    let server = TestServer::start(Config::default());
    for (len, early) in [(0, true), (0, false), (99, true), (99, false), (101, true), (101, false)] {
        let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
        let span = dst.span(100);
        dst.fill_span(0, span, 5);
        let tickets = dst.tickets(1);
        if !early {
            dst.receive(span, &tickets);
            dst.pings();
        }
        src.put(tickets[0], &vec![1; len]);
        if early && len > 0 {
            src.pings();
        } else {
            src.expect_told_refusal(&["PUT", &format!("got {len}")]);
        }
        if early {
            dst.receive(span, &tickets);
        }
        dst.read_spans(0, 7, &[span]);
        let fault = dst.failed();
        assert!(fault.text.contains(&format!("got {len}")), "{len}, early {early}: {fault:?}");
        dst.reopen();
        assert_eq!(dst.bytes(span), [5; 100], "{len}, early {early}");
    }
}

#[test]
fn tickets_expire() {
    let server = TestServer::start(brief(Config::default()));
    let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
    let span = dst.span(PIECE + 1);
    let tickets = dst.tickets(2);
    src.puts(&tickets[..1], &[1; PIECE]);
    dst.receive(span, &tickets);
    dst.mark(0, 1);
    dst.ask_for(0, 1);
    let fault = dst.failed();
    assert!(fault.text.contains("deadline"), "{fault:?}");
    src.put(tickets[1], &[1]);
    src.expect_told_refusal(&["PUT", "expired"]);
    dst.pings();
}

#[test]
fn only_unused_tickets_of_the_session_can_be_received() {
    let server = TestServer::start(Config::default());
    let mut other = Client::with_queues(&server);
    let foreign = other.tickets(2);
    type Case = fn(&mut Client, Span, &[Ticket]);
    let cases: [(&str, Case); 5] = [
        ("ticket 0 of the list", |dst, span, foreign| dst.receive(span, foreign)),
        ("ticket 1 of the list", |dst, span, foreign| {
            let own = dst.tickets(1);
            dst.receive(span, &[own[0], foreign[0]]);
        }),
        ("ticket 1 of the list", |dst, span, _| {
            let own = dst.tickets(1);
            dst.receive(span, &[own[0], own[0]]);
        }),
        ("ticket 0 of the list", |dst, span, _| {
            let own = dst.tickets(2);
            dst.receive(span, &own);
            dst.receive(span, &own);
        }),
        ("take 2 tickets", |dst, span, _| {
            let own = dst.tickets(3);
            dst.receive(span, &own);
        }),
    ];
    for (why, case) in cases {
        let mut dst = Client::with_queues(&server);
        let span = dst.span(PIECE + 1);
        case(&mut dst, span, &foreign);
        dst.expect_told_refusal(&["RECEIVE", why]);
    }
    // They are as good as before.
    let span = other.span(PIECE + 1);
    other.receive(span, &foreign);
    Client::with_queues(&server).puts(&foreign, &noise(1, PIECE + 1));
    assert!(other.bytes(span) == noise(1, PIECE + 1));
}

#[test]
fn what_comes_early_is_bounded() {
    let server = TestServer::start(Config::default().with_max_memory(Some(1 << 20)));
    let mut dst = Client::with_queues(&server);
    for _ in 0..4 {
        dst.tickets(256);
    }
    dst.ask(&ExtRequest::Tickets(Tickets { count: 1 }));
    dst.expect_told_refusal(&["TICKETS", "1025 unused tickets"]);
    for count in [0, 257] {
        let mut dst = Client::with_queues(&server);
        dst.ask(&ExtRequest::Tickets(Tickets { count }));
        dst.expect_told_refusal(&["TICKETS", "1 to 256"]);
    }
    // The session's memory pays for them, and is free again when they are where they belong.
    let (mut dst, mut src) = (Client::with_queues(&server), Client::with_queues(&server));
    let span = dst.span(2 * PIECE);
    for round in 0..4 {
        let tickets = dst.tickets(2);
        src.puts(&tickets, &noise(round, 2 * PIECE));
        dst.receive(span, &tickets);
        assert!(dst.bytes(span) == noise(round, 2 * PIECE));
    }
    let tickets = dst.tickets(3);
    src.puts(&tickets[..2], &noise(1, 2 * PIECE));
    src.puts(&tickets[2..], &[1]);
    dst.receive(Span { len: 1, ..span }, &tickets[2..]);
    dst.read_spans(0, 7, &[span]);
    assert!(matches!(dst.failed().kind, FaultKind::OutOfMemory { asked: 1, .. }));
}
