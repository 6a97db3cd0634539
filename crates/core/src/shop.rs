//! Shops, vouchers, and the requests that create them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::clock::Timestamp;
use crate::error::Invalid;
use crate::ids::{ShopId, ShopTypeId, VoucherId};
use crate::money::Money;
use crate::sale::{SaleStatus, Window, WindowChange};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShopType {
    pub id: ShopTypeId,
    pub name: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shop {
    pub id: ShopId,
    pub type_id: ShopTypeId,
    pub name: String,
    pub address: String,
}

/// An ordinary voucher is always available; a flash-sale voucher only through its sale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum VoucherKind {
    Ordinary,
    FlashSale,
}

impl VoucherKind {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ordinary => "ordinary",
            Self::FlashSale => "flash_sale",
        }
    }

    pub fn parse(text: &str) -> Option<Self> {
        [Self::Ordinary, Self::FlashSale].into_iter().find(|kind| kind.as_str() == text)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Voucher {
    pub id: VoucherId,
    pub shop: ShopId,
    pub kind: VoucherKind,
    pub title: String,
    pub subtitle: String,
    pub rules: String,
    pub price: Money,
    pub worth: Money,
    /// Visitors see only what is on the shelf.
    pub on_shelf: bool,
}

/// A shop to be created.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewShop {
    pub type_id: ShopTypeId,
    #[schema(min_length = 1, max_length = 128)]
    pub name: String,
    #[serde(default)]
    #[schema(max_length = 255)]
    pub address: String,
}

/// A voucher to be created.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewVoucher {
    pub shop_id: ShopId,
    pub kind: VoucherKind,
    #[schema(min_length = 1, max_length = 255)]
    pub title: String,
    #[serde(default)]
    #[schema(max_length = 255)]
    pub subtitle: String,
    #[serde(default)]
    #[schema(max_length = 1024)]
    pub rules: String,
    #[schema(minimum = 0, maximum = 1_000_000_000)]
    pub price_cents: i64,
    #[schema(minimum = 0, maximum = 1_000_000_000)]
    pub worth_cents: i64,
}

/// A sale to be created.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSale {
    pub voucher_id: VoucherId,
    #[schema(minimum = 1, maximum = 10_000_000)]
    pub stock: u32,
    pub begin: Timestamp,
    pub end: Timestamp,
    /// draft or on_sale
    #[serde(default = "on_sale")]
    pub status: SaleStatus,
    /// How long an order may be unpaid before it is cancelled; 0 without a limit. Without it, the setting
    /// orders.payment_deadline_ms holds.
    #[serde(default)]
    #[schema(maximum = 604_800_000)]
    pub payment_deadline_ms: Option<u32>,
    /// Whether a buyer whose order was cancelled, has expired or was refunded may buy again. Without it, the setting orders.buy_again holds.
    #[serde(default)]
    pub buy_again: Option<bool>,
}

const fn on_sale() -> SaleStatus {
    SaleStatus::OnSale
}

/// The largest stock of a sale: what a gate in memory holds without trouble.
pub const MAX_STOCK: u32 = 10_000_000;

/// The longest time that an order may be unpaid: a week.
pub const MAX_PAYMENT_DEADLINE_MS: u32 = 604_800_000;

/// 9999-12-31: the last day that RFC 3339 can write.
const LAST_MS: i64 = 253_402_214_400_000;

