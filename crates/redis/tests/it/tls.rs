//! TLS, certificates, users, passwords and database numbers.

use std::time::Duration;

use redis::Value;
use stampede_redis::{Client, CommandError, Servers, Tls, TlsFiles};
use stampede_testkit::redis as server;
use stampede_testkit::redis::tls::{Certificates, url};

const TIMEOUT: Duration = Duration::from_secs(5);
const PASSWORD: &str = "a-very-secret-word";

fn client(servers: impl Into<Servers>) -> Client {
    Client::new(servers.into(), TIMEOUT, TIMEOUT).unwrap()
}

async fn ping(client: &Client) -> Result<Value, CommandError> {
    client.send(redis::cmd("PING")).await
}

fn pong() -> Value {
    Value::SimpleString("PONG".to_owned())
}

fn authority(certificates: &Certificates) -> Tls {
    TlsFiles { ca: Some(certificates.ca()), ..TlsFiles::default() }.read().unwrap()
}

fn with_client_certificate(certificates: &Certificates) -> Tls {
    let files = TlsFiles {
        ca: Some(certificates.ca()),
        certificate: Some(certificates.client_certificate()),
        key: Some(certificates.client_key()),
    };
    files.read().unwrap()
}

#[tokio::test]
async fn server_is_verified_with_the_authority_of_the_file() {
    let (certificates, others) = (Certificates::create().unwrap(), Certificates::create().unwrap());
    let redis = certificates.start("no").unwrap();
    let servers = Servers::from(url(redis.port()));
    let trusting = client(servers.clone().with_tls(authority(&certificates)));
    assert_eq!(ping(&trusting).await.unwrap(), pong());

    let wrong_authority = servers.clone().with_tls(authority(&others));
    for refused in [wrong_authority, servers] {
        let error = ping(&client(refused)).await.unwrap_err();
        assert!(matches!(error, CommandError::NotSent(_)), "{error}");
        assert!(error.to_string().contains("invalid peer certificate"), "{error}");
    }
    // The certificate is for the address 127.0.0.1.
    let other_name = Servers::from(format!("rediss://localhost:{}", redis.port())).with_tls(authority(&certificates));
    let error = ping(&client(other_name)).await.unwrap_err();
    assert!(error.to_string().contains("not valid for name"), "{error}");
    // No reply to plain text.
    let plain = ping(&client(server::url(redis.port()))).await.unwrap_err();
    assert!(matches!(plain, CommandError::NotSent(_)), "{plain}");
}

#[tokio::test]
async fn client_certificate_is_sent_to_a_server_that_requires_it() {
    let certificates = Certificates::create().unwrap();
    let redis = certificates.start("yes").unwrap();
    let servers = Servers::from(url(redis.port()));
    let known = client(servers.clone().with_tls(with_client_certificate(&certificates)));
    assert_eq!(ping(&known).await.unwrap(), pong());
    let mut subscription = known.pubsub().await.unwrap();
    subscription.subscribe("channel").await.unwrap();

    let error = ping(&client(servers.with_tls(authority(&certificates)))).await.unwrap_err();
    assert!(matches!(error, CommandError::NotSent(_)), "{error}");
}

