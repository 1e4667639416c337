//! Fairness: the time of a token of a decoding client, and of a tiny one, alone, beside an ordinary neighbour, and beside each
//! of the abusive ones of [`NEIGHBOURS`]; and how a device is shared by equal clients and by tenants.
//!
//! `cargo bench -p fanout --bench abuse -- --fairness` measures; with `--check`, the ratios must be within the bounds, too.
//! Otherwise each client must only be served. With `--small`, the model has a quarter of the layers and a small vocabulary.

mod decoder;
mod neighbours;
mod shares;
mod wire_graph;

pub(crate) use neighbours::NEIGHBOURS;

use crate::Arguments;
use crate::server_process::ServerProcess;
use crate::session::Session;
use decoder::{Decoder, ONE_B, QUARTER, TINY, TokenTimes};
use neighbours::{Neighbour, Street};
use std::io::Result;
use std::time::{Duration, Instant};

/// Time of a measurement if `--seconds` is not given.
const DEFAULT_TIME: Duration = Duration::from_secs(2);

/// Length of the measurements of shares, as a multiple of the others.
const SHARES_FACTOR: u32 = 5;

/// Fewest tokens of a measurement.
const MIN_TOKENS: usize = 3;

/// Memory of the device in bytes.
const MEMORY: u64 = 4 << 30;

/// A token beside one abusive session may take this multiple of its time beside an ordinary one.
const MAX_RATIO: f64 = 3.0;

/// What a tiny token may take longer for each session: two slices of the device.
const TINY_ALLOWANCE: Duration = Duration::from_millis(4);

/// Maximum time until tokens take about as long as before the neighbour came.
const MAX_RECOVERY: Duration = Duration::from_secs(10);

/// What counts as about as long: a multiple of the time, and an allowance for what else the machine does.
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
    let most_sessions = NEIGHBOURS.iter().map(|neighbour| neighbour.sessions).max().unwrap_or(0);
    let server = ServerProcess::start(&arguments.binary, MEMORY, most_sessions + 2, &[]);
    let connect = |model| Decoder::new(Session::connect(&server.address)?, model);
    let mut clients = Clients { decoding: connect(&model)?, tiny: connect(&TINY)? };
    let alone = clients.measure(time)?;
    let columns = |token| format!("{token:>12} {:>10} {:>10}", "bound", "slowest");
    println!("{:14} {} {} {:>7}", "beside", columns("token"), columns("tiny token"), "rounds");
    print_row("nobody", alone, None, 0);
    let (mut beside_ordinary, mut failed) = (None, false);
    for neighbour in NEIGHBOURS {
        // The first one, which is the ordinary one, is always measured.
        if beside_ordinary.is_some() && !arguments.chooses(neighbour.name) {
            continue;
        }
        let street = Street::new(&server.address, &model);
        let (times, error) = beside(neighbour, &street, &mut clients, time)?;
        let bounds = beside_ordinary.get_or_insert(times).bounds(neighbour.sessions);
        print_row(neighbour.name, times, Some(&bounds), street.rounds());
        if let Some(error) = error {
            println!("  FAILED: the neighbour lost its connection: {error}");
            failed = true;
        }
        if !times.are_within(&bounds) {
            println!("  {}", if arguments.check { "FAILED: above its bound" } else { "above its bound" });
            failed |= arguments.check;
        }
        if !recovers(&mut clients, alone)? {
            println!("  FAILED: tokens take longer than before, also {MAX_RECOVERY:?} after the neighbour has left");
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

/// Measures the clients beside a neighbour, which lives in `street`. Also returns why the neighbour has left early, if it has.
fn beside(
    neighbour: &Neighbour,
    street: &Street<'_>,
    clients: &mut Clients,
    time: Duration,
) -> Result<(Times, Option<std::io::Error>)> {
    std::thread::scope(|scope| {
        let run = || {
            let result = (neighbour.run)(street);
            // Connections end in the middle of a reply when it is over.
            result.err().filter(|_| !street.is_over())
        };
        let sessions: Vec<_> = (0..neighbour.sessions).map(|_| scope.spawn(run)).collect();
        while street.busy() < neighbour.sessions && !sessions.iter().any(|session| session.is_finished()) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let times = clients.measure(time);
        let early = sessions.iter().any(|session| session.is_finished());
        street.end();
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
