//! `stampede serve`

use std::io::{IsTerminal as _, Write as _};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use stampede_core::SystemClock;
use stampede_engine::{AlertConfig, Engine, Sender};
use stampede_http::{App, Config, HttpService, Surface, serve};
use stampede_ledger::{Database, LedgerConfig};
use stampede_queue::rabbitmq;
use tokio::net::TcpListener;
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;

use crate::admin_token;
use crate::alerts::AlertDelivery;
use crate::data_dir::{DataDir, lock_database};
use crate::demo_data;
use crate::descriptors;
use crate::reload::Reload;
use crate::sender::Console;
use crate::session_key;
use crate::settings::{Alerts, Flags, Log, LogFormat, Login, SenderKind, ServeFlags, Settings};
use crate::webhook::{Webhook, webhook_secret};

#[derive(Debug, Args)]
pub struct Serve {
    #[command(flatten)]
    flags: Flags,

    #[command(flatten)]
    serve: ServeFlags,

    /// Create demonstration data and show login codes on the console and in the response; only on a loopback address
    #[arg(long)]
    demo: bool,
}

impl Serve {
    pub fn run(self) -> anyhow::Result<()> {
        let settings = Settings::load(&self.flags, &self.serve)?;
        start(self.flags, self.serve, settings, Role::Serve { demo: self.demo })
    }
}

/// What a process is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Serves buyers and administrators.
    Serve { demo: bool },
    /// Records orders from the queue.
    Work,
}

/// Runs until SIGTERM or SIGINT.
pub fn start(flags: Flags, serve: ServeFlags, settings: Settings, role: Role) -> anyhow::Result<()> {
    start_log(&settings.log)?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    // Wake-ups from the database thread arrive in the runtime's global queue, which busy workers poll only at this interval. A whole
    // batch of buyers waits for each of them.
    runtime.global_queue_interval(2).enable_all();
    runtime.build()?.block_on(run(flags, serve, settings, role))
}

