//! The `Host` header: exactly one, and well formed (RFC 9112, 3.2). A proxy and this server must not disagree about it.

use axum::http::header::HOST;
use axum::http::{HeaderMap, Version};

/// What is wrong with the header, if anything. HTTP/1.0 does not require one.
pub(crate) fn check(version: Version, headers: &HeaderMap) -> Result<(), &'static str> {
    let mut values = headers.get_all(HOST).iter();
    match (values.next(), values.next()) {
        (Some(_), Some(_)) => Err("there is more than one Host header"),
        (Some(host), None) if !is_well_formed(host.as_bytes()) => Err("the Host header is malformed"),
        (None, _) if version != Version::HTTP_10 => Err("the Host header is missing"),
        _ => Ok(()),
    }
}

/// `name`, `name:port`, `[IPv6]` or `[IPv6]:port`.
fn is_well_formed(host: &[u8]) -> bool {
    let (name, rest) = match host.strip_prefix(b"[") {
        Some(inside) => match inside.iter().position(|&byte| byte == b']') {
            Some(end) => (&inside[..end], &inside[end + 1..]),
            None => return false,
        },
        None => host.split_at(host.iter().position(|&byte| byte == b':').unwrap_or(host.len())),
    };
    let allowed: fn(u8) -> bool = if host.starts_with(b"[") {
        |byte| byte.is_ascii_hexdigit() || matches!(byte, b':' | b'.')
    } else {
        |byte| byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=".contains(&byte)
    };
    let port = match rest {
        [] => true,
        [b':', digits @ ..] => is_port(digits),
        _ => false,
    };
    !name.is_empty() && name.iter().all(|&byte| allowed(byte)) && port
}

/// A number up to 65535, or nothing: the default port.
fn is_port(digits: &[u8]) -> bool {
    let number = |digits: &[u8]| digits.iter().fold(0, |number, digit| number * 10 + u32::from(digit - b'0'));
    digits.len() <= 5 && digits.iter().all(u8::is_ascii_digit) && number(digits) <= u32::from(u16::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_host_and_a_port_are_well_formed() {
        for good in
            ["x", "shop.example", "127.0.0.1:8080", "[::1]", "[::ffff:1.2.3.4]:443", "a_b", "shop.example:", "a:65535"]
        {
            assert!(is_well_formed(good.as_bytes()), "{good}");
        }
        for bad in [
            "",
            ":80",
            "a b",
            "a@b",
            "a/b",
            "a,b c",
            "a:b",
            "a:1:2",
            "a:123456",
            "a:65536",
            "[::1]:99999",
            "[::1",
            "[]",
            "[::1]x",
            "[g]",
            "a?",
            "\u{e4}",
        ] {
            assert!(!is_well_formed(bad.as_bytes()), "{bad}");
        }
    }
}
