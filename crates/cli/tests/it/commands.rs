//! Flags, settings, the first screen, the data folder, and shutdown.

use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use stampede_testkit::{Client, Process};

use crate::history::{Heard, History};
use crate::shop::{Place, Shop, command, folder};

fn stampede(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_stampede")).args(arguments).output().unwrap()
}

fn fails(arguments: &[&str]) -> String {
    let output = stampede(arguments);
    assert!(!output.status.success(), "{arguments:?} should fail");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn help_teaches_and_mistakes_are_named() {
    let help = String::from_utf8(stampede(&["serve", "--help"]).stdout).unwrap();
    for word in ["--config", "--tier", "--database", "--data-dir", "--listen", "--admin-listen", "--demo", "STAMPEDE__"]
    {
        assert!(help.contains(word), "{word} is not in\n{help}");
    }
    let folder = folder();
    let dir = folder.path().to_str().unwrap();
    let told = fails(&["serve", "--data-dir", dir, "--tier", "huge"]);
    assert!(told.contains("huge"), "{told}");
    let told = fails(&["serve", "--data-dir", dir, "--database", "oracle:x"]);
    assert!(told.contains("oracle:x"), "{told}");
    let told = fails(&["serve", "--data-dir", dir, "--demo", "--listen", "0.0.0.0:0"]);
    assert!(told.contains("loopback"), "{told}");
    let settings = folder.path().join("s.toml");
    std::fs::write(&settings, "[http]\nmax_conections = 1\n").unwrap();
    let told = fails(&["serve", "--data-dir", dir, "--config", settings.to_str().unwrap()]);
    assert!(told.contains("max_conections"), "{told}");
    let output = Command::new(env!("CARGO_BIN_EXE_stampede"))
        .args(["serve", "--data-dir", dir])
        .env("STAMPEDE__BUY__MAX_BACH", "1")
        .output()
        .unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && told.contains("max_bach"), "{told}");
    let output = Command::new(env!("CARGO_BIN_EXE_stampede"))
        .args(["serve", "--data-dir", dir])
        .env("STAMPEDE_ADMIN_TOKEN", "short")
        .output()
        .unwrap();
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && told.contains("32") && !told.contains("short"), "{told}");
}

