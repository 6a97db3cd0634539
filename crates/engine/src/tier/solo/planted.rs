//! A deliberately wrong reconciler: it sets the gate's cap from the ledger's count while orders are on their way, so that those
//! orders are counted twice. Tests start it to show that they detect it.

use std::sync::Arc;
use std::time::Duration;

use stampede_core::ports::Ledger;
use stampede_gate::MemoryGate;

pub(super) async fn run(ledger: Arc<dyn Ledger>, gate: Arc<MemoryGate>) {
    loop {
        tokio::time::sleep(Duration::from_millis(2)).await;
        for id in gate.sales() {
            let Some(seen) = gate.snapshot(id).filter(|seen| seen.marks > seen.settled) else { continue };
            if let Ok(Some(mut sale)) = ledger.sale(id).await {
                sale.cap = seen.marks + (sale.total - sale.sold);
                sale.version = seen.version + 1;
                gate.edit(&sale);
            }
        }
    }
}
