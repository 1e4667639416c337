//! Groups of two servers. Invariants: each rank gets the parts of all ranks of a round, or the group's failure; a rank that leaves
//! fails no round that was complete; the failure of a rank reaches the other server; after the end of both sessions, no thread of a
//! connection is left, nor a group.

use super::{GroupTable, GroupTimeouts, IncomingLink, JoinRequest, Joined, NO_RANK, SessionGroups, decode_part};
use crate::device::{CollectivePart, DeviceError, GroupMember, MemoryBudget, ReceiveError};
use crate::harnesses::ranks;
use crate::rpc::server::hangup_watch::HangupWatch;
use crate::rpc::server::host_memory::SessionMemory;
use crate::rpc::server::peers::{DialThreads, PeerPool};
use crate::rpc::transport::{self, Connection, NEVER, Receiver, Sender, TransportError};
use crate::rpc::wire::ext::{
    ATTACH_GROUP, AttachGroup, FAIL_GROUP, NotificationHeader, NotificationKind, PART_FIELDS, PING, PUBLISH_PART,
    PublishPartHead,
};
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::orders::{spawn, with_clock, yield_now};
use crate::sync::{Arc, lock};
use shuttle::rand::{Rng, thread_rng};
use std::time::Duration;

/// Bytes that the transport holds: fewer than a message with a part has.
const CAPACITY: usize = 16;

const ATTACH_TIMEOUT: Duration = Duration::from_secs(1);

const ROUNDS: u64 = 3;

/// The session of one client at one of the servers.
struct Session {
    groups: Arc<SessionGroups>,
    pool: PeerPool,
}

/// Two servers: their tables of groups, and a session at each.
struct Servers {
    tables: [Arc<GroupTable>; 2],
    sessions: [Option<Session>; 2],
    dialled: DialThreads,
    /// Threads that serve connections of the other server.
    incoming: Arc<AtomicU32>,
}

impl Servers {
    fn new() -> Servers {
        let tables = [(); 2].map(|()| Arc::new(GroupTable::default()));
        let (dialled, incoming) = (DialThreads::new(), Arc::new(AtomicU32::new(0)));
        let sessions = [0, 1].map(|number: usize| {
            let timeouts = GroupTimeouts { join: Duration::from_secs(60), part: Duration::from_secs(60) };
            let budget = MemoryBudget::new(1 << 20);
            let groups = SessionGroups::new(&tables[number], &budget, &Arc::new(SessionMemory), timeouts);
            let (other, dialled, incoming) = (Arc::clone(&tables[1 - number]), dialled.clone(), Arc::clone(&incoming));
            let dial = move |address: &str| {
                let (own, theirs) = transport::pair(CAPACITY);
                incoming.fetch_add(1, Ordering::Relaxed);
                let (table, incoming) = (Arc::clone(&other), Arc::clone(&incoming));
                spawn(move || {
                    // The connection of a server that has gone has ended by then.
                    let _ = serve(&table, theirs);
                    incoming.fetch_sub(1, Ordering::Relaxed);
                });
                Ok(dialled.dialer(address, Ok(own)))
            };
            Some(Session { groups, pool: PeerPool(Box::new(dial)) })
        });
        Servers { tables, sessions, dialled, incoming }
    }

    /// Each session joins the group with its ranks. A thread for each rank then runs `body`. Returns the results by rank.
    fn run<T: Send + 'static>(
        &mut self,
        server_of: &'static [usize],
        body: impl Fn(usize, GroupMember) -> T + Clone + Send + 'static,
    ) -> Vec<T> {
        let threads = [0, 1].map(|own| {
            let (session, body) = (self.sessions[own].take().expect("one run"), body.clone());
            spawn(move || {
                let address = |server: &usize| if *server == own { "" } else { ["server 0", "server 1"][*server] };
                let ranks = (0..).zip(server_of).filter(|(_, server)| **server == own);
                let threads = ranks.map(|(rank, _)| {
                    let addresses = server_of.iter().map(address).collect();
                    let request = JoinRequest { secret: 7, rank, part_bytes: 8, addresses };
                    let joined = session.groups.join(&request, &session.pool).expect("the first group");
                    let (Joined { member, connected, .. }, body) = (joined, body.clone());
                    spawn(move || {
                        // A failure is the group's, which the rank learns of next.
                        let _ = connected.wait(None);
                        (rank, body(rank as usize, member))
                    })
                });
                let threads: Vec<_> = threads.collect();
                threads.into_iter().map(|thread| thread.join().expect("no panic")).collect::<Vec<_>>()
            })
        });
        let mut results: Vec<_> = threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect();
        results.sort_by_key(|(rank, _)| *rank);
        results.into_iter().map(|(_, result)| result).collect()
    }

    /// Waits until nothing of the sessions is left.
    fn wait_until_ended(self) {
        self.dialled.wait_until_ended();
        while self.incoming.load(Ordering::Relaxed) > 0 {
            yield_now();
        }
        assert_eq!(self.tables.map(|table| table.len()), [0, 0], "groups at the end");
    }
}

