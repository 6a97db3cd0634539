//! Where a request comes from: the peer of the connection, or the client that a trusted proxy reports.

use std::net::IpAddr;
use std::str::FromStr;

use axum::http::HeaderMap;
use ipnet::{AddrParseError, IpNet};

/// A network such as `10.0.0.0/8`, or a single address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network(IpNet);

impl FromStr for Network {
    type Err = AddrParseError;

    fn from_str(text: &str) -> Result<Self, AddrParseError> {
        text.parse().or_else(|error| text.parse::<IpAddr>().map(IpNet::from).map_err(|_| error)).map(Self)
    }
}

/// Whether an address belongs to a trusted proxy.
pub(crate) fn is_trusted(address: IpAddr, trusted: &[Network]) -> bool {
    let address = address.to_canonical();
    trusted.iter().any(|Network(network)| network.contains(&address))
}

/// The address of the client: the peer, unless that is a trusted proxy; then the last address in `X-Forwarded-For` that is not a
/// trusted proxy's.
pub(crate) fn client(peer: IpAddr, headers: &HeaderMap, trusted: &[Network]) -> IpAddr {
    let is_trusted = |address| is_trusted(address, trusted);
    let mut client = peer.to_canonical();
    if !is_trusted(client) {
        return client;
    }
    // Read from the end: a client may have sent the header with any content, and proxies append to it.
    let values = headers.get_all("x-forwarded-for").iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    let values: Vec<_> = values.collect();
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

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn client_of(peer: &str, forwarded: &[&'static str], trusted: &[&str]) -> IpAddr {
        let trusted: Vec<Network> = trusted.iter().map(|text| text.parse().unwrap()).collect();
        let mut headers = HeaderMap::new();
        for value in forwarded {
            headers.append("x-forwarded-for", HeaderValue::from_static(value));
        }
        client(ip(peer), &headers, &trusted)
    }

    #[test]
    fn forwarded_addresses_are_read_only_from_trusted_proxies() {
        assert_eq!(client_of("9.9.9.9", &["1.2.3.4"], &[]), ip("9.9.9.9"), "no proxy is trusted by default");
        assert_eq!(client_of("9.9.9.9", &["1.2.3.4"], &["10.0.0.0/8"]), ip("9.9.9.9"), "not a trusted proxy");
        assert_eq!(client_of("10.0.0.1", &["1.2.3.4"], &["10.0.0.0/8"]), ip("1.2.3.4"));
        assert_eq!(
            client_of("10.0.0.1", &["6.6.6.6, 1.2.3.4"], &["10.0.0.0/8"]),
            ip("1.2.3.4"),
            "what the client sent is ignored"
        );
        assert_eq!(
            client_of("10.0.0.1", &["1.2.3.4", "10.0.0.2"], &["10.0.0.0/8"]),
            ip("1.2.3.4"),
            "two trusted proxies"
        );
        assert_eq!(client_of("10.0.0.1", &["nonsense"], &["10.0.0.0/8"]), ip("10.0.0.1"));
        assert_eq!(client_of("10.0.0.1", &[], &["10.0.0.0/8"]), ip("10.0.0.1"));
        assert_eq!(client_of("::ffff:10.0.0.1", &["1.2.3.4"], &["10.0.0.0/8"]), ip("1.2.3.4"));
        assert_eq!(client_of("fd00::1", &["2001:db8::1"], &["fd00::/8"]), ip("2001:db8::1"));
    }

    #[test]
    fn malformed_networks_are_rejected() {
        for bad in ["", "10.0.0.0/33", "10.0.0/8", "::/129", "10.0.0.0/-1", "10.0.0.0/8/8", "localhost"] {
            assert!(bad.parse::<Network>().is_err(), "{bad}");
        }
        let has = |network: &str, address| is_trusted(ip(address), &[network.parse().unwrap()]);
        assert!(has("0.0.0.0/0", "1.2.3.4"));
        assert!(!has("0.0.0.0/0", "2001:db8::1"));
        assert!(has("1.2.3.4", "1.2.3.4") && !has("1.2.3.4", "1.2.3.5"));
        assert!(has("10.1.2.3/8", "10.0.0.1"), "host bits are ignored");
    }
}
