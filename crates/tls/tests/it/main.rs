//! Files with certificates and keys. The connections that are made with them are tested with the clients of Redis and RabbitMQ.

use std::path::PathBuf;

use stampede_testkit::redis::tls::Certificates;
use stampede_tls::{TlsError, TlsFiles};

/// Files with wrong content are refused when they are read, with an error that names the file.
#[test]
fn invalid_files_are_refused() {
    let (certificates, others) = (Certificates::create().unwrap(), Certificates::create().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str, content: &str| {
        let path = directory.path().join(name);
        std::fs::write(&path, content).unwrap();
        path
    };
    let (missing, text, empty) =
        (directory.path().join("missing.pem"), file("text.pem", "no PEM\n"), file("empty.pem", ""));
    let broken = file("broken.pem", "-----BEGIN CERTIFICATE-----\naGVsbG8=\n-----END CERTIFICATE-----\n");
    let (certificate, key) = (certificates.client_certificate(), certificates.client_key());
    let read = |ca: Option<&PathBuf>, certificate: Option<&PathBuf>, key: Option<&PathBuf>| {
        let files = TlsFiles { ca: ca.cloned(), certificate: certificate.cloned(), key: key.cloned() };
        files.read().unwrap_err()
    };

    for (error, name) in [
        (read(Some(&missing), None, None), "missing.pem"),
        (read(Some(&text), None, None), "text.pem"),
        (read(Some(&empty), None, None), "empty.pem"),
        (read(Some(&key), None, None), "client.key"),
        (read(Some(&broken), None, None), "broken.pem"),
        (read(None, Some(&missing), Some(&key)), "missing.pem"),
        (read(None, Some(&text), Some(&key)), "text.pem"),
        (read(None, Some(&certificate), Some(&missing)), "missing.pem"),
        (read(None, Some(&certificate), Some(&text)), "text.pem"),
        (read(None, Some(&certificate), Some(&certificate)), "client.pem"),
        (read(None, Some(&certificate), Some(&others.client_key())), "do not match"),
    ] {
        assert!(error.to_string().contains(name), "{name}: {error}");
    }
    assert!(matches!(read(None, Some(&certificate), None), TlsError::NoKey));
    assert!(matches!(read(None, None, Some(&key)), TlsError::NoCertificate));
    // The content includes the key.
    let files = TlsFiles { ca: Some(certificates.ca()), certificate: Some(certificate), key: Some(key) };
    let tls = files.read().unwrap();
    assert_eq!(format!("{tls:?} {:?}", tls.client().unwrap()), "Tls ClientPem");
}
