//! Flags, settings, the banner, the data directory, and shutdown.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Client, Process};

use crate::shop::{Shop, Storage, command, temporary_storage, verify};

fn stampede(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stampede")).args(arguments).output().unwrap()
}

fn fails(arguments: &[&str]) -> String {
    let output = stampede(arguments);
    assert!(!output.status.success(), "{arguments:?} should fail");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn help_lists_flags_and_errors_name_the_mistake() {
    let help = String::from_utf8(stampede(&["serve", "--help"]).stdout).unwrap();
    for word in ["--config", "--tier", "--database", "--data-dir", "--listen", "--admin-listen", "--demo", "STAMPEDE__"]
    {
        assert!(help.contains(word), "{word} is not in\n{help}");
    }
    let storage = temporary_storage();
    let dir = storage.path().to_str().unwrap();
    let error = fails(&["serve", "--data-dir", dir, "--tier", "huge"]);
    assert!(error.contains("huge"), "{error}");
    let error = fails(&["serve", "--data-dir", dir, "--database", "oracle:x"]);
    assert!(error.contains("oracle:x"), "{error}");
    let error = fails(&["serve", "--data-dir", dir, "--demo", "--listen", "0.0.0.0:0"]);
    assert!(error.contains("loopback"), "{error}");
    let settings = storage.path().join("s.toml");
    std::fs::write(&settings, "[http]\nmax_conections = 1\n").unwrap();
    let error = fails(&["serve", "--data-dir", dir, "--config", settings.to_str().unwrap()]);
    assert!(error.contains("max_conections"), "{error}");
    let output = Command::new(env!("CARGO_BIN_EXE_stampede"))
        .args(["serve", "--data-dir", dir])
        .env("STAMPEDE__BUY__MAX_BACH", "1")
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("max_bach"), "{error}");
    let output = Command::new(env!("CARGO_BIN_EXE_stampede"))
        .args(["serve", "--data-dir", dir])
        .env("STAMPEDE_ADMIN_TOKEN", "short")
        .output()
        .unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("32") && !error.contains("short"), "{error}");
}

