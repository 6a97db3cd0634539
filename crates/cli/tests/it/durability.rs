//! Nothing is promised before it is on the disk. `kill -9` does not show that: the kernel keeps what was written. So we watch
//! the system calls: between reading a request and writing its 201, a sync of the write-ahead log must have returned.

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use stampede_testkit::count;

use crate::history::{Heard, History};
use crate::shop::{Place, Shop, folder, serving};

/// Sells a few, one after the other and then many at once, under strace; returns what strace wrote.
async fn traced(plant: Option<&str>) -> String {
    let folder = folder();
    let log = folder.path().join("strace.log");
    let mut strace = Command::new("strace");
    strace
        .args(["-D", "-f", "-y", "-s", "40", "-e", "trace=read,recvfrom,write,writev,sendto,fsync,fdatasync", "-o"])
        .arg(&log)
        .arg(env!("CARGO_BIN_EXE_stampede"));
    let mut command = serving(strace, &Place::at(&folder.path().join("data")));
    if let Some(bug) = plant {
        command.env("STAMPEDE_PLANTED_BUGS", bug);
    }
    let mut shop = Shop::run(command);
    let people = count(200, 40);
    let sale = shop.put_up(people as u32).await;
    let buyers = shop.log_in(0, people).await;
    let (one_by_one, at_once) = buyers.split_at(buyers.len() / 2);
    let history = std::sync::Arc::new(History::default());
    let mut client = shop.client().await;
    for buyer in one_by_one {
        assert_eq!(history.buy(&mut client, sale, buyer).await.heard, Heard::Created);
    }
    let mut crowd = Vec::new();
    for buyer in at_once {
        let (history, buyer, mut client) = (history.clone(), buyer.clone(), shop.client().await);
        crowd.push(tokio::spawn(async move { history.buy(&mut client, sale, &buyer).await }));
    }
    for one in crowd {
        assert_eq!(one.await.unwrap().heard, Heard::Created);
    }
    let place = Place::at(&folder.path().join("data"));
    assert_eq!(history.check(&place, &[&shop], sale).await, people as usize);
    shop.process.signal("TERM").unwrap();
    assert!(shop.process.wait(Duration::from_secs(30)).unwrap().success());
    read_whole(&log)
}

/// strace writes a last line for the process when it has written everything else.
fn read_whole(log: &Path) -> String {
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

/// How many 201s were written, each after a sync of the log that returned after its request was read; or the first that was not.
fn promises_kept(trace: &str) -> Result<usize, String> {
    let (mut read_at, mut reading, mut syncing) = (HashMap::new(), HashMap::new(), HashSet::new());
    let (mut synced_at, mut kept) = (None, 0);
    for (at, line) in trace.lines().enumerate() {
        // `1234 fdatasync(9</…/stampede.db-wal>) = 0`, or in two lines if another thread came in between:
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
async fn the_log_is_synced_before_a_201_leaves() {
    let trace = traced(None).await;
    assert_eq!(promises_kept(&trace), Ok(count(200, 40) as usize));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planted_synchronous_off_is_caught() {
    let trace = traced(Some("sync-off")).await;
    assert!(trace.contains("\"HTTP/1.1 201"), "it sells, as if nothing were wrong");
    promises_kept(&trace).unwrap_err();
}
