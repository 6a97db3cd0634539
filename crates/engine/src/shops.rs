//! Shops and their vouchers, as visitors see them and as an operator edits them.

use std::sync::Arc;

use stampede_cache::Stats;
use stampede_core::ports::{CreateOutcome, ReplaceOutcome, ShopFilter, ShopPage};
use stampede_core::{Code, NewShop, NewVoucher, Shop, ShopId, ShopType, Voucher, VoucherId};

use crate::audit::Outcome;
use crate::engine::Engine;
use crate::error::Error;

impl Engine {
    pub async fn shop_types(&self) -> Result<Arc<Vec<ShopType>>, Error> {
        self.catalogue_cache.types().await
    }

    pub async fn shops(&self, filter: &ShopFilter) -> Result<ShopPage, Error> {
        Ok(self.stores.catalogue.shops(filter).await?)
    }

    pub async fn shop(&self, id: ShopId) -> Result<Arc<Shop>, Error> {
        self.catalogue_cache.shop(id).await
    }

    /// The shop's vouchers that are shown to visitors.
    pub async fn vouchers_of(&self, shop: ShopId) -> Result<Vec<Voucher>, Error> {
        Ok(self.catalogue_cache.vouchers_of(shop).await?.iter().filter(|voucher| voucher.on_shelf).cloned().collect())
    }

    /// The shop's vouchers for an administrator: all of them, as they are now.
    pub async fn all_vouchers_of(&self, shop: ShopId) -> Result<Vec<Voucher>, Error> {
        self.stores.catalogue.shop(shop).await?.ok_or(Error::Plain(Code::NoSuchShop))?;
        Ok(self.stores.catalogue.vouchers_of(shop).await?)
    }

    /// What the caches have done so far, by their names.
    pub fn cache_stats(&self) -> impl IntoIterator<Item = (&str, Stats)> {
        self.catalogue_cache.stats()
    }

    pub async fn create_shop(&self, new: NewShop) -> Result<Shop, Error> {
        new.check().map_err(Error::Invalid)?;
        let id = self.next_id(ShopId::new)?;
        let shop = Shop { id, type_id: new.type_id, name: new.name, address: new.address };
        let (catalogue, new) = (self.stores.catalogue.clone(), shop.clone());
        match self.catalogue_cache.shops.create(&id, async move { catalogue.create_shop(&new).await }).await? {
            CreateOutcome::Created => Ok(shop),
            CreateOutcome::ParentMissing => Err(Error::Plain(Code::NoSuchShopType)),
            CreateOutcome::AlreadyExists => Err(Error::Plain(Code::Internal)),
        }
    }

    pub async fn create_voucher(&self, new: NewVoucher) -> Result<Voucher, Error> {
        let voucher = new.check(self.next_id(VoucherId::new)?).map_err(Error::Invalid)?;
        let (catalogue, new) = (self.stores.catalogue.clone(), voucher.clone());
        let creating = async move { catalogue.create_voucher(&new).await };
        match self.catalogue_cache.vouchers.update(&voucher.shop, creating).await? {
            CreateOutcome::Created => Ok(voucher),
            CreateOutcome::ParentMissing => Err(Error::Plain(Code::NoSuchShop)),
            CreateOutcome::AlreadyExists => Err(Error::Plain(Code::Internal)),
        }
    }

    pub async fn edit_shop(&self, id: ShopId, new: NewShop) -> Result<Outcome<Shop>, Error> {
        new.check().map_err(Error::Invalid)?;
        let shop = Shop { id, type_id: new.type_id, name: new.name, address: new.address };
        let (catalogue, new) = (self.stores.catalogue.clone(), shop.clone());
        match self.catalogue_cache.shops.update(&id, async move { catalogue.edit_shop(&new).await }).await? {
            ReplaceOutcome::Done(before) => Ok(Outcome::edited(shop.clone(), &before, &shop)),
            ReplaceOutcome::NotFound => Err(Error::Plain(Code::NoSuchShop)),
            ReplaceOutcome::ParentMissing => Err(Error::Plain(Code::NoSuchShopType)),
        }
    }

    /// Its shop and kind stay; a sale that it has keeps the price that it began with.
    pub async fn edit_voucher(&self, id: VoucherId, new: NewVoucher) -> Result<Outcome<Voucher>, Error> {
        let held = self.voucher(id).await?;
        let voucher = new.check(id).map_err(Error::Invalid)?;
        if (voucher.shop, voucher.kind) != (held.shop, held.kind) {
            return Err(Error::Illegal("the shop and the kind of a voucher stay as they are".to_owned()));
        }
        let (catalogue, new) = (self.stores.catalogue.clone(), voucher.clone());
        let editing = async move { catalogue.edit_voucher(&new).await };
        replaced(self.catalogue_cache.vouchers.update(&voucher.shop, editing).await?, |before| Voucher {
            on_shelf: before.on_shelf,
            ..voucher
        })
    }

    /// Sets whether the voucher is shown to visitors. Its sale, if it has one, is not affected.
    pub async fn shelve(&self, id: VoucherId, on_shelf: bool) -> Result<Outcome<Voucher>, Error> {
        let (catalogue, shop) = (self.stores.catalogue.clone(), self.voucher(id).await?.shop);
        let shelving = async move { catalogue.shelve_voucher(id, on_shelf).await };
        replaced(self.catalogue_cache.vouchers.update(&shop, shelving).await?, |before| Voucher {
            on_shelf,
            ..before.clone()
        })
    }

    async fn voucher(&self, id: VoucherId) -> Result<Voucher, Error> {
        self.stores.catalogue.voucher(id).await?.ok_or(Error::Plain(Code::NoSuchVoucher))
    }
}

/// The voucher that came of replacing another, as the ledger had it in that transaction.
fn replaced(
    replaced: ReplaceOutcome<Voucher>,
    after: impl FnOnce(&Voucher) -> Voucher,
) -> Result<Outcome<Voucher>, Error> {
    match replaced {
        ReplaceOutcome::Done(before) => {
            let after = after(&before);
            Ok(Outcome::edited(after.clone(), &before, &after))
        }
        ReplaceOutcome::NotFound | ReplaceOutcome::ParentMissing => Err(Error::Plain(Code::NoSuchVoucher)),
    }
}
