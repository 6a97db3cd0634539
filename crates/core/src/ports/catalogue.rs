//! Shops and vouchers.

use std::fmt;

use async_trait::async_trait;

use super::{CreateOutcome, Result};
use crate::ids::{ShopId, ShopTypeId, VoucherId};
use crate::shop::{Shop, ShopType, Voucher};

/// Which shops.
#[derive(Debug, Clone, Default)]
pub struct ShopFilter {
    pub type_id: Option<ShopTypeId>,
    /// A part of the name, whatever its case.
    pub name: Option<String>,
    pub before: Option<ShopId>,
    pub limit: u32,
}

/// Some shops, newest first.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ShopPage {
    pub shops: Vec<Shop>,
    /// Go on before this one; `None` at the end. A search looks at so many shops and no more, so a page may be short, or empty, and
    /// yet not the last.
    pub next: Option<ShopId>,
}

/// What became of replacing something.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplaceOutcome<T> {
    /// What it was before.
    Done(T),
    NotFound,
    /// The row it refers to does not exist.
    ParentMissing,
}

/// Shops and vouchers.
#[async_trait]
pub trait Catalogue: Send + Sync + fmt::Debug {
    /// In the order they are shown.
    async fn shop_types(&self) -> Result<Vec<ShopType>>;

    async fn create_shop(&self, shop: &Shop) -> Result<CreateOutcome>;

    /// Takes the place of the shop with the same id.
    async fn edit_shop(&self, shop: &Shop) -> Result<ReplaceOutcome<Shop>>;

    async fn shop(&self, id: ShopId) -> Result<Option<Shop>>;

    async fn shops(&self, filter: &ShopFilter) -> Result<ShopPage>;

    async fn create_voucher(&self, voucher: &Voucher) -> Result<CreateOutcome>;

    /// Puts the voucher on the shelf or takes it off.
    async fn shelve_voucher(&self, id: VoucherId, on_shelf: bool) -> Result<ReplaceOutcome<Voucher>>;

    /// Takes the place of the voucher with the same id. Its shop, its kind and its place on the shelf stay.
    async fn edit_voucher(&self, voucher: &Voucher) -> Result<ReplaceOutcome<Voucher>>;

    async fn voucher(&self, id: VoucherId) -> Result<Option<Voucher>>;

    /// A shop's vouchers, newest first, at most 100 of them.
    async fn vouchers_of(&self, shop: ShopId) -> Result<Vec<Voucher>>;
}
