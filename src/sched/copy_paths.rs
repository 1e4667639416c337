//! Copy paths: for each pair of devices, whether bytes are copied within a domain, by a peer copy, or staged through the host.

use super::Devices;
use crate::device::Device;
use std::sync::Arc;
use std::thread::Builder;

/// The copy path of each ordered pair of devices. Paths are not symmetric: GPU0 may copy from GPU1 while GPU1 cannot copy from
/// GPU0.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CopyPaths {
    /// By destination device, then by source device.
    rows: Vec<Vec<CopyPath>>,
}

/// How bytes are copied from one device to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CopyPath {
    /// Both devices are in one domain.
    SameDomain,
    /// Peer copy: the destination device reads from another domain without the host.
    Peer,
    /// Host-staged copy: download, then upload.
    ThroughHost,
}

impl CopyPaths {
    /// Queries `PeerCopies::copies_from` once for each ordered pair of devices in different domains. Remote devices are queried
    /// in parallel, a thread each: their servers may have to connect to each other to answer.
    pub(crate) fn new(devices: &Devices) -> CopyPaths {
        let row = |to: &Arc<dyn Device>| {
            let path = |from: &Arc<dyn Device>| match same_domain(&**to, &**from) {
                true => CopyPath::SameDomain,
                false if to.copies_from(from.info()) => CopyPath::Peer,
                false => CopyPath::ThroughHost,
            };
            devices.iter().map(path).collect::<Vec<_>>()
        };
        let rows = std::thread::scope(|scope| {
            let is_remote = |to: &Arc<dyn Device>| {
                to.link_stats().is_some() && devices.iter().any(|from| !same_domain(&**to, &**from))
            };
            let query = |to| Builder::new().name("copy-paths".to_owned()).spawn_scoped(scope, move || row(to)).ok();
            let threads: Vec<_> = devices.iter().map(|to| if is_remote(to) { query(to) } else { None }).collect();
            let joined = threads.into_iter().map(|thread| thread.and_then(|thread| thread.join().ok()));
            joined.zip(devices).map(|(joined, to)| joined.unwrap_or_else(|| row(to))).collect()
        });
        CopyPaths { rows }
    }

    /// Whether device `to` can copy from the memory of device `from` without the host.
    pub(crate) fn can_copy(&self, to: usize, from: usize) -> bool {
        self.path(to, from) != CopyPath::ThroughHost
    }

    /// Whether device `to` copies from device `from` across domains. A wait between such devices costs a host round trip.
    pub(crate) fn crosses_domains(&self, to: usize, from: usize) -> bool {
        self.path(to, from) == CopyPath::Peer
    }

    fn path(&self, to: usize, from: usize) -> CopyPath {
        self.rows.get(to).and_then(|row| row.get(from)).copied().unwrap_or(CopyPath::ThroughHost)
    }

    /// Whether copies from at least one device to device `to` are staged through the host.
    pub(crate) fn needs_host_staging(&self, to: usize) -> bool {
        self.rows.get(to).is_none_or(|row| row.contains(&CopyPath::ThroughHost))
    }
}

fn same_domain(to: &dyn Device, from: &dyn Device) -> bool {
    to.info().domain == from.info().domain
}

#[cfg(test)]
impl CopyPaths {
    /// Overrides the path of one pair.
    pub(crate) fn set(&mut self, to: usize, from: usize, copies: bool) {
        self.rows[to][from] = if copies { CopyPath::Peer } else { CopyPath::ThroughHost };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::tests::graphs;

    #[test]
    fn copy_paths_are_directional() {
        let paths = CopyPaths::new(&graphs::one_way(3));
        let table = (0..3).map(|to| [0, 1, 2].map(|from| paths.can_copy(to, from))).collect::<Vec<_>>();
        assert_eq!(table, [[true, false, true], [true, true, false], [true, true, true]]);
        assert_eq!([0, 1, 2].map(|to| paths.needs_host_staging(to)), [true, true, false]);
        assert!(!CopyPaths::new(&graphs::devices(3, true)).needs_host_staging(0));
        assert!(!paths.can_copy(0, 3) && !paths.can_copy(3, 0));
    }
}
