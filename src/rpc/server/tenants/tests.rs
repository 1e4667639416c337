//! Tests of the limits per tenant.

use super::*;
use crate::poison::lock;
use crate::rpc::keys::{PublicKey, SecretKey};

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
    let connect = |ip| tenants.reserve(peer(ip), Connections);
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
        .with_max_transfer_threads(8);
    for (resource, process, tenant, process_flag, tenant_flag) in [
        (Connections, 8, 3, "(max-connections in --limits)", "(max-connections-per-address in --limits)"),
        (Handshakes, 8, 2, "(max-handshakes in --limits)", "a quarter of the limit (max-handshakes in --limits)"),
        (Queues, 8, 2, "(max-queues in --limits)", "a quarter of the limit (max-queues in --limits)"),
        (
            TransferThreads,
            8,
            2,
            "(max-transfer-threads in --limits)",
            "a quarter of the limit (max-transfer-threads in --limits)",
        ),
    ] {
        let tenants = Tenants::new(&config);
        let reserve = |ip| tenants.reserve(peer(ip), resource).map_err(|e| e.to_string());
        let mut permits: Vec<_> = (0..tenant).map(|_| reserve("10.0.0.5").unwrap()).collect();
        let refusal = reserve("10.0.0.5").err().unwrap();
        assert!(refusal.contains(&format!("its address has already {tenant} ")), "{refusal}");
        assert!(refusal.contains(tenant_flag), "{refusal}");
        permits.push(reserve("10.0.0.6").unwrap());
        // Loopback counts for the process only, or each session for itself.
        while tenants.used(resource) < process {
            permits.push(reserve("127.0.0.1").unwrap());
        }
        for ip in ["10.0.0.7", "127.0.0.1"] {
            let refusal = reserve(ip).err().unwrap();
            assert!(refusal.contains(&format!("there are already {process} ")), "{refusal}");
            assert!(refusal.contains(process_flag), "{refusal}");
        }
        assert_eq!(tenants.refusals[resource as usize].load(Ordering::Relaxed), 3);
        // A refusal has counted nothing, and a returned permit is available again.
        drop(permits.remove(0));
        permits.push(reserve("10.0.0.5").unwrap());
        drop(permits);
        assert_eq!(tenants.used(resource), 0);
        let _new = reserve("10.0.0.8").unwrap();
        assert_eq!(lock(&tenants.by_tenant).len(), 1, "unused entries go when a new tenant comes");
    }
}

#[test]
fn the_memory_of_a_tenant_is_counted_until_it_is_freed() {
    let tenants = Tenants::new(&Config::default().with_max_memory_per_address(Some(100)));
    let connect = |ip| tenants.reserve(peer(ip), Connections).unwrap();
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
    let sessions = [0, 1].map(|_| MemoryBudget::within(&unlimited, 100));
    let [first, second] = sessions.each_ref().map(|session| session.mappings().unwrap());
    assert!(unlimited.limit() == u64::MAX && Arc::ptr_eq(first, second));
    assert_eq!(first.limit(), process_mappings().limit() / 4);
}

/// As memory, which the device reserves for a running program, for example.
#[test]
fn a_budget_that_is_in_use_is_not_replaced() {
    let tenants = Tenants::new(&Config::default().with_max_memory_per_address(Some(100)));
    let connect = |ip| tenants.reserve(peer(ip), Connections).unwrap();
    let first = connect("10.0.0.5");
    let of_session = MemoryBudget::within(&tenants.memory_budget(peer("10.0.0.5")).unwrap(), 100);
    drop(first);
    drop(connect("10.0.0.6"));
    let held = of_session.reserve(70).unwrap();
    assert_eq!(tenants.memory_budget(peer("10.0.0.5")).unwrap().used(), 70);
    drop((held, of_session));
    let threads = tenants.budget(peer("10.0.0.5"), TransferThreads);
    drop(connect("10.0.0.6"));
    assert!(Arc::ptr_eq(&threads.budget, &tenants.budget(peer("10.0.0.5"), TransferThreads).budget));
    let mapping = tenants.memory_budget(peer("10.0.0.5")).unwrap().mappings().unwrap().reserve(1).unwrap();
    drop(threads);
    drop(connect("10.0.0.7"));
    assert_eq!(tenants.memory_budget(peer("10.0.0.5")).unwrap().mappings().unwrap().used(), 1);
    drop(mapping);
    drop(connect("10.0.0.8"));
    assert_eq!(lock(&tenants.by_tenant).len(), 1);
}

