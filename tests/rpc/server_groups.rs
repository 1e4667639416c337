//! Groups whose other rank is played by the test: what a server sends to another one, and what it accepts.

use crate::extended_support::*;
use crate::peer_transfer::{FakeServer, FakeServerConnection, config_with_peers};
use crate::support::*;
use fanout::ops::OpCode;
use fanout::rpc::server::Config;
use fanout::rpc::wire::ext::*;
use fanout::tensor::DType;

const SECRET: GroupSecret = [7; 16];

/// Elements of the tensors.
const N: u32 = 3;

/// A server whose queue 0 is rank 0 of a group, in which the test plays rank 1.
struct Group {
    client: Client,
    memory: ClientBuffer,
    /// Accepts what the server sends to rank 1.
    outgoing: FakeServerConnection,
    /// Sends what rank 1 sends to the server.
    incoming: Client,
    /// The address of rank 1.
    address: String,
    server: TestServer,
}

fn join(client: &mut Client, secret: GroupSecret, rank: u32, addresses: &[&str]) {
    let addresses = RankAddresses::encode(addresses.iter().copied());
    let addresses = RankAddresses::new(&addresses);
    client.send_ext(&ExtRequest::JoinGroup(JoinGroup { queue: 0, group: 0, secret, rank, part_bytes: 12, addresses }));
}

fn attach(peer: &mut Client, secret: GroupSecret, from: u32) -> Result<(), String> {
    peer.send_ext(&ExtRequest::AttachGroup(AttachGroup { secret, from, to: 0 }));
    match ExtResponse::decode(ExtCommand::AttachGroup, &peer.next_ext_reply()) {
        Ok(ExtResponse::AttachGroup(attached)) => attached.map_err(str::to_owned),
        other => panic!("{other:?}"),
    }
}

/// The head of a part of an ALL_REDUCE of `n` floats.
fn part(rank: u32, round: u64, n: u32) -> PublishPartHead {
    let whole = Some(TensorShape { dtype: DType::F32.to_wire(), ne: [n, 1, 1, 1] });
    PublishPartHead { rank, round, op: OpCode::AllReduce.to_wire(), axis: 0, whole, extent: 0, len: 4 * u64::from(n) }
}

fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}

impl Group {
    fn new() -> Group {
        Group::with_config(config_with_peers(&["127.0.0.0/8:*"]))
    }

    fn with_config(config: Config) -> Group {
        let server = TestServer::start(config);
        let fake = FakeServer::start();
        let mut client = Client::connect_with_queues(&server);
        let memory = client.alloc_ext(0, 256);
        join(&mut client, SECRET, 0, &["", &fake.address]);
        let mut outgoing = fake.accept();
        let (command, body) = outgoing.read_message();
        assert_eq!(
            (command, &body[..16], &body[16..]),
            (ExtCommand::AttachGroup, &SECRET[..], &[0, 0, 0, 0, 1, 0, 0, 0][..])
        );
        let mut reply = Vec::new();
        ExtResponse::AttachGroup(Ok(())).encode_body(&mut reply);
        outgoing.send_notification(&Notification::Reply(&reply));
        let (mut incoming, _) = Client::connect_extended(&server);
        assert_eq!(attach(&mut incoming, SECRET, 1), Ok(()));
        Group { client, memory, outgoing, incoming, address: fake.address, server }
    }

    /// Submits an ALL_REDUCE of these values as graph `id`, and a READ of the sums.
    fn run(&mut self, id: u64, values: &[f32]) {
        let src = self.memory.float_tensor(1, N, 0);
        let sums = node(OpCode::AllReduce, self.memory.float_tensor(2, N, 64), &[&src]);
        self.client.write_span(0, self.memory.span(0, 4 * u64::from(N)), None, &bytes(values));
        self.client.prepare_graph(id, 0, &[2], &[src, sums]);
        self.client.run_graph(0, id);
        self.client.read_spans(0, id, &[self.memory.span(64, 4 * u64::from(N))]);
    }

