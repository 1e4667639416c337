//! Which devices and servers are on one machine, and so share its cores and memory.

use fanout::device::DeviceKind;
use fanout::rpc::status::machine_id;
use std::net::IpAddr;

/// By device: for CPU devices, the number of their machine, whose cores they share. `devices` has the kind of each, and its machine.
pub(super) fn shared_cores<'a>(devices: impl Iterator<Item = (DeviceKind, &'a str)>) -> Vec<Option<usize>> {
    let mut machines = Vec::new();
    let number = |(kind, machine): (DeviceKind, &'a str)| {
        if kind != DeviceKind::Cpu {
            return None;
        }
        machines.iter().position(|known| *known == machine).or_else(|| {
            machines.push(machine);
            Some(machines.len() - 1)
        })
    };
    devices.map(number).collect()
}

/// The machine of an endpoint `host:port`: its identity, if the server tells it, or its name or address.
pub(super) fn host(endpoint: &str, id: Option<String>) -> String {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    let host = host.trim_start_matches('[').trim_end_matches(']');
    let is_this =
        host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|ip: IpAddr| ip.to_canonical().is_loopback());
    id.or_else(|| is_this.then(machine_id).flatten())
        .unwrap_or_else(|| if is_this { "localhost".to_owned() } else { host.to_ascii_lowercase() })
}

/// A note for each server at another address than an earlier server of the same machine.
pub(super) fn shared_hosts<'a>(servers: impl Iterator<Item = (&'a str, &'a String)>) -> Vec<String> {
    let servers: Vec<_> = servers.collect();
    let address = |endpoint: &str| endpoint.rsplit_once(':').map(|(host, _)| host.to_owned());
    let note = |(at, (endpoint, machine)): (usize, &(&str, &String))| {
        let (other, _) = servers[..at].iter().find(|(_, other)| other == machine)?;
        let is_new = address(other) != address(endpoint);
        is_new.then(|| format!("{other} and {endpoint} are one machine: its devices share cores and memory"))
    };
    servers.iter().enumerate().filter_map(note).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_of_one_machine_share_cores() {
        let this = machine_id().unwrap_or("localhost".to_owned());
        let machines = [
            ("localhost", None, &*this),
            ("a:1", None, "a"),
            ("[::1]:1", None, &this),
            ("A:2", None, "a"),
            ("127.8.0.1:1", None, &this),
            ("10.0.0.1:1", None, "10.0.0.1"),
            ("10.0.0.2:1", Some("id"), "id"),
            ("b:1", Some("id"), "id"),
            ("10.0.0.3:1", Some(&*this), &this),
        ];
        for (endpoint, id, machine) in machines {
            assert_eq!(host(endpoint, id.map(str::to_owned)), machine, "{endpoint}");
        }
        let (cpu, gpu) = (DeviceKind::Cpu, DeviceKind::Gpu);
        let devices = [(cpu, "x"), (cpu, "y"), (gpu, "y"), (cpu, "x"), (cpu, "z")];
        assert_eq!(shared_cores(devices.into_iter()), [Some(0), Some(1), None, Some(0), Some(2)]);
        let [a, b] = ["x", "y"].map(str::to_owned);
        let servers = [("h:1", &a), ("h:2", &a), ("10.0.0.1:1", &a), ("k:1", &b)];
        let note = "h:1 and 10.0.0.1:1 are one machine: its devices share cores and memory";
        assert_eq!(shared_hosts(servers.into_iter()), [note]);
    }
}
