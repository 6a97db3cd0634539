//! The fields of what administrators create and edit, so that the audit log contains old and new values.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use stampede_core::{Sale, Shop, Voucher};

/// One value that an action has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Change {
    pub field: String,
    /// Null in what was created.
    pub from: Value,
    pub to: Value,
}

impl Change {
    pub fn new(field: &str, from: impl Into<Value>, to: impl Into<Value>) -> Self {
        Self { field: field.to_owned(), from: from.into(), to: to.into() }
    }
}

/// Something that administrators create and edit, under the names that the API gives to its fields.
pub trait Auditable {
    /// Such as `sale 12`.
    fn name(&self) -> String;
    /// The same fields in the same order every time.
    fn fields(&self) -> Vec<(&'static str, Value)>;
}

impl Auditable for Shop {
    fn name(&self) -> String {
        format!("shop {}", self.id)
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        let Self { id: _, type_id, name, address } = self;
        vec![
            ("type_id", type_id.to_string().into()),
            ("name", name.as_str().into()),
            ("address", address.as_str().into()),
        ]
    }
}

impl Auditable for Voucher {
    fn name(&self) -> String {
        format!("voucher {}", self.id)
    }

    fn fields(&self) -> Vec<(&'static str, Value)> {
        let Self { id: _, shop, kind, title, subtitle, rules, price, worth, on_shelf } = self;
        vec![
            ("shop_id", shop.to_string().into()),
            ("kind", kind.as_str().into()),
            ("title", title.as_str().into()),
            ("subtitle", subtitle.as_str().into()),
            ("rules", rules.as_str().into()),
            ("price_cents", price.cents().into()),
            ("worth_cents", worth.cents().into()),
            ("on_shelf", (*on_shelf).into()),
        ]
    }
}

impl Auditable for Sale {
    fn name(&self) -> String {
        format!("sale {}", self.id)
    }

    /// What administrators decide; the rest follows from orders.
    fn fields(&self) -> Vec<(&'static str, Value)> {
        vec![
            ("voucher_id", self.voucher.to_string().into()),
            ("price_cents", self.price.cents().into()),
            ("begin", self.window.begin.to_string().into()),
            ("end", self.window.end.to_string().into()),
            ("status", self.status.as_str().into()),
            ("total", self.total.into()),
            ("payment_deadline_ms", self.payment_deadline_ms.into()),
            ("buy_again", self.buy_again.into()),
        ]
    }
}
