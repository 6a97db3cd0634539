//! TLS: the certificates with which `rediss://` servers are verified, and with which they can verify this client.

use std::fmt;
use std::path::{Path, PathBuf};

use redis::{ClientTlsConfig, TlsCertificates};
use rustls::RootCertStore;
use rustls::crypto::ring;
use rustls::pki_types::pem::{self, PemObject as _};
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;

/// Files in PEM, for [`Servers::with_tls`](crate::Servers::with_tls). Without any file, servers are verified with the certificate
/// authorities of Mozilla, which are compiled in, and the client has no certificate.
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
}

impl TlsFiles {
    /// Reads and checks the files.
    ///
    /// # Errors
    /// See [`TlsError`].
    pub fn read(&self) -> Result<Tls, TlsError> {
        let root_cert = self.ca.as_deref().map(read_authorities).transpose()?;
        let client_tls = match (&self.certificate, &self.key) {
            (None, None) => None,
            (Some(_), None) => return Err(TlsError::NoKey),
            (None, Some(_)) => return Err(TlsError::NoCertificate),
            (Some(certificate), Some(key)) => Some(read_pair(certificate, key)?),
        };
        Ok(Tls(TlsCertificates { client_tls, root_cert }))
    }
}

/// The content of [`TlsFiles`].
#[derive(Clone)]
pub struct Tls(TlsCertificates);

impl Tls {
    pub(crate) fn certificates(&self) -> TlsCertificates {
        self.0.clone()
    }
}

/// Shows nothing, because the content includes a private key.
impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Tls")
    }
}

/// Makes ring the implementation of cryptography of this process if it has none yet: the redis crate uses that of the process, and rustls
/// cannot choose one if several are compiled in.
pub(crate) fn install_crypto_provider() {
    // An error means that the process already has one.
    let _ = ring::default_provider().install_default();
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

fn read_authorities(path: &Path) -> Result<Vec<u8>, TlsError> {
    let content = read(path)?;
    let mut roots = RootCertStore::empty();
    for certificate in certificates(path, &content)? {
        roots.add(certificate).map_err(|error| TlsError::Authority(path.to_owned(), error))?;
    }
    Ok(content)
}

fn read_pair(certificate: &Path, key: &Path) -> Result<ClientTlsConfig, TlsError> {
    let (client_cert, client_key) = (read(certificate)?, read(key)?);
    let chain = certificates(certificate, &client_cert)?;
    let private = PrivateKeyDer::from_pem_slice(&client_key).map_err(not_pem(key, "private key"))?;
    CertifiedKey::from_der(chain, private, &ring::default_provider()).map_err(|source| TlsError::Pair {
        certificate: certificate.to_owned(),
        key: key.to_owned(),
        source,
    })?;
    Ok(ClientTlsConfig { client_cert, client_key })
}
