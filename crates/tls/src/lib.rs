//! TLS for clients: the certificates with which servers are verified, and with which they can verify this client.
//!
//! - [`TlsFiles`]: the files
//! - [`Tls`]: their content, once it is read and found to be valid: a configuration of rustls, and the PEM for a library that makes its own
//! - [`TlsError`]: why the files cannot be used

#![warn(missing_docs)]

mod error;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

pub use error::TlsError;

/// Files in PEM. Without any file, servers are verified with the certificate authorities of Mozilla, which are compiled in, and the client
/// has no certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificates of the authorities that may have signed the server's certificate. They replace those of Mozilla.
    pub ca: Option<PathBuf>,
    /// The client's certificate, followed by those of intermediate authorities. It needs a [`key`](Self::key).
    pub certificate: Option<PathBuf>,
    /// The private key of [`certificate`](Self::certificate).
    pub key: Option<PathBuf>,
}

/// The content of [`TlsFiles`].
#[derive(Clone)]
pub struct Tls {
    config: Arc<ClientConfig>,
    ca: Option<Vec<u8>>,
    client: Option<ClientPem>,
}

/// The client's certificate and its key, in PEM.
#[derive(Clone)]
pub struct ClientPem {
    /// The certificate, followed by those of intermediate authorities.
    pub certificate: Vec<u8>,
    /// The private key.
    pub key: Vec<u8>,
}

impl TlsFiles {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn read(&self) -> Result<Tls, TlsError> {
        let ca = self.ca.as_deref().map(read).transpose()?;
        let roots = match self.ca.as_deref().zip(ca.as_deref()) {
            Some((path, content)) => authorities(path, content)?,
            None => RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() },
        };
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Protocol)?
            .with_root_certificates(roots);
        let (config, client) = match (&self.certificate, &self.key) {
            (None, None) => (builder.with_no_client_auth(), None),
            (Some(_), None) => return Err(TlsError::NoKey),
            (None, Some(_)) => return Err(TlsError::NoCertificate),
            (Some(certificate), Some(key)) => {
                let pem = ClientPem { certificate: read(certificate)?, key: read(key)? };
                let chain = certificates(certificate, &pem.certificate)?;
                let private = PrivateKeyDer::from_pem_slice(&pem.key).map_err(not_pem(key, "private key"))?;
                let pair = |source| TlsError::Pair { certificate: certificate.clone(), key: key.clone(), source };
                (builder.with_client_auth_cert(chain, private).map_err(pair)?, Some(pem))
            }
        };
        Ok(Tls { config: Arc::new(config), ca, client })
    }
}

impl Tls {
    /// For a client that uses rustls.
    pub fn config(&self) -> Arc<ClientConfig> {
        self.config.clone()
    }

    /// The certificates of the authorities, in PEM; `None` for those of Mozilla.
    pub fn ca(&self) -> Option<&[u8]> {
        self.ca.as_deref()
    }

    /// What the client shows to servers; `None` if it has no certificate.
    pub const fn client(&self) -> Option<&ClientPem> {
        self.client.as_ref()
    }
}

/// Shows nothing, because the content includes a private key.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// Shows nothing, because the content includes a private key.
impl fmt::Debug for ClientPem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ClientPem")
    }
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|error| TlsError::Read(path.to_owned(), error))
}

fn not_pem(path: &Path, expected: &'static str) -> impl Fn(pem::Error) -> TlsError {
    move |source| TlsError::Pem { path: path.to_owned(), expected, source }
}

/// The certificates of a file; at least one.
fn certificates(path: &Path, content: &[u8]) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(content).collect();
    match found {
        Ok(found) if found.is_empty() => Err(pem::Error::NoItemsFound),
        result => result,
    }
    .map_err(not_pem(path, "certificate"))
}

fn authorities(path: &Path, content: &[u8]) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, content)? {
        roots.add(certificate).map_err(|error| TlsError::Authority(path.to_owned(), error))?;
    }
    Ok(roots)
}
