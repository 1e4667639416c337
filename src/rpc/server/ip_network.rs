//! An IP network, as in the lists of peers and of clients' addresses.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use thiserror::Error;

/// An IP network: all addresses whose first bits equal an address's. Its text is an address such as `10.0.0.5`, or an
/// address and a number of bits such as `10.0.0.0/24` or `fd00::/8`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IpNetwork {
    addr: IpAddr,
    bits: u32,
}

/// A text that is no [`IpNetwork`].
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("expected an address or a network such as 10.0.0.5, 10.0.0.0/24 or fd00::/8, got {0:?}")]
pub struct ParseNetworkError(String);

impl IpNetwork {
    /// The network of one address.
    pub fn single_address(addr: IpAddr) -> IpNetwork {
        let addr = addr.to_canonical();
        IpNetwork { addr, bits: address_bits(addr) }
    }

    /// The address with which the network was given.
    pub fn addr(&self) -> IpAddr {
        self.addr
    }

    /// Whether the network has one address only.
    pub fn is_single_address(&self) -> bool {
        self.bits == address_bits(self.addr)
    }

    /// Whether the network contains `addr`. An IPv4-mapped IPv6 address counts as its IPv4 address.
    pub fn contains(&self, addr: IpAddr) -> bool {
        match (self.addr, addr.to_canonical()) {
            (IpAddr::V4(a), IpAddr::V4(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.bits,
            (IpAddr::V6(a), IpAddr::V6(b)) => (a.to_bits() ^ b.to_bits()).leading_zeros() >= self.bits,
            _ => false,
        }
    }
}

fn address_bits(addr: IpAddr) -> u32 {
    if addr.is_ipv4() { 32 } else { 128 }
}

impl FromStr for IpNetwork {
    type Err = ParseNetworkError;

    fn from_str(text: &str) -> Result<IpNetwork, ParseNetworkError> {
        let parse = || {
            let Some((addr, bits)) = text.split_once('/') else {
                return Some(IpNetwork::single_address(text.parse().ok()?));
            };
            let addr: IpAddr = addr.parse().ok()?;
            let bits: u32 = bits.parse().ok().filter(|_| bits.bytes().all(|byte| byte.is_ascii_digit()))?;
            // An IPv4-mapped network would contain no address: `contains` compares IPv4 addresses as such.
            let (addr, bits) = match addr.to_canonical() {
                IpAddr::V4(v4) if addr.is_ipv6() => (v4.into(), bits.checked_sub(96)?),
                _ => (addr, bits),
            };
            (bits <= address_bits(addr)).then_some(IpNetwork { addr, bits })
        };
        parse().ok_or_else(|| ParseNetworkError(text.to_owned()))
    }
}

impl fmt::Display for IpNetwork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.addr.fmt(f)?;
        if self.is_single_address() { Ok(()) } else { write!(f, "/{}", self.bits) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_network_is_an_address_and_a_number_of_bits() {
        for (text, shown) in [
            ("10.0.0.5", "10.0.0.5"),
            ("10.0.0.5/32", "10.0.0.5"),
            ("10.0.0.0/24", "10.0.0.0/24"),
            ("0.0.0.0/0", "0.0.0.0/0"),
            ("::1", "::1"),
            ("fd00::/8", "fd00::/8"),
            ("::ffff:10.0.0.5", "10.0.0.5"),
            ("::ffff:10.0.0.0/120", "10.0.0.0/24"),
        ] {
            let network: IpNetwork = text.parse().unwrap();
            assert_eq!(network.to_string(), shown, "{text}");
            assert_eq!(network.to_string().parse(), Ok(network), "{text}");
        }
        for text in [
            "",
            "a",
            "10.0.0.0/",
            "10.0.0.0/33",
            "10.0.0.0/+8",
            "10.0.0/8",
            "[::1]",
            "::/129",
            "::ffff:1.2.3.4/95",
            "1/2/3",
        ] {
            assert_eq!(text.parse::<IpNetwork>(), Err(ParseNetworkError(text.to_owned())));
        }
    }

    #[test]
    fn a_mapped_address_is_its_ipv4_address() {
        for (network, address, want) in [
            ("10.0.0.0/24", "10.0.0.255", true),
            ("10.0.0.77/24", "10.0.0.1", true),
            ("10.0.0.0/24", "10.0.1.0", false),
            ("10.0.0.0/24", "::ffff:10.0.0.9", true),
            ("::ffff:10.0.0.0/120", "10.0.0.9", true),
            ("10.0.0.0/24", "::a00:9", false),
            ("0.0.0.0/0", "1.2.3.4", true),
            ("0.0.0.0/0", "::1", false),
            ("::/0", "1.2.3.4", false),
            ("fd00::/8", "fdff::1", true),
            ("127.0.0.2", "127.0.0.3", false),
        ] {
            let contains = network.parse::<IpNetwork>().unwrap().contains(address.parse().unwrap());
            assert_eq!(contains, want, "{network}, {address}");
        }
    }
}
