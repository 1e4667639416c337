//! Tenants: budgets per client, by its key or address, of connections, handshakes, queues, threads of transfers, device and host
//! memory, and memory mappings, within the limits of the process, so that one host cannot take the whole server.
//!
//! A tenant is a client's key, or else an IPv4 address, or an IPv6 network of 64 bits: a provider gives one subscriber such a
//! network, so a host could use 2^64 addresses of its own. A connection counts as a handshake of its address until HELLO is
//! complete, and then as a connection of its key or address. The list of keys may have limits of a key (`KeyLimits`), which replace those
//! that each tenant has, also while the key has sessions. The limits here do not apply to loopback, unless
//! `Config::loopback_tenants` is set: a proxy or a tunnel on this machine brings the clients of many hosts from one address.
//! For mappings, host memory, threads of transfers and turns on CPU devices, each session from loopback is a tenant of its own. The same
//! holds for transports without IP addresses.

use crate::poison::lock;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::allowed_keys::{KeyLimits, ServerKeys};
use super::limits::Config;
use super::refused_clients::RefusedClients;
use crate::device::{Budget, BudgetRefusal, DEFAULT_SHARE, DeviceError, MemoryBudget, Reservation, process_mappings};
use crate::rpc::status::KeyStatus;
use crate::rpc::transport::{KeyName, PeerAddr};

/// A tenant may have this part of a limit of the process that has no flag of its own per address: three further tenants always
/// fit.
const TENANT_SHARE: u64 = 4;

/// A counted resource. The number is the index of its row in [`ROWS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    /// Sessions: connections whose HELLO is complete.
    Connections,
    /// Connections whose HELLO is not complete. They cost a client nothing but a packet.
    Handshakes,
    /// Queues of the extension.
    Queues,
    /// Threads of transfers between servers. A thread is reserved before it is started: the standard library aborts the
    /// process if a new thread finds no memory for its signal stack, so that the number of threads must never depend on what
    /// clients send.
    TransferThreads,
}

use Resource::{Connections, Handshakes, Queues, TransferThreads};

/// Number of [`Resource`]s.
const RESOURCES: usize = 4;

/// The resources with their names in messages and the names of their limits in the file of `--limits`.
const ROWS: [(Resource, &str, &str); RESOURCES] = [
    (Connections, "connections", "max-connections"),
    (Handshakes, "handshakes in flight", "max-handshakes"),
    (Queues, "queues", "max-queues"),
    (TransferThreads, "threads for transfers between servers", "max-transfer-threads"),
];

/// How messages name a limit of a key.
const OF_KEY: &str = "of the key in --allow-keys";

/// The budgets of a server's clients, in total and by tenant.
pub(super) struct Tenants {
    /// The budgets of the process, by [`Resource`].
    process: [Arc<Budget>; RESOURCES],
    /// Number of refused reservations.
    refusals: [AtomicU64; RESOURCES],
    max_connections_per_address: u64,
    /// Host memory of the process.
    pub(super) host_memory: Arc<Budget>,
    /// Whether addresses of loopback are tenants.
    with_loopback: bool,
    /// Device memory of a tenant in bytes. `None`: only that of the devices limits it.
    memory: Option<u64>,
    /// Limits of keys.
    keys: Option<ServerKeys>,
    /// Clients that are refused for a time.
    pub(super) refused: RefusedClients,
    /// One entry for each tenant with a connection, device memory or transfers, so there are never more than the limits of
    /// these allow, and entries that the next new tenant removes.
    by_tenant: Mutex<HashMap<Tenant, TenantBudgets>>,
}

/// The budgets of one tenant.
struct TenantBudgets {
    /// Within the budgets of the process, by [`Resource`].
    counts: [Arc<Budget>; RESOURCES],
    /// Contains the budgets of its sessions, whose memory mappings it counts together.
    memory: Arc<MemoryBudget>,
    /// Host memory of all its sessions.
    host_memory: Arc<Budget>,
}

