//! Tenants: limits per client address on connections, handshakes, queues, large buffers, threads of transfers, device memory
//! and its mappings, beside those of the process, so that one host cannot take the whole server.
//!
//! A tenant is a client's key (its connections and handshakes count for the address, since they begin before it has proved the
//! key), or else an IPv4 address, or an IPv6 network of 64 bits: a provider gives one subscriber such a network, so a host could
//! use 2^64 addresses of its own. The limits here do not apply to loopback, unless `Config::loopback_tenants` is set: a proxy
//! or a tunnel on this machine brings the clients of many hosts from one address. For mappings, threads of transfers and turns
//! on CPU devices, each session from loopback is a tenant of its own. The same holds for transports without IP addresses.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use thiserror::Error;

use super::limits::Config;
use super::thread_budget::ThreadBudget;
use crate::device::{DeviceKind, MemoryBudget};
use crate::rpc::transport::{KeyName, PeerAddr};

/// A tenant may have this part of a limit of the process that has no flag of its own per address: three further tenants always
/// fit.
const TENANT_SHARE: usize = 4;

/// A CPU device makes a mapping for each buffer above this size in bytes; smaller buffers share mappings (`cpu::memory`).
const MAX_SMALL_BUFFER: u64 = 256 << 10;

/// A counted resource. The number is the index of its row in [`Tenants::limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    Connections,
    /// Connections whose HELLO is not complete. They cost a client nothing but a packet.
    Handshakes,
    /// Queues of the extension.
    Queues,
    /// Buffers with a mapping of their own.
    LargeBuffers,
}

/// Number of [`Resource`]s.
const RESOURCES: usize = 4;

impl Resource {
    /// The resource that a buffer of `bytes` bytes on a device of `kind` takes, if any.
    pub(super) fn of_buffer(kind: DeviceKind, bytes: u64) -> Option<Resource> {
        (kind == DeviceKind::Cpu && bytes > MAX_SMALL_BUFFER).then_some(Resource::LargeBuffers)
    }
}

/// The limit of one [`Resource`].
#[derive(Clone, Copy)]
struct ResourceLimit {
    /// Its name in messages.
    name: &'static str,
    process: usize,
    flag: &'static str,
    tenant: usize,
    /// The flag of the limit per tenant; `None`: it is a quarter of the other one.
    tenant_flag: Option<&'static str>,
}

impl ResourceLimit {
    /// Names the limit of the process, or that of each tenant, for messages.
    fn name_of(&self, by_tenant: bool) -> String {
        match (by_tenant, self.tenant_flag) {
            (false, _) => format!("the limit ({})", self.flag),
            (true, Some(flag)) => format!("the limit per address ({flag})"),
            (true, None) => format!("a quarter of the limit ({})", self.flag),
        }
    }
}

/// The counts of a server's clients, in total and by tenant.
pub(super) struct Tenants {
    limits: [ResourceLimit; RESOURCES],
    /// Whether addresses of loopback are tenants.
    with_loopback: bool,
    /// Device memory of a tenant in bytes. `None`: only that of the devices limits it.
    memory: Option<u64>,
    /// Threads of transfers between servers.
    threads: Arc<ThreadBudget>,
    state: Mutex<TenantsState>,
}

#[derive(Default)]
struct TenantsState {
    used: [usize; RESOURCES],
    /// Number of refused reservations.
    refused: [u64; RESOURCES],
    /// One entry for each tenant with a connection, device memory or transfers, so there are never more than the limits of
    /// these allow.
    by_tenant: HashMap<Tenant, TenantUse>,
}

/// The use of one tenant.
struct TenantUse {
    used: [usize; RESOURCES],
    /// Contains the budgets of its sessions, whose memory mappings it counts together.
    memory: Arc<MemoryBudget>,
    /// Threads of transfers of all its sessions.
    threads: Arc<ThreadBudget>,
}

impl TenantUse {
    /// Device memory and transfers may outlive the last connection, and work of a device that still runs may reserve more of
    /// it: a client that connects again must not get new budgets while anything holds the old ones. Each reservation holds its
    /// budget.
    fn is_unused(&self) -> bool {
        self.used == [0; RESOURCES] && Arc::strong_count(&self.memory) == 1 && self.threads.is_unused()
    }
}

/// A client as far as limits tell clients apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Tenant {
    /// By its key.
    Key(KeyName),
    /// By its address: IPv4, or the first 64 bits of IPv6.
    Address(IpAddr),
}

