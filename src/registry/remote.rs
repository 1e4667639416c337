//! Devices of servers in device lists: connects to the servers, and resolves names such as `10.0.0.5:50052/0`.

use super::{DeviceEntry, DeviceOrigin, RegistryError};
use crate::device::Device;
use crate::rpc::client::{ConnectError, Endpoint, Options};
use std::sync::Arc;

/// Splits a name at the slash into the server's address and the optional device.
fn split_name(name: &str) -> (&str, Option<&str>) {
    name.split_once('/').map_or((name, None), |(server, device)| (server, Some(device)))
}

/// Connects to the servers of all names, concurrently, and once to each server.
pub(super) fn connect_all<'a>(
    names: impl Iterator<Item = &'a str>,
    options: &Options,
) -> Result<Vec<Endpoint>, RegistryError> {
    let mut servers: Vec<&str> = Vec::new();
    for (server, _) in names.map(split_name) {
        if !servers.contains(&server) {
            servers.push(server);
        }
    }
    let mut endpoints = Vec::new();
    let mut errors = Vec::new();
    for result in connect_concurrently(&servers, options) {
        match result {
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

fn connect_concurrently(servers: &[&str], options: &Options) -> Vec<Result<Endpoint, ConnectError>> {
    let connect = |server: &str| Endpoint::connect(server, options);
    let [.., last] = servers else { return Vec::new() };
    std::thread::scope(|scope| {
        let others = &servers[..servers.len() - 1];
        let start = |server| std::thread::Builder::new().spawn_scoped(scope, move || connect(server));
        let threads: Vec<_> = others.iter().map(|&server| (server, start(server))).collect();
        let last = connect(last);
        // If the thread could not be started or panicked, connect on this thread.
        let results = threads.into_iter().map(|(server, thread)| match thread.map(|thread| thread.join()) {
            Ok(Ok(result)) => result,
            _ => connect(server),
        });
        results.collect::<Vec<_>>().into_iter().chain([last]).collect()
    })
}

/// The devices that a name refers to: all of the server, or the device with the number or name after the slash.
pub(super) fn devices(name: &str, endpoints: &[Endpoint]) -> Result<Vec<DeviceEntry>, RegistryError> {
    let (server, device) = split_name(name);
    let all = endpoints.iter().find(|endpoint| endpoint.name() == server).map_or(&[][..], Endpoint::devices);
    let selected = |(at, of): &(usize, &Arc<dyn Device>)| {
        device.is_none_or(|device| device == at.to_string() || of.info().name.eq_ignore_ascii_case(name))
    };
    let entry = |(_, device): (usize, &Arc<dyn Device>)| DeviceEntry::of_open(device, DeviceOrigin::Remote);
    let found: Vec<_> = all.iter().enumerate().filter(selected).map(entry).collect();
    if found.is_empty() {
        let available = all.iter().map(|device| &*device.info().name).collect::<Vec<_>>().join(", ");
        return Err(RegistryError::UnknownDevice { name: name.to_owned(), available });
    }
    Ok(found)
}
