//! Writes the new expiries of sessions that were used, and drops sessions that have ended from memory.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::Clock;
use stampede_core::ports::{Accounts, Session};
use tokio::sync::mpsc;

use crate::auth::CachedSession;
use crate::error::describe;
use crate::sessions::Sessions;
use crate::shared_sessions::SharedSessions;

const BATCH: usize = 1000;
const CLEAN_UP_INTERVAL: Duration = Duration::from_secs(60);
/// How often ends that could not be written to Redis are written again.
const WRITE_INTERVAL: Duration = Duration::from_secs(1);

pub(crate) async fn run(
    accounts: Arc<dyn Accounts>,
    clock: Arc<dyn Clock>,
    memory: Arc<Sessions<CachedSession>>,
    shared: Option<Arc<SharedSessions>>,
    mut used_sessions: mpsc::Receiver<Session>,
) {
    let mut clean_up = tokio::time::interval(CLEAN_UP_INTERVAL);
    let mut write_again = tokio::time::interval(WRITE_INTERVAL);
    let mut sessions = Vec::new();
    loop {
        tokio::select! {
            taken = used_sessions.recv_many(&mut sessions, BATCH) => {
                if taken == 0 {
                    return;
                }
                if let Err(error) = accounts.touch_sessions(&sessions).await {
                    // Nothing is lost: a session in use is written again.
                    tracing::warn!(error = describe(&error), "cannot write the expiry of sessions");
                }
                sessions.clear();
            }
            _ = write_again.tick() => {
                if let Some(shared) = &shared {
                    shared.write_again().await;
                }
            }
            _ = clean_up.tick() => {
                let now = clock.now();
                memory.retain(|session| !session.is_long_over(now));
            }
        }
    }
}
