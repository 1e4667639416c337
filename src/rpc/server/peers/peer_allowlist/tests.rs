//! Entries of the list, and the addresses that they permit.

use super::*;

#[test]
fn peer_parses_hosts_and_networks() {
    for (text, want) in [
        ("10.0.0.5", Some("10.0.0.5:50052")),
        ("10.0.0.5:50053", Some("10.0.0.5:50053")),
        ("10.0.0.5:*", Some("10.0.0.5:*")),
        ("10.0.0.0/24", Some("10.0.0.0/24:50052")),
        ("10.0.0.0/24:7", Some("10.0.0.0/24:7")),
        ("0.0.0.0/0:*", Some("0.0.0.0/0:*")),
        ("::1", Some("[::1]:50052")),
        ("[::1]", Some("[::1]:50052")),
        ("[fd00::5]:50053", Some("[fd00::5]:50053")),
        ("fd00::/8", Some("fd00::/8:50052")),
        ("fd00::/8:*", Some("fd00::/8:*")),
        ("::ffff:10.0.0.5", Some("10.0.0.5:50052")),
        ("gpu-2", Some("gpu-2:50052")),
        ("gpu-2.lan:50053", Some("gpu-2.lan:50053")),
        ("gpu-2.lan:*", Some("gpu-2.lan:*")),
        ("", None),
        (":50052", None),
        ("gpu-2:", None),
        ("gpu-2:0", None),
        ("gpu-2:65536", None),
        ("gpu-2:+7", None),
        ("gpu-2:**", None),
        ("*", None),
        ("10.0.0.0/24:0", None),
        ("gpu 2", None),
        ("10.0.0.0/33", None),
        ("10.0.0.0/+8", None),
        ("10.0.0.0/", None),
        ("gpu-2/24", None),
        ("[10.0.0.5]:1", None),
        ("a:b:1", None),
    ] {
        assert_eq!(text.parse::<Peer>().ok().map(|peer| peer.to_string()).as_deref(), want, "{text:?}");
    }
}

#[test]
fn address_is_permitted_if_a_peer_contains_it() {
    let list = |peers: &[&str]| {
        let peers: Vec<Peer> = peers.iter().map(|peer| peer.parse().unwrap()).collect();
        PeerAllowlist::resolve(&peers, None).unwrap()
    };
    for (peers, address, want) in [
        (&["10.0.0.0/24:*"][..], "10.0.0.255:1", true),
        (&["10.0.0.77/24:*"], "10.0.0.1:1", true),
        (&["10.0.0.0/24:*"], "10.0.1.0:1", false),
        (&["10.0.0.0/24:*"], "[::ffff:10.0.0.9]:1", true),
        (&["10.0.0.0/24:*"], "[::a00:9]:1", false),
        (&["0.0.0.0/0:*"], "1.2.3.4:1", true),
        (&["0.0.0.0/0:*"], "[::1]:1", false),
        (&["fd00::/8:*"], "[fdff::1]:1", true),
        (&["10.0.0.0/24:7"], "10.0.0.9:7", true),
        (&["10.0.0.0/24:7"], "10.0.0.9:8", false),
        // Without a port, it is the default one: a host on the list is not open to a scan of its ports.
        (&["10.0.0.5"], "10.0.0.5:50052", true),
        (&["10.0.0.5"], "10.0.0.5:22", false),
        (&["10.0.0.5"], "10.0.0.5:51052", false),
        (&["10.0.0.0/24"], "10.0.0.5:50052", true),
        (&["10.0.0.0/24"], "10.0.0.5:22", false),
        (&["localhost"], "localhost:50052", true),
        (&["localhost"], "localhost:22", false),
        (&["localhost"], "127.0.0.1:22", false),
        (&["10.0.0.5:7"], "10.0.0.5:7", true),
        (&["10.0.0.5:7"], "10.0.0.5:8", false),
        (&["10.0.0.5:7", "10.0.0.5:8"], "10.0.0.5:8", true),
        (&["localhost:7"], "127.0.0.1:7", true),
        (&["localhost:7"], "LocalHost:7", true),
        (&["127.0.0.0/8:*", "::1"], "localhost:7", false),
        (&["10.0.0.5"], "127.0.0.1:7", false),
        (&["10.0.0.5"], "10.0.0.5", false),
        (&["10.0.0.5"], "10.0.0.5:0", false),
        (&["10.0.0.5"], "", false),
        (&["0.0.0.0/0:*"], "10.0.0.5\n:7", false),
        (&["0.0.0.0/0:*"], "\u{fffd}:7", false),
    ] {
        assert_eq!(list(peers).permitted(address, Purpose::Transfers).is_ok(), want, "{peers:?}: {address}");
    }
    let long = "a".repeat(1000) + ":1";
    assert!(
        list(&["10.0.0.5"]).permitted(&long, Purpose::Transfers).is_err() && displayable_address(&long).len() < 100
    );
    assert!(list(&[]).permitted("127.0.0.1:1", Purpose::Transfers).unwrap_err().contains("--peer"));
}