impl Tenant {
    /// The tenant of a client; `None`: exempt from limits per tenant, as loopback is without `with_loopback`.
    pub(super) fn of(peer: PeerAddr, with_loopback: bool) -> Option<Tenant> {
        if let PeerAddr::Key(_, name) = peer {
            return Some(Tenant::Key(name));
        }
        // An IPv6 listener gets IPv4 clients as ::ffff:a.b.c.d, all within one network of 64 bits.
        let tenant = match peer.ip()?.to_canonical() {
            ip if ip.is_loopback() && !with_loopback => return None,
            IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
            ip => ip,
        };
        Some(Tenant::Address(tenant))
    }
}

/// A reservation that a limit has refused.
#[derive(Debug, Error)]
#[error("{} already {limit} {name}, {}", if *.by_tenant { "its address has" } else { "there are" }, .flag)]
pub(super) struct LimitReached {
    limit: usize,
    name: &'static str,
    by_tenant: bool,
    /// Names the limit.
    flag: String,
}

impl Tenants {
    pub(super) fn new(config: &Config) -> Arc<Tenants> {
        let limits = [
            ResourceLimit {
                name: "connections",
                process: config.max_connections,
                flag: "--max-connections",
                tenant: config.max_connections_per_address,
                tenant_flag: Some("--max-connections-per-address"),
            },
            ResourceLimit {
                name: "handshakes in flight",
                process: config.max_handshakes,
                flag: "--max-handshakes",
                tenant: config.max_handshakes.div_ceil(TENANT_SHARE),
                tenant_flag: None,
            },
            ResourceLimit {
                name: "queues",
                process: config.max_queues,
                flag: "--max-queues",
                tenant: config.max_queues.div_ceil(TENANT_SHARE),
                tenant_flag: None,
            },
            ResourceLimit {
                name: "buffers above 256 KiB on CPU devices",
                process: config.max_large_buffers,
                flag: "--max-large-buffers",
                tenant: config.max_large_buffers.div_ceil(TENANT_SHARE),
                tenant_flag: None,
            },
        ];
        let threads = ThreadBudget::new(config.max_transfer_threads);
        let (with_loopback, memory) = (config.loopback_tenants, config.max_memory_per_address);
        Arc::new(Tenants { limits, with_loopback, memory, threads, state: Mutex::default() })
    }

    fn tenant(&self, peer: PeerAddr) -> Option<Tenant> {
        Tenant::of(peer, self.with_loopback)
    }

    /// A text that tells the clients of one tenant from all others, also after a restart. It has a client's key, whatever its
    /// name is. All clients that are no tenants count as one.
    pub(super) fn identity(&self, peer: PeerAddr) -> String {
        match self.tenant(peer) {
            Some(Tenant::Key(name)) => format!("key {}", name.key()),
            Some(Tenant::Address(address)) => format!("address {address}"),
            None => "loopback".to_owned(),
        }
    }

    /// Counts one `resource` of the client at `peer` until the permit is dropped.
    ///
    /// # Errors
    /// The limit of the process or of the client's tenant is reached.
    pub(super) fn reserve(self: &Arc<Self>, peer: PeerAddr, resource: Resource) -> Result<TenantPermit, LimitReached> {
        let (at, tenant) = (resource as usize, self.tenant(peer));
        let limit = &self.limits[at];
        let mut state = self.lock();
        let refusal = if state.used[at] >= limit.process {
            Some((limit.process, false))
        } else if tenant.is_some_and(|tenant| self.entry(&mut state, tenant).used[at] >= limit.tenant) {
            Some((limit.tenant, true))
        } else {
            None
        };
        if let Some((number, by_tenant)) = refusal {
            state.refused[at] += 1;
            return Err(LimitReached { limit: number, name: limit.name, by_tenant, flag: limit.name_of(by_tenant) });
        }
        state.used[at] += 1;
        if let Some(tenant) = tenant {
            self.entry(&mut state, tenant).used[at] += 1;
        }
        Ok(TenantPermit { tenants: Arc::clone(self), tenant, resource })
    }

