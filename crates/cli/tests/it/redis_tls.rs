//! The tier `shared` on a Redis with TLS, a user, a password and a database number.

use std::process::{Command, Output, Stdio};

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::redis::tls::Certificates;
use stampede_testkit::until;

use crate::shop::{Kind, Shop, Storage, command, verify};

const PASSWORD: &str = "a-very-secret-word";

fn with_files(command: &mut Command, certificates: &Certificates) {
    command.env("STAMPEDE__REDIS__TLS_CA", certificates.ca());
    command.env("STAMPEDE__REDIS__TLS_CERTIFICATE", certificates.client_certificate());
    command.env("STAMPEDE__REDIS__TLS_KEY", certificates.client_key());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_sells_over_tls_and_never_shows_the_password() {
    let certificates = Certificates::create().unwrap();
    let redis = certificates.start("yes").unwrap();
    let ask = |command: &[&str]| certificates.ask(redis.port(), command).unwrap();
    ask(&["acl", "setuser", "shop", "on", &format!(">{PASSWORD}"), "~*", "&*", "+@all"]);
    let url = format!("rediss://shop:{PASSWORD}@127.0.0.1:{}/4", redis.port());
    let storage = Storage::on(Kind::Postgres);
    let log = storage.path().join("log");
    let node = |url: &str| {
        let mut command = command(&storage);
        with_files(&mut command, &certificates);
        command.args(["--tier", "shared"]).env("STAMPEDE__REDIS__URL", url).env("STAMPEDE__LOG__LEVEL", "trace");
        command.stderr(Stdio::from(std::fs::File::options().create(true).append(true).open(&log).unwrap()));
        command
    };

    let shop = Shop::run(node(&url));
    let buyer = shop.log_in(0, 1).await.remove(0);
    let sale = shop.create_sale(1).await;
    let history = Recorder::default();
    assert_eq!(history.buy(&mut shop.client().await, sale, &buyer).await.response, Response::Created);
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 1);
    assert!(shop.stop().success());
    let keyspace = ask(&["info", "keyspace"]);
    assert!(keyspace.contains("db4:keys=") && !keyspace.contains("db0"), "{keyspace}");

    // A wrong password is reported without it. (Demonstration data needs a gate, so the node is started without them.)
    ask(&["acl", "setuser", "shop", "resetpass", ">another-word"]);
    let mut rejected = Command::new(env!("CARGO_BIN_EXE_stampede"));
    rejected.args(node(&url).get_args().filter(|arg| *arg != "--demo"));
    rejected.envs(node(&url).get_envs().filter_map(|(name, value)| Some((name, value?))));
    rejected.stderr(Stdio::from(std::fs::File::options().append(true).open(&log).unwrap()));
    let shop = Shop::run(rejected);
    assert_eq!(shop.client().await.get("/readyz", "").await.unwrap().status, 503);
    until("the reason is logged", async || {
        std::fs::read_to_string(&log).unwrap().contains("Password authentication failed")
    })
    .await;
    assert!(shop.stop().success());

    let mut shown = std::fs::read_to_string(&log).unwrap();
    for args in [["config", "show"], ["config", "check"]] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
        with_files(&mut command, &certificates);
        let output =
            command.args(args).args(["--tier", "shared", "--database", &storage.url()]).args(["--redis", &url]);
        let Output { status, stdout, stderr } = output.output().unwrap();
        shown += &format!("{}{}", String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
        assert!(status.success(), "{shown}");
    }
    assert!(shown.contains(&format!("rediss://***@127.0.0.1:{}/4", redis.port())), "{shown}");
    assert!(!shown.contains(PASSWORD), "{shown}");
}

#[test]
fn invalid_tls_settings_are_reported() {
    let certificates = Certificates::create().unwrap();
    let [ca, certificate, key] = [certificates.ca(), certificates.client_certificate(), certificates.client_key()]
        .map(|path| path.to_str().unwrap().to_owned());
    let plain = format!("redis://me:{PASSWORD}@127.0.0.1");
    let tls = format!("rediss://me:{PASSWORD}@127.0.0.1");
    let insecure = format!("{tls}/0#insecure");
    let not_a_number = format!("{tls}/zero");
    for (url, settings, says) in [
        (&tls, vec![("TLS_CA", "missing.pem")], "missing.pem"),
        (&tls, vec![("TLS_CA", &*key)], "client.key has no certificate in PEM"),
        (&tls, vec![("TLS_CERTIFICATE", &*certificate)], "redis.tls_key"),
        (&tls, vec![("TLS_KEY", &*key)], "redis.tls_certificate"),
        (&tls, vec![("TLS_CERTIFICATE", &*ca), ("TLS_KEY", &*key)], "do not match"),
        (&plain, vec![("TLS_CA", &*ca)], "rediss://"),
        (&insecure, vec![], "#insecure is not supported"),
        (&not_a_number, vec![], "Invalid database number"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
        command.args(["config", "check", "--tier", "shared", "--database", "postgres://x/y", "--redis", url]);
        command.envs(settings.iter().map(|(name, value)| (format!("STAMPEDE__REDIS__{name}"), value)));
        let Output { status, stderr, .. } = command.output().unwrap();
        let error = String::from_utf8(stderr).unwrap();
        assert!(!status.success() && error.contains(says), "{url} {settings:?}: {error}");
        assert!(!error.contains(PASSWORD), "{error}");
    }
}
