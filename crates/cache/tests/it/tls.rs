//! A cache over TLS, with user, password and database number.

use std::convert::Infallible;

use stampede_cache::{Builder, Remote, RemoteConfig, Servers, TlsFiles};
use stampede_testkit::redis::tls::Certificates;

use crate::support::{Numbers, until};

const PASSWORD: &str = "a-very-secret-word";

async fn read(cache: &Numbers, loaded: u64) -> u64 {
    *cache.get_or_load(&7, move || async move { Ok(Some(loaded)) }).await.unwrap().unwrap()
}

#[tokio::test]
async fn values_and_invalidations_are_shared_over_tls() {
    let (certificates, others) = (Certificates::create().unwrap(), Certificates::create().unwrap());
    let redis = certificates.start("yes").unwrap();
    let ask = |command: &[&str]| certificates.ask(redis.port(), command).unwrap();
    ask(&["acl", "setuser", "cache", "on", &format!(">{PASSWORD}"), "~app:*", "&app:*", "+@all"]);
    let servers = Servers::from(format!("rediss://cache:{PASSWORD}@127.0.0.1:{}/5", redis.port()));
    let mut files = TlsFiles {
        ca: Some(certificates.ca()),
        certificate: Some(certificates.client_certificate()),
        key: Some(certificates.client_key()),
    };
    let build = |files: &TlsFiles| -> Numbers {
        let servers = servers.clone().with_tls(files.read().unwrap());
        let remote = Remote::new("app", servers, RemoteConfig::default()).unwrap();
        assert!(!format!("{remote:?}").contains(PASSWORD));
        Builder::new("number").remote(remote).build()
    };
    let (here, there) = (build(&files), build(&files));
    here.put(&7, async { Ok::<_, Infallible>(Some(1)) }).await.unwrap();
    assert_eq!(read(&there, 0).await, 1, "the value comes from Redis");
    assert_eq!(ask(&["-n", "5", "exists", "app:cache:{number:7}"]), "1");
    here.put(&7, async { Ok::<_, Infallible>(Some(2)) }).await.unwrap();
    until("the other process drops its copy", async || read(&there, 0).await == 2).await;

    files.ca = Some(others.ca());
    assert_eq!(read(&build(&files), 3).await, 3, "without Redis the source is asked");
}
