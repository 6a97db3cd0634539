//! The part of the suite about shops and vouchers.

use stampede_core::ports::Stores;
use stampede_core::ports::{CreateOutcome, ReplaceOutcome, ShopFilter};
use stampede_core::*;

pub async fn shops_are_searched_and_edited(stores: &Stores) {
    let catalogue = &stores.catalogue;
    let types = catalogue.shop_types().await.unwrap();
    assert!(types.len() >= 2);
    let shop = |n, kind: usize, name: &str| Shop {
        id: ShopId::new(n).unwrap(),
        type_id: types[kind].id,
        name: name.into(),
        address: "a".into(),
    };
    let all = [shop(1, 0, "Tea 100%"), shop(2, 0, "tea_house"), shop(3, 1, "TEA!"), shop(4, 1, "茶馆")];
    for one in &all {
        assert_eq!(catalogue.create_shop(one).await.unwrap(), CreateOutcome::Created);
    }
    let find = async |type_id: Option<usize>, name: Option<&str>, before: Option<i64>, limit| {
        let filter = ShopFilter {
            type_id: type_id.map(|kind| types[kind].id),
            name: name.map(str::to_owned),
            before: before.map(|id| ShopId::new(id).unwrap()),
            limit,
        };
        let found = catalogue.shops(&filter).await.unwrap();
        assert_eq!(found.next, found.shops.last().filter(|_| found.shops.len() == limit as usize).map(|shop| shop.id));
        found.shops.iter().map(|shop| shop.id.get()).collect::<Vec<_>>()
    };
    assert_eq!(find(None, None, None, 10).await, [4, 3, 2, 1]);
    assert_eq!(find(None, None, Some(4), 2).await, [3, 2]);
    assert_eq!(find(Some(0), None, None, 10).await, [2, 1]);
    assert_eq!(find(None, Some("tea"), None, 10).await, [3, 2, 1]);
    assert_eq!(find(Some(1), Some("tea"), None, 10).await, [3]);
    for (text, id) in [("%", 1), ("_", 2), ("!", 3), ("茶", 4)] {
        assert_eq!(find(None, Some(text), None, 10).await, [id], "{text} means only itself");
    }
    assert!(find(None, Some("' OR 1=1 --"), None, 10).await.is_empty());
    for (text, ids) in
        [("TEA", vec![3, 2, 1]), ("ea", vec![3, 2, 1]), ("茶馆", vec![4]), ("a 100", vec![1]), ("a 10 ", vec![])]
    {
        assert_eq!(find(None, Some(text), None, 10).await, ids, "{text}");
    }
    assert_eq!(find(None, Some("tea"), Some(3), 1).await, [2]);

    let edited = Shop { name: "Coffee".into(), type_id: types[1].id, ..all[0].clone() };
    assert_eq!(catalogue.edit_shop(&edited).await.unwrap(), ReplaceOutcome::Done(all[0].clone()));
    assert_eq!(catalogue.shop(edited.id).await.unwrap(), Some(edited.clone()));
    assert_eq!(find(None, Some("coffee"), None, 10).await, [1]);
    assert_eq!(find(None, Some("tea"), None, 10).await, [3, 2], "found by its new name alone");
    assert_eq!(catalogue.edit_shop(&shop(9, 0, "x")).await.unwrap(), ReplaceOutcome::NotFound);
    let nowhere = Shop { type_id: ShopTypeId::new(404).unwrap(), ..edited.clone() };
    assert_eq!(catalogue.edit_shop(&nowhere).await.unwrap(), ReplaceOutcome::ParentMissing);

    let voucher = |n, title: &str, on_shelf| Voucher {
        id: VoucherId::new(n).unwrap(),
        shop: edited.id,
        kind: VoucherKind::Ordinary,
        title: title.into(),
        subtitle: "s".into(),
        rules: "r".into(),
        price: Money::from_cents(1).unwrap(),
        worth: Money::from_cents(2).unwrap(),
        on_shelf,
    };
    for one in [voucher(1, "one", true), voucher(2, "two", true)] {
        assert_eq!(catalogue.create_voucher(&one).await.unwrap(), CreateOutcome::Created);
    }
    let shelved = catalogue.shelve_voucher(VoucherId::new(2).unwrap(), false).await.unwrap();
    assert_eq!(shelved, ReplaceOutcome::Done(voucher(2, "two", true)));
    assert_eq!(catalogue.shelve_voucher(VoucherId::new(3).unwrap(), false).await.unwrap(), ReplaceOutcome::NotFound);
    let replaced = catalogue.edit_voucher(&voucher(2, "zwei", true)).await.unwrap();
    assert_eq!(replaced, ReplaceOutcome::Done(voucher(2, "two", false)));
    assert_eq!(catalogue.edit_voucher(&voucher(3, "x", true)).await.unwrap(), ReplaceOutcome::NotFound);
    let listed = catalogue.vouchers_of(edited.id).await.unwrap();
    assert_eq!(listed, [voucher(2, "zwei", false), voucher(1, "one", true)]);
}

