//! Why the files cannot be used.

use std::path::PathBuf;

use rustls::pki_types::pem;

/// Why the [`TlsFiles`](crate::TlsFiles) cannot be used.
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