#[test]
fn the_sessions_of_an_address_share_a_quarter_of_the_transfer_threads() {
    let tenants = Tenants::new(&Config::default().with_max_transfer_threads(8));
    let session = |ip| tenants.budget(peer(ip), TransferThreads);
    let (a, b, other) = (session("10.0.0.5"), session("10.0.0.5"), session("10.0.0.6"));
    let permits = (a.reserve().unwrap(), b.reserve().unwrap());
    let refusal = DeviceError::from(a.reserve().unwrap_err()).to_string();
    assert!(refusal.contains("its address has already 2 threads for transfers"), "{refusal}");
    let others = (other.reserve().unwrap(), other.reserve().unwrap());
    // Each session of loopback has a quarter.
    let local: Vec<_> = (0..2).map(|_| session("127.0.0.1")).collect();
    let refusal = {
        let _held = [local[0].reserve().unwrap(), local[0].reserve().unwrap()];
        local[0].reserve().unwrap_err().to_string()
    };
    assert!(refusal.contains("its session has already 2 threads"), "{refusal}");
    let local: Vec<_> = local.iter().flat_map(|session| [session.reserve(), session.reserve()]).collect();
    assert!(local.iter().all(Result::is_ok));
    let refusal = session("127.0.0.1").reserve().unwrap_err().to_string();
    assert!(refusal.contains("there are already 8 threads"), "{refusal}");
    drop((permits, others, local));
    assert!(a.reserve().is_ok());
}

/// An entry that only memory kept goes when the next tenant comes.
#[test]
fn entries_of_tenants_without_connections_do_not_pile_up() {
    let tenants = Tenants::new(&Config::default().with_max_memory_per_address(Some(100)));
    for host in 0..200 {
        let at = peer(&format!("10.0.0.{host}"));
        let permit = tenants.reserve(at, Connections).unwrap();
        let held = tenants.memory_budget(at).unwrap().reserve(1).unwrap();
        drop(permit);
        drop(held);
        assert_eq!(lock(&tenants.by_tenant).len(), 1);
    }
}

/// A peer that has proved a key.
fn key_peer(ip: &str, name: &str) -> PeerAddr {
    let key: PublicKey = "ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo".parse().unwrap();
    PeerAddr::Key((ip.parse::<IpAddr>().unwrap(), 40_000).into(), KeyName::new(key, name))
}

/// A session counts for its key, and a handshake for its address.
#[test]
fn keys_have_connections_beside_those_of_their_address() {
    let tenants = Tenants::new(&Config::default().with_max_connections_per_address(2).with_max_connections(5));
    let connect = |peer| tenants.reserve(peer, Connections);
    let [alice, bob] = ["a", "b"].map(|name| key_peer("10.0.0.5", name));
    let _held = [peer("10.0.0.5"), alice, key_peer("10.0.0.9", "a"), bob].map(|peer| connect(peer).unwrap());
    let refusal = connect(alice).err().unwrap().to_string();
    assert_eq!(
        refusal,
        "its key has already 2 connections, the limit per key (max-connections-per-address in --limits)"
    );
    let by_tenant = lock(&tenants.by_tenant);
    let of = |peer| by_tenant[&Tenant::of(peer, false).unwrap()].counts[0].used();
    assert_eq!((tenants.used(Connections), of(peer("10.0.0.5")), of(alice), of(bob)), (4, 1, 2, 1));
}

#[test]
fn the_list_of_keys_limits_tenants_also_after_it_was_read_again() {
    let dir = tempfile::tempdir().unwrap();
    let (own, list) = (dir.path().join("key"), dir.path().join("list"));
    SecretKey::generate().unwrap().create_file(&own).unwrap();
    let client = SecretKey::generate().unwrap().public_key();
    let write = |rest: &str| std::fs::write(&list, format!("{client} a {rest}\n")).unwrap();
    write("memory=100 share=7");
    let keys = ServerKeys::read_files(&own, &list).unwrap();
    let config = Config::default().with_keys(Some(keys.clone())).with_max_memory_per_address(Some(50));
    let tenants = Tenants::new(&config);
    let at = |name| PeerAddr::Key((Ipv6Addr::LOCALHOST, 40_000).into(), KeyName::new(client, name));
    let budget = tenants.memory_budget(at("a")).unwrap();
    let session = MemoryBudget::within(&budget, 1000);
    assert_eq!((budget.limit(), session.share(), tenants.devices(at("a"))), (100, 7, None));
    for (rest, memory, share, devices, moved) in [
        ("memory=200", 200, DEFAULT_SHARE, None, false),
        ("share=1000", 50, 1000, None, false),
        ("devices=1,0", 50, DEFAULT_SHARE, Some(vec![1, 0]), true),
        ("devices=1,0 memory=1", 1, DEFAULT_SHARE, Some(vec![1, 0]), false),
        ("devices=0", 50, DEFAULT_SHARE, Some(vec![0]), true),
    ] {
        write(rest);
        assert_eq!(keys.reread(2).unwrap().contains(&client.into()), moved, "{rest}");
        tenants.update_key_limits();
        assert_eq!((budget.limit(), session.share(), tenants.devices(at("a"))), (memory, share, devices), "{rest}");
        assert!(Arc::ptr_eq(&budget, &tenants.memory_budget(at("a")).unwrap()));
    }
    write("devices=2");
    assert!(keys.reread(2).is_err());
    assert_eq!(tenants.devices(at("a")), Some(vec![0]), "the former list");
    std::fs::write(&list, "").unwrap();
    keys.reread(2).unwrap();
    assert_eq!(tenants.devices(at("a")), Some(Vec::new()), "a key that is not on the list");
    // Other clients belong to their addresses.
    assert_eq!(tenants.memory_budget(peer("10.0.0.5")).unwrap().limit(), 50);
}
