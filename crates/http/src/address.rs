//! Where a request comes from: the connection's peer, or what a proxy that we trust says.

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::HeaderMap;
use stampede_limit::network;

/// A network such as `10.0.0.0/8`, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    /// As IPv6; IPv4 is mapped.
    bits: u128,
    prefix: u32,
}

/// A text that is not a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotANetwork;

fn bits(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().to_bits(),
        IpAddr::V6(v6) => v6.to_bits(),
    }
}

const fn mask(prefix: u32) -> u128 {
    if prefix == 0 { 0 } else { u128::MAX << (128 - prefix) }
}

impl FromStr for Network {
    type Err = NotANetwork;

    fn from_str(text: &str) -> Result<Self, NotANetwork> {
        let (address, prefix) = text.split_once('/').map_or((text, None), |(address, prefix)| (address, Some(prefix)));
        let address: IpAddr = address.parse().map_err(|_| NotANetwork)?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(width), |prefix| prefix.parse::<u32>().map_err(|_| NotANetwork))?;
        if prefix > width {
            return Err(NotANetwork);
        }
        let prefix = prefix + 128 - width;
        Ok(Self { bits: bits(address) & mask(prefix), prefix })
    }
}

impl Network {
    fn has(&self, address: IpAddr) -> bool {
        bits(address) & mask(self.prefix) == self.bits
    }
}

/// Is it the address of a proxy that we trust?
pub(crate) fn is_trusted(address: IpAddr, trusted: &[Network]) -> bool {
    let address = address.to_canonical();
    trusted.iter().any(|network| network.has(address))
}

/// The address of the client: of the peer, unless that is a proxy that we trust; then what `X-Forwarded-For` says, read from its
/// end as far as trusted proxies have written it.
pub(crate) fn client(peer: IpAddr, headers: &HeaderMap, trusted: &[Network]) -> IpAddr {
    let is_trusted = |address| is_trusted(address, trusted);
    let mut client = peer.to_canonical();
    if !is_trusted(client) {
        return client;
    }
    // A client may have written anything in front of what our proxies added.
    let written = headers.get_all("x-forwarded-for").iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    let values: Vec<_> = written.collect();
    for hop in values.iter().flat_map(|value| value.split(',')).rev() {
        if !is_trusted(client) {
            break;
        }
        match hop.trim().parse::<IpAddr>() {
            Ok(address) => client = address.to_canonical(),
            Err(_) => break,
        }
    }
    client
}

/// Who has one IPv6 address has a whole /64 of them: that is what counts as one.
pub(crate) fn counted_as(address: IpAddr) -> IpAddr {
    network(address, 64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn seen(peer: &str, forwarded: &[&'static str], trusted: &[&str]) -> IpAddr {
        let trusted: Vec<Network> = trusted.iter().map(|text| text.parse().unwrap()).collect();
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append("x-forwarded-for", HeaderValue::from_static(value));
        }
        client(ip(peer), &headers, &trusted)
    }

    #[test]
    fn only_trusted_proxies_are_believed() {
        assert_eq!(seen("9.9.9.9", &["1.2.3.4"], &[]), ip("9.9.9.9"), "off by default");
        assert_eq!(seen("9.9.9.9", &["1.2.3.4"], &["10.0.0.0/8"]), ip("9.9.9.9"), "not one of ours");
        assert_eq!(seen("10.0.0.1", &["1.2.3.4"], &["10.0.0.0/8"]), ip("1.2.3.4"));
        assert_eq!(
            seen("10.0.0.1", &["6.6.6.6, 1.2.3.4"], &["10.0.0.0/8"]),
            ip("1.2.3.4"),
            "what the client wrote is not"
        );
        assert_eq!(seen("10.0.0.1", &["1.2.3.4", "10.0.0.2"], &["10.0.0.0/8"]), ip("1.2.3.4"), "two of ours");
        assert_eq!(seen("10.0.0.1", &["nonsense"], &["10.0.0.0/8"]), ip("10.0.0.1"));
        assert_eq!(seen("10.0.0.1", &[], &["10.0.0.0/8"]), ip("10.0.0.1"));
        assert_eq!(seen("::ffff:10.0.0.1", &["1.2.3.4"], &["10.0.0.0/8"]), ip("1.2.3.4"));
        assert_eq!(seen("fd00::1", &["2001:db8::1"], &["fd00::/8"]), ip("2001:db8::1"));
    }

    #[test]
    fn networks_are_read_strictly() {
        for bad in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/-1", "10.0.0.0/8/8", "localhost"] {
            assert_eq!(bad.parse::<Network>(), Err(NotANetwork), "{bad}");
        }
        assert!("0.0.0.0/0".parse::<Network>().unwrap().has(ip("1.2.3.4")));
        assert!(!"0.0.0.0/0".parse::<Network>().unwrap().has(ip("2001:db8::1")));
        assert!("1.2.3.4".parse::<Network>().unwrap().has(ip("1.2.3.4")));
        assert_eq!(counted_as(ip("2001:db8::1:2:3:4")), ip("2001:db8::"));
        assert_eq!(counted_as(ip("1.2.3.4")), ip("1.2.3.4"));
    }
}
