//! Devices with their speeds, the links between their hosts, and the time of a copy and of an all-reduce over these links.

use super::{MAX_DEVICES, PlannerError};

/// Sums from this size on are a reduce-scatter and an all-gather in groups of three or more, as `tensor_group` builds them.
const SCATTER_BYTES: f64 = 65_536.0;

/// Columns of the products by which [`DeviceSpeed::few_columns_rate`] is measured.
pub const FEW_COLUMNS: u32 = 8;

/// Columns of the products by which [`DeviceSpeed::many_columns_rate`] is measured.
pub const MANY_COLUMNS: u32 = 64;

/// The host of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Host {
    /// The client's machine.
    Client,
    /// A server, as an index of the links.
    Server(usize),
}

impl Host {
    /// An index among all hosts: 0 for the client.
    fn index(self) -> usize {
        match self {
            Host::Client => 0,
            Host::Server(server) => server + 1,
        }
    }
}

/// The speed and memory of a device.
#[derive(Clone, Debug, PartialEq)]
pub struct DeviceSpeed {
    /// Name, for tables.
    pub name: String,
    /// Its host.
    pub host: Host,
    /// Bytes of weights per second that a product with one column reads.
    pub read_rate: f64,
    /// Multiply-adds per second of a product with [`FEW_COLUMNS`] columns.
    pub few_columns_rate: f64,
    /// Multiply-adds per second of a product with [`MANY_COLUMNS`] columns or more.
    pub many_columns_rate: f64,
    /// Bytes of keys and values per second that attention of one token per sequence reads.
    pub kv_read_rate: f64,
    /// Fixed time of a node in seconds: a kernel launch, a barrier of the threads, and what it computes with one column. Products count
    /// by the rates above.
    pub node_time: f64,
    /// Fixed time of a run of a program in seconds: its submission.
    pub run_time: f64,
    /// The cores that it computes with, as CPU devices do: devices with the same number share them, and the bandwidth of their memory.
    /// `None`: it shares nothing.
    pub cores: Option<usize>,
    /// The part of these rates that remains while other devices of the same cores work, too.
    pub together: f64,
    /// Bytes that can be allocated.
    pub free: u64,
    /// Whether it runs collective nodes. A tensor group of such devices, all of the client or all of servers with links to each
    /// other, is one program per rank. Other groups copy: each all-reduce is then a program and a message of its own.
    pub collectives: bool,
}

impl DeviceSpeed {
    /// Seconds to compute a product of `multiply_adds` per column, without reading its weights. Up to [`FEW_COLUMNS`] and from
    /// [`MANY_COLUMNS`] on, the rate is that measured there; between them, the time is interpolated.
    pub(super) fn multiply_time(&self, multiply_adds: f64, columns: f64) -> f64 {
        let [few, many] = [FEW_COLUMNS, MANY_COLUMNS].map(f64::from);
        let per_column = if columns <= few {
            1.0 / self.few_columns_rate
        } else if columns >= many {
            1.0 / self.many_columns_rate
        } else {
            let ends = [few / self.few_columns_rate, many / self.many_columns_rate];
            (ends[0] + (ends[1] - ends[0]) * (columns - few) / (many - few)) / columns
        };
        columns * multiply_adds * per_column
    }

    /// Seconds of a product with weights of `bytes` that does `multiply_adds` per column.
    ///
    /// One column takes as long as reading the weights. From [`FEW_COLUMNS`] on, reading and computing overlap. Between them, each
    /// column adds as much as the next: few columns neither hide all of the reading nor compute for free.
    pub(super) fn product_time(&self, bytes: f64, multiply_adds: f64, columns: f64) -> f64 {
        let few = f64::from(FEW_COLUMNS);
        let (reading, computing) = (bytes / self.read_rate, self.multiply_time(multiply_adds, columns.max(few)));
        if columns >= few {
            return reading.max(computing);
        }
        reading + (computing - reading).max(0.0) * (columns - 1.0).max(0.0) / (few - 1.0)
    }
}

/// A link between two hosts, or between two devices of one host.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Link {
    /// Seconds for a small message and its reply.
    pub round_trip: f64,
    /// Bytes per second in one direction.
    pub bandwidth: f64,
}

