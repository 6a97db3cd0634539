//! TLS by certificate files.

use std::path::Path;
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read the certificate in {0}")]
    Certificate(String, #[source] rustls::pki_types::pem::Error),
    #[error("cannot read the private key in {0}")]
    Key(String, #[source] rustls::pki_types::pem::Error),
    #[error("the certificate and the key do not go together")]
    Pair(#[source] rustls::Error),
}

/// From a file of certificates, the server's own first, and a file with its key; both in PEM.
pub fn acceptor(certificate: &Path, key: &Path) -> Result<TlsAcceptor, TlsError> {
    let in_certificate = |error| TlsError::Certificate(certificate.display().to_string(), error);
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(certificate).map_err(in_certificate)?.collect();
    let chain = chain.map_err(in_certificate)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|error| TlsError::Key(key.display().to_string(), error))?;
    let config = rustls::ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(TlsError::Pair)?
        .with_no_client_auth()
        .with_single_cert(chain, key)
        .map_err(TlsError::Pair)?;
    Ok(TlsAcceptor::from(Arc::new(config)))
}
