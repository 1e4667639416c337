//! Tenants: limits per client, by its key or address, on connections, handshakes, queues, large buffers, threads of transfers,
//! device and host memory, and memory mappings, beside those of the process, so that one host cannot take the whole server.
//!
//! A tenant is a client's key, or else an IPv4 address, or an IPv6 network of 64 bits: a provider gives one subscriber such a
//! network, so a host could use 2^64 addresses of its own. A connection counts as a handshake of its address until HELLO is
//! complete, and then as a connection of its key or address. The list of keys may have limits of a key (`KeyLimits`), which replace those
//! that each tenant has, also while the key has sessions. The limits here do not apply to loopback, unless
//! `Config::loopback_tenants` is set: a proxy or a tunnel on this machine brings the clients of many hosts from one address.
//! For mappings, host memory, threads of transfers and turns on CPU devices, each session from loopback is a tenant of its own. The same
//! holds for transports without IP addresses.

use crate::poison::Unpoisoned;
use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::allowed_keys::{KeyLimits, ServerKeys};
use super::host_memory::TenantHostMemory;
use super::limits::Config;
use super::refused_clients::RefusedClients;
use super::thread_budget::ThreadBudget;
use crate::device::{DEFAULT_SHARE, DeviceKind, MemoryBudget};
use crate::rpc::transport::{KeyName, PeerAddr};

/// A tenant may have this part of a limit of the process that has no flag of its own per address: three further tenants always
/// fit.
const TENANT_SHARE: usize = 4;

/// A CPU device makes a mapping for each buffer above this size in bytes; smaller buffers share mappings (`cpu::memory`).
const MAX_SMALL_BUFFER: u64 = 256 << 10;

/// A counted resource. The number is the index of its row in [`Tenants::limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Resource {
    /// Sessions: connections whose HELLO is complete.
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

/// What a limit of a key is named in messages.
const OF_KEY: &str = "of the key in --allow-keys";

/// The counts of a server's clients, in total and by tenant.
pub(super) struct Tenants {
    limits: [ResourceLimit; RESOURCES],
    /// Whether addresses of loopback are tenants.
    with_loopback: bool,
    /// Device memory of a tenant in bytes. `None`: only that of the devices limits it.
    memory: Option<u64>,
    /// Limits of keys.
    keys: Option<ServerKeys>,
    /// Threads of transfers between servers.
    threads: Arc<ThreadBudget>,
    /// Clients that are refused for a time.
    pub(super) refused: RefusedClients,
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
    /// Host memory of all its sessions.
    host_memory: Arc<TenantHostMemory>,
}

impl TenantUse {
    /// Device memory and transfers may outlive the last connection, and work of a device that still runs may reserve more of
    /// it: a client that connects again must not get new budgets while anything holds the old ones. Each reservation holds its
    /// budget.
    fn is_unused(&self) -> bool {
        let is_held = Arc::strong_count(&self.memory) > 1 || Arc::strong_count(&self.host_memory) > 1;
        self.used == [0; RESOURCES] && !is_held && self.threads.is_unused()
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

    /// What the tenant is, for messages.
    fn noun(self) -> &'static str {
        match self {
            Tenant::Key(_) => "key",
            Tenant::Address(_) => "address",
        }
    }
}

/// A reservation that a limit has refused.
#[derive(Debug, Error)]
#[error("{subject} already {limit} {name}, {limit_name}")]
pub(super) struct LimitReached {
    subject: String,
    limit: usize,
    name: &'static str,
    limit_name: String,
    tenant: Option<Tenant>,
}