#[test]
fn collectives_use_the_port_above_that_of_the_server() {
    for (peer, port, want) in [
        ("10.0.0.5", 50052, true),
        ("10.0.0.5", 51052, true),
        ("10.0.0.5", 52052, false),
        ("10.0.0.5", 22, false),
        ("10.0.0.0/24:60000", 61000, true),
        ("10.0.0.5:65000", 464, false),
        ("10.0.0.5:*", 22, true),
    ] {
        let list = PeerAllowlist::resolve(&[peer.parse().unwrap()], None).unwrap();
        let permitted = list.permitted(&format!("10.0.0.5:{port}"), Purpose::Collectives);
        assert_eq!(permitted.is_ok(), want, "{peer}: {port}");
    }
}

/// A client could otherwise learn which names exist, send bytes to a name server of its own, and rebind a name.
#[test]
fn names_are_resolved_at_the_start_only() {
    let mut asked = Vec::new();
    let peers = ["gpu-2:7".parse().unwrap(), "10.0.0.0/24:7".parse().unwrap()];
    let list = PeerAllowlist::resolve_by(&peers, |name| {
        asked.push(name.to_owned());
        Ok(["10.9.9.9:1", "[fd00::5]:1"].map(|addr| Address::Tcp(addr.parse().unwrap())).to_vec())
    });
    let list = list.unwrap();
    let permitted = |address| list.permitted(address, Purpose::Transfers);
    let at = |addr: &str| Address::Tcp(addr.parse().unwrap());
    assert_eq!(permitted("gpu-2:7"), Ok(vec![at("10.9.9.9:7"), at("[fd00::5]:7")]));
    assert_eq!(permitted("10.9.9.9:7"), Ok(vec![at("10.9.9.9:7")]));
    for unlisted in ["gpu-3:7", "gpu-2.lan:7", "localhost:7", "10.9.9.8:7", "gpu-2:8"] {
        assert!(permitted(unlisted).unwrap_err().contains("none of its --peer flags names it"), "{unlisted}");
    }
    assert_eq!(asked, ["gpu-2:7"]);
}

#[test]
fn host_of_an_incoming_connection_is_permitted_on_any_port() {
    let list = |peer: &str| PeerAllowlist::resolve(&[peer.parse().unwrap()], None).unwrap();
    for (peer, host, want) in [
        ("10.0.0.5:7", "10.0.0.5", true),
        ("10.0.0.5:7", "10.0.0.6", false),
        ("10.0.0.0/24", "::ffff:10.0.0.9", true),
        ("localhost", "127.0.0.1", true),
        ("memory:7", "127.0.0.1", false),
    ] {
        assert_eq!(list(peer).permits_incoming(host.parse().unwrap()), want, "{peer}: {host}");
    }
    assert!(!PeerAllowlist::default().permits_incoming("127.0.0.1".parse().unwrap()));
}

/// An address of a transport without IP addresses matches only a peer with the same name, and no network.
#[test]
fn non_ip_address_is_permitted_by_exact_name_only() {
    let targets = |peer: &str| {
        let peers = [peer.parse::<Peer>().unwrap()];
        PeerAllowlist::resolve(&peers, None).unwrap().permitted("memory:7", Purpose::Transfers)
    };
    assert_eq!(targets("memory:7"), Ok(vec![Address::Memory(7)]));
    for peer in ["memory:8", "0.0.0.0/0:*", "::/0:*"] {
        assert!(targets(peer).unwrap_err().contains("none of its --peer flags names it"), "{peer}");
    }
}
