//! Fairness: the time of a token of a decoding client, and of a tiny one, alone, beside an ordinary load (a client that decodes
//! as well), and beside each abusive one of [`LOAD_CLIENTS`]; and the shares of equal clients and of tenants.
//!
//! `cargo bench -p fanout --bench abuse -- --fairness` measures; with `--check`, the ratios must be within the bounds, too.
//! Otherwise each client must only be served. With `--small`, the model has a quarter of the layers and a small vocabulary.

mod decoder;
mod load;
mod shares;
mod wire_graph;

pub(crate) use load::LOAD_CLIENTS;
pub(crate) use wire_graph::WireGraph;

use crate::server_process::ServerProcess;
use crate::session::Session;
use crate::{Arguments, MAX_RECOVERY};
use decoder::{Decoder, ONE_B, QUARTER, TINY, TokenTimes};
use load::{Load, LoadClient};
use std::io::Result;
use std::time::{Duration, Instant};

/// Time of a measurement if `--seconds` is not given.
const DEFAULT_TIME: Duration = Duration::from_secs(2);

/// Length of the measurements of shares, as a multiple of the others.
const SHARES_FACTOR: u32 = 5;

/// Fewest tokens of a measurement.
const MIN_TOKENS: usize = 3;

/// Memory of the shared device in bytes.
const DEVICE_MEMORY: u64 = 4 << 30;

/// A token beside one abusive session may take this multiple of its time beside an ordinary one.
const MAX_RATIO: f64 = 3.0;

/// Allowance of a tiny token for each session: two slices of the device.
const TINY_ALLOWANCE: Duration = Duration::from_millis(4);

/// Tokens take about as long as before the load up to this multiple of the time, and an allowance for other processes.
const RECOVERED_RATIO: u32 = 2;
const RECOVERED_ALLOWANCE: Duration = Duration::from_millis(20);

/// Names the measurement of shares on the command line.
pub(crate) const SHARES: &str = "shares";

/// Times of tokens of both clients.
#[derive(Clone, Copy)]
struct Times {
    decoding: TokenTimes,
    tiny: TokenTimes,
}

/// Maximum medians.
struct Bounds {
    decoding: Duration,
    tiny: Duration,
}

/// The measured clients.
struct Clients {
    decoding: Decoder,
    tiny: Decoder,
}

impl Clients {
    fn measure(&mut self, time: Duration) -> Result<Times> {
        Ok(Times { decoding: self.decoding.tokens(time, MIN_TOKENS)?, tiny: self.tiny.tokens(time, MIN_TOKENS)? })
    }
}

impl Times {
    /// The bounds beside `sessions` abusive sessions, for these times beside one ordinary session. Equal shares make a token
    /// take as much longer as there are more sessions.
    fn bounds(self, sessions: usize) -> Bounds {
        let factor = MAX_RATIO * (sessions + 1) as f64 / 2.0;
        let tiny = self.tiny.median.mul_f64(factor) + TINY_ALLOWANCE * sessions as u32;
        Bounds { decoding: self.decoding.median.mul_f64(factor), tiny }
    }

    fn are_within(&self, bounds: &Bounds) -> bool {
        self.decoding.median <= bounds.decoding && self.tiny.median <= bounds.tiny
    }
}

fn print_row(name: &str, times: Times, bounds: Option<&Bounds>, rounds: u64) {
    print!("{name:14}");
    for (times, bound) in
        [(times.decoding, bounds.map(|bounds| bounds.decoding)), (times.tiny, bounds.map(|bounds| bounds.tiny))]
    {
        let bound = bound.map_or(String::new(), |bound| format!("{bound:.2?}"));
        print!(" {:>12.2?} {bound:>10} {:>10.2?}", times.median, times.slowest);
    }
    println!(" {rounds:>7}");
}