/// Embeds, overrides or isolates the direction of what follows, or changes it as the Arabic letter mark does: a text with it can be
/// shown as another.
const fn is_bidi_control(letter: char) -> bool {
    matches!(letter, '\u{61c}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Separates lines or paragraphs, or begins or ends an annotation, which some programs show and others do not.
const fn is_format_control(letter: char) -> bool {
    matches!(letter, '\u{2028}' | '\u{2029}' | '\u{fff9}'..='\u{fffb}')
}

/// Neither white space nor one of the characters that show nothing at all.
fn is_visible(letter: char) -> bool {
    let blank = matches!(
        letter,
        '\u{ad}' | '\u{115f}' | '\u{1160}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2060}'..='\u{2064}'
            | '\u{2800}' | '\u{3164}' | '\u{feff}' | '\u{ffa0}' | '\u{e0000}'..='\u{e007f}'
    );
    !letter.is_whitespace() && !letter.is_control() && !blank
}

fn check_text(into: &mut Vec<Invalid>, member: &'static str, text: &str, at_least: usize, at_most: usize) {
    let length = text.chars().count();
    if length < at_least || length > at_most {
        into.push(Invalid::new(member, format!("must have {at_least} to {at_most} characters, has {length}")));
    }
    // A name, which must not be empty, is one line; other texts may have several.
    let is_name = at_least > 0;
    if text.chars().any(|c| (c.is_control() && (c != '\n' || is_name)) || is_format_control(c)) {
        into.push(Invalid::new(member, "must not have control characters"));
    }
    if text.chars().any(is_bidi_control) {
        into.push(Invalid::new(member, "must not change the direction of the text"));
    }
    if at_least > 0 && length > 0 && !text.chars().any(is_visible) {
        into.push(Invalid::new(member, "must have something to see"));
    }
}

fn check_money(into: &mut Vec<Invalid>, member: &'static str, cents: i64) -> Money {
    Money::from_cents(cents).unwrap_or_else(|| {
        into.push(Invalid::new(member, format!("must be between 0 and {}", Money::MAX.cents())));
        Money::MAX
    })
}

/// `Err` with all faults, if there are any.
fn into_result(faults: Vec<Invalid>) -> Result<(), Vec<Invalid>> {
    if faults.is_empty() { Ok(()) } else { Err(faults) }
}

/// How many may be added to a sale at once.
pub fn check_top_up(add: u32) -> Result<(), Vec<Invalid>> {
    if (1..=MAX_STOCK).contains(&add) {
        return Ok(());
    }
    Err(vec![Invalid::new("add", format!("must be between 1 and {MAX_STOCK}"))])
}

/// How many may be taken from a sale at once.
pub fn check_reduction(remove: u32) -> Result<(), Vec<Invalid>> {
    if (1..=MAX_STOCK).contains(&remove) {
        return Ok(());
    }
    Err(vec![Invalid::new("remove", format!("must be between 1 and {MAX_STOCK}"))])
}

/// The faults of the times that are given.
fn check_window(into: &mut Vec<Invalid>, WindowChange { begin, end }: WindowChange) {
    if let (Some(begin), Some(end)) = (begin, end)
        && begin >= end
    {
        into.push(Invalid::new("end", "must be after begin"));
    }
    for (member, moment) in [("begin", begin), ("end", end)] {
        if moment.is_some_and(|moment| !(0..LAST_MS).contains(&moment.ms())) {
            into.push(Invalid::new(member, "must be between the years 1970 and 9999"));
        }
    }
}

/// Whether a sale's window may be changed to these times, as far as they alone tell.
pub fn check_window_change(change: WindowChange) -> Result<(), Vec<Invalid>> {
    let mut faults = Vec::new();
    if change.begin.is_none() && change.end.is_none() {
        faults.push(Invalid::new("end", "begin, end or both must be given"));
    }
    check_window(&mut faults, change);
    into_result(faults)
}

impl NewShop {
    pub fn check(&self) -> Result<(), Vec<Invalid>> {
        let mut faults = Vec::new();
        check_text(&mut faults, "name", &self.name, 1, 128);
        check_text(&mut faults, "address", &self.address, 0, 255);
        into_result(faults)
    }
}

impl NewVoucher {
    pub fn check(self, id: VoucherId) -> Result<Voucher, Vec<Invalid>> {
        let mut faults = Vec::new();
        check_text(&mut faults, "title", &self.title, 1, 255);
        check_text(&mut faults, "subtitle", &self.subtitle, 0, 255);
        check_text(&mut faults, "rules", &self.rules, 0, 1024);
        let price = check_money(&mut faults, "price_cents", self.price_cents);
        let worth = check_money(&mut faults, "worth_cents", self.worth_cents);
        into_result(faults)?;
        let Self { shop_id: shop, kind, title, subtitle, rules, .. } = self;
        Ok(Voucher { id, shop, kind, title, subtitle, rules, price, worth, on_shelf: true })
    }
}

impl NewSale {
    pub const fn window(&self) -> Window {
        Window { begin: self.begin, end: self.end }
    }

    pub fn check(&self) -> Result<(), Vec<Invalid>> {
        let mut faults = Vec::new();
        if !(1..=MAX_STOCK).contains(&self.stock) {
            faults.push(Invalid::new("stock", format!("must be between 1 and {MAX_STOCK}")));
        }
        check_window(&mut faults, WindowChange { begin: Some(self.begin), end: Some(self.end) });
        if !matches!(self.status, SaleStatus::Draft | SaleStatus::OnSale) {
            faults.push(Invalid::new("status", "a new sale is draft or on_sale"));
        }
        if self.payment_deadline_ms.is_some_and(|deadline_ms| deadline_ms > MAX_PAYMENT_DEADLINE_MS) {
            let fault = format!("must be at most {MAX_PAYMENT_DEADLINE_MS}");
            faults.push(Invalid::new("payment_deadline_ms", fault));
        }
        into_result(faults)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults(name: &str) -> Vec<Invalid> {
        let shop = NewShop { type_id: ShopTypeId::new(1).unwrap(), name: name.to_owned(), address: String::new() };
        shop.check().err().unwrap_or_default()
    }

    #[test]
    fn names_must_be_visible_and_read_in_one_direction() {
        for good in ["Tea", " Tea ", "茶馆", "بيت الشاي", "e\u{301}", "👨\u{200d}👩"] {
            assert!(faults(good).is_empty(), "{good:?}");
        }
        for bad in [
            "",
            " ",
            "\u{3000}",
            "\u{200b}",
            "\u{feff}\u{a0}",
            "\u{3164}",
            "a\u{202e}b",
            "\u{2067}a\u{2069}",
            "a\nb",
            "a\u{2028}b",
            "a\u{61c}b",
            "a\u{fff9}b\u{fffa}",
            "a\u{fffb}",
        ] {
            assert_eq!(faults(bad).len(), 1, "{bad:?}");
        }
    }
}