/// User, password and database number of the URL, with special characters in the password, and over TLS.
#[tokio::test]
async fn user_password_and_database_of_the_url_are_used() {
    let certificates = Certificates::create().unwrap();
    let redis = certificates.start("no").unwrap();
    let ask = |command: &[&str]| certificates.ask(redis.port(), command).unwrap();
    ask(&["acl", "setuser", "alice", "on", ">p@ss:w/rd?#%", "~*", "&*", "+@all"]);
    ask(&["acl", "setuser", "bob", "on", &format!(">{PASSWORD}"), "~*", "&*", "+@read", "+@connection"]);
    ask(&["acl", "setuser", "default", "off"]);

    let tls = authority(&certificates);
    let connect = |user: &str| {
        client(Servers::from(format!("rediss://{user}127.0.0.1:{}/3", redis.port())).with_tls(tls.clone()))
    };
    let alice = connect("alice:p%40ss%3Aw%2Frd%3F%23%25@");
    alice.send(redis::cmd("SET").arg("key").arg("in three").to_owned()).await.unwrap();
    let list = alice.send(redis::cmd("CLIENT").arg("LIST").to_owned()).await.unwrap();
    let list: String = redis::FromRedisValue::from_redis_value(list).unwrap();
    assert!(list.contains(" db=3 ") && list.contains(" user=alice "), "{list}");
    let keyspace = alice.send(redis::cmd("INFO").arg("keyspace").to_owned()).await.unwrap();
    let keyspace: String = redis::FromRedisValue::from_redis_value(keyspace).unwrap();
    assert!(keyspace.contains("db3:keys=1,"), "{keyspace}");

    let bob = connect(&format!("bob:{PASSWORD}@"));
    let value = bob.send(redis::cmd("GET").arg("key").to_owned()).await.unwrap();
    assert_eq!(value, Value::BulkString(b"in three".to_vec()));
    let error = bob.send(redis::cmd("SET").arg("key").arg("x").to_owned()).await.unwrap_err();
    assert!(matches!(error, CommandError::Refused(_)), "{error}");

    for user in [format!("alice:{PASSWORD}@"), format!("bob:{PASSWORD}x@"), format!(":{PASSWORD}@")] {
        let wrong = connect(&user);
        let error = ping(&wrong).await.unwrap_err();
        assert!(matches!(error, CommandError::Refused(_)), "{user}: {error}");
        assert!(!format!("{error} {error:?} {wrong:?}").contains(PASSWORD), "{error:?}");
    }
}

#[tokio::test]
async fn cluster_and_sentinel_are_reached_over_tls() {
    let certificates = Certificates::create().unwrap();
    let tls = authority(&certificates);
    let nodes = certificates.start_cluster().unwrap();
    let urls: Vec<_> = nodes.iter().map(|node| url(node.port())).collect();
    let cluster = client(Servers::Cluster(urls).with_tls(tls.clone()));
    for key in 0..20 {
        cluster.send(redis::cmd("SET").arg(key).arg("x").to_owned()).await.unwrap();
    }
    cluster.pubsub().await.unwrap().subscribe("channel").await.unwrap();

    let [master, sentinel] = certificates.start_with_sentinel().unwrap();
    certificates.ask(master.port(), &["config", "set", "requirepass", PASSWORD]).unwrap();
    let through_sentinel = |node: Option<String>| Servers::Sentinel {
        sentinels: vec![url(sentinel.port())],
        master: server::MASTER.to_owned(),
        node,
    };
    let node = Some(format!("rediss://:{PASSWORD}@main/2"));
    let client = client(through_sentinel(node).with_tls(tls.clone()));
    client.send(redis::cmd("SET").arg("key").arg("x").to_owned()).await.unwrap();
    let keyspace = client.send(redis::cmd("INFO").arg("keyspace").to_owned()).await.unwrap();
    let keyspace: String = redis::FromRedisValue::from_redis_value(keyspace).unwrap();
    assert!(keyspace.contains("db2:keys=1,"), "{keyspace}");
}

#[test]
fn addresses_that_cannot_be_used_are_refused() {
    let certificates = Certificates::create().unwrap();
    let tls = authority(&certificates);
    let secret = |scheme: &str, rest: &str| format!("{scheme}://me:{PASSWORD}@{rest}");
    let sentinel = |sentinels: &[&str], node: Option<&str>| Servers::Sentinel {
        sentinels: sentinels.iter().map(|&url| url.to_owned()).collect(),
        master: "main".to_owned(),
        node: node.map(str::to_owned),
    };
    for servers in [
        Servers::from(secret("redis", "host:port")),
        Servers::from(secret("redis", "host/base")),
        Servers::from(secret("http", "host")),
        Servers::from(secret("rediss", "host/#insecure")),
        // Certificates without TLS.
        Servers::from(secret("redis", "host")).with_tls(tls.clone()),
        Servers::Cluster(vec![secret("redis", "host")]).with_tls(tls.clone()),
        sentinel(&["redis://host"], None).with_tls(tls),
        sentinel(&[], None),
        sentinel(&["redis://one", &secret("redis", "two")], None),
        sentinel(&["redis://one"], Some(&secret("redis", "host/base"))),
    ] {
        let shown = format!("{servers:?}");
        let error = Client::new(servers, TIMEOUT, TIMEOUT).unwrap_err();
        assert!(!format!("{shown} {error} {error:?}").contains(PASSWORD), "{shown}: {error:?}");
    }
}