/// A link between two servers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PeerLink {
    /// By which ranks of a tensor group send their parts.
    pub link: Link,
    /// Seconds from the end of a computation until a small result has arrived in the other server's memory. The client orders such a
    /// copy when it hears of the end, and the receiver then requests the bytes.
    pub copy_latency: f64,
}

impl PeerLink {
    /// A link on which copies are as fast as what ranks send.
    pub fn direct(link: Link) -> PeerLink {
        PeerLink { link, copy_latency: link.round_trip / 2.0 }
    }
}

/// The way of a copy: one link, or two through the client, which receives all bytes before it sends them on.
struct CopyPath {
    first: Link,
    second: Option<Link>,
    /// Seconds until a small copy arrives.
    latency: f64,
}

impl CopyPath {
    /// The time for which the slower of the links is busy: copies one after another arrive at this interval.
    fn interval(&self, bytes: f64) -> f64 {
        let slowest = self.second.map_or(self.first.bandwidth, |link| link.bandwidth.min(self.first.bandwidth));
        bytes / slowest
    }

    fn time(&self, bytes: f64) -> f64 {
        let second = self.second.map_or(0.0, |link| bytes / link.bandwidth);
        self.latency + bytes / self.first.bandwidth + second
    }
}

/// The cost of an all-reduce.
pub(super) struct AllReduce {
    /// Seconds until every rank has the sum.
    pub(super) time: f64,
    /// By host, the client first: seconds for which its network interface is busy sending.
    pub(super) interfaces: Vec<f64>,
}

/// Devices and the links between their hosts.
#[derive(Clone, Debug, PartialEq)]
pub struct Machine {
    devices: Vec<DeviceSpeed>,
    servers: Vec<Link>,
    peers: Vec<Vec<Option<PeerLink>>>,
    within: Link,
    /// By device: whether it reads its weights from the mapped file.
    mapped: Vec<bool>,
    /// The slowest and the fastest machine that the measurements permit.
    bounds: Option<Box<[Machine; 2]>>,
}

impl Machine {
    /// A machine. `servers` has the link from the client to each server. `peers[a][b]` is the link by which server `a` sends to
    /// server `b`, or `None` if bytes go through the client. `within` connects the devices of each host.
    ///
    /// # Errors
    /// [`PlannerError`] for a number of devices that is not planned, rates and times that are none, and links that are missing.
    pub fn new(
        devices: Vec<DeviceSpeed>,
        servers: Vec<Link>,
        peers: Vec<Vec<Option<PeerLink>>>,
        within: Link,
    ) -> Result<Machine, PlannerError> {
        if !(1..=MAX_DEVICES).contains(&devices.len()) {
            return Err(PlannerError::Devices(devices.len()));
        }
        if peers.len() != servers.len() || peers.iter().any(|row| row.len() != servers.len()) {
            return Err(PlannerError::Peers { servers: servers.len() });
        }
        for device in &devices {
            let [rate, time] = [|x: f64| x > 0.0, |x: f64| x >= 0.0];
            check(&device.name, "the read rate", device.read_rate, rate)?;
            check(&device.name, "the read rate of the KV cache", device.kv_read_rate, rate)?;
            check(&device.name, "the rate of few columns", device.few_columns_rate, rate)?;
            check(&device.name, "the rate of many columns", device.many_columns_rate, rate)?;
            check(&device.name, "the part that remains together", device.together, |x| x > 0.0 && x <= 1.0)?;
            check(&device.name, "the time of a node", device.node_time, time)?;
            check(&device.name, "the time of a run", device.run_time, time)?;
            if let Host::Server(server) = device.host
                && server >= servers.len()
            {
                let (device, servers) = (device.name.clone(), servers.len());
                return Err(PlannerError::UnknownServer { device, server, servers });
            }
        }
        let peer_links = || peers.iter().flatten().flatten();
        for peer in peer_links() {
            check("a link between servers", "the latency of a copy", peer.copy_latency, |x| x >= 0.0)?;
        }
        let links = servers.iter().chain(peer_links().map(|peer| &peer.link)).chain([&within]);
        for link in links {
            check("a link", "the bandwidth", link.bandwidth, |x| x > 0.0)?;
            check("a link", "the round trip", link.round_trip, |x| x >= 0.0)?;
        }
        Ok(Machine { mapped: vec![false; devices.len()], devices, servers, peers, within, bounds: None })
    }