async fn run(flags: Flags, serve_flags: ServeFlags, settings: Settings, role: Role) -> anyhow::Result<()> {
    let demo = role == Role::Serve { demo: true };
    let database = settings.database()?;
    // Before anything is opened: a tier that does not fit the database is reported at once.
    let tier = settings.tier(&database)?;
    let ids = settings.ids(&tier)?;
    let admin_listen = settings.admin_listen()?;
    if demo && ![Some(settings.listen), admin_listen].iter().flatten().all(|address| address.ip().is_loopback()) {
        bail!("--demo shows login codes to everyone, so it works only on a loopback address such as 127.0.0.1:8080");
    }
    // Installed first, so that an early signal leads to a graceful stop or a reload as well.
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut hangup = signal(SignalKind::hangup())?;
    let data_dir = DataDir::lock(&settings.data_dir)?;
    let _lock = lock_database(&database)?;
    if admin_token::is_in_data_dir(&settings) {
        data_dir.create_admin_token()?;
    }
    let (admin_tokens, token_from) = admin_token::read_all(&settings, &data_dir.admin_token())?;
    let session_keys = session_key::load(&settings.login.session_key_file)?;
    let payments = settings.payments.config(demo)?;
    let certificate = settings.http.certificate()?;
    let (trusted_proxies, cors_origins) = (settings.http.trusted_proxies()?, settings.http.cors_origins()?);
    let mut server = settings.http.server(certificate.as_ref())?;
    let addresses = std::iter::once(settings.listen).chain(admin_listen);
    descriptors::lower_connection_limits(&mut server, descriptors::raise_limit(), addresses.clone().count());
    if server.tls.is_none() && trusted_proxies.is_empty() {
        for address in addresses.filter(|address| !address.ip().is_loopback()) {
            tracing::warn!(
                %address,
                "login codes, tokens and orders are sent over the network unencrypted: set http.tls_certificate and http.tls_key, or \
                 use a TLS proxy and add it to http.trusted_proxies"
            );
        }
    }
    let (scheme, drain_timeout) = (if server.tls.is_some() { "https" } else { "http" }, server.drain_timeout);
    // Bound before the database is opened: a port in use is the most common mistake and should be reported at once.
    let listener = bind(settings.listen).await?;
    let admin_listener = match admin_listen {
        Some(address) => Some(bind(address).await?),
        None => None,
    };

    let metrics = start_metrics()?;
    let ledger = LedgerConfig { writes_events: settings.events.are_on() };
    let stores = stampede_ledger::open_with(&database, ledger).await.with_context(|| database.to_string())?;
    let sender = match settings.login.sender {
        _ if demo => Some(Arc::new(Console) as Arc<dyn Sender>),
        SenderKind::Console => Some(Arc::new(Console) as Arc<dyn Sender>),
        SenderKind::Webhook => Some(Arc::new(start_webhook(&settings.login)?) as Arc<dyn Sender>),
        SenderKind::None => None,
    };
    let alerts = AlertConfig {
        sender: Some(Arc::new(alert_delivery(&settings.alerts, sender.clone())?)),
        repeat_after: settings.alerts.repeat_after(),
    };
    let config = settings.engine(tier, ids, session_keys, alerts, payments, demo)?;
    let engine = Engine::start(config, stores, Arc::new(SystemClock), sender).await?;
    if demo {
        demo_data::fill(&engine).await?;
    }

    let config = Config {
        serves_buyers: role != Role::Work,
        admin_tokens,
        wrong_admin_tokens_per_address: settings.admin.wrong_tokens_per_address.into(),
        allow_load_test: settings.allow_load_test,
        trusted_proxies,
        hsts: settings.http.hsts(),
        cors_origins,
        answer_timeout: settings.http.answer_timeout(),
        buy_per_user: settings.buy.per_user.into(),
        buy_per_address: settings.buy.per_address.into(),
        login_per_address: settings.login.per_address.into(),
        reads_per_address: settings.limits.reads_per_address.into(),
        searches_per_address: settings.limits.searches_per_address.into(),
        searches_at_once: settings.limits.searches_at_once,
        probes_per_address: settings.limits.probes_per_address.into(),
        own_per_user: settings.limits.own_per_user.into(),
        limit_memory: settings.limits.memory,
    };
    let app = Arc::new(App::new(engine.clone(), config, metrics));
    let admin_address = admin_listener.as_ref().map(TcpListener::local_addr).transpose()?;
    match role {
        Role::Serve { .. } => {
            print_banner(&settings, &database, scheme, listener.local_addr()?, admin_address, &token_from, demo)?;
        }
        Role::Work => {
            let listen = listener.local_addr()?;
            print_worker_banner(&settings, &database, scheme, listen, admin_address, &token_from)?;
        }
    }

    let admin_token = data_dir.admin_token();
    let reload = Reload { flags, serve: serve_flags, admin_token, app: app.clone(), certificate };
    let stop = CancellationToken::new();
    let surface = match role {
        Role::Work => Surface::Probes,
        Role::Serve { .. } if admin_listener.is_some() => Surface::Buyers,
        Role::Serve { .. } => Surface::Both,
    };
    let service = HttpService::new(app.clone(), surface);
    let mut servers = vec![tokio::spawn(serve(listener, service, server.clone(), stop.clone().cancelled_owned()))];
    if let Some(listener) = admin_listener {
        let service = HttpService::new(app.clone(), Surface::Admin);
        servers.push(tokio::spawn(serve(listener, service, server, stop.clone().cancelled_owned())));
    }

    loop {
        tokio::select! {
            _ = interrupt.recv() => break,
            _ = terminate.recv() => break,
            _ = hangup.recv() => reload.run(),
        }
    }
    tracing::info!("stopping: finishing open requests");
    app.drain();
    stop.cancel();
    for server in servers {
        server.await?;
    }
    if !engine.shut_down(drain_timeout).await {
        bail!("not every order was recorded in time; the next start reads the ledger");
    }
    tracing::info!("stopped");
    Ok(())
}

fn start_webhook(login: &Login) -> anyhow::Result<Webhook> {
    let secret = webhook_secret("STAMPEDE_WEBHOOK_SECRET", "login.webhook_secret_file", &login.webhook_secret_file)?;
    Webhook::start(&login.webhook_url, "login.webhook_url", secret.trim())
}

/// Alerts go to their own webhook, and by the sender of login codes to phones.
fn alert_delivery(alerts: &Alerts, sender: Option<Arc<dyn Sender>>) -> anyhow::Result<AlertDelivery> {
    let phones = alerts.phones()?;
    if !phones.is_empty() && sender.is_none() {
        bail!("alerts.phones needs a sender: set login.sender");
    }
    let webhook = if alerts.webhook_url.expose().is_empty() {
        None
    } else {
        let secret =
            webhook_secret("STAMPEDE_ALERT_SECRET", "alerts.webhook_secret_file", &alerts.webhook_secret_file)?;
        Some(Webhook::start(&alerts.webhook_url, "alerts.webhook_url", secret.trim())?)
    };
    Ok(AlertDelivery { webhook, phones, sender })
}

