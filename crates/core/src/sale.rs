//! A sale: a number of vouchers of one kind, in a time window.

use serde::{Deserialize, Serialize};

use crate::admission::Refusal;
use crate::clock::Timestamp;
use crate::ids::{Epoch, SaleId, VoucherId};
use crate::money::Money;
use crate::words::words;

words! {
    /// What the operator has decided about a sale.
    SaleStatus {
        /// Being prepared: buyers do not see it.
        Draft = "draft",
        /// On sale inside its window.
        OnSale = "on_sale",
        Paused = "paused",
        /// Closed for good, whatever the window says.
        Ended = "ended",
    }
}

impl SaleStatus {
    /// An ended sale stays ended, a published one is never a draft again.
    pub const fn may_become(self, next: Self) -> bool {
        use SaleStatus::{Draft, Ended, OnSale, Paused};
        matches!((self, next), (Draft, OnSale | Ended) | (OnSale, Paused | Ended) | (Paused, OnSale | Ended))
    }
}

words! {
    /// Whether a gate on a server has the sale. The tier `solo` does not use it: its gate is a part of its process.
    SalePhase {
        /// Open in the gate, under the sale's epoch.
        Open = "open",
        /// A rebuild of the gate has begun.
        Closing = "closing",
        /// The gate is being loaded with the sale's marks, under the sale's epoch.
        Loading = "loading",
    }
}

/// The sale is on in `begin..end`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    pub begin: Timestamp,
    pub end: Timestamp,
}

/// A change of a sale's window. What is `None` stays as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WindowChange {
    pub begin: Option<Timestamp>,
    pub end: Option<Timestamp>,
}

/// Why the window of a sale cannot be changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WindowFault {
    #[error("the sale has ended")]
    Ended,
    #[error("the sale has begun, so its begin cannot be changed")]
    Begun,
    #[error("the new end must be in the future; to stop the sale now, end it")]
    EndIsPast,
    #[error("the end must be after the begin")]
    Empty,
}

impl WindowChange {
    /// The window of the sale after the change.
    ///
    /// # Errors
    /// If the sale cannot be changed like this at `now`.
    pub fn apply(self, sale: &Sale, now: Timestamp) -> Result<Window, WindowFault> {
        let before = sale.window;
        let after = Window { begin: self.begin.unwrap_or(before.begin), end: self.end.unwrap_or(before.end) };
        // Nobody can have bought a draft.
        let has_begun = sale.status != SaleStatus::Draft && now >= before.begin;
        if sale.status == SaleStatus::Ended || now >= before.end {
            Err(WindowFault::Ended)
        } else if has_begun && after.begin != before.begin {
            Err(WindowFault::Begun)
        } else if now >= after.end {
            Err(WindowFault::EndIsPast)
        } else if after.begin >= after.end {
            Err(WindowFault::Empty)
        } else {
            Ok(after)
        }
    }
}

/// Why the sale is closed at `now`, whatever its stock; `None` if it is open.
pub fn closed_reason(status: SaleStatus, window: Window, now: Timestamp) -> Option<Refusal> {
    match status {
        SaleStatus::Draft => Some(Refusal::NoSuchSale),
        SaleStatus::Ended => Some(Refusal::Ended),
        _ if now >= window.end => Some(Refusal::Ended),
        SaleStatus::Paused => Some(Refusal::Paused),
        SaleStatus::OnSale if now < window.begin => Some(Refusal::NotStarted),
        SaleStatus::OnSale => None,
    }
}

/// A sale as it is in the ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sale {
    pub id: SaleId,
    pub voucher: VoucherId,
    pub title: String,
    pub price: Money,
    /// What the voucher is worth in the shop.
    pub worth: Money,
    pub status: SaleStatus,
    pub window: Window,
    /// How many there are in all.
    pub total: u32,
    /// How many the gate may have marked at once. Equal to `total` at rest.
    pub cap: u32,
    /// How many live orders there are.
    pub sold: u32,
    pub epoch: Epoch,
    pub phase: SalePhase,
    /// Rises with every edit: the gate takes an edit only if its version is higher.
    pub version: i64,
    /// How many orders were live and died. A process that sees it rise knows that its marks may be out of date, even if as many are sold
    /// as before.
    pub released: i64,
    /// How long an order may be unpaid; 0 without a limit.
    #[serde(default)]
    pub payment_deadline_ms: u32,
    /// Whether a buyer whose order has ended may buy again.
    #[serde(default = "buys_again")]
    pub buy_again: bool,
}