impl TenantBudgets {
    /// Device memory and transfers may outlive the last connection, and work of a device that still runs may reserve more of
    /// it: a client that connects again must not get new budgets while anything holds the old ones. Each reservation holds its
    /// budget.
    fn is_unused(&self) -> bool {
        let are_counts_unused = self.counts.iter().all(|budget| Arc::strong_count(budget) == 1);
        are_counts_unused && self.memory.is_unused() && Arc::strong_count(&self.host_memory) == 1
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

impl Tenant {
    /// The address of a client, whether or not it is exempt from limits. `None`: a transport without IP addresses.
    pub(super) fn address(peer: PeerAddr) -> Option<Tenant> {
        Tenant::of(PeerAddr::Ip(SocketAddr::new(peer.ip()?, 0)), true)
    }

    /// A text that tells the tenant from all others, also after a restart. That of a key is the key, whatever its name is.
    fn identity(self) -> String {
        match self {
            Tenant::Key(name) => name.identity().to_string(),
            Tenant::Address(address) => format!("address {address}"),
        }
    }

    /// The kind of the tenant, for messages.
    fn noun(self) -> &'static str {
        match self {
            Tenant::Key(_) => "key",
            Tenant::Address(_) => "address",
        }
    }
}

/// The budget of a [`Resource`] for one client.
pub(super) struct ClientBudget {
    tenants: Arc<Tenants>,
    tenant: Option<Tenant>,
    resource: Resource,
    budget: Arc<Budget>,
}

impl ClientBudget {
    /// Counts one until the reservation is dropped.
    ///
    /// # Errors
    /// The limit of the process or of the client is reached.
    pub(super) fn reserve(&self) -> Result<Reservation, LimitReached> {
        let refused = |refusal| self.tenants.limit_reached(self.tenant, self.resource, refusal);
        self.budget.reserve(1).map_err(refused)
    }
}

/// A reservation that a limit has refused.
#[derive(Debug, Error)]
#[error("{text}")]
pub(super) struct LimitReached {
    text: String,
    /// The tenant whose limit it is; `None`: the limit of the process.
    pub(super) tenant: Option<Tenant>,
}

impl From<LimitReached> for DeviceError {
    fn from(limit: LimitReached) -> DeviceError {
        DeviceError::Exhausted { resource: "threads", reason: limit.text }
    }
}

impl Tenants {
    pub(super) fn new(config: &Config) -> Arc<Tenants> {
        let process = ROWS.map(|(resource, ..)| {
            Budget::new(match resource {
                Connections => config.max_connections,
                Handshakes => config.max_handshakes,
                Queues => config.max_queues,
                TransferThreads => config.max_transfer_threads,
            } as u64)
        });
        Arc::new(Tenants {
            process,
            refusals: Default::default(),
            max_connections_per_address: config.max_connections_per_address as u64,
            host_memory: Budget::new(config.max_host_memory),
            with_loopback: config.loopback_tenants,
            memory: config.max_memory_per_address,
            keys: config.keys.clone(),
            refused: RefusedClients::default(),
            by_tenant: Mutex::default(),
        })
    }

    /// The limits of a tenant in the list of keys.
    fn key_limits(&self, tenant: Tenant) -> KeyLimits {
        match (&self.keys, tenant) {
            (Some(keys), Tenant::Key(name)) => keys.limits(name),
            _ => KeyLimits::default(),
        }
    }

    /// The limit of a tenant on a resource.
    fn limit_of(&self, resource: Resource, of_key: &KeyLimits) -> u64 {
        match (resource, of_key.connections) {
            (Connections, Some(connections)) => connections as u64,
            (Connections, None) => self.max_connections_per_address,
            _ => self.process[resource as usize].limit().div_ceil(TENANT_SHARE),
        }
    }

    /// Counts and describes the refusal of a reservation of one `resource` for a client of `tenant`.
    fn limit_reached(&self, tenant: Option<Tenant>, resource: Resource, refusal: BudgetRefusal) -> LimitReached {
        self.refusals[resource as usize].fetch_add(1, Ordering::Relaxed);
        let (limit, (_, name, limit_name)) = (refusal.limit, ROWS[resource as usize]);
        let owner = tenant.map(Tenant::noun).or((resource == TransferThreads).then_some("session"));
        let Some(owner) = owner.filter(|_| !refusal.is_parents) else {
            return LimitReached {
                text: format!("there are already {limit} {name}, the limit ({limit_name} in --limits)"),
                tenant: None,
            };
        };
        let which = match resource {
            Connections if tenant.is_some_and(|tenant| self.key_limits(tenant).connections.is_some()) => {
                format!("the limit {OF_KEY} (connections=)")
            }
            Connections => format!("the limit per {owner} (max-connections-per-address in --limits)"),
            _ => format!("a quarter of the limit ({limit_name} in --limits)"),
        };
        LimitReached { text: format!("its {owner} has already {limit} {name}, {which}"), tenant }
    }