/// Measures everything. Returns whether a client was not served, or with `--check` a bound is exceeded.
pub(crate) fn run(arguments: &Arguments) -> Result<bool> {
    let time = arguments.length.unwrap_or(DEFAULT_TIME);
    let model = if arguments.small { QUARTER } else { ONE_B };
    let most_sessions = LOAD_CLIENTS.iter().map(|client| client.sessions).max().unwrap_or(0);
    let server = ServerProcess::start(&arguments.binary, DEVICE_MEMORY, most_sessions + 2, &[]);
    let connect = |model| Decoder::new(Session::connect(&server.address)?, model);
    let mut clients = Clients { decoding: connect(&model)?, tiny: connect(&TINY)? };
    let alone = clients.measure(time)?;
    let columns = |token| format!("{token:>12} {:>10} {:>10}", "bound", "slowest");
    println!("{:14} {} {} {:>7}", "beside", columns("token"), columns("tiny token"), "rounds");
    print_row("no load", alone, None, 0);
    let (mut beside_ordinary, mut failed) = (None, false);
    for client in LOAD_CLIENTS {
        // The first one, which is the ordinary one, is always measured.
        if beside_ordinary.is_some() && !arguments.chooses(client.name) {
            continue;
        }
        let load = Load::new(&server.address, &model);
        let (times, error) = beside(client, &load, &mut clients, time)?;
        let bounds = beside_ordinary.get_or_insert(times).bounds(client.sessions);
        print_row(client.name, times, Some(&bounds), load.rounds());
        if let Some(error) = error {
            println!("  FAILED: the load lost its connection: {error}");
            failed = true;
        }
        if !times.are_within(&bounds) {
            println!("  {}", if arguments.check { "FAILED: above its bound" } else { "above its bound" });
            failed |= arguments.check;
        }
        if !recovers(&mut clients, alone)? {
            println!("  FAILED: tokens take longer than before, also {MAX_RECOVERY:?} after the load has ended");
            failed = true;
        }
    }
    drop((clients, server));
    if arguments.chooses(SHARES) {
        for measure in [shares::of_sessions, shares::of_tenants] {
            let shares = measure(&arguments.binary, time * SHARES_FACTOR)?;
            println!("{shares}");
            if !shares.are_served() || arguments.check && !shares.are_equal() {
                println!("  FAILED: the shares are not equal");
                failed = true;
            }
        }
    }
    Ok(failed)
}

/// Measures the clients beside the sessions of a load client. Also returns the error of a session that ended early, if one did.
fn beside(
    client: &LoadClient,
    load: &Load<'_>,
    clients: &mut Clients,
    time: Duration,
) -> Result<(Times, Option<std::io::Error>)> {
    std::thread::scope(|scope| {
        let run = || {
            let result = (client.run)(load);
            // The end of the load closes its connections, also in the middle of a reply.
            result.err().filter(|_| !load.has_ended())
        };
        let sessions: Vec<_> = (0..client.sessions).map(|_| scope.spawn(run)).collect();
        while load.busy() < client.sessions && !sessions.iter().any(|session| session.is_finished()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let times = clients.measure(time);
        let early = sessions.iter().any(|session| session.is_finished());
        load.end();
        let errors = sessions.into_iter().filter_map(|session| session.join().unwrap());
        let error = errors.last().filter(|_| early);
        Ok((times?, error))
    })
}

/// Waits until tokens take about as long as alone.
fn recovers(clients: &mut Clients, alone: Times) -> Result<bool> {
    let since = Instant::now();
    while since.elapsed() < MAX_RECOVERY {
        let now = clients.measure(Duration::ZERO)?;
        let is_near =
            |now: TokenTimes, before: TokenTimes| now.median <= RECOVERED_RATIO * before.median + RECOVERED_ALLOWANCE;
        if is_near(now.decoding, alone.decoding) && is_near(now.tiny, alone.tiny) {
            return Ok(true);
        }
    }
    Ok(false)
}
