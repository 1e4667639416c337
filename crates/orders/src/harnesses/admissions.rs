//! Admission. Invariants: there are never more sessions or pending handshakes than their limits; a connection is closed for another
//! one only at the limit, and then becomes no session; all places are free at the end; a drain reaches each subscriber once, and
//! each wait for the end of connections ends.

use super::admission::{Admission, Refusal, SessionPermit};
use super::audit::SessionAudit;
use super::client_connection::ClientWriter;
use super::hangup_watch::HangupWatch;
use super::host_memory::SessionMemory;
use super::limits::Config;
use super::tenants::{Resource, Tenants};
use crate::rpc::transport::{self, Connection, Deadline, NEVER, PeerAddr};
use crate::rpc::wire::ext::ServerState;
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::orders::{spawn, with_clock, yield_now};
use crate::sync::{self, Arc, Mutex, lock};
use shuttle::rand::{Rng, thread_rng};
use std::time::Duration;

const MAX: u32 = 2;

/// A server, as far as admission concerns.
#[derive(Clone)]
struct Server {
    tenants: Arc<Tenants>,
    admission: Arc<Admission>,
    sessions: Arc<AtomicU32>,
    /// The clients that became sessions.
    begun: Arc<Mutex<Vec<PeerAddr>>>,
}

impl Server {
    fn new() -> Server {
        let config = Config { max_connections: MAX as usize, max_handshakes: MAX as usize };
        let tenants = Tenants::new(&config);
        let admission = Admission::new(&tenants, &config);
        Server { tenants, admission, sessions: Arc::new(AtomicU32::new(0)), begun: Arc::default() }
    }

    /// A new connection from the address with this number: the two ends.
    fn connect(number: u8) -> (Connection, Connection) {
        transport::pair_of(4, [PeerAddr::Ip(([10, 0, 0, number], 1).into()), PeerAddr::Ip(([10, 0, 0, 100], 1).into())])
    }

    /// Serves a connection that was admitted: waits for its HELLO, one byte, and becomes a session for a moment.
    fn serve(&self, permit: &SessionPermit, connection: Connection, deadline: &Deadline) {
        let peer = connection.aborter().peer();
        let (watch, audit) = (HangupWatch::default().add_session(connection.aborter()), Arc::default());
        permit.set_watch(&watch, &audit);
        let (mut receiver, _sender) = connection.split();
        if !matches!(receiver.read_into(&mut [0], deadline), Ok(1..)) {
            return;
        }
        audit.0.fetch_add(1, Ordering::Relaxed);
        self.check();
        match permit.begin(peer, &SessionMemory) {
            Ok(()) => {
                let others = self.sessions.fetch_add(1, Ordering::Relaxed);
                assert!(others < MAX, "{others} other sessions");
                lock(&self.begun).push(peer);
                assert!(!permit.is_aborted());
                self.check();
                self.sessions.fetch_sub(1, Ordering::Relaxed);
            }
            Err(Refusal::Closed) => assert!(permit.is_aborted()),
            // Another session has its place still.
            Err(Refusal::Full(_)) => {}
            Err(Refusal::Draining) => assert!(self.admission.is_draining()),
            Err(_) => panic!("memory has no limit, and no client is refused"),
        }
    }

    fn check(&self) {
        assert!(self.tenants.used(Resource::Connections) <= MAX.into());
        assert!(self.tenants.used(Resource::Handshakes) <= MAX.into());
        assert!(self.admission.session_count() as u32 <= MAX);
    }

    fn check_end(&self) {
        let used = [Resource::Connections, Resource::Handshakes].map(|resource| self.tenants.used(resource));
        assert_eq!((self.admission.connection_count(), used), (0, [0, 0]), "places at the end");
    }
}

