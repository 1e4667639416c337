//! Which devices copy from which others' memory by themselves.

use super::Devices;
use crate::device::Device;
use std::sync::Arc;
use std::thread::Builder;

/// For each device the devices that it copies from. That one copies from another does not mean that the other copies from it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct CopyPaths {
    /// By device, then by the device whose memory it is.
    rows: Vec<Vec<CopyPath>>,
}

/// How bytes get from one device to another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum CopyPath {
    /// Within a domain.
    SameDomain,
    /// From another domain, and not through the host.
    Peer,
    /// Through the host.
    ThroughHost,
}

impl CopyPaths {
    /// Asks each device once of each other that is not of its domain. Devices behind connections are asked at the same time:
    /// their servers may have to find out.
    pub(crate) fn new(devices: &Devices) -> CopyPaths {
        let row = |to: &Arc<dyn Device>| {
            let way = |from: &Arc<dyn Device>| match same_domain(&**to, &**from) {
                true => CopyPath::SameDomain,
                false if to.copies_from(from.info()) => CopyPath::Peer,
                false => CopyPath::ThroughHost,
            };
            devices.iter().map(way).collect::<Vec<_>>()
        };
        let rows = std::thread::scope(|scope| {
            let far = |to: &Arc<dyn Device>| {
                to.link_stats().is_some() && devices.iter().any(|from| !same_domain(&**to, &**from))
            };
            let ask = |to| Builder::new().name("reach".to_owned()).spawn_scoped(scope, move || row(to)).ok();
            let asked: Vec<_> = devices.iter().map(|to| if far(to) { ask(to) } else { None }).collect();
            let told = asked.into_iter().map(|thread| thread.and_then(|thread| thread.join().ok()));
            told.zip(devices).map(|(told, to)| told.unwrap_or_else(|| row(to))).collect()
        });
        CopyPaths { rows }
    }

    /// Whether device `to` copies from the memory of device `from`.
    pub(crate) fn can_copy(&self, to: usize, from: usize) -> bool {
        self.path(to, from) != CopyPath::ThroughHost
    }

    /// Whether it does, and is of another domain: then each waits for the other's moments only at some cost.
    pub(crate) fn crosses_domains(&self, to: usize, from: usize) -> bool {
        self.path(to, from) == CopyPath::Peer
    }

    fn path(&self, to: usize, from: usize) -> CopyPath {
        self.rows.get(to).and_then(|row| row.get(from)).copied().unwrap_or(CopyPath::ThroughHost)
    }

    /// Whether what some device has gets to device `to` only through the host.
    pub(crate) fn needs_host_staging(&self, to: usize) -> bool {
        self.rows.get(to).is_none_or(|row| row.contains(&CopyPath::ThroughHost))
    }
}

fn same_domain(to: &dyn Device, from: &dyn Device) -> bool {
    to.info().domain == from.info().domain
}

#[cfg(test)]
impl CopyPaths {
    /// Says something else of two devices.
    pub(crate) fn set(&mut self, to: usize, from: usize, copies: bool) {
        self.rows[to][from] = if copies { CopyPath::Peer } else { CopyPath::ThroughHost };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sched::tests::graphs;

    #[test]
    fn what_devices_say_in_each_direction() {
        let reach = CopyPaths::new(&graphs::one_way(3));
        let table = (0..3).map(|to| [0, 1, 2].map(|from| reach.can_copy(to, from))).collect::<Vec<_>>();
        assert_eq!(table, [[true, false, true], [true, true, false], [true, true, true]]);
        assert_eq!([0, 1, 2].map(|to| reach.needs_host_staging(to)), [true, true, false]);
        assert!(!CopyPaths::new(&graphs::devices(3, true)).needs_host_staging(0));
        assert!(!reach.can_copy(0, 3) && !reach.can_copy(3, 0));
    }
}
