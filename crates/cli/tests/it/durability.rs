//! No confirmation is sent before the order is on disk. SIGKILL cannot show that, because the kernel keeps written pages. So the system
//! calls are traced: between reading a request and writing its 201, a sync of the write-ahead log must have returned.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::count;

use crate::shop::{Shop, Storage, temporary_storage, verify, wrapped_command};

/// Sells some orders sequentially and then concurrently under strace; returns the trace.
async fn traced(plant: Option<&str>) -> String {
    let storage = temporary_storage();
    let log = storage.path().join("strace.log");
    let mut strace = Command::new("strace");
    strace
        .args(["-D", "-f", "-y", "-s", "40", "-e", "trace=read,recvfrom,write,writev,sendto,fsync,fdatasync", "-o"])
        .arg(&log)
        .arg(env!("CARGO_BIN_EXE_stampede"));
    let mut command = wrapped_command(strace, &Storage::at(&storage.path().join("data")));
    if let Some(bug) = plant {
        command.env("STAMPEDE_PLANTED_BUGS", bug);
    }
    let mut shop = Shop::run(command);
    let buyer_count = count(200, 40);
    let sale = shop.create_sale(buyer_count as u32).await;
    let buyers = shop.log_in(0, buyer_count).await;
    let (one_by_one, at_once) = buyers.split_at(buyers.len() / 2);
    let history = std::sync::Arc::new(Recorder::default());
    let mut client = shop.client().await;
    for buyer in one_by_one {
        assert_eq!(history.buy(&mut client, sale, buyer).await.response, Response::Created);
    }
    let mut tasks = Vec::new();
    for buyer in at_once {
        let (history, buyer, mut client) = (history.clone(), buyer.clone(), shop.client().await);
        tasks.push(tokio::spawn(async move { history.buy(&mut client, sale, &buyer).await }));
    }
    for one in tasks {
        assert_eq!(one.await.unwrap().response, Response::Created);
    }
    let storage = Storage::at(&storage.path().join("data"));
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, buyer_count as usize);
    shop.process.signal("TERM").unwrap();
    assert!(shop.process.wait(Duration::from_secs(30)).unwrap().success());
    read_complete(&log)
}

/// Waits for the last line of the trace.
fn read_complete(log: &Path) -> String {
    let deadline = std::time::Instant::now() + Duration::from_secs(10);
    loop {
        let text = String::from_utf8_lossy(&std::fs::read(log).unwrap()).into_owned();
        if text.lines().any(|line| line.contains("+++ exited with")) && text.ends_with('\n') {
            return text;
        }
        assert!(std::time::Instant::now() < deadline, "strace did not finish its log");
        std::thread::yield_now();
    }
}

/// The number of 201 responses that were written after a sync of the log that returned after their request was read; or the first
/// violation.
fn synced_confirmations(trace: &str) -> Result<usize, String> {
    let (mut read_at, mut reading, mut syncing) = (HashMap::new(), HashMap::new(), HashSet::new());
    let (mut synced_at, mut kept) = (None, 0);
    for (at, line) in trace.lines().enumerate() {
        // `1234 fdatasync(9</…/stampede.db-wal>) = 0`, or in two lines if another thread was traced in between:
        // `1234 fdatasync(9</…/stampede.db-wal> <unfinished ...>` and `1234 <... fdatasync resumed>) = 0`.
        let Some((thread, call)) = line.split_once(' ') else { continue };
        let call = call.trim_start();
        let log_sync = (call.starts_with("fsync(") || call.starts_with("fdatasync(")) && call.contains("-wal>");
        if log_sync && call.contains("<unfinished") {
            syncing.insert(thread);
        }
        let resumed = call.starts_with("<... fdatasync resumed>") || call.starts_with("<... fsync resumed>");
        let returned = log_sync || resumed && syncing.remove(thread);
        if returned && call.ends_with("= 0") {
            synced_at = Some(at);
        }
        let named = call.split_once('(').and_then(|(_, rest)| rest.split_once('>')).map(|(fd, _)| fd);
        let named = named.filter(|fd| fd.contains("<socket:") || fd.contains("<TCP:"));
        let socket = named.or_else(|| call.starts_with("<... ").then(|| reading.remove(thread)).flatten());
        let Some(socket) = socket else { continue };
        if call.contains("<unfinished") {
            reading.insert(thread, socket);
        }
        if line.contains("\"POST /v1/sales/") {
            read_at.insert(socket, at);
        }
        if line.contains("\"HTTP/1.1 201") {
            let Some(asked_at) = read_at.remove(socket) else { continue };
            if synced_at.is_none_or(|synced_at| synced_at < asked_at) {
                return Err(format!("a 201 left before the log was synced: {line}"));
            }
            kept += 1;
        }
    }
    Ok(kept)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wal_is_synced_before_a_201_is_sent() {
    let trace = traced(None).await;
    assert_eq!(synced_confirmations(&trace), Ok(count(200, 40) as usize));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn planted_sync_off_is_detected() {
    let trace = traced(Some("sync-off")).await;
    assert!(trace.contains("\"HTTP/1.1 201"), "orders are still confirmed");
    synced_confirmations(&trace).unwrap_err();
}