    /// Names the limit on the device memory of the tenant of `peer`, for messages.
    pub(super) fn name_of_memory_limit(&self, peer: PeerAddr) -> String {
        let tenant = self.tenant(peer);
        if tenant.is_some_and(|tenant| self.key_limits(tenant).memory.is_some()) {
            return format!("the limit {OF_KEY} (memory=)");
        }
        format!(
            "the limit of the client's {} (max-memory-per-address in --limits)",
            tenant.map_or("address", Tenant::noun)
        )
    }

    /// Positions of the devices that the client at `peer` may use; `None`: all.
    pub(super) fn devices(&self, peer: PeerAddr) -> Option<Vec<u32>> {
        self.key_limits(self.tenant(peer)?).devices
    }

    /// Makes limits of keys that have changed hold for the sessions that there are.
    pub(super) fn update_key_limits(&self) {
        for (tenant, budgets) in &*lock(&self.by_tenant) {
            self.set_limits(*tenant, budgets);
        }
    }

    fn set_limits(&self, tenant: Tenant, budgets: &TenantBudgets) {
        let of_key = self.key_limits(tenant);
        for (resource, ..) in ROWS {
            budgets.counts[resource as usize].set_limit(self.limit_of(resource, &of_key));
        }
        budgets.memory.set_limit(of_key.memory.or(self.memory).unwrap_or(u64::MAX));
        budgets.memory.set_share(of_key.share.unwrap_or(DEFAULT_SHARE));
    }

    /// How much of a resource all clients use.
    pub(super) fn used(&self, resource: Resource) -> u64 {
        self.process[resource as usize].used()
    }

    fn tenant(&self, peer: PeerAddr) -> Option<Tenant> {
        Tenant::of(peer, self.with_loopback)
    }

    /// A text that tells the clients of one tenant from all others, also after a restart. It has a client's key, whatever its
    /// name is. All clients that are no tenants count as one.
    pub(super) fn identity(&self, peer: PeerAddr) -> String {
        self.tenant(peer).map_or_else(|| "loopback".to_owned(), Tenant::identity)
    }

    /// [`Tenants::identity`] of the clients of the tenant in whose budget this one lies; `None`: it is of no tenant.
    pub(super) fn identity_of_budget(&self, budget: &MemoryBudget) -> Option<String> {
        let by_tenant = lock(&self.by_tenant);
        let tenant = by_tenant.iter().find(|(_, budgets)| budgets.memory.is_same_tenant(budget));
        tenant.map(|(tenant, _)| tenant.identity())
    }

    /// For how long the client at `peer` is refused because of earlier faults; `None`: it is not.
    pub(super) fn refused_for(&self, peer: PeerAddr) -> Option<Duration> {
        let tenant = self.tenant(peer)?;
        self.refused.remaining(|| tenant.identity(), Instant::now())
    }

    /// Counts one `resource` of the client at `peer` until the reservation is dropped.
    ///
    /// # Errors
    /// The limit of the process or of the client's tenant is reached.
    pub(super) fn reserve(self: &Arc<Self>, peer: PeerAddr, resource: Resource) -> Result<Reservation, LimitReached> {
        self.budget(peer, resource).reserve()
    }

    /// The budget from which the client at `peer` reserves a resource: that of its tenant. Without a tenant, only the limit of
    /// the process holds, except for threads: each such session has a quarter of them.
    pub(super) fn budget(self: &Arc<Self>, peer: PeerAddr, resource: Resource) -> ClientBudget {
        let (tenant, process) = (self.tenant(peer), &self.process[resource as usize]);
        let budget = match tenant {
            Some(tenant) => Arc::clone(&self.entry(&mut lock(&self.by_tenant), tenant).counts[resource as usize]),
            None if resource == TransferThreads => Budget::within(process, process.limit().div_ceil(TENANT_SHARE)),
            None => Arc::clone(process),
        };
        ClientBudget { tenants: Arc::clone(self), tenant, resource, budget }
    }

