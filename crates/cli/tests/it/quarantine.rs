//! An order that the database rejects goes into quarantine; an outage of the database quarantines nothing.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use sqlx::{AssertSqlSafe, Connection as _, raw_sql};
use stampede_core::ports::{Admitted, QuarantinedOrder, RecordOutcome};
use stampede_core::{Epoch, OrderId, SaleId, Timestamp, UserId};
use stampede_proof::history::Response;
use stampede_proof::recorder::Recorder;
use stampede_testkit::{Reply, until};

use crate::outage::spawn_buyers_on;
use crate::proof::{parse_json, stampede};
use crate::shop::{Buyer, Kind, Shop, Storage, TOKEN, command, ledger, verify};

/// Runs a statement in the server's database.
pub async fn execute(kind: Kind, storage: &Storage, sql: &str) {
    let (url, sql) = (storage.url(), AssertSqlSafe(sql.to_owned()));
    match kind {
        Kind::Sqlite => {
            let mut connection = sqlx::SqliteConnection::connect(&url).await.unwrap();
            raw_sql(sql).execute(&mut connection).await.unwrap();
        }
        Kind::MariaDb => {
            let mut connection = sqlx::MySqlConnection::connect(&url).await.unwrap();
            raw_sql(sql).execute(&mut connection).await.unwrap();
        }
        Kind::Postgres => {
            let mut connection = sqlx::PgConnection::connect(&url).await.unwrap();
            raw_sql(sql).execute(&mut connection).await.unwrap();
        }
    }
}

/// Makes the database reject the orders of these users with a data error.
pub fn reject_orders_of(kind: Kind, users: &[UserId]) -> String {
    let users = users.iter().map(UserId::to_string).collect::<Vec<_>>().join(", ");
    match kind {
        Kind::Sqlite => format!(
            "CREATE TRIGGER rejecting BEFORE INSERT ON orders WHEN NEW.user_id IN ({users}) AND NEW.live = 1
             BEGIN SELECT RAISE(ABORT, 'rejected on purpose'); END"
        ),
        Kind::MariaDb => format!(
            "CREATE TRIGGER rejecting BEFORE INSERT ON orders FOR EACH ROW
             IF NEW.user_id IN ({users}) AND NEW.live = 1 THEN
                 SIGNAL SQLSTATE '22000' SET MESSAGE_TEXT = 'rejected on purpose'; END IF"
        ),
        Kind::Postgres => format!(
            "CREATE FUNCTION rejecting() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
                 RAISE EXCEPTION 'rejected on purpose' USING ERRCODE = '22000'; END $$;
             CREATE TRIGGER rejecting BEFORE INSERT ON orders FOR EACH ROW
             WHEN (NEW.user_id IN ({users}) AND NEW.live = 1) EXECUTE FUNCTION rejecting()"
        ),
    }
}

pub fn accept_orders_again(kind: Kind) -> &'static str {
    if kind == Kind::Postgres { "DROP TRIGGER rejecting ON orders" } else { "DROP TRIGGER rejecting" }
}

pub async fn buy(shop: &Shop, sale: impl std::fmt::Display, buyer: &Buyer) -> Reply {
    shop.client().await.post(&format!("/v1/sales/{sale}/orders"), &buyer.token, &Value::Null).await.unwrap()
}

pub async fn quarantine(shop: &Shop) -> Vec<Value> {
    let list = shop.client().await.get("/admin/v1/quarantine", TOKEN).await.unwrap();
    assert_eq!(list.status, 200);
    list.json()["orders"].as_array().unwrap().clone()
}

/// How many orders of a sale are in quarantine, as it is shown beside its marks.
pub async fn quarantined_in(shop: &Shop, sale: SaleId) -> Option<u64> {
    let gate = shop.client().await.get(&format!("/admin/v1/sales/{sale}/gate"), TOKEN).await.unwrap();
    gate.json()["quarantined"].as_u64()
}

/// Runs `stampede quarantine` and returns whether it succeeded and what it printed.
pub fn quarantine_command(shop: &Shop, arguments: &[&str]) -> (bool, String) {
    let target = format!("http://{}", shop.address);
    let mut command = Command::new(env!("CARGO_BIN_EXE_stampede"));
    command.arg("quarantine").args(arguments).args(["--target", &target]).env("STAMPEDE_ADMIN_TOKEN", TOKEN);
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8(text).unwrap())
}

async fn until_quarantined(shop: &Shop) -> String {
    until("an order is in quarantine", async || !quarantine(shop).await.is_empty()).await;
    quarantine(shop).await[0]["id"].as_str().unwrap().to_owned()
}