    /// The same machine, with what repeated measurements differ by: in `slowest` each figure is the worst of them, in `fastest` the best.
    /// Other devices are then chosen only if the ranges of the predictions do not overlap.
    pub fn with_bounds(self, slowest: Machine, fastest: Machine) -> Machine {
        Machine { bounds: Some(Box::new([slowest, fastest])), ..self }
    }

    /// The slowest and the fastest machine that the measurements permit.
    pub(super) fn bounds(&self) -> Option<&[Machine; 2]> {
        self.bounds.as_deref()
    }

    /// The same machine, on which these devices read their weights from a mapped file, so that weights take none of their memory. Rates
    /// stay as they are: they hold while the system keeps the file in memory.
    pub fn with_mapped_weights(mut self, devices: &[usize]) -> Machine {
        for (device, mapped) in self.mapped.iter_mut().enumerate() {
            *mapped = devices.contains(&device);
        }
        self.bounds = self.bounds.map(|bounds| Box::new(bounds.map(|bound| bound.with_mapped_weights(devices))));
        self
    }

    /// Whether a device reads its weights from the mapped file.
    pub(super) fn maps_weights(&self, device: usize) -> bool {
        self.mapped.get(device).copied().unwrap_or_default()
    }

    /// Corrects the free memory after a check found that a placement with the estimates `estimated` lacks `missing` bytes, by device: so
    /// much less can be planned there. Returns false if nothing is missing on a device of the placement, so that nothing changed.
    pub(super) fn reduce_memory(&mut self, estimated: &[u64], missing: &[u64]) -> bool {
        for bound in self.bounds.iter_mut().flat_map(|bounds| bounds.iter_mut()) {
            bound.reduce_memory(estimated, missing);
        }
        let mut reduced = false;
        for (device, (estimated, missing)) in self.devices.iter_mut().zip(estimated.iter().zip(missing)) {
            if *estimated > 0 && *missing > 0 {
                device.free = device.free.min(estimated.saturating_sub(*missing));
                reduced = true;
            }
        }
        reduced
    }

    /// The devices.
    pub fn devices(&self) -> &[DeviceSpeed] {
        &self.devices
    }

    /// The links between the client and the servers.
    pub(super) fn servers(&self) -> &[Link] {
        &self.servers
    }

    /// The link between devices of one host.
    pub(super) fn within(&self) -> Link {
        self.within
    }

    /// The link by which server `a` sends to server `b` directly.
    pub(super) fn peer(&self, a: usize, b: usize) -> Option<PeerLink> {
        self.peers.get(a)?.get(b).copied().flatten()
    }

    fn path(&self, from: Host, to: Host) -> CopyPath {
        let one = |first: Link| CopyPath { first, second: None, latency: first.round_trip / 2.0 };
        match (from, to) {
            _ if from == to => one(self.within),
            (Host::Server(a), Host::Server(b)) => match self.peer(a, b) {
                Some(PeerLink { link, copy_latency }) => CopyPath { first: link, second: None, latency: copy_latency },
                None => {
                    let (first, second) = (self.servers[a], self.servers[b]);
                    let latency = (first.round_trip + second.round_trip) / 2.0;
                    CopyPath { first, second: Some(second), latency }
                }
            },
            (Host::Client, Host::Server(server)) | (Host::Server(server), Host::Client) => one(self.servers[server]),
            (Host::Client, Host::Client) => one(self.within),
        }
    }

    /// Seconds from the end of a computation on `from` until its `bytes` have arrived at another device, on `to`. The copy was
    /// submitted before, so there is no request to wait for.
    pub(super) fn copy_time(&self, from: Host, to: Host, bytes: f64) -> f64 {
        self.path(from, to).time(bytes)
    }

    /// Seconds by which each further copy of as many bytes arrives later.
    pub(super) fn copy_interval(&self, from: Host, to: Host, bytes: f64) -> f64 {
        self.path(from, to).interval(bytes)
    }

