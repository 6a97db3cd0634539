//! Where RabbitMQ runs, by its URL.

use std::fmt;
use std::str::FromStr;

use lapin::uri::{AMQPAuthority, AMQPQueryString, AMQPScheme, AMQPUri, AMQPUserInfo};
use percent_encoding::percent_decode_str;

/// Where RabbitMQ runs: `amqp://USER:PASSWORD@HOST:PORT/VHOST`, or `amqps://…` for TLS; everything but the host is optional. Special
/// characters in user, password and virtual host are percent-encoded. Without a user it is `guest`, which RabbitMQ accepts only from the
/// same machine; without a virtual host it is `/`.
#[derive(Clone, PartialEq, Eq)]
pub struct Address {
    pub(super) tls: bool,
    pub(super) host: String,
    pub(super) port: u16,
    user: String,
    password: String,
    vhost: String,
}

/// Why a URL cannot be used. It does not repeat the URL, which may contain a password.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// Another scheme than `amqp` or `amqps`.
    #[error("the URL of RabbitMQ must begin with amqp:// or amqps://")]
    Scheme,
    /// No host.
    #[error("the URL of RabbitMQ has no host")]
    Host,
    /// The port is not a number between 1 and 65535.
    #[error("the URL of RabbitMQ has an invalid port")]
    Port,
    /// User, password or virtual host is not percent-encoded UTF-8, or longer than 255 bytes.
    #[error("the URL of RabbitMQ has an invalid user, password or virtual host")]
    Encoding,
    /// Parameters after `?` or `#`.
    #[error("the URL of RabbitMQ must not have parameters")]
    Parameters,
}

impl Address {
    /// With the interval at which client and broker show each other that they are alive, in seconds.
    pub(super) fn uri(&self, heartbeat_s: u16) -> AMQPUri {
        AMQPUri {
            // TLS is added to the stream before lapin gets it.
            scheme: AMQPScheme::AMQP,
            authority: AMQPAuthority {
                userinfo: AMQPUserInfo { username: self.user.clone(), password: self.password.clone() },
                host: self.host.clone(),
                port: self.port,
            },
            vhost: self.vhost.clone(),
            query: AMQPQueryString { heartbeat: Some(heartbeat_s), ..AMQPQueryString::default() },
        }
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(url: &str) -> Result<Self, AddressError> {
        let (tls, rest) = match url.split_once("://") {
            Some(("amqp", rest)) => (false, rest),
            Some(("amqps", rest)) => (true, rest),
            _ => return Err(AddressError::Scheme),
        };
        if rest.contains(['?', '#']) {
            return Err(AddressError::Parameters);
        }
        let (authority, vhost) = rest.split_once('/').unwrap_or((rest, ""));
        let (user, password, server) = match authority.rsplit_once('@') {
            None => ("guest".to_owned(), "guest".to_owned(), authority),
            Some((login, server)) => {
                let (user, password) = login.split_once(':').unwrap_or((login, ""));
                (decode(user)?, decode(password)?, server)
            }
        };
        let (host, port) = split_port(server)?;
        if host.is_empty() {
            return Err(AddressError::Host);
        }
        let port = match port {
            None if tls => 5671,
            None => 5672,
            Some(port) => port.parse().ok().filter(|&port| port != 0).ok_or(AddressError::Port)?,
        };
        let vhost = if vhost.is_empty() { "/".to_owned() } else { decode(vhost)? };
        Ok(Self { tls, host: host.to_owned(), port, user, password, vhost })
    }
}

/// Splits `host:port`; an IPv6 address is in brackets.
fn split_port(server: &str) -> Result<(&str, Option<&str>), AddressError> {
    if let Some(rest) = server.strip_prefix('[') {
        let (host, port) = rest.split_once(']').ok_or(AddressError::Host)?;
        return match port.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if port.is_empty() => Ok((host, None)),
            None => Err(AddressError::Port),
        };
    }
    Ok(server.split_once(':').map_or((server, None), |(host, port)| (host, Some(port))))
}

/// The protocol limits a virtual host to 255 bytes; longer users and passwords are mistakes.
fn decode(text: &str) -> Result<String, AddressError> {
    let text = percent_decode_str(text).decode_utf8().map_err(|_| AddressError::Encoding)?;
    if text.contains('\0') || text.len() > 255 { Err(AddressError::Encoding) } else { Ok(text.into_owned()) }
}

/// Host and port only.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.host.contains(':') {
            return write!(f, "[{}]:{}", self.host, self.port);
        }
        write!(f, "{}:{}", self.host, self.port)
    }
}

/// Without the password.
impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Address")
            .field("tls", &self.tls)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("user", &self.user)
            .field("vhost", &self.vhost)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_url_are_decoded() {
        let parse = |url: &str| {
            let Address { tls, host, port, user, password, vhost } = url.parse().unwrap();
            (tls, host, port, user, password, vhost)
        };
        let owned = |tls, host: &str, port, user: &str, password: &str, vhost: &str| {
            (tls, host.to_owned(), port, user.to_owned(), password.to_owned(), vhost.to_owned())
        };
        for (url, expected) in [
            ("amqp://host", owned(false, "host", 5672, "guest", "guest", "/")),
            ("amqp://host/", owned(false, "host", 5672, "guest", "guest", "/")),
            ("amqps://host/%2f", owned(true, "host", 5671, "guest", "guest", "/")),
            ("amqp://me@host:1/v", owned(false, "host", 1, "me", "", "v")),
            ("amqp://m%40e:p%40s%2Fs:@10.0.0.1:1234/a/b", owned(false, "10.0.0.1", 1234, "m@e", "p@s/s:", "a/b")),
            ("amqps://[::1]", owned(true, "::1", 5671, "guest", "guest", "/")),
            ("amqp://u:p@[::1]:7/x", owned(false, "::1", 7, "u", "p", "x")),
        ] {
            assert_eq!(parse(url), expected, "{url}");
        }
    }

    #[test]
    fn urls_that_cannot_be_used_are_refused_without_showing_the_password() {
        use AddressError::{Encoding, Host, Parameters, Port, Scheme};
        for (url, expected) in [
            ("", Scheme),
            ("host", Scheme),
            ("http://u:secret@host", Scheme),
            ("amqp://", Host),
            ("amqp://u:secret@", Host),
            ("amqp://u:secret@:5672", Host),
            ("amqp://[::1", Host),
            ("amqp://u:secret@host:", Port),
            ("amqp://u:secret@host:0", Port),
            ("amqp://u:secret@host:65536", Port),
            ("amqp://u:secret@[::1]5672", Port),
            ("amqp://u:secret%ff@host", Encoding),
            ("amqp://u:secret@host/%00", Encoding),
            ("amqp://u:secret@host/v?heartbeat=1", Parameters),
            ("amqp://u:secret@host/v#x", Parameters),
        ] {
            let error = url.parse::<Address>().unwrap_err();
            assert_eq!(error, expected, "{url}");
            assert!(!format!("{error} {error:?}").contains("secret"), "{error}");
        }
        let address: Address = "amqp://user:secret@host/v".parse().unwrap();
        let shown = format!("{address} {address:?}");
        assert!(!shown.contains("secret") && shown.contains("host:5672") && shown.contains("user"), "{shown}");
    }
}
