//! TLS: certificates for `rediss://` servers, as the redis crate takes them.

use redis::{ClientTlsConfig, TlsCertificates};
use rustls::crypto::ring;
use stampede_tls::{ClientPem, Tls};

/// Makes ring the implementation of cryptography of this process if it has none yet: the redis crate uses that of the process, and rustls
/// cannot choose one if several are compiled in.
pub(crate) fn install_crypto_provider() {
    // An error means that the process already has one.
    let _ = ring::default_provider().install_default();
}

pub(crate) fn certificates(tls: &Tls) -> TlsCertificates {
    let client = |ClientPem { certificate, key }: &ClientPem| ClientTlsConfig {
        client_cert: certificate.clone(),
        client_key: key.clone(),
    };
    TlsCertificates { client_tls: tls.client().map(client), root_cert: tls.ca().map(<[u8]>::to_vec) }
}
