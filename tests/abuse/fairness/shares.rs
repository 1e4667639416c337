//! Equal shares: many sessions that decode all the time, and how many tokens each of them gets.

use super::DEVICE_MEMORY;
use super::decoder::{Decoder, SHARED};
use crate::server_process::ServerProcess;
use crate::session::Session;
use std::fmt;
use std::io::Result;
use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Barrier;
use std::time::{Duration, Instant};

/// Sessions that share the device.
const SESSIONS: usize = 16;

/// Smallest share, as a part of the largest one.
const MIN_RATIO: f64 = 0.8;

/// Tokens of each client or tenant.
pub(crate) struct Shares {
    name: &'static str,
    tokens: Vec<u64>,
}

impl Shares {
    pub(crate) fn are_equal(&self) -> bool {
        self.ratio() >= MIN_RATIO
    }

    /// The smallest share, as a part of the largest one.
    fn ratio(&self) -> f64 {
        let of = |tokens: Option<&u64>| tokens.copied().unwrap_or(0) as f64;
        of(self.tokens.iter().min()) / of(self.tokens.iter().max()).max(1.0)
    }

    /// Whether each client got a token.
    pub(crate) fn are_served(&self) -> bool {
        self.tokens.iter().all(|&tokens| tokens > 0)
    }
}

impl fmt::Display for Shares {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: tokens {:?}, smallest share {:.2} of the largest", self.name, self.tokens, self.ratio())
    }
}

/// Sessions from one address of loopback: each is a tenant of its own.
pub(crate) fn of_sessions(binary: &Path, time: Duration) -> Result<Shares> {
    let server = ServerProcess::start(binary, DEVICE_MEMORY, SESSIONS, &[]);
    let tokens = decode(&server.address, &[Ipv4Addr::LOCALHOST; SESSIONS], time)?;
    Ok(Shares { name: "sixteen sessions", tokens })
}

/// A tenant with sixteen sessions, and one with a single session.
pub(crate) fn of_tenants(binary: &Path, time: Duration) -> Result<Shares> {
    let server = ServerProcess::start(binary, DEVICE_MEMORY, SESSIONS + 1, &["--loopback-tenants"]);
    let mut addresses = vec![Ipv4Addr::new(127, 0, 0, 2); SESSIONS];
    addresses.push(Ipv4Addr::new(127, 0, 0, 3));
    let tokens = decode(&server.address, &addresses, time)?;
    let (many, single) = tokens.split_at(SESSIONS);
    Ok(Shares { name: "a tenant with sixteen sessions, and one with one", tokens: vec![many.iter().sum(), single[0]] })
}

/// The tokens that a session from each address has computed after `time`.
fn decode(server: &str, addresses: &[Ipv4Addr], time: Duration) -> Result<Vec<u64>> {
    let connect = |&from: &Ipv4Addr| Decoder::new(Session::connect_from(from, server)?, &SHARED);
    let mut decoders = addresses.iter().map(connect).collect::<Result<Vec<_>>>()?;
    decoders.iter_mut().try_for_each(|decoder| decoder.token().map(drop))?;
    let start = Barrier::new(decoders.len());
    std::thread::scope(|scope| {
        let count = |decoder: &mut Decoder| {
            start.wait();
            let (until, mut tokens) = (Instant::now() + time, 0);
            while Instant::now() < until {
                decoder.token()?;
                tokens += 1;
            }
            Ok(tokens)
        };
        let threads: Vec<_> = decoders.iter_mut().map(|decoder| scope.spawn(move || count(decoder))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}