/// A secret on a command line is visible to every user of the machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bench_and_check_take_the_admin_token_from_a_file_or_the_environment() {
    for command in ["bench", "check"] {
        let told = fails(&[command, "--target", "http://127.0.0.1:1", "--admin-token", "on-the-command-line"]);
        assert!(told.contains("unexpected argument"), "{command}: {told}");
        let missing = "no-such-token-file";
        let told = fails(&[command, "--target", "http://127.0.0.1:1", "--admin-token-file", missing]);
        assert!(told.contains(missing), "{command}: {told}");
        let mut without = Command::new(env!("CARGO_BIN_EXE_stampede"));
        without.args([command, "--target", "http://127.0.0.1:1"]).env_remove("STAMPEDE_ADMIN_TOKEN");
        let told = String::from_utf8(without.output().unwrap().stderr).unwrap();
        assert!(told.contains("--admin-token-file") && told.contains("STAMPEDE_ADMIN_TOKEN"), "{command}: {told}");
    }
    let folder = folder();
    let shop = Shop::open(&folder);
    shop.put_up(1).await;
    let file = folder.path().join("token");
    std::fs::write(&file, format!("{}\n", crate::shop::TOKEN)).unwrap();
    let target = format!("http://{}", shop.address);
    let checking = tokio::task::spawn_blocking(move || {
        let mut check = Command::new(env!("CARGO_BIN_EXE_stampede"));
        check.args(["check", "--json", "--target", &target, "--admin-token-file"]).arg(file);
        // The file goes before the environment.
        check.env("STAMPEDE_ADMIN_TOKEN", "another-token").output().unwrap()
    });
    let output = checking.await.unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn migrate_makes_the_tables_and_serve_finds_them() {
    let folder = folder();
    let dir = folder.path().join("new");
    for _ in 0..2 {
        let output = stampede(&["migrate", "--data-dir", dir.to_str().unwrap()]);
        let told = String::from_utf8(output.stdout).unwrap();
        assert!(output.status.success() && told.contains("up to date"), "{told}");
    }
    assert!(dir.join("stampede.db").exists());
    assert!(Shop::open(&Place::at(&dir)).stop().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_admin_token_is_made_once_and_kept_to_its_owner() {
    let folder = folder();
    let dir = folder.path().join("data");
    let mut tokens = Vec::new();
    for _ in 0..2 {
        let mut command = command(&Place::at(&dir));
        command.env_remove("STAMPEDE_ADMIN_TOKEN");
        let shop = Shop::run(command);
        let path = dir.join("admin-token");
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        let token = std::fs::read_to_string(path).unwrap().trim().to_owned();
        let heard = shop.client().await.get("/admin/v1/sales", &token).await.unwrap();
        assert_eq!(heard.status, 200);
        tokens.push(token);
        assert!(shop.stop().success());
    }
    assert_eq!(tokens[0], tokens[1]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_server_per_data_folder_and_per_port() {
    let folder = folder();
    let shop = Shop::open(&folder);
    let told = fails(&["serve", "--data-dir", folder.path().to_str().unwrap(), "--listen", "127.0.0.1:0"]);
    assert!(told.contains("another stampede"), "{told}");
    let other = crate::shop::folder();
    let database = format!("sqlite:{}", folder.path().join("stampede.db").display());
    let dir = other.path().to_str().unwrap();
    let told = fails(&["serve", "--data-dir", dir, "--database", &database, "--listen", "127.0.0.1:0"]);
    assert!(told.contains("another stampede"), "{told}");
    let taken = shop.address.to_string();
    let told = fails(&["serve", "--data-dir", other.path().to_str().unwrap(), "--listen", &taken]);
    assert!(told.contains(&taken), "{told}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_admin_listener_of_its_own_takes_admin_away_from_buyers() {
    let folder = folder();
    let mut command = command(&folder);
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
async fn the_demonstration_has_three_sales_and_a_page() {
    let folder = folder();
    for _ in 0..2 {
        let shop = Shop::open(&folder);
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

/// Told to stop under load: every answer that was given is kept, and everything that was admitted is settled.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_graceful_stop_settles_what_was_admitted() {
    let folder = folder();
    let mut command = command(&folder);
    // A slow ledger, so that the stop finds orders on their way.
    command.env("STAMPEDE_FAILPOINTS", "record.begin=pause:50");
    let mut shop = Shop::run(command);
    let sale = shop.put_up(1000).await;
    let buyers = shop.log_in(0, 100).await;
    let history = Arc::new(History::default());
    let crowd: Vec<_> = buyers
        .into_iter()
        .map(|buyer| {
            let (history, address) = (history.clone(), shop.address);
            tokio::spawn(async move {
                let Ok(mut client) = Client::connect(address).await else { return Heard::Unknown };
                history.buy(&mut client, sale, &buyer).await.heard
            })
        })
        .collect();
    while history.count(Heard::Created) == 0 {
        tokio::task::yield_now().await;
    }
    shop.process.signal("TERM").unwrap();
    let mut bought = 0;
    for one in crowd {
        bought += usize::from(one.await.unwrap() == Heard::Created);
    }
    assert!(shop.process.wait(Duration::from_secs(30)).unwrap().success());
    let sold = history.check(&folder, &[], sale).await;
    assert_eq!(sold, bought, "all that was admitted was answered and is in the ledger");
    assert!(bought > 1, "the stop came before anything was under way: the test shows nothing");
}

#[test]
fn settings_are_shown_without_passwords_and_checked() {
    let url = "postgres://me:secret-word@127.0.0.1/shop";
    let shown =
        String::from_utf8(stampede(&["config", "show", "--database", url, "--listen", "127.0.0.1:9"]).stdout).unwrap();
    assert!(shown.contains("postgres://me:***@127.0.0.1/shop") && shown.contains("127.0.0.1:9"), "{shown}");
    assert!(!shown.contains("secret-word") && shown.contains("[http]"), "{shown}");
    assert!(stampede(&["config", "check"]).status.success());
    let told = fails(&["config", "check", "--database", "mongo://me:secret-word@x/y"]);
    assert!(told.contains("mongo") && !told.contains("secret-word"), "{told}");
    let told = fails(&["config", "check", "--admin-listen", "nowhere"]);
    assert!(told.contains("nowhere"), "{told}");
    for shell in ["bash", "zsh", "fish"] {
        let script = String::from_utf8(stampede(&["completions", shell]).stdout).unwrap();
        assert!(script.contains("admin-listen"), "{shell}");
    }
}
