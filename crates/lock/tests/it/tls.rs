//! Locks over TLS, with user, password and database number.

use std::time::Duration;

use stampede_lock::{Error, Locks, Servers, TlsFiles};
use stampede_testkit::redis::tls::Certificates;

use crate::support::long;

const PASSWORD: &str = "a-very-secret-word";

#[tokio::test]
async fn lock_is_acquired_and_waited_for_over_tls() {
    let (certificates, others) = (Certificates::create().unwrap(), Certificates::create().unwrap());
    let redis = certificates.start("yes").unwrap();
    let ask = |command: &[&str]| certificates.ask(redis.port(), command).unwrap();
    ask(&["acl", "setuser", "locks", "on", &format!(">{PASSWORD}"), "~lock:*", "&lock:*", "+@all"]);
    let servers = Servers::from(format!("rediss://locks:{PASSWORD}@127.0.0.1:{}/5", redis.port()));
    let mut files = TlsFiles {
        ca: Some(certificates.ca()),
        certificate: Some(certificates.client_certificate()),
        key: Some(certificates.client_key()),
    };
    let connect = |files: &TlsFiles| Locks::connect(servers.clone().with_tls(files.read().unwrap()), long());
    let (here, there) = (connect(&files).await.unwrap(), connect(&files).await.unwrap());
    assert!(!format!("{servers:?} {here:?}").contains(PASSWORD));

    let guard = here.simple("report").unwrap().lock().await.unwrap();
    assert_eq!(ask(&["-n", "5", "exists", "lock:{report}"]), "1");
    let report = there.simple("report").unwrap();
    assert!(matches!(report.try_lock().await.unwrap_err(), Error::NotAcquired { .. }));
    let waiting = tokio::spawn(async move { report.try_lock_for(Duration::from_secs(20)).await });
    guard.release().await.unwrap();
    waiting.await.unwrap().unwrap().release().await.unwrap();

    files.ca = Some(others.ca());
    let error = connect(&files).await.unwrap_err();
    assert!(matches!(error, Error::Unreachable(_)) && !format!("{error} {error:?}").contains(PASSWORD), "{error:?}");
}
