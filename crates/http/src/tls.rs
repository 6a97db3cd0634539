//! TLS with certificate files that can be reloaded while the server runs.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use parking_lot::RwLock;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use tokio_rustls::TlsAcceptor;

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read the certificate in {0}")]
    Certificate(String, #[source] rustls::pki_types::pem::Error),
    #[error("cannot read the private key in {0}")]
    Key(String, #[source] rustls::pki_types::pem::Error),
    #[error("the certificate and the key do not match")]
    Pair(#[source] rustls::Error),
}

/// The certificate for new connections.
#[derive(Debug)]
pub struct Certificate {
    provider: Arc<CryptoProvider>,
    current: RwLock<Arc<CertifiedKey>>,
}

impl Certificate {
    /// Reads a file with a certificate chain, the server's certificate first, and a file with its key; both in PEM.
    pub fn read(certificate: &Path, key: &Path) -> Result<Arc<Self>, TlsError> {
        let provider = Arc::new(ring::default_provider());
        let current = RwLock::new(read(certificate, key, &provider)?);
        Ok(Arc::new(Self { provider, current }))
    }

    /// Reads the files again. If they cannot be read or do not match, the certificate stays as it is. Open connections keep the
    /// certificate of their handshake.
    pub fn reload(&self, certificate: &Path, key: &Path) -> Result<(), TlsError> {
        let reloaded = read(certificate, key, &self.provider)?;
        *self.current.write() = reloaded;
        Ok(())
    }

    /// Accepts connections with the certificate that is current at their handshake.
    pub fn acceptor(self: &Arc<Self>) -> Result<TlsAcceptor, TlsError> {
        let config = rustls::ServerConfig::builder_with_provider(self.provider.clone())
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Pair)?
            .with_no_client_auth()
            .with_cert_resolver(self.clone());
        Ok(TlsAcceptor::from(Arc::new(config)))
    }
}

impl ResolvesServerCert for Certificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.current.read().clone())
    }
}

fn read(certificate: &Path, key: &Path, provider: &CryptoProvider) -> Result<Arc<CertifiedKey>, TlsError> {
    if is_world_readable(key) {
        tracing::warn!(key = %key.display(), "every user of this machine can read the TLS key: remove that permission");
    }
    let in_certificate = |error| TlsError::Certificate(certificate.display().to_string(), error);
    let chain: Result<Vec<_>, _> = CertificateDer::pem_file_iter(certificate).map_err(in_certificate)?.collect();
    let chain = chain.map_err(in_certificate)?;
    let key = PrivateKeyDer::from_pem_file(key).map_err(|error| TlsError::Key(key.display().to_string(), error))?;
    Ok(Arc::new(CertifiedKey::from_der(chain, key, provider).map_err(TlsError::Pair)?))
}

/// A key that cannot be read counts as not readable: reading it reports the error.
fn is_world_readable(key: &Path) -> bool {
    std::fs::metadata(key).is_ok_and(|file| file.permissions().mode() & 0o004 != 0)
}