fn open(storage: &Storage) -> Shop {
    let mut command = command(storage);
    command.env("STAMPEDE__BUY__QUARANTINE_AFTER_MS", "1000").env("STAMPEDE__LOG__LEVEL", "off");
    Shop::run(command)
}

async fn rejected_order_can_be_retried_and_discarded(kind: Kind) {
    let storage = Storage::on(kind);
    let shop = open(&storage);
    let buyers = shop.log_in(0, 4).await;
    let sale = shop.create_sale(3).await;
    execute(kind, &storage, &reject_orders_of(kind, &[buyers[0].id])).await;
    let rejected = buy(&shop, sale, &buyers[0]).await;
    assert_eq!((rejected.status.as_u16(), rejected.text("code").as_str()), (503, "outcome_unknown"));
    assert_eq!(buy(&shop, sale, &buyers[1]).await.status, 201, "other orders are recorded");
    let id = until_quarantined(&shop).await;
    let one = shop.client().await.get(&format!("/admin/v1/quarantine/{id}"), TOKEN).await.unwrap();
    assert_eq!(one.text("user_id"), buyers[0].id.to_string());
    assert_eq!(one.text("error").matches("rejected on purpose").count(), 1, "{:?}", one.body);
    assert_eq!(quarantined_in(&shop, sale).await, Some(1));

    // Still rejected: the error is shown, and nothing has changed.
    let retry = format!("quarantine/{id}/retry");
    let failed = shop.admin(&retry, &Value::Null).await;
    assert_eq!((failed.status.as_u16(), failed.text("code").as_str()), (409, "not_recordable"));
    assert!(failed.text("detail").contains("rejected on purpose"), "{:?}", failed.body);
    assert_eq!(quarantine(&shop).await.len(), 1);
    let (listed, text) = quarantine_command(&shop, &["list"]);
    assert!(listed && text.contains(&id) && text.contains("1 order(s) in quarantine"), "{text}");
    let (shown, text) = quarantine_command(&shop, &["show", &id]);
    assert!(shown && text.contains("rejected on purpose"), "{text}");
    let (retried, text) = quarantine_command(&shop, &["retry", &id]);
    assert!(!retried && text.contains("stays in quarantine") && text.contains("rejected on purpose"), "{text}");

    execute(kind, &storage, accept_orders_again(kind)).await;
    let retried = shop.admin(&retry, &Value::Null).await;
    assert_eq!((retried.status.as_u16(), retried.text("outcome").as_str()), (200, "recorded"));
    assert_eq!(shop.admin(&retry, &Value::Null).await.text("code"), "no_such_order", "once");
    assert_eq!(quarantined_in(&shop, sale).await, Some(0));
    let mine = buy(&shop, sale, &buyers[0]).await;
    assert_eq!((mine.status.as_u16(), mine.text("id")), (200, id));

    if kind == Kind::Postgres {
        execute(kind, &storage, "DROP FUNCTION rejecting").await;
    }
    execute(kind, &storage, &reject_orders_of(kind, &[buyers[2].id])).await;
    assert_eq!(buy(&shop, sale, &buyers[2]).await.status, 503);
    let id = until_quarantined(&shop).await;
    assert_eq!(buy(&shop, sale, &buyers[3]).await.text("code"), "sold_out", "its stock stays taken");
    let (discarded, text) = quarantine_command(&shop, &["discard", &id]);
    assert!(discarded && text.contains("rejected"), "{text}");
    let again = shop.admin(&format!("quarantine/{id}/discard"), &Value::Null).await;
    assert_eq!(again.text("code"), "no_such_order");
    until("the stock is returned", async || buy(&shop, sale, &buyers[3]).await.status == 201).await;
    let audit = shop.client().await.get("/admin/v1/audit", TOKEN).await.unwrap();
    for action in ["retry_quarantined", "discard_quarantined"] {
        assert!(String::from_utf8_lossy(&audit.body).contains(action), "{action} is on record");
    }
    let loaded = ledger(&storage).await.ledger.load(sale).await.unwrap().unwrap();
    assert_eq!((loaded.sale.sold, loaded.marks.len()), (3, 3));
    assert!(shop.stop().success());
}