async fn bind(address: SocketAddr) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address).await.with_context(|| format!("cannot listen on {address}"))
}

fn start_log(log: &Log) -> anyhow::Result<()> {
    let filter =
        EnvFilter::try_new(&log.level).with_context(|| format!("log.level: {:?} is not a level", log.level))?;
    let filter = match broker_client_directive(&log.level, filter.max_level_hint()) {
        Some(directive) => filter.add_directive(directive.parse().context("the log filter of the broker's client")?),
        None => filter,
    };
    let subscriber = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal());
    match log.format {
        LogFormat::Text => subscriber.init(),
        LogFormat::Json => subscriber.json().init(),
    }
    Ok(())
}

/// The directive for the client library of RabbitMQ. What matters of its log is reported by `stampede-queue`, so it is off unless the
/// settings name it; and it is never at the level `trace`, at which it logs passwords.
fn broker_client_directive(level: &str, most_verbose: Option<LevelFilter>) -> Option<&'static str> {
    if !level.contains("lapin") {
        return Some("lapin=off");
    }
    (most_verbose.is_none_or(|level| level == LevelFilter::TRACE)).then_some(rabbitmq::LOG_DIRECTIVE)
}

fn start_metrics() -> anyhow::Result<PrometheusHandle> {
    const SECONDS: [f64; 14] =
        [0.000_1, 0.000_25, 0.000_5, 0.001, 0.002_5, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0];
    const SIZES: [f64; 11] = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];
    let handle = PrometheusBuilder::new()
        .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS)?
        .set_buckets_for_metric(Matcher::Suffix("_size".into()), &SIZES)?
        .install_recorder()?;
    let upkeep = handle.clone();
    tokio::spawn(async move {
        let mut turns = tokio::time::interval(Duration::from_secs(5));
        loop {
            turns.tick().await;
            upkeep.run_upkeep();
        }
    });
    Ok(handle)
}

fn print_banner(
    settings: &Settings,
    database: &Database,
    scheme: &str,
    listen: SocketAddr,
    admin: Option<SocketAddr>,
    token_from: &str,
    demo: bool,
) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "Stampede {}", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "  open      {scheme}://{listen}/")?;
    writeln!(out, "  tier      {}", settings.tier.as_str())?;
    writeln!(out, "  database  {database}")?;
    match admin {
        Some(address) => writeln!(out, "  admin     {scheme}://{address}/admin/v1, {token_from}")?,
        None => writeln!(out, "  admin     {scheme}://{listen}/admin/v1, {token_from}")?,
    }
    if demo {
        writeln!(
            out,
            "  demo      log in with any number such as 13800138000; its code is shown here and on the page"
        )?;
    }
    out.flush()
}

/// A process that records orders has no pages, and routes of administrators only on an address of their own.
fn print_worker_banner(
    settings: &Settings,
    database: &Database,
    scheme: &str,
    listen: SocketAddr,
    admin: Option<SocketAddr>,
    token_from: &str,
) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "Stampede {}, records orders", env!("CARGO_PKG_VERSION"))?;
    writeln!(out, "  health    {scheme}://{listen}/healthz, /readyz")?;
    writeln!(out, "  metrics   {scheme}://{listen}/metrics, {token_from}")?;
    writeln!(out, "  tier      {}", settings.tier.as_str())?;
    writeln!(out, "  database  {database}")?;
    if let Some(address) = admin {
        writeln!(out, "  admin     {scheme}://{address}/admin/v1, {token_from}")?;
    }
    out.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn broker_client_logs_only_if_asked_and_never_frames() {
        for (level, expected) in [
            ("info", Some("lapin=off")),
            ("trace", Some("lapin=off")),
            ("info,lapin=warn", None),
            ("info,lapin=trace", Some(rabbitmq::LOG_DIRECTIVE)),
        ] {
            let filter = EnvFilter::try_new(level).unwrap();
            assert_eq!(broker_client_directive(level, filter.max_level_hint()), expected, "{level}");
        }
    }
}