impl LimitReached {
    /// The tenant whose limit it is; `None`: the limit of the process.
    pub(super) fn tenant(&self) -> Option<Tenant> {
        self.tenant
    }
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
        let keys = config.keys.clone();
        let (refused, state) = (RefusedClients::default(), Mutex::default());
        Arc::new(Tenants { limits, with_loopback, memory, keys, threads, refused, state })
    }

    /// The limits of a tenant in the list of keys.
    fn key_limits(&self, tenant: Tenant) -> KeyLimits {
        match (&self.keys, tenant) {
            (Some(keys), Tenant::Key(name)) => keys.limits(name),
            _ => KeyLimits::default(),
        }
    }

    /// The limit of a tenant on a resource, and the name of the limit for messages.
    fn limit_of(&self, tenant: Tenant, resource: Resource) -> (usize, String) {
        let limit = &self.limits[resource as usize];
        let of_key = Some(tenant).filter(|_| resource == Resource::Connections);
        match (of_key.and_then(|tenant| self.key_limits(tenant).connections), limit.tenant_flag) {
            (Some(connections), _) => (connections, format!("the limit {OF_KEY} (connections=)")),
            (None, Some(flag)) => (limit.tenant, format!("the limit per {} ({flag})", tenant.noun())),
            (None, None) => (limit.tenant, format!("a quarter of the limit ({})", limit.flag)),
        }
    }

    /// Names the limit on the device memory of the tenant of `peer`, for messages.
    pub(super) fn name_of_memory_limit(&self, peer: PeerAddr) -> String {
        let tenant = self.tenant(peer);
        if tenant.is_some_and(|tenant| self.key_limits(tenant).memory.is_some()) {
            return format!("the limit {OF_KEY} (memory=)");
        }
        format!("the limit of the client's {} (--max-memory-per-address)", tenant.map_or("address", Tenant::noun))
    }

    /// Positions of the devices that the client at `peer` may use; `None`: all.
    pub(super) fn devices(&self, peer: PeerAddr) -> Option<Vec<u32>> {
        self.key_limits(self.tenant(peer)?).devices
    }

    /// Makes limits of keys that have changed hold for the sessions that there are. The limit of connections is looked up when
    /// it is used.
    pub(super) fn update_key_limits(&self) {
        let mut state = self.lock();
        for (tenant, entry) in &mut state.by_tenant {
            self.set_budget_limits(*tenant, &entry.memory);
        }
    }

    fn set_budget_limits(&self, tenant: Tenant, budget: &MemoryBudget) {
        let limits = self.key_limits(tenant);
        budget.set_limit(limits.memory.or(self.memory).unwrap_or(u64::MAX));
        budget.set_share(limits.share.unwrap_or(DEFAULT_SHARE));
    }

    /// How much of a resource all clients use.
    pub(super) fn used(&self, resource: Resource) -> usize {
        self.lock().used[resource as usize]
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
        let state = self.lock();
        let tenant = state.by_tenant.iter().find(|(_, entry)| entry.memory.is_same_tenant(budget));
        tenant.map(|(tenant, _)| tenant.identity())
    }

    /// For how long the client at `peer` is refused because of earlier faults; `None`: it is not.
    pub(super) fn refused_for(&self, peer: PeerAddr) -> Option<Duration> {
        let tenant = self.tenant(peer)?;
        self.refused.remaining(|| tenant.identity(), Instant::now())
    }

    /// Counts one `resource` of the client at `peer` until the permit is dropped.
    ///
    /// # Errors
    /// The limit of the process or of the client's tenant is reached.
    pub(super) fn reserve(self: &Arc<Self>, peer: PeerAddr, resource: Resource) -> Result<TenantPermit, LimitReached> {
        let (at, tenant) = (resource as usize, self.tenant(peer));
        let limit = &self.limits[at];
        let mut state = self.lock();
        // First the tenant's own limit: what it frees there is free in the process, too.
        self.count(&mut state, tenant, resource)?;
        if state.used[at] >= limit.process {
            Tenants::uncount(&mut state, tenant, resource);
            state.refused[at] += 1;
            return Err(LimitReached {
                subject: "there are".to_owned(),
                limit: limit.process,
                name: limit.name,
                limit_name: format!("the limit ({})", limit.flag),
                tenant: None,
            });
        }
        state.used[at] += 1;
        Ok(TenantPermit { tenants: Arc::clone(self), tenant, resource })
    }

    /// Counts one `resource` of a tenant, if it is one.
    ///
    /// # Errors
    /// The tenant's limit is reached.
    fn count(&self, state: &mut TenantsState, tenant: Option<Tenant>, resource: Resource) -> Result<(), LimitReached> {
        let Some(tenant) = tenant else { return Ok(()) };
        let at = resource as usize;
        let (limit, limit_name) = self.limit_of(tenant, resource);
        let used = &mut self.entry(state, tenant).used[at];
        if *used < limit {
            *used += 1;
            return Ok(());
        }
        state.refused[at] += 1;
        let subject = format!("its {} has", tenant.noun());
        Err(LimitReached { subject, limit, name: self.limits[at].name, limit_name, tenant: Some(tenant) })
    }

    /// Ends the count of one `resource` of a tenant.
    fn uncount(state: &mut TenantsState, tenant: Option<Tenant>, resource: Resource) {
        if let Some(tenant) = tenant
            && let Some(entry) = state.by_tenant.get_mut(&tenant)
        {
            entry.used[resource as usize] -= 1;
            if entry.is_unused() {
                state.by_tenant.remove(&tenant);
            }
        }
    }

    /// The limits as names and values, for the users of the client at `peer`: the use of all clients, and that of the clients
    /// of its key or address.
    pub(super) fn describe(&self, peer: PeerAddr) -> Vec<(String, String)> {
        let tenant = self.tenant(peer);
        let noun = tenant.map_or("address", Tenant::noun);
        let key_limits = tenant.map(|tenant| self.key_limits(tenant)).unwrap_or_default();
        let mut state = self.lock();
        let used = tenant.map(|tenant| self.entry(&mut state, tenant).used);
        let mut rows = Vec::new();
        for (at, limit) in self.limits.iter().enumerate() {
            rows.push((
                format!("{} ({})", limit.name, limit.flag),
                format!("{} of {}, {} refused since the start", state.used[at], limit.process, state.refused[at]),
            ));
            let of_key = key_limits.connections.filter(|_| at == Resource::Connections as usize);
            let flag = match of_key {
                Some(_) => "connections= in --allow-keys",
                None => limit.tenant_flag.unwrap_or("a quarter"),
            };
            let of_tenant = used.map_or("not counted, as of loopback".to_owned(), |used| {
                format!("{} of {}", used[at], of_key.unwrap_or(limit.tenant))
            });
            // Handshakes count for the address: a client has no key before its own is over.
            if at != Resource::Handshakes as usize || !matches!(tenant, Some(Tenant::Key(_))) {
                rows.push((format!("{} of this {noun} ({flag})", limit.name), of_tenant));
            }
        }
        let flag = key_limits.memory.map_or("--max-memory-per-address", |_| "memory= in --allow-keys");
        let memory = match (key_limits.memory.or(self.memory), tenant) {
            (None, _) => "that of the devices".to_owned(),
            (Some(_), None) => "not counted, as of loopback".to_owned(),
            (Some(limit), Some(tenant)) => {
                let used = self.entry(&mut state, tenant).memory.used();
                format!("{} of {} MiB", used >> 20, limit >> 20)
            }
        };
        rows.push((format!("device memory of this {noun} ({flag})"), memory));
        if let Some(share) = key_limits.share {
            let value = format!("{share}, of others {DEFAULT_SHARE}");
            rows.push(("share of the time of devices (share= in --allow-keys)".to_owned(), value));
        }
        let threads = "threads for transfers between servers";
        rows.push((format!("{threads} (--max-transfer-threads)"), self.threads.to_string()));
        let of_tenant = tenant.map_or("a quarter per client, as of loopback".to_owned(), |tenant| {
            self.entry(&mut state, tenant).threads.to_string()
        });
        rows.push((format!("{threads} of this {noun} (a quarter)"), of_tenant));
        rows
    }

    /// The keys with sessions: name, number of connections, and device memory in bytes.
    pub(super) fn keys_with_sessions(&self) -> Vec<(String, u32, u64)> {
        let state = self.lock();
        let described = state.by_tenant.iter().filter_map(|(tenant, entry)| {
            let (Tenant::Key(name), connections @ 1..) = (tenant, entry.used[Resource::Connections as usize]) else {
                return None;
            };
            Some((name.to_string(), u32::try_from(connections).unwrap_or(u32::MAX), entry.memory.used()))
        });
        described.collect()
    }

    /// The threads of transfers that a session of the client at `peer` may have: together with the other sessions of its
    /// tenant, a quarter of those of the process. Without a tenant, the session has a quarter of its own.
    pub(super) fn transfer_threads(&self, peer: PeerAddr) -> Arc<ThreadBudget> {
        match self.tenant(peer) {
            Some(tenant) => Arc::clone(&self.entry(&mut self.lock(), tenant).threads),
            None => ThreadBudget::quarter_of(&self.threads, "a session"),
        }
    }

    /// The host memory of the tenant of `peer`. Without a tenant, the session is one of its own.
    pub(super) fn host_memory(&self, peer: PeerAddr) -> Arc<TenantHostMemory> {
        match self.tenant(peer) {
            Some(tenant) => Arc::clone(&self.entry(&mut self.lock(), tenant).host_memory),
            None => TenantHostMemory::of_session(),
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
        let new = || {
            let memory = MemoryBudget::for_client(u64::MAX);
            self.set_budget_limits(tenant, &memory);
            let subject = match tenant {
                Tenant::Key(_) => "a key",
                Tenant::Address(_) => "an address",
            };
            let threads = ThreadBudget::quarter_of(&self.threads, subject);
            TenantUse { used: [0; RESOURCES], memory, threads, host_memory: TenantHostMemory::new() }
        };
        state.by_tenant.entry(tenant).or_insert_with(new)
    }

    fn lock(&self) -> MutexGuard<'_, TenantsState> {
        // Ignores poisoning: no code that can panic runs while the counts disagree.
        self.state.lock().unpoisoned()
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
        let mut state = self.tenants.lock();
        state.used[self.resource as usize] -= 1;
        Tenants::uncount(&mut state, self.tenant, self.resource);
    }
}

#[cfg(test)]
mod tests;