/// Serves a connection of the other server, as a session does.
fn serve(table: &GroupTable, connection: Connection) -> Result<(), TransportError> {
    let watch = HangupWatch::default().add_session(connection.aborter());
    let (mut receiver, mut sender) = connection.split();
    let mut link: Option<IncomingLink> = None;
    loop {
        let mut first = [0];
        receiver.read_exact(&mut first, &NEVER)?;
        match first {
            [ATTACH_GROUP] => {
                let mut fields = [0; 3];
                receiver.read_exact(&mut fields, &NEVER)?;
                let [secret, from, to] = fields;
                let request = AttachGroup { secret, from: from.into(), to: to.into() };
                let attached = table.attach(&request, ATTACH_TIMEOUT, &watch);
                let why = attached.as_ref().err().cloned().unwrap_or_default();
                reply(&mut sender, &why.as_bytes()[..why.len().min(100)])?;
                link = attached.ok();
            }
            [PING] => reply(&mut sender, &[0])?,
            [PUBLISH_PART] => {
                let mut fields = [0; PART_FIELDS];
                receiver.read_exact(&mut fields, &NEVER)?;
                let link = link.as_ref().expect("no part precedes ATTACH_GROUP");
                publish(link, &PublishPartHead::decode(&fields), &mut receiver)?;
            }
            [FAIL_GROUP] => {
                let mut fields = [0; 2];
                receiver.read_exact(&mut fields, &NEVER)?;
                let [rank, has_reason] = fields;
                let rank = if rank == u8::MAX { NO_RANK } else { rank.into() };
                let link = link.as_ref().expect("no failure precedes ATTACH_GROUP");
                assert!(link.fail(rank, if has_reason > 0 { "a reason" } else { "" }));
            }
            other => panic!("{other:?} is no request"),
        }
    }
}

fn reply(sender: &mut Sender, body: &[u8]) -> Result<(), TransportError> {
    let header = NotificationHeader { kind: NotificationKind::Reply, size: body.len() as u64 }.encode();
    sender.write_by(&[&header, body].concat(), &NEVER)
}

fn publish(link: &IncomingLink, head: &PublishPartHead, receiver: &mut Receiver) -> Result<(), TransportError> {
    let part = decode_part(head).expect("a part");
    let range = link.bytes_of(&part);
    assert_eq!(range.len() as u64, head.len);
    let mut rest = range.len();
    let member = link.member(head.rank).expect("a rank of the sender");
    let published = member.publish_received(head.round, &part, range, |bytes| {
        rest = 0;
        receiver.read_exact(bytes, &NEVER)
    });
    match published {
        Err(ReceiveError::Source(e)) => Err(e),
        Ok(()) | Err(ReceiveError::Group) => receiver.read_exact(&mut vec![0; rest], &NEVER),
    }
}

/// All ranks run all rounds, and leave.
pub(crate) fn rounds() {
    for server_of in [&[0, 1][..], &[0, 0, 1]] {
        let mut servers = Servers::new();
        let results = servers.run(server_of, |_, member| ranks::run_rounds(&member, 0..ROUNDS));
        assert!(results.iter().all(Result::is_ok), "{results:?}");
        servers.wait_until_ended();
    }
}

/// Runs the rounds, but `failing` fails or leaves before a round. Returns their results.
fn fail_before(servers: &mut Servers, failing: usize, round: u64, leaves: bool) -> Vec<ranks::Rounds> {
    let results = servers.run(&[0, 1], move |rank, member| {
        if rank != failing {
            return ranks::run_rounds(&member, 0..ROUNDS);
        }
        let before = ranks::run_rounds(&member, 0..round);
        if leaves {
            drop(member);
        } else {
            member.fail(&DeviceError::Deadline("a device"));
        }
        before
    });
    let Err((_, error)) = &results[1 - failing] else { panic!("a round without all parts was complete") };
    match error {
        DeviceError::RankLeft { rank, .. } => assert!(leaves && *rank == failing, "{error}"),
        DeviceError::RankFailed { rank, .. } => assert_eq!(*rank, failing, "{error}"),
        _ => panic!("{error}"),
    }
    results
}

/// One rank fails or leaves once the servers are connected. The other one gets the rounds before that, and then the failure.
pub(crate) fn failure() {
    let mut servers = Servers::new();
    let (failing, round) = (thread_rng().gen_range(0..2), thread_rng().gen_range(1..ROUNDS));
    let leaves = thread_rng().gen_bool(0.5);
    let results = fail_before(&mut servers, failing, round, leaves);
    assert_eq!(results[failing], Ok(()), "rounds before the failure");
    let failed_at = results[1 - failing].as_ref().err().map(|(at, _)| *at);
    // A failure may overtake the part of the round before, which is of no use then.
    assert!(failed_at == Some(round) || (!leaves && failed_at == Some(round - 1)), "{results:?}");
    servers.wait_until_ended();
}

/// One rank fails or leaves while the servers connect, and deadlines pass.
pub(crate) fn early_failure() {
    with_clock(|| {
        let mut servers = Servers::new();
        let failing = thread_rng().gen_range(0..2);
        let _ = fail_before(&mut servers, failing, 0, thread_rng().gen_bool(0.5));
        servers.wait_until_ended();
    });
}
