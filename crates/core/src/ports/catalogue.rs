//! Shops and vouchers.

use std::fmt;

use async_trait::async_trait;

use super::{CreateOutcome, Result};
use crate::clock::Timestamp;
use crate::ids::{ShopId, ShopTypeId, VoucherId};
use crate::shop::{Shop, ShopType, Voucher};

/// A query for shops.
#[derive(Debug, Clone, Default)]
pub struct ShopFilter {
    pub type_id: Option<ShopTypeId>,
    /// A part of the name, ignoring case.
    pub name: Option<String>,
    pub before: Option<ShopId>,
    pub limit: u32,
}

/// A page of shops, newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShopPage {
    pub shops: Vec<Shop>,
    /// The next page begins before this id; `None` at the end. A search examines a bounded number of shops, so a page may be short
    /// or empty without being the last.
    pub next: Option<ShopId>,
}

/// The result of replacing a row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplaceOutcome<T> {
    /// Contains the previous value.
    Done(T),
    NotFound,
    /// The row it refers to does not exist.
    ParentMissing,
}

/// Shops and vouchers.
#[async_trait]
pub trait Catalogue: Send + Sync + fmt::Debug {
    /// All shop types, in display order.
    async fn shop_types(&self) -> Result<Vec<ShopType>>;

    async fn create_shop(&self, shop: &Shop) -> Result<CreateOutcome>;

    /// Replaces the shop with the same id.
    async fn edit_shop(&self, shop: &Shop) -> Result<ReplaceOutcome<Shop>>;

    async fn shop(&self, id: ShopId) -> Result<Option<Shop>>;

    async fn shops(&self, filter: &ShopFilter) -> Result<ShopPage>;

    /// The ids of shops above `after`, by rising id.
    async fn shop_ids(&self, after: Option<ShopId>, limit: u32) -> Result<Vec<ShopId>>;

    /// The shops with a sale that ends after `end_after`, the next to end first.
    async fn shops_with_sales(&self, end_after: Timestamp, limit: u32) -> Result<Vec<ShopId>>;

    async fn create_voucher(&self, voucher: &Voucher) -> Result<CreateOutcome>;

    /// Sets whether the voucher is shown to visitors.
    async fn shelve_voucher(&self, id: VoucherId, on_shelf: bool) -> Result<ReplaceOutcome<Voucher>>;

    /// Replaces the voucher with the same id, except for its shop, its kind and `on_shelf`.
    async fn edit_voucher(&self, voucher: &Voucher) -> Result<ReplaceOutcome<Voucher>>;

    async fn voucher(&self, id: VoucherId) -> Result<Option<Voucher>>;

    /// A shop's vouchers, newest first, at most 100 of them.
    async fn vouchers_of(&self, shop: ShopId) -> Result<Vec<Voucher>>;
}
