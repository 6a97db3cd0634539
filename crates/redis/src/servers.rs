//! Where Redis runs, and the connectors of the redis crate for it.

use std::fmt;

use redis::cluster::ClusterClientBuilder;
use redis::sentinel::{SentinelClient, SentinelClientBuilder, SentinelServerType};
use redis::{ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo as _, RedisResult, TlsMode};
use stampede_tls::Tls;

use crate::tls::{certificates, install_crypto_provider};

/// Where Redis runs. A URL is `redis://USER:PASSWORD@HOST:PORT/DATABASE`, or `rediss://…` for TLS; everything but the host is optional.
/// Special characters in user and password are percent-encoded.
#[derive(Clone)]
#[non_exhaustive]
pub enum Servers {
    /// A single server, by its URL.
    Single(String),
    /// A master that is found through Sentinel.
    Sentinel {
        /// URLs of the sentinels. Their user and password are the same.
        sentinels: Vec<String>,
        /// The name of the master.
        master: String,
        /// A URL with the scheme, user, password and database of the master. Its host and port are ignored, because the sentinels
        /// know them. `None`: no password, database 0, and TLS if the sentinels have it.
        node: Option<String>,
    },
    /// A cluster, by the URLs of some of its nodes.
    Cluster(Vec<String>),
    /// Servers with certificates; see [`with_tls`](Self::with_tls).
    WithTls(Box<Servers>, Tls),
}

impl Servers {
    /// The same servers with the certificates of [`TlsFiles`](crate::TlsFiles). The URLs must begin with `rediss://`; without this
    /// method, such servers are verified with the certificate authorities of Mozilla.
    #[must_use]
    pub fn with_tls(self, tls: Tls) -> Self {
        match self {
            Self::WithTls(servers, _) => Self::WithTls(servers, tls),
            servers => Self::WithTls(Box::new(servers), tls),
        }
    }
}

impl From<&str> for Servers {
    fn from(url: &str) -> Self {
        Self::Single(url.to_owned())
    }
}

impl From<String> for Servers {
    fn from(url: String) -> Self {
        Self::Single(url)
    }
}

/// Shows only the variant, because URLs may contain passwords.
impl fmt::Debug for Servers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Single(_) => f.write_str("Single"),
            Self::Sentinel { .. } => f.write_str("Sentinel"),
            Self::Cluster(_) => f.write_str("Cluster"),
            Self::WithTls(servers, _) => write!(f, "{servers:?} with TLS"),
        }
    }
}

/// Parses a URL.
fn parse(url: &str) -> RedisResult<ConnectionInfo> {
    let info = url.into_connection_info()?;
    check_query(url)?;
    if let ConnectionAddr::TcpTls { insecure, .. } = info.addr() {
        if *insecure {
            return Err(invalid("certificates are always verified: #insecure is not supported"));
        }
        install_crypto_provider();
    }
    Ok(info)
}

/// Refuses what would be ignored: often a password with a `?` or a `#` that is not encoded, or an option of another client.
fn check_query(url: &str) -> RedisResult<()> {
    let (url, fragment) = url.split_once('#').map_or((url, ""), |(url, fragment)| (url, fragment));
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let is_known = |option: &str| option.is_empty() || option.starts_with("protocol=");
    if fragment == "insecure" || (fragment.is_empty() && query.split('&').all(is_known)) {
        return Ok(());
    }
    Err(invalid("a URL of Redis has no options but ?protocol=; in a password write ? as %3F and # as %23"))
}

fn invalid(message: &'static str) -> redis::RedisError {
    (ErrorKind::InvalidClientConfig, message).into()
}

fn uses_tls(info: &ConnectionInfo) -> bool {
    matches!(info.addr(), ConnectionAddr::TcpTls { .. })
}

fn credentials(info: &ConnectionInfo) -> (Option<&str>, Option<&str>) {
    (info.redis_settings().username(), info.redis_settings().password())
}

pub(crate) fn single(url: &str, tls: Option<&Tls>) -> RedisResult<redis::Client> {
    let info = parse(url)?;
    match tls {
        None => redis::Client::open(info),
        Some(tls) => redis::Client::build_with_tls(info, certificates(tls)),
    }
}

pub(crate) fn cluster(urls: Vec<String>, tls: Option<&Tls>) -> ClusterClientBuilder {
    let builder = ClusterClientBuilder::new(urls);
    match tls {
        None => builder,
        Some(tls) => builder.certs(certificates(tls)),
    }
}

pub(crate) fn sentinel(
    sentinels: &[String],
    master: &str,
    node: Option<&str>,
    tls: Option<&Tls>,
) -> RedisResult<SentinelClient> {
    let sentinels = sentinels.iter().map(|url| parse(url)).collect::<RedisResult<Vec<_>>>()?;
    let first = sentinels.first().ok_or_else(|| invalid("no sentinel is given"))?;
    let (username, password) = credentials(first);
    if sentinels.iter().any(|info| credentials(info) != (username, password)) {
        return Err(invalid("the sentinels must have the same user and password"));
    }
    let node = node.map(parse).transpose()?;
    let (sentinels_use_tls, node_uses_tls) = (uses_tls(first), node.as_ref().map_or(uses_tls(first), uses_tls));
    if tls.is_some() && !sentinels_use_tls && !node_uses_tls {
        return Err(invalid("certificates need a URL that begins with rediss://"));
    }

    let protocol = first.redis_settings().protocol();
    let addresses: Vec<_> = sentinels.iter().map(|info| info.addr().clone()).collect();
    let mut builder = SentinelClientBuilder::new(addresses, master, SentinelServerType::Master)?
        .set_client_to_sentinel_protocol(protocol);
    if let Some(username) = username {
        builder = builder.set_client_to_sentinel_username(username);
    }
    if let Some(password) = password {
        builder = builder.set_client_to_sentinel_password(password);
    }
    if let (true, Some(tls)) = (sentinels_use_tls, tls) {
        builder = builder.set_client_to_sentinel_certificates(certificates(tls));
    }
    if node_uses_tls {
        builder = builder.set_client_to_redis_tls_mode(TlsMode::Secure);
        if let Some(tls) = tls {
            builder = builder.set_client_to_redis_certificates(certificates(tls));
        }
    }
    if let Some(settings) = node.as_ref().map(ConnectionInfo::redis_settings) {
        builder = builder.set_client_to_redis_db(settings.db()).set_client_to_redis_protocol(settings.protocol());
        if let Some(username) = settings.username() {
            builder = builder.set_client_to_redis_username(username);
        }
        if let Some(password) = settings.password() {
            builder = builder.set_client_to_redis_password(password);
        }
    }
    builder.build()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_that_would_be_ignored_are_refused() {
        for url in ["redis://h", "redis://:p%23%3F@h:1/2", "redis://h/?protocol=resp3", "redis://h?protocol=resp3&"] {
            assert!(parse(url).is_ok(), "{url}");
        }
        for url in ["redis://h/?timeout=5", "redis://h/?protocol=resp3&x=1", "redis://h/2#x", "rediss://h/#insecure"] {
            assert!(parse(url).is_err(), "{url}");
        }
    }
}