/// Connections of which some send HELLO and some are silent, more than may be pending.
pub(crate) fn handshakes() {
    let server = Server::new();
    let (mut closed, mut aborters, mut clients) = (Vec::new(), Vec::new(), Vec::new());
    for number in 0..4 {
        let (connection, client) = Server::connect(number);
        let (permit, victim) = server.admission.admit(connection.aborter().peer(), connection.aborter()).expect("room");
        aborters.push(connection.aborter());
        if let Some(victim) = victim {
            let peer = victim.peer();
            drop(victim);
            let [.., new] = &aborters[..] else { unreachable!() };
            assert_ne!(peer, new.peer(), "the new connection itself");
            assert!(aborters.iter().any(|aborter| aborter.peer() == peer && aborter.hung_up()), "{peer:?} is open");
            closed.push(peer);
        }
        server.check();
        {
            let server = server.clone();
            spawn(move || server.serve(&permit, connection, &NEVER));
        }
        let is_silent = thread_rng().gen_bool(0.5);
        clients.push(spawn(move || {
            let (mut receiver, mut sender) = client.split();
            if is_silent {
                yield_now();
            } else {
                // It may have been closed for another connection.
                let _ = sender.write_by(&[1], &NEVER);
                while receiver.read_into(&mut [0], &NEVER).expect("no deadline") > 0 {}
            }
        }));
    }
    assert!(closed.len() <= 2, "{closed:?} were closed for two connections above the limit");
    // A connection is closed with its last handle.
    drop(aborters);
    clients.into_iter().for_each(|client| client.join().unwrap());
    assert_eq!(server.admission.wait_until_empty(sync::now() + Duration::from_secs(1000)), 0);
    let begun = lock(&server.begun).clone();
    assert!(
        closed.iter().all(|peer| !begun.contains(peer)),
        "of {closed:?}, which were closed, {begun:?} are sessions"
    );
    server.check_end();
}

/// Clients that send nothing: their handshakes end at their deadline.
pub(crate) fn silent_clients() {
    with_clock(|| {
        let server = Server::new();
        let mut clients = Vec::new();
        for number in 0..MAX as u8 {
            let (connection, client) = Server::connect(number);
            let (permit, victim) =
                server.admission.admit(connection.aborter().peer(), connection.aborter()).expect("room");
            assert!(victim.is_none());
            let serving = server.clone();
            spawn(move || serving.serve(&permit, connection, &Deadline::after(Duration::from_secs(10))));
            clients.push(client);
        }
        while server.admission.wait_until_empty(sync::now() + Duration::from_secs(100)) > 0 {}
        server.check_end();
    });
}

/// The server drains while connections come, become sessions and subscribe.
pub(crate) fn drain() {
    let server = Server::new();
    let threads: Vec<_> = (0..2)
        .map(|number| {
            let server = server.clone();
            spawn(move || {
                let (connection, _client) = Server::connect(number);
                let peer = connection.aborter().peer();
                let (permit, _) = server.admission.admit(peer, connection.aborter()).expect("room");
                let was_draining = server.admission.is_draining();
                let begun = permit.begin(peer, &SessionMemory);
                assert!(!was_draining || matches!(begun, Err(Refusal::Draining)), "a session of a server that drains");
                let writer = Arc::new(ClientWriter::default());
                let state = server.admission.subscribe(&writer);
                match begun {
                    Ok(()) => {}
                    Err(Refusal::Draining) => assert_eq!(state, ServerState::Draining),
                    Err(_) => panic!("there is a place for it"),
                }
                drop(permit);
                (writer, state)
            })
        })
        .collect();
    server.admission.drain();
    assert_eq!(server.admission.state(), ServerState::Draining);
    assert_eq!(server.admission.wait_until_drained(sync::now() + Duration::from_secs(1000)), 0);
    for thread in threads {
        let (writer, state) = thread.join().unwrap();
        let expected: &[&str] = if state == ServerState::Draining { &[] } else { &["draining"] };
        while lock(&writer.sent).len() < expected.len() && Arc::strong_count(&writer) > 1 {
            yield_now();
        }
        let sent = lock(&writer.sent).clone();
        assert!(sent == expected, "{sent:?} was sent to a subscriber that had learned {state:?}");
    }
    server.check_end();
}

/// All connections are ended by their operator while they begin.
pub(crate) fn aborted() {
    let server = Server::new();
    let (connection, _client) = Server::connect(1);
    let peer = connection.aborter().peer();
    let (permit, _) = server.admission.admit(peer, connection.aborter()).expect("room");
    let aborting = {
        let server = server.clone();
        spawn(move || server.admission.abort_if(|_| true))
    };
    let watch = HangupWatch::default().add_session(connection.aborter());
    permit.set_watch(&watch, &Arc::new(SessionAudit::default()));
    let begun = permit.begin(peer, &SessionMemory);
    assert_eq!(aborting.join().unwrap(), [peer]);
    assert!(begun.is_ok() || matches!(begun, Err(Refusal::Closed)));
    assert!(watch.has_hung_up() && permit.is_aborted(), "the work of the connection was not cancelled");
    assert!(connection.aborter().hung_up());
    drop(permit);
    server.check_end();
}