    /// The limits as names and values, for the users of the client at `peer`: the use of all clients, and that of the clients
    /// of its address.
    pub(super) fn describe(&self, peer: PeerAddr) -> Vec<(String, String)> {
        let tenant = self.tenant(peer);
        let mut state = self.lock();
        let used = tenant.map(|tenant| self.entry(&mut state, tenant).used);
        let mut rows = Vec::new();
        for (at, limit) in self.limits.iter().enumerate() {
            rows.push((
                format!("{} ({})", limit.name, limit.flag),
                format!("{} of {}, {} refused since the start", state.used[at], limit.process, state.refused[at]),
            ));
            let flag = limit.tenant_flag.map_or_else(|| "a quarter".to_owned(), str::to_owned);
            let of_tenant = used
                .map_or("not counted, as of loopback".to_owned(), |used| format!("{} of {}", used[at], limit.tenant));
            rows.push((format!("{} of this address ({flag})", limit.name), of_tenant));
        }
        let memory = match (self.memory, tenant) {
            (None, _) => "that of the devices".to_owned(),
            (Some(_), None) => "not counted, as of loopback".to_owned(),
            (Some(limit), Some(tenant)) => {
                let used = self.entry(&mut state, tenant).memory.used();
                format!("{} of {} MiB", used >> 20, limit >> 20)
            }
        };
        rows.push(("device memory of this address (--max-memory-per-address)".to_owned(), memory));
        let threads = "threads for transfers between servers";
        rows.push((format!("{threads} (--max-transfer-threads)"), self.threads.to_string()));
        let of_tenant = tenant.map_or("a quarter per client, as of loopback".to_owned(), |tenant| {
            self.entry(&mut state, tenant).threads.to_string()
        });
        rows.push((format!("{threads} of this address (a quarter)"), of_tenant));
        rows
    }

    /// The threads of transfers that a session of the client at `peer` may have: together with the other sessions of its
    /// tenant, a quarter of those of the process. Without a tenant, the session has a quarter of its own.
    pub(super) fn transfer_threads(&self, peer: PeerAddr) -> Arc<ThreadBudget> {
        match self.tenant(peer) {
            Some(tenant) => Arc::clone(&self.entry(&mut self.lock(), tenant).threads),
            None => ThreadBudget::quarter_of(&self.threads, "a session"),
        }
    }

    /// The device memory of the tenant of `peer`, within which the budgets of its sessions lie. `None`: no tenant.
    pub(super) fn memory_budget(&self, peer: PeerAddr) -> Option<Arc<MemoryBudget>> {
        let tenant = self.tenant(peer)?;
        Some(Arc::clone(&self.entry(&mut self.lock(), tenant).memory))
    }

    /// The entry of a tenant; inserted if there is none. Before an insertion, the entries of tenants without connections and
    /// without memory are removed, so that the map does not grow.
    fn entry<'a>(&self, state: &'a mut TenantsState, tenant: Tenant) -> &'a mut TenantUse {
        if !state.by_tenant.contains_key(&tenant) {
            state.by_tenant.retain(|_, other| !other.is_unused());
        }
        let limit = self.memory.unwrap_or(u64::MAX);
        let new = || TenantUse {
            used: [0; RESOURCES],
            memory: MemoryBudget::for_client(limit),
            threads: ThreadBudget::quarter_of(&self.threads, "an address"),
        };
        state.by_tenant.entry(tenant).or_insert_with(new)
    }

    fn lock(&self) -> MutexGuard<'_, TenantsState> {
        // Ignores poisoning: no code that can panic runs while the counts disagree.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One reserved [`Resource`]; returned when dropped.
pub(super) struct TenantPermit {
    tenants: Arc<Tenants>,
    tenant: Option<Tenant>,
    resource: Resource,
}