    /// Whether these devices form a group whose all-reduces are nodes of the ranks' programs.
    pub(super) fn has_collectives(&self, group: &[usize]) -> bool {
        let hosts = || group.iter().map(|&device| self.devices[device].host);
        let reaches = |a: Host, b: Host| match (a, b) {
            (Host::Client, Host::Client) => true,
            (Host::Server(a), Host::Server(b)) => a == b || self.peer(a, b).is_some(),
            _ => false,
        };
        group.iter().all(|&device| self.devices[device].collectives) && hosts().all(|a| hosts().all(|b| reaches(a, b)))
    }

    /// An all-reduce of `bytes` per rank, from the moment when the last rank has its part.
    ///
    /// Each rank sends its part to all others. With collective nodes, a server receives a part once for all of its ranks, and a
    /// large sum of three or more ranks is a reduce-scatter and an all-gather, of 1/n each. Copies are per rank, and each copied sum
    /// is also a run of its own.
    pub(super) fn all_reduce(&self, group: &[usize], bytes: f64) -> AllReduce {
        if !self.has_collectives(group) {
            let runs = group.iter().map(|&device| self.devices[device].run_time).fold(0.0, f64::max);
            let exchange = self.exchange(group, bytes, false);
            return AllReduce { time: runs + exchange.time, ..exchange };
        }
        if group.len() > 2 && bytes >= SCATTER_BYTES {
            let piece = self.exchange(group, bytes / group.len() as f64, true);
            AllReduce { time: 2.0 * piece.time, interfaces: piece.interfaces.iter().map(|busy| 2.0 * busy).collect() }
        } else {
            self.exchange(group, bytes, true)
        }
    }

    /// Every rank sends `bytes` to every other. What leaves a host follows one another through its network interface; the client
    /// sends on what goes through it in the order of arrival, after its own parts.
    fn exchange(&self, group: &[usize], bytes: f64, once_per_host: bool) -> AllReduce {
        let mut ranks_of = vec![0usize; self.servers.len() + 1];
        let mut hosts = Vec::new();
        for host in group.iter().map(|&device| self.devices[device].host) {
            ranks_of[host.index()] += 1;
            if !hosts.contains(&host) {
                hosts.push(host);
            }
        }
        let (mut time, mut interfaces, mut relayed) = (0.0f64, self.idle_interfaces(), Vec::new());
        for &from in &hosts {
            let senders = ranks_of[from.index()] as f64;
            if senders > 1.0 {
                time = time.max(self.within.round_trip / 2.0 + (senders - 1.0) * bytes / self.within.bandwidth);
            }
            for &to in hosts.iter().filter(|&&to| to != from) {
                let copies = senders * if once_per_host { 1.0 } else { ranks_of[to.index()] as f64 };
                let path = self.path(from, to);
                let interface = &mut interfaces[from.index()];
                *interface += copies * bytes / path.first.bandwidth;
                let arrival = *interface + path.first.round_trip / 2.0;
                match path.second {
                    None => time = time.max(arrival),
                    Some(second) => relayed.push((arrival, second, copies * bytes)),
                }
            }
        }
        relayed.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut client_free = interfaces[Host::Client.index()];
        for (arrival, link, bytes) in relayed {
            let sending = bytes / link.bandwidth;
            client_free = client_free.max(arrival) + sending;
            interfaces[Host::Client.index()] += sending;
            time = time.max(client_free + link.round_trip / 2.0);
        }
        AllReduce { time, interfaces }
    }

    /// By host, the client first: 0 seconds.
    pub(super) fn idle_interfaces(&self) -> Vec<f64> {
        vec![0.0; self.servers.len() + 1]
    }

    /// Adds the time of a copy to that for which the interfaces of hosts are busy sending.
    pub(super) fn add_copy(&self, interfaces: &mut [f64], from: Host, to: Host, bytes: f64) {
        if from != to {
            let path = self.path(from, to);
            interfaces[from.index()] += bytes / path.first.bandwidth;
            interfaces[Host::Client.index()] += path.second.map_or(0.0, |link| bytes / link.bandwidth);
        }
    }
}

fn check(of: &str, what: &'static str, value: f64, fits: impl Fn(f64) -> bool) -> Result<(), PlannerError> {
    if value.is_finite() && fits(value) {
        return Ok(());
    }
    Err(PlannerError::Value { of: of.to_owned(), what, value })
}
