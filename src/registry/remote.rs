//! Devices of servers, by the names that lists have for them.

use super::{Entry, Origin, RegistryError};
use crate::device::Device;
use crate::rpc::client::{ConnectError, Endpoint, Options};
use std::sync::Arc;

/// The server of a name, and the device of its that is meant.
fn parts(name: &str) -> (&str, Option<&str>) {
    name.split_once('/').map_or((name, None), |(server, device)| (server, Some(device)))
}

/// Connects to the servers of all names at the same time, to each once.
pub(super) fn connect<'a>(
    names: impl Iterator<Item = &'a str>,
    options: &Options,
) -> Result<Vec<Endpoint>, RegistryError> {
    let mut servers: Vec<&str> = Vec::new();
    for (server, _) in names.map(parts) {
        if !servers.contains(&server) {
            servers.push(server);
        }
    }
    let mut endpoints = Vec::new();
    let mut errors = Vec::new();
    for done in at_once(&servers, options) {
        match done {
            Ok(endpoint) => endpoints.push(endpoint),
            Err(e) => errors.push(e),
        }
    }
    match errors.pop() {
        None => Ok(endpoints),
        Some(only) if errors.is_empty() => Err(only.into()),
        Some(last) => {
            errors.push(last);
            Err(RegistryError::Endpoints { servers: servers.len(), errors })
        }
    }
}

fn at_once(servers: &[&str], options: &Options) -> Vec<Result<Endpoint, ConnectError>> {
    let connect = |server: &str| Endpoint::connect(server, options);
    let [.., last] = servers else { return Vec::new() };
    std::thread::scope(|scope| {
        let others = &servers[..servers.len() - 1];
        let start = |server| std::thread::Builder::new().spawn_scoped(scope, move || connect(server));
        let threads: Vec<_> = others.iter().map(|&server| (server, start(server))).collect();
        let last = connect(last);
        // Where no thread could be had, or it has ended without a word, the server has its turn now.
        let done = threads.into_iter().map(|(server, thread)| match thread.map(|thread| thread.join()) {
            Ok(Ok(done)) => done,
            _ => connect(server),
        });
        done.collect::<Vec<_>>().into_iter().chain([last]).collect()
    })
}

/// The devices of a server, or the one that the name has the number or the name of.
pub(super) fn devices(name: &str, endpoints: &[Endpoint]) -> Result<Vec<Entry>, RegistryError> {
    let (server, device) = parts(name);
    let all = endpoints.iter().find(|endpoint| endpoint.name() == server).map_or(&[][..], Endpoint::devices);
    let meant = |(at, of): &(usize, &Arc<dyn Device>)| {
        device.is_none_or(|device| device == at.to_string() || of.info().name.eq_ignore_ascii_case(name))
    };
    let entry = |(_, device): (usize, &Arc<dyn Device>)| Entry {
        name: device.info().name.clone(),
        description: device.info().description.clone(),
        kind: device.info().kind,
        unusable: None,
        origin: Origin::Remote(Arc::clone(device)),
    };
    let found: Vec<_> = all.iter().enumerate().filter(meant).map(entry).collect();
    if found.is_empty() {
        let known = all.iter().map(|device| &*device.info().name).collect::<Vec<_>>().join(", ");
        return Err(RegistryError::Unknown { name: name.to_owned(), known });
    }
    Ok(found)
}