/// An argument is visible to every user of the machine, so it must not contain a secret.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admin_token_is_read_from_a_file_or_the_environment() {
    for command in ["bench", "check"] {
        let error = fails(&[command, "--target", "http://127.0.0.1:1", "--admin-token", "on-the-command-line"]);
        assert!(error.contains("unexpected argument"), "{command}: {error}");
        let missing = "no-such-token-file";
        let error = fails(&[command, "--target", "http://127.0.0.1:1", "--admin-token-file", missing]);
        assert!(error.contains(missing), "{command}: {error}");
        let mut without = Command::new(env!("CARGO_BIN_EXE_stampede"));
        without.args([command, "--target", "http://127.0.0.1:1"]).env_remove("STAMPEDE_ADMIN_TOKEN");
        let error = String::from_utf8(without.output().unwrap().stderr).unwrap();
        assert!(error.contains("--admin-token-file") && error.contains("STAMPEDE_ADMIN_TOKEN"), "{command}: {error}");
    }
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    shop.create_sale(1).await;
    let file = storage.path().join("token");
    std::fs::write(&file, format!("{}\n", crate::shop::TOKEN)).unwrap();
    let target = format!("http://{}", shop.address);
    let checking = tokio::task::spawn_blocking(move || {
        let mut check = Command::new(env!("CARGO_BIN_EXE_stampede"));
        check.args(["check", "--json", "--target", &target, "--admin-token-file"]).arg(file);
        // The file takes precedence over the environment.
        check.env("STAMPEDE_ADMIN_TOKEN", "another-token").output().unwrap()
    });
    let output = checking.await.unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn migrate_creates_the_tables_for_serve() {
    let storage = temporary_storage();
    let dir = storage.path().join("new");
    for _ in 0..2 {
        let output = stampede(&["migrate", "--data-dir", dir.to_str().unwrap()]);
        let error = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && error.contains("up to date"), "{error}");
    }
    assert!(dir.join("stampede.db").exists());
    assert!(Shop::open(&Storage::at(&dir)).stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admin_token_is_created_once_and_readable_by_its_owner_only() {
    let storage = temporary_storage();
    let dir = storage.path().join("data");
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let mut command = command(&Storage::at(&dir));
        command.env_remove("STAMPEDE_ADMIN_TOKEN");
        let shop = Shop::run(command);
        let path = dir.join("admin-token");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        let token = std::fs::read_to_string(path).unwrap().trim().to_owned();
        let reply = shop.client().await.get("/admin/v1/sales", &token).await.unwrap();
        assert_eq!(reply.status, 200);
        tokens.push(token);
        assert!(shop.stop().success());
    }
    assert_eq!(tokens[0], tokens[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn second_server_on_the_same_data_or_port_fails() {
    let storage = temporary_storage();
    let shop = Shop::open(&storage);
    let error = fails(&["serve", "--data-dir", storage.path().to_str().unwrap(), "--listen", "127.0.0.1:0"]);
    assert!(error.contains("another stampede"), "{error}");
    let other = crate::shop::temporary_storage();
    let database = format!("sqlite:{}", storage.path().join("stampede.db").display());
    let dir = other.path().to_str().unwrap();
    let error = fails(&["serve", "--data-dir", dir, "--database", &database, "--listen", "127.0.0.1:0"]);
    assert!(error.contains("another stampede"), "{error}");
    let taken = shop.address.to_string();
    let error = fails(&["serve", "--data-dir", other.path().to_str().unwrap(), "--listen", &taken]);
    assert!(error.contains(&taken), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn separate_admin_listener_removes_admin_routes_from_buyers() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    command.args(["--admin-listen", "127.0.0.1:0"]);
    let mut process = Process::start(command).unwrap();
    let address = |word: &'static str, end: &'static str| {
        move |line: &str| {
            line.trim().strip_prefix(word)?.trim().strip_prefix("http://")?.split_once(end)?.0.parse().ok()
        }
    };
    let buyers = process.wait_for(Duration::from_secs(30), address("open", "/")).unwrap();
    let admin = process.wait_for(Duration::from_secs(30), address("admin", "/admin")).unwrap();
    let mut buyers = Client::connect(buyers).await.unwrap();
    let mut admin = Client::connect(admin).await.unwrap();
    for path in ["/admin/v1/sales", "/metrics"] {
        assert_eq!(buyers.get(path, crate::shop::TOKEN).await.unwrap().status, 404);
        assert_eq!(admin.get(path, crate::shop::TOKEN).await.unwrap().status, 200);
    }
    assert_eq!(admin.get("/v1/sales", "").await.unwrap().status, 404);
    for client in [&mut admin, &mut buyers] {
        assert_eq!(client.get("/healthz", "").await.unwrap().status, 200);
        assert_eq!(client.get("/readyz", "").await.unwrap().status, 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn demo_has_three_sales_and_a_page() {
    let storage = temporary_storage();
    for _ in 0..2 {
        let shop = Shop::open(&storage);
        let mut client = shop.client().await;
        let sales = client.get("/v1/sales", "").await.unwrap().json();
        let mut states: Vec<_> =
            sales["sales"].as_array().unwrap().iter().map(|sale| sale["state"].to_string()).collect();
        states.sort();
        assert_eq!(states, ["\"not_started\"", "\"on\"", "\"sold_out\""]);
        let page = client.get("/", "").await.unwrap();
        assert!(page.header("content-type").starts_with("text/html"));
        assert!(page.header("content-security-policy").contains("default-src 'none'"));
        let text = String::from_utf8(page.body.to_vec()).unwrap();
        for asset in ["/assets/app.js", "/assets/style.css"] {
            assert!(text.contains(asset), "the page does not use {asset}");
            assert_eq!(client.get(asset, "").await.unwrap().status, 200);
        }
        assert!(shop.stop().success());
    }
}

/// On SIGTERM under load, every confirmed order is recorded, and every admitted one is confirmed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn graceful_stop_records_every_admitted_order() {
    let storage = temporary_storage();
    let mut command = command(&storage);
    // A slow ledger, so that orders are being recorded when the server stops.
    command.env("STAMPEDE_FAILPOINTS", "record.begin=pause:50");
    let mut shop = Shop::run(command);
    let sale = shop.create_sale(1000).await;
    let buyers = shop.log_in(0, 100).await;
    let history = Arc::new(Recorder::default());
    let tasks: Vec<_> = buyers
        .into_iter()
        .map(|buyer| {
            let (history, address) = (history.clone(), shop.address);
            tokio::spawn(async move {
                let Ok(mut client) = Client::connect(address).await else { return Response::Unknown };
                history.buy(&mut client, sale, &buyer).await.response
            })
        })
        .collect();
    while history.count(Response::Created) == 0 {
        tokio::task::yield_now().await;
    }
    shop.process.signal("TERM").unwrap();
    let mut bought = 0;
    for task in tasks {
        bought += usize::from(task.await.unwrap() == Response::Created);
    }
    assert!(shop.process.wait(Duration::from_secs(30)).unwrap().success());
    let sold = verify(&history, &storage, &[], sale).await;
    assert_eq!(sold, bought, "every admitted order is confirmed and in the ledger");
    assert!(bought > 1, "the server stopped before any order was being recorded");
}

#[test]
fn config_show_hides_passwords_and_config_check_validates() {
    let url = "postgres://me:secret-word@127.0.0.1/shop";
    let shown =
        String::from_utf8(stampede(&["config", "show", "--database", url, "--listen", "127.0.0.1:9"]).stdout).unwrap();
    assert!(shown.contains("postgres://me:***@127.0.0.1/shop") && shown.contains("127.0.0.1:9"), "{shown}");
    assert!(!shown.contains("secret-word") && shown.contains("[http]"), "{shown}");
    assert!(stampede(&["config", "check"]).status.success());
    let error = fails(&["config", "check", "--database", "mongo://me:secret-word@x/y"]);
    assert!(error.contains("mongo") && !error.contains("secret-word"), "{error}");
    let error = fails(&["config", "check", "--admin-listen", "nowhere"]);
    assert!(error.contains("nowhere"), "{error}");
    for shell in ["bash", "zsh", "fish"] {
        let script = String::from_utf8(stampede(&["completions", shell]).stdout).unwrap();
        assert!(script.contains("admin-listen"), "{shell}");
    }
}
