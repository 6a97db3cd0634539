//! Scheduled work of a process that has lost its lock.

use std::time::Duration;

use stampede_core::ports::{Fence, Fenced, ScheduledWork, SessionId, Stores};
use stampede_core::{Phone, User};

use super::accounts::open_session;
use super::own_orders::another_sale;
use super::{NOW, record, sale_of, user};

const fn fence(work: ScheduledWork, token: u64) -> Option<Fence> {
    Some(Fence { work, token })
}

/// A lower token changes nothing; the tokens of different work are separate.
pub async fn lower_fencing_tokens_are_refused(stores: &Stores) {
    use ScheduledWork::{DeleteExpired, IndexOrders};
    let (ledger, accounts) = (&stores.ledger, &stores.accounts);
    let (session, until) = (SessionId([3; 16]), NOW.plus(Duration::from_secs(60)));
    let person = User { id: user(5), phone: Phone::parse("13800138001").unwrap(), nickname: "n".into() };
    open_session(stores, &person, 3, NOW, until).await;
    let exists = async || accounts.session(session, NOW).await.unwrap().is_some();
    let after = until.plus(Duration::from_secs(1));
    let delete = async |token, now| accounts.delete_expired(fence(DeleteExpired, token), now).await.unwrap();
    assert_eq!(delete(10, NOW).await, Fenced::Done(0));
    assert_eq!(delete(12, NOW).await, Fenced::Done(0));
    assert_eq!(delete(11, after).await, Fenced::Superseded);
    assert!(exists().await, "nothing was deleted");
    assert_eq!(delete(12, NOW).await, Fenced::Done(0), "the holder goes on");

    let sale = sale_of(stores, 10).await;
    another_sale(stores, 1).await;
    record(stores, sale, &[(1, 1), (2, 2)]).await;
    let over = ledger.sale(sale).await.unwrap().unwrap().window.end.plus(Duration::from_millis(1));
    let index = async |token| ledger.index_orders(fence(IndexOrders, token), over, 1).await.unwrap();
    assert_eq!(index(7).await, Fenced::Done(true), "another work has another token");
    assert_eq!(index(6).await, Fenced::Superseded);
    assert_eq!(index(8).await, Fenced::Done(true));

    // Of two processes at once, the one with the lower token either came first or was refused.
    let (low, high) = tokio::join!(delete(20, NOW), delete(21, after));
    assert!(matches!(low, Fenced::Done(0) | Fenced::Superseded), "{low:?}");
    assert!(matches!(high, Fenced::Done(_)), "{high:?}");
    assert_eq!(delete(20, after).await, Fenced::Superseded);
    assert!(!exists().await);
    assert_eq!(ledger.orders_of(user(1), None, 10).await.unwrap().len(), 1);
}
