use super::*;

fn file(text: &str) -> (tempfile::NamedTempFile, Flags) {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(&file, text).unwrap();
    let config = Some(file.path().to_owned());
    (file, Flags { config, database: None, data_dir: None })
}

#[test]
fn defaults_are_complete() {
    let settings =
        Settings::load(&Flags { config: None, database: None, data_dir: None }, &ServeFlags::default()).unwrap();
    assert_eq!(settings.database().unwrap().to_string(), "sqlite:data/stampede.db");
    assert_eq!(settings.admin_listen().unwrap(), None);
    // How long buyers may be refused wrongly at most.
    assert!(settings.shield.config().expiry <= std::time::Duration::from_secs(1));
}

#[test]
fn flags_override_the_file_and_the_file_overrides_defaults() {
    let (_file, mut flags) = file("listen = \"127.0.0.1:1\"\n[buy]\nmax_batch = 7\n");
    flags.data_dir = Some("elsewhere".into());
    let serve = ServeFlags { listen: Some("127.0.0.1:2".into()), ..ServeFlags::default() };
    let settings = Settings::load(&flags, &serve).unwrap();
    assert_eq!(settings.listen.port(), 2);
    assert_eq!(settings.buy.max_batch, 7);
    assert_eq!(settings.database().unwrap().to_string(), "sqlite:elsewhere/stampede.db");
}

#[test]
fn invalid_setting_is_named() {
    for (text, name) in [
        ("lisen = \"127.0.0.1:1\"\n", "lisen"),
        ("[buy]\nmax_bach = 7\n", "max_bach"),
        ("[buy]\nper_user = { count = 1, window = 2 }\n", "window"),
        ("[buy]\nmax_batch = \"many\"\n", "max_batch"),
        ("[buy]\nmax_batch = 0\n", "buy.max_batch"),
        ("tier = \"huge\"\n", "huge"),
        ("ids = \"uuid\"\n", "uuid"),
        ("[cache]\njitter = 1.5\n", "cache.jitter"),
        ("[cache]\nttl_ms = 1000\n", "cache.refresh_after_ms"),
        // The ranges of every section are checked.
        ("[redis]\nconnect_timeout_ms = 0\n", "redis.connect_timeout_ms"),
        ("[queue]\nmax_batches = 0\n", "queue.max_batches"),
        ("[rabbitmq]\nheartbeat_ms = 999\n", "rabbitmq.heartbeat_ms"),
        ("[shield]\nexpiry_ms = 0\n", "shield.expiry_ms"),
        ("[admin]\nwrong_tokens_per_address = { count = 0, window_ms = 1 }\n", "admin.wrong_tokens_per_address.count"),
        ("[http]\nmax_connections = 0\n", "http.max_connections"),
        ("[buy]\nmax_batch = 4097\n", "buy.max_batch"),
        ("[login]\nproof_of_work_bits = 33\n", "login.proof_of_work_bits"),
        ("[limits]\nsearches_at_once = 0\n", "limits.searches_at_once"),
        ("[cache]\nmax_entries = 0\n", "cache.max_entries"),
        ("[reconcile]\ninterval_ms = 0\n", "reconcile.interval_ms"),
        ("[alerts]\nrepeat_after_ms = 0\n", "alerts.repeat_after_ms"),
        ("[payments]\nlate = \"sometimes\"\n", "sometimes"),
        ("[events]\nretry_pause_ms = 0\n", "events.retry_pause_ms"),
        ("[events]\nwebhook_url = \"ftp://x\"\n", "events.webhook_url"),
    ] {
        let (_file, flags) = file(text);
        let error = format!("{:#}", Settings::load(&flags, &ServeFlags::default()).unwrap_err());
        assert!(error.contains(name), "{text}: {error}");
    }
}
