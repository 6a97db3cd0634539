//! Networks of IP addresses.

use std::net::{IpAddr, Ipv6Addr};

/// The network with this prefix length that an IPv6 address belongs to. An IPv4 address is returned as it is.
pub fn network(address: IpAddr, prefix: u32) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(address) => {
            let mask = if prefix == 0 { 0 } else { u128::MAX << (128 - prefix.min(128)) };
            Ipv6Addr::from_bits(address.to_bits() & mask).into()
        }
        v4 @ IpAddr::V4(_) => v4,
    }
}

/// The address that limits count by. An IPv6 client usually has a whole /64, so that network counts as one address.
pub fn rate_limit_key(address: IpAddr) -> IpAddr {
    network(address, 64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ipv6_is_masked_and_ipv4_is_unchanged() {
        let of = |address: &str, prefix| network(address.parse().unwrap(), prefix).to_string();
        assert_eq!(of("2001:db8:1:2ff:3::4", 64), "2001:db8:1:2ff::");
        assert_eq!(of("2001:db8:1:2ff:3::4", 56), "2001:db8:1:200::");
        assert_eq!(of("2001:db8:1:2ff:3::4", 48), "2001:db8:1::");
        assert_eq!(of("2001:db8::1", 128), "2001:db8::1");
        assert_eq!(of("2001:db8::1", 0), "::");
        assert_eq!(of("192.0.2.7", 48), "192.0.2.7");
        assert_eq!(of("::ffff:192.0.2.7", 64), "192.0.2.7", "mapped");
        assert_eq!(rate_limit_key("2001:db8::1:2:3:4".parse().unwrap()).to_string(), "2001:db8::");
    }
}
