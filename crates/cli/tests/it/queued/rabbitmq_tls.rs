//! The tier `queued` with RabbitMQ over TLS, with client certificates, a user, a password and a virtual host.

use std::fs::File;
use std::process::{Command, Output};
use std::sync::Arc;

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::redis::tls::Certificates;
use stampede_testkit::{Server, free_port, rabbitmq, redis};

use super::Consumers;
use super::rabbitmq::with_broker;
use crate::shared::Nodes;
use crate::shop::{Kind, Shop, Storage};

const PASSWORD: &str = "a-very-secret-word";

/// A broker that accepts TLS only from clients with a certificate.
struct Broker {
    server: Server,
    certificates: Certificates,
    tls_port: u16,
}

impl Broker {
    fn start() -> Self {
        let (certificates, tls_port) = (Certificates::create().unwrap(), free_port().unwrap());
        let file = |option: &str, path: std::path::PathBuf| format!("ssl_options.{option} = {}", path.display());
        let server = rabbitmq::start_with(&[
            format!("listeners.ssl.1 = 127.0.0.1:{tls_port}"),
            file("cacertfile", certificates.ca()),
            file("certfile", certificates.server_certificate()),
            file("keyfile", certificates.server_key()),
            "ssl_options.verify = verify_peer".to_owned(),
            "ssl_options.fail_if_no_peer_cert = true".to_owned(),
        ])
        .unwrap();
        for arguments in [
            &["add_vhost", "shop"][..],
            &["add_user", "me", PASSWORD],
            &["set_permissions", "-p", "shop", "me", ".*", ".*", ".*"],
        ] {
            rabbitmq::control(&server, arguments).unwrap();
        }
        Self { server, certificates, tls_port }
    }

    /// A process that uses this broker over TLS.
    fn with_tls(&self, command: Command) -> Command {
        let mut command = with_broker(self.server.port())(command);
        command.env("STAMPEDE__RABBITMQ__URL", format!("amqps://me:{PASSWORD}@127.0.0.1:{}/shop", self.tls_port));
        command.env("STAMPEDE__RABBITMQ__TLS_CA", self.certificates.ca());
        command.env("STAMPEDE__RABBITMQ__TLS_CERTIFICATE", self.certificates.client_certificate());
        command.env("STAMPEDE__RABBITMQ__TLS_KEY", self.certificates.client_key());
        command
    }
}

/// Orders go through the broker over TLS. A process that does not trust the broker, or that the broker does not trust, logs why, is not
/// ready, and confirms nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn orders_are_queued_over_tls_and_other_authorities_are_refused() {
    let broker = Broker::start();
    let logs = tempfile::tempdir().unwrap();
    let logged = |mut command: Command, log: &str| {
        command.env("STAMPEDE__LOG__LEVEL", "trace,lapin=trace");
        command.stderr(File::options().create(true).append(true).open(logs.path().join(log)).unwrap());
        command
    };
    let nodes = Nodes::start_on(Kind::Postgres, redis::start().unwrap(), 1, |_, command| {
        let mut command = logged(broker.with_tls(command), "node");
        command.env("STAMPEDE__QUEUE__CONSUME", "false");
        command
    });
    let everyone = nodes.shops[0].log_in(0, 6).await;
    let sale = nodes.create_sale(3).await;
    let history = Arc::new(Recorder::default());
    nodes.storm(&history, sale, &everyone[..3], 1).await;
    assert_eq!(history.count(Response::Pending), 3);
    let listed = rabbitmq::control(&broker.server, &["list_connections", "ssl", "user", "vhost"]).unwrap();
    assert!(listed.contains("true\tme\tshop") && !listed.contains("false"), "{listed}");

    let other = Certificates::create().unwrap();
    for (log, settings, reason) in [
        ("other-authority", vec![("TLS_CA", other.ca())], "invalid peer certificate"),
        ("no-authority", vec![("TLS_CA", "".into())], "invalid peer certificate: UnknownIssuer"),
        // With TLS 1.3 the broker may close the connection before the client has read why.
        ("no-certificate", vec![("TLS_CERTIFICATE", "".into()), ("TLS_KEY", "".into())], ""),
    ] {
        let storage = Storage::with(Some(nodes.storages[0].url()));
        let mut command = logged(broker.with_tls(nodes.node(&storage)), log);
        command.envs(settings.iter().map(|(name, value)| (format!("STAMPEDE__RABBITMQ__{name}"), value)));
        let shop = Shop::run(command);
        let logged = std::fs::read_to_string(logs.path().join(log)).unwrap();
        let is_reason = |line: &str| line.contains("cannot connect to RabbitMQ") && line.contains(reason);
        assert!(logged.lines().any(is_reason), "{log}: {logged}");
        let ready = shop.client().await.get("/readyz", "").await.unwrap();
        let body = String::from_utf8(ready.body.to_vec()).unwrap();
        assert!(ready.status == 503 && body.contains("RabbitMQ cannot be used"), "{log}: {} {body}", ready.status);
        let attempt = history.buy(&mut shop.client().await, sale, &everyone[0]).await;
        assert_eq!(attempt.response, Response::Unknown, "nothing is confirmed without the broker");
        assert!(shop.stop().success());
    }

    let consumers = Consumers::start_with(&nodes, 1, |command| logged(broker.with_tls(command), "consumer"));
    nodes.storm(&history, sale, &everyone, 1).await;
    assert_eq!(nodes.verify(&history, sale).await, 3);
    consumers.stop();
    for log in std::fs::read_dir(logs.path()).unwrap() {
        let log = log.unwrap().path();
        let shown = std::fs::read_to_string(&log).unwrap();
        assert!(shown.contains("DEBUG") && !shown.contains(PASSWORD), "{} has the password", log.display());
    }
}

#[test]
fn invalid_tls_settings_are_reported() {
    let certificates = Certificates::create().unwrap();
    let [ca, certificate, key] = [certificates.ca(), certificates.client_certificate(), certificates.client_key()]
        .map(|path| path.to_str().unwrap().to_owned());
    let (plain, tls) = (format!("amqp://me:{PASSWORD}@127.0.0.1"), format!("amqps://me:{PASSWORD}@127.0.0.1"));
    for (url, settings, says) in [
        (&tls, vec![("TLS_CA", "missing.pem")], "missing.pem"),
        (&tls, vec![("TLS_CA", &*key)], "client.key has no certificate in PEM"),
        (&tls, vec![("TLS_CERTIFICATE", &*certificate)], "no key"),
        (&tls, vec![("TLS_KEY", &*key)], "no client certificate"),
        (&tls, vec![("TLS_CERTIFICATE", &*ca), ("TLS_KEY", &*key)], "do not match"),
        (&plain, vec![("TLS_CA", &*ca)], "amqps://"),
    ] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
        command.args(["config", "check", "--tier", "queued", "--queue", "rabbitmq", "--database", "postgres://x/y"]);
        command.args(["--redis", "redis://127.0.0.1", "--amqp", url]);
        command.envs(settings.iter().map(|(name, value)| (format!("STAMPEDE__RABBITMQ__{name}"), value)));
        let Output { status, stderr, .. } = command.output().unwrap();
        let error = String::from_utf8(stderr).unwrap();
        assert!(!status.success() && error.contains(says), "{url} {settings:?}: {error}");
        assert!(!error.contains(PASSWORD), "{error}");
    }
}
