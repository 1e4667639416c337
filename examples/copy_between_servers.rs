//! Copies the bytes of a file from server to server, and compares what arrives at the last one with the file.
//!
//! ```text
//! copy_between_servers FILE [--key FILE] HOST:PORT[=KEY] HOST:PORT[=KEY]…
//! ```
//!
//! The servers exchange the bytes directly (`rpc-server --peer`): the program fails if the bytes would pass through it.
//! `scripts/netns.sh` records what the servers send to each other meanwhile.

use std::error::Error;
use std::path::Path;

use fanout::device::{Buffer, Device, MemoryBudget, Queue, UploadSource};
use fanout::rpc::client::{Endpoint, Options};
use fanout::rpc::keys::SecretKey;

/// Host memory that replies may use, in bytes.
const HOST_MEMORY: u64 = 1 << 30;

const USAGE: &str = "usage: copy_between_servers FILE [--key FILE] HOST:PORT[=KEY] HOST:PORT[=KEY]…";

/// A server with a buffer for the bytes.
struct Stop {
    endpoint: Endpoint,
    queue: Box<dyn Queue>,
    buffer: Buffer,
}

impl Stop {
    fn connect(server: &str, key: Option<&SecretKey>, bytes: usize) -> Result<Stop, Box<dyn Error>> {
        let (address, keys) = match server.split_once('=') {
            Some((address, key)) => (address, vec![key.parse()?]),
            None => (server, Vec::new()),
        };
        let options = Options::default().with_server_keys(keys).with_key(key.cloned());
        let endpoint = Endpoint::connect(address, &options)?;
        let (budget, device) = (MemoryBudget::new(HOST_MEMORY), endpoint.devices().first().ok_or("no device")?);
        let (queue, buffer) = (device.queue(&budget)?, device.alloc(bytes as u64, &budget)?);
        Ok(Stop { endpoint, queue, buffer })
    }

    fn device(&self) -> Result<&dyn Device, Box<dyn Error>> {
        Ok(&**self.endpoint.devices().first().ok_or("no device")?)
    }

    /// Copies the buffer of another server to this one's, and waits until it has arrived.
    fn copy_from(&mut self, from: &mut Stop) -> Result<(), Box<dyn Error>> {
        if !self.device()?.copies_from(from.device()?.info()) {
            return Err(format!("{} cannot send to {} directly", from.endpoint.name(), self.endpoint.name()).into());
        }
        let filled = from.queue.mark();
        let copied = self.queue.copy_from(from.buffer.whole(), self.buffer.whole(), Some(&filled))?;
        if !copied.is_submitted() {
            return Err(format!("{} cannot copy from {}", self.endpoint.name(), from.endpoint.name()).into());
        }
        Ok(self.queue.mark().wait(None)?)
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut args = std::env::args().skip(1);
    let data = std::fs::read(args.next().ok_or(USAGE)?)?;
    let mut servers: Vec<_> = args.collect();
    let mut key = None;
    if let [option, file, rest @ ..] = &servers[..]
        && option == "--key"
    {
        key = Some(SecretKey::read_file(Path::new(file))?);
        servers = rest.to_vec();
    }
    let stops = servers.iter().map(|server| Stop::connect(server, key.as_ref(), data.len()));
    let mut stops = stops.collect::<Result<Vec<_>, _>>()?.into_iter();
    let mut last = stops.next().ok_or(USAGE)?;
    last.queue.upload(last.buffer.whole(), None, UploadSource::Borrowed(&data))?;
    for mut next in stops {
        next.copy_from(&mut last)?;
        last = next;
    }
    if last.queue.download(last.buffer.whole())?.wait(None)? != data {
        return Err("the last server has other bytes".into());
    }
    println!("copied {} bytes over {} servers", data.len(), servers.len());
    Ok(())
}
