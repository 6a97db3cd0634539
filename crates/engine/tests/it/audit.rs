//! The audit log while the ledger fails.

use stampede_core::ports::AuditFilter;
use stampede_core::*;
use stampede_engine::{Action, Caller, Error};

use crate::outages::faulty;
use crate::tier::CONFIG;

/// An action whose first audit row cannot be written is not carried out. An action without its second row is shown as such.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_action_is_carried_out_without_an_audit_row() {
    let (tier, faults) = faulty(CONFIG, 5).await;
    let caller = Caller { name: "alice".into(), address: "192.0.2.1".parse().unwrap(), request_id: "r".into() };
    let (engine, sale) = (&tier.engine, tier.sale);
    let set = async |status| {
        let action = Action::new("set", format!("sale {sale}"));
        engine.audited(&caller, action, engine.set_sale_status(sale, status, None)).await.map(|view| view.sale.status)
    };
    let log = async || engine.audit_log(AuditFilter { limit: 10, ..AuditFilter::default() }).await.unwrap();

    faults.audits.lock().unwrap().extend([false]);
    assert!(matches!(set(SaleStatus::Paused).await, Err(Error::Ledger(_))));
    assert_eq!(tier.stores.ledger.sale(sale).await.unwrap().unwrap().status, SaleStatus::OnSale, "not done");
    assert!(log().await.is_empty());

    faults.audits.lock().unwrap().extend([true, false]);
    assert_eq!(set(SaleStatus::Paused).await.unwrap(), SaleStatus::Paused);
    let record = log().await.remove(0);
    assert_eq!((record.target, record.outcome.is_none()), (format!("sale {sale}"), true));

    assert!(matches!(set(SaleStatus::Draft).await, Err(Error::Illegal(_))));
    let record = log().await.remove(0);
    let outcome = record.outcome.unwrap();
    assert_eq!((outcome.word.as_str(), outcome.changes.len()), ("illegal_step", 0));
    assert_eq!(outcome.error.as_deref(), Some("a sale that is paused cannot become draft"));
}
