//! Alerts of several nodes on a real ledger.

use stampede_ledger::{Database, LedgerConfig, open_with};

use super::*;

/// One of two nodes sends an alert. Its case ends and begins again: it is sent again.
#[tokio::test]
async fn case_that_has_ended_is_told_again() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::Sqlite(folder.path().join("db"));
    let ledger = open_with(&database, LedgerConfig::default()).await.unwrap().ledger;
    let config = AlertConfig { sender: None, repeat_after: Duration::from_secs(3600) };
    let nodes = [(); 2].map(|()| Alerts::new(config.clone(), ledger.clone()));
    let (kind, about) = (AlertKind::ReleaseFailed, "sale 7");
    let raise = async || {
        let mut sent = 0;
        for node in [&nodes[0], &nodes[1], &nodes[0]] {
            sent += u32::from(node.raise(kind, about.to_owned(), "message".to_owned()).await);
        }
        sent
    };
    assert_eq!(raise().await, 1);
    assert_eq!(raise().await, 0);
    for node in &nodes {
        node.clear(kind, about).await;
    }
    assert_eq!(raise().await, 1);
}
