//! The text of a list of keys: a line `KEY NAME [revoked] [memory=SIZE] [devices=LIST] [connections=N] [share=N]` for each key.

use std::collections::{HashMap, HashSet};

use crate::rpc::keys::Identity;
use crate::rpc::transport::KeyName;
use crate::rpc::transport::tls::Verdict;
use crate::size::parse_nonzero_bytes;

/// Longest name of a key: names stand in each line of the log about their clients.
const MAX_NAME: usize = 64;

/// Most devices that a line may name.
const MAX_DEVICES: usize = 256;

/// Largest share of the time of a device.
const MAX_SHARE: u32 = 1000;

const EXPECTED: &str =
    "expected a key, a name, and any of `revoked`, `memory=SIZE`, `devices=LIST`, `connections=N` and `share=N`";

const UNENDED: &str = "the last line has no end, so the list may have been cut off: end it by a line end";

/// The limits of a key, in addition to the server's. `None`: the limit of every tenant, all devices, or the default share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::rpc::server) struct KeyLimits {
    /// Device memory of all its sessions, in bytes.
    pub(in crate::rpc::server) memory: Option<u64>,
    pub(in crate::rpc::server) connections: Option<usize>,
    /// Positions of the devices that it may use, in the order in which its clients see them. `None`: all.
    pub(in crate::rpc::server) devices: Option<Vec<u32>>,
    /// Weight in the turns on a device that several tenants use. `None`: that of a tenant without a line.
    pub(in crate::rpc::server) share: Option<u32>,
}

/// A key of the list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ListEntry {
    pub(super) verdict: Verdict,
    pub(super) limits: KeyLimits,
    /// The number of its line, from 1.
    pub(super) line: usize,
}

/// The keys of a list, or the number of the first wrong line and what is wrong with it. Empty lines and those that begin with
/// `#` do not count. The last line must end, too: a list that is cut in the middle of a line could lack the `revoked` of its key.
pub(super) fn parse_list(text: &str) -> Result<HashMap<Identity, ListEntry>, (usize, String)> {
    let (mut keys, mut names) = (HashMap::new(), HashSet::new());
    for (number, line) in (1..).zip(text.split_inclusive('\n')) {
        let has_end = line.ends_with('\n');
        let line = line.trim();
        if !line.is_empty() && !line.starts_with('#') {
            let (key, name, entry) = parse_line(line, number).map_err(|reason| (number, reason))?;
            if !names.insert(name) {
                return Err((number, format!("the name {name} stands in an earlier line too")));
            }
            if keys.insert(key, entry).is_some() {
                return Err((number, "the key stands in an earlier line too".to_owned()));
            }
        }
        if !has_end {
            return Err((number, UNENDED.to_owned()));
        }
    }
    Ok(keys)
}

fn parse_line(text: &str, line: usize) -> Result<(Identity, &str, ListEntry), String> {
    let mut words = text.split_ascii_whitespace();
    let (Some(key), Some(name)) = (words.next(), words.next()) else { return Err(EXPECTED.to_owned()) };
    let key: Identity = key.parse().map_err(|e| format!("{e}"))?;
    if name.len() > MAX_NAME || !name.chars().all(|c| c.is_ascii_graphic()) {
        return Err(format!("a name has at most {MAX_NAME} printable characters of ASCII, and no spaces"));
    }
    let (mut limits, mut is_revoked, mut seen) = (KeyLimits::default(), false, HashSet::new());
    for word in words {
        let (option, value) = word.split_once('=').map_or((word, None), |(option, value)| (option, Some(value)));
        match (option, value) {
            ("revoked", None) => is_revoked = true,
            ("memory", Some(value)) => {
                limits.memory = Some(parse_nonzero_bytes(value).map_err(|e| format!("memory: {e}"))?);
            }
            ("connections", Some(value)) => limits.connections = Some(parse_count(option, value, u32::MAX)? as usize),
            ("share", Some(value)) => limits.share = Some(parse_count(option, value, MAX_SHARE)?),
            ("devices", Some(value)) => limits.devices = Some(parse_devices(value)?),
            _ => return Err(format!("{word:?}: {EXPECTED}")),
        }
        if !seen.insert(option) {
            return Err(format!("`{option}` stands twice in the line"));
        }
    }
    let verdict = if is_revoked { Verdict::Revoked } else { Verdict::Allowed(KeyName::new(key.clone(), name)) };
    Ok((key, name, ListEntry { verdict, limits, line }))
}

/// A number of decimal digits alone: `parse` would accept a sign.
fn parse_digits(text: &str) -> Option<u32> {
    text.parse().ok().filter(|_| text.bytes().all(|byte| byte.is_ascii_digit()))
}

fn parse_count(option: &str, text: &str, max: u32) -> Result<u32, String> {
    let count = parse_digits(text).filter(|count| (1..=max).contains(count));
    count.ok_or_else(|| format!("{option}: expected a number from 1 to {max}, got {text:?}"))
}