const fn buys_again() -> bool {
    true
}

words! {
    /// What a visitor sees of a sale.
    SaleState {
        NotStarted = "not_started",
        On = "on",
        SoldOut = "sold_out",
        Paused = "paused",
        Ended = "ended",
    }
}

impl SaleState {
    /// `None` for a sale that visitors do not see.
    pub fn of(status: SaleStatus, window: Window, now: Timestamp, remaining: u32) -> Option<Self> {
        match closed_reason(status, window, now) {
            Some(Refusal::NoSuchSale) => None,
            Some(Refusal::NotStarted) => Some(Self::NotStarted),
            Some(Refusal::Paused) => Some(Self::Paused),
            Some(Refusal::Ended) => Some(Self::Ended),
            Some(Refusal::SoldOut) => Some(Self::SoldOut),
            None if remaining == 0 => Some(Self::SoldOut),
            None => Some(Self::On),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_is_half_open() {
        let at = Timestamp::from_ms;
        let window = Window { begin: at(10), end: at(20) };
        let on = |ms| closed_reason(SaleStatus::OnSale, window, at(ms));
        assert_eq!(on(9), Some(Refusal::NotStarted));
        assert_eq!(on(10), None);
        assert_eq!(on(19), None);
        assert_eq!(on(20), Some(Refusal::Ended));
        assert_eq!(closed_reason(SaleStatus::Paused, window, at(15)), Some(Refusal::Paused));
        assert_eq!(closed_reason(SaleStatus::Paused, window, at(20)), Some(Refusal::Ended));
        assert_eq!(closed_reason(SaleStatus::Draft, window, at(15)), Some(Refusal::NoSuchSale));
    }

    #[test]
    fn window_changes_until_the_end_and_its_begin_until_the_begin() {
        let at = Timestamp::from_ms;
        let price = Money::from_cents(1).unwrap();
        let sale = |status| Sale {
            id: SaleId::new(1).unwrap(),
            voucher: VoucherId::new(1).unwrap(),
            title: String::new(),
            price,
            worth: price,
            status,
            window: Window { begin: at(10), end: at(20) },
            total: 1,
            cap: 1,
            sold: 0,
            epoch: Epoch(1),
            phase: SalePhase::Open,
            version: 1,
            released: 0,
            payment_deadline_ms: 0,
            buy_again: true,
        };
        let change = |status, now, begin: Option<i64>, end: Option<i64>| {
            let change = WindowChange { begin: begin.map(at), end: end.map(at) };
            change.apply(&sale(status), at(now)).map(|window| (window.begin.ms(), window.end.ms()))
        };
        let on = SaleStatus::OnSale;
        assert_eq!(change(on, 5, Some(4), None), Ok((4, 20)), "it begins now");
        assert_eq!(change(on, 9, Some(15), Some(30)), Ok((15, 30)));
        assert_eq!(change(on, 10, Some(11), None), Err(WindowFault::Begun));
        assert_eq!(change(on, 10, Some(10), Some(11)), Ok((10, 11)), "the same begin is no change");
        assert_eq!(change(SaleStatus::Draft, 10, Some(11), None), Ok((11, 20)));
        assert_eq!(change(on, 15, None, Some(15)), Err(WindowFault::EndIsPast));
        assert_eq!(change(on, 19, None, Some(30)), Ok((10, 30)));
        assert_eq!(change(on, 20, None, Some(30)), Err(WindowFault::Ended));
        assert_eq!(change(SaleStatus::Paused, 15, None, Some(16)), Ok((10, 16)));
        assert_eq!(change(SaleStatus::Ended, 15, None, Some(30)), Err(WindowFault::Ended));
        assert_eq!(change(on, 5, Some(20), None), Err(WindowFault::Empty));
        assert_eq!(change(on, 5, None, Some(10)), Err(WindowFault::Empty));
    }

    #[test]
    fn status_has_one_spelling() {
        for &status in SaleStatus::ALL {
            assert_eq!(SaleStatus::parse(status.as_str()), Some(status));
            assert!(!status.may_become(SaleStatus::Draft));
            assert!(!SaleStatus::Ended.may_become(status));
        }
        for &phase in SalePhase::ALL {
            assert_eq!(SalePhase::parse(phase.as_str()), Some(phase));
        }
    }
}