impl Drop for TenantPermit {
    fn drop(&mut self) {
        let at = self.resource as usize;
        let mut state = self.tenants.lock();
        state.used[at] -= 1;
        if let Some(tenant) = self.tenant
            && let Some(entry) = state.by_tenant.get_mut(&tenant)
        {
            entry.used[at] -= 1;
            if entry.is_unused() {
                state.by_tenant.remove(&tenant);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(ip: &str) -> PeerAddr {
        PeerAddr::Ip((ip.parse::<IpAddr>().unwrap(), 40_000).into())
    }

    #[test]
    fn addresses_of_one_host_are_one_tenant_and_loopback_is_none() {
        let tenant = |ip| Tenant::of(peer(ip), false);
        for (a, b, same) in [
            ("10.0.0.5", "10.0.0.5", true),
            ("10.0.0.5", "10.0.0.6", false),
            ("10.0.0.5", "::ffff:10.0.0.5", true),
            ("::ffff:10.0.0.5", "::ffff:10.0.0.6", false),
            ("fd00:1:2:3::1", "fd00:1:2:3:ffff:ffff:ffff:ffff", true),
            ("fd00:1:2:3::1", "fd00:1:2:4::1", false),
        ] {
            assert_eq!(tenant(a) == tenant(b), same, "{a}, {b}");
            assert!(tenant(a).is_some() && tenant(b).is_some(), "{a}, {b}");
        }
        for exempt in ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"] {
            assert_eq!(tenant(exempt), None, "{exempt}");
        }
        assert_eq!(Tenant::of(PeerAddr::Local(7), false), None);
    }

    #[test]
    fn addresses_of_loopback_are_tenants_if_that_is_set() {
        let config = Config::default().with_loopback_tenants(true).with_max_memory_per_address(Some(100));
        let tenants = Tenants::new(&config.with_max_connections_per_address(1));
        let connect = |ip| tenants.reserve(peer(ip), Resource::Connections);
        let _held = ["127.0.0.2", "127.0.0.3", "::1", "10.0.0.5"].map(|ip| connect(ip).unwrap());
        // The address of an IPv4 client of an IPv6 listener is the same one.
        for ip in ["127.0.0.2", "::ffff:127.0.0.3", "::1"] {
            assert!(connect(ip).is_err(), "{ip}");
        }
        let budget = |ip| tenants.memory_budget(peer(ip)).unwrap();
        assert!(Arc::ptr_eq(&budget("127.0.0.2"), &budget("::ffff:127.0.0.2")));
        assert!(!Arc::ptr_eq(&budget("127.0.0.2"), &budget("127.0.0.3")));
        assert!(tenants.memory_budget(PeerAddr::Local(7)).is_none());
    }

    #[test]
    fn each_resource_has_a_limit_of_the_process_and_one_of_each_tenant() {
        let config = Config::default()
            .with_max_connections(8)
            .with_max_connections_per_address(3)
            .with_max_handshakes(8)
            .with_max_queues(8)
            .with_max_large_buffers(8);
        for (resource, process, tenant, process_flag, tenant_flag) in [
            (Resource::Connections, 8, 3, "(--max-connections)", "(--max-connections-per-address)"),
            (Resource::Handshakes, 8, 2, "(--max-handshakes)", "a quarter of the limit (--max-handshakes)"),
            (Resource::Queues, 8, 2, "(--max-queues)", "a quarter of the limit (--max-queues)"),
            (Resource::LargeBuffers, 8, 2, "(--max-large-buffers)", "a quarter of the limit (--max-large-buffers)"),
        ] {
            let tenants = Tenants::new(&config);
            let reserve = |ip| tenants.reserve(peer(ip), resource).map_err(|e| e.to_string());
            let mut permits: Vec<_> = (0..tenant).map(|_| reserve("10.0.0.5").unwrap()).collect();
            let refusal = reserve("10.0.0.5").err().unwrap();
            assert!(refusal.contains(&format!("its address has already {tenant} ")), "{refusal}");
            assert!(refusal.contains(tenant_flag), "{refusal}");
            permits.push(reserve("10.0.0.6").unwrap());
            // Loopback counts for the process only.
            while tenants.lock().used[resource as usize] < process {
                permits.push(reserve("127.0.0.1").unwrap());
            }
            for ip in ["10.0.0.7", "127.0.0.1"] {
                let refusal = reserve(ip).err().unwrap();
                assert!(refusal.contains(&format!("there are already {process} ")), "{refusal}");
                assert!(refusal.contains(process_flag), "{refusal}");
            }
            assert_eq!(tenants.lock().refused[resource as usize], 3);
            // A refusal has counted nothing, and a returned permit is available again.
            drop(permits.remove(0));
            permits.push(reserve("10.0.0.5").unwrap());
            drop(permits);
            let state = tenants.lock();
            assert_eq!((state.used, state.by_tenant.len()), ([0; RESOURCES], 0));
        }
    }

    #[test]
    fn large_buffers_of_cpu_devices_are_counted() {
        for (kind, bytes, want) in [
            (DeviceKind::Cpu, 256 << 10, None),
            (DeviceKind::Cpu, (256 << 10) + 1, Some(Resource::LargeBuffers)),
            (DeviceKind::Gpu, 1 << 30, None),
        ] {
            assert_eq!(Resource::of_buffer(kind, bytes), want, "{bytes} bytes");
        }
    }

    #[test]
    fn the_memory_of_a_tenant_is_counted_until_it_is_freed() {
        let tenants = Tenants::new(&Config::default().with_max_memory_per_address(Some(100)));
        let connect = |ip| tenants.reserve(peer(ip), Resource::Connections).unwrap();
        let used = |ip| tenants.memory_budget(peer(ip)).unwrap().used();
        let first = connect("10.0.0.5");
        let held = tenants.memory_budget(peer("10.0.0.5")).unwrap().reserve(70).unwrap();
        drop(first);
        // The memory outlives the last connection, also when other tenants come and go.
        drop(connect("10.0.0.6"));
        let _second = connect("10.0.0.5");
        assert_eq!((used("10.0.0.5"), used("10.0.0.6")), (70, 0));
        drop(held);
        drop(_second);
        assert_eq!(used("10.0.0.5"), 0);
        for exempt in ["127.0.0.1", "::1"] {
            assert!(tenants.memory_budget(peer(exempt)).is_none(), "{exempt}");
        }
        // Without a limit in bytes, the budget counts the memory mappings of the tenant's sessions.
        let unlimited = Tenants::new(&Config::default()).memory_budget(peer("10.0.0.5")).unwrap();
        assert!(unlimited.limit() == u64::MAX && unlimited.client().is_some());
    }

    /// As memory, which the device reserves for a running program, for example.
    #[test]
    fn a_budget_that_is_in_use_is_not_replaced() {
        let tenants = Tenants::new(&Config::default().with_max_memory_per_address(Some(100)));
        let connect = |ip| tenants.reserve(peer(ip), Resource::Connections).unwrap();
        let first = connect("10.0.0.5");
        let of_session = MemoryBudget::within(&tenants.memory_budget(peer("10.0.0.5")).unwrap(), 100);
        drop(first);
        drop(connect("10.0.0.6"));
        let held = of_session.reserve(70).unwrap();
        assert_eq!(tenants.memory_budget(peer("10.0.0.5")).unwrap().used(), 70);
        drop((held, of_session));
        let threads = tenants.transfer_threads(peer("10.0.0.5"));
        drop(connect("10.0.0.6"));
        assert!(Arc::ptr_eq(&threads, &tenants.transfer_threads(peer("10.0.0.5"))));
        drop(threads);
        drop(connect("10.0.0.6"));
        assert_eq!(tenants.lock().by_tenant.len(), 0);
    }

    #[test]
    fn the_sessions_of_an_address_share_a_quarter_of_the_transfer_threads() {
        let tenants = Tenants::new(&Config::default().with_max_transfer_threads(8));
        let session = |ip| tenants.transfer_threads(peer(ip));
        let (a, b, other) = (session("10.0.0.5"), session("10.0.0.5"), session("10.0.0.6"));
        let permits = (a.reserve().unwrap(), b.reserve().unwrap());
        let refusal = a.reserve().unwrap_err().to_string();
        assert!(refusal.contains("an address may have 2 threads"), "{refusal}");
        let others = (other.reserve().unwrap(), other.reserve().unwrap());
        // Each session of loopback has a quarter.
        let local: Vec<_> = (0..2).map(|_| session("127.0.0.1")).collect();
        let local: Vec<_> = local.iter().flat_map(|session| [session.reserve(), session.reserve()]).collect();
        assert!(local.iter().all(Result::is_ok));
        let refusal = session("127.0.0.1").reserve().unwrap_err().to_string();
        assert!(refusal.contains("the server may have 8 threads"), "{refusal}");
        drop((permits, others, local));
        assert!(a.reserve().is_ok());
    }

    /// An entry that only memory kept goes when the next tenant comes.
    #[test]
    fn entries_of_tenants_without_connections_do_not_pile_up() {
        let tenants = Tenants::new(&Config::default().with_max_memory_per_address(Some(100)));
        for host in 0..200 {
            let at = peer(&format!("10.0.0.{host}"));
            let permit = tenants.reserve(at, Resource::Connections).unwrap();
            let held = tenants.memory_budget(at).unwrap().reserve(1).unwrap();
            drop(permit);
            drop(held);
            assert_eq!(tenants.lock().by_tenant.len(), 1);
        }
    }
}