/// A thousand shops have every n-gram of the search text but not the whole text: the page ends early and contains where to continue.
pub async fn search_reads_a_bounded_number_of_shops(stores: &Stores) {
    let catalogue = &stores.catalogue;
    let type_id = catalogue.shop_types().await.unwrap()[0].id;
    let create = async |n: i64, name: &str| {
        let shop = Shop { id: ShopId::new(n).unwrap(), type_id, name: name.into(), address: String::new() };
        assert_eq!(catalogue.create_shop(&shop).await.unwrap(), CreateOutcome::Created);
    };
    create(1, "abcd").await;
    for n in 2..1010 {
        create(n, "bcd abc").await;
    }
    let (mut found, mut pages, mut before) = (Vec::new(), 0, None);
    loop {
        let filter = ShopFilter { name: Some("ABCD".into()), before, limit: 10, ..ShopFilter::default() };
        let page = catalogue.shops(&filter).await.unwrap();
        found.extend(page.shops.iter().map(|shop| shop.id.get()));
        pages += 1;
        match page.next {
            Some(next) => before = Some(next),
            None => break,
        }
    }
    assert_eq!((found, pages), (vec![1], 2));
}

/// Everything that a filter or a warm-up reads: all ids, each once, and the shops whose sales are not over.
pub async fn ids_are_read_in_pages(stores: &Stores) {
    let (catalogue, ledger) = (&stores.catalogue, &stores.ledger);
    let sale = super::sale_of(stores, 5).await;
    let shop = catalogue.shop(ShopId::new(1).unwrap()).await.unwrap().unwrap();
    for n in 2..=7 {
        let shop = Shop { id: ShopId::new(n * n).unwrap(), ..shop.clone() };
        assert_eq!(catalogue.create_shop(&shop).await.unwrap(), CreateOutcome::Created);
    }
    let (mut seen, mut after) = (Vec::new(), None);
    loop {
        let page = catalogue.shop_ids(after, 3).await.unwrap();
        assert!(page.len() <= 3);
        let Some(last) = page.last() else { break };
        after = Some(*last);
        seen.extend(page.iter().map(|id| id.get()));
    }
    assert_eq!(seen, [1, 4, 9, 16, 25, 36, 49]);

    let other = super::own_orders::another_sale(stores, 1).await;
    assert_eq!(ledger.sale_ids(None, 10).await.unwrap(), [sale, other]);
    assert_eq!(ledger.sale_ids(Some(sale), 10).await.unwrap(), [other]);
    assert_eq!(ledger.sale_ids(None, 1).await.unwrap(), [sale]);
    let end = ledger.sale(sale).await.unwrap().unwrap().window.end;
    assert_eq!(catalogue.shops_with_sales(super::NOW, 10).await.unwrap(), [shop.id], "once");
    assert_eq!(catalogue.shops_with_sales(super::NOW, 0).await.unwrap(), []);
    assert_eq!(catalogue.shops_with_sales(end, 10).await.unwrap(), []);
}