/// A unique index that was added by hand rejects the orders of one buyer: the others are sold.
async fn index_added_by_hand_rejects_one_order(kind: Kind) {
    let storage = Storage::on(kind);
    let shop = open(&storage);
    let buyers = shop.log_in(0, 4).await;
    let (earlier, sale) = (shop.create_sale(4).await, shop.create_sale(4).await);
    assert_eq!(buy(&shop, earlier, &buyers[0]).await.status, 201);
    execute(kind, &storage, "CREATE UNIQUE INDEX by_hand ON orders (user_id)").await;
    let rejected = buy(&shop, sale, &buyers[0]).await;
    assert_eq!((rejected.status.as_u16(), rejected.text("code").as_str()), (503, "outcome_unknown"));
    for buyer in &buyers[1..] {
        assert_eq!(buy(&shop, sale, buyer).await.status, 201, "other orders are recorded");
    }
    let id = until_quarantined(&shop).await;
    let retry = format!("quarantine/{id}/retry");
    assert_eq!(shop.admin(&retry, &Value::Null).await.text("code"), "not_recordable");
    let drop = if kind == Kind::MariaDb { "DROP INDEX by_hand ON orders" } else { "DROP INDEX by_hand" };
    execute(kind, &storage, drop).await;
    assert_eq!(shop.admin(&retry, &Value::Null).await.text("outcome"), "recorded");
    let loaded = ledger(&storage).await.ledger.load(sale).await.unwrap().unwrap();
    assert_eq!((loaded.sale.sold, loaded.marks.len()), (4, 4));
    assert!(shop.stop().success());
}

on_each_database!(rejected_order_can_be_retried_and_discarded, index_added_by_hand_rejects_one_order);

/// Without the database, the quarantine is read through the routes, in pages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_through_the_routes_names_quarantined_orders() {
    let storage = Storage::on(Kind::Sqlite);
    let shop = open(&storage);
    let (sale, others) = (shop.create_sale(200).await, shop.create_sale(1).await);
    let buyer = shop.log_in(0, 1).await.remove(0);
    assert_eq!(buy(&shop, sale, &buyer).await.status, 201);
    assert!(shop.stop().success());
    let stores = ledger(&storage).await;
    for n in 1..=120 {
        let admitted = Admitted {
            order: OrderId::new(n).unwrap(),
            user: UserId::new(n).unwrap(),
            seq: n,
            at: Timestamp::from_ms(1_800_000_000_000),
        };
        let item =
            QuarantinedOrder { sale, epoch: Epoch(1), admitted, error: "odd".to_owned(), quarantined_at: admitted.at };
        assert_eq!(stores.ledger.quarantine(&item).await.unwrap(), RecordOutcome::Quarantined);
    }
    stores.ledger.close().await;

    let shop = open(&storage);
    let mut check = stampede(&["check", "--json", "--target", &format!("http://{}", shop.address)]);
    check.env("STAMPEDE_ADMIN_TOKEN", TOKEN);
    let output = tokio::task::spawn_blocking(move || check.output().unwrap()).await.unwrap();
    assert_eq!(output.status.code(), Some(1));
    let checks = parse_json(&output)["checks"].as_array().unwrap().clone();
    let failed: Vec<&Value> = checks.iter().filter(|line| line["result"] == "failed").collect();
    assert_eq!(failed.len(), 1, "{failed:#?}");
    let text = failed[0].to_string();
    assert_eq!(failed[0]["invariant"], 11, "{text}");
    assert!(text.contains("of user 120 is in quarantine") && !text.contains(&format!("sale {others}")), "{text}");
}

/// Every insert of an order fails with an error that is in no list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unlisted_database_error_does_not_quarantine_orders() {
    let kind = Kind::MariaDb;
    let server = kind.own_server();
    let storage = Storage::with(Some(kind.create_database(&server, server.port())));
    // With the default times until quarantine and until a response.
    let mut command = command(&storage);
    command.env("STAMPEDE__LOG__LEVEL", "off");
    let shop = Shop::run(command);
    let buyers = shop.log_in(0, 21).await;
    let sale = shop.create_sale(20).await;
    // As if the server could prepare no statement. The setting itself does not concern statements that are prepared already.
    let fail = "CREATE TRIGGER fail BEFORE INSERT ON orders FOR EACH ROW
        SIGNAL SQLSTATE 'HY000' SET MYSQL_ERRNO = 1461, MESSAGE_TEXT = 'too many prepared statements'";
    execute(kind, &storage, fail).await;
    let history = Arc::new(Recorder::default());
    let tasks = spawn_buyers_on(&[&shop], sale, &buyers[..20], &history, Duration::ZERO);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(history.ended().iter().filter(|attempt| attempt.response != Response::Unknown).count(), 0);
    execute(kind, &storage, "DROP TRIGGER fail").await;
    for task in tasks {
        task.await.unwrap();
    }
    assert_eq!(quarantine(&shop).await, Vec::<Value>::new());
    let refused = history.buy(&mut shop.client().await, sale, &buyers[20]).await;
    assert_eq!(refused.response, Response::SoldOut);
    assert_eq!(verify(&history, &storage, &[&shop], sale).await, 20);
    assert!(shop.stop().success());
}