    fn publish(&mut self, head: PublishPartHead, data: &[u8]) {
        self.incoming.send_ext(&ExtRequest::PublishPartHead(head));
        self.incoming.write(data);
    }

    /// Asserts that the client's queue fails with an error that has these parts.
    #[track_caller]
    fn expect_failure(&mut self, parts: &[&str]) {
        match self.client.next_notification() {
            ReceivedNotification::QueueFailed(0, fault) => {
                assert!(parts.iter().all(|part| fault.text.contains(part)), "{}", fault.text)
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn parts_are_exchanged_round_by_round() {
    let mut group = Group::new();
    for round in 0..5 {
        let values = [1.0, 2.0, 3.0].map(|x| x + round as f32);
        // The other rank may be first.
        if round % 2 == 1 {
            group.publish(part(1, round, N), &bytes(&[10.0, 20.0, 30.0]));
        }
        group.run(round, &values);
        let (command, body) = group.outgoing.read_message();
        assert_eq!((command, body.len()), (ExtCommand::PublishPart, PUBLISH_PART_HEAD + 12));
        let mut sent = Vec::new();
        ExtRequest::PublishPartHead(part(0, round, N)).encode(&mut sent);
        assert_eq!((&body[..PUBLISH_PART_HEAD], &body[PUBLISH_PART_HEAD..]), (&sent[9..], &bytes(&values)[..]));
        if round % 2 == 0 {
            group.publish(part(1, round, N), &bytes(&[10.0, 20.0, 30.0]));
        }
        let sums = [values[0] + 10.0, values[1] + 20.0, values[2] + 30.0];
        assert_eq!(group.client.next_notification(), data_notification(round, bytes(&sums)));
    }
}

/// Parts that violate the order, or do not belong to the round, fail the group with an error that names the rank.
#[test]
fn a_wrong_part_fails_the_group() {
    let gather = PublishPartHead { op: OpCode::AllGather.to_wire(), extent: N, ..part(1, 0, N) };
    for (heads, want) in [
        (vec![part(1, 1, N)], "its next round is 0"),
        (vec![part(1, 0, N), part(1, 0, N)], "its next round is 1"),
        (vec![part(1, u64::MAX, N)], "its next round is 0"),
        (vec![part(1, 0, N + 1)], "disagree"),
        (vec![gather], "disagree"),
        (vec![part(1, 0, 1025)], "a part of 4100 bytes, more than was announced"),
        (vec![part(1, 0, u32::MAX >> 2)], "more than was announced"),
    ] {
        let mut group = Group::new();
        group.run(1, &[0.0; 3]);
        assert_eq!(group.outgoing.read_message().0, ExtCommand::PublishPart);
        if let [_, _] = heads[..] {
            // The round is complete with the first one: only the next one waits.
            group.publish(heads[0], &bytes(&[0.0; 3]));
            assert_eq!(group.client.next_notification(), data_notification(1, bytes(&[0.0; 3])));
            group.run(2, &[0.0; 3]);
            assert_eq!(group.outgoing.read_message().0, ExtCommand::PublishPart);
        }
        let last = heads[heads.len() - 1];
        let len = last.len.min(1 << 20) as usize;
        group.publish(last, &vec![0; len]);
        group.expect_failure(&["rank 1", &group.address.clone(), want]);
        let (command, body) = group.outgoing.read_message();
        assert_eq!(command, ExtCommand::FailGroup, "{body:?}");
        // The connection of the other server goes on. Further parts are dropped.
        if last.len == len as u64 {
            group.publish(part(1, 9, N), &[0; 12]);
            group.incoming.assert_ping_replied();
        }
    }
}

/// Malformed messages, and those for other ranks, are protocol errors of the other server, and fail the group.
#[test]
fn violations_are_protocol_errors_of_the_other_server() {
    let shape = part(1, 0, N).whole;
    for (head, want) in [
        (part(0, 0, N), "rank 0 is not one of those"),
        (part(7, 0, N), "rank 7 is not one of those"),
        (PublishPartHead { op: OpCode::Add.to_wire(), ..part(1, 0, N) }, "no such collective"),
        (PublishPartHead { axis: 1, ..part(1, 0, N) }, "no such collective"),
        (PublishPartHead { whole: None, ..part(1, 0, N) }, "no such collective"),
        (PublishPartHead { extent: N + 1, op: OpCode::AllGather.to_wire(), ..part(1, 0, N) }, "no such collective"),
        (
            PublishPartHead { whole: shape.map(|s| TensorShape { ne: [N, 2, 1, 1], ..s }), ..part(1, 0, N) },
            "the part has 24",
        ),
        (PublishPartHead { len: 8, ..part(1, 0, N) }, "the part has 12 bytes, with 8"),
    ] {
        let mut group = Group::new();
        group.run(1, &[0.0; 3]);
        group.publish(head, &vec![0; head.len as usize]);
        group.incoming.expect_protocol_error(&["PUBLISH_PART", want]);
        match group.client.next_notification() {
            ReceivedNotification::QueueFailed(0, fault) => {
                assert!(fault.text.contains("rank 1") && fault.text.contains(&group.address), "{}", fault.text)
            }
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_part_or_a_failure_without_a_group_is_a_protocol_error() {
    let server = TestServer::start(config_with_peers(&["127.0.0.0/8:*"]));
    let mut early = Client::connect_extended(&server).0;
    early.send_ext(&ExtRequest::PublishPartHead(part(1, 0, N)));
    early.write(&[0; 12]);
    early.expect_protocol_error(&["PUBLISH_PART", "ATTACH_GROUP comes first"]);
    let mut early = Client::connect_extended(&server).0;
    early.send_ext(&ExtRequest::FailGroup(FailGroup { rank: 0, reason: "" }));
    early.expect_protocol_error(&["FAIL_GROUP", "ATTACH_GROUP comes first"]);
}

#[test]
fn a_connection_is_attached_only_for_the_ranks_of_one_other_server() {
    let group = Group::new();
    for (secret, from, want) in [
        (SECRET, 0, "no rank in the group"),
        (SECRET, 2, "no rank in the group"),
        (SECRET, u32::MAX, "no rank in the group"),
        (SECRET, 1, "another connection has attached"),
    ] {
        let mut other = Client::connect_extended(&group.server).0;
        let refused = attach(&mut other, secret, from).unwrap_err();
        assert!(refused.contains(want), "{from}: {refused}");
    }
    let Group { mut incoming, .. } = group;
    incoming.send_ext(&ExtRequest::AttachGroup(AttachGroup { secret: SECRET, from: 1, to: 0 }));
    incoming.expect_protocol_error(&["ATTACH_GROUP", "bound to a group already"]);
    let config = config_with_peers(&["127.0.0.0/8:*"]).with_stall_timeout(SHORT_TIMEOUT);
    let server = TestServer::start(config);
    let mut other = Client::connect_extended(&server).0;
    assert!(attach(&mut other, [8; 16], 1).unwrap_err().contains("has not joined"));
    other.assert_ping_replied();
}

#[test]
fn the_failure_of_another_server_names_its_rank() {
    for (reason, want) in [("a test", "has failed"), ("", "has left the group")] {
        let mut group = Group::new();
        group.run(1, &[0.0; 3]);
        group.incoming.send_ext(&ExtRequest::FailGroup(FailGroup { rank: 1, reason }));
        group.expect_failure(&["rank 1", &group.address.clone(), want, reason]);
    }
    let mut group = Group::new();
    group.run(1, &[0.0; 3]);
    group.incoming.shutdown_write();
    group.expect_failure(&["rank 1", &group.address.clone(), "its connection to this server has ended"]);
    // A failure of no rank in particular. Control characters of another server are not passed on.
    let mut group = Group::new();
    group.run(1, &[0.0; 3]);
    group.incoming.send_ext(&ExtRequest::FailGroup(FailGroup { rank: u32::MAX, reason: "ranks\ndisagree" }));
    group.expect_failure(&["ranks disagree", &group.address.clone()]);
    let group = Group::new();
    let Group { mut incoming, .. } = group;
    incoming.send_ext(&ExtRequest::FailGroup(FailGroup { rank: 2, reason: "" }));
    incoming.expect_protocol_error(&["FAIL_GROUP", "has no rank 2"]);
}

/// A failure before the connection to a server is attached cannot be reported on it: the server's own connection ends instead.
#[test]
fn a_failure_before_the_connection_is_attached_ends_the_other_one() {
    let server = TestServer::start(config_with_peers(&["127.0.0.0/8:*"]));
    let fake = FakeServer::start();
    let mut client = Client::connect_with_queues(&server);
    join(&mut client, SECRET, 0, &["", &fake.address]);
    let (mut incoming, _) = Client::connect_extended(&server);
    assert_eq!(attach(&mut incoming, SECRET, 1), Ok(()));
    let mut outgoing = fake.accept();
    assert_eq!(outgoing.read_message().0, ExtCommand::AttachGroup);
    let mut reply = Vec::new();
    ExtResponse::AttachGroup(Err("a test")).encode_body(&mut reply);
    outgoing.send_notification(&Notification::Reply(&reply));
    client.mark(0, 1);
    client.notify_reached(0, 1);
    match client.next_notification() {
        ReceivedNotification::QueueFailed(0, fault) => assert!(fault.text.contains("a test"), "{}", fault.text),
        other => panic!("{other:?}"),
    }
    incoming.expect_closed();
}

/// A queue that fails by a request of its client, while its device is well, fails its groups.
#[test]
fn a_refused_request_fails_the_groups_of_its_queue() {
    let mut group = Group::new();
    join(&mut group.client, SECRET, 0, &["", &group.address.clone()]);
    group.expect_failure(&["another queue has joined the group as this rank"]);
    let (command, body) = group.outgoing.read_message();
    let reason = String::from_utf8_lossy(&body[4..]);
    assert_eq!((command, &body[..4]), (ExtCommand::FailGroup, &[0; 4][..]), "{reason}");
    assert!(reason.contains("another queue has joined"), "{reason}");
    group.incoming.expect_closed();
}

/// Groups whose ranks do not join, and parts that do not arrive, fail at their deadlines, with no other server involved too.
#[test]
fn late_ranks_fail_their_group() {
    let config = || config_with_peers(&["127.0.0.0/8:*"]);
    let server = TestServer::start(config().with_stall_timeout(SHORT_TIMEOUT));
    let mut client = Client::connect_with_queues(&server);
    join(&mut client, SECRET, 1, &["", ""]);
    client.mark(0, 1);
    client.notify_reached(0, 1);
    let memory = client.alloc_ext(0, 256);
    let sums = |memory: &ClientBuffer| {
        let src = memory.float_tensor(1, N, 0);
        [src.clone(), node(OpCode::AllReduce, memory.float_tensor(2, N, 64), &[&src])]
    };
    client.prepare_graph(1, 0, &[2], &sums(&memory));
    client.run_graph(0, 1);
    client.notify_reached(0, 1);
    let failure = |client: &mut Client| loop {
        if let ReceivedNotification::QueueFailed(0, fault) = client.next_notification() {
            return fault.text;
        }
    };
    let text = failure(&mut client);
    assert!(text.contains("rank 0") && text.contains("JOIN_GROUP"), "{text}");
    let mut group = Group::with_config(config().with_reply_timeout(SHORT_TIMEOUT));
    group.run(1, &[0.0; 3]);
    let text = failure(&mut group.client);
    assert!(text.contains("rank 1") && text.contains("a part of a collective"), "{text}");
}

/// The memory of groups that fail one after another is bounded, also while queues still hold ranks of them.
#[test]
fn a_session_has_a_limited_number_of_groups() {
    let server = TestServer::with_devices(2, config_with_peers(&["127.0.0.0/8:*"]));
    let mut client = Client::connect_with_queues(&server);
    // Queue 1 leaves each group for the next one, which fails it. Queue 0 stays a rank of all.
    for i in 0..17 {
        let addresses = RankAddresses::encode(["", ""]);
        for (queue, group, rank) in [(0, u32::from(i), 0), (1, 0, 1)] {
            let addresses = RankAddresses::new(&addresses);
            let secret = [i; 16];
            client.send_ext(&ExtRequest::JoinGroup(JoinGroup { queue, group, secret, rank, part_bytes: 0, addresses }));
        }
    }
    loop {
        match client.next_notification() {
            ReceivedNotification::QueueFailed(_, fault) if fault.text.contains("at most 16 groups") => break,
            ReceivedNotification::QueueFailed(..) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn invalid_joins_fail_the_queue_or_the_session() {
    let server = TestServer::start(config_with_peers(&["10.0.0.5:7"]));
    let many = vec![""; 65];
    for (rank, addresses) in [(0, &many[..]), (2, &["", ""][..]), (u32::MAX, &[""][..])] {
        let mut client = Client::connect_with_queues(&server);
        join(&mut client, SECRET, rank, addresses);
        client.expect_protocol_error(&["JOIN_GROUP", "1 to 64 ranks"]);
    }
    let long = "a".repeat(260);
    for (secret, (joins, want)) in (0..).zip([
        (vec![(0, vec!["", "127.0.0.1:9"])], "--peer"),
        (vec![(0, vec!["", &long])], "too long"),
        (vec![(1, vec!["", "10.0.0.5:7"])], "a rank of another server"),
        (vec![(0, vec!["", ""]), (0, vec!["", ""])], "as this rank"),
        (vec![(0, vec!["", ""]), (1, vec!["", "", ""])], "different lists of addresses"),
    ]) {
        let mut client = Client::connect_with_queues(&server);
        for (rank, addresses) in joins {
            join(&mut client, [secret; 16], rank, &addresses);
        }
        client.mark(0, 1);
        client.notify_reached(0, 1);
        match client.next_notification() {
            ReceivedNotification::QueueFailed(0, fault) => assert!(fault.text.contains(want), "{}", fault.text),
            other => panic!("{other:?}"),
        }
    }
}

/// A session of ggml's protocol has no collective nodes, and a queue that has not joined runs none.
#[test]
fn collective_nodes_need_the_extension_and_a_group() {
    let server = TestServer::start(config_with_peers(&[]));
    let mut client = Client::connect_with_queues(&server);
    let memory = client.alloc_ext(0, 256);
    let src = memory.float_tensor(1, N, 0);
    let sums = node(OpCode::AllReduce, memory.float_tensor(2, N, 64), &[&src]);
    client.prepare_graph(1, 0, &[2], &[src.clone(), sums]);
    client.run_graph(0, 1);
    match client.next_notification() {
        ReceivedNotification::QueueFailed(0, fault) => assert!(fault.text.contains("has not joined"), "{}", fault.text),
        other => panic!("{other:?}"),
    }
    let mut ggml = Client::connect(&server);
    let memory = ggml.alloc(0, 256);
    let src = memory.float_tensor(1, N, 0);
    let sums = node(OpCode::AllReduce, memory.float_tensor(2, N, 64), &[&src]);
    ggml.compute_graph(0, &[2], &[src, sums]);
    ggml.expect_refused(&["GRAPH_COMPUTE", "has no op 16384"]);
}