    /// The limits as names and values, for the users of the client at `peer`: the use of all clients, and that of the clients
    /// of its key or address.
    pub(super) fn describe(&self, peer: PeerAddr) -> Vec<(String, String)> {
        let tenant = self.tenant(peer);
        let noun = tenant.map_or("address", Tenant::noun);
        let of_key = tenant.map(|tenant| self.key_limits(tenant)).unwrap_or_default();
        let mut by_tenant = lock(&self.by_tenant);
        let own = tenant.map(|tenant| &*self.entry(&mut by_tenant, tenant));
        let of_limit = |budget: &Budget| format!("{} of {}", budget.used(), budget.limit());
        let mut rows = Vec::new();
        for (resource, name, limit_name) in ROWS {
            let (at, exempt) = (resource as usize, "not counted, as of loopback");
            let refused = self.refusals[at].load(Ordering::Relaxed);
            let of_all = format!("{}, {refused} refused since the start", of_limit(&self.process[at]));
            rows.push((format!("{name} ({limit_name})"), of_all));
            let (limit_name, exempt) = match resource {
                // These count for the address: a client has no key before its own handshake is over.
                Handshakes if matches!(tenant, Some(Tenant::Key(_))) => continue,
                Connections if of_key.connections.is_some() => ("connections= in --allow-keys", exempt),
                Connections => ("max-connections-per-address", exempt),
                TransferThreads => ("a quarter", "a quarter per client, as of loopback"),
                _ => ("a quarter", exempt),
            };
            let of_tenant = own.map_or(exempt.to_owned(), |own| of_limit(&own.counts[at]));
            rows.push((format!("{name} of this {noun} ({limit_name})"), of_tenant));
        }
        let mappings = process_mappings();
        rows.push(("memory mappings of CPU devices".to_owned(), of_limit(mappings)));
        if let Some(mappings) = own.and_then(|own| own.memory.mappings()) {
            rows.push((format!("memory mappings of this {noun} (a quarter)"), of_limit(mappings)));
        }
        let limit_name = of_key.memory.map_or("max-memory-per-address", |_| "memory= in --allow-keys");
        let memory = match (of_key.memory.or(self.memory), own) {
            (None, _) => "that of the devices".to_owned(),
            (Some(_), None) => "not counted, as of loopback".to_owned(),
            (Some(limit), Some(own)) => format!("{} of {} MiB", own.memory.used() >> 20, limit >> 20),
        };
        rows.push((format!("device memory of this {noun} ({limit_name})"), memory));
        if let Some(share) = of_key.share {
            let value = format!("{share}, of others {DEFAULT_SHARE}");
            rows.push(("share of the time of devices (share= in --allow-keys)".to_owned(), value));
        }
        rows
    }

    /// The keys with sessions.
    pub(super) fn keys_with_sessions(&self) -> Vec<KeyStatus> {
        let by_tenant = lock(&self.by_tenant);
        let described = by_tenant.iter().filter_map(|(tenant, budgets)| {
            let connections = budgets.counts[Connections as usize].used();
            let (Tenant::Key(name), 1..) = (tenant, connections) else { return None };
            let sessions = u32::try_from(connections).unwrap_or(u32::MAX);
            Some(KeyStatus { name: name.to_string(), sessions, memory: budgets.memory.used() })
        });
        described.collect()
    }

    /// The host memory of the tenant of `peer`. `None`: no tenant.
    pub(super) fn host_memory_budget(&self, peer: PeerAddr) -> Option<Arc<Budget>> {
        let tenant = self.tenant(peer)?;
        Some(Arc::clone(&self.entry(&mut lock(&self.by_tenant), tenant).host_memory))
    }

    /// The device memory of the tenant of `peer`, within which the budgets of its sessions lie. `None`: no tenant.
    pub(super) fn memory_budget(&self, peer: PeerAddr) -> Option<Arc<MemoryBudget>> {
        let tenant = self.tenant(peer)?;
        Some(Arc::clone(&self.entry(&mut lock(&self.by_tenant), tenant).memory))
    }

    /// The budgets of a tenant; inserted if there are none. Before an insertion, those that nothing uses are removed, so that
    /// the map does not grow.
    fn entry<'a>(&self, by_tenant: &'a mut HashMap<Tenant, TenantBudgets>, tenant: Tenant) -> &'a mut TenantBudgets {
        if !by_tenant.contains_key(&tenant) {
            by_tenant.retain(|_, other| !other.is_unused());
        }
        by_tenant.entry(tenant).or_insert_with(|| {
            let counts = ROWS.map(|(resource, ..)| Budget::within(&self.process[resource as usize], 0));
            let (memory, host_memory) = (MemoryBudget::for_client(0), Budget::within(&self.host_memory, u64::MAX));
            let budgets = TenantBudgets { counts, memory, host_memory };
            self.set_limits(tenant, &budgets);
            budgets
        })
    }
}

#[cfg(test)]
mod tests;
