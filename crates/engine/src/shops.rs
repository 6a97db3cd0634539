//! Shops and their vouchers, as visitors see them and as an operator edits them.

use stampede_core::ports::{Created, Replaced, ShopFilter};
use stampede_core::{Code, NewShop, NewVoucher, Shop, ShopId, ShopType, Voucher, VoucherId};

use crate::engine::Engine;
use crate::error::Error;

impl Engine {
    pub async fn shop_types(&self) -> Result<Vec<ShopType>, Error> {
        Ok(self.stores.catalogue.shop_types().await?)
    }

    pub async fn shops(&self, filter: &ShopFilter) -> Result<Vec<Shop>, Error> {
        Ok(self.stores.catalogue.shops(filter).await?)
    }

    pub async fn shop(&self, id: ShopId) -> Result<Shop, Error> {
        self.stores.catalogue.shop(id).await?.ok_or(Error::Plain(Code::NoSuchShop))
    }

    /// The shop's vouchers; visitors see those on the shelf.
    pub async fn vouchers_of(&self, shop: ShopId, only_on_shelf: bool) -> Result<Vec<Voucher>, Error> {
        self.shop(shop).await?;
        let mut vouchers = self.stores.catalogue.vouchers_of(shop).await?;
        vouchers.retain(|voucher| voucher.on_shelf || !only_on_shelf);
        Ok(vouchers)
    }

    pub async fn create_shop(&self, new: NewShop) -> Result<Shop, Error> {
        new.check().map_err(Error::Invalid)?;
        let id = self.next_id(ShopId::new)?;
        let shop = Shop { id, type_id: new.type_id, name: new.name, address: new.address };
        match self.stores.catalogue.create_shop(&shop).await? {
            Created::Done => Ok(shop),
            Created::NoParent => Err(Error::Plain(Code::NoSuchShopType)),
            Created::Exists => Err(Error::Plain(Code::Internal)),
        }
    }

    pub async fn create_voucher(&self, new: NewVoucher) -> Result<Voucher, Error> {
        let voucher = new.check(self.next_id(VoucherId::new)?).map_err(Error::Invalid)?;
        match self.stores.catalogue.create_voucher(&voucher).await? {
            Created::Done => Ok(voucher),
            Created::NoParent => Err(Error::Plain(Code::NoSuchShop)),
            Created::Exists => Err(Error::Plain(Code::Internal)),
        }
    }

    pub async fn edit_shop(&self, id: ShopId, new: NewShop) -> Result<Shop, Error> {
        new.check().map_err(Error::Invalid)?;
        let shop = Shop { id, type_id: new.type_id, name: new.name, address: new.address };
        match self.stores.catalogue.edit_shop(&shop).await? {
            Replaced::Done => Ok(shop),
            Replaced::NoSuch => Err(Error::Plain(Code::NoSuchShop)),
            Replaced::NoParent => Err(Error::Plain(Code::NoSuchShopType)),
        }
    }

    /// Its shop and kind stay; a sale that it has keeps the price that it began with.
    pub async fn edit_voucher(&self, id: VoucherId, new: NewVoucher) -> Result<Voucher, Error> {
        let held = self.voucher(id).await?;
        let voucher = new.check(id).map_err(Error::Invalid)?;
        if (voucher.shop, voucher.kind) != (held.shop, held.kind) {
            return Err(Error::Plain(Code::IllegalStep));
        }
        match self.stores.catalogue.edit_voucher(&voucher).await? {
            Replaced::Done => self.voucher(id).await,
            Replaced::NoSuch | Replaced::NoParent => Err(Error::Plain(Code::NoSuchVoucher)),
        }
    }

    /// Puts the voucher on the shelf or takes it off. Its sale, if it has one, goes on: pause or end that.
    pub async fn shelve(&self, id: VoucherId, on_shelf: bool) -> Result<Voucher, Error> {
        match self.stores.catalogue.shelve_voucher(id, on_shelf).await? {
            Replaced::Done => self.voucher(id).await,
            Replaced::NoSuch | Replaced::NoParent => Err(Error::Plain(Code::NoSuchVoucher)),
        }
    }

    async fn voucher(&self, id: VoucherId) -> Result<Voucher, Error> {
        self.stores.catalogue.voucher(id).await?.ok_or(Error::Plain(Code::NoSuchVoucher))
    }
}