/// Positions of devices, such as `0,2`.
fn parse_devices(text: &str) -> Result<Vec<u32>, String> {
    let mut devices = Vec::new();
    for word in text.split(',') {
        let device = parse_digits(word)
            .ok_or_else(|| format!("devices: expected positions of devices such as 0,2, got {text:?}"))?;
        if devices.contains(&device) {
            return Err(format!("devices: {device} stands twice in {text:?}"));
        }
        if devices.len() == MAX_DEVICES {
            return Err(format!("devices: more than {MAX_DEVICES} of them"));
        }
        devices.push(device);
    }
    Ok(devices)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEYS: [&str; 2] =
        ["ed25519:11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo", "ed25519:PUAXw-hDiVqStwqnTRt-vJyYLM8uxJaMwM1V8Sr0Zgw"];

    fn key(number: usize) -> Identity {
        KEYS[number].parse().unwrap()
    }

    fn allowed(name: &str) -> Verdict {
        Verdict::Allowed(KeyName::new(key(0), name))
    }

    #[test]
    fn a_list_has_a_key_in_each_line() {
        let text = format!("# ours\n\n{} alice\n  {} bob revoked\ncert:GPU-2.test gpu-2\n", KEYS[0], KEYS[1]);
        let keys = parse_list(&text).unwrap();
        let certificate: Identity = "cert:gpu-2.test".parse().unwrap();
        assert_eq!(
            keys.get(&certificate).map(|entry| entry.verdict),
            Some(Verdict::Allowed(KeyName::new(certificate.clone(), "gpu-2")))
        );
        let found = |number| keys.get(&key(number)).map(|entry| (entry.verdict, entry.line));
        assert_eq!(found(0), Some((allowed("alice"), 3)));
        assert_eq!(found(1), Some((Verdict::Revoked, 4)));
        for (text, line) in [
            (format!("\n{}", KEYS[0]), 2),
            (format!("{} a b", KEYS[0]), 1),
            (format!("{} a\n{} b", KEYS[0], KEYS[1]), 2),
            (format!("{} a\r\n# end", KEYS[0]), 2),
            ("ed25519:AAAA alice".to_owned(), 1),
            ("cert:*.test alice".to_owned(), 1),
            ("cert:a.test a\ncert:A.test b\n".to_owned(), 2),
            (format!("{} {}", KEYS[0], "n".repeat(65)), 1),
            (format!("{} a\n{} a", KEYS[0], KEYS[1]), 2),
            (format!("{} a\n{} b", KEYS[0], KEYS[0]), 2),
            (format!("# a\n{} a share=0", KEYS[0]), 2),
        ] {
            assert_eq!(parse_list(&text).map_err(|(line, _)| line), Err(line), "{text}");
        }
    }

    #[test]
    fn the_limits_of_a_key_follow_its_name_in_any_order() {
        let of = |memory, devices: Option<&[u32]>, connections, share| KeyLimits {
            memory,
            devices: devices.map(<[u32]>::to_vec),
            connections,
            share,
        };
        let none = of(None, None, None, None);
        for (rest, verdict, limits) in [
            ("", allowed("a"), none.clone()),
            ("revoked", Verdict::Revoked, none),
            ("memory=4G", allowed("a"), of(Some(4 << 30), None, None, None)),
            ("share=1000 devices=2,0", allowed("a"), of(None, Some(&[2, 0]), None, Some(1000))),
            ("connections=1 revoked share=1", Verdict::Revoked, of(None, None, Some(1), Some(1))),
            ("devices=0\tconnections=8  share=50 memory=1", allowed("a"), of(Some(1), Some(&[0]), Some(8), Some(50))),
        ] {
            let keys = parse_list(&format!("{} a {rest}\n", KEYS[0])).unwrap();
            assert_eq!(keys.get(&key(0)), Some(&ListEntry { verdict, limits, line: 1 }), "{rest}");
        }
        for (rest, reason) in [
            ("memory", "expected a key"),
            ("memory=", "memory: expected a size"),
            ("memory=0", "more than 0 bytes"),
            ("memory=1X", "memory: expected a size"),
            ("memory=1 memory=1", "`memory` stands twice"),
            ("revoked revoked", "`revoked` stands twice"),
            ("revoked=1", "expected a key"),
            ("Memory=1", "expected a key"),
            ("devices=", "positions of devices"),
            ("devices=0,", "positions of devices"),
            ("devices=0,0", "0 stands twice"),
            ("devices=+1", "positions of devices"),
            ("devices=CPU", "positions of devices"),
            ("devices=4294967296", "positions of devices"),
            ("connections=0", "a number from 1"),
            ("connections=-1", "a number from 1"),
            ("connections=x", "a number from 1"),
            ("share=0", "from 1 to 1000"),
            ("share=1001", "from 1 to 1000"),
            ("share=1.5", "from 1 to 1000"),
            ("share=+5", "from 1 to 1000"),
            ("=1", "expected a key"),
        ] {
            let (line, got) = parse_list(&format!("{} a {rest}\n", KEYS[0])).unwrap_err();
            assert!(line == 1 && got.contains(reason), "{rest}: {got}");
        }
    }
}
