//! TLS: the certificates with which `amqps://` servers are verified, and with which they can verify this client.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::{ClientConfig, RootCertStore};

/// Files in PEM. Without any file, the server is verified with the certificate authorities of Mozilla, which are compiled in, and the
/// client has no certificate.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// The certificates of the authorities that may have signed the server's certificate. They replace those of Mozilla.
    pub ca: Option<PathBuf>,
    /// The client's certificate, followed by those of intermediate authorities. It needs a [`key`](Self::key).
    pub certificate: Option<PathBuf>,
    /// The private key of [`certificate`](Self::certificate).
    pub key: Option<PathBuf>,
}

/// Why the [`TlsFiles`] cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TlsError {
    /// A file is missing, or may not be read.
    #[error("cannot read {}", .0.display())]
    Read(PathBuf, #[source] std::io::Error),
    /// A file is not in PEM, or contains something else.
    #[error("{} has no {expected} in PEM", .path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What it should contain.
        expected: &'static str,
        /// What is wrong.
        #[source]
        source: pem::Error,
    },
    /// A certificate of an authority that cannot be used as one.
    #[error("{} has an invalid certificate", .0.display())]
    Authority(PathBuf, #[source] rustls::Error),
    /// The key of the client's certificate is not given.
    #[error("there is a client certificate, but no key")]
    NoKey,
    /// The certificate of the client's key is not given.
    #[error("there is a key, but no client certificate")]
    NoCertificate,
    /// Client certificate and key do not belong together, or are of an unknown kind.
    #[error("the client certificate {} and the key {} do not match", .certificate.display(), .key.display())]
    Pair {
        /// The file of the certificate.
        certificate: PathBuf,
        /// The file of the key.
        key: PathBuf,
        /// What is wrong.
        #[source]
        source: rustls::Error,
    },
    /// The library for TLS does not support its own defaults.
    #[error("TLS cannot be configured")]
    Protocol(#[source] rustls::Error),
}

/// The content of [`TlsFiles`].
#[derive(Clone)]
pub struct Tls(Arc<ClientConfig>);

impl TlsFiles {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn read(&self) -> Result<Tls, TlsError> {
        let roots = match &self.ca {
            Some(path) => read_authorities(path)?,
            None => RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() },
        };
        let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(TlsError::Protocol)?
            .with_root_certificates(roots);
        let config = match (&self.certificate, &self.key) {
            (None, None) => builder.with_no_client_auth(),
            (Some(_), None) => return Err(TlsError::NoKey),
            (None, Some(_)) => return Err(TlsError::NoCertificate),
            (Some(certificate), Some(key)) => {
                let chain = certificates(certificate, &read(certificate)?)?;
                let private = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(not_pem(key, "private key"))?;
                let pair = |source| TlsError::Pair { certificate: certificate.clone(), key: key.clone(), source };
                builder.with_client_auth_cert(chain, private).map_err(pair)?
            }
        };
        Ok(Tls(Arc::new(config)))
    }
}

impl Tls {
    pub(super) fn config(&self) -> Arc<ClientConfig> {
        self.0.clone()
    }
}

/// Shows nothing, because the content includes a private key.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
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

fn read_authorities(path: &Path) -> Result<RootCertStore, TlsError> {
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, &read(path)?)? {
        roots.add(certificate).map_err(|error| TlsError::Authority(path.to_owned(), error))?;
    }
    Ok(roots)
}
